"""Orders of pipelines: laws for each of them, published properties of each, and refusals."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES
from cdpsim.errors import RequestError
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.pipelines import chimera, gems, gpipe, interleaved, looped_bfs, one_f_one_b
from tests.helpers.action_player import DOUBLE, UNIT, Played, in_flight, order_of, play
from tests.helpers.declared_orders import ORDERS, cases

BOTH_WAYS = ("chimera", "gems")

# Orders of pipelines that ship; test_orders_zero.py plays those of zero bubbles, V shapes and DualPipe.
SHIPPED = {
    name: one.order.lists.actions for name, one in SCHEDULES.items() if one.order.lists and not one.order.one_place
}
PLAYED_ELSEWHERE = ("zero_bubble", "fold", "dual")

many = settings(max_examples=500)
most = (9, 24, 4)  # devices, micro-batches, chunks
sizes = tuple(st.integers(1, size) for size in most)
each = settings(max_examples=300)


@pytest.mark.every_case
@pytest.mark.parametrize("name", SHIPPED)
def test_an_order_that_ships_has_laws_and_a_timetable(name: str) -> None:
    order, known = SHIPPED[name], {declared.of for declared in ORDERS.values()}
    has_laws = order in known or order.__module__.rpartition(".")[2] in PLAYED_ELSEWHERE
    assert has_laws, f"add {name} to ORDERS in tests/helpers/declared_orders.py, with the sizes that it takes"
    shows = ".timetable())" in str(order.__doc__)
    assert shows, f"show {name} in the docstring of its order: `>>> print({order.__name__}(2, 3).timetable())`"


@each
@given(cases(*most, meant=False))
def test_an_order_that_is_not_meant_is_refused_in_a_line(case: tuple[str, int, int, int]) -> None:
    name, devices, m, chunks = case
    with pytest.raises(RequestError) as refusal:
        ORDERS[name].of(devices, m, chunks)
    subject, _, problem = str(refusal.value).partition(": needs ")
    assert subject in ("m", "n", "chunks")
    assert f"; {subject}=" in problem or f"; {devices=}" in problem


@each
@given(cases(*most))
def test_an_order_is_a_training_step(case: tuple[str, int, int, int]) -> None:
    """A forward and a backward of every micro-batch and stage, each once; and a run of it ends."""
    name, devices, m, chunks = case
    actions = ORDERS[name].of(devices, m, chunks)
    played = play(actions, UNIT)
    assert len(played.order) == devices
    done = sorted((i, stage, {"I": "BI", "W": "BW"}.get(kind, kind)) for kind, stage, i in played.end)
    split = {(i, stage) for i, stage, kind in done if len(kind) > 1}
    passes = [(i, stage) for i in range(m) for stage in range(devices * chunks)]
    assert done == sorted(
        (*one, kind) for one in passes for kind in (["F", "BI", "BW"] if one in split else ["F", "B"])
    )
    assert len(actions) == len(done)
    check_actions(actions)


@each
@given(cases(*most))
def test_a_stage_is_on_one_device_or_on_the_one_across(case: tuple[str, int, int, int]) -> None:
    name, devices, m, chunks = case
    for device, row in enumerate(order_of(ORDERS[name].of(devices, m, chunks))):
        mine = {device, devices - 1 - device} if name in BOTH_WAYS else {device}
        assert {stage % devices for _, stage, _ in row} <= mine
        assert len({stage for _, stage, _ in row}) == len(mine) * chunks or (name in BOTH_WAYS and m == 1)


@each
@given(cases(*most))
def test_columns_of_orders_have_32_bits(case: tuple[str, int, int, int]) -> None:
    name, *size = case
    actions = ORDERS[name].of(*size)
    columns = (actions.first, actions.kind, actions.stage, actions.micro_batch)
    assert {column.dtype.name for column in columns} == {"int32"}


def bubbles(played: Played) -> Fraction:
    """The share of all devices' time in which they do nothing."""
    return Fraction(played.bubble, len(played.order) * played.whole)


devices_and_rounds = (st.integers(1, 8), st.integers(1, 5))
times = st.sampled_from([UNIT, DOUBLE, {"F": 3, "B": 5}])


@many
@given(st.sampled_from([gpipe, one_f_one_b]), *sizes[:2], times)
def test_gpipe_and_1f1b_have_the_same_bubble(
    order: Callable[[int, int], Actions], d: int, m: int, took: dict[str, int]
) -> None:
    assert bubbles(play(order(d, m), took)) == Fraction(d - 1, m + d - 1)


@many
@given(st.sampled_from([interleaved, looped_bfs]), *devices_and_rounds, sizes[2], times)
def test_stages_in_a_loop_divide_the_bubble_by_chunks(
    order: Callable[[int, int, int], Actions], d: int, rounds: int, v: int, took: dict[str, int]
) -> None:
    m = d * rounds
    assert bubbles(play(order(d, m, v), took)) == Fraction(d - 1, v * m + d - 1)


@many
@given(*sizes[:2])
def test_1f1b_has_no_more_in_flight_than_fill_the_pipeline(d: int, m: int) -> None:
    assert [in_flight(row) for row in order_of(gpipe(d, m))] == [m] * d
    assert [in_flight(row) for row in order_of(one_f_one_b(d, m))] == [min(d - r, m) for r in range(d)]


