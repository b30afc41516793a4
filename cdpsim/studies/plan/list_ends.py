"""Beginnings and ends that the lists of a step share with lists of another number of micro-batches."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cdpsim.numeric.columns import Flags, Ints
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import Listing
from cdpsim.schedules.placement import Shape


@dataclass(frozen=True, eq=False)
class ListEnds:
    """How lists begin and end as those of a probe do, and what devices do between.

    A micro-batch is numbered among those that begin on one device, from the first of them on or from the last.
    """

    first: Ints  # so many tasks of each device begin its list as they begin the probe's
    last: Ints  # and so many others of the probe's end it; both may have tasks in common
    until: Ints  # the first so many of those that begin, and the last so many of those that end,
    since: Ints  # have none in common
    settled: Ints  # the last so many that come when there are gradients of all stages of the device
    between: Ints  # tasks between those: by device and phase
    counts: Ints  # all tasks, likewise
    device: Ints  # of each device and phase that it has a row,
    phase: Ints
    most: Ints  # with the stashes, by stage, in the task in which the device holds most
    amid: Flags  # and whether that comes when the device has used all its stages, and will use them again
    summing: Flags  # and has gradients of all, none of which is complete

    @property
    def key(self) -> bytes:
        """The tasks that are in common."""
        return b"".join(each.tobytes() for each in (self.first, self.last, self.until, self.since))


@lru_cache(maxsize=16)
def listing_of(schedule: Schedule, shape: Shape) -> Listing:
    """Write out the lists of one replica."""
    return Listing.of(schedule.actions(shape), shape)


def device_of_tasks(listing: Listing) -> Ints:
    """Return the device of each task."""
    return np.repeat(np.arange(listing.devices), listing.counts)


@lru_cache(maxsize=2048)
def list_ends(schedule: Schedule, few: Shape, shape: Shape) -> ListEnds:
    """Compare the lists of a shape with those of one of few micro-batches."""
    one, other = listing_of(schedule, few), listing_of(schedule, shape)
    front, back = (
        (_numbers_at_device(one), _numbers_at_device(other)),
        (_numbers_at_device(one, back=True), _numbers_at_device(other, back=True)),
    )
    first = _common(one, other, *front)
    last = max((_common(one, other, *numbers, reverse=True) for numbers in (back, front)), key=lambda each: each.sum())
    first, last = _without_overlap(first, last, one.counts)
    until, since = _without_overlap(first, last, other.counts)
    index = np.arange(len(other.phase)) - np.repeat(other.first[:-1], other.counts)
    device = device_of_tasks(other)
    middle = (index >= until[device]) & (index < (other.counts - since)[device])
    key = device * other.phases + other.phase
    between, counts = (
        np.bincount(rows, minlength=other.devices * other.phases).reshape(other.devices, -1)
        for rows in (key[middle], key)
    )
    settled = _settled_tasks(other, device, index)
    return ListEnds(first, last, until, since, settled, between, counts, *_most_stashes(other, device))


def _without_overlap(first: Ints, last: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the first and the last tasks of lists, fewer where both would have tasks in common."""
    half, apart = np.clip(counts // 2, counts - last, first), first + last <= counts
    return np.where(apart, first, half), np.where(apart, last, counts - half)


def _numbers_at_device(listing: Listing, *, back: bool = False) -> Ints:
    """Number micro-batches among those that begin on one device, from 0 on, or up to -1."""
    begins = listing.device[:, 0]
    number = np.empty(len(begins), dtype=np.int64)
    for device in np.unique(begins).tolist():
        rows = np.flatnonzero(begins == device)
        number[rows] = np.arange(len(rows)) - len(rows) * back
    return number * listing.devices + begins


def _common(one: Listing, other: Listing, of_one: Ints, of_other: Ints, *, reverse: bool = False) -> Ints:
    """Return how many tasks of each device are alike in both lists, from the first on or, in reverse, from the last."""
    labels = [
        number[each.micro_batch] * each.phases + each.phase for each, number in ((one, of_one), (other, of_other))
    ]
    way = -1 if reverse else 1
    found = []
    for device in range(one.devices):
        rows = [
            label[each.first[device] : each.first[device + 1]][::way]
            for label, each in zip(labels, (one, other), strict=True)
        ]
        least = min(map(len, rows))
        same = np.append(rows[0][:least] == rows[1][:least], False)
        found.append(int(same.argmin()))
    return np.array(found)


def _settled_tasks(listing: Listing, device: Ints, index: Ints) -> Ints:
    """Return how many tasks of each device come behind the first backwards of all its stages."""
    back = np.flatnonzero(listing.phase >= listing.shape.n)
    _, heads = np.unique(device[back] * listing.phases + listing.phase[back], return_index=True)
    latest = np.zeros(listing.devices, dtype=np.int64)
    np.maximum.at(latest, device[back[heads]], index[back[heads]])
    settled: Ints = listing.counts - 1 - latest
    return settled


def tasks_amid(listing: Listing) -> tuple[Flags, Flags]:
    """Return which tasks come behind the first one of each stage of their device, and before the last of each.

    The second flags are of those that also come behind the first backward of each stage.
    """
    n, device = listing.shape.n, device_of_tasks(listing)
    third, place = np.divmod(listing.phase, n)
    key = device * n + np.where(third == 0, place, n - 1 - place)
    row, gives = np.arange(len(key)), np.flatnonzero(listing.phase >= listing.phases - n)
    used, summed = _latest_first(key, device, row), _latest_first(key[gives], device[gives], gives)
    _, last = np.unique(key[::-1], return_index=True)
    last = len(key) - 1 - last
    again = np.full(listing.devices, len(key))
    np.minimum.at(again, device[last], last)
    before: Flags = row < again[device]
    return before & (row > used[device]), before & (row > summed[device])


def _latest_first(key: Ints, device: Ints, row: Ints) -> Ints:
    """Return, of the first rows of each key, the last one of each device."""
    _, first = np.unique(key, return_index=True)
    found = np.zeros(int(device.max()) + 1, dtype=np.int64)
    np.maximum.at(found, device[first], row[first])
    return found


def _most_stashes(listing: Listing, device: Ints) -> tuple[Ints, Ints, Ints, Flags, Flags]:
    """Return the stashes that a device holds, by stage, in the task of each phase that has most of them at once.

    A stash is there from the start of its forward to the end of its backward, or of the input's part of that. In each
    list all that begin also end, so a sum over all lists is that of each.
    """
    n, phases = listing.shape.n, listing.phases
    forward, backward = listing.phase < n, (listing.phase >= n) & (listing.phase < 2 * n)
    stage = np.where(forward, listing.phase, 2 * n - 1 - listing.phase)
    held = np.cumsum(forward.astype(np.int64) - backward) + backward
    order = np.lexsort((-held, device * phases + listing.phase))
    key = (device * phases + listing.phase)[order]
    chosen = order[np.flatnonzero(np.diff(key, prepend=-1))]
    most = np.empty((len(chosen), n), dtype=np.int32)
    for j in range(n):
        ends = backward & (stage == j)
        most[:, j] = (np.cumsum(forward & (stage == j)) - np.cumsum(ends) + ends)[chosen]
    amid, summing = tasks_amid(listing)
    return device[chosen], listing.phase[chosen], most, amid[chosen], summing[chosen]
