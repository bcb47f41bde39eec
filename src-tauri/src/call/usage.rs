//! What a call used: a stream is made to say it, its client is not shown that, and what nobody
//! said is estimated off the call's path.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, ETAG, HeaderMap, HeaderValue,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{error, warn};

use super::answer::{Head, Writer, own_bytes};
use super::identify::UpstreamRequest;
use super::read_body::RequestBody;
use super::record::Row;
use super::upstream::Upload;
use crate::policy::fingerprint::RequestFacts;
use crate::policy::routing::Route;
use crate::policy::tap::{Encoding, End, Framing, Reading, decode_beginning};
use crate::policy::usage::ask::{Splice, is_refusal, vouches_for_body};
use crate::policy::usage::estimate::{ByLength, Kept, Request, Tokenizer, estimate};
use crate::policy::usage::filter::UsageFilter;
use crate::policy::usage::{Flavour, Usage};
use crate::provider::Provider;

/// What is known of a call's usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Used {
    /// Nothing that anybody bills: it never reached a provider, or was answered with an error.
    #[default]
    Nothing,
    /// Something, and nobody can say what.
    Unknown,
    /// This, said or estimated.
    Known(Usage),
}

impl Used {
    /// The counts, where there are any.
    pub fn known(self) -> Option<Usage> {
        match self {
            Used::Known(usage) => Some(usage),
            Used::Nothing | Used::Unknown => None,
        }
    }
}

/// A stream that is to be asked for its usage.
#[derive(Clone, Debug)]
pub struct Ask {
    splice: Splice,
    /// Empty where the request names none.
    model: Arc<str>,
}

impl Ask {
    /// How a call is asked; `None` where it says it anyway, the client has chosen for itself, or
    /// its body must stay as it is.
    pub fn of(
        provider: &Provider,
        route: Route,
        facts: &RequestFacts,
        headers: &HeaderMap,
        body: &RequestBody,
        model: Option<&Arc<str>>,
    ) -> Option<Ask> {
        let splice = Splice::of(route, facts)?;
        let may_change = provider.settings.ask_usage
            && provider.flavour.has_to_be_asked()
            && matches!(body, RequestBody::Whole { .. })
            && encoding(headers) == Encoding::Identity
            && !is_signed(headers);
        may_change.then(|| Ask {
            splice,
            model: model.cloned().unwrap_or_default(),
        })
    }

    /// Puts the question into a request. Gives it back as it is if this provider is known to
    /// refuse it.
    pub fn put_into(
        self,
        mut request: UpstreamRequest,
        provider: &Provider,
    ) -> (UpstreamRequest, Option<Unasked>) {
        let RequestBody::Whole { bytes, .. } = &mut request.body else {
            return (request, None);
        };
        if provider.state.refuses_usage(&self.model) {
            return (request, None);
        }
        *bytes = self.splice.apply(bytes);
        let unasked = Unasked {
            method: request.method.clone(),
            url: request.url.clone(),
            headers: request.headers.clone(),
            asked: bytes.clone(),
            ask: self,
        };
        // An answer that is to be looked into must be readable.
        let plain = HeaderValue::from_static("identity");
        request.headers.insert(ACCEPT_ENCODING, plain);
        (request, Some(unasked))
    }
}

/// A header vouches for the body's bytes.
fn is_signed(headers: &HeaderMap) -> bool {
    let by_aws = |value: &HeaderValue| value.as_bytes().starts_with(b"AWS4-");
    headers.get_all(AUTHORIZATION).iter().any(by_aws)
        || headers.keys().any(|name| vouches_for_body(name.as_str()))
}

fn encoding(headers: &HeaderMap) -> Encoding {
    match headers.get(CONTENT_ENCODING).map(HeaderValue::to_str) {
        None => Encoding::Identity,
        Some(Ok(encoding)) => Encoding::of(encoding),
        Some(Err(_)) => Encoding::Unknown,
    }
}

/// The client's own request, to be sent after all if the provider refuses to be asked.
pub struct Unasked {
    method: http::Method,
    url: reqwest::Url,
    headers: HeaderMap,
    /// The body with the question in it: the client's own follows from it, so that no call holds
    /// its body twice.
    asked: Bytes,
    ask: Ask,
}

