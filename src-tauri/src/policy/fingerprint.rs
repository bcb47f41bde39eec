//! Reads a request along: what it asks for, and the key under which equal requests meet.
//!
//! Both work on the bytes as they arrive. No value tree is built, nothing is
//! allocated for what is only passed over, and a request is never changed.

use std::borrow::Cow;
use std::fmt;

use memchr::memchr2;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};

/// What Traygate needs to know of a request body.
///
/// Read off the top level of a JSON object. Where a key comes twice the last one
/// counts, as it does for JSON parsers. A body that is broken half-way keeps
/// what stood before the break.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestFacts {
    /// The body was one complete JSON object, brackets matching and nothing behind it.
    pub is_object: bool,
    /// `model`, unescaped; `None` also for a name longer than [`MODEL_BYTES`].
    pub model: Option<String>,
    /// `stream`, where it is stated.
    pub stream: Option<bool>,
    /// A non-empty `tools` or `functions` array.
    pub has_tools: bool,
    /// The answer depends on, or leaves, state at the provider: `previous_response_id` or
    /// `conversation` is not null, or `background` is true.
    pub server_state: bool,
    /// `stream_options.include_usage`, where it is stated.
    pub include_usage: Option<bool>,
    /// A `stream_options` key is there, whatever its value.
    pub has_stream_options: bool,
    /// Offset just after the `{` of `stream_options`, if that is an object.
    pub stream_options_object: Option<usize>,
    /// That object is `{}`: text spliced into it needs no comma.
    pub stream_options_empty: bool,
    /// Offset of the `null` that `stream_options` is, if it is one.
    pub stream_options_null: Option<usize>,
    /// An `include_usage` key is there, whatever its value, or may be: an object too long to be
    /// looked into.
    pub has_include_usage: bool,
    /// Offset of the `null` that `include_usage` is, if it is one.
    pub include_usage_null: Option<usize>,
    /// Offset just after the body's own `{`.
    pub object_open: Option<usize>,
    /// The body is `{}`: text spliced into it needs no comma.
    pub empty_object: bool,
    /// The largest limit on output tokens that is stated: `max_tokens`,
    /// `max_completion_tokens`, `max_output_tokens`, llama.cpp's `n_predict`, Ollama's
    /// `options.num_predict`. Negative ones (no limit) count as not stated.
    pub max_output: Option<u64>,
    /// `n`, how many answers are asked for at once.
    pub answers: Option<u64>,
    /// `best_of` of `completions`: so many answers are made and paid, of which `n` are sent.
    pub best_of: Option<u64>,
    /// How many prompts `prompt` holds, where it is a list of texts or of token lists: each is
    /// answered apart.
    pub prompts: Option<u64>,
    /// Neither a non-empty `prompt`, `messages` nor `input`: at Ollama a request that only
    /// loads or unloads a model.
    pub no_prompt: bool,
}

impl RequestFacts {
    /// How many outputs are paid for, each with [`max_output`](Self::max_output) to itself.
    pub fn outputs(&self) -> u64 {
        let answers = self.answers.max(self.best_of).unwrap_or(1).max(1);
        answers.saturating_mul(self.prompts.unwrap_or(1).max(1))
    }
}

/// The longest model name that is read, in bytes.
pub const MODEL_BYTES: usize = 256;

/// A key that is looked at. Others are passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    Tools,
    Functions,
    PreviousResponse,
    Conversation,
    Background,
    StreamOptions,
    Options,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    PredictTokens,
    Answers,
    BestOf,
    Prompt,
    Messages,
    Input,
    /// Inside `stream_options`.
    IncludeUsage,
    /// Inside `options`.
    NumPredict,
    Other,
}

impl Field {
    fn inside_options(name: &str) -> Self {
        match name {
            "include_usage" => Self::IncludeUsage,
            "num_predict" => Self::NumPredict,
            _ => Self::Other,
        }
    }

    fn at_the_top(name: &str) -> Self {
        match name {
            "model" => Self::Model,
            "stream" => Self::Stream,
            "tools" => Self::Tools,
            "functions" => Self::Functions,
            "previous_response_id" => Self::PreviousResponse,
            "conversation" => Self::Conversation,
            "background" => Self::Background,
            "stream_options" => Self::StreamOptions,
            "options" => Self::Options,
            "max_tokens" => Self::MaxTokens,
            "max_completion_tokens" => Self::MaxCompletionTokens,
            "max_output_tokens" => Self::MaxOutputTokens,
            "n_predict" => Self::PredictTokens,
            "n" => Self::Answers,
            "best_of" => Self::BestOf,
            "prompt" => Self::Prompt,
            "messages" => Self::Messages,
            "input" => Self::Input,
            _ => Self::Other,
        }
    }
}

/// Where the scan stands. Every state may be left at the end of a chunk and taken up with
/// the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the object; so many bytes of a byte order mark have been seen.
    Before(usize),
    /// After `{`: a key or the end.
    FirstKey,
    /// After `,`: a key.
    NextKey,
    InKey,
    Colon,
    Value,
    InString,
    /// In a number, `true`, `false` or `null`.
    InScalar,
    /// Inside an array or object that is a field's value.
    InNested,
    InNestedString,
    AfterValue,
    After,
    Broken,
}

