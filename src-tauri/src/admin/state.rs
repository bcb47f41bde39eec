//! `GET state`: how everything stands at this moment.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State as Extracted;
use serde::Serialize;
use utoipa::ToSchema;

use super::mode::ModeView;
use crate::call::live::LiveCall;
use crate::call::pool;
use crate::clock::{Moment, WallTime};
use crate::core::Core;
use crate::policy::breaker::Snapshot;
use crate::policy::budget::{Level, Status};
use crate::policy::money::Nanodollars;
use crate::provider::Provider;
use crate::settings::{KeySource, Limits};
use crate::store::json;

/// How everything stands.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = State)]
pub struct StateView {
    version: &'static str,
    /// When this run began.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    started: WallTime,
    uptime_secs: f64,
    /// Where it listens, `127.0.0.1:7337`; none while it does not.
    address: Option<String>,
    mode: ModeView,
    /// What a person should know, the most pressing first.
    warnings: Vec<Warning>,
    providers: Vec<ProviderView>,
    dedup: DedupView,
    spend: SpendView,
    /// In the order of the settings.
    budgets: Vec<BudgetView>,
    log: LogView,
    /// Calls under way, the oldest first.
    running: Vec<RunningCall>,
}

/// Something a person should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Warning {
    about: About,
    /// What is wrong and what to do, in words.
    message: String,
}

/// What a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum About {
    /// It does not listen where it should.
    Port,
    /// Calls are not on record.
    Log,
    /// The settings file was refused; the older settings hold.
    Settings,
    /// Stored keys cannot be read.
    Keyring,
    /// Prices could not be brought up to date.
    Prices,
    /// Something that works otherwise than one may think.
    Note,
}

/// A provider.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Provider)]
pub struct ProviderView {
    name: String,
    /// `openai`, `anthropic`, `ollama`, `llama-cpp` or `demo`.
    kind: &'static str,
    base_url: String,
    /// Runs on this machine: other limits, no price.
    local: bool,
    /// Bare paths of its dialect go here.
    default: bool,
    /// A call has gone to it in this run.
    used: bool,
    key: KeyView,
    breaker: Snapshot,
    /// The breakers of models that have been overloaded, by name.
    models: Vec<ModelBreaker>,
    /// The last thing that went wrong, in words.
    last_error: Option<String>,
    /// In flight, waiting, and how many may be.
    pool: pool::Snapshot,
    limits: LimitsView,
}

/// A model's own breaker, for overloads.
#[derive(Debug, Serialize, ToSchema)]
struct ModelBreaker {
    model: String,
    breaker: Snapshot,
}

/// Whose key goes to a provider. Never the key.
#[derive(Debug, Serialize, ToSchema)]
struct KeyView {
    /// `auto`, `keyring`, `pass`, `env` or `none`, as in the settings.
    source: &'static str,
    /// Whether there is one of its own to send.
    present: bool,
}

/// What a provider's calls are held to.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Limits)]
struct LimitsView {
    /// Calls at once.
    concurrency: usize,
    /// Calls that may wait.
    queue: usize,
    queue_secs: f64,
    connect_secs: f64,
    /// To the first byte of a stream.
    timeout_secs: f64,
    /// For a whole answer that is not streamed.
    unstreamed_timeout_secs: f64,
    /// Between chunks of a stream.
    idle_secs: f64,
}

/// What merging did in this run.
#[derive(Debug, Serialize, ToSchema)]
struct DedupView {
    enabled: bool,
    /// Calls that went upstream and could be shared.
    led: u64,
    /// Calls that shared the answer of one in flight.
    joined: u64,
    /// Calls that got a kept answer.
    cached: u64,
    /// Upstream calls that were not made: `joined` and `cached`.
    upstream_calls_saved: u64,
    /// Calls under way that others may join.
    in_flight: usize,
    /// Kept answers, about.
    kept_answers: u64,
    /// Bytes they hold, about.
    kept_bytes: u64,
}

/// What calls cost.
#[derive(Debug, Serialize, ToSchema)]
struct SpendView {
    /// What all calls have cost today, by the machine's own calendar; in billionths of a dollar,
    /// as all amounts.
    #[schema(value_type = i64)]
    today_nanos: Nanodollars,
    /// Models that were called in this run and have no price.
    unpriced_models: usize,
}

