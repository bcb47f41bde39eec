//! One attempt at the provider: sends the request, reads the answer into the shared one, and
//! tells how it ended.

use std::borrow::Cow;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::Method;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Sleep;

use super::answer::{Account, Head, Linger, Writer, own_bytes};
use super::bodies::BodyCopy;
use super::error::CallError;
use super::headers::{remove_cors, remove_hop_by_hop};
use super::identify::UpstreamRequest;
use super::read_body::{RequestBody, upload_error};
use super::usage::{Ask, Estimates, Meter, REFUSAL_BYTES, filter_of, hand_on};
use crate::clock::{Clock, Moment};
use crate::policy::routing::Route;
use crate::policy::tap::{Encoding, End, Framing, Reading, Tap};
use crate::policy::usage::filter::UsageFilter;
use crate::provider::Provider;
use crate::provider::clients::describe;
use crate::provider::state::Health;
use crate::settings::Setting;
use crate::store::Outcome;

/// How an attempt ended.
pub struct Ended {
    pub account: Account,
    pub health: Health,
    /// The answer may be given to others later.
    pub keepable: bool,
}

/// An attempt that came to nothing, or to half an answer.
pub enum Failure {
    /// Traygate says why. `event`: what was sent ends where an error event may follow.
    Error { error: CallError, event: bool },
    /// Nobody listens any more.
    Left,
    /// The client's own upload broke off, stalled, or cannot be read.
    Upload(CallError),
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Failure {
        Failure::Error {
            error,
            event: false,
        }
    }
}

impl Failure {
    /// The same failure, in the middle of an answer that `tap` has read so far. Where the head
    /// promised a length there is no room for an event.
    fn after(self, tap: &Tap, is_open_ended: bool) -> Failure {
        match self {
            Failure::Error { error, .. } => Failure::Error {
                error,
                event: is_open_ended && tap.at_event_boundary(),
            },
            failure => failure,
        }
    }
}

/// What an answer is held to.
#[derive(Clone, Copy, Debug)]
enum Timing {
    /// To the first byte, then between chunks.
    Streamed {
        first_byte: Duration,
        idle: Duration,
    },
    /// To the last byte.
    Unstreamed { whole: Duration },
    /// Routes that nobody knows: to the head, then between chunks.
    Passing { head: Duration, idle: Duration },
}

impl Timing {
    fn of_stream(self, provider: &Provider) -> Timing {
        let limits = &provider.settings.limits;
        Timing::Streamed {
            first_byte: limits.first_byte,
            idle: limits.idle,
        }
    }

    fn of(provider: &Provider, route: Route, streaming: bool) -> Timing {
        let limits = &provider.settings.limits;
        if !route.is_generation() {
            Timing::Passing {
                head: limits.unstreamed,
                idle: limits.idle,
            }
        } else if streaming {
            Timing::Streamed {
                first_byte: limits.first_byte,
                idle: limits.idle,
            }
        } else {
            Timing::Unstreamed {
                whole: limits.unstreamed,
            }
        }
    }

    fn before_first_byte(self) -> Limit {
        match self {
            Timing::Streamed { first_byte, .. } => Limit {
                span: first_byte,
                what: "begin its answer",
                setting: Some(Setting::TimeoutSecs),
            },
            Timing::Unstreamed { whole } => Limit {
                span: whole,
                what: "finish its answer",
                setting: Some(Setting::UnstreamedTimeoutSecs),
            },
            Timing::Passing { head, .. } => Limit {
                span: head,
                what: "begin its answer",
                setting: Some(Setting::UnstreamedTimeoutSecs),
            },
        }
    }

    fn between_chunks(self) -> Option<Limit> {
        match self {
            Timing::Streamed { idle, .. } | Timing::Passing { idle, .. } => Some(Limit {
                span: idle,
                what: "send anything more",
                setting: Some(Setting::IdleSecs),
            }),
            Timing::Unstreamed { .. } => None,
        }
    }
}

/// How long a provider may keep its connection open after the last event of an answer, which holds
/// a permit meanwhile.
const AFTER_LAST_EVENT: Limit = Limit {
    span: Duration::from_secs(10),
    what: "close its finished answer",
    setting: None,
};

