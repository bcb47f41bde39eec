//! Answers as providers send them, in every dialect: whole, byte by byte, at random splits,
//! with every line end, and compressed. However one arrives, it reads the same.

use std::io::Write;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use proptest::prelude::*;

use super::framing::PIECE_BYTES;
use super::*;

#[derive(Debug)]
struct Case {
    name: &'static str,
    route: Route,
    framing: Framing,
    status: u16,
    body: &'static str,
    end: End,
    /// Kind and message, where an error is expected.
    error: Option<(&'static str, &'static str)>,
}

const fn case(
    name: &'static str,
    route: Route,
    framing: Framing,
    end: End,
    body: &'static str,
) -> Case {
    Case {
        name,
        route,
        framing,
        status: 200,
        body,
        end,
        error: None,
    }
}

impl Case {
    const fn failing(self, kind: &'static str, message: &'static str) -> Self {
        Self {
            error: Some((kind, message)),
            ..self
        }
    }

    const fn status(self, status: u16) -> Self {
        Self { status, ..self }
    }
}

use Framing::{Json, Ndjson, Opaque, Sse};
use Route::{
    ChatCompletions, Completions, Embeddings, LlamaCompletion, Messages, OllamaChat, OllamaEmbed,
    OllamaGenerate, Responses, ResponsesCompact, UnknownPost,
};

const CASES: &[Case] = &[
    // ---- OpenAI chat, streamed ----
    case("chat: a plain answer with its usage chunk", ChatCompletions, Sse, End::Whole, r#"data: {"id":"c","object":"chat.completion.chunk","model":"gpt-5-2025-08-07","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"finish_reason":null}],"usage":null}

data: {"model":"gpt-5-2025-08-07","choices":[{"index":0,"delta":{"content":"Grüß dich 👋"},"finish_reason":null}],"usage":null}

data: {"model":"gpt-5-2025-08-07","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}

data: {"model":"gpt-5-2025-08-07","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}

data: [DONE]

"#),
    case("chat: Azure's first chunk, comments, no blank line at the end", ChatCompletions, Sse, End::Whole, r#": OPENROUTER PROCESSING

: keep-alive

data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0,"content_filter_results":{}}]}

data: {"choices":[{"content_filter_results":{},"delta":{"content":"Hi"},"finish_reason":null,"index":0,"logprobs":null}],"model":"gpt-4o"}

data: {"choices":[{"delta":{},"finish_reason":"stop","index":0}],"model":"gpt-4o"}

data: [DONE]"#),
    case("chat: no [DONE] after the finish reason", ChatCompletions, Sse, End::Whole, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}

"#),
    case("chat: tool calls", ChatCompletions, Sse, End::Whole, r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"t","type":"function","function":{"name":"f","arguments":""}}]},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}

data: [DONE]

"#),
    case("chat: reasoning only, both spellings at once", ChatCompletions, Sse, End::Whole, r#"data: {"choices":[{"delta":{"reasoning":"hm","reasoning_content":"hm","content":null},"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: two choices, one unfinished", ChatCompletions, Sse, End::Unknown, r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}

data: {"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":null}]}

data: {"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: two choices, one cut", ChatCompletions, Sse, End::Cut, r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"},{"index":1,"delta":{"content":"b"},"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: a choice nobody can have asked for", ChatCompletions, Sse, End::Unknown, r#"data: {"choices":[{"index":128,"delta":{"content":"a"},"finish_reason":"stop"}]}

"#),
    case("chat: cut at the length limit", ChatCompletions, Sse, End::Cut, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"length"}]}

data: [DONE]

"#),
    case("chat: content filter", ChatCompletions, Sse, End::Filtered, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"content_filter"}]}

data: [DONE]

