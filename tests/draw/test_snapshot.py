"""Devices at one moment, and the paper's Fig. 2: counted apart from the package, and read back from the SVG."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text
from numpy.typing import NDArray

from cdpsim import SCHEDULES as ALL
from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Link
from cdpsim.draw import canvas, palette
from cdpsim.draw.canvas import INK
from cdpsim.draw.snapshot import DEVICE_FILL, arrange, figure_2, snapshot
from cdpsim.draw.views import Moment, Views, busiest_moment, moment_at, stages_served
from cdpsim.errors import RequestError
from cdpsim.trace import TABLES, Trace, load
from tests.helpers.figures import marked
from tests.helpers.made_traces import empty
from tests.helpers.reference_slot_model import CYCLIC, SCHEDULES, Reference, Task
from tests.helpers.strategies import fitting
from tests.helpers.svg import Picture, drawn, read

STEPS = 3
TOY = Model(
    name="toy",
    stages=tuple(
        Stage(forward=f, backward=2 * f, activation=10**9, boundary=10**8, parameters=10**8)
        for f in (0.001, 0.0015, 0.002)
    ),
)
BOX = Cluster(name="box", link=Link(latency=5e-6, bandwidth=100e9))


def reference(name: str, n: int) -> Reference:
    return Reference(name, n, STEPS, "cdp-v2" if name in CYCLIC else "dp")


def running(tasks: list[Task], slot: int) -> list[Task]:
    return [task for task in tasks if task.start == slot]


def passes_held(run: Reference, slot: int) -> Counter[tuple[int, int]]:
    """How many micro-batches' activations of a stage each device holds: from the start of F to the end of B."""
    spans = [(i, j, t) for t in range(STEPS) for i in range(run.n) for j in range(run.n)]
    return Counter(
        (run.device(i, j, t), j) for i, j, t in spans if run.forward(i, j, t) <= slot <= run.backward(i, j, t)
    )


