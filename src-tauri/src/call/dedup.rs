//! Identical calls in flight become one upstream call, and a finished answer may serve the next.
//!
//! The first caller of a key leads; the others follow the same [`Answer`] from its first byte.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use super::answer::{Answer, Reader, Writer};
use super::budget::Worth;
use super::headers::is_of_one_exchange;
use crate::clock::{Clock, Moment};
use crate::policy::fingerprint::RequestKey;
use crate::settings::DedupMode;
use crate::store::CallId;

/// Answers over this many bytes are not kept.
const KEPT_ANSWER: usize = 8 << 20;
/// The cache makes room now and then, after hundreds of answers; after one over this many bytes,
/// at once.
const LARGE_ANSWER: usize = 64 << 10;
/// Answers for which the index has room from the start: growing means to hash all of them anew,
/// in some call's time.
const KEPT_AT_FIRST: usize = 16 << 10;
/// The cache takes no time to live of nothing.
const SHORTEST_STAY: Duration = Duration::from_secs(1);
/// What a kept answer costs beside its body and headers: map entry and bookkeeping. Bytes, about.
const KEPT_OVERHEAD: usize = 512;
/// What a header costs beside its value. Bytes, about.
const KEPT_HEADER: usize = 160;

/// How a call may share its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    pub key: RequestKey,
    pub mode: DedupMode,
    /// A kept answer may be given: the caller did not ask for a fresh one.
    pub take_kept: bool,
    /// How long a finished answer serves.
    pub window: Duration,
}

/// What a call turned out to be.
pub enum Role {
    /// Makes the upstream call; with its place in the index, unless it is nobody else's.
    Leader(Writer, Reader, Option<Flight>),
    /// Reads an answer that is under way.
    Follower(Reader),
    /// Gets an answer that is finished.
    Kept(Arc<KeptAnswer>),
}

/// A finished answer.
pub struct KeptAnswer {
    pub status: StatusCode,
    /// Those that others may have.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub body: Bytes,
    pub kept_at: Moment,
    window: Duration,
    /// Somebody received it whole: no retry needs it any more.
    pub received: Arc<AtomicBool>,
    /// What whoever is given it saves.
    pub worth: Worth,
}

/// A copy of what others may have, with bytes of its own: the values of an answer's head are slices
/// of the connection's read buffer, which a kept answer must not pin.
fn own_headers(headers: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let shared = || {
        let all = headers.iter();
        all.filter(|(name, _)| !is_of_one_exchange(name.as_str()))
    };
    let mut values = BytesMut::with_capacity(shared().map(|(_, value)| value.len()).sum());
    shared().for_each(|(_, value)| values.extend_from_slice(value.as_bytes()));
    let mut values = values.freeze();
    let own = |(name, value): (&HeaderName, &HeaderValue)| {
        let own = HeaderValue::from_maybe_shared(values.split_to(value.len()));
        Some((name.clone(), own.ok()?))
    };
    shared().filter_map(own).collect()
}

impl KeptAnswer {
    /// Bytes, about.
    fn weight(&self) -> usize {
        let headers = self.headers.iter();
        let headers = headers.map(|(_, value)| value.len() + KEPT_HEADER);
        self.body.len() + headers.sum::<usize>() + KEPT_OVERHEAD
    }

    /// The caller's own mode decides: two tools may send the same call with different ones.
    fn serves(&self, sharing: &Sharing, now: Moment) -> bool {
        let in_window = now.since(self.kept_at) < self.window.min(sharing.window);
        match sharing.mode {
            DedupMode::Full => in_window,
            DedupMode::Retry => in_window && !self.received.load(Ordering::Acquire),
            DedupMode::InFlight | DedupMode::Off => false,
        }
    }
}

/// The calls in flight and the answers kept.
pub struct Dedup {
    clock: Clock,
    // std Mutex: held for a look-up, never across an await. It is only the index; whether a call
    // can be joined is decided under that call's own lock.
    flights: Mutex<HashMap<RequestKey, Answer, BuildHasherDefault<KeyHasher>>>,
    // std RwLock: held for a look-up, never across an await. Written when the settings change.
    kept: RwLock<KeptAnswers>,
    /// How often everything kept was forgotten, so that what is moved does not come back. Held
    /// while one answer is moved.
    cleared: Mutex<u64>,
    counts: Counts,
}

type KeptAnswers = Cache<RequestKey, Arc<KeptAnswer>, BuildHasherDefault<KeyHasher>>;

/// Calls by what they turned out to be, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Went upstream, and could be shared.
    pub led: u64,
    /// Shared the answer of a call in flight.
    pub joined: u64,
    /// Got a kept answer.
    pub cached: u64,
}

