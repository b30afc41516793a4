"""The HTML file in a real browser, offline: its picture, texts and actions, and no error in the console."""

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from cdpsim import Cluster, Model, Stage, simulate, trace
from cdpsim.cluster import Devices, Link
from cdpsim.draw import palette
from cdpsim.export.page import page
from cdpsim.program import Content, Kind
from cdpsim.schedules import TABLE_1
from cdpsim.trace import TABLES, Trace
from tests.conditions import need
from tests.helpers.hostile_names import HOSTILE_NAME
from tests.helpers.made_traces import changed, some_rows
from tests.helpers.strategies import fitting

SIZES: dict[str, Any] = {"activation": 10**9, "boundary": 10**8, "parameters": 10**8, "optimizer": 7}
FOUR = tuple(Stage(forward=0.01 + 0.003 * k, backward=0.02, weight_backward=0.01, **SIZES) for k in range(4))
MODEL = Model(name="toy", stages=FOUR[:3])
BOX = Cluster(name="box", devices=(Devices(),), link=Link(latency=5e-6, bandwidth=1e11))
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests; where there is none they are skipped, but not where others judge by them."""
    chromium = shutil.which("chromium")
    need(chromium and find_spec("playwright"), "chromium and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


Opener = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Open the page of a run from disk; at the end the browser must have logged no error and loaded no other file."""
    tabs: list[Any] = []
    complaints: list[str] = []
    asked: list[str] = []

    def open_page(*runs: Trace, address: str = "", **options: Any) -> Any:
        file = tmp_path / f"{len(tabs)}.html"
        file.write_bytes(b"".join(page(*runs)))
        tab = browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options)
        tabs.append(tab)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri() + address)
        tab.wait_for_selector("html[data-drawn]", timeout=20_000)
        return tab

    yield open_page
    for tab in tabs:
        tab.close()
    assert complaints == []
    assert len(asked) == len(tabs)


