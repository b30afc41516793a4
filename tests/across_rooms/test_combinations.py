"""All options together: a run of any combination keeps every invariant, and can be repeated."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import Cluster, RequestError, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Cable, Devices, Link, Topology
from cdpsim.cluster.topology import OVERLAPS
from cdpsim.files.units import Work
from cdpsim.invariants import violations
from cdpsim.model import RECOMPUTE, Model
from cdpsim.program.collectives import COLLECTIVES
from cdpsim.request.options import RENDEZVOUS
from cdpsim.runs import Run
from cdpsim.schedules.order import CYCLIC
from cdpsim.studies.compare import measure
from tests.helpers.profiles import profiled
from tests.helpers.saved_files import files
from tests.helpers.strategies import disorders, schedules, streamed_requests, taken

_GPT2 = Model.load(profiled("gpt2"))
GPT2 = replace(_GPT2, stages=tuple(replace(one, weight_backward=Work(one.backward / 2)) for one in _GPT2.stages))
cables = st.builds(Cable, latency=st.sampled_from([0.0, 1e-5]), bandwidth=st.sampled_from([1e9, 1e10, 3e11, inf]))
hosts = st.builds(Link, latency=st.just(1e-5), bandwidth=st.just(2.5e10))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Rings, meshes, switches, fat trees, and nodes with one card or two."""
    kind = draw(st.sampled_from(["ring", "mesh", "switch", "fat-tree", "nodes"]))
    if kind != "nodes":
        return Topology(kind=kind, link=draw(cables))
    inside, across = draw(st.sampled_from(["mesh", "switch"])), draw(st.sampled_from(["switch", "fat-tree"]))
    own: dict[str, Any] = {"per_node": draw(st.integers(2, 4)), "nics": draw(st.integers(1, 2))}
    own |= {"link": draw(cables), "host": draw(cables), "network": draw(cables)}
    return Topology(kind=kind, inside=inside, across=across, **own)


@st.composite
def trained(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords for `simulate`: a shipped model, trained in some way on devices with hosts, joined in some way."""
    asked = draw(schedules(5))
    asked |= {"model": GPT2, "recompute": draw(st.sampled_from([*RECOMPUTE, "layers:2"]))}
    of_shares, of_tensors = ["momentum", "adam", "adam-8bit"], ["adafactor"]
    asked["optimizer"] = draw(st.sampled_from(of_shares if asked["schedule"].order.rounds else of_shares + of_tensors))
    asked["mixed_precision"] = draw(st.booleans())
    asked["gradients"] = draw(st.sampled_from([None, "fp32", *["bf16"] * asked["mixed_precision"]]))
    asked["offload"] = draw(st.sampled_from(["none", "optimizer", "activations", "all"]))
    if asked["offload"] in ("none", "activations"):
        asked["update_time"] = draw(st.sampled_from(["stated", "memory"]))
    lanes = draw(st.integers(1, 2)) if asked["schedule"].placement.lanes else 1
    overlap = draw(st.sampled_from(OVERLAPS))
    group = Devices(speed=draw(st.sampled_from([1e13, 3e14])), memory_bandwidth=1e12, lanes=lanes, overlap=overlap)
    asked["cluster"] = Cluster(devices=(group,), topology=draw(topologies()), host=draw(hosts))
    asked["rendezvous"] = draw(st.sampled_from([None, *RENDEZVOUS]))
    if asked["schedule"].order is CYCLIC:
        asked["rule"] = draw(st.sampled_from(["cdp-v1", "cdp-v2"]))
    return asked


@st.composite
def combinations(draw: st.DrawFn) -> dict[str, Any]:
    """Any of these, or uneven stages on uneven devices, or slots; with contention, expansion and disorder."""
    asked = draw(trained() | streamed_requests())
    asked |= draw(disorders(slots="model" not in asked))
    asked["collective"] = draw(st.sampled_from(sorted(COLLECTIVES)))
    asked["contention"] = draw(st.sampled_from(["none", "none", "fair", "queue"]))
    asked["expand_collectives"] = draw(st.booleans())
    asked["seed"], asked["run"] = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    with weighed():
        return taken(asked)


@contextmanager
def weighed() -> Iterator[None]:
    """Let pass all refusals but one: slots have no parts, which is all that may be in the way."""
    try:
        yield
    except RequestError as error:
        assume("which the slot model cannot weigh" not in str(error))
        raise


def run(asked: dict[str, Any], **more: Any) -> Run:
    """Run it."""
    with weighed():
        return simulate(**asked, **more, ignore_memory=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(asked=combinations())
def test_any_combination_makes_sense_and_is_the_same_again(asked: dict[str, Any]) -> None:
    """By every invariant; by both engines, where both can; and served again from what was written."""
    trace = run(asked)
    assert violations(trace) == {}
    one = measure(trace)
    assert 0 <= one.exposed <= one.bubble <= 1
    with TemporaryDirectory() as name:
        folder = Path(name)
        written = files(trace, folder / "first")
        again = reopen(folder / "first")
        assert files(again, folder / "again") == written
        for engine in ("fast", "simpy") if asked.get("contention", "none") == "none" else ("simpy",):
            assert files(run(asked, engine=engine), folder / engine) == written
