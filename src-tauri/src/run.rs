//! Starts the core and its listeners, and stops them again.

use std::future::{Future, pending};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tracing::warn;
use url::{Host, Url};

use crate::clock::Clock;
use crate::core::prices::watch_prices;
use crate::core::{Core, Phase, keep_runtime_file, watch_log};
use crate::keys::Keys;
use crate::listen::{Doors, ListenError, Listeners, serve};
use crate::provider::clients::is_loopback;
use crate::provider::demo::Demo;
use crate::settings::on_disk::SettingsFile;
use crate::settings::{KeySource, ProviderKind, Settings, live};
use crate::store::{Store, StoreError};

/// How long a keyring may take before it is said that there is no access token in it.
const KEYRING_PATIENCE: Duration = Duration::from_secs(10);

/// How long the end waits for the rows of calls that were cut.
const LAST_ROWS: Duration = Duration::from_secs(3);

/// What a start needs.
pub struct Options {
    pub settings: Settings,
    /// Where they were read from, to be watched and changed in place.
    pub config: Option<SettingsFile>,
    pub data_dir: PathBuf,
    pub clock: Clock,
    /// These keys; `None` reads those of the OS keyring.
    pub keys: Option<Keys>,
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
    #[error(
        "provider {provider:?} has Traygate's own address as its base_url ({base_url}), so that every call would come back for ever; correct it in config.toml"
    )]
    Loop { provider: Arc<str>, base_url: Url },
}

/// A running Traygate. Dropping it ends it at once.
pub struct Running {
    core: Arc<Core>,
    warnings: Vec<String>,
    serving: JoinHandle<()>,
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
    store.configure(settings.log.clone());
    let listeners = Listeners::bind(settings.server.port, &settings.server.host)?;
    refuse_loops(&settings, listeners.port())?;
    let demo = Demo::start().await.map_err(StartError::Demo)?;
    point_at_demo(&mut settings, demo.addr());
    let keys = match options.keys {
        Some(keys) => keys,
        None => Keys::start_loading(wanted_keys(&settings)),
    };
    let mut core = Core::new(settings, store, keys, options.clock);
    core.listener.listens_on(listeners.address());
    let mut warnings = listeners.warnings.clone();
    let (doors, accepted) = Doors::open(listeners, core.listener.clone());
    core.take_control(options.config.clone(), demo.addr(), doors);
    core.restore_spend();
    let core = Arc::new(core);
    if let Err(error) = core.write_runtime_file() {
        // The command line will not find it; nothing else needs it.
        warn!(%error, "the runtime file could not be written");
    }
    warnings.extend(settings_warnings(&core.world().settings));
    for warning in &warnings {
        warn!("{warning}");
    }
    if !core.world().settings.server.host.is_empty() {
        tokio::spawn(warn_without_token(core.keys.clone()));
    }
    tokio::spawn(watch_log(Arc::downgrade(&core)));
    tokio::spawn(watch_prices(Arc::downgrade(&core)));
    // Read by now, most likely, when the first call asks.
    tokio::task::spawn_blocking({
        let prices = core.spend.prices();
        move || drop(prices.data().clone())
    });
    tokio::spawn(keep_runtime_file(Arc::downgrade(&core)));
    let serving = tokio::spawn(serve(core.clone(), accepted));
    if let Some(file) = options.config {
        tokio::spawn(live::watch(core.clone(), file));
    }
    Ok(Running {
        core,
        warnings,
        serving,
        _demo: demo,
    })
}

