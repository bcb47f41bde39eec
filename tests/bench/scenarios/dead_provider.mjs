// One call every 2 s while the provider answers 503 for a minute, or accepts and never answers.
import { setMaxListeners } from "node:events";
import { until } from "./clock.mjs";
import { generations, median, most, openSide, seconds, tally } from "./side.mjs";

/** Times of the full run, milliseconds; `--quick` divides all of them by five. */
const EVERY = 2000;
const LASTS = 150_000;
const DIES = 15_000;
const RETURNS = 75_000;
const ANSWERS_IN = 300;

export const outage = (context) => scenario(context, "outage");
export const hang = (context) => scenario(context, "hang");

async function scenario(context, name) {
  const scale = context.quick ? 5 : 1;
  const state = name === "outage" ? "down" : "hung";
  const timeout = 5 / scale;
  const config = context.quick ? "\n[breaker]\nopen_secs = 12\nrecovery_check_secs = 0.4\n" : "";
  const args = name === "hang" ? ["--timeout", String(timeout)] : [];
  // Two providers and hardly any load: the sides do not disturb each other.
  const [direct, traygate] = await Promise.all(
    ["direct", "traygate"].map((which) => run(which, context, { scale, state, args, config })),
  );
  const checks = name === "outage" ? outageChecks(direct, traygate, scale) : hangChecks(direct, traygate, scale);
  const every = `one call every ${EVERY / scale / 1000} s`;
  const dead = `from ${DIES / scale / 1000} s to ${RETURNS / scale / 1000} s`;
  return [
    {
      name,
      title: name === "outage" ? `${every}, the provider answers 503 ${dead}` : `${every}, the provider never answers ${dead}`,
      sides: { direct, traygate },
      checks,
      span: { from: DIES / scale, to: RETURNS / scale, label: name === "outage" ? "503" : "never answers" },
    },
  ];
}

async function run(which, context, { scale, state, args, config }) {
  const side = await openSide(which, context, { args, config });
  await side.provider.set({ state: "well", delayMs: ANSWERS_IN / scale });
  const over = new AbortController();
  // Every call listens, some of them to the end.
  setMaxListeners(0, over.signal);
  const began = side.begin();
  const switches = (async () => {
    await until(began + DIES / scale);
    await side.provider.set({ state });
    await until(began + RETURNS / scale);
    await side.provider.set({ state: "well" });
  })();
  const calls = [];
  for (let index = 0; index * EVERY < LASTS; index += 1) {
    await until(began + (index * EVERY) / scale);
    calls.push(side.client.call(`question ${index}`, { signal: over.signal }));
  }
  await until(began + LASTS / scale);
  await switches;
  // What hangs now would hang for the SDK's own ten minutes.
  over.abort();
  await Promise.all(calls);
  return side.close();
}

const whileDead = (list, scale) =>
  list.filter((one) => one.start >= DIES / scale && one.start < RETURNS / scale);

/** Attempts that Traygate refused without asking the provider. */
const refusals = (side) => side.attempts.filter((attempt) => attempt.shouldRetry === "false");

/** From the provider's return to the first whole answer after it. */
function recovered(side, scale) {
  const good = side.calls.filter((call) => call.outcome === "ok" && call.end >= RETURNS / scale);
  return Math.min(...good.map((call) => call.end)) - RETURNS / scale;
}

function firstSuccess(direct, traygate, scale) {
  const after = recovered(traygate, scale);
  return {
    what: "first success after the return",
    must: `within ${5 / scale} s`,
    direct: seconds(recovered(direct, scale)),
    measured: seconds(after),
    pass: after <= 5000 / scale,
  };
}

function outageChecks(direct, traygate, scale) {
  const reached = (side) => whileDead(generations(side), scale).length;
  const refused = refusals(traygate);
  const typical = median(refused.map((attempt) => attempt.end - attempt.start));
  const complete = refused.filter((attempt) => attempt.retryAfter !== undefined && attempt.status === 503).length;
  const retried = whileDead(traygate.calls, scale).filter(
    (call) => refused.some((attempt) => attempt.call === call.id && attempt.start < lastStart(traygate, call)),
  ).length;
  return [
    {
      what: "generation calls to the dead provider",
      must: "at most 5",
      direct: reached(direct),
      measured: reached(traygate),
      pass: reached(traygate) <= 5,
    },
    {
      what: `${refused.length} refusals, median`,
      must: "about 1 ms",
      measured: seconds(typical),
      pass: refused.length > 0 && typical < 5,
    },
    {
      what: "503 with retry-after and x-should-retry: false",
      must: "all refusals",
      measured: `${complete} of ${refused.length}`,
      pass: refused.length > 0 && complete === refused.length,
    },
    { what: "refusals the SDK retried", must: "0", measured: retried, pass: retried === 0 },
    firstSuccess(direct, traygate, scale),
  ];
}

function lastStart(side, call) {
  return most(side.attempts.filter((attempt) => attempt.call === call.id), (attempt) => attempt.start);
}

function hangChecks(direct, traygate, scale) {
  const firstHang = Math.min(...whileDead(traygate.attempts, scale).map((attempt) => attempt.start));
  const opened = Math.min(...refusals(traygate).map((attempt) => attempt.end)) - firstHang;
  const longest = (side) => most(side.attempts, (attempt) => (attempt.end ?? LASTS / scale) - attempt.start);
  return [
    {
      what: "breaker open after the first hang",
      must: `within ${15 / scale} s`,
      measured: seconds(opened),
      pass: opened <= 15_000 / scale,
    },
    {
      what: "longest HTTP attempt",
      must: `at most ${6 / scale} s`,
      direct: seconds(longest(direct)),
      measured: seconds(longest(traygate)),
      pass: longest(traygate) <= 6000 / scale,
    },
    firstSuccess(direct, traygate, scale),
    {
      what: "what became of the calls",
      must: "",
      direct: tally(direct.calls, (call) => call.outcome),
      measured: tally(traygate.calls, (call) => call.outcome),
      pass: true,
    },
  ];
}
