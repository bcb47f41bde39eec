//! The breaker through the door: what opens it, what a refused caller is told, how a provider is
//! let in again.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinSet;
use traygate::call::pool::Pool;
use traygate::clock::Clock;

use crate::support::app::App;
use crate::support::client::{Answer, BodyEnd, Client, Outgoing, fetch, post};
use crate::support::upstream::{DeafPort, Gate, Reply, Request, Upstream, chat_answer};
use crate::support::{LIMIT, Span, must, now};

/// The two dialects that most tools speak, each with a provider of its own before the same
/// upstream (see [`App::with`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    pub const BOTH: [Dialect; 2] = [Dialect::OpenAi, Dialect::Anthropic];

    pub fn provider(self) -> &'static str {
        match self {
            Dialect::OpenAi => "openai",
            Dialect::Anthropic => "anthropic",
        }
    }

    pub fn path(self) -> &'static str {
        match self {
            Dialect::OpenAi => "/v1/chat/completions",
            Dialect::Anthropic => "/v1/messages",
        }
    }

    /// A call unlike every other, so that nothing is merged; its answer comes in one piece.
    pub fn call(self) -> Outgoing {
        self.call_of("m", false)
    }

    /// A call unlike every other that asks for a stream.
    pub fn stream(self) -> Outgoing {
        self.call_of("m", true)
    }

    pub fn call_of(self, model: &str, stream: bool) -> Outgoing {
        let prompt = unique();
        post(self.path()).json(format!(
            r#"{{"model":"{model}","max_tokens":9,"stream":{stream},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
        ))
    }

    /// An event with content.
    pub fn event(self) -> &'static str {
        match self {
            Dialect::OpenAi => {
                "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"},\"finish_reason\":null}]}\n\n"
            }
            Dialect::Anthropic => {
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello\"}}\n\n"
            }
        }
    }

    /// The events that end a stream.
    pub fn last_events(self) -> &'static str {
        match self {
            Dialect::OpenAi => {
                "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"
            }
            Dialect::Anthropic => {
                "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
            }
        }
    }

    /// An upstream's error in the middle of a stream.
    pub fn error_event(self) -> &'static str {
        match self {
            Dialect::OpenAi => "data: {\"error\":{\"message\":\"died\",\"code\":502}}\n\n",
            Dialect::Anthropic => {
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"died\"}}\n\n"
            }
        }
    }

    /// A whole answer in one piece.
    pub fn answer(self) -> String {
        match self {
            Dialect::OpenAi => chat_answer("Hello"),
            Dialect::Anthropic => {
                r#"{"type":"message","role":"assistant","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn"}"#.to_owned()
            }
        }
    }

    /// A good answer, as a stream if that was asked for.
    pub fn good(self, request: &Request) -> Reply {
        if request.wants_stream() {
            Reply::sse([self.event(), self.last_events()])
        } else {
            Reply::json(200, self.answer())
        }
    }

    /// The code and the message of Traygate's own error, which must have the dialect's shape.
    pub fn error_of(self, answer: &Answer) -> (String, String) {
        let body = answer.json();
        let error = &body["error"];
        match self {
            Dialect::OpenAi => {
                assert!(
                    error["type"].is_string() && error["param"].is_null(),
                    "{body}"
                );
            }
            Dialect::Anthropic => {
                assert_eq!(body["type"], "error", "{body}");
                assert!(error["type"].is_string(), "{body}");
                let id = body["request_id"].as_str();
                assert!(id.is_some(), "{body}");
            }
        }
        let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("x-traygate-error"), Some(&*text("code")));
        assert!(text("message").starts_with("Traygate: "), "{body}");
        (text("code"), text("message"))
    }
}

/// A number that no other call of this run has.
pub fn unique() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What [`App::ask`] does, for a task of its own.
pub fn asking(app: &App, request: Outgoing) -> impl Future<Output = Answer> + Send + 'static {
    let addr = app.addr();
    async move { Client::to(addr).await.ask(request).await }
}

/// The pool of the dialect's provider.
pub fn pool_of(app: &App, dialect: Dialect) -> Pool {
    let world = app.running().core().world();
    let provider = world.provider(dialect.provider()).expect("shipped");
    provider.state.pool.clone()
}

/// Waits for what nothing announces.
pub async fn until(what: &str, so: impl Fn() -> bool) {
    let happens = async {
        while !so() {
            tokio::time::sleep(5.ms()).await;
        }
    };
    must(what, happens).await;
}

/// Would the provider's breaker refuse a call now? Claims nothing.
fn refuses(app: &App, dialect: Dialect) -> bool {
    refuses_model(app, dialect, None)
}

fn refuses_model(app: &App, dialect: Dialect, model: Option<&str>) -> bool {
    let world = app.running().core().world();
    let provider = world.provider(dialect.provider()).expect("shipped");
    let model = model.map(Into::into);
    let refused = provider.state.refusal(model.as_ref(), Clock::Boot.now());
    refused.is_some()
}

/// What a call that the breaker refuses is told: everything but the message is the same in each
/// dialect. Returns `retry-after`, in seconds.
fn assert_refused(dialect: Dialect, answer: &Answer) -> u64 {
    assert_eq!(answer.status(), 503, "{}", answer.text());
    let (code, _) = dialect.error_of(answer);
    assert_eq!(code, "breaker_open");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert_eq!(
        answer.header("x-traygate-provider"),
        Some(dialect.provider())
    );
    assert_eq!(answer.end, BodyEnd::Clean);
    let after = answer.header("retry-after").expect("retry-after");
    after.parse().expect("whole seconds")
}

