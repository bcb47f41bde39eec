//! Dedup: identical calls in flight are one upstream call, and a finished answer may serve the
//! next.

mod failing;
mod joining;
mod kept;
mod key;
mod leaving;

use tokio::task::JoinHandle;
use traygate::store::queries::CallRow;

use super::support::app::App;
use super::support::client::{Answer, BodyEnd, Client, Outgoing, post_json};
use super::support::upstream::{Reply, Request, Upstream, chat_answer, chat_events};
use super::support::{LIMIT, must};

const CHAT: &str = "/v1/chat/completions";

/// One call of each form that is shared: its path and body. [`reply`] answers them.
const FORMS: [(&str, &str); 7] = [
    (CHAT, r#"{"model":"m","messages":[]}"#),
    (CHAT, r#"{"model":"m","messages":[],"stream":true}"#),
    (
        "/v1/messages",
        r#"{"model":"m","max_tokens":9,"messages":[]}"#,
    ),
    (
        "/v1/messages",
        r#"{"model":"m","max_tokens":9,"messages":[],"stream":true}"#,
    ),
    (
        "/v1/responses",
        r#"{"model":"m","input":"hi","stream":true}"#,
    ),
    ("/v1/embeddings", r#"{"model":"m","input":"hi"}"#),
    (
        "/api/chat",
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
    ),
];

/// A whole answer in the form that was asked for.
fn reply(request: &Request) -> Reply {
    match request.path() {
        "/v1/messages" if request.wants_stream() => Reply::sse(MESSAGE_EVENTS),
        "/v1/messages" => Reply::json(200, MESSAGE),
        "/v1/responses" => Reply::sse(RESPONSE_EVENTS),
        "/v1/embeddings" => Reply::json(
            200,
            r#"{"object":"list","model":"m","data":[{"object":"embedding","index":0,"embedding":[0.5]}]}"#,
        ),
        "/api/chat" => Reply::chunks("application/x-ndjson", OLLAMA_LINES),
        _ => Reply::chat(request),
    }
}

const MESSAGE: &str = r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":1}}"#;

const MESSAGE_EVENTS: [&str; 6] = [
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"model\":\"m\",\"content\":[]}}\n\n",
    "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello\"}}\n\n",
    "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":1}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
];

const RESPONSE_EVENTS: [&str; 3] = [
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\"}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hello\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"status\":\"completed\",\"output\":[{\"type\":\"message\",\"content\":[{\"type\":\"output_text\",\"text\":\"Hello\"}]}]}}\n\n",
];

const OLLAMA_LINES: [&str; 3] = [
    "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\"Hel\"},\"done\":false}\n",
    "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\"lo\"},\"done\":false}\n",
    "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"done\":true,\"done_reason\":\"stop\"}\n",
];

/// A call that retries may have, but nobody else: it brings tools.
const WITH_TOOLS: &str = r#"{"model":"m","messages":[],"tools":[{"type":"function"}]}"#;

/// What dedup made of a call, as its client was told.
fn label(answer: &Answer) -> &str {
    answer.header("x-traygate-dedup").unwrap_or("none")
}

/// Asserts a whole answer, and what dedup made of the call.
#[track_caller]
fn assert_whole(answer: &Answer, expected: &str) {
    let seen = (answer.status(), answer.end, label(answer));
    assert_eq!(seen, (200, BodyEnd::Clean, expected), "{}", answer.text());
}

/// Sends a call on a connection of its own; its answer is read later, or never.
async fn begin(app: &App, request: Outgoing) -> Client {
    let mut client = app.client().await;
    client.send(request).await;
    client
}

/// Hangs up, and returns when Traygate has noticed: it closes its side then.
async fn hang_up(mut client: Client) {
    client.finish_sending();
    client.closed().await;
}

/// Sends a call and reads its whole answer on the side.
fn ask(app: &App, path: &'static str, body: impl Into<String>) -> JoinHandle<Answer> {
    let (addr, body) = (app.addr(), body.into());
    tokio::spawn(async move { post_json(addr, path, body).await })
}

/// What [`ask`] got.
async fn answer_of(asked: JoinHandle<Answer>) -> Answer {
    must("an answer", asked).await.expect("no panic")
}

/// Waits until `count` calls have been given their part in dedup: each is on record from then on.
async fn entered(app: &App, count: usize) {
    let entered = async {
        while app.rows_now().len() < count {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(LIMIT, entered).await.is_err() {
        panic!("no {count} calls came, but: {:#?}", app.rows_now());
    }
}

/// What is on record of a call: dedup, outcome, whether it went upstream, the status.
type Told = (String, String, bool, Option<u16>);

fn told(row: &CallRow) -> Told {
    (
        row.dedup.clone(),
        row.outcome.clone().unwrap_or_default(),
        row.upstream_call.unwrap_or_default(),
        row.status,
    )
}

/// The same, to compare with.
fn row(dedup: &str, outcome: &str, upstream_call: bool, status: impl Into<Option<u16>>) -> Told {
    (
        dedup.to_owned(),
        outcome.to_owned(),
        upstream_call,
        status.into(),
    )
}

/// What is on record once `count` calls have ended, sorted.
async fn record(app: &App, count: usize) -> Vec<Told> {
    let mut rows: Vec<Told> = app.rows(count).await.iter().map(told).collect();
    rows.sort();
    rows
}

/// Asserts that nothing of ended calls is left: no place in the index, no permit.
async fn assert_nothing_held(app: &App) {
    let core = app.running().core();
    let held = || {
        let pools = core
            .world()
            .providers
            .iter()
            .map(|provider| {
                let pool = provider.state.pool.snapshot();
                pool.in_flight + pool.extra + pool.waiting
            })
            .sum::<usize>();
        (core.dedup.in_flight(), pools)
    };
    let given_back = async {
        while held() != (0, 0) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(LIMIT, given_back).await.is_err() {
        panic!("flights and permits still held: {:?}", held());
    }
}
