//! One call, top to bottom.
//!
//! ```text
//! accept → identify → dedup → pool → breaker → budget → upstream → stream back → record
//! ```
//!
//! [`proxy`] takes a request as far as *dedup* and hands the client its answer; the leader's
//! shared call ([`make_the_call`], a task of its own) goes on from *pool* to *record*. Every step
//! hands on a guard that settles itself: [`record::Row`], [`breaker::Leave`], [`dedup::Flight`],
//! [`answer::Writer`], [`answer::Reader`].

pub mod accept;
pub mod answer;
mod bodies;
pub mod breaker;
pub mod budget;
pub mod credential;
pub mod dedup;
pub mod error;
mod headers;
pub mod identify;
pub mod live;
pub mod pool;
pub mod read_body;
pub mod record;
mod redact;
pub mod stream_back;
#[cfg(test)]
mod tests;
mod tool;
mod tunnel;
mod upstream;
pub mod usage;

use std::borrow::Cow;
use std::future::{Future, ready};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt as _;
use futures_util::future::Either;
use http::header::ORIGIN;
use http::request::Parts;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use tower::ServiceExt as _;
use tracing::{debug, error};

use self::accept::Connection;
use self::answer::{Answer, Ending, Head, Linger, Reader, Writer};
use self::bodies::BodyCopy;
use self::breaker::Leave;
use self::budget::{Bill, Ordered};
use self::dedup::{Flight, Role, Sharing};
use self::error::CallError;
use self::identify::{Call, UpstreamRequest};
use self::record::Row;
use self::redact::Secrets;
use self::stream_back::ClientBody;
use self::upstream::{Attempt, Came, Ended, Failure};
use self::usage::{Ask, Meter, Missing, Used};
use crate::clock::Clock;
use crate::core::{Core, World};
use crate::mode::Mode;
use crate::policy::routing::{Dialect, Route};
use crate::provider::Provider;
use crate::provider::state::Health;
use crate::store::{Billing, CallId, CallStart, DedupLabel, Outcome};

/// Answers one request: `own` what is Traygate's own. Never fails: what cannot go on gets an answer that says so.
///
/// A call's row exists when this returns, before the answer is first polled: a client may be gone
/// by then.
pub fn answer(
    core: Arc<Core>,
    own: &Router,
    connection: Connection,
    request: Request<Incoming>,
) -> impl Future<Output = Response<ClientBody>> + Send + use<> {
    let (parts, body) = request.into_parts();
    let world = core.world();
    let origin = parts.headers.get(ORIGIN).cloned();
    let asked = match accept::check_caller(&world, connection, &parts) {
        Err(error) => {
            debug!(%error, "request refused");
            let dialect = identify::dialect_of(parts.uri.path(), &parts.headers, None);
            let refused = refused(&error, dialect, new_row(&core, &parts));
            return Either::Left(Either::Left(ready(refused)));
        }
        Ok(()) if is_own(&parts) => {
            let asked = Request::from_parts(parts, axum::body::Body::new(body));
            return Either::Left(Either::Right(ask_own(own.clone(), asked)));
        }
        Ok(()) => accept::preflight(&parts)
            .map(|preflight| preflight.map(|()| ClientBody::Own(None)))
            .ok_or_else(|| new_row(&core, &parts)),
    };
    Either::Right(async move {
        let mut response = match asked {
            Ok(response) => response,
            Err(row) => proxied(&core, connection, world, parts, body, row).await,
        };
        accept::share_with_origin(response.headers_mut(), origin.as_ref());
        response
    })
}

/// What is under `/traygate/` is never a provider's, and a browser that opens the bare address is
/// sent there.
fn is_own(parts: &Parts) -> bool {
    let path = parts.uri.path();
    // A browser asks for the icon of any address it opens: that is no provider's business.
    names_traygate(path)
        || path == "/favicon.ico"
        || (path == "/" && parts.method == Method::GET && wants_page(parts))
}