// --- What opens it ------------------------------------------------------------------------------

/// One way to fail, and what its callers see.
struct Fault {
    name: &'static str,
    limits: &'static str,
    streams: bool,
    reply: fn(Dialect) -> Reply,
    status: u16,
    outcome: &'static str,
}

const FAULTS: [Fault; 11] = [
    Fault {
        name: "500",
        limits: "",
        streams: false,
        reply: |_| Reply::error(500),
        status: 500,
        outcome: "upstream_error",
    },
    Fault {
        name: "502 with HTML, to a stream",
        limits: "",
        streams: true,
        reply: |_| Reply::of(502, "text/html", "<h1>Bad gateway</h1>"),
        status: 502,
        outcome: "upstream_error",
    },
    Fault {
        name: "503 without a body",
        limits: "",
        streams: false,
        reply: |_| Reply::status(503),
        status: 503,
        outcome: "upstream_error",
    },
    Fault {
        name: "closed without an answer",
        limits: "",
        streams: false,
        reply: |_| Reply::close(),
        status: 502,
        outcome: "upstream_error",
    },
    Fault {
        name: "reset without an answer",
        limits: "",
        streams: true,
        reply: |_| Reply::reset(),
        status: 502,
        outcome: "upstream_error",
    },
    Fault {
        name: "first byte of a stream",
        limits: "timeout_secs = 0.2",
        streams: true,
        reply: |_| Reply::hang(),
        status: 504,
        outcome: "timeout",
    },
    Fault {
        name: "an answer that is not streamed",
        limits: "unstreamed_timeout_secs = 0.2",
        streams: false,
        reply: |_| Reply::hang(),
        status: 504,
        outcome: "timeout",
    },
    Fault {
        name: "idle in a stream",
        limits: "idle_secs = 0.2",
        streams: true,
        reply: |dialect| Reply::sse([dialect.event()]).then_hang(),
        status: 200,
        outcome: "timeout",
    },
    Fault {
        name: "a stream that breaks",
        limits: "",
        streams: true,
        reply: |dialect| Reply::sse([dialect.event()]).then_close(),
        status: 200,
        outcome: "broken_stream",
    },
    Fault {
        name: "half an answer in one piece",
        limits: "",
        streams: false,
        reply: |dialect| {
            Reply::json(200, &dialect.answer()[..20])
                .header("content-length", "200")
                .then_close()
        },
        status: 200,
        outcome: "broken_stream",
    },
    Fault {
        name: "an error event in a 200 stream",
        limits: "",
        streams: true,
        reply: |dialect| Reply::sse([dialect.event(), dialect.error_event()]),
        status: 200,
        outcome: "broken_stream",
    },
];

impl Fault {
    fn call(&self, dialect: Dialect) -> Outgoing {
        dialect.call_of("m", self.streams)
    }
}

/// Five calls fail, the sixth is refused and does not reach the provider.
async fn five_open_it(app: &App, dialect: Dialect, fault: &Fault) {
    for nth in 0..5 {
        let answer = app.ask(fault.call(dialect)).await;
        let seen = (answer.status(), answer.text());
        assert_eq!(
            seen.0, fault.status,
            "{}, call {nth}: {}",
            fault.name, seen.1
        );
    }
    let retry = assert_refused(dialect, &app.ask(fault.call(dialect)).await);
    assert!((1..=60).contains(&retry), "{}: {retry}", fault.name);
    let rows = app.rows(6).await;
    let count = |outcome: &str| {
        let of = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some(outcome));
        of.count()
    };
    let seen = (count(fault.outcome), count("refused"));
    assert_eq!(seen, (5, 1), "{}: {rows:#?}", fault.name);
    for row in rows {
        let refused = row.outcome.as_deref() == Some("refused");
        assert_eq!(row.upstream_call, Some(!refused));
        assert_eq!(row.status, Some(if refused { 503 } else { fault.status }));
    }
}

#[tokio::test]
async fn five_failures_in_a_row_of_any_kind_open_it() {
    for fault in FAULTS {
        for dialect in Dialect::BOTH {
            let up = Upstream::start(move |_| (fault.reply)(dialect)).await;
            let settings = format!(
                "[limits]\n{}\n[breaker]\nrecovery_check_secs = 0\n",
                fault.limits
            );
            let app = App::with(&up, &settings).await;
            five_open_it(&app, dialect, &fault).await;
            assert_eq!(up.calls(), 5, "{}", fault.name);
        }
    }
}

#[tokio::test]
async fn five_connections_that_cannot_be_made_open_it() {
    let refused = Upstream::dead_port();
    let deaf = DeafPort::new().await;
    let fault = |name, status, outcome| Fault {
        name,
        limits: "",
        streams: false,
        reply: |_| Reply::hang(),
        status,
        outcome,
    };
    for (addr, fault) in [
        (refused.addr(), fault("refused", 502, "upstream_error")),
        (deaf.addr(), fault("dropped", 504, "timeout")),
    ] {
        for dialect in Dialect::BOTH {
            let settings = "[limits]\nconnect_secs = 0.2\n[breaker]\nrecovery_check_secs = 0\n";
            let app = App::start(&App::settings(addr, settings)).await;
            five_open_it(&app, dialect, &fault).await;
        }
    }
}

