// Runs the five scenarios with the official SDK, direct and through Traygate.
import fs from "node:fs";
import path from "node:path";
import { parseArgs } from "node:util";
import { VERSION } from "openai/version";
import { draw } from "./chart.mjs";
import { coalesce } from "./coalesce.mjs";
import { hang, outage } from "./dead_provider.mjs";
import { fanOut } from "./fan_out.mjs";
import { herd } from "./herd.mjs";
import { endAll } from "./servers.mjs";

const SCENARIOS = { herd, "fan-out": fanOut, outage, hang, coalesce };

const HELP = `Usage: scripts/bench scenarios [--quick] [--out DIR] [NAME …]

Names: ${Object.keys(SCENARIOS).join(", ")}; none means all. Outage and hang take 150 s each.
  --quick     outage and hang five times as fast, coalesce shorter
  --out DIR   where reports go [default: target/bench]`;

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    quick: { type: "boolean", default: false },
    out: { type: "string", default: "target/bench" },
    traygate: { type: "string", default: "target/release/traygate" },
    help: { type: "boolean", short: "h", default: false },
  },
});

async function main() {
  if (values.help) return console.log(HELP);
  const unknown = positionals.filter((name) => !(name in SCENARIOS));
  if (unknown.length > 0) throw new Error(`no scenario ${unknown.join(", ")}\n\n${HELP}`);
  const names = positionals.length > 0 ? positionals : Object.keys(SCENARIOS);
  const out = path.resolve(values.out, "scenarios");
  fs.mkdirSync(out, { recursive: true });
  const context = { quick: values.quick, binary: path.resolve(values.traygate), scratch: path.join(out, "scratch") };
  fs.rmSync(context.scratch, { recursive: true, force: true });
  const environment = { at: new Date().toISOString(), node: process.version, openai: VERSION, quick: values.quick };
  const results = [];
  for (const name of names) {
    console.error(`scenario: ${name}`);
    for (const result of await SCENARIOS[name](context)) {
      fs.writeFileSync(path.join(out, `${result.name}.json`), `${JSON.stringify({ environment, ...result }, null, 1)}\n`);
      fs.writeFileSync(path.join(out, `${result.name}.svg`), draw(result));
      results.push(result);
    }
  }
  // Kept where a scenario fails: Traygate's own log is in there.
  fs.rmSync(context.scratch, { recursive: true, force: true });
  const table = markdown(results);
  fs.writeFileSync(path.join(out, "scenarios.md"), table);
  console.log(`${table}\nWritten to ${path.relative(process.cwd(), out)}: the table, and of each scenario every request (JSON) and a chart (SVG).`);
  process.exitCode = results.every((result) => result.checks.every((check) => check.pass)) ? 0 : 1;
}

function markdown(results) {
  const lines = ["| scenario | what | must show | direct | through Traygate | |", "|---|---|---|---|---|---|"];
  for (const result of results) {
    for (const check of result.checks) {
      const verdict = check.must === "" ? "" : check.pass ? "pass" : "**miss**";
      lines.push(`| ${result.name} | ${check.what} | ${check.must} | ${check.direct ?? ""} | ${check.measured} | ${verdict} |`);
    }
  }
  return `${lines.join("\n")}\n`;
}

let stopping = false;
for (const name of ["SIGINT", "SIGTERM"]) {
  process.on(name, async () => {
    if (stopping) return;
    stopping = true;
    await endAll();
    process.exit(130);
  });
}

try {
  await main();
} catch (error) {
  if (!stopping) console.error(`bench: ${error.stack}`);
  process.exitCode = 2;
} finally {
  if (!stopping) await endAll();
}
