//! Estimates what no provider said: the tokens of answers that were aborted, broke, or came
//! without usage.
//!
//! Not on the call's path. A call keeps its answer's bytes ([`Kept`], some pointers a chunk) and
//! drops them at its end, unless the usage is not complete: then they go to a thread that has a
//! [`Tokenizer`] loaded, or loads one.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Basis, Usage};
use crate::policy::routing::Route;
use crate::policy::tap::{Encoding, Framing, answer_text};

/// Bytes of an answer that are kept; what comes after them is taken to be like them.
const KEPT_BYTES: usize = 4 << 20;
/// Bytes of text that are counted; what comes after them is taken to be like them.
const COUNTED_BYTES: usize = 1 << 20;
/// What the tokeniser is given at once. Its regular expressions fail on long runs of blanks.
const PIECE_BYTES: usize = 16 << 10;
/// Where nothing is known but a length. English text and code have between three and four.
const BYTES_IN_TOKEN: u64 = 4;
/// A picture, a sound or a file within a request. Providers count a picture as anything between
/// 85 and 1,600 tokens.
const MEDIA_TOKENS: u64 = 1000;
/// What frames a message, by OpenAI's cookbook (*How to count tokens*).
const MESSAGE_TOKENS: u64 = 4;

/// The bytes of an answer as they came, up to a limit.
#[derive(Clone, Debug)]
pub struct Kept {
    route: Route,
    framing: Framing,
    encoding: Encoding,
    chunks: Vec<Bytes>,
    bytes: usize,
    /// So many more came.
    beyond: u64,
}

impl Kept {
    /// For an answer whose head has come.
    pub fn new(route: Route, framing: Framing, encoding: Encoding) -> Self {
        Self {
            route,
            framing,
            encoding,
            chunks: Vec::new(),
            bytes: 0,
            beyond: 0,
        }
    }

    /// Takes the next chunk as it came from upstream. It is shared, not copied: it should be no
    /// slice of a larger buffer.
    pub fn push(&mut self, chunk: &Bytes) {
        if self.has_no_text() {
            return;
        }
        // Nothing is kept behind a hole.
        if self.beyond == 0 && self.bytes + chunk.len() <= KEPT_BYTES {
            self.bytes += chunk.len();
            self.chunks.push(chunk.clone());
        } else {
            self.beyond += chunk.len() as u64;
        }
    }

    fn has_no_text(&self) -> bool {
        matches!(self.route, Route::Embeddings | Route::OllamaEmbed)
            || self.framing == Framing::Opaque
    }

    /// So many bytes are kept.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn tokens(&self, tokenizer: &impl CountTokens) -> u64 {
        let chunks = self.chunks.iter().map(|chunk| &chunk[..]);
        let text = answer_text(
            self.route,
            self.framing,
            self.encoding,
            chunks,
            COUNTED_BYTES,
        );
        let tokens = tokenizer.count(&text);
        if self.beyond == 0 || self.bytes == 0 {
            return tokens;
        }
        let whole = self.bytes as u64 + self.beyond;
        in_proportion(tokens, whole, self.bytes as u64)
    }
}

/// What is left of a request.
#[derive(Clone, Debug)]
pub enum Request {
    /// Its decoded body.
    Body(Bytes),
    /// No more than how many bytes it had.
    Length(u64),
}

impl Request {
    fn tokens(&self, tokenizer: &impl CountTokens) -> u64 {
        match self {
            Self::Length(bytes) => bytes.div_ceil(BYTES_IN_TOKEN),
            Self::Body(body) => {
                let mut prompt = Prompt::default();
                let mut json = serde_json::Deserializer::from_slice(body);
                // What cannot be read any further has counted as far as it goes.
                let _ = Walk::over(&mut prompt).deserialize(&mut json);
                let mut tokens = tokenizer.count(&prompt.text);
                if prompt.beyond > 0 {
                    let counted = prompt.text.len() as u64;
                    tokens = in_proportion(tokens, counted + prompt.beyond, counted);
                }
                tokens
                    + prompt.tokens
                    + prompt.media * MEDIA_TOKENS
                    + prompt.messages * MESSAGE_TOKENS
            }
        }
    }
}

fn in_proportion(tokens: u64, whole: u64, part: u64) -> u64 {
    let tokens = u128::from(tokens) * u128::from(whole) / u128::from(part.max(1));
    u64::try_from(tokens).unwrap_or(u64::MAX)
}

/// Fills in what a call's usage lacks; what the provider said stays.
///
/// For calls whose status was a success. Cached input is not guessed at: input that no provider
/// spoke of counts as fresh.
pub fn estimate(
    said: Option<Usage>,
    request: &Request,
    answer: &Kept,
    tokenizer: &impl CountTokens,
) -> Usage {
    let said = said.unwrap_or_default();
    if said.is_complete() {
        return said;
    }
    Usage {
        input: said.input.or_else(|| Some(request.tokens(tokenizer))),
        output: said.output.or_else(|| Some(answer.tokens(tokenizer))),
        basis: Basis::Estimated,
        ..said
    }
}