#[derive(Clone, Copy, Debug)]
struct Limit {
    span: Duration,
    what: &'static str,
    /// `None`: nobody can set it.
    setting: Option<Setting>,
}

impl Limit {
    /// What to change for another limit, in words.
    fn name(self, provider: &Provider) -> Cow<'static, str> {
        match self.setting {
            Some(setting) => provider.settings.in_force.name(setting),
            None => Cow::Borrowed("a fixed limit"),
        }
    }
}

/// The one timer of a call. Moving its end is a store; it is set again only when it fires early.
struct Deadline {
    sleep: Pin<Box<Sleep>>,
    clock: Clock,
    due: Moment,
    limit: Limit,
}

impl Deadline {
    fn new(clock: Clock, now: Moment, limit: Limit) -> Deadline {
        Deadline {
            sleep: Box::pin(tokio::time::sleep(limit.span)),
            clock,
            due: now + limit.span,
            limit,
        }
    }

    fn restart(&mut self, now: Moment, limit: Limit) {
        // A timer that would fire too late is set anew, one that fires early looks again then.
        if now + limit.span < self.due {
            self.sleep.set(tokio::time::sleep(limit.span));
        }
        self.limit = limit;
        self.due = now + limit.span;
    }

    /// Moves the end by a span that does not count.
    fn put_off(&mut self, span: Duration) {
        self.due = self.due + span;
    }

    fn poll_over(&mut self, cx: &mut Context<'_>, upload: &Upload) -> Poll<()> {
        while self.sleep.as_mut().poll(cx).is_ready() {
            let now = self.clock.now();
            if upload.moved() {
                self.due = now + self.limit.span;
            }
            if now >= self.due {
                return Poll::Ready(());
            }
            self.sleep.set(tokio::time::sleep(self.due.since(now)));
        }
        Poll::Pending
    }
}

/// What has come of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// The first byte of its body.
    FirstByte,
    /// Its first content.
    Content,
}

/// An attempt under way.
pub struct Attempt<'a> {
    provider: &'a Provider,
    route: Route,
    writer: &'a Writer,
    linger: &'a mut Linger,
    clock: Clock,
    timing: Timing,
    deadline: Deadline,
    upload: Arc<Upload>,
    copy: Option<&'a mut BodyCopy>,
    meter: Option<(&'a mut Meter, &'a Estimates)>,
}

/// The answer's head has come; its body is to be relayed.
pub struct Answering {
    pub head: Head,
    body: reqwest::Body,
    tap: Tap,
    framing: Framing,
    /// Takes out what only Traygate has asked for.
    filter: Option<UsageFilter>,
    // Keeps the call's place on its client until the last byte.
    _lease: crate::provider::clients::Lease,
}

