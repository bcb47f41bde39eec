//! `/traygate/health` and `/traygate/metrics`.

use super::super::support::app::App;
use super::super::support::client::get;
use super::super::support::upstream::Upstream;
use super::http;

#[tokio::test]
async fn health_needs_no_token_and_says_what_is_well() {
    let app = App::start("").await;
    let health = http(&app, get("/traygate/health")).await;
    assert_eq!(health.status(), 200);
    let said = health.json();
    assert_eq!(said["status"], "ok");
    assert_eq!(said["log"]["status"], "ok");
    assert_eq!(said["listener"]["status"], "ok");
    assert_eq!(said["traygate"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn health_is_503_while_the_log_is_broken_and_calls_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    // A folder in the place of the database: it can neither be opened nor set aside as a file.
    std::fs::create_dir_all(folder.path().join("traygate.db/x")).expect("a folder");
    let up = Upstream::chatting().await;
    let app = App::start_in(folder, &App::settings(up.addr(), "")).await;
    let health = http(&app, get("/traygate/health")).await;
    assert_eq!(health.status(), 503, "{}", health.text());
    let said = health.json();
    assert_eq!(said["log"]["status"], "trouble");
    assert!(said["log"]["trouble"].is_string());
    assert_eq!(said["listener"]["status"], "ok");
    let answer = app.chat(r#"{"model":"m","messages":[]}"#).await;
    assert_eq!(answer.status(), 200);
}

/// Out of descriptors nobody new is let in; whoever is connected already hears of it.
#[cfg(unix)]
#[tokio::test]
async fn health_is_503_while_no_connection_can_be_accepted() {
    use super::super::support::client::Client;
    use super::super::support::must;
    use super::super::support::process::Home;

    let home = Home::new();
    home.settings("");
    let limited = "ulimit -n 48; exec \"$0\" serve --port 0 --config \"$1\" --data-dir \"$2\"";
    let (config, data) = (home.config(), home.data_dir());
    let paths = [&config, &data].map(|path| path.to_str().expect("text"));
    let traygate = env!("CARGO_BIN_EXE_traygate");
    let mut process = home.start_program("sh", &["-c", limited, traygate, paths[0], paths[1]]);
    process.listens().await;
    let mut watcher = Client::to(process.addr()).await;
    assert_eq!(watcher.ask(get("/traygate/health")).await.status(), 200);
    let mut crowd = Vec::new();
    for _ in 0..80 {
        crowd.push(Client::to(process.addr()).await);
    }
    let troubled = must("trouble", async {
        loop {
            let health = watcher.ask(get("/traygate/health")).await;
            if health.status() == 503 {
                return health.json();
            }
        }
    });
    let said = troubled.await;
    assert_eq!(said["listener"]["status"], "trouble", "{said}");
    let told = said["listener"]["trouble"].as_str().expect("words");
    assert!(told.contains("cannot be accepted"), "{told}");
    drop(crowd);
    must("its end", async {
        while watcher.ask(get("/traygate/health")).await.status() != 200 {}
    })
    .await;
}

#[tokio::test]
async fn metrics_need_no_token_count_calls_and_show_no_secret() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let call = super::super::support::client::post("/v1/chat/completions")
        .header("authorization", "Bearer sk-canary-0123456789")
        .json(r#"{"model":"m","messages":[]}"#);
    http(&app, call.clone()).await;
    http(&app, call).await;
    app.rows(2).await;
    let metrics = http(&app, get("/traygate/metrics")).await;
    assert_eq!(metrics.status(), 200);
    let text = metrics.text();
    let calls: f64 = text
        .lines()
        .filter(|line| line.starts_with("traygate_requests_total{"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum();
    assert_eq!(calls, 2.0, "{text}");
    assert!(!text.contains("canary"));
    assert!(!text.contains(app.running().core().token.expose()));
}
