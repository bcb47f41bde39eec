//! Providers behind TLS, with certificates of the tests' own.
//!
//! [`SecureUpstream`] is a well-behaved server that speaks HTTP/2 or HTTP/1.1, whichever its client
//! picks of what it offers; it counts connections and what goes on at once on each.
//! ```ignore
//! let authority = Authority::new();
//! let up = SecureUpstream::start(&authority.vouch(&["localhost"]), &BOTH, |_| Answer::json("{}")).await;
//! // … a call through the proxy, with `ca_file` = a file with `authority.pem()` …
//! assert_eq!(up.log().connections[0].protocol, Some(Protocol::H2));
//! ```
//! [`BareH2`] writes HTTP/2 frames by hand: it refuses streams and says goodbye as servers do that
//! are being replaced, or that fall over.

use std::fmt::{self, Debug};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

use super::must;
use super::upstream::Gate;

/// Streams that [`SecureUpstream`] allows at once on an HTTP/2 connection, as real ones do.
pub const STREAMS_A_CONNECTION: u32 = 100;

// --- Certificates ---------------------------------------------------------------------------------

/// A certificate authority that nobody knows but whoever is handed [`Authority::pem`].
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Authority {
        Authority::named("An authority of the tests")
    }

    pub fn named(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().expect("a key");
        Authority(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Its own certificate, for a `ca_file`.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A server's certificate for these names or addresses.
    pub fn vouch(&self, names: &[&str]) -> Identity {
        self.sign(params_for(names))
    }

    /// The same, whose time is over.
    pub fn vouch_in_the_past(&self, names: &[&str]) -> Identity {
        let mut params = params_for(names);
        params.not_after = date_time_ymd(2001, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        Identity::new(certificate.der(), &key)
    }
}

/// A server's certificate that nobody has signed but itself, with its PEM.
pub fn self_signed(names: &[&str]) -> (Identity, String) {
    signed_by_itself(&params_for(names))
}

/// The same, which is an authority as well: what `openssl req -x509` makes.
pub fn self_signed_authority(names: &[&str]) -> (Identity, String) {
    let mut params = params_for(names);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    signed_by_itself(&params)
}

fn signed_by_itself(params: &CertificateParams) -> (Identity, String) {
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    (Identity::new(certificate.der(), &key), certificate.pem())
}

fn params_for(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(names).expect("names that can stand in a certificate")
}

/// What a server shows of itself, and the key that goes with it.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    fn new(certificate: &CertificateDer<'static>, key: &KeyPair) -> Identity {
        Identity {
            certificate: certificate.clone(),
            key: PrivateKeyDer::try_from(key.serialize_der()).expect("a key of its own"),
        }
    }

    fn acceptor(&self, offers: &[Protocol]) -> TlsAcceptor {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions that the provider knows")
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())
            .expect("a key that fits its certificate");
        config.alpn_protocols = offers.iter().map(|offer| offer.alpn().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// What can be agreed on in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    H2,
    Http1,
}

/// Both, HTTP/2 preferred: what providers offer.
pub const BOTH: [Protocol; 2] = [Protocol::H2, Protocol::Http1];

impl Protocol {
    fn alpn(self) -> &'static [u8] {
        match self {
            Protocol::H2 => b"h2",
            Protocol::Http1 => b"http/1.1",
        }
    }

    fn agreed(stream: &TlsStream<TcpStream>) -> Option<Protocol> {
        let agreed = stream.get_ref().1.alpn_protocol();
        BOTH.into_iter().find(|both| agreed == Some(both.alpn()))
    }
}

// --- A server that behaves ------------------------------------------------------------------------

/// All that came so far.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub connections: Vec<Connection>,
    pub requests: Vec<Request>,
}

impl Log {
    /// The connections that carried a request: a client that finds its provider cold may open
    /// several, keep the one that was ready first, and drop the others unused.
    pub fn used(&self) -> Vec<&Connection> {
        let used = |connection: &&Connection| connection.requests > 0;
        self.connections.iter().filter(used).collect()
    }

