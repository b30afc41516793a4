"""When data ranks exchange what: steps of DDP and of FSDP against closed forms and recurrences."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from cdpsim import Cluster, Model, Run, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.timing.engine import ENGINES

RANKS = 4
BANDWIDTH = 1000.0
LATENCY = 0.001


def cluster(overlap: str = "full", latency: float = 0.0) -> Cluster:
    link = Link(latency=latency, bandwidth=BANDWIDTH)
    return Cluster(devices=(Devices(speed=1e12, overlap=overlap),), link=link)


def layers(forwards: Sequence[float], backwards: Sequence[float], sizes: Sequence[int]) -> Model:
    """Layers with parameters alone, as many bytes of gradients, and updates that take no time."""
    rows = zip(forwards, backwards, sizes, strict=True)
    return Model(stages=tuple(Stage(forward=f, backward=b, parameters=size) for f, b, size in rows))


def one_way(size: int, latency: float = 0.0) -> float:
    """Return the time of an all-gather or reduce-scatter around the ring of all ranks."""
    return (RANKS - 1) * (latency + size / RANKS / BANDWIDTH)


def step(model: Model, platform: Cluster, **options: Any) -> Run:
    return simulate("dp", model=model, cluster=platform, collective="ring", steps=1, **options)


def ends_of(run: Run, kind: str) -> float:
    return float(run.tasks[run.tasks.kind == kind].end.max())


OVERLAPS = ["full", "stream"]


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("message", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("count", range(1, 7))
def test_a_step_of_ddp_ends_with_its_last_bucket(count: int, message: float, overlap: str) -> None:
    """max(C + T/K, F + B/K + T): the last one of K equal buckets is ready last, or is sent after all others."""
    forward, backward = 0.5, 1.25
    size = round(message * BANDWIDTH * RANKS / (2 * (RANKS - 1)) / 4) * 4
    model = layers([forward] * count, [backward] * count, [size] * count)
    run = step(model, cluster(overlap, LATENCY), zero=0, replicas=RANKS, m=1, buckets="1 B")
    reduced = count * 2 * one_way(size, LATENCY)
    computed = count * (forward + backward)
    expected = max(computed + reduced / count, count * forward + backward + reduced)
    assert run.makespan == pytest.approx(expected)
    assert len(run.messages) == count


@pytest.mark.parametrize("m", [1, 3])
def test_reducing_at_the_end_adds_the_all_reduce_to_the_step_of_one_rank(m: int) -> None:
    model = layers([1.0, 2.0, 0.5], [2.0, 3.0, 1.5], [400, 1200, 800])
    alone = simulate("dp", model=model, cluster=cluster(), steps=1, m=m)
    for overlap in OVERLAPS:
        run = step(model, cluster(overlap, LATENCY), replicas=RANKS, m=m, reduce="end", buckets="none")
        each = sum(2 * one_way(size, LATENCY) for size in (400, 1200, 800))
        assert run.makespan == pytest.approx(alone.makespan + each)
        run = step(model, cluster(overlap, LATENCY), replicas=RANKS, m=m, reduce="end", buckets="1 GB")
        assert run.makespan == pytest.approx(alone.makespan + 2 * one_way(2400, LATENCY))


def test_accumulation_reduces_beside_the_last_backwards_alone() -> None:
    """Four micro-batches: three whole passes, then the last one's step of DDP."""
    model = layers([1.0] * 3, [2.0] * 3, [800] * 3)
    each, whole = (step(model, cluster(), replicas=RANKS, m=m, buckets="1 B").makespan for m in (1, 4))
    assert whole == pytest.approx(each + 3 * 9)


