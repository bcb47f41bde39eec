// A key from the system's keyring: a real gnome-keyring on a session bus of its
// own. It stands in for a placeholder, reaches the provider and nothing else.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import OpenAI from "openai";
import { startProvider } from "./provider.mjs";
import { DIRECT, freshPrompt, layTraygate, until } from "./stage.mjs";

const PLANTED = "sk-planted-3f9a1c77d2e84b06";
const options = { skip: DIRECT && "nothing stands in for a key without Traygate" };

let home;
let session;
let provider;
let laid;
before(async () => {
  if (DIRECT) return;
  home = mkdtempSync(join(tmpdir(), "traygate-keyring-"));
  // The first line of input unlocks the keyring, the end of input ends the
  // session and, with its bus, the daemon. It claims its name a moment late;
  // asked before that, the bus would start a second, locked one.
  const script = `
read -r password
printf %s "$password" | gnome-keyring-daemon --unlock --components=secrets >/dev/null
for _ in $(seq 200); do
  dbus-send --session --print-reply=literal --dest=org.freedesktop.DBus / \\
    org.freedesktop.DBus.NameHasOwner string:org.freedesktop.secrets | grep -q true && break
  sleep 0.05
done
echo "$DBUS_SESSION_BUS_ADDRESS"
cat >/dev/null`;
  const env = { PATH: process.env.PATH, HOME: home, XDG_RUNTIME_DIR: home };
  session = spawn("dbus-run-session", ["--", "sh", "-c", script], { env, stdio: ["pipe", "pipe", "inherit"] });
  session.stdin.write("scratch\n");
  const [bus] = await once(createInterface({ input: session.stdout }), "line");
  provider = await startProvider();
  const settings = `[[provider]]\nname = "openai"\nbase_url = "${provider.url}/v1"\nkey = "auto"\n`;
  laid = layTraygate(settings, { DBUS_SESSION_BUS_ADDRESS: bus, XDG_RUNTIME_DIR: home });
});
after(async () => {
  if (DIRECT) return;
  await provider.stop();
  const ended = once(session, "exit");
  session.stdin.end();
  await ended;
  laid.remove();
  rmSync(home, { recursive: true, force: true });
});

/** Every file below a folder, as one text. */
function everythingIn(folder) {
  const files = readdirSync(folder, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
  return files.map((file) => readFileSync(join(file.parentPath ?? file.path, file.name), "latin1")).join("\n");
}

test("a stored key stands in for a placeholder and is found nowhere else", options, async () => {
  const stored = await laid.run(["key", "set", "openai"], `${PLANTED}\n`);
  assert.equal(stored.code, 0, stored.output);
  const listed = await laid.run(["key", "list"]);
  assert.match(listed.output, /openai/);

  const traygate = await laid.serve();
  const answers = [];
  const listening = async (...request) => {
    const response = await fetch(...request);
    answers.push(JSON.stringify([...response.headers]), await response.clone().text());
    return response;
  };
  const ask = async (apiKey, model = "ok") => {
    const client = new OpenAI({ apiKey, baseURL: `${traygate.url}/openai/v1`, fetch: listening, maxRetries: 0 });
    const prompt = freshPrompt();
    const messages = [{ role: "user", content: prompt }];
    await client.chat.completions.create({ model, messages }).catch((error) => answers.push(`${error}`));
    return provider.calls(prompt)[0].headers.authorization;
  };
  // The keyring is read beside the start, which waits for nobody's keyring.
  assert.equal(await until("the key", () => ask("traygate"), 5000), `Bearer ${PLANTED}`);
  assert.equal(await ask("sk-the-clients-own"), "Bearer sk-the-clients-own");
  assert.equal(await ask("none", "status-401"), `Bearer ${PLANTED}`);
  await until("three rows", async () => (await traygate.rows()).length === 3);
  answers.push(JSON.stringify(await traygate.rows()));
  await traygate.stop();

  const check = await laid.run(["check"]);
  const said = [stored.output, listed.output, check.output, ...answers, everythingIn(laid.scratch)].join("\n");
  assert.match(said, /scripted 401/); // what it must be missing from was really gathered
  assert.ok(!said.includes(PLANTED), "the key leaked");
});

test("what cannot be a key is refused in words that do not repeat it", options, async () => {
  for (const key of ["sk-planted with-a-space", "sk-planted\u200binvisible"]) {
    const { code, output } = await laid.run(["key", "set", "openai"], key);
    assert.notEqual(code, 0);
    assert.ok(!output.includes("planted"), output);
  }
});

test("a deleted key is gone", options, async () => {
  assert.equal((await laid.run(["key", "set", "openai"], PLANTED)).code, 0);
  assert.equal((await laid.run(["key", "delete", "openai"])).code, 0);
  const listed = await laid.run(["key", "list", "openai"]);
  assert.match(listed.output, /none|no key|not stored/i);
});