impl Unasked {
    /// Whether this is a refusal to be asked; the provider's is remembered then.
    pub fn is_refused(&self, provider: &Provider, head: &Head, body: &[u8]) -> bool {
        let decoded = match encoding(&head.headers) {
            Encoding::Identity => None,
            coded => Some(decode_beginning(coded, body, REFUSAL_BYTES).0),
        };
        let is_refused = is_refusal(head.status.as_u16(), decoded.as_deref().unwrap_or(body));
        if is_refused {
            provider.state.usage_refused(&self.ask.model);
        }
        is_refused
    }

    /// The request as the client sent it.
    pub fn request(self) -> UpstreamRequest {
        UpstreamRequest {
            method: self.method,
            url: self.url,
            headers: self.headers,
            body: RequestBody::Whole {
                bytes: self.ask.splice.undo(&self.asked),
                held: None,
            },
        }
    }
}

/// So much of an error is looked at for a refusal.
pub const REFUSAL_BYTES: usize = 64 << 10;

/// Keeps the answer to Traygate's own question from the client, where `head` has one.
pub fn filter_of(head: &mut Head, framing: Framing) -> Option<UsageFilter> {
    let is_readable = framing == Framing::Sse && encoding(&head.headers) == Encoding::Identity;
    if !head.status.is_success() || !is_readable {
        return None;
    }
    // What the client gets is not what these speak of.
    head.headers.remove(CONTENT_LENGTH);
    head.headers.remove(ETAG);
    for digest in ["content-digest", "repr-digest", "digest", "content-md5"] {
        head.headers.remove(digest);
    }
    head.length = None;
    Some(UsageFilter::new())
}

/// Hands the readers what they are to have of a chunk; says whether that is anything. What comes
/// with the end is held for [`Writer::finish`].
pub fn hand_on(
    writer: &Writer,
    chunk: &Bytes,
    filter: Option<&mut UsageFilter>,
    is_last: bool,
) -> bool {
    let mut last = None;
    match filter {
        None => last = Some(chunk.clone()),
        Some(filter) => {
            let mut pass = |part: Bytes| {
                // A part of a large chunk would pin all of it.
                let is_whole = part.len() == chunk.len();
                let part = if is_whole { part } else { own_bytes(part) };
                if let Some(before) = last.replace(part) {
                    writer.append(before);
                }
            };
            filter.feed(chunk.clone(), &mut pass);
            if is_last {
                filter.finish(&mut pass);
            }
        }
    }
    match last {
        Some(part) if is_last => writer.hold(part),
        Some(part) => writer.append(part),
        None => return false,
    }
    true
}

/// Reads off a call what it uses, and keeps what an estimate needs until that is known not to be
/// needed.
pub struct Meter {
    route: Route,
    flavour: Flavour,
    asked: Asked,
    /// It went to the provider.
    is_sent: bool,
    /// The answer's bytes, once the head of a success has come.
    kept: Option<Kept>,
    end: MeterEnd,
    /// The model that answered, as it names itself.
    pub answered: Option<String>,
}

/// What the provider has to say in the end.
#[derive(Clone, Copy, Debug)]
enum MeterEnd {
    /// Not heard yet, or never: the caller left before.
    Unheard,
    /// There is nothing to pay for.
    Nothing,
    /// A success, whole or not.
    Heard(Option<Usage>),
}

/// What is kept of a request.
enum Asked {
    Whole {
        bytes: Bytes,
        encoding: Encoding,
        /// Its place among the large ones.
        _room: Option<OwnedSemaphorePermit>,
    },
    Length(u64),
    /// Counted as it goes through.
    Streamed(Arc<Upload>),
}

impl Meter {
    /// For a call on `route`; `None` where usage is not read.
    pub fn of(route: Route, provider: &Provider) -> Option<Meter> {
        route.is_generation().then(|| Meter {
            route,
            flavour: provider.flavour,
            asked: Asked::Length(0),
            is_sent: false,
            kept: None,
            end: MeterEnd::Unheard,
            answered: None,
        })
    }

    /// This goes upstream, or goes up in its stead.
    pub fn sends(&mut self, request: &UpstreamRequest, upload: &Arc<Upload>, room: &Estimates) {
        self.is_sent = true;
        self.end = MeterEnd::Unheard;
        self.asked = match &request.body {
            RequestBody::Streamed { .. } => Asked::Streamed(upload.clone()),
            RequestBody::Whole { bytes, .. } => room.keep(bytes, encoding(&request.headers)),
        };
    }

    /// The answer's head has come.
    pub fn head(&mut self, head: &Head, framing: Framing) {
        if head.status.is_success() {
            let encoding = encoding(&head.headers);
            self.kept = Some(Kept::new(self.route, framing, encoding));
        } else {
            self.end = MeterEnd::Nothing;
        }
    }

