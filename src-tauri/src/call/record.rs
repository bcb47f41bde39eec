//! One row for every call, whatever becomes of it: the row's owner writes it when it is dropped.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::error::CallError;
use crate::clock::{Clock, Moment};
use crate::core::{Core, OpenCalls, Phase};
use crate::store::{CallEnd, CallId, CallStart, DedupLabel, Outcome, Store};

/// A call's row while the call goes on.
///
/// Who owns it owns the call's account: the request's handler at first, then the shared call for
/// the leader, and the response body for a follower. Dropped without [`Row::settle`], it says
/// that the client left, or that a fault ended the call if the thread is unwinding.
pub struct Row {
    store: Store,
    clock: Clock,
    open_calls: Arc<OpenCalls>,
    id: CallId,
    began: Moment,
    /// Taken when the row is written.
    start: Option<CallStart>,
    status: Option<u16>,
    account: Option<(Outcome, Option<Arc<str>>)>,
    first_token: Option<Duration>,
    queued: Duration,
    upstream_call: bool,
}

impl Row {
    pub fn new(core: &Core, began: Moment, start: CallStart) -> Row {
        core.open_calls.began();
        Row {
            store: core.store.clone(),
            clock: core.clock,
            open_calls: core.open_calls.clone(),
            id: start.id,
            began,
            start: Some(start),
            status: None,
            account: None,
            first_token: None,
            queued: Duration::ZERO,
            upstream_call: false,
        }
    }

    pub fn id(&self) -> CallId {
        self.id
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

    /// Tells the record that the call is under way, so that it is seen if the process dies.
    pub fn open(&mut self, dedup: DedupLabel) {
        if let Some(start) = &mut self.start {
            start.dedup = dedup;
            self.store.opened(start.clone());
        }
    }

    pub fn queued(&mut self, span: Duration) {
        self.queued = span;
    }

    pub fn sent_upstream(&mut self) {
        self.upstream_call = true;
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

    /// What became of the call; written when the row is dropped.
    pub fn settle(&mut self, outcome: Outcome, error: Option<Arc<str>>) {
        self.account = Some((outcome, error));
    }

    /// Traygate itself ended the call.
    pub fn fail(&mut self, error: &CallError) {
        self.status(error.status());
        self.settle(error.outcome(), Some(error.to_string().into()));
    }
}

impl Drop for Row {
    fn drop(&mut self) {
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
        // It did not leave: its connection was closed.
        let was_stopped =
            outcome == Outcome::ClientLeft && self.open_calls.phase() >= Phase::Cutting;
        let outcome = if was_stopped {
            Outcome::Stopped
        } else {
            outcome
        };
        self.store.finished(CallEnd {
            start,
            status: self.status,
            outcome,
            first_token: self.first_token,
            queued: self.queued,
            duration: self.clock.now().since(self.began),
            upstream_call: self.upstream_call,
            error: error.map(|error| error.as_ref().to_owned()),
        });
        self.open_calls.ended();
    }
}
