use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::labels::{self, Ended, Operation, Request, Served, Spent, TokenType, Used};
use super::series::{Labels, MOST, Seats};
use super::*;
use crate::clock::{Clock, WallTime};
use crate::keys::Keys;
use crate::policy::money::Nanodollars;
use crate::policy::usage::Usage;
use crate::provider::state::Command;
use crate::settings::{Overrides, Settings};
use crate::store::{Billing, CallId, CallStart, DedupLabel, Money, Outcome, Store};

const DURATION: &str = "gen_ai_client_operation_duration_seconds";
const FIRST_CHUNK: &str = "gen_ai_client_operation_time_to_first_chunk_seconds";

const DASHBOARD: &str = include_str!("../../../docs/grafana.json");
const SCRAPE_EXAMPLE: &str = include_str!("../../../docs/prometheus.yml");
const README: &str = include_str!("../../../README.md");

fn core(settings: &str) -> (Core, TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let settings = Settings::parse(settings, &Overrides::default()).expect("settings");
    let store = Store::open(folder.path(), Clock::Boot).expect("a store");
    let core = Core::new(settings, store, Keys::empty(), Clock::Boot);
    (core, folder)
}

/// A chat call to `openai` that went upstream and came back whole: 1 ms before the request, 2 ms
/// of it in the queue's line, 500 ms upstream, 1 ms after.
fn call() -> CallEnd {
    CallEnd {
        start: CallStart {
            id: CallId::new(WallTime(0)),
            started: WallTime(0),
            provider: "openai".into(),
            route: Cow::Borrowed("chat/completions"),
            model: Some("gpt-5".into()),
            tool: "curl".into(),
            billing: Billing::Metered,
            streaming: true,
            dedup: DedupLabel::Miss,
            key: None,
            reserved: None,
        },
        status: Some(200),
        outcome: Outcome::Completed,
        first_token: Some(Duration::from_millis(103)),
        queued: Duration::from_millis(2),
        duration: Duration::from_millis(504),
        sent: Some(Duration::from_millis(3)),
        head: Some(Duration::from_millis(90)),
        upstream_ended: Some(Duration::from_millis(503)),
        usage: Some(Usage {
            input: Some(1000),
            cached_input: Some(500),
            output: Some(20),
            ..Usage::default()
        }),
        money: Money {
            cost: Some(Nanodollars(2_500_000)),
            list: Some(Nanodollars(2_500_000)),
            ..Money::default()
        },
        error: None,
    }
}

/// The same, changed.
fn call_with(change: impl FnOnce(&mut CallEnd)) -> CallEnd {
    let mut end = call();
    change(&mut end);
    end
}

/// One that never went upstream.
fn without_upstream(outcome: Outcome, status: u16, dedup: DedupLabel) -> CallEnd {
    call_with(|end| {
        end.outcome = outcome;
        end.status = Some(status);
        end.start.dedup = dedup;
        end.queued = Duration::ZERO;
        end.duration = Duration::from_micros(80);
        (end.sent, end.head, end.upstream_ended) = (None, None, None);
        end.usage = None;
        end.money = Money {
            cost: Some(Nanodollars::ZERO),
            ..Money::default()
        };
    })
}

/// The text's samples: what stands before the value, and the value.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').expect("a series and its value");
        let value = value.parse().expect("a number");
        let twice = samples.insert(series.to_owned(), value);
        assert_eq!(twice, None, "{series} stands twice");
    }
    samples
}

/// What a series' name says, without its labels.
fn name_of(series: &str) -> &str {
    series.split('{').next().unwrap_or(series)
}

/// Its labels without the histogram's own.
fn labels_of(series: &str) -> String {
    let labels = series.split_once('{').map_or("", |(_, labels)| labels);
    match labels.find("le=\"") {
        Some(at) => labels[..at].trim_end_matches(',').to_owned(),
        None => labels.trim_end_matches('}').to_owned(),
    }
}

/// Label sets by metric, a histogram's parts as one.
fn label_sets(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut sets: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for series in samples(text).keys() {
        let metric = metric_of(name_of(series)).to_owned();
        sets.entry(metric).or_default().insert(labels_of(series));
    }
    sets
}

