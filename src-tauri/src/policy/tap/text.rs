//! Gathers the text of an answer, where its tokens have to be estimated.
//!
//! Not on the call's path: this reads once more what was kept of the answer's bytes.

use std::fmt;
use std::io::{self, Write};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::encoding::{Decoder, Encoding};
use super::framing::{Events, Lines, Piece};
use super::{Framing, stream_error};
use crate::policy::routing::Route;

/// All the model's text in an answer, or in as much of one as `chunks` hold: content, reasoning,
/// refusals, and the names and arguments of tool calls, as far as a provider shows them.
///
/// At most `limit` bytes; reading stops there, so a compressed bomb costs little. Empty for routes
/// that answer with no text.
pub fn answer_text<'a>(
    route: Route,
    framing: Framing,
    encoding: Encoding,
    chunks: impl IntoIterator<Item = &'a [u8]>,
    limit: usize,
) -> String {
    let body = match framing {
        Framing::Sse => Body::Events(Box::new(Events::new())),
        Framing::Ndjson => Body::Lines(Lines::default()),
        Framing::Json => Body::Answer(Piece::default()),
        Framing::Opaque => return String::new(),
    };
    let gatherer = Gatherer {
        only_deltas: framing == Framing::Sse
            && matches!(route, Route::Responses | Route::ResponsesCompact),
        body,
        text: String::new(),
        limit,
    };
    let mut gatherer = match Decoder::new(encoding, gatherer) {
        Ok(mut decoder) => {
            for chunk in chunks {
                // Damaged, or enough: what came before counts.
                if decoder.write(chunk).is_err() {
                    break;
                }
            }
            return decoder.sink_mut().finish();
        }
        Err(gatherer) if encoding == Encoding::Unknown => return gatherer.text,
        Err(gatherer) => gatherer,
    };
    for chunk in chunks {
        if gatherer.write_all(chunk).is_err() {
            break;
        }
    }
    gatherer.finish()
}

struct Gatherer {
    body: Body,
    /// The events that end a part of a response hold all of its text once more.
    only_deltas: bool,
    text: String,
    limit: usize,
}

enum Body {
    Events(Box<Events>),
    Lines(Lines),
    Answer(Piece),
}

impl Gatherer {
    fn finish(&mut self) -> String {
        let Self {
            body,
            text,
            only_deltas,
            limit,
        } = self;
        match body {
            Body::Events(events) => {
                events.finish(|event| {
                    if !*only_deltas || event.kind().ends_with(".delta") {
                        gather(event.data, text);
                    }
                });
            }
            Body::Lines(lines) => lines.finish(|line| gather(line, text)),
            Body::Answer(piece) => gather(stream_error::trim(piece.bytes()), text),
        }
        text.truncate(text.floor_char_boundary(*limit));
        std::mem::take(text)
    }
}

impl Write for Gatherer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Self {
            body,
            text,
            only_deltas,
            limit,
        } = self;
        match body {
            Body::Events(events) => events.feed(bytes, |event| {
                if !*only_deltas || event.kind().ends_with(".delta") {
                    gather(event.data, text);
                }
            }),
            Body::Lines(lines) => lines.feed(bytes, |line| gather(line, text)),
            Body::Answer(piece) => {
                piece.push(bytes);
                if piece.is_cut() {
                    return Err(io::ErrorKind::FileTooLarge.into());
                }
            }
        }
        if text.len() > *limit {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Adds the model's text in a JSON value; of one that breaks off, what stands before the break.
fn gather(json: &[u8], text: &mut String) {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    // The end of a `[DONE]`, a cut or an odd value: there is no more text in it.
    let _ = Walk { text }.deserialize(&mut deserializer);
}

/// Walks through the members that lead to text.
struct Walk<'t> {
    text: &'t mut String,
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
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.text.push_str(text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Walk { text: self.text })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut reasoned = None;
        while let Some(name) = members.next_key::<std::borrow::Cow<'de, str>>()? {
            let before = self.text.len();
            match &*name {
                "choices" | "message" | "delta" | "output" | "content_block" | "tool_calls"
                | "function" | "function_call" | "content" | "summary" | "text" | "thinking"
                | "refusal" | "partial_json" | "response" | "name" => {
                    members.next_value_seed(Walk { text: self.text })?;
                }
                // Two names of one thing, which some servers give both.
                "reasoning" | "reasoning_content" => {
                    members.next_value_seed(Walk { text: self.text })?;
                    let now = before..self.text.len();
                    match &reasoned {
                        None => reasoned = Some(now),
                        Some(earlier) if self.text[earlier.clone()] == self.text[now] => {
                            self.text.truncate(before);
                        }
                        Some(_) => {}
                    }
                }
                // A text of JSON at OpenAI, an object at Anthropic and Ollama.
                "arguments" | "input" => {
                    let value: &RawValue = members.next_value()?;
                    match serde_json::from_str::<String>(value.get()) {
                        Ok(arguments) => self.text.push_str(&arguments),
                        Err(_) => self.text.push_str(value.get()),
                    }
                }
                _ => {
                    members.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(route: Route, framing: Framing, body: &str) -> String {
        let whole = answer_text(
            route,
            framing,
            Encoding::Identity,
            [body.as_bytes()],
            1 << 20,
        );
        let pieces = body.as_bytes().chunks(5);
        let divided = answer_text(route, framing, Encoding::Identity, pieces, 1 << 20);
        assert_eq!(divided, whole);
        whole
    }

    #[test]
    fn every_dialect() {
        use Framing::{Json, Ndjson, Sse};
        for (route, framing, body, expected) in [
            (
                Route::ChatCompletions,
                Sse,
                r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null}}]}

data: {"choices":[{"index":0,"delta":{"reasoning":"hm","reasoning_content":"hm","reasoning_details":[{"text":"hm"}]}}]}

data: {"choices":[{"index":0,"delta":{"content":" Grüß "}}],"usage":null}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\":"}}]}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]},"finish_reason":"tool_calls"}]}

