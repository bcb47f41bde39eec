//! The one thread that writes: takes what was handed over and commits it, at most every 50 ms.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rusqlite::{
    CachedStatement, Connection, ErrorCode, OptionalExtension as _, ToSql, Transaction,
    TransactionBehavior, params,
};
use tracing::{info, warn};

use super::bodies::{self, Body, BodyWriter};
use super::checkup::{Checkup, Verdict};
use super::database::{self, OpenError};
use super::folder_lock::{FolderLock, LockError};
use super::inbox::{Batch, Desk, Turn, Wait};
use super::reprice::Repricing;
use super::retention::Upkeep;
use super::rollup::{self, Rollup};
use super::spend::{ACCOUNT_COLUMNS, Account};
use super::{CallEnd, CallStart, DATABASE_FILE, Outcome, StoreError};
use crate::clock::Clock;

/// How long a batch gathers. Most of what a `kill -9` may cost: the promise is 200 ms.
const GATHER: Duration = Duration::from_millis(50);
/// Between two steps of repricing, for rows to be committed.
const BREATHER: Duration = Duration::from_millis(10);
/// The longest pause before a failed commit is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause before a file that cannot be opened is tried again.
const LONGEST_PAUSE_UNOPENED: Duration = Duration::from_secs(10);
/// Last attempts, and the pause between them, when the program ends while the file is locked.
const LAST_ATTEMPTS: u32 = 20;
const LAST_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of a name (model, tool, route) that are kept: they come from clients.
const MAX_NAME: usize = 256;

/// Opens the file once, here and now, so that a folder in use stops the program; hands the rest
/// to the thread.
pub(super) fn start(data_dir: &Path, clock: Clock, desk: Arc<Desk>) -> Result<(), StoreError> {
    let mut writer = Writer {
        folder: data_dir.to_owned(),
        clock,
        desk,
        lock: None,
        database: None,
        identity: None,
        trusted: true,
        may_be_written: false,
        upkeep: Upkeep::new(clock.now()),
        checkup: Checkup::new(clock.now()),
        bodies: Vec::new(),
        body_writer: None,
        repricing: None,
        pause: GATHER,
        drops_told: 0,
    };
    match writer.open() {
        Err(Trouble::InUse(pid)) => {
            return Err(StoreError::InUse {
                pid,
                folder: data_dir.to_owned(),
            });
        }
        Err(trouble) => writer.tell(&trouble),
        Ok(()) => writer.desk.state(true, None),
    }
    let desk = Arc::clone(&writer.desk);
    let thread = thread::Builder::new().name("traygate-record".to_owned());
    if let Err(error) = thread.spawn(move || writer.run()) {
        warn!(%error, "no thread for the call log: calls are not recorded");
        desk.close(Some(format!("no thread for the call log: {error}")));
    }
    Ok(())
}

struct Writer {
    folder: PathBuf,
    clock: Clock,
    desk: Arc<Desk>,
    lock: Option<FolderLock>,
    database: Option<Connection>,
    /// The file that `database` writes to.
    identity: Option<(u64, u64)>,
    /// A commit has worked since the file was last set aside. Without one, a disk that damages
    /// all it is given would be filled with files set aside.
    trusted: bool,
    /// Ends may be on record before they are written: a commit was reported as failed, or the
    /// file was opened anew and calls still open were marked as interrupted. Then each is looked
    /// up first, so that it is summed up once.
    may_be_written: bool,
    upkeep: Upkeep,
    checkup: Checkup,
    /// Taken and not yet written.
    bodies: Vec<Body>,
    /// Made for the first body.
    body_writer: Option<BodyWriter>,
    /// Goes on between commits.
    repricing: Option<Repricing>,
    pause: Duration,
    drops_told: u64,
}

/// Why rows have to wait.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(
        "another Traygate{} uses the data folder",
        .0.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse(Option<u32>),
    #[error("the data folder {} cannot be written: {error}", folder.display())]
    Folder {
        folder: PathBuf,
        error: std::io::Error,
    },
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the call log cannot be written: {0}")]
    Write(#[from] rusqlite::Error),
}

