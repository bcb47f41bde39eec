//! Bytes pass untouched, both ways: what arrives is compared with what was sent, byte by byte.

use std::io::Write as _;
use std::time::Duration;

use serde_json::json;

use super::support::app::App;
use super::support::client::{Answer, BodyEnd, Client, Outgoing, get, post};
use super::support::upstream::{Gate, Reply, Request, Upstream, chat_answer, chat_events};

/// Providers may fail as often as a test likes.
const NO_BREAKER: &str = "[breaker]\nfailures = 1000\nfailure_rate = 0\n";

/// A stream's request. It names `stream_options`, so that nothing has to be asked for it.
const STREAM: &str =
    r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[]}"#;

/// A body whose every byte says something: what a reader that rebuilt it would change.
const ODD: &str = "  {\"model\" :\t\"m\",\"seed\":9007199254740993,\r\n\"temperature\":1e3,\"top_p\":1.0,\
    \"zzz_unknown\":{\"b\":1,\"a\":[ ]},\"messages\":[{\"role\":\"user\",\"content\":\"\\u00e9 é \\/ \u{1f600}\",\
    \"cache_control\":{\"type\":\"ephemeral\"}}],\"user\":\"x\",\"user\":\"y\"}  \n";

/// Asks for a chat stream.
async fn stream(app: &App) -> Answer {
    app.chat(STREAM).await
}

fn assert_same(came: &[u8], sent: &[u8], what: &str) {
    let differs = came.iter().zip(sent).position(|(a, b)| a != b);
    assert!(
        came == sent,
        "{what}: {} bytes came for {} sent, the first difference at {differs:?}",
        came.len(),
        sent.len()
    );
}

// --- Requests ---------------------------------------------------------------------------------

// D26
#[tokio::test]
async fn request_bodies_arrive_as_they_were_sent() {
    let up = Upstream::start(|_| Reply::json(200, "{}")).await;
    let app = App::before(&up).await;
    let bodies: [&[u8]; 8] = [
        ODD.as_bytes(),
        b"{\"model\":\"m\",\"messages\":[}",
        b"not JSON at all",
        b"{\"model\":\"m\"",
        b"\xff\xfe\x00{\"model\":\"\xc3(\"}",
        b"[1,2,3]",
        b"\n\n",
        b"",
    ];
    let mut sent = Vec::new();
    for path in [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/api/chat",
        "/v1/audio/speech",
        "/v1/messages/count_tokens",
    ] {
        for body in bodies {
            let answer = app.ask(post(path).json(body)).await;
            assert_eq!(answer.status(), 200, "{path}: {}", answer.text());
            sent.push((path, body));
        }
    }
    let requests = up.requests();
    assert_eq!(requests.len(), sent.len());
    for (seen, (path, body)) in requests.iter().zip(sent) {
        assert_eq!(seen.request.target, path);
        assert_same(&seen.request.body, body, path);
        let length = body.len().to_string();
        assert_eq!(
            seen.request.header("content-length"),
            Some(&*length),
            "{path}"
        );
    }
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_arrives_whole() {
    let up = Upstream::answering(chat_answer("x")).await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client
        .send(post("/v1/chat/completions").upload_of(ODD.len() as u64))
        .await;
    client
        .write_slowly(ODD.as_bytes(), 1, Duration::ZERO)
        .await
        .expect("taken");
    assert_eq!(client.read_to_end().await.status(), 200);
    assert_same(&up.call(0).request.body, ODD.as_bytes(), "a slow body");

    client
        .send(post("/v1/chat/completions").chunked_upload())
        .await;
    for part in ODD.as_bytes().chunks(7) {
        client.write_chunk(part).await.expect("taken");
    }
    client.write_last_chunk().await.expect("taken");
    let answer = client.read_to_end().await;
    // The same bytes, however they were cut: the same call.
    assert_eq!(answer.header("x-traygate-dedup"), Some("cached"));
    assert_eq!(up.calls(), 1);
}

// --- Streams ----------------------------------------------------------------------------------

/// Sends `chunks` as an answer to a chat stream and expects them at the client. Returns the label
/// of a second equal call, which tells whether the end of the first was understood.
async fn streams_untouched(what: &str, chunks: Vec<Vec<u8>>) -> String {
    let sent = chunks.concat();
    let up = Upstream::start(move |_| Reply::sse(&chunks)).await;
    let app = App::before(&up).await;
    let answer = stream(&app).await;
    assert_eq!(answer.end, BodyEnd::Clean, "{what}");
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream"),
        "{what}"
    );
    assert_same(&answer.bytes(), &sent, what);
    assert_eq!(up.calls(), 1, "{what}");
    let row = &app.rows(1).await[0];
    assert_eq!(
        (row.outcome.as_deref(), &row.error),
        (Some("completed"), &None),
        "{what}"
    );
    assert!(row.first_token.is_some(), "{what}: no content was seen");
    let again = stream(&app).await;
    assert_same(&again.bytes(), &sent, what);
    again
        .header("x-traygate-dedup")
        .expect("a label")
        .to_owned()
}

