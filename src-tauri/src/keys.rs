//! Provider keys: kept in the system's keyring, read in the background, held in memory.
//!
//! A key is stored with the origin of its provider's address and given out for that origin
//! only: whoever changes an address in the settings file cannot have a key sent there.
//! The keyring may ask its owner for a password and never be answered, so all its work is
//! done in turn on a thread of its own, and nobody waits for that without a limit.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::time::Duration;

use keyring::Entry;
use secrecy::zeroize::Zeroizing;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::clock::{Clock, Moment};

/// The name under which [`set`] and its kin know the token that callers from other machines
/// must show. It has no origin: give `""`.
pub const ACCESS_TOKEN: &str = "access-token";

/// What the entries are filed under, in every keyring.
const SERVICE: &str = "traygate";

/// For reading, which a program does unasked.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks for a key that is missed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// For changes, which a person has just asked for and may have to type a password to allow.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);

/// Longer than any key there is, so that a file sent in by mistake is noticed.
const LONGEST_KEY: usize = 8192;

const ADVICE: &str = "A key can also come from the environment: write key = \"env:NAME\" at \
                      its provider in config.toml";

/// Why a key was refused or the keyring could not be used. Each reads as a sentence; none
/// repeats a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("the key is empty")]
    Empty,
    #[error("the key is longer than {LONGEST_KEY} characters: that is something else")]
    TooLong,
    /// `what` stands in the key at `place`, counted from 1.
    #[error("the key has {what} in it, at character {place}: copy it anew, alone and whole")]
    BadCharacter { what: &'static str, place: usize },
    #[error(
        "there is no keyring here: no D-Bus session runs, as in a container or over SSH. {ADVICE}"
    )]
    NoBus,
    #[error(
        "there is no keyring here: no program on this session's D-Bus offers the Secret Service \
         (GNOME Keyring, KWallet and KeePassXC do). {ADVICE}"
    )]
    NoService,
    #[error(
        "the keyring is locked, and was not unlocked when asked. Unlock it and try again. {ADVICE}"
    )]
    Locked,
    #[error(
        "the keyring has not answered for {} seconds: it may be waiting for you to unlock it. {ADVICE}",
        .0.as_secs()
    )]
    NoAnswer(Duration),
    #[error("what the keyring has under this name was not stored by Traygate. Set the key anew")]
    Damaged,
    /// In the platform's own words.
    #[error("the keyring cannot be used: {0}. {ADVICE}")]
    Failed(String),
}

