//! What was spent: on each row, in the reports of the API and of the command line, to the billionth
//! of a dollar, also when the rows have gone.

use std::collections::BTreeMap;

use axum::http::{Method, StatusCode};
use rusqlite::Connection;
use serde_json::{Value, json};
use traygate::store::DATABASE_FILE;
use traygate::store::queries::CallRow;

use super::admin::{ask, code, get};
use super::support::app::App;
use super::support::client::{fetch, post};
use super::support::eventually;
use super::support::process::Home;
use super::support::upstream::{Reply, Request, Upstream, chat_answer};

const PRICES: &str = "[[price]]\nmodel = \"cheap\"\ninput = 0.50\noutput = 1.50\n\
    [[price]]\nmodel = \"dear\"\ninput = 3\ncached_input = 0.30\ncache_write = 3.75\n\
    cache_write_1h = 6\noutput = 15\n";

/// The price of `wild`, which has none at first.
const WILD: &str = "[[price]]\nmodel = \"wild\"\ninput = 0.007\noutput = 1\n";

/// Billionths of a dollar a token: fresh and cached input, writes for five minutes and an hour,
/// output.
fn rates(model: &str) -> Option<[u64; 5]> {
    match model {
        "cheap" => Some([500, 500, 500, 500, 1_500]),
        "dear" => Some([3_000, 300, 3_750, 6_000, 15_000]),
        _ => None,
    }
}

/// What the tokens of a row come to; nothing where it says none.
fn worth(row: &CallRow, rates: [u64; 5]) -> i64 {
    let account = &row.account;
    let counts = [
        account.input_tokens,
        account.cached_input_tokens,
        account.cache_write_5m_tokens,
        account.cache_write_1h_tokens,
        account.output_tokens,
    ];
    let counts = counts.into_iter().zip(rates);
    let sum: u64 = counts.map(|(count, rate)| count.unwrap_or(0) * rate).sum();
    i64::try_from(sum).expect("it fits")
}

/// Answers in the dialect of the path, with counts made of the prompt, which is a number.
fn provider(request: &Request) -> Reply {
    let body = request.json();
    if body["model"] == "failing" {
        return Reply::error(500);
    }
    let content = &body["messages"][0]["content"];
    let n: u64 = content
        .as_str()
        .and_then(|text| text.parse().ok())
        .expect("a number");
    if request.path().ends_with("/messages") {
        return Reply::json(
            200,
            json!({
                "id": "msg_1", "type": "message", "role": "assistant", "model": body["model"],
                "content": [{"type": "text", "text": "hi"}],
                "stop_reason": "end_turn", "stop_sequence": null,
                "usage": {
                    "input_tokens": 3 + n, "output_tokens": 5 + n,
                    "cache_read_input_tokens": 1000 * n, "cache_creation_input_tokens": 30 + n,
                    "cache_creation": {
                        "ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20 + n,
                    },
                },
            })
            .to_string(),
        );
    }
    let usage = json!({
        "prompt_tokens": 2000 + n, "completion_tokens": 7 + n, "total_tokens": 2007 + 2 * n,
        "prompt_tokens_details": {"cached_tokens": 1024},
        "completion_tokens_details": {"reasoning_tokens": 4},
    });
    if !request.wants_stream() {
        let mut answer: Value = serde_json::from_str(&chat_answer("hi")).expect("an answer");
        answer["model"] = body["model"].clone();
        answer["usage"] = usage;
        return Reply::json(200, answer.to_string());
    }
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"],
            "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let choice = |delta: Value, finish: Value| json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
    let mut events = vec![
        chunk(choice(json!({"content": "hi"}), Value::Null), Value::Null),
        chunk(choice(json!({}), json!("stop")), Value::Null),
    ];
    if body["stream_options"]["include_usage"] == true {
        events.push(chunk(json!([]), usage));
    }
    events.push("data: [DONE]\n\n".to_owned());
    Reply::sse(events)
}

