"""Programs of requests: resolved, checked, expanded, with their streams; and the facts on which they depend.

Replicas that are all alike are folded: the program of one stands for all of them. A program is assembled once for all
requests that have the same one, and priced by any of these. Of workers that do not wait, the times of a request give
the counts of rounds: the micro-batches that they compute in each.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import DISORDER_OPTIONS, Disorder
from cdpsim.errors import RequestError
from cdpsim.limits import refuse_large_expansion
from cdpsim.model import Model
from cdpsim.numeric.columns import Ints, Kept
from cdpsim.numeric.paths import find_cycle
from cdpsim.program import Op, Program, once_a_program
from cdpsim.program.assembly import derive
from cdpsim.program.check import check_columns
from cdpsim.program.collectives import DEFAULT
from cdpsim.program.streams import defer_receives, meet_in_turns, occupy_streams, posting_turns, queue_in_streams
from cdpsim.request import Request
from cdpsim.request.options import MEGATRON, OPTIONS, TRAINING, CountRows
from cdpsim.schedules.state import When
from cdpsim.timing.collective_times import are_alike
from cdpsim.timing.costs import Costs, Loads, Machine, disturbed_costs, node_costs, seen_by_ranks, slowed_times
from cdpsim.timing.engine import find_engine, refuse_stalled
from cdpsim.timing.expand import expand, is_unrolled, unchanged_origins, with_piece_times
from cdpsim.timing.round_times import RoundTimes, counts_by_times, play_program, play_rounds


@once_a_program
def are_replicas_alike(program: Program, cluster: Cluster, machine: Machine | None) -> bool:
    """Return whether all replicas are alike on a cluster: their devices, and the links that their messages take."""
    cluster = cluster.sized(program.all_devices)
    if not cluster.has_alike_devices(program.all_devices):
        return False
    if not (cluster.is_joined or cluster.links):
        return True
    if program.copies:
        return _have_alike_ways(program, cluster, machine)
    return _are_laid_out_alike(program, cluster.laid_out) or _have_alike_ways(program, cluster, None)


@once_a_program
def _are_laid_out_alike(program: Program, cluster: Cluster) -> bool:
    """Return whether replicas have alike ways in a layout, so that costs do not tell them apart."""
    return _have_alike_ways(program, cluster, None)


def _have_alike_ways(program: Program, cluster: Cluster, machine: Machine | None) -> bool:
    """Return whether the messages of all replicas take alike links."""
    first = program.devices * np.arange(program.fold)[:, None]
    links = cluster.link_costs(*(ends + first for ends in program.messages.ways[:2]))
    same = all((cost == cost[0]).all() for cost in links)
    seen = [seen_by_ranks(program, cluster, machine, program.copies_of(group)) for group in range(len(program.groups))]
    return same and all(are_alike(each, program.alike_groups(group)) for group, each in enumerate(seen))


def assemble_one(request: Request) -> Program:
    """Return the program of a request with its counts, of one replica for all where these are alike."""
    if request.may_fold:
        program = assemble_replicas(request, folded=True)
        if are_replicas_alike(program, request.cluster, request.pricing):
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
        _refuse_ranks_of_devices(request, program)
        costs = unexpanded_costs(program, request)
        refuse_large_expansion(program, costs, request.memory_engine, request.max_memory, slots=request.in_slots)
        (program, origin), algorithms = expand(program, costs, request.cluster), algorithms_by_collective(costs)
        check_columns(program)
    overlaps = request.cluster.overlaps(program.devices)
    if request.meeting(program.devices):
        program = meet_in_turns(program, overlaps, posting_turns(whole)[origin.node])
    else:
        program = occupy_streams(program, overlaps, without_queues, *origin)
    made_for = partial(program_key, request, program.devices, algorithms)
    return replace(program, request=request, unexpanded=whole if request.expands else None, made_for=made_for)


def _refuse_ranks_of_devices(request: Request, program: Program) -> None:
    """Refuse messages of single ranks where a device is a group of ranks, several of which sum with others."""
    if program.copies:
        option, mesh = "contention" if request.contends else "expand-collectives", request.model.mesh
        problem = f"runs sums as messages between devices, and {mesh.team} ranks are one here"
        raise RequestError(option, f"{problem}, of which several take part; leave it out, or --context and --expert")


def _refuse_turns(request: Request, program: Program) -> None:
    """Refuse sums after each pass where devices that have a stage come to them in turns, and wait for each other."""
    if find_cycle(*program.waits(), program.nodes):
        problem = f"each sums after every pass, and {request.schedule.name} runs copies of a stage in turns"
        raise RequestError("reduce", f"{problem}, which would wait for each other; take last or end")


def _assemble_unexpanded(request: Request, *, folded: bool) -> Program:
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
    name = request.schedule.name
    ranks = program.all_devices * request.model.mesh.team
    request.machine.require(ranks, name)
    request.disorder_of_ranks.require(max(ranks, request.machine.count or 0), name)
    sums = bool(is_unrolled(program).any())
    return request.resolved(sends=_sends(program), sums=sums, devices=program.all_devices)


def unexpanded_costs(program: Program, request: Request) -> Costs:
    """Return the costs of a program whose collectives are in one piece."""
    collective = request.collective or DEFAULT
    return node_costs(program, request.timed_model, request.cluster, collective, machine=request.pricing)


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
        "ranks": (model.mesh.tensor, model.mesh.context, model.mesh.expert),
        "ties": (request.local_ties, model.tied),
        "runtime": request.runtime,
        "updates": (model.updates_in_lanes, model.updates_take_time, model.outer_updates_take_time),
        "widths": request.widths,
        "lanes": int(cluster.lanes(1)[0]),
        "overlaps": tuple(cluster.overlaps(devices)),
        "algorithms": algorithms,
    }


MOST_KEPT_NODES = 2**20  # of all programs together

# Options of which a request has nothing but what was given.
_ELSEWHERE = {*Request.__annotations__, *TRAINING, *DISORDER_OPTIONS}
_AS_GIVEN = tuple(n for n, row in OPTIONS.items() if row.recorded and row.record is None and n not in _ELSEWHERE)


class KnownPrograms(Kept[Program]):
    """LRU cache of programs bounded by their nodes."""

    def __init__(self, most: int = MOST_KEPT_NODES) -> None:
        super().__init__(most)

    def find(self, request: Request) -> Program:
        """Return the program of a request, of one replica for all where these are alike."""
        if request.expands or request.schedule.order.rounds:
            return assemble_one(request)
        structure = structure_of(request)
        for key in (structure, True), (structure, False):
            if key in self and (
                (program := self[key]).fold == 1 or are_replicas_alike(program, request.cluster, request.pricing)
            ):
                return program
        program = assemble_one(request)
        self.keep((structure, program.fold > 1), program, program.nodes)
        return program


class ProgramFacts:
    """The facts of a request on which its program depends, which are hashed once."""

    def __init__(self, *facts: Hashable) -> None:
        self._facts, self._hash = facts, hash(facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramFacts) and self._facts == other._facts


def structure_of(request: Request) -> ProgramFacts:
    """Return the facts of a request on which its program depends; what it costs is not among them."""
    model, cluster = request.timed_model, request.cluster
    return ProgramFacts(
        request.schedule,
        request.shape,
        request.steps,
        request.rule,
        request.prefetch,
        request.slot_order,
        request.state,
        request.counts,
        request.runtime,
        request.rendezvous,
        request.local_ties,
        model.tied,
        request.widths,
        request.may_fold,
        model.is_unit,
        _weights_of(model),
        tuple((group.count, group.overlap, group.lanes) for group in cluster.devices),
        tuple(str(request.given[name]) for name in _AS_GIVEN),
    )


@lru_cache(maxsize=64)
def _weights_of(model: Model) -> Hashable:
    """Return all sizes of a model's stages, and which of its updates take time."""
    return model.all_sizes, model.updates_in_lanes, model.updates_take_time, model.outer_updates_take_time


