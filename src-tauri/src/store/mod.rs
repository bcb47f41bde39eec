//! The record: one row for every call, in SQLite, never in a call's way.
//!
//! A call hands over what is known ([`Store::opened`], [`Store::finished`]) and goes on; one
//! writer thread commits in batches, with the sums of each quarter-hour ([`rollup`]), and keeps the
//! log within its age and size; readers ([`queries`]) have connections of their own.

pub mod bodies;
mod checkup;
mod database;
mod folder_lock;
mod inbox;
pub(crate) mod json;
pub mod latency;
mod migrate;
pub mod pages;
pub mod queries;
pub mod repeats;
mod reprice;
mod retention;
pub mod rollup;
pub mod series;
pub mod spend;
pub mod spend_report;
mod writer;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ulid::Ulid;

use crate::clock::{Clock, WallTime};
use crate::policy::money::Nanodollars;
use crate::policy::usage::Usage;
use crate::settings::LogSettings;
use bodies::Body;
use inbox::Desk;
use queries::{CallRow, ReadError, Reader};
use reprice::PriceOf;
pub use reprice::{Priced, Unpriced};

/// The database's name in the data folder.
pub const DATABASE_FILE: &str = "traygate.db";

/// How long [`Store::close`] waits for the writer: far longer than its last attempts take, so that
/// only a disk that hangs runs into it.
const CLOSE_LIMIT: Duration = Duration::from_secs(20);

/// Names one call, in `x-traygate-call` and in the record. Sorts by the time of its making, to
/// the millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub Ulid);

impl CallId {
    /// A new id for a call that came at `wall`: its milliseconds and 80 random bits.
    pub fn new(wall: WallTime) -> Self {
        let micros = u64::try_from(wall.0).unwrap_or(0);
        Self(Ulid::from_datetime(
            SystemTime::UNIX_EPOCH + Duration::from_micros(micros),
        ))
    }

    /// The smallest id of a call that came at `wall` or later: where a range of time begins.
    pub fn first_at(wall: WallTime) -> Self {
        Self(Ulid::from_parts(
            u64::try_from(wall.unix_millis()).unwrap_or(0),
            0,
        ))
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.array_to_str(&mut [0; ulid::ULID_LEN]))
    }
}

impl FromStr for CallId {
    type Err = ulid::DecodeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ulid::from_string(text).map(Self)
    }
}

/// What dedup made of a call; the value of `x-traygate-dedup`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DedupLabel {
    /// It went upstream, and others may share its answer.
    Miss,
    /// It shared the answer of a call in flight.
    Joined,
    /// It got a kept answer.
    Cached,
    /// It took no part.
    Off,
}

impl DedupLabel {
    /// The word on the wire and in the record.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Miss => "miss",
            Self::Joined => "joined",
            Self::Cached => "cached",
            Self::Off => "off",
        }
    }
}

/// Who pays for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Billing {
    /// Paid by the token.
    Metered,
    /// On a subscription: its list value is shown, and counts neither as spend nor as savings.
    Plan,
    /// A local provider.
    Free,
    /// Tunnelled: what it costs cannot be read.
    Unmetered,
}

impl Billing {
    /// The word in the record.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Metered => "metered",
            Self::Plan => "plan",
            Self::Free => "free",
            Self::Unmetered => "unmetered",
        }
    }
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The client got a whole answer.
    Completed,
    /// The provider could not be reached, or answered with an error.
    UpstreamError,
    /// One of our timeouts cut it.
    Timeout,
    /// The answer broke off, or carried an error event.
    BrokenStream,
    /// The client hung up first.
    ClientLeft,
    /// A person or the end of the program stopped it.
    Stopped,
    /// A guard said no: queue, breaker, budget, mode.
    Refused,
    /// It was open when the process died. Written at the next start.
    Interrupted,
    /// A fault of Traygate's own.
    InternalError,
}

impl Outcome {
    /// Every outcome, in the order of their declaration.
    pub const ALL: [Self; 9] = [
        Self::Completed,
        Self::UpstreamError,
        Self::Timeout,
        Self::BrokenStream,
        Self::ClientLeft,
        Self::Stopped,
        Self::Refused,
        Self::Interrupted,
        Self::InternalError,
    ];

    /// Whether something failed, not merely ended early or was refused.
    pub const fn is_error(self) -> bool {
        matches!(
            self,
            Self::UpstreamError | Self::Timeout | Self::BrokenStream | Self::InternalError
        )
    }

    /// The word in the record.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::UpstreamError => "upstream_error",
            Self::Timeout => "timeout",
            Self::BrokenStream => "broken_stream",
            Self::ClientLeft => "client_left",
            Self::Stopped => "stopped",
            Self::Refused => "refused",
            Self::Interrupted => "interrupted",
            Self::InternalError => "internal_error",
        }
    }
}