/// Whether a path is meant for Traygate itself, mistyped ones too: doubled slashes, capitals, an
/// escaped slash, behind a token or a tool.
fn names_traygate(path: &str) -> bool {
    const NAME: &str = "traygate";
    let mut segments = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .peekable();
    if segments.next_if_eq(&"t").is_some() {
        segments.next();
    }
    segments.next_if(|segment| segment.starts_with('@'));
    let first = segments.next().unwrap_or_default();
    let (name, rest) = first.split_at_checked(NAME.len()).unwrap_or((first, ""));
    name.eq_ignore_ascii_case(NAME)
        && (rest.is_empty()
            || rest
                .get(..3)
                .is_some_and(|rest| rest.eq_ignore_ascii_case("%2f")))
}

fn wants_page(parts: &Parts) -> bool {
    let accept = parts.headers.get(http::header::ACCEPT);
    accept.is_some_and(|accept| {
        let accept = accept.as_bytes();
        accept.windows(9).any(|part| part == b"text/html")
    })
}

/// Traygate's own routes answer. What steers it no page of another origin may read.
async fn ask_own(own: Router, asked: Request<axum::body::Body>) -> Response<ClientBody> {
    let path = asked.uri().path();
    let is_open = path == "/traygate/health" || path == "/traygate/metrics";
    let origin = asked.headers().get(ORIGIN).filter(|_| is_open).cloned();
    let answered = own.oneshot(asked).await;
    let mut response = answered.unwrap_or_else(|never| match never {});
    accept::share_with_origin(response.headers_mut(), origin.as_ref());
    response.map(ClientBody::Page)
}

/// The row of a call of which no more is known than that it came.
fn new_row(core: &Arc<Core>, parts: &Parts) -> Row {
    let started = core.clock.wall();
    let start = CallStart {
        id: CallId::new(started),
        started,
        provider: "".into(),
        route: Cow::Borrowed(""),
        model: None,
        tool: tool::tool_name(&parts.headers),
        billing: Billing::Metered,
        streaming: false,
        dedup: DedupLabel::Off,
        key: None,
        reserved: None,
    };
    Row::new(core, core.clock.now(), start)
}

/// Traygate's own answer to call `id`.
fn own_answer(error: &CallError, dialect: Dialect, id: CallId) -> Response<ClientBody> {
    let response = error.response(dialect, &id.to_string());
    let mut response = response.map(|body| ClientBody::Own(Some(body)));
    let id = stream_back::call_header(id);
    response.headers_mut().insert(stream_back::CALL, id);
    response
}

/// Answers a call that ended before it was shared; its row says why.
fn refused(error: &CallError, dialect: Dialect, mut row: Row) -> Response<ClientBody> {
    row.fail(error);
    own_answer(error, dialect, row.id())
}

/// A call from its id to its answer, whatever happens in between.
async fn proxied(
    core: &Arc<Core>,
    connection: Connection,
    world: Arc<World>,
    parts: Parts,
    body: Incoming,
    row: Row,
) -> Response<ClientBody> {
    let id = row.id();
    let dialect = identify::dialect_of(parts.uri.path(), &parts.headers, None);
    let answered = AssertUnwindSafe(proxy(core, connection, world, parts, body, row));
    let mut response = answered.catch_unwind().await.unwrap_or_else(|_| {
        error!(call.id = %id, "a call ended in a panic");
        own_answer(&CallError::Internal, dialect, id)
    });
    response
        .headers_mut()
        .insert(stream_back::CALL, stream_back::call_header(id));
    response
}

