//! What the admin API answers when it cannot do what is asked.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::store::queries::ReadError;

/// A refusal: `{"error":{"code":"…","message":"…"}}`.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    told: Told,
}

/// The body of a refusal.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    error: Told,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ApiErrorDetail)]
struct Told {
    /// What programs match.
    code: &'static str,
    /// What happened and what to do, in words.
    message: String,
    /// The field of the settings that is at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        let message = message.into();
        let field = None;
        ApiError {
            status,
            told: Told {
                code,
                message,
                field,
            },
        }
    }

    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub fn method_not_allowed(message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            message,
        )
    }

    /// There is no provider of this name.
    pub fn no_provider(name: &str, known: &str) -> ApiError {
        ApiError::new(
            StatusCode::NOT_FOUND,
            "no_provider",
            format!("there is no provider {name:?}; there are {known}"),
        )
    }

    /// The record cannot be read.
    pub fn unreadable(error: &ReadError) -> ApiError {
        match error {
            ReadError::Missing { .. } => {
                ApiError::new(StatusCode::NOT_FOUND, "no_log", error.to_string())
            }
            ReadError::Schema { .. } | ReadError::Sqlite(_) => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "log_unreadable",
                error.to_string(),
            ),
        }
    }

    /// A fault of Traygate's own.
    pub fn internal() -> ApiError {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "a fault in Traygate ended this request; its log says more",
        )
    }

    /// Names the field of the settings that is at fault.
    pub fn of_field(mut self, field: impl Into<String>) -> ApiError {
        self.told.field = Some(field.into());
        self
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(ErrorBody { error: self.told })).into_response()
    }
}
