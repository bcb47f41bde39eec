//! `traygate check`: looks at everything that Traygate needs, and says what is wrong.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::clock::Clock;
use crate::keys::{self, ACCESS_TOKEN, KeyError, KeyState};
use crate::listen::port_owner;
use crate::provider::clients::{Clients, describe};
use crate::settings::{
    KeySource, Overrides, ProviderKind, ProviderSettings, Settings, SettingsError,
};
use crate::store::DATABASE_FILE;

/// For each provider, from looking its name up to the head of its answer.
const REACH_LIMIT: Duration = Duration::from_secs(3);

/// What was found about one thing: a line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    level: Level,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Well,
    /// Worth knowing, and nothing to mend.
    Note,
    Wrong,
}

impl Finding {
    fn well(text: impl Into<String>) -> Self {
        Self::new(Level::Well, text)
    }

    fn note(text: impl Into<String>) -> Self {
        Self::new(Level::Note, text)
    }

    fn wrong(text: impl Into<String>) -> Self {
        Self::new(Level::Wrong, text)
    }

    fn new(level: Level, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { level, text }
    }

    fn line(&self) -> String {
        let mark = match self.level {
            Level::Well => "ok  ",
            Level::Note => "note",
            Level::Wrong => "BAD ",
        };
        format!("{mark} {}", self.text)
    }
}

/// Writes a line for each thing checked; the exit code is 1 if something is wrong.
///
/// Nothing is changed, except for a file that is made and removed to see whether one can be.
///
/// # Errors
/// Only if nothing could be checked or told.
pub fn run(
    config: &Path,
    data_dir: &Path,
    overrides: &Overrides,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let findings = runtime.block_on(check(config, data_dir, overrides));
    // A check that hangs, in the keyring or in a folder on the network, is not waited for.
    runtime.shutdown_background();
    for finding in &findings {
        writeln!(out, "{}", finding.line())?;
    }
    let wrong = findings.iter().any(|finding| finding.level == Level::Wrong);
    Ok(ExitCode::from(u8::from(wrong)))
}

async fn check(config: &Path, data_dir: &Path, overrides: &Overrides) -> Vec<Finding> {
    let (mut findings, settings) = settings(config, overrides);
    findings.push(data_folder(data_dir));
    let database = data_dir.join(DATABASE_FILE);
    let (database, keyring, ports, providers) = tokio::join!(
        blocking(move || vec![self::database(&database)]),
        {
            let settings = settings.clone();
            blocking(move || keyring(&settings))
        },
        ports(&settings),
        join_all(settings.providers.iter().map(provider)),
    );
    findings.extend(database.into_iter().chain(keyring).chain(ports));
    findings.extend(providers);
    findings
}

/// What the file says; where it is refused, the rest is checked with the defaults.
fn settings(config: &Path, overrides: &Overrides) -> (Vec<Finding>, Settings) {
    let place = config.display();
    match Settings::load(config, overrides) {
        Ok(settings) => {
            let finding = Finding::well(if config.exists() {
                format!("settings in {place}")
            } else {
                format!("settings: {place} is not there yet, the defaults hold")
            });
            (vec![finding], settings)
        }
        Err(error) => {
            // The path is said already.
            let error = SettingsError {
                file: None,
                ..error
            };
            let findings = vec![
                Finding::wrong(format!("settings in {place}: {error}")),
                Finding::note("what follows is checked with the default settings"),
            ];
            let defaults = Settings::parse("", overrides);
            (findings, defaults.expect("an empty file is the defaults"))
        }
    }
}

/// Whether files can be made in it, or it can be made itself.
fn data_folder(folder: &Path) -> Finding {
    let place = folder.display();
    let existing = folder.ancestors().find(|ancestor| ancestor.exists());
    let existing = existing.unwrap_or(Path::new("."));
    if !existing.is_dir() {
        let what = existing.display();
        return Finding::wrong(format!("data folder {place}: {what} is not a folder"));
    }
    let probe = existing.join(format!(".traygate-check-{}", std::process::id()));
    let tried = std::fs::File::create_new(&probe).and_then(|_| std::fs::remove_file(&probe));
    match tried {
        Ok(()) if existing == folder => Finding::well(format!("data folder {place} is writable")),
        Ok(()) => Finding::well(format!("data folder {place} can be made")),
        Err(error) => {
            let what = existing.display();
            Finding::wrong(format!(
                "data folder {place}: cannot write in {what}: {error}"
            ))
        }
    }
}

