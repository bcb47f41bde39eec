//! Finished answers: who is given one, and which are never kept.

use super::super::support::Span as _;
use super::super::support::client::post;
use super::super::support::upstream::Gate;
use super::*;

/// Asks twice, the second time as the first, and tells what dedup made of the second.
async fn second(app: &App, request: &Outgoing) -> String {
    let first = app.ask(request.clone()).await;
    assert_eq!(
        (first.status(), label(&first)),
        (200, "miss"),
        "{}",
        first.text()
    );
    let again = app.ask(request.clone()).await;
    assert_eq!((again.status(), again.end), (200, BodyEnd::Clean));
    if label(&again) == "cached" {
        assert_eq!(again.bytes(), first.bytes());
        assert_eq!(again.header("content-type"), first.header("content-type"));
    }
    label(&again).to_owned()
}

/// Also what the tap does not look at: reasoning, tool calls, unknown fields (D45).
#[tokio::test]
async fn any_equal_plain_call_gets_the_finished_answer() {
    for (path, body) in FORMS {
        let up = Upstream::start(reply).await;
        let app = App::before(&up).await;
        assert_eq!(
            second(&app, &post(path).json(body)).await,
            "cached",
            "{path}"
        );
        // And again: it is there for everybody.
        let third = app.post(path, body).await;
        assert_whole(&third, "cached");
        assert!(third.header("age").is_some());
        assert_eq!(up.calls(), 1, "{path}");
        assert_eq!(
            record(&app, 3).await,
            [
                row("cached", "completed", false, 200),
                row("cached", "completed", false, 200),
                row("miss", "completed", true, 200),
            ],
            "{path}"
        );
    }
    let odd = concat!(
        r#"data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm","x":1e3}}],"extra":{}}"#,
        "\r\n\r\n: comment\n\n",
        r#"data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0},{"index":1}]},"finish_reason":"tool_calls"}]}"#,
        "\n\ndata: {\"choices\":[],\"usage\":{\"total_tokens\":3}}\n\ndata: [DONE]\n\n"
    );
    let up = Upstream::start(move |_| Reply::sse([odd])).await;
    let app = App::before(&up).await;
    assert_eq!(second(&app, &App::chat_request(FORMS[1].1)).await, "cached");
}

