//! The settings file on disk: read, patched and written without losing anybody's change.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};

use super::patch::{self, Unfit};
use super::read::read;
use super::{DEFAULT_FILE, Overrides, Settings, SettingsError};

static DRAFTS: AtomicU32 = AtomicU32::new(0);

/// Links that are followed to the file, as many as Linux does.
const MOST_LINKS: usize = 40;

/// Why a patch was not taken. The file is as it was.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    #[error("Traygate runs without a settings file here, so there is nothing to change")]
    NoFile,
    /// The patch is no merge patch of settings.
    #[error("{}{reason}", in_front(.field))]
    Patch { field: String, reason: String },
    /// A value cannot be, or the file is wrong already; then it has a line.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A flag or variable wins over the file.
    #[error(
        "{field} is set by {by}, which wins over the settings file: start Traygate without it to set it here"
    )]
    Locked { field: String, by: String },
    /// `If-Match` names an older state, or something else wrote to the file in this moment.
    #[error("the settings file has changed meanwhile: read it again and decide anew")]
    Stale {
        /// The present one.
        etag: String,
    },
    /// The file is written in a way that cannot be edited in place.
    #[error("{} is written in a way that cannot be changed from here without losing some of it: edit it by hand", .0.display())]
    Form(PathBuf),
    /// The settings are right and cannot take effect, as with a port that is taken.
    #[error("{0}")]
    NotApplied(String),
    #[error("{} cannot be written: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

fn in_front(field: &str) -> String {
    match field {
        "" => "the patch ".to_owned(),
        field => format!("{field}: "),
    }
}

/// A settings file and what wins over it.
#[derive(Clone, Debug)]
pub struct SettingsFile {
    pub path: PathBuf,
    pub overrides: Overrides,
}

/// The bytes of the file at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Empty where there is no file.
    pub bytes: Vec<u8>,
    pub exists: bool,
}

impl Snapshot {
    /// For `ETag` and `If-Match`, in quotes: the same for the same bytes only.
    pub fn etag(&self) -> String {
        let hash = Sha256::digest(&self.bytes);
        let hex: String = hash[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!("\"{hex}\"")
    }
}

/// A patch that is right, not written yet.
#[derive(Debug)]
pub struct Edit {
    /// What holds once it is written.
    pub settings: Settings,
    /// The fields that differ, `provider.openai.concurrency`.
    pub changed: Vec<String>,
    before: Snapshot,
    after: String,
}

impl SettingsFile {
    /// The file as it is now; a missing one is empty.
    ///
    /// # Errors
    /// It is there and cannot be read, or it is no regular file.
    pub fn snapshot(&self) -> Result<Snapshot, SettingsError> {
        let read = read(&self.path).map_err(|error| self.unreadable(&error))?;
        let exists = read.is_some();
        Ok(Snapshot {
            bytes: read.unwrap_or_default(),
            exists,
        })
    }

    /// Why there is nothing to be had from the file.
    pub(crate) fn unreadable(&self, error: &io::Error) -> SettingsError {
        super::not_read(&self.path, error)
    }

    /// The settings in it, with what wins over them.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn settings(&self, snapshot: &Snapshot) -> Result<Settings, SettingsError> {
        Settings::of_bytes(&snapshot.bytes, &self.path, &self.overrides)
    }

    /// Lays a merge patch onto the file in memory and checks the outcome as a whole. `in_force` is
    /// the text of the settings in force: it stands in for a file that has gone.
    ///
    /// # Errors
    /// [`PatchError`].
    pub fn patch(
        &self,
        patch: &Json,
        if_match: Option<&str>,
        in_force: &str,
    ) -> Result<Edit, PatchError> {
        self.patch_onto(self.snapshot()?, patch, if_match, in_force)
    }

    /// The same onto a state that has been read.
    pub(crate) fn patch_onto(
        &self,
        before: Snapshot,
        patch: &Json,
        if_match: Option<&str>,
        in_force: &str,
    ) -> Result<Edit, PatchError> {
        if let Some(wanted) = if_match
            && !matches(wanted, &before.etag())
        {
            return Err(PatchError::Stale {
                etag: before.etag(),
            });
        }
        let present = self.settings(&before);
        let text = match std::str::from_utf8(&before.bytes) {
            Ok(text) if before.exists => text,
            Ok(_) if in_force.is_empty() => DEFAULT_FILE,
            Ok(_) => in_force,
            // Not text at all: reading the settings has said so.
            Err(_) => {
                return Err(present
                    .err()
                    .map_or(PatchError::NoFile, PatchError::Settings));
            }
        };
        let (mark, text) = match text.strip_prefix(BYTE_ORDER_MARK) {
            Some(text) => (BYTE_ORDER_MARK, text),
            None => ("", text),
        };
        let edited = patch::lay_on(text, patch).map_err(|unfit| match (unfit, &present) {
            (Unfit::Patch { field, reason }, _) => PatchError::Patch { field, reason },
            (Unfit::Text, Err(error)) => PatchError::Settings(error.clone()),
            (Unfit::Text | Unfit::Form, _) => PatchError::Form(self.path.clone()),
        })?;
        let changed = patch::changes(text, &edited);
        let taken_out = providers_taken_out(patch);
        for field in &changed {
            // One that goes as a whole takes along what a flag wins over.
            if taken_out.iter().any(|name| field.starts_with(name)) {
                continue;
            }
            if let Some(by) = self.overrides.locks(field) {
                return Err(PatchError::Locked {
                    field: field.clone(),
                    by,
                });
            }
        }
        let after = [mark, &edited].concat();
        let settings = Settings::of_bytes(after.as_bytes(), &self.path, &self.overrides)
            .map_err(|error| PatchError::Settings(of_the_patch(error, present)))?;
        Ok(Edit {
            settings,
            changed,
            before,
            after,
        })
    }

