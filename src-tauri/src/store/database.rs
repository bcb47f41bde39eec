//! Opens the database file: checks it, sets a damaged one aside, migrates an older one.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::{Timestamp, tz::TimeZone};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, ffi};

use super::migrate::{self, APPLICATION_ID, MIGRATIONS};
use super::rollup::{self, Unsummed};
use crate::clock::WallTime;

/// How long one attempt waits for another process's lock. Short: the writer tries again by
/// itself, and meanwhile has to hear that the program ends.
const BUSY: Duration = Duration::from_millis(100);

/// Why there is no database to write to.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(
        "the call log {} was written by a newer Traygate (schema {found}, this one knows {known}): \
         it is left untouched and calls are not recorded; update Traygate, or move the file away",
        path.display()
    )]
    Newer {
        path: PathBuf,
        found: usize,
        known: usize,
    },
    /// Its content makes no sense.
    #[error("the call log is damaged: {0}")]
    Damaged(String),
    #[error("the call log {} cannot be opened: {error}", path.display())]
    Sqlite {
        path: PathBuf,
        error: rusqlite::Error,
    },
    #[error("the call log {} cannot be opened: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// Opens `path` for writing, at this version's schema, with no call left open.
///
/// Touches nothing in a newer or damaged file.
pub(super) fn open(path: &Path, now: WallTime) -> Result<Connection, OpenError> {
    let told = |error: rusqlite::Error| {
        if is_damage(&error) {
            OpenError::Damaged(error.to_string())
        } else {
            OpenError::Sqlite {
                path: path.to_owned(),
                error,
            }
        }
    };
    let exists = fs::metadata(path).is_ok_and(|file| file.len() > 0);
    // A clean end leaves no write-ahead log. After any other end, or a copy restored beside an old
    // log, the pages may not belong together, which only reading them all can tell.
    let unclean = exists && has_write_ahead_log(path);
    if exists {
        inspect(path, unclean).map_err(|error| match error {
            Inspection::Found(error) => error,
            Inspection::Sqlite(error) => told(error),
        })?;
    } else {
        create_private(path).map_err(|error| OpenError::Io {
            path: path.to_owned(),
            error,
        })?;
    }
    prepare(path, now).map_err(told)
}

