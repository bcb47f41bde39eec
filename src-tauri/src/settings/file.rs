//! Turns the text of `config.toml` into [`Settings`]: every key, its range and its default.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use url::Url;

use super::error::{Fault, closest};
use super::section::{Known, Section, pattern};
use super::shipped::{asks_usage, blank, demo_placeholder, shipped};
use super::{
    BodyLog, Budget, DedupMode, DedupRule, DedupSettings, KeySource, Limits, LogSettings,
    Nanodollars, NotifySettings, Pattern, Period, PriceRule, ProviderKind, ProviderSettings,
    RouteRule, ServerSettings, Settings, Source, SpendSettings, Unpriced, same_bare_paths,
};
use crate::policy::breaker::BreakerSettings;

pub(super) const CONCURRENCY: RangeInclusive<u32> = 1..=10_000;
pub(super) const TIMEOUT_SECS: RangeInclusive<f64> = 0.01..=86_400.0;
pub(super) const WINDOW_SECS: RangeInclusive<f64> = 0.0..=2_592_000.0;

pub(super) const KINDS: &[(&str, ProviderKind)] = &[
    ("openai", ProviderKind::OpenAi),
    ("anthropic", ProviderKind::Anthropic),
    ("ollama", ProviderKind::Ollama),
    ("llama-cpp", ProviderKind::LlamaCpp),
    ("demo", ProviderKind::Demo),
];

const PLACEHOLDER_KEYS: &[&str] = &["traygate", "local", "none", "x", "ollama", "sk-local"];
const RETRY_TOOLS: &[&str] = &[
    "open-webui",
    "librechat",
    "jan",
    "cherry-studio",
    "claude-code",
    "claude-cli",
    "codex*",
    "aider",
    "cline",
    "continue",
    "zed",
];

/// Names that an address or a command uses otherwise. Bare paths work without `/v1`, so the
/// first words of API paths are no providers either.
const RESERVED_NAMES: &[&str] = &[
    "t",
    "traygate",
    "api",
    "access-token",
    "chat",
    "completion",
    "completions",
    "embeddings",
    "messages",
    "models",
    "responses",
];

/// A file in which every list has an entry, so that reading it asks for every setting there is.
const ONE_OF_EACH: &str = "\
    [[provider]]\nname = \"openai\"\n\
    [[route]]\nmodel = \"*\"\nprovider = \"openai\"\n\
    [[price]]\nmodel = \"*\"\ninput = 0\noutput = 0\n\
    [[budget]]\nper = \"day\"\nusd = 0\n\
    [[dedup.rule]]\nmode = \"off\"\n";

/// Every setting there is, and what it takes.
pub(super) fn known() -> Known {
    let root = Section::root(ONE_OF_EACH).expect("it is TOML, as the tests show");
    let known = root.known();
    read_root(root).expect("it is right, as the tests show");
    known.take()
}

/// Reads a whole file.
pub(super) fn read(text: &str) -> Result<Settings, Fault> {
    read_root(Section::root(text)?)
}

fn read_root(mut root: Section<'_>) -> Result<Settings, Fault> {
    let server = server(root.table("server")?)?;
    let dedup = dedup(root.table("dedup")?)?;
    let log = log(root.table("log")?)?;
    let notify = notify(root.table("notify")?)?;
    let (prices, budgets) = (
        root.tables("price", "price")?,
        root.tables("budget", "budget")?,
    );
    let spend = spend(root.table("spend")?, prices, budgets)?;

    let mut limits = Limits::default();
    let mut section = root.table("limits")?;
    GivenLimits::read(&mut section)?.apply(&mut limits);
    section.finish()?;
    let mut breaker = BreakerSettings::default();
    let mut section = root.table("breaker")?;
    GivenBreaker::read(&mut section)?.apply(&mut breaker);
    section.finish()?;

    let providers = providers(root.tables("provider", "provider")?, &limits, &breaker)?;
    let routes = routes(root.tables("route", "route")?, &providers)?;
    root.finish()?;
    Ok(Settings {
        server,
        dedup,
        log,
        spend,
        notify,
        providers,
        routes,
        source: Source::default(),
    })
}

