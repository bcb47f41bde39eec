//! `POST providers/{name}/breaker`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use tracing::info;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::request::{JsonBody, Named};
use super::state::ProviderView;
use crate::call::breaker::report;
use crate::core::Core;
use crate::provider::state::Command;

/// Longer names are no model's.
const LONGEST_MODEL: usize = 256;

/// What to do to a breaker.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BreakerCommand {
    action: Command,
    /// The model whose own breaker is meant; without it, the provider's.
    model: Option<String>,
}

/// Closes a breaker (`reset`), makes it half-open now (`probe`), holds it open (`hold`) or ends
/// that (`release`).
#[utoipa::path(post, path = "/traygate/api/providers/{name}/breaker", tag = "providers",
    params(("name" = String, Path, description = "the provider")),
    request_body = BreakerCommand, responses(
        (status = 200, description = "the provider as it stands now", body = ProviderView),
        (status = 404, body = ErrorBody),
    ))]
pub async fn post_breaker(
    State(core): State<Arc<Core>>,
    Named(provider): Named,
    JsonBody(command): JsonBody<BreakerCommand>,
) -> Result<Json<ProviderView>, ApiError> {
    let model = command.model.as_deref();
    if model.is_some_and(|model| model.is_empty() || model.len() > LONGEST_MODEL) {
        return Err(ApiError::bad_request("model is not the name of a model"));
    }
    let model: Option<Arc<str>> = model.map(Arc::from);
    let now = core.clock.now();
    let changes = provider
        .state
        .command(model.as_ref(), command.action, now)
        .ok_or_else(|| {
            ApiError::new(
                StatusCode::CONFLICT,
                "too_many_models",
                "so many models of this provider have breakers that are open that there is no room for another",
            )
        })?;
    info!(provider = %provider.name(), model = model.as_deref(), action = ?command.action, "breaker steered by hand");
    report(&core, &provider, &changes, now);
    Ok(Json(ProviderView::of(&core, &provider)))
}
