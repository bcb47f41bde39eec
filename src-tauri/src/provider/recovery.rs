//! Finds out, by a free request, that a provider whose breaker is open is well again.

use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use super::Provider;
use crate::core::Core;

/// How long one check may take.
const CHECK_LIMIT: Duration = Duration::from_secs(2);

/// Checks the provider until its breaker wants it no more. One watch at a time.
pub fn watch(core: &Arc<Core>, provider: &Arc<Provider>) {
    let interval = provider.settings.breaker.recovery_check;
    if interval.is_zero() || !provider.state.begin_check() {
        return;
    }
    let (core, provider) = (core.clone(), provider.clone());
    tokio::spawn(async move {
        loop {
            let watch = Watch {
                core: &core,
                provider: &provider,
            };
            while provider.state.wants_recovery_check() {
                tokio::time::sleep(interval).await;
                watch.check().await;
            }
            drop(watch);
            // It may have opened again between the last look and the end of the watch.
            if !provider.state.wants_recovery_check() || !provider.state.begin_check() {
                return;
            }
        }
    });
}

/// A running watch; dropping it lets the next one begin.
struct Watch<'a> {
    core: &'a Core,
    provider: &'a Provider,
}

impl Watch<'_> {
    async fn check(&self) {
        let provider = self.provider;
        let alive = is_alive(self.core, provider).await;
        let now = self.core.clock.now();
        if provider.state.recovery_check(alive, now).is_some() {
            info!(provider = %provider.name(), "recovery check answered: the next call tries");
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.provider.state.end_check();
    }
}

/// Any answer below 500 to a `GET` of the model list, on a connection of its own.
async fn is_alive(core: &Core, provider: &Provider) -> bool {
    let Ok(client) = provider.clients.fresh_connections() else {
        return false;
    };
    let mut request = client
        .get(provider.base.join(provider.model_list(), None))
        .timeout(CHECK_LIMIT);
    if let Some((name, value)) = crate::call::credential::own_credential(core, provider) {
        request = request.header(name, value);
    }
    for (name, value) in &provider.settings.headers {
        request = request.header(name, value);
    }
    matches!(request.send().await, Ok(answer) if answer.status().as_u16() < 500)
}