fn server(mut section: Section<'_>) -> Result<ServerSettings, Fault> {
    let host = section.parsed_each("host", ip_address)?.unwrap_or_default();
    let port = section.whole("port", 0..=65_535)?.unwrap_or(7337);
    let placeholder_keys = section
        .texts("placeholder_keys")?
        .unwrap_or_else(|| PLACEHOLDER_KEYS.iter().map(ToString::to_string).collect());
    let settings = ServerSettings {
        host: beyond_loopback(&host),
        unheard_loopback: unheard_loopback(&host),
        port: u16::try_from(port).unwrap_or(u16::MAX),
        placeholder_keys,
        allowed_hosts: section
            .parsed_each("allowed_hosts", host_name)?
            .unwrap_or_default(),
        allowed_origins: section
            .parsed_each("allowed_origins", web_origin)?
            .unwrap_or_default(),
        // All bodies held at once have 256 MB: a larger one could never be taken.
        max_body: section
            .megabytes("max_body_mb", 0.001..=256.0)?
            .unwrap_or(64 << 20),
        drain: section
            .seconds("drain_secs", 0.0..=3600.0)?
            .unwrap_or(Duration::from_secs(10)),
    };
    section.finish()?;
    Ok(settings)
}

/// The addresses that are not listened on anyway, each once.
pub(super) fn beyond_loopback(host: &[IpAddr]) -> Vec<IpAddr> {
    let mut beyond = Vec::new();
    for address in host {
        if !address.is_loopback() && !beyond.contains(address) {
            beyond.push(*address);
        }
    }
    beyond
}

/// The loopback addresses beside those that are always listened on.
pub(super) fn unheard_loopback(host: &[IpAddr]) -> Vec<IpAddr> {
    let heard = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let unheard = |address: &&IpAddr| address.is_loopback() && !heard.contains(address);
    host.iter().filter(unheard).copied().collect()
}

fn ip_address(text: &str) -> Result<IpAddr, &'static str> {
    text.trim()
        .parse()
        .map_err(|_| "must be IP addresses, as in [\"172.17.0.1\"]; loopback is always in it")
}

fn host_name(text: &str) -> Result<String, &'static str> {
    const MUST: &str = "must be host names or IP addresses, without `http://`, port or path";
    let name = text.trim().trim_end_matches('.').to_lowercase();
    match url::Host::parse(&name) {
        // The parser takes more characters than a Host header has.
        Ok(url::Host::Domain(domain)) if !domain.contains(['*', '/', ':']) => Ok(domain),
        Ok(host @ (url::Host::Ipv4(_) | url::Host::Ipv6(_))) => Ok(host.to_string()),
        _ => match name.parse::<IpAddr>() {
            Ok(address @ IpAddr::V6(_)) => Ok(format!("[{address}]")),
            _ => Err(MUST),
        },
    }
}

fn web_origin(text: &str) -> Result<String, &'static str> {
    const MUST: &str = "must be web origins, `https://app.example.com`, without path; \
                        `*` and `null` are never allowed";
    let origin = text.trim().trim_end_matches('/').to_lowercase();
    let Some((scheme, host)) = origin.split_once("://") else {
        return Err(MUST);
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
    let fits = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
        && !host.is_empty()
        && host.chars().all(plain);
    if fits { Ok(origin) } else { Err(MUST) }
}

