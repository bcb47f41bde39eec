//! What calls used: read off the answers of every dialect, asked for where a stream would not say
//! it, and estimated where nobody does.

use serde_json::{Value, json};
use traygate::store::queries::CallRow;

use crate::support::app::App;
use crate::support::client::{Answer, BodyEnd, Client, Outgoing, post};
use crate::support::upstream::{Gate, Reply, Request, Upstream, chat_answer, chat_events};
use crate::support::{Span as _, eventually, must};

const CHAT: &str = "/v1/chat/completions";
const ASKED: &str = r#""stream_options":{"include_usage":true},"#;
const USAGE: &str = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":1200,\"completion_tokens\":34,\"total_tokens\":1234,\"prompt_tokens_details\":{\"cached_tokens\":1000}}}\n\n";

/// Input, cached input, output and basis of a row.
type Tokens = (Option<u64>, Option<u64>, Option<u64>, Option<String>);

fn tokens(row: &CallRow) -> Tokens {
    let account = &row.account;
    (
        account.input_tokens,
        account.cached_input_tokens,
        account.output_tokens,
        account.usage_basis.as_deref().map(str::to_owned),
    )
}

fn reported(input: u64, cached: Option<u64>, output: u64) -> Tokens {
    (
        Some(input),
        cached,
        Some(output),
        Some("reported".to_owned()),
    )
}

fn stream_body(prompt: &str) -> String {
    json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": prompt}]})
        .to_string()
}

/// An OpenAI stream as it comes without usage.
fn silent_events(n: usize) -> Vec<String> {
    let mut events = chat_events(n);
    for event in &mut events[..=n] {
        let mut chunk: Value = serde_json::from_str(&event["data: ".len()..]).expect("an event");
        chunk["usage"] = Value::Null;
        *event = format!("data: {chunk}\n\n");
    }
    events
}

/// The same, with the usage chunk before its end.
fn counted_events(n: usize) -> Vec<String> {
    let mut events = silent_events(n);
    events.insert(n + 1, USAGE.to_owned());
    events
}

/// A provider that adds the usage chunk where it is asked to.
fn counting(request: &Request) -> Reply {
    if !request.wants_stream() {
        return Reply::json(200, chat_answer("hi"));
    }
    match request.json()["stream_options"]["include_usage"] == true {
        true => Reply::sse(counted_events(3)),
        false => Reply::sse(silent_events(3)),
    }
}

fn was_asked(up: &Upstream, call: usize) -> bool {
    up.call(call).request.json()["stream_options"]["include_usage"] == true
}

// --- Every dialect ----------------------------------------------------------------------------

macro_rules! fixture {
    ($name:literal) => {
        (
            $name,
            &include_bytes!(concat!("../../src-tauri/src/policy/usage/fixtures/", $name))[..],
        )
    };
}

fn is_usage_chunk(event: &str) -> bool {
    let data = event.strip_prefix("data: ").unwrap_or_default();
    let chunk: Value = serde_json::from_str(data).unwrap_or_default();
    chunk["choices"] == json!([]) && chunk["usage"].is_object()
}

