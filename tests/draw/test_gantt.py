"""Gantt pictures, read back from their SVG: bars, marks, textures and lines against the spec and against small runs."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import assume, given, settings
from matplotlib.text import Text

from cdpsim import Cluster, Model, RequestError, Stage, Trace, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.draw import canvas, palette
from cdpsim.draw.canvas import INK
from cdpsim.draw.gantt import gantt
from cdpsim.files.units import Work
from cdpsim.program import Content
from cdpsim.trace import load
from cdpsim.trace.metrics.waiting import IdleReason
from tests.helpers.figures import saved
from tests.helpers.made_traces import changed, empty, some_rows
from tests.helpers.strategies import requests

TWO = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=1, parameters=3, activation=1),) * 2)
SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A rectangle, or what a line spans: its row's name, its lane there, times, and colour."""

    row: str
    lane: int
    start: float
    end: float
    colour: str


class Picture:
    """A figure's SVG: its elements by their ids, and the positions of rows and times."""

    def __init__(self, trace: Trace, *, dependencies: bool = False) -> None:
        self.text = canvas.rendered(gantt(trace, dependencies=dependencies), "picture.svg").decode()
        root = ElementTree.fromstring(self.text)
        self.groups = {group.attrib["id"]: group for group in root.iter(f"{SVG}g") if "id" in group.attrib}
        self.words = [element.text or "" for element in root.iter(f"{SVG}text")]
        self.left, self.right, self.top, self.bottom = self.corners(self.groups["frame"][0])
        self.span = max(trace.tasks["end"].max(), trace.messages["end"].max(initial=0))
        ticks = [group for name, group in self.groups.items() if name.startswith("ytick")]
        self.rows = {str(tick[1][0].text): float(tick[1][0].attrib["y"]) - 3.04 for tick in ticks}

    def corners(self, path: ElementTree.Element) -> tuple[float, float, float, float]:
        """The least and largest x and y of a path."""
        pairs = np.array(re.findall(r"[ML] (\S+) (\S+)", path.attrib["d"]), dtype=float)
        return (*(pairs[:, 0].min(), pairs[:, 0].max()), *(pairs[:, 1].min(), pairs[:, 1].max()))

    def time(self, x: float) -> float:
        """The time at x, to a half of a second or slot: bars leave a little room."""
        return float(np.round((x - self.left) / (self.right - self.left) * self.span * 2) / 2)

    def row(self, y: float) -> tuple[str, int]:
        """The row at y: its name, and the lane above (-1) or below (1) its middle, if it has several."""
        name = min(self.rows, key=lambda name: abs(self.rows[name] - y))
        away = y - self.rows[name]
        return name, int(np.sign(away)) if abs(away) > 2 else 0

    def boxes(self, gid: str) -> list[Box]:
        """The rectangles of one id."""
        found = []
        for path in self.groups[gid].iter(f"{SVG}path") if gid in self.groups else ():
            left, right, top, bottom = self.corners(path)
            fill = re.search("fill: (#......|none|url)", path.attrib["style"])
            row = self.row((top + bottom) / 2)
            found.append(Box(*row, self.time(left), self.time(right), fill[1] if fill else ""))
        return sorted(found)

    def marks(self, gid: str) -> list[tuple[str, float]]:
        """The rows and times of the marks of one id."""
        uses = self.groups[gid].iter(f"{SVG}use") if gid in self.groups else ()
        at = [(float(use.attrib["x"]), float(use.attrib["y"])) for use in uses]
        return sorted((self.row(y)[0], self.time(x)) for x, y in at)


