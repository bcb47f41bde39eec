//! The record through its door, on real files.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tempfile::TempDir;

use super::migrate::Migration;
use super::pages::CallsQuery;
use super::queries::{CallFilter, CallRow, Reader};
use super::spend::Account;
use super::*;
use crate::clock::{Clock, WallTime};
use crate::policy::usage::Basis;
use crate::settings::BodyLog;

pub(super) const CLOCK: Clock = Clock::Boot;
/// Far longer than anything here takes; a test that runs into it fails.
pub(super) const LONG: Duration = Duration::from_secs(20);

pub(super) fn start() -> CallStart {
    let now = CLOCK.wall();
    CallStart {
        id: CallId::new(now),
        started: now,
        provider: Arc::from("openai"),
        route: "chat/completions".into(),
        model: Some(Arc::from("gpt-5-mini")),
        tool: Arc::from("aider"),
        billing: Billing::Metered,
        streaming: true,
        dedup: DedupLabel::Miss,
        key: Some([7; 32]),
        reserved: None,
    }
}

pub(super) fn end(start: CallStart) -> CallEnd {
    CallEnd {
        start,
        status: Some(200),
        outcome: Outcome::Completed,
        first_token: Some(Duration::from_millis(120)),
        queued: Duration::from_micros(15),
        duration: Duration::from_millis(1500),
        sent: Some(Duration::from_millis(1)),
        head: Some(Duration::from_millis(2)),
        upstream_ended: Some(Duration::from_millis(3)),
        usage: None,
        money: crate::store::Money::default(),
        error: None,
    }
}

pub(super) fn open(folder: &Path) -> Store {
    Store::open(folder, CLOCK).expect("a store")
}

fn rows(folder: &Path) -> Vec<CallRow> {
    Reader::open(folder)
        .expect("a record")
        .calls(&CallsQuery {
            limit: 1000,
            ..CallsQuery::default()
        })
        .expect("rows")
        .calls
}

pub(super) fn database(folder: &Path) -> PathBuf {
    folder.join(DATABASE_FILE)
}

/// Names in the folder that hold `word`.
fn names_with(folder: &Path, word: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().display().to_string())
        .filter(|name| name.contains(word))
        .collect();
    names.sort();
    names
}

/// Looks again until `done`; time is only the limit.
#[track_caller]
pub(super) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = CLOCK.now();
    while !done() {
        assert!(CLOCK.now() - begin < LONG, "never came: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A database with one completed call in it, closed.
fn with_one_call() -> (TempDir, CallId) {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let call = start();
    let id = call.id;
    store.finished(end(call));
    store.close();
    (folder, id)
}

#[test]
fn a_call_is_written_with_all_that_is_known() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let call = start();
    store.opened(call.clone());
    store.finished(CallEnd {
        status: Some(502),
        outcome: Outcome::UpstreamError,
        error: Some("connection refused".to_owned()),
        usage: Some(Usage {
            input: Some(12),
            cache_write_5m: Some(0),
            cache_write_1h: Some(3),
            output: Some(450),
            reasoning: Some(400),
            basis: Basis::Doubtful,
            ..Usage::default()
        }),
        money: Money {
            cost: Some(Nanodollars(1_234_567)),
            list: Some(Nanodollars(1_234_567)),
            reported: true,
            tier: Some("flex"),
            ..Money::default()
        },
        ..end(call.clone())
    });
    assert!(store.flush(LONG));
    assert_eq!(
        rows(folder.path()),
        [CallRow {
            seq: 1,
            id: call.id.to_string(),
            started: call.started,
            provider: "openai".to_owned(),
            route: "chat/completions".to_owned(),
            model: Some("gpt-5-mini".to_owned()),
            tool: "aider".to_owned(),
            billing: "metered".to_owned(),
            streaming: true,
            dedup: "miss".to_owned(),
            request_key: Some(vec![7; 32]),
            outcome: Some("upstream_error".to_owned()),
            status: Some(502),
            upstream_call: Some(true),
            first_token: Some(Duration::from_millis(120)),
            queued: Some(Duration::from_micros(15)),
            sent: Some(Duration::from_millis(1)),
            head: Some(Duration::from_millis(2)),
            upstream_ended: Some(Duration::from_millis(3)),
            duration: Some(Duration::from_millis(1500)),
            error: Some("connection refused".to_owned()),
            account: Account {
                input_tokens: Some(12),
                cached_input_tokens: None,
                cache_write_5m_tokens: Some(0),
                cache_write_1h_tokens: Some(3),
                output_tokens: Some(450),
                reasoning_tokens: Some(400),
                usage_basis: Some("doubtful".into()),
                cost_nanos: Some(1_234_567),
                list_nanos: Some(1_234_567),
                saved_nanos: None,
                pricing: Some("reported".into()),
                service_tier: Some("flex".into()),
            },
            reserved_nanos: None,
        }]
    );
    assert_eq!(
        store.health(),
        StoreHealth {
            recording: true,
            bytes: store.health().bytes,
            ..StoreHealth::default()
        }
    );
}

#[test]
fn an_open_call_shows_and_ends_under_a_new_seq() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let long = start();
    store.opened(long.clone());
    assert!(store.flush(LONG));
    let before = rows(folder.path());
    assert_eq!(before[0].outcome, None);
    store.finished(end(start()));
    assert!(store.flush(LONG));
    store.finished(end(long.clone()));
    assert!(store.flush(LONG));

    let after = rows(folder.path());
    assert_eq!(after.len(), 2);
    let ended = Reader::open(folder.path())
        .expect("a record")
        .ended_after(before[0].seq, &CallFilter::default(), 10)
        .expect("rows");
    assert_eq!(ended.len(), 2, "a follower sees both ends");
    assert_eq!(ended[1].id, long.id.to_string(), "in the order of ending");
}

