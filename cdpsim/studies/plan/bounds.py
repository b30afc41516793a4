"""Lower bounds of the step and of the memory of candidates, before any of them is simulated."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Floats, Ints
from cdpsim.request import Request
from cdpsim.timing.costs import reached


class Sizes(NamedTuple):
    """Columns over candidates: their case, and the sizes by which candidates of a case differ."""

    case: Ints
    m: Ints
    replicas: Ints
    shard: Ints
    zero: Ints


class Bounds(NamedTuple):
    """Lower bounds of the step and of the memory of the fullest device, a row for each candidate."""

    step: Floats
    memory: Ints


class Loads(NamedTuple):
    """The work and the sizes of a case."""

    work: float
    parameters: int


def loads_of(request: Request) -> Loads:
    """Return the loads of a request without a data axis."""
    model = request.timed_model
    speed = reached(request.cluster, 1, model)[0]
    times = model.forward_time(speed) + model.backward_time(speed)
    shape = request.shape
    places = 1 if request.schedule.order.one_place else max(request.schedule.placement.devices(shape), 1)
    alone = request.schedule.order.lists is not None or request.schedule.is_line
    return Loads(float(times.sum()) / places if alone else 0.0, 0)


def bound_candidates(loads: Sequence[Loads], sizes: Sizes) -> Bounds:
    """Return lower bounds of the figures of candidates."""
    work = np.array([each.work for each in loads])
    step = (work[sizes.case] * sizes.m * (1 - 1e-9)).astype(np.float64)
    return Bounds(step, np.zeros(len(step), np.int64))
