//! Keeps the record within its age and size, a few milliseconds at a time, between commits.
//!
//! Bodies go first, then rows, the oldest first; roll-ups keep the totals. Pages that become free
//! are given back to the file system in small steps.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior, params};

use super::CallId;
use super::rollup;
use super::spend::QUARTERS_A_DAY;
use crate::clock::{Moment, WallTime};
use crate::settings::LogSettings;

/// How soon it is looked after something was written.
const AFTER_WRITES: Duration = Duration::from_secs(15);
/// How soon it is looked when nothing is written: rows and bodies age all the same.
const IDLE: Duration = Duration::from_secs(600);
/// Between two steps of a longer piece of work, for rows to be committed.
const BREATHER: Duration = Duration::from_millis(20);

/// Rows that are deleted in a step: two to four milliseconds.
const ROWS: usize = 500;
/// Bodies that are deleted in a step: each may be hundreds of pages.
const BODIES: usize = 20;
/// Pages that are given back in a step.
const PAGES: usize = 200;

/// The share of its bytes that the record is brought down to once it has passed them, so that not
/// every commit has something to delete.
const AIM: u64 = 95;

/// The write-ahead log's usual size is 4 MB. Past this, or a tenth of all there may be, it is
/// folded in and cut on purpose.
const WAL_LARGE: u64 = 16 << 20;
/// Past this, whoever keeps it from being folded in is complained of.
const WAL_COMPLAINT: u64 = 64 << 20;

/// While rows of the last day would have to go, quarter-hours of earlier days are put together
/// first.
const DAY: Duration = Duration::from_secs(86_400);
/// Quarter-hours of days this long ago are put together in any case.
const QUARTERS_KEPT: Duration = DAY.saturating_mul(400);

/// What was found and done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tended {
    /// Bytes of the database and its write-ahead log.
    pub(super) bytes: u64,
    /// What a person should know.
    pub(super) warning: Option<String>,
}

/// Keeps one database small.
#[derive(Debug)]
pub(super) struct Upkeep {
    /// `None` until it is said how much is kept: then everything is.
    settings: Option<LogSettings>,
    due: Moment,
    steady: SteadyClock,
    /// The record is over its size, and being brought down to its aim.
    shrinking: bool,
}

impl Upkeep {
    pub(super) fn new(now: Moment) -> Self {
        Self {
            settings: None,
            due: now,
            steady: SteadyClock::default(),
            shrinking: false,
        }
    }

    /// Applies at once.
    pub(super) fn configure(&mut self, settings: LogSettings, now: Moment) {
        self.settings = Some(settings);
        self.due = now;
    }

    /// How long nothing has to be done.
    pub(super) fn rests(&self, now: Moment) -> Duration {
        self.due - now
    }

    /// Rows or bodies have been written.
    pub(super) fn written(&mut self, now: Moment) {
        self.due = self.due.min(now + AFTER_WRITES);
    }

    /// Looks, and does one small piece of what there is to do. `None` while it rests.
    ///
    /// # Errors
    /// If SQLite cannot; it rests before it tries again.
    pub(super) fn step(
        &mut self,
        connection: &mut Connection,
        path: &Path,
        now: Moment,
        wall: WallTime,
    ) -> rusqlite::Result<Option<Tended>> {
        if now < self.due {
            return Ok(None);
        }
        self.due = now + IDLE;
        let is_steady = self.steady.look(now, wall);
        let large = match &self.settings {
            Some(settings) => WAL_LARGE.min(settings.max_bytes / 10),
            None => WAL_LARGE,
        };
        let (wal, warning) = fold_in(connection, path, large)?;
        // A log that cannot be folded in grows with every page that is changed.
        let worked = wal < WAL_COMPLAINT
            && match self.settings.clone() {
                Some(settings) => {
                    (is_steady && delete_aged(connection, &settings, wall)?)
                        || self.shrink(connection, &settings, wal, wall)?
                        || fold_old_quarters(connection, wall, QUARTERS_KEPT)?
                        || give_back(connection, settings.max_bytes)?
                }
                None => false,
            };
        if worked {
            self.due = now + BREATHER;
        }
        Ok(Some(Tended {
            bytes: size_of(path) + size_of(&wal_of(path)),
            warning,
        }))
    }

