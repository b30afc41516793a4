"""Teams against all ranks one by one: the end of each task is that of the last of its ranks."""

from collections import Counter
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from cdpsim import Cluster, Request, evaluate, simulate
from cdpsim.cluster import Cable, Devices, Topology
from cdpsim.cluster.topology import OVERLAPS, Kernels
from cdpsim.program import Content, Op
from cdpsim.runs import Run
from tests.helpers.every_rank import play_ranks

CASES, RANKS = 300, 32
EXCHANGES = ("gather", "ring", "all-to-all")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "dp", "pp-cdp")


INSIDE, ACROSS = Cable(latency=1e-6, bandwidth=4e10), Cable(latency=5e-6, bandwidth=2e9, achieved=0.9)


def machine(tables: dict[str, Any], overlap: str) -> Cluster:
    """Return a cluster of these kernels and this topology, whose messages overlap so."""
    kernels, topology = Kernels(**tables["kernels"]), Topology(**tables["topology"])
    device = Devices(speed=1e12, memory_bandwidth=1e11, overlap=overlap, kernels=kernels)
    return Cluster(devices=(device,), topology=topology)


class Case(NamedTuple):
    """A drawn request, its cluster, and how its messages overlap."""

    asked: dict[str, Any]
    cluster: dict[str, Any]
    overlap: str

    def run(self, overlap: str, **changed: Any) -> Run:
        """Run it with messages that overlap so."""
        return simulate(**self.asked | changed, cluster=machine(self.cluster, overlap))

    def worst(self, slow: dict[int, float]) -> float:
        """Return by how much the end of a task differs from that of the last of its ranks, relatively."""
        teams = self.run(self.overlap, slow=slow).whole
        program = self.run("full", slow={0: 2.0})  # every replica has its own tasks here
        ranks = play_ranks(program, self.overlap, slow)[: len(teams.tasks)]
        return float(np.abs(np.array(ranks) / teams.end[: len(teams.tasks)] - 1).max())


def drawn(random: Random) -> Case:
    """Draw a case of at most 32 ranks; cards are shared by whole groups, or belong to ranks of one group."""
    schedule, tensor, context = random.choice(SCHEDULES), random.choice([1, 2, 4, 8]), random.choice([1, 1, 2, 4])
    most = RANKS // (tensor * context)
    places = random.choice([p for p in (1, 2, 4) if p <= most]) if schedule != "dp" else 1
    replicas = 1 if schedule == "dp" else random.choice([d for d in (1, 2, 4, 8) if places * d <= most])
    m = random.choice([1, 2, 4, 8]) * (1 if schedule == "dp" else places)
    asked: dict[str, Any] = {
        "schedule": schedule,
        "steps": random.randint(1, 2),
        "collective": "ring",
        "tensor": tensor,
    }
    asked |= {"context": context, "attention_exchange": random.choice(EXCHANGES)} if context > 1 else {}
    if schedule == "dp":
        asked |= {"n": random.randint(1, 3), "m": random.choice([d for d in (1, 2, 4, 8, 16) if d <= most])}
    else:
        chunks = 2 if schedule == "interleaved-1f1b" else 1
        asked |= {"n": places * chunks, "m": min(m, 8)} | ({"chunks": 2} if chunks > 1 else {})
        asked |= {"replicas": replicas} if replicas > 1 else {}
    if schedule == "pp-cdp":
        asked |= {"n": places, "m": places}
    mixed = schedule != "pp-cdp" and random.random() < 0.5
    if mixed:
        asked |= {"expert": random.choice([e for e in (1, 2, 4, 8) if e <= tensor * context * replicas])}
    if tensor > 1:
        asked |= {"sequence": True} if mixed else {random.choice(["sequence", "whole_boundaries"]): True}
    if random.random() < 0.7:
        asked |= {"ranks": random.choice(["tp-cp-dp-pp", "tp-cp-pp-dp"])}
    shape: dict[str, Any] = {
        "layers": random.choice([6, 8, 9]),
        "width": 64,
        "heads": 32,
        "length": 64,
        "vocabulary": 500,
    }
    shape |= {"attention": random.choice(["flash", "eager"]), "dropout": random.random() < 0.5}
    shape |= {"experts": 8, "top_k": 2, "shared_ffn": random.choice([0, 64]), "dense_layers": 1} if mixed else {}
    asked["model"] = {"name": "drawn", "layers": shape}
    size = random.choice([4, 8])
    cards = random.choice([c for c in (1, 2, 4, 8) if c <= size])
    kernels: dict[str, Any] = {"products": 0.5, "passes": 0.7, "core": 0.4, "launch": random.choice([0.0, 1e-6])}
    kernels |= {"grouped": 0.3}
    kernels |= {"meet": random.choice([0.0, 2e-6]), "beside": random.choice([0.0, 0.6, 1.0])}
    topology: dict[str, Any] = {
        "kind": "nodes",
        "per_node": size,
        "nics": cards,
        "link": INSIDE,
        "network": ACROSS,
    }
    if random.random() < 0.15:
        topology = {"kind": "switch", "link": INSIDE}
    return Case(asked, {"kernels": kernels, "topology": topology}, random.choice(OVERLAPS))


