// 20 different calls at once: the pool lets 16 through, or all of them.
import { generations, most, openSide, seconds } from "./side.mjs";

const CALLS = 20;
const TAKES = 1500;

export async function fanOut(context) {
  const results = [];
  const run = async (which, concurrency) => {
    const args = ["--concurrency", String(concurrency)];
    const side = await openSide(which, context, { connections: CALLS, args });
    await side.provider.set({ delayMs: TAKES });
    side.begin();
    await Promise.all(Array.from({ length: CALLS }, (_, index) => side.client.call(`question ${index}`)));
    return side.close();
  };
  const direct = await run("direct", 0);
  for (const [concurrency, floor] of [[16, 3000], [32, 1500]]) {
    const traygate = await run("traygate", concurrency);
    const took = most(traygate.calls, (call) => call.end);
    const atOnce = mostAtOnce(generations(traygate));
    const allowed = Math.min(concurrency, CALLS);
    results.push({
      name: `fan-out-${concurrency}`,
      title: `${CALLS} different calls at once, the provider takes 1.5 s, --concurrency ${concurrency}`,
      sides: { direct, traygate },
      checks: [
        {
          what: `all ${CALLS} answered after, at ${concurrency}`,
          must: `about ${(floor / 1000).toFixed(1)} s`,
          direct: seconds(most(direct.calls, (call) => call.end)),
          measured: seconds(took),
          pass: took > floor - 50 && took < floor + 200 && traygate.calls.every((call) => call.outcome === "ok"),
        },
        {
          what: "most upstream calls at once",
          must: String(allowed),
          direct: mostAtOnce(generations(direct)),
          measured: atOnce,
          pass: atOnce === allowed,
        },
      ],
    });
  }
  return results;
}

/** How many of `calls` were open at the same time, at most. */
function mostAtOnce(calls) {
  const changes = calls.flatMap((call) => [[call.start, 1], [call.end, -1]]);
  changes.sort(([one, step], [other, otherStep]) => one - other || step - otherStep);
  let open = 0;
  return changes.reduce((top, [, step]) => Math.max(top, (open += step)), 0);
}
