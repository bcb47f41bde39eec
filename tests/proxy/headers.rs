//! Headers: what concerns the two ends passes as it came, what concerns one hop or only the local
//! side does not.

use std::collections::HashSet;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::support::app::App;
use super::support::client::{Answer, BodyEnd, Outgoing, get, post};
use super::support::must;
use super::support::upstream::{Gate, Reply, Request, Upstream, chat_answer, chat_events};

const NO_BREAKER: &str = "[breaker]\nfailures = 1000\nfailure_rate = 0\n";

/// A route of each kind: merged, pooled only, free.
const KINDS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/audio/speech",
    "/v1/messages/count_tokens",
    "/@tool/ollama/api/chat",
];

/// What `name: value` lines of this name came to, upstream.
fn values<'a>(request: &'a Request, name: &str) -> Vec<&'a str> {
    request.headers.all(name).collect()
}

/// The names in a list of header lines, in lower case and sorted.
fn names(lines: &[String]) -> Vec<String> {
    let mut names: Vec<String> = lines
        .iter()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, _)| name.to_ascii_lowercase())
        .collect();
    names.sort_unstable();
    names
}

/// Content that is not the same twice.
fn body(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[],"n":{n}}}"#)
}

// --- To the provider --------------------------------------------------------------------------

// D21 (c)
#[tokio::test]
async fn hop_by_hop_headers_of_the_client_stay_here() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in KINDS {
        let request = post(path)
            .header("Connection", "keep-alive, X-Foo")
            .header("connection", "x-bar,Upgrade, HTTP2-Settings")
            .header("X-Foo", "1")
            .header("X-Bar", "2")
            .header("Keep-Alive", "timeout=5")
            .header("TE", "trailers")
            .header("Trailer", "x-sum")
            .header("Upgrade", "h2c")
            .header("HTTP2-Settings", "AAMAAABkAAQAAP__")
            .header("Proxy-Authorization", "Basic c2VjcmV0")
            .header("Proxy-Connection", "keep-alive")
            .header("X-Kept", "3")
            .json(body(0));
        assert_eq!(app.ask(request).await.status(), 200, "{path}");
        let request = up.requests().pop().expect("a request").request;
        for name in [
            "connection",
            "x-foo",
            "x-bar",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
            "http2-settings",
            "proxy-authorization",
            "proxy-connection",
            "transfer-encoding",
        ] {
            assert_eq!(values(&request, name), [] as [&str; 0], "{name} on {path}");
        }
        assert_eq!(values(&request, "x-kept"), ["3"], "{path}");
    }
}

// D22, D37
#[tokio::test]
async fn what_is_local_never_reaches_a_provider() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in KINDS {
        let request = post(path)
            .header("Host", "localhost:7337")
            .header("Origin", "http://localhost:3001")
            .header("Referer", "http://localhost:3001/chat")
            .header("Cookie", "session=secret")
            .header("Cookie", "more=secret")
            .header("X-Forwarded-For", "192.0.2.7")
            .header("X-Forwarded-Host", "box.lan")
            .header("X-Forwarded-Proto", "http")
            .header("Forwarded", "for=192.0.2.7")
            .header("Via", "1.1 local")
            .header("X-Real-IP", "192.0.2.7")
            .header("Sec-Fetch-Mode", "cors")
            .header("Sec-Fetch-Site", "same-origin")
            .header("Sec-CH-UA", "\"Chromium\"")
            .header("X-Traygate-Tag", "my-tool")
            .header("X-Traygate-Dedup", "off")
            .header("X-Traygate-Anything", "1")
            .header("anthropic-dangerous-direct-browser-access", "true")
            .json(body(1));
        assert_eq!(app.ask(request).await.status(), 200, "{path}");
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(
            values(&request, "host"),
            [up.addr().to_string()],
            "the provider's own name and port, on {path}"
        );
        // A guard of the provider's that the client itself lifts.
        assert_eq!(
            values(&request, "anthropic-dangerous-direct-browser-access"),
            ["true"]
        );
        let strangers: Vec<String> = names(request.headers.lines())
            .into_iter()
            .filter(|name| {
                !matches!(
                    name.as_str(),
                    "host"
                        | "accept"
                        | "content-type"
                        | "content-length"
                        | "anthropic-dangerous-direct-browser-access"
                )
            })
            .collect();
        assert_eq!(strangers, [] as [&str; 0], "{path}");
    }
}