/// *Regenerate* and *undo, ask again* send the same body on purpose.
#[tokio::test]
async fn calls_with_tools_or_state_and_those_of_chat_front_ends_are_asked_anew() {
    let plain = r#"{"model":"m","input":"hi","messages":[]}"#;
    let bodies = [
        (WITH_TOOLS, "miss"),
        (r#"{"model":"m","functions":[{"name":"f"}]}"#, "miss"),
        (r#"{"model":"m","tools":[]}"#, "cached"),
        (r#"{"model":"m","previous_response_id":"resp_1"}"#, "miss"),
        (r#"{"model":"m","previous_response_id":null}"#, "cached"),
        (r#"{"model":"m","conversation":"conv_1"}"#, "miss"),
        (r#"{"model":"m","background":true}"#, "miss"),
        (r#"{"model":"m","background":false}"#, "cached"),
    ];
    for path in [CHAT, "/v1/responses"] {
        for (body, expected) in bodies {
            let up = Upstream::start(reply).await;
            let app = App::before(&up).await;
            assert_eq!(
                second(&app, &post(path).json(body)).await,
                expected,
                "{path} {body}"
            );
        }
    }
    let tools = [
        ("user-agent", "claude-cli/2.0.77 (external, cli)", "miss"),
        ("user-agent", "codex_exec/0.171.0", "miss"),
        ("x-traygate-tag", "open-webui", "miss"),
        ("x-traygate-tag", "aider", "miss"),
        ("x-traygate-tag", "zed", "miss"),
        ("x-traygate-tag", "my-script", "cached"),
        ("user-agent", "OpenAI/JS 4.104.0", "cached"),
    ];
    for (name, value, expected) in tools {
        let up = Upstream::chatting().await;
        let app = App::before(&up).await;
        let request = post(CHAT).header(name, value).json(plain);
        assert_eq!(second(&app, &request).await, expected, "{value}");
    }
    let up = Upstream::chatting().await;
    let app = App::with(&up, "[dedup]\nretry_tools = [\"my-*\"]\n").await;
    assert_eq!(
        second(&app, &post("/@my-chat/v1/chat/completions").json(plain)).await,
        "miss"
    );
    assert_eq!(
        second(
            &app,
            &post("/@aider/v1/chat/completions").json(r#"{"model":"n"}"#)
        )
        .await,
        "cached"
    );
}

/// A retry, already paid: the client hung up, the answer came within the time it lingers.
#[tokio::test]
async fn a_retry_gets_what_nobody_received() {
    for (settings, body) in [
        ("", WITH_TOOLS),
        (
            "[[dedup.rule]]\nmodel = \"m\"\nmode = \"retry\"\n",
            FORMS[1].1,
        ),
        ("", FORMS[0].1),
    ] {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        })
        .await;
        let app = App::with(&up, &format!("[dedup]\nlinger_secs = 60\n{settings}")).await;
        let first = begin(&app, App::chat_request(body)).await;
        gate.reached_by(1).await;
        hang_up(first).await;
        gate.open();
        assert_eq!(
            record(&app, 1).await,
            [row("miss", "client_left", true, None)]
        );
        let retry = app.chat(body).await;
        assert_whole(&retry, "cached");
        assert_eq!((up.calls(), up.call(0).left), (1, None));
        // Now somebody has received it: a third call is meant as one, unless it is a plain one.
        let third = app.chat(body).await;
        let expected = if body == FORMS[0].1 { "cached" } else { "miss" };
        assert_whole(&third, expected);
        assert_eq!(
            record(&app, 3).await[0],
            row("cached", "completed", false, 200)
        );
    }
}

#[tokio::test]
async fn a_follower_who_received_it_is_somebody() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    })
    .await;
    let app = App::before(&up).await;
    let leader = begin(&app, App::chat_request(WITH_TOOLS)).await;
    gate.reached_by(1).await;
    let follower = ask(&app, CHAT, WITH_TOOLS);
    entered(&app, 2).await;
    drop(leader);
    gate.open();
    assert_whole(&answer_of(follower).await, "joined");
    app.rows(2).await;
    assert_whole(&app.chat(WITH_TOOLS).await, "miss");
}

#[tokio::test]
async fn each_mode_by_tool_and_by_model() {
    // Of two identical calls at once, and of a third after both.
    let table = [
        ("full", ["joined", "cached"]),
        ("retry", ["joined", "miss"]),
        ("in_flight", ["joined", "miss"]),
        ("off", ["off", "off"]),
    ];
    for (mode, expected) in table {
        for pattern in [
            "tool = \"eval-*\"",
            "model = \"m*\"",
            "tool = \"*\"\nmodel = \"m-1\"",
        ] {
            let rules = format!(
                "[[dedup.rule]]\ntool = \"other\"\nmode = \"off\"\n\
                 [[dedup.rule]]\n{pattern}\nmode = \"{mode}\"\n\
                 [[dedup.rule]]\nmodel = \"*\"\nmode = \"in_flight\"\n"
            );
            // Whatever the default would be.
            for body in [r#"{"model":"m-1"}"#, r#"{"model":"m-1","tools":[1]}"#] {
                let gate = Gate::new();
                let up = Upstream::start({
                    let gate = gate.clone();
                    move |request| Reply::chat(request).held_by(&gate)
                })
                .await;
                let app = App::with(&up, &rules).await;
                let asked = || ask(&app, "/@eval-7/v1/chat/completions", body);
                let first = asked();
                entered(&app, 1).await;
                let second = asked();
                entered(&app, 2).await;
                gate.open();
                let leads = if mode == "off" { "off" } else { "miss" };
                assert_whole(&answer_of(first).await, leads);
                let second = answer_of(second).await;
                app.rows(2).await;
                let third = answer_of(asked()).await;
                let labels = [label(&second), label(&third)];
                assert_eq!(labels, expected, "{mode} {pattern} {body}");
            }
        }
    }
}

#[tokio::test]
async fn the_callers_own_mode_decides() {
    let rules = "[[dedup.rule]]\ntool = \"full\"\nmode = \"full\"\n\
                 [[dedup.rule]]\ntool = \"retry\"\nmode = \"retry\"\n\
                 [[dedup.rule]]\ntool = \"in-flight\"\nmode = \"in_flight\"\n\
                 [[dedup.rule]]\ntool = \"off\"\nmode = \"off\"\n";
    let up = Upstream::chatting().await;
    let app = App::with(&up, rules).await;
    let asked = async |tool: &str| {
        let answer = app
            .post(&format!("/@{tool}/v1/chat/completions"), FORMS[0].1)
            .await;
        label(&answer).to_owned()
    };
    for (tool, expected) in [
        ("in-flight", "miss"), // keeps nothing
        ("full", "miss"),
        ("full", "cached"),
        ("off", "off"),
        ("in-flight", "miss"),
        ("retry", "miss"), // somebody has received it
        ("full", "cached"),
    ] {
        assert_eq!(asked(tool).await, expected, "{tool}");
    }
}

#[tokio::test]
async fn switched_off_nothing_is_shared() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    })
    .await;
    let rules = "[dedup]\nenabled = false\n[[dedup.rule]]\nmodel = \"*\"\nmode = \"full\"\n";
    let app = App::with(&up, rules).await;
    let (first, second) = (ask(&app, CHAT, FORMS[0].1), ask(&app, CHAT, FORMS[0].1));
    gate.reached_by(2).await;
    gate.open();
    for asked in [first, second] {
        assert_whole(&answer_of(asked).await, "off");
    }
    assert_whole(&app.chat(FORMS[0].1).await, "off");
    assert_eq!(up.calls(), 3);
}

