//! `POST mode`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::info;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::request::JsonBody;
use crate::clock::WallTime;
use crate::core::Core;
use crate::mode::Mode;
use crate::store::json;

/// A mode is chosen for at most so long; for longer, choose it without an end.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// A mode, and at most one of its ends.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModeChange {
    mode: Mode,
    /// It gives way to `normal` after so many seconds.
    for_secs: Option<f64>,
    /// It gives way to `normal` at this time (RFC 3339).
    #[schema(format = DateTime)]
    until: Option<String>,
}

/// The mode in force.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub struct ModeView {
    mode: Mode,
    /// When it gives way to `normal`; none for one without an end.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    until: Option<WallTime>,
    /// Seconds until then.
    left_secs: Option<f64>,
}

impl ModeView {
    pub fn of(core: &Core) -> ModeView {
        let left = core.mode_left();
        ModeView {
            mode: core.mode(),
            until: left.map(|left| {
                let micros = i64::try_from(left.as_micros()).unwrap_or(i64::MAX);
                WallTime(core.clock.wall().0.saturating_add(micros))
            }),
            left_secs: left.map(|left| left.as_secs_f64()),
        }
    }
}

/// Chooses what becomes of calls: `normal`, `bypass` (straight through, only on record) or
/// `refuse`. It holds until its end, another choice, or the end of this run.
#[utoipa::path(post, path = "/traygate/api/mode", tag = "control", request_body = ModeChange, responses(
    (status = 200, body = ModeView),
    (status = 400, description = "no such mode, or an end that is past", body = ErrorBody),
))]
pub async fn post_mode(
    State(core): State<Arc<Core>>,
    JsonBody(change): JsonBody<ModeChange>,
) -> Result<Json<ModeView>, ApiError> {
    let span = change.span(core.clock.wall())?;
    core.set_mode(change.mode, span);
    info!(mode = ?change.mode, span_secs = span.map(|span| span.as_secs()), "mode chosen");
    Ok(Json(ModeView::of(&core)))
}

impl ModeChange {
    fn span(&self, now: WallTime) -> Result<Option<Duration>, ApiError> {
        let span = match (self.for_secs, &self.until) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                return Err(ApiError::bad_request(
                    "for_secs and until are two ends: send one of them",
                ));
            }
            (Some(secs), None) => Duration::try_from_secs_f64(secs).ok(),
            (None, Some(until)) => {
                let until: Timestamp = until.parse().map_err(|_| {
                    ApiError::bad_request(
                        "until is not a time such as 2026-11-30T17:00:00Z (RFC 3339)",
                    )
                })?;
                let micros = u64::try_from(until.as_microsecond() - now.0).ok();
                micros.map(Duration::from_micros)
            }
        };
        match span {
            Some(span) if !span.is_zero() && span <= LONGEST => Ok(Some(span)),
            _ => Err(ApiError::bad_request(
                "a mode ends later than now and within a year",
            )),
        }
    }
}
