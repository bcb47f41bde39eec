//! Chooses the credential that a call goes upstream with, and tells who pays.

use std::borrow::Cow;
use std::time::Duration;

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};

use super::error::CallError;
use crate::core::{Core, World};
use crate::keys::Keys;
use crate::provider::Provider;
use crate::settings::{KeySource, ProviderKind};
use crate::store::Billing;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");
const X_GOOG_API_KEY: HeaderName = HeaderName::from_static("x-goog-api-key");
/// Where clients put their credential.
static CREDENTIAL_HEADERS: [HeaderName; 4] = [AUTHORIZATION, X_API_KEY, API_KEY, X_GOOG_API_KEY];
/// Query parameters that carry one.
const CREDENTIAL_PARAMETERS: [&str; 3] = ["key", "api_key", "api-key"];

/// How long a call waits for the keyring's first answer after the start, where it needs a key.
const KEYRING_PATIENCE: Duration = Duration::from_secs(2);

/// The credentials that a client sends, without their scheme.
pub fn credentials(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    credentials_in(headers, CREDENTIAL_HEADERS.iter())
}

fn credentials_in<'a>(
    headers: &'a HeaderMap,
    names: impl Iterator<Item = &'a HeaderName>,
) -> impl Iterator<Item = &'a str> {
    names.flat_map(|name| {
        let values = headers.get_all(name).into_iter();
        values.filter_map(move |value| credential(name, value))
    })
}

/// A header's credential without its scheme.
fn credential<'a>(name: &HeaderName, value: &'a HeaderValue) -> Option<&'a str> {
    let value = value.to_str().ok()?.trim();
    Some(match bearer(value) {
        Some(token) if *name == AUTHORIZATION => token,
        _ => value,
    })
}

/// `Bearer x` without its scheme.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ').unwrap_or((value, ""));
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Gives the request the credential it goes upstream with, and the provider's own headers; tells
/// who pays.
///
/// # Errors
/// [`CallError::NoKey`] where the stored key must be used and there is none.
pub async fn dress(
    core: &Core,
    world: &World,
    provider: &Provider,
    query: Option<&str>,
    headers: &mut HeaderMap,
) -> Result<Billing, CallError> {
    if let Some(token) = core.keys.access_token() {
        take_off(token.expose(), provider, headers);
    }
    let is_placeholder = |credential: &str| {
        credential.is_empty()
            || world
                .settings
                .server
                .placeholder_keys
                .iter()
                .any(|placeholder| placeholder.eq_ignore_ascii_case(credential))
    };
    let has_own = credentials_in(headers, credential_headers(provider))
        .chain(query_credentials(query.unwrap_or_default()))
        .any(|credential| !is_placeholder(credential));
    match &provider.settings.key {
        KeySource::Pass => {}
        KeySource::None => strip_credentials(provider, headers),
        KeySource::Auto | KeySource::Env(_) if has_own => {}
        KeySource::Auto | KeySource::Env(_) => {
            // A local provider rarely has a key, and must not wait for one.
            if matches!(provider.settings.key, KeySource::Auto) && !provider.settings.local {
                key_is_read(&core.keys, provider.name()).await;
            }
            if let Some((name, value)) = own_credential(core, provider) {
                strip_credentials(provider, headers);
                headers.insert(name, value);
            }
        }
        KeySource::Keyring => {
            key_is_read(&core.keys, provider.name()).await;
            strip_credentials(provider, headers);
            let Some((name, value)) = own_credential(core, provider) else {
                let problem = core.keys.problem();
                let problem = problem
                    .map(|problem| format!(" ({problem})"))
                    .unwrap_or_default();
                return Err(CallError::NoKey(provider.name().clone(), problem));
            };
            headers.insert(name, value);
        }
    }
    for (name, value) in &provider.settings.headers {
        headers.insert(name, value.clone());
    }
    Ok(billing(provider, headers))
}

