"""Costs of a case, with any number of micro-batches: a schedule of a model, trained in some way, on a cluster."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.front import assemble_one, price_request, run, simulate
from cdpsim.model.recomputation import BY_LAYER
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.program import Content, Kind, Op, Program, Stream
from cdpsim.request import Request
from cdpsim.request.options import InapplicableOption
from cdpsim.request.reading import find_model, read_recipe
from cdpsim.runs import Run
from cdpsim.schedules.order import Listing
from cdpsim.schedules.shape import Shape
from cdpsim.schedules.state import ZERO
from cdpsim.studies.partial_requests import PartialRequests
from cdpsim.studies.plan.base_memory import Held, held_in_tasks
from cdpsim.studies.plan.base_paths import BasePaths, Paths
from cdpsim.studies.plan.exchange_times import DeviceSizes, ExchangeTimes, exchange_times, sizes_of_devices
from cdpsim.studies.plan.list_ends import ListEnds, list_ends, listing_of, tasks_amid
from cdpsim.timing.costs import Costs

DATA_AXES = 3  # without data ranks, with such that have copies, and with such that have shares
_STEPS_OF_BASE = 3  # of a base: the first one fills devices, and the last one has what the second waits for
_LEAST_OF_BASE = 4  # micro-batches
_FEW_PASSES = 1024  # through stages: a run of so many takes no longer than the rest
_ALL_LOOKED_AT = 8  # devices: of more, paths through some of them are followed
# Moments that decide: those with most by some of `Held.moments`, of which shares leave less or nothing.
_WEIGHTS = np.array(
    [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
)


class StepTimes(NamedTuple):
    """The least time of a step of a case with some number of micro-batches."""

    step: Floats  # by axis
    after_end: Floats  # beside what a device exchanges behind its last task: by axis and device
    after_sums: Floats  # and beside what it exchanges from the first complete gradients on


class HeldBytes(NamedTuple):
    """Bytes that the devices of a case hold with some number of micro-batches."""

    peak: int  # the least one without data ranks, beside `moments`
    moments: Ints  # bytes at some moments, by the columns of `Held.moments`; the last is of whole gradients


@dataclass(frozen=True, eq=False)
class Loads:
    """Costs of one case, each worked out when it is first needed, and kept."""

    request: Request
    times: dict[int, StepTimes] = field(default_factory=dict)
    held: dict[int, HeldBytes] = field(default_factory=dict)
    bases: dict[int, "Base"] = field(default_factory=dict)
    exchanged: dict[tuple[int, int, int], ExchangeTimes] = field(default_factory=dict)

    @property
    def in_slots(self) -> bool:
        """Whether times are slots."""
        return self.request.in_slots

    @property
    def lists(self) -> bool:
        """Whether devices have lists for a step, which ends for all of them."""
        order, shape = self.request.schedule.order, self.request.shape
        return order.lists is not None and order.together and not shape.layers

    @cached_property
    def base(self) -> "Base":
        """The run of few micro-batches from which figures come."""
        return _base_of(self.request, lists=self.lists)

    @property
    def own_zero(self) -> int:
        """The stage of ZeRO of a schedule that has one of its own; else 0."""
        schedule = self.request.schedule
        return 0 if schedule.order.waits or self.in_slots else ZERO.index(schedule.state.homes)

    @property
    def sums_once(self) -> bool:
        """Whether devices add up whole gradients, and sum them when those of a step are complete."""
        return self.lists and not self.request.schedule.order.one_place and self.request.given["reduce"] != "each"

    @property
    def gathers_for_step(self) -> bool:
        """Whether split parameters that a stage has gathered stay up to its last use in the step."""
        return (
            self.lists and not self.request.schedule.order.one_place and self.request.given["reshard"] in (None, "step")
        )

    def base_for(self, m: int) -> "Base":
        """Return the run from which the figures of m micro-batches come: of as many where these are few.

        Of a cyclic schedule, it is one whose workers have several micro-batches where they have so with m.
        """
        shape, few = self.request.shape, m * self.request.shape.n <= _FEW_PASSES
        if self.lists:
            few = m < self.base.shape.m
        elif not few and self.request.schedule.order.accumulates:
            m, few = min(m, 2 * shape.n), True
        if m == self.base.shape.m or not few or not _takes(self.request, m):
            return self.base
        if m not in self.bases:
            self.bases[m] = _base_of(self.request, lists=self.lists, shape=replace(shape, m=m))
        return self.bases[m]

    def times_of(self, m: int) -> StepTimes:
        """Return the least time of a step of m micro-batches."""
        if m not in self.times:
            base = self.base_for(m)
            times = _times_of_lists(base, m) if self.lists else _times_of_devices(base, m)
            if _has_measured(base, m):
                times.step[0] = max(times.step[0], float(base.run.steady_state.period))
            self.times[m] = times
        return self.times[m]

    def held_of(self, m: int) -> HeldBytes:
        """Return what devices hold at least with m micro-batches."""
        if m not in self.held:
            base = self.base_for(m)
            moments = _moments_of_lists(base, _ends_of(base, m)) if self.lists else base.held.moments
            peak = int(base.run.peaks[:, -1].max()) if _has_measured(base, m) else 0
            self.held[m] = HeldBytes(peak, _deciding(moments))
        return self.held[m]

    def exchanges(self, replicas: int, shard: int, zero: int) -> ExchangeTimes:
        """Return what it exchanges at least on these data ranks."""
        ranks = replicas, shard, zero
        if ranks not in self.exchanged:
            base, places = self.base, self.base.program.devices
            copies = range(places) if self.request.schedule.has_copies(replace(base.shape, replicas=1)) else ()
            if not self.lists:
                copies = range(places)
            self.exchanged[ranks] = exchange_times(self.request, base.sizes, places, copies, ranks)
        return self.exchanged[ranks]


@dataclass(frozen=True, eq=False)
class Base:
    """A program of few micro-batches, three steps long, alone on its links; its run where that is known or needed."""

    request: Request
    program: Program
    costs: Costs
    listing: Listing | None
    known: Run | None = None

    @cached_property
    def run(self) -> Run:
        """Its run."""
        return self.known or run(self.program, self.costs, self.request.engine)

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.request.shape

    @cached_property
    def duration(self) -> Floats:
        """The time of each node."""
        return self.costs.duration.astype(np.float64)

    @cached_property
    def paths(self) -> BasePaths:
        """Its paths by axis: as it is, without sums of gradients, and without all that shares make shorter."""
        assert self.listing is not None
        program, messages = self.program, self.program.messages
        copies = self.duration.copy()
        sums = len(program.tasks) + np.flatnonzero((messages.op != Op.P2P) | (messages.content == Content.GRADIENT))
        copies[sums] = 0
        shares = copies.copy()
        shares[: len(program.tasks)][program.tasks.kind == Kind.U] = 0
        if any(stage.updated_on_host for stage in self.request.timed_model.stages):
            shares[len(program.tasks) + np.flatnonzero(messages.stream >= Stream.HOST)] = 0
        for times in (copies, shares):
            times[program.message_nodes.stop :] = program.parts.times(times[program.message_nodes])
        return BasePaths(program, self.listing, np.column_stack([self.duration, copies, shares]))

    @cached_property
    def chosen(self) -> Ints:
        """The devices whose paths are followed: all, or those with most to do, the first and the last."""
        assert self.listing is not None
        devices = self.listing.devices
        if devices <= _ALL_LOOKED_AT:
            return np.arange(devices)
        work = np.bincount(np.repeat(np.arange(devices), self.listing.counts), self.duration[self.paths.node], devices)
        most = np.argsort(-work, kind="stable")[: _ALL_LOOKED_AT - 2]
        return np.unique(np.concatenate([[0, devices - 1], most]))

    @cached_property
    def sizes(self) -> DeviceSizes:
        """The bytes that the followed devices exchange."""
        devices = self.chosen if self.listing is not None else np.arange(1)
        return sizes_of_devices(self.request, self.program, self.duration, devices)

    @cached_property
    def task_times(self) -> Floats:
        """The time of a task of each phase on each device."""
        assert self.listing is not None
        node, listing = self.paths.node, self.listing
        times = np.zeros((listing.devices, listing.phases))
        times[np.repeat(np.arange(listing.devices), listing.counts), listing.phase] = self.duration[node]
        return times

    @cached_property
    def held(self) -> Held:
        """The bytes that devices hold in their tasks."""
        parameters = np.array([stage.parameters for stage in self.request.timed_model.stages], dtype=np.int64)
        return held_in_tasks(self.program, parameters, flushes=self.listing is not None)

    @cached_property
    def run_as_layers(self) -> Flags:
        """Whether each task of its lists holds at its highest what the layers of its stage do, one after another.

        A whole backward of two tasks does not: each of its layers goes back as a whole.
        """
        request, listing = self.request, self.listing
        assert listing is not None
        recipe = read_recipe(find_model(request.given["model"], request.shape.n), request.given)
        if recipe.recompute not in BY_LAYER or recipe.offload in ("activations", "all"):
            return np.zeros(len(listing.phase), dtype=np.bool_)
        n, phase = listing.shape.n, listing.phase
        whole: Flags = listing.undivided[listing.micro_batch, n - 1 - phase % n]
        return ~whole | (phase < n)

    @cached_property
    def of_ends(self) -> dict[bytes, list[Paths]]:
        """The paths for the ends of lists that were asked for, by axis."""
        return {}


def load_case(request: Request) -> Loads:
    """Return what a case costs."""
    loads = Loads(request)
    _ = loads.base
    return loads


def _base_of(request: Request, *, lists: bool, shape: Shape | None = None) -> Base:
    """Return a run of three steps, whose lists have beginnings and ends that many micro-batches have, or of a shape."""
    request = request.alone().without_chance()
    if not lists:
        return _priced(request if shape is None else _of_micro_batches(request, shape.m), None)
    shape = shape or replace(request.shape, m=_micro_batches_of_base(request))
    listing = listing_of(request.schedule, _plain(shape))
    return _priced(request.with_steps(_STEPS_OF_BASE, shape=shape), listing)


def _of_micro_batches(request: Request, m: int) -> Request:
    """Return the same request of m micro-batches."""
    options = {**request, "schedule": request.schedule, "m": m, "ignore_memory": True}
    if request.rule == request.schedule.rule_of(request.shape):  # by default; with others it may be another one
        del options["rule"]
    return Request(**options)


def _takes(request: Request, m: int) -> bool:
    """Return whether a schedule can have m micro-batches."""
    try:
        if request.schedule.order.lists is None:
            return bool(_of_micro_batches(request, m))
        return bool(len(request.schedule.actions(replace(_plain(request.shape), m=m))))
    except RequestError:
        return False


def _priced(request: Request, listing: Listing | None) -> Base:
    """Return the base of a request, without those options that change nothing where there are no data ranks."""
    try:
        return _base_from(request, listing)
    except InapplicableOption:
        options = {**request, "schedule": request.schedule, "ignore_memory": True}
        return PartialRequests().serve(options, lambda fewer: _base_from(fewer, listing))


def _base_from(request: Request, listing: Listing | None) -> Base:
    """Return the base of a request: with its run, or of lists, whose paths are enough, mostly without."""
    if listing is None:
        known = simulate(request)
        return Base(known.request, known.program, known.costs, None, known)
    program = assemble_one(request)
    return Base(request, program, price_request(program, request), listing)


def _plain(shape: Shape) -> Shape:
    return Shape(shape.n, shape.m, shape.chunks, widths=shape.widths)


def _micro_batches_of_base(request: Request) -> int:
    """Return the least number of micro-batches that is enough for all devices, twice, and that the schedule takes."""
    schedule, shape = request.schedule, request.shape
    if "m" not in schedule.options:
        return shape.m
    enough = max(shape.m, 2 * (shape.n // shape.chunks), _LEAST_OF_BASE)
    return next((m for m in range(enough, 2 * enough + 1) if _takes(request, m)), shape.m)


def _has_measured(base: Base, m: int) -> bool:
    """Return whether a base has so many micro-batches itself, and shows how its steps go on."""
    return m == base.shape.m and base.run.steady_state.certified


def _ends_of(base: Base, m: int) -> ListEnds:
    """Return what lists of m micro-batches have in common with those of a base."""
    return list_ends(base.request.schedule, _plain(base.shape), _plain(replace(base.shape, m=m)))


def _times_of_lists(base: Base, m: int) -> StepTimes:
    """Return the least time of m micro-batches of a schedule whose devices have lists."""
    ends = _ends_of(base, m)
    if ends.key not in base.of_ends:
        base.of_ends[ends.key] = base.paths.paths(ends, base.chosen)
    work = (ends.between * base.task_times).sum(axis=1)
    total = ((ends.between + _counts_of_ends(base, ends)) * base.task_times).sum(axis=1)
    step, after_end, after_sums = np.full(DATA_AXES, total.max()), *np.full((2, DATA_AXES, len(base.chosen)), -np.inf)
    for axis, paths in enumerate(base.of_ends[ends.key]):
        if not len(paths.device):
            continue
        mine = work[paths.device]
        step[axis] = max(step[axis], (paths.whole + mine).max())
        column = np.searchsorted(base.chosen, paths.device)
        after_end[axis, column] = (paths.step_ends + paths.begins + mine[:, None]).max(axis=0)
        after_sums[axis, column] = (paths.sums_begin + paths.begins + mine[:, None]).max(axis=0)
    return StepTimes(step, after_end, after_sums)


def _counts_of_ends(base: Base, ends: ListEnds) -> Ints:
    """Return how many tasks of each phase the ends of a device's list have."""
    listing = base.listing
    assert listing is not None
    device = np.repeat(np.arange(listing.devices), listing.counts)
    index = np.arange(len(device)) - np.repeat(listing.first[:-1], listing.counts)
    first = index < ends.until[device]
    last = index >= (listing.counts - ends.since)[device]
    key = device * listing.phases + listing.phase
    counts = sum(np.bincount(key[rows], minlength=listing.devices * listing.phases) for rows in (first, last))
    return np.asarray(counts).reshape(listing.devices, -1)


