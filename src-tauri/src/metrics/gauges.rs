//! How providers and the log stand at the moment of a scrape: asked then, kept nowhere.

use std::iter::once;

use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use super::labels::{ByBreaker, ByProvider};
use super::series::Seats;
use crate::core::Core;
use crate::policy::breaker::State;

/// The label sets that have been shown: one that has its series keeps it from scrape to scrape.
#[derive(Debug, Default)]
pub struct Gauges {
    providers: Seats<ByProvider>,
    breakers: Seats<ByBreaker>,
}

/// A breaker's state as a number: the larger, the less passes.
fn level(state: State) -> i64 {
    match state {
        State::Closed => 0,
        State::HalfOpen => 1,
        State::Open => 2,
    }
}

/// A count as a gauge takes it.
fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Gauges {
    /// Reads what there is now into metrics of `registry`.
    pub fn register(&self, registry: &mut Registry, core: &Core) {
        let in_flight = Family::<ByProvider, Gauge>::default();
        let queued = Family::<ByProvider, Gauge>::default();
        let breakers = Family::<ByBreaker, Gauge>::default();
        let now = core.clock.now();
        for provider in &core.world().providers {
            let labels = self.providers.of(&ByProvider::new(provider.name()));
            let pool = provider.state.pool.snapshot();
            // Added up, since providers without a series of their own share one.
            let held = gauge(pool.in_flight + pool.extra);
            in_flight.get_or_create(&labels).inc_by(held);
            queued.get_or_create(&labels).inc_by(gauge(pool.waiting));
            let standing = provider.state.snapshot(now);
            let own = (None, standing.provider);
            let of_models = standing.models.into_iter();
            let of_models = of_models.map(|(model, breaker)| (Some(model), breaker));
            for (model, breaker) in once(own).chain(of_models) {
                let labels = ByBreaker::new(provider.name(), model.as_ref());
                let shown = breakers.get_or_create_owned(&self.breakers.of(&labels));
                shown.set(shown.get().max(level(breaker.state)));
            }
        }
        registry.register(
            "traygate_inflight",
            "Calls that hold one of their provider's places, probes beyond the limit included",
            in_flight,
        );
        registry.register(
            "traygate_queue_depth",
            "Calls that wait for one of their provider's places",
            queued,
        );
        registry.register(
            "traygate_breaker_state",
            "0 closed, 1 half-open, 2 open; a model's own breaker has its name in the label model, and is there only while the model has overloads to remember",
            breakers,
        );
        let log = core.store.health();
        registry.register(
            "traygate_log_pending",
            "Rows of the log that wait in memory to be written",
            ConstGauge::new(gauge(log.pending_rows)),
        );
        registry.register(
            "traygate_log_dropped",
            "Calls that will never be on record, since the log could not be written for too long",
            ConstCounter::new(log.dropped_rows),
        );
    }
}
