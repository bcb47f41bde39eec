//! Finds out what a request is: whose, which route and model, under which credential it goes
//! upstream, and whether its answer may be shared.

use std::borrow::Cow;
use std::sync::Arc;

use http::header::{CACHE_CONTROL, CONTENT_LENGTH, HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method};
use hyper::body::Incoming;
use reqwest::Url;

use super::budget::Weight;
use super::credential::{credential_headers, dress, without_credentials};
use super::dedup::Sharing;
use super::error::CallError;
use super::headers::keep_end_to_end;
use super::read_body::{RequestBody, read_body};
use super::record::Row;
use super::redact::name_without_keys;
use super::tool::tool_in_path;
use super::usage::Ask;
use crate::core::{Core, World};
use crate::policy::fingerprint::{KeyHasher, RequestFacts, RequestKey, header_is_in_key};
use crate::policy::routing::{
    Address, Dialect, Route, UnknownProvider, bare_dialect, is_version, read_address,
};
use crate::provider::Provider;
use crate::settings::{DedupMode, DedupSettings, KeySource};

const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const DEDUP: HeaderName = HeaderName::from_static("x-traygate-dedup");

/// A call that is known for what it is, ready to be led, joined or answered from a kept answer.
pub struct Call {
    pub row: Row,
    pub world: Arc<World>,
    pub provider: Arc<Provider>,
    pub route: Route,
    pub dialect: Dialect,
    pub model: Option<Arc<str>>,
    pub streaming: bool,
    /// `None`: it is nobody else's.
    pub sharing: Option<Sharing>,
    /// Pool and breakers hold it.
    pub guarded: bool,
    pub request: UpstreamRequest,
    pub facts: RequestFacts,
    /// What bounds its cost; `None` where its body was not read.
    pub weight: Option<Weight>,
    /// It is to be asked for its usage.
    pub ask: Option<Ask>,
}

/// What goes upstream.
pub struct UpstreamRequest {
    pub method: Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub body: RequestBody,
}

/// What a path and its headers say, before any body is read.
pub struct Place {
    pub world: Arc<World>,
    provider: Arc<Provider>,
    /// The path named no provider: a model rule may choose another.
    is_bare: bool,
    path: String,
    pub route: Route,
    pub dialect: Dialect,
    /// From the path; else it is the row's already.
    tool: Option<Arc<str>>,
}

/// Reads the address.
///
/// # Errors
/// [`CallError::NoProvider`].
pub fn locate(world: Arc<World>, parts: &Parts) -> Result<Place, CallError> {
    let path = parts.uri.path();
    let address = read_address(path, |word| world.provider(word).is_some());
    let address = address.map_err(|UnknownProvider(word)| CallError::NoProvider {
        word,
        known: world.provider_names(),
    })?;
    let Address {
        tool,
        provider: named,
        path,
        ..
    } = address;
    let provider = match named {
        Some(name) => world.provider(name),
        None => {
            let dialect = bare_dialect(path, parts.headers.contains_key(ANTHROPIC_VERSION));
            world.default_provider(dialect)
        }
    };
    let Some(provider) = provider.cloned() else {
        return Err(CallError::NoProvider {
            word: String::new(),
            known: world.provider_names(),
        });
    };
    Ok(Place {
        is_bare: named.is_none(),
        route: Route::of(&parts.method, path),
        dialect: dialect_of(path, &parts.headers, Some(&provider)),
        tool: tool.and_then(tool_in_path),
        path: path.to_owned(),
        provider,
        world,
    })
}

/// The dialect of a path: by the path, else by what the client or the provider speaks. Without a
/// `provider` the path is as the client sent it, and may begin with `/@name` and `/{provider}`.
pub fn dialect_of(path: &str, headers: &HeaderMap, provider: Option<&Provider>) -> Dialect {
    let of_path = Dialect::of_path(path).or_else(|| match provider {
        Some(_) => None,
        // Also where the word is no provider's: its refusal is for the path's own client.
        None => read_address(path, |word| word != "api" && !is_version(word))
            .ok()
            .and_then(|address| Dialect::of_path(address.path)),
    });
    of_path.unwrap_or_else(|| {
        if headers.contains_key(ANTHROPIC_VERSION) {
            Dialect::Anthropic
        } else {
            provider.map_or(Dialect::OpenAi, Provider::dialect)
        }
    })
}

impl Place {
    /// The route the same path would have as a POST: what an upgrade asks for with GET.
    pub fn route_of_post(&self) -> Route {
        Route::of(&Method::POST, &self.path)
    }

    pub fn provider(&self) -> &Arc<Provider> {
        &self.provider
    }

    /// Puts what the address says on the call's row.
    pub fn name_in(&self, row: &mut Row, parts: &Parts) {
        row.identify(|start| {
            start.provider = self.provider.name().clone();
            if let Some(tool) = &self.tool {
                start.tool = tool.clone();
            }
            start.route = match self.route.name() {
                Some(name) => Cow::Borrowed(name),
                None => {
                    let clean = name_without_keys(&self.path, &parts.headers);
                    let path = clean.as_deref().unwrap_or(&self.path);
                    Cow::Owned(format!("{} {path}", parts.method))
                }
            };
        });
    }