def simple(boxes: list[Box]) -> list[tuple[str, float, float]]:
    """Rows and times alone."""
    return [(box.row, box.start, box.end) for box in boxes]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_bars_stand_where_the_spec_says(n: int) -> None:
    """F(i,j,t) at 2Nt + 2i + j and B(i,j,t) at 2Nt + 2i + 2N-1-j, on device i, in the micro-batch's colour."""
    picture = Picture(simulate("multi-cdp", n))
    tasks = [(i, j, 2 * n * t + 2 * i) for t in range(3) for i in range(n) for j in range(n)]
    for gid, starts in (
        ("forward", [(i, start + j) for i, j, start in tasks]),
        ("backward", [(i, start + 2 * n - 1 - j) for i, j, start in tasks]),
    ):
        assert picture.boxes(gid) == sorted(Box(f"device {i}", 0, s, s + 1, palette.colour(i)) for i, s in starts)
    for i, j, start in tasks:
        (word,) = picture.groups[f"F-t{start // (2 * n)}-i{i}-j{j}"].iter(f"{SVG}text")
        assert word.text == f"F{i}.{j}"
        centre = picture.time(float(word.attrib["x"]))
        assert start + j < centre < start + j + 1


def test_backwards_are_hatched_at_their_feet() -> None:
    """In black on light colours and in white on dark ones: four of the first eight each."""
    picture = Picture(simulate("multi-cdp", 3))
    hatched = [box for shade in ("dark", "light") for box in picture.boxes(f"backward-hatch-{shade}")]
    assert sorted(simple(hatched)) == simple(picture.boxes("backward"))
    assert {box.lane for box in hatched} == {1}
    assert not picture.boxes("forward-hatch-dark") + picture.boxes("forward-hatch-light")


def test_updates_and_slashes_stand_where_the_spec_says() -> None:
    """Theta_{t+1}[j] is made at the end of B(N-1,j,t); a task that starts then or later and reads theta_t is stale."""
    n = 4
    picture = Picture(simulate("multi-cdp", n))
    made = {(j, t): 2 * n * t + 2 * (n - 1) + 2 * n - j for t in range(3) for j in range(n)}
    assert picture.marks("update-mark") == [("device 3", time) for time in sorted(made.values())]
    stale = []
    for t in range(3):
        for i in range(n):
            for j in range(n):
                reads = t if i + j >= n - 1 else max(t - 1, 0)
                start = 2 * n * t + 2 * i + 2 * n - 1 - j
                stale += [(f"device {i}", start + 1.0)] if made[j, reads] <= start else []
    assert stale
    assert [(box.row, box.end) for box in picture.boxes("backward-stale")] == sorted(stale)
    assert not picture.boxes("forward-stale")


def test_free_messages_are_marks_on_their_links() -> None:
    """Sums go from device i to i+1 as B(i,j,t) ends; no two marks of one link lie on each other."""
    n = 3
    trace = simulate("multi-cdp", n)
    picture = Picture(trace)
    ends = [(i, 2 * n * t + 2 * i + 2 * n - j) for t in range(3) for i in range(n - 1) for j in range(n)]
    assert picture.marks("message-gradient-free") == sorted((f"{i} → {i + 1}", end) for i, end in ends)
    assert len(picture.marks("message-parameters-free")) == (trace.messages["content"] == "parameters").sum()
    uses = [
        use.attrib for gid in picture.groups if gid.endswith("-free") for use in picture.groups[gid].iter(f"{SVG}use")
    ]
    assert len({(use["x"], use["y"]) for use in uses}) == len(uses) == len(trace.messages["start"])


def test_a_pipeline_of_two_stages_by_hand() -> None:
    """The run of test_waiting.py: messages of 1.5 s on links, three textures on devices, and lines for the waits."""
    cluster = Cluster(link=Link(latency=0.5, bandwidth=1.0))
    picture = Picture(simulate("pp-cdp", 2, steps=1, model=TWO, cluster=cluster), dependencies=True)
    assert [*picture.rows] == ["device 0", "device 1", "0 → 1", "1 → 0"]
    assert simple(picture.boxes("forward")) == [
        *(("device 0", 0, 1), ("device 0", 3, 4), ("device 1", 2.5, 3.5), ("device 1", 5.5, 6.5))
    ]
    assert simple(picture.boxes("message-activation")) == [("0 → 1", 1, 2.5), ("0 → 1", 4, 5.5)]
    assert simple(picture.boxes("message-activation_gradient")) == [("1 → 0", 5.5, 7), ("1 → 0", 8.5, 10)]
    assert simple(picture.boxes("idle-message")) == [("device 0", 5.5, 7), ("device 0", 9, 10), ("device 1", 1, 2.5)]
    assert simple(picture.boxes("idle-dependency")) == [("device 0", 4, 5.5), ("device 1", 0, 1)]
    assert simple(picture.boxes("idle-nothing")) == [("device 0", 1, 3), ("device 1", 8.5, 12)]
    assert picture.marks("waited-mark") == [("device 0", 7), ("device 0", 10), ("device 1", 2.5)]
    assert [box[2:4] for box in picture.boxes("waited")] == [(2.5, 2.5), (7, 7), (10, 10)]
    needed = [1, 2.5, 4, 5.5, 5.5, 7, 8.5, 10]  # each message leaves as its maker ends, and is used at once
    assert [box[2:4] for box in sorted(picture.boxes("needed"), key=lambda box: box.start)] == [(t, t) for t in needed]
    assert {"waiting for a message", "waiting for a dependency", "nothing to do", "0 s"} <= {*picture.words}


