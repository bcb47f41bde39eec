//! What the tests stand on: a scripted provider, a client that sees every byte, and the proxy
//! between them.

#![allow(dead_code, reason = "a toolbox: no test needs every tool")]

pub mod app;
pub mod client;
#[cfg(unix)]
pub mod process;
pub mod tls;
pub mod upstream;
mod wire;

use std::future::Future;
use std::time::{Duration, Instant};

/// How long a test waits for what must happen. Generous, since machines are slow at times; only a
/// failing test ever waits so long.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The time at which something was seen on the wire.
pub fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "tests time real sockets")]
    Instant::now()
}

/// Awaits what must happen within [`LIMIT`].
///
/// # Panics
/// With `what`, if it does not.
pub async fn must<T>(what: &str, happens: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, happens).await {
        Ok(value) => value,
        Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
    }
}

/// Durations as one says them: `1500.ms()`, `2.secs()`.
pub trait Span {
    fn ms(self) -> Duration;
    fn secs(self) -> Duration;
}

impl Span for u64 {
    fn ms(self) -> Duration {
        Duration::from_millis(self)
    }

    fn secs(self) -> Duration {
        Duration::from_secs(self)
    }
}

/// Looks again and again until it is so: for what no event tells of.
pub async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    must(what, async {
        while !is_so().await {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}