fn dedup(mut section: Section<'_>) -> Result<DedupSettings, Fault> {
    const MODES: &[(&str, DedupMode)] = &[
        ("full", DedupMode::Full),
        ("retry", DedupMode::Retry),
        ("in_flight", DedupMode::InFlight),
        ("off", DedupMode::Off),
    ];
    let mut rules = Vec::new();
    for mut rule in section.tables("rule", "dedup.rule")? {
        let tool = rule.pattern("tool")?;
        let model = rule.pattern("model")?;
        let Some(mode) = rule.choice("mode", MODES)? else {
            return Err(rule.fault("mode", "is missing: full, retry, in_flight or off"));
        };
        rule.finish()?;
        rules.push(DedupRule { tool, model, mode });
    }
    let settings = DedupSettings {
        enabled: section.boolean("enabled")?.unwrap_or(true),
        window: section
            .seconds("window_secs", WINDOW_SECS)?
            .unwrap_or(Duration::from_secs(300)),
        max_bytes: section
            .megabytes("max_mb", 1.0..=65_536.0)?
            .unwrap_or(128 << 20),
        linger: section
            .seconds("linger_secs", 0.0..=60.0)?
            .unwrap_or(Duration::from_secs(2)),
        retry_tools: section
            .parsed_each("retry_tools", pattern)?
            .unwrap_or_else(|| RETRY_TOOLS.iter().map(|tool| Pattern::new(tool)).collect()),
        rules,
    };
    section.finish()?;
    Ok(settings)
}

fn log(mut section: Section<'_>) -> Result<LogSettings, Fault> {
    const BODIES: &[(&str, BodyLog)] = &[
        ("off", BodyLog::Off),
        ("errors", BodyLog::Errors),
        ("all", BodyLog::All),
    ];
    const DAY: Duration = Duration::from_secs(86_400);
    let settings = LogSettings {
        retention: section
            .days("retention_days", 0.01..=36_500.0)?
            .unwrap_or(DAY * 90),
        max_bytes: section
            .megabytes("max_mb", 10.0..=1_048_576.0)?
            .unwrap_or(500 << 20),
        bodies: section.choice("bodies", BODIES)?.unwrap_or(BodyLog::Off),
        bodies_retention: section
            .days("bodies_days", 0.01..=36_500.0)?
            .unwrap_or(DAY * 7),
    };
    section.finish()?;
    Ok(settings)
}

fn notify(mut section: Section<'_>) -> Result<NotifySettings, Fault> {
    let settings = NotifySettings {
        breaker: section.boolean("breaker")?.unwrap_or(true),
        budget: section.boolean("budget")?.unwrap_or(true),
        runaway: section.boolean("runaway")?.unwrap_or(true),
        log: section.boolean("log")?.unwrap_or(true),
    };
    section.finish()?;
    Ok(settings)
}

fn spend(
    mut section: Section<'_>,
    prices: Vec<Section<'_>>,
    budgets: Vec<Section<'_>>,
) -> Result<SpendSettings, Fault> {
    const UNPRICED: &[(&str, Unpriced)] =
        &[("allow", Unpriced::Allow), ("refuse", Unpriced::Refuse)];
    let settings = SpendSettings {
        unpriced: section
            .choice("unpriced", UNPRICED)?
            .unwrap_or(Unpriced::Allow),
        warn_at: section.number("warn_at", 0.0..=1.0, "")?.unwrap_or(0.8),
        output_bound_tokens: section
            .whole("output_bound_tokens", 1..=10_000_000)?
            .unwrap_or(8192),
        refresh_prices: section.boolean("refresh_prices")?.unwrap_or(false),
        prices: prices.into_iter().map(price).collect::<Result<_, _>>()?,
        budgets: budgets.into_iter().map(budget).collect::<Result<_, _>>()?,
    };
    section.finish()?;
    Ok(settings)
}

fn price(mut section: Section<'_>) -> Result<PriceRule, Fault> {
    let model = section.pattern("model")?;
    let input = section.dollars("input")?;
    let output = section.dollars("output")?;
    let (cached_input, cache_write, cache_write_1h) = (
        section.dollars("cached_input")?,
        section.dollars("cache_write")?,
        section.dollars("cache_write_1h")?,
    );
    let missing = |key| section.fault(key, "is missing");
    let rule = PriceRule {
        model: model.ok_or_else(|| missing("model"))?,
        input: input.ok_or_else(|| missing("input"))?,
        output: output.ok_or_else(|| missing("output"))?,
        cached_input,
        cache_write,
        cache_write_1h,
    };
    section.finish()?;
    Ok(rule)
}

