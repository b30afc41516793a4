"""Rounds found in their run: how many micro-batches workers compute while a communication is on its way.

    post_i(r + 1) = the first end of a block of worker i after post_i(r) at which communication r is through
    S_r = max_i post_i(r), when communication r begins; E_r, when it ends

A communication that ends at the very moment of a block's end is through. The recurrence says all where times are
fixed, or are drawn for each task of a worker in its order. Where messages share links, or tasks wait for messages, a
run is repeated until its own times give the counts that it was made with. Those of the first rounds depend on nothing
later, so each repetition has at least one round more that is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Columns, Ints, Times, group_numbers
from cdpsim.numeric.disturbances import never
from cdpsim.program import Content, Kind, Op, Program
from cdpsim.timing.costs import Costs

MOST_BLOCKS = 10**6  # of a worker in a round


@dataclass(frozen=True, eq=False)
class RoundTimes:
    """Rounds of a run: a row for each communication and one for the interval that is thrown away."""

    counts: Ints  # micro-batches that each worker hands over
    posted: Times  # when it does so; at last when it ends
    begun: Times  # when the communication begins
    ended: Times  # when it is through for each worker


def play_rounds(program: Program, costs: Costs, block: int, communications: int, warm_up: int) -> RoundTimes:
    """Return the rounds of workers that compute blocks of micro-batches, by the recurrence.

    All are as the first ones of a program whose times are fixed.
    """
    through, compute = _communications(program, costs), program.compute
    device, first = np.unique(program.tasks.device[: compute : program.phases], return_index=True)
    tasks, workers = costs.duration[:compute].reshape(-1, program.phases)[first], len(device)
    of_block = np.tile(tasks, block)
    longest = of_block.sum(axis=1)
    counts = np.zeros((communications + 1, workers), dtype=np.int64)
    posted = np.zeros((communications + 1, workers), dtype=tasks.dtype)
    begun, ended = (np.zeros(communications, dtype=tasks.dtype) for _ in range(2))
    counts[0] = block if warm_up else 1
    posted[0] = _advance(posted[0], of_block if warm_up else tasks)
    for r in range(communications):
        begun[r] = posted[r].max()
        ended[r] = through(0, begun[r])
        if r < warm_up:
            counts[r + 1], posted[r + 1] = block, _advance(np.full(workers, ended[r]), of_block)
            continue
        now, on = posted[r].copy(), np.arange(workers)
        while len(on):
            blocks = _blocks_until(ended[r] - now[on], longest[on])
            now[on] = _advance(now[on], np.tile(of_block[on], blocks))
            counts[r + 1, on] += block * blocks
            on = on[now[on] < ended[r]]
        posted[r + 1] = now
    return RoundTimes(counts, posted, begun, np.tile(ended[:, None], workers))


def _advance(now: Times, durations: Times) -> Times:
    """Return the time after tasks that follow each other, added up as they come."""
    after: Times = np.add.accumulate(np.column_stack([now, durations]), axis=1)[:, -1]
    return after


def _blocks_until(left: Times, longest: Times) -> int:
    """Return a number of blocks after which no worker that needs one more is through too late; at least one."""
    blocks = np.divide(left, longest, out=np.where(left > 0, np.inf, 0.0), where=longest > 0).min()
    if not blocks <= MOST_BLOCKS:
        problem = f"a communication takes as long as {blocks:.3g} blocks of micro-batches, and workers do not wait"
        raise RequestError("rounds", f"{problem}; take faster links, or larger blocks (-m)")
    return max(1, int(blocks) - 1)


class _Worker:
    """A worker that makes its tasks one after another, each in the time that it has in a program."""

    def __init__(self, program: Program, costs: Costs, device: int, block: int) -> None:
        self._nodes = np.flatnonzero(program.tasks.device[: program.compute] == device)
        self._duration = costs.duration[self._nodes]
        stands_still = costs.calendar is not None and costs.calendar.row[self._nodes[0]] < len(costs.calendar.at) - 1
        self._calendar = costs.calendar if stands_still else None
        self._phases, self._block = program.phases, block
        self._done, self.now = 0, costs.duration.dtype.type(0)

    def make(self, passes: int) -> None:
        """Make micro-batches."""
        tasks = slice(self._done, self._done + passes * self._phases)
        self.now, self._done = self._ends(tasks)[-1], tasks.stop

    def make_until(self, time: Any) -> int:
        """Make blocks until one of them ends at a time or later, or it has no more; return their micro-batches."""
        size, blocks = self._block * self._phases, 0
        while left := (len(self._nodes) - self._done) // size:
            several = min(left, 1 if self._calendar else 1 + blocks)  # more and more at a time
            ends = self._ends(slice(self._done, self._done + several * size))[size - 1 :: size]
            now = min(int(np.searchsorted(ends, time)) + 1, several)
            self.now, self._done, blocks = ends[now - 1], self._done + now * size, blocks + now
            if self.now >= time:
                break
        return blocks * self._block

    def missing(self, time: Any) -> int:
        """Return about how many micro-batches more it would make until a time."""
        mean = self._duration.mean() * self._block * self._phases
        blocks = (time - self.now) / mean if mean > 0 else np.inf
        if not blocks <= MOST_BLOCKS:
            problem = f"a round takes as long as {blocks:.3g} blocks of micro-batches, and workers do not wait"
            raise RequestError("rounds", f"{problem}; give shorter stops, or larger blocks (-m)")
        return self._block * max(1, int(blocks))

    def _ends(self, tasks: slice) -> Times:
        duration = self._duration[tasks]
        if self._calendar is None:
            return np.add.accumulate(np.append(self.now, duration))[1:]
        ends, now = np.empty_like(duration), np.array([self.now])
        for k, node in enumerate(self._nodes[tasks]):
            now = self._calendar.worked(np.array([node]), now, duration[k : k + 1])[1]
            ends[k] = now[0]
        return ends


def play_program(program: Program, costs: Costs, block: int, warm_up: int) -> tuple[Ints, bool]:
    """Return the counts of rounds by the recurrence, with the tasks' times of a program, in their order.

    Return also whether the program has tasks enough; else the last of these counts are guessed. Rounds behind a
    communication that never ends have the program's own counts.
    """
    workers = [_Worker(program, costs, device, block) for device in range(program.devices)]
    counts, through = _counts_of_rounds(program), _communications(program, costs)
    counts[0] = block if warm_up else 1
    for worker in workers:
        worker.make(int(counts[0, 0]))
    for r in range(program.updated):
        ended = through(r, max(worker.now for worker in workers))
        if ended >= never(costs.duration.dtype):
            break
        for w, worker in enumerate(workers):
            if r < warm_up:
                worker.now, counts[r + 1, w] = ended, block
                worker.make(block)
                continue
            counts[r + 1, w] = worker.make_until(ended)
            if worker.now < ended or not counts[r + 1, w]:
                counts[r + 1, w] += worker.missing(ended)
                return counts, False
    return counts, True


def _communications(program: Program, costs: Costs) -> Callable[[int, Any], Any]:
    """Return the function that says when communication r is through if it begins at a time."""
    messages, duration, calendar = program.messages, costs.duration, costs.calendar
    sent, gathers = duration[program.message_nodes], messages.op == Op.ALL_GATHER
    reduce, gather = (np.zeros(program.updated, dtype=duration.dtype) for _ in range(2))
    np.maximum.at(reduce, messages.step[~gathers], sent[~gathers])
    gather[messages.step[gathers]] = sent[gathers]  # of several in a step, the last one is the first to go
    node = np.arange(program.compute, len(program.tasks))
    node = node[np.lexsort((node, program.tasks.device[node], program.tasks.step[node]))]
    step = program.tasks.step[node]

    def through(r: int, begun: Any) -> Any:
        updates = node[slice(*np.searchsorted(step, [r, r + 1]))].reshape(program.devices, -1)
        now = np.full(program.devices, begun + reduce[r])
        for each in updates.T:
            now = now + duration[each] if calendar is None else calendar.worked(each, now, duration[each])[1]
        return now.max() + gather[r]

    return through


def _counts_of_rounds(program: Program) -> Ints:
    """Return the micro-batches of each round and worker of a program."""
    tasks, first = program.tasks, slice(None, program.compute, program.phases)
    counts = np.zeros((program.steps, program.devices), dtype=np.int64)
    np.add.at(counts, (tasks.step[first], tasks.device[first]), 1)
    return counts


def rounds_of(program: Program, end: Times) -> RoundTimes:
    """Return the rounds of a run, from the ends of its nodes.

    Where a communication goes as several messages, it is through for a worker with the last one that reaches it.
    """
    tasks, compute, counts = program.tasks, program.compute, _counts_of_rounds(program)
    step, device = tasks.step[:compute], tasks.device[:compute]
    posted = np.zeros(counts.shape, dtype=end.dtype)
    np.maximum.at(posted, (step, device), end[:compute])
    begun = posted[: program.updated].max(axis=1)
    through, update = begun.copy(), slice(compute, len(tasks))
    np.maximum.at(through, tasks.step[update], end[update])
    ended = np.tile(through[:, None], program.devices)
    messages, row = program.messages, brought_first(program)
    arrived, single = end[program.message_nodes][row], messages.op[row] == Op.P2P
    np.maximum.at(ended, messages.step[row[~single]], arrived[~single, None])
    np.maximum.at(ended, (messages.step[row[single]], messages.dst[row[single]]), arrived[single])
    return RoundTimes(counts, posted, begun, ended)


def brought_first(program: Program) -> Ints:
    """Return the messages of the parameters with which workers go on after each communication.

    Of several gathers in one, each of the same number of messages, the last one goes first.
    """
    whole = (program.unexpanded or program).messages
    gathers = np.bincount(whole.step[whole.op == Op.ALL_GATHER], minlength=program.steps)
    row = np.flatnonzero(program.messages.content == Content.PARAMETERS)
    row = row[np.argsort(program.messages.step[row], kind="stable")]
    step = program.messages.step[row]
    until = np.cumsum(np.bincount(step, minlength=program.steps))[step]
    first = np.searchsorted(step, step)
    brought: Ints = row[np.arange(len(row)) >= until - (until - first) // np.maximum(gathers[step], 1)]
    return brought


def block_ends(program: Program, end: Times, block: int) -> tuple[Ints, Ints, Times]:
    """Return the step, the device and the end of each block of micro-batches of a run, in the order of devices."""
    task = program.lane_tasks[program.tasks.kind[program.lane_tasks] != Kind.U]
    last = task[program.phases - 1 :: program.phases]
    step, device = program.tasks.step[last], program.tasks.device[last]
    head = np.flatnonzero(np.append(True, (np.diff(step) != 0) | (np.diff(device) != 0)))
    number = np.arange(len(last)) - head[group_numbers(head, len(last))]
    whole = np.flatnonzero(number % block == block - 1)
    return step[whole], device[whole], end[last[whole]]


def counts_by_times(program: Program, end: Times, block: int, warm_up: int) -> Ints:
    """Return the counts that a run's own times give: the blocks of each interval that its communication takes.

    Where an interval ends too early, more blocks are taken as long as the longest of its worker.
    """
    found = rounds_of(program, end)
    counts = found.counts.copy()
    step, device, ends = block_ends(program, end, block)
    order = np.lexsort((ends, device, step))
    step, device, ends = step[order], device[order], ends[order]
    for r in range(warm_up, program.updated):
        rows = slice(*np.searchsorted(step, [r + 1, r + 2]))
        through = ends[rows] >= found.ended[r, device[rows]]
        for worker in range(program.devices):
            mine = np.flatnonzero(device[rows] == worker)
            enough = mine[through[mine]]
            if len(enough):
                counts[r + 1, worker] = block * (int(enough[0] - mine[0]) + 1)
                continue
            times = np.diff(ends[rows][mine], prepend=found.posted[r, worker])
            missing = (found.ended[r, worker] - ends[rows][mine[-1]]) / times.max()
            if not np.isfinite(missing) or missing > MOST_BLOCKS:
                raise RequestError("rounds", f"communication {r} never ends; let every device go on")
            counts[r + 1, worker] += block * max(1, int(missing))
    return counts


def as_rows(found: RoundTimes) -> Columns:
    """Return the columns of rounds.csv: a row for each round and device; -1 where a round has no communication."""
    number, device = (index.ravel() for index in np.indices(found.counts.shape, dtype=np.int32))
    counts, posted = found.counts.ravel(), found.posted.ravel()
    columns = {"round": number, "device": device, "micro_batches": counts, "posted": posted}
    ended = np.append(found.ended, np.full_like(found.posted[-1:], -1), axis=0).ravel()
    return columns | {"begun": np.append(found.begun, -1)[number], "ended": ended}
