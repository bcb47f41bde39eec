//! The listeners: both loopbacks and what the settings add, on one port.

mod doors;
mod owner;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

use crate::admin;
use crate::call::accept::Connection;
use crate::call::{self};
use crate::core::{Core, Phase};

pub use self::doors::{Accepted, Doors, Listeners, Move};
pub use self::owner::port_owner;

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

/// Where Traygate listens and what is wrong with that, for whoever asks.
#[derive(Debug, Default)]
pub struct ListenerState(Mutex<Listening>);

#[derive(Debug, Default)]
struct Listening {
    address: Option<SocketAddr>,
    trouble: Option<String>,
}

impl ListenerState {
    /// The address to tell people; `None` while it does not listen.
    pub fn address(&self) -> Option<SocketAddr> {
        self.lock().address
    }

    /// What is wrong, in words.
    pub fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// It listens there, and all is well.
    pub fn listens_on(&self, address: SocketAddr) {
        *self.lock() = Listening {
            address: Some(address),
            trouble: None,
        };
    }

    /// Something is wrong, or no longer.
    pub fn set_trouble(&self, trouble: Option<String>) {
        self.lock().trouble = trouble;
    }

    fn lock(&self) -> MutexGuard<'_, Listening> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves what comes through the doors until [`Phase::Draining`], then lets calls in flight finish,
/// and closes what is left in [`Phase::Cutting`].
pub async fn serve(core: Arc<Core>, mut accepted: mpsc::Receiver<Accepted>) {
    let mut open = JoinSet::new();
    let own = admin::http_face(core.clone());
    let calls = core.open_calls.clone();
    let mut draining = pin!(calls.reached(Phase::Draining));
    let mut cutting = pin!(calls.reached(Phase::Cutting));
    let mut is_draining = false;
    loop {
        tokio::select! {
            connection = accepted.recv() => match connection {
                Some(connection) => serve_connection(&core, &own, connection, &mut open),
                // The last door is closed and the last connection is over.
                None => break,
            },
            Some(_) = open.join_next(), if !open.is_empty() => {}
            () = &mut draining, if !is_draining => {
                is_draining = true;
                core.close_doors();
            }
            () = &mut cutting => break,
        }
    }
    open.shutdown().await;
}

fn serve_connection(core: &Arc<Core>, own: &Router, accepted: Accepted, open: &mut JoinSet<()>) {
    let Accepted { stream, watcher } = accepted;
    // Without it the second event of a stream waits 40 ms for a delayed acknowledgement.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY could not be set");
    }
    let Ok(local) = stream.local_addr() else {
        return;
    };
    let connection = Connection { local: local.ip() };
    let (core, own) = (core.clone(), own.clone());
    let service = service_fn(move |request| {
        // Boxed, since the connection moves it about and it is some kilobytes.
        let answer = Box::pin(call::answer(core.clone(), &own, connection, request));
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let serving = server
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .into_owned();
    let serving = watcher.watch(serving);
    open.spawn(async move {
        if let Err(error) = serving.await {
            debug!(%error, "a connection ended early");
        }
    });
}
