"""The steady state of a run's training steps: which steps show it, their period, and a time in which all are in it."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cdpsim.cluster.topology import NONE
from cdpsim.errors import Stalled, TooLarge
from cdpsim.files.units import Number, simplified
from cdpsim.model.runtime import PAPER, PAPER_BEHAVIOURS
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, EdgeKind, Program
from cdpsim.request import Request
from cdpsim.schedules.state import Placed
from cdpsim.timing.round_times import brought_first, rounds_of
from cdpsim.trace.metrics import memory, steady, waiting

if TYPE_CHECKING:
    from cdpsim.runs import Run


FEW_STEPS = 3  # steps of a run that takes less time to look at than another run of one step
# Runs that are made to find out how steps repeat:
MOST_STEADY_STEPS = 96  # or four times the steps that dependencies reach back
MOST_STEADY_TASKS = 2**22  # but for the first such run
# Where steps may not repeat, as messages share links or devices change: steps at least, and nodes at most.
LEAST_UPDATES_OF_ROUNDS = 3  # until what tasks read is as old as it always will be
STEADY_UPDATES = (6, 12, 24, 48)  # of runs with rounds, until they repeat
MEASURED_STEPS, MOST_MEASURED_NODES = 12, 2**16


@dataclass(frozen=True, eq=False)
class SteadyState:
    """Training steps of a run in its steady state, and a time during them.

    The period is certified where every later step is known to repeat these; otherwise it is their mean. From `low` to
    `high` all devices are in the steady state. A run of less than `since` steps does not have one that is like these.
    """

    run: "Run"
    period: Number
    certified: bool
    steps: range
    step: Ints  # of each node
    low: Any  # slots or seconds
    high: Any
    since: int = 0
    not_steady: str = ""  # why the run cannot be continued to it, so that the metrics are of the run's own steps

    def __repr__(self) -> str:
        unit = "slots" if self.run.in_slots else "s"
        period = f"{self.period_is} period {float(self.period):.4g} {unit}"
        return f"SteadyState({period}, of steps {self.steps[0]} to {self.steps[-1]} of {self.run.request!r})"

    @property
    def is_steady(self) -> bool:
        """Whether the steps are of the steady state; else they are the run's own."""
        return not self.not_steady

    @property
    def period_is(self) -> str:
        """The word for the period in summary.json."""
        return "not steady" if not self.is_steady else "certified" if self.certified else "measured"

    @property
    def starts_again(self) -> bool:
        """Whether it is the first step, which all others are like: at its end the run starts again."""
        return self.certified and self.steps.start == 0

    @cached_property
    def bubble(self) -> float:
        """The share of the lanes' time in which they are idle."""
        run = self.run
        return waiting.idle_share(run.program, run.start, run.end, run.costs.calendar, self.low, self.high)

    @cached_property
    def waits(self) -> waiting.Waits | None:
        """How long lanes wait for messages; None where neither messages nor streams take time."""
        run = self.run
        sent = run.costs.duration[run.program.message_nodes]
        if not sent.any() and not np.any(run.program.edges.kind == EdgeKind.STREAM):
            return None
        again = self.starts_again
        return waiting.IdleLanes(run.program, run.start, run.end, again).waits(self.low, self.high)

    @property
    def staleness(self) -> float:
        """The mean age, in training steps, of the versions that forwards read, once all lags are there."""
        program = self.aged
        if program.thrown_away:
            return _staleness_of_rounds(program)
        step = min(program.fill, program.steps - 1)
        return memory.mean_staleness(program, range(step, step + 1))

    @cached_property
    def aged(self) -> Program:
        """The program of the run, or of a longer one, in whose last steps all lags are there."""
        run, program = self.run, self.run.program
        if program.thrown_away:
            least = LEAST_UPDATES_OF_ROUNDS + run.request.shape.warm_up
            return run.of_steps(least).program if self.is_steady and run.request.steps < least else program
        short = self.is_steady and program.steps <= program.fill
        return run.lengthen(program.fill + 1) if short and run.lengthen else program

    @cached_property
    def messages(self) -> Ints:
        """The messages of these steps, as their rows in the program."""
        step = self.step[self.run.program.message_nodes]
        return np.flatnonzero((step >= self.steps.start) & (step < self.steps.stop))

    def per_step(self, total: int | float | Fraction) -> Number:
        """Return the mean over these steps of a total over them; exact for exact numbers.

        Several rounds may make one update, and are one step.
        """
        return _exact_quotient(total, self.updates)

    @property
    def passes(self) -> Fraction:
        """The micro-batches of all replicas in a step."""
        program = self.run.program
        return Fraction(int(program.counts[self.steps].sum()) * program.fold, self.updates)

    @property
    def updates(self) -> int:
        """The number of updates that these steps make, but for estimates."""
        return _updates_of(self.run.program, self.steps)


