"""Sums of gradients in fewer bytes: what each rank sends and holds, by hand.

Each stage has 1,000 numbers. In fp32 these are 4,000 bytes, and 2,000 in bf16 or fp16. int8 has 1,000 bytes and 4 of
scale for each block: 2 blocks of 512 numbers, or 8 of 128; int4 has 500 bytes and the same scales. The largest 1.5 %
are 15 numbers of 4 bytes, each with 4 bytes of index.
"""

from typing import Any

import pytest
from msgspec.structs import replace
from pytest import approx

from cdpsim import Cluster, Model, RequestError, Run, Stage, Tie, compare, plan, simulate
from cdpsim.cluster import Link
from tests.helpers.every_row import every_row

FP32 = {"none": 4000, "bf16": 2000, "fp16": 2000, "int8": 1008, "int8:128": 1032, "int4": 508, "topk:0.015": 120}
# A quarter of the numbers: one block of 512, two of 128.
QUARTER = {"none": 1000, "bf16": 500, "fp16": 500, "int8": 254, "int8:128": 258, "int4": 129}
HALF = {"none": 2000, "bf16": 1000, "fp16": 1000, "int8": 504, "int8:128": 516, "int4": 254}
TOP = "topk:0.015"
LINK = Cluster(link=Link(latency=0.5, bandwidth=1000.0))


def model(n: int = 1, element: int = 4, **more: Any) -> Model:
    """n stages of 1,000 numbers each."""
    stage = Stage(forward=1.0, backward=2.0, parameters=1000 * element, activation=9)
    return Model(stages=(stage,) * n, precision={4: "fp32", 2: "bf16"}[element], **more)


def ran(schedule: str, n: int = 1, **options: Any) -> Run:
    """A run of two steps over a ring, all of whose ranks are there."""
    asked: dict[str, Any] = {"model": model(n), "cluster": LINK, "steps": 2, "collective": "ring"} | options
    return simulate(schedule, n, **asked)


def sizes(run: Run, *ops: str, step: int = 1) -> list[int]:
    """The bytes of a step's messages of gradients, of some operations."""
    return [row.size for row in run.messages if row.content == "gradient" and row.step == step and row.op in ops]


def sent(schedule: str, **options: Any) -> set[int]:
    """The bytes of gradients that ranks send for the second step, in the messages of a ring."""
    run = ran(schedule, expand_collectives=True, **options)
    by_rank: dict[int, int] = {}
    for row in run.messages:
        if row.content == "gradient" and row.step == 1:
            by_rank[row.src] = by_rank.get(row.src, 0) + row.size
    assert len(by_rank) == 4
    return {*by_rank.values()}


def held(run: Run, device: int = 0) -> list[tuple[float, int]]:
    """The bytes of communication on a device, from each time on."""
    return [(row.time, row.size) for row in run.memory if row.device == device and row.category == "communication"]


# Bytes sent: 2 (k-1)/k of an all-reduce, k-1 shares of a reduce-scatter, k-1 times its own of an all-gather


@pytest.mark.parametrize("rate", [*FP32])
def test_plain_data_parallelism(rate: str) -> None:
    """So do workers that a schedule has itself."""
    each = 3 * 120 if rate == TOP else 2 * 3 * FP32[rate] // 4
    assert sent("dp", replicas=4, compress=rate) == {each}
    run = ran("multi-dp", m=4, compress=rate)
    assert sizes(run, "all_gather", "all_reduce") == [4 * 120 if rate == TOP else FP32[rate]]


@pytest.mark.parametrize("rate", [*QUARTER])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shares_are_cast_one_by_one(zero: int, rate: str) -> None:
    assert sent("dp", shard=4, zero=zero, compress=rate) == {3 * QUARTER[rate]}


def test_the_largest_numbers_of_all_ranks_come_where_optimizer_states_are_split() -> None:
    assert sent("dp", shard=4, zero=1, compress=TOP) == {3 * 120}


@pytest.mark.parametrize("rate", [*HALF])
def test_hybrid_shards(rate: str) -> None:
    """A group of two sums to halves, and each half is summed across two groups."""
    run = ran("dp", shard=2, replicas=2, zero=1, compress=rate)
    assert {*sizes(run, "reduce_scatter")} == {*sizes(run, "all_reduce")} == {HALF[rate]}
    assert sent("dp", shard=2, replicas=2, zero=1, compress=rate) == {2 * HALF[rate]}