/// Waits, not for long, until the keyring has said whether it has this key.
pub async fn key_is_read(keys: &Keys, name: &str) {
    if keys.get(name).is_none() {
        // Whoever was told to store one has perhaps just done so.
        keys.look_again();
        keys.ready(KEYRING_PATIENCE).await;
    }
}

/// Takes the access token off: it is for this door only.
fn take_off(token: &str, provider: &Provider, headers: &mut HeaderMap) {
    for name in credential_headers(provider) {
        let is_token = |value: &HeaderValue| credential(name, value) == Some(token);
        if !headers.get_all(name).iter().any(is_token) {
            continue;
        }
        let others: Vec<HeaderValue> = headers.get_all(name).iter().cloned().collect();
        headers.remove(name);
        for other in others.into_iter().filter(|value| !is_token(value)) {
            headers.append(name, other);
        }
    }
}

fn strip_credentials(provider: &Provider, headers: &mut HeaderMap) {
    for name in credential_headers(provider) {
        headers.remove(name);
    }
}

/// Every header in which a credential may go to this provider.
pub fn credential_headers(provider: &Provider) -> impl Iterator<Item = &HeaderName> {
    CREDENTIAL_HEADERS
        .iter()
        .chain(&provider.settings.auth_header)
}

/// The values of a query's parameters that carry a credential, as they are written there.
pub fn query_credentials(query: &str) -> impl Iterator<Item = &str> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .filter(|(name, _)| CREDENTIAL_PARAMETERS.contains(name))
        .map(|(_, value)| value)
}

pub fn without_credentials(query: &str) -> Cow<'_, str> {
    let is_credential =
        |pair: &&str| CREDENTIAL_PARAMETERS.contains(&pair.split('=').next().unwrap_or_default());
    if !query.split('&').any(|pair| is_credential(&pair)) {
        return Cow::Borrowed(query);
    }
    let kept: Vec<&str> = query
        .split('&')
        .filter(|pair| !is_credential(pair))
        .collect();
    Cow::Owned(kept.join("&"))
}

/// The provider's own key in the one scheme it wants, where there is one.
pub fn own_credential(core: &Core, provider: &Provider) -> Option<(HeaderName, HeaderValue)> {
    let stored;
    let from_environment;
    let key: &str = match &provider.settings.key {
        KeySource::Auto | KeySource::Keyring => {
            // A call that began before the address changed must not take the new one's key there.
            stored = core.keys.get(provider.name())?;
            if stored.origin() != provider.settings.origin() {
                return None;
            }
            stored.expose()
        }
        KeySource::Env(name) => {
            from_environment = std::env::var(name)
                .ok()
                .filter(|key| !key.trim().is_empty())?;
            from_environment.trim()
        }
        KeySource::Pass | KeySource::None => return None,
    };
    let name = match (&provider.settings.auth_header, provider.settings.kind) {
        (Some(name), _) => name.clone(),
        (None, ProviderKind::Anthropic) => X_API_KEY,
        (None, _) => AUTHORIZATION,
    };
    let value = if name == AUTHORIZATION {
        format!("Bearer {key}")
    } else {
        key.to_owned()
    };
    let mut value = HeaderValue::from_str(&value).ok()?;
    value.set_sensitive(true);
    Some((name, value))
}

/// Who pays, as far as the credential tells: an OAuth bearer is a subscription's.
fn billing(provider: &Provider, headers: &HeaderMap) -> Billing {
    if provider.settings.local {
        return Billing::Free;
    }
    let token = headers
        .get(AUTHORIZATION)
        .and_then(|value| bearer(value.to_str().ok()?));
    match token {
        // Anthropic's OAuth tokens, and the JWTs of a ChatGPT login.
        Some(token) if token.starts_with("sk-ant-oat") => Billing::Plan,
        Some(token) if token.starts_with("eyJ") && token.matches('.').count() == 2 => Billing::Plan,
        _ => Billing::Metered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_keys_out_of_a_query() {
        assert_eq!(without_credentials("a=1&key=secret&b=2"), "a=1&b=2");
        assert_eq!(without_credentials("monkey=1"), "monkey=1");
    }
}
