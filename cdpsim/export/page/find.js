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
  if (bar < 0) return row < deviceRows && time >= 0 && time <= whole ? aboutIdle(row, time) : null;
  const point = (view.to - view.from) / size.across;
  if (end[bar] - start[bar] >= point) return about(bar);
  const more = reach(start, end[bar] + point, bar, first[rowOf(bar) + 1]) - bar - 1;
  return more ? [...about(bar), `and ${more} more on this point`] : about(bar);
}

// What the tip says of the tracks.
function held(x, y) {
  const time = timeAt(x), track = y < size.bottom + 8 + size.memory ? memory : traffic;
  if (y < size.bottom || x < size.gutter || time > whole) return null;
  const next = reach(track.time, time, 0, track.time.length);
  const whose = view.device < devices ? `device ${view.device}` : "all devices";
  const place = `${whose}, ${slots ? "slot " : ""}${moment(time)}`;
  if (track === traffic && !traffic.lasting) {
    const stem = next - (next % 2); // each is followed by its end
    return stem < track.sum.length ? [`${amount(track.sum[stem])} sent at ${moment(track.time[stem])}`] : null;
  }
  if (!next) return null;
  if (track === traffic) return [`${engineering(track.sum[next - 1], "B/s")} on the way`, place];
  const layers = facts.categories.map((category, c) => `${category} ${amount(track.layers[c][next - 1])}`);
  return [`${amount(track.sum[next - 1])} held`, place, ...layers];
}

function lines(element, texts) {
  const line = (text, k) => Object.assign(document.createElement(k ? "span" : "b"), { textContent: text });
  element.replaceChildren(...texts.map(line));
}

function point(x, y) {
  const tip = by("tip"), here = x !== undefined, found = here ? under(x, y, 4) : null;
  pointed = here ? { x, bar: found ? found.bar : -1 } : null;
  const texts = found ? described(found) : here ? held(x, y) : null;
  tip.style.visibility = texts ? "visible" : "hidden";
  if (texts) {
    lines(tip, texts);
    const beside = (at, space, own) => Math.max(2, at + 16 + own < space ? at + 16 : at - 12 - own);
    const [left, top] = [beside(x, size.width, tip.offsetWidth), beside(y, size.height, tip.offsetHeight)];
    tip.style.transform = `translate(${left}px, ${top}px)`;
  }
  redraw();
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

// A word of a search: a function that says whether a bar, in its row, fits.
function fits(word) {
  const field = /^([tijdv])=(-?\d+)$/.exec(word.toLowerCase()), letter = kinds.indexOf(word.toUpperCase());
  if (field) {
    const column = { t: step, i: micro_batch, j: stage, v: version }[field[1]], number = Number(field[2]);
    if (column) return (k) => column[k] === number;
    return (k, row) => (row < deviceRows ? owner[row] === number : touches(owner[row], number));
  }
  if (letter >= 0) return (k) => kind[k] === letter;
  const part = word.toLowerCase().replaceAll(/[_-]/g, " ");
  if (part === "stale") return (k) => stale[k] === 1;
  const named = KIND_NAMES.map((text) => text.includes(part));
  const links = Array.from(data.link_op, (_, link) => linkName(link).replaceAll("-", " ").includes(part));
  return (k, row) => named[kind[k]] || (row >= deviceRows && links[owner[row]]);
}

// Words that must all fit.
function find(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map(fits);
  search = tests.length ? new Uint32Array(bars + 1) : null;
  for (let row = 0, k = 0; search && row < rows; row++)
    for (; k < first[row + 1]; k++) search[k + 1] = search[k] + (tests.every((test) => test(k, row)) ? 1 : 0);
  const none = Boolean(search && !search[bars]);
  by("count").textContent = search ? count(search[bars], "hit") : "";
  by("query").setAttribute("aria-invalid", String(none));
  by("previous").hidden = by("next").hidden = !search || none;
  redraw();
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
