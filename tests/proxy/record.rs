//! Every call is on record, however it ends, and however Traygate itself does.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use traygate::store::DATABASE_FILE;
use traygate::store::queries::CallRow;

use crate::support::app::{App, rows_in};
use crate::support::client::{BodyEnd, Client, Outgoing, get, post};
use crate::support::upstream::{Gate, Reply, Request, Upstream, chat_events};
use crate::support::{Span as _, must, now};

const CHAT: &str = "/v1/chat/completions";

fn chat(model: &str) -> Outgoing {
    post(CHAT).json(format!(r#"{{"model":"{model}","messages":[]}}"#))
}

fn stream(model: &str) -> Outgoing {
    post(CHAT).json(format!(
        r#"{{"model":"{model}","messages":[],"stream":true}}"#
    ))
}

/// Answers by the model's name.
fn scripted(gate: &Gate) -> impl Fn(&Request) -> Reply + Send + Sync + 'static {
    let gate = gate.clone();
    move |request| match request.json()["model"].as_str().unwrap_or_default() {
        "failing" => Reply::json(
            500,
            r#"{"error":{"message":"no room","type":"server_error"}}"#,
        ),
        "limited" => Reply::error(429),
        "none" => Reply::close(),
        "hang" => Reply::hang(),
        "stalled" => Reply::sse([chat_events(1)[0].clone()]).then_hang(),
        "broken" => Reply::sse([chat_events(1)[0].clone()]).then_close(),
        "event" => Reply::sse([
            chat_events(1)[0].clone(),
            "data: {\"error\":{\"message\":\"out of steam\",\"code\":502}}\n\n".to_owned(),
        ]),
        "held" => Reply::chat(request).held_by(&gate),
        "held-stream" => {
            let events = chat_events(2);
            let reply = Reply::sse([&events[0]]).then_wait_for(&gate);
            events[1..].iter().fold(reply, Reply::then_body)
        }
        _ => Reply::chat(request),
    }
}

fn row_of<'r>(rows: &'r [CallRow], id: &str) -> &'r CallRow {
    let row = rows.iter().find(|row| row.id == id);
    row.unwrap_or_else(|| panic!("no row {id} in {rows:#?}"))
}

