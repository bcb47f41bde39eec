//! Keeps the usage event that Traygate asked for from a client who did not.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use memchr::{memchr, memchr2, memmem};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// No usage event is longer: no more than this is ever held back.
const EVENT_BYTES: usize = 16 * 1024;

/// Passes an uncompressed chat event stream through, except for events with an empty `choices`
/// list and a `usage` object.
///
/// Every other byte comes out as it went in, comments within the usage event too. An event that
/// arrives whole goes on at once, as a slice of its chunk. One that arrives in pieces is held back
/// only while it may still become the usage event: its first choice decides, the first member that
/// says otherwise, or its end.
#[derive(Debug)]
pub struct UsageFilter {
    lines: Lines,
    /// The beginning of an event that may be the usage event.
    held: Vec<u8>,
    /// The event under way is another one; its beginning has gone on.
    is_passing: bool,
    /// The last event to end was kept.
    was_kept: bool,
    usage_key: memmem::Finder<'static>,
}

impl Default for UsageFilter {
    fn default() -> Self {
        Self::new()
    }
}

impl UsageFilter {
    /// A filter at the beginning of a stream.
    pub fn new() -> Self {
        Self {
            lines: Lines::default(),
            held: Vec::new(),
            is_passing: false,
            was_kept: false,
            usage_key: memmem::Finder::new(br#""usage""#),
        }
    }

    /// Takes the stream's next chunk and hands on what the client is to have of it: for most
    /// chunks that is the chunk itself, for one that ends within a possible usage event it may be
    /// nothing.
    pub fn feed(&mut self, chunk: Bytes, mut pass: impl FnMut(Bytes)) {
        let mut event = 0;
        // What has gone on, or never will.
        let mut done = 0;
        if self.lines.ends_with_lf(&chunk) {
            event = 1;
            done = usize::from(self.was_kept);
        }
        while let Some(length) = self.lines.event_end(&chunk[event..]) {
            let end = event + length;
            self.end_event(&chunk, event..end, &mut done, &mut pass);
            event = end;
        }
        if event < chunk.len() {
            self.go_on(&chunk, event, &mut done, &mut pass);
        }
        emit(&chunk, done..chunk.len(), &mut pass);
    }

    /// The stream has ended, in order or not: hands on what was held back, unless it is a whole
    /// usage event without its blank line.
    pub fn finish(&mut self, mut pass: impl FnMut(Bytes)) {
        let event = std::mem::take(&mut self.held);
        if judge(&event) == Verdict::IsUsage {
            comments(&event, &mut pass);
        } else if !event.is_empty() {
            pass(event.into());
        }
    }

    fn end_event(
        &mut self,
        chunk: &Bytes,
        event: Range<usize>,
        done: &mut usize,
        pass: &mut impl FnMut(Bytes),
    ) {
        self.was_kept = false;
        if std::mem::take(&mut self.is_passing) {
            return;
        }
        let was_held = !self.held.is_empty();
        let text = if was_held {
            self.held.extend_from_slice(&chunk[event.clone()]);
            Cow::Owned(std::mem::take(&mut self.held))
        } else {
            Cow::Borrowed(&chunk[event.clone()])
        };
        if self.may_have_usage(&text) && judge(&text) == Verdict::IsUsage {
            self.was_kept = true;
            emit(chunk, *done..event.start, pass);
            comments(&text, pass);
            *done = event.end;
        } else if was_held {
            pass(text.into_owned().into());
            *done = event.end;
        }
    }

    /// An event goes on past the chunk's end.
    fn go_on(
        &mut self,
        chunk: &Bytes,
        event: usize,
        done: &mut usize,
        pass: &mut impl FnMut(Bytes),
    ) {
        if self.is_passing {
            return;
        }
        let was_held = !self.held.is_empty();
        self.held.extend_from_slice(&chunk[event..]);
        if judge(&self.held) == Verdict::IsOther {
            self.is_passing = true;
            let held = std::mem::take(&mut self.held);
            // Otherwise it is still in the chunk.
            if was_held {
                pass(held.into());
                *done = chunk.len();
            }
            return;
        }
        emit(chunk, *done..event, pass);
        *done = chunk.len();
        // A keep-alive is not to wait for the event behind it.
        let keep_alive = leading_comments(&self.held);
        if keep_alive > 0 {
            pass(self.held.drain(..keep_alive).collect());
        }
    }

    /// At little cost, whether a `usage` with a value stands anywhere: with `include_usage`, every
    /// chunk has one that is null.
    fn may_have_usage(&self, event: &[u8]) -> bool {
        self.usage_key.find_iter(event).any(|at| {
            let value = event[at + self.usage_key.needle().len()..].trim_ascii_start();
            let value = value.strip_prefix(b":").unwrap_or(value);
            !value.trim_ascii_start().starts_with(b"null")
        })
    }
}

fn emit(chunk: &Bytes, part: Range<usize>, pass: &mut impl FnMut(Bytes)) {
    if !part.is_empty() {
        pass(chunk.slice(part));
    }
}

/// Where an event stream's lines and events end: with LF, CR or both, and with an empty line.
#[derive(Debug, Default)]
struct Lines {
    /// The line under way is not empty.
    in_line: bool,
    /// The last byte was the CR of a line; a LF now belongs to it.
    after_cr: bool,
    /// The last byte was the CR of an event's empty line.
    after_event_cr: bool,
}

impl Lines {
    /// Whether the event that ended with the last bytes' CR has a LF too, as the first of these.
    fn ends_with_lf(&mut self, bytes: &[u8]) -> bool {
        match bytes.first() {
            None => false,
            Some(first) => std::mem::take(&mut self.after_event_cr) && *first == b'\n',
        }
    }

