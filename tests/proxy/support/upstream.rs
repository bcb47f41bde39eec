//! A provider that does what a test's script says, and remembers all that was asked of it.
//!
//! It speaks HTTP/1.1 on a bare socket, so that a test decides every byte, may break the framing,
//! and may close, reset or fall silent wherever it likes.
//! ```ignore
//! let up = Upstream::slow(1500.ms()).await;
//! // … 200 identical calls through the proxy …
//! assert_eq!((up.calls(), up.max_in_flight()), (1, 1));
//! ```
//! Prefer a [`Gate`] to a pause: the test opens it when it has seen what it waited for.
//! ```ignore
//! let gate = Gate::new();
//! let up = Upstream::start({
//!     let gate = gate.clone();
//!     move |_| Reply::sse(["data: 1\n\n"]).then_wait_for(&gate).then_body("data: 2\n\n")
//! }).await;
//! // … read the first event …
//! gate.open();
//! ```
//! An outage and its end: [`Upstream::set_handler`] on a running one, or [`DeadPort::revive`].
//! Whatever the script, `GET`s and other requests than generation calls are answered by it too;
//! look at [`Request::is_call`] where they should not be.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::wire::{self, BodyEnd, Framing, Headers, Wire};
use super::{must, now};

/// Of a longer body only the beginning is kept; [`Request::body_len`] counts all of it.
const BODY_KEPT: usize = 16 << 20;

/// Connections that may wait to be accepted: tests open a thousand at once.
const BACKLOG: i32 = 4096;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query, or whatever stood there.
    pub target: String,
    pub headers: Headers,
    /// Without its framing.
    pub body: Bytes,
    /// The whole body's length, also where only its beginning was kept.
    pub body_len: u64,
    /// How the body ended: not clean if the client left while sending it.
    pub body_end: BodyEnd,
    /// Which connection it came on, from 0.
    pub connection: usize,
    /// Which request of all it is, from 0: its place in [`Upstream::requests`].
    pub number: usize,
    /// Which generation call it is, from 0; `None` if it is none, or its body never came whole.
    pub call: Option<usize>,
    /// When its head had come.
    pub started: Instant,
}

impl Request {
    /// The target without its query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Whether it costs money: a `POST` on one of the generation routes.
    pub fn is_call(&self) -> bool {
        is_generation(&self.method, &self.target)
    }

    /// Whether its body asks for a stream.
    pub fn wants_stream(&self) -> bool {
        self.json()["stream"] == true
    }
}

fn is_generation(method: &str, target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    method == "POST"
        && [
            "/completions",
            "/completion",
            "/responses",
            "/responses/compact",
            "/embeddings",
            "/messages",
            "/api/chat",
            "/api/generate",
            "/api/embed",
        ]
        .iter()
        .any(|route| path.ends_with(route))
}

/// A request and what became of it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub request: Request,
    /// When the script had run to its end; `None` while it runs, or if the peer left before.
    pub answered: Option<Instant>,
    /// When the peer closed or reset the connection with the script still running. An end of
    /// stream (FIN) counts as leaving: HTTP clients have no other use for it.
    pub left: Option<Instant>,
}

impl Seen {
    /// Whether nothing more happens to it.
    pub fn is_over(&self) -> bool {
        self.answered.is_some() || self.left.is_some()
    }
}

/// Holds scripts back until the test lets them go. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate(Arc<GateState>);

#[derive(Debug)]
struct GateState {
    /// One permit lets one waiter through; closed, it lets everybody.
    passes: Semaphore,
    waiting: watch::Sender<usize>,
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Gate {
        Gate(Arc::new(GateState {
            passes: Semaphore::new(0),
            waiting: watch::Sender::new(0),
        }))
    }

    /// Lets everybody through from now on.
    pub fn open(&self) {
        self.0.passes.close();
    }

    /// Lets the next `n` through, whether they wait already or come later.
    pub fn pass(&self, n: usize) {
        self.0.passes.add_permits(n);
    }

