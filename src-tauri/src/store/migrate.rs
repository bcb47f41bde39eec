//! Brings a database to this version's schema, one numbered SQL file at a time.
//!
//! `PRAGMA user_version` counts the files that have been applied.

use std::path::Path;

use rusqlite::{Connection, TransactionBehavior};

/// The schema's history. Append only: a file that has shipped never changes.
pub(super) const MIGRATIONS: &[&str] = &[include_str!("../../migrations/0001_calls.sql")];

/// `PRAGMA application_id` of our databases ("TRYG"): tells them from another program's file, or
/// from ours with another's write-ahead log beside it.
pub(super) const APPLICATION_ID: i32 = 0x5452_5947;

/// Applies what is missing in one transaction. An older database that holds calls is copied to
/// `copy` first.
pub(super) fn migrate(
    connection: &mut Connection,
    migrations: &[&str],
    copy: &Path,
) -> rusqlite::Result<()> {
    let applied = version(connection)?;
    if applied >= migrations.len() {
        return Ok(());
    }
    if applied > 0 {
        let copy = copy.to_string_lossy();
        connection.execute("VACUUM INTO ?1", [copy.as_ref()])?;
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for sql in &migrations[applied..] {
        transaction.execute_batch(sql)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    let version = i64::try_from(migrations.len()).unwrap_or(i64::MAX);
    transaction.pragma_update(None, "user_version", version)?;
    transaction.commit()
}

/// How many migrations the database has seen.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<usize> {
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    // A negative version is nobody's: as large as can be, hence "newer", hence not touched.
    Ok(usize::try_from(version).unwrap_or(usize::MAX))
}