impl Writer {
    fn run(mut self) {
        // However the thread ends, nobody waits for it in vain.
        let _end = EndOfWriter(Arc::clone(&self.desk));
        let mut spare = Batch::default();
        let mut failed = self.database.is_none();
        loop {
            let turn = self.desk.wait(if failed {
                Wait::Retry(self.pause)
            } else {
                Wait::ForRows {
                    gather: GATHER,
                    // Bodies are written a portion at a time, rows between them.
                    rest: if !self.bodies.is_empty() {
                        GATHER
                    } else if self.repricing.is_some() {
                        BREATHER
                    } else {
                        self.rests()
                    },
                }
            });
            self.desk.take(&mut spare);
            self.tell_drops();
            // Before the commit, which opens a fresh file where a damaged one was set aside.
            self.look_for_damage();
            failed = !self.try_commit();
            if turn == Turn::Close {
                self.end(&mut spare, failed);
                return;
            }
            // Rows come first: neither of these may keep them from being written.
            if !failed {
                self.write_bodies();
                self.reprice();
                self.tend();
            }
        }
    }

    /// How long there is nothing to do but to write what comes.
    fn rests(&self) -> Duration {
        let now = self.clock.now();
        let checkup = self.checkup.rests(self.desk.is_in_doubt(), now);
        self.upkeep.rests(now).min(checkup)
    }

    /// Commits the batch, or keeps it and lengthens the pause.
    fn try_commit(&mut self) -> bool {
        let result = self.commit().or_else(|trouble| {
            // A damaged file is no reason to lose the batch: the fresh one takes it.
            if self.replace_if_damaged(&trouble) {
                self.commit()
            } else {
                Err(trouble)
            }
        });
        match result {
            Ok(()) => {
                if self.pause > GATHER {
                    info!("the call log is written again");
                }
                self.pause = GATHER;
                self.desk.committed();
                true
            }
            Err(trouble) => {
                self.may_be_written = true;
                self.tell(&trouble);
                self.desk.kept();
                false
            }
        }
    }

    /// Writes a portion of the bodies that wait. Where they do not fit they are given up: a full
    /// disk's last pages are for rows.
    fn write_bodies(&mut self) {
        self.desk.take_bodies(&mut self.bodies);
        let portion = bodies::portion(&self.bodies);
        let Some(connection) = self.database.as_mut().filter(|_| portion > 0) else {
            return;
        };
        let written = match &mut self.body_writer {
            Some(writer) => writer.write(connection, &self.bodies[..portion]),
            none => BodyWriter::new()
                .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
                .and_then(|writer| {
                    none.insert(writer)
                        .write(connection, &self.bodies[..portion])
                }),
        };
        match &written {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => return,
            Err(error) => {
                warn!(%error, bodies = portion, "bodies are not kept");
                self.suspect_if_damage(error);
            }
            Ok(()) => self.upkeep.written(self.clock.now()),
        }
        let done: Vec<Body> = self.bodies.drain(..portion).collect();
        self.desk.bodies_done(&done, written.is_ok());
    }

    /// Prices some of the rows that had no price.
    fn reprice(&mut self) {
        if let Some(price) = self.desk.take_reprice() {
            self.repricing = Some(Repricing::new(price));
        }
        let (Some(repricing), Some(connection)) = (&mut self.repricing, &mut self.database) else {
            return;
        };
        let stepped = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .and_then(|transaction| {
                let stepped = repricing.step(&transaction)?;
                transaction.commit().map(|()| stepped)
            });
        match stepped {
            Ok(stepped) => {
                self.upkeep.written(self.clock.now());
                if repricing.done(stepped) {
                    self.repricing = None;
                    self.desk.repriced();
                }
            }
            // A lock passes. Anything else the next commit meets too, and says so; until then
            // these rows stay unpriced, and the next start asks again.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {}
            Err(error) => {
                warn!(%error, "calls on record stay without a price");
                self.repricing = None;
                self.desk.repriced();
            }
        }
    }

