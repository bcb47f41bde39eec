//! OpenAI's chat completions and completions.

use serde_json::{Value, json};

use super::answer::{self, Answer, Ask, Tool, ToolChoice, Turn};
use super::refusal::{Dialect, Refusal};
use super::stream::Frames;
use super::{Call, Generation};

/// Most alternatives (`n`) that are sent.
const MAX_CHOICES: usize = 8;

/// `POST /v1/chat/completions`
pub struct Chat;

/// `POST /v1/completions`
pub struct Completions;

impl Generation for Chat {
    const DIALECT: Dialect = Dialect::OpenAi;
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: last_turn(&body["messages"]),
            tools: tools(&body["tools"]),
            tool_choice: ToolChoice::of(&body["tool_choice"]),
            shape: shape(&body["response_format"]),
            stream: body["stream"] == true,
            max_tokens: answer::limit(&body["max_completion_tokens"])
                .or_else(|| answer::limit(&body["max_tokens"])),
            input_tokens: answer::input_tokens(body),
        }
    }

    fn whole(call: &Call) -> Value {
        let answer = &call.answer;
        let message = match &answer.tool {
            None => json!({
                "role": "assistant",
                "content": answer.text(),
                "refusal": null,
                "annotations": [],
            }),
            Some(name) => json!({
                "role": "assistant",
                "content": null,
                "refusal": null,
                "annotations": [],
                "tool_calls": [{
                    "id": format!("call_{}", call.id),
                    "type": "function",
                    "function": {"name": name, "arguments": answer.text()},
                }],
            }),
        };
        let choices: Vec<Value> = (0..choices(&call.body))
            .map(|index| {
                json!({
                    "index": index,
                    "message": message,
                    "logprobs": null,
                    "finish_reason": finish_reason(answer),
                })
            })
            .collect();
        json!({
            "id": format!("chatcmpl-{}", call.id),
            "object": "chat.completion",
            "created": call.created(),
            "model": call.model,
            "choices": choices,
            "usage": usage(answer, choices.len()),
            "service_tier": "default",
            "system_fingerprint": "fp_traygate",
        })
    }

    fn frames(call: &Call) -> Frames {
        let answer = &call.answer;
        let choices = choices(&call.body);
        let with_usage = call.body["stream_options"]["include_usage"] == true;
        let chunk = |choices: Value, usage: Value| {
            let mut chunk = json!({
                "id": format!("chatcmpl-{}", call.id),
                "object": "chat.completion.chunk",
                "created": call.created(),
                "model": call.model,
                "service_tier": "default",
                "system_fingerprint": "fp_traygate",
                "choices": choices,
            });
            if with_usage {
                chunk["usage"] = usage;
            }
            event(&chunk)
        };
        let delta = |delta: Value, finish_reason: Option<&str>| -> String {
            let choice = |index| {
                let choice = json!({
                    "index": index,
                    "delta": delta,
                    "logprobs": null,
                    "finish_reason": finish_reason,
                });
                chunk(json!([choice]), Value::Null)
            };
            (0..choices).map(choice).collect()
        };

        let (first, piece): (Value, fn(&str) -> Value) = match &answer.tool {
            None => (
                json!({"role": "assistant", "content": "", "refusal": null}),
                |text| json!({"content": text}),
            ),
            Some(name) => (
                json!({
                    "role": "assistant",
                    "content": null,
                    "tool_calls": [{
                        "index": 0,
                        "id": format!("call_{}", call.id),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }],
                }),
                |text| json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}),
            ),
        };
        let mut closing = delta(json!({}), Some(finish_reason(answer)));
        if with_usage {
            closing += &chunk(json!([]), usage(answer, choices));
        }
        closing += DONE;
        Frames {
            opening: delta(first, None),
            pieces: answer
                .pieces
                .iter()
                .map(|text| delta(piece(text), None))
                .collect(),
            closing,
            error: error_event(),
        }
    }
}

