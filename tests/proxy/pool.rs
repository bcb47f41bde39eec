//! The pool through the door: who goes first, who waits, who is sent away, and when a place is
//! free again.

use tokio::task::JoinSet;

use crate::breaker::{Dialect, asking, pool_of, until};
use crate::support::app::App;
use crate::support::client::{BodyEnd, Client};
use crate::support::upstream::{Gate, Reply, Upstream};
use crate::support::{Span, now};

/// A provider whose answers wait for the gate.
async fn gated(dialect: Dialect, gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request| dialect.good(request).held_by(&gate)).await
}

#[tokio::test]
async fn calls_go_in_the_order_in_which_they_came() {
    for dialect in Dialect::BOTH {
        let gate = Gate::new();
        let up = gated(dialect, &gate).await;
        let app = App::with(&up, "[limits]\nconcurrency = 2\n").await;
        let pool = pool_of(&app, dialect);
        let mut asked = JoinSet::new();
        for nth in 0..10 {
            let model = format!("m{nth}");
            asked.spawn(asking(&app, dialect.call_of(&model, nth % 2 == 1)));
            until("a call to be placed", || {
                let placed = pool.snapshot();
                placed.in_flight + placed.waiting == nth + 1
            })
            .await;
        }
        for done in 0..=8 {
            up.wait_for_calls(done + 2).await;
            until("the others to wait", || pool.snapshot().waiting == 8 - done).await;
            // Never more than two that are not done.
            assert_eq!((up.calls(), pool.snapshot().in_flight), (done + 2, 2));
            if done < 8 {
                gate.pass(1);
            }
        }
        gate.open();
        while let Some(answer) = asked.join_next().await {
            assert_eq!(answer.expect("an answer").status(), 200);
        }
        // The first two go side by side.
        let mut models: Vec<_> = (0..10)
            .map(|call| {
                up.call(call).request.json()["model"]
                    .as_str()
                    .map(str::to_owned)
            })
            .collect();
        models[..2].sort();
        let came: Vec<_> = (0..10).map(|nth| Some(format!("m{nth}"))).collect();
        assert_eq!(models, came);
        let rows = app.rows(10).await;
        let last = rows.iter().find(|row| row.model.as_deref() == Some("m9"));
        let queued = last.and_then(|row| row.queued).expect("on record");
        assert!(queued > 0.ms() && queued < 60.secs(), "{queued:?}");
    }
}

#[tokio::test]
async fn a_full_queue_sends_the_next_away_and_a_long_wait_ends() {
    for dialect in Dialect::BOTH {
        let gate = Gate::new();
        let up = gated(dialect, &gate).await;
        let limits = "[limits]\nconcurrency = 1\nqueue = 1\nqueue_secs = 1\n";
        let app = App::with(&up, limits).await;
        let pool = pool_of(&app, dialect);
        let mut first = app.client().await;
        first.send(dialect.call()).await;
        up.wait_for_calls(1).await;
        let mut second = app.client().await;
        second.send(dialect.call()).await;
        until("one in the queue", || pool.snapshot().waiting == 1).await;

        let asked = now();
        let full = app.ask(dialect.stream()).await;
        let waited = second.read_to_end().await;
        assert!(
            full.ended < waited.ended,
            "one who finds no place does not wait"
        );
        assert!(waited.ended - asked < 20.secs());
        for (answer, code, names) in [
            (full, "queue_full", ["limits.queue", "limits.concurrency"]),
            (
                waited,
                "queue_timeout",
                ["limits.queue_secs", "limits.concurrency"],
            ),
        ] {
            assert_eq!(answer.status(), 503);
            let (seen, message) = dialect.error_of(&answer);
            assert_eq!(seen, code);
            for name in names {
                assert!(message.contains(name), "{name}: {message}");
            }
            let retry = answer.header("retry-after").map(str::parse::<u64>);
            assert!(matches!(retry, Some(Ok(1..=60))), "{retry:?}");
            // Here an SDK's own retries are just right.
            assert_eq!(answer.header("x-should-retry"), None);
            assert_eq!(
                answer.header("x-traygate-provider"),
                Some(dialect.provider())
            );
        }
        gate.open();
        assert_eq!(first.read_to_end().await.status(), 200);
        assert_eq!(app.ask(dialect.call()).await.status(), 200);
        assert_eq!(up.calls(), 2);
        let rows = app.rows(4).await;
        let refused = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("refused"));
        let refused: Vec<_> = refused.collect();
        assert_eq!(refused.len(), 2);
        assert!(refused.iter().all(|row| row.upstream_call == Some(false)));
    }
}