KNOWN_PROGRAMS = KnownPrograms()


def price_request(program: Program, request: Request) -> Costs:
    """Return the costs of a program for a request that assembles to it; refuse devices that are not there."""
    return price_resolved(program, resolve_request(request, program.unexpanded or program))


def price_resolved(program: Program, request: Request, collapsed: Costs | None = None) -> Costs:
    """Return the disturbed costs of a program; `collapsed` are those of its unexpanded one, if they are known."""
    cluster = request.cluster
    named = request.collective or DEFAULT
    costs = node_costs(program, request.timed_model, cluster, named, request.contention, request.pricing)
    costs = replace(costs, request=request)
    if program.unexpanded is not None and not request.contends:
        collapsed = collapsed or unexpanded_costs(program.unexpanded, request)
        costs = with_piece_times(program, costs, program.unexpanded, collapsed, cluster)
    if request.disorder == Disorder():
        return costs
    slow = {each.factor: request.slowed_model(each.factor) for each in request.disorder.slow}
    times = {
        factor: slowed_times(program, costs.duration, request.timed_model, model, factor)
        for factor, model in slow.items()
        if model is not None
    }
    loads = _loads_of(program, request, costs) if request.disorder.imbalance else None
    costs = replace(costs, slowed=times, loads=loads)
    return replace(disturbed_costs(program, costs, request.disorder, request.seed, request.run), undisturbed=costs)


