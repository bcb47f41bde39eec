//! Where a request goes: addresses, rules, tags, methods, and what is not for any provider.

use std::time::Duration;

use super::bytes::{gzip, unhex};
use super::support::app::App;
use super::support::client::{BodyEnd, Outgoing, get, post};
use super::support::upstream::{Gate, Reply, Request, Upstream, chat_answer};

const HOUR: &str = "[limits]\nconcurrency = 1\nqueue_secs = 3600\n";

/// Three providers of their own, behind further settings.
struct Providers {
    openai: Upstream,
    anthropic: Upstream,
    ollama: Upstream,
    app: App,
}

impl Providers {
    async fn with(more: &str) -> Providers {
        let [openai, anthropic, ollama] = [
            Upstream::chatting().await,
            Upstream::chatting().await,
            Upstream::chatting().await,
        ];
        let app = App::start(&format!(
            "{more}\n\
             [[provider]]\nname = \"openai\"\nbase_url = \"{}/v1\"\n\
             [[provider]]\nname = \"anthropic\"\nbase_url = \"{}\"\n\
             [[provider]]\nname = \"ollama\"\nbase_url = \"{}\"\n",
            openai.url(),
            anthropic.url(),
            ollama.url()
        ))
        .await;
        Providers {
            openai,
            anthropic,
            ollama,
            app,
        }
    }

    /// Sends a request and tells which provider got it, and at which address.
    async fn reached_by(&self, request: Outgoing) -> (&'static str, String) {
        let all = [
            ("openai", &self.openai),
            ("anthropic", &self.anthropic),
            ("ollama", &self.ollama),
        ];
        let before: usize = all.iter().map(|(_, up)| up.requests().len()).sum();
        let seen = all.map(|(_, up)| up.requests().len());
        let answer = self.app.ask(request).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let after: usize = all.iter().map(|(_, up)| up.requests().len()).sum();
        assert_eq!(after, before + 1, "one request reaches one provider");
        let (name, up) = all
            .into_iter()
            .zip(seen)
            .find(|((_, up), seen)| up.requests().len() > *seen)
            .map(|(provider, _)| provider)
            .expect("just counted");
        assert_eq!(answer.header("x-traygate-provider"), Some(name));
        (name, last(up).target)
    }
}

fn last(up: &Upstream) -> Request {
    up.requests().pop().expect("a request").request
}

