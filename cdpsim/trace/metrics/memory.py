"""What devices hold, over time: step functions from the buffers of a program."""

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.numeric.paths import compiled_for
from cdpsim.program import Buffers, Category, Kind, Program

_AT_ONCE = 2**14  # buffers of some devices whose columns stay in a processor's cache


def held(buffers: Buffers, start: Times, end: Times) -> tuple[Times, Times]:
    """From when until when each buffer is held."""
    at = _times(start, end)
    finish = at[buffers.end]
    np.maximum.at(finish, buffers.kept, at[buffers.kept_until])
    return at[buffers.begin], finish


def _times(start: Times, end: Times) -> Times:
    """The time of each moment: even ones are starts of nodes, odd ones ends, -1, the last, is the start of the run."""
    at = np.zeros(2 * len(start) + 1, dtype=end.dtype)
    at[:-1:2], at[1::2] = start, end
    return at


def step_function(key: Ints, begin: Times, end: Times, size: Ints) -> tuple[Ints, Times, Ints]:
    """Sum what is held for each key: (key, time, size) from each time on, one row per change.

    What ends at a time is freed before what starts then is held, so only the net shows.
    """
    if (begin == end).any():  # such as what messages carry, where they take no time
        some = np.flatnonzero(begin != end)
        key, begin, end, size = key[some], begin[some], end[some], size[some]
    key, time = np.concatenate([key, key]), np.concatenate([begin, end])
    order = sort_by(key, time if time.dtype.kind == "i" else dense_ranks(time))
    key, time, change = key[order], time[order], np.concatenate([size, -size])[order]
    first = group_starts(key, time)
    net = np.add.reduceat(change, first) if len(first) else change
    # Everything held is freed, so the running sum is back at 0 where the next key begins.
    rows = np.flatnonzero(net)
    return key[first[rows]], time[first[rows]], np.cumsum(net)[rows]


