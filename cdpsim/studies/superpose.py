"""Fig. 4: what N workers hold per worker, from the memory of one worker's forward and backward.

One worker's curve m(s), s a share of its pass, comes out of simulating it. Workers that go simultaneously (DP) need
max m(s) each; workers that go cyclically (CDP), each 1/N of a pass after the one before, max over s of the mean of
m(s + i/N). The sum is exact: m is a step function of whole bytes over whole numbers (see `whole`), and because the sum
repeats after 1/N of a pass, the steps of one curve, folded onto that share, are all of its steps.

A layer counts with all that it holds for the whole of its forward and backward. Between the ends of layers m is so an
upper bound, and the reduction a lower one; max m is what operators, followed one by one, peak at (see the tests).
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim import presets
from cdpsim.errors import RequestError, choose, suggestion, whole_number
from cdpsim.files.units import Work
from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category
from cdpsim.program.assembly import counted_once, derive
from cdpsim.schedules import SCHEDULES
from cdpsim.schedules.rule import CDP_V1
from cdpsim.schedules.shape import Shape
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import find_engine
from cdpsim.trace.metrics import memory

Exact = NDArray[Any]  # int64, or Python's own integers where that is too narrow


# Devices that bound layers, and the clusters that ship with them. Dense float32, or TensorFloat-32, which PyTorch takes
# for convolutions unless told otherwise.
_CLUSTERS = MappingProxyType({"v100": "v100-node", "a100": "a100-nodes", "h100": "h100-node", "h200": "h200-node"})
DEVICES = ("v100", "a100", "a100-tf32", "h100", "h100-tf32", "h200", "h200-tf32")
AXES = ("flops", "roofline", "measured")
CONTENTS = ("activations", "gradients", "constants")
# What the paper says of its models (Fig. 4 and section 5).
PAPER = MappingProxyType({"resnet50": "30 % less at N = 32", "vit-b16": "from 3.9 GB to 2.3 GB, 42 % less at N = 32"})


class Curve(NamedTuple):
    """One worker's memory over one pass, a step for each task: forwards, then backwards."""

    size: Exact  # bytes
    duration: Exact  # whole numbers above 0, of whatever unit


class Superposition(NamedTuple):
    """What a worker holds at most under DP, and on average over N workers at most under CDP."""

    model: str
    n: int
    axis: str
    contents: str
    dp: int
    cdp: Fraction

    @property
    def reduction(self) -> Fraction:
        """Which part of DP's memory CDP saves; none of nothing."""
        return 1 - self.cdp / self.dp if self.dp else Fraction(0)

    def row(self) -> dict[str, str | int | float]:
        """Give the outcome as JSON has it."""
        cdp = int(self.cdp) if self.cdp.denominator == 1 else float(self.cdp)
        asked: dict[str, str | int | float] = {"model": self.model, "n": self.n, "axis": self.axis}
        return asked | {
            "contents": self.contents,
            "dp_bytes": self.dp,
            "cdp_bytes": cdp,
            "reduction": float(self.reduction),
        }


def superpose(
    model: str | Path | Model, n: int, *, axis: str = "flops", contents: str = "activations"
) -> Superposition:
    """Extrapolate one worker's memory to n workers.

    `model` is one that ships with the package, a file, or a `Model` whose stages are the layers. `axis` is what a
    layer's share of the pass goes by: "flops", "roofline:DEVICE" (one of `DEVICES`) or "measured", for a model of
    times. `contents`: "activations" (and temporaries, and gradients of activations), "gradients" (adds inputs and
    gradients of parameters), "constants" (adds a constant of the size of the parameters).
    """
    n = whole_number("n", n, at_least=1)
    found = worker_curve(model, axis=axis, contents=contents)
    _, total = fold(found, n)
    name = (model.name or "model") if isinstance(model, Model) else str(model)
    return Superposition(name, n, axis, contents, int(found.size.max()), Fraction(int(total.max()), n))


def worker_curve(model: str | Path | Model, *, axis: str = "flops", contents: str = "activations") -> Curve:
    """Give one worker's memory over one pass; the request as `superpose` takes it."""
    check(axis, contents)
    model = find_model(model)
    return Curve(held(model, contents), whole(passing(model, axis)))


