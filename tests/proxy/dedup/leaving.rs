//! Callers who leave: nobody is hurt by it, a client's own retry rejoins, and the upstream is let
//! go of when the last has left.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::super::support::Span as _;
use super::super::support::client::post;
use super::super::support::now;
use super::super::support::upstream::Gate;
use super::*;

/// As long as settings allow: it must not end while a test watches.
const LINGER: &str = "[dedup]\nlinger_secs = 60\n";

fn events() -> Vec<String> {
    chat_events(4)
}

/// A stream whose every event waits for the gate.
fn gated_stream(gate: &Gate) -> Reply {
    events().iter().fold(Reply::sse([""; 0]), |reply, event| {
        reply.then_wait_for(gate).then_body(event)
    })
}

async fn gated(
    settings: &str,
    reply: impl Fn(&Request, &Gate) -> Reply + Send + Sync + 'static,
) -> (Gate, Upstream, App) {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| reply(request, &gate)
    })
    .await;
    let app = App::with(&up, settings).await;
    (gate, up, app)
}

fn stream() -> Outgoing {
    App::chat_request(FORMS[1].1)
}

fn plain() -> Outgoing {
    App::chat_request(FORMS[0].1)
}

#[tokio::test]
async fn the_leaders_hanging_up_hurts_nobody() {
    for (path, body) in FORMS {
        let (gate, up, app) = gated("", |request, gate| reply(request).held_by(gate)).await;
        let request = || post(path).json(body);
        let leader = begin(&app, request()).await;
        gate.reached_by(1).await;
        let mut follower = begin(&app, request()).await;
        entered(&app, 2).await;
        hang_up(leader).await;
        gate.open();
        let answer = follower.read_to_end().await;
        assert_whole(&answer, "joined");
        assert_eq!(up.calls(), 1, "{path}");
        assert_eq!(answer.text(), post_json(up.addr(), path, body).await.text());
        // The leader's row is written by the shared call, at its end. It was sent no status.
        assert_eq!(
            record(&app, 2).await,
            [
                row("joined", "completed", false, 200),
                row("miss", "client_left", true, None)
            ],
            "{path}"
        );
    }
}

/// D13.
#[tokio::test]
async fn a_and_b_leave_and_c_has_the_whole_stream() {
    let (gate, up, app) = gated("", |_, gate| gated_stream(gate)).await;
    let events = events();
    let mut a = begin(&app, stream()).await;
    gate.reached_by(1).await;
    let mut b = begin(&app, stream()).await;
    let mut c = begin(&app, stream()).await;
    entered(&app, 3).await;
    gate.pass(2);
    for client in [&mut a, &mut b] {
        client.head().await;
        client.read_until(&events[1]).await;
    }
    hang_up(a).await;
    gate.pass(1);
    b.read_until(&events[2]).await;
    hang_up(b).await;
    gate.open();
    let answer = c.read_to_end().await;
    assert_whole(&answer, "joined");
    assert_eq!(answer.text(), events.concat());
    assert_eq!((up.calls(), up.call(0).left), (1, None));
    assert_eq!(
        record(&app, 3).await,
        [
            row("joined", "client_left", false, 200),
            row("joined", "completed", false, 200),
            row("miss", "client_left", true, 200),
        ]
    );
    assert_nothing_held(&app).await;
}

/// D12, and the end of D13.
#[tokio::test]
async fn once_content_flows_the_last_to_leave_ends_it_at_once() {
    let settings = format!("{LINGER}[limits]\nconcurrency = 1\n");
    for close in ["close", "reset"] {
        let (gate, up, app) = gated(&settings, |_, gate| gated_stream(gate)).await;
        let mut clients = Vec::new();
        for n in 1..=3 {
            clients.push(begin(&app, stream()).await);
            entered(&app, n).await;
        }
        gate.pass(1);
        for client in &mut clients {
            client.head().await;
            client.read_until(&events()[0]).await;
        }
        assert_eq!(up.in_flight(), 1);
        for client in clients {
            if close == "reset" {
                client.reset();
            } else {
                drop(client);
            }
        }
        // Long before any lingering would end.
        up.wait_until_closed(0).await;
        assert_eq!(
            record(&app, 3).await,
            [
                row("joined", "client_left", false, 200),
                row("joined", "client_left", false, 200),
                row("miss", "client_left", true, 200),
            ]
        );
        assert_nothing_held(&app).await;
        // Its one permit is back, its key is free, and half an answer is nobody's.
        gate.open();
        let again = app.ask(stream()).await;
        assert_whole(&again, "miss");
        assert_eq!(again.text(), events().concat());
        assert_eq!(up.calls(), 2);
    }
}

