"""The blocks of a gantt picture: which tasks are shown, how each is coloured, and what is written into it."""

from typing import Any, NamedTuple

import numpy as np

from cdpsim.draw.canvas import INK
from cdpsim.draw.gantt.rows import IdleTimes, Rows
from cdpsim.draw.palette import COLOURINGS, COLOURS, KIND_COLOURS, tint
from cdpsim.draw.views import Views
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.numeric.columns import Columns, Floats, Ints, group_numbers, group_starts
from cdpsim.program import Kind

_PALEST, _LATER = 0.6, 0.8  # shares of white: in the colour of a device's last stage, and of a later step
_SLASH_ROOM = 4.5  # points: the width of the slash through a stale task


class Blocks(NamedTuple):
    """The tasks that are shown, and what is the same for all of them."""

    chosen: Ints  # among `Views.bars`
    tasks: Columns
    number: Ints  # of the micro-batch; counted through the steps where a device has begun one before it ends another
    colours: np.ndarray
    colour: str  # what the colours mean
    until: float  # when the picture ends
    short: float  # the time of a short task, and of a middling one
    half: float
    tints: bool  # whether a device's later stages are paler
    full: bool  # whether a name has stage, kind and micro-batch, as the number alone would not say enough
    counted: bool  # whether micro-batches are counted through the steps
    later: np.ndarray  # whether a block is of a step that is not shown, though it begins before the picture ends

    def room(self, scale: float) -> Floats:
        """Return the points that each block has for a name, where a unit of time has `scale`."""
        stale = _SLASH_ROOM * ((self.tasks["stale"] > 0) & (self.tasks["kind"] != "U"))
        room = (self.tasks["end"] - self.tasks["start"]) * scale - stale - 0.8
        return np.where((self.tasks["end"] <= self.until * (1 + 1e-9)) & ~self.later, room, 0.0)

    @property
    def names(self) -> list[str]:
        """The name of each block in torch's form: stage, kind, micro-batch."""
        columns = (self.tasks["stage"].tolist(), self.tasks["kind"].tolist(), self.short_names)
        return [f"{stage}{kind}{number}" for stage, kind, number in zip(*columns, strict=True)]

    @property
    def short_names(self) -> list[str]:
        """The number of each block's micro-batch; of an update none."""
        return [str(number) if number >= 0 else "" for number in self.number.tolist()]


class Panel(NamedTuple):
    """One run, as it will be drawn: its rows, blocks and idle times, and its name among others."""

    views: Views
    rows: Rows
    blocks: Blocks
    idle: IdleTimes
    name: str


def read_blocks(views: Views, colour: str, steps: int | None) -> Blocks:
    """Return the blocks of the first `steps` training steps; if None, of as many as show the pattern."""
    choose("colour", colour, COLOURINGS)
    until, shown = _end_of_picture(views, steps)
    chosen = np.flatnonzero(views.tasks["start"][views.bars] < until)
    tasks = {name: column[views.bars[chosen]] for name, column in views.tasks.items()}
    took = (tasks["end"] - tasks["start"])[tasks["end"] > tasks["start"]]
    short, half = np.quantile(took, [0.25, 0.5]).tolist() if len(took) else (until, until)
    counted = shown > 1 and _steps_overlap(tasks)
    number = _count_through(views, tasks) if counted else tasks["micro_batch"]
    rank, most = _stage_ranks(views, tasks)
    later = tasks["step"] >= shown
    colours = _colours_of(tasks, number, rank / max(most, 1), colour)
    colours = np.array(
        [tint(shade, _LATER * pale) for shade, pale in zip(colours.tolist(), later.tolist(), strict=True)]
    )
    tints, full = colour == "kind" and most > 0, most > 0 or colour != "kind"
    return Blocks(chosen, tasks, number, colours, colour, until, short, half, tints, full, counted, later)


def _end_of_picture(views: Views, steps: int | None) -> tuple[float, int]:
    """Return the time until which a run is drawn, and how many steps that is."""
    tasks = views.tasks
    every = int(tasks["step"].max()) + (not views.has_rounds)  # what is thrown away is of no step
    wanted = (1 if _flushes(views) else every) if steps is None else whole_number("steps", steps, at_least=1)
    if wanted > every:
        raise RequestError("steps", f"are {wanted}, but the run has {every}; simulate more, or draw fewer")
    if wanted == every:
        return float(views.end.max()) or 1.0, every
    ends = [table["end"][table["step"] < wanted] for table in (tasks, views.messages)]
    return max(float(end.max(initial=0)) for end in ends) or 1.0, wanted


def _flushes(views: Views) -> bool:
    """Return whether every task reads what the step before it made, so that all steps are alike."""
    reads = views.kind != Kind.U
    return not views.has_rounds and bool((views.tasks["version"] == views.tasks["step"])[reads].all())


def _steps_overlap(tasks: Columns) -> bool:
    """Return whether a device begins a step before it has ended another; updates do not count."""
    reads = np.flatnonzero(tasks["kind"] != "U")
    rows = reads[np.lexsort((tasks["start"][reads], tasks["device"][reads]))]
    device, step = tasks["device"][rows], tasks["step"][rows]
    return bool(((step[1:] < step[:-1]) & (device[1:] == device[:-1])).any())


def _count_through(views: Views, tasks: Columns) -> Ints:
    """Return the numbers of micro-batches, counted on from step to step."""
    most = np.zeros(int(views.tasks["step"].max()) + 1, dtype=np.int64)
    np.maximum.at(most, views.tasks["step"], views.tasks["micro_batch"].astype(np.int64) + 1)
    first = np.cumsum(most) - most
    micro_batch = tasks["micro_batch"].astype(np.int64)
    result: Ints = np.where(micro_batch >= 0, first[tasks["step"]] + micro_batch, micro_batch)
    return result


def _stage_ranks(views: Views, tasks: Columns) -> tuple[Ints, int]:
    """Return each task's stage's place among the stages of its device, and the last place of any."""
    stages = int(views.tasks["stage"].max()) + 1
    key = views.tasks["device"].astype(np.int64) * stages + views.tasks["stage"]
    pairs = np.unique(key)
    first = group_starts(pairs // stages)
    rank = np.arange(len(pairs)) - first[group_numbers(first, len(pairs))]
    own = tasks["device"].astype(np.int64) * stages + tasks["stage"]
    return rank[np.searchsorted(pairs, own)], int(rank.max())


def _colours_of(tasks: Columns, number: Ints, paleness: Floats, colour: str) -> np.ndarray:
    """Return the colour of each task; of a kind, a device's later stages are paler. Updates are ink."""
    if colour == "kind":
        keys: Any = zip(tasks["kind"].tolist(), paleness.tolist(), strict=True)
        known = {key: INK if key[0] == "U" else tint(KIND_COLOURS[Kind[key[0]]], _PALEST * key[1]) for key in set(keys)}
        keys = zip(tasks["kind"].tolist(), paleness.tolist(), strict=True)
        return np.array([known[key] for key in keys])
    shade = (number if colour == "micro-batch" else tasks["stage"]) % len(COLOURS)
    return np.array([*COLOURS, INK])[np.where(tasks["kind"] == "U", len(COLOURS), shade)]
