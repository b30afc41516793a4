// Curves: at each time the layers of a sum, the sum, and the place of the largest sum of each block of them.
const BLOCK = 64;
const SEAM = 0.5; // by which steps lie on each other: where points are fractions of pixels, gaps would show
function curve(time, layers) {
  const sum = new Float64Array(time.length), tops = [];
  for (const layer of layers) for (let k = 0; k < sum.length; k++) sum[k] += layer[k];
  for (let k = 0; k < sum.length; k += BLOCK) tops.push(largest(sum, k, Math.min(k + BLOCK, sum.length)));
  const found = { time, layers, sum, tops };
  return { ...found, peak: sum.length ? highest(found, 0, sum.length) : -1 };
}
function largest(sum, low, high) {
  for (var best = low++; low < high; low++) if (sum[low] > sum[best]) best = low;
  return best;
}
function highest({ sum, tops }, low, high) {
  const [from, to] = [Math.ceil(low / BLOCK), Math.floor(high / BLOCK)];
  if (from >= to) return largest(sum, low, high);
  let best = low;
  const better = (k) => { if (sum[k] > sum[best]) best = k; };
  if (low < from * BLOCK) better(largest(sum, low, from * BLOCK));
  for (let block = from; block < to; block++) better(tops[block]);
  if (to * BLOCK < high) better(largest(sum, to * BLOCK, high));
  return best;
}

// What a device holds; or, numbered on behind all devices, what a whole run does.
function memoryOf(device) {
  const many = facts.categories.length, { held_first, held_time, held_size, held_sizes } = data;
  const runs = facts.categories.map((_, c) => [held_first[device * many + c], held_first[device * many + c + 1]]);
  const moments = held_time.length ? new Uint32Array(runs.at(-1)[1] - runs[0][0]) : new Uint32Array(0);
  for (const [from, to] of runs)
    for (let k = from, at = 0; k < to; k++) moments[k - runs[0][0]] = at += held_time[k];
  const sorted = moments.slice().sort(), inOrder = new Uint32Array(sorted.length);
  let distinct = 0;
  for (let k = 0; k < sorted.length; k++) if (!k || sorted[k] !== sorted[k - 1]) inOrder[distinct++] = sorted[k];
  const layers = runs.map(([from, to]) => {
    const layer = new Float64Array(distinct);
    for (let n = 0, k = from - 1; n < distinct; n++) {
      while (k + 1 < to && moments[k + 1 - runs[0][0]] <= inOrder[n]) k++;
      if (k >= from) layer[n] = held_sizes[held_size[k]];
    }
    return layer;
  });
  return curve(new Float64Array(distinct).map((_, n) => times[inOrder[n]]), layers);
}

// The devices that send or receive what goes over a link.
function partners(link) {
  const from = data.link_src[link], to = data.link_dst[link], others = data.link_op[link] ? facts.groups[to] : [to];
  return from < 0 || others.includes(from) ? others : [from, ...others];
}
const touched = Array.from(data.link_op, (_, link) => new Set(partners(link)));
const touches = (link, device) => touched[link].has(device);

// Bytes per second on their way; where no message takes time, what goes at each moment.
const lasting = busy[bars] > busy[tasks];
function trafficOf(device) {
  const change = new Float64Array(times.length + 1);
  for (let row = deviceRows; row < rows; row++) {
    if (device < devices ? !touches(owner[row], device) : runOfRow(row) !== device - devices) continue;
    for (let k = first[row], at = 0; k < first[row + 1]; k++) {
      const from = (at += data.gap[k]), to = (at += data.length[k]), bytes = data.sizes[data.size[k - tasks]];
      if (!lasting) change[from] += bytes;
      else if (to > from) change[from] += bytes / (end[k] - start[k]), change[to] -= bytes / (end[k] - start[k]);
    }
  }
  const time = [], value = [];
  let rate = 0;
  for (let at = 0; at < times.length; at++) {
    if (!change[at]) continue;
    rate = lasting ? Math.max(0, rate + change[at]) : change[at];
    time.push(times[at]), value.push(rate < 1e-6 * Math.abs(change[at]) ? 0 : rate);
    if (!lasting) time.push(times[at]), value.push(0);
  }
  return curve(Float64Array.from(time), [Float64Array.from(value)]);
}

// How many of all lanes of devices work, over the whole run.
function shares() {
  const across = Math.max(1, Math.round(size.across)), change = new Float64Array(across + 2), each = whole / across;
  let lanes = 0;
  for (let row = 0; row < deviceRows; row++) lanes += !isMarks(row);
  for (let k = 0; k < tasks; k++) {
    const from = Math.min(start[k] / each, across - 1), until = Math.min(end[k] / each, across);
    const a = Math.floor(from), b = Math.floor(until);
    if (a === b) { change[a] += until - from, change[a + 1] -= until - from; continue; }
    change[a] += a + 1 - from, change[a + 1] += from - a, change[b] -= 1 - (until - b), change[b + 1] -= until - b;
  }
  let sum = 0;
  return change.subarray(0, across).map((one) => (sum += one) / lanes);
}

