//! The client's side of an answer: its response head, and the body that follows the shared answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::AGE;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

use super::answer::{Head, Next, Reader};
use super::dedup::KeptAnswer;
use super::headers::remove_exchange;
use super::record::Row;
use crate::clock::Moment;
use crate::provider::Provider;
use crate::store::{CallId, DedupLabel, Outcome};

pub const CALL: HeaderName = HeaderName::from_static("x-traygate-call");
const DEDUP: HeaderName = HeaderName::from_static("x-traygate-dedup");
const PROVIDER: HeaderName = HeaderName::from_static("x-traygate-provider");

/// The body of every answer a client gets.
pub enum ClientBody {
    /// Traygate's own words.
    Own(Option<Bytes>),
    /// What Traygate's own routes answer.
    Page(axum::body::Body),
    /// A kept answer.
    Kept(KeptBody),
    /// A shared answer, as it comes.
    Shared(SharedBody),
    /// An answer that nobody shares and nothing reads along.
    Passing(reqwest::Body),
}

/// A finished answer on its way to one client.
pub struct KeptBody {
    kept: Arc<KeptAnswer>,
    /// Bytes handed to the connection.
    sent: usize,
    row: Row,
}

/// A kept answer goes out in parts of so many bytes: what the connection has taken counts as
/// received, and it takes no more than its client reads.
const KEPT_PART: usize = 64 << 10;

/// A place in a shared answer, and for a follower its own row. The leader's row is the shared
/// call's.
pub struct SharedBody {
    reader: Reader,
    follower: Option<Row>,
    /// What was handed to the connection has had its chance to be written before the cut.
    flushed: bool,
}

/// Why a body cannot go on.
type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The answer broke off: the connection is closed without its normal end.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
pub struct CutShort;

/// A head as a client gets it, with who answered and how.
fn respond(
    status: StatusCode,
    headers: HeaderMap,
    provider: &Provider,
    dedup: DedupLabel,
    body: ClientBody,
) -> Response<ClientBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    mark(&mut response, provider, dedup);
    response
}

/// Sets the headers that every proxied answer carries.
pub fn mark(response: &mut Response<ClientBody>, provider: &Provider, dedup: DedupLabel) {
    let headers = response.headers_mut();
    headers.insert(DEDUP, HeaderValue::from_static(dedup.as_str()));
    headers.insert(PROVIDER, provider.label.clone());
}

/// The leader's answer: the upstream's as it is.
pub fn to_leader(
    head: &Head,
    reader: Reader,
    provider: &Provider,
    dedup: DedupLabel,
) -> Response<ClientBody> {
    let body = ClientBody::Shared(SharedBody {
        reader,
        follower: None,
        flushed: false,
    });
    respond(head.status, head.headers.clone(), provider, dedup, body)
}

/// A follower's answer: the leader's, save what was said in that one exchange.
pub fn to_follower(
    head: &Head,
    reader: Reader,
    mut row: Row,
    provider: &Provider,
) -> Response<ClientBody> {
    row.status(head.status);
    let mut headers = head.headers.clone();
    remove_exchange(&mut headers);
    let body = ClientBody::Shared(SharedBody {
        reader,
        follower: Some(row),
        flushed: false,
    });
    respond(head.status, headers, provider, DedupLabel::Joined, body)
}

/// A finished answer, with its age.
pub fn from_kept(
    kept: Arc<KeptAnswer>,
    mut row: Row,
    provider: &Provider,
    now: Moment,
) -> Response<ClientBody> {
    row.status(kept.status);
    let mut headers: HeaderMap = kept.headers.iter().cloned().collect();
    headers.insert(AGE, HeaderValue::from(now.since(kept.kept_at).as_secs()));
    let body = ClientBody::Kept(KeptBody {
        kept: kept.clone(),
        sent: 0,
        row,
    });
    respond(kept.status, headers, provider, DedupLabel::Cached, body)
}

/// The id as a header value.
pub fn call_header(id: CallId) -> HeaderValue {
    HeaderValue::from_str(&id.to_string()).unwrap_or_else(|_| HeaderValue::from_static(""))
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            ClientBody::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            ClientBody::Kept(body) => Poll::Ready(body.next().map(|part| part.map(Frame::data))),
            ClientBody::Page(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(Into::into))),
            ClientBody::Shared(body) => body.poll_next(cx),
            ClientBody::Passing(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(Into::into))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ClientBody::Own(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            ClientBody::Page(body) => body.is_end_stream(),
            ClientBody::Kept(body) => body.is_sent(),
            ClientBody::Shared(body) => body.reader.is_at_end(),
            ClientBody::Passing(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ClientBody::Own(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            ClientBody::Kept(body) => {
                SizeHint::with_exact((body.kept.body.len() - body.sent) as u64)
            }
            ClientBody::Page(body) => body.size_hint(),
            // The upstream's own content-length, where there is one, stands in the head.
            ClientBody::Shared(_) => SizeHint::default(),
            ClientBody::Passing(body) => body.size_hint(),
        }
    }
}

impl KeptBody {
    fn is_sent(&self) -> bool {
        self.sent == self.kept.body.len()
    }

    fn next(&mut self) -> Option<Result<Bytes, BodyError>> {
        if self.is_sent() {
            return None;
        }
        if self.row.is_stopped() {
            return Some(Err(CutShort.into()));
        }
        let body = &self.kept.body;
        let part = body.slice(self.sent..body.len().min(self.sent + KEPT_PART));
        self.sent += part.len();
        Some(Ok(part))
    }
}

impl Drop for KeptBody {
    fn drop(&mut self) {
        if self.is_sent() {
            self.kept.received.store(true, Ordering::Release);
            self.row.settle(Outcome::Completed, None);
        }
    }
}

impl SharedBody {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match ready!(self.reader.poll_next(cx)) {
            Next::Chunk(chunk) => Poll::Ready(Some(Ok(Frame::data(chunk)))),
            Next::End => Poll::Ready(None),
            Next::Cut if !self.flushed => {
                // The connection drops what it has not written when its body fails: it gets one
                // turn to write what came before the break.
                self.flushed = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Next::Cut => Poll::Ready(Some(Err(CutShort.into()))),
        }
    }
}

impl Drop for SharedBody {
    fn drop(&mut self) {
        let Some(mut row) = self.follower.take() else {
            return;
        };
        if let Some(came) = self.reader.content_at() {
            // A follower that joined later has had it from its first moment.
            row.first_content(came.max(row.began()));
        }
        // Without an account of its own the row says that the client left.
        if let Some(account) = self.reader.account() {
            row.settle(account.outcome, account.error);
        }
        self.reader.record(row);
    }
}
