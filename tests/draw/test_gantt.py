"""Gantt pictures, read back from their SVG: bars, marks, textures and lines against the spec and against small runs."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import assume, given, settings
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from cdpsim import Cluster, Model, RequestError, Stage, Trace, plot, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.draw import canvas, palette
from cdpsim.draw.canvas import INK, PLACES, Look
from cdpsim.draw.gantt import MESSAGE_GREYS, gantt
from cdpsim.files.units import Work
from cdpsim.program import Content, Kind
from cdpsim.trace import load
from cdpsim.trace.metrics.waiting import IdleReason
from tests.helpers.figures import BOX, marked, model, one, saved, words
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

    def __init__(self, trace: Trace, *, links: bool | None = None, **options: Any) -> None:
        steps = int(trace.tasks["step"][trace.tasks["kind"] == "U"].max()) + 1  # what is thrown away has no update
        asked: dict[str, Any] = {"colour": "micro-batch", "steps": steps, "links": links} | options
        self.text = canvas.rendered(gantt(trace, **asked), "picture.svg").decode()
        root = ElementTree.fromstring(self.text)
        self.groups = {group.attrib["id"]: group for group in root.iter(f"{SVG}g") if "id" in group.attrib}
        self.words = [element.text or "" for element in root.iter(f"{SVG}text")]
        self.left, self.right, self.top, self.bottom = self.corners(self.groups["frame"][0])
        self.span = max(trace.tasks["end"].max(), trace.messages["end"].max(initial=0))
        ticks = [group for name, group in self.groups.items() if name.startswith("ytick")]
        self.rows = {str(tick[1][0].text): float(tick[1][0].attrib["y"]) - 2.85 for tick in ticks}

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
        return name, int(np.sign(away)) if abs(away) > 4 else 0

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
        assert word.text == f"{j}F{i}"
        centre = picture.time(float(word.attrib["x"]))
        assert start + j < centre < start + j + 1


def test_kinds_differ_in_height_where_colours_are_not_theirs() -> None:
    """A backward ends at seven tenths of its lane, one of weights begins at three tenths."""

    def spans(colour: str) -> list[Any]:
        figure = gantt(simulate("zb-h1", 1, m=1), colour=colour)
        kinds = "forward", "backward", "backward-of-weights"
        return [one(figure, kind).get_paths()[0].get_extents().intervaly.tolist() for kind in kinds]

    for colour in ("micro-batch", "stage"):
        (top, bottom), *others = spans(colour)
        high = bottom - top
        assert others == [pytest.approx([top, top + 0.7 * high]), pytest.approx([top + 0.3 * high, bottom])]
    assert len({*map(tuple, spans("kind"))}) == 1


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
    picture = Picture(trace, links=True)
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
    assert {f"bubble: {why}" for why in ("waiting for a message", "waiting for a dependency", "nothing to do")} <= {
        *picture.words
    }
    assert "time, s" in picture.words


def test_collectives_have_a_row_for_each_group() -> None:
    """Two all-reduces at once lie side by side; a row is named by its members."""
    picture = Picture(
        simulate("multi-dp", 2, model=TWO, cluster=Cluster(link=Link(latency=0.5, bandwidth=2.0)), steps=2)
    )
    assert [*picture.rows] == ["device 0", "device 1", "devices 0, 1"]
    assert picture.boxes("message-gradient") == [
        Box("devices 0, 1", lane, start, start + 2, MESSAGE_GREYS[Content.GRADIENT])
        for lane in (-1, 1)
        for start in (6, 14)
    ]
    assert [*Picture(simulate("mp-dp", 2), links=True).rows][-2:] == ["devices 0, 2", "devices 1, 3"]


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
        picture = Picture(trace, dependencies=True, colour="kind")
    except RequestError as error:  # some of the tasks take less than a millionth of the others' time, or links are many
        assume("less than" not in str(error) and "rows for devices and links" not in str(error))
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


@pytest.mark.slow
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
    title = " ".join(picture.words)
    assert "</script>$x^'\"&<b>\\n\\x00xxx" in title
    assert "x…" in title and "x" * 100 not in title
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
    assert "bubble: waiting for a message" not in picture.words
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
    """No schedule of the paper has these: a third form of bar, and a row that is always idle."""
    picture = Picture(rewritten(tmp_path, simulate("single-dp", 1, steps=1), {1: "W"}, 3))
    assert simple(picture.boxes("backward-of-weights")) == [("device 0", 1, 2)]
    assert not picture.boxes("backward")
    assert simple(picture.boxes("idle-nothing")) == [("device 1", 0, 2), ("device 2", 0, 2)]
    assert {"backward of weights", "bubble"} <= {*picture.words}


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
    assert {"micro-batch 0", "forward", "backward", "update", "stage 1, forward, micro-batch 3"} <= {*words}
    assert not {"gradient", "bubble", "needed", "bubble: nothing to do", "reads an older version"} & {*words}
    many = Picture(simulate("multi-dp", 9, steps=1)).words
    assert {"micro-batch 0, 8", "1"} <= {*many}


def test_uneven_devices_have_bars_of_their_own_lengths() -> None:
    """Device 1 is half as fast; times have units."""
    model = Model(stages=(Stage(forward=Work(2e12), backward=Work(4e12)),) * 2)
    devices = (Devices(count=1, speed=1e12), Devices(count=1, speed=0.5e12))
    picture = Picture(simulate("multi-dp", model=model, cluster=Cluster(devices=devices), steps=1))
    forwards = [(box.row, box.start, box.end) for box in picture.boxes("forward")]
    assert forwards == [("device 0", 0, 2), ("device 0", 2, 4), ("device 1", 0, 4), ("device 1", 4, 8)]
    assert {"time, s", "4"} <= {*picture.words}


@pytest.mark.parametrize(
    ("name", "n", "steps", "message"),
    [
        ("multi-dp", 101, 1, "has 20,402 tasks and messages; a picture shows at most 20,000, an .html file any number"),
        ("mp-cdp", 8, 3, "needs 301 rows for devices and links; a picture shows at most 160"),
        ("single-dp", 1, 700, "most tasks less than 1 point wide; take fewer --steps, or an .html file"),
    ],
)
def test_what_nobody_could_read_is_refused(name: str, n: int, steps: int, message: str) -> None:
    """With what serves instead."""
    with pytest.raises(RequestError, match=f"gantt: .*{message}"):
        gantt(simulate(name, n, steps=steps), steps=steps, links=True if name == "mp-cdp" else None)


def test_narrow_tasks_are_drawn_finer() -> None:
    """Without names."""
    picture = Picture(simulate("multi-cdp", 2, steps=100))
    style = picture.groups["backward-stale"][0].attrib["style"]
    assert re.search(r"stroke-width: 0\.[3-9]", style)
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
    assert "0U" in picture.words
    assert "update" in picture.words
    assert simple(picture.boxes("idle-nothing"))[-1] == ("device 1", 9, 11)


def test_updates_of_a_host_have_a_lane_of_their_own(tmp_path: Path) -> None:
    """Below the device's; of a trace from files, too, which does not know whose they are."""
    trace = updated(host_optimizer=1, host_update=2.0)
    for shown in (Picture(trace), Picture(saved(trace, tmp_path / "run"))):
        assert simple(shown.boxes("update")) == [("device 0", 9, 11), ("device 1", 7, 9)]
    assert [box.lane for box in Picture(trace).boxes("update")] == [1, 1]
    assert ("device 0", 9, 11) in simple(Picture(trace).boxes("idle-nothing"))


