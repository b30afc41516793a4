"""Rendezvous: messages for which both ends wait, where compute and communication do not overlap.

Messages are posted, by both of their ends, where a run of the program would begin them in which every task takes one
slot and messages none. That is how torch's pipelining places a receive: a greedy simulation of the schedule puts it
where its sender is due (`_add_send_recv` in torch/distributed/pipelining/schedules.py), and what is posted behind it
waits for it, though its data may be long in coming (pytorch issues #172668 and #188833, pull request #165664). What is
left to chance there is not here: all devices post in one order, so that they cannot wait for each other in a circle.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from cdpsim.cluster.devices import FULL, NONE
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Content, EdgeKind, Op, Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.program.streams import find_endpoints


def defer_receives(program: Program) -> Program:
    """Post receives of activations and their gradients only when the task before their reader has ended.

    This closes no circle. From such a message the only way on is to its reader; the new edge begins at the task
    before the reader in its lane. A circle through the message would remain one if it went from that task straight to
    the reader, along the lane, and so it would have been there before.
    """
    task, message = _late_receives(program)
    return program.with_edges(task, message, EdgeKind.ROOM)


def _late_receives(program: Program) -> tuple[Ints, Ints]:
    """Give each activation and gradient that arrives at a task, and the task before that one in its lane."""
    edges, first = program.edges, len(program.tasks)
    boundary = np.zeros(program.nodes, dtype=np.bool_)
    boundary[first:] = program.messages.content <= Content.ACTIVATION_GRADIENT
    read = np.flatnonzero(boundary[edges.before])
    previous = np.full(first, -1, dtype=np.int32)
    earlier, later = program.lane_edges
    previous[later] = earlier
    task = previous[edges.after[read]]
    return task[task >= 0], edges.before[read][task >= 0]


def posting_turns(program: Program) -> Ints:
    """Give each node its turn: lower ones are posted first, messages of equal turn by both ends together.

    Turns follow the unit-cost run: by slots; in a slot messages before tasks, and those that need others after these;
    collectives one by one, in the order of their numbers. Point-to-point messages that begin at one moment are one
    batch (as torch's `batch_isend_irecv` makes it): were each posted by itself, a ring in which all devices send and
    receive at once would go round one after another. Of those with the same two ends the second is in another batch.

    No edge of the program leads to a lower turn, and none but from an update keeps one: what waits for a task, which
    takes a slot, comes in a later one; what waits for a message comes later, or is deeper in the same slot, or a task.
    """
    time, depth = _unit_run(program)
    messages, first = program.messages, len(program.tasks)
    among = np.zeros(program.nodes, dtype=np.int64)
    single, together = np.flatnonzero(messages.op == Op.P2P), np.flatnonzero(messages.op != Op.P2P)
    among[first + together] = len(messages) + together
    ends = (time[first + single], depth[first + single], messages.src[single], messages.dst[single])
    order = sort_by(*ends, single)
    begins = group_starts(*(column[order] for column in ends))
    among[first + single[order]] = np.arange(len(single)) - begins[group_numbers(begins, len(single))]
    order = sort_by(time, depth, among)
    turn = np.empty(program.nodes, dtype=np.int64)
    turn[order] = group_numbers(group_starts(time[order], depth[order], among[order]), len(order))
    return turn


def _unit_run(program: Program) -> tuple[Ints, Ints]:
    """When each node begins if a task takes a slot and nothing else any time, and after how many messages of then."""
    compute = program.compute
    waits = [share * program.phases for _, share in program.releases]
    slot = lcm(*(wait.denominator for wait in waits))  # so that all moments are whole
    duration, earliest = np.zeros(program.nodes, dtype=np.int64), np.zeros(program.nodes, dtype=np.int64)
    duration[:compute] = slot
    for (task, _), wait in zip(program.releases, waits, strict=True):
        earliest[task] = int(wait * slot)
    before, after = program.waits()
    time, _, reached = longest_paths(before, after, duration, earliest)
    if reached < program.nodes:
        refuse_deadlock(program)
    inside = (before >= compute) & (after >= compute) & (time[before] == time[after])
    counted = np.zeros(program.nodes, dtype=np.int64)
    # An update is no post of its own; with a place in a lane it comes behind what it waits for all the same.
    counted[len(program.tasks) :] = 2
    counted[compute : len(program.lane_tasks)] = 1
    depth, _, _ = longest_paths(before[inside], after[inside], counted, np.zeros_like(counted))
    depth[:compute] = depth.max(initial=0) + 1
    return time, depth


def meet_in_turns(program: Program, overlaps: Sequence[str], turn: Ints) -> Program:
    """Let the messages of each device run in their turns, alone where its overlap is "none", beside its tasks else.

    `overlaps` has a word for each device. Messages of equal turn are not ordered: they run side by side, or know
    their order themselves, as those of one collective do. No circle is closed: no edge of a program leads to a lower
    turn (`posted`; those inside a collective keep it), and all new ones lead to higher ones.
    """
    own = np.array([word != FULL for word in overlaps])
    if not own.any():
        return program
    batches = _Batches(program, own, turn)
    before, after = batches.in_turn()
    alone = np.array([word == NONE for word in overlaps])
    if alone.any():
        of_tasks = batches.beside_tasks(program, alone, turn)
        before, after = np.concatenate([before, of_tasks[0]]), np.concatenate([after, of_tasks[1]])
    # The same two collectives follow each other on all their members.
    both = np.sort(before.astype(np.int64) * program.nodes + after)
    both = both[group_starts(both)]
    return program.with_edges(both // program.nodes, both % program.nodes, EdgeKind.STREAM)


class _Batches:
    """What devices with streams post: rows of a message and one of its devices, by device and turn.

    Of those of a batch, which are one device's of one turn, only the last ones are waited for, and only the first
    ones wait: the rest comes after or before them anyway.
    """

    def __init__(self, program: Program, own: np.ndarray, turn: Ints) -> None:
        message, device, _ = find_endpoints(program, own)
        order = sort_by(device, turn[message], message)
        self.message, self.device = message[order], device[order]
        self.head = group_starts(self.device, turn[self.message])
        self.batch = group_numbers(self.head, len(order))
        self.span = int(turn.max(initial=0)) + 1
        self.key = self.device[self.head].astype(np.int64) * self.span + turn[self.message[self.head]]
        self.is_first, self.is_last = self._bounds(program, turn)

    def _bounds(self, program: Program, turn: Ints) -> tuple[np.ndarray, np.ndarray]:
        """Which rows wait for no other of their batch, and which are waited for by none."""
        first, last = (np.ones(len(self.message), dtype=np.bool_) for _ in range(2))
        edges, count = program.edges, len(program.tasks)
        inside = (edges.before >= count) & (edges.after >= count) & (turn[edges.before] == turn[edges.after])
        before, after = edges.before[inside], edges.after[inside]
        row = {}  # of the sender's end and of the receiver's end of each message
        messages = program.messages
        for name in ("src", "dst"):
            row[name] = np.full(program.nodes, -1, dtype=np.int64)
            mine = np.flatnonzero(self.device == getattr(messages, name)[self.message - count])
            row[name][self.message[mine]] = mine
        for left in row.values():
            for right in row.values():
                one, other = left[before], right[after]
                same = (one >= 0) & (other >= 0)
                same[same] = self.device[one[same]] == self.device[other[same]]
                last[one[same]] = False
                first[other[same]] = False
        return first, last

    def in_turn(self) -> tuple[Ints, Ints]:
        """Edges from each batch to the next one of its device."""
        batch = np.arange(len(self.head) - 1)
        batch = batch[self.device[self.head[:-1]] == self.device[self.head[1:]]]
        follows = np.full(len(self.head), -1, dtype=np.int64)
        follows[batch + 1] = batch
        waits = np.flatnonzero(self.is_first & (follows[self.batch] >= 0))
        before, which = self._all_last(follows[self.batch[waits]])
        return before, self.message[waits[which]]

    def beside_tasks(self, program: Program, alone: np.ndarray, turn: Ints) -> tuple[Ints, Ints]:
        """Edges from the batch before each task to it, and from it to the next, where only its lane does not say so."""
        lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))
        mine = np.flatnonzero(alone[program.tasks.device[program.lane_tasks]])
        task, lane = program.lane_tasks[mine], lane[mine]
        device = program.tasks.device[task].astype(np.int64)
        after = np.searchsorted(self.key, device * self.span + turn[task])  # the next batch, maybe another device's
        first = np.append(True, (lane[1:] != lane[:-1]) | (after[1:] != after[:-1]))[: len(task)]
        final = np.append(first[1:], True)[: len(task)]
        home = np.append(self.device[self.head], -1)
        waits = np.flatnonzero(first & (after > 0) & (home[after - 1] == device))
        before, which = self._all_last(after[waits] - 1)
        blocks = np.flatnonzero(final & (home[after] == device))
        next_ones, of = self._all_first(after[blocks])
        return np.concatenate([before, task[blocks[of]]]), np.concatenate([task[waits[which]], next_ones])

    def _all_last(self, batch: Ints) -> tuple[Ints, Ints]:
        return _members(self.message, self.batch, self.is_last, batch)

    def _all_first(self, batch: Ints) -> tuple[Ints, Ints]:
        return _members(self.message, self.batch, self.is_first, batch)


def _members(message: Ints, batch: Ints, chosen: np.ndarray, wanted: Ints) -> tuple[Ints, Ints]:
    """The chosen messages of each wanted batch, one batch after another, and which of the wanted each belongs to."""
    some = np.flatnonzero(chosen)
    low, high = (np.searchsorted(batch[some], wanted, side=side) for side in ("left", "right"))
    count = high - low
    which = np.repeat(np.arange(len(wanted)), count)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - low, count)
    return message[some[place]], which
