"""A case to replay, what replaying it needs, and its replay within one process."""

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
from validation.replay.transport import InProcess, Mailroom, Transport
from validation.replay.watch import Allocator, Meter, Nobody, Reading, Span, Stopwatch, Watch
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
    """What to replay; plain values, so that ranks can be told."""

    schedule: str
    n: int
    steps: int = 4
    m: int | None = None  # micro-batches of a step; None: as many as the schedule has itself
    chunks: int | None = None  # stages per device, likewise
    replicas: int = 1
    rule: str | tuple[tuple[bool, ...], ...] | None = None  # a name, or u[i][j]; None: the schedule's own
    slot_order: str | None = None  # what one device does first in a slot that has several tasks for it
    model: str = "mlp"
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: int = 4
    dtype: str = "float64"
    seed: int = 0
    sizes: tuple[tuple[str, int], ...] = ()  # of the model
    cuts: tuple[int, ...] | None = None  # with which layer each stage but the first begins; None: evenly
    stages: Model | None = None  # what they hold, if it is known: else it is found out
    device: str = "cpu"
    backend: str = "gloo"
    watch: Watched = "nothing"

    @property
    def shape(self) -> Shape:
        """How large it is."""
        schedule = find_schedule(self.schedule)
        m, chunks = self.m or schedule.micro_batches(self.n), self.chunks or schedule.order.chunks
        return Shape(self.n, m, chunks, self.replicas)

    @property
    def trains(self) -> Stages:
        """What it trains."""
        dtype = choose("dtype", self.dtype, DTYPES)
        return Stages(self.model, self.n, self.batch, dtype, self.optimizer, dict(self.sizes), self.cuts, self.seed)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case with its program, planned, and what it trains."""

    case: Case
    rule: Rule
    plan: Plan
    training: Training


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one device's part came to: what its last updates made, the calls that it counted, what was seen of it."""

    parameters: Final
    calls: Calls
    readings: list[Reading]  # where storages were watched
    spans: list[Span]  # where time was


def prepare(case: Case) -> Prepared:
    """Build what a case trains, and plan its program."""
    case = profiled(case)
    return Prepared(case, rule_of(case), planned(case), train(case))


def planned(case: Case) -> Plan:
    """Assemble and plan the program of a case that says what its stages hold."""
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
    """Give the rule of a case: its schedule's own, one by name, or a matrix."""
    if case.rule is None:
        return find_schedule(case.schedule).rule
    return find_rule(case.rule) if isinstance(case.rule, str) else matrix_rule(np.array(case.rule, dtype=bool))


def profiled(case: Case) -> Case:
    """Find out what a case's stages hold and do, without computing anything, unless it says so."""
    if case.stages is not None:
        return case
    return replace(case, stages=profile_stages(train(case), case.optimizer, granularity(case.device)))


_built: dict[str, tuple[Stages, Training]] = {}  # on each device the last one: a replay changes nothing in it


def train(case: Case) -> Training:
    """Build what a case trains, unless the last case trained the same: a large model takes a second to build."""
    wanted = case.trains
    if case.device not in _built or _built[case.device][0] != wanted:
        _built[case.device] = wanted, wanted.training(case.device)
    return _built[case.device][1]


class Collector:
    """Keeps what the last updates make: the program itself has no use for it."""

    def __init__(self, steps: int) -> None:
        self.parameters: Final = {}
        self._steps = steps

    def __call__(self, stage: int, version: int, theta: Tensor) -> None:
        """Take note of an update."""
        if version == self._steps:
            self.parameters[stage] = theta.cpu().numpy().copy()  # memory that no watch sees


class Seat:
    """A device, and all that is to be learned of what it does."""

    def __init__(
        self, prepared: Prepared, part: Part, transport: Transport, allocator: Allocator | None = None
    ) -> None:
        case, device = prepared.case, torch.device(prepared.case.device)
        self._collector, self._transport = Collector(case.steps), transport
        self._meter = Meter(device, allocator) if case.watch in METERED else None
        self._stopwatch = Stopwatch(device) if case.watch == "time" else None
        watch: Watch = self._meter or self._stopwatch or Nobody()
        self.device = Device(prepared.plan, part, prepared.training, case.optimizer, transport, self._collector, watch)

    def outcome(self) -> Outcome:
        """Say what it came to, once the device has finished."""
        self.device.finish()
        return Outcome(
            self._collector.parameters,
            self._transport.calls.copy(),
            self._meter.readings if self._meter else [],
            self._stopwatch.spans if self._stopwatch else [],
        )


def allocator_of(prepared: Prepared) -> Allocator | None:
    """Give the allocator's account of this process, where that is watched."""
    return Allocator(torch.device(prepared.case.device)) if prepared.case.watch == "allocator" else None


def parts_of(prepared: Prepared) -> list[Part]:
    """Every device's part, by slot where memory is watched."""
    return prepared.plan.parts(by_slot=prepared.case.watch in METERED)


def play_together(prepared: Prepared) -> list[Outcome]:
    """Play all devices in one process, in the program's order."""
    plan, room, allocator = prepared.plan, Mailroom(), allocator_of(prepared)
    with one_thread():
        seats = [Seat(prepared, part, InProcess(part.device, room), allocator) for part in parts_of(prepared)]
        for node in plan.order:
            for number in plan.devices_of(node):
                seats[number].device.play(node)
        return [seat.outcome() for seat in seats]


def expected(prepared: Prepared) -> list[Tensor]:
    """Evaluate the update equation for a case, in its type, on its device, adding gradients as its program does."""
    program, case = prepared.plan.program, prepared.case
    rule, shape = prepared.rule, case.shape
    lags, backward_lags = (np.tile(own(shape), (shape.replicas, 1)) for own in (rule.lags, rule.backward_lags))
    line = rule.versions.sources(case.steps)
    with one_thread():
        return evaluate(prepared.training, case.optimizer, lags, case.steps, grouping_of(program), backward_lags, line)


def difference(outcomes: list[Outcome], parameters: list[Tensor]) -> float:
    """Give the largest difference between what devices ended with and what it should be; 0 is bit-equal."""
    made = [(stage, theta) for outcome in outcomes for stage, theta in outcome.parameters.items()]
    if missing := set(range(len(parameters))) - {stage for stage, _ in made}:
        raise ReplayError(f"nobody updated stages {sorted(missing)} in the last step")
    # torch's maximum is nan where one is, Python's is not.
    return float(
        torch.stack([(torch.tensor(theta) - parameters[stage].cpu()).abs().max() for stage, theta in made]).max()
    )
