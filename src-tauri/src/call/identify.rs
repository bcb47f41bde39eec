//! Finds out what a request is: whose, which route and model, under which credential it goes
//! upstream, and whether its answer may be shared.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, HeaderName, HeaderValue,
    USER_AGENT,
};
use http::request::Parts;
use http::{HeaderMap, Method};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use reqwest::Url;
use sha2::{Digest as _, Sha256};
use tokio::sync::OwnedSemaphorePermit;

use super::dedup::Sharing;
use super::error::CallError;
use super::record::Row;
use crate::core::{BODIES_HELD, Core, World};
use crate::keys::Keys;
use crate::policy::fingerprint::{
    KeyHasher, RequestFacts, RequestKey, RequestScan, header_is_in_key,
};
use crate::policy::routing::{
    Address, Dialect, Route, UnknownProvider, bare_dialect, is_version, read_address,
};
use crate::policy::tap::{DecodeError, Encoding, decode_request};
use crate::provider::Provider;
use crate::settings::{DedupMode, DedupSettings, KeySource, ProviderKind};
use crate::store::Billing;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");
const X_GOOG_API_KEY: HeaderName = HeaderName::from_static("x-goog-api-key");
/// Where clients put their credential.
static CREDENTIAL_HEADERS: [HeaderName; 4] = [AUTHORIZATION, X_API_KEY, API_KEY, X_GOOG_API_KEY];
/// Query parameters that carry one.
pub const CREDENTIAL_PARAMETERS: [&str; 3] = ["key", "api_key", "api-key"];

const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const TAG: HeaderName = HeaderName::from_static("x-traygate-tag");
const DEDUP: HeaderName = HeaderName::from_static("x-traygate-dedup");

/// How long a call waits for the keyring's first answer after the start, where it needs a key.
const KEYRING_PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of a tool's name.
const TOOL_BYTES: usize = 64;
/// A compressed body larger than this many bytes is decoded off the async threads.
const DECODED_INLINE: usize = 64 << 10;

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
    pub request: UpstreamRequest,
}

/// What goes upstream.
pub struct UpstreamRequest {
    pub method: Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub body: RequestBody,
}

/// A request's body.
pub enum RequestBody {
    /// Read whole. The permit stands for its bytes until they are sent.
    Whole {
        bytes: Bytes,
        held: Option<OwnedSemaphorePermit>,
    },
    /// Passes through as it comes: what was read of it, then the rest.
    Streamed { read: Vec<Bytes>, rest: Incoming },
}

impl RequestBody {
    /// True if it is known to have no bytes.
    pub fn is_empty(&self) -> bool {
        match self {
            RequestBody::Whole { bytes, .. } => bytes.is_empty(),
            RequestBody::Streamed { read, rest } => read.is_empty() && rest.is_end_stream(),
        }
    }
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
                None => Cow::Owned(format!("{} {}", parts.method, self.path)),
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
        let address = provider.address(&self.path, query, self.route.is_generation());
        address.map_err(|error| {
            CallError::BadRequest(format!(
                "the path does not make an upstream address: {error}"
            ))
        })
    }
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
            request: self.request,
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
    let sharing = read.body_hash.and_then(|body_hash| {
        let dedup = &place.world.settings.dedup;
        let mode = sharing_mode(dedup, row.tool(), model.as_deref(), &read.facts);
        (mode != DedupMode::Off && !wants.nothing_shared).then(|| Sharing {
            key: request_key(&provider, &parts.method, &url, &parts.headers, &body_hash),
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
        start.key = sharing.map(|sharing| sharing.key.0);
    });
    Ok(Prepared {
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
    provider: &Provider,
    method: &Method,
    url: &Url,
    headers: &HeaderMap,
    body_hash: &[u8; 32],
) -> RequestKey {
    let mut hasher = KeyHasher::new();
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
    hasher.part("body", body_hash);
    hasher.finish()
}

// --- The body ---------------------------------------------------------------------------------

struct ReadBody {
    body: RequestBody,
    facts: RequestFacts,
    /// SHA-256 of a body that was read whole.
    body_hash: Option<[u8; 32]>,
}

impl ReadBody {
    fn unread(read: Vec<Bytes>, rest: Incoming) -> ReadBody {
        ReadBody {
            body: RequestBody::Streamed { read, rest },
            facts: RequestFacts::default(),
            body_hash: None,
        }
    }
}

/// Reads the body of a generation route, hashing and scanning it as it arrives. Others, and those
/// that are too large, stream through.
async fn read_body(
    core: &Core,
    place: &Place,
    parts: &Parts,
    mut body: Incoming,
) -> Result<ReadBody, CallError> {
    if !place.route.is_generation() {
        return Ok(ReadBody::unread(Vec::new(), body));
    }
    let limit = place.world.settings.server.max_body.min(BODIES_HELD as u64);
    let length = body.size_hint().exact();
    if length.is_some_and(|length| length > limit) {
        return Ok(ReadBody::unread(Vec::new(), body));
    }
    let mut held = match length {
        Some(length) => Some(reserve(core, length).await),
        None => None,
    };
    let encoding = content_encoding(&parts.headers);
    let mut scan = RequestScan::new();
    let mut hash = Sha256::new();
    let mut read: Vec<Bytes> = Vec::new();
    let mut total = 0u64;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| upload_error(&error))?;
        let Ok(chunk) = frame.into_data() else {
            continue;
        };
        total += chunk.len() as u64;
        if length.is_none() {
            let room = u32::try_from(chunk.len())
                .ok()
                .filter(|_| total <= limit)
                .and_then(|len| core.bodies.clone().try_acquire_many_owned(len).ok());
            match (&mut held, room) {
                (_, None) => {
                    read.push(chunk);
                    return Ok(ReadBody::unread(read, body));
                }
                (Some(held), Some(more)) => held.merge(more),
                (none, first) => *none = first,
            }
        }
        hash.update(&chunk);
        if encoding == Encoding::Identity {
            scan.feed(&chunk);
        }
        read.push(chunk);
    }
    let bytes = join(read, total);
    let facts = match encoding {
        Encoding::Identity => scan.finish(),
        encoding => read_encoded(encoding, &bytes, limit).await?,
    };
    Ok(ReadBody {
        facts,
        body_hash: Some(hash.finalize().into()),
        body: RequestBody::Whole { bytes, held },
    })
}

/// Why a request's body came to no end: its client has left, or it cannot be read.
pub fn upload_error(error: &hyper::Error) -> CallError {
    let reason = error
        .source()
        .and_then(<dyn Error>::downcast_ref::<io::Error>);
    match reason.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => CallError::BadRequest(
            "the request's body is not framed as its headers say; send it again".to_owned(),
        ),
        _ => CallError::UploadBroke,
    }
}

