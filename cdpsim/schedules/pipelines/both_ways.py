"""Orders of two pipelines in opposite directions: stage j of one is on device j, of the other on devices - 1 - j."""

import numpy as np
from numpy.typing import NDArray

from cdpsim.numeric.columns import Ints
from cdpsim.schedules import pipelines
from cdpsim.schedules.actions import Action, Actions


def chimera(devices: int, m: int, chunks: int = 1) -> Actions:
    """Chimera (Li and Hoefler 2021): half of the micro-batches go the other way, in the gaps of the first half's 1F1B.

    `devices` micro-batches make a unit. Units follow one another directly; in the last one there may be fewer.

    >>> print(chimera(2, 2).timetable())
    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1
    """
    pipelines.require_one_chunk(chunks)
    pipelines.require_even_devices(devices)
    i, stage = np.indices((m, devices), dtype=np.int32)
    half = (m + 1) // 2
    turn = i % half
    # With equal times a pipeline does something in every other slot of a device, and a unit fills 2 * devices of them.
    slot = 2 * turn + devices * (turn // (devices // 2))
    return _actions_by_slot(i >= half, slot + stage, slot + 2 * devices - 1 - stage)


def gems(devices: int, m: int, chunks: int = 1) -> Actions:
    """GEMS (Jain et al. 2020): micro-batches go in either direction in turn, each right behind the one before.

    A device has the activations of one micro-batch at a time: it begins a forward after the backward before.

    >>> print(gems(2, 2).timetable())
    0F0 .   .   0B0 1F1 1B1 .
    .   1F0 1B0 0F1 .   .   0B1
    """
    pipelines.require_one_chunk(chunks)
    i, _ = np.indices((m, devices), dtype=np.int32)
    return _actions_by_slot(i % 2 == 1, 2 * i, 2 * i + 1)


def _actions_by_slot(up: NDArray[np.bool_], forward: Ints, backward: Ints) -> Actions:
    """Return the order of actions in slots: of each micro-batch (row) and stage (column) its forward and its backward.

    `up` marks what goes from the last device to the first.
    """
    m, devices = up.shape
    device = np.where(up, np.arange(devices)[::-1], np.arange(devices))
    row = np.full((devices, int(backward.max()) + 1), -1, dtype=np.int32)
    forwards = np.arange(m * devices, dtype=np.int32).reshape(m, devices)
    row[device, forward], row[device, backward] = forwards, forwards + m * devices
    turn, stage = (column.astype(np.int32) for column in np.divmod(row[row >= 0], devices))
    kind = np.where(turn < m, np.int32(Action.F), np.int32(Action.B))
    return Actions(np.arange(devices + 1, dtype=np.int32) * 2 * m, kind, stage, turn % m)