fn budget(mut section: Section<'_>) -> Result<Budget, Fault> {
    const PERIODS: &[(&str, Period)] = &[
        ("hour", Period::Hour),
        ("day", Period::Day),
        ("month", Period::Month),
    ];
    let per = section.choice("per", PERIODS)?;
    let cap: Option<Nanodollars> = section.dollars("usd")?;
    let (provider, tool, model) = (
        section.pattern("provider")?,
        section.pattern("tool")?,
        section.pattern("model")?,
    );
    let budget = Budget {
        per: per.ok_or_else(|| section.fault("per", "is missing: hour, day or month"))?,
        cap: cap.ok_or_else(|| section.fault("usd", "is missing"))?,
        provider,
        tool,
        model,
    };
    section.finish()?;
    Ok(budget)
}

/// What `[limits]` or a provider says; what it does not say stays as it was.
#[derive(Default)]
pub(super) struct GivenLimits {
    concurrency: Option<u32>,
    queue: Option<u32>,
    queue_wait: Option<Duration>,
    connect: Option<Duration>,
    first_byte: Option<Duration>,
    unstreamed: Option<Duration>,
    idle: Option<Duration>,
}

impl GivenLimits {
    /// A model that is loaded from disk and runs on one graphics card takes its time and
    /// little company. `[limits]` does not change these, a `[[provider]]` does.
    const LOCAL: Self = Self {
        concurrency: Some(4),
        queue: None,
        queue_wait: Some(Duration::from_secs(600)),
        connect: None,
        first_byte: Some(Duration::from_secs(600)),
        unstreamed: Some(Duration::from_secs(600)),
        idle: None,
    };

    /// What [`GivenLimits::LOCAL`] says, by its keys.
    pub(super) const LOCAL_KEYS: [&'static str; 4] = [
        "concurrency",
        "queue_secs",
        "timeout_secs",
        "unstreamed_timeout_secs",
    ];

    fn read(section: &mut Section<'_>) -> Result<Self, Fault> {
        Ok(Self {
            concurrency: section.whole("concurrency", CONCURRENCY)?,
            queue: section.whole("queue", 0..=1_000_000)?,
            queue_wait: section.seconds("queue_secs", 0.0..=86_400.0)?,
            connect: section.seconds("connect_secs", 0.01..=3600.0)?,
            first_byte: section.seconds("timeout_secs", TIMEOUT_SECS)?,
            unstreamed: section.seconds("unstreamed_timeout_secs", TIMEOUT_SECS)?,
            idle: section.seconds("idle_secs", TIMEOUT_SECS)?,
        })
    }

    fn apply(&self, limits: &mut Limits) {
        let Self {
            concurrency,
            queue,
            queue_wait,
            connect,
            first_byte,
            unstreamed,
            idle,
        } = self;
        set(
            &mut limits.concurrency,
            concurrency.map(|calls| calls as usize),
        );
        set(&mut limits.queue, queue.map(|calls| calls as usize));
        set(&mut limits.queue_wait, *queue_wait);
        set(&mut limits.connect, *connect);
        set(&mut limits.first_byte, *first_byte);
        set(&mut limits.unstreamed, *unstreamed);
        set(&mut limits.idle, *idle);
    }
}

/// What `[breaker]` or a provider says.
#[derive(Default)]
struct GivenBreaker {
    failures: Option<u32>,
    failure_rate: Option<f64>,
    probes: Option<u32>,
    open: Option<Duration>,
    recovery_check: Option<Duration>,
}

impl GivenBreaker {
    fn read(section: &mut Section<'_>) -> Result<Self, Fault> {
        Ok(Self {
            failures: section.whole("failures", 1..=10_000)?,
            failure_rate: section.number("failure_rate", 0.0..=1.0, "")?,
            probes: section.whole("probes", 1..=100)?,
            open: section.seconds("open_secs", 0.01..=86_400.0)?,
            recovery_check: section.seconds("recovery_check_secs", 0.0..=3600.0)?,
        })
    }

