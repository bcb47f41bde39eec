//! Where calls hand over their rows: plain vectors under one lock, which the writer swaps out.
//!
//! No channel: its node is an allocation a message, and its wake-up a system call a message. Here
//! a hand-over is a push, and the writer is woken only if it sleeps.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::bodies::{self, Body};
use super::reprice::PriceOf;
use super::retention::Tended;
use super::{CallEnd, CallId, CallStart, StoreHealth};
use crate::settings::LogSettings;

/// Rows that may wait in memory; the design's number. Past it, ends are dropped and counted.
/// Starts are given up earlier: the end of a call says all that its start said.
pub(super) const MAX_WAITING: usize = 100_000;

/// Bytes of an error text that are kept.
const MAX_ERROR: usize = 2048;

/// Rows handed over, the writer's state, and the two ways to wait for it.
#[derive(Debug, Default)]
pub(super) struct Desk {
    /// What the writer is writing. Locked before `inbox`, so that a row on its way from there to
    /// here is never in neither.
    // RwLock: the writer reads it for as long as a commit takes, and others look into it meanwhile.
    batch: RwLock<Batch>,
    // std Mutex: held for a push or a swap, never across I/O or an await.
    inbox: Mutex<Inbox>,
    /// Wakes the writer.
    work: Condvar,
    /// Wakes those who wait for a commit or for the writer's end.
    settled: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    opened: Vec<CallStart>,
    ended: Vec<CallEnd>,
    bodies: Vec<Body>,
    /// Prices to reprice by, if that was asked since the writer last looked.
    reprice: Option<PriceOf>,
    /// Repricing was asked for and is not done.
    repricing: bool,
    /// How much is kept from now on, if that was said since the writer last looked.
    settings: Option<LogSettings>,
    /// Rows the writer has taken and not committed.
    held: Held,
    /// Bytes of bodies, those that the writer has taken included.
    body_bytes: usize,
    /// Hand-overs so far, and how many of them are settled.
    accepted: u64,
    settled: u64,
    dropped: u64,
    /// The same of bodies.
    bodies_accepted: u64,
    bodies_settled: u64,
    bodies_dropped: u64,
    tended: Tended,
    recording: bool,
    error: Option<String>,
    /// Why the file may be damaged, until it has been read through.
    doubt: Option<String>,
    notice: Option<String>,
    /// The writer sleeps until it is woken; else it looks by itself within a batch's time.
    asleep: bool,
    /// Somebody waits: do not let a batch gather.
    hurry: bool,
    closing: bool,
    closed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    opened: usize,
    ended: usize,
}

/// What the writer holds between taking and committing.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) opened: Vec<CallStart>,
    pub(super) ended: Vec<CallEnd>,
    /// The last hand-over in it.
    upto: u64,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.opened.is_empty() && self.ended.is_empty()
    }

    /// Leaves out starts of calls whose end is there too.
    fn drop_superfluous_starts(&mut self) {
        let ended = ids_of(&self.ended);
        self.opened.retain(|start| !ended.contains(&start.id));
    }

    /// Empties it and gives back the memory of a jam.
    fn reset(&mut self) {
        const KEEP: usize = 4096;
        self.opened.clear();
        self.opened.shrink_to(KEEP);
        self.ended.clear();
        self.ended.shrink_to(KEEP);
    }
}

fn ids_of(ends: &[CallEnd]) -> HashSet<CallId> {
    ends.iter().map(|end| end.start.id).collect()
}

/// How the writer waits for its next turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// Until something is handed over, then for `gather`, in which a batch gathers; or for `rest`,
    /// after which there is something else to do.
    ForRows { gather: Duration, rest: Duration },
    /// This long: there is something to try again.
    Retry(Duration),
}

/// Why the writer was woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// To commit.
    Commit,
    /// To commit a last time and end.
    Close,
}

impl Inbox {
    fn is_empty(&self) -> bool {
        self.opened.is_empty()
            && self.ended.is_empty()
            && self.bodies.is_empty()
            && self.reprice.is_none()
    }

    fn waiting(&self) -> Held {
        Held {
            opened: self.opened.len() + self.held.opened,
            ended: self.ended.len() + self.held.ended,
        }
    }

    /// Notes a hand-over; says whether the writer has to be woken.
    fn accept(&mut self) -> bool {
        self.accepted += 1;
        std::mem::take(&mut self.asleep)
    }
}

