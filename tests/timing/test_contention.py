"""Contention in whole runs: the times that it changes, the results that it leaves alone, and all uses of such a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, Trace, presets, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Cable, Devices, Edge, Link
from cdpsim.cluster.topology import OVERLAPS
from cdpsim.export.pictures import write_timeline
from cdpsim.invariants import violations
from cdpsim.request.options import RENDEZVOUS, Contention
from cdpsim.runs import Run
from cdpsim.studies.compare import measure
from cdpsim.studies.montecarlo import sample_runs
from tests.conftest import Command
from tests.helpers.strategies import fitting, taken
from tests.helpers.traffic_patterns import joined

HOW = ("fair", "queue")
NICS = joined("nodes", 4, per_node=2, network=Cable(bandwidth=1e9))
ONE_SUM = Model(
    stages=(Stage(forward=1.0, backward=1.0, parameters=10**9), *[Stage(forward=1.0, backward=1.0, parameters=0)] * 3)
)
CLUSTERS = {
    "switch": joined("switch", 9, link=Cable(latency=1e-4, bandwidth=1e9)),
    "nodes": joined("nodes", 12, per_node=4, link=Cable(bandwidth=1e9), network=Cable(latency=1e-5, bandwidth=2e8)),
    "pairs": Cluster(link=Link(latency=1e-3, bandwidth=1e8)),
    "a100-nodes": presets.find_cluster("a100-nodes"),
}
COLLECTIVES = ("recursive-doubling", "ring", "tree", "best")


def ends(trace: Trace) -> np.ndarray:
    """When every node has ended."""
    assert isinstance(trace, Run)
    return trace.end


def makespan(**wanted: Any) -> float:
    """How long a run takes in all."""
    return float(simulate(**wanted).summary()["makespan"])


@pytest.mark.parametrize("contention", HOW)
def test_a_collective_that_uses_a_card_twice_waits_for_itself(contention: Contention) -> None:
    """By hand: an all-reduce of 1 GB by recursive doubling over two nodes of two devices, whose cards pass 1 GB/s.

    Devices 0 and 1 exchange at once inside their node; then 0 with 2 and 1 with 3, both through the two cards: 2 s, in
    one piece and in messages. Before it all forwards and backwards of four stages, 1 s each; no other stage has
    anything to send. In a hierarchy one device of each node sends, half of it at a time, which is best.
    """
    wanted: dict[str, Any] = {"schedule": "multi-dp", "model": ONE_SUM, "cluster": NICS, "steps": 1}
    doubling = wanted | {"collective": "recursive-doubling"}
    assert makespan(**doubling) == makespan(**doubling, expand_collectives=True) == 8 + 2
    assert makespan(**doubling, contention=contention) == 8 + 2
    assert makespan(**wanted, contention=contention, collective="hierarchical") == 8 + 1
    assert makespan(**wanted) == makespan(**wanted, contention=contention) == 8 + 1


def with_overlap(name: str, overlap: str) -> Cluster:
    """One of the clusters, whose devices overlap messages and tasks in that way."""
    cluster = CLUSTERS[name]
    groups = (structs.replace(group, overlap=overlap) for group in cluster.devices)
    return structs.replace(cluster, devices=tuple(groups))


@st.composite
def contended(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords for `simulate`: any schedule on links that its messages are likely to meet on."""
    wanted = fitting(draw(st.sampled_from(sorted(SCHEDULES))), 3)
    sizes = st.integers(0, 10**8)
    costs = {"forward": st.floats(1e-3, 1e-1), "backward": st.floats(1e-3, 1e-1), "weight_backward": st.just(5e-4)}
    stage = st.builds(Stage, **costs, boundary=sizes, parameters=sizes)
    return taken(
        wanted
        | {
            "model": Model(stages=tuple(draw(st.lists(stage, min_size=wanted["n"], max_size=wanted["n"])))),
            "cluster": with_overlap(draw(st.sampled_from(sorted(CLUSTERS))), draw(st.sampled_from(OVERLAPS))),
            "collective": draw(st.sampled_from(COLLECTIVES)),
            "contention": draw(st.sampled_from(HOW)),
            "rendezvous": draw(st.sampled_from([None, *RENDEZVOUS])),
        }
    )


@given(contended())
@settings(max_examples=100, deadline=None)
def test_a_run_with_contention_keeps_every_rule(wanted: dict[str, Any]) -> None:
    """All invariants, of which one is that no message is faster than alone; and the same bits again."""
    trace = simulate(**wanted)
    assert violations(trace) == {}
    assert np.array_equal(ends(trace), ends(simulate(**wanted)))


@pytest.mark.every_case
@pytest.mark.parametrize("contention", HOW)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_slot_model_knows_no_contention(name: str, contention: Contention) -> None:
    """Free messages take nothing from one another."""
    plain, shared = (simulate(**fitting(name, 4), steps=2, contention=how) for how in ("none", contention))
    assert plain.tasks == shared.tasks


