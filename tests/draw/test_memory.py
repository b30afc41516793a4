"""Memory over time as it is drawn, held against sums over the rows of memory.csv and the numbers of the paper."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.figure import Figure

from cdpsim import Model, RequestError, Stage, Trace, simulate
from cdpsim.draw.canvas import rendered
from cdpsim.draw.curves import PIXEL_COLUMNS, memory_over_time, traffic_over_time
from cdpsim.draw.version_strips import versions_over_time
from tests.helpers.figures import BOX, HOSTILE, PAPER, at, held_at, marked, model, one, saved, spot, words
from tests.helpers.made_traces import changed, empty
from tests.helpers.strategies import requests
from tests.helpers.svg import drawn

CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "communication")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("name", "n"), [*((name, 3) for name in PAPER), ("single-cdp", 1), ("multi-dp", 1)])
def test_in_each_slot_each_part_is_as_high_as_the_sum_of_what_devices_hold(name: str, n: int) -> None:
    trace = simulate(name, n)
    figure = memory_over_time([trace])
    parts = {category: marked(figure, f"held-{category}") for category in CATEGORIES}
    below = dict.fromkeys(range(trace.summary()["makespan"]), 0)
    for category, patches in parts.items():
        for slot in below:
            expected = sum(size for (_, held), size in held_at(trace, slot).items() if held == category)
            assert sum(at(patch, slot) for patch in patches) == expected
            below[slot] += expected
    assert [at(one(figure, "held-total"), slot) for slot in below] == list(below.values())
    assert spot(one(figure, "peak")) == (max(below, key=lambda slot: below[slot]), max(below.values()))


@settings(max_examples=10)
@given(requests(most=4))
def test_peaks_of_devices_are_those_of_the_summary(request: dict[str, Any]) -> None:
    trace = simulate(**request)
    figure = memory_over_time([trace])
    peaks = [row["total"] for row in trace.summary()["peak_memory"]]
    if len(peaks) == 1:
        assert spot(one(figure, "peak"))[1] == peaks[0]
    else:
        drawn = [marked(figure, f"peak-{device}") for device in range(len(peaks))]
        shown = [spot(marks[0])[1] for marks in drawn if marks]
        assert sorted(shown) == sorted(filter(None, sorted(peaks)[-12:]))
        assert shown == [peak for peak, marks in zip(peaks, drawn, strict=True) if marks]


@pytest.mark.parametrize("name", ["multi-cdp", "zero-dp"])
def test_with_real_costs_each_device_is_drawn_as_its_rows_say(name: str) -> None:
    trace = simulate(name, model=model(3), cluster=BOX)
    figure = memory_over_time([trace])
    for time in np.random.default_rng(0).uniform(0, trace.summary()["makespan"], 40).tolist():
        now = held_at(trace, time)
        for device in range(trace.summary()["devices"]):
            expected = sum(size for (holder, _), size in now.items() if holder == device)
            assert at(one(figure, f"device-{device}-total"), time) == expected
        assert at(one(figure, "held-total"), time) == pytest.approx(sum(now.values()))


def test_rounding_holds_nothing_twice() -> None:
    """One device takes what another frees at the same time, which floating-point numbers reach on different ways."""
    equal = Model(stages=(Stage(forward=0.1, backward=0.1, activation=1, parameters=1),) * 7)
    trace = simulate("multi-cdp", model=equal, steps=4)
    assert len(np.unique(trace.memory["time"])) > len(np.unique(trace.memory["time"].round(6)))
    assert np.nanmax(one(memory_over_time([trace]), "held-activations").get_data().values) == 7 * 8 / 2


def test_of_a_long_run_the_times_that_a_page_can_show_are_drawn() -> None:
    """Each with its own sum; the least and the most of each column of pixels are among them."""
    trace = simulate("pp-cdp", 4, steps=1200)
    columns = (trace.memory[name].tolist() for name in ("device", "category", "time", "size"))
    held: dict[tuple[int, str], int] = {}
    total: dict[int, int] = {}
    for device, category, time, size in sorted(zip(*columns, strict=True), key=lambda row: row[2]):
        held[device, category] = size
        total[time] = sum(held.values())
    values, edges, _ = one(memory_over_time([trace]), "held-total").get_data()
    assert len(values) <= 4 * PIXEL_COLUMNS < len(total)
    assert {time: total[time] for time in edges[:-1].tolist()} == dict(
        zip(edges.tolist(), values.tolist(), strict=False)
    )
    end, extremes = trace.summary()["makespan"], dict[tuple[str, int], tuple[int, int]]()
    for name, heights in (("all", total), ("shown", dict(zip(edges.tolist(), values.tolist(), strict=False)))):
        for time, value in heights.items():
            place = name, min(int(time / end * PIXEL_COLUMNS), PIXEL_COLUMNS - 1)
            low, high = extremes.get(place, (value, value))
            extremes[place] = min(low, value), max(high, value)
    assert all(extremes["shown", column] == extremes["all", column] for _, column in extremes)


@pytest.mark.parametrize("n", range(1, 7))
def test_activations_are_what_the_paper_says(n: int) -> None:
    figure = memory_over_time([simulate("multi-dp", n), simulate("multi-cdp", n)], sums=True)
    dp, cdp = one(figure, "activations-0"), one(figure, "activations-1")
    for step in range(3):
        assert [at(dp, 2 * n * step + slot) for slot in (n - 1, n)] == [n * n] * 2
    assert max(dp.get_data().values) == n * n
    assert {at(cdp, slot) for slot in range(2 * (n - 1), 6 * n)} == {n * (n + 1) / 2}
    assert spot(one(figure, "activations-1-peak")) == (2 * (n - 1), n * (n + 1) / 2)
    lines = {n * n, n * (n + 1) // 2}
    assert {one(figure, f"level-{value}").get_ydata()[0] for value in lines} == lines


def test_the_papers_lines_stand_where_they_apply(tmp_path: Path) -> None:
    def lines(trace: Trace) -> list[Any]:
        return [text for text in words(memory_over_time([trace])) if "BΨA" in text]

    trace = simulate("multi-cdp", 4)
    assert lines(trace) == ["N·BΨA = 16", "(N+1)/2·BΨA = 10"]
    assert not lines(simulate("multi-cdp", model=model(4), cluster=BOX))
    assert not lines(simulate("1f1b", 4))  # of which the paper says nothing
    other = saved(trace, tmp_path / "trace")
    assert lines(other) == ["N·BΨA = 16", "(N+1)/2·BΨA = 10"]
    other.summary()["request"]["m"] = 8
    assert not lines(other)


def test_the_picture_itself_shows_them() -> None:
    """Read from the SVG: the flat part of CDP lies on the line (N+1)/2·BΨA, and DP's peak on N·BΨA."""
    tree = ElementTree.fromstring(
        rendered(memory_over_time([simulate("multi-dp", 4), simulate("multi-cdp", 4)], sums=True), "a.svg")
    )

    def heights(gid: str) -> list[float]:
        (group,) = (group for group in tree.iter(f"{SVG}g") if group.get("id") == gid)
        paths = [path.attrib["d"] for path in group.iter(f"{SVG}path")]
        return [float(y) for path in paths for y in re.findall(r"[ML] \S+ (\S+)", path)]

    assert min(heights("activations-0")) == pytest.approx(heights("level-16")[0])
    assert min(heights("activations-1")) == pytest.approx(heights("level-10")[0])
    shown = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert "multi-dp, dp: activations peak 16 at slot 3; everything peak 36 at slot 4" in shown


