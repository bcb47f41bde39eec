//! Reads the record, through connections of its own: while the writer writes, from another
//! process, and after its end.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rusqlite::types::Value;
use rusqlite::{Connection, ErrorCode, OpenFlags, Row, params_from_iter};
use serde::Serialize;
use url::Url;
use utoipa::ToSchema;

use super::database;
use super::json;
use super::migrate::{self, MIGRATIONS};
use super::spend::{ACCOUNT_COLUMNS, Account};
use super::{CallEnd, CallId, DATABASE_FILE, DedupLabel, Outcome};
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

impl ReadError {
    /// Whether the file itself may be at fault: it makes no sense to SQLite, or to us.
    pub(super) fn may_be_damage(&self) -> bool {
        let Self::Sqlite(error) = self else {
            return false;
        };
        database::is_damage(error)
            || matches!(
                error,
                rusqlite::Error::InvalidColumnType(..)
                    | rusqlite::Error::IntegralValueOutOfRange(..)
                    | rusqlite::Error::FromSqlConversionFailure(..)
            )
    }
}

/// Which calls are asked for; what is `None` does not narrow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallFilter {
    /// Those that came at this time or later.
    pub since: Option<WallTime>,
    /// Those that came before this time.
    pub until: Option<WallTime>,
    /// The provider's name; `*` and `?` stand for any characters, or one.
    pub provider: Option<String>,
    /// The model as the client spelled it, likewise.
    pub model: Option<String>,
    /// The tool's name, likewise.
    pub tool: Option<String>,
    /// What became of them.
    pub outcome: Option<OutcomeFilter>,
    /// Their part in dedup.
    pub dedup: Option<DedupLabel>,
    /// Text in what went wrong; ASCII letters match in either case.
    pub error: Option<String>,
    /// The beginning of their request key, or all of it.
    pub key: Option<KeyPrefix>,
}

impl CallFilter {
    /// Whether rows have to be looked at one by one to tell those that match. Times are in the
    /// ids, which have an index, and so have open calls.
    pub(super) fn is_selective(&self) -> bool {
        let Self {
            since: _,
            until: _,
            provider,
            model,
            tool,
            outcome,
            dedup,
            error,
            key,
        } = self;
        *outcome != Some(OutcomeFilter::Open)
            && (outcome.is_some()
                || dedup.is_some()
                || key.is_some()
                || [provider, model, tool, error]
                    .iter()
                    .any(|text| text.is_some()))
    }

    /// The first id of the time asked for, and the first past it.
    pub(super) fn ids(&self) -> (Option<String>, Option<String>) {
        let id = |time: WallTime| CallId::first_at(time).to_string();
        (self.since.map(id), self.until.map(id))
    }
}

/// The word for a call without an outcome yet.
pub const OPEN: &str = "open";

/// An outcome to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutcomeFilter {
    /// Calls that are still open.
    Open,
    /// Calls that ended so.
    Ended(Outcome),
}

/// A word that stands for nothing in the record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is none of {known}")]
pub struct UnknownWord {
    word: String,
    known: String,
}

impl FromStr for OutcomeFilter {
    type Err = UnknownWord;

    /// An outcome's word, or `open`.
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        if word == OPEN {
            return Ok(Self::Open);
        }
        let outcome = Outcome::ALL
            .into_iter()
            .find(|known| known.as_str() == word);
        outcome.map(Self::Ended).ok_or_else(|| {
            let known = Outcome::ALL.map(Outcome::as_str);
            UnknownWord {
                word: word.to_owned(),
                known: format!("{}, {OPEN}", known.join(", ")),
            }
        })
    }
}

impl FromStr for DedupLabel {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        const ALL: [DedupLabel; 4] = [
            DedupLabel::Miss,
            DedupLabel::Joined,
            DedupLabel::Cached,
            DedupLabel::Off,
        ];
        let label = ALL.into_iter().find(|known| known.as_str() == word);
        label.ok_or_else(|| UnknownWord {
            word: word.to_owned(),
            known: ALL.map(DedupLabel::as_str).join(", "),
        })
    }
}

/// The first bytes of a request key, or all 32: what a list shows of a key finds its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPrefix {
    bytes: Vec<u8>,
}

impl KeyPrefix {
    /// The first and the last key that begin so.
    pub(super) fn range(&self) -> (Vec<u8>, Vec<u8>) {
        let mut last = self.bytes.clone();
        last.resize(32, 0xFF);
        (self.bytes.clone(), last)
    }
}

/// Not the beginning of a request key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request key is asked for by 2 to 64 hex digits, an even number of them")]
pub struct BadKey;

