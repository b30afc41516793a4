"""Orders that begin with forwards alone, go on with a forward and a backward in turn, and end with backwards alone."""

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.schedules import pipelines
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.placement import Widths


def one_place(stages: int, m: int, chunks: int = 1) -> Actions:
    """One device with all stages: micro-batches one after another, each forward and back (gradient accumulation).

    >>> print(one_place(2, 2).timetable())
    0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    stage = np.arange(stages, dtype=np.int32)
    of_pass = np.concatenate([stage, stage[::-1]])
    kind = np.repeat(np.array([Action.F, Action.B], dtype=np.int32), stages)
    first = np.array([0, 2 * stages * m], dtype=np.int32)
    return Actions(first, np.tile(kind, m), np.tile(of_pass, m), np.repeat(np.arange(m, dtype=np.int32), 2 * stages))


def gpipe(devices: int, m: int, chunks: int = 1) -> Actions:
    """GPipe (Huang et al. 2019): all forwards, then all backwards.

    >>> print(gpipe(2, 3).timetable())
    0F0 0F1 0F2 .   .   0B0 0B1 0B2
    .   1F0 1F1 1F2 1B0 1B1 1B2 .
    """
    pipelines.require_one_chunk(chunks)
    return _alternating(devices, m, 1, np.full(devices, m))


def one_f_one_b(devices: int, m: int, chunks: int = 1) -> Actions:
    """1F1B (Narayanan et al. 2019, with a flush): no device does more forwards ahead than fill the pipeline behind it.

    >>> print(one_f_one_b(2, 3).timetable())
    0F0 0F1 .   0B0 0F2 0B1 .   0B2
    .   1F0 1B0 1F1 1B1 1F2 1B2 .
    """
    pipelines.require_one_chunk(chunks)
    return _alternating(devices, m, 1, _followers(devices))


def one_f_one_b_round_robin(widths: Widths, m: int) -> Actions:
    """1F1B round robin (Narayanan et al. 2019, section 3.2), with a flush: stage j is on `widths[j]` devices.

    Micro-batch i of a stage of r devices is on the i mod r-th. A device has as many micro-batches in flight as keep its
    own and all later devices busy: these, over the devices of its stage, rounded up (in the paper NOAM).

    >>> print(one_f_one_b_round_robin((2, 1), 4).timetable())
    0F0 0F2 .   0B0 .   .   .   0B2 .   .
    0F1 0F3 .   .   .   0B1 .   .   .   0B3
    .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 .
    """
    if m < max(widths):
        raise RequestError("m", f"needs a micro-batch for each of the {max(widths)} devices of a stage; {m=}")
    stages = np.arange(len(widths), dtype=np.int32)
    stage = np.repeat(stages, widths)
    behind = np.arange(len(stage), dtype=np.int32)[::-1]  # devices of the same and of later stages behind each
    orders, own = [], []
    for first, width in zip(np.cumsum(widths) - widths, widths, strict=True):
        for replica in range(width):
            micro_batches = np.arange(replica, m, width, dtype=np.int32)
            ahead = np.full(1, behind[first] // width)
            orders.append(_alternate(len(micro_batches), ahead)[0])
            own.append(np.concatenate([micro_batches, micro_batches]))
    counts = np.array([len(order) for order in orders])
    is_backward = [order >= len(order) // 2 for order in orders]
    return Actions(
        np.append(0, np.cumsum(counts)).astype(np.int32),
        np.where(np.concatenate(is_backward), Action.B, Action.F).astype(np.int32),
        np.repeat(stage, counts),
        np.concatenate([numbers[order] for numbers, order in zip(own, orders, strict=True)]),
    )


def interleaved(devices: int, m: int, chunks: int = 2) -> Actions:
    """Interleaved 1F1B (Narayanan et al. 2021): device d has the stages d, d + devices, ..., `chunks` of them.

    Micro-batches go in rounds of about as many as there are devices, and a round goes through one stage of a device
    after another.

    >>> print(interleaved(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
    .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .
    """
    together = pipelines.equal_rounds(devices, m)
    return _alternating(devices, m, chunks, (chunks - 1) * together + 2 * _followers(devices), together)


def looped_bfs(devices: int, m: int, chunks: int = 2) -> Actions:
    """Breadth-first (Lamy-Poirier 2023): all micro-batches through one stage of a device after another, and back.

    Device d has the stages d, d + devices, ..., `chunks` of them. The last micro-batch forward is the first backward.

    >>> print(looped_bfs(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
    .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .
    """
    return _alternating(devices, m, chunks, np.full(devices, m * chunks), m, last_first=True)


def _followers(devices: int) -> Ints:
    """Return the number of devices that follow each device in the pipeline."""
    return np.arange(devices)[::-1]


def _alternating(
    devices: int, m: int, chunks: int, ahead: Ints, together: int = 1, last_first: bool = False
) -> Actions:
    """Return an order of forwards alone, then a forward and a backward in turn, then backwards alone.

    `ahead` has the forwards of each device before the first one that a backward follows. `together` micro-batches go
    through one of its stages after another; `last_first` reverses them in backwards.
    """
    passes = m * chunks
    order = _alternate(passes, ahead)
    round_, chunk, within = np.indices((m // together, chunks, together), dtype=np.int32).reshape(3, -1)
    back = together - 1 - within if last_first else within
    kind = np.repeat(np.array([Action.F, Action.B], dtype=np.int32), passes)
    stage = np.concatenate([chunk, chunks - 1 - chunk]) * devices
    micro_batch = np.concatenate([round_, round_]) * together + np.concatenate([within, back])
    return Actions(
        np.arange(devices + 1, dtype=np.int32) * (2 * passes),
        kind[order].ravel(),
        (stage[order] + np.arange(devices, dtype=np.int32)[:, None]).ravel(),
        micro_batch[order].ravel(),
    )


def _alternate(passes: int, ahead: Ints) -> Ints:
    """Return the order of passes of each device, by numbers: forwards as they come from 0 on, then backwards.

    `ahead` has the forwards of each device before the first one that a backward follows.
    """
    number, ahead = np.arange(passes, dtype=np.int32), np.minimum(ahead, passes).astype(np.int32)[:, None]
    order = np.empty((len(ahead), 2 * passes), dtype=np.int32)
    np.put_along_axis(order, number + np.maximum(number - ahead, 0), number, axis=1)
    np.put_along_axis(order, number + np.minimum(number + ahead + 1, passes), number + passes, axis=1)
    return order
