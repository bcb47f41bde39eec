//! A client that sees every byte: header case, repeats, chunks, when each came, how it ended.
//!
//! One call, whole:
//! ```ignore
//! let answer = client::post_json(proxy.addr(), "/v1/chat/completions", r#"{"model":"m"}"#).await;
//! assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
//! assert_eq!(answer.header("x-traygate-dedup"), Some("miss"));
//! ```
//! The same by hand, to look at a stream while it runs, or to leave in the midst of it:
//! ```ignore
//! let mut client = Client::to(proxy.addr()).await;
//! client.send(post("/v1/messages").header("x-api-key", "k").body(BODY)).await;
//! let head = client.head().await;
//! let first = client.piece().await.expect("an event");
//! client.reset(); // or drop it
//! ```
//! Nothing here waits for ever: what does not come within [`LIMIT`](super::LIMIT) fails the test.
//! A client reads only when told to, so one that is left alone is a slow reader; see
//! [`Client::reading_little`].

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use tokio::net::{TcpSocket, TcpStream};

use super::wire::{self, Framing, Wire};
pub use super::wire::{BodyEnd, Headers};
use super::{must, now};

/// Sends a JSON body and reads the whole answer, on a connection of its own.
pub async fn post_json(addr: SocketAddr, path: &str, body: impl AsRef<[u8]>) -> Answer {
    Client::to(addr).await.ask(post(path).json(body)).await
}

/// Reads the whole answer to a `GET`, on a connection of its own.
pub async fn fetch(addr: SocketAddr, path: &str) -> Answer {
    Client::to(addr).await.ask(get(path)).await
}

/// A `GET` to be built on.
pub fn get(target: &str) -> Outgoing {
    Outgoing::new("GET", target)
}

/// A `POST` to be built on.
pub fn post(target: &str) -> Outgoing {
    Outgoing::new("POST", target)
}

/// A request under construction. Header lines go out as they are given, in that order; `host`
/// and the body's framing are added where they were not given.
#[derive(Clone, Debug)]
pub struct Outgoing {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Ends what is sent without being counted: the body follows later.
    announced: bool,
}

impl Outgoing {
    pub fn new(method: &str, target: &str) -> Outgoing {
        Outgoing {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: Vec::new(),
            body: Vec::new(),
            announced: false,
        }
    }

    /// Adds a line; the same name may come again.
    pub fn header(mut self, name: &str, value: &str) -> Outgoing {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn body(mut self, body: impl AsRef<[u8]>) -> Outgoing {
        self.body = body.as_ref().to_vec();
        self
    }

    /// A body with `content-type: application/json`.
    pub fn json(self, body: impl AsRef<[u8]>) -> Outgoing {
        self.header("content-type", "application/json").body(body)
    }

    /// The body comes later by [`Client::write`], `length` bytes of it.
    pub fn upload_of(mut self, length: u64) -> Outgoing {
        self.announced = true;
        self.header("content-length", &length.to_string())
    }

    /// The body comes later by [`Client::write_chunk`] and [`Client::write_last_chunk`].
    pub fn chunked_upload(mut self) -> Outgoing {
        self.announced = true;
        self.header("transfer-encoding", "chunked")
    }

    fn has(&self, name: &str) -> bool {
        self.headers
            .iter()
            .any(|(given, _)| given.eq_ignore_ascii_case(name))
    }
}

impl From<Outgoing> for Vec<u8> {
    fn from(request: Outgoing) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", request.method, request.target);
        if !request.has("host") {
            head += "host: localhost\r\n";
        }
        for (name, value) in &request.headers {
            head += &format!("{name}: {value}\r\n");
        }
        let counted = request.announced
            || request.has("content-length")
            || request.has("transfer-encoding")
            || (request.body.is_empty() && request.method != "POST");
        if !counted {
            head += &format!("content-length: {}\r\n", request.body.len());
        }
        head += "\r\n";
        let mut bytes = head.into_bytes();
        bytes.extend(request.body);
        bytes
    }
}

/// The head of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    /// `HTTP/1.1 200 OK`, as it came.
    pub start: String,
    pub headers: Headers,
    /// 1xx heads that came before it, 101 excepted, which is a head of its own.
    pub interim: Vec<(u16, Headers)>,
    /// When it was complete.
    pub at: Instant,
}