/// A chat body that is not the same twice.
fn chat(model: &str, n: usize) -> String {
    format!(r#"{{"model":"{model}","messages":[],"n":{n}}}"#)
}

// --- Addresses ----------------------------------------------------------------------------------

// D27, D31
#[tokio::test]
async fn base_urls_and_client_paths_make_one_address() {
    let up = Upstream::chatting().await;
    let bases = [
        "",
        "/",
        "/v1",
        "/v1/",
        "/api/v3",
        "/v1beta/openai",
        "/openai/deployments/d",
        "/o?api-version=1&a=b",
    ];
    let providers: String = bases
        .iter()
        .enumerate()
        .map(|(n, base)| {
            format!(
                "[[provider]]\nname = \"b{n}\"\nkind = \"openai\"\nbase_url = \"{}{base}\"\n",
                up.url()
            )
        })
        .collect();
    let app = App::start(&providers).await;
    // For each client path its address on each base.
    let table: [(&str, [&str; 8]); 9] = [
        (
            "/v1/chat/completions",
            [
                "/v1/chat/completions",
                "/v1/chat/completions",
                "/v1/chat/completions",
                "/v1/chat/completions",
                "/api/v3/chat/completions",
                "/v1beta/openai/chat/completions",
                "/openai/deployments/d/v1/chat/completions",
                "/o/v1/chat/completions?api-version=1&a=b",
            ],
        ),
        (
            "/chat/completions",
            [
                "/chat/completions",
                "/chat/completions",
                "/v1/chat/completions",
                "/v1/chat/completions",
                "/api/v3/chat/completions",
                "/v1beta/openai/chat/completions",
                "/openai/deployments/d/chat/completions",
                "/o/chat/completions?api-version=1&a=b",
            ],
        ),
        (
            "/v1/models",
            [
                "/v1/models",
                "/v1/models",
                "/v1/models",
                "/v1/models",
                "/api/v3/models",
                "/v1beta/openai/models",
                "/openai/deployments/d/v1/models",
                "/o/v1/models?api-version=1&a=b",
            ],
        ),
        (
            "/models?client_version=0.1",
            [
                "/models?client_version=0.1",
                "/models?client_version=0.1",
                "/v1/models?client_version=0.1",
                "/v1/models?client_version=0.1",
                "/api/v3/models?client_version=0.1",
                "/v1beta/openai/models?client_version=0.1",
                "/openai/deployments/d/models?client_version=0.1",
                "/o/models?api-version=1&a=b&client_version=0.1",
            ],
        ),
        (
            "/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
            [
                "/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/api/v3/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/v1beta/openai/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/openai/deployments/d/v1/models/org%2Fname%20x?api-version=2&q=%2F+%26",
                "/o/v1/models/org%2Fname%20x?a=b&api-version=2&q=%2F+%26",
            ],
        ),
        (
            "//v1/models",
            [
                "/v1/models",
                "/v1/models",
                "/v1/models",
                "/v1/models",
                "/api/v3/models",
                "/v1beta/openai/models",
                "/openai/deployments/d/v1/models",
                "/o/v1/models?api-version=1&a=b",
            ],
        ),
        (
            "/v1beta/models",
            [
                "/v1beta/models",
                "/v1beta/models",
                "/v1/v1beta/models",
                "/v1/v1beta/models",
                "/api/v3/v1beta/models",
                "/v1beta/openai/v1beta/models",
                "/openai/deployments/d/v1beta/models",
                "/o/v1beta/models?api-version=1&a=b",
            ],
        ),
        (
            "/",
            [
                "/",
                "/",
                "/v1",
                "/v1",
                "/api/v3",
                "/v1beta/openai",
                "/openai/deployments/d",
                "/o?api-version=1&a=b",
            ],
        ),
        (
            "",
            [
                "/",
                "/",
                "/v1",
                "/v1",
                "/api/v3",
                "/v1beta/openai",
                "/openai/deployments/d",
                "/o?api-version=1&a=b",
            ],
        ),
    ];
    for (path, addresses) in table {
        for (n, address) in addresses.into_iter().enumerate() {
            for tag in ["", "/@tool"] {
                app.ask(get(&format!("{tag}/b{n}{path}"))).await;
                assert_eq!(last(&up).target, address, "{:?} × {path:?}", bases[n]);
                let request = post(&format!("{tag}/b{n}{path}")).json(chat("m", n));
                app.ask(request.header("x-traygate-dedup", "off")).await;
                assert_eq!(last(&up).target, address, "{:?} × {path:?}", bases[n]);
            }
        }
    }
}

#[tokio::test]
async fn bare_paths_go_to_the_default_of_their_dialect() {
    let three = Providers::with("").await;
    let version = |request: Outgoing| request.header("anthropic-version", "2023-06-01");
    let table = [
        (
            post("/v1/chat/completions"),
            "openai",
            "/v1/chat/completions",
        ),
        (post("/chat/completions"), "openai", "/v1/chat/completions"),
        (post("/v1/responses"), "openai", "/v1/responses"),
        (post("/v1/embeddings"), "openai", "/v1/embeddings"),
        (get("/v1/models"), "openai", "/v1/models"),
        (get("/"), "openai", "/v1"),
        (get("/zzz/y?x=1"), "openai", "/v1/zzz/y?x=1"),
        (
            post("/v1/threads/t/messages"),
            "openai",
            "/v1/threads/t/messages",
        ),
        (post("/v1/messages"), "anthropic", "/v1/messages"),
        (post("/messages"), "anthropic", "/messages"),
        (
            post("/v1/messages?beta=true"),
            "anthropic",
            "/v1/messages?beta=true",
        ),
        (
            post("/v1/messages/count_tokens?beta=true"),
            "anthropic",
            "/v1/messages/count_tokens?beta=true",
        ),
        (
            get("/v1/messages/batches"),
            "anthropic",
            "/v1/messages/batches",
        ),
        (version(get("/v1/models")), "anthropic", "/v1/models"),
        (version(post("/v1/complete")), "anthropic", "/v1/complete"),
        (post("/api/chat"), "ollama", "/api/chat"),
        (post("/api/generate"), "ollama", "/api/generate"),
        (post("/api/embed"), "ollama", "/api/embed"),
        (get("/api/tags"), "ollama", "/api/tags"),
        (get("/api/version"), "ollama", "/api/version"),
        (post("/api/show"), "ollama", "/api/show"),
        (
            Outgoing::new("DELETE", "/api/delete"),
            "ollama",
            "/api/delete",
        ),
        // Named, whatever the path looks like.
        (post("/ollama/v1/messages"), "ollama", "/v1/messages"),
        (
            version(post("/openai/v1/messages")),
            "openai",
            "/v1/messages",
        ),
        (
            post("/anthropic/api/event_logging/batch"),
            "anthropic",
            "/api/event_logging/batch",
        ),
        (
            post("/ollama/v1/chat/completions"),
            "ollama",
            "/v1/chat/completions",
        ),
    ];
    for (n, (request, provider, address)) in table.into_iter().enumerate() {
        let what = format!("{request:?}");
        let request = request.json(chat("m", n));
        assert_eq!(
            three.reached_by(request).await,
            (provider, address.to_owned()),
            "{what}"
        );
    }
}

#[tokio::test]
async fn a_default_of_ones_own_beats_the_shipped_one() {
    let up = Upstream::chatting().await;
    let mine = Upstream::chatting().await;
    let more = format!(
        "[[provider]]\nname = \"mine\"\nkind = \"openai\"\ndefault = true\nbase_url = \"{}\"\n",
        mine.url()
    );
    let app = App::with(&up, &more).await;
    let answer = app.chat(&chat("m", 0)).await;
    assert_eq!(answer.header("x-traygate-provider"), Some("mine"));
    let answer = app.messages(&chat("m", 0)).await;
    assert_eq!(answer.header("x-traygate-provider"), Some("anthropic"));
    let answer = app.post("/openai/v1/chat/completions", &chat("m", 0)).await;
    assert_eq!(answer.header("x-traygate-provider"), Some("openai"));
    assert_eq!((mine.calls(), up.calls()), (1, 2));
}

#[tokio::test]
async fn model_rules_choose_where_bare_calls_go() {
    let three = Providers::with(
        "[[route]]\nmodel = \"claude-*\"\nprovider = \"anthropic\"\n\
         [[route]]\nmodel = \"claude-local\"\nprovider = \"openai\"\n\
         [[route]]\nmodel = \"qwen?\"\nprovider = \"ollama\"\n",
    )
    .await;
    let table = [
        (
            "/v1/chat/completions",
            "claude-x",
            "anthropic",
            "/v1/chat/completions",
        ),
        // Case does not count; the first rule wins.
        (
            "/v1/chat/completions",
            "Claude-Local",
            "anthropic",
            "/v1/chat/completions",
        ),
        (
            "/v1/chat/completions",
            "qwen3",
            "ollama",
            "/v1/chat/completions",
        ),
        (
            "/v1/chat/completions",
            "qwen33",
            "openai",
            "/v1/chat/completions",
        ),
        (
            "/@tool/v1/chat/completions",
            "qwen3",
            "ollama",
            "/v1/chat/completions",
        ),
        ("/v1/messages", "qwen3", "ollama", "/v1/messages"),
        ("/v1/embeddings", "qwen3", "ollama", "/v1/embeddings"),
        ("/api/chat", "claude-x", "anthropic", "/api/chat"),
        // Who names a provider gets it.
        (
            "/openai/v1/chat/completions",
            "qwen3",
            "openai",
            "/v1/chat/completions",
        ),
    ];
    for (n, (path, model, provider, address)) in table.into_iter().enumerate() {
        let request = post(path).json(chat(model, n));
        assert_eq!(
            three.reached_by(request).await,
            (provider, address.to_owned()),
            "{model} on {path}"
        );
        let row = &three.app.rows(n + 1).await[0];
        assert_eq!(
            (&*row.provider, row.model.as_deref()),
            (provider, Some(model))
        );
    }
}

#[tokio::test]
async fn the_model_demo_answers_from_any_bare_path_without_a_key() {
    let three = Providers::with("").await;
    for (path, says) in [
        ("/v1/chat/completions", "chat.completion"),
        ("/v1/responses", "response"),
        ("/v1/messages", "message"),
        ("/demo/v1/chat/completions", "chat.completion"),
    ] {
        let body = r#"{"model":"demo","max_tokens":50,"input":"hi","messages":[{"role":"user","content":"hi"}]}"#;
        let answer = three.app.post(path, body).await;
        assert_eq!(answer.status(), 200, "{path}: {}", answer.text());
        assert_eq!(answer.header("x-traygate-provider"), Some("demo"), "{path}");
        let json = answer.json();
        let kind = json["object"].as_str().or(json["type"].as_str());
        assert_eq!(kind, Some(says), "{path}");
    }
    for up in [&three.openai, &three.anthropic, &three.ollama] {
        assert_eq!(up.requests().len(), 0);
    }
}

#[tokio::test]
async fn the_tool_is_named_by_path_then_tag_then_agent() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let table = [
        (
            "/@aider/openai/v1/chat/completions",
            Some("tag"),
            Some("curl/8"),
            "aider",
        ),
        ("/@my.tool-2/v1/chat/completions", None, None, "my.tool-2"),
        ("/v1/chat/completions", Some("tag"), Some("curl/8"), "tag"),
        (
            "/v1/chat/completions",
            None,
            Some("OpenAI/JS 4.104.0"),
            "openai-js",
        ),
        ("/openai/v1/chat/completions", None, None, "unknown"),
    ];
    for (n, (path, tag, agent, tool)) in table.into_iter().enumerate() {
        let mut request = post(path).json(chat("m", n));
        if let Some(tag) = tag {
            request = request.header("x-traygate-tag", tag);
        }
        if let Some(agent) = agent {
            request = request.header("user-agent", agent);
        }
        assert_eq!(app.ask(request).await.status(), 200);
        let request = last(&up);
        assert_eq!(
            request.target, "/v1/chat/completions",
            "the tag is stripped"
        );
        assert_eq!(request.header("user-agent"), agent);
        assert_eq!(app.rows(n + 1).await[0].tool, tool, "{path}");
    }
}

