//! Settings that change while Traygate runs: patches and hand edits take effect at once, and no
//! call is cut.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use secrecy::SecretString;
use serde_json::{Value, json};
use tempfile::TempDir;
use traygate::clock::Clock;
use traygate::core::{Applied, Core};
use traygate::keys::Keys;
use traygate::run::{Options, Running, start};
use traygate::settings::on_disk::{PatchError, SettingsFile};
use traygate::settings::{DEFAULT_FILE, Flag, Overrides, Settings};

use super::support::app::rows_in;
use super::support::client::{Answer, BodyEnd, Client, Outgoing, get, post, post_json};
use super::support::upstream::{Gate, Reply, Upstream, chat_answer};
use super::support::{Span as _, eventually, must};

/// A running Traygate with its settings in a file.
struct Live {
    running: Running,
    file: PathBuf,
    folder: TempDir,
}

impl Live {
    /// With this file; the port is any free one.
    async fn with(text: &str) -> Live {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).expect("written");
        Live::at(folder, path, Overrides::default(), Keys::empty()).await
    }

    /// With `up` as the providers `openai` and `mine`.
    async fn before(up: &Upstream, more: &str) -> Live {
        Live::with(&config(up.addr(), more)).await
    }

    async fn at(folder: TempDir, path: PathBuf, overrides: Overrides, keys: Keys) -> Live {
        let file = SettingsFile {
            path: path.clone(),
            overrides,
        };
        let found = file.snapshot().expect("readable");
        let running = start(Options {
            settings: file.settings(&found).expect("good settings"),
            config: Some(file),
            data_dir: folder.path().join("data"),
            clock: Clock::Boot,
            keys: Some(keys),
        })
        .await
        .expect("Traygate starts");
        Live {
            running,
            file: path,
            folder,
        }
    }

    fn core(&self) -> &Arc<Core> {
        self.running.core()
    }

    fn addr(&self) -> SocketAddr {
        self.running.address()
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.file).expect("a file")
    }

    async fn try_patch(&self, patch: Value) -> Result<Applied, PatchError> {
        must("the patch", self.core().patch_settings(patch, None)).await
    }

    async fn patch(&self, patch: Value) -> Applied {
        let told = patch.to_string();
        match self.try_patch(patch).await {
            Ok(applied) => applied,
            Err(error) => panic!("{told}: {error}"),
        }
    }

    async fn chat(&self, body: &str) -> Answer {
        post_json(self.addr(), "/openai/v1/chat/completions", body).await
    }

    /// The value in force, by `limits.queue` or `provider.openai.queue`.
    fn value(&self, field: &str) -> Value {
        self.described(field)["value"].clone()
    }

    fn described(&self, field: &str) -> Value {
        let (all, _) = self.core().described_settings();
        let mut steps = field.split('.');
        let section = steps.next().expect("a section");
        if section != "provider" {
            let key = steps.next().expect("a key");
            return all["settings"][section]["settings"][key].clone();
        }
        let (name, key) = (steps.next().expect("a name"), steps.next().expect("a key"));
        let providers = all["providers"].as_array().expect("a list");
        let found = providers.iter().find(|provider| provider["name"] == name);
        found.map_or(Value::Null, |found| found["settings"][key].clone())
    }

    async fn comes_to(&self, field: &str, value: Value) {
        eventually(&format!("{field} = {value}"), async || {
            self.value(field) == value
        })
        .await;
    }

    async fn is_refused(&self, words: &str) {
        eventually(&format!("a refusal with {words:?}"), async || {
            let refusal = self.core().settings_refusal();
            refusal.is_some_and(|refusal| refusal.contains(words))
        })
        .await;
    }
}

fn config(up: SocketAddr, more: &str) -> String {
    format!(
        "# the port is free\n[server]\nport = 0 # any\n{more}\n\
         [[provider]]\nname = \"openai\" # c1\nbase_url = \"http://{up}/v1\"\n\
         [[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"http://{up}/v1\"\n"
    )
}

/// One that nobody else is likely to take in the next moment.
fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("bound").port()
}

fn body(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"call {n}"}}]}}"#)
}

