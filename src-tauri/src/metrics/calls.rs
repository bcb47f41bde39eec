//! Counts ended calls. What a call counts in is looked up once for all calls of its kind.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::labels::{
    self, ByProvider, Ended, Merged, Operation, Request, Served, Spent, TokenType, Used,
};
use super::series::Bounded;
use crate::policy::money::Nanodollars;
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

/// Tokens. The boundaries that the conventions advise.
const TOKEN_BUCKETS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];

/// Dollars. A float, as all of Prometheus: for a graph, not for the books.
type Dollars = Counter<f64, AtomicU64>;

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
    tokens: Bounded<Used, Histogram>,
    costs: Bounded<ByProvider, Dollars>,
    savings: Bounded<ByProvider, Dollars>,
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
    has_input: bool,
    has_output: bool,
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
            has_input: tokens(end, TokenType::Input).is_some(),
            has_output: tokens(end, TokenType::Output).is_some(),
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
    input: Option<Histogram>,
    output: Option<Histogram>,
    cost: Dollars,
    saved: Dollars,
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
            tokens: Bounded::new(|| Histogram::new(TOKEN_BUCKETS)),
            costs: Bounded::default(),
            savings: Bounded::default(),
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
        let provider = ByProvider::new(&end.start.provider);
        let sent = end.sent.map(|_| &provider);
        let used = |kind| {
            let operation = operation.clone().filter(|_| tokens(end, kind).is_some());
            operation.map(|operation| self.tokens.of(&Used::of(operation, kind)))
        };
        Counters {
            input: used(TokenType::Input),
            output: used(TokenType::Output),
            cost: self.costs.of(&provider),
            saved: self.savings.of(&provider),
            request: self.requests.of(&Request::of(end)),
            duration: self.durations.of(&Served::of(end)),
            overhead: Spent::of(end).map(|spent| self.overhead.get_or_create_owned(&spent)),
            upstream_call: sent.map(|provider| self.upstream_calls.of(provider)),
            merged: operation.as_ref().map(|_| self.merged.of(&Merged::of(end))),
            first_chunk: streamed.map(|operation| self.first_chunks.of(operation)),
            operation: timed
                .map(|operation| self.operations.of(&Ended::of(operation.clone(), end))),
        }
    }

    /// Gives `provider` those counters that depend on nothing else: a rate does not see the first
    /// call of a series that only begins with it.
    pub fn begin_at_zero(&self, provider: &Arc<str>) {
        let by_provider = ByProvider::new(provider);
        self.upstream_calls.of(&by_provider);
        self.costs.of(&by_provider);
        self.savings.of(&by_provider);
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
        registry.register(
            "gen_ai_client_token_usage",
            "Tokens of upstream generation calls; input counts cached tokens too, and what a provider did not say is estimated",
            self.tokens.family(),
        );
        registry.register(
            "traygate_cost_dollars",
            "What calls have added to the bill, as far as their models have prices; subscriptions are not in it",
            self.costs.family(),
        );
        registry.register(
            "traygate_saved_dollars",
            "What joined and kept answers would have cost",
            self.savings.family(),
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
        let count = |counts: &Option<Histogram>, kind| {
            if let (Some(counts), Some(tokens)) = (counts, tokens(end, kind)) {
                counts.observe(tokens);
            }
        };
        count(&self.input, TokenType::Input);
        count(&self.output, TokenType::Output);
        for (dollars, amount) in [(&self.cost, end.money.cost), (&self.saved, end.money.saved)] {
            if let Some(amount) = amount.filter(|amount| *amount > Nanodollars::ZERO) {
                dollars.inc_by(as_dollars(amount));
            }
        }
    }
}

/// Tokens of one kind that the upstream call used, where they are known.
#[expect(clippy::cast_precision_loss, reason = "no call has 2^53 tokens")]
fn tokens(end: &CallEnd, kind: TokenType) -> Option<f64> {
    let usage = end.usage.as_ref().filter(|_| end.sent.is_some())?;
    let tokens = match kind {
        TokenType::Input => usage.whole_input(),
        TokenType::Output => usage.output,
    };
    tokens.map(|tokens| tokens as f64)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "exact below nine million dollars, and a graph shows less"
)]
fn as_dollars(amount: Nanodollars) -> f64 {
    amount.0 as f64 / 1e9
}