/// The metric that a sample's name belongs to.
fn metric_of(name: &str) -> &str {
    ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|part| name.strip_suffix(part))
        .unwrap_or(name)
}

/// The series of chat operations with `openai`, by model and error.
fn operations(model: &str, error_type: &str) -> String {
    let labels = operation("chat", "openai", model);
    format!(r#"{DURATION}_count{{{labels},error_type="{error_type}"}}"#)
}

/// The labels that say what an operation is.
fn operation(name: &str, provider: &str, model: &str) -> String {
    format!(
        r#"gen_ai_operation_name="{name}",gen_ai_provider_name="{provider}",gen_ai_request_model="{model}""#
    )
}

/// The series of calls to `openai`.
fn requests(route: &str, outcome: &str, status: &str) -> String {
    format!(
        r#"traygate_requests_total{{provider="openai",route="{route}",outcome="{outcome}",status="{status}"}}"#
    )
}

#[track_caller]
fn assert_samples(text: &str, expected: &[(&str, f64)]) {
    let samples = samples(text);
    for (series, value) in expected {
        let found = samples.get(*series).copied();
        let is_near = found.is_some_and(|found| (found - value).abs() < 1e-9);
        assert!(is_near, "{series} is {found:?}, not {value}, in\n{text}");
    }
}

#[track_caller]
fn assert_none(text: &str, part: &str) {
    let found = samples(text)
        .into_iter()
        .find(|(name, _)| name.contains(part));
    assert_eq!(found, None);
}

#[test]
fn a_call_that_went_upstream_is_an_operation() {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&call());
    metrics.finished(&call_with(|end| end.start.streaming = false));
    let text = metrics.render(&core);
    let chat = operation("chat", "openai", "gpt-5");
    assert_samples(
        &text,
        &[
            (&requests("chat/completions", "completed", "200"), 2.0),
            (&format!(r#"{DURATION}_count{{{chat},error_type=""}}"#), 2.0),
            (&format!(r#"{DURATION}_sum{{{chat},error_type=""}}"#), 1.0),
            (
                &format!(r#"{DURATION}_bucket{{{chat},error_type="",le="0.32"}}"#),
                0.0,
            ),
            (
                &format!(r#"{DURATION}_bucket{{{chat},error_type="",le="0.64"}}"#),
                2.0,
            ),
            (&format!("{FIRST_CHUNK}_count{{{chat}}}"), 1.0),
            (&format!("{FIRST_CHUNK}_sum{{{chat}}}"), 0.1),
            (
                r#"traygate_request_duration_seconds_sum{provider="openai",dedup="miss"}"#,
                1.008,
            ),
            (r#"traygate_overhead_seconds_count{dedup="miss"}"#, 2.0),
            (r#"traygate_overhead_seconds_sum{dedup="miss"}"#, 0.004),
            (
                r#"traygate_dedup_total{provider="openai",result="miss"}"#,
                2.0,
            ),
            (r#"traygate_upstream_calls_total{provider="openai"}"#, 2.0),
        ],
    );
}

#[test]
fn tokens_and_dollars_are_counted_as_far_as_they_are_known() {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&call());
    // Unpriced, and its provider told nothing but the output.
    metrics.finished(&call_with(|end| {
        end.usage = Some(Usage {
            output: Some(5000),
            ..Usage::default()
        });
        end.money = Money {
            unpriced: true,
            ..Money::default()
        };
    }));
    metrics.finished(&call_with(|end| end.usage = None));
    metrics.finished(&call_with(|end| {
        *end = without_upstream(Outcome::Completed, 200, DedupLabel::Cached);
        end.money.saved = Some(Nanodollars(2_500_000));
    }));
    let text = metrics.render(&core);
    let chat = operation("chat", "openai", "gpt-5");
    let tokens = |part: &str, kind: &str, more: &str| {
        format!(r#"gen_ai_client_token_usage_{part}{{{chat},gen_ai_token_type="{kind}"{more}}}"#)
    };
    assert_samples(
        &text,
        &[
            (&tokens("count", "input", ""), 1.0),
            (&tokens("sum", "input", ""), 1500.0),
            (&tokens("bucket", "input", r#",le="1024""#), 0.0),
            (&tokens("bucket", "input", r#",le="4096""#), 1.0),
            (&tokens("count", "output", ""), 2.0),
            (&tokens("sum", "output", ""), 5020.0),
            (r#"traygate_cost_dollars_total{provider="openai"}"#, 0.005),
            (r#"traygate_saved_dollars_total{provider="openai"}"#, 0.0025),
            (r#"traygate_cost_dollars_total{provider="anthropic"}"#, 0.0),
        ],
    );
}

#[test]
fn calls_that_never_went_upstream_are_no_operations() {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&without_upstream(
        Outcome::Completed,
        200,
        DedupLabel::Cached,
    ));
    metrics.finished(&without_upstream(
        Outcome::Completed,
        200,
        DedupLabel::Joined,
    ));
    metrics.finished(&without_upstream(Outcome::Refused, 503, DedupLabel::Miss));
    let queued = Duration::from_micros(30);
    metrics.finished(&call_with(|end| {
        *end = without_upstream(Outcome::Refused, 503, DedupLabel::Off);
        end.queued = queued;
    }));
    // A follower of a refused call has waited in its leader's queue, and does not know how long.
    metrics.finished(&without_upstream(Outcome::Refused, 503, DedupLabel::Joined));
    // It hung up while it waited.
    metrics.finished(&without_upstream(
        Outcome::ClientLeft,
        499,
        DedupLabel::Miss,
    ));
    let text = metrics.render(&core);
    assert_none(&text, "gen_ai_");
    assert_none(&text, r#"overhead_seconds_count{dedup="joined"}"#);
    assert_none(&text, r#"overhead_seconds_count{dedup="miss"}"#);
    assert_samples(
        &text,
        &[
            (r#"traygate_overhead_seconds_count{dedup="cached"}"#, 1.0),
            (r#"traygate_overhead_seconds_sum{dedup="cached"}"#, 0.000_08),
            (r#"traygate_overhead_seconds_count{dedup="refused"}"#, 2.0),
            (
                r#"traygate_overhead_seconds_sum{dedup="refused"}"#,
                0.000_13,
            ),
            (
                r#"traygate_dedup_total{provider="openai",result="cached"}"#,
                1.0,
            ),
            (
                r#"traygate_dedup_total{provider="openai",result="joined"}"#,
                2.0,
            ),
            (
                r#"traygate_dedup_total{provider="openai",result="miss"}"#,
                2.0,
            ),
            (
                r#"traygate_dedup_total{provider="openai",result="off"}"#,
                1.0,
            ),
            (r#"traygate_upstream_calls_total{provider="openai"}"#, 0.0),
        ],
    );
}

#[test]
fn an_operation_names_what_went_wrong() {
    let failures: [(Outcome, Option<u16>, bool, &str); 8] = [
        (Outcome::UpstreamError, Some(429), true, "429"),
        (Outcome::UpstreamError, Some(502), false, "unreachable"),
        (Outcome::UpstreamError, Some(200), true, "upstream_error"),
        (Outcome::Timeout, Some(504), false, "timeout"),
        (Outcome::BrokenStream, Some(200), true, "broken_stream"),
        (Outcome::ClientLeft, None, true, "client_left"),
        (Outcome::Stopped, Some(499), true, "stopped"),
        (Outcome::InternalError, None, false, "internal_error"),
    ];
    for (outcome, status, answered, error_type) in failures {
        let (core, _folder) = core("");
        let metrics = Metrics::default();
        metrics.finished(&call_with(|end| {
            end.outcome = outcome;
            end.status = status;
            end.head = end.head.filter(|_| answered);
        }));
        let operations = operations("gpt-5", error_type);
        let status = status.map_or("none".to_owned(), |status| status.to_string());
        let requests = requests("chat/completions", outcome.as_str(), &status);
        let text = metrics.render(&core);
        assert_samples(&text, &[(&operations, 1.0), (&requests, 1.0)]);
    }
}

#[test]
fn every_generation_route_is_an_operation_and_no_other() {
    use crate::policy::routing::Route;
    let routes = [
        (Route::ChatCompletions, "chat"),
        (Route::Completions, "text_completion"),
        (Route::Responses, "chat"),
        (Route::ResponsesCompact, "compact"),
        (Route::Embeddings, "embeddings"),
        (Route::Messages, "chat"),
        (Route::LlamaCompletion, "text_completion"),
        (Route::OllamaChat, "chat"),
        (Route::OllamaGenerate, "text_completion"),
        (Route::OllamaEmbed, "embeddings"),
    ];
    for (route, word) in routes {
        let (core, _folder) = core("");
        let name = route.name().expect("a generation route has a name");
        let metrics = Metrics::default();
        metrics.finished(&call_with(|end| end.start.route = Cow::Borrowed(name)));
        let labels = operation(word, "openai", "gpt-5");
        let operations = format!(r#"{DURATION}_count{{{labels},error_type=""}}"#);
        let requests = requests(name, "completed", "200");
        let text = metrics.render(&core);
        assert_samples(&text, &[(&operations, 1.0), (&requests, 1.0)]);
    }

    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&call_with(|end| {
        end.start.route = Cow::Owned("POST /v1/files/secret-name".to_owned());
        end.start.dedup = DedupLabel::Off;
    }));
    // Refused before its provider was known.
    metrics.finished(&call_with(|end| {
        *end = without_upstream(Outcome::Refused, 404, DedupLabel::Off);
        end.start.provider = "".into();
        end.start.route = Cow::Borrowed("");
    }));
    let text = metrics.render(&core);
    assert!(!text.contains("secret-name"), "a path is no label");
    assert_none(&text, "gen_ai_");
    assert_samples(
        &text,
        &[
            (&requests("other", "completed", "200"), 1.0),
            (
                r#"traygate_requests_total{provider="",route="other",outcome="refused",status="404"}"#,
                1.0,
            ),
            (
                r#"traygate_dedup_total{provider="openai",result="off"}"#,
                0.0,
            ),
            (r#"traygate_upstream_calls_total{provider="openai"}"#, 1.0),
        ],
    );
}

/// A tunnel's end says nothing of its upstream's.
#[test]
fn a_tunnel_is_no_overhead() {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&call_with(|end| {
        end.start.route = Cow::Owned("GET /v1/realtime".to_owned());
        end.start.dedup = DedupLabel::Off;
        (end.head, end.upstream_ended) = (None, None);
    }));
    let text = metrics.render(&core);
    assert_none(&text, "traygate_overhead");
    assert_samples(
        &text,
        &[(r#"traygate_upstream_calls_total{provider="openai"}"#, 1.0)],
    );
}

#[test]
fn a_models_name_is_cut_and_cannot_break_the_text() {
    let shown = |model: &str| labels::shown_model(Some(&Arc::from(model)));
    assert_eq!(&*labels::shown_model(None), "");
    assert_eq!(&*shown("gpt-5"), "gpt-5");
    assert_eq!(&*shown("a\0b\nc\u{7f}"), "a?b?c?");
    assert_eq!(&*shown(&"m".repeat(300)), "m".repeat(128));
    // The cut never falls into a character.
    assert_eq!(&*shown(&"é".repeat(100)), "é".repeat(64));
    assert_eq!(
        &*shown(&format!("x{}", "é".repeat(100))),
        format!("x{}", "é".repeat(63))
    );

    let (core, _folder) = core("");
    let metrics = Metrics::default();
    let names = ["quo\"te", "back\\slash", "", "a\nb", "other", "a?b"];
    for name in names {
        metrics.finished(&call_with(|end| end.start.model = Some(name.into())));
    }
    metrics.finished(&call_with(|end| end.start.model = None));
    let text = metrics.render(&core);
    assert_samples(
        &text,
        &[
            (&operations(r#"quo\"te"#, ""), 1.0),
            (&operations(r"back\\slash", ""), 1.0),
            (&operations("other", ""), 1.0),
            // Written alike, they are one.
            (&operations("", ""), 2.0),
            (&operations("a?b", ""), 2.0),
        ],
    );
}

#[test]
fn gauges_are_read_at_the_scrape() {
    let (core, _folder) = core("[limits]\nconcurrency = 1\n");
    let metrics = Metrics::default();
    let world = core.world();
    let openai = world.provider("openai").expect("shipped");
    let at_rest = metrics.render(&core);
    assert_samples(
        &at_rest,
        &[
            (r#"traygate_inflight{provider="openai"}"#, 0.0),
            (r#"traygate_queue_depth{provider="openai"}"#, 0.0),
            (r#"traygate_breaker_state{provider="openai",model=""}"#, 0.0),
            (
                r#"traygate_dedup_total{provider="openai",result="joined"}"#,
                0.0,
            ),
            ("traygate_log_pending", 0.0),
            ("traygate_log_dropped_total", 0.0),
            (
                &format!(
                    "traygate_build_info{{version=\"{}\"}}",
                    env!("CARGO_PKG_VERSION")
                ),
                1.0,
            ),
        ],
    );

    let pool = &openai.state.pool;
    let held = pool.try_enter().expect("free");
    let probe = pool.extra_permit();
    let waiting = pool.enter().expect("there is room in the queue");
    let now = core.clock.now();
    let command = |model: Option<&str>, command| {
        let model = model.map(Arc::from);
        let done = openai.state.command(model.as_ref(), command, now);
        assert!(done.is_some());
    };
    command(None, Command::Hold);
    command(None, Command::Probe);
    command(Some("gpt-5"), Command::Hold);
    let text = metrics.render(&core);
    assert_samples(
        &text,
        &[
            (r#"traygate_inflight{provider="openai"}"#, 2.0),
            (r#"traygate_queue_depth{provider="openai"}"#, 1.0),
            (r#"traygate_inflight{provider="anthropic"}"#, 0.0),
            (r#"traygate_breaker_state{provider="openai",model=""}"#, 1.0),
            (
                r#"traygate_breaker_state{provider="openai",model="gpt-5"}"#,
                2.0,
            ),
            (
                r#"traygate_breaker_state{provider="anthropic",model=""}"#,
                0.0,
            ),
        ],
    );

    drop((held, probe, waiting));
    command(Some("gpt-5"), Command::Reset);
    let text = metrics.render(&core);
    assert_samples(&text, &[(r#"traygate_inflight{provider="openai"}"#, 0.0)]);
    assert_none(&text, r#"model="gpt-5""#);
}

#[test]
fn more_providers_and_breakers_than_series_are_added_up() {
    let providers: String = (0..250)
        .map(|n| format!("[[provider]]\nname = \"p{n}\"\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\n"))
        .collect();
    let (core, _folder) = core(&providers);
    let metrics = Metrics::default();
    let held: Vec<_> = core
        .world()
        .providers
        .iter()
        .map(|provider| {
            provider
                .state
                .command(None, Command::Hold, core.clock.now());
            provider.state.pool.try_enter().expect("free")
        })
        .collect();
    let text = metrics.render(&core);
    for (metric, sets) in label_sets(&text) {
        assert!(sets.len() <= MOST, "{metric} has {} series", sets.len());
    }
    let in_flight: f64 = samples(&text)
        .iter()
        .filter(|(series, _)| name_of(series) == "traygate_inflight")
        .map(|(_, value)| value)
        .sum();
    assert_eq!(in_flight, held.len() as f64);
    assert_samples(
        &text,
        &[(
            r#"traygate_breaker_state{provider="other",model="other"}"#,
            2.0,
        )],
    );
    assert_eq!(
        label_sets(&text),
        label_sets(&metrics.render(&core)),
        "from scrape to scrape"
    );
}

/// Anything that an ended call may be.
fn any_call() -> impl Strategy<Value = CallEnd> {
    let model = prop_oneof!["[a-z]", "\\PC{0,40}", "[\0-\x7f]{0,3}"];
    call_of(0..60_u16, model, Outcome::ALL.to_vec(), 100..600_u16)
}

/// Calls of which many are alike, or differ in one thing.
fn alike() -> impl Strategy<Value = CallEnd> {
    let outcomes = vec![Outcome::Completed, Outcome::UpstreamError, Outcome::Refused];
    call_of(0..2_u16, "[ab]", outcomes, 499..501_u16)
}

fn call_of(
    provider: impl Strategy<Value = u16>,
    model: impl Strategy<Value = String>,
    outcomes: Vec<Outcome>,
    status: impl Strategy<Value = u16>,
) -> impl Strategy<Value = CallEnd> {
    let route = prop_oneof![
        Just(Cow::Borrowed("chat/completions")),
        Just(Cow::Borrowed("embeddings")),
        Just(Cow::Borrowed("")),
        "[A-Z]{3} /[a-z]{1,3}".prop_map(Cow::Owned),
    ];
    let dedup = prop::sample::select(vec![
        DedupLabel::Miss,
        DedupLabel::Joined,
        DedupLabel::Cached,
        DedupLabel::Off,
    ]);
    let names = (provider, prop::option::of(model));
    let ends = (prop::sample::select(outcomes), prop::option::of(status));
    let times = prop::collection::vec(prop::option::of(0..2_000_000_u64), 5);
    (names, route, dedup, ends, times, any::<bool>()).prop_map(
        |((provider, model), route, dedup, (outcome, status), times, streaming)| {
            let time = |at: usize| times[at].map(Duration::from_micros);
            call_with(|end| {
                end.start.provider = format!("p{provider}").into();
                end.start.model = model.map(Arc::from);
                end.start.route = route;
                end.start.dedup = dedup;
                end.start.streaming = streaming;
                (end.outcome, end.status) = (outcome, status);
                end.duration = time(0).unwrap_or_default();
                end.first_token = time(1);
                (end.sent, end.head, end.upstream_ended) = (time(2), time(3), time(4));
                end.usage = time(4).map(|time| Usage {
                    input: Some(time.as_secs()),
                    output: Some(u64::from(time.subsec_micros())).filter(|count| count % 3 > 0),
                    ..Usage::default()
                });
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever calls come: no metric has more than 200 series, none stands twice, and no call is
    /// lost or counted twice in any.
    #[test]
    fn metrics_are_bounded_and_lose_nothing(calls in prop::collection::vec(any_call(), 1..1200)) {
        let (core, _folder) = core("");
        let metrics = Metrics::default();
        calls.iter().for_each(|end| metrics.finished(end));
        let text = metrics.render(&core);
        for (metric, sets) in label_sets(&text) {
            prop_assert!(sets.len() <= MOST, "{} has {} series", metric, sets.len());
        }
        let samples = samples(&text);
        let total = |name: &str| -> usize {
            let of_name = samples.iter().filter(|(series, _)| name_of(series) == name);
            of_name.map(|(_, value)| *value as usize).sum()
        };
        let counted = |counts: &dyn Fn(&CallEnd) -> bool| calls.iter().filter(|end| counts(end)).count();
        let is_operation = |end: &CallEnd| Operation::of(end).is_some();
        let has_ended = |end: &CallEnd| end.sent.is_some() && end.upstream_ended.is_some();
        prop_assert_eq!(total("traygate_requests_total"), calls.len());
        prop_assert_eq!(total("traygate_request_duration_seconds_count"), calls.len());
        prop_assert_eq!(total("traygate_upstream_calls_total"), counted(&|end| end.sent.is_some()));
        prop_assert_eq!(total("traygate_dedup_total"), counted(&is_operation));
        prop_assert_eq!(
            total("traygate_overhead_seconds_count"),
            counted(&|end| Spent::of(end).is_some())
        );
        prop_assert_eq!(
            total(&format!("{DURATION}_count")),
            counted(&|end| is_operation(end) && has_ended(end))
        );
        prop_assert_eq!(
            total(&format!("{FIRST_CHUNK}_count")),
            counted(&|end| {
                let streams = end.start.streaming && end.first_token.is_some();
                is_operation(end) && has_ended(end) && streams
            })
        );
    }

    /// What is kept at hand for calls of one kind is what each of them would look up.
    #[test]
    fn a_kind_counts_as_its_calls_would(calls in prop::collection::vec(alike(), 1..1500)) {
        let (core, _folder) = core("");
        let (metrics, anew) = (Metrics::default(), Metrics::default());
        for end in calls.iter().chain(&calls) {
            metrics.finished(end);
            anew.calls.count_anew(end);
        }
        prop_assert_eq!(samples(&metrics.render(&core)), samples(&anew.render(&core)));
    }

    /// A label set is counted in the same series every time, its own or a shared one.
    #[test]
    fn a_label_set_keeps_its_series(calls in prop::collection::vec(any_call(), 1..1200)) {
        fn keeps<L: Labels>(labels: impl Iterator<Item = L>) -> Result<(), TestCaseError> {
            let seats = Seats::default();
            let mut kept: HashMap<L, L> = HashMap::new();
            for labels in labels {
                let seat = seats.of(&labels);
                prop_assert!(seat == labels || seat == labels.other());
                prop_assert_eq!(&seat.other(), &labels.other(), "what is shared stays shared");
                prop_assert_eq!(&seats.of(&seat), &seat);
                if let Some(before) = kept.insert(labels, seat.clone()) {
                    prop_assert_eq!(before, seat);
                }
            }
            let series: BTreeSet<String> = kept.values().map(|seat| format!("{seat:?}")).collect();
            prop_assert!(series.len() <= MOST);
            Ok(())
        }
        let twice = || calls.iter().chain(&calls);
        keeps(twice().map(Request::of))?;
        keeps(twice().map(Served::of))?;
        keeps(twice().filter_map(Operation::of))?;
        keeps(twice().filter_map(|end| Some(Ended::of(Operation::of(end)?, end))))?;
        for kind in TokenType::ALL {
            keeps(twice().filter_map(|end| Some(Used::of(Operation::of(end)?, kind))))?;
        }
    }
}

#[test]
fn threads_that_make_series_at_once_agree() {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..800 {
                    let model = format!("made-up-{}", n % 400).into();
                    metrics.finished(&call_with(|end| end.start.model = Some(model)));
                }
            });
        }
    });
    let text = metrics.render(&core);
    let sets = &label_sets(&text)[DURATION];
    // Seats for all but the shared sets, and the one of those that was needed.
    assert_eq!(sets.len(), MOST - Ended::OTHERS + 1);
    let labels = operation("chat", "other", "other");
    let shared = format!(r#"{DURATION}_count{{{labels},error_type=""}}"#);
    let own = (MOST - Ended::OTHERS) * 8;
    assert_samples(&text, &[(&shared, (3200 - own) as f64)]);
}

/// Every metric there can be, once it has counted something.
fn everything() -> String {
    let (core, _folder) = core("");
    let metrics = Metrics::default();
    metrics.finished(&call());
    metrics.render(&core)
}

/// Words of `text` that are, or should be, names of ours.
fn names_in(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("traygate_") || word.starts_with("gen_ai_"))
        .collect()
}

#[test]
fn dashboard_and_documents_name_what_there_is() {
    let text = everything();
    let there_is: BTreeSet<&str> = names_in(&text);
    let unknown = |text| {
        names_in(text)
            .difference(&there_is)
            .copied()
            .collect::<Vec<_>>()
    };
    assert_eq!(unknown(DASHBOARD), Vec::<&str>::new(), "docs/grafana.json");
    assert_eq!(
        unknown(SCRAPE_EXAMPLE),
        Vec::<&str>::new(),
        "docs/prometheus.yml"
    );
    assert_eq!(unknown(README), Vec::<&str>::new(), "README.md");
    assert!(
        names_in(DASHBOARD).contains("traygate_requests_total"),
        "they were looked for"
    );
}

#[test]
fn the_dashboard_has_its_panels_and_asks_the_chosen_prometheus() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let titles: Vec<_> = panels
        .iter()
        .filter_map(|panel| panel["title"].as_str())
        .collect();
    assert_eq!(
        titles,
        [
            "Calls by status",
            "p99",
            "In flight and waiting",
            "Share of merged calls",
            "Spend in an hour",
            "Tokens a second"
        ]
    );
    for panel in panels {
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty());
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{target}");
            assert!(target["expr"].is_string(), "{target}");
        }
    }
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "ids are unique");
}

/// What every call pays. Run it with `--release --ignored --nocapture`.
#[test]
#[ignore = "a measurement, which a debug build or a busy machine would spoil"]
fn a_call_is_counted_within_a_microsecond() {
    const CALLS: u32 = 1_000_000;
    let metrics = Metrics::default();
    let ends: Vec<CallEnd> = (0..8)
        .map(|n| call_with(|end| end.start.model = Some(format!("model-{n}").into())))
        .collect();
    ends.iter().for_each(|end| metrics.finished(end));
    let began = Clock::Boot.now();
    for call in 0..CALLS as usize {
        metrics.finished(&ends[call % ends.len()]);
    }
    let each = Clock::Boot.now().since(began) / CALLS;
    println!("{each:?} a call");
    assert!(each < Duration::from_micros(1), "{each:?}");
}
