// What is shown, as the address's end (#...): what differs from a page just opened.
let saving;
function toHash() {
  const said = new URLSearchParams(), number = (value) => +value.toPrecision(12);
  if (view.to - view.from < 1.0399 * whole) said.set("view", `${number(view.from)}..${number(view.to)}`);
  if (range) said.set("range", range.map(number).join(".."));
  if (selected >= 0) said.set("bar", selected);
  if (paths) said.set("path", "critical");
  if (view.colouring !== "micro-batch") said.set("colour", view.colouring);
  if (view.device >= 0) said.set("device", view.device);
  if (search) said.set("find", by("query").value);
  return said.toString();
}

// Browsers refuse many changes of the address in a short time.
function saveSoon() {
  clearTimeout(saving);
  saving = setTimeout(() => {
    const hash = toHash();
    const address = hash ? `#${hash}` : location.href.split("#")[0];
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", address);
  }, 200);
}

// Show what the address says; what it says wrongly is left out.
function restore() {
  const said = new URLSearchParams(location.hash.slice(1));
  const most = { bar: bars, device: Math.max(...runs.map((run) => run.devices)) };
  const numbered = (name) => {
    const number = /^\d+$/.test(said.get(name)) ? Number(said.get(name)) : -1;
    return number < most[name] ? number : -1;
  };
  const ends = (name) => {
    const pair = (said.get(name) ?? "").split("..").map(Number);
    return pair.length === 2 && pair[0] < pair[1] ? pair : null;
  };
  const colouring = Object.hasOwn(COLOURINGS, said.get("colour")) ? said.get("colour") : "micro-batch";
  by("colour").value = colouring, by("query").value = said.get("find") ?? "";
  if (colouring !== view.colouring) recolour(colouring);
  if (numbered("device") !== view.device) watch(numbered("device"));
  find(by("query").value);
  fit(), select(numbered("bar"), true);
  if (ends("view")) show(...ends("view"));
  take(...(ends("range") ?? [0, 0])), trace(said.has("path"));
}

fit(), restore();
window.addEventListener("hashchange", restore);
