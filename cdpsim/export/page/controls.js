// What one can do with it.
const LEAST = slots ? 1 : whole * 1e-9; // the shortest time that fills the view

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

function pan(points) {
  const by = (points * (view.to - view.from)) / size.across;
  show(view.from + by, view.to + by);
}

function scroll(points) {
  view.scroll = Math.max(0, Math.min(view.scroll + points, overflow()));
  redraw();
}

function heighten(factor) {
  view.tall = Math.max(3, Math.min(60, Math.round(view.tall * factor)));
  arrange(), redraw();
}

function overviewTo(x) {
  const time = ((x - size.gutter) / size.across) * whole, span = view.to - view.from;
  show(time - span / 2, time + span / 2);
}

// The legend: what colours, shapes and layers mean that are there.
function chip(hex, text, side, band) {
  const [entry, mark] = [document.createElement("span"), document.createElement("i")];
  mark.className = "chip", mark.style.background = hex;
  if (side) mark.style[`border${side}`] = `4px solid ${band}`;
  entry.append(mark, text);
  return entry;
}

function coloursOf(colouring) {
  if (colouring === "kind") return [];
  const numbers = { "micro-batch": micro_batch, stage }[colouring];
  const most = numbers ? numbers.reduce((a, b) => Math.max(a, b), 0) : 0;
  const word = (c) => {
    if (c === INK) return "update";
    if (c === GREY) return numbers ? `no ${colouring}` : "message";
    if (!numbers) return c ? `${c} step${c > 1 ? "s" : ""} older` : "this step's version";
    return c + 16 <= most ? `${c}, ${c + 8} …` : c + 8 <= most ? `${c}, ${c + 8}` : `${c}`;
  };
  return [...new Set(classes)].sort((a, b) => a - b).map((c) => chip(look.hex[c], word(c)));
}

// Once for all that changes it at a time.
let legendDue = false;
function legendSoon() {
  if (!legendDue) legendDue = true, queueMicrotask(() => ((legendDue = false), legend()));
}

function legend() {
  const present = [...new Set(kind)].sort((a, b) => a - b), byKind = view.colouring === "kind";
  const shape = (k) => {
    const c = byKind ? facts.kindColours[k] : GREY, side = k === BACKWARD ? "Bottom" : k === WEIGHTS ? "Top" : "";
    return chip(look.hex[c], KIND_NAMES[k], side, hexOf(look.band[c]));
  };
  const shapes = present.filter((k) => byKind || k < UPDATE).map(shape);
  const held = facts.categories.map((_, c) => c).filter((c) => memories.some(({ one }) => one.layers[c].some(Boolean)));
  const layers = held.map((c) => chip(look.hex[facts.categoryColours[c]], facts.categories[c]));
  const group = (title, ...entries) => {
    const [div, b] = [document.createElement("div"), document.createElement("b")];
    b.textContent = title;
    div.append(...(title ? [b] : []), ...entries);
    return div;
  };
  const slash = stale.includes(1) ? ["/ a newer version exists"] : [];
  const colours = group(view.colouring, ...(byKind ? shapes : coloursOf(view.colouring)));
  const both = present.includes(WEIGHTS) ? "B for torch's B or I" : "";
  const labels = group("1F3", ["stage 1, forward, micro-batch 3", both].filter(Boolean).join("; "));
  const marks = group("", ...(byKind ? [] : shapes), ...slash);
  by("legend").replaceChildren(colours, marks, labels, group("memory", ...layers));
}

function recolour(colouring) {
  colour(colouring), legendSoon(), redraw();
}

// Of memory and traffic of a device, in each run that has it; of -1, of all.
function watch(device) {
  const list = by("device"), listed = [...list.options].some((option) => Number(option.value) === device);
  if (!listed) list.add(new Option(`device ${device}`, device));
  list.value = view.device = device;
  watchTracks(), legendSoon(), redraw();
}

const isDark = () => document.documentElement.dataset.theme === "dark";
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  tint(), legendSoon(), redraw();
}

