// What one can do with it.
const LEAST = slots ? 1 : whole * 1e-9; // the shortest time that fills the page

function show(from, to) {
  const span = Math.max(LEAST, Math.min(to - from, whole * 1.04)), margin = 0.02 * span;
  view.from = Math.max(-margin, Math.min(from + (to - from - span) / 2, whole + margin - span));
  view.to = view.from + span;
  redraw();
}
const fit = () => show(-0.02 * whole, 1.02 * whole);
function zoom(factor, x = size.gutter + size.across / 2) {
  const at = timeAt(x);
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const pan = (points) => show(view.from + (points * (view.to - view.from)) / size.across, view.to + (points * (view.to - view.from)) / size.across);
function scroll(points) {
  view.scroll = Math.max(0, Math.min(view.scroll + points, overflow()));
  redraw();
}
function heighten(factor) {
  view.tall = Math.max(3, Math.min(60, Math.round(view.tall * factor)));
  arrange(), redraw();
}

// The row and the bar under a point of the canvas; beside a bar too if it is near.
function under(x, y, near) {
  if (x < size.gutter || y < size.top || y > size.bottom) return null;
  const at = y - size.top + view.scroll, time = timeAt(x), slack = (near * (view.to - view.from)) / size.across;
  let row = Math.min(rows, reach(tops, at + 1e-6, 0, rows)) - 1;
  while (row > 0 && isMarks(row)) row--;
  if (row < 0 || at > tops[row] + tallness(row) + near) return null;
  const marks = row > 0 && isMarks(row - 1) && at - tops[row] < 9 ? nearest(row - 1, time, slack) : -1;
  return { x, y, row, time, bar: marks >= 0 ? marks : nearest(row, time, slack) };
}
function nearest(row, time, slack) {
  const k = reach(end, time, first[row], first[row + 1]);
  const far = (one) => (one < first[row] || one >= first[row + 1] ? Infinity : Math.max(start[one] - time, time - end[one], 0));
  const best = far(k - 1) < far(k) ? k - 1 : k;
  return far(best) <= slack ? best : -1;
}

function lines(element, texts) {
  element.replaceChildren(...texts.map((text, k) => Object.assign(document.createElement(k ? "span" : "b"), { textContent: text })));
}

function point(x, y) {
  const tip = by("tip"), found = x === undefined ? null : under(x, y, 4);
  pointed = x === undefined ? null : { x, bar: found ? found.bar : -1 };
  const texts = found ? described(found) : pointed && held(x, y);
  tip.style.visibility = texts ? "visible" : "hidden";
  if (texts) {
    lines(tip, texts);
    const right = x + 16 + tip.offsetWidth < size.width, below = y + 16 + tip.offsetHeight < size.height;
    tip.style.transform = `translate(${Math.max(2, right ? x + 16 : x - 12 - tip.offsetWidth)}px, ${Math.max(2, below ? y + 16 : y - 12 - tip.offsetHeight)}px)`;
  }
  redraw();
}
function described({ row, bar, time }) {
  if (bar < 0) return row < deviceRows && time >= 0 && time <= whole ? aboutIdle(row, time) : null;
  const slack = (view.to - view.from) / size.across;
  const more = reach(start, end[bar] + slack, bar, first[rowOf(bar) + 1]) - bar - 1;
  return more && end[bar] - start[bar] < slack ? [...about(bar), `and ${count(more, "more")} on this point`.replace("mores", "more")] : about(bar);
}
function held(x, y) {
  const time = timeAt(x), one = y < size.bottom || x < size.gutter ? null : y < size.bottom + 8 + size.memory ? memory : traffic;
  const k = one ? reach(one.time, time, 0, one.time.length) - (one === memory ? 1 : 0) : -1;
  if (k < 0 || k >= one.time.length || time > whole) return null;
  const place = `${view.device < devices ? `device ${view.device}` : "all devices"}, ${slots ? "slot " : ""}${moment(time)}`;
  if (one === traffic) {
    const now = traffic.lasting ? Math.max(0, k - 1) : k - (k % 2); // of stems, the next
    return traffic.lasting ? [`${engineering(traffic.sum[now], "B/s")} on the way`, place] : [`${amount(traffic.sum[now])} sent at ${moment(traffic.time[now])}`];
  }
  return [`${amount(memory.sum[k])} held`, place, ...facts.categories.map((word, c) => `${word} ${amount(memory.layers[c][k])}`)];
}

function select(k, reveal) {
  selected = k, by("details").hidden = k < 0;
  if (k >= 0) {
    lines(by("about"), about(k)), by("blocker").hidden = blockerOf(k) < 0;
    by("spoken").textContent = about(k).join(", ");
    if (reveal) bring(k);
  }
  redraw();
}
// Move as little as shows the bar well.
function bring(k) {
  const span = view.to - view.from, lasts = end[k] - start[k], top = tops[rowOf(k)], shown = size.bottom - size.top;
  if (lasts > span || (lasts && lasts / span < 4 / size.across)) show(start[k] - 20 * lasts, end[k] + 20 * lasts);
  else if (start[k] < view.from || end[k] > view.to) show((start[k] + end[k] - span) / 2, (start[k] + end[k] + span) / 2);
  if (top < view.scroll) view.scroll = Math.max(0, top - 20);
  if (top + tallness(rowOf(k)) > view.scroll + shown) view.scroll = Math.min(overflow(), top - shown / 2);
}
function inLane(way) {
  const row = selected < 0 ? -1 : rowOf(selected), next = selected + way;
  if (row < 0 || next < first[row] || next >= first[row + 1]) return false;
  select(next, true);
  return true;
}
function firstShown() {
  let row = Math.max(0, reach(tops, view.scroll + 1, 0, rows) - 1);
  while (row < rows - 1 && (isMarks(row) || first[row] === first[row + 1])) row++;
  return Math.min(reach(start, view.from, first[row], first[row + 1]), first[row + 1] - 1);
}
function acrossLanes(way) {
  const time = (start[selected] + end[selected]) / 2;
  for (let row = rowOf(selected) + way; row >= 0 && row < rows; row += way)
    if (!isMarks(row) && first[row] < first[row + 1]) return select(nearest(row, time, Infinity), true);
}

// Search: words that must all fit; each says of a bar (and its row) whether it does.
function fits(word) {
  const field = /^([tijdv])=(-?\d+)$/i.exec(word), letter = kinds.indexOf(word.toUpperCase()), low = word.toLowerCase();
  if (field) {
    const column = { t: step, i: micro_batch, j: stage, v: version }[field[1].toLowerCase()], number = +field[2];
    if (column) return (k) => column[k] === number;
    return (k, row) => (row < deviceRows ? owner[row] === number : touches(owner[row], number));
  }
  if (letter >= 0 && word.length === 1) return (k) => kind[k] === letter;
  if (low === "stale") return (k) => stale[k] === 1;
  const known = ["forward", "backward", "weight gradient", "update", ...kinds.slice(4)].map((text) => text.includes(low.replace(/[_-]/g, " ")));
  const links = data.link_op.reduce((set, _, link) => (linkName(link).includes(low) ? set.add(link) : set), new Set());
  return (k, row) => known[kind[k]] || (row >= deviceRows && links.has(owner[row]));
}
function find(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map(fits);
  search = tests.length ? new Uint32Array(bars + 1) : null;
  for (let row = 0, k = 0; search && row < rows; row++)
    for (; k < first[row + 1]; k++) search[k + 1] = search[k] + (tests.every((test) => test(k, row)) ? 1 : 0);
  by("count").textContent = search ? count(search[bars], "hit") : "";
  by("query").setAttribute("aria-invalid", String(Boolean(search && !search[bars])));
  by("previous").hidden = by("next").hidden = !search || !search[bars];
  redraw();
}
// The hit that comes next in time, from the selected bar or from where the page begins; after the last one the first.
function jump(way) {
  if (!search || !search[bars]) return;
  const now = selected >= 0 ? start[selected] : view.from, later = (a, b) => start[a] - start[b] || a - b;
  let best = -1, extreme = -1;
  for (let k = 0; k < bars; k++) {
    if (search[k + 1] === search[k]) continue;
    const ahead = selected >= 0 ? later(k, selected) * way > 0 : (start[k] - now) * way >= 0;
    if (ahead && (best < 0 || later(k, best) * way < 0)) best = k;
    if (extreme < 0 || later(k, extreme) * way < 0) extreme = k;
  }
  select(best < 0 ? extreme : best, true);
}

function recolour(colouring) {
  colour(colouring);
  const chip = (hex, text, band) => {
    const [entry, mark] = [document.createElement("span"), document.createElement("i")];
    mark.className = "chip", mark.style.background = hex;
    if (band) mark.style.borderColor = band[1], mark.style[`border${band[0]}Width`] = "4px";
    entry.append(mark, text);
    return entry;
  };
  const title = (text) => Object.assign(document.createElement("b"), { textContent: text });
  const used = [...new Set(classes)].sort((a, b) => a - b), band = (c) => `#${[0, 8, 16].map((by) => ((look.band[c] >> by) & 255).toString(16).padStart(2, "0")).join("")}`;
  const column = { "micro-batch": micro_batch, stage }[colouring], most = column ? column.reduce((a, b) => Math.max(a, b), 0) : 0;
  const ages = ["this step's version", "one step older", ...[2, 3, 4, 5, 6, 7].map((k) => `${k} steps older`)];
  const word = (c) => (c === INK ? "update" : c === GREY ? `no ${colouring}` : column ? `${c}${most > 7 ? `, ${c + 8}${most > c + 15 ? " …" : ""}` : ""}` : ages[c]);
  const present = [...new Set(kind)].sort((a, b) => a - b), names = { F: "forward", B: "backward", W: "weight gradient", U: "update" };
  const shown = colouring === "kind"
    ? present.map((k) => chip(look.hex[facts.kindColours[k]], names[kinds[k]] ?? kinds[k], k === BACKWARD && ["Bottom", band(facts.kindColours[k])]))
    : used.map((c) => chip(look.hex[c], c === GREY && colouring === "staleness" ? "message" : word(c)));
  const marks = [chip(look.grey, "forward"), chip(look.grey, "backward", ["Bottom", band(GREY)])];
  if (present.includes(WEIGHTS)) marks.push(chip(look.grey, "weight gradient", ["Top", band(GREY)]));
  const slash = document.createElement("span");
  slash.append("/ a newer version exists");
  const bytes = facts.categories.map((category, c) => (memory.layers[c].some(Boolean) ? chip(look.hex[facts.categoryColours[c]], category) : ""));
  const group = (...parts) => {
    const div = document.createElement("div");
    div.append(...parts);
    return div;
  };
  by("legend").replaceChildren(group(title(colouring), ...shown),
    group(...(colouring === "kind" ? [] : marks), ...(stale.includes(1) ? [slash] : [])), group(title("memory"), ...bytes));
  redraw();
}

function watch(device) {
  const list = by("device");
  if (![...list.options].some((option) => +option.value === device)) list.add(new Option(`device ${device}`, device));
  list.value = view.device = device;
  memory = memoryOf(device), traffic = trafficOf(device);
  redraw();
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  tint(), recolour(view.colouring);
}

const keys = {
  w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
  a: () => pan(-0.15 * size.across), d: () => pan(0.15 * size.across), ArrowLeft: () => pan(-60), ArrowRight: () => pan(60),
  ArrowUp: () => (selected < 0 ? scroll(-40) : acrossLanes(-1)), ArrowDown: () => (selected < 0 ? scroll(40) : acrossLanes(1)),
  PageUp: () => scroll(size.top - size.bottom), PageDown: () => scroll(size.bottom - size.top), 0: fit, Home: fit,
  "[": () => heighten(0.8), "]": () => heighten(1.25), n: () => jump(1), N: () => jump(-1), "/": () => by("query").select(),
  p: () => blockerOf(selected) >= 0 && select(blockerOf(selected), true), "?": () => by("keys").showModal(),
  m: () => watch(view.device < devices || selected < 0 || selected >= tasks ? devices : owner[rowOf(selected)]),
  Escape: () => (selected >= 0 ? select(-1) : ((by("query").value = ""), find(""))),
};
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName) || by("keys").open;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === by("query") && ["Enter", "Escape"].includes(event.key)) {
    if (event.key === "Enter") jump(event.shiftKey ? -1 : 1); else canvas.focus();
  } else if (event.key === "Tab" && event.target === canvas && inLane(event.shiftKey ? -1 : 1)) event.preventDefault();
  else if (event.key === "Enter" && event.target === canvas) select(selected < 0 ? firstShown() : selected, true);
  else if (!typing && Object.hasOwn(keys, event.key)) {
    event.preventDefault(), keys[event.key]();
  }
});

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const points = event.deltaMode ? 16 : 1, [across, down] = [event.deltaX * points, event.deltaY * points];
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-60, Math.min(60, down)) / 120), event.offsetX);
  else if (event.shiftKey || Math.abs(across) > Math.abs(down)) pan(across || down);
  else if (overflow() && event.offsetY > size.top) scroll(down);
  else zoom(Math.exp(Math.max(-60, Math.min(60, down)) / 240), event.offsetX);
}, { passive: false });

