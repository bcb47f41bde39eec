//! The command line, as a person at a terminal or a script meets it.
#![cfg(unix)]

use std::net::{IpAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::app::App;
use crate::support::client::{Client, get, post, post_json};
use crate::support::process::{Home, Process, Signal};
use crate::support::upstream::{Reply, Upstream};
use crate::support::{Span as _, must, now};

const CHAT: &str = "/v1/chat/completions";
const HELLO: &str = r#"{"model":"m","messages":[]}"#;

fn home(up: &Upstream, more: &str) -> Home {
    let home = Home::new();
    home.settings(&App::settings(up.addr(), more));
    home
}

/// A port that another program holds, on this address.
fn held_port(ip: &str) -> (TcpListener, u16) {
    let ip: IpAddr = ip.parse().expect("an address");
    let listener = TcpListener::bind((ip, 0)).expect("a free port");
    let port = listener.local_addr().expect("a bound socket").port();
    (listener, port)
}

// --- What it says of itself -------------------------------------------------------------------

#[tokio::test]
async fn every_command_explains_itself() {
    let home = Home::new();
    let table: [(&[&str], &[&str]); 9] = [
        (
            &[],
            &[
                "traygate serve",
                "OPENAI_BASE_URL=",
                "/@aider/openai/v1",
                "TRAYGATE_CONFIG",
            ],
        ),
        (
            &["serve"],
            &[
                "traygate serve --",
                "127.0.0.1",
                "7337",
                "access-token",
                "TRAYGATE_HOST",
                "TRAYGATE_PORT",
                "TRAYGATE_TIMEOUT",
                "TRAYGATE_CONCURRENCY",
                "TRAYGATE_DEDUP_SECS",
                "TRAYGATE_WORKER_THREADS",
                "TRAYGATE_LOG",
                "TRAYGATE_DATA_DIR",
            ],
        ),
        (&["check"], &["BAD", "exit code is 1", "TRAYGATE_PORT"]),
        (&["key"], &["traygate key set openai", "placeholder"]),
        (
            &["key", "set"],
            &[
                "| traygate key set openai",
                "standard input",
                "access-token",
            ],
        ),
        (&["key", "list"], &["[PROVIDER]"]),
        (
            &["calls"],
            &[
                "--follow",
                "traygate calls --since 2h",
                "--format csv >",
                "upstream_error",
                "TRAYGATE_CALLS_SINCE",
                "TRAYGATE_CALLS_FORMAT",
            ],
        ),
        (
            &["spend"],
            &[
                "traygate spend --by tool",
                "--format csv >",
                "this machine's calendar",
                "TRAYGATE_SPEND_BY",
            ],
        ),
        (
            &["repeats"],
            &[
                "traygate repeats --from",
                "hash of the whole conversation so far",
                "TRAYGATE_REPEATS_SINCE",
            ],
        ),
    ];
    for (command, teaches) in table {
        let long: Vec<&str> = command.iter().copied().chain(["--help"]).collect();
        let help = home.run(&long).await;
        assert_eq!(
            (help.code, help.stderr.as_str()),
            (Some(0), ""),
            "{command:?}"
        );
        for word in teaches {
            assert!(
                help.stdout.contains(word),
                "{command:?} lacks {word:?}: {}",
                help.stdout
            );
        }
        let too_wide = help.stdout.lines().find(|line| line.chars().count() > 100);
        assert_eq!(too_wide, None, "{command:?}");
        // Each flag is a variable too.
        let options = help.stdout.split("Options:").nth(1).expect("options");
        let flags = options
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with("--"));
        let words: Vec<&str> = options.split_whitespace().collect();
        let variables = words.join(" ").matches("[env: TRAYGATE_").count();
        assert_eq!(flags.count(), variables, "{command:?}: {}", help.stdout);
        // Only asked, nothing done.
        assert!(!home.config().exists() && !home.data_dir().exists());
    }
    let version = home.run(&["--version"]).await;
    assert_eq!(
        version.stdout,
        format!("traygate {}\n", env!("CARGO_PKG_VERSION"))
    );
    let nothing = home.run(&[]).await;
    assert_eq!(nothing.code, Some(2));
    assert!(
        nothing.stderr.contains("Usage: traygate"),
        "{}",
        nothing.stderr
    );
}

#[tokio::test]
async fn serve_says_where_it_listens_and_what_to_try() {
    let home = Home::new();
    let mut traygate = home.serve(&[]).await;
    let addr = traygate.addr();
    let greeting = traygate.says("-d '").await;
    let (_, body) = greeting.split_once("-d '").expect("a body");
    let body = body.trim_end_matches('\'');
    assert!(
        traygate
            .stdout()
            .contains(&format!("curl http://{addr}{CHAT} "))
    );
    let answer = post_json(addr, CHAT, body).await;
    assert_eq!(
        (answer.status(), answer.header("x-traygate-provider")),
        (200, Some("demo"))
    );
    // Both loopbacks, one port.
    let v6 = format!("[::1]:{}", addr.port())
        .parse()
        .expect("an address");
    if !traygate.stdout().contains("no IPv6 loopback") {
        assert_eq!(post_json(v6, CHAT, body).await.status(), 200);
    }
    // The first start leaves a settings file to edit, and it changes nothing.
    let written = std::fs::read_to_string(home.config()).expect("a settings file");
    assert!(written.contains("[[provider]]") && written.contains("# "));
    traygate.close_stdout();
    traygate.signal(Signal::TERM);
    assert_eq!(traygate.ended().await.code, Some(0));
    home.serve(&[]).await;
}