def _moments_of_lists(base: Base, ends: ListEnds) -> Ints:
    """Return what devices hold at moments that all lists with such ends have, and in which they hold most."""
    listing, held = base.listing, base.held
    assert listing is not None
    device = np.repeat(np.arange(listing.devices), listing.counts)
    index = np.arange(len(device)) - np.repeat(listing.first[:-1], listing.counts)
    row = np.empty(base.program.nodes, dtype=np.int64)
    row[held.task] = np.arange(len(held.task))
    row = row[base.paths.node]
    settled = np.minimum(ends.last, ends.settled)
    common = (index < ends.first[device]) | (index >= (listing.counts - settled)[device])
    moments = held.moments[row]
    stages = _parameters_of_devices(base)
    amid, summing = tasks_amid(listing)
    moments[:, 5] = np.where(amid, stages[device], moments[:, 5])
    moments[:, 6] = np.where(summing, moments[:, 2], 0)
    moments[:, 4] = np.where(base.run_as_layers, moments[:, 0], moments[:, 4])
    beside = moments.copy()
    beside[:, [0, 4]] -= held.stash[row][:, None]
    least = np.full((listing.devices * listing.phases, beside.shape[1]), np.iinfo(np.int64).max)
    np.minimum.at(least, device * listing.phases + listing.phase, beside)
    grown = least[ends.device * listing.phases + ends.phase]
    known = grown[:, 0] < np.iinfo(np.int64).max
    grown[:, [0, 4]] += np.where(known, ends.most @ held.of_stage, 0)[:, None]
    grown[:, 5] = np.where(ends.amid, stages[ends.device], grown[:, 5])
    grown[:, 6] = np.where(ends.summing, grown[:, 2], 0)
    return np.concatenate([moments[common], grown[known]])