def blocks(figure: Figure) -> list[str]:
    """The names in blocks, by their ids."""
    texts: Any = figure.findobj(Text)
    return [text.get_text() for text in texts if re.match(r"([a-z]-)?[FBWU]-t", text.get_gid() or "")]


def panel_of(figure: Figure, gid: str = "frame") -> Axes:
    """The axes of a run."""
    (axes,) = (axes for axes in figure.axes if axes.patch.get_gid() == gid)
    return axes


def test_a_flushed_pipeline_shows_one_step_with_numbers_of_micro_batches() -> None:
    """1F1B takes (m + n - 1)(F + B) slots: 22 with m = 8, n = 4; device 0 is at the top; there are no rows of links."""
    figure = gantt(simulate("1f1b", 4, m=8))
    axes = panel_of(figure)
    assert axes.get_xlim() == (0, 22)
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"device {k}" for k in range(4)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert sorted(map(int, blocks(figure))) == sorted([*range(8)] * 2 * 4)
    assert {to_hex(colour) for colour in one(figure, "forward").get_facecolor()} == {palette.KIND_COLOURS[Kind.F]}
    assert {"micro-batch 3", "forward", "backward", "bubble: waiting for a dependency"} <= {*words(figure)}
    assert axes.get_xlabel() == "time, slots"


