//! The log under trouble: whatever becomes of its file, its disk or the clock, calls are served as
//! ever, and what could not be written is written when it can be.
//!
//! `record.rs` has the simpler cases: a short lock, a record damaged before the start, a newer
//! one. Here are those that need another process, another disk or another clock.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::{BufRead as _, BufReader, Lines, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rusqlite::{Connection, ffi};
use serde_json::Value;
use tempfile::TempDir;
use traygate::clock::Clock;
use traygate::runtime::{self, RUNTIME_FILE};
use traygate::store::pages::CallsQuery;
use traygate::store::queries::{CallFilter, CallRow, ReadError, Reader};
use traygate::store::{DATABASE_FILE, StoreHealth};

use crate::support::app::{App, rows_in};
use crate::support::client::{BodyEnd, Outgoing, get};
use crate::support::upstream::{Gate, Reply, Upstream};
use crate::support::{Span as _, eventually, must, now};

/// What a call may take here, machine busy or not: far less than any trouble lasts, so that one
/// that waited for its end would show.
const AT_ONCE: Duration = Duration::from_millis(1500);

fn health(app: &App) -> StoreHealth {
    app.running().core().store.health()
}

/// Makes a call, which must be served well and soon.
#[track_caller]
fn served(app: &App, model: &str) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    let body = format!(r#"{{"model":"{model}","messages":[]}}"#);
    async move {
        let before = now();
        let answer = app.chat(&body).await;
        let took = now() - before;
        assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean), "{at}");
        assert!(took < AT_ONCE, "{took:?} at {at}");
    }
}

/// The health once it is as `wanted`.
async fn health_that(app: &App, what: &str, wanted: impl Fn(&StoreHealth) -> bool) -> StoreHealth {
    must(what, async {
        loop {
            let health = health(app);
            if wanted(&health) {
                return health;
            }
            tokio::time::sleep(5.ms()).await;
        }
    })
    .await
}

/// The trouble once it is told, in words that hold `words`.
async fn in_trouble(app: &App, words: &str) -> StoreHealth {
    health_that(app, words, |health| {
        let told = health.last_error.as_deref();
        told.is_some_and(|told| told.contains(words))
    })
    .await
}

/// What the admin API answers.
async fn api(app: &App, method: &str, path: &str) -> (u16, Value) {
    let token = app.running().core().token.expose().to_owned();
    let request = Outgoing::new(method, &format!("/traygate/api/{path}"))
        .header("authorization", &format!("Bearer {token}"));
    let answer = app.ask(request).await;
    (answer.status(), answer.json())
}

/// Nothing waits, and nothing was lost on the way.
async fn written(app: &App) {
    let health = health_that(app, "the rows to be written", |health| {
        health.last_error.is_none() && health.pending_rows == 0
    })
    .await;
    assert_eq!((health.recording, health.dropped_rows), (true, 0));
}

/// A record with two calls in it, as an earlier run left it, in `folder`.
async fn with_a_past(up: &Upstream, folder: TempDir) -> TempDir {
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "past-1").await;
    served(&app, "past-2").await;
    app.rows(2).await;
    app.stop().await
}

fn models(rows: &[CallRow]) -> HashSet<&str> {
    rows.iter().filter_map(|row| row.model.as_deref()).collect()
}

fn named(folder: &Path, part: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let paths = entries.map(|entry| entry.path());
    let mut named: Vec<_> = paths
        .filter(|path| path.display().to_string().contains(part))
        .collect();
    named.sort();
    named
}

// --- Another program has it locked -------------------------------------------------------------

/// Another program that holds the record's write lock until it is dropped.
struct Locked {
    program: Child,
    /// Kept, since a program that cannot say that it ended well fails.
    _said: Lines<BufReader<ChildStdout>>,
}