def _parameters_of_devices(base: Base) -> Ints:
    """Return the bytes of the parameters of all stages of each device."""
    program, parameters = base.program, [stage.parameters for stage in base.request.timed_model.stages]
    found: Ints = np.where(_places(program), parameters, 0).sum(axis=1)
    return found


def _places(program: Program) -> Flags:
    """Return which stages (columns) each device (rows) has."""
    places: Flags = np.zeros((program.devices, program.n), dtype=np.bool_)
    places[program.tasks.device[: program.compute], program.tasks.stage[: program.compute]] = True
    return places


def _deciding(moments: Ints) -> Ints:
    """Return those moments that may have the peak, whatever is split."""
    chosen: Ints = moments[np.unique([(moments @ weights).argmax() for weights in _WEIGHTS])]
    return chosen


def _times_of_devices(base: Base, m: int) -> StepTimes:
    """Return the least time of m micro-batches of any schedule: the work of devices alone."""
    none = np.full((DATA_AXES, 1), -np.inf)
    return StepTimes(np.full(DATA_AXES, m * _work_of_pass(base, m)), none, none)


def _work_of_pass(base: Base, m: int) -> float:
    """Return the least time that the busiest device needs for each micro-batch of an update.

    Devices that share stages, also by others, share their work, of which one has the mean at least.
    """
    program, request = base.program, base.request
    tasks, order = program.tasks, request.schedule.order
    times = base.duration[: program.compute].reshape(-1, program.phases).min(axis=0)
    of_stage = np.bincount(tasks.stage[: program.phases], times, program.n)
    device, stage = np.nonzero(_places(program))
    group = _groups(device, stage, program.devices, program.n)
    work = np.bincount(group[program.devices :], of_stage, minlength=len(group))
    lane_device = tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    lanes = np.bincount(group[lane_device], minlength=len(group))
    many = m / base.shape.side_by_side if _grows(request) else 1.0
    busiest = float((work[lanes > 0] / (lanes[lanes > 0] * many)).max())
    rounds = order.rounds.per_update if order.rounds else 1
    return busiest * rounds * (request.shape.local_steps if order.local else 1)


def _grows(request: Request) -> bool:
    """Return whether more micro-batches have more devices or lanes."""
    placement, order = request.schedule.placement, request.schedule.order
    return (placement.replicas or placement.lanes) and not order.accumulates


def _groups(device: Ints, stage: Ints, devices: int, stages: int) -> Ints:
    """Return a number for each device and each stage: equal where devices have stages, also by others, in common."""
    group = np.arange(devices + stages)
    while True:
        least = np.minimum(group[device], group[devices + stage])
        before = group.copy()
        np.minimum.at(group, device, least)
        np.minimum.at(group, devices + stage, least)
        if (group == before).all():
            return group
