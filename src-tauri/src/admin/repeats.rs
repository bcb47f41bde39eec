//! `GET repeats`: what share of calls repeat an earlier one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

use super::calls::times;
use super::error::{ApiError, ErrorBody};
use super::request::{Params, read};
use crate::core::Core;
use crate::store::queries::CallFilter;
use crate::store::repeats::{Repeats, RepeatsQuery};

/// Keys that may be named.
const MOST_NAMED: usize = 1000;

/// Which calls.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RepeatsParams {
    /// Those that came at this time (RFC 3339) or later.
    since: Option<String>,
    /// Those that came before this time.
    until: Option<String>,
    /// `*` and `?` stand for any characters, or one.
    provider: Option<String>,
    /// As above.
    model: Option<String>,
    /// As above.
    tool: Option<String>,
    /// How many of the most repeated keys are named: 20, at most 1,000.
    most: Option<usize>,
}

impl RepeatsParams {
    fn query(self) -> Result<RepeatsQuery, ApiError> {
        let most = self.most.unwrap_or(RepeatsQuery::default().most);
        if most > MOST_NAMED {
            return Err(ApiError::bad_request(format!(
                "most is at most {MOST_NAMED}"
            )));
        }
        let (since, until) = times(self.since.as_deref(), self.until.as_deref())?;
        Ok(RepeatsQuery {
            filter: CallFilter {
                since,
                until,
                provider: self.provider,
                model: self.model,
                tool: self.tool,
                ..CallFilter::default()
            },
            most,
        })
    }
}

/// The share of calls that repeat an earlier one, within 5 minutes, an hour, a day and ever, by
/// tool and by model.
#[utoipa::path(get, path = "/traygate/api/repeats", tag = "record", params(RepeatsParams), responses(
    (status = 200, body = Repeats), (status = 400, body = ErrorBody)))]
pub async fn get_repeats(
    State(core): State<Arc<Core>>,
    Params(params): Params<RepeatsParams>,
) -> Result<Json<Repeats>, ApiError> {
    let query = params.query()?;
    read(&core, move |reader| reader.repeats(&query))
        .await
        .map(Json)
}