// One finger or the mouse drags, two fingers pinch; what has not moved was a tap.
const fingers = new Map();
let moved = 0;
const middle = () => [...fingers.values()].reduce((sum, { x }) => sum + x, 0) / fingers.size;
function apart() {
  const [a, b] = fingers.values();
  return Math.max(20, Math.hypot(a.x - b.x, a.y - b.y));
}
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY, overview: event.offsetY < size.overview });
  moved = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const finger = fingers.get(event.pointerId), [x, y] = [event.offsetX, event.offsetY];
  if (!finger) return event.pointerType === "touch" ? undefined : point(x, y);
  const [dx, dy] = [x - finger.x, y - finger.y], before = fingers.size === 2 && [middle(), apart()];
  if ((moved += Math.abs(dx) + Math.abs(dy)) < 5) return;
  Object.assign(finger, { x, y }), canvas.classList.add("dragged"), point();
  if (finger.overview) overview(x);
  else if (before) zoom(before[1] / apart(), middle()), pan((before[0] - middle()));
  else pan(-dx), scroll(-dy);
});
for (const type of ["pointerup", "pointercancel"]) canvas.addEventListener(type, (event) => {
  const finger = fingers.get(event.pointerId);
  fingers.delete(event.pointerId), canvas.classList.remove("dragged");
  if (!finger || moved >= 5 || type === "pointercancel") return;
  if (finger.overview) return overview(finger.x);
  select(under(finger.x, finger.y, event.pointerType === "touch" ? 10 : 4)?.bar ?? -1);
});
function overview(x) {
  const time = ((x - size.gutter) / size.across) * whole, span = view.to - view.from;
  show(time - span / 2, time + span / 2);
}
canvas.addEventListener("pointerleave", () => point());
canvas.addEventListener("dblclick", fit);

