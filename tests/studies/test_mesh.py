"""Groups of ranks by Megatron-LM's generator and torchtitan's mesh, links by nodes, bytes by closed forms."""

from collections.abc import Sequence
from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Request, RequestError, mesh
from cdpsim.cluster import Cable, Devices, Topology
from cdpsim.draw.canvas import Look
from cdpsim.draw.plots import draw_picture
from cdpsim.studies.mesh import RankMesh

SHAPE = {"layers": 8, "width": 64, "heads": 8, "length": 64, "vocabulary": 512, "tied": False, "positions": False}
EXPERTS = {"layers": SHAPE | {"experts": 16, "top_k": 2}}
INSIDE, ACROSS = Cable(latency=1e-6, bandwidth=4e10), Cable(latency=5e-6, bandwidth=2e9)
TOPOLOGY = Topology(kind="nodes", per_node=8, link=INSIDE, network=ACROSS)
NODES = Cluster(devices=(Devices(speed=1e12),), topology=TOPOLOGY)


def found(schedule: str = "1f1b", n: int = 2, **asked: Any) -> RankMesh:
    """Return the mesh of a run on nodes of eight."""
    options: dict[str, Any] = {"m": 4, "model": {"layers": SHAPE}, "cluster": NODES, "ignore_memory": True} | asked
    return mesh(Request(schedule, n, **options))


def groups(of: RankMesh, axis: str) -> list[tuple[int, ...]]:
    """Return the groups of an axis, in order."""
    (one,) = [each for each in of.axes if each.axis == axis]
    return sorted(map(tuple, one.groups.tolist()))


def orthogonal(sizes: Sequence[int], axis: int) -> list[tuple[int, ...]]:
    """Return the groups of an axis of a grid, from the fastest digit, as Megatron-LM's `RankGenerator` does."""
    strides = [prod(sizes[:k]) for k in range(len(sizes))]
    others = [range(size) if k != axis else range(1) for k, size in enumerate(sizes)]
    first = [sum(digit * stride for digit, stride in zip(digits, strides, strict=True)) for digits in product(*others)]
    return sorted(tuple(rank + k * strides[axis] for k in range(sizes[axis])) for rank in first)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_groups_are_those_of_megatron(order: str) -> None:
    """Of drawn degrees: the data ranks of a place beside each other, or behind all places."""
    random = Random(49)
    for _ in range(20):
        t, c, s, r, p = (random.choice([1, 2]), *(random.choice([1, 2, 4]) for _ in range(3)), random.choice([1, 2, 4]))
        data: dict[str, Any] = {"shard": s, "replicas": r, "zero": 1} if s > 1 else {"replicas": r}
        of = found("1f1b" if p > 1 else "dp", p, tensor=t, context=c, ranks=order, **data)
        digits = [("tensor", t), ("context", c), ("shard", s), ("replicas", r), ("place", p)]
        if order == "tp-cp-pp-dp":
            digits = [*digits[:2], digits[4], *digits[2:4]]
        for k, (axis, _) in enumerate(digits):
            assert groups(of, axis) == orthogonal([size for _, size in digits], k), (axis, digits)


