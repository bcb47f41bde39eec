//! The timeouts through the door: each on its own, what its caller is told, and what is no
//! timeout at all.
//!
//! Nine minutes of silence and a stream of an hour are tested beside the code, in
//! `call/upstream.rs`: they need a clock that leaps, and real sockets do not go with one.

use std::io::Write as _;
use std::time::Duration;

use crate::breaker::{Dialect, pool_of, unique, until};
use crate::support::app::App;
use crate::support::client::{Answer, BodyEnd, Client, Outgoing, post};
use crate::support::upstream::{DeafPort, Gate, Reply, Upstream, chat_events};
use crate::support::{Span, now};

/// One failed call must not close off the next.
const NO_BREAKER: &str = "[breaker]\nfailures = 10000\nfailure_rate = 0\n";

fn with_limits(limits: &str) -> String {
    format!("[limits]\n{limits}\n{NO_BREAKER}[dedup]\nlinger_secs = 0\n")
}

/// Another answer than an error: cut short, and what came of it.
fn assert_cut(answer: &Answer) -> String {
    assert_eq!(answer.status(), 200);
    assert_ne!(
        answer.end,
        BodyEnd::Clean,
        "no SDK may take it for whole: {:?}",
        answer.text()
    );
    answer.text()
}

// --- Each on its own ----------------------------------------------------------------------------

#[tokio::test]
async fn each_limit_ends_a_call_by_itself_and_names_its_setting() {
    let deaf = DeafPort::new().await;
    let hanging = Upstream::hanging().await;
    // The others are far away, so that only the one can have been it.
    for (addr, setting, streams, span) in [
        (deaf.addr(), "connect_secs", true, 0.2),
        (deaf.addr(), "connect_secs", false, 0.25),
        (hanging.addr(), "timeout_secs", true, 0.2),
        (hanging.addr(), "unstreamed_timeout_secs", false, 0.25),
    ] {
        let settings = with_limits(&format!("{setting} = {span}"));
        let app = App::start(&App::settings(addr, &settings)).await;
        for dialect in Dialect::BOTH {
            let asked = now();
            let answer = app.ask(dialect.call_of("m", streams)).await;
            let took = answer.ended - asked;
            assert!(
                took >= Duration::from_secs_f64(span) && took < 9.secs(),
                "{took:?}"
            );
            assert_eq!((answer.status(), answer.end), (504, BodyEnd::Clean));
            let (code, message) = dialect.error_of(&answer);
            assert_eq!(code, "upstream_timeout");
            for part in [
                dialect.provider(),
                &format!("limits.{setting}"),
                &format!("{span} s"),
            ] {
                assert!(message.contains(part), "{part}: {message}");
            }
            // An SDK may well try again.
            assert_eq!(answer.header("x-should-retry"), None);
        }
        for row in app.rows(2).await {
            assert_eq!(
                (row.outcome.as_deref(), row.status),
                (Some("timeout"), Some(504))
            );
            assert!(row.error.is_some_and(|error| error.contains(setting)));
            assert_eq!(row.upstream_call, Some(true));
        }
    }
}

#[tokio::test]
async fn one_limit_does_not_stand_in_for_another() {
    // A stream is not held to the limit of whole answers, nor a whole answer to the one of first
    // bytes; and a connection that stands has no more to do with the limit on connecting.
    let up = Upstream::slow(1.secs()).await;
    let dialect = Dialect::OpenAi;
    let app = App::with(
        &up,
        &with_limits("connect_secs = 0.3\nunstreamed_timeout_secs = 0.3"),
    )
    .await;
    assert_eq!(app.ask(dialect.stream()).await.status(), 200);
    let app = App::with(
        &up,
        &with_limits("connect_secs = 0.3\ntimeout_secs = 0.3\nidle_secs = 0.3"),
    )
    .await;
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
}

#[tokio::test]
async fn the_flag_sets_both_middle_limits_of_every_provider() {
    let up = Upstream::hanging().await;
    let overrides = traygate::settings::Overrides {
        timeout: Some(200.ms()),
        ..Default::default()
    };
    let text = App::settings(up.addr(), "");
    let settings = traygate::settings::Settings::parse(&text, &overrides);
    for provider in settings.expect("settings").providers {
        let limits = provider.limits;
        assert_eq!((limits.first_byte, limits.unstreamed), (200.ms(), 200.ms()));
    }
}

