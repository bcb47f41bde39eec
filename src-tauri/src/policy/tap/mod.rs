//! Reads an answer along while it passes: its first content, its errors, how it ended.
//!
//! The tap sees a copy of each chunk after it has gone on, so it delays
//! nothing and changes nothing. It keeps no more than one event at a time, or
//! one JSON body, and of those at most 8 MB.
//!
//! One file knows one dialect. Each reads typed structs off the JSON, without
//! a value tree; what a later reader of the same events needs (usage, say)
//! becomes a field of the same structs and of [`Learned`].

mod anthropic;
mod chat;
mod embeddings;
mod encoding;
mod framing;
mod llama_cpp;
mod ollama;
mod responses;
mod shape;
mod stream_error;
#[cfg(test)]
mod tests;
mod text;
mod usage;

use std::fmt;
use std::io::{self, Write};

use serde_json::value::RawValue;

use self::encoding::Decoder;
use self::framing::{Event, Events, Lines, Piece, leading_type};
use self::shape::Shape;
use crate::policy::routing::Route;
use crate::policy::usage::Reported;

pub use self::encoding::{DecodeError, Encoding, decode_beginning, decode_request};
pub use self::stream_error::StreamError;
pub use self::text::answer_text;

/// How a body is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    Sse,
    /// A JSON value on each line, as Ollama streams.
    Ndjson,
    /// One JSON value.
    Json,
    /// Anything else; it is not read.
    #[default]
    Opaque,
}

impl Framing {
    /// Reads a `content-type` header; empty if there is none.
    pub fn of(content_type: &str) -> Self {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let is = |known: &str| essence.eq_ignore_ascii_case(known);
        let has_json_suffix = || {
            let suffix = essence
                .len()
                .checked_sub("+json".len())
                .and_then(|at| essence.get(at..));
            suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case("+json"))
        };
        if is("text/event-stream") {
            Self::Sse
        } else if is("application/x-ndjson")
            || is("application/ndjson")
            || is("application/jsonl")
            || is("application/x-jsonlines")
        {
            Self::Ndjson
        } else if is("application/json") || is("text/json") || has_json_suffix() {
            Self::Json
        } else {
            Self::Opaque
        }
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It said all it had to say: a natural stop, a tool call, a complete list of embeddings.
    Whole,
    /// It stopped before: a length limit, a pause, or a background response still at work.
    Cut,
    /// A content filter ended it.
    Filtered,
    /// The model declined.
    Refused,
    /// A success without any output.
    Empty,
    /// Ollama only loaded or unloaded the model.
    Load,
    /// A status of 400 or more, an error event, or an error in place of an answer.
    Error,
    /// No end was seen: the answer is truncated, too long to read, damaged, or ended for a
    /// reason that is not known here.
    Unknown,
    /// The body was not read: a redirect, a file, a route or an encoding that is not known.
    Opaque,
}

/// What was read, once the answer is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    pub end: End,
    /// The error that came, in a stream or as the body. `None` if an error's body says
    /// nothing, save that a status of 529 always is an overload.
    pub error: Option<StreamError>,
    /// See [`Tap::has_content`].
    pub has_content: bool,
    /// See [`Tap::saw_end`].
    pub saw_end: bool,
    /// The model that answered, as it names itself; at most 256 bytes.
    pub upstream_model: Option<String>,
    /// What it said of its usage, as far as it came.
    pub usage: Reported,
}

impl Reading {
    /// Whether the answer may be given to another caller later.
    pub fn keepable(&self) -> bool {
        self.end == End::Whole
    }
}

/// Why an answer stopped, the worst of it last: where several choices were asked for, the
/// last of these decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    Natural,
    Load,
    /// For a reason that is not known here.
    Unfamiliar,
    Cut,
    Filtered,
    Failed,
}

/// What has been read so far. Every dialect writes into it.
#[derive(Debug, Default)]
struct Learned {
    /// Real output was seen.
    output: bool,
    /// The dialect's last event was seen.
    last_event: bool,
    /// Without that event the answer is not complete, whatever else was said.
    needs_last_event: bool,
    stop: Option<Stop>,
    refused: bool,
    choices: chat::ChoiceSet,
    error: Option<StreamError>,
    model: Option<String>,
    usage: Reported,
}

impl Learned {
    fn note_model(&mut self, model: &Shape<'_>) {
        const MODEL_BYTES: usize = 256;
        if self.model.is_none()
            && let Some(name) = model.text()
            && (1..=MODEL_BYTES).contains(&name.len())
        {
            self.model = Some(name.to_owned());
        }
    }

    fn note_stop(&mut self, stop: Stop) {
        self.stop = self.stop.max(Some(stop));
    }

    /// The first error counts; what follows is its echo.
    fn note_error(&mut self, error: StreamError) {
        self.error.get_or_insert(error);
    }

    /// Notes the `error` field of an event or answer, if it holds one.
    fn note_error_field(&mut self, field: Option<&RawValue>) {
        if let Some(error) = field.and_then(StreamError::of_field) {
            self.note_error(error);
        }
    }
}

