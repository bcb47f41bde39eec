//! Takes a call's own credentials out of what a provider said about it: some repeat the key they
//! refuse.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::identify::{CREDENTIAL_PARAMETERS, credential_headers};
use crate::provider::Provider;

/// Shorter ones are placeholders, and would be found inside words.
const SHORTEST: usize = 8;

/// The credentials that a request carries.
pub struct Secrets {
    headers: Vec<HeaderValue>,
    parameters: Vec<String>,
}

impl Secrets {
    /// Those of a request that is about to go upstream.
    pub fn of(provider: &Provider, headers: &HeaderMap, query: Option<&str>) -> Secrets {
        let of_query = query.unwrap_or_default().split('&').filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            CREDENTIAL_PARAMETERS
                .contains(&name)
                .then(|| value.to_owned())
        });
        Secrets {
            headers: credential_headers(provider)
                .flat_map(|name: &HeaderName| headers.get_all(name))
                .cloned()
                .collect(),
            parameters: of_query.collect(),
        }
    }

    /// The text without them.
    pub fn redact(&self, text: Arc<str>) -> Arc<str> {
        let of_headers = self.headers.iter().filter_map(|value| value.to_str().ok());
        // What follows the scheme, so that the key is found without it too.
        let of_headers = of_headers.filter_map(|value| value.rsplit(' ').next());
        let mut clean = String::new();
        for secret in of_headers.chain(self.parameters.iter().map(String::as_str)) {
            let dirty = if clean.is_empty() { &*text } else { &clean };
            if secret.len() >= SHORTEST && dirty.contains(secret) {
                clean = dirty.replace(secret, "[key]");
            }
        }
        if clean.is_empty() { text } else { clean.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_key_with_and_without_its_scheme() {
        let secrets = Secrets {
            headers: vec![
                HeaderValue::from_static("Bearer sk-canary-1"),
                HeaderValue::from_static("x"),
            ],
            parameters: vec!["canary-in-query".to_owned()],
        };
        let said = "Incorrect API key provided: sk-canary-1, and canary-in-query. x".into();
        assert_eq!(
            &*secrets.redact(said),
            "Incorrect API key provided: [key], and [key]. x"
        );
        assert_eq!(&*secrets.redact("no key here".into()), "no key here");
    }
}