    /// Keeps the record within its age and size.
    fn tend(&mut self) {
        let now = self.clock.now();
        if let Some(settings) = self.desk.settings() {
            self.upkeep.configure(settings, now);
        }
        let Some(connection) = &mut self.database else {
            return;
        };
        let path = self.folder.join(DATABASE_FILE);
        match self.upkeep.step(connection, &path, now, self.clock.wall()) {
            Ok(Some(tended)) => self.desk.tended(tended),
            Ok(None) => {}
            // Whatever else it is, the next commit meets it too, and says so.
            Err(error) => {
                info!(%error, "the call log is not made smaller");
                self.suspect_if_damage(&error);
            }
        }
    }

    /// Has the file read through when that is due, and sets it aside if it was found damaged.
    fn look_for_damage(&mut self) {
        let now = self.clock.now();
        let path = self.folder.join(DATABASE_FILE);
        let is_ours = self.database.is_some() && database::identity(&path) == self.identity;
        match self.checkup.verdict(now).filter(|_| is_ours) {
            Some(Verdict::Sound { answers: true }) => self.desk.doubt(None),
            Some(Verdict::Damaged(reason)) => {
                if !self.replace(&reason) {
                    self.desk.doubt(Some(format!(
                        "the call log is damaged ({reason}) and could not be set aside: stop \
                         Traygate and move {} away",
                        path.display()
                    )));
                }
            }
            Some(Verdict::Sound { answers: false }) | None => {}
        }
        if self.database.is_some() {
            let in_doubt = self.desk.is_in_doubt();
            self.checkup.begin_if_due(&path, in_doubt, now, &self.desk);
        }
    }

    /// For what is met beside commits: it may pass, and nothing has to be written at once.
    fn suspect_if_damage(&self, error: &rusqlite::Error) {
        if database::is_damage(error) {
            self.desk.suspect(&error.to_string());
        }
    }

    fn commit(&mut self) -> Result<(), Trouble> {
        self.leave_a_file_that_is_gone();
        if self.database.is_none() {
            self.open()?;
        }
        let Some(connection) = &mut self.database else {
            return Ok(());
        };
        let batch = self.desk.batch();
        if batch.is_empty() {
            return Ok(());
        }
        // Immediate: a lock held elsewhere shows here, before any work.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        insert_opened(&transaction, &batch.opened)?;
        let mut rollup = Rollup::default();
        let mut insert = InsertEnded::prepare(&transaction)?;
        for end in &batch.ended {
            // One that is written already stays as it is: it may have been repriced since.
            if !self.may_be_written || is_first_end(&transaction, end)? {
                let account = Account::of(end);
                rollup.count(end, &account);
                insert.row(end, &account)?;
            }
        }
        drop(insert);
        rollup.write(&transaction)?;
        transaction.commit()?;
        self.trusted = true;
        self.checkup.written();
        self.upkeep.written(self.clock.now());
        Ok(())
    }

    /// Makes the folder, takes its lock, opens the file; a damaged one is set aside first.
    fn open(&mut self) -> Result<(), Trouble> {
        if self.lock.is_none() {
            let folder_trouble = |error| Trouble::Folder {
                folder: self.folder.clone(),
                error,
            };
            fs::create_dir_all(&self.folder).map_err(folder_trouble)?;
            self.lock = Some(FolderLock::take(&self.folder).map_err(|error| match error {
                LockError::InUse(pid) => Trouble::InUse(pid),
                LockError::Io(error) => folder_trouble(error),
            })?);
        }
        let path = self.folder.join(DATABASE_FILE);
        let opened = database::open(&path, self.clock.wall()).or_else(|error| {
            if let OpenError::Damaged(reason) = &error
                && self.set_aside(&path, reason)
            {
                database::open(&path, self.clock.wall())
            } else {
                Err(error)
            }
        });
        self.database = Some(opened?);
        // Not the first time that this process opens one.
        self.may_be_written |= self.identity.is_some();
        self.identity = database::identity(&path);
        Ok(())
    }

