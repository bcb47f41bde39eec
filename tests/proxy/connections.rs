//! Connections to providers: which address family, through which proxy, and what becomes of a
//! request on a connection that the provider has closed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::support::app::App;
use super::support::client::{Client, get, post};
use super::support::must;
use super::support::upstream::{Reply, Upstream, chat_answer};

fn chat(n: usize) -> String {
    format!(r#"{{"model":"m","messages":[],"n":"<{n}>"}}"#)
}

// --- Both families ------------------------------------------------------------------------------

// D70
#[tokio::test]
async fn localhost_is_tried_on_both_families() {
    let on_v6 = Upstream::start_v6(Reply::chat).await;
    // Nobody else gets the same port of the other family meanwhile, and nobody answers there.
    let reserved =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    let other = SocketAddr::from(([127, 0, 0, 1], on_v6.addr().port()));
    let _ = reserved.bind(&other.into());
    let on_v4 = Upstream::start(Reply::chat).await;
    for up in [&on_v6, &on_v4] {
        for name in ["localhost", "LOCALHOST", "localhost.", "traygate.localhost"] {
            let port = up.addr().port();
            let before = up.calls();
            let app = App::start(&format!(
                "[[provider]]\nname = \"openai\"\nbase_url = \"http://{name}:{port}/v1\"\n"
            ))
            .await;
            let answer = app.chat(&chat(0)).await;
            assert_eq!(
                answer.status(),
                200,
                "{name} at {}: {}",
                up.addr(),
                answer.text()
            );
            let answer = app.ask(get("/v1/models")).await;
            assert_eq!(answer.status(), 200, "{name} at {}", up.addr());
            assert_eq!(up.calls(), before + 1);
            let host = up
                .call(before)
                .request
                .header("host")
                .map(str::to_lowercase);
            assert_eq!(host, Some(format!("{}:{port}", name.to_lowercase())));
        }
    }
}

#[tokio::test]
async fn it_listens_on_both_families_at_one_port() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for ip in ["127.0.0.1", "::1"] {
        let addr = SocketAddr::new(ip.parse().expect("an address"), app.addr().port());
        let answer = Client::to(addr)
            .await
            .ask(App::chat_request(&chat(1)))
            .await;
        assert_eq!(answer.status(), 200, "{ip}");
    }
}

// --- Proxies ------------------------------------------------------------------------------------

// D68
#[cfg(unix)]
#[tokio::test]
async fn the_systems_proxy_serves_the_internet_and_never_loopback() {
    use super::support::process::Home;

    let proxy = Upstream::start(|request| match request.method.as_str() {
        "CONNECT" => Reply::error(502),
        _ => Reply::json(200, chat_answer("through the proxy")),
    })
    .await;
    let v4 = Upstream::chatting().await;
    let v6 = Upstream::start_v6(Reply::chat).await;
    let local: Vec<(&str, String)> = vec![
        ("four", v4.url()),
        ("six", v6.url()),
        ("named", format!("http://localhost:{}", v4.addr().port())),
        ("below", format!("http://x.localhost:{}", v4.addr().port())),
        ("any", format!("http://0.0.0.0:{}", v4.addr().port())),
        (
            "mapped",
            format!("http://[::ffff:127.0.0.1]:{}", v4.addr().port()),
        ),
    ];
    let remote = [
        ("cloud", "http://cloud.test"),
        ("secure", "https://cloud.test"),
        ("lookalike", "http://localhost.cloud.test"),
    ];
    let settings: String = local
        .iter()
        .map(|(name, url)| (*name, url.as_str()))
        .chain(remote)
        .map(|(name, url)| {
            format!("[[provider]]\nname = \"{name}\"\nkind = \"openai\"\nkey = \"pass\"\nbase_url = \"{url}/v1\"\n")
        })
        .collect();
    for (upper, no_proxy) in [
        (true, None),
        (false, Some("other.test,.local")),
        (true, Some("")),
    ] {
        let mut home = Home::new();
        for name in ["http_proxy", "https_proxy", "all_proxy"] {
            let name = if upper {
                name.to_uppercase()
            } else {
                name.to_owned()
            };
            home.set(&name, &proxy.url());
        }
        if let Some(none) = no_proxy {
            home.set("NO_PROXY", none);
        }
        home.settings(&settings);
        let traygate = home.serve(&[]).await;
        let mut client = Client::to(traygate.addr()).await;
        let before = (proxy.requests().len(), v4.calls() + v6.calls());
        for (name, url) in &local {
            let answer = client
                .ask(post(&format!("/{name}/v1/chat/completions")).json(chat(2)))
                .await;
            assert_eq!(answer.text(), chat_answer("Hello from upstream"), "{url}");
            let upgrade = get(&format!("/{name}/v1/realtime"))
                .header("connection", "upgrade")
                .header("upgrade", "websocket");
            assert_eq!(client.ask(upgrade).await.status(), 200, "{url}");
        }
        assert_eq!(
            proxy.requests().len(),
            before.0,
            "loopback is always direct"
        );
        assert_eq!(v4.calls() + v6.calls(), before.1 + local.len());

        for (name, url) in remote {
            let answer = client
                .ask(post(&format!("/{name}/v1/chat/completions")).json(chat(3)))
                .await;
            let seen = proxy.requests().pop().expect("a request").request;
            if url.starts_with("https") {
                assert_eq!(
                    (&*seen.method, &*seen.target),
                    ("CONNECT", "cloud.test:443")
                );
                assert_eq!(answer.status(), 502);
            } else {
                assert_eq!(seen.target, format!("{url}/v1/chat/completions"));
                assert_eq!(seen.body, chat(3));
                assert_eq!(answer.text(), chat_answer("through the proxy"));
            }
        }
        assert_eq!(proxy.requests().len(), before.0 + remote.len());
    }
}

