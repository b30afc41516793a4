"""Strategies of hypothesis: requests for runs, from the slot model to uneven stages on uneven devices and links."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stage, Tie, assemble, rounds, simulate
from cdpsim.cluster import Devices, Link, PairLink
from cdpsim.cluster.topology import OVERLAPS
from cdpsim.files.units import Work
from cdpsim.program.assembly import check_causal
from cdpsim.program.collectives import ALL_REDUCE, COLLECTIVES
from cdpsim.request.options import RENDEZVOUS
from cdpsim.request.sharing import accepts, taken_options
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import CYCLIC
from cdpsim.schedules.placement import BY_MICRO_BATCH, SINGLE, Shape, pyramid_widths
from cdpsim.schedules.rule import CDP_V1, CDP_V2, Rule, matrix_rule
from cdpsim.schedules.state import When

KEPT = 10**6  # the most: every stage's activation and boundary have room for it
MOST_IN_ROUNDS = 1000  # micro-batches

seconds = st.floats(1e-6, 1e3) | st.integers(1, 9).map(float)
sizes = st.integers(0, 10**9)
# Strategies are made once, here: making them at every draw costs more than drawing.
works = seconds.map(Work)
kept_outputs = st.just(0) | st.integers(1, KEPT)
transients = st.just(0) | sizes
gradients = st.none() | sizes
updates = {True: st.none() | works, False: st.none() | seconds}


shares = st.sampled_from([0.25, 0.5, 0.7])
rates = st.sampled_from(
    [None, None, "bf16", "int8", "int8:3", "int4:64", "topk:0.01", "topk:0.3", "powersgd:1", "powersgd:7"]
)


Need = Callable[[Schedule, Shape], bool]


def anything(schedule: Schedule, shape: Shape) -> bool:
    """Need no schedule in particular."""
    return True


def listed(schedule: Schedule, shape: Shape) -> bool:
    """Need a schedule that lists what each device does."""
    return schedule.order.lists is not None


def without_rounds(schedule: Schedule, shape: Shape) -> bool:
    """Need workers that make a number of micro-batches which does not depend on times."""
    return not schedule.order.rounds


def meeting(schedule: Schedule, shape: Shape) -> bool:
    """Need messages of which both ends can wait for each other."""
    return sending(schedule, shape) and without_rounds(schedule, shape)


def passing(schedule: Schedule, shape: Shape) -> bool:
    """Need stages on several devices, which pass activations on."""
    whole = schedule.order.one_place or schedule.placement in (SINGLE, BY_MICRO_BATCH)
    return not whole and shape.n > shape.chunks


def prefetching(schedule: Schedule, shape: Shape) -> bool:
    """Need devices that fetch parameters from others."""
    return schedule.fetches and shape.n > 1


def sending(schedule: Schedule, shape: Shape) -> bool:
    """Need several devices, which send messages."""
    placed = replace(shape, widths=pyramid_widths(shape.side_by_side, [Fraction(1)] * shape.n))
    devices = 1 if schedule.order.one_place else schedule.placement.devices(placed)
    return devices * shape.replicas > 1


@cache
def shapes(schedule: Schedule, most: int) -> tuple[Shape, ...]:
    """Return all small shapes that a schedule allows, of one replica or two."""
    chunks = range(1, 4) if accepts(schedule, "chunks") else [schedule.order.chunks]
    ms = range(1, most + 3) if accepts(schedule, "m") else [None]
    found = []
    ranks = (1, 2) if accepts(schedule, "replicas") else (1,)
    for n, m, chunk, replicas in product(range(1, most + 1), ms, chunks, ranks):
        m = schedule.micro_batches(n) if m is None else m
        with suppress(RequestError):
            shape = Shape(n, m, chunk, replicas, workers=schedule.workers(n, m))
            if schedule.order.lists:
                schedule.actions(shape)
            check_causal(schedule, schedule.rule, shape)
            found.append(shape)
    return tuple(found)


@cache
def shapes_where(need: Need, most: int) -> dict[str, tuple[Shape, ...]]:
    """Return the schedules that are needed, each with its shapes that are."""
    found = {
        name: tuple(shape for shape in shapes(schedule, most) if need(schedule, shape))
        for name, schedule in sorted(SCHEDULES.items())
    }
    return {name: needed for name, needed in found.items() if needed}


def in_seconds(n: int) -> Model:
    """Return the unit model in seconds and bytes; half of a backward is for the weights."""
    return Model(stages=Model.unit(n, split=True).stages)


def shape_of(asked: dict[str, Any]) -> Shape:
    """Return the shape of a request."""
    schedule, n = SCHEDULES.get(asked["schedule"], asked["schedule"]), asked["n"]
    m, chunks = asked.get("m", schedule.micro_batches(n)), asked.get("chunks", schedule.order.chunks)
    return Shape(n, m, chunks, asked.get("replicas", 1), workers=schedule.workers(n, m))


def taken(asked: dict[str, Any]) -> dict[str, Any]:
    """Leave out the options that the schedule of a request does not take."""
    schedule = SCHEDULES.get(asked["schedule"], asked["schedule"])
    return taken_options(schedule, asked, needed=("m", "chunks", "replicas"))


def fitting(name: str, n: int) -> dict[str, Any]:
    """Return keywords for `simulate` with n stages, or the next number that a schedule allows, and enough to do."""
    schedule = SCHEDULES[name]
    if not schedule.order.lists:
        return {"schedule": name, "n": n}
    chunks = 2 if accepts(schedule, "chunks") else schedule.order.chunks
    n += n % 2
    more = {"local_steps": 2} if schedule.order.local else {}
    more |= {"chunks": chunks} if accepts(schedule, "chunks") else {}
    return {"schedule": name, "n": n, "m": 2 * n} | more


@st.composite
def stages(draw: st.DrawFn, work: bool, updated: str = "at once") -> Stage:
    """One stage, its tasks as times or as work; updated at once, by its device or by the host."""
    cost = works if work else seconds
    kept, backward = draw(kept_outputs), draw(cost)
    activation, boundary = draw(sizes) + KEPT, kept if draw(st.booleans()) else draw(sizes) + KEPT
    transient = draw(transients)
    where: dict[str, Any] = {"optimizer": draw(sizes)}
    if updated == "by its device":
        where |= {"update": draw(updates[work])}
    elif updated == "by the host":
        where = {"host_optimizer": draw(sizes) + 1, "host_update": draw(seconds)}
        where |= {"offloaded": draw(sizes), "transfer": draw(seconds)}
    weights = type(backward)(backward * draw(shares))
    if weights < backward and draw(st.booleans()):
        given, above = draw(kept_outputs), min(draw(kept_outputs), boundary)
        left = min(given + above + draw(sizes), activation + boundary + transient)
        where |= {"weight_activation": left, "weight_input": given, "weight_output": above}
    return Stage(
        forward=draw(cost),
        backward=backward,
        weight_backward=weights,
        activation=activation,
        kept_output=kept,
        forward_transient=draw(transients),
        backward_transient=transient,
        boundary=boundary,
        parameters=draw(sizes),
        gradients=draw(gradients),
        **where,
    )


@st.composite
def models(draw: st.DrawFn, n: int) -> Model:
    """Draw a model of n uneven stages, some of which may share a tensor."""
    work, updated = draw(st.booleans()), draw(st.sampled_from(["at once", "by its device", "by the host"]))
    drawn = [draw(stages(work, updated)) for _ in range(n)]
    later = (_with_input_of(stage, before) for before, stage in pairwise(drawn))
    made = (drawn[0], *later)
    tied = draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True).map(sorted))
    return Model(stages=made, tied=(_tie(made, tuple(tied)),) if len(tied) > 1 else ())


def _with_input_of(stage: Stage, before: Stage) -> Stage:
    """Return a stage that leaves at most the input that it gets."""
    return msgspec.structs.replace(stage, weight_input=min(stage.weight_input, before.boundary))


def _tie(made: tuple[Stage, ...], tied: tuple[int, ...]) -> Tie:
    """Return the largest tensor that these stages can share."""
    sharing = [made[j] for j in tied]
    sizes = {name: min(getattr(stage, name) for stage in sharing) for name in ("parameters", "optimizer")}
    return Tie(stages=tied, gradients=min(stage.gradient_bytes for stage in sharing), **sizes)


latencies = st.just(0.0) | seconds
bandwidths = st.just(float("inf")) | st.floats(1e3, 1e12)


@st.composite
def links(draw: st.DrawFn) -> Link:
    """Draw a link with or without latency, with or without a limit to its bandwidth."""
    return Link(latency=draw(latencies), bandwidth=draw(bandwidths))


lanes = st.integers(1, 3)
several_groups = {
    own: st.lists(
        st.builds(Devices, count=st.integers(1, 40), speed=st.floats(0.1, 10.0), lanes=lanes if own else st.just(1)),
        min_size=1,
        max_size=3,
    )
    for own in (True, False)
}
several_pairs = st.sets(st.sampled_from([(a, b) for a in range(4) for b in range(a)]), max_size=3)
a_link = links()
perhaps_a_link = st.none() | a_link


@st.composite
def clusters(draw: st.DrawFn, *, several_lanes: bool = True) -> Cluster:
    """Draw devices of several speeds, and pairs of them with links of their own."""
    several = (*draw(several_groups[several_lanes]), Devices(count=1000, speed=1.0))
    own = tuple(PairLink(between=pair, latency=draw(seconds)) for pair in sorted(draw(several_pairs)))
    return Cluster(devices=several, link=draw(a_link), links=own, host=draw(perhaps_a_link))


a_cluster = clusters()
a_one_lane_cluster = clusters(several_lanes=False)


@st.composite
def causal_rules(draw: st.DrawFn, n: int, m: int) -> Rule:
    """Draw any rule that reads fresh parameters only where CDP-v2 does; or v1, with its barrier."""
    i, j = np.indices((m, n))
    fresh = np.array(draw(st.lists(st.booleans(), min_size=m * n, max_size=m * n))).reshape(m, n)
    return draw(st.sampled_from([CDP_V1, CDP_V2, matrix_rule(fresh & (i % n + j >= n - 1))]))


@st.composite
def schedules(draw: st.DrawFn, most: int, where: Need = anything) -> dict[str, Any]:
    """Draw keywords for `simulate`: any schedule in a shape that it allows, with any of its options."""
    needed = shapes_where(where, most)
    schedule = SCHEDULES[draw(st.sampled_from(list(needed)))]
    shape = draw(st.sampled_from(needed[schedule.name]))
    asked: dict[str, Any] = {"schedule": schedule, "n": shape.n, "m": shape.m, "steps": draw(st.integers(1, 4))}
    asked |= {"chunks": shape.chunks, "replicas": shape.replicas}
    if accepts(schedule, "stage_replicas") and shape.m > 1 and draw(st.booleans()):
        widths = draw(st.lists(st.integers(1, min(shape.m, 3)), min_size=shape.n, max_size=shape.n))
        asked |= {"stage_replicas": widths} if set(widths) != {1} else {}
    if accepts(schedule, "reduce"):
        asked["reduce"] = draw(st.sampled_from([None, "end", "last"]))
    if schedule.takes_vertical_sync:
        asked["rule"] = draw(st.sampled_from([None, "vertical-sync"]))
    if accepts(schedule, "prefetch"):
        asked["prefetch"] = draw(st.integers(0, 3))
    if accepts(schedule, "slot_order"):
        asked["slot_order"] = draw(st.sampled_from(["forward-first", "backward-first"]))
    return asked


def _accepts(asked: dict[str, Any], options: dict[str, Any]) -> bool:
    """Return whether a schedule takes these options of the data axis with its model."""
    cluster = Cluster(devices=(Devices(speed=1e12),), link=Link(latency=1.0))
    shape = {name: asked[name] for name in ("schedule", "n", "m", "chunks", "replicas", "model")}
    try:
        simulate(**shape, cluster=cluster, steps=2, **options)
    except RequestError:
        return False
    return True


@st.composite
def sharing(draw: st.DrawFn, asked: dict[str, Any]) -> dict[str, Any]:
    """Draw what data ranks share, and how they exchange it, if a schedule takes that; else return the same request."""
    zero = draw(st.integers(0, 3))
    options: dict[str, Any] = {"zero": zero, "shard": draw(st.integers(1, 3)) if zero else None}
    options["reduce"] = draw(st.sampled_from([None, "end", "last", "each"]))
    if zero == 3:
        options["reshard"] = draw(st.sampled_from([None, "yes", "no", "root", "step"]))
    else:
        options["buckets"] = draw(st.sampled_from([None, "1 B", "300 MB", "1 B,1 GB"]))
    if zero in (1, 2):
        options["gather"] = draw(st.sampled_from([None, "step", "early"]))
    if not _accepts(asked, options):
        return asked
    return asked | options


def with_shapes(model: Model) -> Model:
    """Return a model whose stages have a matrix each, and a vector of the numbers that are left; a tie is a vector."""
    tied, stages = [0] * model.n, []
    ties = [msgspec.structs.replace(tie, gradients=None) for tie in model.tied]
    for tie in ties:
        for j in tie.stages:
            tied[j] = tie.parameters
    for stage, shared in zip(model.stages, tied, strict=True):
        columns, left = divmod(stage.parameters - shared, 32)
        shapes = [(32, columns)] * (columns > 0) + [(left,)] * (left > 0) + [(shared,)] * (shared > 0)
        stages.append(msgspec.structs.replace(stage, gradients=None, tensors=tuple(shapes)))
    return msgspec.structs.replace(model, stages=tuple(stages), tied=tuple(ties))


@st.composite
def compressing(draw: st.DrawFn, asked: dict[str, Any]) -> dict[str, Any]:
    """Draw what gradients are compressed to, if anything; return the same request where that is impossible."""
    options = asked | {"compress": draw(rates)}
    if str(options["compress"]).startswith("powersgd"):
        options["model"] = with_shapes(options["model"])
    try:
        request = Request(**options)
        if request.state.reduce is When.EACH:  # of matrices there are more sums, whose order has to be found
            assemble(request)
    except RequestError:
        return asked
    return options


@st.composite
def requests(draw: st.DrawFn, most: int = 5, where: Need = anything, timed: bool = False) -> dict[str, Any]:
    """Draw keywords for `simulate`: any schedule, rule and option on the slot model or on uneven costs.

    Where there are bytes, data ranks may have shares of states, buckets and streams. A law that needs some schedules
    or shapes says `where`; one that needs times instead of slots, `timed`.
    """
    request = draw(schedules(most, where))
    n = request["n"]
    request["collective"] = draw(st.sampled_from(sorted(ALL_REDUCE)))
    if request["schedule"].order is CYCLIC:
        request["rule"] = draw(causal_rules(n, request["m"]))
    several = request["schedule"].placement.lanes
    if draw(st.booleans()):
        request["model"], request["cluster"] = draw(models(n)), draw(a_cluster if several else a_one_lane_cluster)
    elif timed or draw(st.booleans()):
        own_lanes = draw(lanes) if several else 1
        request["model"] = in_seconds(n)
        request["cluster"] = Cluster(devices=(Devices(lanes=own_lanes),), link=draw(a_link))
    elif draw(st.booleans()):
        request["cluster"] = Cluster(devices=(Devices(lanes=draw(lanes) if several else 1),))
    request = taken(request)
    if "model" in request and accepts(request["schedule"], "shard") and "stage_replicas" not in request:
        request = draw(sharing(request))
    if "model" in request and accepts(request["schedule"], "compress"):
        request = draw(compressing(request))
    assume(_is_short(request))
    return request


def _is_short(request: dict[str, Any]) -> bool:
    """Whether workers that go on compute few micro-batches; on slow links they would compute millions."""
    if not request["schedule"].order.rounds:
        return True
    try:
        return int(rounds(**request).micro_batches.sum()) <= MOST_IN_ROUNDS
    except RequestError:
        return False


@st.composite
def streamed_requests(draw: st.DrawFn, most: int = 4, where: Need = anything, timed: bool = False) -> dict[str, Any]:
    """Draw keywords for `simulate` whose devices overlap computing and communicating each in its own way."""
    request = draw(requests(most, where, timed))
    cluster = request.get("cluster", Cluster.unit())
    overlaps = draw(st.lists(st.sampled_from(OVERLAPS), min_size=4, max_size=4))
    groups = [
        msgspec.structs.replace(group, overlap=word) for group, word in zip(cluster.devices, overlaps, strict=False)
    ]
    request["cluster"] = msgspec.structs.replace(cluster, devices=tuple(groups))
    request["rendezvous"] = draw(st.sampled_from([None, *RENDEZVOUS]))
    return taken(request)


JITTERS = "uniform:0.5", "exponential:1", "lognormal:0.3"
jitters, perhaps_jitter = st.sampled_from(JITTERS), st.sampled_from([None, *JITTERS])


@st.composite
def disorders(draw: st.DrawFn, *, slots: bool) -> dict[str, Any]:
    """Draw disturbances of a run, as keywords of `simulate`: slow devices, stops and jitter, each of them perhaps."""
    found: dict[str, Any] = {}
    factors = st.integers(1, 4) if slots else st.sampled_from([0.5, 1.0, 1.7, 4.0])
    if draw(st.booleans()):
        found["slow"] = [f"0:{draw(factors)}"]
    unit, most = ("", 30) if slots else ("s", 1000)
    pairs = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, most // 2)), max_size=3))
    if pairs:
        found["stop"] = [f"0:{at}{unit}:{length}{unit}" for at, length in pairs]
    if not slots:
        for name in ("jitter", "link_jitter"):
            kind = draw(perhaps_jitter)
            found |= {} if kind is None else {name: kind}
    return found


DIVISIBLE = 720720 * 16  # bytes that every number of parts up to sixteen cuts evenly, and two trees' 2 * 2 to 2 * 16
REPLICAS = {name: 2 if accepts(SCHEDULES[name], "replicas") else 1 for name in SCHEDULES}  # which reduce together


def evenly(n: int, times: list[float]) -> Model:
    """Return a model of uneven stages whose payloads divide without a remainder."""
    stages = (
        Stage(
            forward=f,
            backward=2 * f,
            weight_backward=f,
            activation=10,
            boundary=7,
            parameters=DIVISIBLE * (j + 1),
            gradients=DIVISIBLE * 8,
        )
        for j, f in enumerate(times[:n])
    )
    return Model(stages=tuple(stages))


@cache
def fitting_where(need: Need) -> dict[str, list[dict[str, Any]]]:
    """Return the schedules that are needed, each with what fits it and is needed, for up to 7 stages."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, n in product(sorted(SCHEDULES), range(1, 8)):
        for replicas in range(1, REPLICAS[name] + 1):
            asked = fitting(name, n) | {"replicas": replicas}
            if need(SCHEDULES[name], shape_of(asked)):
                found.setdefault(name, []).append(asked)
    return found


@st.composite
def alike(draw: st.DrawFn, where: Need = anything) -> dict[str, Any]:
    """Draw keywords for `simulate`: any schedule, n and collective on devices and links that are all alike."""
    needed = fitting_where(where)
    name = draw(st.sampled_from(list(needed)))
    wanted = dict(draw(st.sampled_from(needed[name])))
    n = wanted["n"]
    link = Link(latency=draw(st.just(0.0) | st.floats(1e-6, 10.0)), bandwidth=draw(st.floats(1e6, 1e12)))
    wanted["steps"] = draw(st.integers(1, 3))
    wanted["model"] = evenly(n, draw(st.lists(seconds, min_size=n, max_size=n)))
    wanted["cluster"] = Cluster(
        devices=(Devices(lanes=draw(lanes) if SCHEDULES[name].placement.lanes else 1),), link=link
    )
    wanted["collective"] = draw(st.sampled_from(COLLECTIVES))
    if accepts(SCHEDULES[name], "prefetch"):
        wanted["prefetch"] = draw(st.integers(0, 2))
    return taken(wanted)