    /// A person may clear the log by deleting it, or put a copy in its place. The lock goes too:
    /// its file may have gone with the folder.
    fn leave_a_file_that_is_gone(&mut self) {
        let path = self.folder.join(DATABASE_FILE);
        if self.database.is_some() && database::identity(&path) != self.identity {
            warn!(path = %path.display(), "the call log was deleted or replaced; opening it anew");
            self.desk.notice(format!(
                "The call log {} was deleted or replaced while Traygate ran. Calls from then on \
                 are recorded in the file that is there now.",
                path.display()
            ));
            self.desk.doubt(None);
            self.checkup.stop();
            if let Some(connection) = self.database.take() {
                database::close_as_it_is(connection);
            }
            self.lock = None;
        }
    }

    fn replace_if_damaged(&mut self, trouble: &Trouble) -> bool {
        match trouble {
            Trouble::Write(error) if database::is_damage(error) => self.replace(&error.to_string()),
            _ => false,
        }
    }

    /// Leaves a damaged file and moves it out of the way.
    fn replace(&mut self, reason: &str) -> bool {
        if !self.trusted {
            return false;
        }
        self.checkup.stop();
        if let Some(connection) = self.database.take() {
            database::close_as_it_is(connection);
        }
        self.set_aside(&self.folder.join(DATABASE_FILE), reason)
    }

    fn set_aside(&mut self, path: &Path, reason: &str) -> bool {
        if !self.trusted {
            return false;
        }
        match database::set_aside(path, self.clock.wall()) {
            Ok(aside) => {
                self.trusted = false;
                self.desk.doubt(None);
                warn!(reason, aside = %aside.display(), "damaged call log set aside");
                self.desk.notice(format!(
                    "The call log was damaged ({reason}). It was set aside as {}, and a new one begun.",
                    aside.display()
                ));
                true
            }
            Err(error) => {
                warn!(reason, %error, "damaged call log could not be set aside");
                false
            }
        }
    }

    /// Commits what came last, and leaves one plain file behind.
    fn end(mut self, spare: &mut Batch, mut failed: bool) {
        self.checkup.stop();
        // Without a file there is nothing to hope for; a lock may pass.
        let attempts = if self.database.is_some() {
            LAST_ATTEMPTS
        } else {
            0
        };
        for _ in 0..attempts {
            if !failed {
                break;
            }
            thread::sleep(LAST_PAUSE);
            self.desk.take(spare);
            failed = !self.try_commit();
        }
        let lost = self.desk.batch().ended.len();
        if failed && lost > 0 {
            warn!(rows = lost, "the call log ends without its last rows");
        }
        while !failed && self.database.is_some() {
            let waiting = self.bodies.len();
            self.write_bodies();
            if self.bodies.is_empty() || self.bodies.len() == waiting {
                break;
            }
        }
        self.desk.bodies_done(&self.bodies, false);
        if let Some(connection) = self.database.take() {
            // As far as readers let it; what is left is folded in by whoever closes last.
            let folded = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
            if let Err(error) = folded {
                info!(%error, "the call log keeps its write-ahead log");
            }
        }
    }

    /// Says once what the trouble is; later attempts only lengthen the pause.
    fn tell(&mut self, trouble: &Trouble) {
        if self.pause == GATHER {
            warn!(error = %trouble, "calls wait in memory");
        }
        let longest = if self.database.is_some() {
            LONGEST_PAUSE
        } else {
            LONGEST_PAUSE_UNOPENED
        };
        self.pause = (self.pause * 2).min(longest);
        self.desk
            .state(self.database.is_some(), Some(trouble.to_string()));
    }

    fn tell_drops(&mut self) {
        let dropped = self.desk.dropped();
        if dropped > self.drops_told {
            warn!(
                dropped,
                "too many calls wait for the call log: some are not recorded"
            );
            self.drops_told = dropped;
        }
    }
}

struct EndOfWriter(Arc<Desk>);

impl Drop for EndOfWriter {
    fn drop(&mut self) {
        self.0.close(
            thread::panicking()
                .then(|| "the call log's writer failed; restart Traygate".to_owned()),
        );
    }
}

