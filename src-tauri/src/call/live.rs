//! The calls that are under way at this moment: who watches sees them, and can stop one.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::answer::{Answer, Progress};
use crate::clock::Moment;
use crate::store::{CallId, CallStart};

/// Calls that begin at the same time rarely share a lock.
const SHARDS: usize = 16;

/// One client call under way.
pub struct LiveCall {
    pub start: CallStart,
    pub began: Moment,
    /// The answer its client follows; `None` for tunnels and kept answers.
    answer: Option<Answer>,
    stopped: AtomicBool,
    stop: Notify,
}

impl fmt::Debug for LiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LiveCall").field(&self.start.id).finish()
    }
}

impl LiveCall {
    pub fn new(start: CallStart, began: Moment, answer: Option<Answer>) -> LiveCall {
        LiveCall {
            start,
            began,
            answer,
            stopped: AtomicBool::new(false),
            stop: Notify::new(),
        }
    }

    /// How far its answer has come.
    pub fn progress(&self) -> Progress {
        match &self.answer {
            Some(answer) => answer.progress(),
            None => Progress::default(),
        }
    }

    /// Its client has gone, and the upstream call goes on for others.
    pub fn is_left(&self) -> bool {
        let answer = self.answer.as_ref();
        answer.is_some_and(|answer| !answer.is_heard_by(self.start.id))
    }

    /// Ends this client's answer; the upstream call ends only if nobody else listens. False if
    /// its client is gone already.
    pub fn stop(&self) -> bool {
        self.stopped.store(true, Ordering::Release);
        self.stop.notify_waiters();
        match &self.answer {
            Some(answer) => answer.stop(self.start.id),
            None => true,
        }
    }

    /// Ready once a person has stopped it.
    pub async fn stopped(&self) {
        let mut told = pin!(self.stop.notified());
        // It is enlisted before the look, so that no stop falls between the two.
        told.as_mut().enable();
        if !self.is_stopped() {
            told.await;
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

/// The calls under way, by id.
#[derive(Default)]
pub struct LiveCalls {
    // std Mutex: held for one look-up, never across an await.
    shards: [Mutex<Shard>; SHARDS],
}

type Shard = HashMap<CallId, Arc<LiveCall>, BuildHasherDefault<IdHasher>>;

/// The last 64 bits of an id are random, and made here: they are their own hash.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, id: u128) {
        self.0 = id as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl LiveCalls {
    pub fn insert(&self, call: Arc<LiveCall>) {
        self.shard(call.start.id).insert(call.start.id, call);
    }

    pub fn remove(&self, id: CallId) {
        self.shard(id).remove(&id);
    }

    pub fn get(&self, id: CallId) -> Option<Arc<LiveCall>> {
        self.shard(id).get(&id).cloned()
    }

    /// All of them, the oldest first.
    pub fn all(&self) -> Vec<Arc<LiveCall>> {
        let mut all: Vec<_> = (0..SHARDS)
            .flat_map(|shard| self.lock(shard).values().cloned().collect::<Vec<_>>())
            .collect();
        all.sort_by_key(|call| call.start.id);
        all
    }

    fn shard(&self, id: CallId) -> MutexGuard<'_, Shard> {
        // An id's last bits are random.
        let shard = (id.0.0 % SHARDS as u128) as usize;
        self.lock(shard)
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
