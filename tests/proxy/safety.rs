//! Who may call, with whose key, and what must never be written down.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use secrecy::SecretString;
use tempfile::TempDir;
use traygate::keys::{ACCESS_TOKEN, Keys};
use traygate::mode::Mode;

use crate::support::app::App;
use crate::support::client::{Answer, BodyEnd, Client, Outgoing, get, post};
use crate::support::upstream::{Reply, Request, Upstream, chat_events};

const CHAT: &str = r#"{"model":"m","messages":[]}"#;
const STREAM: &str = r#"{"model":"m","messages":[],"stream":true}"#;

/// A request of each kind that is answered in another way.
fn every_route() -> Vec<(&'static str, Outgoing)> {
    let upgrade = |path: &str| {
        get(path)
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==")
    };
    vec![
        ("a chat", post("/v1/chat/completions").json(CHAT)),
        ("a stream", post("/openai/v1/chat/completions").json(STREAM)),
        ("a message", post("/@tool/anthropic/v1/messages").json(CHAT)),
        ("an unknown POST", post("/v1/files").body("bytes")),
        ("a free POST", post("/v1/messages/count_tokens").json(CHAT)),
        ("a GET", get("/v1/models")),
        ("a DELETE", Outgoing::new("DELETE", "/v1/files/1")),
        (
            "no provider",
            post("/nobody/v1/chat/completions").json(CHAT),
        ),
        ("a preflight", preflight("x-api-key")),
        ("an upgrade", upgrade("/v1/realtime")),
        ("an upgrade of a call", upgrade("/v1/responses")),
        ("the page", get("/traygate/").header("accept", "text/html")),
        ("the admin API", post("/traygate/api/settings").json("{}")),
        ("the root", get("/").header("accept", "text/html")),
    ]
}

fn preflight(headers: &str) -> Outgoing {
    Outgoing::new("OPTIONS", "/v1/chat/completions")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", headers)
}

/// Refused with this code, in a way that no web page can read.
fn assert_refused(answer: &Answer, status: u16, code: &str, what: &str) {
    let seen = (answer.status(), answer.header("x-traygate-error"));
    assert_eq!(seen, (status, Some(code)), "{what}");
    let cors = answer.head.headers.lines().iter();
    let cors: Vec<&String> = cors
        .filter(|line| line.to_lowercase().starts_with("access-control-"))
        .collect();
    assert!(cors.is_empty(), "{what}: {cors:?}");
}

// D63
#[tokio::test]
async fn another_hosts_name_is_refused_on_every_route_before_anything_happens() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let port = app.addr().port();
    let foreign = [
        "evil.example".to_owned(),
        format!("evil.example:{port}"),
        format!("127.0.0.1.evil.example:{port}"),
        format!("localhost.evil.example:{port}"),
        format!("evil.localhost.example:{port}"),
        String::new(),
        format!(":{port}"),
        "[::1".to_owned(),
        "192.0.2.77".to_owned(),
        format!("0.0.0.0:{port}"),
        "localhost@evil.example".to_owned(),
    ];
    for host in &foreign {
        for (route, request) in every_route() {
            // Also where the origin would do: the name is what a rebound page cannot hide.
            for origin in [None, Some("http://localhost:3000")] {
                let mut request = request.clone().header("host", host);
                if let Some(origin) = origin {
                    request = request.header("origin", origin);
                }
                let answer = app.ask(request).await;
                assert_refused(
                    &answer,
                    403,
                    "origin_forbidden",
                    &format!("{route} at {host:?}"),
                );
            }
        }
    }
    let mut client = app.client().await;
    client.send(&b"GET /v1/models HTTP/1.1\r\n\r\n"[..]).await;
    assert_refused(
        &client.read_to_end().await,
        403,
        "origin_forbidden",
        "no host",
    );
    let absolute = get("http://evil.example/v1/models").header("host", "localhost");
    assert_refused(
        &app.ask(absolute).await,
        403,
        "origin_forbidden",
        "an absolute target",
    );
    assert_eq!(up.requests().len(), 0);
}

// D63
#[tokio::test]
async fn every_name_of_this_machine_is_served() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, "[server]\nallowed_hosts = [\"Box.lan\", \"10.1.2.3\"]").await;
    let port = app.addr().port();
    let own = [
        format!("127.0.0.1:{port}"),
        "127.0.0.1".to_owned(),
        format!("127.0.0.9:{port}"),
        format!("[::1]:{port}"),
        format!("LOCALHOST:{port}"),
        "localhost".to_owned(),
        format!("host.docker.internal:{port}"),
        format!("host.containers.internal:{port}"),
        format!("box.LAN:{port}"),
        format!("10.1.2.3:{port}"),
        // A forwarded port: a name is what counts.
        "localhost:1".to_owned(),
    ];
    for (n, host) in own.iter().enumerate() {
        let answer = app.ask(get("/v1/models").header("host", host)).await;
        assert_eq!(
            (answer.status(), up.requests().len()),
            (200, n + 1),
            "{host}"
        );
    }
}

