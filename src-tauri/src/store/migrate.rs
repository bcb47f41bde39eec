//! Brings a database to this version's schema, one numbered SQL file at a time.
//!
//! `PRAGMA user_version` counts the files that have been applied.

use std::fs;
use std::path::Path;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::database::create_private;
use super::rollup::{self, Unsummed};

/// The schema's history. Append only: a file that has shipped never changes.
pub(super) const MIGRATIONS: &[Migration] = &[
    Migration::sql(include_str!("../../migrations/0001_calls.sql")),
    Migration {
        then: |transaction| rollup::sum_up(transaction, Unsummed::Ended),
        ..Migration::sql(include_str!("../../migrations/0002_rollups_and_bodies.sql"))
    },
    Migration::sql(include_str!("../../migrations/0003_spend.sql")),
];

/// One step from a schema to the next.
#[derive(Clone, Copy)]
pub(super) struct Migration {
    sql: &'static str,
    /// What SQL alone cannot do, in the same transaction, once the schema is this version's: it is
    /// this version's code.
    then: fn(&Transaction<'_>) -> rusqlite::Result<()>,
}

impl Migration {
    pub(super) const fn sql(sql: &'static str) -> Self {
        Self {
            sql,
            then: |_| Ok(()),
        }
    }
}

/// `PRAGMA application_id` of our databases ("TRYG"): tells them from another program's file, or
/// from ours with another's write-ahead log beside it.
pub(super) const APPLICATION_ID: i32 = 0x5452_5947;

/// Applies what is missing in one transaction. An older database that holds calls is copied to
/// `copy` first.
pub(super) fn migrate(
    connection: &mut Connection,
    migrations: &[Migration],
    copy: &Path,
) -> rusqlite::Result<()> {
    let applied = version(connection)?;
    if applied >= migrations.len() {
        return Ok(());
    }
    if applied > 0 {
        copy_to(connection, copy)?;
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for migration in &migrations[applied..] {
        transaction.execute_batch(migration.sql)?;
    }
    for migration in &migrations[applied..] {
        (migration.then)(&transaction)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    let version = i64::try_from(migrations.len()).unwrap_or(i64::MAX);
    transaction.pragma_update(None, "user_version", version)?;
    transaction.commit()
}

fn copy_to(connection: &Connection, copy: &Path) -> rusqlite::Result<()> {
    // SQLite fills an empty file as readily as it makes one, which everybody could read. If this
    // fails, so does what follows, and says why.
    let _ = create_private(copy);
    let copied = connection.execute("VACUUM INTO ?1", [copy.to_string_lossy()]);
    if copied.is_err() {
        // Half a copy is none, and each further attempt would leave another on the full disk.
        let _ = fs::remove_file(copy);
    }
    copied.map(drop)
}

/// How many migrations the database has seen.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<usize> {
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    // A negative version is nobody's: as large as can be, hence "newer", hence not touched.
    Ok(usize::try_from(version).unwrap_or(usize::MAX))
}