impl<'a> Attempt<'a> {
    pub fn new(
        provider: &'a Provider,
        route: Route,
        streaming: bool,
        writer: &'a Writer,
        linger: &'a mut Linger,
        clock: Clock,
    ) -> Attempt<'a> {
        let timing = Timing::of(provider, route, streaming);
        Attempt {
            deadline: Deadline::new(clock, clock.now(), timing.before_first_byte()),
            provider,
            route,
            writer,
            linger,
            clock,
            timing,
            upload: Arc::default(),
            copy: None,
            meter: None,
        }
    }

    /// Puts what is answered into `copy` too.
    pub fn copying_to(mut self, copy: Option<&'a mut BodyCopy>) -> Attempt<'a> {
        self.copy = copy;
        self
    }

    /// Lets `meter` see what goes to and fro. What it keeps of the request has its place in
    /// `estimates`.
    pub fn metered_by(
        mut self,
        meter: Option<&'a mut Meter>,
        estimates: &'a Estimates,
    ) -> Attempt<'a> {
        self.meter = meter.map(|meter| (meter, estimates));
        self
    }

    /// Sends the request and waits for the answer's head. A stream may be asked for its usage,
    /// too.
    ///
    /// It is sent once. reqwest sends it again only where its connection hands it back unsent or
    /// HTTP/2 says that it was not processed. A provider that refuses to be asked is the one
    /// exception: it gets the client's own request after that.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn send(
        &mut self,
        request: UpstreamRequest,
        ask: Option<Ask>,
    ) -> Result<Answering, Failure> {
        let (request, unasked) = match ask {
            Some(ask) => ask.put_into(request, self.provider),
            None => (request, None),
        };
        let mut answering = self.send_as_is(request).await?;
        let Some(unasked) = unasked else {
            return Ok(answering);
        };
        if matches!(answering.head.status.as_u16(), 400 | 422) {
            let beginning = self.read_beginning(&mut answering.body).await?;
            if unasked.is_refused(self.provider, &answering.head, &beginning) {
                drop(answering);
                let limit = self.timing.before_first_byte();
                self.deadline.restart(self.clock.now(), limit);
                return self.send_as_is(unasked.request()).await;
            }
            answering.body = reqwest::Body::wrap(Resumed {
                beginning: Some(beginning),
                rest: answering.body,
            });
        }
        answering.filter = filter_of(&mut answering.head, answering.framing);
        Ok(answering)
    }

    /// Reads an error's body, or as much of it as may tell of a refusal.
    async fn read_beginning(&mut self, body: &mut reqwest::Body) -> Result<Bytes, Failure> {
        let mut beginning = Vec::new();
        while beginning.len() < REFUSAL_BYTES && !body.is_end_stream() {
            match self.watch(body.frame()).await? {
                None => break,
                Some(Err(error)) => return Err(self.broke(error)),
                Some(Ok(frame)) => {
                    let chunk = frame.into_data().unwrap_or_default();
                    beginning.extend_from_slice(&chunk);
                }
            }
        }
        Ok(beginning.into())
    }

    /// Sends what is given, and lets the meter see it and the head that comes back.
    async fn send_as_is(&mut self, request: UpstreamRequest) -> Result<Answering, Failure> {
        if let Some((meter, estimates)) = &mut self.meter {
            meter.sends(&request, &self.upload, estimates);
        }
        let sent = self.execute(request).await;
        if let Some((meter, _)) = &mut self.meter {
            match &sent {
                Ok(answering) => meter.head(&answering.head, answering.framing),
                // It may be at work on it.
                Err(
                    Failure::Left
                    | Failure::Error {
                        error: CallError::UpstreamTimeout { .. },
                        ..
                    },
                ) => {}
                Err(_) => meter.nothing(),
            }
        }
        sent
    }

    /// One request and its answer's head.
    async fn execute(&mut self, request: UpstreamRequest) -> Result<Answering, Failure> {
        let lease = self
            .provider
            .clients
            .lease()
            .map_err(|error| self.unreachable(error.to_string()))?;
        let is_head = request.method == Method::HEAD;
        let mut outgoing = reqwest::Request::new(request.method, request.url);
        *outgoing.headers_mut() = request.headers;
        let held = match request.body {
            RequestBody::Whole { bytes, held } => {
                *outgoing.body_mut() = Some(bytes.into());
                held
            }
            RequestBody::Streamed { read, rest } => {
                if !(read.is_empty() && rest.is_end_stream()) {
                    let body = UploadBody {
                        read: read.into_iter(),
                        rest,
                        upload: self.upload.clone(),
                    };
                    *outgoing.body_mut() = Some(reqwest::Body::wrap(body));
                }
                None
            }
        };
        let sending = pin!(lease.client().execute(outgoing));
        let sent = match self.watch(sending).await {
            Err(Failure::Error { .. }) if self.upload.starves() => {
                let limit = self.deadline.limit;
                return Err(Failure::Upload(CallError::UploadStalled {
                    limit: limit.span,
                    setting: limit.name(self.provider),
                }));
            }
            sent => sent?,
        };
        drop(held);
        let response = match (sent, self.upload.broke.get()) {
            (Ok(response), _) => response,
            (Err(_), Some(error)) => return Err(Failure::Upload(error.clone())),
            (Err(error), None) => return Err(self.send_error(error)),
        };
        if let Timing::Passing { .. } = self.timing
            && let Some(limit) = self.timing.between_chunks()
        {
            self.deadline.restart(self.clock.now(), limit);
        }
        let (head, body) = http::Response::<reqwest::Body>::from(response).into_parts();
        let mut headers = head.headers;
        remove_hop_by_hop(&mut headers);
        remove_cors(&mut headers);
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let framing = Framing::of(text(&CONTENT_TYPE).unwrap_or_default());
        let encoding = text(&CONTENT_ENCODING).map_or(Encoding::Identity, Encoding::of);
        let length = text(&CONTENT_LENGTH).and_then(|length| length.parse().ok());
        if let Some(copy) = &mut self.copy {
            copy.head(&headers);
        }
        Ok(Answering {
            tap: Tap::new(
                self.route,
                if self.route.is_generation() || framing == Framing::Sse {
                    framing
                } else {
                    Framing::Opaque
                },
                encoding,
                head.status.as_u16(),
            ),
            framing,
            filter: None,
            head: Head {
                status: head.status,
                length: length.filter(|_| !is_head),
                headers,
            },
            body,
            _lease: lease,
        })
    }

    /// Reads the answer's body to its end, handing every chunk on as it comes. `on` is told
    /// once. The end itself, and a last chunk that came with it, are left for
    /// [`Writer::finish`] to tell, so that what has to be done before the end is seen can be.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn relay(
        &mut self,
        answering: Answering,
        on: impl FnMut(Came, Moment),
    ) -> Result<Ended, Failure> {
        let Answering {
            head,
            mut body,
            mut tap,
            framing,
            mut filter,
            _lease,
        } = answering;
        let status = head.status.as_u16();
        let is_open_ended = !head.headers.contains_key(CONTENT_LENGTH);
        self.writer.prepare_head(head);
        let read = self
            .read(&mut body, status, framing, &mut tap, filter.as_mut(), on)
            .await;
        // What was held back of an event that never ended is the client's.
        if let Some(filter) = &mut filter {
            filter.finish(|part| self.writer.append(part));
        }
        let failure = read.err().map(|failure| failure.after(&tap, is_open_ended));
        let reading = tap.finish();
        if let Some((meter, _)) = &mut self.meter {
            meter.read(&reading, framing);
        }
        match failure {
            Some(failure) => Err(failure),
            None => Ok(self.ended(status, framing, reading)),
        }
    }

    /// Reads the body to its end, in order or not.
    async fn read(
        &mut self,
        body: &mut reqwest::Body,
        status: u16,
        framing: Framing,
        tap: &mut Tap,
        mut filter: Option<&mut UsageFilter>,
        mut on: impl FnMut(Came, Moment),
    ) -> Result<(), Failure> {
        // Head and first chunk often come together: one wake-up serves both.
        let mut arrived = if body.is_end_stream() {
            Some(None)
        } else {
            body.frame().now_or_never()
        };
        if arrived.is_none() {
            self.writer.announce();
        }
        let mut has_content = false;
        let mut is_first = true;
        loop {
            let frame = match arrived.take() {
                Some(frame) => frame,
                None => match self.next(body).await {
                    Ok(frame) => frame,
                    // Its readers took all there was and left without waiting for the end.
                    Err(Failure::Left) if self.writer.has_all() => None,
                    // It was whole; the provider only kept its connection open.
                    Err(Failure::Error { .. }) if tap.saw_end() => None,
                    Err(failure) => return Err(failure),
                },
            };
            let chunk = match frame {
                None => return Ok(()),
                Some(Err(error)) => return Err(self.broke(error)),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) if !chunk.is_empty() => chunk,
                    // Nothing, which the head must not wait behind, or trailers.
                    Ok(_) | Err(_) => {
                        self.writer.announce();
                        continue;
                    }
                },
            };
            let now = self.clock.now();
            if std::mem::take(&mut is_first) {
                on(Came::FirstByte, now);
                if framing == Framing::Sse {
                    // Also where it was not asked to stream.
                    self.timing = self.timing.of_stream(self.provider);
                }
            }
            if let Some(limit) = self.timing.between_chunks() {
                self.deadline.restart(now, limit);
            }
            let is_last = body.is_end_stream();
            let chunk = own_bytes(chunk);
            if !hand_on(self.writer, &chunk, filter.as_deref_mut(), is_last) {
                // The head must not wait behind what is kept.
                self.writer.announce();
            }
            if let Some(copy) = &mut self.copy {
                copy.chunk(&chunk);
            }
            tap.feed(&chunk);
            if let Some((meter, _)) = &mut self.meter {
                meter.chunk(&chunk);
            }
            if tap.saw_end() {
                self.writer.all_said();
                let span = AFTER_LAST_EVENT.span.min(self.deadline.limit.span);
                let limit = Limit {
                    span,
                    ..AFTER_LAST_EVENT
                };
                self.deadline.restart(now, limit);
            }
            if !has_content && tap.has_content() {
                has_content = true;
                self.writer.content(now);
                // The text of a 503 is no content: it must not pass for a probe's success.
                if status < 400 {
                    on(Came::Content, now);
                }
            }
            if is_last {
                return Ok(());
            }
        }
    }

    async fn next(
        &mut self,
        body: &mut reqwest::Body,
    ) -> Result<Option<Result<Frame<Bytes>, reqwest::Error>>, Failure> {
        self.room().await?;
        self.watch(body.frame()).await
    }

    /// Waits until the fastest reader is near. A client that reads slowly is no fault of the
    /// upstream's, so no deadline runs meanwhile.
    async fn room(&mut self) -> Result<(), Failure> {
        let clock = self.clock;
        let mut began = None;
        poll_fn(|cx| {
            if self.writer.poll_room(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            began.get_or_insert_with(|| clock.now());
            self.writer
                .poll_left(cx, self.linger)
                .map(|()| Err(Failure::Left))
        })
        .await?;
        let Some(began) = began else {
            return Ok(());
        };
        let now = clock.now();
        match self.timing.between_chunks() {
            Some(limit) => self.deadline.restart(now, limit),
            None => self.deadline.put_off(now.since(began)),
        }
        Ok(())
    }

    /// Waits for `future`, for the deadline or for the last listener to leave.
    async fn watch<F: Future + Unpin>(&mut self, mut future: F) -> Result<F::Output, Failure> {
        let over = poll_fn(|cx| {
            if let Poll::Ready(output) = future.poll_unpin(cx) {
                return Poll::Ready(Ok(output));
            }
            if self.writer.poll_left(cx, self.linger).is_ready() {
                return Poll::Ready(Err(None));
            }
            let over = self.deadline.poll_over(cx, &self.upload);
            over.map(|()| Err(Some(self.deadline.limit)))
        });
        match over.await {
            Ok(output) => Ok(output),
            Err(None) => Err(Failure::Left),
            Err(Some(limit)) => Err(Failure::from(CallError::UpstreamTimeout {
                provider: self.provider.name().clone(),
                what: limit.what,
                limit: limit.span,
                setting: limit.name(self.provider),
            })),
        }
    }

    fn send_error(&self, error: reqwest::Error) -> Failure {
        if error.is_connect() && error.is_timeout() {
            return Failure::from(CallError::UpstreamTimeout {
                provider: self.provider.name().clone(),
                what: "accept a connection",
                limit: self.provider.settings.limits.connect,
                setting: self.provider.settings.in_force.name(Setting::ConnectSecs),
            });
        }
        let is_connect = error.is_connect();
        // The address may hold a key.
        let reason = describe(&error.without_url());
        if is_connect {
            return self.unreachable(reason);
        }
        Failure::from(CallError::UpstreamGarbled {
            provider: self.provider.name().clone(),
            reason,
        })
    }

    fn broke(&self, error: reqwest::Error) -> Failure {
        Failure::from(CallError::UpstreamBroke {
            provider: self.provider.name().clone(),
            reason: describe(&error.without_url()),
        })
    }

    fn unreachable(&self, reason: String) -> Failure {
        Failure::from(CallError::UpstreamUnreachable {
            provider: self.provider.name().clone(),
            reason,
        })
    }

    /// What an answer that ended in order amounts to.
    fn ended(&self, status: u16, framing: Framing, reading: Reading) -> Ended {
        let streamed = matches!(framing, Framing::Sse | Framing::Ndjson);
        let told = reading
            .error
            .as_ref()
            .map(|error| match error.kind.as_str() {
                "" => error.message.clone(),
                kind if error.message.is_empty() => kind.to_owned(),
                kind => format!("{kind}: {}", error.message),
            });
        let overloaded = reading.error.as_ref().is_some_and(|error| error.overloaded);
        let (outcome, error, health) = if status >= 400 {
            let error = match told {
                Some(told) => format!("status {status}: {told}"),
                None => format!("status {status}"),
            };
            let health = match status {
                529 => Health::Overloaded,
                500.. if overloaded => Health::Overloaded,
                500.. => Health::Failure,
                _ => Health::ClientError,
            };
            (Outcome::UpstreamError, Some(error), health)
        } else if let Some(told) = told {
            // Only an event in a stream is the provider's failure; a 200 that says no in its body
            // may be the request's own fault.
            if overloaded {
                (Outcome::BrokenStream, Some(told), Health::Overloaded)
            } else if streamed {
                (Outcome::BrokenStream, Some(told), Health::Failure)
            } else {
                (Outcome::UpstreamError, Some(told), Health::ClientError)
            }
        } else if self.route.is_generation()
            && !reading.has_content
            && !reading.saw_end
            && status != 304
        {
            let error = "the answer was empty".to_owned();
            (Outcome::UpstreamError, Some(error), Health::ClientError)
        } else if streamed && reading.end == End::Unknown && !reading.saw_end {
            // In order as far as HTTP can tell, so it passes as it is and the breaker learns
            // nothing; but it was never finished.
            let error = "the stream ended without its last event".to_owned();
            (Outcome::BrokenStream, Some(error), Health::ClientError)
        } else {
            (Outcome::Completed, None, Health::Success)
        };
        Ended {
            keepable: (200..300).contains(&status) && reading.keepable(),
            account: Account {
                outcome,
                error: error.map(Arc::from),
            },
            health,
        }
    }
}

