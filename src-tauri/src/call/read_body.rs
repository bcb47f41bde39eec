//! Reads the body of a call that dedups, hashing and scanning it as it arrives. Others stream
//! through.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, HeaderMap, HeaderValue};
use http::request::Parts;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;

use super::budget::Weight;
use super::error::CallError;
use super::identify::Place;
use crate::core::{BODIES_HELD, Core};
use crate::policy::fingerprint::{KeyHasher, RequestFacts, RequestScan};
use crate::policy::tap::{DecodeError, Encoding, decode_request};

/// A compressed body larger than this many bytes is decoded off the async threads.
const DECODED_INLINE: usize = 64 << 10;
/// Bodies up to this many bytes are held beside the total, so that large ones that wait cannot
/// hold up every call.
const SMALL_BODY: u64 = 64 << 10;
/// How long a body may stand still while it is read: it holds its share of the total.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(60);

/// A request's body.
pub enum RequestBody {
    /// Read whole. The permit stands for its bytes until they are sent.
    Whole {
        bytes: Bytes,
        held: Option<OwnedSemaphorePermit>,
    },
    /// Passes through as it comes: what was read of it, then the rest.
    Streamed { read: Vec<Bytes>, rest: Incoming },
}

impl RequestBody {
    /// True if it is known to have no bytes.
    pub fn is_empty(&self) -> bool {
        match self {
            RequestBody::Whole { bytes, .. } => bytes.is_empty(),
            RequestBody::Streamed { read, rest } => read.is_empty() && rest.is_end_stream(),
        }
    }
}

pub struct ReadBody {
    pub body: RequestBody,
    pub facts: RequestFacts,
    /// What bounds its cost; `None` where it was not read, or cannot be.
    pub weight: Option<Weight>,
    /// Has hashed a body that was read whole; the key's parts are still to come.
    pub hasher: Option<KeyHasher>,
}

impl ReadBody {
    fn unread(read: Vec<Bytes>, rest: Incoming) -> ReadBody {
        ReadBody {
            body: RequestBody::Streamed { read, rest },
            facts: RequestFacts::default(),
            weight: None,
            hasher: None,
        }
    }
}

/// Reads the body of a generation route, hashing and scanning it as it arrives. Others, and those
/// that are too large, stream through.
pub async fn read_body(
    core: &Core,
    place: &Place,
    parts: &Parts,
    mut body: Incoming,
) -> Result<ReadBody, CallError> {
    if !place.route.is_generation() {
        return Ok(ReadBody::unread(Vec::new(), body));
    }
    let limit = place.world.settings.server.max_body.min(BODIES_HELD as u64);
    let length = body.size_hint().exact();
    if length.is_some_and(|length| length > limit) {
        return Ok(ReadBody::unread(Vec::new(), body));
    }
    let mut held = match length {
        Some(length) if length > SMALL_BODY => Some(reserve(core, length).await),
        _ => None,
    };
    let encoding = content_encoding(&parts.headers);
    let mut scan = RequestScan::new();
    let mut hasher = KeyHasher::new();
    let mut read: Vec<Bytes> = Vec::new();
    let mut total = 0u64;
    loop {
        let next = tokio::time::timeout(UPLOAD_PATIENCE, body.frame()).await;
        let next = next.map_err(|_| CallError::UploadStalled {
            limit: UPLOAD_PATIENCE,
            setting: Cow::Borrowed("a fixed limit"),
        })?;
        let Some(frame) = next else {
            break;
        };
        let frame = frame.map_err(|error| upload_error(&error))?;
        let Ok(chunk) = frame.into_data() else {
            continue;
        };
        total += chunk.len() as u64;
        if length.is_none() && total > SMALL_BODY {
            let room = u32::try_from(chunk.len())
                .ok()
                .filter(|_| total <= limit)
                .and_then(|len| core.bodies.clone().try_acquire_many_owned(len).ok());
            match (&mut held, room) {
                (_, None) => {
                    read.push(chunk);
                    return Ok(ReadBody::unread(read, body));
                }
                (Some(held), Some(more)) => held.merge(more),
                (none, first) => *none = first,
            }
        }
        hasher.body(&chunk);
        if encoding == Encoding::Identity {
            scan.feed(&chunk);
        }
        read.push(chunk);
    }
    let bytes = join(read, total);
    let (facts, weight) = match encoding {
        Encoding::Identity => (scan.finish(), Some(Weight::of(&bytes))),
        encoding => read_encoded(encoding, &bytes, limit).await?,
    };
    Ok(ReadBody {
        facts,
        weight,
        hasher: Some(hasher),
        body: RequestBody::Whole { bytes, held },
    })
}