/// The whole answer is limited where it is not streamed, not only its beginning.
#[tokio::test]
async fn a_whole_answer_that_dribbles_is_cut() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(move |_| {
            let answer = dialect.answer();
            let (begun, rest) = answer.split_at(20);
            Reply::json(200, begun)
                .header("content-length", &answer.len().to_string())
                .then_wait(20.secs())
                .then_body(rest)
        })
        .await;
        let app = App::with(
            &up,
            &with_limits("unstreamed_timeout_secs = 0.3\nidle_secs = 0.2"),
        )
        .await;
        let answer = app.ask(dialect.call()).await;
        assert_eq!(assert_cut(&answer), dialect.answer()[..20]);
        up.wait_until_closed(0).await;
        let row = &app.rows(1).await[0];
        assert_eq!(row.outcome.as_deref(), Some("timeout"));
        assert!(
            row.error
                .as_deref()
                .is_some_and(|error| error.contains("unstreamed_timeout_secs"))
        );
    }
}

/// A head is no byte of the stream.
#[tokio::test]
async fn a_stream_of_which_only_the_head_comes_is_held_to_the_first_byte() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(|_| Reply::sse([""; 0]).then_hang()).await;
        let app = App::with(&up, &with_limits("timeout_secs = 0.3")).await;
        let text = assert_cut(&app.ask(dialect.stream()).await);
        assert!(text.contains("limits.timeout_secs"), "{text}");
        up.wait_until_closed(0).await;
    }
}

/// A stream that nobody asked for is a stream.
#[tokio::test]
async fn an_event_stream_that_was_not_asked_for_is_no_whole_answer() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::start(move |_| {
        let reply = (0..8).fold(Reply::sse([dialect.event()]), |reply, _| {
            reply.then_wait(200.ms()).then_body(dialect.event())
        });
        reply.then_body(dialect.last_events())
    })
    .await;
    let app = App::with(&up, &with_limits("unstreamed_timeout_secs = 1")).await;
    let answer = app.ask(dialect.call()).await;
    assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
    assert_eq!(answer.text().matches("Hello").count(), 9);
}

/// D17
#[tokio::test]
async fn nothing_is_sent_before_the_upstreams_head() {
    for dialect in Dialect::BOTH {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |_| {
                Reply::error(429)
                    .header("retry-after", "17")
                    .header("retry-after-ms", "16500")
                    .held_by(&gate)
            }
        })
        .await;
        let app = App::with(&up, "").await;
        let mut client = app.client().await;
        client.send(dialect.stream()).await;
        gate.reached_by(1).await;
        let early = tokio::time::timeout(500.ms(), client.try_head()).await;
        assert!(early.is_err(), "{early:?}");
        gate.open();
        let answer = client.read_to_end().await;
        assert_eq!(answer.status(), 429);
        assert_eq!(answer.header("retry-after"), Some("17"));
        assert_eq!(answer.header("retry-after-ms"), Some("16500"));
        assert_eq!(answer.text(), up_error(429));
    }
}

/// What [`Reply::error`] says.
fn up_error(status: u16) -> String {
    assert_eq!(status, 429);
    r#"{"error":{"code":null,"message":"scripted","type":"scripted_error"}}"#.to_owned()
}

// --- In the middle of a stream ------------------------------------------------------------------

/// Each stream: its path, an event of it, and the shape of the error event that follows.
fn streams() -> [(&'static str, &'static str); 4] {
    [
        ("/v1/chat/completions", Dialect::OpenAi.event()),
        (
            "/v1/completions",
            "data: {\"choices\":[{\"index\":0,\"text\":\"Hello\"}]}\n\n",
        ),
        (
            "/v1/responses",
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hello\"}\n\n",
        ),
        ("/v1/messages", Dialect::Anthropic.event()),
    ]
}