def test_as_many_steps_are_drawn_as_are_asked_for() -> None:
    trace = simulate("1f1b", 4, m=8)
    assert panel_of(gantt(trace, steps=2)).get_xlim() == (0, 44)
    with pytest.raises(RequestError, match="steps: are 4, but the run has 3; simulate more, or draw fewer"):
        gantt(trace, steps=4)


def test_steps_that_overlap_on_a_device_are_counted_through() -> None:
    """PipeDream has one micro-batch a step, and several in flight: 0, 1, 2 ... as in its paper's figures."""
    figure = gantt(simulate("pipedream", 4, steps=6))
    assert {*blocks(figure)} == {"0", "1", "2", "3", "4", "5"}
    assert "micro-batch 3, counted through the steps" in words(figure)


def test_a_block_of_several_stages_has_torch_s_name_and_a_tint() -> None:
    """Device 0 of four has stages 0 and 4; without room the micro-batch alone is left, and below that nothing."""
    trace = simulate("interleaved-1f1b", 8, m=8, chunks=2)
    figure = gantt(trace)
    assert {"0F0", "4F7", "7B3"} <= {*blocks(figure)}
    assert {"stage 1, forward, micro-batch 3", "a device's first and last stage"} <= {*words(figure)}
    assert len({to_hex(colour) for colour in one(figure, "forward").get_facecolor()}) == 2
    assert {*blocks(gantt(trace, look=Look(place="column")))} == {*map(str, range(8))}
    narrow = gantt(trace, look=Look(width=2.5))
    assert not blocks(narrow)
    assert not {"micro-batch 3", "stage 1, forward, micro-batch 3"} & {*words(narrow)}


def test_a_step_that_begins_before_another_ends_is_pale_and_without_names() -> None:
    """ZB-V's devices end a step at different times; 8 micro-batches, 8 stages, three tasks of each are named."""
    figure = gantt(simulate("zbv", 8, m=8))
    assert len(blocks(figure)) == 3 * 8 * 8
    assert "next step" in words(figure)


def test_what_is_pale_on_white_is_faint_on_black() -> None:
    """Of two rounds of ACCO the last micro-batches enter no update: on both grounds they differ least from it."""
    for dark, ground in ((False, "#ffffff"), (True, palette.NIGHT)):
        figure = plot("timeline", simulate("acco", 1, replicas=2, steps=2), style="gantt", dark=dark)
        faces = one(figure, "forward").get_facecolor()
        shown = faces[:, :3] * faces[:, 3:] + np.array(to_rgb(ground)) * (1 - faces[:, 3:])
        contrast = np.abs(shown - to_rgb(ground)).sum(axis=1)
        faint = faces[:, 3] < 1
        assert faint.any() and contrast[faint].max() < contrast[~faint].min() / 2


@pytest.mark.parametrize(("colour", "entry"), [("micro-batch", "micro-batch 0"), ("stage", "stage 0")])
def test_colours_mean_what_the_key_says(colour: str, entry: str) -> None:
    """Kinds have textures then. Messages are grey, and no colour is theirs."""
    figure = gantt(simulate("1f1b", 4, m=4, model=model(4), cluster=BOX), colour=colour, links=True)
    assert {to_hex(shade) for shade in one(figure, "forward").get_facecolor()} == {*palette.COLOURS[:4]}
    assert entry in words(figure)
    for content in ("activation", "activation_gradient"):
        red, green, blue, _ = one(figure, f"message-{content}").get_facecolor()[0]
        assert red == green == blue


def test_links_are_shown_if_asked_for_or_few() -> None:
    """Few that take time; messages too short to be seen are drawn as wide as can be seen."""
    slow = Cluster(link=Link(latency=1e-9, bandwidth=1e18))
    trace = simulate("1f1b", 4, model=model(4), cluster=slow)
    assert "0 → 1" not in words(gantt(trace))
    assert "0 → 1" in words(gantt(trace, links=True))
    assert "devices 0, 1" in words(gantt(simulate("multi-dp", 2, model=TWO, cluster=BOX)))
    figure = gantt(trace, links=True)
    axes = one(figure, "message-activation").axes
    points = axes.get_position().width * figure.get_figwidth() * 72 / axes.get_xlim()[1]
    corners = [path.get_extents() for path in one(figure, "message-activation").get_paths()]
    assert min(box.width for box in corners) * points >= 0.79
    with pytest.raises(RequestError, match="links: have no rows, as nothing is sent; leave them out"):
        gantt(simulate("single-dp", 2), links=True)


