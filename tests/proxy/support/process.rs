//! The real program in a process of its own, with a scratch home.
//!
//! ```ignore
//! let home = Home::new();
//! home.settings("[server]\ndrain_secs = 1");
//! let traygate = home.serve(&[]).await;
//! let answer = post_json(traygate.addr(), "/v1/chat/completions", DEMO).await;
//! traygate.signal(Signal::TERM);
//! assert_eq!(traygate.ended().await.code, Some(0));
//! assert!(home.run(&["calls"]).await.stdout.contains("demo"));
//! ```

use std::io::{Read, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};
use tempfile::TempDir;
use tokio::sync::watch;

use super::app::rows_in;
use super::{LIMIT, must, now};
use traygate::store::queries::CallRow;

/// How often it is looked whether a process has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A scratch home: settings, data and environment of the processes that are started in it. Of the
/// tests' own environment they see the `PATH`.
pub struct Home {
    folder: TempDir,
    environment: Vec<(String, String)>,
}

impl Home {
    pub fn new() -> Home {
        Home {
            folder: tempfile::tempdir().expect("a scratch folder"),
            environment: Vec::new(),
        }
    }

    /// Sets a variable for all that is started from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.environment.retain(|(given, _)| given != name);
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn config(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    pub fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Writes the settings file.
    pub fn settings(&self, text: &str) {
        std::fs::write(self.config(), text).expect("a scratch file");
    }

    /// The rows on record, newest first.
    pub fn rows(&self) -> Vec<CallRow> {
        rows_in(&self.data_dir())
    }

    /// The rows once `count` of them have ended.
    pub async fn ended_rows(&self, count: usize) -> Vec<CallRow> {
        must("rows that have ended", async {
            loop {
                let rows = self.rows();
                if rows.iter().filter(|row| row.outcome.is_some()).count() >= count {
                    return rows;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        })
        .await
    }

    /// Runs a command of it to its end, with nothing on its input.
    pub async fn run(&self, arguments: &[&str]) -> Ended {
        self.run_with(arguments, "").await
    }

    /// Runs a command of it to its end, with this on its input.
    pub async fn run_with(&self, arguments: &[&str], input: &str) -> Ended {
        let mut process = self.start(self.traygate(arguments));
        let mut stdin = process.stdin.take().expect("a piped input");
        // Refused before it was read: what the process says then is what counts.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        process.ended().await
    }

    /// `traygate serve` on a free port, once it says that it listens.
    pub async fn serve(&self, arguments: &[&str]) -> Process {
        let mut process = self.start_serving(arguments);
        process.listens().await;
        process
    }

    /// `traygate serve` on a free port, or on the one among `arguments`.
    pub fn start_serving(&self, arguments: &[&str]) -> Process {
        let mut all = vec!["serve"];
        if !arguments.contains(&"--port") && !self.sets("TRAYGATE_PORT") {
            all.extend(["--port", "0"]);
        }
        all.extend(arguments);
        self.start(self.traygate(&all))
    }

    fn sets(&self, name: &str) -> bool {
        self.environment.iter().any(|(given, _)| given == name)
    }

    /// Starts a command of it and leaves it running.
    pub fn start_traygate(&self, arguments: &[&str]) -> Process {
        self.start(self.traygate(arguments))
    }

    /// Any program, in this home.
    pub fn start_program(&self, program: &str, arguments: &[&str]) -> Process {
        let mut command = Command::new(program);
        command.args(arguments);
        self.start(command)
    }

    fn traygate(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_traygate"));
        command
            .args(arguments)
            .env("TRAYGATE_CONFIG", self.config())
            .env("TRAYGATE_DATA_DIR", self.data_dir());
        command
    }

    fn start(&self, mut command: Command) -> Process {
        let own: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
            .collect();
        command.env_clear().envs(own);
        if let Some(path) = std::env::var_os("PATH") {
            command.env("PATH", path);
        }
        command
            .env("HOME", self.folder())
            .env("XDG_RUNTIME_DIR", self.folder())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Process::start(command)
    }
}

/// A process that has ended, and all it said.
#[derive(Debug)]
pub struct Ended {
    /// `None`: a signal ended it.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub at: Instant,
}

impl Ended {
    /// All it said.
    pub fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

/// A process under way. Dropping it kills it.
pub struct Process {
    child: Child,
    pub stdin: Option<ChildStdin>,
    stdout: Said,
    stderr: Said,
    addr: Option<SocketAddr>,
    pub started: Instant,
}

impl Process {
    fn start(mut command: Command) -> Process {
        let started = now();
        let mut child = command.spawn().expect("the program starts");
        Process {
            stdin: child.stdin.take(),
            stdout: Said::read(child.stdout.take().expect("a piped output")),
            stderr: Said::read(child.stderr.take().expect("a piped output")),
            child,
            addr: None,
            started,
        }
    }

    /// Waits until it says where it listens.
    ///
    /// # Panics
    /// If it ends before.
    pub async fn listens(&mut self) -> SocketAddr {
        const BEFORE: &str = "listening on http://";
        let line = must("it to listen", self.stdout.line_with(BEFORE)).await;
        let Some(line) = line else {
            panic!("it ended before it listened: {}", self.stderr.so_far());
        };
        let (_, addr) = line.split_once(BEFORE).expect("just found");
        let addr = addr.trim().parse().expect("an address");
        self.addr = Some(addr);
        addr
    }

    /// Waits until it says that it listens (true) or ends (false).
    pub async fn said_it_listens(&self) -> bool {
        let line = self.stdout.line_with("listening on http://");
        must("it to listen or end", line).await.is_some()
    }

    /// Where it listens, once it has said so.
    pub fn addr(&self) -> SocketAddr {
        self.addr.expect("it has been waited for")
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has said on its standard output so far.
    pub fn stdout(&self) -> String {
        self.stdout.so_far()
    }

    /// What it has said on its standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.so_far()
    }

    /// Waits until a line on its standard output holds `text`.
    ///
    /// # Panics
    /// If it ends before.
    pub async fn says(&self, text: &str) -> String {
        let line = must(text, self.stdout.line_with(text)).await;
        line.unwrap_or_else(|| panic!("no {text:?} in {:?}", self.stdout()))
    }

    /// Waits until a line on its standard error holds `text`.
    ///
    /// # Panics
    /// If it ends before.
    pub async fn complains(&self, text: &str) -> String {
        let line = must(text, self.stderr.line_with(text)).await;
        line.unwrap_or_else(|| panic!("no {text:?} in {:?}", self.stderr()))
    }

    /// Nobody reads its standard output any more.
    pub fn close_stdout(&mut self) {
        self.stdout.stop();
    }

    /// Whether it has not ended yet.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("a process of ours").is_none()
    }

    pub fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.id()).expect("a process id");
        let id = Pid::from_raw(id).expect("a process id");
        kill_process(id, signal).expect("a process of ours");
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it does not come.
    pub async fn ended(mut self) -> Ended {
        let deadline = now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a process of ours") {
                break status;
            }
            assert!(
                now() < deadline,
                "it does not end: {}{}",
                self.stdout(),
                self.stderr()
            );
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let at = now();
        Ended {
            code: status.code(),
            signal: status.signal(),
            stdout: must("the end of its output", self.stdout.whole()).await,
            stderr: must("the end of its output", self.stderr.whole()).await,
            at,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ended already, or ends now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What comes out of a pipe, read by a thread so that the process never waits for us.
struct Said {
    text: watch::Receiver<(String, bool)>,
    stop: watch::Sender<bool>,
}

impl Said {
    fn read(mut pipe: impl Read + Send + 'static) -> Said {
        let (said, text) = watch::channel((String::new(), false));
        let (stop, stopped) = watch::channel(false);
        std::thread::spawn(move || {
            let mut unread = Vec::new();
            let mut piece = [0; 16 << 10];
            loop {
                let read = pipe.read(&mut piece).unwrap_or(0);
                if read == 0 || *stopped.borrow() {
                    break;
                }
                unread.extend_from_slice(&piece[..read]);
                // A piece may end within a character.
                let whole = match std::str::from_utf8(&unread) {
                    Ok(text) => text.len(),
                    Err(error) if error.error_len().is_none() => error.valid_up_to(),
                    Err(_) => unread.len(),
                };
                let text = String::from_utf8_lossy(&unread[..whole]).into_owned();
                unread.drain(..whole);
                said.send_modify(|(said, _)| said.push_str(&text));
            }
            said.send_modify(|(_, over)| *over = true);
        });
        Said { text, stop }
    }

    fn so_far(&self) -> String {
        self.text.borrow().0.clone()
    }

    /// The first whole line that holds `text`; `None` if the pipe closes without one.
    async fn line_with(&self, text: &str) -> Option<String> {
        let find = |said: &str| {
            let whole = &said[..said.rfind('\n').map_or(0, |at| at + 1)];
            let line = whole.lines().find(|line| line.contains(text));
            line.map(str::to_owned)
        };
        let mut said = self.text.clone();
        let said = said.wait_for(|(said, over)| *over || find(said).is_some());
        find(&said.await.ok()?.0)
    }

    async fn whole(&self) -> String {
        let mut said = self.text.clone();
        match said.wait_for(|(_, over)| *over).await {
            Ok(said) => said.0.clone(),
            Err(_) => self.so_far(),
        }
    }

    /// The pipe is closed with the next piece that comes.
    fn stop(&self) {
        self.stop.send_replace(true);
    }
}