    /// Waits until `n` stand before the gate.
    pub async fn reached_by(&self, n: usize) {
        let mut waiting = self.0.waiting.subscribe();
        let reached = must(
            "scripts at a gate",
            waiting.wait_for(|waiting| *waiting >= n),
        )
        .await;
        assert!(reached.is_ok(), "the gate outlives its watchers");
    }

    /// Passes the gate, when it lets one.
    pub async fn wait(&self) {
        let _place = Place::before(&self.0.waiting);
        if let Ok(pass) = self.0.passes.acquire().await {
            pass.forget();
        }
    }
}

/// A place before a gate, given up also by one that is cancelled.
struct Place<'a>(&'a watch::Sender<usize>);

impl Place<'_> {
    fn before(waiting: &watch::Sender<usize>) -> Place<'_> {
        waiting.send_modify(|waiting| *waiting += 1);
        Place(waiting)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A part of the body, to be framed.
    Body(Bytes),
    /// Bytes as they are.
    Raw(Bytes),
    Wait(Duration),
    WaitFor(Gate),
    /// Sends back whatever comes, until the peer closes.
    Echo,
    Hang,
    Close,
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Length,
    Chunked,
    UntilClose,
}

/// What is to be sent, as a script: the head, then step by step.
///
/// It is built from left to right. Without an ending of its own (`then_hang`, `then_close`,
/// `then_reset`, `then_echo`) the body ends as its framing wants, and the connection stays open
/// for the next request.
#[derive(Clone, Debug)]
pub struct Reply {
    before: Vec<Step>,
    /// `None`: nothing but what the steps write.
    status: Option<String>,
    headers: Vec<(String, String)>,
    body: Body,
    steps: Vec<Step>,
    close_after: bool,
}