/// The value a field turned out to have.
enum Value<'a> {
    Null {
        /// Offset of the word.
        at: usize,
    },
    Bool(bool),
    Number(&'a [u8]),
    /// Raw and without its quotes; `None` if it was too long to keep.
    Text {
        empty: bool,
        raw: Option<&'a [u8]>,
    },
    List {
        empty: bool,
        /// How many texts and lists stand in it.
        parts: u64,
    },
    Object {
        empty: bool,
        /// Offset just after its `{`.
        open: usize,
        /// The whole object, if it is one that is looked into and not too long.
        raw: Option<&'a [u8]>,
    },
}

impl Value<'_> {
    fn is_null(&self) -> bool {
        matches!(self, Self::Null { .. })
    }

    /// Neither null, false nor empty.
    fn is_filled(&self) -> bool {
        match self {
            Self::Null { .. } | Self::Bool(false) => false,
            Self::Bool(true) | Self::Number(_) => true,
            Self::Text { empty, .. } | Self::List { empty, .. } | Self::Object { empty, .. } => {
                !empty
            }
        }
    }

    fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A count; fractions are cut off, negative numbers are none.
    fn as_count(&self) -> Option<u64> {
        let Self::Number(digits) = self else {
            return None;
        };
        let digits = std::str::from_utf8(digits).ok()?;
        if let Ok(count) = digits.parse() {
            return Some(count);
        }
        let number: f64 = digits.parse().ok()?;
        // `as` saturates at the ends of u64, which is right for a limit.
        (number >= 0.0).then_some(number as u64)
    }

    fn as_model(&self) -> Option<String> {
        let Self::Text { raw: Some(raw), .. } = self else {
            return None;
        };
        let model = unescape(raw)?;
        (model.len() <= MODEL_BYTES).then(|| model.into_owned())
    }
}

/// The text of a JSON string given without its quotes; `None` if it is not valid.
fn unescape(raw: &[u8]) -> Option<Cow<'_, str>> {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Cow::Borrowed);
    }
    let mut quoted = Vec::with_capacity(raw.len() + 2);
    quoted.push(b'"');
    quoted.extend_from_slice(raw);
    quoted.push(b'"');
    serde_json::from_slice(&quoted).ok().map(Cow::Owned)
}

/// Which brackets are open.
///
/// Kinds are remembered for the outermost [`Brackets::REMEMBERED`] levels and counted
/// beyond: no parser at the other end goes that deep, and ten million `[` must not take
/// memory here.
#[derive(Clone, Debug, Default)]
struct Brackets {
    depth: u64,
    is_object: [u64; Brackets::WORDS],
}

impl Brackets {
    const WORDS: usize = 8;
    const REMEMBERED: u64 = 64 * Self::WORDS as u64;

    fn open(&mut self, is_object: bool) {
        if self.depth < Self::REMEMBERED {
            let word = &mut self.is_object[(self.depth / 64) as usize];
            let bit = 1 << (self.depth % 64);
            *word = if is_object { *word | bit } else { *word & !bit };
        }
        self.depth += 1;
    }

    /// False if the bracket closes nothing, or something of the other kind.
    fn close(&mut self, is_object: bool) -> bool {
        let Some(depth) = self.depth.checked_sub(1) else {
            return false;
        };
        self.depth = depth;
        depth >= Self::REMEMBERED
            || (self.is_object[(depth / 64) as usize] >> (depth % 64) & 1 == 1) == is_object
    }
}

/// A bounded copy of the piece being read: a key, a string, a scalar, a small object.
#[derive(Clone, Debug, Default)]
struct Piece {
    bytes: Vec<u8>,
    limit: usize,
    overflowed: bool,
}

impl Piece {
    /// Starts over; a limit of 0 keeps nothing.
    fn start(&mut self, limit: usize) {
        self.bytes.clear();
        self.limit = limit;
        self.overflowed = false;
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.overflowed {
            return;
        }
        if self.bytes.len() + bytes.len() > self.limit {
            self.overflowed = true;
            self.bytes.clear();
            return;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn whole(&self) -> Option<&[u8]> {
        (!self.overflowed).then_some(&self.bytes)
    }
}

/// Every byte of a text may be written as a `\u00xx` of six.
const ESCAPED: usize = 6;
const KEY_BYTES: usize = 32 * ESCAPED;
/// Longer numbers are valid JSON, but none that is looked at.
const SCALAR_BYTES: usize = 64;
/// The longest `options` or `stream_options` that is looked into.
const OBJECT_BYTES: usize = 4096;

/// Fields of which only the sum is told: each is kept apart, since a later one of the same
/// name takes its place.
#[derive(Clone, Debug, Default)]
struct Stated {
    tools: bool,
    functions: bool,
    previous_response: bool,
    conversation: bool,
    background: bool,
    prompt: bool,
    messages: bool,
    input: bool,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    n_predict: Option<u64>,
    num_predict: Option<u64>,
}

impl Stated {
    fn max_output(&self) -> Option<u64> {
        // `None` is the least of all.
        self.max_tokens
            .max(self.max_completion_tokens)
            .max(self.max_output_tokens)
            .max(self.n_predict)
            .max(self.num_predict)
    }
}

/// Reads the top level of a JSON object as its bytes arrive.
///
/// Chunks may end anywhere. A leading byte order mark and white space are
/// passed over. Strings are skipped at the speed of `memchr`, so megabytes of
/// base64 cost next to nothing. Below the top level brackets and strings are
/// followed, and nothing else is checked: whoever answers the request judges it.
#[derive(Clone, Debug)]
pub struct RequestScan {
    state: State,
    /// Bytes fed in earlier chunks.
    seen: usize,
    /// The next byte of the string stands behind a backslash.
    escaped: bool,
    field: Field,
    piece: Piece,
    brackets: Brackets,
    /// The field's value is an object, not an array.
    nested_object: bool,
    nested_open: usize,
    /// Something stood in the field's array or object.
    nested_filled: bool,
    /// Texts and lists that stood in it directly.
    nested_parts: u64,
    /// Where the number or word being read began.
    scalar_at: usize,
    /// This scan reads `options` or `stream_options` for another one.
    is_inner: bool,
    stated: Stated,
    facts: RequestFacts,
}

impl Default for RequestScan {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestScan {
    /// A scan that has seen nothing yet.
    pub fn new() -> Self {
        Self {
            state: State::Before(0),
            seen: 0,
            escaped: false,
            field: Field::Other,
            piece: Piece::default(),
            brackets: Brackets::default(),
            nested_object: false,
            nested_open: 0,
            nested_filled: false,
            nested_parts: 0,
            scalar_at: 0,
            is_inner: false,
            stated: Stated::default(),
            facts: RequestFacts::default(),
        }
    }

    /// Takes the body's next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            at = match self.state {
                State::InKey | State::InString => self.feed_string(bytes, at),
                State::InNestedString => self.feed_nested_string(bytes, at),
                State::InNested => self.feed_nested(bytes, at),
                State::InScalar => self.feed_scalar(bytes, at),
                State::Broken => break,
                _ => self.feed_structure(byte, at),
            };
        }
        self.seen += bytes.len();
    }

