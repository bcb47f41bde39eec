//! The core: what every call needs, and nothing of a screen.
//!
//! Faces (the command line, the listener, later the tray and the pages) hold an `Arc<Core>`.

use std::future::Future;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use crate::call::dedup::Dedup;
use crate::clock::Clock;
use crate::keys::Keys;
use crate::policy::routing::Dialect;
use crate::provider::Provider;
use crate::settings::{ProviderKind, Settings};
use crate::store::Store;

/// Bytes of request bodies held in memory at once, all calls together. What does not fit waits
/// in its socket.
pub const BODIES_HELD: usize = 256 << 20;

/// What Traygate does with calls as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    Normal = 0,
    /// Every call is refused.
    Refuse = 1,
}

/// The parts that calls share.
pub struct Core {
    pub clock: Clock,
    pub store: Store,
    pub keys: Keys,
    pub dedup: Arc<Dedup>,
    /// One permit a byte of [`BODIES_HELD`].
    pub bodies: Arc<Semaphore>,
    pub open_calls: Arc<OpenCalls>,
    mode: AtomicU8,
    world: RwLock<Arc<World>>,
}

/// How far the end of the program has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    #[default]
    Serving,
    /// Nobody is let in any more; calls in flight may finish.
    Draining,
    /// Connections are closed: what ends from here on has been stopped.
    Cutting,
    /// Shared calls end too, whoever still waits for them.
    Over,
}

/// How often it is looked whether a call is still open: nothing but the end of the program waits
/// for that.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The calls that have no row yet, and whether they may go on.
#[derive(Default)]
pub struct OpenCalls {
    count: AtomicUsize,
    phase: watch::Sender<Phase>,
}

impl OpenCalls {
    pub fn began(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// The call's row has been handed over.
    pub fn ended(&self) {
        self.count.fetch_sub(1, Ordering::Release);
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until every call has handed its row over: not before is the record complete.
    pub async fn none_left(&self) {
        while self.count() > 0 {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Waits until the end of the program has come as far as `phase`.
    pub async fn reached(&self, phase: Phase) {
        let mut phases = self.phase.subscribe();
        // The sender lives as long as `self`.
        let _ = phases.wait_for(|reached| *reached >= phase).await;
    }

    /// Does `work`, and drops it unfinished in [`Phase::Over`].
    pub async fn unless_over(self: Arc<Self>, work: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = work => {}
            () = self.reached(Phase::Over) => {}
        }
    }
}

/// The settings in force and the providers they make: swapped as a whole, so that a call sees
/// one state of it from its beginning to its end.
pub struct World {
    pub settings: Settings,
    pub providers: Vec<Arc<Provider>>,
}

impl Core {
    pub fn new(settings: Settings, store: Store, keys: Keys, clock: Clock) -> Core {
        Core {
            clock,
            store,
            keys,
            dedup: Arc::new(Dedup::new(settings.dedup.max_bytes, settings.dedup.window)),
            bodies: Arc::new(Semaphore::new(BODIES_HELD)),
            open_calls: Arc::default(),
            mode: AtomicU8::new(Mode::Normal as u8),
            world: RwLock::new(Arc::new(World::new(settings))),
        }
    }

    /// The settings and providers in force now.
    pub fn world(&self) -> Arc<World> {
        self.world
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn mode(&self) -> Mode {
        if self.mode.load(Ordering::Acquire) == Mode::Refuse as u8 {
            Mode::Refuse
        } else {
            Mode::Normal
        }
    }

    pub fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Release);
    }
}

impl World {
    fn new(settings: Settings) -> World {
        let providers = settings.providers.iter().cloned();
        World {
            providers: providers
                .map(|provider| Arc::new(Provider::new(provider)))
                .collect(),
            settings,
        }
    }

    pub fn provider(&self, name: &str) -> Option<&Arc<Provider>> {
        self.providers
            .iter()
            .find(|provider| &**provider.name() == name)
    }

    /// Where a bare path of `dialect` goes if no model rule says otherwise.
    pub fn default_provider(&self, dialect: Dialect) -> Option<&Arc<Provider>> {
        let of_kind = |kind| {
            let settings = self.settings.default_provider(kind)?;
            self.provider(&settings.name)
        };
        match dialect {
            Dialect::OpenAi => of_kind(ProviderKind::OpenAi),
            Dialect::Anthropic => of_kind(ProviderKind::Anthropic),
            Dialect::Ollama => self.provider("ollama"),
        }
    }

    /// Where a bare call of `model` goes, if a rule says so.
    pub fn routed_provider(&self, model: &str) -> Option<&Arc<Provider>> {
        let rules = &self.settings.routes;
        let rule = rules.iter().find(|rule| rule.model.matches(model))?;
        self.provider(&rule.provider)
    }

    /// The providers' names, for people.
    pub fn provider_names(&self) -> String {
        let names: Vec<&str> = self
            .providers
            .iter()
            .map(|provider| &**provider.name())
            .collect();
        names.join(", ")
    }
}
