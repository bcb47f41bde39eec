//! Divides a body into events and lines, wherever its chunks end.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use serde::Deserialize;

/// The longest event, line or JSON body whose text is kept until it is complete.
pub(super) const PIECE_BYTES: usize = 8 * 1024 * 1024;
/// What is kept of a longer one: enough to see what it is.
const HEAD_BYTES: usize = 1024;
/// What is kept of the end of a longer one: answers say their usage there, followed by no more
/// than the request's metadata.
const TAIL_BYTES: usize = 4 * 1024;
/// More room than this is given back after use.
const ROOM_BYTES: usize = 256 * 1024;

/// The text of one event, line or body while it arrives.
#[derive(Debug, Default)]
pub(super) struct Piece {
    bytes: Vec<u8>,
    cut: bool,
    /// The last of it, and up to as much again before that; empty unless it is cut.
    tail: Vec<u8>,
}

impl Piece {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.cut {
            return self.push_tail(bytes);
        }
        if self.bytes.len() + bytes.len() > PIECE_BYTES {
            self.cut = true;
            let held = std::mem::take(&mut self.bytes);
            self.push_tail(&held);
            self.push_tail(bytes);
            self.bytes = held;
            let missing = HEAD_BYTES.saturating_sub(self.bytes.len()).min(bytes.len());
            self.bytes.extend_from_slice(&bytes[..missing]);
            self.bytes.truncate(HEAD_BYTES);
            self.bytes.shrink_to_fit();
            return;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn push_tail(&mut self, bytes: &[u8]) {
        let new = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        if self.tail.len() + new.len() > 2 * TAIL_BYTES {
            let kept = TAIL_BYTES.saturating_sub(new.len());
            self.tail.drain(..self.tail.len() - kept);
        }
        self.tail.extend_from_slice(new);
    }

    /// The text, or no more than its head if it [`is_cut`](Self::is_cut).
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The last of it, if it [`is_cut`](Self::is_cut); empty otherwise.
    pub(super) fn tail(&self) -> &[u8] {
        &self.tail
    }

    /// It was too long.
    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(ROOM_BYTES);
        self.cut = false;
        self.tail = Vec::new();
    }
}

/// One server-sent event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event<'a> {
    /// The `event:` field; empty if there is none.
    pub(super) name: &'a [u8],
    /// The `data:` lines, joined; only the head of it if the event was too long.
    pub(super) data: &'a [u8],
    /// The end of `data` if it was too long; empty otherwise.
    pub(super) tail: &'a [u8],
}

impl<'a> Event<'a> {
    /// What the event is: its `event:` field, else the `type` in its data; empty if neither.
    pub(super) fn kind(&self) -> Cow<'a, str> {
        // `message` is what an event without a name is called.
        if !self.name.is_empty() && self.name != b"message" {
            return String::from_utf8_lossy(self.name);
        }
        if let Some(kind) = leading_type(self.data) {
            return Cow::Borrowed(kind);
        }
        #[derive(Deserialize)]
        struct Typed<'t> {
            #[serde(borrow, rename = "type")]
            kind: Cow<'t, str>,
        }
        serde_json::from_slice::<Typed<'a>>(self.data)
            .map(|typed| typed.kind)
            .unwrap_or_default()
    }
}

