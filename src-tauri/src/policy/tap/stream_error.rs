//! Reads what went wrong out of an error event or an error body, in whatever form it comes.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::Shape;

/// What a provider said went wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamError {
    /// The provider's word for it: its `type`, else `code`, else `status`, e.g.
    /// `overloaded_error`. At most 64 bytes, empty if it has none.
    pub kind: String,
    /// Its message for people, as it came; at most 1,024 bytes. It may repeat
    /// what the request held.
    pub message: String,
    /// The model is overloaded, which says nothing against its neighbours.
    pub overloaded: bool,
}

const KIND_BYTES: usize = 64;
const MESSAGE_BYTES: usize = 1024;
/// Anthropic's status, and OpenRouter's error code, for an overloaded model.
pub(super) const OVERLOADED: u16 = 529;

/// The envelopes an error comes in, all at once: `{"error":…}`, `{"detail":…}`, or the
/// error's own fields at the top.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    detail: Option<&'a RawValue>,
    #[serde(borrow, default, rename = "type")]
    kind: Shape<'a>,
    #[serde(borrow, default)]
    code: Shape<'a>,
    #[serde(borrow, default)]
    status: Shape<'a>,
    #[serde(borrow, default)]
    message: Shape<'a>,
}

/// Some wrap an error in an error.
const NESTING: usize = 3;

impl StreamError {
    /// Reads the body of an answer that is no success. `None` if nothing can be made of it.
    pub(super) fn of_body(body: &[u8]) -> Option<Self> {
        let body = trim(body);
        let text = match std::str::from_utf8(body) {
            Ok(text) => text,
            // The head of a long one may end within a character.
            Err(error) => std::str::from_utf8(&body[..error.valid_up_to()]).unwrap_or_default(),
        };
        Self::of_json(text, NESTING).or_else(|| Self::of_text(text))
    }

    /// Reads the data of an event that is an error by its name or type.
    pub(super) fn of_event(data: &[u8]) -> Self {
        Self::of_body(data).unwrap_or_default()
    }

    /// Reads the value of an `error` field. `None` if it says that there is no error.
    pub(super) fn of_field(value: &RawValue) -> Option<Self> {
        match value.get() {
            "null" | "false" | "\"\"" | "{}" | "[]" => None,
            text => Some(Self::of_json(text, NESTING).unwrap_or_default()),
        }
    }

    fn of_json(text: &str, nesting: usize) -> Option<Self> {
        match text.as_bytes().first()? {
            b'"' => {
                let message: String = serde_json::from_str(text).ok()?;
                Some(Self::new("", false, &message))
            }
            b'[' if nesting > 0 => {
                let list: Vec<&RawValue> = serde_json::from_str(text).ok()?;
                Self::of_json(list.first()?.get(), nesting - 1)
            }
            b'{' => {
                let envelope: Envelope<'_> = serde_json::from_str(text).ok()?;
                Self::of_envelope(&envelope, text, nesting)
            }
            _ => None,
        }
    }

    fn of_envelope(envelope: &Envelope<'_>, text: &str, nesting: usize) -> Option<Self> {
        if let Some(error) = envelope.error
            && nesting > 0
            && let Some(mut inner) = Self::of_json(error.get(), nesting - 1)
        {
            // `{"error":"text","code":…}`: what stands beside it says the kind.
            if inner.kind.is_empty() {
                let (kind, overloaded) = envelope.kind();
                inner.kind = kind;
                inner.overloaded |= overloaded;
            }
            return Some(inner);
        }
        let (kind, overloaded) = envelope.kind();
        if let Some(message) = envelope.message.text() {
            return Some(Self::new(&kind, overloaded, message));
        }
        if let Some(detail) = envelope.detail {
            // A text, or FastAPI's list of what was wrong with which field.
            let message = serde_json::from_str::<String>(detail.get())
                .unwrap_or_else(|_| detail.get().to_owned());
            return Some(Self::new(&kind, overloaded, &message));
        }
        let message = if kind.is_empty() { text } else { "" };
        Some(Self::new(&kind, overloaded, message))
    }

    /// A page or a plain text: its title, or its first line.
    fn of_text(text: &str) -> Option<Self> {
        let title = between(text, "<title>", "</title>");
        let line = match title {
            Some(title) => title,
            None if text.starts_with('<') => return None,
            None => text.lines().next()?,
        };
        Some(Self::new("", false, line.trim()))
    }

    fn new(kind: &str, overloaded: bool, message: &str) -> Self {
        Self {
            kind: clip(kind, KIND_BYTES),
            message: clip(message, MESSAGE_BYTES),
            overloaded,
        }
    }
}

impl Envelope<'_> {
    /// The provider's word for the error, and whether it means an overload.
    fn kind(&self) -> (String, bool) {
        // `"type":"error"` only says that this is one.
        let kind = self.kind.text().filter(|kind| *kind != "error");
        let code = match &self.code {
            Shape::Text(code) => Some(code.to_string()),
            Shape::Count(code) => Some(code.to_string()),
            _ => None,
        };
        let overloaded = self.code == Shape::Count(OVERLOADED.into())
            || [kind, code.as_deref()]
                .into_iter()
                .flatten()
                .any(says_overloaded);
        let word = kind.map(str::to_owned).or(code);
        (
            word.or_else(|| self.status.text().map(str::to_owned))
                .unwrap_or_default(),
            overloaded,
        )
    }
}

/// `overloaded_error` (Anthropic), `server_is_overloaded` (OpenAI's Responses) and kin.
fn says_overloaded(word: &str) -> bool {
    word.contains("overloaded")
}

fn between<'a>(text: &'a str, open: &str, close: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(open)?;
    let (inner, _) = rest.split_once(close)?;
    Some(inner)
}

fn clip(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}

/// Without the byte order mark and white space around it.
pub(super) fn trim(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xEF\xBB\xBF")
        .unwrap_or(body)
        .trim_ascii()
}
