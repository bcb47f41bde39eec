// `@anthropic-ai/sdk` for Node.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { EVENT_ERROR, TEXT, TOOL_TEXT } from "./provider.mjs";
import { DIRECT, STAND_IN_KEY, countingFetch, freshPrompt, setStage, until } from "./stage.mjs";

const KEY = "sk-ant-the-clients-own";
const WEATHER = {
  name: "weather",
  description: "Tells the weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

let stage;
before(async () => {
  stage = await setStage();
});
after(() => stage.stop());

const client = (options = {}) => new Anthropic({ apiKey: KEY, baseURL: stage.anthropic, ...options });
const message = (model, prompt, more = {}) => ({
  model,
  max_tokens: 64,
  messages: [{ role: "user", content: prompt }],
  ...more,
});
const words = async (stream) => {
  const parts = [];
  for await (const event of stream) if (event.delta?.type === "text_delta") parts.push(event.delta.text);
  return parts;
};

test("a message passes both ways, the client's own key and version with it", async () => {
  const prompt = freshPrompt();
  const { data, response } = await client().messages.create(message("ok", prompt)).withResponse();
  assert.equal(data.content[0].text, TEXT);
  assert.equal(data.usage.output_tokens, 7);
  const [call, ...others] = stage.provider.calls(prompt);
  assert.deepEqual(others, []);
  assert.equal(call.path, "/v1/messages");
  // Newer SDKs send an API key as a bearer; a login's token looks otherwise.
  assert.equal(call.headers["x-api-key"] ?? call.headers.authorization.replace("Bearer ", ""), KEY);
  assert.match(call.headers["anthropic-version"], /^20\d\d-\d\d-\d\d$/);
  if (DIRECT) return;
  assert.equal(response.headers.get("x-traygate-dedup"), "miss");
  assert.equal(response.headers.get("x-traygate-provider"), "anthropic");
  const id = response.headers.get("x-traygate-call");
  const row = await stage.traygate.row(id);
  assert.equal(row.outcome, "completed");
});

test("a stream comes event by event, raw and through the helper", async () => {
  const raw = await client().messages.create(message("ok", freshPrompt(), { stream: true }));
  assert.deepEqual((await words(raw)).join(""), TEXT);
  const final = await client().messages.stream(message("ok", freshPrompt())).finalMessage();
  assert.equal(final.content[0].text, TEXT);
  assert.equal(final.stop_reason, "end_turn");
  assert.deepEqual([final.usage.input_tokens, final.usage.output_tokens], [11, 7]);
});

test("a tool is called, streamed and not, and answered", async () => {
  const tools = [WEATHER];
  const prompt = freshPrompt();
  const whole = await client().messages.create(message("tool", prompt, { tools }));
  const { id, name, input } = whole.content[0];
  assert.deepEqual([whole.stop_reason, name, input], ["tool_use", "weather", { city: "Paris" }]);
  const streamed = await client().messages.stream(message("tool", freshPrompt(), { tools })).finalMessage();
  assert.deepEqual(streamed.content[0].input, { city: "Paris" });
  const messages = [
    { role: "user", content: prompt },
    { role: "assistant", content: whole.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: "sunny" }] },
  ];
  const last = await client().messages.create(message("tool", "", { tools, messages }));
  assert.equal(last.content[0].text, TOOL_TEXT);
});

test("tokens are counted and models listed", async () => {
  const { input_tokens } = await client().messages.countTokens({
    model: "ok",
    messages: [{ role: "user", content: freshPrompt() }],
  });
  assert.equal(input_tokens, 11);
  const names = [];
  for await (const model of client().models.list()) names.push(model.id);
  assert.deepEqual(names, ["ok", "tool"]);
  assert.equal((await client().models.retrieve("ok")).id, "ok");
});

test("an abort in mid-stream reaches the provider within 3 s", async () => {
  const prompt = freshPrompt();
  const { data: stream, response } = await client()
    .messages.create(message("long", prompt, { stream: true }))
    .withResponse();
  let seen = 0;
  for await (const _ of stream) if (++seen === 5) break; // leaving the loop aborts the request
  await until("the provider's connection closed", () => stage.provider.calls(prompt)[0].left);
  if (DIRECT) return;
  const id = response.headers.get("x-traygate-call");
  const row = await stage.traygate.row(id);
  assert.equal(row.outcome, "client_left");
});

test("a 4xx is the SDK's own typed error with the provider's words, tried once", async () => {
  for (const [status, type, kind] of [
    [400, "BadRequestError", "invalid_request_error"],
    [401, "AuthenticationError", "authentication_error"],
    [404, "NotFoundError", "not_found_error"],
  ]) {
    const counting = countingFetch();
    const prompt = freshPrompt();
    const call = client({ fetch: counting }).messages.create(message(`status-${status}`, prompt));
    await assert.rejects(call, (error) => {
      assert.ok(error instanceof Anthropic[type], `${error}`);
      assert.equal(error.status, status);
      assert.equal(error.error.error.type, kind);
      assert.equal(error.requestID, "req_scripted");
      return true;
    });
    assert.equal(counting.requests, 1);
    assert.equal(stage.provider.calls(prompt).length, 1);
  }
});

