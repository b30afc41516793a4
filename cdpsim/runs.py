"""A run: a program, what it cost and when everything started and ended; and the same run at rest."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.units import Number, json_number, simplified
from cdpsim.numeric.columns import Columns, Ints, Times
from cdpsim.program import Category, Program
from cdpsim.program.collectives import Algorithm
from cdpsim.request import Request
from cdpsim.timing.costs import Costs
from cdpsim.trace import Trace, run_tables
from cdpsim.trace.metrics import communication, memory, staleness, steady, utilisation
from cdpsim.version import __version__

FEW_STEPS = 3  # so many cost less to look at than another run of one
MOST_STEPS = 96  # or four times as many as dependencies reach back
MOST_TASKS = 2**22  # of a run that is made to find out how steps repeat, but for the first such run
# Of a run whose steps may not repeat, as messages share links or devices change: so many steps at least, and as long as
# it has no more nodes than that, more.
MEASURED_STEPS, MOST_SHARED = 12, 2**16


@dataclass(frozen=True, eq=False)
class Run(Trace):
    """A request, its program, what that costs, and when every node started and ended: a trace that knows why.

    `longer` makes the same run with more steps, or fewer.
    """

    request: Request
    program: Program
    costs: Costs
    start: Times
    end: Times
    longer: "Callable[[int], Run] | None" = None

    def __repr__(self) -> str:
        return f"Run({self.request!r})"

    @cached_property
    def trace(self) -> Trace:
        """Its tables alone, without what made them."""
        return Trace(self.tasks, self.messages, self.memory, self.summary())

    @cached_property
    def tasks(self) -> Columns:
        """One row per task, as a trace has them."""
        return run_tables.task_columns(self.program, self.start, self.end, self.task_nodes)

    @cached_property
    def messages(self) -> Columns:
        """One row per message, as a trace has them."""
        return run_tables.message_columns(self.program, self.costs, self.start, self.end, self.message_nodes)

    @cached_property
    def memory(self) -> Columns:
        """What each device holds of each category from each time on, one row per change."""
        return run_tables.memory_columns(self.program, self.start, self.end)

    @cached_property
    def task_nodes(self) -> Ints:
        """The program's node behind each row of `tasks`."""
        return run_tables.sort_tasks(self.program, self.start)

    @cached_property
    def message_nodes(self) -> Ints:
        """The program's node behind each row of `messages`."""
        return run_tables.sort_messages(self.program, self.costs, self.start, self.end)

    @property
    def algorithms(self) -> list[Algorithm | None] | None:
        """The algorithm that each row of `messages` runs by, None of a row point to point; None without collectives."""
        if not len(self.costs.runs_by):
            return None
        known: list[Algorithm | None] = [*self.costs.algorithms, None]
        rows = self.message_nodes - len(self.program.tasks)
        return [known[number] for number in self.costs.runs_by[rows].tolist()]

    @property
    def in_slots(self) -> bool:
        """Whether times are slots and sizes stages' worth; else they are seconds and bytes."""
        return bool(self.start.dtype.kind == "i")

    def summary(self) -> dict[str, Any]:
        """Give the content of summary.json."""
        return self._summed

    @cached_property
    def _summed(self) -> dict[str, Any]:
        program, rest = self.program, self.at_rest
        names = [*(category.name.lower() for category in Category), "total"]
        sent = [
            json_number(size) if self.in_slots else float(size)
            for size in communication.bytes_sent(program, self.costs)
        ]
        hosts = [] if self.on_hosts is None else self.on_hosts.tolist()
        offloaded = {"host_memory": [{"device": device, "bytes": size} for device, size in enumerate(hosts)]}
        apart: dict[str, Any] = {"mismatched": staleness.mismatched(program)} if program.versions_differ else {}
        apart |= {"untied": [list(stages) for stages in program.untied]} if program.untied else {}
        return {
            "cdpsim": __version__,
            "request": self.request.to_builtins(),
            "devices": program.devices,
            "tasks": len(program.tasks),
            "messages": len(program.messages),
            "makespan": utilisation.makespan(program, self.end),
            "period": json_number(rest.period),
            "period_is": rest.period_is,
            "bubble": rest.bubble,
            "idle_of_run": utilisation.idle_share(program, self.start, self.end, self.costs.calendar),
            "mean_staleness": rest.staleness,
            **apart,
            "peak_memory": [
                {"device": device} | dict(zip(names, row, strict=True))
                for device, row in enumerate(self.peaks.tolist())
            ],
            "bytes_sent": [{"device": device, "bytes": size} for device, size in enumerate(sent)],
        } | (offloaded if hosts else {})

    @cached_property
    def peaks(self) -> Ints:
        """The most that each device holds: a row per device, a column per category and one for the total."""
        return memory.peak_memory(self.program, self.start, self.end)

    @property
    def room(self) -> Times:
        """The bytes that each device has; inf where there is no limit."""
        return self.request.cluster.memory_bytes(self.program.devices)

    @cached_property
    def on_hosts(self) -> Ints | None:
        """The most bytes on each device's host; None where nothing is offloaded."""
        model = self.request.timed_model
        sizes = [np.array([getattr(stage, name) for stage in model.stages]) for name in ("offloaded", "host_optimizer")]
        return memory.peak_host_memory(self.program, self.start, self.end, *sizes) if any(map(np.any, sizes)) else None

    @cached_property
    def settled(self) -> bool:
        """Whether steps may repeat each other exactly.

        Nothing is random, no device stops, messages share no links, and devices are alike where tasks change theirs.
        """
        disorder, cluster, devices = self.request.disorder, self.request.cluster, self.program.devices
        if disorder.is_random or disorder.stop or self.costs.wires is not None:
            return False
        return not steady.changes_devices(self.program) or (
            not disorder.slow and cluster.sized(devices).is_alike(devices)
        )

    @property
    def listed(self) -> bool:
        """Whether every device does the same list in each step."""
        return self.request.schedule.order.lists is not None

    @cached_property
    def at_rest(self) -> "SteadyState":
        """The run as it goes on once all is under way, whatever number of steps was asked for."""
        if self.listed and self.settled and not self._disturbed:
            one = self if self.program.steps <= FEW_STEPS or self.longer is None else self.longer(1)
            period = steady.period_of_separate_steps(one.program, one.start, one.end)
            if period is not None:
                return SteadyState(one, period, True, range(1), steady.steps_of_nodes(one.program), 0, period)
        found = self
        for steps in self._lengths():
            try:
                found = self if steps == self.program.steps or self.longer is None else self.longer(steps)
            except RequestError:  # there is no room for more steps
                break
            if self.settled and not found.settled:  # a single step does not show that tasks change their devices
                return found.at_rest
            if not self._disturbed and (rest := _repeated(found, certain=self.settled)):
                return rest
        return _measured(found, disturbed=self._disturbed)

    def _lengths(self) -> list[int]:
        """How many steps are tried, one number after another."""
        program = self.program
        if self.longer is None or self._disturbed:  # what chance and stops do is asked of these steps
            return [program.steps]
        least = max(3, program.fill + (2 if program.together else 4))
        most, room = max(MOST_STEPS, 4 * (program.fill + 1)), MOST_TASKS * program.steps // program.compute
        if not self.settled:
            least, room = max(MEASURED_STEPS, 2 * least), MOST_SHARED * program.steps // program.nodes
        return [*steady.step_counts(least, max(least, min(most, room)))]

    @property
    def _disturbed(self) -> bool:
        """Whether figures are asked of its own steps: chance, stops and given counts differ from step to step."""
        given = self.request.counts is not None
        return given or self.request.disorder.is_random or self.costs.calendar is not None


