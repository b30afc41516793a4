// A range of time, and what happens in it.
let range = null; // its two ends

// How long a row works in a range.
function worked(row, from, to) {
  const stop = first[row + 1], low = reach(end, from, first[row], stop), high = reach(start, to, low, stop);
  if (low === high) return 0;
  return busy[high] - busy[low] - Math.max(0, from - start[low]) - Math.max(0, end[high - 1] - to);
}

// What is on its way in a range over a link: of a message's bytes the part that its time has there.
function sent(row, from, to) {
  const within = (k) => Math.min(end[k], to) - Math.max(start[k], from), stop = first[row + 1];
  let [messages, bytes] = [0, 0];
  for (let k = reach(end, from, first[row], stop); k < stop && start[k] <= to; k++) {
    const lasts = end[k] - start[k], part = lasts ? within(k) / lasts : start[k] < to || to >= whole ? 1 : 0;
    if (part > 0) messages++, (bytes += part * data.sizes[data.size[k - tasks]]);
  }
  return { messages, bytes };
}

// How long the lanes of a device wait in a range, reason by reason.
function waited(device, from, to) {
  const { idle_first, idle_gap, idle_length, idle_reason } = data, sum = facts.reasons.map(() => 0);
  for (let n = idle_first[device], at = 0; n < idle_first[device + 1]; n++) {
    const since = times[(at += idle_gap[n])], until = times[(at += idle_length[n])];
    sum[idle_reason[n]] += Math.max(0, Math.min(until, to) - Math.max(since, from));
  }
  return sum;
}

// A row of sums for each run, all of its devices together, and then for each of its devices.
function sums(from, to) {
  const empty = () => ({ busy: 0, lanes: 0, idle: facts.reasons.map(() => 0), messages: 0, bytes: 0 });
  const each = Array.from({ length: devices }, empty), together = runs.map(empty);
  for (let row = 0; row < deviceRows; row++)
    each[owner[row]].busy += worked(row, from, to), each[owner[row]].lanes += !isMarks(row);
  each.forEach((one, device) => {
    const all = together[runOf(device)], lasts = Math.max(0, Math.min(to, ends[runOf(device)]) - from);
    one.idle = waited(device, from, to), one.idle[NOTHING] = 0;
    one.idle[NOTHING] = Math.max(0, one.lanes * lasts - one.busy - one.idle.reduce((a, b) => a + b));
    all.busy += one.busy, all.lanes += one.lanes, one.idle.forEach((time, reason) => (all.idle[reason] += time));
  });
  for (let row = deviceRows; row < rows; row++) {
    const found = sent(row, from, to), of = partners(owner[row]).map((device) => each[device]);
    for (const one of [together[runOfRow(row)], ...of]) one.messages += found.messages, one.bytes += found.bytes;
  }
  return runs.flatMap((run, r) => {
    const own = each.slice(fromDevice[r], fromDevice[r + 1]).map((one, k) => [`device ${k}`, one]);
    return [[runs.length > 1 ? run.name : "all devices", together[r]], ...own];
  });
}

const REASON_WORDS = { message: "for messages", stream: "for a stream", dependency: "for dependencies" };
const NOTHING = facts.reasons.indexOf("nothing");
const [UNIT, UNIT_WORD] = slots ? [1, "slots"] : whole >= 1 ? [1, "s"] : whole >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];

// The heads of the table of sums, and its rows; a reason that no lane has is left out.
function sumsTable(from, to) {
  const found = sums(from, to), seen = (one, r) => one.idle[r] > 1e-9 * (to - from);
  const reasons = facts.reasons.map((_, r) => r).filter((r) => found.some(([, one]) => seen(one, r)));
  const rest = !waits.length ? "idle" : runs.every((_, r) => known(r)) ? "idle with nothing to do" : "idle otherwise";
  const word = (r) => (r === NOTHING ? rest : `idle ${REASON_WORDS[facts.reasons[r]]}`);
  const heads = ["", "busy", "", ...reasons.map(word), "messages", slots ? "stage-activations" : "bytes"];
  const body = found.map(([who, one]) => {
    const share = one.busy / (one.busy + one.idle.reduce((a, b) => a + b) || 1);
    const idle = reasons.map((r) => (seen(one, r) ? duration(one.idle[r]) : "–"));
    const size = slots ? (+one.bytes.toFixed(2)).toLocaleString("en") : engineering(one.bytes, "B");
    return [who, duration(one.busy), `${(100 * share).toFixed(1)} %`, ...idle, one.messages.toLocaleString("en"), size];
  });
  return { heads, body };
}

function fillTable(table, { heads, body }) {
  const cell = (text, scope) => (text && scope ? element("th", text, { scope }) : element("td", text));
  const row = (cells, className) => {
    const tr = Object.assign(document.createElement("tr"), { className });
    tr.append(...cells);
    return tr;
  };
  table.tHead.replaceChildren(row(heads.map((text) => cell(text, "col")), ""));
  const kind = ([who]) => (who.startsWith("device ") ? "" : "whole");
  const cells = (texts) => texts.map((text, k) => cell(text, k ? "" : "row"));
  table.tBodies[0].replaceChildren(...body.map((texts) => row(cells(texts), kind(texts))));
}

// Take a range, in slots a whole number of them; while it is being drawn its sums are not told.
function take(from, to, drawn = true) {
  const inside = (time) => Math.max(0, Math.min(slots ? Math.round(time) : time, whole));
  const ends = [inside(Math.min(from, to)), inside(Math.max(from, to))];
  range = ends[0] < ends[1] ? ends : null;
  if (drawn || !range) by("range").hidden = !range;
  if (drawn && range) {
    ["from", "to"].forEach((id, k) => (by(id).value = +(range[k] / UNIT).toPrecision(9)));
    const table = sumsTable(...range), [all] = table.body;
    fillTable(by("sums"), table);
    const said = table.heads.map((head, k) => `${head} ${all[k]}`);
    by("spoken").textContent = `${interval(...range)}: ${said.join(", ")}`;
  }
  redraw();
}

function drawRange() {
  if (!range) return;
  const [left, right] = range.map((time) => Math.min(Math.max(placeOf(time), size.gutter), size.width));
  paper.globalAlpha = 0.13;
  rect(look.accent, left, size.overview, right - left, size.height - size.overview);
  paper.globalAlpha = 1;
  rect(look.accent, left, size.overview + size.axis - 4, right - left, 4);
  for (const x of [left, right - 1]) rect(look.accent, x, size.overview, 1, size.height - size.overview);
}
