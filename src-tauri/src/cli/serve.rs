//! `traygate serve`: runs the proxy until it is told to stop.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use tokio::runtime::Builder;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use super::check::port_owner;
use super::{Places, ServeArgs};
use crate::clock::Clock;
use crate::listen::ListenError;
use crate::run::{Options, Running, StartError, start};

/// The exit code where the port or the data folder is somebody else's.
const TAKEN: u8 = 2;

pub fn run(places: &Places, args: &ServeArgs) -> anyhow::Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_env_filter(log_filter(&args.log)?)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    raise_descriptor_limit();
    let options = Options {
        settings: places.settings(&args.overrides())?,
        data_dir: places.data_dir()?,
        clock: Clock::Boot,
        use_keyring: true,
    };
    let mut runtime = Builder::new_multi_thread();
    runtime.enable_all();
    if let Some(threads) = args.worker_threads {
        runtime.worker_threads(threads.into());
    }
    let runtime = runtime.build().context("the runtime cannot start")?;
    let code = runtime.block_on(async {
        let running = match start(options).await {
            Ok(running) => running,
            Err(error) => {
                eprintln!("traygate: {}", explain(&error));
                return ExitCode::from(TAKEN);
            }
        };
        greet(&running);
        serve_until_stopped(running).await;
        ExitCode::SUCCESS
    });
    // Nothing is left that has to be waited for; a keyring's answer may still be.
    runtime.shutdown_background();
    Ok(code)
}

/// A bare level is about Traygate itself. The HTTP libraries never say more than `info`: their
/// traces hold headers, and headers hold keys.
fn log_filter(text: &str) -> anyhow::Result<EnvFilter> {
    let is_level = text.parse::<tracing::Level>().is_ok();
    let filter = if is_level {
        format!("warn,traygate={text}")
    } else {
        text.to_owned()
    };
    let mut filter = EnvFilter::try_new(filter)
        .with_context(|| format!("--log {text:?} is neither a level nor a filter"))?;
    for library in ["h2", "hyper", "hyper_util", "reqwest", "rustls", "tower"] {
        filter = filter.add_directive(format!("{library}=info").parse()?);
    }
    Ok(filter)
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
         curl http://{address}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\":\"demo\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n",
        env!("CARGO_PKG_VERSION"),
    );
    for warning in running.warnings() {
        let _ = writeln!(out, "Note: {warning}");
    }
    let _ = out.flush();
}

/// The first signal lets calls in flight finish, a second one ends at once.
async fn serve_until_stopped(running: Running) {
    let mut signals = Signals::new();
    signals.next().await;
    let store = running.core().store.clone();
    info!("stopping: calls in flight may finish; a second signal ends at once");
    tokio::select! {
        cut = running.shut_down() => {
            if cut > 0 {
                warn!(cut, "calls were still running after drain_secs and have been cut");
            }
        }
        () = signals.next() => {
            warn!("stopping at once");
            let _ = tokio::task::spawn_blocking(move || store.close()).await;
        }
    }
}

/// SIGTERM, SIGINT and their kin.
struct Signals {
    #[cfg(unix)]
    term: Option<tokio::signal::unix::Signal>,
}

impl Signals {
    fn new() -> Signals {
        Signals {
            #[cfg(unix)]
            term: tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).ok(),
        }
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        if let Some(term) = &mut self.term {
            tokio::select! {
                _ = term.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
        let _ = tokio::signal::ctrl_c().await;
    }
}