#[tokio::test]
async fn a_success_begins_the_row_of_failures_anew() {
    let up = Upstream::start(|request| match request.call {
        Some(4) => Reply::chat(request),
        _ => Reply::error(500),
    })
    .await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0\n").await;
    let mut seen = Vec::new();
    for _ in 0..10 {
        seen.push(app.ask(Dialect::OpenAi.call()).await.status());
    }
    assert_eq!(seen, [500, 500, 500, 500, 200, 500, 500, 500, 500, 500]);
    assert_refused(Dialect::OpenAi, &app.ask(Dialect::OpenAi.call()).await);
    assert_eq!(up.calls(), 10);
}

#[tokio::test]
async fn half_of_twenty_calls_that_fail_open_it() {
    // Good and bad in turn, so that no two failures are in a row.
    let up = Upstream::start(|request| match request.call {
        Some(call) if call % 2 == 0 => Reply::error(503),
        _ => Reply::chat(request),
    })
    .await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0\n").await;
    for _ in 0..20 {
        let answer = app.ask(Dialect::OpenAi.call()).await;
        assert!(answer.header("x-traygate-error").is_none());
    }
    let answer = app.ask(Dialect::OpenAi.call()).await;
    assert_refused(Dialect::OpenAi, &answer);
    assert_eq!(up.calls(), 20);
    // The other provider before the same upstream has a breaker of its own.
    assert_eq!(app.ask(Dialect::Anthropic.call()).await.status(), 503);
    assert_eq!(up.calls(), 21);
}

// --- What does not ------------------------------------------------------------------------------

/// D39, D41
#[tokio::test]
async fn what_is_the_callers_own_fault_never_opens_it() {
    for dialect in Dialect::BOTH {
        let up = Upstream::chatting().await;
        let app = App::with(&up, "[breaker]\nfailures = 2\n").await;
        let mut calls = 0;
        for status in [400, 401, 402, 403, 404, 413, 422, 429] {
            // Enough for the rate, too.
            up.set_handler(move |_| Reply::error(status).header("retry-after", "7"));
            for _ in 0..25 {
                let answer = app.ask(dialect.call()).await;
                assert_eq!(answer.status(), status);
                assert_eq!(answer.header("retry-after"), Some("7"));
                calls += 1;
            }
            up.set_handler(move |request| dialect.good(request));
            assert_eq!(
                app.ask(dialect.call()).await.status(),
                200,
                "after {status}"
            );
            calls += 1;
        }
        assert_eq!(up.calls(), calls);
    }
}

const ONE_OPENS: &str = "[breaker]\nfailures = 1\nrecovery_check_secs = 0\n";

#[tokio::test]
async fn a_client_that_leaves_counts_as_nothing() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(move |request| match request.call {
            Some(0 | 1) => Reply::hang(),
            Some(2) => Reply::sse([dialect.event()]).then_hang(),
            _ => dialect.good(request),
        })
        .await;
        // Whoever leaves is not waited for.
        let app = App::with(&up, &format!("{ONE_OPENS}[dedup]\nlinger_secs = 0\n")).await;
        for (call, request) in [dialect.call(), dialect.stream(), dialect.stream()]
            .into_iter()
            .enumerate()
        {
            let mut client = app.client().await;
            client.send(request).await;
            up.wait_for_calls(call + 1).await;
            if call == 2 {
                client.head().await;
                client.read_until("Hello").await;
            }
            drop(client);
            up.wait_until_closed(call).await;
        }
        for row in app.rows(3).await {
            assert_eq!(row.outcome.as_deref(), Some("client_left"));
        }
        assert_eq!(app.ask(dialect.call()).await.status(), 200);
    }
}

#[tokio::test]
async fn time_in_the_queue_counts_as_nothing() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    })
    .await;
    let limits = "[limits]\nconcurrency = 1\nqueue = 1\nqueue_secs = 0.2\n";
    let app = App::with(&up, &format!("{limits}{ONE_OPENS}")).await;
    let chat = Dialect::OpenAi;
    let mut first = app.client().await;
    first.send(chat.call()).await;
    up.wait_for_calls(1).await;
    let (one, other) = tokio::join!(app.ask(chat.call()), app.ask(chat.call()));
    let mut codes = [chat.error_of(&one).0, chat.error_of(&other).0];
    codes.sort();
    assert_eq!(codes, ["queue_full", "queue_timeout"]);
    gate.open();
    assert_eq!(first.read_to_end().await.status(), 200);
    assert_eq!(app.ask(chat.call()).await.status(), 200);
    assert_eq!(up.calls(), 2);
}

