//! What a request to the admin API carries, read so that a mistake is named.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use crate::core::Core;
use crate::provider::Provider;
use crate::store::queries::{ReadError, Reader};

/// The parameters of the query string. One that is not known is refused, not passed over.
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let read: Result<Query<T>, QueryRejection> = Query::from_request_parts(parts, state).await;
        match read {
            Ok(Query(params)) => Ok(Params(params)),
            Err(refused) => Err(ApiError::bad_request(refused.body_text())),
        }
    }
}

/// A JSON body, whatever its content type: these routes take nothing else. A browser can send
/// no such body from another site, since its origin is checked first.
pub struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let body = Bytes::from_request(request, state)
            .await
            .map_err(|refused| match refused.status() {
                StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    "too_large",
                    "the body is larger than the 2 MB that the admin API takes",
                ),
                _ => ApiError::bad_request(refused.body_text()),
            })?;
        // The error may quote the body: a key must not be repeated.
        serde_json::from_slice(&body).map(JsonBody).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            ApiError::bad_request(match error.classify() {
                serde_json::error::Category::Data => {
                    format!("the body does not have the expected fields (line {line}, column {column}); see openapi.json")
                }
                _ => format!("the body is not valid JSON (line {line}, column {column})"),
            })
        })
    }
}

/// The provider named in the path.
pub struct Named(pub Arc<Provider>);

impl FromRequestParts<Arc<Core>> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, core: &Arc<Core>) -> Result<Self, ApiError> {
        let Path(name): Path<String> = Path::from_request_parts(parts, core)
            .await
            .map_err(|refused| ApiError::bad_request(refused.body_text()))?;
        let world = core.world();
        match world.provider(&name) {
            Some(provider) => Ok(Named(provider.clone())),
            None => Err(ApiError::no_provider(&name, &world.provider_names())),
        }
    }
}

/// Reads the record on a thread that may block.
///
/// # Errors
/// If it cannot be read.
pub async fn read<T: Send + 'static>(
    core: &Core,
    read: impl FnOnce(&Reader) -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ApiError> {
    let store = core.store.clone();
    blocking(move || store.read(read))
        .await?
        .map_err(|error| ApiError::unreadable(&error))
}

/// Does what may block on a thread for that.
///
/// # Errors
/// If it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| ApiError::internal())
}
