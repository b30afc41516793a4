"""Levels of memory of runs that differ in micro-batches alone, and how much more each is with each further unit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdpsim.numeric.columns import Ints, dense_ranks, group_starts, sort_by
from cdpsim.program import Buffers, Category, Program, once_a_program
from cdpsim.runs import Run
from cdpsim.studies.folding.nodes import Matches, classes_of_nodes, classify
from cdpsim.trace.metrics import memory
from cdpsim.trace.metrics.steady import PRECISION


@dataclass(frozen=True, eq=False)
class HeldLevels:
    """The levels of devices, by category and in all, at each moment at which a buffer begins."""

    now: Ints
    rows: Ints  # buffers that all three runs have
    further: Ints  # their levels
    grown: Ints  # with each unit

    def peaks(self, run: Run, units: int) -> Ints:
        """Return the peaks of a run's devices so many units later."""
        held, peaks = run.program.buffers, np.zeros_like(run.peaks)
        for of, level in ((slice(None), self.now), (self.rows, self.further + units * self.grown)):
            np.maximum.at(peaks, (held.device[of], held.category[of]), level[0])
            np.maximum.at(peaks[:, -1], held.device[of], level[1])
        return peaks


def growing_levels(runs: Sequence[Run]) -> list[HeldLevels] | None:
    """Return what devices of the last of three runs hold, and how much more with each unit; None if not alike.

    A device holds most right after it has begun to hold something. What it holds then grows by as much with each unit,
    so that another moment may be the peak later than now.
    """
    late = 0.0 if runs[2].in_slots else PRECISION * float(runs[2].end.max(initial=0))
    buffers = [_BuffersByClass.of(run, late) for run in runs]
    if any(not np.array_equal(buffers[0].classes, each.classes) for each in buffers[1:]):
        return None
    matches = Matches.of([each.first for each in buffers])
    if matches is None:
        return None
    rows, found = [each.order[row] for each, row in zip(buffers, matches.rows, strict=True)], []
    for levels in zip(*(each.levels for each in buffers), strict=True):
        at = [level[:, row] for level, row in zip(levels, rows, strict=True)]
        grown = at[2] - at[1]
        if (grown != at[1] - at[0]).any() or (grown < 0).any():
            return None
        found.append(HeldLevels(levels[2], rows[2], at[2], grown))
    return found


@dataclass(frozen=True, eq=False)
class _BuffersByClass:
    """The buffers of a program in classes, each in the order of their beginnings.

    The levels are what its device holds when each begins: of its category, and in all. A buffer may begin when another
    one ends, up to rounding, and so come before or behind it: there are levels for either.
    """

    classes: Ints
    order: Ints
    first: Ints
    levels: list[Ints]  # by category, and in all

    @classmethod
    def of(cls, run: Run, late: float) -> "_BuffersByClass":
        """Return the buffers of a run, which begin so much earlier or later; those of a class begin with its nodes."""
        buffers = run.program.buffers
        classes, number = _classes_of_buffers(run.program)
        begin, finish = memory.buffer_spans(buffers, run.start, run.end)
        ranks = dense_ranks(np.concatenate([begin, finish]))
        order, at = sort_by(number, ranks[: len(begin)]), ranks * run.program.devices + np.tile(buffers.device, 2)
        together = np.isin(at[: len(begin)], at[len(begin) :])
        levels = []
        for shift in (-late, late) if late else (0,):
            if late:
                ranks = dense_ranks(np.concatenate([np.where(together, begin, begin + shift), finish]))
            levels.append(_levels_held(buffers, ranks))
        return cls(classes, order, np.append(group_starts(number[order]), len(order)), levels)


@once_a_program
def _classes_of_buffers(program: Program) -> tuple[Ints, Ints]:
    """Return what distinguishes buffers, those that begin with nodes of one class alike, and the class of each."""
    buffers, (_, number) = program.buffers, classes_of_nodes(program)
    begins = np.where(buffers.begin < 0, -1, 2 * number[buffers.begin >> 1] + (buffers.begin & 1))
    columns = (buffers.category, buffers.device, buffers.stage, buffers.version, buffers.size, begins)
    return classify(np.array(columns, dtype=np.int64))


def _levels_held(buffers: Buffers, ranks: Ints) -> Ints:
    """Return what its device holds, of its category and in all, when each buffer begins.

    The ranks are those of beginnings, and then of ends. In all devices before, as much ends as begins.
    """
    device, span = buffers.device.astype(np.int64), int(ranks.max(initial=0)) + 1
    found = []
    for key in (device * len(Category) + buffers.category, device):
        begins, ends = (key * span + each for each in np.split(ranks, 2))
        by_begin, by_end = np.argsort(begins), np.argsort(ends)
        wanted, held = begins[by_begin], np.empty(len(key), dtype=np.int64)
        begun, ended = (
            np.append(0, np.cumsum(buffers.size[order]))[np.searchsorted(each, wanted, side="right")]
            for order, each in ((by_begin, wanted), (by_end, ends[by_end]))
        )
        held[by_begin] = begun - ended
        found.append(held)
    return np.array(found)
