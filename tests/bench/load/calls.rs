//! The calls the bench makes and the answers they must get, byte for byte.
//!
//! Each call carries a number of its own in its prompt, so no two bodies are
//! equal; the provider puts the number into every event it answers with, so no
//! answer can be taken for another's.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use memchr::memmem;

const MARK: &[u8] = b"bench/";
const NUMBER_DIGITS: usize = 16;
const STAMP: &str = "sent at ";

/// What kind of call a block is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// A plain chat completion, answered at once.
    Chat,
    /// The same with a tool in the request and a tool call in the answer.
    Tool,
    /// A stream of 20 content events, 10 ms apart.
    Stream,
    /// A stream whose every content event tells when it was sent.
    #[value(skip)]
    Stamped,
}

impl Workload {
    /// The word used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Tool => "tool",
            Self::Stream => "stream",
            Self::Stamped => "stamped",
        }
    }

    /// Whether the answer is an event stream.
    pub fn streams(self) -> bool {
        matches!(self, Self::Stream | Self::Stamped)
    }
}

/// How a stream is paced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Content events in the stream.
    pub events: u32,
    /// Milliseconds between two of them; the first comes at once.
    pub gap_ms: u32,
}

/// The stream of the overhead bench.
pub const STANDARD_PACE: Pace = Pace {
    events: 20,
    gap_ms: 10,
};

/// Numbers for calls, no two alike even between two runs against one record.
pub struct Numbers {
    run: u64,
    next: AtomicU64,
}

impl Numbers {
    /// Numbers that begin with this process's own start, in the upper half.
    pub fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seconds = now.map_or(0, |since| since.as_secs());
        Self {
            run: (seconds ^ u64::from(std::process::id()) << 16) << 32,
            next: AtomicU64::new(0),
        }
    }

    /// The next number, as it stands in the call.
    pub fn next(&self) -> String {
        format!(
            "{:0NUMBER_DIGITS$x}",
            self.run | self.next.fetch_add(1, Ordering::Relaxed)
        )
    }

    /// How many have been handed out.
    pub fn taken(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }
}

/// A request ready to be sent, save for its number.
pub struct Template {
    bytes: Vec<u8>,
    number_at: usize,
}

impl Template {
    /// The request of `workload` for a server at `address`.
    pub fn new(address: SocketAddr, workload: Workload, pace: Pace) -> Self {
        let body = request_body(workload, pace);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\naccept: application/json\r\n\
             content-type: application/json\r\nuser-agent: traygate-bench\r\n\
             authorization: Bearer sk-bench-0000000000000000\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body.as_bytes());
        let mark = memmem::find(&bytes, MARK).expect("every prompt holds the mark");
        Self {
            number_at: mark + MARK.len(),
            bytes,
        }
    }

    /// The request with `number` in its place.
    pub fn with(&mut self, number: &str) -> &[u8] {
        let place = self.number_at..self.number_at + NUMBER_DIGITS;
        self.bytes[place].copy_from_slice(number.as_bytes());
        &self.bytes
    }
}

fn request_body(workload: Workload, pace: Pace) -> String {
    let number = "0".repeat(NUMBER_DIGITS);
    let prompt = format!(
        "bench/{number}/{}/{}/{}/ Summarise the following release notes in two sentences for a \
         reader who has never used the product, and name the one change that matters most to them. \
         The listener now binds both loopbacks, a queue that is full answers at once, and streams \
         are passed on event by event as they come.",
        workload.name(),
        pace.events,
        pace.gap_ms
    );
    let messages = format!(
        r#"[{{"role":"system","content":"You are a careful technical writer."}},{{"role":"user","content":"{prompt}"}}]"#
    );
    let rest = match workload {
        Workload::Chat => r#","temperature":0.2,"max_tokens":256}"#,
        Workload::Stream | Workload::Stamped => {
            r#","temperature":0.2,"max_tokens":256,"stream":true}"#
        }
        Workload::Tool => concat!(
            r#","temperature":0.2,"max_tokens":256,"tool_choice":"auto","tools":[{"type":"function","function":"#,
            r#"{"name":"search_notes","description":"Searches the release notes of a product and returns the "#,
            r#"matching entries, newest first.","parameters":{"type":"object","properties":{"product":{"type":"#,
            r#""string","description":"The product's name."},"query":{"type":"string","description":"Words to "#,
            r#"look for."},"since":{"type":"string","description":"An ISO 8601 date."},"limit":{"type":"#,
            r#""integer","minimum":1,"maximum":50}},"required":["product","query"],"#,
            r#""additionalProperties":false}}}]}"#
        ),
    };
    format!(r#"{{"model":"gpt-4o-mini","messages":{messages}{rest}"#)
}

/// What the provider learns from a request's body.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    /// The call's number.
    pub number: String,
    /// What to answer with.
    pub workload: Workload,
    /// How to pace a stream.
    pub pace: Pace,
    /// Whether the stream ends with a usage event.
    pub usage: bool,
}

