"""Rendezvous: messages for which both ends wait, where compute and communication do not overlap.

Both ends post a message where it would begin in a run of the program in which every task takes one slot and messages
take no time. That is how torch's pipelining places a receive: a greedy simulation of the schedule puts it where its
sender is due (`_add_send_recv` in torch/distributed/pipelining/schedules.py), and what is posted behind it waits for
it, though its data may be long in coming (pytorch issues #172668 and #188833, pull request #165664). torch leaves the
order among devices to chance. Here all devices post in one order, so that they cannot wait for each other in a cycle.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from cdpsim.cluster.topology import FULL, NONE
from cdpsim.numeric.columns import Flags, Ints, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Content, EdgeKind, Op, Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.program.streams import Pairs, find_endpoints


def defer_receives(program: Program) -> Program:
    """Post receives of activations and their gradients only when the task before their reader has ended.

    This closes no cycle. From such a message the only way on is to its reader; the new edge begins at the task
    before the reader in its lane. A cycle through the message would remain one if it went from that task straight to
    the reader, along the lane, and so it would have been there before.
    """
    edges, first = program.edges, len(program.tasks)
    boundary = np.zeros(program.nodes, dtype=np.bool_)
    boundary[first:] = program.messages.content <= Content.ACTIVATION_GRADIENT
    read = np.flatnonzero(boundary[edges.before])
    previous = np.full(first, -1, dtype=np.int32)
    earlier, later = program.lane_edges
    previous[later] = earlier
    task = previous[edges.after[read]]
    return program.with_edges(task[task >= 0], edges.before[read][task >= 0], EdgeKind.ROOM)


def posting_turns(program: Program) -> Ints:
    """Return the turn of each node: lower ones are posted first, messages of equal turn by both ends together.

    Turns follow the unit-cost run: by slots; in a slot messages before tasks, and those that need others after these;
    collectives one by one, in the order of their numbers. Point-to-point messages that begin at one moment are one
    batch (as torch's `batch_isend_irecv` makes it): were each posted by itself, a ring in which all devices send and
    receive at once would go round one after another. Of those with the same two ends the second is in another batch.

    No edge of the program leads to a lower turn, and none but from an update without a place in a lane keeps one: what
    waits for a task, which takes a slot, comes in a later one; what waits for a message or an update comes later, or is
    deeper in the same slot, or a task.
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
    among[program.compute : len(program.lane_tasks)] = 2 * len(messages)  # what a task sends goes before an update
    order = sort_by(time, depth, among)
    turn = np.empty(program.nodes, dtype=np.int64)
    turn[order] = group_numbers(group_starts(time[order], depth[order], among[order]), len(order))
    return turn


def _unit_run(program: Program) -> Pairs:
    """Run tasks in one slot each, and all else in no time.

    Return when each node begins, and after how many messages of that moment.
    """
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
    their order themselves, as those of one collective do. No cycle is closed: no edge of a program leads to a lower
    turn (`posting_turns`; those inside a collective keep it), and all new ones lead to higher ones.
    """
    waiting, alone = np.array(overlaps) != FULL, np.array(overlaps) == NONE
    if not waiting.any():
        return program
    batches = _Batches(program, waiting, turn)
    pairs = batches.in_turn(), batches.beside_tasks(program, alone, turn)
    before, after = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    # The same two collectives follow each other on all their members.
    both = np.unique(before.astype(np.int64) * program.nodes + after)
    return program.with_edges(both // program.nodes, both % program.nodes, EdgeKind.STREAM)


class _Batches:
    """Messages that devices with streams post: rows of a message and one of its devices, by device and turn.

    A batch is one device's messages of one turn. Only its last ones are waited for, and only its first ones wait: the
    rest comes after or before them anyway.
    """

    def __init__(self, program: Program, waiting: Flags, turn: Ints) -> None:
        message, device, _ = find_endpoints(program, waiting)
        order = sort_by(device, turn[message], message)
        self.message, self.device = message[order], device[order]
        self.head = group_starts(self.device, turn[self.message])
        self.batch = group_numbers(self.head, len(order))
        self.span = int(turn.max(initial=0)) + 1
        self.key = self.device[self.head].astype(np.int64) * self.span + turn[self.message[self.head]]
        # Edges inside a batch lead from no last row and to no first one.
        before, after = program.edges.before, program.edges.after
        inside = (np.minimum(before, after) >= len(program.tasks)) & (turn[before] == turn[after])
        row, edge = matching_pairs((self.message,), (before[inside],))
        later_row, later_edge = matching_pairs((self.message,), (after[inside],))
        left, right = matching_pairs((edge, self.device[row]), (later_edge, self.device[later_row]))
        self.first = np.delete(np.arange(len(order)), later_row[right])
        self.last = np.delete(np.arange(len(order)), row[left])

    def in_turn(self) -> Pairs:
        """Return the edges from each batch to the next one of its device."""
        runs_on = self.device[self.head]
        follows = np.append(False, runs_on[1:] == runs_on[:-1])[: len(runs_on)]
        waits = self.first[follows[self.batch[self.first]]]
        before, which = self._members(self.last, self.batch[waits] - 1)
        return before, self.message[waits[which]]

    def beside_tasks(self, program: Program, alone: Flags, turn: Ints) -> Pairs:
        """Return the edges from the batch before each task to it, and from it to the next.

        Edges that the task's lane implies are left out.
        """
        mine = np.flatnonzero(alone[program.tasks.device[program.lane_tasks]])
        task, lane = program.lane_tasks[mine], program.lane_numbers[mine]
        device = program.tasks.device[task].astype(np.int64)
        after = np.searchsorted(self.key, device * self.span + turn[task])  # the next batch, maybe another device's
        first = np.append(True, (lane[1:] != lane[:-1]) | (after[1:] != after[:-1]))[: len(task)]
        final = np.append(first[1:], True)[: len(task)]
        runs_on = np.append(self.device[self.head], -1)
        waits = np.flatnonzero(first & (after > 0) & (runs_on[after - 1] == device))
        before, which = self._members(self.last, after[waits] - 1)
        blocks = np.flatnonzero(final & (runs_on[after] == device))
        next_ones, of = self._members(self.first, after[blocks])
        return np.concatenate([before, task[blocks[of]]]), np.concatenate([task[waits[which]], next_ones])

    def _members(self, rows: Ints, batch: Ints) -> Pairs:
        """Return the messages among these rows of each batch, and which of the batches each belongs to."""
        row, which = matching_pairs((self.batch[rows],), (batch,))
        return self.message[rows[row]], which
