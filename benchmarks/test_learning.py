"""Time of learning: runs that are stacked beside runs one by one, nine schedules of digits, a transformer of text."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sklearn")

from validation.learn.data import load_data
from validation.learn.lags import read_learner
from validation.learn.networks import Sizes
from validation.learn.training import Course, train_all
from validation.learn.updates import Update

NINE = ("single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp")
DIGITS = Course("mlp", Sizes(8, 32), 4, rates=(0.05,), epochs=2)
TEXT = Course("transformer", Sizes(6, 64), 4, update=Update("adamw"), rates=(0.003,), epochs=1, batch=16)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["stacked", "one by one"])
@pytest.mark.parametrize("names", [("multi-cdp",), NINE], ids=["one schedule", "nine schedules"])
def test_runs(names: tuple[str, ...], one_by_one: bool, benchmark: Any) -> None:
    """Ten seeds, two epochs of the digits."""
    data, learners = load_data("digits"), [read_learner(name, 4, {}) for name in names]
    course = replace(DIGITS, one_by_one=one_by_one)
    benchmark.pedantic(lambda: train_all(learners, course, data, 4), rounds=1 if one_by_one else 3, warmup_rounds=1)


def test_nine_schedules(benchmark: Any) -> None:
    """Ten seeds, twenty epochs of the digits."""
    data, learners = load_data("digits"), [read_learner(name, 4, {}) for name in NINE]
    benchmark.pedantic(lambda: train_all(learners, replace(DIGITS, epochs=20), data, 4), rounds=1)


def test_text(benchmark: Any) -> None:
    """An epoch of ten seeds of one schedule: four blocks of width 64, 200,000 characters."""
    data, learner = load_data("text"), read_learner("multi-cdp", 4, {})
    benchmark.pedantic(lambda: train_all([learner], TEXT, data, 4), rounds=1)