/// The client's half of a call: accept, identify, dedup, stream back.
async fn proxy(
    core: &Arc<Core>,
    connection: Connection,
    world: Arc<World>,
    parts: Parts,
    body: Incoming,
    row: Row,
) -> Response<ClientBody> {
    // accept
    let may_call = accept::check_token(core, connection, &parts).await;
    let may_call = may_call
        .and_then(|()| accept::check_no_admin_token(core, &parts))
        .and_then(|()| accept::check_mode(core));
    if let Err(error) = may_call {
        let dialect = identify::dialect_of(parts.uri.path(), &parts.headers, None);
        return refused(&error, dialect, row);
    }
    // identify
    let place = match identify::locate(world, &parts) {
        Ok(place) => place,
        Err(error) => {
            let dialect = identify::dialect_of(parts.uri.path(), &parts.headers, None);
            return refused(&error, dialect, row);
        }
    };
    let dialect = place.dialect;
    if tunnel::is_upgrade(&parts) {
        return tunnel::answer(core, place, parts, row).await;
    }
    let mut call = match identify::identify(core, place, parts, body, row).await {
        Ok(call) => call,
        Err((error, row)) => return refused(&error, dialect, row),
    };
    if core.mode() == Mode::Bypass {
        call.sharing = None;
        call.ask = None;
        call.guarded = false;
    }
    // dedup
    call.provider.state.mark_used();
    let provider = call.provider.clone();
    let id = call.row.id();
    loop {
        let role = match &call.sharing {
            Some(sharing) => core.dedup.enter(sharing, id, core.clock.now()),
            None => {
                let (writer, reader) = Answer::begin(false, id, core.clock);
                Role::Leader(writer, reader, None)
            }
        };
        match role {
            Role::Kept(kept) => {
                call.row.open(DedupLabel::Cached, None);
                call.row.shares(kept.worth.clone());
                return stream_back::from_kept(kept, call.row, &provider, core.clock.now());
            }
            Role::Follower(reader) => {
                call.row
                    .open(DedupLabel::Joined, Some(reader.answer().clone()));
                match reader.head().await {
                    // Another tool's budget is spent: this call asks for itself.
                    Err(error) if error.concerns_another(call.row.tool()) => {}
                    head => return follow(head, reader, call.row, &provider, dialect),
                }
            }
            Role::Leader(writer, reader, flight) => {
                let label = match &call.sharing {
                    Some(_) => DedupLabel::Miss,
                    None => DedupLabel::Off,
                };
                call.row.open(label, Some(writer.answer().clone()));
                call.row.bill(bill_of(core, &call, &writer));
                // pool → breaker → budget → upstream → record
                // Boxed before it is wrapped and spawned: it is some kilobytes, and each would
                // copy it.
                let shared_call = Box::pin(make_the_call(core.clone(), call, writer, flight));
                tokio::spawn(core.open_calls.clone().unless_over(shared_call));
                return lead(reader, id, label, &provider, dialect).await;
            }
        }
    }
}

/// What the upstream call is to be paid by.
fn bill_of(core: &Arc<Core>, call: &Call, writer: &Writer) -> Bill {
    let start = call.row.start();
    let ordered = Ordered {
        provider: &call.provider,
        model: call.model.as_ref(),
        tool: start.map_or_else(|| Arc::from(""), |start| start.tool.clone()),
        billing: start.map_or(Billing::Metered, |start| start.billing),
        route: call.route,
        dialect: call.dialect,
        facts: &call.facts,
        weight: call.weight,
        worth: writer.answer().worth().clone(),
    };
    Bill::new(core, ordered)
}

/// The leader's answer, once its shared call has a head or an error.
async fn lead(
    reader: Reader,
    id: CallId,
    label: DedupLabel,
    provider: &Provider,
    dialect: Dialect,
) -> Response<ClientBody> {
    match reader.head().await {
        Ok(head) => stream_back::to_leader(&head, reader, provider, label),
        Err(error) => {
            let mut response = own_answer(&error, dialect, id);
            stream_back::mark(&mut response, provider, label);
            response
        }
    }
}

/// A follower's answer. Its row is its own.
fn follow(
    head: Result<Arc<Head>, CallError>,
    reader: Reader,
    row: Row,
    provider: &Provider,
    dialect: Dialect,
) -> Response<ClientBody> {
    match head {
        Ok(head) => stream_back::to_follower(&head, reader, row, provider),
        Err(error) => {
            let mut response = refused(&error, dialect, row);
            stream_back::mark(&mut response, provider, DedupLabel::Joined);
            response
        }
    }
}