#[tokio::test]
async fn an_unknown_provider_is_named_with_those_there_are() {
    let up = Upstream::chatting().await;
    let app = App::with(
        &up,
        "[[provider]]\nname = \"azure\"\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\n",
    )
    .await;
    for (n, (path, anthropic)) in [
        ("/grok/v1/chat/completions", false),
        ("/grok/v1beta/models", false),
        ("/@tool/grok/v1/chat/completions", false),
        ("/OpenAI/v1/chat/completions", false),
        ("/grok/v1/messages", true),
        ("/@tool/grok/v1/messages/count_tokens", true),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = app.post(path, "{}").await;
        assert_eq!(answer.status(), 404, "{path}");
        assert_eq!(
            answer.header("x-traygate-error"),
            Some("no_provider"),
            "{path}"
        );
        let json = answer.json();
        let message = json["error"]["message"].as_str().expect("a message");
        assert!(message.starts_with("Traygate: "), "{message}");
        for name in ["openai", "anthropic", "ollama", "azure", "demo"] {
            assert!(message.contains(name), "{path}: {message}");
        }
        // In the dialect of the path, whoever stands before it.
        assert_eq!(json["type"] == "error", anthropic, "{path}: {json}");
        assert_eq!(json["error"]["code"], "no_provider", "{path}");
        let row = &app.rows(n + 1).await[0];
        assert_eq!(
            (row.outcome.as_deref(), row.status, row.upstream_call),
            (Some("refused"), Some(404), Some(false))
        );
    }
    assert_eq!(up.requests().len(), 0);
}