def test_streams_have_rows_below_each_device() -> None:
    """FSDP on two groups of two ranks: each of four devices has the messages in which it takes part, and no link."""
    link = Cluster(link=Link(latency=0.5, bandwidth=10.0))
    trace = simulate("fsdp", 2, shard=2, replicas=2, model=TWO, cluster=link, steps=1)
    for links in (None, True):
        figure = gantt(trace, links=links)
        names = [tick.get_text() for tick in figure.axes[-1].get_yticklabels()]
        assert names == [
            name for device in range(4) for name in (f"device {device}", "gathers", "reductions", "across")
        ]
    boxes = [path.get_extents() for path in one(figure, "message-gradient").get_paths()]
    sums = trace.messages[trace.messages.content == "gradient"]
    middles = sorted(round((box.x0 + box.x1) / 2, 6) for box in boxes)
    assert middles == sorted(round((m.start + m.end) / 2, 6) for m in sums for _ in str(m.dst).split("|"))
    assert "gathers" not in words(gantt(trace, links=False))
    many = simulate("ddp", 2, replicas=9, model=TWO, cluster=BOX, steps=1)
    assert "reductions" not in words(gantt(many))
    assert "reductions" in words(gantt(many, links=True))


ROUNDS = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=4, update=0.5),))


def test_rounds_have_one_communication_row_below_each_device() -> None:
    """By hand: a micro-batch of 3 s, a sum of 2 s, half of an update of 0.5 s, a gather of 2 s: two in each round."""
    trace = simulate("acco", replicas=2, model=ROUNDS, cluster=Cluster(link=Link(bandwidth=1.0)), steps=2)
    figure = gantt(trace)
    names = [tick.get_text() for tick in figure.axes[-1].get_yticklabels()]
    assert names == ["device 0", "communication", "device 1", "communication"]
    parts = [
        sorted((box.x0, box.x1) for path in one(figure, name).get_paths() for box in [path.get_extents()])[::2]
        for name in ("message-gradient", "estimate", "update", "message-parameters")
    ]
    found = [[tuple(round(time, 1) for time in each) for each in part] for part in parts]
    rounds = [3, 9, 15, 21]
    assert found[0] == [(each, each + 2) for each in rounds]
    assert found[3] == [(each + 2.2, each + 4.2) for each in rounds]
    assert [round(sum(each) / 2, 1) for part in found[1:3] for each in part] == [5.1, 17.1, 11.1, 23.1]
    middles = [
        one(figure, name).get_paths()[0].get_extents().intervaly.mean() for name in ("message-gradient", "update")
    ]
    assert middles[0] == pytest.approx(middles[1], abs=0.01)
    assert {"makes an estimate", "reads an estimate", "hands over, goes on", "next step, or in no update"} <= {
        *words(figure)
    }


def test_estimates_and_hand_overs_are_marked() -> None:
    """Rounds of ACCO read theta and its estimate by turns; DPU makes none. What is thrown away has no names."""
    asked: dict[str, Any] = {"replicas": 2, "cluster": Cluster(link=Link(bandwidth=1.0)), "steps": 2}
    trace = simulate("acco", model=ROUNDS, **asked)
    figure = gantt(trace)
    strips = {round(path.get_extents().x0) for path in one(figure, "reads-estimate").get_paths()}
    tasks = trace.tasks[(trace.tasks.estimate == 1) & (trace.tasks.kind != "U")]
    assert strips == {round(start) for start in tasks.start.tolist()}
    lines = sorted({round(path.vertices[0, 0]) for path in one(figure, "hands-over").get_paths()})
    assert lines == [3, 9, 15, 21]
    named = sum(word.isdigit() for word in blocks(figure))
    assert named == int(((trace.tasks.step < 2) & (trace.tasks.kind != "U")).sum())
    late = gantt(simulate("dpu", model=ROUNDS, **asked))
    assert not {"makes an estimate", "reads an estimate"} & {*words(late)}
    assert "hands over, goes on" in words(late)


def test_each_update_that_makes_an_estimate_is_a_frame() -> None:
    """Three stages on each of two workers; updates that are kept are bars of their own."""
    stages = Model(stages=(ROUNDS.stages[0],) * 3)
    trace = simulate("acco", replicas=2, model=stages, cluster=Cluster(link=Link(bandwidth=1.0)), steps=1)
    figure = gantt(trace)
    made = trace.tasks[(trace.tasks.kind == "U") & (trace.tasks.estimate == 1)]
    frames = sorted(path.get_extents().intervalx.tolist() for path in one(figure, "estimate").get_paths())
    assert np.allclose(frames, sorted(zip(made.start.tolist(), made.end.tolist(), strict=True)), atol=0.1)
    assert len(one(figure, "update").get_paths()) == 3 * 2