/// Why a request's body came to no end: its client has left, or it cannot be read.
pub fn upload_error(error: &hyper::Error) -> CallError {
    let reason = error
        .source()
        .and_then(<dyn Error>::downcast_ref::<io::Error>);
    match reason.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => CallError::BadRequest(
            "the request's body is not framed as its headers say; send it again".to_owned(),
        ),
        _ => CallError::UploadBroke,
    }
}

/// Waits until so many bytes may be held; nothing is read from the socket meanwhile.
async fn reserve(core: &Core, length: u64) -> OwnedSemaphorePermit {
    let permits = u32::try_from(length).unwrap_or(u32::MAX);
    match core.bodies.clone().acquire_many_owned(permits).await {
        Ok(permit) => permit,
        Err(_) => unreachable!("the semaphore is never closed"),
    }
}

fn join(mut read: Vec<Bytes>, total: u64) -> Bytes {
    if read.len() <= 1 {
        return read.pop().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(usize::try_from(total).unwrap_or(0));
    read.iter().for_each(|chunk| whole.extend_from_slice(chunk));
    whole.freeze()
}

fn content_encoding(headers: &HeaderMap) -> Encoding {
    match headers.get(CONTENT_ENCODING).map(HeaderValue::to_str) {
        None => Encoding::Identity,
        Some(Ok(encoding)) => Encoding::of(encoding),
        Some(Err(_)) => Encoding::Unknown,
    }
}

/// Scans a bounded decoded copy; the body itself goes on as it came.
async fn read_encoded(
    encoding: Encoding,
    bytes: &Bytes,
    limit: u64,
) -> Result<(RequestFacts, Option<Weight>), CallError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let body = bytes.clone();
    let scan = move || {
        decode_request(encoding, &body, limit).map(|decoded| {
            let mut scan = RequestScan::new();
            scan.feed(&decoded);
            (scan.finish(), Some(Weight::of(&decoded)))
        })
    };
    let facts = if bytes.len() <= DECODED_INLINE {
        scan()
    } else {
        tokio::task::spawn_blocking(scan)
            .await
            .map_err(|_| CallError::Internal)?
    };
    match facts {
        Ok(facts) => Ok(facts),
        Err(DecodeError::Unsupported) => Ok((RequestFacts::default(), None)),
        Err(DecodeError::Corrupt) => Err(CallError::BadRequest(
            "the request's body is not what its content-encoding says; send it again, or uncompressed"
                .to_owned(),
        )),
        Err(DecodeError::TooLarge) => Err(CallError::TooLarge(format!(
            "the request's body unpacks to more than {} MB (server.max_body_mb); raise that or send less",
            limit >> 20
        ))),
    }
}

/// A connection in memory, so that its silence can be long.
#[cfg(test)]
mod tests {
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tempfile::TempDir;
    use tokio::io::AsyncWriteExt as _;
    use tokio::sync::mpsc;

    use super::*;
    use crate::call::identify;
    use crate::clock::Clock;
    use crate::keys::Keys;
    use crate::settings::{Overrides, Settings};
    use crate::store::Store;

    const SECOND: Duration = Duration::from_secs(1);

    struct Bench {
        core: Core,
        _folder: TempDir,
    }

    impl Bench {
        fn new() -> Bench {
            let folder = tempfile::tempdir().expect("a scratch folder");
            let settings = Settings::parse("", &Overrides::default()).expect("settings");
            let store = Store::open(folder.path(), Clock::Tokio).expect("a store");
            Bench {
                core: Core::new(settings, store, Keys::empty(), Clock::Tokio),
                _folder: folder,
            }
        }

        fn held(&self) -> usize {
            BODIES_HELD - self.core.bodies.available_permits()
        }

