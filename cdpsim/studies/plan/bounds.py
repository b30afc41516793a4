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
from cdpsim.studies.plan.loads import DATA_AXES, HeldBytes, Loads, StepTimes, load_case

__all__ = ["Bounds", "Loads", "Sizes", "bound_candidates", "loads_of"]

ROUNDING = 1 - 1e-9  # of seconds, which sums in another order may miss by less


class Sizes(NamedTuple):
    """Columns over candidates: the case, its micro-batches, and its data ranks, which are replicas x shard."""

    case: Ints
    m: Ints
    replicas: Ints  # as the option says
    shard: Ints  # as the option says; 1: none
    zero: Ints
    resharded: Flags | bool = False  # whether what is gathered may go before a stage's last use in a step


class Bounds(NamedTuple):
    """Columns over candidates: the least time of a step, in seconds or slots, and the least peak of memory."""

    step: Floats
    memory: Ints


def loads_of(request: Request) -> Loads:
    """Return what a case costs, given a request of it with few micro-batches and without data ranks."""
    return load_case(request)


def bound_candidates(loads: Sequence[Loads], sizes: Sizes, most: float = np.inf) -> Bounds:
    """Return bounds of all candidates of some cases: none of them is more than its simulation gives.

    The step of a candidate that needs more memory than `most` is not looked into: its bound is 0.
    """
    case, m, replicas, shard, zero = (np.asarray(column, dtype=np.int64) for column in sizes[:5])
    own = np.array([each.own_zero for each in loads])[case]
    zero = np.where(own > 0, own, np.where((shard > 1) | (zero == 3), zero, 0))
    replicas, shard = np.where(own > 0, 1, replicas), np.where(own > 0, replicas * shard, shard)
    axis = np.where((replicas * shard == 1) & (zero < 3), 0, np.where(zero == 0, 1, 2))
    rows = CandidateColumns(case, m, replicas, shard, zero, axis)
    memory, step = _memory(loads, rows, np.broadcast_to(sizes.resharded, len(m))), np.zeros(len(m))
    fits = np.flatnonzero(memory <= most)
    if len(fits):
        step[fits] = _least_steps(loads, CandidateColumns(*(column[fits] for column in rows)))
    exact = np.array([each.in_slots for each in loads])[case]
    return Bounds(np.where(exact, np.ceil(step - 1e-6), step * ROUNDING), memory)


class CandidateColumns(NamedTuple):
    """Columns over candidates as they are bound: a stage of ZeRO of a schedule's own is theirs."""

    case: Ints
    m: Ints
    replicas: Ints
    shard: Ints
    zero: Ints
    axis: Ints  # of data ranks

    def distinct(self, *columns: Ints) -> tuple[list[list[int]], Ints]:
        """Return the distinct rows of some columns beside the case, and which of them each candidate has."""
        keys, number = np.unique(np.stack([self.case, *columns]), axis=1, return_inverse=True)
        return keys.T.tolist(), number.ravel()


def _least_steps(loads: Sequence[Loads], rows: CandidateColumns) -> Floats:
    """Return the least time of a step: the longest path without exchanges, with them, or the exchanges alone."""
    pairs, shape = rows.distinct(rows.m)
    shapes: list[StepTimes] = [loads[k].times_of(m) for k, m in pairs]
    keys, ranks = rows.distinct(rows.replicas, rows.shard, rows.zero)
    exchanges: list[ExchangeTimes] = [loads[k].exchanges(*key) for k, *key in keys]
    axis = rows.axis
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
    found = np.maximum(whole[shape, axis], stream[:, 0] + rows.m * stream[:, 1])
    found = np.maximum(found, (after_end[shape, axis] + extra_end[ranks]).max(axis=1, initial=0))
    result: Floats = np.maximum(found, (after_sums[shape, axis] + extra_sums[ranks]).max(axis=1, initial=0))
    return result


def _filled_up(table: Floats, width: int, rows: int) -> Floats:
    """Return a table with so many columns; those that it lacks are -inf."""
    full = np.full((rows, width), -np.inf)
    full[:, : table.shape[1]] = table
    return full


def _memory(loads: Sequence[Loads], rows: CandidateColumns, resharded: Flags) -> Ints:
    """Return the least peak: activations, and the shares of parameters, gradients and optimizer states.

    Where parameters are split, stages are run layer by layer, and hold what is known of that; the parameters of the
    stage at work may be there as a whole.
    """
    pairs, shape = rows.distinct(rows.m)
    shapes: list[HeldBytes] = [loads[k].held_of(m) for k, m in pairs]
    stays, once = np.array([(each.gathers_for_step, each.sums_once) for each in loads])[rows.case].T
    zero, axis = np.where(rows.axis == 2, rows.zero, 0), rows.axis
    points = max(len(each.moments) for each in shapes)
    held = np.zeros((len(shapes), points, 7), dtype=np.int64)
    for row, each in zip(held, shapes, strict=True):
        row[: len(each.moments)] = each.moments
    activations, parameters, gradients, optimizer, stash, own, sums = np.moveaxis(held[shape], 2, 0)
    split, ranks = (zero == 3)[:, None], rows.shard[:, None]
    whole = np.where((stays & ~resharded)[:, None] & split, np.minimum(own, parameters), 0)
    peak = np.where(split, stash, activations)
    peak += whole + (parameters - whole) // np.where(split, ranks, 1)
    sums = np.where(once[:, None] & (zero[:, None] >= 2), sums, 0)
    shared = np.where(zero[:, None] >= 2, ranks, 1)
    peak += (
        sums + np.where(split, 0, (gradients - sums) // shared) + optimizer // np.where(zero[:, None] >= 1, ranks, 1)
    )
    measured = np.array([each.peak for each in shapes])[shape]
    least: Ints = peak.max(axis=1)
    return np.where(axis == 0, np.maximum(least, measured), least)
