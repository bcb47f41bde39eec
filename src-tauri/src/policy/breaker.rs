//! Decides whether a call may go upstream: closed, open or half-open.
//!
//! A [`Breaker`] is plain data without a lock or a clock. Its owner keeps it behind a lock of its
//! own and hands in the time, so a check and the claim that follows it are one step
//! ([`Breaker::admit`]) and forty calls at once on a half-open breaker send exactly one.
//!
//! Every change of state begins a new *period*. A [`Pass`] remembers the period it was given in,
//! and an outcome that comes back in another one changes nothing: a call that began before an
//! outage says nothing about what came after it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::clock::Moment;

/// After this long without a verdict a probe no longer keeps others from trying.
const PROBE_PATIENCE: Duration = Duration::from_secs(30);

/// Each failed probe doubles the wait, up to 2^6 = 64 times the setting.
const MOST_DOUBLINGS: u32 = 6;

/// The failure rate is taken over this many seconds, the running one included.
const RATE_SECONDS: u64 = 60;

/// Fewer settled calls than this say nothing about a rate.
const RATE_LEAST_CALLS: u32 = 20;

/// What a refused caller is told to wait while a probe is under way: its verdict may come at any
/// moment, and `retry-after` counts in whole seconds.
const RETRY_WHILE_PROBING: Duration = Duration::from_secs(1);

/// The `[breaker]` section of the settings, ready for use.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Failures in a row that open it; 0: never for that reason.
    pub failures: u32,
    /// Share of failures (0 to 1) among at least 20 calls of the last minute that opens it;
    /// 0: never for that reason.
    pub failure_rate: f64,
    /// Successful probes that close it; 0 counts as 1.
    pub probes: u32,
    /// How long it stays open the first time; each failed probe doubles it, to at most 64 times.
    pub open: Duration,
    /// How often the owner's loop looks whether the upstream is back; zero: never.
    pub recovery_check: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            failure_rate: 0.5,
            probes: 1,
            open: Duration::from_secs(60),
            recovery_check: Duration::from_secs(2),
        }
    }
}

/// Leave to make one call, to be handed back with its outcome to [`Breaker::settle`].
///
/// A lost pass does no lasting harm: one of a closed breaker counts as nothing, a probe's stops
/// blocking others after 30 seconds.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    period: u64,
    probe: Option<ProbeId>,
}

impl Pass {
    /// Whether this call tries out a half-open breaker, and so gets a permit of its own.
    pub fn is_probe(&self) -> bool {
        self.probe.is_some()
    }
}

/// Unique within one half-open period.
type ProbeId = u64;

/// What became of a call, as far as the provider's health is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A complete answer.
    Success,
    /// Unreachable, one of our timeouts while waiting on the upstream, a 5xx, a broken stream.
    Failure,
    /// A 4xx, 429 too: neither good nor bad, but proof of life where that is what is asked.
    ClientError,
    /// The caller left, or the call never reached the upstream: says nothing at all.
    Abandoned,
}

/// Why a call may not go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// When trying again may help. While held open nobody knows: then it is the `open` setting.
    pub retry_after: Duration,
    /// A person holds it open.
    pub held: bool,
    /// It is half-open and a probe is under way.
    pub half_open: bool,
}

impl Refusal {
    /// `retry_after` as the header wants it: whole seconds, rounded up, at least one.
    pub fn retry_after_secs(&self) -> u64 {
        let up = u64::from(self.retry_after.subsec_nanos() > 0);
        self.retry_after.as_secs().saturating_add(up).max(1)
    }
}

/// A change of state, for the log and for those who watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Every call is refused from now on.
    Opened {
        /// When the next probe may go; the end of time if `reason` is [`OpenReason::Held`].
        until: Moment,
        /// What opened it.
        reason: OpenReason,
    },
    /// The next call goes through as a probe.
    HalfOpened,
    /// Calls pass again.
    Closed,
}

impl Transition {
    /// The state it led to.
    pub fn state(&self) -> State {
        match self {
            Self::Opened { .. } => State::Open,
            Self::HalfOpened => State::HalfOpen,
            Self::Closed => State::Closed,
        }
    }
}

/// What opened a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OpenReason {
    /// So many calls in a row failed.
    FailuresInRow {
        /// How many.
        failures: u32,
    },
    /// Too large a share of the last minute's calls failed.
    FailureRate {
        /// Calls that failed.
        failed: u32,
        /// Calls that succeeded or failed.
        settled: u32,
    },
    /// It was half-open, and the probe failed.
    ProbeFailed,
    /// A person opened it.
    Held,
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = BreakerState)]
pub enum State {
    /// Calls pass.
    Closed,
    /// Calls are refused.
    Open,
    /// One call at a time passes, as a probe.
    HalfOpen,
}

/// A breaker as the control room shows it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = BreakerSnapshot)]
pub struct Snapshot {
    /// The state at the moment asked about: a wait that is over reads as half-open.
    pub state: State,
    /// What opened it; none while closed or half-open.
    pub reason: Option<OpenReason>,
    /// A person holds it open.
    pub held: bool,
    /// Failures since the last success, failed probes included.
    pub failures_in_row: u32,
    /// Probes that failed since the last success; each one doubled the wait.
    pub failed_probes: u32,
    /// Calls of the last minute that succeeded or failed; counted while closed.
    pub settled_last_minute: u32,
    /// Those of them that failed.
    pub failed_last_minute: u32,
    /// Whether a probe that still keeps others from trying is under way.
    pub probe_under_way: bool,
    /// Until the next call may go as a probe, zero if it may now; none while closed or held.
    /// Serialized as seconds with fractions.
    #[serde(rename = "next_probe_in_secs", serialize_with = "as_seconds")]
    #[schema(value_type = Option<f64>)]
    pub next_probe_in: Option<Duration>,
}

fn as_seconds<S: Serializer>(span: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    span.map(|span| span.as_secs_f64()).serialize(out)
}

/// One circuit breaker.
#[derive(Debug)]
pub struct Breaker {
    settings: BreakerSettings,
    /// The number of the present period, so that outcomes of an earlier one are known as such.
    period: u64,
    phase: Phase,
    failures_in_row: u32,
    failed_probes: u32,
}

#[derive(Debug)]
enum Phase {
    Closed {
        recent: Recent,
    },
    Open {
        since: Moment,
        reason: OpenReason,
        held: bool,
        /// A recovery check has failed since the opening, so one that succeeds is news. Without
        /// that, a provider whose model list answers while its generation hangs would be let in
        /// again every two seconds.
        seen_dead: bool,
    },
    HalfOpen {
        /// Those without a verdict, oldest first; only the youngest can still block others.
        probes: Vec<Probe>,
        next_probe: ProbeId,
        successes: u32,
    },
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    id: ProbeId,
    began: Moment,
}