@pytest.mark.parametrize("rate", [*QUARTER])
def test_chains_owners_and_rounds(rate: str) -> None:
    """The sums of cyclic schedules go from rank to rank, others to the owner of a stage, or beside a round."""
    assert sizes(ran("multi-cdp", 4, compress=rate), "p2p") == [FP32[rate]] * 3 * 4
    assert sizes(ran("zero-dp", 4, compress=rate), "reduce") == [FP32[rate]] * 4
    assert {*sizes(ran("acco", replicas=4, compress=rate), "reduce_scatter")} == {QUARTER[rate]}


@every_row(("rate", "size"), [("bf16", 2000), ("int8", 1008), ("topk:0.015", 2 * 15 * (2 + 4)), ("topk:1", 12_000)])
def test_numbers_of_two_bytes(rate: str, size: int) -> None:
    """A cast never makes more of them. All of the largest numbers, with their indices, are three times as much."""
    assert sizes(ran("dp", replicas=2, model=model(element=2), compress=rate), "all_gather", "all_reduce") == [size]


def test_few_numbers_stay_as_they_are() -> None:
    """Two numbers of 4 bytes are no more than 2 bytes and a scale; one is less than one with a scale."""
    for numbers, size in ((1, 4), (2, 6), (3, 7)):
        one = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=4 * numbers),), precision="fp32")
        run = ran("dp", replicas=2, model=one, cluster="unit", compress="int8")
        assert sizes(run, "all_reduce") == [size]


def test_gradients_of_another_type_than_parameters_have_their_own_numbers() -> None:
    run = ran("dp", replicas=2, model=model(element=2), gradients="fp32", compress="int4")
    assert sizes(run, "all_reduce") == [508]


@every_row(("rate", "op", "size"), [("int8", "all_reduce", 404), ("topk:0.5", "all_gather", 4 * 200 * 8)])
def test_tied_tensors(rate: str, op: str, size: int) -> None:
    """400 numbers are summed over two stages of two replicas; over the stages of one pipeline they stay as they are."""
    tied = model(2, tied=(Tie(stages=(0, 1), parameters=1600),))
    assert size in sizes(ran("gpipe", 2, m=2, replicas=2, model=tied, compress=rate), op)
    assert sizes(ran("gpipe", 2, m=2, model=tied, compress=rate), "all_reduce", "all_gather") == [1600]


# Bytes held: encoded gradients, from the last gradient until the sum has ended; and residuals


@every_row(
    ("options", "encoded", "always"),
    [
        ({"replicas": 4, "compress": "int8"}, 1008, 0),
        ({"replicas": 4, "compress": TOP}, 4 * 120, 4000),
        ({"shard": 4, "zero": 1, "compress": "int8"}, 4 * 254, 0),
        ({"shard": 4, "zero": 1, "compress": TOP}, 4 * 120, 4000),
    ],
)
def test_what_is_encoded_takes_room(options: dict[str, Any], encoded: int, always: int) -> None:
    """A backward ends after 3 s. A residual is there from the start to the last update."""
    run = ran("dp", steps=1, **options)
    (end,) = (row.end for row in run.messages if row.content == "gradient")
    assert held(run) == [*[(0.0, always)] * (always > 0), (3.0, always + encoded), (end, 0)]


def test_a_rank_alone_has_no_residuals() -> None:
    assert held(ran("dp", compress=TOP)) == []


def test_shares_are_encoded_when_they_have_been_summed() -> None:
    """Of two halves with 504 bytes each one goes on across groups."""
    run = ran("dp", steps=1, shard=2, replicas=2, zero=1, compress="int8")
    inside, across = (
        next(row.end for row in run.messages if row.op == op and row.content == "gradient")
        for op in ("reduce_scatter", "all_reduce")
    )
    assert held(run)[:3] == [(3.0, 1008), (inside, 504), (across, 0)]


def test_nothing_is_encoded_that_stays_as_it_is() -> None:
    one = model(element=2)
    runs = [ran("dp", replicas=4, model=one, compress=rate) for rate in (None, "bf16")]
    assert held(runs[0]) == held(runs[1]) == []


@every_row(("rate", "sizes"), [("none", {0, 4000, 8000}), ("int8", {0, 1008, 2016, 4000})])
def test_the_next_rank_has_room_for_what_comes(rate: str, sizes: set[int]) -> None:
    """In a chain these are the sums of one stage or of two, and new parameters, which stay as they are."""
    run = ran("multi-cdp", 2, compress=rate)
    assert {size for device in (0, 1) for _, size in held(run, device)} == sizes


# All together