const FOREIGN_ORIGINS: [&str; 9] = [
    "https://evil.example",
    "http://evil.example:7337",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "https://chat.example.evil",
    "http://192.168.1.7",
    "null",
    "file://",
    "chrome-extension://abcdef",
];

// D64
#[tokio::test]
async fn a_foreign_page_is_refused_on_every_route_before_anything_happens() {
    let up = Upstream::chatting().await;
    let app = App::with(
        &up,
        "[server]\nallowed_origins = [\"https://chat.example\"]",
    )
    .await;
    for origin in FOREIGN_ORIGINS {
        for (route, request) in every_route() {
            let answer = app.ask(request.header("origin", origin)).await;
            assert_refused(
                &answer,
                403,
                "origin_forbidden",
                &format!("{route} from {origin}"),
            );
        }
    }
    assert_eq!(up.requests().len(), 0);
}

// D64
#[tokio::test]
async fn a_simple_request_without_preflight_spends_nothing() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let simple = post("/v1/chat/completions")
        .header("content-type", "text/plain")
        .header("origin", "https://evil.example")
        .header("sec-fetch-site", "cross-site")
        .body(CHAT);
    assert_refused(
        &app.ask(simple).await,
        403,
        "origin_forbidden",
        "text/plain",
    );
    // An image, a link and a form have no origin, and say where they are.
    for (route, request) in every_route() {
        let answer = app
            .ask(request.header("sec-fetch-site", "cross-site"))
            .await;
        assert_refused(&answer, 403, "origin_forbidden", route);
    }
    assert_eq!(up.requests().len(), 0);
    // A program calls as it likes, whatever the type.
    let program = post("/v1/chat/completions").header("content-type", "text/plain");
    assert_eq!(app.ask(program.body(CHAT)).await.status(), 200);
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn programs_that_speak_like_browsers_are_served() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    // As Claude Code sends it: Node's fetch says `cors` and no more.
    let claude = post("/anthropic/v1/messages")
        .header("sec-fetch-mode", "cors")
        .header("anthropic-dangerous-direct-browser-access", "true");
    assert_eq!(app.ask(claude.json(CHAT)).await.status(), 200);
    for (n, site) in ["same-origin", "same-site", "none"].iter().enumerate() {
        let request = get("/v1/models").header("sec-fetch-site", site);
        assert_eq!(app.ask(request).await.status(), 200, "{site}");
        assert_eq!(up.requests().len(), n + 2);
    }
}

#[tokio::test]
async fn pages_of_this_machine_editors_and_named_ones_may_call_and_read() {
    let up = Upstream::chatting().await;
    let settings = "[server]\nallowed_origins = [\"https://Chat.example\"]";
    let app = App::with(&up, settings).await;
    for origin in [
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "https://[::1]:8443",
        "http://app.localhost",
        "vscode-webview://1a2b3c",
        "vscode-file://vscode-app",
        "tauri://localhost",
        "app://obsidian.md",
        "capacitor://localhost",
        "https://chat.example",
    ] {
        for request in [
            get("/v1/models"),
            post("/v1/chat/completions").json(CHAT),
            post("/v1/chat/completions").json(STREAM),
            get("/nobody/v1/models"),
            get("/traygate/health"),
            preflight("x-foo"),
        ] {
            let answer = app.ask(request.header("origin", origin)).await;
            assert_may_read(&answer, origin);
        }
    }
}

/// The page of `origin` may read it, and no other.
fn assert_may_read(answer: &Answer, origin: &str) {
    let headers = &answer.head.headers;
    let allowed: Vec<&str> = headers.all("access-control-allow-origin").collect();
    assert_eq!(allowed, [origin], "{}", answer.head.start);
    assert!(headers.has("vary", "origin"), "{headers:?}");
    assert!(!headers.has("access-control-allow-credentials", "true"));
}

// D65
#[tokio::test]
async fn a_preflight_is_answered_here_with_what_it_asked_for() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let asked = "authorization,x-stainless-os,x-foo,anthropic-version";
    let request = preflight(asked)
        .header("origin", "http://localhost:3000")
        .header("access-control-request-private-network", "true");
    let answer = app.ask(request).await;
    assert_eq!((answer.status(), answer.text().as_str()), (204, ""));
    assert_may_read(&answer, "http://localhost:3000");
    assert_eq!(answer.header("access-control-allow-headers"), Some(asked));
    let methods = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";
    assert_eq!(answer.header("access-control-allow-methods"), Some(methods));
    assert_eq!(
        answer.header("access-control-allow-private-network"),
        Some("true")
    );
    assert_eq!(up.requests().len(), 0);
    // OPTIONS that is no preflight is the provider's to answer.
    assert_eq!(
        app.ask(Outgoing::new("OPTIONS", "/v1/models"))
            .await
            .status(),
        200
    );
    assert_eq!(up.requests().len(), 1);
}

