//! A failed leader's outcome is shared with those who were waiting, once, and never kept.

use super::super::support::upstream::Gate;
use super::*;

/// A provider that fails by `reply` while three callers wait, then is well again: all three are
/// told the same, and the next call is a new one. Returns what they got.
async fn three_fail(
    settings: &str,
    body: &'static str,
    reply: Reply,
    expected: (&str, u16),
) -> Vec<Answer> {
    let (outcome, status) = expected;
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| reply.clone().held_by(&gate)
    })
    .await;
    let app = App::with(&up, settings).await;
    let asked: Vec<_> = (0..3).map(|_| ask(&app, CHAT, body)).collect();
    entered(&app, 3).await;
    gate.open();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(answer_of(asked).await);
    }
    let mut labels: Vec<&str> = answers.iter().map(label).collect();
    labels.sort_unstable();
    assert_eq!(labels, ["joined", "joined", "miss"]);
    for answer in &answers {
        assert_eq!(answer.status(), status, "{}", answer.text());
        assert_eq!(answer.text(), answers[0].text());
        assert_eq!(answer.end, answers[0].end);
        assert_eq!(
            answer.header("retry-after"),
            answers[0].header("retry-after")
        );
    }
    assert_eq!(
        record(&app, 3).await,
        [
            row("joined", outcome, false, status),
            row("joined", outcome, false, status),
            row("miss", outcome, true, status),
        ]
    );
    assert_eq!(up.calls(), 1);
    assert_nothing_held(&app).await;

    up.set_handler(Reply::chat);
    assert_whole(&ask(&app, CHAT, body).await.expect("an answer"), "miss");
    assert_eq!(up.calls(), 2);
    answers
}

const PLAIN: &str = FORMS[0].1;
const STREAM: &str = FORMS[1].1;

/// D44.
#[tokio::test]
async fn an_error_status() {
    for status in [400, 401, 404, 429, 500, 503, 529] {
        let reply = Reply::error(status).header("retry-after", "7");
        let answers = three_fail("", PLAIN, reply, ("upstream_error", status)).await;
        assert!(answers[0].text().contains("scripted_error"));
        // Whoever waited with the leader is to wait as long.
        assert_eq!(answers[1].header("retry-after"), Some("7"), "{status}");
        assert_eq!(answers[0].end, BodyEnd::Clean);
    }
}

#[tokio::test]
async fn a_connection_that_breaks_before_the_answer() {
    for reply in [Reply::close(), Reply::reset()] {
        let answers = three_fail("", PLAIN, reply, ("upstream_error", 502)).await;
        assert_eq!(answers[0].json()["error"]["code"], "upstream_unreachable");
    }
}

#[tokio::test]
async fn a_timeout() {
    let settings = "[limits]\nunstreamed_timeout_secs = 3\n";
    let gate = Gate::new(); // never opened
    let answers = three_fail(
        settings,
        PLAIN,
        Reply::json(200, "{}").held_by(&gate),
        ("timeout", 504),
    )
    .await;
    assert_eq!(answers[0].json()["error"]["code"], "upstream_timeout");
}

/// All wait for a permit in one place; when it comes, nobody listens at the provider any more.
#[tokio::test]
async fn a_refused_connection() {
    let up = Upstream::hanging().await;
    let app = App::with(
        &up,
        "[limits]\nconcurrency = 1\n[breaker]\nrecovery_check_secs = 0\n",
    )
    .await;
    let blocker = ask(&app, CHAT, r#"{"model":"other"}"#);
    up.wait_for_calls(1).await;
    let asked: Vec<_> = (0..3).map(|_| ask(&app, CHAT, PLAIN)).collect();
    entered(&app, 4).await;
    let addr = up.stop().await;
    assert_eq!(answer_of(blocker).await.status(), 502);
    let mut texts = Vec::new();
    for asked in asked {
        let answer = answer_of(asked).await;
        assert_eq!(
            answer.header("x-traygate-error"),
            Some("upstream_unreachable")
        );
        texts.push(answer.text());
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let up = Upstream::at(addr, Reply::chat).await;
    assert_whole(&app.chat(PLAIN).await, "miss");
    assert_eq!(up.calls(), 1);
}

#[tokio::test]
async fn a_stream_that_breaks_in_mid_air() {
    let events = &chat_events(3)[..2];
    let answers = three_fail(
        "",
        STREAM,
        Reply::sse(events).then_close(),
        ("broken_stream", 200),
    )
    .await;
    for answer in &answers {
        assert_eq!(
            answer.end,
            BodyEnd::Aborted,
            "nobody takes half an answer for a whole one"
        );
        let text = answer.text();
        let rest = text.strip_prefix(&events.concat()).expect("what came");
        let error = rest.strip_prefix("data: ").expect("an event");
        let error: serde_json::Value = serde_json::from_str(error).expect("JSON");
        assert_eq!(error["error"]["code"], "upstream_broke");
    }
}

#[tokio::test]
async fn an_answer_cut_within_its_length() {
    let reply = Reply::json(200, "{\"half\"")
        .header("content-length", "99")
        .then_close();
    let answers = three_fail("", PLAIN, reply, ("broken_stream", 200)).await;
    for answer in answers {
        assert_eq!(
            (answer.text().as_str(), answer.end),
            ("{\"half\"", BodyEnd::Aborted)
        );
    }
}

/// D08.
#[tokio::test]
async fn an_error_event_within_a_whole_stream() {
    let mut events = chat_events(2)[..2].to_vec();
    events
        .push("data: {\"error\":{\"message\":\"boom\",\"type\":\"server_error\"}}\n\n".to_owned());
    let whole = events.concat();
    let answers = three_fail("", STREAM, Reply::sse(events), ("broken_stream", 200)).await;
    for answer in answers {
        assert_eq!(
            (answer.text(), answer.end),
            (whole.clone(), BodyEnd::Clean),
            "verbatim"
        );
    }
}

/// The breaker's refusal of a leader in the queue is its followers' too, and not the next one's.
#[tokio::test]
async fn a_refusal_in_the_queue() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| Reply::error(500).held_by(&gate)
    })
    .await;
    let settings = "[limits]\nconcurrency = 1\nqueue_secs = 2\n";
    let app = App::with(&up, settings).await;
    let blocker = ask(&app, CHAT, r#"{"model":"other"}"#);
    gate.reached_by(1).await;
    let asked: Vec<_> = (0..3).map(|_| ask(&app, CHAT, PLAIN)).collect();
    for asked in asked {
        let answer = answer_of(asked).await;
        assert_eq!(answer.header("x-traygate-error"), Some("queue_timeout"));
    }
    let rows = record(&app, 3).await;
    let ended = rows.iter().filter(|told| told.1 == "refused");
    assert_eq!(
        ended.cloned().collect::<Vec<_>>(),
        [
            row("joined", "refused", false, 503),
            row("joined", "refused", false, 503),
            row("miss", "refused", false, 503),
        ]
    );
    assert_eq!(up.calls(), 1);
    gate.open();
    answer_of(blocker).await;
    up.set_handler(Reply::chat);
    assert_whole(&app.chat(PLAIN).await, "miss");
}
