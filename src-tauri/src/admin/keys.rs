//! `PUT|DELETE providers/{name}/key`: into the OS keyring and out of it. No route gives a key back.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::request::{JsonBody, Named, blocking};
use crate::core::Core;
use crate::keys::{self, KeyError};
use crate::provider::Provider;
use crate::settings::KeySource;

/// A key to store.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewKey {
    #[schema(value_type = String)]
    key: SecretString,
}

/// Whether a key is stored.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyStored {
    stored: bool,
}

fn refused(error: &KeyError) -> ApiError {
    let (status, code) = match error {
        KeyError::Empty | KeyError::TooLong | KeyError::BadCharacter { .. } => {
            (StatusCode::BAD_REQUEST, "bad_key")
        }
        _ => (StatusCode::SERVICE_UNAVAILABLE, "keyring_unavailable"),
    };
    ApiError::new(status, code, error.to_string())
}

/// Only where a stored key would be used.
fn takes_stored_key(provider: &Provider) -> Result<(), ApiError> {
    let word = match &provider.settings.key {
        KeySource::Auto | KeySource::Keyring => return Ok(()),
        KeySource::Pass => "pass",
        KeySource::None => "none",
        KeySource::Env(_) => "env:…",
    };
    Err(ApiError::new(
        StatusCode::CONFLICT,
        "key_not_used",
        format!(
            "provider {:?} has key = \"{word}\" and would not use a stored key; set it to \"auto\" or \"keyring\" first",
            provider.name()
        ),
    ))
}

/// Stores a provider's key in the OS keyring, bound to the provider's address. It is used from
/// the next call on.
#[utoipa::path(put, path = "/traygate/api/providers/{name}/key", tag = "providers",
    params(("name" = String, Path, description = "the provider")),
    request_body = NewKey, responses(
        (status = 200, body = KeyStored),
        (status = 400, description = "a key with spaces, line ends or invisible characters inside", body = ErrorBody),
        (status = 503, description = "the keyring did not take it", body = ErrorBody)))]
pub async fn put_key(
    State(core): State<Arc<Core>>,
    Named(provider): Named,
    JsonBody(NewKey { key }): JsonBody<NewKey>,
) -> Result<Json<KeyStored>, ApiError> {
    takes_stored_key(&provider)?;
    let is_placeholder = {
        use secrecy::ExposeSecret as _;
        let world = core.world();
        let placeholders = &world.settings.server.placeholder_keys;
        let key = key.expose_secret().trim();
        placeholders
            .iter()
            .any(|word| word.eq_ignore_ascii_case(key))
    };
    if is_placeholder {
        return Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "bad_key",
            "this is a placeholder (server.placeholder_keys) and no key; to take the stored key away, delete it",
        ));
    }
    blocking(move || {
        use secrecy::ExposeSecret as _;
        let key = keys::validate(key.expose_secret())?;
        keys::set(provider.name(), &provider.settings.origin(), &key)
    })
    .await?
    .map_err(|error| refused(&error))?;
    core.reload_keys();
    Ok(Json(KeyStored { stored: true }))
}

/// Deletes a provider's key from the OS keyring.
#[utoipa::path(delete, path = "/traygate/api/providers/{name}/key", tag = "providers",
    params(("name" = String, Path, description = "the provider")),
    responses((status = 200, body = KeyStored), (status = 404, body = ErrorBody),
        (status = 503, body = ErrorBody)))]
pub async fn delete_key(
    State(core): State<Arc<Core>>,
    Named(provider): Named,
) -> Result<Json<KeyStored>, ApiError> {
    let name = provider.name().clone();
    let was_stored = blocking(move || keys::delete(&name))
        .await?
        .map_err(|error| refused(&error))?;
    core.reload_keys();
    if was_stored {
        Ok(Json(KeyStored { stored: false }))
    } else {
        Err(ApiError::not_found(format!(
            "no key is stored for {:?}",
            provider.name()
        )))
    }
}

/// Reads the keyring again: after another program changed it, `traygate key` for one.
#[utoipa::path(post, path = "/traygate/api/keys/reload", tag = "providers", responses((status = 204)))]
pub async fn post_reload(State(core): State<Arc<Core>>) -> StatusCode {
    core.reload_keys();
    StatusCode::NO_CONTENT
}
