"""Where messages stop hiding: the bandwidth from which on a training step is about as short as if they were free."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any, TypeVar

import msgspec
import numpy as np

from cdpsim.cluster import Cluster, Devices
from cdpsim.errors import RequestError
from cdpsim.runs import Run

PRECISION = 1e-6  # of the bandwidth that is found
_STEP = 4  # by which bandwidths are tried until the one that is looked for lies between two
MOST_SHARE = 100
_ROUNDING = 1e-9  # of a step
POINTS = 49  # of a curve
_LEAST, _MOST = 1e-3, 1e17  # bytes/s of what is tried; units.py takes some more

Runner = Callable[[Cluster], Run]
Struct = TypeVar("Struct", bound=msgspec.Struct)


@dataclass(frozen=True)
class BreakEven:
    """What a schedule's messages cost on a cluster, and from which bandwidth on they are hidden.

    `free` is the time of a training step if messages took no time, `step` that on the cluster as it is, and `exposed`
    the share of it by which it is longer. `latency` is by how much, as a share of `free`, it is longer if messages
    took their latency alone. `bandwidth` is what messages reach (the data sheet's times `achieved`) on the narrowest
    way between two of the run's devices (None: there is one device), and `break_even` what that has to be, all others
    scaled alike, for a step of at most (1 + share) * `free`: None if no bandwidth is enough, because latency is too
    long, and 0 if any is. `factor` is their quotient.
    """

    schedule: str
    rule: str
    n: int
    m: int
    devices: int
    free: float
    step: float
    exposed: float
    latency: float
    bandwidth: float | None
    break_even: float | None
    factor: float | None

    def to_builtins(self) -> dict[str, Any]:
        """Give all of it by name."""
        return asdict(self)


def breakeven(run: Runner, cluster: Cluster, share: float = 0.01) -> BreakEven:
    """Find from which bandwidth on the messages of a run are hidden, up to a share of the step.

    `run` makes the run on a cluster, such as `lambda cluster: simulate("multi-dp", 8, cluster=cluster)`. What is found
    is the largest of the bandwidths that do, to a millionth, where the step gets longer again: a step does not get
    shorter with less bandwidth.
    """
    if not 0 < share <= MOST_SHARE:
        raise RequestError("share", f"{share:g} is not between 0 and {MOST_SHARE}; give for example 0.01")
    own = run(cluster)
    devices = own.program.devices
    step, free = step_time(own), step_time(run(scaled(cluster, inf, latency=0)))
    narrowest = cluster.sized(devices).group_link(np.arange(devices))[1] if devices > 1 else None
    if narrowest == inf:
        problem = (
            "its links have no bandwidth that could be changed; take one with links (`cdpsim clusters` lists some)"
        )
        raise RequestError("cluster", problem)
    least = step_time(run(scaled(cluster, inf)))

    @cache
    def excess(slowness: float) -> float:
        return step_time(run(scaled(cluster, 1 / slowness))) - (1 + share) * free

    factor: float | None = 0.0
    if narrowest is not None:
        bounds = _LEAST / narrowest, _MOST / narrowest
        factor = None if least > (1 + share) * free else _threshold(excess, *bounds)
    return BreakEven(
        **_asked(own),
        devices=devices,
        free=free,
        step=step,
        exposed=_visible(1 - free / step),
        latency=_visible(least / free - 1),
        bandwidth=narrowest,
        break_even=None if factor is None else factor * (narrowest or 0.0),
        factor=factor,
    )


def _asked(run: Run) -> dict[str, Any]:
    rule = run.request["rule"]
    own = {name: run.request[name] for name in ("schedule", "n", "m")}
    return own | {"rule": rule if isinstance(rule, str) else "custom"}


def curve(run: Runner, cluster: Cluster, factors: Sequence[float]) -> list[float]:
    """Give the time of a training step where all bandwidths are so many times the cluster's."""
    return [step_time(run(scaled(cluster, factor))) for factor in factors]


def span(found: Sequence[BreakEven], points: int = POINTS) -> list[float]:
    """Give the factors, evenly spread in their logarithm, that show all break-evens and the cluster itself."""
    seen = [1.0, *(one.factor for one in found if one.factor)]
    return [float(f"{factor:.6g}") for factor in np.geomspace(min(seen) / 8, max(seen) * 8, points)]


def _visible(share: float) -> float:
    """Drop what is but the rounding of times."""
    return share if abs(share) > _ROUNDING else 0.0


def step_time(run: Run) -> float:
    """How long a training step takes once all is under way."""
    return float(run.at_rest.period)


def scaled(part: Struct, factor: float, latency: float = 1) -> Struct:
    """Give a cluster, or a part of it, whose bandwidths and latencies are so many times its own.

    The ways to its devices' hosts stay as they are: what takes them is no message.
    """
    changed: dict[str, object] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(part, Cluster) and name == "host":
            continue
        if isinstance(value, msgspec.Struct):
            changed[name] = scaled(value, factor, latency)
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            changed[name] = tuple(scaled(each, factor, latency) for each in value)
        elif name.startswith(("bandwidth", "latency")) and value is not None:
            changed[name] = value * (factor if name.startswith("bandwidth") else latency)
        elif name == "achieved" and factor == inf and not isinstance(part, Devices):
            changed[name] = None if value is None else 1.0  # of a bandwidth without limit there is no share
    return msgspec.structs.replace(part, **changed)


def _threshold(excess: Callable[[float], float], least: float, most: float) -> float | None:
    """Find the least factor that leaves no excess; 0 if all do, None if none does. `excess` is of its reciprocal."""
    slow = 1.0
    if excess(slow) > 0:
        while excess(slow / _STEP) > 0:
            slow /= _STEP
            if 1 / slow > most:
                return None
        low, high = slow / _STEP, slow
    else:
        while excess(slow * _STEP) <= 0:
            slow *= _STEP
            if 1 / slow < least:
                return 0.0
        low, high = slow, slow * _STEP
    return 1 / _crossing(excess, low, high)


def _crossing(excess: Callable[[float], float], low: float, high: float) -> float:
    """Close in on where the excess begins, between where there is none and where there is some.

    The rule of false position as Illinois has it (Dowell and Jarratt 1971): as a step is a piecewise linear function of
    the reciprocal of a bandwidth, a few runs do.
    """
    below, above, moved = excess(low), excess(high), 0
    while high - low > PRECISION * high:
        margin = PRECISION * high / 3
        middle = (low * above - high * below) / (above - below)
        middle = min(max(middle, low + margin), high - margin)
        if (here := excess(middle)) <= 0:
            low, below, above, moved = middle, here, above / 2 if moved < 0 else above, -1
        else:
            high, above, below, moved = middle, here, below / 2 if moved > 0 else below, 1
    return low
