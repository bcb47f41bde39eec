//! `GET|PATCH settings`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::{ETAG, IF_MATCH};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::request::JsonBody;
use crate::core::Core;
use crate::settings::on_disk::PatchError;

/// What a change did.
#[derive(Debug, Serialize, ToSchema)]
pub struct SettingsChanged {
    /// The fields of the file that differ now, `provider.openai.concurrency`.
    changed: Vec<String>,
    /// Where Traygate listens from now on, if that changed: `127.0.0.1:7338`. Connections to the
    /// old port finish; new ones, to this admin API too, must go to the new one.
    address: Option<String>,
    /// What a person should know though it works.
    warnings: Vec<String>,
}

/// The settings in force: by section and key, each with its value, default, unit, range, meaning
/// and where it comes from. No secret is among them. The `etag` header is the mark of the file.
#[utoipa::path(get, path = "/traygate/api/settings", tag = "settings", responses(
    (status = 200, body = Value, headers(("etag" = String, description = "for `if-match`")),
     description = "`file`, `settings` by section and key, `providers` with the `settings` of each. A setting has `value`, `default`, `from` (`default`, `file`, `flag`, `environment`, `inherited`), `locked_by`, `about`, `takes`, and where it has them `unit`, `range`, `choices`.")))]
pub async fn get_settings(State(core): State<Arc<Core>>) -> Response {
    let described = super::request::blocking(move || core.described_settings()).await;
    match described {
        Ok((settings, etag)) => (with_etag(&etag), Json(settings)).into_response(),
        Err(error) => error.into_response(),
    }
}

/// Changes the settings file in place, its comments and order kept, and lets the change take
/// effect without a restart: a JSON merge patch (RFC 7396) over the file's own names. `null` takes
/// a key out. `provider` is an object by name; `route`, `price`, `budget` and `dedup.rule` are
/// whole lists. With `if-match` it is refused if the file has changed since.
#[utoipa::path(patch, path = "/traygate/api/settings", tag = "settings",
    params(("if-match" = Option<String>, Header, description = "the `etag` that the change was decided on")),
    request_body(content = Value, example = json!({"limits": {"timeout_secs": 60}, "provider": {"anthropic": {"concurrency": 8}}})),
    responses(
        (status = 200, body = SettingsChanged, headers(("etag" = String, description = "the file's new mark"))),
        (status = 400, description = "a value that cannot be: `field` names it, nothing was changed", body = ErrorBody),
        (status = 409, description = "a flag or variable wins over the file, or the change cannot take effect", body = ErrorBody),
        (status = 412, description = "the file has changed since `if-match`", body = ErrorBody)))]
pub async fn patch_settings(
    State(core): State<Arc<Core>>,
    headers: HeaderMap,
    JsonBody(patch): JsonBody<Value>,
) -> Response {
    let if_match = headers.get(IF_MATCH).and_then(|value| value.to_str().ok());
    match core
        .patch_settings(patch, if_match.map(str::to_owned))
        .await
    {
        Ok(applied) => {
            let changed = SettingsChanged {
                changed: applied.changed,
                address: applied.address.map(|address| address.to_string()),
                warnings: applied.warnings,
            };
            (with_etag(&applied.etag), Json(changed)).into_response()
        }
        Err(error) => refused(&error),
    }
}

fn with_etag(etag: &str) -> HeaderMap {
    let value = HeaderValue::from_str(etag).ok();
    value.map(|value| (ETAG, value)).into_iter().collect()
}

fn refused(error: &PatchError) -> Response {
    let told = |status, code| ApiError::new(status, code, error.to_string());
    match error {
        PatchError::Patch { field, .. } => told(StatusCode::BAD_REQUEST, "bad_settings")
            .of_field(field)
            .into_response(),
        PatchError::Settings(settings) => {
            let refusal = told(StatusCode::BAD_REQUEST, "bad_settings");
            match settings.field.as_str() {
                "" => refusal.into_response(),
                field => refusal.of_field(field).into_response(),
            }
        }
        PatchError::Locked { field, .. } => told(StatusCode::CONFLICT, "setting_locked")
            .of_field(field)
            .into_response(),
        PatchError::Stale { etag } => (
            with_etag(etag),
            told(StatusCode::PRECONDITION_FAILED, "settings_changed"),
        )
            .into_response(),
        PatchError::NoFile | PatchError::Form(_) | PatchError::NotApplied(_) => {
            told(StatusCode::CONFLICT, "not_applied").into_response()
        }
        PatchError::Write { .. } => {
            told(StatusCode::SERVICE_UNAVAILABLE, "not_written").into_response()
        }
    }
}