def settled(tab: Any) -> None:
    """Wait until what was asked for is drawn."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def view(tab: Any) -> dict[str, Any]:
    settled(tab)
    result: dict[str, Any] = tab.evaluate("cdpsim.view")
    return result


def span(tab: Any) -> float:
    now = view(tab)
    return float(now["to"] - now["from"])


def places(tab: Any, chosen: list[int]) -> list[dict[str, float]]:
    """The edges of bars in the window."""
    result: list[dict[str, float]] = tab.evaluate(
        """(bars) => {
          const { x, y } = document.querySelector("canvas").getBoundingClientRect();
          const place = (bar) => Object.entries(cdpsim.place(bar));
          const inWindow = ([name, value]) => [name, value + (name === "left" || name === "right" ? x : y)];
          return bars.map((bar) => Object.fromEntries(place(bar).map(inWindow)));
        }""",
        chosen,
    )
    return result


def place(tab: Any, bar: int) -> dict[str, float]:
    return places(tab, [bar])[0]


def bars(tab: Any) -> dict[str, list[int]]:
    """The bars by their names."""
    result: dict[str, list[int]] = {}
    for k, name in enumerate(tab.evaluate("Array.from({ length: cdpsim.bars }, (_, k) => cdpsim.name(k))")):
        result.setdefault(name, []).append(k)
    return result


def picture(tab: Any) -> np.ndarray:
    """Return the pixels on the screen, by rows and columns."""
    settled(tab)
    return (imread(BytesIO(tab.screenshot()), "png")[..., :3] * 255).round().astype(np.uint8)


def pixel(seen: np.ndarray, x: float, y: float) -> str:
    red, green, blue = seen[int(y), int(x)].tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


def inside(tab: Any, bar: int, share: float = 0.3) -> str:
    """The colour of a bar, beside its name, at a share of its height."""
    return insides(tab, [bar], share)[0]


def insides(tab: Any, chosen: list[int], share: float = 0.3) -> list[str]:
    seen = picture(tab)
    return [pixel(seen, e["left"] + 3, e["top"] + share * (e["bottom"] - e["top"])) for e in places(tab, chosen)]


def tip_at(tab: Any, x: float, y: float) -> list[str]:
    tab.mouse.move(x, y)
    settled(tab)
    if tab.evaluate("document.getElementById('tip').style.visibility") != "visible":
        return []
    lines: list[str] = tab.evaluate("[...document.getElementById('tip').children].map((line) => line.textContent)")
    return lines


def window_x(tab: Any, time: float) -> float:
    """Where a time stands, from the edges of the view alone."""
    now, area = view(tab), tab.evaluate("cdpsim.area")
    share = (time - now["from"]) / (now["to"] - now["from"])
    return float(tab.locator("canvas").bounding_box()["x"] + area["left"] + share * (area["right"] - area["left"]))


def key(tab: Any, *names: str) -> None:
    for name in names:
        tab.keyboard.press(name)


def test_every_kind_of_schedule_opens(opened: Opener) -> None:
    """Under unit costs and real ones in turn."""
    for k, name in enumerate((*TABLE_1, "interleaved-1f1b", "zb-h1", "dualpipev", "chimera", "pipedream")):
        wanted = fitting(name, 3)
        costs = {} if k % 2 else {"model": Model(name="toy", stages=FOUR[: wanted["n"]]), "cluster": BOX}
        run = simulate(**wanted | costs)
        tab = opened(run)
        assert tab.evaluate("cdpsim.bars") == len(run.tasks["start"]) + len(run.messages["start"])
        assert tab.title().startswith(f"{name}, n = {wanted['n']}")
        assert f"{len(run.tasks['start'])} tasks" in tab.locator("#metrics").inner_text()


def test_a_loaded_trace_opens(opened: Opener, tmp_path: Path) -> None:
    simulate("zero-dp", model=MODEL, cluster=BOX).save(tmp_path / "traces")
    tab = opened(trace.load(tmp_path / "traces"))
    tab.focus("canvas")
    key(tab, "Enter")
    assert tab.locator("#about b").inner_text() == "0F0, step 0"
    assert not tab.locator("#blocker").is_visible()


def test_one_task_and_nothing_else(opened: Opener) -> None:
    run = simulate("single-dp", 1, steps=1)
    kept = {name: some_rows(getattr(run, name), slice(name == "tasks")) for name in TABLES}
    tab = opened(changed(run, **kept))
    assert inside(tab, 0) == palette.colour(0)
    tab.focus("canvas")
    key(tab, "Enter", "Tab", "w", "n", "m", "p", "ArrowDown", "]", "0", "Escape")
    assert span(tab) == pytest.approx(1.04)


def test_wheel_and_keys_change_what_is_visible(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 4))
    whole = view(tab)
    x = window_x(tab, 10)
    tab.mouse.move(x, 200)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -60)
    tab.keyboard.up("Control")
    assert span(tab) < 0.7 * (whole["to"] - whole["from"])
    assert window_x(tab, 10) == pytest.approx(x, abs=1)  # what is under the pointer stays there
    for closer, further in (("w", "s"), ("+", "-")):
        before = span(tab)
        key(tab, closer)
        assert span(tab) == pytest.approx(0.7 * before)
        key(tab, further)
        assert span(tab) == pytest.approx(before)
    for later, earlier in (("d", "a"), ("ArrowRight", "ArrowLeft")):
        before = view(tab)["from"]
        key(tab, later)
        assert view(tab)["from"] > before
        key(tab, earlier)
        assert view(tab)["from"] == pytest.approx(before)
    tab.keyboard.down("Shift")
    tab.mouse.wheel(0, 100)
    tab.keyboard.up("Shift")
    assert view(tab)["from"] > before
    key(tab, "0")
    assert view(tab) == whole
    tab.locator("#in").click()
    assert span(tab) < whole["to"] - whole["from"]
    tab.mouse.dblclick(x, 200)
    assert view(tab)["to"] == whole["to"]


def test_nobody_gets_lost(opened: Opener) -> None:
    """Neither beyond the ends of the run, nor in less than a slot."""
    tab = opened(simulate("multi-cdp", 4))
    key(tab, *["w"] * 30)
    assert span(tab) == 1
    key(tab, *["d"] * 200)
    assert 29 < view(tab)["to"] < 31.5
    key(tab, *["s"] * 40)
    assert span(tab) <= 1.04 * 30 + 1e-9


def test_the_wheel_scrolls_lanes_that_do_not_fit(opened: Opener) -> None:
    tab = opened(simulate("mp-dp", 8))
    before = view(tab)
    tab.mouse.move(700, 300)
    tab.mouse.wheel(0, 200)
    after = view(tab)
    assert (after["scroll"], after["from"]) == (200, before["from"])
    tab.mouse.wheel(0, 10**6)
    assert tab.evaluate("cdpsim.place(cdpsim.bars - 1).bottom") < tab.evaluate("cdpsim.area.memory")


def test_dragging(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 4))
    key(tab, "w", "w")
    x = window_x(tab, 12)
    tab.mouse.move(x, 200)
    tab.mouse.down()
    tab.mouse.move(x - 90, 200, steps=3)
    tab.mouse.up()
    assert window_x(tab, 12) == pytest.approx(x - 90, abs=1)
    box = tab.locator("canvas").bounding_box()
    tab.mouse.click(box["x"] + box["width"] - 5, box["y"] + 10)  # the end of the overview
    assert view(tab)["to"] > 30


@pytest.mark.parametrize("costs", ["unit", "real"])
def test_hovering_tells_the_task(costs: str, opened: Opener) -> None:
    """At the middle of each task of a device, found by its time and its lane."""
    run = simulate("multi-cdp", 3) if costs == "unit" else simulate("multi-cdp", model=MODEL, cluster=BOX)
    tab = opened(run)
    told = tab.evaluate("Array.from({ length: cdpsim.tasks }, (_, k) => cdpsim.about(k))")
    lanes = {tuple(lines[:2]): k for k, lines in enumerate(told)}
    for row in np.flatnonzero(run.tasks["kind"] != "U").tolist()[::5]:
        task = {column: values[row] for column, values in run.tasks.items()}
        name = f"{task['stage']}{task['kind']}{task['micro_batch']}, step {task['step']}"
        lane = place(tab, lanes[name, f"device {task['device']}"])
        lines = tip_at(tab, window_x(tab, (task["start"] + task["end"]) / 2), (lane["top"] + lane["bottom"]) / 2)
        assert lines[:2] == [name, f"device {task['device']}"]
        if costs == "unit":
            assert lines[2] == f"slot {task['start']} to {task['end']}, 1 slot"
        reads = "stale: a newer one exists" if task["stale"] else "the newest"
        assert lines[3] == f"reads version {task['version']}, {reads}"


def test_hovering_tells_updates_idle_times_and_messages(opened: Opener) -> None:
    run = simulate("pp-cdp", 2)  # F(0,0,0) at 0 on device 0, whose B is at 3; F(0,0,1) and B(0,0,1) at 1 and 2
    tab = opened(run)
    known = bars(tab)
    lane = place(tab, known["0F0, step 0"][0])
    middle = (lane["top"] + lane["bottom"]) / 2
    idle = tip_at(tab, window_x(tab, 1.5), middle)
    assert idle == [
        "device 0 idle",
        "slot 1 to 2, 1 slot",
        "next 0F1, step 0",
    ]
    update = known["1U, step 0"][0]
    edges = place(tab, update)
    assert tip_at(tab, edges["left"] + 1, edges["top"] + 2)[:3] == ["1U, step 0", "device 1", "slot at 5"]
    message = place(tab, known["activation 0F0, step 0"][0])
    lines = tip_at(tab, message["left"], (message["top"] + message["bottom"]) / 2)
    assert lines == [
        "activation 0F0, step 0",
        "p2p, device 0 to 1",
        "1 stage's worth in 1 round",
        "slot at 1",
        "waited for 0F0, step 0",
    ]
    assert tip_at(tab, 5, middle) == []


def test_updates_are_marks_of_full_strength(opened: Opener) -> None:
    """At all fractions of seconds."""
    run = simulate("zero-dp", model=MODEL, cluster=BOX)
    tab = opened(run)
    marks = [k for name, some in bars(tab).items() if re.match(r"\d+U", name) for k in some]
    assert len(marks) == (run.tasks["kind"] == "U").sum()
    seen = picture(tab)
    assert (
        len({pixel(seen, edges["left"], edges["top"] + 2) for edges in places(tab, marks)} - set(palette.COLOURS)) == 1
    )


def test_idle_says_who_is_waited_for(opened: Opener) -> None:
    tab = opened(simulate("zero-dp", model=MODEL, cluster=BOX))
    lane = place(tab, bars(tab)["0F0, step 0"][0])
    lines = tip_at(tab, window_x(tab, 1e-4), (lane["top"] + lane["bottom"]) / 2)
    assert lines[0] == "device 0 idle"
    assert lines[2:] == ["next 0F0, step 0", "which waits for parameters of stage 0, step -1"]


def test_collectives_have_lanes_of_their_own(opened: Opener) -> None:
    run = simulate("multi-dp", model=MODEL, cluster=BOX)
    tab = opened(run)
    last = place(tab, tab.evaluate("cdpsim.bars - 1"))
    lines = tip_at(tab, (last["left"] + last["right"]) / 2, (last["top"] + last["bottom"]) / 2)
    assert re.fullmatch(r"gradient of stage \d, step 2", lines[0])
    assert lines[1:3] == ["all-reduce 0–2", "100 MB in 3 rounds"]


def to(messages: Any, device: int) -> Any:
    return messages["dst"].astype(str) == str(device)


def at(tasks: Any, stage: int, micro_batch: int) -> Any:
    return (tasks["stage"] == stage) & (tasks["micro_batch"] == micro_batch)


QUERIES: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "i=1": lambda t, m: (t["micro_batch"] == 1, m["micro_batch"] == 1),
    "j=2": lambda t, m: (t["stage"] == 2, m["stage"] == 2),
    "t=1": lambda t, m: (t["step"] == 1, m["step"] == 1),
    "d=0": lambda t, m: (t["device"] == 0, (m["src"] == 0) | to(m, 0)),
    "v=2": lambda t, m: (t["version"] == 2, m["step"] == -9),
    "F": lambda t, m: (t["kind"] == "F", m["step"] == -9),
    "b i=0": lambda t, m: ((t["kind"] == "B") & (t["micro_batch"] == 0), m["step"] == -9),
    "stale": lambda t, m: (t["stale"] == 1, m["step"] == -9),
    "gradient": lambda t, m: (t["stage"] == -9, m["content"] == "gradient"),
    "param d=2": lambda t, m: (
        t["stage"] == -9,
        (m["content"] == "parameters") & ((m["src"] == 2) | to(m, 2)),
    ),
    "1F3": lambda t, m: (at(t, 1, 3) & (t["kind"] == "F"), m["step"] == -9),
    "2b": lambda t, m: ((t["stage"] == 2) & (t["kind"] == "B"), m["step"] == -9),
    "3U": lambda t, m: ((t["stage"] == 3) & (t["kind"] == "U"), m["step"] == -9),
    "0I1": lambda t, m: (at(t, 0, 1) & (t["kind"] == "B"), m["step"] == -9),
    "device 3": lambda t, m: (t["device"] == 3, (m["src"] == 3) | to(m, 3)),
    "step 1": lambda t, m: (t["step"] == 1, m["step"] == 1),
    "stage 1, step 0": lambda t, m: ((t["stage"] == 1) & (t["step"] == 0), (m["stage"] == 1) & (m["step"] == 0)),
    "micro-batch 2 F": lambda t, m: ((t["micro_batch"] == 2) & (t["kind"] == "F"), m["step"] == -9),
    "version 1": lambda t, m: (t["version"] == 1, m["step"] == -9),
    "slot 5": lambda t, m: (
        (t["start"] <= 5) & ((t["end"] > 5) | ((t["end"] == 5) & (t["start"] == 5))),
        m["start"] == 5,
    ),
    "1 → 2": lambda t, m: (t["stage"] == -9, (m["src"] == 1) & to(m, 2)),
    "1->2 gradient of stage 1": lambda t, m: (
        t["stage"] == -9,
        (m["src"] == 1) & to(m, 2) & (m["content"] == "gradient") & (m["stage"] == 1),
    ),
    "nonsense": lambda t, m: (t["stage"] == -9, m["step"] == -9),
}


@pytest.fixture(scope="module")
def searched() -> Trace:
    return simulate("multi-cdp", 4)


def test_search_finds_exactly_what_there_is(searched: Trace, opened: Opener) -> None:
    tab = opened(searched)
    for query, wanted in QUERIES.items():
        tab.fill("#query", query)
        tasks, messages = wanted(searched.tasks, searched.messages)
        expected = int(tasks.sum()) + int(messages.sum())
        assert tab.evaluate("cdpsim.hits") == expected, query
        assert tab.locator("#count").inner_text() == f"{expected} hit{'s' * (expected != 1)}"
        assert tab.locator("#query").get_attribute("aria-invalid") == str(expected == 0).lower()
    tab.fill("#query", "")
    assert tab.evaluate("cdpsim.hits") is None


@pytest.mark.parametrize("name", ["pp-cdp", "zero-dp", "mp-dp", "zb-h1"])
def test_a_name_that_is_shown_finds_what_bears_it(name: str, opened: Opener) -> None:
    """And the message whose name ends with that of the task that made it."""
    tab = opened(simulate(name, 3, model=MODEL, cluster=BOX))
    known = bars(tab)
    for shown in list(known)[::7]:
        tab.fill("#query", shown)
        expected = sum(len(some) for other, some in known.items() if f" {other}".endswith(f" {shown}"))
        assert tab.evaluate("cdpsim.hits") == expected, shown


def test_hits_stand_out_and_one_leads_to_the_next(searched: Trace, opened: Opener) -> None:
    tab = opened(searched)
    key(tab, "/")
    tab.keyboard.type("i=1 B")
    known = bars(tab)
    hits = {k for name, some in known.items() if re.match(r"\dB1,", name) for k in some}
    tasks = [k for name, some in known.items() if re.match(r"\d[FB]", name) for k in some]
    assert [colour in palette.COLOURS for colour in insides(tab, tasks)] == [k in hits for k in tasks]
    key(tab, "Enter", "Escape")
    found = [tab.evaluate("cdpsim.selected")]
    for _ in range(len(hits)):
        key(tab, "n")
        found.append(tab.evaluate("cdpsim.selected"))
    assert set(found) == hits
    assert found[0] == found[-1]  # once around
    times = [edges["left"] for edges in places(tab, found[:-1])]
    assert times == sorted(times)
    key(tab, "N")
    assert tab.evaluate("cdpsim.selected") == found[-2]
    key(tab, "Escape", "Escape")
    assert tab.input_value("#query") == ""
    assert set(insides(tab, tasks)) <= set(palette.COLOURS)


def test_a_hit_is_seen_among_a_thousand(opened: Opener) -> None:
    """Where many bars fall on one point, the one that was searched for has its own colour."""
    run = simulate("single-dp", 2, steps=4000)
    tab = opened(run)
    tab.fill("#query", "t=2000 i=1 F j=1")
    assert tab.evaluate("cdpsim.hits") == 1
    hit = tab.evaluate(
        "Array.from({ length: cdpsim.bars }, (_, k) => k).find((k) => cdpsim.name(k) === '1F1, step 2000')"
    )
    edges = place(tab, hit)
    assert edges["right"] - edges["left"] < 0.2
    seen = picture(tab)
    assert pixel(seen, edges["left"], edges["top"] + 9) == palette.colour(1)
    assert pixel(seen, edges["left"] - 30, edges["top"] + 9) not in palette.COLOURS


def test_colourings(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 4))
    known = bars(tab)
    names = ("3B1, step 1", "gradient of stage 1, step 0", "0F0, step 1", "3F3, step 1")
    chosen = places(tab, [known[name][0] for name in names])
    (first, second, _, fourth), grey = palette.COLOURS[:4], None
    expected = {
        "micro-batch": [second, grey, first, fourth],
        "stage": [fourth, second, first, fourth],
        "kind": [
            palette.KIND_COLOURS[Kind.B],
            palette.CONTENT_COLOURS[Content.GRADIENT],
            palette.KIND_COLOURS[Kind.F],
            palette.KIND_COLOURS[Kind.F],
        ],
        "staleness": [first, grey, second, first],
    }
    for colouring, colours in expected.items():
        tab.select_option("#colour", colouring)
        seen = picture(tab)
        found = [pixel(seen, e["left"] + (3 if e["right"] > e["left"] else 0.6), e["top"] + 9) for e in chosen]
        assert [colour if colour in palette.COLOURS else None for colour in found] == colours
        assert tab.locator("#legend b").first.inner_text() == colouring


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_kinds_differ_in_more_than_colour(scheme: str, opened: Opener) -> None:
    """Backwards have a band at their foot; weight gradients, of schedules that split them off, at their head."""
    run = simulate("multi-cdp", 3)
    kinds = run.tasks["kind"].copy()
    kinds[np.flatnonzero(kinds == "B")[0]] = "W"
    tab = opened(changed(run, tasks={**run.tasks, "kind": kinds}), color_scheme=scheme)
    known = bars(tab)
    for kind, banded in {"F": [], "B": [0.93], "W": [0.07]}.items():
        bar = next(some[0] for name, some in known.items() if re.match(rf"\d{kind}0,", name))
        body = inside(tab, bar)
        assert body == palette.colour(0)
        assert [share for share in (0.07, 0.93) if inside(tab, bar, share) != body] == banded


def test_keyboard_and_what_is_spoken(opened: Opener) -> None:
    run = simulate("pp-cdp", 3)
    tab = opened(run)
    canvas = tab.locator("canvas")
    assert canvas.get_attribute("role") == "application"
    assert "pp-cdp, n = 3" in (canvas.get_attribute("aria-label") or "")
    tab.focus("canvas")
    key(tab, "Enter")
    spoken = tab.locator("#spoken")
    assert spoken.inner_text().startswith("0F0, step 0, device 0, slot 0 to 1")
    key(tab, "Tab")
    assert spoken.inner_text().startswith("0F1, step 0, device 0, slot 2 to 3")
    key(tab, "Shift+Tab", "ArrowDown")
    assert spoken.inner_text().startswith("1F0, step 0, device 1")
    key(tab, "p")
    assert spoken.inner_text().startswith("activation 0F0, step 0, p2p, device 0 to 1")
    tab.locator("#blocker").click()
    assert spoken.inner_text().startswith("0F0, step 0")
    tab.focus("canvas")
    key(tab, "Escape", "Tab")  # nothing is selected: on to what comes after
    assert tab.evaluate("document.activeElement.id") != "timeline"
    assert tab.evaluate("cdpsim.selected") == -1
    key(tab, "?")
    assert tab.locator("dialog").is_visible()


def amounts(run: Trace, device: int | None, time: float) -> dict[str, float]:
    """Return the bytes held at a time, straight from the memory table."""
    held: dict[str, float] = {}
    for one in range(1 + int(run.memory["device"].max())):
        for category in np.unique(run.memory["category"]).tolist():
            rows = (run.memory["device"] == one) & (run.memory["category"] == category) & (run.memory["time"] <= time)
            if device in (None, one) and rows.any():
                held[category] = held.get(category, 0) + int(run.memory["size"][rows][-1])
    return held


def test_memory_of_all_devices_and_of_one(opened: Opener) -> None:
    run = simulate("multi-cdp", 3)
    tab = opened(run)
    for device in (None, 2):
        if device is not None:
            tab.select_option("#device", str(device))
        box, area = tab.locator("canvas").bounding_box(), tab.evaluate("cdpsim.area")
        for slot in (0, 3, 7, 12):
            lines = tip_at(tab, window_x(tab, slot + 0.5), box["y"] + area["memory"] + 20)
            held = amounts(run, device, slot + 0.5)
            said = {words.split()[0]: float(words.split()[1]) for words in lines[2:]}
            assert said == {"optimizer": 0, "communication": 0, "gradients": 0, "activations": 0} | held
            assert float(lines[0].split()[0]) == sum(held.values())


def test_traffic(opened: Opener) -> None:
    """Under unit costs what goes at each moment; else how fast it goes."""
    run = simulate("multi-cdp", 3)
    tab = opened(run)
    box, area = tab.locator("canvas").bounding_box(), tab.evaluate("cdpsim.area")
    slot, sizes = np.unique(run.messages["start"], return_counts=True)
    lines = tip_at(tab, window_x(tab, slot[3]) - 1, box["y"] + area["traffic"] + 8)
    worth = "stage's" if sizes[3] == 1 else "stages'"
    assert lines == [f"{sizes[3]} {worth} worth sent at {slot[3]}"]
    run = simulate("pp-cdp", model=MODEL, cluster=BOX)
    tab = opened(run)
    message = {name: column[0] for name, column in run.messages.items()}
    tab.fill("#query", f"{message['content']} t={message['step']} i={message['micro_batch']} j={message['stage']}")
    key(tab, "Enter")
    middle, area = window_x(tab, (message["start"] + message["end"]) / 2), tab.evaluate("cdpsim.area")
    lines = tip_at(tab, middle, box["y"] + area["traffic"] + 8)
    speed = message["size"] / (message["end"] - message["start"])
    assert lines[0] == f"{speed / 1e9:.4g} GB/s on the way"


def finger(session: Any, kind: str, *points: tuple[float, float]) -> None:
    session.send(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": k} for k, (x, y) in enumerate(points)]},
    )


def test_fingers(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 4), **PHONE)
    session = tab.context.new_cdp_session(tab)
    before, y = span(tab), place(tab, 0)["top"] + 5
    x = window_x(tab, 15)
    finger(session, "touchStart", (x - 30, y), (x + 30, y))
    for k in range(1, 7):
        finger(session, "touchMove", (x - 30 - 10 * k, y), (x + 30 + 10 * k, y))
    finger(session, "touchEnd")
    assert span(tab) < 0.5 * before
    assert window_x(tab, 15) == pytest.approx(x, abs=3)
    finger(session, "touchStart", (x, y))
    for k in range(1, 6):
        finger(session, "touchMove", (x - 10 * k, y))
    finger(session, "touchEnd")
    assert window_x(tab, 15) == pytest.approx(x - 50, abs=6)
    assert tab.evaluate("cdpsim.selected") == -1
    edges = place(tab, bars(tab)["1F1, step 1"][0])
    tab.touchscreen.tap((edges["left"] + edges["right"]) / 2, (edges["top"] + edges["bottom"]) / 2)
    assert tab.locator("#about b").inner_text() == "1F1, step 1"


def test_a_phone_shows_all_of_it(opened: Opener) -> None:
    tab = opened(simulate("pp-cdp", model=MODEL, cluster=BOX), **PHONE)
    tab.fill("#query", "i=1")
    sizes = tab.evaluate(
        "[...document.querySelectorAll('#tools :is(button, select, input)')].map((one) => one.getBoundingClientRect())"
        ".filter((box) => box.width).map(({ width, height, right }) => [width, height, right])"
    )
    assert len(sizes) == 11
    assert all(width >= 44 and height >= 44 and right <= 390 for width, height, right in sizes)
    assert tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [390, 844]
    canvas = tab.locator("canvas").bounding_box()
    assert canvas["height"] > 0.6 * 844


def lightness(tab: Any, y: float) -> float:
    """Of the page near its left edge."""
    return palette.luminance(pixel(picture(tab), 4, y))


def test_dark_and_light(opened: Opener) -> None:
    for scheme, light in (("light", True), ("dark", False)):
        tab = opened(simulate("multi-cdp", 3), color_scheme=scheme)
        ground = "getComputedStyle(document.body).backgroundColor"
        first = tab.evaluate(ground)
        assert [lightness(tab, y) > 0.5 for y in (5, 60, 200, 790)] == [light] * 4
        tab.locator("#theme").click()
        assert tab.evaluate(ground) != first
        assert [lightness(tab, y) > 0.5 for y in (5, 60, 200, 790)] == [not light] * 4


def test_hostile_names_are_text(opened: Opener) -> None:
    run = simulate("multi-cdp", model=Model(name=HOSTILE_NAME, stages=MODEL.stages))
    tab = opened(run)
    shown = tab.locator("h1").inner_text()
    assert "</script><script>alert(1)</script><!--<img" in shown
    assert shown == tab.title()
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.evaluate("document.scripts.length") == 3


def test_what_changes_its_size_is_drawn_anew(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 3))
    tab.set_viewport_size({"width": 700, "height": 500})
    settled(tab)
    area = tab.evaluate("cdpsim.area")
    assert area["right"] == 700
    assert inside(tab, bars(tab)["1F2, step 0"][0]) == palette.colour(2)


def test_the_tip_follows_the_selection(opened: Opener) -> None:
    tab = opened(simulate("pp-cdp", 3))

    def tip() -> tuple[bool, str, dict[str, float]]:
        settled(tab)
        box = tab.locator("#tip")
        return box.is_visible(), box.locator("b").inner_text(), box.bounding_box()

    tab.focus("canvas")
    for pressed in ("Enter", "Tab", "ArrowDown", "Tab", "w", "]"):
        key(tab, pressed)
        bar = tab.evaluate("cdpsim.selected")
        visible, name, box = tip()
        assert (visible, name) == (True, tab.evaluate(f"cdpsim.name({bar})"))
        edges = place(tab, bar)
        assert max(edges["left"] - box["x"] - box["width"], box["x"] - edges["right"]) < 30
        assert -2 < box["y"] - edges["bottom"] < 30
    lane = place(tab, bars(tab)["0F0, step 0"][0])
    hovered = tip_at(tab, window_x(tab, 4.5), (lane["top"] + lane["bottom"]) / 2)
    assert hovered and hovered[0] != name
    tab.mouse.move(5, 5)  # off the canvas
    assert tip()[1] == name
    key(tab, "Escape")
    assert not tip()[0]


TWO = Model(stages=(Stage(forward=1, backward=2, activation=1, boundary=10**9, parameters=0),) * 2)
SECOND = Cluster(devices=(Devices(),), link=Link(latency=0, bandwidth=1e9))  # a message takes 1 s


def test_the_critical_path_of_the_run_and_of_a_task(opened: Opener) -> None:
    """Two stages, one micro-batch: 1 s forwards, 2 s backwards and 1 s messages, one after another."""
    tab = opened(simulate("1f1b", m=1, steps=1, model=TWO, cluster=SECOND))
    key(tab, "c")
    said = tab.locator("#lengths")
    expected = "forward 2 s + activation 1 s + backward 4 s + activation gradient 1 s"
    assert said.inner_text() == f"Critical path of the run: 8 s = {expected}"
    (chain,) = tab.evaluate("cdpsim.paths.map((chain) => chain.map(cdpsim.name))")
    names = ("0F0", "activation 0F0", "1F0", "1B0", "activation gradient 1B0", "0B0")
    assert chain[:6] == [f"{name}, step 0" for name in names]
    tab.fill("#query", "1F0")
    key(tab, "Enter", "Escape")
    assert said.inner_text() == "Critical path of 1F0, step 0: 3 s = forward 2 s + activation 1 s"
    known = bars(tab)
    lit = [colour in palette.COLOURS for colour in insides(tab, [known[f"{name}, step 0"][0] for name in names])]
    assert lit == [True, True, True, False, False, False]
    tab.locator("#path").click()
    assert not said.is_visible()
    assert tab.locator("#path").get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "multi-cdp", "mp-cdp", "pipedream", "zero-dp"])
def test_a_critical_path_is_a_chain_of_waits_that_fills_the_run(name: str, opened: Opener) -> None:
    run = simulate(**fitting(name, 3), steps=2)
    tab = opened(run)
    key(tab, "c")
    (times,) = tab.evaluate("cdpsim.paths.map((chain) => chain.map(cdpsim.time))")
    assert all(end <= start for (_, end), (start, _) in pairwise(times))
    assert times[-1][1] == run.tasks["end"].max()
    (names,) = tab.evaluate("cdpsim.paths.map((chain) => chain.filter((k) => k < cdpsim.tasks).map(cdpsim.name))")
    expected = [(task.stage, task.kind, task.micro_batch, task.step) for task in run.critical_path()]
    assert names == [f"{j}{kind}{i if i >= 0 else ''}, step {t}" for j, kind, i, t in expected]
    said = tab.locator("#lengths").inner_text().split(" = ")
    assert sum(float(part.rsplit(" ", 2)[1]) for part in said[1].split(" + ")) == run.tasks["end"].max()
    waiting = sum(start - end for (_, end), (start, _) in pairwise([(0.0, 0.0), *times]))
    assert ("waiting" in said[1]) == (waiting > 0)


def table(tab: Any) -> dict[str, list[str]]:
    """The rows of the sums, by their heads."""
    rows = tab.locator("#sums tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def test_a_range_sums_up_what_happens_in_it(opened: Opener) -> None:
    """1F1B of 4 stages and 8 micro-batches: each device works 16 of 22 slots."""
    run = simulate("1f1b", 4, m=8, steps=1)
    tab = opened(run)
    key(tab, "r")
    found = table(tab)
    idle = [4 * 6, 6, 6, 6, 6]
    assert [row[:2] for row in found.values()] == [["64 slots", "72.7 %"]] + [["16 slots", "72.7 %"]] * 4
    for row, slots in zip(found.values(), idle, strict=True):
        assert sum(int(cell.split()[0]) for cell in row[2:-2] if cell != "–") == slots
    m = run.messages
    touching = [((m["src"] == d) | to(m, d)).sum() for d in range(4)]
    assert [row[-2] for row in found.values()] == [str(count) for count in (len(m["src"]), *touching)]
    assert [row[-1] for row in found.values()] == [str(count) for count in (len(m["src"]), *touching)]
    tab.fill("#from", "3")
    tab.fill("#to", "11")
    key(tab, "Enter")
    assert tab.evaluate("cdpsim.range") == [3, 11]
    within = np.clip(np.minimum(run.tasks["end"], 11) - np.maximum(run.tasks["start"], 3), 0, None)
    busy = [int(within[run.tasks["device"] == d].sum()) for d in range(4)]
    assert [int(row[0].split()[0]) for row in table(tab).values()] == [sum(busy), *busy]
    inside = (m["start"] >= 3) & (m["start"] < 11)
    assert table(tab)["all devices"][-2] == str(inside.sum())
    tab.locator("#clear").click()
    assert tab.evaluate("cdpsim.range") is None
    assert not tab.locator("#range").is_visible()


def test_a_range_is_drawn_along_the_times_or_with_shift(opened: Opener) -> None:
    """Of a message's bytes the part counts that its time has in the range."""
    tab = opened(simulate("1f1b", m=1, steps=1, model=TWO, cluster=SECOND))
    box, area, before = tab.locator("canvas").bounding_box(), tab.evaluate("cdpsim.area"), view(tab)
    for y, shift in ((box["y"] + area["top"] - 10, False), (place(tab, 0)["top"] + 5, True)):
        begin, end = window_x(tab, 1.5), window_x(tab, 2.5)
        if shift:
            tab.keyboard.down("Shift")
        tab.mouse.move(end, y)
        tab.mouse.down()
        tab.mouse.move((begin + end) / 2, y)
        tab.mouse.move(begin, y)
        tab.mouse.up()
        tab.keyboard.up("Shift")
        assert tab.evaluate("cdpsim.range") == pytest.approx([1.5, 2.5], abs=0.02)
        heads = tab.locator("#sums thead th").all_inner_texts()
        assert heads == ["busy", "idle for messages", "idle for dependencies", "messages", "bytes"]
        assert view(tab) == before
        if not shift:
            tab.fill("#from", "1.5")
            tab.fill("#to", "2.5")
            key(tab, "Enter")
            assert table(tab) == {
                "all devices": ["500 ms", "25.0 %", "500 ms", "1 s", "1", "500 MB"],
                "device 0": ["0 s", "0.0 %", "–", "1 s", "1", "500 MB"],
                "device 1": ["500 ms", "50.0 %", "500 ms", "–", "1", "500 MB"],
            }
            tab.focus("canvas")
            key(tab, "Escape")
            assert tab.evaluate("cdpsim.range") is None