/// Answers each call with its own question, once the gate lets it.
async fn gated(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request| {
        let reply = Reply::json(
            200,
            chat_answer(&request.json()["messages"][0]["content"].to_string()),
        );
        match request.is_call() {
            true => reply.held_by(&gate),
            false => reply,
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_calls_in_flight_live_through_every_kind_of_change() {
    let gate = Gate::new();
    let up = gated(&gate).await;
    let other = Upstream::chatting().await;
    let live = Live::before(
        &up,
        "[limits]\nconcurrency = 50\n[dedup]\nwindow_secs = 300",
    )
    .await;
    let old = live.addr();
    let calls: Vec<_> = (0..200)
        .map(|n| {
            // Half on a provider that goes away.
            let path = ["/openai/v1/chat/completions", "/mine/v1/chat/completions"][n % 2];
            tokio::spawn(async move { post_json(old, path, body(n)).await })
        })
        .collect();
    up.wait_for_in_flight(100).await;
    eventually("the rest waits", async || {
        let world = live.core().world();
        let pools = world.providers.iter().map(|one| one.state.pool.snapshot());
        pools.map(|pool| pool.waiting).sum::<usize>() == 100
    })
    .await;

    live.patch(json!({"limits": {"concurrency": 10, "queue": 1}}))
        .await;
    live.patch(json!({"limits": {"concurrency": 101, "queue": 1000}}))
        .await;
    up.wait_for_in_flight(200).await;
    live.patch(
        json!({"limits": {"timeout_secs": 1, "unstreamed_timeout_secs": 0.01, "connect_secs": 5}}),
    )
    .await;
    live.patch(json!({"breaker": {"failures": 1, "open_secs": 0.5}}))
        .await;
    live.patch(json!({"dedup": {"window_secs": 0, "max_mb": 1, "enabled": false}}))
        .await;
    live.patch(json!({"provider": {"mine": null, "openai": {"base_url": other.url() + "/v1"}}}))
        .await;
    live.patch(
        json!({"server": {"allowed_hosts": ["box.lan"], "max_body_mb": 1, "drain_secs": 1}}),
    )
    .await;
    let moved = live.patch(json!({"server": {"port": free_port()}})).await;
    assert_eq!(moved.address, Some(live.addr()));
    assert_ne!(live.addr(), old);

    // New calls see the new world while the old ones are still in the old one.
    let fresh = live.chat(&body(1000)).await;
    assert_eq!(fresh.status(), 200);
    assert_eq!((up.calls(), other.calls()), (200, 1));
    let gone = post_json(live.addr(), "/mine/v1/chat/completions", body(1)).await;
    assert_eq!(gone.status(), 404);

    gate.open();
    for (n, call) in calls.into_iter().enumerate() {
        let answer = must("each of them", call).await.expect("no panic");
        assert_eq!(answer.status(), 200, "call {n}: {}", answer.text());
        assert!(
            answer.text().contains(&format!("call {n}\\")),
            "{}",
            answer.text()
        );
    }
    assert_eq!(up.calls(), 200);
    assert_eq!(up.max_in_flight(), 200);
    eventually("a row for each", async || {
        let rows = rows_in(&live.folder.path().join("data"));
        let ended = rows
            .iter()
            .filter(|row| row.outcome.as_deref() == Some("completed"));
        ended.count() == 201
    })
    .await;
}

#[tokio::test]
async fn a_patch_is_in_force_when_it_is_answered_and_changes_nothing_else_in_the_file() {
    let live = Live::with(DEFAULT_FILE.replace("#port = 7337", "port = 0").as_str()).await;
    let before = live.text();
    let (_, etag) = live.core().described_settings();
    let applied = live
        .patch(
            json!({"limits": {"timeout_secs": 60}, "provider": {"anthropic": {"concurrency": 8}}}),
        )
        .await;
    assert_eq!(
        applied.changed,
        [
            "limits.timeout_secs",
            "provider.anthropic.concurrency",
            "provider.anthropic.name"
        ]
    );
    assert_eq!(applied.address, None);
    assert_ne!(applied.etag, etag);
    assert_eq!(live.core().described_settings().1, applied.etag);
    assert_eq!(live.value("limits.timeout_secs"), 60);
    assert_eq!(live.value("provider.openai.timeout_secs"), 60);
    assert_eq!(live.value("provider.anthropic.concurrency"), 8);
    let expected = before
        .replace("\n#timeout_secs = 120\n", "\ntimeout_secs = 60\n")
        .replace(
            "#[[provider]]\n#name = \"anthropic\"\n",
            "[[provider]]\nname = \"anthropic\"\nconcurrency = 8\n",
        );
    assert_eq!(live.text(), expected);
    live.patch(json!({"limits": {"timeout_secs": null}, "provider": {"anthropic": null}}))
        .await;
    assert_eq!(live.text(), before, "and back again, byte for byte");
    assert_eq!(live.value("provider.anthropic.concurrency"), 16);
}

#[tokio::test]
async fn a_value_that_cannot_be_is_refused_in_words_and_nothing_changes() {
    let live = Live::with("[server]\nport = 0\n[limits]\nqueue = 5 # mine\n").await;
    let before = live.text();
    for (patch, words) in [
        (
            json!({"limits": {"timeout_secs": 0}}),
            "[limits] timeout_secs: must be 0.01 to 86400 seconds, is 0",
        ),
        (
            json!({"limits": {"queue": 6, "timeout": 5}}),
            "[limits] timeout: is not a known setting. Did you mean `timeout_secs`?",
        ),
        (
            json!({"sever": {"port": 1}}),
            "`sever`: is not a known setting. Did you mean `server`?",
        ),
        (
            json!({"provider": {"mine": {"kind": "openai"}}}),
            "provider \"mine\" base_url: is missing, and needed for a provider of your own",
        ),
        (
            json!({"route": [{"model": "x", "provider": "opnai"}]}),
            "[[route]] provider: is no provider's name. Did you mean \"openai\"?",
        ),
        (
            json!({"limits": 5}),
            "limits: must be an object: {\"field\": value}",
        ),
        (
            json!({"server": {"port": live.addr().port()}, "provider": {"openai": {"base_url": format!("http://{}", live.addr())}}}),
            "provider \"openai\" has Traygate's own address",
        ),
    ] {
        let error = live.try_patch(patch.clone()).await.expect_err("refused");
        assert!(error.to_string().contains(words), "{patch}: {error}");
        assert!(
            !error.to_string().contains("line"),
            "of a patch there is no line: {error}"
        );
        assert_eq!(live.text(), before);
    }
    assert_eq!(live.value("limits.queue"), 5);
    assert_eq!(live.core().settings_refusal(), None);
}

#[tokio::test]
async fn of_two_editors_neither_loses_the_others_change() {
    let live = Live::with("# mine\n[server]\nport = 0\n").await;
    let (_, etag) = live.core().described_settings();
    let with = |field: &str, value: i64| {
        let patch = json!({"limits": {field: value}});
        live.core().patch_settings(patch, Some(etag.clone()))
    };
    let (one, two) = tokio::join!(with("queue", 1), with("concurrency", 2));
    let (won, lost) = match (one, two) {
        (Ok(won), Err(lost)) | (Err(lost), Ok(won)) => (won, lost),
        other => panic!("one of them: {other:?}"),
    };
    let PatchError::Stale { etag: present } = lost else {
        panic!("{lost}")
    };
    assert_eq!(present, won.etag, "it is told what to read again");

    // Without a mark they are done one after the other, all of them.
    let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
    let patches: Vec<_> = names
        .iter()
        .map(|name| {
            let core = live.core().clone();
            let patch = json!({"provider": {name: {"kind": "openai", "base_url": "http://h/v1"}}});
            tokio::spawn(async move { core.patch_settings(patch, None).await })
        })
        .collect();
    for patch in patches {
        must("each", patch)
            .await
            .expect("no panic")
            .expect("applied");
    }
    let world = live.core().world();
    let there: BTreeSet<String> = world
        .providers
        .iter()
        .map(|one| one.name().to_string())
        .collect();
    assert!(names.iter().all(|name| there.contains(name)), "{there:?}");
    assert!(live.text().starts_with("# mine\n[server]\nport = 0\n"));

    // A hand edit that has not been noticed yet counts too.
    let stale = live.core().described_settings().1;
    std::fs::write(&live.file, "[server]\nport = 0\n[limits]\nqueue = 77\n").expect("written");
    let patch = json!({"limits": {"concurrency": 3}});
    let refused = live.core().patch_settings(patch.clone(), Some(stale)).await;
    assert!(
        matches!(refused, Err(PatchError::Stale { .. })),
        "{refused:?}"
    );
    live.patch(patch).await;
    assert_eq!(
        live.text(),
        "[server]\nport = 0\n[limits]\nqueue = 77\nconcurrency = 3\n"
    );
    assert_eq!(
        (live.value("limits.queue"), live.value("limits.concurrency")),
        (json!(77), json!(3))
    );
}

#[tokio::test]
async fn a_hand_edit_is_picked_up_however_the_editor_writes() {
    let live = Live::with("[server]\nport = 0\n").await;
    let text = |queue: i64| format!("[server]\nport = 0\n[limits]\nqueue = {queue}\n");
    // In place.
    std::fs::write(&live.file, text(1)).expect("written");
    live.comes_to("limits.queue", json!(1)).await;
    // By another file renamed over it.
    let draft = live.file.with_extension("swp");
    std::fs::write(&draft, text(2)).expect("written");
    std::fs::rename(&draft, &live.file).expect("renamed");
    live.comes_to("limits.queue", json!(2)).await;
    // By moving the old one away first.
    std::fs::rename(&live.file, live.file.with_extension("bak")).expect("moved");
    std::fs::write(&live.file, text(3)).expect("written");
    live.comes_to("limits.queue", json!(3)).await;
    // In pieces.
    let mut file = std::fs::File::create(&live.file).expect("opened");
    for piece in text(4).split_inclusive('\n') {
        std::io::Write::write_all(&mut file, piece.as_bytes()).expect("written");
    }
    drop(file);
    live.comes_to("limits.queue", json!(4)).await;
    assert_eq!(live.core().settings_refusal(), None);
}

#[tokio::test]
async fn a_bad_edit_is_refused_with_its_line_while_the_old_settings_go_on() {
    let up = Upstream::chatting().await;
    let live = Live::before(&up, "[limits]\nqueue = 5").await;
    let good = live.text();
    for (bad, words) in [
        (
            good.replace("queue = 5", "queue = -5"),
            "line 5, [limits] queue: must be 0 to 1000000, is -5",
        ),
        (
            good.replace("queue = 5", "queu = 5"),
            "Did you mean `queue`?",
        ),
        (good.replace("queue = 5", "queue = "), "this is not TOML"),
    ] {
        std::fs::write(&live.file, bad).expect("written");
        live.is_refused(words).await;
        assert_eq!(live.value("limits.queue"), 5);
        assert_eq!(live.chat(&body(1)).await.status(), 200);
    }
    // A patch cannot be laid onto it, and says where it is wrong.
    let error = live
        .try_patch(json!({"limits": {"concurrency": 2}}))
        .await
        .expect_err("refused");
    assert!(
        error
            .to_string()
            .contains("config.toml, line 5: this is not TOML"),
        "{error}"
    );

    std::fs::write(&live.file, good.replace("queue = 5", "queue = 6")).expect("written");
    live.comes_to("limits.queue", json!(6)).await;
    eventually("the refusal is gone", async || {
        live.core().settings_refusal().is_none()
    })
    .await;

    // The old text again is what is in force: nothing is left to refuse.
    std::fs::write(&live.file, "[limits]\nqueue = \"x\"").expect("written");
    live.is_refused("must be a whole number").await;
    std::fs::write(&live.file, good.replace("queue = 5", "queue = 6")).expect("written");
    eventually("the refusal is gone", async || {
        live.core().settings_refusal().is_none()
    })
    .await;

    // A patch may mend a value that is refused.
    std::fs::write(&live.file, good.replace("queue = 5", "queue = -1")).expect("written");
    live.is_refused("[limits] queue").await;
    live.patch(json!({"limits": {"queue": 9}})).await;
    assert_eq!(live.value("limits.queue"), 9);
    assert_eq!(live.core().settings_refusal(), None);
}

#[cfg(unix)]
#[tokio::test]
async fn a_path_that_leads_to_no_file_holds_nothing_up() {
    let live = Live::with("[server]\nport = 0\n[limits]\nqueue = 5\n").await;
    let good = live.text();
    for made in [vec!["mkfifo"], vec!["ln", "-s", "/dev/zero"], vec!["mkdir"]] {
        std::fs::remove_file(&live.file).expect("removed");
        let mut command = std::process::Command::new(made[0]);
        let status = command.args(&made[1..]).arg(&live.file).status();
        assert!(status.expect("it runs").success());
        live.is_refused("and must be a file").await;
        assert_eq!(live.value("limits.queue"), 5);
        let error = live.try_patch(json!({"limits": {"queue": 6}})).await;
        let error = error.expect_err("refused").to_string();
        assert!(
            error.contains("config.toml: cannot be read: it is "),
            "{error}"
        );
        let started = Settings::load(&live.file, &Overrides::default());
        let error = started.expect_err("refused").to_string();
        assert!(
            error.contains("config.toml: cannot be read: it is "),
            "{error}"
        );

        let gone = std::fs::remove_file(&live.file);
        gone.or_else(|_| std::fs::remove_dir(&live.file))
            .expect("removed");
        std::fs::write(&live.file, &good).expect("written");
        eventually("the refusal is gone", async || {
            live.core().settings_refusal().is_none()
        })
        .await;
    }
    live.patch(json!({"limits": {"queue": 6}})).await;
    assert_eq!(live.text(), good.replace("queue = 5", "queue = 6"));
}

#[tokio::test]
async fn a_half_saved_file_does_not_count() {
    let up = Upstream::chatting().await;
    let live = Live::before(&up, "[limits]\nqueue = 5").await;
    let good = live.text();
    let ask = async |n: usize| {
        let path = "/mine/v1/chat/completions";
        post_json(live.addr(), path, body(n)).await.status()
    };
    // As a shell writes: nothing at first, then a part.
    for (half, times) in [("", 20), (&good[..good.len() / 2], 2)] {
        std::fs::write(&live.file, half).expect("written");
        for n in 0..times {
            assert_eq!(ask(n).await, 200, "{half:?}");
            tokio::time::sleep(50.ms()).await;
        }
        std::fs::write(&live.file, &good).expect("written");
    }
    // A patch is not laid onto it either, and what is being saved is not lost.
    std::fs::write(&live.file, "").expect("written");
    let patch = live
        .core()
        .patch_settings(json!({"limits": {"concurrency": 3}}), None);
    let saved = async {
        tokio::time::sleep(50.ms()).await;
        std::fs::write(&live.file, good.replace("queue = 5", "queue = 6")).expect("written");
    };
    let (patched, ()) = tokio::join!(must("the patch", patch), saved);
    patched.expect("applied");
    let both = "queue = 6\nconcurrency = 3";
    assert_eq!(live.text(), good.replace("queue = 5", both));
    assert_eq!(live.value("limits.queue"), 6);
    assert_eq!(ask(100).await, 200);
    // One that stays empty was meant to be.
    std::fs::write(&live.file, "").expect("written");
    live.comes_to("limits.queue", json!(1000)).await;
    assert_eq!(live.core().settings_refusal(), None);
}

#[tokio::test]
async fn a_message_names_the_setting_that_is_in_force() {
    let up = Upstream::hanging().await;
    let url = up.url();
    let live = Live::with(&format!(
        "[server]\nport = 0\n[limits]\nconcurrency = 1\nqueue = 1\n\
         [breaker]\nfailures = 1\nrecovery_check_secs = 0\n\
         [[provider]]\nname = \"own\"\nkind = \"openai\"\nbase_url = \"{url}/v1\"\n\
         concurrency = 1\nqueue = 1\nqueue_secs = 0.1\nunstreamed_timeout_secs = 0.5\nopen_secs = 60\n\
         [[provider]]\nname = \"heir\"\nkind = \"openai\"\nbase_url = \"{url}/v1\"\n\
         queue_secs = 0.1\n\
         [[provider]]\nname = \"near\"\nkind = \"openai\"\nbase_url = \"{url}/v1\"\nlocal = true\n\
         concurrency = 1\nqueue_secs = 0.1\n"
    ))
    .await;
    let pool = |name: &str| {
        live.core()
            .world()
            .provider(name)
            .expect("there")
            .state
            .pool
            .snapshot()
    };
    for (name, full, waited) in [
        (
            "own",
            "(provider.own.queue); try again later, or raise it or provider.own.concurrency",
            "(provider.own.queue_secs); raise provider.own.concurrency or provider.own.queue_secs",
        ),
        (
            "heir",
            "(limits.queue); try again later, or raise it or limits.concurrency",
            "(provider.heir.queue_secs); raise limits.concurrency or provider.heir.queue_secs",
        ),
        (
            "near",
            "(limits.queue); try again later, or raise it or provider.near.concurrency",
            "(provider.near.queue_secs); raise provider.near.concurrency or provider.near.queue_secs",
        ),
    ] {
        let path = format!("/{name}/v1/chat/completions");
        let mut clients = Vec::new();
        for n in 0..2 {
            let mut client = Client::to(live.addr()).await;
            client.send(post(&path).json(body(n))).await;
            eventually("it has its place", async || {
                let pool = pool(name);
                pool.in_flight + pool.waiting > n
            })
            .await;
            clients.push(client);
        }
        let refused = post_json(live.addr(), &path, body(2)).await;
        assert!(refused.text().contains(full), "{}", refused.text());
        let late = clients[1].read_to_end().await;
        assert!(late.text().contains(waited), "{}", late.text());
        if name == "own" {
            let cut = clients[0].read_to_end().await;
            let words = "(provider.own.unstreamed_timeout_secs)";
            assert!(cut.text().contains(words), "{}", cut.text());
            let open = post_json(live.addr(), &path, body(3)).await;
            assert!(
                open.text().contains("(provider.own.open_secs)"),
                "{}",
                open.text()
            );
        }
    }
}

#[tokio::test]
async fn a_file_that_goes_away_takes_nothing_with_it() {
    let live = Live::with("[server]\nport = 0\n[limits]\nqueue = 5 # mine\n").await;
    let before = live.text();
    std::fs::remove_file(&live.file).expect("removed");
    live.is_refused("config.toml is gone; the settings go on as they were")
        .await;
    assert_eq!(live.value("limits.queue"), 5);
    // A patch writes it anew with all there was.
    live.patch(json!({"limits": {"queue": 6}})).await;
    assert_eq!(live.text(), before.replace("queue = 5", "queue = 6"));
    assert_eq!(live.core().settings_refusal(), None);
}

#[tokio::test]
async fn a_file_may_come_where_neither_it_nor_its_folder_was() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("not/yet/config.toml");
    let overrides = Overrides {
        port: Some(0),
        ..Overrides::default()
    };
    let live = Live::at(folder, path.clone(), overrides, Keys::empty()).await;
    assert_eq!(live.core().settings_refusal(), None);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    std::fs::write(&path, "[limits]\nqueue = 7\n").expect("written");
    live.comes_to("limits.queue", json!(7)).await;
    // And again, in a folder of the same name.
    std::fs::remove_dir_all(path.parent().expect("a folder")).expect("removed");
    live.is_refused("is gone").await;
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    std::fs::write(&path, "[limits]\nqueue = 8\n").expect("written");
    live.comes_to("limits.queue", json!(8)).await;
    eventually("the refusal is gone", async || {
        live.core().settings_refusal().is_none()
    })
    .await;
}

#[tokio::test]
async fn a_patch_makes_the_commented_file_where_there_is_none() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("not/yet/config.toml");
    let overrides = Overrides {
        port: Some(0),
        ..Overrides::default()
    };
    let live = Live::at(folder, path, overrides, Keys::empty()).await;
    live.patch(json!({"limits": {"queue": 7}})).await;
    assert_eq!(
        live.text(),
        DEFAULT_FILE.replace("#queue = 1000", "queue = 7")
    );
}

#[cfg(unix)]
#[tokio::test]
async fn a_linked_file_is_followed_and_stays_linked() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let folder = tempfile::tempdir().expect("a scratch folder");
    let at = |name: &str| folder.path().join(name);
    let write = |path: &Path, queue: i64| {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        let text = format!("[server]\nport = 0\n[limits]\nqueue = {queue}\n");
        std::fs::write(path, text).expect("written");
    };
    let (first, second, link) = (at("one/real.toml"), at("two/real.toml"), at("config.toml"));
    write(&first, 1);
    write(&second, 2);
    std::fs::set_permissions(&first, std::fs::Permissions::from_mode(0o640)).expect("set");
    symlink("one/real.toml", &link).expect("linked");
    let live = Live::at(folder, link.clone(), Overrides::default(), Keys::empty()).await;

    live.patch(json!({"limits": {"concurrency": 3}})).await;
    assert!(link.symlink_metadata().expect("there").is_symlink());
    let text = std::fs::read_to_string(&first).expect("read");
    assert_eq!(
        text,
        "[server]\nport = 0\n[limits]\nqueue = 1\nconcurrency = 3\n"
    );
    assert_eq!(
        first.metadata().expect("there").permissions().mode() & 0o777,
        0o640
    );

    write(&first, 5);
    live.comes_to("limits.queue", json!(5)).await;
    // The link leads elsewhere.
    let swap = live.file.with_extension("new");
    symlink("two/real.toml", &swap).expect("linked");
    std::fs::rename(&swap, &link).expect("renamed");
    live.comes_to("limits.queue", json!(2)).await;
    write(&second, 6);
    live.comes_to("limits.queue", json!(6)).await;
}

