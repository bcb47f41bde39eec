//! Reads a settings file of whatever kind the path leads to, and never waits for one without end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// No settings file comes near it, and each is read as a whole.
const MOST_BYTES: u64 = 1 << 20;

/// The bytes of the regular file at `path`, links followed; `None` where there is none.
///
/// # Errors
/// What the file system says, or that it is no such file: a pipe would be waited for, and a device
/// read for ever.
pub(super) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let opened = regular(path).and_then(|()| open(path));
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // It may be another one by now.
    check(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "it has more than a megabyte, and no settings file has",
        ));
    }
    Ok(Some(bytes))
}

/// Looked at before it is opened: opening some devices does something already.
fn regular(path: &Path) -> io::Result<()> {
    check(&path.metadata()?)
}

fn check(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let is = if metadata.is_dir() {
        "a folder"
    } else {
        "a pipe, a socket or a device"
    };
    let reason = format!("it is {is}, and must be a file");
    Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // A pipe that has come in this moment is not waited for either.
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
        options.custom_flags(flags.bits().cast_signed());
    }
    options.open(path)
}

/// How long a file system may take for one of the small things that are asked of it. Those of a
/// network may take for ever.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How much of it may be under way at once. As many only pile up where nothing comes back.
const MOST_AT_ONCE: usize = 32;

/// Work on files that nobody waits for longer than [`PATIENCE`].
#[derive(Clone, Debug, Default)]
pub(crate) struct FileWork(Arc<AtomicUsize>);

/// Counts a piece of work for as long as it goes on, waited for or not.
struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FileWork {
    /// Does it on a thread of its own, which may go on when nobody waits for it any more.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] if it takes too long.
    pub(crate) fn wait_for<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        self.wait_at_most(PATIENCE, work)
    }

    /// The same where waiting must hold up nobody else.
    ///
    /// # Errors
    /// As [`FileWork::wait_for`].
    pub(crate) async fn done<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let this = self.clone();
        let waited = tokio::task::spawn_blocking(move || this.wait_for(work));
        waited
            .await
            .unwrap_or_else(|failed| Err(io::Error::other(failed)))
    }

    fn wait_at_most<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the file system does not answer");
        let under_way = UnderWay(self.0.clone());
        if self.0.fetch_add(1, Ordering::Relaxed) >= MOST_AT_ONCE {
            return Err(late());
        }
        let (tell, told) = mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name("settings file".to_owned())
            .spawn(move || {
                let done = work();
                drop(under_way);
                // Nobody may be waiting any more.
                let _ = tell.send(done);
            })?;
        told.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => late(),
            RecvTimeoutError::Disconnected => io::Error::other("reading it failed by a fault"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_a_megabyte() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("config.toml");
        assert_eq!(read(&path).expect("no file is fine"), None);
        let most = usize::try_from(MOST_BYTES).expect("small");
        std::fs::write(&path, vec![b'#'; most]).expect("written");
        assert_eq!(
            read(&path).expect("read").map(|bytes| bytes.len()),
            Some(most)
        );
        std::fs::write(&path, vec![b'#'; most + 1]).expect("written");
        let error = read(&path).expect_err("too large");
        assert!(
            error.to_string().contains("more than a megabyte"),
            "{error}"
        );
        let error = read(folder.path()).expect_err("a folder");
        assert_eq!(error.to_string(), "it is a folder, and must be a file");
    }

    #[cfg(unix)]
    #[test]
    fn what_has_no_end_is_not_read() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let at = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink("/dev/zero", at("zero")).expect("linked");
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("bound");
        make_pipe(&at("pipe"));
        std::os::unix::fs::symlink("pipe", at("linked")).expect("linked");
        for name in ["zero", "socket", "pipe", "linked"] {
            let error = read(&at(name)).expect_err(name);
            let words = "it is a pipe, a socket or a device, and must be a file";
            assert_eq!(error.to_string(), words, "{name}");
        }
        // Opened in the moment in which it took the file's place, it is not waited for either.
        let pipe = open(&at("pipe")).expect("without a writer");
        assert!(check(&pipe.metadata().expect("there")).is_err());
    }

    #[cfg(unix)]
    fn make_pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.expect("mkfifo runs").success());
    }

    #[test]
    fn work_that_hangs_is_given_up_and_does_not_pile_up() {
        let files = FileWork::default();
        assert_eq!(files.wait_for(|| 3).expect("done"), 3);
        let hangs = Arc::new(std::sync::Barrier::new(MOST_AT_ONCE + 1));
        for _ in 0..MOST_AT_ONCE {
            let hangs = hangs.clone();
            let error = files.wait_at_most(Duration::from_millis(1), move || hangs.wait());
            assert_eq!(
                error.map(drop).expect_err("late").kind(),
                io::ErrorKind::TimedOut
            );
        }
        let more = files.wait_for(|| unreachable!("not begun"));
        assert_eq!(
            more.map(drop).expect_err("too many").kind(),
            io::ErrorKind::TimedOut
        );
        hangs.wait();
        while files.0.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        assert_eq!(files.wait_for(|| 3).expect("done"), 3);
    }
}