def sums(program: Program, key: Ints, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """What all buffers of the same key hold together: (key, time, size) from each time on."""
    buffers, weight = program.buffers, _weight(program.buffers)
    keys, span = int(key.max(initial=0)) + 1, int(end.max(initial=0)) + 1
    whole = end.dtype.kind == "i"
    fits = whole and keys * span <= 16 * len(key) and span < 2**31
    swift = compiled_for(len(key)) if fits else None
    if swift:
        finish = swift.times_of(buffers.end, start, end)
        np.maximum.at(finish, buffers.kept, swift.times_of(buffers.kept_until, start, end))
        changes = np.zeros((keys, span), dtype=np.int32 if weight < 2.0**31 else np.int64)
        key, time, total = swift.step_function(key, buffers.size, buffers.begin, finish, start, end, changes)
        return key, time, total
    return step_function(key, *held(buffers, start, end), buffers.size)


def _weight(buffers: Buffers) -> float:
    weight: float = buffers.size.sum(dtype=float)
    if weight > 2.0**53:
        raise RequestError("model", "sizes add up to more than 2**53 bytes; give them in the right unit")
    return weight


def curves(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """The columns of memory.csv, the category as its number."""
    key = program.buffers.device * len(Category) + program.buffers.category
    key, time, size = sums(program, key, start, end)
    category = (key % len(Category)).astype(np.int8)
    key //= len(Category)
    return {"device": key, "category": category, "time": time, "size": size}


def totals(program: Program, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """What each device holds in all: (device, time, size) from each time on."""
    return sums(program, program.buffers.device, start, end)


def peaks(program: Program, start: Times, end: Times) -> np.ndarray:
    """The most that each device holds: a row per device, a column per category and one for the total."""
    result = np.zeros((program.devices, len(Category) + 1), dtype=np.int64)
    if end.dtype.kind != "i":
        _highest(program.buffers, start, end, result)
        return result
    curve = curves(program, start, end)
    np.maximum.at(result, (curve["device"], curve["category"]), curve["size"])
    device, _, size = totals(program, start, end)
    np.maximum.at(result[:, -1], device, size)
    return result


def _highest(buffers: Buffers, start: Times, end: Times, result: np.ndarray) -> None:
    """Find what `peaks` does with times that are no integers, for so many devices at once as stay in a cache."""
    _weight(buffers)
    columns = buffers.device, buffers.category, *held(buffers, start, end), buffers.size
    order = sort_by(buffers.device)
    last = np.cumsum(np.bincount(buffers.device))
    cuts = last[group_starts(last // _AT_ONCE)[1:] - 1]
    for rows in np.split(order, cuts):
        _highest_of(result, *(column[rows] for column in columns))


def _highest_of(result: np.ndarray, device: Ints, category: Ints, begin: Times, end: Times, size: Ints) -> None:
    """Find it for some devices: sorting times takes longest, and is done once for all categories."""
    time, device, category = np.concatenate([begin, end]), np.tile(device, 2), np.tile(category, 2)
    order = sort_by(device, dense_ranks(time))
    device, category, time = device[order], category[order], time[order]
    change = np.concatenate([size, -size])[order]
    for column in range(result.shape[1]):
        rows = slice(None) if column == len(Category) else np.flatnonzero(category == column)
        own = device[rows]
        if len(own):
            first = group_starts(own, time[rows])
            np.maximum.at(result[:, column], own[first], np.cumsum(np.add.reduceat(change[rows], first)))


def host_peaks(program: Program, start: Times, end: Times, activations: Ints, optimizer: Ints) -> Ints:
    """The most that the host of each device holds for it, of what each stage has there.

    Activations from the start of their forward to the end of their backward; the optimizer state of a stage, always,
    for each device that updates it.
    """
    tasks, n = program.tasks, program.n
    forward, last = program.tasks_of_kind(Kind.F).ravel(), program.gradient_tasks.ravel()
    sizes = activations[tasks.stage[forward]]
    device, _, size = step_function(tasks.device[forward].astype(np.int64), start[forward], end[last], sizes)
    peaks = np.zeros(program.devices, dtype=np.int64)
    np.maximum.at(peaks, device, size)
    updates = np.unique(tasks.device[program.compute :].astype(np.int64) * n + tasks.stage[program.compute :])
    np.add.at(peaks, updates // n, optimizer[updates % n])
    return peaks


def peak_within(key: Ints, time: Times, size: Ints, low: float, high: float) -> int:
    """The largest value that any key's step function takes in [low, high)."""
    last = np.append(group_starts(key)[1:], len(key)) - 1
    until = np.append(time[1:], 0)
    until[last] = time[last]
    seen = (time < high) & (until > low)
    return int(size[seen].max(initial=0))


def steady_window(program: Program, start: Times, end: Times) -> tuple[float, float]:
    """From the last micro-batch's first task to the first micro-batch's last one."""
    first = start[program.tasks_of_kind(Kind.F)[: program.first_pass[1], 0]].max()
    return first.item(), end[program.gradient_tasks[program.first_pass[-2] :, 0]].min().item()


def live_versions(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """How many versions of each stage each device holds: device, stage, and from each time on the versions."""
    rows = np.flatnonzero(program.buffers.category == Category.PARAMETERS)
    begin, finish = (column[rows] for column in held(program.buffers, start, end))
    key = program.buffers.device[rows].astype(np.int64) * program.n + program.buffers.stage[rows]
    key, time, count = step_function(key, begin, finish, np.ones(len(rows), dtype=np.int64))
    return {"device": key // program.n, "stage": key % program.n, "time": time, "versions": count}


def stages_held(program: Program, start: Times, end: Times) -> tuple[Ints, Times, Ints]:
    """How many stages each device holds parameters of, in any version: (device, time, stages) from each time on."""
    live = live_versions(program, start, end)
    some = (live["versions"] > 0).astype(np.int64)
    first = group_starts(live["device"], live["stage"])
    before = np.append(0, some[:-1])
    before[first] = 0
    change = some - before
    order = sort_by(live["device"], live["time"])
    device, time = live["device"][order], live["time"][order]
    at = group_starts(device, time)
    net = np.add.reduceat(change[order], at) if len(at) else change
    return device[at], time[at], np.cumsum(net)