    /// Writes an edit: beside the file first, then in its place. A symbolic link stays one, and
    /// the file's permissions stay. Returns the new state's mark.
    ///
    /// # Errors
    /// [`PatchError::Stale`] if something else has written since, [`PatchError::Write`].
    pub fn write(&self, edit: &Edit) -> Result<String, PatchError> {
        self.write_unless(edit, &AtomicBool::new(false))
    }

    /// The same, unless `decided` is set before the file changes: then whoever asked has been told
    /// that nothing comes of it. Sets it where it is not.
    pub(crate) fn write_unless(
        &self,
        edit: &Edit,
        decided: &AtomicBool,
    ) -> Result<String, PatchError> {
        let failed = |source| PatchError::Write {
            path: self.path.clone(),
            source,
        };
        let after = Snapshot {
            bytes: edit.after.clone().into_bytes(),
            exists: true,
        };
        if edit.before == after {
            return Ok(after.etag());
        }
        let target = resolved(&self.path).map_err(failed)?;
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        fs::create_dir_all(folder).map_err(failed)?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        // Never that of an edit that was given up and still hangs.
        let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
        let draft = folder.join(format!(".{name}.{}.{number}.tmp", std::process::id()));
        let written = write_draft(&draft, &target, &after.bytes)
            .map_err(failed)
            .and_then(|()| {
                // As late as can be: a hand edit since the patch was made must not be lost.
                let present = self.snapshot()?;
                if decided.swap(true, Ordering::AcqRel) {
                    Err(failed(io::ErrorKind::TimedOut.into()))
                } else if present == edit.before {
                    fs::rename(&draft, &target).map_err(failed)
                } else {
                    Err(PatchError::Stale {
                        etag: present.etag(),
                    })
                }
            });
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written?;
        // The new name is safe on disk only with its folder.
        #[cfg(unix)]
        if let Ok(folder) = File::open(folder) {
            let _ = folder.sync_all();
        }
        Ok(after.etag())
    }

    /// The file and every symbolic link on the way to it.
    pub(super) fn chain(&self) -> Vec<PathBuf> {
        let mut chain = vec![self.path.clone()];
        while chain.len() <= MOST_LINKS
            && let Some(last) = chain.last()
            && let Ok(next) = fs::read_link(last)
        {
            let next = last.parent().unwrap_or(Path::new("")).join(next);
            chain.push(next);
        }
        chain
    }
}

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// The beginnings of the fields of providers that a patch takes out as a whole.
fn providers_taken_out(patch: &Json) -> Vec<String> {
    let providers = patch.get("provider").and_then(Json::as_object);
    let gone = providers.into_iter().flatten();
    gone.filter(|(_, given)| given.is_null())
        .map(|(name, _)| format!("provider.{name}."))
        .collect()
}

/// `If-Match` is `*` or a list of marks, quoted or not.
fn matches(if_match: &str, etag: &str) -> bool {
    let bare = |mark: &str| {
        mark.trim()
            .trim_start_matches("W/")
            .trim_matches('"')
            .to_owned()
    };
    let mut marks = if_match.split(',');
    marks.any(|mark| mark.trim() == "*" || bare(mark) == bare(etag))
}

/// A fault that was in the file before keeps its line; one that the patch brought has none there.
fn of_the_patch(error: SettingsError, present: Result<Settings, SettingsError>) -> SettingsError {
    match present {
        Err(present) if (&present.field, &present.reason) == (&error.field, &error.reason) => {
            present
        }
        _ => SettingsError {
            file: None,
            line: None,
            column: None,
            ..error
        },
    }
}

/// Where the symbolic links lead, even if there is no file yet.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

