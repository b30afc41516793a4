"""The memory of stages over their own work, operation by operation: the `curve` of each stage in a model file.

A stage runs the forward and the backward of a replay, as for its footprint. A step is an operation that computes or
moves numbers. It holds what is alive when the operation returns: its results, and all that it has read. What is freed
then is gone before the next step.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from cdpsim.files.notes import progress
from cdpsim.model import Model
from cdpsim.model.curve import MemoryCurve, OperatorSteps
from cdpsim.model.stage import NO_CORE

from ..training.fakes import Fakes
from ..training.passes import backward, forward, one_thread
from ..training.stages import Training, imitate
from .cuts import TIMED_PASSES, device_clock, usual_values
from .division import Inputs, zero_above, zero_inputs
from .flops import count_flops
from .footprints import likeness_key
from .tracker import Tracker, address_of, tensors_in

_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class Operation(NamedTuple):
    """An operation that has run."""

    flops: int
    moved: int  # bytes
    held: int  # bytes alive at its end
    read: frozenset[int]  # the storages of its arguments
    changed: dict[int, int]  # the bytes that it changes in place, by storage, as a tensor of its own would count
    nanoseconds: int


class Recorder(Tracker):
    """A tracker that records each operation while it is entered; `clock` gives nanoseconds."""

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._clock = clock
        self._operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, track its results and record it."""
        begin = self._clock()
        result = func(*args, **(kwargs or {}))
        duration = self._clock() - begin
        self._look(result)
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        read = frozenset(map(address_of, given))
        changed = {address_of(tensor): tensor.nbytes for tensor in made if func._schema.is_mutable}
        moved = _bytes_moved(func, given, made)
        flops = count_flops(func, args, kwargs or {}, result)
        self._operations.append(Operation(flops, moved, self.level, read, changed, duration))
        return result

    def take(self) -> list[Operation]:
        """Return the operations since the last call."""
        taken, self._operations = self._operations, []
        return taken


