//! `/traygate/`: where the link of `traygate serve` leads.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY, SET_COOKIE,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Redirect, Response};

use super::access;
use super::error::ApiError;
use crate::core::Core;

const PAGE: &str = "/traygate/";

/// From the bare address, and from the page's own without the slash.
pub async fn to_page() -> Redirect {
    Redirect::to(PAGE)
}

/// Takes the token out of the address into a cookie; then the page.
pub async fn get_page(State(core): State<Arc<Core>>, uri: Uri, headers: HeaderMap) -> Response {
    let query = uri.query().unwrap_or_default();
    let token = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("token="));
    if let Some(token) = token {
        return match core.listener.address() {
            Some(address) if core.token.is(token) => {
                let cookie = format!(
                    "{}={token}; Path=/traygate; HttpOnly; SameSite=Strict",
                    access::cookie_name(address.port())
                );
                let headers = [(LOCATION, PAGE.to_owned()), (SET_COOKIE, cookie)];
                (StatusCode::SEE_OTHER, headers).into_response()
            }
            _ => ApiError::new(
                StatusCode::UNAUTHORIZED,
                "token_needed",
                "this link belongs to an earlier run: open the one that `traygate serve` printed when it started",
            )
            .into_response(),
        };
    }
    let html = if access::shows_token(&core, &headers) {
        include_str!("page.html")
    } else {
        include_str!("no_token.html")
    };
    let headers: [(HeaderName, HeaderValue); 5] = [
        (
            CONTENT_TYPE,
            HeaderValue::from_static("text/html; charset=utf-8"),
        ),
        (
            CONTENT_SECURITY_POLICY,
            HeaderValue::from_static(
                "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            ),
        ),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, html).into_response()
}