#[tokio::test]
async fn it_serves_though_nobody_reads_what_it_says() {
    let home = Home::new();
    let mut command = Command::new("sh");
    let line = format!(
        "exec {} serve --port 0 --log trace 2>&- >&-",
        env!("CARGO_BIN_EXE_traygate")
    );
    command.args(["-c", &line]).stdin(Stdio::null());
    command
        .env("TRAYGATE_CONFIG", home.config())
        .env("TRAYGATE_DATA_DIR", home.data_dir());
    let mut child = command.spawn().expect("a shell");
    // It has taken the folder: it is under way.
    must("it to start", async {
        while !home.data_dir().join("traygate.db").exists() {
            tokio::time::sleep(5.ms()).await;
        }
    })
    .await;
    let ended = child.try_wait().expect("a process of ours");
    child.kill().expect("a process of ours");
    child.wait().expect("a process of ours");
    assert_eq!(ended, None);
}

// --- Flags, environment, file -----------------------------------------------------------------

#[tokio::test]
async fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let up = Upstream::start(|_| Reply::hang()).await;
    let (_held, taken) = held_port("127.0.0.1");
    let taken = taken.to_string();
    let mut home = home(
        &up,
        &format!("[server]\nport = {taken}\n[limits]\nunstreamed_timeout_secs = 600"),
    );
    // The file's port is taken, so whoever starts has not listened to it.
    let refused = home.start_traygate(&["serve"]).ended().await;
    assert_eq!(refused.code, Some(2), "{}", refused.said());
    home.set("TRAYGATE_PORT", "0");
    home.set("TRAYGATE_TIMEOUT", "0.2");
    {
        let traygate = home.serve(&[]).await;
        let answer = post_json(traygate.addr(), CHAT, HELLO).await;
        assert_eq!(answer.header("x-traygate-error"), Some("upstream_timeout"));
        assert!(answer.text().contains("0.2 s"), "{}", answer.text());
    }
    home.set("TRAYGATE_PORT", &taken);
    home.set("TRAYGATE_TIMEOUT", "600");
    let traygate = home.serve(&["--port", "0", "--timeout", "0.3"]).await;
    let answer = post_json(traygate.addr(), CHAT, HELLO).await;
    assert!(answer.text().contains("0.3 s"), "{}", answer.text());
}