#[tokio::test]
async fn a_new_port_is_bound_first_and_old_connections_finish() {
    let gate = Gate::new();
    let up = gated(&gate).await;
    let live = Live::before(&up, "").await;
    let old = live.addr();
    let call = tokio::spawn(async move {
        let mut client = Client::to(old).await;
        let path = "/openai/v1/chat/completions";
        let answer = client.ask(post(path).json(body(1))).await;
        (answer, client.closed().await)
    });
    let mut idle = Client::to(old).await;
    up.wait_for_in_flight(1).await;

    // One that is taken leaves everything as it was.
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let before = live.text();
    let port = taken.local_addr().expect("bound").port();
    let error = live
        .try_patch(json!({"server": {"port": port}}))
        .await
        .expect_err("taken");
    let told = error.to_string();
    let begins = format!("server.port: 127.0.0.1:{port} is taken: ");
    assert!(told.starts_with(&begins), "{told}");
    let ends = " has it. Stop that, or choose another server.port";
    assert!(told.ends_with(ends), "{told}");
    if cfg!(target_os = "linux") {
        let this = format!("(pid {})", std::process::id());
        assert!(told.contains(&this), "{told}");
    }
    assert_eq!((live.text(), live.addr()), (before.clone(), old));
    assert_eq!(live.value("server.port"), 0);

    // The same by hand.
    std::fs::write(
        &live.file,
        before.replace("port = 0", &format!("port = {port}")),
    )
    .expect("written");
    live.is_refused(&format!("127.0.0.1:{port} is taken")).await;
    std::fs::write(&live.file, &before).expect("written");
    eventually("the refusal is gone", async || {
        live.core().settings_refusal().is_none()
    })
    .await;

    let port = free_port();
    let applied = live.patch(json!({"server": {"port": port}})).await;
    let new = SocketAddr::from(([127, 0, 0, 1], port));
    assert_eq!((applied.address, live.addr()), (Some(new), new));
    assert_eq!(
        live.text(),
        before.replace("port = 0", &format!("port = {port}"))
    );
    for addr in [new, SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port))] {
        let health = super::support::client::fetch(addr, "/traygate/health").await;
        assert_eq!(health.status(), 200);
    }
    let refused = std::net::TcpStream::connect(old).expect_err("the old port is closed");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(
        must("an idle connection ends", idle.closed()).await,
        BodyEnd::Clean
    );
    gate.open();
    let (answer, end) = must("the call in flight", call).await.expect("no panic");
    assert_eq!(answer.status(), 200);
    assert_eq!(end, BodyEnd::Clean, "then its connection ends");
}