        /// What [`read_body`] makes of a request that comes in these parts, each after a pause.
        async fn read(&self, parts: &[(Duration, &[u8])]) -> Result<ReadBody, CallError> {
            let (mut client, server) = tokio::io::duplex(1 << 20);
            let (come, mut coming) = mpsc::channel(1);
            let serving = tokio::spawn(async move {
                let kept = service_fn(|request| {
                    let come = come.clone();
                    async move {
                        come.send(request).await.expect("somebody reads it");
                        std::future::pending::<Result<http::Response<String>, io::Error>>().await
                    }
                });
                let server = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(server), kept);
                let _ = server.await;
            });
            let reading = async {
                let request: http::Request<Incoming> = coming.recv().await.expect("a request");
                let (parts, body) = request.into_parts();
                let place = identify::locate(self.core.world(), &parts).expect("a place");
                read_body(&self.core, &place, &parts, body).await
            };
            let writing = async {
                for (pause, part) in parts {
                    tokio::time::sleep(*pause).await;
                    client.write_all(part).await.expect("an open connection");
                }
                std::future::pending().await
            };
            let read = tokio::select! {
                read = reading => read,
                () = writing => unreachable!("it keeps the connection open"),
            };
            serving.abort();
            read
        }
    }

    fn head(framing: &str) -> Vec<u8> {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\
             content-type: application/json\r\n{framing}\r\n\r\n"
        )
        .into_bytes()
    }

    fn chunk(bytes: &[u8]) -> Vec<u8> {
        [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
    }

    /// A chat request of this length.
    fn chat(length: usize) -> Vec<u8> {
        let pad = "x".repeat(length - r#"{"model":"m","pad":""}"#.len());
        format!(r#"{{"model":"m","pad":"{pad}"}}"#).into_bytes()
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_stands_still_for_a_minute_is_told_so() {
        let bench = Bench::new();
        for (framing, half) in [
            ("content-length: 100", b"{\"half\":".to_vec()),
            ("content-length: 100000", b"{\"half\":".to_vec()),
            ("transfer-encoding: chunked", chunk(b"{\"half\":")),
        ] {
            let began = bench.core.clock.now();
            let head = head(framing);
            let parts = [
                (Duration::ZERO, &head[..]),
                (30 * SECOND, &half),
                (61 * SECOND, &half),
            ];
            let Err(error) = bench.read(&parts).await else {
                panic!("{framing}: it never came whole");
            };
            let took = bench.core.clock.now().since(began);
            assert!(took >= 90 * SECOND && took < 91 * SECOND, "{took:?}");
            assert_eq!(error.status(), http::StatusCode::REQUEST_TIMEOUT);
            let told = error.message();
            assert!(told.contains("stopped coming for 60 s"), "{told}");
            // What it had reserved is there for others.
            assert_eq!(bench.held(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_may_take_as_long_as_it_likes_while_it_goes_on() {
        let bench = Bench::new();
        let body = chat(30);
        let head = head(&format!("content-length: {}", body.len()));
        let mut parts = vec![(Duration::ZERO, &head[..])];
        parts.extend(body.chunks(1).map(|byte| (59 * SECOND, byte)));
        let began = bench.core.clock.now();
        let read = bench.read(&parts).await.expect("it comes");
        assert!(bench.core.clock.now().since(began) > 29 * 59 * SECOND);
        assert!(matches!(read.body, RequestBody::Whole { bytes, .. } if bytes == body));
        assert_eq!(read.facts.model.as_deref(), Some("m"));
    }

    /// Small ones are held beside the total: they are identified though it is used up.
    #[tokio::test(start_paused = true)]
    async fn a_body_of_unknown_length_is_read_while_there_is_room_for_it() {
        const SMALL: usize = SMALL_BODY as usize;
        let bench = Bench::new();
        let head = head("transfer-encoding: chunked");
        for (length, is_full, is_whole) in [
            (100, false, true),
            (100, true, true),
            (SMALL, true, true),
            (SMALL + 1, true, false),
            (SMALL + 1, false, true),
            (3 * SMALL, true, false),
            (3 * SMALL, false, true),
        ] {
            let room = if is_full { 0 } else { BODIES_HELD };
            let others = u32::try_from(BODIES_HELD - room).expect("a count of permits");
            let others = bench.core.bodies.clone().try_acquire_many_owned(others);
            let others = others.expect("nothing else is held");
            let body = chat(length);
            let chunks: Vec<Vec<u8>> = body.chunks(10_000).map(chunk).collect();
            let mut parts = vec![(Duration::ZERO, &head[..])];
            parts.extend(chunks.iter().map(|chunk| (SECOND, &chunk[..])));
            parts.push((SECOND, b"0\r\n\r\n"));
            let read = bench.read(&parts).await.expect("it comes");
            let name = format!("{length} bytes, full: {is_full}");
            assert_eq!(read.hasher.is_some(), is_whole, "{name}");
            let model = read.facts.model.as_deref();
            assert_eq!(model, is_whole.then_some("m"), "{name}");
            match read.body {
                RequestBody::Whole { bytes, held } => {
                    assert_eq!(bytes, body, "{name}");
                    let held = held.map_or(0, |held| held.num_permits());
                    assert!(held <= length && length <= held + SMALL, "{name}: {held}");
                }
                RequestBody::Streamed { read, .. } => {
                    // All that was taken off the connection goes on, in order.
                    assert!(body.starts_with(&read.concat()), "{name}");
                    assert!(read.concat().len() > SMALL, "{name}");
                }
            }
            drop(others);
            assert_eq!(bench.held(), 0, "{name}");
        }
    }
}
