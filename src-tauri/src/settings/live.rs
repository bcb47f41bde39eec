//! Watches the settings file and has every hand edit looked at.
//!
//! Editors write in place, by renaming another file over it, or through a symbolic link; the file
//! or its folder may not exist yet. So it is the folders on the way to it that are watched, and an
//! event means no more than to look.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::Settings;
use super::on_disk::{SettingsFile, Snapshot};
use crate::core::{Core, Phase};

/// An editor makes several events of one change: it is looked once it has been quiet for so long,
const QUIET: Duration = Duration::from_millis(100);
/// and at the latest after so many times that, in a folder that is never quiet.
const MOST_WAITS: u32 = 10;
/// How often it is looked where the system tells of nothing.
const WITHOUT_EVENTS: Duration = Duration::from_secs(2);

/// How often a file that is another than what is in force is read, until it stands still.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);
/// How long other text must stand in the file before it counts: a half-written one has settings
/// that nobody meant.
const STILL: Duration = Duration::from_millis(300);
/// And how long nothing at all, with which a shell begins whatever it writes.
const STILL_EMPTY: Duration = Duration::from_secs(2);

/// How long the file must stand still as it was found.
pub(crate) fn must_stand(found: &Snapshot) -> Duration {
    let is_empty = found.bytes.trim_ascii().is_empty();
    if found.exists && is_empty {
        STILL_EMPTY
    } else {
        STILL
    }
}

/// What a look at the file found.
pub(crate) enum Found {
    /// What is in force.
    InForce,
    /// Other settings.
    New(Box<Settings>),
    /// There was a file and is none any more.
    Gone,
}

/// Watches until Traygate ends.
pub async fn watch(core: Arc<Core>, file: SettingsFile) {
    let over = core.open_calls.clone();
    tokio::select! {
        () = watch_on(&core, &file) => {}
        () = over.reached(Phase::Draining) => {}
    }
}

async fn watch_on(core: &Arc<Core>, file: &SettingsFile) {
    let happened = Arc::new(Notify::new());
    let mut folders = Folders::new(happened.clone());
    loop {
        // Armed before the look: what happens after it is told.
        let chain = file.chain();
        let is_watched = folders.watch(&chain);
        core.look_at_settings_file(file).await;
        // A folder may have come or gone between the arming and the look.
        if file.chain() != chain || folders.are_others_for(&chain) {
            continue;
        }
        if is_watched {
            happened.notified().await;
        } else {
            let _ = tokio::time::timeout(WITHOUT_EVENTS, happened.notified()).await;
        }
        for _ in 0..MOST_WAITS {
            if tokio::time::timeout(QUIET, happened.notified())
                .await
                .is_err()
            {
                break;
            }
        }
    }
}

/// The folders that are watched.
struct Folders {
    /// `None` where the system has no way to tell, or no more of it to give.
    watcher: Option<RecommendedWatcher>,
    /// Those that are to be watched, and those that could be.
    wanted: BTreeSet<PathBuf>,
    watched: BTreeSet<PathBuf>,
}

impl Folders {
    fn new(happened: Arc<Notify>) -> Folders {
        let told = move |event: notify::Result<notify::Event>| {
            // Looking makes events too.
            let is_look = |kind: &EventKind| {
                matches!(kind, EventKind::Access(access)
                    if *access != AccessKind::Close(AccessMode::Write))
            };
            if !event.is_ok_and(|event| is_look(&event.kind)) {
                happened.notify_one();
            }
        };
        let watcher = notify::recommended_watcher(told)
            .inspect_err(|error| {
                warn!(%error, "the system does not tell of changes: the settings file is looked at every two seconds");
            })
            .ok();
        Folders {
            watcher,
            wanted: BTreeSet::new(),
            watched: BTreeSet::new(),
        }
    }

    /// Watches the folder of each path, or the nearest there is above it. False if one cannot be.
    fn watch(&mut self, paths: &[PathBuf]) -> bool {
        let Some(watcher) = &mut self.watcher else {
            return false;
        };
        let wanted = folders_of(paths);
        let mut all = true;
        // Anew each time: a folder may have been replaced by another of the same name.
        for folder in std::mem::take(&mut self.watched) {
            let _ = watcher.unwatch(&folder);
        }
        for folder in &wanted {
            match watcher.watch(folder, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.watched.insert(folder.clone());
                }
                Err(error) => {
                    debug!(%error, folder = %folder.display(), "cannot be watched");
                    all = false;
                }
            }
        }
        self.wanted = wanted;
        all
    }

    /// Whether other folders are to be watched for these paths by now.
    fn are_others_for(&self, paths: &[PathBuf]) -> bool {
        self.watcher.is_some() && self.wanted != folders_of(paths)
    }
}

fn folders_of(paths: &[PathBuf]) -> BTreeSet<PathBuf> {
    paths.iter().map(|path| nearest_folder(path)).collect()
}

fn nearest_folder(path: &Path) -> PathBuf {
    let mut above = path.ancestors().skip(1);
    let found = above.find(|folder| folder.is_dir());
    match found {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}