    fn apply(&self, breaker: &mut BreakerSettings) {
        let Self {
            failures,
            failure_rate,
            probes,
            open,
            recovery_check,
        } = self;
        set(&mut breaker.failures, *failures);
        set(&mut breaker.failure_rate, *failure_rate);
        set(&mut breaker.probes, *probes);
        set(&mut breaker.open, *open);
        set(&mut breaker.recovery_check, *recovery_check);
    }
}

fn set<T>(place: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *place = value;
    }
}

/// A `[[provider]]` of the file.
struct GivenProvider<'t> {
    /// For errors that show only beside the other providers.
    section: Section<'t>,
    name: String,
    kind: Option<ProviderKind>,
    base_url: Option<Url>,
    key: Option<KeySource>,
    default: Option<bool>,
    local: Option<bool>,
    limits: GivenLimits,
    breaker: GivenBreaker,
    auth_header: Option<HeaderName>,
    headers: Option<Vec<(HeaderName, HeaderValue)>>,
    ca_file: Option<PathBuf>,
    ask_usage: Option<bool>,
}

impl<'t> GivenProvider<'t> {
    fn read(mut section: Section<'t>) -> Result<Self, Fault> {
        let name = section
            .parsed("name", provider_name)?
            .ok_or_else(|| section.fault("name", "is missing"))?;
        section.call_it(format!("provider \"{name}\""));
        let given = Self {
            name,
            kind: section.choice("kind", KINDS)?,
            base_url: section.parsed("base_url", base_url)?,
            key: key_source(&mut section)?,
            default: section.boolean("default")?,
            local: section.boolean("local")?,
            limits: GivenLimits::read(&mut section)?,
            breaker: GivenBreaker::read(&mut section)?,
            auth_header: section.parsed("auth_header", header_name)?,
            headers: headers(&mut section)?,
            ca_file: section.parsed("ca_file", absolute)?,
            ask_usage: section.boolean("ask_usage")?,
            section,
        };
        given.section.finish()?;
        Ok(given)
    }

    /// A provider that Traygate does not ship must say what and where it is.
    fn begin(&self, limits: &Limits, breaker: &BreakerSettings) -> Result<ProviderSettings, Fault> {
        let missing = |key: &str| {
            self.section
                .fault(key, "is missing, and needed for a provider of your own")
        };
        let kind = self.kind.ok_or_else(|| missing("kind"))?;
        let base_url = match &self.base_url {
            Some(base_url) => base_url.clone(),
            None if kind == ProviderKind::Demo => demo_placeholder(),
            None => return Err(missing("base_url")),
        };
        Ok(blank(&self.name, kind, base_url, limits, breaker))
    }

    /// What the file says wins, key by key.
    fn change(&self, provider: &mut ProviderSettings) -> Result<(), Fault> {
        set(&mut provider.kind, self.kind);
        if provider.kind == ProviderKind::Demo && self.base_url.is_some() {
            let fault = self.section.fault("base_url", "must not be set");
            return Err(fault.help("The demo is built in: it has no address of its own."));
        }
        set(&mut provider.base_url, self.base_url.clone());
        set(&mut provider.key, self.key.clone());
        set(&mut provider.default, self.default);
        set(&mut provider.local, self.local);
        set(&mut provider.headers, self.headers.clone());
        provider.auth_header = self.auth_header.clone();
        provider.ca_file = self.ca_file.clone();
        provider.ask_usage = self.ask_usage.unwrap_or_else(|| asks_usage(provider.kind));
        // After `local`, which decides what these start from.
        if provider.local {
            start_local(provider);
        }
        self.limits.apply(&mut provider.limits);
        self.breaker.apply(&mut provider.breaker);
        let is_own = |key: &str| self.section.has(key);
        provider.in_force.are_its_own(&provider.name, is_own);
        Ok(())
    }
}

