"""Fig. 4 read back from what is drawn: step functions against the curve's own sums, the optimal line, the words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import Model, RequestError, Stage, presets
from cdpsim.draw.canvas import rendered
from cdpsim.draw.curves import PIXEL_COLUMNS
from cdpsim.draw.figure_4 import MOST_CURVE_STEPS, PAPER_N, figure_4
from cdpsim.studies.superpose import WorkerCurve, sum_workers, superpose, worker_curve
from tests.conftest import Command
from tests.helpers.command_line import content, refuse
from tests.helpers.every_row import every_row
from tests.helpers.figures import HOSTILE, at, marked, one, words
from tests.helpers.svg import drawn

NAMES = ("resnet50", "vit-b16")
TIMED = Model(
    name="timed",
    stages=(
        Stage(forward=1.0, backward=2.0, activation=300, boundary=40, backward_transient=25),
        Stage(forward=0.5, backward=1.5, activation=100),
    ),
)


def mean_at(curve: WorkerCurve, n: int, share: float) -> float:
    """Return the mean memory of n workers when the first is at that share, each looked up on one worker's curve."""
    ends = np.cumsum(curve.duration) / curve.duration.sum()
    return float(np.mean([curve.size[np.searchsorted(ends, (share + i / n) % 1, side="right")] for i in range(n)]))


@pytest.mark.parametrize("contents", ["activations", "gradients"])
@pytest.mark.parametrize("by_layer", [True, False])
def test_what_is_drawn_is_what_workers_hold(contents: str, by_layer: bool) -> None:
    """Between moments everywhere; of very many steps the highest and the lowest in each column of pixels."""
    options: Any = {"axis": "roofline:a100", "contents": contents, "by_layer": by_layer}
    figure = figure_4(**options)
    shares = np.random.default_rng(4).random(200).tolist()
    for place, name in enumerate(NAMES):
        curve = worker_curve(name, **options)
        for n, gid in ((1, "dp"), *((n, f"cdp-{n}") for n in PAPER_N)):
            patch = one(figure, f"{gid}-{place}")
            found = [at(patch, share) for share in shares]
            wanted = [mean_at(curve, n, share) for share in shares]
            values, edges, _ = patch.get_data()
            drawn_all = n * len(sum_workers(curve, n).position) <= 4 * PIXEL_COLUMNS
            assert drawn_all or not by_layer
            assert found == pytest.approx(wanted, rel=None if drawn_all else 0.05)
            assert (edges[0], edges[-1]) == (0, 1)
            assert (np.diff(edges) > 0).all()
            assert np.max(values) == pytest.approx(float(superpose(name, n, **options).cdp))


def test_the_curves_of_cdp_fill_their_own_panel() -> None:
    figure = figure_4((4,), by_layer=True)
    for place, axes in enumerate(figure.axes[1::2]):
        values, low, high = one(figure, f"enlarged-4-{place}").get_data().values, *axes.get_ylim()
        assert low < min(values) < low + 0.1 * (high - low) and high - 0.1 * (high - low) < max(values) < high


def test_an_operator_without_work_is_a_moment() -> None:
    """A line up and down, as high as what is held then; DP's is as high as the table says."""
    figure = figure_4((4,))
    for place, name in enumerate(NAMES):
        for n, gid in ((1, "dp"), (4, "cdp-4")):
            values, edges, _ = one(figure, f"{gid}-{place}").get_data()
            assert np.max(values) == pytest.approx(float(superpose(name, n).cdp), rel=1e-12)
            steps = np.diff(edges)
            assert (steps >= 0).all()
            assert (steps == 0).any()
            (alone,) = np.nonzero(steps == 0)
            assert (values[alone] > values[alone + 1]).all()


def test_heights_in_the_picture_are_to_scale() -> None:
    """In points of the SVG: optimal is half of DP's peak, and CDP's peaks stand as the table's numbers do."""
    picture = drawn(figure_4())
    for place, name in enumerate(NAMES):
        ground = superpose(name, 1).dp
        peak, half = (picture.shapes[f"{gid}-{place}"].upper for gid in ("dp", "optimal"))
        zero = 2 * half - peak
        for n in PAPER_N:
            height = (picture.shapes[f"cdp-{n}-{place}"].upper - zero) / (peak - zero)
            assert height == pytest.approx(float(superpose(name, n).cdp / ground), abs=1e-4)
        assert picture.shapes[f"optimal-{place}"].lower == half
    left, right = (picture.shapes[f"dp-{place}"] for place in (0, 1))
    assert left.right < right.left, "side by side"


def test_the_optimum_is_black_and_curves_of_cdp_stand_alone_below() -> None:
    figure = figure_4()
    for place in (0, 1):
        assert one(figure, f"optimal-{place}").get_edgecolor() == (0, 0, 0, 1)
        cyclic = [one(figure, f"cdp-{n}-{place}") for n in PAPER_N]
        assert len({patch.get_edgecolor() for patch in (*cyclic, one(figure, f"dp-{place}"))}) == 4
        alone = [one(figure, f"enlarged-{n}-{place}") for n in PAPER_N]
        low, high = alone[0].axes.get_ylim()
        for above, below in zip(cyclic, alone, strict=True):
            assert below.get_edgecolor() == above.get_edgecolor()
            assert (below.get_data().values == above.get_data().values).all()
            assert low < below.get_data().values.min() <= below.get_data().values.max() < high
        assert high - low < cyclic[0].axes.get_ylim()[1] / 4