/// Reads one answer.
pub struct Tap {
    source: Source,
    /// Decoding failed or went too far; nothing after that is read.
    damaged: bool,
}

#[expect(
    clippy::large_enum_variant,
    reason = "nearly every answer is plain and needs no box"
)]
enum Source {
    Plain(Reader),
    Coded(Box<Decoder<Metered>>),
}

impl Tap {
    /// A tap for an answer whose head has come: its `content-type` and `content-encoding` as
    /// [`Framing`] and [`Encoding`], and its status.
    pub fn new(route: Route, framing: Framing, encoding: Encoding, status: u16) -> Self {
        let readable = encoding != Encoding::Unknown;
        let reader = Reader::new(route, framing, status, readable);
        let metered = Metered {
            reader,
            left: DECODED_BYTES,
        };
        let source = match Decoder::new(encoding, metered) {
            Ok(decoder) => Source::Coded(Box::new(decoder)),
            Err(Metered { reader, .. }) => Source::Plain(reader),
        };
        Self {
            source,
            damaged: false,
        }
    }

    /// Takes one chunk as it came from upstream.
    pub fn feed(&mut self, chunk: &[u8]) {
        match &mut self.source {
            Source::Plain(reader) => reader.read(chunk),
            Source::Coded(_) if self.damaged => {}
            Source::Coded(decoder) => self.damaged = decoder.write(chunk).is_err(),
        }
    }

    /// The answer's first content has been seen: real output in a stream, the first byte
    /// that is not blank in a JSON answer, the first byte of one that is not read.
    pub fn has_content(&self) -> bool {
        self.reader().has_content()
    }

    /// What was fed ends where an event ends, so that another one may follow it; true too
    /// before the first byte. False for anything but an uncompressed event stream.
    pub fn at_event_boundary(&self) -> bool {
        match &self.source {
            Source::Plain(Reader {
                body: Body::Events(events),
                ..
            }) => events.at_boundary(),
            _ => false,
        }
    }

    /// The error event that came, if one did.
    pub fn stream_error(&self) -> Option<&StreamError> {
        self.reader().learned.error.as_ref()
    }

    /// The dialect's last event was seen: `[DONE]`, `message_stop`, `response.completed` and
    /// kin, `"done":true`. Not every provider sends one; [`Reading::end`] knows.
    pub fn saw_end(&self) -> bool {
        self.reader().learned.last_event
    }

    /// The answer is over, complete or not: what it was.
    pub fn finish(mut self) -> Reading {
        let mut damaged = self.damaged;
        let reader = match &mut self.source {
            Source::Plain(reader) => reader,
            Source::Coded(decoder) => {
                damaged = damaged || decoder.end().is_err();
                &mut decoder.sink_mut().reader
            }
        };
        reader.finish();
        Reading {
            end: reader.end(damaged),
            has_content: reader.has_content(),
            saw_end: reader.learned.last_event,
            error: reader.learned.error.take(),
            upstream_model: reader.learned.model.take(),
            usage: reader.learned.usage,
        }
    }

    fn reader(&self) -> &Reader {
        match &self.source {
            Source::Plain(reader) => reader,
            Source::Coded(decoder) => &decoder.sink().reader,
        }
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap")
            .field("learned", &self.reader().learned)
            .field("damaged", &self.damaged)
            .finish_non_exhaustive()
    }
}

/// A compressed answer is read no further than this, decoded: a bomb costs a moment and no
/// memory, and no real answer is as long.
const DECODED_BYTES: usize = 256 * 1024 * 1024;

struct Metered {
    reader: Reader,
    left: usize,
}