data: [DONE]

"#,
                r#"hm Grüß f{"a":1}"#,
            ),
            (
                Route::ChatCompletions,
                Json,
                r#"{"id":"x","choices":[{"message":{"role":"assistant","content":"Hi","refusal":null},"logprobs":{"content":[{"token":"Hi"}]}}],"model":"m"}"#,
                "Hi",
            ),
            (
                Route::Completions,
                Json,
                r#"{"choices":[{"text":"Hi"}]}"#,
                "Hi",
            ),
            (
                Route::Responses,
                Sse,
                r#"event: response.output_text.delta
data: {"type":"response.output_text.delta","item_id":"m","delta":"Hi"}

event: response.function_call_arguments.delta
data: {"type":"response.function_call_arguments.delta","delta":"{}"}

event: response.output_text.done
data: {"type":"response.output_text.done","text":"Hi"}

event: response.completed
data: {"type":"response.completed","response":{"output":[{"content":[{"text":"Hi"}]}]}}

"#,
                "Hi{}",
            ),
            (
                Route::Responses,
                Json,
                r#"{"instructions":"no","output":[{"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}],"encrypted_content":"gAAA"},{"type":"message","content":[{"type":"output_text","text":"Hi"}]},{"type":"function_call","name":"f","arguments":"{}"}],"text":{"format":{"type":"text"}}}"#,
                "hmHif{}",
            ),
            (
                Route::Messages,
                Sse,
                r#"event: message_start
data: {"type":"message_start","message":{"content":[],"model":"claude"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"EqQB"}}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{\"a\":1}"}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"Hi"}}"#,
                r#"hmf{}{"a":1}Hi"#,
            ),
            (
                Route::Messages,
                Json,
                r#"{"content":[{"type":"text","text":"Hi"},{"type":"tool_use","name":"f","input":{"a":[1]}}]}"#,
                r#"Hif{"a":[1]}"#,
            ),
            (
                Route::OllamaChat,
                Ndjson,
                "{\"message\":{\"content\":\"\",\"thinking\":\"hm\"}}\n{\"message\":{\"content\":\"Hi\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"a\":1}}}]}}\n{\"mess",
                r#"hmHif{"a":1}"#,
            ),
            (
                Route::OllamaGenerate,
                Json,
                r#"{"response":"Hi","thinking":"hm","context":[1]}"#,
                "Hihm",
            ),
            (
                Route::LlamaCompletion,
                Sse,
                "data: {\"content\":\"H\"}\n\ndata: {\"content\":\"i\"}\n\n",
                "Hi",
            ),
            (
                Route::Embeddings,
                Json,
                r#"{"data":[{"embedding":[0.1]}]}"#,
                "",
            ),
        ] {
            assert_eq!(text(route, framing, body), expected, "{body}");
        }
    }

    #[test]
    fn what_is_cut_counts_as_far_as_it_goes() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n";
        assert_eq!(
            text(
                Route::ChatCompletions,
                Framing::Sse,
                &format!("{event}data: {{\"choi")
            ),
            "Hi"
        );
        let many = event.repeat(100);
        let chunks = || many.as_bytes().chunks(64);
        let cut = answer_text(
            Route::ChatCompletions,
            Framing::Sse,
            Encoding::Identity,
            chunks(),
            15,
        );
        assert_eq!(cut, "HiHiHiHiHiHiHiH");
        let unknown = answer_text(
            Route::ChatCompletions,
            Framing::Sse,
            Encoding::Unknown,
            chunks(),
            15,
        );
        assert_eq!(unknown, "");
    }

    #[test]
    fn compressed_answers_are_read() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n";
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(event.repeat(3).as_bytes()).expect("memory");
        let coded = gzip.finish().expect("memory");
        // Without its end too, as an aborted call leaves it.
        for bytes in [&coded[..], &coded[..coded.len() - 4]] {
            let text = answer_text(
                Route::ChatCompletions,
                Framing::Sse,
                Encoding::Gzip,
                bytes.chunks(7),
                100,
            );
            assert_eq!(text, "HiHiHi");
        }
    }
}
