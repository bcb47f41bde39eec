// Starts the provider and Traygate, and ends what was started.
import { fork, spawn } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { setTimeout as wait } from "node:timers/promises";

const running = new Set();

/** Ends everything that is still running. */
export async function endAll() {
  await Promise.all([...running].map(end));
}

async function end(child) {
  running.delete(child);
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = once(child, "exit");
  child.kill("SIGTERM");
  // Traygate drains for up to ten seconds before it goes.
  const late = setTimeout(() => child.kill("SIGKILL"), 15_000);
  await gone;
  clearTimeout(late);
}

/** A provider of our own, in a process of its own. */
export async function startProvider() {
  const file = fileURLToPath(new URL("provider.mjs", import.meta.url));
  const child = fork(file);
  running.add(child);
  const ask = async (message) => {
    const answered = once(child, "message");
    child.send(message);
    return (await answered)[0];
  };
  const [{ port }] = await once(child, "message");
  return {
    url: `http://127.0.0.1:${port}`,
    /** Changes how it answers: `state` well, down or hung, `delayMs`, `events`, `gapMs`. */
    set: (set) => ask({ set }),
    /** Forgets the calls noted so far. */
    forget: () => ask({ forget: true }),
    /** Every call noted. */
    received: async () => (await ask({ report: true })).received,
    end: () => end(child),
  };
}

/** The environment without the developer's own settings of Traygate. */
function withoutSettings() {
  return Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("TRAYGATE_")));
}

/** Traygate in front of `provider`, with a fresh data folder under `scratch`. */
export async function startTraygate({ binary, provider, scratch, args = [], config = "" }) {
  fs.mkdirSync(scratch, { recursive: true });
  const folder = fs.mkdtempSync(path.join(scratch, "traygate-"));
  const file = path.join(folder, "config.toml");
  fs.writeFileSync(
    file,
    `[[provider]]\nname = "openai"\nbase_url = "${provider.url}/v1"\nkey = "pass"\n${config}`,
  );
  const log = path.join(folder, "traygate.log");
  const output = fs.openSync(log, "w");
  const child = spawn(binary, ["serve", "--port", "0", "--config", file, "--data-dir", folder, ...args], {
    // A group of its own: Ctrl-C reaches the bench, which ends its children in order.
    detached: true,
    stdio: ["ignore", output, output],
    env: withoutSettings(),
  });
  running.add(child);
  child.on("error", (error) => fs.appendFileSync(log, `${error}\n`));
  const limit = Date.now() + 10_000;
  while (Date.now() < limit && child.exitCode === null) {
    const address = /listening on (http:\/\/127\.0\.0\.1:\d+)\s/.exec(fs.readFileSync(log, "utf8"));
    if (address) return { url: address[1], end: () => end(child) };
    await wait(20);
  }
  await end(child);
  throw new Error(`traygate does not listen:\n${fs.readFileSync(log, "utf8")}`);
}