/// The shared call: pool, breaker, budget, upstream, record. It owns permit, trial and the
/// leader's row with its bill, and goes on for its followers when the leader has left.
async fn make_the_call(core: Arc<Core>, call: Call, writer: Writer, flight: Option<Flight>) {
    let Call {
        row,
        world,
        provider,
        route,
        dialect,
        model,
        streaming,
        sharing,
        guarded,
        request,
        ask,
        facts: _,
        weight: _,
    } = call;
    let mut shared = SharedCall {
        meter: Meter::of(route, &provider),
        copy: BodyCopy::begin(world.settings.log.bodies, &request),
        row,
        writer,
        _flight: flight,
        // A retry can only rejoin what is shared.
        linger: Linger::new(match sharing {
            Some(_) => world.settings.dedup.linger,
            None => Duration::ZERO,
        }),
        secrets: Secrets::of(&provider, &request.headers, request.url.query()),
        sharing,
        provider,
        route,
        dialect,
        core,
    };
    // pool → breaker → budget
    let leave = match guarded {
        true => shared.leave(model).await.map(Some),
        false => {
            shared.row.bill_mut().into_iter().for_each(Bill::admit);
            Ok(None)
        }
    };
    let leave = match leave {
        Ok(leave) => leave,
        Err(failure) => return shared.fail(failure, None),
    };
    shared.row.is_reserved();
    // upstream → stream back
    let attempt = shared
        .attempt(request, ask, streaming, leave.as_ref())
        .await;
    shared.row.upstream_ended(shared.clock().now());
    match attempt {
        Ok(ended) => shared.finish(ended, leave),
        Err(failure) => shared.fail(failure, leave),
    }
    // record: the row is written when `shared` is dropped
}

/// A permit, a pass of the breakers and a reservation, in this order.
///
/// Where only what others have reserved stands in the way, the permit goes back meanwhile: those
/// behind may have budget left.
async fn leave_within_budget(
    core: &Arc<Core>,
    provider: &Arc<Provider>,
    model: Option<Arc<str>>,
    bill: Option<&mut Bill>,
) -> Result<Leave, CallError> {
    let Some(bill) = bill else {
        return Leave::wait(core, provider, model).await;
    };
    let began = core.clock.now();
    // One that is refused anyway need not wait for a permit first.
    bill.check()?;
    let leave = Leave::wait(core, provider, model.clone()).await?;
    let Some(waiting) = bill.reserve()? else {
        return Ok(leave);
    };
    drop(leave);
    bill.wait(waiting, provider.settings.limits.queue_wait)
        .await?;
    let mut leave = Leave::wait(core, provider, model).await?;
    leave.queued = core.clock.now().since(began);
    Ok(leave)
}

/// What the shared call owns besides its leave.
struct SharedCall {
    // Dropped in this order: the row is on its way before the readers hear of a fault.
    row: Row,
    writer: Writer,
    _flight: Option<Flight>,
    linger: Linger,
    /// Where bodies are kept.
    copy: Option<BodyCopy>,
    /// Where usage is read.
    meter: Option<Meter>,
    secrets: Secrets,
    sharing: Option<Sharing>,
    provider: Arc<Provider>,
    route: Route,
    dialect: Dialect,
    core: Arc<Core>,
}

impl SharedCall {
    fn clock(&self) -> Clock {
        self.core.clock
    }

    /// Leave to go upstream, and the money for it.
    async fn leave(&mut self, model: Option<Arc<str>>) -> Result<Leave, Failure> {
        let began = self.clock().now();
        let waiting = leave_within_budget(&self.core, &self.provider, model, self.row.bill_mut());
        let left = std::future::poll_fn(|cx| self.writer.poll_left(cx, &mut self.linger));
        let leave = tokio::select! {
            biased;
            leave = waiting => leave.map_err(Failure::from),
            () = left => Err(Failure::Left),
        };
        self.row.queued(match &leave {
            Ok(leave) => leave.queued,
            Err(_) => self.clock().now().since(began),
        });
        leave
    }

    async fn attempt(
        &mut self,
        request: UpstreamRequest,
        ask: Option<Ask>,
        streaming: bool,
        leave: Option<&Leave>,
    ) -> Result<Ended, Failure> {
        let now = self.clock().now();
        if !self.writer.sending(now) {
            return Err(Failure::Left);
        }
        self.row.sent_upstream(now);
        let mut attempt = Attempt::new(
            &self.provider,
            self.route,
            streaming,
            &self.writer,
            &mut self.linger,
            self.core.clock,
        )
        .copying_to(self.copy.as_mut())
        .metered_by(self.meter.as_mut(), &self.core.estimates);
        let answering = attempt.send(request, ask).await?;
        let (row, writer) = (&mut self.row, &self.writer);
        row.upstream_head(self.core.clock.now());
        if writer.leader_left().is_none() {
            row.status(answering.head.status);
        }
        attempt
            .relay(answering, |came, now| match came {
                // What timeouts measure, where the head is sent long before.
                Came::FirstByte => row.upstream_head(now),
                Came::Content => {
                    if writer.leader_left().is_none() {
                        row.first_content(now);
                    }
                    if let Some(leave) = leave {
                        leave.first_content(now);
                    }
                }
            })
            .await
    }

