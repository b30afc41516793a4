// What the runs are: columns of bars, all tasks first, then all messages; row by row, and sorted by start in each row.
const by = (id) => document.getElementById(id);
const facts = JSON.parse(by("facts").textContent);
if (!("DecompressionStream" in window)) by("wait").textContent = "This page needs a browser of 2023 or later.";
const data = await read(by("columns"));
const { stage, micro_batch, step, version, stale, kind, times, waits } = data;
const { row_first: first, row_owner: owner, row_lane: lane } = data;
const { kinds, devices, deviceRows, slots, runs } = facts;
const fromDevice = [0]; // the first device of each run: devices are numbered on from run to run
for (const run of runs) fromDevice.push(fromDevice.at(-1) + run.devices);
const tasks = version.length, rows = owner.length, bars = kind.length;
const { start, end, busy } = timed();
const whole = Math.max(times[times.length - 1], 1e-30);
const ends = runs.map(() => 0); // when the last bar of each run ends
for (let row = 0; row < rows; row++)
  if (first[row + 1] > first[row]) ends[runOfRow(row)] = Math.max(ends[runOfRow(row)], end[first[row + 1] - 1]);
const [BACKWARD, WEIGHTS, UPDATE] = [1, 2, 3]; // kinds; after them come what messages carry
const KIND_NAMES = ["forward", "backward", "weight gradient", "update", ...kinds.slice(4)];

async function read(element) {
  const text = atob(element.textContent), bytes = new Uint8Array(text.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = text.charCodeAt(k);
  element.textContent = "";
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer(), columns = {};
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int8: Int8Array, int16: Int16Array,
    int32: Int32Array, float64: Float64Array };
  let place = 0;
  for (const [name, type, length] of facts.columns) {
    columns[name] = new types[type](buffer, place, length);
    place += Math.ceil(columns[name].byteLength / 8) * 8;
  }
  return columns;
}

// When each bar starts and ends, and how long all bars before it took.
function timed() {
  const { gap, length } = data;
  const start = new Float64Array(bars), end = new Float64Array(bars), busy = new Float64Array(bars + 1);
  for (let row = 0; row < rows; row++)
    for (let k = first[row], at = 0; k < first[row + 1]; k++) {
      start[k] = times[(at += gap[k])];
      end[k] = times[(at += length[k])];
      busy[k + 1] = busy[k] + (end[k] - start[k]); // of what takes no time exactly nothing
    }
  return { start, end, busy };
}

