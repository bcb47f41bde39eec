// The real programs: Codex and Claude Code complete a turn and are known by name.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { TEXT } from "./provider.mjs";
import { DIRECT, freshPrompt, setStage, until } from "./stage.mjs";

const TURN_MS = 90_000;
const BIN = fileURLToPath(new URL("node_modules/.bin/", import.meta.url));

let stage;
let home;
before(async () => {
  stage = await setStage();
  home = mkdtempSync(join(tmpdir(), "traygate-agent-"));
});
after(async () => {
  rmSync(home, { recursive: true, force: true });
  await stage.stop();
});

/** Runs a program in an empty home, without input, and gives what it printed. */
async function run(program, args, env) {
  const work = join(home, "work");
  mkdirSync(work, { recursive: true });
  const child = spawn(join(BIN, program), args, {
    cwd: work,
    env: { PATH: process.env.PATH, HOME: home, ...env },
    stdio: ["ignore", "pipe", "pipe"],
    timeout: TURN_MS,
  });
  let stdout = "";
  let stderr = "";
  child.stdout.on("data", (text) => (stdout += text));
  child.stderr.on("data", (text) => (stderr += text));
  const [code, signal] = await once(child, "close");
  assert.equal(code, 0, `${program} ended with ${code ?? signal}\n${stdout}\n${stderr}`);
  return stdout;
}

/** The rows that Traygate wrote under a tool's name. */
const rowsOf = async (tool) => (await stage.traygate.rows()).filter((row) => row.tool === tool);

for (const websockets of [true, false]) {
  test(`Codex completes a turn, WebSockets ${websockets ? "on" : "off"}`, async () => {
    const config = `
model = "gpt-scripted"
model_provider = "traygate"

[model_providers.traygate]
name = "OpenAI"
base_url = "${stage.openai}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = ${websockets}
`;
    const codexHome = join(home, `codex-${websockets}`);
    mkdirSync(codexHome);
    writeFileSync(join(codexHome, "config.toml"), config);
    const before = stage.provider.all.length;
    const prompt = freshPrompt();
    const env = { CODEX_HOME: codexHome, OPENAI_API_KEY: "sk-codex" };
    const said = await run("codex", ["exec", "--skip-git-repo-check", prompt], env);
    assert.ok(said.includes(TEXT), said);
    const [turn, ...others] = stage.provider.calls(prompt);
    assert.deepEqual(others.map((call) => call.path), []);
    assert.equal(turn.path, "/v1/responses");
    assert.equal(turn.headers.authorization, "Bearer sk-codex");
    const upgrades = stage.provider.all.slice(before).filter((call) => call.headers.upgrade);
    if (DIRECT) return assert.equal(upgrades.length > 0, websockets);
    // Traygate answers 426 itself: over HTTP the call is guarded and counted.
    assert.deepEqual(upgrades, []);
    const row = await until("the turn's row", async () =>
      (await rowsOf("codex")).find((row) => row.outcome === "completed" && row.model === "gpt-scripted"),
    );
    assert.equal(row.provider, "openai");
  });
}

test("Claude Code completes a turn", async () => {
  const prompt = freshPrompt();
  const env = { ANTHROPIC_BASE_URL: stage.anthropic, ANTHROPIC_API_KEY: "sk-ant-claude" };
  const said = await run("claude", ["-p", prompt], env);
  assert.ok(said.includes(TEXT), said);
  const turns = stage.provider.calls(prompt).filter((call) => call.path.startsWith("/v1/messages?"));
  assert.ok(turns.length >= 1);
  for (const turn of turns) assert.equal(turn.headers["x-api-key"], "sk-ant-claude");
  if (DIRECT) return;
  const rows = await until("the turn's rows", async () => {
    const rows = await rowsOf("claude-code");
    return rows.some((row) => row.outcome === "completed" && row.streaming) && rows;
  });
  assert.deepEqual([...new Set(rows.map((row) => row.provider))], ["anthropic"]);
});
