//! Ollama's `api/chat`, `api/generate` and `api/embed`, a line of a stream or a whole answer.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::{Filled, Shape, parse};
use super::{Learned, Stop, usage};

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    /// Of `chat`.
    #[serde(default)]
    message: Option<Message>,
    /// Of `generate`.
    #[serde(default)]
    response: Filled,
    #[serde(default)]
    thinking: Filled,
    #[serde(borrow, default)]
    done: Shape<'a>,
    #[serde(borrow, default)]
    done_reason: Shape<'a>,
    /// Of `embed`.
    #[serde(default)]
    embeddings: Option<Filled>,
    /// Of `embeddings`, its older form.
    #[serde(default)]
    embedding: Option<Filled>,
    /// Of the last line, and of `embed`.
    #[serde(borrow, default)]
    prompt_eval_count: Shape<'a>,
    #[serde(borrow, default)]
    eval_count: Shape<'a>,
    /// Also in the middle of a stream whose status was 200.
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: Filled,
    #[serde(default)]
    thinking: Filled,
    #[serde(default)]
    tool_calls: Filled,
}

pub(super) fn read(learned: &mut Learned, line: &[u8]) {
    let Some(line) = parse::<Line<'_>>(line) else {
        return;
    };
    learned.note_model(&line.model);
    learned.note_error_field(line.error);
    usage::note_ollama(
        &mut learned.usage,
        &line.prompt_eval_count,
        &line.eval_count,
    );
    learned.output |= line.response.0 || line.thinking.0;
    if let Some(message) = line.message {
        learned.output |= message.content.0 || message.thinking.0 || message.tool_calls.0;
    }
    if let Some(Filled(any)) = line.embeddings.or(line.embedding) {
        learned.output |= any;
        learned.note_stop(Stop::Natural);
        learned.usage.counts.completion.get_or_insert(0);
    }
    if line.done.is_true() {
        learned.last_event = true;
        learned.note_stop(match line.done_reason.text() {
            // Older servers give no reason.
            Some("stop" | "") | None => Stop::Natural,
            Some("length") => Stop::Cut,
            Some("load" | "unload") => Stop::Load,
            Some(_) => Stop::Unfamiliar,
        });
    }
}
