//! The shared answer: one writer appends what the upstream sends, any number of readers follow
//! from its first byte.
//!
//! One lock covers join, cancel and finish, so that a call being cancelled is never joined.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::time::Sleep;

use super::error::CallError;
use crate::clock::Moment;
use crate::store::Outcome;

/// The upstream is read at most this many bytes ahead of the fastest reader.
const READ_AHEAD: u64 = 1 << 20;
/// Past this many bytes nobody joins any more, and a reader this far behind is cut.
const KEPT_FOR_JOINERS: u64 = 16 << 20;

/// Status and headers of an upstream's answer, hop-by-hop headers already gone.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Bytes of the body, where the upstream said so and there is one.
    pub length: Option<u64>,
}

/// What became of a call: the words for its row, and for the rows of those who shared it.
#[derive(Clone, Debug)]
pub struct Account {
    pub outcome: Outcome,
    pub error: Option<Arc<str>>,
}

/// How an answer's body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// In order, as the upstream ended it.
    Whole,
    /// It broke off: readers are cut without a normal end.
    Broken,
}

/// How far the call has come, as far as leaving it is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing has gone upstream: the last one to leave ends it at once.
    Waiting,
    /// Upstream, no content yet: it lingers for a client's own retry.
    Sent,
    /// Content flows: the last one to leave ends it at once.
    Content,
}

/// One answer with one writer and any number of readers. A cheap handle.
#[derive(Clone)]
pub struct Answer(Arc<Shared>);

struct Shared {
    // std Mutex: held for a few moves, never across an await.
    state: Mutex<State>,
    /// Somebody received all of it. Shared with the kept answer, which a retry may have only
    /// while this is false.
    received: Arc<AtomicBool>,
}

struct State {
    stage: Stage,
    head: Option<Arc<Head>>,
    /// What Traygate answers instead, where no head came.
    failed: Option<CallError>,
    end: Option<(Ending, Account)>,
    /// What is still kept; `chunks[0]` is chunk number `dropped`.
    chunks: VecDeque<Bytes>,
    dropped: usize,
    kept_bytes: u64,
    total: u64,
    content_at: Option<Moment>,
    /// False for a call that is nobody else's, once the head has been dropped, and after the end
    /// or a cancellation.
    joinable: bool,
    readers: Vec<Option<ReaderState>>,
    live: usize,
    /// The leader's client hung up before the end.
    leader_left: bool,
    /// The writer waits for the fastest reader.
    full: bool,
    writer: Option<Waker>,
}

#[derive(Default)]
struct ReaderState {
    next: usize,
    read: u64,
    waker: Option<Waker>,
    is_leader: bool,
}

impl Answer {
    /// A new call: its writer and its leader's reader. `joinable`: others may follow.
    pub fn begin(joinable: bool) -> (Writer, Reader) {
        let answer = Answer(Arc::new(Shared {
            received: Arc::default(),
            state: Mutex::new(State {
                stage: Stage::Waiting,
                head: None,
                failed: None,
                end: None,
                chunks: VecDeque::new(),
                dropped: 0,
                kept_bytes: 0,
                total: 0,
                content_at: None,
                joinable,
                readers: vec![Some(ReaderState {
                    is_leader: true,
                    ..ReaderState::default()
                })],
                live: 1,
                leader_left: false,
                full: false,
                writer: None,
            }),
        }));
        let reader = Reader {
            answer: answer.clone(),
            place: 0,
        };
        (Writer(answer), reader)
    }

    /// A follower's reader, from the first byte; `None` if it is too late to join.
    pub fn join(&self) -> Option<Reader> {
        let mut state = self.lock();
        if !state.joinable {
            return None;
        }
        let reader = Some(ReaderState::default());
        let place = match state.readers.iter().position(Option::is_none) {
            Some(place) => {
                state.readers[place] = reader;
                place
            }
            None => {
                state.readers.push(reader);
                state.readers.len() - 1
            }
        };
        state.live += 1;
        drop(state);
        Some(Reader {
            answer: self.clone(),
            place,
        })
    }

