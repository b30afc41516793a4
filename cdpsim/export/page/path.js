// Critical paths: what decides when a bar, or a whole run, ends.
let paths = null; // chains of bars

const known = (run) => data.run_ends[run] >= 0; // what waits for what in it

// A bar, what it waited for that ended last, what that waited for, and so on: the earliest first.
function chainTo(k, most = Infinity) {
  const chain = [];
  for (; k >= 0 && chain.length < most; k = lastBefore(k)) chain.push(k);
  return withEnds(chain.reverse());
}
const withEnds = (chain) => Object.assign(chain, { ends: Float64Array.from(chain, (one) => end[one]) });

// How long a chain takes, kind by kind; between two of its bars the later one is not due yet, or has no stream.
function lengths(chain) {
  const result = new Map();
  const add = (what, time) => time && result.set(what, (result.get(what) ?? 0) + time);
  chain.forEach((k) => add(KIND_NAMES[kind[k]], end[k] - start[k]));
  chain.forEach((k, n) => add("waiting", start[k] - (n ? chain.ends[n - 1] : 0)));
  return result;
}

function aboutPath(chain) {
  const last = chain.at(-1), run = runOfRow(rowOf(last));
  const whose = selected >= 0 ? name(last) : runs.length > 1 ? runs[run].name : "the run";
  const parts = [...lengths(chain)].map(([what, time]) => `${what} ${duration(time)}`);
  return `Critical path of ${whose}: ${duration(end[last])} = ${parts.join(" + ")}`;
}

// Show the path of the selected bar, or of each run; or none.
function trace(on) {
  const targets = (selected >= 0 ? [selected] : [...data.run_ends]).filter((k) => k >= 0 && known(runOfRow(rowOf(k))));
  paths = on && targets.length ? targets.map((k) => chainTo(k)) : null;
  for (const chain of paths ?? []) chain.joined = withEnds(chain.filter((k) => k < tasks)); // links are far away
  by("path").setAttribute("aria-pressed", String(Boolean(paths)));
  by("lengths").hidden = !paths;
  if (paths) {
    by("lengths").replaceChildren(...paths.map((chain) => element("div", aboutPath(chain))));
    by("spoken").textContent = paths.map(aboutPath).join(". ");
  }
  relight();
}

// What stands out: critical paths, else what a search finds.
function relight() {
  const among = paths && new Set(paths.flat());
  lit = paths ? countBefore((k) => among.has(k)) : search;
  redraw();
}
