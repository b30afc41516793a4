"""Programs of requests: resolved, checked, expanded, with their streams; and the facts on which they depend."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np

from cdpsim.cluster.devices import NONE
from cdpsim.limits import refuse_large_expansion
from cdpsim.model.runtime import PAPER, Runtime
from cdpsim.numeric.columns import Ints
from cdpsim.numeric.paths import find_cycle
from cdpsim.program import Op, Program, once_a_program
from cdpsim.program.assembly import derive
from cdpsim.program.assembly.runtime import usual_habits
from cdpsim.program.check import check_columns
from cdpsim.program.collectives import DEFAULT, differs_from_default
from cdpsim.program.rendezvous import defer_receives, meet_in_turns, posting_turns
from cdpsim.program.streams import occupy_streams, queue_in_streams
from cdpsim.request import Request
from cdpsim.request.options import MEGATRON, InapplicableOption
from cdpsim.request.sharing import SHARING, is_given
from cdpsim.runs.replicas import are_replicas_alike
from cdpsim.schedules.state import When
from cdpsim.timing.costs import Costs, node_costs
from cdpsim.timing.expand import expand, expanded_origins, is_unrolled, unchanged_origins


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
        origin, algorithms = expanded_origins(program, costs), algorithms_by_collective(costs)
        program = expand(program, costs)
        check_columns(program)
    overlaps = request.cluster.overlaps(program.devices)
    if request.rendezvous:
        program = meet_in_turns(program, overlaps, posting_turns(whole)[origin.node])
    else:
        program = occupy_streams(program, overlaps, without_queues, *origin)
    made_for = partial(program_key, request, program.devices, algorithms)
    return replace(program, request=request, unexpanded=whole if request.expands else None, made_for=made_for)


def _refuse_turns(request: Request, program: Program) -> None:
    """Refuse sums after each pass where devices that have a stage come to them in turns, and wait for each other."""
    if find_cycle(*program.waits(), program.nodes):
        problem = f"each sums after every pass, and {request.schedule.name} runs copies of a stage in turns"
        raise InapplicableOption("reduce", f"{problem}, which would wait for each other; take last or end")


def _assemble_unexpanded(request: Request, *, folded: bool) -> Program:
    """Return the program of a request with each collective in one piece; refuse options that change nothing in it."""
    program = _derive(request, request.steps, request.runtime, folded=folded)
    for option, problem in (*_ineffective_options(request, program), *_ineffective_habits(request)):
        raise InapplicableOption(option, problem)
    if request.rendezvous == MEGATRON:
        program = defer_receives(program)
    check_columns(program)
    return program


def _derive(request: Request, steps: int, runtime: Runtime, *, folded: bool = False) -> Program:
    """Return the program of a request with a number of steps and a runtime, each collective in one piece."""
    return derive(
        replace(request.schedule, state=request.state),
        request.timed_model,
        steps,
        shape=replace(request.shape, widths=request.widths, folded=folded),
        rule=request.rule,
        prefetch=request.prefetch,
        forward_first=request.slot_order != "backward-first",
        lanes=int(request.cluster.lanes(1)[0]),
        once=request.local_ties,
        counts=_counts_of(request, steps, folded=folded),
        runtime=runtime,
    )


def _counts_of(request: Request, steps: int, *, folded: bool) -> Ints | None:
    """Return how many micro-batches each replica that is there has in each of some steps; None: the usual number."""
    if request.counts is None:
        return None
    overlapped = request.schedule.order.rounds
    counts = np.array(request.counts)[: overlapped.steps(steps) if overlapped else steps]
    return counts[:, :1] if folded else counts


def _ineffective_habits(request: Request) -> Iterator[tuple[str, str]]:
    """Yield the runtime that a request gives, or a habit, if without it the devices hold the same."""
    given, schedule, steps = request.given["runtime"], request.schedule, min(request.steps, 2)  # all buffers are in two
    if given is None:
        return
    usual = usual_habits(given.like, schedule)
    others = {habit: given.without(habit) for habit, value in given.given.items() if value != getattr(usual, habit)}
    others |= {given.like: PAPER} if given.like != PAPER.like else {}
    buffers = astuple(_derive(request, steps, given).buffers) if others else ()
    for name, other in others.items():
        if all(map(np.array_equal, buffers, astuple(_derive(request, steps, other).buffers))):
            remedy = "leave it out, or give a --model, of bytes" if request.in_slots else "leave it out"
            yield "runtime", f"{name} changes nothing of what devices hold in this run of {schedule.name}; {remedy}"


def _ineffective_options(request: Request, program: Program) -> Iterator[tuple[str, str]]:
    """Yield options of messages that change nothing in a program, each with its problem."""
    name, sends = request.schedule.name, _sends(program)
    unsaid = request.given["shard"] is None and not request.given["zero"]  # else this is one of several cases
    ops = [Op(op) for op in np.unique(program.messages.op[is_unrolled(program)]).tolist()]
    if request.overlap_all_reduce:
        if not {Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER} & set(ops):
            yield "overlap-all-reduce", "there is no all-reduce: no stage has two devices; add --replicas"
        if not _mixes_stages(program):
            problem = "each device has one stage, with whose last backward its training step ends"
            yield "overlap-all-reduce", f"{problem}; leave it out, or give devices more stages"
    if (
        unsaid
        and request.given["reduce"] == "last"
        and not _mixes_stages(program)
        and not request.schedule.order.one_place
    ):
        problem = "each device has one stage, with whose last backward its training step ends"
        yield "reduce", f"last changes nothing: {problem}; leave it out, or give devices more stages"
    collective = request.collective or DEFAULT
    if collective != DEFAULT and not any(differs_from_default(op, collective) for op in ops):
        how = "sums and broadcasts by trees" if Op.BROADCAST in ops else "scatters and gathers in ways of their own"
        problem = f"{how}, whatever all-reduces run by" if ops else "has no collective"
        yield "collective", f"{name} {problem}; leave it out"
    if unsaid and request.shape.replicas == 1 and not ops:
        for option in SHARING:
            if is_given(request.given[option]):
                problem = "is of what ranks exchange, and there is one; leave it out, or add --replicas or --shard"
                yield option.replace("_", "-"), problem
    for option, given in (("contention", request.contends), ("rendezvous", request.rendezvous)):
        if given and not sends:
            yield option, f"{name} sends no message; leave it out"
    if request.rendezvous and NONE not in request.cluster.overlaps(program.devices):
        problem = "devices that overlap messages with tasks do not wait for each other's"
        yield "rendezvous", f'{problem}; leave it out, or give a --cluster with overlap = "none"'
    if request.expand_collectives and not request.contends and not ops:
        yield "expand-collectives", f"{name} has no collective; leave it out"


@once_a_program
def _sends(program: Program) -> bool:
    """Return whether any message leaves its device."""
    return bool((program.messages.op == Op.P2P).any() or is_unrolled(program).any())


def _mixes_stages(program: Program) -> bool:
    """Return whether a device runs several stages."""
    device, stage = program.tasks.device[: program.compute], program.tasks.stage[: program.compute]
    return len(np.unique(device.astype(np.int64) * program.n + stage)) > program.devices


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