function drawOverview() {
  const tall = size.overview, x = (time) => size.gutter + (time / whole) * size.across;
  rect(look.page, 0, 0, size.width, tall);
  const thin = hexOf(blend(look.ground, packed(look.grey), 0.55)), high = tall - 5;
  share.forEach((part, k) => rect(thin, size.gutter + k, tall - 1 - part * high, 1 + SEAM, part * high));
  write(size.narrow ? "busy" : "devices busy", size.gutter - 8, tall / 2);
  const left = Math.max(size.gutter, x(view.from)), right = Math.min(size.width, x(view.to));
  paper.globalAlpha = 0.65;
  rect(look.page, size.gutter, 0, left - size.gutter, tall), rect(look.page, right, 0, size.width - right, tall);
  paper.globalAlpha = 1, paper.strokeStyle = look.accent, paper.lineWidth = 1.5;
  paper.strokeRect(left + 0.75, 1.5, Math.max(3, right - left - 1.5), tall - 3);
}

// For each point across, where on a curve the highest stands that falls on it; -1 where there is nothing.
function highestAcross(one) {
  const places = new Int32Array(Math.ceil(size.across)).fill(-1), many = one.sum.length;
  const each = (view.to - view.from) / size.across;
  for (let x = 0, k = reach(one.time, view.from, 0, many); x < places.length && view.from + x * each <= whole; x++) {
    const next = reach(one.time, view.from + (x + 1) * each, k, many), low = Math.max(0, k - 1);
    if (next > low) places[x] = highest(one, low, next);
    k = next;
  }
  return places;
}

const peakOf = (one) => (one.peak < 0 ? 0 : one.sum[one.peak]);

// A curve's layers on each other; each step is at least so wide. Tracks of one kind have one scale.
function drawTrack({ one, top, tall, most, colours, least, ...track }) {
  rect(look.page, 0, top - 8, size.width, tall + 8);
  rect(look.line, 0, top - 8, size.width, 1), rect(look.line, size.gutter, top + tall - 1, size.across, 1);
  for (const x of size.grid) rect(look.line, size.gutter + Math.round(x / size.fine), top - 7, 1, tall + 6);
  const peak = peakOf(one), places = peak ? highestAcross(one) : [];
  for (let x = 0, until; x < places.length; x = until) {
    for (until = x + 1; until < places.length && places[until] === places[x]; ) until++;
    for (let layer = 0, sum = 0; places[x] >= 0 && layer < colours.length; layer++) {
      const from = (sum / most) * (tall - 4), to = ((sum += one.layers[layer][places[x]]) / most) * (tall - 4);
      const wide = Math.max(least, until - x + SEAM);
      if (to > from) rect(look.hex[colours[layer]], size.gutter + x, top + tall - 1 - to, wide, to - from);
    }
  }
  labelTrack({ one, top, tall, peak, most, ...track });
}

function labelTrack({ one, top, tall, peak, most, title, unit, whose }) {
  const edge = size.gutter - 8, widest = size.gutter - 10, x = peak && placeOf(one.time[one.peak]);
  rect(look.page, 0, top, size.gutter, tall);
  write(title, edge, top + 8, { colour: look.ink });
  if (tall > 26) write(size.narrow ? whose.replace(" devices", "") : whose, edge, top + 22, { most: widest });
  if (!peak) return write("nothing", size.gutter + 8, top + tall / 2, { align: "left" });
  const high = slots ? (+peak.toFixed(2)).toLocaleString("en") : engineering(peak, unit, 3);
  if (tall > 40) write(size.narrow ? high : `peak ${high}`, edge, top + 36, { most: widest });
  const y = top + 3 + (1 - peak / most) * (tall - 4);
  paper.fillStyle = look.ink;
  paper.beginPath(), paper.moveTo(x, y), paper.lineTo(x - 4, y - 7), paper.lineTo(x + 4, y - 7);
  if (x >= size.gutter) paper.fill();
}

// All tracks with their places: of memory one for each run, then of traffic.
function laidTracks() {
  const blocks = [[memories, size.bottom + 8, size.memory], [traffics, size.height - size.traffic, size.traffic]];
  return blocks.flatMap(([list, top, tall]) => {
    const each = (tall + 8) / list.length, most = Math.max(...list.map(({ one }) => peakOf(one)));
    return tall ? list.map((track, run) => ({ ...track, most, top: top + run * each, tall: each - 8 })) : [];
  });
}

// Read the tracks of each run: of all its devices, or of the one that is watched, which not every run has.
function watchTracks() {
  const { device } = view, ofDevice = (run, r) => (device < run.devices ? fromDevice[r] + device : -1);
  const chosen = runs.map((run, r) => (device < 0 ? devices + r : ofDevice(run, r)));
  const whose = (r) => (runs.length > 1 ? runs[r].name : device < 0 ? "all devices" : `device ${device}`);
  const none = (layers) => curve([], layers.map(() => []));
  const { categories, categoryColours: colours } = facts;
  memories = chosen.map((at, r) => ({
    one: at < 0 ? none(categories) : memoryOf(at), colours, title: "memory", unit: "B", least: 1, whose: whose(r),
  }));
  traffics = chosen.map((at, r) => ({
    one: at < 0 ? none([0]) : trafficOf(at), colours: [GREY], title: lasting ? "traffic" : "sent",
    unit: lasting ? "B/s" : "B", least: 2, whose: whose(r),
  }));
}
