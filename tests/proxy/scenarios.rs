//! Five stories as the people who call see them, with an SDK's own retries: the herd, the fan-out,
//! the outage, the hang, the crowd of streams. `scripts/bench scenarios` tells them in full length.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::App;
use crate::support::client::{Answer, BodyEnd, Client, Outgoing, post};
use crate::support::upstream::{Gate, Reply, Request, Upstream, chat_answer, chat_events};
use crate::support::{Span, must, now};

/// Events of content in a stream.
const EVENTS: usize = 19;

// --- The callers --------------------------------------------------------------------------------

/// A program that calls through an SDK: one connection, and the official SDKs' rule for retries,
/// with a shorter pause.
struct Sdk {
    client: Client,
    /// Where it waits with the first event of a stream read, and no more.
    stop: Option<Gate>,
}

/// A call that its user made, and all that was sent for it.
struct Call {
    prompt: String,
    stream: bool,
    /// Never empty. The last one is what the user was told.
    attempts: Vec<Attempt>,
}

/// One request and its answer.
struct Attempt {
    began: Instant,
    answer: Answer,
}

impl Sdk {
    async fn of(addr: SocketAddr) -> Sdk {
        Sdk {
            client: Client::to(addr).await,
            stop: None,
        }
    }

    /// Asks, and asks again as the SDKs do: twice at most, on what may pass, and as
    /// `x-should-retry` says where it is there.
    async fn call(&mut self, prompt: &str, stream: bool) -> Call {
        let mut attempts = Vec::new();
        for nth in 0..3 {
            let began = now();
            self.client.send(request(prompt, stream, nth)).await;
            let answer = self.read().await;
            let again = match answer.header("x-should-retry") {
                Some(said) => said == "true",
                None => matches!(answer.status(), 408 | 409 | 429 | 500..),
            };
            attempts.push(Attempt { began, answer });
            if !again {
                break;
            }
            tokio::time::sleep(20.ms()).await;
        }
        Call {
            prompt: prompt.to_owned(),
            stream,
            attempts,
        }
    }

    async fn read(&mut self) -> Answer {
        let head = self.client.head().await;
        let Some(stop) = &self.stop else {
            return self.client.rest(head).await;
        };
        let first = self.client.piece().await.expect("an event");
        stop.wait().await;
        let mut answer = self.client.rest(head).await;
        answer.pieces.insert(0, first);
        answer
    }
}

/// A chat request; those with the same prompt are the same call, whichever attempt it is.
fn request(prompt: &str, stream: bool, attempt: usize) -> Outgoing {
    let body = json!({
        "model": "m",
        "stream": stream,
        "messages": [{"role": "user", "content": prompt}],
    });
    post("/v1/chat/completions")
        .header("x-stainless-retry-count", &attempt.to_string())
        .json(body.to_string())
}

impl Call {
    fn told(&self) -> &Answer {
        &self.attempts.last().expect("a call is sent").answer
    }

    /// The status of each attempt, in order.
    fn statuses(&self) -> Vec<u16> {
        self.attempts
            .iter()
            .map(|attempt| attempt.answer.status())
            .collect()
    }

    /// Whether Traygate itself refused it in the end.
    fn refused(&self) -> bool {
        self.told().header("x-traygate-error") == Some("breaker_open")
    }

    fn succeeded(&self) -> bool {
        self.told().status() == 200
    }

    /// Asserts that the first attempt got the whole answer to its prompt. What dedup made of the
    /// call, and which of the provider's calls the answer is from.
    #[track_caller]
    fn whole(&self) -> (&str, usize) {
        let told = self.told();
        assert_eq!(self.statuses(), [200], "{}", told.text());
        assert_eq!(told.end, BodyEnd::Clean);
        let text = text_of(told);
        let number = number_in(&text);
        assert_eq!(text, whole_text(&self.prompt, number, self.stream));
        let label = told.header("x-traygate-dedup").expect("a label");
        (label, number)
    }
}

impl Attempt {
    fn took(&self) -> Duration {
        self.answer.ended - self.began
    }
}

/// The text an SDK's user gets out of a whole answer, streamed or not.
fn text_of(answer: &Answer) -> String {
    let body = answer.text();
    if answer.header("content-type") != Some("text/event-stream") {
        return content(&answer.json()["choices"][0]["message"]);
    }
    let events = body
        .strip_suffix("data: [DONE]\n\n")
        .expect("a whole stream");
    events
        .split_terminator("\n\n")
        .map(|event| {
            let data = event.strip_prefix("data: ").expect("an event");
            let data: Value = serde_json::from_str(data).expect("an event of JSON");
            content(&data["choices"][0]["delta"])
        })
        .collect()
}

