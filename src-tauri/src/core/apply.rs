//! Settings that change while Traygate runs: a patch or a hand edit takes effect without a restart
//! and without cutting a call. Calls in flight keep what they began with.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value as Json;
use tracing::{info, warn};

use super::{Core, World};
use crate::call::breaker::report;
use crate::events::{Change, Event};
use crate::listen::{Doors, ListenError, Move, port_owner};
use crate::provider::state::Command;
use crate::provider::{Provider, recovery};
use crate::run::{
    NO_ACCESS_TOKEN, point_at_demo, refuse_loops, settings_warnings, wanted_keys,
    warn_without_token,
};
use crate::settings::on_disk::{Edit, PatchError, SettingsFile, Snapshot};
use crate::settings::{FileWork, PATIENCE, Settings, SettingsError, live};

/// How long a patch waits for its turn, and then for a file that something else writes: it must not
/// take effect when whoever asked has long given up.
const TURN: Duration = Duration::from_secs(10);

/// How long a change that lets others in waits for the keyring to say whether they can come in.
const KEYRING_PATIENCE: Duration = Duration::from_secs(1);

/// What it takes to change settings, beside the settings.
#[derive(Default)]
pub struct Control {
    file: Option<SettingsFile>,
    demo: Option<SocketAddr>,
    doors: Option<Doors>,
    /// One change at a time, from reading the file to its taking effect.
    changes: tokio::sync::Mutex<()>,
    files: FileWork,
    // std Mutex: held for a look, never across an await.
    refusal: Mutex<Option<String>>,
}

/// A patch that is written and in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The fields of the file that differ now, `provider.openai.concurrency`.
    pub changed: Vec<String>,
    /// The file's new mark.
    pub etag: String,
    /// Where Traygate listens from now on, if that changed.
    pub address: Option<SocketAddr>,
    /// What a person should know though it works.
    pub warnings: Vec<String>,
}

/// Settings that can take effect: what may fail is done.
struct Ready {
    settings: Settings,
    doors: Option<Move>,
}

/// What became of them.
struct InEffect {
    address: Option<SocketAddr>,
    warnings: Vec<String>,
}

impl Core {
    /// From here on settings can be changed.
    pub fn take_control(&mut self, file: Option<SettingsFile>, demo: SocketAddr, doors: Doors) {
        self.control = Control {
            file,
            demo: Some(demo),
            doors: Some(doors),
            ..Control::default()
        };
    }

    /// Accepts no more connections; those there are finish.
    pub(crate) fn close_doors(&self) {
        if let Some(doors) = &self.control.doors {
            doors.close_all();
        }
    }

    /// The settings in force as JSON, and the mark of the file's present state for `If-Match`.
    /// Shows no secret.
    pub fn described_settings(&self) -> (Json, String) {
        let world = self.world();
        let file = self.control.file.as_ref();
        let present = file.and_then(|file| {
            let reads = file.clone();
            let read = self.control.files.wait_for(move || reads.snapshot());
            read.ok()?.ok()
        });
        let etag = match present {
            Some(snapshot) => snapshot.etag(),
            None => Snapshot {
                bytes: world.settings.source.text.as_bytes().to_vec(),
                exists: false,
            }
            .etag(),
        };
        (world.settings.describe(file.map(|file| &*file.path)), etag)
    }

    /// Why the settings file is not what is in force, in words; `None` while it is.
    pub fn settings_refusal(&self) -> Option<String> {
        let refusal = self.control.refusal.lock();
        refusal.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What was set and cannot work, or does nothing, in words.
    pub fn settings_warnings(&self) -> Vec<String> {
        let settings = &self.world().settings;
        let mut warnings = settings_warnings(settings);
        warnings.extend(self.without_token(settings).map(str::to_owned));
        warnings
    }

    /// What to say where callers from elsewhere are all refused.
    fn without_token(&self, settings: &Settings) -> Option<&'static str> {
        let is_missing = !settings.server.host.is_empty() && self.keys.access_token().is_none();
        is_missing.then_some(NO_ACCESS_TOKEN)
    }

    /// Reads the keys of the OS keyring anew.
    pub fn reload_keys(&self) {
        self.keys.reload(wanted_keys(&self.world().settings));
        self.events.tell(|| Event::State(Change::Settings));
    }