impl Write for Metered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self
            .left
            .checked_sub(bytes.len())
            .ok_or(io::ErrorKind::FileTooLarge)?;
        self.reader.read(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the answer's decoded bytes.
struct Reader {
    route: Route,
    status: u16,
    body: Body,
    /// Bytes that are not blank have come; in a stream, an event or a line.
    begun: bool,
    learned: Learned,
}

enum Body {
    Events(Events),
    Lines(Lines),
    /// One JSON answer.
    Answer(Piece),
    /// The body of a status of 400 or more.
    Refusal(Piece),
    Unread,
}

impl Reader {
    fn new(route: Route, framing: Framing, status: u16, readable: bool) -> Self {
        let read = is_known(route) && is_success(status);
        let body = match framing {
            _ if !readable => Body::Unread,
            Framing::Sse => Body::Events(Events::new()),
            _ if status >= 400 => Body::Refusal(Piece::default()),
            Framing::Ndjson if read => Body::Lines(Lines::default()),
            Framing::Json if read => Body::Answer(Piece::default()),
            _ => Body::Unread,
        };
        Self {
            route,
            status,
            body,
            begun: false,
            learned: Learned::default(),
        }
    }

    fn read(&mut self, bytes: &[u8]) {
        let Self {
            route,
            learned,
            begun,
            ..
        } = self;
        match &mut self.body {
            Body::Events(events) => events.feed(bytes, |event| {
                *begun = true;
                read_event(*route, learned, event);
            }),
            Body::Lines(lines) => lines.feed(bytes, |line| {
                *begun = true;
                read_line(*route, learned, line);
            }),
            Body::Answer(piece) | Body::Refusal(piece) => {
                *begun = *begun || !bytes.trim_ascii_start().is_empty();
                piece.push(bytes);
            }
            Body::Unread => *begun = *begun || !bytes.is_empty(),
        }
    }

    fn finish(&mut self) {
        let Self {
            route,
            learned,
            begun,
            ..
        } = self;
        match &mut self.body {
            Body::Events(events) => {
                events.finish(|event| {
                    *begun = true;
                    read_event(*route, learned, event);
                });
                // Not a single event, but something that is no event stream either.
                *begun = *begun || events.is_foreign();
            }
            Body::Lines(lines) => lines.finish(|line| {
                *begun = true;
                read_line(*route, learned, line);
            }),
            Body::Answer(piece) if !piece.is_cut() => {
                read_answer(*route, learned, stream_error::trim(piece.bytes()));
            }
            Body::Refusal(piece) => {
                if let Some(error) = StreamError::of_body(piece.bytes()) {
                    learned.note_error(error);
                }
            }
            Body::Answer(piece) => usage::note_tail(&mut learned.usage, *route, piece.tail()),
            Body::Unread => {}
        }
        if self.status == stream_error::OVERLOADED {
            self.learned.error.get_or_insert_default().overloaded = true;
        }
    }

    fn has_content(&self) -> bool {
        match self.body {
            Body::Events(_) | Body::Lines(_) => self.learned.output,
            Body::Answer(_) | Body::Refusal(_) | Body::Unread => self.begun,
        }
    }

    fn end(&self, damaged: bool) -> End {
        let learned = &self.learned;
        let failed = learned.error.is_some() || learned.stop == Some(Stop::Failed);
        if self.status >= 400 || failed {
            return End::Error;
        }
        if damaged {
            return End::Unknown;
        }
        if !is_known(self.route) || !is_success(self.status) {
            return End::Opaque;
        }
        if learned.refused {
            return End::Refused;
        }
        match learned.stop {
            None if !self.begun => End::Empty,
            None if matches!(self.body, Body::Unread) => End::Opaque,
            None | Some(Stop::Unfamiliar) => End::Unknown,
            Some(Stop::Natural) if learned.choices.is_open() => End::Unknown,
            Some(Stop::Natural) if learned.needs_last_event && !learned.last_event => End::Unknown,
            Some(Stop::Natural) if learned.output => End::Whole,
            Some(Stop::Natural) => End::Empty,
            Some(Stop::Load) => End::Load,
            Some(Stop::Cut) => End::Cut,
            Some(Stop::Filtered) => End::Filtered,
            Some(Stop::Failed) => End::Error,
        }
    }
}

/// Whether answers on this route are understood.
fn is_known(route: Route) -> bool {
    !matches!(route, Route::Free | Route::UnknownPost)
}

fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

fn read_event(route: Route, learned: &mut Learned, event: Event<'_>) {
    if event.name == b"error" {
        return learned.note_error(StreamError::of_event(event.data));
    }
    match route {
        Route::ChatCompletions | Route::Completions => chat::read(learned, event.data),
        Route::Responses | Route::ResponsesCompact => responses::read_event(learned, event),
        Route::Messages => anthropic::read_event(learned, event),
        Route::LlamaCompletion => llama_cpp::read(learned, event.data),
        Route::OllamaChat | Route::OllamaGenerate | Route::OllamaEmbed => {
            ollama::read(learned, event.data);
        }
        Route::Embeddings | Route::Free | Route::UnknownPost => {
            learned.output = true;
            // Such events may be large (pictures, sound), so only their beginning is looked at.
            if event.data.starts_with(br#"{"error":"#) || leading_type(event.data) == Some("error")
            {
                learned.note_error(StreamError::of_event(event.data));
            }
        }
    }
}

fn read_line(route: Route, learned: &mut Learned, line: &[u8]) {
    read_event(
        route,
        learned,
        Event {
            name: b"",
            data: line,
            tail: b"",
        },
    );
}

fn read_answer(route: Route, learned: &mut Learned, answer: &[u8]) {
    match route {
        Route::ChatCompletions | Route::Completions => chat::read(learned, answer),
        Route::Responses | Route::ResponsesCompact => responses::read_answer(learned, answer),
        Route::Messages => anthropic::read_answer(learned, answer),
        Route::LlamaCompletion => llama_cpp::read(learned, answer),
        Route::OllamaChat | Route::OllamaGenerate | Route::OllamaEmbed => {
            ollama::read(learned, answer);
        }
        Route::Embeddings => embeddings::read(learned, answer),
        Route::Free | Route::UnknownPost => {}
    }
}
