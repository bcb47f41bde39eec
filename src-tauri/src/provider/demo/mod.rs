//! The built-in provider: answers any prompt, offline, over real HTTP on a loopback port.
//!
//! A newcomer's first call, the drill and the tests run on it. It speaks the three dialects
//! (OpenAI chat, completions, responses and embeddings; Anthropic messages; Ollama chat, generate
//! and embed), whole and streamed, and the official SDKs accept what it says. It answers every
//! path with and without a leading `/v1`.
//!
//! # Asking it to misbehave
//! The model's name is the script. Any name works and answers at once, in [`script::CHUNKS`]
//! pieces [`script::GAP`] apart when streamed. A question mark adds wishes:
//!
//! ```text
//! name[?key=value[&key=value]…]        demo?delay_ms=1500&chunks=20&gap_ms=40
//! ```
//!
//! | key | what it does |
//! |---|---|
//! | `delay_ms=N` | waits N ms before the head of the answer |
//! | `chunks=N` | cuts the answer into N pieces, making it longer where it must |
//! | `gap_ms=N` | waits N ms between two pieces of a stream |
//! | `status=N` | answers with this error, 400 to 599, in the dialect's own form |
//! | `retry_after=N` | adds `retry-after: N` to that error |
//! | `hang=1` | takes the request and never answers |
//! | `break_after=N` | cuts the connection after N pieces, without a proper end |
//! | `error_after=N` | sends an error event after N pieces, then ends properly |
//! | `hang_after=N` | sends N pieces, then nothing more, and keeps the connection open |
//!
//! Of the last three one may be asked for. On an answer that is not streamed, `break_after` and
//! `hang_after` send half of it, and `error_after` is a plain 500. [`script::PRESETS`] are such
//! scripts by name (`demo-slow`, `demo-fail`, …); wishes added to one win over its own. An unknown
//! key is a 400 that names the keys there are.
//!
//! # What it says
//! The text depends on the prompt alone, ids and times are fresh. If tools are given and the
//! prompt says *call a tool* (or *use* one, or names one), or the request demands it, the answer
//! is a tool call with arguments made to fit the tool's schema. A demanded JSON shape is filled in
//! the same way. `max_tokens` cuts the answer as a real model would. A token is four characters.

mod answer;
mod anthropic;
mod embeddings;
mod models;
mod ollama;
mod openai;
mod refusal;
mod responses;
pub mod script;
mod stream;

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::extract::rejection::BytesRejection;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use axum::http::{Method, Request, StatusCode, Uri};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use self::answer::{Answer, Ask};
use self::refusal::{Dialect, Refusal};
use self::script::{Ending, Script};
use self::stream::Frames;
use crate::clock::{Clock, WallTime};

/// Larger requests are answered 413.
const MAX_BODY: usize = 64 << 20;

/// A running demo provider. Dropping it closes its port and cuts the calls it still has.
#[derive(Debug)]
pub struct Demo {
    addr: SocketAddr,
    server: JoinHandle<()>,
}

impl Demo {
    /// Starts on a free port of 127.0.0.1. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// The system's, if no port can be had.
    pub async fn start() -> io::Result<Demo> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let server = tokio::spawn(accept(listener, routes()));
        Ok(Demo { addr, server })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Accepts until it is aborted. `axum::serve` would leave its connections running then; the set
/// kept here takes them along.
async fn accept(listener: TcpListener, routes: Router) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => {
                    connections.spawn(serve(socket, routes.clone()));
                }
                // Out of file descriptors, most likely: a pause lets some come back.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(socket: TcpStream, routes: Router) {
    // Without it the second event of a stream waits 40 ms for a delayed acknowledgement.
    if socket.set_nodelay(true).is_err() {
        return;
    }
    // An error here is a client that left, or a break that was asked for.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(routes))
        .await;
}

fn routes() -> Router {
    let versioned = Router::new()
        .route("/chat/completions", post(call::<openai::Chat>))
        .route("/completions", post(call::<openai::Completions>))
        .route("/responses", post(call::<responses::Responses>))
        .route("/embeddings", post(embeddings::openai))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::one))
        .route("/messages", post(call::<anthropic::Messages>))
        .route("/messages/count_tokens", post(anthropic::count_tokens));
    Router::new()
        .route(
            "/",
            get("Traygate's demo provider. Ask POST /v1/chat/completions.\n"),
        )
        .nest("/v1", versioned.clone())
        .merge(versioned)
        .route("/api/chat", post(call::<ollama::Chat>))
        .route("/api/generate", post(call::<ollama::Generate>))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/tags", get(models::tags))
        .route("/api/show", post(models::show))
        .route(
            "/api/version",
            get(async || Json(json!({"version": "0.14.0"}))),
        )
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_path)
        .layer(map_response(name_the_request))
        .layer(DefaultBodyLimit::max(MAX_BODY))
}

