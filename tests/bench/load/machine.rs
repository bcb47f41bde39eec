//! Says on what the numbers were measured.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::processes::nginx_version;

/// The machine, the system and the commit, as JSON.
pub fn describe() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = value_of(&cpuinfo, "model name").unwrap_or("unknown");
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = value_of(&meminfo, "MemTotal").unwrap_or("unknown");
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let uncommitted =
        output("git", &["status", "--porcelain"]).is_some_and(|files| !files.is_empty());
    json!({
        "at": output("date", &["-u", "+%FT%TZ"]),
        "commit": output("git", &["rev-parse", "HEAD"]),
        "uncommitted_changes": uncommitted,
        "cpu": cpu,
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": memory,
        "kernel": output("uname", &["-sr"]),
        "load_average_at_start": load.split(' ').take(3).collect::<Vec<_>>().join(" "),
        "rustc": output("rustc", &["--version"]),
        "nginx": nginx_version(),
        "note": "load, proxy and provider share these cores",
    })
}

/// The same in a line for people.
pub fn in_words(machine: &Value) -> String {
    let word = |key: &str| machine[key].as_str().unwrap_or("unknown").to_owned();
    let commit: String = word("commit").chars().take(10).collect();
    let changed = if machine["uncommitted_changes"] == true {
        " with uncommitted changes"
    } else {
        ""
    };
    format!(
        "{}, {} cores shared by load, proxy and provider; {}; {}; {}; commit {commit}{changed}; load average at start {}",
        word("cpu"),
        machine["cores"],
        word("kernel"),
        word("rustc"),
        word("nginx"),
        word("load_average_at_start"),
    )
}

fn value_of<'text>(text: &'text str, key: &str) -> Option<&'text str> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