test("the SDK's own retry of a 503 goes through and gets its answer", async () => {
  const prompt = freshPrompt();
  const counting = countingFetch();
  const data = await client({ fetch: counting }).messages.create(message("flaky-once", prompt));
  assert.equal(data.content[0].text, TEXT);
  assert.equal(counting.requests, 2);
  assert.equal(stage.provider.calls(prompt).length, 2);
});

test("an open breaker refuses with a typed error, tried once, and the provider hears nothing", async () => {
  const { anthropic } = stage.breakable();
  const prompt = freshPrompt();
  if (!DIRECT) {
    const dying = client({ baseURL: anthropic, maxRetries: 0 });
    for (const n of [1, 2]) {
      const call = dying.messages.create(message("status-503", `${freshPrompt()} ${n}`));
      await assert.rejects(call, Anthropic.InternalServerError);
    }
  }
  const counting = countingFetch();
  const refused = client({ baseURL: anthropic, fetch: counting });
  const call = refused.messages.create(message(DIRECT ? "refused" : "ok", prompt));
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof Anthropic.InternalServerError, `${error}`);
    assert.equal(error.status, 503);
    assert.equal(error.error.error.code, "breaker_open");
    assert.match(error.message, /Traygate/);
    return true;
  });
  assert.equal(counting.requests, 1);
  assert.equal(counting.headers[0].get("x-should-retry"), "false");
  assert.equal(stage.provider.calls(prompt).length, DIRECT ? 1 : 0);
  if (DIRECT) return;
  const row = await stage.traygate.row(counting.headers[0].get("x-traygate-call"));
  assert.deepEqual([row.outcome, row.status, row.upstream_call], ["refused", 503, false]);
});

test("a spent budget refuses with a typed error, tried once", { skip: DIRECT }, async () => {
  const counting = countingFetch();
  const prompt = freshPrompt();
  const call = client({ fetch: counting }).messages.create(message("too-dear", prompt));
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof Anthropic.APIError, `${error}`);
    assert.deepEqual([error.status, error.error.error.type], [402, "billing_error"]);
    return true;
  });
  assert.equal(counting.requests, 1);
  assert.equal(stage.provider.calls(prompt).length, 0);
});

test("an error event in mid-stream is the SDK's own error", async () => {
  const stream = await client().messages.create(message("error-event", freshPrompt(), { stream: true }));
  await assert.rejects(words(stream), (error) => {
    assert.ok(error instanceof Anthropic.APIError, `${error}`);
    assert.match(error.message, new RegExp(EVENT_ERROR));
    return true;
  });
});

test("a stream that breaks is an error, and typed by Traygate where it broke between two events", async () => {
  for (const model of ["broken-stream", "half-event"]) {
    const { data: stream, response } = await client()
      .messages.create(message(model, freshPrompt(), { stream: true }))
      .withResponse();
    const typed = !DIRECT && model === "broken-stream";
    await assert.rejects(words(stream), (error) => !typed || error instanceof Anthropic.APIError);
    if (DIRECT) continue;
    const row = await stage.traygate.row(response.headers.get("x-traygate-call"));
    assert.equal(row.outcome, "broken_stream");
  }
});

test("a compressed answer arrives, whole and streamed", async () => {
  const whole = await client().messages.create(message("gzip", freshPrompt()));
  assert.equal(whole.content[0].text, TEXT);
  const stream = await client().messages.create(message("gzip", freshPrompt(), { stream: true }));
  assert.equal((await words(stream)).join(""), TEXT);
});

test("half a JSON answer is an error, never an answer", async () => {
  await assert.rejects(client({ maxRetries: 0 }).messages.create(message("cut-json", freshPrompt())));
});

test("twins share one upstream call, plain and streamed", { skip: DIRECT && "nobody joins them" }, async () => {
  for (const stream of [false, true]) {
    const prompt = freshPrompt();
    const ask = async () => {
      const { data, response } = await client()
        .messages.create(message("wait-400", prompt, { stream }))
        .withResponse();
      const text = stream ? (await words(data)).join("") : data.content[0].text;
      return { text, dedup: response.headers.get("x-traygate-dedup") };
    };
    const answers = await Promise.all([ask(), ask()]);
    assert.deepEqual(answers.map(({ text }) => text), [TEXT, TEXT]);
    assert.deepEqual(answers.map(({ dedup }) => dedup).sort(), ["joined", "miss"]);
    assert.equal(stage.provider.calls(prompt).length, 1);
  }
});

test("a placeholder key gives way to the configured one", { skip: DIRECT && "nobody replaces it" }, async () => {
  const prompt = freshPrompt();
  await client({ apiKey: "traygate", baseURL: stage.standIn.anthropic }).messages.create(message("ok", prompt));
  const { headers } = stage.provider.calls(prompt)[0];
  // One credential and no trace of the other, wherever this SDK puts its key.
  assert.deepEqual([headers["x-api-key"], headers.authorization], [STAND_IN_KEY, undefined]);
});
