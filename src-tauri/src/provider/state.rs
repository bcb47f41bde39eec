//! What a provider's calls share while Traygate runs, across changes of its settings: the pool,
//! the breakers, what it refuses to be asked, and the last thing that went wrong.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::call::pool::Pool;
use crate::clock::Moment;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use utoipa::ToSchema;

use crate::policy::breaker::{
    Breaker, BreakerSettings, Pass, Refusal, Snapshot, State, Transition, Verdict,
};
use crate::settings::ProviderSettings;

/// Models of one provider that have been overloaded: a bound on what a client that makes up
/// model names can fill.
const MODEL_BREAKERS: usize = 256;

/// Models of one provider that refuse to be asked for their usage; when there are more, it is the
/// provider.
const REFUSING_MODELS: usize = 64;

/// A provider's pool and breakers.
pub struct ProviderState {
    pub pool: Pool,
    // std Mutex: held for a decision, never across an await.
    breakers: Mutex<Guards>,
    /// Any model has a breaker: calls look no further while none has.
    overloads: AtomicBool,
    /// Told when a breaker opens, so that those who wait for a permit are refused at once.
    opened: Notify,
    /// Told when the settings change, so that a recovery check does not sleep by the old ones.
    configured: Notify,
    /// A recovery check runs.
    checking: AtomicBool,
    /// Models whose streams are not asked for their usage any more.
    unasked: Mutex<HashSet<Arc<str>>>,
    /// There are any: calls look no further while there are none.
    any_unasked: AtomicBool,
    /// A call has gone to it.
    used: AtomicBool,
}

struct Guards {
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

/// What a person does to a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Closes it.
    Reset,
    /// Makes it half-open: the next call tries.
    Probe,
    /// Holds it open.
    Hold,
    /// Ends the hold: it goes on half-open.
    Release,
}

/// A provider's breakers at one moment.
#[derive(Clone, Debug)]
pub struct Breakers {
    pub provider: Snapshot,
    /// Those of models that have been overloaded, by name.
    pub models: Vec<(Arc<str>, Snapshot)>,
    /// The last thing that went wrong, in words.
    pub last_error: Option<Arc<str>>,
}

impl ProviderState {
    pub fn new(settings: &ProviderSettings) -> ProviderState {
        ProviderState {
            pool: Pool::new(settings.limits.concurrency, settings.limits.queue),
            breakers: Mutex::new(Guards {
                settings: settings.breaker.clone(),
                provider: Breaker::new(settings.breaker.clone()),
                models: HashMap::new(),
                last_error: None,
            }),
            overloads: AtomicBool::new(false),
            opened: Notify::new(),
            configured: Notify::new(),
            checking: AtomicBool::new(false),
            unasked: Mutex::default(),
            any_unasked: AtomicBool::new(false),
            used: AtomicBool::new(false),
        }
    }

    /// Applies changed settings; no call in flight or in the queue is dropped. Tells of breakers
    /// that the new settings moved.
    #[must_use]
    pub fn configure(&self, settings: &ProviderSettings, now: Moment) -> Vec<Change> {
        self.pool.resize(settings.limits.concurrency);
        self.pool.set_queue(settings.limits.queue);
        // It may be another one now.
        self.lock_unasked().clear();
        self.any_unasked.store(false, Ordering::Release);
        let mut guards = self.lock();
        let breakers = &mut *guards;
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
        drop(guards);
        self.configured.notify_waiters();
        changes
    }

