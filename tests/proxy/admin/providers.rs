//! Breakers by hand, keys, and the free check.

use axum::http::Method;
use serde_json::json;

use super::super::support::app::App;
use super::super::support::eventually;
use super::super::support::upstream::{Reply, Upstream};
use super::{ask, code, get, post, provider};

fn other(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[],"n":{n}}}"#)
}

#[tokio::test]
async fn a_person_holds_a_breaker_open_and_releases_it() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let held = post(&app, "providers/openai/breaker", json!({"action": "hold"})).await;
    assert_eq!(held["breaker"]["state"], "open");
    assert_eq!(held["breaker"]["held"], true);
    let refused = app.chat(&other(1)).await;
    assert_eq!(refused.json()["error"]["code"], "breaker_open");
    assert!(
        refused.text().contains("held open by hand"),
        "{}",
        refused.text()
    );
    assert!(
        !refused.text().contains("failing"),
        "nothing failed: {}",
        refused.text()
    );
    assert_eq!(up.calls(), 0);
    let released = post(
        &app,
        "providers/openai/breaker",
        json!({"action": "release"}),
    )
    .await;
    assert_eq!(released["breaker"]["state"], "half_open");
    assert_eq!(app.chat(&other(2)).await.status(), 200);
    app.rows(2).await;
    assert_eq!(provider(&app, "openai").await["breaker"]["state"], "closed");
}

#[tokio::test]
async fn a_person_lets_one_call_try_or_closes_it_at_once() {
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0\n").await;
    for n in 0..5 {
        app.chat(&other(n)).await;
    }
    app.rows(5).await;
    assert_eq!(app.chat(&other(5)).await.status(), 503);
    let tried = post(&app, "providers/openai/breaker", json!({"action": "probe"})).await;
    assert_eq!(tried["breaker"]["state"], "half_open");
    assert_eq!(
        app.chat(&other(6)).await.status(),
        500,
        "the one that tries"
    );
    assert_eq!(app.chat(&other(7)).await.status(), 503, "and failed");
    up.set_handler(Reply::chat);
    let reset = post(&app, "providers/openai/breaker", json!({"action": "reset"})).await;
    assert_eq!(reset["breaker"]["state"], "closed");
    assert_eq!(app.chat(&other(8)).await.status(), 200);
}

#[tokio::test]
async fn a_models_own_breaker_is_steered_by_its_name() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let hold = json!({"action": "hold", "model": "m"});
    let held = post(&app, "providers/openai/breaker", hold).await;
    assert_eq!(held["breaker"]["state"], "closed", "the provider's own");
    assert_eq!(held["models"][0]["model"], "m");
    assert_eq!(held["models"][0]["breaker"]["state"], "open");
    assert_eq!(app.chat(&other(1)).await.status(), 503);
    let neighbour = app.chat(r#"{"model":"n","messages":[]}"#).await;
    assert_eq!(neighbour.status(), 200);
    let reset = json!({"action": "reset", "model": "m"});
    let reset = post(&app, "providers/openai/breaker", reset).await;
    assert_eq!(reset["models"], json!([]));
    assert_eq!(app.chat(&other(2)).await.status(), 200);
}

#[tokio::test]
async fn a_command_that_cannot_be_is_refused() {
    let app = App::start("").await;
    let steer = |name: &str, body| {
        let path = format!("providers/{name}/breaker");
        let app = &app;
        async move { ask(app, Method::POST, &path, Some(body)).await }
    };
    let nobody = steer("nobody", json!({"action": "reset"})).await;
    assert_eq!(code(&nobody, 404), "no_provider");
    assert!(
        nobody.1.to_string().contains("openai"),
        "it names those there are"
    );
    for body in [
        json!({"action": "explode"}),
        json!({}),
        json!({"action": "hold", "model": ""}),
    ] {
        assert_eq!(code(&steer("openai", body).await, 400), "bad_request");
    }
}

