"""Memory of devices over time: step functions from a program's buffers and its times.

Staleness is the age of the parameters that tasks read.
"""

from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.numeric.paths import compiled_loops_for
from cdpsim.program import Buffers, Category, Kind, Program, once_a_program


def buffer_spans(buffers: Buffers, start: Times, end: Times) -> tuple[Times, Times]:
    """Return the time at which each buffer is allocated, and the time at which it is freed."""
    moments = _times_of_moments(start, end)
    finish = moments.take(buffers.end)
    np.maximum.at(finish, buffers.kept, moments[buffers.kept_until])
    return moments.take(buffers.begin), finish


def _times_of_moments(start: Times, end: Times) -> Times:
    moments = np.zeros(2 * len(start) + 1, dtype=end.dtype)  # by number; -1, the last, is the start of the run
    moments[:-1:2], moments[1::2] = start, end
    return moments


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
    if end.dtype.kind != "i":
        result = _peaks_in_seconds(program, *buffer_spans(program.buffers, start, end))
    else:
        result = np.zeros((program.devices, len(Category) + 1), dtype=np.int64)
        curve = memory_by_category(program, start, end)
        np.maximum.at(result, (curve["device"], curve["category"]), curve["size"])
        device, _, size = device_memory(program, start, end)
        np.maximum.at(result[:, -1], device, size)
    if len(program.update_buffers):
        device, _, held = held_for_no_time(program, start, end)
        np.maximum.at(result, device, np.column_stack([held, held.sum(axis=1)]))
    return result


class Moments(NamedTuple):
    """Moments at which devices hold what they do at no other time, and their bytes by category."""

    device: Ints
    time: Times
    held: Ints


def held_for_no_time(program: Program, start: Times, end: Times) -> Moments:
    """Return what devices hold with buffers that begin and end with updates at one time, which curves do not show.

    Beside each is what was there before, and that no task and no message lets go of at that time.
    """
    buffers, row = program.buffers, program.update_buffers
    begin, finish = buffer_spans(buffers, start, end)
    row = row[begin[row] == finish[row]]
    stays = _stay_until_updates(program, start, end, finish)
    comes = (buffers.begin & 1 == 1) & ~program.is_end_of_update(buffers.begin)  # by then, with what has ended
    ranks = 2 * dense_ranks(np.concatenate([begin, finish])).astype(np.int64)
    at, (begins, ends) = ranks[row] + 1, np.split(ranks, 2)
    begins = begins + 2 * ~comes
    ends = np.maximum(begins, ends + 2 * stays)
    begins[row] = ends[row] = 0  # each by itself
    span, every = int(ranks.max(initial=0)) + 4, np.arange(len(Category))
    device, category = _of_int64(buffers.device, buffers.category)
    key = (device * len(Category) + category) * span
    wanted = (device[row, None] * len(Category) + every) * span + at[:, None]
    held = _sums_at(key + begins, key + ends, buffers.size, wanted)
    held[np.arange(len(row)), category[row]] += buffers.size[row]
    return Moments(device[row], begin[row], held)


def _stay_until_updates(program: Program, start: Times, end: Times, finish: Times) -> Flags:
    """Flag buffers that the end of an update frees, or the start of a task, which comes behind those of that time."""
    buffers, moments = program.buffers, _times_of_moments(start, end)

    def are_behind(moment: Ints) -> Flags:
        begins_task: Flags = (moment & 1 == 0) & (moment >> 1 < program.compute)
        return program.is_end_of_update(moment) | begins_task

    stays: Flags = are_behind(buffers.end) & (moments[buffers.end] == finish)
    kept = buffers.kept[are_behind(buffers.kept_until) & (moments[buffers.kept_until] == finish[buffers.kept])]
    stays[kept] = True
    return stays


def _peaks_in_seconds(program: Program, begin: Times, finish: Times) -> Ints:
    """Return the peaks of devices whose buffers have these spans.

    A device holds most when a buffer begins; buffers that end at that time are not held any more.
    """
    _total_size(program.buffers)
    peaks = np.zeros((program.devices, len(Category) + 1), dtype=np.int64)
    for rows, device, category, size in _buffers_of_devices(program):
        columns = device, category, begin.take(rows), finish.take(rows), size
        _fill_in_levels(*columns, np.empty((2, len(rows)), dtype=np.int64), peaks)
    return peaks


def _fill_in_levels(
    device: Ints, category: Ints, begin: Times, end: Times, size: Ints, levels: Ints, peaks: Ints
) -> None:
    """Fill in the bytes held at the beginning of each span: of its device and category, and of its device."""
    if loops := compiled_loops_for(len(size)):
        time, held = np.concatenate([begin, end]), np.zeros_like(peaks)
        order = time.argsort(kind="stable")  # a device's times are nearly sorted
        loops.fill_in_levels(order, time, device, category, size, held, peaks, *levels)
        return
    for row, key in enumerate((device * (peaks.shape[1] - 1) + category, device)):
        levels[row] = _sums_at_begins(key, begin, end, size)
    np.maximum.at(peaks, (device, category), levels[0])
    np.maximum.at(peaks[:, -1], device, levels[1])


@once_a_program
def _buffers_of_devices(program: Program) -> list[tuple[Ints, Ints, Ints, Ints]]:
    """Return buffers in batches of devices that fit a cache: rows, devices, categories and sizes."""
    held = program.buffers
    device, category = _of_int64(held.device, held.category)
    return [(rows, device.take(rows), category.take(rows), held.size.take(rows)) for rows in held.of_devices]