#[tokio::test]
async fn each_flag_of_serve_does_what_it_says_as_a_flag_and_as_a_variable() {
    for as_variables in [false, true] {
        let up = Upstream::start(|request| match request.json()["model"].as_str() {
            Some("hang") => Reply::hang(),
            _ => Reply::chat(request),
        })
        .await;
        let mut home = home(&up, "[limits]\nqueue = 0\n[dedup]\nwindow_secs = 300");
        let flags = [
            ("--concurrency", "1"),
            ("--dedup-secs", "0"),
            ("--worker-threads", "12"),
            ("--log", "traygate::call=debug"),
        ];
        let mut given = Vec::new();
        for (flag, value) in flags {
            if as_variables {
                let name = flag
                    .trim_start_matches("--")
                    .replace('-', "_")
                    .to_uppercase();
                home.set(&format!("TRAYGATE_{name}"), value);
            } else {
                given.extend([flag, value]);
            }
        }
        let traygate = home.serve(&given).await;
        let addr = traygate.addr();
        for _ in 0..2 {
            let answer = post_json(addr, CHAT, HELLO).await;
            assert_eq!(answer.header("x-traygate-dedup"), Some("miss"));
        }
        let mut first = Client::to(addr).await;
        first.send(post(CHAT).json(r#"{"model":"hang"}"#)).await;
        up.wait_for_in_flight(1).await;
        let second = post_json(addr, CHAT, HELLO).await;
        assert_eq!(second.header("x-traygate-error"), Some("queue_full"));
        #[cfg(target_os = "linux")]
        {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", traygate.id()));
            let names = tasks.expect("its threads").flatten();
            let names =
                names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            let workers = names
                .filter(|name| name.starts_with("tokio-rt-worker"))
                .count();
            // Those that carry calls; a few more do what blocks.
            assert!((12..=18).contains(&workers), "{workers}");
        }
        Client::to(addr)
            .await
            .ask(get("/").header("origin", "https://evil.example"))
            .await;
        let told = traygate.complains("request refused").await;
        assert!(told.contains("DEBUG"), "{told}");
    }
}

#[tokio::test]
async fn the_places_can_be_named_by_flags_too() {
    let home = Home::new();
    let config = home.folder().join("other/config.toml");
    let data = home.folder().join("other/data");
    let (config, data) = (config.to_str().expect("text"), data.to_str().expect("text"));
    let traygate = home.serve(&["--config", config, "--data-dir", data]).await;
    post_json(traygate.addr(), CHAT, r#"{"model":"demo"}"#).await;
    must("the row", async {
        while !home
            .run(&["calls", "--data-dir", data])
            .await
            .stdout
            .contains("demo")
        {
            tokio::time::sleep(20.ms()).await;
        }
    })
    .await;
    assert!(home.folder().join("other/config.toml").exists());
    assert!(!home.config().exists() && !home.data_dir().exists());
}

#[tokio::test]
async fn a_bad_flag_is_named_with_what_it_must_be() {
    let home = Home::new();
    for (arguments, named) in [
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--host", "example.com"], "--host"),
        (["serve", "--timeout", "soon"], "--timeout"),
        (["serve", "--timeout", "-1"], "-1"),
        (["serve", "--timeout", "0"], "--timeout"),
        (["serve", "--timeout", "nan"], "--timeout"),
        (["serve", "--timeout", "1e300"], "--timeout"),
        (["serve", "--concurrency", "0"], "--concurrency"),
        (["serve", "--concurrency", "1.5"], "--concurrency"),
        (["serve", "--dedup-secs", "1e9"], "--dedup-secs"),
        (["serve", "--worker-threads", "0"], "--worker-threads"),
        (["serve", "--log", "a=b=c"], "--log"),
        (["calls", "--since", "yesterday"], "--since"),
        (["calls", "--since", "-2h"], "-2h"),
        (["calls", "--outcome", "fine"], "--outcome"),
        (["calls", "--format", "xml"], "--format"),
        (["calls", "--limit", "some"], "--limit"),
        (["check", "--port", "x"], "--port"),
        (["serve", "--verbose", "1"], "--verbose"),
    ] {
        let ended = home.run(&arguments).await;
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.said());
        assert_eq!(ended.stdout, "", "{arguments:?}");
        assert!(
            ended.stderr.contains(named),
            "{arguments:?}: {}",
            ended.stderr
        );
    }
    let mut home = Home::new();
    home.set("TRAYGATE_CONCURRENCY", "many");
    let ended = home.run(&["serve"]).await;
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("--concurrency"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_bad_settings_file_is_refused_with_line_and_field() {
    let home = Home::new();
    for (text, told) in [
        (
            "[server]\nport = \"x\"\n",
            "config.toml, line 2, [server] port",
        ),
        (
            "\n\n[dedup]\nwindow_sec = 3\n",
            "line 4, [dedup] window_sec",
        ),
        (
            "[limits]\nconcurrency = 0\n",
            "line 2, [limits] concurrency",
        ),
        ("[server\n", "line 1"),
        ("[[provider]]\nname = \"a/b\"\n", "line 2"),
        (
            "[[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"ftp://x\"\n",
            "line 4, provider \"mine\" base_url",
        ),
        (
            "[[route]]\nmodel = \"x\"\nprovider = \"nobody\"\n",
            "line 3",
        ),
    ] {
        home.settings(text);
        for command in [&["serve", "--port", "0"][..], &["key", "list"]] {
            let ended = home.run(command).await;
            assert_eq!(ended.code, Some(2), "{text:?}: {}", ended.said());
            assert!(ended.stderr.starts_with("traygate: "), "{}", ended.stderr);
            assert!(ended.stderr.contains(told), "{text:?}: {}", ended.stderr);
            assert_eq!(ended.stdout, "");
        }
        let check = home.run(&["check"]).await;
        assert_eq!(check.code, Some(1));
        let line = check.stdout.lines().next().unwrap_or_default();
        let place = told.trim_start_matches("config.toml, ");
        assert!(line.starts_with("BAD ") && line.contains(place), "{line}");
        // A person's file is never overwritten.
        assert_eq!(
            std::fs::read_to_string(home.config()).expect("the file"),
            text
        );
    }
    // A key that was put there by mistake is not repeated.
    home.settings("[[provider]]\nname = \"openai\"\nkey = \"sk-canary-0123\"\n");
    for command in [&["serve", "--port", "0"][..], &["check"], &["key", "list"]] {
        let said = home.run(command).await.said();
        assert!(
            said.contains("line 3") && !said.contains("canary"),
            "{said}"
        );
    }
}

// --- The port ---------------------------------------------------------------------------------

// D71
#[tokio::test]
async fn a_taken_port_names_its_holder_and_the_way_out_and_is_never_left_for_another() {
    let own = format!("(pid {})", std::process::id());
    for ip in ["127.0.0.1", "::1"] {
        let (_held, port) = held_port(ip);
        let home = Home::new();
        let ended = home.run(&["serve", "--port", &port.to_string()]).await;
        assert_eq!(ended.code, Some(2), "{}", ended.said());
        assert_eq!(ended.stdout, "", "it listens nowhere");
        let at = if ip == "::1" {
            format!("[::1]:{port}")
        } else {
            format!("{ip}:{port}")
        };
        for told in [&*at, "--port", "server.port"] {
            assert!(ended.stderr.contains(told), "{told}: {}", ended.stderr);
        }
        if cfg!(target_os = "linux") {
            assert!(ended.stderr.contains(&own), "{}", ended.stderr);
        }
    }
    // Held by another Traygate.
    let (first, second) = (Home::new(), Home::new());
    let traygate = first.serve(&[]).await;
    let port = traygate.addr().port().to_string();
    let ended = second.run(&["serve", "--port", &port]).await;
    assert_eq!(ended.code, Some(2));
    if cfg!(target_os = "linux") {
        let holder = format!("traygate (pid {})", traygate.id());
        assert!(ended.stderr.contains(&holder), "{}", ended.stderr);
    }
}

// D71
#[tokio::test]
async fn a_restart_does_not_wait_for_old_connections() {
    let home = Home::new();
    let traygate = home.serve(&[]).await;
    let addr = traygate.addr();
    let mut client = Client::to(addr).await;
    client
        .send(post(CHAT).json(r#"{"model":"demo","stream":true}"#))
        .await;
    client.head().await;
    traygate.signal(Signal::KILL);
    traygate.ended().await;
    let port = addr.port().to_string();
    let again = home.serve(&["--port", &port]).await;
    assert_eq!(again.addr(), addr);
}

// --- check ------------------------------------------------------------------------------------

/// Settings in which every provider is `up`.
fn all_at(up: &Upstream, more: &str) -> String {
    let names = ["chatgpt", "openrouter", "llama-cpp", "lm-studio"];
    let others = names.map(|name| {
        format!(
            "[[provider]]\nname = \"{name}\"\nbase_url = \"{}\"\n",
            up.url()
        )
    });
    App::settings(up.addr(), more) + &others.concat()
}

#[tokio::test]
async fn check_has_a_line_for_each_thing_and_is_content() {
    let up = Upstream::chatting().await;
    let home = Home::new();
    home.settings(&all_at(&up, ""));
    let traygate = home.serve(&[]).await;
    post_json(traygate.addr(), CHAT, HELLO).await;
    home.ended_rows(1).await;
    let port = traygate.addr().port().to_string();
    let check = home.run(&["check", "--port", &port]).await;
    assert_eq!(check.code, Some(0), "{}", check.said());
    let line = |about: &str| -> &str {
        let found = check
            .stdout
            .lines()
            .find(|line| line[5..].starts_with(about));
        found.unwrap_or_else(|| panic!("no line on {about:?}: {}", check.stdout))
    };
    assert!(line("settings in").starts_with("ok  "));
    assert!(line("data folder").contains(home.data_dir().to_str().expect("text")));
    assert!(line("database").ends_with("is whole"));
    // There is no bus here, and nothing needs one.
    assert!(line("keyring").starts_with("note "));
    let served = format!("served by traygate (pid {}) already", traygate.id());
    assert!(!cfg!(target_os = "linux") || line("port").ends_with(&served));
    for name in [
        "openai",
        "anthropic",
        "chatgpt",
        "openrouter",
        "ollama",
        "llama-cpp",
        "lm-studio",
    ] {
        assert!(line(&format!("{name} answers")).starts_with("ok  "));
    }
    assert!(line("demo").starts_with("ok  "));
    assert_eq!(check.stdout.lines().count(), 13, "{}", check.stdout);
    assert_eq!(check.stderr, "");
    assert_eq!(up.calls(), 1, "no call that costs money");
}

#[tokio::test]
async fn check_says_what_is_wrong_and_its_exit_code_too() {
    let up = Upstream::chatting().await;
    let dead = Upstream::dead_port();
    let (_held, port) = held_port("127.0.0.1");
    let home = Home::new();
    let more = format!(
        "[server]\nport = {port}\n[[provider]]\nname = \"dead\"\nkind = \"openai\"\n\
         base_url = \"{}\"\nkey = \"keyring\"",
        dead.url()
    );
    home.settings(&all_at(&up, &more));
    std::fs::create_dir_all(home.data_dir()).expect("a folder");
    std::fs::write(
        home.data_dir().join("traygate.db"),
        "no database, ".repeat(999),
    )
    .expect("a file");
    let check = home.run(&["check"]).await;
    assert_eq!(check.code, Some(1));
    let bad: Vec<&str> = check
        .stdout
        .lines()
        .filter(|line| line.starts_with("BAD "))
        .collect();
    for about in ["database", "keyring: ", "port ", "dead cannot be reached"] {
        assert!(
            bad.iter().any(|line| line[5..].starts_with(about)),
            "{about}: {}",
            check.stdout
        );
    }
    assert_eq!(bad.len(), 4, "{}", check.stdout);
    // One thing is enough; and the environment counts as it does for `serve`.
    home.settings(&all_at(&up, &format!("[server]\nport = {port}")));
    std::fs::remove_file(home.data_dir().join("traygate.db")).expect("the file");
    assert_eq!(home.run(&["check"]).await.code, Some(1));
    assert_eq!(home.run(&["check", "--port", "0"]).await.code, Some(0));
    let mut home = home;
    home.set("TRAYGATE_PORT", "0");
    assert_eq!(home.run(&["check"]).await.code, Some(0));
}

// --- key --------------------------------------------------------------------------------------

// D73
#[tokio::test]
async fn without_any_keyring_it_starts_at_once_and_says_so_where_a_key_is_needed() {
    let up = Upstream::chatting().await;
    let mut home = home(
        &up,
        "[[provider]]\nname = \"locked\"\nkind = \"openai\"\nkey = \"keyring\"\nbase_url = \"http://127.0.0.1:1\"",
    );
    // No bus at all, and one whose program is gone.
    for bus in ["", "unix:path=/nonexistent/bus"] {
        home.set("DBUS_SESSION_BUS_ADDRESS", bus);
        let traygate = home.serve(&[]).await;
        let started = traygate.started;
        assert!(now() - started < 2.secs(), "{:?}", now() - started);
        for key in ["Bearer sk-own", "Bearer traygate"] {
            let request = post(CHAT).json(HELLO).header("authorization", key);
            assert_eq!(
                Client::to(traygate.addr())
                    .await
                    .ask(request)
                    .await
                    .status(),
                200
            );
        }
        let needed = post_json(traygate.addr(), "/locked/v1/chat/completions", HELLO).await;
        assert_eq!(needed.status(), 401);
        let told = needed.text();
        assert!(
            told.contains("traygate key set locked") && told.contains("no keyring"),
            "{told}"
        );

        let set = home
            .run_with(&["key", "set", "openai"], "sk-canary-1\n")
            .await;
        assert_eq!((set.code, set.stdout.as_str()), (Some(2), ""));
        for told in [
            "the key of openai was not stored",
            "D-Bus",
            "key = \"env:NAME\"",
        ] {
            assert!(set.stderr.contains(told), "{told}: {}", set.stderr);
        }
        assert!(!set.stderr.contains("canary"));
        let list = home.run(&["key", "list"]).await;
        assert_eq!(list.code, Some(2));
        assert!(
            list.stdout.contains("openai        unknown"),
            "{}",
            list.stdout
        );
        assert_eq!(home.run(&["key", "delete", "openai"]).await.code, Some(2));
    }
}

// D73, D74
#[tokio::test]
async fn a_keyring_that_never_answers_holds_nothing_up() {
    let up = Upstream::chatting().await;
    let mut home = home(&up, "");
    // It takes connections and says nothing.
    let bus = home.folder().join("bus");
    let _silent = UnixListener::bind(&bus).expect("a socket");
    home.set(
        "DBUS_SESSION_BUS_ADDRESS",
        &format!("unix:path={}", bus.display()),
    );
    let traygate = home.serve(&[]).await;
    let started = traygate.started;
    assert!(now() - started < 2.secs(), "{:?}", now() - started);
    let own = post(CHAT)
        .json(HELLO)
        .header("authorization", "Bearer sk-own");
    let before = now();
    let answer = Client::to(traygate.addr()).await.ask(own).await;
    assert_eq!(answer.status(), 200);
    assert!(
        now() - before < 1500.ms(),
        "a client with a key of its own waits for nobody's"
    );
    // Who has none waits a little, and goes on without.
    let answer = post_json(traygate.addr(), CHAT, HELLO).await;
    assert_eq!(answer.status(), 200);
    let before = now();
    let list = home.run(&["key", "list"]).await;
    assert!(now() - before < 15.secs());
    assert_eq!(list.code, Some(2));
    assert!(list.stderr.contains("has not answered"), "{}", list.stderr);
    traygate.signal(Signal::TERM);
    assert_eq!(traygate.ended().await.code, Some(0), "nor the end");
}

#[tokio::test]
async fn what_cannot_be_a_key_is_refused_in_words_that_do_not_repeat_it() {
    let home = Home::new();
    for (raw, told) in [
        ("", "empty"),
        ("\n", "empty"),
        ("sk-canary with-space", "a space, at character 10"),
        (" sk-canary", "a space, at character 1"),
        ("sk-canary\n\n", "a line end"),
        ("sk-canary\nsk-canary", "a line end"),
        ("sk-canary\u{200b}x", "an invisible character"),
        ("\u{feff}sk-canary", "an invisible character"),
        ("\"sk-canary\"", "a quotation mark"),
        ("sk-canäry", "keys do not have"),
    ] {
        let set = home.run_with(&["key", "set", "openai"], raw).await;
        assert_eq!(set.code, Some(2), "{raw:?}");
        let told = told.replace(", at", " in it, at");
        assert!(set.stderr.contains(&told), "{raw:?}: {}", set.stderr);
        assert!(!set.said().contains("canary"), "{}", set.stderr);
    }
    let long = "canary".repeat(20_000);
    let set = home.run_with(&["key", "set", "openai"], &long).await;
    assert!(
        set.code == Some(2) && set.stderr.contains("longer than"),
        "{}",
        set.stderr
    );
    assert!(!set.said().contains("canary"));
}

#[tokio::test]
async fn a_key_as_an_argument_is_refused_and_not_repeated() {
    let home = Home::new();
    for arguments in [
        &["key", "set", "openai", "sk-canary-0123"][..],
        &["key", "set", "sk-canary-0123"],
        &["key", "set", "openai", "--", "-canary-0123"],
        &["key", "set", "openai", "--key", "sk-canary-0123"],
        &["key", "set", "openai", "--key=sk-canary-0123"],
        &["key", "set", "--key=sk-canary-0123", "openai"],
        &["key", "set", "--key", "sk-canary-0123", "openai"],
        &["key", "delete", "openai", "sk-canary-0123"],
        &["key", "list", "sk-canary-0123"],
    ] {
        let ended = home.run(arguments).await;
        assert_eq!(ended.code, Some(2), "{arguments:?}");
        assert!(
            !ended.said().contains("canary"),
            "{arguments:?}: {}",
            ended.stderr
        );
    }
    let set = home.run(&["key", "set", "openai", "sk-canary-0123"]).await;
    assert!(set.stderr.contains("standard input"), "{}", set.stderr);
    let unknown = home.run(&["key", "set", "opnai"]).await;
    assert!(
        unknown.stderr.contains("there are openai, anthropic"),
        "{}",
        unknown.stderr
    );
}

/// A session bus with an unlocked GNOME Keyring on it; `None` where the programs are not
/// installed (`scripts/test` sees to that). Both end with it.
async fn keyring(home: &mut Home) -> Option<Session> {
    // The daemon claims its name a moment late; asked before that, the bus would start a second,
    // locked one.
    const SESSION: &str = r#"
printf scratch | gnome-keyring-daemon --unlock --components=secrets >/dev/null 2>&1
for _ in $(seq 400); do
  dbus-send --session --print-reply=literal --dest=org.freedesktop.DBus / \
    org.freedesktop.DBus.NameHasOwner string:org.freedesktop.secrets 2>/dev/null | grep -q true && break
  sleep 0.05
done
echo "bus $DBUS_SESSION_BUS_ADDRESS"
cat >/dev/null"#;
    for program in ["gnome-keyring-daemon", "dbus-run-session", "dbus-send"] {
        let mut look = Command::new(program);
        look.arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if look.status().is_err() {
            eprintln!("{program} is not installed: the keyring is not tested");
            return None;
        }
    }
    let session = home.start_program("dbus-run-session", &["--", "sh", "-c", SESSION]);
    let session = Session(session);
    let line = session.0.says("bus ").await;
    home.set("DBUS_SESSION_BUS_ADDRESS", line.trim_start_matches("bus "));
    Some(session)
}

/// A session bus and what runs on it. They end with the session's input, which a test that fails
/// has to close too.
struct Session(Process);

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let deadline = now() + 10.secs();
        while self.0.runs() && now() < deadline {
            std::thread::sleep(5.ms());
        }
    }
}

#[tokio::test]
async fn a_key_lives_in_the_keyring_and_is_used_by_a_running_traygate() {
    let up = Upstream::chatting().await;
    let mut home = home(
        &up,
        "[[provider]]\nname = \"strict\"\nkind = \"openai\"\nkey = \"keyring\"\nbase_url = \"http://127.0.0.1:1/v1\"",
    );
    let Some(_session) = keyring(&mut home).await else {
        return;
    };
    let list = home.run(&["key", "list"]).await;
    assert_eq!(list.code, Some(0), "{}", list.stderr);
    assert!(
        list.stdout.contains("openai        not stored\n"),
        "{}",
        list.stdout
    );
    assert!(
        list.stdout.contains("chatgpt       the client's own\n"),
        "{}",
        list.stdout
    );

    // It runs already when the key comes.
    let traygate = home.serve(&[]).await;
    let addr = traygate.addr();
    let refused = post_json(addr, "/strict/v1/chat/completions", HELLO).await;
    assert_eq!(refused.status(), 401);
    let set = home
        .run_with(&["key", "set", "openai"], "sk-canary-0123456789\n")
        .await;
    assert_eq!(
        (set.code, set.stderr.as_str()),
        (Some(0), ""),
        "{}",
        set.stderr
    );
    let origin = up.url();
    assert_eq!(
        set.stdout,
        format!(
            "Stored the key of openai, for {origin} only.\n\
             The running Traygate goes by it from now on.\n"
        )
    );
    must("the key to be used", async {
        loop {
            let request = post(CHAT).json(HELLO).header("x-traygate-dedup", "off");
            let request = request.header("authorization", "Bearer traygate");
            assert_eq!(Client::to(addr).await.ask(request).await.status(), 200);
            let sent = up.call(up.calls() - 1).request;
            if sent.header("authorization") == Some("Bearer sk-canary-0123456789") {
                return;
            }
            tokio::time::sleep(50.ms()).await;
        }
    })
    .await;
    drop(traygate);

    // A later start has it from the first call on.
    let traygate = home.serve(&[]).await;
    post_json(traygate.addr(), CHAT, HELLO).await;
    let sent = up.call(up.calls() - 1).request;
    assert_eq!(
        sent.header("authorization"),
        Some("Bearer sk-canary-0123456789")
    );
    drop(traygate);

    let list = home.run(&["key", "list", "openai"]).await;
    assert_eq!(list.stdout, "openai  stored\n");
    let check = home.run(&["check"]).await;
    assert!(
        check
            .stdout
            .contains("keyring answers, and has a key of openai"),
        "{}",
        check.stdout
    );
    // Another address does not get it.
    let elsewhere = Upstream::chatting().await;
    home.settings(&App::settings(elsewhere.addr(), ""));
    let list = home.run(&["key", "list", "openai"]).await;
    assert!(
        list.stdout.contains("stored for another address"),
        "{}",
        list.stdout
    );
    let traygate = home.serve(&[]).await;
    post_json(traygate.addr(), CHAT, HELLO).await;
    assert_eq!(elsewhere.call(0).request.header("authorization"), None);
    drop(traygate);

    // In place of the older one; then none.
    let set = home.run_with(&["key", "set", "openai"], "sk-second").await;
    assert_eq!(set.code, Some(0));
    let traygate = home.serve(&[]).await;
    post_json(traygate.addr(), CHAT, HELLO).await;
    assert_eq!(
        elsewhere.call(1).request.header("authorization"),
        Some("Bearer sk-second")
    );
    drop(traygate);
    let deleted = home.run(&["key", "delete", "openai"]).await;
    assert_eq!(
        (deleted.code, deleted.stdout.as_str()),
        (Some(0), "Deleted key of openai.\n")
    );
    let deleted = home.run(&["key", "delete", "openai"]).await;
    assert_eq!(deleted.stdout, "There was no stored key of openai.\n");
    assert_eq!(
        home.run(&["key", "list", "openai"]).await.stdout,
        "openai  not stored\n"
    );
    let said = [list.said(), check.said(), set.said(), deleted.said()].concat();
    assert!(!said.contains("sk-"), "{said}");
}

// --- calls ------------------------------------------------------------------------------------

/// A home whose record has four calls: two of `aider`, one that failed, one of `ollama`.
async fn with_calls() -> (Home, Process, Upstream) {
    let up = Upstream::chatting().await;
    let home = home(&up, "");
    let traygate = home.serve(&[]).await;
    let ask = |path: &'static str, body: &'static str| post_json(traygate.addr(), path, body);
    for (n, (path, body)) in [
        ("/@aider/v1/chat/completions", r#"{"model":"one"}"#),
        ("/@aider/v1/messages", r#"{"model":"two"}"#),
        ("/demo/v1/chat/completions", r#"{"model":"demo-fail"}"#),
        (
            "/ollama/api/chat",
            r#"{"model":"=SUM(A1)\u001b[31m","stream":false}"#,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        ask(path, body).await;
        home.ended_rows(n + 1).await;
    }
    (home, traygate, up)
}

#[tokio::test]
async fn calls_before_the_first_one_says_what_to_do() {
    let home = Home::new();
    let calls = home.run(&["calls"]).await;
    assert_eq!((calls.code, calls.stdout.as_str()), (Some(2), ""));
    assert!(calls.stderr.contains("traygate serve"), "{}", calls.stderr);
}

#[tokio::test]
async fn calls_as_a_table_as_csv_and_as_json() {
    let (mut home, _traygate, _up) = with_calls().await;
    let table = home.run(&["calls"]).await;
    assert_eq!((table.code, table.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = table.stdout.lines().collect();
    assert!(lines[0].starts_with("TIME ") && lines[0].contains("OUTCOME"));
    // The newest last, what went wrong below its call.
    assert!(
        lines[1].contains("one") && lines[1].contains("aider"),
        "{}",
        table.stdout
    );
    assert!(lines[2].contains("anthropic") && lines[2].contains("completed"));
    assert!(lines[3].contains("503") && lines[3].contains("upstream_error"));
    assert!(lines[4].starts_with("  > status 503"), "{}", table.stdout);
    assert!(lines[5].contains("ollama") && !table.stdout.contains('\u{1b}'));
    assert_eq!(lines.len(), 6);

    let csv = home.run(&["calls", "--format", "csv"]).await.stdout;
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let header: Vec<String> = reader
        .headers()
        .expect("a header")
        .iter()
        .map(str::to_owned)
        .collect();
    let rows: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().expect("CSV");
    assert_eq!(rows.len(), 4);
    let cell = |row: usize, name: &str| {
        let column = header
            .iter()
            .position(|known| known == name)
            .expect("a column");
        rows[row][column].to_owned()
    };
    assert_eq!(cell(0, "route"), "chat/completions");
    assert_eq!(cell(1, "provider"), "anthropic");
    assert_eq!(cell(2, "status"), "503");
    assert!(
        cell(3, "model").starts_with("'=SUM(A1)"),
        "no formula: {}",
        cell(3, "model")
    );

    home.set("TRAYGATE_CALLS_FORMAT", "json");
    let json = home.run(&["calls"]).await.stdout;
    let rows: Vec<Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0]["id"], cell(0, "id"));
    assert_eq!(
        (&rows[0]["dedup"], &rows[0]["status"]),
        (&"miss".into(), &200.into())
    );
    assert_eq!(rows[3]["model"], "=SUM(A1)\u{1b}[31m", "data stays data");
    assert!(!json.contains('\u{1b}'));
    assert!(
        rows[2]["error"]
            .as_str()
            .is_some_and(|error| error.starts_with("status 503"))
    );
    let keys: Vec<&String> = rows[0].as_object().expect("an object").keys().collect();
    let mut columns: Vec<&String> = header.iter().collect();
    columns.sort();
    let mut keys = keys;
    keys.sort();
    assert_eq!(keys, columns);
}

#[tokio::test]
async fn calls_narrowed_by_each_filter() {
    let (home, _traygate, _up) = with_calls().await;
    for (filter, models) in [
        (&["--provider", "anthropic"][..], &["two"][..]),
        (
            &["--provider", "*o*"],
            &["one", "two", "demo-fail", "=SUM(A1)\u{1b}[31m"],
        ),
        (&["--provider", "o?e*"], &["one"]),
        (&["--tool", "aider"], &["one", "two"]),
        (&["--tool", "aider", "--provider", "openai"], &["one"]),
        (&["--outcome", "upstream_error"], &["demo-fail"]),
        (&["--outcome", "open"], &[]),
        (
            &["--since", "1h", "--outcome", "completed"],
            &["one", "two", "=SUM(A1)\u{1b}[31m"],
        ),
        (&["--since", "2100-01-01"], &[]),
        (
            &["--since", "2020-01-01T00:00:00Z", "--tool", "aider"],
            &["one", "two"],
        ),
        (&["--limit", "1"], &["=SUM(A1)\u{1b}[31m"]),
        (&["--limit", "2", "--tool", "aider"], &["one", "two"]),
    ] {
        let arguments: Vec<&str> = ["calls", "--format", "json"]
            .iter()
            .chain(filter)
            .copied()
            .collect();
        let calls = home.run(&arguments).await;
        assert_eq!(
            (calls.code, calls.stderr.as_str()),
            (Some(0), ""),
            "{filter:?}"
        );
        let seen = calls
            .stdout
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let seen: Vec<String> = seen
            .map(|row| row["model"].as_str().unwrap_or_default().to_owned())
            .collect();
        assert_eq!(seen, models, "{filter:?}");
    }
    let none = home.run(&["calls", "--outcome", "open"]).await;
    assert_eq!(
        none.stdout,
        "No calls on record match (a call is on record a moment after its end).\n"
    );
}

#[tokio::test]
async fn calls_followed_as_they_end() {
    let (home, traygate, _up) = with_calls().await;
    let follow = home.start_traygate(&["calls", "--follow", "--format", "json", "--tool", "aider"]);
    follow.says("\"two\"").await;
    for model in ["three", "four"] {
        let body = format!(r#"{{"model":"{model}"}}"#);
        post_json(traygate.addr(), "/v1/chat/completions", &body).await;
        post_json(traygate.addr(), "/@aider/v1/embeddings", &body).await;
        follow.says(&format!("\"{model}\"")).await;
    }
    let seen: Vec<Value> = follow
        .stdout()
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let models: Vec<&str> = seen
        .iter()
        .filter_map(|row| row["model"].as_str())
        .collect();
    assert_eq!(
        models,
        ["one", "two", "three", "four"],
        "each once, in order, others not"
    );
    // A restart of the proxy does not end it.
    traygate.signal(Signal::TERM);
    traygate.ended().await;
    let again = home.serve(&[]).await;
    post_json(again.addr(), "/@aider/v1/embeddings", r#"{"model":"five"}"#).await;
    follow.says("\"five\"").await;
    follow.signal(Signal::INT);
    follow.ended().await;
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_calls_quietly() {
    let (home, traygate, _up) = with_calls().await;
    let mut follow = home.start_traygate(&["calls", "--follow"]);
    follow.says("TIME").await;
    follow.close_stdout();
    must("it to notice", async {
        let mut n = 0;
        while follow.runs() {
            n += 1;
            let body = format!(r#"{{"model":"m{n}"}}"#);
            post_json(traygate.addr(), CHAT, &body).await;
            tokio::time::sleep(100.ms()).await;
        }
    })
    .await;
    let ended = follow.ended().await;
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let program = env!("CARGO_BIN_EXE_traygate");
    let data_dir = home.data_dir();
    let line = format!(
        "{program} calls --data-dir '{}' | true; {program} --help | true",
        data_dir.display()
    );
    let piped = home
        .start_program("bash", &["-c", &format!("set -o pipefail; {line}")])
        .ended()
        .await;
    assert_eq!((piped.code, piped.stderr.as_str()), (Some(0), ""));
}