#[tokio::test]
async fn nothing_is_invented() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in KINDS {
        let request = post(path)
            .header("accept", "application/json")
            .json(body(2));
        app.ask(request).await;
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(
            names(request.headers.lines()),
            ["accept", "content-length", "content-type", "host"],
            "{path}"
        );
    }
    app.ask(get("/v1/models").header("accept", "*/*")).await;
    let request = up.requests().pop().expect("a request").request;
    assert_eq!(names(request.headers.lines()), ["accept", "host"]);
    assert_eq!(request.body_len, 0);
}

// D25, D29
#[tokio::test]
async fn the_clients_own_headers_pass_verbatim_once_each() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let own = [
        ("anthropic-version", "2023-06-01"),
        (
            "anthropic-beta",
            "context-1m-2025-08-07, fine-grained-tool-streaming-2025-05-14",
        ),
        ("anthropic-beta", "oauth-2025-04-20"),
        ("x-app", "cli"),
        ("x-foo", "first"),
        ("X-Foo", "second,  third"),
        ("x-foo", ""),
        ("user-agent", "claude-cli/2.0.77 (external, cli)"),
        ("openai-organization", "org-1"),
        ("OpenAI-Project", "proj-1"),
        ("openai-beta", "responses=v1"),
        ("idempotency-key", "stainless-node-retry-1"),
        ("x-stainless-retry-count", "2"),
        ("x-stainless-os", "Linux"),
        ("accept", "text/event-stream"),
        ("accept-encoding", "gzip, br"),
        ("accept-language", "*"),
        ("authorization", "Bearer sk-own"),
        ("x-api-key", "own"),
        ("x-latin", "caf\u{e9} \u{65e5}"),
        ("range", "bytes=0-9"),
    ];
    for path in KINDS {
        let request = own
            .iter()
            .fold(post(path), |request, (name, value)| {
                request.header(name, value)
            })
            .json(body(3));
        app.ask(request).await;
        let request = up.requests().pop().expect("a request").request;
        for name in own.iter().map(|(name, _)| name.to_ascii_lowercase()) {
            let sent: Vec<String> = own
                .iter()
                .filter(|(own, _)| own.eq_ignore_ascii_case(&name))
                // The wire is read as Latin-1, byte by byte.
                .map(|(_, value)| value.bytes().map(char::from).collect())
                .collect();
            assert_eq!(values(&request, &name), sent, "{name} on {path}");
        }
    }
    // What the client leaves out stays out: the provider's own answer says what is missing.
    app.messages(&body(4)).await;
    let request = up.requests().pop().expect("a request").request;
    assert_eq!(values(&request, "anthropic-version"), [] as [&str; 0]);
}

// D23
#[tokio::test]
async fn names_are_title_cased_upstream_and_read_in_any_case() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let request = post("/v1/chat/completions")
        .header("AUTHORIZATION", "Bearer sk-own")
        .header("x-API-key", "own")
        .header("CONTENT-TYPE", "application/json")
        .header("x-TRAYGATE-tag", "shouting")
        .body(body(5));
    app.ask(request).await;
    let request = up.call(0).request;
    let lines = request.headers.lines();
    for line in [
        "Authorization: Bearer sk-own",
        "X-Api-Key: own",
        "Content-Type: application/json",
    ] {
        assert!(lines.iter().any(|sent| sent == line), "{line}: {lines:?}");
    }
    assert!(
        lines.iter().any(|line| line.starts_with("Host: ")),
        "{lines:?}"
    );
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("Content-Length: ")),
        "{lines:?}"
    );
    assert_eq!(app.rows(1).await[0].tool, "shouting");
}

