//! The core: what every call needs, and nothing of a screen.
//!
//! Faces (the command line, the listener, later the tray and the pages) hold an `Arc<Core>`.

mod apply;
pub mod prices;
pub mod spend;

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tracing::debug;

use crate::admin::access::Token;
use crate::call::dedup::Dedup;
use crate::call::live::LiveCalls;
use crate::call::usage::Estimates;
use crate::clock::{Clock, Moment, WallTime};
use crate::events::{Change, Event, Events};
use crate::keys::Keys;
use crate::listen::ListenerState;
use crate::metrics::Metrics;
use crate::mode::{Mode, ModeSwitch};
use crate::policy::routing::Dialect;
use crate::provider::Provider;
use crate::runtime::{Found, Runtime, RuntimeFile};
use crate::settings::{ProviderKind, Settings};
use crate::store::Store;

pub use self::apply::{Applied, Control};
use self::prices::PriceList;
use self::spend::Spend;

/// Bytes of request bodies held in memory at once, all calls together. What does not fit waits
/// in its socket.
pub const BODIES_HELD: usize = 256 << 20;

/// How soon it is told that the record fares otherwise.
const LOOK_AT_LOG: Duration = Duration::from_secs(1);

/// How soon a runtime file that is gone is written again.
const LOOK_AT_RUNTIME_FILE: Duration = Duration::from_secs(10);

/// The end of a mode is told at most so much late after the machine has slept: timers stand still
/// meanwhile.
const LOOK_AT_MODE: Duration = Duration::from_secs(30);

/// The parts that calls share.
pub struct Core {
    pub clock: Clock,
    pub store: Store,
    pub keys: Keys,
    pub dedup: Arc<Dedup>,
    /// One permit a byte of [`BODIES_HELD`].
    pub bodies: Arc<Semaphore>,
    pub open_calls: Arc<OpenCalls>,
    /// The calls under way.
    pub live: LiveCalls,
    /// Finds out what calls used that nobody said.
    pub estimates: Estimates,
    /// What calls cost and how much they may.
    pub spend: Arc<Spend>,
    /// Where the price list in force comes from.
    pub price_list: Arc<PriceList>,
    pub events: Events,
    pub metrics: Metrics,
    pub listener: Arc<ListenerState>,
    /// Opens the admin API over HTTP.
    pub token: Token,
    runtime_file: Mutex<Option<RuntimeFile>>,
    /// When this run began.
    pub began: Moment,
    pub started: WallTime,
    mode: ModeSwitch,
    world: RwLock<Arc<World>>,
    control: Control,
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
        let price_list = Arc::new(PriceList::of(store.folder()));
        let spend = {
            let (list, folder) = (price_list.clone(), store.folder().to_owned());
            Spend::new(&settings, move || list.read(&folder))
        };
        Core {
            clock,
            store,
            keys,
            dedup: Arc::new(Dedup::new(
                settings.dedup.max_bytes,
                settings.dedup.window,
                clock,
            )),
            bodies: Arc::new(Semaphore::new(BODIES_HELD)),
            open_calls: Arc::default(),
            live: LiveCalls::default(),
            estimates: Estimates::default(),
            spend: Arc::new(spend),
            price_list,
            events: Events::default(),
            metrics: Metrics::default(),
            listener: Arc::default(),
            token: Token::random(),
            runtime_file: Mutex::default(),
            began: clock.now(),
            started: clock.wall(),
            mode: ModeSwitch::default(),
            world: RwLock::new(Arc::new(World::new(settings))),
            control: Control::default(),
        }
    }

    /// The settings and providers in force now.
    pub fn world(&self) -> Arc<World> {
        self.world
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Where a person steers it in a browser: the link holds the token of this run.
    pub fn link(&self) -> Option<String> {
        let address = self.listener.address()?;
        let token = self.token.expose();
        Some(format!("http://{address}/traygate/?token={token}"))
    }

    /// Tells this user's own programs where Traygate listens now.
    ///
    /// # Errors
    /// If the data folder cannot be written.
    pub fn write_runtime_file(&self) -> io::Result<()> {
        self.write_runtime_file_as(&mut self.lock_runtime_file())
    }

    /// Writes the runtime file again if it is gone, or could not be written before.
    ///
    /// # Errors
    /// As [`Core::write_runtime_file`].
    fn restore_runtime_file(&self) -> io::Result<()> {
        let mut file = self.lock_runtime_file();
        // Who ends takes it away, under the same lock.
        if self.open_calls.phase() > Phase::Serving {
            return Ok(());
        }
        let is_there = file
            .as_ref()
            .is_some_and(|file| file.look() != Found::Nothing);
        // Only who records holds the folder: else the file may be another's.
        if is_there || !self.store.health().recording {
            return Ok(());
        }
        self.write_runtime_file_as(&mut file)
    }

    fn write_runtime_file_as(&self, file: &mut Option<RuntimeFile>) -> io::Result<()> {
        let Some(address) = self.listener.address() else {
            return Ok(());
        };
        let runtime = Runtime {
            port: address.port(),
            pid: std::process::id(),
            token: self.token.expose().to_owned(),
        };
        if let Some(old) = file.take() {
            old.keep();
        }
        *file = Some(RuntimeFile::write(self.store.folder(), &runtime)?);
        Ok(())
    }

    /// Takes the runtime file away.
    pub fn remove_runtime_file(&self) {
        *self.lock_runtime_file() = None;
    }

    fn lock_runtime_file(&self) -> MutexGuard<'_, Option<RuntimeFile>> {
        self.runtime_file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn mode(&self) -> Mode {
        self.mode.at(|| self.clock.now())
    }

    /// How long the mode will last; `None` for one without an end.
    pub fn mode_left(&self) -> Option<Duration> {
        self.mode.left(self.clock.now())
    }

    /// Chooses what becomes of calls, for a `span` or until further notice. Its end is told to
    /// whoever watches.
    pub fn set_mode(self: &Arc<Self>, mode: Mode, span: Option<Duration>) {
        self.mode
            .set(mode, span.map(|span| self.clock.now() + span));
        self.events.tell(|| Event::State(Change::Mode));
        if span.is_some() && mode != Mode::Normal {
            tokio::spawn(tell_end_of_mode(Arc::downgrade(self)));
        }
    }
}