    /// Deletes some of the oldest if the record is too large.
    fn shrink(
        &mut self,
        connection: &mut Connection,
        settings: &LogSettings,
        wal: u64,
        wall: WallTime,
    ) -> rusqlite::Result<bool> {
        let pages = Pages::of(connection)?;
        let used = pages.used() + wal;
        let aim = settings.max_bytes / 100 * AIM;
        self.shrinking = used
            > if self.shrinking {
                aim
            } else {
                settings.max_bytes
            };
        if !self.shrinking {
            return Ok(false);
        }
        if delete_bodies(connection, ALL)? > 0 {
            return Ok(true);
        }
        let oldest: Option<String> = connection
            .prepare_cached("SELECT min(id) FROM calls")?
            .query_row([], |row| row.get(0))?;
        let is_of_the_last_day = oldest.is_none_or(|id| id >= first_id(before(wall, DAY)));
        Ok(
            (is_of_the_last_day && fold_old_quarters(connection, wall, DAY)?)
                || delete_rows(connection, ALL)? > 0,
        )
    }
}

/// Behind every id.
const ALL: &str = "~";

/// Folds a write-ahead log of more than `large` bytes into the database. Returns its size and, if a reader has kept it
/// from being folded in for long, a complaint.
fn fold_in(
    connection: &Connection,
    path: &Path,
    large: u64,
) -> rusqlite::Result<(u64, Option<String>)> {
    let wal = wal_of(path);
    if size_of(&wal) > large {
        // Without waiting for anybody; and only if that went well, cut it, which would wait.
        let is_folded = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
            Ok(row.get::<_, i64>(1)? == row.get::<_, i64>(2)?)
        })?;
        if is_folded {
            connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
        }
    }
    let size = size_of(&wal);
    let complaint = (size >= WAL_COMPLAINT).then(|| {
        format!(
            "Another program keeps the call log open for reading, so that its write-ahead log \
             cannot be folded in and has grown to {} MB ({}). It shrinks when that program is done.",
            size >> 20,
            wal.display()
        )
    });
    Ok((size, complaint))
}

fn delete_aged(
    connection: &Connection,
    settings: &LogSettings,
    wall: WallTime,
) -> rusqlite::Result<bool> {
    let kept = settings.bodies_retention.min(settings.retention);
    if delete_bodies(connection, &first_id(before(wall, kept)))? > 0 {
        return Ok(true);
    }
    Ok(delete_rows(connection, &first_id(before(wall, settings.retention)))? > 0)
}

fn delete_bodies(connection: &Connection, before: &str) -> rusqlite::Result<usize> {
    connection
        .prepare_cached(
            "DELETE FROM bodies WHERE seq IN
               (SELECT seq FROM bodies WHERE id < ?1 ORDER BY id LIMIT ?2)",
        )?
        .execute(params![before, BODIES as i64])
}

fn delete_rows(connection: &Connection, before: &str) -> rusqlite::Result<usize> {
    // An open call ends with its row. The last `seq` stays: the next is reckoned from it, and
    // whoever follows the log reads on from there.
    connection
        .prepare_cached(
            "DELETE FROM calls WHERE seq IN
               (SELECT seq FROM calls
                WHERE id < ?1 AND outcome IS NOT NULL AND seq < (SELECT max(seq) FROM calls)
                ORDER BY id LIMIT ?2)",
        )?
        .execute(params![before, ROWS as i64])
}

/// Puts the quarter-hours of the oldest day that ended `age` ago together into one.
fn fold_old_quarters(
    connection: &mut Connection,
    wall: WallTime,
    age: Duration,
) -> rusqlite::Result<bool> {
    let today = rollup::quarter_of(before(wall, age)).div_euclid(QUARTERS_A_DAY);
    let oldest: Option<i64> = connection
        .prepare_cached(
            "SELECT min(quarter) FROM rollups WHERE quarter % ?1 <> 0 AND quarter < ?2",
        )?
        .query_row([QUARTERS_A_DAY, today * QUARTERS_A_DAY], |row| row.get(0))?;
    let Some(oldest) = oldest else {
        return Ok(false);
    };
    let first = oldest.div_euclid(QUARTERS_A_DAY) * QUARTERS_A_DAY;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    rollup::put_together(&transaction, first, first + QUARTERS_A_DAY)?;
    transaction.commit()?;
    Ok(true)
}

/// Gives free pages back to the file system, save a few that the next rows will take.
fn give_back(connection: &Connection, max_bytes: u64) -> rusqlite::Result<bool> {
    let pages = Pages::of(connection)?;
    let spare = (max_bytes / 100 / pages.size.max(1)).min(1024);
    if pages.free <= spare {
        return Ok(false);
    }
    // A row for each page, which is given back when the row is asked for.
    let mut vacuum = connection.prepare(&format!("PRAGMA incremental_vacuum({PAGES})"))?;
    let mut freed = vacuum.query([])?;
    while freed.next()?.is_some() {}
    Ok(true)
}

