//! `GET series`: calls over time.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::calls::time;
use super::error::{ApiError, ErrorBody};
use super::request::{Params, read};
use crate::clock::WallTime;
use crate::core::Core;
use crate::store::rollup::GroupFilter;
use crate::store::series::{SeriesPoint, SeriesQuery, Step};

/// Which calls, and in what steps.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SeriesParams {
    /// `minute`, `hour` or `day`: `hour` where nothing is said.
    step: Option<Step>,
    /// Where it begins (RFC 3339). By default the last hour by minutes, the last day by hours, the
    /// last thirty days by days.
    since: Option<String>,
    /// Where it ends: now.
    until: Option<String>,
    /// The time zone of hours and days, by its IANA name: this machine's.
    zone: Option<String>,
    provider: Option<String>,
    model: Option<String>,
    tool: Option<String>,
}

/// Calls over time.
#[derive(Debug, Serialize, ToSchema)]
pub struct Series {
    step: Step,
    /// The time zone in which hours and days begin, where it has a name.
    zone: Option<String>,
    /// Oldest first, with a point also where there were no calls; at most the latest 2,000.
    points: Vec<SeriesPoint>,
    /// Whether it was asked for more: it begins later than `since`.
    cut: bool,
}

/// The time zone named, or this machine's.
pub fn zone(name: Option<&str>) -> Result<TimeZone, ApiError> {
    let Some(name) = name else {
        return Ok(TimeZone::system());
    };
    TimeZone::get(name).map_err(|_| {
        ApiError::bad_request(format!(
            "zone {name:?} is not an IANA time zone such as Europe/Berlin"
        ))
    })
}

impl SeriesParams {
    fn query(self, now: WallTime) -> Result<SeriesQuery, ApiError> {
        const DAY: u64 = 24 * 3600;
        let step = self.step.unwrap_or(Step::Hour);
        let usual = match step {
            Step::Minute => Duration::from_secs(3600),
            Step::Hour => Duration::from_secs(DAY),
            Step::Day => Duration::from_secs(30 * DAY),
        };
        let to = match &self.until {
            Some(until) => time("until", until)?,
            None => now,
        };
        let from = match &self.since {
            Some(since) => time("since", since)?,
            None => WallTime(to.0 - i64::try_from(usual.as_micros()).unwrap_or(0)),
        };
        if from > to {
            return Err(ApiError::bad_request("since is later than until"));
        }
        Ok(SeriesQuery {
            from,
            to,
            step,
            zone: zone(self.zone.as_deref())?,
            filter: GroupFilter {
                provider: self.provider,
                model: self.model,
                tool: self.tool,
            },
        })
    }
}

/// Calls, upstream calls, errors and percentiles, by minute, hour or day.
#[utoipa::path(get, path = "/traygate/api/series", tag = "record", params(SeriesParams), responses(
    (status = 200, body = Series), (status = 400, body = ErrorBody)))]
pub async fn get_series(
    State(core): State<Arc<Core>>,
    Params(params): Params<SeriesParams>,
) -> Result<Json<Series>, ApiError> {
    let query = params.query(core.clock.wall())?;
    let (step, zone) = (query.step, query.zone.iana_name().map(str::to_owned));
    let from = query.from;
    let points = read(&core, move |reader| reader.series(&query)).await?;
    let cut = points.first().is_some_and(|first| first.start > from);
    Ok(Json(Series {
        step,
        zone,
        points,
        cut,
    }))
}
