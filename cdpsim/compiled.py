"""Loops that numba compiles: imported only for large programs, and only where numba is installed."""

from typing import Any

import numba
import numpy as np

from cdpsim.columns import Ints


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def longest(before: Ints, after: Ints, duration: Any, earliest: Any) -> Any:
    """Do what `cdpsim.paths.longest` does, one node after another."""
    nodes = len(duration)
    first = np.zeros(nodes + 1, dtype=np.int32)
    waits_for = np.zeros(nodes, dtype=np.int32)
    for edge in range(len(before)):
        first[before[edge] + 1] += 1
        waits_for[after[edge]] += 1
    for node in range(nodes):
        first[node + 1] += first[node]
    reach = np.empty(len(before), dtype=np.int32)
    free = first[:-1].copy()
    for edge in range(len(before)):
        node = before[edge]
        reach[free[node]] = after[edge]
        free[node] += 1
    start, end = earliest.copy(), earliest + duration
    ready = free  # its work is done: from here on, a stack of nodes that may start
    height = 0
    for node in range(nodes - 1, -1, -1):
        if waits_for[node] == 0:
            ready[height] = node
            height += 1
    done = 0
    while height:
        height -= 1
        node = ready[height]
        done += 1
        ended = start[node] + duration[node]
        end[node] = ended
        for k in range(first[node], first[node + 1]):
            follower = reach[k]
            if ended > start[follower]:
                start[follower] = ended
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                ready[height] = follower
                height += 1
    return start, end, done


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def step_function(key: Any, begin: Any, end: Any, size: Any, keys: int, span: int) -> Any:
    """Do what `cdpsim.metrics.memory.step_function` does, for whole times below `span`."""
    changes = np.zeros((keys, span), dtype=np.int64)
    for row in range(len(key)):
        changes[key[row], begin[row]] += size[row]
        changes[key[row], end[row]] -= size[row]
    rows = 0
    for k in range(keys):
        for time in range(span):
            rows += changes[k, time] != 0
    keys_out, times = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.int64)
    held = np.empty(rows, dtype=np.int64)
    row = 0
    for k in range(keys):
        total = 0
        for time in range(span):
            if changes[k, time] != 0:
                total += changes[k, time]
                keys_out[row], times[row], held[row] = k, time, total
                row += 1
    return keys_out, times, held