# FSDP2 with unequal layers: (forward, backward, bytes)
UNEQUAL = (
    ((1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0), (400, 400, 400, 400)),
    ((1.0, 0.2, 3.0, 0.1, 2.0), (2.0, 0.5, 5.0, 0.3, 4.0), (400, 2000, 800, 4000, 1200)),
    ((0.1, 0.1, 5.0, 0.1, 0.1, 0.1), (0.1, 0.2, 9.0, 0.1, 0.3, 0.1), (800, 4000, 800, 4000, 2000, 400)),
    ((2.0, 1.0), (3.0, 2.0), (2000, 4000)),
    ((2.0,), (3.0,), (2000,)),
)


def forward_end(forwards: Sequence[float], gathers: Sequence[float]) -> float:
    """Return when the last forward ends, with two buffers for all-gathers, which are made one after another.

    The gather of layer i + 1 begins when that of layer i has ended and layer i - 1's parameters have been copied out
    of their buffer, at the start of its forward.
    """
    gathered: list[float] = []
    started: list[float] = []
    time = 0.0
    for i, (forward, gather) in enumerate(zip(forwards, gathers, strict=True)):
        begin = max(gathered[-1] if gathered else 0.0, started[i - 2] if i >= 2 else 0.0)
        gathered.append(begin + gather)
        started.append(max(time, gathered[i]))
        time = started[i] + forward
    return time


def backward_end(backwards: Sequence[float], gathers: Sequence[float], reductions: Sequence[float]) -> float:
    """Return when the last reduction ends, after the backwards began; a gather of 0 is that of a layer that stays.

    A layer's backward waits for its own gather and begins that of the layer before it; its reduction begins when it has
    ended. The link takes messages in the order of these moments. It ends when at most its own
    reduction is left.
    """
    link = compute = 0.0
    gathered = dict.fromkeys(range(len(backwards)), 0.0)
    reduced = 0.0
    for i in reversed(range(len(backwards))):
        start = max(compute, gathered[i])
        if i and gathers[i - 1]:
            link = max(link, start) + gathers[i - 1]
            gathered[i - 1] = link
        compute = max(start + backwards[i], reduced)
        link = reduced = max(link, compute) + reductions[i]
    return reduced


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("gather", "forward"), [(0.3, 1.0), (1.0, 1.0), (3.0, 1.0)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_forwards_of_equal_layers_hide_their_gathers(count: int, gather: float, forward: float, overlap: str) -> None:
    """g + (L-1) max(f, g) + f."""
    size = round(gather * BANDWIDTH * RANKS / (RANKS - 1) / 4) * 4
    model = layers([forward] * count, [9.0] * count, [size] * count)
    run = step(model, cluster(overlap, LATENCY), zero=3, shard=RANKS, m=1)
    g = one_way(size, LATENCY)
    assert ends_of(run, "F") == pytest.approx(g + (count - 1) * max(forward, g) + forward)


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("backward", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_backwards_of_equal_layers_hide_gathers_and_reductions(count: int, backward: float, overlap: str) -> None:
    """b + (L-1) max(b, g + h) + h where b >= g + h; else by the recurrence. First and last layer stay gathered."""
    size = 400
    model = layers([1.0] * count, [backward] * count, [size] * count)
    run = step(model, cluster(overlap, LATENCY), zero=3, shard=RANKS, m=1, reshard="root")
    g = h = one_way(size, LATENCY)
    after = run.makespan - ends_of(run, "F")
    if backward >= g + h:
        assert after == pytest.approx(backward + (count - 1) * max(backward, g + h) + h)
    resident = [0.0] + [g] * (count - 2) + [0.0] if count > 1 else [0.0]
    assert after == pytest.approx(backward_end([backward] * count, resident, [h] * count))


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("forwards", "backwards", "sizes"), UNEQUAL)
def test_forwards_of_unequal_layers_are_those_of_two_buffers(
    forwards: Sequence[float], backwards: Sequence[float], sizes: Sequence[int], overlap: str
) -> None:
    run = step(layers(forwards, backwards, sizes), cluster(overlap, LATENCY), zero=3, shard=RANKS, m=1)
    assert ends_of(run, "F") == pytest.approx(forward_end(forwards, [one_way(size, LATENCY) for size in sizes]))


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("forwards", "backwards", "sizes"), UNEQUAL)
def test_backwards_of_unequal_layers_prefetch_one_and_reduce_one(
    forwards: Sequence[float], backwards: Sequence[float], sizes: Sequence[int], overlap: str
) -> None:
    run = step(layers(forwards, backwards, sizes), cluster(overlap, LATENCY), zero=3, shard=RANKS, m=1, reshard="root")
    times = [one_way(size, LATENCY) for size in sizes]
    resident = [0.0, *times[1:-1], 0.0][: len(sizes)] if len(sizes) > 1 else [0.0]
    assert run.makespan - ends_of(run, "F") == pytest.approx(backward_end(backwards, resident, times))