fn with_line_ends(end: &str) -> Vec<Vec<u8>> {
    chat_events(3)
        .iter()
        .map(|event| event.replace('\n', end).into_bytes())
        .collect()
}

// D01
#[tokio::test]
async fn every_line_end_passes_and_is_understood() {
    let crlf = with_line_ends("\r\n");
    let split: Vec<Vec<u8>> = crlf
        .concat()
        .split_inclusive(|byte| *byte == b'\r')
        .map(<[u8]>::to_vec)
        .collect();
    assert!(split.len() > 10 && split[1].starts_with(b"\n"));
    let in_one = vec![crlf.concat()];
    let mixed = [with_line_ends("\r\n"), with_line_ends("\n")].concat();
    for (what, chunks) in [
        ("LF", with_line_ends("\n")),
        ("CRLF", crlf),
        ("CR and LF in different segments", split),
        ("bare CR", with_line_ends("\r")),
        ("all in one segment", in_one),
        ("mixed", mixed),
    ] {
        assert_eq!(streams_untouched(what, chunks).await, "cached", "{what}");
    }
}

// D02, D06
#[tokio::test]
async fn comments_and_unusual_endings_pass() {
    let events = chat_events(2);
    let lines = |parts: &[&str]| parts.iter().map(|part| part.as_bytes().to_vec()).collect();
    let comment = ": OPENROUTER PROCESSING\n\n";
    let done = "data: [DONE]\n\n";
    let table: [(&str, Vec<Vec<u8>>); 6] = [
        (
            "comments before, between and after",
            lines(&[
                comment, comment, &events[0], ":\n\n", &events[2], done, comment,
            ]),
        ),
        ("no [DONE]", lines(&[&events[0], &events[1], &events[2]])),
        (
            "the last event without its blank line",
            lines(&[&events[0], &events[2], "data: [DONE]"]),
        ),
        (
            "a last event that is no more than begun",
            lines(&[&events[0], &events[2], done, "data: "]),
        ),
        (
            "ids, retries, unknown fields and a byte order mark",
            lines(&[
                "\u{feff}id: 1\nretry: 3\nfoo: bar\n",
                &events[0],
                &events[2],
                done,
            ]),
        ),
        (
            // D05: Azure's first chunk.
            "empty choices first",
            lines(&[
                "data: {\"choices\":[],\"id\":\"\",\"model\":\"\",\"prompt_filter_results\":[]}\n\n",
                &events[0],
                &events[2],
                done,
            ]),
        ),
    ];
    for (what, chunks) in table {
        streams_untouched(what, chunks).await;
    }
}

// D03
#[tokio::test]
async fn characters_split_over_chunks_arrive_unharmed() {
    let text = "日本語 \u{1f469}\u{200d}\u{1f4bb} é";
    let delta = |delta: serde_json::Value, finish: serde_json::Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        format!(
            "data: {}\n\n",
            json!({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})
        )
    };
    let call = json!({"tool_calls": [{"index": 0, "id": "t", "type": "function",
        "function": {"name": "write", "arguments": format!("{{\"text\":\"{text}\"}}")}}]});
    let whole = delta(json!({"content": text}), json!(null))
        + &delta(call, json!(null))
        + &delta(json!({}), json!("tool_calls"))
        + "data: [DONE]\n\n";
    let bytes = whole.into_bytes().into_iter().map(|byte| vec![byte]);
    streams_untouched("one byte a chunk", bytes.collect()).await;
}

