"""The front door: a request's program, what that costs, and when all of it happens; and traces from files.

request = Request("multi-cdp", n=8, model="gpt2", cluster="a100-nodes")
program = assemble(request)
costs = price(program, request.model, request.cluster)
run(program, costs)                        simulate(request) is these three
sweep(program, [costs, ...])               when all tasks end, under many costs at once
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.cluster.devices import NONE
from cdpsim.cluster.disorder import Disorder
from cdpsim.errors import RequestError
from cdpsim.files.progress import ticker
from cdpsim.limits import refuse_large_expansion
from cdpsim.model import Model
from cdpsim.numeric.columns import Columns, Times
from cdpsim.program import Op, Program
from cdpsim.program.assembly import derive
from cdpsim.program.check import check_columns
from cdpsim.program.collectives import DEFAULT, differs_from_default
from cdpsim.program.rendezvous import defer_receives, meet_in_turns, posting_turns
from cdpsim.program.streams import occupy_streams
from cdpsim.request import Request
from cdpsim.request.options import MEGATRON, SIGNATURE, EngineName, InapplicableOption, Options
from cdpsim.runs import Run
from cdpsim.schedules import Schedule, find_schedule
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.shape import Shape
from cdpsim.timing.costs import Costs, node_costs
from cdpsim.timing.disturbed_costs import disturbed
from cdpsim.timing.engine import find_engine
from cdpsim.timing.expand import expand, expanded_origins, is_unrolled, piece_times, unchanged_origins
from cdpsim.timing.stalled_runs import refuse_stalled
from cdpsim.trace import TABLES, Trace, load
from cdpsim.trace.metrics import memory

SWEPT = 2**20  # nodes of all runs that are swept at once
_CHECKING: ContextVar[str | None] = ContextVar("checking", default=None)


class CheckEnded(Exception):
    """Nothing is wrong with a request, as far as that was to be checked; there is no run."""


@contextmanager
def check_until(what: str) -> Iterator[None]:
    """End each simulation inside with `Checked`, as soon as its `request` is read, or its `program` made and costed."""
    token = _CHECKING.set(what)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def _checked(what: str) -> None:
    if _CHECKING.get() == what:
        raise CheckEnded


def simulate(schedule: str | Schedule | Request, n: int | None = None, **words: Unpack[Options]) -> Run:
    """Run a request, or what one is made of: a schedule, its stages, and words as on the command line.

    A run that does not end raises `errors.Stalled`. The `request` of a run, asked again, gives the same.

    >>> int(simulate("multi-cdp", 4).end.max())
    30
    """
    if not isinstance(schedule, Request):
        return _simulated(Request(schedule, n, **words))
    if n is not None or words:
        raise RequestError("request", "says all of itself; leave out what is given beside it")
    return _simulated(schedule)


simulate.__signature__ = SIGNATURE  # type: ignore[attr-defined]


def assemble(request: Request) -> Program:
    """Derive the tasks, messages, dependencies and buffers of a request; it says nothing of when they happen."""
    program = _whole(request)
    settled = _settled(request, program)
    whole, origin = program, unchanged_origins(program)
    algorithms: tuple[Any, ...] = ()
    if settled.expands:
        costs = node_costs(program, settled.timed_model, settled.cluster, settled.collective or DEFAULT)
        refuse_large_expansion(program, costs, settled.memory_engine, settled.max_memory, slots=settled.in_slots)
        origin, algorithms = expanded_origins(program, costs), _run_by(costs)
        program = expand(program, costs)
        check_columns(program)
    overlaps = settled.cluster.overlaps(program.devices)
    if settled.rendezvous:
        program = meet_in_turns(program, overlaps, posting_turns(whole)[origin.node])
    else:
        program = occupy_streams(program, overlaps, whole, *origin)
    made_for = partial(_key, settled, program.devices, algorithms)
    return replace(program, request=settled, unexpanded=whole if settled.expands else None, made_for=made_for)


def price(program: Program, model: str | Path | Model, cluster: str | Path | Cluster) -> Costs:
    """Say what a program's tasks and messages take of a model on a cluster, as its request disturbs them.

    Refuses a model or a cluster of which another program would be assembled.
    """
    own = _request_of(program)
    if model is own.model and cluster is own.cluster:
        return _priced(program, own)
    request, algorithms = _settled(own.of(model, cluster), program.unexpanded or program), program.key["algorithms"]
    if program.unexpanded is not None:
        whole = node_costs(program.unexpanded, request.timed_model, request.cluster, request.collective or DEFAULT)
        algorithms = _run_by(whole)
    other = _key(request, program.devices, algorithms)
    for fact, (subject, said) in _FACTS.items():
        if other[fact] != program.key[fact]:
            problem = f"has {said} than the program was assembled for; assemble one for it"
            raise RequestError(subject, problem)
    return _priced(program, request)


def run(program: Program, costs: Costs, engine: EngineName = "auto") -> Run:
    """Run a program: start each task and message when all that it waits for has ended."""
    _refuse_other(program, costs)
    request = _request_of(program if costs.request is None else costs)
    start, end = find_engine(engine, request.contention)(program, costs)
    refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
    longer = None if request.counts else partial(_of_steps, program, request)  # whose steps are those that are given
    return Run(request, program, costs, start, end, longer)


def sweep(program: Program, costs: Iterable[Costs]) -> Times:
    """Say when all tasks end under each of many costs: a row for each of these, a column for each task.

    To the last bit what `run` gives. Costs of a cluster whose messages share links are refused, as many runs at once do
    not know who shares links with whom.
    """
    each, tasks = list(costs), len(program.tasks)
    for one in each:
        _refuse_other(program, one)
    if any(one.wires is not None for one in each):
        raise RequestError("contention", "many runs at once do not know who shares links with whom; run one by one")
    ends = np.empty((len(each), tasks), dtype=np.result_type(*(one.duration for one in each)) if each else np.int64)
    at_once = max(8, SWEPT // max(program.nodes, 1))
    for low in range(0, len(each), at_once):
        some = each[low : low + at_once]
        if any(one.calendar is not None for one in some):
            ends[low : low + at_once] = [run(program, one).end[:tasks] for one in some]
        else:
            ends[low : low + at_once] = _swept(program, some)[:tasks].T
    return ends


def _swept(program: Program, costs: Sequence[Costs]) -> Times:
    """The ends of all nodes, a column for each of some costs."""
    graph = program.levels
    earliest = np.zeros((program.nodes, len(costs)), dtype=costs[0].duration.dtype)
    earliest[[task for task, _ in program.releases]] = np.array([one.release for one in costs]).T
    ends = graph.sweep(np.array([one.duration for one in costs]).T[graph.order], earliest[graph.order])
    found = np.empty_like(ends)
    found[graph.order] = ends
    return found


def runner_on_clusters(request: Request) -> Callable[[Cluster], Run]:
    """Give what runs a request on other clusters: its program is assembled once, as long as these change nothing in it.

    Where one does, another program is assembled.
    """
    program = assemble(request)

    def on(cluster: Cluster) -> Run:
        try:
            return run(program, price(program, request.model, cluster))
        except RequestError:
            other = assemble(request.of(request.model, cluster))
            return run(other, _priced(other, _request_of(other)))

    return on


def _refuse_other(program: Program, costs: Costs) -> None:
    """Refuse the costs of another program."""
    if len(costs.duration) != program.nodes:
        problem = f"are of {len(costs.duration):,} nodes, and the program has {program.nodes:,}; price that program"
        raise RequestError("costs", problem)


def _settled(request: Request, program: Program) -> Request:
    """Settle a request by the program whose collectives are in one piece; refuse devices that are not there."""
    cluster, name = request.cluster, request.schedule.name
    cluster.require(program.devices, name)
    request.disorder.require(max(program.devices, cluster.count or 0), name)
    sums = bool(is_unrolled(program).any())
    return request.resolved(sends=_sends(program), sums=sums, devices=program.devices)


def _simulated(request: Request) -> Run:
    _checked("request")
    done = ticker(3, "simulate")
    program = assemble(request)
    done(1)
    costs = _priced(program, _request_of(program))
    done(1)
    _checked("program")
    found = run(program, costs, request.engine)
    if not request.ignore_memory:
        refuse_overflow(found)
    done(0)
    return found


def _of_steps(program: Program, request: Request, steps: int) -> Run:
    """Do what is asked with another number of steps, by the engine that is faster; its program serves all costs."""
    longer = program.lengthened.get(steps)
    if longer is None:
        longer = program.lengthened[steps] = assemble(_request_of(program).with_steps(steps, ignore_memory=True))
    return run(longer, _priced(longer, request.with_steps(steps, ignore_memory=True)))


def _request_of(made: Program | Costs) -> Request:
    if not isinstance(made.request, Request):
        raise RequestError("program", "does not say what it was assembled for; assemble a request")
    return made.request


# The facts of a model and a cluster that a program depends on, beside its schedule: whose each is, and its name.
_FACTS = {
    "sizes": ("model", "other sizes"),
    "ties": ("model", "other tied tensors on one device"),
    "updates": ("model", "updates elsewhere, or of other times,"),
    "widths": ("cluster", "devices that need another number of them for a stage"),
    "lanes": ("cluster", "another number of lanes"),
    "overlaps": ("cluster", "devices that overlap otherwise"),
    "algorithms": ("cluster", "other algorithms of collectives"),
}


def _run_by(costs: Costs) -> tuple[Any, ...]:
    """Give the algorithm of each collective, as the program has them."""
    return tuple(costs.algorithms[number].identity for number in costs.runs_by[costs.runs_by >= 0].tolist())


def _key(request: Request, devices: int, algorithms: tuple[Any, ...]) -> dict[str, Any]:
    """Say what a program is made for."""
    model, cluster = request.timed_model, request.cluster
    return {
        "schedule": request.schedule.name,
        "shape": request.shape,
        "steps": request.steps,
        "sizes": model.all_sizes,
        "ties": request.local_ties,
        "updates": (model.updates_in_lanes, model.updates_take_time),
        "widths": request.widths,
        "lanes": int(cluster.lanes(1)[0]),
        "overlaps": tuple(cluster.overlaps(devices)),
        "algorithms": algorithms,
    }


def _priced(program: Program, request: Request) -> Costs:
    """Cost a program as a request of its kind has it, and disturb it."""
    model, cluster, collective = request.timed_model, request.cluster, request.collective or DEFAULT
    costs = replace(node_costs(program, model, cluster, collective, request.contention), request=request)
    if program.unexpanded is not None and not request.contends:
        pieces = piece_times(program.unexpanded, node_costs(program.unexpanded, model, cluster, collective), cluster)
        sent = program.message_nodes
        costs.duration[sent.stop - len(pieces) : sent.stop] = pieces
        costs.duration[sent.stop :] = program.parts.times(costs.duration[sent])
    if request.disorder == Disorder():
        return costs
    return replace(disturbed(program, costs, request.disorder, request.seed, request.run), undisturbed=costs)


def _whole(request: Request) -> Program:
    """The program of what is asked, with collectives in one piece, for devices that are there."""
    cluster = request.cluster
    program = derive(
        request.schedule.with_early_sums if request.overlap_all_reduce else request.schedule,
        request.timed_model,
        request.steps,
        shape=replace(request.shape, widths=request.widths),
        rule=request.rule,
        prefetch=request.prefetch,
        forward_first=request.slot_order != "backward-first",
        lanes=int(cluster.lanes(1)[0]),
        once=request.local_ties,
        counts=None if request.counts is None else np.array(request.counts),
    )
    _refuse_idle(request, program)
    if request.rendezvous == MEGATRON:
        program = defer_receives(program)
    check_columns(program)
    return program


def _refuse_idle(request: Request, program: Program) -> None:
    """Refuse what is asked of messages where it changes nothing."""
    ops = [Op(op) for op in np.unique(program.messages.op[is_unrolled(program)]).tolist()]
    if request.overlap_all_reduce:
        if not {Op.ALL_REDUCE, Op.REDUCE} & set(ops):
            raise InapplicableOption(
                "overlap-all-reduce", "there is no all-reduce: no stage has two devices; add --replicas"
            )
        if not _mixes_stages(program):
            problem = "each device has one stage, with whose last backward its training step ends"
            raise InapplicableOption("overlap-all-reduce", f"{problem}; leave it out, or give devices more stages")
    asked = request.collective or DEFAULT
    if asked != DEFAULT and not any(differs_from_default(op, asked) for op in ops):
        problem = "sums and broadcasts by trees, whatever all-reduces run by" if ops else "has no collective"
        raise InapplicableOption("collective", f"{request.schedule.name} {problem}; leave it out")
    if request.contends and not _sends(program):
        raise InapplicableOption("contention", f"{request.schedule.name} sends no message; leave it out")
    if request.rendezvous and not _sends(program):
        raise InapplicableOption("rendezvous", f"{request.schedule.name} sends no message; leave it out")
    if request.rendezvous and NONE not in request.cluster.overlaps(program.devices):
        problem = "devices that overlap messages with tasks do not wait for each other's"
        raise InapplicableOption("rendezvous", f'{problem}; leave it out, or give a --cluster with overlap = "none"')
    if request.expand_collectives and not request.contends and not ops:
        raise InapplicableOption("expand-collectives", f"{request.schedule.name} has no collective; leave it out")


def _sends(program: Program) -> bool:
    """Whether any message leaves its device."""
    return bool((program.messages.op == Op.P2P).any() or is_unrolled(program).any())


def _mixes_stages(program: Program) -> bool:
    """Whether a device runs several stages."""
    device, stage = program.tasks.device[: program.compute], program.tasks.stage[: program.compute]
    return len(np.unique(device.astype(np.int64) * program.n + stage)) > program.devices


def step_actions(trace: Trace) -> Actions:
    """Give the actions of each device of a replica in a training step; refuse a schedule that has no such list."""
    asked = trace.request
    schedule = find_schedule(asked["schedule"])
    if asked.get("counts"):
        raise RequestError("timeline", "its steps have unlike numbers of micro-batches; a .csv is of one step alone")
    if schedule.order.lists is None or not schedule.order.together:
        raise RequestError(
            "timeline", f"{schedule.name} has no order of a step alone; a .csv is of a pipeline that flushes"
        )
    return schedule.actions(Shape(asked["n"], asked["m"], asked.get("chunks", 1)))


def reopen(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote, and the run behind it where its request, served again, gives the same columns.

    Files do not say who waits for whom; the run does. Edited or measured columns are given as they are, without a run.
    """
    loaded = load(directory)
    try:
        again = simulate(Request.from_builtins(loaded.request))
    except (ValueError, TypeError, KeyError, AttributeError):  # the file is unchecked: its request may be anything
        return loaded
    same = all(_equal(getattr(loaded, table), getattr(again, table)) for table in TABLES)
    return again if same else loaded


def _equal(left: Columns, right: Columns) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


def refuse_overflow(run: Run) -> None:
    """Refuse a run whose devices hold more than they have, by how much, where and when."""
    program, limit = run.program, run.room
    if np.isinf(limit).all() or (run.peaks[:, -1] <= limit).all():
        return
    device, time, size = memory.total_memory(program, run.start, run.end)
    over = np.flatnonzero(size > limit[device])
    first = over[np.argmin(time[over])]
    most = int(size[device == device[first]].max())
    raise RequestError(
        "memory",
        f"device {device[first]} has {limit[device[first]]:,.0f} bytes, needs more from {time[first]:g} s on and "
        f"{most:,} at its peak; take larger devices or smaller stages, or ignore the limit (--ignore-memory)",
    )