#[tokio::test]
async fn what_is_traygates_own_is_never_forwarded() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let html = "text/html,application/xhtml+xml,*/*;q=0.8";

    let answer = app.ask(get("/").header("accept", html)).await;
    assert_eq!(answer.status(), 303);
    assert_eq!(answer.header("location"), Some("/traygate/"));
    for path in [
        "/traygate",
        "/traygate/",
        "/traygate/api/nothing",
        "/traygate/v1/chat/completions",
    ] {
        for request in [
            get(path),
            post(path).json("{}"),
            Outgoing::new("DELETE", path),
        ] {
            app.ask(request).await;
        }
    }
    assert_eq!(up.requests().len(), 0);
    // Others than browsers mean the provider.
    assert_eq!(app.ask(get("/")).await.status(), 200);
    let head = Outgoing::new("HEAD", "/").header("accept", html);
    assert_eq!(app.ask(head).await.status(), 200);
    assert_eq!(up.requests().len(), 2);
}

// --- Methods and free routes --------------------------------------------------------------------

// D30
#[tokio::test]
async fn every_method_and_path_passes_with_its_query_and_body() {
    let up = Upstream::start(|request: &Request| Reply::json(200, request.method.as_bytes())).await;
    let app = App::before(&up).await;
    for (method, path, body) in [
        ("HEAD", "/anthropic/", ""),
        ("HEAD", "/", ""),
        ("GET", "/v1/files/x/content?a=1&a=2", ""),
        ("DELETE", "/v1/files/x", ""),
        ("DELETE", "/api/delete", "{\"model\":\"m\"}"),
        ("PATCH", "/zzz", "{\"a\":1}"),
        ("PUT", "/v1/x", "put"),
        ("OPTIONS", "/v1/x", ""),
        ("PROPFIND", "/v1/x", "<xml/>"),
        ("GET", "/v1/search", "a GET with a body"),
        (
            "POST",
            "/v1/messages/count_tokens?beta=true",
            "{\"model\":\"m\"}",
        ),
        ("POST", "/api/show", "{\"model\":\"m\"}"),
    ] {
        let mut request = Outgoing::new(method, path).body(body);
        if !body.is_empty() {
            request = request.header("content-length", &body.len().to_string());
        }
        let answer = app.ask(request).await;
        assert_eq!(answer.status(), 200, "{method} {path}");
        assert_eq!(answer.header("x-traygate-dedup"), Some("off"));
        let seen = last(&up);
        assert_eq!(seen.method, method);
        assert_eq!(seen.body, body, "{method} {path}");
        let query = |target: &str| target.split_once('?').map(|(_, query)| query.to_owned());
        assert_eq!(query(&seen.target), query(path), "{method}");
        if method != "HEAD" {
            assert_eq!(answer.text(), method);
        }
    }
}

/// A provider whose only place is taken by a call that waits at `gate`.
async fn held_up(gate: &Gate) -> (Upstream, App, tokio::task::JoinHandle<u16>) {
    let up = Upstream::start({
        let gate = gate.clone();
        move |request| {
            if request.is_call() {
                Reply::chat(request).held_by(&gate)
            } else {
                Reply::json(200, "{}")
            }
        }
    })
    .await;
    let app = App::with(&up, HOUR).await;
    let addr = app.addr();
    let held = tokio::spawn(async move {
        super::support::client::post_json(addr, "/v1/chat/completions", "{}")
            .await
            .status()
    });
    gate.reached_by(1).await;
    (up, app, held)
}

