"""Every option does something with some schedule; those that do not take it refuse it, and name those that do."""

import inspect
import json
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, Trace, simulate
from cdpsim.cluster import Cable, Devices, Link, Topology
from cdpsim.request.options import CollectiveName
from cdpsim.request.sharing import accepts, is_untaken
from cdpsim.runs import Run
from cdpsim.trace import TABLES
from tests.helpers.strategies import fitting
from tests.selection import chance, long_run

LAYER = Stage(
    forward=1.0,
    backward=2.0,
    weight_backward=1.0,
    activation=100,
    boundary=10,
    parameters=20,
    forward_transient=5,
    tensors=((3,), (7,)),
)
HOST = Link(latency=0.5, bandwidth=50.0)
MEMORY = (Devices(memory_bandwidth=1e3),)
# Cards that two devices share: messages are late, or they come while their receivers are at work.
CARDS = {"slow": Cable(latency=0.25, bandwidth=1.0), "fast": Cable(latency=0.01, bandwidth=1e3)}
NEVER_REFUSED = {
    "n": "the size, which every schedule takes",
    "schedule": "what is run",
    "order": "what is run, written out",
    "engine": "both give the same trace by design",
    "ignore_memory": "devices have room for all that runs here; it only lets more run",
    "max_memory": "it is about this machine, and lets less run",
    "model": "what is trained",
    "cluster": "the platform: devices, links, runtime",
}
ALONE: list[dict[str, Any]] = [
    {"devices": {"overlap": "none"}, "link": {"latency": latency, "bandwidth": 50.0}} for latency in (0.25, 2.0)
]
# A model of layers and its devices; a group of ranks is a node.
SHAPED: dict[str, Any] = {
    "model": {"layers": {"layers": 8, "width": 16, "heads": 4, "length": 32, "vocabulary": 64}},
    "cluster": {
        "devices": {"speed": 1e9, "memory_bandwidth": 1e9},
        "topology": {"kind": "nodes", "per_node": 2, "link": {"bandwidth": 1e8}, "network": {"bandwidth": 1e7}},
    },
}
MIXED: dict[str, Any] = SHAPED | {
    "model": {"layers": SHAPED["model"]["layers"] | {"biases": False, "experts": 4, "top_k": 2}},
    "replicas": 2,
}
# Data ranks whose numbers decide which messages cross nodes.
NODES = {"kind": "nodes", "per_node": 2, "link": {"bandwidth": 50.0}, "network": {"latency": 1.0, "bandwidth": 5.0}}
# Values of each option, with what else they need to be asked for.
JITTER = {"jitter": "lognormal:0.2"}
VALUES: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "steps": [({}, 5)],
    "m": [({}, 12)],
    "counts": [({"steps": 3}, [[1], [2], [1]])],
    "chunks": [({}, 4)],
    "replicas": [({}, 2)],
    "stage_replicas": [({}, "2,1,1,3"), ({}, [1, 1, 2, 1])],
    "shard": [({}, 2)],
    "zero": [({"replicas": 2}, level) for level in (1, 2, 3)],
    "ranks": [({"replicas": 2, "cluster": {"topology": NODES}}, "tp-cp-dp-pp")],
    "buckets": [({"replicas": 2}, "25 B"), ({"replicas": 2}, "25 B,50 B")],
    "whole_first_step": [({"replicas": 2, "buckets": "25 B"}, True)],
    "reduce": [(needs, when) for needs in ({}, {"replicas": 2}) for when in ("end", "last", "each")],
    "reshard": [({"shard": 4}, how) for how in ("yes", "no", "root", "step", 2)],
    "gather": [
        ({"zero": 1, "shard": 2}, "step"),
        ({"zero": 1, "shard": 2, "optimizer": "adam", "update_time": "memory"}, "early"),
    ],
    "padding": [({"shard": 4}, "rows"), ({"zero": 1, "shard": 2}, "megatron")],
    "compress": [(needs, rate) for needs in ({}, {"replicas": 2}) for rate in ("int8", "topk:0.2", "powersgd:1")],
    "clip": [({"shard": 2}, True), ({"replicas": 2}, True)],
    "update_in": [({"shard": 2, "optimizer": "adam", "update_time": "memory"}, "stream")],
    "by_layer": [({"zero": 1, "shard": 2}, True)],
    "prefetch": [({}, 2)],
    "slot_order": [({}, "backward-first")],
    "warm_up": [({"steps": 3}, 2)],
    "local_steps": [({}, 3)],
    "outer": [({}, "sgd:1")],
    "rule": [({}, name) for name in ("dp", "cdp-v1", "cdp-v2", "vertical-sync")],
    "collective": [(needs, name) for needs in ({}, {"replicas": 4}) for name in ("ring", "halving-doubling")],
    "expand_collectives": [({}, True), ({"replicas": 2}, True)],
    "contention": [({}, "fair"), ({}, "queue")],
    "rendezvous": [({"cluster": alone}, how) for alone in ALONE for how in ("megatron", "torch")],
    "runtime": [
        ({}, "torch"),
        ({}, "paper:sends=until-step-end"),
        ({"replicas": 2}, "paper:gradient_buckets=views"),
        ({}, "paper:gathers=copied"),
        ({}, "paper:reductions=until-next"),
    ],
    "seed": [({}, 1), (JITTER, 1), ({"link_jitter": "uniform:0.5"}, 1)],
    "run": [({}, 1), (JITTER, 1), ({"link_jitter": "uniform:0.5"}, 1)],
    "slow": [({}, ["0:2"])],
    "jitter": [({}, "lognormal:0.2")],
    "link_jitter": [({}, "uniform:0.5")],
    "stop": [({}, ["0:0:3"]), ({}, ["0:0 s:3 s"])],
    "tensor": [(SHAPED, 2)],
    "sequence": [(SHAPED | {"tensor": 2}, True)],
    "context": [(SHAPED, 2)],
    "attention_exchange": [(SHAPED | {"context": 2}, "ring"), (SHAPED | {"context": 2}, "all-to-all")],
    "expert": [(MIXED, 2)],
    "node_limit": [(MIXED | {"expert": 4, "replicas": 4}, 1)],
    "imbalance": [(MIXED | {"expert": 2}, 1.5), (MIXED | {"expert": 2}, "lognormal:0.2")],
    "whole_boundaries": [(SHAPED | {"tensor": 2}, True)],
    "split_checkpoints": [(SHAPED | {"tensor": 2, "recompute": "layer"}, True)],
    "micro_batch": [(SHAPED, 3)],
    "length": [(SHAPED, 16)],
    "cuts": [(SHAPED, [3, 2, 2, 1])],
    "optimizer": [({}, "adam")],
    "mixed_precision": [({"optimizer": "adam"}, True)],
    "gradients": [({}, "fp32"), ({"optimizer": "adam", "mixed_precision": True}, "bf16")],
    "update_time": [({"optimizer": "adam"}, "memory"), ({"optimizer": "adam"}, "clipped")],
    "recompute": [({}, "full"), ({}, "sqrt")],
    "offload": [({}, "activations"), ({"optimizer": "adam"}, "all")],
}
# Values that are refused by another word, too: what they do to a timing, and what slots have no bytes for.
OTHER = {
    "counts": ["state"],
    **{name: ["shard", "stage-replicas"] for name in ("zero", "buckets", "reduce", "reshard", "padding")},
    "optimizer": ["training"],
    "mixed_precision": ["training"],
    "gradients": ["training"],
    "update_time": ["training"],
    "recompute": ["training"],
    "offload": ["training"],
}
# Of a schedule's value alone nothing tells in whose run it does something: these change nothing in many.
IDLE = {
    *("rendezvous", "collective", "runtime", "seed", "run", "prefetch", "rule", "by_layer"),
    *("reduce", "reshard", "gather", "update_in", "padding", "clip", "whole_first_step"),
    *("expand_collectives", "contention", "link_jitter", "buckets", "zero", "replicas", "slot_order"),
    *("whole_boundaries", "cuts", "ranks", "node_limit"),
}


