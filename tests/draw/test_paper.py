"""The paper's Fig. 1, read back from its SVG and held against section 6 of the specification."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cdpsim import Model, Stage, simulate
from cdpsim.draw import canvas, palette
from cdpsim.draw.paper import figure_1, paper, synchronisations
from cdpsim.draw.plots import timeline_style
from cdpsim.errors import RequestError
from cdpsim.schedules.rule import matrix_rule
from cdpsim.trace import TABLES, Trace, load
from tests.helpers.made_traces import empty
from tests.helpers.reference_slot_model import CYCLIC, SCHEDULES, Reference
from tests.helpers.svg import Picture, Shape, drawn, read

HOSTILE = "</script><b>\n\x07'\"& $x^$ " + "long" * 2500
TOY = Model(name="toy", stages=(Stage(forward=0.001, backward=0.002),) * 3)


def handmade(rows: list[tuple[Any, ...]], **summary: Any) -> Trace:
    """A trace without its run, of (kind, stage, micro_batch, step, device, start, end, version, stale)."""
    names = ("kind", "stage", "micro_batch", "step", "device", "start", "end", "version", "stale")
    tasks = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    nothing: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype=np.int64) for name in TABLES["messages"]}
    return Trace(tasks, nothing, {}, summary)


# When steps are synchronised


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("n", range(1, 9))
def test_synchronisations_are_where_the_paper_has_them(n: int, steps: int) -> None:
    """DP: after slots 2N-1, 4N-1, ...; CDP-v1: after slot 4N-3, then every 2N; CDP-v2: none, but at N = 1 it is DP."""
    every = {t: 2 * n * t for t in range(steps)}
    assert synchronisations(simulate("multi-dp", n, steps=steps)) == {t: 2 * n - 1 + 1 + s for t, s in every.items()}
    v1 = synchronisations(simulate("multi-cdp", n, steps=steps, rule="cdp-v1"))
    assert v1 == {t: 4 * n - 3 + 1 + s for t, s in every.items()}
    v2 = synchronisations(simulate("multi-cdp", n, steps=steps, rule="cdp-v2"))
    assert v2 == ({} if n > 1 else {t: 2 + s for t, s in every.items()})


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_simultaneous_schedules_are_synchronised_and_no_cyclic_one(name: str) -> None:
    found = synchronisations(simulate(name, 4, steps=3))
    assert found == ({} if name in CYCLIC else {0: 8, 1: 16, 2: 24})


def test_reading_old_versions_is_no_synchronisation() -> None:
    """No task waits for all updates; no task reads a new version before them, either, but only by chance."""
    old = matrix_rule(np.zeros((3, 3), dtype=bool))
    assert synchronisations(simulate("multi-cdp", 3, steps=4, rule=old)) == {}


def test_updates_that_a_reader_does_not_wait_for_are_no_synchronisation() -> None:
    rows = [("F", 0, 0, 0, 0, 0, 1, 0, 0), ("B", 0, 0, 0, 0, 1, 2, 0, 0)]
    made = [("U", 0, -1, 0, 0, 2, 2, 1, 0), ("U", 1, -1, 0, 0, 4, 4, 1, 0)]
    read = ("F", 0, 0, 1, 0, 3, 4, 1, 0)
    assert synchronisations(handmade([*rows, *made, read])) == {}
    assert synchronisations(handmade([*rows, *made, (*read[:5], 4, 5, 1, 0)])) == {0: 4}
    assert synchronisations(handmade([*rows, *made])) == {}
    assert synchronisations(handmade(rows)) == {}


# Content of Fig. 1


def centres(picture: Picture, n: int, slots: int) -> tuple[dict[int, float], list[dict[int, float]]]:
    """Where the labels of time steps and, panel by panel, those of stages stand."""
    labels = [text for text in picture.texts if text.words.isdigit() and text.size == 6.5]
    left = min(text.x for text in labels)
    stages = sorted((text for text in labels if text.x == left), key=lambda text: -text.y)
    axis = min(text.y for text in labels if text.x > left and int(text.words) > n)
    times = {int(text.words): text.x for text in labels if abs(text.y - axis) < 0.1}
    assert sorted(times) == list(range(slots))
    panels = [stages[k : k + n] for k in range(0, len(stages), n)]
    assert all([text.words for text in panel] == [str(n - k) for k in range(n)] for panel in panels)
    return times, [{int(text.words) - 1: text.y for text in panel} for panel in panels]


@pytest.fixture(scope="module", params=[(3, 2), (2, 3), (4, 2)], ids=lambda p: f"n{p[0]}-T{p[1]}")
def figure(request: pytest.FixtureRequest) -> tuple[int, int, Picture]:
    n, steps = request.param
    return n, steps, drawn(figure_1(n, steps))


PANELS = (("a", "multi-dp", "dp"), ("b", "multi-cdp", "cdp-v1"), ("c", "multi-cdp", "cdp-v2"))


def test_every_task_has_its_mark_in_its_cell(figure: tuple[int, int, Picture]) -> None:
    n, steps, picture = figure
    times, panels = centres(picture, n, 2 * n * steps + 2 * (n - 1))
    pitch = times[1] - times[0]
    for (letter, name, rule), stages in zip(PANELS, panels, strict=True):
        tasks = Reference(name, n, steps, rule).computations
        names = {f"{letter}-{kind}-t{t}-i{i}-j{j}" for kind, j, i, t, *_ in tasks}
        assert set(picture.named(rf"{letter}-[FBWU]-t\d+-i\d+-j\d+")) == names
        for kind, j, i, t, _, start, *_ in tasks:
            mark = picture.shapes[f"{letter}-{kind}-t{t}-i{i}-j{j}"]
            at = times[start] - pitch / 2 if name == "multi-dp" else times[start]
            share = (i + 0.5) / n * pitch if name == "multi-dp" else 0
            assert mark.middle[0] == pytest.approx(at + share, abs=0.1 * pitch)
            assert abs(mark.middle[1] - stages[j]) < 0.6
            assert mark.fill == palette.colour(i)
            assert points_up(mark) == (kind == "F")


def points_up(mark: Shape) -> bool:
    """Whether the top is one point and the foot an edge; asserts that it is so or the other way round."""
    top = {point for point in mark.points if point[1] > mark.upper - 0.01}
    foot = {point for point in mark.points if point[1] < mark.lower + 0.01}
    assert sorted((len(top), len(foot))) == [1, 2]
    return len(top) == 1


def test_marks_of_one_cell_stand_side_by_side_in_order(figure: tuple[int, int, Picture]) -> None:
    n, steps, picture = figure
    for t in range(steps):
        for j in range(n):
            marks = [picture.shapes[f"a-F-t{t}-i{i}-j{j}"] for i in range(n)]
            assert all(a.right < b.left for a, b in pairwise(marks))


def test_double_bars_stand_between_time_steps(figure: tuple[int, int, Picture]) -> None:
    n, steps, picture = figure
    times, _ = centres(picture, n, 2 * n * steps + 2 * (n - 1))
    pitch = times[1] - times[0]
    last = {"a": 2 * n - 1, "b": 4 * n - 3}  # the slot after which the first one stands
    bars = picture.named(r".-synchronisation-t\d+")
    assert set(bars) == {f"{letter}-synchronisation-t{t}" for letter in last for t in range(steps)}
    for letter, slot in last.items():
        for t in range(steps):
            bar = bars[f"{letter}-synchronisation-t{t}"]
            assert len({x for x, _ in bar.points}) == 2
            assert bar.middle[0] == pytest.approx(times[slot + 2 * n * t] + pitch / 2, abs=0.05)
            assert bar.lower < min(shape.lower for shape in picture.named(rf"{letter}-[FB].*-j0").values())
            assert bar.upper > max(shape.upper for shape in picture.named(rf"{letter}-[FB].*-j{n - 1}").values())


def test_slashes_are_where_an_older_version_is_read(figure: tuple[int, int, Picture]) -> None:
    """CDP-v1 from slot 4N-2 on in the second step; CDP-v2 where i + j < N-1 and theta_t[j] has just come to be."""
    n, steps, picture = figure
    expected = set()
    for letter, name, rule in PANELS[1:]:
        reference = Reference(name, n, steps, rule)
        for kind, j, i, t, _, start, *_ in reference.computations:
            made = 2 * n * (t - 1) + (4 * n - 2 if rule == "cdp-v1" else 2 * (n - 1) + 2 * n - j)
            if t and start >= made and (rule == "cdp-v1" or i + j < n - 1):
                expected.add(f"{letter}-{kind}-t{t}-i{i}-j{j}-slash")
    assert expected
    slashes = picture.named(r".*-slash")
    assert set(slashes) == expected
    for name, slash in slashes.items():
        mark = picture.shapes[name.removesuffix("-slash")]
        assert slash.left < mark.left and slash.right > mark.right
        assert slash.lower < mark.lower and slash.upper > mark.upper


def test_arrows_are_the_messages_of_cdp_v2(figure: tuple[int, int, Picture]) -> None:
    """N(N-1) gradients a step; each version to N-1 more readers for each stage, the last one to j of them."""
    n, steps, picture = figure
    gradients = {name.rpartition("-")[0]: arrow for name, arrow in picture.named(r".-gradient-.*").items()}
    assert set(gradients) == {
        f"c-gradient-t{t}-j{j}-{i}-{i + 1}" for t in range(steps) for j in range(n) for i in range(n - 1)
    }
    for t in range(steps):
        for j in range(n):
            for i in range(n - 1):
                arrow = gradients[f"c-gradient-t{t}-j{j}-{i}-{i + 1}"]
                maker, user = (picture.shapes[f"c-B-t{t}-i{k}-j{j}"] for k in (i, i + 1))
                assert arrow.points[0][0] == pytest.approx(maker.middle[0], abs=1.1)
                assert arrow.right == pytest.approx(user.middle[0], abs=1.1)
                assert arrow.lower > maker.upper - 2
    parameters = picture.named(r".-parameters-.*")
    assert len(parameters) == (steps - 2) * n * (n - 1) + n * (n - 1) // 2
    # From the last micro-batch's backward to the first reader.
    (arrow,) = picture.named(rf"c-parameters-t0-j{n - 1}-{n - 1}-0-\d+").values()
    assert arrow.points[0][0] == pytest.approx(picture.shapes[f"c-B-t0-i{n - 1}-j{n - 1}"].middle[0], abs=1.1)
    assert arrow.right == pytest.approx(picture.shapes[f"c-F-t1-i0-j{n - 1}"].middle[0], abs=1.1)


def test_no_two_marks_and_no_bar_overlap(figure: tuple[int, int, Picture]) -> None:
    _, _, picture = figure
    marks = list(picture.named(r".-[FB]-[^-]*-[^-]*-[^-]*").values())
    bars = list(picture.named(r".*synchronisation.*").values())
    for k, one in enumerate(marks):
        for other in [*marks[k + 1 :], *bars]:
            apart = one.right <= other.left or other.right <= one.left
            assert apart or one.upper <= other.lower or other.upper <= one.lower


def test_it_fits_a_column_and_can_be_read_there() -> None:
    picture = drawn(figure_1())
    assert picture.width == pytest.approx(3.35 * 72, abs=0.3)
    assert {"(a) DP", "(b) CDP-v1", "(c) CDP-v2", "time step", "stage"} <= set(picture.said())
    meanings = {"micro-batch 1", "forward", "backward", "reads an older version", "synchronisation", "message"}
    assert meanings <= set(picture.said())
    assert min(text.size for text in picture.texts) >= 6
    assert all(0 <= text.x < picture.width and 0 <= text.y < picture.height for text in picture.texts)
    assert all(s.left >= 0 and s.right <= picture.width for name, s in picture.shapes.items() if "patch" not in name)


def test_one_stage() -> None:
    picture = drawn(figure_1(1))
    assert len(picture.named(r".-synchronisation-t\d")) == 6
    assert set(picture.named(".*slash")) == {"b-F-t1-i0-j0-slash", "b-B-t1-i0-j0-slash"}


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".png"])
def test_the_same_request_gives_the_same_bytes(ending: str) -> None:
    one, other = (canvas.rendered(figure_1(2), f"picture{ending}") for _ in range(2))
    assert one == other


# Any run


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn(name: str) -> None:
    picture = drawn(paper([simulate(name, 3)]))
    assert len(picture.named(r"[FB]-t\d-i\d-j\d")) == 2 * 3 * 3 * 3
    assert bool(picture.named("synchronisation.*")) == (name not in CYCLIC)
    travels = name in ("multi-cdp", "mp-cdp", "zero-cdp")  # elsewhere nothing of a stage leaves its device
    assert bool(picture.named("(gradient|parameters|state).*")) == ("message" in picture.said()) == travels


def test_a_loaded_trace_shows_all_but_who_waits_for_whom(tmp_path: Path) -> None:
    trace = simulate("multi-cdp", 3)
    trace.save(tmp_path / "trace")
    run, loaded = drawn(paper([trace])), drawn(paper([load(tmp_path / "trace")]))
    assert set(run.named(".*slash")) == set(loaded.named(".*slash")) != set()
    assert set(run.named("[FB]-.*")) == set(loaded.named("[FB]-.*"))
    assert run.named("gradient.*") and not loaded.named("gradient.*")


def test_what_has_no_cell_is_refused() -> None:
    """Tasks of two slots, and of seconds: the gantt has them."""
    for trace in (simulate("gpipe", 3, model="unit-split"), simulate("multi-cdp", model=TOY)):
        with pytest.raises(RequestError, match="style: paper is of runs in which every task takes one slot"):
            paper([simulate("multi-dp", 3), trace])
    assert timeline_style([simulate("multi-dp", 3, model="unit-split")], gantt=False) == "gantt"
    assert timeline_style([simulate("multi-dp", 3)], gantt=False) == "paper"


def test_a_split_backward_has_a_mark_of_its_own() -> None:
    rows = [("F", 0, 0, 0, 0, 0, 1, 0, 0), ("B", 0, 0, 0, 0, 1, 2, 0, 0), ("W", 0, 0, 0, 0, 2, 3, 0, 0)]
    picture = drawn(paper([handmade(rows)], [HOSTILE]))
    assert len(set(picture.shapes["W-t0-i0-j0"].points)) == 6
    assert "backward of weights" in picture.said()


@pytest.mark.slow
def test_many_stages_lose_numbers_and_then_arrows() -> None:
    few, more, many = (drawn(paper([simulate("multi-cdp", n, steps=1)])) for n in (8, 29, 40))
    assert [sum(text.size == 6 for text in picture.texts) for picture in (few, more, many)] == [2 * 8 * 8, 0, 0]
    assert [bool(picture.named("gradient.*")) for picture in (few, more, many)] == [True, True, False]
    assert "micro-batch 0" in few.said() and "micro-batch 0, 8, …" in more.said()


@pytest.mark.parametrize(("n", "steps"), [(10**6, 2), (14, 2), (3, 10**6)])
def test_what_is_too_large_is_refused_before_it_is_simulated(n: int, steps: int) -> None:
    with pytest.raises(RequestError, match=r"style gantt, an \.html file, or fewer --steps"):
        figure_1(n, steps)


def test_a_run_that_is_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match=r"32768 tasks.*--style gantt"):
        paper([handmade([("F", 0, 0, 0, 0, k, k + 1, 0, 0) for k in range(32768)])])
    with pytest.raises(RequestError, match=r"as long as 2000 tasks; .* room for"):
        paper([handmade([("F", 0, 0, 0, 0, k, k + 1, 0, 0) for k in range(2000)])])


def test_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="no tasks"):
        paper([handmade([("F", 0, 0, 0, 0, 0, 1, 0, 0)]), empty()])
    with pytest.raises(RequestError, match="takes one slot"):
        paper([handmade([("F", 0, 0, 0, 0, 0, 0, 0, 0)])])


def test_hostile_names_come_out_escaped_and_short() -> None:
    request = {"schedule": HOSTILE, "n": HOSTILE, "rule": HOSTILE, "model": {"name": HOSTILE}}
    named = handmade([("F", 0, 0, 0, 0, 0, 1, 0, 0)], request=request)
    for trace, titles in ((named, None), (simulate("multi-dp", 2), [HOSTILE])):
        figure = paper([trace], titles)
        picture = drawn(figure)
        title = figure.findobj(lambda artist: artist.get_gid() == canvas.TITLE)[0].get_text()  # type: ignore[attr-defined]
        assert "</script>" in title and "long…" in title and all(map(str.isprintable, picture.said()))
        assert max(map(len, title.splitlines())) < 100 and len(title) < 400
        assert b"<script" not in canvas.rendered(figure, "picture.svg")
        for ending in (".pdf", ".png"):
            assert canvas.rendered(figure, f"picture{ending}")


def test_the_readme_s_picture_is_what_the_command_draws() -> None:
    """Marks, colours, places and words."""
    shown = Path(__file__).parents[2] / "docs" / "pictures" / "figure1.svg"
    assert read(shown.read_bytes()) == drawn(figure_1())