impl Desk {
    /// A panic elsewhere must not silence the record: nothing here leaves the inbox half-changed.
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self, start: CallStart) {
        let mut inbox = self.inbox();
        let waiting = inbox.waiting();
        if inbox.closed || waiting.opened + waiting.ended >= MAX_WAITING {
            return;
        }
        inbox.opened.push(start);
        let wake = inbox.accept();
        drop(inbox);
        if wake {
            self.work.notify_one();
        }
    }

    pub(super) fn finished(&self, mut end: CallEnd) {
        if let Some(error) = &mut end.error
            && error.len() > MAX_ERROR
        {
            error.truncate(error.floor_char_boundary(MAX_ERROR));
            error.shrink_to_fit();
        }
        let mut inbox = self.inbox();
        if inbox.closed || inbox.waiting().ended >= MAX_WAITING {
            inbox.dropped += 1;
            return;
        }
        inbox.ended.push(end);
        let wake = inbox.accept();
        drop(inbox);
        if wake {
            self.work.notify_one();
        }
    }

    pub(super) fn reprice(&self, price: PriceOf) {
        let mut inbox = self.inbox();
        if inbox.closed {
            return;
        }
        inbox.reprice = Some(price);
        inbox.repricing = true;
        let wake = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        if wake {
            self.work.notify_one();
        }
    }

    pub(super) fn body(&self, mut body: Body) {
        body.cut();
        let mut inbox = self.inbox();
        let bytes = inbox.body_bytes + body.len();
        if inbox.closed || bytes > bodies::MAX_WAITING {
            inbox.bodies_dropped += 1;
            return;
        }
        inbox.body_bytes = bytes;
        inbox.bodies.push(body);
        inbox.bodies_accepted += 1;
        let wake = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        if wake {
            self.work.notify_one();
        }
    }

    pub(super) fn configure(&self, settings: LogSettings) {
        let mut inbox = self.inbox();
        inbox.settings = Some(settings);
        inbox.hurry = true;
        inbox.asleep = false;
        drop(inbox);
        self.work.notify_one();
    }

    pub(super) fn health(&self) -> StoreHealth {
        let batch = self.batch();
        let inbox = self.inbox();
        // Not the sum of all hand-overs: a call may wait with its start and its end.
        let ended = ids_of(&inbox.ended);
        let starts = batch.opened.iter().chain(&inbox.opened);
        let open = starts.filter(|start| !ended.contains(&start.id)).count();
        StoreHealth {
            recording: inbox.recording,
            pending_rows: open + batch.ended.len() + inbox.ended.len(),
            dropped_rows: inbox.dropped,
            last_error: inbox.error.clone().or_else(|| inbox.doubt.clone()),
            notice: inbox.notice.clone(),
            dropped_bodies: inbox.bodies_dropped,
            bytes: inbox.tended.bytes,
            warning: inbox.tended.warning.clone(),
        }
    }

    /// The end of a call that waits to be written.
    pub(super) fn pending(&self, id: CallId) -> Option<CallEnd> {
        let batch = self.batch();
        let inbox = self.inbox();
        // Newest first: those are asked for.
        let mut ends = inbox.ended.iter().rev().chain(batch.ended.iter().rev());
        ends.find(|end| end.start.id == id).cloned()
    }

    /// Somebody met what looks like damage: the writer has the file read through.
    pub(super) fn suspect(&self, reason: &str) {
        let mut inbox = self.inbox();
        if inbox.closed || inbox.doubt.is_some() {
            return;
        }
        inbox.doubt = Some(format!(
            "the call log may be damaged ({reason}): it is being read through"
        ));
        drop(inbox);
        self.wake();
    }

    /// Has the writer look now.
    pub(super) fn wake(&self) {
        let mut inbox = self.inbox();
        inbox.hurry = true;
        inbox.asleep = false;
        drop(inbox);
        self.work.notify_one();
    }

    pub(super) fn flush(&self, limit: Duration) -> bool {
        let mut inbox = self.inbox();
        let (rows, bodies) = (inbox.accepted, inbox.bodies_accepted);
        let is_done = |inbox: &Inbox| {
            inbox.settled >= rows && inbox.bodies_settled >= bodies && !inbox.repricing
        };
        inbox.hurry = true;
        inbox.asleep = false;
        self.work.notify_one();
        let (inbox, _) = self
            .settled
            .wait_timeout_while(inbox, limit, |inbox| !is_done(inbox) && !inbox.closed)
            .unwrap_or_else(PoisonError::into_inner);
        is_done(&inbox)
    }

    pub(super) fn ask_to_close(&self) {
        self.inbox().closing = true;
        self.work.notify_one();
    }

    pub(super) fn wait_closed(&self, limit: Duration) {
        // The answer is the same whether the writer ended or hangs: the program goes on to exit.
        let _ = self
            .settled
            .wait_timeout_while(self.inbox(), limit, |inbox| !inbox.closed)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// The writer's side.
impl Desk {
    /// Sleeps until there is something to do.
    pub(super) fn wait(&self, wait: Wait) -> Turn {
        let mut inbox = self.inbox();
        let pause = match wait {
            Wait::Retry(pause) => pause,
            Wait::ForRows { gather, rest } => {
                inbox.asleep = inbox.is_empty();
                let (woken, rested) = self
                    .work
                    .wait_timeout_while(inbox, rest, |inbox| {
                        inbox.is_empty() && !inbox.hurry && !inbox.closing
                    })
                    .unwrap_or_else(PoisonError::into_inner);
                inbox = woken;
                inbox.asleep = false;
                if rested.timed_out() {
                    return Turn::Commit;
                }
                gather
            }
        };
        let (inbox, _) = self
            .work
            .wait_timeout_while(inbox, pause, |inbox| !inbox.hurry && !inbox.closing)
            .unwrap_or_else(PoisonError::into_inner);
        if inbox.closing {
            Turn::Close
        } else {
            Turn::Commit
        }
    }

    /// What is to be written.
    pub(super) fn batch(&self) -> RwLockReadGuard<'_, Batch> {
        self.batch.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what was handed over into the batch; `spare` holds the two vectors that calls fill
    /// meanwhile.
    pub(super) fn take(&self, spare: &mut Batch) {
        let mut batch = self.batch.write().unwrap_or_else(PoisonError::into_inner);
        let mut inbox = self.inbox();
        inbox.hurry = false;
        std::mem::swap(&mut inbox.opened, &mut spare.opened);
        std::mem::swap(&mut inbox.ended, &mut spare.ended);
        inbox.held.opened += spare.opened.len();
        inbox.held.ended += spare.ended.len();
        batch.upto = inbox.accepted;
        drop(inbox);
        batch.opened.append(&mut spare.opened);
        batch.ended.append(&mut spare.ended);
        batch.drop_superfluous_starts();
        spare.reset();
    }

    /// Moves the bodies that were handed over behind those in `bodies`.
    pub(super) fn take_bodies(&self, bodies: &mut Vec<Body>) {
        bodies.append(&mut self.inbox().bodies);
    }

    /// `bodies` are in the database, or never will be.
    pub(super) fn bodies_done(&self, bodies: &[Body], written: bool) {
        let count = u64::try_from(bodies.len()).unwrap_or(u64::MAX);
        let bytes = bodies.iter().map(Body::len).sum();
        let mut inbox = self.inbox();
        inbox.body_bytes = inbox.body_bytes.saturating_sub(bytes);
        inbox.bodies_settled += count;
        if !written {
            inbox.bodies_dropped += count;
        }
        drop(inbox);
        self.settled.notify_all();
    }

    /// Prices to reprice by, if that was asked since the last look.
    pub(super) fn take_reprice(&self) -> Option<PriceOf> {
        self.inbox().reprice.take()
    }

    /// Repricing is done, unless it was asked for again meanwhile.
    pub(super) fn repriced(&self) {
        let mut inbox = self.inbox();
        inbox.repricing = inbox.reprice.is_some();
        drop(inbox);
        self.settled.notify_all();
    }

    /// How much is kept from now on, if that was said since the last look.
    pub(super) fn settings(&self) -> Option<LogSettings> {
        self.inbox().settings.take()
    }

    pub(super) fn tended(&self, tended: Tended) {
        self.inbox().tended = tended;
    }

    /// The batch is in the database.
    pub(super) fn committed(&self) {
        let mut batch = self.batch.write().unwrap_or_else(PoisonError::into_inner);
        batch.reset();
        let mut inbox = self.inbox();
        inbox.held = Held::default();
        inbox.settled = batch.upto;
        inbox.recording = true;
        inbox.error = None;
        drop(inbox);
        self.settled.notify_all();
    }

    /// The batch waits on, less the starts that its ends made superfluous.
    pub(super) fn kept(&self) {
        let batch = self.batch();
        let mut inbox = self.inbox();
        inbox.held = Held {
            opened: batch.opened.len(),
            ended: batch.ended.len(),
        };
    }

    /// Says whether a database is open, and why not or why rows wait.
    pub(super) fn state(&self, recording: bool, error: Option<String>) {
        let mut inbox = self.inbox();
        inbox.recording = recording;
        inbox.error = error;
    }

    pub(super) fn notice(&self, notice: String) {
        self.inbox().notice = Some(notice);
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.inbox().doubt.is_some()
    }

    /// What was in doubt is sound, or no longer there; or `doubt` remains.
    pub(super) fn doubt(&self, doubt: Option<String>) {
        self.inbox().doubt = doubt;
    }

    pub(super) fn dropped(&self) -> u64 {
        self.inbox().dropped
    }

    /// The writer has ended; what waits is lost.
    pub(super) fn close(&self, error: Option<String>) {
        let mut batch = self.batch.write().unwrap_or_else(PoisonError::into_inner);
        batch.reset();
        let mut inbox = self.inbox();
        let waiting = inbox.waiting();
        inbox.dropped += u64::try_from(waiting.ended).unwrap_or(u64::MAX);
        inbox.held = Held::default();
        inbox.opened = Vec::new();
        inbox.ended = Vec::new();
        inbox.reprice = None;
        inbox.bodies_dropped += u64::try_from(inbox.bodies.len()).unwrap_or(u64::MAX);
        inbox.bodies = Vec::new();
        inbox.recording = false;
        inbox.doubt = None;
        inbox.closed = true;
        if error.is_some() {
            inbox.error = error;
        }
        drop(inbox);
        self.settled.notify_all();
    }
}
