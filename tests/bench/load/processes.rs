//! Starts what is measured, reads what it costs, and ends it again.

use std::cell::Cell;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rusqlite::{Connection, OpenFlags};
use rustix::process::{Pid, Signal, kill_process};

use crate::calls::Workload;

/// `/proc` counts in hundredths of a second on every Linux, whatever the kernel's own tick.
const TICK: Duration = Duration::from_millis(10);
const START_LIMIT: Duration = Duration::from_secs(10);
const END_LIMIT: Duration = Duration::from_secs(12);

/// A way to the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Target {
    /// No proxy.
    Direct,
    /// nginx as a plain reverse proxy, keep-alive on both sides.
    Nginx,
    /// axum and reqwest with nothing between them.
    Forwarder,
    /// The release build, with everything on.
    Traygate,
}

impl Target {
    /// The word used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Forwarder => "forwarder",
            Self::Traygate => "traygate",
        }
    }
}

/// Where binaries and scratch files are.
pub struct Setup {
    /// The `traygate` to measure.
    pub traygate: PathBuf,
    /// Configurations, data folders and logs of what is started.
    pub scratch: PathBuf,
    /// `--concurrency` for Traygate, so that its pool is not what is measured.
    pub pool: usize,
}

/// A process of ours. Dropping it ends it.
pub struct Process {
    child: Child,
    name: &'static str,
}

/// A target that listens.
pub struct Served {
    /// What it is.
    pub target: Target,
    addresses: Addresses,
    process: Option<Process>,
    /// Traygate's data folder.
    data: Option<PathBuf>,
    /// Calls made through it.
    made: Cell<u64>,
}

/// How many calls Traygate was given, and how many it has on record.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recorded {
    /// Calls made through it.
    pub calls: u64,
    /// Finished calls in its database once it has ended.
    pub rows: u64,
}

/// Where a target listens; only nginx wants streams at a place of their own.
#[derive(Clone, Copy)]
struct Addresses {
    plain: SocketAddr,
    streams: SocketAddr,
}

impl Addresses {
    fn same(address: SocketAddr) -> Self {
        Self {
            plain: address,
            streams: address,
        }
    }
}

impl Served {
    /// Where calls of this kind go.
    pub fn address(&self, workload: Workload) -> SocketAddr {
        if workload.streams() {
            self.addresses.streams
        } else {
            self.addresses.plain
        }
    }

    /// CPU time of the proxy's processes so far; zero without a proxy.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        self.process
            .as_ref()
            .map_or(Ok(Duration::ZERO), Process::cpu)
    }

    /// Notes that `calls` more went through it.
    pub fn add_made(&self, calls: u64) {
        self.made.set(self.made.get() + calls);
    }

    /// Ends it and, if it keeps a record, counts what is in it.
    pub fn end(self) -> anyhow::Result<Option<Recorded>> {
        drop(self.process);
        let Some(data) = self.data else {
            return Ok(None);
        };
        let record = Connection::open_with_flags(
            data.join("traygate.db"),
            OpenFlags::SQLITE_OPEN_READ_ONLY,
        )?;
        let count = "SELECT count(*) FROM calls WHERE outcome = 'completed'";
        let rows: i64 = record.query_row(count, [], |row| row.get(0))?;
        Ok(Some(Recorded {
            calls: self.made.get(),
            rows: rows.cast_unsigned(),
        }))
    }

    /// The proxy's process, if it has one.
    pub fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }
}

impl Process {
    /// CPU time of the process and its children (nginx's workers), user and system.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        self.family()?.into_iter().map(cpu_of).sum()
    }

    /// Resident memory in bytes, children included.
    pub fn resident(&self) -> anyhow::Result<u64> {
        let mut total = 0;
        for pid in self.family()? {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
            total += kib.context("no VmRSS")?.parse::<u64>()? * 1024;
        }
        Ok(total)
    }

    fn family(&self) -> anyhow::Result<Vec<u32>> {
        let own = self.child.id();
        let mut family = vec![own];
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            // A process may end between the listing and the look.
            if stat_fields(pid).is_ok_and(|fields| fields[1] == own.to_string()) {
                family.push(pid);
            }
        }
        Ok(family)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let asked =
            Pid::from_raw(self.child.id().cast_signed()).map(|pid| kill_process(pid, Signal::TERM));
        let limit = Instant::now() + END_LIMIT;
        while matches!(asked, Some(Ok(()))) && Instant::now() < limit {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
                _ => return,
            }
        }
        eprintln!("bench: {} did not end when asked, killing it", self.name);
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("bench: {} cannot be ended: {error}", self.name);
        }
    }
}

/// CPU time of a process so far, user and system.
pub fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    let fields = stat_fields(pid)?;
    let ticks = fields[11].parse::<u32>()? + fields[12].parse::<u32>()?;
    Ok(TICK * ticks)
}

/// The fields of `/proc/PID/stat` from `state` on; the name before it may hold anything.
fn stat_fields(pid: u32) -> anyhow::Result<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat
        .rsplit_once(") ")
        .context("a stat line without a name")?;
    Ok(fields.split(' ').map(str::to_owned).collect())
}

/// Starts the bench's own provider.
pub fn start_provider(setup: &Setup) -> anyhow::Result<(Process, SocketAddr)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("provider");
    start_and_read_port("provider", &mut command, &setup.scratch)
}

