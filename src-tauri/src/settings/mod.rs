//! The settings: what `config.toml` and the flags say, checked once and ready to use.
//!
//! [`Settings::load`] reads the file (a missing one means the defaults), lays the flags over
//! it and hands out durations, addresses and patterns; nothing downstream parses or checks
//! again. What every key means stands in `default.toml`, which is written where no file is.

mod describe;
mod edit;
mod error;
mod explained;
mod file;
mod in_force;
pub mod live;
pub mod on_disk;
mod patch;
mod read;
mod section;
mod shipped;

use std::fmt;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use url::Url;
use wildmatch::WildMatch;

use crate::policy::breaker::BreakerSettings;
pub use crate::policy::money::Nanodollars;

pub use error::SettingsError;
pub use in_force::{InForce, Setting};
pub(crate) use read::{FileWork, PATIENCE};

/// The commented file, as it is written on the first start. It changes nothing.
pub const DEFAULT_FILE: &str = include_str!("default.toml");

/// Everything a person can set, ready to use.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub server: ServerSettings,
    pub dedup: DedupSettings,
    pub log: LogSettings,
    pub spend: SpendSettings,
    pub notify: NotifySettings,
    /// The shipped ones in their order, then the person's own in the file's.
    pub providers: Vec<ProviderSettings>,
    /// The first that matches wins. The last is built in: `demo*` goes to `demo`.
    pub routes: Vec<RouteRule>,
    /// What they were read from.
    pub source: Source,
}

/// What settings were read from, to tell of each where it comes from.
#[derive(Clone, Default)]
pub struct Source {
    /// The file's text. It may hold credentials, in `headers`.
    pub(crate) text: Arc<str>,
    pub(crate) overrides: Overrides,
}

/// Where settings come from is no part of what they are.
impl PartialEq for Source {
    fn eq(&self, _other: &Source) -> bool {
        true
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

/// `[server]`: where Traygate listens and whom it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// Beyond loopback, which is always listened on and never in here.
    pub host: Vec<IpAddr>,
    /// Loopback addresses that were asked for and are not listened on: 127.0.0.2, say.
    pub unheard_loopback: Vec<IpAddr>,
    /// 0 asks the system for a free one.
    pub port: u16,
    /// What tools send as a key when they have none.
    pub placeholder_keys: Vec<String>,
    /// Host names served beside the loopback ones; lower case, without port.
    pub allowed_hosts: Vec<String>,
    /// Web origins served beside loopback's and the editors'; lower case, no final slash.
    pub allowed_origins: Vec<String>,
    /// Bytes. Larger bodies stream through without dedup.
    pub max_body: u64,
    /// How long calls in flight may go on once Traygate is asked to stop.
    pub drain: Duration,
}

/// `[dedup]`: when equal calls share one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct DedupSettings {
    pub enabled: bool,
    /// How long a finished answer is kept. Zero: only calls in flight are merged.
    pub window: Duration,
    /// Bytes of all kept answers together.
    pub max_bytes: u64,
    /// How long a call that everybody left waits for its client's retry.
    pub linger: Duration,
    /// Tools whose *regenerate* sends the same body on purpose.
    pub retry_tools: Vec<Pattern>,
    /// The first that matches wins.
    pub rules: Vec<DedupRule>,
}

/// `[[dedup.rule]]`: a mode for some calls. A missing pattern matches every call.
#[derive(Clone, Debug, PartialEq)]
pub struct DedupRule {
    pub tool: Option<Pattern>,
    pub model: Option<Pattern>,
    pub mode: DedupMode,
}

/// How much equal calls may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DedupMode {
    /// Join calls in flight; give a finished answer to any equal call.
    Full,
    /// Join calls in flight; give a finished answer only where nobody received it whole.
    Retry,
    /// Join calls in flight only.
    InFlight,
    /// Not even that.
    Off,
}

/// `[log]`: how much of the record is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// How long a call's row is kept.
    pub retention: Duration,
    /// Bytes of the database, above which the oldest rows go first.
    pub max_bytes: u64,
    pub bodies: BodyLog,
    /// How long a body is kept.
    pub bodies_retention: Duration,
}

/// Whose bodies are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLog {
    Off,
    /// Calls that failed.
    Errors,
    All,
}

/// `[spend]`, `[[price]]` and `[[budget]]`: what calls cost and how much they may.
#[derive(Clone, Debug, PartialEq)]
pub struct SpendSettings {
    /// What becomes of a call without a price where a budget applies.
    pub unpriced: Unpriced,
    /// The share of a budget at which to warn, 0 to 1.
    pub warn_at: f64,
    /// The tokens a call is taken to answer at worst where it names no limit.
    pub output_bound_tokens: u32,
    /// Whether newer prices may be fetched.
    pub refresh_prices: bool,
    /// The person's own prices; the first that matches wins.
    pub prices: Vec<PriceRule>,
    pub budgets: Vec<Budget>,
}