#[test]
fn commits_come_by_themselves() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    for expected in 1..=3 {
        store.finished(end(start()));
        // The writer sleeps between these: each hand-over has to wake it.
        wait_until("a commit", || store.health().pending_rows == 0);
        assert_eq!(rows(folder.path()).len(), expected);
    }
}

#[test]
fn dropping_the_last_handle_commits_and_ends() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let other = store.clone();
    drop(store);
    other.finished(end(start()));
    drop(other);
    // The folder is free again when the writer has ended.
    wait_until("the writer's end", || {
        Store::open(folder.path(), CLOCK).is_ok()
    });
    assert_eq!(rows(folder.path()).len(), 1);
}

#[test]
fn closing_leaves_one_plain_file_and_takes_no_more() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    store.finished(end(start()));
    store.close();
    store.close();
    store.finished(end(start()));
    assert_eq!(store.health().dropped_rows, 1);
    assert_eq!(names_with(folder.path(), "traygate.db"), ["traygate.db"]);
    assert_eq!(rows(folder.path()).len(), 1);
}

#[test]
fn a_second_store_on_a_folder_names_the_first() {
    let folder = TempDir::new().expect("a folder");
    let first = open(folder.path());
    let error = Store::open(folder.path(), CLOCK).expect_err("in use");
    let StoreError::InUse { pid, .. } = &error;
    assert_eq!(*pid, Some(std::process::id()));
    assert!(error.to_string().contains(&std::process::id().to_string()));
    first.close();
    open(folder.path());
}

#[test]
fn long_texts_are_cut_between_characters() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let mut call = start();
    call.model = Some(Arc::from("ü".repeat(1000)));
    store.finished(CallEnd {
        error: Some(format!("x{}", "ü".repeat(2000))),
        ..end(call)
    });
    assert!(store.flush(LONG));
    let row = &rows(folder.path())[0];
    assert_eq!(row.error.as_ref().map(String::len), Some(2047));
    assert_eq!(row.model.as_ref().map(String::len), Some(256));
}