@pytest.mark.parametrize("rate", ["int4:64", TOP])
@pytest.mark.parametrize("schedule", ["dp", "multi-dp", "1f1b"])
def test_both_engines_agree(schedule: str, rate: str) -> None:
    options = {"replicas": 2} if schedule != "multi-dp" else {}
    one, other = (ran(schedule, 2, m=2, engine=engine, compress=rate, **options) for engine in ("fast", "simpy"))
    for table in ("tasks", "messages", "memory"):
        assert [*getattr(one, table)] == [*getattr(other, table)]


def test_a_step_is_shorter_by_what_is_not_sent() -> None:
    """An all-reduce over a ring of four takes 6 latencies, and 6/4 of its bytes over the bandwidth."""
    for rate, size in FP32.items():
        run = ran("dp", replicas=4, compress=rate)
        time = 3 * 0.5 + 3 * 0.120 if rate == TOP else 6 * 0.5 + 6 / 4 * size / 1000
        assert run.summary()["period"] == pytest.approx(3.0 + time)


def test_compared_schedules_leave_out_what_is_impossible_for_them() -> None:
    """The chain of multi-cdp sums no single numbers; what travels is no sum, and single-dp has nothing to sum."""
    options: dict[str, Any] = {"model": model(4), "cluster": LINK, "n": 4, "compress": ["none", TOP]}
    rows = compare(["multi-dp", "multi-cdp", "zero-cdp", "single-dp"], **options)
    found = [f"{row.schedule} {row.asked.get('compress')}" for row in rows]
    assert found == ["multi-dp none", f"multi-dp {TOP}", "multi-cdp none", "zero-cdp None", "single-dp None"]


def test_plans_search_rates() -> None:
    """The less is sent over a slow link, the better."""
    given: dict[str, Any] = {"model": model(4), "cluster": Cluster(link=Link(bandwidth=100.0)), "schedules": ["dp"]}
    rows = plan(devices=4, batch=4, zero=0, recompute="none", compress=[None, "int8", TOP], **given).rows
    assert [row.options.get("compress") for row in rows] == [TOP, "int8", None]


def test_two_directions_are_two_groups_of_shares() -> None:
    """Where each stage is on two devices of a replica, halves are summed over both of these in the end."""
    asked: dict[str, Any] = {"model": model(2), "shard": 2, "zero": 1}
    assert {*sizes(ran("chimera", 2, m=2, compress="int8", **asked), "all_reduce")} == {HALF["int8"]}
    with pytest.raises(RequestError, match="shares are summed across groups; give int8 or int4, or --zero 0"):
        ran("chimera", 2, m=2, compress=TOP, **asked)


# Factors of rank 2: of 30 x 40 numbers 60 and 80, of 20 x 50 (4 x 5 x 10 within each) 40 and 100; the others stay

SHAPES = ((30, 40), (100,), (20, 5, 10), (2, 3))
WHOLE, LEFT, RIGHT, ALL = 4 * (100 + 6), 4 * (60 + 40), 4 * (80 + 100), 4 * (1200 + 100 + 1000 + 6)


def mixed(n: int = 1, *, shapes: tuple[tuple[int, ...], ...] = SHAPES, **more: Any) -> Model:
    """n stages of two matrices, a vector, and a matrix too small for factors, in fp32."""
    stage = Stage(forward=1.0, backward=2.0, parameters=ALL, activation=9, tensors=shapes)
    return Model(stages=(stage,) * n, precision="fp32", **more)


def factored(schedule: str = "dp", n: int = 1, **options: Any) -> Run:
    return ran(schedule, n, **{"model": mixed(n), "replicas": 4, "compress": "powersgd:2"} | options)


def in_turn(run: Run, stage: int = 0) -> list[int]:
    """The bytes of the second step's sums, as they begin, that have a stage as their lowest."""
    rows = [row for row in run.messages if (row.content, row.step, row.stage) == ("gradient", 1, stage)]
    return [row.size for row in sorted(rows, key=lambda row: row.start)]


