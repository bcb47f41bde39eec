//! `traygate repeats`: from the record that calls have made, and from logs of conversations.

use serde_json::Value;

use crate::support::app::App;
use crate::support::client::{BodyEnd, Client, post};
use crate::support::process::Home;
use crate::support::upstream::Upstream;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Repeats within each window.
fn repeats(share: &Value) -> Vec<u64> {
    let windows = share["windows"].as_array().expect("windows");
    let repeats = windows.iter().map(|window| window["repeats"].as_u64());
    repeats.map(|repeats| repeats.expect("a count")).collect()
}

#[tokio::test]
async fn before_the_first_call_it_says_what_to_do() {
    let ended = Home::new().run(&["repeats"]).await;
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("traygate serve"), "{}", ended.stderr);
}

#[tokio::test]
async fn the_record_says_what_repeats_by_tool_and_model() {
    let up = Upstream::chatting().await;
    let home = Home::new();
    home.settings(&App::settings(up.addr(), ""));
    let traygate = home.serve(&["--log", "error"]).await;
    let calls = [
        ("aider", "small", "one"),
        ("aider", "small", "one"),
        ("eval", "small", "one"),
        ("eval", "large", "two"),
        ("eval", "large", "three"),
    ];
    let mut client = Client::to(traygate.addr()).await;
    for (tool, model, said) in calls {
        let body =
            format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"{said}"}}]}}"#);
        let call = post(&format!("/@{tool}/v1/chat/completions")).json(&body);
        assert_eq!(client.ask(call).await.end, BodyEnd::Clean);
    }
    home.ended_rows(5).await;

    let answer = json(&home.run(&["repeats", "--format", "json"]).await.stdout);
    assert_eq!(answer["all"]["calls"], 5);
    assert_eq!(
        repeats(&answer["all"]),
        [2, 2, 2, 2],
        "cached calls are calls"
    );
    assert_eq!(answer["all"]["windows"][0]["same_caller"], 1);
    assert_eq!(answer["by_tool"][0]["name"], "eval");
    assert_eq!(repeats(&answer["by_tool"][0]), [1, 1, 1, 1]);
    assert_eq!(answer["by_model"][0]["name"], "small");
    assert_eq!(repeats(&answer["by_model"][0]), [2, 2, 2, 2]);
    let most = &answer["most_repeated"];
    assert_eq!(most.as_array().map(Vec::len), Some(1), "{most}");
    assert_eq!(
        (&most[0]["calls"], &most[0]["tool"]),
        (&3.into(), &"eval".into())
    );

    let aider = home
        .run(&["repeats", "--tool", "aid*", "--format", "json"])
        .await;
    let aider = json(&aider.stdout);
    assert_eq!(
        (&aider["all"]["calls"], repeats(&aider["all"])[3]),
        (&2.into(), 1)
    );
    let none = home.run(&["repeats", "--model", "none"]).await;
    assert!(none.stdout.starts_with("0 calls."), "{}", none.stdout);

    let table = home.run(&["repeats"]).await.stdout;
    for part in [
        "5 calls from 20",
        "40.00 %",
        "BY TOOL",
        "MOST REPEATED",
        "3 ×",
    ] {
        assert!(table.contains(part), "{part:?} in {table}");
    }
    assert!(
        table.lines().all(|line| line.chars().count() <= 120),
        "{table}"
    );
    let lines = home.run(&["repeats", "--format", "csv"]).await.stdout;
    let mut lines = csv::Reader::from_reader(lines.as_bytes());
    let scopes: Vec<String> = lines
        .records()
        .map(|line| line.expect("a line")[0].to_owned())
        .collect();
    assert_eq!(scopes.len(), 4 * (1 + 2 + 2) + 1, "{scopes:?}");
}

const LOG: &str = r#"{"timestamp":"2026-11-30T10:00:00Z","user":"ann","model":"m","messages":[{"role":"user","content":"hi"}]}
{"timestamp":"2026-11-30T10:04:00Z","user":"ann","model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes?"},{"role":"user","content":"more"}]}
not a row
{"timestamp":"2026-11-30T10:34:00Z","user":"bob","model":"n","messages":[{"role":"user","content":"hi"}]}
"#;

#[tokio::test]
async fn a_log_of_conversations_is_read_from_a_file_and_from_a_pipe() {
    let home = Home::new();
    let file = home.folder().join("log.jsonl");
    std::fs::write(&file, LOG).expect("a file");
    let path = file.to_str().expect("a path of text");
    let from_file = home
        .run(&["repeats", "--from", path, "--format", "json"])
        .await;
    assert_eq!(from_file.code, Some(0), "{}", from_file.stderr);
    let answer = json(&from_file.stdout);
    assert_eq!((&answer["rows"], &answer["unread"]), (&3.into(), &1.into()));
    assert_eq!(answer["first_unread"][0]["row"], 3);
    assert_eq!(answer["all"]["calls"], 4);
    assert_eq!(repeats(&answer["all"]), [1, 2, 2, 2]);
    assert_eq!(answer["all"]["windows"][3]["same_caller"], 1);
    assert_eq!(answer["by_tool"], Value::Array(Vec::new()));

    let piped = home
        .run_with(&["repeats", "--from", "-", "--format", "json"], LOG)
        .await;
    assert_eq!(json(&piped.stdout), answer);

    let table = home.run(&["repeats", "--from", path]).await.stdout;
    for part in [
        "4 turns from",
        "of the same user",
        "3 rows were read, 1 could not be",
        "row 3:",
    ] {
        assert!(table.contains(part), "{part:?} in {table}");
    }
    let calls = home
        .run(&[
            "repeats",
            "--from",
            path,
            "--each-row",
            "turn",
            "--format",
            "json",
        ])
        .await;
    assert_eq!(json(&calls.stdout)["all"]["calls"], 3);
}

#[tokio::test]
async fn what_cannot_be_read_is_said_with_the_way_out() {
    let home = Home::new();
    let file = home.folder().join("log.json");
    let path = file.to_str().expect("a path of text");
    let table = [
        ("[\n{\"prompt\":\"hi\"}\n]x\n", Some(0), ""),
        ("[{\"messages\":[]},{\"messages\":[]}]", Some(2), "jq -c"),
        ("nonsense", Some(2), "row 1: "),
    ];
    for (text, code, told) in table {
        std::fs::write(&file, text).expect("a file");
        let ended = home.run(&["repeats", "--from", path]).await;
        assert_eq!(ended.code, code, "{text:?}: {}", ended.said());
        assert!(ended.stderr.contains(told), "{text:?}: {}", ended.stderr);
    }
    let missing = home.run(&["repeats", "--from", "/nowhere/at.all"]).await;
    assert_eq!(missing.code, Some(2));
    assert!(
        missing.stderr.contains("/nowhere/at.all"),
        "{}",
        missing.stderr
    );
    let both = home
        .run(&["repeats", "--from", path, "--since", "2h"])
        .await;
    assert!(both.stderr.contains("--since"), "{}", both.stderr);
    let help = home.run(&["repeats", "--help"]).await.stdout;
    for part in [
        "hash of the whole conversation so far",
        "32 bytes",
        "TRAYGATE_REPEATS_SINCE",
    ] {
        assert!(help.contains(part), "{part:?} in {help}");
    }
}