/// What the killed process of the next test does; not a test.
#[test]
#[ignore = "run by what_ended_before_a_kill_survives_it, which kills it"]
fn child_that_is_killed() {
    let Some(folder) = std::env::var_os("TRAYGATE_TEST_FOLDER") else {
        return;
    };
    let store = open(Path::new(&folder));
    store.opened(CallStart {
        tool: Arc::from("left-open"),
        ..start()
    });
    loop {
        let call = start();
        let id = call.id;
        store.opened(call.clone());
        store.finished(end(call));
        println!("\nended {id}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_ended_before_a_kill_survives_it() {
    let folder = TempDir::new().expect("a folder");
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--nocapture", "--exact"])
        .arg(format!(
            "{}::child_that_is_killed",
            module_path!().split_once("::").expect("a crate").1
        ))
        .env("TRAYGATE_TEST_FOLDER", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    // The promise is 200 ms; a machine that is busy with other tests gets more.
    let promised_after = Duration::from_millis(500);
    let mut ended = Vec::new();
    for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
        let line = line.expect("text");
        let Some(id) = line.strip_prefix("ended ") else {
            continue;
        };
        ended.push((id.to_owned(), CLOCK.now()));
        let enough = ended.get(50).map(|(_, at)| *at);
        if enough.is_some_and(|at| CLOCK.now() - at > promised_after) {
            break;
        }
    }
    child.kill().expect("a kill");
    let killed = CLOCK.now();
    child.wait().expect("its end");

    let store = open(folder.path());
    let health = store.health();
    assert!(health.recording, "{health:?}");
    let rows = rows(folder.path());
    let promised = ended.iter().filter(|(_, at)| killed - *at > promised_after);
    let mut checked = 0;
    for (id, _) in promised {
        let row = rows.iter().find(|row| row.id == *id);
        let outcome = row.and_then(|row| row.outcome.as_deref());
        assert_eq!(outcome, Some("completed"), "{id}");
        checked += 1;
    }
    assert!(checked >= 50, "the child died early: {checked}");
    let left_open: Vec<_> = rows.iter().filter(|row| row.tool == "left-open").collect();
    assert_eq!(left_open.len(), 1);
    assert_eq!(left_open[0].outcome.as_deref(), Some("interrupted"));
    assert_eq!(store.health().notice, None, "a kill damages nothing");
}

#[test]
fn calls_left_open_are_interrupted_at_the_next_start() {
    let (folder, done) = with_one_call();
    let (first, second) = (start(), start());
    {
        // As a killed process leaves it.
        let connection = Connection::open(database(folder.path())).expect("a database");
        for call in [&first, &second] {
            connection
                .execute(
                    "INSERT INTO calls (id, started_us, provider, route, tool, billing, streaming, dedup)
                     VALUES (?1, 1, 'p', 'r', 't', 'free', 0, 'off')",
                    [call.id.to_string()],
                )
                .expect("a row");
        }
        connection
            .execute(
                "INSERT INTO calls (id, started_us, provider, route, tool, billing, streaming, dedup, outcome)
                 VALUES ('later', 1, 'p', 'r', 't', 'free', 0, 'off', 'completed')",
                [],
            )
            .expect("a row");
    }
    let _store = open(folder.path());
    let reader = Reader::open(folder.path()).expect("a record");
    let ended = reader
        .ended_after(4, &CallFilter::default(), 10)
        .expect("rows");
    let seen: Vec<_> = ended
        .iter()
        .map(|row| (row.id.clone(), row.outcome.clone()))
        .collect();
    let interrupted = Some("interrupted".to_owned());
    assert_eq!(
        seen,
        [
            (first.id.to_string(), interrupted.clone()),
            (second.id.to_string(), interrupted)
        ]
    );
    let untouched = rows(folder.path());
    let kept = untouched.iter().find(|row| row.id == done.to_string());
    assert_eq!(
        kept.and_then(|row| row.outcome.as_deref()),
        Some("completed")
    );
}

#[test]
fn a_locked_database_delays_rows_and_nothing_else() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let other = Connection::open(database(folder.path())).expect("a database");
    other.execute_batch("BEGIN IMMEDIATE").expect("the lock");
    let mut slowest = Duration::ZERO;
    for _ in 0..50 {
        let call = start();
        let begin = CLOCK.now();
        store.opened(call.clone());
        store.finished(end(call));
        slowest = slowest.max(CLOCK.now() - begin);
    }
    assert!(!store.flush(Duration::from_millis(300)), "it is locked");
    // The writer sits in SQLite's busy wait for most of this; a hand-over must not.
    assert!(slowest < Duration::from_millis(50), "{slowest:?}");
    // An attempt that failed has dropped the starts, which the ends have made superfluous.
    wait_until("a failed attempt", || store.health().pending_rows == 50);
    let error = store.health().last_error;
    assert!(error.is_some_and(|error| error.contains("locked")));
    assert_eq!(store.health().dropped_rows, 0);

    other.execute_batch("COMMIT").expect("the end of the lock");
    assert!(store.flush(LONG));
    assert_eq!(rows(folder.path()).len(), 50);
    assert_eq!(store.health().last_error, None);
}

#[test]
fn a_database_locked_at_the_start_is_opened_later() {
    let (folder, _) = with_one_call();
    let other = Connection::open(database(folder.path())).expect("a database");
    other
        .execute_batch("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE")
        .expect("the lock");
    let store = open(folder.path());
    assert!(!store.health().recording);
    store.finished(end(start()));
    drop(other);
    wait_until("the database", || store.health().recording);
    assert!(store.flush(LONG));
    assert_eq!(rows(folder.path()).len(), 2);
}

#[test]
fn a_full_wait_drops_starts_first_and_counts_lost_ends() {
    let folder = TempDir::new().expect("a folder");
    // A file where the folder should be: nothing can be written, not even by root.
    let blocked = folder.path().join("file");
    fs::write(&blocked, "").expect("a file");
    let store = open(&blocked);
    let health = store.health();
    assert!(!health.recording);
    assert!(
        health
            .last_error
            .is_some_and(|error| error.contains("cannot be written"))
    );

    let calls = inbox::MAX_WAITING + 10;
    for _ in 0..calls {
        store.opened(start());
    }
    assert_eq!(store.health().pending_rows, inbox::MAX_WAITING);
    for _ in 0..calls {
        store.finished(end(start()));
    }
    let health = store.health();
    assert_eq!(health.dropped_rows, 10);
    assert!(!store.flush(Duration::from_millis(10)));

    // The folder becomes usable: what waited is written.
    fs::remove_file(&blocked).expect("the file gone");
    wait_until("the database", || store.health().pending_rows == 0);
    let ended: i64 = Connection::open(database(&blocked))
        .and_then(|database| {
            database.query_row(
                "SELECT count(*) FROM calls WHERE outcome IS NOT NULL",
                [],
                |row| row.get(0),
            )
        })
        .expect("a count");
    assert_eq!(usize::try_from(ended), Ok(inbox::MAX_WAITING));
}

#[test]
fn an_unusable_folder_does_not_delay_the_end() {
    let folder = TempDir::new().expect("a folder");
    let blocked = folder.path().join("file");
    fs::write(&blocked, "").expect("a file");
    let store = open(&blocked);
    store.finished(end(start()));
    let begin = CLOCK.now();
    store.close();
    assert!(CLOCK.now() - begin < CLOSE_LIMIT);
    assert_eq!(store.health().dropped_rows, 1);
}

/// Opens a folder whose database is damaged, and checks that the damage is set aside with its
/// companions and a fresh log begun.
#[track_caller]
fn begins_afresh(folder: &Path, companions: &[&str]) {
    let damage = fs::read(database(folder)).expect("a file");
    let store = open(folder);
    let health = store.health();
    assert!(health.recording, "{health:?}");
    let notice = health.notice.expect("a notice");
    assert!(notice.contains("traygate.damaged-"), "{notice}");
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert_eq!(rows(folder).len(), 1);

    let aside = names_with(folder, "damaged");
    let kept = folder.join(
        aside
            .iter()
            .find(|name| name.ends_with(".db"))
            .expect("a database"),
    );
    assert_eq!(fs::read(&kept).expect("a file"), damage, "kept as it was");
    for companion in companions {
        assert!(
            aside.iter().any(|name| name.ends_with(companion)),
            "{aside:?}"
        );
    }
}

#[test]
fn a_file_that_is_no_database_is_set_aside() {
    let folder = TempDir::new().expect("a folder");
    fs::write(database(folder.path()), "dear diary").expect("a file");
    begins_afresh(folder.path(), &[]);
}

#[test]
fn zeros_over_the_first_page_are_set_aside() {
    let (folder, _) = with_one_call();
    let mut bytes = fs::read(database(folder.path())).expect("a file");
    bytes[..4096].fill(0);
    fs::write(database(folder.path()), bytes).expect("a file");
    begins_afresh(folder.path(), &[]);
}

#[test]
fn a_truncated_file_is_set_aside() {
    let (folder, _) = with_one_call();
    let bytes = fs::read(database(folder.path())).expect("a file");
    fs::write(database(folder.path()), &bytes[..5000]).expect("a file");
    begins_afresh(folder.path(), &[]);
}

#[test]
fn another_programs_database_is_set_aside() {
    let folder = TempDir::new().expect("a folder");
    Connection::open(database(folder.path()))
        .and_then(|other| other.execute_batch("CREATE TABLE notes (text)"))
        .expect("a database");
    begins_afresh(folder.path(), &[]);
}

#[test]
fn a_database_without_our_table_is_set_aside() {
    let (folder, _) = with_one_call();
    Connection::open(database(folder.path()))
        .and_then(|database| database.execute_batch("DROP TABLE calls"))
        .expect("a change");
    begins_afresh(folder.path(), &[]);
}

#[test]
fn a_foreign_write_ahead_log_is_set_aside() {
    let (folder, _) = with_one_call();
    let elsewhere = TempDir::new().expect("a folder");
    let path = elsewhere.path().join("other.db");
    let other = Connection::open(&path).expect("a database");
    other
        .execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE notes (text)")
        .expect("a log");
    fs::copy(
        elsewhere.path().join("other.db-wal"),
        folder.path().join("traygate.db-wal"),
    )
    .expect("a copy");
    begins_afresh(folder.path(), &["-wal", "-shm"]);
}

#[test]
fn the_log_of_another_record_leaves_a_sound_one() {
    let (folder, _) = with_one_call();
    let store = open(folder.path());
    for _ in 0..200 {
        store.finished(end(start()));
    }
    store.close();
    // Another record's first write-ahead log, beside this one's larger file.
    let elsewhere = TempDir::new().expect("a folder");
    let other = open(elsewhere.path());
    other.finished(end(start()));
    assert!(other.flush(LONG));
    fs::copy(
        elsewhere.path().join("traygate.db-wal"),
        folder.path().join("traygate.db-wal"),
    )
    .expect("a copy");
    let store = open(folder.path());
    let health = store.health();
    assert!(health.recording, "{health:?}");
    // SQLite takes such a log for its own. Whatever it makes of the two, the record works.
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert!(!rows(folder.path()).is_empty());
    let verdict: String = Connection::open(database(folder.path()))
        .and_then(|database| database.pragma_query_value(None, "integrity_check", |row| row.get(0)))
        .expect("a verdict");
    assert_eq!(verdict, "ok");
}

#[test]
fn an_empty_file_is_simply_new() {
    let folder = TempDir::new().expect("a folder");
    fs::write(database(folder.path()), "").expect("a file");
    let store = open(folder.path());
    assert_eq!(store.health().notice, None);
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert_eq!(rows(folder.path()).len(), 1);
}

#[test]
fn damage_in_mid_run_costs_no_waiting_row() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    for _ in 0..2000 {
        store.finished(end(start()));
    }
    assert!(store.flush(LONG));
    Connection::open(database(folder.path()))
        .and_then(|other| other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())))
        .expect("a checkpoint");
    // All but the first page, under the writer's open connection.
    let mut bytes = fs::read(database(folder.path())).expect("a file");
    bytes[4096..].fill(0xA5);
    fs::write(database(folder.path()), bytes).expect("a file");

    // Its cache may carry the writer on for a while.
    let mut last = start();
    wait_until("the damage to be noticed", || {
        last = start();
        store.finished(end(last.clone()));
        store.flush(LONG) && store.health().notice.is_some()
    });
    assert!(store.health().recording);
    let rows = rows(folder.path());
    assert!(rows.iter().any(|row| row.id == last.id.to_string()));
    assert!(!names_with(folder.path(), "damaged").is_empty());
    assert_eq!(store.health().dropped_rows, 0);
}