/// A call to oneself goes round until every descriptor is used up.
pub(crate) fn refuse_loops(settings: &Settings, port: u16) -> Result<(), StartError> {
    let listened_on = |ip: IpAddr| {
        let all = match ip {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let hosts = &settings.server.host;
        // Only an address of this machine can be bound.
        hosts.contains(&ip) || (hosts.contains(&all) && UdpSocket::bind((ip, 0)).is_ok())
    };
    let is_own = |url: &Url| {
        let ip = match url.host() {
            Some(Host::Ipv4(ip)) => Some(IpAddr::V4(ip)),
            Some(Host::Ipv6(ip)) => Some(IpAddr::V6(ip)),
            Some(Host::Domain(_)) | None => None,
        };
        let host_is_own = is_loopback(url) || ip.is_some_and(listened_on);
        host_is_own && url.port_or_known_default() == Some(port)
    };
    match settings
        .providers
        .iter()
        .find(|provider| is_own(&provider.base_url))
    {
        Some(provider) => Err(StartError::Loop {
            provider: provider.name.clone(),
            base_url: provider.base_url.clone(),
        }),
        None => Ok(()),
    }
}

/// What was set and cannot work, or does nothing.
pub(crate) fn settings_warnings(settings: &Settings) -> Vec<String> {
    let mut warnings: Vec<String> = settings
        .not_in_effect()
        .into_iter()
        .map(str::to_owned)
        .collect();
    for provider in &settings.providers {
        if let KeySource::Env(name) = &provider.key
            && std::env::var_os(name).is_none_or(|key| key.is_empty())
        {
            warnings.push(format!(
                "provider {:?} takes its key from the environment variable {name}, which is not set or empty",
                provider.name
            ));
        }
    }
    warnings
}

/// Said where `server.host` is set and nobody from there can show a token.
pub(crate) const NO_ACCESS_TOKEN: &str = "server.host is set and no access token is known: calls from there are refused until `traygate key set access-token` has been run";

/// Callers from elsewhere are all refused until there is a token, and would not know why.
pub(crate) async fn warn_without_token(keys: Keys) {
    keys.ready(KEYRING_PATIENCE).await;
    if keys.access_token().is_none() {
        warn!("{NO_ACCESS_TOKEN}");
    }
}

pub(crate) fn point_at_demo(settings: &mut Settings, address: SocketAddr) {
    for provider in &mut settings.providers {
        if provider.kind == ProviderKind::Demo {
            let url = &mut provider.base_url;
            let _ = url.set_ip_host(address.ip());
            let _ = url.set_port(Some(address.port()));
        }
    }
}

/// The providers whose key may be in the keyring, with the origins the keys are bound to.
pub(crate) fn wanted_keys(settings: &Settings) -> Vec<(Arc<str>, String)> {
    settings
        .providers
        .iter()
        .filter(|provider| matches!(provider.key, KeySource::Auto | KeySource::Keyring))
        .filter(|provider| provider.kind != ProviderKind::Demo)
        .map(|provider| (provider.name.clone(), provider.origin()))
        .collect()
}

impl Running {
    /// Where it listens now: the settings may move it.
    pub fn address(&self) -> SocketAddr {
        self.core
            .listener
            .address()
            .expect("a running one listens from its start on")
    }

    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// What a person should know though it works.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Stops accepting, lets calls in flight finish for `drain_secs`, and writes every row.
    /// Returns how many calls had to be cut.
    pub async fn shut_down(self) -> usize {
        self.shut_down_or(pending()).await
    }

    /// The same, and cuts what still runs once `hurry` is ready.
    pub async fn shut_down_or(mut self, hurry: impl Future<Output = ()>) -> usize {
        let drain = self.core.world().settings.server.drain;
        let calls = self.core.open_calls.clone();
        calls.enter(Phase::Draining);
        let all_done = async {
            let _ = (&mut self.serving).await;
            calls.none_left().await;
        };
        tokio::select! {
            () = all_done => {}
            () = tokio::time::sleep(drain) => {}
            () = hurry => {}
        }
        self.core.remove_runtime_file();
        let cut = calls.count();
        // Clients first: what shared calls say of their own end is not for them.
        calls.enter(Phase::Cutting);
        if !self.serving.is_finished() {
            let _ = (&mut self.serving).await;
        }
        calls.enter(Phase::Over);
        let _ = tokio::time::timeout(LAST_ROWS, calls.none_left()).await;
        let store = self.core.store.clone();
        let _ = tokio::task::spawn_blocking(move || store.close()).await;
        cut
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.core.open_calls.enter(Phase::Over);
    }
}
