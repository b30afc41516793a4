"""Versions and ages as they are drawn, held against section 2 of the spec."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cdpsim import Model, RequestError, Stage, simulate
from cdpsim.draw.canvas import rendered
from cdpsim.draw.palette import NIGHT, luminance
from cdpsim.draw.version_strips import (
    mean_age,
    shade,
    versions_over_time,
)
from tests.helpers.figures import BOX, HOSTILE, at, marked, model, one, saved, words
from tests.helpers.made_traces import changed, empty, some_rows


def strips(figure: Figure) -> dict[int, list[tuple[float, float, int]]]:
    """From when until when each row is drawn with how many versions, in order."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    for count in range(1, 9):
        for part in marked(figure, f"versions-{count}"):
            for path in part.get_paths():
                (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found.setdefault(round((low + high) / 2), []).append((left, right, count))
    return {row: sorted(found[row]) for row in sorted(found)}


def names(figure: Figure) -> list[str]:
    """The labels of the rows, from above."""
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_replicas_keep_one_version_and_the_updater_of_v1_two(n: int) -> None:
    for rule, updater in (("cdp-v1", 2), ("cdp-v2", 1)):
        figure = versions_over_time([simulate("multi-cdp", n, rule=rule)])
        drawn = {row: max(count for *_, count in spans) for row, spans in strips(figure).items()}
        expected = [updater if device == n - 1 else 1 for device in range(n) for _ in range(n)]
        assert drawn == dict(enumerate(expected))
        assert names(figure) == [f"device {device}, stage {j}" for device in range(n) for j in range(n)]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_pipeline_keeps_two_until_the_last_reader_of_the_older_is_done(n: int) -> None:
    """theta_t[j] is there when B(N-1,j,t-1) ends; micro-batch N-2-j is the last that reads theta_{t-1}[j]."""
    drawn = strips(versions_over_time([simulate("pp-cdp", n)]))
    for j in range(n):
        twice = [(2 * n * t + 2 * n - 2 - j, 2 * n * t + 4 * n - 4 - 3 * j) for t in (1, 2) if j < n - 1]
        assert [span[:2] for span in drawn[j] if span[2] == 2] == twice
        assert {span[2] for span in drawn[j]} == ({1, 2} if twice else {1})


def age(i: int, j: int, t: int, n: int, rule: str) -> int:
    """How old what micro-batch i of step t reads of stage j is."""
    fresh = {"dp": True, "cdp-v1": False, "cdp-v2": i + j >= n - 1}[rule]
    return 0 if fresh or t == 0 else 1


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("name", "rule"), [("multi-dp", "dp"), ("multi-cdp", "cdp-v1"), ("mp-cdp", "cdp-v2")])
def test_ages_are_those_of_the_tasks_of_each_slot(name: str, rule: str, n: int) -> None:
    trace = simulate(name, n, rule=rule)
    figure = versions_over_time([trace])
    every: dict[int, list[int]] = {}
    for t, i, phase in np.ndindex(3, n, 2 * n):
        start = 2 * n * t + (2 * i if rule != "dp" else 0) + phase
        every.setdefault(start, []).append(age(i, min(phase, 2 * n - 1 - phase), t, n, rule))
    line = one(figure, "age")
    assert {slot: at(line, slot) for slot in every} == {slot: np.mean(ages) for slot, ages in every.items()}
    mean = {"dp": 0, "cdp-v1": 1, "cdp-v2": (n - 1) / (2 * n)}[rule]
    assert one(figure, "mean-age").get_ydata() == [mean, mean]
    assert f"steady\nmean: {mean:.3g}" in words(figure)


def test_the_mean_age_is_of_steps_in_steady_state() -> None:
    """(N - 1) / 2N, also where the run has a single step, which reads nothing old."""
    figure = versions_over_time([simulate("multi-cdp", 2, steps=1)])
    assert marked(figure, "mean-age")
    assert "steady\nmean: 0.25" in words(figure)
    assert "mean age read 0.25" in words(versions_over_time([simulate("multi-cdp", 2, steps=1)] * 2))


@pytest.mark.parametrize(("steps", "note"), [(5, "; in steady state up to 8"), (40, "")])
def test_a_picture_says_where_a_run_does_not_reach_steady_state(steps: int, note: str) -> None:
    """PipeDream's first stage keeps a version for each of its n micro-batches on their way."""
    run = simulate("pipedream", 8, steps=steps)
    assert f"Versions kept of each stage on each device{note}" in words(versions_over_time([run]))
    assert f"mean age read 3.5{note}" in words(versions_over_time([run, simulate("pp-cdp", 8)]))