fn providers(
    sections: Vec<Section<'_>>,
    limits: &Limits,
    breaker: &BreakerSettings,
) -> Result<Vec<ProviderSettings>, Fault> {
    let mut providers = shipped(limits, breaker);
    let mut given: Vec<GivenProvider<'_>> = Vec::new();
    for section in sections {
        let theirs = GivenProvider::read(section)?;
        if given.iter().any(|other| other.name == theirs.name) {
            let fault = theirs.section.fault("name", "stands in the file twice");
            return Err(fault.help("Put everything about a provider into one [[provider]]."));
        }
        if !providers.iter().any(|other| *other.name == *theirs.name) {
            providers.push(theirs.begin(limits, breaker)?);
        }
        given.push(theirs);
    }
    for provider in &mut providers {
        match given.iter().find(|theirs| *theirs.name == *provider.name) {
            Some(theirs) => theirs.change(provider)?,
            None if provider.local => start_local(provider),
            None => {}
        }
    }
    settle_defaults(&mut providers, &given)?;
    Ok(providers)
}

fn start_local(provider: &mut ProviderSettings) {
    GivenLimits::LOCAL.apply(&mut provider.limits);
    let is_own = |key: &str| GivenLimits::LOCAL_KEYS.contains(&key);
    provider.in_force.are_its_own(&provider.name, is_own);
}

/// A default of the file's beats a shipped one of its dialect; two of the file's are a mistake.
fn settle_defaults(
    providers: &mut [ProviderSettings],
    given: &[GivenProvider<'_>],
) -> Result<(), Fault> {
    let mut chosen: Vec<(ProviderKind, &str)> = Vec::new();
    for theirs in given.iter().filter(|theirs| theirs.default == Some(true)) {
        let name = theirs.name.as_str();
        let Some(kind) = providers
            .iter()
            .find(|provider| &*provider.name == name)
            .map(|provider| provider.kind)
        else {
            continue;
        };
        if let Some((_, rival)) = chosen
            .iter()
            .find(|(other, _)| same_bare_paths(*other, kind))
        {
            let reason = format!("is true here and for provider \"{rival}\"");
            let fault = theirs.section.fault("default", reason);
            return Err(fault.help("The bare paths of a dialect lead to one provider."));
        }
        for provider in providers.iter_mut() {
            if same_bare_paths(provider.kind, kind) {
                provider.default = &*provider.name == name;
            }
        }
        chosen.push((kind, name));
    }
    Ok(())
}

fn routes(
    sections: Vec<Section<'_>>,
    providers: &[ProviderSettings],
) -> Result<Vec<RouteRule>, Fault> {
    let mut rules = Vec::new();
    for mut section in sections {
        let model = section.pattern("model")?;
        let name = section.text("provider")?;
        let model = model.ok_or_else(|| section.fault("model", "is missing"))?;
        let name = name.ok_or_else(|| section.fault("provider", "is missing"))?;
        let Some(provider) = providers.iter().find(|provider| *provider.name == *name) else {
            let names: Vec<&str> = providers.iter().map(|provider| &*provider.name).collect();
            let fault = section.fault("provider", "is no provider's name");
            return Err(match closest(&name, &names) {
                Some(meant) => fault.help(format!("Did you mean \"{meant}\"?")),
                None => fault.help(format!("There are {}.", names.join(", "))),
            });
        };
        rules.push(RouteRule {
            model,
            provider: Arc::clone(&provider.name),
        });
        section.finish()?;
    }
    rules.push(RouteRule {
        model: Pattern::new("demo*"),
        provider: Arc::from("demo"),
    });
    Ok(rules)
}

/// Whether `name` can be the first segment of an address and not be taken for another one.
fn provider_name(name: &str) -> Result<String, &'static str> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if !name.starts_with(plain)
        || !name.chars().all(|c| plain(c) || "._-".contains(c))
        || name.len() > 64
    {
        return Err(
            "must be at most 64 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter \
                    or digit",
        );
    }
    let version = name.strip_prefix('v').is_some_and(|rest| {
        rest.starts_with(|c: char| c.is_ascii_digit())
            && rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '.')
    });
    if version || RESERVED_NAMES.contains(&name) {
        return Err("must be another word: addresses already use this one otherwise");
    }
    Ok(name.to_owned())
}