const closer = () => zoom(0.7), further = () => zoom(1 / 0.7);
const keys = {
  w: closer, "+": closer, "=": closer, s: further, "-": further, 0: fit, Home: fit,
  a: () => pan(-0.15 * size.across), d: () => pan(0.15 * size.across),
  ArrowLeft: () => pan(-60), ArrowRight: () => pan(60),
  ArrowUp: () => (selected < 0 ? scroll(-40) : acrossLanes(-1)),
  ArrowDown: () => (selected < 0 ? scroll(40) : acrossLanes(1)),
  PageUp: () => scroll(size.top - size.bottom), PageDown: () => scroll(size.bottom - size.top),
  "[": () => heighten(0.8), "]": () => heighten(1.25),
  n: () => jump(1), N: () => jump(-1), "/": () => by("query").select(), "?": () => by("keys").showModal(),
  c: () => trace(!paths),
  r: () => {
    if (range) take(0, 0);
    else if (selected >= 0 && end[selected] > start[selected]) take(start[selected], end[selected]);
    else take(view.from, view.to);
  },
  p: () => { if (selected >= 0 && blockerOf(selected) >= 0) select(blockerOf(selected), true); },
  m: () => watch(view.device >= 0 || selected < 0 || selected >= tasks ? -1 : own(owner[rowOf(selected)])),
  Escape: () => {
    if (selected >= 0) select(-1);
    else if (paths) trace(false);
    else if (range) take(0, 0);
    else by("query").value = "", find("");
  },
};
document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || by("keys").open) return;
  if (target === by("query") && key === "Enter") jump(event.shiftKey ? -1 : 1);
  else if (target === by("query") && key === "Escape") canvas.focus();
  else if (["INPUT", "SELECT"].includes(target.tagName)) return;
  else if (key === "Tab" && target === canvas) { if (!alongLane(event.shiftKey ? -1 : 1)) return; }
  else if (key === "Enter" && target === canvas) select(selected < 0 ? firstShown() : selected, true);
  else if (Object.hasOwn(keys, key)) keys[key]();
  else return;
  event.preventDefault();
});

// Ctrl zooms, as in Perfetto; without it the wheel scrolls lanes, or zooms too where all are seen.
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const unit = event.deltaMode ? 16 : 1, across = event.deltaX * unit, down = event.deltaY * unit;
  const turn = Math.max(-60, Math.min(60, down));
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(turn / 120), event.offsetX);
  else if (event.shiftKey || Math.abs(across) > Math.abs(down)) pan(across || down);
  else if (overflow() && event.offsetY > size.top) scroll(down);
  else zoom(Math.exp(turn / 240), event.offsetX);
}, { passive: false });

// One finger or the mouse drags, two fingers pinch; what has not moved was a tap.
const fingers = new Map();
let moved = 0;
function grip() {
  const [a, b] = fingers.values();
  return { x: (a.x + b.x) / 2, wide: Math.max(20, Math.hypot(a.x - b.x, a.y - b.y)) };
}
canvas.addEventListener("pointerdown", (event) => {
  const { offsetX: x, offsetY: y } = event, overview = y < size.overview;
  canvas.setPointerCapture(event.pointerId);
  const since = !overview && (event.shiftKey || y < size.top) ? timeAt(x) : null; // where a range begins
  fingers.set(event.pointerId, { x, y, overview, since });
  moved = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const finger = fingers.get(event.pointerId), x = event.offsetX, y = event.offsetY;
  if (!finger) return event.pointerType === "touch" ? undefined : point(x, y);
  const dx = x - finger.x, dy = y - finger.y, before = fingers.size === 2 && grip();
  if ((moved += Math.abs(dx) + Math.abs(dy)) < 5) return;
  Object.assign(finger, { x, y }), canvas.classList.add("dragged"), point();
  if (finger.overview) overviewTo(x);
  else if (finger.since !== null && !before) take(finger.since, timeAt(x), false);
  else if (before) zoom(before.wide / grip().wide, before.x), pan(before.x - grip().x);
  else pan(-dx), scroll(-dy);
});
function lift(event) {
  const finger = fingers.get(event.pointerId);
  fingers.delete(event.pointerId), canvas.classList.remove("dragged");
  if (finger && moved >= 5 && finger.since !== null && range) take(...range);
  if (!finger || moved >= 5 || event.type === "pointercancel") return;
  if (finger.overview) return overviewTo(finger.x);
  const found = under(finger.x, finger.y, event.pointerType === "touch" ? 10 : 4);
  select(found ? found.bar : -1);
}
canvas.addEventListener("pointerup", lift);
canvas.addEventListener("pointercancel", lift);
canvas.addEventListener("pointerleave", () => point());
canvas.addEventListener("dblclick", fit);