/// A budget in its present period.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Budget)]
struct BudgetView {
    /// In words: `the day's budget for tool "aider"`.
    name: String,
    #[schema(value_type = i64)]
    cap_nanos: Nanodollars,
    #[schema(value_type = i64)]
    spent_nanos: Nanodollars,
    /// What calls under way have reserved.
    #[schema(value_type = i64)]
    held_nanos: Nanodollars,
    level: BudgetLevel,
    /// When the present period began.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    since: WallTime,
    /// When the next begins.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    resets_at: WallTime,
}

/// How far a budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum BudgetLevel {
    /// Less than `warn_at` of it.
    Within,
    /// `warn_at` of it or more.
    Near,
    /// All of it.
    Spent,
}

impl BudgetView {
    fn of(status: Status) -> BudgetView {
        BudgetView {
            name: status.budget,
            cap_nanos: status.cap,
            spent_nanos: status.spent,
            held_nanos: status.held,
            level: match status.level {
                Level::Within => BudgetLevel::Within,
                Level::Near => BudgetLevel::Near,
                Level::Spent => BudgetLevel::Spent,
            },
            since: status.since,
            resets_at: status.resets_at,
        }
    }
}

/// How the record fares.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
struct LogView {
    /// Whether a database is open for writing.
    recording: bool,
    /// Rows that wait in memory for the next commit.
    pending_rows: usize,
    /// Calls of this run that will never be on record.
    dropped_rows: u64,
    /// Why rows wait, in words; none once a commit has worked again.
    last_error: Option<String>,
    /// Bytes of the database and its write-ahead log.
    bytes: u64,
}

/// A call under way.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct RunningCall {
    id: String,
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    started: WallTime,
    provider: String,
    route: String,
    model: Option<String>,
    tool: String,
    streaming: bool,
    /// `miss`, `joined`, `cached` or `off`.
    dedup: &'static str,
    phase: Phase,
    /// Its client has gone; the upstream call goes on for others.
    caller_left: bool,
    /// From its coming until now, in milliseconds.
    running_ms: f64,
    /// From its coming until it went upstream, or until now while it waits.
    queued_ms: f64,
    /// From its coming to the first content.
    first_token_ms: Option<f64>,
    /// Bytes of the answer so far.
    bytes: u64,
    /// Pieces in which they came: for a stream, its events, about.
    chunks: usize,
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = CallPhase)]
enum Phase {
    /// It waits for a permit.
    Queued,
    /// It is upstream, and no answer has begun.
    Sent,
    /// The answer's head has come.
    Answering,
    /// Content flows.
    Content,
}

impl RunningCall {
    pub fn of(call: &LiveCall, now: Moment) -> RunningCall {
        let progress = call.progress();
        let after = |moment: Moment| json::millis_of(moment.since(call.began));
        let phase = match (progress.sent_at, progress.has_head, progress.content_at) {
            (.., Some(_)) => Phase::Content,
            (_, true, None) => Phase::Answering,
            (Some(_), false, None) => Phase::Sent,
            (None, false, None) => Phase::Queued,
        };
        let start = &call.start;
        RunningCall {
            id: start.id.to_string(),
            started: start.started,
            provider: start.provider.to_string(),
            route: start.route.to_string(),
            model: start.model.as_deref().map(str::to_owned),
            tool: start.tool.to_string(),
            streaming: start.streaming,
            dedup: start.dedup.as_str(),
            phase,
            caller_left: call.is_left(),
            running_ms: after(now),
            queued_ms: after(progress.sent_at.unwrap_or(now)),
            first_token_ms: progress.content_at.map(after),
            bytes: progress.bytes,
            chunks: progress.chunks,
        }
    }

    /// What changes while a call goes on, time aside.
    pub fn is_as_far_as(&self, other: &RunningCall) -> bool {
        let progress = |call: &RunningCall| (call.phase, call.chunks, call.caller_left);
        progress(self) == progress(other)
    }
}

impl ProviderView {
    pub fn of(core: &Core, provider: &Provider) -> ProviderView {
        let now = core.clock.now();
        let breakers = provider.state.snapshot(now);
        let settings = &provider.settings;
        let model = |(model, breaker): (Arc<str>, Snapshot)| ModelBreaker {
            model: model.to_string(),
            breaker,
        };
        // A query may hold a key.
        let mut base_url = settings.base_url.clone();
        base_url.set_query(None);
        ProviderView {
            name: provider.name().to_string(),
            kind: settings.kind.as_str(),
            base_url: base_url.into(),
            local: settings.local,
            default: settings.default,
            used: provider.state.is_used(),
            key: KeyView {
                source: match settings.key {
                    KeySource::Auto => "auto",
                    KeySource::Keyring => "keyring",
                    KeySource::Pass => "pass",
                    KeySource::Env(_) => "env",
                    KeySource::None => "none",
                },
                present: crate::call::credential::own_credential(core, provider).is_some(),
            },
            breaker: breakers.provider,
            models: breakers.models.into_iter().map(model).collect(),
            last_error: breakers.last_error.as_deref().map(str::to_owned),
            pool: provider.state.pool.snapshot(),
            limits: LimitsView::of(&settings.limits),
        }
    }
}

