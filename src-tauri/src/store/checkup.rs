//! Reads the whole record through, beside the writer: after the start, while it is written, and when
//! somebody met what looks like damage.
//!
//! The writer has the pages that it changes in its own memory: it may write into a damaged file for
//! hours, and what it wrote be lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rusqlite::{Connection, InterruptHandle, OpenFlags};
use tracing::info;

use super::database;
use super::inbox::Desk;
use crate::clock::Moment;

/// How soon it is read again when nothing is written.
const IDLE: Duration = Duration::from_secs(6 * 3600);
/// While it is written, a thousandth of the time goes into reading it, and not more than a
/// reading a minute. Half a gigabyte takes two seconds from memory: then it is every half-hour.
const PACE: u32 = 1000;
const SHORTEST: Duration = Duration::from_secs(60);
/// Between the end of a reading and the next on suspicion: a page that asks every second, and is
/// wrong about the damage, must not have the disk read all day.
const REST: Duration = Duration::from_secs(30);
/// How long it waits for another process's lock.
const BUSY: Duration = Duration::from_secs(2);

/// Between two interruptions of a reading that is no longer wanted.
const NUDGE: Duration = Duration::from_millis(1);

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// `answers`: there was a doubt when the reading began, and this settles it.
    Sound { answers: bool },
    /// Why, in words.
    Damaged(String),
}

/// When to read, and the reading under way.
pub(super) struct Checkup {
    due: Moment,
    /// When it may be read again if something is written.
    due_if_written: Moment,
    /// Not even a doubt begins another one before.
    rests_until: Moment,
    reading: Option<Reading>,
}

struct Reading {
    began: Moment,
    thread: JoinHandle<()>,
    interrupt: InterruptHandle,
    found: Receiver<rusqlite::Result<Option<String>>>,
    /// There was a doubt when it began: one that came later may be about pages it had passed.
    in_doubt: bool,
}

impl Checkup {
    pub(super) fn new(now: Moment) -> Self {
        Self {
            due: now,
            due_if_written: now,
            rests_until: now,
            reading: None,
        }
    }

    /// Rows have been written.
    pub(super) fn written(&mut self) {
        self.due = self.due.min(self.due_if_written);
    }

    /// How long there is nothing to do. The end of a reading wakes the writer.
    pub(super) fn rests(&self, in_doubt: bool, now: Moment) -> Duration {
        if self.reading.is_some() {
            Duration::MAX
        } else {
            self.next(in_doubt) - now
        }
    }

    fn next(&self, in_doubt: bool) -> Moment {
        if in_doubt { self.rests_until } else { self.due }
    }

    /// Begins to read the database at `path` if that is due and not under way.
    pub(super) fn begin_if_due(
        &mut self,
        path: &Path,
        in_doubt: bool,
        now: Moment,
        desk: &Arc<Desk>,
    ) {
        if self.reading.is_some() || now < self.next(in_doubt) {
            return;
        }
        match Reading::begin(path, in_doubt, now, Arc::clone(desk)) {
            Ok(reading) => self.reading = Some(reading),
            Err(error) => {
                info!(%error, "the call log is not read through");
                self.put_off(now);
            }
        }
    }

    /// What a reading that is over has found.
    pub(super) fn verdict(&mut self, now: Moment) -> Option<Verdict> {
        let found = match self.reading.as_ref()?.found.try_recv() {
            Ok(found) => Some(found),
            Err(TryRecvError::Empty) => return None,
            // It panicked.
            Err(TryRecvError::Disconnected) => None,
        };
        let reading = self.reading.take()?;
        let answers = reading.in_doubt;
        let pace = (now - reading.began).saturating_mul(PACE);
        self.due_if_written = now + pace.clamp(SHORTEST, IDLE);
        self.due = now + IDLE;
        if answers {
            self.rests_until = now + REST;
        }
        match found {
            Some(Ok(None)) => Some(Verdict::Sound { answers }),
            Some(Ok(Some(damage))) => {
                self.rests_until = now + REST;
                Some(Verdict::Damaged(damage))
            }
            Some(Err(error)) => {
                info!(%error, "the call log could not be read through");
                self.put_off(now);
                None
            }
            None => {
                self.put_off(now);
                None
            }
        }
    }

    fn put_off(&mut self, now: Moment) {
        self.due = now + REST;
        self.rests_until = self.due;
    }

    /// Ends a reading that is under way, and waits until its connection is closed: the file is
    /// about to be left.
    pub(super) fn stop(&mut self) {
        let Some(reading) = self.reading.take() else {
            return;
        };
        // Again and again: an interruption just before its statement begins is not heard.
        while !reading.thread.is_finished() {
            reading.interrupt.interrupt();
            thread::sleep(NUDGE);
        }
    }
}

