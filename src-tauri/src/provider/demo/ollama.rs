//! Ollama's native chat and generate: newline-delimited JSON, streamed unless told otherwise.

use serde_json::{Value, json};

use super::answer::{self, Ask, ToolChoice, Turn};
use super::refusal::{Dialect, Refusal};
use super::stream::Frames;
use super::{Call, Generation, openai};

/// Nanoseconds a token is said to have taken.
const NANOS_A_TOKEN: usize = 10_000_000;

/// `POST /api/chat`
pub struct Chat;

/// `POST /api/generate`
pub struct Generate;

impl Generation for Chat {
    const DIALECT: Dialect = Dialect::Ollama;
    const STREAM_TYPE: &'static str = "application/x-ndjson";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: openai::last_turn(&body["messages"]),
            tools: openai::tools(&body["tools"]),
            tool_choice: ToolChoice::Auto,
            ..common(body)
        }
    }

    fn whole(call: &Call) -> Value {
        match load(call, "messages") {
            Some(reason) => line(call, said(""), Some(reason)),
            None => line(call, chat_message(call), Some(done_reason(call))),
        }
    }

    fn frames(call: &Call) -> Frames {
        if load(call, "messages").is_some() {
            return single(&Chat::whole(call));
        }
        let pieces = match call.answer.tool {
            None => call.answer.pieces.iter().map(|text| said(text)).collect(),
            // A call comes whole here, never in parts.
            Some(_) => vec![chat_message(call)],
        };
        frames(call, pieces, said(""))
    }
}

impl Generation for Generate {
    const DIALECT: Dialect = Dialect::Ollama;
    const STREAM_TYPE: &'static str = "application/x-ndjson";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: Turn::Prompt(answer::content_text(&body["prompt"])),
            ..common(body)
        }
    }

    fn whole(call: &Call) -> Value {
        match load(call, "prompt") {
            Some(reason) => line(call, generated(""), Some(reason)),
            None => line(
                call,
                generated(&call.answer.text()),
                Some(done_reason(call)),
            ),
        }
    }

    fn frames(call: &Call) -> Frames {
        if load(call, "prompt").is_some() {
            return single(&Generate::whole(call));
        }
        let pieces = call
            .answer
            .pieces
            .iter()
            .map(|text| generated(text))
            .collect();
        frames(call, pieces, generated(""))
    }
}

fn common(body: &Value) -> Ask {
    Ask {
        shape: match &body["format"] {
            Value::String(format) if format == "json" => Some(openai::any_object()),
            schema @ Value::Object(_) => Some(schema.clone()),
            _ => None,
        },
        stream: body["stream"] != false,
        max_tokens: answer::limit(&body["options"]["num_predict"]),
        input_tokens: answer::input_tokens(body),
        ..Ask::default()
    }
}

/// The field that carries what is said, to be laid into a line.
fn said(text: &str) -> Value {
    json!({"message": {"role": "assistant", "content": text}})
}

fn generated(text: &str) -> Value {
    json!({"response": text})
}

fn chat_message(call: &Call) -> Value {
    let answer = &call.answer;
    let Some(name) = &answer.tool else {
        return said(&answer.text());
    };
    // The pieces are JSON text that was made here.
    let arguments: Value = serde_json::from_str(&answer.text()).unwrap_or(json!({}));
    let mut message = said("");
    message["message"]["tool_calls"] =
        json!([{"function": {"name": name, "arguments": arguments}}]);
    message
}

/// A request that says nothing loads the model, or unloads it.
fn load(call: &Call, field: &str) -> Option<&'static str> {
    let empty = match &call.body[field] {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    let unload = call.body["keep_alive"] == 0 || call.body["keep_alive"] == "0";
    empty.then_some(if unload { "unload" } else { "load" })
}

fn done_reason(call: &Call) -> &'static str {
    if call.answer.cut { "length" } else { "stop" }
}

/// A line of the answer; the last one has a reason and the counts.
fn line(call: &Call, content: Value, done_reason: Option<&str>) -> Value {
    let answer = &call.answer;
    let mut line = json!({
        "model": call.model,
        "created_at": super::models::timestamp(call.now),
        "done": done_reason.is_some(),
    });
    merge(&mut line, content);
    if let Some(reason) = done_reason {
        line["done_reason"] = json!(reason);
        let (input, output) = (answer.input_tokens, answer.output_tokens);
        if !matches!(reason, "load" | "unload") {
            merge(
                &mut line,
                json!({
                    "total_duration": (input + output) * NANOS_A_TOKEN,
                    "load_duration": 0,
                    "prompt_eval_count": input,
                    "prompt_eval_duration": input * NANOS_A_TOKEN,
                    "eval_count": output,
                    "eval_duration": output * NANOS_A_TOKEN,
                }),
            );
        }
    }
    line
}

fn merge(line: &mut Value, fields: Value) {
    if let (Value::Object(line), Value::Object(fields)) = (line, fields) {
        line.extend(fields);
    }
}

fn frames(call: &Call, pieces: Vec<Value>, last: Value) -> Frames {
    let failure = Refusal::asked_for(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    Frames {
        opening: String::new(),
        pieces: pieces
            .into_iter()
            .map(|piece| format!("{}\n", line(call, piece, None)))
            .collect(),
        closing: format!("{}\n", line(call, last, Some(done_reason(call)))),
        error: format!("{}\n", failure.to_json(Dialect::Ollama)),
    }
}

fn single(only: &Value) -> Frames {
    Frames {
        closing: format!("{only}\n"),
        ..Frames::default()
    }
}
