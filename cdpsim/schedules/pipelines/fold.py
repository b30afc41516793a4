"""Two stages on each device, in a V: the first device has the first and the last."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines import needs
from cdpsim.schedules.pipelines.dual import eight_steps
from cdpsim.schedules.pipelines.spelling import spelt


def zbv(devices: int, m: int, chunks: int = 2) -> Actions:
    """ZB-V (Qi et al. 2023): the memory of 1F1B, and no bubble between unit tasks of 2d-1 micro-batches or more."""
    # Fewer micro-batches go as the first of so many that fill the pipeline.
    enough = max(m, 2 * devices - 1)
    actions = _folded(_zbv, devices, enough, chunks)
    there = actions.micro_batch < m
    rows = actions.kind[there], actions.stage[there], actions.micro_batch[there]
    return Actions(actions.first // enough * m, *rows)


def dualpipev(devices: int, m: int, chunks: int = 2) -> Actions:
    """DualPipe cut in half (Sea AI Lab 2025): its second direction goes back over the devices of the first."""
    needs.filled(devices, m)
    return _folded(eight_steps, devices, m, chunks)


def _folded(word: Callable[[int, int, int], str], devices: int, m: int, chunks: int) -> Actions:
    needs.two_chunks(chunks)
    actions = spelt([word(device, devices, m) for device in range(devices)])
    return replace(actions, stage=np.where(actions.stage, 2 * devices - 1 - actions.device, actions.device))


def _zbv(device: int, devices: int, m: int) -> str:
    after = devices - 1 - device
    fill = "F" * (2 * after + 1) + "fF" * device + "fiw" * (after + 1)
    main = "FIWfiw" * (m - devices - after) + "IWfiw" * after
    return fill + main + "Ii" * device + "IW" * (after + 1) + "w" * device + "W" * device
