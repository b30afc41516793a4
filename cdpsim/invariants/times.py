"""Laws of times: they are finite, as long as they cost, and no earlier than edges, lanes and releases allow."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import group_starts


def times_are_finite(run: Recount) -> Iterator[str]:
    """Every node starts at 0 or later, and both its times are finite."""
    fine = np.isfinite(run.start) & np.isfinite(run.end) & (run.start >= 0)
    yield from run.report(np.flatnonzero(~fine), "has no time")


def nodes_last_their_cost(run: Recount) -> Iterator[str]:
    """A node ends when its own duration is over, and the time in which its device stands still.

    Messages on links that they share end no earlier than that.
    """
    end = run.start + run.costs.duration
    if run.costs.calendar is not None:
        start, end = run.costs.calendar.worked(np.arange(run.program.nodes), run.start, run.costs.duration)
        yield from run.report(np.flatnonzero(run.start != start), "starts while its device stands still")
    wrong = run.end != end
    if run.costs.wires is not None:
        shares = np.flatnonzero(np.diff(run.costs.wires.first)) + len(run.program.tasks)
        wrong[shares] = run.end[shares] < end[shares]
    yield from run.report(np.flatnonzero(wrong), "does not last what it costs")


def links_carry_no_more_than_they_can(run: Recount) -> Iterator[str]:
    """From when a message's bytes flow until its link is idle, the link carries no more than its bandwidth allows."""
    wires, tasks = run.costs.wires, len(run.program.tasks)
    if wires is None or not len(wires.edge):
        return
    row = np.repeat(np.arange(len(run.program.messages)), np.diff(wires.first))
    begin = run.start[tasks + row] + wires.latency[row]
    order = np.lexsort((begin, wires.edge))
    row, begin, edge = row[order], begin[order], wires.edge[order]
    end, first = run.end[tasks + row], group_starts(edge)
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(edge)], strict=True):
        on_link, since, limit = row[low:high], begin[low:high], wires.bandwidth[edge[low]]
        until, size = np.maximum.accumulate(end[low:high]), wires.size[on_link]
        last_busy = np.append(np.flatnonzero(since[1:] >= until[:-1]), high - low - 1)  # the last of each busy time
        last = last_busy[np.searchsorted(last_busy, np.arange(high - low))]
        sent = np.cumsum(size)
        over = sent[last] - sent + size > limit * (until[last] - since) * (1 + 1e-9) + limit * 1e-12 * until[-1]
        problem = "and those after it are more than their link can carry by then"
        yield from run.report(tasks + on_link[over], problem)


def dependencies_are_kept(run: Recount) -> Iterator[str]:
    """No node starts before the nodes that the program makes it wait for have ended."""
    edges = run.program.edges
    early = np.flatnonzero(run.start[edges.after] < run.end[edges.before])
    for row in early.tolist():
        after, before = (run.program.describe(int(ends[row])) for ends in (edges.after, edges.before))
        yield f"{after} starts before {before} has ended, for which the program makes it wait"


def lanes_do_one_task_at_a_time(run: Recount) -> Iterator[str]:
    """A lane starts a task when the one before it, in the order of the program, has ended."""
    before, after = run.program.lane_edges
    yield from run.report(after[run.start[after] < run.end[before]], "starts while its lane is busy")


def releases_are_kept(run: Recount) -> Iterator[str]:
    """No micro-batch starts before its release."""
    for (task, _), release in zip(run.program.releases, run.costs.release, strict=True):
        if run.start[task] < release:
            yield f"{run.program.describe(task)} starts at {run.start[task]}, before its release at {release}"