// --- Connections that the provider has closed -----------------------------------------------------

/// What a provider does after it has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// Sends an end of stream, and waits for the proxy's.
    Finish,
    /// Closes at once.
    Close,
    Reset,
    /// Keeps the connection and closes it when the next request comes, unanswered.
    CloseOnRequest,
    /// The same, with a reset.
    ResetOnRequest,
}

/// A provider with bad manners. It says nothing of `connection: close`.
struct Rude {
    addr: SocketAddr,
    /// How often each body's `<n>` was read, in whole or in part.
    seen: Arc<Mutex<HashMap<String, usize>>>,
    /// Connections whose end the proxy has seen.
    noticed: watch::Receiver<usize>,
    server: tokio::task::JoinHandle<()>,
}

impl Rude {
    async fn start(then: Then) -> Rude {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("a bound port");
        let seen: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let (notice, noticed) = watch::channel(0);
        let server = tokio::spawn({
            let seen = seen.clone();
            async move {
                loop {
                    let (socket, _) = listener.accept().await.expect("a connection");
                    let (seen, notice) = (seen.clone(), notice.clone());
                    tokio::spawn(async move {
                        serve_rudely(socket, then, &seen).await;
                        notice.send_modify(|noticed| *noticed += 1);
                    });
                }
            }
        });
        Rude {
            addr,
            seen,
            noticed,
            server,
        }
    }

    fn times(&self, n: usize) -> usize {
        let seen = self.seen.lock().expect("no test has failed here");
        seen.get(&format!("<{n}>")).copied().unwrap_or(0)
    }

    async fn wait_until_noticed(&mut self, connections: usize) {
        let noticed = self.noticed.wait_for(|noticed| *noticed >= connections);
        must("the proxy to see the end", noticed)
            .await
            .expect("it runs");
    }
}

impl Drop for Rude {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve_rudely(mut socket: TcpStream, then: Then, seen: &Mutex<HashMap<String, usize>>) {
    let Some(()) = read_request(&mut socket, seen).await else {
        return;
    };
    let answer = chat_answer("rude");
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{answer}",
        answer.len()
    );
    if socket.write_all(answer.as_bytes()).await.is_err() {
        return;
    }
    let reset = |socket: &TcpStream| {
        socket2::SockRef::from(socket)
            .set_linger(Some(Duration::ZERO))
            .expect("a live socket");
    };
    match then {
        Then::Finish => {
            let _ = socket.shutdown().await;
            let _ = socket.read_to_end(&mut Vec::new()).await;
        }
        Then::Close => {}
        Then::Reset => reset(&socket),
        Then::CloseOnRequest | Then::ResetOnRequest => {
            read_request(&mut socket, seen).await;
            if then == Then::ResetOnRequest {
                reset(&socket);
            }
        }
    }
}

