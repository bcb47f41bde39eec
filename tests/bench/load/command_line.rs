//! The command line, and the two servers the bench starts from its own binary.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

use crate::calls::{Numbers, Workload};
use crate::processes::{Process, Setup, Target, start_provider};
use crate::{chunks, memory, million, overhead, provider};

/// What every part of the bench needs at hand.
pub struct Bench {
    /// Where binaries and scratch files are.
    pub setup: Setup,
    /// The provider's process.
    pub provider: Process,
    /// Where the provider listens.
    pub provider_address: SocketAddr,
    /// Numbers for the calls.
    pub numbers: Rc<Numbers>,
    /// Where reports go.
    pub out: PathBuf,
}

#[derive(Parser)]
#[command(
    name = "scripts/bench",
    bin_name = "scripts/bench",
    about = "Measures what Traygate costs, beside nginx and a bare forwarder."
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
    /// What `cargo bench` passes to every bench.
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Latency, throughput and CPU a call: closed loop, open loop, worker threads.
    Overhead {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        options: OverheadOptions,
    },
    /// Resident memory idle and with many open streams.
    Memory {
        #[command(flatten)]
        places: Places,
        /// Streams open at once.
        #[arg(long, default_value_t = 1000)]
        streams: usize,
    },
    /// How long the events of streams are on their way, direct and through Traygate.
    Chunks {
        #[command(flatten)]
        places: Places,
        /// Streams at once.
        #[arg(long, value_delimiter = ',', default_value = "1,50")]
        streams: Vec<u32>,
        /// Repeats of each block.
        #[arg(long, default_value_t = 3)]
        repeats: usize,
    },
    /// CPU a call and p50 from the first call to the millionth of one process.
    Million {
        #[command(flatten)]
        places: Places,
        /// Calls in all.
        #[arg(long, default_value_t = 1_000_000)]
        calls: u64,
        /// What to measure.
        #[arg(long, value_enum, default_value = "traygate")]
        target: Target,
    },
    #[command(hide = true)]
    Provider,
    #[command(hide = true)]
    Forwarder {
        base: String,
        #[arg(long)]
        worker_threads: Option<usize>,
    },
}

#[derive(Args)]
struct Places {
    /// The `traygate` to measure.
    #[arg(long, default_value = "target/release/traygate")]
    traygate: PathBuf,
    /// Where reports and scratch files go.
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

/// Which blocks to run.
#[derive(Args, Clone)]
pub struct OverheadOptions {
    /// Short blocks and one repeat: shows that it works, not what it costs.
    #[arg(long)]
    pub quick: bool,
    /// Ways to the provider.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "direct,nginx,forwarder,traygate"
    )]
    pub targets: Vec<Target>,
    /// Kinds of calls in the closed loop.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "chat,tool,stream"
    )]
    pub workloads: Vec<Workload>,
    /// Connections in the closed loop.
    #[arg(long, value_delimiter = ',', default_value = "1,10,50")]
    pub connections: Vec<usize>,
    /// Worker threads of the proxies in the last part.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    pub worker_threads: Vec<usize>,
    /// Parts of the bench.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "closed,open,threads"
    )]
    pub parts: Vec<Part>,
    /// Repeats of each block [default: 3, with --quick 1].
    #[arg(long)]
    pub repeats: Option<usize>,
    /// `--concurrency` for Traygate, so that its pool is not what is measured.
    #[arg(long, default_value_t = 512)]
    pub pool: usize,
}

/// A part of the overhead bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The next call starts when the last has its answer.
    Closed,
    /// Calls arrive at a fixed rate, raised to the knee.
    Open,
    /// The closed loop at 50 with 1, 2 and 4 worker threads.
    Threads,
}

/// Does what the command line says.
pub fn run() -> ExitCode {
    match obey(CommandLine::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Stopped>() => {
            eprintln!("bench: {error}");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Somebody pressed Ctrl-C or asked the process to end.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
struct Stopped;

fn obey(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Provider => Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(async {
                let listener = announce().await?;
                Ok(provider::serve(listener).await?)
            }),
        Command::Forwarder {
            base,
            worker_threads,
        } => forwarder_runtime(worker_threads)?.block_on(async {
            let listener = announce().await?;
            crate::forwarder::serve(listener, base).await
        }),
        Command::Overhead { places, options } => {
            let pool = options.pool;
            measure(places, pool, async move |bench| {
                overhead::run(&bench, options).await
            })
        }
        Command::Memory { places, streams } => {
            let pool = streams.max(1);
            measure(places, pool, async move |bench| {
                memory::run(&bench, streams).await
            })
        }
        Command::Chunks {
            places,
            streams,
            repeats,
        } => measure(places, 512, async move |bench| {
            chunks::run(&bench, &streams, repeats).await
        }),
        Command::Million {
            places,
            calls,
            target,
        } => measure(places, 512, async move |bench| {
            million::run(&bench, target, calls).await
        }),
    }
}

async fn announce() -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(listener)
}

fn forwarder_runtime(worker_threads: Option<usize>) -> anyhow::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    if let Some(workers) = worker_threads {
        builder.worker_threads(workers);
    }
    Ok(builder.enable_all().build()?)
}

/// Starts the provider and runs `part` until it ends or somebody stops it;
/// either way everything that was started is ended.
fn measure(
    places: Places,
    pool: usize,
    part: impl AsyncFnOnce(Bench) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(&places.out).with_context(|| format!("{}", places.out.display()))?;
    // nginx reads its paths from another folder than ours.
    let out = places.out.canonicalize()?;
    let scratch = tempfile::Builder::new().prefix("run-").tempdir_in(&out)?;
    let setup = Setup {
        traygate: places.traygate,
        scratch: scratch.path().to_owned(),
        pool,
    };
    let (provider, provider_address) = start_provider(&setup)?;
    let bench = Bench {
        setup,
        provider,
        provider_address,
        numbers: Rc::new(Numbers::new()),
        out,
    };
    // One thread: the load must not take the cores that the proxies need.
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let measured = LocalSet::new().block_on(&runtime, async move {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            measured = part(bench) => measured,
            _ = interrupt.recv() => Err(Stopped.into()),
            _ = terminate.recv() => Err(Stopped.into()),
        }
    });
    if measured.as_ref().is_err_and(|error| !error.is::<Stopped>()) {
        eprintln!(
            "bench: what was started and its logs are kept in {}",
            scratch.keep().display()
        );
    }
    measured
}
