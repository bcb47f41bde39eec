// Draws one scenario as SVG: a bar for each call, the provider's calls counted below.

const WIDTH = 960;
const LEFT = 20;
const PLOT = WIDTH - 2 * LEFT;
const ROWS_HEIGHT = 225;
const COUNTS_HEIGHT = 44;
const PANE = ROWS_HEIGHT + COUNTS_HEIGHT + 90;
const HEAD = 76;
const BINS = 150;
const INK = "#1a1d21";
const FAINT = "#6b7280";

const KINDS = {
  queued: ["#f5c451", "queued in Traygate"],
  own: ["#2563eb", "answered by a call of its own"],
  joined: ["#5eb6a9", "joined another's call"],
  cached: ["#9ad0a8", "from the cache"],
  failed: ["#dc4a3d", "failed upstream"],
  refused: ["#f08a24", "refused at once"],
  backoff: ["#d1d5db", "waiting to retry"],
  open: ["#9ca3af", "never answered"],
};

const TITLES = { direct: "Direct", traygate: "Through Traygate" };

/** The picture of `result`, a scenario's title, sides and, if it has one, span of trouble. */
export function draw(result) {
  const sides = Object.entries(result.sides);
  const all = sides.flatMap(([, side]) => [...side.calls, ...side.received]);
  const lasts = Math.max(...all.map((one) => one.end ?? one.start), 1) * 1.01;
  const x = (ms) => LEFT + (ms / lasts) * PLOT;
  const used = new Set();
  const panes = sides.map(([which, side], index) => pane(TITLES[which], side, HEAD + index * PANE, x, lasts, result.span, used));
  const height = HEAD + sides.length * PANE - 8;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" role="img" aria-label="${escaped(result.title)}" font-family="system-ui, -apple-system, 'Segoe UI', sans-serif">`,
    `<rect width="100%" height="100%" rx="8" fill="#ffffff"/>`,
    text(LEFT, 30, capital(result.title), { size: 16, weight: 600 }),
    legend([...used]),
    ...panes,
    "</svg>\n",
  ].join("\n");
}

function legend(kinds) {
  let left = LEFT;
  return Object.entries(KINDS)
    .filter(([kind]) => kinds.includes(kind))
    .map(([, [colour, label]]) => {
      const entry = rect(left, 46, 11, 11, colour, 2) + text(left + 16, 56, label, { size: 11, fill: FAINT });
      left += 32 + label.length * 6;
      return entry;
    })
    .join("\n");
}

function pane(title, side, top, x, lasts, span, used) {
  const rows = top + 22;
  const counts = rows + ROWS_HEIGHT + 26;
  const bottom = counts + COUNTS_HEIGHT;
  const received = side.received.filter((call) => call.kind === "generation");
  const trouble = span
    ? rect(x(span.from), rows, x(span.to) - x(span.from), bottom - rows, "#fdecea") +
      text(x(span.from) + 5, rows + 12, span.label, { size: 10, fill: "#b3372c" })
    : "";
  const answered = side.calls.filter((call) => call.outcome === "ok").length;
  return [
    text(LEFT, top + 12, title, { size: 13, weight: 600 }) +
      text(WIDTH - LEFT, top + 12, `${side.calls.length} calls, ${answered} answered`, { size: 11, fill: FAINT, anchor: "end" }),
    trouble,
    bars(side, received, rows, x, lasts, used),
    text(LEFT, counts - 6, `${received.length} ${received.length === 1 ? "call" : "calls"} reached the provider`, { size: 11, fill: FAINT }),
    histogram(received, counts, x, lasts),
    axis(bottom, x, lasts),
  ].join("\n");
}

