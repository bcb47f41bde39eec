// `openai` for Node, the last 4.x and the newest: both are in wide use.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import * as current from "openai";
import * as four from "openai-4";
import { EVENT_ERROR, TEXT, TOOL_TEXT } from "./provider.mjs";
import { DIRECT, STAND_IN_KEY, countingFetch, freshPrompt, setStage, until } from "./stage.mjs";

const KEY = "sk-the-clients-own";
const WEATHER = {
  name: "weather",
  description: "Tells the weather",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const words = async (stream) => {
  const parts = [];
  for await (const chunk of stream) parts.push(chunk.choices[0]?.delta?.content ?? "");
  return parts;
};

let stage;
before(async () => {
  stage = await setStage();
});
after(() => stage.stop());

for (const [name, sdk] of Object.entries({ "openai 4.104.0": four, "openai, newest": current })) {
  const OpenAI = sdk.default;
  const client = (options = {}) => new OpenAI({ apiKey: KEY, baseURL: stage.openai, ...options });
  const chat = (model, prompt, more = {}) => ({ model, messages: [{ role: "user", content: prompt }], ...more });

  describe(name, () => {
    test("a chat passes both ways, the client's own key with it", async () => {
      const prompt = freshPrompt();
      const { data, response } = await client().chat.completions.create(chat("ok", prompt)).withResponse();
      assert.equal(data.choices[0].message.content, TEXT);
      assert.equal(data.usage.total_tokens, 18);
      const [call, ...others] = stage.provider.calls(prompt);
      assert.deepEqual(others, []);
      assert.equal(call.headers.authorization, `Bearer ${KEY}`);
      assert.equal(call.path, "/v1/chat/completions");
      if (DIRECT) return;
      assert.equal(response.headers.get("x-traygate-dedup"), "miss");
      assert.equal(response.headers.get("x-traygate-provider"), "openai");
      const id = response.headers.get("x-traygate-call");
      const row = await stage.traygate.row(id);
      assert.equal(row.outcome, "completed");
      assert.equal(row.model, "ok");
    });

    test("a stream comes event by event, without a usage chunk that nobody asked for", async () => {
      const prompt = freshPrompt();
      const { data: stream, response } = await client()
        .chat.completions.create(chat("ok", prompt, { stream: true }))
        .withResponse();
      const chunks = [];
      for await (const chunk of stream) chunks.push(chunk);
      assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), TEXT);
      assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
      assert.deepEqual(chunks.filter((chunk) => chunk.usage), []);
      if (DIRECT) return;
      // Traygate has asked for it, and kept it to itself.
      const [call] = stage.provider.calls(prompt);
      assert.deepEqual(JSON.parse(call.body).stream_options, { include_usage: true });
      const row = await stage.traygate.row(response.headers.get("x-traygate-call"));
      assert.deepEqual([row.input_tokens, row.output_tokens, row.usage_basis], [11, 7, "reported"]);
    });

    test("a usage chunk that was asked for comes", async () => {
      const options = { stream: true, stream_options: { include_usage: true } };
      const stream = await client().chat.completions.create(chat("ok", freshPrompt(), options));
      const chunks = [];
      for await (const chunk of stream) chunks.push(chunk);
      assert.equal(chunks.at(-1).usage.completion_tokens, 7);
    });

    test("a tool is called, streamed and not, and answered", async () => {
      const tools = [{ type: "function", function: WEATHER }];
      const whole = await client().chat.completions.create(chat("tool", freshPrompt(), { tools }));
      const [called] = whole.choices[0].message.tool_calls;
      assert.equal(called.function.name, "weather");
      assert.deepEqual(JSON.parse(called.function.arguments), { city: "Paris" });

      const prompt = freshPrompt();
      const stream = await client().chat.completions.create(chat("tool", prompt, { tools, stream: true }));
      let text = "";
      for await (const chunk of stream) text += chunk.choices[0]?.delta.tool_calls?.[0].function.arguments ?? "";
      assert.deepEqual(JSON.parse(text), { city: "Paris" });

      const messages = [
        { role: "user", content: prompt },
        whole.choices[0].message,
        { role: "tool", tool_call_id: called.id, content: "sunny" },
      ];
      const last = await client().chat.completions.create({ model: "tool", tools, messages });
      assert.equal(last.choices[0].message.content, TOOL_TEXT);
    });

    test("responses, whole and streamed", async () => {
      const whole = await client().responses.create({ model: "ok", input: freshPrompt() });
      assert.equal(whole.output_text, TEXT);
      const stream = await client().responses.create({ model: "ok", input: freshPrompt(), stream: true });
      const events = [];
      for await (const event of stream) events.push(event);
      const deltas = events.filter((event) => event.type === "response.output_text.delta");
      assert.equal(deltas.map((event) => event.delta).join(""), TEXT);
      assert.equal(events.at(-1).type, "response.completed");
    });

    test("a compressed answer arrives, whole and streamed", async () => {
      const whole = await client().chat.completions.create(chat("gzip", freshPrompt()));
      assert.equal(whole.choices[0].message.content, TEXT);
      const stream = await client().chat.completions.create(chat("gzip", freshPrompt(), { stream: true }));
      assert.equal((await words(stream)).join(""), TEXT);
    });

    test("embeddings and models", async () => {
      const { data } = await client().embeddings.create({ model: "ok", input: ["a", freshPrompt()] });
      assert.deepEqual(data.map((one) => Array.from(one.embedding)), [[0.25, -0.5, 1], [0.25, -0.5, 1]]);
      const names = [];
      for await (const model of client().models.list()) names.push(model.id);
      assert.deepEqual(names, ["ok", "tool"]);
      assert.equal((await client().models.retrieve("ok")).id, "ok");
    });

    test("an abort in mid-stream reaches the provider within 3 s", async () => {
      const prompt = freshPrompt();
      const { data: stream, response } = await client()
        .chat.completions.create(chat("long", prompt, { stream: true }))
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
      for (const [status, type] of [
        [400, "BadRequestError"],
        [401, "AuthenticationError"],
        [404, "NotFoundError"],
        [422, "UnprocessableEntityError"],
      ]) {
        const counting = countingFetch();
        const prompt = freshPrompt();
        const call = client({ fetch: counting }).chat.completions.create(chat(`status-${status}`, prompt));
        await assert.rejects(call, (error) => {
          assert.ok(error instanceof OpenAI[type], `${error}`);
          assert.equal(error.status, status);
          assert.equal(error.code, `scripted_${status}`);
          assert.match(error.message, new RegExp(`scripted ${status}`));
          return true;
        });
        assert.equal(counting.requests, 1);
        assert.equal(stage.provider.calls(prompt).length, 1);
      }
    });

    test("the SDK's own retry of a 503 goes through and gets its answer", async () => {
      const prompt = freshPrompt();
      const counting = countingFetch();
      const data = await client({ fetch: counting }).chat.completions.create(chat("flaky-once", prompt));
      assert.equal(data.choices[0].message.content, TEXT);
      assert.equal(counting.requests, 2);
      assert.equal(stage.provider.calls(prompt).length, 2);
    });

    test("an open breaker refuses with a typed error, tried once, and the provider hears nothing", async () => {
      const { openai } = stage.breakable();
      const prompt = freshPrompt();
      if (!DIRECT) {
        const dying = client({ baseURL: openai, maxRetries: 0 });
        for (const n of [1, 2]) {
          const call = dying.chat.completions.create(chat("status-503", `${freshPrompt()} ${n}`));
          await assert.rejects(call, OpenAI.InternalServerError);
        }
      }
      const counting = countingFetch();
      const refused = client({ baseURL: openai, fetch: counting });
      const call = refused.chat.completions.create(chat(DIRECT ? "refused" : "ok", prompt));
      await assert.rejects(call, (error) => {
        assert.ok(error instanceof OpenAI.InternalServerError, `${error}`);
        assert.equal(error.status, 503);
        assert.equal(error.code, "breaker_open");
        assert.match(error.message, /Traygate/);
        return true;
      });
      assert.equal(counting.requests, 1);
      assert.equal(counting.headers[0].get("x-should-retry"), "false");
      assert.ok(Number(counting.headers[0].get("retry-after")) > 0);
      assert.equal(stage.provider.calls(prompt).length, DIRECT ? 1 : 0);
      if (DIRECT) return;
      const row = await stage.traygate.row(counting.headers[0].get("x-traygate-call"));
      assert.deepEqual([row.outcome, row.status, row.upstream_call], ["refused", 503, false]);
    });

    test("a spent budget refuses with a typed error, tried once", { skip: DIRECT }, async () => {
      const counting = countingFetch();
      const prompt = freshPrompt();
      const call = client({ fetch: counting }).chat.completions.create(chat("too-dear", prompt));
      await assert.rejects(call, (error) => {
        assert.ok(error instanceof OpenAI.APIError, `${error}`);
        assert.deepEqual([error.status, error.code], [402, "budget_exceeded"]);
        assert.match(error.message, /budget/);
        return true;
      });
      assert.equal(counting.requests, 1);
      assert.equal(stage.provider.calls(prompt).length, 0);
      const row = await stage.traygate.row(counting.headers[0].get("x-traygate-call"));
      assert.deepEqual([row.outcome, row.status, row.upstream_call], ["refused", 402, false]);
    });

    test("an error event in mid-stream is the SDK's own error", async () => {
      const stream = await client().chat.completions.create(chat("error-event", freshPrompt(), { stream: true }));
      await assert.rejects(words(stream), (error) => {
        assert.ok(error instanceof OpenAI.APIError, `${error}`);
        assert.match(error.message, new RegExp(EVENT_ERROR));
        return true;
      });
    });

    test("a stream that breaks is an error, and typed by Traygate where it broke between two events", async () => {
      for (const model of ["broken-stream", "half-event"]) {
        const { data: stream, response } = await client()
          .chat.completions.create(chat(model, freshPrompt(), { stream: true }))
          .withResponse();
        const typed = !DIRECT && model === "broken-stream";
        await assert.rejects(words(stream), (error) => !typed || error instanceof OpenAI.APIError);
        if (DIRECT) continue;
        const row = await stage.traygate.row(response.headers.get("x-traygate-call"));
        assert.equal(row.outcome, "broken_stream");
      }
    });

    test("a stream of responses that fails half-way is the SDK's own error", async () => {
      for (const model of ["error-event", "broken-stream"]) {
        const stream = await client().responses.create({ model, input: freshPrompt(), stream: true });
        const read = async () => {
          for await (const _ of stream);
        };
        const typed = !DIRECT || model === "error-event";
        await assert.rejects(read(), (error) => !typed || error instanceof OpenAI.APIError);
      }
    });

    test("half a JSON answer is an error, never an answer", async () => {
      const call = client({ maxRetries: 0 }).chat.completions.create(chat("cut-json", freshPrompt()));
      await assert.rejects(call);
    });

    test("a caller's own timeout ends the call at the provider too", async () => {
      const prompt = freshPrompt();
      const call = client({ timeout: 300, maxRetries: 0 }).chat.completions.create(chat("hang", prompt));
      await assert.rejects(call, OpenAI.APIConnectionTimeoutError);
      // Traygate holds it `linger_secs` for the client's retry first.
      await until("the provider's connection closed", () => stage.provider.calls(prompt)[0].left, 5000);
    });

    test("twins share one upstream call, plain and streamed", { skip: DIRECT && "nobody joins them" }, async () => {
      for (const stream of [false, true]) {
        const prompt = freshPrompt();
        const ask = async () => {
          const { data, response } = await client()
            .chat.completions.create(chat("wait-400", prompt, { stream }))
            .withResponse();
          const text = stream ? (await words(data)).join("") : data.choices[0].message.content;
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
      await client({ apiKey: "traygate", baseURL: stage.standIn.openai }).chat.completions.create(chat("ok", prompt));
      assert.equal(stage.provider.calls(prompt)[0].headers.authorization, `Bearer ${STAND_IN_KEY}`);
    });

    test("a provider that does not exist is a typed 404", { skip: DIRECT && "Traygate's own answer" }, async () => {
      const baseURL = stage.openai.replace("/openai/", "/nowhere/");
      const call = client({ baseURL }).chat.completions.create(chat("ok", freshPrompt()));
      await assert.rejects(call, (error) => error instanceof OpenAI.NotFoundError && error.code === "no_provider");
    });
  });
}