def test_collectives_have_a_row_for_each_group() -> None:
    """Two all-reduces at once lie side by side; a row is named by its members."""
    picture = Picture(
        simulate("multi-dp", 2, model=TWO, cluster=Cluster(link=Link(latency=0.5, bandwidth=2.0)), steps=2)
    )
    assert [*picture.rows] == ["device 0", "device 1", "all-reduce 0–1"]
    assert picture.boxes("message-gradient") == [
        Box("all-reduce 0–1", lane, start, start + 2, palette.CONTENT_COLOURS[Content.GRADIENT])
        for lane in (-1, 1)
        for start in (6, 14)
    ]
    assert [*Picture(simulate("mp-dp", 2)).rows][-2:] == ["all-reduce 0, 2", "all-reduce 1, 3"]


def test_lanes_of_one_device_stand_side_by_side() -> None:
    """Micro-batch 0 above, 1 below; without communication there are no other rows."""
    picture = Picture(simulate("single-dp", 2, steps=1))
    assert [*picture.rows] == ["device 0"]
    assert {(box.lane, box.colour) for box in picture.boxes("forward")} == {
        (-1, palette.colour(0)),
        (1, palette.colour(1)),
    }


@settings(max_examples=15)
@given(requests(most=4))
def test_any_run_can_be_drawn(request: dict[str, Any]) -> None:
    """Every task has its bar, inside the frame; bars and idle time of a row leave nothing out and do not overlap."""
    trace = simulate(**request)
    try:
        picture = Picture(trace, dependencies=True)
    except RequestError as error:  # some of the tasks take less than a millionth of the others' time
        assume("less than" not in str(error))
        raise
    kinds = trace.tasks["kind"]
    assert len(picture.boxes("forward")) == len(picture.boxes("backward")) == (kinds == "F").sum()
    halves = ["backward-of-weights"] * trace.program.splits
    assert [len(picture.boxes(half)) for half in halves] == [(kinds == "W").sum()] * len(halves)
    areas: dict[int, list[tuple[float, float]]] = {}
    in_lanes = ["update"] if len(trace.program.lane_tasks) > trace.program.compute else []
    for gid in ("forward", "backward", *halves, *in_lanes, *(f"idle-{reason.name.lower()}" for reason in IdleReason)):
        for path in picture.groups[gid].iter(f"{SVG}path") if gid in picture.groups else ():
            if "clip-path" in path.attrib:  # else it is of a texture
                left, right, top, bottom = picture.corners(path)
                areas.setdefault(round(((top + bottom) / 2 - picture.top) / 0.72), []).append((left, right))
    for row in areas.values():
        row.sort()
        assert picture.left <= row[0][0] <= row[-1][1] <= picture.right
        assert all(after[0] - before[1] > -0.01 for before, after in pairwise(row))
        assert sum(right - left for left, right in row) >= 0.9 * (picture.right - picture.left)


def test_the_same_run_gives_the_same_bytes() -> None:
    """Also where the same is simulated again."""
    for name in ("a.svg", "a.pdf", "a.png"):
        first, second = (canvas.rendered(gantt(simulate("mp-cdp", 3), dependencies=True), name) for _ in range(2))
        assert first == second