impl Asked {
    /// Reads the mark in the prompt; `None` if there is none.
    pub fn read(body: &[u8]) -> Option<Self> {
        let after = memmem::find(body, MARK)? + MARK.len();
        let window = &body[after..body.len().min(after + 64)];
        let mut words = std::str::from_utf8(window).ok()?.split('/');
        let number = words.next()?.to_owned();
        let workload = match words.next()? {
            "chat" => Workload::Chat,
            "tool" => Workload::Tool,
            "stream" => Workload::Stream,
            "stamped" => Workload::Stamped,
            _ => return None,
        };
        let pace = Pace {
            events: words.next()?.parse().ok()?,
            gap_ms: words.next()?.parse().ok()?,
        };
        let usage = memmem::find(body, br#""include_usage":true"#).is_some();
        Some(Self {
            number,
            workload,
            pace,
            usage,
        })
    }
}

/// The whole JSON answer to a call that does not stream.
pub fn json_answer(workload: Workload, number: &str) -> String {
    let choice = if workload == Workload::Tool {
        r#"{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"call_9f2c","type":"function","function":{"name":"search_notes","arguments":"{\"product\":\"traygate\",\"query\":\"loopback\"}"}}],"refusal":null},"logprobs":null,"finish_reason":"tool_calls"}"#
    } else {
        r#"{"index":0,"message":{"role":"assistant","content":"The proxy now listens on both loopbacks and refuses at once when its queue is full. What matters most: streams arrive event by event.","refusal":null},"logprobs":null,"finish_reason":"stop"}"#
    };
    format!(
        r#"{{"id":"chatcmpl-{number}","object":"chat.completion","created":1750000000,"model":"gpt-4o-mini-2024-07-18","choices":[{choice}],"usage":{{"prompt_tokens":92,"completion_tokens":31,"total_tokens":123,"prompt_tokens_details":{{"cached_tokens":0}},"completion_tokens_details":{{"reasoning_tokens":0}}}},"system_fingerprint":"fp_bench"}}"#
    )
}

/// The opening event of a stream, which carries the role and no content.
pub fn role_event(number: &str) -> String {
    event(number, r#"{"role":"assistant","content":""}"#, "null")
}

/// The content event at `index`.
pub fn content_event(number: &str, index: u32) -> String {
    event(
        number,
        &format!(r#"{{"content":"word{index:02} "}}"#),
        "null",
    )
}

/// A content event that tells when it was sent, in nanoseconds of the monotonic clock.
pub fn stamped_event(number: &str, nanos: u64) -> String {
    let delta = format!(r#"{{"content":"{STAMP}{nanos:020} "}}"#);
    event(number, &delta, "null")
}

/// When the event was sent, if it tells.
pub fn stamp_of(event: &[u8]) -> Option<u64> {
    let at = memmem::find(event, STAMP.as_bytes())? + STAMP.len();
    let digits = event.get(at..at + 20)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// All that follows the last content event.
pub fn closing_events(number: &str, usage: bool) -> String {
    let mut text = event(number, "{}", r#""stop""#);
    if usage {
        text.push_str(&format!(
            "data: {{\"id\":\"chatcmpl-{number}\",\"object\":\"chat.completion.chunk\",\
             \"created\":1750000000,\"model\":\"gpt-4o-mini-2024-07-18\",\"choices\":[],\
             \"usage\":{{\"prompt_tokens\":92,\"completion_tokens\":20,\"total_tokens\":112}}}}\n\n"
        ));
    }
    text.push_str("data: [DONE]\n\n");
    text
}

/// The whole stream as the client must see it, decoded.
pub fn stream_answer(number: &str, events: u32) -> String {
    let content: String = (0..events)
        .map(|index| content_event(number, index))
        .collect();
    role_event(number) + &content + &closing_events(number, false)
}

fn event(number: &str, delta: &str, finish: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-{number}\",\"object\":\"chat.completion.chunk\",\
         \"created\":1750000000,\"model\":\"gpt-4o-mini-2024-07-18\",\"choices\":[{{\"index\":0,\
         \"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
    )
}
