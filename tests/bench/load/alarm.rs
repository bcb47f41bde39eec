//! Wakes a task to within some tens of microseconds.
//!
//! Tokio's own timer rounds up to a whole millisecond, more than everything
//! the bench measures; the kernel's timer does not.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A timer of one's own; one task waits on it at a time.
pub struct Alarm {
    timer: AsyncFd<OwnedFd>,
}

impl Alarm {
    /// A timer that is not set.
    #[expect(
        deprecated,
        reason = "the successor is an unsafe function; an `OwnedFd`, which never changes its descriptor, upholds what it asks"
    )]
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self {
            timer: AsyncFd::with_interest(timer, Interest::READABLE)?,
        })
    }

    /// Returns at `moment`, at once if that has passed.
    pub async fn until(&self, moment: Instant) -> io::Result<()> {
        let wait = moment.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            return Ok(());
        }
        timerfd_settime(
            self.timer.get_ref(),
            TimerfdTimerFlags::empty(),
            &once_after(wait),
        )?;
        loop {
            let mut ready = self.timer.readable().await?;
            let mut expirations = [0; 8];
            let read =
                ready.try_io(|timer| Ok(rustix::io::read(timer.get_ref(), &mut expirations)?));
            if let Ok(read) = read {
                return read.map(|_| ());
            }
        }
    }
}

fn once_after(wait: Duration) -> Itimerspec {
    let never = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let after = Timespec {
        tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    };
    Itimerspec {
        it_interval: never,
        it_value: after,
    }
}