@cache
def cases() -> list[Case]:
    random = Random(48)
    return [drawn(random) for _ in range(CASES)]


def ranks_of(case: Case) -> int:
    """Return the number of ranks of a case."""
    run = case.run("full", slow={0: 2.0})
    return run.program.devices * run.request.model.mesh.team


def test_the_draw_has_every_schedule_group_and_overlap() -> None:
    found = Counter(word for case in cases() for word in (case.asked["schedule"], case.asked["tensor"], case.overlap))
    assert {*SCHEDULES, 1, 2, 4, 8, *OVERLAPS} <= found.keys()
    assert all(ranks_of(case) <= RANKS for case in cases()[:60])


@pytest.mark.parametrize("first", range(0, CASES, 25))
def test_teams_end_with_the_last_of_their_ranks(first: int) -> None:
    for case in cases()[first : first + 25]:
        assert case.worst({}) < 1e-12, case


def test_a_slow_rank_slows_its_team_and_no_link() -> None:
    random = Random(49)
    for case in cases()[:40]:
        slow = {rank: random.choice([1.5, 3.0, 8.0]) for rank in random.sample(range(ranks_of(case)), 1)}
        assert case.worst(slow) < 1e-12, (case, slow)


def test_a_team_is_as_slow_as_its_slowest_rank() -> None:
    """Of several slow ranks in groups, some of them fast."""
    random = Random(50)
    for case in cases()[60:95]:
        count = ranks_of(case)
        slow = {rank: random.choice([0.5, 2.0, 3.0]) for rank in random.sample(range(count), min(count, 5))}
        assert case.worst(slow) < 1e-12, (case, slow)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zbv", "chimera"])
def test_gathers_of_boundaries_are_in_every_way_to_a_run(schedule: str) -> None:
    """Both engines, all steps by one, all micro-batches by few, all replicas by one, collectives as messages.

    A boundary that crosses is gathered once; a chunk of a V that is followed on its device sends none.
    """
    asked: dict[str, Any] = {"schedule": schedule, "n": 4, "m": 24, "steps": 3, "tensor": 2, "replicas": 2}
    asked |= {"chunks": 2} if schedule == "interleaved-1f1b" else {}
    shape = {"layers": 8, "width": 64, "heads": 8, "length": 32, "vocabulary": 500}
    nodes = {"kind": "nodes", "per_node": 8, "nics": 4, "link": INSIDE, "network": ACROSS}
    cluster = machine({"kernels": {"meet": 1e-5}, "topology": nodes}, "full")
    asked |= {"model": {"name": "small", "layers": shape}, "cluster": cluster, "collective": "ring"}
    run, whole = simulate(**asked), simulate(**asked, whole_boundaries=True)
    program, other = run.program, whole.program
    messages = program.messages
    crossing = (messages.op == Op.P2P) & (messages.content <= Content.ACTIVATION_GRADIENT)
    tasks = slice(len(program.tasks))
    gathered = run.costs.duration[tasks].sum() - whole.costs.duration[: len(other.tasks)].sum()
    size = 32 * 64 * 2
    one = 1e-5 + 2 * 1e-6 + size / 2 / 4e10  # a ring of two ranks: one round of half of it
    assert gathered == pytest.approx(one * crossing.sum(), rel=1e-9)
    assert crossing.sum() == 3 * 24 * 2 * (2 if schedule == "zbv" else 3)
    assert np.array_equal(run.end, simulate(**asked, engine="simpy").end)
    period = float(run.steady_state.period)
    assert evaluate(Request(**asked))["step"] == pytest.approx(period, rel=1e-12)
    expanded = simulate(**asked, expand_collectives=True)
    ends = run.whole.end[: len(expanded.tasks)]
    assert np.allclose(ends, expanded.end[: len(expanded.tasks)], rtol=1e-12, atol=0)
