//! Followers: who joins, what they get, and that a slow one slows nobody.

use super::super::support::Span as _;
use super::super::support::client::{get, post};
use super::super::support::upstream::Gate;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_identical_calls_at_once_are_one_upstream_call() {
    for (path, body) in FORMS {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| reply(request).held_by(&gate)
        })
        .await;
        let app = App::before(&up).await;
        let asked: Vec<_> = (0..200).map(|_| ask(&app, path, body)).collect();
        entered(&app, 200).await;
        gate.open();
        let mut labels = Vec::new();
        let mut ids = Vec::new();
        let whole = post_json(up.addr(), path, body).await.text();
        for asked in asked {
            let answer = answer_of(asked).await;
            assert_eq!(
                (answer.status(), answer.end),
                (200, BodyEnd::Clean),
                "{path}"
            );
            assert_eq!(answer.text(), whole, "{path}");
            labels.push(label(&answer).to_owned());
            ids.push(answer.header("x-traygate-call").expect("an id").to_owned());
        }
        // One of them is the direct call just above.
        assert_eq!(up.calls(), 2, "{path}");
        assert_eq!(
            labels.iter().filter(|label| *label == "miss").count(),
            1,
            "{path}"
        );
        assert_eq!(
            labels.iter().filter(|label| *label == "joined").count(),
            199,
            "{path}"
        );

        let rows = app.rows(200).await;
        assert_eq!(rows.len(), 200, "one row for each client call");
        ids.sort();
        let mut recorded: Vec<String> = rows.iter().map(|row| row.id.clone()).collect();
        recorded.sort();
        assert_eq!(recorded, ids, "{path}");
        assert!(
            rows.iter()
                .all(|row| row.request_key == rows[0].request_key)
        );
        assert!(rows[0].request_key.is_some());
        let led = rows.iter().filter(|row| row.upstream_call == Some(true));
        assert_eq!(
            led.map(told).collect::<Vec<_>>(),
            [row("miss", "completed", true, 200)]
        );
        let followed = rows.iter().filter(|row| row.upstream_call == Some(false));
        assert_eq!(
            followed
                .filter(|one| told(one) == row("joined", "completed", false, 200))
                .count(),
            199,
            "{path}"
        );
        assert!(rows.iter().all(|row| row.first_token.is_some()), "{path}");
        assert_nothing_held(&app).await;
    }
}

/// Each part is let out only when everybody who is there has had the one before: nothing is held
/// back, and whoever comes late begins at the first byte.
#[tokio::test]
async fn a_late_follower_gets_what_has_come_at_once_and_then_goes_on_live() {
    let parts = [
        "data: {\"n\":1}\n\n",
        "data: {\"n\":2}\n\n",
        "data: {\"n\":3}\n\n",
        "data: {\"n\":4}\n\n",
    ];
    for content_type in [
        "text/event-stream",
        "application/json",
        "application/x-ndjson",
    ] {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |_| {
                parts
                    .iter()
                    .fold(Reply::chunks(content_type, [""; 0]), |reply, part| {
                        reply.then_wait_for(&gate).then_body(part)
                    })
            }
        })
        .await;
        let app = App::before(&up).await;
        let request = || App::chat_request(r#"{"model":"m","stream":true}"#);
        let mut clients = Vec::new();
        let mut so_far = String::new();
        for part in parts {
            let mut late = begin(&app, request()).await;
            if so_far.is_empty() {
                gate.reached_by(1).await;
            } else {
                // Behind the closed gate nothing more comes: this is the replay.
                assert_eq!(late.head().await.status, 200);
                assert_eq!(late.read_until(&so_far).await, so_far, "{content_type}");
            }
            clients.push(late);
            gate.pass(1);
            so_far += part;
            for client in &mut clients {
                if part == parts[0] {
                    client.head().await;
                }
                assert_eq!(client.read_until(part).await, part, "{content_type}");
            }
        }
        for client in &mut clients {
            assert!(client.piece().await.is_none());
            assert_eq!(client.end(), Some(BodyEnd::Clean));
        }
        assert_eq!(up.calls(), 1, "{content_type}");
    }
}

