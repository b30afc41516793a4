"""The front door: the program of a request, its costs, its run, many runs at once; and runs behind saved traces.

request = Request("multi-cdp", n=8, model="gpt2", cluster="a100-nodes")
program = assemble(request)
costs = price(program, request.model, request.cluster)
run(program, costs)                        simulate(request) is these three
sweep(program, [costs, ...])               when all tasks end, under many costs at once
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.cluster.devices import NONE
from cdpsim.cluster.disorder import Disorder
from cdpsim.errors import RequestError
from cdpsim.files.notes import detail
from cdpsim.files.progress import ticker
from cdpsim.limits import refuse_large_expansion
from cdpsim.model import Model
from cdpsim.model.runtime import PAPER, Runtime
from cdpsim.numeric.columns import Ints, Times
from cdpsim.numeric.paths import find_cycle
from cdpsim.program import Op, Program, once_a_program
from cdpsim.program.assembly import derive
from cdpsim.program.assembly.runtime import usual_habits
from cdpsim.program.check import check_columns
from cdpsim.program.collectives import DEFAULT, differs_from_default
from cdpsim.program.rendezvous import defer_receives, meet_in_turns, posting_turns
from cdpsim.program.streams import occupy_streams, queue_in_streams
from cdpsim.request import Request
from cdpsim.request.options import MEGATRON, SIGNATURE, CountRows, EngineName, InapplicableOption, Options
from cdpsim.request.sharing import SHARING, is_given
from cdpsim.runs import Run
from cdpsim.schedules import Schedule, find_schedule
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.state import When
from cdpsim.timing.collective_times import are_alike
from cdpsim.timing.costs import Costs, node_costs
from cdpsim.timing.disturbed_costs import disturbed_costs
from cdpsim.timing.engine import ENGINES, find_engine
from cdpsim.timing.expand import expand, expanded_origins, is_unrolled, piece_times, unchanged_origins
from cdpsim.timing.rounds import RoundTimes, as_rows, counts_by_times, pace_of, play_program, play_rounds
from cdpsim.timing.stalled_runs import refuse_stalled
from cdpsim.timing.ticks import are_exact, in_ticks, play_exactly
from cdpsim.trace import TABLES, Trace, load
from cdpsim.trace.metrics import memory
from cdpsim.trace.table import RoundRow, Table

NODES_AT_ONCE = 2**20  # of all runs that are swept together
_MOST_TRIALS = 200  # runs until counts of rounds are those that they ask for
_IS_CHECK: ContextVar[bool] = ContextVar("is_check", default=False)


class CheckEnded(Exception):
    """The end of a check that found nothing wrong with a request; there is no run."""


@contextmanager
def requests_only() -> Iterator[None]:
    """End each simulation inside with `CheckEnded` when its request is read."""
    token = _IS_CHECK.set(True)
    try:
        yield
    finally:
        _IS_CHECK.reset(token)


def end_check() -> None:
    """End what is done to read a request only."""
    if _IS_CHECK.get():
        raise CheckEnded


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
    request = with_counts(request)
    done = ticker(3, "simulate")
    program = assemble_one(request)
    done(1)
    costs = _price(program, _request_of(program))
    done(1)
    completed = run(program, costs, request.engine)
    if not request.ignore_memory:
        refuse_overflow(completed)
    done(0)
    return completed


def assemble_one(request: Request) -> Program:
    """Return the program of a request with its counts, of one replica for all where these are alike."""
    if request.may_fold:
        program = _assemble_replicas(request, folded=True)
        if are_replicas_alike(program, request.cluster):
            return program
    return _assemble_replicas(request)


@once_a_program
def are_replicas_alike(program: Program, cluster: Cluster) -> bool:
    """Return whether all replicas are alike on a cluster: their devices, and the links that their messages take."""
    cluster = cluster.sized(program.all_devices)
    if not cluster.has_alike_devices(program.all_devices):
        return False
    if not (cluster.is_joined or cluster.links):
        return True
    return _are_laid_out_alike(program, cluster.laid_out) or _have_alike_ways(program, cluster)


@once_a_program
def _are_laid_out_alike(program: Program, cluster: Cluster) -> bool:
    """Return whether replicas have alike ways in a layout, so that they have them whatever these cost."""
    return _have_alike_ways(program, cluster)


def _have_alike_ways(program: Program, cluster: Cluster) -> bool:
    """Return whether the messages of all replicas take alike links."""
    first = program.devices * np.arange(program.fold)[:, None]
    links = cluster.link_costs(*(ends + first for ends in program.messages.ways[:2]))
    same = all((cost == cost[0]).all() for cost in links)
    return same and all(are_alike(cluster, program.alike_groups(group)) for group in range(len(program.groups)))


simulate.__signature__ = SIGNATURE  # type: ignore[attr-defined]


def assemble(request: Request) -> Program:
    """Return the tasks, messages, dependencies and buffers of a request; these have no times.

    Of rounds, the counts are found before, if the request does not have them.
    """
    return _assemble_replicas(with_counts(request))


def with_counts(request: Request) -> Request:
    """Return a request with the counts of its rounds: those that its own times ask for; refuse others if it has some.

    They come from the times of a program of one update, where these are fixed. Else runs with the counts of the run
    before are made until these are their own.
    """
    if request.schedule.order.rounds is None:
        return request
    given = request.counts
    if given is None or not request.counts_vary:
        request = _of_each_task(request.with_rounds(_play(request).counts))
    if request.counts_vary:
        request = _settled(request, given)
    _refuse_other_counts(given, request.counts)
    return request


def _refuse_other_counts(given: CountRows | None, found: CountRows | Ints | None) -> None:
    """Refuse counts of rounds that are not those that their times ask for."""
    if given is None or found is None or np.array_equal(given, found):
        return
    row, device = np.argwhere(np.array(given) != np.array(found))[0].tolist()
    problem = f"say {given[row][device]} micro-batches for device {device} in round {row}, whose times ask for"
    raise RequestError("counts", f"{problem} {found[row][device]}; leave them out, and they are found")


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
    found = _play(request)
    _refuse_other_counts(request.counts, found.counts)
    return Table(RoundRow, as_rows(found))


def _play(request: Request) -> RoundTimes:
    """Return the rounds of a request if everything takes its mean time."""
    shape, overlapped = request.shape, request.schedule.order.rounds
    assert overlapped is not None
    probe = request.fixed(shape.warm_up + 1)
    program = assemble_one(probe)
    costs = _price(program, _request_of(program))
    found = play_rounds(pace_of(program, costs), shape.m, overlapped.steps(request.steps) - 1, shape.warm_up)
    each = {name: getattr(found, name) for name in ("counts", "posted", "ended")}
    return replace(found, **{name: np.broadcast_to(own, (len(own), shape.replicas)) for name, own in each.items()})


def _of_each_task(request: Request) -> Request:
    """Return a request with the counts by the recurrence if times of tasks differ from one to the next."""
    counts, complete = np.array(request.counts), not (request.disorder.is_random or request.disorder.stop)
    while not complete:
        counts[-1] += request.shape.m * len(counts)  # tasks for rounds that are longer than usual
        program = _assemble_replicas(request.with_rounds(counts).alone())
        costs = _price(program, _request_of(program))
        counts, complete = play_program(program, costs, request.shape.m, request.shape.warm_up)
    return request.with_rounds(counts)


def _settled(request: Request, given: CountRows | None) -> Request:
    """Return a request whose counts are those that the times of its run ask for; of given ones, after one trial."""
    shape = request.shape
    request = request if given is None else request.with_rounds(np.array(given))
    most = _MOST_TRIALS + 4 * len(request.counts or ())
    for _ in range(most):
        program = _assemble_replicas(request)
        costs = _price(program, _request_of(program))
        start, end = find_engine(request.engine, request.contention)(program, costs)
        refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
        counts = counts_by_times(program, start, end, shape.m, shape.warm_up)
        if (counts == np.array(request.counts)).all():
            return request
        request = request.with_rounds(counts)
        if given is not None:
            return request
    raise RequestError("rounds", f"are not settled after {most} runs; take fewer steps")


def _assemble_replicas(request: Request, *, folded: bool = False) -> Program:
    """Return the program of a request; if `folded`, of one replica for all."""
    without_queues = _assemble_unexpanded(request, folded=folded)
    request = _resolve(request, without_queues)
    program = whole = queue_in_streams(without_queues)
    if request.state.reduce is When.EACH and len(set(program.tasks.device[: program.phases])) > 1:
        _refuse_turns(request, program)
    origin = unchanged_origins(program)
    algorithms: tuple[Any, ...] = ()
    if request.expands:
        costs = _unexpanded_costs(program, request)
        refuse_large_expansion(program, costs, request.memory_engine, request.max_memory, slots=request.in_slots)
        origin, algorithms = expanded_origins(program, costs), _algorithms_by_collective(costs)
        program = expand(program, costs)
        check_columns(program)
    overlaps = request.cluster.overlaps(program.devices)
    if request.rendezvous:
        program = meet_in_turns(program, overlaps, posting_turns(whole)[origin.node])
    else:
        program = occupy_streams(program, overlaps, without_queues, *origin)
    made_for = partial(_program_key, request, program.devices, algorithms)
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


def _resolve(request: Request, program: Program) -> Request:
    """Return a request with its collective chosen for an unexpanded program; refuse devices that are not there."""
    cluster, name = request.cluster, request.schedule.name
    cluster.require(program.all_devices, name)
    request.disorder.require(max(program.all_devices, cluster.count or 0), name)
    sums = bool(is_unrolled(program).any())
    return request.resolved(sends=_sends(program), sums=sums, devices=program.all_devices)


def price(program: Program, model: str | Path | Model, cluster: str | Path | Cluster) -> Costs:
    """Return the costs of a program's tasks and messages by a model on a cluster, disturbed as its request says.

    A model or a cluster for which another program would be assembled is refused.
    """
    request = _request_of(program)
    if model is request.model and cluster is request.cluster:
        return _price(program, request)
    request = _resolve(request.of(model, cluster), program.unexpanded or program)
    if program.fold > 1 and not are_replicas_alike(program, request.cluster):
        raise RequestError("cluster", "has replicas that are not alike, of which the program has one; assemble another")
    collapsed = None if program.unexpanded is None else _unexpanded_costs(program.unexpanded, request)
    algorithms = program.key["algorithms"] if collapsed is None else _algorithms_by_collective(collapsed)
    key = _program_key(request, program.devices, algorithms)
    for fact, (subject, difference) in _PROGRAM_FACTS.items():
        if key[fact] != program.key[fact]:
            problem = f"has {difference} than the program was assembled for; assemble one for it"
            raise RequestError(subject, problem)
    return _price(program, request, collapsed)


def price_request(program: Program, request: Request) -> Costs:
    """Return the costs of a program for a request that assembles to it; refuse devices that are not there."""
    return _price(program, _resolve(request, program.unexpanded or program))


def _price(program: Program, request: Request, collapsed: Costs | None = None) -> Costs:
    """Return the disturbed costs of a program; `collapsed` are those of its unexpanded one, if they are known."""
    cluster = request.cluster
    costs = node_costs(program, request.timed_model, cluster, request.collective or DEFAULT, request.contention)
    costs = replace(costs, request=request)
    if program.unexpanded is not None and not request.contends:
        collapsed = collapsed or _unexpanded_costs(program.unexpanded, request)
        pieces = piece_times(program.unexpanded, collapsed, cluster)
        nodes = program.message_nodes
        costs.duration[nodes.stop - len(pieces) : nodes.stop] = pieces
        costs.duration[nodes.stop :] = program.parts.times(costs.duration[nodes])
    if request.disorder == Disorder():
        return costs
    return replace(disturbed_costs(program, costs, request.disorder, request.seed, request.run), undisturbed=costs)


def _unexpanded_costs(program: Program, request: Request) -> Costs:
    return node_costs(program, request.timed_model, request.cluster, request.collective or DEFAULT)


def _algorithms_by_collective(costs: Costs) -> tuple[Any, ...]:
    """Return the algorithm of each collective, in the program's order."""
    return tuple(costs.algorithms[number] for number in costs.runs_by[costs.runs_by >= 0].tolist())


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


