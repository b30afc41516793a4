"""Runs of programs under costs: one, many that are swept together, and the same with another number of steps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.notes import detail, ticker
from cdpsim.numeric.columns import Times
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.request.options import EngineName
from cdpsim.runs import Run
from cdpsim.runs.assembling import assemble_one, assemble_replicas, price_resolved, request_of, with_counts
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import (
    ENGINES,
    are_exact,
    find_engine,
    in_quanta,
    play_exactly,
    refuse_stalled,
    sweep_together,
)

NODES_AT_ONCE = 2**20  # of all runs that are swept together


def run_request(request: Request) -> Run:
    """Return the run of a request that has its counts, without limits of memory."""
    done = ticker(3, "simulate")
    program = assemble_one(request)
    done(1)
    costs = price_resolved(program, request_of(program))
    done(1)
    completed = run(program, costs, request.engine)
    done(0)
    return completed


def run(program: Program, costs: Costs, engine: EngineName = "auto") -> Run:
    """Return the run of a program: each task and message starts when all that it waits for has ended."""
    refuse_other_costs(program, costs)
    request = request_of(program if costs.request is None else costs)
    play, begun = find_engine(engine, request.contention), perf_counter()
    quantum = costs.quantum
    costs, start, end = play_exactly(play, program, costs) if _adds_up(request) else (costs, *play(program, costs))
    size = f"{len(program.tasks):,} tasks and {len(program.messages):,} messages on {program.devices:,} devices"
    by = "fast" if play is ENGINES["fast"] else "SimPy"
    detail(f"ran {request.schedule.name}: {size}, by the {by} engine, in {perf_counter() - begun:.3f} s")
    return _run_with_times(program, costs, start, end, quantum, engine)


def _adds_up(request: Request) -> bool:
    """Return whether all times of a request's run are sums of costs: no chance and no rounds decide them."""
    return not request.disorder.is_random and not request.schedule.order.rounds


def quantized(program: Program, costs: Costs) -> Costs:
    """Return the costs by which `run` runs a program."""
    request = request_of(program if costs.request is None else costs)
    return in_quanta(program, costs) if _adds_up(request) else costs


def _run_with_times(
    program: Program, costs: Costs, start: Times, end: Times, quantum: float = 0.0, engine: EngineName = "auto"
) -> Run:
    """Return the run of a program with these times of its nodes, made in given quanta; refuse one that does not end."""
    request = request_of(program if costs.request is None else costs)
    refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
    # Counts are for the given steps.
    rerun = None if request.counts else partial(_run_of_steps, program, request, quantum)
    lengthen = partial(_of_steps, program) if rerun else None
    if request.schedule.order.rounds:
        rerun = partial(_run_of_rounds, request, folded=program.fold > 1)
    unfold = partial(_run_of_all, request, quantum, engine) if program.fold > 1 else None
    return Run(request, program, costs, start, end, rerun, lengthen, unfold)


def _run_of_all(request: Request, quantum: float, engine: EngineName) -> Run:
    program = assemble_replicas(request)
    return run(program, replace(price_resolved(program, request_of(program)), quantum=quantum), engine)


def run_all(program: Program, costs: Sequence[Costs]) -> Iterator[Run]:
    """Yield the runs of a program under many costs, as `run` would make each, but swept together.

    Costs of shared links, and of devices that stop, are run one by one.
    """
    if len(costs) < 2 or any(each.wires is not None or each.calendar is not None for each in costs):
        yield from (run(program, each) for each in costs)
        return
    for each in costs:
        refuse_other_costs(program, each)
    before, after = program.waits()
    at_once = max(1, NODES_AT_ONCE // max(program.nodes, 1))
    for low in range(0, len(costs), at_once):
        batch = [quantized(program, each) for each in costs[low : low + at_once]]
        for given, each, end in zip(costs[low:], batch, sweep_together(program, batch).T, strict=False):
            if not are_exact(each, end):
                yield run(program, given)
                continue
            start = np.zeros_like(end)
            start[[task for task, _ in program.releases]] = each.release
            np.maximum.at(start, after, end[before])
            yield _run_with_times(program, each, start, np.ascontiguousarray(end), given.quantum)


def _run_of_steps(program: Program, request: Request, quantum: float, steps: int) -> Run:
    """Return the run of a request with another number of steps, by the faster engine; its program serves all costs."""
    longer = _of_steps(program, steps)
    return run(longer, replace(price_resolved(longer, _longer(request, steps)), quantum=quantum))


def _of_steps(program: Program, steps: int) -> Program:
    if steps not in program.lengthened:
        request = _longer(request_of(program), steps)
        program.lengthened[steps] = assemble_replicas(request, folded=program.fold > 1)
    return program.lengthened[steps]


def _longer(request: Request, steps: int, **changed: Any) -> Request:
    """Return a request of another number of steps, by the engine that needs the least memory."""
    return request.with_steps(steps, ignore_memory=True, engine="auto", **changed)


def _run_of_rounds(request: Request, steps: int, *, folded: bool) -> Run:
    """Return the run of a request with another number of updates, whose rounds are counted anew."""
    request = with_counts(_longer(request, steps, counts=None))
    program = assemble_replicas(request, folded=folded)
    return run(program, price_resolved(program, request))


def refuse_other_costs(program: Program, costs: Costs) -> None:
    """Refuse costs of another program."""
    if len(costs.duration) != program.nodes:
        problem = f"are of {len(costs.duration):,} nodes, and the program has {program.nodes:,}; price that program"
        raise RequestError("costs", problem)