const actions = { in: keys.w, out: keys.s, fit, next: keys.n, previous: keys.N, blocker: keys.p, close: () => select(-1), help: keys["?"] };
for (const [id, action] of Object.entries(actions)) by(id).addEventListener("click", action);
by("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
by("query").addEventListener("input", (event) => find(event.target.value));
by("colour").addEventListener("change", (event) => recolour(event.target.value));
by("device").addEventListener("change", (event) => (watch(+event.target.value), recolour(view.colouring)));
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", () => theme(prefersDark.matches));

for (const colouring of Object.keys(COLOURINGS)) by("colour").add(new Option(colouring, colouring));
by("device").add(new Option("all devices", devices));
for (let device = 0; device < Math.min(devices, 256); device++) by("device").add(new Option(`device ${device}`, device));
const { makespan, period, bubble, mean_staleness } = facts.summary;
by("figures").textContent = [count(devices, "device"), count(tasks, "task"), count(bars - tasks, "message"),
  makespan !== undefined && `${duration(makespan)} in all`, period !== undefined && `${duration(period)} a step`,
  bubble !== undefined && `${(100 * bubble).toFixed(1)} % idle`, mean_staleness !== undefined && `mean staleness ${+mean_staleness.toFixed(3)}`,
].filter(Boolean).join(" · ");
canvas.setAttribute("aria-label", `Timeline of ${facts.title}: ${by("figures").textContent}. Enter selects a task, Tab the next.`);

by("wait").remove();
view.tall = 0;
watch(devices), theme(prefersDark.matches), measure(), fit(), find("");
new ResizeObserver(() => (measure(), draw())).observe(canvas);

// What tests and the curious may read.
window.cdpsim = Object.freeze({
  get view() { return { ...view }; }, get frames() { return [...frames]; }, get selected() { return selected; },
  get hits() { return search ? search[bars] : null; }, bars, tasks, about, name,
  get area() { return { left: size.gutter, right: size.width, top: size.top, memory: size.bottom + 8, traffic: size.height - size.traffic }; },
  place(k) {
    const row = rowOf(k), top = size.top + tops[row] - view.scroll;
    return { left: placeOf(start[k]), right: placeOf(end[k]), top, bottom: top + (isMarks(row) ? 7 : tallness(row)) };
  },
});
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.drawn = "yes")));