#[tokio::test]
async fn every_dialect_is_on_record_with_its_counts() {
    let doubtful = |(input, cached, output, _): Tokens| -> Tokens {
        (input, cached, output, Some("doubtful".to_owned()))
    };
    let table = [
        (
            CHAT,
            fixture!("openai_chat.json"),
            reported(2008, Some(0), 266),
        ),
        (
            CHAT,
            fixture!("openai_chat.sse"),
            reported(50, Some(100_000), 500),
        ),
        (
            CHAT,
            fixture!("openai_chat_cache_write.json"),
            doubtful(reported(1000, Some(1000), 100)),
        ),
        (CHAT, fixture!("azure_chat.sse"), reported(9, Some(0), 2)),
        (CHAT, fixture!("groq_chat.sse"), reported(6, Some(12), 556)),
        (
            CHAT,
            fixture!("vllm_chat_continuous.sse"),
            reported(9, None, 2),
        ),
        (
            "/v1/completions",
            fixture!("openai_completions.json"),
            reported(5, None, 7),
        ),
        (
            "/v1/completions",
            fixture!("openai_completions.sse"),
            reported(6, None, 8),
        ),
        (
            "/v1/responses",
            fixture!("openai_responses.json"),
            reported(28, Some(300), 52),
        ),
        (
            "/v1/responses",
            fixture!("openai_responses.sse"),
            reported(11, Some(0), 1035),
        ),
        (
            "/v1/responses/compact",
            fixture!("openai_responses_compact.json"),
            reported(139, Some(0), 438),
        ),
        (
            "/v1/embeddings",
            fixture!("openai_embeddings.json"),
            reported(8, None, 0),
        ),
        (
            "/v1/messages",
            fixture!("anthropic_messages.json"),
            reported(50, Some(100_000), 500),
        ),
        (
            "/v1/messages",
            fixture!("anthropic_messages.sse"),
            reported(16, Some(300), 15),
        ),
        (
            "/api/chat",
            fixture!("ollama_chat.ndjson"),
            reported(26, None, 298),
        ),
        (
            "/api/generate",
            fixture!("ollama_generate.json"),
            reported(26, None, 290),
        ),
        (
            "/api/embed",
            fixture!("ollama_embed.json"),
            reported(8, None, 0),
        ),
        (
            "/llama-cpp/completion",
            fixture!("llama_cpp_completion.json"),
            reported(4, Some(37), 64),
        ),
        (
            "/llama-cpp/completion",
            fixture!("llama_cpp_completion.sse"),
            reported(6, Some(8), 16),
        ),
    ];
    let answers: Vec<(&str, &[u8])> = table.iter().map(|(_, fixture, _)| *fixture).collect();
    let up = Upstream::start(move |request| {
        let at = request.json()["seed"].as_u64().expect("a number");
        let (name, body) = answers[usize::try_from(at).expect("small")];
        let kind = match name.rsplit('.').next() {
            Some("sse") => "text/event-stream",
            Some("ndjson") => "application/x-ndjson",
            _ => "application/json",
        };
        // Odd pieces, none of which is an event.
        Reply::chunks(kind, body.chunks(97))
    })
    .await;
    let more = format!(
        "[[provider]]\nname = \"llama-cpp\"\nbase_url = \"{}\"\n",
        up.url()
    );
    let app = App::with(&up, &more).await;
    for (at, (path, (name, body), expected)) in table.iter().enumerate() {
        let streams = !name.ends_with(".json");
        let asked = json!({"model": "m", "seed": at, "stream": streams}).to_string();
        let answer = app.post(path, &asked).await;
        assert_eq!(answer.status(), 200, "{name}");
        let rows = app.rows(at + 1).await;
        assert_eq!(&tokens(&rows[0]), expected, "{name}");
        // All of it, save the one chunk that Traygate has asked for.
        let text = String::from_utf8_lossy(body);
        let expected: String = text
            .split_inclusive("\n\n")
            .filter(|event| *path != CHAT || !is_usage_chunk(event))
            .collect();
        assert_eq!(answer.text(), expected, "{name}");
    }
}

