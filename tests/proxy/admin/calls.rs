//! The record through the API, and stopping one call.

use axum::http::Method;
use serde_json::{Value, json};

use super::super::support::app::App;
use super::super::support::client::{BodyEnd, Client, post as http_post};
use super::super::support::eventually;
use super::super::support::upstream::{Gate, Reply, Upstream, chat_events};
use super::{ask, code, get};

const STREAM: &str = r#"{"model":"m","messages":[],"stream":true}"#;

fn chat(n: usize) -> String {
    format!(r#"{{"model":"m-{n}","messages":[]}}"#)
}

#[tokio::test]
async fn calls_come_in_pages_and_by_filters() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for n in 0..5 {
        app.chat(&chat(n)).await;
    }
    app.chat(&chat(0)).await;
    app.rows(6).await;
    let mut seen = Vec::new();
    let mut cursor = String::new();
    for _ in 0..10 {
        let page = get(&app, &format!("calls?limit=2{cursor}")).await;
        let calls = page["calls"].as_array().expect("calls");
        assert!(calls.len() <= 2);
        seen.extend(
            calls
                .iter()
                .map(|call| call["id"].as_str().expect("an id").to_owned()),
        );
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen.len(), 6);
    assert!(
        seen.windows(2).all(|pair| pair[0] > pair[1]),
        "newest first"
    );

    let count = async |query: &str| {
        let page = get(&app, &format!("calls?{query}")).await;
        page["calls"].as_array().expect("calls").len()
    };
    assert_eq!(count("model=m-0").await, 2);
    assert_eq!(count("model=m-*&dedup=miss").await, 5);
    assert_eq!(count("dedup=cached").await, 1);
    assert_eq!(count("provider=anthropic").await, 0);
    assert_eq!(count("outcome=completed").await, 6);
    assert_eq!(count("since=2100-01-01T00:00:00Z").await, 0);

    let one = get(&app, &format!("calls/{}", seen[0])).await;
    assert_eq!(one["dedup"], "cached");
    assert_eq!(one["model"], "m-0");
    assert_eq!(one["outcome"], "completed");
}

#[tokio::test]
async fn a_mistyped_question_is_refused_and_not_guessed() {
    let app = App::start("").await;
    for query in [
        "modle=m",
        "limit=0",
        "limit=5000",
        "outcome=well",
        "since=yesterday",
        "cursor=../../etc",
        "dedup=perhaps",
        "key=zz",
    ] {
        let refused = ask(&app, Method::GET, &format!("calls?{query}"), None).await;
        assert_eq!(code(&refused, 400), "bad_request", "{query}");
    }
    for path in ["calls/none", "calls/none/body"] {
        assert_eq!(
            code(&ask(&app, Method::GET, path, None).await, 400),
            "bad_request"
        );
    }
    let unknown = ask(&app, Method::GET, "calls/01J00000000000000000000000", None).await;
    assert_eq!(code(&unknown, 404), "not_found");
}

/// The ids of the calls under way, by tool.
async fn running(app: &App, count: usize) -> Vec<(String, String)> {
    let calls = async || {
        let state = get(app, "state").await;
        state["running"].as_array().expect("calls").clone()
    };
    eventually("they run", async || calls().await.len() == count).await;
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let named = calls().await;
    named
        .iter()
        .map(|call| (text(&call["tool"]), text(&call["id"])))
        .collect()
}

async fn streams_as(app: &App, tool: &str) -> Client {
    let mut client = app.client().await;
    let call = http_post(&format!("/@{tool}/v1/chat/completions")).json(STREAM);
    client.send(call).await;
    client
}