// D65
#[tokio::test]
async fn the_providers_words_on_origins_are_replaced_by_ours_on_answers_streams_and_errors() {
    let up = Upstream::start(|request| {
        let reply = match request.path() {
            "/v1/files" => Reply::error(429).header("retry-after", "7"),
            _ => Reply::chat(request),
        };
        reply
            .header("Access-Control-Allow-Origin", "*")
            .header("access-control-allow-origin", "https://provider.example")
            .header("access-control-allow-credentials", "true")
            .header("access-control-expose-headers", "x-theirs")
            .header("vary", "accept-encoding")
    })
    .await;
    let app = App::before(&up).await;
    let origin = "http://localhost:3000";
    let dead = Outgoing::new("POST", "/ollama/api/chat");
    for (request, status) in [
        (post("/v1/chat/completions").json(CHAT), 200),
        (post("/v1/chat/completions").json(STREAM), 200),
        (post("/v1/files").body("x"), 429),
        (dead.json(CHAT), 200),
    ] {
        let answer = app.ask(request.clone().header("origin", origin)).await;
        assert_eq!((answer.status(), answer.end), (status, BodyEnd::Clean));
        assert_may_read(&answer, origin);
        assert!(answer.head.headers.has("vary", "accept-encoding"));
        let exposed = |name| {
            answer
                .head
                .headers
                .has("access-control-expose-headers", name)
        };
        assert!(exposed("x-traygate-call") && !exposed("x-theirs"));
        assert_eq!(exposed("retry-after"), status == 429);
        // A program is told nothing of origins, ours or theirs.
        let answer = app.ask(request).await;
        assert_eq!(answer.header("access-control-allow-origin"), None);
        assert_eq!(answer.header("access-control-allow-credentials"), None);
    }
}

#[tokio::test]
async fn a_shared_answer_names_each_readers_own_origin() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let origins = ["http://localhost:3000", "http://localhost:4000"];
    for (origin, dedup) in origins.iter().zip(["miss", "cached"]) {
        let request = post("/v1/chat/completions").json(CHAT);
        let answer = app.ask(request.header("origin", origin)).await;
        assert_eq!(answer.header("x-traygate-dedup"), Some(dedup));
        assert_may_read(&answer, origin);
    }
    let program = app.chat(CHAT).await;
    assert_eq!(program.header("x-traygate-dedup"), Some("cached"));
    assert_eq!(program.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn our_own_errors_may_be_read_by_the_page_that_called() {
    let up = Upstream::chatting().await;
    let dead = Upstream::dead_port();
    let more = format!(
        "[[provider]]\nname = \"dead\"\nkind = \"openai\"\nbase_url = \"{}\"",
        dead.url()
    );
    let app = App::with(&up, &more).await;
    let origin = "http://localhost:3000";
    for (request, status) in [
        (post("/dead/v1/chat/completions").json(CHAT), 502),
        (post("/nobody/v1/chat/completions").json(CHAT), 404),
        (
            get("/v1/responses")
                .header("connection", "upgrade")
                .header("upgrade", "websocket"),
            426,
        ),
    ] {
        let answer = app.ask(request.header("origin", origin)).await;
        assert_eq!(answer.status(), status);
        assert_may_read(&answer, origin);
    }
    app.running().core().set_mode(Mode::Refuse, None);
    let answer = app.ask(get("/v1/models").header("origin", origin)).await;
    assert_eq!(answer.status(), 503);
    assert_may_read(&answer, origin);
}

#[tokio::test]
async fn refusing_all_calls_and_serving_again() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    app.running().core().set_mode(Mode::Refuse, None);
    for path in [
        "/v1/chat/completions",
        "/v1/messages",
        "/api/chat",
        "/v1/files",
    ] {
        let answer = app.post(path, CHAT).await;
        assert_eq!(answer.status(), 503, "{path}");
        assert_eq!(answer.header("x-traygate-error"), Some("mode_refuse"));
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
    let chat = app.chat(CHAT).await.json();
    assert_eq!(chat["error"]["code"], "mode_refuse");
    let message = app.messages(CHAT).await.json();
    assert_eq!(message["type"], "error");
    assert!(message["request_id"].is_string());
    let ollama = app.post("/api/chat", CHAT).await.json();
    let told = ollama["error"].as_str().expect("Ollama's form");
    assert!(
        told.starts_with("Traygate: ") && told.contains("mode"),
        "{told}"
    );
    assert_eq!(app.ask(get("/v1/models")).await.status(), 503);
    assert_eq!(up.requests().len(), 0);
    for row in app.rows(8).await {
        assert_eq!(row.outcome.as_deref(), Some("refused"));
        assert_eq!(row.status, Some(503));
    }
    app.running().core().set_mode(Mode::Normal, None);
    assert_eq!(app.chat(CHAT).await.status(), 200);
}

// --- Off loopback -----------------------------------------------------------------------------

const TOKEN: &str = "token-of-this-door-0123";

/// An address of this machine that others can reach; no packet is sent to find it.
fn address_beyond_loopback() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

fn held(keys: &[(&str, &str, &str)]) -> Keys {
    let keys = keys.iter().map(|(provider, origin, key)| {
        let key = SecretString::from(*key);
        (Arc::from(*provider), (*origin).to_owned(), key)
    });
    Keys::holding(keys)
}

fn scratch() -> TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

/// Every credential that a request brought, in a fixed order.
fn credentials(request: &Request) -> Vec<String> {
    let names = [
        "authorization",
        "x-api-key",
        "api-key",
        "x-goog-api-key",
        "x-mine",
    ];
    let of = |name: &'static str| {
        let values = request.headers.all(name);
        values.map(move |value| format!("{name}: {value}"))
    };
    names.into_iter().flat_map(of).collect()
}

