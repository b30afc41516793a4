"""Zero-bubble orders and DualPipe, played: published bubbles and memory, and what is left where they do not hold."""

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim.errors import RequestError
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.pipelines import dualpipe, dualpipev, interleaved_zero_bubble, zb_h1, zb_h2, zbv
from tests.helpers.action_player import Named, in_flight, order_of, play, together
from tests.helpers.every_row import every_row

Order = Callable[[int, int, int], Actions]

# Sizes that each order allows, made of any devices, micro-batches and chunks.
ALLOWED: dict[Order, Callable[[int, int, int], tuple[int, int, int]]] = {
    zb_h1: lambda devices, m, chunks: (devices, m, 1),
    zb_h2: lambda devices, m, chunks: (devices, m, 1),
    interleaved_zero_bubble: lambda devices, m, chunks: (devices, in_rounds(devices, m), chunks),
    zbv: lambda devices, m, chunks: (devices, m, 2),
    dualpipev: lambda devices, m, chunks: (devices, 2 * devices + m - 1, 2),
    dualpipe: lambda devices, m, chunks: (2 * devices, 2 * (2 * devices + m - 1), 1),
}

counts, micro_batches, times = st.integers(1, 6), st.integers(1, 14), st.integers(1, 9)
more = st.integers(0, 8)


