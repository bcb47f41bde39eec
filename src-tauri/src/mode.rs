//! What Traygate does with calls as a whole, and until when.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::clock::Moment;

/// What becomes of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Merged, limited and guarded.
    #[default]
    Normal,
    /// Straight through: no dedup, no queue, no breaker; only on record.
    Bypass,
    /// Every call is refused.
    Refuse,
}

/// A mode and its end.
#[derive(Clone, Copy, Debug, Default)]
struct Chosen {
    mode: Mode,
    /// When it gives way to [`Mode::Normal`].
    until: Option<Moment>,
}

/// The mode in force. Begins as [`Mode::Normal`] with each start.
#[derive(Debug, Default)]
pub struct ModeSwitch {
    chosen: RwLock<Chosen>,
    /// Every call asks, and most of the time nothing has been chosen.
    is_chosen: AtomicBool,
}

impl ModeSwitch {
    /// Chooses `mode`, at most until `until`.
    pub fn set(&self, mode: Mode, until: Option<Moment>) {
        let mut chosen = self.chosen.write().unwrap_or_else(PoisonError::into_inner);
        let until = until.filter(|_| mode != Mode::Normal);
        *chosen = Chosen { mode, until };
        self.is_chosen
            .store(mode != Mode::Normal, Ordering::Release);
    }

    /// The mode at `now`.
    pub fn at(&self, now: impl FnOnce() -> Moment) -> Mode {
        if !self.is_chosen.load(Ordering::Acquire) {
            return Mode::Normal;
        }
        let chosen = *self.chosen.read().unwrap_or_else(PoisonError::into_inner);
        match chosen.until {
            Some(until) if now() >= until => Mode::Normal,
            _ => chosen.mode,
        }
    }

    /// How long the mode will last from `now`; `None` for one without an end.
    pub fn left(&self, now: Moment) -> Option<Duration> {
        let chosen = self.chosen.read().unwrap_or_else(PoisonError::into_inner);
        let left = chosen.until.map(|until| until.since(now));
        left.filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Moment {
        Moment::at(Duration::from_secs(secs))
    }

    #[test]
    fn a_mode_with_an_end_gives_way_to_normal() {
        let switch = ModeSwitch::default();
        assert_eq!(switch.at(|| at(0)), Mode::Normal);
        switch.set(Mode::Bypass, Some(at(60)));
        assert_eq!(switch.at(|| at(59)), Mode::Bypass);
        assert_eq!(switch.left(at(59)), Some(Duration::from_secs(1)));
        assert_eq!(switch.at(|| at(60)), Mode::Normal);
        assert_eq!(switch.left(at(60)), None);

        switch.set(Mode::Refuse, None);
        assert_eq!(switch.at(|| at(1_000_000)), Mode::Refuse);
        assert_eq!(switch.left(at(1_000_000)), None);
        // Normal needs no end.
        switch.set(Mode::Normal, Some(at(60)));
        assert_eq!(switch.at(|| at(0)), Mode::Normal);
        assert_eq!(switch.left(at(0)), None);
    }
}