/// How the file is used.
#[derive(Clone, Copy, Debug)]
struct Pages {
    count: u64,
    free: u64,
    /// Bytes.
    size: u64,
}

impl Pages {
    fn of(connection: &Connection) -> rusqlite::Result<Self> {
        let number = |pragma| -> rusqlite::Result<u64> {
            let number: i64 = connection.pragma_query_value(None, pragma, |row| row.get(0))?;
            Ok(u64::try_from(number).unwrap_or(0))
        };
        Ok(Self {
            count: number("page_count")?,
            free: number("freelist_count")?,
            size: number("page_size")?,
        })
    }

    fn used(self) -> u64 {
        self.count.saturating_sub(self.free) * self.size
    }
}

fn before(wall: WallTime, span: Duration) -> WallTime {
    let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    WallTime(wall.0.saturating_sub(micros))
}

fn first_id(time: WallTime) -> String {
    CallId::first_at(time).to_string()
}

fn size_of(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |file| file.len())
}

fn wal_of(database: &Path) -> PathBuf {
    super::database::beside(database, "-wal")
}

/// Whether the wall clock can be trusted with deleting: one that is set a year ahead by mistake,
/// if only for a minute, must not cost a year of calls.
#[derive(Debug, Default)]
struct SteadyClock {
    last: Option<(Moment, WallTime)>,
    /// When it was last seen to have been set.
    stepped: Option<Moment>,
}

impl SteadyClock {
    /// A clock that drifts or is corrected by less has not been set.
    const STEP: Duration = Duration::from_secs(600);
    /// How long it is not trusted after it was set: time to notice a mistake.
    const WAIT: Duration = Duration::from_secs(3600);