#[tokio::test]
async fn cache_writes_and_reasoning_are_apart() {
    let (_, body) = fixture!("anthropic_messages.json");
    let up = Upstream::start(move |_| Reply::json(200, body)).await;
    let app = App::before(&up).await;
    app.messages(r#"{"model":"claude"}"#).await;
    let account = app.rows(1).await[0].account.clone();
    assert_eq!(
        (account.cache_write_5m_tokens, account.cache_write_1h_tokens),
        (Some(1000), Some(4000))
    );
    let (_, body) = fixture!("openai_chat.json");
    up.set_handler(move |_| Reply::json(200, body));
    app.chat(r#"{"model":"gpt"}"#).await;
    let account = app.rows(2).await[0].account.clone();
    assert_eq!(account.reasoning_tokens, Some(261));
}

// --- Asking -----------------------------------------------------------------------------------

#[tokio::test]
async fn a_stream_is_asked_and_its_client_sees_nothing_of_it() {
    let up = Upstream::start(counting).await;
    let app = App::before(&up).await;
    let body = r#" {"model":"m" , "stream":true,"x":1.50,"messages":[]}"#;
    let request = App::chat_request(body).header("accept-encoding", "gzip, br");
    let answer = app.ask(request).await;
    let seen = up.call(0).request;
    let expected = format!(" {{{ASKED}{}", &body[2..]);
    assert_eq!(String::from_utf8_lossy(&seen.body), expected);
    assert_eq!(seen.header("accept-encoding"), Some("identity"));
    assert_eq!(
        seen.header("content-length"),
        Some(&*expected.len().to_string())
    );
    assert_eq!(answer.text(), silent_events(3).concat());
    assert_eq!(answer.end, BodyEnd::Clean);
    assert_eq!(tokens(&app.rows(1).await[0]), reported(200, Some(1000), 34));

    // A kept answer is what the first client got.
    let request = App::chat_request(body).header("accept-encoding", "gzip, br");
    let again = app.ask(request).await;
    assert_eq!(again.header("x-traygate-dedup"), Some("cached"));
    assert_eq!(again.text(), silent_events(3).concat());
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn a_follower_gets_what_its_leader_gets() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| counting(request).held_by(&held)).await;
    let app = App::before(&up).await;
    let body = stream_body("both");
    let follow = async {
        up.wait_for_calls(1).await;
        let mut client = app.client().await;
        client.send(App::chat_request(&body)).await;
        eventually("a follower", async || {
            app.running().core().live.all().len() == 2
        })
        .await;
        gate.open();
        client.read_to_end().await
    };
    let (leader, follower) = tokio::join!(app.chat(&body), follow);
    assert_eq!(follower.header("x-traygate-dedup"), Some("joined"));
    for answer in [leader, follower] {
        assert_eq!(answer.text(), silent_events(3).concat());
    }
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn the_rest_of_a_stream_comes_byte_for_byte_however_it_is_cut() {
    let comment = ": keep-alive\n\n";
    let mut with = counted_events(2);
    let mut without = silent_events(2);
    for events in [&mut with, &mut without] {
        events.insert(0, comment.to_owned());
    }
    for end in ["\n", "\r\n", "\r"] {
        let line_ends = |events: &[String]| events.concat().replace('\n', end);
        let (sent, expected) = (line_ends(&with), line_ends(&without));
        for size in [1, 7, 64, 100_000] {
            let chunks: Vec<Vec<u8>> = sent.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            let up = Upstream::start(move |_| {
                Reply::sse(&chunks)
                    .header("etag", "\"of-the-whole\"")
                    .header("x-request-id", "req_1")
            })
            .await;
            let app = App::before(&up).await;
            let answer = app.chat(&stream_body("pieces")).await;
            let what = format!("{end:?} in pieces of {size}");
            assert_eq!(answer.text(), expected, "{what}");
            assert_eq!(answer.end, BodyEnd::Clean, "{what}");
            assert_eq!(answer.header("etag"), None, "{what}");
            assert_eq!(answer.header("x-request-id"), Some("req_1"), "{what}");
            let row = &app.rows(1).await[0];
            assert_eq!(tokens(row), reported(200, Some(1000), 34), "{what}");
            assert_eq!(row.outcome.as_deref(), Some("completed"), "{what}");
        }
    }
}

#[tokio::test]
async fn a_stream_of_known_length_loses_the_length_with_the_chunk() {
    let sent = counted_events(1).concat();
    let up = Upstream::start(move |_| Reply::of(200, "text/event-stream", &sent)).await;
    let app = App::before(&up).await;
    let answer = app.chat(&stream_body("known length")).await;
    assert_eq!(answer.text(), silent_events(1).concat());
    assert_eq!(answer.end, BodyEnd::Clean);
    assert_eq!(answer.header("content-length"), None);
}

#[tokio::test]
async fn the_clients_own_choice_stands() {
    let up = Upstream::start(counting).await;
    let app = App::before(&up).await;
    for (n, (options, expected)) in [
        (r#"{"include_usage":true}"#, counted_events(3)),
        (r#"{"include_usage":false}"#, silent_events(3)),
        (r#"{ "include_usage" : "?" }"#, silent_events(3)),
    ]
    .into_iter()
    .enumerate()
    {
        let body = format!(r#"{{"model":"m","stream":true,"stream_options":{options},"n":1}}"#);
        let answer = app.chat(&body).await;
        assert_eq!(up.call(n).request.body, body, "passed as it is");
        assert_eq!(answer.text(), expected.concat(), "{options}");
    }
    // Options that say nothing of it are kept, and one is added.
    let body = r#"{"model":"m","stream":true,"stream_options":{"include_obfuscation":false}}"#;
    let answer = app.chat(body).await;
    let options = up.call(3).request.json()["stream_options"].clone();
    let both = json!({"include_usage": true, "include_obfuscation": false});
    assert_eq!(options, both);
    assert_eq!(answer.text(), silent_events(3).concat());
}

#[tokio::test]
async fn what_must_not_change_is_not_asked() {
    let up = Upstream::start(counting).await;
    let more = format!(
        "[[provider]]\nname = \"quiet\"\nkind = \"openai\"\nbase_url = \"{}/v1\"\nask_usage = false\n",
        up.url()
    );
    let app = App::with(&up, &more).await;
    let body = stream_body("unasked");
    let plain = || App::chat_request(&body);
    let table = [
        (
            "no stream",
            App::chat_request(r#"{"model":"m","stream":false}"#),
        ),
        ("another route", post("/v1/completions").json(&body)),
        ("signed", plain().header("content-digest", "sha-256=:x:")),
        (
            "signed for AWS",
            plain().header("authorization", "AWS4-HMAC-SHA256 Credential=x"),
        ),
        ("turned off", post("/quiet/v1/chat/completions").json(&body)),
    ];
    for (n, (what, request)) in table.into_iter().enumerate() {
        let answer = app.ask(request).await;
        assert_eq!(answer.status(), 200, "{what}");
        assert!(!was_asked(&up, n), "{what}");
    }
    let asked = up.calls();
    app.running()
        .core()
        .set_mode(traygate::mode::Mode::Bypass, None);
    let answer = app.chat(&stream_body("bypass")).await;
    assert_eq!(answer.text(), silent_events(3).concat());
    assert_eq!(up.call(asked).request.body, stream_body("bypass"));
}

#[tokio::test]
async fn a_compressed_answer_passes_as_it_is_and_is_read() {
    use std::io::Write as _;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(counted_events(1).concat().as_bytes())
        .expect("memory");
    let coded = gzip.finish().expect("memory");
    let sent = coded.clone();
    let up = Upstream::start(move |_| {
        Reply::of(200, "text/event-stream", &sent).header("content-encoding", "gzip")
    })
    .await;
    let app = App::before(&up).await;
    let answer = app.chat(&stream_body("compressed anyway")).await;
    assert!(was_asked(&up, 0));
    assert_eq!(answer.bytes(), coded);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(tokens(&app.rows(1).await[0]), reported(200, Some(1000), 34));
}

#[tokio::test]
async fn a_break_after_the_usage_chunk_still_says_so_in_an_event() {
    let mut events = counted_events(1);
    events.pop();
    let up = Upstream::start(move |_| Reply::sse(&events).then_close()).await;
    let app = App::before(&up).await;
    let answer = app.chat(&stream_body("broken")).await;
    assert_ne!(answer.end, BodyEnd::Clean);
    let text = answer.text();
    assert!(!text.contains("1234"), "{text}");
    assert!(text.contains("data: {\"error\""), "{text}");
    let row = &app.rows(1).await[0];
    assert_eq!(row.outcome.as_deref(), Some("broken_stream"));
    assert_eq!(tokens(row), reported(200, Some(1000), 34));
}

#[tokio::test]
async fn half_an_event_before_a_break_is_not_kept_back() {
    let events = silent_events(1);
    let half = "data: {\"choices\":[],\"usa";
    let up = Upstream::start(move |_| Reply::sse([&events[0], half]).then_close()).await;
    let app = App::before(&up).await;
    let answer = app.chat(&stream_body("half")).await;
    assert_ne!(answer.end, BodyEnd::Clean);
    assert_eq!(answer.text(), format!("{}{half}", silent_events(1)[0]));
}

// --- Refusals ---------------------------------------------------------------------------------

/// Knows no `stream_options`, except for the model `m2`.
fn refusing(request: &Request) -> Reply {
    let body = request.json();
    if !body["stream_options"].is_null() && body["model"] != "m2" {
        let told = "Unrecognized request argument supplied: stream_options";
        return Reply::json(
            400,
            json!({"error": {"message": told, "type": "invalid_request_error"}}).to_string(),
        );
    }
    counting(request)
}

#[tokio::test]
async fn a_refusal_is_never_seen_and_not_asked_for_again() {
    let up = Upstream::start(refusing).await;
    let app = App::before(&up).await;
    let request = || App::chat_request(&stream_body("one")).header("accept-encoding", "br");
    let answer = app.ask(request()).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.text(), silent_events(3).concat());
    assert_eq!(up.calls(), 2);
    assert!(was_asked(&up, 0));
    let second = up.call(1).request;
    assert_eq!(second.body, stream_body("one"), "the client's own bytes");
    assert_eq!(second.header("accept-encoding"), Some("br"));
    let row = &app.rows(1).await[0];
    assert_eq!(row.status, Some(200));
    assert_eq!(row.account.usage_basis.as_deref(), Some("estimated"));

    app.chat(&stream_body("two")).await;
    assert_eq!(up.calls(), 3);
    assert_eq!(up.call(2).request.body, stream_body("two"));
    // Another model may have another mind.
    let body = r#"{"model":"m2","stream":true}"#;
    assert_eq!(app.chat(body).await.text(), silent_events(3).concat());
    assert_eq!(up.calls(), 4);
    assert!(was_asked(&up, 3));
}

#[tokio::test]
async fn another_error_passes_as_it_is() {
    let told = r#"{"error":{"message":"max_tokens is too large"}}"#;
    let up = Upstream::start(move |_| Reply::json(400, told)).await;
    let app = App::before(&up).await;
    let answer = app.chat(&stream_body("wrong")).await;
    assert_eq!((answer.status(), answer.text().as_str()), (400, told));
    assert_eq!(
        answer.header("content-length"),
        Some(&*told.len().to_string())
    );
    assert_eq!(up.calls(), 1);
    assert_eq!(tokens(&app.rows(1).await[0]), (None, None, None, None));

    // A long one too, in pieces.
    let long = format!("{{\"error\":\"{}\"}}", "x".repeat(200_000));
    let sent = long.clone();
    up.set_handler(move |_| {
        let reply = Reply::status(422).header("content-type", "application/json");
        let pieces = sent.as_bytes().chunks(10_000);
        pieces.fold(reply.chunked(), Reply::then_body)
    });
    let answer = app.chat(&stream_body("wrong, and long")).await;
    assert_eq!((answer.status(), answer.end), (422, BodyEnd::Clean));
    assert_eq!(answer.text(), long);
    assert_eq!(up.calls(), 2);
}

// --- Estimates --------------------------------------------------------------------------------

/// The one row, once it has ended.
async fn estimated(app: &App) -> (u64, u64) {
    let (input, _, output, basis) = tokens(&app.rows(1).await[0]);
    assert_eq!(basis.as_deref(), Some("estimated"));
    (input.expect("input"), output.expect("output"))
}

/// `hello world`, its line end and what frames a message.
const HELLO: u64 = 7;

#[tokio::test]
async fn a_stream_that_is_left_is_estimated_as_far_as_it_came() {
    let mut events = silent_events(4);
    events.truncate(4);
    let up = Upstream::start(move |_| Reply::sse(&events).then_hang()).await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client
        .send(App::chat_request(&stream_body("hello world")))
        .await;
    client.head().await;
    client.read_until("w3 ").await;
    drop(client);
    assert_eq!(estimated(&app).await, (HELLO, 9), "`w0 w1 w2 w3 `");
    let row = &app.rows(1).await[0];
    assert_eq!(row.outcome.as_deref(), Some("client_left"));
}

#[tokio::test]
async fn an_anthropic_stream_that_breaks_keeps_what_was_said() {
    let (_, body) = fixture!("anthropic_messages_broken.sse");
    let up = Upstream::start(move |_| Reply::sse([body]).then_close()).await;
    let app = App::before(&up).await;
    let answer = app.messages(r#"{"model":"claude","stream":true}"#).await;
    assert_ne!(answer.end, BodyEnd::Clean);
    let (input, cached, output, basis) = tokens(&app.rows(1).await[0]);
    assert_eq!((input, cached), (Some(16), Some(300)));
    assert!(output > Some(0));
    assert_eq!(basis.as_deref(), Some("estimated"));
}

#[tokio::test]
async fn a_silent_provider_is_estimated_and_an_error_is_not() {
    let up = Upstream::start(|request| match request.json()["model"].as_str() {
        Some("silent") => Reply::json(
            200,
            r#"{"choices":[{"message":{"content":"hello world"},"finish_reason":"stop"}]}"#,
        ),
        Some("error") => Reply::error(500),
        Some("late-error") => Reply::json(200, r#"{"error":{"message":"no"}}"#),
        _ => Reply::close(),
    })
    .await;
    let app = App::before(&up).await;
    let ask = async |model: &str, rows: usize| {
        let body =
            json!({"model": model, "messages": [{"role": "user", "content": "hello world"}]});
        app.chat(&body.to_string()).await;
        tokens(&app.rows(rows).await[0])
    };
    let (input, _, output, basis) = ask("silent", 1).await;
    assert_eq!((input, output), (Some(HELLO), Some(2)));
    assert_eq!(basis.as_deref(), Some("estimated"));
    for (n, model) in ["error", "late-error", "closing"].into_iter().enumerate() {
        assert_eq!(ask(model, n + 2).await, (None, None, None, None), "{model}");
    }
}

#[tokio::test]
async fn a_call_that_is_left_before_its_answer_has_used_its_input() {
    let up = Upstream::hanging().await;
    let app = App::with(&up, "[dedup]\nlinger_secs = 0\n").await;
    let mut client = app.client().await;
    client
        .send(App::chat_request(&stream_body("hello world")))
        .await;
    up.wait_for_calls(1).await;
    drop(client);
    assert_eq!(estimated(&app).await, (HELLO, 0));
}

#[tokio::test]
async fn a_large_body_that_streams_through_counts_by_its_length() {
    let up = Upstream::start(|_| Reply::json(200, r#"{"choices":[{"message":{"content":"hi"}}]}"#))
        .await;
    let app = App::with(&up, "[server]\nmax_body_mb = 1\n").await;
    let body = format!(r#"{{"model":"m","pad":"{}"}}"#, "x".repeat(2 << 20));
    app.chat(&body).await;
    let (input, output) = estimated(&app).await;
    assert_eq!((input, output), ((body.len() as u64).div_ceil(4), 1));
}

#[tokio::test]
async fn a_compressed_request_is_read_for_its_estimate() {
    let up = Upstream::start(|_| Reply::json(200, r#"{"choices":[{"message":{"content":"hi"}}]}"#))
        .await;
    let app = App::before(&up).await;
    let plain = r#"{"model":"m","messages":[{"role":"user","content":"hello world"}]}"#;
    let coded = zstd::encode_all(plain.as_bytes(), 3).expect("memory");
    let request: Outgoing = post(CHAT)
        .header("content-type", "application/json")
        .header("content-encoding", "zstd")
        .body(&coded);
    assert_eq!(app.ask(request).await.status(), 200);
    assert_eq!(up.call(0).request.body, coded);
    assert_eq!(estimated(&app).await, (HELLO, 1));
}

#[tokio::test]
async fn a_model_that_is_only_loaded_uses_nothing() {
    let up = Upstream::answering(r#"{"model":"m","response":"","done":true,"done_reason":"load"}"#)
        .await;
    let app = App::before(&up).await;
    app.post("/api/generate", r#"{"model":"m"}"#).await;
    assert_eq!(tokens(&app.rows(1).await[0]), (None, None, None, None));
}

#[tokio::test]
async fn a_thousand_estimates_hold_nobody_up() {
    let up = Upstream::start(|_| Reply::json(200, r#"{"choices":[{"message":{"content":"hi"}}]}"#))
        .await;
    let app = App::with(&up, "[limits]\nconcurrency = 64\n").await;
    let ask = async |client: &mut Client, n: usize| -> Answer {
        client
            .ask(App::chat_request(&stream_body(&format!("hello {n}"))))
            .await
    };
    let mut client = app.client().await;
    for n in 0..1000 {
        let answer = must("an answer", ask(&mut client, n)).await;
        assert_eq!(answer.status(), 200);
    }
    let rows = app.rows(1000).await;
    let all_known = rows.iter().all(|row| row.account.output_tokens == Some(1));
    assert!(all_known && rows.len() == 1000);
    // They are over: the program ends at once.
    must("the end", tokio::time::timeout(10.secs(), app.stop()))
        .await
        .expect("in time");
}
