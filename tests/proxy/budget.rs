//! Caps that hold: what is reserved, what it comes to, and what a call gets that does not fit.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use traygate::clock::Clock;
use traygate::core::Core;
use traygate::events::{BudgetNews, Change, Event, Subscription, Told};
use traygate::keys::Keys;
use traygate::run::{Options, Running, start};
use traygate::settings::Overrides;
use traygate::settings::on_disk::SettingsFile;
use traygate::store::queries::CallRow;

use super::support::app::App;
use super::support::client::{Answer, Outgoing, post, post_json};
use super::support::upstream::{Gate, Reply, Request, Upstream, chat_answer};
use super::support::{Span as _, eventually, must};

/// A thousand dollars a million tokens of output, and input for nothing: a tenth of a cent a token.
const PRICE: &str = "[[price]]\nmodel = \"m\"\ninput = 0\noutput = 1000\n";

/// What [`chat`] may cost at most: 100 tokens.
const WORST: i64 = 100_000_000;
/// What the scripted answer of seven tokens costs.
const REAL: i64 = 7_000_000;

/// A call that asks for at most 100 tokens.
fn chat(text: &str) -> String {
    json!({"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}]})
        .to_string()
}

fn budget(usd: &str, more: &str) -> String {
    format!("{PRICE}[[budget]]\nper = \"month\"\nusd = {usd}\n{more}\n")
}

/// An answer that costs as much as [`chat`] may.
fn dear(_: &Request) -> Reply {
    let cheap = chat_answer("hi");
    Reply::json(
        200,
        cheap.replace("\"completion_tokens\":7", "\"completion_tokens\":100"),
    )
}

fn state(core: &Arc<Core>) -> (i64, i64) {
    let budgets = core.spend.budgets(core.clock.wall());
    (budgets[0].spent.0, budgets[0].held.0)
}

/// Spent and held of the first budget.
fn stands(app: &App) -> (i64, i64) {
    state(app.running().core())
}

async fn comes_to_stand(app: &App, spent: i64, held: i64) {
    eventually(&format!("{spent} spent, {held} held"), async || {
        stands(app) == (spent, held)
    })
    .await;
}

fn ask(app: &App, request: Outgoing) -> JoinHandle<Answer> {
    let addr = app.addr();
    tokio::spawn(async move {
        let mut client = super::support::client::Client::to(addr).await;
        client.ask(request).await
    })
}

fn of_tool(tool: &str, body: &str) -> Outgoing {
    post("/openai/v1/chat/completions")
        .json(body)
        .header("x-traygate-tag", tool)
}

async fn answer_of(asked: JoinHandle<Answer>) -> Answer {
    must("an answer", asked).await.expect("no panic")
}

fn money(row: &CallRow) -> (Option<i64>, Option<i64>, Option<i64>) {
    let account = &row.account;
    (account.cost_nanos, account.list_nanos, account.saved_nanos)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_at_once_cannot_pass_the_cap() {
    let up = Upstream::start(dear).await;
    let settings = budget("1.00", "[limits]\nconcurrency = 1000\nqueue = 2000\n");
    let app = App::with(&up, &settings).await;
    let calls: Vec<_> = (0..1000)
        .map(|n| ask(&app, App::chat_request(&chat(&n.to_string()))))
        .collect();
    let (mut good, mut refused) = (0, 0);
    for call in calls {
        let answer = answer_of(call).await;
        match answer.status() {
            200 => good += 1,
            402 => refused += 1,
            other => panic!("{other}: {}", answer.text()),
        }
    }
    assert_eq!((good, refused), (10, 990));
    assert_eq!(up.calls(), 10, "no other call went out");
    comes_to_stand(&app, 10 * WORST, 0).await;
    let rows = app.rows(1000).await;
    let cost: i64 = rows.iter().filter_map(|row| row.account.cost_nanos).sum();
    assert_eq!(cost, 1_000_000_000);
    let refused = rows.iter().filter(|row| row.status == Some(402));
    assert!(refused.clone().all(|row| money(row).0 == Some(0)));
    assert!(refused.clone().all(|row| row.upstream_call == Some(false)));
}

#[tokio::test]
async fn a_refusal_speaks_each_dialect_and_says_what_there_is_to_know() {
    let up = Upstream::chatting().await;
    let settings = budget("0.05", "provider = \"openai\"");
    let app = App::with(&up, &settings).await;
    let tellings = [
        ("/openai/v1/chat/completions", "/error"),
        ("/openai/v1/messages", "/error"),
        ("/openai/api/chat", ""),
    ];
    for (path, place) in tellings {
        let answer = app.post(path, &chat("hello")).await;
        assert_eq!(answer.status(), 402, "{path}: {}", answer.text());
        assert_eq!(answer.header("x-should-retry"), Some("false"), "{path}");
        assert_eq!(answer.header("x-traygate-error"), Some("budget_exceeded"));
        let body = answer.json();
        let told = &body.pointer(place).expect("a place")["budget"];
        assert_eq!(told["cap_nanos"], 50_000_000, "{path}: {body}");
        assert_eq!(told["spent_nanos"], 0);
        assert_eq!(told["held_nanos"], 0);
        assert_eq!(told["worst_case_nanos"], WORST);
        let resets = told["resets_at"].as_str().expect("a time");
        assert!(resets.ends_with('Z'), "{resets}");
    }
    let openai = app
        .post("/openai/v1/chat/completions", &chat("x"))
        .await
        .json();
    let message = openai["error"]["message"].as_str().expect("words");
    assert!(message.starts_with(
        "Traygate: the month's budget for provider \"openai\" is $0.05: $0.00 is spent and $0.00 is \
         held for calls under way; this call may cost up to $0.10"
    ), "{message}");
    assert!(
        message.contains("max_tokens") && message.contains("[[budget]]"),
        "{message}"
    );
    assert_eq!(openai["error"]["code"], "budget_exceeded");
    assert_eq!(openai["error"]["type"], "insufficient_quota");
    let anthropic = app.post("/openai/v1/messages", &chat("x")).await.json();
    assert_eq!(anthropic["type"], "error");
    assert_eq!(anthropic["error"]["type"], "billing_error");
    assert!(anthropic["request_id"].is_string());
    let ollama = app.post("/openai/api/chat", &chat("x")).await.json();
    assert!(ollama["error"].is_string());
    assert_eq!(up.calls(), 0, "no call went out");
    for row in app.rows(6).await {
        assert_eq!(row.outcome.as_deref(), Some("refused"));
        assert_eq!(money(&row).0, Some(0));
    }
}

#[tokio::test]
async fn a_call_that_others_stand_before_waits_and_lets_those_behind_go() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| {
        let reply = Reply::chat(request);
        match request.json()["messages"][0]["content"] == "first" {
            true => reply.held_by(&held),
            false => reply,
        }
    })
    .await;
    let settings = budget("0.15", "tool = \"spender\"\n[limits]\nconcurrency = 2\n");
    let app = App::with(&up, &settings).await;
    let first = ask(&app, of_tool("spender", &chat("first")));
    up.wait_for_calls(1).await;
    assert_eq!(stands(&app), (0, WORST));
    let second = ask(&app, of_tool("spender", &chat("second")));
    eventually("two rows", async || app.rows_now().len() == 2).await;
    // One place is taken by the first. That the other is free for these shows that the second gave
    // its own back.
    for n in 0..3 {
        let other = answer_of(ask(&app, of_tool("other", &chat(&n.to_string())))).await;
        assert_eq!(other.status(), 200);
    }
    assert_eq!(up.calls(), 4);
    assert!(!second.is_finished());
    gate.open();
    assert_eq!(answer_of(first).await.status(), 200);
    assert_eq!(answer_of(second).await.status(), 200);
    comes_to_stand(&app, 2 * REAL, 0).await;
}

#[tokio::test]
async fn a_call_waits_for_a_budget_no_longer_than_for_a_permit() {
    let up = Upstream::hanging().await;
    let settings = budget("0.15", "[limits]\nqueue_secs = 0.3\n");
    let app = App::with(&up, &settings).await;
    let _first = ask(&app, App::chat_request(&chat("first")));
    up.wait_for_calls(1).await;
    let refused = app.chat(&chat("second")).await;
    assert_eq!(refused.status(), 402);
    let told = refused.text();
    assert!(
        told.contains("no room came within 0.3 s (limits.queue_secs)"),
        "{told}"
    );
    let rows = app.rows(1).await;
    let row = rows
        .iter()
        .find(|row| row.status == Some(402))
        .expect("its row");
    assert!(row.queued.expect("known") >= Duration::from_millis(300));
    assert_eq!(up.calls(), 1);
    assert_eq!(stands(&app).1, WORST, "the first one's, and nothing else");
}

#[tokio::test]
async fn a_spent_budget_refuses_before_the_queue() {
    let up = Upstream::hanging().await;
    let settings = budget("0.05", "tool = \"poor\"\n[limits]\nconcurrency = 1\n");
    let app = App::with(&up, &settings).await;
    let _holds_the_permit = ask(&app, of_tool("rich", &chat("first")));
    up.wait_for_calls(1).await;
    let refused = must("a refusal", ask(&app, of_tool("poor", &chat("second")))).await;
    assert_eq!(refused.expect("no panic").status(), 402);
}

#[tokio::test]
async fn what_costs_nothing_goes_on_when_all_is_spent() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, &budget("0", "")).await;
    assert_eq!(app.chat(&chat("x")).await.status(), 402);
    assert_eq!(
        app.post("/ollama/v1/chat/completions", &chat("x"))
            .await
            .status(),
        200
    );
    let plan = post("/openai/v1/chat/completions")
        .json(chat("x"))
        .header("authorization", "Bearer eyJhbGciOi.eyJzdWIi.c2ln");
    assert_eq!(app.ask(plan).await.status(), 200);
    let free = app.post("/openai/v1/messages/count_tokens", "{}").await;
    assert_eq!(free.status(), 200, "a free route");
    let image = app.post("/openai/v1/images/generations", "{}").await;
    assert_eq!(
        image.status(),
        402,
        "nobody knows what it costs, and nothing is left"
    );
    let rows = app.rows(5).await;
    let of = |billing: &str| {
        let row = rows.iter().find(|row| row.billing == billing);
        money(row.expect("its row"))
    };
    assert_eq!(of("free"), (Some(0), Some(0), None));
    assert_eq!(
        of("plan"),
        (Some(0), Some(REAL), None),
        "its list value is shown"
    );
    assert_eq!(stands(&app), (0, 0));
}