#[tokio::test]
async fn one_caller_is_stopped_and_the_others_go_on_to_the_end() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |_| {
        let events = chat_events(3);
        let (first, rest) = events.split_first().expect("events");
        let rest = rest.concat();
        Reply::sse([first]).then_wait_for(&held).then_body(rest)
    })
    .await;
    let app = App::before(&up).await;
    let mut leader = streams_as(&app, "leader").await;
    leader.head().await;
    let mut follower = streams_as(&app, "follower").await;
    follower.head().await;
    let calls = running(&app, 2).await;
    let id = |tool: &str| {
        &calls
            .iter()
            .find(|(name, _)| name == tool)
            .expect("it runs")
            .1
    };

    let (status, stopped) = ask(
        &app,
        Method::DELETE,
        &format!("calls/{}", id("leader")),
        None,
    )
    .await;
    assert_eq!(status, 200, "{stopped}");
    assert_ne!(
        leader.read_to_end_of_body().await,
        BodyEnd::Clean,
        "cut, not ended"
    );
    assert_eq!(up.in_flight(), 1, "the follower still listens");
    let state = get(&app, "state").await;
    for call in state["running"].as_array().expect("calls") {
        assert_eq!(call["caller_left"], call["tool"] == "leader", "{call}");
    }
    let stopped_by = super::super::support::now();
    let again = ask(
        &app,
        Method::DELETE,
        &format!("calls/{}", id("leader")),
        None,
    )
    .await;
    assert_eq!(code(&again, 409), "not_running");
    // It goes on for a while without the leader, whose row tells of its own time only.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    gate.open();
    assert_eq!(follower.read_to_end_of_body().await, BodyEnd::Clean);
    let rows = app.rows(2).await;
    let duration = |tool: &str| {
        rows.iter()
            .find(|row| row.tool == tool)
            .expect("a row")
            .duration
    };
    let went_on = super::super::support::now() - stopped_by;
    let (leader, follower) = (duration("leader"), duration("follower"));
    assert!(
        leader < follower && went_on.as_millis() >= 300,
        "{leader:?} {follower:?}"
    );
    let outcome = |tool: &str| {
        rows.iter()
            .find(|row| row.tool == tool)
            .expect("a row")
            .outcome
            .as_deref()
    };
    assert_eq!(outcome("leader"), Some("stopped"));
    assert_eq!(outcome("follower"), Some("completed"));
    let ended = ask(
        &app,
        Method::DELETE,
        &format!("calls/{}", id("follower")),
        None,
    )
    .await;
    assert_eq!(code(&ended, 409), "not_running");
}