    pub fn is(&self, other: &Answer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it was held leaves plain data behind; the guards settle the call.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The shared call's side of an answer: the only one that appends. Dropping it unfinished (a
/// panic, an aborted task) fails the call for all its readers.
pub struct Writer(Answer);

impl Writer {
    pub fn answer(&self) -> &Answer {
        &self.0
    }

    /// True once somebody has received all of it.
    pub fn received(&self) -> &Arc<AtomicBool> {
        &self.0.0.received
    }

    /// The request is about to go upstream: from here on leaving lingers. False if everybody has
    /// left and it must not be sent; nobody can join it then.
    #[must_use]
    pub fn sending(&self) -> bool {
        let mut state = self.0.lock();
        if state.live == 0 {
            state.joinable = false;
            return false;
        }
        state.stage = Stage::Sent;
        true
    }

    /// Puts the head down without waking anybody: the first chunk, the end or
    /// [`Writer::announce`] will.
    pub fn prepare_head(&self, head: Head) {
        self.0.lock().head = Some(Arc::new(head));
    }

    /// Tells every reader that the head has come.
    pub fn announce(&self) {
        self.0.lock().wake_readers();
    }

    /// Hands a chunk to every reader.
    pub fn append(&self, chunk: Bytes) {
        let mut state = self.0.lock();
        state.push(chunk);
        state.wake_readers();
    }

    /// Puts the last chunk down: [`Writer::finish`] hands it on together with the end.
    pub fn hold(&self, chunk: Bytes) {
        self.0.lock().push(chunk);
    }

    /// The answer's first content has come: leaving no longer lingers.
    pub fn content(&self, now: Moment) {
        let mut state = self.0.lock();
        state.stage = Stage::Content;
        state.content_at = Some(now);
    }

    /// No answer came at all: readers get `error` as the answer.
    pub fn fail(&self, error: CallError) {
        let mut state = self.0.lock();
        state.failed = Some(error);
        state.close();
    }

    /// The body's end. Readers that are behind still get what was sent before it.
    pub fn finish(&self, ending: Ending, account: Account) {
        let mut state = self.0.lock();
        state.end = Some((ending, account));
        state.close();
    }

    /// The head has come.
    pub fn has_head(&self) -> bool {
        self.0.lock().head.is_some()
    }

    /// Every byte the head promised has come, whether or not the end has been seen.
    pub fn has_all(&self) -> bool {
        let state = self.0.lock();
        state
            .head
            .as_ref()
            .is_some_and(|head| head.length == Some(state.total))
    }

    /// The leader's client hung up before the end.
    pub fn leader_left(&self) -> bool {
        self.0.lock().leader_left
    }

    /// Head and body in one piece, if they are all there and not larger than `limit` bytes.
    pub fn whole(&self, limit: usize) -> Option<(Arc<Head>, Bytes)> {
        let state = self.0.lock();
        let head = state.head.clone()?;
        let size = usize::try_from(state.kept_bytes)
            .ok()
            .filter(|size| *size <= limit)?;
        if state.dropped > 0 {
            return None;
        }
        // A chunk may be a slice of a larger read buffer, which a kept answer must not pin: copy.
        let mut body = Vec::with_capacity(size);
        state
            .chunks
            .iter()
            .for_each(|chunk| body.extend_from_slice(chunk));
        Some((head, Bytes::from(body)))
    }

    /// Ready when the call is to end because nobody listens any more.
    ///
    /// `linger` holds the timer of a call whose last listener left before its first content.
    pub fn poll_left(&self, cx: &mut Context<'_>, linger: &mut Linger) -> Poll<()> {
        let mut state = self.0.lock();
        if state.live > 0 {
            linger.timer = None;
            state.writer_waits(cx);
            return Poll::Pending;
        }
        if state.stage == Stage::Sent && !linger.span.is_zero() {
            state.writer_waits(cx);
            // Polled under the lock, so that nobody joins between its end and the cancellation;
            // a timer never calls back into this lock.
            let span = linger.span;
            let timer = linger
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep(span)));
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        state.joinable = false;
        Poll::Ready(())
    }

    /// Ready when the fastest reader is near enough for the upstream to be read on.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        state.full = state.ahead() >= READ_AHEAD;
        if state.full {
            state.writer_waits(cx);
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if state.end.is_some() || state.failed.is_some() {
            return;
        }
        if state.head.is_some() {
            let account = Account {
                outcome: Outcome::InternalError,
                error: None,
            };
            state.end = Some((Ending::Broken, account));
        } else {
            state.failed = Some(CallError::Internal);
        }
        state.close();
    }
}

/// How long a call outlives its last listener before its first content, and the timer for it.
pub struct Linger {
    span: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Linger {
    pub fn new(span: Duration) -> Linger {
        Linger { span, timer: None }
    }
}

impl State {
    fn writer_waits(&mut self, cx: &Context<'_>) {
        remember(&mut self.writer, cx);
    }

    /// How far the upstream is ahead of the fastest reader; nobody to wait for is no distance.
    fn ahead(&self) -> u64 {
        let fastest = self
            .readers
            .iter()
            .flatten()
            .map(|reader| reader.read)
            .max();
        fastest.map_or(0, |read| self.total - read)
    }

