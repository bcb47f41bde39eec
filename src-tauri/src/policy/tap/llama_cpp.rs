//! llama.cpp's own `completion`, streamed or not.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::{Filled, Shape, parse};
use super::{Learned, Stop, usage};

#[derive(Deserialize)]
struct Completion<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    #[serde(default)]
    content: Filled,
    #[serde(borrow, default)]
    stop: Shape<'a>,
    #[serde(borrow, default)]
    stop_type: Shape<'a>,
    /// Older servers, before `stop_type`.
    #[serde(borrow, default)]
    stopped_limit: Shape<'a>,
    /// The prompt did not fit the context.
    #[serde(borrow, default)]
    truncated: Shape<'a>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tokens_evaluated: Shape<'a>,
    #[serde(borrow, default)]
    tokens_predicted: Shape<'a>,
    #[serde(borrow, default)]
    timings: Option<&'a RawValue>,
}

/// Reads the data of an event, or a whole answer.
pub(super) fn read(learned: &mut Learned, data: &[u8]) {
    if data.trim_ascii() == b"[DONE]" {
        learned.last_event = true;
        return;
    }
    let Some(part) = parse::<Completion<'_>>(data) else {
        return;
    };
    learned.note_model(&part.model);
    learned.note_error_field(part.error);
    usage::note_llama_cpp(
        &mut learned.usage,
        &part.tokens_evaluated,
        &part.tokens_predicted,
        part.timings,
    );
    learned.output |= part.content.0;
    if part.stop.is_true() {
        learned.last_event = true;
        learned.note_stop(match part.stop_type.text() {
            _ if part.truncated.is_true() || part.stopped_limit.is_true() => Stop::Cut,
            Some("limit") => Stop::Cut,
            Some("eos" | "word") | None => Stop::Natural,
            Some(_) => Stop::Unfamiliar,
        });
    }
}