/// A call whose model has no price, under a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpriced {
    Allow,
    Refuse,
}

/// `[[price]]`: what a million tokens cost.
#[derive(Clone, Debug, PartialEq)]
pub struct PriceRule {
    pub model: Pattern,
    pub input: Nanodollars,
    pub output: Nanodollars,
    /// Input found in the provider's prompt cache; `None`: as `input`.
    pub cached_input: Option<Nanodollars>,
    /// Input written to it for five minutes, or for a time not stated; `None`: as `input`.
    pub cache_write: Option<Nanodollars>,
    /// Input written to it for an hour; `None`: as `cache_write`.
    pub cache_write_1h: Option<Nanodollars>,
}

/// `[[budget]]`: what may be spent in a period. A missing pattern matches every call.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    pub per: Period,
    pub cap: Nanodollars,
    pub provider: Option<Pattern>,
    pub tool: Option<Pattern>,
    pub model: Option<Pattern>,
}

/// A budget's period, by the local calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    Hour,
    Day,
    Month,
}

/// `[notify]`: what is worth interrupting a person for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotifySettings {
    pub breaker: bool,
    pub budget: bool,
    pub runaway: bool,
    pub log: bool,
}

/// One provider: where it is, how it is paid, how much it may be asked at once.
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderSettings {
    /// The first segment of its address: `/openai/…`.
    pub name: Arc<str>,
    pub kind: ProviderKind,
    /// http or https, without credentials or fragment. For [`ProviderKind::Demo`] a
    /// placeholder on port 0, replaced once the demo listens.
    pub base_url: Url,
    pub key: KeySource,
    /// Bare paths of its dialect go here. At most one provider of each dialect has it.
    pub default: bool,
    /// Runs on this machine: other limits, no price.
    pub local: bool,
    /// Came with Traygate, whatever the file changed about it.
    pub shipped: bool,
    pub limits: Limits,
    pub breaker: BreakerSettings,
    /// Where those two come from.
    pub in_force: InForce,
    /// Where the key goes if not where `kind` puts it.
    pub auth_header: Option<HeaderName>,
    /// Added to every request. Marked sensitive: `Debug` does not show the values.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// A PEM file of certificate authorities to trust beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether a stream that did not ask for its usage is made to.
    pub ask_usage: bool,
}

impl ProviderSettings {
    /// What a stored key is bound to: `https://api.openai.com`.
    pub fn origin(&self) -> String {
        self.base_url.origin().ascii_serialization()
    }
}

/// What a provider speaks beside what its paths say: how a key is sent, what is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProviderKind {
    OpenAi,
    Anthropic,
    Ollama,
    LlamaCpp,
    /// Built in, offline.
    Demo,
}

impl ProviderKind {
    /// The word in the settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
            Self::Ollama => "ollama",
            Self::LlamaCpp => "llama-cpp",
            Self::Demo => "demo",
        }
    }
}

/// Whose key a call goes out with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// The client's own; the keyring's where it sends none or a placeholder.
    Auto,
    /// Always the keyring's.
    Keyring,
    /// The client's or none.
    Pass,
    /// As [`KeySource::Auto`], from this environment variable.
    Env(String),
    /// None.
    None,
}

/// What one provider is held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Calls at once.
    pub concurrency: usize,
    /// Calls that may wait.
    pub queue: usize,
    /// How long one may wait.
    pub queue_wait: Duration,
    pub connect: Duration,
    /// To the first byte of a stream.
    pub first_byte: Duration,
    /// For a whole answer that is not streamed.
    pub unstreamed: Duration,
    /// Between chunks of a stream.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            concurrency: 16,
            queue: 1000,
            queue_wait: Duration::from_secs(60),
            connect: Duration::from_secs(10),
            first_byte: Duration::from_secs(120),
            unstreamed: Duration::from_secs(600),
            idle: Duration::from_secs(600),
        }
    }
}

/// `[[route]]`: which provider a model's bare calls go to.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteRule {
    pub model: Pattern,
    /// Always the name of one in [`Settings::providers`].
    pub provider: Arc<str>,
}

/// `*` stands for any text, `?` for one character; upper and lower case are the same.
#[derive(Clone, PartialEq)]
pub struct Pattern(WildMatch);

impl Pattern {
    pub fn new(text: &str) -> Self {
        Self(WildMatch::new_case_insensitive(text))
    }

