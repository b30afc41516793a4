"""Break-even: the bandwidth from which on a training step is about as short as if messages took no time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, structs

from cdpsim.api import assemble, price, run
from cdpsim.cluster import Cluster, Devices
from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.compare import rule_word

BANDWIDTH_PRECISION = 1e-6  # relative error of a break-even
MOST_SHARE = 100
POINTS = 49  # of a curve
_STEP = 4  # factor between the bandwidths that are tried until two of them enclose the break-even
_ROUNDING = 1e-9  # relative to a training step
_LEAST, _MOST = 1e-3, 1e17  # bytes/s: the bandwidths between which a break-even is searched

Runner = Callable[[Cluster], Run]
AnyStruct = TypeVar("AnyStruct", bound=Struct)


@dataclass(frozen=True)
class BreakEven:
    """The cost of a schedule's messages on a cluster, and the bandwidth from which on they are hidden.

    `step` is the time of a training step on the cluster, and `free` that time if messages took no time. `exposed` is
    the difference as a share of `step`. `latency` is the excess over `free`, as a share of `free`, if messages took
    their latency alone. `bandwidth` is the one that messages reach (the data sheet's times `achieved`) on the narrowest
    route between two of the run's devices; it is None if there is one device. `break_even` is the least such bandwidth
    with a step of at most (1 + share) * `free`, all other bandwidths being scaled alike. It is None if no bandwidth is
    enough, because latency is too long, and 0 if any bandwidth is. `factor` is `break_even` over `bandwidth`.
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
        """Return all fields by name."""
        return asdict(self)


StepCurve = tuple[BreakEven, Sequence[float]]  # a break-even, and the step times that `step_times_at` returns


def find_break_even(run: Runner, cluster: Cluster, share: float = 0.01) -> BreakEven:
    """Find the bandwidth from which on the messages of a run are hidden, up to a share of the step.

    `run` makes the run on a cluster, such as `lambda cluster: simulate("multi-dp", 8, cluster=cluster)`. The search
    assumes that no step gets shorter with less bandwidth. It returns the break-even to a millionth.
    """
    if not 0 < share <= MOST_SHARE:
        raise RequestError("share", f"{share:g} is not between 0 and {MOST_SHARE}; give for example 0.01")
    on_cluster = run(cluster)
    request, devices = on_cluster.request, on_cluster.devices
    step, free = step_time(on_cluster), step_time(run(scale_links(cluster, inf, latency=0)))
    narrowest = request.cluster.sized(devices).group_link(np.arange(devices))[1] if devices > 1 else None
    if narrowest == inf:
        problem = "its links have no bandwidth that could be changed"
        raise RequestError("cluster", f"{problem}; take one with links (`cdpsim clusters` lists some)")
    with_latency = step_time(run(scale_links(cluster, inf)))

    @cache
    def excess(slowness: float) -> float:
        """Return by how much a step is too long where bandwidths are divided by `slowness`."""
        return step_time(run(scale_links(cluster, 1 / slowness))) - (1 + share) * free

    factor: float | None = 0.0
    if narrowest is not None:
        is_reached = with_latency <= (1 + share) * free
        factor = _threshold(excess, _LEAST / narrowest, _MOST / narrowest) if is_reached else None
    return BreakEven(
        **{name: request[name] for name in ("schedule", "n", "m")},
        rule=rule_word(request),
        devices=devices,
        free=free,
        step=step,
        exposed=_without_rounding(1 - free / step),
        latency=_without_rounding(with_latency / free - 1),
        bandwidth=narrowest,
        break_even=None if factor is None else factor * (narrowest or 0.0),
        factor=factor,
    )


def step_times_at(run: Runner, cluster: Cluster, factors: Sequence[float]) -> list[float]:
    """Return the time of a training step for each factor by which all of the cluster's bandwidths are multiplied."""
    return [step_time(run(scale_links(cluster, factor))) for factor in factors]


def bandwidth_factors(found: Sequence[BreakEven], points: int = POINTS) -> list[float]:
    """Return factors, evenly spaced in their logarithm, whose range has all break-evens and the cluster itself."""
    marked = [1.0, *(one.factor for one in found if one.factor)]
    return [float(f"{factor:.6g}") for factor in np.geomspace(min(marked) / 8, max(marked) * 8, points)]


def _without_rounding(share: float) -> float:
    """Return the share, or 0 where it is as small as rounding errors of times."""
    return share if abs(share) > _ROUNDING else 0.0


def step_time(run: Run) -> float:
    """Return the time of a training step in the steady state."""
    return float(run.steady_state.period)


def scale_links(part: AnyStruct, bandwidth: float, latency: float = 1) -> AnyStruct:
    """Return a cluster, or a part of it, with all bandwidths and latencies multiplied by these factors.

    The links to the devices' hosts stay as they are: no message takes them.
    """
    changed: dict[str, Any] = {}
    for name, value in structs.asdict(part).items():
        if value is None or (name == "host" and isinstance(part, Cluster)):
            continue
        if name.startswith("bandwidth"):
            changed[name] = value * bandwidth
        elif name.startswith("latency"):
            changed[name] = value * latency
        elif name == "achieved" and bandwidth == inf and not isinstance(part, Devices):
            changed[name] = 1.0  # an infinite bandwidth has no share
        elif isinstance(value, Struct):
            changed[name] = scale_links(value, bandwidth, latency)
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            changed[name] = tuple(scale_links(each, bandwidth, latency) for each in value)
    return structs.replace(part, **changed)


def _threshold(excess: Callable[[float], float], least: float, most: float) -> float | None:
    """Return the least bandwidth factor without excess; `excess` takes the factor's reciprocal.

    It is 0 if there is no excess down to `least`, and None if there is some up to `most`.
    """
    slowness = 1.0
    is_exposed = excess(slowness) > 0
    step = 1 / _STEP if is_exposed else _STEP
    while (excess(slowness * step) > 0) == is_exposed:
        slowness *= step
        if is_exposed and 1 / slowness > most:
            return None
        if not is_exposed and 1 / slowness < least:
            return 0.0
    return 1 / _crossing(excess, *sorted((slowness, slowness * step)))


def _crossing(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return where the excess begins, between `low`, which has none, and `high`, which has some.

    The Illinois variant of the rule of false position (Dowell and Jarratt 1971): as a step is a piecewise linear
    function of the reciprocal of a bandwidth, it needs only a few runs.
    """
    below, above, moved = excess(low), excess(high), 0
    while high - low > BANDWIDTH_PRECISION * high:
        margin = BANDWIDTH_PRECISION * high / 3
        middle = (low * above - high * below) / (above - below)
        middle = min(max(middle, low + margin), high - margin)
        if (here := excess(middle)) <= 0:
            low, below, above, moved = middle, here, above / 2 if moved < 0 else above, -1
        else:
            high, above, below, moved = middle, here, below / 2 if moved > 0 else below, 1
    return low


def runner_on_clusters(request: Request) -> Callable[[Cluster], Run]:
    """Return a function that runs a request on other clusters, by one program as long as that serves them."""
    program = assemble(request)

    def run_on(cluster: Cluster) -> Run:
        try:
            return run(program, price(program, request.model, cluster))
        except RequestError:
            asked = request.of(request.model, cluster)
            other = assemble(asked)
            return run(other, price(other, asked.model, asked.cluster))

    return run_on