// D21 (a)
#[tokio::test]
async fn a_request_is_counted_or_chunked_and_never_both() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    for (path, framing) in [
        // Read whole, so its length is known.
        ("/v1/chat/completions", "content-length"),
        ("/v1/audio/transcriptions", "transfer-encoding"),
        ("/v1/messages/count_tokens", "transfer-encoding"),
    ] {
        client.send(post(path).chunked_upload()).await;
        for part in [&b"{\"model\":"[..], b"\"m\"}"] {
            client.write_chunk(part).await.expect("taken");
        }
        client.write_last_chunk().await.expect("taken");
        assert_eq!(client.read_to_end().await.status(), 200, "{path}");
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(request.body, r#"{"model":"m"}"#, "{path}");
        let framings: Vec<String> = names(request.headers.lines())
            .into_iter()
            .filter(|name| name == "content-length" || name == "transfer-encoding")
            .collect();
        assert_eq!(framings, [framing], "{path}");

        client.ask(post(path).json(body(6))).await;
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(
            values(&request, "content-length"),
            [body(6).len().to_string()]
        );
        assert_eq!(
            values(&request, "transfer-encoding"),
            [] as [&str; 0],
            "{path}"
        );
    }
}

/// What one server takes for a body, another must not take for the next request.
#[tokio::test]
async fn a_request_that_is_both_counted_and_chunked_smuggles_nothing() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in KINDS {
        let before = up.requests().len();
        let mut client = app.client().await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n\
                 2\r\n{{}}\r\n0\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
            ))
            .await;
        let first = client.read_to_end().await;
        let requests = up.requests();
        for seen in &requests[before..] {
            let request = &seen.request;
            let counted = !values(request, "content-length").is_empty();
            let chunked = !values(request, "transfer-encoding").is_empty();
            assert!(!(counted && chunked), "{:?}", request.headers);
            if request.target != "/v1/smuggled" {
                assert_eq!(request.body, "{}", "read as chunks on {path}");
            }
        }
        assert!([200, 400].contains(&first.status()), "{}", first.status());
    }
}

#[tokio::test]
async fn a_post_without_a_body_says_so() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in [
        "/v1/chat/completions",
        "/v1/responses/r/cancel",
        "/v1/unknown",
    ] {
        app.ask(post(path)).await;
        let request = up.requests().pop().expect("a request").request;
        // Without a length some servers answer 411.
        assert_eq!(values(&request, "content-length"), ["0"], "{path}");
        assert_eq!(
            values(&request, "transfer-encoding"),
            [] as [&str; 0],
            "{path}"
        );
    }
}

// --- To the client ----------------------------------------------------------------------------

/// Headers of a provider's answer that are for the client.
const FOR_THE_CLIENT: [(&str, &str); 24] = [
    ("x-ratelimit-limit-requests", "10000"),
    ("x-ratelimit-remaining-requests", "9999"),
    ("x-ratelimit-reset-tokens", "6m0s"),
    ("anthropic-ratelimit-unified-status", "allowed"),
    ("anthropic-ratelimit-tokens-remaining", "7"),
    ("request-id", "req_011"),
    ("x-request-id", "req-7"),
    ("openai-processing-ms", "12"),
    ("openai-organization", "org-1"),
    ("cf-ray", "abc-FRA"),
    ("retry-after", "7"),
    ("retry-after-ms", "6500"),
    ("x-should-retry", "false"),
    ("set-cookie", "a=1; Path=/"),
    ("set-cookie", "b=2; HttpOnly"),
    ("x-repeated", "first"),
    ("x-repeated", "second"),
    ("x-repeated", "first"),
    ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ("server", "scripted"),
    ("www-authenticate", "Bearer realm=\"x\""),
    ("etag", "W/\"1\""),
    ("x-empty", ""),
    ("cache-control", "no-cache, must-revalidate"),
];

fn dressed(reply: Reply) -> Reply {
    FOR_THE_CLIENT
        .iter()
        .fold(reply, |reply, (name, value)| reply.header(name, value))
        .header("connection", "keep-alive, X-Hop")
        .header("x-hop", "1")
        .header("keep-alive", "timeout=5")
        .header("proxy-authenticate", "Basic")
        .header("proxy-authentication-info", "x")
        .header("proxy-connection", "keep-alive")
        .header("trailer", "x-sum")
        .header("te", "x")
        .header("upgrade", "h2c")
}

