//! `GET calls`, one call, its bodies, and stopping it.

use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::error::{ApiError, ErrorBody};
use super::request::{Params, read};
use crate::clock::WallTime;
use crate::core::Core;
use crate::store::CallId;
use crate::store::bodies::KeptBody;
use crate::store::pages::{CallsPage, CallsQuery};
use crate::store::queries::{CallFilter, CallRow};

/// Calls on a page where nothing is said, and at most.
const USUAL_PAGE: usize = 100;
const LARGEST_PAGE: usize = 1000;

/// Which calls, and how many.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CallsParams {
    /// Those that came at this time (RFC 3339) or later.
    since: Option<String>,
    /// Those that came before this time.
    until: Option<String>,
    /// `*` and `?` stand for any characters, or one.
    provider: Option<String>,
    /// As the client spelled it; `*` and `?` as above.
    model: Option<String>,
    /// `*` and `?` as above.
    tool: Option<String>,
    /// `completed`, `upstream_error`, `timeout`, `broken_stream`, `client_left`, `stopped`,
    /// `refused`, `interrupted`, `internal_error` or `open`.
    outcome: Option<String>,
    /// `miss`, `joined`, `cached` or `off`.
    dedup: Option<String>,
    /// Text in what went wrong; ASCII letters match in either case.
    error: Option<String>,
    /// The request key, or its beginning, in hex.
    key: Option<String>,
    /// Calls on the page: 100, at most 1,000.
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// A time of the query string.
pub fn time(name: &str, text: &str) -> Result<WallTime, ApiError> {
    let time: Timestamp = text.parse().map_err(|_| {
        ApiError::bad_request(format!(
            "{name} is not a time such as 2026-11-30T17:00:00Z (RFC 3339; a + must be written %2B)"
        ))
    })?;
    Ok(WallTime(time.as_microsecond()))
}

/// The times of `since` and `until`, where they were given.
pub fn times(
    since: Option<&str>,
    until: Option<&str>,
) -> Result<(Option<WallTime>, Option<WallTime>), ApiError> {
    let since = since.map(|text| time("since", text)).transpose()?;
    let until = until.map(|text| time("until", text)).transpose()?;
    Ok((since, until))
}

fn word<T: FromStr<Err: std::fmt::Display>>(
    name: &str,
    text: Option<&str>,
) -> Result<Option<T>, ApiError> {
    let parsed = text.map(str::parse).transpose();
    parsed.map_err(|error| ApiError::bad_request(format!("{name}: {error}")))
}

impl CallsParams {
    fn query(self) -> Result<CallsQuery, ApiError> {
        let (since, until) = times(self.since.as_deref(), self.until.as_deref())?;
        let limit = self.limit.unwrap_or(USUAL_PAGE);
        if !(1..=LARGEST_PAGE).contains(&limit) {
            return Err(ApiError::bad_request(format!(
                "limit is from 1 to {LARGEST_PAGE}"
            )));
        }
        Ok(CallsQuery {
            filter: CallFilter {
                since,
                until,
                provider: self.provider,
                model: self.model,
                tool: self.tool,
                outcome: word("outcome", self.outcome.as_deref())?,
                dedup: word("dedup", self.dedup.as_deref())?,
                error: self.error,
                key: word("key", self.key.as_deref())?,
            },
            limit,
            after: word("cursor", self.cursor.as_deref())?,
        })
    }
}

/// A page of calls, newest first, open ones among them.
#[utoipa::path(get, path = "/traygate/api/calls", tag = "record", params(CallsParams), responses(
    (status = 200, body = CallsPage), (status = 400, body = ErrorBody)))]
pub async fn get_calls(
    State(core): State<Arc<Core>>,
    Params(params): Params<CallsParams>,
) -> Result<Json<CallsPage>, ApiError> {
    let query = params.query()?;
    read(&core, move |reader| reader.calls(&query))
        .await
        .map(Json)
}

fn call_id(text: &str) -> Result<CallId, ApiError> {
    text.parse()
        .map_err(|_| ApiError::bad_request(format!("{text:?} is not the id of a call")))
}

