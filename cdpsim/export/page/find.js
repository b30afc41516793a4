// What stands where, what is selected, and what a search finds.

// The row and the bar under a point of the canvas; a bar beside it, too, if it is near.
function under(x, y, near) {
  if (x < size.gutter || y < size.top || y > size.bottom) return null;
  const at = y - size.top + view.scroll, time = timeAt(x), slack = (near * (view.to - view.from)) / size.across;
  let row = reach(tops, at + 1e-6, 0, rows) - 1;
  while (row > 0 && isMarks(row)) row--;
  if (row < 0 || at > tops[row] + tallness(row) + near) return null;
  const mark = row > 0 && isMarks(row - 1) && at - tops[row] < 9 ? nearest(row - 1, time, slack) : -1;
  return { row, time, bar: mark >= 0 ? mark : nearest(row, time, slack) };
}

function nearest(row, time, slack) {
  const k = reach(end, time, first[row], first[row + 1]);
  const inRow = (one) => one >= first[row] && one < first[row + 1];
  const far = (one) => (inRow(one) ? Math.max(start[one] - time, time - end[one], 0) : Infinity);
  const best = far(k - 1) < far(k) ? k - 1 : k;
  return inRow(best) && far(best) <= slack ? best : -1;
}

// What the tip says of a bar or of idle time.
function described({ row, bar, time }) {
  if (bar < 0) return row < deviceRows && time >= 0 && time <= ends[runOf(owner[row])] ? aboutIdle(row, time) : null;
  const point = (view.to - view.from) / size.across;
  if (end[bar] - start[bar] >= point) return about(bar);
  const more = reach(start, end[bar] + point, bar, first[rowOf(bar) + 1]) - bar - 1;
  return more ? [...about(bar), `and ${more} more on this point`] : about(bar);
}

// What the tip says of the tracks.
function held(x, y) {
  const time = timeAt(x), found = laidTracks().findLast(({ top }) => y >= top - 8);
  if (!found || x < size.gutter || time > whole) return null;
  const { one: track, whose, unit, title } = found, next = reach(track.time, time, 0, track.time.length);
  const place = `${whose}, ${slots ? "slot " : ""}${moment(time)}`;
  if (title === "sent") {
    const stem = next - (next % 2); // each is followed by its end
    return stem < track.sum.length ? [`${amount(track.sum[stem])} sent at ${moment(track.time[stem])}`] : null;
  }
  if (!next) return null;
  if (unit === "B/s") return [`${engineering(track.sum[next - 1], "B/s")} on the way`, place];
  const layers = facts.categories.map((category, c) => `${category} ${amount(track.layers[c][next - 1])}`);
  return [`${amount(track.sum[next - 1])} held`, place, ...layers];
}

const element = (tag, textContent, more) => Object.assign(document.createElement(tag), { textContent, ...more });
function lines(into, texts) {
  into.replaceChildren(...texts.map((text, k) => element(k ? "span" : "b", text)));
}

