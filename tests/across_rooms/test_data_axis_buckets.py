"""The buckets in which DistributedDataParallel sums the gradients of a GPT-2."""

from math import prod
from typing import Any

import pytest

from cdpsim import Model, Run, Stage, Tie, simulate

MIB = 2**20
WIDTH, BLOCKS, WORDS, LENGTH = 768, 12, 50257, 1024
Shapes = tuple[tuple[int, ...], ...]

EMBEDDING: Shapes = ((WORDS, WIDTH), (LENGTH, WIDTH))
BLOCK: Shapes = (
    (WIDTH,),
    (WIDTH,),
    (WIDTH, 3 * WIDTH),
    (3 * WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH,),
    (WIDTH,),
    (WIDTH,),
    (WIDTH, 4 * WIDTH),
    (4 * WIDTH,),
    (4 * WIDTH, WIDTH),
    (WIDTH,),
)
HEAD: Shapes = ((WIDTH,), (WIDTH,), (WORDS, WIDTH))  # the last one is the embedding's first


def numbers(shapes: Shapes) -> int:
    return sum(map(prod, shapes))


def gpt2(*, shapes: bool = True) -> Model:
    """GPT-2 of 124 million parameters in fp32, whose output layer has the weights of its embedding."""
    layers = (EMBEDDING, *[BLOCK] * BLOCKS, HEAD)
    stages = tuple(
        Stage(forward=1.0, backward=2.0, parameters=4 * numbers(layer), tensors=layer if shapes else ())
        for layer in layers
    )
    tied = Tie(stages=(0, BLOCKS + 1), parameters=4 * prod(EMBEDDING[0]))
    return Model(stages=stages, precision="fp32", tied=(tied,))


def tensors_by_backward() -> list[int]:
    """Return the bytes of GPT-2's gradients in the order in which backwards make them; a tied one is made last."""
    forth = [*EMBEDDING, *[shape for _ in range(BLOCKS) for shape in BLOCK], *HEAD[:2]]
    return [4 * prod(shape) for shape in reversed(forth)]


def buckets_of(sizes: list[int], first: int, others: int) -> list[int]:
    """Return the bytes of each bucket: a tensor is added, then the bucket is closed if it has its least size."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= (others if buckets else first):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def sums(run: Run, step: int) -> list[int]:
    """Return the bytes of a step's sums of gradients, in the order of time."""
    rows = [row for row in run.messages if row.content == "gradient" and row.step == step]
    return [row.size for row in sorted(rows, key=lambda row: row.start)]


def test_gpt2_has_its_parameters() -> None:
    assert sum(tensors_by_backward()) == 4 * 124_439_808


@pytest.mark.parametrize("sizes", [None, "torch", "1 MiB,25 MiB"])
def test_buckets_of_gpt2_are_those_of_torch(sizes: str | None) -> None:
    """The first one has at least 1 MiB, all others but the last have 25, and no tensor is in two."""
    run = simulate("dp", model=gpt2(), replicas=4, m=1, steps=2, buckets=sizes)
    buckets = buckets_of(tensors_by_backward(), MIB, 25 * MIB)
    assert sums(run, 0) == sums(run, 1) == buckets
    assert MIB <= buckets[0] < 25 * MIB
    assert all(size >= 25 * MIB for size in buckets[1:-1])
    assert sum(buckets) == sum(tensors_by_backward())
    assert len(buckets) == 13


def test_the_first_step_has_one_bucket_where_that_is_asked_for() -> None:
    """Before torch has seen in which order gradients come."""
    run = simulate("dp", model=gpt2(), replicas=4, m=1, steps=2, whole_first_step=True)
    assert sums(run, 0) == [sum(tensors_by_backward())]
    assert sums(run, 1) == buckets_of(tensors_by_backward(), MIB, 25 * MIB)


def test_without_shapes_a_stage_is_one_tensor() -> None:
    layers = [sum(tensors_by_backward()[:2]), *[4 * numbers(BLOCK)] * BLOCKS, 4 * numbers(EMBEDDING)]
    run = simulate("dp", model=gpt2(shapes=False), replicas=4, m=1, steps=1)
    assert sums(run, 0) == buckets_of(layers, MIB, 25 * MIB)


def test_stage_one_scatters_the_same_buckets() -> None:
    run = simulate("dp", model=gpt2(), shard=4, zero=1, m=1, steps=1)
    assert sums(run, 0) == [-(-size // 4) for size in buckets_of(tensors_by_backward(), MIB, 25 * MIB)]


@pytest.mark.parametrize(
    ("runtime", "ranks", "least"),
    [("megatron", 4, 40_000_000), ("megatron", 64, 64_000_000), ("deepspeed", 4, None)],
)
def test_other_runtimes_count_elements(runtime: str, ranks: int, least: int | None) -> None:
    """Megatron-LM: at least 40 million numbers, or a million for each rank. DeepSpeed: at most 500 million, so one."""
    run = simulate("dp", model=gpt2(), replicas=ranks, m=1, steps=1, buckets=runtime)
    everything: Any = tensors_by_backward()
    wanted = [sum(everything)] if least is None else buckets_of(everything, 4 * least, 4 * least)
    assert sums(run, 0) == wanted


def test_buckets_of_the_shipped_gpt2_are_of_its_tensors_in_bf16() -> None:
    """The first one goes with the head's norm and the last tensors of the last block, of 4.5 MiB."""
    run = simulate("dp", model="gpt2", cluster="a100-nodes", replicas=4, steps=1, ignore_memory=True)
    assert sums(run, 0) == buckets_of([size // 2 for size in tensors_by_backward()], MIB, 25 * MIB)
