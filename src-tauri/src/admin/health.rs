//! `/traygate/health` and `/traygate/metrics`: for whoever watches machines. No token is wanted,
//! and nothing secret is shown.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::core::Core;
use crate::metrics;

/// How Traygate itself fares.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Its version: who asks knows by this field who answers.
    traygate: &'static str,
    status: Status,
    /// Whether calls are put on record.
    log: Part,
    /// Whether connections are accepted.
    listener: Part,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    Trouble,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthPart)]
struct Part {
    status: Status,
    /// What is wrong, in words.
    trouble: Option<String>,
}

impl Part {
    fn of(trouble: Option<String>) -> Part {
        let status = match trouble {
            None => Status::Ok,
            Some(_) => Status::Trouble,
        };
        Part { status, trouble }
    }
}

impl Health {
    pub fn of(core: &Core) -> Health {
        let log = core.store.health();
        let log = match log.last_error {
            None if !log.recording => Some("no database is open".to_owned()),
            trouble => trouble,
        };
        let (log, listener) = (Part::of(log), Part::of(core.listener.trouble()));
        let status = match (log.status, listener.status) {
            (Status::Ok, Status::Ok) => Status::Ok,
            _ => Status::Trouble,
        };
        Health {
            traygate: env!("CARGO_PKG_VERSION"),
            status,
            log,
            listener,
        }
    }
}

/// 200 while the log and the listener are well, 503 while one of them is not.
#[utoipa::path(get, path = "/traygate/health", tag = "watching", security(()), responses(
    (status = 200, body = Health), (status = 503, body = Health)))]
pub async fn get_health(State(core): State<Arc<Core>>) -> Response {
    let health = Health::of(&core);
    let status = match health.status {
        Status::Ok => StatusCode::OK,
        Status::Trouble => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(health)).into_response()
}

/// What Prometheus scrapes.
#[utoipa::path(get, path = "/traygate/metrics", tag = "watching", security(()), responses(
    (status = 200, content_type = "text/plain", body = String)))]
pub async fn get_metrics(State(core): State<Arc<Core>>) -> Response {
    let text = core.metrics.render(&core);
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}