/// The `n`th of many calls of every kind: two prices and none, two dialects, streamed and not,
/// local, on a subscription, failing; every fifth repeats an earlier one.
async fn call(app: &App, n: usize) {
    let tool = ["alpha", "beta", "gamma"][n % 3];
    let prompt = if n % 5 == 4 { n / 3 } else { n };
    let kind = prompt % 10;
    let (model, path) = match kind {
        0..=2 => ("cheap", "openai/v1/chat/completions"),
        3 => ("wild", "openai/v1/chat/completions"),
        4 => ("failing", "openai/v1/chat/completions"),
        5 | 6 => ("dear", "anthropic/v1/messages"),
        7 => ("dear", "openai/v1/chat/completions"),
        8 => ("llama", "ollama/v1/chat/completions"),
        _ => ("cheap", "ollama/v1/chat/completions"),
    };
    let mut body = json!({
        "model": model, "max_tokens": 100,
        "messages": [{"role": "user", "content": prompt.to_string()}],
    });
    if !path.ends_with("messages") && prompt.is_multiple_of(2) {
        body["stream"] = json!(true);
    }
    let mut request = post(&format!("/@{tool}/{path}")).json(body.to_string());
    if kind == 6 {
        request = request.header("authorization", "Bearer sk-ant-oat01-a-login");
    }
    let answer = app.ask(request).await;
    let expected = if model == "failing" { 500 } else { 200 };
    assert_eq!(answer.status(), expected, "{}", answer.text());
}

/// The lines of a report, by label.
fn lines(report: &Value) -> BTreeMap<String, Value> {
    let rows = report["rows"].as_array().expect("rows").iter();
    let label = |row: &Value| row["label"].as_str().expect("a label").to_owned();
    rows.map(|row| (label(row), row.clone())).collect()
}

const BYS: [&str; 6] = ["hour", "day", "month", "provider", "model", "tool"];

async fn reports(app: &App) -> Vec<(Value, BTreeMap<String, Value>)> {
    let mut reports = Vec::new();
    for by in BYS {
        let until = "2100-01-01T00:00:00Z";
        let path = format!("spend?by={by}&since=2020-01-01T00:00:00Z&until={until}&zone=UTC");
        let report = get(app, &path).await;
        reports.push((report["total"].clone(), lines(&report)));
    }
    reports
}

