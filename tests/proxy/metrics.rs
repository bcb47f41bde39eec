//! What a scraper reads of the calls that were made. `tests/metrics` has a Prometheus read it.

use crate::support::app::App;
use crate::support::client::{get, post, post_json};
use crate::support::must;
use crate::support::upstream::{Gate, Reply, Upstream};

/// The value of a series, by its name and labels.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series))?;
    line.strip_prefix(' ')?.parse().ok()
}

/// The text to scrape, once it says so: a row is handed over just after its client has its answer.
async fn scraped(app: &App, series: &str, expected: f64) -> String {
    let says_so = async {
        loop {
            let answer = app.ask(get("/traygate/metrics")).await;
            assert_eq!(answer.status(), 200, "no token is wanted");
            let kind = answer.header("content-type").unwrap_or_default();
            assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
            let text = answer.text();
            if value(&text, series) == Some(expected) {
                return text;
            }
            tokio::task::yield_now().await;
        }
    };
    must(&format!("{series} becomes {expected}"), says_so).await
}

#[tokio::test]
async fn a_scrape_counts_the_calls_that_were_made() {
    let up = Upstream::start(|request| match request.json()["model"].as_str() {
        Some("limited") => Reply::error(429),
        _ => Reply::chat(request),
    })
    .await;
    let app = App::before(&up).await;
    let same = r#"{"model":"gpt-5","messages":[]}"#;
    assert_eq!(app.chat(same).await.status(), 200);
    assert_eq!(
        app.chat(same).await.header("x-traygate-dedup"),
        Some("cached")
    );
    assert_eq!(
        app.chat(r#"{"model":"limited","messages":[]}"#)
            .await
            .status(),
        429
    );
    assert_eq!(app.post("/nobody/v1/embeddings", "{}").await.status(), 404);

    let of_chat = |outcome: &str, status: u16| {
        format!(
            r#"traygate_requests_total{{provider="openai",route="chat/completions",outcome="{outcome}",status="{status}"}}"#
        )
    };
    let nobody =
        r#"traygate_requests_total{provider="",route="other",outcome="refused",status="404"}"#;
    let operations = |model: &str, error: &str| {
        format!(
            r#"gen_ai_client_operation_duration_seconds_count{{gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="{model}",error_type="{error}"}}"#
        )
    };
    let text = scraped(&app, nobody, 1.0).await;
    for (series, expected) in [
        (of_chat("completed", 200), 2.0),
        (of_chat("upstream_error", 429), 1.0),
        (operations("gpt-5", ""), 1.0),
        (operations("limited", "429"), 1.0),
        (
            r#"traygate_dedup_total{provider="openai",result="miss"}"#.to_owned(),
            2.0,
        ),
        (
            r#"traygate_dedup_total{provider="openai",result="cached"}"#.to_owned(),
            1.0,
        ),
        (
            r#"traygate_upstream_calls_total{provider="openai"}"#.to_owned(),
            2.0,
        ),
        (
            r#"traygate_overhead_seconds_count{dedup="miss"}"#.to_owned(),
            2.0,
        ),
        (
            r#"traygate_overhead_seconds_count{dedup="cached"}"#.to_owned(),
            1.0,
        ),
        (
            r#"traygate_overhead_seconds_count{dedup="refused"}"#.to_owned(),
            1.0,
        ),
    ] {
        assert_eq!(value(&text, &series), Some(expected), "{series} in\n{text}");
    }
    assert_eq!(up.calls(), 2);
}

#[tokio::test]
async fn gauges_show_calls_in_flight_and_waiting() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| Reply::chat(request).held_by(&held)).await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
    let ask = |n: usize| {
        let body = format!(r#"{{"model":"m{n}","messages":[]}}"#);
        let addr = app.addr();
        tokio::spawn(async move { post_json(addr, "/v1/chat/completions", body).await })
    };
    let calls = [ask(1), ask(2), ask(3)];
    scraped(&app, r#"traygate_queue_depth{provider="openai"}"#, 2.0).await;
    scraped(&app, r#"traygate_inflight{provider="openai"}"#, 1.0).await;
    gate.open();
    for call in calls {
        assert_eq!(call.await.expect("answered").status(), 200);
    }
    scraped(&app, r#"traygate_queue_depth{provider="openai"}"#, 0.0).await;
    scraped(&app, r#"traygate_inflight{provider="openai"}"#, 0.0).await;
}

#[tokio::test]
async fn nothing_of_what_a_call_says_is_shown_but_its_models_name() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let call = post("/@my-tool/openai/v1/chat/completions?key=in-the-query")
        .header("authorization", "Bearer sk-in-the-header")
        .json(r#"{"model":"the-model","messages":[{"role":"user","content":"in-the-prompt"}]}"#);
    assert_eq!(app.ask(call).await.status(), 200);
    let file = post("/openai/v1/files/in-the-path").json("{}");
    app.ask(file).await;
    let two = r#"traygate_upstream_calls_total{provider="openai"}"#;
    let text = scraped(&app, two, 2.0).await;
    assert!(text.contains("the-model"));
    for secret in [
        "in-the-query",
        "sk-in",
        "in-the-prompt",
        "in-the-path",
        "my-tool",
    ] {
        assert!(!text.contains(secret), "{secret} in\n{text}");
    }
}
