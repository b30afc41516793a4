"""Fig. 4: the memory per worker of N workers, from the memory of one worker's forward and backward.

One worker's curve m(s), s a share of its pass, comes out of simulating it. Workers that go simultaneously (DP) need
max m(s) each; workers that go cyclically (CDP), each 1/N of a pass after the one before, max over s of the mean of
m(s + i/N). The sum is exact: m is a step function of whole bytes over whole numbers (see `whole_ratios`), and because
the sum repeats after 1/N of a pass, the steps of one curve, laid over that share, are all of its steps.

A stage with a curve counts operator by operator, as autograd frees in a model of one piece: the gradient of its output
once its backward has read that, and an input that the stage before does not keep. An operator that takes no share of
the pass, as by FLOP all but products do, counts at its moment. A stage without a curve counts with its whole memory
during all of its forward and backward: m is then an upper bound, and the reduction a lower one.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cdpsim import presets
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, suggestion, whole_number
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category
from cdpsim.program.assembly import counted_once, derive
from cdpsim.program.collectives import DEFAULT
from cdpsim.schedules import SCHEDULES
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import CDP_V1
from cdpsim.timing.costs import node_costs, roofline_time
from cdpsim.timing.engine import find_engine
from cdpsim.trace.metrics import memory

Exact = NDArray[Any]  # int64, or Python's own integers where that is too narrow


# Devices whose peaks bound layers, and the presets of clusters that have them. Precisions are dense: float32, or
# TensorFloat-32, which PyTorch takes for convolutions unless told otherwise.
_CLUSTERS = MappingProxyType({"v100": "v100-node", "a100": "a100-nodes", "h100": "h100-node", "h200": "h200-node"})
ROOFLINE_DEVICES = ("v100", "a100", "a100-tf32", "h100", "h100-tf32", "h200", "h200-tf32")
AXES = ("flops", "roofline", "measured")
CURVE_CONTENTS = ("activations", "gradients", "constants")
# The paper's own figures of its models (Fig. 4 and section 5).
PAPER_CLAIMS = MappingProxyType(
    {"resnet50": "30 % less at N = 32", "vit-b16": "from 3.9 GB to 2.3 GB, 42 % less at N = 32"}
)


class WorkerCurve(NamedTuple):
    """One worker's memory over one pass, a step for each operator or task: forwards, then backwards.

    At the moment at which steps begin, it holds the most of them; a step may take no time.
    """

    size: Exact  # bytes
    duration: Exact  # whole numbers of any unit


class SummedCurve(NamedTuple):
    """The memory of n workers together, 1/n of a pass apart, over that share of a pass, after which it repeats."""

    position: Exact  # in 1/n of the curve's unit, from 0 up to the whole pass, which is 1/n of one
    total: Exact  # from each position on
    moment: Exact  # at each position itself: as much, or more in operators that take no time


class Superposition(NamedTuple):
    """The most that a worker holds under DP, and the most that N workers hold on average under CDP, in bytes."""

    model: str
    n: int
    axis: str
    contents: str
    resolution: str  # "operator", "layer", or "operator and layer" where only some stages have curves
    dp: int
    cdp: Fraction

    @property
    def reduction(self) -> Fraction:
        """The share of DP's memory that CDP saves; 0 if there is no memory."""
        return 1 - self.cdp / self.dp if self.dp else Fraction(0)

    def row(self) -> dict[str, str | int | float]:
        """Return the outcome by the keys of JSON."""
        row = self._asdict()
        dp, cdp, _ = row.pop("dp"), row.pop("cdp"), row.pop("resolution")
        mean = int(cdp) if cdp.denominator == 1 else float(cdp)
        return row | {"dp_bytes": dp, "cdp_bytes": mean, "reduction": float(self.reduction)}


def superpose(
    model: str | Path | Model, n: int, *, axis: str = "flops", contents: str = "activations", by_layer: bool = False
) -> Superposition:
    """Extrapolate one worker's memory to n workers.

    `model` is one that ships with the package, a file, or a `Model` whose stages are the layers. `axis` is the measure
    of a layer's share of the pass: "flops", "roofline:DEVICE" (one of `ROOFLINE_DEVICES`) or "measured", for a model of
    times. `contents` is "activations" (with temporaries and gradients of activations), "gradients" (adds inputs and
    gradients of parameters) or "constants" (adds a constant of the size of the parameters). `by_layer` counts a stage
    with the highest moment of its curve during all of its forward, and of its backward.
    """
    n = whole_number("n", n, at_least=1)
    layers = _layers(model)
    curve = worker_curve(layers, axis=axis, contents=contents, by_layer=by_layer)
    kinds = {"operator" if stage.curve and not by_layer else "layer" for stage in layers.stages}
    resolution = " and ".join(sorted(kinds, reverse=True))
    cdp = Fraction(int(sum_workers(curve, n).moment.max()), n)
    name = (model.name or "model") if isinstance(model, Model) else str(model)
    return Superposition(name, n, axis, contents, resolution, int(curve.size.max()), cdp)