#[test]
fn damage_that_only_retention_meets_is_noticed() {
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    for _ in 0..2000 {
        store.finished(end(start()));
    }
    store.close();
    // Anew, with nothing read yet.
    let store = open(folder.path());
    let mut bytes = fs::read(database(folder.path())).expect("a file");
    bytes[4096..].fill(0xA5);
    fs::write(database(folder.path()), bytes).expect("a file");
    store.configure(LogSettings {
        retention: Duration::from_secs(1),
        max_bytes: 1 << 20,
        bodies: BodyLog::Off,
        bodies_retention: Duration::from_secs(1),
    });
    wait_until("the damage to be noticed", || {
        store.health().notice.is_some()
    });
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert_eq!(rows(folder.path()).len(), 1);
}

#[cfg(unix)]
#[test]
fn a_deleted_log_is_begun_anew() {
    let parent = TempDir::new().expect("a folder");
    let folder = parent.path().join("data");
    let store = open(&folder);
    store.finished(end(start()));
    assert!(store.flush(LONG));
    fs::remove_file(database(&folder)).expect("the file gone");
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert_eq!(rows(&folder).len(), 1);

    fs::remove_dir_all(&folder).expect("the folder gone");
    store.finished(end(start()));
    assert!(store.flush(LONG));
    assert_eq!(rows(&folder).len(), 1);
    Store::open(&folder, CLOCK).expect_err("locked again");
}