// The tip is at the pointer; without one, at the selected bar, where that is in view and there is room beside it.
let tipped = null;
function tell(texts, x, y) {
  const tip = by("tip"), beside = (at, space, size) => Math.max(2, at + 16 + size < space ? at + 16 : at - 12 - size);
  tip.style.visibility = texts ? "visible" : "hidden";
  if (!texts) return;
  if (tipped !== (tipped = texts.join("\n"))) lines(tip, texts);
  const [left, top] = [beside(x, size.width, tip.offsetWidth), beside(y, size.height, tip.offsetHeight)];
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

function point(x, y) {
  const here = x !== undefined, found = here ? under(x, y, 4) : null;
  pointed = here ? { x, y, bar: found ? found.bar : -1, texts: found ? described(found) : held(x, y) } : null;
  redraw();
}

function placeTip() {
  if (pointed) return tell(pointed.texts, pointed.x, pointed.y);
  if (selected < 0 || size.narrow) return tell(null);
  const { left, right, top, bottom } = placeOfBar(selected);
  const shown = right >= size.gutter && left <= size.width && bottom > size.top && top < size.bottom;
  tell(shown ? about(selected) : null, Math.min(Math.max(right, size.gutter), size.width) - 10, bottom - 10);
}

function select(k, reveal) {
  selected = k, by("details").hidden = k < 0;
  if (reveal) pointed = null;
  if (k >= 0) {
    lines(by("about"), about(k)), by("blocker").hidden = blockerOf(k) < 0;
    by("spoken").textContent = about(k).join(", ");
    if (reveal) bring(k);
  }
  if (paths) trace(true);
  redraw();
}

// Move as little as shows the bar well.
function bring(k) {
  const span = view.to - view.from, lasts = end[k] - start[k], middle = (start[k] + end[k]) / 2;
  if (lasts > span || (lasts && lasts / span < 4 / size.across)) show(middle - 20 * lasts, middle + 20 * lasts);
  else if (start[k] < view.from || end[k] > view.to) show(middle - span / 2, middle + span / 2);
  const top = tops[rowOf(k)], shown = size.bottom - size.top;
  if (top < view.scroll) view.scroll = Math.max(0, top - 20);
  if (top + tallness(rowOf(k)) > view.scroll + shown) view.scroll = Math.min(overflow(), top - shown / 2);
}

// To the next task of the lane, or the one before; says whether there was one.
function alongLane(way) {
  const next = selected + way, row = selected < 0 ? -1 : rowOf(selected);
  if (row < 0 || next < first[row] || next >= first[row + 1]) return false;
  select(next, true);
  return true;
}

function acrossLanes(way) {
  const time = (start[selected] + end[selected]) / 2;
  for (let row = rowOf(selected) + way; row >= 0 && row < rows; row += way)
    if (!isMarks(row) && first[row] < first[row + 1]) return select(nearest(row, time, Infinity), true);
}

function firstShown() {
  let row = Math.max(0, reach(tops, view.scroll + 1, 0, rows) - 1);
  while (row < rows - 1 && (isMarks(row) || first[row] === first[row + 1])) row++;
  return Math.min(reach(start, view.from, first[row], first[row + 1]), first[row + 1] - 1);
}

// The parts of a search: numbers under their names or letters, a task as it is labelled, a link, a word.
const PART = new RegExp([
  /(?<field>device|stage|step|micro-batch|version|slot|[tijdv]=)\s*(?<number>-?\d+)/,
  /(?<stage>\d+)(?<letter>[fbiwu])(?<batch>\d*)\b\/?/,
  /(?<from>\d+)\s*(?:→|->)\s*(?<to>\d+)/,
  /(?<word>[^\s,]+)/,
].map((part) => part.source).join("|"), "g");
const FIELDS = {
  step, "t=": step, "micro-batch": micro_batch, "i=": micro_batch, stage, "j=": stage, version, "v=": version,
};

// A function that says whether a bar, in its row, fits a part.
function fits({ field, number, stage: place, letter, batch, from, to, word }) {
  if (field in FIELDS) return (k) => FIELDS[field][k] === Number(number);
  if (field === "slot") return (k) => start[k] <= number && (end[k] > number || start[k] === Number(number));
  if (field) {
    const same = runs.flatMap((run, r) => (number < run.devices ? [fromDevice[r] + Number(number)] : []));
    return (k, row) => same.some((one) => (row < deviceRows ? owner[row] === one : touches(owner[row], one)));
  }
  if (letter) {
    const text = `${place}${letter === "i" ? "B" : letter.toUpperCase()}${batch}`; // torch writes I for a B beside a W
    const alike = batch ? (name) => name === text : (name) => name.startsWith(text);
    return (k) => stage[k] === Number(place) && alike(label(k).split(" ").at(-1));
  }
  const links = Array.from(data.link_op, (_, link) => linkName(link));
  if (from) return (k, row) => row >= deviceRows && links[owner[row]] === `${from} → ${to}`;
  if (kinds.includes(word.toUpperCase())) return (k) => kinds[kind[k]] === word.toUpperCase();
  if (word === "stale") return (k) => stale[k] === 1;
  const part = word.replaceAll(/[_-]/g, " "), named = KIND_NAMES.map((text) => text.includes(part));
  const holds = (text) => text.toLowerCase().replaceAll("-", " ").includes(part);
  const linked = links.map(holds), called = runs.map((run) => runs.length > 1 && holds(run.name));
  return (k, row) => named[kind[k]] || (row >= deviceRows && linked[owner[row]]) || called[runOfRow(row)];
}

// Counts of what fits before each bar.
function countBefore(fit) {
  const before = new Uint32Array(bars + 1);
  for (let row = 0, k = 0; row < rows; row++)
    for (; k < first[row + 1]; k++) before[k + 1] = before[k] + (fit(k, row) ? 1 : 0);
  return before;
}

// Parts that must all fit.
function find(text) {
  const parts = [...text.toLowerCase().matchAll(PART)].map((match) => match.groups);
  const tests = parts.filter(({ word }) => word !== "of").map(fits);
  search = tests.length ? countBefore((k, row) => tests.every((test) => test(k, row))) : null;
  const none = Boolean(search && !search[bars]);
  by("count").textContent = search ? count(search[bars], "hit") : "";
  by("query").setAttribute("aria-invalid", String(none));
  by("previous").hidden = by("next").hidden = !search || none;
  relight();
}

// The hit that comes next in time, from the selected bar or from where the view begins; after the last one the first.
function jump(way) {
  if (!search || !search[bars]) return;
  const later = (a, b) => (start[a] - start[b] || a - b) * way;
  let best = -1, farthest = -1;
  for (let k = 0; k < bars; k++) {
    if (search[k + 1] === search[k]) continue;
    const ahead = selected >= 0 ? later(k, selected) > 0 : (start[k] - view.from) * way >= 0;
    if (ahead && (best < 0 || later(k, best) < 0)) best = k;
    if (farthest < 0 || later(k, farthest) < 0) farthest = k;
  }
  select(best < 0 ? farthest : best, true);
}