def _program_key(request: Request, devices: int, algorithms: tuple[Any, ...]) -> dict[str, Any]:
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


def _request_of(made: Program | Costs) -> Request:
    if not isinstance(made.request, Request):
        raise RequestError("program", "does not say what it was assembled for; assemble a request")
    return made.request


def run(program: Program, costs: Costs, engine: EngineName = "auto") -> Run:
    """Return the run of a program: each task and message starts when all that it waits for has ended."""
    _refuse_other_costs(program, costs)
    request = _request_of(program if costs.request is None else costs)
    play, begun = find_engine(engine, request.contention), perf_counter()
    tick = costs.tick
    costs, start, end = play_exactly(play, program, costs) if _adds_up(request) else (costs, *play(program, costs))
    size = f"{len(program.tasks):,} tasks and {len(program.messages):,} messages on {program.devices:,} devices"
    by = "fast" if play is ENGINES["fast"] else "SimPy"
    detail(f"ran {request.schedule.name}: {size}, by the {by} engine, in {perf_counter() - begun:.3f} s")
    return _run_with_times(program, costs, start, end, tick, engine)


def _adds_up(request: Request) -> bool:
    """Return whether all times of a request's run are sums of costs: no chance and no rounds decide them."""
    return not request.disorder.is_random and not request.schedule.order.rounds


