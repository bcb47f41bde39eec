//! Lists the presets as models, in each dialect's form.

use axum::Json;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::refusal::Dialect;
use super::script::{PRESETS, Script};
use crate::clock::WallTime;

/// 2026-01-01, when every demo model is said to have been made.
const MADE: WallTime = WallTime(1_767_225_600_000_000);

/// `GET /v1/models`
pub async fn list(headers: HeaderMap) -> Json<Value> {
    let names = PRESETS.iter().map(|(name, ..)| *name);
    if wants_anthropic(&headers) {
        let models: Vec<Value> = names.map(anthropic_model).collect();
        Json(json!({
            "first_id": models[0]["id"],
            "last_id": models[models.len() - 1]["id"],
            "has_more": false,
            "data": models,
        }))
    } else {
        Json(json!({"object": "list", "data": names.map(openai_model).collect::<Vec<_>>()}))
    }
}

/// `GET /v1/models/{id}`: there is no name that is not a model.
pub async fn one(headers: HeaderMap, Path(id): Path<String>) -> Json<Value> {
    Json(if wants_anthropic(&headers) {
        anthropic_model(&id)
    } else {
        openai_model(&id)
    })
}

/// `GET /api/tags`
pub async fn tags() -> Json<Value> {
    let models: Vec<Value> = PRESETS
        .iter()
        .map(|(name, ..)| {
            json!({
                "name": format!("{name}:latest"),
                "model": format!("{name}:latest"),
                "modified_at": timestamp(MADE),
                "size": 1,
                "digest": "0".repeat(64),
                "details": ollama_details(),
            })
        })
        .collect();
    Json(json!({"models": models}))
}

/// `POST /api/show`
pub async fn show(body: Bytes) -> Response {
    let asked = match super::read_json(Ok(body)) {
        Ok(asked) => asked,
        Err(refusal) => return refusal.into_response(Dialect::Ollama),
    };
    let name = super::model_of(&asked);
    Json(json!({
        "modelfile": format!("# {}", about(name)),
        "details": ollama_details(),
        "model_info": {"general.architecture": "demo"},
        "capabilities": ["completion", "tools"],
        "modified_at": timestamp(MADE),
    }))
    .into_response()
}

/// Whether the client speaks Anthropic where the path does not tell.
pub fn wants_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// RFC 3339, in UTC.
pub fn timestamp(time: WallTime) -> String {
    jiff::Timestamp::from_microsecond(time.0)
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
        .to_string()
}

fn openai_model(id: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": MADE.unix_millis() / 1000,
        "owned_by": "traygate",
        "description": about(id),
    })
}

fn anthropic_model(id: &str) -> Value {
    json!({
        "id": id,
        "type": "model",
        "display_name": format!("Traygate {id}: {}", about(id)),
        "created_at": timestamp(MADE),
    })
}

fn ollama_details() -> Value {
    json!({
        "parent_model": "",
        "format": "demo",
        "family": "demo",
        "families": ["demo"],
        "parameter_size": "0B",
        "quantization_level": "none",
    })
}

/// What a model of this name does, in a few words.
fn about(id: &str) -> String {
    let known = PRESETS
        .iter()
        .find(|(name, ..)| *name == id.trim_end_matches(":latest"));
    match (known, Script::of(id)) {
        (Some((_, _, about)), _) => (*about).to_owned(),
        (None, Ok(_)) => "answers like demo, as its name says".to_owned(),
        (None, Err(mistake)) => mistake,
    }
}