    /// What the body turned out to ask for.
    pub fn finish(self) -> RequestFacts {
        let stated = &self.stated;
        RequestFacts {
            is_object: self.state == State::After,
            has_tools: stated.tools || stated.functions,
            server_state: stated.previous_response || stated.conversation || stated.background,
            max_output: stated.max_output(),
            no_prompt: !(stated.prompt || stated.messages || stated.input),
            ..self.facts
        }
    }

    /// One byte between keys and values; gives where to go on.
    fn feed_structure(&mut self, byte: u8, at: usize) -> usize {
        const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
        if let State::Before(marks) = self.state {
            if marks < BYTE_ORDER_MARK.len()
                && byte == BYTE_ORDER_MARK[marks]
                && self.seen + at == marks
            {
                self.state = State::Before(marks + 1);
                return at + 1;
            }
            if marks == 1 || marks == 2 {
                self.state = State::Broken;
                return at;
            }
        }
        if is_blank(byte) {
            return at + 1;
        }
        self.state = match (self.state, byte) {
            (State::Before(_), b'{') => {
                self.facts.object_open = Some(self.seen + at + 1);
                State::FirstKey
            }
            (State::FirstKey | State::NextKey, b'"') => {
                self.piece.start(KEY_BYTES);
                State::InKey
            }
            (State::FirstKey, b'}') => {
                self.facts.empty_object = true;
                State::After
            }
            (State::Colon, b':') => State::Value,
            (State::Value, b'"') => {
                self.piece.start(match self.field {
                    Field::Model => MODEL_BYTES * ESCAPED,
                    // Whether anything stands in it is all that is asked.
                    _ => 0,
                });
                State::InString
            }
            (State::Value, b'{' | b'[') => {
                self.nested_object = byte == b'{';
                self.nested_open = self.seen + at + 1;
                self.nested_filled = false;
                self.nested_parts = 0;
                let looked_into = !self.is_inner
                    && self.nested_object
                    && matches!(self.field, Field::Options | Field::StreamOptions);
                self.piece.start(if looked_into { OBJECT_BYTES } else { 0 });
                self.piece.push(b"{");
                self.brackets.open(self.nested_object);
                State::InNested
            }
            (State::Value, b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
                self.piece.start(SCALAR_BYTES);
                self.scalar_at = self.seen + at;
                self.state = State::InScalar;
                // The byte belongs to the scalar.
                return at;
            }
            (State::AfterValue, b',') => State::NextKey,
            (State::AfterValue, b'}') => State::After,
            _ => State::Broken,
        };
        at + 1
    }

    fn feed_string(&mut self, bytes: &[u8], from: usize) -> usize {
        let (end, closed) = self.string_end(bytes, from);
        self.piece.push(&bytes[from..end]);
        if !closed {
            return end;
        }
        if self.state == State::InKey {
            let named = if self.is_inner {
                Field::inside_options
            } else {
                Field::at_the_top
            };
            let name = self.piece.whole().and_then(unescape);
            self.field = name.map_or(Field::Other, |name| named(&name));
            self.state = State::Colon;
        } else {
            let piece = std::mem::take(&mut self.piece);
            let raw = piece.whole();
            self.settle(Value::Text {
                empty: raw.is_some_and(<[u8]>::is_empty),
                raw,
            });
            self.piece = piece;
            self.state = State::AfterValue;
        }
        end + 1
    }

    fn feed_nested_string(&mut self, bytes: &[u8], from: usize) -> usize {
        let (end, closed) = self.string_end(bytes, from);
        let next = end + usize::from(closed);
        self.piece.push(&bytes[from..next]);
        if closed {
            self.state = State::InNested;
        }
        next
    }

