//! Percentiles over every sample, none estimated.

use std::time::Duration;

/// Durations, sorted on demand.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    nanos: Vec<u64>,
    sorted: bool,
}

impl Samples {
    /// Adds one.
    pub fn push(&mut self, duration: Duration) {
        self.sorted = false;
        self.nanos
            .push(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Samples) {
        self.sorted = false;
        self.nanos.extend_from_slice(&other.nanos);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.nanos.len()
    }

    /// The share of them that is at most `limit`; `None` when empty.
    pub fn share_within(&self, limit: Duration) -> Option<f64> {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let within = self.nanos.iter().filter(|nanos| **nanos <= limit).count();
        (!self.nanos.is_empty()).then(|| within as f64 / self.nanos.len() as f64)
    }

    /// The `percent`th percentile in milliseconds, nearest rank; `None` when empty.
    pub fn percentile_ms(&mut self, percent: f64) -> Option<f64> {
        if !self.sorted {
            self.nanos.sort_unstable();
            self.sorted = true;
        }
        let rank = (percent / 100.0 * self.nanos.len() as f64).ceil() as usize;
        self.nanos
            .get(rank.saturating_sub(1))
            .map(|nanos| *nanos as f64 / 1e6)
    }
}
