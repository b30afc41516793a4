"""Longest paths through one step of a probe, between tasks that the steps of other micro-batches have, too."""

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.numeric.paths import longest_paths
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
    return device, end[np.arange(len(device)), targets]


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
    before, after, times = number[before[rows]], number[after[rows]], duration[nodes]
    end = np.full((len(sources), len(inside)), -np.inf)
    for row, source in zip(end, number[sources].tolist(), strict=True):
        begins = np.full(len(nodes), -np.inf)
        begins[source] = 0
        row[nodes] = longest_paths(before, after, times, begins)[1]
    return end