# The content of one slot


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_moment_is_what_the_specification_says(name: str, n: int) -> None:
    """For every slot: the task of each device, the activations that each holds, and the messages sent after it."""
    trace, run = simulate(name, n, steps=STEPS), reference(name, n)
    for slot in range(int(trace.tasks["end"].max())):
        moment = moment_at(Views(trace), slot)
        now = running(run.computations, slot)
        computed: dict[tuple[int, int], list[int]] = {}
        for task in sorted(now, key=lambda task: task.micro_batch):
            computed.setdefault((task.device, task.stage), []).append(task.micro_batch)
        assert moment.running == computed
        assert moment.activations == passes_held(run, slot)
        assert {device: size for device, size in moment.stash.items() if size} == Counter(
            device for (device, _), count in moment.activations.items() for _ in range(count)
        )
        assert moment.inside == inner(run, now)
        assert set(moment.messages) == {
            ((m.src, m.stage), (int(m.dst), m.stage + {"activation": 1, "activation_gradient": -1}.get(m.content, 0)))
            for m in run.messages
            if m.op == "p2p" and m.start == slot + 1
        }
        together = [m for m in run.messages if m.op != "p2p"]
        after = {(m.stage, m.dst) for m in together if m.start == slot + 1}
        in_step = {(m.stage, m.dst) for m in together if (m.start - 1) // (2 * n) == slot // (2 * n)}
        found = {(c.stage, "|".join(map(str, c.members))): c.now for c in moment.collectives}
        assert found == {group: group in after for group in in_step}


def inner(run: Reference, now: list[Task]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the data passed on in devices: from a forward to the next stage's, from a backward to the previous."""
    found = set()
    for kind, j, i, t, device, *_ in now:
        k = j + 1 if kind == "F" else j - 1
        if 0 <= k < run.n and run.device(i, k, t) == device:
            found.add(((device, j), (device, k)))
    return sorted(found)


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", SCHEDULES)
def test_steady_slots_hold_what_the_paper_says(name: str, n: int) -> None:
    """Cyclic: N(N+1)/2 stage-activations in every steady slot; simultaneous: N*N at the peak, in slots N-1 and N."""
    trace = simulate(name, n, steps=STEPS)
    held = [sum(moment_at(Views(trace), slot).activations.values()) for slot in range(2 * n * STEPS)]
    if name in CYCLIC:
        assert set(held[2 * (n - 1) :]) == {n * (n + 1) // 2}
    else:
        assert max(held) == n * n
        assert [slot for slot in range(2 * n) if held[slot] == n * n] == [n - 1, n]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_states_are_where_parameters_are_alive(name: str, n: int) -> None:
    trace, run = simulate(name, n, steps=STEPS), reference(name, n)
    parameters = list(run.parameters())
    for slot in range(2 * n, 2 * n * STEPS):
        states = moment_at(Views(trace), slot).states
        assert states is not None
        devices = Counter(device for device, _ in states)
        if name in ("single-cdp", "pp-cdp", "zero-cdp"):  # where a state may have two versions
            assert len(states) == n and {stage for _, stage in states} == set(range(n))
        else:
            assert devices == Counter(held.device for held in parameters if held.start <= slot < held.end)


def test_the_busiest_slot_is_in_the_middle_step() -> None:
    """Slot N of it: for DP, the second of two that hold N*N; for CDP, the middle of a step of equals."""
    for name in SCHEDULES:
        assert busiest_moment(Views(simulate(name, 4, steps=3))) == 8 + 4
        assert busiest_moment(Views(simulate(name, 4, steps=1))) == (7 if name in CYCLIC else 4)
    moments = simulate("multi-dp", model=TOY, cluster=BOX)
    middle = moments.tasks["step"] == 1
    assert busiest_moment(Views(moments)) in moments.tasks["start"][middle & (moments.tasks["kind"] == "B")]


# How devices are arranged


@pytest.mark.parametrize("n", range(1, 9))
def test_the_pyramid_looks_like_one(n: int) -> None:
    found = arrange(stages_served(Views(simulate("mp-cdp", n))))
    assert len(found.column) == n * (n + 1) // 2
    assert found.by_stage and (found.columns, found.rows) == (n, n)
    for row in range(n):
        columns = sorted(found.column[device] for device, span in found.span.items() if span == (row, row))
        assert columns == [row / 2 + k for k in range(n - row)]


def test_devices_stand_in_a_grid_side_by_side_or_above_each_other() -> None:
    grid = arrange(stages_served(Views(simulate("mp-dp", 3))))
    assert {device: (grid.column[device], grid.span[device][0]) for device in range(9)} == {
        i * 3 + j: (i, j) for i in range(3) for j in range(3)
    }
    beside = arrange(stages_served(Views(simulate("zero-cdp", 3))))
    assert beside.column == {0: 0, 1: 1, 2: 2} and set(beside.span.values()) == {(0, 2)}
    above = arrange(stages_served(Views(simulate("pp-cdp", 3))))
    assert above.column == {0: 0, 1: 0, 2: 0} and above.span == {j: (j, j) for j in range(3)}


def test_stages_that_do_not_follow_each_other_stand_closely() -> None:
    """Two devices with two of four stages each, and one that serves none."""
    found = arrange({0: [0, 2], 1: [1, 3], 2: []})
    assert not found.by_stage and found.rows == 2
    assert found.row == {(0, 0): 0, (0, 2): 1, (1, 1): 0, (1, 3): 1}
    assert len(set(found.column.values())) == 3
    pairs = arrange({0: [0, 1], 1: [2, 3]})
    assert pairs.by_stage and pairs.column == {0: 0, 1: 0} and pairs.span == {0: (0, 1), 1: (2, 3)}


# Artists


def check_drawn(picture: Picture, moment: Moment, prefix: str = "") -> None:
    """Everything of a moment is there once, where and as it should be."""
    places = {(device, stage) for device, stages in moment.stages.items() for stage in stages}
    boxes = picture.named(rf"{prefix}device-d\d+")
    assert set(boxes) == {f"{prefix}device-d{device}" for device in moment.stages}
    disks = {
        f"{prefix}disk-d{d}-j{j}-i{i}": palette.colour(i) for (d, j), several in moment.running.items() for i in several
    }
    assert {name: shape.fill for name, shape in picture.named(f"{prefix}disk-.*").items()} == disks
    idle = (moment.states or frozenset()) - set(moment.running)
    assert set(picture.named(f"{prefix}state-.*")) == {f"{prefix}state-d{d}-j{j}" for d, j in idle}
    rings = picture.named(f"{prefix}ring-d.*")
    assert set(rings) == {f"{prefix}ring-d{d}-j{j}" for d, j in moment.activations}
    thick = {(d, j): rings[f"{prefix}ring-d{d}-j{j}"] for d, j in moment.activations}
    radius = {place: (ring.right - ring.left) / 2 for place, ring in thick.items()}
    if len(set(moment.activations.values())) > 1:
        unit, disk = np.polyfit([moment.activations[place] for place in radius], list(radius.values()), 1)
        assert unit > 0.4 and disk > 5
        assert list(radius.values()) == pytest.approx(
            [disk + unit * moment.activations[place] for place in radius], abs=0.01
        )
    for device, stage in places:
        box = boxes[f"{prefix}device-d{device}"]
        for shape in picture.named(rf"{prefix}(disk|state|ring|place|ring-inside)-d{device}-j{stage}(-i\d+)?").values():
            assert (
                box.left < shape.left
                and shape.right < box.right
                and box.lower < shape.lower
                and shape.upper < box.upper
            )
    for kind, pairs in (("inner", moment.inside), ("message", moment.messages)):
        names = {f"{prefix}{kind}-d{a}-j{b}-d{c}-j{d}" for (a, b), (c, d) in pairs}
        assert set(picture.named(f"{prefix}{kind}-.*")) == names
    for kind, now in (("collective", True), ("another-collective", False)):
        count = sum(len(group.members) - 1 for group in moment.collectives if group.now == now)
        assert len(picture.named(f"{prefix}{kind}-.*")) == count


def check_apart(picture: Picture, pattern: str) -> None:
    boxes = list(picture.named(pattern).values())
    for k, one in enumerate(boxes):
        for other in boxes[k + 1 :]:
            beside = one.right < other.left or other.right < one.left
            assert beside or one.upper < other.lower or other.upper < one.lower


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_snapshot_shows_the_moment(name: str, n: int) -> None:
    trace = simulate(name, n)
    picture = drawn(snapshot(trace, 3 * n))
    check_drawn(picture, moment_at(Views(trace), 3 * n))
    check_apart(picture, r"device-d\d+")
    check_apart(picture, r"ring-d.*")
    assert min(text.size for text in picture.texts) >= 6
    assert f"{name}, n = {n}, {'cdp-v2' if name in CYCLIC else 'dp'}, time step {3 * n}" in picture.said()
    held = moment_at(Views(trace), 3 * n).stash
    assert {f"{device}: {size}" for device, size in held.items()} <= set(picture.said())


@pytest.mark.parametrize("name", sorted(set(ALL) - set(SCHEDULES)))
def test_a_snapshot_of_a_pipeline_shows_the_moment(name: str) -> None:
    """The running tasks, and the activations held from a forward to the end of the last part of its backward."""
    trace, slot = simulate(**fitting(name, 4), steps=2), 9
    moment, running = moment_at(Views(trace), slot), defaultdict[tuple[int, int], list[int]](list)
    begun, ended = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    last = "W" if "W" in trace.tasks["kind"] else "B"
    columns = (trace.tasks[column].tolist() for column in ("kind", "device", "stage", "micro_batch", "start", "end"))
    for kind, device, stage, i, start, end in zip(*columns, strict=True):
        if start <= slot < end:
            running[device, stage].append(i)
        begun[device, stage] += kind == "F" and start <= slot
        ended[device, stage] += kind == last and end <= slot
    assert moment.running == running
    assert {place: count for place, count in moment.activations.items() if count} == begun - ended
    picture = drawn(snapshot(trace, slot))
    check_drawn(picture, moment)
    check_apart(picture, r"device-d\d+")


def test_a_collective_goes_around_devices_between_its_members() -> None:
    """Chimera's stage 3 is on the first and the last of four devices, which stand in a row."""
    picture = drawn(snapshot(simulate("chimera", 4, m=8), 7))
    shape = picture.shapes["another-collective-d0-j3-d3-j3"]
    start, control, end = (np.array(point) for point in shape.points)
    disks = picture.named(r"(ring|state)-d[12]-j[12]").values()
    assert len(disks) == 6
    for share in np.linspace(0, 1, 50):
        at = (1 - share) ** 2 * start + 2 * share * (1 - share) * control + share**2 * end
        assert all(np.hypot(*(at - disk.middle)) > (disk.right - disk.left) / 2 for disk in disks)


def test_the_last_slot_of_a_step_has_the_all_reduce() -> None:
    """N stages, N - 1 arrows each, with two heads; dotted at every other slot of the step."""
    trace = simulate("multi-dp", 3)
    shown = [drawn(snapshot(trace, slot)) for slot in (5, 6)]
    assert [len(picture.named("collective.*")) for picture in shown] == [6, 0]
    assert [len(picture.named("another-collective.*")) for picture in shown] == [0, 6]
    assert all("stroke-dasharray" in shape.style for shape in shown[1].named("another.*").values())
    assert not any("stroke-dasharray" in shape.style for shape in shown[0].named("collective.*").values())
    assert (
        "collective" in shown[0].said() and "collective of this training step at another time step" in shown[1].said()
    )


def test_the_key_tells_what_is_there_and_no_more() -> None:
    everything, little = (set(drawn(snapshot(simulate(name, 3), 9)).said()) for name in ("multi-cdp", "mp-dp"))
    always = {"micro-batch computed", "parameters, not in use", "activations held: of 1", "between devices"}
    assert always | {"nothing held", "inside a device"} <= everything and always <= little
    assert {"collective", "collective of this training step at another time step"} <= little - everything
    assert not {"nothing held", "inside a device"} & little
    assert "activations held: of 1, of 3" in drawn(snapshot(simulate("pp-cdp", 3), 9)).said()


def test_arrows_are_thin_inside_devices_and_thick_between_them() -> None:
    picture = drawn(snapshot(simulate("multi-cdp", 4), 12))
    inside, between = (list(picture.named(f"{kind}-.*").values()) for kind in ("inner", "message"))
    assert inside and between
    assert {shape.style.partition("stroke-width: ")[2][:3] for shape in inside} == {"0.6"}
    assert {shape.style.partition("stroke-width: ")[2][:3] for shape in between} == {"1.6"}


@pytest.mark.parametrize(("name", "n", "slot"), [("single-cdp", 4, 9), ("mp-cdp", 4, 12), ("multi-cdp", 4, 12)])
def test_no_arrow_ends_on_a_task_s_name_nor_passes_in_front_of_one(name: str, n: int, slot: int) -> None:
    figure = snapshot(simulate(name, n), slot)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    texts: Any = figure.findobj(Text)
    names = [text for text in texts if re.fullmatch(r"\d[FB]\d", text.get_text()) and text.get_color() == INK]
    arrows: Any = [arrow for arrow in figure.findobj(FancyArrowPatch) if arrow.get_gid()]
    assert names and arrows
    for text in names:
        box, ground = Text.get_window_extent(text), text.get_bbox_patch()
        assert to_hex(ground.get_facecolor()) == DEVICE_FILL
        for arrow in arrows:
            assert text.get_zorder() > arrow.get_zorder()
            ends = arrow.get_path().vertices[[0, 2]]
            assert not any(box.contains(*arrow.get_transform().transform(end)) for end in ends), text.get_text()


@pytest.mark.parametrize("name", ["multi-cdp", "mp-cdp", "multi-dp", "pp-cdp"])
def test_with_real_costs_the_moment_is_a_time(name: str) -> None:
    trace = simulate(name, model=TOY, cluster=BOX)
    now = busiest_moment(Views(trace)) + 0.0002
    moment = moment_at(Views(trace), now)
    tasks, messages = trace.tasks, trace.messages
    runs = (tasks["kind"] != "U") & (tasks["start"] <= now) & (tasks["end"] > now)
    pairs = zip(tasks["device"][runs].tolist(), tasks["stage"][runs].tolist(), strict=True)
    assert Counter({place: len(several) for place, several in moment.running.items()}) == Counter(pairs)
    flying = (messages["op"] == "p2p") & (messages["start"] <= now) & (messages["end"] > now)
    assert len(moment.messages) <= flying.sum() and bool(moment.messages) == flying.any()
    picture = drawn(snapshot(trace, now))
    check_drawn(picture, moment)
    assert " ".join(picture.said()).count(" ms") == 1 and any(words.endswith(" GB") for words in picture.said())
    assert drawn(snapshot(trace, f"{now * 1000:.12f} ms")) == picture


def test_a_message_under_way_is_shown_while_it_is() -> None:
    trace = simulate("mp-dp", model=TOY, cluster=BOX)
    one = int(np.flatnonzero(trace.messages["op"] == "p2p")[0])
    start, end = (trace.messages[name][one].item() for name in ("start", "end"))
    for now, there in ((start - 1e-9, False), (start, True), ((start + end) / 2, True), (end, False)):
        assert bool(moment_at(Views(trace), now).messages) == there


@pytest.mark.parametrize("name", ["mp-cdp", "multi-dp", "zero-dp", "zero-cdp"])
def test_a_loaded_trace_shows_what_its_columns_say(name: str, tmp_path: Path) -> None:
    trace = simulate(name, 3)
    trace.save(tmp_path / "trace")
    moment, loaded = moment_at(Views(trace), 9), moment_at(Views(load(tmp_path / "trace")), 9)
    assert loaded.states is None and not loaded.activations and not loaded.inside
    assert (loaded.running, loaded.messages, loaded.collectives) == (
        moment.running,
        moment.messages,
        moment.collectives,
    )
    assert loaded.stash == moment.stash
    check_drawn(drawn(snapshot(load(tmp_path / "trace"), 9)), loaded)


def handmade(**summary: Any) -> Trace:
    """Two devices with two of four stages each, and a third that only holds something."""
    rows = [("F", j, 0, 0, j % 2, j, j + 1) for j in range(4)]
    names = ("kind", "stage", "micro_batch", "step", "device", "start", "end")
    tasks = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    nothing: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype=np.int64) for name in TABLES["messages"]}
    held = {
        "device": np.array([2]),
        "category": np.array(["activations"]),
        "time": np.array([0]),
        "size": np.array([7]),
    }
    return Trace(tasks, nothing, held, summary)


def test_where_rows_are_no_stages_each_disk_has_its_stage_beside_it() -> None:
    picture = drawn(snapshot(handmade(), 2))
    assert set(picture.named("device-.*")) == {"device-d0", "device-d1", "device-d2"}
    check_apart(picture, "device-.*")
    assert set(picture.named("disk-.*")) == {"disk-d0-j2-i0"}
    assert "stage, beside its disk" in picture.said() and "stage" not in picture.said()
    for stage, device in ((0, 0), (1, 1), (2, 0), (3, 1)):
        box = picture.shapes[f"device-d{device}"]
        assert any(text.words == str(stage) and box.left < text.x < box.right for text in picture.texts)


# The paper's figure


@pytest.fixture(scope="module", params=[1, 3, 4])
def figure(request: pytest.FixtureRequest) -> tuple[int, Picture]:
    return request.param, drawn(figure_2(request.param))


def test_figure_2_shows_all_nine_implementations(figure: tuple[int, Picture]) -> None:
    n, picture = figure
    devices = {"single": 1, "multi": n, "pp": n, "zero": n, "mp": n * n}
    for name in SCHEDULES:
        expected = n * (n + 1) // 2 if name == "mp-cdp" else devices[name.partition("-")[0]]
        assert len(picture.named(rf"{name}-device-d\d+")) == expected
        check_drawn(picture, moment_at(Views(simulate(name, n)), 3 * n), f"{name}-")
    check_apart(picture, r".*device-d\d+")


def test_figure_2_is_without_cdp_above_and_with_it_below(figure: tuple[int, Picture]) -> None:
    n, picture = figure
    titles = ["(a) Single-GPU", "(b) Multi-GPU", "(c) DP with MP", "(d) PP", "(e) ZeRO-DP"]
    at = {text.words: text.x for text in picture.texts}
    assert [at[title] for title in titles] == sorted(at[title] for title in titles)
    for title, family in zip(titles, ("single", "multi", "mp", "pp", "zero"), strict=True):
        above, below = (list(picture.named(rf"{family}-{kind}-device-.*").values()) for kind in ("dp", "cdp"))
        assert bool(above) == (family != "pp")
        assert max(box.upper for box in below) < min((box.lower for box in above), default=picture.height)
        for group in filter(None, (above, below)):
            middle = (min(box.left for box in group) + max(box.right for box in group)) / 2
            assert middle == pytest.approx(at[title], abs=0.1)
    assert {"without CDP", "with CDP", "stage"} <= set(picture.said())
    assert min(text.size for text in picture.texts) >= 6
    assert picture.width < 7 * 72 or n > 3


def test_figure_2_at_another_slot() -> None:
    picture = drawn(figure_2(2, slot=5))
    for name in SCHEDULES:
        check_drawn(picture, moment_at(Views(simulate(name, 2)), 5), f"{name}-")


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".png"])
def test_the_same_request_gives_the_same_bytes(ending: str) -> None:
    one, other = (canvas.rendered(figure_2(2), f"picture{ending}") for _ in range(2))
    assert one == other