impl Locked {
    fn by_another_program(database: &Path) -> Locked {
        let mut program = Command::new(std::env::current_exe().expect("this test"))
            .args(["--ignored", "--exact", "--nocapture"])
            .arg("log_trouble::a_program_that_locks")
            .env("TRAYGATE_TEST_DATABASE", database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("another program");
        let said = BufReader::new(program.stdout.take().expect("a pipe"));
        let mut said = said.lines();
        let locked = said.any(|line| line.is_ok_and(|line| line.contains("locked now")));
        let lock = Locked {
            program,
            _said: said,
        };
        assert!(locked, "it ended without a lock");
        lock
    }

    fn ends(mut self) {
        drop(self.program.stdin.take());
        assert!(self.program.wait().expect("its end").success());
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Ended already, or ends now.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// What the other program does; not a test.
#[test]
#[ignore = "run as another program by the tests of locks"]
fn a_program_that_locks() {
    let Some(database) = std::env::var_os("TRAYGATE_TEST_DATABASE") else {
        return;
    };
    let connection = Connection::open(database).expect("the record");
    connection.busy_timeout(10.secs()).expect("an option");
    connection
        .execute_batch("BEGIN IMMEDIATE; DELETE FROM calls;")
        .expect("a lock");
    println!("\nlocked now");
    // Until the other side closes it.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).expect("a pipe");
    connection.execute_batch("ROLLBACK").expect("its end");
}

async fn locked_for(span: Duration) {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    served(&app, "before").await;
    app.rows(1).await;
    let lock = Locked::by_another_program(&app.data_dir().join(DATABASE_FILE));
    let begin = now();
    let mut calls = 1;
    while now() - begin < span {
        served(&app, &format!("m{calls}")).await;
        calls += 1;
        assert_eq!(app.rows_now().len(), 1, "readers go on, and see what was");
        tokio::time::sleep(20.ms()).await;
    }
    let told = in_trouble(&app, "locked").await;
    assert!(told.recording, "the file is open: {told:?}");
    assert!(told.pending_rows >= calls - 1, "{told:?}");
    lock.ends();
    assert_eq!(app.rows(calls).await.len(), calls);
    written(&app).await;
}

// D58
#[tokio::test]
async fn another_program_locks_it_for_seconds() {
    locked_for(3.secs()).await;
}

#[tokio::test]
#[ignore = "takes half a minute"]
async fn another_program_locks_it_for_half_a_minute() {
    locked_for(30.secs()).await;
}

#[tokio::test]
async fn calls_that_wait_are_counted_once_and_found_by_their_id() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let lock = Locked::by_another_program(&app.data_dir().join(DATABASE_FILE));
    let mut last = String::new();
    for n in 0..30 {
        let answer = app
            .chat(&format!(r#"{{"model":"m{n}","messages":[]}}"#))
            .await;
        let id = answer.header("x-traygate-call").expect("its id");
        id.clone_into(&mut last);
        // Handed over by the time it is counted: its row comes after its last byte.
        health_that(&app, "the call to wait", |health| health.pending_rows > n).await;
        assert_eq!(health(&app).pending_rows, n + 1);
    }
    in_trouble(&app, "locked").await;
    // Again and again: the writer holds them for some of the time.
    for _ in 0..50 {
        let (status, row) = api(&app, "GET", &format!("calls/{last}")).await;
        assert_eq!(status, 200, "{row}");
        assert_eq!(
            (&row["model"], &row["outcome"]),
            (&"m29".into(), &"completed".into())
        );
        assert_eq!(health(&app).pending_rows, 30);
        tokio::time::sleep(10.ms()).await;
    }
    let (status, refusal) = api(&app, "DELETE", &format!("calls/{last}")).await;
    assert_eq!(status, 409, "it has ended: {refusal}");
    lock.ends();
    written(&app).await;
    let (status, row) = api(&app, "GET", &format!("calls/{last}")).await;
    assert_eq!((status, &row["outcome"]), (200, &"completed".into()));
    assert_eq!(app.rows_now().len(), 30);
}

// --- Disks of our own --------------------------------------------------------------------------

/// A small file system in memory, or a file that is mounted over itself. Goes with it.
struct Disk {
    at: PathBuf,
    _folder: Option<TempDir>,
}

impl Disk {
    /// `None` where this user may not mount: then it says so.
    fn small(size: &str) -> Option<Disk> {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let at = folder.path().to_owned();
        let options = format!("size={size},mode=700");
        mount(&["-t", "tmpfs", "-o", &options, "tmpfs"], &at).then(|| Disk {
            at,
            _folder: Some(folder),
        })
    }

    /// `file`, read-only although its folder is not.
    fn read_only_file(file: &Path) -> Option<Disk> {
        let itself = file.to_str().expect("a path of text");
        let disk = mount(&["--bind", itself], file).then(|| Disk {
            at: file.to_owned(),
            _folder: None,
        })?;
        assert!(mount(&["-o", "remount,bind,ro"], file));
        Some(disk)
    }

    fn folder(&self) -> TempDir {
        tempfile::tempdir_in(&self.at).expect("a scratch folder")
    }

    fn remount(&self, mode: &str) {
        assert!(mount(&["-o", &format!("remount,{mode}")], &self.at));
    }

    /// Leaves not a byte; returns what takes the room.
    fn fill(&self) -> PathBuf {
        let filler = self.at.join("filler");
        let mut file = fs::File::create(&filler).expect("a file");
        while file.write_all(&[0; 4096]).is_ok() {}
        while file.write_all(&[0]).is_ok() {}
        filler
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a test that fails may still have files open on it.
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

fn mount(arguments: &[&str], at: &Path) -> bool {
    let output = Command::new("mount").args(arguments).arg(at).output();
    let why = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    // Past the test harness, which hides what a test that passes prints.
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: this test needs a disk of its own, and cannot mount one: {why}"
    );
    false
}

// D60
#[tokio::test]
async fn a_read_only_disk_is_written_once_it_can_be() {
    let Some(disk) = Disk::small("4m") else {
        return;
    };
    let up = Upstream::chatting().await;
    let folder = with_a_past(&up, disk.folder()).await;
    disk.remount("ro");
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "a").await;
    let told = in_trouble(&app, "cannot be written").await;
    assert!(!told.recording);
    served(&app, "b").await;
    health_that(&app, "two rows in memory", |health| {
        health.pending_rows >= 2
    })
    .await;
    assert_eq!(app.rows_now().len(), 2, "what was there can be read");
    disk.remount("rw");
    let rows = app.rows(4).await;
    assert_eq!(models(&rows), HashSet::from(["past-1", "past-2", "a", "b"]));
    written(&app).await;
    drop(app.stop().await);
}

#[tokio::test]
async fn a_read_only_file_is_written_once_it_can_be() {
    let up = Upstream::chatting().await;
    let folder = with_a_past(&up, tempfile::tempdir().expect("a scratch folder")).await;
    let Some(file) = Disk::read_only_file(&folder.path().join(DATABASE_FILE)) else {
        return;
    };
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "a").await;
    let told = in_trouble(&app, "readonly").await;
    assert_eq!(told.notice, None, "it is not damaged");
    served(&app, "b").await;
    drop(file);
    let rows = app.rows(4).await;
    assert_eq!(models(&rows), HashSet::from(["past-1", "past-2", "a", "b"]));
    written(&app).await;
    assert!(named(app.data_dir(), "damaged").is_empty());
}

#[tokio::test]
async fn a_disk_that_fills_up_costs_no_call_and_no_row() {
    let Some(disk) = Disk::small("4m") else {
        return;
    };
    let up = Upstream::chatting().await;
    let app = App::start_in(disk.folder(), &App::settings(up.addr(), "")).await;
    served(&app, "before").await;
    app.rows(1).await;
    let filler = disk.fill();
    let mut calls = 1;
    // Pages that the files have already can still be filled.
    must("the disk to be full", async {
        while health(&app).last_error.is_none() {
            served(&app, &format!("m{calls}")).await;
            calls += 1;
        }
    })
    .await;
    in_trouble(&app, "full").await;
    for _ in 0..20 {
        served(&app, &format!("m{calls}")).await;
        calls += 1;
    }
    let told = in_trouble(&app, "full").await;
    assert_eq!((told.notice, told.dropped_rows), (None, 0));
    fs::remove_file(filler).expect("room again");
    assert_eq!(app.rows(calls).await.len(), calls);
    written(&app).await;
    let folder = app.stop().await;
    assert!(is_sound(&folder.path().join(DATABASE_FILE)));
}

#[tokio::test]
async fn a_disk_that_is_full_from_the_start_costs_no_call_and_no_row() {
    let Some(disk) = Disk::small("4m") else {
        return;
    };
    let up = Upstream::chatting().await;
    let folder = disk.folder();
    let filler = disk.fill();
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "a").await;
    let told = health_that(&app, "the trouble", |health| health.last_error.is_some()).await;
    assert!(!told.recording, "{told:?}");
    assert_eq!(told.notice, None, "{told:?}");
    fs::remove_file(filler).expect("room again");
    assert_eq!(app.rows(1).await.len(), 1);
    written(&app).await;
    drop(app.stop().await);
}

fn is_sound(database: &Path) -> bool {
    let verdict: String = Connection::open(database)
        .and_then(|database| database.pragma_query_value(None, "integrity_check", |row| row.get(0)))
        .expect("a verdict");
    verdict == "ok"
}

// --- The runtime file --------------------------------------------------------------------------

/// Whether the command line would find `app`.
fn is_found(app: &App) -> bool {
    runtime::find(app.data_dir()).is_some_and(|found| found.port == app.addr().port())
}

#[tokio::test]
async fn the_runtime_file_is_written_once_the_folder_can_be() {
    let Some(disk) = Disk::small("4m") else {
        return;
    };
    let up = Upstream::chatting().await;
    let folder = disk.folder();
    // Of a run that was killed.
    let stale = r#"{"port":1,"pid":1,"token":"stale"}"#;
    fs::write(folder.path().join(RUNTIME_FILE), stale).expect("a file");
    disk.remount("ro");
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    assert!(!is_found(&app));
    disk.remount("rw");
    eventually("the runtime file", async || is_found(&app)).await;
    let folder = app.stop().await;
    assert!(runtime::find(folder.path()).is_none(), "gone with its run");
}

#[cfg(unix)]
#[tokio::test]
async fn the_runtime_file_comes_back_with_its_folder() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    served(&app, "before").await;
    app.rows(1).await;
    assert!(is_found(&app));
    fs::remove_dir_all(app.data_dir()).expect("the folder gone");
    served(&app, "after").await;
    let told = health_that(&app, "the notice", |health| health.notice.is_some()).await;
    let notice = told.notice.expect("just seen");
    assert!(notice.contains("deleted or replaced"), "{notice}");
    eventually("the runtime file", async || is_found(&app)).await;
    assert_eq!(models(&app.rows_now()), HashSet::from(["after"]));
    let folder = app.stop().await;
    assert!(runtime::find(folder.path()).is_none(), "gone with its run");
}

// --- Damage in mid-run -------------------------------------------------------------------------

#[tokio::test]
async fn damage_in_mid_run_costs_no_call_and_a_fresh_record_goes_on() {
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 2] = [
        ("pages overwritten", |database| {
            let mut file = OpenOptions::new()
                .write(true)
                .open(database)
                .expect("the record");
            let length = file.metadata().expect("a file").len();
            file.seek(SeekFrom::Start(4096)).expect("a place");
            let rest = usize::try_from(length - 4096).expect("a small file");
            file.write_all(&vec![0xA5; rest]).expect("damage");
        }),
        ("cut off", |database| {
            let file = OpenOptions::new()
                .write(true)
                .open(database)
                .expect("the record");
            file.set_len(4096 + 512).expect("damage");
        }),
    ];
    for (what, damage) in damages {
        let up = Upstream::chatting().await;
        let app = App::before(&up).await;
        for n in 0..40 {
            served(&app, &format!("before-{n}")).await;
        }
        app.rows(40).await;
        let database = app.data_dir().join(DATABASE_FILE);
        // What is in the write-ahead log would hide the damage.
        Connection::open(&database)
            .and_then(|other| other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())))
            .expect("a checkpoint");
        damage(&database);
        let mut calls = 0;
        // The writer's cache may carry it on for a while.
        must("the damage to be noticed", async {
            while health(&app).notice.is_none() {
                served(&app, &format!("after-{calls}")).await;
                calls += 1;
                tokio::time::sleep(20.ms()).await;
            }
        })
        .await;
        served(&app, "last").await;
        written(&app).await;
        let rows = app.rows_now();
        assert!(models(&rows).contains("last"), "{what}: {rows:#?}");
        let notice = health(&app).notice.expect("just seen");
        let aside = named(app.data_dir(), "traygate.damaged-");
        let aside = aside
            .iter()
            .find(|path| path.extension().is_some_and(|end| end == "db"));
        let aside = aside.unwrap_or_else(|| panic!("{what}: not set aside"));
        assert!(
            notice.contains(&aside.display().to_string()),
            "{what}: {notice}"
        );
        let folder = app.stop().await;
        assert!(is_sound(&folder.path().join(DATABASE_FILE)), "{what}");
    }
}

