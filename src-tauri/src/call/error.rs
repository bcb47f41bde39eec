//! What Traygate itself answers when a call cannot go on: typed where it arises, put into a
//! status, a code and a dialect here and nowhere else.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::json;

use super::budget::BudgetExceeded;
use crate::policy::routing::{Dialect, Route};
use crate::settings::{InForce, Setting};
use crate::store::Outcome;

/// Names the error in a header too, since not every dialect has a place for a code.
pub const ERROR_HEADER: HeaderName = HeaderName::from_static("x-traygate-error");

/// Why Traygate itself ended a call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallError {
    #[error(
        "requests for the host {0:?} are refused, so that no web page can reach this proxy under a name of its own; call 127.0.0.1 or localhost, or add the name to server.allowed_hosts"
    )]
    HostForbidden(String),
    #[error(
        "requests from the web origin {0:?} are refused, so that no web page can spend your keys; if it is yours, add it to server.allowed_origins"
    )]
    OriginForbidden(String),
    #[error(
        "off loopback an access token is needed: set one with `traygate key set access-token` and send it as the tool's API key or in the path, /t/TOKEN/…"
    )]
    AccessDenied,
    #[error(
        "provider {0:?} has key = \"keyring\", and no key is stored for it: run `traygate key set {0}`{1}"
    )]
    NoKey(Arc<str>, String),
    #[error("{0}")]
    BadRequest(String),
    #[error("{0}")]
    TooLarge(String),
    #[error("the connection broke while the request's body came")]
    UploadBroke,
    #[error(
        "the request's body stopped coming for {} before it was whole ({setting})",
        seconds(*limit)
    )]
    UploadStalled {
        limit: Duration,
        setting: Cow<'static, str>,
    },
    #[error("this call was stopped by hand, in Traygate")]
    Stopped,
    #[error(
        "all calls are refused for now (mode \"refuse\"); to go on, set the mode back to \"normal\" where it was set (POST /traygate/api/mode)"
    )]
    ModeRefuse,
    #[error(
        "there is no provider {word:?} here; there are {known}. Add it as a [[provider]] in config.toml, or correct the address"
    )]
    NoProvider { word: String, known: String },
    #[error(
        "WebSockets are not proxied on this route, so that its calls can be guarded and counted: send it as a plain HTTP POST"
    )]
    UpgradeRequired,
    #[error(
        "{provider} has {limit} calls waiting, which is as many as may ({queue}); try again later, or raise it or {concurrency}",
        queue = in_force.name(Setting::Queue),
        concurrency = in_force.name(Setting::Concurrency)
    )]
    QueueFull {
        provider: Arc<str>,
        limit: usize,
        in_force: InForce,
        retry_after: Duration,
    },
    #[error(
        "the call waited {} for one of {provider}'s {concurrency} places ({queue_secs}); raise {places} or {queue_secs}",
        seconds(*waited),
        queue_secs = in_force.name(Setting::QueueSecs),
        places = in_force.name(Setting::Concurrency)
    )]
    QueueTimeout {
        provider: Arc<str>,
        concurrency: usize,
        waited: Duration,
        in_force: InForce,
        retry_after: Duration,
    },
    #[error("{subject} keeps failing, so calls to it are refused for now: {last_error}. {next}")]
    BreakerOpen {
        /// The provider, or its one model that is overloaded.
        subject: String,
        last_error: String,
        next: String,
        retry_after: Duration,
    },
    #[error("{0}")]
    BudgetExceeded(Arc<BudgetExceeded>),
    #[error(
        "calls to {subject} are refused: its breaker is held open by hand, in Traygate. Release it there to go on"
    )]
    BreakerHeld {
        subject: String,
        retry_after: Duration,
    },
    #[error(
        "{provider} cannot be reached: {reason}. Check that it runs and that base_url is right"
    )]
    UpstreamUnreachable { provider: Arc<str>, reason: String },
    #[error("{provider} took the call and gave no answer that can be read: {reason}")]
    UpstreamGarbled { provider: Arc<str>, reason: String },
    #[error("{provider} did not {what} within {} ({setting})", seconds(*limit))]
    UpstreamTimeout {
        provider: Arc<str>,
        what: &'static str,
        limit: Duration,
        setting: Cow<'static, str>,
    },
    #[error("{provider}'s answer broke off: {reason}")]
    UpstreamBroke { provider: Arc<str>, reason: String },
    #[error(
        "a fault in Traygate ended this call; its log says more, and the call may be sent again"
    )]
    Internal,
}

