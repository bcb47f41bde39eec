//! Large and broken uploads: what is too large to be read passes through, and nothing is held.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;

use super::support::app::App;
use super::support::client::{get, post};
use super::support::must;
use super::support::upstream::{Reply, Upstream, chat_answer};

const CHAT: &str = "/v1/chat/completions";
const ONE_MB: &str = "[server]\nmax_body_mb = 1\n";

/// A chat request of about `size` bytes.
fn large_chat(size: usize) -> Vec<u8> {
    format!(
        r#"{{"model":"m","messages":[],"pad":"{}"}}"#,
        "x".repeat(size)
    )
    .into_bytes()
}

// D24
#[tokio::test]
async fn a_body_within_the_limit_is_read_merged_and_passed_whole() {
    let up = Upstream::answering(chat_answer("x")).await;
    let app = App::before(&up).await;
    let body = large_chat(15 << 20);
    for label in ["miss", "cached"] {
        let answer = app.ask(post(CHAT).json(&body)).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.header("x-traygate-dedup"), Some(label));
    }
    assert!(up.call(0).request.body == body, "the same bytes");
    assert_eq!(app.rows(2).await[0].model.as_deref(), Some("m"));
}

#[tokio::test]
async fn a_body_over_the_limit_streams_through_without_dedup() {
    let up = Upstream::answering(chat_answer("x")).await;
    let app = App::with(&up, ONE_MB).await;
    let body = large_chat(3 << 20);
    let (first, rest) = body.split_at(2 << 20);
    for chunked in [false, true] {
        // Two equal ones at once, each under way upstream before it is complete here.
        let before = up.requests().len();
        let mut clients = Vec::new();
        for n in 0..2 {
            let mut client = app.client().await;
            let request = post(CHAT).header("content-type", "application/json");
            if chunked {
                client.send(request.chunked_upload()).await;
                client.write_chunk(first).await.expect("taken");
            } else {
                client.send(request.upload_of(body.len() as u64)).await;
                client.write(first).await.expect("taken");
            }
            up.wait_for_requests(before + n + 1).await;
            clients.push(client);
        }
        for client in &mut clients {
            if chunked {
                client.write_chunk(rest).await.expect("taken");
                client.write_last_chunk().await.expect("taken");
            } else {
                client.write(rest).await.expect("taken");
            }
        }
        for mut client in clients {
            let answer = client.read_to_end().await;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.header("x-traygate-dedup"), Some("off"));
        }
        for seen in &up.requests()[before..] {
            assert!(seen.request.body == body, "the same bytes");
            let length = body.len().to_string();
            let framing = (
                seen.request.header("content-length"),
                seen.request.header("transfer-encoding"),
            );
            let expected = if chunked {
                (None, Some("chunked"))
            } else {
                (Some(&*length), None)
            };
            assert_eq!(framing, expected);
        }
    }
    assert_eq!(up.calls(), 4);
}

// D24
#[tokio::test]
async fn a_providers_own_413_passes_even_before_the_upload_is_over() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, ONE_MB).await;
    up.answer_heads(|_| Some(Reply::json(413, "{\"theirs\":1}").header("x-limit", "32MB")));
    for (path, size) in [(CHAT, 500_000), (CHAT, 3 << 20), ("/v1/files", 3 << 20)] {
        let mut client = app.client().await;
        let body = large_chat(size);
        client.send(post(path).upload_of(body.len() as u64)).await;
        if size > 1 << 20 {
            client.write(&body[..100_000]).await.expect("taken");
        } else {
            client.write(&body).await.expect("taken");
        }
        let answer = client.read_to_end().await;
        assert_eq!(answer.status(), 413, "{path}, {size}");
        assert_eq!(answer.text(), "{\"theirs\":1}");
        assert_eq!(answer.header("x-limit"), Some("32MB"));
        assert_eq!(answer.header("x-traygate-error"), None);
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_mid_upload_makes_no_call() {
    let up = Upstream::chatting().await;
    let app = App::with(&up, ONE_MB).await;
    // Read whole: nothing has gone upstream.
    let mut client = app.client().await;
    client.send(post(CHAT).upload_of(1000)).await;
    client.write("half").await.expect("taken");
    drop(client);
    assert_eq!(app.rows(1).await[0].upstream_call, Some(false));
    assert_eq!(up.requests().len(), 0);
    // Streamed through: the provider sees the upload break off.
    for (n, path) in [CHAT, "/v1/files", "/v1/messages/count_tokens"]
        .into_iter()
        .enumerate()
    {
        let mut client = app.client().await;
        client.send(post(path).upload_of(5 << 20)).await;
        client.write(vec![b'x'; 2 << 20]).await.expect("taken");
        up.wait_for_requests(n + 1).await;
        drop(client);
        up.wait_until_idle().await;
        let row = &app.rows(n + 2).await[0];
        assert_eq!(row.outcome.as_deref(), Some("client_left"), "{path}");
    }
    assert_eq!(up.calls(), 0);
    // Nothing is held that the next call needs.
    assert_eq!(app.chat("{}").await.status(), 200);
}

#[tokio::test]
async fn a_client_that_leaves_while_its_body_is_read_is_on_record_as_one_that_left() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for (n, path) in [CHAT, "/v1/messages", "/api/chat"].into_iter().enumerate() {
        let mut client = app.client().await;
        client.send(post(path).upload_of(1000)).await;
        client.write("half").await.expect("taken");
        drop(client);
        let row = &app.rows(n + 1).await[0];
        assert_eq!(row.outcome.as_deref(), Some("client_left"), "{path}");
    }
    assert_eq!(up.requests().len(), 0);
}

