//! The admin API as a face uses it: over HTTP with the token, and by `oneshot` without a socket.

mod access;
mod calls;
mod events;
mod health;
mod openapi;
mod providers;
mod state;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use serde_json::Value;
use tower::ServiceExt as _;
use traygate::admin;

use super::support::app::App;
use super::support::client::{Answer, Outgoing};

/// Asks the API without a socket, as the window does.
pub async fn ask(
    app: &App,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> (StatusCode, Value) {
    let body = body.map_or(Body::empty(), |body| Body::from(body.to_string()));
    let request = Request::builder()
        .method(method)
        .uri(format!("/traygate/api/{path}"))
        .body(body)
        .expect("a request");
    let router = admin::api(app.running().core().clone());
    let response = router.oneshot(request).await.expect("it always answers");
    let status = response.status();
    let bytes = to_bytes(response.into_body(), 16 << 20)
        .await
        .expect("a body");
    let value = match bytes.is_empty() {
        true => Value::Null,
        false => serde_json::from_slice(&bytes).expect("JSON"),
    };
    (status, value)
}

pub async fn get(app: &App, path: &str) -> Value {
    let (status, value) = ask(app, Method::GET, path, None).await;
    assert_eq!(status, StatusCode::OK, "{path}: {value}");
    value
}

async fn post(app: &App, path: &str, body: Value) -> Value {
    let (status, value) = ask(app, Method::POST, path, Some(body)).await;
    assert!(status.is_success(), "{path}: {status} {value}");
    value
}

/// The refusal's code; panics if it was no refusal with this status.
pub fn code(refused: &(StatusCode, Value), status: u16) -> &str {
    assert_eq!(refused.0, status, "{}", refused.1);
    let code = refused.1["error"]["code"].as_str();
    assert!(refused.1["error"]["message"].is_string(), "it says why");
    code.expect("a code")
}

/// What `GET state` says of a provider.
async fn provider(app: &App, name: &str) -> Value {
    let state = get(app, "state").await;
    let providers = state["providers"].as_array().expect("providers");
    let found = providers.iter().find(|provider| provider["name"] == name);
    found.expect("it is there").clone()
}

/// Over HTTP, on a connection of its own.
async fn http(app: &App, request: Outgoing) -> Answer {
    app.client().await.ask(request).await
}

fn token(app: &App) -> String {
    app.running().core().token.expose().to_owned()
}