    /// More of the answer, in memory of its own.
    pub fn chunk(&mut self, chunk: &Bytes) {
        if let Some(kept) = &mut self.kept {
            kept.push(chunk);
        }
    }

    /// It never reached the provider, or got nothing from it.
    pub fn nothing(&mut self) {
        self.end = MeterEnd::Nothing;
    }

    /// The answer is over, complete or not.
    pub fn read(&mut self, reading: &Reading, framing: Framing) {
        self.answered.clone_from(&reading.upstream_model);
        let said = reading.usage.usage(self.flavour);
        let is_paid = match reading.end {
            End::Load => false,
            // An answer that is an error, or a stream that began with one.
            End::Error => framing != Framing::Json && reading.has_content,
            _ => self.kept.is_some(),
        };
        self.end = match said.filter(|said| is_paid || said.is_complete()) {
            None if !is_paid => MeterEnd::Nothing,
            said => MeterEnd::Heard(said),
        };
    }

    /// What the call used, or what has to be found out.
    pub fn finish(self) -> Result<Used, Box<Missing>> {
        let said = match self.end {
            MeterEnd::Nothing => return Ok(Used::Nothing),
            MeterEnd::Unheard if !self.is_sent => return Ok(Used::Nothing),
            MeterEnd::Unheard => None,
            MeterEnd::Heard(said) => said,
        };
        match said {
            Some(usage) if usage.is_complete() => Ok(Used::Known(usage)),
            said => Err(Box::new(Missing {
                said,
                asked: self.asked,
                // Who left before the head has been sent nothing.
                kept: self
                    .kept
                    .unwrap_or_else(|| Kept::new(self.route, Framing::Json, Encoding::Identity)),
            })),
        }
    }
}

/// What an estimate is made of.
pub struct Missing {
    said: Option<Usage>,
    asked: Asked,
    kept: Kept,
}

impl Missing {
    fn bytes(&self) -> usize {
        let asked = match &self.asked {
            Asked::Whole { bytes, .. } => bytes.len(),
            Asked::Length(_) | Asked::Streamed(_) => 0,
        };
        asked + self.kept.bytes()
    }

    /// `is_urgent`: there is no time to load a vocabulary.
    fn estimate(&self, is_urgent: bool) -> Used {
        let request = match &self.asked {
            Asked::Length(bytes) => Request::Length(*bytes),
            Asked::Streamed(upload) => Request::Length(upload.bytes()),
            Asked::Whole {
                bytes, encoding, ..
            } => match encoding {
                Encoding::Identity => Request::Body(bytes.clone()),
                Encoding::Unknown => Request::Length(bytes.len() as u64),
                coded => Request::Body(decode_beginning(*coded, bytes, LARGEST_BODY).0.into()),
            },
        };
        let tokenizer = if is_urgent { None } else { TOKENIZER.as_ref() };
        Used::Known(match tokenizer {
            Some(tokenizer) => estimate(self.said, &request, &self.kept, tokenizer),
            None => estimate(self.said, &request, &self.kept, &ByLength),
        })
    }
}

/// Loaded with the first estimate and kept: the allocator keeps its memory anyway.
static TOKENIZER: LazyLock<Option<Tokenizer>> = LazyLock::new(|| {
    Tokenizer::load()
        .inspect_err(|error| error!(%error, "tokens are estimated by length only"))
        .ok()
});

/// Request bodies over [`SMALL_BODY`] that are kept for an estimate, all calls together: of what
/// does not fit only the length is known.
const BODIES_KEPT: usize = 64 << 20;
/// Bodies up to so many bytes are kept beside the total.
const SMALL_BODY: usize = 64 << 10;
/// A compressed body is read no further than this.
const LARGEST_BODY: usize = 16 << 20;
/// Bytes that may wait for their estimate. What comes then stays unknown.
const WAITING: usize = 64 << 20;

/// Estimates what calls used, on a thread of its own that begins with the first.
///
/// A call that waits here is over for its client. Its row comes with it and goes into the record
/// with the estimate, so that nothing has to be put right afterwards.
pub struct Estimates {
    // std Mutex: held for a send, never across an await.
    desk: Mutex<Option<mpsc::Sender<Job>>>,
    waiting: Arc<AtomicUsize>,
    room: Arc<Semaphore>,
}

impl Default for Estimates {
    fn default() -> Estimates {
        Estimates {
            desk: Mutex::default(),
            waiting: Arc::default(),
            room: Arc::new(Semaphore::new(BODIES_KEPT)),
        }
    }
}