#[tokio::test]
async fn one_who_leaves_the_queue_makes_no_upstream_call() {
    for dialect in Dialect::BOTH {
        let gate = Gate::new();
        let up = gated(dialect, &gate).await;
        let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
        let pool = pool_of(&app, dialect);
        let mut first = app.client().await;
        first.send(dialect.call()).await;
        up.wait_for_calls(1).await;

        // One alone, and one whose follower stays for a while.
        let mut leaves = app.client().await;
        leaves.send(dialect.call()).await;
        until("one in the queue", || pool.snapshot().waiting == 1).await;
        let shared = dialect.call();
        let (mut leader, mut follower) = (app.client().await, app.client().await);
        leader.send(shared.clone()).await;
        until("two in the queue", || pool.snapshot().waiting == 2).await;
        follower.send(shared).await;
        let mut stays = app.client().await;
        stays.send(dialect.call()).await;
        until("three in the queue", || pool.snapshot().waiting == 3).await;

        drop(leaves);
        until("one to leave", || pool.snapshot().waiting == 2).await;
        drop(leader);
        // The leader's row waits for its call; that it has left shows nowhere yet.
        tokio::time::sleep(100.ms()).await;
        assert_eq!(pool.snapshot().waiting, 2, "its follower waits on");
        drop(follower);
        until("the last to leave", || pool.snapshot().waiting == 1).await;
        gate.open();
        assert_eq!(first.read_to_end().await.status(), 200);
        assert_eq!(stays.read_to_end().await.status(), 200);
        assert_eq!(up.calls(), 2);
        let rows = app.rows(5).await;
        let left = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("client_left"));
        let left: Vec<_> = left.collect();
        assert_eq!(left.len(), 3, "{rows:#?}");
        assert!(left.iter().all(|row| row.upstream_call == Some(false)));
    }
}

/// D14: the limit is on bodies, not on heads, nor on events that say it is over.
#[tokio::test]
async fn a_permit_lives_until_the_upstreams_last_byte() {
    for dialect in Dialect::BOTH {
        let (middle, end) = (Gate::new(), Gate::new());
        let up = Upstream::start({
            let (middle, end) = (middle.clone(), end.clone());
            move |_| {
                Reply::sse([dialect.event()])
                    .then_wait_for(&middle)
                    .then_body(dialect.last_events())
                    .then_wait_for(&end)
            }
        })
        .await;
        let app = App::with(&up, "[limits]\nconcurrency = 1\n").await;
        let pool = pool_of(&app, dialect);
        let mut first = app.client().await;
        first.send(dialect.stream()).await;
        let head = first.head().await;
        first.read_until("Hello").await;
        let mut second = app.client().await;
        second.send(dialect.stream()).await;
        until("the second to wait", || pool.snapshot().waiting == 1).await;
        middle.open();
        first.read_until("stop").await;
        assert_eq!((up.calls(), pool.snapshot().in_flight), (1, 1));
        assert_eq!(pool.snapshot().waiting, 1);
        end.open();
        assert_eq!(first.rest(head).await.end, BodyEnd::Clean);
        assert_eq!(second.read_to_end().await.end, BodyEnd::Clean);
        assert_eq!(up.calls(), 2);
        assert_eq!(pool.snapshot().in_flight, 0);
    }
}

/// D14: whatever ends a call gives its place back, and once only.
#[tokio::test]
async fn every_way_to_end_frees_the_place_exactly_once() {
    tokio::join!(
        each_ending_in_turn(Dialect::OpenAi),
        each_ending_in_turn(Dialect::Anthropic),
        nobody_listens_in_turn(),
    );
}

