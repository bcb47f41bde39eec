// Identical streams in a closed loop share their upstream calls, different ones never do.
import { clock } from "./clock.mjs";
import { generations, most, openSide, seconds, tally } from "./side.mjs";

const CONNECTIONS = 200;
const EVENTS = 19;
const GAP = 40;
const FLOOR = EVENTS * GAP;
const AT_ONCE = 100;

export async function coalesce(context) {
  const lasts = context.quick ? 6000 : 30_000;
  const different = context.quick ? 200 : 1000;
  const parts = { identical: {}, different: {}, together: {} };
  for (const which of ["direct", "traygate"]) {
    // One client for each part, so that each has a record of its own.
    const part = async (load) => {
      const args = ["--dedup-secs", "0", "--concurrency", "128"];
      const side = await openSide(which, context, { connections: CONNECTIONS, args });
      await side.provider.set({ events: EVENTS, gapMs: GAP });
      await load(side.client, side.begin());
      return side.close();
    };
    parts.identical[which] = await part((client, began) =>
      lanes(CONNECTIONS, async (lane) => {
        while (clock() < began + lasts) await client.call("What is new?", { stream: true, lane });
      }),
    );
    let next = 0;
    parts.different[which] = await part((client) =>
      lanes(CONNECTIONS, async (lane) => {
        while (next < different) await client.call(`question ${next++}`, { stream: true, lane });
      }),
    );
    parts.together[which] = await part((client) =>
      lanes(AT_ONCE, (lane) => client.call(`question ${lane}`, { stream: true, lane })),
    );
  }
  return [identicalResult(parts.identical, lasts), differentResult(parts.different, different), togetherResult(parts.together)];
}

const lanes = (count, work) => Promise.all(Array.from({ length: count }, (_, lane) => work(lane)));

const whole = (side) => side.calls.filter((call) => call.outcome === "ok" && call.events === EVENTS).length;

function wholeCheck(side, must) {
  return { what: "whole answers", must: String(must), measured: whole(side), pass: whole(side) === must };
}

function identicalResult(sides, lasts) {
  const { direct, traygate } = sides;
  const upstream = generations(traygate).length;
  // Each stream takes 760 ms and a moment to be asked for again.
  const expected = Math.floor(lasts / (FLOOR + 20));
  return {
    name: "coalesce-identical",
    title: `identical streams (${EVENTS} events, ${GAP} ms apart) from ${CONNECTIONS} connections for ${lasts / 1000} s`,
    sides,
    checks: [
      {
        what: `upstream calls for ${traygate.calls.length} answers`,
        must: `about ${expected}`,
        direct: `${generations(direct).length} for ${direct.calls.length}`,
        measured: upstream,
        pass: Math.abs(upstream - expected) <= Math.max(3, expected * 0.2),
      },
      wholeCheck(traygate, traygate.calls.length),
      { what: "dedup headers", must: "", measured: tally(traygate.attempts, (attempt) => attempt.dedup), pass: true },
    ],
  };
}

function differentResult(sides, count) {
  const upstream = generations(sides.traygate).length;
  return {
    name: "coalesce-different",
    title: `${count} different streams from ${CONNECTIONS} connections`,
    sides,
    checks: [
      {
        what: `upstream calls for ${sides.traygate.calls.length} answers`,
        must: String(count),
        direct: generations(sides.direct).length,
        measured: upstream,
        pass: upstream === count,
      },
      wholeCheck(sides.traygate, count),
    ],
  };
}

function togetherResult(sides) {
  const slowest = (side) => most(side.calls, (call) => call.end - call.start);
  return {
    name: "coalesce-at-once",
    title: `${AT_ONCE} different streams at once, --concurrency 128; the floor is ${FLOOR} ms`,
    sides,
    checks: [
      {
        what: "slowest of 100 different streams",
        must: `under ${seconds(FLOOR + 100)}`,
        direct: seconds(slowest(sides.direct)),
        measured: seconds(slowest(sides.traygate)),
        pass: slowest(sides.traygate) < FLOOR + 100,
      },
      wholeCheck(sides.traygate, AT_ONCE),
    ],
  };
}
