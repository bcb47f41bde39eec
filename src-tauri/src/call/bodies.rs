//! A copy of what a call asked and was answered, where a person wants that kept (`log.bodies`).
//!
//! Taken on the side and bounded; decoded and with its keys taken out before it leaves the call.

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;

use super::identify::UpstreamRequest;
use super::read_body::RequestBody;
use super::redact::Secrets;
use crate::policy::tap::{Encoding, decode_beginning};
use crate::settings::BodyLog;
use crate::store::bodies::{Body, MAX_BODY};
use crate::store::{CallStart, Outcome};

/// What a call asks and is answered, as it goes.
pub struct BodyCopy {
    errors_only: bool,
    request: Half,
    response: Half,
}

/// One direction: its beginning, as it came.
#[derive(Default)]
struct Half {
    encoding: Encoding,
    bytes: Vec<u8>,
    /// There was more.
    cut: bool,
}

impl BodyCopy {
    /// Begins a copy if any is wanted. A request that streams through unread is not in it.
    pub fn begin(wanted: BodyLog, request: &UpstreamRequest) -> Option<BodyCopy> {
        let errors_only = match wanted {
            BodyLog::Off => return None,
            BodyLog::Errors => true,
            BodyLog::All => false,
        };
        let mut asked = Half::of(&request.headers);
        match &request.body {
            RequestBody::Whole { bytes, .. } => asked.add(bytes),
            RequestBody::Streamed { .. } => asked.cut = true,
        }
        Some(BodyCopy {
            errors_only,
            request: asked,
            response: Half::default(),
        })
    }

    /// The answer's head has come.
    pub fn head(&mut self, headers: &HeaderMap) {
        self.response = Half::of(headers);
    }

    /// More of the answer has come.
    pub fn chunk(&mut self, chunk: &Bytes) {
        self.response.add(chunk);
    }

    /// What is to be kept of a call that ended so.
    pub fn end(self, call: &CallStart, outcome: Outcome, secrets: &Secrets) -> Option<Body> {
        if self.errors_only && !outcome.is_error() {
            return None;
        }
        let (request, request_cut) = self.request.readable(secrets);
        let (response, response_cut) = self.response.readable(secrets);
        Some(Body {
            id: call.id,
            started: call.started,
            key: call.key,
            request,
            request_cut,
            response: vec![response],
            response_cut,
        })
    }
}

impl Half {
    fn of(headers: &HeaderMap) -> Half {
        let encoding = headers.get(CONTENT_ENCODING);
        let encoding = encoding.and_then(|value| value.to_str().ok());
        Half {
            encoding: encoding.map_or(Encoding::Identity, Encoding::of),
            ..Half::default()
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        let room = MAX_BODY - self.bytes.len();
        self.cut |= bytes.len() > room;
        self.bytes
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Decoded, since no key can be found in what is compressed, and without keys.
    fn readable(self, secrets: &Secrets) -> (Bytes, bool) {
        let (bytes, is_whole) = match self.encoding {
            Encoding::Identity => (self.bytes, true),
            encoding => decode_beginning(encoding, &self.bytes, MAX_BODY),
        };
        let bytes = match secrets.redact_bytes(&bytes) {
            Some(clean) => clean,
            None => bytes,
        };
        (bytes.into(), self.cut || !is_whole)
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::io::Write as _;

    use http::{HeaderValue, Method};

    use super::*;
    use crate::clock::WallTime;
    use crate::provider::Provider;
    use crate::settings::{Overrides, Settings};
    use crate::store::{Billing, CallId, DedupLabel};

    fn call() -> CallStart {
        CallStart {
            id: CallId(ulid::Ulid::nil()),
            started: WallTime(0),
            provider: "openai".into(),
            route: Cow::Borrowed("chat/completions"),
            model: None,
            tool: "test".into(),
            billing: Billing::Metered,
            streaming: false,
            dedup: DedupLabel::Miss,
            key: None,
            reserved: None,
        }
    }

    fn request(body: &'static [u8], encoding: Option<&'static str>) -> UpstreamRequest {
        let mut headers = HeaderMap::new();
        headers.insert(
            "authorization",
            HeaderValue::from_static("Bearer sk-canary-0123456789"),
        );
        if let Some(encoding) = encoding {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(encoding));
        }
        UpstreamRequest {
            method: Method::POST,
            url: "https://api.openai.com/v1/chat/completions"
                .parse()
                .unwrap(),
            headers,
            body: RequestBody::Whole {
                bytes: Bytes::from_static(body),
                held: None,
            },
        }
    }

    fn secrets(request: &UpstreamRequest) -> Secrets {
        let settings = Settings::parse("", &Overrides::default()).unwrap();
        let provider = Provider::new(settings.provider("openai").unwrap().clone());
        Secrets::of(&provider, &request.headers, None)
    }

    fn gzipped(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn keys_are_taken_out_of_both_directions_compressed_ones_too() {
        let asked = request(b"{\"my key\":\"sk-canary-0123456789\"}", None);
        let mut copy = BodyCopy::begin(BodyLog::All, &asked).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        copy.head(&headers);
        // In pieces, as it may come.
        for piece in gzipped(b"you sent sk-canary-0123456789").chunks(7) {
            copy.chunk(&Bytes::copy_from_slice(piece));
        }
        let body = copy
            .end(&call(), Outcome::Completed, &secrets(&asked))
            .unwrap();
        assert_eq!(body.request, "{\"my key\":\"[key]\"}");
        assert_eq!(body.response, ["you sent [key]"]);
        assert!(!body.request_cut && !body.response_cut);
    }

    #[test]
    fn only_what_is_wanted_is_kept() {
        let asked = request(b"{}", None);
        assert!(BodyCopy::begin(BodyLog::Off, &asked).is_none());
        for (outcome, is_kept) in [(Outcome::Completed, false), (Outcome::UpstreamError, true)] {
            let copy = BodyCopy::begin(BodyLog::Errors, &asked).unwrap();
            let body = copy.end(&call(), outcome, &secrets(&asked));
            assert_eq!(body.is_some(), is_kept, "{outcome:?}");
        }
    }

    #[test]
    fn what_is_too_long_or_broken_is_marked_as_cut() {
        let asked = request(b"{}", None);
        let mut copy = BodyCopy::begin(BodyLog::All, &asked).unwrap();
        let piece = Bytes::from(vec![b'x'; MAX_BODY / 2 + 1]);
        copy.chunk(&piece);
        copy.chunk(&piece);
        let body = copy
            .end(&call(), Outcome::Completed, &secrets(&asked))
            .unwrap();
        assert_eq!(body.response[0].len(), MAX_BODY);
        assert!(body.response_cut && !body.request_cut);

        let asked = request(b"this is no gzip", Some("gzip"));
        let copy = BodyCopy::begin(BodyLog::All, &asked).unwrap();
        let body = copy
            .end(&call(), Outcome::Completed, &secrets(&asked))
            .unwrap();
        assert!(body.request.is_empty() && body.request_cut);
    }
}