#[tokio::test]
async fn a_thousand_mixed_calls_are_what_their_tokens_come_to() {
    const CALLS: usize = 1000;
    let up = Upstream::start(provider).await;
    let app = App::with(
        &up,
        &format!("[breaker]\nfailures = 10000\nfailure_rate = 0\n{PRICES}"),
    )
    .await;
    let clients = (0..20).map(|client| {
        let app = &app;
        async move {
            for n in (client..CALLS).step_by(20) {
                call(app, n).await;
            }
        }
    });
    futures_util::future::join_all(clients).await;
    let rows = app.rows(CALLS).await;
    assert_eq!(rows.len(), CALLS);

    // Each row, from the tokens that it says.
    let mut kinds = BTreeMap::<&str, usize>::new();
    for row in &rows {
        let account = &row.account;
        let money = (account.cost_nanos, account.list_nanos, account.saved_nanos);
        let is_unpriced = account.pricing.as_deref() == Some("unpriced");
        let rates = rates(row.model.as_deref().expect("a model"));
        let is_shared = matches!(row.dedup.as_str(), "joined" | "cached");
        let (kind, expected, unpriced) = match row.billing.as_str() {
            "free" if is_shared => ("free, shared", (Some(0), None, Some(0)), false),
            "free" => ("free", (Some(0), Some(0), None), false),
            "plan" if is_shared => ("plan, shared", (Some(0), None, None), false),
            "plan" => {
                let worth = worth(row, rates.expect("it has a price"));
                ("plan", (Some(0), Some(worth), None), false)
            }
            _ if is_shared => {
                let caused_by = rows.iter().find(|other| {
                    other.request_key == row.request_key && other.upstream_call == Some(true)
                });
                let caused_by = caused_by.expect("the call whose answer it shared");
                match rates {
                    Some(rates) => (
                        "shared",
                        (Some(0), None, Some(worth(caused_by, rates))),
                        false,
                    ),
                    None if row.model.as_deref() == Some("failing") => {
                        ("failed, shared", (Some(0), None, Some(0)), false)
                    }
                    None => ("shared, unpriced", (Some(0), None, None), true),
                }
            }
            _ => match rates {
                Some(rates) => {
                    let worth = worth(row, rates);
                    assert!(worth > 0, "{row:?}");
                    ("priced", (Some(worth), Some(worth), None), false)
                }
                None if row.model.as_deref() == Some("failing") => {
                    ("failed", (Some(0), Some(0), None), false)
                }
                None => ("unpriced", (None, None, None), true),
            },
        };
        assert_eq!(
            (money, is_unpriced),
            (expected, unpriced),
            "{kind}: {row:?}"
        );
        *kinds.entry(kind).or_default() += 1;
    }
    for kind in [
        "free",
        "plan",
        "priced",
        "unpriced",
        "failed",
        "shared",
        "shared, unpriced",
    ] {
        assert!(kinds.contains_key(kind), "no {kind} among {kinds:?}");
    }

    // The reports, from the rows.
    type Name = fn(&CallRow) -> &str;
    type Amount = fn(&CallRow) -> i64;
    let names: [(usize, Name); 3] = [
        (3, |row| &row.provider),
        (4, |row| row.model.as_deref().unwrap_or("")),
        (5, |row| &row.tool),
    ];
    let reports_before = reports(&app).await;
    let sum = |rows: &[&CallRow], of: Amount| -> i64 { rows.iter().map(|row| of(row)).sum() };
    let check = |told: &Value, rows: &[&CallRow]| {
        let fields: [(&str, Amount); 8] = [
            ("calls", |_| 1),
            ("cost_nanos", |row| row.account.cost_nanos.unwrap_or(0)),
            ("saved_nanos", |row| row.account.saved_nanos.unwrap_or(0)),
            ("list_nanos", |row| row.account.list_nanos.unwrap_or(0)),
            ("plan_nanos", |row| match row.billing.as_str() {
                "plan" => row.account.list_nanos.unwrap_or(0),
                _ => 0,
            }),
            ("unpriced_calls", |row| {
                i64::from(row.account.cost_nanos.is_none())
            }),
            ("input_tokens", |row| {
                row.account.input_tokens.unwrap_or(0).cast_signed()
            }),
            ("output_tokens", |row| {
                row.account.output_tokens.unwrap_or(0).cast_signed()
            }),
        ];
        for (field, of) in fields {
            assert_eq!(told[field], sum(rows, of), "{field} of {told}");
        }
    };
    let all: Vec<&CallRow> = rows.iter().collect();
    for (total, lines) in &reports_before {
        check(total, &all);
        let calls: u64 = lines
            .values()
            .filter_map(|line| line["calls"].as_u64())
            .sum();
        assert_eq!(calls, CALLS as u64);
    }
    for (report, name) in names {
        let mut groups = BTreeMap::<&str, Vec<&CallRow>>::new();
        for row in &rows {
            groups.entry(name(row)).or_default().push(row);
        }
        let lines = &reports_before[report].1;
        assert_eq!(lines.len(), groups.len());
        for (name, rows) in groups {
            check(&lines[name], &rows);
        }
    }

    // What a scraper reads, as floats.
    let text = fetch(app.addr(), "/traygate/metrics").await.text();
    let dollars = |metric: &str| -> f64 {
        let lines = text
            .lines()
            .filter(|line| line.starts_with(&format!("{metric}{{")));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        values.sum()
    };
    for (metric, field) in [
        ("traygate_cost_dollars_total", "cost_nanos"),
        ("traygate_saved_dollars_total", "saved_nanos"),
    ] {
        let told = reports_before[0].0[field].as_i64().expect("a sum");
        let difference = (dollars(metric) * 1e9).round() as i64 - told;
        assert!(difference.abs() <= 1, "{metric}: {difference}");
    }

    // The same when the rows have gone.
    let folder = app.stop().await;
    Connection::open(folder.path().join(DATABASE_FILE))
        .and_then(|database| database.execute("DELETE FROM calls", []))
        .expect("rows gone");
    let app = App::start_in(folder, "").await;
    assert!(app.rows_now().is_empty());
    assert_eq!(reports(&app).await, reports_before);
}

#[tokio::test]
async fn a_price_that_is_set_later_prices_what_is_on_record() {
    let up = Upstream::start(provider).await;
    let app = App::with(&up, "").await;
    let body = r#"{"model":"wild","messages":[{"role":"user","content":"1"}]}"#;
    for _ in 0..2 {
        assert_eq!(app.chat(body).await.status(), 200);
    }
    app.rows(2).await;
    let total = |report: &Value| {
        let total = &report["total"];
        let fields = ["calls", "unpriced_calls", "cost_nanos", "saved_nanos"];
        fields.map(|field| total[field].as_i64().expect("a number"))
    };
    assert_eq!(total(&get(&app, "spend").await), [2, 1, 0, 0]);

    let app = App::start_in(app.stop().await, &App::settings(up.addr(), WILD)).await;
    let worth = (2001 - 1024) * 7 + 1024 * 7 + 8 * 1000;
    eventually("it is priced", async || {
        total(&get(&app, "spend").await) == [2, 0, worth, worth]
    })
    .await;
    let rows = app.rows(2).await;
    let money = |row: &CallRow| (row.account.cost_nanos, row.account.saved_nanos);
    assert_eq!(
        money(&rows[0]),
        (Some(0), Some(worth)),
        "newest first: it was kept"
    );
    assert_eq!(money(&rows[1]), (Some(worth), None));
    assert!(rows.iter().all(|row| row.account.pricing.is_none()));
}

