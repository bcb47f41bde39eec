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

use super::budget::Worth;
use super::error::CallError;
use super::record::Row;
use crate::clock::{Clock, Moment};
use crate::store::{CallId, Outcome};

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

/// A chunk up to this many bytes is copied out of the connection's read buffer ([`own_bytes`]). A
/// slice would pin all of it, 8 kB and more, for as long as the answer goes on: the HTTP library
/// then takes a fresh buffer for every event of a stream.
const COPIED_CHUNK: usize = 16 << 10;

/// The chunk in memory of its own, unless it is large.
pub fn own_bytes(chunk: Bytes) -> Bytes {
    if chunk.len() <= COPIED_CHUNK {
        Bytes::copy_from_slice(&chunk)
    } else {
        chunk
    }
}

/// How an answer's body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// In order, as the upstream ended it.
    Whole,
    /// It broke off: readers are cut without a normal end.
    Broken,
}

/// How far an answer has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// When the request went upstream.
    pub sent_at: Option<Moment>,
    /// The upstream's head has come.
    pub has_head: bool,
    /// When the first content came.
    pub content_at: Option<Moment>,
    /// Bytes of the body so far.
    pub bytes: u64,
    /// Chunks in which they came.
    pub chunks: usize,
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
    /// What it has cost.
    worth: Worth,
    clock: Clock,
}

struct State {
    stage: Stage,
    head: Option<Arc<Head>>,
    /// What Traygate answers instead, where no head came.
    failed: Option<CallError>,
    end: Option<(Ending, Account)>,
    /// The newest chunk is the last one and waits for the end.
    holding: bool,
    /// What is still kept; `chunks[0]` is chunk number `dropped`.
    chunks: VecDeque<Bytes>,
    dropped: usize,
    kept_bytes: u64,
    total: u64,
    sent_at: Option<Moment>,
    content_at: Option<Moment>,
    /// False for a call that is nobody else's, once the head has been dropped, and after the end
    /// or a cancellation.
    joinable: bool,
    readers: Vec<Option<ReaderState>>,
    live: usize,
    /// The last listener left after the request had gone upstream and before any content came:
    /// a client's own retry may still rejoin.
    lingers: bool,
    /// The answer has said all it had to say in so many chunks, though its end has not been seen.
    all_said: Option<usize>,
    /// The leader's client hung up, or was cut, before the end. How many chunks it had by then.
    leader_left: Option<usize>,
    /// The leader was cut because it read too slowly.
    leader_fell_behind: bool,
    /// A person stopped the leader's client.
    leader_stopped: bool,
    /// When the leader's client left, was cut or stopped.
    leader_left_at: Option<Moment>,
    /// The writer waits for the fastest reader.
    full: bool,
    writer: Option<Waker>,
    /// Rows of followers that have had all of it before its end was seen: what they saved is known
    /// with the end.
    rows: Vec<Row>,
}

struct ReaderState {
    /// The client call that reads here: a place is given to another once its reader has left.
    call: CallId,
    next: usize,
    read: u64,
    waker: Option<Waker>,
    is_leader: bool,
}

impl ReaderState {
    fn of(call: CallId, is_leader: bool) -> ReaderState {
        ReaderState {
            call,
            next: 0,
            read: 0,
            waker: None,
            is_leader,
        }
    }
}

impl Answer {
    /// A new call: its writer and the reader of its leader, `call`. `joinable`: others may follow.
    pub fn begin(joinable: bool, call: CallId, clock: Clock) -> (Writer, Reader) {
        let answer = Answer(Arc::new(Shared {
            received: Arc::default(),
            worth: Worth::default(),
            clock,
            state: Mutex::new(State {
                stage: Stage::Waiting,
                head: None,
                failed: None,
                end: None,
                holding: false,
                chunks: VecDeque::new(),
                dropped: 0,
                kept_bytes: 0,
                total: 0,
                sent_at: None,
                content_at: None,
                joinable,
                readers: vec![Some(ReaderState::of(call, true))],
                live: 1,
                lingers: false,
                all_said: None,
                leader_left: None,
                leader_fell_behind: false,
                leader_stopped: false,
                leader_left_at: None,
                full: false,
                writer: None,
                rows: Vec::new(),
            }),
        }));
        let reader = Reader {
            answer: answer.clone(),
            call,
            place: 0,
        };
        (Writer(answer), reader)
    }