# Refusals


@pytest.mark.parametrize(
    ("slot", "problem"),
    [(18, "18 time steps; take 0 to 17"), (-1, "at least 0"), ("x", "whole number"), (1.5, "whole"), (True, "whole")],
)
def test_a_slot_that_the_run_does_not_have_is_refused(slot: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        snapshot(simulate("multi-dp", 3), slot)


@pytest.mark.parametrize("moment", [1e6, "1 h", "-1 s", float("nan"), float("inf"), "99 s"])
def test_a_moment_that_the_run_does_not_have_is_refused(moment: Any) -> None:
    with pytest.raises(RequestError):
        snapshot(simulate("multi-dp", model=TOY), moment)


def test_the_refusal_says_how_long_the_run_is() -> None:
    with pytest.raises(RequestError, match=r"1 s is not in this run, which takes [\d.]+ ms"):
        snapshot(simulate("multi-dp", model=TOY), 1.0)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match=r"25 devices side by side .* 24 and 24 .* \.html"):
        snapshot(simulate("multi-dp", 25, steps=1), 0)
    with pytest.raises(RequestError, match=r"625 devices, of which 576 .* \.html"):
        snapshot(simulate("mp-dp", 25, steps=1), 0)
    with pytest.raises(RequestError, match="n=1000000, but figure 2 has room for 8"):
        figure_2(10**6)
    with pytest.raises(RequestError, match="slot=12 is not one of this run's 12 time steps"):
        figure_2(2, slot=12)