/// Reads a request and counts its `<n>`; `None` if none came.
async fn read_request(socket: &mut TcpStream, seen: &Mutex<HashMap<String, usize>>) -> Option<()> {
    let mut request = Vec::new();
    loop {
        if socket.read_buf(&mut request).await.ok()? == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&request);
        // A GET has its number in the target.
        let number = text
            .find('<')
            .and_then(|at| Some(&text[at..=at + text[at..].find('>')?]));
        if let Some(number) = number {
            *seen
                .lock()
                .expect("no test has failed here")
                .entry(number.to_owned())
                .or_default() += 1;
            return Some(());
        }
    }
}

async fn before(rude: &Rude) -> App {
    App::start(&App::settings(
        rude.addr,
        "[breaker]\nfailures = 1000\nfailure_rate = 0\n",
    ))
    .await
}

// D36
#[tokio::test]
async fn a_connection_that_the_provider_has_closed_is_not_used_again() {
    let mut rude = Rude::start(Then::Finish).await;
    let app = before(&rude).await;
    for n in 0..20 {
        let answer = app.chat(&chat(n)).await;
        assert_eq!(answer.status(), 200, "call {n}: {}", answer.text());
        assert_eq!(rude.times(n), 1);
        rude.wait_until_noticed(n + 1).await;
    }
}

// D36
#[tokio::test]
async fn a_call_that_races_with_the_providers_close_is_answered_and_never_doubled() {
    for then in [Then::Close, Then::Reset, Then::Finish] {
        let rude = Rude::start(then).await;
        let app = before(&rude).await;
        let mut client = app.client().await;
        let mut failed = 0;
        for n in 0..150 {
            let answer = client.ask(App::chat_request(&chat(n))).await;
            match answer.status() {
                200 => assert_eq!(rude.times(n), 1, "call {n}, {then:?}"),
                502 => {
                    // It may or may not have got there; it was not sent twice.
                    assert!(rude.times(n) <= 1, "call {n}, {then:?}");
                    let code = answer.header("x-traygate-error");
                    assert_eq!(code, Some("upstream_unreachable"), "{then:?}");
                    failed += 1;
                }
                status => panic!("call {n}, {then:?}: {status}"),
            }
        }
        println!("{then:?}: {failed} of 150 lost the race");
        assert!(failed < 100, "{then:?}: {failed} of 150 failed");
    }
}

// D36
#[tokio::test]
async fn a_post_that_may_have_reached_the_provider_is_never_sent_twice() {
    for then in [Then::CloseOnRequest, Then::ResetOnRequest] {
        for path in [
            "/v1/chat/completions",
            "/v1/images/generations",
            "/v1/messages/count_tokens",
        ] {
            let rude = Rude::start(then).await;
            let app = before(&rude).await;
            let mut client = app.client().await;
            // Every second call comes on a connection that was used before, and is read.
            for n in 0..6 {
                let answer = client.ask(post(path).json(chat(n))).await;
                let expected = if n % 2 == 0 { 200 } else { 502 };
                assert_eq!(answer.status(), expected, "call {n} on {path}, {then:?}");
                assert_eq!(rude.times(n), 1, "call {n} on {path}, {then:?}");
                if expected == 502 {
                    let code = answer.header("x-traygate-error");
                    assert_eq!(code, Some("upstream_unreachable"));
                }
            }
            let rows = app.rows(6).await;
            let failed = rows
                .iter()
                .filter(|row| row.outcome.as_deref() == Some("upstream_error"));
            assert_eq!(failed.count(), 3);
        }
    }
}

#[tokio::test]
async fn a_provider_that_closes_without_an_answer_is_asked_once() {
    for reply in [Reply::close(), Reply::reset()] {
        let up = Upstream::start(move |_| reply.clone()).await;
        let app = App::before(&up).await;
        for request in [
            App::chat_request(&chat(0)),
            post("/v1/images/generations").json("{}"),
            get("/v1/models"),
        ] {
            let before = up.requests().len();
            let answer = app.ask(request).await;
            assert_eq!(answer.status(), 502);
            assert_eq!(up.requests().len(), before + 1);
        }
    }
}

#[tokio::test]
async fn connections_are_used_again_while_they_last() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for n in 0..5 {
        assert_eq!(app.chat(&chat(n)).await.status(), 200);
        assert_eq!(app.ask(get("/v1/models")).await.status(), 200);
    }
    assert_eq!(up.connections(), 1);
    // Idle connections to this machine are let go after a few seconds, by us.
    up.wait_until_idle().await;
    assert_eq!(app.chat(&chat(9)).await.status(), 200);
    assert_eq!(up.connections(), 2);
}
