//! Lets a request in: only from a host and an origin that may, since a web page could otherwise
//! spend the person's keys.

use std::net::IpAddr;

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderName, HeaderValue, ORIGIN, VARY,
};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode};
use sha2::{Digest as _, Sha256};
use url::{Host, Url};

use super::credential;
use super::error::CallError;
use crate::core::{Core, World};
use crate::keys::ACCESS_TOKEN;
use crate::mode::Mode;

/// Names under which a container reaches its host.
/// Source: Docker's and Podman's networking documentation.
const CONTAINER_HOSTS: [&str; 2] = ["host.docker.internal", "host.containers.internal"];

/// Schemes of editors' and desktop apps' web views: no web page can have such an origin.
const APP_SCHEMES: [&str; 5] = ["vscode-webview", "vscode-file", "tauri", "app", "capacitor"];

const ALLOW_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-allow-private-network");
const REQUEST_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-request-private-network");

/// Where a connection came in.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// The local address that it was accepted on.
    pub local: IpAddr,
}

/// Checks host and origin, on every route.
///
/// # Errors
/// [`CallError::HostForbidden`], [`CallError::OriginForbidden`].
pub fn check_caller(
    world: &World,
    connection: Connection,
    request: &Parts,
) -> Result<(), CallError> {
    let server = &world.settings.server;
    let host = match request.uri.authority() {
        Some(authority) => authority.as_str(),
        None => text(&request.headers, &HOST).unwrap_or_default(),
    };
    if !may_be_called(host, connection.local, &server.allowed_hosts) {
        return Err(CallError::HostForbidden(host.chars().take(128).collect()));
    }
    match request.headers.get(ORIGIN) {
        Some(origin) => {
            let allowed = origin
                .to_str()
                .is_ok_and(|origin| may_call(origin, &server.allowed_origins));
            if !allowed {
                let origin = String::from_utf8_lossy(origin.as_bytes());
                return Err(CallError::OriginForbidden(
                    origin.chars().take(128).collect(),
                ));
            }
        }
        // A browser's request without an origin (an image, a link, a form's GET) still says where
        // it comes from. Programs send no such header, or another value.
        None if text(&request.headers, &SEC_FETCH_SITE) == Some("cross-site") => {
            return Err(CallError::OriginForbidden("cross-site".to_owned()));
        }
        None => {}
    }
    Ok(())
}

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a call that shows the admin token of this run: its address is mistyped, and a provider
/// must not learn the token.
///
/// # Errors
/// [`CallError::BadRequest`].
pub fn check_no_admin_token(core: &Core, request: &Parts) -> Result<(), CallError> {
    let query = request.uri.query().unwrap_or_default();
    let in_query = query.split('&').filter_map(|pair| pair.split_once('='));
    let mut shown =
        credential::credentials(&request.headers).chain(in_query.map(|(_, value)| value));
    if shown.any(|shown| core.token.is(shown)) {
        return Err(CallError::BadRequest(
            "this call shows Traygate's own admin token, which goes to no provider: the admin API is under /traygate/api/, so correct the address"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Refuses every call while the mode says so.
///
/// # Errors
/// [`CallError::ModeRefuse`].
pub fn check_mode(core: &Core) -> Result<(), CallError> {
    match core.mode() {
        Mode::Normal | Mode::Bypass => Ok(()),
        Mode::Refuse => Err(CallError::ModeRefuse),
    }
}

/// Off loopback, and only there, wants the access token: in the path or as the tool's API key.
///
/// # Errors
/// [`CallError::AccessDenied`].
pub async fn check_token(
    core: &Core,
    connection: Connection,
    request: &Parts,
) -> Result<(), CallError> {
    if connection.local.to_canonical().is_loopback() {
        return Ok(());
    }
    super::credential::key_is_read(&core.keys, ACCESS_TOKEN).await;
    let Some(token) = core.keys.access_token() else {
        return Err(CallError::AccessDenied);
    };
    // Hashed first, so that the time a comparison takes tells nothing of the token.
    let expected = Sha256::digest(token.expose());
    let matches = |candidate: &str| Sha256::digest(candidate) == expected;
    let in_path = request.uri.path().strip_prefix("/t/");
    let in_path = in_path.and_then(|rest| rest.split('/').next());
    let mut sent = in_path
        .into_iter()
        .chain(super::credential::credentials(&request.headers));
    if sent.any(matches) {
        Ok(())
    } else {
        Err(CallError::AccessDenied)
    }
}

/// True if `host`, with or without a port, names this machine as a caller may name it. `local` is
/// the address that was called: no name that leads elsewhere can stand for it.
fn may_be_called(host: &str, local: IpAddr, allowed: &[String]) -> bool {
    let Some(name) = without_port(host) else {
        return false;
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    if let Ok(ip) = bare.unwrap_or(name).parse::<IpAddr>() {
        let ip = ip.to_canonical();
        return ip.is_loopback() || ip == local.to_canonical() || is_allowed(name, allowed);
    }
    name.eq_ignore_ascii_case("localhost")
        || CONTAINER_HOSTS
            .iter()
            .any(|known| name.eq_ignore_ascii_case(known))
        || is_allowed(name, allowed)
}

fn is_allowed(name: &str, allowed: &[String]) -> bool {
    allowed
        .iter()
        .any(|allowed| allowed.eq_ignore_ascii_case(name))
}

/// `name:port` and `[v6]:port` without the port; `None` for what is neither.
fn without_port(host: &str) -> Option<&str> {
    let end = match host.strip_prefix('[') {
        Some(v6) => v6.find(']')? + 2,
        None => host.find(':').unwrap_or(host.len()),
    };
    let (name, port) = host.split_at(end);
    let port_is_fine = port.is_empty()
        || port
            .strip_prefix(':')
            .is_some_and(|port| port.parse::<u16>().is_ok());
    (port_is_fine && !name.is_empty()).then_some(name)
}

/// True if a page of this origin may call providers: pages served from this machine, web views of
/// editors and apps, and what the settings name.
fn may_call(origin: &str, allowed: &[String]) -> bool {
    if is_allowed(origin, allowed) {
        return true;
    }
    let Ok(url) = Url::parse(origin) else {
        return false;
    };
    if APP_SCHEMES.contains(&url.scheme()) {
        return true;
    }
    matches!(url.scheme(), "http" | "https")
        && match url.host() {
            Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
            Some(Host::Ipv4(ip)) => ip.is_loopback(),
            Some(Host::Ipv6(ip)) => ip.is_loopback(),
            None => false,
        }
}

/// The answer to a browser's preflight, if `request` is one; its origin has been checked.
pub fn preflight(request: &Parts) -> Option<Response<()>> {
    let is_preflight = request.method == Method::OPTIONS
        && request.headers.contains_key(ORIGIN)
        && request.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    if !is_preflight {
        return None;
    }
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(
        ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
    );
    if let Some(asked) = request.headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    if request.headers.contains_key(REQUEST_PRIVATE_NETWORK) {
        headers.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
    }
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    Some(response)
}

/// Lets the page of an allowed origin read the answer, errors too. The provider's own words on
/// that are about its own site and go.
pub fn share_with_origin(headers: &mut HeaderMap, origin: Option<&HeaderValue>) {
    let Some(origin) = origin else {
        return;
    };
    let exposed: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    let exposed = HeaderValue::from_str(&exposed.join(", "));
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Ok(exposed) = exposed {
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_may_be_called() {
        let local = "172.17.0.1".parse().unwrap();
        let allowed = ["box.lan".to_owned()];
        let table = [
            ("127.0.0.1:7337", true),
            ("127.0.0.1", true),
            ("127.1.2.3:80", true),
            ("[::1]:7337", true),
            ("[::1]", true),
            ("LOCALHOST:7337", true),
            ("host.docker.internal:7337", true),
            ("172.17.0.1:7337", true),
            ("BOX.lan", true),
            ("", false),
            (":7337", false),
            ("evil.example", false),
            ("evil.example:7337", false),
            ("127.0.0.1.evil.example", false),
            ("localhost.evil.example", false),
            ("172.17.0.2:7337", false),
            ("[::2]:7337", false),
            ("[::1", false),
            ("[::1]evil", false),
            ("localhost:7337@evil.example", false),
            ("localhost:port", false),
            ("0.0.0.0:7337", false),
        ];
        for (host, served) in table {
            assert_eq!(may_be_called(host, local, &allowed), served, "{host:?}");
        }
    }

    #[tokio::test]
    async fn off_loopback_and_only_there_the_token_is_asked_for() {
        use crate::clock::Clock;
        use crate::keys::Keys;
        use crate::settings::{Overrides, Settings};
        use crate::store::Store;

        let core = |keys| {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path(), Clock::Boot).unwrap();
            let settings = Settings::parse("", &Overrides::default()).unwrap();
            Core::new(settings, store, keys, Clock::Boot)
        };
        let token = (ACCESS_TOKEN.into(), String::new(), "the-token".into());
        let (with_token, without) = (core(Keys::holding([token])), core(Keys::empty()));
        let table = [
            ("/v1/models", "authorization", "Bearer the-token", true),
            ("/v1/models", "authorization", "the-token", true),
            ("/v1/models", "x-api-key", "the-token", true),
            ("/v1/models", "api-key", "the-token", true),
            ("/t/the-token/v1/models", "x-api-key", "own", true),
            ("/t/the-token", "accept", "*/*", true),
            ("/v1/models", "authorization", "Bearer the-tokem", false),
            ("/v1/models", "authorization", "Bearer the-token2", false),
            ("/v1/models", "x-api-key", "", false),
            ("/v1/models", "cookie", "the-token", false),
            ("/t/the-token2/v1/models", "accept", "*/*", false),
            ("/t//v1/models", "accept", "*/*", false),
            ("/openai/t/the-token", "accept", "*/*", false),
        ];
        for (path, name, value, may) in table {
            let request = http::Request::get(path).header(name, value).body(());
            let (request, ()) = request.unwrap().into_parts();
            for local in ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"] {
                let local = local.parse().unwrap();
                let called = Connection { local };
                let checked = check_token(&with_token, called, &request).await;
                assert_eq!(checked.is_ok(), may, "{path} {name}: {value}");
                let checked = check_token(&without, called, &request).await;
                assert_eq!(checked, Err(CallError::AccessDenied), "without a token");
            }
            for local in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
                let local = local.parse().unwrap();
                let called = Connection { local };
                assert_eq!(check_token(&with_token, called, &request).await, Ok(()));
                assert_eq!(check_token(&without, called, &request).await, Ok(()));
            }
        }
    }

    #[test]
    fn only_pages_of_this_machine_may_call() {
        let allowed = ["https://chat.example".to_owned()];
        let table = [
            ("http://localhost:3000", true),
            ("http://127.0.0.1:7337", true),
            ("https://[::1]:8443", true),
            ("http://app.localhost", true),
            ("vscode-webview://1a2b", true),
            ("app://obsidian.md", true),
            ("tauri://localhost", true),
            ("https://chat.example", true),
            ("https://evil.example", false),
            ("http://localhost.evil.example", false),
            ("http://127.0.0.1.evil.example", false),
            ("null", false),
            ("", false),
            ("https://chat.example.evil", false),
            ("chrome-extension://abc", false),
        ];
        for (origin, may) in table {
            assert_eq!(may_call(origin, &allowed), may, "{origin:?}");
        }
    }
}