/// A part of a body that came at once: a whole chunk if it is chunked.
#[derive(Clone, Debug)]
pub struct Piece {
    pub bytes: Bytes,
    pub at: Instant,
}

/// A whole answer, or what there is of one.
#[derive(Clone, Debug)]
pub struct Answer {
    pub head: Head,
    pub pieces: Vec<Piece>,
    pub end: BodyEnd,
    /// When the end was seen.
    pub ended: Instant,
    pub trailers: Headers,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)
    }

    /// The body without its framing.
    pub fn bytes(&self) -> Vec<u8> {
        self.pieces
            .iter()
            .flat_map(|piece| piece.bytes.iter().copied())
            .collect()
    }

    /// # Panics
    /// If the body is not UTF-8.
    pub fn text(&self) -> String {
        String::from_utf8(self.bytes()).expect("a body of text")
    }

    /// # Panics
    /// If the body is not JSON.
    pub fn json(&self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    }
}

/// One connection. Dropping it closes it.
#[derive(Debug)]
pub struct Client {
    wire: Wire,
    framing: Framing,
    /// The last request was a `HEAD`: its answer has no body.
    bodiless: bool,
}

impl Client {
    /// # Panics
    /// If it cannot connect.
    pub async fn to(addr: SocketAddr) -> Client {
        match must("a connection", TcpStream::connect(addr)).await {
            Ok(socket) => Client::on(socket),
            Err(error) => panic!("cannot connect to {addr}: {error}"),
        }
    }

    /// A client for which the system takes in only `bytes` (doubled, and at least some 2 kB)
    /// before it is told to read.
    ///
    /// # Panics
    /// If it cannot connect.
    pub async fn reading_little(addr: SocketAddr, bytes: u32) -> Client {
        let connected = async {
            let socket = if addr.is_ipv6() {
                TcpSocket::new_v6()
            } else {
                TcpSocket::new_v4()
            }?;
            socket.set_recv_buffer_size(bytes)?;
            socket.connect(addr).await
        };
        match must("a connection", connected).await {
            Ok(socket) => Client::on(socket),
            Err(error) => panic!("cannot connect to {addr}: {error}"),
        }
    }

    fn on(socket: TcpStream) -> Client {
        socket.set_nodelay(true).expect("a live socket");
        Client {
            wire: Wire::new(socket),
            framing: Framing::Over(BodyEnd::Clean),
            bodiless: false,
        }
    }

    /// This end of the connection.
    pub fn addr(&self) -> SocketAddr {
        self.wire.socket().local_addr().expect("a live socket")
    }