fn insert_opened(transaction: &Transaction<'_>, starts: &[CallStart]) -> rusqlite::Result<()> {
    if starts.is_empty() {
        return Ok(());
    }
    // Handed over again with a reservation, an open row takes it; an ended one has its own cost.
    let mut insert = transaction.prepare_cached(
        "INSERT INTO calls (id, started_us, provider, route, model, tool, billing,
           streaming, dedup, request_key, reserved_nanos)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
         ON CONFLICT (id) DO UPDATE SET reserved_nanos = excluded.reserved_nanos
           WHERE outcome IS NULL",
    )?;
    for start in starts {
        insert.execute(params![
            &*start.id.0.array_to_str(&mut [0; ulid::ULID_LEN]),
            start.started.0,
            name(&start.provider),
            name(&start.route),
            start.model.as_deref().map(name),
            name(&start.tool),
            start.billing.as_str(),
            start.streaming,
            start.dedup.as_str(),
            start.key.as_ref().map(<[u8; 32]>::as_slice),
            start.reserved.map(|reserved| reserved.0),
        ])?;
    }
    Ok(())
}

/// Writes ended calls.
struct InsertEnded<'transaction>(CachedStatement<'transaction>);

impl<'transaction> InsertEnded<'transaction> {
    fn prepare(transaction: &'transaction Transaction<'_>) -> rusqlite::Result<Self> {
        // REPLACE takes the place of an open row and gives it a new `seq`, behind all that ended
        // before.
        let insert = transaction.prepare_cached(&format!(
            "INSERT OR REPLACE INTO calls (id, started_us, provider, route, model, tool, billing,
               streaming, dedup, request_key, outcome, status, upstream_call, first_token_us,
               queued_us, duration_us, sent_us, head_us, upstream_ended_us, error,
               {ACCOUNT_COLUMNS})
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
               ?, ?, ?, ?, ?, ?)"
        ))?;
        Ok(Self(insert))
    }

    fn row(&mut self, end: &CallEnd, account: &Account) -> rusqlite::Result<()> {
        let insert = &mut self.0;
        let start = &end.start;
        let id = start.id.0.array_to_str(&mut [0; ulid::ULID_LEN]).to_owned();
        let values: [&dyn ToSql; 20] = [
            &id,
            &start.started.0,
            &name(&start.provider),
            &name(&start.route),
            &start.model.as_deref().map(name),
            &name(&start.tool),
            &start.billing.as_str(),
            &start.streaming,
            &start.dedup.as_str(),
            &start.key.as_ref().map(<[u8; 32]>::as_slice),
            &end.outcome.as_str(),
            &end.status,
            &end.sent.is_some(),
            &end.first_token.map(micros),
            &micros(end.queued),
            &micros(end.duration),
            &end.sent.map(micros),
            &end.head.map(micros),
            &end.upstream_ended.map(micros),
            &end.error.as_deref(),
        ];
        for (value, parameter) in values.iter().zip(1..) {
            insert.raw_bind_parameter(parameter, value)?;
        }
        account.bind(insert, values.len() + 1)?;
        insert.raw_execute().map(drop)
    }
}

/// Whether an end is not on record yet. One that was taken for interrupted is taken back.
fn is_first_end(transaction: &Transaction<'_>, end: &CallEnd) -> rusqlite::Result<bool> {
    let on_record: Option<(Option<String>, Account)> = transaction
        .prepare_cached(&format!(
            "SELECT outcome, {ACCOUNT_COLUMNS} FROM calls WHERE id = ?1"
        ))?
        .query_row(
            [&*end.start.id.0.array_to_str(&mut [0; ulid::ULID_LEN])],
            |row| Ok((row.get(0)?, Account::read(row, 1)?)),
        )
        .optional()?;
    let Some((Some(outcome), account)) = on_record else {
        return Ok(true);
    };
    if outcome != Outcome::Interrupted.as_str() || end.outcome == Outcome::Interrupted {
        return Ok(false);
    }
    rollup::take_back_interrupted(transaction, &end.start, &account)?;
    Ok(true)
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// As much of a name as is kept.
pub(super) fn name(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_NAME)]
}
