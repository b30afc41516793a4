"""Costs of a case, with any number of micro-batches: a schedule of a model, trained in some way, on a cluster."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.schedules.state import ZERO
from cdpsim.studies.plan.base import Base, base_of, has_measured, list_shape, takes
from cdpsim.studies.plan.exchange_times import ExchangeTimes, exchange_times
from cdpsim.studies.plan.list_ends import ListEnds, list_ends, tasks_amid

DATA_AXES = 3  # without data ranks, with such that have copies, and with such that have shares
_FEW_PASSES = 1024  # through stages: a run of so many takes no longer than the rest
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
    bases: dict[int, Base] = field(default_factory=dict)
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
    def base(self) -> Base:
        """The run of few micro-batches from which figures come."""
        return base_of(self.request, lists=self.lists)

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
        """Whether split parameters that a stage has gathered stay up to its last use in the step, unless asked for."""
        return self.lists and not self.request.schedule.order.one_place

    def base_for(self, m: int) -> Base:
        """Return the run from which the figures of m micro-batches come: of as many where these are few.

        Of a cyclic schedule, it is one whose workers have several micro-batches where they have so with m.
        """
        shape, few = self.request.shape, m * self.request.shape.n <= _FEW_PASSES
        if self.lists:
            few = m < self.base.shape.m
        elif not few and self.request.schedule.order.accumulates:
            m, few = min(m, 2 * shape.n), True
        if m == self.base.shape.m or not few or not takes(self.request, m):
            return self.base
        if m not in self.bases:
            self.bases[m] = base_of(self.request, lists=self.lists, shape=replace(shape, m=m))
        return self.bases[m]

    def times_of(self, m: int) -> StepTimes:
        """Return the least time of a step of m micro-batches."""
        if m not in self.times:
            base = self.base_for(m)
            times = _times_of_lists(base, m) if self.lists else _times_of_devices(base, m)
            if has_measured(base, m):
                times.step[0] = max(times.step[0], float(base.run.steady_state.period))
            self.times[m] = times
        return self.times[m]

    def held_of(self, m: int) -> HeldBytes:
        """Return what devices hold at least with m micro-batches."""
        if m not in self.held:
            base = self.base_for(m)
            moments = _moments_of_lists(base, _ends_of(base, m)) if self.lists else base.held.moments
            peak = int(base.run.steady_state.run.peaks[:, -1].max()) if has_measured(base, m) else 0
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


def load_case(request: Request) -> Loads:
    """Return what a case costs."""
    loads = Loads(request)
    _ = loads.base
    return loads


def _ends_of(base: Base, m: int) -> ListEnds:
    """Return what lists of m micro-batches have in common with those of a base."""
    return list_ends(base.request.schedule, list_shape(base.shape), list_shape(replace(base.shape, m=m)))


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
