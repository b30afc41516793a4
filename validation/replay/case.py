"""A case to replay, its preparation, and its replay within one process."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdpsim.api import assemble
from cdpsim.cluster import Cluster, Link
from cdpsim.errors import choose, refuse_unknown
from cdpsim.model import Model, Runtime
from cdpsim.program import Category
from cdpsim.request import Request
from cdpsim.request.options import DEFAULTS, OPTION_NAMES, OPTIONS, refuse_renamed
from cdpsim.request.reading import shape_of
from cdpsim.schedules import SCHEDULES, find_schedule
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule

from ..profile.division import divide
from ..profile.footprints import likeness_key, profile_stages, with_unit_times
from ..training.models import Stages
from ..training.offload import HostUpdates
from ..training.optimizer import Optimizer
from ..training.passes import Split, one_thread
from ..training.stages import Training
from .contents import Calls, ReplayError
from .equation import evaluate, grouping_of
from .interpreter import Device
from .local import LocalDevice
from .plan import Part, Plan
from .policy import split_of
from .round_lives import last_kept
from .rounds import RoundsDevice
from .shares import Shares, check_shares, in_whole_numbers
from .transport import InProcess, Mailboxes, Transport
from .watch import Accountant, Event, Ledger, Meter, Reading, Stopwatch, TaskInterval, Watch

Watched = Literal["nothing", "storages", "account", "time"]

DTYPES = ("float32", "float64", "bfloat16", "float16")

Final = dict[int, NDArray[np.floating[Any]]]  # stage -> its parameters in the end, as one vector


class LeftOut(NamedTuple):
    """An option that was asked for and is not replayed, and why."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True, init=False)
class Case:
    """A request to replay, and what torch needs beside it; plain values, so that it can be sent to ranks."""

    schedule: str
    n: int
    steps: int
    options: Mapping[str, Any]  # further options of the request, by their names there; a rule as its lags, in rows
    model: str = "mlp"
    optimizer: Optimizer = Optimizer()  # noqa: RUF009 - it is frozen
    batch: int = 4
    dtype: str = "float64"
    seed: int = 0
    sizes: tuple[tuple[str, int], ...] = ()  # of the model
    cuts: tuple[int, ...] | None = None  # with which layer each stage (or part by `layers`) but the first begins
    stages: Model | None = None  # the stages' costs, where they are known; else they are profiled
    autocast: str | None = None  # bf16 or fp16: the type to which torch.autocast casts what products take
    recompute: str = "none"  # what backwards compute again
    offload: str = "none"  # what is kept on the host
    left_out: tuple[LeftOut, ...] = ()
    device: str = "cpu"
    backend: str = "gloo"
    watch: Watched = "nothing"
    split: Split = "once"  # how often the parts of a split backward go through their stage

    def __init__(self, schedule: str, n: int, steps: int = 4, **given: Any) -> None:
        """Take values by the names of fields, and all others as options of the request."""
        own = {each.name: given.pop(each.name, each.default) for each in fields(self) if each.name != "options"}
        asked = {**given.pop("options", {}), **given}
        refuse_unknown("Case", asked, OPTION_NAMES, refuse_renamed)
        own["options"] = {k: asked[k] for k in OPTIONS if asked.get(k) not in (None, OPTIONS[k].default)}
        declared = SCHEDULES.get(schedule)  # where tasks read estimates, the optimizer keeps what updates start from
        apart = declared is not None and bool(declared.order.rounds) and not declared.rule.versions.is_line
        own["optimizer"] = replace(own["optimizer"], keeps_base=apart)
        vars(self).update(own | {"schedule": schedule, "n": n, "steps": steps})

    def but(self, **given: Any) -> "Case":
        """Return the case with other values of fields or options."""
        return Case(**vars(self) | given)

    @property
    def asked(self) -> dict[str, Any]:
        """All options of the request that are not of training."""
        return {**DEFAULTS, **self.options}

    @property
    def layers(self) -> tuple[int, ...]:
        """The first layer of each stage, where messages are of layers."""
        return tuple(self.options.get("by_layer", ()))

    @property
    def shape(self) -> Shape:
        """The sizes of its program."""
        shape = shape_of(find_schedule(self.schedule), self.n, self.asked)
        return replace(shape, n=len(self.cuts or ()) + 1, layers=self.layers) if self.layers else shape

    @property
    def profile(self) -> Model:
        """Its stages, which have been profiled, or come with a model file."""
        assert self.stages is not None, "it has been profiled"
        return self.stages

    @property
    def request(self) -> Request:
        """The request of its program; its stages are profiled."""
        model = with_unit_times(self.profile, split=find_schedule(self.schedule).splits(self.shape))
        return Request(
            self.schedule,
            self.n,
            steps=self.steps,
            **self.options,
            model=msgspec.structs.replace(model, runtime=Runtime(gradients="zeroed")),  # vectors to which tasks add
            cluster=Cluster(host=Link()),  # whose devices do one task at a time
        )

    @property
    def trains(self) -> Stages:
        """The stages that it trains."""
        choose("dtype", self.dtype, DTYPES)
        alike = {each.name: getattr(self, each.name) for each in fields(Stages) if hasattr(self, each.name)}
        return Stages(**alike | {"sizes": dict(self.sizes)}, offloads=self.offload in ("activations", "all"))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case with its planned program and its training."""

    case: Case
    request: Request
    plan: Plan
    training: Training


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one device's part: the parameters of its last updates, its calls, and the measurements."""

    parameters: Final
    places: dict[int, slice]  # in the stage's vector, of what a device updates
    calls: Calls
    readings: list[Reading]  # where storages were watched
    spans: list[TaskInterval]  # where time was
    events: list[Event]  # where the allocator's account was kept