/// D08: an overload is the model's own matter.
#[tokio::test]
async fn an_overloaded_model_does_not_close_off_its_neighbours() {
    type Overload = fn(Dialect) -> Reply;
    let by_status: Overload = |_| {
        let body = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        Reply::json(529, body)
    };
    let bare_529: Overload = |_| Reply::status(529);
    let by_503: Overload = |_| {
        let body = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        Reply::json(503, body)
    };
    let by_event: Overload = |dialect| {
        let event = match dialect {
            Dialect::OpenAi => {
                "data: {\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n"
            }
            Dialect::Anthropic => {
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n"
            }
        };
        Reply::sse([dialect.event(), event])
    };
    for (streams, status, overload) in [
        (false, 529, by_status),
        (true, 529, bare_529),
        (false, 503, by_503),
        (true, 200, by_event),
    ] {
        for dialect in Dialect::BOTH {
            let up = Upstream::start(move |request| {
                if request.json()["model"] == "busy" {
                    overload(dialect)
                } else {
                    dialect.good(request)
                }
            })
            .await;
            let settings = "[breaker]\nopen_secs = 60\nrecovery_check_secs = 0\n";
            let app = App::with(&up, settings).await;
            for _ in 0..5 {
                let answer = app.ask(dialect.call_of("busy", streams)).await;
                assert_eq!((answer.status(), answer.end), (status, BodyEnd::Clean));
            }
            for _ in 0..5 {
                let answer = app.ask(dialect.call_of("busy", streams)).await;
                assert_refused(dialect, &answer);
                let (_, message) = dialect.error_of(&answer);
                assert!(
                    message.contains("busy") && message.contains("open_secs"),
                    "{message}"
                );
                let neighbour = app.ask(dialect.call_of("calm", streams)).await;
                assert_eq!(neighbour.status(), 200);
            }
            assert_eq!(up.calls(), 10);
        }
    }
}

#[tokio::test]
async fn an_overloaded_model_is_tried_by_one_call_and_then_let_in() {
    let gate = Gate::new();
    let up = Upstream::start(|_| Reply::status(529)).await;
    let app = App::with(
        &up,
        "[breaker]\nfailures = 1\nopen_secs = 0.2\nrecovery_check_secs = 0\n",
    )
    .await;
    let dialect = Dialect::Anthropic;
    let busy = || dialect.call_of("busy", false);
    assert_eq!(app.ask(busy()).await.status(), 529);
    up.set_handler({
        let gate = gate.clone();
        move |request| dialect.good(request).held_by(&gate)
    });
    until("half-open", || !refuses_model(&app, dialect, Some("busy"))).await;
    let mut probe = app.client().await;
    probe.send(busy()).await;
    up.wait_for_calls(2).await;
    assert_eq!(assert_refused(dialect, &app.ask(busy()).await), 1);
    gate.open();
    assert_eq!(probe.read_to_end().await.status(), 200);
    assert_eq!(app.ask(busy()).await.status(), 200);
    assert_eq!(up.calls(), 3);
}

/// A call that its own overloaded model is refused has not tried the provider.
#[tokio::test]
async fn a_call_of_an_overloaded_model_does_not_take_the_providers_trial() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(|_| Reply::status(529)).await;
        let app = App::with(&up, CHECKED).await;
        let busy = || dialect.call_of("busy", false);
        assert_eq!(app.ask(busy()).await.status(), 529);
        half_open(&app, &up, dialect).await;
        up.set_handler(move |request| dialect.good(request));
        for _ in 0..3 {
            let answer = app.ask(busy()).await;
            assert_refused(dialect, &answer);
            assert!(dialect.error_of(&answer).1.contains("busy"));
        }
        assert_eq!(app.ask(dialect.call()).await.status(), 200);
        assert_eq!(up.calls(), 3);
    }
}

#[tokio::test]
async fn an_outcome_counts_only_for_the_opening_it_began_under() {
    let dialect = Dialect::OpenAi;
    // One that began before the opening succeeds after it: that closes nothing.
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| match request.call {
            Some(0) => Reply::chat(request).held_by(&gate),
            _ => Reply::error(500),
        }
    })
    .await;
    let app = App::with(&up, ONE_OPENS).await;
    let mut early = app.client().await;
    early.send(dialect.call()).await;
    up.wait_for_calls(1).await;
    assert_eq!(app.ask(dialect.call()).await.status(), 500);
    gate.open();
    assert_eq!(early.read_to_end().await.status(), 200);
    assert_refused(dialect, &app.ask(dialect.call()).await);

    // Ones that fail while another tries the provider out, or when it is closed again, open
    // nothing.
    let (during, after, probe_gate) = (Gate::new(), Gate::new(), Gate::new());
    let up = Upstream::start({
        let (during, after) = (during.clone(), after.clone());
        move |request| match request.call {
            Some(0) => Reply::error(500).held_by(&during),
            _ => Reply::error(500).held_by(&after),
        }
    })
    .await;
    let app = App::with(&up, CHECKED).await;
    let mut fails_during = app.client().await;
    fails_during.send(dialect.call()).await;
    up.wait_for_calls(1).await;
    let mut fails_after = app.client().await;
    fails_after.send(dialect.call()).await;
    up.wait_for_calls(2).await;
    half_open(&app, &up, dialect).await;
    up.set_handler({
        let probe_gate = probe_gate.clone();
        move |request| Reply::chat(request).held_by(&probe_gate)
    });
    let mut probe = app.client().await;
    probe.send(dialect.call()).await;
    up.wait_for_calls(4).await;
    during.open();
    assert_eq!(fails_during.read_to_end().await.status(), 500);
    assert_eq!(assert_refused(dialect, &app.ask(dialect.call()).await), 1);
    probe_gate.open();
    assert_eq!(probe.read_to_end().await.status(), 200);
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
    after.open();
    assert_eq!(fails_after.read_to_end().await.status(), 500);
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
}

// --- While it is open ---------------------------------------------------------------------------

