//! A call's leave to go upstream: a permit of the pool and a pass of the breakers.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::error::CallError;
use super::pool::{Permit, QueueFull};
use crate::clock::{Clock, Moment};
use crate::core::Core;
use crate::events::{self, Event};
use crate::policy::breaker::{OpenReason, Transition};
use crate::provider::Provider;
use crate::provider::recovery;
use crate::provider::state::{Change, Health, Passes, Refused};
use crate::settings::Setting;

/// Leave to make one upstream call. Dropping it frees the permit and, if nothing was settled,
/// tells the breakers that the call was abandoned.
pub struct Leave {
    trial: Trial,
    _permit: Permit,
    /// How long the call waited for its permit.
    pub queued: Duration,
}

impl Leave {
    /// Waits for a permit in order of arrival and passes the breakers.
    ///
    /// A call that a breaker would refuse is refused before it waits, one that waits when a
    /// breaker opens is refused at once. A probe has a permit of its own, since hung calls may
    /// hold all the others.
    ///
    /// # Errors
    /// [`CallError::BreakerOpen`], [`CallError::QueueFull`], [`CallError::QueueTimeout`].
    pub async fn wait(
        core: &Arc<Core>,
        provider: &Arc<Provider>,
        model: Option<Arc<str>>,
    ) -> Result<Leave, CallError> {
        let pool = &provider.state.pool;
        let began = core.clock.now();
        let trial = Trial::admit(core, provider, model, began)?;
        if trial.passes.is_probe() {
            return Ok(Leave {
                trial,
                _permit: pool.extra_permit(),
                queued: Duration::ZERO,
            });
        }
        let waiting = pool.enter().map_err(|full| queue_full(provider, &full))?;
        let waiting = match waiting.try_ready() {
            Ok(permit) => {
                return Ok(Leave {
                    trial,
                    _permit: permit,
                    queued: Duration::ZERO,
                });
            }
            Err(waiting) => waiting,
        };
        // Time in the queue says nothing of the provider: the pass is taken anew at its end.
        let model = trial.model.clone();
        drop(trial);
        let limit = provider.settings.limits.queue_wait;
        let permit = tokio::select! {
            biased;
            permit = waiting => permit,
            refused = refused_while_waiting(core.clock, provider, model.as_ref()) => {
                return Err(breaker_open(provider, &refused));
            }
            () = tokio::time::sleep(limit) => {
                return Err(CallError::QueueTimeout {
                    provider: provider.name().clone(),
                    concurrency: provider.settings.limits.concurrency,
                    waited: limit,
                    in_force: provider.settings.in_force.clone(),
                    retry_after: RETRY_A_FULL_QUEUE,
                });
            }
        };
        let now = core.clock.now();
        let trial = Trial::admit(core, provider, model, now)?;
        Ok(Leave {
            trial,
            _permit: permit,
            queued: now.since(began),
        })
    }

    /// The answer's first content has come.
    pub fn first_content(&self, now: Moment) {
        self.trial.first_content(now);
    }

    /// Counts how the call ended; the permit goes back with it.
    pub fn settle(mut self, health: Health, error: Option<&Arc<str>>, now: Moment) {
        self.trial.settle(health, error, now);
    }
}

/// How soon a caller that found the queue full may try again.
const RETRY_A_FULL_QUEUE: Duration = Duration::from_secs(5);

fn queue_full(provider: &Provider, full: &QueueFull) -> CallError {
    CallError::QueueFull {
        provider: provider.name().clone(),
        limit: full.limit,
        in_force: provider.settings.in_force.clone(),
        retry_after: RETRY_A_FULL_QUEUE,
    }
}

async fn refused_while_waiting(
    clock: Clock,
    provider: &Provider,
    model: Option<&Arc<str>>,
) -> Refused {
    loop {
        let opening = provider.state.opening();
        // It is enlisted before the check, so that no opening falls between the two.
        tokio::pin!(opening);
        opening.as_mut().enable();
        if let Some(refused) = provider.state.refusal(model, clock.now()) {
            return refused;
        }
        opening.await;
    }
}

/// A pass of the breakers, settled once.
struct Trial {
    core: Arc<Core>,
    provider: Arc<Provider>,
    model: Option<Arc<str>>,
    passes: Passes,
    settled: bool,
}

impl Trial {
    fn admit(
        core: &Arc<Core>,
        provider: &Arc<Provider>,
        model: Option<Arc<str>>,
        now: Moment,
    ) -> Result<Trial, CallError> {
        let (admitted, changes) = provider.state.admit(model.as_ref(), now);
        report(core, provider, &changes, now);
        let passes = admitted.map_err(|refused| breaker_open(provider, &refused))?;
        if passes.is_probe() {
            info!(provider = %provider.name(), "trying the provider with one call");
        }
        Ok(Trial {
            core: core.clone(),
            provider: provider.clone(),
            model,
            passes,
            settled: false,
        })
    }

    fn first_content(&self, now: Moment) {
        let changes = self
            .provider
            .state
            .first_content(&self.passes, self.model.as_ref(), now);
        report(&self.core, &self.provider, &changes, now);
    }