impl LimitsView {
    fn of(limits: &Limits) -> LimitsView {
        let secs = |span: Duration| span.as_secs_f64();
        LimitsView {
            concurrency: limits.concurrency,
            queue: limits.queue,
            queue_secs: secs(limits.queue_wait),
            connect_secs: secs(limits.connect),
            timeout_secs: secs(limits.first_byte),
            unstreamed_timeout_secs: secs(limits.unstreamed),
            idle_secs: secs(limits.idle),
        }
    }
}

impl StateView {
    pub fn of(core: &Core) -> StateView {
        let now = core.clock.now();
        let world = core.world();
        let counts = core.dedup.counts();
        let kept = core.dedup.holdings();
        let health = core.store.health();
        let providers = world.providers.iter();
        let running = core.live.all();
        StateView {
            version: env!("CARGO_PKG_VERSION"),
            started: core.started,
            uptime_secs: now.since(core.began).as_secs_f64(),
            address: core.listener.address().map(|address| address.to_string()),
            mode: ModeView::of(core),
            warnings: warnings(core),
            providers: providers
                .map(|provider| ProviderView::of(core, provider))
                .collect(),
            dedup: DedupView {
                enabled: world.settings.dedup.enabled,
                led: counts.led,
                joined: counts.joined,
                cached: counts.cached,
                upstream_calls_saved: counts.joined + counts.cached,
                in_flight: core.dedup.in_flight(),
                kept_answers: kept.answers,
                kept_bytes: kept.bytes,
            },
            spend: SpendView {
                today_nanos: core.spend.spent_today(core.clock.wall()),
                unpriced_models: core.spend.unpriced().len(),
            },
            budgets: core
                .spend
                .budgets(core.clock.wall())
                .into_iter()
                .map(BudgetView::of)
                .collect(),
            log: LogView {
                recording: health.recording,
                pending_rows: health.pending_rows,
                dropped_rows: health.dropped_rows,
                last_error: health.last_error,
                bytes: health.bytes,
            },
            running: running
                .iter()
                .map(|call| RunningCall::of(call, now))
                .collect(),
        }
    }
}

/// What a person should know, the most pressing first.
fn warnings(core: &Core) -> Vec<Warning> {
    let health = core.store.health();
    let lost = (health.dropped_rows > 0).then(|| {
        format!(
            "{} calls of this run will never be on record: there was no room for them in memory while they could not be written",
            health.dropped_rows
        )
    });
    let bodies_lost = (health.dropped_bodies > 0).then(|| {
        format!(
            "the bodies of {} calls of this run were not kept: they came faster than they could be written",
            health.dropped_bodies
        )
    });
    let not_recording = (!health.recording && health.last_error.is_none())
        .then(|| "calls are not on record: no database is open".to_owned());
    let told = |about, message: Option<String>| message.map(|message| Warning { about, message });
    let pressing = [
        told(About::Port, core.listener.trouble()),
        told(About::Log, health.last_error.or(not_recording)),
        told(About::Log, lost),
        told(About::Log, health.warning),
        told(About::Log, bodies_lost),
        told(About::Settings, core.settings_refusal()),
        told(About::Keyring, core.keys.problem()),
        told(About::Prices, core.price_list.trouble()),
        told(About::Note, health.notice),
    ];
    let notes = core.settings_warnings();
    let notes = notes.into_iter().map(|message| Warning {
        about: About::Note,
        message,
    });
    pressing.into_iter().flatten().chain(notes).collect()
}

/// Everything a face needs to draw itself. `GET events` tells of what changes.
#[utoipa::path(get, path = "/traygate/api/state", tag = "watching", responses((status = 200, body = StateView)))]
pub async fn get_state(Extracted(core): Extracted<Arc<Core>>) -> Json<StateView> {
    Json(StateView::of(&core))
}
