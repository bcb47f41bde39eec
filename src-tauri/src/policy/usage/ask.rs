//! Asks for usage where a stream would come without it, as text put into the request.

use bytes::Bytes;

use crate::policy::fingerprint::RequestFacts;
use crate::policy::routing::Route;

/// A request for usage, as the one change to a body: text put in, or put in a `null`'s place. All
/// other bytes stay as and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splice {
    at: usize,
    /// Bytes from `at` on that the text replaces.
    replaced: usize,
    text: &'static str,
}

const NULL_BYTES: usize = "null".len();

impl Splice {
    /// The change that a chat stream needs, as `facts` were read off its whole, uncompressed body.
    ///
    /// `None` where nothing is to be asked: another route, no stream, a body that is no complete
    /// JSON object, or a choice that the client has made itself, be it true, false or nonsense.
    /// A `null` is no choice. `stream_options` that are there stay, with one member more.
    pub fn of(route: Route, facts: &RequestFacts) -> Option<Self> {
        let asked_for_stream = facts.is_object && facts.stream == Some(true);
        if route != Route::ChatCompletions || !asked_for_stream {
            return None;
        }
        let insert = |at, text| Self {
            at,
            replaced: 0,
            text,
        };
        let replace_null = |at, text| Self {
            at,
            replaced: NULL_BYTES,
            text,
        };
        if let Some(at) = facts.include_usage_null {
            return Some(replace_null(at, "true"));
        }
        if facts.has_include_usage {
            return None;
        }
        if let Some(at) = facts.stream_options_object {
            let text = if facts.stream_options_empty {
                r#""include_usage":true"#
            } else {
                r#""include_usage":true,"#
            };
            return Some(insert(at, text));
        }
        if let Some(at) = facts.stream_options_null {
            return Some(replace_null(at, r#"{"include_usage":true}"#));
        }
        if facts.has_stream_options {
            return None;
        }
        // A body that asks for a stream is not empty, so something follows.
        facts
            .object_open
            .map(|at| insert(at, r#""stream_options":{"include_usage":true},"#))
    }

    /// The changed body.
    pub fn apply(self, body: &[u8]) -> Bytes {
        let (before, rest) = body.split_at(self.at);
        [before, self.text.as_bytes(), &rest[self.replaced..]]
            .concat()
            .into()
    }

    /// The body that [`apply`](Self::apply) has changed.
    pub fn undo(self, changed: &[u8]) -> Bytes {
        let (before, rest) = changed.split_at(self.at);
        [before, &b"null"[..self.replaced], &rest[self.text.len()..]]
            .concat()
            .into()
    }
}

/// Whether an error answer refuses the request for usage, so that the call is to be made once more
/// without it: a 400 or 422 that names what was put in. The body may be cut short.
///
/// Mistral: `"loc":["body","stream_options","include_usage"]`; others:
/// `Unrecognized request argument supplied: stream_options`.
pub fn is_refusal(status: u16, body: &[u8]) -> bool {
    // The client has named neither, or nothing would have been put in.
    let names = |word: &str| memchr::memmem::find(body, word.as_bytes()).is_some();
    matches!(status, 400 | 422) && (names("stream_options") || names("include_usage"))
}

/// Whether a request header vouches for the body's bytes: a request that has one stays as it is.
/// `name` is in lower case.
pub fn vouches_for_body(name: &str) -> bool {
    matches!(
        name,
        "content-digest"
            | "repr-digest"
            | "digest"
            | "content-md5"
            | "signature"
            | "signature-input"
            | "x-amz-content-sha256"
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::fingerprint::RequestScan;

    fn splice(route: Route, body: &str) -> Option<String> {
        let mut scan = RequestScan::new();
        scan.feed(body.as_bytes());
        let splice = Splice::of(route, &scan.finish())?;
        let spliced = splice.apply(body.as_bytes());
        assert_eq!(splice.undo(&spliced), body);
        Some(String::from_utf8(spliced.into()).expect("text put into text"))
    }

    #[test]
    fn every_form_of_stream_options() {
        for (body, expected) in [
            (
                r#"{"model":"m","stream":true}"#,
                Some(r#"{"stream_options":{"include_usage":true},"model":"m","stream":true}"#),
            ),
            (
                "\u{feff} \r\n{ \"stream\" : true }\n",
                Some(
                    "\u{feff} \r\n{\"stream_options\":{\"include_usage\":true}, \"stream\" : true }\n",
                ),
            ),
            (
                r#"{"stream":true,"stream_options":{}}"#,
                Some(r#"{"stream":true,"stream_options":{"include_usage":true}}"#),
            ),
            (
                r#"{"stream_options": { } ,"stream":true}"#,
                Some(r#"{"stream_options": {"include_usage":true } ,"stream":true}"#),
            ),
            (
                r#"{"stream":true,"stream_options":{ "include_obfuscation":false}}"#,
                Some(
                    r#"{"stream":true,"stream_options":{"include_usage":true, "include_obfuscation":false}}"#,
                ),
            ),
            (
                r#"{"stream":true,"stream_options": null }"#,
                Some(r#"{"stream":true,"stream_options": {"include_usage":true} }"#),
            ),
            (
                r#"{"stream":true,"stream_options":{"a":1,"include_usage": null}}"#,
                Some(r#"{"stream":true,"stream_options":{"a":1,"include_usage": true}}"#),
            ),
            // The last of equal keys is the one that counts.
            (
                r#"{"stream":false,"stream_options":{"include_usage":true},"stream":true,"stream_options":{"a":1}}"#,
                Some(
                    r#"{"stream":false,"stream_options":{"include_usage":true},"stream":true,"stream_options":{"include_usage":true,"a":1}}"#,
                ),
            ),
            (
                r#"{"stream":true,"stream_options":{"include_usage":true},"stream_options":null}"#,
                Some(
                    r#"{"stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}"#,
                ),
            ),
            // Escaped keys are keys.
            (
                r#"{"stream":true,"stream_opt\u0069ons":{"a":1}}"#,
                Some(r#"{"stream":true,"stream_opt\u0069ons":{"include_usage":true,"a":1}}"#),
            ),
            // The client's own choice.
            (
                r#"{"stream":true,"stream_options":{"include_usage":false}}"#,
                None,
            ),
            (
                r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
                None,
            ),
            (
                r#"{"stream":true,"stream_options":{"include_us\u0061ge":true}}"#,
                None,
            ),
            (
                r#"{"stream":true,"stream_options":{"include_usage":"no"}}"#,
                None,
            ),
            (r#"{"stream":true,"stream_options":"x"}"#, None),
            (r#"{"stream":true,"stream_options":[]}"#, None),
            // No stream, or no request.
            (r#"{"model":"m"}"#, None),
            (r#"{"stream":false}"#, None),
            (r#"{"stream":true,"stream":null}"#, None),
            (r#"{"stream":true"#, None),
            (r#"[{"stream":true}]"#, None),
            (r#"{"stream":true} {"stream":true}"#, None),
        ] {
            let spliced = splice(Route::ChatCompletions, body);
            assert_eq!(spliced.as_deref(), expected, "{body}");
            for other in [Route::Completions, Route::Responses, Route::Messages] {
                assert_eq!(splice(other, body), None, "{body}");
            }
        }
    }

    #[test]
    fn refusals_name_what_was_put_in() {
        let mistral = br#"{"object":"error","message":{"detail":[{"type":"extra_forbidden","loc":["body","stream_options","include_usage"],"msg":"Extra inputs are not permitted","input":true}]},"type":"invalid_request_error","param":null,"code":null}"#;
        let other = br#"{"error":{"message":"Unrecognized request argument supplied: stream_options","type":"invalid_request_error","param":null,"code":null}}"#;
        let unrelated = br#"{"error":{"message":"Unsupported parameter: 'temperature'"}}"#;
        assert!(is_refusal(422, mistral));
        assert!(is_refusal(400, mistral) && is_refusal(400, other));
        assert!(!is_refusal(400, unrelated));
        assert!(!is_refusal(500, mistral) && !is_refusal(200, mistral) && !is_refusal(429, other));
    }

    proptest! {
        /// What the provider reads is the client's request, with usage asked for.
        #[test]
        fn only_the_one_member_changes(
            before in prop::collection::vec(("[a-z]{1,4}", any::<i32>()), 0..4),
            options in prop_oneof![
                Just(None),
                Just(Some(Value::Null)),
                prop::collection::hash_map("[a-z]{1,4}", any::<bool>(), 0..3)
                    .prop_map(|members| Some(json!(members))),
            ],
            blank in prop::sample::select(vec!["", " ", "\r\n\t"]),
        ) {
            let mut members: Vec<String> = before
                .iter()
                .map(|(name, value)| format!("{blank}\"x{name}\"{blank}:{value}"))
                .collect();
            members.push(format!("{blank}\"stream\":{blank}true"));
            if let Some(options) = &options {
                members.push(format!("\"stream_options\"{blank}:{blank}{options}{blank}"));
            }
            let body = format!("{blank}{{{}{blank}}}", members.join(","));
            let spliced = splice(Route::ChatCompletions, &body).expect("nothing was chosen");

            let mut expected: Value = serde_json::from_str(&body).expect("valid");
            expected["stream_options"]["include_usage"] = json!(true);
            prop_assert_eq!(serde_json::from_str::<Value>(&spliced).expect("valid"), expected);
        }
    }
}