#[tokio::test]
async fn the_last_caller_stopped_ends_the_upstream_call_at_once() {
    let up = Upstream::hanging().await;
    // Far longer than this test: a person's stop does not linger for a retry.
    let app = App::with(&up, "[dedup]\nlinger_secs = 60\n").await;
    let mut leader = streams_as(&app, "leader").await;
    let mut follower = streams_as(&app, "follower").await;
    up.wait_for_calls(1).await;
    let calls = running(&app, 2).await;
    for (_, id) in &calls {
        let (status, _) = ask(&app, Method::DELETE, &format!("calls/{id}"), None).await;
        assert_eq!(status, 200);
    }
    for client in [&mut leader, &mut follower] {
        let answer = client.read_to_end().await;
        assert_eq!(answer.status(), 499);
        assert_eq!(answer.json()["error"]["code"], "stopped");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
    up.wait_until_closed(0).await;
    for row in app.rows(2).await {
        assert_eq!(row.outcome.as_deref(), Some("stopped"), "{row:?}");
        assert_eq!(row.status, Some(499));
    }
    assert_eq!(get(&app, "state").await["running"], json!([]));
}

#[tokio::test]
async fn one_that_waits_in_the_queue_is_stopped_without_an_upstream_call() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| Reply::chat(request).held_by(&held)).await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
    let mut first = app.client().await;
    first
        .send(http_post("/v1/chat/completions").json(chat(1)))
        .await;
    up.wait_for_calls(1).await;
    let mut second = app.client().await;
    second
        .send(http_post("/@waits/v1/chat/completions").json(chat(2)))
        .await;
    let calls = running(&app, 2).await;
    let id = &calls
        .iter()
        .find(|(tool, _)| tool == "waits")
        .expect("it waits")
        .1;
    ask(&app, Method::DELETE, &format!("calls/{id}"), None).await;
    assert_eq!(second.read_to_end().await.status(), 499);
    gate.open();
    assert_eq!(first.read_to_end().await.status(), 200);
    app.rows(2).await;
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn bodies_are_kept_where_they_are_wanted_and_shared_with_twins() {
    let up = Upstream::start(|request| match request.json()["model"].as_str() {
        Some("bad") => Reply::json(400, r#"{"error":{"message":"no, sk-canary-0123456789"}}"#),
        _ => Reply::chat(request),
    })
    .await;
    let send = async |app: &App, body: &str| {
        let call = http_post("/v1/chat/completions")
            .header("authorization", "Bearer sk-canary-0123456789")
            .json(body);
        let answer = app.client().await.ask(call).await;
        answer.header("x-traygate-call").expect("an id").to_owned()
    };
    let body_of =
        async |app: &App, id: &str| ask(app, Method::GET, &format!("calls/{id}/body"), None).await;

    let app = App::with(&up, "[log]\nbodies = \"all\"\n").await;
    let asked =
        r#"{"model":"m","messages":[{"role":"user","content":"hello, sk-canary-0123456789"}]}"#;
    let first = send(&app, asked).await;
    let twin = send(&app, asked).await;
    app.rows(2).await;
    let (status, kept) = body_of(&app, &first).await;
    assert_eq!(status, 200, "{kept}");
    assert_eq!(
        kept["request"]["text"],
        asked.replace("sk-canary-0123456789", "[key]")
    );
    assert!(
        kept["response"]["text"]
            .as_str()
            .expect("text")
            .contains("chat.completion")
    );
    assert_eq!(kept["response"]["cut"], false);
    assert_eq!(body_of(&app, &twin).await.1["id"], first.as_str());
    assert!(!kept.to_string().contains("canary"));

    let app = App::with(&up, "[log]\nbodies = \"errors\"\n").await;
    let well = send(&app, asked).await;
    let bad = send(&app, r#"{"model":"bad","messages":[]}"#).await;
    app.rows(2).await;
    assert_eq!(body_of(&app, &well).await.0, 404);
    let kept = body_of(&app, &bad).await.1;
    assert_eq!(
        kept["response"]["text"],
        r#"{"error":{"message":"no, [key]"}}"#
    );

    let app = App::before(&up).await;
    let bad = send(&app, r#"{"model":"bad","messages":[]}"#).await;
    app.rows(1).await;
    assert_eq!(code(&body_of(&app, &bad).await, 404), "not_found");
}

#[tokio::test]
async fn series_latency_and_repeats_answer_from_the_record() {
    let up = Upstream::start(|request| match request.json()["model"].as_str() {
        Some("bad") => Reply::error(500),
        _ => Reply::chat(request),
    })
    .await;
    let app = App::before(&up).await;
    for _ in 0..3 {
        app.chat(&chat(1)).await;
    }
    app.chat(r#"{"model":"bad","messages":[]}"#).await;
    app.rows(4).await;
    for step in ["minute", "hour", "day"] {
        let series = get(&app, &format!("series?step={step}")).await;
        let points = series["points"].as_array().expect("points");
        let sum = |field: &str| {
            points
                .iter()
                .map(|point| point[field].as_u64().expect("a count"))
                .sum::<u64>()
        };
        assert_eq!(
            (sum("calls"), sum("upstream_calls"), sum("errors")),
            (4, 2, 1),
            "{step}"
        );
    }
    let today = jiff::Timestamp::now()
        .to_zoned_datetime(jiff::tz::TimeZone::system())
        .date();
    let latency = get(&app, &format!("latency?day={today}&timeouts=0.000001,60")).await;
    let cut = &latency["all"]["unstreamed"]["cut"];
    assert_eq!(cut[1]["calls"], 0, "{latency}");
    assert!(cut[0]["calls"].as_u64().expect("a count") >= 1, "{latency}");
    let repeats = get(&app, "repeats").await;
    assert_eq!(repeats["all"]["calls"], 4);
    assert_eq!(repeats["all"]["windows"][0]["repeats"], 2, "{repeats}");
    for path in [
        "series?step=week",
        "series?zone=Mars/Base",
        "latency?day=soon",
        "latency?timeouts=x",
        "repeats?most=5000",
    ] {
        assert_eq!(
            code(&ask(&app, Method::GET, path, None).await, 400),
            "bad_request",
            "{path}"
        );
    }
}