def test_of_several_runs_the_fullest_device_is_drawn() -> None:
    """1F1B holds 4, 3, 2, 1 stage-activations on its devices, GPipe m on each, multi-DP n."""
    runs = [simulate("1f1b", 4, m=8), simulate("gpipe", 4, m=8), simulate("multi-dp", 4)]
    figure = memory_over_time(runs)
    assert [spot(one(figure, f"activations-{k}-peak"))[1] for k in range(3)] == [4, 8, 4]
    peaks = [max(row["total"] for row in run.summary()["peak_memory"]) for run in runs]
    assert [spot(one(figure, f"everything-{k}-peak"))[1] for k in range(3)] == peaks
    assert any(
        text.startswith("1f1b") and "activations peak 4 at slot 3 on device 0;" in text for text in words(figure)
    )


def test_the_end_of_a_run_is_pale_from_where_a_device_lets_go_of_its_parameters() -> None:
    """Device k of cyclic training ends its third step 2 k slots after the first device, which ends at 6 n."""
    figure = memory_over_time([simulate("multi-cdp", 4)])
    pale = {name: one(figure, name) for name in ("pale", "pale-0", "pale-1", "pale-2")}
    begins = {name: patch.get_path().get_extents(patch.get_patch_transform()).x0 for name, patch in pale.items()}
    assert begins == {"pale": 24, "pale-0": 24, "pale-1": 26, "pale-2": 28}
    assert not marked(figure, "pale-3"), "the last one ends with the run"


