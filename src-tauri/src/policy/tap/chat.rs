//! OpenAI's `chat/completions` and `completions`, streamed or not, as all who copy them
//! (OpenRouter, Azure, DeepSeek, Mistral, Gemini, vLLM, llama.cpp, …) send them.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::{Filled, Shape, Tally, parse, tally};
use super::{Learned, Stop, StreamError, usage};
use crate::policy::usage::Reported;

/// A chunk of a stream, or a whole answer: they differ in `delta` and `message`.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    /// Empty in Azure's first chunk and in a usage chunk.
    #[serde(default, deserialize_with = "tally")]
    choices: Choices,
    /// OpenRouter's way to fail half-way, llama.cpp's and vLLM's too.
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    x_groq: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    index: Shape<'a>,
    #[serde(borrow, default)]
    finish_reason: Shape<'a>,
    #[serde(default)]
    delta: Option<Message>,
    #[serde(default)]
    message: Option<Message>,
    /// Of `completions`.
    #[serde(default)]
    text: Filled,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    /// Moonshot's place for it, in a stream's last chunk.
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: Filled,
    /// OpenRouter, Groq.
    #[serde(default)]
    reasoning: Filled,
    /// DeepSeek, vLLM, llama.cpp, xAI.
    #[serde(default)]
    reasoning_content: Filled,
    #[serde(default)]
    reasoning_details: Filled,
    #[serde(default)]
    tool_calls: Filled,
    #[serde(default)]
    function_call: Filled,
    #[serde(default)]
    refusal: Filled,
    #[serde(default)]
    audio: Filled,
    #[serde(default)]
    images: Filled,
}

impl Message {
    fn has_output(&self) -> bool {
        let Self {
            content: Filled(content),
            reasoning: Filled(reasoning),
            reasoning_content: Filled(reasoning_content),
            reasoning_details: Filled(reasoning_details),
            tool_calls: Filled(tool_calls),
            function_call: Filled(function_call),
            refusal: Filled(refusal),
            audio: Filled(audio),
            images: Filled(images),
        } = *self;
        content
            || reasoning
            || reasoning_content
            || reasoning_details
            || tool_calls
            || function_call
            || refusal
            || audio
            || images
    }
}

/// Which choices have begun and which have said why they stopped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChoiceSet {
    begun: u128,
    ended: u128,
    /// One with an index past the 128 that OpenAI allows; it is never seen to end.
    beyond: bool,
}

impl ChoiceSet {
    /// Some choice has begun and not ended.
    pub(super) fn is_open(&self) -> bool {
        self.beyond || self.begun & !self.ended != 0
    }

    fn add(&mut self, index: u64, ended: bool) {
        match u32::try_from(index)
            .ok()
            .and_then(|index| 1_u128.checked_shl(index))
        {
            Some(bit) => {
                self.begun |= bit;
                self.ended |= if ended { bit } else { 0 };
            }
            None => self.beyond = true,
        }
    }

    fn join(&mut self, other: Self) {
        self.begun |= other.begun;
        self.ended |= other.ended;
        self.beyond |= other.beyond;
    }
}

#[derive(Default)]
struct Choices {
    set: ChoiceSet,
    output: bool,
    refused: bool,
    stop: Option<Stop>,
    error: Option<StreamError>,
    // Boxed, since nearly every chunk has none and its choices are moved about.
    usage: Option<Box<Reported>>,
}

impl<'de> Tally<'de> for Choices {
    type Item = Choice<'de>;

    fn add(&mut self, choice: Choice<'de>) {
        let stop = choice.finish_reason.text().and_then(stop_of);
        self.stop = self.stop.max(stop);
        // A provider that counts nothing has one choice.
        let index = match choice.index {
            Shape::Count(index) => index,
            _ => 0,
        };
        self.set.add(index, stop.is_some());
        self.output |= choice.text.0;
        for message in [choice.delta, choice.message].into_iter().flatten() {
            self.output |= message.has_output();
            self.refused |= message.refusal.0;
        }
        if self.error.is_none() {
            self.error = choice.error.and_then(StreamError::of_field);
        }
        if choice.usage.is_some() {
            usage::note_openai(self.usage.get_or_insert_default(), choice.usage);
        }
    }
}

fn stop_of(finish_reason: &str) -> Option<Stop> {
    Some(match finish_reason {
        // What some send until there is a reason.
        "" | "null" => return None,
        // `eos`: Together.
        "stop" | "tool_calls" | "function_call" | "eos" => Stop::Natural,
        // `model_length`: Mistral; `abort`: vLLM; the last one: DeepSeek.
        "length" | "max_tokens" | "model_length" | "abort" | "insufficient_system_resource" => {
            Stop::Cut
        }
        "content_filter" => Stop::Filtered,
        "error" => Stop::Failed,
        _ => Stop::Unfamiliar,
    })
}

/// Reads the data of an event, or a whole answer.
pub(super) fn read(learned: &mut Learned, data: &[u8]) {
    if data.trim_ascii() == b"[DONE]" {
        learned.last_event = true;
        return;
    }
    let Some(chunk) = parse::<Chunk<'_>>(data) else {
        return;
    };
    learned.note_model(&chunk.model);
    learned.output |= chunk.choices.output;
    learned.refused |= chunk.choices.refused;
    learned.choices.join(chunk.choices.set);
    if let Some(stop) = chunk.choices.stop {
        learned.note_stop(stop);
    }
    if let Some(error) = chunk.choices.error {
        learned.note_error(error);
    }
    learned.note_error_field(chunk.error);
    if let Some(usage) = chunk.choices.usage {
        learned.usage.update(*usage);
    }
    usage::note_groq(&mut learned.usage, chunk.x_groq);
    usage::note_openai(&mut learned.usage, chunk.usage);
}
