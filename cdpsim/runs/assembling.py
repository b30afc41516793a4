"""Programs of requests: resolved, checked, expanded, with their streams; and the facts on which they depend."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.limits import refuse_large_expansion
from cdpsim.numeric.columns import Ints
from cdpsim.numeric.paths import find_cycle
from cdpsim.program import Op, Program, once_a_program
from cdpsim.program.assembly import derive
from cdpsim.program.check import check_columns
from cdpsim.program.collectives import DEFAULT
from cdpsim.program.streams import defer_receives, meet_in_turns, occupy_streams, posting_turns, queue_in_streams
from cdpsim.request import Request
from cdpsim.request.options import MEGATRON
from cdpsim.runs.assembling import are_replicas_alike
from cdpsim.schedules.state import When
from cdpsim.timing.costs import Costs, node_costs
from cdpsim.timing.expand import expand, is_unrolled, unchanged_origins


def assemble_one(request: Request) -> Program:
    """Return the program of a request with its counts, of one replica for all where these are alike."""
    if request.may_fold:
        program = assemble_replicas(request, folded=True)
        if are_replicas_alike(program, request.cluster):
            return program
    return assemble_replicas(request)


def assemble_replicas(request: Request, *, folded: bool = False) -> Program:
    """Return the program of a request; if `folded`, of one replica for all."""
    without_queues = _assemble_unexpanded(request, folded=folded)
    request = resolve_request(request, without_queues)
    program = whole = queue_in_streams(without_queues)
    if request.state.reduce is When.EACH and len(set(program.tasks.device[: program.phases])) > 1:
        _refuse_turns(request, program)
    origin = unchanged_origins(program)
    algorithms: tuple[Any, ...] = ()
    if request.expands:
        costs = unexpanded_costs(program, request)
        refuse_large_expansion(program, costs, request.memory_engine, request.max_memory, slots=request.in_slots)
        (program, origin), algorithms = expand(program, costs), algorithms_by_collective(costs)
        check_columns(program)
    overlaps = request.cluster.overlaps(program.devices)
    if request.meeting(program.devices):
        program = meet_in_turns(program, overlaps, posting_turns(whole)[origin.node])
    else:
        program = occupy_streams(program, overlaps, without_queues, *origin)
    made_for = partial(program_key, request, program.devices, algorithms)
    return replace(program, request=request, unexpanded=whole if request.expands else None, made_for=made_for)


def _refuse_turns(request: Request, program: Program) -> None:
    """Refuse sums after each pass where devices that have a stage come to them in turns, and wait for each other."""
    if find_cycle(*program.waits(), program.nodes):
        problem = f"each sums after every pass, and {request.schedule.name} runs copies of a stage in turns"
        raise RequestError("reduce", f"{problem}, which would wait for each other; take last or end")


def _assemble_unexpanded(request: Request, *, folded: bool) -> Program:
    """Return the program of a request with each collective in one piece."""
    program = derive(
        replace(request.schedule, state=request.state),
        request.timed_model,
        request.steps,
        shape=replace(request.shape, widths=request.widths, folded=folded),
        rule=request.rule,
        prefetch=request.prefetch,
        forward_first=request.slot_order != "backward-first",
        lanes=int(request.cluster.lanes(1)[0]),
        once=request.local_ties,
        counts=_counts_of(request, folded=folded),
        runtime=request.runtime,
    )
    if request.meeting(program.devices) == MEGATRON:
        program = defer_receives(program)
    check_columns(program)
    return program


def _counts_of(request: Request, *, folded: bool) -> Ints | None:
    """Return how many micro-batches each replica that is there has in each step; None: the usual number."""
    if request.counts is None:
        return None
    overlapped = request.schedule.order.rounds
    counts = np.array(request.counts)[: overlapped.steps(request.steps) if overlapped else request.steps]
    return counts[:, :1] if folded else counts


@once_a_program
def _sends(program: Program) -> bool:
    """Return whether any message leaves its device."""
    return bool((program.messages.op == Op.P2P).any() or is_unrolled(program).any())


def resolve_request(request: Request, program: Program) -> Request:
    """Return a request with its collective chosen for an unexpanded program; refuse devices that are not there."""
    cluster, name = request.cluster, request.schedule.name
    cluster.require(program.all_devices, name)
    request.disorder.require(max(program.all_devices, cluster.count or 0), name)
    sums = bool(is_unrolled(program).any())
    return request.resolved(sends=_sends(program), sums=sums, devices=program.all_devices)


def unexpanded_costs(program: Program, request: Request) -> Costs:
    """Return the costs of a program whose collectives are in one piece."""
    return node_costs(program, request.timed_model, request.cluster, request.collective or DEFAULT)


def algorithms_by_collective(costs: Costs) -> tuple[Any, ...]:
    """Return the algorithm of each collective, in the program's order."""
    return tuple(costs.algorithms[number] for number in costs.runs_by[costs.runs_by >= 0].tolist())


def program_key(request: Request, devices: int, algorithms: tuple[Any, ...]) -> dict[str, Any]:
    """Return all facts on which the program of a request depends."""
    model, cluster = request.timed_model, request.cluster
    return {
        "schedule": request.schedule.name,
        "shape": request.shape,
        "steps": request.steps,
        "sizes": model.all_sizes,
        "ties": (request.local_ties, model.tied),
        "runtime": request.runtime,
        "updates": (model.updates_in_lanes, model.updates_take_time, model.outer_updates_take_time),
        "widths": request.widths,
        "lanes": int(cluster.lanes(1)[0]),
        "overlaps": tuple(cluster.overlaps(devices)),
        "algorithms": algorithms,
    }