@cache
def base(name: str, kind: str) -> dict[str, Any]:
    """Keywords for `simulate` in slots, or with real costs."""
    size = fitting(name, 4) | {"steps": 3}
    if kind == "slots":
        return size
    topology = Topology(kind="nodes", per_node=2, link=CARDS[kind], network=CARDS[kind])
    model = Model(stages=(LAYER,) * 8, precision="bf16")
    return size | {"model": model, "cluster": Cluster(devices=MEMORY, topology=topology, host=HOST)}


def columns(trace: Trace) -> tuple[Any, ...]:
    """Return all columns of a run's tables."""
    return tuple(getattr(trace, table)[name].tolist() for table, names in TABLES.items() for name in names)


def metrics(trace: Trace) -> dict[str, Any]:
    """Return the summary of a run without its request."""
    return {key: value for key, value in trace.summary().items() if key != "request"}


def outcome(trace: Trace) -> tuple[Any, ...]:
    """Return all that a run says, but for its request."""
    return (*columns(trace), metrics(trace))


def differ(one: Trace, other: Trace) -> bool:
    """Tell whether the outcomes of two runs differ; summaries, which take longest, are asked last."""
    return columns(one) != columns(other) or metrics(one) != metrics(other)


@cache
def plain(name: str, kind: str, needs: str) -> Run | None:
    """Return a run with what an option needs; None where that is refused."""
    try:
        return simulate(**base(name, kind) | json.loads(needs))
    except RequestError:
        return None


