//! Takes a call's own credentials out of what a provider said about it: some repeat the key they
//! refuse.

use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use memchr::memmem;
use url::form_urlencoded;

use super::credential::{credential_headers, credentials, query_credentials};
use crate::provider::Provider;

/// Shorter ones are placeholders, and would be found inside words.
const SHORTEST: usize = 8;
/// A beginning of a key that is as long as this is taken out too: what a provider says is kept to
/// a length, which may end within the key.
const BEGINNING: usize = 12;

/// The credentials that a request carries, without their scheme.
pub struct Secrets(Vec<String>);

impl Secrets {
    /// Those of a request that is about to go upstream.
    pub fn of(provider: &Provider, headers: &HeaderMap, query: Option<&str>) -> Secrets {
        let of_headers = credential_headers(provider)
            .chain(provider.settings.headers.iter().map(|(name, _)| name))
            .flat_map(|name: &HeaderName| headers.get_all(name))
            .filter_map(|value| value.to_str().ok()?.rsplit(' ').next());
        let mut secrets: Vec<String> = of_headers.map(str::to_owned).collect();
        for value in query_credentials(query.unwrap_or_default()) {
            // As it was written and as it was meant.
            let meant = form_urlencoded::parse(value.as_bytes()).next();
            secrets.extend(meant.map(|(meant, _)| meant.into_owned()));
            secrets.push(value.to_owned());
        }
        secrets.retain(|secret| secret.len() >= SHORTEST);
        Secrets(secrets)
    }

    /// The bytes without them, nor anything else that looks like a key; `None` if there is none.
    pub fn redact_bytes(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut clean: Option<Vec<u8>> = None;
        for secret in &self.0 {
            let found = bytes_without(clean.as_deref().unwrap_or(bytes), secret.as_bytes());
            clean = found.or(clean);
        }
        let found = without_likely_keys(clean.as_deref().unwrap_or(bytes));
        found.or(clean)
    }

    /// The text without them.
    pub fn redact(&self, text: Arc<str>) -> Arc<str> {
        let mut text = text;
        for secret in &self.0 {
            if let Some(clean) = without(&text, secret) {
                text = clean.into();
            }
        }
        text
    }
}

/// What stands where a key stood.
const MARK: &str = "[key]";

fn bytes_without(bytes: &[u8], secret: &[u8]) -> Option<Vec<u8>> {
    let mut clean = Vec::new();
    let mut from = 0;
    for at in memmem::find_iter(bytes, secret) {
        clean.extend_from_slice(&bytes[from..at]);
        clean.extend_from_slice(MARK.as_bytes());
        from = at + secret.len();
    }
    (from > 0).then(|| {
        clean.extend_from_slice(&bytes[from..]);
        clean
    })
}

/// How the keys of well-known providers, and other secrets that tools come across, begin.
const LIKELY: [&str; 17] = [
    "sk-",
    "sk_live_",
    "sk_test_",
    "xai-",
    "gsk_",
    "AIza",
    "r8_",
    "hf_",
    "pplx-",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "AKIA",
    "eyJ",
];
/// Shorter words than this are no keys.
const SHORTEST_LIKELY: usize = 20;

/// A name that a client gave (a model, a path) without keys: some put one in the wrong place, and
/// names are on record and in open metrics. `None` if there is none in it.
pub fn name_without_keys(name: &str, headers: &HeaderMap) -> Option<String> {
    if name.len() < SHORTEST {
        return None;
    }
    let mut clean: Option<String> = None;
    for secret in credentials(headers).filter(|secret| secret.len() >= SHORTEST) {
        let found = without(clean.as_deref().unwrap_or(name), secret);
        clean = found.or(clean);
    }
    let likely = without_likely_keys(clean.as_deref().unwrap_or(name).as_bytes());
    likely
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .or(clean)
}

/// Keys that are not this call's own: a tool may have read one from a file and sent it along.
fn without_likely_keys(bytes: &[u8]) -> Option<Vec<u8>> {
    let in_key = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let mut clean = Vec::new();
    let mut from = 0;
    for beginning in word_starts(bytes, in_key) {
        let word = &bytes[beginning..];
        let length = word.iter().take_while(|byte| in_key(byte)).count();
        let is_likely = length >= SHORTEST_LIKELY
            && LIKELY
                .iter()
                .any(|start| word.starts_with(start.as_bytes()))
            && word[..length].iter().any(u8::is_ascii_digit);
        if is_likely {
            clean.extend_from_slice(&bytes[from..beginning]);
            clean.extend_from_slice(MARK.as_bytes());
            from = beginning + length;
        }
    }
    (from > 0).then(|| {
        clean.extend_from_slice(&bytes[from..]);
        clean
    })
}