// D07
#[tokio::test]
async fn anthropic_event_names_and_pings_pass() {
    let events = anthropic_events();
    let sent = events.concat();
    let up = Upstream::start(move |_| Reply::sse(&events)).await;
    let app = App::before(&up).await;
    let answer = app.messages(r#"{"model":"c","stream":true}"#).await;
    assert_same(&answer.bytes(), sent.as_bytes(), "Anthropic's events");
    assert_eq!((answer.end, up.calls()), (BodyEnd::Clean, 1));
    assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));
}

fn anthropic_events() -> Vec<String> {
    let event = |name: &str, body: serde_json::Value| format!("event: {name}\ndata: {body}\n\n");
    let ping = event("ping", json!({"type": "ping"}));
    vec![
        event(
            "message_start",
            json!({"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant",
                "model": "c", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}}),
        ),
        ping.clone(),
        event(
            "content_block_start",
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        ),
        event(
            "content_block_delta",
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
        ),
        ping,
        event(
            "content_block_stop",
            json!({"type": "content_block_stop", "index": 0}),
        ),
        event(
            "message_delta",
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
        ),
        event("message_stop", json!({"type": "message_stop"})),
    ]
}

// D04
#[tokio::test]
async fn an_event_of_five_megabytes_passes_as_it_comes() {
    let gate = Gate::new();
    let half = "x".repeat(5 << 19);
    let first =
        format!("data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{half}");
    let second = format!("{half}\"}}}}]}}\n\n") + &chat_events(1).concat();
    let sent = format!("{first}{second}");
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| Reply::sse([&first]).then_wait_for(&gate).then_body(&second)
    })
    .await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client.send(App::chat_request(STREAM)).await;
    let head = client.head().await;
    let mut came = Vec::new();
    // Nobody waits for the event's end: its first half is here before the second is sent.
    while came.len() < half.len() {
        came.extend_from_slice(&client.piece().await.expect("more of the event").bytes);
    }
    gate.open();
    let answer = client.rest(head).await;
    came.extend(answer.bytes());
    assert_same(&came, sent.as_bytes(), "a large event");
    assert_eq!(answer.end, BodyEnd::Clean);
    assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));
}