/// Where a client sends what, and what the provider then sees.
type Sent<'a> = (&'a str, Vec<(&'a str, &'a str)>, Vec<&'a str>);

/// Asks `request` at the address that others reach.
async fn from_afar(app: &App, ip: IpAddr, request: Outgoing) -> Answer {
    let addr = SocketAddr::new(ip, app.addr().port());
    let host = addr.to_string();
    Client::to(addr)
        .await
        .ask(request.header("host", &host))
        .await
}

#[tokio::test]
async fn off_loopback_a_caller_must_show_the_access_token() {
    // A machine without a network has no such address; `accept.rs` tests the rule itself.
    let Some(ip) = address_beyond_loopback() else {
        return;
    };
    let up = Upstream::chatting().await;
    let settings = App::settings(up.addr(), &format!("[server]\nhost = [\"{ip}\"]"));
    let keys = held(&[
        (ACCESS_TOKEN, "", TOKEN),
        ("openai", &up.url(), "sk-stored-key"),
    ]);
    let app = App::start_with(scratch(), &settings, keys).await;

    let wrong = [
        vec![],
        vec![("authorization", "Bearer sk-somebodys-own")],
        vec![("authorization", "Bearer token-of-this-door-012")],
        vec![("authorization", "Basic token-of-this-door-0123x")],
        vec![("x-api-key", "TOKEN-OF-THIS-DOOR-0123")],
        vec![("cookie", TOKEN)],
        vec![("x-traygate-token", TOKEN)],
    ];
    for headers in wrong {
        for (route, mut request) in every_route() {
            if matches!(
                route,
                "a preflight" | "the page" | "the admin API" | "the root"
            ) {
                continue;
            }
            for (name, value) in &headers {
                request = request.header(name, value);
            }
            let answer = from_afar(&app, ip, request).await;
            let what = format!("{route} with {headers:?}");
            assert_refused(&answer, 401, "access_denied", &what);
            assert!(
                !answer.text().contains("openai"),
                "{what}: {}",
                answer.text()
            );
        }
    }
    for path in [
        "/t/wrong/openai/v1/models",
        "/t//v1/models",
        "/t",
        "/openai/t/x",
    ] {
        let answer = from_afar(&app, ip, get(path)).await;
        assert_refused(&answer, 401, "access_denied", path);
    }
    assert_eq!(up.requests().len(), 0);

    let own = "authorization: Bearer sk-own";
    let stored = "authorization: Bearer sk-stored-key";
    let in_path = format!("/t/{TOKEN}/@aider/openai/v1/models");
    let bearer = format!("Bearer {TOKEN}");
    let table: [Sent<'_>; 9] = [
        ("/v1/models", vec![("authorization", &bearer)], vec![stored]),
        ("/v1/models", vec![("authorization", TOKEN)], vec![stored]),
        ("/v1/models", vec![("x-api-key", TOKEN)], vec![stored]),
        ("/v1/models", vec![("api-key", TOKEN)], vec![stored]),
        (&in_path, vec![], vec![stored]),
        (
            &in_path,
            vec![("authorization", "Bearer traygate")],
            vec![stored],
        ),
        // The client's own wins over the stored one, and goes without the token.
        (
            &in_path,
            vec![("authorization", "Bearer sk-own")],
            vec![own],
        ),
        (
            "/v1/models",
            vec![("authorization", "Bearer sk-own"), ("x-api-key", TOKEN)],
            vec![own],
        ),
        // Where no key is stored nothing goes out.
        ("/anthropic/v1/models", vec![("x-api-key", TOKEN)], vec![]),
    ];
    for (n, (path, headers, expected)) in table.into_iter().enumerate() {
        let mut request = get(path);
        for (name, value) in &headers {
            request = request.header(name, value);
        }
        let answer = from_afar(&app, ip, request).await;
        assert_eq!(answer.status(), 200, "{path} {headers:?}");
        let seen = &up.requests()[n].request;
        assert_eq!(credentials(seen), expected, "{path} {headers:?}");
        let raw = format!("{} {:?}", seen.target, seen.headers);
        assert!(!raw.contains(TOKEN), "{raw}");
    }
    // Refused ones too: 7 ways on 10 routes, and 4 paths.
    let rows = app.rows(7 * 10 + 4 + 9).await;
    assert_eq!(rows[0].tool, "unknown");
    assert!(rows.iter().any(|row| row.tool == "aider"));
    assert!(!format!("{rows:?}").contains(TOKEN));

    // A page's preflight carries no credential.
    let request = preflight("authorization").header("origin", "http://localhost:3000");
    assert_eq!(from_afar(&app, ip, request).await.status(), 204);
    // The address is a name for this machine only where it was called.
    let elsewhere = get("/v1/models").header("host", &ip.to_string());
    assert_refused(
        &app.ask(elsewhere).await,
        403,
        "origin_forbidden",
        "a name from afar",
    );
    // Loopback asks nobody.
    assert_eq!(app.chat(CHAT).await.status(), 200);
}

