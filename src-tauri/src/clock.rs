//! The one place that asks what time it is.
//!
//! Everything that decides (`policy/`) is handed a [`Moment`]; everything that
//! records is handed a [`WallTime`]. `clippy.toml` forbids asking elsewhere.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

/// A point on a monotonic clock that keeps running while the machine sleeps.
///
/// Only differences mean anything; the origin is the clock's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(Duration);

impl Moment {
    /// A moment at `offset` from the clock's origin. For tests and tables.
    pub const fn at(offset: Duration) -> Self {
        Self(offset)
    }

    /// Time since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(span))
    }
}

impl Sub<Moment> for Moment {
    type Output = Duration;
    fn sub(self, earlier: Moment) -> Duration {
        self.since(earlier)
    }
}

/// Microseconds since 1970-01-01 UTC. Steps when the user sets the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct WallTime(pub i64);

impl WallTime {
    /// Milliseconds since 1970-01-01 UTC; negative before it.
    pub const fn unix_millis(self) -> i64 {
        self.0.div_euclid(1000)
    }
}

/// Where moments come from.
#[derive(Clone, Copy, Debug, Default)]
pub enum Clock {
    /// The machine's clock since boot, sleep included.
    #[default]
    Boot,
    /// Tokio's clock, which tests can pause.
    Tokio,
    /// The machine's clock since boot, and a wall clock that is off by so many microseconds: tests
    /// set it as a person sets a clock.
    Stepped(&'static AtomicI64),
}

impl Clock {
    /// The current moment.
    pub fn now(self) -> Moment {
        match self {
            Clock::Boot | Clock::Stepped(_) => Moment(boot_time()),
            Clock::Tokio => {
                static ORIGIN: std::sync::OnceLock<tokio::time::Instant> =
                    std::sync::OnceLock::new();
                #[expect(clippy::disallowed_methods, reason = "this is the clock")]
                let now = tokio::time::Instant::now();
                // A paused test may run beside others, whose clocks began earlier or later.
                let origin = *ORIGIN.get_or_init(|| now);
                let since = now.saturating_duration_since(origin);
                let until = origin.saturating_duration_since(now);
                Moment(Duration::from_secs(1 << 32) + since - until)
            }
        }
    }

    /// The current wall time.
    pub fn wall(self) -> WallTime {
        #[expect(clippy::disallowed_methods, reason = "this is the clock")]
        let now = SystemTime::now();
        let micros = match now.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
            Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
        };
        WallTime(match self {
            Clock::Boot | Clock::Tokio => micros,
            Clock::Stepped(by) => micros.saturating_add(by.load(Ordering::Relaxed)),
        })
    }
}

/// Linux's `Instant` stands still during sleep (`CLOCK_MONOTONIC`); breaker waits and reuse
/// windows must not, so `CLOCK_BOOTTIME` is read instead.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// macOS and Windows: `Instant` counts sleep on Windows, and is close enough on macOS.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_time() -> Duration {
    static ORIGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    let now = std::time::Instant::now();
    now.saturating_duration_since(*ORIGIN.get_or_init(|| now))
}
