//! Providers as they are on the internet: behind TLS, over HTTP/2 where they offer it, many streams
//! on one connection.

use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;

use tempfile::{NamedTempFile, TempPath};

use super::support::app::App;
use super::support::client::{BodyEnd, Client, get, post, post_json};
#[cfg(unix)]
use super::support::process::{Home, Process};
#[cfg(unix)]
use super::support::tls::Tunnels;
use super::support::tls::{
    Answer, Authority, BOTH, BareH2, BareRequest, Come, Fate, Frames, INTERNAL_ERROR, Log,
    NO_ERROR, Protocol, REFUSED_STREAM, Request, SecureUpstream, self_signed,
    self_signed_authority,
};
use super::support::upstream::{Gate, chat_answer, chat_events};
use super::support::{Span as _, must};

const CHAT: &str = "/v1/chat/completions";
const STREAM: &str =
    r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
/// One failed call must not close off the next, and none waits for another.
const WIDE_OPEN: &str = "[limits]\nconcurrency = 400\n[breaker]\nfailures = 10000\nfailure_rate = 0\n[dedup]\nlinger_secs = 0\n";

/// Settings with `openai` at this address.
fn at(base_url: &str, ca_file: Option<&Path>) -> String {
    let ca_file = ca_file.map_or(String::new(), |path| format!("ca_file = {path:?}\n"));
    format!("{WIDE_OPEN}[[provider]]\nname = \"openai\"\nbase_url = \"{base_url}/v1\"\n{ca_file}")
}

fn pem_file(pem: &str) -> TempPath {
    let file = NamedTempFile::new().expect("a scratch file");
    std::fs::write(file.path(), pem).expect("a scratch file");
    file.into_temp_path()
}

/// Traygate before a provider whose `ca_file` it can read for as long as it runs.
struct Before {
    app: App,
    _ca_file: TempPath,
}

