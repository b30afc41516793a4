// How it looks. Bars go into a picture's points directly, so that a frame's time depends on points and not on bars.
const canvas = by("timeline"), paper = canvas.getContext("2d", { alpha: false });
const [GREY, INK] = [8, 9]; // classes of colour after those of the palette
const MARK = 7; // how high an update is
const view = { from: 0, to: whole, scroll: 0, tall: 0, colouring: "micro-batch", device: -1 }; // of all devices
const look = {}, size = {}, frames = [];
const classes = new Uint8Array(bars), tops = new Float64Array(rows + 1);
let search = null, lit = null; // hits, and bars that stand out, before each bar
let selected = -1, pointed = null, memories = [], traffics = [], share, waiting = false;

const COLOURINGS = {
  "micro-batch": (k) => (kind[k] === UPDATE ? INK : micro_batch[k] < 0 ? GREY : micro_batch[k] % 8),
  stage: (k) => (stage[k] < 0 ? GREY : stage[k] % 8),
  kind: (k) => facts.kindColours[kind[k]],
  staleness: (k) => (k >= tasks ? GREY : kind[k] === UPDATE ? INK : Math.max(0, step[k] - version[k]) % 8),
};
function colour(colouring) {
  view.colouring = colouring;
  for (let k = 0; k < bars; k++) classes[k] = COLOURINGS[colouring](k);
}

// A colour as the picture's points have it, and back; a mixture of two of them.
const channels = (point) => [point & 255, (point >> 8) & 255, (point >> 16) & 255];
const pointOf = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const packed = (hex) => pointOf([1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const hexOf = (point) => `#${channels(point).map((one) => one.toString(16).padStart(2, "0")).join("")}`;
function blend(a, b, part) {
  const other = channels(b);
  return pointOf(channels(a).map((one, k) => Math.round(one * (1 - part) + other[k] * part)));
}

function rect(colour, x, y, wide, tall) {
  paper.fillStyle = colour, paper.fillRect(x, y, wide, tall);
}
function write(text, x, y, { colour = look.grey, align = "right", most, bold } = {}) {
  paper.font = `${bold ? "bold " : ""}11px system-ui, sans-serif`, paper.textBaseline = "middle";
  paper.textAlign = align, paper.fillStyle = colour, paper.fillText(text, x, y, most);
}
function stroke(colour, width, from, to) {
  paper.strokeStyle = colour, paper.lineWidth = width;
  paper.beginPath(), paper.moveTo(...from), paper.lineTo(...to), paper.stroke();
}

// Colours as they stand in the page: of bars, of their darker or lighter bands, and of both where a search has no hit.
function tint() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "ink", "grey", "line", "lane", "accent"])
    look[name] = style.getPropertyValue(`--${name}`).trim();
  look.hex = [...facts.colours, look.grey, look.ink];
  look.texts = [...facts.inks, look.page, look.page];
  look.ground = packed(look.page), look.idle = packed(look.lane), look.grid = packed(look.line);
  const body = look.hex.map(packed), band = body.map((one, c) => blend(one, packed(look.texts[c]), 0.5));
  const faint = (list) => list.map((one) => blend(look.idle, one, 0.16));
  look.body = Uint32Array.from([...body, ...faint(body)]), look.band = Uint32Array.from([...band, ...faint(band)]);
}

// Where everything stands, in CSS pixels.
function measure({ width, height } = canvas.getBoundingClientRect(), fine = Math.min(window.devicePixelRatio || 1, 2)) {
  const narrow = width < 600, low = height < 340;
  Object.assign(size, { width, height, fine, gutter: narrow ? 60 : 104, overview: low ? 18 : 28, axis: 22 });
  Object.assign(size, { memory: low ? 38 : 84, traffic: bars === tasks ? 0 : low ? 28 : 46, narrow });
  Object.assign(size, { top: size.overview + size.axis, bottom: height - size.memory - size.traffic - 16 });
  size.across = width - size.gutter;
  if (!view.tall) view.tall = comfortable(size.bottom - size.top);
  arrange();
  const spare = Math.min(240, Math.max(0, size.bottom - size.top - tops[rows] - 24)); // goes to the tracks
  const more = Math.round(size.traffic ? 0.35 * spare : 0);
  size.memory += Math.round(spare) - more, size.traffic += more, size.bottom -= Math.round(spare);
  [canvas.width, canvas.height] = [Math.round(width * fine), Math.round(height * fine)];
  const wide = Math.round(size.across * fine), high = Math.max(1, Math.round((size.bottom - size.top) * fine));
  size.image = new ImageData(Math.max(1, wide), high), size.points = new Uint32Array(size.image.data.buffer);
  size.lines = ["head", "body", "foot"].map(() => new Uint32Array(size.image.width));
  arrange(), share = shares();
}