    /// Compares it with the monotonic clock.
    fn look(&mut self, now: Moment, wall: WallTime) -> bool {
        if let Some((then, then_wall)) = self.last.replace((now, wall)) {
            let passed = i64::try_from((now - then).as_micros()).unwrap_or(i64::MAX);
            let told = wall.0.saturating_sub(then_wall.0);
            if u128::from(told.abs_diff(passed)) > Self::STEP.as_micros() {
                self.stepped = Some(now);
            }
        }
        self.stepped.is_none_or(|at| now - at >= Self::WAIT)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use tempfile::TempDir;

    use super::super::bodies::{Body, MAX_BODY};
    use super::super::queries::Reader;
    use super::super::rollup::GroupFilter;
    use super::super::tests::{CLOCK, LONG, database, end, open, start, wait_until};
    use super::super::{CallStart, Store};
    use super::*;
    use crate::settings::BodyLog;

    /// 2026-09-21T14:13:20Z.
    const BEGIN: WallTime = WallTime(1_790_000_000_000_000);
    const MB: u64 = 1 << 20;

    fn keep(days: u32, max_bytes: u64) -> LogSettings {
        LogSettings {
            retention: DAY * days,
            max_bytes,
            bodies: BodyLog::All,
            bodies_retention: DAY * 7,
        }
    }

    fn after(span: Duration) -> WallTime {
        WallTime(BEGIN.0 + i64::try_from(span.as_micros()).expect("a time"))
    }

    fn call(at: WallTime) -> CallStart {
        CallStart {
            id: CallId::new(at),
            started: at,
            ..start()
        }
    }

    /// A body that does not compress.
    fn body(call: &CallStart, bytes: usize) -> Body {
        let mut state = call.id.0.random() as u64 | 1;
        let noise = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        Body {
            id: call.id,
            started: call.started,
            key: None,
            request: Bytes::from(noise.flatten().take(bytes).collect::<Vec<u8>>()),
            request_cut: false,
            response: Vec::new(),
            response_cut: false,
        }
    }

    /// `count` calls, `apart` from each other, the first at [`BEGIN`].
    fn fill(store: &Store, count: u32, apart: Duration) {
        for n in 0..count {
            store.finished(end(call(after(apart * n))));
        }
        assert!(store.flush(LONG));
    }

    fn connect(folder: &TempDir) -> Connection {
        Connection::open(database(folder.path())).expect("a database")
    }

    fn number(connection: &Connection, sql: &str) -> i64 {
        connection
            .query_row(sql, [], |row| row.get(0))
            .expect("a number")
    }

    fn count(connection: &Connection, table: &str) -> i64 {
        number(connection, &format!("SELECT count(*) FROM {table}"))
    }

    /// Does all there is to do at `wall`. Returns how many steps that took.
    fn tend(
        upkeep: &mut Upkeep,
        connection: &mut Connection,
        folder: &TempDir,
        wall: WallTime,
    ) -> u32 {
        let mut now = upkeep.due;
        for steps in 0..100_000 {
            let done = upkeep.step(connection, &database(folder.path()), now, wall);
            assert!(done.expect("a step").is_some());
            if upkeep.rests(now) == IDLE {
                return steps;
            }
            now = now + BREATHER;
        }
        panic!("it never rests");
    }

    fn upkeep(settings: LogSettings) -> Upkeep {
        let mut upkeep = Upkeep::new(Moment::default());
        upkeep.configure(settings, Moment::default());
        upkeep
    }

    fn calls_ever(folder: &TempDir) -> u64 {
        Reader::open(folder.path())
            .and_then(|reader| {
                reader.totals(WallTime(0), WallTime(i64::MAX), &GroupFilter::default())
            })
            .expect("totals")
            .calls
    }

    #[test]
    fn nothing_goes_until_it_is_said_how_much_is_kept() {
        let folder = TempDir::new().expect("a folder");
        fill(&open(folder.path()), 10, DAY);
        let mut connection = connect(&folder);
        let mut upkeep = Upkeep::new(Moment::default());
        tend(&mut upkeep, &mut connection, &folder, after(DAY * 10_000));
        assert_eq!(count(&connection, "calls"), 10);
    }

    #[test]
    fn rows_and_bodies_go_when_they_are_old_and_totals_stay() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        fill(&store, 2000, DAY / 20);
        for n in 0..100 {
            store.body(body(&call(after(DAY * n)), 1000));
        }
        store.opened(call(BEGIN));
        assert!(store.flush(LONG));
        let mut connection = connect(&folder);
        let mut upkeep = upkeep(keep(30, 500 * MB));
        let steps = tend(&mut upkeep, &mut connection, &folder, after(DAY * 100));
        // Twenty a day from day 70 on, and the one still open.
        assert_eq!(count(&connection, "calls"), 600 + 1);
        let oldest = "SELECT min(started_us) FROM calls WHERE outcome IS NOT NULL";
        assert_eq!(number(&connection, oldest), after(DAY * 70).0);
        assert_eq!(count(&connection, "bodies"), 7);
        assert_eq!(calls_ever(&folder), 2000);
        assert!(steps >= 3, "in small steps");

        // Bodies never outlive their calls.
        upkeep.configure(keep(2, 500 * MB), upkeep.due);
        tend(&mut upkeep, &mut connection, &folder, after(DAY * 100));
        assert_eq!(count(&connection, "bodies"), 2);
        assert_eq!(count(&connection, "calls"), 40 + 1);
    }