def test_all_options_are_walked() -> None:
    assert {*VALUES, *NEVER_REFUSED} == set(inspect.signature(simulate).parameters)


def is_served(name: str, option: str) -> bool:
    """Tell whether a schedule that takes an option does another thing with some value of it.

    It is asked in slots, and with real costs: with late messages and with early ones. One that does not take it refuses
    each value, and names those that do.
    """
    schedule, changes = SCHEDULES[name], set[bool]()
    for needs, value in VALUES[option]:
        for kind in ("slots", *CARDS):
            before = plain(name, kind, json.dumps(needs))
            if before is None:
                continue
            asked = base(name, kind) | needs | {option: value}
            if not is_untaken(schedule, option, value, before.request.shape.parts):
                with suppress(RequestError):
                    changes.add(differ(run_unless_impossible(option, asked), before))
                continue
            what = "vertical-sync" if value == "vertical-sync" else "this option"
            with pytest.raises(RequestError, match=f"^{option.replace('_', '-')}: {name} does not take {what}"):
                simulate(**asked)
            assert any(accepts(other, option) for other in SCHEDULES.values())
    if option not in IDLE:
        assert True in changes or not changes
    return True in changes


def run_unless_impossible(option: str, asked: dict[str, Any]) -> Trace:
    """Return a run; a refusal has the option's own word, or one that is known to stand for it."""
    try:
        return simulate(**asked)
    except RequestError as error:
        assert error.subject in {option.replace("_", "-"), *OTHER.get(option, ())}, str(error)
        raise


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_option_that_a_schedule_does_not_take_is_refused(name: str, option: str) -> None:
    is_served(name, option)


@pytest.mark.every_case
@pytest.mark.parametrize("option", VALUES)
def test_an_option_is_served_by_some_schedule(option: str) -> None:
    """Schedules are asked in the order of the draw, until one takes it."""
    drawn = sorted(SCHEDULES, key=lambda name: chance(str(long_run["draw"]), option, name))
    assert any(is_served(name, option) for name in drawn)


def test_the_best_collective_is_what_a_topology_gets_and_links_do_not() -> None:
    """Recorded as what was used, so that the record asks for it again; without collectives nothing is chosen."""
    joined, links = base("multi-dp", "slow"), base("multi-dp", "slow") | {"cluster": Cluster(link=Link(bandwidth=1e3))}
    cases: list[tuple[dict[str, Any], CollectiveName, CollectiveName]]
    cases = [(joined, "best", "recursive-doubling"), (links, "recursive-doubling", "best")]
    for given, used, other in cases:
        plain = simulate(**given)
        assert plain.request["collective"] == used
        assert outcome(plain) == outcome(simulate(**given, collective=used)) == outcome(simulate(**plain.request))
        assert outcome(plain) != outcome(simulate(**given, collective=other))
    alone = simulate(**base("multi-cdp", "fast"))
    assert alone.request["collective"] == "recursive-doubling"
    assert outcome(simulate(**alone.request)) == outcome(alone)


def test_lanes_are_for_those_that_have_any() -> None:
    cluster = Cluster(devices=(Devices(lanes=2),))
    for name, schedule in SCHEDULES.items():
        if schedule.placement.lanes:
            one, two, many = (
                outcome(simulate(**fitting(name, 4), cluster=given)) for given in (Cluster(), cluster, "unit")
            )
            assert one != two != many
        else:
            with pytest.raises(RequestError, match=f"lanes: the cluster's devices have 2, and {name} runs one task"):
                simulate(**fitting(name, 4), cluster=cluster)
