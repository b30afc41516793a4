// What the run is: columns of bars, tasks first, then messages; row after row, and sorted by start in each row.
const by = (id) => document.getElementById(id);
const facts = JSON.parse(by("facts").textContent);
if (!("DecompressionStream" in window)) by("wait").textContent = "This page needs a browser of 2023 or later.";
const data = await read(by("columns"));
const { stage, micro_batch, step, version, stale, kind, times, waits } = data;
const { row_first: first, row_owner: owner, row_lane: lane } = data;
const { kinds, devices, deviceRows, slots } = facts;
const tasks = version.length, rows = owner.length, bars = kind.length;
const { start, end, busy } = timed();
const whole = Math.max(times[times.length - 1], 1e-30);
const members = facts.groups.map((group) => new Set(group));
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
const isMarks = (row) => row < deviceRows && lane[row] === 0; // what takes no time, drawn over its device's first lane
const blockerOf = (k) => (waits.length && waits[k] ? k + waits[k] : -1);

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

function name(k) {
  const place = [`t=${step[k]}`];
  if (micro_batch[k] >= 0) place.push(`i=${micro_batch[k]}`);
  if (stage[k] >= 0) place.push(`j=${stage[k]}`);
  return `${kinds[kind[k]]}(${place.join(",")})`;
}

function linkName(link, short = false) {
  const { link_op, link_src, link_dst } = data, op = facts.ops[link_op[link]].replace("_", "-"), root = link_src[link];
  if (!link_op[link]) return `${root} → ${link_dst[link]}`;
  const group = facts.groups[link_dst[link]], dense = group.length > 2 && group.at(-1) - group[0] === group.length - 1;
  const some = group.length > 8 ? `${group.slice(0, 7).join(", ")} …` : group.join(", ");
  const list = dense ? `${group[0]}–${group.at(-1)}` : some;
  if (short) return root < 0 ? `↔ ${list}` : op === "broadcast" ? `${root} → ${list}` : `${list} → ${root}`;
  return root < 0 ? `${op} ${list}` : `${op} ${root}, ${list}`;
}

function about(k) {
  const row = rowOf(k), when = (slots ? "slot " : "") + interval(start[k], end[k]);
  const cause = blockerOf(k) < 0 ? [] : [`waited for ${name(blockerOf(k))}`];
  if (k >= tasks) {
    const link = owner[row], single = !data.link_op[link];
    const where = single ? `p2p, device ${data.link_src[link]} to ${data.link_dst[link]}` : linkName(link);
    const bytes = data.sizes[data.size[k - tasks]], rounds = count(data.rounds[k - tasks], "round");
    return [name(k), where, `${amount(bytes)} in ${rounds}`, when, ...cause];
  }
  const newest = stale[k] ? "stale: a newer one exists" : "the newest";
  const reads = kind[k] === UPDATE ? `makes version ${version[k]}` : `reads version ${version[k]}, ${newest}`;
  return [name(k), `device ${owner[row]}`, when, reads, ...cause];
}

function aboutIdle(row, time) {
  const next = reach(start, time, first[row], first[row + 1]), before = next > first[row] ? end[next - 1] : 0;
  const until = next < first[row + 1] ? start[next] : whole, lines = [`device ${owner[row]} idle`];
  lines.push((slots ? "slot " : "") + interval(before, until));
  if (next === first[row + 1]) return [...lines, "nothing more to do"];
  return [...lines, `next ${name(next)}`, ...(blockerOf(next) < 0 ? [] : [`which waits for ${name(blockerOf(next))}`])];
}