@pytest.mark.parametrize("expert", [2, 4, 8, 16])
@pytest.mark.parametrize("zero", [0, 1])
def test_groups_of_experts_are_those_of_torchtitan(expert: int, zero: int) -> None:
    """`parallel_dims.py`: of a place's ranks (dp_shard, cp, tp), ep is the fastest digit and efsdp the rest."""
    data: dict[str, Any] = {"shard": 4, "replicas": 2, "zero": zero} if zero else {"replicas": 4}
    of = found(tensor=2, context=2, sequence=True, expert=expert, model=EXPERTS, **data)
    sizes = [expert, 16 // expert, 2 if zero else 1, 2]  # ep, efsdp, dp_replicate, pp
    assert groups(of, "expert") == orthogonal(sizes, 0)
    assert groups(of, "expert copies") == orthogonal(sizes, 1)


def test_links_are_the_slowest_of_any_group() -> None:
    """Three data ranks of a place are in one node or in two; the four ranks of a group send at once by one card."""
    of = {each.axis: each for each in found(tensor=4, replicas=3).axes}
    assert (of["tensor"].latency, of["tensor"].bandwidth, of["tensor"].crosses) == (2e-6, 4e10, False)
    for axis in ("replicas", "place"):
        assert (of[axis].latency, of[axis].bandwidth, of[axis].crosses) == (1e-5, 5e8, True)
    assert of["shard"].latency is of["shard"].bandwidth is None
    near = {each.axis: each for each in found(tensor=2, replicas=2, ranks="tp-cp-pp-dp").axes}
    assert [near[axis].crosses for axis in ("tensor", "replicas", "place")] == [False] * 3


def test_bytes_are_those_of_closed_forms() -> None:
    """Two halves of 8 layers on 2 x 2 x 2 ranks, of which the last sends most; an all-reduce of two sends all.

    A layer has 12 h² + 7 h numbers on one of two ranks, and 6 h on both; the norm at the end 2 h. Of the head, with a
    vocabulary of 512, a rank has half. A layer sums four tensors of b s h, the head that of its input's gradient and
    three of the loss; a rank's share of a boundary is gathered.
    """
    h, tokens, m = 64, 64, 4
    sent = {each.axis: each.sent for each in found(tensor=2, replicas=2, m=m).axes}
    layer, head = (12 * h * h + 7 * h) // 2 + 6 * h, 512 * h // 2
    assert sent["replicas"] == 2 * (4 * layer + head + 2 * h)
    assert sent["place"] == m * 2 * tokens * h // 2
    assert sent["tensor"] == m * ((4 * 4 + 1 + 1 / 2) * 2 * tokens * h + 3 * 4 * tokens)
    assert sent["shard"] is sent["context"] is None


def test_nothing_is_sent_in_slots() -> None:
    of = mesh(Request("1f1b", 4, m=4, replicas=2))
    assert {each.sent for each in of.axes} == {None}
    assert groups(of, "place") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert "replicas       2       4  0 4, …" in str(of)


def test_other_schedules_have_workers_as_data_ranks() -> None:
    of = mesh(Request("mp-dp", 3))
    assert groups(of, "place") == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert groups(of, "replicas") == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    assert groups(mesh(Request("multi-dp", 4)), "replicas") == [(0, 1, 2, 3)]


# Fig. 14 of Fedus et al. 2021 has 16 cores: how many shares of weights there are, and of tokens.
FIGURE_14: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"replicas": 16}, (1, 16)),  # data parallelism
    ({"tensor": 8, "replicas": 2}, (8, 2)),  # model and data parallelism
    ({"replicas": 16, "expert": 16, "model": EXPERTS}, (1, 16, 16, 1)),  # expert and data parallelism
    ({"tensor": 2, "sequence": True, "replicas": 8, "expert": 16, "model": EXPERTS}, (2, 16, 16, 1)),
]


@pytest.mark.parametrize(("asked", "many"), FIGURE_14)
def test_shares_of_the_switch_transformer(asked: dict[str, Any], many: tuple[int, ...]) -> None:
    of = found("dp", 1, **asked)
    assert tuple(len(set(shares.tolist())) for shares in of.shares.values()) == many
    for shares in of.shares.values():
        assert np.bincount(shares).tolist() == [16 // len(set(shares.tolist()))] * len(set(shares.tolist()))


def test_ranks_of_one_group_share_what_its_axis_says() -> None:
    """Tensor ranks have tokens in common, and data ranks weights; with --zero 3 none has all of them."""
    of = found(tensor=2, replicas=4)
    for axis, what, other in (("tensor", "tokens", "weights"), ("replicas", "weights", "tokens")):
        for group in groups(of, axis):
            assert len({*of.shares[what][[*group]].tolist()}) == 1
            assert len({*of.shares[other][[*group]].tolist()}) == len(group)
    assert len({*found(tensor=2, shard=4).shares["weights"].tolist()}) == 16


def test_the_picture_has_a_cell_for_each_rank() -> None:
    of = found(tensor=2, context=2, sequence=True, expert=4, replicas=2, model=EXPERTS)
    figure = draw_picture("mesh", of, look=Look())
    (axes,) = figure.axes
    cells = [name for patch in axes.findobj() if (name := str(patch.get_gid())).rpartition("-")[2].isdigit()]
    names = ("weights", "tokens", "weights-of-experts", "tokens-for-experts")
    assert sorted(cells) == sorted(f"{name}-{rank}" for name in names for rank in range(16))
    words = [text.get_text() for text in axes.texts]
    assert "weights: 4 shares, 4 ranks each" in words and "weights of experts: 8 shares, 2 ranks each" in words


def test_too_many_ranks_are_not_drawn() -> None:
    of = mesh(Request("dp", 1, m=1, replicas=2048))
    with pytest.raises(RequestError, match="ranks: are 2,048, of which 1,024 can be drawn; ask for fewer"):
        draw_picture("mesh", of, look=Look())