/** One row for each lane: a call's own, or a connection's calls one after another. */
function bars(side, received, top, x, lasts, used) {
  const places = [...new Set(side.calls.map((call) => call.lane))];
  const step = Math.min(12, ROWS_HEIGHT / places.length);
  const thickness = step > 3 ? step - 1.5 : step * 0.8;
  const row = new Map(places.map((lane, index) => [lane, top + index * step]));
  const attemptsOf = grouped(side.attempts, (attempt) => attempt.call);
  const upstreamOf = grouped(received, (call) => `${call.prompt} ${call.attempt}`);
  const shapes = [];
  for (const call of side.calls) {
    const attempts = attemptsOf.get(call.id) ?? [];
    attempts.forEach((attempt, index) => {
      // Of equal prompts nobody can tell which of the provider's calls was whose.
      const same = upstreamOf.get(`${attempt.prompt} ${attempt.attempt}`) ?? [];
      const upstream = same.length === 1 ? same[0] : undefined;
      const parts = segments(attempt, upstream, lasts);
      const next = attempts[index + 1];
      if (next) parts.push(["backoff", attempt.end, next.start]);
      for (const [kind, from, to] of parts) {
        used.add(kind);
        const y = row.get(call.lane) + (kind === "backoff" ? thickness * 0.4 : 0);
        const height = kind === "backoff" ? Math.max(0.6, thickness * 0.2) : thickness;
        // A refusal takes a millisecond; it must still be seen.
        const width = Math.max(kind === "backoff" ? 0 : 5, x(to) - x(from) - 0.6);
        shapes.push(rect(x(from), y, width, height, KINDS[kind][0]));
      }
    });
  }
  return shapes.join("");
}

function segments(attempt, upstream, lasts) {
  const end = attempt.end ?? lasts;
  const kind = outcome(attempt);
  // Only a call of its own is seen to wait for its turn: the provider says when it came.
  const waited = upstream && attempt.dedup && kind === "own" && upstream.start - attempt.start > 50;
  return waited
    ? [["queued", attempt.start, upstream.start], [kind, upstream.start, end]]
    : [[kind, attempt.start, end]];
}

function outcome(attempt) {
  if (attempt.shouldRetry === "false") return "refused";
  if (attempt.status === undefined) return "open";
  if (attempt.status >= 400 || attempt.error) return "failed";
  if (attempt.dedup === "joined" || attempt.dedup === "cached") return attempt.dedup;
  return "own";
}

function histogram(received, top, x, lasts) {
  const counts = new Array(BINS).fill(0);
  for (const call of received) counts[Math.min(BINS - 1, Math.max(0, Math.floor((call.start / lasts) * BINS)))] += 1;
  const highest = Math.max(...counts, 1);
  const shapes = counts.map((count, bin) => {
    if (count === 0) return "";
    const height = Math.max(3, (count / highest) * COUNTS_HEIGHT);
    const left = x((bin / BINS) * lasts);
    return rect(left, top + COUNTS_HEIGHT - height, PLOT / BINS - 1, height, "#64748b");
  });
  const bin = lasts / BINS / 1000;
  const scale = `highest bar: ${highest} in ${bin < 0.1 ? `${Math.round(bin * 1000)} ms` : `${bin.toFixed(1)} s`}`;
  return shapes.join("") + text(WIDTH - LEFT, top - 6, scale, { size: 10, fill: FAINT, anchor: "end" });
}

function axis(top, x, lasts) {
  const step = [100, 200, 250, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000].find((size) => lasts / size <= 12);
  const ticks = [];
  for (let ms = 0; ms <= lasts; ms += step) {
    const place = ms === 0 ? { anchor: "start" } : { anchor: "middle" };
    ticks.push(`<line x1="${x(ms)}" x2="${x(ms)}" y1="${top}" y2="${top + 4}" stroke="#9ca3af"/>`);
    ticks.push(text(x(ms), top + 15, `${ms / 1000} s`, { size: 10, fill: FAINT, ...place }));
  }
  return `<line x1="${LEFT}" x2="${LEFT + PLOT}" y1="${top}" y2="${top}" stroke="#9ca3af"/>${ticks.join("")}`;
}

function grouped(list, key) {
  const groups = new Map();
  for (const one of list) {
    const group = groups.get(key(one));
    if (group) group.push(one);
    else groups.set(key(one), [one]);
  }
  return groups;
}

const round = (number) => Math.round(number * 100) / 100;

function rect(left, top, width, height, fill, radius = 0) {
  const corner = radius ? ` rx="${radius}"` : "";
  return `<rect x="${round(left)}" y="${round(top)}" width="${round(width)}" height="${round(height)}"${corner} fill="${fill}"/>`;
}

function text(left, top, content, { size, weight = 400, fill = INK, anchor = "start" }) {
  return `<text x="${round(left)}" y="${round(top)}" font-size="${size}" font-weight="${weight}" fill="${fill}" text-anchor="${anchor}">${escaped(content)}</text>`;
}

const escaped = (content) => content.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

const capital = (content) => content[0].toUpperCase() + content.slice(1);