/// Counts the tokens of a text.
pub trait CountTokens {
    /// How many they are, or may be.
    fn count(&self, text: &str) -> u64;
}

/// Counts nothing but bytes, where there is no time for a [`Tokenizer`].
#[derive(Clone, Copy, Debug)]
pub struct ByLength;

impl CountTokens for ByLength {
    fn count(&self, text: &str) -> u64 {
        (text.len() as u64).div_ceil(BYTES_IN_TOKEN)
    }
}

impl CountTokens for Tokenizer {
    /// Names of special tokens are text too.
    fn count(&self, text: &str) -> u64 {
        let mut rest = text;
        let mut tokens = 0;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
            tokens += self.0.count_ordinary(piece) as u64;
            rest = after;
        }
        tokens
    }
}

/// Counts tokens as GPT-4o and GPT-5 do (`o200k_base`); other models' tokens are near to these,
/// Claude's some more.
///
/// Loading takes a tenth of a second and 46 MB, so it is left until the first estimate. It is to
/// be kept then: dropping it gives its memory to the allocator, which keeps most of it.
pub struct Tokenizer(tiktoken_rs::CoreBPE);

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tokenizer")
    }
}

impl Tokenizer {
    /// Loads the vocabulary, which is part of the program.
    ///
    /// # Errors
    /// It is damaged, which the tests exclude.
    pub fn load() -> Result<Self, VocabularyDamaged> {
        tiktoken_rs::o200k_base()
            .map(Self)
            .map_err(|_| VocabularyDamaged)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tokeniser's vocabulary cannot be read")]
pub struct VocabularyDamaged;

/// What of a request the model reads.
#[derive(Default)]
struct Prompt {
    text: String,
    /// Bytes of text past what is counted.
    beyond: u64,
    /// A prompt may come as a list of tokens.
    tokens: u64,
    media: u64,
    messages: u64,
}

impl Prompt {
    fn add(&mut self, text: &str) {
        if text.starts_with("data:") {
            self.media += 1;
        } else if self.text.len() + text.len() > COUNTED_BYTES {
            self.beyond += text.len() as u64;
        } else {
            self.text.push_str(text);
            self.text.push('\n');
        }
    }
}

/// Walks through a whole request: prompts, messages and tool descriptions have text anywhere, and
/// settings have little.
struct Walk<'p> {
    prompt: &'p mut Prompt,
    /// The value stands in a list.
    in_list: bool,
}

impl<'p> Walk<'p> {
    fn over(prompt: &'p mut Prompt) -> Self {
        Self {
            prompt,
            in_list: false,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        self.prompt.tokens += u64::from(self.in_list);
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.prompt.add(text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut item = || {
            list.next_element_seed(Walk {
                prompt: self.prompt,
                in_list: true,
            })
        };
        while item()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(name) = members.next_key::<Cow<'de, str>>()? {
            match &*name {
                "role" => {
                    self.prompt.messages += 1;
                    members.next_value::<IgnoredAny>()?;
                }
                // Names, not read by the model, and Anthropic's and OpenAI's places for bytes.
                "model" | "id" | "type" | "tool_call_id" | "tool_use_id" | "call_id" | "user"
                | "metadata" | "signature" | "encrypted_content" | "media_type" | "detail"
                | "prompt_cache_key" | "safety_identifier" => {
                    members.next_value::<IgnoredAny>()?;
                }
                "data" | "file_data" | "images" | "url" | "file_id" => {
                    self.prompt.media += 1;
                    members.next_value::<IgnoredAny>()?;
                }
                // The names of a tool's parameters are read.
                _ => {
                    if !is_setting(&name) {
                        self.prompt.add(&name);
                    }
                    members.next_value_seed(Walk::over(self.prompt))?;
                }
            }
        }
        Ok(())
    }
}

fn is_setting(name: &str) -> bool {
    matches!(
        name,
        "messages"
            | "content"
            | "text"
            | "prompt"
            | "input"
            | "system"
            | "instructions"
            | "tools"
            | "function"
            | "tool_calls"
            | "image_url"
            | "input_audio"
            | "source"
            | "stream"
            | "stream_options"
            | "options"
            | "include_usage"
            | "temperature"
            | "top_p"
            | "n"
            | "max_tokens"
            | "max_completion_tokens"
            | "max_output_tokens"
            | "cache_control"
            | "store"
            | "seed"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    static TOKENIZER: LazyLock<Tokenizer> =
        LazyLock::new(|| Tokenizer::load().expect("the vocabulary is whole"));

    fn kept(route: Route, framing: Framing, body: &str) -> Kept {
        let mut kept = Kept::new(route, framing, Encoding::Identity);
        for chunk in body.as_bytes().chunks(100) {
            kept.push(&Bytes::copy_from_slice(chunk));
        }
        kept
    }

    fn stream(text: &str) -> Kept {
        let event = |word: &str| {
            let word = serde_json::to_string(word).expect("text");
            format!("data: {{\"choices\":[{{\"delta\":{{\"content\":{word}}}}}]}}\n\n")
        };
        let body: String = text.split_inclusive(' ').map(event).collect();
        kept(Route::ChatCompletions, Framing::Sse, &body)
    }

    fn request(body: &str) -> Request {
        Request::Body(Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn counts_as_the_reference_does() {
        // Counted with OpenAI's tiktoken for Python.
        for (text, tokens) in [
            ("", 0),
            ("hello world", 2),
            ("<|endoftext|>", 7),
            ("antidisestablishmentarianism", 6),
            ("Grüß dich 👋, 今日は!", 10),
            ("fn main() { println!(\"{}\", 1_000_000); }\n", 14),
        ] {
            assert_eq!(TOKENIZER.count(text), tokens, "{text:?}");
        }
    }

    #[test]
    fn long_runs_of_one_thing_are_counted() {
        for one in [" ", "a", "=", "\n", "今", "0", "👋", "\t"] {
            let text = one.repeat(300_000 / one.len());
            let tokens = TOKENIZER.count(&text);
            assert!((1000..=300_000).contains(&tokens), "{one:?}: {tokens}");
        }
    }

    /// The tokeniser's regular expressions run out of stack on a megabyte of blanks.
    #[test]
    fn a_run_of_blanks_before_a_word_is_counted() {
        for blank in [" ", "\t", "\n", " \n", "\r\n", "\u{a0}", "\u{3000}"] {
            let run = blank.repeat(PIECE_BYTES / blank.len() - 1);
            assert!(TOKENIZER.count(&format!("{run}x")) > 1, "{blank:?}");
        }
    }

    #[test]
    fn what_was_said_stays() {
        let said = Usage {
            input: Some(16),
            cached_input: Some(300),
            ..Usage::default()
        };
        let estimated = estimate(
            Some(said),
            &request("{}"),
            &stream("hello world"),
            &*TOKENIZER,
        );
        assert_eq!(
            estimated,
            Usage {
                output: Some(2),
                basis: Basis::Estimated,
                ..said
            }
        );
        let complete = Usage {
            output: Some(9),
            ..said
        };
        let kept = estimate(
            Some(complete),
            &request("{}"),
            &stream("hello world"),
            &*TOKENIZER,
        );
        assert_eq!(kept, complete);
    }

    #[test]
    fn by_length_it_is_about_the_same() {
        let text = stream("hello world, and all that is in it");
        assert_eq!(text.tokens(&*TOKENIZER), 9);
        assert_eq!(text.tokens(&ByLength), 9);
    }

    #[test]
    fn input_by_what_the_model_reads() {
        let input = |body: &str| request(body).tokens(&*TOKENIZER);
        let hello = input(
            r#"{"model":"a long name of a model","stream":true,"messages":[{"role":"user","content":"hello world"}]}"#,
        );
        // The text, its line end and the message's frame.
        assert_eq!(hello, 2 + 1 + MESSAGE_TOKENS);
        let picture = input(
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hello world"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"low"}}]}]}"#,
        );
        assert_eq!(picture, hello + MEDIA_TOKENS);
        assert_eq!(input(r#"{"input":[[1,2,3],[4,5]]}"#), 5);
        assert!(
            input(
                r#"{"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]}"#
            ) >= 4
        );
        // Cut short, it counts as far as it goes.
        assert_eq!(
            input(r#"{"messages":[{"role":"user","content":"hello world"},{"ro"#),
            hello
        );
        assert_eq!(Request::Length(4001).tokens(&*TOKENIZER), 1001);
    }

    #[test]
    fn past_the_limits_it_goes_on_in_proportion() {
        let words = "hello world ".repeat(COUNTED_BYTES / 6);
        let whole = request(&format!(
            r#"{{"prompt":["{}","{}"]}}"#,
            &words[..COUNTED_BYTES / 2],
            words
        ));
        let half = request(&format!(
            r#"{{"prompt":["{}"]}}"#,
            &words[..COUNTED_BYTES / 2]
        ));
        let (whole, half) = (whole.tokens(&*TOKENIZER), half.tokens(&*TOKENIZER));
        assert!(whole.abs_diff(half * 5) < half / 100, "{half} {whole}");

        let mut answer = stream("hello world");
        let bytes = answer.bytes as u64;
        answer.beyond = bytes * 9;
        assert_eq!(answer.tokens(&*TOKENIZER), 20);
    }

    #[test]
    fn what_is_kept_is_bounded_and_begins_at_the_beginning() {
        let mut answer = Kept::new(Route::ChatCompletions, Framing::Sse, Encoding::Identity);
        let chunk = Bytes::from(vec![b' '; 3 << 20]);
        answer.push(&chunk);
        answer.push(&chunk);
        answer.push(&Bytes::from_static(b" "));
        assert_eq!((answer.chunks.len(), answer.beyond), (1, (3 << 20) + 1));
    }

    #[test]
    fn embeddings_have_no_output() {
        let answer = kept(
            Route::Embeddings,
            Framing::Json,
            r#"{"data":[{"embedding":"AAAA"}]}"#,
        );
        assert_eq!(answer.tokens(&*TOKENIZER), 0);
    }
}