/// The `type` of an object that begins with it, as those of OpenAI and Anthropic do: seen
/// without reading what may be megabytes behind it.
pub(super) fn leading_type(data: &[u8]) -> Option<&str> {
    let rest = data.trim_ascii_start().strip_prefix(b"{")?;
    let rest = rest.trim_ascii_start().strip_prefix(br#""type""#)?;
    let rest = rest.trim_ascii_start().strip_prefix(b":")?;
    let rest = rest.trim_ascii_start().strip_prefix(br#"""#)?;
    let end = memchr2(b'"', b'\\', rest)?;
    (rest[end] == b'"').then(|| std::str::from_utf8(&rest[..end]).ok())?
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Start,
    Name,
    /// After the colon, where one space is not part of the value.
    ValueStart,
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Data,
    Event,
    /// A comment, or a field that carries no text.
    Other,
}

/// Divides an event stream into events, by the rules of the HTML standard: lines end with
/// LF, CR or both, an event ends with an empty line.
#[derive(Debug)]
pub(super) struct Events {
    line: Line,
    field: Field,
    field_name: [u8; Self::NAME_BYTES],
    /// Counts on past what `field_name` holds.
    field_name_length: usize,
    /// The last byte was a CR; a LF now belongs to it.
    after_cr: bool,
    ends_with_crlf: bool,
    /// Bytes of the byte order mark seen; the stream has begun when it is past it.
    marks: usize,
    /// A line stands since the last empty one.
    open: bool,
    has_data: bool,
    event_name: Vec<u8>,
    data: Piece,
    foreign: bool,
}

impl Events {
    const NAME_BYTES: usize = 5;
    const EVENT_NAME_BYTES: usize = 64;
    const BYTE_ORDER_MARK: [u8; 3] = *b"\xEF\xBB\xBF";

    pub(super) fn new() -> Self {
        Self {
            line: Line::Start,
            field: Field::Other,
            field_name: [0; Self::NAME_BYTES],
            field_name_length: 0,
            after_cr: false,
            ends_with_crlf: false,
            marks: 0,
            open: false,
            has_data: false,
            event_name: Vec::new(),
            data: Piece::default(),
            foreign: false,
        }
    }

    /// Takes the stream's next bytes and calls `on_event` for each event they complete.
    pub(super) fn feed(&mut self, bytes: &[u8], mut on_event: impl FnMut(Event<'_>)) {
        let mut at = self.skip_byte_order_mark(bytes);
        while let Some(&byte) = bytes.get(at) {
            if self.after_cr {
                self.after_cr = false;
                if byte == b'\n' {
                    self.ends_with_crlf = true;
                    at += 1;
                    continue;
                }
            }
            match self.line {
                Line::Start if byte == b'\n' || byte == b'\r' => {
                    self.after_cr = byte == b'\r';
                    at += 1;
                    self.end_event(&mut on_event);
                }
                Line::Start => {
                    self.open = true;
                    // What nearly every line begins with, in one step.
                    if bytes[at..].starts_with(b"data:") {
                        at += 5;
                        self.begin_value(Field::Data);
                    } else if bytes[at..].starts_with(b"event:") {
                        at += 6;
                        self.begin_value(Field::Event);
                    } else {
                        self.field_name_length = 0;
                        self.line = Line::Name;
                    }
                }
                Line::Name => {
                    at += 1;
                    match byte {
                        b':' => self.begin_named_value(),
                        b'\n' | b'\r' => {
                            self.begin_named_value();
                            self.end_line(byte);
                        }
                        _ => {
                            if let Some(slot) = self.field_name.get_mut(self.field_name_length) {
                                *slot = byte;
                            }
                            self.field_name_length += 1;
                        }
                    }
                }
                Line::ValueStart => {
                    at += usize::from(byte == b' ');
                    self.line = Line::Value;
                }
                Line::Value => {
                    let rest = &bytes[at..];
                    let end = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
                    self.push(&rest[..end]);
                    at += end;
                    if let Some(&byte) = rest.get(end) {
                        at += 1;
                        self.end_line(byte);
                    }
                }
            }
        }
    }

    /// The stream has ended; its last event counts without its empty line.
    pub(super) fn finish(&mut self, mut on_event: impl FnMut(Event<'_>)) {
        if self.line == Line::Name {
            self.begin_named_value();
        }
        self.end_event(&mut on_event);
    }

    /// Whether an event put in here would stand by itself.
    pub(super) fn at_boundary(&self) -> bool {
        let within_crlf = self.after_cr && self.ends_with_crlf;
        let within_mark = (1..Self::BYTE_ORDER_MARK.len()).contains(&self.marks);
        self.line == Line::Start && !self.open && !within_crlf && !within_mark
    }

    /// Lines were seen that no event stream has.
    pub(super) fn is_foreign(&self) -> bool {
        self.foreign
    }

    fn skip_byte_order_mark(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while self.marks < Self::BYTE_ORDER_MARK.len() && at < bytes.len() {
            if bytes[at] == Self::BYTE_ORDER_MARK[self.marks] {
                self.marks += 1;
                at += 1;
                continue;
            }
            if self.marks > 0 {
                // Part of a mark only: the beginning of some line that means nothing.
                self.open = true;
                self.field_name_length = Self::NAME_BYTES + 1;
                self.line = Line::Name;
            }
            self.marks = Self::BYTE_ORDER_MARK.len();
        }
        at
    }

    fn begin_named_value(&mut self) {
        let name = self
            .field_name
            .get(..self.field_name_length)
            .unwrap_or_default();
        let field = match name {
            b"data" => Field::Data,
            b"event" => Field::Event,
            // llama.cpp has sent `error: {…}` in place of an event.
            b"error" => {
                self.set_event_name(b"error");
                Field::Data
            }
            b"id" | b"retry" => Field::Other,
            b"" if self.field_name_length == 0 => Field::Other,
            _ => {
                self.foreign = true;
                Field::Other
            }
        };
        self.begin_value(field);
    }

    fn begin_value(&mut self, field: Field) {
        match field {
            Field::Data => {
                if self.has_data {
                    self.data.push(b"\n");
                }
                self.has_data = true;
            }
            Field::Event => self.event_name.clear(),
            Field::Other => {}
        }
        self.field = field;
        self.line = Line::ValueStart;
    }

    fn set_event_name(&mut self, name: &[u8]) {
        self.event_name.clear();
        self.event_name.extend_from_slice(name);
    }

    fn push(&mut self, bytes: &[u8]) {
        match self.field {
            Field::Data => self.data.push(bytes),
            Field::Event => {
                let room = Self::EVENT_NAME_BYTES - self.event_name.len();
                self.event_name
                    .extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Field::Other => {}
        }
    }

    fn end_line(&mut self, byte: u8) {
        self.after_cr = byte == b'\r';
        self.line = Line::Start;
    }

    fn end_event(&mut self, on_event: &mut impl FnMut(Event<'_>)) {
        // The standard passes over an event without data; `event: error` alone says enough.
        if self.has_data || !self.event_name.is_empty() {
            on_event(Event {
                name: &self.event_name,
                data: self.data.bytes(),
                tail: self.data.tail(),
            });
        }
        self.line = Line::Start;
        self.open = false;
        self.has_data = false;
        self.event_name.clear();
        self.data.clear();
    }
}

/// Divides a body into lines, one JSON value each.
#[derive(Debug, Default)]
pub(super) struct Lines {
    piece: Piece,
}

impl Lines {
    /// Takes the body's next bytes and calls `on_line` for each line they complete.
    pub(super) fn feed(&mut self, bytes: &[u8], mut on_line: impl FnMut(&[u8])) {
        let mut rest = bytes;
        while let Some(end) = memchr(b'\n', rest) {
            if self.piece.bytes().is_empty() {
                emit(&rest[..end], &mut on_line);
            } else {
                self.piece.push(&rest[..end]);
                self.finish(&mut on_line);
            }
            rest = &rest[end + 1..];
        }
        self.piece.push(rest);
    }

    /// The body has ended; its last line counts without its line end.
    pub(super) fn finish(&mut self, mut on_line: impl FnMut(&[u8])) {
        emit(self.piece.bytes(), &mut on_line);
        self.piece.clear();
    }
}

fn emit(line: &[u8], on_line: &mut impl FnMut(&[u8])) {
    let line = line.trim_ascii();
    if !line.is_empty() {
        on_line(line);
    }
}