@pytest.mark.every_case
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("forwards", "backwards", "sizes"), UNEQUAL)
def test_buckets_of_one_layer_are_reduced_one_after_another(
    forwards: Sequence[float], backwards: Sequence[float], sizes: Sequence[int], pieces: int, overlap: str
) -> None:
    """With gradients in shares a layer waits for the sums of the layers before, in whatever number of buckets."""
    rows = zip(forwards, backwards, sizes, strict=True)
    stages = [
        Stage(forward=f, backward=b, parameters=size, tensors=((size // pieces,),) * pieces) for f, b, size in rows
    ]
    run = step(Model(stages=tuple(stages)), cluster(overlap), zero=2, shard=RANKS, m=1, buckets="1 B")
    times = [one_way(size) for size in sizes]
    sums = run.messages[run.messages.content == "gradient"]
    assert len(sums) == pieces * len(sizes)
    assert float(sums.end.max()) - ends_of(run, "F") == pytest.approx(
        backward_end(backwards, [0.0] * len(times), times)
    )


@pytest.mark.parametrize(("reduce", "reductions"), [("each", 3), ("last", 1), ("end", 1)])
def test_parameters_are_not_gathered_while_they_are_there(reduce: str, reductions: int) -> None:
    """m (2g + L (f + b) + h): last layers are dropped before they are gathered again, and so are first ones.

    FSDP2 waits with an all-gather for the end of the same layer's last use (`_reshard_after_forward_event`), and begins
    each forward with the gather of its first layer. Sums after each pass end before the next one begins.
    """
    count, m, forward, backward, size = 4, 3, 1.0, 2.0, 800
    model = layers([forward] * count, [backward] * count, [size] * count)
    run = step(model, cluster(), zero=3, shard=RANKS, m=m, reduce=reduce)
    message = one_way(size)
    sums = reductions * message if reduce != "end" else count * message
    assert run.makespan == pytest.approx(m * (2 * message + count * (forward + backward)) + sums)


def test_few_ranks_gather_for_backwards_in_the_time_of_few() -> None:
    """Replicas that stand for others have groups of both sizes: g of four ranks and g' of two, and h at the end."""
    count, size, forward, backward = 3, 800, 1.0, 2.0
    model = layers([forward] * count, [backward] * count, [size] * count)
    run = step(model, cluster(latency=LATENCY), zero=3, shard=RANKS, m=1, reshard=2)
    few = LATENCY + size / 2 / BANDWIDTH
    assert run.makespan == pytest.approx(2 * one_way(size, LATENCY) + few + count * (forward + backward))


def test_the_messages_of_a_rank_are_never_side_by_side() -> None:
    """Gathers and reductions share one link: the second of two that are ready begins when the first has ended."""
    forwards, backwards, sizes = UNEQUAL[1]
    for options in ({"zero": 3}, {"zero": 3, "reduce": "last", "m": 3}, {"zero": 2, "buckets": "1 B"}, {"zero": 1}):
        run = step(layers(forwards, backwards, sizes), cluster("full"), shard=RANKS, **options)
        spans = sorted(zip(run.messages.start, run.messages.end, strict=True))
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(spans))


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_stage_one_takes_the_time_of_ddp_on_any_number_of_cards(cards: int) -> None:
    """A reduce-scatter and an all-gather go by as many rings as an all-reduce: one for each card of a node."""
    topology = {
        "kind": "nodes",
        "per_node": 4,
        "nics": cards,
        "link": {"latency": "1 us", "bandwidth": "300 GB/s"},
        "network": {"latency": "1 us", "bandwidth": "25 GB/s"},
    }
    nodes = {"devices": {"speed": "100 TFLOPS"}, "topology": topology}
    model = layers([1.0], [2.0], [2 * 10**9])
    spent, ways = [], ({"zero": 0, "replicas": 16}, {"zero": 1, "shard": 16})
    for options in cast(tuple[dict[str, Any], ...], ways):
        run = simulate("dp", model=model, cluster=nodes, collective="ring", m=1, steps=2, **options)
        spent.append(sum(row.end - row.start for row in run.messages if row.step == 0))
    assert spent[0] == pytest.approx(spent[1])
    assert spent[0] == pytest.approx(30 * (2 * 10**9 / 16 / 25e9 / cards), rel=0.01)


GATHERS = {
    None: ([(15, 17), (17, 19)], 18),
    "units": ([(15, 17), (17, 19)], 18),
    "step": ([(15, 17), (17, 19)], 19),
    "early": ([(11, 13), (15, 17)], 16),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("gather", "expected"), GATHERS.items())
def test_stage_one_gathers_after_all_updates_of_a_rank(
    gather: str | None, expected: tuple[list[tuple[int, int]], int], engine: str
) -> None:
    """As `optimizer.step()` of torch and Megatron; by hand, of two stages on two ranks that share optimizer states.

    Forwards and backwards end at 4 s, sums of 2 s each at 7 s, as one begins at 3 s; updates of 4 s each at 15 s, and
    gathers of 2 s each at 19 s. The next step begins with the first gather (units), whose forward hides half of the
    second one, or with the last one (step). Early, the first gather goes beside the second update, the second one
    beside the first forward from 15 s on, and the second forward begins at 17 s.
    """
    stage = Stage(forward=1.0, backward=1.0, parameters=4000, update=8.0)
    asked: dict[str, Any] = {"zero": 1, "replicas": 2, "m": 1, "buckets": "none", "gather": gather, "steps": 4}
    run = simulate("dp", 2, model=Model(stages=(stage, stage)), cluster=cluster(), **asked | {"engine": engine})
    gathers = [(row.start, row.end) for row in run.messages if row.op == "all_gather" and row.step == 0]
    assert (sorted(gathers), run.summary()["period"]) == expected
    assert violations(run) == {}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("where", ["lane", "stream"])
@pytest.mark.parametrize("zero", [1, 2])
def test_a_step_of_stage_one_that_hides_nothing_is_the_sum_of_its_parts(zero: int, where: str, count: int) -> None:
    """a C + T + U, whatever the layers: micro-batches, then sums and gathers, and updates of shares between them."""
    rows = [(1.0 + k, 2.0 + k / 2, 400 * (k + 1), 8.0 - k) for k in range(count)]
    stages = tuple(Stage(forward=f, backward=b, parameters=size, update=u) for f, b, size, u in rows)
    model, size = Model(stages=stages), sum(row[2] for row in rows)
    asked: dict[str, Any] = {"zero": zero, "reduce": "end", "gather": "step", "buckets": "400 B", "update_in": where}
    run = simulate("dp", model=model, cluster=cluster(), replicas=RANKS, m=3, steps=4, collective="ring", **asked)
    computed, updated = 3 * sum(row[0] + row[1] for row in rows), sum(row[3] for row in rows) / RANKS
    assert run.summary()["period"] == pytest.approx(computed + 2 * one_way(size) + updated)
    assert violations(run) == {}