fn content(message: &Value) -> String {
    message["content"].as_str().unwrap_or_default().to_owned()
}

/// How many of the answers dedup marked so.
fn labelled(calls: &[Call], label: &str) -> usize {
    let of = calls.iter().filter(|call| call.whole().0 == label);
    of.count()
}

/// Lets as many programs call at once, each as one of its own.
fn all_at_once(
    app: &App,
    prompts: Vec<String>,
    stream: bool,
    stop: Option<&Gate>,
) -> JoinSet<Call> {
    let addr = app.addr();
    let asking = prompts.into_iter().map(|prompt| {
        let stop = stop.cloned();
        async move {
            let mut sdk = Sdk::of(addr).await;
            sdk.stop = stop;
            sdk.call(&prompt, stream).await
        }
    });
    asking.collect()
}

async fn all_answered(asked: JoinSet<Call>) -> Vec<Call> {
    must("all to be answered", asked.join_all()).await
}

/// When the last of them had its answer.
fn last_end(calls: &[Call]) -> Instant {
    let ends = calls.iter().map(|call| call.told().ended);
    ends.max().expect("calls")
}

fn questions(count: usize) -> Vec<String> {
    (0..count).map(|nth| format!("question {nth}")).collect()
}

/// All are led calls, each with an upstream call of its own: these numbers, in any order.
#[track_caller]
fn assert_none_shared<'a>(calls: impl IntoIterator<Item = &'a Call>, numbers: Range<usize>) {
    let whole = calls.into_iter().map(Call::whole);
    let (labels, mut seen): (Vec<_>, Vec<_>) = whole.unzip();
    assert!(labels.iter().all(|label| *label == "miss"), "{labels:?}");
    seen.sort();
    assert_eq!(seen, numbers.collect::<Vec<_>>());
}

/// What was put on record agrees with what the callers sent and with the provider's own count.
async fn assert_all_on_record(app: &App, up: &Upstream, sent: usize) {
    let rows = app.rows(sent).await;
    let paid = rows.iter().filter(|row| row.upstream_call == Some(true));
    assert_eq!((rows.len(), paid.count()), (sent, up.calls()));
}

// --- The provider -------------------------------------------------------------------------------

/// Answers with the prompt and the number of the call, so that nobody can get another's answer,
/// or an old one, without being found out.
fn answer_to(request: &Request) -> Reply {
    if request.wants_stream() {
        Reply::sse(events_to(request))
    } else {
        Reply::json(200, chat_answer(&own_words(request)))
    }
}

fn events_to(request: &Request) -> Vec<String> {
    let first = json!({"choices": [{"index": 0, "delta": {"content": own_words(request)}}]});
    let mut events = vec![format!("data: {first}\n\n")];
    events.extend(chat_events(EVENTS - 1));
    events
}

fn own_words(request: &Request) -> String {
    let prompt = content(&request.json()["messages"][0]);
    let call = request.call.unwrap_or_default();
    format!("{prompt}, call {call}. ")
}

/// The whole text of [`answer_to`] a prompt.
fn whole_text(prompt: &str, call: usize, stream: bool) -> String {
    let mut text = format!("{prompt}, call {call}. ");
    if stream {
        text.extend((0..EVENTS - 1).map(|nth| format!("w{nth} ")));
    }
    text
}

/// The number of the call that a text of [`answer_to`] is from.
#[track_caller]
fn number_in(text: &str) -> usize {
    let own = text.split('.').next().unwrap_or_default();
    let number = own.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no answer of this provider: {text:?}"))
}

/// A provider that is well.
async fn well() -> Upstream {
    Upstream::start(answer_to).await
}

/// When each generation call came, in order.
fn starts(up: &Upstream) -> Vec<Instant> {
    let requests = up.requests();
    let calls = requests.iter().filter(|seen| seen.request.is_call());
    calls.map(|seen| seen.request.started).collect()
}

/// How many recovery checks have come and are over.
fn checks(up: &Upstream) -> usize {
    let requests = up.requests();
    let over = requests
        .iter()
        .filter(|seen| !seen.request.is_call() && seen.is_over());
    over.count()
}

// --- Herd ---------------------------------------------------------------------------------------