/// A record of so many calls that most of its pages are read by nobody for long.
async fn with_a_long_past(up: &Upstream) -> TempDir {
    let folder = with_a_past(up, tempfile::tempdir().expect("a scratch folder")).await;
    Connection::open(folder.path().join(DATABASE_FILE))
        .and_then(|record| {
            record.execute_batch(
                "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)
                 INSERT INTO calls (id, started_us, provider, route, model, tool, billing,
                   streaming, dedup, outcome, status, upstream_call, queued_us, duration_us)
                 SELECT printf('01M3250XXR%016d', n), 1790000003000000, 'openai',
                   'chat/completions', 'old', 'aider', 'metered', 0, 'miss', 'completed', 200, 1,
                   15, 1500000 FROM n;
                 PRAGMA wal_checkpoint(TRUNCATE);",
            )
        })
        .expect("a long past");
    folder
}

/// What makes no sense to anybody.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let noise = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    noise.flatten().take(bytes).collect()
}

const PAGE: u64 = 4096;

/// Writes noise over pages of a file, whatever program has it open.
fn overwrite(file: &Path, from_page: u64, pages: u64) {
    let mut open = OpenOptions::new()
        .write(true)
        .open(file)
        .expect("the record");
    open.seek(SeekFrom::Start(from_page * PAGE))
        .expect("a place");
    let bytes = usize::try_from(pages * PAGE).expect("a small file");
    open.write_all(&noise(bytes)).expect("damage");
}