// Lanes as high as lets all of them be seen, if that leaves them high enough.
function comfortable(space) {
  let lanes = 0;
  for (let row = 0; row < deviceRows; row++) lanes += !isMarks(row);
  const all = Math.floor((space - 24 * (runs.length > 1 ? 4 : 1) - 3 * devices) / (lanes + 0.6 * (rows - deviceRows)));
  return Math.min(30, Math.max(all >= 12 ? all : Math.floor((0.75 * space) / lanes) - 3, 9));
}

// Links come under a heading, and so do the devices and the links of each of several runs.
const isHead = (row) => row === deviceRows || (runs.length > 1 && (!row || runOfRow(row) !== runOfRow(row - 1)));
const tallness = (row) => (row < deviceRows ? view.tall : Math.max(5, Math.round(0.6 * view.tall)));
function arrange() {
  let y = 3;
  for (let row = 0; row < rows; row++) {
    if (isHead(row)) y += 22;
    else if (row && owner[row] !== owner[row - 1]) y += view.tall > 8 ? 3 : 1;
    tops[row] = y;
    if (!isMarks(row)) y += tallness(row) + (view.tall > 8 ? 1 : 0);
  }
  tops[rows] = y;
  view.scroll = Math.max(0, Math.min(view.scroll, overflow()));
}
const overflow = () => Math.max(0, tops[rows] + 6 - (size.bottom - size.top));

const timeAt = (x) => view.from + ((x - size.gutter) * (view.to - view.from)) / size.across;
const placeOf = (time) => size.gutter + ((time - view.from) * size.across) / (view.to - view.from);

// One row as a line of points, and its head and foot: backwards have a band at their foot, weight gradients one at
// their head.
function scan(row, ground, wide) {
  const across = size.image.width, each = (view.to - view.from) / across, stop = first[row + 1];
  const last = ground ? Math.max(0, (ends[runOfRow(row)] - view.from) / each) : across; // of its run
  for (const line of size.lines)
    line.fill(ground && look.ground), line.fill(ground, Math.max(0, -view.from / each), last);
  if (ground) for (const x of size.grid) for (const line of size.lines) line[x] = look.grid;
  let k = reach(end, view.from, first[row], stop);
  while (k < stop && start[k] <= view.to) {
    const from = (start[k] - view.from) / each, until = (end[k] - view.from) / each;
    if (until - from >= 1) {
      const left = Math.max(0, Math.round(from)), gap = until - from > 4 * size.fine ? size.fine : 0;
      fill(k, left, Math.max(left + 1, Math.round(until) - gap));
      if (until - from > 8 * size.fine) wide.push(k, row);
      k++;
      continue;
    }
    const point = Math.max(0, Math.floor(from));
    let next = reach(start, view.from + (point + 1) * each, k + 1, stop);
    if (next - 1 > k && end[next - 1] - start[next - 1] >= each) next--;
    mix(k, next, point, row < deviceRows ? (busy[next] - busy[k]) / each : 1, ground);
    k = next;
  }
}

function fill(k, left, right) {
  const shade = classes[k] + (lit && lit[k + 1] === lit[k] ? look.hex.length : 0);
  size.lines[0].fill(kind[k] === WEIGHTS ? look.band[shade] : look.body[shade], left, right);
  size.lines[1].fill(look.body[shade], left, right);
  size.lines[2].fill(kind[k] === BACKWARD ? look.band[shade] : look.body[shade], left, right);
}

// Many bars on one point: the mean colour of some of them, as thin as they leave it; a hit among them is seen.
function mix(k, next, point, cover, ground) {
  const hit = lit && lit[next] > lit[k] ? reach(lit, lit[k] + 1, k, next) - 1 : -1;
  if (hit >= 0) return fill(hit, point, point + 2 * size.fine);
  if (busy[next] === busy[k]) return fill(k, point, point + 2 * size.fine);
  const faint = lit ? look.hex.length : 0, samples = Math.min(8, next - k);
  const thick = cover >= 0.98 ? 1 : Math.max(0.35, cover);
  const over = (sum, by) => Math.round((sum / samples) * thick + ((ground >> by) & 255) * (1 - thick)) << by;
  for (let part = 0; part < 3; part++) {
    const own = part === 0 ? WEIGHTS : part === 2 ? BACKWARD : -1;
    let [r, g, b] = [0, 0, 0];
    for (let s = 0; s < samples; s++) {
      const one = samples < 8 ? k + s : k + Math.floor(((s * 0.618034) % 1) * (next - k)); // in step with no period
      const colour = (kind[one] === own ? look.band : look.body)[classes[one] + faint];
      r += colour & 255, g += (colour >> 8) & 255, b += (colour >> 16) & 255;
    }
    size.lines[part][point] = ((255 << 24) | over(b, 16) | over(g, 8) | over(r, 0)) >>> 0;
  }
}

