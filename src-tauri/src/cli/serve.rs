//! `traygate serve`: runs the proxy until it is told to stop.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use tokio::runtime::Builder;
use tracing::{Level, info, warn};
use tracing_subscriber::filter::{EnvFilter, FilterExt as _, LevelFilter, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer as _, fmt};

use super::{Places, ServeArgs};
use crate::clock::Clock;
use crate::listen::{ListenError, port_owner};
use crate::run::{Options, Running, StartError, start};
use crate::settings::Overrides;
use crate::settings::on_disk::SettingsFile;

/// The exit code where the port or the data folder is somebody else's.
const TAKEN: u8 = 2;

pub fn run(places: &Places, args: &ServeArgs, overrides: Overrides) -> anyhow::Result<ExitCode> {
    // The libraries never say more than `info`, whatever the filter: their traces hold headers, and
    // headers hold keys.
    let no_traces =
        filter_fn(|event| *event.level() <= Level::INFO || event.target().starts_with("traygate"));
    let no_traces = no_traces.with_max_level_hint(LevelFilter::TRACE);
    let lines = fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .with_filter(log_filter(&args.log)?.and(no_traces));
    tracing_subscriber::registry().with(lines).init();
    raise_descriptor_limit();
    let options = Options {
        settings: places.settings(&overrides)?,
        config: Some(SettingsFile {
            path: places.config()?,
            overrides,
        }),
        data_dir: places.data_dir()?,
        clock: Clock::Boot,
        keys: None,
    };
    let mut runtime = Builder::new_multi_thread();
    runtime.enable_all();
    if let Some(threads) = args.worker_threads {
        runtime.worker_threads(threads.into());
    }
    let runtime = runtime.build().context("the runtime cannot start")?;
    let code = runtime.block_on(async {
        // Before anything is told: whoever reads that it listens may stop it at once.
        let mut signals = Signals::new().context("signals cannot be waited for")?;
        let running = match start(options).await {
            Ok(running) => running,
            Err(error) => {
                eprintln!("traygate: {}", explain(&error));
                return Ok(ExitCode::from(TAKEN));
            }
        };
        greet(&running);
        serve_until_stopped(running, &mut signals).await;
        Ok(ExitCode::SUCCESS)
    });
    // Nothing is left that has to be waited for; a keyring's answer may still be.
    runtime.shutdown_background();
    code
}

/// A bare level is about Traygate itself.
fn log_filter(text: &str) -> anyhow::Result<EnvFilter> {
    let is_level = text.parse::<Level>().is_ok();
    let filter = if is_level {
        format!("warn,traygate={text}")
    } else {
        text.to_owned()
    };
    EnvFilter::try_new(filter)
        .with_context(|| format!("--log {text:?} is neither a level nor a filter"))
}

/// Every stream holds two descriptors, and the usual limit of 1,024 is soon reached.
fn raise_descriptor_limit() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            warn!(%error, "the limit of open files could not be raised");
        }
    }
}

fn explain(error: &StartError) -> String {
    match error {
        StartError::Listen(ListenError::Taken(address)) => {
            let owner = match port_owner(address.port()) {
                Some(owner) => format!("{owner} has it"),
                None => "another program has it".to_owned(),
            };
            format!(
                "{address} is taken: {owner}. Stop that, or choose another port with --port (or server.port in config.toml)"
            )
        }
        error => error.to_string(),
    }
}

fn greet(running: &Running) {
    let address = running.address();
    let mut out = std::io::stdout().lock();
    // Nobody may be reading; that is no reason not to serve.
    let _ = writeln!(
        out,
        "traygate {} is listening on http://{address}\n\n\
         Try it, no key needed:\n\n  \
         curl http://{address}/v1/chat/completions -H 'content-type: application/json' -d '{{\"model\":\"demo\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n",
        env!("CARGO_PKG_VERSION"),
    );
    if let Some(link) = running.core().link() {
        let _ = writeln!(out, "See and steer it:\n\n  {link}\n");
    }
    let health = running.core().store.health();
    let record = health.last_error.filter(|_| !health.recording);
    let record = record.map(|error| format!("calls are not on record: {error}"));
    let notes = running.warnings().iter().cloned();
    for note in notes.chain(record).chain(health.notice) {
        let _ = writeln!(out, "Note: {note}");
    }
    let _ = out.flush();
}

/// The first signal lets calls in flight finish, a second one ends at once.
async fn serve_until_stopped(running: Running, signals: &mut Signals) {
    signals.next().await;
    info!("stopping: calls in flight may finish; a second signal ends at once");
    let cut = running.shut_down_or(signals.next()).await;
    if cut > 0 {
        warn!(cut, "calls were still running and have been cut");
    }
}

/// What tells a program to end. A signal that comes while nobody waits for it is not lost.
#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Ctrl-C. One that comes while nobody waits for it is not lost.
#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        tokio::signal::windows::ctrl_c().map(Signals)
    }

    async fn next(&mut self) {
        let _ = self.0.recv().await;
    }
}
