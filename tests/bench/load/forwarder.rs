//! The least a proxy of this kind can cost: axum in front, reqwest behind,
//! and nothing between them.

use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::serve::ListenerExt;
use http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use http::{HeaderMap, StatusCode};
use tokio::net::TcpListener;

struct Upstream {
    client: reqwest::Client,
    /// Scheme and authority, without a slash at the end.
    base: String,
}

/// Forwards everything that arrives at `listener` to `base`.
pub async fn serve(listener: TcpListener, base: String) -> anyhow::Result<()> {
    let client = reqwest::Client::builder()
        .no_proxy()
        .build()
        .context("the HTTP client")?;
    let app = Router::new()
        .fallback(forward)
        .with_state(Arc::new(Upstream { client, base }));
    // Nagle's algorithm would hold an event back until the one before it is acknowledged.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            eprintln!("forwarder: no TCP_NODELAY: {error}");
        }
    });
    axum::serve(listener, app).await.context("the listener")
}

async fn forward(State(upstream): State<Arc<Upstream>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let sent = upstream
        .client
        .request(head.method, format!("{}{path}", upstream.base))
        .headers(end_to_end(head.headers))
        .body(reqwest::Body::wrap_stream(body.into_data_stream()))
        .send();
    match sent.await {
        Ok(answer) => {
            let answer: http::Response<reqwest::Body> = answer.into();
            let (mut head, body) = answer.into_parts();
            head.headers = end_to_end(head.headers);
            Response::from_parts(head, Body::new(body))
        }
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

fn end_to_end(mut headers: HeaderMap) -> HeaderMap {
    for name in [HOST, CONNECTION, TRANSFER_ENCODING] {
        headers.remove(name);
    }
    headers
}
