//! The sockets that accept: both loopbacks and what the settings add, on one port. They are
//! exchanged while Traygate runs, the new ones first.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use super::{ListenError, ListenerState};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// Connections that have been accepted and are not served yet.
const ACCEPTED: usize = 64;
/// How often a free port is looked for, where any will do, until it is free on both loopbacks.
const PORT_TRIES: u32 = 20;
/// How long accepting pauses when the system has no descriptor left for one more connection.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Bound sockets, not yet accepting.
pub struct Listeners {
    sockets: Vec<(SocketAddr, TcpListener)>,
    /// Addresses on which doors are open already, and stay.
    kept: Vec<SocketAddr>,
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
        Listeners::bind_beside(port, beyond, &[])
    }

    /// The same, where the addresses of `open` are listened on already.
    fn bind_beside(
        port: u16,
        beyond: &[IpAddr],
        open: &[SocketAddr],
    ) -> Result<Listeners, ListenError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match bind_all(port, beyond, open) {
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
}

/// A connection, and what ends it when its door is closed.
pub struct Accepted {
    pub stream: TcpStream,
    pub watcher: Watcher,
}

/// The doors that are open. Dropping it closes them.
pub struct Doors {
    state: Arc<ListenerState>,
    // std Mutex: held for a look, never across an await.
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    port: u16,
    doors: Vec<Door>,
    /// Every door has one: the receiver ends with the last connection of the last door. `None`
    /// once they are all told to close.
    accepted: Option<mpsc::Sender<Accepted>>,
}

/// One socket. Dropping it tells its task to accept no more and to let its connections finish.
struct Door {
    address: SocketAddr,
    _open: oneshot::Sender<()>,
    /// The socket is closed.
    closed: oneshot::Receiver<()>,
}

/// New doors, bound and not open yet. One of [`Doors::commit`] and [`Doors::undo`] comes next.
pub struct Move {
    listeners: Listeners,
    /// Those that had to be closed to make room, to be opened again if nothing comes of it.
    closed: Vec<SocketAddr>,
}

impl Move {
    /// The address to tell people.
    pub fn address(&self) -> SocketAddr {
        self.listeners.address()
    }

    pub fn warnings(&self) -> &[String] {
        &self.listeners.warnings
    }
}

impl Doors {
    /// Opens them; connections come through the receiver, which ends when all are closed and
    /// every connection is over.
    pub fn open(
        listeners: Listeners,
        state: Arc<ListenerState>,
    ) -> (Doors, mpsc::Receiver<Accepted>) {
        let (accepted, connections) = mpsc::channel(ACCEPTED);
        let doors = Doors {
            state,
            open: Mutex::new(Open {
                accepted: Some(accepted),
                ..Open::default()
            }),
        };
        doors.let_in(listeners);
        (doors, connections)
    }

    /// The port that all of them share.
    pub fn port(&self) -> u16 {
        self.lock().port
    }

    /// Binds what is not open yet. A socket for all addresses of a family and one for a single of
    /// them exclude each other: only there the old one is closed first, for a moment.
    ///
    /// # Errors
    /// [`ListenError`]; the doors are as they were.
    pub async fn prepare(&self, port: u16, beyond: &[IpAddr]) -> Result<Move, ListenError> {
        let open: Vec<SocketAddr> = self.lock().doors.iter().map(|door| door.address).collect();
        let stays: Vec<SocketAddr> = wanted(port, beyond);
        let in_the_way = |open: &&SocketAddr| {
            let overlaps = |wanted: &SocketAddr| {
                wanted != *open
                    && wanted.port() == open.port()
                    && wanted.is_ipv4() == open.is_ipv4()
                    && (wanted.ip().is_unspecified() || open.ip().is_unspecified())
            };
            stays.iter().any(overlaps)
        };
        let closed: Vec<SocketAddr> = open.iter().filter(in_the_way).copied().collect();
        self.close(|address| closed.contains(&address)).await;
        let left: Vec<SocketAddr> = open
            .into_iter()
            .filter(|address| !closed.contains(address))
            .collect();
        match Listeners::bind_beside(port, beyond, &left) {
            Ok(listeners) => Ok(Move { listeners, closed }),
            Err(error) => {
                self.open_again(&closed);
                Err(error)
            }
        }
    }

    /// Opens the new doors and closes the others, whose connections finish.
    pub async fn commit(&self, new: Move) {
        let stays: Vec<SocketAddr> = {
            let bound = new.listeners.sockets.iter().map(|(address, _)| *address);
            bound.chain(new.listeners.kept.iter().copied()).collect()
        };
        self.let_in(new.listeners);
        self.close(|address| !stays.contains(&address)).await;
    }

    /// Nothing comes of it: the doors are as they were.
    pub fn undo(&self, new: Move) {
        drop(new.listeners);
        self.open_again(&new.closed);
    }