#[tokio::test]
async fn off_loopback_nobody_is_let_in_while_no_token_is_set() {
    let Some(ip) = address_beyond_loopback() else {
        return;
    };
    let up = Upstream::chatting().await;
    let settings = App::settings(up.addr(), &format!("[server]\nhost = [\"{ip}\"]"));
    let app = App::start(&settings).await;
    for value in ["", "Bearer ", "Bearer traygate", "Bearer none"] {
        let request = get("/v1/models").header("authorization", value);
        let answer = from_afar(&app, ip, request).await;
        assert_refused(&answer, 401, "access_denied", value);
        let told = answer.text();
        assert!(told.contains("traygate key set access-token"), "{told}");
    }
    assert_eq!(
        from_afar(&app, ip, get("/t//openai/v1/models"))
            .await
            .status(),
        401
    );
    assert_eq!(up.requests().len(), 0);
}

#[tokio::test]
async fn all_addresses_at_once_are_served_under_the_one_that_was_called() {
    let up = Upstream::chatting().await;
    let settings = App::settings(up.addr(), "[server]\nhost = [\"0.0.0.0\", \"::\"]");
    let app = App::start_with(scratch(), &settings, held(&[(ACCESS_TOKEN, "", TOKEN)])).await;
    assert_eq!(app.chat(CHAT).await.status(), 200);
    if let Some(ip) = address_beyond_loopback() {
        let request = get("/v1/models").header("x-api-key", TOKEN);
        assert_eq!(from_afar(&app, ip, request).await.status(), 200);
        assert_eq!(from_afar(&app, ip, get("/v1/models")).await.status(), 401);
        let addr = SocketAddr::new(ip, app.addr().port());
        let other = get("/v1/models")
            .header("host", "192.0.2.77")
            .header("x-api-key", TOKEN);
        assert_eq!(Client::to(addr).await.ask(other).await.status(), 403);
    }
}

// --- Credentials ------------------------------------------------------------------------------

/// Asks each in turn and compares what came upstream.
async fn assert_sent(app: &App, up: &Upstream, table: Vec<Sent<'_>>) {
    for (path, headers, expected) in table {
        let mut request = post(path).json(CHAT).header("x-traygate-dedup", "off");
        for (name, value) in &headers {
            request = request.header(name, value);
        }
        let before = up.requests().len();
        let answer = app.ask(request).await;
        assert_eq!(
            answer.status(),
            200,
            "{path} {headers:?}: {}",
            answer.text()
        );
        let seen = credentials(&up.requests()[before].request);
        assert_eq!(seen, expected, "{path} {headers:?}");
    }
}

/// `openai`, `anthropic` and `azure` (with a header of its own), each with this key source.
fn with_key(up: &Upstream, key: &str) -> String {
    let url = up.url();
    format!(
        "[[provider]]\nname = \"openai\"\nbase_url = \"{url}/v1\"\nkey = \"{key}\"\n\
         [[provider]]\nname = \"anthropic\"\nbase_url = \"{url}\"\nkey = \"{key}\"\n\
         [[provider]]\nname = \"azure\"\nkind = \"openai\"\nbase_url = \"{url}\"\nkey = \"{key}\"\n\
         auth_header = \"x-mine\"\nheaders = {{ x-extra = \"always\" }}\n"
    )
}

fn stored(up: &Upstream) -> Keys {
    let url = up.url();
    held(&[
        ("openai", &url, "sk-stored-openai"),
        ("anthropic", &url, "sk-stored-anthropic"),
        ("azure", &url, "stored-azure"),
    ])
}

const OPENAI: &str = "/openai/v1/chat/completions";
const ANTHROPIC: &str = "/anthropic/v1/messages";
const AZURE: &str = "/azure/v1/chat/completions";

