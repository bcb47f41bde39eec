//! The product under test: the real core and listeners, started on a free port with a scratch
//! folder.
//!
//! ```ignore
//! let up = Upstream::chatting().await;
//! let app = App::before(&up).await;
//! let answer = app.chat(r#"{"model":"m","messages":[]}"#).await;
//! assert_eq!(answer.header("x-traygate-dedup"), Some("miss"));
//! assert_eq!(app.rows(1).await[0].outcome, Some(Outcome::Completed));
//! ```

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;
use traygate::clock::Clock;
use traygate::keys::Keys;
use traygate::run::{Options, Running, start};
use traygate::settings::{Overrides, Settings};
use traygate::store::pages::CallsQuery;
use traygate::store::queries::{CallRow, Reader};

use super::LIMIT;
use super::client::{Answer, Client, Outgoing, post, post_json};
use super::upstream::Upstream;

/// A running Traygate.
pub struct App {
    running: Option<Running>,
    folder: TempDir,
}

impl App {
    /// Starts with these settings, on a free port, without the OS keyring.
    pub async fn start(settings: &str) -> App {
        App::start_in(tempfile::tempdir().expect("a scratch folder"), settings).await
    }

    /// Starts with `up` as the provider `openai` and `anthropic`, and further settings: whole
    /// tables come after, so `more` must begin with one (`[dedup]`, `[limits]`, …) or be empty.
    pub async fn with(up: &Upstream, more: &str) -> App {
        App::start(&App::settings(up.addr(), more)).await
    }

    /// [`App::with`] without further settings.
    pub async fn before(up: &Upstream) -> App {
        App::with(up, "").await
    }

    /// The settings of [`App::with`].
    pub fn settings(up: SocketAddr, more: &str) -> String {
        format!(
            "{more}\n\
             [[provider]]\nname = \"openai\"\nbase_url = \"http://{up}/v1\"\n\
             [[provider]]\nname = \"anthropic\"\nbase_url = \"http://{up}\"\n\
             [[provider]]\nname = \"ollama\"\nbase_url = \"http://{up}\"\n"
        )
    }

    /// Starts on a folder that may hold an earlier record.
    pub async fn start_in(folder: TempDir, settings: &str) -> App {
        App::start_with(folder, settings, Keys::empty()).await
    }

    /// The same, by this clock.
    pub async fn start_by(folder: TempDir, settings: &str, clock: Clock) -> App {
        App::start_whole(folder, settings, Keys::empty(), clock).await
    }

    /// The same, with these keys as the keyring's.
    pub async fn start_with(folder: TempDir, settings: &str, keys: Keys) -> App {
        App::start_whole(folder, settings, keys, Clock::Boot).await
    }

    async fn start_whole(folder: TempDir, settings: &str, keys: Keys, clock: Clock) -> App {
        let overrides = Overrides {
            port: Some(0),
            ..Overrides::default()
        };
        let settings = match Settings::parse(settings, &overrides) {
            Ok(settings) => settings,
            Err(error) => panic!("the test's settings: {error}"),
        };
        let running = start(Options {
            settings,
            config: None,
            data_dir: folder.path().to_owned(),
            clock,
            keys: Some(keys),
        })
        .await
        .expect("Traygate starts");
        App {
            running: Some(running),
            folder,
        }
    }

    pub fn running(&self) -> &Running {
        self.running.as_ref().expect("it has not been stopped")
    }

    pub fn addr(&self) -> SocketAddr {
        self.running().address()
    }

    pub fn data_dir(&self) -> &Path {
        self.folder.path()
    }

    /// A raw connection to it.
    pub async fn client(&self) -> Client {
        Client::to(self.addr()).await
    }

    /// Posts JSON to a path and reads the whole answer.
    pub async fn post(&self, path: &str, body: &str) -> Answer {
        post_json(self.addr(), path, body).await
    }

    /// Posts to OpenAI's chat completions.
    pub async fn chat(&self, body: &str) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    /// Posts to Anthropic's messages.
    pub async fn messages(&self, body: &str) -> Answer {
        self.post("/v1/messages", body).await
    }

    /// Sends any request on a connection of its own and reads the whole answer.
    pub async fn ask(&self, request: Outgoing) -> Answer {
        self.client().await.ask(request).await
    }

    /// A chat request to be dressed further.
    pub fn chat_request(body: &str) -> Outgoing {
        post("/v1/chat/completions").json(body)
    }

    /// The rows on record once there are `count` that have ended, newest first.
    pub async fn rows(&self, count: usize) -> Vec<CallRow> {
        let ended = async {
            loop {
                let rows = self.rows_now();
                if rows.iter().filter(|row| row.outcome.is_some()).count() >= count {
                    return rows;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match tokio::time::timeout(LIMIT, ended).await {
            Ok(rows) => rows,
            Err(_) => panic!("no {count} rows have ended, but: {:#?}", self.rows_now()),
        }
    }

    /// The rows on record, newest first, open ones too.
    pub fn rows_now(&self) -> Vec<CallRow> {
        rows_in(self.data_dir())
    }

    /// Stops as a signal does: calls in flight may finish. Gives the folder back.
    pub async fn stop(mut self) -> TempDir {
        self.running
            .take()
            .expect("it has not been stopped")
            .shut_down()
            .await;
        self.folder
    }
}

/// The rows in a data folder, newest first; none where there is no record yet.
pub fn rows_in(data_dir: &Path) -> Vec<CallRow> {
    let Ok(reader) = Reader::open(data_dir) else {
        return Vec::new();
    };
    let all = CallsQuery {
        limit: 10_000,
        ..CallsQuery::default()
    };
    reader
        .calls(&all)
        .map_or_else(|_| Vec::new(), |page| page.calls)
}