    /// The address upstream, the client's query included.
    ///
    /// # Errors
    /// [`CallError::BadRequest`] where path and base make no URL.
    pub fn url(&self, provider: &Provider, query: Option<&str>) -> Result<Url, CallError> {
        let query = match provider.settings.key {
            KeySource::Keyring | KeySource::None => query.map(without_credentials),
            _ => query.map(Cow::Borrowed),
        };
        let query = query.as_deref().filter(|query| !query.is_empty());
        if has_dot_segment(&self.path) {
            return Err(CallError::BadRequest(
                "the path has a segment that is `.` or `..`, which would leave the provider's base_url"
                    .to_owned(),
            ));
        }
        let address = provider.address(&self.path, query, self.route.is_generation());
        address.map_err(|error| {
            CallError::BadRequest(format!(
                "the path does not make an upstream address: {error}"
            ))
        })
    }
}

/// True if a URL parser would take segments of the path away.
fn has_dot_segment(path: &str) -> bool {
    let may_have = path.contains("/.") || path.contains(['%', '\\']);
    may_have
        && path.split(['/', '\\']).any(|segment| {
            let plain = segment.to_ascii_lowercase().replace("%2e", ".");
            plain == "." || plain == ".."
        })
}

/// Makes a request ready to go upstream: reads the body of a call that dedups, chooses the
/// credential and the key.
///
/// # Errors
/// [`CallError::NoKey`], [`CallError::BadRequest`], [`CallError::TooLarge`].
pub async fn identify(
    core: &Core,
    place: Place,
    parts: Parts,
    body: Incoming,
    mut row: Row,
) -> Result<Call, (CallError, Row)> {
    place.name_in(&mut row, &parts);
    match prepare(core, place, parts, body, &mut row).await {
        Ok(prepared) => Ok(prepared.with(row)),
        Err(error) => Err((error, row)),
    }
}

/// A [`Call`] that has not been given its row yet.
struct Prepared {
    place: Place,
    provider: Arc<Provider>,
    model: Option<Arc<str>>,
    streaming: bool,
    sharing: Option<Sharing>,
    request: UpstreamRequest,
    facts: RequestFacts,
    weight: Option<Weight>,
    ask: Option<Ask>,
}

impl Prepared {
    fn with(self, row: Row) -> Call {
        Call {
            row,
            world: self.place.world,
            provider: self.provider,
            route: self.place.route,
            dialect: self.place.dialect,
            model: self.model,
            streaming: self.streaming,
            sharing: self.sharing,
            guarded: self.place.route.is_guarded(),
            request: self.request,
            facts: self.facts,
            weight: self.weight,
            ask: self.ask,
        }
    }
}

async fn prepare(
    core: &Core,
    place: Place,
    mut parts: Parts,
    body: Incoming,
    row: &mut Row,
) -> Result<Prepared, CallError> {
    let read = read_body(core, &place, &parts, body).await?;
    let model: Option<Arc<str>> = read.facts.model.as_deref().map(Arc::from);
    let provider = model
        .as_deref()
        .filter(|_| place.is_bare)
        .and_then(|model| place.world.routed_provider(model))
        .unwrap_or(&place.provider)
        .clone();
    // Rules have seen it as it is; on record, and wherever it is shown, no key stands in it.
    let model = model.map(|model| match name_without_keys(&model, &parts.headers) {
        Some(clean) => clean.into(),
        None => model,
    });
    let streaming = read
        .facts
        .stream
        .unwrap_or(place.route.streams_by_default());
    let url = place.url(&provider, parts.uri.query())?;
    let wants = Wishes::of(&parts.headers);
    keep_end_to_end(&mut parts.headers);
    let billing = dress(
        core,
        &place.world,
        &provider,
        parts.uri.query(),
        &mut parts.headers,
    )
    .await?;
    if read.body.is_empty() && matches!(parts.method, Method::POST | Method::PUT | Method::PATCH) {
        // The client library leaves it out, and some servers then answer 411.
        let nothing = HeaderValue::from_static("0");
        parts.headers.insert(CONTENT_LENGTH, nothing);
    }
    // On record for calls that share nothing too: it tells which calls were repeats.
    let key = read
        .hasher
        .map(|hasher| request_key(hasher, &provider, &parts.method, &url, &parts.headers));
    let sharing = key.and_then(|key| {
        let dedup = &place.world.settings.dedup;
        let mode = sharing_mode(dedup, row.tool(), model.as_deref(), &read.facts);
        (mode != DedupMode::Off && !wants.nothing_shared).then_some(Sharing {
            key,
            mode,
            take_kept: !wants.fresh,
            window: dedup.window,
        })
    });
    row.identify(|start| {
        start.provider = provider.name().clone();
        start.model = model.clone();
        start.billing = billing;
        start.streaming = streaming;
        start.key = key.map(|key| key.0);
    });
    let ask = Ask::of(
        &provider,
        place.route,
        &read.facts,
        &parts.headers,
        &read.body,
        model.as_ref(),
    );
    Ok(Prepared {
        facts: read.facts,
        weight: read.weight,
        ask,
        provider,
        model,
        streaming,
        sharing,
        request: UpstreamRequest {
            method: parts.method,
            url,
            headers: parts.headers,
            body: read.body,
        },
        place,
    })
}

