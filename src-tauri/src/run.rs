//! Starts the core and its listeners, and stops them again.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::clock::Clock;
use crate::core::Core;
use crate::keys::Keys;
use crate::listen::{ListenError, Listeners};
use crate::provider::demo::Demo;
use crate::settings::{KeySource, ProviderKind, Settings};
use crate::store::{Store, StoreError};

/// How long the end waits for the rows of calls that were cut.
const LAST_ROWS: Duration = Duration::from_secs(3);
const LAST_ROWS_LOOK: Duration = Duration::from_millis(5);

/// What a start needs.
pub struct Options {
    pub settings: Settings,
    pub data_dir: PathBuf,
    pub clock: Clock,
    /// Read keys from the OS keyring.
    pub use_keyring: bool,
}

/// Why Traygate does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("the built-in demo provider cannot listen on a loopback port: {0}")]
    Demo(std::io::Error),
}

/// A running Traygate.
pub struct Running {
    core: Arc<Core>,
    address: SocketAddr,
    warnings: Vec<String>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<usize>,
    _demo: Demo,
}

/// Starts serving.
///
/// # Errors
/// [`StartError`].
pub async fn start(options: Options) -> Result<Running, StartError> {
    let mut settings = options.settings;
    // The folder first: a second process on it must not come as far as the port.
    let store = Store::open(&options.data_dir, options.clock)?;
    let listeners = Listeners::bind(settings.server.port, &settings.server.host)?;
    let demo = Demo::start().await.map_err(StartError::Demo)?;
    point_at_demo(&mut settings, demo.addr());
    let keys = if options.use_keyring {
        Keys::start_loading(wanted_keys(&settings))
    } else {
        Keys::empty()
    };
    let drain = settings.server.drain;
    let core = Arc::new(Core::new(settings, store, keys, options.clock));
    let (stop, stopped) = watch::channel(false);
    let address = listeners.address();
    let warnings = listeners.warnings.clone();
    for warning in &warnings {
        warn!("{warning}");
    }
    let serving = tokio::spawn(listeners.serve(core.clone(), stopped, drain));
    Ok(Running {
        core,
        address,
        warnings,
        stop,
        serving,
        _demo: demo,
    })
}

fn point_at_demo(settings: &mut Settings, address: SocketAddr) {
    for provider in &mut settings.providers {
        if provider.kind == ProviderKind::Demo {
            let url = &mut provider.base_url;
            let _ = url.set_ip_host(address.ip());
            let _ = url.set_port(Some(address.port()));
        }
    }
}

/// The providers whose key may be in the keyring, with the origins the keys are bound to.
fn wanted_keys(settings: &Settings) -> Vec<(Arc<str>, String)> {
    settings
        .providers
        .iter()
        .filter(|provider| matches!(provider.key, KeySource::Auto | KeySource::Keyring))
        .filter(|provider| provider.kind != ProviderKind::Demo)
        .map(|provider| (provider.name.clone(), provider.origin()))
        .collect()
}

impl Running {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// What a person should know though it works.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Stops accepting, lets calls in flight finish for `drain_secs`, and writes every row.
    /// Returns how many connections had to be cut.
    pub async fn shut_down(self) -> usize {
        let _ = self.stop.send(true);
        let cut = self.serving.await.unwrap_or(0);
        // Calls whose clients have just been cut end by themselves, at the latest when they have
        // lingered for a retry; their rows are part of the record.
        let rows_written = async {
            while self.core.open_calls.load(Ordering::Acquire) > 0 {
                tokio::time::sleep(LAST_ROWS_LOOK).await;
            }
        };
        let _ = tokio::time::timeout(LAST_ROWS, rows_written).await;
        let store = self.core.store.clone();
        let _ = tokio::task::spawn_blocking(move || store.close()).await;
        cut
    }
}