function paintRows(wide) {
  const { points, lines, fine } = size, across = size.image.width, down = size.image.height;
  points.fill(look.ground);
  const inPoints = ticks().result.map((time) => Math.round((placeOf(time) - size.gutter) * fine));
  size.grid = inPoints.filter((x) => x >= 0 && x < across);
  let row = Math.max(0, reach(tops, view.scroll - view.tall - 9, 0, rows) - 1);
  for (; row < rows && tops[row] < view.scroll + down / fine; row++) {
    const marks = isMarks(row), from = Math.round((tops[row] - view.scroll) * fine);
    const until = Math.round((tops[row] - view.scroll + tallness(row)) * fine);
    if (marks) { paintLater.push(row); continue; }
    const third = until - from > 4 * fine ? Math.round((until - from) * 0.24) : 0;
    scan(row, look.idle, wide);
    for (let y = Math.max(0, from); y < Math.min(down, until); y++)
      points.set(lines[y < from + third ? 0 : y < until - third ? 1 : 2], y * across);
    if (row === deviceRows - 1 || owner[row] !== owner[row + 1]) paintMarks();
  }
  paintMarks();
}

// Updates take no time: ticks at the top of their device's first lane.
const paintLater = [];
function paintMarks() {
  const { points, lines, fine } = size, across = size.image.width, edge = Math.round(fine);
  for (const row of paintLater.splice(0)) {
    scan(row, 0, []);
    const from = Math.round((tops[row] - view.scroll) * fine);
    const until = from + Math.round(fine * Math.min(MARK, 0.5 * view.tall));
    for (let y = Math.max(0, from); y < Math.min(size.image.height, until); y++)
      for (let x = 0; x < across; x++)
        if (lines[1][x]) points[y * across + x] = lines[1][x];
        else if (lines[1][x - edge] || lines[1][x + edge]) points[y * across + x] = look.ground; // seen on any colour
  }
}

// What is wide has its name and, if stale, the paper's slash.
function nameBars(wide) {
  for (let n = 0; n < wide.length; n += 2) {
    const [k, row] = [wide[n], wide[n + 1]], faint = lit && lit[k + 1] === lit[k];
    const left = Math.max(placeOf(start[k]), size.gutter), right = Math.min(placeOf(end[k]), size.width) - 1;
    const top = size.top + tops[row] - view.scroll, tall = tallness(row), slashed = k < tasks && stale[k];
    const text = k >= tasks ? kinds[kind[k]] : label(k);
    const named = tall >= 13 && right - left > 6.4 * text.length + (slashed ? 9 : 3);
    const colour = faint ? look.grey : look.texts[classes[k]];
    if (slashed && !faint && tall > 6) {
      const rise = Math.max(4, tall - 6), y = top + (tall - rise) / 2, lean = 0.35 * rise;
      const x = named ? right - lean - 1 : (left + right - lean) / 2;
      stroke(colour, 1.5, [x, y + rise], [x + lean, y]);
    }
    if (named) write(text, (left + right) / 2 - (slashed ? 4 : 0), top + tall / 2 + 0.5, { colour, align: "center" });
  }
}

// The bar under the pointer; the selected one, and what it waited for, and what that waited for; or critical paths.
function frame(k, colour, width) {
  const { left, right, top, bottom } = placeOfBar(k);
  paper.lineWidth = width, paper.strokeStyle = colour;
  paper.strokeRect(left - 1.5, top - 1.5, Math.max(right - left, 4) + 2, bottom - top + 3);
}
function placeOfBar(k) {
  const row = rowOf(k), top = size.top + tops[row] - view.scroll;
  return { left: placeOf(start[k]), right: placeOf(end[k]), top, bottom: top + (isMarks(row) ? MARK : tallness(row)) };
}

// From the end of each of these bars to the start of the next one; with points only where there is room for them.
function join(chain, paler) {
  const low = Math.max(1, reach(chain.ends, view.from, 0, chain.length));
  const high = reach(chain.ends, view.to, low, chain.length - 1), wide = size.across > 12 * (high - low);
  for (let n = low; n <= high && n < chain.length; n++) {
    const before = placeOfBar(chain[n - 1]), next = placeOfBar(chain[n]);
    const from = [before.right, (before.top + before.bottom) / 2], to = [next.left, (next.top + next.bottom) / 2];
    paper.globalAlpha = paler ? n / (chain.length - 1) : wide ? 1 : 0.5;
    stroke(look.ink, wide ? 1.5 : 1, from, to);
    if (wide) paper.beginPath(), paper.arc(...from, 2.5, 0, 7), paper.fillStyle = look.ink, paper.fill();
  }
  paper.globalAlpha = 1;
}

