//! The command line. Every flag can also be set as `TRAYGATE_*`.

pub mod calls;
pub mod check;
pub mod key;
pub mod repeats;
mod serve;
pub mod spend;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use directories::ProjectDirs;

use crate::settings::{Flag, Overrides, Settings, write_default};

/// A local LLM proxy: point your tools at it, and identical calls cost once, a dead provider
/// fails in a millisecond, and every call is on record.
///
/// Start it with `traygate serve`, then change only the base URL of your tools:
///
///   OpenAI SDKs      OPENAI_BASE_URL=http://127.0.0.1:7337/openai/v1
///   Anthropic SDKs   ANTHROPIC_BASE_URL=http://127.0.0.1:7337/anthropic
///   Ollama clients   http://127.0.0.1:7337/ollama
///
/// `/@name/` before the provider tells Traygate which tool is calling:
/// http://127.0.0.1:7337/@aider/openai/v1
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    places: Places,
    #[command(subcommand)]
    command: Command,
}

/// Where things are.
#[derive(Debug, Args)]
struct Places {
    /// The settings file [default: config.toml in the platform's config folder]
    #[arg(
        long,
        global = true,
        display_order = 100,
        value_name = "FILE",
        env = "TRAYGATE_CONFIG"
    )]
    config: Option<PathBuf>,
    /// The folder of the record [default: the platform's data folder]
    #[arg(
        long,
        global = true,
        display_order = 101,
        value_name = "FOLDER",
        env = "TRAYGATE_DATA_DIR"
    )]
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy
    ///
    /// It listens on 127.0.0.1 and [::1], port 7337, and on no other port by itself. The first
    /// Ctrl-C or SIGTERM lets calls in flight finish, a second one ends at once.
    ///
    ///   traygate serve
    ///   traygate serve --timeout 20 --concurrency 4
    ///   traygate serve --host 172.17.0.1        containers may call, with the access token
    ///
    /// A flag wins over its TRAYGATE_* variable, and that over the settings file, which can say
    /// much more: the first start writes one in which everything is explained.
    #[command(verbatim_doc_comment)]
    Serve(ServeArgs),
    /// Say what works and what does not: settings, record, keyring, port, providers
    ///
    /// A line for each: `ok`, `note` where there is nothing to mend, or `BAD`. The exit code is 1
    /// if anything is bad. Nothing is changed, and no call that costs money is made.
    #[command(verbatim_doc_comment)]
    Check(ListenArgs),
    /// Keep providers' API keys in the system's keyring
    ///
    ///   traygate key set openai                 asks for the key, which is not shown
    ///   traygate key list
    ///
    /// A stored key is used where a tool sends none, or a placeholder such as `traygate`; a tool's
    /// own key always wins.
    #[command(subcommand, verbatim_doc_comment)]
    Key(key::KeyCommand),
    /// Show the record of calls
    ///
    ///   traygate calls                          the last 50
    ///   traygate calls --follow
    ///   traygate calls --since 2h --outcome upstream_error
    ///   traygate calls --since 2026-11-01 --format csv > november.csv
    #[command(verbatim_doc_comment)]
    Calls(calls::CallsArgs),
    /// Say what was spent and saved, by day, model, tool and more
    ///
    ///   traygate spend                          the last 30 days
    ///   traygate spend --by tool --since 7d
    ///   traygate spend --by month --format csv > months.csv
    ///
    /// Sums stay when calls go from the record, and are exact to the billionth of a dollar. Days
    /// and months are those of this machine's calendar.
    #[command(verbatim_doc_comment)]
    Spend(spend::SpendArgs),
    /// Say what share of calls repeat an earlier one
    ///
    ///   traygate repeats                        of all calls on record
    ///   traygate repeats --since 7d --tool aider
    ///   traygate repeats --from conversations.jsonl
    ///
    /// A call repeats an earlier one that has the same key: on record, the same provider, path,
    /// credential and body, to the byte. It repeats it within 5 minutes, an hour, a day or ever,
    /// by how long before it the latest such call came. Joined and cached calls count as calls.
    #[command(verbatim_doc_comment)]
    Repeats(repeats::RepeatsArgs),
}

/// Where to listen. They win over the settings file.
#[derive(Debug, Args)]
struct ListenArgs {
    /// Listen here too, beyond loopback; callers then need the access token
    /// (`traygate key set access-token`)
    #[arg(long, value_name = "IP", value_delimiter = ',', env = "TRAYGATE_HOST")]
    host: Option<Vec<IpAddr>>,
    /// The port; 0 takes a free one [default: 7337, or server.port of the settings]
    #[arg(long, env = "TRAYGATE_PORT")]
    port: Option<u16>,
}