/// D35
#[tokio::test]
async fn a_refusal_comes_at_once_and_says_why_in_the_dialect_of_its_path() {
    let up = Upstream::hanging().await;
    let settings = "[limits]\nunstreamed_timeout_secs = 0.2\n[breaker]\nfailures = 1\n";
    let app = App::with(&up, settings).await;
    for dialect in Dialect::BOTH {
        assert_eq!(app.ask(dialect.call()).await.status(), 504);
        let answer = app.ask(dialect.call()).await;
        // About a millisecond: the quickest of ten shows it on a busy machine too.
        let mut quickest = LIMIT;
        for _ in 0..10 {
            let asked = now();
            let answer = app.ask(dialect.call()).await;
            quickest = quickest.min(answer.ended - asked);
        }
        assert!(quickest < 100.ms(), "{quickest:?}");
        assert!((50..=60).contains(&assert_refused(dialect, &answer)));
        let (_, message) = dialect.error_of(&answer);
        for part in [dialect.provider(), "did not finish", "breaker.open_secs"] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    for (path, body) in [
        ("/v1/responses", r#"{"model":"m","input":"hi"}"#),
        ("/v1/embeddings", r#"{"model":"m","input":"hi"}"#),
        ("/v1/completions", r#"{"model":"m","prompt":"hi"}"#),
        ("/v1/moderations", r#"{"input":"hi"}"#),
    ] {
        let answer = app.post(path, body).await;
        assert_refused(Dialect::OpenAi, &answer);
    }
    // Ollama's own routes have a dialect of their own; its provider is a third one.
    let chat = r#"{"model":"m","stream":false,"messages":[{"role":"user","content":"hi"}]}"#;
    let ollama = format!("{chat:<100}");
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[breaker]\nfailures = 1\n").await;
    assert_eq!(app.post("/api/chat", chat).await.status(), 500);
    let answer = app.post("/api/chat", &ollama).await;
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.header("x-traygate-error"), Some("breaker_open"));
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    let error = answer.json()["error"].as_str().map(str::to_owned);
    assert!(error.is_some_and(|error| error.starts_with("Traygate: ollama ")));
}

#[tokio::test]
async fn free_routes_pass_while_it_is_open() {
    for dialect in Dialect::BOTH {
        let up = Upstream::failing(500).await;
        let app = App::with(&up, ONE_OPENS).await;
        assert_eq!(app.ask(dialect.call()).await.status(), 500);
        assert_refused(dialect, &app.ask(dialect.call()).await);
        let prefix = format!("/{}", dialect.provider());
        up.set_handler(|_| Reply::json(200, "{}"));
        let models = fetch(app.addr(), &format!("{prefix}/v1/models")).await;
        assert_eq!(models.status(), 200);
        let tokens = app
            .post(&format!("{prefix}/v1/messages/count_tokens"), "{}")
            .await;
        assert_eq!(tokens.status(), 200);
        // They prove nothing of the calls.
        assert_refused(dialect, &app.ask(dialect.call()).await);
    }
}

#[tokio::test]
async fn calls_that_wait_when_it_opens_are_refused_at_once_and_their_followers_with_them() {
    for dialect in Dialect::BOTH {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| match request.call {
                Some(0) => Reply::hang(),
                _ => Reply::error(500).held_by(&gate),
            }
        })
        .await;
        let app = App::with(&up, &format!("[limits]\nconcurrency = 2\n{ONE_OPENS}")).await;
        let mut hung = app.client().await;
        hung.send(dialect.call()).await;
        up.wait_for_calls(1).await;
        let mut fails = app.client().await;
        fails.send(dialect.call()).await;
        up.wait_for_calls(2).await;
        let pool = pool_of(&app, dialect);
        // No place comes free by the failure: those who wait are refused while they do.
        pool.resize(1);
        let mut waiting = JoinSet::new();
        for nth in 1..=8 {
            // Each with a follower.
            let call = dialect.call();
            for _ in 0..2 {
                waiting.spawn(asking(&app, call.clone()));
            }
            until("a call in the queue", || pool.snapshot().waiting == nth).await;
        }
        // Open ones are on record too, from the next commit on.
        until("the followers", || app.rows_now().len() == 18).await;
        let opened = now();
        gate.open();
        let mut labels = Vec::new();
        while let Some(answer) = waiting.join_next().await {
            let answer = answer.expect("an answer");
            assert!((50..=60).contains(&assert_refused(dialect, &answer)));
            // Not the 60 s of `queue_secs`.
            assert!(answer.ended - opened < LIMIT / 2);
            labels.push(answer.header("x-traygate-dedup").map(str::to_owned));
        }
        for label in ["miss", "joined"] {
            let count = labels
                .iter()
                .filter(|seen| seen.as_deref() == Some(label))
                .count();
            assert_eq!(count, 8, "{label}");
        }
        assert_eq!(fails.read_to_end().await.status(), 500);
        assert_eq!(up.calls(), 2);
        let rows = app.rows(17).await;
        let refused = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("refused"));
        assert_eq!(refused.count(), 16);
        assert_eq!((pool.snapshot().in_flight, pool.snapshot().waiting), (1, 0));
    }
}

// --- Half-open ----------------------------------------------------------------------------------

/// One failure opens it for a minute, in which only a recovery check can make it half-open.
const CHECKED: &str = "[breaker]\nfailures = 1\nopen_secs = 60\nrecovery_check_secs = 0.05\n[dedup]\nlinger_secs = 0\n";

/// Opens it with one call, see [`recover`] for the rest.
async fn half_open(app: &App, up: &Upstream, dialect: Dialect) {
    up.set_handler(|_| Reply::error(503));
    assert_eq!(app.ask(dialect.call()).await.status(), 503);
    recover(app, up, dialect).await;
}

/// Makes an open breaker half-open: the provider is dead to a few checks, then it is well. Calls
/// fail until the test sets a handler; its model list is well from here on.
async fn recover(app: &App, up: &Upstream, dialect: Dialect) {
    up.set_handler(|_| Reply::error(503));
    assert!(refuses(app, dialect));
    // Checks follow each other, so of three the first has been told to the breaker.
    up.wait_for_requests(up.requests().len() + 3).await;
    assert!(refuses(app, dialect));
    up.set_handler(|request| {
        if request.is_call() {
            Reply::error(503)
        } else {
            Reply::json(200, r#"{"data":[]}"#)
        }
    });
    until("half-open", || !refuses(app, dialect)).await;
}

/// D40
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_calls_at_once_on_a_half_open_breaker_exactly_one_is_sent() {
    for (dialect, count) in [
        (Dialect::OpenAi, 40),
        (Dialect::Anthropic, 40),
        (Dialect::OpenAi, 100),
    ] {
        let up = Upstream::chatting().await;
        let app = App::with(&up, CHECKED).await;
        half_open(&app, &up, dialect).await;
        let gate = Gate::new();
        up.set_handler({
            let gate = gate.clone();
            move |request| dialect.good(request).held_by(&gate)
        });
        let mut asked = JoinSet::new();
        for _ in 0..count {
            asked.spawn(asking(&app, dialect.call()));
        }
        for _ in 1..count {
            let answer = must("a refusal", asked.join_next()).await;
            let answer = answer.expect("one that is not held").expect("an answer");
            assert_eq!(assert_refused(dialect, &answer), 1);
            let (_, message) = dialect.error_of(&answer);
            assert!(message.contains("trying"), "{message}");
        }
        assert_eq!(up.calls(), 2, "the failure and the one that tries");
        gate.open();
        let probe = asked
            .join_next()
            .await
            .expect("the last")
            .expect("an answer");
        assert_eq!(probe.status(), 200);
        assert_eq!(app.ask(dialect.call()).await.status(), 200);
        assert_eq!(up.calls(), 3);
    }
}

/// What a probe may come to, and whether the breaker is closed or open for two minutes after it.
#[tokio::test]
async fn a_probe_closes_it_by_any_sign_of_life_and_else_opens_it_for_twice_as_long() {
    type Answers = fn(Dialect) -> Reply;
    let cases: [(&str, bool, Answers, bool); 11] = [
        (
            "a whole answer",
            false,
            |dialect| Reply::json(200, dialect.answer()),
            true,
        ),
        ("400", false, |_| Reply::error(400), true),
        ("401", false, |_| Reply::error(401), true),
        ("429", false, |_| Reply::error(429), true),
        ("529", false, |_| Reply::status(529), true),
        (
            "content, then death",
            true,
            |dialect| Reply::sse([dialect.event()]).then_close(),
            true,
        ),
        ("503", false, |_| Reply::error(503), false),
        ("death before the head", false, |_| Reply::close(), false),
        (
            "death before content",
            true,
            |_| Reply::sse([": well\n\n"]).then_close(),
            false,
        ),
        (
            "an error event before content",
            true,
            |dialect| Reply::sse([dialect.error_event()]),
            false,
        ),
        (
            "silence",
            true,
            |_| Reply::sse([": well\n\n"]).then_hang(),
            false,
        ),
    ];
    for (name, streams, answers, closes) in cases {
        for dialect in Dialect::BOTH {
            let up = Upstream::chatting().await;
            let settings = format!("[limits]\nidle_secs = 0.3\n{CHECKED}");
            let app = App::with(&up, &settings).await;
            half_open(&app, &up, dialect).await;
            up.set_handler(move |request| {
                if request.is_call() {
                    answers(dialect)
                } else {
                    Reply::json(200, "{}")
                }
            });
            app.ask(dialect.call_of("m", streams)).await;
            assert_eq!(up.calls(), 2, "{name}");
            up.set_handler(move |request| dialect.good(request));
            if closes {
                // More than one at a time: it is closed, not half-open.
                let other = || app.ask(dialect.call_of("other", false));
                let (one, two) = tokio::join!(other(), other());
                assert_eq!((one.status(), two.status()), (200, 200), "{name}");
            } else {
                let next = app.ask(dialect.call()).await;
                assert_eq!(next.status(), 503, "{name}, {dialect:?}");
                let retry = assert_refused(dialect, &next);
                assert!((61..=120).contains(&retry), "{name}: {retry}");
            }
        }
    }
}

#[tokio::test]
async fn the_first_content_of_a_stream_closes_it() {
    for dialect in Dialect::BOTH {
        let up = Upstream::chatting().await;
        let app = App::with(&up, CHECKED).await;
        half_open(&app, &up, dialect).await;
        let (content, end) = (Gate::new(), Gate::new());
        up.set_handler({
            let (content, end) = (content.clone(), end.clone());
            move |request| {
                if request.wants_stream() {
                    Reply::sse([": a ping is no content\n\n"])
                        .then_wait_for(&content)
                        .then_body(dialect.event())
                        .then_wait_for(&end)
                        .then_body(dialect.last_events())
                } else {
                    Reply::json(200, dialect.answer())
                }
            }
        });
        let mut probe = app.client().await;
        probe.send(dialect.stream()).await;
        let head = probe.head().await;
        probe.read_until("ping").await;
        assert_refused(dialect, &app.ask(dialect.call()).await);
        content.open();
        probe.read_until("Hello").await;
        until("closed", || !refuses(&app, dialect)).await;
        // Two at a time, and the stream goes on.
        let (one, two) = tokio::join!(app.ask(dialect.call()), app.ask(dialect.call()));
        assert_eq!((one.status(), two.status()), (200, 200));
        assert_eq!(up.in_flight(), 1);
        end.open();
        assert_eq!(probe.rest(head).await.end, BodyEnd::Clean);
    }
}

#[tokio::test]
async fn an_abandoned_probe_frees_its_place_and_counts_as_nothing() {
    for dialect in Dialect::BOTH {
        for streams in [false, true] {
            let up = Upstream::chatting().await;
            let app = App::with(&up, CHECKED).await;
            half_open(&app, &up, dialect).await;
            up.set_handler(|_| Reply::hang());
            for call in 1..=3 {
                let mut client = app.client().await;
                client.send(dialect.call_of("m", streams)).await;
                up.wait_for_calls(call + 1).await;
                assert_refused(dialect, &app.ask(dialect.call()).await);
                drop(client);
                up.wait_until_closed(call).await;
                until("the place to be free", || !refuses(&app, dialect)).await;
            }
            up.set_handler(move |request| dialect.good(request));
            assert_eq!(app.ask(dialect.call()).await.status(), 200);
            assert_eq!(app.ask(dialect.call()).await.status(), 200);
            let extra = pool_of(&app, dialect).snapshot().extra;
            assert_eq!(extra, 0, "every probe has given its permit back");
        }
    }
}

/// Sixteen calls that hang must not keep the provider from being tried.
#[tokio::test]
async fn a_probe_has_a_permit_of_its_own_while_hung_calls_hold_all_others() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::hanging().await;
    let app = App::with(&up, &format!("[limits]\nconcurrency = 16\n{CHECKED}")).await;
    let pool = pool_of(&app, dialect);
    let mut hung = Vec::new();
    for _ in 0..16 {
        let mut client = app.client().await;
        client.send(dialect.call()).await;
        hung.push(client);
    }
    up.wait_for_in_flight(16).await;
    pool.resize(17);
    half_open(&app, &up, dialect).await;
    pool.resize(16);
    assert_eq!((pool.snapshot().in_flight, pool.snapshot().limit), (16, 16));
    let gate = Gate::new();
    up.set_handler({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    });
    let mut probe = app.client().await;
    probe.send(dialect.call()).await;
    up.wait_for_in_flight(17).await;
    assert_eq!(pool.snapshot().extra, 1);
    gate.open();
    assert_eq!(probe.read_to_end().await.status(), 200);
    // It is closed; the next one is an ordinary call and waits for a permit.
    let mut next = app.client().await;
    next.send(dialect.call()).await;
    until("the next to wait", || pool.snapshot().waiting == 1).await;
    assert_eq!(up.calls(), 18);
    drop(hung.pop());
    assert_eq!(next.read_to_end().await.status(), 200);
    assert_eq!(pool.snapshot().extra, 0);
}

#[tokio::test]
async fn each_failed_probe_doubles_the_wait_and_a_success_begins_anew() {
    let dialect = Dialect::Anthropic;
    let up = Upstream::chatting().await;
    let app = App::with(&up, CHECKED).await;
    half_open(&app, &up, dialect).await;
    for (least, most) in [(61, 120), (121, 240), (241, 480)] {
        assert_eq!(app.ask(dialect.call()).await.status(), 503);
        let retry = assert_refused(dialect, &app.ask(dialect.call()).await);
        assert!((least..=most).contains(&retry), "{retry}");
        recover(&app, &up, dialect).await;
    }
    up.set_handler(move |request| dialect.good(request));
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
    up.set_handler(|_| Reply::error(500));
    assert_eq!(app.ask(dialect.call()).await.status(), 500);
    let retry = assert_refused(dialect, &app.ask(dialect.call()).await);
    assert!(retry <= 60, "{retry}");
}

#[tokio::test]
async fn it_is_half_open_when_its_wait_is_over() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::failing(500).await;
    let settings = "[breaker]\nfailures = 1\nopen_secs = 0.3\nrecovery_check_secs = 0\n";
    let app = App::with(&up, settings).await;
    let asked = now();
    assert_eq!(app.ask(dialect.call()).await.status(), 500);
    up.set_handler(Reply::chat);
    until("half-open", || !refuses(&app, dialect)).await;
    assert!(now() - asked >= 300.ms());
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
    let checks = up
        .requests()
        .iter()
        .filter(|seen| !seen.request.is_call())
        .count();
    assert_eq!(checks, 0, "recovery checks are off");
}

