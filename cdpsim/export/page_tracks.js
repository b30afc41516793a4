// Curves: at each time the layers of a sum, the sum, and the place of the largest sum of each block of them.
const BLOCK = 64;
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

const touches = (link, device) => data.link_op[link] ? data.link_src[link] === device || members[data.link_dst[link]].has(device)
  : data.link_src[link] === device || data.link_dst[link] === device;

// Bytes per second on their way; where no message takes time, what goes at each moment.
function trafficOf(device) {
  const lasting = busy[bars] > busy[tasks], change = new Float64Array(times.length + 1);
  for (let row = deviceRows; row < rows; row++) {
    if (device < devices && !touches(owner[row], device)) continue;
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
  return { ...curve(Float64Array.from(time), [Float64Array.from(value)]), lasting };
}

// How many of all lanes of devices work, over the whole run.
function shares() {
  const across = Math.max(1, Math.round(size.across)), change = new Float64Array(across + 2), each = whole / across;
  let lanes = 0;
  for (let row = 0; row < deviceRows; row++) lanes += !isMarks(row);
  for (let k = 0; k < tasks; k++) {
    const from = Math.min(start[k] / each, across - 1), until = Math.min(end[k] / each, across), a = Math.floor(from), b = Math.floor(until);
    if (a === b) { change[a] += until - from, change[a + 1] -= until - from; continue; }
    change[a] += a + 1 - from, change[a + 1] += from - a, change[b] -= 1 - (until - b), change[b + 1] -= until - b;
  }
  let sum = 0;
  return change.subarray(0, across).map((one) => (sum += one) / lanes);
}

function drawOverview() {
  const tall = size.overview, x = (time) => size.gutter + (time / whole) * size.across;
  paper.fillStyle = look.page, paper.fillRect(0, 0, size.width, tall);
  paper.fillStyle = look.grey, paper.globalAlpha = 0.55;
  share.forEach((part, k) => paper.fillRect(size.gutter + k, tall - 1 - part * (tall - 5), 1, part * (tall - 5)));
  paper.globalAlpha = 1, paper.font = "11px system-ui, sans-serif", paper.textAlign = "right", paper.textBaseline = "middle";
  paper.fillText(size.narrow ? "busy" : "devices busy", size.gutter - 8, tall / 2);
  const left = Math.max(size.gutter, x(view.from)), right = Math.min(size.width, x(view.to));
  paper.fillStyle = look.page, paper.globalAlpha = 0.65;
  paper.fillRect(size.gutter, 0, left - size.gutter, tall), paper.fillRect(right, 0, size.width - right, tall);
  paper.globalAlpha = 1, paper.strokeStyle = look.accent, paper.lineWidth = 1.5;
  paper.strokeRect(left + 0.75, 1.5, Math.max(3, right - left - 1.5), tall - 3);
}

// A curve's layers on each other, at each point the highest that falls on it.
function drawTrack(one, colours, top, tall, title, peak, least = 0) {
  paper.fillStyle = look.page, paper.fillRect(0, top - 8, size.width, tall + 8);
  paper.fillStyle = look.line, paper.fillRect(0, top - 8, size.width, 1), paper.fillRect(size.gutter, top + tall - 1, size.across, 1);
  const most = one.peak < 0 ? 0 : one.sum[one.peak], whoAt = new Int32Array(Math.ceil(size.across));
  const each = (view.to - view.from) / size.across, many = one.sum.length;
  for (let x = 0, k = reach(one.time, view.from, 0, many); most && x < whoAt.length; x++) {
    const next = reach(one.time, view.from + (x + 1) * each, k, many), low = Math.max(0, k - 1);
    whoAt[x] = view.from + x * each > whole || next === low ? -1 : highest(one, low, next), k = next;
  }
  paper.fillStyle = look.line;
  for (const x of size.grid) paper.fillRect(size.gutter + Math.round(x / size.fine), top - 7, 1, tall + 6);
  for (let x = 0, until; most && x < whoAt.length; x = until) {
    for (until = x + 1; until < whoAt.length && whoAt[until] === whoAt[x]; ) until++;
    for (let layer = 0, below = 0; whoAt[x] >= 0 && layer < colours.length; layer++) {
      const from = (below / most) * (tall - 4), to = ((below += one.layers[layer][whoAt[x]]) / most) * (tall - 4);
      paper.fillStyle = look.hex[colours[layer]];
      if (to > from) paper.fillRect(size.gutter + x, top + tall - 1 - to, Math.max(least, until - x), to - from);
    }
  }
  paper.fillStyle = look.page, paper.fillRect(0, top, size.gutter, tall);
  paper.font = "11px system-ui, sans-serif", paper.textAlign = "right", paper.textBaseline = "middle", paper.fillStyle = look.ink;
  paper.fillText(title, size.gutter - 8, top + 8, size.gutter - 10);
  paper.fillStyle = look.grey, paper.fillText(view.device < devices ? `device ${view.device}` : size.narrow ? "all" : "all devices", size.gutter - 8, top + 22, size.gutter - 10);
  if (!most) return paper.textAlign = "left", paper.fillText("nothing", size.gutter + 8, top + tall / 2);
  if (tall > 40) paper.fillText(`${size.narrow ? "" : "peak "}${peak(most)}`, size.gutter - 8, top + 36, size.gutter - 10);
  const x = placeOf(one.time[one.peak]);
  paper.fillStyle = look.ink, paper.beginPath(), paper.moveTo(x, top + 3), paper.lineTo(x - 4, top - 4), paper.lineTo(x + 4, top - 4);
  if (x >= size.gutter) paper.fill();
}

function drawTracks() {
  const { memory: tall, traffic: low, height } = size, rate = traffic.lasting ? "B/s" : "B";
  const written = (unit) => (value) => (slots ? (+value.toFixed(2)).toLocaleString("en") : engineering(value, unit, 3));
  drawTrack(memory, facts.categoryColours, size.bottom + 8, tall, "memory", written("B"));
  if (low) drawTrack(traffic, [GREY], height - low, low, traffic.lasting ? "traffic" : "sent", written(rate), 2);
}