const buttons = { in: closer, out: further, fit, next: keys.n, previous: keys.N, path: keys.c };
Object.assign(buttons, { blocker: keys.p, help: keys["?"] });
for (const [id, action] of Object.entries(buttons)) by(id).addEventListener("click", action);
by("close").addEventListener("click", () => (select(-1), canvas.focus()));
by("clear").addEventListener("click", () => (take(0, 0), canvas.focus()));
for (const id of ["from", "to"])
  by(id).addEventListener("change", () => take(by("from").value * UNIT, by("to").value * UNIT));
by("theme").addEventListener("click", () => theme(!isDark()));
by("query").addEventListener("input", () => find(by("query").value));
by("colour").addEventListener("change", () => recolour(by("colour").value));
by("device").addEventListener("change", () => watch(Number(by("device").value)));
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", () => theme(prefersDark.matches));

// On paper it is light and fine, and so high that all lanes are there, as far as they go on a sheet.
const PAPER = { width: 900, height: 640, highest: 1150, fine: 3 };
let wasDark = false;
window.addEventListener("beforeprint", () => {
  wasDark = isDark(), theme(false), measure(PAPER, PAPER.fine);
  measure({ width: PAPER.width, height: Math.min(PAPER.highest, PAPER.height + overflow()) }, PAPER.fine), draw();
});
window.addEventListener("afterprint", () => (theme(wasDark), measure(), draw()));

function metricsOf({ summary, devices }, counts) {
  const { makespan, period, bubble, mean_staleness, held_in_steady_state } = summary;
  const metrics = [count(devices, "device"), ...counts];
  if (makespan !== undefined) metrics.push(`${duration(makespan)} in all`);
  if (period !== undefined) metrics.push(`${duration(period)} a step`);
  if (bubble !== undefined) metrics.push(`bubble ${(100 * bubble).toFixed(1)} %`);
  if (mean_staleness !== undefined) metrics.push(`mean staleness ${Number(mean_staleness.toFixed(3))}`);
  if (held_in_steady_state !== undefined) metrics.push(`not in steady state, where a device holds ${amount(held_in_steady_state)}`);
  return metrics.join(" · ");
}

function introduce() {
  for (const colouring of Object.keys(COLOURINGS)) by("colour").add(new Option(colouring, colouring));
  by("device").add(new Option("all devices", -1));
  const most = Math.max(...runs.map((run) => run.devices));
  for (let one = 0; one < Math.min(most, 256); one++) by("device").add(new Option(`device ${one}`, one));
  const counts = runs.map(() => [0, 0]);
  for (let row = 0; row < rows; row++) counts[runOfRow(row)][Number(row >= deviceRows)] += first[row + 1] - first[row];
  const metrics = runs.map((run, r) => metricsOf(run, [count(counts[r][0], "task"), count(counts[r][1], "message")]));
  const told = metrics.map((text, r) => (runs.length > 1 ? `${runs[r].name}: ${text}` : text));
  by("metrics").replaceChildren(...told.map((text) => element("div", text)));
  const label = `Timeline of ${facts.title}: ${told.join("; ")}. Enter selects a task, Tab the next.`;
  canvas.setAttribute("aria-label", label);
  by("path").hidden = !waits.length, by("unit").textContent = UNIT_WORD;
}

introduce(), theme(prefersDark.matches), recolour("micro-batch"), watch(-1), measure();
by("wait").remove();
new ResizeObserver(() => (measure(), draw())).observe(canvas);

// What tests and the curious may read.
window.cdpsim = Object.freeze({
  bars, tasks, about, name, sums,
  get view() { return { ...view }; },
  get frames() { return [...frames]; }, // milliseconds of the last ones
  get selected() { return selected; },
  get hits() { return search && search[bars]; },
  get area() {
    const { gutter: left, width: right, top, bottom, height } = size;
    return { left, right, top, memory: bottom + 8, traffic: height - size.traffic };
  },
  get range() { return range; },
  get paths() { return paths && paths.map((chain) => [...chain]); },
  time: (k) => [start[k], end[k]],
  place: placeOfBar,
});
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.drawn = "yes")));