#[tokio::test]
async fn more_addresses_come_and_go_on_the_same_port() {
    let live = Live::with("[server]\nport = 0\n").await;
    let health = |addr: SocketAddr| super::support::client::fetch(addr, "/traygate/health");
    let old = live.addr();
    // All of a family exclude its loopback's own socket.
    let applied = live.patch(json!({"server": {"host": ["0.0.0.0"]}})).await;
    assert_eq!((applied.address, live.addr()), (None, old));
    // Nobody from there has a token to show.
    let told = &applied.warnings;
    assert!(told[0].contains("no access token is known"), "{told:?}");
    assert_eq!(*told, live.core().settings_warnings());
    assert_eq!(health(old).await.status(), 200);
    let applied = live.patch(json!({"server": {"host": null}})).await;
    assert_eq!(applied.warnings, Vec::<String>::new());
    assert_eq!(live.addr(), old);
    assert_eq!(health(old).await.status(), 200);
    // The others of loopback are not listened on, and not in silence.
    let applied = live.patch(json!({"server": {"host": ["127.0.0.2"]}})).await;
    let told = &applied.warnings;
    assert!(told[0].contains("other loopback addresses"), "{told:?}");
    assert_eq!(told.len(), 1, "and no token is needed there: {told:?}");
    // One that is not this machine's: the doors are as they were.
    let error = live
        .try_patch(json!({"server": {"host": ["0.0.0.0", "2001:db8::1"]}}))
        .await;
    assert!(
        error
            .expect_err("nobody's")
            .to_string()
            .starts_with("server.host: [2001:db8::1]:")
    );
    assert_eq!(health(old).await.status(), 200);
}