impl Phase {
    fn closed() -> Self {
        Phase::Closed {
            recent: Recent::default(),
        }
    }

    fn half_open() -> Self {
        Phase::HalfOpen {
            probes: Vec::new(),
            next_probe: 0,
            successes: 0,
        }
    }
}

impl Breaker {
    /// A closed breaker that has seen nothing yet.
    pub fn new(settings: BreakerSettings) -> Self {
        Self {
            settings,
            period: next_period(),
            phase: Phase::closed(),
            failures_in_row: 0,
            failed_probes: 0,
        }
    }

    /// Takes new settings while running.
    ///
    /// A wait in progress is measured by the new `open`, and a half-open breaker with successes
    /// enough closes. A lower `failures` or `failure_rate` waits for the next outcome: changing a
    /// setting must not cut a working provider off.
    pub fn configure(&mut self, settings: BreakerSettings, now: Moment) -> Option<Transition> {
        self.settings = settings;
        match self.phase {
            Phase::HalfOpen { successes, .. } if successes >= self.probes_wanted() => {
                Some(self.close())
            }
            _ => self.elapse(now),
        }
    }

    /// Whether a call would be refused at `now`. Claims nothing: a half-open breaker with a free
    /// place answers `None` to everybody who asks, and only [`Breaker::admit`] tells who gets it.
    pub fn refusal(&self, now: Moment) -> Option<Refusal> {
        match &self.phase {
            Phase::Closed { .. } => None,
            Phase::Open { since, held, .. } => {
                let retry_after = if *held {
                    self.settings.open
                } else {
                    self.reopens_at(*since).since(now)
                };
                (*held || !retry_after.is_zero()).then_some(Refusal {
                    retry_after,
                    held: *held,
                    half_open: false,
                })
            }
            Phase::HalfOpen { probes, .. } => blocked_for(probes, now).map(|_| Refusal {
                retry_after: RETRY_WHILE_PROBING,
                held: false,
                half_open: true,
            }),
        }
    }

    /// Lets a call in or refuses it, and claims the probe's place in the same step.
    ///
    /// A wait that is over makes the breaker half-open here; whoever has to tell of that calls
    /// [`Breaker::elapse`] first.
    ///
    /// # Errors
    /// The same [`Refusal`] that [`Breaker::refusal`] gives at that moment.
    pub fn admit(&mut self, now: Moment) -> Result<Pass, Refusal> {
        if let Some(refusal) = self.refusal(now) {
            return Err(refusal);
        }
        self.elapse(now);
        let probe = match &mut self.phase {
            Phase::HalfOpen {
                probes, next_probe, ..
            } => {
                let id = *next_probe;
                *next_probe += 1;
                probes.push(Probe { id, began: now });
                Some(id)
            }
            Phase::Closed { .. } | Phase::Open { .. } => None,
        };
        Ok(Pass {
            period: self.period,
            probe,
        })
    }

    /// Makes an open breaker half-open if its wait is over, and says so once.
    pub fn elapse(&mut self, now: Moment) -> Option<Transition> {
        match self.phase {
            Phase::Open {
                since, held: false, ..
            } if now >= self.reopens_at(since) => Some(self.half_open()),
            _ => None,
        }
    }

    /// Notes a call's first content. For a probe that is the success; what becomes of it later
    /// counts for nothing. For any other call it is no news yet.
    pub fn first_content(&mut self, pass: Pass, now: Moment) -> Option<Transition> {
        if pass.is_probe() {
            self.settle(pass, Verdict::Success, now)
        } else {
            None
        }
    }

    /// Counts the outcome of a call that has ended, if it began in the present period.
    ///
    /// Success and failure alike may open a closed breaker: by the rate of the last minute, which
    /// moves with every outcome.
    pub fn settle(&mut self, pass: Pass, verdict: Verdict, now: Moment) -> Option<Transition> {
        if pass.period != self.period {
            return None;
        }
        match pass.probe {
            Some(probe) => self.settle_probe(probe, verdict, now),
            None => self.settle_ordinary(verdict, now),
        }
    }

    fn settle_ordinary(&mut self, verdict: Verdict, now: Moment) -> Option<Transition> {
        let Phase::Closed { recent } = &mut self.phase else {
            return None;
        };
        match verdict {
            Verdict::Success => {
                self.failures_in_row = 0;
                recent.count(now, false);
            }
            Verdict::Failure => {
                self.failures_in_row = self.failures_in_row.saturating_add(1);
                recent.count(now, true);
            }
            Verdict::ClientError | Verdict::Abandoned => return None,
        }
        let Tally { failed, settled } = recent.total;
        let BreakerSettings {
            failures,
            failure_rate,
            ..
        } = self.settings;
        if failures > 0 && self.failures_in_row >= failures {
            let failures = self.failures_in_row;
            Some(self.open(OpenReason::FailuresInRow { failures }, now))
        } else if failure_rate > 0.0
            && settled >= RATE_LEAST_CALLS
            // Divided, not multiplied: 7 of 25 is the very float that `0.28` reads as, while
            // `0.28 * 25.0` is more than 7.
            && f64::from(failed) / f64::from(settled) >= failure_rate
        {
            Some(self.open(OpenReason::FailureRate { failed, settled }, now))
        } else {
            None
        }
    }

    fn settle_probe(&mut self, id: ProbeId, verdict: Verdict, now: Moment) -> Option<Transition> {
        let Phase::HalfOpen {
            probes, successes, ..
        } = &mut self.phase
        else {
            return None;
        };
        let place = probes.iter().position(|probe| probe.id == id)?;
        probes.remove(place);
        match verdict {
            Verdict::Success | Verdict::ClientError => {
                *successes += 1;
                let enough = *successes >= self.probes_wanted();
                self.failures_in_row = 0;
                self.failed_probes = 0;
                enough.then(|| self.close())
            }
            Verdict::Failure => {
                self.failures_in_row = self.failures_in_row.saturating_add(1);
                self.failed_probes = self.failed_probes.saturating_add(1);
                Some(self.open(OpenReason::ProbeFailed, now))
            }
            Verdict::Abandoned => None,
        }
    }

    /// Takes the result of a recovery check: a free request beside the calls, made while open.
    ///
    /// One that succeeds makes the breaker half-open early, but only if one has failed since the
    /// opening. A wait that is over does so whatever the check found.
    pub fn recovery_check(&mut self, alive: bool, now: Moment) -> Option<Transition> {
        if let Some(elapsed) = self.elapse(now) {
            return Some(elapsed);
        }
        if !self.wants_recovery_check() {
            return None;
        }
        let Phase::Open { seen_dead, .. } = &mut self.phase else {
            return None;
        };
        if !alive {
            *seen_dead = true;
            None
        } else if *seen_dead {
            Some(self.half_open())
        } else {
            None
        }
    }

