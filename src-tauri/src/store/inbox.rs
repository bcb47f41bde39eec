//! Where calls hand over their rows: plain vectors under one lock, which the writer swaps out.
//!
//! No channel: its node is an allocation a message, and its wake-up a system call a message. Here
//! a hand-over is a push, and the writer is woken only if it sleeps.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{CallEnd, CallStart, StoreHealth};

/// Rows that may wait in memory; the design's number. Past it, ends are dropped and counted.
/// Starts are given up earlier: the end of a call says all that its start said.
pub(super) const MAX_WAITING: usize = 100_000;

/// Bytes of an error text that are kept.
const MAX_ERROR: usize = 2048;

/// Rows handed over, the writer's state, and the two ways to wait for it.
#[derive(Debug, Default)]
pub(super) struct Desk {
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
    /// Rows the writer has taken and not committed.
    held: Held,
    /// Hand-overs so far, and how many of them are settled.
    accepted: u64,
    settled: u64,
    dropped: u64,
    recording: bool,
    error: Option<String>,
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

    /// Empties it and gives back the memory of a jam.
    fn reset(&mut self) {
        const KEEP: usize = 4096;
        self.opened.clear();
        self.opened.shrink_to(KEEP);
        self.ended.clear();
        self.ended.shrink_to(KEEP);
    }
}

/// How the writer waits for its next turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// Until something is handed over, then this long for a batch to gather.
    ForRows(Duration),
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
        self.opened.is_empty() && self.ended.is_empty()
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

    pub(super) fn health(&self) -> StoreHealth {
        let inbox = self.inbox();
        let waiting = inbox.waiting();
        StoreHealth {
            recording: inbox.recording,
            pending_rows: waiting.opened + waiting.ended,
            dropped_rows: inbox.dropped,
            last_error: inbox.error.clone(),
            notice: inbox.notice.clone(),
        }
    }

    pub(super) fn flush(&self, limit: Duration) -> bool {
        let mut inbox = self.inbox();
        let target = inbox.accepted;
        inbox.hurry = true;
        inbox.asleep = false;
        self.work.notify_one();
        let (inbox, _) = self
            .settled
            .wait_timeout_while(inbox, limit, |inbox| {
                inbox.settled < target && !inbox.closed
            })
            .unwrap_or_else(PoisonError::into_inner);
        inbox.settled >= target
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
            Wait::ForRows(gather) => {
                inbox.asleep = inbox.is_empty();
                inbox = self
                    .work
                    .wait_while(inbox, |inbox| {
                        inbox.is_empty() && !inbox.hurry && !inbox.closing
                    })
                    .unwrap_or_else(PoisonError::into_inner);
                inbox.asleep = false;
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

    /// Moves what was handed over into `batch`; `spare` holds the two vectors that calls fill
    /// meanwhile.
    pub(super) fn take(&self, batch: &mut Batch, spare: &mut Batch) {
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
        spare.reset();
    }

    /// `batch` is in the database.
    pub(super) fn committed(&self, batch: &mut Batch) {
        batch.reset();
        let mut inbox = self.inbox();
        inbox.held = Held::default();
        inbox.settled = batch.upto;
        inbox.recording = true;
        inbox.error = None;
        drop(inbox);
        self.settled.notify_all();
    }

    /// `batch` waits on, less the starts that its ends made superfluous.
    pub(super) fn kept(&self, batch: &Batch) {
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

    pub(super) fn dropped(&self) -> u64 {
        self.inbox().dropped
    }

    /// The writer has ended; what waits is lost.
    pub(super) fn close(&self, error: Option<String>) {
        let mut inbox = self.inbox();
        let waiting = inbox.waiting();
        inbox.dropped += u64::try_from(waiting.ended).unwrap_or(u64::MAX);
        inbox.held = Held::default();
        inbox.opened = Vec::new();
        inbox.ended = Vec::new();
        inbox.recording = false;
        inbox.closed = true;
        if error.is_some() {
            inbox.error = error;
        }
        drop(inbox);
        self.settled.notify_all();
    }
}
