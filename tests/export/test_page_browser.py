"""The HTML file in a real browser, offline: its picture, texts and actions, and no error in the console."""

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import BytesIO
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
from tests.conftest import need
from tests.helpers.hostile_names import HOSTILE_NAME
from tests.helpers.made_traces import changed, some_rows
from tests.helpers.strategies import fitting

SIZES = {"activation": 10**9, "boundary": 10**8, "parameters": 10**8, "optimizer": 7}
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

    def open_page(run: Trace, **options: Any) -> Any:
        file = tmp_path / f"{len(tabs)}.html"
        file.write_bytes(b"".join(page(run)))
        tab = browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options)
        tabs.append(tab)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
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
        assert f"{len(run.tasks['start'])} tasks" in tab.locator("#figures").inner_text()


def test_a_loaded_trace_opens(opened: Opener, tmp_path: Path) -> None:
    simulate("zero-dp", model=MODEL, cluster=BOX).save(tmp_path / "traces")
    tab = opened(trace.load(tmp_path / "traces"))
    tab.focus("canvas")
    key(tab, "Enter")
    assert tab.locator("#about b").inner_text() == "F(t=0,i=0,j=0)"
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
        name = run.program.describe(int(run.task_nodes[row]))
        task = {column: values[row] for column, values in run.tasks.items()}
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
    lane = place(tab, known["F(t=0,i=0,j=0)"][0])
    middle = (lane["top"] + lane["bottom"]) / 2
    idle = tip_at(tab, window_x(tab, 1.5), middle)
    assert idle == [
        "device 0 idle",
        "slot 1 to 2, 1 slot",
        "next F(t=0,i=1,j=0)",
    ]
    update = known["U(t=0,j=1)"][0]
    edges = place(tab, update)
    assert tip_at(tab, edges["left"] + 1, edges["top"] + 2)[:3] == ["U(t=0,j=1)", "device 1", "slot at 5"]
    message = place(tab, known["activation(t=0,i=0,j=0)"][0])
    lines = tip_at(tab, message["left"], (message["top"] + message["bottom"]) / 2)
    assert lines == [
        "activation(t=0,i=0,j=0)",
        "p2p, device 0 to 1",
        "1 stage's worth in 1 round",
        "slot at 1",
        "waited for F(t=0,i=0,j=0)",
    ]
    assert tip_at(tab, 5, middle) == []


def test_updates_are_marks_of_full_strength(opened: Opener) -> None:
    """At all fractions of seconds."""
    run = simulate("zero-dp", model=MODEL, cluster=BOX)
    tab = opened(run)
    marks = [k for name, some in bars(tab).items() if name.startswith("U") for k in some]
    assert len(marks) == (run.tasks["kind"] == "U").sum()
    seen = picture(tab)
    assert (
        len({pixel(seen, edges["left"], edges["top"] + 2) for edges in places(tab, marks)} - set(palette.COLOURS)) == 1
    )


def test_idle_says_who_is_waited_for(opened: Opener) -> None:
    tab = opened(simulate("zero-dp", model=MODEL, cluster=BOX))
    lane = place(tab, bars(tab)["F(t=0,i=0,j=0)"][0])
    lines = tip_at(tab, window_x(tab, 1e-4), (lane["top"] + lane["bottom"]) / 2)
    assert lines[0] == "device 0 idle"
    assert lines[2:] == ["next F(t=0,i=0,j=0)", "which waits for parameters(t=-1,j=0)"]


def test_collectives_have_lanes_of_their_own(opened: Opener) -> None:
    run = simulate("multi-dp", model=MODEL, cluster=BOX)
    tab = opened(run)
    last = place(tab, tab.evaluate("cdpsim.bars - 1"))
    lines = tip_at(tab, (last["left"] + last["right"]) / 2, (last["top"] + last["bottom"]) / 2)
    assert lines[0].startswith("gradient(t=2,j=")
    assert lines[1:3] == ["all-reduce 0–2", "100 MB in 3 rounds"]


