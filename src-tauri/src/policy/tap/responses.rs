//! OpenAI's `responses` and `responses/compact`, streamed or not.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::framing::Event;
use super::shape::{Shape, Tally, parse, tally};
use super::{Learned, Stop, StreamError, usage};
use crate::policy::routing::Route;

/// The events that carry the response itself: `response.completed` and kin.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    response: Response<'a>,
}

#[derive(Deserialize)]
struct Response<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    /// Absent in the answer of `compact`.
    #[serde(borrow, default)]
    status: Shape<'a>,
    #[serde(borrow, default)]
    incomplete_details: Option<IncompleteDetails<'a>>,
    /// May be empty in `response.completed` where nothing is stored (the Codex login).
    #[serde(default, deserialize_with = "tally")]
    output: Output,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    /// Null until the response has ended.
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct IncompleteDetails<'a> {
    #[serde(borrow, default)]
    reason: Shape<'a>,
}

#[derive(Default)]
struct Output {
    any: bool,
    refused: bool,
}

#[derive(Deserialize)]
struct OutputItem {
    /// Of a `message` item.
    #[serde(default, deserialize_with = "tally")]
    content: Content,
}

impl<'de> Tally<'de> for Output {
    type Item = OutputItem;

    fn add(&mut self, item: OutputItem) {
        self.any = true;
        self.refused |= item.content.refused;
    }
}

#[derive(Default)]
struct Content {
    refused: bool,
}

#[derive(Deserialize)]
struct ContentPart<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Shape<'a>,
}

impl<'de> Tally<'de> for Content {
    type Item = ContentPart<'de>;

    fn add(&mut self, part: ContentPart<'de>) {
        self.refused |= part.kind.text() == Some("refusal");
    }
}

pub(super) fn read_event(learned: &mut Learned, event: Event<'_>) {
    match &*event.kind() {
        "response.completed" => read_last(learned, event, "completed"),
        "response.incomplete" => read_last(learned, event, "incomplete"),
        "response.cancelled" => read_last(learned, event, "cancelled"),
        "response.failed" => read_last(learned, event, "failed"),
        "error" => learned.note_error(StreamError::of_event(event.data)),
        kind => {
            learned.refused |= kind.starts_with("response.refusal.");
            learned.output |= kind.ends_with(".delta")
                || matches!(
                    kind,
                    "response.output_item.added" | "response.output_item.done"
                );
        }
    }
}

pub(super) fn read_answer(learned: &mut Learned, answer: &[u8]) {
    let Some(response) = parse::<Response<'_>>(answer) else {
        return;
    };
    note(learned, &response);
    match response.status.text() {
        Some(status) => note_status(learned, status, &response),
        None if response.output.any => learned.note_stop(Stop::Natural),
        None => {}
    }
}

/// Reads a stream's last event; one too long to be read still says its status by its name.
fn read_last(learned: &mut Learned, event: Event<'_>, status: &str) {
    learned.last_event = true;
    let response = parse::<Envelope<'_>>(event.data).map(|envelope| envelope.response);
    match response {
        Some(response) => {
            note(learned, &response);
            note_status(learned, response.status.text().unwrap_or(status), &response);
        }
        None => {
            learned.note_stop(match status {
                "completed" => Stop::Natural,
                "failed" => Stop::Failed,
                _ => Stop::Cut,
            });
            usage::note_tail(&mut learned.usage, Route::Responses, event.tail);
        }
    }
}

fn note(learned: &mut Learned, response: &Response<'_>) {
    learned.note_model(&response.model);
    learned.note_error_field(response.error);
    learned.output |= response.output.any;
    learned.refused |= response.output.refused;
    usage::note_openai(&mut learned.usage, response.usage);
}

fn note_status(learned: &mut Learned, status: &str, response: &Response<'_>) {
    let reason = response
        .incomplete_details
        .as_ref()
        .and_then(|details| details.reason.text());
    learned.note_stop(match status {
        "completed" => Stop::Natural,
        "incomplete" if reason == Some("content_filter") => Stop::Filtered,
        // A background response is still at work, or was called off.
        "incomplete" | "in_progress" | "queued" | "cancelled" => Stop::Cut,
        "failed" => Stop::Failed,
        _ => Stop::Unfamiliar,
    });
}