/// What is known when a call has been identified.
///
/// Names come from clients, so the store keeps at most 256 bytes of each.
#[derive(Clone, Debug)]
pub struct CallStart {
    /// The call's id.
    pub id: CallId,
    /// When it came.
    pub started: WallTime,
    /// The provider's name in the settings.
    pub provider: Arc<str>,
    /// A generation route by its name (`chat/completions`), else method and path
    /// (`POST /v1/files`).
    pub route: Cow<'static, str>,
    /// The model as the client spelled it.
    pub model: Option<Arc<str>>,
    /// The tool that called.
    pub tool: Arc<str>,
    /// Who pays.
    pub billing: Billing,
    /// Whether it asked for a stream.
    pub streaming: bool,
    /// Its part in dedup.
    pub dedup: DedupLabel,
    /// The request key, where it was reckoned.
    pub key: Option<[u8; 32]>,
    /// What a budget holds for it until its cost is known: if the process dies, that is taken for
    /// its cost.
    pub reserved: Option<Nanodollars>,
}

/// What is known at a call's end.
#[derive(Clone, Debug)]
pub struct CallEnd {
    /// The start, whole: a call that begins and ends within a batch is a single insert.
    pub start: CallStart,
    /// The status the client was sent; `None` if it was sent none.
    pub status: Option<u16>,
    /// What became of it.
    pub outcome: Outcome,
    /// From its coming to the first content.
    pub first_token: Option<Duration>,
    /// Spent waiting for a permit.
    pub queued: Duration,
    /// From its coming to its last byte.
    pub duration: Duration,
    /// From its coming to the upstream request; `None` if this call caused none.
    pub sent: Option<Duration>,
    /// From its coming to the first byte of the upstream's answer, or to its head if it had none.
    pub head: Option<Duration>,
    /// From its coming to the end of what the upstream sent, or of waiting for it.
    pub upstream_ended: Option<Duration>,
    /// What went wrong, in words; the store keeps the first 2 kB.
    pub error: Option<String>,
    /// Tokens of the upstream call that it caused; `None` for calls that caused none, and where
    /// they are not known.
    pub usage: Option<Usage>,
    /// What it cost and saved.
    pub money: Money,
}

/// What a call cost and saved. A model without a price is unpriced, never $0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Money {
    /// What it adds to the bill; `None` while that is not known or the model has no price.
    pub cost: Option<Nanodollars>,
    /// What it would have cost by the list: a subscription's call shows it. Equal to `cost` for
    /// metered calls.
    pub list: Option<Nanodollars>,
    /// What a joined or kept answer would have cost.
    pub saved: Option<Nanodollars>,
    /// It was to be paid for, and its model has no price. On a joined or kept answer: what it
    /// saved is not known for that reason, though it cost nothing.
    pub unpriced: bool,
    /// The provider itself told what it cost: no price of ours changes that.
    pub reported: bool,
    /// The tier of service that was asked for, where it has prices of its own.
    pub tier: Option<&'static str>,
}

/// Why no store can be had, and the program has to stop.
///
/// Everything else (no room, no right to write, a newer database) lets the proxy serve without a
/// record: see [`StoreHealth`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process works on this folder.
    #[error(
        "another Traygate{} already uses the data folder {}; stop it, or give this one another with --data-dir",
        pid.map(|pid| format!(" (process {pid})")).unwrap_or_default(),
        folder.display()
    )]
    InUse {
        /// Its process id, where the lock file could be read.
        pid: Option<u32>,
        /// The folder.
        folder: PathBuf,
    },
}

/// How the record fares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreHealth {
    /// Whether a database is open for writing.
    pub recording: bool,
    /// Calls that wait in memory for the next commit.
    pub pending_rows: usize,
    /// Calls that will never be on record: the wait was full, or the end came first.
    pub dropped_rows: u64,
    /// Why rows wait, in words, or why the file may be damaged; `None` once a commit has worked
    /// again, or the file has been read through.
    pub last_error: Option<String>,
    /// What a person should know though it works: a damaged log was set aside, say.
    pub notice: Option<String>,
    /// Bodies that were not kept: too many waited, or they could not be written.
    pub dropped_bodies: u64,
    /// Bytes of the database and its write-ahead log, when they were last looked at.
    pub bytes: u64,
    /// What a person should do something about though calls are recorded: another program keeps
    /// the log from shrinking, say. `None` once that is over.
    pub warning: Option<String>,
}

/// The record's handle: cheap to clone, never slow, never failing.
///
/// When the last handle is dropped the writer commits what it holds and ends; [`Store::close`]
/// waits for that.
#[derive(Clone, Debug)]
pub struct Store {
    desk: Arc<OpenDesk>,
    folder: Arc<Path>,
}