/// Whether it opens and is whole. A running Traygate goes on writing meanwhile.
fn database(path: &Path) -> Finding {
    let place = path.display();
    if !path.exists() {
        return Finding::well(format!("database {place} is not there yet"));
    }
    let whole = || -> rusqlite::Result<String> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(Duration::from_secs(2))?;
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
    };
    let damaged = |what: &str| {
        Finding::wrong(format!(
            "database {place} is damaged ({}): Traygate sets it aside under a new name and begins \
             a fresh one, soon after its next start at the latest; what can be saved of the old \
             one, `sqlite3 THE_FILE .recover` prints as SQL",
            what.replace('\n', " ")
        ))
    };
    match whole() {
        Ok(answer) if answer == "ok" => Finding::well(format!("database {place} is whole")),
        Ok(answer) => damaged(&answer),
        Err(error)
            if matches!(
                error.sqlite_error_code(),
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
            ) =>
        {
            damaged(&error.to_string())
        }
        Err(error) => Finding::wrong(format!("database {place} cannot be read: {error}")),
    }
}

/// Whether the keyring answers, and has what the settings rely on. Without need of it, its
/// absence is only noted: a server or a container has none.
fn keyring(settings: &Settings) -> Vec<Finding> {
    let users: Vec<&ProviderSettings> = settings
        .providers
        .iter()
        .filter(|provider| matches!(provider.key, KeySource::Auto | KeySource::Keyring))
        .collect();
    let wanted = users
        .iter()
        .map(|provider| (Arc::clone(&provider.name), provider.origin()))
        .chain([(Arc::from(ACCESS_TOKEN), String::new())])
        .collect();
    let beyond_loopback = !settings.server.host.is_empty();
    keyring_findings(&users, beyond_loopback, keys::states(wanted))
}

/// `states` are those of `users`, in order, and of the access token last.
fn keyring_findings(
    users: &[&ProviderSettings],
    beyond_loopback: bool,
    states: Result<Vec<KeyState>, KeyError>,
) -> Vec<Finding> {
    let needed = beyond_loopback
        || users
            .iter()
            .any(|provider| provider.key == KeySource::Keyring);
    let states = match states {
        Ok(states) => states,
        Err(error) => {
            let level = if needed { Level::Wrong } else { Level::Note };
            return vec![Finding::new(level, format!("keyring: {error}"))];
        }
    };
    let stored: Vec<&str> = users
        .iter()
        .zip(&states)
        .filter(|(_, state)| **state == KeyState::Stored)
        .map(|(provider, _)| &*provider.name)
        .collect();
    let mut findings = vec![Finding::well(match stored.as_slice() {
        [] => "keyring answers, and has no key of a provider".to_owned(),
        names => format!("keyring answers, and has a key of {}", names.join(", ")),
    })];
    for (provider, state) in users.iter().zip(&states) {
        let name = &provider.name;
        let must = provider.key == KeySource::Keyring;
        let level = if must { Level::Wrong } else { Level::Note };
        match state {
            KeyState::OtherOrigin => findings.push(Finding::new(
                level,
                format!(
                    "key of {name} is stored for another address than {}: set it anew with \
                     `traygate key set {name}`",
                    provider.origin()
                ),
            )),
            KeyState::NotStored if must => findings.push(Finding::wrong(format!(
                "key of {name} is not stored, and its settings say key = \"keyring\": \
                 `traygate key set {name}`"
            ))),
            KeyState::NotStored | KeyState::Stored => {}
        }
    }
    if beyond_loopback && states.last() != Some(&KeyState::Stored) {
        findings.push(Finding::wrong(
            "access token is not stored, and `host` lets other machines in: \
             `traygate key set access-token`",
        ));
    }
    findings
}

/// Whether the addresses to listen on are free, or held by a Traygate.
async fn ports(settings: &Settings) -> Vec<Finding> {
    let port = settings.server.port;
    if port == 0 {
        return vec![Finding::well("port: any free one, as set")];
    }
    let loopback = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let mut findings = Vec::new();
    for address in loopback.iter().chain(&settings.server.host) {
        let address = SocketAddr::new(*address, port);
        let error = match TcpListener::bind(address) {
            Ok(_) => continue,
            Err(error) => error,
        };
        findings.push(match error.kind() {
            io::ErrorKind::AddrInUse => taken(address).await,
            _ if address.ip() == loopback[1] => Finding::note(format!(
                "no IPv6 loopback here ({error}): 127.0.0.1 serves alone"
            )),
            _ => Finding::wrong(format!("cannot listen on {address}: {error}")),
        });
    }
    // One program usually holds both loopbacks: said once is enough.
    findings.dedup();
    let held = findings.iter().any(|finding| finding.level != Level::Note);
    if !held {
        findings.insert(0, Finding::well(format!("port {port} is free")));
    }
    findings
}