#[tokio::test]
async fn a_refusal_of_one_tools_budget_is_not_anothers() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| {
        let reply = Reply::chat(request);
        match request.json()["messages"][0]["content"] == "first" {
            true => reply.held_by(&held),
            false => reply,
        }
    })
    .await;
    let settings = budget("0.15", "tool = \"poor\"\n[limits]\nqueue_secs = 1\n");
    let app = App::with(&up, &settings).await;
    let first = ask(&app, of_tool("poor", &chat("first")));
    up.wait_for_calls(1).await;
    // It leads, and waits in vain for the first one's reservation.
    let leader = ask(&app, of_tool("poor", &chat("shared")));
    eventually("two rows", async || app.rows_now().len() == 2).await;
    let twin = ask(&app, of_tool("poor", &chat("shared")));
    let rich = ask(&app, of_tool("rich", &chat("shared")));
    eventually("two followers", async || {
        app.running().core().dedup.counts().joined == 2
    })
    .await;
    assert_eq!(answer_of(leader).await.status(), 402);
    assert_eq!(answer_of(twin).await.status(), 402, "the same tool's");
    let rich = answer_of(rich).await;
    assert_eq!(rich.status(), 200, "{}", rich.text());
    assert_eq!(rich.header("x-traygate-dedup"), Some("miss"));
    assert_eq!(up.calls(), 2);
    gate.open();
    answer_of(first).await;
    let rows = app.rows(4).await;
    let row = rows.iter().find(|row| row.tool == "rich").expect("its row");
    assert_eq!(row.dedup, "miss");
    assert_eq!(money(row).0, Some(REAL));
}

