"""Memory of devices over time: step functions from a program's buffers and its times."""

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.numeric.paths import compiled_loops_for
from cdpsim.program import Buffers, Category, Kind, Program


def buffer_spans(buffers: Buffers, start: Times, end: Times) -> tuple[Times, Times]:
    """Return the time at which each buffer is allocated, and the time at which it is freed."""
    moments = np.zeros(2 * len(start) + 1, dtype=end.dtype)  # by number; -1, the last, is the start of the run
    moments[:-1:2], moments[1::2] = start, end
    finish = moments.take(buffers.end)
    np.maximum.at(finish, buffers.kept, moments[buffers.kept_until])
    return moments.take(buffers.begin), finish


def step_function(key: Ints, begin: Times, end: Times, size: Ints) -> tuple[Ints, Times, Ints]:
    """Sum the sizes of overlapping spans of each key; return (key, time, sum from then on), one row per change.

    A span that ends at a time is subtracted before one that begins then is added, so only the net change shows.
    """
    if (begin == end).any():  # such as the buffers of messages that take no time
        lasting = np.flatnonzero(begin != end)
        key, begin, end, size = (column[lasting] for column in (key, begin, end, size))
    key, time = np.concatenate([key, key]), np.concatenate([begin, end])
    order = sort_by(key, time if time.dtype.kind == "i" else dense_ranks(time))
    key, time, change = key[order], time[order], np.concatenate([size, -size])[order]
    first = group_starts(key, time)
    net = np.add.reduceat(change, first) if len(first) else change
    # Every span ends, so the running sum is back at 0 where the next key begins.
    rows = np.flatnonzero(net)
    return key[first[rows]], time[first[rows]], np.cumsum(net)[rows]