def _loads_of(program: Program, request: Request, costs: Costs) -> Loads | None:
    """Return how long the products of experts are in tasks: what twice their load adds."""
    twice, model = request.loaded_model(2.0), request.timed_model
    if twice is None or request.model.mesh.expert == 1:
        return None
    seconds = slowed_times(program, costs.duration, model, twice, 1.0) - costs.duration[: len(program.tasks)]
    layers, places = np.array([stage.mixtures for stage in model.stages]), program.devices // request.shape.simulated
    mesh = request.model.mesh
    return Loads(seconds, layers, mesh.expert, max(1, mesh.expert // mesh.team), places)


def request_of(made: Program | Costs) -> Request:
    """Return the request of a program or of costs; refuse one without."""
    if not isinstance(made.request, Request):
        raise RequestError("program", "does not say what it was assembled for; assemble a request")
    return made.request


_MOST_TRIALS = 200  # runs until counts of rounds agree with their times


def with_counts(request: Request) -> Request:
    """Return a request with the counts that its own times give; refuse other counts if it has some.

    They come from the times of a program of one update, where these are fixed. Else runs with the counts of the run
    before are made until these are their own.
    """
    if request.schedule.order.rounds is None:
        return request
    given = request.counts
    if given is None or not request.counts_vary:
        request = _of_each_task(request.with_rounds(play_of_request(request).counts))
    if request.counts_vary:
        request = _settled(request, given)
    refuse_other_counts(given, request.counts)
    return request


def refuse_other_counts(given: CountRows | None, found: CountRows | Ints | None) -> None:
    """Refuse counts of rounds that do not agree with their times."""
    if given is None or found is None or np.array_equal(given, found):
        return
    row, device = np.argwhere(np.array(given) != np.array(found))[0].tolist()
    problem = f"say {given[row][device]} micro-batches for device {device} in round {row}, whose times ask for"
    raise RequestError("counts", f"{problem} {found[row][device]}; leave them out, and they are found")


def play_of_request(request: Request) -> RoundTimes:
    """Return the rounds of a request if everything takes its mean time."""
    shape, overlapped = request.shape, request.schedule.order.rounds
    assert overlapped is not None
    probe = request.fixed(shape.warm_up + 1)
    program = assemble_one(probe)
    costs = price_resolved(program, request_of(program))
    found = play_rounds(program, costs, shape.m, overlapped.steps(request.steps) - 1, shape.warm_up)
    each = {name: getattr(found, name) for name in ("counts", "posted", "ended")}
    return replace(found, **{name: np.broadcast_to(own, (len(own), shape.replicas)) for name, own in each.items()})


def _of_each_task(request: Request) -> Request:
    """Return a request with the counts by the recurrence if times of tasks differ from one to the next."""
    counts, complete = np.array(request.counts), not (request.disorder.is_random or request.disorder.stop)
    while not complete:
        counts[-1] += request.shape.m * len(counts)  # tasks for rounds that are longer than usual
        program = assemble_replicas(request.with_rounds(counts).alone())
        costs = price_resolved(program, request_of(program))
        counts, complete = play_program(program, costs, request.shape.m, request.shape.warm_up)
    return request.with_rounds(counts)


def _settled(request: Request, given: CountRows | None) -> Request:
    """Return a request whose counts agree with the times of its run; of given counts, after one trial."""
    shape = request.shape
    request = request if given is None else request.with_rounds(np.array(given))
    most = _MOST_TRIALS + 4 * len(request.counts or ())
    for _ in range(most):
        program = assemble_replicas(request)
        costs = price_resolved(program, request_of(program))
        start, end = find_engine(request.engine, request.contention)(program, costs)
        refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
        counts = counts_by_times(program, end, shape.m, shape.warm_up)
        if (counts == np.array(request.counts)).all():
            return request
        request = request.with_rounds(counts)
        if given is not None:
            return request
    raise RequestError("rounds", f"are not settled after {most} runs; take fewer steps")