#[tokio::test]
async fn as_many_probes_as_the_setting_says_must_succeed() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::chatting().await;
    let app = App::with(
        &up,
        &CHECKED.replace("failures = 1", "failures = 1\nprobes = 2"),
    )
    .await;
    half_open(&app, &up, dialect).await;
    for probe in 0..2 {
        let gate = Gate::new();
        up.set_handler({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        });
        let mut client = app.client().await;
        client.send(dialect.call()).await;
        up.wait_for_calls(probe + 2).await;
        assert_refused(dialect, &app.ask(dialect.call()).await);
        gate.open();
        assert_eq!(client.read_to_end().await.status(), 200);
    }
    let gate = Gate::new();
    up.set_handler({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    });
    let (one, two, ()) = tokio::join!(app.ask(dialect.call()), app.ask(dialect.call()), async {
        up.wait_for_in_flight(2).await;
        gate.open();
    });
    assert_eq!((one.status(), two.status()), (200, 200));
}

// --- Recovery checks ----------------------------------------------------------------------------

/// Asks until a call is let through, and returns its answer.
async fn first_let_through(app: &App, dialect: Dialect) -> Answer {
    let asking = async {
        loop {
            let answer = app.ask(dialect.call()).await;
            if answer.header("x-traygate-error") != Some("breaker_open") {
                return answer;
            }
            tokio::time::sleep(20.ms()).await;
        }
    };
    // It waits for half of `open_secs` at most.
    must("a provider that is well to be let in", asking).await
}