def _memory_by_key(program: Program, key: Ints, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """Sum the sizes of all buffers of each key; return (key, time, size from then on)."""
    buffers, weight = program.buffers, _total_size(program.buffers)
    keys, span = int(key.max(initial=0)) + 1, int(end.max(initial=0)) + 1
    fits = end.dtype.kind == "i" and keys * span <= 16 * len(key) and span < 2**31
    loops = compiled_loops_for(len(key)) if fits else None
    if loops is None:
        return step_function(key, *buffer_spans(buffers, start, end), buffers.size)
    finish = loops.times_of_moments(buffers.end, start, end)
    np.maximum.at(finish, buffers.kept, loops.times_of_moments(buffers.kept_until, start, end))
    changes = np.zeros((keys, span), dtype=np.int32 if weight < 2.0**31 else np.int64)
    key, time, total = loops.step_function_of_slots(key, buffers.size, buffers.begin, finish, start, end, changes)
    return key, time, total


def _total_size(buffers: Buffers) -> float:
    """Return the sum of all sizes; refuse one that integers as floats cannot count."""
    total: float = buffers.size.sum(dtype=float)
    if total > 2.0**53:
        raise RequestError("model", "sizes add up to more than 2**53 bytes; give them in the right unit")
    return total


def memory_by_category(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """Return the columns of memory.csv, the category as its number."""
    key = program.buffers.device * len(Category) + program.buffers.category
    key, time, size = _memory_by_key(program, key, start, end)
    category = (key % len(Category)).astype(np.int8)
    key //= len(Category)
    return {"device": key, "category": category, "time": time, "size": size}


def device_memory(program: Program, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """Sum over all categories; return (device, time, size from then on)."""
    return _memory_by_key(program, program.buffers.device, start, end)


def peak_memory(program: Program, start: Times, end: Times) -> np.ndarray:
    """Return the peak memory of each device (rows), by category and in total (the last column)."""
    result = np.zeros((program.devices, len(Category) + 1), dtype=np.int64)
    if end.dtype.kind != "i":
        _find_peaks_in_seconds(program.buffers, start, end, result)
        return result
    curve = memory_by_category(program, start, end)
    np.maximum.at(result, (curve["device"], curve["category"]), curve["size"])
    device, _, size = device_memory(program, start, end)
    np.maximum.at(result[:, -1], device, size)
    return result


def _find_peaks_in_seconds(buffers: Buffers, start: Times, end: Times, result: np.ndarray) -> None:
    """Fill in the peaks of a run whose times are no integers, for so many devices at once as stay in a cache.

    Sorting the times takes longest, and is done once for all categories. A device's times are nearly sorted.
    """
    _total_size(buffers)
    begin, finish = buffer_spans(buffers, start, end)
    loops = compiled_loops_for(len(buffers))
    for rows in buffers.of_devices:
        device, category, size = (column.take(rows) for column in (buffers.device, buffers.category, buffers.size))
        time = np.concatenate([begin.take(rows), finish.take(rows)])
        if loops:
            loops.fill_in_peaks(time.argsort(kind="stable"), device, category, size, time, result)
            continue
        device, category, change = np.tile(device, 2), np.tile(category, 2), np.concatenate([size, -size])
        order = sort_by(device, dense_ranks(time))
        device, category, time, change = (column[order] for column in (device, category, time, change))
        for column in range(result.shape[1]):
            of_column = slice(None) if column == len(Category) else np.flatnonzero(category == column)
            devices = device[of_column]
            if len(devices):
                first = group_starts(devices, time[of_column])
                sizes = np.cumsum(np.add.reduceat(change[of_column], first))
                np.maximum.at(result[:, column], devices[first], sizes)


def peak_host_memory(program: Program, start: Times, end: Times, activations: Ints, optimizer: Ints) -> Ints:
    """Return the peak memory of each device's host, given the bytes of each stage's activations and optimizer there.

    Activations are there from the start of their forward to the end of the backward that reads them; the optimizer
    state of a stage is always there, for each device that updates it.
    """
    tasks, n = program.tasks, program.n
    forward, last = program.tasks_of_kind(Kind.F).ravel(), program.stash_ends.ravel()
    sizes = activations[tasks.stage[forward]]
    device, _, size = step_function(tasks.device[forward].astype(np.int64), start[forward], end[last], sizes)
    peaks = np.zeros(program.devices, dtype=np.int64)
    np.maximum.at(peaks, device, size)
    updates = np.unique(tasks.device[program.compute :].astype(np.int64) * n + tasks.stage[program.compute :])
    np.add.at(peaks, updates // n, optimizer[updates % n])
    return peaks


def peak_within(time: Times, size: Ints, low: float, high: float) -> int:
    """Return the largest value that step functions, one after another, take in [low, high); each ends at 0."""
    until = np.append(time[1:], high)
    return int(size[(time < high) & (until > low)].max(initial=0))


def steady_window(program: Program, start: Times, end: Times) -> tuple[float, float]:
    """Return the time from the last micro-batch's first task to the first micro-batch's last one: (begin, end)."""
    first = start[program.tasks_of_kind(Kind.F)[: program.first_pass[1], 0]].max()
    return first.item(), end[program.gradient_tasks[program.first_pass[-2] :, 0]].min().item()


def live_versions(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """Return how many versions of each stage are on each device: columns device, stage, time, versions from then on."""
    buffers = program.buffers.of_parameters
    key = buffers.device.astype(np.int64) * program.n + buffers.stage
    key, time, count = step_function(key, *buffer_spans(buffers, start, end), np.ones(len(buffers), dtype=np.int64))
    return {"device": key // program.n, "stage": key % program.n, "time": time, "versions": count}


def live_stages(program: Program, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """Return of how many stages each device has parameters, in any version: (device, time, stages from then on)."""
    device, _, time, versions = live_versions(program, start, end).values()
    rows = np.flatnonzero(versions)  # the last row of each stage has none
    return step_function(device[rows], time[rows], time[rows + 1], np.ones(len(rows), dtype=np.int64))
