//! Keeps the price list fresh: on request, and daily where the person turned that on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use tracing::{info, warn};

use super::Core;
use crate::clock::WallTime;
use crate::events::{Change, Event};
use crate::policy::price::{CURRENT_LIST, PriceData, PriceDataError};
use crate::provider::clients::describe;

/// A list that was fetched, in the data folder. A newer Traygate brings a newer list of its own,
/// so what an older one fetched is not read any more.
const KEPT_FILE: &str = concat!("prices-", env!("CARGO_PKG_VERSION"), ".json");

/// Today's list is a twentieth of that.
const LONGEST_LIST: usize = 16 << 20;

const PATIENCE: Duration = Duration::from_secs(60);

/// How old a list may get where it is kept fresh.
const DAY: Duration = Duration::from_secs(86_400);

/// How often it is looked whether the list is old. The timer stands still while the machine sleeps.
const LOOK_EVERY: Duration = Duration::from_secs(600);

/// Where the price list in force comes from.
pub struct PriceList {
    // std Mutex: held for a look, never across an await.
    state: Mutex<ListState>,
    /// One refresh at a time.
    refreshing: tokio::sync::Mutex<()>,
}

struct ListState {
    address: String,
    fetched: Option<WallTime>,
    tried: Option<WallTime>,
    trouble: Option<String>,
}

impl PriceList {
    /// Of a data folder, which may hold a list that an earlier run has fetched.
    pub fn of(folder: &Path) -> PriceList {
        PriceList {
            state: Mutex::new(ListState {
                address: CURRENT_LIST.to_owned(),
                fetched: modified(&kept_in(folder)),
                tried: None,
                trouble: None,
            }),
            refreshing: tokio::sync::Mutex::default(),
        }
    }

    /// Reads the list that an earlier run has fetched, if there is one and it is sound; else the
    /// one that came with Traygate.
    pub fn read(&self, folder: &Path) -> Arc<PriceData> {
        let bundled = PriceData::bundled();
        let path = kept_in(folder);
        let Ok(text) = fs::read_to_string(&path) else {
            self.state().fetched = None;
            return bundled;
        };
        let read = PriceData::from_json(&text).and_then(|data| {
            data.may_replace(&bundled)?;
            Ok(data)
        });
        match read {
            Ok(data) => Arc::new(data),
            Err(error) => {
                warn!(%error, path = %path.display(), "the fetched price list is not used");
                self.state().fetched = None;
                bundled
            }
        }
    }

    /// When the list in force was fetched; `None` for the one that came with Traygate.
    pub fn fetched(&self) -> Option<WallTime> {
        self.state().fetched
    }

    /// Why the last refresh failed, in words; `None` once one has worked.
    pub fn trouble(&self) -> Option<String> {
        self.state().trouble.clone()
    }

    /// From now on the list is fetched from another address: a mirror of the project's own.
    pub fn fetch_from(&self, address: impl Into<String>) {
        self.state().address = address.into();
    }

