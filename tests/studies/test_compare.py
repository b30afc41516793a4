"""Schedules side by side: the specification's metrics for each, in slots, and worked examples with real costs."""

import csv
import io
import json
import re
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.draw.canvas import Look
from cdpsim.draw.study_pictures import bubble_over_memory, comparison_bars
from cdpsim.program import Category
from cdpsim.request.sharing import accepts
from cdpsim.schedules import TABLE_1
from cdpsim.studies.compare import measure
from cdpsim.studies.comparison import compare
from tests.conftest import Command
from tests.helpers.command_line import refuse
from tests.helpers.every_row import every_row
from tests.helpers.figures import one as artist_of
from tests.helpers.strategies import in_seconds, requests
from tests.helpers.svg import read


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_in_slots_all_is_as_the_paper_has_it(n: int) -> None:
    """A step takes 2N slots; every stage is busy in every slot of the cyclic ones, one at a time in the others."""
    found = {name: measure(simulate(name, n)) for name in TABLE_1}
    assert {one.step for one in found.values()} == {2 * n}
    assert {one.micro_batch_rate for one in found.values()} == {0.5}
    assert {one.exposed for one in found.values()} == {0}
    devices = {"single": 1, "multi": n, "pp": n, "zero": n}
    for name, one in found.items():
        if not name.startswith("mp"):
            assert (one.devices, one.bubble) == (devices[name.partition("-")[0]], 0)
    assert (found["mp-dp"].devices, found["mp-cdp"].devices) == (n * n, n * (n + 1) // 2)
    assert found["mp-dp"].bubble == pytest.approx(1 - 1 / n)
    assert found["mp-cdp"].bubble == pytest.approx(1 - 2 / (n + 1))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_is_sent_is_what_algorithms_send(n: int) -> None:
    """Point to point N(N-1) gradients and as many parameters; recursive doubling N log2 N for each stage."""
    assert measure(simulate("multi-cdp", n)).sent == 2 * n * (n - 1)
    assert measure(simulate("pp-cdp", n)).sent == 2 * n * (n - 1)  # activations, and their gradients
    assert measure(simulate("multi-dp", n)).sent == n * n * (n.bit_length() - 1)
    assert measure(simulate("multi-dp", n, collective="ring")).sent == n * 2 * (n - 1)
    assert measure(simulate("single-cdp", n)).sent == 0


@pytest.mark.parametrize("collective", ["best", "hierarchical", "halving-doubling"])
def test_what_is_sent_is_what_messages_are_laid_out_for(collective: str) -> None:
    """An all-reduce in one piece puts as much on wires as its messages do, whichever algorithm a name stands for."""
    asked: dict[str, Any] = {"model": "gpt2", "cluster": "a100-nodes", "collective": collective, "m": 12, "steps": 3}
    expanded = simulate("multi-dp", 2, expand_collectives=True, **asked)
    assert set(expanded.messages["op"]) == {"p2p"}
    assert measure(simulate("multi-dp", 2, **asked)).sent == expanded.messages["size"].sum() / 3


def test_what_is_sent_is_of_a_step_in_steady_state() -> None:
    """States that run ahead of the updates at first carry fewer versions; later as much begins in every step's time."""
    trace = simulate("zero-cdp", 4, model="gpt2", cluster="a100-nodes", steps=12)
    one, messages = measure(trace), trace.messages
    assert one.step is not None
    for k in (6, 7, 8):
        begun = (messages["start"] >= k * one.step) & (messages["start"] < (k + 1) * one.step)
        assert messages["size"][begun].sum() == one.sent


def test_what_waits_for_an_all_reduce_is_exposed() -> None:
    """Two devices work 2 x 3 s and then reduce 2 x 1 GB over 1 GB/s, both stages at once, in one round."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=10**9),) * 2)
    cluster = Cluster(link=Link(bandwidth=1e9))
    one = measure(simulate("multi-dp", model=model, cluster=cluster, steps=5))
    assert one.step == pytest.approx(7)
    assert one.exposed == pytest.approx(1 / 7)
    assert one.bubble == pytest.approx(one.exposed, abs=1e-12)
    assert one.micro_batch_rate == pytest.approx(2 / 7)
    assert (one.parameters, one.gradients, one.sent) == (2 * 10**9, 2 * 10**9, 4 * 10**9)


def test_waiting_for_a_slower_device_is_no_waiting_for_messages() -> None:
    """One device works 6 s, the other 12; both wait 1 s for the reductions, of 13 s a step."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)
    one = measure(simulate("multi-dp", model=model, cluster=Cluster(link=Link(latency=1.0)), slow=["1:2"]))
    assert [one.step, one.exposed, one.bubble] == pytest.approx([13, 2 / 26, 8 / 26])


def test_what_a_stream_blocks_is_exposed() -> None:
    """The same in one stream with the tasks: one reduction of 1 s after another, and no task beside the second."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=10**9),) * 2)
    cluster = Cluster(devices=(Devices(overlap="none"),), link=Link(bandwidth=1e9))
    one = measure(simulate("multi-dp", model=model, cluster=cluster, steps=5))
    assert one.step == pytest.approx(8)
    assert one.exposed == pytest.approx(2 / 8)
    assert one.bubble == pytest.approx(one.exposed, abs=1e-12)


@given(requests(most=4))
@settings(max_examples=40)
def test_what_is_measured_is_in_the_summary(request: dict[str, object]) -> None:
    """Peaks, of the run in steady state, makespan and period; idle time is no less than what waits for messages."""
    trace = simulate(**request)  # type: ignore[arg-type]
    one, summary = measure(trace), trace.summary()
    assert (one.devices, one.makespan) == tuple(summary[key] for key in ("devices", "makespan"))
    assert (one.step, one.period_is) == (Fraction(summary["period"]), summary["period_is"])
    longer = simulate(**request | {"steps": trace.steady_state.run.program.steps})  # type: ignore[arg-type]
    for name in (*(category.name.lower() for category in Category), "total"):
        most = max(row[name] for row in longer.summary()["peak_memory"])
        assert most == (one.memory if name == "total" else getattr(one, name))
    assert 0 <= one.exposed <= one.bubble <= 1


@pytest.mark.parametrize("model", ["unit", "gpt2"])
def test_measuring_sorts_no_columns(model: str) -> None:
    """Rows are sorted only when the tables for files are read, because sorting costs more than the run."""
    trace = simulate("1f1b", 4, m=8, model=model, cluster="unit" if model == "unit" else "a100-nodes")
    assert trace.in_slots == (model == "unit")
    measure(trace)
    assert not {"tasks", "messages", "memory"} & set(vars(trace))


def test_all_schedules_are_compared_in_every_form(command: Command, here: Path) -> None:
    """But those that cannot be asked for that; most micro-batches per slot and device first."""
    done = command("compare", "-n", 4, "--format", "json")
    found = json.loads(done.out)
    assert {one["schedule"] for one in found} == set(SCHEDULES) - {"dualpipe"}
    assert done.err.splitlines() == [
        "cdpsim: a backward takes two slots, because some of these schedules split it (--model unit-split)",
        "cdpsim: left out because of m: dualpipe (by its name each says why)",
    ]
    rates = [round(one["rate"] * one["n"] / one["devices"], 9) for one in found]
    assert rates == sorted(rates, reverse=True)
    head, _, table = command("compare", "-n", 4).out.partition("\n\n")
    assert head == "a backward takes two slots, because some of these schedules split it (--model unit-split)"
    assert table.startswith("schedule ")
    assert len({one["makespan"] / one["step"] for one in found if one["schedule"].startswith("multi")}) == 2
    rows = list(
        csv.DictReader(io.StringIO(command("compare", *TABLE_1, "-n", 3, "--sort", "given", "--format", "csv").out))
    )
    assert [row["devices"] for row in rows] == ["1", "1", "3", "3", "9", "6", "3", "3", "3"]
    for form in ("text", "latex"):
        assert "mp-cdp" in command("compare", "-n", 3, "--format", form).out


def test_an_option_is_for_those_that_take_it(command: Command) -> None:
    """Schedules with chunks need fewer devices; cyclic ones share M micro-batches, of which others have N."""
    done = command("compare", "-n", 4, "-m", 8, "--chunks", 2, "--format", "json")
    devices = {one["schedule"]: one["devices"] for one in json.loads(done.out)}
    assert {name: count for name, count in devices.items() if count == 2} == dict.fromkeys(
        ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"), 2
    )
    assert {name: devices[name] for name in ("multi-cdp", "pp-cdp", "mp-cdp")} == {
        "multi-cdp": 4,
        "pp-cdp": 4,
        "mp-cdp": 10,
    }
    assert not {"single-dp", "zero-dp"} & set(devices)
    assert "left out because of m: single-dp, zero-dp (" in done.err


NAMED: dict[str, dict[str, str]] = {
    "--prefetch 2": {"multi-cdp": "--prefetch 2", "zero-cdp": "--prefetch 2"},
    "--collective ring": dict.fromkeys(
        ("single-dp", "multi-dp", "multi-cdp", "zero-cdp", "pp-cdp"), "--collective ring"
    ),
    "--replicas 2": {"pp-cdp": "--replicas 2"},
    "--replicas 2 --collective ring": dict.fromkeys(
        ("single-dp", "multi-dp", "multi-cdp", "zero-cdp"), "--collective ring"
    )
    | {"pp-cdp": "--replicas 2 --collective ring"},
    "--slow 0:2 --link-jitter uniform:0.3 --seed 4": dict.fromkeys(
        ("single-dp", "multi-dp", "multi-cdp", "zero-cdp", "pp-cdp"), "--slow 0:2 --link-jitter uniform:0.3 --seed 4"
    ),
}


@pytest.mark.parametrize("asked", NAMED)
def test_an_option_is_for_those_of_the_named_that_take_it(asked: str, command: Command, here: Path) -> None:
    """The others run without the option, and one line names them."""
    names, given = ("single-dp", "multi-dp", "multi-cdp", "zero-cdp", "pp-cdp"), "--model toy.toml --cluster box.toml"
    done = command("compare", *names, *given.split(), *asked.split(), "--sort", "given", "--format", "json")
    assert done.code == 0
    for row, name in zip(json.loads(done.out), names, strict=True):
        own = NAMED[asked].get(name, "")
        assert [row] == json.loads(command("compare", name, *given.split(), *own.split(), "--format", "json").out)
    options = [word for word in asked.split() if word.startswith("--")]
    without = {option: [name for name in names if option not in NAMED[asked].get(name, "")] for option in options}
    said = [f"cdpsim: {option}: not taken by {', '.join(some)}" for option, some in without.items() if some]
    assert sorted(done.err.splitlines()) == sorted(said)


def test_of_all_schedules_one_line_names_those_that_do_not_take_an_option(command: Command) -> None:
    done = command("compare", "-n", 4, "--model", "unit-split", "--prefetch", 1, "--format", "json")
    accepting = {name for name, schedule in SCHEDULES.items() if accepts(schedule, "prefetch")}
    (line,) = [line for line in done.err.splitlines() if "prefetch" in line]
    begin, _, named = line.partition(" not taken by ")
    assert begin == "cdpsim: --prefetch:"
    assert {*named.split(", ")} == {one["schedule"] for one in json.loads(done.out)} - accepting


def test_columns_say_what_a_run_measures() -> None:
    """Versions and their age, messages of a step and their rounds: for pipelines, and as Table 1 has them."""
    one = measure(simulate("pipedream", 4, steps=16))
    assert (one.versions, one.messages, one.rounds) == (4, 6, 1)
    assert one.staleness == pytest.approx(sum((3, 2, 1, 0)) / 4, rel=0.2)  # younger ones in the first steps
    zero = measure(simulate("zero-dp", 4))
    assert (zero.versions, zero.rounds) == (1, 4)
    assert measure(simulate("multi-cdp", 4)).messages == 2 * 4 * 3
    real = measure(simulate("multi-cdp", model=in_seconds(4), cluster=Cluster(link=Link(latency=1.0))))
    assert real.rounds is None


def test_only_those_that_fit_are_shown(command: Command, here: Path) -> None:
    line = "compare gpipe 1f1b zb-h2 -n 4 -m 8 --format json"
    said = "cdpsim: a backward takes two slots, because some of these schedules split it (--model unit-split)\n"
    every = json.loads(command(*line.split()).out)
    some = json.loads(command(*line.split(), "--within", 6).out)
    assert some == [one for one in every if one["memory"] <= 6]
    assert [one["schedule"] for one in some] == ["1f1b"]
    none = command(*line.split(), "--within", 1)
    assert (none.code, none.out, none.err) == (1, "", said + "cdpsim: no schedule holds at most 1 on a device\n")
    sized = command("compare", "multi-dp", "--model", "toy.toml", "--cluster", "box.toml", "--within", "1 kB")
    assert (sized.code, sized.err) == (1, "cdpsim: no schedule holds at most 1 kB on a device\n")


def test_points_show_bubble_over_memory(command: Command, here: Path) -> None:
    """One point for each different pair of memory (x) and bubble (y), also where several schedules share it."""
    line = "compare gpipe 1f1b zb-h1 zb-h2 chimera -n 4 -m 8 --format json --style points -o x.svg"
    found = json.loads(command(*line.split()).out)
    picture = read((here / "x.svg").read_bytes())
    pairs = sorted({(one["memory"], one["bubble"]) for one in found})
    drawn = re.findall(
        r'id="point-(\d+)".*?<use [^>]*x="([0-9.]+)" y="([0-9.]+)"', (here / "x.svg").read_text(), re.DOTALL
    )
    assert [int(k) for k, *_ in drawn] == list(range(len(pairs)))
    points = [(float(x), -float(y)) for _, x, y in drawn]  # upwards
    for axis in (0, 1):  # linear, so that distances are in proportion
        values, places = ([pair[axis] for pair in pairs], [point[axis] for point in points])
        low, high = np.argmin(values), np.argmax(values)
        shares = [(value - values[low]) / (values[high] - values[low]) for value in values]
        assert [(place - places[low]) / (places[high] - places[low]) for place in places] == pytest.approx(shares)
    said = picture.said()
    for one in found:
        assert any(one["schedule"] in words for words in said)
    assert "best-of-4" in picture.shapes


def test_a_key_names_each_point_and_fronts_are_of_equal_devices() -> None:
    """By colour and shape, which no two points share."""
    comparison = compare(n=4)
    figure = bubble_over_memory(comparison)
    pairs = sorted({(one.memory, one.bubble) for one in comparison.measured})
    marks = [artist_of(figure, f"point-{number}") for number in range(len(pairs))]
    looks = [(mark.get_color(), mark.get_marker()) for mark in marks]
    assert len(set(looks)) == len(looks)
    (key,) = figure.legends
    entries: Any = zip(key.get_texts(), key.legend_handles, strict=True)
    named = {(handle.get_color(), handle.get_marker()): text.get_text() for text, handle in entries}
    for run in comparison.measured:
        look = looks[pairs.index((run.memory, run.bubble))]
        assert f"{run.schedule} ({run.devices})" in named[look].replace("\n", " ")
    for devices in {one.devices for one in comparison.measured}:
        front = list(zip(*artist_of(figure, f"best-of-{devices}").get_data(), strict=True))
        own = {(run.memory, run.bubble) for run in comparison.measured if run.devices == devices}
        best = {point for point in own if not any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in own)}
        assert set(front) == best


def test_a_point_of_a_run_that_does_not_fit_is_hollow(here: Path) -> None:
    (here / "small.toml").write_text('[devices]\nmemory = "9 GB"\n[link]\nbandwidth = "1 GB/s"\n')
    comparison = compare("single-dp", "multi-dp", "pp-cdp", model=here / "toy.toml", cluster=here / "small.toml")
    figure = bubble_over_memory(comparison)
    runs = sorted(comparison.measured, key=lambda one: (one.memory, one.bubble))
    hollow = [artist_of(figure, f"point-{k}").get_markerfacecolor() == "white" for k in range(len(runs))]
    assert hollow == [not one.fits for one in runs]
    assert set(hollow) == {True, False}
    assert "hollow: more than a device has" in figure.legends[0].get_title().get_text()


@pytest.mark.slow
@pytest.mark.parametrize("picture", [bubble_over_memory, comparison_bars])
@pytest.mark.parametrize("place", ["column", "page"])
def test_pictures_of_comparisons_fit_their_place(picture: Callable[..., Figure], place: str) -> None:
    """No word of a picture for a paper is cut by its edge, or stands on another; bars take a quarter of a panel."""
    lists = [name for name, schedule in SCHEDULES.items() if schedule.order.lists and not schedule.order.local]
    names = lists if place == "column" else []  # which has no room for more
    comparison = compare(*names, devices=8, batch=256, model="llama2-7b", cluster="a100-nodes")
    figure = picture(comparison, Look(place=place))
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    unseen = [
        tick
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for at, tick in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)  # columns have none
        if not min(axis.get_view_interval()) <= at <= max(axis.get_view_interval())
    ]
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in unseen]
    boxes = [Text.get_window_extent(text) for text in texts]  # of the words, without a line to them
    for box in boxes:
        assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1 and box.y0 >= -1 and box.y1 <= figure.bbox.height + 1
    pairs = [(a, b) for k, a in enumerate(boxes) for b in boxes[:k]]
    over = [(a, b) for a, b in pairs if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 3]
    assert not over
    for axes in figure.axes:
        bars = [patch.get_window_extent().width for patch in axes.patches]
        assert not bars or max(bars) > 0.25 * axes.get_window_extent().width


def test_points_are_refused_where_their_key_leaves_no_room(command: Command, here: Path) -> None:
    line = "compare -n 8 -q --style points --width 4 --height 2 -o x.png"
    refuse(command, here, line, "height: leaves no room for the panels above the key; draw less, or use --no-legend")


def test_letters_that_no_font_has_are_drawn_without_a_warning(command: Command, here: Path) -> None:
    (here / "m.toml").write_text((here / "toy.toml").read_text().replace('"toy"', '"\u6f22\u5b57"'))
    drawn = command("timeline", "1f1b", "--model", "m.toml", "--cluster", "box.toml", "-o", "x.png")
    assert (drawn.code, drawn.err) == (0, "")


def test_an_order_from_a_file_is_timed_and_measured(command: Command, here: Path) -> None:
    """The order that `timeline -o FILE.csv` writes runs as the schedule itself does."""
    assert command(*["timeline", "zb-h1", "-n", "4", "-m", "8", "-o", "mine.csv"]).code == 0
    mine = json.loads(command("import-schedule", "mine.csv", "--format", "json", "-o", "traces").out)
    own = measure(simulate("zb-h1", 4, m=8)).to_builtins()
    assert mine == own | {"schedule": "mine.csv"}
    assert command(*["simulate", "zb-h1", "-n", "4", "-m", "8", "-o", "own"]).code == 0
    for name in ("tasks.csv", "messages.csv", "memory.csv"):
        assert (here / "traces" / name).read_bytes() == (here / "own" / name).read_bytes()
    assert reopen("traces") is not None
    out = command("import-schedule", "mine.csv").out
    assert "devices        4" in out
    refuse(command, here, "import-schedule mine.csv -n 3", "n=3, but mine.csv has 4 stages; leave it out")
    refuse(command, here, "import-schedule mine.csv -m 3", "mine.csv does not take this option")
    (here / "bad.csv").write_text("0F0,0B0\n1F0\n")
    refuse(command, here, "import-schedule bad.csv", "bad.csv: row 1, cell 0: 1F0 lacks 1B0; add what is missing")
    both = command("compare", "zb-h1", "mine.csv", "-n", 4, "-m", 8, "--format", "csv").out.splitlines()
    assert both[1].split(",")[2:] == both[2].split(",")[2:]


def test_the_least_comes_first(command: Command, here: Path) -> None:
    lines = ["compare", *TABLE_1, "--model", "toy.toml", "--cluster", "box.toml", "--format", "json", "--sort"]
    for column in ("memory", "step", "sent"):
        values = [one[column] for one in json.loads(command(*lines, column).out)]
        assert values == sorted(values)


def test_numbers_have_units(command: Command, here: Path) -> None:
    out = command("compare", "multi-dp", "--model", "toy.toml", "--cluster", "box.toml", "--columns", "all").out
    assert "GB" in out
    assert " s " in out


def test_a_model_of_samples_is_measured_in_samples(command: Command, here: Path) -> None:
    """Three micro-batches a step, of 24 samples each; a table has one of the two rates, JSON both."""
    toy = (here / "toy.toml").read_text()
    (here / "known.toml").write_text("samples = 24\n" + toy)
    asked = ["compare", "multi-dp", "pp-cdp", "--cluster", "box.toml", "--model"]
    plain, known = (json.loads(command(*asked, name, "--format", "json").out) for name in ("toy.toml", "known.toml"))
    assert [one["samples"] for one in plain] == [None, None]
    of_samples = ("samples", "sample_time", "per_device", "batch")
    for one, same in zip(known, plain, strict=True):
        assert one.pop("setting") == "toy, 24 samples a micro-batch, box"
        assert same.pop("setting") == "toy, box"
        assert one | {name: same[name] for name in of_samples} == same
        assert one["samples"] == pytest.approx(24 * 3 / one["step"])
        assert (one["batch"], one["sample_time"]) == (24 * 3, pytest.approx(one["step"] / 24 / 3))
        assert one["per_device"] == pytest.approx(24 * 3 / one["step"] / one["devices"])
    for form in ("text", "latex"):
        for name, own, other in (("toy.toml", "micro-batches", "samples"), ("known.toml", "samples", "micro-batches")):
            header = command(*asked, name, "--format", form).out
            assert own in header
            assert other not in header
    cells = list(csv.DictReader(io.StringIO(command(*asked, "known.toml", "--format", "csv").out)))
    assert [float(cell["samples"]) for cell in cells] == [one["samples"] for one in known]
    text = command(*asked, "known.toml").out
    assert all(f" {one['samples']:.4g} /s " in text for one in known)
    command(*asked, "known.toml", "-o", "known.svg")
    picture = read((here / "known.svg").read_bytes())
    assert "samples-1" in picture.shapes
    assert "rate-0" not in picture.shapes
    assert {"samples per second", f"{known[0]['samples']:.3g}"} <= {*picture.said()}


def test_what_does_not_fit_is_compared_all_the_same(command: Command, here: Path) -> None:
    """Ten of its micro-batches weigh more than a device has; the others have one device each."""
    (here / "small.toml").write_text('[devices]\nmemory = "9 GB"\n')
    lines = ["compare", "single-dp", "pp-cdp", "mp-cdp", "--model", "toy.toml", "--cluster", "small.toml"]
    found = json.loads(command(*lines, "--format", "json").out)
    assert [one["fits"] for one in found] == [one["memory"] <= 9e9 for one in found]
    assert [one["fits"] for one in found] == [False, True, True]
    table, about = command(*lines).out.split("\n\n")
    cells = [re.split("  +", line) for line in table.splitlines()]
    assert [row[cells[0].index("fits")] for row in cells[2:]] == ["no", "yes", "yes"]
    assert "a cluster; memory is without CUDA context and allocator reserve\n" in about


REFUSALS = {
    "compare": ["n: is missing"],
    "compare multi-dp lost -n 3": ["unknown schedule 'lost'"],
    "compare -n 3 --sort colour": ["unknown sort 'colour'; known are throughput, given, devices, n, m"],
    "compare -n 3 -m 0": ["m=0 must be at least 1"],
    "compare -n 3 --chunks no": ["chunks=no must be a whole number"],
    "compare -n 3 --style pie": ["unknown style 'pie'; known are bars, points"],
    "compare -n 3 --within much": ["within=much must be a whole number"],
    "compare chimera -n 3": ["chimera needs an even number of devices; devices=3"],
    "compare lost.csv": ["lost.csv: no such file"],
    "import-schedule": ["FILE.csv"],
    "import-schedule 1f1b": ["1f1b: "],
    "timeline pp-cdp -n 3 -o pp.csv": ["pp-cdp has no order of a step alone"],
    "compare -n 3 --format yaml": ["unknown format 'yaml'"],
    "compare multi-dp --prefetch 2 -n 3": ["prefetch: multi-dp does not take this option"],
    "compare multi-dp mp-dp --prefetch 2 -n 4": ["prefetch: multi-dp does not take this option", "multi-cdp"],
}


@every_row("line", REFUSALS)
def test_what_cannot_be_compared_is_one_line(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])


def test_a_picture_shows_each_schedule_in_its_row(command: Command, here: Path) -> None:
    """Bars as long as their values, idle time with its exposed part, and what does not fit by name."""
    (here / "small.toml").write_text('[devices]\nmemory = "9 GB"\n[link]\nbandwidth = "1 GB/s"\n')
    lines = ["compare", "single-dp", "multi-dp", "pp-cdp", "--model", "toy.toml", "--cluster", "small.toml"]
    found = json.loads(command(*lines, "--format", "json", "-o", "x.svg").out)
    picture = read((here / "x.svg").read_bytes())
    for field in ("step", "rate", "bubble", "exposed", "memory", "sent", "devices"):
        bars = [picture.shapes[f"{field}-{row}"] for row in range(3)]
        longest = max(range(3), key=lambda row: found[row][field])
        scale = (bars[longest].right - bars[longest].left) / found[longest][field]
        for row, bar in enumerate(bars):
            assert bar.right - bar.left == pytest.approx(found[row][field] * scale, abs=0.1)
    places = [picture.shapes[f"step-{row}"].middle[1] for row in range(3)]
    assert places == sorted(places, reverse=True)
    assert sum(words.endswith(" !") for words in picture.said()) == [one["fits"] for one in found].count(False)
    refuse(command, here, "compare -n 3 -o x.svg", "x.svg: already exists; --force overwrites")
    refuse(command, here, "compare -n 3 -o x.html", "its form is unknown; end its name in .png, .svg, .pdf")


def test_many_runs_have_quantiles_of_their_steps(command: Command, here: Path) -> None:
    """Those of as many single runs; all else is of run 0."""
    line = "compare multi-dp pp-cdp --model toy.toml --cluster box.toml --steps 4 --jitter lognormal:0.3"
    found = json.loads(command(*line.split(), "--runs", 20, "--format", "json").out)
    alone = json.loads(command(*line.split(), "--format", "json").out)
    for one, other in zip(found, alone, strict=True):
        taken = one.pop("steps")
        assert one == other
        asked: dict[str, Any] = {
            "model": here / "toy.toml",
            "cluster": here / "box.toml",
            "steps": 4,
            "jitter": "lognormal:0.3",
        }
        periods = [simulate(one["schedule"], run=run, **asked).summary()["period"] for run in range(20)]
        cuts = statistics.quantiles(periods, n=20, method="inclusive")
        expected = [min(periods), *(cuts[k] for k in (0, 4, 9, 14, 18)), max(periods), statistics.mean(periods)]
        assert list(taken.values()) == pytest.approx(expected)
    rows = list(
        csv.DictReader(io.StringIO(command(*line.split(), "--runs", 20, "--format", "csv", "--sort", "95%").out))
    )
    assert [name for name in rows[0] if name.startswith("step ")] == ["step 5%", "step 50%", "step 95%"]


def test_a_picture_of_many_runs_shows_where_their_steps_lie(command: Command, here: Path) -> None:
    """The bar is the median, a line reaches from the 5 % to the 95 % quantile, in the same measure."""
    line = "compare multi-dp pp-cdp --model toy.toml --cluster box.toml --jitter lognormal:0.5 --runs 20 --format json"
    found = json.loads(command(*line.split(), "-o", "x.svg").out)
    picture = read((here / "x.svg").read_bytes())
    for row, one in enumerate(found):
        bar, reach = picture.shapes[f"step-{row}"], picture.shapes[f"step-{row}-from-5-to-95"]
        scale = (bar.right - bar.left) / one["steps"]["50%"]
        assert reach.right - bar.left == pytest.approx(one["steps"]["95%"] * scale, abs=0.1)
        assert reach.left - bar.left == pytest.approx(one["steps"]["5%"] * scale, abs=0.1)
    assert any("the median of the runs" in words for words in picture.said())


def test_a_plot_has_one_clock(command: Command, here: Path) -> None:
    """Of several schedules in slots a backward takes as long as those that are split, as in a comparison."""
    line = "plot memory gpipe zb-h1 -n 4 -m 8 -o"
    done = command(*line.split(), "both.svg")
    assert "a backward takes two slots" in done.err
    assert command(*line.split(), "split.svg", "--model", "unit-split").err == ""
    assert (here / "both.svg").read_bytes() == (here / "split.svg").read_bytes()
    assert command(*line.replace("zb-h1", "1f1b").split(), "alone.svg").err == ""
