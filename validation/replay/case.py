"""A case to replay, its preparation, and its replay within one process."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdpsim.errors import choose
from cdpsim.model import Model
from cdpsim.program.assembly import derive
from cdpsim.program.check import check_columns
from cdpsim.schedules import find_schedule
from cdpsim.schedules.rule import Rule, find_rule, matrix_rule
from cdpsim.schedules.shape import Shape
from validation.profile.footprints import profile_stages, with_unit_times
from validation.profile.tracker import granularity
from validation.replay.equation import evaluate, grouping_of
from validation.replay.interpreter import Device
from validation.replay.plan import Calls, Part, Plan, ReplayError
from validation.replay.transport import InProcess, Mailboxes, Transport
from validation.replay.watch import Allocator, Meter, NoWatch, Reading, Stopwatch, TaskInterval, Watch
from validation.training.models import Stages
from validation.training.optimizer import Optimizer
from validation.training.passes import one_thread
from validation.training.stages import Training

Watched = Literal["nothing", "storages", "allocator", "time"]
METERED: tuple[Watched, ...] = ("storages", "allocator")

DTYPES = ("float32", "float64")

Final = dict[int, NDArray[np.floating[Any]]]  # stage -> its parameters in the end, as one vector


@dataclass(frozen=True)
class Case:
    """A replay to run; plain values, so that it can be sent to ranks."""

    schedule: str
    n: int
    steps: int = 4
    m: int | None = None  # micro-batches of a step; None: as many as the schedule has itself
    chunks: int | None = None  # stages per device, likewise
    replicas: int = 1
    rule: str | tuple[tuple[bool, ...], ...] | None = None  # a name, or u[i][j]; None: the schedule's own
    slot_order: str | None = None  # the task that a device does first in a slot with several
    model: str = "mlp"
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: int = 4
    dtype: str = "float64"
    seed: int = 0
    sizes: tuple[tuple[str, int], ...] = ()  # of the model
    cuts: tuple[int, ...] | None = None  # with which layer each stage but the first begins; None: evenly
    stages: Model | None = None  # the stages' costs, where they are known; else they are profiled
    device: str = "cpu"
    backend: str = "gloo"
    watch: Watched = "nothing"

    @property
    def shape(self) -> Shape:
        """The sizes of its program."""
        schedule = find_schedule(self.schedule)
        m, chunks = self.m or schedule.micro_batches(self.n), self.chunks or schedule.order.chunks
        return Shape(self.n, m, chunks, self.replicas)

    @property
    def trains(self) -> Stages:
        """The stages that it trains."""
        dtype = choose("dtype", self.dtype, DTYPES)
        return Stages(self.model, self.n, self.batch, dtype, self.optimizer, dict(self.sizes), self.cuts, self.seed)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case with its planned program and its training."""

    case: Case
    rule: Rule
    plan: Plan
    training: Training


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one device's part: the parameters of its last updates, its calls, and the measurements."""

    parameters: Final
    calls: Calls
    readings: list[Reading]  # where storages were watched
    spans: list[TaskInterval]  # where time was


def prepare(case: Case) -> Prepared:
    """Build the training of a case, plan its program, and return both."""
    case = profiled(case)
    return Prepared(case, rule_of(case), planned(case), build_training(case))


def planned(case: Case) -> Plan:
    """Return the planned program of a case whose stages are profiled."""
    assert case.stages is not None, "it has been profiled, or comes with a model file"
    schedule, shape = find_schedule(case.schedule), case.shape
    program = derive(
        schedule,
        with_unit_times(case.stages, split=schedule.splits(shape)),
        case.steps,
        shape=shape,
        rule=rule_of(case),
        forward_first=case.slot_order != "backward-first",
        lanes=1,  # a real device does one task at a time
    )
    check_columns(program)
    return Plan(program)


def rule_of(case: Case) -> Rule:
    """Return the rule of a case: its schedule's own, one by name, or a matrix."""
    if case.rule is None:
        return find_schedule(case.schedule).rule
    return find_rule(case.rule) if isinstance(case.rule, str) else matrix_rule(np.array(case.rule, dtype=bool))