def worker_curve(
    model: str | Path | Model, *, axis: str = "flops", contents: str = "activations", by_layer: bool = False
) -> WorkerCurve:
    """Return one worker's memory over one pass; the parameters are those of `superpose`."""
    _check_options(axis, contents)
    layers = _layers(model)
    if not any(stage.curve for stage in layers.stages):
        if by_layer:
            problem = "no stage of the model has a curve, so all count by layer; leave by_layer out"
            raise RequestError("by_layer", f"{problem}, or `profile` the model --by-operator")
        return WorkerCurve(memory_by_task(layers, contents), whole_ratios(task_costs(layers, axis)))
    tasks, costs = task_steps(layers, contents), task_costs(layers, axis)
    if by_layer:
        return WorkerCurve(np.array([task.max() for task in tasks]), whole_ratios(costs))
    return WorkerCurve(np.concatenate(tasks), whole_ratios(step_costs(layers, axis, costs)))


def _layers(model: str | Path | Model) -> Model:
    """Return a model whose stages are layers with bytes."""
    layers = presets.find_model(model, beside=())
    if layers.is_unit:
        raise RequestError("model", "is of slots, which have no bytes; give stages with sizes")
    return layers


def sum_workers(curve: WorkerCurve, n: int) -> SummedCurve:
    """Sum n workers, each 1/n of a pass after the one before."""
    curve, most = _lasting(curve)
    ends = np.cumsum(curve.duration.astype(object))
    span = ends[-1]
    kind: Any = np.int64 if n * max(span, int(most.max())) < 2**63 else object
    size, begin = curve.size.astype(kind), (n * (ends - curve.duration)).astype(kind)
    # At first worker i is at i/n of the pass: count the workers in each task.
    first = -(-begin // span)
    total = (size * np.diff(np.append(first, n))).sum()
    # Then one worker comes to each task once; a worker that stood at its beginning at first has been counted.
    place, change = begin % span, size - np.roll(size, 1)
    later = np.flatnonzero(place > 0)
    order = later[np.argsort(place[later], kind="stable")]
    position = np.append(place[:1] * 0, place[order])
    sums = np.cumsum(np.append(np.array([total], dtype=kind), change[order]))
    last = np.append(position[1:] != position[:-1], True).astype(bool)
    position, sums = position[last], sums[last]
    moment = sums.copy()
    np.add.at(moment, np.searchsorted(position, place), most.astype(kind) - size)
    return SummedCurve(position, sums, moment)


def _lasting(curve: WorkerCurve) -> tuple[WorkerCurve, Exact]:
    """Return the steps that take time, and the most that is held at the moment at which each of them begins.

    Steps that take none are at the moment at which the next one that takes time begins; after the last, the first.
    """
    lasting = np.flatnonzero(curve.duration)
    following = np.searchsorted(lasting, np.arange(len(curve.size))) % len(lasting)
    most = curve.size[lasting]
    np.maximum.at(most, following, curve.size)
    return WorkerCurve(curve.size[lasting], curve.duration[lasting]), most


def whole_ratios(costs: Sequence[float | Fraction]) -> Exact:
    """Return whole numbers in exactly the ratios of the costs."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = lcm(*(denominator for _, denominator in ratios))
    return np.array([numerator * (scale // denominator) for numerator, denominator in ratios], dtype=object)


def memory_by_task(model: Model, contents: str) -> Ints:
    """Simulate one worker and return the bytes that it holds during each task, its input as `data` of the first stage.

    CDP-v1's rule has the parameters updated after the whole pass, as a training loop does. The memory during each task
    does not depend on the times of tasks: here each takes a slot.
    """
    schedule, shape, slots = SCHEDULES["multi-cdp"], Shape(model.n, 1), 2 * model.n
    model, once = counted_once(schedule, shape, CDP_V1, model)
    program = derive(schedule, model, 1, shape=shape, rule=CDP_V1, once=once)
    costs = node_costs(program, Model.unit(model.n), Cluster.unit(), DEFAULT)
    curves = memory.memory_by_category(program, *find_engine("fast")(program, costs))

    def in_slots(category: Category) -> Ints:
        """Return the bytes of a category in each slot."""
        rows = np.flatnonzero(curves["category"] == category)
        row = np.searchsorted(curves["time"][rows], np.arange(slots), side="right")
        return np.append(0, curves["size"][rows])[row]

    size = in_slots(Category.ACTIVATIONS)
    if contents == "activations":
        return size - model.stages[0].data
    size = size + in_slots(Category.GRADIENTS)
    return size if contents == "gradients" else size + model.size("parameters").sum()


def task_steps(model: Model, contents: str) -> list[Ints]:
    """Return the bytes that one worker holds during each step of each task; a task without a curve is one step.

    A step counts what the other stages hold during its task, and what its own stage still needs.
    """
    unread = [
        stage.curve.unread_input(model.fresh_input(j)) if stage.curve else 0 for j, stage in enumerate(model.stages)
    ]
    lean = replace(model, stages=tuple(map(_lean, model.stages, unread)))
    tasks = []
    for k, size in enumerate(memory_by_task(lean, contents)):
        j = min(k, 2 * model.n - 1 - k)
        stage, gradient = model.stages[j], model.output_gradient(j)
        if stage.curve is None:
            tasks.append(np.array([size]))
        elif k < model.n:
            others = size - stage.activation - stage.forward_transient
            tasks.append(others + stage.curve.forward.needed(unread[j]))
        else:
            others = size - (stage.activation - unread[j]) - gradient - stage.backward_transient
            needed = stage.curve.backward.needed(model.fresh_input(j), gradient)
            complete = np.array(stage.curve.backward.gradients or 0) * (contents != "activations")
            tasks.append(others + needed + complete)
    return tasks


def _lean(stage: Stage, unread: int) -> Stage:
    """Return a stage without its curve, an input that ends with its forward, and gradients that its backward makes."""
    if stage.curve is None:
        return stage
    kept = {"activation": stage.activation - unread, "forward_transient": stage.forward_transient + unread}
    first = 0 if stage.curve.backward.gradients else stage.first_gradients
    return replace(stage, curve=None, unused_input=0, first_gradients=first, **kept)


def step_costs(model: Model, axis: str, costs: Sequence[float]) -> list[float | Fraction]:
    """Return the share of a pass that each step takes, in any unit; `costs` has the tasks without steps.

    On a roofline a step takes the time of its operations or of the bytes that it moves, whichever is longer.
    """
    found: list[float | Fraction] = []
    for k, cost in enumerate(costs):
        stage = model.stages[min(k, 2 * model.n - 1 - k)]
        if stage.curve is None:
            found.append(cost)
            continue
        steps = stage.curve.forward if k < model.n else stage.curve.backward
        if axis.startswith("roofline"):
            speed, bandwidth = roofline(axis.partition(":")[2])
            found += [roofline_time(*each, speed, bandwidth) for each in zip(steps.cost, steps.moved, strict=True)]
        else:
            found += [Fraction(part, 10**9 if axis == "measured" else 1) for part in steps.cost]
    return found


def task_costs(model: Model, axis: str) -> list[float]:
    """Return the share of a pass that each task takes, by an axis and in any unit: the forwards, then the backwards."""
    costs = [stage.forward for stage in model.stages] + [stage.backward for stage in reversed(model.stages)]
    for k, cost in enumerate(costs):
        if isinstance(cost, Work) == (axis == "measured"):
            stage = f"stage {k if k < model.n else 2 * model.n - 1 - k}"
            kind, remedy = ("a time", "take axis measured")
            if axis == "measured":
                kind, remedy = "work", "take axis flops, or give a model of times"
            raise RequestError(stage, f"is {kind}, which is not what axis {axis!r} goes by; {remedy}")
    if not axis.startswith("roofline"):
        return [float(cost) for cost in costs]
    speed, bandwidth = roofline(axis.partition(":")[2])
    pairs = zip(costs, bytes_moved(model), strict=True)
    return [roofline_time(cost, moved, speed, bandwidth) for cost, moved in pairs]


def roofline(device: str) -> tuple[float, float]:
    """Return the peaks that bound a layer on one of `ROOFLINE_DEVICES`: operations per second, and bytes per second."""
    name, _, precision = device.partition("-")
    group = presets.cluster(_CLUSTERS[name]).devices[0]
    assert group.speeds is not None and group.memory_bandwidth is not None
    return group.speeds.known[precision or "fp32"], group.memory_bandwidth


def bytes_moved(model: Model) -> list[int]:
    """Return the bytes that each task reads and writes at least, in the order of `task_costs`.

    A forward reads its parameters, and writes and reads each tensor that it keeps: autograd keeps the tensors that
    operations read or make. Its input is among them; it was written before if the stage before keeps it, too. A
    backward reads all that again, writes and reads a gradient of each, and writes those of its parameters. Tensors that
    are neither kept nor parameters, such as the scores of attention, are taken to stay in caches.
    """
    kept, parameters = model.size("activation"), model.size("parameters")
    written_before = np.append(0, model.size("kept_output")[:-1])
    forward = 2 * kept - written_before + parameters
    backward = 3 * kept + parameters + model.size("gradients")
    moved: list[int] = [*forward.tolist(), *backward[::-1].tolist()]
    return moved


def bytes_text(size: float | Fraction) -> str:
    """Write bytes with three digits: "3.83 GB"."""
    from quantiphy import Quantity  # slow to import, and only text needs it

    return Quantity(float(size), "B").render(prec=2, strip_zeros=False)


def _check_options(axis: str, contents: str) -> None:
    """Refuse an unknown axis, device and contents."""
    name, colon, device = str(axis).partition(":")
    choose("axis", name, AXES)
    if name == "roofline":
        if not device:
            problem = f"roofline needs a device, such as roofline:a100; {suggestion('', ROOFLINE_DEVICES)}"
            raise RequestError("axis", problem)
        choose("device", device, ROOFLINE_DEVICES)
    elif colon:
        raise RequestError("axis", f"{name} is not of a device; leave {colon + device!r} out")
    choose("contents", contents, CURVE_CONTENTS)
