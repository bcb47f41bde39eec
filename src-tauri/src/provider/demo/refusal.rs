//! Puts an error into the dialect it is read in.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Whose form an error takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

/// An answer that is an error.
#[derive(Debug)]
pub struct Refusal {
    status: StatusCode,
    message: String,
    retry_after: Option<u64>,
}

impl Refusal {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Refusal {
        Refusal {
            status,
            message: message.into(),
            retry_after: None,
        }
    }

    pub fn bad_request(message: impl Into<String>) -> Refusal {
        Refusal::new(StatusCode::BAD_REQUEST, message)
    }

    /// The error the model's name asked for.
    pub fn asked_for(status: StatusCode) -> Refusal {
        let message = format!(
            "Traygate's demo model failed with {}, as asked",
            status.as_u16()
        );
        Refusal::new(status, message)
    }

    pub fn retry_after(self, retry_after: Option<u64>) -> Refusal {
        Refusal {
            retry_after,
            ..self
        }
    }

    pub fn into_response(self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.to_json(dialect))).into_response();
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The body, which is also what an error event carries.
    pub fn to_json(&self, dialect: Dialect) -> Value {
        let (message, kind) = (&self.message, self.kind(dialect));
        match dialect {
            Dialect::OpenAi => {
                json!({"error": {"message": message, "type": kind, "param": null, "code": null}})
            }
            Dialect::Anthropic => {
                let id = format!("req_{}", super::fresh_id());
                json!({
                    "type": "error",
                    "error": {"type": kind, "message": message},
                    "request_id": id,
                })
            }
            Dialect::Ollama => json!({"error": message}),
        }
    }

    fn kind(&self, dialect: Dialect) -> &'static str {
        match (dialect, self.status.as_u16()) {
            (Dialect::Anthropic, 404) => "not_found_error",
            (Dialect::Anthropic, 413) => "request_too_large",
            (Dialect::Anthropic, 529) => "overloaded_error",
            (_, 401) => "authentication_error",
            (_, 403) => "permission_error",
            (_, 429) => "rate_limit_error",
            (_, 400..=499) => "invalid_request_error",
            (Dialect::Anthropic, _) => "api_error",
            (Dialect::OpenAi | Dialect::Ollama, _) => "server_error",
        }
    }
}