#[test]
fn a_reader_does_not_hold_up_the_end() {
    let (folder, _) = with_one_call();
    let store = open(folder.path());
    let reader = Connection::open(database(folder.path())).expect("a database");
    let count = |reader: &Connection| -> i64 {
        reader
            .query_row("SELECT count(*) FROM calls", [], |row| row.get(0))
            .expect("a count")
    };
    reader.execute_batch("BEGIN").expect("a transaction");
    assert_eq!(count(&reader), 1);
    store.finished(end(start()));
    store.close();
    assert_eq!(store.health().dropped_rows, 0);
    assert_eq!(count(&reader), 1, "its own moment");
    drop(reader);
    assert_eq!(rows(folder.path()).len(), 2);
}

#[test]
fn a_newer_database_is_left_untouched() {
    let (folder, _) = with_one_call();
    Connection::open(database(folder.path()))
        .and_then(|newer| {
            newer.execute_batch("ALTER TABLE calls ADD COLUMN mood TEXT; PRAGMA user_version = 99")
        })
        .expect("a newer schema");
    let before = fs::read(database(folder.path())).expect("a file");
    let store = open(folder.path());
    let health = store.health();
    assert!(!health.recording);
    let error = health.last_error.expect("an error");
    assert!(
        error.contains("newer Traygate") && error.contains("update"),
        "{error}"
    );
    store.finished(end(start()));
    store.close();
    assert_eq!(fs::read(database(folder.path())).expect("a file"), before);
    assert!(names_with(folder.path(), "damaged").is_empty());
}