impl From<keyring::Error> for KeyError {
    fn from(error: keyring::Error) -> Self {
        use keyring::Error::{BadDataFormat, BadEncoding, NoDefaultStore, NoStorageAccess};
        match &error {
            NoStorageAccess(_) => Self::Locked,
            BadEncoding(_) | BadDataFormat(..) => Self::Damaged,
            NoDefaultStore => match Entry::store_status() {
                Err(reason) => Self::no_store(&reason.to_string()),
                Ok(()) => Self::Failed(error.to_string()),
            },
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl KeyError {
    fn library_failed() -> Self {
        Self::Failed("its library failed".to_owned())
    }

    /// The library hands the reason on as text only.
    fn no_store(reason: &str) -> Self {
        if reason.contains("ServiceUnknown") {
            Self::NoService
        } else if reason.contains("Failed to connect to address")
            || reason.contains("no secret service provider or dbus session")
        {
            Self::NoBus
        } else {
            Self::Failed(reason.to_owned())
        }
    }
}

/// What the keyring has for a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    Stored,
    NotStored,
    /// A key, but for another address than the provider has now.
    OtherOrigin,
}

/// A key and the only origin it may be sent to.
pub struct StoredKey {
    origin: String,
    secret: SecretString,
}

impl StoredKey {
    /// `https://api.openai.com`; empty for the access token.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The key itself. It goes into a request and nowhere else.
    pub fn expose(&self) -> &str {
        self.secret.expose_secret()
    }
}

impl fmt::Debug for StoredKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredKey")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// The form a key has in the keyring.
#[derive(Serialize, Deserialize)]
struct Kept<'k> {
    #[serde(borrow)]
    origin: std::borrow::Cow<'k, str>,
    #[serde(borrow)]
    key: std::borrow::Cow<'k, str>,
}

fn encode(origin: &str, key: &SecretString) -> Zeroizing<Vec<u8>> {
    let kept = Kept {
        origin: origin.into(),
        key: key.expose_secret().into(),
    };
    // Room for every character escaped: growing would leave a copy of the key behind.
    let room = 32 + 6 * (kept.origin.len() + kept.key.len());
    let mut bytes = Zeroizing::new(Vec::with_capacity(room));
    serde_json::to_writer(&mut *bytes, &kept).expect("two strings are always JSON");
    bytes
}

fn decode(bytes: &[u8]) -> Result<StoredKey, KeyError> {
    let kept: Kept<'_> = serde_json::from_slice(bytes).map_err(|_| KeyError::Damaged)?;
    let key = kept.key.into_owned();
    Ok(StoredKey {
        origin: kept.origin.into_owned(),
        secret: SecretString::from(key),
    })
}

/// Checks what a person gave as a key, without one line end after it.
///
/// # Errors
/// Anything in it that cannot be part of a key, by its kind and place.
pub fn validate(raw: &str) -> Result<SecretString, KeyError> {
    let key = raw.strip_suffix('\n').unwrap_or(raw);
    let key = key.strip_suffix('\r').unwrap_or(key);
    if key.is_empty() {
        return Err(KeyError::Empty);
    }
    let stranger = key
        .chars()
        .enumerate()
        .find(|(_, c)| !c.is_ascii_graphic() || matches!(c, '"' | '\'' | '`'));
    if let Some((index, c)) = stranger {
        let what = match c {
            '\n' | '\r' => "a line end",
            '"' | '\'' | '`' => "a quotation mark",
            c if c.is_whitespace() => "a space",
            c if c.is_control() || invisible(c) => "an invisible character",
            _ => "a character that keys do not have",
        };
        let place = index + 1;
        return Err(KeyError::BadCharacter { what, place });
    }
    if key.len() > LONGEST_KEY {
        return Err(KeyError::TooLong);
    }
    Ok(SecretString::from(key))
}

/// Characters that show nothing and come along when text is copied from a page.
fn invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e01ef}')
}

/// Stores a provider's key for `origin`, in place of an older one.
///
/// # Errors
/// Why the keyring did not take it. After [`KeyError::NoAnswer`] it may still do so.
pub fn set(provider: &str, origin: &str, key: &SecretString) -> Result<(), KeyError> {
    let (name, bytes) = (provider.to_owned(), encode(origin, key));
    KEYRING.wait_for(CHANGE_LIMIT, move || {
        Ok(Entry::new(SERVICE, &name)?.set_secret(&bytes)?)
    })
}