/// Waits until so many bytes may be held; nothing is read from the socket meanwhile.
async fn reserve(core: &Core, length: u64) -> OwnedSemaphorePermit {
    let permits = u32::try_from(length).unwrap_or(u32::MAX);
    match core.bodies.clone().acquire_many_owned(permits).await {
        Ok(permit) => permit,
        Err(_) => unreachable!("the semaphore is never closed"),
    }
}

fn join(mut read: Vec<Bytes>, total: u64) -> Bytes {
    if read.len() <= 1 {
        return read.pop().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(usize::try_from(total).unwrap_or(0));
    read.iter().for_each(|chunk| whole.extend_from_slice(chunk));
    whole.freeze()
}

fn content_encoding(headers: &HeaderMap) -> Encoding {
    match headers.get(CONTENT_ENCODING).map(HeaderValue::to_str) {
        None => Encoding::Identity,
        Some(Ok(encoding)) => Encoding::of(encoding),
        Some(Err(_)) => Encoding::Unknown,
    }
}

/// Scans a bounded decoded copy; the body itself goes on as it came.
async fn read_encoded(
    encoding: Encoding,
    bytes: &Bytes,
    limit: u64,
) -> Result<RequestFacts, CallError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let body = bytes.clone();
    let scan = move || {
        decode_request(encoding, &body, limit).map(|decoded| {
            let mut scan = RequestScan::new();
            scan.feed(&decoded);
            scan.finish()
        })
    };
    let facts = if bytes.len() <= DECODED_INLINE {
        scan()
    } else {
        tokio::task::spawn_blocking(scan)
            .await
            .map_err(|_| CallError::Internal)?
    };
    match facts {
        Ok(facts) => Ok(facts),
        Err(DecodeError::Unsupported) => Ok(RequestFacts::default()),
        Err(DecodeError::Corrupt) => Err(CallError::BadRequest(
            "the request's body is not what its content-encoding says; send it again, or uncompressed"
                .to_owned(),
        )),
        Err(DecodeError::TooLarge) => Err(CallError::TooLarge(format!(
            "the request's body unpacks to more than {} MB (server.max_body_mb); raise that or send less",
            limit >> 20
        ))),
    }
}

// --- Headers and credentials ------------------------------------------------------------------

/// Takes off what concerns only this hop or only the local side.
pub fn keep_end_to_end(headers: &mut HeaderMap) {
    super::headers::remove_hop_by_hop(headers);
    let local: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_local(name.as_str()))
        .cloned()
        .collect();
    for name in local {
        headers.remove(name);
    }
}