fn write_draft(draft: &Path, target: &Path, bytes: &[u8]) -> io::Result<()> {
    let permissions = target.metadata().map(|metadata| metadata.permissions());
    if permissions.as_ref().is_ok_and(fs::Permissions::readonly) {
        // Renaming would get around it.
        let reason = "it is read-only";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    // One left behind by a crash may have other permissions.
    let _ = fs::remove_file(draft);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(draft)?;
    file.write_all(bytes)?;
    if let Ok(permissions) = permissions {
        file.set_permissions(permissions)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(folder: &Path, text: &str) -> SettingsFile {
        let path = folder.join("config.toml");
        fs::write(&path, text).expect("written");
        SettingsFile {
            path,
            overrides: Overrides::default(),
        }
    }

    fn edit(file: &SettingsFile) -> Edit {
        let patch = json!({"limits": {"queue": 2}});
        file.patch(&patch, None, "").expect("a good patch")
    }

    #[test]
    fn a_hand_edit_between_reading_and_writing_is_not_lost() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = file(folder.path(), "[limits]\nqueue = 1\n");
        for by_hand in [Some("# mine\n"), Some(""), None] {
            fs::write(&file.path, "[limits]\nqueue = 1\n").expect("written");
            let edit = edit(&file);
            match by_hand {
                Some(text) => fs::write(&file.path, text).expect("written"),
                None => fs::remove_file(&file.path).expect("removed"),
            }
            let present = file.snapshot().expect("readable");
            match file.write(&edit) {
                Err(PatchError::Stale { etag }) => assert_eq!(etag, present.etag()),
                other => panic!("{other:?}"),
            }
            assert_eq!(file.snapshot().expect("readable"), present);
        }
        let left: Vec<_> = fs::read_dir(folder.path()).expect("readable").collect();
        assert!(left.is_empty(), "no draft stays behind: {left:?}");
    }

    #[test]
    fn an_edit_that_was_given_up_is_never_written() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = file(folder.path(), "[limits]\nqueue = 1\n");
        let before = file.snapshot().expect("readable");
        let decided = AtomicBool::new(true);
        let error = file.write_unless(&edit(&file), &decided);
        assert!(matches!(error, Err(PatchError::Write { .. })), "{error:?}");
        assert_eq!(file.snapshot().expect("readable"), before);
        let decided = AtomicBool::new(false);
        file.write_unless(&edit(&file), &decided).expect("written");
        assert!(decided.into_inner(), "too late to give it up");
    }

    #[test]
    fn an_edit_that_changes_nothing_writes_nothing() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = file(folder.path(), "[limits]\nqueue = 2 # mine\n");
        let before = file
            .path
            .metadata()
            .expect("there")
            .modified()
            .expect("a time");
        let edit = edit(&file);
        assert!(edit.changed.is_empty());
        file.write(&edit).expect("nothing to do");
        let after = file
            .path
            .metadata()
            .expect("there")
            .modified()
            .expect("a time");
        assert_eq!(before, after);
    }

    #[test]
    fn what_cannot_be_written_says_so_and_leaves_the_file() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = SettingsFile {
            path: folder.path().join("a-file/config.toml"),
            overrides: Overrides::default(),
        };
        let edit = edit(&file);
        fs::write(folder.path().join("a-file"), "").expect("written");
        let error = file.write(&edit).expect_err("no folder");
        assert!(
            error
                .to_string()
                .contains("config.toml cannot be written: "),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_its_owner_made_read_only_stays_as_it_is() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = file(folder.path(), "[limits]\nqueue = 1\n");
        let mut permissions = file.path.metadata().expect("there").permissions();
        permissions.set_readonly(true);
        fs::set_permissions(&file.path, permissions).expect("set");
        let before = file.snapshot().expect("readable");
        let error = file.write(&edit(&file)).expect_err("read-only");
        assert!(error.to_string().ends_with("it is read-only"), "{error}");
        assert_eq!(file.snapshot().expect("readable"), before);
    }

    #[test]
    fn a_provider_can_be_taken_out_whatever_a_flag_wins_over() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let text = "[[provider]]\nname = \"openai\"\nconcurrency = 3\n";
        let mut file = file(folder.path(), text);
        file.overrides.concurrency = Some(2);
        let patch = json!({"provider": {"openai": null}});
        let edit = file.patch(&patch, None, "").expect("not locked");
        assert_eq!(
            edit.changed,
            ["provider.openai.concurrency", "provider.openai.name"]
        );
        let patch = json!({"provider": {"openai": {"concurrency": 4}}});
        let error = file.patch(&patch, None, "").expect_err("locked");
        assert!(matches!(error, PatchError::Locked { .. }), "{error}");
    }

    #[test]
    fn a_byte_order_mark_and_odd_bytes_are_what_they_were() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = file(folder.path(), "\u{feff}[limits]\r\nqueue = 1\r\n");
        file.write(&edit(&file)).expect("written");
        let text = fs::read_to_string(&file.path).expect("read");
        assert_eq!(text, "\u{feff}[limits]\r\nqueue = 2\r\n");
        fs::write(&file.path, b"[limits]\n# \xff\n").expect("written");
        let patch = json!({"limits": {"queue": 2}});
        let error = file.patch(&patch, None, "").expect_err("no text");
        assert_eq!(error.to_string(), "config.toml, line 2: is not UTF-8 text");
    }

    #[test]
    fn a_mark_matches_in_every_spelling_of_the_header() {
        let etag = Snapshot {
            bytes: b"x".to_vec(),
            exists: true,
        }
        .etag();
        let bare = etag.trim_matches('"');
        for good in [etag.as_str(), bare, "*", &format!("\"no\", W/{etag}")] {
            assert!(matches(good, &etag), "{good}");
        }
        for bad in ["", "\"no\"", &bare[1..]] {
            assert!(!matches(bad, &etag), "{bad}");
        }
    }
}