def prepare(case: Case) -> Prepared:
    """Build the training of a case, plan its program, and return both."""
    case = profiled(case)
    return Prepared(case, case.request, planned(case), build_training(case))


def planned(case: Case) -> Plan:
    """Return the planned program of a case whose stages are profiled."""
    request = case.request
    program = assemble(request)
    if program.shard == 1:
        return Plan(program, request.disorder)
    training = build_training(case)
    check_shares(program, case.optimizer, training.parameters(0).dtype.itemsize)
    return Plan(in_whole_numbers(program, training, case.optimizer), request.disorder)


def profiled(case: Case) -> Case:
    """Return a case with its stages profiled, on fake tensors, unless it has a profile."""
    if case.stages is not None:
        return case
    stages = profile_stages(build_training(case), case.optimizer, case.split)
    return replace(case, stages=stages)


_built: dict[str, tuple[Stages, Training]] = {}  # on each device the last one: a replay changes nothing in it


def build_training(case: Case) -> Training:
    """Return the training of a case, built unless the last case had the same: a large model takes a second to build."""
    wanted = case.trains
    if case.device not in _built or _built[case.device][0] != wanted:
        _built[case.device] = wanted, wanted.training(case.device)
    training = _built[case.device][1]
    if case.split == "twice" or not find_schedule(case.schedule).splits(case.shape):
        return training
    return replace(training, divided=_divide_once(training, likeness_key))


_divide_once = lru_cache(maxsize=1)(divide)  # of the last training that was built


class DeviceRun:
    """One device of a replay, with its transport, its watch and the parameters that its last updates make."""

    def __init__(
        self,
        prepared: Prepared,
        part: Part,
        transport: Transport,
        ledger: Ledger | None = None,
        hosts: HostUpdates | None = None,
    ) -> None:
        case, program, device = prepared.case, prepared.plan.program, torch.device(prepared.case.device)
        self._places, self._transport, self._part = places_of(prepared, part.device), transport, part
        self._last = last_kept(program)
        self._bytes: dict[int, tuple[torch.dtype, NDArray[np.uint8]]] = {}  # memory that no watch sees
        self._ledger = ledger
        self._meter = Meter(device, prepared.plan.slots[1]) if case.watch == "storages" else None
        self._stopwatch = Stopwatch(device) if case.watch == "time" else None
        watch = self._meter or self._stopwatch or (Accountant(part.device, ledger) if ledger else Watch())
        given = prepared.plan, part, prepared.training, case.optimizer, transport, self._collect, watch, hosts
        if local := prepared.request.schedule.order.local:
            self.device: Device = LocalDevice(*given, local=local)
        else:
            self.device = (RoundsDevice if program.thrown_away else Device)(*given)

    def _collect(self, stage: int, version: int, theta: Tensor) -> None:
        if version == self._last:
            self._bytes[stage] = theta.dtype, theta.cpu().view(torch.uint8).numpy().copy()

    def outcome(self) -> Outcome:
        """Return the outcome of the device, once it has finished and its allocator's record is closed."""
        parameters = {}
        for stage, (dtype, own) in self._bytes.items():
            place, theta = self._places[stage], torch.from_numpy(own).view(dtype)
            parameters[stage] = widened(theta[: place.stop - place.start])
        return Outcome(
            parameters,
            self._places,
            self._transport.calls.copy(),
            self._meter.readings if self._meter else [],
            self._stopwatch.spans if self._stopwatch else [],
            self._ledger.events(self._part.device) if self._ledger else [],
        )


