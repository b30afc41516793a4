"""The number of devices that model parallelism needs: the paper's pyramid (Appendix E), for any schedule that was run.

A micro-batch occupies a device that serves one stage from its forward to the end of its backward there. Three
derivations are independent of each other: the largest overlap of occupancies; the smallest cover of all occupancies by
paths in which each ends before the next starts, which is a matching; and the bound, occupancy over time. An assignment
that uses as many devices is the certificate.
"""

from dataclasses import dataclass
from fractions import Fraction
from heapq import heappush, heapreplace
from math import ceil, floor
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.units import json_number
from cdpsim.numeric.columns import CLOSE_TIMES, Ints, Times, group_numbers, group_starts, merge_close_times
from cdpsim.program import Kind, Program
from cdpsim.runs import Run
from cdpsim.runs.steady_state import SteadyState
from cdpsim.trace import Trace

MOST_COVERED_STAGES = 64  # the graph of a path cover grows as N^3


@dataclass(frozen=True, eq=False)
class Occupancies:
    """The intervals in which micro-batches occupy stages: rows sorted by stage, then begin; close times are equal."""

    stage: Ints
    micro_batch: Ints
    step: Ints
    begin: Times
    end: Times


def pyramid(trace: Trace) -> dict[str, Any]:
    """Return the devices of each stage, their derivations and the assignment, with the keys of the command's JSON.

    All metrics but the assignment are of the steady state; the assignment has the steps of the trace. Its devices are
    those of tasks.csv if each of them serves one stage and no stage has more than it needs; else they are numbered
    stage by stage.

    >>> from cdpsim import simulate
    >>> [stage["devices"] for stage in pyramid(simulate("mp-cdp", 4))["stages"]]
    [4, 3, 2, 1]
    """
    if not isinstance(trace, Run):
        raise RequestError("pyramid", "a loaded trace does not say what ran when by stage; simulate it again")
    run = max(trace, trace.steady_state.run, key=lambda run: run.program.steps).whole
    program = run.program
    rows = occupancies(program, run.start, run.end)
    device = assign_devices(rows)
    assert find_conflict(rows, device) is None, "the certificate is checked, not believed"
    stages = []
    bounds = lower_bounds(trace.steady_state)
    for stage, bound in enumerate(bounds):
        at_stage = rows.stage == stage
        begin, end = rows.begin[at_stage], rows.end[at_stage]
        covered = path_cover(begin, end) if program.n <= MOST_COVERED_STAGES else None
        counts = {"devices": int(device[at_stage].max()) + 1, "bound": bound}
        stages.append({"stage": stage, **counts, "overlap": largest_overlap(begin, end), "path_cover": covered})
    forward = program.tasks_of_kind(Kind.F)[program.find_pass(rows.step, rows.micro_batch), rows.stage]
    columns = {"stage": rows.stage, "micro_batch": rows.micro_batch, "step": rows.step}
    columns["device"] = number_devices(rows, device, program.tasks.device[forward])
    in_trace = rows.step < trace.program.steps
    assignment = zip(*(column[in_trace].tolist() for column in columns.values()), strict=True)
    return {
        "n": program.n,
        "devices": sum(stage["devices"] for stage in stages),
        "bound": sum(bounds),
        "period": json_number(trace.steady_state.period),
        "period_is": trace.steady_state.period_is,
        "stages": stages,
        "assignment": [dict(zip(columns, row, strict=True)) for row in assignment],
    }


def occupancies(program: Program, start: Times, end: Times) -> Occupancies:
    """Return the occupancies of a run, each from the start of a forward to the end of its backward."""
    spans = np.stack([start[program.tasks_of_kind(Kind.F)], end[program.gradient_tasks]])
    begin, finish = merge_close_times(spans, end.max())
    row, stage = np.indices(begin.shape, dtype=np.int32)
    step, micro_batch = program.pass_step[row], program.pass_micro_batch[row]
    columns = [column.ravel() for column in (stage, micro_batch, step, begin, finish)]
    order = np.lexsort((columns[2], columns[1], columns[3], columns[0]))
    return Occupancies(*(column[order] for column in columns))