    pub fn in_flight(&self) -> usize {
        self.connections.iter().map(|one| one.in_flight).sum()
    }
}

#[derive(Clone, Debug, Default)]
pub struct Connection {
    /// The name that the client asked for in the handshake (SNI).
    pub name: Option<String>,
    pub protocol: Option<Protocol>,
    pub requests: usize,
    pub in_flight: usize,
    pub most_in_flight: usize,
    /// The handshake failed, or the connection is over.
    pub is_over: bool,
}

#[derive(Clone, Debug)]
pub struct Request {
    /// Its place in [`Log::connections`].
    pub connection: usize,
    pub method: String,
    /// As it came: path and query, over HTTP/2 behind scheme and authority.
    pub uri: http::Uri,
    pub headers: HeaderMap,
    /// Once it has come whole.
    pub body: Option<Bytes>,
    /// Bytes of the answer's body that were handed over to be sent.
    pub sent: usize,
    pub fate: Fate,
}

impl Request {
    /// Which server it is meant for: `:authority` over HTTP/2, else `host`.
    pub fn authority(&self) -> Option<&str> {
        let named = self.uri.authority().map(http::uri::Authority::as_str);
        named.or_else(|| self.headers.get("host")?.to_str().ok())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    UnderWay,
    /// All of the answer has been handed over.
    Answered,
    /// The client went before that, or the server broke it off.
    Abandoned,
}

/// What is to be sent.
#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    headers: Vec<(&'static str, &'static str)>,
    steps: Vec<Step>,
    held_by: Option<Gate>,
    is_refusal: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Send(Bytes),
    WaitFor(Gate),
    Break,
}

impl Answer {
    pub fn json(body: impl AsRef<[u8]>) -> Answer {
        Answer::of("application/json").then(body)
    }

    /// An event stream, to be filled by [`Answer::then`].
    pub fn sse() -> Answer {
        Answer::of("text/event-stream")
    }

    pub fn of(content_type: &'static str) -> Answer {
        Answer {
            status: 200,
            headers: vec![("content-type", content_type)],
            steps: Vec::new(),
            held_by: None,
            is_refusal: false,
        }
    }

    pub fn status(status: u16) -> Answer {
        Answer {
            status,
            ..Answer::json("{}")
        }
    }

    /// No answer: the stream is reset with `INTERNAL_ERROR`, an HTTP/1 connection closed.
    pub fn none() -> Answer {
        Answer {
            is_refusal: true,
            ..Answer::json("")
        }
    }

    pub fn header(mut self, name: &'static str, value: &'static str) -> Answer {
        self.headers.push((name, value));
        self
    }

    /// One more part of the body, in a frame or chunk of its own.
    pub fn then(mut self, part: impl AsRef<[u8]>) -> Answer {
        let part = Bytes::copy_from_slice(part.as_ref());
        self.steps.push(Step::Send(part));
        self
    }

    pub fn then_wait_for(mut self, gate: &Gate) -> Answer {
        self.steps.push(Step::WaitFor(gate.clone()));
        self
    }

    /// Breaks off: the stream is reset, an HTTP/1 connection closed before its last chunk.
    pub fn then_break(mut self) -> Answer {
        self.steps.push(Step::Break);
        self
    }

    /// Waits before the head.
    pub fn held_by(self, gate: &Gate) -> Answer {
        Answer {
            held_by: Some(gate.clone()),
            ..self
        }
    }
}

type Script = dyn Fn(&Request) -> Answer + Send + Sync;

