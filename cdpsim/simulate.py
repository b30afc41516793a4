"""The front door: names and files in, trace out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cdpsim.assemble import assemble, counted_once
from cdpsim.check import check_columns
from cdpsim.cluster import Cluster
from cdpsim.collectives import DEFAULT, is_named
from cdpsim.columns import Ints
from cdpsim.costs import Costs, Times, price, reached, with_parts
from cdpsim.devices import NONE
from cdpsim.disturb import disturbed
from cdpsim.engine import find_engine
from cdpsim.errors import RequestError
from cdpsim.expand import expand, is_unrolled, origins, piece_times, unexpanded
from cdpsim.limits import refuse_large_expansion
from cdpsim.metrics import memory
from cdpsim.metrics.steady import turns
from cdpsim.model import Model
from cdpsim.offload import timed
from cdpsim.program import Op, Program
from cdpsim.progress import ticker
from cdpsim.rendezvous import deferred, met, posted
from cdpsim.request import MEGATRON, Request, Untaken, find_schedule, read
from cdpsim.runs import Run
from cdpsim.schedules import Schedule
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape
from cdpsim.stage import Tie
from cdpsim.stalled import refuse_stalled
from cdpsim.streams import streamed
from cdpsim.trace import TABLES, Columns, Trace, load

_CHECKING: ContextVar[str | None] = ContextVar("checking", default=None)


class Checked(Exception):
    """Nothing is wrong with a request, as far as that was to be checked; there is no run."""


@contextmanager
def checking(what: str) -> Iterator[None]:
    """End each simulation inside with `Checked`, as soon as its `request` is read, or its `program` made and costed."""
    token = _CHECKING.set(what)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def _checked(what: str) -> None:
    if _CHECKING.get() == what:
        raise Checked


def simulate(
    schedule: str | Schedule,
    n: int | None = None,
    *,
    m: int | None = None,
    chunks: int | None = None,
    replicas: int = 1,
    overlap_all_reduce: bool = False,
    vertical_sync: bool = False,
    steps: int | None = None,
    rule: str | Rule | Sequence[Sequence[int]] | Mapping[str, Any] | None = None,
    engine: str = "auto",
    prefetch: int = 0,
    slot_order: str | None = None,
    model: str | Path | Model | Mapping[str, Any] = "unit",
    cluster: str | Path | Cluster | Mapping[str, Any] = "unit",
    collective: str | None = None,
    expand_collectives: bool = False,
    contention: str = "none",
    seed: int = 0,
    run: int = 0,
    slow: Sequence[str] = (),
    jitter: str | None = None,
    link_jitter: str | None = None,
    stop: Sequence[str] = (),
    ignore_memory: bool = False,
    max_memory: str | float | None = None,
    optimizer: str | None = None,
    mixed_precision: bool | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    rendezvous: str | None = None,
    defer_receives: bool = False,
) -> Trace:
    """Run one schedule and return its trace; keywords as on the command line.

    `n` may be left out where the model says how many stages there are; of a model with more, n are made. Without
    `steps`, it is two steps more than pass before all read what later steps read, and at least 3. How the model is
    trained (`optimizer`, `mixed_precision`, `recompute`, `offload`) is what its file says, where None. A model and a
    cluster may be what a file has, as a mapping; a rule may be its lags, in rows, or a table of `lags`, `backward` and
    `barrier`. Without `collective`, the best way to run each is taken where the cluster has a topology, and recursive
    doubling elsewhere. `expand_collectives` runs every collective as the messages of its algorithm, and so does
    `contention` (fair or queue), by which messages share the links of their routes. `rendezvous` (megatron or torch)
    lets both ends of a message wait for each other where nothing overlaps; `defer_receives` is the old name of
    "megatron". `max_memory` is what this machine may spend on the run, in bytes or as "8 GB"; `ignore_memory` is about
    the simulated devices. What disturbs a run (`slow`, `jitter`, `link_jitter`, `stop`: texts as on the command line)
    is what the cluster says, where not given; `seed` and the number of the `run` decide all that is random in it. A run
    that does not end raises `errors.Stalled`.

    The `request` of a trace, asked again, gives the same: `simulate(**trace.request)`.
    """
    return Trace(_run(read(locals())))


def _run(request: Request) -> Run:
    """Do what is asked."""
    _checked("request")
    done = ticker(3, "simulate")
    counted, once = counted_once(request.schedule, request.shape, request.rule, request.model)
    model = timed(counted, request.cluster.host)
    program = _assembled(request, model, once)
    sums = bool(is_unrolled(program).any())
    request = request.settled(sends=_sends(program), sums=sums, devices=program.devices)
    done(1)
    program, undisturbed = _costed(request, program, model)
    costs = disturbed(program, undisturbed, request.disorder, request.seed, request.run)
    done(1)
    _checked("program")
    start, end = find_engine(request.engine, request.contention)(program, costs)
    refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
    on_hosts = _on_hosts(program, start, end, counted)
    run = Run(
        program,
        costs,
        start,
        end,
        request.collective or DEFAULT,
        request.recorded(),
        on_hosts,
        request.cluster.memory_bytes(program.devices),
        undisturbed=undisturbed,
        settled=_settles(request, program, costs),
        listed=request.schedule.order.actions is not None,
        random=request.disorder.is_random,
        longer=partial(_with_steps, request),
    )
    if not request.ignore_memory:
        refuse_overflow(run)
    done(0)
    return run


def _with_steps(request: Request, steps: int) -> Run:
    """Do what is asked with another number of steps, by the engine that is faster."""
    engine = "auto" if request.engine == "simpy" else request.engine
    return _run(request.with_steps(steps, engine=engine, ignore_memory=True))


def _settles(request: Request, program: Program, costs: Costs) -> bool:
    """Whether a run's steps may repeat each other exactly."""
    disorder, cluster = request.disorder, request.cluster
    if disorder.is_random or disorder.stop or costs.wires is not None:
        return False
    return not turns(program) or (not disorder.slow and cluster.sized(program.devices).is_alike(program.devices))


