//! `GET state`, `POST mode`, `POST dedup/clear`.

use std::time::Duration;

use axum::http::Method;
use serde_json::json;

use super::super::support::app::App;
use super::super::support::client::get as http_get;
use super::super::support::eventually;
use super::super::support::upstream::{Gate, Reply, Upstream};
use super::{ask, code, get, post, provider};

const CHAT: &str = r#"{"model":"m","messages":[]}"#;

fn other(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[],"n":{n}}}"#)
}

#[tokio::test]
async fn the_state_says_what_runs_what_waits_and_what_was_saved() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| Reply::chat(request).held_by(&held)).await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
    let state = get(&app, "state").await;
    assert_eq!(state["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(state["address"], app.addr().to_string());
    assert_eq!(state["mode"]["mode"], "normal");
    assert_eq!(state["running"], json!([]));
    assert_eq!(state["log"]["recording"], true);
    assert_eq!(provider(&app, "openai").await["used"], false);

    let (one, twin) = (app.chat(CHAT), app.chat(CHAT));
    let two = other(2);
    let waiting = app.chat(&two);
    let look = async {
        up.wait_for_calls(1).await;
        eventually("three calls run", async || {
            get(&app, "state").await["running"]
                .as_array()
                .is_some_and(|it| it.len() == 3)
        })
        .await;
        let state = get(&app, "state").await;
        let phases: Vec<_> = state["running"]
            .as_array()
            .expect("calls")
            .iter()
            .map(|call| call["phase"].as_str().expect("a phase").to_owned())
            .collect();
        assert_eq!(phases.iter().filter(|phase| *phase == "sent").count(), 2);
        assert_eq!(phases.iter().filter(|phase| *phase == "queued").count(), 1);
        let openai = provider(&app, "openai").await;
        assert_eq!(
            openai["pool"],
            json!({"in_flight": 1, "extra": 0, "waiting": 1, "limit": 1})
        );
        assert_eq!(openai["used"], true);
        assert_eq!(openai["breaker"]["state"], "closed");
        gate.open();
    };
    tokio::join!(one, twin, waiting, look);
    app.chat(CHAT).await;
    app.rows(4).await;
    let state = get(&app, "state").await;
    let dedup = &state["dedup"];
    assert_eq!(
        (&dedup["led"], &dedup["joined"], &dedup["cached"]),
        (&json!(2), &json!(1), &json!(1))
    );
    assert_eq!(dedup["upstream_calls_saved"], 2);
    assert_eq!(dedup["kept_answers"], 2);
    assert_eq!(state["running"], json!([]));
}

#[tokio::test]
async fn an_open_breaker_shows_why_and_when_it_is_tried() {
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0\n").await;
    for n in 0..5 {
        app.chat(&other(n)).await;
    }
    app.rows(5).await;
    let openai = provider(&app, "openai").await;
    assert_eq!(openai["breaker"]["state"], "open");
    assert_eq!(openai["breaker"]["failures_in_row"], 5);
    assert!(
        openai["breaker"]["next_probe_in_secs"]
            .as_f64()
            .expect("a time")
            > 30.0
    );
    let told = openai["last_error"].as_str().expect("words");
    assert!(told.contains("500"), "{told}");
}

#[tokio::test]
async fn no_key_is_in_the_state_or_anywhere_else() {
    let settings = "[[provider]]\nname = \"openai\"\nheaders = { x-mine = \"canary-of-header\" }\n\
                    base_url = \"http://127.0.0.1:9/v1\"\n";
    let keys = traygate::keys::Keys::holding([(
        "anthropic".into(),
        "https://api.anthropic.com".to_owned(),
        "canary-of-keyring".into(),
    )]);
    let folder = tempfile::tempdir().expect("a folder");
    let app = App::start_with(folder, settings, keys).await;
    assert_eq!(
        provider(&app, "anthropic").await["key"],
        json!({"source": "auto", "present": true})
    );
    assert_eq!(provider(&app, "openrouter").await["key"]["present"], false);
    for path in ["state", "settings", "calls", "openapi.json"] {
        let said = get(&app, path).await.to_string();
        assert!(!said.contains("canary"), "{path}: {said}");
    }
    let metrics = app.client().await.ask(http_get("/traygate/metrics")).await;
    assert!(!metrics.text().contains("canary"));
}

#[tokio::test]
async fn a_key_in_the_wrong_place_is_neither_on_record_nor_in_the_metrics() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let key = "sk-proj-0123456789abcdefghij";
    app.chat(&format!(r#"{{"model":"{key}","messages":[]}}"#))
        .await;
    let asked = http_get(&format!("/v1/models/{key}"));
    app.client().await.ask(asked).await;
    app.rows(2).await;
    assert!(
        up.requests().iter().all(|seen| {
            let body = String::from_utf8_lossy(&seen.request.body).into_owned();
            body.contains(key) || seen.request.target.contains(key)
        }),
        "the provider gets what was sent"
    );
    let metrics = app.client().await.ask(http_get("/traygate/metrics")).await;
    for said in [
        metrics.text(),
        get(&app, "calls").await.to_string(),
        get(&app, "repeats").await.to_string(),
        get(&app, "state").await.to_string(),
    ] {
        assert!(!said.contains("0123456789abcdefghij"), "{said}");
    }
}

#[tokio::test]
async fn bypass_goes_straight_through_and_is_on_record() {
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
    let mode = post(&app, "mode", json!({"mode": "bypass"})).await;
    assert_eq!(mode["mode"], "bypass");
    assert!(mode["until"].is_null());
    // Ten failures: no breaker sees them.
    for _ in 0..10 {
        let answer = app.chat(CHAT).await;
        assert_eq!(answer.status(), 500);
        assert_eq!(answer.header("x-traygate-dedup"), Some("off"));
    }
    assert_eq!(up.calls(), 10);
    assert_eq!(
        provider(&app, "openai").await["breaker"]["failures_in_row"],
        0
    );
    // Twins at once: two calls, and no queue before the one place.
    let gate = Gate::new();
    let held = gate.clone();
    up.set_handler(move |request| Reply::chat(request).held_by(&held));
    let both = async {
        up.wait_for_in_flight(2).await;
        gate.open();
    };
    tokio::join!(app.chat(CHAT), app.chat(CHAT), both);
    assert_eq!(app.rows(12).await.len(), 12);

    post(&app, "mode", json!({"mode": "normal"})).await;
    app.chat(CHAT).await;
    assert_eq!(
        app.chat(CHAT).await.header("x-traygate-dedup"),
        Some("cached")
    );
}

#[tokio::test]
async fn a_mode_ends_by_itself() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let mode = post(&app, "mode", json!({"mode": "refuse", "for_secs": 0.2})).await;
    assert!(mode["left_secs"].as_f64().expect("a time") <= 0.2);
    assert_eq!(app.chat(CHAT).await.json()["error"]["code"], "mode_refuse");
    eventually("it is normal again", async || {
        get(&app, "state").await["mode"]["mode"] == "normal"
    })
    .await;
    assert_eq!(app.chat(CHAT).await.status(), 200);

    let later = jiff::Timestamp::now() + Duration::from_secs(3600);
    let mode = post(
        &app,
        "mode",
        json!({"mode": "bypass", "until": later.to_string()}),
    )
    .await;
    let left = mode["left_secs"].as_f64().expect("a time");
    assert!((3500.0..=3600.0).contains(&left), "{left}");
    assert!(mode["until"].is_string());
}

#[tokio::test]
async fn a_mode_that_cannot_be_is_refused_and_changes_nothing() {
    let app = App::start("").await;
    for body in [
        json!({"mode": "off"}),
        json!({"mode": "refuse", "for_secs": -1}),
        json!({"mode": "refuse", "for_secs": 0}),
        json!({"mode": "refuse", "until": "yesterday"}),
        json!({"mode": "refuse", "until": "2020-01-01T00:00:00Z"}),
        json!({"mode": "refuse", "for_secs": 1, "until": "2100-01-01T00:00:00Z"}),
        json!({"mode": "refuse", "forever": true}),
        json!(null),
    ] {
        let refused = ask(&app, Method::POST, "mode", Some(body.clone())).await;
        assert_eq!(code(&refused, 400), "bad_request", "{body}");
    }
    assert_eq!(get(&app, "state").await["mode"]["mode"], "normal");
}

#[tokio::test]
async fn clearing_dedup_makes_the_next_call_a_miss() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    app.chat(CHAT).await;
    assert_eq!(
        app.chat(CHAT).await.header("x-traygate-dedup"),
        Some("cached")
    );
    assert_eq!(post(&app, "dedup/clear", json!({})).await["answers"], 1);
    assert_eq!(
        app.chat(CHAT).await.header("x-traygate-dedup"),
        Some("miss")
    );
    assert_eq!(up.calls(), 2);
}