#[test]
fn an_older_database_is_copied_and_migrated() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("old.db");
    let copy = folder.path().join("copy.db");
    let mut old = Connection::open(&path).expect("a database");
    let first = [Migration::sql(
        "CREATE TABLE a (x); INSERT INTO a VALUES (1)",
    )];
    migrate::migrate(&mut old, &first, &copy).expect("a first schema");
    assert!(!copy.exists(), "a new file needs no copy");

    let broken = [
        first[0],
        Migration::sql("ALTER TABLE a ADD COLUMN y; ALTER TABLE nowhere ADD COLUMN z"),
    ];
    migrate::migrate(&mut old, &broken, &copy).expect_err("a broken migration");
    assert_eq!(migrate::version(&old), Ok(1), "undone as a whole");
    old.prepare("SELECT y FROM a")
        .expect_err("undone as a whole");
    fs::remove_file(&copy).expect("the copy of the attempt");

    let second = [first[0], Migration::sql("ALTER TABLE a ADD COLUMN y")];
    migrate::migrate(&mut old, &second, &copy).expect("a second schema");
    assert_eq!(migrate::version(&old), Ok(2));
    old.prepare("SELECT y FROM a").expect("the new column");
    let copied = Connection::open(&copy).expect("a copy");
    assert_eq!(migrate::version(&copied), Ok(1));
    copied.prepare("SELECT x FROM a").expect("the old table");
}

#[test]
fn an_id_carries_its_time() {
    let wall = WallTime(1_790_000_000_123_456);
    let id = CallId::new(wall);
    assert_eq!(id.0.timestamp_ms(), 1_790_000_000_123);
    assert!(CallId::first_at(wall) <= id);
    assert_eq!(id.to_string().len(), 26);
    assert_eq!(id.to_string().parse(), Ok(id));
    assert_ne!(id, CallId::new(wall));
}

/// Costs are printed, not asserted: `cargo test --release -- --ignored --nocapture throughput`.
#[test]
#[ignore = "a measurement, for a quiet machine and a release build"]
fn throughput() {
    const ROWS: u32 = 90_000;
    let folder = TempDir::new().expect("a folder");
    let store = open(folder.path());
    let call = start();
    let begin = CLOCK.now();
    for _ in 0..ROWS {
        let call = CallStart {
            id: CallId::new(call.started),
            ..call.clone()
        };
        store.opened(call.clone());
        store.finished(end(call));
    }
    let handed = CLOCK.now() - begin;
    assert!(store.flush(LONG));
    let written = CLOCK.now() - begin;
    println!(
        "opened + finished: {:?} a call; {:.0} rows a second to the file; dropped {}",
        handed / ROWS,
        f64::from(ROWS) / written.as_secs_f64(),
        store.health().dropped_rows
    );
}