impl FromStr for KeyPrefix {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<Self, BadKey> {
        let digits = text.as_bytes();
        if digits.is_empty() || digits.len() > 64 || !digits.len().is_multiple_of(2) {
            return Err(BadKey);
        }
        let digit = |digit: &u8| char::from(*digit).to_digit(16).ok_or(BadKey);
        let byte = |pair: &[u8]| -> Result<u8, BadKey> {
            let [high, low] = [digit(&pair[0])?, digit(&pair[1])?];
            u8::try_from(high << 4 | low).map_err(|_| BadKey)
        };
        let bytes = digits.chunks_exact(2).map(byte).collect::<Result<_, _>>()?;
        Ok(Self { bytes })
    }
}

/// One call as it is on record. Words are kept as they are written: another hand may have
/// written them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct CallRow {
    /// Grows with each end: where [`Reader::ended_after`] reads on.
    #[serde(skip)]
    pub seq: i64,
    /// The call's id, as text.
    pub id: String,
    /// When it came.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
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
    /// The request key, in hex.
    #[serde(serialize_with = "json::hex_if_any")]
    #[schema(value_type = Option<String>)]
    pub request_key: Option<Vec<u8>>,
    /// What became of it; `open` while it is open.
    #[serde(serialize_with = "json::outcome")]
    #[schema(value_type = String)]
    pub outcome: Option<String>,
    /// The status the client was sent.
    pub status: Option<u16>,
    /// Whether it caused an upstream request; `None` while open or if interrupted.
    pub upstream_call: Option<bool>,
    /// From its coming to the first content, in milliseconds.
    #[serde(rename = "first_token_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub first_token: Option<Duration>,
    /// Spent waiting for a permit, in milliseconds.
    #[serde(rename = "queued_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub queued: Option<Duration>,
    /// From its coming to its upstream request, in milliseconds; none if it caused none.
    #[serde(rename = "sent_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub sent: Option<Duration>,
    /// From its coming to the head of the upstream's answer, in milliseconds.
    #[serde(rename = "head_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub head: Option<Duration>,
    /// From its coming to the end of what the upstream sent, in milliseconds.
    #[serde(rename = "upstream_ended_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub upstream_ended: Option<Duration>,
    /// From its coming to its end, in milliseconds.
    #[serde(rename = "duration_ms", serialize_with = "json::millis_if_any")]
    #[schema(value_type = Option<f64>)]
    pub duration: Option<Duration>,
    /// What went wrong, in words.
    pub error: Option<String>,
    /// What it used and cost.
    #[serde(flatten)]
    pub account: Account,
    /// What a budget holds for it while it is open, in nano-dollars.
    pub reserved_nanos: Option<i64>,
}

/// A call that has just ended, as it will stand on record.
impl From<&CallEnd> for CallRow {
    fn from(end: &CallEnd) -> Self {
        let start = &end.start;
        Self {
            // Given by the database, later.
            seq: 0,
            id: start.id.to_string(),
            started: start.started,
            provider: start.provider.to_string(),
            route: start.route.to_string(),
            model: start.model.as_deref().map(str::to_owned),
            tool: start.tool.to_string(),
            billing: start.billing.as_str().to_owned(),
            streaming: start.streaming,
            dedup: start.dedup.as_str().to_owned(),
            request_key: start.key.map(Vec::from),
            outcome: Some(end.outcome.as_str().to_owned()),
            status: end.status,
            upstream_call: Some(end.sent.is_some()),
            first_token: end.first_token,
            queued: Some(end.queued),
            sent: end.sent,
            head: end.head,
            upstream_ended: end.upstream_ended,
            duration: Some(end.duration),
            error: end.error.clone(),
            account: Account::of(end),
            reserved_nanos: None,
        }
    }
}

/// A read-only connection to the record.
#[derive(Debug)]
pub struct Reader {
    pub(super) connection: Connection,
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
        let (connection, version) = connect(&path)?;
        match version {
            0 => Err(missing()),
            found if found != MIGRATIONS.len() => Err(ReadError::Schema {
                found,
                known: MIGRATIONS.len(),
            }),
            _ => Ok(Self { connection }),
        }
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

    pub(super) fn rows(
        &self,
        query: Query,
        order: &str,
        limit: usize,
    ) -> Result<Vec<CallRow>, ReadError> {
        let (sql, values) = query.select(order, limit);
        let mut statement = self.connection.prepare_cached(&sql)?;
        let rows = statement
            .query_map(params_from_iter(values), call_row)?
            .collect::<rusqlite::Result<_>>()?;
        Ok(rows)
    }
}