struct Job {
    row: Row,
    missing: Box<Missing>,
    _waiting: Waiting,
}

/// A job's share of the bytes that wait.
struct Waiting(Arc<AtomicUsize>, usize);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Estimates {
    /// Keeps a request for as long as it may be needed.
    fn keep(&self, bytes: &Bytes, encoding: Encoding) -> Asked {
        let mut room = None;
        if bytes.len() > SMALL_BODY {
            let wanted = u32::try_from(bytes.len()).ok();
            room = wanted.and_then(|bytes| self.room.clone().try_acquire_many_owned(bytes).ok());
            if room.is_none() {
                return Asked::Length(bytes.len() as u64);
            }
        }
        Asked::Whole {
            // Else it would pin the connection's read buffer.
            bytes: own_bytes(bytes.clone()),
            encoding,
            _room: room,
        }
    }

    /// Completes `row` and drops it, soon.
    pub fn complete(&self, mut row: Row, missing: Box<Missing>) {
        row.close();
        row.usage(Used::Unknown);
        let bytes = missing.bytes();
        let waiting = self.waiting.fetch_add(bytes, Ordering::Relaxed);
        let job = Job {
            row,
            missing,
            _waiting: Waiting(self.waiting.clone(), bytes),
        };
        if waiting + bytes > WAITING {
            warn!(call.id = %job.row.id(), "too much waits for its estimate: what this call used stays unknown");
            return;
        }
        let mut desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &*desk {
            Some(sender) => sender,
            None => match start() {
                Some(sender) => desk.insert(sender),
                None => return,
            },
        };
        // The thread outlives the sender.
        let _ = sender.send(job);
    }
}

/// The thread ends with the last sender.
fn start() -> Option<mpsc::Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let work = move || {
        for Job {
            mut row, missing, ..
        } in jobs
        {
            let used = catch_unwind(AssertUnwindSafe(|| missing.estimate(row.is_urgent())));
            row.usage(used.unwrap_or_else(|_| {
                error!(call.id = %row.id(), "an estimate ended in a panic");
                Used::Unknown
            }));
        }
    };
    let started = std::thread::Builder::new()
        .name("estimates".to_owned())
        .spawn(work);
    started
        .inspect_err(|error| error!(%error, "no thread for estimates"))
        .ok()?;
    Some(sender)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Bench;
    use super::*;

    fn missing(answer: &'static [u8]) -> Box<Missing> {
        let mut kept = Kept::new(Route::ChatCompletions, Framing::Json, Encoding::Identity);
        kept.push(&Bytes::from_static(answer));
        Box::new(Missing {
            said: None,
            asked: Asked::Length(8),
            kept,
        })
    }

    #[tokio::test]
    async fn what_would_wait_past_the_limit_stays_unknown() {
        let bench = Bench::new();
        let estimates = &bench.core.estimates;
        let answer = br#"{"choices":[{"message":{"content":"hi"}}]}"#;
        estimates.waiting.store(WAITING, Ordering::Relaxed);
        estimates.complete(bench.row(), missing(answer));
        let row = &bench.rows().await[0];
        assert_eq!(row.account.usage_basis, None);
        assert_eq!(estimates.waiting.load(Ordering::Relaxed), WAITING);

        estimates.waiting.store(0, Ordering::Relaxed);
        let row = bench.row();
        let id = row.id().to_string();
        estimates.complete(row, missing(answer));
        let rows = bench.rows().await;
        let row = rows.iter().find(|row| row.id == id).expect("its row");
        assert_eq!(row.account.usage_basis.as_deref(), Some("estimated"));
        let tokens = (row.account.input_tokens, row.account.output_tokens);
        assert_eq!(tokens, (Some(2), Some(1)));
    }

    #[tokio::test]
    async fn large_bodies_have_room_together_and_no_more() {
        let estimates = Estimates::default();
        let large = Bytes::from(vec![b' '; BODIES_KEPT / 2]);
        let keep = |bytes: &Bytes| estimates.keep(bytes, Encoding::Identity);
        let (one, two) = (keep(&large), keep(&large));
        let is_whole = |asked: &Asked| matches!(asked, Asked::Whole { .. });
        assert!(is_whole(&one) && is_whole(&two));
        let length = large.len() as u64;
        assert!(matches!(keep(&large), Asked::Length(known) if known == length));
        // Small ones always have.
        assert!(is_whole(&keep(&large.slice(..SMALL_BODY))));
        drop(one);
        assert!(is_whole(&keep(&large)));
    }
}