#[tokio::test]
async fn what_is_spent_survives_a_restart() {
    let up = Upstream::chatting().await;
    let settings = App::settings(up.addr(), &budget("0.11", ""));
    let app = App::start(&settings).await;
    for n in 0..2 {
        assert_eq!(app.chat(&chat(&n.to_string())).await.status(), 200);
    }
    assert_eq!(stands(&app), (2 * REAL, 0));
    let folder = app.stop().await;
    let app = App::start_in(folder, &settings).await;
    assert_eq!(stands(&app), (2 * REAL, 0));
    assert_eq!(app.chat(&chat("once more")).await.status(), 402);
    assert_eq!(up.calls(), 2);
}

#[cfg(unix)]
#[tokio::test]
async fn what_was_reserved_when_it_was_killed_is_taken_for_spent() {
    use super::support::process::{Home, Signal};

    let up = Upstream::start(|request: &Request| {
        match request.json()["messages"][0]["content"] == "hangs" {
            true => Reply::hang(),
            false => Reply::chat(request),
        }
    })
    .await;
    let home = Home::new();
    // Room for one worst case beside what the first call costs, and not for two.
    home.settings(&App::settings(
        up.addr(),
        &budget("0.15", "[limits]\nconcurrency = 4\n"),
    ));
    let traygate = home.serve(&[]).await;
    let path = "/openai/v1/chat/completions";
    assert_eq!(
        post_json(traygate.addr(), path, chat("ends"))
            .await
            .status(),
        200
    );
    home.ended_rows(1).await;
    let mut hanging = super::support::client::Client::to(traygate.addr()).await;
    hanging.send(post(path).json(chat("hangs"))).await;
    up.wait_for_calls(2).await;
    eventually("its reservation is on record", async || {
        home.rows()
            .iter()
            .any(|row| row.reserved_nanos == Some(WORST))
    })
    .await;
    traygate.signal(Signal::KILL);
    traygate.ended().await;

    let traygate = home.serve(&[]).await;
    let rows = home.ended_rows(2).await;
    let killed = rows
        .iter()
        .find(|row| row.outcome.as_deref() == Some("interrupted"));
    let killed = killed.expect("the call that was under way");
    assert_eq!(killed.account.cost_nanos, Some(WORST));
    let refused = post_json(traygate.addr(), path, chat("again")).await;
    assert_eq!(refused.status(), 402);
    let told = &refused.json()["error"]["budget"];
    assert_eq!(told["spent_nanos"], WORST + REAL);
}