    fn lock(&self) -> MutexGuard<'_, Guards> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looks_at_model<'a>(&self, model: Option<&'a Arc<str>>) -> Option<&'a Arc<str>> {
        model.filter(|_| self.overloads.load(Ordering::Acquire))
    }

    fn lock_unasked(&self) -> MutexGuard<'_, HashSet<Arc<str>>> {
        self.unasked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has refused to be asked for the usage of a stream of this model.
    pub fn usage_refused(&self, model: &Arc<str>) {
        let mut unasked = self.lock_unasked();
        if unasked.len() < REFUSING_MODELS {
            unasked.insert(model.clone());
        }
        self.any_unasked.store(true, Ordering::Release);
    }

    /// Streams of this model are better not asked for their usage.
    pub fn refuses_usage(&self, model: &str) -> bool {
        if !self.any_unasked.load(Ordering::Acquire) {
            return false;
        }
        let unasked = self.lock_unasked();
        unasked.len() >= REFUSING_MODELS || unasked.contains(model)
    }

    /// A call goes to it.
    pub fn mark_used(&self) {
        // Looked at first: writing would take the line from the other cores with every call.
        if !self.is_used() {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    pub fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// How the breakers stand at `now`.
    pub fn snapshot(&self, now: Moment) -> Breakers {
        let guards = self.lock();
        let models = guards.models.iter();
        let mut models: Vec<_> = models
            .map(|(model, breaker)| (model.clone(), breaker.snapshot(now)))
            .collect();
        models.sort_by(|(one, _), (other, _)| one.cmp(other));
        Breakers {
            provider: guards.provider.snapshot(now),
            models,
            last_error: guards.last_error.clone(),
        }
    }

    /// Does what a person wants of the provider's breaker, or of a model's own, which is made if
    /// there is none yet. `None`: there are too many models to hold one more.
    pub fn command(
        &self,
        model: Option<&Arc<str>>,
        command: Command,
        now: Moment,
    ) -> Option<Vec<Change>> {
        let mut guards = self.lock();
        let breaker = match model {
            None => &mut guards.provider,
            Some(model) => guards.of_model(model, now)?,
        };
        let transition = match command {
            Command::Reset => breaker.reset(now),
            Command::Probe => breaker.probe(now),
            Command::Hold => breaker.hold(now),
            Command::Release => breaker.release(now),
        };
        guards.forget_well(model, now);
        self.overloads
            .store(!guards.models.is_empty(), Ordering::Release);
        drop(guards);
        if matches!(transition, Some(Transition::Opened { .. })) {
            self.opened.notify_waiters();
        }
        let change = |transition| Change {
            model: model.cloned(),
            transition,
        };
        Some(transition.map(change).into_iter().collect())
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

    /// Resolves at the next change of the settings.
    pub fn reconfigured(&self) -> Notified<'_> {
        self.configured.notified()
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

impl Guards {
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
        let breaker = self.of_model(model, now)?;
        let pass = match pass {
            Some(pass) => pass,
            // The call began before its model had a breaker: it counts while that is closed.
            None if breaker.snapshot(now).state == State::Closed => breaker.admit(now).ok()?,
            None => return None,
        };
        let transition = breaker.settle(pass, verdict, now);
        self.forget_well(Some(model), now);
        transition
    }

    /// The model's own breaker, made if there is none; `None` if there are too many.
    fn of_model(&mut self, model: &Arc<str>, now: Moment) -> Option<&mut Breaker> {
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
        self.models.get_mut(model)
    }

    /// A model that nothing is wrong with needs no breaker.
    fn forget_well(&mut self, model: Option<&Arc<str>>, now: Moment) {
        let Some(model) = model else { return };
        let left = self.models.get(model).map(|breaker| breaker.snapshot(now));
        if left.is_some_and(|left| {
            left.state == State::Closed && left.failures_in_row + left.failed_last_minute == 0
        }) {
            self.models.remove(model);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::settings::{Overrides, Settings};

    #[test]
    fn who_refuses_to_be_asked_is_remembered_until_the_settings_change() {
        let settings = Settings::parse("", &Overrides::default()).expect("the defaults");
        let settings = settings.provider("openai").expect("shipped");
        let state = ProviderState::new(settings);
        let model = |n: usize| -> Arc<str> { format!("m{n}").into() };
        assert!(!state.refuses_usage("m0"));
        state.usage_refused(&model(0));
        assert!(state.refuses_usage("m0") && !state.refuses_usage("m1"));
        // So many that it must be the provider.
        for n in 0..2 * REFUSING_MODELS {
            state.usage_refused(&model(n));
        }
        assert!(state.refuses_usage("another"));
        assert_eq!(state.lock_unasked().len(), REFUSING_MODELS);

        let now = Moment::at(Duration::ZERO);
        assert!(state.configure(settings, now).is_empty());
        assert!(!state.refuses_usage("m0"));
    }
}