    /// Whether a recovery check could change anything: open, not held, and switched on.
    pub fn wants_recovery_check(&self) -> bool {
        matches!(self.phase, Phase::Open { held: false, .. })
            && !self.settings.recovery_check.is_zero()
    }

    // What a person does takes the time as everything does here, whether it needs it yet or not.

    /// A person closes it. All is forgotten, and calls in flight no longer count; a hold ends.
    pub fn reset(&mut self, _now: Moment) -> Option<Transition> {
        let was_closed = matches!(self.phase, Phase::Closed { .. });
        let closed = self.close();
        (!was_closed).then_some(closed)
    }

    /// A person wants the next call to try, now. Ends the wait or the hold of an open breaker;
    /// one that is not open needs nothing.
    pub fn probe(&mut self, _now: Moment) -> Option<Transition> {
        matches!(self.phase, Phase::Open { .. }).then(|| self.half_open())
    }

    /// A person opens it, until [`Breaker::release`], [`Breaker::probe`] or [`Breaker::reset`].
    /// Neither time nor a recovery check ends that. No transition if it was open already.
    pub fn hold(&mut self, now: Moment) -> Option<Transition> {
        // A wait that is over reads as half-open, so holding it then is a change to tell of.
        self.elapse(now);
        if let Phase::Open { held, .. } = &mut self.phase {
            *held = true;
            return None;
        }
        Some(self.open(OpenReason::Held, now))
    }

    /// A person ends the hold. It goes on half-open, not closed: whatever the hold was for, the
    /// next call proves that it is over. Without a hold nothing happens.
    pub fn release(&mut self, _now: Moment) -> Option<Transition> {
        matches!(self.phase, Phase::Open { held: true, .. }).then(|| self.half_open())
    }

    /// How it stands at `now`.
    pub fn snapshot(&self, now: Moment) -> Snapshot {
        let mut snapshot = Snapshot {
            state: State::Closed,
            reason: None,
            held: false,
            failures_in_row: self.failures_in_row,
            failed_probes: self.failed_probes,
            settled_last_minute: 0,
            failed_last_minute: 0,
            probe_under_way: false,
            next_probe_in: None,
        };
        match &self.phase {
            Phase::Closed { recent } => {
                let tally = recent.at(now);
                snapshot.settled_last_minute = tally.settled;
                snapshot.failed_last_minute = tally.failed;
            }
            Phase::Open {
                since,
                reason,
                held,
                ..
            } => {
                let wait = self.reopens_at(*since).since(now);
                if *held || !wait.is_zero() {
                    snapshot.state = State::Open;
                    snapshot.reason = Some(*reason);
                    snapshot.held = *held;
                } else {
                    snapshot.state = State::HalfOpen;
                }
                snapshot.next_probe_in = (!held).then_some(wait);
            }
            Phase::HalfOpen { probes, .. } => {
                let blocked = blocked_for(probes, now);
                snapshot.state = State::HalfOpen;
                snapshot.probe_under_way = blocked.is_some();
                snapshot.next_probe_in = Some(blocked.unwrap_or_default());
            }
        }
        snapshot
    }

    fn probes_wanted(&self) -> u32 {
        self.settings.probes.max(1)
    }

    /// When an opening that began at `since` and is not held ends.
    fn reopens_at(&self, since: Moment) -> Moment {
        let times = 1 << self.failed_probes.min(MOST_DOUBLINGS);
        since + self.settings.open.saturating_mul(times)
    }

    fn close(&mut self) -> Transition {
        self.enter(Phase::closed());
        self.failures_in_row = 0;
        self.failed_probes = 0;
        Transition::Closed
    }

    fn half_open(&mut self) -> Transition {
        self.enter(Phase::half_open());
        Transition::HalfOpened
    }

    fn open(&mut self, reason: OpenReason, now: Moment) -> Transition {
        let held = reason == OpenReason::Held;
        self.enter(Phase::Open {
            since: now,
            reason,
            held,
            seen_dead: false,
        });
        let until = if held {
            Moment::at(Duration::MAX)
        } else {
            self.reopens_at(now)
        };
        Transition::Opened { until, reason }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.period = next_period();
    }
}

/// A number no other period of any breaker has. A model's breaker is dropped once the model is well
/// and made anew at its next overload; a pass of the old one must not fit the new one by chance.
fn next_period() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// How long a probe still keeps others from trying; `None` if the place is free.
fn blocked_for(probes: &[Probe], now: Moment) -> Option<Duration> {
    let youngest = probes.last()?;
    let left = PROBE_PATIENCE.saturating_sub(now.since(youngest.began));
    (!left.is_zero()).then_some(left)
}

/// Successes and failures of the last minute, second by second.
///
/// Only seconds in which a call settled have an entry, so an idle breaker (there is one for each
/// model) holds next to nothing.
#[derive(Debug, Default)]
struct Recent {
    /// Oldest first, at most [`RATE_SECONDS`] of them.
    seconds: VecDeque<(u64, Tally)>,
    /// The sum over `seconds`.
    total: Tally,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    settled: u32,
    failed: u32,
}

impl Recent {
    fn count(&mut self, now: Moment, failed: bool) {
        let second = second_of(now);
        while let Some(&(oldest, gone)) = self.seconds.front()
            && is_past(oldest, second)
        {
            self.seconds.pop_front();
            self.total.settled -= gone.settled;
            self.total.failed -= gone.failed;
        }
        if self.seconds.back().is_none_or(|&(last, _)| last < second) {
            self.seconds.push_back((second, Tally::default()));
        }
        if let Some((_, tally)) = self.seconds.back_mut() {
            for tally in [tally, &mut self.total] {
                tally.settled += 1;
                tally.failed += u32::from(failed);
            }
        }
    }

    /// The sum as it stands at `now`, without what has aged out since the last outcome.
    fn at(&self, now: Moment) -> Tally {
        let now = second_of(now);
        let mut total = self.total;
        for (_, gone) in self
            .seconds
            .iter()
            .take_while(|(then, _)| is_past(*then, now))
        {
            total.settled -= gone.settled;
            total.failed -= gone.failed;
        }
        total
    }
}

fn second_of(moment: Moment) -> u64 {
    moment.since(Moment::default()).as_secs()
}