    /// Where the string's closing quote stands, or the chunk's end and `false`.
    fn string_end(&mut self, bytes: &[u8], from: usize) -> (usize, bool) {
        let mut at = from;
        if self.escaped {
            self.escaped = false;
            at += 1;
        }
        while let Some(found) = bytes.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
            at += found;
            if bytes[at] == b'"' {
                return (at, true);
            }
            if at + 1 == bytes.len() {
                self.escaped = true;
                break;
            }
            at += 2;
        }
        (bytes.len(), false)
    }

    fn feed_nested(&mut self, bytes: &[u8], from: usize) -> usize {
        let mut at = from;
        while let Some(&byte) = bytes.get(at) {
            at += 1;
            match byte {
                b'"' => {
                    self.nested_filled = true;
                    self.nested_parts += u64::from(self.brackets.depth == 1);
                    self.state = State::InNestedString;
                    break;
                }
                b'{' | b'[' => {
                    self.nested_filled = true;
                    self.nested_parts += u64::from(self.brackets.depth == 1 && byte == b'[');
                    self.brackets.open(byte == b'{');
                }
                b'}' | b']' => {
                    if !self.brackets.close(byte == b'}') {
                        self.state = State::Broken;
                        break;
                    }
                    if self.brackets.depth == 0 {
                        self.piece.push(&bytes[from..at]);
                        self.settle_nested();
                        self.state = State::AfterValue;
                        return at;
                    }
                }
                _ if is_blank(byte) => {}
                _ => self.nested_filled = true,
            }
        }
        self.piece.push(&bytes[from..at]);
        at
    }

    fn feed_scalar(&mut self, bytes: &[u8], from: usize) -> usize {
        let ends = |byte: u8| is_blank(byte) || matches!(byte, b',' | b'}' | b']');
        let rest = &bytes[from..];
        let length = rest
            .iter()
            .position(|&byte| ends(byte))
            .unwrap_or(rest.len());
        self.piece.push(&rest[..length]);
        if length == rest.len() {
            return bytes.len();
        }
        let piece = std::mem::take(&mut self.piece);
        self.state = State::AfterValue;
        match piece.whole() {
            Some(b"null") => self.settle(Value::Null { at: self.scalar_at }),
            Some(b"true") => self.settle(Value::Bool(true)),
            Some(b"false") => self.settle(Value::Bool(false)),
            Some(number) if serde_json::from_slice::<IgnoredAny>(number).is_ok() => {
                self.settle(Value::Number(number));
            }
            Some(_) => self.state = State::Broken,
            // Too long to be anything that is looked at.
            None => self.settle(Value::Number(b"")),
        }
        self.piece = piece;
        from + length
    }

    fn settle_nested(&mut self) {
        let empty = !self.nested_filled;
        if !self.nested_object {
            return self.settle(Value::List {
                empty,
                parts: self.nested_parts,
            });
        }
        let piece = std::mem::take(&mut self.piece);
        let raw = piece.whole();
        self.settle(Value::Object {
            empty,
            open: self.nested_open,
            raw,
        });
        self.piece = piece;
    }

    /// Notes the field's value; what an earlier field of the same name said is forgotten.
    fn settle(&mut self, value: Value<'_>) {
        let Self { facts, stated, .. } = self;
        match self.field {
            Field::Other => {}
            Field::Model => facts.model = value.as_model(),
            Field::Stream => facts.stream = value.as_bool(),
            Field::Tools => stated.tools = is_filled_list(&value),
            Field::Functions => stated.functions = is_filled_list(&value),
            Field::PreviousResponse => stated.previous_response = !value.is_null(),
            Field::Conversation => stated.conversation = !value.is_null(),
            Field::Background => stated.background = value.as_bool() == Some(true),
            Field::MaxTokens => stated.max_tokens = value.as_count(),
            Field::MaxCompletionTokens => stated.max_completion_tokens = value.as_count(),
            Field::MaxOutputTokens => stated.max_output_tokens = value.as_count(),
            Field::PredictTokens => stated.n_predict = value.as_count(),
            Field::Answers => facts.answers = value.as_count(),
            Field::BestOf => facts.best_of = value.as_count(),
            Field::Prompt => {
                stated.prompt = value.is_filled();
                facts.prompts = match value {
                    Value::List {
                        parts: parts @ 1.., ..
                    } => Some(parts),
                    _ => None,
                };
            }
            Field::Messages => stated.messages = value.is_filled(),
            Field::Input => stated.input = value.is_filled(),
            Field::StreamOptions => {
                facts.has_stream_options = true;
                facts.stream_options_object = None;
                facts.stream_options_empty = false;
                facts.stream_options_null = None;
                facts.include_usage = None;
                facts.include_usage_null = None;
                facts.has_include_usage = false;
                match value {
                    Value::Object { empty, open, raw } => {
                        facts.stream_options_object = Some(open);
                        facts.stream_options_empty = empty;
                        facts.has_include_usage = raw.is_none();
                        if let Some(raw) = raw {
                            let inner = Self::inside(raw).facts;
                            facts.include_usage = inner.include_usage;
                            facts.has_include_usage = inner.has_include_usage;
                            // `raw` begins at the bracket, one before `open`.
                            facts.include_usage_null =
                                inner.include_usage_null.map(|at| open - 1 + at);
                        }
                    }
                    Value::Null { at } => facts.stream_options_null = Some(at),
                    _ => {}
                }
            }
            Field::Options => {
                stated.num_predict = match value {
                    Value::Object { raw: Some(raw), .. } => Self::inside(raw).stated.num_predict,
                    _ => None,
                };
            }
            Field::IncludeUsage => {
                facts.has_include_usage = true;
                facts.include_usage = value.as_bool();
                facts.include_usage_null = match value {
                    Value::Null { at } => Some(at),
                    _ => None,
                };
            }
            Field::NumPredict => stated.num_predict = value.as_count(),
        }
    }

    /// Scans an object that is a field of the body.
    fn inside(object: &[u8]) -> Self {
        let mut scan = Self {
            is_inner: true,
            ..Self::new()
        };
        scan.feed(object);
        scan
    }
}

