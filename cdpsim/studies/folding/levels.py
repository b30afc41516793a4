"""Levels of memory of runs that differ in micro-batches alone, and how much more each is with each further unit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.runs import Run
from cdpsim.studies.folding.matches import BACK, FRONT, Matches, match_buffers
from cdpsim.trace.metrics import memory


@dataclass(frozen=True, eq=False)
class HeldLevels:
    """The peaks of a run's devices, and their levels at beginnings of buffers that all three runs have."""

    peaks: Ints
    device: Ints
    category: Ints
    levels: Ints  # by category, and in all
    grown: Ints  # with each unit

    def after(self, units: int) -> Ints:
        """Return the peaks so many units later."""
        peaks, levels = self.peaks.copy(), self.levels + units * self.grown
        np.maximum.at(peaks, (self.device, self.category), levels[0])
        np.maximum.at(peaks[:, -1], self.device, levels[1])
        return peaks


def growing_levels(runs: Sequence[Run]) -> HeldLevels | None:
    """Return what devices of the last of three runs hold, and how much more with each unit; None if not alike.

    A device holds most right after it has begun to hold something. What it holds then grows by as much with each unit,
    so that another moment may be the peak later than now.
    """
    *before, program = (run.program for run in runs)
    matches = match_buffers(program, *before)
    if matches is None or matches.middle is None:
        return None
    levels, middle = [run.held_levels[0] for run in runs], matches.middle
    first, second, third = (level.take(rows, axis=1) for level, rows in zip(levels, matches.rows, strict=True))
    grown = third - second
    if (grown != second - first).any() or (grown < 0).any() or not middle.grows_alike(levels[1], levels[2], grown):
        return None
    if not _lives_repeat(runs[1:], matches):
        return None
    rows = np.concatenate([matches.rows[2], *middle.again])
    grown = np.concatenate([grown, *(grown[:, match] for match in middle.match)], axis=1)
    rising = np.flatnonzero(grown.any(axis=0))  # levels of others are among the peaks
    rows, grown = rows[rising], grown[:, rising]
    held = np.concatenate(program.buffers.of_devices)[rows]
    at = program.buffers.device[held], program.buffers.category[held]
    return HeldLevels(runs[2].peaks, *at, levels[2][:, rows], grown)


def _lives_repeat(runs: Sequence[Run], matches: Matches) -> bool:
    """Return whether, of each class that grows in number, as many are held at once with each further unit, or one more.

    As many are if each half begins and ends as much later, and the first one has ended before the back half begins:
    until then more may come together in a longer run. One more is if none ends before the last has begun, nor will.
    """
    spans = []
    for run, rows in zip(runs, matches.rows[1:], strict=True):
        buffers = run.program.buffers
        of_devices = np.concatenate(buffers.of_devices)[rows]
        spans.append([span[of_devices] for span in memory.buffer_spans(buffers, run.start, run.end)])
    (begin, end), (begin_grows, end_grows) = (
        spans[1],
        (now - before for now, before in zip(spans[1], spans[0], strict=True)),
    )
    front, back = (np.flatnonzero(matches.part == half) for half in (FRONT, BACK))
    if not len(front):
        return True
    at, also = group_starts(matches.group[front]), group_starts(matches.group[back])
    moves = np.logical_and.reduceat(begin_grows[front] == end_grows[front], at)
    moves &= np.logical_and.reduceat(begin_grows[back] == end_grows[back], also)
    settled = end[front[at]] <= np.minimum.reduceat(begin[back], also)
    stays = np.minimum.reduceat(end[front], at) >= np.maximum.reduceat(begin[back], also)
    stays &= np.minimum.reduceat(end_grows[front], at) >= np.maximum.reduceat(begin_grows[back], also)
    return bool(((moves & settled) | stays).all())