def in_rounds(devices: int, m: int) -> int:
    """As many of m micro-batches as come in equal rounds."""
    return m - m % max(m // devices, 1)


def bubble(actions: Actions, f: int = 1, i: int = 1, w: int = 1, pairs: bool = False) -> int:
    """Return the longest stay of a device less its work, as Qi et al. count: late devices may end late."""
    times = {"F": f, "B": i + w, "I": i, "W": w}
    played = play(actions, times, pairs)
    return played.longest_stay - sum(times[kind] for kind, _, _ in played.order[0])


def held(actions: Actions) -> list[int]:
    """The most activations that each device holds, from their forward until their W or whole backward."""
    return [in_flight(row) for row in order_of(actions)]


def held_until_i(actions: Actions) -> list[int]:
    """The same until their I."""
    return [
        in_flight([("B" if kind == "I" else kind, stage, i) for kind, stage, i in row if kind != "W"])
        for row in order_of(actions)
    ]


@given(st.sampled_from(list(ALLOWED)), counts, micro_batches, st.integers(1, 4))
def test_an_order_is_a_whole_training_step_and_ends(order: Order, devices: int, m: int, chunks: int) -> None:
    devices, m, chunks = ALLOWED[order](devices, m, chunks)
    actions = order(devices, m, chunks)
    check_actions(actions)
    play(actions, {"F": 1, "B": 2, "I": 1, "W": 1}, pairs=True)
    assert (actions.devices, actions.micro_batch.max(), actions.stage.max()) == (devices, m - 1, devices * chunks - 1)
    assert {column.dtype for column in (actions.kind, actions.stage, actions.micro_batch)} == {np.dtype(np.int32)}


@given(counts, more, times, times, times)
def test_the_bubble_of_h1_is_that_of_the_paper(devices: int, more: int, f: int, i: int, w: int) -> None:
    """(d-1)(F + I - W), if forwards are no shorter than Ws, with as many micro-batches as devices or more."""
    f = max(f, w)
    assert bubble(zb_h1(devices, devices + more), f, i, w) == (devices - 1) * (f + i - w)


@given(counts, more, times, times, times)
def test_the_bubble_of_h2_is_that_of_the_paper(devices: int, more: int, f: int, i: int, w: int) -> None:
    """(d-1)(F + I - 2W), if neither forwards nor Is are shorter than Ws, with 2d-1 micro-batches or more."""
    f, i = max(f, w), max(i, w)
    assert bubble(zb_h2(devices, 2 * devices - 1 + more), f, i, w) == (devices - 1) * (f + i - 2 * w)


@given(counts, st.integers(1, 3), st.integers(1, 4), times, times, times)
def test_more_stages_on_each_device_make_the_bubble_no_longer(
    devices: int, rounds: int, chunks: int, f: int, i: int, w: int
) -> None:
    """That of H1 in tasks of stages, which are the shorter the more of them there are."""
    f, i = max(f, w), max(i, w)
    actions = interleaved_zero_bubble(devices, rounds * devices, chunks)
    assert bubble(actions, f, i, w) == (devices - 1) * (f + i - w)


@given(counts, micro_batches)
def test_each_micro_batch_that_lacks_leaves_a_slot_empty(devices: int, m: int) -> None:
    """Under unit times: for H2 and ZB-V fewer than 2d-1 micro-batches are too few, for H1 fewer than d."""
    lacking = max(2 * devices - 1 - m, 0)
    assert bubble(zb_h1(devices, m)) == max(devices - 1, lacking)
    assert bubble(zb_h2(devices, m)) == lacking
    assert bubble(zbv(devices, m)) == 2 * lacking


@given(counts, micro_batches)
def test_h1_holds_what_1f1b_does_and_h2_twice_as_much_less_one(devices: int, m: int) -> None:
    """Until their Is, no more than there are devices from its own on; until their Ws, as much as the first device."""
    behind = range(devices - 1, -1, -1)
    assert held_until_i(zb_h1(devices, m)) == [min(1 + after, m) for after in behind]
    assert held(zb_h1(devices, m)) == devices * [min(devices, m)]
    assert held_until_i(zb_h2(devices, m)) == [min(1 + 2 * after, m) for after in behind]
    assert held(zb_h2(devices, m)) == devices * [min(2 * devices - 1, m)]


@given(counts, micro_batches, st.integers(1, 4))
def test_interleaved_holds_a_round_for_each_stage_but_the_last(devices: int, m: int, chunks: int) -> None:
    m = in_rounds(devices, m)
    round_ = m // max(m // devices, 1)
    actions = interleaved_zero_bubble(devices, m, chunks)
    assert held(actions) == devices * [min((chunks - 1) * round_ + devices, m * chunks)]


@given(counts, micro_batches)
def test_a_v_holds_what_1f1b_does(devices: int, m: int) -> None:
    """Two of 2d stages each: 2d activations are d of a whole device's."""
    most = held(zbv(devices, m))
    assert max(most) == 2 * min(devices, m)
    assert min(most) == max(most) or m < 2 * devices - 1


@given(counts, micro_batches)
def test_one_stage_on_each_device_interleaved_is_h1(devices: int, m: int) -> None:
    m = in_rounds(devices, m)
    assert order_of(interleaved_zero_bubble(devices, m, 1)) == order_of(zb_h1(devices, m))


both_directions = st.builds(lambda half, more: (2 * half, 4 * half + 2 * more), st.integers(1, 4), st.integers(0, 5))


@given(both_directions, times, times, times)
def test_the_bubble_of_dualpipe_is_the_published_one(sizes: tuple[int, int], f: int, i: int, w: int) -> None:
    """(d/2-1)(F&B + B - 3W), with F&B = F + B and B = I + W, if pairs are one and a forward takes as long as an I.

    At most that, if Is take longer; if forwards do, it is (d/2-1)(2F + I - W). Ws are no longer than Is.
    """
    i = max(i, w)
    actions, turns = dualpipe(*sizes), sizes[0] // 2 - 1
    assert bubble(actions, i, i, w, pairs=True) == turns * ((i + i + w) + (i + w) - 3 * w)
    if f < i:
        assert bubble(actions, f, i, w, pairs=True) <= turns * ((f + i + w) + (i + w) - 3 * w)
    else:
        assert bubble(actions, f, i, w, pairs=True) == turns * (2 * f + i - w)


@given(both_directions, times, times, times)
def test_pairs_apart_leave_no_longer_a_bubble(sizes: tuple[int, int], f: int, i: int, w: int) -> None:
    """Each half then waits for its own input only."""
    assert bubble(dualpipe(*sizes), f, i, w) <= bubble(dualpipe(*sizes), f, i, w, pairs=True)


@given(both_directions)
def test_dualpipe_holds_one_activation_more_than_there_are_devices(sizes: tuple[int, int]) -> None:
    devices, m = sizes
    assert held(dualpipe(devices, m)) == devices * [devices + 1]
    assert held(dualpipev(devices // 2, m // 2)) == devices // 2 * [devices + 1]


def by_eight_steps(device: int, devices: int, m: int) -> list[list[Named]]:
    """A device's part of DualPipe as its published code goes through it, counting; pairs that overlap are together.

    Phase 0 is the direction that begins at the device's half, and Ws are done first come, first served.
    """
    half = min(device, devices - 1 - device)
    before, after = half + 1, devices // 2 - 1 - half
    counts: Counter[tuple[bool, int]] = Counter()
    parts: deque[tuple[int, int]] = deque()

    def do(kind: str, phase: int) -> Named:
        down = phase == (device >= devices // 2)  # first half of the micro-batches, from device 0 on
        stage, i = device if down else devices - 1 - device, counts[kind == "F", phase] + (0 if down else m // 2)
        counts[kind == "F", phase] += 1
        if kind == "I":
            parts.append((stage, i))
        return kind, stage, i

    def weights() -> Named:
        return "W", *parts.popleft()

    steps = [[do("F", 0)] for _ in range(2 * after)]
    for _ in range(before):
        steps += [[do("F", 0)], [do("F", 1)]]
    for _ in range(after):
        steps += [[do("I", 1)], [weights()], [do("F", 1)]]
    for turn in range(m // 2 - devices + before):
        pair = [do("F", 0), do("B", 1)]
        steps += [[pair[0]], [pair[1]]] if turn == after == 0 else [pair]
        steps += [[do("F", 1), do("B", 0)]]
    for _ in range(after):
        steps += [[do("B", 1)], [do("F", 1), do("B", 0)]]
    split = False
    for turn in range(before):
        for phase in (1, 0):
            split |= turn == before // 2 and half % 2 == phase
            steps.append([do("I" if split else "B", phase)])
    for _ in range(after):
        steps += [[weights()], [do("I", 0)]]
    return steps + [[weights()] for _ in range(before)]


@given(both_directions)
def test_dualpipe_is_its_eight_steps(sizes: tuple[int, int]) -> None:
    devices, m = sizes
    assert together(dualpipe(devices, m), pairs=True) == [
        by_eight_steps(device, devices, m) for device in range(devices)
    ]


@every_row(
    ("order", "sizes", "problem"),
    [
        (zb_h1, (4, 8, 2), "chunks: needs chunks = 1, a stage for each device; chunks=2"),
        (zb_h2, (4, 8, 3), "chunks: needs chunks = 1, a stage for each device; chunks=3"),
        (
            interleaved_zero_bubble,
            (2, 5, 2),
            "m: needs m to be a multiple of its m // devices = 2 rounds; m=5, devices=2",
        ),
        (zbv, (4, 8, 3), "chunks: needs chunks = 2, two stages for each device; chunks=3"),
        (dualpipev, (4, 8, 1), "chunks: needs chunks = 2, two stages for each device; chunks=1"),
        (dualpipev, (4, 3, 2), "m: needs m >= 2 * devices; m=3, devices=4"),
        (dualpipe, (4, 8, 2), "chunks: needs chunks = 1, a stage for each device; chunks=2"),
        (dualpipe, (3, 8, 1), "n: needs an even number of devices; devices=3"),
        (dualpipe, (4, 9, 1), "m: needs an even number of micro-batches; m=9"),
        (dualpipe, (4, 6, 1), "m: needs m >= 2 * devices; m=6, devices=4"),
    ],
)
def test_what_an_order_does_not_allow_is_refused(order: Order, sizes: tuple[int, int, int], problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        order(*sizes)
    assert str(refusal.value) == problem
