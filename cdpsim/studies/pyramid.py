"""How many devices model parallelism needs: the paper's pyramid (Appendix E), for any schedule that was run.

A device that serves one stage is occupied by a micro-batch from its forward to the end of its backward there. Three
derivations that know nothing of each other: the largest overlap of occupancies; the smallest cover of all occupancies
by paths of "ends before the other starts", which is a matching; and the bound, occupancy over time. An assignment that
uses as many devices is the certificate.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.units import json_number
from cdpsim.numeric.columns import Ints, Times, group_numbers, group_starts
from cdpsim.program import Kind, Program
from cdpsim.runs import Run, SteadyState
from cdpsim.trace import Trace

COVERED_TO = 64  # stages: the graph of a path cover grows as N^3
SAME = 1e-9  # of the run: real times that lie closer together are one time


@dataclass(frozen=True, eq=False)
class Occupancies:
    """When each micro-batch occupies each stage: rows sorted by stage, then start; whole numbers in order of time."""

    stage: Ints
    micro_batch: Ints
    step: Ints
    begin: Ints
    end: Ints


def pyramid(trace: Trace) -> dict[str, Any]:
    """Count, bound and derivations for each stage, and the assignment; keys as in `cdpsim pyramid --format json`.

    All is of the run at rest, but for the assignment, which has the steps of the trace. Its devices are those of
    tasks.csv where these are as many as stages need and serve one stage each; else they are counted stage by stage.

    >>> from cdpsim import simulate
    >>> [stage["devices"] for stage in pyramid(simulate("mp-cdp", 4))["stages"]]
    [4, 3, 2, 1]
    """
    if not isinstance(trace, Run):
        raise RequestError("pyramid", "a loaded trace does not say what ran when by stage; simulate it again")
    run = max(trace, trace.at_rest.run, key=lambda run: run.program.steps)
    program, start, end = run.program, run.start, run.end
    rows = occupancies(program, start, end)
    device = assign(rows)
    assert conflict(rows, device) is None, "the certificate is checked, not believed"
    stages = []
    bounds = lower_bounds(trace.at_rest)
    for stage in range(program.n):
        of_it = slice(*np.searchsorted(rows.stage, [stage, stage + 1]).tolist())
        begin, finish = rows.begin[of_it], rows.end[of_it]
        covered = path_cover(begin, finish) if program.n <= COVERED_TO else None
        counts = {"devices": int(device[of_it].max()) + 1, "bound": bounds[stage]}
        stages.append({"stage": stage, **counts, "overlap": overlap(begin, finish), "path_cover": covered})
    own = program.tasks.device[program.tasks_of_kind(Kind.F)]
    device = numbered(rows, device, own[program.find_pass(rows.step, rows.micro_batch), rows.stage])
    shown = np.flatnonzero(rows.step < trace.program.steps)
    columns = (column[shown].tolist() for column in (rows.stage, rows.micro_batch, rows.step, device))
    names = ("stage", "micro_batch", "step", "device")
    return {
        "n": program.n,
        "devices": sum(stage["devices"] for stage in stages),
        "bound": sum(bounds),
        "period": json_number(trace.at_rest.period),
        "period_is": trace.at_rest.period_is,
        "stages": stages,
        "assignment": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
    }


def occupancies(program: Program, start: Times, end: Times) -> Occupancies:
    """From the start of each forward to the end of its backward."""
    begin, finish = _in_order(np.stack([start[program.tasks_of_kind(Kind.F)], end[program.gradient_tasks]]))
    row, stage = np.indices(begin.shape, dtype=np.int32)
    step, micro_batch = program.pass_step[row], program.pass_micro_batch[row]
    columns = [column.ravel() for column in (stage, micro_batch, step, begin, finish)]
    order = np.lexsort((columns[2], columns[1], columns[3], columns[0]))
    return Occupancies(*(column[order] for column in columns))


def _in_order(times: Times) -> Times:
    """Real times by their order, those that differ by rounding alone made equal; whole times as they are."""
    if times.dtype.kind == "i":
        return times
    value, place = np.unique(times, return_inverse=True)
    apart = np.diff(value, prepend=value[:1]) > SAME * value[-1]
    order: Times = np.cumsum(apart)[place].reshape(times.shape)
    return order


def overlap(begin: Ints, end: Ints) -> int:
    """The largest number of occupancies at one time; what ends then makes room for what begins."""
    time = np.concatenate([begin, end])
    change = np.repeat([1, -1], len(begin))
    order = np.lexsort((change, time))
    return int(np.cumsum(change[order]).max())


def path_cover(begin: Ints, end: Ints) -> int:
    """The fewest paths that cover all occupancies, where a path goes from one to another that begins after it ended.

    As many as there are occupancies, less the largest matching of "is followed by" (Dilworth, by way of König).
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
    """For each stage, occupancy of one period over the period: what any steady periodic schedule needs."""
    run, steps = rest.run, rest.steps
    rows = slice(*run.program.first_pass[[steps.start, steps.stop]].tolist())
    first, last = run.program.tasks_of_kind(Kind.F)[rows], run.program.gradient_tasks[rows]
    occupied = (run.end[last] - run.start[first]).sum(axis=0)
    time = len(steps) * rest.period
    if run.start.dtype.kind == "i":
        return [ceil(Fraction(total) / Fraction(time)) for total in occupied.tolist()]
    shares = occupied / time
    return [floor(share) + int(share - floor(share) > SAME) for share in shares.tolist()]


def assign(rows: Occupancies) -> Ints:
    """Give each occupancy the device of its stage that is free longest, a new one if none is: the certificate."""
    device = np.empty(len(rows.stage), dtype=np.int32)
    first = group_starts(rows.stage)
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(device)], strict=True):
        free: list[tuple[int, int]] = []  # when each device becomes free, and its number
        begins, ends = rows.begin[low:high].tolist(), rows.end[low:high].tolist()
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True), start=low):
            place = min(range(len(free)), key=free.__getitem__, default=None)
            if place is None or free[place][0] > begin:
                place = len(free)
                free.append((end, place))
            device[row] = free[place][1]
            free[place] = (end, free[place][1])
    return device


def numbered(rows: Occupancies, device: Ints, own: Ints) -> Ints:
    """Give the devices of an assignment numbers of their own through all stages: the run's `own` where they do as well.

    That is where each of the run's devices serves one stage, no two occupancies share it, and a stage has no more of
    them than the assignment.
    """
    counts = np.zeros(rows.stage.max() + 1, dtype=np.int32)
    np.maximum.at(counts, rows.stage, device + 1)
    used, stage = np.unique(np.stack([own, rows.stage]), axis=1)
    serve_one = len(np.unique(used)) == len(used)
    if serve_one and np.array_equal(np.bincount(stage), counts) and conflict(rows, own) is None:
        return own
    first: Ints = np.cumsum(counts) - counts
    return device + first[rows.stage]


def conflict(rows: Occupancies, device: Ints) -> tuple[int, int] | None:
    """Two rows that one device of a stage would have to hold at once; None for a valid assignment."""
    order = np.lexsort((rows.end, rows.begin, device, rows.stage))
    of = group_numbers(group_starts(rows.stage[order], device[order]), len(order))
    clash = np.flatnonzero((of[1:] == of[:-1]) & (rows.begin[order][1:] < rows.end[order][:-1]))
    return (int(order[clash[0]]), int(order[clash[0] + 1])) if len(clash) else None