/// Whether the second `then` lies before the minute that ends with the second `now`.
fn is_past(then: u64, now: u64) -> bool {
    now.saturating_sub(then) >= RATE_SECONDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use State::{Closed, HalfOpen, Open};

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// A moment well away from the clock's origin.
    fn at(seconds: u64) -> Moment {
        Moment::at(secs(1_000 + seconds))
    }

    /// Opens at second 0.
    fn opened(settings: BreakerSettings) -> Breaker {
        let mut breaker = Breaker::new(settings);
        for _ in 0..breaker.settings.failures {
            let pass = breaker.admit(at(0)).expect("closed");
            breaker.settle(pass, Verdict::Failure, at(0));
        }
        assert_eq!(breaker.snapshot(at(0)).state, Open);
        breaker
    }

    /// Plays one call or act a letter and returns the breaker and the time.
    ///
    /// `S F C A`: a call that is let in and ends at once with that verdict; `!`: a call that is
    /// refused; `+n`: n seconds pass; `v ^`: a recovery check fails, succeeds; `h r p x`: hold,
    /// release, probe, reset.
    fn play(script: &str, settings: BreakerSettings) -> (Breaker, Moment) {
        let mut breaker = Breaker::new(settings);
        let mut now = at(0);
        let mut letters = script.chars().peekable();
        while let Some(letter) = letters.next() {
            let verdict = match letter {
                'S' => Some(Verdict::Success),
                'F' => Some(Verdict::Failure),
                'C' => Some(Verdict::ClientError),
                'A' => Some(Verdict::Abandoned),
                _ => None,
            };
            if let Some(verdict) = verdict {
                let pass = breaker.admit(now);
                let pass = pass.unwrap_or_else(|no| panic!("{letter} of {script}: {no:?}"));
                breaker.settle(pass, verdict, now);
                continue;
            }
            match letter {
                '!' => assert!(breaker.admit(now).is_err(), "let in: {script}"),
                '+' => {
                    let mut digits = String::new();
                    while let Some(digit) = letters.next_if(char::is_ascii_digit) {
                        digits.push(digit);
                    }
                    now = now + secs(digits.parse().expect("seconds"));
                }
                'v' => drop(breaker.recovery_check(false, now)),
                '^' => drop(breaker.recovery_check(true, now)),
                'h' => drop(breaker.hold(now)),
                'r' => drop(breaker.release(now)),
                'p' => drop(breaker.probe(now)),
                'x' => drop(breaker.reset(now)),
                ' ' => {}
                other => panic!("no such act: {other}"),
            }
        }
        (breaker, now)
    }

    #[test]
    fn the_states_as_a_table() {
        let table = [
            // Failures in a row; what is neither success nor failure does not break the row.
            ("FFFF", Closed),
            ("FFFFF !", Open),
            ("FFFFS FFFF", Closed),
            ("FFFFC F", Open),
            ("FFFFA F", Open),
            ("CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC", Closed),
            ("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", Closed),
            ("FFFF +86400 F", Open),
            // Half of twenty calls in a minute, in whatever order; nineteen say nothing.
            ("FS FS FS FS FS FS FS FS FS F", Closed),
            ("FS FS FS FS FS FS FS FS FS FS", Open),
            ("FS FS FS FS FS FS FS FS FS SSSSSS", Closed),
            ("FS FS FS FS FS FS FS FS FS F +59 S", Open),
            ("FS FS FS FS FS FS FS FS FS F +60 S", Closed),
            // The wait, and what a probe makes of it.
            ("FFFFF +59 !", Open),
            ("FFFFF +60", HalfOpen),
            ("FFFFF +60 S", Closed),
            ("FFFFF +60 C", Closed),
            ("FFFFF +60 A", HalfOpen),
            ("FFFFF +60 AAAA S", Closed),
            ("FFFFF +60 F !", Open),
            // Doubled by each failed probe; a success begins anew.
            ("FFFFF +60 F +119 !", Open),
            ("FFFFF +60 F +120", HalfOpen),
            ("FFFFF +60 F +120 F +239 !", Open),
            ("FFFFF +60 F +120 F +240", HalfOpen),
            ("FFFFF +60 F +120 S FFFFF +60", HalfOpen),
            // What opened it is forgotten once it has closed.
            ("FFFFF +60 S FFFF", Closed),
            ("FFFFF +60 S FFFFF", Open),
            // A recovery check counts only after one that failed since the opening.
            ("FFFFF ^^^ !", Open),
            ("FFFFF v !", Open),
            ("FFFFF v^", HalfOpen),
            ("FFFFF v^ F ^ !", Open),
            ("FFFFF v^ F v^", HalfOpen),
            ("FFFFF v^ F +119 !", Open),
            ("FFFFF +60 ^", HalfOpen),
            ("FFFFF +60 v", HalfOpen),
            ("vvv ^", Closed),
            // A person's hand.
            ("h !", Open),
            ("h +604800 !", Open),
            ("h v^ !", Open),
            ("hr", HalfOpen),
            ("hr S", Closed),
            ("hr F +119 !", Open),
            ("FFFFF h +60 !", Open),
            ("FFFFF h r", HalfOpen),
            ("FFFFF r !", Open),
            ("FFFFF +60 h !", Open),
            ("FFFFF p", HalfOpen),
            ("hp", HalfOpen),
            ("p", Closed),
            ("r", Closed),
            ("FFFFF x", Closed),
            ("FFFFF x FFFF", Closed),
            ("FFFF x F", Closed),
            ("hx", Closed),
            ("FFFFF +60 F x FFFFF +60", HalfOpen),
        ];
        for (script, state) in table {
            let (breaker, now) = play(script, BreakerSettings::default());
            assert_eq!(breaker.snapshot(now).state, state, "{script}");
        }
    }

    #[test]
    fn settings_as_a_table() {
        let base = BreakerSettings {
            failures: 0,
            failure_rate: 0.0,
            ..BreakerSettings::default()
        };
        let row = |failures| BreakerSettings {
            failures,
            ..base.clone()
        };
        let rate = |failure_rate| BreakerSettings {
            failure_rate,
            ..base.clone()
        };
        let probes = |probes| BreakerSettings { probes, ..row(1) };
        let table = [
            ("FFFFFFFFFF FFFFFFFFFF FFFFFFFFFF", base.clone(), Closed),
            ("F", row(1), Open),
            ("FFS FFS FFS FFS FFS FFS FFS FFS", row(3), Closed),
            ("SSSSSSSSSSSSSSSSSS FFFFFF", rate(0.28), Closed),
            ("SSSSSSSSSSSSSSSSSS FFFFFFF", rate(0.28), Open),
            ("FFFFF SSSSSSSSSSSSSSS", rate(0.3), Closed),
            ("FFFFFF SSSSSSSSSSSSSS", rate(0.3), Open),
            ("FFFFFFFFFF FFFFFFFFF S", rate(1.0), Closed),
            ("FFFFFFFFFF FFFFFFFFFF", rate(1.0), Open),
            ("FFFFFFFFFF FFFFFFFFFF", rate(f64::NAN), Closed),
            ("F +60 SS", probes(3), HalfOpen),
            ("F +60 SSS", probes(3), Closed),
            ("F +60 SAAS C", probes(3), Closed),
            ("F +60 SSF !", probes(3), Open),
            ("F +60 F +120 SF +119 !", probes(3), Open),
            ("F +60 F +120 SF +120", probes(3), HalfOpen),
            ("F +60 S", probes(0), Closed),
        ];
        for (script, settings, state) in table {
            let (breaker, now) = play(script, settings.clone());
            assert_eq!(
                breaker.snapshot(now).state,
                state,
                "{script} with {settings:?}"
            );
        }
    }

    #[test]
    fn the_wait_doubles_to_sixty_four_times_and_no_further() {
        let mut breaker = opened(BreakerSettings::default());
        let mut now = at(0);
        for times in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            let wait = breaker.snapshot(now).next_probe_in.expect("open");
            assert_eq!(wait, secs(60 * times));
            now = now + wait;
            let probe = breaker.admit(now).expect("half-open");
            assert_eq!(
                breaker.settle(probe, Verdict::Failure, now),
                Some(Transition::Opened {
                    until: now + secs(60 * (2 * times).min(64)),
                    reason: OpenReason::ProbeFailed,
                })
            );
        }
        assert_eq!(breaker.snapshot(now).failed_probes, 9);
    }

    #[test]
    fn transitions_say_what_happened_once() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let mut seen = Vec::new();
        for _ in 0..5 {
            let pass = breaker.admit(at(0)).expect("closed");
            seen.extend(breaker.settle(pass, Verdict::Failure, at(0)));
        }
        seen.extend(breaker.elapse(at(59)));
        seen.extend(breaker.elapse(at(60)));
        seen.extend(breaker.elapse(at(60)));
        let probe = breaker.admit(at(60)).expect("half-open");
        seen.extend(breaker.first_content(probe, at(61)));
        seen.extend(breaker.settle(probe, Verdict::Success, at(62)));
        seen.extend(breaker.hold(at(63)));
        seen.extend(breaker.hold(at(64)));
        seen.extend(breaker.release(at(65)));
        seen.extend(breaker.release(at(65)));
        seen.extend(breaker.reset(at(66)));
        seen.extend(breaker.reset(at(66)));
        // Over, though nobody has touched it since: the hold opens it anew.
        seen.extend(breaker.hold(at(67)));
        seen.extend(breaker.probe(at(68)));
        let probe = breaker.admit(at(68)).expect("half-open");
        seen.extend(breaker.settle(probe, Verdict::Failure, at(68)));
        seen.extend(breaker.hold(at(68 + 120)));
        let held = Transition::Opened {
            until: Moment::at(Duration::MAX),
            reason: OpenReason::Held,
        };
        assert_eq!(
            seen,
            [
                Transition::Opened {
                    until: at(60),
                    reason: OpenReason::FailuresInRow { failures: 5 },
                },
                Transition::HalfOpened,
                Transition::Closed,
                held,
                Transition::HalfOpened,
                Transition::Closed,
                held,
                Transition::HalfOpened,
                Transition::Opened {
                    until: at(68 + 120),
                    reason: OpenReason::ProbeFailed,
                },
                held,
            ]
        );
    }

    #[test]
    fn forty_at_once_on_a_half_open_breaker_send_exactly_one() {
        let mut breaker = opened(BreakerSettings::default());
        let passes: Vec<Pass> = (0..40).filter_map(|_| breaker.admit(at(60)).ok()).collect();
        assert_eq!(passes.len(), 1);
        assert!(passes[0].is_probe());
    }

    #[test]
    fn asking_claims_nothing() {
        let mut breaker = opened(BreakerSettings::default());
        for _ in 0..40 {
            assert_eq!(breaker.refusal(at(60)), None);
        }
        assert!(breaker.admit(at(60)).is_ok());
        assert_eq!(
            breaker.refusal(at(60)),
            Some(Refusal {
                retry_after: secs(1),
                held: false,
                half_open: true,
            })
        );
    }

    #[test]
    fn a_refusal_tells_when_to_come_back() {
        let mut breaker = opened(BreakerSettings::default());
        let at_39_8 = at(39) + Duration::from_millis(800);
        let refusal = breaker.refusal(at_39_8).expect("open");
        assert_eq!(refusal.retry_after, Duration::from_millis(20_200));
        assert_eq!(refusal.retry_after_secs(), 21);
        assert_eq!(
            breaker.admit(at_39_8).expect_err("open"),
            refusal,
            "both tell the same"
        );

        breaker.hold(at(40));
        let refusal = breaker.refusal(at(9_000)).expect("held");
        assert!(refusal.held);
        assert_eq!(refusal.retry_after, secs(60), "nobody knows");

        let table = [(0, 1), (1, 1), (999, 1), (1_000, 1), (1_001, 2)];
        for (millis, header) in table {
            let retry_after = Duration::from_millis(millis);
            let refusal = Refusal {
                retry_after,
                ..refusal
            };
            assert_eq!(refusal.retry_after_secs(), header, "{millis} ms");
        }
    }

    #[test]
    fn calls_from_before_an_opening_change_nothing_after_it() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let early: Vec<Pass> = (0..30)
            .map(|_| breaker.admit(at(0)).expect("closed"))
            .collect();
        for pass in &early[..5] {
            breaker.settle(*pass, Verdict::Failure, at(1));
        }
        // Open, half-open and closed again: none of them hears of calls from before.
        for (moment, state) in [(2, Open), (61, HalfOpen), (62, Closed)] {
            for pass in &early[5..13] {
                assert_eq!(breaker.settle(*pass, Verdict::Failure, at(moment)), None);
            }
            assert_eq!(
                breaker.settle(early[20], Verdict::Success, at(moment)),
                None
            );
            assert_eq!(breaker.snapshot(at(moment)).state, state);
            if state == HalfOpen {
                let probe = breaker.admit(at(moment)).expect("half-open");
                breaker.settle(probe, Verdict::Success, at(moment));
            }
        }
        assert_eq!(breaker.snapshot(at(62)).failures_in_row, 0);
    }

    #[test]
    fn a_probe_that_hangs_makes_room_after_thirty_seconds_and_still_counts() {
        for (verdict, state) in [
            (Verdict::Success, Closed),
            (Verdict::ClientError, Closed),
            (Verdict::Failure, Open),
            (Verdict::Abandoned, HalfOpen),
        ] {
            let mut breaker = opened(BreakerSettings::default());
            let first = breaker.admit(at(60)).expect("half-open");
            assert!(breaker.admit(at(89)).is_err());
            let second = breaker.admit(at(90)).expect("the first has had its time");
            assert!(second.is_probe());
            assert!(breaker.admit(at(91)).is_err(), "but only one more");

            breaker.settle(first, verdict, at(95));
            assert_eq!(breaker.snapshot(at(95)).state, state, "{verdict:?}");
            if state == HalfOpen {
                assert!(breaker.admit(at(96)).is_err(), "the second has the place");
            } else {
                let late = breaker.settle(second, Verdict::Failure, at(96));
                assert_eq!(late, None, "its half-open is over");
            }
        }
    }

    #[test]
    fn a_probe_of_an_earlier_half_open_is_stale() {
        let mut breaker = opened(BreakerSettings::default());
        let stale = breaker.admit(at(60)).expect("half-open");
        let second = breaker.admit(at(90)).expect("half-open");
        breaker.settle(second, Verdict::Failure, at(91));
        let present = breaker.admit(at(91 + 120)).expect("half-open again");
        for verdict in [Verdict::Success, Verdict::Failure, Verdict::Abandoned] {
            assert_eq!(breaker.settle(stale, verdict, at(212)), None);
            assert_eq!(breaker.first_content(stale, at(212)), None);
        }
        assert!(breaker.admit(at(212)).is_err(), "the place is still taken");
        assert_eq!(
            breaker.settle(present, Verdict::Success, at(213)),
            Some(Transition::Closed)
        );
    }

    #[test]
    fn a_pass_that_outlives_its_breaker_fits_no_other() {
        let mut gone = opened(BreakerSettings::default());
        let probe_of_gone = gone.admit(at(60)).expect("half-open");
        drop(gone);
        let mut breaker = opened(BreakerSettings::default());
        let probe = breaker.admit(at(60)).expect("half-open");
        assert_eq!(
            breaker.settle(probe_of_gone, Verdict::Failure, at(61)),
            None
        );
        assert_eq!(
            breaker.settle(probe, Verdict::Success, at(62)),
            Some(Transition::Closed)
        );
    }

    #[test]
    fn a_probe_counts_at_its_first_content_and_never_again() {
        let settings = BreakerSettings {
            probes: 2,
            ..BreakerSettings::default()
        };
        let mut breaker = opened(settings);
        let first = breaker.admit(at(60)).expect("half-open");
        assert_eq!(breaker.first_content(first, at(61)), None, "one of two");
        let second = breaker.admit(at(61)).expect("the place is free at once");
        assert_eq!(breaker.settle(first, Verdict::Failure, at(62)), None);
        assert_eq!(breaker.first_content(first, at(62)), None);
        assert_eq!(
            breaker.first_content(second, at(63)),
            Some(Transition::Closed)
        );
        assert_eq!(breaker.settle(second, Verdict::Failure, at(64)), None);
        assert_eq!(breaker.snapshot(at(64)).failures_in_row, 0);
    }

    #[test]
    fn first_content_is_no_news_while_closed() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        for _ in 0..5 {
            let pass = breaker.admit(at(0)).expect("closed");
            assert!(!pass.is_probe());
            breaker.first_content(pass, at(0));
            breaker.settle(pass, Verdict::Failure, at(0));
        }
        assert_eq!(
            breaker.snapshot(at(0)).state,
            Open,
            "a stream that breaks half-way is a failure"
        );
    }

    #[test]
    fn recovery_checks_are_wanted_only_while_open_and_free() {
        let table = [
            ("", true, false),
            ("FFFFF", true, true),
            ("FFFFF", false, false),
            ("FFFFF h", true, false),
            ("FFFFF v^", true, false),
            ("FFFFF x", true, false),
            ("h", true, false),
        ];
        for (script, on, wanted) in table {
            let settings = BreakerSettings {
                recovery_check: if on { secs(2) } else { Duration::ZERO },
                ..BreakerSettings::default()
            };
            let (breaker, _) = play(script, settings);
            assert_eq!(breaker.wants_recovery_check(), wanted, "{script} {on}");
        }
    }

    #[test]
    fn a_recovery_check_that_is_switched_off_changes_nothing() {
        let settings = BreakerSettings {
            recovery_check: Duration::ZERO,
            ..BreakerSettings::default()
        };
        let (breaker, now) = play("FFFFF v^ !", settings);
        assert_eq!(breaker.snapshot(now).state, Open);
    }

    #[test]
    fn new_settings_hold_at_once_but_never_open_it() {
        let with = |failures, probes, open| BreakerSettings {
            failures,
            probes,
            open: secs(open),
            ..BreakerSettings::default()
        };
        let (mut breaker, now) = play("FFF", with(5, 1, 60));
        assert_eq!(breaker.configure(with(2, 1, 60), now), None);
        assert_eq!(breaker.snapshot(now).state, Closed);

        let (mut breaker, now) = play("F +10", with(1, 1, 60));
        assert_eq!(breaker.configure(with(1, 1, 20), now), None);
        assert_eq!(breaker.snapshot(now).next_probe_in, Some(secs(10)));
        assert_eq!(
            breaker.configure(with(1, 1, 10), now),
            Some(Transition::HalfOpened)
        );

        let (mut breaker, now) = play("F +60 SS", with(1, 3, 60));
        assert_eq!(
            breaker.configure(with(1, 2, 60), now),
            Some(Transition::Closed)
        );
    }

    #[test]
    fn a_leap_of_the_clock_is_harmless() {
        let far = Moment::at(Duration::MAX);
        let settings = BreakerSettings {
            open: Duration::MAX,
            ..BreakerSettings::default()
        };
        let (mut breaker, _) = play("FFFF SSSS FFFF", settings);
        let pass = breaker.admit(far).expect("closed");
        breaker.settle(pass, Verdict::Success, far);
        assert_eq!(breaker.snapshot(far).settled_last_minute, 1);

        let mut breaker = opened(BreakerSettings::default());
        let probe = breaker.admit(far).expect("half-open");
        assert!(breaker.admit(far).is_err());
        breaker.settle(probe, Verdict::Failure, far);
        assert!(breaker.admit(far).is_ok(), "there is no later moment");
    }

    #[test]
    fn time_that_runs_backwards_does_not_panic() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        for second in (0..100).rev() {
            if let Ok(pass) = breaker.admit(at(second)) {
                breaker.settle(pass, Verdict::Success, at(second));
            }
        }
        assert_eq!(breaker.snapshot(at(99)).settled_last_minute, 100);
    }

    #[test]
    fn the_snapshot_as_json() {
        let (mut breaker, now) = play("FFFFF +39", BreakerSettings::default());
        let now = now + Duration::from_millis(500);
        let json = serde_json::to_value(breaker.snapshot(now)).expect("plain data");
        assert_eq!(
            json,
            serde_json::json!({
                "state": "open",
                "reason": {"kind": "failures_in_row", "failures": 5},
                "held": false,
                "failures_in_row": 5,
                "failed_probes": 0,
                "settled_last_minute": 0,
                "failed_last_minute": 0,
                "probe_under_way": false,
                "next_probe_in_secs": 20.5,
            })
        );
        let now = now + secs(60);
        breaker.admit(now).expect("half-open");
        let snapshot = breaker.snapshot(now + secs(10));
        assert_eq!(snapshot.state, HalfOpen);
        assert!(snapshot.probe_under_way);
        assert_eq!(snapshot.next_probe_in, Some(secs(20)));
    }
}