def fold(curve: Curve, n: int) -> tuple[Exact, Exact]:
    """Sum n workers, each 1/n of a pass after the one before, over that share of a pass, after which it repeats.

    (position, total): from each position on, n workers hold that total. Positions are in 1/n of the curve's unit, from
    0 up to the whole pass, which is 1/n of one.
    """
    ends = np.cumsum(curve.duration.astype(object))
    span = ends[-1]
    narrow = n * max(span, int(curve.size.max())) < 2**63
    size, begin = (
        column.astype(np.int64 if narrow else object) for column in (curve.size, n * (ends - curve.duration))
    )
    # At first worker i is at i/n of the pass: how many of them are in each task.
    first = -(-begin // span)
    total = (size * np.diff(np.append(first, n))).sum()
    # Then somebody comes to each task once; whoever stood at its beginning at first has been counted.
    place, change = begin % span, size - np.roll(size, 1)
    some = np.flatnonzero(place > 0)
    order = some[np.argsort(place[some], kind="stable")]
    position = np.append(place[:1] * 0, place[order])
    sums = np.cumsum(np.append(np.array([total], dtype=size.dtype), change[order]))
    last = np.append(position[1:] != position[:-1], True).astype(bool)
    return position[last], sums[last]


def whole(costs: Sequence[float]) -> Exact:
    """Give whole numbers in exactly the ratios of the costs, every one of which is a fraction of a power of two."""
    ratios = [cost.as_integer_ratio() for cost in map(float, costs)]
    scale = max(denominator for _, denominator in ratios)
    return np.array([numerator * (scale // denominator) for numerator, denominator in ratios], dtype=object)


def held(model: Model, contents: str) -> Ints:
    """Simulate one worker and give what it holds during each task; its input is the `data` of the first stage.

    CDP-v1's rule has the parameters updated after the whole pass, as a training loop does. How long tasks take makes no
    difference to what is held during each: here a slot.
    """
    schedule, shape = SCHEDULES["multi-cdp"], Shape(model.n, 1)
    model, once = counted_once(schedule, shape, CDP_V1, model)
    program = derive(schedule, model, 1, shape=shape, rule=CDP_V1, once=once)
    duration = np.zeros(program.nodes, dtype=np.int64)
    duration[: 2 * model.n] = 1
    rounds, release = np.ones(len(program.messages), dtype=np.int32), np.zeros(len(program.releases), dtype=np.int64)
    start, end = find_engine("fast")(program, Costs(duration, rounds, release))
    curves = memory.memory_by_category(program, start, end)
    size = _during(curves, Category.ACTIVATIONS, 2 * model.n)
    if contents == "activations":
        return size - model.stages[0].data
    size = size + _during(curves, Category.GRADIENTS, 2 * model.n)
    return size if contents == "gradients" else size + model.size("parameters").sum()


def _during(curves: dict[str, Ints], category: Category, slots: int) -> Ints:
    """What is held of a category in each slot."""
    rows = np.flatnonzero(curves["category"] == category)
    row = np.searchsorted(curves["time"][rows], np.arange(slots), side="right")
    return np.append(0, curves["size"][rows])[row]


def passing(model: Model, axis: str) -> list[float]:
    """How far each task brings a micro-batch on its way, by an axis: the forwards, then the backwards."""
    costs = [stage.forward for stage in model.stages] + [stage.backward for stage in reversed(model.stages)]
    wanted = axis != "measured"
    for k, cost in enumerate(costs):
        if isinstance(cost, Work) != wanted:
            stage = f"stage {k if k < model.n else 2 * model.n - 1 - k}"
            is_, remedy = (
                ("a time", "take axis measured") if wanted else ("work", "take axis flops, or give a model of times")
            )
            raise RequestError(stage, f"is {is_}, which is not what axis {axis!r} goes by; {remedy}")
    if not axis.startswith("roofline"):
        return [float(cost) for cost in costs]
    speed, bandwidth = roofline(axis.partition(":")[2])
    pairs = zip(costs, bytes_moved(model), strict=True)
    return [max(float(cost) / speed, moved / bandwidth) for cost, moved in pairs]


def roofline(device: str) -> tuple[float, float]:
    """Give the peaks that bound a layer on one of `DEVICES`: operations per second, and bytes per second."""
    name, _, precision = device.partition("-")
    group = presets.cluster(_CLUSTERS[name]).devices[0]
    assert group.speeds is not None and group.memory_bandwidth is not None
    return group.speeds.known[precision or "fp32"], group.memory_bandwidth


def bytes_moved(model: Model) -> list[int]:
    """How many bytes each task reads and writes at least, as far as a model file says it, in the order of `passing`.

    A forward reads its parameters, and writes and reads each tensor that it keeps: autograd keeps what operations read
    or make. Its input is among them; it was written before if the stage before keeps it, too. A backward reads all that
    again, writes and reads a gradient of each, and writes those of its parameters. What is neither kept nor a
    parameter, such as the scores of attention, is taken to stay in caches.
    """
    kept, parameters = model.size("activation"), model.size("parameters")
    written_before = np.append(0, model.size("kept_output")[:-1])
    forward = 2 * kept - written_before + parameters
    backward = 3 * kept + parameters + model.size("gradients")
    moved: list[int] = [*forward.tolist(), *backward[::-1].tolist()]
    return moved


def amount(size: float | Fraction) -> str:
    """Say bytes in three digits: "3.83 GB"."""
    from quantiphy import Quantity  # slow to import, and only text needs it

    return Quantity(float(size), "B").render(prec=2, strip_zeros=False)


def percent(part: Fraction) -> str:
    """Say a part of a whole: "42.0 %"."""
    return f"{float(100 * part):.1f} %"


def check(axis: str, contents: str) -> None:
    """Refuse an axis, a device and contents that there are not."""
    name, colon, device = str(axis).partition(":")
    choose("axis", name, AXES)
    if name == "roofline":
        if not device:
            raise RequestError("axis", f"roofline needs a device, such as roofline:a100; {suggestion('', DEVICES)}")
        choose("device", device, DEVICES)
    elif colon:
        raise RequestError("axis", f"{name} is not of a device; leave {colon + device!r} out")
    choose("contents", contents, CONTENTS)


def find_model(model: str | Path | Model) -> Model:
    """A model that ships with the package, by its name, or that of a file, or itself."""
    found = presets.find_model(model, beside=())
    if found.is_unit:
        raise RequestError("model", "is of slots, which have no bytes; give stages with sizes")
    return found
