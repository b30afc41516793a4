"""The points of a sweep answered one after another, each a row of the store."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from cdpsim.errors import RequestError, Stalled, one_line
from cdpsim.studies.sweep.contents import Objects
from cdpsim.studies.sweep.points import Points, SweepPlan
from cdpsim.studies.sweep.questions import find_question, shortened
from cdpsim.studies.sweep.store import DONE, FAILED, REFUSED, load_study, row_of

_LONGEST_LINE = 300  # characters of why a point has no result


class OutcomeCounts(msgspec.Struct):
    """How many points have a result, were refused, and failed."""

    result: int = 0
    refused: int = 0
    failed: int = 0

    def add(self, other: "OutcomeCounts") -> None:
        """Add other points."""
        self.result += other.result
        self.refused += other.refused
        self.failed += other.failed

    @property
    def all(self) -> int:
        """The number of points."""
        return self.result + self.refused + self.failed


class Evaluator:
    """Answers to the points of a plan; models, clusters and names are made once."""

    def __init__(self, plan: SweepPlan) -> None:
        self.points = Points(plan)
        self._objects = Objects(plan)
        self._question = find_question(plan.what)

    def row(self, number: int) -> tuple[str, bytes]:
        """Return how a point ends, and its row."""
        index = self.points.index(number)
        kind, outcome = self._answer(self.points.settings(index))
        return kind, row_of(self.points.name(index), self.points.values(index), kind, outcome)

    def failed_row(self, number: int, why: str) -> bytes:
        """Return the row of a point that failed."""
        index = self.points.index(number)
        return row_of(self.points.name(index), self.points.values(index), FAILED, why)

    def _answer(self, settings: dict[str, Any]) -> tuple[str, Any]:
        try:
            cells = shortened(self._question, self._question.ask(self._objects.options(settings)))
        except (RequestError, Stalled) as error:
            return REFUSED, one_line(str(error), _LONGEST_LINE)
        except Exception as error:  # a fault of ours, or too little memory, must not end the other points
            return FAILED, one_line(f"{type(error).__name__}: {error}", _LONGEST_LINE)
        if self._question.columns[0] == "schedule":
            cells[0] = settings["schedule"]  # as the sweep names it, and not by the path of its file
        return DONE, cells

    def answer_all(self, numbers: Iterable[int], append: Callable[[bytes], object]) -> OutcomeCounts:
        """Append the rows of points, and count how they end."""
        counts = OutcomeCounts()
        for number in numbers:
            kind, row = self.row(number)
            append(row)
            setattr(counts, kind, getattr(counts, kind) + 1)
        return counts


_EVALUATORS: dict[str, Evaluator] = {}  # of this process, by the stamp of the sweep


def answer_block(folder: str, stamp: str, numbers: list[int]) -> tuple[OutcomeCounts, list[bytes]]:
    """Return the rows of points of the sweep in a folder, for executors; a process reads the sweep once."""
    if stamp not in _EVALUATORS:
        _EVALUATORS[stamp] = Evaluator(load_study(Path(folder), stamp))
    rows: list[bytes] = []
    return _EVALUATORS[stamp].answer_all(numbers, rows.append), rows