@pytest.mark.parametrize("name", ["multi-dp", "zero-cdp", "single-cdp", "mp-cdp", "chimera", "zbv"])
@pytest.mark.parametrize("costs", ["unit", "real"])
def test_busy_and_idle_time_fill_every_lane(name: str, costs: str, opened: Opener) -> None:
    wanted = fitting(name, 3)
    given = {} if costs == "unit" else {"model": Model(stages=FOUR[: wanted["n"]]), "cluster": BOX}
    run = simulate(**wanted | given)
    tab = opened(run)
    key(tab, "r")
    rows = tab.evaluate("cdpsim.sums(...cdpsim.range)")
    whole, tasks = float(run.tasks["end"].max()), run.tasks
    for device in range(len(rows) - 1):
        _, sums = rows[1 + device]
        mine = tasks["device"] == device
        assert sums["busy"] == pytest.approx(float((tasks["end"] - tasks["start"])[mine].sum()))
        assert sums["busy"] + sum(sums["idle"]) == pytest.approx(sums["lanes"] * whole)
    assert rows[0][1]["messages"] == len(run.messages["src"])
    assert rows[0][1]["bytes"] == pytest.approx(float(run.messages["size"].sum()))


def test_the_address_keeps_what_is_shown(opened: Opener) -> None:
    run = simulate("1f1b", 3, m=4)
    tab = opened(run)
    assert tab.evaluate("location.hash") == ""
    tab.select_option("#colour", "stage")
    tab.select_option("#device", "2")
    tab.fill("#query", "1F3")
    key(tab, "Enter", "Escape", "w", "w", "r", "c")
    tab.wait_for_url("**#*path*")
    state = "({ ...cdpsim, view: { ...cdpsim.view }, frames: 0, area: 0 })"
    seen = tab.evaluate(state)
    other = opened(run, address=tab.evaluate("location.hash"))
    again = other.evaluate(state)
    for name in ("selected", "hits", "range", "paths"):
        assert again[name] == seen[name] is not None
    assert (again["view"]["colouring"], again["view"]["device"]) == ("stage", 2)
    for edge in ("from", "to"):
        assert again["view"][edge] == pytest.approx(seen["view"][edge])
    assert other.input_value("#query") == "1F3"
    assert other.locator("#lengths").inner_text() == tab.locator("#lengths").inner_text()
    assert table(other) == table(tab)
    other.evaluate("location.hash = '#bar=3'")
    settled(other)
    assert other.evaluate("cdpsim.selected") == 3
    assert other.evaluate("[cdpsim.range, cdpsim.paths, cdpsim.hits]") == [None, None, None]


