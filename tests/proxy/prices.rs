//! Where prices come from: the list, a newer one, and the person's own.

use std::sync::atomic::{AtomicI64, Ordering};

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use traygate::clock::Clock;

use super::admin;
use super::budget::start_live;
use super::support::app::{App, rows_in};
use super::support::client::post_json;
use super::support::upstream::{Reply, Request, Upstream, chat_answer};
use super::support::{LIMIT, eventually};

/// As it comes with Traygate.
const LIST: &str = include_str!("../../src-tauri/src/policy/price/genai-prices.json");

const CHAT: &str = r#"{"model":"gpt-4o","messages":[]}"#;

/// Answers as `gpt-4o`, and hands out a price list in which that costs as much as is asked for.
async fn provider(dollars: u64) -> Upstream {
    let mut list: Value = serde_json::from_str(LIST).expect("a list");
    let sellers = list.as_array_mut().expect("sellers");
    let openai = sellers.iter_mut().find(|seller| seller["id"] == "openai");
    let models = openai.expect("there")["models"]
        .as_array_mut()
        .expect("models");
    let model = models.iter_mut().find(|model| model["id"] == "gpt-4o");
    model.expect("there")["prices"]["input_mtok"] = json!(dollars);
    let list = list.to_string();
    Upstream::start(move |request: &Request| match request.method.as_str() {
        "GET" => Reply::json(200, &list),
        _ => Reply::json(200, chat_answer("hi")),
    })
    .await
}

async fn refresh(app: &App, address: String) -> (StatusCode, Value) {
    app.running().core().price_list.fetch_from(address);
    admin::ask(app, Method::POST, "prices/refresh", None).await
}

/// What a call of eleven tokens of input and seven of output costs, in billionths of a dollar.
async fn cost(app: &App, calls: usize) -> Option<i64> {
    let body = CHAT.replace("[]", &format!("[{calls}]"));
    assert_eq!(app.chat(&body).await.status(), 200);
    app.rows(calls).await[0].account.cost_nanos
}

#[tokio::test]
async fn a_newer_list_takes_effect_and_is_kept() {
    let up = provider(3).await;
    let app = App::before(&up).await;
    assert_eq!(cost(&app, 1).await, Some(11 * 2_500 + 7 * 10_000));
    let before = admin::get(&app, "prices").await;
    assert_eq!(before["fetched"], Value::Null);
    assert!(before["models"].as_u64().expect("a number") > 1000);

    let (status, told) = refresh(&app, format!("{}/data.json", up.url())).await;
    assert_eq!(status, 200, "{told}");
    assert!(told["fetched"].is_string());
    assert_eq!(cost(&app, 2).await, Some(11 * 3_000 + 7 * 10_000));

    let folder = app.stop().await;
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    assert!(admin::get(&app, "prices").await["fetched"].is_string());
    assert_eq!(cost(&app, 3).await, Some(11 * 3_000 + 7 * 10_000));
}

#[tokio::test]
async fn a_list_that_is_not_to_be_relied_on_changes_nothing_and_is_told() {
    let up = provider(3).await;
    let app = App::before(&up).await;
    let half = LIST[..LIST.len() / 2].to_owned();
    let few = json!([serde_json::from_str::<Value>(LIST).expect("a list")[0]]).to_string();
    for (list, code) in [
        (half, "prices_senseless"),
        (few, "prices_senseless"),
        ("[]".to_owned(), "prices_senseless"),
    ] {
        let bad = Upstream::answering(list).await;
        let refused = refresh(&app, bad.url()).await;
        assert_eq!(admin::code(&refused, 502), code);
    }
    let failing = Upstream::failing(503).await;
    let refused = refresh(&app, failing.url()).await;
    assert_eq!(admin::code(&refused, 502), "prices_unreachable");
    let state = admin::get(&app, "state").await;
    let warnings = state["warnings"].as_array().expect("warnings");
    let told = warnings.iter().find(|warning| warning["about"] == "prices");
    let told = told.expect("a warning")["message"].as_str().expect("words");
    assert!(told.contains("503"), "{told}");
    assert_eq!(cost(&app, 1).await, Some(11 * 2_500 + 7 * 10_000));
    // Once it works, the warning goes.
    let (status, _) = refresh(&app, up.url()).await;
    assert_eq!(status, 200);
    let state = admin::get(&app, "state").await;
    let warnings = state["warnings"].as_array().expect("warnings");
    assert!(!warnings.iter().any(|warning| warning["about"] == "prices"));
}

#[tokio::test]
async fn it_is_fetched_once_a_day_and_only_where_that_is_turned_on() {
    static HOURS_ON: AtomicI64 = AtomicI64::new(0);
    let up = provider(3).await;
    let (running, _folder) =
        start_live(&App::settings(up.addr(), ""), Clock::Stepped(&HOURS_ON)).await;
    let core = running.core();
    core.price_list.fetch_from(up.url());
    core.refresh_old_prices().await;
    assert_eq!(up.requests().len(), 0, "it is not turned on");
    let on = json!({"spend": {"refresh_prices": true}});
    core.patch_settings(on, None).await.expect("good settings");
    for (hours, fetched) in [(0, 1), (0, 1), (23, 1), (25, 2)] {
        HOURS_ON.store(hours * 3_600_000_000, Ordering::Relaxed);
        core.refresh_old_prices().await;
        assert_eq!(up.requests().len(), fetched, "after {hours} hours");
    }
    // A failure is no reason to ask again and again.
    up.set_handler(|_| Reply::status(500));
    HOURS_ON.store(50 * 3_600_000_000, Ordering::Relaxed);
    core.refresh_old_prices().await;
    core.refresh_old_prices().await;
    assert_eq!(up.requests().len(), 3);
}

#[tokio::test]
async fn a_price_that_is_set_prices_what_is_on_record() {
    let up = Upstream::chatting().await;
    let budget = "[[budget]]\nper = \"month\"\nusd = 5\n";
    let (running, folder) = start_live(&App::settings(up.addr(), budget), Clock::Boot).await;
    let core = running.core();
    let body = r#"{"model":"mine","messages":[]}"#;
    let answer = post_json(running.address(), "/openai/v1/chat/completions", body).await;
    assert_eq!(answer.status(), 200);
    let rows = || rows_in(&folder.path().join("data"));
    eventually("a row", async || {
        rows()
            .iter()
            .any(|row| row.account.pricing.as_deref() == Some("unpriced"))
    })
    .await;
    assert_eq!(rows()[0].account.cost_nanos, None);
    let unpriced = core.spend.unpriced();
    let seen: Vec<_> = unpriced
        .iter()
        .map(|it| (&*it.provider, &*it.model, it.calls))
        .collect();
    assert_eq!(seen, [("openai", "mine", 1)]);
    let price = json!({"price": [{"model": "mine", "input": 1, "output": 2, "cached_input": 0.1}]});
    core.patch_settings(price, None)
        .await
        .expect("good settings");
    eventually("a price", async || {
        rows()[0].account.cost_nanos == Some(11 * 1_000 + 7 * 2_000)
    })
    .await;
    assert_eq!(core.spend.unpriced(), [], "it has one now");
    // Budgets hear of it, once, and no more of it at a later price.
    let spent = || core.spend.budgets(core.clock.wall())[0].spent.0;
    eventually("it is spent", async || spent() == 25_000).await;
    let price = json!({"price": [{"model": "mine", "input": 5, "output": 2}]});
    core.patch_settings(price, None)
        .await
        .expect("good settings");
    assert!(core.store.flush(LIMIT));
    assert_eq!(spent(), 25_000);
}