/// Tells the writer to end when the last handle goes.
#[derive(Debug)]
struct OpenDesk(Arc<Desk>);

impl Drop for OpenDesk {
    fn drop(&mut self) {
        self.0.ask_to_close();
    }
}

impl Store {
    /// Opens the record in `data_dir`, creating both where they are missing, marks calls that an
    /// earlier process left open as `interrupted`, and starts the writer.
    ///
    /// A damaged database is set aside, an older one migrated after a copy was made. A folder
    /// that cannot be written, a locked or a newer database is no error: the store runs on
    /// memory, says so in [`Store::health`] and tries again now and then.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process works on the folder.
    pub fn open(data_dir: &Path, clock: Clock) -> Result<Self, StoreError> {
        let desk = Arc::new(Desk::default());
        writer::start(data_dir, clock, Arc::clone(&desk))?;
        Ok(Self {
            desk: Arc::new(OpenDesk(desk)),
            folder: data_dir.into(),
        })
    }

    /// The data folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A reader of the record as it is on disk. Opened anew each time, since a damaged database
    /// may have been set aside meanwhile. [`Store::read`] also tells the writer of damage.
    ///
    /// # Errors
    /// As [`Reader::open`].
    fn reader(&self) -> Result<Reader, ReadError> {
        Reader::open(&self.folder)
    }

    /// Reads the record as it is on disk; blocks meanwhile.
    ///
    /// Where it meets what looks like damage, the writer has the whole file read through, and sets
    /// it aside if that is true.
    ///
    /// # Errors
    /// As [`Reader::open`], and those of `read`.
    pub fn read<T>(
        &self,
        read: impl FnOnce(&Reader) -> Result<T, ReadError>,
    ) -> Result<T, ReadError> {
        let result = self.reader().and_then(|reader| read(&reader));
        if let Err(error) = &result
            && error.may_be_damage()
        {
            self.desk.0.suspect(&error.to_string());
        }
        result
    }

    /// A call that has ended and waits in memory to be written. One that is not here is on record
    /// already, if it has ended: look here first.
    pub fn pending(&self, id: CallId) -> Option<CallRow> {
        self.desk.0.pending(id).as_ref().map(CallRow::from)
    }

    /// Hands over a call that has been identified; again once a budget has reserved something for
    /// it. Moves the value and returns.
    pub fn opened(&self, start: CallStart) {
        self.desk.0.opened(start);
    }

    /// Hands over a call that has ended. Moves the value and returns; it is committed within
    /// 50 ms plus the time of a commit.
    pub fn finished(&self, end: CallEnd) {
        self.desk.0.finished(end);
    }

    /// Prices the calls whose model had no price, now that there may be one: cost, list value and
    /// what those that shared their answers saved, and all sums with them. `price` says what a
    /// call comes to, `None` if its model still has none; `priced` is told what each call adds to
    /// the bill, once that is on record.
    ///
    /// Returns at once; the writer does it bit by bit between rows. Asked again meanwhile, it
    /// begins anew with the new prices. What the end of the program cuts short is done when it is
    /// asked again, so ask at each start too: where nothing is unpriced that costs nothing.
    pub fn reprice(
        &self,
        price: impl Fn(&Unpriced<'_>) -> Option<Nanodollars> + Send + Sync + 'static,
        priced: impl Fn(&Priced) + Send + Sync + 'static,
    ) {
        self.desk.0.reprice(PriceOf::new(price, priced));
    }

    /// Hands over what was asked and answered, its credentials taken out: only where a person
    /// wants bodies kept, since the store keeps all it is given. Moves the value and returns;
    /// more than [`bodies::MAX_BODY`] is cut off, and past 64 MB of waiting bodies they are
    /// dropped.
    pub fn body(&self, body: Body) {
        self.desk.0.body(body);
    }

    /// Says how much is kept, from now on; until it is said, everything is. What is too much goes
    /// little by little.
    pub fn configure(&self, settings: LogSettings) {
        self.desk.0.configure(settings);
    }

    /// How the record fares at this moment.
    pub fn health(&self) -> StoreHealth {
        self.desk.0.health()
    }

    /// Blocks until everything handed over so far is committed, repricing included, at most
    /// `limit`; says whether it is.
    pub fn flush(&self, limit: Duration) -> bool {
        self.desk.0.flush(limit)
    }

    /// Commits what waits, folds the write-ahead log into the database and ends the writer;
    /// blocks until then. Calls that end later are counted as dropped. Safe to call again.
    pub fn close(&self) {
        self.desk.0.ask_to_close();
        self.desk.0.wait_closed(CLOSE_LIMIT);
    }
}
