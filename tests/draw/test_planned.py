"""Pictures of plans: points of candidates where their figures say, the front, rings, the limit."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from cdpsim import Measured, Plan, RequestError, plan
from cdpsim.draw.canvas import Look
from cdpsim.draw.study_pictures import plan_picture
from cdpsim.export import pictures
from tests.helpers.figures import BOX, marked, model, one, words

SMALL: dict[str, Any] = {"devices": 4, "batch": 8, "schedules": "1f1b,zb-h1,zb-h2,pipemare"}


def shown(found: Plan) -> list[Measured]:
    """The candidates that are at most 1.3 times as slow, and as large, as some of the front."""
    slowest, largest = (max(getattr(row.measured, name) for row in found.front) for name in ("step", "memory"))
    return [each for each in found.fitting if each.step <= 1.3 * slowest and each.memory <= 1.3 * largest]


def points(found: Plan) -> dict[tuple[float, float], tuple[str, float]]:
    """The colour and the size of the mark at each place."""
    figure, count = plan_picture(found), len(shown(found))
    drawn = [one(figure, f"candidate-{number}") for number in range(count)]
    return {
        (float(mark.get_xdata()[0]), float(mark.get_ydata()[0])): (to_hex(mark.get_color()), mark.get_markersize())
        for mark in drawn
    }


def test_each_candidate_that_fits_is_a_point_of_step_for_each_sample_over_memory() -> None:
    found = plan(**SMALL)
    expected = {(float(each.memory), float(each.step) / 8) for each in shown(found)}
    assert set(points(found)) == expected
    assert len(expected) >= 4


def test_candidates_of_the_front_are_larger() -> None:
    found = plan(**SMALL)
    front = {(float(row.measured.memory), float(row.measured.step) / 8) for row in found.front}
    sizes = points(found)
    assert min(size for place, (_, size) in sizes.items() if place in front) > max(
        (size for place, (_, size) in sizes.items() if place not in front), default=0
    )


def test_the_line_joins_the_least_times_over_memory() -> None:
    """By a scan over all pairs: no other point is as small and as fast as one of the line."""
    found = plan(**SMALL)
    line = one(plan_picture(found), "front")
    joined = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    every = {(float(each.memory), float(each.step) / 8) for each in shown(found)}
    best = [p for p in every if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in every)]
    assert joined == sorted(best)


def test_a_ring_is_around_what_has_staleness() -> None:
    found = plan(**SMALL)
    figure = plan_picture(found)
    stale = {(float(each.memory), float(each.step) / 8) for each in shown(found) if each.staleness}
    rings = [ring for number in range(len(shown(found))) for ring in marked(figure, f"ring-{number}")]
    assert {(float(ring.get_xdata()[0]), float(ring.get_ydata()[0])) for ring in rings} == stale
    assert stale
    assert "ring: stale parameters" in words(figure)
    assert "ring: stale parameters" not in words(plan_picture(plan(**SMALL | {"staleness": 0})))


def test_schedules_have_colours_and_a_legend() -> None:
    found = plan(**SMALL)
    names = {each.schedule for each in shown(found)}
    assert names <= set(words(plan_picture(found)))
    assert len({colour for colour, _ in points(found).values()}) == len(names)


def test_a_limit_of_memory_is_a_line() -> None:
    figure = plan_picture(plan(**SMALL, memory=9))
    assert one(figure, "limit").get_xdata() == [9, 9]
    assert not marked(plan_picture(plan(**SMALL)), "limit")


def test_candidates_far_from_the_front_are_counted_and_not_drawn() -> None:
    found = plan(devices=4, batch=8, schedules="zb-h2,gems", staleness=0)
    assert [row["schedule"] for row in found.front] == ["zb-h2", "gems"]
    far = plan(devices=4, batch=8, schedules="zb-h2,zb-h1,gpipe", staleness=0, memory=20)
    outside = len(far.fitting) - len(shown(far))
    texts = words(plan_picture(far))
    assert (f"{outside} slower or larger ones are outside" in texts) == (outside > 0)


def test_axes_have_units_and_the_title_says_what_was_planned() -> None:
    found = plan(model(4), BOX, devices=4, batch=8, schedules="1f1b,gpipe", recompute="none")
    texts = words(plan_picture(found))
    assert "memory of the fullest device, GB" in texts
    assert "step for each sample, ms" in texts or "step for each sample, s" in texts
    assert any(text.startswith("toy on ") and text.endswith(", 4 devices, batch 8: proved") for text in texts)
    assert "memory of the fullest device, stage-activations" in words(plan_picture(plan(**SMALL)))


def test_a_plan_without_candidates_that_fit_is_not_drawn() -> None:
    with pytest.raises(RequestError, match="output: has nothing to show"):
        plan_picture(plan(**SMALL, memory=1))


@pytest.mark.parametrize("ending", ["svg", "png", "pdf", "pgf"])
def test_a_picture_is_the_same_file_each_time(ending: str, tmp_path: Path) -> None:
    found = plan(**SMALL)
    files = [tmp_path / f"{k}.{ending}" for k in range(2)]
    for file in files:
        pictures.write_plan(found, file, look=Look(width="12 cm", dark=ending == "png"))
    first, second = (file.read_bytes() for file in files)
    assert first == second
