//! One process a data folder: a locked file that names its holder.
//!
//! The operating system gives the lock back when the process dies, however it dies, so a
//! `kill -9` leaves nothing to clear away.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

const LOCK_FILE: &str = "traygate.lock";

/// A process that is just ending, or a child that it has forked and that has not yet become its
/// program, holds the lock a moment longer: a restart must not stumble over that.
const ATTEMPTS: u32 = 12;
const PAUSE: Duration = Duration::from_millis(25);

/// Holds the folder until it is dropped.
#[derive(Debug)]
pub(super) struct FolderLock {
    _file: File,
}

#[derive(Debug)]
pub(super) enum LockError {
    /// Another process has it; its id, if it could be read.
    InUse(Option<u32>),
    /// The lock file cannot be made or locked.
    Io(io::Error),
}

impl FolderLock {
    pub(super) fn take(folder: &Path) -> Result<Self, LockError> {
        // Not truncated on opening: the text belongs to whoever holds the lock.
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(folder.join(LOCK_FILE))
            .map_err(LockError::Io)?;
        let mut attempts = 1;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if attempts < ATTEMPTS => {
                    attempts += 1;
                    thread::sleep(PAUSE);
                }
                Err(TryLockError::WouldBlock) => return Err(LockError::InUse(holder(&mut file))),
                // Some network file systems have no locks. Two processes there are SQLite's to
                // part.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    break;
                }
                Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
            }
        }
        write_holder(&mut file).map_err(LockError::Io)?;
        Ok(Self { _file: file })
    }
}

fn write_holder(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// Windows refuses to read a locked file, and the holder may be about to write: then `None`.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}