    /// Changes the settings file in place by a JSON merge patch over its own names, and lets the
    /// change take effect. It is one step for everybody else: of two at once, the second sees what
    /// the first has done.
    ///
    /// # Errors
    /// [`PatchError`]; then the file and what is in force are as they were.
    pub async fn patch_settings(
        self: &Arc<Core>,
        patch: Json,
        if_match: Option<String>,
    ) -> Result<Applied, PatchError> {
        let core = self.clone();
        // A task of its own: who asked may leave in the middle of it.
        let change = tokio::spawn(async move {
            let turn = tokio::time::timeout(TURN, core.control.changes.lock());
            let Ok(_one_at_a_time) = turn.await else {
                return Err(PatchError::NotApplied(
                    "other changes of the settings are not done yet: try again".to_owned(),
                ));
            };
            core.patch_alone(patch, if_match).await
        });
        change.await.unwrap_or_else(|failed| {
            Err(PatchError::NotApplied(format!(
                "the change was not finished: {failed}"
            )))
        })
    }

    async fn patch_alone(
        self: &Arc<Core>,
        patch: Json,
        if_match: Option<String>,
    ) -> Result<Applied, PatchError> {
        let file = self.control.file.clone().ok_or(PatchError::NoFile)?;
        let in_force = self.world().settings.source.text.clone();
        let still = tokio::time::timeout(TURN, self.still(&file, &in_force)).await;
        let Ok(before) = still else {
            return Err(PatchError::NotApplied(
                "the settings file is being written by something else: try again".to_owned(),
            ));
        };
        let before = before?;
        let patched = {
            let file = file.clone();
            off_the_runtime(move || file.patch_onto(before, &patch, if_match.as_deref(), &in_force))
        };
        let mut edit = patched.await?;
        let changed = std::mem::take(&mut edit.changed);
        let ready = self
            .prepare(edit.settings.clone())
            .await
            .map_err(PatchError::NotApplied)?;
        let etag = match self.write(file, edit).await {
            Ok(etag) => etag,
            Err(error) => {
                self.give_up(ready);
                return Err(error);
            }
        };
        let InEffect { address, warnings } = self.take_effect(ready).await;
        info!(?changed, "settings changed");
        self.set_refusal(None);
        Ok(Applied {
            changed,
            etag,
            address,
            warnings,
        })
    }

    async fn read(&self, file: &SettingsFile) -> Result<Snapshot, SettingsError> {
        let reads = file.clone();
        let read = self.control.files.done(move || reads.snapshot()).await;
        read.unwrap_or_else(|error| Err(file.unreadable(&error)))
    }

    /// The file once nobody writes to it any more. As it is in force it is taken at once.
    async fn still(&self, file: &SettingsFile, in_force: &str) -> Result<Snapshot, SettingsError> {
        let mut found = self.read(file).await?;
        let mut stood = Duration::ZERO;
        while found.bytes != in_force.as_bytes() && stood < live::must_stand(&found) {
            tokio::time::sleep(live::GLANCE).await;
            stood += live::GLANCE;
            let now = self.read(file).await?;
            if now != found {
                (found, stood) = (now, Duration::ZERO);
            }
        }
        Ok(found)
    }

