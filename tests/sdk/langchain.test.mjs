// LangChain for JavaScript, on top of both SDKs.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { TEXT } from "./provider.mjs";
import { DIRECT, freshPrompt, setStage, until } from "./stage.mjs";

let stage;
before(async () => {
  stage = await setStage();
});
after(() => stage.stop());

const CHATS = {
  ChatOpenAI: (model, more) =>
    new ChatOpenAI({ model, apiKey: "sk-lc", configuration: { baseURL: stage.openai }, ...more }),
  ChatAnthropic: (model, more) => new ChatAnthropic({ model, apiKey: "sk-lc", anthropicApiUrl: stage.anthropic, ...more }),
};
const weather = tool(() => "sunny", {
  name: "weather",
  description: "Tells the weather",
  schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
});

for (const [name, chat] of Object.entries(CHATS)) {
  test(`${name}: asked, streamed, with a tool`, async () => {
    const prompt = freshPrompt();
    assert.equal((await chat("ok").invoke(prompt)).text, TEXT);
    assert.equal(stage.provider.calls(prompt).length, 1);

    let text = "";
    for await (const chunk of await chat("ok").stream(freshPrompt())) text += chunk.text;
    assert.equal(text, TEXT);

    const called = await chat("tool").bindTools([weather]).invoke(freshPrompt());
    assert.deepEqual(called.tool_calls.map(({ name, args }) => ({ name, args })), [{ name: "weather", args: { city: "Paris" } }]);
  });

  test(`${name}: a 4xx and a broken stream are errors, a twin joins`, async () => {
    await assert.rejects(chat("status-400").invoke(freshPrompt()), (error) => error.status === 400);
    const broken = async () => {
      for await (const _ of await chat("broken-stream", { maxRetries: 0 }).stream(freshPrompt()));
    };
    await assert.rejects(broken());
    const prompt = freshPrompt();
    const answers = await Promise.all([chat("wait-400").invoke(prompt), chat("wait-400").invoke(prompt)]);
    assert.deepEqual(answers.map((answer) => answer.text), [TEXT, TEXT]);
    assert.equal(stage.provider.calls(prompt).length, DIRECT ? 2 : 1);
  });

  test(`${name}: leaving a stream reaches the provider within 3 s`, async () => {
    const prompt = freshPrompt();
    const controller = new AbortController();
    let seen = 0;
    const read = async () => {
      for await (const _ of await chat("long").stream(prompt, { signal: controller.signal })) {
        if (++seen === 5) controller.abort();
      }
    };
    await assert.rejects(read());
    await until("the provider's connection closed", () => stage.provider.calls(prompt)[0].left);
  });
}

test("embeddings", async () => {
  const embeddings = new OpenAIEmbeddings({ model: "ok", apiKey: "sk-lc", configuration: { baseURL: stage.openai } });
  assert.deepEqual(await embeddings.embedQuery(freshPrompt()), [0.25, -0.5, 1]);
});
