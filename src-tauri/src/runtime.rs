//! The runtime file: where the Traygate of a data folder runs, and the token that steers it. For
//! programs of the same user, the command line for one.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Its name in the data folder.
pub const RUNTIME_FILE: &str = "runtime.json";

/// How long a running Traygate has to answer the command line.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// What it says.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Where the admin API is, on loopback.
    pub port: u16,
    /// The process.
    pub pid: u32,
    /// Opens the admin API; another one with each start.
    pub token: String,
}

/// The file of this run; dropping it takes it away.
pub struct RuntimeFile {
    folder: PathBuf,
    /// `None` once it is to stay.
    wrote: Option<Runtime>,
}

/// What stands in the folder of a [`RuntimeFile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// What it wrote.
    Ours,
    /// What another Traygate wrote, in a folder that took the place of the old.
    Others,
    /// Nothing that makes sense.
    Nothing,
}

impl RuntimeFile {
    /// Writes it as a whole, for this user only, in place of one that an earlier run left.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write(folder: &Path, runtime: &Runtime) -> io::Result<RuntimeFile> {
        let path = folder.join(RUNTIME_FILE);
        let new = folder.join(format!("{RUNTIME_FILE}.new"));
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options
            .open(&new)?
            .write_all(&serde_json::to_vec(runtime)?)?;
        fs::rename(&new, &path)?;
        Ok(RuntimeFile {
            folder: folder.to_owned(),
            wrote: Some(runtime.clone()),
        })
    }

    /// Looks whether it is still there: a person may clear the folder.
    pub fn look(&self) -> Found {
        match find(&self.folder) {
            None => Found::Nothing,
            found if found == self.wrote => Found::Ours,
            Some(_) => Found::Others,
        }
    }

    /// Leaves it in place: it is about to be written over.
    pub fn keep(mut self) {
        self.wrote = None;
    }
}

impl Drop for RuntimeFile {
    fn drop(&mut self) {
        if self.wrote.is_some() && self.look() == Found::Ours {
            // One that stays is overwritten by the next start, and its token opens nothing.
            let _ = fs::remove_file(self.folder.join(RUNTIME_FILE));
        }
    }
}

/// The Traygate of a data folder, as far as its file tells: it may have been killed since.
pub fn find(folder: &Path) -> Option<Runtime> {
    let text = fs::read(folder.join(RUNTIME_FILE)).ok()?;
    serde_json::from_slice(&text).ok()
}

impl Runtime {
    /// Asks the running Traygate to read the keyring again. False if none answered.
    pub async fn reload_keys(&self) -> bool {
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .timeout(ANSWER_LIMIT)
            .build();
        let Ok(client) = client else { return false };
        let url = format!("http://127.0.0.1:{}/traygate/api/keys/reload", self.port);
        let asked = client.post(url).bearer_auth(&self.token).send();
        matches!(asked.await, Ok(answer) if answer.status().is_success())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_for_this_user_only_and_gone_with_its_run() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime {
            port: 7337,
            pid: 42,
            token: "secret".to_owned(),
        };
        assert!(find(folder.path()).is_none());
        let file = RuntimeFile::write(folder.path(), &runtime).unwrap();
        let path = folder.path().join(RUNTIME_FILE);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let mode = path.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        // Another port: written over.
        let moved = Runtime {
            port: 7338,
            ..runtime
        };
        file.keep();
        let again = RuntimeFile::write(folder.path(), &moved).unwrap();
        assert_eq!(find(folder.path()).unwrap().port, 7338);
        assert_eq!(again.look(), Found::Ours);
        drop(again);
        assert!(!path.exists());
        fs::write(&path, "{").unwrap();
        assert!(find(folder.path()).is_none());
    }

    #[test]
    fn another_ones_file_is_told_from_ours_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime {
            port: 7337,
            pid: 42,
            token: "secret".to_owned(),
        };
        let file = RuntimeFile::write(folder.path(), &runtime).unwrap();
        let path = folder.path().join(RUNTIME_FILE);
        fs::remove_file(&path).unwrap();
        assert_eq!(file.look(), Found::Nothing);
        let other = Runtime { pid: 43, ..runtime };
        let other = RuntimeFile::write(folder.path(), &other).unwrap();
        assert_eq!(file.look(), Found::Others);
        drop(file);
        assert_eq!(other.look(), Found::Ours);
    }
}