    /// Writes it soon or never: whoever asked has left when a file system comes back that hung.
    async fn write(&self, file: SettingsFile, edit: Edit) -> Result<String, PatchError> {
        let path = file.path.clone();
        let decided = Arc::new(AtomicBool::new(false));
        let (tell, told) = tokio::sync::oneshot::channel();
        let writes = {
            let decided = decided.clone();
            move || drop(tell.send(file.write_unless(&edit, &decided)))
        };
        if let Err(source) = self.control.files.done(writes).await
            && !decided.swap(true, Ordering::AcqRel)
        {
            return Err(PatchError::Write { path, source });
        }
        // Done, or in its last step. Should that hang too and yet succeed, it is found in the file
        // as a hand edit is.
        match tokio::time::timeout(PATIENCE, told).await {
            Ok(Ok(written)) => written,
            Ok(Err(_)) | Err(_) => Err(PatchError::Write {
                path,
                source: io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the file system does not say whether it did: read the settings again",
                ),
            }),
        }
    }

    /// Looks whether the settings file is another than what is in force, and lets it take effect
    /// once it stands still. A bad one is refused, and said so until there is a good one.
    pub(crate) async fn look_at_settings_file(self: &Arc<Core>, file: &SettingsFile) {
        loop {
            let in_force = self.world().settings.source.text.clone();
            // Without the turn: patches need not wait for it.
            let found = self.still(file, &in_force).await;
            let _one_at_a_time = self.control.changes.lock().await;
            let is_still = match &found {
                Ok(found) => self.read(file).await.as_ref() == Ok(found),
                // Whoever mends it is told of by an event.
                Err(_) => true,
            };
            if is_still && self.world().settings.source.text == in_force {
                return self.found(file, found).await;
            }
        }
    }

    async fn found(self: &Arc<Core>, file: &SettingsFile, found: Result<Snapshot, SettingsError>) {
        let in_force = self.world().settings.source.text.clone();
        let read = match found {
            Ok(found) if found.bytes == in_force.as_bytes() => Ok(live::Found::InForce),
            Ok(found) if !found.exists => Ok(live::Found::Gone),
            Ok(found) => {
                let file = file.clone();
                off_the_runtime(move || file.settings(&found))
                    .await
                    .map(|new| live::Found::New(Box::new(new)))
            }
            Err(error) => Err(error),
        };
        let refusal = match read {
            Ok(live::Found::InForce) => None,
            Ok(live::Found::Gone) => Some(format!(
                "{} is gone; the settings go on as they were",
                file.path.display()
            )),
            Ok(live::Found::New(settings)) => self.hand_edit(*settings).await.err(),
            Err(error) => Some(error.to_string()),
        };
        if let Some(refusal) = &refusal
            && self.settings_refusal().as_ref() != Some(refusal)
        {
            warn!("the settings file is not in force: {refusal}");
        }
        self.set_refusal(refusal);
    }

    async fn hand_edit(self: &Arc<Core>, settings: Settings) -> Result<(), String> {
        let changed = settings.differences(&self.world().settings);
        let (changed, overridden) = settings.source.overrides.part(changed);
        let ready = self.prepare(settings).await?;
        self.take_effect(ready).await;
        if !overridden.is_empty() {
            warn!(
                ?overridden,
                "the settings file was edited where something else wins over it"
            );
        }
        if !changed.is_empty() || overridden.is_empty() {
            info!(?changed, "the settings file was edited and is in force");
        }
        Ok(())
    }

    fn set_refusal(&self, refusal: Option<String>) {
        let mut held = self
            .control
            .refusal
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *held != refusal {
            *held = refusal;
            drop(held);
            self.events.tell(|| Event::State(Change::Settings));
        }
    }

    /// Does all that may fail, and nothing that cannot be taken back.
    async fn prepare(&self, mut settings: Settings) -> Result<Ready, String> {
        if let Some(demo) = self.control.demo {
            point_at_demo(&mut settings, demo);
        }
        let world = self.world();
        let (old, new) = (&world.settings.server, &settings.server);
        let Some(doors) = &self.control.doors else {
            return Ok(Ready {
                settings,
                doors: None,
            });
        };
        let moved = if (old.port, &old.host) == (new.port, &new.host) {
            None
        } else {
            // Any free port is the one it has, unless another was asked for before.
            let port = match new.port == old.port {
                true => doors.port(),
                false => new.port,
            };
            match doors.prepare(port, &new.host).await {
                Ok(moved) => Some(moved),
                // Looks through all processes.
                Err(error) => return Err(off_the_runtime(move || cannot_listen(&error)).await),
            }
        };
        let port = moved
            .as_ref()
            .map_or(doors.port(), |moved| moved.address().port());
        if let Err(error) = refuse_loops(&settings, port) {
            if let Some(moved) = moved {
                doors.undo(moved);
            }
            return Err(error.to_string());
        }
        Ok(Ready {
            settings,
            doors: moved,
        })
    }

    fn give_up(&self, ready: Ready) {
        if let (Some(doors), Some(moved)) = (&self.control.doors, ready.doors) {
            doors.undo(moved);
        }
    }

    /// Cannot fail.
    async fn take_effect(self: &Arc<Core>, ready: Ready) -> InEffect {
        let Ready { settings, doors } = ready;
        let old = self.world();
        let mut warnings = settings_warnings(&settings);
        let new = Arc::new(old.changed_to(settings));
        *self.world.write().unwrap_or_else(PoisonError::into_inner) = new.clone();
        self.configure_providers(&old, &new);
        // A provider's address is part of its prices.
        self.configure_spend(&new.settings);
        if old.settings.spend.prices != new.settings.spend.prices {
            self.reprice();
        }
        let wanted = wanted_keys(&new.settings);
        if wanted != wanted_keys(&old.settings) {
            self.keys.reload(wanted);
        }
        if old.settings.log != new.settings.log {
            self.store.configure(new.settings.log.clone());
        }
        let (had, has) = (&old.settings.dedup, &new.settings.dedup);
        if (had.max_bytes, had.window) != (has.max_bytes, has.window) {
            let (dedup, max_bytes, window) = (self.dedup.clone(), has.max_bytes, has.window);
            off_the_runtime(move || dedup.resize(max_bytes, window)).await;
        }
        let mut address = None;
        if let (Some(open), Some(moved)) = (&self.control.doors, doors) {
            warnings.extend(moved.warnings().iter().cloned());
            let now = moved.address();
            if self.listener.address() != Some(now) {
                address = Some(now);
            }
            self.listener.listens_on(now);
            if let Err(error) = self.write_runtime_file() {
                warn!(%error, "the runtime file could not be written");
            }
            open.commit(moved).await;
        }
        self.events.tell(|| Event::State(Change::Settings));
        if !new.settings.server.host.is_empty() {
            if old.settings.server.host.is_empty() {
                tokio::spawn(warn_without_token(self.keys.clone()));
            }
            self.keys.ready(KEYRING_PATIENCE).await;
            warnings.extend(self.without_token(&new.settings).map(str::to_owned));
        }
        InEffect { address, warnings }
    }

    fn configure_providers(self: &Arc<Core>, old: &World, new: &World) {
        let now = self.clock.now();
        for provider in &new.providers {
            let Some(before) = old.provider(provider.name()) else {
                continue;
            };
            if Arc::ptr_eq(before, provider) {
                continue;
            }
            let mut changes = provider.state.configure(&provider.settings, now);
            // What failed at the old address says nothing of the new one.
            if before.settings.base_url != provider.settings.base_url {
                let state = &provider.state;
                let breakers = state.snapshot(now);
                let models = breakers.models.into_iter();
                let all = [(None, breakers.provider)]
                    .into_iter()
                    .chain(models.map(|(model, breaker)| (Some(model), breaker)));
                // What a person holds open stays so.
                for (model, _) in all.filter(|(_, breaker)| !breaker.held) {
                    let reset = state.command(model.as_ref(), Command::Reset, now);
                    changes.extend(reset.into_iter().flatten());
                }
            }
            report(self, provider, &changes, now);
            // One that is open already may want to be looked at from now on.
            recovery::watch(self, provider);
        }
    }
}

impl World {
    /// The same with other settings. A provider about which nothing changed stays, with its
    /// connections; one that changed keeps its pool and breakers.
    fn changed_to(&self, settings: Settings) -> World {
        let provider = |new: &crate::settings::ProviderSettings| match self.provider(&new.name) {
            Some(old) if old.settings == *new => old.clone(),
            Some(old) => Arc::new(old.with(new.clone())),
            None => Arc::new(Provider::new(new.clone())),
        };
        World {
            providers: settings.providers.iter().map(provider).collect(),
            settings,
        }
    }
}

/// Why new doors cannot be opened, with the setting and what to do.
fn cannot_listen(error: &ListenError) -> String {
    match error {
        ListenError::Taken(address) => {
            let owner = port_owner(address.port());
            let owner = owner.as_deref().unwrap_or("another program");
            format!(
                "server.port: {error}: {owner} has it. Stop that, or choose another server.port"
            )
        }
        ListenError::Refused { address, .. } if address.ip().is_loopback() => {
            format!("server.port: {error}. Choose another server.port")
        }
        ListenError::Refused { .. } => {
            format!("server.host: {error}. Take it out of server.host, or correct it")
        }
    }
}

/// For what takes a while.
async fn off_the_runtime<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}