impl Reading {
    fn begin(
        path: &Path,
        in_doubt: bool,
        now: Moment,
        desk: Arc<Desk>,
    ) -> Result<Self, BeginError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY)?;
        let interrupt = connection.get_interrupt_handle();
        let (tell, found) = mpsc::channel();
        let thread = thread::Builder::new().name("traygate-checkup".to_owned());
        let thread = thread.spawn(move || {
            // Nobody listens if the file has been left meanwhile.
            let _ = tell.send(database::damage(&connection));
            drop((connection, tell));
            desk.wake();
        })?;
        Ok(Self {
            began: now,
            thread,
            interrupt,
            found,
            in_doubt,
        })
    }
}

#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Thread(#[from] std::io::Error),
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::super::tests::{CLOCK, LONG, database as database_in, end, open, start};
    use super::*;

    const START: Moment = Moment::at(Duration::from_secs(1000));

    fn record() -> TempDir {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        for _ in 0..500 {
            store.finished(end(start()));
        }
        assert!(store.flush(LONG));
        store.close();
        folder
    }

    /// What is found if it is read at `now`; `None` if it is not.
    fn read(
        checkup: &mut Checkup,
        folder: &TempDir,
        in_doubt: bool,
        now: Moment,
    ) -> Option<Verdict> {
        let path = database_in(folder.path());
        checkup.begin_if_due(&path, in_doubt, now, &Arc::default());
        checkup.reading.as_ref()?;
        let begin = CLOCK.now();
        loop {
            if let Some(verdict) = checkup.verdict(now) {
                return Some(verdict);
            }
            assert!(CLOCK.now() - begin < LONG, "it ends");
            thread::yield_now();
        }
    }

    #[test]
    fn is_read_at_the_start_while_written_and_now_and_then() {
        let folder = record();
        let mut checkup = Checkup::new(START);
        let sound = Some(Verdict::Sound { answers: false });
        assert_eq!(read(&mut checkup, &folder, false, START), sound);
        assert_eq!(checkup.rests(false, START), IDLE);
        checkup.written();
        assert_eq!(checkup.rests(false, START), SHORTEST);
        let too_soon = START + (SHORTEST - Duration::from_nanos(1));
        assert_eq!(read(&mut checkup, &folder, false, too_soon), None);
        assert_eq!(read(&mut checkup, &folder, false, START + SHORTEST), sound);
        assert_eq!(checkup.rests(false, START + SHORTEST), IDLE);
    }

    #[test]
    fn a_doubt_is_answered_at_once_and_the_next_after_a_rest() {
        let folder = record();
        let mut checkup = Checkup::new(START);
        read(&mut checkup, &folder, false, START);
        let answered = Some(Verdict::Sound { answers: true });
        assert_eq!(read(&mut checkup, &folder, true, START), answered);
        assert_eq!(read(&mut checkup, &folder, true, START), None);
        assert_eq!(checkup.rests(true, START), REST);
        assert_eq!(read(&mut checkup, &folder, true, START + REST), answered);
    }

    #[test]
    fn damage_is_found_and_a_lack_of_the_file_is_none() {
        let folder = record();
        let path = database_in(folder.path());
        let mut bytes = fs::read(&path).expect("a file");
        let middle = bytes.len() / 8192 * 4096;
        bytes[middle..middle + 4096].fill(0xA5);
        fs::write(&path, bytes).expect("a file");
        let mut checkup = Checkup::new(START);
        let found = read(&mut checkup, &folder, false, START);
        assert!(matches!(found, Some(Verdict::Damaged(_))), "{found:?}");
        fs::remove_file(&path).expect("the file gone");
        let mut checkup = Checkup::new(START);
        assert_eq!(read(&mut checkup, &folder, false, START), None);
        assert_eq!(checkup.rests(false, START), REST, "and it is tried again");
    }

    #[test]
    fn one_that_is_stopped_is_over() {
        let folder = record();
        let path = database_in(folder.path());
        let mut checkup = Checkup::new(START);
        let desk = Arc::default();
        checkup.begin_if_due(&path, false, START, &desk);
        assert_eq!(
            checkup.rests(false, START),
            Duration::MAX,
            "it is under way"
        );
        checkup.stop();
        assert_eq!(Arc::strong_count(&desk), 1, "its thread has ended");
        assert_eq!(checkup.verdict(START), None);
    }
}