/// What a request body that streams through tells the attempt.
#[derive(Debug, Default)]
pub struct Upload {
    chunks: AtomicU64,
    bytes: AtomicU64,
    seen: AtomicU64,
    broke: OnceLock<CallError>,
    /// The upstream would take more than the client has sent.
    starves: AtomicBool,
}

impl Upload {
    /// True if anything was uploaded since this was last asked: an upload is not silence.
    fn moved(&self) -> bool {
        let chunks = self.chunks.load(Ordering::Relaxed);
        self.seen.swap(chunks, Ordering::Relaxed) != chunks
    }

    /// So many have gone through.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn count(&self, chunk: &Bytes) {
        let bytes = chunk.len() as u64;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn starves(&self) -> bool {
        self.starves.load(Ordering::Relaxed)
    }
}

/// A request body on its way through.
struct UploadBody {
    read: std::vec::IntoIter<Bytes>,
    rest: Incoming,
    upload: Arc<Upload>,
}

impl http_body::Body for UploadBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.upload.chunks.fetch_add(1, Ordering::Relaxed);
        if let Some(chunk) = self.read.next() {
            self.upload.count(&chunk);
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        let polled = Pin::new(&mut self.rest).poll_frame(cx);
        let starves = polled.is_pending();
        self.upload.starves.store(starves, Ordering::Relaxed);
        let frame = std::task::ready!(polled);
        match &frame {
            Some(Ok(frame)) => frame
                .data_ref()
                .into_iter()
                .for_each(|chunk| self.upload.count(chunk)),
            Some(Err(error)) => {
                self.upload.broke.get_or_init(|| upload_error(error));
            }
            None => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.read.as_slice().is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let read: u64 = self
            .read
            .as_slice()
            .iter()
            .map(|chunk| chunk.len() as u64)
            .sum();
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + read);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + read);
        }
        hint
    }
}

