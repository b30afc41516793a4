"""Bounds of what a simulation will show: the least time of a training step, and the least peak of the fullest device.

Both come from probes: programs of the same request with few micro-batches, and their own costs. A probe of few ranks
has no data ranks and serves all candidates that differ in these alone: of it counts what they do not change. A probe of
a candidate's own ranks has all that these exchange, and is made for candidates that the first bound does not rule out.

A schedule whose devices have lists begins and ends these alike for all numbers of micro-batches. So a step of any of
them has the longest paths of a probe through such beginnings and ends, and what a device does between them is its own
work, which the lists count. Of other schedules it is the work of devices alone.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.limits import UNLIMITED
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.program import Category, Op, Stream
from cdpsim.request import Request
from cdpsim.schedules.state import ZERO, Placed
from cdpsim.studies.plan.list_ends import ListEnds, device_of_tasks, list_ends, tasks_amid
from cdpsim.studies.plan.probe_paths import paths_of_ends
from cdpsim.studies.plan.probes import Probe, few_micro_batches, list_shape, places, probe_of
from cdpsim.studies.plan.space import Candidate

ROUNDING = 1 - 1e-9  # of seconds, which sums in another order may miss by less
_ALL_HELD = (1,) * len(Category) + (0,)  # the weights of columns: categories, and the stashes that are a part of them


class Bound:
    """The bound of a candidate by one probe: the least time of a step, and the least peak of memory.

    Both are worked out when they are first asked for: memory may rule a candidate out whose step takes longer to bound.
    """

    def __init__(self, probe: Probe, m: int, *, own: bool, weights: tuple[int, ...] = _ALL_HELD) -> None:
        self._probe, self._m, self._own, self._weights = probe, m, own, np.array(weights)

    @cached_property
    def _ends(self) -> ListEnds:
        request = self._probe.request
        shapes = (list_shape(each.shape) for each in (request, request.with_micro_batches(self._m)))
        return list_ends(request.schedule, *shapes)

    @cached_property
    def memory(self) -> int:
        """The least peak of the fullest device, in stage-activations or bytes."""
        held = self._probe.held
        if self._probe.listing is None:
            return int((held.columns @ self._weights).max())
        return _least_of_lists(self._probe, self._ends, self._weights)

    @cached_property
    def step(self) -> float:
        """The least time of a step, in slots or seconds."""
        probe, m = self._probe, self._m
        on_host = any(stage.updated_on_host for stage in probe.request.timed_model.stages)  # in an order of their own
        duration = probe.duration if self._own and not on_host else probe.duration_of_passes
        step = _time_of_streams(probe, m) if self._own else 0.0
        if probe.listing is None:
            step = max(step, m * _work_of_pass(probe, m))
        else:
            ends = self._ends
            work, between = ((counts * probe.task_times).sum(axis=1) for counts in (ends.counts, ends.between))
            device, paths = paths_of_ends(probe, ends, duration)
            step = max(step, float(work.max()), float((paths + between[device]).max(initial=0)))
        return float(np.ceil(step - 1e-6)) if probe.request.in_slots else step * ROUNDING


class Bounds:
    """Bounds of candidates, whose requests without data ranks are known; probes are made when they are first needed."""

    def __init__(self, cases: Sequence[Request]) -> None:
        self._cases = cases
        self._probes: dict[tuple[int, int], Probe] = {}
        self._known: dict[object, Bound] = {}

    def of_few_ranks(self, candidate: Candidate) -> Bound:
        """Return the bound by a probe without data ranks: of what these share or split nothing counts."""
        case = self._cases[candidate.case]
        m, zero = candidate.options.get("m") or case.shape.m, candidate.options.get("zero", 0)
        ranks = candidate.options.get("replicas", 1) * candidate.options.get("shard", 1)
        alone = ranks == 1 and not case.zero and not case.expands
        key = candidate.case, m, alone, zero
        if key not in self._known:
            weights = _ALL_HELD if alone else _kept_whole(zero)
            self._known[key] = Bound(self._probe_of_case(candidate.case, m), m, own=alone, weights=weights)
        return self._known[key]

    def _probe_of_case(self, number: int, m: int) -> Probe:
        case = self._cases[number]
        request = case.with_micro_batches(m).with_own_sharing()
        key = number, few_micro_batches(request, case.shape.m)
        if key not in self._probes:
            self._probes[key] = probe_of(request, case.shape.m)
        return self._probes[key]

    def of_own_ranks(self, candidate: Candidate) -> Bound | None:
        """Return the bound by a probe with a candidate's own data ranks; None where it would show nothing more."""
        case = self._cases[candidate.case]
        if case.expands or candidate.options.keys().isdisjoint({"replicas", "shard", "zero"}):
            return None
        try:
            request = Request(**{**candidate.options, "ignore_memory": True, "max_memory": UNLIMITED})
            return Bound(probe_of(request, case.shape.m), request.shape.m, own=True)
        except RequestError:  # which its simulation shows
            return None


