// The official SDK with its default retries, and a note of every HTTP attempt it makes.
import fetch from "node-fetch";
import OpenAI from "openai";
import { clock } from "./clock.mjs";

/**
 * A client of the server at `url`.
 *
 * `attempts` holds one entry for each HTTP request the SDK sent; `calls` one
 * for each call its user made. Times are those of {@link clock}.
 */
export function makeClient(url) {
  const attempts = [];
  const calls = [];
  const noted = new Map();
  // The SDK's own transport, node-fetch with its keep-alive agent, watched.
  const watched = async (target, init) => {
    const prompt = JSON.parse(init.body).messages.at(-1).content;
    const attempt = { call: noted.get(init.headers["x-bench-call"]), prompt, start: clock() };
    attempt.attempt = Number(init.headers["x-stainless-retry-count"] ?? 0);
    delete init.headers["x-bench-call"];
    attempts.push(attempt);
    try {
      const response = await fetch(target, init);
      attempt.head = clock();
      attempt.status = response.status;
      attempt.dedup = response.headers.get("x-traygate-dedup") ?? undefined;
      attempt.retryAfter = response.headers.get("retry-after") ?? undefined;
      attempt.shouldRetry = response.headers.get("x-should-retry") ?? undefined;
      // The SDK leaves the body of an answer that it retries unread.
      if (response.status >= 400) attempt.end = attempt.head;
      response.body.once("end", () => (attempt.end = clock()));
      response.body.once("error", (error) => {
        attempt.end = clock();
        attempt.error = String(error);
      });
      return response;
    } catch (error) {
      attempt.end = clock();
      attempt.error = String(error);
      throw error;
    }
  };
  const openai = new OpenAI({ apiKey: "sk-bench-0000", baseURL: `${url}/v1`, fetch: watched });

  /** One call, to its last byte. Never throws: what became of it is in the note. */
  async function call(prompt, { stream = false, lane, signal } = {}) {
    const id = String(calls.length);
    const note = { id: calls.length, lane: lane ?? calls.length, prompt, start: clock() };
    calls.push(note);
    noted.set(id, note.id);
    const body = { model: "gpt-4o-mini", messages: [{ role: "user", content: prompt }], stream };
    try {
      const answer = await openai.chat.completions.create(body, { headers: { "x-bench-call": id }, signal });
      if (stream) {
        note.events = 0;
        for await (const chunk of answer) if (chunk.choices[0]?.delta.content) note.events += 1;
      } else {
        note.text = answer.choices[0].message.content;
      }
      note.outcome = "ok";
    } catch (error) {
      note.outcome = signal?.aborted ? "still waiting" : "error";
      note.error = `${error.constructor.name}: ${error.message}`;
    }
    note.end = clock();
    return note;
  }

  return { attempts, calls, call };
}

/** Makes `count` different calls that are answered at once, so that a run does not measure cold connections. */
export async function warm(client, provider, count) {
  await provider.set({ state: "well", delayMs: 0 });
  await Promise.all(Array.from({ length: count }, (_, index) => client.call(`warm-up ${index}`)));
  client.attempts.length = 0;
  client.calls.length = 0;
  await provider.forget();
}
