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
TEXT = Course("transformer", Sizes(6, 64), 4, Update("adamw"), rates=(0.003,), epochs=1, batch=16)


@pytest.mark.parametrize("rates", [(0.05,), (0.05, 0.1), (0.01, 0.05, 0.1)], ids=["10 runs", "20 runs", "30 runs"])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["stacked", "one by one"])
def test_runs(rates: tuple[float, ...], one_by_one: bool, benchmark: Any) -> None:
    """CDP-v2, two epochs of the digits."""
    data, learner = load_data("digits"), read_learner("multi-cdp", 4, {})
    course = replace(DIGITS, rates=rates, one_by_one=one_by_one)
    benchmark.pedantic(lambda: train_all(learner, course, data, 4), rounds=1 if one_by_one else 3, warmup_rounds=1)


def test_nine_schedules(benchmark: Any) -> None:
    """Ten seeds, twenty epochs of the digits."""
    data, learners = load_data("digits"), [read_learner(name, 4, {}) for name in NINE]
    course = replace(DIGITS, epochs=20)
    benchmark.pedantic(lambda: [train_all(each, course, data, 4) for each in learners], rounds=1)


def test_text(benchmark: Any) -> None:
    """An epoch of ten seeds of one schedule: four blocks of width 64, 200,000 characters."""
    data, learner = load_data("text"), read_learner("multi-cdp", 4, {})
    benchmark.pedantic(lambda: train_all(learner, TEXT, data, 4), rounds=1)