/// Headers of the local side that no provider is to see. `content-length` is set anew from the
/// body.
fn is_local(name: &str) -> bool {
    matches!(
        name,
        "host"
            | "origin"
            | "cookie"
            | "referer"
            | "expect"
            | "content-length"
            | "forwarded"
            | "via"
            | "x-real-ip"
            | "http2-settings"
    ) || [
        "x-traygate-",
        "x-forwarded-",
        "sec-fetch-",
        "sec-ch-",
        "access-control-request-",
    ]
    .iter()
    .any(|prefix| name.starts_with(prefix))
}

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

fn without_credentials(query: &str) -> Cow<'_, str> {
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
            stored = core.keys.get(provider.name())?;
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

// --- The tool ---------------------------------------------------------------------------------

/// The tool that the path names.
fn tool_in_path(name: &str) -> Option<Arc<str>> {
    let name = clean_name(name.trim());
    (!name.is_empty()).then(|| name.into())
}

/// The tool that calls, as far as the headers tell: by its tag, else by its User-Agent.
pub fn tool_name(headers: &HeaderMap) -> Arc<str> {
    let tag = headers.get(TAG).and_then(|tag| tag.to_str().ok());
    if let Some(name) = tag.map(str::trim).filter(|name| !name.is_empty()) {
        return clean_name(name).into();
    }
    let agent = headers
        .get(USER_AGENT)
        .and_then(|agent| agent.to_str().ok());
    match agent.map(str::trim) {
        Some(agent) if !agent.is_empty() => tool_of_agent(agent).into(),
        _ => "unknown".into(),
    }
}

fn clean_name(name: &str) -> String {
    let is_fine = |c: &char| !c.is_control();
    let mut clean = String::new();
    for c in name.chars().filter(is_fine) {
        if clean.len() + c.len_utf8() > TOOL_BYTES {
            break;
        }
        clean.push(c);
    }
    clean
}

/// `claude-cli/2.0.77 (external, cli)` is `claude-code`, `OpenAI/JS 4.104.0` is `openai-js`.
fn tool_of_agent(agent: &str) -> String {
    let product = agent.split_whitespace().next().unwrap_or(agent);
    let (name, version) = product.split_once('/').unwrap_or((product, ""));
    let name = name.to_ascii_lowercase();
    let name = match name.as_str() {
        "claude-cli" => "claude-code",
        "mozilla" => "browser",
        name if name.starts_with("codex") => "codex",
        // The Python SDKs' asynchronous clients are the same tool.
        name => name
            .strip_prefix("async")
            .filter(|rest| !rest.is_empty())
            .unwrap_or(name),
    };
    // The official SDKs name their language where others put a version.
    let is_language = version.starts_with(|c: char| c.is_ascii_alphabetic());
    if is_language && matches!(name, "openai" | "anthropic") {
        clean_name(&format!("{name}-{}", version.to_ascii_lowercase()))
    } else {
        clean_name(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{DedupRule, Overrides, Pattern, Settings};

    #[test]
    fn names_tools() {
        let table = [
            ("OpenAI/JS 4.104.0", "openai-js"),
            ("AsyncOpenAI/Python 1.99.0", "openai-python"),
            ("Anthropic/JS 0.60.0", "anthropic-js"),
            ("claude-cli/2.0.77 (external, cli)", "claude-code"),
            ("codex_exec/0.171.0 (Debian 12; x86_64)", "codex"),
            ("curl/7.88.1", "curl"),
            ("python-httpx/0.27.0", "python-httpx"),
            ("Mozilla/5.0 (X11)", "browser"),
            ("node", "node"),
        ];
        for (agent, tool) in table {
            let mut headers = HeaderMap::new();
            headers.insert(USER_AGENT, HeaderValue::from_static(agent));
            assert_eq!(&*tool_name(&headers), tool, "{agent}");
            headers.insert(TAG, HeaderValue::from_static("my-agent"));
            assert_eq!(&*tool_name(&headers), "my-agent");
        }
        assert_eq!(&*tool_name(&HeaderMap::new()), "unknown");
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

    #[test]
    fn takes_keys_out_of_a_query() {
        assert_eq!(without_credentials("a=1&key=secret&b=2"), "a=1&b=2");
        assert_eq!(without_credentials("monkey=1"), "monkey=1");
    }

    #[test]
    fn local_headers_stay_here() {
        let mut headers = HeaderMap::new();
        for name in [
            "host",
            "origin",
            "cookie",
            "referer",
            "x-forwarded-for",
            "x-traygate-tag",
            "sec-fetch-mode",
            "connection",
            "x-hop",
            "te",
            "proxy-authorization",
            "keep-alive",
            "x-app",
            "anthropic-beta",
            "anthropic-dangerous-direct-browser-access",
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("x"));
        }
        headers.insert("connection", HeaderValue::from_static("keep-alive, X-Hop"));
        keep_end_to_end(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            [
                "anthropic-beta",
                "anthropic-dangerous-direct-browser-access",
                "x-app"
            ]
        );
    }
}
