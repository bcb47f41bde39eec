// The scripted provider: an OpenAI and an Anthropic look-alike on a loopback
// port. The model's name says what happens to a call, every call is recorded.
//
//   ok, anything else   answers at once
//   tool                asks for the first tool offered, and answers in words once it has its result
//   wait-250            answers after 250 ms
//   long                streams 400 words, 25 ms apart: time enough to leave
//   status-429          answers with that status and the dialect's own error
//   flaky-once          503 for the first call with this body, then answers
//   gzip                answers compressed, streams event by event
//   error-event         two words, then an error event and a normal end
//   broken-stream       two words, then the connection dies between two events
//   half-event          two words, then the connection dies inside an event
//   cut-json            an unstreamed answer that dies half-way
//   hang                accepts and never answers
//   refused             the refusal of an open breaker, word for word, for runs without Traygate
import { createServer } from "node:http";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { constants, createGzip, gzipSync } from "node:zlib";

const ANSWER = ["The ", "answer ", "is ", "forty", "-two 🦀", "."];
/** What every plain call is answered with. */
export const TEXT = ANSWER.join("");
/** What the `tool` model says once it has the tool's result. */
export const TOOL_TEXT = "It is sunny in Paris.";
const TOOL_ARGUMENTS = ['{"ci', 'ty": "Pa', 'ris"}'];
/** The error message of the `error-event` model. */
export const EVENT_ERROR = "scripted failure in mid-stream";
const USAGE = { input: 11, output: 7 };

/**
 * @typedef {object} Call What the provider knows of one request.
 * @property {string} method
 * @property {string} path with its query
 * @property {Record<string, string>} headers
 * @property {string} body as it came, decoded as UTF-8
 * @property {string | undefined} model
 * @property {number} startedMs
 * @property {number | undefined} endedMs when the answer ended or the caller left
 * @property {boolean} left the caller closed the connection before the answer's end
 */