// The first place from low on where a rising column is at least value: in leaps first, for most are near.
function reach(column, value, low, high) {
  for (let leap = 1; low + leap < high; leap *= 2) {
    if (column[low + leap] >= value) { high = low + leap; break; }
    low += leap;
  }
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

const rowOf = (k) => reach(first, k + 1, 0, rows + 1) - 1;
function runOf(device) {
  return reach(fromDevice, device + 1, 0, fromDevice.length) - 1;
}
function runOfRow(row) {
  const link = row < deviceRows ? -1 : owner[row], to = data.link_dst[link];
  return runOf(link < 0 ? owner[row] : data.link_op[link] ? facts.groups[to][0] : to);
}
const own = (device) => device - fromDevice[runOf(device)]; // its number in its run
const inRun = (row, texts) => (runs.length > 1 ? [...texts, runs[runOfRow(row)].name] : texts);
const isMarks = (row) => row < deviceRows && lane[row] === 0; // what takes no time, drawn over its device's first lane
const lastBefore = (k) => (waits.length && waits[k] ? k + waits[k] : -1); // what it waited for that ended last
const blockerOf = (k) => (lastBefore(k) >= 0 && end[lastBefore(k)] === start[k] ? lastBefore(k) : -1);

// What it is called.
function engineering(value, unit, digits = 4) {
  const prefixes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
  const able = unit === "s" ? prefixes.slice(4) : prefixes;
  const [scale, prefix] = value ? able.find(([least]) => Math.abs(value) >= least * 0.9999999) ?? able.at(-1) : [1, ""];
  return `${+(value / scale).toPrecision(digits)} ${prefix}${unit}`;
}
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
const moment = (time) => (slots ? `${+time.toFixed(2)}` : engineering(time, "s", 7));
const duration = (time) => (slots ? count(time, "slot") : engineering(time, "s"));
const worth = (value) => `${+value.toFixed(2)} ${value === 1 ? "stage's" : "stages'"} worth`;
const amount = (value) => (slots ? worth(value) : engineering(value, "B"));
function interval(from, to) {
  return from === to ? `at ${moment(from)}` : `${moment(from)} to ${moment(to)}, ${duration(to - from)}`;
}

// Of a task its stage, kind and micro-batch, as torch writes it; of a message its content and the task that made it.
const MAKER = { activation: "F", "activation gradient": "B" };
function label(k) {
  const [i, j, word] = [micro_batch[k], stage[k], kinds[kind[k]]], maker = k < tasks ? word : MAKER[word];
  if (maker && j >= 0 && (i >= 0 || k < tasks)) return `${k < tasks ? "" : `${word} `}${j}${maker}${i < 0 ? "" : i}`;
  const of = [...(j >= 0 ? [`stage ${j}`] : []), ...(i >= 0 ? [`micro-batch ${i}`] : [])];
  return `${word}${of.length ? " of " : ""}${of.join(", ")}`;
}
const name = (k) => `${label(k)}, step ${step[k]}`;

function linkName(link, short = false) {
  const { link_op, link_src, link_dst } = data, op = facts.ops[link_op[link]].replace("_", "-");
  const root = link_src[link] < 0 ? -1 : own(link_src[link]);
  const stream = facts.streams[data.link_stream[link]];
  if (!link_op[link]) return stream ? `${stream} ${root}` : `${root} → ${own(link_dst[link])}`;
  const group = facts.groups[link_dst[link]].map(own), { length } = group;
  const dense = length > 2 && group.at(-1) - group[0] === length - 1;
  const some = length > 8 ? `${group.slice(0, 7).join(", ")} …` : group.join(", ");
  const list = dense ? `${group[0]}–${group.at(-1)}` : some;
  if (stream) return `${stream} ${list}`;
  if (short) return root < 0 ? `↔ ${list}` : op === "broadcast" ? `${root} → ${list}` : `${list} → ${root}`;
  return root < 0 ? `${op} ${list}` : `${op} ${root}, ${list}`;
}

function about(k) {
  const row = rowOf(k), when = (slots ? "slot " : "") + interval(start[k], end[k]);
  const cause = blockerOf(k) < 0 ? [] : [`waited for ${name(blockerOf(k))}`];
  if (k >= tasks) {
    const link = owner[row], single = !data.link_op[link];
    const where = single ? `p2p, device ${linkName(link).replace("→", "to")}` : linkName(link);
    const bytes = data.sizes[data.size[k - tasks]], rounds = count(data.rounds[k - tasks], "round");
    return inRun(row, [name(k), where, `${amount(bytes)} in ${rounds}`, when, ...cause]);
  }
  const newest = stale[k] ? "stale: a newer one exists" : "the newest";
  const reads = kind[k] === UPDATE ? `makes version ${version[k]}` : `reads version ${version[k]}, ${newest}`;
  return inRun(row, [name(k), `device ${own(owner[row])}`, when, reads, ...cause]);
}

function aboutIdle(row, time) {
  const next = reach(start, time, first[row], first[row + 1]), before = next > first[row] ? end[next - 1] : 0;
  const until = next < first[row + 1] ? start[next] : ends[runOf(owner[row])];
  const lines = inRun(row, [`device ${own(owner[row])} idle`, (slots ? "slot " : "") + interval(before, until)]);
  if (next === first[row + 1]) return [...lines, "nothing more to do"];
  return [...lines, `next ${name(next)}`, ...(blockerOf(next) < 0 ? [] : [`which waits for ${name(blockerOf(next))}`])];
}