    fn state(&self) -> MutexGuard<'_, ListState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why there is no newer price list. The old one stays in force.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// It could not be fetched.
    #[error("the price list cannot be fetched: {0}")]
    Fetch(String),
    /// What came is no price list, or not one to rely on.
    #[error(transparent)]
    Data(#[from] PriceDataError),
    /// It could not be kept for the next start.
    #[error("the price list cannot be kept in the data folder: {0}")]
    Keep(#[from] io::Error),
}

impl Core {
    /// Fetches today's price list, and puts it in force if it is sound: tells how many models it
    /// has. What it makes of calls that had no price is looked at anew.
    ///
    /// # Errors
    /// [`RefreshError`]; the old list stays, and it is said in the warnings.
    pub async fn refresh_prices(self: &Arc<Core>) -> Result<usize, RefreshError> {
        let core = self.clone();
        // A task of its own: who asked may leave in the middle of it.
        let refresh = tokio::spawn(async move {
            let _one_at_a_time = core.price_list.refreshing.lock().await;
            let refreshed = core.fetch_prices().await;
            let now = core.clock.wall();
            {
                let mut state = core.price_list.state();
                state.tried = Some(now);
                state.trouble = refreshed.as_ref().err().map(ToString::to_string);
                if refreshed.is_ok() {
                    state.fetched = Some(now);
                }
            }
            match &refreshed {
                Ok(models) => info!(models, "a newer price list is in force"),
                Err(error) => warn!(%error, "no newer price list; the old one stays in force"),
            }
            core.events.tell(|| Event::State(Change::Prices));
            refreshed
        });
        refresh
            .await
            .unwrap_or_else(|failed| Err(RefreshError::Fetch(failed.to_string())))
    }

    async fn fetch_prices(&self) -> Result<usize, RefreshError> {
        let address = self.price_list.state().address.clone();
        let json = fetch(&address).await.map_err(RefreshError::Fetch)?;
        let old = self.spend.prices().data().clone();
        let folder = self.store.folder().to_owned();
        // Some hundred rules are compiled, and a disk is waited for.
        let checked = tokio::task::spawn_blocking(move || {
            let data = PriceData::from_json(&json)?;
            data.may_replace(&old)?;
            keep(&folder, &json)?;
            Ok::<_, RefreshError>(data)
        });
        let data = checked
            .await
            .map_err(|failed| RefreshError::Fetch(failed.to_string()))??;
        let models = data.model_count();
        self.put_price_data(Arc::new(data));
        self.reprice();
        Ok(models)
    }

    /// Fetches a newer list if that is turned on, and none was fetched or tried for a day.
    pub async fn refresh_old_prices(self: &Arc<Core>) {
        if self.world().settings.spend.refresh_prices && self.is_price_list_old() {
            // It says itself what went wrong.
            let _ = self.refresh_prices().await;
        }
    }

    fn is_price_list_old(&self) -> bool {
        let state = self.price_list.state();
        let last = state.fetched.max(state.tried);
        let age = |then: WallTime| self.clock.wall().0.abs_diff(then.0);
        last.is_none_or(|then| u128::from(age(then)) >= DAY.as_micros())
    }
}

/// Fetches the list once a day where that is turned on. Ends with the core.
pub async fn watch_prices(core: Weak<Core>) {
    loop {
        match core.upgrade() {
            None => return,
            Some(core) => core.refresh_old_prices().await,
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn fetch(address: &str) -> Result<String, String> {
    let client = reqwest::Client::builder()
        .timeout(PATIENCE)
        .user_agent(concat!("traygate/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| describe(&error))?;
    let told = |error: reqwest::Error| describe(&error.without_url());
    let answer = client.get(address).send().await.map_err(told)?;
    let status = answer.status();
    if !status.is_success() {
        return Err(format!("status {}", status.as_u16()));
    }
    let mut body = answer.bytes_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        bytes.extend_from_slice(&chunk.map_err(told)?);
        if bytes.len() > LONGEST_LIST {
            return Err(format!("it is longer than {} MB", LONGEST_LIST >> 20));
        }
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}

fn kept_in(folder: &Path) -> PathBuf {
    folder.join(KEPT_FILE)
}

/// Keeps a list for the next start, whole or not at all, and lets go of those of older versions.
fn keep(folder: &Path, json: &str) -> io::Result<()> {
    let draft = folder.join(format!("{KEPT_FILE}.new"));
    fs::write(&draft, json)?;
    fs::rename(&draft, kept_in(folder))?;
    for entry in fs::read_dir(folder)?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("prices-") && name.ends_with(".json") && name != KEPT_FILE {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn modified(path: &Path) -> Option<WallTime> {
    let modified = fs::metadata(path).ok()?.modified().ok()?;
    let since = modified.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_micros()).ok().map(WallTime)
}
