//! Counts ended calls. What a call counts in is looked up once for all calls of its kind.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::labels::{self, ByProvider, Ended, Merged, Operation, Request, Served, Spent};
use super::series::Bounded;
use crate::store::{CallEnd, DedupLabel, Outcome};

/// Seconds. The boundaries that the conventions advise for both their durations.
const OPERATION_BUCKETS: [f64; 14] = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
];

/// Seconds. Down to a kept answer's fraction of a millisecond, up to the ten minutes that an
/// unstreamed call may take.
const REQUEST_BUCKETS: [f64; 19] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12,
    10.24, 20.48, 40.96, 81.92, 600.0,
];

/// Seconds, from 10 µs to 100 ms.
const OVERHEAD_BUCKETS: [f64; 13] = [
    0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1,
];

/// Kinds of calls whose counters are kept at hand: several times what a busy day has. Those of
/// further kinds are looked up for every call, a microsecond more.
const KINDS: usize = 1000;

/// The metrics of ended calls.
#[derive(Debug)]
pub struct Calls {
    requests: Bounded<Request, Counter>,
    durations: Bounded<Served, Histogram>,
    /// Five label sets in all.
    overhead: Family<Spent, Histogram>,
    merged: Bounded<Merged, Counter>,
    upstream_calls: Bounded<ByProvider, Counter>,
    operations: Bounded<Ended, Histogram>,
    first_chunks: Bounded<Operation, Histogram>,
    /// std RwLock: held for a look-up and a few additions, never across an await.
    at_hand: RwLock<HashMap<Kind, Counters>>,
}

/// All that chooses the series of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kind {
    provider: Arc<str>,
    model: Option<Arc<str>>,
    route: &'static str,
    dedup: DedupLabel,
    outcome: Outcome,
    status: Option<u16>,
    streaming: bool,
    was_sent: bool,
    was_answered: bool,
    has_content: bool,
    has_ended: bool,
}

impl Kind {
    fn of(end: &CallEnd) -> Kind {
        Kind {
            provider: end.start.provider.clone(),
            model: end.start.model.clone(),
            route: labels::shown_route(&end.start),
            dedup: end.start.dedup,
            outcome: end.outcome,
            status: end.status,
            streaming: end.start.streaming,
            was_sent: end.sent.is_some(),
            was_answered: end.head.is_some(),
            has_content: end.first_token.is_some(),
            has_ended: end.upstream_ended.is_some(),
        }
    }
}

/// What calls of one kind count in.
#[derive(Debug)]
struct Counters {
    request: Counter,
    duration: Histogram,
    overhead: Option<Histogram>,
    upstream_call: Option<Counter>,
    merged: Option<Counter>,
    operation: Option<Histogram>,
    first_chunk: Option<Histogram>,
}

impl Default for Calls {
    fn default() -> Calls {
        Calls {
            requests: Bounded::default(),
            durations: Bounded::new(|| Histogram::new(REQUEST_BUCKETS)),
            overhead: Family::new_with_constructor(|| Histogram::new(OVERHEAD_BUCKETS)),
            merged: Bounded::default(),
            upstream_calls: Bounded::default(),
            operations: Bounded::new(|| Histogram::new(OPERATION_BUCKETS)),
            first_chunks: Bounded::new(|| Histogram::new(OPERATION_BUCKETS)),
            at_hand: RwLock::default(),
        }
    }
}

impl Calls {
    /// Counts a call that has ended.
    pub fn count(&self, end: &CallEnd) {
        let kind = Kind::of(end);
        let at_hand = self.at_hand.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = at_hand.get(&kind) {
            return counters.count(end);
        }
        let has_room = at_hand.len() < KINDS;
        drop(at_hand);
        let counters = self.counters(end);
        counters.count(end);
        if has_room {
            let mut at_hand = self.at_hand.write().unwrap_or_else(PoisonError::into_inner);
            at_hand.insert(kind, counters);
        }
    }

    /// The same with nothing at hand, for tests to compare with.
    #[cfg(test)]
    pub fn count_anew(&self, end: &CallEnd) {
        self.counters(end).count(end);
    }

    /// What calls like this one count in.
    fn counters(&self, end: &CallEnd) -> Counters {
        let operation = Operation::of(end);
        let has_ended = end.sent.is_some() && end.upstream_ended.is_some();
        let timed = operation.as_ref().filter(|_| has_ended);
        // The conventions want the first chunk's time of streams only.
        let streamed = timed.filter(|_| end.start.streaming && end.first_token.is_some());
        let sent = end.sent.map(|_| ByProvider::new(&end.start.provider));
        Counters {
            request: self.requests.of(&Request::of(end)),
            duration: self.durations.of(&Served::of(end)),
            overhead: Spent::of(end).map(|spent| self.overhead.get_or_create_owned(&spent)),
            upstream_call: sent.map(|provider| self.upstream_calls.of(&provider)),
            merged: operation.as_ref().map(|_| self.merged.of(&Merged::of(end))),
            first_chunk: streamed.map(|operation| self.first_chunks.of(operation)),
            operation: timed
                .map(|operation| self.operations.of(&Ended::of(operation.clone(), end))),
        }
    }

    /// Gives `provider` those counters that depend on nothing else: a rate does not see the first
    /// call of a series that only begins with it.
    pub fn begin_at_zero(&self, provider: &Arc<str>) {
        self.upstream_calls.of(&ByProvider::new(provider));
        for merged in Merged::all_of(provider) {
            self.merged.of(&merged);
        }
    }

    /// Names them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "traygate_requests",
            "Calls that have ended, by provider, route, outcome on record and the status their client was sent",
            self.requests.family(),
        );
        registry.register_with_unit(
            "traygate_request_duration",
            "From a call's coming to its end, as its client sees it: queue, upstream and overhead",
            Unit::Seconds,
            self.durations.family(),
        );
        registry.register_with_unit(
            "traygate_overhead",
            "Time of a call inside Traygate, neither upstream nor waiting in the queue, the client's upload of the request included; not known of calls that joined another",
            Unit::Seconds,
            self.overhead.clone(),
        );
        registry.register(
            "traygate_dedup",
            "Generation calls by what dedup made of them: miss and off went their own way, joined shared a call in flight, cached got a kept answer",
            self.merged.family(),
        );
        registry.register(
            "traygate_upstream_calls",
            "Requests sent to a provider on a call's behalf",
            self.upstream_calls.family(),
        );
        registry.register_with_unit(
            "gen_ai_client_operation_duration",
            "Upstream generation calls, from the request to the end of the answer",
            Unit::Seconds,
            self.operations.family(),
        );
        registry.register_with_unit(
            "gen_ai_client_operation_time_to_first_chunk",
            "Streamed upstream generation calls, from the request to the first content",
            Unit::Seconds,
            self.first_chunks.family(),
        );
    }
}

impl Counters {
    fn count(&self, end: &CallEnd) {
        let sent = end.sent.unwrap_or_default();
        let upstream = end.upstream_ended.unwrap_or(sent).saturating_sub(sent);
        let add = |times: &Option<Histogram>, time: Duration| {
            if let Some(times) = times {
                times.observe(time.as_secs_f64());
            }
        };
        self.request.inc();
        self.duration.observe(end.duration.as_secs_f64());
        let outside = end.queued + upstream;
        add(&self.overhead, end.duration.saturating_sub(outside));
        add(&self.operation, upstream);
        let first_content = end.first_token.unwrap_or(sent);
        add(&self.first_chunk, first_content.saturating_sub(sent));
        for counter in [&self.upstream_call, &self.merged].into_iter().flatten() {
            counter.inc();
        }
    }
}
