//! Asks the demo over its socket, as a client does.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// Everything the demo sends until it closes, framing and all.
async fn ask(demo: &Demo, request: &str, body: &Value) -> String {
    let mut socket = TcpStream::connect(demo.addr()).await.expect("a listener");
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let head = format!(
        "{request} HTTP/1.1\r\nhost: demo\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket
        .write_all((head + &body).as_bytes())
        .await
        .expect("a reader");
    let mut answer = Vec::new();
    let read = socket.read_to_end(&mut answer);
    let read = tokio::time::timeout(Duration::from_secs(30), read).await;
    read.expect("an end within 30 s").expect("an end in order");
    String::from_utf8(answer).expect("text")
}

async fn post(demo: &Demo, path: &str, body: Value) -> String {
    ask(demo, &format!("POST {path}"), &body).await
}

/// The JSON body of an answer that has a length.
fn json_of(answer: &str) -> Value {
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

/// The JSON of each event, or line, of a stream.
fn events_of(answer: &str) -> Vec<Value> {
    answer
        .lines()
        .filter_map(|line| {
            line.strip_prefix("data: ")
                .or(line.starts_with('{').then_some(line))
        })
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// The call of each dialect, streamed, under a model's name.
fn streams(model: &str) -> [(&'static str, Value); 6] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        (
            "/v1/chat/completions",
            json!({"model": model, "messages": messages, "stream": true}),
        ),
        (
            "/v1/completions",
            json!({"model": model, "prompt": "hi", "stream": true}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "input": "hi", "stream": true}),
        ),
        (
            "/v1/messages",
            json!({"model": model, "messages": messages, "stream": true}),
        ),
        ("/api/chat", json!({"model": model, "messages": messages})),
        ("/api/generate", json!({"model": model, "prompt": "hi"})),
    ]
}

#[tokio::test]
async fn answers_in_every_dialect() {
    let demo = Demo::start().await.expect("a port");
    for (path, text) in [
        ("/v1/chat/completions", "/choices/0/message/content"),
        ("/chat/completions", "/choices/0/message/content"),
        ("/v1/completions", "/choices/0/text"),
        ("/v1/responses", "/output/0/content/0/text"),
        ("/v1/messages", "/content/0/text"),
        ("/api/chat", "/message/content"),
        ("/api/generate", "/response"),
    ] {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = json!({"messages": messages, "prompt": "hi", "input": "hi", "stream": false});
        let answer = json_of(&post(&demo, path, body).await);
        let said = answer
            .pointer(text)
            .and_then(Value::as_str)
            .unwrap_or_default();
        assert!(said.starts_with("You asked: \"hi\"."), "{path}: {answer}");
    }
}

#[tokio::test]
async fn streams_end_as_their_script_says() {
    let demo = Demo::start().await.expect("a port");
    for (wish, proper_end, failed) in [
        ("", true, false),
        ("&break_after=2", false, false),
        ("&error_after=2", true, true),
    ] {
        for (path, body) in streams(&format!("demo?gap_ms=0&chunks=5{wish}")) {
            let answer = post(&demo, path, body).await;
            assert_eq!(
                answer.ends_with("0\r\n\r\n"),
                proper_end,
                "{path}{wish}: {answer}"
            );
            let events = events_of(&answer);
            let error = events.iter().any(|event| !event["error"].is_null());
            assert_eq!(error, failed, "{path}{wish}: {answer}");
            let words = answer.matches("asked: ").count();
            assert!(words >= 1, "{path}{wish}: {answer}");
        }
    }
}

#[tokio::test]
async fn the_pieces_of_a_stream_are_its_whole() {
    let demo = Demo::start().await.expect("a port");
    let places = [
        "/choices/0/delta/content",
        "/choices/0/text",
        "/delta",
        "/delta/text",
        "/message/content",
        "/response",
    ];
    for ((path, mut body), place) in streams("demo?gap_ms=0&chunks=9").into_iter().zip(places) {
        let pieces: Vec<String> = events_of(&post(&demo, path, body.clone()).await)
            .iter()
            .filter_map(|event| event.pointer(place)?.as_str())
            .filter(|piece| !piece.is_empty())
            .map(str::to_owned)
            .collect();
        assert_eq!(pieces.len(), 9, "{path}");
        body["stream"] = json!(false);
        let whole = json_of(&post(&demo, path, body).await).to_string();
        let text = json!(pieces.concat()).to_string();
        assert!(whole.contains(&text), "{path}: {text} in {whole}");
    }
}

#[tokio::test]
async fn usage_comes_when_asked_for() {
    let demo = Demo::start().await.expect("a port");
    let (path, mut body) = streams("demo?gap_ms=0").into_iter().next().expect("chat");
    let without = events_of(&post(&demo, path, body.clone()).await);
    assert!(without.iter().all(|event| event.get("usage").is_none()));
    body["stream_options"] = json!({"include_usage": true});
    let with = events_of(&post(&demo, path, body).await);
    let last = with.last().expect("events");
    assert_eq!(
        (with.len(), &last["choices"]),
        (without.len() + 1, &json!([]))
    );
    assert!(last["usage"]["total_tokens"].as_u64() > Some(10));
}

#[tokio::test]
async fn response_events_are_numbered_without_a_gap() {
    let demo = Demo::start().await.expect("a port");
    for wish in ["", "&error_after=0", "&error_after=2", "&error_after=99"] {
        let (path, body) = streams(&format!("demo?gap_ms=0&chunks=4{wish}"))[2].clone();
        let events = events_of(&post(&demo, path, body).await);
        let numbers: Vec<u64> = events
            .iter()
            .filter_map(|event| event["sequence_number"].as_u64())
            .collect();
        assert_eq!(
            numbers,
            (0..events.len() as u64).collect::<Vec<_>>(),
            "{wish}"
        );
    }
}

#[tokio::test]
async fn errors_speak_the_dialect_of_the_path() {
    let demo = Demo::start().await.expect("a port");
    for (path, body) in streams("demo?status=503&retry_after=7") {
        let answer = post(&demo, path, body).await;
        assert!(answer.starts_with("HTTP/1.1 503 "), "{path}: {answer}");
        assert!(
            answer.contains("\r\nretry-after: 7\r\n"),
            "{path}: {answer}"
        );
        let error = json_of(&answer);
        let message = "Traygate's demo model failed with 503, as asked";
        match path {
            "/v1/messages" => {
                assert_eq!(
                    (&error["type"], &error["error"]["type"]),
                    (&json!("error"), &json!("api_error"))
                );
                assert_eq!(error["error"]["message"], message);
            }
            "/api/chat" | "/api/generate" => assert_eq!(error, json!({"error": message})),
            _ => assert_eq!(error["error"]["message"], message),
        }
    }
    let unknown = post(
        &demo,
        "/v1/chat/completions",
        json!({"model": "demo?sleep=1"}),
    )
    .await;
    assert!(
        unknown.starts_with("HTTP/1.1 400 ") && unknown.contains("`sleep`"),
        "{unknown}"
    );
    let nowhere = ask(&demo, "GET /v1/files", &Value::Null).await;
    assert!(
        nowhere.starts_with("HTTP/1.1 404 ") && nowhere.contains("GET /v1/files"),
        "{nowhere}"
    );
    let broken = ask(&demo, "POST /v1/messages", &json!("no object")).await;
    assert!(broken.starts_with("HTTP/1.1 400 "), "{broken}");
}

#[tokio::test]
async fn half_an_answer_that_is_not_streamed() {
    let demo = Demo::start().await.expect("a port");
    let body = json!({"model": "demo-break?gap_ms=0"});
    let answer = post(&demo, "/v1/chat/completions", body).await;
    assert!(
        answer.contains("chunked") && answer.contains("\"choices\""),
        "{answer}"
    );
    assert!(
        !answer.contains("usage") && !answer.ends_with("0\r\n\r\n"),
        "{answer}"
    );
}

#[tokio::test]
async fn presets_are_listed() {
    let demo = Demo::start().await.expect("a port");
    let list = json_of(&ask(&demo, "GET /v1/models", &Value::Null).await);
    let names: Vec<&str> = list["data"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|m| m["id"].as_str())
        .collect();
    assert_eq!(names, script::PRESETS.map(|(name, ..)| name));
    let one = json_of(&ask(&demo, "GET /v1/models/vendor/any%3Fgap_ms=1", &Value::Null).await);
    assert_eq!(one["id"], "vendor/any?gap_ms=1");
    let tags = json_of(&ask(&demo, "GET /api/tags", &Value::Null).await);
    assert_eq!(tags["models"][0]["name"], "demo:latest");
}

#[tokio::test]
async fn a_hang_lasts_until_the_demo_is_dropped() {
    let demo = Demo::start().await.expect("a port");
    let mut socket = TcpStream::connect(demo.addr()).await.expect("a listener");
    let request = "POST /v1/completions HTTP/1.1\r\nhost: demo\r\ncontent-length: 21\r\n\r\n\
                   {\"model\":\"demo-hang\"}";
    socket
        .write_all(request.as_bytes())
        .await
        .expect("a reader");
    let mut byte = [0];
    let silence = tokio::time::timeout(Duration::from_millis(50), socket.read(&mut byte));
    assert!(silence.await.is_err(), "nothing comes");
    let addr = demo.addr();
    drop(demo);
    let end = tokio::time::timeout(Duration::from_secs(30), socket.read(&mut byte)).await;
    assert!(matches!(end.expect("an end within 30 s"), Ok(0) | Err(_)));
    assert!(
        TcpStream::connect(addr).await.is_err(),
        "the port is closed"
    );
}
