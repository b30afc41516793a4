"""Sweeps ask what networks learn with the staleness of schedules, and answer as the command does."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")  # has the digits

from cdpsim import RequestError, study
from validation.__main__ import main
from validation.learn.question import LEARN

SMALL: dict[str, Any] = {"n": 2, "epochs": 2, "seeds": 3, "layers": 2, "width": 8}
COLUMNS = [*LEARN.columns[1:]]


@pytest.mark.slow
def test_a_point_is_a_line_of_the_command(tmp_path: Path) -> None:
    """The mean lag, accuracies and losses of two schedules at two rates, to the last bit."""
    axes: dict[str, Any] = {"schedule": ["multi-dp", "multi-cdp"], "lr": [0.05, 0.2]}
    table = study(axes, SMALL, tmp_path / "sweep", what="learn", workers=1).table()
    asked = [f"--{name}={value}" for name, value in SMALL.items() if name != "n"]
    folder = str(tmp_path / "learned")
    assert main(["learn", "multi-dp", "multi-cdp", "-n", "2", "--lr", "0.05,0.2", "-o", folder, *asked]) == 0
    answers = json.loads((tmp_path / "learned" / "learn.json").read_text())["answers"]
    found = {(each["schedule"], each["rate"]): each for each in answers}
    for row in zip(*(table[name] for name in ("schedule", "lr", *COLUMNS)), strict=True):
        answer = found.pop(row[:2])
        assert [*row[2:]] == [answer["lag"], *answer["accuracy"], *answer["loss_at_a_tenth"], answer["diverged"]]
    assert not found and table["refused"] == [None] * 4


def test_settings_are_those_of_the_command_line() -> None:
    """Lists are texts with commas, and rules, rounds and local steps go along."""
    asked = SMALL | {"schedule": "local-sgd", "n": 1, "replicas": 2, "local_steps": 2, "optimizer": "sgd"}
    usual = LEARN.ask(asked)
    assert usual[0] == "local-sgd"
    lower = LEARN.ask(asked | {"drops": [0.3, 0.6], "drop_by": 0.1})
    assert lower == LEARN.ask(asked | {"drops": "0.3,0.6", "drop_by": "0.1"}) != usual
    rules = [LEARN.ask(SMALL | {"schedule": "multi-cdp", "rule": rule})[1] for rule in ("cdp-v1", "cdp-v2")]
    assert rules == [1.0, 0.25]
    warmed = LEARN.ask(SMALL | {"schedule": "post-local-sgd", "n": 1, "replicas": 2, "schedule_warm_up": 3})
    assert warmed[0] == "post-local-sgd"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lr": [0.01, 0.1]}, "lr: 0.01,0.1 are several rates; give one, or make it an axis"),
        ({"best_of": 3}, "best-of: 3 epochs are more than a training has; give at most 2"),
        ({"like_paper": "no"}, "neither True nor False"),
        ({"chunks": 2}, "chunks"),
        ({"n": 0}, "n=0 must be at least 1"),
        ({"batch": 7}, "batch: 7 samples are not divided by 2 micro-batches"),
    ],
)
def test_what_cannot_be_learnt_is_refused_in_a_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        LEARN.ask({"schedule": "multi-cdp"} | SMALL | options)


def test_options_that_make_no_difference_are_no_options(tmp_path: Path) -> None:
    for name in ("margin", "max_memory"):
        with pytest.raises(RequestError, match="unknown option"):
            study({"schedule": ["multi-dp"]}, SMALL | {name: 1}, tmp_path / name, what="learn", workers=1)