function outline(k) {
  if (pointed && pointed.bar >= 0) frame(pointed.bar, look.ink, 1);
  for (const { joined } of paths ?? []) join(joined, false);
  if (k < 0) return;
  if (!paths) join(chainTo(k, 5), true);
  frame(k, look.page, 4), frame(k, look.accent, 2);
}

function writeLanes() {
  rect(look.page, 0, size.top, size.gutter, size.bottom - size.top);
  const x = size.gutter - 8, most = size.gutter - 10, letters = size.narrow ? 9 : 17;
  let last = -99;
  for (let row = Math.max(0, reach(tops, view.scroll - 40, 0, rows) - 1); row < rows; row++) {
    const middle = size.top + tops[row] - view.scroll + tallness(row) / 2;
    if (middle > size.bottom - 5) break;
    if (isHead(row)) writeHead(row, (last = size.top + tops[row] - view.scroll - 9));
    const again = row && !isHead(row) && !isMarks(row - 1) && owner[row] === owner[row - 1];
    if (isMarks(row) || again || middle - last < 12 || middle < size.top + 5) continue;
    const device = size.narrow ? `${own(owner[row])}` : `device ${own(owner[row])}`;
    const text = row < deviceRows ? device : linkName(owner[row], size.narrow);
    write(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, x, middle, { colour: look.ink, most });
    last = middle;
  }
}

function writeHead(row, y) {
  const what = row < deviceRows ? [] : ["links"], whose = runs.length > 1 ? [runs[runOfRow(row)].name] : [];
  if (!whose.length) return write("links", size.gutter - 8, y);
  if (y > size.top) write([...what, ...whose].join(", "), 8, y, { align: "left", colour: look.ink, bold: true });
}

// Round numbers of time, not nearer than they can be read.
function ticks() {
  const least = ((view.to - view.from) / size.across) * (slots ? 46 : 64), power = 10 ** Math.floor(Math.log10(least));
  const apart = Math.max([1, 2, 5, 10].find((k) => k * power >= least * 0.999) * power, slots ? 1 : 0), result = [];
  const last = Math.min(view.to, whole * 1.0001);
  for (let k = Math.max(0, Math.ceil(view.from / apart)); k * apart <= last; k++) result.push(k * apart);
  return { apart, result };
}

function writeAxis() {
  const { apart, result } = ticks(), units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const large = ([one]) => Math.max(apart * 2, view.to / 50) >= one;
  const [scale, unit] = slots ? [1, "slot"] : units.find(large) ?? units[3];
  const digits = slots ? 0 : Math.max(0, Math.min(12, Math.ceil(-Math.log10(apart / scale) - 1e-9)));
  const y = size.overview + size.axis / 2;
  rect(look.page, 0, size.overview, size.width, size.axis);
  for (const time of result) {
    const x = Math.round(placeOf(time)), text = (time / scale).toFixed(digits), half = 3.3 * text.length;
    if (x >= size.gutter) rect(look.line, x, size.top - 5, 1, 5);
    if (x + half < size.width && x - half > size.gutter - 12) write(text, x, y, { align: "center" });
  }
  write(slots || size.narrow ? unit : `time, ${unit}`, size.gutter - 16, y);
}

function draw() {
  const began = performance.now(), wide = [];
  paintRows(wide);
  paper.setTransform(size.fine, 0, 0, size.fine, 0, 0);
  rect(look.page, 0, 0, size.width, size.height);
  paper.putImageData(size.image, Math.round(size.gutter * size.fine), Math.round(size.top * size.fine));
  paper.save(), paper.beginPath(), paper.rect(size.gutter, size.top, size.across, size.bottom - size.top), paper.clip();
  nameBars(wide), outline(selected), paper.restore();
  laidTracks().forEach(drawTrack), writeAxis(), writeLanes(), drawOverview(), drawRange();
  const shown = size.bottom - size.top, all = shown + overflow();
  paper.globalAlpha = 0.6;
  if (overflow())
    rect(look.grey, size.width - 5, size.top + (view.scroll / all) * shown, 4, Math.max(12, shown ** 2 / all));
  if (pointed) rect(look.grey, Math.round(pointed.x), size.top, 1, size.height - size.top);
  paper.globalAlpha = 1;
  placeTip(), saveSoon();
  frames.push(performance.now() - began), frames.splice(0, frames.length - 500);
}

function redraw() {
  if (!waiting) waiting = true, requestAnimationFrame(() => ((waiting = false), draw()));
}