    pub fn matches(&self, name: &str) -> bool {
        self.0.matches(name)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// What flags and `TRAYGATE_*` variables say. They win over the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    pub host: Option<Vec<IpAddr>>,
    pub port: Option<u16>,
    /// Both to the first byte and for a whole unstreamed answer, for every provider.
    pub timeout: Option<Duration>,
    /// For every provider.
    pub concurrency: Option<usize>,
    pub dedup_window: Option<Duration>,
    /// Those of them that come from a variable and not from a flag.
    pub from_variables: Vec<Flag>,
}

/// A flag that wins over the file, or its variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    Host,
    Port,
    Timeout,
    Concurrency,
    DedupSecs,
}

impl Flag {
    pub const ALL: [Flag; 5] = [
        Flag::Host,
        Flag::Port,
        Flag::Timeout,
        Flag::Concurrency,
        Flag::DedupSecs,
    ];

    /// `dedup-secs` of `--dedup-secs` and `TRAYGATE_DEDUP_SECS`.
    pub fn name(self) -> &'static str {
        match self {
            Flag::Host => "host",
            Flag::Port => "port",
            Flag::Timeout => "timeout",
            Flag::Concurrency => "concurrency",
            Flag::DedupSecs => "dedup-secs",
        }
    }

    /// Whether it wins over the file's `field`: `server.port`, `provider.openai.timeout_secs`.
    fn wins_over(self, field: &str) -> bool {
        let of_limits = |keys: &[&str]| {
            let key = field.rsplit('.').next().unwrap_or_default();
            (field.starts_with("limits.") || field.starts_with("provider.")) && keys.contains(&key)
        };
        match self {
            Flag::Host => field == "server.host",
            Flag::Port => field == "server.port",
            Flag::Timeout => of_limits(&["timeout_secs", "unstreamed_timeout_secs"]),
            Flag::Concurrency => of_limits(&["concurrency"]),
            Flag::DedupSecs => field == "dedup.window_secs",
        }
    }
}

impl Overrides {
    fn is_given(&self, flag: Flag) -> bool {
        match flag {
            Flag::Host => self.host.is_some(),
            Flag::Port => self.port.is_some(),
            Flag::Timeout => self.timeout.is_some(),
            Flag::Concurrency => self.concurrency.is_some(),
            Flag::DedupSecs => self.dedup_window.is_some(),
        }
    }

    /// What wins over the file's `field`, if anything does.
    fn winner(&self, field: &str) -> Option<Flag> {
        let mut flags = Flag::ALL.into_iter();
        flags.find(|flag| self.is_given(*flag) && flag.wins_over(field))
    }

    /// What wins over the file's `field`, as a person wrote it: `--port`, `TRAYGATE_PORT`.
    pub fn locks(&self, field: &str) -> Option<String> {
        self.winner(field).map(|flag| self.written(flag))
    }

    /// Parts changed fields into those that are in force and those over which something else
    /// wins, with what does: `server.port (--port)`.
    pub(crate) fn part(&self, fields: Vec<String>) -> (Vec<String>, Vec<String>) {
        let (mut in_force, mut overridden) = (Vec::new(), Vec::new());
        for field in fields {
            match self.locks(&field) {
                Some(by) => overridden.push(format!("{field} ({by})")),
                None => in_force.push(field),
            }
        }
        (in_force, overridden)
    }

    fn written(&self, flag: Flag) -> String {
        if self.from_variables.contains(&flag) {
            format!("TRAYGATE_{}", flag.name().replace('-', "_").to_uppercase())
        } else {
            format!("--{}", flag.name())
        }
    }
}

impl Settings {
    /// Reads `text` as a settings file and lays `overrides` over it.
    ///
    /// # Errors
    /// The first thing that is wrong. Its file is called `config.toml`.
    pub fn parse(text: &str, overrides: &Overrides) -> Result<Settings, SettingsError> {
        Self::parse_from(text, Path::new("config.toml"), overrides)
    }

    /// Reads the file at `path`; a missing one means the defaults.
    ///
    /// # Errors
    /// The first thing that is wrong, or why the file cannot be read.
    pub fn load(path: &Path, overrides: &Overrides) -> Result<Settings, SettingsError> {
        let bytes = read::read(path).map_err(|error| not_read(path, &error))?;
        Self::of_bytes(&bytes.unwrap_or_default(), path, overrides)
    }

    /// What a file at `path` with these bytes says.
    fn of_bytes(
        bytes: &[u8],
        path: &Path,
        overrides: &Overrides,
    ) -> Result<Settings, SettingsError> {
        let text = std::str::from_utf8(bytes).map_err(|wrong| {
            let good = String::from_utf8_lossy(&bytes[..wrong.valid_up_to()]);
            let (line, _) = error::line_and_column(&good, good.len());
            unreadable(path, Some(line), "is not UTF-8 text".to_owned())
        })?;
        Self::parse_from(text, path, overrides)
    }

