"""The tables of a run: its nodes in the order of the files, and the columns of each file."""

import numpy as np

from cdpsim.numeric.columns import Columns, Ints, Times, group_starts
from cdpsim.program import Category, Content, Kind, Op, Program
from cdpsim.timing.costs import Costs
from cdpsim.timing.round_times import as_rows, rounds_of
from cdpsim.trace import STREAM_WORDS, names_of
from cdpsim.trace.metrics import memory
from cdpsim.trace.table import MemoryRow, MessageRow, RoundRow, Table, TaskRow, message_row, task_row


def sort_tasks(program: Program, start: Times) -> Ints:
    """Return tasks in the order of start, device, kind (U, F, B, W), step, micro-batch and stage."""
    tasks = program.tasks
    return np.lexsort((tasks.stage, tasks.micro_batch, tasks.step, tasks.kind, tasks.device, start[: len(tasks)]))


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
    """Return the columns of tasks that may read estimates: the age of what is read or made stands there as version."""
    version, age, base = columns["version"], memory.version_ages(program), np.full(len(program.tasks), -1)
    base[program.compute :] = age[program.base]
    return {
        "version": age[version].astype(np.int32),
        "base": base[node].astype(np.int32),
        "estimate": program.is_estimate(version).astype(np.int8),
    }


def round_columns(program: Program, start: Times, end: Times) -> Table[RoundRow]:
    """Return the columns of rounds.csv."""
    return Table(RoundRow, as_rows(rounds_of(program, start, end)))


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
        groups = ["|".join(map(str, members.tolist())) for members in program.groups]
        pairs = zip(is_single.tolist(), columns["dst"].tolist(), strict=True)
        columns["dst"] = np.array([str(to) if single else groups[to] for single, to in pairs], dtype=object)
    columns |= {"start": start[node], "end": end[node], "rounds": costs.rounds[order]}
    if (messages.stages != 1).any() or (messages.stream >= 0).any():
        columns |= {"stages": messages.stages[order], "stream": STREAM_WORDS[messages.stream[order]]}
    row = message_row(columns)
    return Table(row, {name: columns[name] for name in row._fields})


def memory_columns(program: Program, start: Times, end: Times) -> Table[MemoryRow]:
    """Return the columns of memory.csv."""
    curve = memory.memory_by_category(program, start, end)
    return Table(MemoryRow, curve | {"category": names_of(Category)[curve["category"]]})