def test_updates_alone_have_no_age() -> None:
    trace = simulate("single-dp", 2)
    left = some_rows(trace.tasks, trace.tasks["kind"] == "U")
    assert np.isnan(mean_age(changed(trace, tasks=left)).value).all()


def test_several_are_the_most_of_each() -> None:
    traces = [
        simulate(name, 4, rule=rule) for name, rule in (("multi-cdp", "cdp-v1"), ("pp-cdp", None), ("multi-dp", None))
    ]
    figure = versions_over_time(traces)
    assert names(figure) == ["multi-cdp, cdp-v1", "pp-cdp, cdp-v2", "multi-dp, dp"]
    drawn = strips(figure)
    # v1's barrier is the end of B(N-1,0,0); pp's last but one stage is the first to have a new version
    assert drawn[0] == [(0, 14, 1), (14, 30, 2)]
    assert drawn[1] == [(0, 12, 1), (12, 28, 2), (28, 30, 1)]
    assert drawn[2] == [(0, 24, 1)]
    assert [text for text in words(figure) if "age read" in text] == [
        f"mean age read {age}" for age in ("1", "0.375", "0")
    ]


@pytest.mark.parametrize("name", ["zero-cdp", "multi-cdp", "pipedream", "1f1b"])
def test_a_strip_of_several_is_the_most_of_the_strips_of_one(name: str) -> None:
    run = simulate(name, 4, steps=4)
    (alone, _), single = strips(versions_over_time([run, run])).values(), strips(versions_over_time([run])).values()
    for slot in range(run.makespan):
        kept, most = (
            [count for row in rows for low, high, count in row if low <= slot < high] for rows in ([alone], single)
        )
        assert kept == [max(most)] * bool(most)


def test_many_rows_become_the_most_of_each_stage_and_too_many_are_refused() -> None:
    figure = versions_over_time([simulate("multi-cdp", 12, steps=1)])
    assert names(figure) == [f"stage {j}" for j in range(12)]
    figure = versions_over_time([simulate("multi-cdp", 7, steps=1)])
    assert names(figure) == [f"device {row // 7}, stage {row % 7}" for row in range(0, 49, 2)]
    with pytest.raises(RequestError, match=r"129 stages are more than the 128 rows .* fewer stages \(-n\)"):
        versions_over_time([simulate("pp-cdp", 129, steps=1)])


def test_very_many_spans_are_refused() -> None:
    trace = simulate("zero-cdp", 4, steps=900)
    with pytest.raises(RequestError, match=r"change \d+,\d+ times, too often to be seen; simulate fewer --steps"):
        versions_over_time([trace])


@settings(max_examples=5)
@given(st.integers(1, 12))
def test_more_versions_are_darker(largest: int) -> None:
    light = [luminance(shade(count, largest)) for count in range(1, largest + 1)]
    assert light == sorted(light, reverse=True)
    assert len(set(light)) == largest


@pytest.mark.parametrize("largest", [1, 2, 5, 8])
def test_one_version_can_be_seen_on_white_and_on_black(largest: int) -> None:
    """WCAG's contrast to white, where 1.5 was too little, and to black: between them, as both grounds are used."""
    light = luminance(shade(1, largest))
    assert 1.05 / (light + 0.05) > 1.7
    assert (light + 0.05) / (luminance(NIGHT) + 0.05) > 4.5


def test_a_strip_has_room_for_its_number() -> None:
    """Of 6 points, whose digits are 0.73 times as high."""
    figure = versions_over_time([simulate("pipedream", 8)])
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    (axes, _), strip = figure.axes, one(figure, "versions-1").get_paths()[0].get_extents()
    high = np.abs(np.diff(axes.transData.transform([(0, strip.y0), (0, strip.y1)])[:, 1]))[0]
    assert high * 72 / figure.dpi >= 0.73 * 6


@pytest.mark.parametrize("name", ["multi-cdp", "mp-cdp", "zero-dp"])
def test_real_costs_and_the_same_bytes(name: str) -> None:
    def content() -> bytes:
        trace = simulate(name, model=msgspec.structs.replace(model(2), name=HOSTILE), cluster=BOX)
        return rendered(versions_over_time([trace]), "a.svg")

    first = content()
    assert first == content()
    ElementTree.fromstring(first)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    trace = simulate("multi-cdp", 2)
    with pytest.raises(RequestError, match="simulate the schedule again"):
        versions_over_time([trace, saved(trace, tmp_path / "trace")])
    light = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=0),))
    with pytest.raises(RequestError, match="stages have some"):
        versions_over_time([simulate("single-dp", model=light)])
    with pytest.raises(RequestError, match="no tasks"):
        versions_over_time([empty()])