impl Generation for Completions {
    const DIALECT: Dialect = Dialect::OpenAi;
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: Turn::Prompt(answer::content_text(&body["prompt"])),
            stream: body["stream"] == true,
            max_tokens: answer::limit(&body["max_tokens"]),
            input_tokens: answer::input_tokens(body),
            ..Ask::default()
        }
    }

    fn whole(call: &Call) -> Value {
        let answer = &call.answer;
        let choices: Vec<Value> = (0..choices(&call.body))
            .map(|index| completion_choice(index, &answer.text(), Some(finish_reason(answer))))
            .collect();
        json!({
            "id": format!("cmpl-{}", call.id),
            "object": "text_completion",
            "created": call.created(),
            "model": call.model,
            "choices": choices,
            "usage": usage(answer, choices.len()),
            "system_fingerprint": "fp_traygate",
        })
    }

    fn frames(call: &Call) -> Frames {
        let answer = &call.answer;
        let choices = choices(&call.body);
        let with_usage = call.body["stream_options"]["include_usage"] == true;
        let chunk = |choices: Value, usage: Value| {
            let mut chunk = json!({
                "id": format!("cmpl-{}", call.id),
                "object": "text_completion",
                "created": call.created(),
                "model": call.model,
                "choices": choices,
                "system_fingerprint": "fp_traygate",
            });
            if with_usage {
                chunk["usage"] = usage;
            }
            event(&chunk)
        };
        let piece = |text: &str, finish_reason: Option<&str>| -> String {
            (0..choices)
                .map(|index| {
                    chunk(
                        json!([completion_choice(index, text, finish_reason)]),
                        Value::Null,
                    )
                })
                .collect()
        };
        let mut closing = piece("", Some(finish_reason(answer)));
        if with_usage {
            closing += &chunk(json!([]), usage(answer, choices));
        }
        closing += DONE;
        Frames {
            opening: String::new(),
            pieces: answer.pieces.iter().map(|text| piece(text, None)).collect(),
            closing,
            error: error_event(),
        }
    }
}

const DONE: &str = "data: [DONE]\n\n";

fn completion_choice(index: usize, text: &str, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
}

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// After it a stream ends without `[DONE]`.
fn error_event() -> String {
    let refusal = Refusal::asked_for(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    event(&refusal.to_json(Dialect::OpenAi))
}

fn choices(body: &Value) -> usize {
    answer::limit(&body["n"]).unwrap_or(1).clamp(1, MAX_CHOICES)
}

fn finish_reason(answer: &Answer) -> &'static str {
    match (&answer.tool, answer.cut) {
        (Some(_), _) => "tool_calls",
        (None, true) => "length",
        (None, false) => "stop",
    }
}

fn usage(answer: &Answer, choices: usize) -> Value {
    let output = answer.output_tokens * choices;
    json!({
        "prompt_tokens": answer.input_tokens,
        "completion_tokens": output,
        "total_tokens": answer.input_tokens + output,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    })
}

/// The last tool result if the conversation ends with one, else the last of the user's messages.
/// Ollama's chat has the same shape.
pub fn last_turn(messages: &Value) -> Turn {
    let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    match messages.last() {
        Some(last) if last["role"] == "tool" || last["role"] == "function" => {
            Turn::ToolResult(answer::content_text(&last["content"]))
        }
        last => {
            let asked = messages
                .iter()
                .rev()
                .find(|message| message["role"] == "user")
                .or(last);
            Turn::Prompt(asked.map_or_else(String::new, |m| answer::content_text(&m["content"])))
        }
    }
}

/// Functions as chat completions and Ollama list them; other kinds of tool cannot be called.
pub fn tools(list: &Value) -> Vec<Tool> {
    let tool = |tool: &Value| {
        let function = &tool["function"];
        Some(Tool {
            name: function["name"].as_str()?.to_owned(),
            parameters: function["parameters"].clone(),
        })
    };
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(tool)
        .collect()
}

/// The schema `response_format` demands; `json_object` leaves it to the model.
fn shape(format: &Value) -> Option<Value> {
    match format["type"].as_str()? {
        "json_schema" => Some(format["json_schema"]["schema"].clone()),
        "json_object" => Some(any_object()),
        _ => None,
    }
}

/// For clients that want some JSON object, any.
pub fn any_object() -> Value {
    json!({"const": {"answer": "This is Traygate's demo model, offline."}})
}
