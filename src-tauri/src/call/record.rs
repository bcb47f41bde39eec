//! One row for every call, whatever becomes of it: the row's owner writes it when it is dropped.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::answer::Answer;
use super::budget::{Bill, Worth};
use super::error::{CallError, client_closed_request};
use super::live::LiveCall;
use super::usage::Used;
use crate::clock::Moment;
use crate::core::{Core, Phase};
use crate::events::Event;
use crate::policy::money::Nanodollars;
use crate::store::{CallEnd, CallId, CallStart, DedupLabel, Money, Outcome};

/// A call's row while the call goes on.
///
/// Who owns it owns the call's account: the request's handler at first, then the shared call for
/// the leader, and the response body for a follower. Dropped without [`Row::settle`], it says
/// that the client left, or that a fault ended the call if the thread is unwinding.
///
/// One whose usage has to be estimated is [closed](Row::close) and goes to the thread that does
/// that, which drops it: what depends on usage is reckoned when the row is dropped. Until then the
/// call's open row stays in the log with what is reserved for it, so that a process that dies in
/// between has counted it too.
pub struct Row {
    core: Arc<Core>,
    id: CallId,
    began: Moment,
    /// Taken when the row is closed.
    start: Option<CallStart>,
    /// The whole of it, once the row is closed. Boxed: a row is moved often, and this is as large as
    /// the rest of it.
    end: Option<Box<CallEnd>>,
    /// While it is shown among the calls under way.
    live: Option<Arc<LiveCall>>,
    status: Option<u16>,
    account: Option<(Outcome, Option<Arc<str>>)>,
    first_token: Option<Duration>,
    queued: Duration,
    sent: Option<Duration>,
    head: Option<Duration>,
    upstream_ended: Option<Duration>,
    used: Used,
    answered: Option<String>,
    /// What the upstream call that it causes costs; settled as soon as that is known.
    bill: Option<Bill>,
    money: Option<Money>,
    /// The answer is another call's.
    shares: Option<Worth>,
    /// When its client was gone, if that was before the row is written.
    ended: Option<Moment>,
}

impl Row {
    pub fn new(core: &Arc<Core>, began: Moment, start: CallStart) -> Row {
        core.open_calls.began();
        Row {
            core: core.clone(),
            id: start.id,
            began,
            start: Some(start),
            end: None,
            live: None,
            status: None,
            account: None,
            first_token: None,
            queued: Duration::ZERO,
            sent: None,
            head: None,
            upstream_ended: None,
            used: Used::Nothing,
            answered: None,
            bill: None,
            money: None,
            shares: None,
            ended: None,
        }
    }

    pub fn id(&self) -> CallId {
        self.id
    }

    /// What is known of the call so far; `None` once the row is closed.
    pub fn start(&self) -> Option<&CallStart> {
        self.start.as_ref()
    }

    pub fn tool(&self) -> &str {
        self.start.as_ref().map_or("", |start| &start.tool)
    }

    pub fn began(&self) -> Moment {
        self.began
    }

    /// Fills in what has been learned of the call.
    pub fn identify(&mut self, learned: impl FnOnce(&mut CallStart)) {
        if let Some(start) = &mut self.start {
            learned(start);
        }
    }

    /// Tells the record that the call is under way, so that it is seen if the process dies, and
    /// whoever watches. `answer`: what its client follows.
    pub fn open(&mut self, dedup: DedupLabel, answer: Option<Answer>) {
        let Some(start) = &mut self.start else {
            return;
        };
        start.dedup = dedup;
        self.shares = match (dedup, &answer) {
            (DedupLabel::Joined, Some(answer)) => Some(answer.worth().clone()),
            _ => None,
        };
        self.core.store.opened(start.clone());
        let live = Arc::new(LiveCall::new(start.clone(), self.began, answer));
        self.core.live.insert(live.clone());
        self.core.events.tell(|| Event::Opened(live.clone()));
        self.live = Some(live);
    }

    /// The answer was kept from another call.
    pub fn shares(&mut self, worth: Worth) {
        self.shares = Some(worth);
    }

    /// The call is to go upstream, and this is its bill.
    pub fn bill(&mut self, bill: Bill) {
        self.bill = Some(bill);
    }

    /// Its bill, until it is settled.
    pub fn bill_mut(&mut self) -> Option<&mut Bill> {
        self.bill.as_mut()
    }

    /// Tells the record what is held for the call, so that it is counted if the process dies.
    pub fn is_reserved(&mut self) {
        let reserved = self.bill.as_ref().and_then(Bill::reserved);
        if let (Some(start), Some(reserved)) = (&mut self.start, reserved) {
            start.reserved = Some(reserved);
            self.core.store.opened(start.clone());
        }
    }

