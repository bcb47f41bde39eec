//! `GET prices`, `POST prices/refresh`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use crate::clock::WallTime;
use crate::core::Core;
use crate::core::prices::RefreshError;
use crate::core::spend::Unpriced;
use crate::store::json;

/// The price list in force, and what it does not know.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Prices)]
pub struct PricesView {
    /// Models it has prices for.
    models: usize,
    /// When it was fetched; none for the list that came with Traygate.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    fetched: Option<WallTime>,
    /// Why the last refresh failed, in words.
    trouble: Option<String>,
    /// Models that were called in this run and have no price. A `[[price]]` gives them one.
    unpriced: Vec<UnpricedModel>,
}

/// A model without a price.
#[derive(Debug, Serialize, ToSchema)]
struct UnpricedModel {
    provider: String,
    /// As it was asked for.
    model: String,
    /// Calls of this run.
    calls: u64,
}

impl PricesView {
    fn of(core: &Core) -> PricesView {
        let prices = core.spend.prices();
        let view = |model: Unpriced| UnpricedModel {
            provider: model.provider.to_string(),
            model: model.model.to_string(),
            calls: model.calls,
        };
        PricesView {
            models: prices.data().model_count(),
            fetched: core.price_list.fetched(),
            trouble: core.price_list.trouble(),
            unpriced: core.spend.unpriced().into_iter().map(view).collect(),
        }
    }
}

/// Where prices come from, and which models of this run have none.
#[utoipa::path(get, path = "/traygate/api/prices", tag = "watching", responses((status = 200, body = PricesView)))]
pub async fn get_prices(State(core): State<Arc<Core>>) -> Json<PricesView> {
    Json(PricesView::of(&core))
}

/// Fetches today's price list. It takes the place of the old one only if it is whole and in
/// proportion; calls on record without a price get theirs.
#[utoipa::path(post, path = "/traygate/api/prices/refresh", tag = "control", responses(
    (status = 200, body = PricesView),
    (status = 502, description = "it could not be had, or is not to be relied on; the old one stays", body = ErrorBody),
    (status = 503, description = "it could not be kept in the data folder; the old one stays", body = ErrorBody)))]
pub async fn post_refresh(State(core): State<Arc<Core>>) -> Result<Json<PricesView>, ApiError> {
    match core.refresh_prices().await {
        Ok(_) => Ok(Json(PricesView::of(&core))),
        Err(error) => {
            let (status, code) = match &error {
                RefreshError::Fetch(_) => (StatusCode::BAD_GATEWAY, "prices_unreachable"),
                RefreshError::Data(_) => (StatusCode::BAD_GATEWAY, "prices_senseless"),
                RefreshError::Keep(_) => (StatusCode::SERVICE_UNAVAILABLE, "prices_not_kept"),
            };
            Err(ApiError::new(status, code, error.to_string()))
        }
    }
}