/// Flags of `traygate serve`. They win over the settings file.
#[derive(Debug, Args)]
struct ServeArgs {
    #[command(flatten)]
    listen: ListenArgs,
    /// Seconds to a stream's first byte, and for a whole answer that is not streamed, for every
    /// provider in this run
    #[arg(long, value_name = "SECS", value_parser = seconds, env = "TRAYGATE_TIMEOUT")]
    timeout: Option<Duration>,
    /// Calls at once, for every provider in this run
    #[arg(long, value_name = "CALLS", env = "TRAYGATE_CONCURRENCY")]
    concurrency: Option<usize>,
    /// Seconds for which a finished answer may serve an identical call; 0 merges only calls in
    /// flight
    #[arg(long, value_name = "SECS", value_parser = seconds, env = "TRAYGATE_DEDUP_SECS")]
    dedup_secs: Option<Duration>,
    /// Threads that carry the calls [default: one for each core]
    #[arg(long, value_name = "THREADS", value_parser = clap::value_parser!(u16).range(1..=256), env = "TRAYGATE_WORKER_THREADS")]
    worker_threads: Option<u16>,
    /// What to tell on standard error: error, warn, info, debug, trace, or a filter such as
    /// `traygate::call=debug`
    #[arg(
        long,
        value_name = "FILTER",
        default_value = "info",
        env = "TRAYGATE_LOG"
    )]
    log: String,
}

/// Seconds with fractions.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} seconds is out of range"))
}

impl ListenArgs {
    fn overrides(&self) -> Overrides {
        Overrides {
            host: self.host.clone(),
            port: self.port,
            ..Overrides::default()
        }
    }
}

impl ServeArgs {
    fn overrides(&self) -> Overrides {
        Overrides {
            timeout: self.timeout,
            concurrency: self.concurrency,
            dedup_window: self.dedup_secs,
            ..self.listen.overrides()
        }
    }
}

impl Places {
    fn folders() -> anyhow::Result<ProjectDirs> {
        ProjectDirs::from("", "", "traygate")
            .context("there is no home folder, so name the places with --config and --data-dir")
    }

    fn config(&self) -> anyhow::Result<PathBuf> {
        match &self.config {
            Some(file) => Ok(file.clone()),
            None => Ok(Places::folders()?.config_dir().join("config.toml")),
        }
    }

    fn data_dir(&self) -> anyhow::Result<PathBuf> {
        match &self.data_dir {
            Some(folder) => Ok(folder.clone()),
            None => Ok(Places::folders()?.data_dir().to_owned()),
        }
    }

    /// The settings, from a file that is written with its comments where there is none.
    fn settings(&self, overrides: &Overrides) -> anyhow::Result<Settings> {
        let file = self.config()?;
        // A folder that cannot be written is no reason not to serve: the defaults hold.
        if write_default(&file).unwrap_or(false) {
            eprintln!(
                "traygate: wrote the settings file {}, which says what can be set",
                file.display()
            );
        }
        Ok(Settings::load(&file, overrides)?)
    }
}

/// The flags of the command that nobody gave, and a variable did.
fn from_variables(matches: &ArgMatches) -> Vec<Flag> {
    let Some((_, matches)) = matches.subcommand() else {
        return Vec::new();
    };
    let is_variable = |flag: &Flag| {
        let id = flag.name().replace('-', "_");
        matches.value_source(&id) == Some(ValueSource::EnvVariable)
    };
    Flag::ALL.into_iter().filter(is_variable).collect()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match run(&cli, &matches) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("traygate: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    match &cli.command {
        Command::Serve(args) => {
            let overrides = Overrides {
                from_variables: from_variables(matches),
                ..args.overrides()
            };
            serve::run(&cli.places, args, overrides)
        }
        Command::Check(listen) => {
            let config = cli.places.config()?;
            let data_dir = cli.places.data_dir()?;
            let overrides = listen.overrides();
            check::run(
                &config,
                &data_dir,
                &overrides,
                &mut std::io::stdout().lock(),
            )
        }
        Command::Key(command) => {
            let settings = cli.places.settings(&Overrides::default())?;
            let data_dir = cli.places.data_dir()?;
            key::run(command, &settings, &data_dir, &mut std::io::stdout().lock())
        }
        Command::Calls(args) => {
            calls::run(args, &cli.places.data_dir()?, &mut std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Spend(args) => {
            spend::run(args, &cli.places.data_dir()?, &mut std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Repeats(args) => {
            repeats::run(args, &cli.places.data_dir()?, &mut std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
