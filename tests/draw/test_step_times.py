"""Times of steps as they are drawn: read back from the SVG and held against quantiles of single runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from cdpsim import Model, RequestError, Stage, Trace, simulate
from cdpsim.draw.canvas import rendered
from cdpsim.draw.step_times import step_durations
from cdpsim.export import pictures
from tests.helpers.figures import BOX, HOSTILE, at, model, one, saved, words
from tests.helpers.svg import drawn

ASKED: dict[str, Any] = {"jitter": "lognormal:0.3", "slow": ["1:2"], "steps": 5}


def disturbed(name: str = "multi-dp", run: int = 0) -> Trace:
    """One of several runs of three devices, the second of them slow."""
    return simulate(name, model=model(3), cluster=BOX, run=run, **ASKED)


def times_of(trace: Trace) -> list[float]:
    """How long each step takes: between the moments at which all of its tasks and updates have ended."""
    tasks = trace.tasks
    ends: list[float] = [tasks["end"][tasks["step"] == step].max().item() for step in range(tasks["step"].max() + 1)]
    return [end - before for end, before in zip(ends, [0.0, *ends], strict=False)]


def line(figure: Figure, gid: str) -> list[float]:
    """The heights of a line."""
    return [float(value) for value in one(figure, gid).get_data().values]


@pytest.mark.parametrize("name", ["multi-dp", "multi-cdp"])
def test_bands_lie_between_the_quantiles_of_single_runs(name: str) -> None:
    taken = np.array([times_of(disturbed(name, run)) for run in range(25)])
    figure = step_durations([disturbed(name)], runs=25)
    assert line(figure, "median-0") == pytest.approx(np.median(taken, axis=0).tolist())
    for low, high in ((5, 95), (25, 75)):
        values, _, baseline = one(figure, f"band-0-{low}-{high}").get_data()
        assert baseline.tolist() == pytest.approx(np.percentile(taken, low, axis=0).tolist())
        assert values.tolist() == pytest.approx(np.percentile(taken, high, axis=0).tolist())
    steady = simulate(name, model=model(3), cluster=BOX, slow=["1:2"], steps=5)
    assert line(figure, "steady-0") == pytest.approx(times_of(steady))


def test_the_picture_itself_shows_them() -> None:
    """In the SVG: the axis is linear, so heights on paper are to each other as times are; all runs are in the bars."""
    figure = step_durations([disturbed()], runs=25)
    picture = drawn(figure)
    values, _, baseline = one(figure, "band-0-5-95").get_data()
    band = picture.shapes["band-0-5-95"]
    inner, (high, _, low) = picture.shapes["band-0-25-75"], one(figure, "band-0-25-75").get_data()
    scale = (band.upper - band.lower) / (values.max() - baseline.min())
    assert inner.upper - inner.lower == pytest.approx((high.max() - low.min()) * scale, abs=0.2)
    bars = [picture.shapes[name] for name in picture.named("runs-0-[0-9]+")]
    widths = [bar.right - bar.left for bar in bars]
    least = min(width for width in widths if width > 0.1)
    assert sum(widths) / least == pytest.approx(25 / round(25 * least / sum(widths)), rel=0.05)
    assert "median of 25 runs" in picture.said()


def test_words_are_the_quantiles_of_the_mean_step() -> None:
    periods = [disturbed(run=run).summary()["period"] for run in range(25)]
    low, middle, high = np.percentile(periods, [5, 50, 95])
    steady = simulate("multi-dp", model=model(3), cluster=BOX, slow=["1:2"], steps=5).summary()["period"]

    def said(value: float) -> str:
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"

    expected = f"{said(middle)} a step ({said(low)} to {said(high)}), without chance {said(steady)}"
    assert expected in words(step_durations([disturbed()], runs=25))


def test_a_run_by_itself_is_a_line(tmp_path: Path) -> None:
    """In slots, in seconds, and of a trace from files."""
    slots = simulate("multi-cdp", 3, steps=4, stop=["1:7:5"])
    for trace in (slots, disturbed(), saved(slots, tmp_path / "trace")):
        figure = step_durations([trace])
        assert line(figure, "step-times-0") == pytest.approx(times_of(trace))
        assert at(one(figure, "step-times-0"), 2) == pytest.approx(times_of(trace)[2])
        low, high = figure.axes[0].get_ylim()
        assert low < min(times_of(trace)) and max(times_of(trace)) < high < 2 * max(times_of(trace))
    assert "slots" in words(step_durations([slots]))


def test_several_have_a_panel_each_and_the_same_axes() -> None:
    figure = step_durations([disturbed(name) for name in ("multi-dp", "multi-cdp", "pp-cdp")], runs=9)
    limits = {axes.get_ylim() for axes in figure.axes}
    assert len(limits) == 1
    assert [bool(one(figure, f"median-{k}")) for k in range(3)] == [True] * 3
    assert any(text.startswith("pp-cdp, cdp-v2; ") for text in words(figure))


@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_and_one_device(steps: int) -> None:
    """Nothing to compare with, and still a picture."""
    lone = Model(stages=(Stage(forward=1.0, backward=2.0),))
    trace = simulate("multi-dp", model=lone, steps=steps, jitter="uniform:0.2")
    picture = drawn(step_durations([trace], runs=3))
    assert {"median-0", "steady-0", "band-0-5-95"} <= set(picture.shapes)


def test_the_same_request_is_the_same_file() -> None:
    """Byte for byte, also with hostile names."""
    hostile = simulate("multi-dp", model=model(3, HOSTILE), cluster=BOX, **ASKED)
    first, second = (rendered(step_durations([hostile, hostile], runs=9), "x.svg") for _ in range(2))
    assert first == second
    drawn(step_durations([hostile], runs=9))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="9 are more than the 8 panels of a picture; give fewer"):
        step_durations([simulate("multi-dp", 2)] * 9)
    with pytest.raises(RequestError, match="runs: are drawn by `plot steps`, not by `plot traffic`"):
        pictures.write_plot("traffic", [simulate("multi-dp", 2)], tmp_path / "x.svg", runs=3)
    assert not list(tmp_path.iterdir())


def test_a_disturbed_run_says_so_in_its_title(tmp_path: Path) -> None:
    shown = words(step_durations([disturbed()], runs=3))
    assert any("device 1 slow ×2, jitter lognormal:0.3" in text for text in shown)
    loaded = saved(disturbed(), tmp_path / "trace")
    for said, expected in ((7, True), (["x"], True), ([], False), (["0:2"], False)):
        loaded.summary()["request"] |= {"slow": said, "jitter": None}
        title = words(step_durations([loaded]))
        assert any("disturbed" in text for text in title) == expected


def test_what_is_thrown_away_is_no_step() -> None:
    """Two updates of ACCO in 16 slots; what workers compute until they take over the last one ends at 20."""
    trace = simulate("acco", n=1, replicas=2, slow=["1:2"], steps=2)
    assert times_of(trace) == [8, 8, 4]
    assert line(step_durations([trace]), "step-times-0") == [8, 8]