/// A provider on a loopback port that speaks nothing but TLS. Dropping it cuts it off.
pub struct SecureUpstream {
    addr: SocketAddr,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

struct Shared {
    log: watch::Sender<Log>,
    script: Box<Script>,
}

impl SecureUpstream {
    /// `offers`: what its clients may choose from, the preferred first.
    pub async fn start(
        identity: &Identity,
        offers: &[Protocol],
        script: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> SecureUpstream {
        let acceptor = identity.acceptor(offers);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound port");
        let shared = Arc::new(Shared {
            log: watch::Sender::default(),
            script: Box::new(script),
        });
        let server = tokio::spawn(accept(listener, {
            let shared = shared.clone();
            move |number, socket| serve(shared.clone(), acceptor.clone(), number, socket)
        }));
        SecureUpstream {
            addr,
            shared,
            server,
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    pub fn log(&self) -> Log {
        self.shared.log.borrow().clone()
    }

    /// Waits until the log is `so`.
    pub async fn until(&self, what: &str, so: impl Fn(&Log) -> bool) -> Log {
        until(&self.shared.log, what, so).await
    }
}

impl Drop for SecureUpstream {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn until<L: Clone + Debug>(log: &watch::Sender<L>, what: &str, so: impl Fn(&L) -> bool) -> L {
    let mut seen = log.subscribe();
    let seen = must(what, seen.wait_for(so)).await;
    seen.expect("a server that runs").clone()
}

/// Connections belong to this task: aborting it cuts them.
async fn accept<F>(listener: TcpListener, serve: impl Fn(usize, TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    for number in 0.. {
        let (socket, _) = listener.accept().await.expect("descriptors for another");
        // An event must not wait for the acknowledgement of the one before.
        socket.set_nodelay(true).expect("a live socket");
        connections.spawn(serve(number, socket));
    }
}

async fn serve(shared: Arc<Shared>, acceptor: TlsAcceptor, number: usize, socket: TcpStream) {
    shared.log.send_modify(|log| {
        let missing = (number + 1).saturating_sub(log.connections.len());
        log.connections
            .extend(std::iter::repeat_n(Connection::default(), missing));
    });
    // A client that does not like the certificate, or has found another connection meanwhile.
    if let Ok(stream) = acceptor.accept(socket).await {
        let protocol = Protocol::agreed(&stream);
        shared.log.send_modify(|log| {
            let connection = &mut log.connections[number];
            connection.name = stream.get_ref().1.server_name().map(str::to_owned);
            connection.protocol = protocol;
        });
        let service = service_fn(|request| answer(shared.clone(), number, request));
        let io = TokioIo::new(stream);
        // How a connection ends is the client's business.
        let _ = match protocol {
            Some(Protocol::H2) => {
                hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .max_concurrent_streams(STREAMS_A_CONNECTION)
                    .serve_connection(io, service)
                    .await
            }
            Some(Protocol::Http1) | None => {
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(io, service)
                    .with_upgrades()
                    .await
            }
        };
    }
    shared
        .log
        .send_modify(|log| log.connections[number].is_over = true);
}

async fn answer(
    shared: Arc<Shared>,
    connection: usize,
    request: http::Request<Incoming>,
) -> io::Result<Response<UnsyncBoxBody<Bytes, io::Error>>> {
    let (parts, body) = request.into_parts();
    let mut seen = Request {
        connection,
        method: parts.method.to_string(),
        uri: parts.uri,
        headers: parts.headers,
        body: None,
        sent: 0,
        fate: Fate::UnderWay,
    };
    let open = Open::begin(&shared, &seen);
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    seen.body = Some(body.clone());
    open.change(|request| request.body = Some(body));
    let answer = (shared.script)(&seen);
    if let Some(gate) = &answer.held_by {
        gate.wait().await;
    }
    if answer.is_refusal {
        return Err(io::Error::other("on purpose"));
    }
    let mut head = Response::builder().status(answer.status);
    for (name, value) in answer.headers {
        head = head.header(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    }
    let steps = answer.steps.into_iter();
    let frames = stream::unfold((steps, open), async |(mut steps, open)| {
        loop {
            match steps.next() {
                Some(Step::Send(part)) => {
                    open.change(|request| request.sent += part.len());
                    return Some((Ok(Frame::data(part)), (steps, open)));
                }
                Some(Step::WaitFor(gate)) => gate.wait().await,
                Some(Step::Break) => {
                    return Some((Err(io::Error::other("on purpose")), (steps, open)));
                }
                None => {
                    open.change(|request| request.fate = Fate::Answered);
                    return None;
                }
            }
        }
    });
    let body = StreamBody::new(frames).boxed_unsync();
    Ok(head.body(body).expect("a response"))
}

/// A request under way. Dropped before its answer's end, it was abandoned.
struct Open {
    shared: Arc<Shared>,
    number: usize,
}

impl Open {
    fn begin(shared: &Arc<Shared>, request: &Request) -> Open {
        let mut number = 0;
        shared.log.send_modify(|log| {
            number = log.requests.len();
            let connection = &mut log.connections[request.connection];
            connection.requests += 1;
            connection.in_flight += 1;
            connection.most_in_flight = connection.most_in_flight.max(connection.in_flight);
            log.requests.push(request.clone());
        });
        Open {
            shared: shared.clone(),
            number,
        }
    }

    fn change(&self, how: impl FnOnce(&mut Request)) {
        let change = |log: &mut Log| how(&mut log.requests[self.number]);
        self.shared.log.send_modify(change);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.log.send_modify(|log| {
            let request = &mut log.requests[self.number];
            if request.fate == Fate::UnderWay {
                request.fate = Fate::Abandoned;
            }
            log.connections[request.connection].in_flight -= 1;
        });
    }
}

// --- HTTP/2 by hand -------------------------------------------------------------------------------

/// How far a request has come when [`BareH2`] asks its script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Come {
    /// Its head and the first bytes of its body.
    Begun,
    /// All of it.
    Whole,
}

/// A request on a [`BareH2`]. Its headers stay packed; what it is can be told from its body.
#[derive(Clone, Debug)]
pub struct BareRequest {
    pub connection: usize,
    pub stream: u32,
    pub body: Vec<u8>,
    pub is_whole: bool,
    pub is_reset: bool,
}

#[derive(Clone, Debug, Default)]
pub struct BareLog {
    pub connections: usize,
    pub requests: Vec<BareRequest>,
}

impl BareLog {
    /// How often a request came whose body has these words.
    pub fn times(&self, words: &str) -> usize {
        let has = |request: &&BareRequest| {
            memchr::memmem::find(&request.body, words.as_bytes()).is_some()
        };
        self.requests.iter().filter(has).count()
    }
}

/// Frames to be written, and what becomes of the connection after them.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
    then_close: bool,
}

/// RFC 9113, section 7.
pub const NO_ERROR: u32 = 0x0;
pub const INTERNAL_ERROR: u32 = 0x2;
pub const REFUSED_STREAM: u32 = 0x7;

mod kind {
    pub const DATA: u8 = 0x0;
    pub const HEADERS: u8 = 0x1;
    pub const RST_STREAM: u8 = 0x3;
    pub const SETTINGS: u8 = 0x4;
    pub const PING: u8 = 0x6;
    pub const GOAWAY: u8 = 0x7;
}

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
/// `:status: 200` and `content-type: …`, by their places in HPACK's static table.
const STATUS_200: u8 = 0x88;
const CONTENT_TYPE: [u8; 2] = [0x0f, 0x10];

impl Frames {
    fn frame(mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Frames {
        let length = u32::try_from(payload.len()).expect("a short frame");
        self.bytes.extend_from_slice(&length.to_be_bytes()[1..]);
        self.bytes.extend_from_slice(&[kind, flags]);
        self.bytes.extend_from_slice(&stream.to_be_bytes());
        self.bytes.extend_from_slice(payload);
        self
    }

    /// `200` with this content type; the body follows.
    pub fn head(self, stream: u32, content_type: &str) -> Frames {
        let mut packed = vec![STATUS_200];
        packed.extend_from_slice(&CONTENT_TYPE);
        packed.push(u8::try_from(content_type.len()).expect("a short name"));
        packed.extend_from_slice(content_type.as_bytes());
        self.frame(kind::HEADERS, END_HEADERS, stream, &packed)
    }

    pub fn data(self, stream: u32, part: impl AsRef<[u8]>) -> Frames {
        self.frame(kind::DATA, 0, stream, part.as_ref())
    }

    pub fn last_data(self, stream: u32, part: impl AsRef<[u8]>) -> Frames {
        self.frame(kind::DATA, END_STREAM, stream, part.as_ref())
    }

    /// A whole JSON answer.
    pub fn json(self, stream: u32, body: &str) -> Frames {
        self.head(stream, "application/json")
            .last_data(stream, body)
    }

    pub fn reset(self, stream: u32, code: u32) -> Frames {
        self.frame(kind::RST_STREAM, 0, stream, &code.to_be_bytes())
    }

    /// No new streams on this connection; those up to `last` were or will be seen to.
    pub fn go_away(self, last: u32, code: u32) -> Frames {
        let payload = [last.to_be_bytes(), code.to_be_bytes()].concat();
        self.frame(kind::GOAWAY, 0, 0, &payload)
    }

    pub fn then_close(self) -> Frames {
        Frames {
            then_close: true,
            ..self
        }
    }
}

/// An HTTP/2 server whose every frame is a test's own. Dropping it cuts it off.
pub struct BareH2 {
    addr: SocketAddr,
    log: Arc<watch::Sender<BareLog>>,
    server: JoinHandle<()>,
}

type BareScript = dyn Fn(Come, &BareRequest, usize) -> Frames + Send + Sync;

impl BareH2 {
    /// `script` is asked twice about a request with a body, and once about one without; its last
    /// argument is the request's number.
    pub async fn start(
        identity: &Identity,
        script: impl Fn(Come, &BareRequest, usize) -> Frames + Send + Sync + 'static,
    ) -> BareH2 {
        let acceptor = identity.acceptor(&[Protocol::H2]);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound port");
        let log: Arc<watch::Sender<BareLog>> = Arc::default();
        let script: Arc<BareScript> = Arc::new(script);
        let server = tokio::spawn(accept(listener, {
            let log = log.clone();
            move |number, socket| {
                let (log, script, acceptor) = (log.clone(), script.clone(), acceptor.clone());
                async move {
                    if let Ok(stream) = acceptor.accept(socket).await {
                        log.send_modify(|log| log.connections += 1);
                        // The client may close whenever it likes.
                        let _ = BareConnection::new(stream, number, log, script)
                            .serve()
                            .await;
                    }
                }
            }
        }));
        BareH2 { addr, log, server }
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    pub fn log(&self) -> BareLog {
        self.log.borrow().clone()
    }

    /// Waits until the log is `so`.
    pub async fn until(&self, what: &str, so: impl Fn(&BareLog) -> bool) -> BareLog {
        until(&self.log, what, so).await
    }
}

impl Drop for BareH2 {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct BareConnection {
    stream: TlsStream<TcpStream>,
    number: usize,
    log: Arc<watch::Sender<BareLog>>,
    script: Arc<BareScript>,
}

impl BareConnection {
    fn new(
        stream: TlsStream<TcpStream>,
        number: usize,
        log: Arc<watch::Sender<BareLog>>,
        script: Arc<BareScript>,
    ) -> BareConnection {
        BareConnection {
            stream,
            number,
            log,
            script,
        }
    }

    async fn serve(mut self) -> io::Result<()> {
        let mut preface = [0; b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len()];
        self.stream.read_exact(&mut preface).await?;
        self.write(Frames::default().frame(kind::SETTINGS, 0, 0, &[]))
            .await?;
        loop {
            let mut head = [0; 9];
            self.stream.read_exact(&mut head).await?;
            let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = head;
            let length = u32::from_be_bytes([0, l0, l1, l2]);
            let stream = u32::from_be_bytes([s0, s1, s2, s3]);
            let mut payload = vec![0; usize::try_from(length).expect("a frame's length")];
            self.stream.read_exact(&mut payload).await?;
            let is_ack = flags & ACK != 0;
            let frames = match kind {
                kind::SETTINGS if !is_ack => Frames::default().frame(kind::SETTINGS, ACK, 0, &[]),
                kind::PING if !is_ack => Frames::default().frame(kind::PING, ACK, 0, &payload),
                kind::HEADERS => {
                    self.log.send_modify(|log| {
                        log.requests.push(BareRequest {
                            connection: self.number,
                            stream,
                            body: Vec::new(),
                            is_whole: false,
                            is_reset: false,
                        });
                    });
                    self.came(stream, &[], flags)
                }
                kind::DATA => self.came(stream, &payload, flags),
                kind::RST_STREAM => {
                    self.change(stream, |request| request.is_reset = true);
                    Frames::default()
                }
                _ => Frames::default(),
            };
            let is_over = frames.then_close;
            self.write(frames).await?;
            if is_over {
                return self.stream.shutdown().await;
            }
        }
    }

    /// Notes what came of a request, and asks the script what to do about it.
    fn came(&self, stream: u32, part: &[u8], flags: u8) -> Frames {
        let is_whole = flags & END_STREAM != 0;
        let mut come = None;
        let (number, request) = self.change(stream, |request| {
            if !part.is_empty() && request.body.is_empty() {
                come = Some(Come::Begun);
            }
            request.body.extend_from_slice(part);
            request.is_whole = is_whole;
        });
        let mut frames = Frames::default();
        for come in come.into_iter().chain(is_whole.then_some(Come::Whole)) {
            let more = (self.script)(come, &request, number);
            frames.bytes.extend(more.bytes);
            frames.then_close |= more.then_close;
        }
        frames
    }

    /// Changes this connection's request on `stream`; it, and its number.
    fn change(&self, stream: u32, how: impl FnOnce(&mut BareRequest)) -> (usize, BareRequest) {
        let mut changed = None;
        self.log.send_modify(|log| {
            let is_it = |request: &BareRequest| {
                (request.connection, request.stream) == (self.number, stream)
            };
            let number = log.requests.iter().position(is_it).expect("a known stream");
            how(&mut log.requests[number]);
            changed = Some((number, log.requests[number].clone()));
        });
        changed.expect("changed just now")
    }

    async fn write(&mut self, frames: Frames) -> io::Result<()> {
        self.stream.write_all(&frames.bytes).await?;
        self.stream.flush().await
    }
}

// --- A proxy on the way there -----------------------------------------------------------------------

/// A proxy that tunnels: it takes `CONNECT` to any name, and leads to one address.
pub struct Tunnels {
    addr: SocketAddr,
    asked: Arc<watch::Sender<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Tunnels {
    pub async fn to(target: SocketAddr) -> Tunnels {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound port");
        let asked: Arc<watch::Sender<Vec<String>>> = Arc::default();
        let server = tokio::spawn(accept(listener, {
            let asked = asked.clone();
            move |_, socket| {
                let asked = asked.clone();
                async move {
                    // Either end may close whenever it likes.
                    let _ = tunnel(socket, target, &asked).await;
                }
            }
        }));
        Tunnels {
            addr,
            asked,
            server,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The first lines of the requests so far.
    pub fn asked(&self) -> Vec<String> {
        self.asked.borrow().clone()
    }
}

impl Drop for Tunnels {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn tunnel(
    mut socket: TcpStream,
    target: SocketAddr,
    asked: &watch::Sender<Vec<String>>,
) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head);
    let first = head.lines().next().unwrap_or_default().to_owned();
    asked.send_modify(|asked| asked.push(first));
    socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    let mut onward = TcpStream::connect(target).await?;
    tokio::io::copy_bidirectional(&mut socket, &mut onward).await?;
    Ok(())
}

impl fmt::Debug for SecureUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SecureUpstream").field(&self.log()).finish()
    }
}
