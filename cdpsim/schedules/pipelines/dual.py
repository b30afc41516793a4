"""Two directions on the same devices, forwards of one beside backwards of the other (DeepSeek-AI 2024, DualPipe)."""

from dataclasses import replace

import numpy as np

from cdpsim.schedules import pipelines
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines import actions_from_letters


def dualpipe(devices: int, m: int, chunks: int = 1) -> Actions:
    """DualPipe: half of the micro-batches begin at the first device, half at the last, over the same devices.

    >>> print(dualpipe(2, 4).timetable())
    0F0 1F2 0F1 1B2 1B2 1F3 0B0 0B0 1B3 1B3 0I1 0W1
    0F2 1F0 0F3 1B0 1B0 1F1 0B2 0B2 1B1 1B1 0I3 0W3
    """
    pipelines.require_one_chunk(chunks)
    pipelines.require_even_devices(devices)
    pipelines.require_even_micro_batches(m)
    pipelines.require_full_pipeline(devices, m)
    device = np.arange(devices, dtype=np.int32)
    from_end = np.minimum(device, device[::-1])
    actions = actions_from_letters([eight_steps(near, devices // 2, m // 2) for near in from_end.tolist()])
    near = from_end[actions.device]
    stage = np.where(actions.stage, devices - 1 - near, near)
    return replace(actions, stage=stage, micro_batch=actions.micro_batch + np.int32(m // 2) * (stage != actions.device))


def eight_steps(device: int, devices: int, m: int) -> str:
    """Return the letters of a device in either half of DualPipe, counted from its end, by the published code's steps.

    Capital letters are of the direction that begins at that end, small ones of the other; m micro-batches go in either.

    >>> eight_steps(0, 2, 4)
    'FFFfiwfF&bf&Bbf&BbIWIW'
    """
    before, after = device + 1, devices - 1 - device
    fill = "F" * (2 * after) + "Ff" * before + "iwf" * after
    # In the middle, the first pair is done one after the other, so that the next device has its input sooner.
    main = ("F&bf&B" * (m - 2 * devices + before)).replace("&", "", 0 if after else 1) + "bf&B" * after
    # Half of the last backwards are whole; the Ws of the others, first come, first served, fill the end.
    whole, parts = ("bB" * before)[:before], ("iI" * before)[before:]
    weights = (parts + "I" * after).replace("i", "w").replace("I", "W")
    return fill + main + whole + parts + "I".join(weights[: after + 1]) + weights[after + 1 :]
