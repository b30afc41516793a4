"""Requests of the few steps that show all others, with their programs."""

from dataclasses import replace
from typing import NamedTuple

from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.runs.assembling import KNOWN_PROGRAMS, price_request
from cdpsim.runs.playing import run
from cdpsim.runs.steady_state import few_steps, may_be_separate
from cdpsim.timing.engine import quantum_to_compare


class FewSteps(NamedTuple):
    """The request of few steps that show all others, and its program."""

    request: Request
    program: Program

    def run(self, quantum: float | None = 0.0) -> Run:
        """Return their run; in a quantum, or if None in one to compare it by.

        If a single step turns out not to show the others, more of them can be run in that quantum, too.
        """
        program, request = self.program, self.request
        costs = price_request(program, request)
        quantum = quantum_to_compare(program, costs, few_steps(request)) if quantum is None else quantum
        return run(program, replace(costs, quantum=quantum), request.engine)

    def of_steps(self, steps: int) -> "FewSteps":
        """Return the same request with another number of steps, and its program."""
        return _with_steps(self.request, steps)


def steady_steps(request: Request) -> FewSteps:
    """Return the few steps of a request that show all others."""
    return _with_steps(request, 1 if may_be_separate(request) else few_steps(request))


def _with_steps(request: Request, steps: int) -> FewSteps:
    few = request.with_steps(steps, ignore_memory=True)
    return FewSteps(few, KNOWN_PROGRAMS.find(few))
