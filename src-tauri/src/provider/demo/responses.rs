//! OpenAI's responses: one item, text or a function call, and the whole sequence of its events.

use serde_json::{Value, json};

use super::answer::{self, Ask, Tool, ToolChoice, Turn};
use super::refusal::Dialect;
use super::script::Ending;
use super::stream::Frames;
use super::{Call, Generation, openai};

/// `POST /v1/responses`
pub struct Responses;

impl Generation for Responses {
    const DIALECT: Dialect = Dialect::OpenAi;
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: last_turn(&body["input"]),
            tools: tools(&body["tools"]),
            tool_choice: ToolChoice::of(&body["tool_choice"]),
            shape: shape(&body["text"]["format"]),
            stream: body["stream"] == true,
            max_tokens: answer::limit(&body["max_output_tokens"]),
            input_tokens: answer::input_tokens(body),
        }
    }

    fn whole(call: &Call) -> Value {
        response(
            call,
            final_status(call),
            Some(item(call, final_status(call), true)),
        )
    }

    fn frames(call: &Call) -> Frames {
        let answer = &call.answer;
        let id = item_id(call);
        let text = answer.text();
        let mut events = Events::default();

        let mut opening = events.add("response.created", |event| {
            event["response"] = response(call, "in_progress", None);
        });
        opening += &events.add("response.in_progress", |event| {
            event["response"] = response(call, "in_progress", None);
        });
        opening += &events.add("response.output_item.added", |event| {
            event["output_index"] = json!(0);
            event["item"] = item(call, "in_progress", false);
        });
        // Where in the answer an event belongs.
        let place = |event: &mut Value| {
            event["item_id"] = json!(id);
            event["output_index"] = json!(0);
            if answer.tool.is_none() {
                event["content_index"] = json!(0);
            }
        };
        if answer.tool.is_none() {
            opening += &events.add("response.content_part.added", |event| {
                place(event);
                event["part"] = part("");
            });
        }

        let (delta, done) = match answer.tool {
            None => ("response.output_text.delta", "response.output_text.done"),
            Some(_) => (
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
            ),
        };
        let before_pieces = events.clone();
        let pieces = answer
            .pieces
            .iter()
            .map(|piece| {
                events.add(delta, |event| {
                    place(event);
                    event["delta"] = json!(piece);
                    if answer.tool.is_none() {
                        event["logprobs"] = json!([]);
                    }
                })
            })
            .collect();

        let mut closing = events.add(done, |event| {
            place(event);
            match &answer.tool {
                None => {
                    event["text"] = json!(text);
                    event["logprobs"] = json!([]);
                }
                Some(name) => {
                    event["name"] = json!(name);
                    event["arguments"] = json!(text);
                }
            }
        });
        if answer.tool.is_none() {
            closing += &events.add("response.content_part.done", |event| {
                place(event);
                event["part"] = part(&text);
            });
        }
        closing += &events.add("response.output_item.done", |event| {
            event["output_index"] = json!(0);
            event["item"] = item(call, final_status(call), true);
        });
        let last = if answer.cut {
            "response.incomplete"
        } else {
            "response.completed"
        };
        closing += &events.add(last, |event| event["response"] = Responses::whole(call));
        Frames {
            opening,
            pieces,
            closing,
            error: failure(call, before_pieces),
        }
    }
}

/// Numbers the events of one stream.
#[derive(Clone, Default)]
struct Events {
    next: usize,
}

impl Events {
    fn add(&mut self, kind: &str, fill: impl FnOnce(&mut Value)) -> String {
        let mut event = json!({"type": kind, "sequence_number": self.next});
        self.next += 1;
        fill(&mut event);
        format!("event: {kind}\ndata: {event}\n\n")
    }
}