    /// The reader of a follower, `call`, from the first byte; `None` if it is too late to join.
    pub fn join(&self, call: CallId) -> Option<Reader> {
        let mut state = self.lock();
        if !state.joinable {
            return None;
        }
        let reader = Some(ReaderState::of(call, false));
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
            call,
            place,
        })
    }

    /// A person stops `call`: it is cut, and the upstream call ends at once if nobody else
    /// listens. False if it has left already.
    pub fn stop(&self, call: CallId) -> bool {
        let mut state = self.lock();
        let is_it = |reader: &Option<ReaderState>| {
            reader.as_ref().is_some_and(|reader| reader.call == call)
        };
        let Some(place) = state.readers.iter().position(is_it) else {
            return false;
        };
        let Some(reader) = state.readers[place].take() else {
            return false;
        };
        state.live -= 1;
        // No retry is to find it again.
        state.lingers = false;
        if reader.is_leader && state.end.is_none() && state.failed.is_none() {
            state.leader_stopped = true;
            state.leader_left_at = Some(self.0.clock.now());
        }
        reader.waker.into_iter().for_each(Waker::wake);
        state.drop_read();
        state.writer.take().into_iter().for_each(Waker::wake);
        true
    }

    /// Whether the client of `call` still listens.
    pub fn is_heard_by(&self, call: CallId) -> bool {
        let state = self.lock();
        let mut readers = state.readers.iter().flatten();
        readers.any(|reader| reader.call == call)
    }

    /// How far it has come.
    pub fn progress(&self) -> Progress {
        let state = self.lock();
        Progress {
            sent_at: state.sent_at,
            has_head: state.head.is_some(),
            content_at: state.content_at,
            bytes: state.total,
            chunks: state.count(),
        }
    }

    /// What it has cost, once that is known.
    pub fn worth(&self) -> &Worth {
        &self.0.worth
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
    pub fn sending(&self, now: Moment) -> bool {
        let mut state = self.0.lock();
        if state.live == 0 {
            state.joinable = false;
            return false;
        }
        state.stage = Stage::Sent;
        state.sent_at = Some(now);
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

    /// Hands a chunk, in [memory of its own](own_bytes), to every reader.
    pub fn append(&self, chunk: Bytes) {
        let mut state = self.0.lock();
        state.push(chunk);
        state.wake_readers();
    }

    /// Puts the last chunk down: [`Writer::finish`] hands it on together with the end, so that
    /// whoever has the whole answer finds everything else done.
    pub fn hold(&self, chunk: Bytes) {
        let mut state = self.0.lock();
        state.push(chunk);
        state.holding = true;
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
        let rows = state.close();
        drop(state);
        drop(rows);
    }

    /// The body's end. Readers that are behind still get what was sent before it.
    pub fn finish(&self, ending: Ending, account: Account) {
        let mut state = self.0.lock();
        state.end = Some((ending, account));
        let rows = state.close();
        drop(state);
        drop(rows);
    }

    /// The head has come.
    pub fn has_head(&self) -> bool {
        self.0.lock().head.is_some()
    }

    /// The answer's own last event has come: clients may hang up without waiting for the end of
    /// the connection.
    pub fn all_said(&self) {
        let mut state = self.0.lock();
        state.all_said = Some(state.count());
    }

    /// All there is to read has come, whether or not the end has been seen.
    pub fn has_all(&self) -> bool {
        let state = self.0.lock();
        state.all_said.is_some() || state.promised(state.total)
    }

    /// What became of the leader's client, where that is not what became of the call: it hung up
    /// or was cut before the end.
    pub fn leader_left(&self) -> Option<Account> {
        let state = self.0.lock();
        if state.leader_stopped {
            return Some(stopped());
        }
        let leader = state.readers.iter().flatten().find(|it| it.is_leader);
        if leader.map_or(state.leader_fell_behind, |leader| state.fell_behind(leader)) {
            return Some(fell_behind());
        }
        let chunks = state.leader_left?;
        if state.all_said.is_some_and(|all| chunks >= all) {
            None
        } else {
            Some(Account {
                outcome: Outcome::ClientLeft,
                error: None,
            })
        }
    }

    /// When the leader's client left, if it did before the end.
    pub fn leader_left_at(&self) -> Option<Moment> {
        self.0.lock().leader_left_at
    }

    /// Head and body in one piece, if they are all there and not larger than `limit` bytes.
    pub fn whole(&self, limit: usize) -> Option<(Arc<Head>, Bytes)> {
        let (head, size, chunks) = {
            let state = self.0.lock();
            let size = usize::try_from(state.kept_bytes).ok()?;
            if state.dropped > 0 || size > limit {
                return None;
            }
            (state.head.clone()?, size, state.chunks.clone())
        };
        if let [only] = chunks.as_slices().0
            && only.len() == size
            && size <= COPIED_CHUNK
        {
            return Some((head, only.clone()));
        }
        // A larger chunk may be a slice of a still larger read buffer, which a kept answer must
        // not pin: copy, with no reader held up meanwhile.
        let mut body = Vec::with_capacity(size);
        for chunk in &chunks {
            body.extend_from_slice(chunk);
        }
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
        // Content that comes to nobody changes nothing: the retry is given all of it.
        if state.lingers && !linger.span.is_zero() {
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
        let rows = state.close();
        drop(state);
        drop(rows);
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

    /// Gives the rows back that waited for the end. They are dropped where the lock is not held.
    #[must_use]
    fn close(&mut self) -> Vec<Row> {
        self.joinable = false;
        self.holding = false;
        self.writer = None;
        self.wake_readers();
        std::mem::take(&mut self.rows)
    }

    /// Waking only schedules: no task runs under this lock.
    fn wake_readers(&mut self) {
        for reader in self.readers.iter_mut().flatten() {
            if let Some(waker) = reader.waker.take() {
                waker.wake();
            }
        }
    }

    /// Chunks that have come.
    fn count(&self) -> usize {
        self.dropped + self.chunks.len()
    }

    /// The head promised just so many bytes.
    fn promised(&self, bytes: u64) -> bool {
        let head = self.head.as_ref();
        head.is_some_and(|head| head.length == Some(bytes))
    }

    fn has_read_all(&self, reader: &ReaderState) -> bool {
        match &self.end {
            Some((ending, _)) => *ending == Ending::Whole && reader.next == self.count(),
            // A client that has every promised byte, or the last event, hangs up without waiting
            // for the end.
            None => {
                self.promised(reader.read) || self.all_said.is_some_and(|all| reader.next >= all)
            }
        }
    }

    /// What it would read next is gone.
    fn fell_behind(&self, reader: &ReaderState) -> bool {
        reader.next < self.dropped
    }
}

fn fell_behind() -> Account {
    let limit = KEPT_FOR_JOINERS >> 20;
    Account {
        outcome: Outcome::BrokenStream,
        error: Some(
            format!(
                "the client read so slowly that it fell {limit} MB behind the answer, and was cut"
            )
            .into(),
        ),
    }
}

/// A person ended a client's answer.
fn stopped() -> Account {
    Account {
        outcome: Outcome::Stopped,
        error: None,
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
    call: CallId,
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
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// The answer's head.
    ///
    /// # Errors
    /// What Traygate answers instead, where none came.
    pub async fn head(&self) -> Result<Arc<Head>, CallError> {
        poll_fn(|cx| {
            let mut state = self.answer.lock();
            if state.reader(self).is_none() {
                return Poll::Ready(Err(CallError::Stopped));
            }
            if let Some(head) = &state.head {
                return Poll::Ready(Ok(head.clone()));
            }
            if let Some(error) = &state.failed {
                return Poll::Ready(Err(error.clone()));
            }
            state.reader_waits(self, cx);
            Poll::Pending
        })
        .await
    }

    pub fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Next> {
        let mut state = self.answer.lock();
        let position = match state.reader_of(self) {
            Some(reader) if reader.next >= state.dropped => reader.next - state.dropped,
            _ => return Poll::Ready(Next::Cut),
        };
        let is_held = state.holding && position + 1 == state.chunks.len();
        let chunk = state.chunks.get(position).filter(|_| !is_held).cloned();
        let Some(chunk) = chunk else {
            return match &state.end {
                Some((Ending::Whole, _)) => Poll::Ready(Next::End),
                Some((Ending::Broken, _)) => Poll::Ready(Next::Cut),
                None => {
                    state.reader_waits(self, cx);
                    Poll::Pending
                }
            };
        };
        if let Some(reader) = state.reader(self) {
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
        match state.reader_of(self) {
            Some(reader) => state.end.is_some() && state.has_read_all(reader),
            None => false,
        }
    }

    /// What became of the call as far as this reader followed it; `None` if it goes on, or this
    /// reader leaves before it has been given all there is.
    pub fn account(&self) -> Option<Account> {
        let state = self.answer.lock();
        let Some(reader) = state.reader_of(self) else {
            return Some(stopped());
        };
        if state.fell_behind(reader) {
            return Some(fell_behind());
        }
        match &state.end {
            Some((_, account)) if reader.next == state.count() => Some(account.clone()),
            None if state.has_read_all(reader) => {
                let status = state.head.as_ref()?.status;
                Some(if status.as_u16() < 400 {
                    Account {
                        outcome: Outcome::Completed,
                        error: None,
                    }
                } else {
                    Account {
                        outcome: Outcome::UpstreamError,
                        error: Some(format!("status {}", status.as_u16()).into()),
                    }
                })
            }
            _ => None,
        }
    }

    /// Puts a follower's row into the record: at once, or with the end if it has all there is and
    /// only that has not been seen.
    pub fn record(&self, mut row: Row) {
        if self.account().is_none() {
            return;
        }
        row.close();
        let mut state = self.answer.lock();
        if state.end.is_none() && state.failed.is_none() {
            state.rows.push(row);
        } else {
            drop(state);
            drop(row);
        }
    }

    /// When the answer's first content came.
    pub fn content_at(&self) -> Option<Moment> {
        self.answer.lock().content_at
    }
}

impl State {
    /// The place of `of`, unless it has been stopped.
    fn reader(&mut self, of: &Reader) -> Option<&mut ReaderState> {
        let place = self.readers[of.place].as_mut();
        place.filter(|reader| reader.call == of.call)
    }

    /// The same, to look at.
    fn reader_of(&self, of: &Reader) -> Option<&ReaderState> {
        let place = self.readers[of.place].as_ref();
        place.filter(|reader| reader.call == of.call)
    }

    fn reader_waits(&mut self, of: &Reader, cx: &Context<'_>) {
        if let Some(reader) = self.reader(of) {
            remember(&mut reader.waker, cx);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.answer.lock();
        if state.reader(self).is_none() {
            return;
        }
        let Some(reader) = state.readers[self.place].take() else {
            return;
        };
        state.live -= 1;
        state.lingers = state.stage == Stage::Sent;
        if reader.is_leader {
            state.leader_fell_behind = state.fell_behind(&reader);
        }
        if state.has_read_all(&reader) {
            self.answer.0.received.store(true, Ordering::Release);
        } else if reader.is_leader && state.end.is_none() && state.failed.is_none() {
            state.leader_left = Some(reader.next);
            state.leader_left_at = Some(self.answer.0.clock.now());
        }
        state.drop_read();
        // It may wait for the fastest reader, or for the last one to leave.
        state.writer.take().into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::clock::Clock;

    const LINGER: Duration = Duration::from_secs(2);
    const MB: usize = 1 << 20;

    fn head(length: Option<u64>) -> Head {
        Head {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            length,
        }
    }

    fn account(outcome: Outcome) -> Account {
        Account {
            outcome,
            error: None,
        }
    }

    fn id() -> CallId {
        CallId::new(Clock::Tokio.wall())
    }

    /// An answer whose request has gone upstream.
    fn sent() -> (Writer, Reader) {
        let (writer, reader) = Answer::begin(true, id(), Clock::Tokio);
        assert!(writer.sending(Clock::Tokio.now()));
        (writer, reader)
    }

    async fn left(writer: &Writer, linger: &mut Linger) {
        poll_fn(|cx| writer.poll_left(cx, linger)).await;
    }

    /// How long the writer goes on from now.
    async fn lasts(writer: &Writer) -> Duration {
        let began = Clock::Tokio.now();
        left(writer, &mut Linger::new(LINGER)).await;
        Clock::Tokio.now().since(began)
    }

    fn poll_next(reader: &Reader) -> Poll<Next> {
        reader.poll_next(&mut Context::from_waker(Waker::noop()))
    }

    fn has_room(writer: &Writer) -> bool {
        poll_fn(|cx| writer.poll_room(cx)).now_or_never().is_some()
    }

    /// Reads what is there.
    fn drain(reader: &Reader) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Poll::Ready(Next::Chunk(chunk)) = poll_next(reader) {
            bytes.extend_from_slice(&chunk);
        }
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn lingers_only_between_sending_and_content() {
        // In the queue.
        let (writer, reader) = Answer::begin(true, id(), Clock::Tokio);
        drop(reader);
        assert_eq!(lasts(&writer).await, Duration::ZERO);
        assert!(
            !writer.sending(Clock::Tokio.now()),
            "nobody is left to send it for"
        );

        // Sent, and no content yet.
        let (writer, reader) = sent();
        drop(reader);
        assert_eq!(lasts(&writer).await.as_secs(), 2);
        assert!(
            writer.answer().join(id()).is_none(),
            "it is being cancelled"
        );

        // Content flows.
        let (writer, reader) = sent();
        writer.content(Clock::Tokio.now());
        drop(reader);
        assert_eq!(lasts(&writer).await, Duration::ZERO);

        // Content that comes while it lingers changes nothing.
        let (writer, reader) = sent();
        drop(reader);
        writer.append(Bytes::from_static(b"x"));
        writer.content(Clock::Tokio.now());
        assert_eq!(lasts(&writer).await.as_secs(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_rejoin_stops_the_time_and_the_next_leaving_begins_it_anew() {
        let (writer, reader) = sent();
        let answer = writer.answer().clone();
        let mut linger = Linger::new(LINGER);
        drop(reader);
        let span = Duration::from_millis(1900);
        assert!(
            tokio::time::timeout(span, left(&writer, &mut linger))
                .await
                .is_err()
        );
        let again = answer.join(id()).expect("it lingers");
        let long = Duration::from_secs(60);
        assert!(
            tokio::time::timeout(long, left(&writer, &mut linger))
                .await
                .is_err()
        );
        drop(again);
        assert!(
            tokio::time::timeout(span, left(&writer, &mut linger))
                .await
                .is_err()
        );
        left(&writer, &mut linger).await;
        assert!(answer.join(id()).is_none());
    }

    /// The last to leave decides, not the first.
    #[tokio::test(start_paused = true)]
    async fn who_stays_until_content_ends_the_lingering() {
        let (writer, reader) = sent();
        let follower = writer.answer().join(id()).expect("joined");
        drop(reader);
        writer.content(Clock::Tokio.now());
        drop(follower);
        assert_eq!(lasts(&writer).await, Duration::ZERO);
    }

    #[test]
    fn whoever_joins_begins_at_the_first_byte() {
        let (writer, reader) = sent();
        writer.prepare_head(head(None));
        for n in 0..3 {
            let chunk = Bytes::from(n.to_string());
            writer.append(chunk);
            drain(&reader);
        }
        let late = writer.answer().join(id()).expect("joined");
        assert_eq!(drain(&late), b"012");
        writer.append(Bytes::from_static(b"3"));
        writer.finish(Ending::Whole, account(Outcome::Completed));
        for reader in [&reader, &late] {
            assert_eq!(drain(reader), b"3");
            assert!(matches!(poll_next(reader), Poll::Ready(Next::End)));
        }
        assert!(writer.answer().join(id()).is_none());
    }

    #[test]
    fn the_upstream_is_at_most_1_mb_ahead_of_the_fastest_reader() {
        struct Woken(AtomicBool);
        impl Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let (writer, fast) = sent();
        let slow = writer.answer().join(id()).expect("joined");
        writer.append(Bytes::from(vec![0; MB - 1]));
        assert!(has_room(&writer));
        writer.append(Bytes::from_static(b"x"));
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Waker::from(woken.clone());
        assert!(
            writer
                .poll_room(&mut Context::from_waker(&waker))
                .is_pending()
        );
        assert!(!woken.0.load(Ordering::SeqCst));
        assert!(matches!(poll_next(&fast), Poll::Ready(Next::Chunk(_))));
        assert!(woken.0.load(Ordering::SeqCst), "the writer is told");
        assert!(has_room(&writer), "whatever the slow one does");
        // The slow one is the fastest once the other has left.
        drop(fast);
        assert!(!has_room(&writer));
        drop(slow);
        assert!(has_room(&writer), "nobody to wait for");
    }

    #[test]
    fn past_16_mb_nobody_joins_and_who_is_behind_is_cut() {
        let (writer, fast) = sent();
        let slow = writer.answer().join(id()).expect("joined");
        let left_early = writer.answer().join(id()).expect("joined");
        drop(left_early);
        for _ in 0..16 {
            writer.append(Bytes::from(vec![0; MB]));
            drain(&fast);
        }
        assert!(writer.answer().join(id()).is_some(), "16 MB are fine");
        writer.append(Bytes::from_static(b"x"));
        assert!(writer.answer().join(id()).is_none());
        assert!(matches!(poll_next(&slow), Poll::Ready(Next::Cut)));
        assert_eq!(drain(&fast), b"x");
        // What nobody needs is let go of.
        drop(slow);
        assert_eq!(writer.answer().lock().kept_bytes, 0);
        assert!(writer.whole(usize::MAX).is_none(), "its head is gone");
    }

    #[test]
    fn who_was_cut_for_being_slow_is_on_record_so() {
        for ended in [false, true] {
            let (writer, slow) = sent();
            let fast = writer.answer().join(id()).expect("joined");
            let slow_follower = writer.answer().join(id()).expect("joined");
            writer.prepare_head(head(None));
            for _ in 0..17 {
                writer.append(Bytes::from(vec![0; MB]));
                drain(&fast);
            }
            if ended {
                writer.finish(Ending::Whole, account(Outcome::Completed));
            }
            let told = slow_follower.account().expect("known");
            assert_eq!(told.outcome, Outcome::BrokenStream);
            // Before it has been told, and after.
            let told = || writer.leader_left().expect("known").outcome;
            assert_eq!(told(), Outcome::BrokenStream);
            drop(slow);
            assert_eq!(told(), Outcome::BrokenStream);
        }
    }

    #[test]
    fn a_call_that_is_nobody_elses_keeps_nothing() {
        let (writer, reader) = Answer::begin(false, id(), Clock::Tokio);
        assert!(writer.answer().join(id()).is_none());
        assert!(writer.sending(Clock::Tokio.now()));
        writer.append(Bytes::from(vec![0; MB]));
        drain(&reader);
        assert_eq!(writer.answer().lock().kept_bytes, 0);
    }

    #[test]
    fn the_last_chunk_and_the_end_come_together() {
        let (writer, reader) = sent();
        writer.prepare_head(head(Some(2)));
        writer.append(Bytes::from_static(b"1"));
        writer.hold(Bytes::from_static(b"2"));
        assert_eq!(drain(&reader), b"1");
        assert!(poll_next(&reader).is_pending());
        let (_, whole) = writer.whole(2).expect("all there");
        assert_eq!(whole, "12");
        assert!(writer.whole(1).is_none(), "larger than it may be");
        writer.finish(Ending::Whole, account(Outcome::Completed));
        assert_eq!(drain(&reader), b"2");
        assert!(matches!(poll_next(&reader), Poll::Ready(Next::End)));
    }

    /// `received` is what keeps an answer from being given to a retry.
    #[test]
    fn received_is_who_had_all_of_it() {
        let received = |act: &dyn Fn(&Writer, &Reader)| {
            let (writer, reader) = sent();
            writer.prepare_head(head(Some(3)));
            writer.append(Bytes::from_static(b"ab"));
            act(&writer, &reader);
            drop(reader);
            writer.received().load(Ordering::SeqCst)
        };
        let end = |writer: &Writer, ending| {
            writer.append(Bytes::from_static(b"c"));
            writer.finish(ending, account(Outcome::Completed));
        };
        assert!(!received(&|_, reader| drop(drain(reader))));
        assert!(!received(&|writer, _| end(writer, Ending::Whole)));
        assert!(received(&|writer, reader| {
            end(writer, Ending::Whole);
            drain(reader);
        }));
        assert!(!received(&|writer, reader| {
            end(writer, Ending::Broken);
            drain(reader);
        }));
        // All promised bytes, and not yet the end.
        assert!(received(&|writer, reader| {
            writer.append(Bytes::from_static(b"c"));
            drain(reader);
        }));
        // The last event, and not yet the end.
        assert!(received(&|writer, reader| {
            writer.all_said();
            drain(reader);
        }));
        assert!(!received(&|writer, _| writer.all_said()));
    }

    #[test]
    fn what_a_reader_knows_of_the_calls_end() {
        let told = |status: u16, act: &dyn Fn(&Writer, &Reader)| {
            let (writer, reader) = sent();
            let mut head = head(Some(1));
            head.status = StatusCode::from_u16(status).expect("a status");
            writer.prepare_head(head);
            act(&writer, &reader);
            reader.account().map(|account| account.outcome)
        };
        let chunk = Bytes::from_static(b"x");
        let read = |writer: &Writer, reader: &Reader| {
            writer.append(chunk.clone());
            drain(reader);
        };
        assert_eq!(told(200, &|_, _| {}), None);
        assert_eq!(told(200, &|writer, _| writer.append(chunk.clone())), None);
        // It hangs up with every promised byte, before the end has been seen.
        assert_eq!(told(200, &read), Some(Outcome::Completed));
        assert_eq!(told(500, &read), Some(Outcome::UpstreamError));
        let ended = |ending, outcome| {
            move |writer: &Writer, reader: &Reader| {
                read(writer, reader);
                writer.finish(ending, account(outcome));
            }
        };
        for outcome in [Outcome::Completed, Outcome::UpstreamError] {
            assert_eq!(told(200, &ended(Ending::Whole, outcome)), Some(outcome));
        }
        let broken = ended(Ending::Broken, Outcome::BrokenStream);
        assert_eq!(told(200, &broken), Some(Outcome::BrokenStream));
        // One that did not read so far does not know it: its client left.
        let unread = |writer: &Writer, _: &Reader| {
            writer.append(chunk.clone());
            writer.finish(Ending::Whole, account(Outcome::Completed));
        };
        assert_eq!(told(200, &unread), None);
    }

    #[test]
    fn a_leader_who_has_it_all_has_not_left() {
        let left = |act: &dyn Fn(&Writer, &Reader)| {
            let (writer, reader) = sent();
            writer.prepare_head(head(None));
            act(&writer, &reader);
            drop(reader);
            let left = writer.leader_left();
            // It is looked up again when the last event turns out to have been in what it had.
            writer.all_said();
            (left.is_some(), writer.leader_left().is_some())
        };
        let chunk = Bytes::from_static(b"x");
        assert_eq!(
            left(&|writer, _| writer.append(chunk.clone())),
            (true, true)
        );
        assert_eq!(
            left(&|writer, reader| {
                writer.append(chunk.clone());
                drain(reader);
            }),
            (true, false)
        );
        assert_eq!(
            left(&|writer, _| writer.finish(Ending::Whole, account(Outcome::Completed))),
            (false, false)
        );
        assert_eq!(
            left(&|writer, _| writer.fail(CallError::Internal)),
            (false, false)
        );
    }

    #[tokio::test]
    async fn a_writer_that_is_dropped_fails_the_call_for_all() {
        let (writer, reader) = sent();
        let follower = writer.answer().join(id()).expect("joined");
        drop(writer);
        for reader in [&reader, &follower] {
            assert_eq!(reader.head().await.unwrap_err(), CallError::Internal);
        }
        let (writer, reader) = sent();
        let answer = writer.answer().clone();
        writer.prepare_head(head(None));
        writer.hold(Bytes::from_static(b"x"));
        drop(writer);
        assert_eq!(drain(&reader), b"x");
        assert!(matches!(poll_next(&reader), Poll::Ready(Next::Cut)));
        assert!(answer.join(id()).is_none());
    }

    /// Threads join while the writer asks whether everybody has left: whoever got in is never
    /// cancelled, and nobody gets in after the end.
    #[test]
    fn a_call_that_is_being_cancelled_is_never_joined() {
        for _ in 0..1000 {
            let (writer, reader) = sent();
            let answer = writer.answer().clone();
            let over = Arc::new(AtomicBool::new(false));
            let joining = std::thread::spawn({
                let over = over.clone();
                move || {
                    while let Some(reader) = answer.join(id()) {
                        std::hint::spin_loop();
                        assert!(!over.load(Ordering::SeqCst), "cancelled under a listener");
                        drop(reader);
                    }
                }
            });
            drop(reader);
            let mut linger = Linger::new(Duration::ZERO);
            let mut cx = Context::from_waker(Waker::noop());
            while writer.poll_left(&mut cx, &mut linger).is_pending() {
                std::thread::yield_now();
            }
            over.store(true, Ordering::SeqCst);
            joining.join().expect("no wrong answer");
        }
    }
}