/// Where the client has its own, and where another stands in.
fn own_or_standing_in() -> Vec<Sent<'static>> {
    let own = |name, value, seen| (OPENAI, vec![(name, value)], vec![seen]);
    let openai = vec!["authorization: Bearer sk-stored-openai"];
    let anthropic = vec!["x-api-key: sk-stored-anthropic"];
    let azure = vec!["x-mine: stored-azure"];
    vec![
        // The client's own always wins, wherever it stands.
        own(
            "authorization",
            "Bearer sk-own",
            "authorization: Bearer sk-own",
        ),
        own(
            "authorization",
            "Basic dXNlcjpwYXNz",
            "authorization: Basic dXNlcjpwYXNz",
        ),
        own("x-api-key", "sk-own", "x-api-key: sk-own"),
        own("api-key", "sk-own", "api-key: sk-own"),
        own("x-goog-api-key", "sk-own", "x-goog-api-key: sk-own"),
        (
            ANTHROPIC,
            vec![("authorization", "Bearer sk-ant-oat01-login")],
            vec!["authorization: Bearer sk-ant-oat01-login"],
        ),
        (AZURE, vec![("x-mine", "own")], vec!["x-mine: own"]),
        ("/openai/v1/chat/completions?key=own", vec![], vec![]),
        // Another stands in where it sends none or a placeholder, in the provider's scheme.
        (OPENAI, vec![], openai.clone()),
        (ANTHROPIC, vec![], anthropic.clone()),
        (AZURE, vec![], azure.clone()),
        (
            OPENAI,
            vec![("authorization", "Bearer traygate")],
            openai.clone(),
        ),
        (
            OPENAI,
            vec![("authorization", "bearer NONE")],
            openai.clone(),
        ),
        (OPENAI, vec![("authorization", "Bearer x")], openai.clone()),
        (OPENAI, vec![("authorization", "Bearer ")], openai.clone()),
        (OPENAI, vec![("x-api-key", "ollama")], openai.clone()),
        (
            OPENAI,
            vec![("authorization", "Bearer local"), ("api-key", "x")],
            openai,
        ),
        (
            ANTHROPIC,
            vec![("authorization", "Bearer sk-local")],
            anthropic.clone(),
        ),
        (ANTHROPIC, vec![("x-api-key", "traygate")], anthropic),
        (AZURE, vec![("authorization", "Bearer none")], azure),
    ]
}

#[tokio::test]
async fn auto_the_clients_own_wins_and_the_stored_one_stands_in() {
    let up = Upstream::chatting().await;
    let app = App::start_with(scratch(), &with_key(&up, "auto"), stored(&up)).await;
    assert_sent(&app, &up, own_or_standing_in()).await;
    let extra = up.requests().into_iter().map(|seen| seen.request);
    for request in extra {
        let azure = request.headers.all("x-mine").next().is_some();
        assert_eq!(request.header("x-extra").is_some(), azure);
    }
}

#[tokio::test]
async fn auto_without_a_stored_key_passes_on_what_came() {
    let up = Upstream::chatting().await;
    let app = App::start(&with_key(&up, "auto")).await;
    let table = vec![
        (OPENAI, vec![], vec![]),
        (
            OPENAI,
            vec![("authorization", "Bearer traygate")],
            vec!["authorization: Bearer traygate"],
        ),
        (
            OPENAI,
            vec![("x-api-key", "sk-own")],
            vec!["x-api-key: sk-own"],
        ),
    ];
    assert_sent(&app, &up, table).await;
}

#[tokio::test]
async fn keyring_always_the_stored_one_and_none_of_the_clients() {
    let up = Upstream::chatting().await;
    let app = App::start_with(scratch(), &with_key(&up, "keyring"), stored(&up)).await;
    let openai = vec!["authorization: Bearer sk-stored-openai"];
    let all = [
        "authorization: Bearer sk-own",
        "x-api-key: sk-own",
        "api-key: sk-own",
        "x-goog-api-key: sk-own",
        "x-mine: own",
    ];
    let all: Vec<_> = all
        .iter()
        .filter_map(|line| line.split_once(": "))
        .collect();
    let table = vec![
        (OPENAI, vec![], openai.clone()),
        (OPENAI, all[..4].to_vec(), openai.clone()),
        ("/openai/v1/chat/completions?key=own&a=1", vec![], openai),
        (
            ANTHROPIC,
            all[..4].to_vec(),
            vec!["x-api-key: sk-stored-anthropic"],
        ),
        (AZURE, all, vec!["x-mine: stored-azure"]),
    ];
    assert_sent(&app, &up, table).await;
    assert_eq!(up.call(2).request.target, "/v1/chat/completions?a=1");
}

#[tokio::test]
async fn keyring_without_a_key_says_how_to_store_one() {
    let up = Upstream::chatting().await;
    let app = App::start(&with_key(&up, "keyring")).await;
    for (path, name) in [
        (OPENAI, "openai"),
        (ANTHROPIC, "anthropic"),
        (AZURE, "azure"),
    ] {
        let request = post(path)
            .json(CHAT)
            .header("authorization", "Bearer sk-own");
        let answer = app.ask(request).await;
        assert_eq!(answer.status(), 401);
        assert_eq!(answer.header("x-traygate-error"), Some("access_denied"));
        let told = answer.text();
        assert!(told.contains(&format!("traygate key set {name}")), "{told}");
        assert!(!told.contains("sk-own"), "{told}");
    }
    assert_eq!(up.requests().len(), 0);
    let rows = app.rows(3).await;
    assert!(
        rows.iter()
            .all(|row| row.outcome.as_deref() == Some("refused"))
    );
}

