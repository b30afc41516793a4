"""Runs as notebooks show them: a table of figures and a timeline of bars, whose markup is sound."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from cdpsim import SCHEDULES, Cluster, Model, Run, Stage, Trace, load, simulate
from cdpsim.cluster import Link
from tests.helpers.hostile_names import HOSTILE_NAME
from tests.helpers.made_traces import empty
from tests.helpers.strategies import fitting

STAGE = Stage(forward=0.01, backward=0.02, weight_backward=0.01, activation=10, boundary=1, parameters=3)
BAR = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)H([\d.]+)z")


def parsed(trace: Trace) -> ElementTree.Element:
    """The elements of a trace's HTML, which is XML, too."""
    return ElementTree.fromstring(trace._repr_html_().replace("&nbsp;", " "))


def bars(trace: Trace) -> list[tuple[str, float, float, float]]:
    """The kind, the row, the begin and the length of each bar, in rows and in hundredths of the width."""
    found = []
    for path in parsed(trace).iter("{http://www.w3.org/2000/svg}path"):
        title = path.find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        for left, top, long, _, back in BAR.findall(path.attrib["d"]):
            assert left == back
            found.append((str(title.text), float(top) / 14, (float(left) - 26) / 6.14, float(long) / 6.14))
    return found


def test_a_bar_is_a_task() -> None:
    """Of GPipe with two stages and micro-batches: six slots, in each of which two devices do what the paper says."""
    run = simulate("gpipe", 2, steps=1)
    slots = [(kind, round(row), round(begin * 6 / 100)) for kind, row, begin, _ in bars(run)]
    forwards = [("forward", device, device + i) for device in (0, 1) for i in (0, 1)]
    backwards = [("backward", device, 4 - device + i) for device in (0, 1) for i in (0, 1)]
    assert sorted(slots) == sorted(forwards + backwards)
    assert all(long == pytest.approx(100 / 6, abs=0.05) for *_, long in bars(run))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_shown(name: str) -> None:
    run = simulate(**fitting(name, 4))
    text = "".join(parsed(run).itertext())
    assert name in text
    assert f"{run.makespan} slots" in text
    assert bars(run)


def test_a_large_run_is_shown_up_to_a_time() -> None:
    run = simulate("1f1b", 16, m=64)
    html = run._repr_html_()
    assert len(html) < 100_000
    assert "up to slot" in html
    assert max(begin + long for *_, begin, long in bars(run)) <= 100.1


def test_a_saved_trace_is_shown_as_its_run(tmp_path: Path) -> None:
    run = simulate("pp-cdp", 3)
    run.save(tmp_path / "trace")
    assert load(tmp_path / "trace")._repr_html_() == run._repr_html_()


def test_a_run_that_does_not_reach_steady_state_says_so() -> None:
    """Of PipeDream, 8 stages: in steady state the first one has 8 activations, 8 versions and a gradient."""
    few, many = (simulate("pipedream", 8, steps=steps)._repr_html_() for steps in (5, 40))
    assert "on device 0; in steady state 17 stage-activations<" in few
    assert "17 stage-activations on device 0<" in many and "in steady state" not in many


def test_a_steady_state_that_holds_no_more_is_not_told_apart() -> None:
    """Of CDP in seconds: device 3 has another peak of gradients there, and in all as much."""
    stage = Stage(forward=0.008, backward=0.016, activation=15 * 10**8, boundary=16 * 10**6, parameters=4 * 10**8)
    run = simulate(
        "multi-cdp", model=Model(stages=(stage,) * 4), cluster=Cluster(link=Link(latency=5e-6, bandwidth=100e9))
    )
    own, later = (max(row["total"] for row in run.summary()[f"{when}peak_memory"]) for when in ("", "steady_"))
    assert own == later and "<td>8.8 GB on device 1</td>" in run._repr_html_()


def test_a_trace_without_rows_has_no_timeline() -> None:
    assert "<svg" not in empty()._repr_html_()


def hostile() -> Run:
    """A run of a model, of stages that are named to break out of a page."""
    stages = (msgspec.structs.replace(STAGE, name=HOSTILE_NAME),) * 2
    return simulate("1f1b", model=Model(name=HOSTILE_NAME, stages=stages))


def test_names_are_no_markup() -> None:
    run = hostile()
    for shown in (run, run.request.model):
        html = shown._repr_html_()
        assert "<script" not in html and "<img" not in html
    assert "&lt;script&gt;" in run._repr_html_()