fn pages(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |file| file.len().div_ceil(PAGE))
}

type Damage = (&'static str, fn(&Path));

const DAMAGES: [Damage; 4] = [
    ("all of it and its log", |database| {
        overwrite(database, 0, pages(database));
        let log = database.with_extension("db-wal");
        if log.exists() {
            overwrite(&log, 0, pages(&log));
        }
    }),
    ("all but the first page", |database| {
        overwrite(database, 1, pages(database) - 1);
    }),
    ("pages in the middle", |database| {
        overwrite(database, pages(database) / 2, 20);
    }),
    ("a page of an index", |database| {
        let root: u64 = Connection::open(database)
            .and_then(|record| {
                let sql =
                    "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_calls_1'";
                record.query_row(sql, [], |row| row.get::<_, i64>(0))
            })
            .map(|root| u64::try_from(root).expect("a page"))
            .expect("the index of ids");
        overwrite(database, root - 1, 1);
    }),
];

/// The record was set aside, a fresh one takes calls and can be read, and a person is told.
async fn begun_afresh(app: &App, what: &str) {
    let told = health_that(app, what, |health| health.notice.is_some()).await;
    let notice = told.notice.expect("just seen");
    let aside = named(app.data_dir(), "traygate.damaged-");
    assert!(
        aside
            .iter()
            .any(|path| notice.contains(&path.display().to_string())),
        "{what}: {notice}: {aside:?}"
    );
    served(app, "last").await;
    written(app).await;
    assert_eq!(app.ask(get("/traygate/health")).await.status(), 200);
    let (status, page) = api(app, "GET", "calls?model=last").await;
    assert_eq!(status, 200, "{what}: {page}");
    assert_eq!(page["calls"].as_array().map(Vec::len), Some(1), "{what}");
    let (status, series) = api(app, "GET", "series").await;
    assert_eq!(status, 200, "{what}: {series}");
    let (_, state) = api(app, "GET", "state").await;
    let warnings = state["warnings"].to_string();
    assert!(warnings.contains("set aside"), "{what}: {warnings}");
}

#[tokio::test]
async fn damage_that_only_a_reader_meets_is_noticed() {
    for (what, damage) in DAMAGES {
        let up = Upstream::chatting().await;
        let folder = with_a_long_past(&up).await;
        let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
        let (status, page) = api(&app, "GET", "calls?model=nobody").await;
        assert_eq!(status, 200, "{what}: {page}");
        damage(&app.data_dir().join(DATABASE_FILE));
        // No call is made: the writer has nothing to stumble over.
        let (status, refusal) = api(&app, "GET", "calls?model=nobody").await;
        assert_eq!(status, 503, "{what}: {refusal}");
        begun_afresh(&app, what).await;
        let folder = app.stop().await;
        assert!(is_sound(&folder.path().join(DATABASE_FILE)), "{what}");
    }
}

#[tokio::test]
async fn damage_between_two_runs_is_noticed_though_nobody_reads() {
    for (what, damage) in DAMAGES {
        let up = Upstream::chatting().await;
        let folder = with_a_long_past(&up).await;
        damage(&folder.path().join(DATABASE_FILE));
        let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
        begun_afresh(&app, what).await;
        drop(app.stop().await);
    }
}

#[tokio::test]
async fn a_readers_passing_error_is_looked_into_and_loses_nothing() {
    let up = Upstream::chatting().await;
    let folder = with_a_long_past(&up).await;
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    let store = &app.running().core().store;
    let stumble = || {
        let malformed = ffi::Error::new(ffi::SQLITE_CORRUPT);
        let malformed = rusqlite::Error::SqliteFailure(malformed, None);
        let read = store.read(|_| Err::<(), _>(ReadError::Sqlite(malformed)));
        read.expect_err("as it was told");
    };
    stumble();
    health_that(&app, "the verdict", |health| health.last_error.is_none()).await;
    assert_eq!(app.ask(get("/traygate/health")).await.status(), 200);
    // Not again at once: until it has been looked into, it is in doubt.
    stumble();
    served(&app, "new").await;
    let answer = app.ask(get("/traygate/health")).await;
    assert_eq!(answer.status(), 503);
    assert!(
        answer.text().contains("may be damaged"),
        "{}",
        answer.text()
    );
    let told = health(&app);
    assert_eq!((told.recording, told.notice), (true, None));
    let folder = app.stop().await;
    assert!(named(folder.path(), "damaged").is_empty());
    let kept: i64 = Connection::open(folder.path().join(DATABASE_FILE))
        .and_then(|record| record.query_row("SELECT count(*) FROM calls", [], |row| row.get(0)))
        .expect("a count");
    assert_eq!(kept, 20_003, "all calls of before, and one");
}

// --- Other versions ----------------------------------------------------------------------------

/// A record as the first version left it after a kill: two calls, one of them open.
fn of_the_first_version(folder: &Path) -> PathBuf {
    let path = folder.join(DATABASE_FILE);
    let database = Connection::open(&path).expect("a database");
    database
        .execute_batch("PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;")
        .expect("its options");
    database
        .execute_batch(include_str!("../../src-tauri/migrations/0001_calls.sql"))
        .expect("its schema");
    database
        .execute_batch(
            "PRAGMA application_id = 1414682951;
             PRAGMA user_version = 1;
             INSERT INTO calls (id, started_us, provider, route, model, tool, billing, streaming,
               dedup, outcome, status, upstream_call, queued_us, duration_us)
             VALUES ('01M3250XXR0000000000000001', 1790000003000000, 'openai', 'chat/completions',
               'old-ended', 'aider', 'metered', 0, 'miss', 'completed', 200, 1, 15, 1500000);
             INSERT INTO calls (id, started_us, provider, route, model, tool, billing, streaming,
               dedup)
             VALUES ('01M3250XXR0000000000000002', 1790000003000000, 'openai', 'chat/completions',
               'old-open', 'aider', 'metered', 0, 'miss');",
        )
        .expect("its rows");
    path
}

fn version(database: &Path) -> i64 {
    Connection::open(database)
        .and_then(|database| database.pragma_query_value(None, "user_version", |row| row.get(0)))
        .expect("a version")
}

#[tokio::test]
async fn an_older_record_is_copied_and_goes_on() {
    let up = Upstream::chatting().await;
    let folder = tempfile::tempdir().expect("a scratch folder");
    let database = of_the_first_version(folder.path());
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "new").await;
    let rows = app.rows(3).await;
    let outcome = |model: &str| {
        let row = rows.iter().find(|row| row.model.as_deref() == Some(model));
        row.and_then(|row| row.outcome.as_deref())
    };
    assert_eq!(outcome("old-ended"), Some("completed"));
    assert_eq!(outcome("old-open"), Some("interrupted"));
    assert_eq!(outcome("new"), Some("completed"));
    assert!(version(&database) > 1);
    let copies = named(app.data_dir(), "traygate.before-update-");
    assert_eq!(copies.len(), 1, "{copies:?}");
    assert_eq!(version(&copies[0]), 1);
    let open: i64 = Connection::open(&copies[0])
        .and_then(|copy| {
            copy.query_row(
                "SELECT count(*) FROM calls WHERE outcome IS NULL",
                [],
                |row| row.get(0),
            )
        })
        .expect("its rows");
    assert_eq!(open, 1, "as it was");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(&copies[0])
            .expect("a file")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "no more readable than the record");
    }
    // Once is enough.
    let folder = app.stop().await;
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    assert_eq!(app.rows(3).await.len(), 3);
    assert_eq!(named(app.data_dir(), "before-update").len(), 1);
}

