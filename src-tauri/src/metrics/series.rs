//! Bounds a metric: at most 200 label sets have a series of their own, the rest share `other`.
//!
//! A Prometheus keeps every series it has ever seen in memory, and label values come from clients
//! and upstreams, so a loop over made-up model names must not cost more than a shelf of real ones.

use std::collections::HashSet;
use std::fmt;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::{Family, MetricConstructor};

/// Label sets that one metric shows at most, the shared ones among them. A histogram has its
/// buckets, sum and count for each.
pub const MOST: usize = 200;

/// A metric's labels.
pub trait Labels: Clone + fmt::Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static {
    /// How many different sets [`Labels::other`] returns.
    const OTHERS: usize;

    /// What a set without a series of its own is counted under: labels whose values come from
    /// outside read `other`, those with a few fixed values stay as they are. Applied twice it
    /// changes nothing more.
    fn other(&self) -> Self;
}

/// The label sets that have a series of their own: whoever comes first, and for good, so that a
/// set is always counted in the same series.
#[derive(Debug)]
pub struct Seats<L> {
    // std Mutex: held for a look-up, and asked only for sets that have no series yet.
    taken: Mutex<HashSet<L>>,
}

impl<L> Default for Seats<L> {
    fn default() -> Self {
        Seats {
            taken: Mutex::default(),
        }
    }
}

impl<L: Labels> Seats<L> {
    /// The set whose series counts `labels`.
    pub fn of(&self, labels: &L) -> L {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.contains(labels) {
            return labels.clone();
        }
        if taken.len() + L::OTHERS >= MOST {
            return labels.other();
        }
        taken.insert(labels.clone());
        labels.clone()
    }
}

/// The series of one metric.
#[derive(Debug)]
pub struct Bounded<L, M, C = fn() -> M> {
    family: Family<L, M, C>,
    seats: Seats<L>,
}

impl<L: Labels, M: Default> Default for Bounded<L, M> {
    fn default() -> Self {
        Bounded {
            family: Family::default(),
            seats: Seats::default(),
        }
    }
}

impl<L: Labels, M> Bounded<L, M> {
    /// `new`: makes a metric without a count.
    pub fn new(new: fn() -> M) -> Self {
        Bounded {
            family: Family::new_with_constructor(new),
            seats: Seats::default(),
        }
    }
}

impl<L: Labels, M: Clone, C: MetricConstructor<M>> Bounded<L, M, C> {
    /// What counts for `labels`.
    pub fn of(&self, labels: &L) -> M {
        match self.family.get(labels) {
            Some(own) => own.clone(),
            None => self.family.get_or_create_owned(&self.seats.of(labels)),
        }
    }
}

impl<L, M, C: Clone> Bounded<L, M, C> {
    /// The same series, for the registry.
    pub fn family(&self) -> Family<L, M, C> {
        self.family.clone()
    }
}
