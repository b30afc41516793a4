"""Longest paths through one step of a base program, between tasks that the steps of other micro-batches have, too."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.numeric.paths import Levels, sort_into_levels
from cdpsim.program import Program
from cdpsim.schedules.order import Listing
from cdpsim.studies.plan.list_ends import ListEnds

LOOKED_AT = 1  # of the base's steps: one with a step before it, and one behind


class Paths(NamedTuple):
    """Longest paths from the tasks that end the lists of some devices to those that begin their next ones."""

    device: Ints  # of each path
    whole: Floats  # from the first of those that end its list to the end of the last of those that begin the next
    step_ends: Floats  # from there to the end of a device's last task in the step: by path and device
    sums_begin: Floats  # and to the start of the first task that completes a stage's gradients there
    begins: Floats  # from the start of that device's first task in the next step to the end of the path


@dataclass(frozen=True, eq=False)
class BasePaths:
    """The paths of a program of at least three steps whose devices have lists, for several durations of its nodes."""

    program: Program
    listing: Listing
    durations: Floats  # of each node: a column for each axis

    @cached_property
    def waits(self) -> tuple[Ints, Ints]:
        """All pairs of nodes of which one waits for the other."""
        return self.program.waits()

    @cached_property
    def node(self) -> Ints:
        """The node of each row of the lists, in the step that is looked at."""
        return self.listing.tasks.astype(np.int64) + self.next * LOOKED_AT

    @property
    def next(self) -> int:
        """The distance from a compute task to the same one of the next step."""
        return self.listing.shape.m * self.listing.phases

    def paths(self, ends: ListEnds, chosen: Ints) -> list[Paths]:
        """Return the longest paths, by axis, that all steps with such ends have, through the chosen devices."""
        first, counts, node = self.listing.first.astype(np.int64), self.listing.counts, self.node
        index = np.arange(len(node)) - np.repeat(first[:-1], counts)
        ending = index >= np.repeat(counts - ends.last, counts)
        beginning = index < np.repeat(ends.first, counts)
        inside = self._inside(np.concatenate([node[ending], node[beginning] + self.next]))
        chosen = chosen[(ends.until[chosen] > 0) & (ends.since[chosen] > 0)]
        sources, heads = node[first[chosen + 1] - ends.since[chosen]], node[first[chosen]] + self.next
        targets = node[first[chosen] + ends.until[chosen] - 1] + self.next
        ends_by_axis = self._longest(inside, np.concatenate([sources, heads]))
        many = len(chosen)
        completes = np.array([self._first_complete(device) for device in chosen.tolist()], dtype=np.int64)
        found = []
        for end, duration in zip(ends_by_axis, self.durations.T, strict=True):
            sums_begin = (end[completes] - duration[completes, None])[:, :many].T
            step_ends = end[node[first[chosen + 1] - 1]][:, :many].T
            whole = end[targets, np.arange(many)]
            found.append(Paths(chosen, whole, step_ends, sums_begin, end[targets][:, many:]))
        return found

    def _first_complete(self, device: int) -> int:
        """Return the first task of a device's list that is the last to give a gradient to its stage."""
        rows = np.arange(self.listing.first[device], self.listing.first[device + 1])
        phase = self.listing.phase[rows]
        gives = phase >= self.listing.phases - self.listing.shape.n
        last = dict(zip(phase[gives].tolist(), rows[gives].tolist(), strict=True))
        return int(self.node[min(last.values())])

    def _inside(self, tasks: Ints) -> Flags:
        """Return which nodes are these tasks, or wait for no other tasks than these."""
        before, after = self.waits
        inside = np.zeros(self.program.nodes, dtype=np.bool_)
        inside[tasks] = True
        compute = self.program.compute
        others = np.ones(self.program.nodes, dtype=np.bool_)
        others[after[(before < compute) & ~inside[before]]] = False
        others[:compute] = False
        of_tasks = np.zeros_like(others)
        of_tasks[after[inside[before]]] = True
        inside |= others & of_tasks
        for _ in range(2):  # what waits for messages alone, or for parts of devices in them
            reached = np.zeros_like(others)
            reached[after[inside[before]]] = True
            inside |= others & reached
        return inside

    def _longest(self, inside: Flags, sources: Ints) -> Floats:
        """Return the ends of nodes on the longest paths from the start of each source, by axis; -inf where none is."""
        before, after = self.waits
        rows = inside[before] & inside[after]
        nodes = np.flatnonzero(inside)
        number = np.full(len(inside), -1, dtype=np.int32)
        number[nodes] = np.arange(len(nodes))
        levels = _levels_of(number[before[rows]].tobytes(), number[after[rows]].tobytes(), len(nodes))
        begins = np.full((len(nodes), len(sources)), -np.inf)
        begins[number[sources], np.arange(len(sources))] = 0
        end = np.full((self.durations.shape[1], len(inside), len(sources)), -np.inf)
        end[:, nodes[levels.order]] = np.moveaxis(_sweep_from(levels, self.durations[nodes], begins), 1, 0)
        return end


@lru_cache(maxsize=512)
def _levels_of(before: bytes, after: bytes, nodes: int) -> Levels:
    """Lay out a graph, given as the bytes of its edges: cases that differ in training alone have the same."""
    return sort_into_levels(np.frombuffer(before, np.int32), np.frombuffer(after, np.int32), nodes)


def _sweep_from(levels: Levels, durations: Floats, begins: Floats) -> Floats:
    """Return the ends of nodes by their places, by axis and source; some begin by themselves."""
    start = np.repeat(begins[levels.order, None], durations.shape[1], axis=1)
    durations = durations[levels.order, :, None]
    end = np.full_like(start, -np.inf)
    for low, high, waits in zip(levels.first[:-1].tolist(), levels.first[1:].tolist(), levels.waits, strict=True):
        for earlier in waits:
            part = start[low : low + len(earlier)]
            np.maximum(part, end[earlier], out=part)
        np.add(start[low:high], durations[low:high], out=end[low:high])
    return end
