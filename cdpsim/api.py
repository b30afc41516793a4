"""Entry points: the program of a request, its costs, its run, many runs at once; and runs behind saved traces.

request = Request("multi-cdp", n=8, model="gpt2", cluster="a100-nodes")
program = assemble(request)
costs = price(program, request.model, request.cluster)
run(program, costs)                        simulate(request) is these three
sweep(program, [costs, ...])               when all tasks end, under many costs at once
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.numeric.columns import Times
from cdpsim.program import Program
from cdpsim.request import Request, end_check
from cdpsim.request.options import SIGNATURE, Options
from cdpsim.runs import Run
from cdpsim.runs.assembling import (
    algorithms_by_collective,
    are_replicas_alike,
    assemble_replicas,
    play_of_request,
    price_resolved,
    program_key,
    refuse_other_counts,
    request_of,
    resolve_request,
    unexpanded_costs,
    with_counts,
)
from cdpsim.runs.playing import NODES_AT_ONCE, quantized, refuse_other_costs, run, run_request
from cdpsim.schedules import Schedule
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import are_exact, sweep_together
from cdpsim.timing.round_times import as_rows
from cdpsim.trace import TABLES, Trace, load
from cdpsim.trace.metrics import memory
from cdpsim.trace.table import RoundRow, Table

__all__ = ["assemble", "price", "reopen", "rounds", "run", "simulate", "sweep"]


def simulate(schedule: str | Schedule | Request, n: int | None = None, **options: Unpack[Options]) -> Run:
    """Return the run of a request, or of a schedule, its number of stages, and options as on the command line.

    A run that never ends raises `errors.Stalled`. The `request` of a run makes the same run again.

    >>> int(simulate("multi-cdp", 4).end.max())
    30
    """
    if not isinstance(schedule, Request):
        request = Request(schedule, n, **options)
    elif n is not None or options:
        raise RequestError("request", "says all of itself; leave out what is given beside it")
    else:
        request = schedule
    end_check()
    completed = run_request(with_counts(request))
    if not request.ignore_memory:
        refuse_overflow(completed)
    return completed


simulate.__signature__ = SIGNATURE  # type: ignore[attr-defined]


def assemble(request: Request) -> Program:
    """Return the tasks, messages, dependencies and buffers of a request; these have no times.

    Of rounds, the counts are found before, if the request does not have them.
    """
    return assemble_replicas(with_counts(request))


def rounds(schedule: str | Schedule | Request, n: int | None = None, **options: Any) -> Table[RoundRow]:
    """Return what each worker hands over in each round, and when, without a run: by the recurrence of fixed times.

    The options are those of `simulate`, and the rows are those of its run's `rounds`.

    >>> from cdpsim import rounds
    >>> rounds("acco", 1, replicas=2, slow={1: 2}, steps=1).micro_batches.tolist()
    [1, 1, 1, 1, 2, 1]
    """
    request = schedule if isinstance(schedule, Request) else Request(schedule, n, **options)
    if request.schedule.order.rounds is None:
        raise RequestError("schedule", f"{request.schedule.name} has no rounds: its number of micro-batches is given")
    if request.counts_vary:
        raise RequestError("rounds", "follow from a run alone here; simulate it, and the trace's rounds.csv has them")
    end_check()
    found = play_of_request(request)
    refuse_other_counts(request.counts, found.counts)
    return Table(RoundRow, as_rows(found))


# The facts of a model and a cluster on which a program depends: the option that gives each, and how it can differ.
_PROGRAM_FACTS = {
    "sizes": ("model", "other sizes"),
    "ties": ("model", "other tied tensors"),
    "runtime": ("model", "another runtime"),
    "updates": ("model", "updates elsewhere, or of other times,"),
    "widths": ("cluster", "devices that need another number of them for a stage"),
    "lanes": ("cluster", "another number of lanes"),
    "overlaps": ("cluster", "devices that overlap otherwise"),
    "algorithms": ("cluster", "other algorithms of collectives"),
}


def price(program: Program, model: str | Path | Model, cluster: str | Path | Cluster) -> Costs:
    """Return the costs of a program's tasks and messages by a model on a cluster, disturbed as its request says.

    A model or a cluster for which another program would be assembled is refused.
    """
    request = request_of(program)
    if model is request.model and cluster is request.cluster:
        return price_resolved(program, request)
    request = resolve_request(request.of(model, cluster), program.unexpanded or program)
    if program.fold > 1 and not are_replicas_alike(program, request.cluster, request.pricing):
        raise RequestError("cluster", "has replicas that are not alike, of which the program has one; assemble another")
    collapsed = None if program.unexpanded is None else unexpanded_costs(program.unexpanded, request)
    algorithms = program.key["algorithms"] if collapsed is None else algorithms_by_collective(collapsed)
    key = program_key(request, program.devices, algorithms)
    for fact, (subject, difference) in _PROGRAM_FACTS.items():
        if key[fact] != program.key[fact]:
            problem = f"has {difference} than the program was assembled for; assemble one for it"
            raise RequestError(subject, problem)
    return price_resolved(program, request, collapsed)


def sweep(program: Program, costs: Iterable[Costs]) -> Times:
    """Return when all tasks end under each of many costs: a row for each of these, a column for each task.

    The times are those of `run`, to the last bit. Costs of a cluster whose messages share links are refused: runs that
    are swept together do not know which messages share a link.
    """
    many, tasks = list(costs), len(program.tasks)
    for each in many:
        refuse_other_costs(program, each)
    if any(each.wires is not None for each in many):
        raise RequestError("contention", "many runs at once do not know who shares links with whom; run one by one")
    ends = np.empty((len(many), tasks), dtype=np.result_type(*(each.duration for each in many)) if many else np.int64)
    at_once = max(8, NODES_AT_ONCE // max(program.nodes, 1))
    for low in range(0, len(many), at_once):
        batch = many[low : low + at_once]
        if any(each.calendar is not None for each in batch):
            ends[low : low + at_once] = [run(program, each).end[:tasks] for each in batch]
        else:
            in_quanta = [quantized(program, each) for each in batch]
            swept = sweep_together(program, in_quanta).T
            ends[low : low + at_once] = swept[:, :tasks]
            for row, each in enumerate(batch):
                if not are_exact(in_quanta[row], swept[row]):
                    ends[low + row] = run(program, each).end[:tasks]
    return ends


def reopen(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote: return the run behind it where its request, run again, gives the same columns.

    Files do not say which task waits for which; a run does. Edited or measured columns are returned without a run.
    """
    loaded = load(directory)
    try:
        again = simulate(Request.from_builtins(loaded.request))
    except (ValueError, TypeError, KeyError, AttributeError):  # the file is unchecked: its request may be anything
        return loaded
    return again if all(getattr(loaded, table) == getattr(again, table) for table in TABLES) else loaded


def refuse_overflow(run: Run) -> None:
    """Refuse a run whose devices need more memory than they have: say how much more, where and from when on."""
    program, limit = run.held, run.device_memory
    if np.isinf(limit).all() or (run.peaks[:, -1] <= limit).all():
        return
    where, when, held = memory.held_for_no_time(program, run.start, run.end)
    curves = memory.device_memory(program, run.start, run.end), (where, when, held.sum(axis=1))
    device, time, size = (np.concatenate(columns) for columns in zip(*curves, strict=True))
    over = np.flatnonzero(size > limit[device])
    first = over[np.argmin(time[over])]
    raise RequestError(
        "memory",
        f"device {device[first]} has {limit[device[first]]:,.0f} bytes, needs more from {time[first]:g} s on and "
        f"{run.peaks[device[first], -1]:,} at its peak; take larger devices or smaller stages, or ignore the limit "
        "(--ignore-memory)",
    )
