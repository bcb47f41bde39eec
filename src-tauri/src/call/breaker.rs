//! A call's leave to go upstream: a permit of the pool and a pass of the breakers.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::error::CallError;
use super::pool::{Permit, QueueFull};
use crate::clock::{Clock, Moment};
use crate::core::Core;
use crate::policy::breaker::{OpenReason, Transition};
use crate::provider::Provider;
use crate::provider::recovery;
use crate::provider::state::{Change, Health, Passes, Refused};

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

fn report(core: &Arc<Core>, provider: &Arc<Provider>, changes: &[Change], now: Moment) {
    for change in changes {
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

fn breaker_open(provider: &Provider, refused: &Refused) -> CallError {
    let refusal = &refused.refusal;
    let seconds = refusal.retry_after_secs();
    let next = if refusal.held {
        "It is held open by hand; release it to go on".to_owned()
    } else if refusal.half_open {
        "One call is trying it out right now".to_owned()
    } else if refused.model.is_some() || provider.settings.breaker.recovery_check.is_zero() {
        format!("The next try is in {seconds} s (breaker.open_secs)")
    } else {
        format!(
            "The next try is in {seconds} s (breaker.open_secs), sooner if a recovery check finds it well"
        )
    };
    CallError::BreakerOpen {
        subject: match &refused.model {
            Some(model) => format!("{}'s model {model}", provider.name()),
            None => provider.name().to_string(),
        },
        last_error: refused
            .last_error
            .as_deref()
            .unwrap_or("its calls failed")
            .to_owned(),
        next,
        retry_after: refusal.retry_after,
    }
}