fn no_call(id: CallId) -> ApiError {
    ApiError::not_found(format!("there is no call {id} on record"))
}

/// One call.
#[utoipa::path(get, path = "/traygate/api/calls/{id}", tag = "record",
    params(("id" = String, Path, description = "`x-traygate-call` of its answer")),
    responses((status = 200, body = CallRow), (status = 404, body = ErrorBody)))]
pub async fn get_call(
    State(core): State<Arc<Core>>,
    Path(id): Path<String>,
) -> Result<Json<CallRow>, ApiError> {
    let id = call_id(&id)?;
    let found = find(&core, id).await?;
    found.map(Json).ok_or_else(|| no_call(id))
}

/// A call in the record, or on its way there.
async fn find(core: &Core, id: CallId) -> Result<Option<CallRow>, ApiError> {
    match core.store.pending(id) {
        Some(row) => Ok(Some(row)),
        None => read(core, move |reader| reader.call(id)).await,
    }
}

/// What a call asked and was answered: decoded, and without keys.
#[derive(Debug, Serialize, ToSchema)]
pub struct CallBody {
    /// The call that went upstream: another one where the answer was shared.
    id: String,
    request: BodyText,
    response: BodyText,
}

/// One direction.
#[derive(Debug, Serialize, ToSchema)]
struct BodyText {
    /// As text. What is no UTF-8 stands as U+FFFD.
    text: String,
    /// Whether this is only its beginning.
    cut: bool,
}

impl From<KeptBody> for CallBody {
    fn from(kept: KeptBody) -> CallBody {
        let text = |bytes: &[u8], cut| BodyText {
            text: String::from_utf8_lossy(bytes).into_owned(),
            cut,
        };
        CallBody {
            request: text(&kept.request, kept.request_cut),
            response: text(&kept.response, kept.response_cut),
            id: kept.id,
        }
    }
}

/// What a call asked and was answered, where that is kept (`log.bodies`). A joined or cached call
/// has the bodies of the one that went upstream.
#[utoipa::path(get, path = "/traygate/api/calls/{id}/body", tag = "record",
    params(("id" = String, Path, description = "the call")),
    responses((status = 200, body = CallBody), (status = 404, body = ErrorBody)))]
pub async fn get_body(
    State(core): State<Arc<Core>>,
    Path(id): Path<String>,
) -> Result<Json<CallBody>, ApiError> {
    let id = call_id(&id)?;
    let found = read(&core, move |reader| reader.body(id)).await?;
    found.map(|kept| Json(kept.into())).ok_or_else(|| {
        ApiError::not_found(format!(
            "no body of call {id} is kept (log.bodies says of which calls they are)"
        ))
    })
}

/// A call that was stopped.
#[derive(Debug, Serialize, ToSchema)]
pub struct StoppedCall {
    id: String,
}

/// Ends the answer of one caller. The upstream call ends too, unless others listen to it.
#[utoipa::path(delete, path = "/traygate/api/calls/{id}", tag = "control",
    params(("id" = String, Path, description = "a call under way")),
    responses((status = 200, body = StoppedCall), (status = 404, body = ErrorBody),
        (status = 409, description = "it has ended, or its caller is gone", body = ErrorBody)))]
pub async fn stop_call(
    State(core): State<Arc<Core>>,
    Path(id): Path<String>,
) -> Result<Json<StoppedCall>, ApiError> {
    let id = call_id(&id)?;
    let not_running = |message: String| ApiError::new(StatusCode::CONFLICT, "not_running", message);
    match core.live.get(id) {
        Some(call) if call.stop() => Ok(Json(StoppedCall { id: id.to_string() })),
        Some(_) => Err(not_running(format!(
            "the caller of {id} has its answer or has gone; others may still listen to it"
        ))),
        None => match find(&core, id).await? {
            Some(_) => Err(not_running(format!("call {id} has ended"))),
            None => Err(no_call(id)),
        },
    }
}