// D28, D38
#[tokio::test]
async fn every_answers_headers_pass_save_those_of_the_hop() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, NO_BREAKER).await;
    type Handler = fn(&Request) -> Reply;
    let replies: [(&str, Handler); 6] = [
        ("JSON", |_| Reply::json(200, chat_answer("x"))),
        ("a stream", |_| Reply::sse(chat_events(1))),
        ("a file", |_| {
            Reply::of(200, "audio/mpeg", [0, 255, 1]).chunked()
        }),
        ("429", |_| Reply::error(429)),
        ("529", |_| Reply::error(529)),
        ("503 in a stream's place", |_| Reply::error(503).chunked()),
    ];
    let mut n = 10;
    for (what, reply) in replies {
        up.set_handler(move |request| dressed(reply(request)));
        for path in KINDS {
            n += 1;
            let answer = app.ask(post(path).json(body(n))).await;
            assert_eq!(answer.end, BodyEnd::Clean);
            for (name, _) in FOR_THE_CLIENT {
                let sent: Vec<&str> = FOR_THE_CLIENT
                    .iter()
                    .filter(|(sent, _)| *sent == name)
                    .map(|(_, value)| *value)
                    .collect();
                let came: Vec<&str> = answer.head.headers.all(name).collect();
                assert_eq!(came, sent, "{name} of {what} on {path}");
            }
            for name in [
                "connection",
                "x-hop",
                "keep-alive",
                "proxy-authenticate",
                "proxy-authentication-info",
                "proxy-connection",
                "trailer",
                "te",
                "upgrade",
            ] {
                assert_eq!(answer.header(name), None, "{name} of {what} on {path}");
            }
            let counted = answer.header("content-length").is_some();
            let chunked = answer.header("transfer-encoding").is_some();
            assert!(counted != chunked, "{what} on {path}: {:?}", answer.head);
        }
    }
}

// D38
#[tokio::test]
async fn refusals_pass_with_their_own_words_on_when_to_come_again() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, NO_BREAKER).await;
    let table = [
        (429, "retry-after", "7"),
        (429, "retry-after-ms", "6500"),
        (429, "x-should-retry", "false"),
        (529, "x-should-retry", "true"),
        (503, "retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"),
    ];
    let mut n = 200;
    for (status, name, value) in table {
        up.set_handler(move |_| Reply::error(status).header(name, value));
        for stream in [false, true] {
            n += 1;
            let request =
                format!(r#"{{"model":"m","stream":{stream},"stream_options":{{}},"n":{n}}}"#);
            let before = up.calls();
            let answer = app.chat(&request).await;
            assert_eq!(answer.status(), status);
            assert_eq!(answer.head.headers.all(name).collect::<Vec<_>>(), [value]);
            for other in ["retry-after", "retry-after-ms", "x-should-retry"] {
                assert!(other == name || answer.header(other).is_none(), "{other}");
            }
            assert_eq!(up.calls(), before + 1, "no retry of its own");
        }
    }
}

// D21 (b)
#[tokio::test]
async fn an_answer_that_says_it_is_both_counted_and_chunked_is_passed_as_one() {
    let up = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\
             transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        )
    })
    .await;
    let app = App::before(&up).await;
    let answer = app.ask(post("/v1/unknown").json("{}")).await;
    let counted = answer.header("content-length").is_some();
    let chunked = answer.header("transfer-encoding").is_some();
    assert!(!(counted && chunked), "{:?}", answer.head);
    assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
    assert_eq!(answer.text(), "{}");
}

#[tokio::test]
async fn an_answer_cut_before_its_promised_length_is_cut_here_too() {
    let up = Upstream::start(|_| {
        Reply::json(200, "{\"half\":")
            .header("content-length", "1000")
            .then_close()
    })
    .await;
    let app = App::before(&up).await;
    for path in [
        "/v1/chat/completions",
        "/v1/unknown",
        "/v1/messages/count_tokens",
    ] {
        let answer = app.ask(post(path).json("{}")).await;
        assert_eq!(answer.text(), "{\"half\":", "{path}");
        assert_ne!(answer.end, BodyEnd::Clean, "{path}");
        assert_eq!(answer.header("content-length"), Some("1000"));
    }
    let rows = app.rows(3).await;
    assert!(
        rows.iter()
            .all(|row| row.outcome.as_deref() == Some("broken_stream")),
        "{rows:#?}"
    );
}