#[tokio::test]
async fn headers_of_one_exchange_are_the_leaders_alone() {
    const OWN: [(&str, &str); 6] = [
        ("date", "Thu, 01 Jan 1998 00:00:00 GMT"),
        ("set-cookie", "session=1"),
        ("set-cookie", "other=2"),
        ("x-ratelimit-remaining-requests", "59"),
        ("anthropic-ratelimit-tokens-remaining", "7"),
        ("ratelimit-reset", "3"),
    ];
    const SHARED: [(&str, &str); 3] = [
        ("x-request-id", "req_1"),
        ("openai-processing-ms", "12"),
        ("x-unknown", "stays"),
    ];
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| {
            let reply = OWN
                .into_iter()
                .chain(SHARED)
                .fold(Reply::chat(request), |reply, (name, value)| {
                    reply.header(name, value)
                });
            reply.held_by(&gate)
        }
    })
    .await;
    let app = App::before(&up).await;
    let led = ask(&app, CHAT, FORMS[0].1);
    entered(&app, 1).await;
    let followed = ask(&app, CHAT, FORMS[0].1);
    entered(&app, 2).await;
    gate.open();
    let led = answer_of(led).await;
    let followed = answer_of(followed).await;
    let kept = app.chat(FORMS[0].1).await;
    assert_whole(&led, "miss");
    assert_whole(&followed, "joined");
    assert_whole(&kept, "cached");
    for (name, value) in OWN {
        assert!(
            led.head.headers.all(name).any(|seen| seen == value),
            "{name}"
        );
        for other in [&followed, &kept] {
            // The listener may set a `date` of its own.
            assert!(
                other.head.headers.all(name).all(|seen| seen != value),
                "{name}"
            );
        }
    }
    for (name, value) in SHARED {
        for answer in [&led, &followed, &kept] {
            assert_eq!(answer.header(name), Some(value), "{}", label(answer));
        }
    }
    let ids: Vec<_> = [&led, &followed, &kept]
        .map(|answer| answer.header("x-traygate-call"))
        .into();
    assert!(
        ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2],
        "{ids:?}"
    );
    for answer in [&led, &followed, &kept] {
        assert_eq!(answer.header("x-traygate-provider"), Some("openai"));
    }
    // Only a finished answer has an age.
    assert_eq!([led.header("age"), followed.header("age")], [None, None]);
    let age: u64 = kept
        .header("age")
        .expect("an age")
        .parse()
        .expect("whole seconds");
    assert!(age < LIMIT.as_secs());
}

const MB: usize = 1 << 20;

/// So many parts of 1 MB, each different, the `gate` before part number `gated`.
fn large(parts: usize, gated: usize, gate: &Gate) -> Reply {
    (0..parts).fold(
        Reply::chunks("application/octet-stream", [""; 0]),
        |reply, n| {
            let reply = if n == gated {
                reply.then_wait_for(gate)
            } else {
                reply
            };
            reply.then_body(part(n))
        },
    )
}

fn part(n: usize) -> Vec<u8> {
    let mut part = vec![b'a' + u8::try_from(n % 26).expect("a letter"); MB];
    part[..8].copy_from_slice(format!("{n:08}").as_bytes());
    part
}

fn whole(parts: usize) -> Vec<u8> {
    (0..parts).flat_map(part).collect()
}