    /// The answer came to its end.
    fn finish(mut self, mut ended: Ended, leave: Option<Leave>) {
        let told = ended.account.error.take();
        ended.account.error = told.map(|told| self.secrets.redact(told));
        let now = self.clock().now();
        if ended.keepable
            && let Some(sharing) = &self.sharing
        {
            self.core.dedup.keep(sharing, &self.writer, now);
        }
        if let Some(leave) = leave {
            leave.settle(ended.health, ended.account.error.as_ref(), now);
        }
        self.keep_bodies(ended.account.outcome);
        self.settle(ended.account.outcome, ended.account.error.clone());
        let missing = self.usage();
        self.writer.finish(Ending::Whole, ended.account);
        self.record(missing);
    }

    /// No answer, or half of one.
    fn fail(mut self, failure: Failure, leave: Option<Leave>) {
        let now = self.clock().now();
        let (error, event, health) = match failure {
            Failure::Error { error, event } => (error, event, Health::Failure),
            // To wait for the client was not to wait for the upstream.
            Failure::Upload(error) => (error, false, Health::Abandoned),
            // Nobody is left to be told: the row and the breakers say so by themselves.
            Failure::Left => {
                if let Some(at) = self.writer.leader_left_at() {
                    self.row.ended_at(at);
                }
                self.keep_bodies(Outcome::ClientLeft);
                let missing = self.usage();
                return self.record(missing);
            }
        };
        let told: Arc<str> = error.to_string().into();
        if let Some(leave) = leave {
            leave.settle(health, Some(&told), now);
        }
        let outcome = error.outcome();
        self.keep_bodies(outcome);
        self.settle(outcome, Some(told.clone()));
        let missing = self.usage();
        if self.writer.has_head() {
            if event {
                self.writer
                    .append(error.stream_event(self.route, self.dialect));
            }
            let account = answer::Account {
                outcome,
                error: Some(told),
            };
            self.writer.finish(Ending::Broken, account);
        } else {
            if self.writer.leader_left().is_none() {
                self.row.status(error.status());
            }
            self.writer.fail(error);
        }
        self.record(missing);
    }

    /// Puts what the call used on its row, or says what that is to be estimated from.
    fn usage(&mut self) -> Option<Box<Missing>> {
        let used = match self.meter.take() {
            Some(mut meter) => {
                self.row.answered_by(meter.answered.take());
                meter.finish()
            }
            // It may be paid for, but not by the token.
            None if self.route.is_guarded() => return None,
            None => Ok(Used::Nothing),
        };
        match used {
            Ok(used) => self.row.usage(used),
            Err(missing) => return Some(missing),
        }
        None
    }

    /// The row goes into the record: at once, or with the estimate.
    fn record(self, missing: Option<Box<Missing>>) {
        if let Some(missing) = missing {
            self.core.estimates.complete(self.row, missing);
        }
    }

    /// Puts what was asked and answered on record, where a person wants that.
    fn keep_bodies(&mut self, outcome: Outcome) {
        let copy = self.copy.take().zip(self.row.start());
        let body = copy.and_then(|(copy, start)| copy.end(start, outcome, &self.secrets));
        if let Some(body) = body {
            self.core.store.body(body);
        }
    }

    /// The leader's row: what became of the call, unless its client had left before.
    fn settle(&mut self, outcome: Outcome, error: Option<Arc<str>>) {
        match self.writer.leader_left() {
            Some(left) => {
                self.row.settle(left.outcome, left.error);
                if let Some(at) = self.writer.leader_left_at() {
                    self.row.ended_at(at);
                }
            }
            None => self.row.settle(outcome, error),
        }
    }
}