def test_an_address_that_says_nonsense_is_of_no_effect(opened: Opener) -> None:
    tab = opened(simulate("1f1b", 3), address="#bar=99999&view=5..a&range=9..2&device=77&colour=toString&path")
    assert tab.evaluate("[cdpsim.selected, cdpsim.range]") == [-1, None]
    assert (view(tab)["colouring"], view(tab)["device"]) == ("micro-batch", -1)
    assert span(tab) == pytest.approx(1.04 * tab.evaluate("cdpsim.view.to / 1.02"))


def test_two_runs_on_one_clock(opened: Opener) -> None:
    first, second = simulate("1f1b", 3, m=6, steps=1), simulate("gpipe", 3, m=6, steps=1)
    tab = opened(first, second)
    assert tab.title() == "1f1b, n = 3, m = 6, dp and gpipe, n = 3, m = 6, dp"
    metrics = tab.locator("#metrics div").all_inner_texts()
    assert [line.split(":")[0] for line in metrics] == ["1f1b", "gpipe"]
    assert all("3 devices · 39 tasks · 24 messages" in line for line in metrics)
    known = bars(tab)
    above, below = (place(tab, k) for k in known["0B0, step 0"])
    assert above["bottom"] < below["top"]
    times = [run.tasks["start"][(run.tasks["kind"] == "B") & at(run.tasks, 0, 0)][0] for run in (first, second)]
    assert [above["left"], below["left"]] == pytest.approx([window_x(tab, time) for time in times], abs=0.01)
    told = tab.evaluate("cdpsim.about", known["0B0, step 0"][1])
    assert (told[1], told[-1]) == ("device 0", "gpipe")
    tab.fill("#query", "gpipe B device 1")
    assert tab.evaluate("cdpsim.hits") == 6
    tab.fill("#query", "device 1 B")
    assert tab.evaluate("cdpsim.hits") == 12
    tab.focus("canvas")
    key(tab, "Escape", "c", "r")
    lines = tab.locator("#lengths div").all_inner_texts()
    makespans = [run.tasks["end"].max() for run in (first, second)]
    names = ("1f1b", "gpipe")
    assert [line.split(" = ")[0] for line in lines] == [
        f"Critical path of {name}: {slots} slots" for name, slots in zip(names, makespans, strict=True)
    ]
    assert [row.inner_text() for row in tab.locator("#sums tr.whole th").all()] == ["1f1b", "gpipe"]
    area, box = tab.evaluate("cdpsim.area"), tab.locator("canvas").bounding_box()
    tops = [box["y"] + area["memory"] + k * (area["traffic"] - area["memory"]) / 2 for k in range(2)]
    for run, top in zip((first, second), tops, strict=True):
        lines = tip_at(tab, window_x(tab, 6.5), top + 14)
        assert float(lines[0].split()[0]) == sum(amounts(run, None, 6.5).values())