fn is_filled_list(value: &Value<'_>) -> bool {
    matches!(value, Value::List { empty: false, .. })
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// The name of a request: equal exactly where two requests are the same call.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestKey(pub [u8; 32]);

impl fmt::Display for RequestKey {
    /// 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestKey({self})")
    }
}

/// Builds a [`RequestKey`]: SHA-256 over named parts and the body.
///
/// Names and lengths are hashed along, so no two lists of parts look alike.
/// The body has a hash of its own, so that it can be fed as it arrives, before
/// or after the parts are known.
#[derive(Clone, Debug)]
pub struct KeyHasher {
    /// Put together first: a hash is fed fastest in one piece.
    parts: Vec<u8>,
    body: Sha256,
}

impl Default for KeyHasher {
    fn default() -> Self {
        Self {
            parts: Vec::with_capacity(PARTS_BYTES),
            body: Sha256::new(),
        }
    }
}

/// Room for the parts of most requests: an address, a credential and a handful of headers.
const PARTS_BYTES: usize = 768;

impl KeyHasher {
    /// A hasher without parts, for an empty body.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part; order and repetition count.
    pub fn part(&mut self, name: &'static str, bytes: &[u8]) {
        for piece in [name.as_bytes(), bytes] {
            self.parts
                .extend_from_slice(&(piece.len() as u64).to_le_bytes());
            self.parts.extend_from_slice(piece);
        }
    }

    /// Adds the body's next bytes; where they are divided does not count.
    pub fn body(&mut self, bytes: &[u8]) {
        self.body.update(bytes);
    }

    /// The key of all that was added.
    pub fn finish(mut self) -> RequestKey {
        let body = self.body.finalize();
        // Fixed in length and always last: it cannot be taken for a part.
        self.parts.extend_from_slice(&body);
        RequestKey(Sha256::digest(&self.parts).into())
    }
}