#[tokio::test]
async fn pass_the_clients_or_nothing_and_none_nothing() {
    let up = Upstream::chatting().await;
    let app = App::start_with(scratch(), &with_key(&up, "pass"), stored(&up)).await;
    let placeholder = ("authorization", "Bearer traygate");
    let table = vec![
        (OPENAI, vec![], vec![]),
        (
            OPENAI,
            vec![placeholder],
            vec!["authorization: Bearer traygate"],
        ),
        (
            ANTHROPIC,
            vec![("x-api-key", "sk-own")],
            vec!["x-api-key: sk-own"],
        ),
    ];
    assert_sent(&app, &up, table).await;

    let app = App::start_with(scratch(), &with_key(&up, "none"), stored(&up)).await;
    let table = vec![
        (OPENAI, vec![], vec![]),
        (
            OPENAI,
            vec![("authorization", "Bearer sk-own"), ("api-key", "own")],
            vec![],
        ),
        ("/openai/v1/chat/completions?api_key=own", vec![], vec![]),
        (AZURE, vec![("x-mine", "own")], vec![]),
    ];
    assert_sent(&app, &up, table).await;
    assert_eq!(
        up.requests().last().expect("one").request.header("x-extra"),
        Some("always")
    );
    assert!(
        up.requests()
            .iter()
            .all(|seen| !seen.request.target.contains("own"))
    );
}

#[tokio::test]
async fn a_login_is_never_replaced_and_is_marked_as_a_plan() {
    let up = Upstream::chatting().await;
    let app = App::start_with(scratch(), &with_key(&up, "auto"), stored(&up)).await;
    for (path, login, billing) in [
        (ANTHROPIC, "Bearer sk-ant-oat01-abc", "plan"),
        (OPENAI, "Bearer eyJhbGciOi.eyJzdWIi.c2ln", "plan"),
        (OPENAI, "Bearer sk-own", "metered"),
    ] {
        let request = post(path).json(CHAT).header("authorization", login);
        app.ask(request).await;
        let seen = up.requests().pop().expect("a request").request;
        assert_eq!(credentials(&seen), [format!("authorization: {login}")]);
        let rows = app.rows(up.requests().len()).await;
        assert_eq!(rows[0].billing, billing, "{login}");
    }
}

#[tokio::test]
async fn other_placeholders_are_a_setting() {
    let up = Upstream::chatting().await;
    let settings = "[server]\nplaceholder_keys = [\"dummy\"]\n".to_owned() + &with_key(&up, "auto");
    let app = App::start_with(scratch(), &settings, stored(&up)).await;
    let stored = vec!["authorization: Bearer sk-stored-openai"];
    let table = vec![
        (OPENAI, vec![("authorization", "Bearer dummy")], stored),
        (
            OPENAI,
            vec![("authorization", "Bearer traygate")],
            vec!["authorization: Bearer traygate"],
        ),
    ];
    assert_sent(&app, &up, table).await;
}

#[cfg(unix)]
mod canary {
    //! Keys are planted wherever one can stand, calls end in every way there is, and then all
    //! that was written, printed or answered is searched for them.

    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::support::client::post_json;
    use crate::support::process::{Home, Signal};
    use crate::support::upstream::Gate;

    /// In all of them, and in nothing else.
    const CANARY: &str = "canary";

    /// Where a provider repeats every credential that it was sent.
    fn echo(request: &Request) -> String {
        let said = credentials(request).join(" and ");
        let query = request
            .target
            .split_once('?')
            .map_or("", |(_, query)| query);
        format!("Incorrect API key provided: {said} {query}")
    }

    fn provider(request: &Request) -> Reply {
        let said = echo(request);
        let error = serde_json::json!({"error": {"message": said, "type": said}}).to_string();
        match request.json()["model"].as_str().unwrap_or_default() {
            "refused" => Reply::json(401, error),
            "failing" => Reply::json(500, error),
            "page" => Reply::of(502, "text/html", format!("<title>{said}</title>")),
            "long" => {
                let long = format!("{}{said}", "x".repeat(1024 - 30));
                let long = serde_json::json!({"error": {"message": long}});
                Reply::json(400, long.to_string())
            }
            "event" => Reply::sse([chat_events(1)[0].clone(), format!("data: {error}\n\n")]),
            "broken" => Reply::sse([chat_events(1)[0].clone()]).then_close(),
            "none" => Reply::close(),
            "hang" => Reply::hang(),
            _ => Reply::chat(request),
        }
    }