/// Random histories, held against a model that recounts everything from a full record.
#[cfg(test)]
mod properties {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Act {
        Pass(Duration),
        /// So many calls come at the same moment.
        Admit(usize),
        /// Which of the calls let in so far, oldest first; settled ones too, to be ignored.
        FirstContent(prop::sample::Index),
        Settle(prop::sample::Index, Verdict),
        RecoveryCheck(bool),
        Configure(BreakerSettings),
        Reset,
        Probe,
        Hold,
        Release,
    }

    fn settings() -> impl Strategy<Value = BreakerSettings> {
        (
            0..4_u32,
            prop::sample::select(vec![0.0, 0.3, 0.5, 1.0]),
            0..4_u32,
            0..90_000_u64,
            prop::bool::weighted(0.8),
        )
            .prop_map(
                |(failures, failure_rate, probes, open, check)| BreakerSettings {
                    failures,
                    failure_rate,
                    probes,
                    open: Duration::from_millis(open),
                    recovery_check: Duration::from_secs(u64::from(check) * 2),
                },
            )
    }

    fn verdict() -> impl Strategy<Value = Verdict> {
        prop_oneof![
            4 => Just(Verdict::Success),
            4 => Just(Verdict::Failure),
            1 => Just(Verdict::ClientError),
            1 => Just(Verdict::Abandoned),
        ]
    }

