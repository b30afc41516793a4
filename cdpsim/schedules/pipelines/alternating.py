"""Orders that begin with forwards alone, go on with a forward and a backward in turn, and end with backwards alone."""

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.pipelines import requirements


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
    requirements.require_one_chunk(chunks)
    return _alternating(devices, m, 1, np.full(devices, m))


def one_f_one_b(devices: int, m: int, chunks: int = 1) -> Actions:
    """1F1B (Narayanan et al. 2019, with a flush): no device does more forwards ahead than fill the pipeline behind it.

    >>> print(one_f_one_b(2, 3).timetable())
    0F0 0F1 .   0B0 0F2 0B1 .   0B2
    .   1F0 1B0 1F1 1B1 1F2 1B2 .
    """
    requirements.require_one_chunk(chunks)
    return _alternating(devices, m, 1, _followers(devices))


def interleaved(devices: int, m: int, chunks: int = 2) -> Actions:
    """Interleaved 1F1B (Narayanan et al. 2021): device d has the stages d, d + devices, ..., `chunks` of them.

    Micro-batches go in rounds of about as many as there are devices, and a round goes through one stage of a device
    after another.

    >>> print(interleaved(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
    .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .
    """
    together = requirements.equal_rounds(devices, m)
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
    # A device's passes, forward or backward, are numbered as they come.
    passes = m * chunks
    number, ahead = np.arange(passes, dtype=np.int32), np.minimum(ahead, passes).astype(np.int32)[:, None]
    order = np.empty((devices, 2 * passes), dtype=np.int32)
    np.put_along_axis(order, number + np.maximum(number - ahead, 0), number, axis=1)
    np.put_along_axis(order, number + np.minimum(number + ahead + 1, passes), number + passes, axis=1)
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
