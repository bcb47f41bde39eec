//! What a provider's calls share while Traygate runs, across changes of its settings: the pool,
//! the breakers and the last thing that went wrong.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::call::pool::Pool;
use crate::clock::Moment;
use crate::policy::breaker::{Breaker, BreakerSettings, Pass, Refusal, State, Transition, Verdict};
use crate::settings::ProviderSettings;

/// Models of one provider that have been overloaded: a bound on what a client that makes up
/// model names can fill.
const MODEL_BREAKERS: usize = 256;

/// A provider's pool and breakers.
pub struct ProviderState {
    pub pool: Pool,
    // std Mutex: held for a decision, never across an await.
    breakers: Mutex<Breakers>,
    /// Any model has a breaker: calls look no further while none has.
    overloads: AtomicBool,
    /// Told when a breaker opens, so that those who wait for a permit are refused at once.
    opened: Notify,
    /// A recovery check runs.
    checking: AtomicBool,
}

struct Breakers {
    settings: BreakerSettings,
    provider: Breaker,
    models: HashMap<Arc<str>, Breaker>,
    last_error: Option<Arc<str>>,
}

/// What a call was admitted under.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    provider: Pass,
    model: Option<Pass>,
}

impl Passes {
    pub fn is_probe(&self) -> bool {
        self.provider.is_probe() || self.model.is_some_and(|pass| pass.is_probe())
    }
}

/// Which breaker refuses, and when it may be tried again.
#[derive(Clone, Debug)]
pub struct Refused {
    pub refusal: Refusal,
    /// The overloaded model, where it is the model's own breaker.
    pub model: Option<Arc<str>>,
    pub last_error: Option<Arc<str>>,
}

/// How a call ended, as its breakers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Success,
    Failure,
    /// A 529 or an `overloaded_error`: the model's own failure, and the provider's sign of life.
    Overloaded,
    /// A 4xx: neither, but a sign of life.
    ClientError,
    /// The caller left, or the call never reached the provider.
    Abandoned,
}

/// A breaker that changed its state.
#[derive(Clone, Debug)]
pub struct Change {
    /// The model whose breaker it is; `None` for the provider's.
    pub model: Option<Arc<str>>,
    pub transition: Transition,
}

impl ProviderState {
    pub fn new(settings: &ProviderSettings) -> ProviderState {
        ProviderState {
            pool: Pool::new(settings.limits.concurrency, settings.limits.queue),
            breakers: Mutex::new(Breakers {
                settings: settings.breaker.clone(),
                provider: Breaker::new(settings.breaker.clone()),
                models: HashMap::new(),
                last_error: None,
            }),
            overloads: AtomicBool::new(false),
            opened: Notify::new(),
            checking: AtomicBool::new(false),
        }
    }

    /// Applies changed settings; no call in flight or in the queue is dropped. Tells of breakers
    /// that the new settings moved.
    #[must_use]
    pub fn configure(&self, settings: &ProviderSettings, now: Moment) -> Vec<Change> {
        self.pool.resize(settings.limits.concurrency);
        self.pool.set_queue(settings.limits.queue);
        let mut breakers = self.lock();
        let breakers = &mut *breakers;
        breakers.settings = settings.breaker.clone();
        let mut changes = Vec::new();
        let transition = breakers.provider.configure(settings.breaker.clone(), now);
        changes.extend(transition.map(|transition| Change {
            model: None,
            transition,
        }));
        for (model, breaker) in &mut breakers.models {
            let transition = breaker.configure(settings.breaker.clone(), now);
            changes.extend(transition.map(|transition| Change {
                model: Some(model.clone()),
                transition,
            }));
        }
        changes
    }

