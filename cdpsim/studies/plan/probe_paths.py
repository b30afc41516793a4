"""Longest paths through one step of a probe, between tasks that the steps of other micro-batches have, too."""

from functools import lru_cache

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.numeric.paths import Levels, sort_into_levels
from cdpsim.program import Program
from cdpsim.studies.plan.list_ends import ListEnds
from cdpsim.studies.plan.probes import Probe


def paths_of_ends(probe: Probe, ends: ListEnds, duration: Floats) -> tuple[Ints, Floats]:
    """Return devices, and the longest paths from the end of each one's list to the beginning of its next one.

    A path goes from the start of the first task that ends the list to the end of the last one that begins the next, by
    tasks, messages and updates that all steps with such ends have.
    """
    assert probe.listing is not None
    first, counts, node = probe.listing.first.astype(np.int64), probe.listing.counts, probe.node
    index = np.arange(len(node)) - np.repeat(first[:-1], counts)
    ending = index >= np.repeat(counts - ends.last, counts)
    beginning = index < np.repeat(ends.first, counts)
    waits = probe.program.waits()
    inside = _nodes_in_common(probe.program, waits, np.concatenate([node[ending], node[beginning] + probe.next]))
    device = probe.chosen[(ends.until[probe.chosen] > 0) & (ends.since[probe.chosen] > 0)]
    sources = node[first[device + 1] - ends.since[device]]
    targets = node[first[device] + ends.until[device] - 1] + probe.next
    end = _longest_from(waits, inside, sources, duration)
    return device, end[targets, np.arange(len(device))]


def _nodes_in_common(program: Program, waits: tuple[Ints, Ints], tasks: Ints) -> Flags:
    """Return which nodes are these tasks, or wait for no other tasks than these."""
    before, after = waits
    inside = np.zeros(program.nodes, dtype=np.bool_)
    inside[tasks] = True
    others = np.ones(program.nodes, dtype=np.bool_)
    others[after[(before < program.compute) & ~inside[before]]] = False
    others[: program.compute] = False
    of_tasks = np.zeros_like(others)
    of_tasks[after[inside[before]]] = True
    inside |= others & of_tasks
    for _ in range(2):  # what waits for messages alone, or for parts of devices in them
        reached = np.zeros_like(others)
        reached[after[inside[before]]] = True
        inside |= others & reached
    return inside


def _longest_from(waits: tuple[Ints, Ints], inside: Flags, sources: Ints, duration: Floats) -> Floats:
    """Return the ends of nodes on the longest paths from the start of each source; -inf where none is."""
    before, after = waits
    rows = inside[before] & inside[after]
    nodes = np.flatnonzero(inside)
    number = np.full(len(inside), -1, dtype=np.int32)
    number[nodes] = np.arange(len(nodes))
    levels = _levels_of(number[before[rows]].tobytes(), number[after[rows]].tobytes(), len(nodes))
    begins = np.full((len(nodes), len(sources)), -np.inf)
    begins[number[sources], np.arange(len(sources))] = 0
    end = np.full((len(inside), len(sources)), -np.inf)
    end[nodes[levels.order]] = _sweep_from(levels, duration[nodes], begins)
    return end


@lru_cache(maxsize=512)
def _levels_of(before: bytes, after: bytes, nodes: int) -> Levels:
    """Lay out a graph, given as the bytes of its edges: probes that differ in training alone have the same."""
    return sort_into_levels(np.frombuffer(before, np.int32), np.frombuffer(after, np.int32), nodes)


def _sweep_from(levels: Levels, duration: Floats, begins: Floats) -> Floats:
    """Return the ends of nodes by their places and by source; some begin by themselves."""
    start, duration = begins[levels.order], duration[levels.order, None]
    end = np.full_like(start, -np.inf)
    for low, high, waits in zip(levels.first[:-1].tolist(), levels.first[1:].tolist(), levels.waits, strict=True):
        for earlier in waits:
            part = start[low : low + len(earlier)]
            np.maximum(part, end[earlier], out=part)
        np.add(start[low:high], duration[low:high], out=end[low:high])
    return end
