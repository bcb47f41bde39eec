//! What a scraper reads at `/traygate/metrics`: counts and times of calls that have ended, and how
//! things stand at this moment, as Prometheus text.
//!
//! Where OpenTelemetry has a name it is taken, from its semantic conventions for generative AI as
//! of 1.41, with `gen_ai.provider.name` for what was `gen_ai.system` until 1.36: Traygate is the
//! client there, and an operation is one upstream call. So a call that shared another's answer is
//! no operation, and is counted in Traygate's own metrics only.

mod calls;
mod gauges;
mod labels;
mod series;

#[cfg(test)]
mod tests;

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use self::calls::Calls;
use self::gauges::Gauges;
use crate::core::Core;
use crate::store::CallEnd;

/// The `content-type` of what [`Metrics::render`] returns.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Everything that is counted. Never waits for a scrape, and fails no call.
#[derive(Debug, Default)]
pub struct Metrics {
    calls: Calls,
    gauges: Gauges,
}

impl Metrics {
    /// Counts a call that has ended. Takes a fraction of a microsecond, and allocates only for the
    /// first call of its kind.
    pub fn finished(&self, end: &CallEnd) {
        self.calls.count(end);
    }

    /// All of it as Prometheus text (version 0.0.4), with how `core` stands now.
    pub fn render(&self, core: &Core) -> String {
        for provider in &core.world().providers {
            self.calls.begin_at_zero(provider.name());
        }
        let mut registry = Registry::default();
        self.calls.register(&mut registry);
        self.gauges.register(&mut registry, core);
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        registry.register(
            "traygate_build",
            "The version that runs, as a label of a constant 1",
            Info::new(version),
        );
        let mut text = String::new();
        let written = prometheus_text::encode(&mut text, &registry);
        debug_assert!(written.is_ok(), "a String takes whatever is written");
        text
    }
}