#[tokio::test]
async fn what_a_flag_or_a_variable_says_cannot_be_patched() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("config.toml");
    std::fs::write(&path, "[limits]\nqueue = 5\n").expect("written");
    let overrides = Overrides {
        port: Some(0),
        timeout: Some(1500.ms()),
        from_variables: vec![Flag::Timeout],
        ..Overrides::default()
    };
    let live = Live::at(folder, path, overrides, Keys::empty()).await;
    for (patch, words) in [
        (
            json!({"server": {"port": 7400}}),
            "server.port is set by --port",
        ),
        (
            json!({"limits": {"timeout_secs": 3}}),
            "limits.timeout_secs is set by TRAYGATE_TIMEOUT",
        ),
        (
            json!({"provider": {"ollama": {"unstreamed_timeout_secs": 3}}}),
            "provider.ollama.unstreamed_timeout_secs is set by TRAYGATE_TIMEOUT",
        ),
    ] {
        let error = live.try_patch(patch).await.expect_err("locked");
        assert!(error.to_string().starts_with(words), "{error}");
    }
    live.patch(json!({"limits": {"queue": 6}})).await;
    let port = live.described("server.port");
    assert_eq!(
        (&port["from"], &port["locked_by"]),
        (&json!("flag"), &json!("--port"))
    );
    let timeout = live.described("provider.ollama.timeout_secs");
    assert_eq!(timeout["value"], 1.5);
    assert_eq!(
        (&timeout["from"], &timeout["locked_by"]),
        (&json!("environment"), &json!("TRAYGATE_TIMEOUT"))
    );
    // A hand edit keeps what wins over it.
    std::fs::write(&live.file, "[server]\nport = 7400\n[limits]\nqueue = 7\n").expect("written");
    let before = live.addr();
    live.comes_to("limits.queue", json!(7)).await;
    assert_eq!(live.addr(), before);
}

