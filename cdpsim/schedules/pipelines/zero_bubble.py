"""Backwards in two parts: gradients of weights fill the bubble (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

A device does some forwards ahead, then a forward and an I by turns. The fewer it does ahead, the later it begins with
Ws: so all devices hold equally many activations until their Ws, and Ws are left for the end. Bubbles are as published
while Ws are the shortest tasks; each micro-batch that is lacking leaves a slot more of them.
"""

from dataclasses import replace

import numpy as np

from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.pipelines import needs
from cdpsim.schedules.pipelines.spelling import spelt


def zb_h1(devices: int, m: int, chunks: int = 1) -> Actions:
    """H1: d activations at most, as 1F1B has, and a bubble of (d-1)(F + I - W), from d micro-batches on."""
    needs.one_chunk(chunks)
    return _by_turns(devices, m, 1, 1, m)


def zb_h2(devices: int, m: int, chunks: int = 1) -> Actions:
    """H2: 2d-1 activations at most, and a bubble of (d-1)(F + I - 2W), from 2d-1 micro-batches on."""
    needs.one_chunk(chunks)
    return _by_turns(devices, m, 1, 2, m)


def interleaved_zero_bubble(devices: int, m: int, chunks: int = 2) -> Actions:
    """H1 over the stages d, d + devices, ... of each device d, a round of micro-batches through one after another."""
    return _by_turns(devices, m, chunks, 1, needs.equal_rounds(devices, m))


def _by_turns(devices: int, m: int, chunks: int, ahead: int, together: int) -> Actions:
    # `ahead`: how many more forwards a device does ahead than the next one, and how many fewer Is before its first W.
    most = (chunks - 1) * together + ahead * (devices - 1)
    actions = spelt([_word(m * chunks, most - ahead * device, ahead * device) for device in range(devices)])
    passed, within = np.divmod(actions.micro_batch, together)
    turn, chunk = np.divmod(passed, chunks)
    chunk = np.where(actions.kind == Action.F, chunk, chunks - 1 - chunk)
    return replace(actions, stage=chunk * devices + actions.device, micro_batch=turn * together + within)


def _word(tasks: int, ahead: int, behind: int) -> str:
    """So many forwards, Is and Ws: `ahead` forwards before the first pair of both, `behind` Is before the first W."""
    behind = min(behind, tasks)
    pairs = max(tasks - ahead, 0)
    fill = "F" * (tasks - pairs) + "FI" * min(pairs, behind) + "FIW" * (pairs - behind)
    return fill + "I" * (behind - pairs) + "IW" * (tasks - max(pairs, behind)) + "W" * behind