    fn act() -> impl Strategy<Value = Act> {
        let pause = prop_oneof![
            6 => 0..3_000_u64,
            3 => 25_000..70_000_u64,
            1 => any::<u64>(),
        ];
        let index = any::<prop::sample::Index>;
        prop_oneof![
            10 => pause.prop_map(|millis| Act::Pass(Duration::from_millis(millis))),
            16 => (1..8_usize).prop_map(Act::Admit),
            3 => index().prop_map(Act::FirstContent),
            30 => (index(), verdict()).prop_map(|(call, verdict)| Act::Settle(call, verdict)),
            4 => any::<bool>().prop_map(Act::RecoveryCheck),
            1 => settings().prop_map(Act::Configure),
            1 => Just(Act::Reset),
            1 => Just(Act::Probe),
            1 => Just(Act::Hold),
            2 => Just(Act::Release),
        ]
    }

    /// Keeps every outcome and every probe since the last change of state, sums nothing up.
    struct Model {
        settings: BreakerSettings,
        state: State,
        held: bool,
        /// When the present state began.
        since: Moment,
        checks_failed: usize,
        /// Of the closed state: when, and whether it failed.
        outcomes: Vec<(Moment, bool)>,
        /// Of the half-open state: when it began, and how it ended.
        probes: Vec<(Moment, Option<Verdict>)>,
        failed_probes: usize,
        changes: usize,
        calls: Vec<ModelCall>,
    }