def test_stages_without_end_are_refused_at_once() -> None:
    trace = handmade()
    trace.tasks["stage"][2:] = 10**15
    with pytest.raises(RequestError, match="slot=4"):
        snapshot(trace, 4)
    assert drawn(snapshot(trace, 0)).named("disk-d0-j0-i0")
    trace.tasks["stage"][:] = 10**15
    with pytest.raises(RequestError, match="1000000000000001 rows"):
        snapshot(trace, 0)


def test_a_trace_without_tasks_is_refused() -> None:
    with pytest.raises(RequestError, match="no tasks"):
        snapshot(empty(), 0)


def test_hostile_names_come_out_escaped_and_short() -> None:
    hostile = "</script><b>\n\x07'\"& $x^$ " + "long" * 2500
    figure = snapshot(handmade(request={"schedule": hostile, "n": hostile, "cluster": {"name": hostile}}), 2)
    title = marked(figure, canvas.TITLE)[0].get_text()
    assert title.replace("\n", " ").endswith("…, time step 2") and all(map(str.isprintable, drawn(figure).said()))
    assert "</script>" in title and max(map(len, title.splitlines())) < 100 and len(title) < 400
    assert b"<script" not in canvas.rendered(figure, "picture.svg")
    assert canvas.rendered(figure, "picture.pdf") and canvas.rendered(figure, "picture.png")


def test_devices_of_a_pipeline_stand_side_by_side_with_their_tasks() -> None:
    """In slot 9 of 1F1B with four stages the devices run, from the left, these tasks."""
    picture = read(canvas.rendered(snapshot(simulate("1f1b", 4, m=8), 9), "a.svg"))
    boxes = [picture.shapes[f"device-d{device}"] for device in range(4)]
    assert [box.middle[0] for box in boxes] == sorted(box.middle[0] for box in boxes)
    assert len({round(box.middle[1], 3) for box in boxes}) == 1
    trace = simulate("1f1b", 4, m=8)
    now = (trace.tasks["start"] <= 9) & (trace.tasks["end"] > 9) & (trace.tasks["kind"] != "U")
    tasks = zip(*(trace.tasks[name][now].tolist() for name in ("stage", "kind", "micro_batch")), strict=True)
    labels = {f"{stage}{kind}{i}" for stage, kind, i in tasks}
    assert len(labels) == 4
    assert labels <= set(picture.said())