def test_print_is_light_and_keeps_colours(opened: Opener) -> None:
    tab = opened(simulate("1f1b", 4), color_scheme="dark")
    tab.evaluate(
        "addEventListener('beforeprint', () => { window.printed = ["
        "document.documentElement.dataset.theme, document.querySelector('canvas').width]; })"
    )
    sheet = tab.pdf(print_background=False)
    assert tab.evaluate("printed") == ["light", 2700]
    assert sheet.count(b"/Type /Page\n") == 1
    settled(tab)
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.querySelector('.chip')).printColorAdjust") == "exact"
    assert not tab.locator("#tools").is_visible()


CONTROLS = "button, select, input, canvas, [tabindex='0']"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_assistive_technology_needs(scheme: str, opened: Opener) -> None:
    """Names of controls, landmarks around all content, contrast of texts, and a way to everything by keyboard."""
    tab = opened(simulate("1f1b", 4, m=8), simulate("gpipe", 4, m=8), color_scheme=scheme)
    tab.focus("canvas")
    key(tab, "Enter", "c", "r")
    tab.fill("#query", "nothing")
    unnamed = tab.evaluate(
        f"[...document.querySelectorAll({CONTROLS!r})].filter((one) => one.checkVisibility() && "
        "!(one.getAttribute('aria-label') || one.labels?.[0]?.textContent.trim() || one.textContent.trim()))"
        ".map((one) => one.id)"
    )
    assert unnamed == []
    outside = tab.evaluate(
        "[...document.body.children].filter((one) => one.checkVisibility() && one.textContent.trim() && "
        "!one.matches('header, main, section[aria-label], footer, [role=status]')).map((one) => one.outerHTML)"
    )
    assert outside == []
    shades = tab.evaluate(
        "['ink', 'grey', 'page', 'raised', 'lane', 'accent'].map((name) => "
        "getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())"
    )
    ink, grey, page_ground, raised, _, accent = (palette.luminance(shade) for shade in shades)

    def contrast(a: float, b: float) -> float:
        return (max(a, b) + 0.05) / (min(a, b) + 0.05)

    assert min(contrast(text, ground) for text in (ink, grey, accent) for ground in (page_ground, raised)) >= 4.5
    tab.fill("#query", "B")
    wanted = set(
        tab.evaluate(
            f"[...document.querySelectorAll({CONTROLS!r})].filter((one) => one.checkVisibility()).map((one) => one.id)"
        )
    )
    reached = set()
    key(tab, "Escape", "Escape")
    tab.evaluate("document.activeElement.blur()")
    for _ in range(2 * len(wanted)):
        key(tab, "Tab")
        reached.add(tab.evaluate("document.activeElement.id"))
    assert {name for name in wanted if tab.locator(f"#{name}").is_visible()} <= reached


@pytest.mark.slow
def test_beside_a_run_a_trace_without_its_program_has_no_path(opened: Opener, tmp_path: Path) -> None:
    run = simulate("1f1b", 3, m=6, steps=1)
    run.save(tmp_path / "run")
    tab = opened(trace.load(tmp_path / "run"), simulate("gpipe", 3, m=6, steps=1))
    key(tab, "c", "r")
    assert tab.locator("#lengths").inner_text().startswith("Critical path of gpipe: ")
    assert "idle otherwise" in tab.locator("#sums thead th").all_inner_texts()
    tab.fill("#query", "1f1b 1F3")
    key(tab, "Enter")
    assert tab.evaluate("cdpsim.selected") >= 0
    assert not tab.locator("#lengths").is_visible()