/// Whether a request header changes the answer and so belongs in the key.
///
/// `name` is in lower case. Headers that only describe an attempt
/// (`x-stainless-*`, request ids, User-Agent) are not in it: an SDK's retry
/// has to meet its first attempt.
pub fn header_is_in_key(name: &str) -> bool {
    matches!(
        name,
        "accept"
            | "accept-encoding"
            | "content-type"
            | "content-encoding"
            | "anthropic-version"
            | "anthropic-beta"
            | "idempotency-key"
    ) || name.starts_with("openai-")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value as Json, json};

    use super::*;

    fn scan(body: impl AsRef<[u8]>) -> RequestFacts {
        let mut scan = RequestScan::new();
        scan.feed(body.as_ref());
        scan.finish()
    }

    fn scan_in_pieces(body: &[u8], size: usize) -> RequestFacts {
        let mut scan = RequestScan::new();
        body.chunks(size).for_each(|chunk| scan.feed(chunk));
        scan.finish()
    }

    #[test]
    fn reads_what_a_chat_request_asks_for() {
        let body = br#" {"model": "gpt-5", "stream" :true,"seed":9007199254740993,
            "messages":[{"role":"user","content":"say \"hi\" \\"}],
            "tools":[{"type":"function"}], "max_tokens":1e3, "n":2,
            "stream_options": {"include_usage": false}} "#;
        let facts = scan(body);
        let options = facts.stream_options_object.unwrap();
        assert_eq!(
            facts,
            RequestFacts {
                is_object: true,
                model: Some("gpt-5".into()),
                stream: Some(true),
                has_tools: true,
                include_usage: Some(false),
                has_include_usage: true,
                has_stream_options: true,
                stream_options_object: Some(options),
                object_open: Some(2),
                max_output: Some(1000),
                answers: Some(2),
                ..RequestFacts::default()
            }
        );
        assert!(body[..options].ends_with(br#""stream_options": {"#));
        for size in [1, 2, 3, 7, 64] {
            assert_eq!(scan_in_pieces(body, size), facts, "in pieces of {size}");
        }
    }

    #[test]
    fn the_last_of_equal_keys_counts() {
        let facts = scan(
            r#"{"model":"a","stream":true,"tools":[1],"stream_options":{"include_usage":true},
                "previous_response_id":"r","background":true,"max_tokens":5,
                "model":"b","stream":false,"tools":[],"stream_options":null,
                "previous_response_id":null,"background":false,"max_tokens":null,"input":"x"}"#,
        );
        assert_eq!(
            facts,
            RequestFacts {
                is_object: true,
                model: Some("b".into()),
                stream: Some(false),
                has_stream_options: true,
                stream_options_null: facts.stream_options_null,
                object_open: Some(1),
                ..RequestFacts::default()
            }
        );
    }

    #[test]
    fn escapes_are_read_in_keys_and_values() {
        let body = r#"{"mod\u0065l":"caf\u00e9 \ud83d\ude00 \"x\"","str\u0065am":true}"#;
        for size in 1..body.len() {
            let facts = scan_in_pieces(body.as_bytes(), size);
            assert_eq!(
                facts.model.as_deref(),
                Some("café 😀 \"x\""),
                "in pieces of {size}"
            );
            assert_eq!(facts.stream, Some(true));
        }
        assert_eq!(scan(r#"{"\model":"x"}"#).model, None, "not a valid escape");
        assert_eq!(
            scan(r#"{"model":"\ud800"}"#).model,
            None,
            "half a surrogate pair"
        );
    }

    #[test]
    fn only_the_top_level_is_read() {
        let facts = scan(
            r#"{"metadata":{"model":"inner","stream":true,"tools":[1]},"include_usage":true,
                "num_predict":7,"messages":[{"model":"deep"}]}"#,
        );
        let expected = RequestFacts {
            is_object: true,
            object_open: Some(1),
            ..RequestFacts::default()
        };
        assert_eq!(facts, expected);
    }

    #[test]
    fn keys_of_the_top_level_mean_nothing_inside_options() {
        let facts = scan(
            r#"{"stream_options":{"include_usage":true,"stream_options":null,"model":"m"},
                "options":{"num_predict":3,"options":{"num_predict":4},"max_tokens":5}}"#,
        );
        assert_eq!(
            (facts.include_usage, facts.max_output),
            (Some(true), Some(3))
        );
        assert_eq!(facts.model, None);
    }

    #[test]
    fn output_limits_of_every_dialect() {
        for (body, limit) in [
            (r#"{"max_tokens":10}"#, Some(10)),
            (r#"{"max_completion_tokens":11,"max_tokens":3}"#, Some(11)),
            (r#"{"max_output_tokens":12}"#, Some(12)),
            (r#"{"n_predict":-1}"#, None),
            (
                r#"{"options":{"stop":["}","]"],"num_predict":13}}"#,
                Some(13),
            ),
            (r#"{"options":{"num_predict":-2}}"#, None),
            (r#"{"options":{"num_predict":5},"options":{}}"#, None),
            (r#"{"max_tokens":"10"}"#, None),
            (r#"{"max_tokens":1e400}"#, Some(u64::MAX)),
        ] {
            assert_eq!(scan(body).max_output, limit, "{body}");
        }
    }

    #[test]
    fn outputs_are_counted_where_each_may_have_the_whole_limit() {
        for (body, outputs) in [
            (r#"{"messages":[{},{}]}"#, 1),
            (r#"{"messages":[{}],"n":4}"#, 4),
            (r#"{"n":0}"#, 1),
            (r#"{"prompt":"a"}"#, 1),
            (r#"{"prompt":["a","b","[,\"c"]}"#, 3),
            (r#"{"prompt":[1,2,3]}"#, 1),
            (r#"{"prompt":[[1,2],[3,[4]]],"n":2}"#, 4),
            (r#"{"prompt":["a"],"n":2,"best_of":5}"#, 5),
            (
                r#"{"prompt":["a","b"],"prompt":"a","best_of":2,"best_of":null}"#,
                1,
            ),
            (r#"{"n":18446744073709551615,"prompt":["a","b"]}"#, u64::MAX),
        ] {
            assert_eq!(scan(body).outputs(), outputs, "{body}");
        }
    }

    #[test]
    fn stream_options_too_long_to_look_into_may_hold_a_choice() {
        let long = "x".repeat(OBJECT_BYTES);
        let facts = scan(format!(
            r#"{{"stream_options":{{"include_usage":false,"x":"{long}"}}}}"#
        ));
        assert_eq!((facts.include_usage, facts.has_include_usage), (None, true));
    }

    #[test]
    fn a_request_without_a_prompt_only_loads_a_model() {
        for (body, no_prompt) in [
            (r#"{"model":"m"}"#, true),
            (r#"{"model":"m","prompt":""}"#, true),
            (r#"{"model":"m","messages":[ ]}"#, true),
            (r#"{"model":"m","prompt":"x"}"#, false),
            (r#"{"model":"m","messages":[{}]}"#, false),
            (r#"{"model":"m","input":["x"]}"#, false),
        ] {
            assert_eq!(scan(body).no_prompt, no_prompt, "{body}");
        }
    }

    #[test]
    fn server_state() {
        for (body, state) in [
            (r#"{"previous_response_id":"resp_1"}"#, true),
            (r#"{"conversation":{"id":"conv_1"}}"#, true),
            (r#"{"background":true}"#, true),
            (
                r#"{"previous_response_id":null,"conversation":null,"background":false}"#,
                false,
            ),
        ] {
            assert_eq!(scan(body).server_state, state, "{body}");
        }
    }

    #[test]
    fn what_is_not_one_whole_object_is_not_an_object() {
        for body in [
            "",
            " ",
            "[]",
            "[{}]",
            "\"x\"",
            "12",
            "{",
            "{}}",
            "{} {}",
            "{]",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{,}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":[}]}",
            "{\"a\":{\"b\":1]}",
            "{\"a\":[{]]}",
            "{\"a\":{\"b\":[}}}",
            "{\"a\":tru}",
            "{\"a\":01}",
            "{\"a\":+1}",
            "{\"a\":\"x}",
            "{'a':1}",
            "\u{feff}",
            "\u{feff}\u{feff}{}",
            "}{",
            "{\"a\":1]",
            "{\"a\":nul",
        ] {
            assert!(!scan(body).is_object, "{body:?}");
        }
        for (body, empty) in [
            ("{}", true),
            (" { } \r\n", true),
            ("\u{feff} {\"a\":{}}", false),
        ] {
            let facts = scan(body);
            assert!(facts.is_object, "{body:?}");
            assert_eq!(facts.empty_object, empty, "{body:?}");
            assert!(body[..facts.object_open.unwrap()].ends_with('{'));
        }
    }

    #[test]
    fn a_broken_body_keeps_what_stood_before_the_break() {
        let facts = scan(r#"{"model":"m","stream":true,"messages":[{"role":"us"#);
        assert!(!facts.is_object);
        assert_eq!(
            (facts.model.as_deref(), facts.stream),
            (Some("m"), Some(true))
        );
    }

    #[test]
    fn model_names_are_bounded() {
        let longest = "m".repeat(MODEL_BYTES);
        assert_eq!(
            scan(format!(r#"{{"model":"{longest}"}}"#)).model,
            Some(longest.clone())
        );
        assert_eq!(scan(format!(r#"{{"model":"{longest}m"}}"#)).model, None);
        let escaped = "\\u006d".repeat(MODEL_BYTES);
        assert_eq!(
            scan(format!(r#"{{"model":"{escaped}"}}"#)).model,
            Some(longest)
        );
    }

    #[test]
    fn ten_million_brackets_take_no_memory() {
        let mut scan = RequestScan::new();
        scan.feed(b"{\"model\":\"m\",\"messages\":");
        let brackets = [b'['; 10_000];
        (0..1000).for_each(|_| scan.feed(&brackets));
        assert_eq!(scan.brackets.depth, 10_000_000);
        assert!(scan.piece.bytes.capacity() <= KEY_BYTES);
        let closing = [b']'; 10_000];
        (0..1000).for_each(|_| scan.feed(&closing));
        scan.feed(b",\"stream\":true}");
        let facts = scan.finish();
        assert!(facts.is_object);
        assert_eq!(facts.stream, Some(true));
    }

    #[test]
    fn keys_tell_parts_apart() {
        let key = |parts: &[(&'static str, &str)], body: &[&str]| {
            let mut hasher = KeyHasher::new();
            parts
                .iter()
                .for_each(|(name, value)| hasher.part(name, value.as_bytes()));
            body.iter().for_each(|chunk| hasher.body(chunk.as_bytes()));
            hasher.finish()
        };
        let keys = [
            key(&[], &[]),
            key(&[("path", "ab")], &[]),
            key(&[("path", "a")], &["b"]),
            key(&[("path", "a"), ("path", "b")], &[]),
            key(&[("path", "b"), ("path", "a")], &[]),
            key(&[("path", ""), ("path", "ab")], &[]),
            key(&[("pat", "hab")], &[]),
            key(&[], &["ab"]),
            key(&[("path", "")], &["ab"]),
        ];
        for (at, one) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(one), "{at} equals an earlier one");
        }
        assert_eq!(
            key(&[("path", "a")], &["x", "yz", ""]),
            key(&[("path", "a")], &["xyz"])
        );
        assert_eq!(RequestKey([0x0f; 32]).to_string(), "0f".repeat(32));
    }

    #[test]
    fn a_key_stays_what_it_is() {
        let mut hasher = KeyHasher::new();
        hasher.part("method", b"POST");
        hasher.body(b"{}");
        // Computed apart from this code, with Python's hashlib.
        let expected = "5cfec961acf3376625110e99b5e0ba8b48f248b8c81907cc5b4055ea7b5ff4b5";
        assert_eq!(hasher.finish().to_string(), expected);
    }

    #[test]
    fn headers_that_change_the_answer() {
        for name in [
            "accept",
            "content-encoding",
            "anthropic-beta",
            "openai-organization",
        ] {
            assert!(header_is_in_key(name), "{name}");
        }
        for name in [
            "user-agent",
            "x-stainless-retry-count",
            "authorization",
            "openai",
            "accept-language",
        ] {
            assert!(!header_is_in_key(name), "{name}");
        }
    }

    /// Any JSON value, a few levels deep.
    fn any_json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            any::<u64>().prop_map(Json::from),
            (-1e9..1e9).prop_map(|number: f64| json!(number)),
            text().prop_map(Json::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
                prop::collection::vec((key(), inner), 0..4)
                    .prop_map(|fields| Json::Object(Map::from_iter(fields))),
            ]
        })
    }

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![r#"[\\"{}\[\]:,a é😀\n]{0,12}"#, "[a-z]{250,260}"]
    }

    fn key() -> impl Strategy<Value = String> {
        const KEYS: &[&str] = &[
            "model",
            "stream",
            "tools",
            "functions",
            "previous_response_id",
            "conversation",
            "background",
            "stream_options",
            "options",
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "n_predict",
            "n",
            "best_of",
            "prompt",
            "messages",
            "input",
            "include_usage",
            "num_predict",
        ];
        prop_oneof![4 => prop::sample::select(KEYS).prop_map(str::to_owned), 1 => text()]
    }

    /// The text of an object with these fields in this order, spaced by `blanks` and with
    /// `escapes` saying which keys are written in `\u` escapes.
    fn render(fields: &[(String, Json)], blanks: &[&str], escapes: &[bool]) -> String {
        let mut blank = blanks.iter().cycle().copied();
        let mut space = || blank.next().unwrap_or_default();
        let mut body = format!("{}{{{}", space(), space());
        for (at, ((name, value), escaped)) in fields.iter().zip(escapes.iter().cycle()).enumerate()
        {
            let name = if *escaped {
                let units = name.encode_utf16().map(|unit| format!("\\u{unit:04x}"));
                format!("\"{}\"", units.collect::<String>())
            } else {
                json!(name).to_string()
            };
            let comma = if at == 0 { "" } else { "," };
            body += &format!(
                "{comma}{}{name}{}:{}{value}{}",
                space(),
                space(),
                space(),
                space()
            );
        }
        body + "}" + space()
    }

    /// The same facts, read off serde_json's value tree; offsets are left to the caller.
    fn facts_of(tree: &Json) -> RequestFacts {
        let field = |name: &str| tree.get(name).unwrap_or(&Json::Null);
        let count = |value: &Json| {
            let float = value.as_f64().filter(|number| *number >= 0.0);
            value.as_u64().or(float.map(|number| number as u64))
        };
        let filled = |value: &Json| match value {
            Json::Null | Json::Bool(false) => false,
            Json::Bool(true) | Json::Number(_) => true,
            Json::String(text) => !text.is_empty(),
            Json::Array(list) => !list.is_empty(),
            Json::Object(fields) => !fields.is_empty(),
        };
        let is_list = |name| field(name).as_array().is_some_and(|list| !list.is_empty());
        let limits = [
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "n_predict",
        ];
        let num_predict = field("options").get("num_predict").and_then(count);
        let model = field("model")
            .as_str()
            .filter(|model| model.len() <= MODEL_BYTES);
        let options = field("stream_options");
        RequestFacts {
            is_object: true,
            model: model.map(str::to_owned),
            stream: field("stream").as_bool(),
            has_tools: is_list("tools") || is_list("functions"),
            server_state: !field("previous_response_id").is_null()
                || !field("conversation").is_null()
                || field("background") == &json!(true),
            include_usage: options.get("include_usage").and_then(Json::as_bool),
            has_include_usage: options.get("include_usage").is_some(),
            include_usage_null: None,
            stream_options_null: None,
            has_stream_options: tree.get("stream_options").is_some(),
            stream_options_object: None,
            stream_options_empty: options.as_object().is_some_and(Map::is_empty),
            object_open: None,
            empty_object: tree == &json!({}),
            max_output: limits
                .into_iter()
                .filter_map(|name| count(field(name)))
                .chain(num_predict)
                .max(),
            answers: count(field("n")),
            best_of: count(field("best_of")),
            prompts: field("prompt")
                .as_array()
                .map(|list| list.iter().filter(|one| one.is_string() || one.is_array()))
                .map(|parts| parts.count() as u64)
                .filter(|parts| *parts > 0),
            no_prompt: !["prompt", "messages", "input"]
                .into_iter()
                .any(|name| filled(field(name))),
        }
    }

    fn feed_at(body: &[u8], cuts: &[prop::sample::Index]) -> RequestFacts {
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
        cuts.sort_unstable();
        let mut scan = RequestScan::new();
        let mut from = 0;
        for cut in cuts {
            scan.feed(&body[from..cut]);
            from = cut;
        }
        scan.feed(&body[from..]);
        scan.finish()
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json(
            fields in prop::collection::vec((key(), any_json()), 0..12),
            blanks in prop::collection::vec(prop::sample::select(vec!["", " ", "\r\n", "\t"]), 1..5),
            escapes in prop::collection::vec(any::<bool>(), 1..5),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let body = render(&fields, &blanks, &escapes);
            let facts = feed_at(body.as_bytes(), &cuts);
            let tree: Json = serde_json::from_str(&body).unwrap();

            let expected = RequestFacts {
                object_open: facts.object_open,
                stream_options_object: facts.stream_options_object,
                stream_options_null: facts.stream_options_null,
                include_usage_null: facts.include_usage_null,
                ..facts_of(&tree)
            };
            prop_assert_eq!(&facts, &expected);

            // What the offsets are for: text put in there becomes a field.
            let splice = |at: usize, empty: bool| -> Json {
                let comma = if empty { "" } else { "," };
                let body = format!("{}\"spliced\":1{comma}{}", &body[..at], &body[at..]);
                serde_json::from_str(&body).unwrap()
            };
            let spliced = splice(facts.object_open.unwrap(), facts.empty_object);
            prop_assert_eq!(&spliced["spliced"], &json!(1));
            if let Some(at) = facts.stream_options_object {
                let spliced = splice(at, facts.stream_options_empty);
                prop_assert_eq!(&spliced["stream_options"]["spliced"], &json!(1));
            }
            prop_assert_eq!(facts.stream_options_object.is_some(), tree["stream_options"].is_object());
            for (null, is_null) in [
                (facts.stream_options_null, tree.get("stream_options") == Some(&Json::Null)),
                (
                    facts.include_usage_null,
                    tree["stream_options"].get("include_usage") == Some(&Json::Null),
                ),
            ] {
                prop_assert_eq!(null.is_some(), is_null);
                prop_assert!(null.is_none_or(|at| body[at..].starts_with("null")));
            }
        }

        #[test]
        fn any_bytes_in_any_pieces_are_read_the_same(
            body in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200),
                r#"[{}\[\]",:\\ a0tfn\u{feff}]{0,60}"#.prop_map(String::into_bytes),
                r#"\{"model":"[{}\[\]",:\\ a0tfn]{0,60}"#.prop_map(String::into_bytes),
            ],
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let whole = scan(&body);
            prop_assert_eq!(&feed_at(&body, &cuts), &whole);
            prop_assert_eq!(&scan_in_pieces(&body, 1), &whole);
            if serde_json::from_slice::<Map<String, Json>>(&body).is_ok() {
                prop_assert!(whole.is_object);
            }
        }
    }
}