#[tokio::test]
async fn before_content_the_last_to_leave_ends_it_after_lingering() {
    let settings = "[dedup]\nlinger_secs = 0.5\n[limits]\nconcurrency = 1\n";
    for stream_head in [false, true] {
        let (gate, up, app) = gated(settings, move |request, gate| match stream_head {
            // A head and a comment are no content.
            true => Reply::sse([": wait\n\n"])
                .then_wait_for(gate)
                .then_body(events().concat()),
            false => Reply::chat(request).held_by(gate),
        })
        .await;
        let mut leader = begin(&app, stream()).await;
        gate.reached_by(1).await;
        let mut follower = begin(&app, stream()).await;
        entered(&app, 2).await;
        if stream_head {
            leader.head().await;
            follower.head().await;
        }
        drop(follower);
        app.rows(1).await;
        let left = now();
        drop(leader);
        let closed = up.wait_until_closed(0).await;
        assert!(closed - left >= 400.ms(), "only {:?}", closed - left);
        let status = stream_head.then_some(200);
        assert_eq!(
            record(&app, 2).await,
            [
                row("joined", "client_left", false, status),
                row("miss", "client_left", true, status)
            ]
        );
        assert_nothing_held(&app).await;
        gate.open();
        let again = app.ask(stream()).await;
        assert_whole(&again, "miss");
        assert_eq!(up.calls(), 2);
    }
}

#[tokio::test]
async fn without_lingering_it_ends_at_once() {
    for settings in ["[dedup]\nlinger_secs = 0\n", LINGER] {
        let (gate, up, app) =
            gated(settings, |request, gate| Reply::chat(request).held_by(gate)).await;
        // Nobody can rejoin a call that is not shared: it need not linger.
        let request = match settings {
            LINGER => plain().header("x-traygate-dedup", "off"),
            _ => plain(),
        };
        let client = begin(&app, request).await;
        gate.reached_by(1).await;
        drop(client);
        up.wait_until_closed(0).await;
        let rows = record(&app, 1).await;
        assert_eq!(
            (&*rows[0].1, rows[0].2, rows[0].3),
            ("client_left", true, None)
        );
        assert_nothing_held(&app).await;
    }
}