    /// Where the event under way ends in its next bytes, just after its empty line.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            if std::mem::take(&mut self.after_cr) && byte == b'\n' {
                at += 1;
            } else if self.in_line {
                at += memchr2(b'\n', b'\r', &bytes[at..])? + 1;
                self.in_line = false;
                self.after_cr = bytes[at - 1] == b'\r';
            } else if matches!(byte, b'\n' | b'\r') {
                at += 1;
                let is_crlf = byte == b'\r' && bytes.get(at) == Some(&b'\n');
                self.after_event_cr = byte == b'\r' && at == bytes.len();
                return Some(at + usize::from(is_crlf));
            } else {
                self.in_line = true;
            }
        }
        None
    }
}

/// Divides an event into its lines, line ends included; the last may have none.
fn lines(event: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = event;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = match memchr2(b'\n', b'\r', rest) {
            None => rest.len(),
            Some(end) if rest[end..].starts_with(b"\r\n") => end + 2,
            Some(end) => end + 1,
        };
        let (line, after) = rest.split_at(end);
        rest = after;
        Some(line)
    })
}

/// How many bytes of a line are its end.
fn line_end(line: &[u8]) -> usize {
    if line.ends_with(b"\r\n") {
        2
    } else {
        usize::from(is_ended(line))
    }
}

fn is_ended(line: &[u8]) -> bool {
    line.ends_with(b"\n") || line.ends_with(b"\r")
}

/// How many bytes of whole comment lines `bytes` begin with.
fn leading_comments(bytes: &[u8]) -> usize {
    // A CR at the end may have its LF still to come.
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    lines(bytes)
        .take_while(|line| line.starts_with(b":") && is_ended(line))
        .map(<[u8]>::len)
        .sum()
}

/// Hands on the comments within an event.
fn comments(event: &[u8], pass: &mut impl FnMut(Bytes)) {
    for line in lines(event).filter(|line| line.starts_with(b":")) {
        pass(Bytes::copy_from_slice(line));
    }
}

/// What an event is, as far as it has come. More of it may settle [`Verdict::MayBeUsage`] and
/// turn [`Verdict::IsUsage`] around; [`Verdict::IsOther`] stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    IsUsage,
    MayBeUsage,
    IsOther,
}

