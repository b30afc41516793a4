"""Programs of few micro-batches from which bounds of any number of them come, and their runs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cdpsim.api import run, simulate
from cdpsim.errors import RequestError
from cdpsim.model.recomputation import BY_LAYER
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.program import Content, Kind, Op, Program, Stream
from cdpsim.request import Request
from cdpsim.request.reading import given_model, read_recipe
from cdpsim.request.taken import accepts
from cdpsim.runs import Run
from cdpsim.runs.assembling import assemble_one
from cdpsim.runs.pricing import price_request
from cdpsim.runs.steady_state import few_steps
from cdpsim.schedules.order import Listing
from cdpsim.schedules.shape import Shape
from cdpsim.studies.plan.base_memory import Held, held_in_tasks
from cdpsim.studies.plan.base_paths import BasePaths, Paths
from cdpsim.studies.plan.exchange_times import DeviceSizes, sizes_of_devices
from cdpsim.studies.plan.list_ends import listing_of
from cdpsim.timing.costs import Costs

_STEPS_OF_BASE = 3  # the first one fills devices, and the last one has what the second waits for
_LEAST_OF_BASE = 4  # micro-batches
_ALL_LOOKED_AT = 8  # devices: of more, paths through some of them are followed


@dataclass(frozen=True, eq=False)
class Base:
    """A program of few micro-batches, three steps long, alone on its links; its run where that is known or needed."""

    request: Request
    program: Program
    costs: Costs
    listing: Listing | None
    known: Run | None = None
    beside: bool = False  # whether data ranks, of which it has none, would update among their messages

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
        shares, updates = copies.copy(), np.flatnonzero(program.tasks.kind == Kind.U)
        shares[updates] = 0
        on_host = any(stage.updated_on_host for stage in self.request.timed_model.stages)
        if self.beside or on_host:  # sums of data ranks may put updates in another order
            copies[updates] = 0
        if on_host:
            moves = len(program.tasks) + np.flatnonzero(messages.stream >= Stream.HOST)
            copies[moves] = shares[moves] = 0
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
        return sizes_of_devices(self.request, self.program, self.duration, devices, beside=self.beside)

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
        recipe = read_recipe(given_model(request.given["model"], request.shape.n), request.given)
        if recipe.recompute not in BY_LAYER or any(stage.offloaded for stage in request.timed_model.stages):
            return np.zeros(len(listing.phase), dtype=np.bool_)
        n, phase = listing.shape.n, listing.phase
        whole: Flags = listing.undivided[listing.micro_batch, n - 1 - phase % n]
        return ~whole | (phase < n)

    @cached_property
    def of_ends(self) -> dict[bytes, list[Paths]]:
        """The paths for the ends of lists that were asked for, by axis."""
        return {}


def base_of(request: Request, *, lists: bool, shape: Shape | None = None) -> Base:
    """Return a run of three steps, whose lists have beginnings and ends that many micro-batches have, or of a shape."""
    request = request.alone().without_chance()
    if not lists:
        return _priced(request if shape is None else with_micro_batches(request, shape.m), None)
    shape = shape or replace(request.shape, m=_micro_batches_of_base(request))
    listing = listing_of(request.schedule, list_shape(shape))
    base = _priced(request.with_steps(_STEPS_OF_BASE, shape=shape), listing)
    return replace(base, beside=request.state.updates_in_stream)


def with_micro_batches(request: Request, m: int) -> Request:
    """Return the same request of m micro-batches."""
    options = {**request, "schedule": request.schedule, "m": m, "ignore_memory": True}
    if request.rule == request.schedule.rule_of(request.shape):  # by default; with others it may be another one
        del options["rule"]
    return Request(**options)


def takes(request: Request, m: int) -> bool:
    """Return whether a schedule can have m micro-batches."""
    try:
        if request.schedule.order.lists is None:
            return bool(with_micro_batches(request, m))
        return bool(len(request.schedule.actions(replace(list_shape(request.shape), m=m))))
    except RequestError:
        return False


def _priced(request: Request, listing: Listing | None) -> Base:
    """Return the base of a request: with its run, or of lists, whose paths are enough, mostly without."""
    if listing is None:
        known = simulate(request.with_steps(few_steps(request), ignore_memory=True))
        return Base(known.request, known.program, known.costs, None, known)
    program = assemble_one(request)
    return Base(request, program, price_request(program, request), listing)


def list_shape(shape: Shape) -> Shape:
    """Return the sizes by which a schedule writes lists for one replica."""
    return Shape(shape.n, shape.m, shape.chunks, widths=shape.widths)


def _micro_batches_of_base(request: Request) -> int:
    """Return the least number of micro-batches that is enough for all devices, twice, and that the schedule takes."""
    schedule, shape = request.schedule, request.shape
    if not accepts(schedule, "m"):
        return shape.m
    enough = max(shape.m, 2 * (shape.n // shape.chunks), _LEAST_OF_BASE)
    return next((m for m in range(enough, 2 * enough + 1) if takes(request, m)), shape.m)


def has_measured(base: Base, m: int) -> bool:
    """Return whether a base has so many micro-batches itself, and shows how its steps go on."""
    return m == base.shape.m and base.run.steady_state.certified