    /// The call among those under way, once it is open.
    pub fn live(&self) -> Option<&Arc<LiveCall>> {
        self.live.as_ref()
    }

    /// A person has stopped it.
    pub fn is_stopped(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.is_stopped())
    }

    pub fn queued(&mut self, span: Duration) {
        self.queued = span;
    }

    /// The upstream request goes out at `now`.
    pub fn sent_upstream(&mut self, now: Moment) {
        self.sent = Some(now.since(self.began));
        // Until it is told.
        self.used = Used::Unknown;
    }

    /// The head of the upstream's answer came at `now`.
    pub fn upstream_head(&mut self, now: Moment) {
        self.head = Some(now.since(self.began));
    }

    /// The upstream's part in the call was over at `now`.
    pub fn upstream_ended(&mut self, now: Moment) {
        if self.sent.is_some() {
            self.upstream_ended = Some(now.since(self.began));
        }
    }

    pub fn status(&mut self, status: StatusCode) {
        self.status = Some(status.as_u16());
    }

    /// The answer's first content came at `now`.
    pub fn first_content(&mut self, now: Moment) {
        if self.first_token.is_none() {
            self.first_token = Some(now.since(self.began));
        }
    }

    /// Its client was gone at `now`: the call may go on for others.
    pub fn ended_at(&mut self, now: Moment) {
        self.ended = Some(now);
    }

    /// What became of the call; written when the row is dropped.
    pub fn settle(&mut self, outcome: Outcome, error: Option<Arc<str>>) {
        self.account = Some((outcome, error));
    }

    /// Traygate itself ended the call.
    pub fn fail(&mut self, error: &CallError) {
        self.status(error.status());
        self.settle(error.outcome(), Some(error.to_string().into()));
    }

    /// The program is at its end: rows are to be handed over at once.
    pub fn is_urgent(&self) -> bool {
        self.core.open_calls.phase() >= Phase::Cutting
    }

    /// What the upstream call that it caused has used.
    pub fn usage(&mut self, used: Used) {
        self.used = used;
        if used != Used::Unknown {
            self.pay();
        }
    }

    /// The model that answered, as it names itself.
    pub fn answered_by(&mut self, model: Option<String>) {
        self.answered = model;
    }

    /// What it cost and saved.
    fn money(&mut self) -> Money {
        self.pay();
        if let Some(worth) = &self.shares {
            let saved = worth.get().copied();
            return Money {
                cost: Some(Nanodollars::ZERO),
                saved: saved.flatten(),
                unpriced: saved == Some(None),
                ..Money::default()
            };
        }
        self.money.unwrap_or_else(|| Money {
            // What caused no upstream call cost nothing; of a tunnel nobody knows.
            cost: self.sent.is_none().then_some(Nanodollars::ZERO),
            ..Money::default()
        })
    }

    /// Settles the bill, unless that is done.
    fn pay(&mut self) {
        if let Some(bill) = self.bill.take() {
            self.money = Some(bill.settle(self.used, self.answered.as_deref()));
        }
    }

    /// The call is over; all that may still be found out is what it used.
    pub fn close(&mut self) {
        let Some(start) = self.start.take() else {
            return;
        };
        let (outcome, error) = self.account.take().unwrap_or_else(|| {
            if std::thread::panicking() {
                (Outcome::InternalError, None)
            } else {
                (Outcome::ClientLeft, None)
            }
        });
        // It did not leave: its connection was closed, or a person stopped it.
        let is_stopped = self.is_stopped();
        let was_cut = is_stopped || self.is_urgent();
        let outcome = match outcome {
            Outcome::ClientLeft if was_cut => Outcome::Stopped,
            outcome => outcome,
        };
        if is_stopped && outcome == Outcome::Stopped && self.status.is_none() {
            self.status(client_closed_request());
        }
        let ended = self.ended.unwrap_or_else(|| self.core.clock.now());
        self.end = Some(Box::new(CallEnd {
            start,
            status: self.status,
            outcome,
            first_token: self.first_token,
            queued: self.queued,
            duration: ended.since(self.began),
            sent: self.sent,
            head: self.head,
            upstream_ended: self.upstream_ended,
            usage: None,
            money: Money::default(),
            error: error.map(|error| error.as_ref().to_owned()),
        }));
        if self.live.is_some() {
            self.core.live.remove(self.id);
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.close();
        let Some(mut end) = self.end.take() else {
            return;
        };
        end.usage = self.used.known();
        end.money = self.money();
        self.core.metrics.finished(&end);
        let events = &self.core.events;
        events.tell(|| Event::Finished(Arc::new((*end).clone())));
        self.core.store.finished(*end);
        self.core.open_calls.ended();
    }
}