def find_steady_state(run: "Run") -> SteadyState:
    """Return the steady state of a run's steps, of the run itself where longer ones have no room or never end."""
    try:
        state = _find_steady_state(run)
        _ = state.aged  # which may need more steps than the state
        return state
    except (TooLarge, Stalled) as error:
        rounds = run.program.thrown_away
        own = _last_rounds(run, grow=False) if rounds else _mean_steps(run, irregular=_is_irregular(run))
        why = "no room for more steps" if isinstance(error, TooLarge) else "more steps never end"
        return replace(own, certified=False, not_steady=why)


def _find_steady_state(run: "Run") -> SteadyState:
    """Return the steady state; raise an error if there is no room for the runs that show it."""
    if run.program.thrown_away:
        return _steady_rounds(run)
    irregular = _is_irregular(run)
    if run.may_repeat and not irregular and (state := _separate_steps(run)):
        return state
    longer = run
    for steps in _numbers_of_steps(run):
        longer = run.of_steps(steps)
        if run.may_repeat and not longer.may_repeat:  # a single step does not show that tasks change their devices
            return _find_steady_state(longer)
        if not irregular and (state := _repeated_steps(longer, certified=run.may_repeat)):
            return state
    return _mean_steps(longer, irregular=irregular)


def _separate_steps(run: "Run") -> SteadyState | None:
    """Return the first of steps that follow each other without touching; None if it does not show that they do.

    What a runtime keeps goes on to the next step, and so does a version that is made before a device's last task: what
    is held then is known from several steps.
    """
    order = run.request.schedule.order
    if order.lists is None or order.local or not steady.sends_within_steps(run.program):
        return None
    one = run if run.program.steps <= FEW_STEPS else run.of_steps(1)
    period = steady.period_of_separate_steps(one.program, one.end)
    if period is None:
        return None
    is_held = one.program.behaviours == PAPER_BEHAVIOURS and steady.updates_last(one.program, one.start, one.end)
    one = one if is_held or one.program.steps >= FEW_STEPS else one.of_steps(FEW_STEPS)
    return SteadyState(one, period, True, range(1), steady.steps_of_nodes(one.program), 0, period)


def _numbers_of_steps(run: "Run") -> list[int]:
    """Return the numbers of steps to try, one after another."""
    program, steps = run.program, run.request.steps
    if run.rerun is None or _is_irregular(run):
        return [steps]
    least = few_steps(run.request)
    most = max(MOST_STEADY_STEPS, 4 * (program.fill + 1))
    room = MOST_STEADY_TASKS * steps // program.compute
    if not run.may_repeat:
        least, room = max(MEASURED_STEPS, 2 * least), MOST_MEASURED_NODES * steps // program.nodes
    return [*steady.step_counts(least, max(least, min(most, room)))]


def _is_irregular(run: "Run") -> bool:
    """Return whether steps differ by chance, stops or given counts, so that metrics are those of the run's own."""
    disturbed = run.request.disorder.is_random or run.costs.calendar is not None
    return disturbed or run.request.counts is not None


def few_steps(request: Request) -> int:
    """Return the steps of a run that shows how they repeat: the first ones fill devices, and read what was there.

    Some gathers come ahead of the next step.
    """
    shape, behind = request.shape, 2 if request.schedule.order.together else 4
    return max(FEW_STEPS + request.state.splits, request.rule.fill(shape) + behind) + shape.warm_up


