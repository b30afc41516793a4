"""Questions of other packages: found by their entry points, imported when they are asked."""

from collections.abc import Iterator
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import RequestError, study
from cdpsim.studies.sweep import questions
from cdpsim.studies.sweep.questions import GROUP, QUESTIONS, Question, cell, find_question, question_names

DOUBLED = Question(("number",), ("number",), ("doubled",), lambda options: [2 * options["number"]])


def __getattr__(name: str) -> object:
    if name == "BROKEN":
        return 1 / 0
    raise AttributeError(name)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Five packages with a question, of which one has the name of ours."""
    found = {
        "double": "tests.studies.test_sweep_questions:DOUBLED",
        "gone": "tests.studies.no_such_module:QUESTION",
        "broken": "tests.studies.test_sweep_questions:BROKEN",
        "word": "tests.studies.test_sweep_questions:GROUP",
        "compare": "tests.studies.test_sweep_questions:DOUBLED",
    }
    given = [EntryPoint(name, value, GROUP) for name, value in found.items()]
    monkeypatch.setattr(questions, "entry_points", lambda *, group: given if group == GROUP else [])
    find_question.cache_clear()
    yield
    find_question.cache_clear()


def test_a_question_of_another_package_is_asked(tmp_path: Path) -> None:
    assert question_names() == [*QUESTIONS, "double", "gone", "broken", "word"]
    table = study({"number": [1, 2, 3]}, {}, tmp_path / "sweep", what="double", executor=Here()).table()
    assert table["doubled"] == [2, 4, 6]


def test_ours_keep_their_names() -> None:
    assert find_question("compare") is QUESTIONS["compare"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gone", "'gone' of tests.studies.no_such_module cannot be imported: ModuleNotFoundError: .*; install what it"),
        ("broken", "'broken' of tests.studies.test_sweep_questions cannot be imported: ZeroDivisionError: .*, or mend"),
        ("word", "'word' of tests.studies.test_sweep_questions is no question; mend that package"),
        ("duble", "unknown what 'duble'"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(name: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        find_question(name)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3),
        ("ring", "ring"),
        (None, None),
        (True, True),
        (Fraction(6, 4), "3/2"),
        (Fraction(4, 2), 2),
        (np.int64(3), 3),
        (np.float64(0.25), 0.25),
        (np.bool_(True), True),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
    ids=repr,
)
def test_a_figure_is_stored_as_json_has_it(value: Any, written: Any) -> None:
    assert (cell(value), type(cell(value))) == (written, type(written))


class Here:
    """An executor that does at once what it is given."""

    def submit(self, call: Any, *arguments: Any) -> Any:
        from concurrent.futures import Future

        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done
