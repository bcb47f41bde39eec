//! `GET spend`: what was spent, on what and by whom.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

use super::calls::time;
use super::error::{ApiError, ErrorBody};
use super::request::{Params, read};
use super::series::zone;
use crate::clock::WallTime;
use crate::core::Core;
use crate::store::spend_report::{SpendBy, SpendQuery, SpendReport};

/// Which calls, and how the report is cut.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SpendParams {
    /// `hour`, `day`, `month`, `provider`, `model` or `tool`: `day` where nothing is said.
    by: Option<SpendBy>,
    /// Where it begins (RFC 3339), cut at quarter-hours. By default the last 24 hours by hours, 12
    /// months by months, and 30 days by anything else, begun ones whole.
    since: Option<String>,
    /// Where it ends: now.
    until: Option<String>,
    /// The time zone of hours, days and months, by its IANA name: this machine's.
    zone: Option<String>,
}

impl SpendParams {
    fn query(self, now: WallTime) -> Result<SpendQuery, ApiError> {
        let by = self.by.unwrap_or(SpendBy::Day);
        let zone = zone(self.zone.as_deref())?;
        let to = match &self.until {
            Some(until) => time("until", until)?,
            // What came in this very microsecond, too.
            None => WallTime(now.0.saturating_add(1)),
        };
        let from = match &self.since {
            Some(since) => time("since", since)?,
            None => SpendQuery::usual_begin(by, to, &zone),
        };
        if from > to {
            return Err(ApiError::bad_request("since is later than until"));
        }
        Ok(SpendQuery { by, from, to, zone })
    }
}

/// What calls used, cost and saved, by hour, day, month, provider, model or tool. Sums stay when
/// calls go from the record, and are exact to the nano-dollar.
#[utoipa::path(get, path = "/traygate/api/spend", tag = "record", params(SpendParams), responses(
    (status = 200, body = SpendReport), (status = 400, body = ErrorBody)))]
pub async fn get_spend(
    State(core): State<Arc<Core>>,
    Params(params): Params<SpendParams>,
) -> Result<Json<SpendReport>, ApiError> {
    let query = params.query(core.clock.wall())?;
    read(&core, move |reader| reader.spend(&query))
        .await
        .map(Json)
}
