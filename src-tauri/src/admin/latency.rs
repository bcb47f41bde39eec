//! `GET latency`: how long providers were waited for, and what a timeout would have cut.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use jiff::civil::Date;
use serde::Deserialize;
use utoipa::IntoParams;

use super::error::{ApiError, ErrorBody};
use super::request::{Params, read};
use super::series::zone;
use crate::clock::WallTime;
use crate::core::Core;
use crate::store::latency::{Latency, LatencyQuery};
use crate::store::rollup::GroupFilter;

/// Timeouts that may be asked about at once.
const MOST_TIMEOUTS: usize = 32;

/// Which day, and which timeouts.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LatencyParams {
    /// A day such as 2026-11-30: yesterday.
    day: Option<String>,
    /// The time zone of the day, by its IANA name: this machine's.
    zone: Option<String>,
    /// Timeouts that are thought of, in seconds with commas between: `15,30,60`.
    timeouts: Option<String>,
    provider: Option<String>,
    model: Option<String>,
    tool: Option<String>,
}

impl LatencyParams {
    fn query(self, now: WallTime) -> Result<LatencyQuery, ApiError> {
        let zone = zone(self.zone.as_deref())?;
        let timeouts = timeouts(self.timeouts.as_deref().unwrap_or_default())?;
        let query = match &self.day {
            None => LatencyQuery::of_yesterday(now, &zone, timeouts),
            Some(day) => {
                let day: Date = day.parse().map_err(|_| {
                    ApiError::bad_request(format!("day {day:?} is not a day such as 2026-11-30"))
                })?;
                LatencyQuery::of_day(day, &zone, timeouts)
            }
        };
        Ok(LatencyQuery {
            filter: GroupFilter {
                provider: self.provider,
                model: self.model,
                tool: self.tool,
            },
            ..query
        })
    }
}

fn timeouts(text: &str) -> Result<Vec<Duration>, ApiError> {
    let parts: Vec<&str> = text.split(',').filter(|part| !part.is_empty()).collect();
    if parts.len() > MOST_TIMEOUTS {
        return Err(ApiError::bad_request(format!(
            "at most {MOST_TIMEOUTS} timeouts at once"
        )));
    }
    let parse = |part: &str| {
        let secs: Option<f64> = part.trim().parse().ok();
        let span = secs.and_then(|secs| Duration::try_from_secs_f64(secs).ok());
        span.ok_or_else(|| {
            ApiError::bad_request(format!("timeouts: {part:?} is not a number of seconds"))
        })
    };
    parts.into_iter().map(parse).collect()
}

/// How long upstream calls waited, by provider and model, and for each timeout asked about how
/// many of that day's calls it would have cut.
#[utoipa::path(get, path = "/traygate/api/latency", tag = "record", params(LatencyParams), responses(
    (status = 200, body = Latency), (status = 400, body = ErrorBody)))]
pub async fn get_latency(
    State(core): State<Arc<Core>>,
    Params(params): Params<LatencyParams>,
) -> Result<Json<Latency>, ApiError> {
    let query = params.query(core.clock.wall())?;
    read(&core, move |reader| reader.latency(&query))
        .await
        .map(Json)
}