def _assembled(request: Request, model: Model, once: tuple[Tie, ...]) -> Program:
    """The program of what is asked, for devices that are there."""
    cluster = request.cluster
    program = assemble(
        request.schedule.hurried if request.overlap_all_reduce else request.schedule,
        model,
        request.steps,
        shape=request.shape,
        rule=request.rule,
        prefetch=request.prefetch,
        forward_first=request.slot_order != "backward-first",
        lanes=int(cluster.lanes(1)[0]),
        speed=reached(cluster, 1, model)[0],
        once=once,
    )
    _refuse_idle(request, program)
    cluster.require(program.devices, request.schedule.name)
    request.disorder.require(max(program.devices, cluster.count or 0), request.schedule.name)
    if request.rendezvous == MEGATRON:
        program = deferred(program)
    check_columns(program)
    return program


def _refuse_idle(request: Request, program: Program) -> None:
    """Refuse what is asked of messages where it changes nothing."""
    ops = [Op(op) for op in np.unique(program.messages.op[is_unrolled(program)]).tolist()]
    if request.overlap_all_reduce:
        if not {Op.ALL_REDUCE, Op.REDUCE} & set(ops):
            raise Untaken("overlap-all-reduce", "there is no all-reduce: no stage has two devices; add --replicas")
        if not _mixes_stages(program):
            problem = "each device has one stage, with whose last backward its training step ends"
            raise Untaken("overlap-all-reduce", f"{problem}; leave it out, or give devices more stages")
    asked = request.collective or DEFAULT
    if asked != DEFAULT and not any(is_named(op, asked) for op in ops):
        problem = "sums and broadcasts by trees, whatever all-reduces run by" if ops else "has no collective"
        raise Untaken("collective", f"{request.schedule.name} {problem}; leave it out")
    if request.contends and not _sends(program):
        raise Untaken("contention", f"{request.schedule.name} sends no message; leave it out")
    if request.rendezvous and not _sends(program):
        raise Untaken("rendezvous", f"{request.schedule.name} sends no message; leave it out")
    if request.rendezvous and NONE not in request.cluster.overlaps(program.devices):
        problem = "devices that overlap messages with tasks do not wait for each other's"
        raise Untaken("rendezvous", f'{problem}; leave it out, or give a --cluster with overlap = "none"')
    if request.expand_collectives and not request.contends and not ops:
        raise Untaken("expand-collectives", f"{request.schedule.name} has no collective; leave it out")


