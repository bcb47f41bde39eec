//! Traygate's own routes: the admin API, health and metrics.
//!
//! [`api`] is the whole API as one router that needs no socket: the window asks it by `oneshot`.
//! [`http_face`] is what the listener serves: the same behind a token and a check of the origin
//! ([`access`]), beside what wants neither.

pub mod access;
mod breaker;
mod calls;
mod dedup;
pub mod error;
pub mod events;
mod health;
mod keys;
mod latency;
mod mode;
pub mod openapi;
mod page;
mod prices;
mod provider_check;
mod repeats;
mod request;
mod series;
mod settings;
mod spend;
pub mod state;

use std::sync::Arc;

use axum::Router;
use axum::middleware;
use axum::routing::{delete, get, post, put};

use self::error::ApiError;
use crate::core::Core;

/// Where the API is.
pub const API: &str = "/traygate/api";

/// The admin API under [`API`], for whoever is trusted already.
pub fn api(core: Arc<Core>) -> Router {
    let routes = Router::new()
        .route("/state", get(state::get_state))
        .route("/events", get(events::get_events))
        .route("/calls", get(calls::get_calls))
        .route(
            "/calls/{id}",
            get(calls::get_call).merge(delete(calls::stop_call)),
        )
        .route("/calls/{id}/body", get(calls::get_body))
        .route("/series", get(series::get_series))
        .route("/spend", get(spend::get_spend))
        .route("/latency", get(latency::get_latency))
        .route("/repeats", get(repeats::get_repeats))
        .route(
            "/settings",
            get(settings::get_settings).patch(settings::patch_settings),
        )
        .route("/providers/{name}/breaker", post(breaker::post_breaker))
        .route(
            "/providers/{name}/key",
            put(keys::put_key).merge(delete(keys::delete_key)),
        )
        .route("/providers/{name}/check", post(provider_check::post_check))
        .route("/keys/reload", post(keys::post_reload))
        .route("/dedup/clear", post(dedup::post_clear))
        .route("/mode", post(mode::post_mode))
        .route("/prices", get(prices::get_prices))
        .route("/prices/refresh", post(prices::post_refresh))
        .route("/openapi.json", get(openapi::get_openapi))
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_allowed);
    Router::new().nest(API, routes).with_state(core)
}

/// Everything under `/traygate/`, as the listener serves it.
pub fn http_face(core: Arc<Core>) -> Router {
    let trusted = api(core.clone()).layer(middleware::from_fn_with_state(
        core.clone(),
        access::require_token,
    ));
    let open = Router::new()
        .route("/traygate/", get(page::get_page))
        .route("/traygate", get(page::to_page))
        .route("/", get(page::to_page))
        .route("/traygate/health", get(health::get_health))
        .route("/traygate/metrics", get(health::get_metrics))
        .fallback(nothing_here)
        .with_state(core);
    open.merge(trusted)
}

async fn nothing_here(uri: axum::http::Uri) -> ApiError {
    let path: String = uri.path().chars().take(128).collect();
    ApiError::not_found(format!(
        "{path} is Traygate's own and there is nothing here"
    ))
}

async fn not_allowed(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    let path: String = uri.path().chars().take(128).collect();
    ApiError::method_not_allowed(format!("{method} is not for {path}"))
}