async fn read_bytes(client: &mut Client, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < count {
        bytes.extend_from_slice(&client.piece().await.expect("more").bytes);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_follower_slows_nobody_and_is_cut_when_it_is_16_mb_behind() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| large(48, 1, &gate)
    })
    .await;
    let app = App::before(&up).await;
    let request = || App::chat_request(FORMS[0].1);
    let mut fast = begin(&app, request()).await;
    let head = fast.head().await;
    let mut slow = Client::reading_little(app.addr(), 4096).await;
    slow.send(request()).await;
    let slow_head = slow.head().await;
    assert_eq!(slow_head.headers.get("x-traygate-dedup"), Some("joined"));
    gate.open();
    // It reads nothing, and the other has all of it.
    let answer = fast.rest(head).await;
    assert_eq!(answer.end, BodyEnd::Clean);
    assert!(answer.bytes() == whole(48));
    let cut = slow.rest(slow_head).await;
    assert_ne!(cut.end, BodyEnd::Clean, "it must see that this is not all");
    let bytes = cut.bytes();
    assert!(
        bytes.len() <= 48 * MB - 16 * MB,
        "{} were kept for it",
        bytes.len()
    );
    assert!(whole(48).starts_with(&bytes), "a beginning without a gap");
    assert_eq!(up.calls(), 1);
    assert_eq!(
        record(&app, 2).await,
        [
            row("joined", "broken_stream", false, 200),
            row("miss", "completed", true, 200)
        ]
    );
    let error = app
        .rows(2)
        .await
        .into_iter()
        .find_map(|row| row.error)
        .expect("a reason");
    assert!(error.contains("slowly"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_leader_slows_nobody_and_is_cut_as_well() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| large(48, 1, &gate)
    })
    .await;
    let app = App::before(&up).await;
    let request = || App::chat_request(FORMS[0].1);
    let mut slow = Client::reading_little(app.addr(), 4096).await;
    slow.send(request()).await;
    let slow_head = slow.head().await;
    let mut fast = begin(&app, request()).await;
    let head = fast.head().await;
    gate.open();
    let answer = fast.rest(head).await;
    assert_eq!(answer.end, BodyEnd::Clean);
    assert!(answer.bytes() == whole(48));
    assert_ne!(slow.rest(slow_head).await.end, BodyEnd::Clean);
    assert_eq!(
        record(&app, 2).await,
        [
            row("joined", "completed", false, 200),
            row("miss", "broken_stream", true, 200)
        ]
    );
    assert_eq!(up.calls(), 1);
}

/// The upstream is read no further than the fastest reader and what the sockets hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fastest_reader_sets_the_pace() {
    let gate = Gate::new();
    gate.open();
    let up = Upstream::start(move |_| large(64, 0, &gate)).await;
    let app = App::before(&up).await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Client::reading_little(app.addr(), 4096).await;
        client.send(App::chat_request(FORMS[0].1)).await;
        assert_eq!(client.head().await.status, 200);
        clients.push(client);
    }
    // Nothing can be waited for that must not happen: a moment in which it could.
    tokio::time::sleep(500.ms()).await;
    assert_eq!(
        (up.calls(), up.in_flight()),
        (1, 1),
        "64 MB do not fit into the sockets"
    );
    assert!(read_bytes(&mut clients[1], 64 * MB).await == whole(64));
    up.wait_until_over(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_joins_past_16_mb() {
    for (before, expected) in [(15, "joined"), (17, "miss")] {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |_| large(before + 1, before, &gate)
        })
        .await;
        let app = App::before(&up).await;
        let request = || App::chat_request(FORMS[0].1);
        let mut leader = begin(&app, request()).await;
        leader.head().await;
        let mut bytes = read_bytes(&mut leader, before * MB).await;
        gate.reached_by(1).await;
        let mut late = begin(&app, request()).await;
        let head = late.head().await;
        assert_eq!(
            head.headers.get("x-traygate-dedup"),
            Some(expected),
            "after {before} MB"
        );
        gate.open();
        let answer = late.rest(head).await;
        bytes.extend(read_bytes(&mut leader, MB).await);
        assert!(bytes == whole(before + 1) && answer.bytes() == bytes);
        assert_eq!(answer.end, BodyEnd::Clean);
        assert_eq!(up.calls(), if expected == "joined" { 1 } else { 2 });
    }
}