/// One dialect's form of a generation call.
trait Generation {
    /// The form of its errors.
    const DIALECT: Dialect;
    /// The media type of its streams.
    const STREAM_TYPE: &'static str;

    /// Reads what is asked.
    fn ask(body: &Value) -> Ask;
    /// The whole answer.
    fn whole(call: &Call) -> Value;
    /// The same answer as the pieces of a stream.
    fn frames(call: &Call) -> Frames;
}

/// A call about to be answered.
struct Call {
    /// The request.
    body: Value,
    /// The model, exactly as the request spelled it.
    model: String,
    answer: Answer,
    script: Script,
    /// Fresh, for the answer's ids: lower case letters and digits.
    id: String,
    now: WallTime,
}

impl Call {
    /// Whole seconds since 1970, as OpenAI's `created`.
    fn created(&self) -> i64 {
        self.now.unix_millis().div_euclid(1000)
    }
}

async fn call<G: Generation>(body: Result<Bytes, BytesRejection>) -> Response {
    match respond::<G>(body).await {
        Ok(response) => response,
        Err(refusal) => refusal.into_response(G::DIALECT),
    }
}

async fn respond<G: Generation>(body: Result<Bytes, BytesRejection>) -> Result<Response, Refusal> {
    let body = read_json(body)?;
    let ask = G::ask(&body);
    let script = obey(&body).await?;
    let call = Call {
        model: model_of(&body).to_owned(),
        answer: Answer::to(&ask, &script),
        id: fresh_id(),
        now: Clock::Boot.wall(),
        script,
        body,
    };
    if ask.stream {
        return Ok((
            [(CONTENT_TYPE, G::STREAM_TYPE), (CACHE_CONTROL, "no-cache")],
            Body::from_stream(G::frames(&call).paced(&call.script)),
        )
            .into_response());
    }
    let whole = G::whole(&call).to_string();
    Ok(match call.script.ending {
        Ending::Proper => json_body(Body::from(whole)),
        Ending::ErrorAfter(_) => return Err(Refusal::asked_for(StatusCode::INTERNAL_SERVER_ERROR)),
        Ending::BreakAfter(_) | Ending::HangAfter(_) => {
            json_body(Body::from_stream(stream::half_of(&whole, &call.script)))
        }
    })
}

fn json_body(body: Body) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

/// The body as a JSON object.
fn read_json(body: Result<Bytes, BytesRejection>) -> Result<Value, Refusal> {
    let body = body.map_err(|rejection| Refusal::new(rejection.status(), rejection.body_text()))?;
    match serde_json::from_slice(&body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(Refusal::bad_request("the body must be a JSON object")),
        Err(error) => Err(Refusal::bad_request(format!(
            "the body is not JSON: {error}"
        ))),
    }
}

/// Reads the script in the model's name and does what it says of the time before an answer.
async fn obey(body: &Value) -> Result<Script, Refusal> {
    let script = Script::of(model_of(body)).map_err(Refusal::bad_request)?;
    if script.hang {
        std::future::pending::<Infallible>().await;
    }
    if !script.delay.is_zero() {
        tokio::time::sleep(script.delay).await;
    }
    match script.status {
        Some(status) => Err(Refusal::asked_for(status).retry_after(script.retry_after)),
        None => Ok(script),
    }
}

fn model_of(body: &Value) -> &str {
    body["model"].as_str().unwrap_or("demo")
}

fn fresh_id() -> String {
    ulid::Ulid::generate().to_string().to_ascii_lowercase()
}

/// Gives the answer the request id under which the SDKs show it.
async fn name_the_request(mut response: Response) -> Response {
    let id = format!("req_{}", fresh_id());
    if let Ok(id) = HeaderValue::try_from(id) {
        let headers = response.headers_mut();
        headers.insert(HeaderName::from_static("x-request-id"), id.clone());
        headers.insert(HeaderName::from_static("request-id"), id);
    }
    response
}

async fn no_such_path(method: Method, uri: Uri, request: Request<Body>) -> Response {
    let dialect = if uri.path().starts_with("/api/") {
        Dialect::Ollama
    } else if models::wants_anthropic(request.headers()) {
        Dialect::Anthropic
    } else {
        Dialect::OpenAi
    };
    Refusal::new(
        StatusCode::NOT_FOUND,
        format!(
            "Traygate's demo provider does not know {method} {}",
            uri.path()
        ),
    )
    .into_response(dialect)
}

#[cfg(test)]
mod tests;