    fn settle(&mut self, health: Health, error: Option<&Arc<str>>, now: Moment) {
        self.settled = true;
        let changes =
            self.provider
                .state
                .settle(&self.passes, self.model.as_ref(), health, error, now);
        report(&self.core, &self.provider, &changes, now);
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if !self.settled {
            let now = self.core.clock.now();
            self.settle(Health::Abandoned, None, now);
        }
    }
}

/// Tells of breakers that changed: in the log, to whoever watches, and to the recovery check.
pub fn report(core: &Arc<Core>, provider: &Arc<Provider>, changes: &[Change], now: Moment) {
    for change in changes {
        core.events.tell(|| {
            Event::State(events::Change::Breaker {
                provider: provider.name().clone(),
                model: change.model.clone(),
                state: change.transition.state(),
            })
        });
        let model = change.model.as_deref();
        match &change.transition {
            Transition::Opened { until, reason } => {
                let next_secs = (*reason != OpenReason::Held).then(|| until.since(now).as_secs());
                let reason = opened_by(*reason);
                warn!(provider = %provider.name(), model, reason, next_secs, "breaker opened");
                if change.model.is_none() {
                    recovery::watch(core, provider);
                }
            }
            Transition::HalfOpened => {
                info!(provider = %provider.name(), model, "breaker half-open: the next call tries");
            }
            Transition::Closed => info!(provider = %provider.name(), model, "breaker closed"),
        }
    }
}

/// What opened a breaker, in words.
pub fn opened_by(reason: OpenReason) -> String {
    match reason {
        OpenReason::FailuresInRow { failures } => format!("{failures} failures in a row"),
        OpenReason::FailureRate { failed, settled } => {
            format!("{failed} of the last minute's {settled} calls failed")
        }
        OpenReason::ProbeFailed => "the trial call failed".to_owned(),
        OpenReason::Held => "held open by hand".to_owned(),
    }
}

/// The provider, or its one model that is meant.
fn subject(provider: &Provider, refused: &Refused) -> String {
    match &refused.model {
        Some(model) => format!("{}'s model {model}", provider.name()),
        None => provider.name().to_string(),
    }
}

