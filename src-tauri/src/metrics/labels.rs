//! The labels of each metric: what they say, and what of them is given up when there are too many.
//!
//! Two sets that would be written alike are equal: a series that stands twice in the text makes
//! Prometheus drop the whole of it.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, LazyLock};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

use super::series::Labels;
use crate::store::{CallEnd, CallStart, DedupLabel, Outcome};

/// What a label reads whose value has no series of its own, and the route of calls whose route has
/// no name.
const OTHER: &str = "other";
/// The same as a shared string: handing it out allocates nothing.
static OTHER_NAME: LazyLock<Arc<str>> = LazyLock::new(|| OTHER.into());
/// An empty value is no label, as Prometheus sees it.
static NO_NAME: LazyLock<Arc<str>> = LazyLock::new(|| "".into());

/// Bytes of a client's name for a model that a label shows: twice what the longest model files are
/// called.
const NAME_BYTES: usize = 128;

/// What dedup can make of a call.
const DEDUP_LABELS: [DedupLabel; 4] = [
    DedupLabel::Miss,
    DedupLabel::Joined,
    DedupLabel::Cached,
    DedupLabel::Off,
];

/// A model's name as a label: cut, and without the control characters that Prometheus' parser
/// stumbles over (it takes a NUL for the end of the text).
pub fn shown_model(model: Option<&Arc<str>>) -> Arc<str> {
    let Some(model) = model else {
        return NO_NAME.clone();
    };
    if model.len() <= NAME_BYTES && !model.bytes().any(|byte| byte.is_ascii_control()) {
        return model.clone();
    }
    let shown = &model[..model.floor_char_boundary(NAME_BYTES)];
    shown.replace(|c: char| c.is_ascii_control(), "?").into()
}

/// A generation route's name. Other routes are known by method and path, which clients make up.
pub fn shown_route(start: &CallStart) -> &'static str {
    match &start.route {
        Cow::Borrowed(name) if !name.is_empty() => name,
        _ => OTHER,
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        self.as_str().encode(encoder)
    }
}

impl EncodeLabelValue for DedupLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        self.as_str().encode(encoder)
    }
}

/// The status that a client was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    Sent(u16),
    /// It left, or was cut off, before: `none`.
    NotSent,
    Other,
}

impl EncodeLabelValue for Status {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        match self {
            Status::Sent(code) => code.encode(encoder),
            Status::NotSent => "none".encode(encoder),
            Status::Other => OTHER.encode(encoder),
        }
    }
}

/// Labels of `traygate_requests_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Request {
    /// Empty for a call that was refused before its provider was known.
    provider: Arc<str>,
    route: &'static str,
    outcome: Outcome,
    status: Status,
}

impl Request {
    pub fn of(end: &CallEnd) -> Request {
        Request {
            provider: end.start.provider.clone(),
            route: shown_route(&end.start),
            outcome: end.outcome,
            status: end.status.map_or(Status::NotSent, Status::Sent),
        }
    }
}

impl Labels for Request {
    const OTHERS: usize = Outcome::ALL.len();

    fn other(&self) -> Request {
        Request {
            provider: OTHER_NAME.clone(),
            route: OTHER,
            outcome: self.outcome,
            status: Status::Other,
        }
    }
}

/// Labels of `traygate_request_duration_seconds`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Served {
    provider: Arc<str>,
    dedup: DedupLabel,
}

impl Served {
    pub fn of(end: &CallEnd) -> Served {
        Served {
            provider: end.start.provider.clone(),
            dedup: end.start.dedup,
        }
    }
}

impl Labels for Served {
    const OTHERS: usize = DEDUP_LABELS.len();

    fn other(&self) -> Served {
        Served {
            provider: OTHER_NAME.clone(),
            dedup: self.dedup,
        }
    }
}

/// Labels of `traygate_dedup_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Merged {
    provider: Arc<str>,
    result: DedupLabel,
}

impl Merged {
    pub fn of(end: &CallEnd) -> Merged {
        Merged {
            provider: end.start.provider.clone(),
            result: end.start.dedup,
        }
    }

    /// Every one of a provider's.
    pub fn all_of(provider: &Arc<str>) -> impl Iterator<Item = Merged> {
        DEDUP_LABELS.into_iter().map(|result| Merged {
            provider: provider.clone(),
            result,
        })
    }
}

impl Labels for Merged {
    const OTHERS: usize = DEDUP_LABELS.len();

    fn other(&self) -> Merged {
        Merged {
            provider: OTHER_NAME.clone(),
            result: self.result,
        }
    }
}

/// The label of what is counted by provider alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByProvider {
    provider: Arc<str>,
}

impl ByProvider {
    pub fn new(provider: &Arc<str>) -> ByProvider {
        ByProvider {
            provider: provider.clone(),
        }
    }
}

impl Labels for ByProvider {
    const OTHERS: usize = 1;

    fn other(&self) -> ByProvider {
        ByProvider::new(&OTHER_NAME)
    }
}

/// Labels of `traygate_breaker_state`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByBreaker {
    provider: Arc<str>,
    /// Empty for the provider's own breaker.
    model: Arc<str>,
}

impl ByBreaker {
    pub fn new(provider: &Arc<str>, model: Option<&Arc<str>>) -> ByBreaker {
        ByBreaker {
            provider: provider.clone(),
            model: shown_model(model),
        }
    }
}

impl Labels for ByBreaker {
    const OTHERS: usize = 1;

    fn other(&self) -> ByBreaker {
        ByBreaker {
            provider: OTHER_NAME.clone(),
            model: OTHER_NAME.clone(),
        }
    }
}