#[tokio::test]
async fn free_routes_pass_straight_where_the_pool_is_full() {
    let gate = Gate::new();
    let (up, app, held) = held_up(&gate).await;
    for path in [
        "/openai/v1/messages/count_tokens",
        "/openai/v1/responses/input_tokens",
        "/openai/v1/responses/r/cancel",
        "/openai/api/event_logging/batch",
        "/openai/api/show",
        "/openai/api/pull",
        "/openai/api/push",
        "/openai/api/create",
        "/openai/api/copy",
        "/openai/api/blobs/sha256:0",
        "/openai/tokenize",
    ] {
        assert_eq!(app.post(path, "{}").await.status(), 200, "{path}");
    }
    for method in ["GET", "HEAD", "DELETE", "PUT", "PATCH"] {
        let answer = app.ask(Outgoing::new(method, "/v1/files/x")).await;
        assert_eq!(answer.status(), 200, "{method}");
    }
    let before = up.requests().len();
    // A POST that nobody knows may cost money: it waits its turn.
    let mut unknown = app.client().await;
    unknown
        .send(post("/v1/images/generations").json("{}"))
        .await;
    let answered = tokio::time::timeout(Duration::from_millis(200), unknown.head()).await;
    assert!(answered.is_err(), "it does not pass the waiting line");
    assert_eq!(up.requests().len(), before);
    gate.open();
    assert_eq!(unknown.head().await.status, 200);
    assert_eq!(held.await.expect("an answer"), 200);
    assert_eq!(last(&up).target, "/v1/images/generations");
}

#[tokio::test]
async fn free_routes_pass_straight_where_the_breaker_is_open() {
    let up = Upstream::failing(503).await;
    let app = App::with(&up, "[breaker]\nfailures = 2\nrecovery_check_secs = 0\n").await;
    for n in 0..2 {
        app.chat(&chat("m", n)).await;
    }
    let refused = app.chat(&chat("m", 9)).await;
    assert_eq!(refused.header("x-traygate-error"), Some("breaker_open"));
    let refused = app.post("/v1/images/generations", "{}").await;
    assert_eq!(refused.header("x-traygate-error"), Some("breaker_open"));
    assert_eq!(up.requests().len(), 2);
    for request in [
        post("/openai/v1/messages/count_tokens").json("{}"),
        get("/v1/models"),
        Outgoing::new("DELETE", "/v1/files/x"),
    ] {
        let answer = app.ask(request).await;
        // The provider's own word.
        assert_eq!(
            (answer.status(), answer.header("x-traygate-error")),
            (503, None)
        );
    }
    assert_eq!(up.requests().len(), 5);
}

#[tokio::test]
async fn equal_calls_on_unknown_and_free_routes_are_never_merged() {
    let gate = Gate::new();
    let up = Upstream::start({
        let gate = gate.clone();
        move |_| Reply::json(200, chat_answer("x")).held_by(&gate)
    })
    .await;
    let app = App::before(&up).await;
    let mut clients = Vec::new();
    for path in ["/v1/images/generations", "/v1/messages/count_tokens"] {
        for _ in 0..2 {
            let mut client = app.client().await;
            client.send(post(path).json("{}")).await;
            clients.push(client);
        }
    }
    gate.reached_by(4).await;
    gate.open();
    for mut client in clients {
        let answer = client.read_to_end().await;
        assert_eq!(answer.header("x-traygate-dedup"), Some("off"));
    }
}

// D33
#[tokio::test]
async fn redirects_pass_as_they_are_and_are_not_followed() {
    let other = Upstream::chatting().await;
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let mut n = 0;
    for status in [301, 302, 303, 307, 308] {
        for location in [
            "/v1/elsewhere".to_owned(),
            format!("{}/v1/elsewhere", up.url()),
            format!("{}/v1/elsewhere", other.url()),
        ] {
            let target = location.clone();
            up.set_handler(move |_| Reply::status(status).header("location", &target));
            for path in ["/v1/chat/completions", "/v1/images/generations"] {
                n += 1;
                let request = post(path)
                    .header("authorization", "Bearer sk-own")
                    .json(chat("m", n));
                let answer = app.ask(request).await;
                assert_eq!(answer.status(), status);
                assert_eq!(answer.header("location"), Some(&*location));
            }
            let answer = app.ask(get("/v1/files/x")).await;
            n += 1;
            assert_eq!(answer.status(), status);
        }
    }
    assert_eq!((up.requests().len(), other.requests().len()), (n, 0));
}

