// A real model on llama.cpp's own server, through Traygate: `tests/sdk/run --llama`.
// No `.test.mjs` in the name: it needs what `scripts/llama` builds.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:net";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { layTraygate, until } from "./stage.mjs";

const MODEL = "gemma-3-270m";
const SLOTS = 4;
const LLAMA = fileURLToPath(new URL("../../scripts/llama", import.meta.url));

let llama;
let laid;
let traygate;
let openai;
let anthropic;
let slots;

before(async () => {
  const port = await freePort();
  const url = `http://127.0.0.1:${port}`;
  // Room in each slot for a generation that only its caller ends.
  const flags = ["--port", `${port}`, "--parallel", `${SLOTS}`, "--ctx-size", `${SLOTS * 4096}`];
  llama = spawn(LLAMA, flags, { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  llama.stderr.on("data", (text) => (said = (said + text).slice(-4000)));
  await until("llama-server ready", async () => {
    if (llama.exitCode !== null) throw new Error(`llama-server ended with ${llama.exitCode}\n${said}`);
    return fetch(`${url}/health`).then((answer) => answer.ok, () => false);
  }, 60_000);
  slots = async () => (await (await fetch(`${url}/slots`)).json()).filter((slot) => slot.is_processing).length;

  laid = layTraygate(`[[provider]]\nname = "llama-cpp"\nbase_url = "${url}"\nconcurrency = ${SLOTS}\n`);
  traygate = await laid.serve();
  openai = new OpenAI({ apiKey: "local", baseURL: `${traygate.url}/llama-cpp/v1`, maxRetries: 0 });
  anthropic = new Anthropic({ apiKey: "local", baseURL: `${traygate.url}/llama-cpp`, maxRetries: 0 });
});
after(async () => {
  await traygate?.stop();
  laid?.remove();
  const ended = once(llama, "exit");
  llama.kill("SIGTERM");
  await ended;
});

async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

const asked = (prompt) => [{ role: "user", content: prompt }];
/** A generation that ends only when its caller leaves: the model's own end is ignored. */
const endless = (prompt) => ({ model: MODEL, messages: asked(prompt), max_tokens: 3500, ignore_eos: true });

/** Whole input, output and where they come from, as on record. */
const usage = (row) => [row.input_tokens + (row.cached_input_tokens ?? 0), row.output_tokens, row.usage_basis];

test("a chat, whole and streamed, is on record", async () => {
  const { data, response } = await openai.chat.completions
    .create({ model: MODEL, messages: asked("Name three colours."), max_tokens: 16 })
    .withResponse();
  assert.ok(data.choices[0].message.content.length > 0);
  assert.ok(data.usage.completion_tokens > 0);
  const row = await traygate.row(response.headers.get("x-traygate-call"));
  assert.deepEqual([row.provider, row.model, row.outcome], ["llama-cpp", MODEL, "completed"]);
  assert.deepEqual(usage(row), [data.usage.prompt_tokens, data.usage.completion_tokens, "reported"]);
  assert.equal(row.cost_nanos, 0);

  const { data: stream, response: streamed } = await openai.chat.completions
    .create({ model: MODEL, messages: asked("Name three fruits."), max_tokens: 16, stream: true })
    .withResponse();
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.ok(chunks.filter((chunk) => chunk.choices[0]?.delta.content).length > 1);
  assert.ok(chunks.some((chunk) => chunk.choices[0]?.finish_reason));
  // The stream did not ask for its usage: Traygate did, and kept the chunk that tells.
  assert.ok(chunks.every((chunk) => chunk.choices.length > 0));
  const [input, output, basis] = usage(await traygate.row(streamed.headers.get("x-traygate-call")));
  assert.ok(input > 0 && output > 1 && output <= 16, `${input} ${output}`);
  assert.equal(basis, "reported");
});

test("Anthropic's messages, whole and streamed", async () => {
  const whole = await anthropic.messages.create({ model: MODEL, messages: asked("Name three birds."), max_tokens: 16 });
  assert.ok(whole.content[0].text.length > 0);
  assert.ok(whole.usage.output_tokens > 0);
  const stream = anthropic.messages.stream({ model: MODEL, messages: asked("Name three trees."), max_tokens: 16 });
  let deltas = 0;
  stream.on("text", () => (deltas += 1));
  const final = await stream.finalMessage();
  assert.ok(deltas > 1);
  assert.ok(final.usage.output_tokens > 0);
  const ended = async () => (await traygate.rows()).filter((row) => row.route === "messages" && row.outcome === "completed");
  await until("two rows", async () => (await ended()).length === 2);
  const messages = await ended();
  const outputs = messages.map((row) => usage(row)[1]).sort();
  assert.deepEqual(outputs, [whole.usage.output_tokens, final.usage.output_tokens].sort());
});

test("twice as many calls as slots are all answered, all slots at work", async () => {
  let busiest = 0;
  let done = false;
  const watching = (async () => {
    while (!done) busiest = Math.max(busiest, await slots());
  })();
  const prompts = Array.from({ length: 2 * SLOTS }, (_, n) => `Write a line about the number ${n}.`);
  const answers = await Promise.all(
    prompts.map((prompt) =>
      openai.chat.completions.create({ model: MODEL, messages: asked(prompt), max_tokens: 32, ignore_eos: true }),
    ),
  );
  done = true;
  await watching;
  assert.deepEqual(answers.map((answer) => answer.usage.completion_tokens), prompts.map(() => 32));
  assert.equal(busiest, SLOTS);
});

test("a client that leaves a stream frees its slot within 3 s", async () => {
  const { data: stream, response } = await openai.chat.completions
    .create({ ...endless("Count as far as you can."), stream: true })
    .withResponse();
  let seen = 0;
  for await (const _ of stream) {
    if (++seen === 5) assert.equal(await slots(), 1);
    if (seen === 5) break; // leaving the loop aborts the request
  }
  await until("the slot freed", async () => (await slots()) === 0);
  assert.equal((await traygate.row(response.headers.get("x-traygate-call"))).outcome, "client_left");
});

test("a client that leaves before any content frees its slot after its linger", async () => {
  const controller = new AbortController();
  const call = openai.chat.completions.create(endless("Count without telling."), { signal: controller.signal });
  const left = assert.rejects(call, OpenAI.APIUserAbortError);
  await until("the slot taken", async () => (await slots()) === 1);
  controller.abort();
  await left;
  // Kept `linger_secs` (2) for the client's own retry, then cancelled. The server
  // looks for callers that left only after a second without any result, and an
  // answer of `/slots` is one: asked more often, it would never look.
  await until("the slot freed", async () => (await slots()) === 0, 10_000, 1500);
  const [row] = (await traygate.rows()).filter((row) => row.outcome === "client_left" && !row.streaming);
  assert.equal(row.dedup, "miss");
});