    /// Lets go of what no reader needs: once nobody can join, all that every reader has, and the
    /// oldest past the limit even if a slow reader has yet to read it.
    fn drop_read(&mut self) {
        if self.joinable {
            return;
        }
        let everybody_has = self
            .readers
            .iter()
            .flatten()
            .map(|reader| reader.next)
            .min();
        let everybody_has = everybody_has.unwrap_or(usize::MAX);
        while self.dropped < everybody_has || self.kept_bytes > KEPT_FOR_JOINERS {
            let Some(oldest) = self.chunks.pop_front() else {
                break;
            };
            self.kept_bytes -= oldest.len() as u64;
            self.dropped += 1;
        }
    }

    fn push(&mut self, chunk: Bytes) {
        self.total += chunk.len() as u64;
        self.kept_bytes += chunk.len() as u64;
        self.chunks.push_back(chunk);
        if self.kept_bytes > KEPT_FOR_JOINERS {
            self.joinable = false;
        }
        self.drop_read();
    }

    fn close(&mut self) {
        self.joinable = false;
        self.writer = None;
        self.wake_readers();
    }

    /// Waking only schedules: no task runs under this lock.
    fn wake_readers(&mut self) {
        for reader in self.readers.iter_mut().flatten() {
            if let Some(waker) = reader.waker.take() {
                waker.wake();
            }
        }
    }

    fn has_read_all(&self, reader: &ReaderState) -> bool {
        match &self.end {
            Some((ending, _)) => {
                *ending == Ending::Whole && reader.next == self.dropped + self.chunks.len()
            }
            // A client that has every promised byte hangs up without waiting for the end.
            None => self
                .head
                .as_ref()
                .is_some_and(|head| head.length == Some(reader.read)),
        }
    }
}

fn remember(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}

/// A listener's place. Dropping it is leaving.
pub struct Reader {
    answer: Answer,
    place: usize,
}

/// What a reader gets next.
#[derive(Debug)]
pub enum Next {
    Chunk(Bytes),
    End,
    /// The answer broke off, or this reader fell too far behind.
    Cut,
}

impl Reader {
    /// The answer's head.
    ///
    /// # Errors
    /// What Traygate answers instead, where none came.
    pub async fn head(&self) -> Result<Arc<Head>, CallError> {
        poll_fn(|cx| {
            let mut state = self.answer.lock();
            if let Some(head) = &state.head {
                return Poll::Ready(Ok(head.clone()));
            }
            if let Some(error) = &state.failed {
                return Poll::Ready(Err(error.clone()));
            }
            state.reader_waits(self.place, cx);
            Poll::Pending
        })
        .await
    }

    pub fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Next> {
        let mut state = self.answer.lock();
        let position = match &state.readers[self.place] {
            Some(reader) if reader.next >= state.dropped => reader.next - state.dropped,
            _ => return Poll::Ready(Next::Cut),
        };
        let Some(chunk) = state.chunks.get(position).cloned() else {
            return match &state.end {
                Some((Ending::Whole, _)) => Poll::Ready(Next::End),
                Some((Ending::Broken, _)) => Poll::Ready(Next::Cut),
                None => {
                    state.reader_waits(self.place, cx);
                    Poll::Pending
                }
            };
        };
        if let Some(reader) = &mut state.readers[self.place] {
            reader.next += 1;
            reader.read += chunk.len() as u64;
        }
        state.drop_read();
        if state.full && state.ahead() < READ_AHEAD {
            state.full = false;
            state.writer.take().into_iter().for_each(Waker::wake);
        }
        Poll::Ready(Next::Chunk(chunk))
    }

    /// True if nothing is left to read and the answer ended in order.
    pub fn is_at_end(&self) -> bool {
        let state = self.answer.lock();
        match &state.readers[self.place] {
            Some(reader) => state.end.is_some() && state.has_read_all(reader),
            None => false,
        }
    }

    /// What became of the call, once its end is known.
    pub fn account(&self) -> Option<Account> {
        self.answer
            .lock()
            .end
            .as_ref()
            .map(|(_, account)| account.clone())
    }

    /// When the answer's first content came.
    pub fn content_at(&self) -> Option<Moment> {
        self.answer.lock().content_at
    }

    /// True if this reader has been given all there is.
    pub fn has_read_all(&self) -> bool {
        let state = self.answer.lock();
        state.readers[self.place]
            .as_ref()
            .is_some_and(|reader| state.has_read_all(reader))
    }
}

impl State {
    fn reader_waits(&mut self, place: usize, cx: &Context<'_>) {
        if let Some(reader) = &mut self.readers[place] {
            remember(&mut reader.waker, cx);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.answer.lock();
        let Some(reader) = state.readers[self.place].take() else {
            return;
        };
        state.live -= 1;
        if state.has_read_all(&reader) {
            self.answer.0.received.store(true, Ordering::Release);
        } else if reader.is_leader && state.end.is_none() && state.failed.is_none() {
            state.leader_left = true;
        }
        state.drop_read();
        // It may wait for the fastest reader, or for the last one to leave.
        state.writer.take().into_iter().for_each(Waker::wake);
    }
}