/// Seconds as people write them: `0.25 s`, `5 s`.
fn seconds(span: Duration) -> String {
    format!("{} s", span.as_secs_f64())
}

impl CallError {
    /// The code that clients and the UI match; it never changes with the wording.
    pub fn code(&self) -> &'static str {
        match self {
            CallError::HostForbidden(_) | CallError::OriginForbidden(_) => "origin_forbidden",
            CallError::AccessDenied | CallError::NoKey(..) => "access_denied",
            CallError::BadRequest(_)
            | CallError::TooLarge(_)
            | CallError::UploadBroke
            | CallError::UploadStalled { .. } => "bad_request",
            CallError::Stopped => "stopped",
            CallError::ModeRefuse => "mode_refuse",
            CallError::NoProvider { .. } => "no_provider",
            CallError::UpgradeRequired => "upgrade_required",
            CallError::QueueFull { .. } => "queue_full",
            CallError::QueueTimeout { .. } => "queue_timeout",
            CallError::BreakerOpen { .. } | CallError::BreakerHeld { .. } => "breaker_open",
            CallError::BudgetExceeded(_) => "budget_exceeded",
            CallError::UpstreamUnreachable { .. } | CallError::UpstreamGarbled { .. } => {
                "upstream_unreachable"
            }
            CallError::UpstreamTimeout { .. } => "upstream_timeout",
            CallError::UpstreamBroke { .. } => "upstream_broke",
            CallError::Internal => "internal_error",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            CallError::HostForbidden(_) | CallError::OriginForbidden(_) => StatusCode::FORBIDDEN,
            CallError::AccessDenied | CallError::NoKey(..) => StatusCode::UNAUTHORIZED,
            CallError::BadRequest(_) | CallError::UploadBroke => StatusCode::BAD_REQUEST,
            CallError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            CallError::UploadStalled { .. } => StatusCode::REQUEST_TIMEOUT,
            CallError::NoProvider { .. } => StatusCode::NOT_FOUND,
            CallError::UpgradeRequired => StatusCode::UPGRADE_REQUIRED,
            CallError::Stopped => client_closed_request(),
            CallError::BudgetExceeded(_) => StatusCode::PAYMENT_REQUIRED,
            CallError::ModeRefuse
            | CallError::QueueFull { .. }
            | CallError::QueueTimeout { .. }
            | CallError::BreakerOpen { .. }
            | CallError::BreakerHeld { .. } => StatusCode::SERVICE_UNAVAILABLE,
            CallError::UpstreamUnreachable { .. }
            | CallError::UpstreamGarbled { .. }
            | CallError::UpstreamBroke { .. } => StatusCode::BAD_GATEWAY,
            CallError::UpstreamTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            CallError::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// What the record says of a call that this ended.
    pub fn outcome(&self) -> Outcome {
        match self {
            CallError::UpstreamUnreachable { .. } | CallError::UpstreamGarbled { .. } => {
                Outcome::UpstreamError
            }
            CallError::UpstreamTimeout { .. } => Outcome::Timeout,
            CallError::UpstreamBroke { .. } => Outcome::BrokenStream,
            CallError::UploadBroke => Outcome::ClientLeft,
            CallError::Internal => Outcome::InternalError,
            CallError::Stopped => Outcome::Stopped,
            _ => Outcome::Refused,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            CallError::QueueFull { retry_after, .. }
            | CallError::QueueTimeout { retry_after, .. }
            | CallError::BreakerOpen { retry_after, .. }
            | CallError::BreakerHeld { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// True where an SDK's own retries would only make things worse.
    fn forbids_retry(&self) -> bool {
        matches!(
            self,
            CallError::BreakerOpen { .. }
                | CallError::BudgetExceeded(_)
                | CallError::BreakerHeld { .. }
                | CallError::ModeRefuse
                | CallError::Stopped
        )
    }

    /// A budget refused another tool's call: this tool's may have something left.
    pub fn concerns_another(&self, tool: &str) -> bool {
        matches!(self, CallError::BudgetExceeded(exceeded) if *exceeded.tool != *tool)
    }

    /// The sentence a person reads.
    pub fn message(&self) -> String {
        format!("Traygate: {self}")
    }

    /// The whole answer in the dialect of the path.
    pub fn response(&self, dialect: Dialect, request_id: &str) -> Response<Bytes> {
        let mut body = match dialect {
            Dialect::OpenAi => json!({
                "error": {
                    "message": self.message(),
                    "type": openai_type(self.status()),
                    "code": self.code(),
                    "param": null,
                }
            }),
            Dialect::Anthropic => json!({
                "type": "error",
                "error": {
                    "type": anthropic_type(self.status()),
                    "message": self.message(),
                    "code": self.code(),
                },
                "request_id": request_id,
            }),
            Dialect::Ollama => json!({ "error": self.message() }),
        };
        if let CallError::BudgetExceeded(exceeded) = self {
            // Where the dialect has no object for errors, beside the text.
            let place = match dialect {
                Dialect::OpenAi | Dialect::Anthropic => &mut body["error"],
                Dialect::Ollama => &mut body,
            };
            place["budget"] = exceeded.as_json();
        }
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ERROR_HEADER, HeaderValue::from_static(self.code()));
        if let Some(wait) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if self.forbids_retry() {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if matches!(self, CallError::UpgradeRequired) {
            headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The event that tells a client in mid-stream, complete with its blank line.
    pub fn stream_event(&self, route: Route, dialect: Dialect) -> Bytes {
        let (name, body) = match (route, dialect) {
            (_, Dialect::Anthropic) => (
                "event: error\n",
                json!({
                    "type": "error",
                    "error": {
                        "type": anthropic_type(self.status()),
                        "message": self.message(),
                        "code": self.code(),
                    },
                }),
            ),
            // The published shape has its fields at the top; the official SDKs raise on `error`.
            (Route::Responses | Route::ResponsesCompact, _) => (
                "event: error\n",
                json!({
                    "type": "error",
                    "code": self.code(),
                    "message": self.message(),
                    "param": null,
                    "error": {
                        "message": self.message(),
                        "type": openai_type(self.status()),
                        "code": self.code(),
                        "param": null,
                    },
                }),
            ),
            (_, Dialect::OpenAi | Dialect::Ollama) => (
                "",
                json!({
                    "error": {
                        "message": self.message(),
                        "type": openai_type(self.status()),
                        "code": self.code(),
                        "param": null,
                    }
                }),
            ),
        };
        Bytes::from(format!("{name}data: {body}\n\n"))
    }
}

/// nginx's 499: the caller's own side wants no answer any more. No SDK retries it.
pub fn client_closed_request() -> StatusCode {
    StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST)
}

/// Rounded up, since a client that comes a moment early is refused again; at least one.
pub fn whole_seconds(span: Duration) -> u64 {
    (span.as_secs() + u64::from(span.subsec_nanos() > 0)).max(1)
}

/// OpenAI's `error.type` values.
fn openai_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        // What OpenAI calls a cap of its own.
        402 => "insufficient_quota",
        403 => "permission_error",
        400..500 => "invalid_request_error",
        _ => "server_error",
    }
}

/// Anthropic's `error.type` values, by their documented statuses.
fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        400..500 => "invalid_request_error",
        504 => "timeout_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> CallError {
        CallError::BreakerOpen {
            subject: "openai".into(),
            last_error: "503".into(),
            next: "The next try is in 3 s".into(),
            retry_after: Duration::from_millis(2100),
        }
    }

    #[test]
    fn speaks_the_dialect_of_the_path() {
        let parse = |dialect| -> serde_json::Value {
            serde_json::from_slice(open().response(dialect, "01ID").body()).unwrap()
        };
        let openai = parse(Dialect::OpenAi);
        assert_eq!(openai["error"]["code"], "breaker_open");
        assert_eq!(openai["error"]["type"], "server_error");
        assert!(openai["error"]["param"].is_null());
        let anthropic = parse(Dialect::Anthropic);
        assert_eq!(anthropic["type"], "error");
        assert_eq!(anthropic["error"]["type"], "api_error");
        assert_eq!(anthropic["request_id"], "01ID");
        assert!(
            parse(Dialect::Ollama)["error"]
                .as_str()
                .unwrap()
                .starts_with("Traygate: openai")
        );
    }

    #[test]
    fn a_refusal_says_when_and_forbids_the_sdks_own_retries() {
        let response = open().response(Dialect::OpenAi, "");
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "3");
        assert_eq!(response.headers()["x-should-retry"], "false");
        let timeout = CallError::UpstreamTimeout {
            provider: "openai".into(),
            what: "begin its answer",
            limit: Duration::from_secs(5),
            setting: "limits.timeout_secs".into(),
        };
        let response = timeout.response(Dialect::OpenAi, "");
        assert_eq!(response.status(), 504);
        assert!(!response.headers().contains_key("x-should-retry"));
    }
}