fn streamed(path: &str) -> Outgoing {
    let prompt = unique();
    post(path).json(format!(
        r#"{{"model":"m","stream":true,"max_tokens":9,"prompt":"{prompt}","input":"{prompt}","messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    ))
}

#[tokio::test]
async fn silence_between_events_ends_in_an_error_event_and_a_cut() {
    for (path, event) in streams() {
        let up = Upstream::start(move |_| Reply::sse([event]).then_hang()).await;
        let app = App::with(&up, &with_limits("idle_secs = 0.3")).await;
        let mut client = app.client().await;
        client.send(streamed(path)).await;
        let head = client.head().await;
        assert_eq!(client.read_until("\n\n").await, event);
        let rest = client.rest(head).await;
        let text = assert_cut(&rest);
        // An event whole, and nothing after it.
        assert!(
            text.ends_with("\n\n") && text.matches("\n\n").count() == 1,
            "{text:?}"
        );
        let lines: Vec<&str> = text.trim_end().lines().collect();
        let data = lines.last().and_then(|line| line.strip_prefix("data: "));
        let data: serde_json::Value = serde_json::from_str(data.expect("data")).expect("JSON");
        let message = data["error"]["message"].as_str().unwrap_or_default();
        assert!(
            message.starts_with("Traygate: ") && message.contains("limits.idle_secs"),
            "{text}"
        );
        assert_eq!(data["error"]["code"], "upstream_timeout");
        match path {
            "/v1/messages" => {
                assert_eq!(lines.len(), 2);
                assert_eq!(lines[0], "event: error");
                assert_eq!(data["type"], "error");
                assert_eq!(data["error"]["type"], "timeout_error");
            }
            "/v1/responses" => {
                assert_eq!(lines.len(), 2);
                assert_eq!(lines[0], "event: error");
                assert_eq!(data["type"], "error");
                assert_eq!(data["code"], "upstream_timeout");
                assert_eq!(data["message"], message);
            }
            _ => {
                assert_eq!(lines.len(), 1);
                assert_eq!(data["error"]["type"], "server_error");
                assert!(data["error"]["param"].is_null());
            }
        }
        // The upstream is let go and the place is free.
        up.wait_until_closed(0).await;
        let row = &app.rows(1).await[0];
        assert_eq!(
            (row.outcome.as_deref(), row.status),
            (Some("timeout"), Some(200))
        );
        assert!(
            row.error
                .as_deref()
                .is_some_and(|error| error.contains("limits.idle_secs"))
        );
        assert!(row.first_token.is_some());
        let dialect = if path == "/v1/messages" {
            Dialect::Anthropic
        } else {
            Dialect::OpenAi
        };
        assert_eq!(pool_of(&app, dialect).snapshot().in_flight, 0);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_between_events_ends_in_an_error_event_and_a_cut() {
    for (path, event) in streams() {
        let up = Upstream::start(move |_| Reply::sse([event]).then_close()).await;
        let app = App::with(&up, &with_limits("")).await;
        let text = assert_cut(&app.ask(streamed(path)).await);
        let error = text.strip_prefix(event).expect("the event first");
        assert!(
            error.contains("upstream_broke") && error.ends_with("\n\n"),
            "{error:?}"
        );
        assert_eq!(
            app.rows(1).await[0].outcome.as_deref(),
            Some("broken_stream")
        );
    }
}

#[tokio::test]
async fn silence_in_the_middle_of_an_event_is_just_cut() {
    for (path, event) in streams() {
        let after_a_line = event.find('\n').expect("a line") + 1;
        for at in [4, after_a_line, event.len() - 5, event.len() - 1] {
            let sent = format!("{event}{}", &event[..at]);
            let expected = sent.clone();
            let up = Upstream::start(move |_| Reply::sse([&sent]).then_hang()).await;
            let app = App::with(&up, &with_limits("idle_secs = 0.2")).await;
            assert_eq!(assert_cut(&app.ask(streamed(path)).await), expected);
            assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("timeout"));
        }
    }
}

/// Nobody could read an event in plain text there.
#[tokio::test]
async fn silence_in_a_compressed_stream_is_just_cut() {
    for dialect in Dialect::BOTH {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder
            .write_all(dialect.event().as_bytes())
            .expect("in memory");
        encoder.flush().expect("in memory");
        let sent = encoder.get_ref().clone();
        let expected = sent.clone();
        let up = Upstream::start(move |_| {
            Reply::sse([&sent])
                .header("content-encoding", "gzip")
                .then_hang()
        })
        .await;
        let app = App::with(&up, &with_limits("idle_secs = 0.3")).await;
        let answer = app
            .ask(dialect.stream().header("accept-encoding", "gzip"))
            .await;
        assert_eq!((answer.status(), answer.bytes()), (200, expected));
        assert_ne!(answer.end, BodyEnd::Clean);
        assert_eq!(answer.header("content-encoding"), Some("gzip"));
        let row = &app.rows(1).await[0];
        assert_eq!(row.outcome.as_deref(), Some("timeout"));
        assert!(row.first_token.is_some(), "it was read along for all that");
    }
}

/// An event put into a body of a promised length would be cut off at that length, and what was cut
/// would look whole.
#[tokio::test]
async fn silence_in_a_stream_of_known_length_is_just_cut() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(move |_| {
            Reply::of(200, "text/event-stream", dialect.event())
                .header("content-length", &(dialect.event().len() + 30).to_string())
                .then_hang()
        })
        .await;
        let app = App::with(&up, &with_limits("idle_secs = 0.3")).await;
        // The length stays where no usage chunk is to be taken out.
        let call = post(dialect.path()).json(
            r#"{"model":"m","stream":true,"max_tokens":9,"stream_options":{"include_usage":false}}"#,
        );
        assert_eq!(assert_cut(&app.ask(call).await), dialect.event());
    }
}

/// Both who share a call are told.
#[tokio::test]
async fn a_follower_is_told_as_the_leader_is() {
    let dialect = Dialect::Anthropic;
    let up = Upstream::start(move |_| Reply::sse([dialect.event()]).then_hang()).await;
    let app = App::with(&up, &with_limits("idle_secs = 1")).await;
    let call = dialect.stream();
    let mut leader = app.client().await;
    leader.send(call.clone()).await;
    let head = leader.head().await;
    let begun = leader.read_until("\n\n").await;
    let follower = app.ask(call).await;
    assert_eq!(follower.header("x-traygate-dedup"), Some("joined"));
    let rest = leader.rest(head).await;
    assert_eq!(begun + &assert_cut(&rest), assert_cut(&follower));
    assert_eq!(up.calls(), 1);
    for row in app.rows(2).await {
        assert_eq!(row.outcome.as_deref(), Some("timeout"));
    }
}

// --- No timeouts --------------------------------------------------------------------------------

/// D15
#[tokio::test]
async fn a_stream_has_no_total_limit() {
    for dialect in Dialect::BOTH {
        let up = Upstream::start(move |_| {
            let reply = (1..40).fold(Reply::sse([dialect.event()]), |reply, _| {
                reply.then_wait(100.ms()).then_body(dialect.event())
            });
            reply.then_body(dialect.last_events())
        })
        .await;
        let limits =
            "connect_secs = 1\ntimeout_secs = 1.5\nunstreamed_timeout_secs = 1\nidle_secs = 1.5";
        let app = App::with(&up, &with_limits(limits)).await;
        let asked = now();
        let answer = app.ask(dialect.stream()).await;
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
        assert!(answer.ended - asked > 3.secs(), "longer than any limit");
        assert_eq!(answer.text().matches("Hello").count(), 40);
        assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));
    }
}