// D32
#[tokio::test]
async fn multipart_and_binary_pass_unharmed_both_ways() {
    let mp3: Vec<u8> = (0..100_000u32).map(|n| (n * 7 + n / 256) as u8).collect();
    let sound = mp3.clone();
    let up = Upstream::start(move |_| Reply::of(200, "audio/mpeg", &sound)).await;
    let app = App::before(&up).await;
    let boundary = "----WebKitFormBoundary7MA4YWxkTrZu0gW";
    let mut form = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
         Content-Type: audio/wav\r\n\r\n"
    )
    .into_bytes();
    form.extend((0..=255u8).cycle().take(50_000));
    form.extend(format!("\r\n--{boundary}--\r\n").bytes());
    let content_type = format!("multipart/form-data; boundary={boundary}");

    let mut client = app.client().await;
    client
        .send(
            post("/v1/audio/transcriptions")
                .header("content-type", &content_type)
                .chunked_upload(),
        )
        .await;
    for part in form.chunks(999) {
        client.write_chunk(part).await.expect("taken");
    }
    client.write_last_chunk().await.expect("taken");
    let answer = client.read_to_end().await;
    assert!(answer.bytes() == mp3, "the sound is the same");
    assert_eq!(answer.header("content-type"), Some("audio/mpeg"));
    let request = last(&up);
    assert!(request.body == form, "the form is the same");
    assert_eq!(request.header("content-type"), Some(&*content_type));

    // Counted, and as a speech request.
    let request = post("/v1/audio/transcriptions")
        .header("content-type", &content_type)
        .body(&form);
    assert!(client.ask(request).await.bytes() == mp3);
    assert!(last(&up).body == form);
    let row = &app.rows(2).await[0];
    assert_eq!(
        (row.outcome.as_deref(), &*row.route),
        (Some("completed"), "POST /v1/audio/transcriptions")
    );
}

// --- Compressed requests ------------------------------------------------------------------------

/// What `brotli` makes of a chat request of the model `brotli-model`.
const BROTLI_REQUEST: &str = "1b5200008cd315f32384750f6173a9af1b93edf070100479b37558bafa3ac689c0b5dc\
    32d1cc376c8c81bf2dd10acb3b38d3bf5ec06c9de49aae8b5a8b2d3c6227be03";

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::encode_all(text, 3).expect("memory")
}