async fn each_ending_in_turn(dialect: Dialect) {
    let up = Upstream::chatting().await;
    // Only what is not streamed is held to a short limit: streams look whether there is a
    // place after each.
    let limits = "[limits]\nconcurrency = 1\nidle_secs = 2\ntimeout_secs = 2\nunstreamed_timeout_secs = 0.3\n\
                  [breaker]\nfailures = 1000\nfailure_rate = 0\n[dedup]\nlinger_secs = 0\n";
    let app = App::with(&up, limits).await;
    let pool = pool_of(&app, dialect);
    type Script = fn(Dialect) -> Reply;
    let endings: [(&str, bool, Script); 14] = [
        ("a stream", true, |dialect| {
            Reply::sse([dialect.event(), dialect.last_events()])
        }),
        ("an answer", false, |dialect| {
            Reply::json(200, dialect.answer())
        }),
        ("an empty answer", false, |_| Reply::status(200)),
        ("400", false, |_| Reply::error(400)),
        ("500", true, |_| Reply::error(500)),
        ("529", false, |_| Reply::status(529)),
        ("closed before the head", false, |_| Reply::close()),
        ("reset before the head", true, |_| Reply::reset()),
        ("closed in the stream", true, |dialect| {
            Reply::sse([dialect.event()]).then_close()
        }),
        ("reset in the stream", true, |dialect| {
            Reply::sse([dialect.event()])
                .then_wait(50.ms())
                .then_reset()
        }),
        ("no first byte", true, |_| Reply::hang()),
        ("no whole answer", false, |_| Reply::hang()),
        ("idle", true, |dialect| {
            Reply::sse([dialect.event()]).then_hang()
        }),
        ("no HTTP", false, |_| {
            Reply::raw("SSH-2.0-OpenSSH_9.2\r\n").then_close()
        }),
    ];
    for (name, streams, script) in endings {
        up.set_handler(move |_| script(dialect));
        app.ask(dialect.call_of("m", streams)).await;
        only_one_place(&app, &up, dialect, name).await;
    }
    // The client ends it, before the head and after.
    for streams in [false, true] {
        let calls = up.calls();
        up.set_handler(move |request| match request.wants_stream() {
            true => Reply::sse([dialect.event()]).then_hang(),
            false => Reply::hang(),
        });
        let mut client = app.client().await;
        client.send(dialect.call_of("m", streams)).await;
        up.wait_for_calls(calls + 1).await;
        if streams {
            client.head().await;
            client.read_until("Hello").await;
        }
        drop(client);
        up.wait_until_closed(calls).await;
        only_one_place(&app, &up, dialect, "the client left").await;
    }
    // It waits for a place in vain.
    let gate = Gate::new();
    up.set_handler({
        let gate = gate.clone();
        move |request| dialect.good(request).then_wait_for(&gate)
    });
    let calls = up.calls();
    let mut holds = app.client().await;
    holds.send(dialect.stream()).await;
    up.wait_for_calls(calls + 1).await;
    let mut waits = app.client().await;
    waits.send(dialect.call()).await;
    until("one in the queue", || pool.snapshot().waiting == 1).await;
    drop(waits);
    until("it to leave", || pool.snapshot().waiting == 0).await;
    gate.open();
    holds.read_to_end().await;
    only_one_place(&app, &up, dialect, "left the queue").await;
}

async fn nobody_listens_in_turn() {
    let dead = Upstream::dead_port();
    let settings = "[limits]\nconcurrency = 1\nqueue_secs = 20\n[breaker]\nfailures = 1000\n";
    let app = App::start(&App::settings(dead.addr(), settings)).await;
    for dialect in Dialect::BOTH {
        assert_eq!(app.ask(dialect.call()).await.status(), 502);
        assert_eq!(app.ask(dialect.call()).await.status(), 502);
    }
    let up = dead.revive(Reply::chat);
    for dialect in Dialect::BOTH {
        only_one_place(&app, &up, dialect, "refused").await;
    }
}