def profiled(case: Case) -> Case:
    """Return a case with its stages profiled, on fake tensors, unless it has a profile."""
    if case.stages is not None:
        return case
    return replace(case, stages=profile_stages(build_training(case), case.optimizer, granularity(case.device)))


_built: dict[str, tuple[Stages, Training]] = {}  # on each device the last one: a replay changes nothing in it


def build_training(case: Case) -> Training:
    """Return the training of a case, built unless the last case had the same: a large model takes a second to build."""
    wanted = case.trains
    if case.device not in _built or _built[case.device][0] != wanted:
        _built[case.device] = wanted, wanted.training(case.device)
    return _built[case.device][1]


class Collector:
    """A collector of the parameters that the last updates make, which the program itself does not use."""

    def __init__(self, steps: int) -> None:
        self.parameters: Final = {}
        self._steps = steps

    def __call__(self, stage: int, version: int, theta: Tensor) -> None:
        """Keep the parameters of an update."""
        if version == self._steps:
            self.parameters[stage] = theta.cpu().numpy().copy()  # memory that no watch sees


class DeviceRun:
    """One device of a replay, with its transport, its watch and its collector."""

    def __init__(
        self, prepared: Prepared, part: Part, transport: Transport, allocator: Allocator | None = None
    ) -> None:
        case, device = prepared.case, torch.device(prepared.case.device)
        self._collector, self._transport = Collector(case.steps), transport
        self._meter = Meter(device, allocator) if case.watch in METERED else None
        self._stopwatch = Stopwatch(device) if case.watch == "time" else None
        watch: Watch = self._meter or self._stopwatch or NoWatch()
        self.device = Device(prepared.plan, part, prepared.training, case.optimizer, transport, self._collector, watch)

    def outcome(self) -> Outcome:
        """Return the outcome of the device, once it has finished."""
        self.device.finish()
        return Outcome(
            self._collector.parameters,
            self._transport.calls.copy(),
            self._meter.readings if self._meter else [],
            self._stopwatch.spans if self._stopwatch else [],
        )


def allocator_of(prepared: Prepared) -> Allocator | None:
    """Return the allocator of this process, if a case watches it."""
    return Allocator(torch.device(prepared.case.device)) if prepared.case.watch == "allocator" else None


def parts_of(prepared: Prepared) -> list[Part]:
    """Return every device's part, by slot where memory is watched."""
    return prepared.plan.parts(by_slot=prepared.case.watch in METERED)


def play_in_process(prepared: Prepared) -> list[Outcome]:
    """Play all devices in one process, in the program's order, and return their outcomes."""
    plan, room, allocator = prepared.plan, Mailboxes(), allocator_of(prepared)
    with one_thread():
        seats = [DeviceRun(prepared, part, InProcess(part.device, room), allocator) for part in parts_of(prepared)]
        for node in plan.order:
            for number in plan.devices_of(node):
                seats[number].device.play(node)
        return [seat.outcome() for seat in seats]


def expected_parameters(prepared: Prepared) -> list[Tensor]:
    """Evaluate the update equation for a case, in its type and on its device, and return each stage's parameters.

    Gradients are added in the order in which the case's program adds them.
    """
    program, case = prepared.plan.program, prepared.case
    rule, shape = prepared.rule, case.shape
    lags, backward_lags = (np.tile(own(shape), (shape.replicas, 1)) for own in (rule.lags, rule.backward_lags))
    line = rule.versions.sources(case.steps)
    with one_thread():
        return evaluate(prepared.training, case.optimizer, lags, case.steps, grouping_of(program), backward_lags, line)


def largest_difference(outcomes: list[Outcome], parameters: list[Tensor]) -> float:
    """Return the largest difference between the devices' final parameters and the expected ones; 0 is bit-equal."""
    made = [(stage, theta) for outcome in outcomes for stage, theta in outcome.parameters.items()]
    if missing := set(range(len(parameters))) - {stage for stage, _ in made}:
        raise ReplayError(f"no device updated stages {sorted(missing)} in the last step")
    # torch's maximum is nan where a value is nan, Python's is not.
    return float(
        torch.stack([(torch.tensor(theta) - parameters[stage].cpu()).abs().max() for stage, theta in made]).max()
    )
