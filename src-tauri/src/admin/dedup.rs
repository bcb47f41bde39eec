//! `POST dedup/clear`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::core::Core;
use crate::events::{Change, Event};

/// What was forgotten.
#[derive(Debug, Serialize, ToSchema)]
pub struct Cleared {
    /// Kept answers there were, about.
    answers: u64,
}

/// Forgets every kept answer. Calls in flight go on, and are joined as before.
#[utoipa::path(post, path = "/traygate/api/dedup/clear", tag = "control", responses((status = 200, body = Cleared)))]
pub async fn post_clear(State(core): State<Arc<Core>>) -> Json<Cleared> {
    let answers = core.dedup.holdings().answers;
    core.dedup.clear();
    core.events.tell(|| Event::State(Change::Dedup));
    Json(Cleared { answers })
}