// D20
#[tokio::test]
async fn compressed_requests_go_on_as_they_came_and_are_understood() {
    let three = Providers::with(
        "[[route]]\nmodel = \"*-model\"\nprovider = \"ollama\"\n\
         [[route]]\nmodel = \"large\"\nprovider = \"anthropic\"\n",
    )
    .await;
    let body =
        |model: &str| format!(r#"{{"model":"{model}","stream":false,"input":"hi"}}"#).into_bytes();
    let noise: String = (0..400_000u64)
        .map(|n| char::from(b'a' + ((n * n / 7 + n * 31) % 26) as u8))
        .collect();
    let large = format!(r#"{{"input":"{noise}","model":"large"}}"#).into_bytes();
    let table = [
        ("gzip", gzip(&body("gzip-model")), "gzip-model", "ollama"),
        ("zstd", zstd(&body("zstd-model")), "zstd-model", "ollama"),
        ("br", unhex(BROTLI_REQUEST), "brotli-model", "ollama"),
        // Decoded elsewhere than a small one.
        ("zstd", zstd(&large), "large", "anthropic"),
    ];
    for (n, (encoding, packed, model, provider)) in table.into_iter().enumerate() {
        let request = post("/v1/responses")
            .header("content-encoding", encoding)
            .json(&packed);
        let (reached, _) = three.reached_by(request.clone()).await;
        assert_eq!(reached, provider, "{encoding}");
        let up = if provider == "ollama" {
            &three.ollama
        } else {
            &three.anthropic
        };
        let sent = last(up);
        assert!(sent.body == packed, "{encoding}: the bytes are the same");
        assert_eq!(sent.header("content-encoding"), Some(encoding));
        let row = &three.app.rows(n + 1).await[0];
        assert_eq!(row.model.as_deref(), Some(model), "{encoding}");
    }
}

// D20
#[tokio::test]
async fn a_compressed_request_that_is_damaged_or_a_bomb_is_refused() {
    let up = Upstream::answering(chat_answer("x")).await;
    let app = App::with(&up, "[server]\nmax_body_mb = 1\n").await;
    let good = zstd(chat("m", 0).as_bytes());
    let zeros = vec![0u8; 200 << 20];
    let bomb = zstd(&zeros);
    assert!(bomb.len() < 100_000, "{}", bomb.len());
    drop(zeros);
    let mut n = 0;
    for (what, encoding, body, status) in [
        ("not zstd", "zstd", b"{\"model\":\"m\"}".to_vec(), 400),
        ("half of it", "zstd", good[..good.len() / 2].to_vec(), 400),
        ("not gzip", "gzip", b"{}".to_vec(), 400),
        (
            "half a gzip",
            "gzip",
            gzip(chat("m", 0).as_bytes())[..20].to_vec(),
            400,
        ),
        ("not brotli", "br", b"{\"model\":\"m\"}".to_vec(), 400),
        ("a bomb", "zstd", bomb, 413),
        ("a gzip bomb", "gzip", gzip(&vec![b' '; 20 << 20]), 413),
    ] {
        for (path, anthropic) in [("/v1/responses", false), ("/anthropic/v1/messages", true)] {
            let request = post(path).header("content-encoding", encoding).json(&body);
            let answer = app.ask(request).await;
            assert_eq!(
                answer.status(),
                status,
                "{what} on {path}: {}",
                answer.text()
            );
            assert_eq!(
                answer.header("x-traygate-error"),
                Some("bad_request"),
                "{what}"
            );
            let json = answer.json();
            assert_eq!(
                json["type"] == "error",
                anthropic,
                "{what} on {path}: {json}"
            );
            let message = json["error"]["message"].as_str().expect("a message");
            assert!(message.starts_with("Traygate: "), "{message}");
            assert_eq!(message.contains("max_body_mb"), status == 413, "{message}");
            n += 1;
            let row = &app.rows(n).await[0];
            assert_eq!(
                (row.outcome.as_deref(), row.status),
                (Some("refused"), Some(status)),
                "{what}"
            );
        }
    }
    assert_eq!(up.requests().len(), 0);
    // What is not known is the provider's to judge.
    let request = post("/v1/responses")
        .header("content-encoding", "lzma, rot13")
        .json("whatever");
    assert_eq!(app.ask(request).await.status(), 200);
    assert_eq!(last(&up).body, "whatever");
}

// --- Upgrades -----------------------------------------------------------------------------------

fn upgrade(path: &str) -> Outgoing {
    get(path)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        .header("cookie", "local=1")
}

#[tokio::test]
async fn websockets_on_generation_routes_are_sent_back_to_http() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for (n, (path, anthropic)) in [
        ("/v1/responses", false),
        ("/@codex/openai/v1/responses", false),
        ("/v1/chat/completions", false),
        ("/v1/messages", true),
        ("/anthropic/v1/messages", true),
        ("/ollama/v1/embeddings", false),
    ]
    .into_iter()
    .enumerate()
    {
        let mut client = app.client().await;
        let answer = client.ask(upgrade(path)).await;
        assert_eq!(answer.status(), 426, "{path}");
        // Codex goes on with HTTP at once where the connection closes.
        assert_eq!(answer.header("connection"), Some("close"), "{path}");
        assert_eq!(client.closed().await, BodyEnd::Clean);
        let json = answer.json();
        assert_eq!(json["error"]["code"], "upgrade_required", "{path}");
        assert_eq!(json["type"] == "error", anthropic, "{path}");
        let row = &app.rows(n + 1).await[0];
        assert_eq!(
            (row.outcome.as_deref(), row.status),
            (Some("refused"), Some(426))
        );
    }
    assert_eq!(up.requests().len(), 0);
}

#[tokio::test]
async fn a_header_that_only_mentions_an_upgrade_is_no_upgrade() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for (n, (connection, protocol)) in [
        ("upgrade, HTTP2-Settings", "h2c"),
        ("keep-alive", "websocket"),
        ("upgrade", "websocket"),
    ]
    .into_iter()
    .enumerate()
    {
        let body = chat("m", n);
        let request = App::chat_request(&body)
            .header("connection", connection)
            .header("upgrade", protocol);
        let answer = app.ask(request).await;
        assert_eq!(answer.status(), 200, "{connection}: {protocol}");
        let seen = last(&up);
        assert_eq!(seen.body, body);
        assert_eq!(seen.header("upgrade"), None);
    }
}