def _ticked(program: Program, costs: Costs) -> Costs:
    """Return the costs by which `run` runs a program."""
    request = _request_of(program if costs.request is None else costs)
    return in_ticks(program, costs) if _adds_up(request) else costs


def _run_with_times(
    program: Program, costs: Costs, start: Times, end: Times, tick: float = 0.0, engine: EngineName = "auto"
) -> Run:
    """Return the run of a program with these times of its nodes, made in given ticks; refuse one that does not end."""
    request = _request_of(program if costs.request is None else costs)
    refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
    # Counts are for the given steps.
    rerun = None if request.counts else partial(_run_of_steps, program, request, tick)
    lengthen = partial(_of_steps, program) if rerun else None
    if request.schedule.order.rounds:
        rerun = partial(_run_of_rounds, request, folded=program.fold > 1)
    unfold = partial(_run_of_all, request, tick, engine) if program.fold > 1 else None
    return Run(request, program, costs, start, end, rerun, lengthen, unfold)


def _run_of_all(request: Request, tick: float, engine: EngineName) -> Run:
    """Return the run of a request with a program of all replicas."""
    program = _assemble_replicas(request)
    return run(program, replace(_price(program, _request_of(program)), tick=tick), engine)


def run_all(program: Program, costs: Sequence[Costs]) -> Iterator[Run]:
    """Yield the runs of a program under many costs, as `run` would make each, but swept together.

    Costs of shared links, and of devices that stop, are run one by one.
    """
    if len(costs) < 2 or any(each.wires is not None or each.calendar is not None for each in costs):
        yield from (run(program, each) for each in costs)
        return
    for each in costs:
        _refuse_other_costs(program, each)
    before, after = program.waits()
    at_once = max(1, NODES_AT_ONCE // max(program.nodes, 1))
    for low in range(0, len(costs), at_once):
        batch = [_ticked(program, each) for each in costs[low : low + at_once]]
        for given, each, end in zip(costs[low:], batch, _sweep_batch(program, batch).T, strict=False):
            if not are_exact(each, end):
                yield run(program, given)
                continue
            start = np.zeros_like(end)
            start[[task for task, _ in program.releases]] = each.release
            np.maximum.at(start, after, end[before])
            yield _run_with_times(program, each, start, np.ascontiguousarray(end), given.tick)


def _run_of_steps(program: Program, request: Request, tick: float, steps: int) -> Run:
    """Return the run of a request with another number of steps, by the faster engine; its program serves all costs."""
    longer = _of_steps(program, steps)
    return run(longer, replace(_price(longer, _longer(request, steps)), tick=tick))


def _of_steps(program: Program, steps: int) -> Program:
    """Return the program of another number of steps."""
    if steps not in program.lengthened:
        request = _longer(_request_of(program), steps)
        program.lengthened[steps] = _assemble_replicas(request, folded=program.fold > 1)
    return program.lengthened[steps]


def _longer(request: Request, steps: int, **changed: Any) -> Request:
    """Return a request of another number of steps, by the engine that needs the least memory, whatever was asked."""
    return request.with_steps(steps, ignore_memory=True, engine="auto", **changed)


def _run_of_rounds(request: Request, steps: int, *, folded: bool) -> Run:
    """Return the run of a request with another number of updates, whose rounds are counted anew."""
    request = with_counts(_longer(request, steps, counts=None))
    program = _assemble_replicas(request, folded=folded)
    return run(program, _price(program, request))


def _refuse_other_costs(program: Program, costs: Costs) -> None:
    if len(costs.duration) != program.nodes:
        problem = f"are of {len(costs.duration):,} nodes, and the program has {program.nodes:,}; price that program"
        raise RequestError("costs", problem)


def sweep(program: Program, costs: Iterable[Costs]) -> Times:
    """Return when all tasks end under each of many costs: a row for each of these, a column for each task.

    The times are those of `run`, to the last bit. Costs of a cluster whose messages share links are refused: runs that
    are swept together do not know which messages share a link.
    """
    many, tasks = list(costs), len(program.tasks)
    for each in many:
        _refuse_other_costs(program, each)
    if any(each.wires is not None for each in many):
        raise RequestError("contention", "many runs at once do not know who shares links with whom; run one by one")
    ends = np.empty((len(many), tasks), dtype=np.result_type(*(each.duration for each in many)) if many else np.int64)
    at_once = max(8, NODES_AT_ONCE // max(program.nodes, 1))
    for low in range(0, len(many), at_once):
        batch = many[low : low + at_once]
        if any(each.calendar is not None for each in batch):
            ends[low : low + at_once] = [run(program, each).end[:tasks] for each in batch]
        else:
            ticked = [_ticked(program, each) for each in batch]
            swept = _sweep_batch(program, ticked).T
            ends[low : low + at_once] = swept[:, :tasks]
            for row, each in enumerate(batch):
                if not are_exact(ticked[row], swept[row]):
                    ends[low + row] = run(program, each).end[:tasks]
    return ends


def _sweep_batch(program: Program, costs: Sequence[Costs]) -> Times:
    """Return the ends of all nodes, a column for each of the costs."""
    graph = program.levels
    earliest = np.zeros((program.nodes, len(costs)), dtype=costs[0].duration.dtype)
    earliest[[task for task, _ in program.releases]] = np.array([each.release for each in costs]).T
    swept = graph.sweep(np.array([each.duration for each in costs]).T[graph.order], earliest[graph.order])
    ends = np.empty_like(swept)
    ends[graph.order] = swept
    return ends


def runner_on_clusters(request: Request) -> Callable[[Cluster], Run]:
    """Return a function that runs a request on other clusters, by one program as long as that serves them."""
    program = assemble(request)

    def run_on(cluster: Cluster) -> Run:
        try:
            return run(program, price(program, request.model, cluster))
        except RequestError:
            other = assemble(request.of(request.model, cluster))
            return run(other, _price(other, _request_of(other)))

    return run_on


def step_actions(trace: Trace) -> Actions:
    """Return the actions of each device of a replica in a training step; refuse a schedule without such lists."""
    request = trace.request
    schedule = find_schedule(request["schedule"])
    if request.get("counts"):
        raise RequestError("timeline", "its steps have unlike numbers of micro-batches; a .csv is of one step alone")
    if schedule.order.lists is None or not schedule.order.together:
        problem = f"{schedule.name} has no order of a step alone; a .csv is of a pipeline that flushes"
        raise RequestError("timeline", problem)
    return schedule.actions(request.shape if isinstance(request, Request) else Request.from_builtins(request).shape)


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
    program, limit = run.program, run.device_memory
    if np.isinf(limit).all() or (run.peaks[:, -1] <= limit).all():
        return
    device, time, size = memory.device_memory(program, run.start, run.end)
    over = np.flatnonzero(size > limit[device])
    first = over[np.argmin(time[over])]
    most = int(size[device == device[first]].max())
    raise RequestError(
        "memory",
        f"device {device[first]} has {limit[device[first]]:,.0f} bytes, needs more from {time[first]:g} s on and "
        f"{most:,} at its peak; take larger devices or smaller stages, or ignore the limit (--ignore-memory)",
    )
