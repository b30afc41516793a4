"""Runs: a program, its costs and the times of its nodes; and the steady state of its training steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from cdpsim.cluster.devices import NONE
from cdpsim.errors import Stalled, TooLarge
from cdpsim.files.units import Number, counted, json_number, short_text, simplified
from cdpsim.model.runtime import PAPER_HABITS
from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Category, Content, EdgeKind, Program
from cdpsim.program.collectives import Algorithm
from cdpsim.request import Request
from cdpsim.timing.costs import Costs
from cdpsim.timing.rounds import brought_first, rounds_of
from cdpsim.trace import Trace, run_tables
from cdpsim.trace.metrics import communication, memory, staleness, steady, utilisation, waiting
from cdpsim.trace.table import MemoryRow, MessageRow, RoundRow, Table, TaskRow
from cdpsim.version import __version__

FEW_STEPS = 3  # a run of at most so many takes less time to look at than another run of one step
# Runs that are made to find out how steps repeat:
MOST_STEADY_STEPS = 96  # or four times as many as dependencies reach back
MOST_STEADY_TASKS = 2**22  # but for the first such run
# Where steps may not repeat, as messages share links or devices change: steps at least, and nodes at most.
LEAST_UPDATES_OF_ROUNDS = 3  # until what tasks read is as old as it always will be
STEADY_UPDATES = (6, 12, 24, 48)  # of runs with rounds, until they repeat
MEASURED_STEPS, MOST_MEASURED_NODES = 12, 2**16


@dataclass(frozen=True, eq=False)
class Run(Trace):
    """A trace with its request, its program, the costs of that, and the start and end of every node.

    Where replicas are alike, the program has one that stands for all: metrics are of all, and `whole` has a node for
    each task of each of them. `rerun` makes the same run with another number of steps, and `lengthen` the program of
    one, which may differ from that of the run in nothing else; both None if no other number is possible, and of rounds,
    which follow from times, there is no program without a run. `unfold` makes the run of all replicas.
    """

    request: Request
    program: Program
    costs: Costs
    start: Times
    end: Times
    rerun: "Callable[[int], Run] | None" = None
    lengthen: Callable[[int], Program] | None = None
    unfold: "Callable[[], Run] | None" = None

    def __repr__(self) -> str:
        ends = counted(self.makespan, "slot") if self.in_slots else short_text(self.makespan, "s")
        tasks = len(self.program.tasks) * self.program.fold
        facts = f"{counted(tasks, 'task')} on {counted(self.devices, 'device')}, {ends}"
        return f"Run({facts} of {self.request!r})"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.program.all_devices

    @property
    def whole(self) -> "Run":
        """The run of all replicas: itself, unless its program has one that stands for all."""
        return self if self.unfold is None else self._unfolded

    @cached_property
    def _unfolded(self) -> "Run":
        assert self.unfold is not None
        return self.unfold()

    @property
    def makespan(self) -> Any:
        """The time at which the last task ends: a number of slots, or seconds."""
        return utilisation.makespan(self.program, self.end)

    @cached_property
    def trace(self) -> Trace:
        """The tables of the run alone."""
        return Trace(self.tasks, self.messages, self.memory, self.summary(), self.rounds)

    @cached_property
    def tasks(self) -> Table[TaskRow]:
        """The columns of a trace's tasks, a row for each."""
        run = self.whole
        return run_tables.task_columns(run.program, run.start, run.end, run.task_nodes)

    @cached_property
    def messages(self) -> Table[MessageRow]:
        """The columns of a trace's messages, a row for each."""
        run = self.whole
        return run_tables.message_columns(run.program, run.costs, run.start, run.end, run.message_nodes)

    @cached_property
    def memory(self) -> Table[MemoryRow]:
        """The memory of each device and category from each time on, a row for each change."""
        run = self.whole
        return run_tables.memory_columns(run.program, run.start, run.end)

    @cached_property
    def rounds(self) -> Table[RoundRow] | None:
        """A row for each round and device: what it hands over, and when that is exchanged; None without rounds."""
        if not self.program.thrown_away:
            return None
        run = self.whole
        return run_tables.round_columns(run.program, run.start, run.end)

    def critical_path(self) -> Table[TaskRow]:
        """Return the tasks on the way to the last end: before each, what it waited for that ended last.

        Between two of them are messages, or the time until a task is due.

        >>> from cdpsim import simulate
        >>> [f"{task.kind}{task.micro_batch}" for task in simulate("gpipe", 2, steps=1).critical_path()]
        ['F0', 'F1', 'F1', 'B0', 'B1', 'B1']
        """
        run = self.whole
        nodes = waiting.critical_path(run.program, run.end)
        row = np.empty(len(run.task_nodes), dtype=np.int64)
        row[run.task_nodes] = np.arange(len(row))
        return self.tasks[row[nodes[nodes < len(row)]]]

    @cached_property
    def task_nodes(self) -> Ints:
        """The node of its program behind each task, in the order of `tasks`."""
        return run_tables.sort_tasks(self.program, self.start)

    @cached_property
    def message_nodes(self) -> Ints:
        """The node of its program behind each message, in the order of `messages`."""
        return run_tables.sort_messages(self.program, self.costs, self.start, self.end)

    @property
    def algorithms(self) -> list[Algorithm | None] | None:
        """The algorithm of each row of `messages`, None of a row point to point; None without collectives."""
        run = self.whole
        if not len(run.costs.runs_by):
            return None
        known: list[Algorithm | None] = [*run.costs.algorithms, None]
        rows = run.message_nodes - len(run.program.tasks)
        return [known[number] for number in run.costs.runs_by[rows].tolist()]

    @property
    def in_slots(self) -> bool:
        """Whether times are slots and sizes stage-activations; else they are seconds and bytes."""
        return bool(self.start.dtype.kind == "i")

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return self._summary_content

    @cached_property
    def _summary_content(self) -> dict[str, Any]:
        program, steady_state = self.program, self.steady_state
        names = [*(category.name.lower() for category in Category), "total"]
        sent = [
            json_number(size) if self.in_slots else float(size)
            for size in communication.bytes_sent(program, self.costs)
        ]
        hosts = [] if self.host_peaks is None else self.host_peaks.tolist()
        offloaded = {"host_memory": [{"device": device, "bytes": size} for device, size in enumerate(hosts)]}
        rare: dict[str, Any] = (
            {"mismatched": staleness.mismatched(program) * program.fold} if program.versions_differ else {}
        )
        held = {"peak_memory": self.peaks}
        later = steady_state.is_steady and not self.reaches_rest
        held |= {"peak_memory_at_rest": steady_state.run.peaks} if later else {}
        rare |= {"untied": [list(stages) for stages in program.untied]} if program.untied else {}
        rare |= {"places": self._places()} if self.request.shape.layers else {}
        return {
            "cdpsim": __version__,
            "request": self.request.to_builtins(),
            "devices": self.devices,
            "tasks": len(program.tasks) * program.fold,
            "messages": int(communication.times_there(program).sum()),
            "makespan": self.makespan,
            "period": json_number(steady_state.period),
            "period_is": steady_state.period_is,
            **({} if self.reaches_rest else {"reaches_rest": False}),
            "bubble": steady_state.bubble,
            "idle_of_run": utilisation.idle_share(program, self.start, self.end, self.costs.calendar),
            "mean_staleness": steady_state.staleness,
            **rare,
            **{
                name: [
                    {"device": device} | dict(zip(names, row, strict=True)) for device, row in enumerate(peaks.tolist())
                ]
                for name, peaks in held.items()
            },
            "bytes_sent": [{"device": device, "bytes": size} for device, size in enumerate(sent)],
        } | (offloaded if hosts else {})

    def _places(self) -> list[list[int]]:
        """Return the stages of each device of a replica."""
        program = self.program
        devices = program.all_devices // self.request.shape.replicas
        mine = program.tasks.device < devices
        places: list[set[int]] = [set() for _ in range(devices)]
        for device, stage in zip(program.tasks.device[mine].tolist(), program.tasks.stage[mine].tolist(), strict=True):
            places[device].add(stage)
        return [sorted(stages) for stages in places]

    @cached_property
    def peaks(self) -> Ints:
        """The peak memory of each device: a row per device, a column per category and one for the total."""
        own = memory.peak_memory(self.program, self.start, self.end) if self.in_slots else self.held_levels[1]
        return np.tile(own, (self.program.fold, 1))

    @cached_property
    def held_levels(self) -> tuple[Ints, Ints]:
        """The levels of memory at the beginnings of buffers, by category and in all, and the peaks of devices."""
        return memory.held_levels(self.program, *self.spans)

    @cached_property
    def spans(self) -> tuple[Times, Times]:
        """The times at which each buffer is allocated and freed."""
        return memory.buffer_spans(self.program.buffers, self.start, self.end)

    @property
    def device_memory(self) -> Times:
        """The bytes that each device has; inf where there is no limit."""
        return self.request.cluster.memory_bytes(self.devices)

    @cached_property
    def host_peaks(self) -> Ints | None:
        """The peak memory of each device's host in bytes; None where nothing is offloaded."""
        stages = self.request.timed_model.stages
        always = [0 if stage.nvme else stage.host_optimizer + stage.host_parameters for stage in stages]
        sizes = [np.array([stage.offloaded for stage in stages]), -(-np.array(always) // self.program.shard)]
        if not any(map(np.any, sizes)):
            return None
        return np.tile(memory.peak_host_memory(self.program, self.start, self.end, *sizes), self.program.fold)

    def of_steps(self, steps: int) -> "Run":
        """Return the same run with another number of steps; this run if no other number is possible."""
        return self if self.rerun is None or steps == self.request.steps else self.rerun(steps)

    @cached_property
    def may_repeat(self) -> bool:
        """Whether steps may repeat each other exactly.

        Nothing is random, no device stops, messages share no links, and devices are alike where tasks change theirs.
        """
        disorder, cluster, devices = self.request.disorder, self.request.cluster, self.program.devices
        if disorder.is_random or disorder.stop or self.costs.wires is not None:
            return False
        return not steady.changes_devices(self.program) or (
            not disorder.slow and cluster.sized(devices).is_alike(devices)
        )

    @cached_property
    def steady_state(self) -> "SteadyState":
        """The steady state of the run's steps, by runs of other numbers of steps where that is needed.

        Where there is no room for these, or where they do not end, the figures are those of the run's own steps.
        """
        try:
            state = self._find_steady_state()
            assert state.aged
            return state
        except (TooLarge, Stalled) as error:
            rounds = self.program.thrown_away
            own = _last_rounds(self, grow=False) if rounds else _mean_steps(self, irregular=self._is_irregular)
            why = "no room for more steps" if isinstance(error, TooLarge) else "more steps never end"
            return replace(own, certified=False, not_steady=why)

    def _find_steady_state(self) -> "SteadyState":
        """Return the steady state; raise an error if there is no room for the runs that show it."""
        if self.program.thrown_away:
            return _rounds_at_rest(self)
        order = self.request.schedule.order
        alone = order.lists is not None and not order.local and steady.sends_within_steps(self.program)
        if alone and self.may_repeat and not self._is_irregular:
            one = self if self.program.steps <= FEW_STEPS else self.of_steps(1)
            period = one.separate_period
            if period is not None:
                one = one if one.shows_what_is_held else one.of_steps(FEW_STEPS)
                return SteadyState(one, period, True, range(1), steady.steps_of_nodes(one.program), 0, period)
        run = self
        for steps in self._numbers_of_steps():
            run = self.of_steps(steps)
            if self.may_repeat and not run.may_repeat:  # a single step does not show that tasks change their devices
                return run._find_steady_state()
            if not self._is_irregular and (state := _repeated_steps(run, certified=self.may_repeat)):
                return state
        return _mean_steps(run, irregular=self._is_irregular)

    @cached_property
    def reaches_rest(self) -> bool:
        """Whether the run's own steps come to be like those of its steady state, and hold as much as these."""
        rest, steps = self.steady_state, self.program.steps
        if not rest.is_steady:
            return False
        longer = rest.run.program.steps > steps
        return not longer or bool(rest.since <= steps and (rest.run.peaks <= self.peaks).all())

    @cached_property
    def separate_period(self) -> Any | None:
        """The period of steps that follow each other without touching, as the first one shows; None if it does not."""
        return steady.period_of_separate_steps(self.program, self.end)

    @property
    def shows_what_is_held(self) -> bool:
        """Whether it holds what one at rest does, if steps are separate; what a runtime keeps goes on to the next."""
        alone = self.program.habits == PAPER_HABITS and steady.updates_last(self.program, self.start, self.end)
        return alone or self.program.steps >= FEW_STEPS

    def _numbers_of_steps(self) -> list[int]:
        """Return the numbers of steps to try, one after another."""
        program, steps = self.program, self.request.steps
        if self.rerun is None or self._is_irregular:
            return [steps]
        least = few_steps(self.request)
        most = max(MOST_STEADY_STEPS, 4 * (program.fill + 1))
        room = MOST_STEADY_TASKS * steps // program.compute
        if not self.may_repeat:
            least, room = max(MEASURED_STEPS, 2 * least), MOST_MEASURED_NODES * steps // program.nodes
        return [*steady.step_counts(least, max(least, min(most, room)))]

    @property
    def _is_irregular(self) -> bool:
        """Whether steps differ by chance, stops or given counts, so that figures are those of the run's own steps."""
        disturbed = self.request.disorder.is_random or self.costs.calendar is not None
        return disturbed or self.request.counts is not None


@dataclass(frozen=True, eq=False)
class SteadyState:
    """Training steps of a run in its steady state, and a time during them.

    The period is certified where every later step is known to repeat these; otherwise it is their mean. From `low` to
    `high` all devices are in the steady state. A run of less than `since` steps does not have one that is like these.
    """

    run: Run
    period: Number
    certified: bool
    steps: range
    step: Ints  # of each node
    low: Any  # slots or seconds
    high: Any
    since: int = 0
    not_steady: str = ""  # why the run cannot be continued to it, so that the figures are of the run's own steps

    def __repr__(self) -> str:
        unit = "slots" if self.run.in_slots else "s"
        period = f"{self.period_is} period {float(self.period):.4g} {unit}"
        return f"SteadyState({period}, of steps {self.steps[0]} to {self.steps[-1]} of {self.run.request!r})"

    @property
    def is_steady(self) -> bool:
        """Whether the steps are of the steady state; else they are those that the run has."""
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
        return utilisation.idle_share(run.program, run.start, run.end, run.costs.calendar, self.low, self.high)

    @cached_property
    def waits(self) -> waiting.Waits | None:
        """How long lanes wait for messages; None where these take no time and delay nothing, nor do their streams."""
        run = self.run
        sent = run.costs.duration[run.program.message_nodes]
        if not sent.any() and not np.any(run.program.edges.kind == EdgeKind.STREAM):
            return None
        again = self.starts_again
        return waiting.waits_between(run.program, run.start, run.end, self.low, self.high, starts_again=again)

    @property
    def staleness(self) -> float:
        """The mean age, in training steps, of what forwards read, once all lags are there."""
        program = self.aged
        if program.thrown_away:
            return _staleness_of_rounds(program)
        step = min(program.fill, program.steps - 1)
        return staleness.mean_staleness(program, range(step, step + 1))

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
    def updates(self) -> int:
        """The number of updates that these steps make, but for estimates."""
        return _updates_of(self.run.program, self.steps)


def few_steps(request: Request) -> int:
    """Return the steps of a run that shows how they repeat: the first ones fill devices, and read what was there.

    Of what is gathered, some comes ahead of the next step.
    """
    shape, behind = request.shape, 2 if request.schedule.order.together else 4
    return max(FEW_STEPS + request.state.splits, request.rule.fill(shape) + behind) + shape.warm_up


def _repeated_steps(run: Run, *, certified: bool) -> SteadyState | None:
    """Return the steps of a run that repeat; None if it is too short to show a whole repetition."""
    program, start, end, step = run.program, run.start, run.end, steady.steps_of_nodes(run.program)
    repetition = steady.certify(program, start, end)
    if repetition is None or (span := steady.find_rest(program, repetition, start, end)) is None:
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


def _mean_steps(run: Run, *, irregular: bool) -> SteadyState:
    """Return the last half of a run's steps, before devices run dry at its end, with their mean as the period."""
    program, step = run.program, steady.steps_of_nodes(run.program)
    if irregular:
        last = steady.last_followed_step(program)
    else:
        complete = steady.last_complete_step(program, run.start)
        last = max((program.steps - 1) // 2, min(complete, steady.last_read_step(program)))
    ends, shape, local = steady.ends_of_steps(program, run.end), run.request.shape, run.request.schedule.order.local
    if local and local.late:  # no mean is taken of the last round
        last = min(last, program.steps - 1 - shape.local_steps)
    last = max(last, int(np.flatnonzero(program.update_of_step == 0)[-1]))
    behind = steady.last_half(last - shape.warm_up) if last >= shape.warm_up else range(last + 1 - shape.warm_up)
    steps = _whole_updates(program, range(behind.start + shape.warm_up, last + 1))
    if not ends[steps.stop - 1] > ends[steps.start - 1]:  # as steps that overlap may end at one moment
        steps = _whole_updates(program, range(last + 1))
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


def _rounds_at_rest(run: Run) -> SteadyState:
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


def _repeated_rounds(run: Run) -> SteadyState | None:
    """Return the least number of updates after which a run with rounds repeats; None if it is too short to show it."""
    program, found = run.program, rounds_of(run.program, run.start, run.end)
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


def _steps_of_rounds(run: Run) -> Ints:
    """Return the step of each node; what comes last, with which workers do not go on, has one more than there are."""
    program = run.program
    messages = program.messages.step.copy()
    messages[np.setdiff1d(np.flatnonzero(program.messages.content == Content.PARAMETERS), brought_first(program))] = (
        program.steps
    )
    step = np.concatenate([program.tasks.step, messages])
    return np.append(step, step[program.first_messages])


def _last_rounds(run: Run, *, grow: bool = True) -> SteadyState:
    """Return the rounds of the last half of a run's updates, and the mean time from one of these to the next.

    All devices are at work until the first of them ends. A run of one update that others follow may `grow` by one.
    """
    program, found = run.program, rounds_of(run.program, run.start, run.end)
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


def _waits_at_its_end(run: Run) -> bool:
    """Return whether the tasks of a run's last round wait for more than one gather, which others do not."""
    content = run.program.messages.content
    several = len(brought_first(run.program)) < int(np.count_nonzero(content == Content.PARAMETERS))
    return several and NONE in run.request.cluster.overlaps(run.program.devices)


def _staleness_of_rounds(program: Program) -> float:
    """Return the mean staleness of the last update's gradients; the first ones read what was there at the start."""
    update, stop = program.update_of_step, program.updated
    first = int(np.searchsorted(update, update[stop - 1]))
    return staleness.mean_staleness(program, range(first, stop))


def _exact_quotient(total: Any, count: int) -> Number:
    quotient: Number = total / count if isinstance(total, float) else simplified(Fraction(total, count))
    return quotient