def test_the_legend_has_the_reductions_and_the_paper_s() -> None:
    said = words(figure_4(contents="gradients"))
    assert "Memory per worker over one forward and backward: gradients, by FLOP" in said
    assert {"ResNet-50, by operator", "ViT-B/16, by operator", "DP: 3.85 GB", "half of DP's peak: 1.93 GB"} <= set(said)
    assert "CDP, N = 32: 2.10 GB, 45.5 % less" in said
    by_layer = words(figure_4(contents="gradients", by_layer=True))
    assert {"ResNet-50, by layer", "ViT-B/16, by layer", "CDP, N = 32: 2.23 GB, 42.1 % less"} <= set(by_layer)
    assert "paper: from 3.9 GB to 2.3 GB, 42 % less at N = 32" in said
    assert "paper: 30 % less at N = 32" in said


@pytest.mark.slow
def test_the_same_picture_is_the_same_bytes() -> None:
    for ending in (".svg", ".png", ".pdf"):
        assert rendered(figure_4((2, 3)), f"a{ending}") == rendered(figure_4((2, 3)), f"b{ending}")


def test_one_worker_is_dp_and_any_model_can_be_drawn() -> None:
    figure = figure_4([1, 2], [TIMED], axis="measured")
    dp, alone = (one(figure, gid).get_data() for gid in ("dp-0", "cdp-1-0"))
    assert (dp.values == alone.values).all()
    assert dp.edges == pytest.approx(alone.edges)
    shares = [0, 0.1, 0.25, 0.4, 0.55, 0.65, 0.8]
    assert [at(one(figure, "cdp-2-0"), share) for share in shares] == pytest.approx(
        [mean_at(worker_curve(TIMED, axis="measured"), 2, share) for share in shares]
    )
    assert not [text for text in words(figure) if "paper: " in text]
    (name,) = (text for text in words(figure) if text.startswith("timed"))
    assert name == f"{superpose(TIMED, 2, axis='measured').model}, by layer"


def test_a_hostile_name_stays_text() -> None:
    hostile = Model(name=HOSTILE, stages=TIMED.stages)
    picture = drawn(figure_4([2], [hostile], axis="measured"))
    assert any("</script>" in text and len(text) <= 60 for text in picture.said())


def test_a_model_that_holds_nothing_has_a_picture() -> None:
    figure = figure_4([4], [Model(stages=(Stage(forward=1.0, backward=1.0),))], axis="measured")
    assert one(figure, "dp-0").get_data().values.tolist() == [0]
    assert "CDP, N = 4: 0.00 B, 0.0 % less" in words(figure)


def test_steps_that_cannot_be_seen_are_refused() -> None:
    """Each worker's tasks are steps of the sum: as many as are told apart, and no more."""
    tasks = 2 * presets.model("vit-b16").n
    most = MOST_CURVE_STEPS // tasks
    assert marked(figure_4([most], ["vit-b16"], by_layer=True), f"cdp-{most}-0")
    with pytest.raises(RequestError, match=rf"n={2 * most} makes more steps than can be seen; give at most \d+ here"):
        figure_4([2 * most], ["vit-b16"], by_layer=True)
    with pytest.raises(RequestError, match="one number twice"):
        figure_4([4, 4])
    with pytest.raises(RequestError, match="9 curves cannot be told apart"):
        figure_4(range(1, 10))
    with pytest.raises(RequestError, match="0 curves"):
        figure_4([])


# On the command line


@pytest.mark.slow
def test_the_command_draws_it(command: Command, here: Path) -> None:
    assert command("figure", 4, "-o", "a.svg") == (0, "", "")
    assert (here / "a.svg").read_bytes() == rendered(figure_4(), "a.svg")
    asked = ["-n", 2, 3, "--axis", "roofline:v100", "--contents", "constants", "--by-layer"]
    assert command("figure", 4, "-o", "b.pdf", *asked) == (0, "", "")
    drawn_so = figure_4((2, 3), axis="roofline:v100", contents="constants", by_layer=True)
    assert (here / "b.pdf").read_bytes() == rendered(drawn_so, "b.pdf")
    assert set(content(here)) >= {"a.svg", "b.pdf"}


REFUSALS = {
    "figure 4 -n 0 -o x.svg": ["n=0 must be at least 1"],
    "figure 4 -n 4 x -o x.svg": ["n=x must be a whole number"],
    "figure 4 -n 100000 -o x.svg": ["`cdpsim superpose` takes any"],
    "figure 4 --axis measured -o x.svg": ["stage 0: is work"],
    "figure 4 --axis time -o x.svg": ["unknown axis 'time'"],
    "figure 4 --contents inputs -o x.svg": ["unknown contents 'inputs'"],
    "figure 4 --steps 3 -o x.svg": ["steps: figure 4 does not take this option"],
    "figure 4 --slot 3 -o x.svg": ["slot: figure 4 does not take this option"],
    "figure 4 -o x.html": ["its form is unknown"],
    "figure 1 --axis flops -o x.svg": ["axis: figure 1 does not take this option"],
    "figure 1 --by-layer -o x.svg": ["by_layer: figure 1 does not take this option"],
    "figure 2 --contents gradients -o x.svg": ["contents: figure 2 does not take this option"],
    "figure 1 -n 3 4 -o x.svg": ["n: figure 1 is of one n, not of 2; give one"],
}


@every_row("line", REFUSALS)
def test_what_cannot_be_drawn_is_refused(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])
