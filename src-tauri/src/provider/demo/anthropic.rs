//! Anthropic's messages.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answer::{self, Answer, Ask, Tool, ToolChoice, Turn};
use super::refusal::{Dialect, Refusal};
use super::stream::Frames;
use super::{Call, Generation};

/// `POST /v1/messages`
pub struct Messages;

impl Generation for Messages {
    const DIALECT: Dialect = Dialect::Anthropic;
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn ask(body: &Value) -> Ask {
        Ask {
            turn: last_turn(&body["messages"]),
            tools: tools(&body["tools"]),
            tool_choice: ToolChoice::of(&body["tool_choice"]),
            shape: shape(body),
            stream: body["stream"] == true,
            max_tokens: answer::limit(&body["max_tokens"]),
            input_tokens: answer::input_tokens(body),
        }
    }

    fn whole(call: &Call) -> Value {
        let answer = &call.answer;
        let mut message = message(call, answer.output_tokens);
        message["stop_reason"] = json!(stop_reason(answer));
        message["content"] = match &answer.tool {
            None => json!([{"type": "text", "text": answer.text()}]),
            Some(name) => {
                // The pieces are JSON text that was made here.
                let input: Value = serde_json::from_str(&answer.text()).unwrap_or(json!({}));
                json!([{"type": "tool_use", "id": tool_id(call), "name": name, "input": input}])
            }
        };
        message
    }

    fn frames(call: &Call) -> Frames {
        let answer = &call.answer;
        let block = match &answer.tool {
            None => json!({"type": "text", "text": ""}),
            Some(name) => {
                json!({"type": "tool_use", "id": tool_id(call), "name": name, "input": {}})
            }
        };
        let piece = |text: &String| {
            let delta = match answer.tool {
                None => json!({"type": "text_delta", "text": text}),
                Some(_) => json!({"type": "input_json_delta", "partial_json": text}),
            };
            event(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))
        };
        let opening = [
            // The real one counts the first token here and all of them at the end.
            json!({"type": "message_start", "message": message(call, 1)}),
            json!({"type": "content_block_start", "index": 0, "content_block": block}),
            json!({"type": "ping"}),
        ];
        let closing = [
            json!({"type": "content_block_stop", "index": 0}),
            json!({
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason(answer), "stop_sequence": null},
                "usage": usage(answer, answer.output_tokens),
            }),
            json!({"type": "message_stop"}),
        ];
        let failure = Refusal::asked_for(StatusCode::INTERNAL_SERVER_ERROR);
        Frames {
            opening: opening.iter().map(event).collect(),
            pieces: answer.pieces.iter().map(piece).collect(),
            closing: closing.iter().map(event).collect(),
            error: event(&failure.to_json(Dialect::Anthropic)),
        }
    }
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(body: Result<Bytes, BytesRejection>) -> Response {
    let counted = async {
        let body = super::read_json(body)?;
        super::obey(&body).await?;
        Ok::<_, Refusal>(answer::input_tokens(&body))
    };
    match counted.await {
        Ok(tokens) => Json(json!({"input_tokens": tokens})).into_response(),
        Err(refusal) => refusal.into_response(Dialect::Anthropic),
    }
}

fn event(data: &Value) -> String {
    format!(
        "event: {}\ndata: {data}\n\n",
        data["type"].as_str().unwrap_or("message")
    )
}

/// A message that has not said anything yet.
fn message(call: &Call, output_tokens: usize) -> Value {
    json!({
        "id": format!("msg_{}", call.id),
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(&call.answer, output_tokens),
    })
}

fn usage(answer: &Answer, output_tokens: usize) -> Value {
    json!({
        "input_tokens": answer.input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    })
}

fn tool_id(call: &Call) -> String {
    format!("toolu_{}", call.id)
}

fn stop_reason(answer: &Answer) -> &'static str {
    match (&answer.tool, answer.cut) {
        (Some(_), _) => "tool_use",
        (None, true) => "max_tokens",
        (None, false) => "end_turn",
    }
}

/// A tool's result is a part of the user's message here.
fn last_turn(messages: &Value) -> Turn {
    let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let Some(last) = messages
        .iter()
        .rev()
        .find(|message| message["role"] == "user")
    else {
        return Turn::default();
    };
    let result = last["content"].as_array().and_then(|parts| {
        parts
            .iter()
            .rev()
            .find(|part| part["type"] == "tool_result")
    });
    match result {
        Some(result) => Turn::ToolResult(answer::content_text(&result["content"])),
        None => Turn::Prompt(answer::content_text(&last["content"])),
    }
}

/// The client's own tools; those that run at the provider have no schema and cannot be called.
fn tools(list: &Value) -> Vec<Tool> {
    let tool = |tool: &Value| {
        let parameters = tool.get("input_schema")?.clone();
        Some(Tool {
            name: tool["name"].as_str()?.to_owned(),
            parameters,
        })
    };
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(tool)
        .collect()
}

/// `output_config.format`, or `output_format` as it was called in beta.
fn shape(body: &Value) -> Option<Value> {
    [&body["output_config"]["format"], &body["output_format"]]
        .into_iter()
        .find_map(|format| format.get("schema").cloned())
}