#[tokio::test]
async fn callers_can_decline() {
    let table = [
        // A fresh answer is wanted; one that is being made is fresh.
        ("cache-control", "no-cache", "joined", 1),
        ("Cache-Control", "max-age=0, No-Cache", "joined", 1),
        ("cache-control", "no-store", "off", 2),
        ("cache-control", "max-age=0,no-store", "off", 2),
        ("x-traygate-dedup", "off", "off", 2),
        ("X-Traygate-Dedup", "OFF", "off", 2),
    ];
    for (name, value, expected, calls) in table {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        })
        .await;
        let app = App::before(&up).await;
        let leader = ask(&app, CHAT, FORMS[0].1);
        gate.reached_by(1).await;
        let mut declining = begin(&app, App::chat_request(FORMS[0].1).header(name, value)).await;
        entered(&app, 2).await;
        if calls == 2 {
            gate.reached_by(2).await;
        }
        gate.open();
        assert_whole(&answer_of(leader).await, "miss");
        assert_whole(&declining.read_to_end().await, expected);
        assert_eq!(up.calls(), calls, "{name}: {value}");
        let sent = up.call(calls - 1).request;
        assert_eq!(sent.header("x-traygate-dedup"), None);
    }
}

/// Twenty samples of one prompt at once, by whoever wants them (D46).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declined_calls_are_not_joined_by_each_other() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::json(200, chat_answer(&request.number.to_string())).held_by(&gate)
    })
    .await;
    let app = App::with(&up, "[limits]\nconcurrency = 20\n").await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let request = App::chat_request(FORMS[0].1).header("x-traygate-dedup", "off");
        clients.push(begin(&app, request).await);
    }
    gate.reached_by(20).await;
    gate.open();
    let mut samples = Vec::new();
    for mut client in clients {
        let answer = client.read_to_end().await;
        assert_whole(&answer, "off");
        samples.push(answer.text());
    }
    samples.sort();
    samples.dedup();
    assert_eq!((up.calls(), samples.len()), (20, 20));
    assert_eq!(
        record(&app, 20).await,
        vec![row("off", "completed", true, 200); 20]
    );
    // And what they got is nobody else's.
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
}

#[tokio::test]
async fn other_routes_and_methods_are_never_merged() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| Reply::json(200, "{}").held_by(&gate)
    })
    .await;
    let app = App::before(&up).await;
    for (n, request) in [
        get("/v1/models"),
        post("/v1/files").json("{}"),
        post("/v1/messages/count_tokens").json("{}"),
        Outgoing::new("PUT", CHAT).json("{}"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut first = begin(&app, request.clone()).await;
        let mut second = begin(&app, request).await;
        gate.reached_by(2).await;
        gate.pass(2);
        for client in [&mut first, &mut second] {
            assert_whole(&client.read_to_end().await, "off");
        }
        assert_eq!(up.requests().len(), 2 * (n + 1));
    }
}

/// The followers of a call that waits for a permit are as many callers in one place of the queue.
#[tokio::test]
async fn followers_wait_in_their_leaders_place() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    })
    .await;
    let app = App::with(&up, "[limits]\nconcurrency = 1\nqueue = 1\n").await;
    let blocker = ask(&app, CHAT, r#"{"model":"other"}"#);
    gate.reached_by(1).await;
    let asked: Vec<_> = (0..5).map(|_| ask(&app, CHAT, FORMS[0].1)).collect();
    entered(&app, 6).await;
    assert_eq!(up.calls(), 1);
    gate.open();
    assert_whole(&answer_of(blocker).await, "miss");
    for asked in asked {
        assert_eq!(answer_of(asked).await.status(), 200);
    }
    assert_eq!((up.calls(), up.max_in_flight()), (2, 1));
}