    struct ModelCall {
        change: usize,
        probe: Option<usize>,
        settled: bool,
    }

    impl Model {
        fn new(settings: BreakerSettings, now: Moment) -> Self {
            Self {
                settings,
                state: State::Closed,
                held: false,
                since: now,
                checks_failed: 0,
                outcomes: Vec::new(),
                probes: Vec::new(),
                failed_probes: 0,
                changes: 0,
                calls: Vec::new(),
            }
        }

        fn become_(&mut self, state: State, held: bool, now: Moment) {
            self.state = state;
            self.held = held;
            self.since = now;
            self.checks_failed = 0;
            self.outcomes.clear();
            self.probes.clear();
            self.changes += 1;
            if state == State::Closed {
                self.failed_probes = 0;
            }
        }

        fn open_span(&self) -> Duration {
            let mut span = self.settings.open;
            for _ in 0..self.failed_probes.min(6) {
                span *= 2;
            }
            span
        }

        fn elapse(&mut self, now: Moment) {
            if self.state == State::Open && !self.held && now.since(self.since) >= self.open_span()
            {
                self.become_(State::HalfOpen, false, now);
            }
        }

        fn probe_blocks(&self, now: Moment) -> bool {
            self.probes
                .iter()
                .any(|(began, end)| end.is_none() && now.since(*began) < Duration::from_secs(30))
        }

        fn good_probes(&self) -> usize {
            let good = |end: &Option<Verdict>| {
                matches!(end, Some(Verdict::Success | Verdict::ClientError))
            };
            self.probes.iter().filter(|(_, end)| good(end)).count()
        }

        fn admit(&mut self, now: Moment) -> bool {
            self.elapse(now);
            let probe = match self.state {
                State::Closed => None,
                State::HalfOpen if !self.probe_blocks(now) => {
                    self.probes.push((now, None));
                    Some(self.probes.len() - 1)
                }
                State::HalfOpen | State::Open => return false,
            };
            self.calls.push(ModelCall {
                change: self.changes,
                probe,
                settled: false,
            });
            true
        }

        fn settle(&mut self, call: usize, verdict: Verdict, now: Moment) {
            let call = &mut self.calls[call];
            if call.change != self.changes || call.settled {
                return;
            }
            call.settled = true;
            if let Some(probe) = call.probe {
                self.probes[probe].1 = Some(verdict);
                match verdict {
                    Verdict::Success | Verdict::ClientError => {
                        self.failed_probes = 0;
                        self.close_if_proven(now);
                    }
                    Verdict::Failure => {
                        self.failed_probes += 1;
                        self.become_(State::Open, false, now);
                    }
                    Verdict::Abandoned => {}
                }
                return;
            }
            match verdict {
                Verdict::Success => self.outcomes.push((now, false)),
                Verdict::Failure => self.outcomes.push((now, true)),
                Verdict::ClientError | Verdict::Abandoned => return,
            }
            let row = self
                .outcomes
                .iter()
                .rev()
                .take_while(|(_, failed)| *failed)
                .count();
            let (settled, failed) = self.last_minute(now);
            let by_row = self.settings.failures > 0 && row >= self.settings.failures as usize;
            let by_rate = self.settings.failure_rate > 0.0
                && settled >= 20
                && failed as f64 / settled as f64 >= self.settings.failure_rate;
            if by_row || by_rate {
                self.become_(State::Open, false, now);
            }
        }

        fn close_if_proven(&mut self, now: Moment) {
            if self.good_probes() >= self.settings.probes.max(1) as usize {
                self.become_(State::Closed, false, now);
            }
        }

        fn last_minute(&self, now: Moment) -> (usize, usize) {
            let second = |moment: Moment| moment.since(Moment::default()).as_secs();
            let recent = self
                .outcomes
                .iter()
                .filter(|(then, _)| second(now) - second(*then) < 60);
            let failed = recent.clone().filter(|(_, failed)| *failed).count();
            (recent.count(), failed)
        }