#[tokio::test]
async fn the_leader_carries_the_cost_even_if_it_left_and_others_save_it() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| Reply::chat(request).held_by(&held)).await;
    let app = App::with(&up, &budget("5.00", "")).await;
    let body = chat("shared");
    let mut leader = app.client().await;
    leader.send(App::chat_request(&body)).await;
    up.wait_for_calls(1).await;
    let follower = ask(&app, App::chat_request(&body));
    eventually("a follower", async || {
        app.running().core().dedup.counts().joined == 1
    })
    .await;
    leader.finish_sending();
    leader.closed().await;
    gate.open();
    assert_eq!(answer_of(follower).await.status(), 200);
    assert_eq!(
        app.chat(&body).await.header("x-traygate-dedup"),
        Some("cached")
    );
    let rows = app.rows(3).await;
    let of = |dedup: &str| rows.iter().find(|row| row.dedup == dedup).expect("its row");
    assert_eq!(of("miss").outcome.as_deref(), Some("client_left"));
    assert_eq!(money(of("miss")), (Some(REAL), Some(REAL), None));
    for shared in ["joined", "cached"] {
        assert_eq!(money(of(shared)), (Some(0), None, Some(REAL)), "{shared}");
    }
    assert_eq!(stands(&app), (REAL, 0));
}

/// A client that hangs up after the last event, before the end: what it saved is known then.
#[tokio::test]
async fn a_follower_that_has_it_all_saves_it_though_the_end_was_not_seen() {
    use super::support::upstream::chat_events;

    let (start, end) = (Gate::new(), Gate::new());
    let (held, kept_open) = (start.clone(), end.clone());
    let up = Upstream::start(move |_| {
        Reply::sse(chat_events(2))
            .held_by(&held)
            .then_wait_for(&kept_open)
    })
    .await;
    let app = App::with(&up, &budget("5.00", "")).await;
    let body = json!({"model": "m", "max_tokens": 100, "stream": true, "messages": [],
                      "stream_options": {"include_usage": true}})
    .to_string();
    let leader = ask(&app, App::chat_request(&body));
    up.wait_for_calls(1).await;
    let mut follower = app.client().await;
    follower.send(App::chat_request(&body)).await;
    eventually("a follower", async || {
        app.running().core().dedup.counts().joined == 1
    })
    .await;
    start.open();
    follower.head().await;
    follower.read_until("[DONE]").await;
    follower.finish_sending();
    follower.closed().await;
    end.open();
    answer_of(leader).await;
    let rows = app.rows(2).await;
    let joined = rows
        .iter()
        .find(|row| row.dedup == "joined")
        .expect("its row");
    assert_eq!(joined.outcome.as_deref(), Some("completed"));
    assert_eq!(
        money(joined),
        (Some(0), None, Some(2_000_000)),
        "two tokens"
    );
}