def widened(theta: Tensor) -> NDArray[np.floating[Any]]:
    """Return parameters in float32 or wider, as numpy has no bfloat16."""
    found: NDArray[np.floating[Any]] = theta.to(torch.promote_types(theta.dtype, torch.float32)).numpy()
    return found


def places_of(prepared: Prepared, device: int) -> dict[int, slice]:
    """Return the places in stages' vectors of what a device updates."""
    program, training = prepared.plan.program, prepared.training
    split = split_of(program, Category.OPTIMIZER)
    shares = Shares(program, prepared.plan.messages, training)
    rank = shares.rank(device, split)
    return {stage: shares.place(stage, split, rank) for stage in range(training.n)}


def keeping_account(prepared: Prepared) -> AbstractContextManager[Ledger | None]:
    """Give the ledger of this process's account, if a case has one."""
    return Ledger(torch.device(prepared.case.device)) if prepared.case.watch == "account" else nullcontext()


def parts_of(prepared: Prepared) -> list[Part]:
    """Return every device's part, by slot where memory is watched."""
    return prepared.plan.parts(by_slot=prepared.case.watch in ("storages", "account"))


def play_in_process(prepared: Prepared) -> list[Outcome]:
    """Play all devices in one process, in the program's order, and return their outcomes."""
    plan, room, parts = prepared.plan, Mailboxes(), parts_of(prepared)
    order, hosts = plan.order, HostUpdates(prepared.case.optimizer)
    with one_thread(), keeping_account(prepared) as ledger:
        seats = [DeviceRun(prepared, part, InProcess(part.device, room), ledger, hosts) for part in parts]
        for node in order:
            for number in plan.devices_of(node):
                seats[number].device.play(node)
        for seat in seats:
            seat.device.finish()
    return [seat.outcome() for seat in seats]


def expected_parameters(prepared: Prepared, rule: Rule | None = None) -> list[Tensor]:
    """Return each stage's parameters by the update equation, in a case's type and on its device.

    Another `rule` reads other versions. Gradients are added in the order in which the program adds them. Of rounds, all
    that a program throws away is left out, and steps have the program's counts.
    """
    program, request = prepared.plan.program, prepared.request
    shape, local = request.shape, request.schedule.order.local
    versions = local.versions(shape) if local and rule is None else (rule or request.rule).versions
    rule = rule or request.rule
    lags, backward_lags = (np.tile(own(shape), (shape.replicas, 1)) for own in (rule.lags, rule.backward_lags))
    with one_thread():
        return evaluate(
            prepared.training,
            prepared.case.optimizer,
            lags,
            program.updated,
            grouping_of(program),
            backward_lags,
            versions=versions,
            counts=program.counts.tolist() if program.thrown_away else None,
            waits=shape.warm_up,
            workers=program.devices,
            outer=local.outer if local else None,
        )


def largest_difference(outcomes: list[Outcome], parameters: list[Tensor]) -> float:
    """Return the largest difference between the devices' final parameters and the expected ones; 0 is bit-equal."""
    updated = [torch.zeros(len(theta), dtype=torch.bool) for theta in parameters]
    for outcome in outcomes:
        for stage in outcome.parameters:
            updated[stage][outcome.places[stage]] = True
    if missing := [stage for stage, own in enumerate(updated) if not own.all()]:
        raise ReplayError(f"no device updated stages {missing} in the last step")
    # torch's maximum is nan where a value is nan, Python's is not.
    return float(torch.stack(list(differences(outcomes, parameters).values())).max())


def differences(outcomes: list[Outcome], parameters: list[Tensor]) -> dict[int, Tensor]:
    """Return, of each stage, the largest difference between the devices' final parameters and the expected ones."""
    found: dict[int, Tensor] = {}
    for outcome in outcomes:
        for stage, theta in outcome.parameters.items():
            if len(theta):
                apart = (torch.tensor(theta) - parameters[stage][outcome.places[stage]].cpu()).abs().max()
                found[stage] = torch.maximum(found.get(stage, apart), apart)
    return found
