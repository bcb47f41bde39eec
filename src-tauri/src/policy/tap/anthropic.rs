//! Anthropic's `messages`, streamed or not.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::framing::Event;
use super::shape::{Filled, Shape, parse};
use super::{Learned, Stop, StreamError, usage};

/// The events `message_start` and `message_delta`.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default)]
    message: Option<Message<'a>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    /// Of `message_delta`.
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    stop_reason: Shape<'a>,
}

/// A whole answer, and the beginning of one in `message_start`.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    #[serde(default)]
    content: Filled,
    #[serde(borrow, default)]
    stop_reason: Shape<'a>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

pub(super) fn read_event(learned: &mut Learned, event: Event<'_>) {
    // The stop reason comes first, and clients wait for what comes after it.
    learned.needs_last_event = true;
    match &*event.kind() {
        // By far the most, and nothing in them matters once it is known that they come.
        "content_block_start" | "content_block_delta" => learned.output = true,
        "message_start" | "message_delta" => {
            let Some(envelope) = parse::<Envelope<'_>>(event.data) else {
                return;
            };
            if let Some(message) = envelope.message {
                learned.note_model(&message.model);
                usage::note_anthropic_start(&mut learned.usage, message.usage);
            }
            if let Some(delta) = envelope.delta {
                note_stop_reason(learned, &delta.stop_reason);
            }
            usage::note_anthropic(&mut learned.usage, envelope.usage);
        }
        "message_stop" => learned.last_event = true,
        "error" => learned.note_error(StreamError::of_event(event.data)),
        _ => {}
    }
}

pub(super) fn read_answer(learned: &mut Learned, answer: &[u8]) {
    let Some(message) = parse::<Message<'_>>(answer) else {
        return;
    };
    learned.note_model(&message.model);
    learned.note_error_field(message.error);
    learned.output |= message.content.0;
    note_stop_reason(learned, &message.stop_reason);
    usage::note_anthropic(&mut learned.usage, message.usage);
}

fn note_stop_reason(learned: &mut Learned, reason: &Shape<'_>) {
    let Some(reason) = reason.text() else {
        return;
    };
    match reason {
        "end_turn" | "tool_use" | "stop_sequence" => learned.note_stop(Stop::Natural),
        "max_tokens" | "model_context_window_exceeded" | "pause_turn" => {
            learned.note_stop(Stop::Cut);
        }
        "refusal" => learned.refused = true,
        _ => learned.note_stop(Stop::Unfamiliar),
    }
}
