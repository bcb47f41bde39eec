//! The HTTP clients of one provider, made when they are first needed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::{Certificate, Client, ClientBuilder};
use url::{Host, Url};

use crate::settings::ProviderSettings;

/// Calls a client carries before the next one is used: reqwest keeps one HTTP/2 connection a
/// client and host, and servers allow about a hundred streams on it.
const CALLS_A_CLIENT: u32 = 64;
/// What an HTTP/2 stream may have under way that nobody has read yet. The connection's window is as
/// large as those of all its streams: a smaller one would be used up by a few clients that read
/// slowly, and every other stream on that connection would stand still.
const STREAM_WINDOW: u32 = 1 << 20;
/// Idle connections to this machine cost nothing to open again, and local servers close them soon.
const IDLE_ON_LOOPBACK: Duration = Duration::from_secs(4);
const IDLE_ELSEWHERE: Duration = Duration::from_secs(30);
const PINGS: Pings = Pings {
    every: Duration::from_secs(15),
    answer: Duration::from_secs(10),
};

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
    calls: AtomicU32,
}

/// What the clients of a provider have in common.
#[derive(Clone, PartialEq)]
struct Recipe {
    /// Connections lead there and to nowhere else.
    origin: String,
    connect: Duration,
    ca_file: Option<PathBuf>,
    loopback: bool,
    /// The base URL's host, where it is a name of this machine.
    local_name: Option<String>,
    tls: bool,
    pings: Pings,
}

/// How long a silent HTTP/2 connection goes without a ping, and how long the ping may take: a peer
/// that has gone without a word is found out long before a stream's idle limit.
#[derive(Clone, Copy, PartialEq)]
struct Pings {
    every: Duration,
    answer: Duration,
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
            recipe: Recipe::of(settings),
            slots: Mutex::default(),
            upgrades: OnceLock::new(),
            fresh: OnceLock::new(),
        }
    }

    /// Whether clients for these settings would be the same.
    pub fn serve(&self, settings: &ProviderSettings) -> bool {
        self.recipe == Recipe::of(settings)
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
            u32::MAX
        };
        let slot = match slots
            .iter()
            .find(|slot| slot.calls.load(Ordering::Relaxed) < room)
        {
            Some(slot) => slot.clone(),
            None => {
                let slot = Arc::new(Slot {
                    client: self.recipe.build(|client| client)?,
                    calls: AtomicU32::new(0),
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
    fn of(settings: &ProviderSettings) -> Recipe {
        Recipe {
            origin: settings.origin(),
            connect: settings.limits.connect,
            ca_file: settings.ca_file.clone(),
            loopback: is_loopback(&settings.base_url),
            local_name: settings
                .base_url
                .domain()
                .filter(|name| is_local_name(name))
                .map(str::to_owned),
            tls: settings.base_url.scheme() == "https",
            pings: PINGS,
        }
    }

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
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(STREAM_WINDOW * CALLS_A_CLIENT)
            .http2_keep_alive_interval(self.pings.every)
            .http2_keep_alive_timeout(self.pings.answer)
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
        with(builder).build().map_err(|error| {
            let reason = describe(&error);
            match &self.ca_file {
                // Only its certificates are read by then; the system's that are no good are left out.
                Some(path) if self.tls => ClientError::CaFile {
                    path: path.clone(),
                    reason: format!("a certificate in it cannot be read ({reason})"),
                },
                _ => ClientError::Build(reason),
            }
        })
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

/// The cause of an error in words, without the address, which may hold a key: the outer layers only
/// say that sending failed.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut told = String::new();
    let mut layer = Some(error);
    while let Some(cause) = layer {
        told = cause.to_string();
        if let Some((_, plain)) = IN_PLAIN_WORDS.iter().find(|(said, _)| told.contains(said)) {
            return (*plain).to_owned();
        }
        layer = cause.source();
    }
    told
}

const TOO_EARLY: &str = "the connection closed too early";

/// What the HTTP and TLS libraries say, and what it means to the person who reads it.
const IN_PLAIN_WORDS: [(&str, &str); 7] = [
    ("unexpected EOF", TOO_EARLY),
    ("end of file before message length reached", TOO_EARLY),
    ("connection closed before message completed", TOO_EARLY),
    (
        "keep-alive timed out",
        "the connection is dead: nobody answers its pings",
    ),
    (
        "UnknownIssuer",
        "its certificate comes from an issuer that this machine does not trust (UnknownIssuer); if that is one of your own, name its certificate as the provider's ca_file",
    ),
    (
        "BadSignature",
        "its certificate was not signed by the issuer of that name that this machine trusts (BadSignature); if the issuer has a new certificate, name that as the provider's ca_file",
    ),
    (
        "CaUsedAsEndEntity",
        "its certificate is an authority's and no server's (CaUsedAsEndEntity); make it one with basicConstraints=CA:FALSE",
    ),
];

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::settings::{Overrides, Settings};

    /// An empty SETTINGS frame: all that a server has to say before it may fall silent.
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    /// Far beyond what the pings take here; only a failing test waits so long.
    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn an_http_2_peer_that_has_gone_without_a_word_is_found_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("bound"));
        let settings = Settings::parse("", &Overrides::default()).expect("settings");
        let recipe = Recipe {
            pings: Pings {
                every: Duration::from_millis(50),
                answer: Duration::from_millis(50),
            },
            ..Recipe::of(settings.provider("ollama").expect("shipped"))
        };
        let client = recipe.build(ClientBuilder::http2_prior_knowledge);
        let client = client.expect("a client");
        let falling_silent = async {
            let (mut socket, _) = listener.accept().await.expect("a connection");
            socket.write_all(&SETTINGS).await.expect("taken");
            std::future::pending().await
        };
        let error = tokio::select! {
            sent = tokio::time::timeout(LIMIT, client.get(&url).send()) => {
                sent.expect("it waits for ever").expect_err("nobody answers")
            }
            () = falling_silent => unreachable!("it keeps the socket open"),
        };
        assert!(describe(&error).contains("pings"), "{error:?}");
    }
}