/// An answer's body of which the beginning has been read.
struct Resumed {
    beginning: Option<Bytes>,
    rest: reqwest::Body,
}

impl http_body::Body for Resumed {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        match self.beginning.take() {
            Some(beginning) => Poll::Ready(Some(Ok(Frame::data(beginning)))),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.beginning.is_none() && self.rest.is_end_stream()
    }
}

/// Long waits, on a clock that leaps. Real sockets do not go with one: it leaps to the next timer
/// whenever nothing else is to be done, and bytes on their way through the kernel are nothing it
/// knows of. So these begin where the HTTP client ends: at a future for the answer's head, and at
/// a body in memory.
#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http::{HeaderMap, HeaderValue, StatusCode};

    use super::super::answer::{Answer, Next, Reader};
    use super::*;
    use crate::settings::{Overrides, Settings};

    const MINUTE: Duration = Duration::from_secs(60);
    const EVENT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w\"}}]}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    fn provider(name: &str) -> Provider {
        let settings = Settings::parse("", &Overrides::default()).expect("the defaults");
        Provider::new(settings.provider(name).expect("shipped").clone())
    }

    /// The setting that ended a call, if one did.
    fn ended_by<T>(result: Result<T, Failure>) -> Option<Cow<'static, str>> {
        match result {
            Ok(_) => None,
            Err(Failure::Error {
                error: CallError::UpstreamTimeout { setting, .. },
                ..
            }) => Some(setting),
            Err(_) => panic!("not a timeout"),
        }
    }

    /// A body whose chunks come so long after one another.
    fn body(chunks: Vec<(Duration, Bytes)>) -> reqwest::Body {
        let chunks = stream::unfold(chunks.into_iter(), async |mut chunks| {
            let (gap, chunk) = chunks.next()?;
            tokio::time::sleep(gap).await;
            Some((Ok::<_, Infallible>(chunk), chunks))
        });
        reqwest::Body::wrap_stream(chunks)
    }

    fn events(count: usize, gap: Duration) -> Vec<(Duration, Bytes)> {
        let mut events = vec![(gap, Bytes::from_static(EVENT.as_bytes())); count];
        events.push((gap, Bytes::from_static(DONE.as_bytes())));
        events
    }

    fn answering(provider: &Provider, framing: Framing, body: reqwest::Body) -> Answering {
        let content_type = match framing {
            Framing::Sse => "text/event-stream",
            _ => "application/json",
        };
        let content_type = HeaderValue::from_static(content_type);
        Answering {
            head: Head {
                status: StatusCode::OK,
                headers: HeaderMap::from_iter([(CONTENT_TYPE, content_type)]),
                length: None,
            },
            body,
            tap: Tap::new(Route::ChatCompletions, framing, Encoding::Identity, 200),
            framing,
            filter: None,
            _lease: provider.clients.lease().expect("a client"),
        }
    }

    /// Reads to the end, after a pause before each chunk.
    async fn read(reader: Reader, pause: Duration) -> Next {
        loop {
            tokio::time::sleep(pause).await;
            match poll_fn(|cx| reader.poll_next(cx)).await {
                Next::Chunk(_) => {}
                end => return end,
            }
        }
    }

    /// Relays a body to a reader that pauses before each chunk; how it went, and how long it took.
    async fn relayed(
        name: &str,
        framing: Framing,
        chunks: Vec<(Duration, Bytes)>,
        pause: Duration,
    ) -> (Result<Ended, Failure>, Duration) {
        let provider = provider(name);
        let clock = Clock::Tokio;
        // The clock's origin may be that of a test beside this one, which began a moment later: it
        // is asked before time leaps, and looked at well after that.
        let _ = clock.now();
        tokio::time::advance(MINUTE).await;
        let (writer, reader) =
            Answer::begin(false, crate::store::CallId(ulid::Ulid::nil()), Clock::Tokio);
        let mut linger = Linger::new(Duration::ZERO);
        assert!(writer.sending(Clock::Tokio.now()));
        let began = clock.now();
        let relaying = async {
            let streaming = framing == Framing::Sse;
            let route = Route::ChatCompletions;
            let mut attempt =
                Attempt::new(&provider, route, streaming, &writer, &mut linger, clock);
            let answering = answering(&provider, framing, body(chunks));
            let result = attempt.relay(answering, |_, _| {}).await;
            let took = clock.now().since(began);
            // The reader goes on to the end of what there is.
            let account = Account {
                outcome: Outcome::Completed,
                error: None,
            };
            writer.finish(super::super::answer::Ending::Whole, account);
            (result, took)
        };
        let (relayed, end) = tokio::join!(relaying, read(reader, pause));
        assert!(matches!(end, Next::End), "{end:?}");
        relayed
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_starts_after_nine_minutes_is_not_cut_where_it_is_local() {
        let table = [
            ("ollama", true, 9 * MINUTE, None),
            ("ollama", false, 9 * MINUTE, None),
            ("llama-cpp", true, 9 * MINUTE, None),
            ("lm-studio", true, 9 * MINUTE, None),
            (
                "ollama",
                true,
                11 * MINUTE,
                Some("provider.ollama.timeout_secs"),
            ),
            ("openai", true, 119 * MINUTE / 60, None),
            (
                "openai",
                true,
                121 * MINUTE / 60,
                Some("limits.timeout_secs"),
            ),
            ("openai", false, 9 * MINUTE, None),
            (
                "openai",
                false,
                11 * MINUTE,
                Some("limits.unstreamed_timeout_secs"),
            ),
        ];
        for (name, streaming, after, cut) in table {
            let provider = provider(name);
            let (writer, _reader) =
                Answer::begin(false, crate::store::CallId(ulid::Ulid::nil()), Clock::Tokio);
            let mut linger = Linger::new(Duration::ZERO);
            let mut attempt = Attempt::new(
                &provider,
                Route::ChatCompletions,
                streaming,
                &writer,
                &mut linger,
                Clock::Tokio,
            );
            let head = attempt.watch(pin!(tokio::time::sleep(after))).await;
            assert_eq!(ended_by(head).as_deref(), cut, "{name} after {after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_of_an_hour_is_not_cut() {
        for (count, gap) in [(60, MINUTE), (7, 9 * MINUTE), (3600, MINUTE / 60)] {
            // The first byte of a stream has a limit of its own.
            let mut chunks = events(count, gap);
            chunks[0].0 = MINUTE;
            let (result, took) = relayed("openai", Framing::Sse, chunks, Duration::ZERO).await;
            assert!(took >= 60 * MINUTE, "{took:?}");
            let Ok(ended) = result else {
                panic!("cut: {:?}", ended_by(result));
            };
            assert_eq!(ended.account.outcome, Outcome::Completed);
            assert_eq!(ended.health, Health::Success);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ten_minutes_of_silence_in_a_stream_are_enough() {
        let mut chunks = events(3, MINUTE);
        chunks[2].0 = 10 * MINUTE + Duration::from_secs(1);
        let (result, took) = relayed("openai", Framing::Sse, chunks, Duration::ZERO).await;
        let event = matches!(result, Err(Failure::Error { event: true, .. }));
        assert!(event, "between two events there is room for one more");
        assert_eq!(ended_by(result).as_deref(), Some("limits.idle_secs"));
        let expected = 12 * MINUTE;
        assert!(
            (expected..expected + MINUTE / 60).contains(&took),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_whole_answer_has_its_time_as_a_whole() {
        let parts = |gap| {
            vec![
                (gap, Bytes::from_static(b"{")),
                (gap, Bytes::from_static(b"}")),
            ]
        };
        let (result, _) = relayed("openai", Framing::Json, parts(4 * MINUTE), MINUTE / 60).await;
        assert_eq!(ended_by(result), None);
        let (result, took) = relayed("openai", Framing::Json, parts(6 * MINUTE), MINUTE / 60).await;
        assert_eq!(
            ended_by(result).as_deref(),
            Some("limits.unstreamed_timeout_secs")
        );
        assert!((10 * MINUTE..11 * MINUTE).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn time_spent_waiting_for_a_slow_reader_is_not_the_upstreams() {
        for framing in [Framing::Sse, Framing::Json] {
            // Each waits until the reader has taken the one before.
            let chunk = Bytes::from(vec![b' '; 2 << 20]);
            let chunks = vec![(MINUTE, chunk); 6];
            let (result, took) = relayed("openai", framing, chunks, 30 * MINUTE).await;
            assert_eq!(ended_by(result), None, "{framing:?}");
            assert!(took >= 120 * MINUTE, "{took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upstream_that_is_silent_after_its_reader_was_slow_is_cut() {
        let chunk = Bytes::from(vec![b' '; 2 << 20]);
        for (framing, setting, left) in [
            (Framing::Sse, "limits.idle_secs", 10 * MINUTE),
            (Framing::Json, "limits.unstreamed_timeout_secs", 9 * MINUTE),
        ] {
            let chunks = vec![(MINUTE, chunk.clone()), (60 * MINUTE, chunk.clone())];
            let (result, took) = relayed("openai", framing, chunks, 30 * MINUTE).await;
            assert_eq!(ended_by(result).as_deref(), Some(setting));
            // The chunk, until the reader takes it, and what was left of the limit then.
            let expected = 30 * MINUTE + left;
            assert!(
                (expected..expected + MINUTE / 60).contains(&took),
                "{took:?}"
            );
        }
    }
}