fn judge(event: &[u8]) -> Verdict {
    if event.len() > EVENT_BYTES {
        return Verdict::IsOther;
    }
    let mut data: Option<Cow<'_, [u8]>> = None;
    for line in lines(event) {
        let text = &line[..line.len() - line_end(line)];
        let (name, value) = match memchr(b':', text) {
            Some(colon) => (&text[..colon], &text[colon + 1..]),
            None => (text, &b""[..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" => {
                data = Some(match data {
                    None => Cow::Borrowed(value),
                    Some(before) => Cow::Owned([&before, value].join(&b'\n')),
                });
            }
            // `message` is what an event without a name is called.
            b"event" if is_ended(line) && !value.is_empty() && value != b"message" => {
                return Verdict::IsOther;
            }
            _ => {}
        }
    }
    let Some(data) = data else {
        return Verdict::MayBeUsage;
    };
    match serde_json::from_slice::<Chunk>(&data) {
        Ok(Chunk {
            has_choices: true,
            has_usage: true,
        }) => Verdict::IsUsage,
        Ok(_) => Verdict::MayBeUsage,
        Err(error) if error.is_eof() => Verdict::MayBeUsage,
        Err(_) => Verdict::IsOther,
    }
}

/// The members of a usage event. Reading any other event fails where it first differs, and the
/// beginning of a usage event fails at its end, which serde tells apart.
#[derive(Default)]
struct Chunk {
    has_choices: bool,
    has_usage: bool,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Member {
    Choices,
    Usage,
    Error,
    #[serde(other)]
    Other,
}

impl<'de> Deserialize<'de> for Chunk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Chunk;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a usage chunk")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Chunk, A::Error> {
                let mut chunk = Chunk::default();
                while let Some(member) = map.next_key()? {
                    match member {
                        Member::Choices => {
                            let NoChoices = map.next_value()?;
                            chunk.has_choices = true;
                        }
                        Member::Usage => {
                            let Object = map.next_value()?;
                            chunk.has_usage = true;
                        }
                        // A failure is never to be kept from the client.
                        Member::Error => map.next_value::<()>()?,
                        Member::Other => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(chunk)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// An empty list.
struct NoChoices;

impl<'de> Deserialize<'de> for NoChoices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// What an empty list has none of: it fails as soon as one begins.
        enum Choice {}
        impl<'de> Deserialize<'de> for Choice {
            fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
                Err(D::Error::custom("a choice"))
            }
        }
        struct Choices;
        impl<'de> Visitor<'de> for Choices {
            type Value = NoChoices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an empty list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<NoChoices, A::Error> {
                match seq.next_element::<Choice>()? {
                    None => Ok(NoChoices),
                    Some(choice) => match choice {},
                }
            }
        }
        deserializer.deserialize_seq(Choices)
    }
}

/// An object, whatever is in it.
struct Object;

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Object)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USAGE: &str = r#"{"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}"#;

    /// What the client gets, chunk by chunk.
    fn filter<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let mut filter = UsageFilter::new();
        let mut passed: Vec<Vec<u8>> = Vec::new();
        for chunk in chunks {
            let mut out = Vec::new();
            filter.feed(Bytes::copy_from_slice(chunk), |bytes| {
                assert!(!bytes.is_empty());
                out.extend_from_slice(&bytes);
            });
            assert!(filter.held.len() <= EVENT_BYTES);
            passed.push(out);
        }
        let mut out = Vec::new();
        filter.finish(|bytes| out.extend_from_slice(&bytes));
        passed.push(out);
        passed
    }

    fn filtered(stream: &str) -> String {
        let whole = String::from_utf8(filter([stream.as_bytes()]).concat()).expect("text");
        for size in [1, 2, 3, 7, 50] {
            let pieces = filter(stream.as_bytes().chunks(size)).concat();
            assert_eq!(
                String::from_utf8_lossy(&pieces),
                whole,
                "in pieces of {size}"
            );
        }
        whole
    }

    #[test]
    fn keeps_exactly_the_usage_event() {
        let content = r#"data: {"choices":[{"index":0,"delta":{"content":"\"choices\":[],\"usage\":{}"}}],"usage":null}"#;
        for end in ["\n", "\r\n", "\r"] {
            let line = |text: &str| format!("{text}{end}");
            let event = |text: &str| format!("{text}{end}{end}");
            let before = event(content) + &event(": ping");
            let after = event("data: [DONE]");
            let keeps = |kept: &str, left: &str| {
                let stream = format!("{before}{kept}{after}");
                assert_eq!(
                    filtered(&stream),
                    format!("{before}{left}{after}"),
                    "{kept:?}"
                );
            };
            keeps(&event(&format!("data: {USAGE}")), "");
            keeps(&event(&format!("data:{USAGE}")), "");
            keeps(
                &event(&format!("event: message{end}id: 7{end}data: {USAGE}")),
                "",
            );
            // In the order of the alphabet, and with room in it.
            keeps(&event(r#"data: { "choices" : [ ] , "usage" : { } }"#), "");
            keeps(
                &event(r#"data: {"usage":{},"choices":[],"error":null}"#),
                "",
            );
            // Divided into lines, with comments, which are not its own.
            let divided = line(": a")
                + &line(r#"data: {"choices":[],"#)
                + &line(": b")
                + &event(r#"data: "usage":{"prompt_tokens":1}}"#);
            keeps(&divided, &(line(": a") + &line(": b")));
            // More than one of them.
            keeps(&event(&format!("data: {USAGE}")).repeat(2), "");
            // At the end of the stream, with and without its blank line.
            for usage in [format!("data: {USAGE}"), line(&format!("data: {USAGE}"))] {
                assert_eq!(filtered(&format!("{before}{usage}")), before);
            }
        }
    }

    #[test]
    fn passes_everything_else() {
        for event in [
            // Azure's first chunk.
            r#"{"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0}]}"#,
            r#"{"choices":[],"usage":null}"#,
            // Usage in the last chunk of content.
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}"#,
            r#"{"usage":{"prompt_tokens":1}}"#,
            r#"{"choices":null,"usage":{"prompt_tokens":1}}"#,
            r#"{"choices":{},"usage":{"prompt_tokens":1}}"#,
            r#"{"choices":[],"usage":[1]}"#,
            r#"{"choices":[],"usage":{},"error":{"code":502}}"#,
            r#"{"x":{"choices":[],"usage":{}}}"#,
            r#"[{"choices":[],"usage":{}}]"#,
            r#"{"choices":[],"usage":{}} x"#,
            r#"{"choices":[],"usage":{"#,
            "[DONE]",
            "",
        ] {
            for stream in [
                format!("data: {event}\n\ndata: [DONE]\n\n"),
                format!("data: {event}\r\n\r\n"),
                format!("data: {event}"),
            ] {
                assert_eq!(filtered(&stream), stream);
            }
        }
        for stream in [
            "",
            "\n",
            "\n\n\n: only\n\n",
            "\u{feff}data: x\n\n",
            "nonsense",
            &format!("event: error\ndata: {USAGE}\n\n"),
            &format!("data: {USAGE}\ndata: x\n\n"),
            &format!("x: {USAGE}\n\n"),
        ] {
            assert_eq!(filtered(stream), stream);
        }
    }

    #[test]
    fn a_whole_chunk_goes_on_uncopied() {
        let chunk = Bytes::from(format!(
            "data: {{\"choices\":[{{}}]}}\n\ndata: {USAGE}\n\ndata: [DONE]\n\n"
        ));
        let mut passed = Vec::new();
        UsageFilter::new().feed(chunk.clone(), |bytes| passed.push(bytes));
        let own = chunk.as_ptr_range();
        assert_eq!(passed.len(), 2);
        assert!(passed.iter().all(|bytes| own.contains(&bytes.as_ptr())));
    }

    #[test]
    fn nothing_is_held_back_once_it_is_decided() {
        let gone = |chunks: &[&str]| {
            let passed = filter(chunks.iter().map(|chunk| chunk.as_bytes()));
            let passed = passed
                .into_iter()
                .map(|out| String::from_utf8(out).expect("text"));
            passed.take(chunks.len()).collect::<Vec<_>>()
        };
        // The first choice, and all that follows of its event.
        assert_eq!(
            gone(&[r#"data: {"id":"c","choices":["#, r#"{"#, r#""delta""#]),
            ["", r#"data: {"id":"c","choices":[{"#, r#""delta""#]
        );
        assert_eq!(
            gone(&["data: [", "DONE]\n", "\n"]),
            ["data: [", "DONE]\n", "\n"]
        );
        let no_usage = r#"data: {"choices":[],"usage":null"#;
        assert_eq!(gone(&[no_usage, "}\n\n"]), [no_usage, "}\n\n"]);
        // Keep-alives, also in front of an event under way.
        assert_eq!(
            gone(&[": ping\n", "\n", ": ping\nda"]),
            [": ping\n", "\n", ": ping\n"]
        );
        // What is before a possible usage event in the same chunk.
        assert_eq!(
            gone(&["data: 1\n\ndata: {", "}\n\n"]),
            ["data: 1\n\n", "data: {}\n\n"]
        );
        // One that is too long for it.
        let long = format!(r#"data: {{"id":"{}"#, "x".repeat(EVENT_BYTES));
        assert_eq!(gone(&[&long]), [&*long]);
    }

    /// An event, and what of it the client gets.
    fn any_event() -> impl Strategy<Value = (String, String)> {
        let end = || prop::sample::select(vec!["\n", "\r\n", "\r"]);
        let comment = prop::option::of(end().prop_map(|end| format!(": c {end}")));
        let other = prop::sample::select(vec![
            "data: [DONE]",
            "data: {\"choices\":[{\"delta\":{\"content\":\"\\n\\r \\\"usage\\\":{}\"}}],\"usage\":null}",
            "data: {\"choices\":[],\"prompt_filter_results\":[{}]}",
            "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1}}",
            "event: x",
            "data",
            ": c",
            "garbage",
        ]);
        (comment, any::<bool>(), other, end(), end()).prop_map(
            |(comment, is_usage, other, one, two)| {
                let comment = comment.unwrap_or_default();
                // A CR and a LF are one line end.
                let two = if one == "\r" && two == "\n" {
                    "\r"
                } else {
                    two
                };
                if is_usage {
                    (format!("{comment}data: {USAGE}{one}{two}"), comment)
                } else {
                    let event = format!("{comment}{other}{one}{two}");
                    (event.clone(), event)
                }
            },
        )
    }

    proptest! {
        #[test]
        fn however_a_stream_is_divided(
            events in prop::collection::vec(any_event(), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..16),
        ) {
            let mut stream = String::new();
            let mut expected = String::new();
            for (event, left) in &events {
                // Nor may an event's first LF follow another's CR: there is none.
                stream += event;
                expected += left;
            }
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let chunks = cuts.windows(2).map(|cut| &stream.as_bytes()[cut[0]..cut[1]]);
            prop_assert_eq!(String::from_utf8(filter(chunks).concat()).expect("text"), expected);
        }

        #[test]
        fn garbage_comes_out_the_same_however_it_is_divided(
            stream in r#"(data|event|:|\{"choices":|\[\]|,"usage":|\{|\}|null|\r|\n| |x){0,40}"#,
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let chunks = cuts.windows(2).map(|cut| &stream.as_bytes()[cut[0]..cut[1]]);
            prop_assert_eq!(filter(chunks).concat(), filter([stream.as_bytes()]).concat());
        }
    }
}