QUERIES: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "i=1": lambda t, m: (t["micro_batch"] == 1, m["micro_batch"] == 1),
    "j=2": lambda t, m: (t["stage"] == 2, m["stage"] == 2),
    "t=1": lambda t, m: (t["step"] == 1, m["step"] == 1),
    "d=0": lambda t, m: (t["device"] == 0, (m["src"] == 0) | (m["dst"] == 0)),
    "v=2": lambda t, m: (t["version"] == 2, m["step"] == -9),
    "F": lambda t, m: (t["kind"] == "F", m["step"] == -9),
    "b i=0": lambda t, m: ((t["kind"] == "B") & (t["micro_batch"] == 0), m["step"] == -9),
    "stale": lambda t, m: (t["stale"] == 1, m["step"] == -9),
    "gradient": lambda t, m: (t["stage"] == -9, m["content"] == "gradient"),
    "param d=2": lambda t, m: (t["stage"] == -9, (m["content"] == "parameters") & ((m["src"] == 2) | (m["dst"] == 2))),
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


def test_hits_stand_out_and_one_leads_to_the_next(searched: Trace, opened: Opener) -> None:
    tab = opened(searched)
    key(tab, "/")
    tab.keyboard.type("i=1 B")
    known = bars(tab)
    hits = {k for name, some in known.items() if name.startswith("B") and "i=1" in name for k in some}
    tasks = [k for name, some in known.items() if name[0] in "FB" for k in some]
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
        "Array.from({ length: cdpsim.bars }, (_, k) => k).find((k) => cdpsim.name(k) === 'F(t=2000,i=1,j=1)')"
    )
    edges = place(tab, hit)
    assert edges["right"] - edges["left"] < 0.2
    seen = picture(tab)
    assert pixel(seen, edges["left"], edges["top"] + 9) == palette.colour(1)
    assert pixel(seen, edges["left"] - 30, edges["top"] + 9) not in palette.COLOURS


def test_colourings(opened: Opener) -> None:
    tab = opened(simulate("multi-cdp", 4))
    known = bars(tab)
    names = ("B(t=1,i=1,j=3)", "gradient(t=0,j=1)", "F(t=1,i=0,j=0)", "F(t=1,i=3,j=3)")
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
        bar = next(some[0] for name, some in known.items() if name.startswith(kind) and "i=0" in name)
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
    assert spoken.inner_text().startswith("F(t=0,i=0,j=0), device 0, slot 0 to 1")
    key(tab, "Tab")
    assert spoken.inner_text().startswith("F(t=0,i=1,j=0), device 0, slot 2 to 3")
    key(tab, "Shift+Tab", "ArrowDown")
    assert spoken.inner_text().startswith("F(t=0,i=0,j=1), device 1")
    key(tab, "p")
    assert spoken.inner_text().startswith("activation(t=0,i=0,j=0), p2p, device 0 to 1")
    tab.locator("#blocker").click()
    assert spoken.inner_text().startswith("F(t=0,i=0,j=0)")
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
    edges = place(tab, bars(tab)["F(t=1,i=1,j=1)"][0])
    tab.touchscreen.tap((edges["left"] + edges["right"]) / 2, (edges["top"] + edges["bottom"]) / 2)
    assert tab.locator("#about b").inner_text() == "F(t=1,i=1,j=1)"


def test_a_phone_shows_all_of_it(opened: Opener) -> None:
    tab = opened(simulate("pp-cdp", model=MODEL, cluster=BOX), **PHONE)
    tab.fill("#query", "i=1")
    sizes = tab.evaluate(
        "[...document.querySelectorAll('#tools :is(button, select, input)')].map((one) => one.getBoundingClientRect())"
        ".filter((box) => box.width).map(({ width, height, right }) => [width, height, right])"
    )
    assert len(sizes) == 10
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
    assert inside(tab, bars(tab)["F(t=0,i=2,j=1)"][0]) == palette.colour(2)