    /// Sends a request, or its head: an [`Outgoing`], or bytes that may be anything.
    ///
    /// # Panics
    /// If the peer has closed the connection.
    pub async fn send(&mut self, request: impl Into<Vec<u8>>) {
        let request = request.into();
        self.bodiless = request.starts_with(b"HEAD ");
        self.write(&request)
            .await
            .expect("the peer takes the request");
    }

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// If the peer has closed the connection.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let socket = self.wire.socket();
        must("the peer to read", wire::write(&socket, bytes.as_ref())).await
    }

    /// Writes bytes in parts of `part`, each in a segment of its own, with a pause between them.
    ///
    /// # Errors
    /// If the peer has closed the connection.
    pub async fn write_slowly(
        &mut self,
        bytes: &[u8],
        part: usize,
        gap: Duration,
    ) -> io::Result<()> {
        for (n, part) in bytes.chunks(part).enumerate() {
            if n > 0 {
                tokio::time::sleep(gap).await;
            }
            self.write(part).await?;
        }
        Ok(())
    }

    /// Writes one chunk of a chunked upload.
    ///
    /// # Errors
    /// If the peer has closed the connection.
    pub async fn write_chunk(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(wire::framed_chunk(bytes)).await
    }

    /// Ends a chunked upload.
    ///
    /// # Errors
    /// If the peer has closed the connection.
    pub async fn write_last_chunk(&mut self) -> io::Result<()> {
        self.write(wire::LAST_CHUNK).await
    }

    /// The head of the answer.
    ///
    /// # Panics
    /// If the connection ends before it.
    pub async fn head(&mut self) -> Head {
        match self.try_head().await {
            Ok(head) => head,
            Err(end) => panic!("the connection ended before a head came: {end:?}"),
        }
    }

    /// The head of the answer.
    ///
    /// # Errors
    /// How the connection ended, if it did so before.
    pub async fn try_head(&mut self) -> Result<Head, BodyEnd> {
        let mut interim = Vec::new();
        loop {
            let raw = match must("the head of an answer", self.wire.head()).await {
                Ok(Some(raw)) => raw,
                Ok(None) => return Err(BodyEnd::Aborted),
                Err(_) => return Err(BodyEnd::Reset),
            };
            let status = raw
                .start
                .split(' ')
                .nth(1)
                .and_then(|status| status.parse().ok());
            let status = status.unwrap_or_else(|| panic!("no status line: {:?}", raw.start));
            if (100..200).contains(&status) && status != 101 {
                interim.push((status, raw.headers));
                continue;
            }
            self.framing = match status {
                101 => Framing::UntilClose,
                204 | 304 => Framing::Over(BodyEnd::Clean),
                _ if self.bodiless => Framing::Over(BodyEnd::Clean),
                _ => Framing::of(&raw.headers, Framing::UntilClose),
            };
            return Ok(Head {
                status,
                start: raw.start,
                headers: raw.headers,
                interim,
                at: now(),
            });
        }
    }

    /// The next piece of the body; `None` at its end, which [`Client::end`] then tells.
    pub async fn piece(&mut self) -> Option<Piece> {
        let bytes = must("more of a body", self.wire.piece(&mut self.framing)).await?;
        Some(Piece { bytes, at: now() })
    }

    /// The next piece if one comes within `limit`: tells silence (`None`) from anything else.
    pub async fn piece_within(&mut self, limit: Duration) -> Option<Option<Piece>> {
        tokio::time::timeout(limit, self.piece()).await.ok()
    }

    /// Reads the body until it holds `text`, and returns what came.
    ///
    /// # Panics
    /// If it ends before.
    pub async fn read_until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        loop {
            if memchr::memmem::find(&seen, text.as_bytes()).is_some() {
                return String::from_utf8_lossy(&seen).into_owned();
            }
            match self.piece().await {
                Some(piece) => seen.extend_from_slice(&piece.bytes),
                None => panic!(
                    "{:?} before {text:?}: {:?}",
                    self.end(),
                    String::from_utf8_lossy(&seen)
                ),
            }
        }
    }

    /// How the body ended; `None` while it goes on.
    pub fn end(&self) -> Option<BodyEnd> {
        match self.framing {
            Framing::Over(end) => Some(end),
            _ => None,
        }
    }

    /// Reads an answer from its head to its end.
    ///
    /// # Panics
    /// If the connection ends before a head came.
    pub async fn read_to_end(&mut self) -> Answer {
        let head = self.head().await;
        self.rest(head).await
    }

    /// Reads what is left of the answer that `head` began.
    pub async fn rest(&mut self, head: Head) -> Answer {
        let mut pieces = Vec::new();
        while let Some(piece) = self.piece().await {
            pieces.push(piece);
        }
        Answer {
            head,
            pieces,
            end: self.end().expect("a body at its end"),
            ended: now(),
            trailers: std::mem::take(&mut self.wire.trailers),
        }
    }

    /// Reads what is left of a body and says how it ended.
    pub async fn read_to_end_of_body(&mut self) -> BodyEnd {
        while self.piece().await.is_some() {}
        self.end().expect("a body at its end")
    }

    /// Sends a request and reads its answer; the connection can be used again.
    pub async fn ask(&mut self, request: impl Into<Vec<u8>>) -> Answer {
        self.send(request).await;
        self.read_to_end().await
    }

    /// Everything that comes until the connection ends, framing and all, to be compared byte by
    /// byte.
    pub async fn raw_to_end(&mut self) -> (Vec<u8>, BodyEnd) {
        let mut bytes = Vec::new();
        loop {
            match must("the end of the connection", self.wire.raw()).await {
                Ok(more) if more.is_empty() => return (bytes, BodyEnd::Clean),
                Ok(more) => bytes.extend_from_slice(&more),
                Err(_) => return (bytes, BodyEnd::Reset),
            }
        }
    }

    /// Waits until the peer has closed this idle connection.
    pub async fn closed(&mut self) -> BodyEnd {
        self.raw_to_end().await.1
    }

    /// Sends an end of stream (FIN) and goes on reading.
    pub fn finish_sending(&self) {
        wire::finish_sending(&self.wire.socket());
    }

    /// Hangs up with a reset (TCP RST). Dropping hangs up in order (FIN), unless unread bytes
    /// are left, which makes it a reset as well.
    pub fn reset(self) {
        wire::reset_on_close(&self.wire.socket()).expect("a live socket");
    }
}