#[tokio::test]
async fn a_report_is_cut_as_asked() {
    let up = Upstream::start(provider).await;
    let app = App::with(&up, PRICES).await;
    let body = r#"{"model":"cheap","messages":[{"role":"user","content":"1"}]}"#;
    assert_eq!(app.chat(body).await.status(), 200);
    app.rows(1).await;
    let report = get(&app, "spend?by=provider&zone=Asia/Kathmandu").await;
    assert_eq!(report["by"], "provider");
    assert_eq!(report["zone"], "Asia/Kathmandu");
    let cost = 2001 * 500 + 8 * 1_500;
    assert_eq!(report["rows"][0]["label"], "openai");
    assert_eq!(report["rows"][0]["start"], Value::Null);
    assert_eq!(report["rows"][0]["cost_nanos"], cost);
    assert_eq!(report["rows"][0]["cost_usd"], "0.0010125");
    let day = get(&app, "spend?zone=Asia/Kathmandu").await;
    let start = day["rows"][0]["start"].as_str().expect("a day");
    assert!(
        start.ends_with("T18:15:00.000000Z"),
        "midnight there: {start}"
    );
    let before = get(
        &app,
        "spend?since=2020-01-01T00:00:00Z&until=2020-02-01T00:00:00Z",
    )
    .await;
    assert_eq!(
        (&before["rows"], &before["total"]["calls"]),
        (&json!([]), &json!(0))
    );
    for wrong in [
        "by=week",
        "zone=Middle/Earth",
        "since=yesterday",
        "since=2026-02-01T00:00:00Z&until=2026-01-01T00:00:00Z",
        "group=tool",
    ] {
        let refused = ask(&app, Method::GET, &format!("spend?{wrong}"), None).await;
        assert_eq!(code(&refused, 400), "bad_request", "{wrong}");
    }
    let told = ask(&app, Method::GET, "spend?by=month", None).await;
    assert_eq!(told.0, StatusCode::OK);
}

#[tokio::test]
async fn the_command_line_tells_the_same() {
    let up = Upstream::start(provider).await;
    let app = App::with(&up, PRICES).await;
    for (tool, model) in [("alpha", "cheap"), ("beta", "wild")] {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "1"}]});
        let path = format!("/@{tool}/openai/v1/chat/completions");
        assert_eq!(app.post(&path, &body.to_string()).await.status(), 200);
    }
    app.rows(2).await;
    let folder = app.data_dir().to_string_lossy().into_owned();
    let home = Home::new();
    let spend = async |more: &[&str]| {
        let mut arguments = vec!["spend", "--data-dir", &folder, "--by", "tool"];
        arguments.extend(more);
        let ended = home.run(&arguments).await;
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
        ended.stdout
    };
    let table = spend(&[]).await;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("TOOL "), "{table}");
    assert!(
        lines[1].starts_with("alpha ") && lines[1].contains("$0.0010"),
        "{table}"
    );
    assert!(
        lines[2].starts_with("beta ") && lines[2].ends_with(" 1"),
        "{table}"
    );
    assert!(lines[3].starts_with("TOTAL "), "{table}");
    assert!(
        table.contains("[[price]]"),
        "what to do about unpriced calls: {table}"
    );

    let report: Value = serde_json::from_str(&spend(&["--format", "json"]).await).expect("JSON");
    let api = get(&app, "spend?by=tool").await;
    assert_eq!(
        (&report["rows"], &report["total"]),
        (&api["rows"], &api["total"])
    );

    let csv = spend(&["--format", "csv", "--since", "1h"]).await;
    let lines: Vec<&str> = csv.lines().collect();
    assert!(
        lines[0].starts_with("tool,start,calls,unpriced_calls,"),
        "{csv}"
    );
    assert!(
        lines[1].starts_with("alpha,,1,0,") && lines[1].contains(",1012500,0.0010125,"),
        "{csv}"
    );
    assert_eq!(lines.len(), 3, "{csv}");

    let calls = home.run(&["calls", "--data-dir", &folder]).await.stdout;
    assert!(
        calls.contains("$0.0010") && calls.contains(" ?\n"),
        "{calls}"
    );
}
