"""The memory that devices of a base program certainly hold in each of their tasks, whatever times these take."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Kind, Program

HELD_KINDS = (Category.ACTIVATIONS, Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)  # columns


class Held(NamedTuple):
    """The bytes that devices hold in the tasks of their lanes."""

    task: Ints
    held: Ints  # by task and kind
    stash: Ints  # by task: the part of activations that forwards keep for backwards
    of_stage: Ints  # the stash of each stage
    parameters: Ints  # by task: those of its stage alone

    @property
    def moments(self) -> Ints:
        """A row for each task: activations, parameters, gradients, optimizer; stashes; own parameters; none yet."""
        return np.column_stack([self.held, self.stash, self.parameters, np.zeros_like(self.stash)])


def held_in_tasks(program: Program, parameters: Ints, *, flushes: bool) -> Held:
    """Return what devices hold in all tasks: buffers that begin and end with tasks of one lane, or what these wait for.

    Of a device with several lanes, nothing is known. If a schedule `flushes`, updates come behind the last task of
    their device that gives gradients to their stage, and a new version takes the place of the old one.
    """
    buffers, tasks = program.buffers, program.lane_tasks
    lanes = len(program.lane_start) - 1
    rank = np.full(program.nodes, -1, dtype=np.int64)
    rank[tasks] = np.arange(len(tasks))
    where = _lanes_alone(program)[buffers.device]
    last = program.lane_start[np.maximum(where, 0) + 1] - 1
    begin, until = _spans(program, rank, where, lanes, flushes=flushes)
    known = np.flatnonzero((where >= 0) & (begin >= 0) & (until >= begin) & (begin <= last))
    column = np.full(len(Category), -1)
    column[[*HELD_KINDS]] = np.arange(len(HELD_KINDS))
    stashes, stash = program.stashes, np.zeros(len(buffers), dtype=np.bool_)
    stash[stashes] = True
    held = np.zeros((len(tasks) + 1, len(HELD_KINDS) + 1), dtype=np.int64)
    for rows, kind in ((known, column[buffers.category[known]]), (known[stash[known]], len(HELD_KINDS))):
        keep = np.broadcast_to(kind, len(rows)) >= 0
        rows, kind = rows[keep], np.broadcast_to(kind, len(rows))[keep]
        np.add.at(held, (begin[rows], kind), buffers.size[rows])
        np.add.at(held, (until[rows] + 1, kind), -buffers.size[rows])
    held = np.cumsum(held, axis=0)[:-1]
    of_stage = np.zeros(program.n, dtype=np.int64)
    of_stage[buffers.stage[stashes]] = buffers.size[stashes]
    return Held(tasks, held[:, :-1], held[:, -1], of_stage, parameters[program.tasks.stage[tasks]])


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
    new = np.flatnonzero((buffers.begin & 1 == 1) & (buffers.begin >> 1 >= program.compute) & flushes)
    new = new[np.isin(buffers.category[new], (Category.PARAMETERS, Category.OPTIMIZER))]
    rows = every, buffers.kept, new
    moments = np.concatenate([buffers.end, buffers.kept_until, buffers.begin[new]])
    found = _until(program, rank, where, lanes, moments, np.concatenate(rows), flushes=flushes)
    until, kept, replaced = np.split(found, np.cumsum([len(each) for each in rows[:2]]))
    np.maximum.at(until, buffers.kept, kept)
    begin[new] = np.where(replaced >= 0, replaced + 1, begin[new])
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


def _until(program: Program, rank: Ints, where: Ints, lanes: int, moment: Ints, rows: Ints, *, flushes: bool) -> Ints:
    """Return the rank of the last task that certainly ends by the moments up to which buffers are there; else -1."""
    where = where[rows]
    waits = _extreme(program.edges.after, rank[program.edges.before], program, lanes, least=False)
    node, at_start = moment >> 1, 1 - (moment & 1)
    own = rank[np.maximum(node, 0)]
    mine = (own >= 0) & (_lane_of(program, own) == where) & (moment >= 0)
    found = _looked_up(waits, node, where, lanes)
    if flushes:
        found = np.maximum(found, _last_givers(program, rank, moment, rows))
    return np.where(mine, own - at_start, found)


def _last_givers(program: Program, rank: Ints, moment: Ints, rows: Ints) -> Ints:
    """Return the rank of the last task that gives its device gradients before updates, or sums of them, at moments.

    It is -1 for moments of other nodes.
    """
    buffers, tasks, messages, count = program.buffers, program.tasks, program.messages, len(program.tasks)
    compute = slice(program.compute)
    gives = np.flatnonzero(tasks.kind[compute] >= Kind.B)
    shape = program.steps, program.n, program.devices
    last = np.full(shape, -1)
    np.maximum.at(last, (tasks.step[gives], tasks.stage[gives], tasks.device[gives]), rank[gives])
    node = moment >> 1
    sums = np.flatnonzero((messages.content == Content.GRADIENT) & (messages.stage >= 0)) + count
    follows = np.zeros(program.nodes + 1, dtype=np.bool_)
    follows[program.compute : count] = True
    follows[sums] = True
    step = np.concatenate([tasks.step, messages.step, np.zeros(len(program.parts) + 1, dtype=np.int64)])
    found: Ints = np.where(follows[node], last[step[node], buffers.stage[rows], buffers.device[rows]], -1)
    return found


def _lane_of(program: Program, rank: Ints) -> Ints:
    return program.lane_numbers[np.maximum(rank, 0)]


def _extreme(node: Ints, rank: Ints, program: Program, lanes: int, *, least: bool) -> tuple[Ints, Ints]:
    """Return, of the nodes and lanes of some edges, the least or the greatest rank of a task there."""
    rows = np.flatnonzero(rank >= 0)
    key = node[rows].astype(np.int64) * lanes + _lane_of(program, rank[rows])
    value = rank[rows]
    order = np.lexsort((value if least else -value, key))
    key, value = key[order], value[order]
    heads = np.flatnonzero(np.diff(key, prepend=-1))
    return key[heads], value[heads]


def _looked_up(table: tuple[Ints, Ints], node: Ints, where: Ints, lanes: int) -> Ints:
    """Return the ranks that a table has for nodes and lanes; -1 where it has none."""
    key = node.astype(np.int64) * lanes + where
    place = np.minimum(np.searchsorted(table[0], key), max(len(table[0]) - 1, 0))
    if not len(table[0]):
        return np.full(len(key), -1)
    return np.where(table[0][place] == key, table[1][place], -1)