/// One call goes, a second one waits for it: the place is there, and there is but one.
async fn only_one_place(app: &App, up: &Upstream, dialect: Dialect, after: &str) {
    let pool = pool_of(app, dialect);
    until(&format!("the place after {after:?}"), || {
        pool.snapshot().in_flight == 0
    })
    .await;
    let gate = Gate::new();
    up.set_handler({
        let gate = gate.clone();
        move |request| dialect.good(request).then_wait_for(&gate)
    });
    let calls = up.calls();
    let mut one = app.client().await;
    one.send(dialect.stream()).await;
    up.wait_for_calls(calls + 1).await;
    let mut two = app.client().await;
    two.send(dialect.stream()).await;
    until("the second to wait", || pool.snapshot().waiting == 1).await;
    assert_eq!(up.calls(), calls + 1, "after {after:?}");
    gate.open();
    for mut client in [one, two] {
        let answer = client.read_to_end().await;
        assert_eq!(
            (answer.status(), answer.end),
            (200, BodyEnd::Clean),
            "after {after:?}"
        );
    }
    let left = pool.snapshot();
    assert_eq!(
        (left.in_flight, left.extra, left.waiting),
        (0, 0, 0),
        "after {after:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_resized_up_and_down_in_mid_load() {
    let dialect = Dialect::OpenAi;
    let gate = Gate::new();
    let up = gated(dialect, &gate).await;
    let app = App::with(&up, "[limits]\nconcurrency = 2\n").await;
    let pool = pool_of(&app, dialect);
    let mut asked = JoinSet::new();
    for nth in 0..20 {
        asked.spawn(asking(&app, dialect.call_of("m", nth % 2 == 0)));
    }
    let standing = |in_flight, waiting| {
        let pool = pool.clone();
        move || {
            let seen = pool.snapshot();
            (seen.in_flight, seen.waiting) == (in_flight, waiting)
        }
    };
    until("two to go", standing(2, 18)).await;
    // Up: as many as fit go at once.
    pool.resize(7);
    until("five more to go", standing(7, 13)).await;
    up.wait_for_in_flight(7).await;
    assert_eq!(up.calls(), 7);
    // Down: nothing is dropped, and nobody goes before the number has fallen.
    pool.resize(3);
    assert!(standing(7, 13)());
    for left in (3..7).rev() {
        gate.pass(1);
        up.wait_for_in_flight(left).await;
        until("one to end", standing(left, 13)).await;
        assert_eq!(up.calls(), 7);
    }
    gate.pass(1);
    until("one for one", standing(3, 12)).await;
    up.wait_for_calls(8).await;
    // None at all, and then all.
    pool.resize(0);
    for left in (0..3).rev() {
        gate.pass(1);
        until("one to end", standing(left, 12)).await;
    }
    assert_eq!(up.calls(), 8);
    pool.resize(100);
    until("all to go", standing(12, 0)).await;
    up.wait_for_calls(20).await;
    gate.open();
    while let Some(answer) = asked.join_next().await {
        let answer = answer.expect("an answer");
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
    }
    assert!(standing(0, 0)());
    assert_eq!(up.calls(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_different_calls_run_side_by_side() {
    for dialect in Dialect::BOTH {
        for (concurrency, together) in [(16, 16), (32, 20)] {
            let gate = Gate::new();
            let up = gated(dialect, &gate).await;
            let limits = format!("[limits]\nconcurrency = {concurrency}\n");
            let app = App::with(&up, &limits).await;
            let pool = pool_of(&app, dialect);
            let mut asked = JoinSet::new();
            for nth in 0..20 {
                asked.spawn(asking(&app, dialect.call_of("m", nth % 2 == 0)));
            }
            up.wait_for_in_flight(together).await;
            until("the others to wait", || {
                pool.snapshot().waiting == 20 - together
            })
            .await;
            assert_eq!((up.calls(), up.max_in_flight()), (together, together));
            gate.open();
            while let Some(answer) = asked.join_next().await {
                let answer = answer.expect("an answer");
                assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
                assert_eq!(answer.header("x-traygate-dedup"), Some("miss"));
            }
            assert_eq!(up.calls(), 20);
        }
    }
}

/// A storm of callers, some of whom leave: the provider never sees more than the limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_provider_never_has_more_than_the_limit() {
    let dialect = Dialect::OpenAi;
    let gate = Gate::new();
    let up = gated(dialect, &gate).await;
    let settings = "[limits]\nconcurrency = 4\n[dedup]\nlinger_secs = 0\n";
    let app = App::with(&up, settings).await;
    let pool = pool_of(&app, dialect);
    let mut stay = JoinSet::new();
    let mut leave: Vec<Client> = Vec::new();
    for nth in 0..60 {
        if nth % 3 == 0 {
            let mut client = app.client().await;
            client.send(dialect.stream()).await;
            leave.push(client);
        } else {
            stay.spawn(asking(&app, dialect.call()));
        }
    }
    until("all to be placed", || pool.snapshot().waiting == 56).await;
    up.wait_for_in_flight(4).await;
    // Some of those who leave wait, others may be at the provider.
    drop(leave);
    let standing = || pool.snapshot();
    until("those who stay to be left", || {
        (standing().in_flight, standing().waiting) == (4, 36)
    })
    .await;
    // Those who stay can be told at the provider: they ask for no stream.
    until("four that stay", || {
        let requests = up.requests();
        let stay = requests.iter().filter(|seen| !seen.request.wants_stream());
        stay.count() == 4 && up.in_flight() == 4
    })
    .await;
    let sent_before = up.calls();
    for done in 1..=36 {
        gate.pass(1);
        up.wait_for_calls(sent_before + done).await;
        until("the others to wait", || standing().waiting == 36 - done).await;
        assert_eq!(up.calls(), sent_before + done);
        assert_eq!(standing().in_flight, 4);
    }
    gate.open();
    while let Some(answer) = stay.join_next().await {
        assert_eq!(answer.expect("an answer").status(), 200);
    }
    assert_eq!((standing().in_flight, standing().waiting), (0, 0));
}

/// Free routes and other methods need no place.
#[tokio::test]
async fn what_is_free_does_not_wait_for_a_place() {
    let dialect = Dialect::OpenAi;
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| match request.is_call() {
            true => dialect.good(request).held_by(&gate),
            false => Reply::json(200, "{}"),
        }
    })
    .await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\nqueue = 0\n").await;
    let mut holds = app.client().await;
    holds.send(dialect.call()).await;
    up.wait_for_calls(1).await;
    let models = crate::support::client::fetch(app.addr(), "/v1/models").await;
    assert_eq!(models.status(), 200);
    // A POST that nobody knows may cost money: it has to wait, and here it may not.
    let unknown = app.post("/v1/moderations", "{}").await;
    assert_eq!(dialect.error_of(&unknown).0, "queue_full");
    gate.open();
    assert_eq!(holds.read_to_end().await.status(), 200);
    assert_eq!(app.post("/v1/moderations", "{}").await.status(), 200);
}