    /// Closes all of them for good.
    pub fn close_all(&self) {
        let mut open = self.lock();
        open.accepted = None;
        open.doors.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_in(&self, listeners: Listeners) {
        let mut open = self.lock();
        let Some(accepted) = open.accepted.clone() else {
            return;
        };
        open.port = listeners.port;
        for (address, socket) in listeners.sockets {
            let (keep_open, told_to_close) = oneshot::channel();
            let (is_closed, closed) = oneshot::channel();
            open.doors.push(Door {
                address,
                _open: keep_open,
                closed,
            });
            let accepting = accept(socket, accepted.clone(), self.state.clone(), told_to_close);
            let accepted = accepted.clone();
            tokio::spawn(async move {
                let graceful = accepting.await;
                let _ = is_closed.send(());
                graceful.shutdown().await;
                // Held until its last connection is over.
                drop(accepted);
            });
        }
    }

    /// Closes some, and waits until their addresses are free.
    async fn close(&self, which: impl Fn(SocketAddr) -> bool) {
        let closing: Vec<Door> = {
            let mut open = self.lock();
            let all = open.doors.drain(..);
            let (closing, stay): (Vec<Door>, Vec<Door>) = all.partition(|door| which(door.address));
            open.doors = stay;
            closing
        };
        for door in closing {
            let Door { _open, closed, .. } = door;
            drop(_open);
            // An error is a task that has ended, and its socket with it.
            let _ = closed.await;
        }
    }

    fn open_again(&self, closed: &[SocketAddr]) {
        let mut again = Listeners {
            sockets: Vec::new(),
            kept: Vec::new(),
            port: self.port(),
            warnings: Vec::new(),
        };
        for address in closed {
            match bind(*address) {
                Ok(socket) => again.sockets.push((*address, socket)),
                Err(error) => {
                    warn!(%error, "an address could not be listened on again");
                    self.state.set_trouble(Some(error.to_string()));
                }
            }
        }
        self.let_in(again);
    }
}

/// Accepts until told to close, what waits in the socket by then too.
async fn accept(
    socket: TcpListener,
    accepted: mpsc::Sender<Accepted>,
    state: Arc<ListenerState>,
    mut told_to_close: oneshot::Receiver<()>,
) -> GracefulShutdown {
    let graceful = GracefulShutdown::new();
    let mut fails = false;
    loop {
        let next = tokio::select! {
            biased;
            next = socket.accept() => next,
            _ = &mut told_to_close => return graceful,
        };
        match next {
            Ok((stream, _)) => {
                if std::mem::take(&mut fails) {
                    state.set_trouble(None);
                }
                let watcher = graceful.watcher();
                if accepted.send(Accepted { stream, watcher }).await.is_err() {
                    return graceful;
                }
            }
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                fails = true;
                state.set_trouble(Some(format!("connections cannot be accepted: {error}")));
                tokio::select! {
                    () = tokio::time::sleep(OUT_OF_DESCRIPTORS) => {}
                    _ = &mut told_to_close => return graceful,
                }
            }
        }
    }
}

/// The addresses of a port, loopback first.
fn wanted(port: u16, beyond: &[IpAddr]) -> Vec<SocketAddr> {
    // All addresses of a family are one socket, which the system gives to nobody who has one of
    // them already.
    let widest = |loopback: IpAddr, all: IpAddr| match beyond.contains(&all) {
        true => all,
        false => loopback,
    };
    let v4 = widest(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::UNSPECIFIED.into());
    let v6 = widest(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into());
    let covered = |ip: &&IpAddr| {
        let of_family = if ip.is_ipv4() { v4 } else { v6 };
        !of_family.is_unspecified()
    };
    let beyond = beyond.iter().filter(covered).copied();
    [v4, v6]
        .into_iter()
        .chain(beyond)
        .map(|ip| SocketAddr::from((ip, port)))
        .collect()
}

fn bind_all(port: u16, beyond: &[IpAddr], open: &[SocketAddr]) -> Result<Listeners, ListenError> {
    let mut listeners = Listeners {
        sockets: Vec::new(),
        kept: Vec::new(),
        port,
        warnings: Vec::new(),
    };
    for mut address in wanted(port, beyond) {
        address.set_port(listeners.port);
        if open.contains(&address) {
            listeners.kept.push(address);
            continue;
        }
        let can_be_missing =
            address.ip() == Ipv6Addr::LOCALHOST || address.ip() == Ipv6Addr::UNSPECIFIED;
        match bind(address) {
            Ok(socket) => {
                let bound = socket.local_addr().unwrap_or(address);
                listeners.port = bound.port();
                listeners.sockets.push((bound, socket));
            }
            Err(ListenError::Refused { source, .. }) if can_be_missing && has_no_ipv6(&source) => {
                listeners.warnings.push(format!(
                    "this machine has no IPv6 loopback, so {address} does not answer: {source}"
                ));
            }
            Err(error) => return Err(error),
        }
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