/// A connection to the record, and the version of its schema.
fn connect(path: &Path) -> rusqlite::Result<(Connection, usize)> {
    let connect = |place: &OsStr, more: OpenFlags| {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
        let connection = Connection::open_with_flags(place, flags)?;
        connection.busy_timeout(BUSY)?;
        // The first look at the file: what cannot be read shows here.
        let version = migrate::version(&connection)?;
        Ok((connection, version))
    };
    connect(path.as_os_str(), OpenFlags::empty()).or_else(|error: rusqlite::Error| {
        // Readers and writer find each other through a file beside the record, which a read-only
        // disk cannot take. Nobody writes there, so they need not, if all is in the record itself.
        let cannot = error.sqlite_error_code() == Some(ErrorCode::CannotOpen);
        let whole = !database::has_write_ahead_log(path);
        let address = std::path::absolute(path)
            .ok()
            .and_then(|path| Url::from_file_path(path).ok());
        match address.filter(|_| cannot && whole) {
            Some(mut address) => {
                address.set_query(Some("immutable=1"));
                connect(address.as_str().as_ref(), OpenFlags::SQLITE_OPEN_URI)
            }
            None => Err(error),
        }
    })
}

/// Conditions and their values, in step.
pub(super) struct Query {
    conditions: Vec<&'static str>,
    values: Vec<Value>,
}

impl Query {
    pub(super) fn new(filter: &CallFilter) -> Self {
        let mut query = Self {
            conditions: Vec::new(),
            values: Vec::new(),
        };
        // By id, which has an index; started_us has none.
        let (first, past) = filter.ids();
        let texts = [
            ("id >= ?", first),
            ("id < ?", past),
            ("provider GLOB ?", filter.provider.as_deref().map(glob)),
            ("model GLOB ?", filter.model.as_deref().map(glob)),
            ("tool GLOB ?", filter.tool.as_deref().map(glob)),
            (
                "dedup = ?",
                filter.dedup.map(|label| label.as_str().to_owned()),
            ),
            ("error LIKE ? ESCAPE '!'", filter.error.as_deref().map(like)),
        ];
        for (condition, value) in texts {
            if let Some(value) = value {
                query.require(condition, Value::from(value));
            }
        }
        match filter.outcome {
            Some(OutcomeFilter::Open) => query.conditions.push("outcome IS NULL"),
            Some(OutcomeFilter::Ended(outcome)) => {
                query.require("outcome = ?", Value::from(outcome.as_str().to_owned()));
            }
            None => {}
        }
        if let Some(key) = &filter.key {
            let (first, last) = key.range();
            query.require("request_key >= ?", Value::from(first));
            query.require("request_key <= ?", Value::from(last));
        }
        query
    }

    /// The columns are those of [`call_row`].
    pub(super) fn select(mut self, order: &str, limit: usize) -> (String, Vec<Value>) {
        let conditions = self.conditions();
        self.values
            .push(Value::from(i64::try_from(limit).unwrap_or(i64::MAX)));
        // Without statistics SQLite would rather walk all ids than sort the few that are open.
        let index = if self.conditions.contains(&"outcome IS NULL") {
            "INDEXED BY calls_open"
        } else {
            ""
        };
        let sql = format!(
            "SELECT seq, id, started_us, provider, route, model, tool, billing, streaming, dedup,
               request_key, outcome, status, upstream_call, first_token_us, queued_us,
               duration_us, error, sent_us, head_us, upstream_ended_us, reserved_nanos,
               {ACCOUNT_COLUMNS}
             FROM calls {index} WHERE {conditions} ORDER BY {order} LIMIT ?"
        );
        (sql, self.values)
    }

    /// These columns of all that match, in whatever order is quickest.
    pub(super) fn select_only(self, columns: &str) -> (String, Vec<Value>) {
        let conditions = self.conditions();
        let sql = format!("SELECT {columns} FROM calls WHERE {conditions}");
        (sql, self.values)
    }

    fn conditions(&self) -> String {
        if self.conditions.is_empty() {
            "true".to_owned()
        } else {
            self.conditions.join(" AND ")
        }
    }

    pub(super) fn require(&mut self, condition: &'static str, value: Value) {
        self.conditions.push(condition);
        self.values.push(value);
    }
}

/// `GLOB` also knows `[…]`, which the patterns of the settings do not.
pub(super) fn glob(pattern: &str) -> String {
    pattern.replace('[', "[[]")
}

/// What `%` and `_` would stand for in `LIKE` is not what somebody who looks for them means.
fn like(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len() + 2);
    pattern.push('%');
    for character in text.chars() {
        if matches!(character, '%' | '_' | '!') {
            pattern.push('!');
        }
        pattern.push(character);
    }
    pattern.push('%');
    pattern
}

pub(super) fn call_row(row: &Row<'_>) -> rusqlite::Result<CallRow> {
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
        sent: span(row.get(18)?),
        head: span(row.get(19)?),
        upstream_ended: span(row.get(20)?),
        reserved_nanos: row.get(21)?,
        account: Account::read(row, 22)?,
    })
}
