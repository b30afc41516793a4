"""Fig. 4 read back from what is drawn: step functions against the curve's own sums, the optimal line, the words."""

from pathlib import Path

import numpy as np
import pytest

from cdpsim import Model, RequestError, Stage, presets
from cdpsim.draw.canvas import rendered
from cdpsim.draw.figure_4 import MOST_CURVE_STEPS, PAPER_N, figure_4, memory_per_worker
from cdpsim.studies.superpose import WorkerCurve, superpose, worker_curve
from tests.conftest import Command
from tests.helpers.command_line import content, refuse
from tests.helpers.figures import HOSTILE, at, marked, one, words
from tests.helpers.svg import drawn

pytestmark = pytest.mark.no_cover  # sweeps; single cases elsewhere reach the same lines

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
def test_what_is_drawn_is_what_workers_hold(contents: str) -> None:
    figure = figure_4(contents=contents, axis="roofline:a100")
    shares = np.random.default_rng(4).random(200).tolist()
    for place, name in enumerate(NAMES):
        curve = worker_curve(name, axis="roofline:a100", contents=contents)
        for n, gid in ((1, "dp"), *((n, f"cdp-{n}") for n in PAPER_N)):
            patch = one(figure, f"{gid}-{place}")
            found = [at(patch, share) for share in shares]
            wanted = [mean_at(curve, n, share) for share in shares]
            assert found == pytest.approx(wanted)
            values, edges, _ = patch.get_data()
            assert (edges[0], edges[-1]) == (0, 1)
            assert (np.diff(edges) > 0).all()
            assert np.max(values) == pytest.approx(
                float(superpose(name, n, axis="roofline:a100", contents=contents).cdp)
            )


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


def test_dp_is_full_cdp_dashed_and_the_optimum_black() -> None:
    figure = figure_4()
    for place in (0, 1):
        assert one(figure, f"dp-{place}").get_linestyle() in ("-", "solid")
        assert one(figure, f"optimal-{place}").get_linestyle() in ("-", "solid")
        assert one(figure, f"optimal-{place}").get_edgecolor() == (0, 0, 0, 1)
        dashed = [one(figure, f"cdp-{n}-{place}") for n in PAPER_N]
        assert all(patch.get_linestyle() not in ("-", "solid") for patch in dashed)
        assert len({patch.get_edgecolor() for patch in (*dashed, one(figure, f"dp-{place}"))}) == 4


def test_the_legend_has_the_reductions_and_the_paper_s() -> None:
    said = words(figure_4(contents="gradients"))
    assert "Memory per worker over one pass: gradients, axis flops" in said
    assert {"ResNet-50", "ViT-B/16", "DP: 3.88 GB", "optimal: 1.94 GB"} <= set(said)
    assert "CDP, N = 32: 2.25 GB, 42.0 % less" in said
    assert "the paper: from 3.9 GB to 2.3 GB, 42 % less at N = 32" in said
    assert "the paper: 30 % less at N = 32" in said


def test_the_same_picture_is_the_same_bytes() -> None:
    for ending in (".svg", ".png", ".pdf"):
        assert rendered(figure_4((2, 3)), f"a{ending}") == rendered(figure_4((2, 3)), f"b{ending}")


def test_one_worker_is_dp_and_any_model_can_be_drawn() -> None:
    figure = memory_per_worker([TIMED], [1, 2], axis="measured")
    dp, alone = (one(figure, gid).get_data() for gid in ("dp-0", "cdp-1-0"))
    assert (dp.values == alone.values).all()
    assert dp.edges == pytest.approx(alone.edges)
    shares = [0, 0.1, 0.25, 0.4, 0.55, 0.65, 0.8]
    assert [at(one(figure, "cdp-2-0"), share) for share in shares] == pytest.approx(
        [mean_at(worker_curve(TIMED, axis="measured"), 2, share) for share in shares]
    )
    assert not [text for text in words(figure) if "the paper" in text]
    (name,) = (text for text in words(figure) if text == "timed")
    assert superpose(TIMED, 2, axis="measured").model == name


def test_a_hostile_name_stays_text() -> None:
    hostile = Model(name=HOSTILE, stages=TIMED.stages)
    picture = drawn(memory_per_worker([hostile], [2], axis="measured"))
    assert any("</script>" in text and len(text) <= 60 for text in picture.said())


def test_a_model_that_holds_nothing_has_a_picture() -> None:
    figure = memory_per_worker([Model(stages=(Stage(forward=1.0, backward=1.0),))], [4], axis="measured")
    assert one(figure, "dp-0").get_data().values.tolist() == [0]
    assert "CDP, N = 4: 0.00 B, 0.0 % less" in words(figure)


def test_steps_that_cannot_be_seen_are_refused() -> None:
    """Each worker's tasks are steps of the sum: as many as are told apart, and no more."""
    tasks = 2 * presets.model("vit-b16").n
    most = MOST_CURVE_STEPS // tasks
    assert marked(memory_per_worker(["vit-b16"], [most]), f"cdp-{most}-0")
    with pytest.raises(RequestError, match=rf"n={2 * most} makes more steps than can be seen; give at most \d+ here"):
        memory_per_worker(["vit-b16"], [2 * most])
    with pytest.raises(RequestError, match="one number twice"):
        figure_4([4, 4])
    with pytest.raises(RequestError, match="9 curves cannot be told apart"):
        figure_4(range(1, 10))
    with pytest.raises(RequestError, match="0 curves"):
        figure_4([])


# On the command line


def test_the_command_draws_it(command: Command, here: Path) -> None:
    assert command("figure", 4, "-o", "a.svg") == (0, "", "")
    assert (here / "a.svg").read_bytes() == rendered(figure_4(), "a.svg")
    asked = ["-n", 2, 3, "--axis", "roofline:v100", "--contents", "constants"]
    assert command("figure", 4, "-o", "b.pdf", *asked) == (0, "", "")
    drawn_so = figure_4((2, 3), axis="roofline:v100", contents="constants")
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
    "figure 2 --contents gradients -o x.svg": ["contents: figure 2 does not take this option"],
    "figure 1 -n 3 4 -o x.svg": ["n: figure 1 is of one n, not of 2; give one"],
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_drawn_is_refused(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])
