//! `openapi.json` is generated from the code; the copy from which the pages' types are made must
//! not be older.

use std::path::Path;

use super::super::support::app::App;
use super::get;

#[tokio::test]
async fn the_copy_for_the_pages_is_not_stale() {
    let app = App::start("").await;
    let described = get(&app, "openapi.json").await;
    let text = serde_json::to_string_pretty(&described).expect("JSON") + "\n";
    let copy = Path::new(env!("CARGO_MANIFEST_DIR")).join("ui/openapi.json");
    if std::env::var_os("TRAYGATE_WRITE_OPENAPI").is_some() {
        std::fs::write(&copy, &text).expect("the copy is written");
    }
    let copied = std::fs::read_to_string(&copy).unwrap_or_default();
    assert!(
        copied == text,
        "ui/openapi.json is stale: run scripts/types"
    );
}

#[tokio::test]
async fn every_route_is_described_and_every_described_route_is_there() {
    let app = App::start("").await;
    let described = get(&app, "openapi.json").await;
    let paths = described["paths"].as_object().expect("paths");
    for (path, methods) in paths {
        let Some(path) = path.strip_prefix("/traygate/api/") else {
            continue;
        };
        let path = path
            .replace("{id}", "01J0000000000000000000000")
            .replace("{name}", "nobody");
        for method in methods.as_object().expect("methods").keys() {
            let method = method.to_uppercase().parse().expect("a method");
            // The stream of events has no end.
            if path == "events" {
                continue;
            }
            let (status, answer) = super::ask(&app, method, &path, None).await;
            let code = answer["error"]["code"].as_str().unwrap_or_default();
            let is_there = !(status == 405 || code == "not_found" && path == "nothing");
            assert!(is_there, "{path}: {status}");
        }
    }
    let expected = [
        "state",
        "events",
        "calls",
        "calls/{id}",
        "calls/{id}/body",
        "series",
        "latency",
        "repeats",
        "settings",
        "providers/{name}/breaker",
        "providers/{name}/key",
        "providers/{name}/check",
        "keys/reload",
        "dedup/clear",
        "mode",
    ];
    for path in expected {
        assert!(
            paths.contains_key(&format!("/traygate/api/{path}")),
            "{path}"
        );
    }
}
