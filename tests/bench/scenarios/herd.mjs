// 200 identical calls at once to a provider that takes 1.5 s: one of them costs.
import { generations, most, openSide, seconds, tally } from "./side.mjs";

const CALLS = 200;
const TAKES = 1500;

export async function herd(context) {
  const results = [];
  for (const stream of [false, true]) {
    const sides = {};
    for (const which of ["direct", "traygate"]) {
      const side = await openSide(which, context, { connections: CALLS });
      await side.provider.set({ delayMs: TAKES, events: 15, gapMs: TAKES / 15 });
      side.begin();
      const prompt = "What is new?";
      await Promise.all(Array.from({ length: CALLS }, () => side.client.call(prompt, { stream })));
      sides[which] = await side.close();
    }
    results.push({ stream, sides });
  }
  return results.map(({ stream, sides }) => {
    const { traygate, direct } = sides;
    const slowest = (side) => most(side.attempts, (attempt) => attempt.end - attempt.start);
    const joined = traygate.attempts.filter((attempt) => attempt.dedup === "joined").length;
    const miss = traygate.attempts.filter((attempt) => attempt.dedup === "miss").length;
    const whole = traygate.calls.filter((call) => call.outcome === "ok" && (!stream || call.events === 15)).length;
    const upstream = generations(traygate).length;
    return {
      name: stream ? "herd-streamed" : "herd",
      title: `${CALLS} identical ${stream ? "streams" : "calls"} at once, the provider takes 1.5 s`,
      sides,
      checks: [
        { what: "upstream calls", must: "1", direct: generations(direct).length, measured: upstream, pass: upstream === 1 },
        {
          what: "dedup headers",
          must: `1 miss, ${CALLS - 1} joined`,
          measured: tally(traygate.attempts, (attempt) => attempt.dedup),
          pass: miss === 1 && joined === CALLS - 1,
        },
        { what: "whole answers", must: String(CALLS), measured: whole, pass: whole === CALLS },
        {
          what: "slowest answer",
          must: "under 1.7 s",
          direct: seconds(slowest(direct)),
          measured: seconds(slowest(traygate)),
          pass: slowest(traygate) < 1700,
        },
      ],
    };
  });
}
