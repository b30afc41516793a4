"""Levels of memory of runs that differ in micro-batches alone, and how much more each is with each further unit."""

from dataclasses import dataclass

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.runs import Run
from cdpsim.studies.folding.matches import BACK, FRONT, Matches, match_buffers


@dataclass(frozen=True, eq=False)
class HeldLevels:
    """The peaks of a run's devices, and their levels at beginnings of buffers, where these grow."""

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


def growing_levels(before: Run, now: Run) -> HeldLevels | None:
    """Return what devices of the second of two runs hold, and how much more with each unit; None if not alike.

    A device holds most right after it has begun to hold something. What it holds then grows by as much with each unit,
    so that another moment may be the peak later than now.
    """
    matches, buffers = match_buffers(now.program, before.program), now.program.buffers
    if matches is None:
        return None
    earlier, levels, middle = before.held_levels[0], now.held_levels[0], matches.middle
    grown = levels.take(matches.now, axis=1) - earlier.take(matches.before, axis=1)
    if (grown < 0).any() or not middle.grows_alike(earlier, levels, grown) or not _lives_repeat(before, now, matches):
        return None
    rows = np.concatenate([matches.now, *middle.again])
    grown = np.concatenate([grown, *(grown[:, match] for match in middle.match)], axis=1)
    rising = np.flatnonzero(grown.any(axis=0))  # levels of others are among the peaks
    rows, grown = rows[rising], grown[:, rising]
    held = np.concatenate(buffers.of_devices)[rows]
    return HeldLevels(now.peaks, buffers.device[held], buffers.category[held], levels[:, rows], grown)


def _lives_repeat(before: Run, now: Run, matches: Matches) -> bool:
    """Return whether, of each class that grows in number, as many are held at once with each further unit, or one more.

    As many are if each half begins and ends as much later, and the first one has ended before the back half begins:
    until then more may come together in a longer run. One more is if none ends before the last has begun, nor will.
    """
    spans = []
    for run, rows in ((before, matches.before), (now, matches.now)):
        of_devices = np.concatenate(run.program.buffers.of_devices)[rows]
        spans.append([span[of_devices] for span in run.spans])
    begin, end = spans[1]
    begin_grows, end_grows = (late - early for early, late in zip(*spans, strict=True))
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