#[tokio::test]
async fn without_a_file_there_is_nothing_to_patch() {
    let app = super::support::app::App::start("").await;
    let core = app.running().core();
    let error = core
        .patch_settings(json!({}), None)
        .await
        .expect_err("no file");
    assert!(matches!(error, PatchError::NoFile));
    assert_eq!(core.described_settings().0["file"], Value::Null);
}

#[tokio::test]
async fn a_provider_that_did_not_change_keeps_its_connections() {
    let up = Upstream::chatting().await;
    let live = Live::before(&up, "").await;
    live.chat(&body(1)).await;
    for patch in [
        json!({"limits": {"concurrency": 3, "timeout_secs": 30}}),
        json!({"provider": {"mine": null}}),
        json!({"dedup": {"window_secs": 3}, "server": {"allowed_hosts": ["a.lan"]}}),
        json!({"provider": {"openai": {"queue": 9, "failures": 2}}}),
    ] {
        live.patch(patch).await;
        assert_eq!(live.chat(&body(2)).await.status(), 200);
    }
    assert_eq!(up.connections(), 1);
}

#[tokio::test]
async fn an_open_breaker_follows_its_settings() {
    let up = Upstream::failing(500).await;
    let never = "[breaker]\nfailures = 1\nopen_secs = 3600\nrecovery_check_secs = 0";
    let live = Live::before(&up, never).await;
    assert_eq!(live.chat(&body(1)).await.status(), 500);
    assert_eq!(
        live.chat(&body(2)).await.header("x-traygate-error"),
        Some("breaker_open")
    );
    // Switched on, the check begins with a breaker that is open already.
    live.patch(json!({"breaker": {"recovery_check_secs": 0.02}}))
        .await;
    up.wait_for_requests(3).await;
    up.set_handler(Reply::chat);
    let world = live.core().world();
    let state = &world.provider("openai").expect("there").state;
    eventually("a check has answered", async || {
        state.refusal(None, live.core().clock.now()).is_none()
    })
    .await;
    assert_eq!(live.chat(&body(3)).await.status(), 200);
    assert_eq!(up.calls(), 2);
}