/// Deletes a provider's key; false if none was stored.
///
/// # Errors
/// Why the keyring did not do it.
pub fn delete(provider: &str) -> Result<bool, KeyError> {
    let name = provider.to_owned();
    KEYRING.wait_for(CHANGE_LIMIT, move || {
        match Entry::new(SERVICE, &name)?.delete_credential() {
            Ok(()) => Ok(true),
            Err(keyring::Error::NoEntry) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
}

/// What the keyring has for a provider whose address has this origin.
///
/// # Errors
/// Why the keyring did not say.
pub fn state(provider: &str, origin: &str) -> Result<KeyState, KeyError> {
    let states = states(vec![(Arc::from(provider), origin.to_owned())])?;
    Ok(states.first().copied().unwrap_or(KeyState::NotStored))
}

/// As [`state`], for many within one time limit; the answers are in the same order.
///
/// # Errors
/// Why the keyring did not say.
pub fn states(wanted: Vec<(Arc<str>, String)>) -> Result<Vec<KeyState>, KeyError> {
    KEYRING.wait_for(READ_LIMIT, move || {
        wanted
            .iter()
            .map(|(name, origin)| {
                Ok(match read(name) {
                    Ok(None) => KeyState::NotStored,
                    Ok(Some(key)) if key.origin == *origin => KeyState::Stored,
                    // Something is there that cannot be used: to be entered again, too.
                    Ok(Some(_)) | Err(KeyError::Damaged) => KeyState::OtherOrigin,
                    Err(error) => return Err(error),
                })
            })
            .collect()
    })
}

fn read(name: &str) -> Result<Option<StoredKey>, KeyError> {
    match Entry::new(SERVICE, name)?.get_secret() {
        Ok(bytes) => decode(&Zeroizing::new(bytes)).map(Some),
        Err(keyring::Error::NoEntry) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

static KEYRING: LazyLock<Worker> = LazyLock::new(Worker::start);

type Job = Box<dyn FnOnce() + Send>;

/// The one thread that talks to the keyring, which takes one request at a time anyway.
struct Worker(mpsc::Sender<Job>);

impl Worker {
    fn start() -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        // Without a thread the queue is gone, and every request is answered with a failure.
        let _ = std::thread::Builder::new()
            .name("keyring".to_owned())
            .spawn(move || {
                for job in queue {
                    // The library may panic; the next request deserves its answer.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            });
        Self(jobs)
    }

    /// Does `work` in its turn, whenever that is.
    fn begin(&self, work: impl FnOnce() + Send + 'static) {
        // A failed send drops the work, which is how the waiting side learns of it.
        let _ = self.0.send(Box::new(work));
    }

    /// Does `work` in its turn and waits for it, `limit` at most. What has not begun by then
    /// is not done at all.
    fn wait_for<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T, KeyError> + Send + 'static,
    ) -> Result<T, KeyError> {
        let (answer, answers) = mpsc::sync_channel(1);
        let given_up = Arc::new(AtomicBool::new(false));
        let forget = Arc::clone(&given_up);
        self.begin(move || {
            if !forget.load(Ordering::Acquire) {
                let _ = answer.send(work());
            }
        });
        answers.recv_timeout(limit).unwrap_or_else(|error| {
            given_up.store(true, Ordering::Release);
            Err(match error {
                mpsc::RecvTimeoutError::Timeout => KeyError::NoAnswer(limit),
                mpsc::RecvTimeoutError::Disconnected => KeyError::library_failed(),
            })
        })
    }
}

/// Where [`Keys`] reads an entry.
type Read = dyn Fn(&str) -> Result<Option<StoredKey>, KeyError> + Send + Sync;

/// The keys in memory. A cheap handle; all clones see the same.
#[derive(Clone)]
pub struct Keys {
    read: Arc<Read>,
    held: watch::Sender<Held>,
    /// They were handed in, and no keyring is theirs.
    handed_in: bool,
}

#[derive(Default)]
struct Held {
    keys: HashMap<Arc<str>, Arc<StoredKey>>,
    /// The origins that were asked for last: an older load may still bring others.
    wanted: HashMap<Arc<str>, String>,
    /// Loads that have not ended, and when the first of them was asked for.
    loading: usize,
    since: Moment,
    problem: Option<KeyError>,
}

impl Keys {
    /// None, and none to come.
    pub fn empty() -> Keys {
        Keys {
            handed_in: true,
            ..Self::reading(Arc::new(|name: &str| read(name)))
        }
    }

    /// These and never others: (provider, origin, key).
    pub fn holding(keys: impl IntoIterator<Item = (Arc<str>, String, SecretString)>) -> Keys {
        let holder = Self::empty();
        holder.held.send_modify(|held| {
            for (provider, origin, secret) in keys {
                let key = StoredKey { origin, secret };
                held.keys.insert(provider, Arc::new(key));
            }
        });
        holder
    }

    /// Begins to read the keys of these providers and origins, and the access token; returns
    /// at once. [`Keys::ready`] waits for them.
    pub fn start_loading(wanted: Vec<(Arc<str>, String)>) -> Keys {
        let keys = Self::reading(Arc::new(|name: &str| read(name)));
        keys.reload(wanted);
        keys
    }

    fn reading(read: Arc<Read>) -> Keys {
        let (held, _) = watch::channel(Held::default());
        Keys {
            read,
            held,
            handed_in: false,
        }
    }

    /// Reads all of them anew, in the background: after a key was set or deleted, or when a
    /// provider's address changed. A key bound to another origin than the new one is gone at
    /// once; the others stay until they have been read. Keys that were handed in stay as they are:
    /// each says for which origin it is.
    pub fn reload(&self, wanted: Vec<(Arc<str>, String)>) {
        if self.handed_in {
            return;
        }
        let access_token = (Arc::from(ACCESS_TOKEN), String::new());
        let wanted: HashMap<_, _> = wanted.into_iter().chain([access_token]).collect();
        self.held.send_modify(|held| {
            held.wanted = wanted.clone();
            held.keys
                .retain(|name, key| wanted.get(name) == Some(&key.origin));
            if held.loading == 0 {
                held.since = Clock::Boot.now();
            }
            held.loading += 1;
        });
        let ended = LoadEnded(self.held.clone());
        let read = Arc::clone(&self.read);
        KEYRING.begin(move || ended.with(load(&*read, wanted.into_keys())));
    }

    /// Begins to read them anew where a key is missed: it may have been stored since. Not more
    /// than once a second, and not from a keyring that had something to say against it, which may
    /// be asking its owner for a password each time.
    pub fn look_again(&self) {
        let wanted = {
            let held = self.held.borrow();
            let is_due = Clock::Boot.now() - held.since >= LOOK_AGAIN;
            if held.loading > 0 || held.problem.is_some() || !is_due {
                return;
            }
            held.wanted.clone()
        };
        // Nothing was asked for: the keys were handed in, and no keyring is theirs.
        if !wanted.is_empty() {
            self.reload(wanted.into_iter().collect());
        }
    }

    /// The key of a provider, for the origin it was last loaded with. No I/O.
    pub fn get(&self, provider: &str) -> Option<Arc<StoredKey>> {
        self.held.borrow().keys.get(provider).cloned()
    }

    /// What callers from other machines must show.
    pub fn access_token(&self) -> Option<Arc<StoredKey>> {
        self.get(ACCESS_TOKEN)
    }

    /// Waits until everything asked for has been read or has failed, `limit` at most; and not
    /// at all on a keyring that has kept others waiting for five seconds already.
    pub async fn ready(&self, limit: Duration) {
        let mut held = self.held.subscribe();
        let waited = Clock::Boot.now() - held.borrow().since;
        let done = held.wait_for(|held| held.loading == 0);
        // Out of time or not, the caller goes on with what there is.
        let _ = tokio::time::timeout(limit.min(READ_LIMIT.saturating_sub(waited)), done).await;
    }

    /// What is wrong with the keyring, as a sentence to show; `None` if it is well.
    pub fn problem(&self) -> Option<String> {
        let held = self.held.borrow();
        let late = held.loading > 0 && Clock::Boot.now() - held.since >= READ_LIMIT;
        if late {
            return Some(KeyError::NoAnswer(READ_LIMIT).to_string());
        }
        held.problem.as_ref().map(ToString::to_string)
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

type Loaded = (Vec<(Arc<str>, Option<StoredKey>)>, Option<KeyError>);

/// What there is under each name, and the first thing that went wrong. A name that could not
/// be read is left out.
fn load(read: &Read, names: impl Iterator<Item = Arc<str>>) -> Loaded {
    let mut found = Vec::new();
    let mut problem = None;
    for name in names {
        match read(&name) {
            Ok(key) => found.push((name, key)),
            Err(KeyError::Damaged) => {
                found.push((name, None));
                problem.get_or_insert(KeyError::Damaged);
            }
            // The keyring as a whole: the next name would fare no better, after another wait.
            Err(error) => return (found, Some(error)),
        }
    }
    (found, problem)
}

/// Counts a load as ended, whether it was done, panicked or was never begun.
struct LoadEnded(watch::Sender<Held>);

impl LoadEnded {
    fn with(self, (found, problem): Loaded) {
        self.0.send_modify(|held| {
            for (name, key) in found {
                match key {
                    Some(key) if held.wanted.get(&name) == Some(&key.origin) => {
                        held.keys.insert(name, Arc::new(key))
                    }
                    _ => held.keys.remove(&name),
                };
            }
            held.problem = problem;
        });
    }
}

impl Drop for LoadEnded {
    fn drop(&mut self) {
        self.0.send_modify(|held| {
            held.loading -= 1;
            if std::thread::panicking() {
                held.problem = Some(KeyError::library_failed());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: &str = "https://api.openai.com";

    fn names(wanted: &[(&str, &str)]) -> Vec<(Arc<str>, String)> {
        wanted
            .iter()
            .map(|(name, origin)| (Arc::from(*name), (*origin).to_owned()))
            .collect()
    }

    fn stored(origin: &str, key: &str) -> StoredKey {
        StoredKey {
            origin: origin.to_owned(),
            secret: SecretString::from(key),
        }
    }

    #[test]
    fn a_key_loses_one_line_end_and_nothing_else() {
        for raw in ["sk-a_B/9+=", "sk-a_B/9+=\n", "sk-a_B/9+=\r\n"] {
            assert_eq!(validate(raw).unwrap().expose_secret(), "sk-a_B/9+=");
        }
    }

    #[test]
    fn what_cannot_be_a_key_is_refused_without_repeating_it() {
        for (raw, what, place) in [
            (" sk-abc", "a space", 1),
            ("sk-abc ", "a space", 7),
            ("sk-abc\u{a0}", "a space", 7),
            ("sk-\tabc", "a space", 4),
            ("sk-abc\n\n", "a line end", 7),
            ("sk-\nabc", "a line end", 4),
            ("sk-\rabc", "a line end", 4),
            ("sk-\u{200b}abc", "an invisible character", 4),
            ("\u{feff}sk-abc", "an invisible character", 1),
            ("sk-\u{2060}abc", "an invisible character", 4),
            ("sk-\u{7f}abc", "an invisible character", 4),
            ("sk-\0abc", "an invisible character", 4),
            ("\"sk-abc\"", "a quotation mark", 1),
            ("sk-äbc", "a character that keys do not have", 4),
        ] {
            let error = validate(raw).expect_err(raw);
            assert_eq!(error, KeyError::BadCharacter { what, place }, "{raw:?}");
            assert!(!error.to_string().contains("sk-"), "{error}");
        }
        assert_eq!(validate("").unwrap_err(), KeyError::Empty);
        assert_eq!(validate("\r\n").unwrap_err(), KeyError::Empty);
        assert_eq!(validate(&"a".repeat(9000)).unwrap_err(), KeyError::TooLong);
    }

    #[test]
    fn a_key_keeps_its_origin_in_the_keyring() {
        let bytes = encode(ORIGIN, &SecretString::from("sk-\\x"));
        assert_eq!(
            *bytes,
            *br#"{"origin":"https://api.openai.com","key":"sk-\\x"}"#
        );
        let key = decode(&bytes).unwrap();
        assert_eq!((key.origin(), key.expose()), (ORIGIN, "sk-\\x"));
        assert!(!format!("{key:?}").contains("sk-"));
        assert_eq!(decode(b"sk-plain").unwrap_err(), KeyError::Damaged);
    }

    #[test]
    fn the_libraries_words_become_sentences() {
        for no_bus in [
            "Platform failure: zbus error: Failed to connect to address `unix:path=/x`",
            "Platform failure: no secret service provider or dbus session found",
        ] {
            assert_eq!(KeyError::no_store(no_bus), KeyError::NoBus);
        }
        let no_service =
            "Platform failure: zbus error: org.freedesktop.DBus.Error.ServiceUnknown: …";
        assert_eq!(KeyError::no_store(no_service), KeyError::NoService);
        for error in [KeyError::NoBus, KeyError::NoService, KeyError::Locked] {
            assert!(error.to_string().contains("env:NAME"), "{error}");
        }
        let locked = keyring::Error::NoStorageAccess("prompt dismissed".into());
        assert_eq!(KeyError::from(locked), KeyError::Locked);
    }

    #[test]
    fn nobody_waits_for_an_unanswered_prompt_and_late_work_is_not_begun() {
        let worker = Worker::start();
        let (unlock, prompt) = mpsc::channel::<()>();
        worker.begin(move || prompt.recv().unwrap());

        let ran = Arc::new(AtomicBool::new(false));
        let mark = Arc::clone(&ran);
        let limit = Duration::from_millis(20);
        let late = worker.wait_for(limit, move || {
            mark.store(true, Ordering::SeqCst);
            Ok(())
        });
        assert_eq!(late, Err(KeyError::NoAnswer(limit)));

        unlock.send(()).unwrap();
        assert_eq!(worker.wait_for(Duration::from_secs(30), || Ok(7)), Ok(7));
        assert!(!ran.load(Ordering::SeqCst), "its caller was told it failed");
    }

    #[test]
    fn a_panic_in_the_library_is_a_failure_and_the_next_request_works() {
        let worker = Worker::start();
        let limit = Duration::from_secs(30);
        let failed: Result<(), KeyError> = worker.wait_for(limit, || panic!("a bug"));
        assert!(matches!(failed, Err(KeyError::Failed(_))), "{failed:?}");
        assert_eq!(worker.wait_for(limit, || Ok(1)), Ok(1));
    }

    #[tokio::test]
    async fn loading_gives_keys_to_their_own_origin_only() {
        let keys = Keys::reading(Arc::new(|name: &str| {
            Ok(match name {
                "openai" => Some(stored(ORIGIN, "sk-1")),
                "moved" => Some(stored("https://old.example", "sk-2")),
                ACCESS_TOKEN => Some(stored("", "token")),
                _ => None,
            })
        }));
        keys.reload(names(&[
            ("openai", ORIGIN),
            ("moved", "https://new.example"),
            ("none", "https://none.example"),
        ]));
        keys.ready(Duration::from_secs(30)).await;
        assert_eq!(keys.get("openai").unwrap().expose(), "sk-1");
        assert_eq!(keys.access_token().unwrap().expose(), "token");
        assert!(keys.get("moved").is_none() && keys.get("none").is_none());
        assert_eq!(keys.problem(), None);
    }

    #[tokio::test]
    async fn a_changed_address_loses_its_key_before_anything_is_read() {
        let (go, gate) = mpsc::channel::<()>();
        let gate = std::sync::Mutex::new(gate);
        let mut keys = Keys::holding([
            (Arc::from("openai"), ORIGIN.to_owned(), "sk-1".into()),
            (Arc::from("other"), ORIGIN.to_owned(), "sk-2".into()),
        ]);
        keys.handed_in = false;
        keys.read = Arc::new(move |_: &str| {
            let _ = gate.lock().unwrap().recv();
            Err(KeyError::Locked)
        });
        keys.reload(names(&[
            ("openai", "https://evil.example"),
            ("other", ORIGIN),
        ]));
        assert!(keys.get("openai").is_none());
        assert_eq!(keys.get("other").unwrap().expose(), "sk-2");
        go.send(()).unwrap();
        keys.ready(Duration::from_secs(30)).await;
        assert_eq!(
            keys.get("other").unwrap().expose(),
            "sk-2",
            "could not be read anew"
        );
        assert_eq!(keys.problem(), Some(KeyError::Locked.to_string()));
    }

    #[tokio::test]
    async fn a_missed_key_is_looked_for_again_but_not_all_the_time() {
        let reads = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = Arc::clone(&reads);
        let mut keys = Keys::reading(Arc::new(move |name: &str| {
            let looks = count.fetch_add(1, Ordering::SeqCst) / 2;
            Ok((looks > 0 && name == "openai").then(|| stored(ORIGIN, "sk-new")))
        }));
        let ready = Duration::from_secs(30);
        keys.reload(names(&[("openai", ORIGIN)]));
        keys.ready(ready).await;
        assert!(keys.get("openai").is_none());
        keys.look_again();
        keys.ready(ready).await;
        assert_eq!(reads.load(Ordering::SeqCst), 2, "too soon");
        let long_ago = |keys: &Keys| keys.held.send_modify(|held| held.since = Moment::default());
        long_ago(&keys);
        keys.look_again();
        keys.ready(ready).await;
        assert_eq!(keys.get("openai").unwrap().expose(), "sk-new");

        // A locked one would ask its owner again and again.
        keys.read = Arc::new(|_: &str| Err(KeyError::Locked));
        long_ago(&keys);
        keys.look_again();
        keys.ready(ready).await;
        keys.read = Arc::new(|_: &str| panic!("it was asked again"));
        long_ago(&keys);
        keys.look_again();
        keys.ready(ready).await;
        assert_eq!(keys.problem(), Some(KeyError::Locked.to_string()));
    }

    #[tokio::test]
    async fn keys_that_were_handed_in_are_never_looked_for() {
        let mut keys = Keys::holding([(Arc::from("openai"), ORIGIN.to_owned(), "sk-1".into())]);
        keys.read = Arc::new(|_: &str| panic!("the keyring was asked"));
        keys.look_again();
        keys.ready(Duration::from_secs(30)).await;
        assert_eq!(keys.problem(), None);
        assert_eq!(keys.get("openai").unwrap().expose(), "sk-1");
    }

    #[tokio::test]
    async fn a_load_that_panics_still_ends() {
        let keys = Keys::reading(Arc::new(|_: &str| panic!("a bug")));
        keys.reload(names(&[("openai", ORIGIN)]));
        keys.ready(Duration::from_secs(30)).await;
        assert_eq!(keys.held.borrow().loading, 0);
        assert!(keys.problem().unwrap().contains("its library failed"));
    }
}