/// The label of `traygate_overhead_seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Spent {
    dedup: Way,
}

/// A call's way through Traygate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Way {
    /// It went upstream, or got a kept answer.
    Answered(DedupLabel),
    Refused,
}

impl Spent {
    /// `None` where the time inside Traygate cannot be told from other time: a joined call waits
    /// for its leader's queue and upstream, a tunnel for both its ends.
    pub fn of(end: &CallEnd) -> Option<Spent> {
        let dedup = end.start.dedup;
        let way = match (end.sent, end.upstream_ended) {
            (Some(_), Some(_)) => Way::Answered(dedup),
            (Some(_), None) => return None,
            (None, _) if dedup == DedupLabel::Joined => return None,
            (None, _) if dedup == DedupLabel::Cached => Way::Answered(dedup),
            (None, _) if end.outcome == Outcome::Refused => Way::Refused,
            (None, _) => return None,
        };
        Some(Spent { dedup: way })
    }
}

impl EncodeLabelValue for Way {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        let word = match self {
            Way::Answered(dedup) => dedup.as_str(),
            Way::Refused => "refused",
        };
        word.encode(encoder)
    }
}

/// What every metric of the GenAI conventions says of an upstream call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Operation {
    gen_ai_operation_name: &'static str,
    /// The provider's name in the settings. The shipped `openai` and `anthropic` are also the
    /// conventions' own names for them.
    gen_ai_provider_name: Arc<str>,
    gen_ai_request_model: Arc<str>,
}

impl Operation {
    /// `None` for calls that generate nothing.
    pub fn of(end: &CallEnd) -> Option<Operation> {
        Some(Operation {
            gen_ai_operation_name: operation_name(&end.start.route)?,
            gen_ai_provider_name: end.start.provider.clone(),
            gen_ai_request_model: shown_model(end.start.model.as_ref()),
        })
    }
}

/// The conventions' word for what a route does; `compact` is ours, they have none.
fn operation_name(route: &str) -> Option<&'static str> {
    Some(match route {
        "chat/completions" | "responses" | "messages" | "api/chat" => "chat",
        "completions" | "completion" | "api/generate" => "text_completion",
        "embeddings" | "api/embed" => "embeddings",
        "responses/compact" => "compact",
        _ => return None,
    })
}

impl Labels for Operation {
    const OTHERS: usize = 4;

    fn other(&self) -> Operation {
        Operation {
            gen_ai_operation_name: self.gen_ai_operation_name,
            gen_ai_provider_name: OTHER_NAME.clone(),
            gen_ai_request_model: OTHER_NAME.clone(),
        }
    }
}

/// The conventions' words for the two kinds of tokens; `input` is all of it, cached or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    Input,
    Output,
}

impl TokenType {
    pub const ALL: [TokenType; 2] = [TokenType::Input, TokenType::Output];
}

impl EncodeLabelValue for TokenType {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        let word = match self {
            TokenType::Input => "input",
            TokenType::Output => "output",
        };
        word.encode(encoder)
    }
}

/// Labels of `gen_ai_client_token_usage`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Used {
    #[prometheus(flatten)]
    operation: Operation,
    gen_ai_token_type: TokenType,
}

impl Used {
    pub fn of(operation: Operation, gen_ai_token_type: TokenType) -> Used {
        Used {
            operation,
            gen_ai_token_type,
        }
    }
}

impl Labels for Used {
    const OTHERS: usize = TokenType::ALL.len() * Operation::OTHERS;

    fn other(&self) -> Used {
        Used::of(self.operation.other(), self.gen_ai_token_type)
    }
}

/// Labels of `gen_ai_client_operation_duration_seconds`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Ended {
    #[prometheus(flatten)]
    operation: Operation,
    error_type: ErrorType,
}

/// What went wrong with an upstream call: the conventions want the list documented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ErrorType {
    /// The label is empty.
    Nothing,
    /// The provider answered with this status, 400 or more.
    Status(u16),
    /// No answer came: `unreachable`.
    Unreachable,
    /// The word of the record: `timeout`, `broken_stream`, `client_left`, `stopped`,
    /// `internal_error`, or `upstream_error` for a success that held an error or nothing.
    Outcome(Outcome),
    /// The conventions' word for the rest.
    Other,
}

impl EncodeLabelValue for ErrorType {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        match self {
            ErrorType::Nothing => "".encode(encoder),
            ErrorType::Status(code) => code.encode(encoder),
            ErrorType::Unreachable => "unreachable".encode(encoder),
            ErrorType::Outcome(outcome) => EncodeLabelValue::encode(outcome, encoder),
            ErrorType::Other => "_OTHER".encode(encoder),
        }
    }
}

impl Ended {
    pub fn of(operation: Operation, end: &CallEnd) -> Ended {
        let error_type = match (end.outcome, end.head, end.status) {
            (Outcome::Completed, ..) => ErrorType::Nothing,
            (Outcome::UpstreamError, None, _) => ErrorType::Unreachable,
            (Outcome::UpstreamError, Some(_), Some(code @ 400..)) => ErrorType::Status(code),
            (outcome, ..) => ErrorType::Outcome(outcome),
        };
        Ended {
            operation,
            error_type,
        }
    }
}

impl Labels for Ended {
    /// With an error and without.
    const OTHERS: usize = 2 * Operation::OTHERS;

    fn other(&self) -> Ended {
        Ended {
            operation: self.operation.other(),
            error_type: match self.error_type {
                ErrorType::Nothing => ErrorType::Nothing,
                _ => ErrorType::Other,
            },
        }
    }
}