#[tokio::test]
async fn a_provider_that_is_well_again_is_let_in_within_seconds() {
    for dialect in Dialect::BOTH {
        // A server that has been ended, and is started again.
        let dead = Upstream::dead_port();
        let settings = "[breaker]\nopen_secs = 60\nrecovery_check_secs = 0.2\n";
        let app = App::start(&App::settings(dead.addr(), settings)).await;
        for _ in 0..5 {
            assert_eq!(app.ask(dialect.call()).await.status(), 502);
        }
        assert_refused(dialect, &app.ask(dialect.call()).await);
        // Some checks find it dead; where nobody listens nobody sees them.
        tokio::time::sleep(1.secs()).await;
        let up = dead.revive(move |request| dialect.good(request));
        assert_eq!(first_let_through(&app, dialect).await.status(), 200);
        assert_eq!(up.calls(), 1);
        assert_eq!(app.ask(dialect.call()).await.status(), 200);

        let requests = up.requests();
        let checks: Vec<_> = requests
            .iter()
            .filter(|seen| !seen.request.is_call())
            .collect();
        assert!(!checks.is_empty());
        for check in &checks {
            let request = &check.request;
            assert_eq!((&*request.method, &*request.target), ("GET", "/v1/models"));
            let connection = request.connection;
            let shared = requests
                .iter()
                .filter(|seen| seen.request.connection == connection);
            assert_eq!(shared.count(), 1, "each check has a connection of its own");
        }
        // Closed, it is not looked after any more.
        let before = requests.len();
        tokio::time::sleep(600.ms()).await;
        assert_eq!(up.requests().len(), before);
    }
}