    #[test]
    fn the_last_seq_stays_when_all_rows_are_old() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        fill(&store, 10, DAY);
        let mut connection = connect(&folder);
        let last = number(&connection, "SELECT max(seq) FROM calls");
        tend(
            &mut upkeep(keep(1, MB)),
            &mut connection,
            &folder,
            after(DAY * 900),
        );
        assert_eq!(count(&connection, "calls"), 1);
        store.finished(end(call(after(DAY * 900))));
        assert!(store.flush(LONG));
        assert_eq!(number(&connection, "SELECT max(seq) FROM calls"), last + 1);
    }

    #[test]
    fn what_is_too_large_shrinks_bodies_first() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        fill(&store, 60_000, Duration::from_secs(20));
        for n in 0..60 {
            store.body(body(&call(after(DAY / 6 * n)), 200_000));
        }
        assert!(store.flush(LONG));
        let file = database(folder.path());
        store.close();
        let before = size_of(&file);
        assert!(before > 20 * MB, "{before}");
        let mut connection = connect(&folder);

        // Bodies are 12 MB of it.
        let wall = after(DAY * 14);
        tend(
            &mut upkeep(keep(900, before - 4 * MB)),
            &mut connection,
            &folder,
            after(DAY * 7),
        );
        assert_eq!(
            count(&connection, "calls"),
            60_000,
            "no row while there are bodies"
        );
        let bodies = count(&connection, "bodies");
        assert!((1..60).contains(&bodies), "{bodies}");
        let oldest = number(&connection, "SELECT min(started_us) FROM bodies");
        assert!(oldest > BEGIN.0, "the oldest first");

        let max = 8 * MB;
        tend(&mut upkeep(keep(900, max)), &mut connection, &folder, wall);
        assert_eq!(count(&connection, "bodies"), 0);
        let rows = count(&connection, "calls");
        assert!((1_000..60_000).contains(&rows), "{rows}");
        assert!(number(&connection, "SELECT min(started_us) FROM calls") > BEGIN.0);
        connection
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
            .expect("a checkpoint");
        let now = size_of(&file);
        assert!(
            now <= max && now > max / 2,
            "given back to the file system: {now}"
        );
        assert_eq!(calls_ever(&folder), 60_000);
    }

    #[test]
    fn rather_than_todays_rows_the_quarter_hours_of_old_days_go() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        // Forty days of many groups, and the last day's rows.
        for n in 0..40 * 96 {
            for tool in 0..8 {
                store.finished(end(CallStart {
                    tool: Arc::from(format!("tool-{tool}")),
                    ..call(after(Duration::from_secs(900) * n))
                }));
            }
        }
        assert!(store.flush(LONG));
        store.close();
        let wall = after(DAY * 40);
        let mut connection = connect(&folder);
        let rollups = count(&connection, "rollups");
        let mut upkeep = upkeep(keep(1, 500 * MB));
        tend(&mut upkeep, &mut connection, &folder, wall);
        let day = count(&connection, "calls");
        assert_eq!(count(&connection, "rollups"), rollups, "there is room");
        assert_eq!(day, 96 * 8);

        // Half of what there is: that many pages only roll-ups can give.
        let used = Pages::of(&connection).expect("pages").used();
        upkeep.configure(keep(1, used / 2), upkeep.due);
        tend(&mut upkeep, &mut connection, &folder, wall);
        assert_eq!(count(&connection, "calls"), day);
        assert!(count(&connection, "rollups") < rollups * 3 / 4);
        assert_eq!(calls_ever(&folder), 40 * 96 * 8);
        let today = wall.0 / 900_000_000 - 96;
        let kept = format!("SELECT count(*) FROM rollups WHERE quarter >= {today}");
        assert_eq!(number(&connection, &kept), 96 * 8, "the last day's stay");
    }

    #[test]
    fn a_reader_that_keeps_the_log_from_shrinking_is_told_of() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        store.configure(keep(90, 500 * MB));
        fill(&store, 10, DAY);
        let reader = connect(&folder);
        reader.execute_batch("BEGIN").expect("a transaction");
        assert_eq!(count(&reader, "calls"), 10);
        for n in 0..80 {
            store.body(body(&call(CLOCK.wall()), MAX_BODY));
            if n % 20 == 0 {
                assert!(store.flush(LONG));
            }
        }
        assert!(store.flush(LONG));
        store.configure(keep(90, 500 * MB));
        wait_until("a complaint", || store.health().warning.is_some());
        let warning = store.health().warning.unwrap_or_default();
        assert!(warning.contains("open for reading"), "{warning}");
        assert!(store.health().bytes > 80 * MB, "{}", store.health().bytes);

        drop(reader);
        store.configure(keep(90, 500 * MB));
        wait_until("its end", || store.health().warning.is_none());
        assert!(size_of(&wal_of(&database(folder.path()))) < WAL_LARGE);
    }

    #[test]
    fn settings_apply_to_a_running_store() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        fill(&store, 3000, Duration::from_secs(1));
        let connection = connect(&folder);
        store.configure(keep(36_500, 500 * MB));
        wait_until("a look", || store.health().bytes > 0);
        assert_eq!(count(&connection, "calls"), 3000);
        // Those of a past September are older than a day.
        store.configure(keep(1, 500 * MB));
        wait_until("the rows to go", || count(&connection, "calls") == 1);
        assert_eq!(calls_ever(&folder), 3000);
    }

    #[test]
    fn a_clock_that_was_set_is_not_trusted_with_deleting() {
        let mut clock = SteadyClock::default();
        let at = |secs| Moment::at(Duration::from_secs(secs));
        let wall = |secs: u64| after(Duration::from_secs(secs));
        assert!(clock.look(at(0), wall(0)));
        assert!(
            clock.look(at(600), wall(660)),
            "it was corrected by a minute"
        );
        assert!(
            !clock.look(at(1200), wall(1200 + 31_536_000)),
            "a year ahead"
        );
        assert!(!clock.look(at(1800), wall(1800)), "and back");
        assert!(!clock.look(at(5000), wall(5000)));
        assert!(clock.look(at(5400), wall(5400)), "an hour after");
        assert!(clock.look(at(90_000), wall(90_000)), "the machine slept");
        assert!(!clock.look(at(90_600), wall(87_000)), "an hour back");
    }
}