#[tokio::test]
async fn a_check_that_sleeps_long_is_woken_by_a_shorter_interval() {
    let up = Upstream::failing(500).await;
    let seldom = "[breaker]\nfailures = 1\nopen_secs = 3600\nrecovery_check_secs = 3600";
    let live = Live::before(&up, seldom).await;
    live.chat(&body(1)).await;
    live.patch(json!({"breaker": {"recovery_check_secs": 0.02}}))
        .await;
    up.wait_for_requests(3).await;
}

#[tokio::test]
async fn a_provider_that_is_taken_out_is_no_longer_looked_for() {
    let up = Upstream::failing(500).await;
    let live = Live::before(
        &up,
        "[breaker]\nfailures = 1\nopen_secs = 3600\nrecovery_check_secs = 0.02",
    )
    .await;
    post_json(live.addr(), "/mine/v1/chat/completions", body(1)).await;
    up.wait_for_requests(3).await;
    let state = {
        let world = live.core().world();
        Arc::downgrade(&world.provider("mine").expect("there").state)
    };
    live.patch(json!({"provider": {"mine": null}})).await;
    eventually("its watch has ended", async || state.upgrade().is_none()).await;
}

#[tokio::test]
async fn another_address_begins_with_a_closed_breaker_and_without_the_old_ones_key() {
    let (dead, up) = (Upstream::dead_port(), Upstream::chatting().await);
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("config.toml");
    let text = format!(
        "[server]\nport = 0\n[breaker]\nfailures = 1\nrecovery_check_secs = 0\n\
         [[provider]]\nname = \"openai\"\nbase_url = \"{}/v1\"\n",
        dead.url()
    );
    std::fs::write(&path, text).expect("written");
    let key = ("openai".into(), dead.url(), SecretString::from("sk-stored"));
    let live = Live::at(folder, path, Overrides::default(), Keys::holding([key])).await;
    assert_eq!(live.chat(&body(1)).await.status(), 502);
    assert_eq!(
        live.chat(&body(1)).await.header("x-traygate-error"),
        Some("breaker_open")
    );
    live.patch(json!({"provider": {"openai": {"base_url": up.url() + "/v1"}}}))
        .await;
    assert_eq!(live.chat(&body(1)).await.status(), 200);
    assert_eq!(up.call(0).request.header("authorization"), None);
}

#[tokio::test]
async fn who_may_call_and_what_is_shared_follow_at_once() {
    let up = Upstream::chatting().await;
    let live = Live::before(&up, "").await;
    let named = || {
        post("/openai/v1/chat/completions")
            .json(body(1))
            .header("host", "box.lan")
    };
    let ask = async || Client::to(live.addr()).await.ask(named()).await;
    assert_eq!(ask().await.status(), 403);
    live.patch(json!({"server": {"allowed_hosts": ["box.lan"]}}))
        .await;
    assert_eq!(ask().await.header("x-traygate-dedup"), Some("miss"));
    // What is kept outlives another size and a longer window.
    live.patch(json!({"dedup": {"max_mb": 256, "window_secs": 600}}))
        .await;
    assert_eq!(ask().await.header("x-traygate-dedup"), Some("cached"));
    live.patch(json!({"dedup": {"rule": [{"model": "m", "mode": "off"}]}}))
        .await;
    assert_eq!(ask().await.header("x-traygate-dedup"), Some("off"));
    live.patch(json!({"dedup": {"rule": null}})).await;
    assert_eq!(ask().await.header("x-traygate-dedup"), Some("cached"));
    live.patch(json!({"route": [{"model": "m", "provider": "demo"}]}))
        .await;
    let bare = post_json(live.addr(), "/v1/chat/completions", body(1)).await;
    assert_eq!(bare.header("x-traygate-provider"), Some("demo"));
    assert_eq!(
        bare.status(),
        200,
        "the demo's address is put in again: {}",
        bare.text()
    );
    assert_eq!(up.calls(), 2);
}

