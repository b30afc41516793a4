"""Runs of the few steps of a request that show all others."""

from dataclasses import replace
from typing import NamedTuple

from cdpsim.front import price_request, run
from cdpsim.model.runtime import PAPER
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.runs import Run, few_steps
from cdpsim.schedules.state import Home
from cdpsim.studies.programs import KNOWN_PROGRAMS
from cdpsim.timing.ticks import tick_to_compare


class FewSteps(NamedTuple):
    """The request of few steps that show all others, and its program."""

    request: Request
    program: Program

    def run(self, tick: float | None = 0.0) -> Run:
        """Return their run; in a tick, or if None in one to compare it by.

        If a single step turns out not to show the others, more of them can be run in that tick, too.
        """
        program, request = self.program, self.request
        costs = price_request(program, request)
        tick = tick_to_compare(program, costs, few_steps(request)) if tick is None else tick
        return run(program, replace(costs, tick=tick), request.engine)

    def of_steps(self, steps: int) -> "FewSteps":
        """Return the same request with another number of steps, and its program."""
        return few_of_steps(self.request, steps)


def may_be_separate(request: Request) -> bool:
    """Return whether one step may show all others: of a pipeline whose ranks exchange sums of gradients alone."""
    is_listed = bool(request.schedule.order.lists) and request.runtime == PAPER
    return is_listed and (request.shape.replicas == 1 or set(request.state.homes) == {Home.COPIED})


def steps_at_rest(request: Request) -> FewSteps:
    """Return the few steps of a request that show all others."""
    return few_of_steps(request, 1 if may_be_separate(request) else few_steps(request))


def few_of_steps(request: Request, steps: int) -> FewSteps:
    """Return a request with another number of steps, and its program."""
    few = request.with_steps(steps, ignore_memory=True)
    return FewSteps(few, KNOWN_PROGRAMS.find(few))