        fn recovery_check(&mut self, alive: bool, now: Moment) {
            self.elapse(now);
            let on = !self.settings.recovery_check.is_zero();
            if self.state != State::Open || self.held || !on {
                return;
            }
            if !alive {
                self.checks_failed += 1;
            } else if self.checks_failed > 0 {
                self.become_(State::HalfOpen, false, now);
            }
        }

        fn configure(&mut self, settings: BreakerSettings, now: Moment) {
            self.settings = settings;
            self.elapse(now);
            if self.state == State::HalfOpen {
                self.close_if_proven(now);
            }
        }

        fn person(&mut self, act: &Act, now: Moment) {
            match act {
                Act::Reset => self.become_(State::Closed, false, now),
                Act::Probe if self.state == State::Open => {
                    self.become_(State::HalfOpen, false, now);
                }
                Act::Hold if self.state == State::Open => self.held = true,
                Act::Hold => self.become_(State::Open, true, now),
                Act::Release if self.held => self.become_(State::HalfOpen, false, now),
                _ => {}
            }
        }
    }

    /// A transition is told exactly where the state changed, and names the new one.
    fn tells(before: State, told: Option<Transition>, after: State) -> bool {
        match told {
            None => before == after,
            Some(Transition::Opened { .. }) => before != State::Open && after == State::Open,
            Some(Transition::HalfOpened) => before != State::HalfOpen && after == State::HalfOpen,
            Some(Transition::Closed) => before != State::Closed && after == State::Closed,
        }
    }

    proptest! {
        #[test]
        fn it_behaves_as_the_naive_model(
            settings in settings(),
            acts in prop::collection::vec(act(), 1..250),
        ) {
            let mut now = Moment::at(Duration::from_millis(123_456));
            let mut model = Model::new(settings.clone(), now);
            let mut breaker = Breaker::new(settings);
            let mut passes: Vec<Pass> = Vec::new();

            for act in &acts {
                // Waits that are over are told of first, so that `told` below is the act's own.
                if let Act::Pass(span) = act {
                    now = now + *span;
                }
                breaker.elapse(now);
                model.elapse(now);
                let before = breaker.snapshot(now).state;
                let told = match act {
                    Act::Pass(_) => None,
                    Act::Admit(calls) => {
                        let mut let_in = 0;
                        for _ in 0..*calls {
                            let refusal = breaker.refusal(now);
                            let admitted = breaker.admit(now);
                            prop_assert_eq!(admitted.err(), refusal);
                            prop_assert_eq!(admitted.is_ok(), model.admit(now));
                            if let Ok(pass) = admitted {
                                prop_assert_eq!(pass.is_probe(), before == State::HalfOpen);
                                passes.push(pass);
                                let_in += 1;
                            }
                        }
                        match before {
                            State::Closed => prop_assert_eq!(let_in, *calls),
                            State::Open => prop_assert_eq!(let_in, 0),
                            State::HalfOpen => prop_assert!(let_in <= 1),
                        }
                        None
                    }
                    Act::FirstContent(index) if !passes.is_empty() => {
                        let call = index.index(passes.len());
                        if model.calls[call].probe.is_some() {
                            model.settle(call, Verdict::Success, now);
                        }
                        breaker.first_content(passes[call], now)
                    }
                    Act::Settle(index, verdict) if !passes.is_empty() => {
                        let call = index.index(passes.len());
                        // Owners settle an ordinary call once; a probe may be settled again.
                        if model.calls[call].settled && model.calls[call].probe.is_none() {
                            continue;
                        }
                        model.settle(call, *verdict, now);
                        breaker.settle(passes[call], *verdict, now)
                    }
                    Act::FirstContent(_) | Act::Settle(..) => None,
                    Act::RecoveryCheck(alive) => {
                        model.recovery_check(*alive, now);
                        breaker.recovery_check(*alive, now)
                    }
                    Act::Configure(settings) => {
                        model.configure(settings.clone(), now);
                        breaker.configure(settings.clone(), now)
                    }
                    Act::Reset => { model.person(act, now); breaker.reset(now) }
                    Act::Probe => { model.person(act, now); breaker.probe(now) }
                    Act::Hold => { model.person(act, now); breaker.hold(now) }
                    Act::Release => { model.person(act, now); breaker.release(now) }
                };

                // Where `open` is zero, what has just opened reads as half-open already.
                let after = breaker.snapshot(now);
                if let Some(Transition::Opened { until, .. }) = told && until <= now {
                    prop_assert_eq!(after.state, State::HalfOpen);
                } else {
                    prop_assert!(
                        tells(before, told, after.state),
                        "{:?}, told {:?}, {:?}", before, told, after
                    );
                }
                model.elapse(now);
                prop_assert_eq!(after.state, model.state);
                prop_assert_eq!(after.held, model.held);
                prop_assert_eq!(after.failed_probes as usize, model.failed_probes);
                let (settled, failed) = model.last_minute(now);
                prop_assert_eq!(after.settled_last_minute as usize, settled);
                prop_assert_eq!(after.failed_last_minute as usize, failed);
                prop_assert_eq!(after.probe_under_way, model.probe_blocks(now));
                let wait = match model.state {
                    State::Open if !model.held => {
                        Some((model.since + model.open_span()).since(now))
                    }
                    State::HalfOpen => Some(
                        model.probes.last().filter(|_| model.probe_blocks(now)).map_or(
                            Duration::ZERO,
                            |(began, _)| (*began + Duration::from_secs(30)).since(now),
                        ),
                    ),
                    State::Open | State::Closed => None,
                };
                prop_assert_eq!(after.next_probe_in, wait);
            }
        }

        #[test]
        fn two_probes_never_block_at_once(
            acts in prop::collection::vec((0..20_000_u64, any::<bool>()), 1..120),
        ) {
            let settings = BreakerSettings { failures: 1, ..BreakerSettings::default() };
            let mut now = Moment::at(Duration::from_secs(1_000));
            let mut breaker = Breaker::new(settings);
            breaker.hold(now);
            breaker.release(now);
            let mut live: Vec<(Pass, Moment)> = Vec::new();
            for (millis, leave) in acts {
                now = now + Duration::from_millis(millis);
                if leave && let Some((pass, _)) = live.pop() {
                    breaker.settle(pass, Verdict::Abandoned, now);
                }
                if let Ok(pass) = breaker.admit(now) {
                    live.push((pass, now));
                }
                let fresh = live.iter().filter(|(_, began)| now.since(*began) < PROBE_PATIENCE);
                prop_assert_eq!(fresh.count(), 1, "one tries, whatever the others do");
            }
        }
    }
}