impl Reply {
    fn new(status: u16) -> Reply {
        let reason = match status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            429 => "Too Many Requests",
            500 => "Internal Server Error",
            502 => "Bad Gateway",
            503 => "Service Unavailable",
            _ => "Status",
        };
        Reply {
            before: Vec::new(),
            status: Some(format!("{status} {reason}")),
            headers: Vec::new(),
            body: Body::Length,
            steps: Vec::new(),
            close_after: false,
        }
    }

    /// A JSON body with its `content-length`.
    pub fn json(status: u16, body: impl AsRef<[u8]>) -> Reply {
        Reply::of(status, "application/json", body)
    }

    /// Any body with its `content-length`.
    pub fn of(status: u16, content_type: &str, body: impl AsRef<[u8]>) -> Reply {
        Reply::new(status)
            .header("content-type", content_type)
            .then_body(body)
    }

    /// A status without a body (`content-length: 0`).
    pub fn status(status: u16) -> Reply {
        Reply::new(status)
    }

    /// An event stream, each item a chunk of its own, sent as it is: an item may hold half an
    /// event or three.
    pub fn sse<E: AsRef<[u8]>>(events: impl IntoIterator<Item = E>) -> Reply {
        Reply::chunks("text/event-stream", events)
    }

    /// A chunked body of any type.
    pub fn chunks<C: AsRef<[u8]>>(
        content_type: &str,
        chunks: impl IntoIterator<Item = C>,
    ) -> Reply {
        let reply = Reply::new(200)
            .header("content-type", content_type)
            .chunked();
        chunks
            .into_iter()
            .fold(reply, |reply, chunk| reply.then_body(chunk))
    }

    /// These bytes and nothing else, head included.
    pub fn raw(bytes: impl AsRef<[u8]>) -> Reply {
        Reply {
            status: None,
            ..Reply::new(200)
        }
        .then_write(bytes)
    }

    /// No byte at all, ever.
    pub fn hang() -> Reply {
        Reply {
            status: None,
            ..Reply::new(200)
        }
        .then_hang()
    }

    /// The connection closes without a byte.
    pub fn close() -> Reply {
        Reply {
            status: None,
            ..Reply::new(200)
        }
        .then_close()
    }

    /// The connection is reset without a byte.
    pub fn reset() -> Reply {
        Reply {
            status: None,
            ..Reply::new(200)
        }
        .then_reset()
    }

    /// A chat completion that answers `request`: a stream if it asks for one.
    pub fn chat(request: &Request) -> Reply {
        if request.wants_stream() {
            Reply::sse(chat_events(3))
        } else {
            Reply::json(200, chat_answer("Hello from upstream"))
        }
    }

    /// An error in OpenAI's form.
    pub fn error(status: u16) -> Reply {
        let error = json!({"message": "scripted", "type": "scripted_error", "code": null});
        Reply::json(status, json!({"error": error}).to_string())
    }

    /// Adds a header line; the same name may come again.
    pub fn header(mut self, name: &str, value: &str) -> Reply {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Frames the body as chunks.
    pub fn chunked(self) -> Reply {
        Reply {
            body: Body::Chunked,
            ..self
        }
    }

    /// Ends the body by closing the connection, as HTTP/1.0 did.
    pub fn until_close(self) -> Reply {
        Reply {
            body: Body::UntilClose,
            close_after: true,
            ..self
        }
    }

    /// Closes the connection after the answer and says so: `connection: close`.
    pub fn closing(self) -> Reply {
        Reply {
            close_after: true,
            ..self
        }
        .header("connection", "close")
    }

    /// Closes the connection after the answer without a word, as a server does whose keep-alive
    /// ran out.
    pub fn closing_silently(self) -> Reply {
        Reply {
            close_after: true,
            ..self
        }
    }

    /// Waits before the head.
    pub fn after(mut self, delay: Duration) -> Reply {
        self.before.push(Step::Wait(delay));
        self
    }

    /// Waits for the gate before the head.
    pub fn held_by(mut self, gate: &Gate) -> Reply {
        self.before.push(Step::WaitFor(gate.clone()));
        self
    }

    /// Writes bytes before the head: `HTTP/1.1 103 Early Hints\r\n\r\n`.
    pub fn interim(mut self, bytes: impl AsRef<[u8]>) -> Reply {
        self.before
            .push(Step::Raw(Bytes::copy_from_slice(bytes.as_ref())));
        self
    }

    /// Puts a pause between the parts of the body there are so far.
    pub fn paced(mut self, gap: Duration) -> Reply {
        let mut bodies = 0;
        let mut paced = Vec::with_capacity(self.steps.len() * 2);
        for step in self.steps {
            if matches!(step, Step::Body(_)) {
                if bodies > 0 {
                    paced.push(Step::Wait(gap));
                }
                bodies += 1;
            }
            paced.push(step);
        }
        self.steps = paced;
        self
    }

    fn then(mut self, step: Step) -> Reply {
        self.steps.push(step);
        self
    }

    /// Sends a part of the body: one chunk where it is chunked.
    pub fn then_body(self, bytes: impl AsRef<[u8]>) -> Reply {
        self.then(Step::Body(Bytes::copy_from_slice(bytes.as_ref())))
    }

    /// Writes bytes as they are, without framing them.
    pub fn then_write(self, bytes: impl AsRef<[u8]>) -> Reply {
        self.then(Step::Raw(Bytes::copy_from_slice(bytes.as_ref())))
    }

    pub fn then_wait(self, pause: Duration) -> Reply {
        self.then(Step::Wait(pause))
    }

    pub fn then_wait_for(self, gate: &Gate) -> Reply {
        self.then(Step::WaitFor(gate.clone()))
    }

    /// Keeps the connection open and says nothing more.
    pub fn then_hang(self) -> Reply {
        self.then(Step::Hang)
    }

    /// Closes the connection (FIN) without ending the body.
    pub fn then_close(self) -> Reply {
        self.then(Step::Close)
    }

    /// Resets the connection (RST). What was written just before may be lost on the way, as with
    /// a real one; wait for a gate where it must arrive.
    pub fn then_reset(self) -> Reply {
        self.then(Step::Reset)
    }

    /// Sends back what comes, until the peer closes: the other end of a tunnel.
    pub fn then_echo(self) -> Reply {
        self.then(Step::Echo)
    }

    /// The head, or nothing if the steps write their own.
    fn head(&self, bodiless: bool) -> Vec<u8> {
        let Some(status) = &self.status else {
            return Vec::new();
        };
        let mut head = format!("HTTP/1.1 {status}\r\n");
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        let given = |name: &str| {
            self.headers
                .iter()
                .any(|(given, _)| given.eq_ignore_ascii_case(name))
        };
        match self.body {
            Body::Length if !given("content-length") && !bodiless => {
                let length: usize = self
                    .steps
                    .iter()
                    .map(|step| {
                        if let Step::Body(bytes) = step {
                            bytes.len()
                        } else {
                            0
                        }
                    })
                    .sum();
                head += &format!("content-length: {length}\r\n");
            }
            Body::Chunked if !given("transfer-encoding") => {
                head += "transfer-encoding: chunked\r\n"
            }
            Body::Length | Body::Chunked | Body::UntilClose => {}
        }
        head += "\r\n";
        head.into_bytes()
    }

    fn framed(&self, part: &Bytes) -> Bytes {
        match self.body {
            // An empty chunk would be the last.
            Body::Chunked if !part.is_empty() => wire::framed_chunk(part).into(),
            _ => part.clone(),
        }
    }
}