#[tokio::test]
async fn without_a_window_only_calls_in_flight_are_merged() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| Reply::chat(request).held_by(&gate)
    })
    .await;
    let app = App::with(&up, "[dedup]\nwindow_secs = 0\nlinger_secs = 60\n").await;
    let first = begin(&app, App::chat_request(FORMS[0].1)).await;
    gate.reached_by(1).await;
    let follower = ask(&app, CHAT, FORMS[0].1);
    entered(&app, 2).await;
    drop(first);
    gate.open();
    assert_whole(&answer_of(follower).await, "joined");
    app.rows(2).await;
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
    assert_eq!(up.calls(), 2);
}

#[tokio::test]
async fn a_kept_answer_serves_for_its_window() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, "[dedup]\nwindow_secs = 0.5\n").await;
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
    tokio::time::sleep(700.ms()).await;
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
    assert_eq!(up.calls(), 2);
}

#[tokio::test]
async fn callers_can_decline_a_kept_answer() {
    let up =
        Upstream::start(|request| Reply::json(200, chat_answer(&request.number.to_string()))).await;
    let app = App::before(&up).await;
    let request = || App::chat_request(FORMS[0].1);
    let first = app.ask(request()).await;
    assert_whole(&first, "miss");
    for (name, value) in [("cache-control", "no-store"), ("x-traygate-dedup", "off")] {
        let answer = app.ask(request().header(name, value)).await;
        assert_whole(&answer, "off");
        assert_ne!(answer.text(), first.text());
        // And it is not kept: the old one stands.
        let next = app.ask(request()).await;
        assert_whole(&next, "cached");
        assert_eq!(next.text(), first.text());
    }
    // A fresh answer takes the old one's place.
    let fresh = app.ask(request().header("cache-control", "no-cache")).await;
    assert_whole(&fresh, "miss");
    assert_ne!(fresh.text(), first.text());
    let next = app.ask(request()).await;
    assert_whole(&next, "cached");
    assert_eq!(next.text(), fresh.text());
}