async fn taken(address: SocketAddr) -> Finding {
    let port = address.port();
    let owner = port_owner(port);
    if is_traygate(address, owner.as_deref()).await {
        let who = owner.unwrap_or_else(|| "a Traygate".to_owned());
        return Finding::well(format!("port {port} is served by {who} already"));
    }
    let who = owner.unwrap_or_else(|| "another program".to_owned());
    Finding::wrong(format!(
        "port {port} is taken by {who}: stop that, or choose another with `--port` or `port` in \
         [server]"
    ))
}

/// Another user's process has no name here: then its answer says what it is.
async fn is_traygate(address: SocketAddr, owner: Option<&str>) -> bool {
    if let Some(owner) = owner {
        return owner.starts_with("traygate (");
    }
    let Ok(client) = reqwest::Client::builder().no_proxy().build() else {
        return false;
    };
    let health = client
        .get(format!("http://{address}/traygate/health"))
        .timeout(REACH_LIMIT);
    match health.send().await {
        Ok(response) => response
            .text()
            .await
            .is_ok_and(|body| body.to_lowercase().contains("traygate")),
        Err(_) => false,
    }
}

/// Whether anything answers at its address, whatever it says.
async fn provider(provider: &ProviderSettings) -> Finding {
    let name = &provider.name;
    if provider.kind == ProviderKind::Demo {
        return Finding::well(format!("{name} is built in"));
    }
    let place = &provider.base_url;
    // As calls go out: the same resolver, proxies and certificates.
    let client = match Clients::new(provider).fresh_connections() {
        Ok(client) => client,
        Err(error) => return Finding::wrong(format!("{name}: {error}")),
    };
    let began = Clock::Boot.now();
    match client.get(place.clone()).timeout(REACH_LIMIT).send().await {
        Ok(response) => {
            let status = response.status().as_u16();
            let took = (Clock::Boot.now() - began).as_millis();
            Finding::well(format!(
                "{name} answers at {place} (HTTP {status} in {took} ms)"
            ))
        }
        Err(error) if provider.shipped && provider.local => {
            let why = reason(&error);
            Finding::note(format!("{name} does not run at {place} ({why})"))
        }
        Err(error) => {
            let why = reason(&error);
            Finding::wrong(format!("{name} cannot be reached at {place}: {why}"))
        }
    }
}

fn reason(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return format!("no answer within {} seconds", REACH_LIMIT.as_secs());
    }
    describe(error)
}