    fn lock(&self) -> MutexGuard<'_, Breakers> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looks_at_model<'a>(&self, model: Option<&'a Arc<str>>) -> Option<&'a Arc<str>> {
        model.filter(|_| self.overloads.load(Ordering::Acquire))
    }

    /// Would a call of `model` be refused now? Claims nothing.
    pub fn refusal(&self, model: Option<&Arc<str>>, now: Moment) -> Option<Refused> {
        let breakers = self.lock();
        if let Some(refusal) = breakers.provider.refusal(now) {
            return Some(breakers.refused(refusal, None));
        }
        let model = self.looks_at_model(model)?;
        let refusal = breakers.models.get(model)?.refusal(now)?;
        Some(breakers.refused(refusal, Some(model.clone())))
    }

    /// Lets a call through or refuses it, in one step for both breakers. Tells of breakers that
    /// the passing of time has made half-open.
    pub fn admit(
        &self,
        model: Option<&Arc<str>>,
        now: Moment,
    ) -> (Result<Passes, Refused>, Vec<Change>) {
        let model = self.looks_at_model(model);
        let mut guard = self.lock();
        let changes = guard.elapse(model, now);
        (guard.admit(model, now), changes)
    }

    /// A probe's first content proves life before its end does.
    pub fn first_content(
        &self,
        passes: &Passes,
        model: Option<&Arc<str>>,
        now: Moment,
    ) -> Vec<Change> {
        if !passes.is_probe() {
            return Vec::new();
        }
        let mut guard = self.lock();
        let breakers = &mut *guard;
        let mut changes = Vec::new();
        let transition = breakers.provider.first_content(passes.provider, now);
        changes.extend(transition.map(|transition| Change {
            model: None,
            transition,
        }));
        if let (Some(pass), Some(model)) = (passes.model, model)
            && let Some(breaker) = breakers.models.get_mut(model)
        {
            let transition = breaker.first_content(pass, now);
            changes.extend(transition.map(|transition| Change {
                model: Some(model.clone()),
                transition,
            }));
        }
        changes
    }

    /// Counts how a call ended.
    pub fn settle(
        &self,
        passes: &Passes,
        model: Option<&Arc<str>>,
        health: Health,
        error: Option<&Arc<str>>,
        now: Moment,
    ) -> Vec<Change> {
        let mut guard = self.lock();
        let breakers = &mut *guard;
        if let Some(error) = error
            && matches!(health, Health::Failure | Health::Overloaded)
        {
            breakers.last_error = Some(error.clone());
        }
        let (provider, of_model) = match health {
            Health::Success => (Verdict::Success, Verdict::Success),
            Health::Failure => (Verdict::Failure, Verdict::Abandoned),
            Health::Overloaded => (Verdict::ClientError, Verdict::Failure),
            Health::ClientError => (Verdict::ClientError, Verdict::ClientError),
            Health::Abandoned => (Verdict::Abandoned, Verdict::Abandoned),
        };
        let mut changes = Vec::new();
        let transition = breakers.provider.settle(passes.provider, provider, now);
        changes.extend(transition.map(|transition| Change {
            model: None,
            transition,
        }));
        if let Some(model) = model
            && (passes.model.is_some() || health == Health::Overloaded)
        {
            let transition = breakers.settle_model(model, passes.model, of_model, now);
            self.overloads
                .store(!breakers.models.is_empty(), Ordering::Release);
            changes.extend(transition.map(|transition| Change {
                model: Some(model.clone()),
                transition,
            }));
        }
        drop(guard);
        if changes
            .iter()
            .any(|change| matches!(change.transition, Transition::Opened { .. }))
        {
            self.opened.notify_waiters();
        }
        changes
    }

    /// Resolves at the next opening of one of the breakers.
    pub fn opening(&self) -> Notified<'_> {
        self.opened.notified()
    }

    /// Tells the breaker what a recovery check found.
    pub fn recovery_check(&self, alive: bool, now: Moment) -> Option<Transition> {
        self.lock().provider.recovery_check(alive, now)
    }

    /// True while the provider's breaker is open and wants to be checked.
    pub fn wants_recovery_check(&self) -> bool {
        self.lock().provider.wants_recovery_check()
    }

    /// Claims the one recovery check; false if it runs already. [`ProviderState::end_check`]
    /// gives it back.
    pub fn begin_check(&self) -> bool {
        !self.checking.swap(true, Ordering::AcqRel)
    }

    pub fn end_check(&self) {
        self.checking.store(false, Ordering::Release);
    }
}

impl Breakers {
    fn elapse(&mut self, model: Option<&Arc<str>>, now: Moment) -> Vec<Change> {
        let mut changes = Vec::new();
        let transition = self.provider.elapse(now);
        changes.extend(transition.map(|transition| Change {
            model: None,
            transition,
        }));
        if let Some(model) = model
            && let Some(breaker) = self.models.get_mut(model)
        {
            let transition = breaker.elapse(now);
            changes.extend(transition.map(|transition| Change {
                model: Some(model.clone()),
                transition,
            }));
        }
        changes
    }

    fn admit(&mut self, model: Option<&Arc<str>>, now: Moment) -> Result<Passes, Refused> {
        let provider = match self.provider.admit(now) {
            Ok(pass) => pass,
            Err(refusal) => return Err(self.refused(refusal, None)),
        };
        let mut passes = Passes {
            provider,
            model: None,
        };
        if let Some(model) = model
            && let Some(breaker) = self.models.get_mut(model)
        {
            match breaker.admit(now) {
                Ok(pass) => passes.model = Some(pass),
                Err(refusal) => {
                    self.provider.settle(provider, Verdict::Abandoned, now);
                    return Err(self.refused(refusal, Some(model.clone())));
                }
            }
        }
        Ok(passes)
    }

    fn refused(&self, refusal: Refusal, model: Option<Arc<str>>) -> Refused {
        Refused {
            refusal,
            model,
            last_error: self.last_error.clone(),
        }
    }

    /// A model gets a breaker with its first overload; one that has recovered loses it.
    fn settle_model(
        &mut self,
        model: &Arc<str>,
        pass: Option<Pass>,
        verdict: Verdict,
        now: Moment,
    ) -> Option<Transition> {
        if !self.models.contains_key(model) {
            if self.models.len() >= MODEL_BREAKERS {
                self.models
                    .retain(|_, breaker| breaker.snapshot(now).state != State::Closed);
            }
            if self.models.len() >= MODEL_BREAKERS {
                return None;
            }
            self.models
                .insert(model.clone(), Breaker::new(self.settings.clone()));
        }
        let breaker = self.models.get_mut(model)?;
        let pass = match pass {
            Some(pass) => pass,
            // The call began before its model had a breaker: it counts while that is closed.
            None if breaker.snapshot(now).state == State::Closed => breaker.admit(now).ok()?,
            None => return None,
        };
        let transition = breaker.settle(pass, verdict, now);
        let left = breaker.snapshot(now);
        if left.state == State::Closed && left.failures_in_row + left.failed_last_minute == 0 {
            self.models.remove(model);
        }
        transition
    }
}
