//! Reads the record, through connections of its own: while the writer writes, from another
//! process, and after its end.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::types::Value;
use rusqlite::{Connection, OpenFlags, Row, params_from_iter};

use super::migrate::{self, MIGRATIONS};
use super::{CallId, DATABASE_FILE, Outcome};
use crate::clock::WallTime;

/// Long enough for a checkpoint that is being finished; nothing else ever blocks a reader.
const BUSY: Duration = Duration::from_secs(2);

/// Why the record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Nothing has been recorded in this folder.
    #[error("there is no call log in {} yet", folder.display())]
    Missing {
        /// The data folder.
        folder: PathBuf,
    },
    /// Another version wrote it.
    #[error(
        "the call log has schema {found}, this Traygate reads {known}: start the Traygate that belongs to it"
    )]
    Schema {
        /// What the file says.
        found: usize,
        /// What this version knows.
        known: usize,
    },
    /// SQLite cannot read it.
    #[error("the call log cannot be read: {0}")]
    Sqlite(#[from] rusqlite::Error),
}

/// Which calls are asked for; what is `None` does not narrow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallFilter {
    /// Those that came at this time or later.
    pub since: Option<WallTime>,
    /// The provider's name; `*` and `?` stand for any characters, or one.
    pub provider: Option<String>,
    /// The tool's name, likewise.
    pub tool: Option<String>,
    /// What became of them.
    pub outcome: Option<OutcomeFilter>,
}

/// An outcome to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutcomeFilter {
    /// Calls that are still open.
    Open,
    /// Calls that ended so.
    Ended(Outcome),
}

/// One call as it is on record. Words are kept as they are written: another hand may have
/// written them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRow {
    /// Grows with each end: where [`Reader::ended_after`] reads on.
    pub seq: i64,
    /// The call's id, as text.
    pub id: String,
    /// When it came.
    pub started: WallTime,
    /// The provider's name.
    pub provider: String,
    /// The route.
    pub route: String,
    /// The model as the client spelled it.
    pub model: Option<String>,
    /// The tool that called.
    pub tool: String,
    /// Who pays: `metered`, `plan` or `free`.
    pub billing: String,
    /// Whether it asked for a stream.
    pub streaming: bool,
    /// Its part in dedup.
    pub dedup: String,
    /// The request key.
    pub request_key: Option<Vec<u8>>,
    /// What became of it; `None` while it is open.
    pub outcome: Option<String>,
    /// The status the client was sent.
    pub status: Option<u16>,
    /// Whether it caused an upstream request; `None` while open or if interrupted.
    pub upstream_call: Option<bool>,
    /// From its coming to the first content.
    pub first_token: Option<Duration>,
    /// Spent waiting for a permit.
    pub queued: Option<Duration>,
    /// From its coming to its end.
    pub duration: Option<Duration>,
    /// What went wrong, in words.
    pub error: Option<String>,
}

/// A read-only connection to the record.
#[derive(Debug)]
pub struct Reader {
    connection: Connection,
}

impl Reader {
    /// Opens the record in `data_dir`, which another process may be writing.
    ///
    /// # Errors
    /// [`ReadError::Missing`] without a file, [`ReadError::Schema`] if another version wrote it.
    pub fn open(data_dir: &Path) -> Result<Self, ReadError> {
        let missing = || ReadError::Missing {
            folder: data_dir.to_owned(),
        };
        let path = data_dir.join(DATABASE_FILE);
        if !path.exists() {
            return Err(missing());
        }
        let connection = Connection::open_with_flags(
            path,
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        )?;
        connection.busy_timeout(BUSY)?;
        match migrate::version(&connection)? {
            0 => Err(missing()),
            found if found != MIGRATIONS.len() => Err(ReadError::Schema {
                found,
                known: MIGRATIONS.len(),
            }),
            _ => Ok(Self { connection }),
        }
    }

