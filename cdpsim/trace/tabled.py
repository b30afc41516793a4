"""The rows of a run's tables: its nodes in the order of the files, and their columns."""

from collections.abc import Sequence

import numpy as np

from cdpsim.numeric.columns import Columns, Ints, Times
from cdpsim.program import Category, Content, Kind, Op, Program
from cdpsim.timing.costs import Costs
from cdpsim.trace import MESSAGES, TASKS, names_of
from cdpsim.trace.metrics import memory, staleness


def task_nodes(program: Program, start: Times) -> Ints:
    """Order tasks by start, device, kind (U, F, B, W), step, micro-batch and stage."""
    tasks = program.tasks
    return np.lexsort((tasks.stage, tasks.micro_batch, tasks.step, tasks.kind, tasks.device, start[: len(tasks)]))


def tasks_of(program: Program, start: Times, end: Times, node: Ints) -> Columns:
    """Give the columns of tasks.csv."""
    tasks, stale = program.tasks, staleness.stale(program, start, end)
    columns = {name: getattr(tasks, name)[node] for name in ("stage", "micro_batch", "step", "device", "version")}
    columns |= {"kind": names_of(Kind)[tasks.kind[node]], "stale": stale[node]}
    columns |= {"start": start[node], "end": end[node]}
    return {name: columns[name] for name in TASKS}


def message_nodes(program: Program, costs: Costs, start: Times, end: Times) -> Ints:
    """Order messages by start, then the other columns from the left; groups of devices by their members."""
    messages, first = program.messages, len(program.tasks)
    start, end = start[program.message_nodes], end[program.message_nodes]
    dst, together = messages.dst.copy(), messages.op != Op.P2P
    dst[together] = _places(program.groups)[dst[together]]
    stage = np.maximum(messages.stage, -1)
    by = (messages.op, messages.content, stage, messages.micro_batch, messages.step, messages.src, dst)
    return first + np.lexsort((costs.rounds, end, messages.size, *by[::-1], start))


def messages_of(program: Program, costs: Costs, start: Times, end: Times, node: Ints) -> Columns:
    """Give the columns of messages.csv; `dst` as text where collectives are, whose members it joins by `|`."""
    messages, order = program.messages, node - len(program.tasks)
    single = messages.op == Op.P2P
    columns = {name: getattr(messages, name)[order] for name in MESSAGES[2:8]}
    columns["stage"] = np.maximum(columns["stage"], -1)
    columns |= {"op": names_of(Op)[messages.op[order]], "content": names_of(Content)[messages.content[order]]}
    if not single.all():
        groups = ["|".join(map(str, members.tolist())) for members in program.groups]
        pairs = zip(single[order].tolist(), columns["dst"].tolist(), strict=True)
        columns["dst"] = np.array([str(to) if one else groups[to] for one, to in pairs], dtype=object)
    columns |= {"start": start[node], "end": end[node], "rounds": costs.rounds[order]}
    return {name: columns[name] for name in MESSAGES}


def memory_of(program: Program, start: Times, end: Times) -> Columns:
    """Give the columns of memory.csv."""
    curve = memory.curves(program, start, end)
    return curve | {"category": names_of(Category)[curve["category"]]}


def _places(groups: Sequence[Ints]) -> Ints:
    """Where each group stands when they are sorted by their members."""
    ranked = sorted(range(len(groups)), key=lambda group: groups[group].tolist())
    places = np.empty(len(groups), dtype=np.int64)
    places[ranked] = np.arange(len(groups))
    return places