#[tokio::test]
async fn an_unpriced_call_is_never_free_and_may_be_refused() {
    let up = Upstream::chatting().await;
    let body = chat("x").replace("\"m\"", "\"nobody-knows-it\"");
    let app = App::with(&up, &budget("5.00", "")).await;
    assert_eq!(app.chat(&body).await.status(), 200);
    let row = &app.rows(1).await[0];
    assert_eq!(money(row), (None, None, None));
    assert_eq!(row.account.pricing.as_deref(), Some("unpriced"));
    let seen = app.running().core().spend.unpriced();
    assert_eq!((seen.len(), &*seen[0].model), (1, "nobody-knows-it"));
    let app = App::with(&up, &budget("5.00", "[spend]\nunpriced = \"refuse\"\n")).await;
    let refused = app.chat(&body).await;
    assert_eq!(refused.status(), 402);
    let told = refused.json();
    assert_eq!(told["error"]["budget"]["worst_case_nanos"], Value::Null);
    let message = told["error"]["message"].as_str().expect("words");
    assert!(
        message.contains("nobody knows what nobody-knows-it costs at openai"),
        "{message}"
    );
    assert_eq!(up.calls(), 1);
}

/// Pictures and audio have no tokens that are read here: they cost something all the same.
#[tokio::test]
async fn a_route_that_tells_no_tokens_is_unpriced_too() {
    let up = Upstream::answering(r#"{"data":[]}"#).await;
    let path = "/openai/v1/images/generations";
    let app = App::with(&up, &budget("5.00", "")).await;
    assert_eq!(app.post(path, r#"{"model":"m"}"#).await.status(), 200);
    let row = &app.rows(1).await[0];
    assert_eq!(money(row), (None, None, None));
    assert_eq!(row.account.pricing.as_deref(), Some("unpriced"));
    // What is free stays so.
    let counted = "/anthropic/v1/messages/count_tokens";
    assert_eq!(app.post(counted, "{}").await.status(), 200);
    assert_eq!(app.rows(2).await[0].account.pricing, None);
    let app = App::with(&up, &budget("5.00", "[spend]\nunpriced = \"refuse\"\n")).await;
    let refused = app.post(path, r#"{"model":"m"}"#).await;
    assert_eq!(refused.status(), 402, "{}", refused.text());
    assert_eq!(app.post(counted, "{}").await.status(), 200);
    assert_eq!(up.requests().len(), 3);
}

/// Where the answer names a model that has a price, a deployment's name needs none.
#[tokio::test]
async fn the_model_that_answered_prices_a_name_that_nobody_knows() {
    let up = Upstream::answering(chat_answer("hi").replace("scripted", "m")).await;
    let app = App::with(&up, PRICE).await;
    app.chat(&chat("x").replace("\"m\"", "\"my-deployment\""))
        .await;
    assert_eq!(money(&app.rows(1).await[0]).0, Some(REAL));
}

#[tokio::test]
async fn a_providers_own_cost_wins() {
    let own =
        chat_answer("hi").replace("\"total_tokens\":18", "\"total_tokens\":18,\"cost\":0.0042");
    let up = Upstream::answering(own).await;
    let app = App::with(&up, &budget("5.00", "")).await;
    app.chat(&chat("x")).await;
    let row = &app.rows(1).await[0];
    assert_eq!(money(row).0, Some(4_200_000));
    assert_eq!(row.account.pricing.as_deref(), Some("reported"));
    assert_eq!(stands(&app), (4_200_000, 0));
}

/// What has been told of budgets so far.
async fn budget_news(events: &mut Subscription, last: BudgetNews) -> Vec<BudgetNews> {
    let mut told = Vec::new();
    while told.last() != Some(&last) {
        match must("an event", events.next()).await {
            Some(Told::Event(Event::State(Change::Budget { kind, name }))) => {
                assert_eq!(name, "the month's budget");
                told.push(kind);
            }
            Some(_) => {}
            None => panic!("no more events, after {told:?}"),
        }
    }
    told
}

#[tokio::test]
async fn near_spent_and_refused_are_told_once_each() {
    let up = Upstream::start(dear).await;
    let app = App::with(&up, &budget("0.5", "[spend]\nwarn_at = 0.6\n")).await;
    let mut events = app.running().core().events.subscribe();
    for n in 0..8 {
        app.chat(&chat(&n.to_string())).await;
    }
    assert_eq!(up.calls(), 5);
    use BudgetNews::{Near, Refused, Spent};
    assert_eq!(
        budget_news(&mut events, Refused).await,
        [Near, Spent, Refused]
    );
    let rest = tokio::time::timeout(100.ms(), budget_news(&mut events, Refused)).await;
    assert!(rest.is_err(), "told again: {rest:?}");
}

#[tokio::test]
async fn bypass_holds_nothing_back_and_counts_all_the_same() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, &budget("0", "")).await;
    let core = app.running().core();
    core.set_mode(traygate::mode::Mode::Bypass, None);
    assert_eq!(app.chat(&chat("x")).await.status(), 200);
    assert_eq!(money(&app.rows(1).await[0]).0, Some(REAL));
    comes_to_stand(&app, REAL, 0).await;
}

/// Every way a call can end gives back what was reserved for it.
#[tokio::test]
async fn no_reservation_outlives_its_call() {
    // Nobody there.
    let dead = Upstream::dead_port();
    let app = App::start(&App::settings(dead.addr(), &budget("0.15", ""))).await;
    assert_eq!(app.chat(&chat("x")).await.status(), 502);
    comes_to_stand(&app, 0, 0).await;

    // An error costs nothing.
    let up = Upstream::failing(500).await;
    let app = App::with(&up, &budget("0.15", "")).await;
    assert_eq!(app.chat(&chat("x")).await.status(), 500);
    comes_to_stand(&app, 0, 0).await;
    assert_eq!(money(&app.rows(1).await[0]).0, Some(0));

    // A client that leaves while its call waits for a budget, and one whose call is upstream.
    let up = Upstream::hanging().await;
    let app = App::with(&up, &budget("0.15", "[dedup]\nlinger_secs = 0\n")).await;
    let mut first = app.client().await;
    first.send(App::chat_request(&chat("first"))).await;
    up.wait_for_calls(1).await;
    let mut waiting = app.client().await;
    waiting.send(App::chat_request(&chat("second"))).await;
    eventually("two rows", async || app.rows_now().len() == 2).await;
    waiting.finish_sending();
    waiting.closed().await;
    let rows = app.rows(1).await;
    let left = rows
        .iter()
        .find(|row| row.outcome.is_some())
        .expect("ended");
    assert_eq!(left.outcome.as_deref(), Some("client_left"));
    assert_eq!(money(left).0, Some(0), "it never went out");
    assert_eq!(stands(&app), (0, WORST));
    first.finish_sending();
    first.closed().await;
    let rows = app.rows(2).await;
    // What the prompt costs (nothing here) is estimated; no answer had begun.
    let sum: i64 = rows.iter().filter_map(|row| row.account.cost_nanos).sum();
    comes_to_stand(&app, sum, 0).await;
    assert_eq!(up.calls(), 1);
}

/// With its settings in a file, which may change.
pub async fn start_live(text: &str, clock: Clock) -> (Running, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).expect("written");
    let overrides = Overrides {
        port: Some(0),
        ..Overrides::default()
    };
    let file = SettingsFile { path, overrides };
    let found = file.snapshot().expect("readable");
    let running = start(Options {
        settings: file.settings(&found).expect("good settings"),
        config: Some(file),
        data_dir: folder.path().join("data"),
        clock,
        keys: Some(Keys::empty()),
    })
    .await
    .expect("Traygate starts");
    (running, folder)
}

#[tokio::test]
async fn a_budget_that_is_raised_lets_those_go_that_wait_and_keeps_what_is_spent() {
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| {
        let reply = Reply::chat(request);
        match request.json()["messages"][0]["content"] == "first" {
            true => reply.held_by(&held),
            false => reply,
        }
    })
    .await;
    let (running, _folder) =
        start_live(&App::settings(up.addr(), &budget("0.15", "")), Clock::Boot).await;
    let core = running.core();
    let path = "/openai/v1/chat/completions";
    let addr = running.address();
    assert_eq!(post_json(addr, path, chat("zeroth")).await.status(), 200);
    let first = tokio::spawn(async move { post_json(addr, path, chat("first")).await });
    up.wait_for_calls(2).await;
    let second = tokio::spawn(async move { post_json(addr, path, chat("second")).await });
    eventually("three calls", async || core.live.all().len() == 2).await;
    let raised = json!({"budget": [{"per": "month", "usd": 0.50}]});
    core.patch_settings(raised, None)
        .await
        .expect("good settings");
    assert_eq!(answer_of(second).await.status(), 200);
    assert_eq!(state(core), (2 * REAL, WORST));
    let lowered = json!({"budget": [{"per": "month", "usd": 0.01}]});
    core.patch_settings(lowered, None)
        .await
        .expect("good settings");
    assert_eq!(post_json(addr, path, chat("third")).await.status(), 402);
    gate.open();
    assert_eq!(answer_of(first).await.status(), 200);
    eventually("three are paid", async || state(core) == (3 * REAL, 0)).await;
}
