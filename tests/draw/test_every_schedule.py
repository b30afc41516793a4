"""Schedules of every kind, drawn by pictures that know none of them: each task, device and step has its artist."""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from cdpsim import Model, Stage, Trace, simulate
from cdpsim.draw import curves, step_times, version_strips
from cdpsim.draw.gantt import gantt
from cdpsim.draw.paper import paper
from cdpsim.draw.snapshot import snapshot
from cdpsim.export.chrome import chrome
from cdpsim.export.page import page
from cdpsim.schedules import TABLE_1
from tests.helpers.figures import BOX, marked, one
from tests.helpers.strategies import fitting

STAGE = Stage(
    forward=0.1,
    backward=0.3,
    weight_backward=0.1,
    activation=3 * 10**8,
    boundary=10**7,
    parameters=10**8,
    optimizer=2 * 10**8,
)
NAMES = [*TABLE_1, "1f1b", "zb-h1", "interleaved-1f1b", "dualpipev", "chimera", "pipemare"]
BARS = {"F": "forward", "B": "backward", "W": "backward-of-weights"}
STEPS = 2


@cache
def run(name: str, costs: str) -> Trace:
    """Two steps of a schedule, in slots or with uneven stages that take seconds and send bytes."""
    wanted: dict[str, Any] = fitting(name, 3) | {"steps": STEPS}
    if costs == "seconds":
        stages = tuple(replace(STAGE, forward=0.1 * (j + 1)) for j in range(wanted["n"]))
        wanted |= {"model": Model(stages=stages), "cluster": BOX}
    return simulate(**wanted)


every_schedule = pytest.mark.parametrize("name", NAMES)
in_slots_and_seconds = pytest.mark.parametrize("costs", ["slots", "seconds"])


def tasks_of(trace: Trace) -> Counter[str]:
    """Count the forwards, backwards and weight-gradient backwards."""
    return Counter(kind for kind in trace.tasks["kind"].tolist() if kind in BARS)


def named(figure: Figure, pattern: str) -> list[str]:
    """The ids of artists that match a pattern as a whole."""
    return [
        str(artist.get_gid())
        for artist in figure.findobj(lambda artist: bool(artist.get_gid()))
        if re.fullmatch(pattern, str(artist.get_gid()))
    ]


@in_slots_and_seconds
@every_schedule
def test_a_gantt_has_a_bar_for_each_task(name: str, costs: str) -> None:
    trace = run(name, costs)
    figure = gantt(trace, dependencies=True, steps=int(trace.tasks["step"][trace.tasks["kind"] == "U"].max()) + 1)
    bars = {kind: sum(len(part.get_paths()) for part in marked(figure, bar)) for kind, bar in BARS.items()}
    assert {kind: count for kind, count in bars.items() if count} == tasks_of(trace)


@every_schedule
def test_the_paper_s_style_has_a_mark_for_each_task(name: str) -> None:
    trace = run(name, "slots")
    marks = named(paper([trace]), r"[FBW]-t\d+-i\d+-j\d+")
    assert len(set(marks)) == len(marks)
    assert Counter(mark[0] for mark in marks) == tasks_of(trace)


@in_slots_and_seconds
@every_schedule
def test_a_snapshot_has_every_device(name: str, costs: str) -> None:
    trace = run(name, costs)
    figure = snapshot(trace, 7 if costs == "slots" else 0.9)
    assert len(named(figure, r"device-d\d+")) == trace.summary()["devices"]


CURVES: dict[str, Callable[[list[Trace]], Figure]] = {
    "memory": curves.memory_over_time,
    "traffic": curves.traffic_over_time,
}


@pytest.mark.parametrize("curve", CURVES)
@in_slots_and_seconds
@every_schedule
def test_curves_show_the_peak_of_all_and_of_each_device(name: str, costs: str, curve: str) -> None:
    trace = run(name, costs)
    figure = CURVES[curve]([trace])
    devices = trace.summary()["devices"]
    shown = devices if curve == "memory" or len(trace.messages["start"]) else 0
    assert len(named(figure, r"peak-\d+")) == (shown if devices > 1 else 0)
    assert len(named(figure, "peak")) == (shown > 0)


@in_slots_and_seconds
@every_schedule
def test_versions_and_steps_are_drawn_to_the_last_one(name: str, costs: str) -> None:
    trace = run(name, costs)
    figure = version_strips.versions_over_time([trace])
    assert one(figure, "age") and one(figure, "mean-age")
    values, edges, _ = one(step_times.step_durations([trace]), "step-times-0").get_data()
    assert len(values) == STEPS and len(edges) == STEPS + 1


@in_slots_and_seconds
@every_schedule
def test_exports_have_every_task(name: str, costs: str) -> None:
    trace = run(name, costs)
    assert b"".join(page(trace)).lower().startswith(b"<!doctype html>")
    events = json.loads(b"".join(chrome(trace)))["traceEvents"]
    labels = (re.fullmatch(r"\d+([A-Z])\d+/?", event["name"]) for event in events if event["ph"] == "X")
    assert Counter(label[1] for label in labels if label) == tasks_of(trace)