def test_free_updates_of_rounds_stand_in_their_stream() -> None:
    """In slots, where messages take no time, on the lane; an estimate's mark is hollow."""
    stage = Stage(forward=1.0, backward=2.0, parameters=4)
    figure = gantt(
        simulate("acco", replicas=2, model=Model(stages=(stage,)), cluster=Cluster(link=Link(bandwidth=1.0)), steps=2)
    )
    lane = max(path.get_extents().y1 for path in one(figure, "forward").get_paths()[:1])
    assert min(path.vertices[:, 1].min() for path in one(figure, "update-free").get_paths()) > lane
    slots = gantt(simulate("acco", n=1, replicas=2, steps=2))
    assert [tick.get_text() for tick in slots.axes[-1].get_yticklabels()] == ["device 0", "device 1"]
    assert to_hex(one(slots, "estimate-mark").get_facecolor()[0]) == "#ffffff"
    assert to_hex(one(slots, "update-mark").get_facecolor()[0]) == INK


def test_several_schedules_share_a_clock() -> None:
    """One below the other; ids begin with a letter for each."""
    runs = [simulate(name, 4, m=8, model="unit-split") for name in ("gpipe", "zb-h1")]
    figure = gantt(runs)
    above, below = (panel_of(figure, f"{letter}-frame") for letter in "ab")
    assert above.get_xlim() == below.get_xlim() == (0, 33)  # (8 + 3) times F + 2 of a backward
    assert above.get_position().y0 > below.get_position().y1
    assert {"gpipe", "zb-h1", "n = 4, m = 8, dp", "backward of weights"} <= {*words(figure)}
    assert len(marked(figure, "b-F-t0-i0-j0")) == 1
    with pytest.raises(RequestError, match="traces: need one unit of time"):
        gantt([runs[0], simulate("gpipe", 4, model=model(4), cluster=BOX)])


def test_a_run_is_drawn_into_somebody_s_axes() -> None:
    """Nothing else of the figure changes; blocks have names where the axes have room."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    mine, other = figure.subplots(2)
    assert gantt(simulate("1f1b", 4, m=8), axes=mine) is figure
    assert mine.get_xlim() == (0, 22)
    assert len(blocks(figure)) == 64
    shown = [text.get_text() for text in mine.get_legend().get_texts()]
    assert shown == ["forward", "backward", "bubble: waiting for a dependency"]
    assert (other.get_xlim(), len(other.get_children()), len(figure.axes)) == ((0, 1), 10, 2)
    gantt(simulate("1f1b", 2), axes=other, colour="stage")
    shown = [text.get_text() for text in other.get_legend().get_texts()]
    assert shown == ["stage 0", "stage 1", "bubble: waiting for a dependency"]
    with pytest.raises(RequestError, match="axes: have room for one schedule, not for 2"):
        gantt([simulate("1f1b", 4)] * 2, axes=mine)


def test_an_axis_of_time_has_one_unit() -> None:
    figure = gantt(simulate("1f1b", 4, m=8, model=model(4), cluster=BOX))
    axes = panel_of(figure)
    figure.draw_without_rendering()
    assert axes.get_xlabel() == "time, s"
    assert all(re.fullmatch(r"[\d.]+", label.get_text()) for label in axes.get_xticklabels())


@pytest.mark.parametrize("place", ["column", "page", pytest.param("slide", marks=pytest.mark.slow)])
def test_a_gantt_fits_its_place(place: str) -> None:
    figure = gantt(simulate("1f1b", 4, m=8), look=Look(place=place))
    assert figure.get_figwidth() == pytest.approx(PLACES[place].width)
    texts: Any = figure.findobj(Text)
    figure.draw_without_rendering()
    assert min(text.get_fontsize() for text in texts if text.get_visible() and text.get_text()) >= 5.99


def test_a_gantt_is_as_high_as_asked() -> None:
    trace = simulate("1f1b", 4, m=8)
    assert gantt(trace, look=Look(height=4)).get_figheight() == pytest.approx(4)
    with pytest.raises(RequestError, match=r"height: leaves no room for the rows; give at least 0\.\d inches more"):
        gantt(trace, look=Look(height=1))