/// Where words begin that a key may be.
fn word_starts(bytes: &[u8], in_key: impl Fn(&u8) -> bool) -> impl Iterator<Item = usize> {
    (0..bytes.len()).filter(move |at| in_key(&bytes[*at]) && (*at == 0 || !in_key(&bytes[at - 1])))
}

/// `text` with a word in the place of every `secret`, or of a beginning of it; `None` if it has
/// none.
fn without(text: &str, secret: &str) -> Option<String> {
    let beginning = &secret[..secret.floor_char_boundary(BEGINNING)];
    let mut clean = String::new();
    let mut rest = text;
    while let Some((before, _)) = rest.split_once(beginning) {
        let found = &rest[before.len()..];
        let same = found.bytes().zip(secret.bytes());
        let same = same.take_while(|(said, secret)| said == secret).count();
        clean.push_str(before);
        clean.push_str(MARK);
        rest = &found[found.floor_char_boundary(same)..];
    }
    if rest.len() == text.len() {
        return None;
    }
    clean.push_str(rest);
    Some(clean)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Overrides, Settings};

    fn secrets() -> Secrets {
        let settings = "[[provider]]\nname = \"openai\"\nauth_header = \"x-mine\"\n\
                        headers = { helicone-auth = \"Bearer canary-of-provider\" }";
        let settings = Settings::parse(settings, &Overrides::default()).unwrap();
        let provider = Provider::new(settings.provider("openai").unwrap().clone());
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer sk-canary-0123456789"),
            ("x-api-key", "x"),
            ("x-mine", "canary-of-mine"),
            ("helicone-auth", "Bearer canary-of-provider"),
            ("user-agent", "canary-agent"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        Secrets::of(&provider, &headers, Some("a=canary-a&key=canary%2Fquery"))
    }

    #[test]
    fn finds_every_credential_with_and_without_its_scheme() {
        let said = "Incorrect API key: sk-canary-0123456789, Bearer sk-canary-0123456789, \
                    canary-of-mine, canary-of-provider, canary%2Fquery, canary/query. \
                    x canary-a canary-agent";
        assert_eq!(
            &*secrets().redact(said.into()),
            "Incorrect API key: [key], Bearer [key], [key], [key], [key], [key]. x canary-a \
             canary-agent"
        );
        let said: Arc<str> = "no key here".into();
        assert!(Arc::ptr_eq(&secrets().redact(said.clone()), &said));
    }

    #[test]
    fn finds_keys_in_bytes_its_own_and_likely_ones() {
        let said = b"\xff sk-canary-0123456789 {\"k\":\"sk-ant-api03-AbCdEf0123456789xyz\"} sk-short task-sk-0123456789012345678901";
        let clean = secrets().redact_bytes(said).unwrap();
        assert_eq!(
            clean,
            b"\xff [key] {\"k\":\"[key]\"} sk-short task-sk-0123456789012345678901"
        );
        assert_eq!(secrets().redact_bytes(b"nothing of the kind"), None);
    }

    #[test]
    fn a_name_on_record_has_no_key_in_it() {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "Bearer my-own-canary".parse().unwrap());
        for (name, clean) in [
            ("gpt-4o-2024-08-06", None),
            ("claude-sonnet-4-5-20250929", None),
            ("sk-proj-0123456789abcdef0123", Some("[key]")),
            (
                "/v1/models/sk-proj-0123456789abcdef",
                Some("/v1/models/[key]"),
            ),
            ("ghp_0123456789abcdefABCDEF0123456789abcd", Some("[key]")),
            ("AKIAIOSFODNN7EXAMPLE", Some("[key]")),
            ("my-own-canary", Some("[key]")),
            ("hf_", None),
        ] {
            assert_eq!(
                name_without_keys(name, &headers).as_deref(),
                clean,
                "{name}"
            );
        }
    }

    #[test]
    fn finds_a_key_that_was_cut_short() {
        for (said, clean) in [
            ("key sk-canary-012", "key [key]"),
            ("key sk-canary-01", "key [key]"),
            ("key sk-canary-01***ü", "key [key]***ü"),
            ("key sk-can***789", "key sk-can***789"),
        ] {
            assert_eq!(&*secrets().redact(said.into()), clean);
        }
    }
}
