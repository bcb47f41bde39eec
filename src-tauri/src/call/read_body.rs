//! Reads the body of a call that dedups, hashing and scanning it as it arrives. Others stream
//! through.

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
    /// Has hashed a body that was read whole; the key's parts are still to come.
    pub hasher: Option<KeyHasher>,
}

impl ReadBody {
    fn unread(read: Vec<Bytes>, rest: Incoming) -> ReadBody {
        ReadBody {
            body: RequestBody::Streamed { read, rest },
            facts: RequestFacts::default(),
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
            setting: "a fixed limit",
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
    let facts = match encoding {
        Encoding::Identity => scan.finish(),
        encoding => read_encoded(encoding, &bytes, limit).await?,
    };
    Ok(ReadBody {
        facts,
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
) -> Result<RequestFacts, CallError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let body = bytes.clone();
    let scan = move || {
        decode_request(encoding, &body, limit).map(|decoded| {
            let mut scan = RequestScan::new();
            scan.feed(&decoded);
            scan.finish()
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
        Err(DecodeError::Unsupported) => Ok(RequestFacts::default()),
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