def _kept_whole(zero: int) -> tuple[int, ...]:
    """Return the weights of what a rank keeps as if it were alone, at a stage of ZeRO.

    Gradients go when they are summed, and split parameters come layer by layer: of these, only what forwards keep is
    the same.
    """
    parameters, _, optimizer = ZERO[zero]
    if parameters is not Placed.COPIED:
        return (0,) * len(Category) + (1,)
    kept = {Category.ACTIVATIONS, Category.PARAMETERS} | ({Category.OPTIMIZER} if optimizer is Placed.COPIED else set())
    return *(int(category in kept) for category in Category), 0


def _least_of_lists(probe: Probe, ends: ListEnds, weights: Ints) -> int:
    """Return what devices hold in tasks that all lists with such ends have, or where they keep most for backwards.

    A task of those lists holds beside stashes no less than some task of the probe does that is of the same phase and
    device, and comes likewise between first and last uses of the device's stages.
    """
    listing, held = probe.listing, probe.held
    assert listing is not None
    device = device_of_tasks(listing)
    index = np.arange(len(device)) - np.repeat(listing.first[:-1], listing.counts)
    row = np.empty(probe.program.nodes, dtype=np.int64)
    row[held.task] = np.arange(len(held.task))
    row = row[probe.node]
    settled = np.minimum(ends.last, ends.settled)
    common = (index < ends.first[device]) | (index >= (listing.counts - settled)[device])
    total = (held.columns @ weights)[row]
    least = np.full(4 * listing.devices * listing.phases, np.iinfo(np.int64).max)
    np.minimum.at(
        least, _class_of(listing.phases, device, listing.phase, *tasks_amid(listing)), total - held.columns[row, -1]
    )
    beside = least[_class_of(listing.phases, ends.device, ends.phase, ends.amid, ends.summing)]
    known = beside < np.iinfo(np.int64).max
    grown = beside[known] + (ends.most @ held.of_stage)[known]
    return int(max(total[common].max(initial=0), grown.max(initial=0)))


def _class_of(phases: int, device: Ints, phase: Ints, amid: Flags, summing: Flags) -> Ints:
    found: Ints = ((device * phases + phase) * 2 + amid) * 2 + summing
    return found


def _time_of_streams(probe: Probe, m: int) -> float:
    """Return the least time that the busiest queue of messages needs for a step.

    Those of no micro-batch come in each step; of each micro-batch come at least those of the one that has least.
    """
    program, messages, step = probe.program, probe.program.messages, min(1, probe.program.steps - 1)
    rows = np.flatnonzero((messages.op != Op.P2P) & (messages.stream >= 0) & (messages.step == step))
    if not len(rows):
        return 0.0
    members = [program.groups[group] for group in messages.dst[rows].tolist()]
    rows, device = np.repeat(rows, [*map(len, members)]), np.concatenate(members)
    queue = 2 * device + (messages.stream[rows] == Stream.ACROSS)
    times, i = probe.duration[len(program.tasks) + rows], messages.micro_batch[rows]
    once = np.bincount(queue[i < 0], times[i < 0], 2 * program.devices)
    many = int(program.counts[step])
    each = np.bincount((queue * many + i)[i >= 0], times[i >= 0], 2 * program.devices * many).reshape(-1, many)
    return float((once + m * each.min(axis=1)).max())


def _work_of_pass(probe: Probe, m: int) -> float:
    """Return the least time that the busiest device needs for each micro-batch of an update.

    Devices that share stages, also by others, share their work, of which one has the mean at least.
    """
    program, request = probe.program, probe.request
    tasks, order = program.tasks, request.schedule.order
    times = probe.duration[: program.compute].reshape(-1, program.phases).min(axis=0)
    of_stage = np.bincount(tasks.stage[: program.phases], times, program.n)
    device, stage = np.nonzero(places(program))
    group = _groups(device, stage, program.devices, program.n)
    work = np.bincount(group[program.devices :], of_stage, minlength=len(group))
    lane_device = tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    lanes = np.bincount(group[lane_device], minlength=len(group))
    placement = request.schedule.placement
    grows = (placement.replicas or placement.lanes) and not order.accumulates  # more micro-batches, more devices
    many = m / request.shape.side_by_side if grows else 1.0
    return float((work[lanes > 0] / (lanes[lanes > 0] * many)).max())


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
