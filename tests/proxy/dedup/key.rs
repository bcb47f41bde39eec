//! The key: calls that differ in anything of it never share, and what only describes an attempt
//! is not in it.

use super::super::support::client::post;
use super::super::support::upstream::Gate;
use super::*;

/// A call, and another that must not share with it.
struct Pair {
    name: String,
    calls: [Outgoing; 2],
}

/// Every pair, with `mark` in the bodies so that no pair meets another's answers.
fn pairs(mark: &str) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (n, (one, other)) in BODIES.into_iter().enumerate() {
        let call = |fields: &str| {
            post(CHAT).json(format!(
                r#"{{"model":"m","mark":"{mark}-b{n}",{fields}"messages":[]}}"#
            ))
        };
        pairs.push(Pair {
            name: format!("{one} | {other}"),
            calls: [call(one), call(other)],
        });
    }
    for (n, (one, other)) in ALIKE_FOR_JSON.into_iter().enumerate() {
        let call = |body: &str| post(CHAT).json(body.replace("MARK", &format!("{mark}-j{n}")));
        pairs.push(Pair {
            name: format!("{one} | {other}"),
            calls: [call(one), call(other)],
        });
    }
    for (n, (path, one, other)) in HEADERS.into_iter().enumerate() {
        let call = |headers: &[(&str, &str)]| {
            let body = format!(r#"{{"model":"m","mark":"{mark}-h{n}"}}"#);
            headers
                .iter()
                .fold(post(path).body(body), |call, (name, value)| {
                    call.header(name, value)
                })
        };
        pairs.push(Pair {
            name: format!("{one:?} | {other:?}"),
            calls: [call(one), call(other)],
        });
    }
    for (n, (one, other)) in TARGETS.into_iter().enumerate() {
        let call =
            |target: &str| post(target).json(format!(r#"{{"model":"m","mark":"{mark}-t{n}"}}"#));
        pairs.push(Pair {
            name: format!("{one} | {other}"),
            calls: [call(one), call(other)],
        });
    }
    for (n, (one, other)) in EMBEDDINGS.into_iter().enumerate() {
        let call = |field: &str| {
            post("/v1/embeddings").json(format!(r#"{{"model":"m","input":"{mark}-e{n}"{field}}}"#))
        };
        pairs.push(Pair {
            name: format!("{one} | {other}"),
            calls: [call(one), call(other)],
        });
    }
    pairs
}

/// Fields of a body (D42).
const BODIES: [(&str, &str); 26] = [
    (r#""temperature":0.1,"#, r#""temperature":0.2,"#),
    ("", r#""temperature":1,"#),
    (r#""top_p":0.1,"#, r#""top_p":0.9,"#),
    (r#""seed":9007199254740993,"#, r#""seed":9007199254740992,"#),
    (r#""max_tokens":1,"#, r#""max_tokens":2,"#),
    (
        r#""max_completion_tokens":1,"#,
        r#""max_completion_tokens":2,"#,
    ),
    (r#""tools":[],"#, r#""tools":[{"type":"function"}],"#),
    (r#""tool_choice":"auto","#, r#""tool_choice":"none","#),
    (
        r#""response_format":{"type":"text"},"#,
        r#""response_format":{"type":"json_object"},"#,
    ),
    (r#""stop":"a","#, r#""stop":"b","#),
    (r#""n":1,"#, r#""n":2,"#),
    (r#""user":"a","#, r#""user":"b","#),
    (r#""logit_bias":{"1":1},"#, r#""logit_bias":{"1":2},"#),
    (
        r#""reasoning_effort":"low","#,
        r#""reasoning_effort":"high","#,
    ),
    (
        r#""x":[{"role":"tool","tool_call_id":"1"}],"#,
        r#""x":[{"role":"tool","tool_call_id":"2"}],"#,
    ),
    (
        r#""image":"data:image/png;base64,AAAA","#,
        r#""image":"data:image/png;base64,AAAB","#,
    ),
    (r#""never_heard_of":1,"#, r#""never_heard_of":2,"#),
    (r#""system":"be brief","#, r#""system":"be brief ","#),
    (r#""stream":false,"#, r#""stream":true,"#),
    (
        r#""stream":true,"#,
        r#""stream":true,"stream_options":{"include_usage":true},"#,
    ),
    (r#""metadata":null,"#, ""),
    (r#""text":"\u00e9","#, r#""text":"é","#),
    (r#""a":"b","#, r#""a":"B","#),
    (r#""list":["#, r#""list":[["#),
    // Neither is JSON any more, and still they are two.
    ("}", "]"),
    (r#""service_tier":"flex","#, r#""service_tier":"default","#),
];

/// The same to a JSON parser, or nearly: a miss is fine, a wrong hit never (D48).
const ALIKE_FOR_JSON: [(&str, &str); 7] = [
    (r#"{"m":"MARK","a":1,"b":2}"#, r#"{"m":"MARK","b":2,"a":1}"#),
    (r#"{"m":"MARK","a":[1,2]}"#, r#"{"m":"MARK","a":[2,1]}"#),
    (r#"{"m":"MARK","a":1}"#, r#"{"m":"MARK","a":1.0}"#),
    (r#"{"m":"MARK","a":1,"a":2}"#, r#"{"m":"MARK","a":2}"#),
    (r#"{"m":"MARK","a":1,"a":2}"#, r#"{"m":"MARK","a":2,"a":1}"#),
    (r#"{"m":"MARK","a":1}"#, r#"{"m":"MARK", "a":1}"#),
    (r#"{"m":"MARK","a":1000}"#, r#"{"m":"MARK","a":1e3}"#),
];

type Fields = &'static [(&'static str, &'static str)];

/// Credentials, and headers that change the answer (D43).
const HEADERS: [(&str, Fields, Fields); 20] = [
    (
        CHAT,
        &[("authorization", "Bearer sk-one")],
        &[("authorization", "Bearer sk-two")],
    ),
    (CHAT, &[("authorization", "Bearer sk-one")], &[]),
    (CHAT, &[("x-api-key", "sk-one")], &[("x-api-key", "sk-two")]),
    (CHAT, &[("api-key", "one")], &[("api-key", "two")]),
    (
        CHAT,
        &[("x-goog-api-key", "one")],
        &[("x-goog-api-key", "two")],
    ),
    // The same words in another place.
    (CHAT, &[("x-api-key", "sk-one")], &[("api-key", "sk-one")]),
    (
        "/v1/messages",
        &[("x-api-key", "one")],
        &[("x-api-key", "two")],
    ),
    (
        CHAT,
        &[("openai-organization", "org-one")],
        &[("openai-organization", "org-two")],
    ),
    (
        CHAT,
        &[("openai-project", "one")],
        &[("openai-project", "two")],
    ),
    (
        CHAT,
        &[("OpenAI-Beta", "assistants=v1")],
        &[("OpenAI-Beta", "assistants=v2")],
    ),
    (
        CHAT,
        &[("accept", "application/json")],
        &[("accept", "text/event-stream")],
    ),
    (
        CHAT,
        &[("accept-encoding", "gzip")],
        &[("accept-encoding", "identity")],
    ),
    (
        CHAT,
        &[("content-type", "application/json")],
        &[("content-type", "text/plain")],
    ),
    (CHAT, &[("content-encoding", "identity")], &[]),
    (
        CHAT,
        &[("idempotency-key", "one")],
        &[("idempotency-key", "two")],
    ),
    (
        "/v1/messages",
        &[("anthropic-version", "2023-06-01")],
        &[("anthropic-version", "2023-01-01")],
    ),
    (
        "/v1/messages",
        &[("anthropic-version", "1"), ("anthropic-beta", "a")],
        &[("anthropic-version", "1")],
    ),
    (
        "/v1/messages",
        &[("anthropic-beta", "a"), ("anthropic-beta", "b")],
        &[("anthropic-beta", "b"), ("anthropic-beta", "a")],
    ),
    (
        "/v1/messages",
        &[("anthropic-beta", "a"), ("anthropic-beta", "b")],
        &[("anthropic-beta", "ab")],
    ),
    // A header's name and value do not run into each other.
    (
        CHAT,
        &[("openai-a", "b"), ("openai-c", "d")],
        &[("openai-a", "bopenai-cd")],
    ),
];

/// Provider, path and query. All of these providers are one and the same.
const TARGETS: [(&str, &str); 7] = [
    (
        "/openai/v1/chat/completions",
        "/anthropic/v1/chat/completions",
    ),
    ("/v1/chat/completions", "/v1/completions"),
    ("/v1/chat/completions", "/v1/x/chat/completions"),
    ("/v1/chat/completions?a=1", "/v1/chat/completions?a=2"),
    ("/v1/chat/completions?a=1", "/v1/chat/completions"),
    (
        "/v1/chat/completions?key=one",
        "/v1/chat/completions?key=two",
    ),
    (
        "/v1/chat/completions?a=1&b=2",
        "/v1/chat/completions?b=2&a=1",
    ),
];

/// D47: an answer in one encoding is no answer to who asked for the other.
const EMBEDDINGS: [(&str, &str); 3] = [
    (
        r#","encoding_format":"base64""#,
        r#","encoding_format":"float""#,
    ),
    (r#","encoding_format":"base64""#, ""),
    (r#","dimensions":256"#, r#","dimensions":512"#),
];

/// An answer that tells which request it is for, and would be kept.
fn tell_number(request: &Request) -> Reply {
    if request.path().ends_with("embeddings") {
        let number = request.number;
        return Reply::json(200, format!(r#"{{"data":[{{"embedding":[{number}]}}]}}"#));
    }
    if request.path().ends_with("messages") {
        return Reply::json(200, MESSAGE.replace("Hello", &request.number.to_string()));
    }
    Reply::json(200, chat_answer(&request.number.to_string()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_differ_never_share_while_in_flight() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| tell_number(request).held_by(&gate)
    })
    .await;
    let app = App::before(&up).await;
    for (
        n,
        Pair {
            name,
            calls: [one, other],
        },
    ) in pairs("at-once").into_iter().enumerate()
    {
        let mut first = begin(&app, one).await;
        up.wait_for_calls(2 * n + 1).await;
        let mut second = begin(&app, other).await;
        entered(&app, 2 * n + 2).await;
        gate.pass(2);
        let answers = [first.read_to_end().await, second.read_to_end().await];
        let labels = [label(&answers[0]), label(&answers[1])];
        assert_eq!(labels, ["miss", "miss"], "{name}");
        assert_ne!(answers[0].text(), answers[1].text(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_differ_never_share_one_after_the_other() {
    let up = Upstream::start(tell_number).await;
    let app = App::before(&up).await;
    for Pair { name, calls } in pairs("in-turn") {
        // Both ways round: the second's answer must not serve the first either.
        let mut texts = Vec::new();
        for call in &calls {
            let answer = app.ask(call.clone()).await;
            assert_eq!((answer.status(), label(&answer)), (200, "miss"), "{name}");
            texts.push(answer.text());
        }
        for (call, text) in calls.into_iter().zip(texts) {
            let answer = app.ask(call).await;
            // Calls with tools are kept for retries alone.
            if label(&answer) == "cached" {
                assert_eq!(answer.text(), text, "{name}");
            } else {
                assert!(name.contains("tools"), "{name}: {}", label(&answer));
            }
        }
    }
}

#[tokio::test]
async fn what_only_describes_an_attempt_is_not_in_the_key() {
    const ATTEMPT: [(&str, &str); 14] = [
        ("x-stainless-retry-count", "1"),
        ("x-stainless-read-timeout", "600"),
        ("X-Stainless-Lang", "js"),
        ("user-agent", "OpenAI/JS 4.104.0"),
        ("x-request-id", "r-2"),
        ("x-client-request-id", "r-2"),
        ("request-id", "r-2"),
        ("traceparent", "00-1-2-03"),
        ("x-traygate-tag", "my-agent"),
        ("x-anything", "2"),
        ("cookie", "a=b"),
        ("referer", "http://localhost:3000/"),
        ("accept-language", "de"),
        ("cache-control", "max-age=60"),
    ];
    for (name, value) in ATTEMPT {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        })
        .await;
        let app = App::before(&up).await;
        let leader = ask(&app, CHAT, FORMS[0].1);
        gate.reached_by(1).await;
        let mut again = begin(&app, App::chat_request(FORMS[0].1).header(name, value)).await;
        entered(&app, 2).await;
        gate.open();
        assert_whole(&answer_of(leader).await, "miss");
        assert_whole(&again.read_to_end().await, "joined");
        let later = app
            .ask(App::chat_request(FORMS[0].1).header(name, value))
            .await;
        assert_whole(&later, "cached");
        assert_eq!(up.calls(), 1, "{name}");
    }
}

#[tokio::test]
async fn addresses_of_one_call_share() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
    for path in [
        "/openai/v1/chat/completions",
        "/openai/chat/completions",
        "/chat/completions",
        "/@my-tool/openai/v1/chat/completions",
        "/@my-tool/v1/chat/completions",
    ] {
        let answer = app.post(path, FORMS[0].1).await;
        assert_whole(&answer, "cached");
    }
    assert_eq!(up.calls(), 1);
}

/// How a body came to be framed says nothing of it.
#[tokio::test]
async fn a_chunked_upload_is_the_same_call() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    assert_whole(&app.chat(FORMS[0].1).await, "miss");
    let mut client = app.client().await;
    client
        .send(
            post(CHAT)
                .header("content-type", "application/json")
                .chunked_upload(),
        )
        .await;
    let (one, other) = FORMS[0].1.as_bytes().split_at(10);
    for part in [one, other] {
        client.write_chunk(part).await.expect("taken");
    }
    client.write_last_chunk().await.expect("taken");
    assert_whole(&client.read_to_end().await, "cached");
}

/// The raw credential is nowhere in the record, and the key is a strong hash of the whole (D43).
#[tokio::test]
async fn keys_on_record_are_hashes() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    app.ask(App::chat_request(FORMS[0].1).header("authorization", "Bearer sk-secret-one"))
        .await;
    app.ask(App::chat_request(FORMS[0].1).header("authorization", "Bearer sk-secret-two"))
        .await;
    let rows = app.rows(2).await;
    let keys: Vec<_> = rows
        .iter()
        .map(|row| row.request_key.clone().expect("a key"))
        .collect();
    assert!(keys.iter().all(|key| key.len() == 32));
    assert_ne!(keys[0], keys[1]);
    for file in std::fs::read_dir(app.data_dir()).expect("the folder") {
        let path = file.expect("a file").path();
        let bytes = std::fs::read(&path).expect("readable");
        assert!(
            memchr::memmem::find(&bytes, b"sk-secret").is_none(),
            "{path:?}"
        );
    }
}
