//! `POST providers/{name}/check`: a free call that says whether address and key are right.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use http::{HeaderName, HeaderValue};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::request::Named;
use crate::call::credential::own_credential;
use crate::core::Core;
use crate::provider::Provider;
use crate::provider::clients::describe;
use crate::settings::ProviderKind;

/// How long the provider has for each of at most two answers.
const LIMIT: Duration = Duration::from_secs(10);

/// What was found.
#[derive(Debug, Serialize, ToSchema)]
pub struct Checked {
    address: Address,
    key: Key,
    /// The status of the provider's answer, where there was one.
    status: Option<u16>,
    /// What that means and what to do, in words.
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = CheckedAddress)]
enum Address {
    /// A provider of this kind answers there.
    Right,
    /// Something answers, but not as a provider does.
    Wrong,
    /// Nothing answers.
    Unreachable,
    /// It answers with a fault of its own.
    Failing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = CheckedKey)]
enum Key {
    Right,
    /// The provider refuses it.
    Refused,
    /// There is none of its own: a tool's own key is passed on.
    Missing,
    /// The provider wants none.
    NotNeeded,
    /// It could not be found out.
    Unknown,
}

/// Asks for what costs nothing: the model list, and where that is open to everybody, what tells
/// of the key.
#[utoipa::path(post, path = "/traygate/api/providers/{name}/check", tag = "providers",
    params(("name" = String, Path, description = "the provider")),
    responses((status = 200, body = Checked), (status = 404, body = ErrorBody)))]
pub async fn post_check(State(core): State<Arc<Core>>, Named(provider): Named) -> Json<Checked> {
    Json(check(&core, &provider).await)
}

async fn check(core: &Core, provider: &Provider) -> Checked {
    let name = provider.name();
    let key = own_credential(core, provider);
    let answer = match ask(provider, path_that_knows_keys(provider), key.as_ref()).await {
        Ok(status) => status,
        Err(reason) => {
            return Checked {
                address: Address::Unreachable,
                key: Key::Unknown,
                status: None,
                message: format!(
                    "{name} cannot be reached: {reason}. Check that it runs and that base_url is right"
                ),
            };
        }
    };
    let checked = |address, key, message: String| Checked {
        address,
        key,
        status: Some(answer),
        message,
    };
    match (answer, &key) {
        (200..300, Some(_)) => {
            // Does it look at the key at all?
            match ask(provider, path_that_knows_keys(provider), None).await {
                Ok(200..300) => checked(
                    Address::Right,
                    Key::Unknown,
                    format!(
                        "{name} answers, with and without a key: a call will show whether the key is right"
                    ),
                ),
                _ => checked(
                    Address::Right,
                    Key::Right,
                    format!("{name} answers and takes the key"),
                ),
            }
        }
        (200..300, None) => checked(
            Address::Right,
            Key::NotNeeded,
            format!("{name} answers without a key"),
        ),
        (401 | 403, Some(_)) => checked(
            Address::Right,
            Key::Refused,
            format!(
                "{name} answers and refuses the key: enter it again (`traygate key set {name}`)"
            ),
        ),
        (401 | 403, None) => checked(
            Address::Right,
            Key::Missing,
            format!(
                "{name} answers and wants a key; none is stored, so tools must send their own (or `traygate key set {name}`)"
            ),
        ),
        (429, _) => checked(
            Address::Right,
            Key::Unknown,
            format!("{name} answers that it was asked too often"),
        ),
        (500.., _) => checked(
            Address::Failing,
            Key::Unknown,
            format!("{name} answers with status {answer}: it has trouble of its own"),
        ),
        _ => checked(
            Address::Wrong,
            Key::Unknown,
            format!(
                "something answers at {name}'s base_url with status {answer}, and not as a provider does: check base_url, its path above all"
            ),
        ),
    }
}

/// OpenRouter's model list is open to everybody; this address is for whoever has a key.
/// Source: OpenRouter's API reference, "Get current API key".
fn path_that_knows_keys(provider: &Provider) -> &'static str {
    match provider.settings.base_url.host_str() {
        Some("openrouter.ai") => "/v1/key",
        _ => provider.model_list(),
    }
}

/// The status of the answer to a `GET`.
async fn ask(
    provider: &Provider,
    path: &str,
    key: Option<&(HeaderName, HeaderValue)>,
) -> Result<u16, String> {
    let client = provider.clients.fresh_connections();
    let client = client.map_err(|error| error.to_string())?;
    let mut request = client.get(provider.base.join(path, None)).timeout(LIMIT);
    for (name, value) in &provider.settings.headers {
        request = request.header(name, value);
    }
    if provider.settings.kind == ProviderKind::Anthropic {
        request = request.header("anthropic-version", "2023-06-01");
    }
    if let Some((name, value)) = key {
        request = request.header(name, value);
    }
    let answer = request
        .send()
        .await
        .map_err(|error| describe(&error.without_url()))?;
    Ok(answer.status().as_u16())
}