// D09
#[tokio::test]
async fn chunks_pass_one_by_one_as_they_come() {
    let lines: Vec<String> = (0..6)
        .map(|n| {
            format!(
                "{{\"message\":{{\"content\":\"w{n}\"}},\"done\":{}}}\n",
                n == 5
            )
        })
        .collect();
    let blanks: Vec<String> = ["\n", "\n", " \n"]
        .into_iter()
        .map(str::to_owned)
        .chain([chat_answer("at last")])
        .collect();
    let mut gzipped = Vec::new();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for event in chat_events(4) {
        gzip.write_all(event.as_bytes()).expect("memory");
        gzip.flush().expect("memory");
        gzipped.push(std::mem::take(gzip.get_mut()));
    }
    let text = |parts: Vec<String>| {
        parts
            .into_iter()
            .map(String::into_bytes)
            .collect::<Vec<_>>()
    };
    let table = [
        (
            "SSE",
            "/v1/chat/completions",
            "text/event-stream",
            "",
            text(chat_events(5)),
        ),
        (
            "half events",
            "/v1/chat/completions",
            "text/event-stream",
            "",
            text(
                chat_events(5)
                    .concat()
                    .as_bytes()
                    .chunks(37)
                    .map(|part| String::from_utf8_lossy(part).into_owned())
                    .collect(),
            ),
        ),
        (
            "gzipped SSE",
            "/v1/chat/completions",
            "text/event-stream",
            "gzip",
            gzipped,
        ),
        (
            "Ollama's NDJSON",
            "/api/chat",
            "application/x-ndjson",
            "",
            text(lines),
        ),
        // D10
        (
            "blank lines before JSON",
            "/v1/chat/completions",
            "application/json",
            "",
            text(blanks),
        ),
        (
            "a file",
            "/v1/files/f/content",
            "application/octet-stream",
            "",
            vec![vec![0, 255], vec![13, 10], vec![0]],
        ),
    ];
    for (what, path, content_type, encoding, chunks) in table {
        let gate = Gate::new();
        let up = Upstream::start({
            let (gate, chunks) = (gate.clone(), chunks.clone());
            move |_| {
                let mut reply = Reply::chunks(content_type, [] as [&str; 0]);
                if !encoding.is_empty() {
                    reply = reply.header("content-encoding", encoding);
                }
                chunks.iter().fold(reply, |reply, chunk| {
                    reply.then_body(chunk).then_wait_for(&gate)
                })
            }
        })
        .await;
        let app = App::before(&up).await;
        let mut client = app.client().await;
        client.send(post(path).json(STREAM)).await;
        let head = client.head().await;
        assert_eq!(
            head.headers.get("content-type"),
            Some(content_type),
            "{what}"
        );
        for chunk in &chunks {
            // The next chunk is sent only when this one is here.
            let piece = client.piece().await.expect(what);
            assert_same(&piece.bytes, chunk, what);
            gate.pass(1);
        }
        let answer = client.rest(head).await;
        assert_eq!(
            (answer.end, answer.pieces.len()),
            (BodyEnd::Clean, 0),
            "{what}"
        );
        let row = &app.rows(1).await[0];
        assert_eq!(row.outcome.as_deref(), Some("completed"), "{what}: {row:?}");
    }
}

#[tokio::test]
async fn no_chunk_waits_for_a_delayed_acknowledgement() {
    const CHUNKS: usize = 60;
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| {
            (0..CHUNKS).fold(Reply::sse([] as [&str; 0]), |reply, _| {
                reply
                    .then_body("data: {\"choices\":[]}\n\n")
                    // The second would wait for the first to be acknowledged.
                    .then_wait(Duration::from_millis(3))
                    .then_body(": second\n\n")
                    .then_wait_for(&gate)
            })
        }
    })
    .await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client.send(App::chat_request(STREAM)).await;
    client.head().await;
    let mut spans = Vec::new();
    for _ in 0..CHUNKS {
        let before = super::support::now();
        client.read_until(": second\n\n").await;
        spans.push(super::support::now() - before);
        gate.pass(1);
    }
    spans.sort_unstable();
    // A delayed acknowledgement takes 40 ms (Linux), every time; a busy machine is slow only at
    // times.
    let quartile = spans[CHUNKS / 4];
    assert!(quartile < Duration::from_millis(20), "{spans:?}");
}

// --- Answers that are not streams ---------------------------------------------------------------