#[tokio::test]
async fn an_older_record_that_cannot_be_copied_waits_as_it_is() {
    let Some(disk) = Disk::small("4m") else {
        return;
    };
    let up = Upstream::chatting().await;
    let folder = disk.folder();
    let database = of_the_first_version(folder.path());
    let filler = disk.fill();
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "new").await;
    health_that(&app, "the trouble", |health| health.last_error.is_some()).await;
    // A second attempt has been made and failed too.
    let told = now();
    must("another attempt", async {
        while now() - told < 1.secs() {
            served(&app, "more").await;
            tokio::time::sleep(50.ms()).await;
        }
    })
    .await;
    assert!(!health(&app).recording);
    assert_eq!(
        named(app.data_dir(), "before-update"),
        [] as [&Path; 0],
        "no half copies"
    );
    fs::remove_file(filler).expect("room again");
    written(&app).await;
    assert!(version(&database) > 1);
    assert_eq!(named(app.data_dir(), "before-update").len(), 1);
    assert!(models(&app.rows_now()).contains("old-ended"));
    drop(app.stop().await);
}

// D61
#[tokio::test]
async fn a_newer_record_and_its_write_ahead_log_stay_as_they_are() {
    let up = Upstream::chatting().await;
    let folder = with_a_past(&up, tempfile::tempdir().expect("a scratch folder")).await;
    let path = folder.path().join(DATABASE_FILE);
    let log = folder.path().join("traygate.db-wal");
    // As a newer Traygate leaves it that was killed: what is new stands in the write-ahead log.
    let newer = Connection::open(&path).expect("the record");
    newer
        .execute_batch(
            "PRAGMA wal_autocheckpoint = 0; PRAGMA user_version = 99;
             ALTER TABLE calls ADD COLUMN mood TEXT;",
        )
        .expect("a newer schema");
    let before = [&path, &log].map(|path| fs::read(path).expect("a file"));
    assert!(before[1].len() > 4096, "there is something in the log");
    drop(newer);
    for (path, bytes) in [&path, &log].into_iter().zip(&before) {
        fs::write(path, bytes).expect("a file");
    }
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    served(&app, "m").await;
    let told = in_trouble(&app, "newer Traygate").await;
    assert!(!told.recording && told.notice.is_none(), "{told:?}");
    let folder = app.stop().await;
    let after = [&path, &log].map(|path| fs::read(path).expect("a file"));
    assert!(after == before, "not a byte changed");
    assert_eq!(rows_in(folder.path()).len(), 0, "not ours to read");
}