@given(*devices_and_rounds, sizes[2])
def test_interleaved_has_a_few_more_in_flight_and_breadth_first_all(d: int, rounds: int, v: int) -> None:
    m = d * rounds
    ahead = [(v - 1) * d + 2 * (d - 1 - r) + 1 for r in range(d)]
    assert [in_flight(row) for row in order_of(interleaved(d, m, v))] == [min(most, m * v) for most in ahead]
    assert [in_flight(row) for row in order_of(looped_bfs(d, m, v))] == [m * v] * d


@given(st.integers(1, 5), st.integers(1, 4))
def test_chimera_has_the_papers_bubble_and_memory(half: int, units: int) -> None:
    """Table 2: (D - 2) / (2 N + D - 2) with equal times, and D / 2 + 1 to D activations."""
    d, m = 2 * half, 2 * half * units
    assert bubbles(play(chimera(d, m), UNIT)) == Fraction(d - 2, 2 * m + d - 2)
    held = [in_flight(row) for row in order_of(chimera(d, m))]
    assert held == [min(d // 2 + 1 + min(r, d - 1 - r), d) for r in range(d)]


@given(st.integers(1, 5), st.integers(1, 4))
def test_a_longer_backward_leaves_chimera_bubbles_between_units(half: int, units: int) -> None:
    """The paper's (D - 2) / (3 N / 2 + D - 2) is of one unit; a direct concatenation has D - 2 slots for each more."""
    d, m = 2 * half, 2 * half * units
    assert bubbles(play(chimera(d, d), DOUBLE)) == Fraction(d - 2, Fraction(3 * d, 2) + d - 2)
    assert play(chimera(d, m), DOUBLE).bubble == d * (d - 2) * (units + 1)


@given(st.integers(1, 5), st.data())
def test_chimera_shares_fewer_micro_batches_out_as_evenly_as_can_be(half: int, data: st.DataObject) -> None:
    d = 2 * half
    m = data.draw(st.integers(1, d))
    played = play(chimera(d, m), UNIT)
    assert played.whole == 2 * d + 2 * ((m + 1) // 2 - 1)
    assert [i for kind, stage, i in played.order[0] if (kind, stage) == ("F", 0)] == list(range((m + 1) // 2))


# Written out, as papers draw them: kind and micro-batch, and the stage where a device has several.
DRAWN = [
    (gpipe, 2, 3, 1, ["F0 F1 F2 B0 B1 B2"] * 2),
    (one_f_one_b, 2, 3, 1, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
    (interleaved, 1, 2, 2, ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]),
    (looped_bfs, 1, 2, 2, ["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"]),
    (chimera, 2, 2, 1, ["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"]),
    (chimera, 4, 4, 1, ["0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1", "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1"]),
    (gems, 2, 3, 1, ["0F0 0B0 1F1 1B1 0F2 0B2", "1F0 1B0 0F1 0B1 1F2 1B2"]),
]


@pytest.mark.parametrize(("order", "devices", "m", "chunks", "drawn"), DRAWN)
def test_orders_are_as_they_are_drawn(
    order: Callable[[int, int, int], Actions], devices: int, m: int, chunks: int, drawn: list[str]
) -> None:
    rows = order_of(order(devices, m, chunks))
    several = len({stage for _, stage, _ in rows[0]}) > 1
    said = [" ".join(f"{stage if several else ''}{kind}{i}" for kind, stage, i in row) for row in rows]
    assert said[: len(drawn)] == drawn


@many
@given(*sizes[:2])
def test_gems_has_two_micro_batches_at_a_time_and_the_bubble_that_goes_with_it(d: int, m: int) -> None:
    """Chimera's Table 2 has (D - 1) / (D + 1/2), where a backward takes twice and micro-batches are many."""
    played = play(gems(d, m), DOUBLE)
    assert played.whole == d + (m - 1) + 2 * d * m
    begin, end = ([at["F" if at is played.start else "B", 0, i] for i in range(m)] for at in (played.start, played.end))
    assert all(sum(b < when <= e for b, e in zip(begin, end, strict=True)) <= 2 for when in end)
    assert [in_flight(row) for row in played.order] == [1] * d
    papers = Fraction(2 * (d - 1), 2 * d + 1)
    assert papers <= bubbles(played) <= papers + Fraction(1, m)


@pytest.mark.parametrize(
    ("order", "devices", "m", "chunks", "says"),
    [
        (gpipe, 4, 4, 2, "chunks: needs chunks = 1, a stage for each device; chunks=2"),
        (one_f_one_b, 4, 4, 3, "chunks: needs chunks = 1, a stage for each device; chunks=3"),
        (interleaved, 2, 5, 2, "m: needs m to be a multiple of its m // devices = 2 rounds; m=5, devices=2"),
        (chimera, 3, 4, 1, "n: needs an even number of devices; devices=3"),
        (chimera, 4, 4, 2, "chunks: needs chunks = 1, a stage for each device; chunks=2"),
        (gems, 4, 4, 2, "chunks: needs chunks = 1, a stage for each device; chunks=2"),
    ],
)
def test_what_an_order_does_not_allow_it_refuses_with_what_it_needs(
    order: Callable[[int, int, int], Actions], devices: int, m: int, chunks: int, says: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        order(devices, m, chunks)
    assert str(refusal.value) == says