/// Two hundred ask the same at once: one call is paid for, and each has the answer as it comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_herd_costs_one_call() {
    const HERD: usize = 200;
    for stream in [false, true] {
        let (word, rest) = (Gate::new(), Gate::new());
        let up = Upstream::start({
            let (word, rest) = (word.clone(), rest.clone());
            move |request| {
                if !request.wants_stream() {
                    return answer_to(request).held_by(&word);
                }
                let events = events_to(request);
                let first = Reply::sse(&events[..1]).held_by(&word).then_wait_for(&rest);
                events[1..].iter().fold(first, Reply::then_body)
            }
        })
        .await;
        let app = App::before(&up).await;
        let prompts = vec!["What is new?".to_owned(); HERD];
        let asked = all_at_once(&app, prompts, stream, stream.then_some(&rest));
        must("the herd to be in", async {
            while app.rows_now().len() < HERD {
                tokio::time::sleep(5.ms()).await;
            }
        })
        .await;
        let mut came = now();
        word.open();
        if stream {
            // All have the first event while the provider still holds the others back.
            rest.reached_by(HERD + 1).await;
            came = now();
            rest.open();
        }
        let calls = all_answered(asked).await;

        assert_eq!(up.calls(), 1);
        assert_eq!(labelled(&calls, "miss"), 1);
        assert_eq!(labelled(&calls, "joined"), HERD - 1);
        let after = last_end(&calls) - came;
        assert!(after < 5.secs(), "{after:?}");
        assert_all_on_record(&app, &up, HERD).await;
    }
}

// --- Fan-out ------------------------------------------------------------------------------------

/// Twenty different calls at once: sixteen side by side and then four, or all of them together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fan_out_takes_as_many_turns_as_the_pool_is_small() {
    const CALLS: usize = 20;
    const TAKES: Duration = Duration::from_millis(1500);
    for (concurrency, turns) in [(16, 2), (32, 1)] {
        let up = Upstream::start(|request| answer_to(request).after(TAKES)).await;
        let app = App::with(&up, &format!("[limits]\nconcurrency = {concurrency}\n")).await;
        let began = now();
        let calls = all_answered(all_at_once(&app, questions(CALLS), false, None)).await;
        let took = last_end(&calls) - began;

        assert_none_shared(&calls, 0..CALLS);
        let starts = starts(&up);
        assert_eq!(starts.len(), CALLS);
        let at_once = concurrency.min(CALLS);
        assert!(starts[at_once - 1] - starts[0] < TAKES, "{starts:?}");
        if at_once < CALLS {
            // The next goes when the first is done, and not before.
            assert!(starts[at_once] - starts[0] >= TAKES, "{starts:?}");
        }
        let turns_take = TAKES * turns..TAKES * (turns + 1);
        assert!(turns_take.contains(&took), "{concurrency}: {took:?}");
        assert_all_on_record(&app, &up, CALLS).await;
    }
}

// --- A provider that dies -----------------------------------------------------------------------

/// Five failures, then nothing more of it, until a check finds it well.
const BREAKER: &str = "[breaker]\nopen_secs = 60\nrecovery_check_secs = 0.2\n";

/// Far from the minute that the breaker would stay open by itself.
const SOON: Duration = Duration::from_secs(10);

/// A user who asks one different question after another, at leisure.
struct User {
    sdk: Sdk,
    asked: usize,
    /// HTTP requests sent for it.
    sent: usize,
}

impl User {
    async fn of(app: &App) -> User {
        User {
            sdk: Sdk::of(app.addr()).await,
            asked: 0,
            sent: 0,
        }
    }

    async fn asks(&mut self) -> Call {
        tokio::time::sleep(40.ms()).await;
        let prompt = format!("user's question {}", self.asked);
        let call = self.sdk.call(&prompt, self.asked % 2 == 1).await;
        self.asked += 1;
        self.sent += call.attempts.len();
        call
    }

    /// Asks `count` questions, each of which is answered whole, at the first attempt.
    async fn is_answered(&mut self, count: usize) {
        for _ in 0..count {
            let call = self.asks().await;
            assert_eq!(call.whole().0, "miss");
        }
    }

    /// Asks until the answer is a whole one again; until then each call is refused.
    async fn asks_until_answered(&mut self) -> Instant {
        let asking = async {
            loop {
                let call = self.asks().await;
                if call.succeeded() {
                    call.whole();
                    return call.told().ended;
                }
                assert_refused_for_good(&call);
            }
        };
        must("the provider that is back to be let in", asking).await
    }
}