/// Reads `key`. Whatever it is not may be a real key, so nothing of it is repeated.
fn key_source(section: &mut Section<'_>) -> Result<Option<KeySource>, Fault> {
    const WORDS: &[&str] = &["auto", "keyring", "pass", "none"];
    let Some(text) = section.text("key")? else {
        return Ok(None);
    };
    if let Some(variable) = text.strip_prefix("env:") {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if variable.starts_with(|c: char| plain(c) && !c.is_ascii_digit())
            && variable.chars().all(plain)
        {
            return Ok(Some(KeySource::Env(variable.to_owned())));
        }
        return Err(section.fault(
            "key",
            "must name an environment variable after `env:`, as in env:OPENAI_API_KEY",
        ));
    }
    Ok(Some(match text.as_str() {
        "auto" => KeySource::Auto,
        "keyring" => KeySource::Keyring,
        "pass" => KeySource::Pass,
        "none" => KeySource::None,
        other => {
            let fault = section.fault("key", "must be auto, keyring, pass, none or env:NAME");
            return Err(match closest(other, WORDS) {
                Some(meant) => fault.help(format!("Did you mean \"{meant}\"?")),
                None => fault.help(
                    "A key itself does not belong in this file: take it out and run \
                     `traygate key set`; if anyone else could read the file, replace the key.",
                ),
            });
        }
    }))
}

/// Reads an upstream address. It may hold a credential by mistake, so it is never repeated.
fn base_url(text: &str) -> Result<Url, &'static str> {
    const MUST: &str = "must be an address, as in https://api.example.com/v1";
    // The parser takes out line ends and tabs without a word.
    let text = text.trim();
    if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("must be one address, without spaces or line ends in it");
    }
    let url = Url::parse(text).map_err(|_| MUST)?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("must begin with http:// or https://");
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(MUST);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(
            "must not contain a user or password: `traygate key set` stores a key, and \
                    `headers` sends other credentials",
        );
    }
    if url.fragment().is_some() {
        return Err("must not contain a `#` part, which is never sent");
    }
    let secret = |name: &str| {
        let name = name.to_lowercase();
        ["key", "token", "secret", "password", "sig", "auth"]
            .iter()
            .any(|word| name.contains(word))
    };
    if url.query_pairs().any(|(name, _)| secret(&name)) {
        return Err("must not contain a key: `traygate key set` stores it");
    }
    Ok(url)
}

fn header_name(text: &str) -> Result<HeaderName, String> {
    // What the exchange itself needs, and Traygate's own, which never go upstream.
    const TAKEN: &[&str] = &[
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let name: HeaderName = text
        .parse()
        .map_err(|_| "must be a header's name, as in api-key".to_owned())?;
    if TAKEN.contains(&name.as_str()) || name.as_str().starts_with("x-traygate-") {
        return Err(format!("must not be {name}, which Traygate sets itself"));
    }
    Ok(name)
}

/// Values may be credentials: marked sensitive, they are not printed with the settings.
fn headers(section: &mut Section<'_>) -> Result<Option<Vec<(HeaderName, HeaderValue)>>, Fault> {
    let Some(pairs) = section.pairs("headers")? else {
        return Ok(None);
    };
    let read = |(name, value): (String, String)| {
        let name = header_name(&name)?;
        let mut value = HeaderValue::from_str(value.trim())
            .map_err(|_| format!("must give {name} a value without line ends"))?;
        value.set_sensitive(true);
        Ok((name, value))
    };
    let headers: Result<Vec<_>, String> = pairs.into_iter().map(read).collect();
    headers
        .map(Some)
        .map_err(|reason| section.fault("headers", reason))
}

/// A program has no folder that a person would expect a relative path to begin at.
fn absolute(text: &str) -> Result<PathBuf, &'static str> {
    if let Some(rest) = text.strip_prefix("~/") {
        return directories::BaseDirs::new()
            .map(|folders| folders.home_dir().join(rest))
            .ok_or("begins with ~/, but this user has no home folder");
    }
    let path = Path::new(text);
    if path.is_absolute() {
        Ok(path.to_owned())
    } else {
        Err("must be a whole path, beginning with / or ~/")
    }
}