#[tokio::test]
async fn answers_arrive_as_they_were_sent() {
    let odd = format!("{{\"a\" : 1e3,\"a\":9007199254740993 , \"x\":\"\\u00e9\"}}\r\n{ODD}");
    let up = Upstream::start(move |_| Reply::json(200, &odd)).await;
    let app = App::before(&up).await;
    let answer = app.chat(r#"{"model":"m"}"#).await;
    let expected = format!("{{\"a\" : 1e3,\"a\":9007199254740993 , \"x\":\"\\u00e9\"}}\r\n{ODD}");
    assert_same(&answer.bytes(), expected.as_bytes(), "an odd answer");
    let length = expected.len().to_string();
    assert_eq!(answer.header("content-length"), Some(&*length));
    assert_eq!(answer.header("transfer-encoding"), None);

    // Neither chunked nor counted, as HTTP/1.0 servers answer.
    up.set_handler(|_| Reply::json(200, ODD).until_close());
    let answer = app.chat(r#"{"model":"m2"}"#).await;
    assert_same(&answer.bytes(), ODD.as_bytes(), "an answer until close");
    assert_eq!(answer.end, BodyEnd::Clean);
}

// D11, D34
#[tokio::test]
async fn statuses_types_and_bodies_of_errors_pass_as_they_are() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, NO_BREAKER).await;
    let table: [(u16, &str, &str, Option<&str>); 16] = [
        (
            400,
            "application/json",
            "[{\"error\":{\"code\":400,\"message\":\"an array\"}}]",
            Some("an array"),
        ),
        (400, "application/json", r#"{"error":"text"}"#, Some("text")),
        (
            400,
            "application/json",
            r#"{"detail":[{"loc":["body"],"msg":"required"}]}"#,
            None,
        ),
        (400, "text/html; charset=utf-8", "<html>bad</html>", None),
        (400, "application/json", "", None),
        (
            401,
            "application/json",
            r#"{"error":{"message":"no such key","type":"invalid_request_error"}}"#,
            Some("no such key"),
        ),
        (
            402,
            "application/json",
            "{\"error\":{\"message\":\"pay\"}}",
            Some("pay"),
        ),
        (403, "application/problem+json", "{}", None),
        (404, "application/json", "{ \"error\" : { } }\n", None),
        (409, "text/plain", "conflict", None),
        (
            413,
            "application/json",
            r#"{"type":"error","error":{"type":"request_too_large","message":"m"}}"#,
            Some("m"),
        ),
        (422, "application/json", "{\"x\":1}", None),
        (
            429,
            "application/json",
            r#"{"error":{"message":"slow down","code":"rate_limit_exceeded"}}"#,
            Some("slow down"),
        ),
        (502, "text/html", "<h1>502 Bad Gateway</h1>", None),
        (503, "text/plain", "", None),
        (
            529,
            "application/json",
            r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
            Some("Overloaded"),
        ),
    ];
    let mut count = 0;
    for (status, content_type, body, told) in table {
        up.set_handler(move |_| Reply::of(status, content_type, body));
        for (path, request) in [
            ("/v1/chat/completions", STREAM),
            ("/v1/chat/completions", "{\"model\":\"m\"}"),
            ("/v1/messages", "{\"model\":\"m\",\"stream\":true}"),
        ] {
            let answer = app.post(path, request).await;
            count += 1;
            let what = format!("{status} {content_type} {body} on {path}");
            assert_eq!(answer.status(), status, "{what}");
            assert_eq!(answer.header("content-type"), Some(content_type), "{what}");
            assert_eq!(answer.header("x-traygate-dedup"), Some("miss"), "{what}");
            assert_eq!(answer.header("x-traygate-error"), None, "{what}");
            assert_same(&answer.bytes(), body.as_bytes(), &what);
            let row = &app.rows(count).await[0];
            assert_eq!(
                (row.outcome.as_deref(), row.status),
                (Some("upstream_error"), Some(status)),
                "{what}"
            );
            let error = row.error.as_deref().unwrap_or_default();
            assert!(
                error.starts_with(&format!("status {status}")),
                "{what}: {error}"
            );
            assert!(
                told.is_none_or(|told| error.contains(told)),
                "{what}: {error}"
            );
        }
    }
    assert_eq!(up.calls(), count);
}

// D11 (c), (d)
#[tokio::test]
async fn a_stream_answered_otherwise_is_passed_as_it_is() {
    let up = Upstream::answering(chat_answer("all at once")).await;
    let app = App::before(&up).await;
    let answer = stream(&app).await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.text(), chat_answer("all at once"));
    let addr = up.stop().await;
    let refused = app
        .chat(r#"{"model":"other","stream":true,"stream_options":{}}"#)
        .await;
    assert_eq!(refused.status(), 502, "nothing listens at {addr} any more");
    assert_eq!(refused.header("content-type"), Some("application/json"));
    assert_eq!(refused.json()["error"]["code"], "upstream_unreachable");
}

// D08
#[tokio::test]
async fn an_error_event_in_mid_stream_passes_and_nothing_is_added() {
    let anthropic = anthropic_events()[..4].concat()
        + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"Internal\"}}\n\n";
    let chat = chat_events(2)[..2].concat()
        + "data: {\"error\":{\"code\":502,\"message\":\"Provider died\"},\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"error\"}]}\n\n";
    for (path, request, sent, told) in [
        (
            "/v1/messages",
            "{\"model\":\"c\",\"stream\":true}",
            anthropic,
            "Internal",
        ),
        ("/v1/chat/completions", STREAM, chat, "Provider died"),
    ] {
        let events = sent.clone();
        let up = Upstream::start(move |_| Reply::sse([&events])).await;
        let app = App::before(&up).await;
        for call in 1..=2 {
            let answer = app.post(path, request).await;
            assert_same(&answer.bytes(), sent.as_bytes(), path);
            assert_eq!(
                (answer.status(), answer.end),
                (200, BodyEnd::Clean),
                "{path}"
            );
            let row = &app.rows(call).await[0];
            assert_eq!(row.outcome.as_deref(), Some("broken_stream"), "{path}");
            let error = row.error.as_deref().unwrap_or_default();
            assert!(error.contains(told), "{path}: {error}");
        }
        assert_eq!(up.calls(), 2, "{path}: a failed answer is not kept");
    }
}

// D10
#[tokio::test]
async fn an_empty_answer_passes_and_is_no_success() {
    for reply in [
        Reply::json(200, ""),
        Reply::status(200),
        Reply::json(200, "\n\n\n").chunked(),
        Reply::sse([] as [&str; 0]),
    ] {
        let up = Upstream::start(move |_| reply.clone()).await;
        let app = App::before(&up).await;
        for call in 1..=2 {
            let answer = app.chat(r#"{"model":"m"}"#).await;
            assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
            assert_eq!(answer.text().trim(), "");
            let row = &app.rows(call).await[0];
            assert_eq!(row.outcome.as_deref(), Some("upstream_error"));
        }
        assert_eq!(up.calls(), 2, "an empty answer is not kept");
    }
}

#[tokio::test]
async fn blank_lines_before_json_do_not_hide_its_end() {
    let sent = format!("\n\n \r\n{}", chat_answer("slow"));
    let body = sent.clone();
    let up = Upstream::start(move |_| Reply::json(200, &body)).await;
    let app = App::before(&up).await;
    for label in ["miss", "cached"] {
        let answer = app.chat(r#"{"model":"m"}"#).await;
        assert_same(&answer.bytes(), sent.as_bytes(), label);
        assert_eq!(answer.header("x-traygate-dedup"), Some(label));
    }
}

// --- Compression --------------------------------------------------------------------------------

/// What `brotli` makes of a chat completion that says `hello`.
const BROTLI_ANSWER: &str = "1b9c00001c077673ce87190cbc7676628883231fd0330e92c49e696d78adc3d2d5574f\
    1672b52e89b7cf669a89ba1e80dbf0b92226a66f5f792cba819f8e271594c566c2d948fada6c491b1240526605ee40613b\
    fa549e94ea590a782e33db01";

/// The bytes that hexadecimal digits stand for, spaces aside.
pub(super) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let digit = |byte: u8| char::from(byte).to_digit(16).expect("a hex digit") as u8;
    digits
        .chunks(2)
        .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
        .collect()
}

pub(super) fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text).expect("memory");
    encoder.finish().expect("memory")
}