@dataclass(frozen=True, eq=False)
class SteadyState:
    """Training steps of a run at rest, and a time of them.

    The period is certified where every later step is known to repeat these; otherwise it is their mean. From `low` to
    `high` all devices do what they do at rest.
    """

    run: Run
    period: Number
    certified: bool
    steps: range
    step: Ints  # of each node
    low: Any  # slots or seconds
    high: Any

    @property
    def period_is(self) -> str:
        """What summary.json says of the period."""
        return "certified" if self.certified else "measured"

    @cached_property
    def bubble(self) -> float:
        """The share of the lanes' time in which they do nothing."""
        run = self.run
        return utilisation.idle_share(run.program, run.start, run.end, run.costs.calendar, self.low, self.high)

    @property
    def staleness(self) -> float:
        """How many training steps old what a forward reads is on average, as soon as all lags are there."""
        run, full = self.run, self.run.program.fill
        if run.program.steps <= full and run.longer is not None:
            run = run.longer(full + 1)
        return staleness.mean_staleness(run.program, min(full, run.program.steps - 1))

    @cached_property
    def messages(self) -> Ints:
        """The messages of these steps, as their rows in the program."""
        step = self.step[self.run.program.message_nodes]
        return np.flatnonzero((step >= self.steps.start) & (step < self.steps.stop))

    def per_step(self, total: int | float | Fraction) -> Number:
        """Share something of these steps among them; exactly where it is exact."""
        return total / len(self.steps) if isinstance(total, float) else simplified(Fraction(total, len(self.steps)))


def _repeated(run: Run, *, certain: bool) -> SteadyState | None:
    """The steps of a run that repeat, where it is long enough to show a whole repetition; certain to go on, or not."""
    program, start, end = run.program, run.start, run.end
    step = steady.steps_of_nodes(program)
    found = steady.certify(program, step, start, end)
    if found is None or (span := steady.find_rest(program, step, found, start, end)) is None:
        return None
    last = min(found.last, steady.last_read_step(program))
    steps = range(last + 1 - found.every, last + 1)
    if steps.start < max(found.first, program.fill + 1):
        return None
    return SteadyState(run, _quotient(found.later, found.every), certain, steps, step, *span)


def _measured(run: Run, *, disturbed: bool) -> SteadyState:
    """The mean over the last half of a run, before devices run dry at its end."""
    program, step = run.program, steady.steps_of_nodes(run.program)
    if disturbed:
        last = steady.last_followed_step(program, step)
    else:
        complete = steady.last_complete_step(program, step, run.start, steady.dependency_reach(program, step)[1])
        last = max((program.steps - 1) // 2, min(complete, steady.last_read_step(program)))
    ends = steady.ends_of_steps(program, run.end)
    steps = steady.last_half(last)
    if not ends[last] > ends[steps.start - 1]:  # as steps that overlap may end at one moment
        steps = range(last + 1)
    low = ends[steps.start - 1].item() if steps.start else 0
    return SteadyState(run, _quotient(ends[last].item() - low, len(steps)), False, steps, step, low, ends[last].item())


def _quotient(span: Any, steps: int) -> Number:
    period: Number = simplified(Fraction(span, steps)) if isinstance(span, int) else span / steps
    return period
