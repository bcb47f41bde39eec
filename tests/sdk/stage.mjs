// Sets the stage for the clients: a scripted provider, and a Traygate whose
// `openai` and `anthropic` point at it. Run as a program it prints the stage
// as a line of JSON and holds it until its standard input closes (pytest's way in).
import { spawn, execFile } from "node:child_process";
import { appendFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { setTimeout as sleep } from "node:timers/promises";
import { startProvider } from "./provider.mjs";

/** Set by `tests/sdk/run --direct`: the clients talk to the provider itself. */
export const DIRECT = process.env.SDK_DIRECT === "1";
const ROOT = fileURLToPath(new URL("../../", import.meta.url));
const BINARY = process.env.TRAYGATE_BIN ?? join(ROOT, "target/debug/traygate");
/** Providers that a test may break for good, one for each test that does. */
const BREAKABLE = 6;
/** A key that only the environment holds: it stands in for a client's placeholder. */
export const STAND_IN_KEY = "sk-stand-in-from-the-environment";

/**
 * Lays out a Traygate with its own settings, record and home; nothing of whoever runs the tests reaches it.
 * @param {string} settings the settings file's text
 * @param {Record<string, string>} extra environment
 */
export function layTraygate(settings, extra = {}) {
  const scratch = mkdtempSync(join(tmpdir(), "traygate-sdk-"));
  const config = join(scratch, "config.toml");
  writeFileSync(config, settings);
  const foreign = /^(TRAYGATE_|XDG_|DBUS_)/;
  const own = Object.fromEntries(Object.entries(process.env).filter(([name]) => !foreign.test(name)));
  const env = { ...own, HOME: scratch, ...extra };
  const places = ["--config", config, "--data-dir", join(scratch, "data")];
  const callsCommand = [BINARY, ...places, "calls", "--format", "json", "--since", "1d"];

  /** Runs one command to its end; what it printed, and its exit code. */
  const run = async (args, input = "") => {
    const child = spawn(BINARY, [...places, ...args], { env });
    let output = "";
    child.stdout.on("data", (text) => (output += text));
    child.stderr.on("data", (text) => (output += text));
    child.stdin.on("error", () => {}); // a command that reads no input may end before it is written
    child.stdin.end(input);
    const [code] = await once(child, "close");
    return { code, output };
  };

  /** Starts `traygate serve` and waits until it says where it listens. */
  const serve = async () => {
    const log = join(scratch, "serve.log");
    const child = spawn(BINARY, [...places, "serve", "--port", "0"], { env, stdio: ["ignore", "pipe", "pipe"] });
    const ended = once(child, "exit");
    for (const output of [child.stdout, child.stderr]) output.on("data", (text) => appendFileSync(log, text));
    const url = await new Promise((found, failed) => {
      const complain = (why) => failed(new Error(`${BINARY} ${why}; what it said is in ${log}`));
      child.once("error", (error) => complain(error.message));
      child.once("exit", (code) => complain(`ended with ${code} before it listened`));
      createInterface({ input: child.stdout }).on("line", (line) => {
        const address = /listening on (http:\/\/127\.0\.0\.1:\d+)/.exec(line);
        if (address) found(address[1]);
      });
    });
    return {
      url,
      pid: child.pid,
      callsCommand,
      /** The log's rows of calls that have ended. */
      rows: async () => (await readRows(callsCommand, env)).filter((row) => row.outcome !== "open"),
      /** The row of one call, once it has ended. */
      row: (id) =>
        until("the call's row", async () =>
          (await readRows(callsCommand, env)).find((row) => row.id === id && row.outcome !== "open"),
        ),
      stop: async () => {
        child.kill("SIGTERM");
        const [code] = await ended;
        if (code !== 0) throw new Error(`traygate ended with ${code} on SIGTERM; what it said is in ${log}`);
      },
    };
  };
  return { scratch, run, serve, remove: () => rmSync(scratch, { recursive: true, force: true }) };
}

async function readRows([program, ...args], env) {
  const { stdout } = await promisify(execFile)(program, args, { env, maxBuffer: 64 << 20 });
  return stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

/** Sets up provider and Traygate (or, with `--direct`, the provider alone). */
export async function setStage() {
  const provider = await startProvider();
  if (DIRECT) {
    return {
      provider,
      openai: `${provider.url}/v1`,
      anthropic: provider.url,
      breakable: () => ({ openai: `${provider.url}/v1`, anthropic: provider.url }),
      traygate: undefined,
      stop: provider.stop,
    };
  }
  const breakable = Array.from(
    { length: BREAKABLE },
    (_, n) => `
[[provider]]
name = "breakable-${n}"
kind = "openai"
base_url = "${provider.url}"
key = "pass"
failures = 2
open_secs = 600
recovery_check_secs = 0
`,
  ).join("");
  const settings = `
[[provider]]
name = "openai"
base_url = "${provider.url}/v1"
key = "auto"
failures = 1000 # what the tests break here must not shut out the others
failure_rate = 0

[[provider]]
name = "anthropic"
base_url = "${provider.url}"
key = "auto"
failures = 1000
failure_rate = 0

[[provider]]
name = "stand-in"
kind = "openai"
base_url = "${provider.url}/v1"
key = "env:SCRIPTED_KEY"

[[provider]]
name = "stand-in-anthropic"
kind = "anthropic"
base_url = "${provider.url}"
key = "env:SCRIPTED_KEY"

[[price]]
model = "too-dear"
input = 1
output = 1

[[budget]]
per = "day"
usd = 0.000001 # less than any call may cost
model = "too-dear"
${breakable}`;
  const laid = layTraygate(settings, { SCRIPTED_KEY: STAND_IN_KEY });
  const traygate = await laid.serve();
  let taken = 0;
  return {
    provider,
    openai: `${traygate.url}/openai/v1`,
    anthropic: `${traygate.url}/anthropic`,
    /** Providers whose key comes from the environment where the client sends a placeholder. */
    standIn: { openai: `${traygate.url}/stand-in/v1`, anthropic: `${traygate.url}/stand-in-anthropic` },
    /** The addresses of a provider that no other test uses. */
    breakable: () => {
      if (taken === BREAKABLE) throw new Error("raise BREAKABLE");
      const base = `${traygate.url}/breakable-${taken++}`;
      return { openai: `${base}/v1`, anthropic: base };
    },
    traygate,
    stop: async () => {
      await traygate.stop();
      await provider.stop();
      laid.remove();
    },
  };
}

/** Asks `probe` every `everyMs` until it gives something true, and gives that; fails after `withinMs`. */
export async function until(what, probe, withinMs = 3000, everyMs = 20) {
  const deadline = performance.now() + withinMs;
  for (;;) {
    const found = await probe();
    if (found) return found;
    if (performance.now() > deadline) throw new Error(`${what}: not within ${withinMs} ms`);
    await sleep(everyMs);
  }
}

let nonces = 0;
/** A prompt that nobody has sent before: no kept answer stands in for the provider's. */
export const freshPrompt = () => `prompt ${process.pid}-${Date.now()}-${nonces++}-end`;

/** A `fetch` that counts its requests and keeps their responses' headers. */
export function countingFetch() {
  const counting = async (...request) => {
    counting.requests += 1;
    const response = await fetch(...request);
    counting.headers.push(response.headers);
    return response;
  };
  counting.requests = 0;
  /** @type {Headers[]} */
  counting.headers = [];
  return counting;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const stage = await setStage();
  const { openai, anthropic } = stage;
  const breakable = Array.from({ length: BREAKABLE }, stage.breakable);
  const provider = `${stage.provider.url}/_calls`;
  console.log(JSON.stringify({ openai, anthropic, breakable, provider, calls: stage.traygate?.callsCommand }));
  process.stdin.resume();
  await once(process.stdin, "end");
  await stage.stop();
}