def may_be_separate(request: Request) -> bool:
    """Return whether one step may show all others: of a pipeline whose ranks exchange sums of gradients alone."""
    is_listed = bool(request.schedule.order.lists) and request.runtime == PAPER
    return is_listed and (request.shape.replicas == 1 or set(request.state.placements) == {Placed.COPIED})


def _repeated_steps(run: "Run", *, certified: bool) -> SteadyState | None:
    """Return the steps of a run that repeat; None if it is too short to show a whole repetition."""
    program, start, end, step = run.program, run.start, run.end, steady.steps_of_nodes(run.program)
    repetition = steady.certify(program, start, end)
    if repetition is None or (span := steady.find_steady_time(program, repetition, start, end)) is None:
        return None
    last = min(repetition.last, steady.last_read_step(program))
    steps = range(last + 1 - repetition.every, last + 1)
    if steps.start < max(repetition.first, program.fill + 1, run.request.shape.warm_up):
        return None
    period = _period_of(program, steps, repetition.later)
    return SteadyState(run, period, certified, steps, step, *span, repetition.first)


def _updates_of(program: Program, steps: range) -> int:
    """Return the number of updates of theta that take gradients of these steps.

    Of local steps it is that of as many steps from one update to another, wherever these begin.
    """
    if program.averaged is None:
        return len(np.unique(program.update_of_step[steps.start : steps.stop]))
    before = program.update_of_step[steps.start - 1] if steps.start else -1
    return int(program.update_of_step[steps.stop - 1] - before)


def _period_of(program: Program, steps: range, took: Number) -> Number:
    """Return the mean time from one step to the next; of local steps, from one update by a mean to the next."""
    return _exact_quotient(took, len(steps) if program.averaged is None else _updates_of(program, steps))


def last_steps(run: "Run", last: int) -> range:
    """Return the last half of a run's steps up to one, without those of a warm-up where there are others."""
    program, shape, local = run.program, run.request.shape, run.request.schedule.order.local
    if local and local.late:  # no mean is taken of the last round
        last = min(last, program.steps - 1 - shape.local_steps)
    last = max(last, int(np.flatnonzero(program.update_of_step == 0)[-1]))
    behind = steady.last_half(last - shape.warm_up) if last >= shape.warm_up else range(last + 1 - shape.warm_up)
    return _whole_updates(program, range(behind.start + shape.warm_up, last + 1))