enum Inspection {
    Found(OpenError),
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for Inspection {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// Looks at an existing file through a read-only connection, which on closing leaves file and
/// write-ahead log as they are.
fn inspect(path: &Path, unclean: bool) -> Result<(), Inspection> {
    let connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    connection.busy_timeout(BUSY)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    let found = migrate::version(&connection)?;
    if found > MIGRATIONS.len() {
        return Err(Inspection::Found(OpenError::Newer {
            path: path.to_owned(),
            found,
            known: MIGRATIONS.len(),
        }));
    }
    let application: i32 =
        connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    // A file without tables is one whose creation was cut short.
    if application != APPLICATION_ID && tables > 0 {
        return Err(Inspection::Found(OpenError::Damaged(
            "it holds another program's data".to_owned(),
        )));
    }
    if found == MIGRATIONS.len()
        && let Err(error) = connection.prepare(
            "SELECT calls.seq, outcome, error, upstream_ended_us, reserved_nanos, rollups.estimated,
               rollups.quarter, request, spend_by_quarter.calls, day
             FROM calls, rollups, bodies, spend_by_quarter, spend_by_day",
        )
    {
        // SQLite's plain "error" is what it has for a missing table or column.
        return Err(if error.sqlite_error_code() == Some(ErrorCode::Unknown) {
            Inspection::Found(OpenError::Damaged(error.to_string()))
        } else {
            error.into()
        });
    }
    if unclean {
        let verdict: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if verdict != "ok" {
            return Err(Inspection::Found(OpenError::Damaged(verdict)));
        }
    }
    Ok(())
}

fn prepare(path: &Path, now: WallTime) -> rusqlite::Result<Connection> {
    let mut connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    connection.busy_timeout(BUSY)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    // Before the first table, or never: lets retention give pages back to the file system.
    connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A power cut may take the last commits, never the database; a killed process takes nothing.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // A write-ahead log that grew behind a long reader shrinks again. Its usual size is 4 MB.
    connection.pragma_update(None, "journal_size_limit", 8 << 20)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    migrate::migrate(
        &mut connection,
        MIGRATIONS,
        &free_name(path, "before-update", now),
    )?;
    // Of an earlier process: this one has not written yet, and the folder lock allows no other.
    // They take places behind the last, in their old order, so that a follower sees them end.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // The provider may have worked for them to the end, and nobody will ever say what that cost:
    // what was held for them is the most that it can be.
    transaction.execute(
        "UPDATE calls SET cost_nanos = reserved_nanos, list_nanos = reserved_nanos,
           pricing = 'reserved'
         WHERE outcome IS NULL AND reserved_nanos IS NOT NULL",
        [],
    )?;
    rollup::sum_up(&transaction, Unsummed::Open)?;
    transaction.execute(
        "UPDATE calls SET outcome = 'interrupted', seq = seq + 1
           + (SELECT max(seq) FROM calls)
           - (SELECT min(seq) FROM calls WHERE outcome IS NULL)
         WHERE outcome IS NULL",
        [],
    )?;
    transaction.commit()?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
    Ok(connection)
}

/// Closes without folding the write-ahead log in: what is damaged is not to be mixed further.
pub(super) fn close_as_it_is(connection: Connection) {
    // Cannot fail for an option that this SQLite knows; and then closing is all that is left.
    let _ = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    drop(connection);
}

/// Moves a damaged database and its companions out of the way; returns its new path.
pub(super) fn set_aside(path: &Path, now: WallTime) -> io::Result<PathBuf> {
    let aside = free_name(path, "damaged", now);
    fs::rename(path, &aside)?;
    // Companions under the new name, so that whoever wants to mend it finds them together.
    for companion in ["-wal", "-shm", "-journal"] {
        match fs::rename(beside(path, companion), beside(&aside, companion)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(aside)
}

/// What is wrong with a database, in words; `None` if it is sound. Reads all of it.
///
/// # Errors
/// If that cannot be told now.
pub(super) fn damage(connection: &Connection) -> rusqlite::Result<Option<String>> {
    // Not `quick_check`, which passes over an index that misses rows; it takes half the time.
    let verdict = connection.query_row("PRAGMA integrity_check(1)", [], |row| {
        row.get::<_, String>(0)
    });
    match verdict {
        Ok(verdict) if verdict == "ok" => Ok(None),
        Ok(verdict) => {
            let finding = verdict.lines().filter(|line| !line.starts_with("***"));
            Ok(Some(finding.collect::<Vec<_>>().join(" ")))
        }
        Err(error) if is_damage(&error) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Whether the file itself is at fault, and trying again is no use.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(error, _) => {
            matches!(
                error.code,
                ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt
            ) || error.extended_code == ffi::SQLITE_IOERR_SHORT_READ
        }
        _ => false,
    }
}

/// `traygate.db` → `traygate.damaged-20261130-140322.db`, in local time; numbered if taken.
fn free_name(path: &Path, word: &str, now: WallTime) -> PathBuf {
    let stamp = Timestamp::from_microsecond(now.0)
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .to_zoned_datetime(TimeZone::system())
        .strftime("%Y%m%d-%H%M%S")
        .to_string();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut name = path.with_file_name(format!("{stem}.{word}-{stamp}.db"));
    let mut number = 2;
    while name.exists() {
        name = path.with_file_name(format!("{stem}.{word}-{stamp}-{number}.db"));
        number += 1;
    }
    name
}

/// A companion of the database.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// Whether something that was written stands beside the database and not in it yet.
pub(super) fn has_write_ahead_log(path: &Path) -> bool {
    fs::metadata(beside(path, "-wal")).is_ok_and(|log| log.len() > 0)
}

/// Which file stands at `path`, as far as the system tells: SQLite goes on writing to a file that
/// was deleted or replaced under it, and nobody would ever read that.
#[cfg(unix)]
pub(super) fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Windows does not let an open database be deleted or replaced.
#[cfg(not(unix))]
pub(super) fn identity(_: &Path) -> Option<(u64, u64)> {
    None
}

/// Who called which model when is nobody else's business on a shared machine. SQLite gives the
/// companions the same rights.
pub(super) fn create_private(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}