#[tokio::test]
async fn every_answer_says_which_call_it_was_how_and_by_whom() {
    // A provider that is a Traygate itself must not speak for this one.
    let up = Upstream::start(|request| {
        Reply::chat(request)
            .header("x-traygate-call", "ANOTHER")
            .header("x-traygate-dedup", "cached")
            .header("x-traygate-provider", "another")
    })
    .await;
    let app = App::before(&up).await;
    let stream = r#"{"model":"m","stream":true,"stream_options":{}}"#;
    let answers: [(Answer, Option<&str>, Option<&str>); 9] = [
        (app.chat(&body(1)).await, Some("miss"), Some("openai")),
        (app.chat(&body(1)).await, Some("cached"), Some("openai")),
        (app.chat(stream).await, Some("miss"), Some("openai")),
        (
            app.messages(&body(1)).await,
            Some("miss"),
            Some("anthropic"),
        ),
        (
            app.post("/api/show", "{}").await,
            Some("off"),
            Some("ollama"),
        ),
        (
            app.post("/v1/unknown", "{}").await,
            Some("off"),
            Some("openai"),
        ),
        (
            app.ask(get("/anthropic/v1/models")).await,
            Some("off"),
            Some("anthropic"),
        ),
        (app.post("/nobody/v1/x", "{}").await, None, None),
        (
            app.ask(App::chat_request("x").header("content-encoding", "gzip"))
                .await,
            None,
            None,
        ),
    ];
    let rows = app.rows(9).await;
    let mut ids = HashSet::new();
    for (answer, dedup, provider) in &answers {
        let of = |name: &str| answer.head.headers.all(name).collect::<Vec<_>>();
        let call = of("x-traygate-call");
        assert_eq!(call.len(), 1, "{:?}", answer.head);
        assert_eq!(call[0].len(), 26, "a ULID: {call:?}");
        assert!(ids.insert(call[0].to_owned()), "used twice: {call:?}");
        let row = rows.iter().find(|row| row.id == call[0]).expect("its row");
        assert_eq!(row.status, Some(answer.status()));
        if let (Some(dedup), Some(provider)) = (dedup, provider) {
            assert_eq!(of("x-traygate-dedup"), [*dedup]);
            assert_eq!(of("x-traygate-provider"), [*provider]);
            assert_eq!((&*row.dedup, &*row.provider), (*dedup, *provider));
        }
    }
    // Errors of Traygate's own, too.
    let addr = up.stop().await;
    let refused = app.chat(&body(2)).await;
    assert_eq!(refused.status(), 502, "{addr} is closed");
    assert_eq!(refused.header("x-traygate-dedup"), Some("miss"));
    assert_eq!(refused.header("x-traygate-provider"), Some("openai"));
    let row = &app.rows(10).await[0];
    assert_eq!(refused.header("x-traygate-call"), Some(&*row.id));
}