#[cfg(test)]
mod tests {
    use super::super::Span;
    use super::super::upstream::{DeafPort, Gate, Reply, Upstream, chat_answer, chat_events};
    use super::*;

    const CHAT: &str = "/v1/chat/completions";

    #[tokio::test]
    async fn header_case_and_repeats_are_seen_on_both_sides() {
        let up = Upstream::start(|_| {
            Reply::json(200, "{}")
                .header("X-One", "a")
                .header("x-ONE", "b")
                .header("Set-Cookie", "c")
        })
        .await;
        let request = post(CHAT)
            .header("X-Api-KEY", "k")
            .header("x-api-key", "l")
            .json(r#"{"a":1}"#);
        let answer = Client::to(up.addr()).await.ask(request).await;

        assert_eq!(
            answer.head.headers.lines(),
            [
                "content-type: application/json",
                "X-One: a",
                "x-ONE: b",
                "Set-Cookie: c",
                "content-length: 2"
            ]
        );
        assert_eq!(
            answer.head.headers.all("x-one").collect::<Vec<_>>(),
            ["a", "b"]
        );
        let request = up.call(0).request;
        assert_eq!(
            request.headers.lines()[1..3],
            ["X-Api-KEY: k", "x-api-key: l"]
        );
        assert_eq!(
            (request.json()["a"].as_i64(), request.body_len),
            (Some(1), 7)
        );
    }

    #[tokio::test]
    async fn keep_alive_is_the_rule() {
        let up = Upstream::chatting().await;
        let mut client = Client::to(up.addr()).await;
        for stream in ["false", "true", "false"] {
            let body = format!(r#"{{"model":"m","stream":{stream}}}"#);
            let answer = client.ask(post(CHAT).json(body)).await;
            assert_eq!((answer.status(), answer.end), (200, BodyEnd::Clean));
        }
        client.ask(get("/v1/models")).await;
        assert_eq!(
            (up.connections(), up.calls(), up.requests().len()),
            (1, 3, 4)
        );
        let answered = up.requests();
        assert!(
            answered
                .iter()
                .all(|seen| seen.answered.is_some() && seen.left.is_none())
        );
        drop(client);
        up.wait_until_idle().await;
    }

    #[tokio::test]
    async fn pipelined_requests_are_answered_in_turn() {
        let up = Upstream::start(|request| Reply::json(200, &request.target)).await;
        let mut client = Client::to(up.addr()).await;
        client
            .send("GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
            .await;
        assert_eq!(client.read_to_end().await.text(), "/a");
        assert_eq!(client.read_to_end().await.text(), "/b");
    }

    #[tokio::test]
    async fn chunks_are_seen_one_by_one() {
        let events = chat_events(4);
        let up = Upstream::start(|_| Reply::sse(chat_events(4)).paced(5.ms())).await;
        let answer = post_json(up.addr(), CHAT, "{}").await;
        assert_eq!(answer.end, BodyEnd::Clean);
        let pieces: Vec<&[u8]> = answer.pieces.iter().map(|piece| &*piece.bytes).collect();
        assert_eq!(
            pieces,
            events.iter().map(String::as_bytes).collect::<Vec<_>>()
        );
        assert!(answer.pieces.is_sorted_by_key(|piece| piece.at));
    }

    #[tokio::test]
    async fn odd_chunks() {
        const HEAD: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n";
        let body = |text: &'static str| {
            move |_: &super::super::upstream::Request| {
                Reply::raw(HEAD).then_write(text).then_close()
            }
        };
        for (wire, content, pieces, end) in [
            ("0\r\n\r\n", "", 0, BodyEnd::Clean),
            (
                "5;name=value\r\nhello\r\n0\r\nX-Trailer: t\r\n\r\n",
                "hello",
                1,
                BodyEnd::Clean,
            ),
            (
                "0005\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
                "hello!",
                2,
                BodyEnd::Clean,
            ),
            (
                "A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n",
                "0\r\n\r\n0\r\n\r\n",
                1,
                BodyEnd::Clean,
            ),
            ("5\r\nhello\r\n", "hello", 1, BodyEnd::Aborted),
            ("5\r\nhello\r\n0\r\n", "hello", 1, BodyEnd::Aborted),
            ("5\r\nhel", "hel", 1, BodyEnd::Aborted),
            ("5\r\nhello", "hello", 1, BodyEnd::Aborted),
            ("5\r\nhello\r", "hello", 1, BodyEnd::Aborted),
            ("5", "", 0, BodyEnd::Aborted),
            ("", "", 0, BodyEnd::Aborted),
        ] {
            let up = Upstream::start(body(wire)).await;
            let answer = post_json(up.addr(), CHAT, "{}").await;
            let seen = (answer.text(), answer.pieces.len(), answer.end);
            assert_eq!(seen, (content.to_owned(), pieces, end), "{wire:?}");
        }
    }

    #[tokio::test]
    async fn trailers_and_a_body_byte_by_byte() {
        let up = Upstream::start(|_| {
            let text = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
                        4\r\n\u{1f600}\r\n0\r\nX-Trailer: t\r\n\r\n";
            text.bytes().fold(Reply::raw(""), |reply, byte| {
                reply.then_write([byte]).then_wait(1.ms())
            })
        })
        .await;
        let answer = post_json(up.addr(), CHAT, "{}").await;
        assert_eq!(
            (answer.text().as_str(), answer.end),
            ("\u{1f600}", BodyEnd::Clean)
        );
        assert_eq!(answer.trailers.get("x-trailer"), Some("t"));
    }

    #[tokio::test]
    async fn every_way_a_body_can_end() {
        let gate = Gate::new();
        for (name, reply, text, end) in [
            ("length", Reply::json(200, "{}"), "{}", BodyEnd::Clean),
            (
                "close",
                Reply::json(200, "{}").until_close(),
                "{}",
                BodyEnd::Clean,
            ),
            (
                "closing",
                Reply::json(200, "{}").closing(),
                "{}",
                BodyEnd::Clean,
            ),
            (
                "short",
                Reply::json(200, "{}")
                    .header("content-length", "9")
                    .then_close(),
                "{}",
                BodyEnd::Aborted,
            ),
            ("cut", Reply::sse(["a"]).then_close(), "a", BodyEnd::Aborted),
            (
                "reset",
                Reply::sse(["a"]).then_wait_for(&gate).then_reset(),
                "a",
                BodyEnd::Reset,
            ),
            ("none", Reply::status(204), "", BodyEnd::Clean),
        ] {
            let up = Upstream::start(move |_| reply.clone()).await;
            let mut client = Client::to(up.addr()).await;
            client.send(post(CHAT).json("{}")).await;
            let head = client.head().await;
            let mut seen = String::new();
            if name == "reset" {
                seen = client.read_until("a").await;
                gate.open();
            }
            let answer = client.rest(head).await;
            assert_eq!(
                (seen + &answer.text(), answer.end),
                (text.to_owned(), end),
                "{name}"
            );
        }
    }

    #[tokio::test]
    async fn no_answer_at_all() {
        for (reply, ends) in [
            (Reply::close(), [BodyEnd::Aborted, BodyEnd::Aborted]),
            // A reset may overtake the read or not.
            (Reply::reset(), [BodyEnd::Reset, BodyEnd::Aborted]),
        ] {
            let up = Upstream::start(move |_| reply.clone()).await;
            let mut client = Client::to(up.addr()).await;
            client.send(post(CHAT).json("{}")).await;
            let end = client.try_head().await.expect_err("no head");
            assert!(ends.contains(&end), "{end:?}");
        }
        let dead = Upstream::dead_port();
        assert!(TcpStream::connect(dead.addr()).await.is_err());
        let up = dead.revive(Reply::chat);
        assert_eq!(post_json(up.addr(), CHAT, "{}").await.status(), 200);
    }

    #[tokio::test]
    async fn leaving_early_is_noticed() {
        let up = Upstream::start(|_| Reply::sse(["data: 1\n\n"]).then_hang()).await;
        for (call, reset) in [(0, false), (1, true)] {
            let mut client = Client::to(up.addr()).await;
            client.send(post(CHAT).json("{}")).await;
            client.read_until_first_event().await;
            assert_eq!(up.in_flight(), 1);
            let before = now();
            if reset {
                client.reset()
            } else {
                drop(client)
            }
            assert!(up.wait_until_closed(call).await >= before);
            up.wait_for_in_flight(0).await;
            assert!(up.call(call).answered.is_none());
        }
    }

    impl Client {
        async fn read_until_first_event(&mut self) {
            self.head().await;
            assert_eq!(self.read_until("\n\n").await, "data: 1\n\n");
        }
    }

    #[tokio::test]
    async fn gates_hold_and_count() {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        })
        .await;
        let asks = (0..3)
            .map(|_| tokio::spawn(post_json(up.addr(), CHAT, "{}")))
            .collect::<Vec<_>>();
        gate.reached_by(3).await;
        assert_eq!((up.in_flight(), up.max_in_flight()), (3, 3));
        gate.pass(1);
        up.wait_for_in_flight(2).await;
        gate.open();
        for ask in asks {
            assert_eq!(
                ask.await.expect("an answer").text(),
                chat_answer("Hello from upstream")
            );
        }
        up.wait_for_in_flight(0).await;
        assert_eq!((up.calls(), up.max_in_flight()), (3, 3));
    }

