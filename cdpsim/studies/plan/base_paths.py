"""Longest paths through one step of a base program, between tasks that the steps of other micro-batches have, too."""

from dataclasses import dataclass
from functools import cached_property
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
    """The paths of a program of at least three steps whose devices have lists."""

    program: Program
    listing: Listing
    duration: Floats  # of each node

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

    def paths(self, ends: ListEnds, chosen: Ints) -> Paths:
        """Return the longest paths that all steps with such ends of their lists have, through the chosen devices."""
        first, counts, node = self.listing.first.astype(np.int64), self.listing.counts, self.node
        index = np.arange(len(node)) - np.repeat(first[:-1], counts)
        ending = index >= np.repeat(counts - ends.last, counts)
        beginning = index < np.repeat(ends.first, counts)
        inside = self._inside(np.concatenate([node[ending], node[beginning] + self.next]))
        chosen = chosen[(ends.until[chosen] > 0) & (ends.since[chosen] > 0)]
        sources, heads = node[first[chosen + 1] - ends.since[chosen]], node[first[chosen]] + self.next
        targets = node[first[chosen] + ends.until[chosen] - 1] + self.next
        end = self._longest(inside, np.concatenate([sources, heads]))
        many = len(chosen)
        completes = np.array([self._first_complete(device) for device in chosen.tolist()], dtype=np.int64)
        sums_begin = (end[completes] - self.duration[completes, None])[:, :many].T
        step_ends = end[node[first[chosen + 1] - 1]][:, :many].T
        return Paths(chosen, end[targets, np.arange(many)], step_ends, sums_begin, end[targets][:, many:])

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
        """Return the ends of all nodes on the longest paths from the start of each source; -inf where there is none."""
        before, after = self.waits
        rows = inside[before] & inside[after]
        nodes = np.flatnonzero(inside)
        number = np.full(len(inside), -1)
        number[nodes] = np.arange(len(nodes))
        levels = sort_into_levels(number[before[rows]], number[after[rows]], len(nodes))
        begins = np.full((len(nodes), len(sources)), -np.inf)
        begins[number[sources], np.arange(len(sources))] = 0
        end = np.full((len(inside), len(sources)), -np.inf)
        end[nodes[levels.order]] = _sweep_from(levels, self.duration[nodes], begins)
        return end


def _sweep_from(levels: Levels, duration: Floats, begins: Floats) -> Floats:
    """Return the ends of nodes by their places, of which some begin by themselves."""
    start, duration = begins[levels.order], duration[levels.order, None]
    end = np.empty_like(start)
    for low, high, waits in zip(levels.first[:-1].tolist(), levels.first[1:].tolist(), levels.waits, strict=True):
        for earlier in waits:
            part = start[low : low + len(earlier)]
            np.maximum(part, end[earlier], out=part)
        end[low:high] = start[low:high] + duration[low:high]
    return end
