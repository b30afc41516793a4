"""Probes: the program of a request with few micro-batches and steps, and the time of each of its nodes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.program import Content, Op, Program
from cdpsim.request import Request
from cdpsim.request.sharing import accepts
from cdpsim.runs.assembling import assemble_one, price_request
from cdpsim.runs.steady_state import few_steps
from cdpsim.schedules.order import Listing
from cdpsim.schedules.placement import Shape
from cdpsim.studies.plan.certain_memory import Held, held_in_tasks
from cdpsim.studies.plan.list_ends import device_of_tasks, listing_of

LOOKED_AT = 1  # of a probe's steps: one with a step before it, and one behind
_STEPS_OF_PROBE = 3  # the first one fills devices, and the last one has what the second waits for
_LEAST_MICRO_BATCHES = 4
_FEW_PASSES = 1024  # through stages: where order is cyclic, a program of so many is one of few
_ALL_LOOKED_AT = 8  # devices: of more, paths through some of them are followed
_BETWEEN_STAGES = (Content.ACTIVATION, Content.ACTIVATION_GRADIENT)


@dataclass(frozen=True, eq=False)
class Probe:
    """A program of few micro-batches, and the time of each node by the same costs as those of a simulation."""

    request: Request
    program: Program
    listing: Listing | None  # of what devices do in a step, which ends for all of them; None: steps overlap

    @cached_property
    def duration(self) -> Floats:
        """The time of each node."""
        return price_request(self.program, self.request).duration.astype(np.float64)

    @cached_property
    def duration_of_passes(self) -> Floats:
        """The time of tasks and of what stages pass on; none for updates, or for what copies of a stage exchange."""
        program, messages = self.program, self.program.messages
        times, first = self.duration.copy(), len(program.tasks)
        times[program.compute : first] = 0
        others = (messages.op != Op.P2P) | ~np.isin(messages.content, _BETWEEN_STAGES)
        times[first + np.flatnonzero(others)] = 0
        times[program.message_nodes.stop :] = program.parts.times(times[program.message_nodes])
        return times

    @cached_property
    def node(self) -> Ints:
        """The node of each task of the lists, of the first replica, in the step that is looked at."""
        assert self.listing is not None
        found: Ints = self.listing.tasks.astype(np.int64) + self.program.first_pass[LOOKED_AT] * self.listing.phases
        return found

    @property
    def next(self) -> int:
        """The distance from a compute task to the same one of the next step."""
        return int(self.program.counts[LOOKED_AT]) * self.program.phases

    @cached_property
    def task_times(self) -> Floats:
        """The time of a task of each phase on each device."""
        assert self.listing is not None
        times = np.zeros((self.listing.devices, self.listing.phases))
        times[device_of_tasks(self.listing), self.listing.phase] = self.duration[self.node]
        return times

    @cached_property
    def chosen(self) -> Ints:
        """The devices whose paths are followed: all, or those with most to do, the first and the last."""
        assert self.listing is not None
        devices = self.listing.devices
        if devices <= _ALL_LOOKED_AT:
            return np.arange(devices)
        work = np.bincount(device_of_tasks(self.listing), self.duration[self.node], devices)
        most = np.argsort(-work, kind="stable")[: _ALL_LOOKED_AT - 2]
        return np.unique(np.concatenate([[0, devices - 1], most]))

    @cached_property
    def held(self) -> Held:
        """The bytes that devices hold in their tasks."""
        return held_in_tasks(self.program, flushes=self.listing is not None)


def probe_of(request: Request, least: int) -> Probe:
    """Return the probe of a request; of some whose steps overlap, it has the `least` micro-batches that are taken."""
    request = request.alone().without_chance()
    if not has_lists(request):
        return _assembled(request.with_micro_batches(_few_in_cycles(request, least)), None)
    request = request.with_micro_batches(_few_in_lists(request))
    return _assembled(request, listing_of(request.schedule, list_shape(request.shape)))


def has_lists(request: Request) -> bool:
    """Return whether devices have lists for a step, which ends for all of them."""
    order = request.schedule.order
    return order.lists is not None and order.together


def list_shape(shape: Shape) -> Shape:
    """Return the sizes by which a schedule writes lists for one replica."""
    return Shape(shape.n, shape.m, shape.chunks, widths=shape.widths, layers=shape.layers)


def few_micro_batches(request: Request, least: int) -> int:
    """Return the micro-batches of the probe of a request."""
    return _few_in_lists(request) if has_lists(request) else _few_in_cycles(request, least)


def _few_in_lists(request: Request) -> int:
    """Return the least number of micro-batches that fills all devices twice, and that the schedule takes."""
    schedule, shape = request.schedule, request.shape
    if not accepts(schedule, "m"):
        return shape.m
    devices = 1 if schedule.order.one_place else shape.parts // shape.chunks
    enough = max(2 * devices, _LEAST_MICRO_BATCHES)
    some = range(enough, min(2 * enough + 1, shape.m))
    return next((m for m in some if _takes(request, m)), shape.m)


def _few_in_cycles(request: Request, least: int) -> int:
    """Return few micro-batches of a schedule whose steps overlap: all, or several for each worker if all have such."""
    m, n = request.shape.m, request.shape.n
    if m * n <= _FEW_PASSES or not accepts(request.schedule, "m"):
        return m
    return min(m, 2 * n) if request.schedule.order.accumulates else least


def _takes(request: Request, m: int) -> bool:
    """Return whether the lists of a schedule can have m micro-batches."""
    try:
        return bool(len(request.schedule.actions(replace(list_shape(request.shape), m=m))))
    except RequestError:
        return False


def _assembled(request: Request, listing: Listing | None) -> Probe:
    """Return the probe of a request."""
    request = request.with_steps(_STEPS_OF_PROBE if listing else few_steps(request), ignore_memory=True)
    return Probe(request, assemble_one(request), listing)


def places(program: Program) -> Flags:
    """Return which stages (columns) each device (rows) has."""
    found: Flags = np.zeros((program.devices, program.n), dtype=np.bool_)
    found[program.tasks.device[: program.compute], program.tasks.stage[: program.compute]] = True
    return found