#[tokio::test]
async fn what_is_no_whole_good_answer_is_never_kept() {
    let json = |body: &str| Reply::json(200, body);
    let finish = |reason: &str, content: &str| {
        Reply::json(
            200,
            format!(
                r#"{{"choices":[{{"index":0,"message":{{"role":"assistant","content":{content}}},"finish_reason":"{reason}"}}]}}"#
            ),
        )
    };
    let anthropic = |reason: &str| Reply::json(200, MESSAGE.replace("end_turn", reason));
    let chat = (CHAT, FORMS[0].1);
    let stream = (CHAT, FORMS[1].1);
    let messages = FORMS[2];
    let ollama = ("/api/generate", r#"{"model":"m"}"#);
    let table: Vec<(&str, (&str, &str), Reply)> = vec![
        ("cut", chat, finish("length", r#""Hel""#)),
        ("filtered", chat, finish("content_filter", r#""Hel""#)),
        ("empty text", chat, finish("stop", r#""""#)),
        ("no text", chat, finish("stop", "null")),
        ("an end nobody knows", chat, finish("because", r#""Hel""#)),
        (
            "refused",
            chat,
            json(
                r#"{"choices":[{"index":0,"message":{"content":null,"refusal":"no"},"finish_reason":"stop"}]}"#,
            ),
        ),
        (
            "an error in a 200",
            chat,
            json(r#"{"error":{"message":"boom"}}"#),
        ),
        ("no JSON", chat, json("Hello")),
        ("nothing", chat, json("")),
        (
            "cut stream",
            stream,
            Reply::sse(
                chat_events(3)
                    .iter()
                    .map(|event| event.replace("stop", "length")),
            ),
        ),
        (
            "a stream without its end",
            stream,
            Reply::sse(&chat_events(3)[..2]),
        ),
        (
            "an error event",
            stream,
            Reply::sse(["data: {\"error\":{\"message\":\"boom\"}}\n\n"]),
        ),
        ("cut", messages, anthropic("max_tokens")),
        ("paused", messages, anthropic("pause_turn")),
        ("refused", messages, anthropic("refusal")),
        (
            "a stream without its end",
            FORMS[3],
            Reply::sse(&MESSAGE_EVENTS[..5]),
        ),
        (
            "loaded",
            ollama,
            json(r#"{"model":"m","response":"","done":true,"done_reason":"load"}"#),
        ),
        (
            "unloaded",
            ollama,
            json(r#"{"model":"m","response":"","done":true,"done_reason":"unload"}"#),
        ),
        ("no embedding", FORMS[5], json(r#"{"data":[]}"#)),
    ];
    for (name, (path, body), reply) in table {
        let up = Upstream::start(move |_| reply.clone()).await;
        let app = App::before(&up).await;
        for _ in 0..2 {
            let answer = app.post(path, body).await;
            assert_eq!(
                (answer.status(), label(&answer)),
                (200, "miss"),
                "{name} {path}"
            );
        }
        assert_eq!(up.calls(), 2, "{name} {path}");
    }
    for status in [201, 204, 302, 400, 404, 429, 500] {
        let up = Upstream::start(move |_| Reply::json(status, r#"{"choices":[]}"#)).await;
        let app = App::before(&up).await;
        for _ in 0..2 {
            let answer = app.chat(FORMS[0].1).await;
            assert_eq!((answer.status(), label(&answer)), (status, "miss"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_over_8_mb_are_not_kept() {
    let frame = chat_answer("").len();
    for (size, expected) in [(8 << 20, "cached"), ((8 << 20) + 1, "miss")] {
        let up = Upstream::answering(chat_answer(&"x".repeat(size - frame))).await;
        let app = App::before(&up).await;
        assert_eq!(
            second(&app, &App::chat_request(FORMS[0].1)).await,
            expected,
            "{size}"
        );
    }
    // A stream is read along event by event, however long it is.
    for (parts, expected) in [(7, "cached"), (9, "miss")] {
        let text = "x".repeat(1 << 20);
        let up = Upstream::start(move |_| {
            let mut events = vec![chat_events(1)[0].replace("w0", &text); parts];
            events.extend_from_slice(&chat_events(0));
            Reply::sse(events)
        })
        .await;
        let app = App::before(&up).await;
        let request = App::chat_request(FORMS[1].1);
        assert_eq!(
            second(&app, &request).await,
            expected,
            "{parts} MB streamed"
        );
    }
}

/// Together they stay within `max_mb`; the newest stay longest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_answers_are_bounded_by_their_bytes() {
    let up = Upstream::answering(chat_answer(&"x".repeat(300_000))).await;
    let app = App::with(&up, "[dedup]\nmax_mb = 1\n").await;
    let body = |n: usize| format!(r#"{{"model":"m","n":{n}}}"#);
    for n in 0..8 {
        assert_whole(&app.chat(&body(n)).await, "miss");
    }
    for n in [7, 6, 5] {
        assert_whole(&app.chat(&body(n)).await, "cached");
    }
    for n in [0, 1, 2, 3, 4] {
        assert_whole(&app.chat(&body(n)).await, "miss");
    }
}
