//! The HTTP clients of one provider, made when they are first needed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::{Certificate, Client, ClientBuilder};
use url::{Host, Url};

use crate::settings::ProviderSettings;

/// Calls a client carries before the next one is used: reqwest keeps one HTTP/2 connection a
/// client and host, and servers allow about a hundred streams on it.
const CALLS_A_CLIENT: usize = 64;
/// Idle connections to this machine cost nothing to open again, and local servers close them soon.
const IDLE_ON_LOOPBACK: Duration = Duration::from_secs(4);
const IDLE_ELSEWHERE: Duration = Duration::from_secs(30);
/// How long a silent HTTP/2 connection goes without a ping, and how long the ping may take.
const PING_EVERY: Duration = Duration::from_secs(15);
const PING_ANSWER: Duration = Duration::from_secs(10);

/// Why a client could not be made.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    #[error("ca_file {path} cannot be used: {reason}")]
    CaFile { path: PathBuf, reason: String },
    #[error("no HTTP client could be made: {0}")]
    Build(String),
}

/// A provider's clients.
pub struct Clients {
    recipe: Recipe,
    // std Mutex: held for a look at a few counters, never across an await.
    slots: Mutex<Vec<Arc<Slot>>>,
    upgrades: OnceLock<Result<Client, ClientError>>,
    fresh: OnceLock<Result<Client, ClientError>>,
}

struct Slot {
    client: Client,
    calls: AtomicUsize,
}

/// What the clients of a provider have in common.
#[derive(Clone)]
struct Recipe {
    connect: Duration,
    ca_file: Option<PathBuf>,
    loopback: bool,
    /// The base URL's host, where it is a name of this machine.
    local_name: Option<String>,
    tls: bool,
}

/// Where a name of this machine is looked for. Some servers listen on one family only, and the
/// system's own list often knows `localhost` in one only. Port 0 stands for the URL's.
const BOTH_LOOPBACKS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0),
];

/// A client and the call's place on it; dropping it frees the place.
pub struct Lease {
    slot: Arc<Slot>,
}

impl Lease {
    pub fn client(&self) -> &Client {
        &self.slot.client
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slot.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Clients {
    pub fn new(settings: &ProviderSettings) -> Clients {
        Clients {
            recipe: Recipe {
                connect: settings.limits.connect,
                ca_file: settings.ca_file.clone(),
                loopback: is_loopback(&settings.base_url),
                local_name: settings
                    .base_url
                    .domain()
                    .filter(|name| is_local_name(name))
                    .map(str::to_owned),
                tls: settings.base_url.scheme() == "https",
            },
            slots: Mutex::default(),
            upgrades: OnceLock::new(),
            fresh: OnceLock::new(),
        }
    }

    /// A client with room for one more call.
    ///
    /// # Errors
    /// [`ClientError`] where the settings do not make a client.
    pub fn lease(&self) -> Result<Lease, ClientError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Without TLS there is no HTTP/2, and an HTTP/1 client opens as many connections as needed.
        let room = if self.recipe.tls {
            CALLS_A_CLIENT
        } else {
            usize::MAX
        };
        let slot = match slots
            .iter()
            .find(|slot| slot.calls.load(Ordering::Relaxed) < room)
        {
            Some(slot) => slot.clone(),
            None => {
                let slot = Arc::new(Slot {
                    client: self.recipe.build(|client| client)?,
                    calls: AtomicUsize::new(0),
                });
                slots.push(slot.clone());
                slot
            }
        };
        slot.calls.fetch_add(1, Ordering::Relaxed);
        Ok(Lease { slot })
    }

    /// The HTTP/1 client for connections that are upgraded.
    ///
    /// # Errors
    /// As [`Clients::lease`].
    pub fn for_upgrades(&self) -> Result<Client, ClientError> {
        self.upgrades
            .get_or_init(|| self.recipe.build(ClientBuilder::http1_only))
            .clone()
    }

    /// The client whose every request opens a connection of its own.
    ///
    /// # Errors
    /// As [`Clients::lease`].
    pub fn fresh_connections(&self) -> Result<Client, ClientError> {
        self.fresh
            .get_or_init(|| self.recipe.build(|client| client.pool_max_idle_per_host(0)))
            .clone()
    }
}

impl Recipe {
    fn build(
        &self,
        with: impl FnOnce(ClientBuilder) -> ClientBuilder,
    ) -> Result<Client, ClientError> {
        let idle = if self.loopback {
            IDLE_ON_LOOPBACK
        } else {
            IDLE_ELSEWHERE
        };
        let mut builder = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .http1_title_case_headers()
            .tcp_nodelay(true)
            .connect_timeout(self.connect)
            .pool_idle_timeout(idle)
            .http2_keep_alive_interval(PING_EVERY)
            .http2_keep_alive_timeout(PING_ANSWER)
            .http2_keep_alive_while_idle(true);
        if self.loopback {
            builder = builder.no_proxy();
        }
        if let Some(name) = &self.local_name {
            builder = builder.resolve_to_addrs(name, &BOTH_LOOPBACKS);
        }
        if !self.tls {
            // Reading the system's certificates takes milliseconds and memory.
            builder = builder.tls_certs_only([]);
        } else if let Some(path) = &self.ca_file {
            builder = builder.tls_certs_merge(read_certificates(path)?);
        }
        with(builder)
            .build()
            .map_err(|error| ClientError::Build(super::clients::describe(&error)))
    }
}

fn read_certificates(path: &PathBuf) -> Result<Vec<Certificate>, ClientError> {
    let fault = |reason: String| ClientError::CaFile {
        path: path.clone(),
        reason,
    };
    let pem = std::fs::read(path).map_err(|error| fault(error.to_string()))?;
    let certificates =
        Certificate::from_pem_bundle(&pem).map_err(|error| fault(describe(&error)))?;
    if certificates.is_empty() {
        return Err(fault("there is no PEM certificate in it".to_owned()));
    }
    Ok(certificates)
}

/// True for an address on this machine: it is never reached through a proxy.
pub fn is_loopback(url: &Url) -> bool {
    // Connecting to the unspecified address reaches this machine.
    let is_here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    match url.host() {
        Some(Host::Ipv4(ip)) => is_here(ip.into()),
        Some(Host::Ipv6(ip)) => is_here(IpAddr::V6(ip).to_canonical()),
        Some(Host::Domain(name)) => is_local_name(name),
        None => false,
    }
}

/// `localhost` and what is under it, which no resolver may look up elsewhere (RFC 6761, 6.3).
fn is_local_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost")
}

/// The innermost cause of an error in words, without the address, which may hold a key: the outer
/// layers only say that sending failed.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let told = cause.to_string();
    // What the HTTP library says of a connection that closed too early.
    let too_early = [
        "unexpected EOF",
        "end of file before message length reached",
        "connection closed before message completed",
    ];
    if too_early.iter().any(|words| told.contains(words)) {
        "the connection closed too early".to_owned()
    } else {
        told
    }
}