#[tokio::test]
async fn a_follower_gets_the_leaders_headers_save_those_of_one_exchange() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| dressed(Reply::json(200, chat_answer("x")).held_by(&gate))
    })
    .await;
    let app = App::before(&up).await;
    let mut leader = app.client().await;
    leader.send(App::chat_request(&body(1))).await;
    gate.reached_by(1).await;
    let mut follower = app.client().await;
    follower.send(App::chat_request(&body(1))).await;
    // The follower's row tells that it has joined.
    let joined = async {
        while !app.rows_now().iter().any(|row| row.dedup == "joined") {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    must("the follower to join", joined).await;
    gate.open();
    let led = leader.read_to_end().await;
    let followed = follower.read_to_end().await;
    assert_eq!(followed.header("x-traygate-dedup"), Some("joined"));
    for shared in ["openai-organization", "x-request-id", "x-repeated", "etag"] {
        let of = |answer: &Answer| -> Vec<String> {
            answer.head.headers.all(shared).map(str::to_owned).collect()
        };
        assert_eq!(of(&followed), of(&led), "{shared}");
    }
    for own in [
        "set-cookie",
        "x-ratelimit-remaining-requests",
        "anthropic-ratelimit-tokens-remaining",
    ] {
        assert!(led.header(own).is_some(), "{own}");
        assert_eq!(followed.header(own), None, "{own}");
    }
    assert_ne!(followed.header("date"), led.header("date"));
}

// --- Old and odd clients ------------------------------------------------------------------------

#[tokio::test]
async fn a_client_that_asks_before_it_uploads_is_told_to_go_on() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in KINDS {
        let request = post(path)
            .header("Expect", "100-continue")
            .header("connection", "close")
            .upload_of(13);
        let mut client = TcpStream::connect(app.addr()).await.expect("a connection");
        client.write_all(&Vec::from(request)).await.expect("taken");
        // Sends only what it was asked to.
        let mut told = Vec::new();
        while !told.ends_with(b"\r\n\r\n") {
            must("to be told", client.read_buf(&mut told))
                .await
                .expect("an answer");
        }
        assert!(told.starts_with(b"HTTP/1.1 100"), "{path}: {told:?}");
        client.write_all(br#"{"model":"m"}"#).await.expect("taken");
        let mut answer = Vec::new();
        must("the answer", client.read_to_end(&mut answer))
            .await
            .expect("an answer");
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{path}: {answer:?}");
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(request.body, r#"{"model":"m"}"#);
        assert_eq!(values(&request, "expect"), [] as [&str; 0], "{path}");
    }
    // One that is refused is refused before it uploads anything.
    let mut client = app.client().await;
    let request = post("/nobody/v1/files")
        .header("expect", "100-continue")
        .upload_of(1 << 40);
    client.send(request).await;
    let head = client.head().await;
    assert_eq!((head.status, head.interim.len()), (404, 0));
}

#[tokio::test]
async fn clients_of_http_1_0_are_answered_without_chunks() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let ask = |stream: bool, keep: &str| {
        let body = format!(r#"{{"model":"m","stream":{stream},"stream_options":{{}}}}"#);
        format!(
            "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n{keep}Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for (stream, expected) in [
        (false, chat_answer("Hello from upstream")),
        (true, chat_events(3).concat()),
    ] {
        let mut client = app.client().await;
        client.send(ask(stream, "")).await;
        let answer = client.read_to_end().await;
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
        assert_eq!(answer.header("transfer-encoding"), None);
        assert_eq!(answer.text(), expected);
        assert_eq!(client.closed().await, BodyEnd::Clean);
    }
    // Kept alive where it asks for it and the length is known.
    let mut client = app.client().await;
    for _ in 0..2 {
        client.send(ask(false, "Connection: keep-alive\r\n")).await;
        let answer = client.read_to_end().await;
        assert_eq!(answer.text(), chat_answer("Hello from upstream"));
    }
    // HTTP/1.1 upstream all the same.
    assert!(
        up.requests()
            .iter()
            .all(|seen| seen.request.header("host").is_some())
    );
}

#[tokio::test]
async fn a_client_that_closes_after_each_call_does_not_close_the_providers_connection() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for n in 0..4 {
        let request = App::chat_request(&body(n)).header("connection", "close");
        let mut client = app.client().await;
        let answer = client.ask(request).await;
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(client.closed().await, BodyEnd::Clean);
    }
    assert_eq!((up.calls(), up.connections()), (4, 1));
}

#[tokio::test]
async fn a_client_may_speak_http_2() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let client = reqwest::Client::builder()
        .no_proxy()
        .http2_prior_knowledge()
        .tls_certs_only([])
        .build()
        .expect("a client");
    for stream in [false, true] {
        let body = format!(
            r#"{{"model":"m","stream":{stream},"stream_options":{{"include_usage":false}}}}"#
        );
        let answer = client
            .post(format!("http://{}/v1/chat/completions", app.addr()))
            .header("content-type", "application/json")
            .body(body.clone())
            .send()
            .await
            .expect("an answer");
        assert_eq!(answer.version(), http::Version::HTTP_2);
        assert_eq!(answer.headers()["x-traygate-provider"], "openai");
        let text = answer.text().await.expect("a whole body");
        let expected = if stream {
            chat_events(3).concat()
        } else {
            chat_answer("Hello from upstream")
        };
        assert_eq!(text, expected);
        let request = up.requests().pop().expect("a request").request;
        assert_eq!(values(&request, "host"), [up.addr().to_string()]);
        assert_eq!(request.body, body);
    }
}

#[tokio::test]
async fn several_requests_on_one_connection_do_not_mix() {
    let up = Upstream::start(|request| Reply::json(200, &request.body)).await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    let mut pipelined = Vec::new();
    for n in 0..3 {
        pipelined.extend(Vec::<u8>::from(App::chat_request(&body(n))));
    }
    client.send(pipelined).await;
    for n in 0..3 {
        assert_eq!(client.read_to_end().await.text(), body(n));
    }
    for n in 0..3 {
        let answer = client
            .ask(Outgoing::new("PUT", "/v1/x").body(body(n)))
            .await;
        assert_eq!(answer.text(), body(n));
    }
}
