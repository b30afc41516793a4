"""Layers of Megatron-LM by closed forms: the time of one, states of a place, the bubble.

`tests/studies/test_published.py` has the runs that others published.
"""

from math import prod
from typing import Any

import pytest
from msgspec.structs import replace

from cdpsim import Cluster, Model, Request, simulate
from cdpsim.model.splitting import Mesh

LENGTH, PEAK = 2048, 312e12


def test_time_of_a_layer_by_hand() -> None:
    """Products at 74 % of 312 TFLOP/s, passes at 68 % of 2.039 TB/s, two all-reduces of 8 at 77 % of 300 GB/s.

    Bytes of passes: two norms 4 s b h, two sums with dropout 7, queries with keys and values 12 / t, GeLU 16 / t, and
    the softmax with its dropout 9 a s² b / t. The core's products take their bytes: 2 a s² b / t of scores, and two
    operands. A message of NVLink takes 3.4 us; halving and doubling among 8 takes 6, with the bytes of a ring.
    """
    s, b, h, a, t = LENGTH, 4, 6144, 64, 8
    products, scores = 24 * s * b * h * h / t / (0.74 * PEAK), a * s * s * b / t
    moved = s * b * h * (2 * 4 + 2 * 7 + (12 + 16) / t) + 9 * scores + 2 * (2 * scores + 4 * s * b * h / t)
    reduced = 6 * 3.4e-6 + 2 * 7 / 8 * 2 * s * b * h / (0.77 * 300e9)
    stage = Request("1f1b", 50, m=50, model="megatron-22b", cluster="selene", tensor=8).timed_model.stages[1]
    assert float(stage.forward) == pytest.approx(products + moved / (0.68 * 2.039e12) + 2 * reduced, rel=1e-9)


@pytest.mark.parametrize(("name", "schedule", "n"), [("megatron-22b", "dp", 1), ("gpt3-175b", "1f1b", 8)])
def test_states_of_a_place(name: str, schedule: str, n: int) -> None:
    """18 bytes of each number of its tensors."""
    run = simulate(schedule, n, model=name, cluster="selene", tensor=8, m=n, steps=1, ignore_memory=True)
    held = run.peak_memory[0]
    assert held["parameters"] + held["gradients"] + held["optimizer"] == 18 * sum(
        prod(shape) for shape in run.request.model.stages[0].tensors
    )


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "n", "chunks"), [("1f1b", 4, 1), ("interleaved-1f1b", 8, 2)])
def test_bubble_of_split_layers(name: str, n: int, chunks: int) -> None:
    """(m + (p - 1) / v) (f + b), exchanges of the group included in both; messages between nodes are free."""
    model, selene = Model.load("gpt3-175b"), Cluster.load("selene")
    assert model.layers is not None and selene.topology is not None and selene.topology.network is not None
    free = replace(selene.topology.network, latency=0.0, bandwidth=float("inf"), achieved=1.0)
    cluster = replace(selene, topology=replace(selene.topology, network=free))
    shaped = model.on(Mesh(8, True), replace(model.layers, layers=8), 1)
    layers = replace(shaped, stages=shaped.stages[1:-1], tied=(), layers=None)
    options: dict[str, Any] = {"chunks": chunks} if chunks > 1 else {}
    run = simulate(name, n, m=12, model=layers, cluster=cluster, ignore_memory=True, steps=1, **options)
    timed = run.request.timed_model.stages
    pass_time = sum(float(stage.forward) + float(stage.backward) for stage in timed) / 4
    ends = run.end[: run.program.compute].max()
    assert ends == pytest.approx((12 + 3 / chunks) * pass_time, rel=1e-9)