def _sends(program: Program) -> bool:
    """Whether any message leaves its device."""
    return bool((program.messages.op == Op.P2P).any() or is_unrolled(program).any())


def _mixes_stages(program: Program) -> bool:
    """Whether a device runs several stages."""
    device, stage = program.tasks.device[: program.compute], program.tasks.stage[: program.compute]
    return len(np.unique(device.astype(np.int64) * program.n + stage)) > program.devices


def _costed(request: Request, program: Program, model: Model) -> tuple[Program, Costs]:
    """What that costs; with collectives as messages and devices' streams, where there are any."""
    cluster, collective = request.cluster, request.collective or DEFAULT
    costs = price(program, model, cluster, collective)
    overlaps = cluster.overlaps(program.devices)
    whole, origin = program, unexpanded(program)
    if request.expands:
        refuse_large_expansion(program, costs, request.weighed, request.max_memory, slots=request.in_slots)
        origin = origins(program, costs)
        pieces = None if request.contends else piece_times(program, costs, cluster)
        program = expand(program, costs)
        check_columns(program)
        costs = price(program, model, cluster, collective, request.contention)
        if pieces is not None:
            costs.duration[program.nodes - len(pieces) :] = pieces
    if request.rendezvous:
        program = met(program, overlaps, posted(whole)[origin.node])
    else:
        program = streamed(program, overlaps, whole, *origin)
        costs = with_parts(program, costs)
    return program, costs


def order_of(trace: Trace) -> Actions:
    """What each device of a replica does in a training step, where the schedule of a trace says that."""
    asked = trace.request
    schedule = find_schedule(asked["schedule"])
    if schedule.order.actions is None:
        raise RequestError(
            "timeline", f"{schedule.name} has no order of a step alone; a .csv is of a pipeline that flushes"
        )
    return schedule.actions(Shape(asked["n"], asked["m"], asked.get("chunks", 1)))


def reopen(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote, and the run behind it where its request, served again, gives the same columns.

    Files do not say who waits for whom; the run does. Columns that somebody changed, or measured, stand for themselves.
    """
    loaded = load(directory)
    try:
        again = simulate(**loaded.request)
    except (ValueError, TypeError, KeyError, AttributeError):  # nobody has checked this request: it may be anything
        return loaded
    same = all(_equal(getattr(loaded, table), getattr(again, table)) for table in TABLES)
    return again if same else loaded


def _equal(left: Columns, right: Columns) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


def _on_hosts(program: Program, start: Times, end: Times, model: Model) -> Ints | None:
    """What each device's host holds at most; None where nothing is offloaded."""
    sizes = [np.array([getattr(stage, name) for stage in model.stages]) for name in ("offloaded", "host_optimizer")]
    return memory.host_peaks(program, start, end, *sizes) if any(size.any() for size in sizes) else None


def refuse_overflow(run: Run) -> None:
    """Refuse a run whose devices hold more than they have, by how much, where and when."""
    program, limit = run.program, run.room
    if np.isinf(limit).all() or (run.peaks[:, -1] <= limit).all():
        return
    device, time, size = memory.totals(program, run.start, run.end)
    over = np.flatnonzero(size > limit[device])
    first = over[np.argmin(time[over])]
    most = int(size[device == device[first]].max())
    raise RequestError(
        "memory",
        f"device {device[first]} has {limit[device[first]]:,.0f} bytes, needs more from {time[first]:g} s on and "
        f"{most:,} at its peak; take larger devices or smaller stages, or ignore the limit (--ignore-memory)",
    )