/// D02, D16: any byte is a sign of life, be it a comment, a ping or half a line.
#[tokio::test]
async fn any_byte_resets_the_idle_limit() {
    let dialect = Dialect::Anthropic;
    for (name, byte) in [
        ("comments", ": OPENROUTER PROCESSING\n\n"),
        ("pings", "event: ping\ndata: {\"type\":\"ping\"}\n\n"),
        ("line ends", "\n"),
    ] {
        let up = Upstream::start(move |_| {
            let reply = (0..25).fold(Reply::sse([dialect.event()]), |reply, _| {
                reply.then_wait(100.ms()).then_body(byte)
            });
            reply.then_body(dialect.last_events())
        })
        .await;
        let app = App::with(&up, &with_limits("idle_secs = 1")).await;
        let answer = app.ask(dialect.stream()).await;
        assert_eq!(
            (answer.status(), answer.end),
            (200, BodyEnd::Clean),
            "{name}"
        );
        let last = answer.text();
        assert!(last.ends_with(dialect.last_events()), "{name}: {last:?}");
        assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));
    }
}

/// More than lies between Traygate and a client that does not read, so that it has to wait before
/// it may read on from the upstream.
const MUCH: usize = 24 << 20;

/// Asks, takes the head, then reads nothing for longer than the limits allow the upstream, and
/// then all.
async fn read_late(app: &App, dialect: Dialect, request: Outgoing, pause: Duration) -> Answer {
    let mut client = Client::reading_little(app.addr(), 4096).await;
    client.send(request).await;
    let head = client.head().await;
    tokio::time::sleep(pause).await;
    // The upstream may be done: what the system takes in for Traygate can be a lot.
    let in_flight = pool_of(app, dialect).snapshot().in_flight;
    assert_eq!(in_flight, 1, "there is more to be read");
    client.rest(head).await
}

