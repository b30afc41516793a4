"""Two stages on each device, in a V: the first device has the first and the last."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cdpsim.schedules import pipelines
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines import actions_from_letters, eight_steps


def zbv(devices: int, m: int, chunks: int = 2) -> Actions:
    """ZB-V (Qi et al. 2023): 1F1B's peak memory, and no bubble between unit tasks of 2d-1 micro-batches or more.

    >>> print(zbv(2, 3).timetable())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    # Fewer micro-batches go as the first ones of as many as fill the pipeline.
    enough = max(m, 2 * devices - 1)
    actions = _in_a_v(_zbv_letters, devices, enough, chunks)
    there = actions.micro_batch < m
    rows = actions.kind[there], actions.stage[there], actions.micro_batch[there]
    return Actions(actions.first // enough * m, *rows)


def dualpipev(devices: int, m: int, chunks: int = 2) -> Actions:
    """DualPipe cut in half (Sea AI Lab 2025): its second direction goes back over the devices of the first.

    >>> print(dualpipev(2, 4).timetable())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3 .   0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
    .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3
    """
    pipelines.require_full_pipeline(devices, m)
    return _in_a_v(eight_steps, devices, m, chunks)


def _in_a_v(letters: Callable[[int, int, int], str], devices: int, m: int, chunks: int) -> Actions:
    """Return the order of a V, by the letters of each device: its second stages go back over the devices."""
    pipelines.require_two_chunks(chunks)
    actions = actions_from_letters([letters(device, devices, m) for device in range(devices)])
    return replace(actions, stage=np.where(actions.stage, 2 * devices - 1 - actions.device, actions.device))


def _zbv_letters(device: int, devices: int, m: int) -> str:
    after = devices - 1 - device
    fill = "F" * (2 * after + 1) + "fF" * device + "fiw" * (after + 1)
    main = "FIWfiw" * (m - devices - after) + "IWfiw" * after
    return fill + main + "Ii" * device + "IW" * (after + 1) + "w" * device + "W" * device