    #[tokio::test]
    async fn outages_begin_and_end() {
        let up = Upstream::failing(503).await;
        assert_eq!(post_json(up.addr(), CHAT, "{}").await.status(), 503);
        up.set_handler(Reply::chat);
        assert_eq!(post_json(up.addr(), CHAT, "{}").await.status(), 200);
        let addr = up.stop().await;
        assert!(TcpStream::connect(addr).await.is_err());
        let up = Upstream::at(addr, Reply::chat).await;
        assert_eq!(fetch(up.addr(), "/v1/models").await.status(), 200);
        assert_eq!(up.calls(), 0);
    }

    #[tokio::test]
    async fn stopping_cuts_what_runs() {
        let up = Upstream::hanging().await;
        let mut client = Client::to(up.addr()).await;
        client.send(post(CHAT).json("{}")).await;
        up.wait_for_calls(1).await;
        up.stop().await;
        assert!(client.try_head().await.is_err());
    }

    #[tokio::test]
    async fn uploads_chunked_large_slow_and_refused_early() {
        let up = Upstream::chatting().await;
        let mut client = Client::to(up.addr()).await;
        client.send(post("/v1/files").chunked_upload()).await;
        for chunk in ["{\"a\"", ":1}"] {
            client.write_chunk(chunk.as_bytes()).await.expect("taken");
        }
        client.write_last_chunk().await.expect("taken");
        client.read_to_end().await;
        let large = vec![b'x'; 20 << 20];
        client
            .send(post("/v1/files").upload_of(large.len() as u64))
            .await;
        client.write(&large).await.expect("taken");
        client.read_to_end().await;
        client.send(post("/v1/files").upload_of(6)).await;
        client
            .write_slowly(b"abcdef", 2, 2.ms())
            .await
            .expect("taken");
        client.read_to_end().await;
        let requests: Vec<_> = up.requests().into_iter().map(|seen| seen.request).collect();
        assert_eq!(requests[0].body, r#"{"a":1}"#);
        assert_eq!(
            (requests[1].body_len, requests[1].body.len()),
            (20 << 20, 16 << 20)
        );
        assert_eq!(requests[2].body, "abcdef");

        up.answer_heads(|_| Some(Reply::error(413)));
        client.send(post(CHAT).upload_of(1 << 40)).await;
        client
            .write(vec![b'x'; 1 << 20])
            .await
            .expect("taken, and not read by the handler");
        assert_eq!(client.read_to_end().await.status(), 413);
        client.write("x").await.expect("still taken");
    }

    #[tokio::test]
    async fn an_upload_cut_short_is_no_call() {
        let up = Upstream::chatting().await;
        let mut client = Client::to(up.addr()).await;
        client.send(post(CHAT).upload_of(10)).await;
        client.write("half").await.expect("taken");
        up.wait_for_requests(1).await;
        drop(client);
        up.wait_until_idle().await;
        assert_eq!(up.calls(), 0);
        let seen = &up.requests()[0];
        assert_eq!(
            (seen.request.body_end, seen.request.body_len),
            (BodyEnd::Aborted, 4)
        );
        assert!(seen.left.is_some());
    }

    #[tokio::test]
    async fn interim_heads_expectations_and_heads_without_bodies() {
        let up = Upstream::start(|_| {
            Reply::json(200, "{}").interim("HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        })
        .await;
        let mut client = Client::to(up.addr()).await;
        client
            .send(post(CHAT).header("expect", "100-continue").upload_of(2))
            .await;
        client.write("{}").await.expect("taken");
        let answer = client.read_to_end().await;
        let interim: Vec<u16> = answer
            .head
            .interim
            .iter()
            .map(|(status, _)| *status)
            .collect();
        assert_eq!((interim, answer.text().as_str()), (vec![100, 103], "{}"));
        let answer = client.ask(Outgoing::new("HEAD", "/")).await;
        assert_eq!(
            (answer.status(), answer.bytes().len(), answer.end),
            (200, 0, BodyEnd::Clean)
        );
        assert_eq!(client.ask(get("/")).await.text(), "{}");
    }

    #[tokio::test]
    async fn tunnels_echo() {
        let up = Upstream::start(|_| {
            Reply::raw("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n").then_echo()
        })
        .await;
        let mut client = Client::to(up.addr()).await;
        client
            .send(
                get("/ws")
                    .header("connection", "upgrade")
                    .header("upgrade", "x"),
            )
            .await;
        assert_eq!(client.head().await.status, 101);
        client.write("ping").await.expect("taken");
        assert_eq!(client.read_until("ping").await, "ping");
    }

    #[tokio::test]
    async fn a_slow_reader_holds_the_sender_up() {
        let up = Upstream::start(|_| Reply::json(200, vec![b'x'; 32 << 20])).await;
        let mut client = Client::reading_little(up.addr(), 4096).await;
        client.send(post(CHAT).json("{}")).await;
        client.head().await;
        up.wait_for_calls(1).await;
        assert_eq!(up.in_flight(), 1, "32 MB do not fit into the sockets");
        let mut read = 0;
        while let Some(piece) = client.piece().await {
            read += piece.bytes.len();
        }
        assert_eq!((read, client.end()), (32 << 20, Some(BodyEnd::Clean)));
        up.wait_until_over(0).await;
    }

    #[tokio::test]
    async fn silence_and_raw_bytes() {
        let up = Upstream::start(|_| Reply::sse(["a"]).closing().then_wait(50.ms())).await;
        let mut client = Client::to(up.addr()).await;
        client.send(post(CHAT).json("{}")).await;
        let (bytes, end) = client.raw_to_end().await;
        let expected = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\
                        transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
        assert_eq!(
            (String::from_utf8_lossy(&bytes).as_ref(), end),
            (expected, BodyEnd::Clean)
        );

        let up = Upstream::start(|_| Reply::sse(["a"]).then_hang()).await;
        let mut client = Client::to(up.addr()).await;
        client.send(post(CHAT).json("{}")).await;
        client.head().await;
        assert!(client.piece().await.is_some());
        assert!(client.piece_within(20.ms()).await.is_none());
        assert_eq!(client.end(), None);
    }

    #[tokio::test]
    async fn both_families_and_an_address_that_drops() {
        let up = Upstream::start_v6(Reply::chat).await;
        assert!(up.url().starts_with("http://[::1]:"));
        assert_eq!(post_json(up.addr(), CHAT, "{}").await.status(), 200);

        let deaf = DeafPort::new().await;
        let connected = tokio::time::timeout(100.ms(), TcpStream::connect(deaf.addr())).await;
        assert!(connected.is_err(), "neither connected nor refused");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_thousand_at_once() {
        let gate = Gate::new();
        let up = Upstream::start({
            let gate = gate.clone();
            move |request| Reply::chat(request).held_by(&gate)
        })
        .await;
        let asks = (0..1000)
            .map(|_| tokio::spawn(post_json(up.addr(), CHAT, r#"{"stream":true}"#)))
            .collect::<Vec<_>>();
        up.wait_for_in_flight(1000).await;
        assert_eq!(up.open_connections(), 1000);
        gate.open();
        for ask in asks {
            let answer = ask.await.expect("an answer");
            assert_eq!((answer.pieces.len(), answer.end), (5, BodyEnd::Clean));
        }
        up.wait_until_idle().await;
        assert_eq!(
            (up.calls(), up.max_in_flight(), up.connections()),
            (1000, 1000, 1000)
        );
    }
}
