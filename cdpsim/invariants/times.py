"""Times: finite, as long as they cost, and none before what the program, its lanes and its releases want first."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import group_starts


def times_are_finite(run: Recount) -> Iterator[str]:
    """Nothing starts before 0, ends before it starts, or never ends."""
    fine = np.isfinite(run.start) & np.isfinite(run.end) & (run.start >= 0)
    yield from run.names(np.flatnonzero(~fine), "has no time")


def nodes_last_their_cost(run: Recount) -> Iterator[str]:
    """Whatever starts ends after its own duration, and the time in which its device stands still.

    Messages on links that they share end no earlier than that.
    """
    end = run.start + run.costs.duration
    if run.costs.calendar is not None:
        start, end = run.costs.calendar.worked(np.arange(run.program.nodes), run.start, run.costs.duration)
        yield from run.names(np.flatnonzero(run.start != start), "starts while its device stands still")
    wrong = run.end != end
    if run.costs.wires is not None:
        shares = np.flatnonzero(np.diff(run.costs.wires.first)) + len(run.program.tasks)
        wrong[shares] = run.end[shares] < end[shares]
    yield from run.names(np.flatnonzero(wrong), "does not last what it costs")


def links_carry_no_more_than_they_can(run: Recount) -> Iterator[str]:
    """From when a message's bytes flow until a link has nothing more to do: not more than its bandwidth, by then."""
    wires, tasks = run.costs.wires, len(run.program.tasks)
    if wires is None or not len(wires.edge):
        return
    row = np.repeat(np.arange(len(run.program.messages)), np.diff(wires.first))
    begin = run.start[tasks + row] + wires.latency[row]
    order = np.lexsort((begin, wires.edge))
    row, begin, edge = row[order], begin[order], wires.edge[order]
    end, first = run.end[tasks + row], group_starts(edge)
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(edge)], strict=True):
        busy = slice(low, high)
        until, limit = np.maximum.accumulate(end[busy]), wires.bandwidth[edge[low]]
        idle = np.append(np.flatnonzero(begin[busy][1:] >= until[:-1]), high - low - 1)  # the last of each busy time
        last = idle[np.searchsorted(idle, np.arange(high - low))]
        sent = np.cumsum(wires.size[row[busy]])
        carried = sent[last] - sent + wires.size[row[busy]]
        room = limit * (until[last] - begin[busy])
        over = carried > room * (1 + 1e-9) + limit * 1e-12 * until[-1]
        problem = "and those after it are more than their link can carry by then"
        yield from run.names(tasks + row[busy][over], problem)


def dependencies_are_kept(run: Recount) -> Iterator[str]:
    """Nothing starts before what the program makes it wait for has ended."""
    edges = run.program.edges
    early = np.flatnonzero(run.start[edges.after] < run.end[edges.before])
    for row in early.tolist():
        after, before = (run.program.describe(int(ends[row])) for ends in (edges.after, edges.before))
        yield f"{after} starts before {before} has ended, for which the program makes it wait"


def lanes_do_one_task_at_a_time(run: Recount) -> Iterator[str]:
    """In the order of the program."""
    before, after = run.program.lane_edges
    yield from run.names(after[run.start[after] < run.end[before]], "starts while its lane is busy")


def releases_are_kept(run: Recount) -> Iterator[str]:
    """No micro-batch starts before it may."""
    for (task, _), release in zip(run.program.releases, run.costs.release, strict=True):
        if run.start[task] < release:
            yield f"{run.program.describe(task)} starts at {run.start[task]}, before its release at {release}"


def nothing_waits_without_cause(run: Recount) -> Iterator[str]:
    """Everything starts the moment that the last thing it waits for has ended."""
    program = run.program
    cause = np.zeros_like(run.start)
    for (task, _), release in zip(program.releases, run.costs.release, strict=True):
        cause[task] = release
    for before, after in ((program.edges.before, program.edges.after), program.lane_edges):
        np.maximum.at(cause, after, run.end[before])
    if run.costs.calendar is not None:
        cause, _ = run.costs.calendar.worked(np.arange(program.nodes), cause, run.costs.duration)
    yield from run.names(np.flatnonzero(run.start > cause), "waits for nothing")