def _mean_steps(run: "Run", *, irregular: bool) -> SteadyState:
    """Return the last half of a run's steps, before devices run dry at its end, with their mean as the period."""
    program, step = run.program, steady.steps_of_nodes(run.program)
    if irregular:
        last = steady.last_followed_step(program)
    else:
        complete = steady.last_complete_step(program, run.start)
        last = max((program.steps - 1) // 2, min(complete, steady.last_read_step(program)))
    ends, steps, local = steady.ends_of_steps(program, run.end), last_steps(run, last), run.request.schedule.order.local
    if not ends[steps.stop - 1] > ends[steps.start - 1]:  # as steps that overlap may end at one moment
        steps = _whole_updates(program, range(steps.stop))
    low, high = ends[steps.start - 1].item() if steps.start else 0, ends[steps.stop - 1].item()
    period = _period_of(program, steps, high - low)
    if irregular and not (program.together or (local and not local.late)):
        first, dry = steady.busy_span(program, run.start, run.end)
        if max(low, first) < min(high, dry):
            low, high = max(low, first), min(high, dry)
    return SteadyState(run, period, False, steps, step, low, high)


def _whole_updates(program: Program, steps: range) -> range:
    """Return those of some last steps whose gradients enter the same updates as no other step's; one update's at least.

    Where each update takes one step's gradients, these are all.
    """
    first = np.flatnonzero(np.diff(program.update_of_step, prepend=-1, append=program.steps + 1))
    until = first[np.searchsorted(first, steps.stop, side="right") - 1]
    since = first[min(np.searchsorted(first, steps.start), np.searchsorted(first, until) - 1)]
    return range(int(since), int(until)) if until > 0 else steps


def _steady_rounds(run: "Run") -> SteadyState:
    """Return updates of a run with rounds that repeat those before them; if there are none, its last ones.

    All that follows a hand-over depends on how much earlier than the last worker each of the others hands over.
    """
    if run.request.disorder.is_random or run.costs.calendar is not None or run.rerun is None:
        return _last_rounds(run)
    room = MOST_MEASURED_NODES * run.request.steps // run.program.nodes if run.request.expands else STEADY_UPDATES[-1]
    for updates in STEADY_UPDATES:
        run = run.of_steps(updates + run.request.shape.warm_up)
        if updates > room:
            break
        if state := _repeated_rounds(run):
            return state
    return _last_rounds(run)


def _repeated_rounds(run: "Run") -> SteadyState | None:
    """Return the least number of updates after which a run with rounds repeats; None if it is too short to show it."""
    program, found = run.program, rounds_of(run.program, run.end)
    first = np.flatnonzero(np.diff(program.update_of_step, prepend=-1))  # step of each update, and the one thrown away
    last = len(first) - 2
    posted = found.posted[first]
    ahead, tolerance = posted.max(axis=1, keepdims=True) - posted, 1e-12 * posted[-1].max()
    same = (np.abs(ahead - ahead[last]) <= tolerance).all(axis=1)
    before = np.flatnonzero(same[run.request.shape.warm_up + program.fill + 1 : last])
    if not len(before):
        return None
    since = run.request.shape.warm_up + program.fill + 1 + int(before[-1])
    low, high = posted[since].max().item(), posted[last].max().item()
    steps, period = range(int(first[since]), int(first[last])), _exact_quotient(high - low, last - since)
    return SteadyState(run, period, run.costs.wires is None, steps, _steps_of_rounds(run), low, high)


def _steps_of_rounds(run: "Run") -> Ints:
    """Return the step of each node; the last communication, which no worker uses, has one more than the last step."""
    program = run.program
    messages = program.messages.step.copy()
    messages[np.setdiff1d(np.flatnonzero(program.messages.content == Content.PARAMETERS), brought_first(program))] = (
        program.steps
    )
    step = np.concatenate([program.tasks.step, messages])
    return np.append(step, step[program.first_messages])


def _last_rounds(run: "Run", *, grow: bool = True) -> SteadyState:
    """Return the rounds of the last half of a run's updates, and the mean time from one of these to the next.

    All devices are at work until the first of them ends. A run of one update that others follow may `grow` by one.
    """
    program, found = run.program, rounds_of(run.program, run.end)
    updates = int(program.update_of_step[program.updated - 1]) + 1
    ends = np.append(np.searchsorted(program.update_of_step, np.arange(updates)), program.updated)
    warm_up, last = run.request.shape.warm_up, updates
    first = warm_up + (updates - warm_up) // 2
    if _waits_at_its_end(run):
        if last - first == 1 and grow and run.rerun:
            return _last_rounds(run.of_steps(updates + 1))
        last = max(last - 1, first + 1)
    steps, handed_over = range(int(ends[first]), int(ends[last])), found.posted.max(axis=1)
    low, high = handed_over[steps.start].item(), handed_over[steps.stop].item()
    period = _exact_quotient(high - low, last - first)
    low, high = found.posted[steps.start].max().item(), found.posted[steps.stop].min().item()
    low = low if low < high else 0
    return SteadyState(run, period, False, steps, _steps_of_rounds(run), low, high)


def _waits_at_its_end(run: "Run") -> bool:
    """Return whether the tasks of a run's last round wait for more than one gather, which others do not."""
    content = run.program.messages.content
    several = len(brought_first(run.program)) < int(np.count_nonzero(content == Content.PARAMETERS))
    return several and NONE in run.request.cluster.overlaps(run.program.devices)


def _staleness_of_rounds(program: Program) -> float:
    """Return the mean staleness of the last update's gradients; the first ones read what was there at the start."""
    update, stop = program.update_of_step, program.updated
    first = int(np.searchsorted(update, update[stop - 1]))
    return memory.mean_staleness(program, range(first, stop))


def _exact_quotient(total: Any, count: int) -> Number:
    quotient: Number = total / count if isinstance(total, float) else simplified(Fraction(total, count))
    return quotient