@pytest.mark.parametrize("contention", HOW)
@pytest.mark.parametrize("link", [Link(latency=0.01), Link(latency=1e-3, bandwidth=1e6)])
def test_what_meets_nobody_has_the_same_bits(link: Link, contention: Contention) -> None:
    """Links without a limit; and one stage's boundary after another, each pair of devices with its own link."""
    model = Model(stages=(Stage(forward=0.3, backward=0.7, boundary=1000, parameters=10),) * 3)
    wanted: dict[str, Any] = {"schedule": "pp-cdp", "model": model, "cluster": Cluster(link=link)}
    plain, shared = simulate(**wanted), simulate(**wanted, contention=contention)
    assert (plain.messages["end"] > plain.messages["start"]).all()
    assert len(plain.messages["end"]) > 10
    assert np.array_equal(ends(plain), ends(shared))


def test_exposed_communication_grows_with_it() -> None:
    """All-reduces of four stages through two cards; devices wait for messages on their way."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**9),) * 4)
    wanted: dict[str, Any] = {"schedule": "multi-dp", "model": model, "cluster": NICS, "expand_collectives": True}
    free, fair = (measure(simulate(**wanted, contention=how)) for how in ("none", "fair"))
    assert fair.exposed > free.exposed > 0
    assert fair.sent == free.sent
    assert fair.step is not None and free.step is not None
    assert fair.step - free.step == pytest.approx(fair.makespan / 3 - free.makespan / 3)


@pytest.mark.parametrize("contention", HOW)
def test_a_saved_run_is_reopened_as_it_was(tmp_path: Path, contention: Contention) -> None:
    """With its program, whose collectives are messages; and every picture and export takes it."""
    trace = simulate("multi-dp", model=ONE_SUM, cluster=NICS, contention=contention)
    trace.save(tmp_path / "run")
    again = reopen(tmp_path / "run")
    assert np.array_equal(ends(again), ends(trace))
    assert trace.request["contention"] == contention and trace.request["expand_collectives"]
    for ending in ("svg", "html", "json"):
        write_timeline(again, tmp_path / f"run.{ending}")
        assert (tmp_path / f"run.{ending}").stat().st_size > 1000


@pytest.mark.parametrize("contention", HOW)
def test_disorder_and_contention_go_together(contention: Contention) -> None:
    """Links that jitter make messages as much longer; devices stop while messages go on; all rules hold."""
    model = Model(stages=(Stage(forward=0.1, backward=0.2, parameters=10**8, boundary=10**7),) * 3)
    disorder: dict[str, Any] = {"link_jitter": "uniform:0.1", "stop": ["1:0.5 s:1 s"], "slow": ["0:2"]}
    for name in ("multi-dp", "pp-cdp"):
        wanted: dict[str, Any] = {"schedule": name, "model": model, "contention": contention}
        wanted |= {"collective": "ring"} if name == "multi-dp" else {}
        trace = simulate(**wanted, cluster=CLUSTERS["switch"], **disorder)
        assert violations(trace) == {}
        assert trace.end.max() > ends(simulate(**wanted, cluster=CLUSTERS["switch"])).max()
    with pytest.raises(RequestError, match="leave --contention out"):
        sample_runs(trace, 10)


def test_what_cannot_be_asked_for() -> None:
    """A word that is none, the engine that has no links, devices that nothing reaches, links that carry nothing."""
    with pytest.raises(RequestError, match="did you mean 'fair'"):
        simulate("multi-dp", 2, contention="unfair")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"fast cannot let messages share links \(fair\); take simpy, or auto"):
        simulate("multi-dp", 2, contention="fair", engine="fast")
    lost = Cluster(devices=(Devices(count=4),), edges=(Edge(between=(0, 1), bandwidth=1e9),))
    with pytest.raises(RequestError, match="no route from device"):
        simulate("multi-dp", model=ONE_SUM, cluster=lost, contention="fair")
    with pytest.raises(RequestError, match="bandwidth"):
        Cluster.from_builtins({"link": {"bandwidth": 0}}, "box")


def test_from_the_command_line(command: Command, toy: Path) -> None:
    """Engines are chosen, or refused in one line."""
    costs = ("--model", toy / "toy.toml", "--cluster", toy / "box.toml")
    for contention in HOW:
        assert not command("simulate", "multi-cdp", *costs, "--contention", contention, "-o", toy / contention).code
        assert not command("compare", "multi-dp", *costs, "--contention", contention).code
    refused = command("simulate", "pp-cdp", *costs, "--contention", "fair", "--engine", "fast", "-o", toy / "no")
    assert refused.code == 2
    assert refused.err == ("cdpsim: error: engine: fast cannot let messages share links (fair); take simpy, or auto\n")
    assert not (toy / "no").exists()
    reopened = command("timeline", toy / "fair", "--contention", "fair", "-o", toy / "run.svg")
    assert reopened.code == 2 and "--contention" in reopened.err