#[tokio::test]
async fn a_provider_that_hung_is_let_in_when_it_answers() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::hanging().await;
    let settings = "[limits]\nunstreamed_timeout_secs = 0.2\n[breaker]\nfailures = 1\nrecovery_check_secs = 0.1\n";
    let app = App::with(&up, settings).await;
    assert_eq!(app.ask(dialect.call()).await.status(), 504);
    // A check that hangs is given up after two seconds, and the next one begins.
    up.wait_for_requests(3).await;
    let checks: Vec<_> = up.requests().into_iter().skip(1).collect();
    let apart = checks[1].request.started - checks[0].request.started;
    assert!((1.secs()..20.secs()).contains(&apart), "{apart:?}");
    // Any answer below 500 will do.
    up.set_handler(|request| {
        if request.is_call() {
            Reply::chat(request)
        } else {
            Reply::error(401)
        }
    });
    assert_eq!(first_let_through(&app, dialect).await.status(), 200);
}

#[tokio::test]
async fn a_model_list_that_was_well_all_along_lets_nobody_in() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(|request| {
            if request.is_call() {
                Reply::error(503)
            } else {
                Reply::json(200, r#"{"data":[]}"#)
            }
        })
        .await;
        let app = App::with(&up, CHECKED).await;
        assert_eq!(app.ask(dialect.call()).await.status(), 503);
        up.wait_for_requests(1 + 6).await;
        assert_refused(dialect, &app.ask(dialect.call()).await);
        assert_eq!(up.calls(), 1);
    }
}

#[tokio::test]
async fn a_probe_that_hangs_is_ended_by_its_timeout_and_another_may_try() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::chatting().await;
    let settings = format!("[limits]\ntimeout_secs = 0.3\n{CHECKED}");
    let app = App::with(&up, &settings).await;
    half_open(&app, &up, dialect).await;
    up.set_handler(|request| {
        if request.is_call() {
            Reply::hang()
        } else {
            Reply::json(200, "{}")
        }
    });
    let hung = app.ask(dialect.stream()).await;
    assert_eq!(
        (hung.status(), dialect.error_of(&hung).0.as_str()),
        (504, "upstream_timeout")
    );
    let retry = assert_refused(dialect, &app.ask(dialect.call()).await);
    assert!(retry > 60, "{retry}");
    recover(&app, &up, dialect).await;
    up.set_handler(Reply::chat);
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
}