#[tokio::test]
async fn other_websockets_are_tunnelled_and_recorded_as_unmetered() {
    use futures_util::{SinkExt as _, StreamExt as _};
    use tokio_tungstenite::tungstenite::{self, Message};

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let provider = listener.local_addr().expect("a bound port");
    let server = tokio::spawn(async move {
        let (socket, _) = listener.accept().await.expect("a connection");
        let mut seen = None;
        #[expect(
            clippy::result_large_err,
            reason = "the callback's type is tungstenite's"
        )]
        let look = |request: &tungstenite::handshake::server::Request,
                    mut response: tungstenite::handshake::server::Response| {
            seen = Some((request.uri().to_string(), request.headers().clone()));
            let chosen = http::HeaderValue::from_static("realtime");
            response
                .headers_mut()
                .insert("sec-websocket-protocol", chosen);
            Ok(response)
        };
        let mut server = tokio_tungstenite::accept_hdr_async(socket, look)
            .await
            .expect("a handshake");
        while let Some(Ok(message)) = server.next().await {
            if message.is_text() || message.is_binary() {
                server.send(message).await.expect("sent");
            }
        }
        seen.expect("a handshake was seen")
    });
    let app = App::start(&App::settings(provider, "")).await;

    let socket = tokio::net::TcpStream::connect(app.addr())
        .await
        .expect("a connection");
    let mut request = tungstenite::client::IntoClientRequest::into_client_request(
        "ws://localhost/@voice/openai/v1/realtime?model=r",
    )
    .expect("a request");
    for (name, value) in [
        ("authorization", "Bearer sk-own"),
        ("sec-websocket-protocol", "realtime, other"),
        ("openai-beta", "realtime=v1"),
        ("cookie", "local=1"),
        ("x-traygate-tag", "no"),
    ] {
        let value = http::HeaderValue::from_static(value);
        request.headers_mut().insert(name, value);
    }
    let (mut client, answer) = tokio_tungstenite::client_async(request, socket)
        .await
        .expect("a tunnel");
    assert_eq!(answer.headers()["sec-websocket-protocol"], "realtime");
    assert_eq!(answer.headers()["x-traygate-provider"], "openai");
    let id = answer.headers()["x-traygate-call"]
        .to_str()
        .expect("an id")
        .to_owned();
    for message in [
        Message::text("hello \u{1f600}"),
        Message::binary(vec![0u8; 200_000]),
        Message::text(""),
    ] {
        client.send(message.clone()).await.expect("sent");
        let echo = client.next().await.expect("an echo").expect("a message");
        assert!(echo == message);
    }
    // On record, and open, while it lasts.
    let on_record = async {
        loop {
            match app.rows_now().into_iter().next() {
                Some(row) => return row,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let row = super::support::must("the tunnel's row", on_record).await;
    assert_eq!((&*row.id, row.outcome.as_deref()), (&*id, None));
    client.close(None).await.expect("closed");
    drop(client);

    let (target, headers) = super::support::must("the tunnel's end", server)
        .await
        .expect("served");
    assert_eq!(target, "/v1/realtime?model=r");
    assert_eq!(headers["authorization"], "Bearer sk-own");
    assert_eq!(headers["openai-beta"], "realtime=v1");
    assert_eq!(headers["host"], provider.to_string());
    for name in ["cookie", "x-traygate-tag", "origin"] {
        assert!(!headers.contains_key(name), "{name}");
    }
    let row = &app.rows(1).await[0];
    assert_eq!(row.id, id);
    assert_eq!(
        (
            row.outcome.as_deref(),
            &*row.billing,
            row.status,
            &*row.tool
        ),
        (Some("completed"), "unmetered", Some(101), "voice")
    );
    assert_eq!(row.upstream_call, Some(true));
}

#[tokio::test]
async fn an_upgrade_that_the_provider_declines_is_answered_by_the_provider() {
    let up = Upstream::start(|_| Reply::error(403).header("x-why", "not here")).await;
    let app = App::before(&up).await;
    let answer = app.ask(upgrade("/v1/realtime")).await;
    assert_eq!(
        (answer.status(), answer.header("x-why")),
        (403, Some("not here"))
    );
    assert_eq!(answer.json()["error"]["message"], "scripted");
    let sent = last(&up);
    assert_eq!(sent.header("upgrade"), Some("websocket"));
    assert!(sent.headers.has("connection", "upgrade"));
    assert_eq!(sent.header("cookie"), None);
    let row = &app.rows(1).await[0];
    assert_eq!(
        (row.outcome.as_deref(), row.status, &*row.billing),
        (Some("upstream_error"), Some(403), "unmetered")
    );
    let addr = up.stop().await;
    let answer = app.ask(upgrade("/v1/realtime")).await;
    assert_eq!(answer.status(), 502, "{addr} is closed");
    assert_eq!(
        answer.header("x-traygate-error"),
        Some("upstream_unreachable")
    );
}

#[tokio::test]
async fn each_side_of_a_tunnel_hears_that_the_other_has_hung_up() {
    let up = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        )
        .then_echo()
    })
    .await;
    let app = App::before(&up).await;
    let mut client = app.client().await;
    client.send(upgrade("/v1/realtime")).await;
    assert_eq!(client.head().await.status, 101);
    client.write("ping").await.expect("carried");
    assert_eq!(client.read_until("ping").await, "ping");
    drop(client);
    up.wait_until_idle().await;
    assert_eq!(app.rows(1).await[0].outcome.as_deref(), Some("completed"));

    let mut client = app.client().await;
    client.send(upgrade("/v1/realtime")).await;
    assert_eq!(client.head().await.status, 101);
    up.stop().await;
    client.closed().await;
    drop(client);
    app.rows(2).await;
}

#[tokio::test]
async fn a_path_does_not_climb_out_of_the_base_url() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in [
        "/openai/../v1/models",
        "/openai/v1/%2e%2E/models",
        "/openai/v1/./models",
        "/openai/../chat/completions",
    ] {
        let answer = app.ask(get(path)).await;
        assert_eq!(answer.status(), 400, "{path}");
        assert_eq!(answer.header("x-traygate-error"), Some("bad_request"));
    }
    assert_eq!(up.requests().len(), 0);
}

/// A browser asks every address it opens for its icon: with a stored key that would be a call.
#[tokio::test]
async fn a_browsers_icon_is_nobodys_call() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    assert_eq!(app.ask(get("/favicon.ico")).await.status(), 404);
    assert_eq!(up.requests().len(), 0);
}
