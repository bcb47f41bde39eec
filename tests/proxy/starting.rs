//! What a start refuses, and what it says though it works.
#![cfg(unix)]

use std::net::{IpAddr, TcpListener, UdpSocket};

use traygate::settings::{Overrides, Settings};

use super::support::client::post_json;
use super::support::process::{Ended, Home, Signal};
use super::support::upstream::Upstream;

/// A port that was free a moment ago; whoever cannot have it after all takes another.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("a bound port").port()
}

/// Starts with these settings, in which `PORT` stands for Traygate's own, until the start fails for
/// another reason than that somebody was faster.
async fn refused_start(settings: &str) -> (u16, Ended) {
    loop {
        let port = free_port();
        let home = Home::new();
        home.settings(&settings.replace("PORT", &port.to_string()));
        let ended = home.run(&["serve", "--port", &port.to_string()]).await;
        if !ended.stderr.contains("is taken") {
            return (port, ended);
        }
    }
}

#[tokio::test]
async fn a_provider_at_traygates_own_address_is_refused_in_words() {
    for host in [
        "127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "x.localhost",
    ] {
        for (name, kind, path) in [("mine", "openai", "/v1"), ("ollama", "ollama", "")] {
            let settings = format!(
                "[[provider]]\nname = \"{name}\"\nkind = \"{kind}\"\nbase_url = \"http://{host}:PORT{path}\"\n"
            );
            let (port, ended) = refused_start(&settings).await;
            assert_eq!(ended.code, Some(2), "{host}: {}", ended.said());
            assert_eq!(ended.stdout, "", "it never listened");
            let told = &ended.stderr;
            for part in [
                name,
                &format!(":{port}"),
                "base_url",
                "config.toml",
                "own address",
            ] {
                assert!(told.contains(part), "{host}: {part}: {told}");
            }
        }
    }
}

/// An address of this machine that is not loopback, if it has one. Nothing is sent.
fn outer_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[tokio::test]
async fn a_loop_over_the_machines_outer_address_is_refused_where_it_is_listened_on() {
    let Some(ip) = outer_address() else {
        return println!("SKIPPED: this machine has no address beside loopback");
    };
    let provider = format!(
        "[[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"http://{ip}:PORT\"\n"
    );
    let everywhere = format!("[server]\nhost = [\"0.0.0.0\"]\n{provider}");
    let (_, ended) = refused_start(&everywhere).await;
    assert_eq!(ended.code, Some(2), "{}", ended.said());
    assert!(ended.stderr.contains("own address"), "{}", ended.stderr);
}

#[tokio::test]
async fn another_server_on_this_machine_is_no_loop() {
    let up = Upstream::chatting().await;
    let home = Home::new();
    // Beside it one that has the same port, elsewhere.
    home.settings(&format!(
        "[[provider]]\nname = \"openai\"\nbase_url = \"http://localhost:{}/v1\"\n\
         [[provider]]\nname = \"far\"\nkind = \"openai\"\nbase_url = \"http://provider.test:7337\"\n",
        up.addr().port()
    ));
    let traygate = home.serve(&[]).await;
    let answer = post_json(traygate.addr(), "/v1/chat/completions", r#"{"model":"m"}"#).await;
    assert_eq!((answer.status(), up.calls()), (200, 1));
}

// --- What it says though it works --------------------------------------------------------------

/// The notes of a start with these settings and this environment.
async fn notes(settings: &str, environment: &[(&str, &str)]) -> Vec<String> {
    let mut home = Home::new();
    for (name, value) in environment {
        home.set(name, value);
    }
    home.settings(settings);
    let traygate = home.serve(&[]).await;
    traygate.signal(Signal::TERM);
    let ended = traygate.ended().await;
    assert_eq!(ended.code, Some(0), "{}", ended.said());
    let notes = ended
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("Note: "));
    // What this machine lacks is no matter of the settings.
    let told = notes.filter(|note| !note.contains("no IPv6 loopback"));
    told.map(str::to_owned).collect()
}

#[tokio::test]
async fn settings_without_effect_are_told_at_the_start() {
    assert_eq!(notes("", &[]).await, [""; 0]);
    let all = "[spend]\nwarn_at = 0.5\n[[budget]]\nper = \"day\"\nusd = 5.0\n\
               [log]\nretention_days = 7\n[notify]\nbudget = false\n";
    let settings = Settings::parse(all, &Overrides::default()).expect("settings");
    assert_eq!(notes(all, &[]).await, settings.not_in_effect());
}

#[tokio::test]
async fn a_key_from_a_variable_that_is_not_set_is_told_at_the_start() {
    let settings = "[[provider]]\nname = \"openai\"\nkey = \"env:SOME_KEY\"\n\
                    [[provider]]\nname = \"anthropic\"\nkey = \"env:OTHER_KEY\"\n";
    let told = notes(settings, &[("OTHER_KEY", "sk-canary")]).await;
    let [note] = &told[..] else {
        panic!("one note, not {told:?}");
    };
    assert!(
        note.contains("openai") && note.contains("SOME_KEY"),
        "{note}"
    );
    assert!(!note.contains("canary"), "{note}");
    let both = [("OTHER_KEY", "sk-canary"), ("SOME_KEY", "sk-canary")];
    assert_eq!(notes(settings, &both).await, [""; 0]);
}