/** Starts a provider on a free loopback port. */
export async function startProvider() {
  /** @type {Call[]} */
  const calls = [];
  const server = createServer((request, response) => {
    serve(request, response, calls).catch((error) => {
      // A caller that left is on record; anything else is a fault of this file.
      if (!response.destroyed) console.error("provider:", error);
      response.destroy();
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    /** The calls whose body holds `needle`. */
    calls: (needle = "") => calls.filter((call) => call.body.includes(needle)),
    all: calls,
    stop: async () => {
      server.close();
      server.closeAllConnections();
      await once(server, "close");
    },
  };
}

async function serve(request, response, calls) {
  const chunks = [];
  const call = {
    method: request.method,
    path: request.url,
    headers: request.headers,
    body: "",
    model: undefined,
    startedMs: performance.now(),
    endedMs: undefined,
    left: false,
  };
  response.on("close", () => {
    call.endedMs = performance.now();
    call.left = !response.writableFinished && !response.cutOnPurpose;
  });
  const path = new URL(request.url, "http://provider").pathname;
  if (path === "/_calls") return json(response, 200, calls);

  for await (const chunk of request) chunks.push(chunk);
  call.body = Buffer.concat(chunks).toString();
  calls.push(call);
  // Codex asks for a WebSocket first; a provider without one says so.
  if (request.headers.upgrade) {
    response.shouldKeepAlive = false;
    return json(response, 426, { error: { message: "no WebSockets here", type: "upgrade_required" } });
  }

  const anthropic = path.startsWith("/v1/messages") || "anthropic-version" in request.headers;
  const dialect = anthropic ? anthropicDialect : openaiDialect;
  if (request.method === "HEAD") return response.writeHead(200).end();
  if (request.method === "GET" && path.startsWith("/v1/models")) {
    return json(response, 200, dialect.models(path.slice("/v1/models/".length)));
  }
  if (path === "/api/event_logging/batch") return json(response, 200, {});
  let body;
  try {
    body = JSON.parse(call.body);
  } catch {
    return json(response, 400, dialect.error(400, "the body is not JSON"));
  }
  call.model = body.model;
  const model = body.model ?? "";

  if (path === "/v1/messages/count_tokens") return json(response, 200, { input_tokens: USAGE.input });
  const twin = calls.filter((other) => other.body === call.body).length;
  const refusal = /^status-(\d{3})$/.exec(model)?.[1] ?? (model === "flaky-once" && twin === 1 ? "503" : undefined);
  if (refusal) {
    const status = Number(refusal);
    return json(response, status, dialect.error(status, `scripted ${status}`), { "request-id": "req_scripted" });
  }
  if (model === "refused") {
    return json(response, 503, dialect.refused(), { "retry-after": "60", "x-should-retry": "false" });
  }
  if (model === "hang") return; // the caller's timeout, or its leaving, ends it
  const wait = /^wait-(\d+)$/.exec(model);
  if (wait) await sleep(Number(wait[1]));

  if (path === "/v1/embeddings") return json(response, 200, embeddings(body));
  const answer = path === "/v1/responses" ? responsesDialect : path === "/v1/messages" ? anthropicDialect : openaiDialect;
  if (path !== "/v1/chat/completions" && answer === openaiDialect) {
    return json(response, 404, dialect.error(404, `no route ${path}`));
  }
  const reply = replyTo(body);
  if (!body.stream) {
    const text = JSON.stringify(answer.whole(body, reply));
    if (model === "gzip") return json(response, 200, gzipSync(text), { "content-encoding": "gzip" });
    if (model !== "cut-json") return json(response, 200, text);
    // Chunked: cut off from a `content-length`, node-fetch 2 (openai 4.x) waits for the rest for ever.
    response.writeHead(200, { "content-type": "application/json" });
    response.write(text.slice(0, text.length / 2));
    return cut(response);
  }

  const head = { "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache" };
  if (model === "gzip") {
    response.writeHead(200, { ...head, "content-encoding": "gzip" });
    // Flushed with every event, as providers that compress streams do.
    const gzip = createGzip({ flush: constants.Z_SYNC_FLUSH });
    gzip.pipe(response);
    for (const event of answer.events(body, reply)) gzip.write(event.text);
    return gzip.end();
  }
  response.writeHead(200, head);
  let words = 0;
  for (const event of answer.events(body, reply)) {
    if (response.destroyed) return;
    response.write(event.text);
    if (!event.word) continue;
    words += 1;
    if (model === "long") await sleep(25);
    if (words < 2) continue;
    if (model === "error-event") {
      response.write(answer.errorEvent());
      return response.end();
    }
    if (model === "half-event") response.write(event.text.slice(0, event.text.length / 2));
    if (model === "broken-stream" || model === "half-event") return cut(response);
  }
  response.end();
}

/** Ends the connection without the answer's normal end, after what was written has left. */
async function cut(response) {
  await sleep(50);
  response.cutOnPurpose = true;
  response.destroy();
}

function json(response, status, value, headers = {}) {
  const bytes = typeof value === "string" || Buffer.isBuffer(value) ? value : JSON.stringify(value);
  response.writeHead(status, { "content-type": "application/json", "content-length": Buffer.byteLength(bytes), ...headers });
  response.end(bytes);
}

/** What the model says: a text in pieces, or a call of the first tool offered. */
function replyTo(body) {
  if (body.model === "long") return { words: Array.from({ length: 400 }, (_, n) => `word${n} `) };
  const items = body.messages ?? body.input;
  const last = Array.isArray(items) ? items.at(-1) : undefined;
  const offered = body.tools?.[0];
  if (body.model !== "tool" || !offered) return { words: ANSWER };
  const hasResult =
    last?.role === "tool" || last?.type === "function_call_output" || JSON.stringify(last?.content ?? "").includes("tool_result");
  if (hasResult) return { words: TOOL_TEXT.split(/(?<= )/) };
  return { tool: offered.function?.name ?? offered.name, pieces: TOOL_ARGUMENTS };
}

const sse = (data, name) => `${name ? `event: ${name}\n` : ""}data: ${JSON.stringify(data)}\n\n`;

function embeddings(body) {
  const inputs = Array.isArray(body.input) ? body.input : [body.input];
  const vector = Float32Array.of(0.25, -0.5, 1);
  const embedding =
    body.encoding_format === "base64" ? Buffer.from(vector.buffer).toString("base64") : Array.from(vector);
  return {
    object: "list",
    model: body.model,
    data: inputs.map((_, index) => ({ object: "embedding", index, embedding })),
    usage: { prompt_tokens: USAGE.input, total_tokens: USAGE.input },
  };
}

const openaiError = (message, type, code) => ({ error: { message, type, code, param: null } });

const openaiDialect = {
  error: (status, message) => openaiError(message, status < 500 ? "invalid_request_error" : "server_error", `scripted_${status}`),
  refused: () => openaiError("Traygate: the breaker is open", "server_error", "breaker_open"),
  models: (id) => {
    const model = (name) => ({ id: name, object: "model", created: 1_700_000_000, owned_by: "script" });
    return id ? model(id) : { object: "list", data: [model("ok"), model("tool")] };
  },
  errorEvent: () => sse(openaiError(EVENT_ERROR, "server_error", "scripted")),
  usage: () => ({
    prompt_tokens: USAGE.input,
    completion_tokens: USAGE.output,
    total_tokens: USAGE.input + USAGE.output,
  }),
  whole: (body, reply) => ({
    id: "chatcmpl-scripted",
    object: "chat.completion",
    created: 1_700_000_000,
    model: body.model,
    choices: [
      {
        index: 0,
        finish_reason: reply.tool ? "tool_calls" : "stop",
        logprobs: null,
        message: reply.tool
          ? {
              role: "assistant",
              content: null,
              refusal: null,
              tool_calls: [
                { id: "call_1", type: "function", function: { name: reply.tool, arguments: reply.pieces.join("") } },
              ],
            }
          : { role: "assistant", content: reply.words.join(""), refusal: null },
      },
    ],
    usage: openaiDialect.usage(),
  }),
  *events(body, reply) {
    const asked = body.stream_options?.include_usage === true;
    const chunk = (choices, usage = null) =>
      sse({
        id: "chatcmpl-scripted",
        object: "chat.completion.chunk",
        created: 1_700_000_000,
        model: body.model,
        choices,
        ...(asked ? { usage } : {}),
      });
    const delta = (delta, finish_reason = null) => chunk([{ index: 0, delta, logprobs: null, finish_reason }]);
    yield { text: delta({ role: "assistant", content: reply.tool ? null : "" }) };
    if (reply.tool) {
      const opened = { index: 0, id: "call_1", type: "function", function: { name: reply.tool, arguments: "" } };
      yield { text: delta({ tool_calls: [opened] }) };
      for (const piece of reply.pieces) {
        yield { text: delta({ tool_calls: [{ index: 0, function: { arguments: piece } }] }), word: true };
      }
    } else {
      for (const word of reply.words) yield { text: delta({ content: word }), word: true };
    }
    yield { text: delta({}, reply.tool ? "tool_calls" : "stop") };
    if (asked) yield { text: chunk([], openaiDialect.usage()) };
    yield { text: "data: [DONE]\n\n" };
  },
};

const responsesDialect = {
  errorEvent: () => sse({ type: "error", code: "scripted", message: EVENT_ERROR, param: null, sequence_number: 99 }, "error"),
  response: (body, status, output) => ({
    id: "resp_scripted",
    object: "response",
    created_at: 1_700_000_000,
    status,
    error: null,
    incomplete_details: null,
    instructions: null,
    metadata: {},
    model: body.model,
    output,
    parallel_tool_calls: true,
    temperature: 1,
    tool_choice: "auto",
    tools: [],
    top_p: 1,
    usage:
      status === "completed"
        ? {
            input_tokens: USAGE.input,
            input_tokens_details: { cached_tokens: 0 },
            output_tokens: USAGE.output,
            output_tokens_details: { reasoning_tokens: 0 },
            total_tokens: USAGE.input + USAGE.output,
          }
        : null,
  }),
  item: (reply, status, text) =>
    reply.tool
      ? { type: "function_call", id: "fc_1", call_id: "call_1", name: reply.tool, arguments: text, status }
      : {
          type: "message",
          id: "msg_1",
          role: "assistant",
          status,
          content: text ? [{ type: "output_text", text, annotations: [] }] : [],
        },
  whole: (body, reply) => {
    const text = (reply.pieces ?? reply.words).join("");
    return responsesDialect.response(body, "completed", [responsesDialect.item(reply, "completed", text)]);
  },
  *events(body, reply) {
    let sequence_number = 0;
    const event = (type, fields) => sse({ type, sequence_number: sequence_number++, ...fields }, type);
    const place = { item_id: reply.tool ? "fc_1" : "msg_1", output_index: 0 };
    const pieces = reply.pieces ?? reply.words;
    const text = pieces.join("");
    yield { text: event("response.created", { response: responsesDialect.response(body, "in_progress", []) }) };
    yield {
      text: event("response.output_item.added", { output_index: 0, item: responsesDialect.item(reply, "in_progress", "") }),
    };
    if (reply.tool) {
      for (const delta of pieces) {
        yield { text: event("response.function_call_arguments.delta", { ...place, delta }), word: true };
      }
      yield { text: event("response.function_call_arguments.done", { ...place, name: reply.tool, arguments: text }) };
    } else {
      const part = (text) => ({ type: "output_text", text, annotations: [] });
      yield { text: event("response.content_part.added", { ...place, content_index: 0, part: part("") }) };
      for (const delta of pieces) {
        yield {
          text: event("response.output_text.delta", { ...place, content_index: 0, delta, logprobs: [] }),
          word: true,
        };
      }
      yield { text: event("response.output_text.done", { ...place, content_index: 0, text, logprobs: [] }) };
      yield { text: event("response.content_part.done", { ...place, content_index: 0, part: part(text) }) };
    }
    const item = responsesDialect.item(reply, "completed", text);
    yield { text: event("response.output_item.done", { output_index: 0, item }) };
    yield { text: event("response.completed", { response: responsesDialect.response(body, "completed", [item]) }) };
  },
};

const ANTHROPIC_TYPES = {
  400: "invalid_request_error",
  401: "authentication_error",
  404: "not_found_error",
  429: "rate_limit_error",
  529: "overloaded_error",
};

const anthropicDialect = {
  error: (status, message) => ({
    type: "error",
    error: { type: ANTHROPIC_TYPES[status] ?? "api_error", message },
    request_id: "req_scripted",
  }),
  refused: () => ({
    type: "error",
    error: { type: "api_error", message: "Traygate: the breaker is open", code: "breaker_open" },
    request_id: "req_scripted",
  }),
  models: (id) => {
    const model = (name) => ({ type: "model", id: name, display_name: name, created_at: "2026-01-01T00:00:00Z" });
    if (id) return model(id);
    return { data: [model("ok"), model("tool")], has_more: false, first_id: "ok", last_id: "tool" };
  },
  errorEvent: () => sse({ type: "error", error: { type: "api_error", message: EVENT_ERROR } }, "error"),
  message: (body, content, stop_reason, output_tokens) => ({
    id: "msg_scripted",
    type: "message",
    role: "assistant",
    model: body.model,
    content,
    stop_reason,
    stop_sequence: null,
    usage: {
      input_tokens: USAGE.input,
      cache_creation_input_tokens: 0,
      cache_read_input_tokens: 0,
      output_tokens,
    },
  }),
  whole: (body, reply) => {
    const block = reply.tool
      ? { type: "tool_use", id: "toolu_1", name: reply.tool, input: JSON.parse(reply.pieces.join("")) }
      : { type: "text", text: reply.words.join(""), citations: null };
    return anthropicDialect.message(body, [block], reply.tool ? "tool_use" : "end_turn", USAGE.output);
  },
  *events(body, reply) {
    const event = (type, fields) => sse({ type, ...fields }, type);
    const opened = reply.tool
      ? { type: "tool_use", id: "toolu_1", name: reply.tool, input: {} }
      : { type: "text", text: "", citations: null };
    yield { text: event("message_start", { message: anthropicDialect.message(body, [], null, 1) }) };
    yield { text: event("content_block_start", { index: 0, content_block: opened }) };
    yield { text: event("ping", {}) };
    for (const piece of reply.pieces ?? reply.words) {
      const delta = reply.tool ? { type: "input_json_delta", partial_json: piece } : { type: "text_delta", text: piece };
      yield { text: event("content_block_delta", { index: 0, delta }), word: true };
    }
    yield { text: event("content_block_stop", { index: 0 }) };
    yield {
      text: event("message_delta", {
        delta: { stop_reason: reply.tool ? "tool_use" : "end_turn", stop_sequence: null },
        usage: { output_tokens: USAGE.output },
      }),
    };
    yield { text: event("message_stop", {}) };
  },
};

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const provider = await startProvider();
  console.log(`listening on ${provider.url}`);
}
