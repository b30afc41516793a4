"""Moments at which devices begin and end to hold something: whether more micro-batches leave their order as it is."""

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times
from cdpsim.program import Program
from cdpsim.runs import Run
from cdpsim.studies.folding.nodes import ALL, BACK, FRONT, FurtherTimes, GrowingTimes
from cdpsim.trace.metrics import memory
from cdpsim.trace.metrics.steady import PRECISION


def keeps_moments(run: Run, times: FurtherTimes) -> bool:
    """Return whether each device begins and ends to hold things in the same order at other times of its nodes.

    Moments that are equal stay equal. The two halves of a class are looked at one after the other.
    """
    buffers = run.program.buffers
    now = np.concatenate(memory.buffer_spans(buffers, run.start, run.end))
    with np.errstate(invalid="ignore"):
        then = np.concatenate(memory.buffer_spans(buffers, times.start, times.end))
    known, begins = ~np.isnan(then), np.arange(len(now)) < len(buffers)
    room = 0.0 if run.in_slots else PRECISION * float(np.max(then[known & (np.tile(buffers.size, 2) > 0)], initial=0))
    of_devices = _rows_of_devices(run.program, times.part, known)
    return all(_keep_order(begins[rows], now[rows], then[rows], room) for rows in of_devices)


def _rows_of_devices(program: Program, part: Ints, known: Flags) -> list[Ints]:
    """Return the rows of what begins, and then of what ends, that is known: of each device and half of its classes."""
    buffers = program.buffers
    parts = np.concatenate([part[buffers.begin >> 1], part[buffers.end >> 1]])
    parts[: len(buffers)][buffers.begin < 0] = ALL
    np.maximum.at(parts[len(buffers) :], buffers.kept, part[buffers.kept_until >> 1])
    device, known = np.tile(buffers.device, 2), known & (np.tile(buffers.size, 2) > 0)
    halves = [np.flatnonzero(known & ((parts == half) | (parts == ALL))) for half in (FRONT, BACK)]
    return [rows[device[rows] == d] for d in range(program.devices) for rows in halves]


def _keep_order(begins: Flags, now: Times, then: Times, room: float) -> bool:
    """Return whether what begins and what ends is in the same order now and then, and at one time if it is now."""
    if not len(now):
        return True
    order = np.argsort(now, kind="stable")
    begins, now, then = begins[order], now[order], then[order]
    group = np.flatnonzero(np.append(True, np.diff(now) > room))  # at one time
    first = np.repeat(group, np.diff(np.append(group, len(now))))
    for kind in (True, False):
        latest = np.append(-np.inf, np.maximum.accumulate(np.where(begins == kind, then, -np.inf)))
        if (then - latest[first] <= room)[begins != kind].any():
            return False
    mixed = np.logical_or.reduceat(begins, group) & ~np.logical_and.reduceat(begins, group)
    spread = np.maximum.reduceat(then, group) - np.minimum.reduceat(then, group)
    return bool((spread[mixed] <= room).all())


def least_gap(run: Run, times: GrowingTimes) -> float:
    """Return the least time between what begins and what ends on a device; 0 if units may change their order.

    What comes later then grows at least as much, and what is at one time grows alike.
    """
    buffers, one = run.program.buffers, times.after(1)
    with np.errstate(invalid="ignore"):
        now, grows, then = (
            np.concatenate(memory.buffer_spans(buffers, *spans))
            for spans in ((times.start, times.end), (times.start_grows, times.end_grows), one[:2])
        )
    known, begins = ~np.isnan(then), np.arange(len(now)) < len(buffers)
    noise = 0.0 if run.in_slots else PRECISION * float(np.max(grows[known], initial=0))
    if (np.abs(then - now - grows)[known] > times.room).any():  # of several ends, another one comes to be the last
        return 0.0
    of_devices = _rows_of_devices(run.program, times.part, known)
    return min((_gap_in_order(begins[r], now[r], grows[r], times.room, noise) for r in of_devices), default=np.inf)


def _gap_in_order(begins: Flags, now: Times, grows: Times, room: float, noise: float) -> float:
    """Return the least time between a beginning and an end; 0 if the later one, or one of one time, grows less."""
    if not len(now):
        return np.inf
    order = np.argsort(now, kind="stable")
    begins, now, grows = begins[order], now[order], grows[order]
    group = np.flatnonzero(np.append(True, np.diff(now) > room))  # at one time
    first, gap = np.repeat(group, np.diff(np.append(group, len(now)))), np.inf
    for kind in (True, False):
        latest, most = (
            np.append(-np.inf, np.maximum.accumulate(np.where(begins == kind, column, -np.inf)))[first]
            for column in (now, grows)
        )
        others = begins != kind
        if (grows + noise < most)[others].any():
            return 0.0
        gap = min(gap, float((now - latest)[others].min(initial=np.inf)))
    mixed = np.logical_or.reduceat(begins, group) & ~np.logical_and.reduceat(begins, group)
    spread = np.maximum.reduceat(grows, group) - np.minimum.reduceat(grows, group)
    return 0.0 if (spread[mixed] > noise).any() else gap