#[tokio::test]
async fn a_body_with_broken_chunks_is_a_bad_request() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    // Read whole, streamed through, and free.
    for path in [CHAT, "/v1/files", "/v1/messages/count_tokens"] {
        let mut client = app.client().await;
        client.send(post(path).chunked_upload()).await;
        client
            .write("5\r\nhello\r\nnot a size\r\n")
            .await
            .expect("taken");
        let answer = client.read_to_end().await;
        assert_eq!(answer.status(), 400, "{path}: {}", answer.text());
        assert_eq!(
            answer.header("x-traygate-error"),
            Some("bad_request"),
            "{path}"
        );
    }
    app.rows(3).await;
    assert_eq!(up.calls(), 0);
}

#[tokio::test]
async fn what_does_not_fit_into_memory_waits_in_its_socket() {
    const ROOM: usize = 100_000;
    let up = Upstream::answering(chat_answer("x")).await;
    let app = App::before(&up).await;
    // All but a little of what may be held is: by other calls' bodies.
    let bodies = app.running().core().bodies.clone();
    let all = bodies.available_permits();
    assert_eq!(all, 256 << 20);
    let others = u32::try_from(all - ROOM).expect("a count of permits");
    let others = bodies.clone().acquire_many_owned(others).await;

    // What fits goes on, and leaves its room when it has gone.
    for n in 0..3 {
        let body = format!("{{\"n\":{n},\"pad\":\"{}\"}}", "x".repeat(ROOM / 2));
        assert_eq!(app.chat(&body).await.status(), 200);
    }
    // One that names no length streams through, without dedup.
    let large = large_chat(3 * ROOM);
    let mut client = app.client().await;
    client.send(post(CHAT).chunked_upload()).await;
    client.write_chunk(&large).await.expect("taken");
    client.write_last_chunk().await.expect("taken");
    let answer = client.read_to_end().await;
    assert_eq!(answer.header("x-traygate-dedup"), Some("off"));
    assert_eq!(app.ask(get("/v1/models")).await.status(), 200);
    assert_eq!(up.calls(), 4);

    // One that names a length for which there is no room waits until there is.
    let mut waiting = app.client().await;
    waiting.send(post(CHAT).json(&large)).await;
    let answered = tokio::time::timeout(Duration::from_millis(200), waiting.head()).await;
    assert!(answered.is_err(), "it waits");
    assert_eq!(up.calls(), 4);
    // A small one is never held up by large ones.
    assert_eq!(app.chat(r#"{"small":true}"#).await.status(), 200);
    drop(others);
    let answer = waiting.read_to_end().await;
    assert_eq!(answer.header("x-traygate-dedup"), Some("miss"));
    assert!(up.call(5).request.body == large, "the same bytes");
    assert_eq!(bodies.available_permits(), all, "nothing is held any more");
}

/// The client is held up where the provider does not read.
#[tokio::test]
async fn an_upload_goes_no_faster_than_the_provider_takes_it() {
    let deaf = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let app = App::start(&App::settings(deaf.local_addr().expect("bound"), "")).await;
    let mut client = tokio::net::TcpStream::connect(app.addr())
        .await
        .expect("a connection");
    let head = Vec::from(post("/v1/files").upload_of(1 << 30));
    client.write_all(&head).await.expect("taken");
    let (_socket, _) = must("a connection", deaf.accept()).await.expect("accepted");
    let piece = vec![0u8; 1 << 20];
    let mut written = 0u64;
    while let Ok(taken) = tokio::time::timeout(Duration::from_secs(1), client.write(&piece)).await {
        written += taken.expect("an open connection") as u64;
        assert!(written < 128 << 20, "{written} bytes went nowhere");
    }
}

/// In a process of its own, whose memory is its own.
#[cfg(target_os = "linux")]
mod memory {
    use super::super::support::client::{Client, post};
    use super::super::support::process::{Home, Process};
    use super::super::support::upstream::{Reply, Upstream};

    const UPLOAD: u64 = 300 << 20;

    /// Bytes of memory that the process has had at most.
    fn peak(process: &Process) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))
            .expect("a live process");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:").or(line.strip_prefix("VmRSS:")))
            .expect("a size");
        let kib: u64 = line
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse()
            .expect("a number");
        kib << 10
    }

    #[tokio::test]
    async fn a_large_upload_to_an_unknown_route_does_not_move_memory() {
        let up = Upstream::start(|request| Reply::json(200, request.body_len.to_string())).await;
        let home = Home::new();
        home.settings(&format!(
            "[[provider]]\nname = \"openai\"\nkey = \"pass\"\nbase_url = \"{}/v1\"\n",
            up.url()
        ));
        let traygate = home.serve(&[]).await;
        let mut client = Client::to(traygate.addr()).await;
        assert_eq!(
            client.ask(post("/v1/files").body("warm")).await.status(),
            200
        );
        let before = peak(&traygate);
        let piece: Vec<u8> = (0..1 << 20).map(|n: u32| n as u8).collect();
        for chunked in [false, true] {
            if chunked {
                client.send(post("/v1/files").chunked_upload()).await;
            } else {
                client.send(post("/v1/files").upload_of(UPLOAD)).await;
            }
            for _ in 0..UPLOAD >> 20 {
                if chunked {
                    client.write_chunk(&piece).await.expect("taken");
                } else {
                    client.write(&piece).await.expect("taken");
                }
            }
            if chunked {
                client.write_last_chunk().await.expect("taken");
            }
            let answer = client.read_to_end().await;
            assert_eq!((answer.status(), answer.text()), (200, UPLOAD.to_string()));
        }
        let grown = peak(&traygate).saturating_sub(before);
        println!(
            "{} MB at first, {} MB more after the uploads",
            before >> 20,
            grown >> 20
        );
        assert!(grown < 32 << 20, "grew by {} MB", grown >> 20);
    }
}