/// Neither a stream nor a whole answer that is read slowly is the upstream's fault; and the
/// breaker, which one failure would open, hears of none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_slowly_is_never_timed_out() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::start(move |request| {
        if request.wants_stream() {
            let text = "x".repeat(64 << 10);
            let event = format!(
                "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n"
            );
            let events = (0..MUCH >> 16).map(|_| event.clone());
            Reply::sse(events.chain([dialect.last_events().to_owned()]))
        } else {
            Reply::json(
                200,
                crate::support::upstream::chat_answer(&"x".repeat(MUCH)),
            )
        }
    })
    .await;
    let settings = "[limits]\ntimeout_secs = 4\nidle_secs = 4\nunstreamed_timeout_secs = 4\n\
                    [breaker]\nfailures = 1\n[dedup]\nenabled = false\n";
    let app = App::with(&up, settings).await;
    for request in [dialect.stream(), dialect.call()] {
        let answer = read_late(&app, dialect, request, 6.secs()).await;
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
        assert!(answer.bytes().len() > MUCH);
    }
    for row in app.rows(2).await {
        assert_eq!(row.outcome.as_deref(), Some("completed"));
    }
    assert_eq!(up.calls(), 2);
}

/// The upstream that dies while its client does not read is found dead when it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_slowly_does_not_hide_a_dead_upstream() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::start(move |_| {
        let comment = format!(": {}\n\n", "x".repeat(64 << 10));
        Reply::sse((0..MUCH >> 16).map(|_| comment.clone())).then_hang()
    })
    .await;
    let app = App::with(&up, &with_limits("idle_secs = 1")).await;
    let answer = read_late(&app, dialect, dialect.stream(), 2.secs()).await;
    let text = assert_cut(&answer);
    assert!(text[MUCH..].contains("limits.idle_secs"));
    up.wait_until_closed(0).await;
    until("the place to be free", || {
        pool_of(&app, dialect).snapshot().in_flight == 0
    })
    .await;
}

/// A body that streams through and stops coming keeps the upstream waiting, not the other way
/// round.
#[tokio::test]
async fn a_client_that_stops_sending_is_not_the_upstreams_fault() {
    let dialect = Dialect::OpenAi;
    let up = Upstream::chatting().await;
    let settings = "[limits]\nunstreamed_timeout_secs = 0.5\n[breaker]\nfailures = 1\n";
    let app = App::with(&up, settings).await;
    let mut stalls = app.client().await;
    stalls.send(post("/v1/moderations").upload_of(100)).await;
    stalls.write("{\"input\":").await.expect("taken");
    let answer = stalls.read_to_end().await;
    assert_eq!(answer.status(), 408);
    let (code, message) = dialect.error_of(&answer);
    assert_eq!(code, "bad_request");
    assert!(message.contains("0.5 s"), "{message}");
    up.wait_until_idle().await;

    let mut breaks = app.client().await;
    breaks.send(post("/v1/moderations").chunked_upload()).await;
    breaks.write_chunk(b"{").await.expect("taken");
    up.wait_for_requests(2).await;
    breaks.write("no chunk size\r\n").await.expect("taken");
    let answer = breaks.read_to_end().await;
    assert_eq!(answer.status(), 400);
    assert_eq!(dialect.error_of(&answer).0, "bad_request");

    assert_eq!(pool_of(&app, dialect).snapshot().in_flight, 0);
    assert_eq!(app.ask(dialect.call()).await.status(), 200);
    // One that comes slowly is not cut for it.
    let mut slow = app.client().await;
    slow.send(post("/v1/moderations").upload_of(20)).await;
    slow.write_slowly(b"{\"input\":\"0123456\"}x", 1, 100.ms())
        .await
        .expect("taken");
    assert_eq!(slow.read_to_end().await.status(), 200);
}

/// A provider that only keeps its connection open after `[DONE]` has not failed: the answer is
/// whole, and neither its reader nor its permit waits out the idle limit.
#[tokio::test]
async fn a_finished_answer_does_not_wait_for_its_connection_to_close() {
    let up = Upstream::start(|_| Reply::sse(chat_events(3)).then_hang()).await;
    let app = App::with(&up, &with_limits("idle_secs = 0.2")).await;
    let answer = app.chat(r#"{"model":"m","stream":true}"#).await;
    assert_eq!(answer.end, BodyEnd::Clean);
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));
}

/// In order as far as HTTP can tell: it passes as it is, and is not on record as complete.
#[tokio::test]
async fn a_stream_that_ends_without_its_last_event_is_on_record_as_broken() {
    let up = Upstream::start(|_| {
        let mut events = chat_events(3);
        events.truncate(2);
        Reply::sse(events)
    })
    .await;
    let app = App::before(&up).await;
    let answer = app.chat(r#"{"model":"m","stream":true}"#).await;
    assert_eq!(answer.end, BodyEnd::Clean, "the upstream's own end");
    let row = &app.rows(1).await[0];
    assert_eq!(row.outcome.as_deref(), Some("broken_stream"));
    let error = row.error.as_deref().unwrap_or_default();
    assert!(error.contains("without its last event"), "{error}");
}