"#),
    case("chat: a refusal", ChatCompletions, Sse, End::Refused, r#"data: {"choices":[{"index":0,"delta":{"refusal":"I cannot"},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: nothing was said", ChatCompletions, Sse, End::Empty, r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: truncated", ChatCompletions, Sse, End::Unknown, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}

data: {"choices":[{"index":0,"del"#),
    case("chat: [DONE] without a finish reason", ChatCompletions, Sse, End::Unknown, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}

data: [DONE]

"#),
    case("chat: a finish reason from tomorrow", ChatCompletions, Sse, End::Unknown, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"bored"}]}

"#),
    case("chat: OpenRouter fails half-way", ChatCompletions, Sse, End::Error, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}

data: {"id":"x","error":{"code":502,"message":"Provider returned error"},"choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}]}

data: [DONE]

"#).failing("502", "Provider returned error"),
    case("chat: an error event by its name", ChatCompletions, Sse, End::Error, r#"event: error
data: {"error":{"message":"The server had an error","type":"server_error","param":null,"code":null}}

"#).failing("server_error", "The server had an error"),
    case("chat: llama.cpp's error field in place of an event", ChatCompletions, Sse, End::Error, r#"data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}

error: {"code":500,"message":"context shift is disabled","type":"server_error"}

"#).failing("server_error", "context shift is disabled"),
    case("chat: fields that mean no error", ChatCompletions, Sse, End::Whole, r#"data: {"error":null,"choices":[{"index":0,"error":"","delta":{"content":"Hi"},"finish_reason":"stop"}]}

data: {"error":{},"choices":null}

"#),
    case("chat: data over several lines", ChatCompletions, Sse, End::Whole, r#"id: 7
retry: 3000
data: {"choices":[{"index":0,
data:"delta":{"content":"Hi"},
data: "finish_reason":"stop"}]}

data: [DONE]

"#),
    case("chat: a byte order mark, no space after the colon", ChatCompletions, Sse, End::Whole, "\u{feff}data:{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\ndata:[DONE]\n\n"),
    case("chat: Mistral's content in parts", ChatCompletions, Sse, End::Whole, r#"data: {"choices":[{"index":0,"delta":{"content":[{"type":"thinking","thinking":[]}]},"finish_reason":"stop"}]}

"#),
    case("chat: nothing at all", ChatCompletions, Sse, End::Empty, "\n\n: ping\n\n\n"),
    case("chat: not an event stream at all", ChatCompletions, Sse, End::Unknown, "<html>oops</html>\n"),
    case("chat: an event without its data", ChatCompletions, Sse, End::Error, "event: error\n\n")
        .failing("", ""),
    case("chat: an empty finish reason is none", ChatCompletions, Sse, End::Whole, r#"data: {"choices":[{"index":0,"delta":{"content":"H"},"finish_reason":""}]}

data: {"choices":[{"index":0,"delta":{"content":"i"},"finish_reason":"stop"}]}

"#),
    case("chat: odd types do not hide the end", ChatCompletions, Sse, End::Whole, r#"data: {"model":7,"choices":[{"index":"0","delta":{"content":"Hi","tool_calls":null,"audio":false},"finish_reason":"stop","text":null}],"usage":"none"}

"#),
    // ---- OpenAI chat and completions, at once ----
    case("chat: a whole answer after blank lines", ChatCompletions, Json, End::Whole, "\n\n\r\n  {\"id\":\"c\",\"model\":\"deepseek-chat\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Hi\\n\\u00fc\",\"refusal\":null},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":1}}\n"),
    case("chat: blank lines and then nothing", ChatCompletions, Json, End::Empty, "\n\n\n"),
    case("chat: half an answer", ChatCompletions, Json, End::Unknown, r#"{"choices":[{"index":0,"message":{"content":"Hi"},"finish_reason":"stop"}]"#),
    case("chat: an error under status 200", ChatCompletions, Json, End::Error, r#"{"error":{"message":"Rate limited","code":429}}"#)
        .failing("429", "Rate limited"),
    case("chat: a failing choice", ChatCompletions, Json, End::Error, r#"{"choices":[{"index":0,"error":{"code":502,"message":"Upstream died"},"message":{"content":"H"},"finish_reason":"error"}]}"#)
        .failing("502", "Upstream died"),
    case("chat: a refusal at once", ChatCompletions, Json, End::Refused, r#"{"choices":[{"index":0,"message":{"content":null,"refusal":"No."},"finish_reason":"stop"}]}"#),
    case("chat: an empty message", ChatCompletions, Json, End::Empty, r#"{"choices":[{"index":0,"message":{"content":""},"finish_reason":"stop"}]}"#),
    case("chat: no choices", ChatCompletions, Json, End::Unknown, r#"{"choices":[]}"#),
    case("chat: a body of another kind", ChatCompletions, Opaque, End::Opaque, "hello"),
    case("chat: no body and no content type", ChatCompletions, Opaque, End::Empty, ""),
    case("chat: no content", ChatCompletions, Opaque, End::Empty, "").status(204),
    case("chat: a redirect", ChatCompletions, Json, End::Opaque, "{}").status(307),
    case("completions: a stream", Completions, Sse, End::Whole, r#"data: {"object":"text_completion","choices":[{"text":"Hi","index":0,"logprobs":null,"finish_reason":null}]}

data: {"choices":[{"text":"","index":0,"finish_reason":"stop"}]}

data: [DONE]

"#),
    case("completions: at once, cut", Completions, Json, End::Cut, r#"{"choices":[{"text":"Hi","index":0,"finish_reason":"length"}]}"#),
    // ---- Anthropic ----
    case("messages: a plain answer with pings", Messages, Sse, End::Whole, r#"event: message_start
data: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"claude-opus-4-5","content":[],"stop_reason":null,"usage":{"input_tokens":5}}}

event: ping
data: {"type":"ping"}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":3}}

event: message_stop
data: {"type":"message_stop"}

"#),
    case("messages: no event names, type not first", Messages, Sse, End::Whole, r#"data: {"index":0,"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}

data: {"delta":{"stop_reason":"tool_use"},"type":"message_delta"}

data: { "type" : "message_stop" }

"#),
    case("messages: the end is missing", Messages, Sse, End::Unknown, r#"event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}

"#),
    case("messages: overloaded after some text", Messages, Sse, End::Error, r#"event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}

event: error
data: {"type":"error","error":{"details":null,"type":"overloaded_error","message":"Overloaded"},"request_id":"req_1"}

"#).failing("overloaded_error", "Overloaded"),
    case("messages: an error by its type", Messages, Sse, End::Error, r#"data: {"type":"error","error":{"type":"api_error","message":"Internal server error"}}

"#).failing("api_error", "Internal server error"),
    case("messages: refused", Messages, Sse, End::Refused, r#"event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"refusal"}}

event: message_stop
data: {"type":"message_stop"}

"#),
    case("messages: cut", Messages, Sse, End::Cut, r#"event: content_block_start
data: {"type":"content_block_start"}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"}}

event: message_stop
data: {"type":"message_stop"}

"#),
    case("messages: at once", Messages, Json, End::Whole, r#"{"id":"m","type":"message","model":"claude-opus-4-5","content":[{"type":"text","text":"Hi"}],"stop_reason":"stop_sequence","stop_sequence":"x","usage":{}}"#),
    case("messages: at once, nothing said", Messages, Json, End::Empty, r#"{"type":"message","content":[],"stop_reason":"end_turn"}"#),
    case("messages: at once, paused", Messages, Json, End::Cut, r#"{"type":"message","content":[{}],"stop_reason":"pause_turn"}"#),
    // ---- Responses ----
    case("responses: a plain answer", Responses, Sse, End::Whole, r#"event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"r","status":"in_progress","model":"gpt-5"}}

event: response.output_item.added
data: {"type":"response.output_item.added","output_index":0,"item":{"type":"message","content":[]}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"Hi"}

event: response.completed
data: {"type":"response.completed","response":{"id":"r","status":"completed","model":"gpt-5-codex","error":null,"incomplete_details":null,"output":[],"usage":{"input_tokens":1}}}

"#),
    case("responses: no event names, no blank line at the end", Responses, Sse, End::Whole, r#"data: {"type":"response.function_call_arguments.delta","delta":"{}"}

data: {"type":"response.completed","response":{"status":"completed","output":[{"type":"function_call"}]}}"#),
    case("responses: the length limit", Responses, Sse, End::Cut, r#"event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"Hi"}

event: response.incomplete
data: {"type":"response.incomplete","response":{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}}

"#),
    case("responses: the content filter", Responses, Sse, End::Filtered, r#"event: response.incomplete
data: {"type":"response.incomplete","response":{"status":"incomplete","incomplete_details":{"reason":"content_filter"}}}

"#),
    case("responses: a refusal", Responses, Sse, End::Refused, r#"event: response.refusal.delta
data: {"type":"response.refusal.delta","delta":"No"}

event: response.completed
data: {"type":"response.completed","response":{"status":"completed"}}

"#),
    case("responses: failed", Responses, Sse, End::Error, r#"event: response.failed
data: {"type":"response.failed","response":{"status":"failed","error":{"code":"server_error","message":"The model failed"}}}

"#).failing("server_error", "The model failed"),
    case("responses: failed without a word", Responses, Sse, End::Error, r#"event: response.failed
data: {"type":"response.failed","response":{"status":"failed","error":null}}

"#),
    case("responses: an error event", Responses, Sse, End::Error, r#"event: error
data: {"type":"error","code":"rate_limit_exceeded","message":"Slow down","param":null,"sequence_number":1}

"#).failing("rate_limit_exceeded", "Slow down"),
    case("responses: truncated", Responses, Sse, End::Unknown, r#"event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"Hi"}

"#),
    case("responses: at once", Responses, Json, End::Whole, r#"{"id":"r","object":"response","status":"completed","error":null,"incomplete_details":null,"model":"gpt-5","output":[{"type":"reasoning","summary":[]},{"type":"message","content":[{"type":"output_text","text":"Hi"}]}]}"#),
    case("responses: at once, refused", Responses, Json, End::Refused, r#"{"status":"completed","output":[{"type":"message","content":[{"type":"refusal","refusal":"No"}]}]}"#),
    case("responses: in the background", Responses, Json, End::Cut, r#"{"id":"r","status":"queued","output":[]}"#),
    case("responses: failed at once", Responses, Json, End::Error, r#"{"status":"failed","error":{"code":"server_error","message":"Sorry"},"output":[]}"#)
        .failing("server_error", "Sorry"),
    case("compact: no status", ResponsesCompact, Json, End::Whole, r#"{"id":"r","object":"response.compaction","output":[{"type":"compaction","encrypted_content":"x"}],"usage":{}}"#),
    // ---- Embeddings ----
    case("embeddings", Embeddings, Json, End::Whole, r#"{"object":"list","model":"text-embedding-3-small","data":[{"object":"embedding","index":0,"embedding":[0.1,-2e-3]}],"usage":{"prompt_tokens":1}}"#),
    case("embeddings: none", Embeddings, Json, End::Empty, r#"{"data":[]}"#),
    case("embeddings: something else", Embeddings, Json, End::Unknown, r#"{"object":"list"}"#),
    // ---- Ollama ----
    case("ollama chat: a stream", OllamaChat, Ndjson, End::Whole, r#"{"model":"llama3.2","created_at":"t","message":{"role":"assistant","content":"Hi"},"done":false}
{"model":"llama3.2","message":{"role":"assistant","content":""},"done_reason":"stop","done":true,"prompt_eval_count":3,"eval_count":1}
"#),
    case("ollama chat: tool calls, no last line end", OllamaChat, Ndjson, End::Whole, r#"{"model":"m","message":{"content":"","tool_calls":[{"function":{"name":"f"}}]},"done":false}
{"model":"m","message":{"content":""},"done":true}"#),
    case("ollama chat: an error half-way", OllamaChat, Ndjson, End::Error, r#"{"model":"m","message":{"content":"Hi"},"done":false}
{"error":"llama runner process has terminated"}
"#).failing("", "llama runner process has terminated"),
    case("ollama chat: truncated", OllamaChat, Ndjson, End::Unknown, r#"{"model":"m","message":{"content":"Hi"},"done":false}
"#),
    case("ollama chat: cut", OllamaChat, Ndjson, End::Cut, r#"{"message":{"content":"Hi"},"done_reason":"length","done":true}
"#),
    case("ollama chat: loads a model", OllamaChat, Json, End::Load, r#"{"model":"m","message":{"role":"assistant","content":""},"done_reason":"load","done":true}"#),
    case("ollama generate: unloads a model", OllamaGenerate, Ndjson, End::Load, r#"{"model":"m","response":"","done":true,"done_reason":"unload"}
"#),
    case("ollama generate: thinking and an answer", OllamaGenerate, Json, End::Whole, r#"{"model":"m","response":"Hi","thinking":"hm","done":true,"done_reason":"stop","context":[1,2]}"#),
    case("ollama generate: an older server says nothing", OllamaGenerate, Json, End::Empty, r#"{"model":"m","response":"","done":true}"#),
    case("ollama embed", OllamaEmbed, Json, End::Whole, r#"{"model":"all-minilm","embeddings":[[0.1,0.2]],"total_duration":1}"#),
    case("ollama embeddings, the older form", OllamaEmbed, Json, End::Whole, r#"{"embedding":[0.1,0.2]}"#),
    case("ollama: a missing model", OllamaChat, Json, End::Error, r#"{"error":"model 'x' not found"}"#)
        .status(404)
        .failing("", "model 'x' not found"),
    // ---- llama.cpp ----
    case("llama.cpp: a stream", LlamaCompletion, Sse, End::Whole, r#"data: {"index":0,"content":"Hi","tokens":[1],"stop":false}

data: {"content":"","stop":true,"model":"qwen","stop_type":"eos","truncated":false,"stopping_word":""}

"#),
    case("llama.cpp: the limit", LlamaCompletion, Sse, End::Cut, r#"data: {"content":"Hi","stop":true,"stop_type":"limit","truncated":false}

"#),
    case("llama.cpp: an older server, truncated", LlamaCompletion, Json, End::Cut, r#"{"content":"Hi","stop":true,"stopped_eos":true,"stopped_limit":false,"truncated":true}"#),
    case("llama.cpp: at once", LlamaCompletion, Json, End::Whole, r#"{"content":"Hi","stop":true,"stop_type":"word"}"#),
    // ---- Errors as bodies ----
    case("error: OpenAI", ChatCompletions, Json, End::Error, r#"{"error":{"message":"Incorrect API key","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#)
        .status(401)
        .failing("invalid_request_error", "Incorrect API key"),
    case("error: Anthropic", Messages, Json, End::Error, r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#)
        .status(529)
        .failing("overloaded_error", "Overloaded"),
    case("error: a text with a code", ChatCompletions, Json, End::Error, r#"{"error":"no such model","code":"model_not_found"}"#)
        .status(404)
        .failing("model_not_found", "no such model"),
    case("error: Gemini's list", ChatCompletions, Json, End::Error, r#"[{"error":{"code":503,"message":"The model is overloaded.","status":"UNAVAILABLE"}}]"#)
        .status(503)
        .failing("503", "The model is overloaded."),
    case("error: FastAPI", ChatCompletions, Json, End::Error, r#"{"detail":[{"loc":["body"],"msg":"field required"}]}"#)
        .status(422)
        .failing("", r#"[{"loc":["body"],"msg":"field required"}]"#),
    case("error: FastAPI, a text", ChatCompletions, Json, End::Error, r#"{"detail":"Not Found"}"#)
        .status(404)
        .failing("", "Not Found"),
    case("error: at the top", ChatCompletions, Json, End::Error, r#"{"object":"error","message":"too long","type":"BadRequestError","code":400}"#)
        .status(400)
        .failing("BadRequestError", "too long"),
    case("error: a page", ChatCompletions, Opaque, End::Error, "<html>\r\n<head><title>502 Bad Gateway</title></head></html>")
        .status(502)
        .failing("", "502 Bad Gateway"),
    case("error: a text", UnknownPost, Opaque, End::Error, "upstream connect error\nmore")
        .status(503)
        .failing("", "upstream connect error"),
    case("error: a page that says nothing", ChatCompletions, Opaque, End::Error, "<!doctype html>")
        .status(502),
    case("error: nothing", ChatCompletions, Json, End::Error, "").status(500),
    case("error: broken JSON", ChatCompletions, Json, End::Error, r#"{"error":{"mess"#)
        .status(500)
        .failing("", r#"{"error":{"mess"#),
    // ---- Routes nobody here knows ----
    case("unknown: a stream", UnknownPost, Sse, End::Opaque, "data: {\"candidates\":[]}\n\n"),
    case("unknown: a stream that fails", UnknownPost, Sse, End::Error, "data: {\"error\":{\"message\":\"no\",\"status\":\"INTERNAL\"}}\n\n")
        .failing("INTERNAL", "no"),
    case("unknown: JSON", UnknownPost, Json, End::Opaque, r#"{"data":[]}"#),
];

fn read<'a>(
    case: &Case,
    encoding: Encoding,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> Reading {
    let mut tap = Tap::new(case.route, case.framing, encoding, case.status);
    chunks.into_iter().for_each(|chunk| tap.feed(chunk));
    tap.finish()
}

fn read_whole(case: &Case) -> Reading {
    read(case, Encoding::Identity, [case.body.as_bytes()])
}

fn chunks_at<'a>(body: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
    cuts.extend([0, body.len()]);
    cuts.sort_unstable();
    cuts.windows(2)
        .map(|pair| &body[pair[0]..pair[1]])
        .collect()
}

#[test]
fn every_answer_reads_as_it_should() {
    for case in CASES {
        let Case {
            name, end, error, ..
        } = *case;
        let reading = read_whole(case);
        assert_eq!(reading.end, end, "{name}: {reading:?}");
        let read = reading
            .error
            .as_ref()
            .map(|error| (&*error.kind, &*error.message));
        assert_eq!(read, error, "{name}");
        assert_eq!(reading.keepable(), end == End::Whole, "{name}");
    }
}

#[test]
fn every_answer_reads_the_same_byte_by_byte() {
    for case in CASES {
        let bytewise = read(case, Encoding::Identity, case.body.as_bytes().chunks(1));
        assert_eq!(bytewise, read_whole(case), "{}", case.name);
    }
}

#[test]
fn every_stream_reads_the_same_with_any_line_end() {
    for case in CASES.iter().filter(|case| case.framing == Sse) {
        for line_end in ["\r\n", "\r"] {
            let body = case.body.replace('\n', line_end);
            for size in [1, 2, 3, body.len().max(1)] {
                let reading = read(case, Encoding::Identity, body.as_bytes().chunks(size));
                assert_eq!(
                    reading,
                    read_whole(case),
                    "{} {line_end:?} by {size}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn every_answer_reads_the_same_compressed() {
    for case in CASES {
        for (encoding, body) in compressed(case.body.as_bytes()) {
            for size in [1, 5, 1 << 20] {
                let reading = read(case, encoding, body.chunks(size));
                assert_eq!(
                    reading,
                    read_whole(case),
                    "{} {encoding:?} by {size}",
                    case.name
                );
            }
        }
    }
}

fn compressed(body: &[u8]) -> Vec<(Encoding, Vec<u8>)> {
    let level = Compression::fast();
    let mut gzip = GzEncoder::new(Vec::new(), level);
    let mut zlib = ZlibEncoder::new(Vec::new(), level);
    let mut deflate = DeflateEncoder::new(Vec::new(), level);
    gzip.write_all(body).unwrap();
    zlib.write_all(body).unwrap();
    deflate.write_all(body).unwrap();
    vec![
        (Encoding::Gzip, gzip.finish().unwrap()),
        (Encoding::Deflate, zlib.finish().unwrap()),
        (Encoding::Deflate, deflate.finish().unwrap()),
        (Encoding::Zstd, zstd::encode_all(body, 1).unwrap()),
    ]
}

/// `{"choices":[…]}` with one delta and its stop, then `[DONE]`; compressed by Node's zlib.
const BROTLI_STREAM: &[u8] = &[
    0x1b, 0x5e, 0x00, 0x70, 0x9c, 0x05, 0x76, 0x73, 0x07, 0x79, 0xe5, 0x66, 0x50, 0xd8, 0x35, 0xfb,
    0x94, 0x85, 0x0e, 0x6a, 0x91, 0xbd, 0x2d, 0x98, 0xad, 0xc0, 0xd2, 0xd5, 0x37, 0x41, 0x90, 0xd2,
    0x5a, 0x47, 0xe4, 0xab, 0x2f, 0x6c, 0xc0, 0x01, 0xfb, 0x3c, 0x50, 0x3e, 0x6d, 0xf3, 0x4e, 0x39,
    0xb1, 0x80, 0xb3, 0x9a, 0x97, 0xfe, 0x3b, 0xc2, 0x85, 0x90, 0xf3, 0x9a, 0xc7, 0x69, 0x96, 0xc1,
    0x93, 0x90, 0x8f, 0xf6, 0x6c, 0xe5, 0x25, 0x10, 0x4d, 0xd3, 0x77, 0x64, 0xf8, 0x03, 0x31, 0x03,
];

#[test]
fn brotli_reads_as_what_it_holds() {
    for size in [1, 7, BROTLI_STREAM.len()] {
        let mut tap = Tap::new(ChatCompletions, Sse, Encoding::Brotli, 200);
        BROTLI_STREAM.chunks(size).for_each(|chunk| tap.feed(chunk));
        assert!(tap.saw_end() && tap.has_content());
        assert_eq!(tap.finish().end, End::Whole, "by {size}");
    }
    let text = decode_request(Encoding::Brotli, BROTLI_STREAM, 1000).unwrap();
    assert!(text.starts_with(b"data: {") && text.ends_with(b"data: [DONE]\n\n"));
}

#[test]
fn compressed_content_shows_as_soon_as_it_has_come() {
    let first = b"data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n";
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(first).unwrap();
    gzip.flush().unwrap();
    let mut tap = Tap::new(ChatCompletions, Sse, Encoding::Gzip, 200);
    tap.feed(gzip.get_ref());
    assert!(tap.has_content());
    assert!(
        !tap.at_event_boundary(),
        "nothing can be put into a compressed stream"
    );
}

#[test]
fn a_damaged_compressed_answer_is_not_understood() {
    let whole =
        "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\n";
    for (encoding, body) in compressed(whole.as_bytes()) {
        let end = |body: &[u8]| {
            let mut tap = Tap::new(ChatCompletions, Sse, encoding, 200);
            tap.feed(body);
            tap.finish().end
        };
        assert_eq!(end(&body), End::Whole);
        assert_eq!(
            end(&body[..body.len() - 1]),
            End::Unknown,
            "{encoding:?} without its end"
        );
        assert_eq!(end(b"\x28no such thing"), End::Unknown, "{encoding:?}");
    }
    let mut tap = Tap::new(ChatCompletions, Sse, Encoding::Unknown, 200);
    tap.feed(whole.as_bytes());
    assert!(tap.has_content());
    assert_eq!(tap.finish().end, End::Opaque);
}

#[test]
fn events_are_divided_as_the_standard_has_it() {
    for (stream, expected) in [
        ("data: a\ndata:b\n\n", &[("", "a\nb")][..]),
        ("data\ndata\n\n", &[("", "\n")]),
        ("data:  two spaces\n\n", &[("", " two spaces")]),
        (
            "event: x\nevent: y\ndata: a\n\ndata: b\n\n",
            &[("y", "a"), ("", "b")],
        ),
        (": c\n\nid: 1\n\nretry: 5\n\n:\n\n", &[]),
        (
            "data: a\r\n\r\ndata: b\r\rdata: c",
            &[("", "a"), ("", "b"), ("", "c")],
        ),
        (" data: a\ndatas: b\ndat: c\nData: d\n\n", &[]),
        ("\u{feff}data: a\n\n\u{feff}data: b\n\n", &[("", "a")]),
    ] {
        for size in [1, 2, 3, stream.len()] {
            let mut seen = Vec::new();
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text was sent");
            let mut note = |event: Event<'_>| seen.push((text(event.name), text(event.data)));
            let mut events = Events::new();
            for chunk in stream.as_bytes().chunks(size) {
                events.feed(chunk, &mut note);
            }
            events.finish(&mut note);
            let seen: Vec<_> = seen.iter().map(|(name, data)| (&**name, &**data)).collect();
            assert_eq!(seen, expected, "{stream:?} by {size}");
        }
    }
}

/// A zstd body that decodes to `blocks` × 128 KB of zeros, at four bytes a block: a frame
/// with a window of 128 KB and blocks of one repeated byte (RFC 8878).
fn zstd_bomb(blocks: usize) -> Vec<u8> {
    let header = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    let block = |last: u32| {
        let [low, middle, high, _] = ((128 * 1024) << 3 | 1 << 1 | last).to_le_bytes();
        [low, middle, high, 0]
    };
    let mut bomb = header.to_vec();
    (1..blocks).for_each(|_| bomb.extend(block(0)));
    bomb.extend(block(1));
    bomb
}

#[test]
fn a_bomb_is_bounded() {
    assert_eq!(
        decode_request(Encoding::Zstd, &zstd_bomb(3), 1 << 20)
            .unwrap()
            .len(),
        3 << 17
    );

    // A window of 8 MB is what the web may ask for (RFC 9659), and 16 MB is not.
    let mut bomb = zstd_bomb(1);
    bomb[5] = 13 << 3;
    assert!(decode_request(Encoding::Zstd, &bomb, 1 << 20).is_ok());
    bomb[5] = 14 << 3;
    let wide = decode_request(Encoding::Zstd, &bomb, 1 << 20);
    assert_eq!(wide, Err(DecodeError::Corrupt));

    // 10 GB.
    let bomb = zstd_bomb(80_000);
    assert_eq!(
        decode_request(Encoding::Zstd, &bomb, 1 << 20),
        Err(DecodeError::TooLarge)
    );

    let mut tap = Tap::new(ChatCompletions, Json, Encoding::Zstd, 200);
    tap.feed(&bomb);
    let Source::Coded(decoder) = &tap.source else {
        panic!("a zstd answer is decoded");
    };
    assert!(decoder.sink().left < 1 << 20);
    assert_eq!(tap.finish().end, End::Unknown);
}

#[test]
fn request_bodies_are_decoded() {
    let body = br#"{"model":"gpt-5-codex","stream":true}"#;
    for (encoding, coded) in compressed(body) {
        assert_eq!(
            decode_request(encoding, &coded, body.len()).unwrap(),
            body,
            "{encoding:?}"
        );
        let short = decode_request(encoding, &coded, body.len() - 1);
        assert_eq!(short, Err(DecodeError::TooLarge), "{encoding:?}");
        let cut = decode_request(encoding, &coded[..coded.len() - 1], 1000);
        assert_eq!(cut, Err(DecodeError::Corrupt), "{encoding:?}");
        let garbage = decode_request(encoding, b"\x28no such thing", 1000);
        assert_eq!(garbage, Err(DecodeError::Corrupt), "{encoding:?}");
        assert_eq!(
            decode_request(encoding, b"", 0).unwrap(),
            b"",
            "{encoding:?}"
        );
    }
    assert_eq!(
        decode_request(Encoding::Identity, body, 1000).unwrap(),
        body
    );
    assert_eq!(
        decode_request(Encoding::Identity, body, 3),
        Err(DecodeError::TooLarge)
    );
    assert_eq!(
        decode_request(Encoding::Unknown, body, 1000),
        Err(DecodeError::Unsupported)
    );
}

#[test]
fn encodings_and_framings_by_their_headers() {
    for (header, encoding) in [
        ("", Encoding::Identity),
        ("identity", Encoding::Identity),
        (" GZip ", Encoding::Gzip),
        ("x-gzip", Encoding::Gzip),
        ("deflate", Encoding::Deflate),
        ("br", Encoding::Brotli),
        ("zstd", Encoding::Zstd),
        ("gzip, br", Encoding::Unknown),
        ("compress", Encoding::Unknown),
    ] {
        assert_eq!(Encoding::of(header), encoding, "{header:?}");
    }
    for (header, framing) in [
        ("text/event-stream; charset=utf-8", Sse),
        ("Text/Event-Stream", Sse),
        ("application/x-ndjson", Ndjson),
        ("application/json;charset=UTF-8", Json),
        ("application/problem+json", Json),
        ("+json", Json),
        ("json", Opaque),
        ("ü+json", Json),
        ("üjson", Opaque),
        ("text/html", Opaque),
        ("", Opaque),
    ] {
        assert_eq!(Framing::of(header), framing, "{header:?}");
    }
}

/// Feeds events one by one; gives the number of the first after which `seen` is true.
fn first_with(case: &Case, seen: impl Fn(&Tap) -> bool) -> Option<usize> {
    let mut tap = Tap::new(case.route, case.framing, Encoding::Identity, case.status);
    assert!(!seen(&tap), "{}: before any byte", case.name);
    let separator = if case.framing == Sse { "\n\n" } else { "\n" };
    case.body.split_inclusive(separator).position(|event| {
        tap.feed(event.as_bytes());
        seen(&tap)
    })
}

#[test]
fn first_content_and_end_are_seen_when_they_come() {
    let first = |name: &str| {
        let case = CASES
            .iter()
            .find(|case| case.name == name)
            .expect("a case of that name");
        (
            first_with(case, Tap::has_content),
            first_with(case, Tap::saw_end),
        )
    };
    // Never the role, a ping, a comment, an empty or a usage chunk.
    assert_eq!(
        first("chat: a plain answer with its usage chunk"),
        (Some(1), Some(4))
    );
    assert_eq!(
        first("chat: Azure's first chunk, comments, no blank line at the end"),
        (Some(3), None)
    );
    assert_eq!(first("chat: tool calls"), (Some(0), Some(3)));
    assert_eq!(first("chat: nothing was said"), (None, Some(1)));
    assert_eq!(
        first("chat: a whole answer after blank lines"),
        (Some(3), None)
    );
    assert_eq!(first("chat: blank lines and then nothing"), (None, None));
    assert_eq!(
        first("messages: a plain answer with pings"),
        (Some(2), Some(6))
    );
    assert_eq!(first("responses: a plain answer"), (Some(1), Some(3)));
    assert_eq!(first("ollama chat: a stream"), (Some(0), Some(1)));
    assert_eq!(first("ollama chat: loads a model"), (Some(0), None));
    assert_eq!(first("llama.cpp: a stream"), (Some(0), Some(1)));
    assert_eq!(first("chat: a body of another kind"), (Some(0), None));
}

#[test]
fn boundaries_of_events() {
    let at_boundary = |framing, text: &str| {
        let mut tap = Tap::new(ChatCompletions, framing, Encoding::Identity, 200);
        text.bytes().for_each(|byte| tap.feed(&[byte]));
        tap.at_event_boundary()
    };
    for text in [
        "",
        "\n",
        "\u{feff}",
        "data: x\n\n",
        "data: x\r\n\r\n",
        "data: x\r\r",
        ": ping\n\n",
        "data: x\n\n\n",
        "event: a\ndata: x\n\ndata: y\n\n",
    ] {
        assert!(at_boundary(Sse, text), "{text:?}");
    }
    for text in [
        "d",
        "data: x",
        "data: x\n",
        "data: x\r\n",
        "data: x\r\n\r",
        "data: x\r",
        ": ping\n",
        "data: x\n\nd",
        "data: x\n\nid: 3\n",
        "event: a\n",
        "data",
    ] {
        assert!(!at_boundary(Sse, text), "{text:?}");
    }
    let mut tap = Tap::new(ChatCompletions, Sse, Encoding::Identity, 200);
    tap.feed(b"\xEF\xBB");
    assert!(!tap.at_event_boundary(), "within the byte order mark");
    assert!(!at_boundary(Ndjson, "{}\n"));
    assert!(!at_boundary(Json, ""));
}

#[test]
fn overloads_are_told_apart() {
    for (body, overloaded) in [
        (
            r#"{"error":{"type":"overloaded_error","message":"m"}}"#,
            true,
        ),
        (
            r#"{"error":{"code":"server_is_overloaded","message":"m"}}"#,
            true,
        ),
        (r#"{"error":{"code":529,"message":"m"}}"#, true),
        (r#"{"error":"m","code":529}"#, true),
        (
            r#"{"error":{"type":"api_error","message":"overloaded, they say"}}"#,
            false,
        ),
        (r#"{"error":{"code":502,"message":"m"}}"#, false),
    ] {
        let mut tap = Tap::new(Messages, Sse, Encoding::Identity, 200);
        tap.feed(format!("event: error\ndata: {body}\n\n").as_bytes());
        let error = tap.stream_error().expect("an error event has come");
        assert_eq!(error.overloaded, overloaded, "{body}");
    }
    for body in ["", r#"{"error":{"type":"api_error","message":"m"}}"#] {
        let mut tap = Tap::new(Messages, Json, Encoding::Identity, 529);
        tap.feed(body.as_bytes());
        let error = tap.finish().error.expect("529 is an overload");
        assert!(error.overloaded, "{body}");
    }
}

#[test]
fn an_event_past_the_limit_is_dropped_and_the_stream_goes_on() {
    let stream = |before: &str, after: &str| {
        let filler = vec![b'x'; 1 << 20];
        let mut tap = Tap::new(Responses, Sse, Encoding::Identity, 200);
        tap.feed(before.as_bytes());
        (0..=PIECE_BYTES >> 20).for_each(|_| tap.feed(&filler));
        let Source::Plain(Reader {
            body: Body::Events(events),
            ..
        }) = &tap.source
        else {
            panic!("a plain event stream");
        };
        assert!(
            format!("{events:?}").len() < 1 << 16,
            "the text has been let go"
        );
        tap.feed(after.as_bytes());
        tap.finish()
    };
    let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"";
    let completed = "data: {\"type\":\"response.completed\",\"response\":{\"output\":[\"";

    let reading = stream(
        delta,
        "\"}\n\nevent: response.completed\ndata: {\"response\":{\"status\":\"completed\"}}\n\n",
    );
    assert_eq!((reading.end, reading.has_content), (End::Whole, true));
    assert_eq!(stream(delta, "\"}\n\n").end, End::Unknown);
    let reading = stream(&format!("{delta}\"}}\n\n{completed}"), "\"]}}\n\n");
    assert_eq!((reading.end, reading.saw_end), (End::Whole, true));
}

#[test]
fn two_answers_are_none() {
    let answer = r#"{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}"#;
    let end = |body: String| {
        let mut tap = Tap::new(ChatCompletions, Json, Encoding::Identity, 200);
        tap.feed(body.as_bytes());
        tap.finish().end
    };
    assert_eq!(end(answer.to_owned()), End::Whole);
    assert_eq!(end(answer.repeat(2)), End::Unknown);
}

#[test]
fn a_json_answer_past_the_limit_is_not_judged() {
    let mut tap = Tap::new(Embeddings, Json, Encoding::Identity, 200);
    tap.feed(br#"{"data":[{"embedding":[1"#);
    (0..=PIECE_BYTES >> 20).for_each(|_| tap.feed(&vec![b'1'; 1 << 20]));
    tap.feed(b"]}]}");
    assert_eq!(tap.finish().end, End::Unknown);
}

#[test]
fn models_name_themselves() {
    let model = |name: &str| {
        let case = CASES
            .iter()
            .find(|case| case.name == name)
            .expect("a case of that name");
        read_whole(case).upstream_model
    };
    let named = |name: &str, expected: &str| assert_eq!(model(name).as_deref(), Some(expected));
    named(
        "chat: a plain answer with its usage chunk",
        "gpt-5-2025-08-07",
    );
    named(
        "chat: Azure's first chunk, comments, no blank line at the end",
        "gpt-4o",
    );
    named("messages: a plain answer with pings", "claude-opus-4-5");
    named("responses: a plain answer", "gpt-5-codex");
    named("ollama chat: a stream", "llama3.2");
    named("llama.cpp: a stream", "qwen");
    assert_eq!(model("chat: odd types do not hide the end"), None);
}

fn any_case() -> impl Strategy<Value = &'static Case> {
    (0..CASES.len()).prop_map(|at| &CASES[at])
}

proptest! {
    #[test]
    fn every_answer_reads_the_same_at_any_splits(
        case in any_case(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let chunks = chunks_at(case.body.as_bytes(), &cuts);
        prop_assert_eq!(read(case, Encoding::Identity, chunks), read_whole(case));
    }

    /// Where a part may be kept, so may the whole: nothing that spoils an answer comes after
    /// what makes it look complete.
    #[test]
    fn a_part_is_never_better_than_the_whole(case in any_case(), at in any::<prop::sample::Index>()) {
        let part = &case.body.as_bytes()[..at.index(case.body.len() + 1)];
        let reading = read(case, Encoding::Identity, [part]);
        if reading.keepable() {
            prop_assert_eq!(case.end, End::Whole);
        }
    }

    #[test]
    fn garbage_never_panics(
        case in any_case(),
        encoding in prop::sample::select(vec![
            Encoding::Identity, Encoding::Gzip, Encoding::Deflate, Encoding::Brotli, Encoding::Zstd,
        ]),
        keep in any::<prop::sample::Index>(),
        garbage in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            r#"[{}\[\]",:\\ \r\nadetvn0]{0,100}"#.prop_map(String::into_bytes),
        ],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut body = case.body.as_bytes()[..keep.index(case.body.len() + 1)].to_vec();
        body.extend(&garbage);
        let pieces = read(case, encoding, chunks_at(&body, &cuts));
        let whole = read(case, encoding, [&body[..]]);
        // How much a decoder gives before it meets the damage depends on the pieces.
        if encoding == Encoding::Identity {
            prop_assert_eq!(pieces, whole);
        }
        let _ = decode_request(encoding, &garbage, 1 << 16);
    }
}