    fn files_in(folder: &Path, found: &mut Vec<(String, Vec<u8>)>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                files_in(&path, found);
            } else if path.is_file() {
                found.push((path.display().to_string(), fs::read(&path).expect("a file")));
            }
        }
    }

    // D66
    #[tokio::test]
    async fn no_key_is_ever_written_printed_or_answered() {
        let up = Upstream::start(provider).await;
        let dead = Upstream::dead_port();
        let gate = Gate::new();
        let proxy = Upstream::start({
            let gate = gate.clone();
            move |_| Reply::close().held_by(&gate)
        })
        .await;
        gate.open();
        let url = up.url();
        let mut home = Home::new();
        home.settings(&format!(
            "[limits]\nconnect_secs = 2\nunstreamed_timeout_secs = 0.3\n\
             [dedup]\nlinger_secs = 0\n[breaker]\nfailures = 1000\nfailure_rate = 0\n\
             [[provider]]\nname = \"openai\"\nbase_url = \"{url}/v1\"\n\
             [[provider]]\nname = \"anthropic\"\nbase_url = \"{url}\"\n\
             headers = {{ x-extra-key = \"extra-canary-00000008\" }}\n\
             [[provider]]\nname = \"azure\"\nkind = \"openai\"\nbase_url = \"{url}\"\n\
             key = \"env:CANARY_KEY\"\nauth_header = \"x-mine\"\n\
             [[provider]]\nname = \"dead\"\nkind = \"openai\"\nbase_url = \"{}\"\n\
             [[provider]]\nname = \"abroad\"\nkind = \"openai\"\nbase_url = \"http://203.0.113.7\"\n",
            dead.url()
        ));
        home.set("CANARY_KEY", "env-canary-00000001");
        home.set(
            "http_proxy",
            &format!("http://user:canary-password-2@{}", proxy.addr()),
        );
        let filter = "trace,hyper=trace,hyper::proto=trace,hyper_util::client=trace,h2=trace,\
                      reqwest=trace,zbus=trace,rustls=trace";
        let mut said = String::new();
        for log in ["trace", filter] {
            let traygate = home.serve(&["--log", log]).await;
            let models = [
                "fine", "refused", "failing", "page", "long", "event", "broken", "none", "hang",
            ];
            let providers = ["openai", "anthropic", "azure", "dead", "abroad"];
            let carriers = [
                ("authorization", "Bearer bearer-canary-00000003"),
                ("x-api-key", "x-api-canary-00000004"),
                ("api-key", "api-canary-00000005"),
                ("cookie", "session=cookie-canary-00000006"),
                ("x-mine", ""),
            ];
            for model in models {
                for provider in providers {
                    for (name, value) in carriers {
                        let path = format!(
                            "/{provider}/v1/chat/completions?key=query-canary-%2F00007&api_key=b-canary-00000009"
                        );
                        let body = format!(
                            r#"{{"model":"{model}","stream":{}}}"#,
                            matches!(model, "event" | "broken")
                        );
                        let path = if name == "x-mine" {
                            path.split_once('?').expect("a query").0.to_owned()
                        } else {
                            path
                        };
                        let request = post(&path).json(body).header(name, value);
                        let mut client = Client::to(traygate.addr()).await;
                        client.send(request).await;
                        let head = client.head().await;
                        let answer = client.rest(head).await;
                        // What the provider itself says is the client's, and goes as it is.
                        if answer.header("x-traygate-error").is_some() {
                            said += &answer.text();
                        }
                        said += &format!("{:?}", answer.head.headers);
                    }
                }
            }
            // What is no call at all, and a name that is a key.
            for path in [
                "/sk-canary-10/v1/models?key=canary-11",
                "/traygate/api/x?token=canary-12",
            ] {
                let path = path.replace("sk-canary-10", "nobody");
                said += &Client::to(traygate.addr())
                    .await
                    .ask(get(&path))
                    .await
                    .text();
            }
            let unknown = post_json(traygate.addr(), "/v1/files?key=canary-13-0000", "x").await;
            said += &format!("{:?}", unknown.head.headers);
            let rows = models.len() * providers.len() * carriers.len();
            home.ended_rows(rows).await;
            for format in ["table", "csv", "json"] {
                let calls = ["calls", "--limit", "9999", "--format", format];
                said += &home.run(&calls).await.said();
            }
            traygate.signal(Signal::TERM);
            let ended = traygate.ended().await;
            assert_eq!(ended.code, Some(0));
            said += &ended.said();
        }
        said += &home.run(&["check"]).await.said();
        said += &home.run(&["key", "list"]).await.said();
        assert!(
            proxy.requests().len() > 9,
            "calls abroad went through the proxy"
        );
        let mut refused = home.rows();
        refused.retain(|row| row.model.as_deref() == Some("refused"));
        assert!(refused.iter().any(|row| {
            let error = row.error.as_deref().unwrap_or_default();
            error.contains("Incorrect API key provided: authorization: Bearer [key]")
        }));

        let mut files = Vec::new();
        files_in(&home.data_dir(), &mut files);
        assert!(files.len() > 1, "the record and its lock");
        for (name, bytes) in files {
            let found = memchr::memmem::find(&bytes, CANARY.as_bytes());
            let around = found.map(|at| {
                let range = at.saturating_sub(200)..(at + 100).min(bytes.len());
                String::from_utf8_lossy(&bytes[range]).into_owned()
            });
            assert_eq!(around, None, "in {name}");
        }
        let found: Vec<&str> = said.lines().filter(|line| line.contains(CANARY)).collect();
        assert!(found.is_empty(), "{found:#?}");
    }
}