#[tokio::test]
async fn who_leaves_the_queue_makes_no_upstream_call() {
    let settings = format!("{LINGER}[limits]\nconcurrency = 1\n");
    let (gate, up, app) = gated(&settings, |request, gate| {
        Reply::chat(request).held_by(gate)
    })
    .await;
    let blocker = ask(&app, CHAT, r#"{"model":"other"}"#);
    gate.reached_by(1).await;
    let leader = begin(&app, plain()).await;
    entered(&app, 2).await;
    let follower = begin(&app, plain()).await;
    entered(&app, 3).await;
    // A third call waits behind them.
    let behind = ask(&app, CHAT, r#"{"model":"behind"}"#);
    entered(&app, 4).await;
    drop(leader);
    drop(follower);
    // At once, though calls that were sent linger for a minute.
    let rows = record(&app, 2).await;
    let left: Vec<_> = rows
        .iter()
        .filter(|told| told.1 == "client_left")
        .cloned()
        .collect();
    assert_eq!(
        left,
        [
            row("joined", "client_left", false, None),
            row("miss", "client_left", false, None)
        ]
    );
    gate.open();
    assert_whole(&answer_of(blocker).await, "miss");
    assert_whole(&answer_of(behind).await, "miss");
    assert_eq!(up.calls(), 2);
    assert_nothing_held(&app).await;
}

#[tokio::test]
async fn a_leader_who_leaves_the_queue_leaves_its_follower_the_place() {
    let (gate, up, app) = gated("[limits]\nconcurrency = 1\n", |request, gate| {
        Reply::chat(request).held_by(gate)
    })
    .await;
    let blocker = ask(&app, CHAT, r#"{"model":"other"}"#);
    gate.reached_by(1).await;
    let leader = begin(&app, plain()).await;
    entered(&app, 2).await;
    let mut follower = begin(&app, plain()).await;
    entered(&app, 3).await;
    hang_up(leader).await;
    gate.open();
    assert_whole(&follower.read_to_end().await, "joined");
    answer_of(blocker).await;
    assert_eq!(up.calls(), 2);
    let rows = record(&app, 3).await;
    assert!(
        rows.contains(&row("joined", "completed", false, 200)),
        "{rows:?}"
    );
    let left = row("miss", "client_left", true, None);
    assert!(rows.contains(&left), "{rows:?}");
}

#[tokio::test]
async fn a_clients_own_retry_rejoins() {
    for form in [0, 1] {
        let (gate, up, app) = gated(LINGER, |request, gate| reply(request).held_by(gate)).await;
        let request = |retry: &str| {
            App::chat_request(FORMS[form].1)
                .header("x-stainless-retry-count", retry)
                .header("idempotency-key", "stainless-node-retry-1")
        };
        let first = begin(&app, request("0")).await;
        gate.reached_by(1).await;
        hang_up(first).await;
        // It leaves and comes back, twice.
        let second = begin(&app, request("1")).await;
        entered(&app, 2).await;
        hang_up(second).await;
        let mut third = begin(&app, request("2")).await;
        entered(&app, 3).await;
        gate.open();
        assert_whole(&third.read_to_end().await, "joined");
        assert_eq!(up.calls(), 1);
        assert_eq!(
            record(&app, 3).await,
            [
                row("joined", "client_left", false, None),
                row("joined", "completed", false, 200),
                row("miss", "client_left", true, None),
            ]
        );
    }
}

/// Whoever left before the first content is given its time, even if content comes within it: an
/// answer in two parts is lost to a retry otherwise.
#[tokio::test]
async fn a_retry_rejoins_an_answer_that_has_begun_meanwhile() {
    let whole = chat_answer("Hello");
    let (one, other) = whole.split_at(20);
    let parts = [one.to_owned(), other.to_owned()];
    let (gate, up, app) = gated(LINGER, move |_, gate| {
        Reply::chunks("application/json", [""; 0])
            .held_by(gate)
            .then_body(&parts[0])
            .then_wait_for(gate)
            .then_body(&parts[1])
    })
    .await;
    let first = begin(&app, plain()).await;
    gate.reached_by(1).await;
    hang_up(first).await;
    gate.pass(1);
    gate.reached_by(1).await;
    // A moment in which it could be given up.
    tokio::time::sleep(100.ms()).await;
    let mut retry = begin(&app, plain()).await;
    entered(&app, 2).await;
    gate.open();
    let answer = retry.read_to_end().await;
    assert_whole(&answer, "joined");
    assert_eq!((answer.text(), up.calls()), (whole, 1));
}

/// SDKs hang up at the last event, or at the last promised byte, without waiting for the end of
/// the connection. They have it all, and the record says so.
#[tokio::test]
async fn who_has_it_all_has_not_left() {
    for (path, body) in FORMS {
        let (gate, up, app) = gated("", |request, gate| {
            reply(request).held_by(gate).then_wait_for(gate)
        })
        .await;
        let request = || post(path).json(body);
        let whole = {
            let direct = Upstream::start(reply).await;
            post_json(direct.addr(), path, body).await.text()
        };
        let mut clients = Vec::new();
        for n in 1..=2 {
            clients.push(begin(&app, request()).await);
            entered(&app, n).await;
        }
        gate.pass(1);
        for client in &mut clients {
            client.head().await;
            let mut seen = String::new();
            while seen.len() < whole.len() {
                let piece = client.piece().await.expect("more");
                seen += std::str::from_utf8(&piece.bytes).expect("text");
            }
            assert_eq!(seen, whole);
        }
        drop(clients);
        assert_eq!(
            record(&app, 2).await,
            [
                row("joined", "completed", false, 200),
                row("miss", "completed", true, 200)
            ],
            "{path}"
        );
        // All of it came, so it may serve others.
        assert_whole(&app.ask(request()).await, "cached");
        gate.open();
        assert_eq!(up.calls(), 1, "{path}");
    }
}

/// A kept answer that its client did not wait for is still owed to the retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_a_kept_answer_half_way_has_not_received_it() {
    let whole = chat_answer(&"x".repeat(7 << 20));
    let answer = whole.clone();
    let (gate, up, app) = gated(LINGER, move |_, gate| {
        Reply::json(200, &answer).held_by(gate)
    })
    .await;
    let request = || App::chat_request(WITH_TOOLS);
    let first = begin(&app, request()).await;
    gate.reached_by(1).await;
    hang_up(first).await;
    gate.open();
    app.rows(1).await;
    let mut retry = Client::reading_little(app.addr(), 4096).await;
    retry.send(request()).await;
    let head = retry.head().await;
    assert_eq!(head.headers.get("x-traygate-dedup"), Some("cached"));
    drop(retry);
    assert_eq!(
        record(&app, 2).await[0],
        row("cached", "client_left", false, 200)
    );
    let again = app.ask(request()).await;
    assert_whole(&again, "cached");
    assert!(again.text() == whole);
    assert_eq!(up.calls(), 1);
}

/// Small numbers that differ, the same in each run.
struct Dice(AtomicU64);

impl Dice {
    /// From 0 to 5 milliseconds.
    fn gap(&self) -> Duration {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        // Source: the finaliser of SplitMix64.
        let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Duration::from_micros((z ^ (z >> 31)) % 5001)
    }
}

/// Linger, rejoin and cancel, a thousand times with random gaps: a client hangs up, its retry and
/// a twin come at about the time when the call answers, lingers or is cancelled. Whatever they
/// meet, they get the whole right answer, and nothing is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linger_rejoin_and_cancel_a_thousand_times() {
    const LANES: usize = 20;
    const ROUNDS: usize = 50;
    let dice = Arc::new(Dice(AtomicU64::new(1)));
    let up = Upstream::start({
        let dice = dice.clone();
        move |request| {
            let mark = request.json()["mark"].as_str().expect("a mark").to_owned();
            let wait = dice.gap();
            if request.wants_stream() {
                Reply::sse(marked_events(&mark))
                    .paced(dice.gap() / 3)
                    .after(wait)
            } else {
                Reply::json(200, chat_answer(&mark)).after(wait)
            }
        }
    })
    .await;
    let app = Arc::new(
        App::with(
            &up,
            "[dedup]\nlinger_secs = 0.003\n[limits]\nconcurrency = 64\n",
        )
        .await,
    );
    let mut lanes = Vec::new();
    for lane in 0..LANES {
        let (app, dice) = (app.clone(), dice.clone());
        lanes.push(tokio::spawn(async move {
            let mut served = Vec::new();
            for round in 0..ROUNDS {
                let mark = format!("{lane}-{round}");
                let is_stream = round % 2 == 0;
                let request = || {
                    App::chat_request(&format!(
                        r#"{{"model":"m","mark":"{mark}","stream":{is_stream},"tools":[1]}}"#
                    ))
                };
                let whole = if is_stream {
                    marked_events(&mark).concat()
                } else {
                    chat_answer(&mark)
                };
                let first = begin(&app, request()).await;
                tokio::time::sleep(dice.gap()).await;
                drop(first);
                tokio::time::sleep(dice.gap() / 2).await;
                let mut retry = begin(&app, request()).await;
                tokio::time::sleep(dice.gap()).await;
                let mut twin = begin(&app, request()).await;
                for client in [&mut retry, &mut twin] {
                    let answer = client.read_to_end().await;
                    let id = answer.header("x-traygate-call").expect("an id").to_owned();
                    served.push((id, label(&answer).to_owned()));
                    assert_eq!(
                        (answer.status(), answer.end),
                        (200, BodyEnd::Clean),
                        "{mark}"
                    );
                    assert_eq!(answer.text(), whole, "{mark}: {}", label(&answer));
                }
            }
            served
        }));
    }
    let mut served = Vec::new();
    for lane in lanes {
        let lane = tokio::time::timeout(4 * LIMIT, lane).await.expect("an end");
        served.extend(lane.expect("no wrong answer"));
    }
    assert_nothing_held(&app).await;
    const CALLS: usize = LANES * ROUNDS;
    assert_eq!(served.len(), 2 * CALLS);
    let mut rows: HashMap<String, CallRow> = HashMap::new();
    let all_ended = async {
        while !served
            .iter()
            .all(|(id, _)| rows.get(id).is_some_and(|row| row.outcome.is_some()))
        {
            tokio::time::sleep(20.ms()).await;
            rows = app
                .rows_now()
                .into_iter()
                .map(|row| (row.id.clone(), row))
                .collect();
        }
    };
    must("the rows of all that were answered", all_ended).await;
    for (id, label) in &served {
        let row = &rows[id];
        assert_eq!(
            (&*row.dedup, row.outcome.as_deref()),
            (&**label, Some("completed")),
            "{row:?}"
        );
    }
    // One that hangs up before its request has been read is no call and has no row.
    let rows: Vec<CallRow> = rows.into_values().collect();
    assert!(rows.len() <= 3 * CALLS, "{}", rows.len());
    let outcome = |row: &CallRow| row.outcome.clone().unwrap_or_default();
    let left = rows
        .iter()
        .filter(|row| outcome(row) == "client_left")
        .count();
    assert!(left > 0 && left <= CALLS, "{left} left");
    for label in ["miss", "joined", "cached"] {
        assert!(
            rows.iter().any(|row| row.dedup == label),
            "the gaps are such that all happens"
        );
    }
    // A row that says it went upstream is a call that the provider saw, unless it was cancelled
    // on its way; never the other way round.
    let sent = rows
        .iter()
        .filter(|row| row.upstream_call == Some(true))
        .count();
    assert!(sent >= up.calls(), "{sent} on record, {} seen", up.calls());
}

fn marked_events(mark: &str) -> Vec<String> {
    let mut events = chat_events(3);
    for event in &mut events {
        *event = event.replace("scripted", mark);
    }
    events
}
