//! Finds out, by a free request, that a provider whose breaker is open is well again.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use super::Provider;
use super::state::Change;
use crate::call::breaker::report;
use crate::core::Core;

/// How long one check may take.
const CHECK_LIMIT: Duration = Duration::from_secs(2);

/// Checks the provider until its breaker wants it no more, or the settings have it no more. One
/// watch at a time.
pub fn watch(core: &Arc<Core>, provider: &Arc<Provider>) {
    if wanting(core, provider).is_none() || !provider.state.begin_check() {
        return;
    }
    let (core, provider) = (core.clone(), provider.clone());
    tokio::spawn(async move {
        loop {
            let watch = Watch {
                core: &core,
                provider: &provider,
            };
            watch.check_while_wanted().await;
            drop(watch);
            // It may have opened again between the last look and the end of the watch.
            if wanting(&core, &provider).is_none() || !provider.state.begin_check() {
                return;
            }
        }
    });
}

/// The provider as the settings have it now, if its breaker wants to be checked.
fn wanting(core: &Core, provider: &Provider) -> Option<Arc<Provider>> {
    let world = core.world();
    let present = world.provider(provider.name())?;
    let is_same = Arc::ptr_eq(&present.state, &provider.state);
    let interval = present.settings.breaker.recovery_check;
    let wants = is_same && !interval.is_zero() && present.state.wants_recovery_check();
    wants.then(|| present.clone())
}

/// A running watch; dropping it lets the next one begin.
struct Watch<'a> {
    core: &'a Arc<Core>,
    provider: &'a Arc<Provider>,
}

impl Watch<'_> {
    async fn check_while_wanted(&self) {
        loop {
            // Enlisted before the look, so that no change falls between the two.
            let mut changed = pin!(self.provider.state.reconfigured());
            changed.as_mut().enable();
            let Some(provider) = wanting(self.core, self.provider) else {
                return;
            };
            tokio::select! {
                () = tokio::time::sleep(provider.settings.breaker.recovery_check) => {
                    self.check(&provider).await;
                }
                () = changed => {}
            }
        }
    }

    async fn check(&self, provider: &Arc<Provider>) {
        let alive = is_alive(self.core, provider).await;
        let now = self.core.clock.now();
        if let Some(transition) = provider.state.recovery_check(alive, now) {
            info!(provider = %provider.name(), "recovery check answered: the next call tries");
            let change = Change {
                model: None,
                transition,
            };
            report(self.core, provider, &[change], now);
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
