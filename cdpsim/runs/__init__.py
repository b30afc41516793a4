"""Runs: a program, its costs, the times of its nodes, and metrics of these.

The tables of a run have its nodes in the order of the files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from cdpsim.files.units import counted, json_number, short_text
from cdpsim.numeric.columns import Columns, Ints, Times, group_starts
from cdpsim.program import Category, Content, Kind, Op, Program
from cdpsim.program.collectives import Algorithm
from cdpsim.program.workspaces import with_workspaces
from cdpsim.request import Request
from cdpsim.request.accuracy import KnownError, error_tables, errors_of
from cdpsim.runs.ranks import exchanged_bytes, rates_of_run, table_of_exchanges
from cdpsim.runs.steady_state import SteadyState, find_steady_state
from cdpsim.timing.costs import Costs
from cdpsim.timing.round_times import as_rows, rounds_of
from cdpsim.trace import STREAM_WORDS, Trace, names_of
from cdpsim.trace.metrics import communication, memory, steady, waiting
from cdpsim.trace.table import ExchangeRow, MemoryRow, MessageRow, RoundRow, Table, TaskRow, message_row, task_row
from cdpsim.version import __version__


def task_columns(program: Program, start: Times, end: Times, node: Ints) -> Table[TaskRow]:
    """Return the columns of tasks.csv."""
    tasks = program.tasks
    columns = {name: getattr(tasks, name)[node] for name in TaskRow._fields if hasattr(tasks, name)}
    if program.estimates is not None or program.averaged is not None:
        columns |= _columns_of_updates(program, columns)
    if program.estimates is not None:
        columns |= _columns_of_estimates(program, columns, node)
    columns |= {"kind": names_of(Kind)[columns["kind"]], "stale": memory.stale_flags(program, start, end)[node]}
    columns |= {"start": start[node], "end": end[node]}
    row = task_row(columns)
    return Table(row, {name: columns[name] for name in row._fields})


def _columns_of_updates(program: Program, columns: Columns) -> Columns:
    """Return the columns of tasks of which several steps enter an update: its number is their step.

    Micro-batches are numbered through all that enter an update.
    """
    step, first = columns["step"], group_starts(program.update_of_step)
    passes_before = program.first_pass[:-1] - program.first_pass[first[program.update_of_step]]
    micro_batch = columns["micro_batch"] + np.where(columns["micro_batch"] >= 0, passes_before[step], 0)
    return {"step": program.update_of_step[step], "micro_batch": micro_batch}


def _columns_of_estimates(program: Program, columns: Columns, node: Ints) -> Columns:
    """Return the columns of tasks that may read estimates; `version` is the age of the version read or made."""
    version, age, base = columns["version"], memory.version_ages(program), np.full(len(program.tasks), -1)
    base[program.compute :] = age[program.base]
    return {
        "version": age[version].astype(np.int32),
        "base": base[node].astype(np.int32),
        "estimate": program.is_estimate(version).astype(np.int8),
    }


def sort_messages(program: Program, costs: Costs, start: Times, end: Times) -> Ints:
    """Return messages in the order of start, then the other columns from the left; groups by their members."""
    messages, first = program.messages, len(program.tasks)
    start, end = start[program.message_nodes], end[program.message_nodes]
    dst, together = messages.dst.copy(), messages.op != Op.P2P
    groups = sorted(range(len(program.groups)), key=lambda group: program.groups[group].tolist())
    dst[together] = np.argsort(groups)[dst[together]]
    stage = np.maximum(messages.stage, -1)
    by = (messages.op, messages.content, stage, messages.micro_batch, messages.step, messages.src, dst)
    return first + np.lexsort((costs.rounds, end, messages.size, *by[::-1], start))


def message_columns(program: Program, costs: Costs, start: Times, end: Times, node: Ints) -> Table[MessageRow]:
    """Return the columns of messages.csv; `dst` as text where collectives are, whose members it joins by `|`.

    `stages` and `stream` are columns only where some message is of several stages, or goes in a stream.
    """
    messages, order = program.messages, node - len(program.tasks)
    is_single = messages.op[order] == Op.P2P
    columns = {name: getattr(messages, name)[order] for name in MessageRow._fields if hasattr(messages, name)}
    columns["stage"] = np.maximum(columns["stage"], -1)
    if program.estimates is not None or program.averaged is not None:
        made = columns["step"] >= 0
        columns["step"] = np.where(made, program.update_of_step[columns["step"]], -1)
    columns |= {"op": names_of(Op)[columns["op"]], "content": names_of(Content)[columns["content"]]}
    if not is_single.all():
        groups = ["|".join(map(str, program.members_of(k).tolist())) for k in range(len(program.groups))]
        pairs = zip(is_single.tolist(), columns["dst"].tolist(), strict=True)
        columns["dst"] = np.array([str(to) if single else groups[to] for single, to in pairs], dtype=object)
    columns |= {"start": start[node], "end": end[node], "rounds": costs.rounds[order]}
    if (messages.stages != 1).any() or (messages.stream >= 0).any():
        columns |= {"stages": messages.stages[order], "stream": STREAM_WORDS[messages.stream[order]]}
    row = message_row(columns)
    return Table(row, {name: columns[name] for name in row._fields})


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
        return waiting.makespan(self.program, self.end)

    @cached_property
    def trace(self) -> Trace:
        """The tables of the run alone."""
        return Trace(self.tasks, self.messages, self.memory, self.summary(), self.rounds)

    @cached_property
    def tasks(self) -> Table[TaskRow]:
        """The columns of a trace's tasks, a row for each."""
        run = self.whole
        return task_columns(run.program, run.start, run.end, run.task_nodes)

    @cached_property
    def messages(self) -> Table[MessageRow]:
        """The columns of a trace's messages, a row for each."""
        run = self.whole
        return message_columns(run.program, run.costs, run.start, run.end, run.message_nodes)

    @property
    def held(self) -> Program:
        """The program with the workspaces of its devices among its buffers."""
        program, cluster = self.program, self.request.cluster
        if not cluster.workspace_bytes:
            return program
        return with_workspaces(program, cluster.workspaces(program.devices), int(self.end.argmax()))

    @cached_property
    def memory(self) -> Table[MemoryRow]:
        """The memory of each device and category from each time on, a row for each change."""
        run = self.whole
        curve = memory.memory_by_category(run.held, run.start, run.end)
        return Table(MemoryRow, curve | {"category": names_of(Category)[curve["category"]]})

    @cached_property
    def rounds(self) -> Table[RoundRow] | None:
        """A row for each round and device: what it hands over, and when that is exchanged; None without rounds."""
        if not self.program.thrown_away:
            return None
        run = self.whole
        return Table(RoundRow, as_rows(rounds_of(run.program, run.end)))

    @cached_property
    def exchanges(self) -> Table[ExchangeRow] | None:
        """A row for each exchange of the ranks of a group, stage and kind of task; None without groups."""
        return table_of_exchanges(self.program, self.request)

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
        """The node of the program of all replicas behind each row of `tasks`."""
        of, start = self.whole.program.tasks, self.whole.start
        return np.lexsort((of.stage, of.micro_batch, of.step, of.kind, of.device, start[: len(of)]))

    @cached_property
    def message_nodes(self) -> Ints:
        """The node of the program of all replicas behind each row of `messages`."""
        run = self.whole
        return sort_messages(run.program, run.costs, run.start, run.end)

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

    @property
    def errors(self) -> tuple[KnownError, ...]:
        """The errors of other answers of the run's classes, where these were measured; in slots none."""
        return errors_of(self.request, self.devices)

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return self._summary_content

    @cached_property
    def _summary_content(self) -> dict[str, Any]:
        program, steady_state = self.program, self.steady_state
        names = [*(category.name.lower() for category in Category), "total"]
        sent = [json_number(size) if self.in_slots else float(size) for size in self._bytes_sent()]
        hosts = [] if self.host_peaks is None else self.host_peaks.tolist()
        offloaded = {"host_memory": [{"device": device, "bytes": size} for device, size in enumerate(hosts)]}
        rare: dict[str, Any] = (
            {"mismatched": memory.mismatched(program) * program.fold} if program.versions_differ else {}
        )
        later = steady_state.is_steady and not self.reaches_steady_state
        held = {"peak_memory": self.peaks} | ({"steady_peak_memory": steady_state.run.peaks} if later else {})
        rare |= {"untied": [list(stages) for stages in program.untied]} if program.untied else {}
        rare |= {"errors": error_tables(self.errors)} if self.errors else {}
        rare |= {"places": self._places()} if self.request.shape.layers else {}
        ranks = self.request.model.mesh.team
        return {
            "cdpsim": __version__,
            "request": self.request.to_builtins(),
            "devices": self.devices,
            **({"ranks_per_device": ranks} if ranks > 1 else {}),
            "tasks": len(program.tasks) * program.fold,
            "messages": int(communication.times_there(program).sum()),
            "makespan": self.makespan,
            "period": json_number(steady_state.period),
            "period_is": steady_state.period_is,
            **({} if self.reaches_steady_state else {"reaches_steady_state": False}),
            "bubble": steady_state.bubble,
            "idle_of_run": waiting.idle_share(program, self.start, self.end, self.costs.calendar),
            "mean_staleness": steady_state.staleness,
            **self._rates(),
            **rare,
            **{
                name: [
                    {"device": device} | dict(zip(names, row, strict=True)) for device, row in enumerate(peaks.tolist())
                ]
                for name, peaks in held.items()
            },
            "bytes_sent": [{"device": device, "bytes": size} for device, size in enumerate(sent)],
            **({} if self.exchanges is None else {"exchanges": [row._asdict() for row in self.exchanges]}),
        } | (offloaded if hosts else {})

    def _rates(self) -> dict[str, Any]:
        """Return rates and utilizations of a rank in the steady state, where the model is of layers."""
        if self.request.model.layers is None:
            return {}
        found = rates_of_run(self.request, float(self.steady_state.passes / self.steady_state.period), self.devices)
        return {name: found[name] for name in ("mfu", "hfu")} | {
            "tokens_per_rank": found["per_device"],
            "flops_per_rank": found["flops"],
        }

    def _bytes_sent(self) -> list[int | Fraction]:
        """Return the bytes that each device sends in the run; of a group of ranks, that each rank sends."""
        program, count = self.program, self.program.devices
        sent, each = np.zeros(count, dtype=np.int64), communication.bytes_sent(program, self.costs)
        np.add.at(sent, program.tasks.device, exchanged_bytes(program, self.request))
        return [size + more for size, more in zip(each, sent.tolist() * program.fold, strict=True)]

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
        return np.tile(memory.peak_memory(self.held, self.start, self.end), (self.program.fold, 1))

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
    def steady_state(self) -> SteadyState:
        """The steady state of the run's steps, by runs of other numbers of steps where that is needed.

        Where there is no room for these, or where they do not end, the metrics are those of the run's own steps.
        """
        return find_steady_state(self)

    @cached_property
    def reaches_steady_state(self) -> bool:
        """Whether the run's own steps reach its steady state, and its peak memory."""
        later, steps = self.steady_state, self.program.steps
        if not later.is_steady:
            return False
        longer = later.run.program.steps > steps
        return not longer or bool(later.since <= steps and (later.run.peaks <= self.peaks).all())