/// What the caller asks of dedup.
#[derive(Clone, Copy, Debug, Default)]
struct Wishes {
    /// No kept answer, but joining is fine.
    fresh: bool,
    nothing_shared: bool,
}

impl Wishes {
    fn of(headers: &HeaderMap) -> Wishes {
        let mut wishes = Wishes::default();
        for value in headers.get_all(CACHE_CONTROL) {
            for word in value.to_str().unwrap_or_default().split(',') {
                wishes.fresh |= word.trim().eq_ignore_ascii_case("no-cache");
                wishes.nothing_shared |= word.trim().eq_ignore_ascii_case("no-store");
            }
        }
        if let Some(value) = headers.get(DEDUP) {
            wishes.nothing_shared |= value.as_bytes().eq_ignore_ascii_case(b"off");
        }
        wishes
    }
}

/// The first rule that matches, else what suits the call.
fn sharing_mode(
    dedup: &DedupSettings,
    tool: &str,
    model: Option<&str>,
    facts: &RequestFacts,
) -> DedupMode {
    if !dedup.enabled {
        return DedupMode::Off;
    }
    let rule = dedup.rules.iter().find(|rule| {
        rule.tool
            .as_ref()
            .is_none_or(|pattern| pattern.matches(tool))
            && rule
                .model
                .as_ref()
                .is_none_or(|pattern| model.is_some_and(|model| pattern.matches(model)))
    });
    let mode = match rule {
        Some(rule) => rule.mode,
        // *Regenerate* and *undo, ask again* send the same body on purpose.
        None if facts.has_tools
            || facts.server_state
            || dedup
                .retry_tools
                .iter()
                .any(|pattern| pattern.matches(tool)) =>
        {
            DedupMode::Retry
        }
        None => DedupMode::Full,
    };
    match mode {
        DedupMode::Full | DedupMode::Retry if dedup.window.is_zero() => DedupMode::InFlight,
        mode => mode,
    }
}

/// Equal keys are equal calls: everything that can change the answer is in it, and nothing that
/// only describes an attempt.
fn request_key(
    mut hasher: KeyHasher,
    provider: &Provider,
    method: &Method,
    url: &Url,
    headers: &HeaderMap,
) -> RequestKey {
    hasher.part("provider", provider.name().as_bytes());
    hasher.part("method", method.as_str().as_bytes());
    hasher.part("url", url.as_str().as_bytes());
    let mut keyed: Vec<(&str, &[u8])> = headers
        .iter()
        .filter(|(name, _)| {
            header_is_in_key(name.as_str())
                || credential_headers(provider).any(|credential| credential == *name)
        })
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    // Stable, so that a repeated header keeps the order of its values.
    keyed.sort_by_key(|(name, _)| *name);
    for (name, value) in keyed {
        hasher.part("header", name.as_bytes());
        hasher.part("value", value);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::settings::{DedupRule, Overrides, Pattern, Settings};

    #[test]
    fn finds_segments_that_a_url_parser_takes_away() {
        for (path, has) in [
            ("/v1/chat/completions", false),
            ("/v1/models/gpt-4.1", false),
            ("/v1/models/a%2Fb", false),
            ("/v1/.well-known", false),
            ("/../v1/models", true),
            ("/v1/./models", true),
            ("/v1/%2E%2e/models", true),
            ("/v1/.%2e", true),
            ("/v1\\..\\models", true),
        ] {
            assert_eq!(has_dot_segment(path), has, "{path}");
        }
    }

    #[test]
    fn chooses_how_to_share() {
        let mut dedup = Settings::parse("", &Overrides::default()).unwrap().dedup;
        let plain = RequestFacts::default();
        let tools = RequestFacts {
            has_tools: true,
            ..RequestFacts::default()
        };
        let mode = |dedup: &DedupSettings, tool: &str, facts: &RequestFacts| {
            sharing_mode(dedup, tool, Some("gpt-4o"), facts)
        };
        assert_eq!(mode(&dedup, "curl", &plain), DedupMode::Full);
        assert_eq!(mode(&dedup, "curl", &tools), DedupMode::Retry);
        assert_eq!(mode(&dedup, "codex", &plain), DedupMode::Retry);
        dedup.rules = vec![DedupRule {
            tool: Some(Pattern::new("eval-*")),
            model: None,
            mode: DedupMode::Off,
        }];
        assert_eq!(mode(&dedup, "eval-7", &plain), DedupMode::Off);
        assert_eq!(mode(&dedup, "curl", &plain), DedupMode::Full);
        dedup.window = Duration::ZERO;
        assert_eq!(mode(&dedup, "curl", &plain), DedupMode::InFlight);
        dedup.enabled = false;
        assert_eq!(mode(&dedup, "curl", &plain), DedupMode::Off);
    }
}