def test_ids_are_there_once() -> None:
    """An SVG in which two things have one id is none."""
    picture = Picture(simulate("mp-cdp", 3), dependencies=True)
    ids = re.findall(' id="([^"]*)"', picture.text)
    assert len(ids) == len(set(ids))


def test_names_that_somebody_chose_are_text(tmp_path: Path) -> None:
    """Any characters may be in them; they are shortened, and small enough for the picture."""
    simulate("multi-dp", 2).save(tmp_path / "run")
    trace = load(tmp_path / "run")
    name = "</script>$x^'\"&<b>\n\0" + "x" * 10_000
    request = {"schedule": name, "model": {"name": name}, "cluster": {"name": name}}
    trace = changed(trace, trace.summary() | {"request": request})
    picture = Picture(trace)
    (title,) = (words for words in picture.words if "script" in words)
    assert title.startswith("</script>$x^'\"&<b>\\n\\x00xxx")
    assert title.count("x…") == 3
    assert "</script>" not in picture.text
    figure = gantt(trace)
    figure.draw_without_rendering()
    (line,) = (text for text in figure.findobj(Text) if "script" in text.get_text())
    assert line.get_window_extent().x1 < figure.bbox.x1


def test_a_loaded_trace_shows_what_its_files_say(tmp_path: Path) -> None:
    """The same bars; idle time has no reasons, because a loaded trace has no dependencies."""
    whole = simulate("pp-cdp", 2, steps=1, model=TWO, cluster=Cluster(link=Link(latency=0.5, bandwidth=1.0)))
    whole.save(tmp_path / "run")
    loaded = load(tmp_path / "run")
    picture, known = Picture(loaded), Picture(whole)
    for gid in ("forward", "backward", "message-activation", "message-activation_gradient"):
        assert picture.boxes(gid) == known.boxes(gid)
    assert simple(picture.boxes("idle-nothing")) == [
        *(("device 0", 1, 3), ("device 0", 4, 7), ("device 0", 9, 10)),
        *(("device 1", 0, 2.5), ("device 1", 8.5, 12)),
    ]
    assert "idle-message" not in picture.groups
    assert "waiting for a message" not in picture.words
    with pytest.raises(RequestError, match="dependencies: are not in a trace's files"):
        gantt(loaded, dependencies=True)


def test_what_runs_at_once_on_a_device_of_a_loaded_trace_gets_its_own_lane(tmp_path: Path) -> None:
    """Files do not say lanes."""
    whole = simulate("single-dp", 2, steps=2)
    whole.save(tmp_path / "run")
    for gid in ("forward", "backward"):
        assert Picture(load(tmp_path / "run")).boxes(gid) == Picture(whole).boxes(gid)


def rewritten(folder: Path, trace: Trace, kinds: dict[int, str], devices: int) -> Trace:
    """A trace from files in which some tasks are of other kinds, and which says how many devices there are."""
    trace.save(folder / "run")
    loaded = load(folder / "run")
    for row, kind in kinds.items():
        loaded.tasks["kind"][row] = kind
    loaded.summary()["devices"] = devices
    return loaded


def test_backwards_of_weights_and_devices_without_tasks(tmp_path: Path) -> None:
    """No schedule of the paper has these: a third form of bar, hatched at its head, and a row that is always idle."""
    picture = Picture(rewritten(tmp_path, simulate("single-dp", 1, steps=1), {1: "W"}, 3))
    assert simple(picture.boxes("backward-of-weights")) == [("device 0", 1, 2)]
    assert [box.lane for box in picture.boxes("backward-of-weights-hatch-light")] == [-1]
    assert not picture.boxes("backward")
    assert simple(picture.boxes("idle-nothing")) == [("device 1", 0, 2), ("device 2", 0, 2)]
    assert {"backward of weights", "idle"} <= {*picture.words}


def test_updates_alone_can_be_drawn(tmp_path: Path) -> None:
    """A trace file of updates alone is drawn as devices that are always idle."""
    simulate("multi-dp", 2, steps=1).save(tmp_path / "run")
    trace = load(tmp_path / "run")
    rows = trace.tasks["kind"] == "U"
    picture = Picture(changed(trace, tasks=some_rows(trace.tasks, rows)))
    assert picture.marks("update-mark") == [("device 0", 4), ("device 1", 4)]
    assert simple(picture.boxes("idle-nothing")) == [("device 0", 0, 4), ("device 1", 0, 4)]


