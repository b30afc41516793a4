"""Levels of memory of runs that differ in micro-batches alone, and how much more each is with each further unit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.runs import Run
from cdpsim.studies.folding.matches import match_buffers


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
    if matches is None:
        return None
    first, second, third = (run.held_levels[0].take(rows, axis=1) for run, rows in zip(runs, matches.rows, strict=True))
    grown = third - second
    if (grown != second - first).any() or (grown < 0).any():
        return None
    rows = np.flatnonzero(grown.any(axis=0))  # levels of others are among the peaks
    held = np.concatenate(program.buffers.of_devices)[matches.rows[-1][rows]]
    return HeldLevels(
        runs[2].peaks, program.buffers.device[held], program.buffers.category[held], third[:, rows], grown[:, rows]
    )