/// An error after some of the pieces, and the failed response that follows it.
fn failure(call: &Call, mut events: Events) -> String {
    if let Ending::ErrorAfter(pieces) = call.script.ending {
        events.next += pieces.min(call.answer.pieces.len());
    }
    let message = "Traygate's demo model failed in mid-stream, as asked";
    let error = events.add("error", |event| {
        event["code"] = json!("server_error");
        event["message"] = json!(message);
        event["param"] = Value::Null;
        // The reference has the fields above, the SDKs raise only on this one.
        event["error"] =
            json!({"type": "server_error", "code": "server_error", "message": message});
    });
    error
        + &events.add("response.failed", |event| {
            event["response"] = response(call, "failed", None);
            event["response"]["error"] = json!({"code": "server_error", "message": message});
        })
}

fn final_status(call: &Call) -> &'static str {
    if call.answer.cut {
        "incomplete"
    } else {
        "completed"
    }
}

/// The response object; while it is `in_progress` it has no item and no usage.
fn response(call: &Call, status: &str, item: Option<Value>) -> Value {
    let (body, answer) = (&call.body, &call.answer);
    let given = |field: &str, default: Value| match &body[field] {
        Value::Null => default,
        value => value.clone(),
    };
    let usage = item.as_ref().map(|_| {
        json!({
            "input_tokens": answer.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.input_tokens + answer.output_tokens,
        })
    });
    let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
    let completed = (status == "completed").then(|| call.created());
    json!({
        "id": format!("resp_{}", call.id),
        "object": "response",
        "created_at": call.created(),
        "completed_at": completed,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": incomplete,
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": given("max_output_tokens", Value::Null),
        "metadata": given("metadata", json!({})),
        "model": call.model,
        "output": item.into_iter().collect::<Vec<_>>(),
        "parallel_tool_calls": given("parallel_tool_calls", json!(true)),
        "previous_response_id": given("previous_response_id", Value::Null),
        "reasoning": {"effort": null, "summary": null},
        "service_tier": "default",
        "store": given("store", json!(true)),
        "temperature": given("temperature", json!(1.0)),
        "text": given("text", json!({"format": {"type": "text"}})),
        "tool_choice": given("tool_choice", json!("auto")),
        "tools": given("tools", json!([])),
        "top_p": given("top_p", json!(1.0)),
        "truncation": given("truncation", json!("disabled")),
        "usage": usage,
        "user": given("user", Value::Null),
    })
}

fn item_id(call: &Call) -> String {
    let kind = if call.answer.tool.is_some() {
        "fc"
    } else {
        "msg"
    };
    format!("{kind}_{}", call.id)
}

fn item(call: &Call, status: &str, filled: bool) -> Value {
    let text = if filled {
        call.answer.text()
    } else {
        String::new()
    };
    match &call.answer.tool {
        None => json!({
            "id": item_id(call),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": filled.then(|| part(&text)).into_iter().collect::<Vec<_>>(),
        }),
        Some(name) => json!({
            "id": item_id(call),
            "type": "function_call",
            "status": status,
            "call_id": format!("call_{}", call.id),
            "name": name,
            "arguments": text,
        }),
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// `input` is a text, or a list of messages and of functions' results.
fn last_turn(input: &Value) -> Turn {
    match input {
        Value::Array(items) => match items.last() {
            Some(last) if last["type"] == "function_call_output" => {
                Turn::ToolResult(answer::content_text(&last["output"]))
            }
            _ => openai::last_turn(input),
        },
        text => Turn::Prompt(answer::content_text(text)),
    }
}

/// Functions lie flat here; built-in and custom tools cannot be called.
fn tools(list: &Value) -> Vec<Tool> {
    let tool = |tool: &Value| {
        let name = tool["name"]
            .as_str()
            .filter(|_| tool["type"] == "function")?;
        Some(Tool {
            name: name.to_owned(),
            parameters: tool["parameters"].clone(),
        })
    };
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(tool)
        .collect()
}

fn shape(format: &Value) -> Option<Value> {
    match format["type"].as_str()? {
        "json_schema" => Some(format["schema"].clone()),
        "json_object" => Some(openai::any_object()),
        _ => None,
    }
}