/// Kept answers, about: what is being put in or taken out may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub answers: u64,
    pub bytes: u64,
}

#[derive(Default)]
struct Counts {
    led: AtomicU64,
    joined: AtomicU64,
    cached: AtomicU64,
}

impl Dedup {
    /// `max_bytes`: of all kept answers together; `window`: how long one serves at most.
    pub fn new(max_bytes: u64, window: Duration, clock: Clock) -> Dedup {
        Dedup {
            clock,
            flights: Mutex::default(),
            kept: RwLock::new(kept_answers(max_bytes, window)),
            cleared: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// Leads, joins or takes a kept answer, in one step.
    pub fn enter(self: &Arc<Self>, sharing: &Sharing, call: CallId, now: Moment) -> Role {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        let flight = flights.get(&sharing.key);
        if let Some(reader) = flight.and_then(|flight| flight.join(call)) {
            self.counts.joined.fetch_add(1, Ordering::Relaxed);
            return Role::Follower(reader);
        }
        // Under the same lock: a call ends by keeping its answer first and leaving the index
        // last, so whoever finds no flight here finds what it left.
        if sharing.take_kept
            && let Some(kept) = self.kept().get(&sharing.key)
            && kept.serves(sharing, now)
        {
            self.counts.cached.fetch_add(1, Ordering::Relaxed);
            return Role::Kept(kept);
        }
        let (writer, reader) = Answer::begin(true, call, self.clock);
        let flight = Flight {
            dedup: self.clone(),
            key: sharing.key,
            answer: writer.answer().clone(),
        };
        flights.insert(sharing.key, flight.answer.clone());
        self.counts.led.fetch_add(1, Ordering::Relaxed);
        Role::Leader(writer, reader, Some(flight))
    }

    /// Keeps a finished answer. To be called before its flight ends.
    pub fn keep(&self, sharing: &Sharing, writer: &Writer, now: Moment) {
        let keeps = matches!(sharing.mode, DedupMode::Full | DedupMode::Retry);
        if !keeps || sharing.window.is_zero() {
            return;
        }
        let Some((head, body)) = writer.whole(KEPT_ANSWER) else {
            return;
        };
        let is_large = body.len() > LARGE_ANSWER;
        let kept = self.kept();
        kept.insert(
            sharing.key,
            Arc::new(KeptAnswer {
                status: head.status,
                headers: own_headers(&head.headers),
                body,
                kept_at: now,
                window: sharing.window,
                received: writer.received().clone(),
                worth: writer.answer().worth().clone(),
            }),
        );
        if is_large {
            kept.run_pending_tasks();
        }
    }

    /// Takes an ended call out of the index, unless another has its place already.
    fn leave(&self, key: &RequestKey, answer: &Answer) {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if flights.get(key).is_some_and(|current| current.is(answer)) {
            flights.remove(key);
        }
    }

    /// How many calls are under way that others may join.
    pub fn in_flight(&self) -> usize {
        let flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        flights.len()
    }

    pub fn counts(&self) -> Counted {
        Counted {
            led: self.counts.led.load(Ordering::Relaxed),
            joined: self.counts.joined.load(Ordering::Relaxed),
            cached: self.counts.cached.load(Ordering::Relaxed),
        }
    }

    /// What is kept at this moment, about.
    pub fn holdings(&self) -> Kept {
        let kept = self.kept();
        kept.run_pending_tasks();
        Kept {
            answers: kept.entry_count(),
            bytes: kept.weighted_size(),
        }
    }

    /// Forgets every kept answer; calls in flight go on.
    pub fn clear(&self) {
        let mut cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        *cleared += 1;
        self.kept().invalidate_all();
    }

    fn kept(&self) -> KeptAnswers {
        self.kept
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Takes another size and window. What is kept goes on to serve, as long as it was to serve
    /// when it was kept; of what no longer fits the newest stay. Takes about a microsecond for
    /// each kept answer; who asks for one that has not been moved yet makes a call of its own.
    pub fn resize(&self, max_bytes: u64, window: Duration) {
        // A cache cannot change its size: a new one takes over at once, so that nothing is put
        // into the old one any more, and then gets what the old one had.
        let before = *self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        let new = kept_answers(max_bytes, window);
        let old = {
            let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *kept, new.clone())
        };
        let mut answers: Vec<_> = old.iter().collect();
        answers.sort_unstable_by_key(|(_, kept)| kept.kept_at);
        for (key, kept) in answers {
            let cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
            if *cleared != before {
                return;
            }
            // Whatever is there already is newer.
            new.entry(*key).or_insert(kept);
        }
        new.run_pending_tasks();
    }
}

fn kept_answers(max_bytes: u64, window: Duration) -> KeptAnswers {
    Cache::builder()
        .initial_capacity(KEPT_AT_FIRST)
        .max_capacity(max_bytes)
        .weigher(|_, kept: &Arc<KeptAnswer>| u32::try_from(kept.weight()).unwrap_or(u32::MAX))
        // Frees an answer whose window is over; whether it still serves is decided by the clock
        // that counts sleep.
        .time_to_live(window.max(SHORTEST_STAY))
        // The newest is the likeliest to be asked for again; the default policy turns it away
        // while the others are no less popular.
        .eviction_policy(EvictionPolicy::lru())
        .build_with_hasher(BuildHasherDefault::default())
}

/// A leader's place in the index of flights; dropping it gives the place up.
pub struct Flight {
    dedup: Arc<Dedup>,
    key: RequestKey,
    answer: Answer,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.dedup.leave(&self.key, &self.answer);
    }
}

/// A request key is a hash already: its first eight bytes do.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut first = [0; 8];
        let taken = bytes.len().min(8);
        first[..taken].copy_from_slice(&bytes[..taken]);
        self.0 ^= u64::from_ne_bytes(first);
    }

    // Arrays hash their length before their bytes; it is always the same.
    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, StatusCode};

    use super::super::answer::{Account, Ending};
    use super::*;
    use crate::call::answer::Head;
    use crate::store::Outcome;

    const ID: CallId = CallId(ulid::Ulid::nil());
    const HOUR: Duration = Duration::from_secs(3600);

    fn sharing(n: u8, mode: DedupMode) -> Sharing {
        Sharing {
            key: RequestKey([n; 32]),
            mode,
            take_kept: true,
            window: HOUR,
        }
    }

    fn at(secs: u64) -> Moment {
        Moment::at(Duration::from_secs(secs))
    }

    fn dedup(max_bytes: u64) -> Arc<Dedup> {
        Arc::new(Dedup::new(
            max_bytes,
            Duration::from_secs(300),
            Clock::Tokio,
        ))
    }

    /// Leads a call and keeps its answer; the answer has been received if `received`.
    fn lead(dedup: &Arc<Dedup>, sharing: &Sharing, body: &[u8], now: Moment, received: bool) {
        let Role::Leader(writer, reader, flight) = dedup.enter(sharing, ID, now) else {
            panic!("somebody leads it already");
        };
        writer.prepare_head(Head {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            length: None,
        });
        writer.hold(Bytes::copy_from_slice(body));
        dedup.keep(sharing, &writer, now);
        let account = Account {
            outcome: Outcome::Completed,
            error: None,
        };
        writer.finish(Ending::Whole, account);
        drop(flight);
        if received {
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(reader.poll_next(&mut cx).is_ready());
        }
    }

    fn kept(role: Role) -> Option<Bytes> {
        match role {
            Role::Kept(kept) => Some(kept.body.clone()),
            Role::Leader(..) | Role::Follower(_) => None,
        }
    }

    #[test]
    fn who_is_given_a_kept_answer() {
        use DedupMode::{Full, InFlight, Retry};
        // The leader's mode, whether somebody received it, the caller's mode, seconds later.
        let table = [
            (Full, true, Full, 0, true),
            (Full, true, Full, 3599, true),
            (Full, true, Full, 3600, false),
            (Full, true, Retry, 0, false),
            (Full, false, Retry, 0, true),
            (Full, false, InFlight, 0, false),
            (Retry, true, Retry, 0, false),
            (Retry, false, Retry, 3599, true),
            (Retry, false, Retry, 3600, false),
            (Retry, true, Full, 0, true),
            (InFlight, false, Full, 0, false),
        ];
        for (led, received, asked, later, given) in table {
            let dedup = dedup(1 << 20);
            lead(&dedup, &sharing(1, led), b"x", at(0), received);
            let role = dedup.enter(&sharing(1, asked), ID, at(later));
            assert_eq!(
                kept(role).is_some(),
                given,
                "{led:?} {received} {asked:?} {later}"
            );
        }
    }

    #[test]
    fn a_caller_may_want_a_fresh_one_and_the_shorter_window_counts() {
        let dedup = dedup(1 << 20);
        lead(&dedup, &sharing(1, DedupMode::Full), b"x", at(0), true);
        let fresh = Sharing {
            take_kept: false,
            ..sharing(1, DedupMode::Full)
        };
        assert!(kept(dedup.enter(&fresh, ID, at(0))).is_none());
        let brief = Sharing {
            window: Duration::from_secs(5),
            ..sharing(1, DedupMode::Full)
        };
        assert!(kept(dedup.enter(&brief, ID, at(4))).is_some());
        assert!(kept(dedup.enter(&brief, ID, at(5))).is_none());
        dedup.clear();
        assert!(kept(dedup.enter(&sharing(1, DedupMode::Full), ID, at(0))).is_none());
    }

    /// The cache's own timer runs on the real clock: the first answer's short window must not end
    /// the second's.
    #[test]
    fn a_newer_answer_begins_a_window_of_its_own() {
        let dedup = dedup(1 << 20);
        let brief = Sharing {
            window: Duration::from_millis(20),
            ..sharing(1, DedupMode::Full)
        };
        lead(&dedup, &brief, b"old", at(0), true);
        let fresh = Sharing {
            take_kept: false,
            ..sharing(1, DedupMode::Full)
        };
        lead(&dedup, &fresh, b"new", at(0), true);
        std::thread::sleep(Duration::from_millis(60));
        let role = dedup.enter(&sharing(1, DedupMode::Full), ID, at(0));
        assert_eq!(kept(role).as_deref(), Some(&b"new"[..]));
    }

    #[test]
    fn the_newest_stay_within_the_bytes() {
        let dedup = dedup(1 << 20);
        let body = vec![0; 300_000];
        for n in 0..20 {
            lead(&dedup, &sharing(n, DedupMode::Full), &body, at(0), true);
        }
        for n in 0..20 {
            let role = dedup.enter(&sharing(n, DedupMode::Full), ID, at(0));
            assert_eq!(kept(role).is_some(), n >= 17, "{n}");
        }
    }

    #[test]
    fn another_size_keeps_the_newest_and_what_was_cleared_stays_away() {
        let dedup = dedup(1 << 20);
        let body = vec![0; 300_000];
        for n in 0..3 {
            lead(
                &dedup,
                &sharing(n, DedupMode::Full),
                &body,
                at(n.into()),
                true,
            );
        }
        let is_kept = |n| kept(dedup.enter(&sharing(n, DedupMode::Full), ID, at(3))).is_some();
        dedup.resize(8 << 20, Duration::from_secs(60));
        assert_eq!([0, 1, 2].map(is_kept), [true; 3], "a larger one keeps all");
        dedup.resize(700_000, Duration::from_secs(60));
        assert_eq!([0, 1, 2].map(is_kept), [false, true, true]);
        dedup.clear();
        dedup.resize(8 << 20, Duration::from_secs(60));
        assert_eq!([1, 2].map(is_kept), [false; 2]);
    }

    #[test]
    fn a_cancelled_call_is_out_of_the_way_and_takes_nobody_with_it() {
        let dedup = dedup(1 << 20);
        let sharing = sharing(1, DedupMode::Full);
        let Role::Leader(cancelled, _reader, stale) = dedup.enter(&sharing, ID, at(0)) else {
            panic!("nobody else is there");
        };
        drop(cancelled);
        // Its place in the index is still taken; nobody joins it there.
        let Role::Leader(_writer, _reader, _flight) = dedup.enter(&sharing, ID, at(0)) else {
            panic!("a cancelled call was joined");
        };
        drop(stale);
        assert!(matches!(
            dedup.enter(&sharing, ID, at(0)),
            Role::Follower(_)
        ));
        assert_eq!(dedup.in_flight(), 1);
    }

    #[test]
    fn a_leader_that_never_comes_to_its_call_gives_its_place_up() {
        let dedup = dedup(1 << 20);
        let led = dedup.enter(&sharing(1, DedupMode::Full), ID, at(0));
        assert_eq!(dedup.in_flight(), 1);
        drop(led);
        assert_eq!(dedup.in_flight(), 0);
    }

    #[test]
    fn of_many_at_once_one_leads() {
        for n in 0..50 {
            let dedup = dedup(1 << 20);
            let barrier = std::sync::Barrier::new(8);
            let roles: Vec<Role> = std::thread::scope(|scope| {
                let callers: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| {
                            barrier.wait();
                            dedup.enter(&sharing(n, DedupMode::Full), ID, at(0))
                        })
                    })
                    .collect();
                callers
                    .into_iter()
                    .map(|caller| caller.join().expect("a role"))
                    .collect()
            });
            let led = roles.iter().filter(|role| matches!(role, Role::Leader(..)));
            assert_eq!(led.count(), 1);
            let followed = roles
                .iter()
                .filter(|role| matches!(role, Role::Follower(_)));
            assert_eq!(followed.count(), 7);
        }
    }
}
