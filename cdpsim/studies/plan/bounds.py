"""Bounds of what a simulation will show: the least time of a training step, and the least peak of the fullest device.

The law behind them: a schedule whose devices have lists begins and ends these alike for all numbers of micro-batches.
So a step of any of them has the longest paths of a small program through such beginnings and ends, and what a device
does between them is its own work. Of other schedules it is the work of devices alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.request import Request
from cdpsim.studies.plan.exchange_times import ExchangeTimes
from cdpsim.studies.plan.loads import DATA_AXES, Loads, OfShape, load_case

__all__ = ["Bounds", "Loads", "Sizes", "bound_candidates", "loads_of"]

ROUNDING = 1 - 1e-9  # of seconds, which sums in another order may miss by less


class Sizes(NamedTuple):
    """Columns over candidates: the case, its micro-batches, and its data ranks, which are replicas x shard."""

    case: Ints
    m: Ints
    replicas: Ints  # as the option says
    shard: Ints  # as the option says; 1: none
    zero: Ints


class Bounds(NamedTuple):
    """Columns over candidates: the least time of a step, in seconds or slots, and the least peak of memory."""

    step: Floats
    memory: Ints


def loads_of(request: Request) -> Loads:
    """Return what a case costs, given a request of it with few micro-batches and without data ranks."""
    return load_case(request)


def bound_candidates(loads: Sequence[Loads], sizes: Sizes) -> Bounds:
    """Return bounds of all candidates of some cases: none of them is more than its simulation gives."""
    case, m, replicas, shard, zero = (np.asarray(column, dtype=np.int64) for column in sizes)
    own = np.array([each.own_zero for each in loads])[case]
    zero = np.where(own > 0, own, np.where((shard > 1) | (zero == 3), zero, 0))
    replicas, shard = np.where(own > 0, 1, replicas), np.where(own > 0, replicas * shard, shard)
    pairs, of_shape = np.unique(np.stack([case, m]), axis=1, return_inverse=True)
    shapes = [loads[k].of_shape(many) for k, many in pairs.T.tolist()]
    keys, of_ranks = np.unique(np.stack([case, replicas, shard, zero]), axis=1, return_inverse=True)
    exchanges = [loads[k].exchanges(*ranks) for k, *ranks in keys.T.tolist()]
    axis = np.where((replicas * shard == 1) & (zero < 3), 0, np.where(zero == 0, 1, 2))
    step = _least_steps(shapes, exchanges, of_shape.ravel(), of_ranks.ravel(), axis, m)
    stays, once = np.array([(each.gathers_for_step, each.sums_once) for each in loads])[case].T
    exact = np.array([each.in_slots for each in loads])[case]
    return Bounds(
        np.where(exact, np.ceil(step - 1e-6), step * ROUNDING),
        _memory(shapes, of_shape.ravel(), np.where(axis == 2, zero, 0), shard, axis, (stays, once)),
    )


def _least_steps(
    shapes: Sequence[OfShape], exchanges: Sequence[ExchangeTimes], shape: Ints, ranks: Ints, axis: Ints, m: Ints
) -> Floats:
    """Return the least time of a step: the longest path without exchanges, with them, or the exchanges alone."""
    width = max(each.after_end.shape[1] for each in shapes)
    whole = np.array([each.step for each in shapes])
    after_end, after_sums = (
        np.stack([_filled_up(getattr(each, name), width, DATA_AXES) for each in shapes])
        for name in ("after_end", "after_sums")
    )
    extra_end, extra_sums = (
        np.stack([_filled_up(getattr(each, name)[None], width, 1)[0] for each in exchanges])
        for name in ("behind_end", "behind_sums")
    )
    stream = np.array([(each.once, each.each) for each in exchanges])[ranks]
    found = np.maximum(whole[shape, axis], stream[:, 0] + m * stream[:, 1])
    found = np.maximum(found, (after_end[shape, axis] + extra_end[ranks]).max(axis=1, initial=0))
    result: Floats = np.maximum(found, (after_sums[shape, axis] + extra_sums[ranks]).max(axis=1, initial=0))
    return result


def _filled_up(table: Floats, width: int, rows: int) -> Floats:
    """Return a table with so many columns; those that it lacks are -inf."""
    full = np.full((rows, width), -np.inf)
    full[:, : table.shape[1]] = table
    return full


def _memory(
    shapes: Sequence[OfShape], shape: Ints, zero: Ints, shard: Ints, axis: Ints, whole_for: tuple[Flags, Flags]
) -> Ints:
    """Return the least peak: activations, and the shares of parameters, gradients and optimizer states.

    Where parameters are split, stages are run layer by layer, and only what forwards keep is known of activations; the
    parameters of the stage at work may be there as a whole.
    """
    stays, once = whole_for
    points = max(len(each.held) for each in shapes)
    held = np.zeros((len(shapes), points, 7), dtype=np.int64)
    for row, each in zip(held, shapes, strict=True):
        row[: len(each.held)] = each.held
    activations, parameters, gradients, optimizer, stash, own, sums = np.moveaxis(held[shape], 2, 0)
    split, ranks = (zero == 3)[:, None], shard[:, None]
    whole = np.where(stays[:, None] & split, np.minimum(own, parameters), 0)
    peak = np.where(split, stash, activations)
    peak += whole + (parameters - whole) // np.where(split, ranks, 1)
    sums = np.where(once[:, None] & (zero[:, None] >= 2), sums, 0)
    shared = np.where(zero[:, None] >= 2, ranks, 1)
    peak += (
        sums + np.where(split, 0, (gradients - sums) // shared) + optimizer // np.where(zero[:, None] >= 1, ranks, 1)
    )
    measured = np.array([each.memory for each in shapes])[shape]
    least: Ints = peak.max(axis=1)
    return np.where(axis == 0, np.maximum(least, measured), least)