#[tokio::test]
async fn the_end_waits_as_long_as_the_settings_say_now() {
    let up = Upstream::hanging().await;
    let live = Live::before(&up, "drain_secs = 3600").await;
    let addr = live.addr();
    let call = tokio::spawn(async move {
        Client::to(addr)
            .await
            .send(post("/openai/v1/chat/completions").json(body(1)))
            .await
    });
    up.wait_for_in_flight(1).await;
    must("sent", call).await.expect("no panic");
    let addr = live.addr();
    let mut waits = Client::to(addr).await;
    waits
        .send(post("/openai/v1/chat/completions").json(body(2)))
        .await;
    up.wait_for_in_flight(1).await;
    live.patch(json!({"server": {"drain_secs": 0.05}})).await;
    let cut = must("the end", live.running.shut_down()).await;
    assert!(cut >= 1, "{cut}");
}

#[tokio::test]
async fn the_description_tells_of_every_setting_and_of_no_secret() {
    let up = Upstream::chatting().await;
    let live = Live::before(
        &up,
        "[limits]\nqueue = 5\n[[provider]]\nname = \"azure\"\nkind = \"openai\"\n\
        base_url = \"http://h/v1\"\nheaders = { authorization = \"Basic c2VjcmV0\" }\n",
    )
    .await;
    let (all, etag) = live.core().described_settings();
    assert!(!all.to_string().contains("c2VjcmV0"));
    assert!(etag.starts_with('"') && etag.ends_with('"'));
    assert_eq!(
        live.value("provider.azure.headers"),
        json!(["authorization"])
    );
    let about = live.described("provider.azure.headers")["about"].clone();
    let about = about.as_str().expect("words");
    assert!(about.contains("Only the names are shown"), "{about}");
    assert_eq!(
        live.described("limits.queue"),
        json!({"value": 5, "default": 1000, "from": "file", "locked_by": null, "takes": "whole number",
            "range": [0, 1_000_000],
            "about": "How many may wait. One more is refused with 503 queue_full. 0 to 1000000."})
    );
    let inherited = live.described("provider.openai.queue");
    assert_eq!(
        (
            &inherited["value"],
            &inherited["from"],
            &inherited["default"]
        ),
        (&json!(5), &json!("inherited"), &json!(5))
    );
    let local = live.described("provider.ollama.concurrency");
    assert_eq!(
        (&local["value"], &local["from"]),
        (&json!(4), &json!("default"))
    );
    let timeout = live.described("provider.openai.timeout_secs");
    assert_eq!(
        (&timeout["unit"], &timeout["range"]),
        (&json!("seconds"), &json!([0.01, 86_400]))
    );
    assert_eq!(
        live.described("log.bodies")["choices"],
        json!(["off", "errors", "all"])
    );
    for (section, fields) in all["settings"].as_object().expect("sections") {
        for (key, field) in fields["settings"].as_object().into_iter().flatten() {
            for told in ["value", "default", "from", "takes"] {
                assert!(field.get(told).is_some(), "{section}.{key}: {told}");
            }
            let words = field["about"].as_str().unwrap_or_default();
            assert!(
                !words.is_empty() || key == "rule",
                "{section}.{key}: {field}"
            );
        }
    }
    for provider in all["providers"].as_array().expect("a list") {
        for (key, field) in provider["settings"].as_object().expect("settings") {
            let words = field["about"].as_str().unwrap_or_default();
            assert!(!words.is_empty(), "{} {key}", provider["name"]);
        }
    }
}

#[tokio::test]
async fn the_admin_api_reads_and_patches_over_http() {
    let live = Live::with("[server]\nport = 0\n").await;
    let bearer = format!("Bearer {}", live.core().token.expose());
    let path = "/traygate/api/settings";
    let mut client = Client::to(live.addr()).await;
    let read = client.ask(get(path).header("authorization", &bearer)).await;
    assert_eq!(
        read.json()["settings"]["limits"]["settings"]["queue"]["value"],
        1000
    );
    let etag = read.header("etag").expect("a mark").to_owned();
    let patch = |patch: Value, etag: &str| {
        Outgoing::new("PATCH", path)
            .header("authorization", &bearer)
            .header("if-match", etag)
            .json(patch.to_string())
    };
    let patched = client
        .ask(patch(json!({"limits": {"queue": 5}}), &etag))
        .await;
    assert_eq!(patched.status(), 200, "{}", patched.text());
    assert_eq!(patched.json()["changed"], json!(["limits.queue"]));
    let stale = client
        .ask(patch(json!({"limits": {"queue": 6}}), &etag))
        .await;
    assert_eq!(stale.status(), 412, "{}", stale.text());
    assert_eq!(stale.header("etag"), patched.header("etag"));
    let bad = client
        .ask(patch(json!({"limits": {"queue": -1}}), "*"))
        .await;
    assert_eq!(bad.status(), 400, "{}", bad.text());
    assert!(
        bad.text().contains("must be 0 to 1000000, is -1"),
        "{}",
        bad.text()
    );

    // The answer comes over the connection that the change ends.
    let port = free_port();
    let moved = client
        .ask(patch(json!({"server": {"port": port}}), "*"))
        .await;
    assert_eq!(moved.json()["address"], format!("127.0.0.1:{port}"));
    assert_eq!(must("the end", client.closed()).await, BodyEnd::Clean);
    assert_eq!(
        live.text(),
        format!("[server]\nport = {port}\n\n[limits]\nqueue = 5\n")
    );
}
