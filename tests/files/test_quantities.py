"""A quantity gives the same run as an integer, as a float and as a text, in every field of every file."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, Tie, simulate
from cdpsim.cluster import Cable, Devices, Edge, Link, PairLink, Speeds
from cdpsim.cluster.disorder import Disorder, Stop
from cdpsim.cluster.topology import Kernels, Workspace
from cdpsim.files import config
from cdpsim.request.options import Contention
from tests.helpers.saved_files import files


class Quantity(NamedTuple):
    """A whole number of a unit."""

    amount: int
    unit: str


FORMS: dict[str, Callable[[Quantity], object]] = {
    "integer": lambda one: one.amount,
    "float": lambda one: float(one.amount),
    "text": lambda one: f"{one.amount} {one.unit}",
}
AMOUNTS = {"s": (1, 9), "B": (0, 10**6), "FLOPS": (1, 10**12), "B/s": (1, 10**11)}
# The bound of a field, or the word with which it may be left out.
MORE = {
    "activation": 2 * 10**6,
    "weight_activation": 2 * 10**6,
    "boundary": 10**6,
    "backward": 10,
    "memory": 10**15 - 10**6,
}
# Which fields are parts of which others.
PARTS = {
    "first_gradients": "gradients",
    "freed_output": "kept_output",
    "freed_gradient": "boundary",
    "loss_activation": "activation",
    "retained_gradients": "retained_input_transient",
    "partial": "parameters",
    "expert_parameters": "parameters",
    "sent": "boundary",
}
# Of parts of attention one needs the other, and is part of a third; only --zero 3 takes parameters from hosts.
NEVER = ("attention_activation", "attention_forward", "host_parameters")
ON_HOST = ("host_optimizer", "host_update", *NEVER)
ON_DEVICE = ("optimizer", "update", "update_bytes", *NEVER)


def units(table: type[Any]) -> dict[str, str]:
    """The quantities of a table, with their units."""
    return {
        field.name: kind.unit
        for field in msgspec.structs.fields(table)
        for kind in (field.type, *get_args(field.type))
        if isinstance(kind, config._Quantity)
    }


def quantities(table: type[Any], without: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Quantity]]:
    """All quantities of a table."""
    return st.fixed_dictionaries(
        {
            name: st.builds(Quantity, st.integers(*AMOUNTS[unit]).map(MORE.get(name, 0).__add__), st.just(unit))
            for name, unit in units(table).items()
            if name not in without
        }
    ).map(bounded)


def bounded(table: dict[str, Quantity]) -> dict[str, Quantity]:
    """A table whose parts are at most what they are parts of."""
    return {name: min(size, table.get(PARTS.get(name, name), size)) for name, size in table.items()}


def written(content: Any, form: Callable[[Quantity], object]) -> Any:
    """The content of a file, with its quantities in one form."""
    if isinstance(content, Quantity):
        return form(content)
    if isinstance(content, dict):
        return {name: written(part, form) for name, part in content.items()}
    return [written(part, form) for part in content] if isinstance(content, list) else content


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Links, for all pairs and for some; nodes with cards; or cables to a switch; and hosts, and a stop."""
    cable = quantities(Cable)
    devices: dict[str, Any] = {"count": 8} | draw(quantities(Devices))
    if draw(st.booleans()):
        devices["workspace"] = draw(quantities(Workspace))
    if draw(st.booleans()):
        del devices["speed"]
        devices["speeds"] = draw(quantities(Speeds))
    own = [{"between": [k, k + 1]} | draw(quantities(PairLink)) for k in range(2)]
    nodes: dict[str, Any] = {name: draw(cable) for name in ("link", "host", "network")}
    edges = [{"between": [k, "switch"]} | draw(quantities(Edge)) for k in range(8)]
    ways: list[dict[str, Any]] = [
        {"link": draw(quantities(Link)), "links": own},
        {"topology": {"kind": "nodes", "per_node": 2} | nodes},
        {"topology": {"kind": "ring", "link": draw(cable)}},
        {"edges": edges},
    ]
    disorder = {"stop": [{"device": 0} | draw(quantities(Stop))], "slow": [{"device": 1, "factor": 2}]}
    joined: dict[str, Any] = draw(st.sampled_from(ways))
    return joined | {"devices": devices, "host": draw(quantities(Link)), "disorder": disorder}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Four stages, whose updates their devices make, or their hosts; the first and the last one share a tensor."""
    without = draw(st.sampled_from([ON_HOST, ON_DEVICE]))
    stages = [draw(quantities(Stage, without)) for _ in range(4)]
    tie = draw(quantities(Tie, without))
    for j in (0, 3):
        stages[j] |= {name: size._replace(amount=stages[j][name].amount + size.amount) for name, size in tie.items()}
    return {"stages": stages, "tied": [{"stages": [0, 3]} | tie]}


@settings(max_examples=30)
@given(
    models(),
    clusters(),
    st.sampled_from(["1f1b", "multi-dp", "multi-cdp", "zero-cdp", "zb-h1"]),
    st.sampled_from(["none", "fair"]),
)
def test_however_a_quantity_is_written_it_is_one_run(
    model: dict[str, Any], cluster: dict[str, Any], schedule: str, contention: Contention
) -> None:
    """The same bytes in all files, the recorded request included."""
    found = {}
    with TemporaryDirectory() as folder:
        for name, form in FORMS.items():
            given = {"model": written(model, form), "cluster": written(cluster, form)}
            trace = simulate(schedule, **given, contention=contention, steps=2, ignore_memory=True)
            found[name] = files(trace, Path(folder) / name)
    assert found["integer"] == found["float"] == found["text"]


def test_every_quantity_of_files_is_drawn() -> None:
    """No other table of a file has any."""
    tables: set[type[Any]] = set()

    def walk(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in tables:
            tables.add(kind)
            for field in msgspec.structs.fields(kind):
                walk(field.type)
        for part in get_args(kind):
            walk(part)

    walk(Model)
    walk(Cluster)
    assert {table for table in tables if units(table)} == {
        Stage,
        Tie,
        Devices,
        Kernels,
        Workspace,
        Speeds,
        Link,
        PairLink,
        Cable,
        Edge,
        Stop,
    }
    assert Disorder in tables


@pytest.mark.parametrize("latency", [0, 0.0, "0 s"])
def test_a_link_of_its_own_beside_a_whole_number(latency: object) -> None:
    """Four stages of 1 s each way take 2 (4 + 3) s; the first link is crossed once to fill, and once to drain."""
    content = {"link": {"latency": latency}, "links": [{"between": [0, 1], "latency": "900 ms"}]}
    model = Model(stages=(Stage(forward=1, backward=1),) * 4)
    trace = simulate("1f1b", 4, model=model, cluster=content, steps=1)
    assert trace.summary()["makespan"] == pytest.approx(14 + 2 * 0.9)


@pytest.mark.parametrize("bandwidth", [100_000_000_000, 1e11, "100 GB/s"])
def test_a_bandwidth_of_a_topology_may_be_a_whole_number(bandwidth: object) -> None:
    """One stage after another over nodes of one device: a forward and a backward each way, 1 GB at 100 GB/s."""
    topology = {"kind": "nodes", "per_node": 1, "network": {"bandwidth": bandwidth}}
    model = Model(stages=(Stage(forward=1, backward=1, boundary=10**9),) * 2)
    trace = simulate("gpipe", 2, m=1, model=model, cluster={"topology": topology}, steps=1)
    assert trace.summary()["makespan"] == pytest.approx(4 + 2 * 0.01)