def largest_overlap(begin: Times, end: Times) -> int:
    """Return the largest number of occupancies at one time; one that ends makes room for one that begins then."""
    time = np.concatenate([begin, end])
    change = np.repeat([1, -1], len(begin))
    order = np.lexsort((change, time))
    return int(np.cumsum(change[order]).max())


def path_cover(begin: Times, end: Times) -> int:
    """Return the fewest paths that cover all occupancies; a path goes from one to another that begins after it ended.

    Their number is that of the occupancies, less the largest matching of "is followed by" (Dilworth, by way of König).
    """
    import networkx

    ends = range(len(end))
    graph = networkx.Graph()
    graph.add_nodes_from(ends)
    first, second = np.nonzero(end[:, None] <= begin[None, :])
    graph.add_edges_from(zip(first.tolist(), (second + len(end)).tolist(), strict=True))
    matching = networkx.bipartite.hopcroft_karp_matching(graph, top_nodes=ends)
    return len(end) - len(matching) // 2


def lower_bounds(rest: SteadyState) -> list[int]:
    """Return the devices that any steady periodic schedule needs for each stage: occupancy over time."""
    run, steps = rest.run, rest.steps
    rows = slice(*run.program.first_pass[[steps.start, steps.stop]].tolist())
    first, last = run.program.tasks_of_kind(Kind.F)[rows], run.program.gradient_tasks[rows]
    occupied = (run.end[last] - run.start[first]).sum(axis=0)
    time = len(steps) * rest.period
    if run.start.dtype.kind == "i":
        return [ceil(Fraction(total) / Fraction(time)) for total in occupied.tolist()]
    return [floor(share) + int(share - floor(share) > CLOSE_TIMES) for share in (occupied / time).tolist()]


def assign_devices(rows: Occupancies) -> Ints:
    """Give each occupancy the device of its stage that is free longest, a new one if none is: the certificate."""
    device = np.empty(len(rows.stage), dtype=np.int32)
    begin, end = rows.begin.tolist(), rows.end.tolist()
    for of_stage in np.split(np.arange(len(device)), group_starts(rows.stage)[1:]):
        free: list[tuple[float, int]] = []  # a heap of devices: when each becomes free, and its number
        for row in of_stage.tolist():
            if free and free[0][0] <= begin[row]:
                device[row] = free[0][1]
                heapreplace(free, (end[row], free[0][1]))
            else:
                device[row] = len(free)
                heappush(free, (end[row], len(free)))
    return device


def number_devices(rows: Occupancies, device: Ints, of_run: Ints) -> Ints:
    """Return an assignment whose devices have numbers of their own through all stages: those of the run where possible.

    That is possible where each of the run's devices serves one stage, no two occupancies share it, and a stage has no
    more of them than the assignment.
    """
    counts = np.zeros(rows.stage.max() + 1, dtype=np.int32)
    np.maximum.at(counts, rows.stage, device + 1)
    used, stage = np.unique(np.stack([of_run, rows.stage]), axis=1)
    serve_one = len(np.unique(used)) == len(used)
    if serve_one and np.array_equal(np.bincount(stage), counts) and find_conflict(rows, of_run) is None:
        return of_run
    first: Ints = np.cumsum(counts) - counts
    return device + first[rows.stage]


def find_conflict(rows: Occupancies, device: Ints) -> tuple[int, int] | None:
    """Return two rows that one device of a stage would have to hold at once; None for a valid assignment."""
    order = np.lexsort((rows.end, rows.begin, device, rows.stage))
    group = group_numbers(group_starts(rows.stage[order], device[order]), len(order))
    clash = np.flatnonzero((group[1:] == group[:-1]) & (rows.begin[order][1:] < rows.end[order][:-1]))
    return (int(order[clash[0]]), int(order[clash[0] + 1])) if len(clash) else None