    fn parse_from(
        text: &str,
        path: &Path,
        overrides: &Overrides,
    ) -> Result<Settings, SettingsError> {
        let mut settings = file::read(text).map_err(|fault| fault.locate(text, path))?;
        settings.lay_over(overrides)?;
        settings.source = Source {
            text: Arc::from(text),
            overrides: overrides.clone(),
        };
        Ok(settings)
    }

    fn lay_over(&mut self, overrides: &Overrides) -> Result<(), SettingsError> {
        if let Some(host) = &overrides.host {
            self.server.host = file::beyond_loopback(host);
            self.server.unheard_loopback = file::unheard_loopback(host);
        }
        if let Some(port) = overrides.port {
            self.server.port = port;
        }
        if let Some(window) = overrides.dedup_window {
            let range = file::WINDOW_SECS;
            self.dedup.window = within("--dedup-secs", window.as_secs_f64(), &range, window)?;
        }
        for provider in &mut self.providers {
            provider.in_force.lay_over(&provider.name, overrides);
            let limits = &mut provider.limits;
            if let Some(timeout) = overrides.timeout {
                let range = file::TIMEOUT_SECS;
                let timeout = within("--timeout", timeout.as_secs_f64(), &range, timeout)?;
                (limits.first_byte, limits.unstreamed) = (timeout, timeout);
            }
            if let Some(calls) = overrides.concurrency {
                let range = *file::CONCURRENCY.start() as usize..=*file::CONCURRENCY.end() as usize;
                limits.concurrency = within("--concurrency", calls, &range, calls)?;
            }
        }
        Ok(())
    }

    /// What was set that this version does not heed, in words.
    pub fn not_in_effect(&self) -> Vec<&'static str> {
        let Ok(default) = Settings::parse("", &Overrides::default()) else {
            return Vec::new();
        };
        let told = [
            (
                self.notify != default.notify,
                "[notify] is not in effect in this version",
            ),
            (
                !self.server.unheard_loopback.is_empty(),
                "server.host has other loopback addresses than 127.0.0.1 and ::1, which are not listened on: call 127.0.0.1 or [::1]",
            ),
        ];
        told.into_iter()
            .filter(|(is_set, _)| *is_set)
            .map(|(_, words)| words)
            .collect()
    }

    /// The provider of this exact name.
    pub fn provider(&self, name: &str) -> Option<&ProviderSettings> {
        self.providers
            .iter()
            .find(|provider| &*provider.name == name)
    }

    /// Where bare paths go that speak as `kind` does: [`ProviderKind::Anthropic`] or, for
    /// every other kind, OpenAI. `None` only where the file took the shipped default away.
    pub fn default_provider(&self, kind: ProviderKind) -> Option<&ProviderSettings> {
        self.providers
            .iter()
            .find(|provider| provider.default && same_bare_paths(provider.kind, kind))
    }
}

/// The file is there and cannot be read.
fn not_read(path: &Path, error: &io::Error) -> SettingsError {
    unreadable(path, None, format!("cannot be read: {error}"))
}

/// The file as a whole is at fault, or a line of it that is no text.
fn unreadable(path: &Path, line: Option<u32>, reason: String) -> SettingsError {
    SettingsError {
        file: Some(path.to_owned()),
        line,
        column: None,
        field: String::new(),
        reason,
        help: None,
    }
}

/// Two defaults of such kinds would claim the same bare paths: all but Anthropic's are OpenAI's.
fn same_bare_paths(one: ProviderKind, other: ProviderKind) -> bool {
    (one == ProviderKind::Anthropic) == (other == ProviderKind::Anthropic)
}

fn within<N: PartialOrd + fmt::Display, T>(
    flag: &str,
    number: N,
    range: &std::ops::RangeInclusive<N>,
    value: T,
) -> Result<T, SettingsError> {
    if range.contains(&number) {
        return Ok(value);
    }
    let reason = format!("must be {} to {}, is {number}", range.start(), range.end());
    Err(error::Fault::new(None, flag, reason).of_a_flag())
}

/// Writes the commented file where none stands, whole or not at all, readable by its owner
/// only; true if it was written. Missing folders are made.
///
/// # Errors
/// What the file system says.
pub fn write_default(path: &Path) -> io::Result<bool> {
    // A symbolic link counts as a file, even one that leads nowhere: someone manages it.
    if path.symlink_metadata().is_ok() {
        return Ok(false);
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder)?;
    let draft = folder.join(format!(".config.{}.tmp", std::process::id()));
    let written = write_private(&draft, DEFAULT_FILE).and_then(|()| {
        // A link, unlike a rename, does not replace a file that appeared meanwhile.
        match std::fs::hard_link(&draft, path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            // A file system without hard links (FAT, some network shares).
            Err(_) => std::fs::rename(&draft, path).map(|()| true),
        }
    });
    // Gone already where it was renamed.
    let _ = std::fs::remove_file(&draft);
    written
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests;
