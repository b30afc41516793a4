"""The memory that devices of a program certainly hold in each of their tasks, whatever times these take."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, expand_ranges
from cdpsim.program import Category, EdgeKind, Program

_MOST_BETWEEN = 4  # sums in groups and across them, updates, gathers


class Held(NamedTuple):
    """The bytes that devices hold in the tasks of their lanes."""

    task: Ints
    columns: Ints  # by task: a column for each category, and one for the part of activations that is stashes
    of_stage: Ints  # the stash of each stage: what a forward keeps for its backward


def held_in_tasks(program: Program, *, flushes: bool) -> Held:
    """Return what devices hold in all tasks: buffers that begin and end with tasks of one lane, or what these wait for.

    Of a device with several lanes, nothing is known. If a schedule `flushes`, updates come behind the last task of
    their device that gives gradients to their stage, and a new version takes the place of the one that goes with it.
    """
    buffers, tasks = program.buffers, program.lane_tasks
    lanes, stash = len(program.lane_start) - 1, len(Category)  # the last column
    rank = np.full(program.nodes, -1, dtype=np.int64)
    rank[tasks] = np.arange(len(tasks))
    where = _lanes_alone(program)[buffers.device]
    last = program.lane_start[np.maximum(where, 0) + 1] - 1
    begin, until = _spans(program, rank, where, lanes, flushes=flushes)
    known = np.flatnonzero((where >= 0) & (begin >= 0) & (until >= begin) & (begin <= last))
    stashes = program.stashes
    both = known[np.isin(known, stashes)]
    rows = np.concatenate([known, both])
    column = np.concatenate([buffers.category[known], np.full(len(both), stash)])
    held = np.zeros((len(tasks) + 1, stash + 1), dtype=np.int64)
    np.add.at(held, (begin[rows], column), buffers.size[rows])
    np.add.at(held, (until[rows] + 1, column), -buffers.size[rows])
    held = np.cumsum(held, axis=0)[:-1]
    of_stage = np.zeros(program.n, dtype=np.int64)
    of_stage[buffers.stage[stashes]] = buffers.size[stashes]
    return Held(tasks, held, of_stage)


def _lanes_alone(program: Program) -> Ints:
    """Return the lane of each device that has one; -1 of others."""
    found = np.full(program.devices, -1)
    lane = np.flatnonzero(np.diff(program.lane_start) > 0)
    device = program.tasks.device[program.lane_tasks[program.lane_start[lane]]]
    alone = np.bincount(device, minlength=program.devices)[device] == 1
    found[device[alone]] = lane[alone]
    return found


def _spans(program: Program, rank: Ints, where: Ints, lanes: int, *, flushes: bool) -> tuple[Ints, Ints]:
    """Return the ranks from which on, and up to which, each buffer is certainly there; -1 where that is not known."""
    buffers, every = program.buffers, np.arange(len(program.buffers))
    begin = _begins(program, rank, where, lanes, program.lane_start[np.maximum(where, 0)])
    lasting = np.isin(buffers.category, (Category.PARAMETERS, Category.OPTIMIZER)) & flushes
    new = np.flatnonzero(lasting & (buffers.begin & 1 == 1) & (buffers.begin >> 1 >= program.compute))
    rows = every, buffers.kept, new
    moments = np.concatenate([buffers.end, buffers.kept_until, buffers.begin[new]])
    most = _MOST_BETWEEN if flushes else 0
    found = _until(program, rank, where, lanes, moments, np.concatenate(rows), most)
    until, kept, made = np.split(found, np.cumsum([len(each) for each in rows[:2]]))
    np.maximum.at(until, buffers.kept, kept)
    left = buffers.end.copy()
    np.maximum.at(left, buffers.kept, buffers.kept_until)
    old = np.flatnonzero(lasting & (where >= 0))
    of_older = _one_of_each((left[old] >> 1).astype(np.int64) * lanes + where[old], until[old] + 1, least=False)
    older = _looked_up(of_older, buffers.begin[new] >> 1, where[new], lanes) - 1
    begin[new] = np.where((made >= 0) & (older >= -1), np.maximum(made, older) + 1, begin[new])
    return begin, until


def _begins(program: Program, rank: Ints, where: Ints, lanes: int, first: Ints) -> Ints:
    """Return the rank from which on each buffer is there: the start of a task, or the first task that waits for it."""
    node, at_end = program.buffers.begin >> 1, program.buffers.begin & 1
    own = rank[np.maximum(node, 0)]
    mine = (own >= 0) & (_lane_of(program, own) == where)
    before, after = program.edges.before, program.edges.after
    waits = _extreme(before, rank[after], program, lanes, least=True)
    found = np.where(mine, own + at_end, _looked_up(waits, node, where, lanes))
    return np.where(program.buffers.begin < 0, first, found)


def _until(program: Program, rank: Ints, where: Ints, lanes: int, moment: Ints, rows: Ints, most: int) -> Ints:
    """Return the rank of the last task that certainly ends by the moments up to which buffers are there; else -1."""
    where = where[rows]
    node, at_start = moment >> 1, 1 - (moment & 1)
    own = rank[np.maximum(node, 0)]
    mine = (own >= 0) & (_lane_of(program, own) == where) & (moment >= 0)
    return np.where(mine, own - at_start, _looked_up(_waited_for(program, rank, lanes, most), node, where, lanes))


def _waited_for(program: Program, rank: Ints, lanes: int, most: int) -> tuple[Ints, Ints]:
    """Return, of nodes and lanes, the greatest rank of a task there that it waits for, also through `most` others.

    These are updates and messages; turns in streams, which other micro-batches may change, do not count.
    """
    lasting = program.edges.kind != EdgeKind.STREAM
    before, after = program.edges.before[lasting], program.edges.after[lasting]
    table = _extreme(after, rank[before], program, lanes, least=False)
    passes_on = (rank[before] < 0) & (rank[after] < 0)
    before, after = before[passes_on], after[passes_on]
    for _ in range(most):
        node = table[0] // lanes
        row, known = expand_ranges(np.searchsorted(node, before), np.searchsorted(node, before, side="right"))
        key = after[row].astype(np.int64) * lanes + table[0][known] % lanes
        longer = _one_of_each(np.append(table[0], key), np.append(table[1], table[1][known]), least=False)
        if len(longer[0]) == len(table[0]) and (longer[1] == table[1]).all():
            break
        table = longer
    return table


def _lane_of(program: Program, rank: Ints) -> Ints:
    return program.lane_numbers[np.maximum(rank, 0)]


def _extreme(node: Ints, rank: Ints, program: Program, lanes: int, *, least: bool) -> tuple[Ints, Ints]:
    """Return, of the nodes and lanes of some edges, the least or the greatest rank of a task there."""
    rows = np.flatnonzero(rank >= 0)
    value = rank[rows]
    return _one_of_each(node[rows].astype(np.int64) * lanes + _lane_of(program, value), value, least=least)


def _one_of_each(key: Ints, value: Ints, *, least: bool) -> tuple[Ints, Ints]:
    """Return each key once, with the least or the greatest of its values, which are not negative."""
    span = int(value.max(initial=0)) + 1
    both = np.sort(key * span + value)
    key, value = np.divmod(both, span)
    ends = np.flatnonzero(np.diff(key, prepend=-1) if least else np.diff(key, append=-1))
    return key[ends], value[ends]


def _looked_up(table: tuple[Ints, Ints], node: Ints, where: Ints, lanes: int) -> Ints:
    """Return the ranks that a table has for nodes and lanes; -1 where it has none."""
    key = node.astype(np.int64) * lanes + where
    place = np.minimum(np.searchsorted(table[0], key), max(len(table[0]) - 1, 0))
    if not len(table[0]):
        return np.full(len(key), -1)
    return np.where(table[0][place] == key, table[1][place], -1)