/// Tells whoever watches that the record fares better or worse than before. Ends with the core.
pub async fn watch_log(core: Weak<Core>) {
    let summary = |core: &Core| {
        let health = core.store.health();
        let is_losing = health.dropped_rows > 0;
        (
            health.recording,
            is_losing,
            health.last_error,
            health.notice,
        )
    };
    let mut before = core.upgrade().map(|core| summary(&core));
    loop {
        tokio::time::sleep(LOOK_AT_LOG).await;
        let Some(core) = core.upgrade() else { return };
        if !core.events.are_watched() {
            continue;
        }
        let now = Some(summary(&core));
        if now != before {
            before = now;
            core.events.tell(|| Event::State(Change::Log));
        }
    }
}

/// Keeps the runtime file in its place. Ends with the core.
pub async fn keep_runtime_file(core: Weak<Core>) {
    loop {
        tokio::time::sleep(LOOK_AT_RUNTIME_FILE).await;
        let Some(core) = core.upgrade() else { return };
        // A folder on a network may hang.
        let restored = tokio::task::spawn_blocking(move || core.restore_runtime_file()).await;
        if let Ok(Err(error)) = restored {
            // Told as a warning when it could not be written the first time.
            debug!(%error, "the runtime file cannot be restored");
        }
    }
}

async fn tell_end_of_mode(core: Weak<Core>) {
    loop {
        let left = match core.upgrade() {
            Some(core) => core.mode_left(),
            None => return,
        };
        let Some(left) = left else { break };
        tokio::time::sleep(left.min(LOOK_AT_MODE)).await;
    }
    if let Some(core) = core.upgrade() {
        core.events.tell(|| Event::State(Change::Mode));
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