// D19
#[tokio::test]
async fn compressed_answers_pass_compressed_and_are_understood() {
    let answer = chat_answer("packed");
    let error = r#"{"error":{"message":"packed error","type":"t"}}"#;
    let table = [
        ("gzip", 200, gzip(answer.as_bytes())),
        ("br", 200, unhex(BROTLI_ANSWER)),
        (
            "zstd",
            200,
            zstd::encode_all(answer.as_bytes(), 3).expect("memory"),
        ),
        ("gzip", 400, gzip(error.as_bytes())),
        (
            "zstd",
            429,
            zstd::encode_all(error.as_bytes(), 3).expect("memory"),
        ),
        ("gzip", 500, gzip(error.as_bytes())),
    ];
    for (encoding, status, body) in table {
        let what = format!("{status} {encoding}");
        let packed = body.clone();
        let up = Upstream::start(move |_| {
            Reply::json(status, &packed)
                .header("content-encoding", encoding)
                .header("vary", "accept-encoding")
        })
        .await;
        let app = App::before(&up).await;
        let ask =
            || App::chat_request(r#"{"model":"m"}"#).header("accept-encoding", "gzip, br, zstd");
        let answer = app.ask(ask()).await;
        assert_eq!(answer.status(), status, "{what}");
        assert_eq!(answer.header("content-encoding"), Some(encoding), "{what}");
        let length = body.len().to_string();
        assert_eq!(answer.header("content-length"), Some(&*length), "{what}");
        assert_same(&answer.bytes(), &body, &what);
        assert_eq!(
            up.call(0).request.header("accept-encoding"),
            Some("gzip, br, zstd"),
            "{what}"
        );
        let row = &app.rows(1).await[0];
        let told = row.error.as_deref().unwrap_or_default();
        if status == 200 {
            assert_eq!(row.outcome.as_deref(), Some("completed"), "{what}: {told}");
            // Its end was seen inside the compression, and the copy is as compressed.
            let again = app.ask(ask()).await;
            assert_eq!(again.header("x-traygate-dedup"), Some("cached"), "{what}");
            assert_eq!(again.header("content-encoding"), Some(encoding), "{what}");
            assert_same(&again.bytes(), &body, &what);
            // Another who cannot read it does not get it.
            let plain = app.chat(r#"{"model":"m"}"#).await;
            assert_eq!(plain.header("x-traygate-dedup"), Some("miss"), "{what}");
        } else {
            assert!(told.contains("packed error"), "{what}: {told}");
        }
    }
}

// D19 (d)
#[tokio::test]
async fn answers_without_a_body_keep_their_headers() {
    let up = Upstream::start(|request: &Request| {
        let reply = match request.path() {
            "/v1/gone" => Reply::status(204),
            "/v1/same" => Reply::raw(
                "HTTP/1.1 304 Not Modified\r\ncontent-encoding: gzip\r\netag: \"e\"\r\n\r\n",
            ),
            _ => Reply::json(200, "compressed, it would be"),
        };
        reply
            .header("content-encoding", "gzip")
            .header("etag", "\"e\"")
    })
    .await;
    let app = App::before(&up).await;
    let mut client = app.client().await;

    let answer = client.ask(Outgoing::new("HEAD", "/v1/file")).await;
    assert_eq!((answer.status(), answer.bytes().len()), (200, 0));
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(answer.header("etag"), Some("\"e\""));
    let answer = client.ask(Outgoing::new("DELETE", "/v1/gone")).await;
    assert_eq!(
        (answer.status(), answer.header("content-encoding")),
        (204, Some("gzip"))
    );
    let answer = client
        .ask(get("/v1/same").header("if-none-match", "\"e\""))
        .await;
    assert_eq!(
        (answer.status(), answer.header("etag")),
        (304, Some("\"e\""))
    );
    // On the same connection: nothing was left behind on it.
    let answer = client.ask(get("/v1/file")).await;
    assert_eq!(answer.text(), "compressed, it would be");
    let requests = up.requests();
    assert_eq!(requests[2].request.header("if-none-match"), Some("\"e\""));
    let outcomes = app.rows(4).await;
    assert!(
        outcomes
            .iter()
            .all(|row| row.outcome.as_deref() == Some("completed")),
        "{outcomes:#?}"
    );
}

#[tokio::test]
async fn a_head_answer_keeps_the_length_of_what_it_describes() {
    let up = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\ncontent-type: audio/mpeg\r\n\r\n")
    })
    .await;
    let app = App::before(&up).await;
    let mut client: Client = app.client().await;
    for _ in 0..2 {
        let answer = client
            .ask(Outgoing::new("HEAD", "/v1/files/f/content"))
            .await;
        assert_eq!(answer.header("content-length"), Some("1234"));
        assert_eq!(answer.bytes().len(), 0);
    }
}