/// Away from the threads that the network runs on.
async fn blocking(work: impl FnOnce() -> Vec<Finding> + Send + 'static) -> Vec<Finding> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| vec![Finding::wrong(format!("a check failed itself: {error}"))])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> Settings {
        Settings::parse("", &Overrides::default()).unwrap()
    }

    fn on_port(port: u16) -> Settings {
        let overrides = Overrides {
            port: Some(port),
            ..Overrides::default()
        };
        Settings::parse("", &overrides).unwrap()
    }

    /// A port that answers every connection with `answer`; it lives as long as the test.
    async fn server(answer: &'static str) -> u16 {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let mut request = [0; 4096];
                let _ = socket.read(&mut request).await;
                let _ = socket.write_all(answer.as_bytes()).await;
            }
        });
        port
    }

    fn at(base_url: &str) -> ProviderSettings {
        let text =
            format!("[[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"{base_url}\"");
        let settings = Settings::parse(&text, &Overrides::default()).unwrap();
        settings.provider("mine").unwrap().clone()
    }

    #[tokio::test]
    async fn any_answer_is_reachable() {
        let port = server("HTTP/1.1 418 No\r\ncontent-length: 0\r\n\r\n").await;
        let finding = provider(&at(&format!("http://localhost:{port}/v1"))).await;
        assert_eq!(finding.level, Level::Well, "{finding:?}");
        assert!(finding.text.contains("(HTTP 418 in "), "{finding:?}");
    }

    #[tokio::test]
    async fn silence_is_wrong_and_a_shipped_local_one_is_only_noted() {
        // The port of a service that no system runs any more.
        let mut mine = at("http://127.0.0.1:1");
        let finding = provider(&mine).await;
        assert_eq!(finding.level, Level::Wrong);
        assert!(finding.text.contains("Connection refused"), "{finding:?}");
        (mine.shipped, mine.local) = (true, true);
        assert_eq!(provider(&mine).await.level, Level::Note);
    }

    #[tokio::test]
    async fn a_certificate_file_that_is_none_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        let mut mine = at("https://127.0.0.1:1");
        mine.ca_file = Some(path.clone());
        assert!(provider(&mine).await.text.contains("cannot be used"));
        std::fs::write(&path, "hello").unwrap();
        let finding = provider(&mine).await;
        assert!(
            finding.text.contains("there is no PEM certificate in it"),
            "{finding:?}"
        );
    }

    #[tokio::test]
    async fn a_taken_port_names_its_owner() {
        let port = server("HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n").await;
        let findings = ports(&on_port(port)).await;
        let wrong: Vec<&Finding> = findings
            .iter()
            .filter(|finding| finding.level == Level::Wrong)
            .collect();
        assert_eq!(wrong.len(), 1, "{findings:?}");
        #[cfg(target_os = "linux")]
        assert!(
            wrong[0]
                .text
                .contains(&format!("(pid {})", std::process::id())),
            "{wrong:?}"
        );
    }

    #[tokio::test]
    async fn a_traygate_of_another_user_is_known_by_its_answer() {
        let port =
            server("HTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n{\"name\":\"traygate\"}").await;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        assert!(is_traygate(address, None).await);
        assert!(is_traygate(address, Some("traygate (pid 1)")).await);
        assert!(!is_traygate(address, Some("ollama (pid 1)")).await);
    }

    #[test]
    fn a_refused_file_is_wrong_and_the_rest_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let none = Overrides::default();
        let (findings, _) = settings(&path, &none);
        assert_eq!(findings[0].level, Level::Well);
        std::fs::write(&path, "[server]\nport = \"x\"").unwrap();
        let (findings, settings) = settings(&path, &none);
        assert_eq!(findings[0].level, Level::Wrong);
        assert!(
            findings[0].text.contains("line 2, [server] port"),
            "{findings:?}"
        );
        assert_eq!(settings, defaults());
    }

    #[test]
    fn a_folder_is_tried_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        assert!(data_folder(folder.path()).text.ends_with("is writable"));
        let deep = folder.path().join("a/b");
        assert!(data_folder(&deep).text.ends_with("can be made"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(data_folder(&file.join("b")).level, Level::Wrong);
    }

    #[test]
    fn a_database_is_whole_damaged_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(DATABASE_FILE);
        assert_eq!(database(&path).level, Level::Well);
        let connection = Connection::open(&path).unwrap();
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; CREATE TABLE calls (id TEXT);
                 INSERT INTO calls VALUES ('a');",
            )
            .unwrap();
        assert!(
            database(&path).text.ends_with("is whole"),
            "while it is in use"
        );
        drop(connection);
        assert!(database(&path).text.ends_with("is whole"));
        std::fs::write(
            &path,
            "this is no database, and long enough to be looked at".repeat(40),
        )
        .unwrap();
        let damaged = database(&path);
        assert_eq!(damaged.level, Level::Wrong);
        assert!(damaged.text.contains("sets it aside"), "{}", damaged.text);
    }

    #[test]
    fn the_keyring_is_wrong_only_where_it_is_needed() {
        let settings = defaults();
        let mut openai = settings.provider("openai").unwrap().clone();
        let levels = |users: &[&ProviderSettings], beyond, states| -> Vec<Level> {
            keyring_findings(users, beyond, states)
                .iter()
                .map(|finding| finding.level)
                .collect()
        };
        use KeyState::{NotStored, OtherOrigin, Stored};
        use Level::{Note, Well, Wrong};
        assert_eq!(levels(&[&openai], false, Err(KeyError::NoBus)), [Note]);
        assert_eq!(levels(&[&openai], true, Err(KeyError::NoBus)), [Wrong]);
        assert_eq!(
            levels(&[&openai], false, Ok(vec![Stored, NotStored])),
            [Well]
        );
        assert_eq!(
            levels(&[&openai], true, Ok(vec![Stored, NotStored])),
            [Well, Wrong]
        );
        assert_eq!(levels(&[&openai], true, Ok(vec![Stored, Stored])), [Well]);
        assert_eq!(
            levels(&[&openai], false, Ok(vec![OtherOrigin, NotStored])),
            [Well, Note]
        );
        openai.key = KeySource::Keyring;
        assert_eq!(levels(&[&openai], false, Err(KeyError::NoBus)), [Wrong]);
        assert_eq!(
            levels(&[&openai], false, Ok(vec![NotStored, NotStored])),
            [Well, Wrong]
        );
        assert_eq!(
            levels(&[&openai], false, Ok(vec![OtherOrigin, NotStored])),
            [Well, Wrong]
        );
    }
}