def test_factors_are_summed_one_after_the_other() -> None:
    """Each all-reduce takes 6 latencies over a ring of four, and 6/4 of its bytes over the bandwidth."""
    run, time = factored(steps=1), 3.0
    for row, size in zip(run.messages, (WHOLE, LEFT, RIGHT), strict=True):
        end = time + 6 * 0.5 + 6 / 4 * size / 1000
        assert (row.op, row.size) == ("all_reduce", size)
        assert (row.start, row.end) == approx((time, end))
        time = row.end
    assert {row.start for row in run.tasks if row.kind == "U"} == {time}
    for ranks in ({"replicas": 4}, {"shard": 4, "zero": 1}):
        assert sent("dp", model=mixed(), **ranks, compress="powersgd:2") == {2 * 3 * (WHOLE + LEFT + RIGHT) // 4}


@every_row(
    ("options", "carried"),
    [
        ({"buckets": "none"}, [WHOLE, LEFT, RIGHT]),
        ({"buckets": "1 B"}, [4 * 6, 4 * 40, 4 * 100, 4 * 100, 4 * 60, 4 * 80]),
        ({"buckets": "25 B"}, [4 * 6, 4 * 40, 4 * 100, 4 * 100, 4 * 60, 4 * 80]),
        ({"buckets": "4025 B"}, [4 * 106, 4 * 40, 4 * 100, 4 * 60, 4 * 80]),
        ({"compress": "powersgd:8"}, [ALL - 4 * 1200, 4 * 240, 4 * 320]),
        ({"compress": "powersgd:9"}, [ALL]),
        ({"model": mixed(shapes=((2306,),))}, [ALL]),
        ({"model": mixed(2)}, [2 * WHOLE, 2 * LEFT, 2 * RIGHT]),
        ({"gradients": "bf16"}, [WHOLE // 2, LEFT // 2, RIGHT // 2]),
    ],
)
def test_buckets_of_whole_tensors_go_one_after_another(options: dict[str, Any], carried: list[int]) -> None:
    """Gradients come from the last tensor on. Factors go where they are less than half: 16 (30 + 40) of 1,200 are."""
    assert in_turn(factored(n=options.get("model", mixed()).n, **options)) == carried


def test_pipelines_sum_factors_of_each_stage() -> None:
    run = factored("1f1b", 2, m=2, replicas=2)
    assert [in_turn(run, stage) for stage in (0, 1)] == [[WHOLE, LEFT, RIGHT]] * 2


def test_tied_tensors_are_not_factored() -> None:
    """The other matrix is."""
    tied = mixed(2, tied=(Tie(stages=(0, 1), parameters=4000),))
    run = factored("gpipe", 2, m=2, replicas=2, model=tied)
    assert [in_turn(run, stage) for stage in (0, 1, -1)] == [[WHOLE, 240, 320], [WHOLE, 240, 320], [4000]]


def test_what_factors_leave_takes_room() -> None:
    """Residuals and factors always do; a copy of what goes as it is until that is summed, and one of all until the end.

    Ranks that have nothing to sum have none of it.
    """
    run, always = factored(steps=1), ALL + LEFT + RIGHT
    first, _, last = (row.end for row in run.messages)
    assert held(run) == [(0.0, always), (3.0, always + ALL + WHOLE), (first, always + ALL), (last, 0)]
    assert held(factored(replicas=1)) == []


@pytest.mark.parametrize("options", [{"schedule": "dp"}, {"schedule": "1f1b", "n": 2, "m": 2, "reduce": "each"}])
def test_both_engines_agree_on_factors(options: dict[str, Any]) -> None:
    for more in ({}, {"buckets": "1 B"}, {"expand_collectives": True}):
        one, other = (factored(engine=engine, **options, **more) for engine in ("fast", "simpy"))
        for table in ("tasks", "messages", "memory"):
            assert [*getattr(one, table)] == [*getattr(other, table)]


def test_plans_search_factors() -> None:
    given: dict[str, Any] = {"model": mixed(4), "cluster": Cluster(link=Link(bandwidth=100.0)), "schedules": ["dp"]}
    rows = plan(devices=4, batch=4, zero=0, recompute="none", compress=[None, "powersgd:2"], **given).rows
    assert [row.options.get("compress") for row in rows] == ["powersgd:2", None]


@every_row(
    ("wrong", "problem"),
    [
        (model(), "depends on the shapes of parameters, and stage 0 does not have any"),
        (mixed(2, tied=(Tie(stages=(0, 1), parameters=8),)), "stage 0 does not have any"),
        (Model(stages=(replace(mixed().stages[0], gradients=ALL + 1),)), "gradients of some stage have parts of bytes"),
    ],
)
def test_factors_need_shapes(wrong: Model, problem: str) -> None:
    with pytest.raises(RequestError, match=f"^compress: .*{problem}"):
        factored("gpipe", wrong.n, m=2, model=wrong)


def test_slots_have_no_bytes() -> None:
    with pytest.raises(RequestError, match="compress: changes bytes, and slots have none; give a --model"):
        simulate("multi-dp", 4, compress="int8")
