// A provider that can be slow, down or hung, and notes every call it receives.
// Runs as a process of its own, so that its timers do not wait for the clients.
import http from "node:http";
import { clock } from "./clock.mjs";

const plan = { state: "well", delayMs: 0, events: 0, gapMs: 0 };
let received = [];

const server = http.createServer({ keepAliveTimeout: 120_000 }, (request, response) => {
  const chunks = [];
  request.on("data", (chunk) => chunks.push(chunk));
  request.on("end", () => answer(request, response, Buffer.concat(chunks).toString()));
});

function answer(request, response, body) {
  const generation = request.method === "POST";
  const seen = {
    kind: generation ? "generation" : "check",
    prompt: generation ? JSON.parse(body).messages.at(-1).content : undefined,
    attempt: Number(request.headers["x-stainless-retry-count"] ?? 0),
    start: clock(),
    end: undefined,
    status: undefined,
  };
  received.push(seen);
  response.on("close", () => {
    seen.end = clock();
    seen.status = response.writableFinished ? response.statusCode : "unfinished";
  });
  if (plan.state === "hung") return;
  if (plan.state === "down") {
    send(response, 503, { error: { message: "The provider is down.", type: "server_error", code: null, param: null } });
  } else if (!generation) {
    send(response, 200, { object: "list", data: [] });
  } else if (JSON.parse(body).stream) {
    stream(response, clock());
  } else {
    setTimeout(() => send(response, 200, completion()), plan.delayMs);
  }
}

function send(response, status, body) {
  response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
}

function completion() {
  return {
    id: "chatcmpl-bench",
    object: "chat.completion",
    created: 1750000000,
    model: "gpt-4o-mini",
    choices: [{ index: 0, message: { role: "assistant", content: "Here you are." }, finish_reason: "stop" }],
    usage: { prompt_tokens: 12, completion_tokens: 4, total_tokens: 16 },
  };
}

/** Sends event after event, each at its own moment from the start, so that lateness does not add up. */
function stream(response, start, sent = 0) {
  if (response.destroyed) return;
  if (sent === 0) response.writeHead(200, { "content-type": "text/event-stream" }).flushHeaders();
  if (sent === plan.events) {
    response.end(event({}, "stop") + "data: [DONE]\n\n");
    return;
  }
  const due = start + (sent + 1) * plan.gapMs;
  setTimeout(() => {
    response.write(event({ content: `word${sent} ` }, null));
    stream(response, start, sent + 1);
  }, Math.max(0, due - clock()));
}

function event(delta, finish_reason) {
  const chunk = {
    id: "chatcmpl-bench",
    object: "chat.completion.chunk",
    created: 1750000000,
    model: "gpt-4o-mini",
    choices: [{ index: 0, delta, finish_reason }],
  };
  return `data: ${JSON.stringify(chunk)}\n\n`;
}

process.on("message", ({ set, forget, report }) => {
  Object.assign(plan, set);
  if (forget) received = [];
  process.send(report ? { received } : {});
});
// The bench is gone, however it ended.
process.on("disconnect", () => process.exit());
// Ctrl-C reaches the bench, which ends this process in order.
process.on("SIGINT", () => {});

server.listen(0, "127.0.0.1", 4096, () => process.send({ port: server.address().port }));