/// Traygate said no, at once and to the end: the SDK does not try again.
#[track_caller]
fn assert_refused_for_good(call: &Call) {
    let told = call.told();
    assert!(call.refused(), "{}", told.text());
    assert_eq!(call.statuses(), [503]);
    assert_eq!(told.end, BodyEnd::Clean);
    assert_eq!(told.header("x-should-retry"), Some("false"));
    let wait = told.header("retry-after").map(str::parse::<u64>);
    assert!(matches!(wait, Some(Ok(1..=60))), "{wait:?}");
}

/// The middle one of what the calls' last attempts took.
fn typical(calls: &[Call]) -> Duration {
    let mut took: Vec<_> = calls
        .iter()
        .filter_map(|call| call.attempts.last())
        .map(Attempt::took)
        .collect();
    took.sort();
    took[took.len() / 2]
}

/// The provider answers 503 for a while. It gets five calls of that, everybody else is told at
/// once, and when it is back so are its users.
#[tokio::test]
async fn an_outage_costs_five_calls_and_ends_when_the_provider_is_back() {
    let up = well().await;
    let app = App::with(&up, BREAKER).await;
    let mut user = User::of(&app).await;
    user.is_answered(5).await;

    up.set_handler(|_| Reply::error(503));
    // The provider's own answers, and the SDK's own retries.
    let first = user.asks().await;
    assert_eq!(first.statuses(), [503, 503, 503]);
    assert!(!first.refused());
    // Here it opens, after the second of three attempts.
    let second = user.asks().await;
    assert_eq!(second.statuses(), [503, 503, 503]);
    assert!(second.refused(), "{}", second.told().text());
    let mut refused = Vec::new();
    while refused.len() < 20 || checks(&up) < 2 {
        let call = user.asks().await;
        assert_refused_for_good(&call);
        refused.push(call);
    }
    assert_eq!(up.calls(), 5 + 5, "the dead provider gets five");
    let typical = typical(&refused);
    assert!(typical < 100.ms(), "{typical:?}");

    let back = now();
    up.set_handler(answer_to);
    let answered = user.asks_until_answered().await;
    assert!(answered - back < SOON, "{:?}", answered - back);
    user.is_answered(10).await;
    assert_eq!(up.calls(), 5 + 5 + 1 + 10);
    assert_all_on_record(&app, &up, user.sent).await;
}

/// The provider takes calls and never answers. The first callers wait as long as the timeout
/// says, nobody longer, then nobody waits at all, and when it answers again so are its users.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_costs_nobody_more_than_the_timeout_and_ends_when_the_provider_is_back() {
    const TIMEOUT: Duration = Duration::from_millis(500);
    let up = well().await;
    let limits = "[limits]\ntimeout_secs = 0.5\nunstreamed_timeout_secs = 0.5\n";
    let app = App::with(&up, &format!("{limits}{BREAKER}")).await;
    let mut user = User::of(&app).await;
    user.is_answered(3).await;

    up.set_handler(|_| Reply::hang());
    let hung = now();
    // Others call without waiting for one another, until one of them is refused: every tenth of a
    // second, so that some wait side by side when it opens.
    let mut calling = JoinSet::new();
    let mut calls: Vec<Call> = Vec::new();
    must("the breaker to open", async {
        for nth in 0.. {
            let addr = app.addr();
            calling.spawn(async move {
                let prompt = format!("caller {nth}");
                Sdk::of(addr).await.call(&prompt, nth % 2 == 1).await
            });
            tokio::time::sleep(100.ms()).await;
            while let Some(call) = calling.try_join_next() {
                calls.push(call.expect("a call"));
            }
            if calls.iter().any(Call::refused) {
                return;
            }
        }
    })
    .await;
    calls.extend(must("the others' calls to end", calling.join_all()).await);

    let attempts: Vec<_> = calls.iter().flat_map(|call| &call.attempts).collect();
    let by = |code: &str| {
        let of = attempts
            .iter()
            .filter(|attempt| attempt.answer.header("x-traygate-error") == Some(code));
        of.collect::<Vec<_>>()
    };
    let (timed_out, refused) = (by("upstream_timeout"), by("breaker_open"));
    assert_eq!(timed_out.len() + refused.len(), attempts.len());
    assert!(timed_out.len() >= 5, "{}", timed_out.len());
    assert_eq!(up.calls(), 3 + timed_out.len());
    let opened = refused.iter().map(|attempt| attempt.answer.ended).min();
    let opened = opened.expect("one was refused");
    assert!(opened - hung < SOON, "{:?}", opened - hung);
    // Who waited had called before it was open.
    assert!(timed_out.iter().all(|attempt| attempt.began < opened));
    let longest = attempts.iter().map(|attempt| attempt.took()).max();
    let longest = longest.expect("attempts");
    assert!((TIMEOUT..TIMEOUT * 4).contains(&longest), "{longest:?}");

    // Now it is open to everybody.
    for _ in 0..10 {
        let call = user.asks().await;
        assert_refused_for_good(&call);
        assert!(call.attempts[0].took() < TIMEOUT);
    }
    assert_eq!(up.calls(), 3 + timed_out.len());
    // A recovery check has come, and hangs as well.
    up.wait_for_requests(up.calls() + 1).await;
    let back = now();
    up.set_handler(answer_to);
    let answered = user.asks_until_answered().await;
    assert!(answered - back < SOON, "{:?}", answered - back);
    user.is_answered(5).await;
    assert_eq!(up.calls(), 3 + timed_out.len() + 1 + 5);
    assert_all_on_record(&app, &up, attempts.len() + user.sent).await;
}