// --- The clock ---------------------------------------------------------------------------------

const HOUR: i64 = 3_600_000_000;

#[tokio::test]
async fn a_clock_that_is_set_an_hour_forward_and_back_confuses_nothing() {
    static OFF_BY: AtomicI64 = AtomicI64::new(0);
    let gate = Gate::new();
    let held = gate.clone();
    let up = Upstream::start(move |request| match request.json()["model"].as_str() {
        Some("held") => Reply::chat(request).held_by(&held),
        _ => Reply::chat(request),
    })
    .await;
    let folder = tempfile::tempdir().expect("a scratch folder");
    let clock = Clock::Stepped(&OFF_BY);
    let app = App::start_by(folder, &App::settings(up.addr(), ""), clock).await;
    served(&app, "first").await;
    // Under way while the clock is set.
    let mut client = app.client().await;
    client
        .send(App::chat_request(r#"{"model":"held","messages":[]}"#))
        .await;
    up.wait_for_calls(2).await;
    for (place, by) in [HOUR, 0, -HOUR, 0].into_iter().enumerate() {
        OFF_BY.store(by, Ordering::Relaxed);
        served(&app, &format!("step-{place}")).await;
        // An answer is kept for five minutes by a clock that nobody sets.
        let again = app.chat(r#"{"model":"first","messages":[]}"#).await;
        assert_eq!(again.header("x-traygate-dedup"), Some("cached"), "{by}");
    }
    gate.open();
    assert_eq!(client.read_to_end().await.status(), 200);
    let rows = app.rows(10).await;
    written(&app).await;
    assert_eq!(rows.len(), 10);
    assert!(
        rows.is_sorted_by(|a, b| a.id > b.id),
        "by the time they were told"
    );
    for row in &rows {
        let took = row.duration.expect("an ended call");
        assert!(
            took < 60.secs(),
            "spans are not reckoned from the wall clock: {row:#?}"
        );
    }
    let reader = Reader::open(app.data_dir()).expect("a record");
    // In the order of their ends, none is missed whatever its time.
    let ended = reader
        .ended_after(0, &CallFilter::default(), 100)
        .expect("rows");
    assert_eq!(ended.len(), 10);
    let last = ended.last().and_then(|row| row.model.as_deref());
    assert_eq!(last, Some("held"));
    // Pages, one call at a time, have each once.
    let mut query = CallsQuery {
        limit: 1,
        ..CallsQuery::default()
    };
    let mut seen = HashSet::new();
    loop {
        let page = reader.calls(&query).expect("a page");
        seen.extend(page.calls.into_iter().map(|call| call.id));
        query.after = page.next;
        if query.after.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 10);
    let summed: i64 = Connection::open(app.data_dir().join(DATABASE_FILE))
        .and_then(|record| record.query_row("SELECT sum(calls) FROM rollups", [], |row| row.get(0)))
        .expect("a sum");
    assert_eq!(summed, 10, "each call is in the totals once");
}