    /// The newest `limit` calls that came before `before`, newest first.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn calls(
        &self,
        filter: &CallFilter,
        limit: usize,
        before: Option<CallId>,
    ) -> Result<Vec<CallRow>, ReadError> {
        let mut query = Query::new(filter);
        if let Some(before) = before {
            query.require("id < ?", Value::from(before.to_string()));
        }
        self.rows(query, "id DESC", limit)
    }

    /// The first `limit` calls that ended after the one with this `seq`, in the order of their
    /// ends.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn ended_after(
        &self,
        seq: i64,
        filter: &CallFilter,
        limit: usize,
    ) -> Result<Vec<CallRow>, ReadError> {
        let mut query = Query::new(filter);
        query.require("seq > ?", Value::from(seq));
        query.conditions.push("outcome IS NOT NULL");
        self.rows(query, "seq", limit)
    }

    /// Hands the newest `limit` calls to `visit`, oldest first, one by one: an export may be larger
    /// than memory. Stops where `visit` breaks. Returns the `seq` from which
    /// [`Self::ended_after`] goes on without a gap or an end seen twice.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn visit_last(
        &self,
        filter: &CallFilter,
        limit: usize,
        mut visit: impl FnMut(CallRow) -> ControlFlow<()>,
    ) -> Result<i64, ReadError> {
        // Rows and `seq` of one moment.
        let _moment = self.connection.unchecked_transaction()?;
        let seq = self.last_seq()?;
        let (newest, values) = Query::new(filter).select("id DESC", limit);
        let mut statement = self
            .connection
            .prepare(&format!("SELECT * FROM ({newest}) ORDER BY id"))?;
        for row in statement.query_map(params_from_iter(values), call_row)? {
            if visit(row?).is_break() {
                break;
            }
        }
        Ok(seq)
    }

    /// The `seq` of the call that ended (or was first written) last; 0 in an empty record.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn last_seq(&self) -> Result<i64, ReadError> {
        Ok(self
            .connection
            .query_row("SELECT coalesce(max(seq), 0) FROM calls", [], |row| {
                row.get(0)
            })?)
    }

    fn rows(&self, query: Query, order: &str, limit: usize) -> Result<Vec<CallRow>, ReadError> {
        let (sql, values) = query.select(order, limit);
        let mut statement = self.connection.prepare(&sql)?;
        let rows = statement
            .query_map(params_from_iter(values), call_row)?
            .collect::<rusqlite::Result<_>>()?;
        Ok(rows)
    }
}

/// Conditions and their values, in step.
struct Query {
    conditions: Vec<&'static str>,
    values: Vec<Value>,
}

impl Query {
    fn new(filter: &CallFilter) -> Self {
        let mut query = Self {
            conditions: Vec::new(),
            values: Vec::new(),
        };
        if let Some(since) = filter.since {
            // By id, which has an index; started_us has none.
            query.require("id >= ?", Value::from(CallId::first_at(since).to_string()));
        }
        if let Some(provider) = &filter.provider {
            query.require("provider GLOB ?", Value::from(glob(provider)));
        }
        if let Some(tool) = &filter.tool {
            query.require("tool GLOB ?", Value::from(glob(tool)));
        }
        match filter.outcome {
            Some(OutcomeFilter::Open) => query.conditions.push("outcome IS NULL"),
            Some(OutcomeFilter::Ended(outcome)) => {
                query.require("outcome = ?", Value::from(outcome.as_str().to_owned()));
            }
            None => {}
        }
        query
    }

    /// The columns are those of [`call_row`].
    fn select(mut self, order: &str, limit: usize) -> (String, Vec<Value>) {
        let conditions = if self.conditions.is_empty() {
            "true".to_owned()
        } else {
            self.conditions.join(" AND ")
        };
        self.values
            .push(Value::from(i64::try_from(limit).unwrap_or(i64::MAX)));
        let sql = format!(
            "SELECT seq, id, started_us, provider, route, model, tool, billing, streaming, dedup,
               request_key, outcome, status, upstream_call, first_token_us, queued_us,
               duration_us, error
             FROM calls WHERE {conditions} ORDER BY {order} LIMIT ?"
        );
        (sql, self.values)
    }

    fn require(&mut self, condition: &'static str, value: Value) {
        self.conditions.push(condition);
        self.values.push(value);
    }
}

/// `GLOB` also knows `[…]`, which the patterns of the settings do not.
fn glob(pattern: &str) -> String {
    pattern.replace('[', "[[]")
}

fn call_row(row: &Row<'_>) -> rusqlite::Result<CallRow> {
    let span = |micros: Option<i64>| {
        micros.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
    };
    Ok(CallRow {
        seq: row.get(0)?,
        id: row.get(1)?,
        started: WallTime(row.get(2)?),
        provider: row.get(3)?,
        route: row.get(4)?,
        model: row.get(5)?,
        tool: row.get(6)?,
        billing: row.get(7)?,
        streaming: row.get(8)?,
        dedup: row.get(9)?,
        request_key: row.get(10)?,
        outcome: row.get(11)?,
        status: row.get(12)?,
        upstream_call: row.get(13)?,
        first_token: span(row.get(14)?),
        queued: span(row.get(15)?),
        duration: span(row.get(16)?),
        error: row.get(17)?,
    })
}
