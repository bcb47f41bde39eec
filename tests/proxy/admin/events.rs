//! `GET events`.

use std::time::Duration;

use serde_json::{Value, json};
use traygate::admin::events::{Feed, FeedEvent};

use super::super::support::app::App;
use super::super::support::client::{Client, get as http_get, post as http_post};
use super::super::support::upstream::{Gate, Reply, Upstream, chat_events};
use super::{post, token};

const CHAT: &str = r#"{"model":"m","messages":[]}"#;

/// Reads a stream of Server-Sent Events.
struct Events {
    client: Client,
    text: String,
}

impl Events {
    async fn of(app: &App) -> Events {
        let mut client = app.client().await;
        let asked = http_get("/traygate/api/events")
            .header("authorization", &format!("Bearer {}", token(app)));
        client.send(asked).await;
        let head = client.head().await;
        assert_eq!(head.status, 200);
        assert_eq!(head.headers.get("content-type"), Some("text/event-stream"));
        Events {
            client,
            text: String::new(),
        }
    }

    /// The next event's name and data.
    async fn next(&mut self) -> (String, Value) {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| {
                    let lines = event.lines();
                    lines
                        .filter_map(|line| line.strip_prefix(name))
                        .next()
                        .map(str::to_owned)
                };
                if let (Some(name), Some(data)) = (field("event: "), field("data: ")) {
                    return (name, serde_json::from_str(&data).expect("JSON"));
                }
                continue;
            }
            let piece = self.client.piece().await.expect("the stream goes on");
            self.text
                .push_str(std::str::from_utf8(&piece.bytes).expect("text"));
        }
    }

    async fn next_named(&mut self, name: &str) -> Value {
        loop {
            let (found, data) = self.next().await;
            if found == name {
                return data;
            }
        }
    }
}

#[tokio::test]
async fn a_call_is_told_of_from_its_opening_to_its_end() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |_| {
        let events = chat_events(3);
        let (first, rest) = events.split_first().expect("events");
        Reply::sse([first])
            .then_wait_for(&held)
            .then_body(rest.concat())
    })
    .await;
    let app = App::before(&up).await;
    let mut events = Events::of(&app).await;
    let mut client = app.client().await;
    let call = http_post("/@tester/v1/chat/completions")
        .json(r#"{"model":"m","messages":[],"stream":true}"#);
    client.send(call).await;
    let head = client.head().await;
    let id = head
        .headers
        .get("x-traygate-call")
        .expect("an id")
        .to_owned();
    let (name, opened) = events.next().await;
    assert_eq!(name, "opened");
    assert_eq!(
        (&opened["id"], &opened["tool"]),
        (&json!(id), &json!("tester"))
    );
    let progress = loop {
        let progress = events.next_named("progress").await;
        assert_eq!(progress["id"], json!(id));
        if progress["phase"] == "content" {
            break progress;
        }
    };
    assert!(progress["bytes"].as_u64().expect("bytes") > 0);
    gate.open();
    client.read_to_end_of_body().await;
    let finished = events.next_named("finished").await;
    assert_eq!(
        (&finished["id"], &finished["outcome"]),
        (&json!(id), &json!("completed"))
    );
    assert_eq!(finished["status"], 200);
}

#[tokio::test]
async fn a_busy_stream_tells_of_its_progress_four_times_a_second_at_most() {
    let up = Upstream::streaming(200, Duration::from_millis(5)).await;
    let app = App::before(&up).await;
    let mut events = Events::of(&app).await;
    let call =
        http_post("/v1/chat/completions").json(r#"{"model":"m","messages":[],"stream":true}"#);
    let mut client = app.client().await;
    client.send(call).await;
    let mut told = 0;
    let finished = loop {
        match events.next().await {
            (name, _) if name == "progress" => told += 1,
            (name, data) if name == "finished" => break data,
            _ => {}
        }
    };
    let lasted = finished["duration_ms"].as_f64().expect("a time");
    let at_most = lasted / 250.0 + 1.0;
    assert!(
        told >= 1 && f64::from(told) <= at_most,
        "{told} in {lasted} ms"
    );
}

#[tokio::test]
async fn what_changes_the_state_is_told() {
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0\n").await;
    let mut events = Events::of(&app).await;
    for n in 0..5 {
        app.chat(&format!(r#"{{"model":"m","messages":[],"n":{n}}}"#))
            .await;
    }
    let opened = events.next_named("state").await;
    assert_eq!(
        opened,
        json!({"what": "breaker", "provider": "openai", "model": null, "state": "open"})
    );
    post(&app, "mode", json!({"mode": "bypass"})).await;
    assert_eq!(events.next_named("state").await, json!({"what": "mode"}));
    post(&app, "dedup/clear", json!({})).await;
    assert_eq!(events.next_named("state").await, json!({"what": "dedup"}));
}

#[tokio::test]
async fn a_reader_that_is_too_far_behind_is_told_to_fetch_the_state_again() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let mut feed = Feed::of(app.running().core());
    // Two events for each call: far more than a thousand.
    for _ in 0..700 {
        app.chat(CHAT).await;
    }
    let mut missed = false;
    for _ in 0..3 {
        missed |= matches!(feed.next().await, Some(FeedEvent::Missed(_)));
    }
    assert!(missed);
}

#[tokio::test]
async fn events_end_when_traygate_stops_and_hold_nothing_up() {
    let app = App::start("[server]\ndrain_secs = 30\n").await;
    let mut events = Events::of(&app).await;
    let began = super::super::support::now();
    let (_, ended) = tokio::join!(app.stop(), events.client.read_to_end_of_body());
    assert_eq!(ended, super::super::support::client::BodyEnd::Clean);
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "it did not wait for the reader"
    );
}