def _of_int64(*columns: Ints) -> tuple[Ints, ...]:
    """Return columns of one type, for which loops are compiled once."""
    return tuple(column.astype(np.int64) for column in columns)


def _sums_at_begins(key: Ints, begin: Times, end: Times, size: Ints) -> Ints:
    """Return the sum of the sizes of all spans of its key that have begun, and not ended, when each span begins."""
    ranks = dense_ranks(np.concatenate([begin, end]))
    begins, ends = (key.astype(np.int64) * (int(ranks.max(initial=0)) + 1) + each for each in np.split(ranks, 2))
    return _sums_at(begins, ends, size, begins)


def _sums_at(begins: Ints, ends: Ints, size: Ints, wanted: Ints) -> Ints:
    """Return the sum of the sizes of all spans that have begun and not ended, at wanted places.

    Places are numbers, of which each key has its own: of all keys before, as much ends as begins.
    """
    begun, ended = (
        np.append(0, np.cumsum(size[order]))[np.searchsorted(each[order], wanted, side="right")]
        for each, order in ((places, np.argsort(places)) for places in (begins, ends))
    )
    held: Ints = begun - ended
    return held


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


def versions_at_once(program: Program, start: Times, end: Times) -> int:
    """Return how many versions of a stage are on a device at once at most."""
    place, none, ones = _places_of_parameters(program)
    peaks, room = np.zeros((int(place.max(initial=-1)) + 1, 2), dtype=np.int64), np.empty((2, len(place)), np.int64)
    _fill_in_levels(place, none, *buffer_spans(program.buffers.of_parameters, start, end), ones, room, peaks)
    return int(peaks.max(initial=0))


@once_a_program
def _places_of_parameters(program: Program) -> tuple[Ints, Ints, Ints]:
    """Return the place of each buffer of parameters, a stage on a device, with a zero and a one for each."""
    device, stage = _of_int64(program.buffers.of_parameters.device, program.buffers.of_parameters.stage)
    place = np.unique(device * program.n + stage, return_inverse=True)[1]
    return place, np.zeros_like(place), np.ones_like(place)


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


def stale_flags(program: Program, start: Times, end: Times) -> Ints:
    """Return 1 for each task that starts when a newer version of its stage than it reads exists anywhere, else 0."""
    tasks, update = program.tasks, slice(program.compute, len(program.tasks))
    # When each version of each stage first exists: theta_0 from the start. Of their own versions, workers have others.
    where = tasks.device if program.own is not None else np.zeros_like(tasks.device)
    exists = np.full((int(where.max(initial=0)) + 1, program.n, program.versions + 1), np.inf)
    exists[:, :, 0] = -np.inf
    np.minimum.at(exists, (where[update], tasks.stage[update], tasks.version[update]), end[update])
    compute, result = slice(program.compute), np.zeros(len(tasks), dtype=np.int8)
    next_exists = exists[where[compute], tasks.stage[compute], tasks.version[compute] + 1]
    result[compute] = next_exists <= start[compute]
    return result


class Lags(NamedTuple):
    """How many versions older than the newest the parameters are that tasks of a step read: (micro-batch, stage)."""

    forward: Ints
    backward: Ints


def lags_of_step(program: Program, step: int) -> Lags:
    """Return the lags of a step's forwards and backwards; the newest version is the last that the steps before make.

    >>> from cdpsim import simulate
    >>> lags_of_step(simulate("multi-cdp", 2).program, 2).forward.tolist()
    [[1, 0], [0, 0]]
    """
    tasks, passes = program.tasks, slice(*program.first_pass[step : step + 2].tolist())
    made = tasks.version[program.compute :][tasks.step[program.compute :] < step]
    newest = int(made.max(initial=0))
    forward, backward = (newest - tasks.version[program.tasks_of_kind(kind)[passes]] for kind in (Kind.F, Kind.B))
    return Lags(forward, backward)


def mismatched(program: Program) -> int:
    """Return the number of backwards that read another version than their forward."""
    version = program.tasks.version
    return int((version[program.tasks_of_kind(Kind.F)] != version[program.tasks_of_kind(Kind.B)]).sum())


@once_a_program
def mean_staleness(program: Program, steps: range) -> float:
    """Return the mean lag of the versions that forwards of some steps read: updates before the base of their own."""
    tasks, age = program.tasks, version_ages(program)
    kept = np.flatnonzero(~program.is_estimate(tasks.version[program.compute :]))
    bases = np.full(program.steps, program.versions - 1)
    np.minimum.at(bases, tasks.step[program.compute :][kept], program.base[kept])
    ends = np.unique(tasks.step[program.compute :][kept])
    base = bases[ends[np.searchsorted(ends, np.arange(steps.start, steps.stop))]]
    forward = np.flatnonzero((tasks.kind == Kind.F) & (tasks.step >= steps.start) & (tasks.step < steps.stop))
    lag = age[base[tasks.step[forward] - steps.start]] - age[tasks.version[forward]]
    return float(lag.mean())


def version_ages(program: Program) -> Ints:
    """Return the number of updates from theta_0 to each version; an estimate counts like the version kept instead."""
    base = np.zeros(program.versions, dtype=np.int64)
    base[program.tasks.version[program.compute :]] = program.base
    age = np.zeros(program.versions, dtype=np.int64)
    for version in range(1, program.versions):
        age[version] = age[base[version]] + 1
    return age