def _bytes_moved(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; a view moves none, nor does an allocation.

    An operation in place reads what it changes.
    """
    is_view = not func._schema.is_mutable and set(map(address_of, made)) <= set(map(address_of, given))
    return 0 if is_view or func._overloadpacket in _ALLOCATIONS else _extent(given) + _extent(made)


def _extent(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; tensors that share a storage have its bytes at most."""
    seen: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size, _ = seen.get(storage._cdata, (0, 0))
        seen[storage._cdata] = size + tensor.nbytes, storage.nbytes()
    return sum(map(min, seen.values()))


def with_curves(model: Model, training: Training) -> Model:
    """Return a profile whose stages have curves."""
    keys = [likeness_key(training, stage) for stage in range(training.n)]
    curves: dict[Hashable, MemoryCurve] = {}
    with Fakes():
        imitation = imitate(training)
        for j, key in progress(list(enumerate(keys)), "curves"):
            if key not in curves:
                passes = record_passes(imitation, j)
                costs = int(model.stages[j].forward), int(model.stages[j].backward)
                curves[key] = _curve_of(passes, [_work(*each) for each in zip(passes, costs, strict=True)])
    stages = (replace(stage, curve=curves[key]) for stage, key in zip(model.stages, keys, strict=True))
    return replace(model, stages=tuple(stages))


def with_timed_curves(model: Model, training: Training) -> Model:
    """Return a profile whose stages have curves and times, of operations that run here, on random values.

    An operation takes the shortest of several times. Splits of backwards and attention are not timed, and left out.
    """
    stages = []
    with one_thread():
        for j, stage in progress(list(enumerate(model.stages)), "curves"):
            clock = partial(device_clock, training.device)
            runs = [record_passes(training, j, usual_values, clock) for _ in range(1 + TIMED_PASSES)][1:]
            costs = [_shortest(pass_) for pass_ in zip(*runs, strict=True)]
            forward, backward = (sum(each) / 1e9 for each in costs)
            parts = {"weight_backward": None, "recomputed": None}  # of which nothing is timed
            times = {"forward": forward, "backward": backward, **parts, **NO_CORE}
            stages.append(replace(stage, curve=_curve_of(runs[0], costs), **times))
    return replace(model, stages=tuple(stages))


def _shortest(runs: Sequence["RecordedPass"]) -> list[int]:
    """Return the nanoseconds of each step; what comes between two steps counts to the later one, or to the last."""
    first = runs[0]
    times = [min(same) for same in zip(*([each.nanoseconds for each in run.operations] for run in runs), strict=True)]
    number = np.minimum(np.searchsorted(first.steps, np.arange(len(times))), len(first.steps) - 1)
    return [int(time) for time in np.bincount(number, weights=times, minlength=len(first.steps))]


def _work(recorded: "RecordedPass", total: int) -> list[int]:
    """Return the FLOP of each step; of the highest also those by which a model file has more, as no pass has none."""
    steps = [recorded.operations[k] for k in recorded.steps]
    work = [step.flops for step in steps]
    work[max(range(len(steps)), key=lambda k: steps[k].held)] += total - sum(work)
    return work


class RecordedPass(NamedTuple):
    """The operations of a forward or backward, the numbers of its steps among them, and the storages it is given."""

    operations: list[Operation]
    steps: list[int]
    given: int
    above: int | None
    gradient: int

    def reading(self, storage: int | None) -> int:
        """Return how many steps there are up to the last operation that reads a storage."""
        last = max((k for k, operation in enumerate(self.operations) if storage in operation.read), default=-1)
        return sum(k <= last for k in self.steps)

    def complete_gradients(self) -> tuple[int, ...]:
        """Return the bytes of parameters' gradients that are complete when each step begins; none in a forward."""
        added = np.array([operation.changed.get(self.gradient, 0) for operation in self.operations])
        complete = np.cumsum(added) - added
        return tuple(complete[self.steps].tolist()) if added.any() else ()


def record_passes(
    training: Training,
    stage: int,
    values: Callable[[Training, int], tuple[Inputs, Tensor | None]] | None = None,
    clock: Callable[[], int] = lambda: 0,
) -> list[RecordedPass]:
    """Run a stage's forward and backward once, on the tensors of `values` or on zeros; return the operations."""
    recorder = Recorder(clock)
    given = values(training, stage) if values else (zero_inputs(training, stage), zero_above(training, stage))
    (theta, gradient, x, target), above = given
    recorder.ignore([theta, gradient, *training.buffers[stage].values()])
    recorder.see([x] if target is None else [x, target])
    with recorder:
        _, kept = forward(training, stage, theta, x, target, 1)
    ahead, source = recorder.take(), address_of(x)
    del x, target, _
    before = recorder.level
    recorder.see([] if above is None else [above])
    rounding = recorder.level - before - (0 if above is None else above.nbytes)  # boundaries have none in a model file
    with recorder:
        backward(training, kept, theta, above, gradient)
    back, sums = [each._replace(held=each.held - rounding) for each in recorder.take()], address_of(gradient)
    return [
        RecordedPass(ahead, _with_peaks(ahead), source, None, sums),
        RecordedPass(back, _with_peaks(back), source, None if above is None else address_of(above), sums),
    ]


def _curve_of(passes: Sequence[RecordedPass], costs: Sequence[Sequence[int]]) -> MemoryCurve:
    """Return the curve of a forward and a backward, and of the costs of their steps."""
    ahead, back = (
        OperatorSteps(
            cost=tuple(cost),
            moved=tuple(recorded.operations[k].moved for k in recorded.steps),
            held=tuple(recorded.operations[k].held for k in recorded.steps),
            gradients=recorded.complete_gradients(),
            input_steps=recorded.reading(recorded.given),
            gradient_steps=0 if recorded.above is None else recorded.reading(recorded.above),
        )
        for recorded, cost in zip(passes, costs, strict=True)
    )
    return MemoryCurve(forward=ahead, backward=back)


def _with_peaks(operations: Sequence[Operation]) -> list[int]:
    """Return the numbers of the operations that compute or move anything, or that hold more than the ones beside them.

    Of several that do neither, between two that do, only the highest can be one.
    """
    kept: list[int] = []
    between: list[int] = []  # since the last one that computes or moves
    for k, operation in enumerate([*operations, None]):
        if operation is not None and not (operation.flops or operation.moved):
            between.append(k)
            continue
        beside = [operations[j].held for j in kept[-1:]] + ([operation.held] if operation else [])
        most = max(between, key=lambda j: operations[j].held, default=None)
        if most is not None and operations[most].held > max(beside, default=0):
            kept.append(most)
        kept += [] if operation is None else [k]
        between = []
    return kept