/// An OpenAI chat completion with usage.
pub fn chat_answer(text: &str) -> String {
    json!({
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 1_767_225_600,
        "model": "scripted",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    })
    .to_string()
}

/// An OpenAI chat stream: `n` events of content (`w0 `, `w1 `, …), the finish with `usage`, and
/// `[DONE]`, so `n + 2` in all.
pub fn chat_events(n: usize) -> Vec<String> {
    let event = |delta: Value, finish: Value, usage: Value| {
        let event = json!({
            "id": "chatcmpl-scripted",
            "object": "chat.completion.chunk",
            "created": 1_767_225_600,
            "model": "scripted",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            "usage": usage,
        });
        format!("data: {event}\n\n")
    };
    let mut events: Vec<String> = (0..n)
        .map(|n| {
            event(
                json!({"content": format!("w{n} ")}),
                Value::Null,
                Value::Null,
            )
        })
        .collect();
    let usage = json!({"prompt_tokens": 11, "completion_tokens": n, "total_tokens": 11 + n});
    events.push(event(json!({}), json!("stop"), usage));
    events.push("data: [DONE]\n\n".to_owned());
    events
}

type Handler = Arc<dyn Fn(&Request) -> Reply + Send + Sync>;
type HeadHandler = Arc<dyn Fn(&Request) -> Option<Reply> + Send + Sync>;

struct Shared {
    handler: Mutex<Handler>,
    head_handler: Mutex<Option<HeadHandler>>,
    log: Mutex<Log>,
    /// Told after every change of the log.
    changed: watch::Sender<()>,
    open_connections: AtomicUsize,
}

#[derive(Default)]
struct Log {
    seen: Vec<Seen>,
    connections: usize,
    calls: usize,
    calls_in_flight: usize,
    max_in_flight: usize,
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Log) -> T) -> T {
        let value = change(&mut self.log());
        self.changed.send_replace(());
        value
    }
}