/// Starts `target` in front of the provider at `provider`.
pub fn start(
    target: Target,
    provider: SocketAddr,
    workers: Option<usize>,
    setup: &Setup,
) -> anyhow::Result<Served> {
    let mut data = None;
    let (process, addresses) = match target {
        Target::Direct => (None, Addresses::same(provider)),
        Target::Nginx => {
            let (process, addresses) = start_nginx(provider, workers, &setup.scratch)?;
            (Some(process), addresses)
        }
        Target::Forwarder => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["forwarder", &format!("http://{provider}")]);
            if let Some(workers) = workers {
                command.args(["--worker-threads", &workers.to_string()]);
            }
            let (process, address) =
                start_and_read_port("forwarder", &mut command, &setup.scratch)?;
            (Some(process), Addresses::same(address))
        }
        Target::Traygate => {
            let folder = tempfile::tempdir_in(&setup.scratch)?.keep();
            let (process, address) = start_traygate(provider, workers, &folder, setup)?;
            data = Some(folder);
            (Some(process), Addresses::same(address))
        }
    };
    Ok(Served {
        target,
        addresses,
        process,
        data,
        made: Cell::new(0),
    })
}

fn start_traygate(
    provider: SocketAddr,
    workers: Option<usize>,
    data: &Path,
    setup: &Setup,
) -> anyhow::Result<(Process, SocketAddr)> {
    let config = data.join("config.toml");
    // A budget that never runs out: reserving and settling is part of the cost.
    let text = format!(
        "[[provider]]\nname = \"openai\"\nbase_url = \"http://{provider}/v1\"\nkey = \"pass\"\n\n\
         [[budget]]\nper = \"day\"\nusd = 1000000.00\n"
    );
    fs::write(&config, text)?;
    let mut command = Command::new(&setup.traygate);
    // The developer's own settings are not what is measured.
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("TRAYGATE_"))
        {
            command.env_remove(name);
        }
    }
    command.args([
        "serve",
        "--port",
        "0",
        "--concurrency",
        &setup.pool.to_string(),
    ]);
    command
        .arg("--config")
        .arg(&config)
        .arg("--data-dir")
        .arg(data);
    if let Some(workers) = workers {
        command.args(["--worker-threads", &workers.to_string()]);
    }
    start_and_read_port("traygate", &mut command, &setup.scratch)
}

fn start_nginx(
    provider: SocketAddr,
    workers: Option<usize>,
    scratch: &Path,
) -> anyhow::Result<(Process, Addresses)> {
    let prefix = tempfile::tempdir_in(scratch)?.keep();
    let addresses = Addresses {
        plain: free_address()?,
        streams: free_address()?,
    };
    let workers = workers.map_or_else(|| "auto".to_owned(), |workers| workers.to_string());
    let temp_paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("  {kind}_temp_path {kind}_temp;\n"))
        .concat();
    let server = |address: SocketAddr, more: &str| {
        format!(
            "  server {{\n    listen {address} backlog=4096;\n    location / {{\n      \
             proxy_pass http://provider;\n      proxy_http_version 1.1;\n      \
             proxy_set_header Connection \"\";\n{more}    }}\n  }}\n"
        )
    };
    let plain = server(addresses.plain, "");
    // Buffering would hold events back; whoever proxies streams turns it off.
    let streams = server(addresses.streams, "      proxy_buffering off;\n");
    let config = format!(
        "daemon off;\nworker_processes {workers};\npid nginx.pid;\n\
         events {{ worker_connections 8192; }}\n\
         http {{\n{temp_paths}  access_log off;\n  keepalive_requests 1000000000;\n  \
         upstream provider {{\n    server {provider};\n    keepalive 512;\n    \
         keepalive_requests 1000000000;\n  }}\n{plain}{streams}}}\n"
    );
    fs::write(prefix.join("nginx.conf"), config)?;
    let mut command = Command::new("nginx");
    command
        .arg("-p")
        .arg(&prefix)
        .args(["-c", "nginx.conf", "-e", "error.log"]);
    let process = spawn("nginx", &mut command, &scratch.join("nginx.log"))?;
    let limit = Instant::now() + START_LIMIT;
    while std::net::TcpStream::connect(addresses.streams).is_err() {
        if Instant::now() > limit {
            bail!("nginx does not listen, see {}", prefix.display());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((process, addresses))
}

/// Whether nginx can be started at all.
pub fn nginx_version() -> Option<String> {
    let output = Command::new("nginx").arg("-v").output().ok()?;
    let text = String::from_utf8(output.stderr).ok()?;
    Some(text.trim().trim_start_matches("nginx version: ").to_owned())
}

fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn spawn(name: &'static str, command: &mut Command, log: &Path) -> anyhow::Result<Process> {
    use std::os::unix::process::CommandExt;
    let log = File::create(log)?;
    // A group of its own: Ctrl-C reaches the bench, which ends its children in order.
    let child = command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {name} ({})", command.get_program().display()))?;
    Ok(Process { child, name })
}

/// Starts a process that says `listening on http://ADDRESS` on its output.
fn start_and_read_port(
    name: &'static str,
    command: &mut Command,
    scratch: &Path,
) -> anyhow::Result<(Process, SocketAddr)> {
    let log = scratch.join(format!("{name}.log"));
    let mut process = spawn(name, command, &log)?;
    let limit = Instant::now() + START_LIMIT;
    loop {
        let said = fs::read_to_string(&log)?;
        // Only whole lines: the last one may still be on its way.
        for line in said
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
        {
            let Some((_, rest)) = line.split_once("listening on http://") else {
                continue;
            };
            let address = rest.split([' ', '/', ',', '\n']).next().unwrap_or_default();
            if let Ok(address) = address.parse() {
                return Ok((process, address));
            }
        }
        if let Some(status) = process.child.try_wait()? {
            bail!(
                "{name} ended at its start ({status}), see {}",
                log.display()
            );
        }
        if Instant::now() > limit {
            bail!(
                "{name} does not say where it listens, see {}",
                log.display()
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