@pytest.mark.parametrize(("steps", "note"), [(5, "; in steady state a device holds 17"), (40, "")])
def test_a_picture_says_where_a_run_does_not_reach_steady_state(steps: int, note: str) -> None:
    """Of PipeDream, 8 stages: then the first one has 8 activations, 8 versions and a gradient."""
    run = simulate("pipedream", 8, steps=steps)
    assert f"pipedream, n = 8, m = 1, newest{note}" in words(memory_over_time([run]))
    said = " ".join(words(memory_over_time([run, simulate("pp-cdp", 8)]))).replace("\n", " ")
    assert ("on device 0; in steady state a device holds 17" in said) == bool(note)


def test_of_many_devices_the_fullest_are_shown() -> None:
    trace = simulate("mp-cdp", 5)
    figure = memory_over_time([trace])
    peaks = {row["device"]: row["total"] for row in trace.summary()["peak_memory"]}
    shown = {device for device in peaks if marked(figure, f"peak-{device}")}
    assert len(shown) == 12
    assert min(peaks[device] for device in shown) >= max(peaks[device] for device in peaks.keys() - shown)
    assert any(line.startswith("Held by the 12 fullest of 15 devices; others' peaks: ") for line in words(figure))


def test_the_others_of_many_devices_have_their_peaks_named() -> None:
    """Device d of 1F1B holds the activations of n - d micro-batches, its parameters and their gradients."""
    figure = memory_over_time([simulate("1f1b", 16, steps=1)])
    assert f"Held by the 12 fullest of 16 devices; others' peaks: {16 - 15 + 2} to {16 - 12 + 2}" in words(figure)


@pytest.mark.parametrize(("real", "forms"), [(False, ("a.svg",)), (True, ("a.pdf", "a.png"))])
def test_the_same_request_gives_the_same_bytes_also_from_files(
    real: bool, forms: tuple[str, ...], tmp_path: Path
) -> None:
    def trace() -> Trace:
        return simulate("single-cdp", model=model(3), cluster=BOX) if real else simulate("mp-dp", 2)

    first = saved(trace(), tmp_path / "trace")
    for form in forms:
        assert rendered(memory_over_time([trace()]), form) == rendered(memory_over_time([first]), form)


@pytest.mark.parametrize("draw", [memory_over_time, traffic_over_time, versions_over_time])
def test_ids_are_unique(draw: Callable[[Sequence[Trace]], Figure]) -> None:
    for traces in ([simulate("mp-cdp", 3)], [simulate("mp-dp", 2), simulate("mp-cdp", 3)]):
        assert drawn(draw(traces)).shapes


def test_a_hostile_name_stays_text() -> None:
    trace = simulate("single-cdp", model=msgspec.structs.replace(model(2), name=HOSTILE), cluster=BOX)
    content = rendered(memory_over_time([trace]), "a.svg")
    shown = ["".join(text.itertext()) for text in ElementTree.fromstring(content).iter(f"{SVG}text")]
    assert '</script><b a="$x^"&' in " ".join(shown)
    assert max(map(len, shown)) < 200
    assert b"<b " not in content


def test_one_device_has_one_panel_and_words_name_what_differs() -> None:
    assert len(memory_over_time([simulate("single-cdp", 1)]).findobj(lambda artist: artist.get_gid() == "peak")) == 1
    assert not marked(memory_over_time([simulate("single-cdp", 2)]), "device-0-total")
    shown = words(memory_over_time([simulate("multi-cdp", 2, rule="cdp-v1"), simulate("multi-cdp", 2)], sums=True))
    assert "multi-cdp, n = 2" in shown
    assert any(text.startswith("cdp-v1: activations peak 3 at slot 2;") for text in shown)


@pytest.mark.parametrize("request_", [None, "x", {"n": [1]}, {"n": "4", "m": None}, {"schedule": {"a": 1}}])
def test_a_file_may_record_any_request(request_: object, tmp_path: Path) -> None:
    trace = saved(simulate("multi-cdp", 2), tmp_path / "trace")
    trace = changed(trace, trace.summary() | {"request": request_})
    for traces in ([trace], [trace, trace]):
        assert not [text for text in words(memory_over_time(traces)) if "BΨA" in text]
        assert words(traffic_over_time(traces))


def test_what_cannot_be_one_picture_is_refused() -> None:
    unit, real = simulate("multi-dp", 2), simulate("multi-dp", model=model(2), cluster=BOX)
    for traces, problem in (
        ([], "none; give at least one"),
        ([unit, real], "some in seconds"),
        ([unit, empty()], "no tasks"),
        ([unit] * 17, "at most 16"),
    ):
        with pytest.raises(RequestError, match=problem):
            memory_over_time(traces)