impl Deref for Before {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Before {
    async fn start(port: u16, ca_file: TempPath) -> Before {
        let base_url = format!("https://localhost:{port}");
        Before {
            app: App::start(&at(&base_url, Some(&ca_file))).await,
            _ca_file: ca_file,
        }
    }
}

/// A provider for `localhost` that has been asked once, and Traygate before it.
async fn before_localhost(
    offers: &[Protocol],
    script: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> (SecureUpstream, Before) {
    let authority = Authority::new();
    let up = SecureUpstream::start(&authority.vouch(&["localhost"]), offers, script).await;
    let app = Before::start(up.port(), pem_file(&authority.pem())).await;
    assert_eq!(app.ask(get("/v1/models")).await.status(), 200);
    (up, app)
}

/// The same before a provider that writes its frames by hand.
async fn before_bare(
    script: impl Fn(Come, &BareRequest, usize) -> Frames + Send + Sync + 'static,
) -> (BareH2, Before) {
    let authority = Authority::new();
    let up = BareH2::start(&authority.vouch(&["localhost"]), script).await;
    let app = Before::start(up.port(), pem_file(&authority.pem())).await;
    assert_eq!(app.chat(&numbered(0)).await.text(), GOOD);
    (up, app)
}

/// A provider elsewhere, as far as Traygate can tell: connections to one on this machine are let go
/// after four seconds, which a test that counts them may need.
#[cfg(unix)]
struct Elsewhere {
    up: SecureUpstream,
    tunnels: Tunnels,
    traygate: Process,
    _home: Home,
    _ca_file: TempPath,
}

#[cfg(unix)]
impl Elsewhere {
    const NAME: &str = "provider.test";

    async fn start(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Elsewhere {
        let authority = Authority::new();
        let up = SecureUpstream::start(&authority.vouch(&[Self::NAME]), &BOTH, script).await;
        let tunnels = Tunnels::to(up.addr()).await;
        let ca_file = pem_file(&authority.pem());
        let mut home = Home::new();
        home.set("HTTPS_PROXY", &tunnels.url());
        home.settings(&at(&format!("https://{}", Self::NAME), Some(&ca_file)));
        Elsewhere {
            traygate: home.serve(&[]).await,
            up,
            tunnels,
            _home: home,
            _ca_file: ca_file,
        }
    }

    fn addr(&self) -> SocketAddr {
        self.traygate.addr()
    }
}

/// A call that can be told from others by its body.
fn numbered(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[],"n":"<{n}>"}}"#)
}

/// What the providers here answer where nothing goes wrong.
const GOOD: &str = r#"{"choices":[{"finish_reason":"stop","message":{"content":"good"}}]}"#;

fn a_stream() -> Answer {
    chat_events(3).iter().fold(Answer::sse(), Answer::then)
}

fn chat(request: &Request) -> Answer {
    let body = request.body.as_deref().unwrap_or_default();
    if memchr::memmem::find(body, b"\"stream\":true").is_some() {
        a_stream()
    } else {
        Answer::json(chat_answer("Hello from upstream"))
    }
}

// --- Certificates -----------------------------------------------------------------------------------

#[tokio::test]
async fn an_authority_of_ones_own_is_trusted_over_http_2_and_http_1() {
    for (offers, spoken) in [
        (&BOTH[..], Some(Protocol::H2)),
        (&[Protocol::H2], Some(Protocol::H2)),
        (&[Protocol::Http1], Some(Protocol::Http1)),
        // A server that knows nothing of the choice.
        (&[], None),
    ] {
        let (up, app) = before_localhost(offers, chat).await;
        let answer = app.chat(r#"{"model":"m","messages":[]}"#).await;
        assert_eq!(answer.text(), chat_answer("Hello from upstream"));
        let answer = app.chat(STREAM).await;
        assert_eq!(
            (answer.text(), answer.end),
            (chat_events(3).concat(), BodyEnd::Clean)
        );
        // Large ones too, in either direction.
        let large = format!(
            r#"{{"model":"m","messages":[],"pad":"{}"}}"#,
            "x".repeat(3 << 20)
        );
        assert_eq!(app.chat(&large).await.status(), 200);
        let log = up.log();
        assert_eq!(log.requests[3].body.as_deref(), Some(large.as_bytes()));
        for connection in log.used() {
            assert_eq!(connection.protocol, spoken, "{offers:?}");
        }
    }
}

// D69
#[tokio::test]
async fn a_certificate_that_cannot_be_trusted_is_refused_in_words() {
    let (own, other) = (Authority::new(), Authority::named("Another"));
    // One that has made itself a new key since.
    let (own_pem, other_pem, old_pem) = (own.pem(), other.pem(), Authority::new().pem());
    let (alone, its_pem) = self_signed(&["localhost"]);
    let (authority_alone, authoritys_pem) = self_signed_authority(&["localhost"]);
    let for_localhost = own.vouch(&["localhost"]);
    let elsewhere = own.vouch(&["elsewhere.test"]);
    let long_ago = own.vouch_in_the_past(&["localhost"]);
    let unknown: &[&str] = &["UnknownIssuer", "ca_file"];
    for (identity, pem, told) in [
        (&for_localhost, None, unknown),
        (&for_localhost, Some(&other_pem), unknown),
        (&for_localhost, Some(&old_pem), &["BadSignature", "ca_file"]),
        (&alone, None, unknown),
        (
            &elsewhere,
            Some(&own_pem),
            &["\"localhost\"", "elsewhere.test"],
        ),
        (&long_ago, Some(&own_pem), &["expired"]),
        (&authority_alone, Some(&authoritys_pem), &["CA:FALSE"]),
        // One that vouches for itself can be named as it is.
        (&alone, Some(&its_pem), &[]),
    ] {
        let up = SecureUpstream::start(identity, &BOTH, chat).await;
        let ca_file = pem.map(|pem| pem_file(pem));
        let base_url = format!("https://localhost:{}", up.port());
        let app = App::start(&at(&base_url, ca_file.as_deref())).await;
        let answer = app.chat(&numbered(0)).await;
        if told.is_empty() {
            assert_eq!(answer.status(), 200, "{}", answer.text());
            continue;
        }
        assert_eq!(answer.status(), 502);
        assert_eq!(
            answer.header("x-traygate-error"),
            Some("upstream_unreachable")
        );
        let told_as = answer.json()["error"]["message"]
            .to_string()
            .replace('\\', "");
        for word in told {
            assert!(told_as.contains(word), "{word}: {told_as}");
        }
        let is_about_it = told.contains(&"ca_file");
        assert_eq!(told_as.contains("ca_file"), is_about_it, "{told_as}");
        assert_eq!(up.log().requests.len(), 0, "nothing was sent");
        let row = &app.rows(1).await[0];
        assert_eq!(row.outcome.as_deref(), Some("upstream_error"));
    }
}

#[tokio::test]
async fn a_ca_file_that_cannot_be_used_is_named() {
    let empty = pem_file("no certificate\n");
    let broken = pem_file("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let missing = empty.with_file_name("no-such-file.pem");
    for path in [&*empty, &*broken, &*missing] {
        let app = App::start(&at("https://localhost:1", Some(path))).await;
        let answer = app.chat(&numbered(0)).await;
        assert_eq!(
            answer.header("x-traygate-error"),
            Some("upstream_unreachable")
        );
        let told = answer.text();
        for word in ["ca_file", &*path.to_string_lossy()] {
            assert!(told.contains(word), "{word}: {told}");
        }
    }
}

// --- Names ------------------------------------------------------------------------------------------

// D22
#[tokio::test]
async fn the_provider_is_called_by_its_own_name_and_never_by_traygates() {
    let authority = Authority::new();
    let ca_file = pem_file(&authority.pem());
    let names = ["localhost", "provider.localhost", "127.0.0.1"];
    for offers in [&BOTH[..], &[Protocol::Http1]] {
        let up = SecureUpstream::start(&authority.vouch(&names), offers, chat).await;
        for name in names {
            let own = format!("{name}:{}", up.port());
            let app = App::start(&at(&format!("https://{own}"), Some(&ca_file))).await;
            let traygates = [
                app.addr().to_string(),
                format!("localhost:{}", app.addr().port()),
                "localhost".to_owned(),
            ];
            for host in &traygates {
                let before = up.log().requests.len();
                let call = App::chat_request(&numbered(before)).header("host", host);
                assert_eq!(app.ask(call).await.status(), 200);
                let log = up.log();
                let request = &log.requests[before];
                assert_eq!(request.authority(), Some(&*own));
                // An address is no name to ask for (RFC 6066, 3).
                let asked = Some(name).filter(|name| *name != "127.0.0.1");
                let connection = &log.connections[request.connection];
                assert_eq!(connection.name.as_deref(), asked);
                let is_h2 = connection.protocol == Some(Protocol::H2);
                assert_eq!(request.headers.contains_key("host"), !is_h2);
                for (header, value) in &request.headers {
                    let value = String::from_utf8_lossy(value.as_bytes());
                    let port = app.addr().port().to_string();
                    assert!(!value.contains(&port), "{header}: {value}");
                }
            }
        }
    }
}

/// Connection headers are an error over HTTP/2 (RFC 9113, 8.2.2).
// D21
#[tokio::test]
async fn headers_of_one_hop_do_not_break_http_2() {
    let (up, app) = before_localhost(&[Protocol::H2], |_| {
        Answer::json(GOOD).header("x-request-id", "7")
    })
    .await;
    let call = App::chat_request(&numbered(1))
        .header("connection", "keep-alive, X-Hop")
        .header("x-hop", "1")
        .header("keep-alive", "timeout=5")
        .header("te", "gzip")
        .header("proxy-connection", "keep-alive")
        .header("expect", "100-continue")
        .header("cookie", "a=b")
        .header("x-app", "stays");
    let answer = app.ask(call).await;
    assert_eq!((answer.status(), answer.text()), (200, GOOD.to_owned()));
    assert_eq!(answer.header("x-request-id"), Some("7"));
    // Chunked here, in frames there.
    let mut client = app.client().await;
    client.send(post("/v1/files").chunked_upload()).await;
    client.write_chunk(b"half, ").await.expect("taken");
    client.write_chunk(b"and half").await.expect("taken");
    client.write_last_chunk().await.expect("taken");
    assert_eq!(client.read_to_end().await.text(), GOOD);
    let log = up.log();
    let (call, upload) = (&log.requests[1], &log.requests[2]);
    assert_eq!(
        call.headers.get("x-app").map(|value| value.as_bytes()),
        Some(&b"stays"[..])
    );
    for name in ["x-hop", "te", "expect", "cookie", "transfer-encoding"] {
        for request in [call, upload] {
            assert!(!request.headers.contains_key(name), "{name}");
        }
    }
    assert_eq!(upload.body.as_deref(), Some(&b"half, and half"[..]));
}

/// A WebSocket begins on HTTP/1.1, whatever else the provider speaks.
#[tokio::test]
async fn an_upgrade_is_asked_for_over_http_1() {
    let (up, app) = before_localhost(&BOTH, |_| Answer::json(GOOD)).await;
    let upgrade = get("/v1/realtime")
        .header("connection", "upgrade")
        .header("upgrade", "websocket");
    assert_eq!(app.ask(upgrade).await.text(), GOOD);
    let log = up.log();
    let request = &log.requests[1];
    assert_eq!(request.headers["upgrade"], "websocket");
    assert_eq!(
        log.connections[request.connection].protocol,
        Some(Protocol::Http1)
    );
}

// --- Through a proxy ----------------------------------------------------------------------------------

// D68
#[cfg(unix)]
#[tokio::test]
async fn a_provider_behind_the_systems_proxy_is_the_one_that_is_spoken_to() {
    let elsewhere = Elsewhere::start(chat).await;
    let mut client = Client::to(elsewhere.addr()).await;
    for n in 0..2 {
        let answer = client.ask(post(CHAT).json(numbered(n))).await;
        assert_eq!(answer.text(), chat_answer("Hello from upstream"));
    }
    assert_eq!(
        elsewhere.tunnels.asked(),
        ["CONNECT provider.test:443 HTTP/1.1"]
    );
    let log = elsewhere.up.log();
    for request in &log.requests {
        assert_eq!(
            request.authority(),
            Some("provider.test"),
            "no port where it is the usual one"
        );
        assert!(!request.headers.contains_key("host"));
    }
    let connection = &log.connections[0];
    assert_eq!(connection.name.as_deref(), Some("provider.test"));
    assert_eq!(connection.protocol, Some(Protocol::H2));
}

// --- Streams ------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_stream_passes_event_by_event_and_byte_by_byte() {
    let events = [
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"odd\" :  1e3}\n\n",
        ": a comment\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\u{1f980}\"}}],\"x\":1,\"x\":2}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: [DONE]\n\n",
    ];
    for offers in [&BOTH[..], &[Protocol::Http1]] {
        let gate = Gate::new();
        let script = gate.clone();
        let (up, app) = before_localhost(offers, move |request| {
            if request.method == "GET" {
                return Answer::json("{}");
            }
            let held = |answer: Answer, event| answer.then(event).then_wait_for(&script);
            events.iter().fold(Answer::sse(), held)
        })
        .await;
        let body = "{ \"model\":\"m\",\"messages\":[ ],\"stream\":true,\"seed\":9007199254740993,\"x\":1,\"x\":2,\
                    \"stream_options\":{\"include_usage\":true}}\n";
        let mut client = app.client().await;
        client.send(post(CHAT).json(body)).await;
        assert_eq!(client.head().await.status, 200);
        for event in events {
            // The next one is not sent before this one was seen here.
            let piece = client.piece().await.expect("an event");
            assert_eq!(piece.bytes, event);
            gate.reached_by(1).await;
            gate.pass(1);
        }
        assert!(client.piece().await.is_none());
        assert_eq!(client.end(), Some(BodyEnd::Clean));
        assert_eq!(up.log().requests[1].body.as_deref(), Some(body.as_bytes()));
    }
}

/// Begins so many streams at `addr`, each of them with its first event come, and none at its end.
async fn streams_under_way(addr: SocketAddr, name: &str, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for n in 0..count {
        let mut client = Client::to(addr).await;
        let body = format!(r#"{{"model":"m","stream":true,"n":"{name}-{n}"}}"#);
        client.send(post(CHAT).json(body)).await;
        clients.push(client);
    }
    for client in &mut clients {
        assert_eq!(client.head().await.status, 200);
        client.read_until("w0").await;
    }
    clients
}

async fn read_to_their_ends(clients: Vec<Client>) {
    for mut client in clients {
        client.read_until("[DONE]").await;
        assert!(client.piece().await.is_none());
        assert_eq!(client.end(), Some(BodyEnd::Clean));
    }
}

/// A stream that stands still after its first event until the gate lets it go on.
fn held_stream(gate: &Gate) -> Answer {
    let events = chat_events(1);
    let begun = Answer::sse().then(&events[0]).then_wait_for(gate);
    events[1..].iter().fold(begun, Answer::then)
}

/// Servers allow about a hundred streams on a connection; the hundred-and-first would wait for
/// another to end.
#[tokio::test]
async fn any_number_of_streams_begins_at_once() {
    for count in [100, 200] {
        let gate = Gate::new();
        let script = gate.clone();
        let (up, app) = before_localhost(&BOTH, move |request| match &*request.method {
            "GET" => Answer::json("{}"),
            _ => held_stream(&script),
        })
        .await;
        let clients = streams_under_way(app.addr(), "one", count).await;
        let log = up.log();
        assert_eq!(log.in_flight(), count);
        // Far enough from what a server allows that a few more would not wait either.
        let used = log.used();
        assert!(used.iter().all(|one| one.most_in_flight <= 64), "{used:?}");
        gate.open();
        read_to_their_ends(clients).await;
        let log = up.until("all to be over", |log| log.in_flight() == 0).await;
        let answered = |request: &Request| request.fate == Fate::Answered;
        assert!(log.requests.iter().all(answered));
    }
}

/// A client that finds its provider cold opens a connection for each call until one of them turns
/// out to speak HTTP/2. From then on that one is enough.
#[cfg(unix)]
#[tokio::test]
async fn connections_that_many_streams_needed_carry_the_next_ones_too() {
    let gate = Gate::new();
    let script = gate.clone();
    let elsewhere = Elsewhere::start(move |_| held_stream(&script)).await;
    let (up, addr) = (&elsewhere.up, elsewhere.addr());
    let taken =
        |log: &Log| -> Vec<usize> { log.connections.iter().map(|one| one.requests).collect() };
    let mut before = Vec::new();
    for round in ["cold", "warm", "warm again"] {
        let clients = streams_under_way(addr, round, 130).await;
        gate.pass(130);
        read_to_their_ends(clients).await;
        let log = up.until("all to be over", |log| log.in_flight() == 0).await;
        let now = taken(&log);
        if round != "cold" {
            before.resize(now.len(), 0);
            let mut more: Vec<usize> = now
                .iter()
                .zip(&before)
                .map(|(now, then)| now - then)
                .collect();
            let is_new = more
                .iter()
                .zip(&before)
                .any(|(more, then)| *more > 0 && *then == 0);
            assert!(!is_new, "{round}: {before:?}, then {now:?}");
            more.retain(|more| *more > 0);
            more.sort_unstable();
            assert_eq!(more, [2, 64, 64], "{round}");
        }
        before = now;
    }
    // One after the other they need no second one.
    gate.pass(5);
    for n in 0..5 {
        let answer = post_json(addr, CHAT, numbered(n)).await;
        assert_eq!(answer.end, BodyEnd::Clean);
    }
    let now = taken(&up.log());
    before.resize(now.len(), 0);
    let more = now.iter().zip(&before).map(|(now, then)| now - then);
    let more: Vec<usize> = more.filter(|more| *more > 0).collect();
    assert_eq!(more, [5]);
}

/// The streams of a connection share its window: what one reader leaves there must not take it
/// from the others.
#[cfg(unix)]
#[tokio::test]
async fn clients_that_do_not_read_hold_up_nobody_else_on_their_connection() {
    const SLOW: usize = 24;
    let part = "x".repeat(64 << 10);
    let elsewhere = Elsewhere::start(move |request| {
        if request.uri.path().ends_with("/content") {
            let answer = Answer::of("application/octet-stream");
            return (0..256).fold(answer, |answer, _| answer.then(&part));
        }
        chat(request)
    })
    .await;
    let (up, addr) = (&elsewhere.up, elsewhere.addr());
    let mut slow = Vec::new();
    for n in 0..SLOW {
        let mut client = Client::reading_little(addr, 4096).await;
        client.send(get(&format!("/v1/files/{n}/content"))).await;
        assert_eq!(client.head().await.status, 200);
        slow.push(client);
    }
    // Each is sent as much as if it were alone: what may be read ahead, and what its window takes.
    let each_has_its_share = |log: &Log| {
        let sent = log
            .requests
            .iter()
            .filter(|request| request.sent >= 3 << 19);
        sent.count() >= SLOW
    };
    up.until("every stream to get its share", each_has_its_share)
        .await;
    for n in 0..20 {
        let answer = must(
            "another call on that connection",
            post_json(addr, CHAT, numbered(n)),
        )
        .await;
        assert_eq!(answer.text(), chat_answer("Hello from upstream"));
        tokio::time::sleep(10.ms()).await;
    }
    let log = up.log();
    assert_eq!(log.used().len(), 1, "all on one connection: {log:?}");
    assert_eq!(log.in_flight(), SLOW, "they are still there");
    // They read on and get all of it.
    let mut one = slow.swap_remove(0);
    let mut read = 0;
    while let Some(piece) = one.piece().await {
        read += piece.bytes.len();
    }
    assert_eq!((read, one.end()), (16 << 20, Some(BodyEnd::Clean)));
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_own_stream_with_it_and_no_other() {
    let gate = Gate::new();
    let script = gate.clone();
    let (up, app) = before_localhost(&BOTH, move |request| match &*request.method {
        "GET" => Answer::json("{}"),
        _ => held_stream(&script),
    })
    .await;
    let mut clients = streams_under_way(app.addr(), "one", 3).await;
    clients.remove(1).reset();
    let log = up
        .until("one stream to be cancelled", |log| log.in_flight() == 2)
        .await;
    let fates: Vec<Fate> = log.requests.iter().map(|request| request.fate).collect();
    assert_eq!(
        fates[1..],
        [Fate::UnderWay, Fate::Abandoned, Fate::UnderWay]
    );
    gate.open();
    read_to_their_ends(clients).await;
    let rows = app.rows(4).await;
    let left = rows
        .iter()
        .filter(|row| row.outcome.as_deref() == Some("client_left"));
    assert_eq!(left.count(), 1);
}

#[tokio::test]
async fn a_stream_that_is_reset_half_way_is_not_taken_for_whole() {
    let gate = Gate::new();
    let script = gate.clone();
    let (up, app) = before_localhost(&BOTH, move |request| {
        if request.method == "GET" {
            return Answer::json("{}");
        }
        let begun = Answer::sse().then(&chat_events(1)[0]);
        begun.then_wait_for(&script).then_break()
    })
    .await;
    let mut client = app.client().await;
    client.send(post(CHAT).json(STREAM)).await;
    assert_eq!(client.head().await.status, 200);
    client.read_until("w0").await;
    gate.open();
    client.read_until("upstream_broke").await;
    while client.piece().await.is_some() {}
    assert_ne!(client.end(), Some(BodyEnd::Clean));
    assert_eq!(up.log().requests.len(), 2, "sent once");
    let row = &app.rows(2).await[0];
    assert_eq!(row.outcome.as_deref(), Some("broken_stream"));
    // The connection is none the worse for it.
    assert_eq!(app.ask(get("/v1/models")).await.status(), 200);
}

// --- Sent again, or not -------------------------------------------------------------------------------

#[tokio::test]
async fn a_refused_stream_is_sent_once_more_and_its_client_never_knows() {
    let (up, app) = before_bare(|come, request, number| {
        let frames = Frames::default();
        match (come, number) {
            (Come::Begun, _) => frames,
            // Not processed, says the server (RFC 9113, 8.7).
            (Come::Whole, 1 | 3) => frames.reset(request.stream, REFUSED_STREAM),
            (Come::Whole, _) => frames.json(request.stream, GOOD),
        }
    })
    .await;
    for n in 1..=3 {
        let answer = app.chat(&numbered(n)).await;
        assert_eq!((answer.status(), answer.text()), (200, GOOD.to_owned()));
    }
    let log = up.log();
    let times: Vec<usize> = (0..=3).map(|n| log.times(&format!("<{n}>"))).collect();
    assert_eq!(times, [1, 2, 2, 1]);
    let rows = app.rows(4).await;
    assert!(
        rows.iter()
            .all(|row| row.outcome.as_deref() == Some("completed"))
    );
    assert_eq!(rows.len(), 4, "one row a call, however often it was sent");
}

#[tokio::test]
async fn a_server_that_refuses_everything_is_not_asked_for_ever() {
    let (up, app) = before_bare(|come, request, number| match (come, number) {
        (Come::Begun, _) => Frames::default(),
        (Come::Whole, 0) => Frames::default().json(request.stream, GOOD),
        (Come::Whole, _) => Frames::default().reset(request.stream, REFUSED_STREAM),
    })
    .await;
    let answer = app.chat(&numbered(1)).await;
    assert_eq!(answer.status(), 502);
    assert_eq!(
        answer.header("x-traygate-error"),
        Some("upstream_unreachable")
    );
    let times = up.log().times("<1>");
    assert!((2..=3).contains(&times), "{times} times");
}

/// What a server says that is being replaced: it takes no new streams, and finishes what it has.
#[tokio::test]
async fn a_call_that_a_leaving_server_did_not_take_goes_to_the_next_connection() {
    let (up, app) = before_bare(|come, request, number| {
        let frames = Frames::default();
        let events = chat_events(1);
        match (come, number) {
            (Come::Begun, _) => frames,
            (Come::Whole, 1) => frames
                .head(request.stream, "text/event-stream")
                .data(request.stream, &events[0]),
            (Come::Whole, 2) => {
                let first = request.stream - 2;
                frames
                    .go_away(first, NO_ERROR)
                    .last_data(first, events[1..].concat())
            }
            (Come::Whole, _) => frames.json(request.stream, GOOD),
        }
    })
    .await;
    let mut streaming = app.client().await;
    streaming.send(post(CHAT).json(STREAM)).await;
    assert_eq!(streaming.head().await.status, 200);
    streaming.read_until("w0").await;
    let answer = app.chat(&numbered(2)).await;
    assert_eq!((answer.status(), answer.text()), (200, GOOD.to_owned()));
    // The one that was under way has come to its end in peace.
    streaming.read_until("[DONE]").await;
    assert!(streaming.piece().await.is_none());
    assert_eq!(streaming.end(), Some(BodyEnd::Clean));
    let log = up.log();
    assert_eq!(log.times("<2>"), 2);
    let connections: Vec<usize> = log
        .requests
        .iter()
        .map(|request| request.connection)
        .collect();
    assert_eq!(connections, [0, 0, 0, 1]);
    assert_eq!(app.chat(&numbered(3)).await.status(), 200);
    assert_eq!(up.log().connections, 2);
    assert_eq!(app.rows(4).await.len(), 4);
}

#[tokio::test]
async fn what_the_provider_may_have_begun_is_never_sent_twice() {
    type Ending = fn(Frames, u32) -> Frames;
    let endings: [(&str, Ending); 4] = [
        ("an internal error", |frames, stream| {
            frames.reset(stream, INTERNAL_ERROR)
        }),
        ("a goodbye that counts it as taken", |frames, stream| {
            frames.go_away(stream, NO_ERROR).then_close()
        }),
        ("a goodbye in trouble", |frames, stream| {
            frames.go_away(stream, INTERNAL_ERROR).then_close()
        }),
        ("a close", |frames, _| frames.then_close()),
    ];
    for (name, ending) in endings {
        let (up, app) = before_bare(move |come, request, number| match (come, number % 2) {
            (Come::Begun, _) => Frames::default(),
            (Come::Whole, 0) => Frames::default().json(request.stream, GOOD),
            (Come::Whole, _) => ending(Frames::default(), request.stream),
        })
        .await;
        // Every second one is answered, on a new connection where the old one was closed.
        for n in 1..=5 {
            let answer = app.chat(&numbered(n)).await;
            let expected = if n % 2 == 0 { 200 } else { 502 };
            assert_eq!(
                answer.status(),
                expected,
                "{name}, call {n}: {}",
                answer.text()
            );
            if expected == 502 {
                assert_eq!(
                    answer.header("x-traygate-error"),
                    Some("upstream_unreachable")
                );
            }
        }
        let log = up.log();
        for n in 0..=5 {
            assert_eq!(log.times(&format!("<{n}>")), 1, "{name}, call {n}");
        }
        let rows = app.rows(6).await;
        let failed = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("upstream_error"));
        assert_eq!(failed.count(), 3, "{name}");
    }
}

/// What has gone by cannot be had again.
#[tokio::test]
async fn an_upload_that_was_begun_is_not_sent_again_even_where_it_was_refused() {
    let (up, app) = before_bare(|come, request, number| match (come, number) {
        (Come::Begun, 1..) => Frames::default().reset(request.stream, REFUSED_STREAM),
        (Come::Whole, 0) => Frames::default().json(request.stream, GOOD),
        _ => Frames::default(),
    })
    .await;
    for (n, path) in ["/v1/files", "/v1/audio/transcriptions"]
        .into_iter()
        .enumerate()
    {
        let mut client = app.client().await;
        client.send(post(path).chunked_upload()).await;
        client
            .write_chunk(format!("<file {n}>").as_bytes())
            .await
            .expect("taken");
        let head = client.head().await;
        assert_eq!(head.status, 502, "{path}");
        assert_eq!(
            head.headers.get("x-traygate-error"),
            Some("upstream_unreachable")
        );
        assert_eq!(up.log().times(&format!("<file {n}>")), 1, "{path}");
    }
    assert_eq!(up.log().requests.len(), 3);
}
