//! Identical calls in flight become one upstream call, and a finished answer may serve the next.
//!
//! The first caller of a key leads; the others follow the same [`Answer`] from its first byte.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use moka::Expiry;
use moka::sync::Cache;

use super::answer::{Answer, Head, Reader, Writer};
use super::headers::remove_exchange;
use crate::clock::Moment;
use crate::policy::fingerprint::RequestKey;
use crate::settings::DedupMode;

/// Answers over this many bytes are not kept.
const KEPT_ANSWER: usize = 8 << 20;
/// What a kept answer costs beside its body: headers, map entry, bookkeeping. Bytes, about.
const KEPT_OVERHEAD: usize = 1024;

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
    /// Makes the upstream call.
    Leader(Writer, Reader),
    /// Reads an answer that is under way.
    Follower(Reader),
    /// Gets an answer that is finished.
    Kept(Arc<KeptAnswer>),
}

/// A finished answer.
pub struct KeptAnswer {
    pub head: Head,
    pub body: Bytes,
    pub kept_at: Moment,
    window: Duration,
    /// Somebody received it whole: no retry needs it any more.
    pub received: Arc<AtomicBool>,
}

impl KeptAnswer {
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
    // std Mutex: held for a look-up, never across an await. It is only the index; whether a call
    // can be joined is decided under that call's own lock.
    flights: Mutex<HashMap<RequestKey, Answer, BuildHasherDefault<KeyHasher>>>,
    kept: Cache<RequestKey, Arc<KeptAnswer>, BuildHasherDefault<KeyHasher>>,
    counts: Counts,
}

/// Calls by what they turned out to be, since the start.
#[derive(Default)]
struct Counts {
    led: AtomicU64,
    joined: AtomicU64,
    cached: AtomicU64,
}

impl Dedup {
    /// `max_bytes`: of all kept answers together.
    pub fn new(max_bytes: u64) -> Dedup {
        Dedup {
            flights: Mutex::default(),
            kept: Cache::builder()
                .max_capacity(max_bytes)
                .weigher(|_, kept: &Arc<KeptAnswer>| {
                    u32::try_from(kept.body.len() + KEPT_OVERHEAD).unwrap_or(u32::MAX)
                })
                .expire_after(Window)
                .build_with_hasher(BuildHasherDefault::default()),
            counts: Counts::default(),
        }
    }

    /// Leads, joins or takes a kept answer, in one step.
    pub fn enter(&self, sharing: &Sharing, now: Moment) -> Role {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = flights.get(&sharing.key).and_then(Answer::join) {
            self.counts.joined.fetch_add(1, Ordering::Relaxed);
            return Role::Follower(reader);
        }
        // Under the same lock: a call ends by keeping its answer first and leaving the index
        // last, so whoever finds no flight here finds what it left.
        if sharing.take_kept
            && let Some(kept) = self.kept.get(&sharing.key)
            && kept.serves(sharing, now)
        {
            self.counts.cached.fetch_add(1, Ordering::Relaxed);
            return Role::Kept(kept);
        }
        let (writer, reader) = Answer::begin(true);
        flights.insert(sharing.key, writer.answer().clone());
        self.counts.led.fetch_add(1, Ordering::Relaxed);
        Role::Leader(writer, reader)
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
        let mut head = Head::clone(&head);
        remove_exchange(&mut head.headers);
        self.kept.insert(
            sharing.key,
            Arc::new(KeptAnswer {
                head,
                body,
                kept_at: now,
                window: sharing.window,
                received: writer.received().clone(),
            }),
        );
    }

    /// Takes an ended call out of the index, unless another has its place already.
    fn leave(&self, key: &RequestKey, answer: &Answer) {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if flights.get(key).is_some_and(|current| current.is(answer)) {
            flights.remove(key);
        }
    }

    /// Forgets every kept answer; calls in flight go on.
    pub fn clear(&self) {
        self.kept.invalidate_all();
    }
}

/// A leader's place in the index of flights; dropping it gives the place up.
pub struct Flight {
    dedup: Arc<Dedup>,
    key: RequestKey,
    answer: Answer,
}

impl Flight {
    pub fn new(dedup: Arc<Dedup>, key: RequestKey, answer: Answer) -> Flight {
        Flight { dedup, key, answer }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.dedup.leave(&self.key, &self.answer);
    }
}

/// Lets moka free an answer whose window is over; whether it still serves is decided by the
/// clock that counts sleep.
struct Window;

impl Expiry<RequestKey, Arc<KeptAnswer>> for Window {
    fn expire_after_create(
        &self,
        _key: &RequestKey,
        kept: &Arc<KeptAnswer>,
        _created_at: Instant,
    ) -> Option<Duration> {
        Some(kept.window)
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