#[tokio::test]
async fn a_check_tells_a_right_key_from_a_wrong_one() {
    let up = Upstream::start(|request| match request.header("authorization") {
        Some("Bearer right-key") => Reply::json(200, r#"{"data":[]}"#),
        _ => Reply::json(401, r#"{"error":{"message":"no"}}"#),
    })
    .await;
    let check = async |key: Option<&str>| {
        let stored = key.map(|key| ("openai".into(), up.url(), key.into()));
        let keys = traygate::keys::Keys::holding(stored);
        let folder = tempfile::tempdir().expect("a folder");
        let app = App::start_with(folder, &App::settings(up.addr(), ""), keys).await;
        post(&app, "providers/openai/check", json!({})).await
    };
    let right = check(Some("right-key")).await;
    assert_eq!(
        (&right["address"], &right["key"]),
        (&json!("right"), &json!("right"))
    );
    let wrong = check(Some("wrong-key")).await;
    assert_eq!(
        (&wrong["address"], &wrong["key"]),
        (&json!("right"), &json!("refused"))
    );
    assert!(!wrong.to_string().contains("wrong-key"));
    let none = check(None).await;
    assert_eq!(
        (&none["address"], &none["key"]),
        (&json!("right"), &json!("missing"))
    );
}

#[tokio::test]
async fn a_check_tells_what_is_wrong_with_an_address() {
    let free = Upstream::start(|_| Reply::json(200, r#"{"data":[]}"#)).await;
    let wrong = Upstream::start(|_| Reply::json(404, "{}")).await;
    let failing = Upstream::failing(503).await;
    let dead = Upstream::dead_port();
    let found = async |url: String| {
        let app = App::start(&format!(
            "[[provider]]\nname = \"openai\"\nbase_url = \"{url}\"\n"
        ))
        .await;
        post(&app, "providers/openai/check", json!({})).await
    };
    assert_eq!(found(free.url()).await["key"], "not_needed");
    assert_eq!(found(wrong.url()).await["address"], "wrong");
    assert_eq!(found(failing.url()).await["address"], "failing");
    let unreachable = found(dead.url()).await;
    assert_eq!(unreachable["address"], "unreachable");
    assert!(
        unreachable["message"]
            .as_str()
            .expect("words")
            .contains("refused")
    );
    // It is a question, no call: nothing of it is on record.
    assert!(
        free.requests()
            .iter()
            .all(|seen| seen.request.method == "GET")
    );
}

#[tokio::test]
async fn a_key_that_would_not_be_used_or_cannot_be_one_is_refused_unrepeated() {
    let settings = "[[provider]]\nname = \"openai\"\nkey = \"pass\"\n";
    let app = App::start(settings).await;
    let put = |name: &str, body| {
        let path = format!("providers/{name}/key");
        let app = &app;
        async move { ask(app, Method::PUT, &path, Some(body)).await }
    };
    let unused = put("openai", json!({"key": "canary-key"})).await;
    assert_eq!(code(&unused, 409), "key_not_used");
    let placeholder = put("anthropic", json!({"key": "Traygate"})).await;
    assert_eq!(code(&placeholder, 400), "bad_key");
    let odd = put("anthropic", json!({"key": "canary key\u{200b}"})).await;
    assert_eq!(code(&odd, 400), "bad_key");
    let extra = put("anthropic", json!({"key": "canary-key", "more": 1})).await;
    assert_eq!(code(&extra, 400), "bad_request");
    for refused in [unused, odd, extra] {
        assert!(!refused.1.to_string().contains("canary"), "{}", refused.1);
    }
}

#[tokio::test]
async fn a_recovered_provider_is_well_in_the_state_too() {
    let up = Upstream::failing(500).await;
    let app = App::with(&up, "[breaker]\nrecovery_check_secs = 0.05\n").await;
    for n in 0..5 {
        app.chat(&other(n)).await;
    }
    app.rows(5).await;
    assert_eq!(provider(&app, "openai").await["breaker"]["state"], "open");
    // It must be seen to fail once more, or its early answers would prove nothing.
    up.wait_for_requests(6).await;
    up.set_handler(Reply::chat);
    eventually("it is half-open", async || {
        provider(&app, "openai").await["breaker"]["state"] == "half_open"
    })
    .await;
    let state = get(&app, "state").await;
    assert!(state["warnings"].as_array().is_some());
}