// --- Streams shared by a crowd ------------------------------------------------------------------

/// What a paced stream takes: there is a pause between each two of its events.
fn floor(gap: Duration) -> Duration {
    gap * u32::try_from(EVENTS + 1).expect("a few")
}

/// A crowd reads the same stream over and over, nothing is kept: there is one upstream call at a
/// time, and nobody gets one answer twice. Then each asks something else, and has it for itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_shares_identical_streams_and_no_others() {
    const CROWD: usize = 60;
    const TURNS: usize = 5;
    const GAP: Duration = Duration::from_millis(20);
    let up = Upstream::start(|request| answer_to(request).paced(GAP)).await;
    let settings = "[limits]\nconcurrency = 128\n[dedup]\nwindow_secs = 0\n";
    let app = App::with(&up, settings).await;
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        let mut sdk = Sdk::of(app.addr()).await;
        crowd.spawn(async move {
            let mut calls = Vec::new();
            for _ in 0..TURNS {
                calls.push(sdk.call("What is new?", true).await);
            }
            (sdk, calls)
        });
    }
    let crowd = must("the crowd to be answered", crowd.join_all()).await;

    let (mut sdks, mut misses) = (Vec::new(), 0);
    for (sdk, calls) in crowd {
        let (labels, had): (Vec<_>, Vec<_>) = calls.iter().map(Call::whole).unzip();
        let known = |label: &&str| matches!(*label, "miss" | "joined");
        assert!(labels.iter().all(known), "{labels:?}");
        assert!(had.is_sorted_by(|one, next| one < next), "{had:?}");
        misses += labelled(&calls, "miss");
        sdks.push(sdk);
    }
    let shared = up.calls();
    assert_eq!(misses, shared);
    assert!((TURNS..=2 * TURNS).contains(&shared), "{shared}");
    // Each began when the one before had come to its end.
    let starts = starts(&up);
    let apart = starts.windows(2).map(|two| two[1] - two[0]).min();
    assert!(apart >= Some(floor(GAP)), "{apart:?}");

    let mut crowd = JoinSet::new();
    for (lane, mut sdk) in sdks.into_iter().enumerate() {
        crowd.spawn(async move {
            let one = sdk.call(&format!("question {lane}a"), true).await;
            let other = sdk.call(&format!("question {lane}b"), true).await;
            [one, other]
        });
    }
    let answered = must("each to be answered", crowd.join_all()).await;
    assert_none_shared(answered.iter().flatten(), shared..shared + 2 * CROWD);
    assert_eq!(up.calls(), shared + 2 * CROWD);
    assert_all_on_record(&app, &up, CROWD * (TURNS + 2)).await;
}

/// A hundred different streams at once, with room for all: they run side by side, and together
/// take hardly longer than one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_different_streams_run_side_by_side() {
    const STREAMS: usize = 100;
    const GAP: Duration = Duration::from_millis(40);
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| answer_to(request).paced(GAP).held_by(&gate)
    })
    .await;
    let app = App::with(&up, "[limits]\nconcurrency = 128\n").await;
    let asked = all_at_once(&app, questions(STREAMS), true, None);
    gate.reached_by(STREAMS).await;
    assert_eq!((up.calls(), up.max_in_flight()), (STREAMS, STREAMS));
    let began = now();
    gate.open();
    let calls = all_answered(asked).await;

    assert_eq!(up.calls(), STREAMS);
    assert_none_shared(&calls, 0..STREAMS);
    // One after another they would take a hundred times as long, sixteen at a time seven times.
    let took = last_end(&calls) - began;
    assert!((floor(GAP)..floor(GAP) * 4).contains(&took), "{took:?}");
    assert_all_on_record(&app, &up, STREAMS).await;
}
