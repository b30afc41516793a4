"""Backwards in two parts: gradients of weights fill the bubble (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

A device does some forwards ahead, then a forward and an I in turn. The fewer it does ahead, the later it begins with
Ws: so all devices hold equally many activations until their Ws, and Ws are left for the end. Bubbles are as published
while Ws are the shortest tasks; each micro-batch fewer than stated leaves one more slot of bubble.
"""

from dataclasses import replace

import numpy as np

from cdpsim.schedules import pipelines
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.pipelines import actions_from_letters


def zb_h1(devices: int, m: int, chunks: int = 1) -> Actions:
    """ZB-H1: d stage-activations at most, as 1F1B has, and a bubble of (d-1)(F + I - W), from d micro-batches on.

    >>> print(zb_h1(3, 3).timetable())
    0F0 0F1 0F2 .   .   0I0 0W0 0I1 0W1 0I2 0W2
    .   1F0 1F1 .   1I0 1F2 1I1 1W0 1I2 1W1 1W2
    .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """
    pipelines.require_one_chunk(chunks)
    return _by_turns(devices, m, 1, 1, m)


def zb_h2(devices: int, m: int, chunks: int = 1) -> Actions:
    """ZB-H2: 2d-1 stage-activations at most, and a bubble of (d-1)(F + I - 2W), from 2d-1 micro-batches on.

    >>> print(zb_h2(2, 3).timetable())
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2 .
    .   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    pipelines.require_one_chunk(chunks)
    return _by_turns(devices, m, 1, 2, m)


def interleaved_zero_bubble(devices: int, m: int, chunks: int = 2) -> Actions:
    """ZB-H1 over the stages d, d + devices, ... of each device d; rounds of micro-batches go through one after another.

    >>> print(interleaved_zero_bubble(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    return _by_turns(devices, m, chunks, 1, pipelines.equal_rounds(devices, m))


def _by_turns(devices: int, m: int, chunks: int, ahead: int, together: int) -> Actions:
    """Return an order of forwards alone, then a forward and an I in turn, then Is, and Ws where they fill bubbles.

    A device does `ahead` more forwards ahead than the next one, and `ahead` fewer Is before its first W. `together`
    micro-batches go through one of its stages after another.
    """
    most = (chunks - 1) * together + ahead * (devices - 1)
    actions = actions_from_letters(
        [_zero_bubble_letters(m * chunks, most - ahead * device, ahead * device) for device in range(devices)]
    )
    passed, within = np.divmod(actions.micro_batch, together)
    turn, chunk = np.divmod(passed, chunks)
    chunk = np.where(actions.kind == Action.F, chunk, chunks - 1 - chunk)
    return replace(actions, stage=chunk * devices + actions.device, micro_batch=turn * together + within)


def _zero_bubble_letters(tasks: int, ahead: int, behind: int) -> str:
    """Return the letters of a device: `ahead` forwards before its first I, and `behind` Is before its first W."""
    behind = min(behind, tasks)
    pairs = max(tasks - ahead, 0)
    fill = "F" * (tasks - pairs) + "FI" * min(pairs, behind) + "FIW" * (pairs - behind)
    return fill + "I" * (behind - pairs) + "IW" * (tasks - max(pairs, behind)) + "W" * behind
