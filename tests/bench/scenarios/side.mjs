// One side of a scenario, direct or through Traygate: its servers, its client, its record.
import { makeClient, warm } from "./client.mjs";
import { clock } from "./clock.mjs";
import { startProvider, startTraygate } from "./servers.mjs";

/** Starts a provider and, for the `traygate` side, Traygate in front of it. */
export async function openSide(which, context, { args, config, connections = 1 } = {}) {
  const provider = await startProvider();
  const gateway =
    which === "traygate"
      ? await startTraygate({ binary: context.binary, provider, scratch: context.scratch, args, config })
      : undefined;
  const client = makeClient((gateway ?? provider).url);
  await warm(client, provider, connections);
  let began;
  return {
    provider,
    client,
    /** Sets the moment that all times are counted from. */
    begin: () => (began = clock()),
    /** Ends the servers and returns the record, in milliseconds from the beginning. */
    close: async () => {
      const received = await provider.received();
      await gateway?.end();
      await provider.end();
      const record = { calls: client.calls, attempts: client.attempts, received };
      return Object.fromEntries(Object.entries(record).map(([key, list]) => [key, list.map((one) => since(began, one))]));
    },
  };
}

const TIMES = ["start", "head", "end"];

function since(began, note) {
  const shifted = { ...note };
  for (const key of TIMES) {
    if (shifted[key] !== undefined) shifted[key] = Math.round((shifted[key] - began) * 1000) / 1000;
  }
  return shifted;
}

/** The calls a provider received that cost money. */
export const generations = (side) => side.received.filter((call) => call.kind === "generation");

/** The largest of `list` by `measure`. */
export const most = (list, measure) => list.reduce((top, one) => Math.max(top, measure(one)), 0);

/** The middle of `numbers`. */
export function median(numbers) {
  const sorted = [...numbers].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}

/** Milliseconds as people read them. */
export function seconds(ms) {
  if (!Number.isFinite(ms)) return "never";
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** How often each value of `measure` occurs, as `3 joined, 1 miss`. */
export function tally(list, measure) {
  const counts = new Map();
  for (const one of list) counts.set(measure(one), (counts.get(measure(one)) ?? 0) + 1);
  return [...counts].map(([value, count]) => `${count} ${value ?? "without header"}`).join(", ");
}
