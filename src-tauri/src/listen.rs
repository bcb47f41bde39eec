//! The listeners: both loopbacks and what the settings add, on one port.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use crate::call::accept::Connection;
use crate::call::{self};
use crate::core::{Core, Phase};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// How often a free port is looked for, where any will do, until it is free on both loopbacks.
const PORT_TRIES: u32 = 20;
/// How long accepting pauses when the system has no descriptor left for one more connection.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Why Traygate cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0} is taken")]
    Taken(SocketAddr),
    #[error("{address} cannot be listened on: {source}")]
    Refused {
        address: SocketAddr,
        source: io::Error,
    },
}

/// Bound sockets, not yet accepting.
pub struct Listeners {
    sockets: Vec<TcpListener>,
    port: u16,
    /// What a person should know though it works, such as that there is no IPv6.
    pub warnings: Vec<String>,
}

impl Listeners {
    /// Binds 127.0.0.1, ::1 and `beyond` on `port`; port 0 takes a free one.
    ///
    /// # Errors
    /// [`ListenError`]: the port is taken on one of them, or an address is not this machine's.
    pub fn bind(port: u16, beyond: &[IpAddr]) -> Result<Listeners, ListenError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match bind_all(port, beyond) {
                Err(ListenError::Taken(_)) if port == 0 && tries < PORT_TRIES => {}
                bound => return bound,
            }
        }
    }

    /// The port that all of them share.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address to tell people.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Serves until [`Phase::Draining`], then lets calls in flight finish, and closes what is left
    /// in [`Phase::Cutting`].
    pub async fn serve(self, core: Arc<Core>) {
        let graceful = GracefulShutdown::new();
        let mut accepting = JoinSet::new();
        let (connections, mut accepted) = tokio::sync::mpsc::channel(64);
        for socket in self.sockets {
            let connections = connections.clone();
            accepting.spawn(async move {
                loop {
                    match socket.accept().await {
                        Ok((stream, _)) => {
                            if connections.send(stream).await.is_err() {
                                return;
                            }
                        }
                        Err(error) => {
                            warn!(%error, "a connection could not be accepted");
                            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                        }
                    }
                }
            });
        }
        let mut open = JoinSet::new();
        let calls = core.open_calls.clone();
        let mut draining = pin!(calls.reached(Phase::Draining));
        loop {
            tokio::select! {
                Some(stream) = accepted.recv() => {
                    serve_connection(&core, stream, &graceful, &mut open);
                }
                Some(_) = open.join_next(), if !open.is_empty() => {}
                () = &mut draining => break,
            }
        }
        accepting.abort_all();
        while accepting.join_next().await.is_some() {}
        // Their requests may be on the way already.
        while let Ok(stream) = accepted.try_recv() {
            serve_connection(&core, stream, &graceful, &mut open);
        }
        tokio::select! {
            () = graceful.shutdown() => {}
            () = calls.reached(Phase::Cutting) => {}
        }
        open.shutdown().await;
    }
}

fn bind_all(port: u16, beyond: &[IpAddr]) -> Result<Listeners, ListenError> {
    // All addresses of a family are one socket, which the system gives to nobody who has one of
    // them already.
    let widest = |loopback: IpAddr, all: IpAddr| match beyond.contains(&all) {
        true => all,
        false => loopback,
    };
    let v4 = widest(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::UNSPECIFIED.into());
    let v6 = widest(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into());
    let first = bind(SocketAddr::from((v4, port)))?;
    let port = first.local_addr().map_or(port, |address| address.port());
    let mut listeners = Listeners {
        sockets: vec![first],
        port,
        warnings: Vec::new(),
    };
    match bind(SocketAddr::from((v6, port))) {
        Ok(socket) => listeners.sockets.push(socket),
        Err(ListenError::Refused { source, .. }) if has_no_ipv6(&source) => {
            listeners.warnings.push(format!(
                "this machine has no IPv6 loopback, so [::1]:{port} does not answer: {source}"
            ));
        }
        Err(error) => return Err(error),
    }
    let covered = |ip: &IpAddr| {
        let of_family = if ip.is_ipv4() { v4 } else { v6 };
        of_family.is_unspecified()
    };
    for ip in beyond.iter().filter(|ip| !covered(ip)) {
        listeners.sockets.push(bind(SocketAddr::from((*ip, port)))?);
    }
    Ok(listeners)
}

fn has_no_ipv6(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::AddrNotAvailable | io::ErrorKind::Unsupported
    ) || error.raw_os_error() == Some(NO_ADDRESS_FAMILY)
}

/// `EAFNOSUPPORT`, for which `io::ErrorKind` has no name.
#[cfg(target_os = "linux")]
const NO_ADDRESS_FAMILY: i32 = 97;
#[cfg(target_os = "macos")]
const NO_ADDRESS_FAMILY: i32 = 47;
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
const NO_ADDRESS_FAMILY: i32 = 10047;

fn bind(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let open = || -> io::Result<TcpListener> {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        // A restart must not wait for old connections to be forgotten. On Windows this would let
        // two programs share the port.
        #[cfg(unix)]
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    open().map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::Taken(address),
        _ => ListenError::Refused { address, source },
    })
}

fn serve_connection(
    core: &Arc<Core>,
    stream: TcpStream,
    graceful: &GracefulShutdown,
    open: &mut JoinSet<()>,
) {
    // Without it the second event of a stream waits 40 ms for a delayed acknowledgement.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY could not be set");
    }
    let Ok(local) = stream.local_addr() else {
        return;
    };
    let connection = Connection { local: local.ip() };
    let core = core.clone();
    let service = service_fn(move |request| {
        // Boxed, since the connection moves it about and it is some kilobytes.
        let answer = Box::pin(call::answer(core.clone(), connection, request));
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let serving = server
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .into_owned();
    let serving = graceful.watch(serving);
    open.spawn(async move {
        if let Err(error) = serving.await {
            debug!(%error, "a connection ended early");
        }
    });
}