/// A test that failed while it held the lock has spoilt nothing that others need.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running provider. Dropping it closes its port and all its connections.
pub struct Upstream {
    addr: SocketAddr,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl Upstream {
    /// Answers every request by `handler`, on a free port of 127.0.0.1.
    pub async fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Upstream {
        Upstream::at((Ipv4Addr::LOCALHOST, 0).into(), handler).await
    }

    /// The same on `[::1]`.
    pub async fn start_v6(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Upstream {
        Upstream::at((Ipv6Addr::LOCALHOST, 0).into(), handler).await
    }

    /// The same at a given address.
    ///
    /// # Panics
    /// If it cannot be had.
    pub async fn at(
        addr: SocketAddr,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Upstream {
        let socket = bound(addr).unwrap_or_else(|error| panic!("cannot bind {addr}: {error}"));
        Upstream::on(socket, Arc::new(handler))
    }

    /// A chat answer, or a stream of three events if the request asks for one.
    pub async fn chatting() -> Upstream {
        Upstream::start(Reply::chat).await
    }

    /// This JSON to every request.
    pub async fn answering(json: impl Into<String>) -> Upstream {
        let json = json.into();
        Upstream::start(move |_| Reply::json(200, &json)).await
    }

    /// As [`Upstream::chatting`], each generation call's answer after `delay`.
    pub async fn slow(delay: Duration) -> Upstream {
        Upstream::start(move |request| {
            let reply = Reply::chat(request);
            if request.is_call() {
                reply.after(delay)
            } else {
                reply
            }
        })
        .await
    }

    /// A chat stream of `events` events of content, `gap` apart, and two that end it.
    pub async fn streaming(events: usize, gap: Duration) -> Upstream {
        Upstream::start(move |_| Reply::sse(chat_events(events)).paced(gap)).await
    }

    /// Takes every request and never answers.
    pub async fn hanging() -> Upstream {
        Upstream::start(|_| Reply::hang()).await
    }

    /// This error to every request.
    pub async fn failing(status: u16) -> Upstream {
        Upstream::start(move |_| Reply::error(status)).await
    }

    /// An address where nobody listens and nobody else will.
    pub fn dead_port() -> DeadPort {
        DeadPort::new()
    }

    fn on(socket: Socket, handler: Handler) -> Upstream {
        let listener = socket
            .listen(BACKLOG)
            .and_then(|()| TcpListener::from_std(socket.into()))
            .expect("a bound socket listens");
        let shared = Arc::new(Shared {
            handler: Mutex::new(handler),
            head_handler: Mutex::new(None),
            log: Mutex::default(),
            changed: watch::Sender::new(()),
            open_connections: AtomicUsize::new(0),
        });
        Upstream {
            addr: listener.local_addr().expect("a bound socket"),
            server: tokio::spawn(accept(listener, Arc::clone(&shared))),
            shared,
        }
    }

    /// Answers the requests that come from now on in another way.
    pub fn set_handler(&self, handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) {
        *lock(&self.shared.handler) = Arc::new(handler);
    }

    /// Asks `handler` as soon as a head has come. If it has a reply, that is sent without reading
    /// the body (which is empty then). What the client still uploads is thrown away until it
    /// closes the connection, since closing it first would reset the reply on its way.
    pub fn answer_heads(
        &self,
        handler: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    ) {
        *lock(&self.shared.head_handler) = Some(Arc::new(handler));
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`, without a slash at its end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// How many generation calls came, body and all.
    pub fn calls(&self) -> usize {
        self.shared.log().calls
    }

    /// Everything that came, in order.
    pub fn requests(&self) -> Vec<Seen> {
        self.shared.log().seen.clone()
    }

    /// The generation call of this number, from 0.
    ///
    /// # Panics
    /// If it did not come.
    pub fn call(&self, number: usize) -> Seen {
        let found = self
            .requests()
            .into_iter()
            .find(|seen| seen.request.call == Some(number));
        found.unwrap_or_else(|| panic!("call {number} never came, only {}", self.calls()))
    }

    /// Generation calls whose script still runs and whose client is still there.
    pub fn in_flight(&self) -> usize {
        self.shared.log().calls_in_flight
    }

    /// The most there ever were at once.
    pub fn max_in_flight(&self) -> usize {
        self.shared.log().max_in_flight
    }

    /// How many connections were ever made.
    pub fn connections(&self) -> usize {
        self.shared.log().connections
    }

    /// How many are open now.
    pub fn open_connections(&self) -> usize {
        self.shared.open_connections.load(Ordering::SeqCst)
    }

    /// Waits until `n` generation calls have come.
    pub async fn wait_for_calls(&self, n: usize) {
        self.wait_until(&format!("{n} calls"), |log| log.calls >= n)
            .await;
    }

    /// Waits until exactly `n` generation calls run.
    pub async fn wait_for_in_flight(&self, n: usize) {
        self.wait_until(&format!("{n} calls in flight"), |log| {
            log.calls_in_flight == n
        })
        .await;
    }

    /// Waits until `n` requests of any kind have come.
    pub async fn wait_for_requests(&self, n: usize) {
        self.wait_until(&format!("{n} requests"), |log| log.seen.len() >= n)
            .await;
    }

    /// Waits until the peer has closed the connection under generation call `call`, whose script
    /// still ran, and tells when that was.
    pub async fn wait_until_closed(&self, call: usize) -> Instant {
        let left = |log: &Log| {
            log.seen
                .iter()
                .find(|seen| seen.request.call == Some(call))
                .and_then(|seen| seen.left)
        };
        self.wait_until(&format!("call {call} to be closed"), |log| {
            left(log).is_some()
        })
        .await;
        left(&self.shared.log()).expect("just seen")
    }

    /// Waits until the script of generation call `call` is over, answered or left.
    pub async fn wait_until_over(&self, call: usize) {
        self.wait_until(&format!("call {call} to be over"), |log| {
            log.seen
                .iter()
                .any(|seen| seen.request.call == Some(call) && seen.is_over())
        })
        .await;
    }

    /// Waits until no connection is open.
    pub async fn wait_until_idle(&self) {
        self.wait_until("all connections to close", |_| self.open_connections() == 0)
            .await;
    }

    async fn wait_until(&self, what: &str, so: impl Fn(&Log) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let happens = async {
            while !so(&self.shared.log()) {
                if changed.changed().await.is_err() {
                    break;
                }
            }
        };
        let what = format!("{what} at {self:?}");
        must(&what, happens).await;
    }

    /// Stops: cuts every connection and leaves the port to be bound again by [`Upstream::at`].
    pub async fn stop(mut self) -> SocketAddr {
        self.server.abort();
        // Cancelled, as it should be; only its end matters.
        let _ = (&mut self.server).await;
        self.addr
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A port that is taken and refuses every connection.
#[derive(Debug)]
pub struct DeadPort {
    socket: Socket,
    addr: SocketAddr,
}

impl DeadPort {
    fn new() -> DeadPort {
        // Bound and never listening: a connection is refused, and no other test gets the port.
        let socket = bound((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        let addr = socket.local_addr().ok().and_then(|addr| addr.as_socket());
        DeadPort {
            addr: addr.expect("an address of IP"),
            socket,
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`, without a slash at its end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The provider comes (back) to life here.
    pub fn revive(self, handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Upstream {
        Upstream::on(self.socket, Arc::new(handler))
    }
}

/// An address at which connecting neither succeeds nor fails, as behind a firewall that drops.
#[derive(Debug)]
pub struct DeafPort {
    addr: SocketAddr,
    _listener: Socket,
    _callers: Vec<TcpStream>,
}

impl DeafPort {
    /// Fills the queue of a listener that never accepts: Linux then drops what comes.
    pub async fn new() -> DeafPort {
        let listener = bound((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        listener.listen(0).expect("a bound socket listens");
        let addr = listener.local_addr().ok().and_then(|addr| addr.as_socket());
        let addr = addr.expect("an address of IP");
        let mut callers = Vec::new();
        while callers.len() < 64 {
            let connected = TcpStream::connect(addr);
            match tokio::time::timeout(Duration::from_millis(200), connected).await {
                Ok(caller) => callers.push(caller.expect("a listener")),
                Err(_) => {
                    return DeafPort {
                        addr,
                        _listener: listener,
                        _callers: callers,
                    };
                }
            }
        }
        panic!("this system takes any number of connections");
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`, without a slash at its end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

fn bound(addr: SocketAddr) -> io::Result<Socket> {
    let family = match addr.ip() {
        IpAddr::V4(_) => Domain::IPV4,
        IpAddr::V6(_) => Domain::IPV6,
    };
    let socket = Socket::new(family, Type::STREAM, Some(Protocol::TCP))?;
    if cfg!(unix) {
        // For a port that was in use a moment ago. On Windows the option would share a live one.
        socket.set_reuse_address(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    Ok(socket)
}

/// The connections belong to this task: aborting it cuts them.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (socket, _) = accepted.expect("descriptors for another connection");
                let number = shared.change(|log| {
                    log.connections += 1;
                    log.connections - 1
                });
                connections.spawn(Connection::new(socket, number, Arc::clone(&shared)).serve());
            }
            // A handler that panics shows here, and on standard error.
            Some(_) = connections.join_next() => {}
        }
    }
}

struct Connection {
    wire: Wire,
    number: usize,
    shared: Arc<Shared>,
}

/// What is to be done after a script.
#[derive(Debug, PartialEq, Eq)]
enum After {
    KeepAlive,
    Close,
    Reset,
}

impl Connection {
    fn new(socket: TcpStream, number: usize, shared: Arc<Shared>) -> Connection {
        shared.open_connections.fetch_add(1, Ordering::SeqCst);
        Connection {
            wire: Wire::new(socket),
            number,
            shared,
        }
    }

    async fn serve(mut self) {
        if self.wire.socket().set_nodelay(true).is_err() {
            return;
        }
        loop {
            match self.exchange().await {
                Some(After::KeepAlive) => {}
                Some(After::Reset) => {
                    // If the peer was faster, it has what it needs.
                    let _ = wire::reset_on_close(&self.wire.socket());
                    return;
                }
                Some(After::Close) | None => return,
            }
        }
    }

    /// One request and its reply; `None` if the peer left.
    async fn exchange(&mut self) -> Option<After> {
        let head = self.wire.head().await.ok()??;
        let mut words = head.start.split(' ');
        let mut request = Request {
            method: words.next()?.to_owned(),
            target: words.next()?.to_owned(),
            headers: head.headers,
            body: Bytes::new(),
            body_len: 0,
            body_end: BodyEnd::Clean,
            connection: self.number,
            number: 0,
            call: None,
            started: now(),
        };
        let mut open = Open::begin(&self.shared, &mut request);

        let early = lock(&self.shared.head_handler).clone();
        let early = early.and_then(|handler| handler(&request));
        let is_early = early.is_some();
        let reply = match early {
            Some(reply) => {
                open.complete(&mut request);
                reply
            }
            None => {
                self.read_body(&mut request).await?;
                open.complete(&mut request);
                if request.body_end != BodyEnd::Clean {
                    return None;
                }
                let handler = Arc::clone(&lock(&self.shared.handler));
                handler(&request)
            }
        };

        let socket = self.wire.socket();
        let bodiless = request.method == "HEAD";
        let after = if matches!(reply.steps.last(), Some(Step::Echo)) {
            let after = perform(&socket, &reply, bodiless).await.ok()?;
            self.echo(&socket).await;
            after
        } else {
            tokio::select! {
                biased;
                performed = perform(&socket, &reply, bodiless) => performed.ok()?,
                () = peer_leaves(&mut self.wire) => return None,
            }
        };
        open.answered();
        if is_early && after != After::Reset {
            wire::finish_sending(&socket);
            drained(&mut self.wire).await;
            return None;
        }
        Some(after)
    }

    async fn read_body(&mut self, request: &mut Request) -> Option<()> {
        if request.headers.has("expect", "100-continue") {
            wire::write(&self.wire.socket(), b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .ok()?;
        }
        let mut framing = Framing::of(&request.headers, Framing::Over(BodyEnd::Clean));
        let mut kept = Vec::new();
        while let Some(piece) = self.wire.piece(&mut framing).await {
            request.body_len += piece.len() as u64;
            let room = BODY_KEPT - kept.len();
            kept.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        request.body = kept.into();
        if let Framing::Over(end) = framing {
            request.body_end = end;
        }
        Some(())
    }

    async fn echo(&mut self, socket: &TcpStream) {
        while let Ok(bytes) = self.wire.raw().await {
            if bytes.is_empty() || wire::write(socket, &bytes).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.open_connections.fetch_sub(1, Ordering::SeqCst);
        self.shared.changed.send_replace(());
    }
}

/// Returns when the peer has closed or reset the connection. What it sends until then stays to
/// be read.
async fn peer_leaves(wire: &mut Wire) {
    while let Ok(1..) = wire.fill().await {}
}

/// The same, throwing away what it sends.
async fn drained(wire: &mut Wire) {
    while let Ok(bytes) = wire.raw().await {
        if bytes.is_empty() {
            return;
        }
    }
}

async fn perform(socket: &TcpStream, reply: &Reply, bodiless: bool) -> io::Result<After> {
    for step in &reply.before {
        if let Some(after) = take(socket, step, reply).await? {
            return Ok(after);
        }
    }
    // Head and first part of the body go out in one segment, as real servers send them.
    let mut head = reply.head(bodiless);
    let mut steps = reply.steps.as_slice();
    if let [Step::Body(first), rest @ ..] = steps
        && !bodiless
    {
        head.extend_from_slice(&reply.framed(first));
        steps = rest;
    }
    wire::write(socket, &head).await?;
    for step in steps {
        if bodiless && matches!(step, Step::Body(_)) {
            continue;
        }
        if let Some(after) = take(socket, step, reply).await? {
            return Ok(after);
        }
    }
    if reply.status.is_some() && reply.body == Body::Chunked && !bodiless {
        wire::write(socket, wire::LAST_CHUNK).await?;
    }
    Ok(if reply.close_after {
        After::Close
    } else {
        After::KeepAlive
    })
}

/// Takes one step; the connection's fate if that is the last.
async fn take(socket: &TcpStream, step: &Step, reply: &Reply) -> io::Result<Option<After>> {
    match step {
        Step::Body(bytes) => wire::write(socket, &reply.framed(bytes)).await?,
        Step::Raw(bytes) => wire::write(socket, bytes).await?,
        Step::Wait(pause) => tokio::time::sleep(*pause).await,
        Step::WaitFor(gate) => gate.wait().await,
        Step::Hang => std::future::pending().await,
        Step::Close | Step::Echo => return Ok(Some(After::Close)),
        Step::Reset => return Ok(Some(After::Reset)),
    }
    Ok(None)
}

/// A request in the log whose end is not yet known. Dropped unanswered, its client has left.
struct Open {
    shared: Arc<Shared>,
    number: usize,
    is_call: bool,
    answered: bool,
}

impl Open {
    /// Enters the request, with the number it gets here.
    fn begin(shared: &Arc<Shared>, request: &mut Request) -> Open {
        shared.change(|log| {
            request.number = log.seen.len();
            log.seen.push(Seen {
                request: request.clone(),
                answered: None,
                left: None,
            });
        });
        Open {
            shared: Arc::clone(shared),
            number: request.number,
            is_call: false,
            answered: false,
        }
    }

    /// Enters the body, and the number of the generation call if this is one.
    fn complete(&mut self, request: &mut Request) {
        self.shared.change(|log| {
            if request.is_call() && request.body_end == BodyEnd::Clean {
                self.is_call = true;
                request.call = Some(log.calls);
                log.calls += 1;
                log.calls_in_flight += 1;
                log.max_in_flight = log.max_in_flight.max(log.calls_in_flight);
            }
            log.seen[self.number].request = request.clone();
        });
    }

    fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let at = now();
        self.shared.change(|log| {
            if self.is_call {
                log.calls_in_flight -= 1;
            }
            let seen = &mut log.seen[self.number];
            if self.answered {
                seen.answered = Some(at);
            } else {
                seen.left = Some(at);
            }
        });
    }
}
