"""The orders of pipelines, by the papers: the actions of each device in a step.

    alternating        forwards alone, then a forward and a backward in turn, then backwards alone
    two directions     stage j of one pipeline is on device j, of the other on devices - 1 - j; in DualPipe forwards of
                       one are beside backwards of the other (DeepSeek-AI 2024)
    zero bubble        backwards in two parts, I and W: gradients of weights fill the bubble (Qi et al. 2023, Zero
                       Bubble Pipeline Parallelism)
    in a V             two stages on each device: the first device has the first and the last

Of zero bubble, a device does some forwards ahead, then a forward and an I in turn. The fewer it does ahead, the later
it begins with Ws: so all devices hold equally many activations until their Ws, and Ws are left for the end. Bubbles are
as published while Ws are the shortest tasks; each micro-batch fewer than stated leaves one more slot of bubble.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.placement import Widths


def require_one_chunk(chunks: int) -> None:
    """Refuse several stages on a device."""
    if chunks != 1:
        raise RequestError("chunks", f"needs chunks = 1, a stage for each device; {chunks=}")


def require_even_devices(devices: int) -> None:
    """Refuse an odd number of devices: the middle one would have the same stage of both pipelines."""
    if devices % 2:
        raise RequestError("n", f"needs an even number of devices; {devices=}")


def require_full_pipeline(devices: int, m: int) -> None:
    """Refuse fewer micro-batches than keep all devices busy in both directions."""
    if m < 2 * devices:
        raise RequestError("m", f"needs m >= 2 * devices; {m=}, {devices=}")


def equal_rounds(devices: int, m: int) -> int:
    """Return the micro-batches of a round, about one for each device; refuse m that makes no equal rounds."""
    rounds = max(1, m // devices)
    if m % rounds:
        raise RequestError("m", f"needs m to be a multiple of its m // devices = {rounds} rounds; {m=}, {devices=}")
    return m // rounds


_KINDS = np.zeros(128, dtype=np.int32)
_KINDS[[ord(kind.name) for kind in Action]] = list(Action)


def actions_from_letters(words: Sequence[str]) -> Actions:
    """Return actions by their letters: capital ones are of a device's first stage, small ones of its second.

    These are stages 0 and 1 on every device, with equally many micro-batches, which follow one another in order:
    forwards, backwards (whole or not), and Ws as their Is did. & joins two that are meant to overlap.

    >>> actions = actions_from_letters(["FfF&ifwIbW"])
    >>> actions.stage.tolist(), actions.micro_batch.tolist()
    ([0, 1, 0, 1, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0, 1, 0])
    """
    letters = np.frombuffer("".join(words).encode(), dtype=np.uint8)
    joined = letters == ord("&")
    beside, letters = np.roll(joined, 1)[~joined], letters[~joined]
    second = letters >= ord("a")
    kind = _KINDS[letters & ~np.uint8(32)]
    number = np.empty(len(kind), dtype=np.int32)
    forward, input_part = kind == Action.F, kind == Action.I
    for stage in (~second, second):
        for chosen in (forward, input_part | (kind == Action.B)):
            rows = np.flatnonzero(stage & chosen)
            number[rows] = np.arange(len(rows)) % max(len(rows) // len(words), 1)
        number[stage & (kind == Action.W)] = number[stage & input_part]
    first = np.cumsum([0, *(len(word) - word.count("&") for word in words)], dtype=np.int32)
    return Actions(first, kind, second.astype(np.int32), number, beside if beside.any() else None)


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
    require_one_chunk(chunks)
    return _alternating(devices, m, 1, np.full(devices, m))


def one_f_one_b(devices: int, m: int, chunks: int = 1) -> Actions:
    """1F1B (Narayanan et al. 2019, with a flush): no device does more forwards ahead than fill the pipeline behind it.

    >>> print(one_f_one_b(2, 3).timetable())
    0F0 0F1 .   0B0 0F2 0B1 .   0B2
    .   1F0 1B0 1F1 1B1 1F2 1B2 .
    """
    require_one_chunk(chunks)
    return _alternating(devices, m, 1, _followers(devices))


def one_f_one_b_round_robin(widths: Widths, m: int) -> Actions:
    """1F1B round robin (Narayanan et al. 2019, section 3.2), with a flush: stage j is on `widths[j]` devices.

    Micro-batch i of a stage of r devices is on the i mod r-th. A device has the number of micro-batches in flight that
    keeps its own and all later devices busy: these, over the devices of its stage, rounded up (in the paper NOAM).

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

    Micro-batches go in rounds of about one for each device, and a round goes through one stage of a device
    after another.

    >>> print(interleaved(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
    .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .
    """
    together = equal_rounds(devices, m)
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


def chimera(devices: int, m: int, chunks: int = 1) -> Actions:
    """Chimera (Li and Hoefler 2021): half of the micro-batches go the other way, in the gaps of the first half's 1F1B.

    `devices` micro-batches make a unit. Units follow one another directly; in the last one there may be fewer.

    >>> print(chimera(2, 2).timetable())
    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1
    """
    require_one_chunk(chunks)
    require_even_devices(devices)
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
    require_one_chunk(chunks)
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


def zb_h1(devices: int, m: int, chunks: int = 1) -> Actions:
    """ZB-H1: d stage-activations at most, as 1F1B has, and a bubble of (d-1)(F + I - W), from d micro-batches on.

    >>> print(zb_h1(3, 3).timetable())
    0F0 0F1 0F2 .   .   0I0 0W0 0I1 0W1 0I2 0W2
    .   1F0 1F1 .   1I0 1F2 1I1 1W0 1I2 1W1 1W2
    .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """
    require_one_chunk(chunks)
    return _by_turns(devices, m, 1, 1, m)


def zb_h2(devices: int, m: int, chunks: int = 1) -> Actions:
    """ZB-H2: 2d-1 stage-activations at most, and a bubble of (d-1)(F + I - 2W), from 2d-1 micro-batches on.

    >>> print(zb_h2(2, 3).timetable())
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2 .
    .   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    require_one_chunk(chunks)
    return _by_turns(devices, m, 1, 2, m)


def interleaved_zero_bubble(devices: int, m: int, chunks: int = 2) -> Actions:
    """ZB-H1 over the stages d, d + devices, ... of each device d; rounds of micro-batches go through one after another.

    >>> print(interleaved_zero_bubble(2, 2).timetable())
    0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    return _by_turns(devices, m, chunks, 1, equal_rounds(devices, m))


def _by_turns(devices: int, m: int, chunks: int, ahead: int, together: int) -> Actions:
    """Return an order of forwards alone, then a forward and an I in turn, then Is, and Ws where they fill bubbles.

    A device does `ahead` more forwards ahead than the next one, and `ahead` fewer Is before its first W. `together`
    micro-batches go through one of its stages after another.
    """
    most = (chunks - 1) * together + ahead * (devices - 1)
    later = [ahead * device for device in range(devices)]
    actions = actions_from_letters([_zero_bubble_letters(m * chunks, most - each, each) for each in later])
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


def dualpipe(devices: int, m: int, chunks: int = 1) -> Actions:
    """DualPipe: half of the micro-batches begin at the first device, half at the last, over the same devices.

    >>> print(dualpipe(2, 4).timetable())
    0F0 1F2 0F1 1B2 1B2 1F3 0B0 0B0 1B3 1B3 0I1 0W1
    0F2 1F0 0F3 1B0 1B0 1F1 0B2 0B2 1B1 1B1 0I3 0W3
    """
    require_one_chunk(chunks)
    require_even_devices(devices)
    if m % 2:
        raise RequestError("m", f"needs an even number of micro-batches; {m=}")
    require_full_pipeline(devices, m)
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


def zbv(devices: int, m: int, chunks: int = 2) -> Actions:
    """ZB-V (Qi et al. 2023): 1F1B's peak memory, and no bubble between unit tasks of 2d-1 micro-batches or more.

    >>> print(zbv(2, 3).timetable())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    # Fewer micro-batches go as the first ones of a full pipeline.
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
    require_full_pipeline(devices, m)
    return _in_a_v(eight_steps, devices, m, chunks)


def _in_a_v(letters: Callable[[int, int, int], str], devices: int, m: int, chunks: int) -> Actions:
    """Return the order of a V, by the letters of each device: its second stages go back over the devices."""
    if chunks != 2:
        raise RequestError("chunks", f"needs chunks = 2, two stages for each device; {chunks=}")
    actions = actions_from_letters([letters(device, devices, m) for device in range(devices)])
    return replace(actions, stage=np.where(actions.stage, 2 * devices - 1 - actions.device, actions.device))


def _zbv_letters(device: int, devices: int, m: int) -> str:
    after = devices - 1 - device
    fill = "F" * (2 * after + 1) + "fF" * device + "fiw" * (after + 1)
    main = "FIWfiw" * (m - devices - after) + "IWfiw" * after
    return fill + main + "Ii" * device + "IW" * (after + 1) + "w" * device + "W" * device