def test_the_legend_names_what_is_in_the_picture_alone() -> None:
    """A run of one device has no messages and waits for none."""
    words = Picture(simulate("single-dp", 2)).words
    assert {"micro-batch", "forward", "backward", "update", "task"} <= {*words}
    assert not {"message", "idle", "dependency", "nothing to do", "not the newest version"} & {*words}
    many = Picture(simulate("multi-dp", 9, steps=1)).words
    assert {"0, 8, …", "1"} <= {*many}


def test_uneven_devices_have_bars_of_their_own_lengths() -> None:
    """Device 1 is half as fast; times have units."""
    model = Model(stages=(Stage(forward=Work(2e12), backward=Work(4e12)),) * 2)
    devices = (Devices(count=1, speed=1e12), Devices(count=1, speed=0.5e12))
    picture = Picture(simulate("multi-dp", model=model, cluster=Cluster(devices=devices), steps=1))
    forwards = [(box.row, box.start, box.end) for box in picture.boxes("forward")]
    assert forwards == [("device 0", 0, 2), ("device 0", 2, 4), ("device 1", 0, 4), ("device 1", 4, 8)]
    assert {"time", "4 s"} <= {*picture.words}


@pytest.mark.parametrize(
    ("name", "n", "steps", "message"),
    [
        ("multi-dp", 101, 1, "has 30,704 tasks and messages; a picture shows at most 20,000, an .html file any number"),
        ("mp-cdp", 8, 3, "needs 301 rows for devices and links; a picture shows at most 160"),
        ("single-dp", 1, 700, "most tasks less than 1 point wide; take fewer --steps, or an .html file"),
    ],
)
def test_what_nobody_could_read_is_refused(name: str, n: int, steps: int, message: str) -> None:
    """With what serves instead."""
    with pytest.raises(RequestError, match=f"gantt: .*{message}"):
        gantt(simulate(name, n, steps=steps))


def test_narrow_tasks_are_drawn_finer() -> None:
    """Without names and hatches: a backward is cut short at its foot."""
    picture = Picture(simulate("multi-cdp", 2, steps=100))
    assert {box.colour for box in picture.boxes("backward-hatch-dark")} == {"#ffffff"}
    assert not [gid for gid in picture.groups if gid.startswith("F-")]


def test_a_trace_without_tasks_is_refused() -> None:
    """Before anything else is looked at."""
    with pytest.raises(RequestError, match="trace: has no tasks"):
        gantt(empty())


def updated(**where: float) -> Trace:
    """Two stages on a device each, whose updates take 2 s; the host's need two bytes for it, too."""
    stage = Stage(forward=1.0, backward=2.0, boundary=1, parameters=1, **where)  # type: ignore[arg-type]
    return simulate("pp-cdp", 2, steps=1, model=Model(stages=(stage,) * 2))


def test_updates_that_take_time_are_bars() -> None:
    """In ink, in the device's lane after its last backward, until 9 and 7; named by their stages, without marks."""
    picture = Picture(updated(update=2.0))
    assert picture.boxes("update") == [Box("device 0", 0, 9, 11, INK), Box("device 1", 0, 7, 9, INK)]
    assert not picture.marks("update-mark")
    assert "U0" in picture.words
    assert "update" in picture.words
    assert simple(picture.boxes("idle-nothing"))[-1] == ("device 1", 9, 11)


def test_updates_of_a_host_have_a_lane_of_their_own(tmp_path: Path) -> None:
    """Below the device's; of a trace from files, too, which does not know whose they are."""
    trace = updated(host_optimizer=1, host_update=2.0)
    for shown in (Picture(trace), Picture(saved(trace, tmp_path / "run"))):
        assert simple(shown.boxes("update")) == [("device 0", 9, 11), ("device 1", 7, 9)]
    assert [box.lane for box in Picture(trace).boxes("update")] == [1, 1]
    assert ("device 0", 9, 11) in simple(Picture(trace).boxes("idle-nothing"))