#[tokio::test]
async fn every_outcome_is_on_record_with_all_its_fields() {
    let up = Upstream::start(scripted(&Gate::new())).await;
    let dead = Upstream::dead_port();
    let more = format!(
        "[limits]\nunstreamed_timeout_secs = 0.2\n[breaker]\nfailures = 100\n\
         [[provider]]\nname = \"dead\"\nkind = \"openai\"\nbase_url = \"{}\"",
        dead.url()
    );
    let app = App::with(&up, &more).await;
    let anthropic = post("/@aider/v1/messages").json(r#"{"model":"claude"}"#);
    let dead = post("/dead/v1/chat/completions").json(r#"{"model":"m"}"#);
    let tagged = chat("m")
        .header("x-traygate-tag", "eval")
        .header("user-agent", "curl/8");
    let upgrade = get("/v1/responses").header("connection", "upgrade");

    struct Expected {
        provider: &'static str,
        route: &'static str,
        model: Option<&'static str>,
        tool: &'static str,
        dedup: &'static str,
        status: u16,
        outcome: &'static str,
        upstream: bool,
        content: bool,
        error: &'static str,
    }
    let well = Expected {
        provider: "openai",
        route: "chat/completions",
        model: Some("m"),
        tool: "unknown",
        dedup: "miss",
        status: 200,
        outcome: "completed",
        upstream: true,
        content: true,
        error: "",
    };
    let of = |model: &'static str, status, outcome, content, error| Expected {
        model: Some(model),
        status,
        outcome,
        content,
        error,
        ..well
    };
    let table = [
        (
            tagged,
            Expected {
                tool: "eval",
                ..well
            },
        ),
        (
            chat("m").header("user-agent", "OpenAI/JS 4.1"),
            Expected {
                tool: "openai-js",
                dedup: "cached",
                upstream: false,
                content: false,
                ..well
            },
        ),
        (
            chat("m").header("x-traygate-dedup", "off"),
            Expected {
                dedup: "off",
                ..well
            },
        ),
        (stream("s"), of("s", 200, "completed", true, "")),
        (
            anthropic,
            Expected {
                provider: "anthropic",
                route: "messages",
                model: Some("claude"),
                tool: "aider",
                ..well
            },
        ),
        (
            post("/v1/files").body("x"),
            Expected {
                route: "POST /v1/files",
                model: None,
                dedup: "off",
                ..well
            },
        ),
        (
            get("/v1/models?limit=2"),
            Expected {
                route: "GET /v1/models",
                model: None,
                dedup: "off",
                ..well
            },
        ),
        (
            chat("failing"),
            of(
                "failing",
                500,
                "upstream_error",
                false,
                "status 500: server_error: no room",
            ),
        ),
        (
            chat("limited"),
            of("limited", 429, "upstream_error", false, "status 429"),
        ),
        (
            chat("none"),
            of(
                "none",
                502,
                "upstream_error",
                false,
                "gave no answer that can be read",
            ),
        ),
        (
            dead,
            Expected {
                provider: "dead",
                ..of("m", 502, "upstream_error", false, "refused")
            },
        ),
        (
            chat("hang"),
            of(
                "hang",
                504,
                "timeout",
                false,
                "limits.unstreamed_timeout_secs",
            ),
        ),
        (
            stream("broken"),
            of("broken", 200, "broken_stream", true, "broke off"),
        ),
        (
            stream("event"),
            of("event", 200, "broken_stream", true, "out of steam"),
        ),
        (
            post("/nobody/v1/chat/completions").json("{}"),
            Expected {
                provider: "",
                route: "",
                model: None,
                dedup: "off",
                upstream: false,
                ..of("", 404, "refused", false, "there is no provider \"nobody\"")
            },
        ),
        (
            upgrade.header("upgrade", "websocket"),
            Expected {
                route: "GET /v1/responses",
                model: None,
                dedup: "off",
                upstream: false,
                ..of("", 426, "refused", false, "WebSocket")
            },
        ),
    ];
    let count = table.len();
    for (n, (request, expected)) in table.into_iter().enumerate() {
        let before = now();
        let model = expected.model;
        let streaming = String::from_utf8(request.clone().into())
            .expect("a request of text")
            .contains("\"stream\":true");
        let answer = app.ask(request).await;
        let took = now() - before;
        let id = answer.header("x-traygate-call").expect("an id").to_owned();
        let rows = app.rows(n + 1).await;
        let row = row_of(&rows, &id);
        let what = format!("call {n}: {row:#?}");
        assert_eq!(answer.status(), expected.status, "{what}");
        assert_eq!(row.status, Some(expected.status), "{what}");
        assert_eq!(row.outcome.as_deref(), Some(expected.outcome), "{what}");
        if expected.outcome != "refused" {
            assert_eq!(row.provider, expected.provider, "{what}");
            assert_eq!(row.route, expected.route, "{what}");
        }
        assert_eq!(row.model.as_deref(), model, "{what}");
        assert_eq!(row.tool, expected.tool, "{what}");
        assert_eq!(row.dedup, expected.dedup, "{what}");
        assert_eq!(row.streaming, streaming, "{what}");
        assert_eq!(row.upstream_call, Some(expected.upstream), "{what}");
        assert_eq!(row.first_token.is_some(), expected.content, "{what}");
        assert_eq!(
            row.request_key.is_some(),
            // Also where nothing is shared: it tells which calls were repeats.
            model.is_some(),
            "{what}"
        );
        let error = row.error.as_deref().unwrap_or_default();
        assert!(error.contains(expected.error), "{what}");
        assert_eq!(error.is_empty(), expected.error.is_empty(), "{what}");
        let unmetered = expected.status == 426;
        assert_eq!(
            row.billing,
            if unmetered { "unmetered" } else { "metered" },
            "{what}"
        );
        // Its times are its own: within what the client saw, give or take the client's side.
        let duration = row.duration.expect("a call that has ended");
        assert!(duration <= took && duration > Duration::ZERO, "{what}");
        assert!(row.first_token.unwrap_or_default() <= duration, "{what}");
        assert!(
            row.queued.expect("a call that has ended") <= duration,
            "{what}"
        );
    }
    let rows = app.rows(count).await;
    let ids: HashSet<&String> = rows.iter().map(|row| &row.id).collect();
    assert_eq!((rows.len(), ids.len()), (count, count), "one row for each");
    let first = &rows[count - 1].request_key;
    assert_eq!(first, &rows[count - 2].request_key, "twins have one key");
    assert_ne!(first, &rows[count - 4].request_key);
}

#[tokio::test]
async fn those_who_share_a_call_have_a_row_each() {
    let gate = Gate::new();
    let up = Upstream::start(scripted(&gate)).await;
    let app = App::before(&up).await;
    let mut clients = Vec::new();
    for n in 0..5 {
        let mut client = app.client().await;
        client.send(stream("held-stream")).await;
        let head = client.head().await;
        let label = if n == 0 { "miss" } else { "joined" };
        assert_eq!(head.headers.get("x-traygate-dedup"), Some(label));
        client.read_until("w0").await;
        clients.push((client, head));
    }
    // The leader leaves, and one of the others.
    for n in [3, 0] {
        drop(clients.remove(n));
    }
    let rows = app.rows(1).await;
    let left: Vec<&CallRow> = rows.iter().filter(|row| row.outcome.is_some()).collect();
    assert_eq!(
        (left.len(), left[0].dedup.as_str()),
        (1, "joined"),
        "its row is its own"
    );
    assert_eq!(left[0].outcome.as_deref(), Some("client_left"));
    gate.open();
    for (mut client, head) in clients {
        assert_eq!(client.rest(head).await.end, BodyEnd::Clean);
    }
    let mut seen: Vec<_> = app.rows(5).await.into_iter().collect();
    seen.sort_by(|a, b| a.id.cmp(&b.id));
    let mut seen: Vec<_> = seen
        .iter()
        .map(|row| {
            (
                row.dedup.as_str(),
                row.outcome.as_deref(),
                row.upstream_call,
            )
        })
        .collect();
    seen.sort_unstable();
    let completed = ("joined", Some("completed"), Some(false));
    assert_eq!(
        seen,
        [
            ("joined", Some("client_left"), Some(false)),
            completed,
            completed,
            completed,
            ("miss", Some("client_left"), Some(true)),
        ]
    );
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn a_call_under_way_is_on_record_as_open() {
    let gate = Gate::new();
    let up = Upstream::start(scripted(&gate)).await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client.send(chat("held")).await;
    let row = must("an open row", async {
        loop {
            if let Some(row) = app.rows_now().pop() {
                return row;
            }
            tokio::time::sleep(5.ms()).await;
        }
    })
    .await;
    assert_eq!((row.outcome, row.status, row.duration), (None, None, None));
    assert_eq!(
        (row.model.as_deref(), row.dedup.as_str()),
        (Some("held"), "miss")
    );
    gate.open();
    client.read_to_end().await;
    assert_eq!(app.rows(1).await.len(), 1);
}

// --- A record that cannot be written ----------------------------------------------------------

// D58
#[tokio::test]
async fn a_locked_record_costs_the_calls_nothing_and_gets_its_rows_later() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    app.chat(r#"{"model":"before"}"#).await;
    app.rows(1).await;
    let lock = Connection::open(app.data_dir().join(DATABASE_FILE)).expect("the record");
    lock.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    let mut slowest = Duration::ZERO;
    for n in 0..50 {
        let before = now();
        let answer = app.chat(&format!(r#"{{"model":"m{n}"}}"#)).await;
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
        slowest = slowest.max(now() - before);
    }
    // One wait for the lock is 100 ms; fifty of them in a row would be five seconds.
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    let health = must("the trouble to be told", async {
        loop {
            let health = app.running().core().store.health();
            if health.last_error.is_some() {
                return health;
            }
            tokio::time::sleep(5.ms()).await;
        }
    })
    .await;
    assert!(
        health
            .last_error
            .as_deref()
            .is_some_and(|told| told.contains("locked"))
    );
    assert_eq!(app.rows_now().len(), 1, "nothing could be written");
    lock.execute_batch("ROLLBACK").expect("the lock ends");
    let rows = app.rows(51).await;
    assert_eq!(rows.len(), 51);
    assert!(
        rows.iter()
            .all(|row| row.outcome.as_deref() == Some("completed"))
    );
    let health = app.running().core().store.health();
    assert_eq!((health.last_error, health.dropped_rows), (None, 0));
}

/// A record with one call in it, as an earlier run left it.
async fn with_a_past(up: &Upstream) -> tempfile::TempDir {
    let app = App::before(up).await;
    app.chat(r#"{"model":"past"}"#).await;
    app.rows(1).await;
    app.stop().await
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.collect()
}

// D60
#[tokio::test]
async fn a_damaged_record_is_set_aside_and_calls_go_on_record_in_a_fresh_one() {
    let up = Upstream::chatting().await;
    let another_log = || {
        let other = tempfile::tempdir().expect("a scratch folder");
        let path = other.path().join("other.db");
        let connection = Connection::open(&path).expect("a database");
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0;
                 CREATE TABLE other (x); INSERT INTO other VALUES (zeroblob(20000));",
            )
            .expect("another database");
        fs::read(path.with_file_name("other.db-wal")).expect("its log")
    };
    type Damage = (&'static str, Box<dyn Fn(&Path)>);
    let damages: [Damage; 3] = [
        (
            "zeros over page 1",
            Box::new(|path| {
                let mut bytes = fs::read(path).expect("the record");
                bytes[..4096].fill(0);
                fs::write(path, bytes).expect("the record");
            }),
        ),
        (
            "no database at all",
            Box::new(|path| {
                fs::write(path, "not a database, ".repeat(999)).expect("the record");
            }),
        ),
        (
            "half of it gone",
            Box::new(|path| {
                let bytes = fs::read(path).expect("the record");
                fs::write(path, &bytes[..5000]).expect("the record");
            }),
        ),
    ];
    for (what, damage) in damages {
        let folder = with_a_past(&up).await;
        damage(&folder.path().join(DATABASE_FILE));
        let damaged = fs::read(folder.path().join(DATABASE_FILE)).expect("the record");
        let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
        assert_eq!(app.chat(r#"{"model":"m"}"#).await.status(), 200, "{what}");
        let rows = app.rows(1).await;
        assert_eq!(
            (rows.len(), rows[0].model.as_deref()),
            (1, Some("m")),
            "{what}"
        );
        let health = app.running().core().store.health();
        let notice = health.notice.unwrap_or_default();
        assert!(notice.contains("damaged"), "{what}: {notice}");
        let aside = names_in(app.data_dir());
        let aside = aside
            .iter()
            .find(|name| name.starts_with("traygate.damaged-") && name.ends_with(".db"));
        let aside = aside.unwrap_or_else(|| panic!("{what}: not set aside"));
        assert!(notice.contains(aside.as_str()), "{what}: {notice}");
        assert_eq!(
            fs::read(app.data_dir().join(aside)).expect("it"),
            damaged,
            "{what}"
        );
    }
    // An empty file is a new one, and another's log beside it does not come into it.
    let folder = with_a_past(&up).await;
    fs::write(folder.path().join(DATABASE_FILE), "").expect("the record");
    fs::write(folder.path().join("traygate.db-wal"), another_log()).expect("a log");
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    assert_eq!(app.chat(r#"{"model":"m"}"#).await.status(), 200);
    assert_eq!(app.rows(1).await.len(), 1);
}

// D61
#[tokio::test]
async fn a_newer_record_is_left_alone_and_calls_are_served() {
    let up = Upstream::chatting().await;
    let folder = with_a_past(&up).await;
    let path = folder.path().join(DATABASE_FILE);
    let connection = Connection::open(&path).expect("the record");
    connection
        .execute_batch("PRAGMA user_version = 99; ALTER TABLE calls ADD COLUMN mood TEXT;")
        .expect("a newer schema");
    drop(connection);
    let before = fs::read(&path).expect("the record");
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    assert_eq!(app.chat(r#"{"model":"m"}"#).await.status(), 200);
    let health = app.running().core().store.health();
    assert!(!health.recording);
    let told = health.last_error.unwrap_or_default();
    assert!(told.contains("newer Traygate"), "{told}");
    let folder = app.stop().await;
    assert_eq!(
        fs::read(&path).expect("the record"),
        before,
        "not a byte changed"
    );
    assert_eq!(rows_in(folder.path()).len(), 0, "not ours to read");
}

#[cfg(unix)]
mod process {
    //! How the program ends, and what it leaves behind.

    use super::*;
    use crate::support::client::post_json;
    use crate::support::process::{Home, Process, Signal};

    fn home(up: &Upstream, more: &str) -> Home {
        let home = Home::new();
        home.settings(&App::settings(up.addr(), more));
        home
    }

    async fn send(traygate: &Process, request: Outgoing) -> Client {
        let mut client = Client::to(traygate.addr()).await;
        client.send(request).await;
        client
    }

    /// Asks one thing after another until the process is gone; the ids of what was answered
    /// whole, and when.
    async fn load(addr: std::net::SocketAddr, number: usize) -> Vec<(String, Instant)> {
        let mut answered = Vec::new();
        for n in 0.. {
            let Ok(socket) = tokio::net::TcpStream::connect(addr).await else {
                break;
            };
            drop(socket);
            let request = if n % 2 == 0 { chat } else { stream };
            let request = Vec::from(request(&format!("load-{number}-{n}")));
            let Some((id, ended)) = try_ask(addr, request).await else {
                break;
            };
            answered.push((id, ended));
        }
        answered
    }

    /// The answer's id and end, if it came whole.
    async fn try_ask(addr: std::net::SocketAddr, request: Vec<u8>) -> Option<(String, Instant)> {
        let asked = tokio::spawn(async move {
            let mut client = Client::to(addr).await;
            client.write(request).await.ok()?;
            let head = client.try_head().await.ok()?;
            let answer = client.rest(head).await;
            let id = answer.header("x-traygate-call")?.to_owned();
            (answer.end == BodyEnd::Clean).then_some((id, answer.ended))
        });
        // It cannot connect any more: the process is gone.
        asked.await.ok().flatten()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn kill_9_loses_no_call_that_had_ended_and_marks_those_that_had_not() {
        let up = Upstream::start(scripted(&Gate::new())).await;
        let home = home(&up, "");
        let traygate = home.serve(&["--log", "error"]).await;
        let addr = traygate.addr();
        let mut open = Vec::new();
        for model in ["hang", "stalled"] {
            let mut client = send(&traygate, stream(model)).await;
            if model == "stalled" {
                client.read_head_and("w0").await;
            }
            open.push(client);
        }
        let loads: Vec<_> = (0..6)
            .map(|number| tokio::spawn(load(addr, number)))
            .collect();
        up.wait_for_calls(302).await;
        let killed = now();
        traygate.signal(Signal::KILL);
        assert_eq!(traygate.ended().await.signal, Some(9));
        let mut answered = HashMap::new();
        for load in loads {
            answered.extend(load.await.expect("a load"));
        }
        assert!(answered.len() > 250, "{}", answered.len());

        let again = home.serve(&[]).await;
        let rows = home.rows();
        let by_id: HashMap<&str, &CallRow> = rows.iter().map(|row| (&*row.id, row)).collect();
        assert_eq!(by_id.len(), rows.len());
        let mut missing = Vec::new();
        for (id, ended) in &answered {
            match by_id.get(id.as_str()) {
                Some(row) if row.outcome.as_deref() == Some("completed") => {}
                found => missing.push((killed - *ended, found.map(|row| row.outcome.clone()))),
            }
        }
        missing.sort_unstable();
        let lost = missing.iter().filter(|(age, _)| *age > 200.ms());
        assert_eq!(lost.count(), 0, "{missing:?}");
        for model in ["hang", "stalled"] {
            let row = rows.iter().find(|row| row.model.as_deref() == Some(model));
            let row = row.unwrap_or_else(|| panic!("{model} has no row"));
            assert_eq!(row.outcome.as_deref(), Some("interrupted"), "{model}");
        }
        assert!(
            rows.iter().all(|row| row.outcome.is_some()),
            "none is left open"
        );
        // And it goes on.
        post_json(again.addr(), CHAT, r#"{"model":"after"}"#).await;
        home.ended_rows(rows.len() + 1).await;
    }

    // D62
    #[tokio::test]
    async fn a_signal_lets_calls_in_flight_finish_and_nobody_else_in() {
        for signal in [Signal::TERM, Signal::INT] {
            let gate = Gate::new();
            let up = Upstream::start(scripted(&gate)).await;
            let home = home(&up, "[server]\ndrain_secs = 60");
            let traygate = home.serve(&[]).await;
            let addr = traygate.addr();
            let mut idle = Client::to(addr).await;
            assert_eq!(idle.ask(chat("idle")).await.status(), 200);
            let mut fresh = Client::to(addr).await;
            let mut streams = Vec::new();
            for n in 0..3 {
                let mut client = send(
                    &traygate,
                    stream("held-stream").header("x-api-key", &n.to_string()),
                )
                .await;
                let head = client.read_head_and("w0").await;
                streams.push((client, head));
            }
            let mut waiting = send(&traygate, chat("held")).await;
            up.wait_for_calls(5).await;

            traygate.signal(signal);
            traygate.complains("stopping").await;
            idle.closed().await;
            fresh.closed().await;
            must("the door to close", async {
                while tokio::net::TcpStream::connect(addr).await.is_ok() {
                    tokio::time::sleep(5.ms()).await;
                }
            })
            .await;
            gate.open();
            for (mut client, head) in streams {
                let answer = client.rest(head).await;
                assert_eq!(answer.end, BodyEnd::Clean);
                assert!(answer.text().ends_with("data: [DONE]\n\n"));
            }
            assert_eq!(waiting.read_to_end().await.status(), 200);
            let ended = traygate.ended().await;
            assert_eq!(
                (ended.code, ended.signal),
                (Some(0), None),
                "{}",
                ended.stderr
            );
            let rows = home.rows();
            assert_eq!(rows.len(), 5);
            for row in rows {
                assert_eq!(row.outcome.as_deref(), Some("completed"), "{row:?}");
            }
        }
    }

    #[tokio::test]
    async fn what_still_runs_after_drain_secs_is_cut_and_its_row_says_so() {
        let up = Upstream::start(scripted(&Gate::new())).await;
        // Longer than anybody waits for the end: what lingers is cut as well.
        let more =
            "[server]\ndrain_secs = 0.5\n[dedup]\nlinger_secs = 60\n[limits]\nconcurrency = 3";
        let home = home(&up, more);
        let traygate = home.serve(&[]).await;
        let mut clients = Vec::new();
        let mut client = send(&traygate, stream("stalled")).await;
        client.read_head_and("w0").await;
        clients.push(("stalled", client));
        let mut client = send(&traygate, stream("stalled")).await;
        client.read_head_and("w0").await;
        clients.push(("joined", client));
        clients.push(("hang", send(&traygate, chat("hang")).await));
        drop(send(&traygate, chat("left").header("x-api-key", "k")).await);
        let lingering = send(&traygate, post("/v1/responses").json(r#"{"model":"hang"}"#)).await;
        up.wait_for_in_flight(3).await;
        drop(lingering);
        clients.push(("waiting", send(&traygate, chat("waiting")).await));
        let mut half = Client::to(traygate.addr()).await;
        half.send(post(CHAT).upload_of(100)).await;
        half.write("{").await.expect("taken");
        must("six rows", async {
            while home.rows().len() < 5 {
                tokio::time::sleep(5.ms()).await;
            }
        })
        .await;

        let signalled = now();
        traygate.signal(Signal::TERM);
        let ended = traygate.ended().await;
        assert_eq!(ended.code, Some(0));
        let took = ended.at - signalled;
        assert!(took >= 500.ms() && took < 10.secs(), "{took:?}");
        assert!(ended.stderr.contains("have been cut"), "{}", ended.stderr);
        for (what, mut client) in clients {
            if matches!(what, "stalled" | "joined") {
                while client.piece().await.is_some() {}
                assert_ne!(client.end(), Some(BodyEnd::Clean), "{what}");
            } else {
                // Not an error of ours either: nobody is there any more.
                assert!(client.try_head().await.is_err(), "{what}");
            }
        }
        let rows = home.rows();
        for row in &rows {
            let expected = match row.model.as_deref() {
                Some("left") => "completed or client_left",
                _ => "stopped",
            };
            let outcome = row.outcome.as_deref().unwrap_or("open");
            assert!(expected.contains(outcome), "{row:#?}");
        }
        let stopped = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("stopped"));
        assert_eq!(stopped.count(), 6, "{rows:#?}");
    }

    #[tokio::test]
    async fn a_tunnel_that_the_end_cuts_is_stopped_too() {
        let up = Upstream::start(|_| {
            let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
            Reply::raw(head).then_echo()
        })
        .await;
        let home = home(&up, "[server]\ndrain_secs = 0.3");
        let traygate = home.serve(&[]).await;
        let request = get("/v1/realtime").header("connection", "upgrade");
        let mut client = send(&traygate, request.header("upgrade", "websocket")).await;
        assert_eq!(client.head().await.status, 101);
        client.write("ping").await.expect("a tunnel");
        client.read_until("ping").await;
        traygate.signal(Signal::TERM);
        assert_eq!(traygate.ended().await.code, Some(0));
        let rows = home.rows();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].outcome.as_deref(), Some("stopped"));
        assert_eq!(rows[0].billing, "unmetered");
    }

    // D62
    #[tokio::test]
    async fn a_second_signal_goes_at_once() {
        for signal in [Signal::TERM, Signal::INT] {
            let up = Upstream::start(scripted(&Gate::new())).await;
            let home = home(&up, "[server]\ndrain_secs = 600");
            let traygate = home.serve(&[]).await;
            let mut client = send(&traygate, stream("stalled")).await;
            client.read_head_and("w0").await;
            let _waiting = send(&traygate, chat("hang")).await;
            up.wait_for_calls(2).await;
            traygate.signal(Signal::TERM);
            traygate.complains("stopping").await;
            let signalled = now();
            traygate.signal(signal);
            let ended = traygate.ended().await;
            assert_eq!(ended.code, Some(0));
            // Not even the time for which a call would linger.
            assert!(
                ended.at - signalled < 1500.ms(),
                "{:?}",
                ended.at - signalled
            );
            let rows = home.rows();
            assert_eq!(rows.len(), 2);
            for row in rows {
                assert_eq!(row.outcome.as_deref(), Some("stopped"), "{row:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_second_process_on_the_folder_says_so_and_stops() {
        let up = Upstream::chatting().await;
        let home = home(&up, "");
        let first = home.serve(&[]).await;
        let second = home.start_serving(&[]).ended().await;
        assert_eq!(second.code, Some(2), "{}", second.said());
        assert_eq!(second.stdout, "");
        let pid = format!("(process {})", first.id());
        let data_dir = home.data_dir().display().to_string();
        for told in ["another Traygate", &pid, &data_dir, "--data-dir"] {
            assert!(
                second.stderr.contains(told),
                "{told:?} in {:?}",
                second.stderr
            );
        }
        // The first has not noticed.
        let answer = post_json(first.addr(), CHAT, r#"{"model":"m"}"#).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(home.ended_rows(1).await.len(), 1);
        // However it ends, the folder is free.
        first.signal(Signal::KILL);
        first.ended().await;
        let third = home.serve(&[]).await;
        third.signal(Signal::TERM);
        assert_eq!(third.ended().await.code, Some(0));
    }

    // D72
    #[tokio::test]
    async fn of_many_started_at_once_one_serves() {
        let up = Upstream::chatting().await;
        let home = home(&up, "");
        let mut all: Vec<Process> = (0..5).map(|_| home.start_serving(&[])).collect();
        let mut serving = Vec::new();
        for _ in 0..5 {
            let process = all.remove(0);
            if process.said_it_listens().await {
                serving.push(process);
            } else {
                assert_eq!(process.ended().await.code, Some(2));
            }
        }
        assert_eq!(serving.len(), 1);
    }

    // D60
    #[tokio::test]
    async fn a_folder_that_cannot_be_written_stops_no_call() {
        let up = Upstream::chatting().await;
        let home = home(&up, "");
        let file = home.folder().join("file");
        fs::write(&file, "").expect("a file");
        let folder = file.join("data");
        let folder = folder.to_str().expect("a path of text");
        let traygate = home.serve(&["--data-dir", folder]).await;
        for n in 0..3 {
            let body = format!(r#"{{"model":"m{n}"}}"#);
            let answer = post_json(traygate.addr(), CHAT, body).await;
            assert_eq!(answer.status(), 200);
        }
        let told = traygate.complains("calls wait in memory").await;
        assert!(told.contains("cannot be written"), "{told}");
        traygate.signal(Signal::TERM);
        let ended = traygate.ended().await;
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }

    impl Client {
        async fn read_head_and(&mut self, text: &str) -> crate::support::client::Head {
            let head = self.head().await;
            self.read_until(text).await;
            head
        }
    }
}