fn breaker_open(provider: &Provider, refused: &Refused) -> CallError {
    let refusal = &refused.refusal;
    let seconds = refusal.retry_after_secs();
    if refusal.held {
        return CallError::BreakerHeld {
            subject: subject(provider, refused),
            retry_after: refusal.retry_after,
        };
    }
    let open_secs = provider.settings.in_force.name(Setting::OpenSecs);
    let next = if refusal.half_open {
        "One call is trying it out right now".to_owned()
    } else if refused.model.is_some() || provider.settings.breaker.recovery_check.is_zero() {
        format!("The next try is in {seconds} s ({open_secs})")
    } else {
        format!(
            "The next try is in {seconds} s ({open_secs}), sooner if a recovery check finds it well"
        )
    };
    CallError::BreakerOpen {
        subject: subject(provider, refused),
        last_error: refused
            .last_error
            .as_deref()
            .unwrap_or("its calls failed")
            .to_owned(),
        next,
        retry_after: refusal.retry_after,
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use futures_util::FutureExt as _;
    use tempfile::TempDir;

    use super::*;
    use crate::keys::Keys;
    use crate::settings::{Overrides, Settings};
    use crate::store::Store;

    const SECOND: Duration = Duration::from_secs(1);

    /// A provider with two places, whose breaker one failure opens for a minute.
    struct Bench {
        core: Arc<Core>,
        provider: Arc<Provider>,
        _folder: TempDir,
    }

    impl Bench {
        async fn new() -> Bench {
            // The clock's origin may be that of a test beside this one, which began a moment later:
            // it is asked before time leaps, and looked at well after that.
            let _ = Clock::Tokio.now();
            tokio::time::advance(60 * SECOND).await;
            let folder = tempfile::tempdir().expect("a scratch folder");
            let text = "[limits]\nconcurrency = 2\nqueue_secs = 300\n\
                        [breaker]\nfailures = 1\nrecovery_check_secs = 0\n";
            let settings = Settings::parse(text, &Overrides::default()).expect("settings");
            let store = Store::open(folder.path(), Clock::Tokio).expect("a folder of its own");
            let core = Core::new(settings, store, Keys::empty(), Clock::Tokio);
            let provider = core.world().provider("openai").expect("shipped").clone();
            Bench {
                core: Arc::new(core),
                provider,
                _folder: folder,
            }
        }

        async fn enter(&self) -> Result<Leave, CallError> {
            Leave::wait(&self.core, &self.provider, None).await
        }

        fn settle(&self, leave: Leave, health: Health) {
            leave.settle(health, None, self.core.clock.now());
        }

        /// A breaker that is half-open with its place free.
        async fn half_open() -> Bench {
            let bench = Bench::new().await;
            let leave = bench.enter().await.expect("closed");
            bench.settle(leave, Health::Failure);
            assert!(bench.enter().await.is_err(), "open");
            tokio::time::advance(60 * SECOND).await;
            bench
        }

        /// Permits out, the extra ones, and callers in the queue.
        fn standing(&self) -> (usize, usize, usize) {
            let pool = self.provider.state.pool.snapshot();
            (pool.in_flight, pool.extra, pool.waiting)
        }

        fn refuses(&self) -> bool {
            let now = self.core.clock.now();
            self.provider.state.refusal(None, now).is_some()
        }
    }

    /// The ways to lose a leave without having settled it.
    async fn lose(bench: &Bench, way: &str) {
        match way {
            "early error" => {
                let attempt: Result<(), CallError> = async {
                    let _leave = bench.enter().await?;
                    Err(CallError::Internal)
                }
                .await;
                assert_eq!(attempt, Err(CallError::Internal));
            }
            "dropped call" => {
                let call = async {
                    let _leave = bench.enter().await;
                    std::future::pending::<()>().await;
                };
                assert!(tokio::time::timeout(SECOND, call).await.is_err());
            }
            "panic" => {
                let call = async {
                    let _leave = bench.enter().await;
                    panic!("in the middle of a call");
                };
                let call: Result<(), _> = AssertUnwindSafe(call).catch_unwind().await;
                assert!(call.is_err());
            }
            _ => unreachable!(),
        }
    }

    const WAYS: [&str; 3] = ["early error", "dropped call", "panic"];

    #[tokio::test(start_paused = true)]
    async fn a_leave_that_is_lost_frees_its_place_and_counts_as_nothing() {
        for way in WAYS {
            let bench = Bench::new().await;
            for _ in 0..3 {
                lose(&bench, way).await;
                assert_eq!(bench.standing(), (0, 0, 0), "{way}");
                assert!(!bench.refuses(), "{way} is no failure");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_is_lost_frees_its_place_and_counts_as_nothing() {
        for way in WAYS {
            let bench = Bench::half_open().await;
            for _ in 0..3 {
                lose(&bench, way).await;
                assert_eq!(bench.standing(), (0, 0, 0), "{way}");
            }
            let probe = bench.enter().await.expect("a free place");
            assert_eq!(bench.standing(), (0, 1, 0), "a permit of its own");
            assert!(bench.enter().await.is_err(), "one at a time");
            bench.settle(probe, Health::Success);
            let ordinary = bench.enter().await.expect("closed");
            assert_eq!(bench.standing(), (1, 0, 0));
            drop(ordinary);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_in_the_queue_that_is_lost_goes_to_the_next() {
        for way in WAYS {
            let bench = Bench::new().await;
            let (one, two) = tokio::join!(bench.enter(), bench.enter());
            let held = (one.expect("a place"), two.expect("a place"));
            {
                let mut lost = Box::pin(lose(&bench, way));
                assert!(lost.as_mut().now_or_never().is_none());
                let mut next = Box::pin(bench.enter());
                assert!(next.as_mut().now_or_never().is_none());
                assert_eq!(bench.standing(), (2, 0, 2), "{way}");
                match way {
                    // It is dropped while it waits.
                    "dropped call" => tokio::time::timeout(2 * SECOND, lost).await.unwrap_or(()),
                    // It gets its permit and loses that.
                    _ => {
                        drop(held.0);
                        lost.await;
                        assert!(next.await.is_ok(), "{way}");
                        continue;
                    }
                }
                drop(held.0);
                assert!(next.await.is_ok(), "{way}");
            }
            drop(held.1);
            assert_eq!(bench.standing(), (0, 0, 0), "{way}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hung_probe_lets_another_try_after_thirty_seconds_and_still_counts() {
        let bench = Bench::half_open().await;
        let hung = bench.enter().await.expect("a free place");
        tokio::time::advance(29 * SECOND).await;
        let Err(CallError::BreakerOpen { retry_after, .. }) = bench.enter().await else {
            panic!("one at a time");
        };
        assert_eq!(retry_after, SECOND);
        tokio::time::advance(SECOND).await;
        let second = bench.enter().await.expect("another may try");
        assert!(bench.enter().await.is_err(), "and only one");
        assert_eq!(bench.standing(), (0, 2, 0));
        // The first comes to life after all.
        hung.first_content(bench.core.clock.now());
        assert!(!bench.refuses());
        // What becomes of the second began before the closing and changes nothing.
        bench.settle(second, Health::Failure);
        assert!(bench.enter().await.is_ok());
        drop(hung);
        assert_eq!(bench.standing(), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_the_queue_does_not_make_an_old_pass_count() {
        let bench = Bench::new().await;
        let one = bench.enter().await.expect("a place");
        let two = bench.enter().await.expect("a place");
        let mut waits = Box::pin(bench.enter());
        assert!(waits.as_mut().now_or_never().is_none());
        tokio::time::advance(5 * SECOND).await;
        bench.settle(one, Health::Failure);
        // Its permit is free, and the breaker is open: that is what it is told.
        assert!(matches!(waits.await, Err(CallError::BreakerOpen { .. })));
        bench.settle(two, Health::Failure);
        assert_eq!(bench.standing(), (0, 0, 0));
        tokio::time::advance(60 * SECOND).await;
        assert!(
            bench.enter().await.is_ok(),
            "the second failure was of before"
        );
    }
}
