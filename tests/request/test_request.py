"""A recorded request is what `simulate` takes, and the same run again; slots stay away from seconds and bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stage, Trace, compare, presets, simulate
from cdpsim.cluster import Cable, Devices, Edge, Link, PairLink, Speeds, Topology
from cdpsim.cluster.disorder import Disorder, Slow, Stop
from cdpsim.export.pictures import step_actions
from cdpsim.model import GRADIENT_TYPES, OFFLOAD, OPTIMIZERS, RECOMPUTE, UPDATE_TIMES
from cdpsim.program.collectives import COLLECTIVES
from cdpsim.request.options import CollectiveName, EngineName, TrainingOptions
from cdpsim.schedules.actions import write_actions
from cdpsim.timing.engine import ENGINES
from tests.conftest import Command
from tests.helpers.command_line import refuse
from tests.helpers.saved_files import files
from tests.helpers.strategies import fitting, in_seconds, requests, streamed_requests

LAYER = Stage(forward=1.0, backward=2.0, weight_backward=1.0, activation=100, boundary=10, parameters=20)
LAYERS = Model(stages=(LAYER,) * 8, precision="bf16")
BOX = Cluster(link=Link(latency=0.25, bandwidth=40.0), host=Link(latency=0.5, bandwidth=50.0))
REAL: dict[str, Any] = {"model": LAYERS, "cluster": BOX}
ALONE = Cluster(devices=(Devices(overlap="none"),), link=Link(latency=0.5))
MEMORY = Cluster(devices=(Devices(memory_bandwidth=100.0),), link=Link(latency=0.25))
JITTER = {"jitter": "lognormal:0.2", "seed": 3, "run": 2}
DISORDER = Disorder(link_jitter="uniform:0.3", slow=(Slow(device=0, factor=1 / 3),))
# Beside slots and plain costs: requests for each option, each with all that a record must say of it.
ASKED: dict[str, dict[str, Any]] = {
    "slots": {},
    "slots in two parts": {"model": "unit-split"},
    "slots disturbed": {"slow": ["0:3"], "stop": ["0:4:2", "0:9:1"]},
    "real": REAL,
    "trained": REAL | {"optimizer": "adam", "mixed_precision": True, "recompute": "sqrt", "offload": "all"},
    "updated": REAL | {"cluster": MEMORY, "optimizer": "lamb", "gradients": "fp32", "update_time": "clipped"},
    "disturbed": REAL | JITTER | {"link_jitter": "uniform:0.5", "slow": ["0:0.1"], "stop": ["0:3 s:250 ms"]},
    "by its cluster": REAL | {"cluster": Cluster(link=Link(latency=1.0), disorder=DISORDER)},
    "shared": REAL | {"contention": "fair"},
    "expanded": REAL | {"expand_collectives": True, "replicas": 2},
    "ring": REAL | {"collective": "ring"},
    "at once": REAL | {"reduce": "last", "replicas": 2},
    "met": REAL | {"cluster": ALONE, "rendezvous": "torch"},
    "early": REAL | {"prefetch": 2},
    "crowded": REAL | {"cluster": Cluster(devices=(Devices(memory=150),)), "ignore_memory": True},
    "one rule": {"rule": "cdp-v1"},
    "sync": {"rule": "vertical-sync"},
    "backward first": {"cluster": Cluster(), "slot_order": "backward-first"},
    "unequal stages": {"stage_replicas": [2, 1, 1, 3]},
    "preset": {"model": "gpt2", "cluster": "a100-nodes"},
}


def again(trace: Trace) -> Trace:
    """The request of a trace, asked again as a file has it."""
    return simulate(**json.loads(json.dumps(dict(trace.request))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recorded_request_asked_again_is_the_same_run(name: str, tmp_path: Path) -> None:
    """The same bytes in all files, for all options of the schedule: from memory, and from a file."""
    served = set()
    for asked in ASKED:
        try:
            trace = simulate(**fitting(name, 4) | ASKED[asked])
        except RequestError:
            continue  # this schedule does not take it
        served.add(asked)
        written = files(trace, tmp_path / f"{asked} first")
        assert files(simulate(**trace.request), tmp_path / f"{asked} again") == written, asked
        assert files(again(trace), tmp_path / f"{asked} from a file") == written, asked
    assert served >= {"slots", "slots in two parts", "slots disturbed", "real", "trained", "by its cluster", "preset"}


def test_every_request_above_is_one_of_some_schedule() -> None:
    """None of them is refused by all."""
    unserved = set(ASKED)
    for name in ("multi-dp", "pp-cdp", "multi-cdp", "single-cdp", "pipedream", "1f1b", "interleaved-1f1b"):
        for asked in sorted(unserved):
            try:
                simulate(**fitting(name, 4) | ASKED[asked])
            except RequestError:
                continue
            unserved.remove(asked)
    assert not unserved


@settings(max_examples=60)
@given(requests(most=4) | streamed_requests(most=3))
def test_any_request_can_be_asked_again(request: dict[str, Any]) -> None:
    trace = simulate(**request)
    assert again(trace).summary() == trace.summary()


def test_an_order_from_a_file_is_asked_again_where_the_file_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    write_actions(step_actions(simulate("1f1b", 4, m=8)), file)
    trace = simulate(str(file), replicas=2)
    assert again(trace).summary() == trace.summary()
    file.unlink()
    with pytest.raises(RequestError, match=r"mine\.csv: no such file"):
        again(trace)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"model": {"stages": 7}}, "model: "),
        ({"model": {}}, "model: "),
        ({"model": LAYERS, "cluster": {"lnik": {}}}, "cluster: .*unknown field 'lnik'"),
    ],
)
def test_a_mapping_is_checked_as_a_file_is(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=f"^{problem}"):
        simulate("multi-cdp", **given)


# Slots have no seconds and no bytes.

MEASURED: dict[str, Cluster] = {
    "latency": Cluster(link=Link(latency=1e-6)),
    "bandwidth": Cluster(link=Link(bandwidth=1e9)),
    "a pair": Cluster(links=(PairLink(between=(0, 1), latency=1.0),)),
    "a cable": Cluster(topology=Topology(kind="ring", link=Cable(latency=1.0))),
    "an edge": Cluster(devices=(Devices(count=3),), edges=(Edge(between=(0, 1), latency=1.0), Edge(between=(1, 2)))),
    "speed": Cluster(devices=(Devices(speed=1e12),)),
    "speeds": Cluster(devices=(Devices(speeds=Speeds(fp32=1e12)),)),
    "memory": Cluster(devices=(Devices(count=2), Devices(count=9, memory=10**9))),
    "memory bandwidth": Cluster(devices=(Devices(memory_bandwidth=1e12),)),
    "host": Cluster(host=Link()),
    "stop": Cluster(disorder=Disorder(stop=(Stop(device=0, at=2.0, lasts=1.0),))),
}
UNMEASURED: dict[str, Cluster] = {
    "nothing": Cluster(),
    "count": Cluster(devices=(Devices(count=9),)),
    "free links": Cluster(links=(PairLink(between=(0, 1), latency=0.0),)),
    "a free topology": Cluster(topology=Topology(kind="nodes", per_node=2)),
    "streams": Cluster(devices=(Devices(overlap="stream"),)),
    "slow": Cluster(disorder=Disorder(slow=(Slow(device=0, factor=2),))),
}


@pytest.mark.parametrize("what", MEASURED)
@pytest.mark.parametrize("model", ["unit", "unit-split"])
def test_slots_do_not_go_with_seconds_or_bytes(model: str, what: str) -> None:
    with pytest.raises(RequestError, match=r"^model: is of slots, which have no seconds and no bytes.*; name a model"):
        simulate("multi-dp", 3, model=model, cluster=MEASURED[what])
    assert not simulate("multi-dp", model=in_seconds(3), cluster=MEASURED[what], ignore_memory=True).in_slots


@pytest.mark.parametrize("name", presets.preset_names("clusters"))
def test_a_shipped_cluster_needs_a_model(name: str, command: Command, here: Path) -> None:
    for line in ("simulate multi-dp -n 2 -o out", "compare -n 2", "breakeven -n 2", "timeline multi-dp -n 2 -o x.svg"):
        refuse(command, here, f"{line} --cluster {name}", "model: is of slots, which have no seconds and no bytes")


@pytest.mark.parametrize("what", UNMEASURED)
def test_what_says_nothing_of_seconds_goes_with_slots(what: str) -> None:
    trace = simulate("multi-dp", 3, cluster=UNMEASURED[what])
    assert trace.in_slots
    assert again(trace).summary() == trace.summary()


@pytest.mark.parametrize("name", ["single-dp", "multi-dp", "1f1b"])
def test_times_go_with_the_cluster_of_slots(name: str) -> None:
    """Messages are free, and seconds are seconds."""
    model = Model(stages=(Stage(forward=0.5, backward=1.0),) * 2)
    trace = simulate(name, model=model)
    assert not trace.in_slots
    assert trace.summary()["makespan"] % 1.5 == 0


def test_a_device_that_no_task_uses_cannot_be_disturbed() -> None:
    """Of eight devices 1f1b uses three: what is asked of another one changes nothing."""
    eight = Cluster(devices=(Devices(count=8),), link=Link(bandwidth=1e9))
    asked: dict[str, Any] = {"model": Model(stages=(Stage(forward=1.0, backward=2.0),) * 3), "cluster": eight}
    disturbances: list[dict[str, Any]] = [{"slow": ["7:2"]}, {"stop": ["7:1 s"]}]
    for disturbed in disturbances:
        assert simulate("1f1b", **asked, **disturbed).tasks == simulate("1f1b", **asked).tasks
    stopped = msgspec.structs.replace(eight, disorder=Disorder(stop=(Stop(device=7, at=1.0),)))
    summary = simulate("1f1b", **asked | {"cluster": stopped}).summary()
    assert summary["period_is"] == "certified"
    assert "stop" not in summary["request"]


def test_a_schedule_of_ones_own_has_a_name_of_its_own() -> None:
    """Or its record, asked again, would be another run."""
    own = replace(SCHEDULES["multi-cdp"], rule=SCHEDULES["pipemare"].rule)
    with pytest.raises(RequestError, match="schedule: another one is named multi-cdp; give this one a name of its own"):
        simulate(own, 3)
    assert simulate(replace(own, name="mine"), 3).request["schedule"] == "mine"
    assert simulate(replace(own, rule=SCHEDULES["multi-cdp"].rule), 3).request["schedule"] == "multi-cdp"


def test_a_type_checker_knows_all_names_that_are_taken() -> None:
    assert get_args(CollectiveName) == COLLECTIVES
    assert get_args(EngineName) == ("auto", *ENGINES)
    hints = get_type_hints(TrainingOptions)
    known = {"optimizer": OPTIMIZERS, "recompute": RECOMPUTE, "offload": OFFLOAD}
    known |= {"gradients": GRADIENT_TYPES, "update_time": UPDATE_TIMES}
    for word, taken in known.items():
        assert get_args(get_args(hints[word])[0]) == taken


def test_schedules_and_optimizers_have_names_in_any_case(command: Command) -> None:
    """A request, its record and its tables have the name as it is; a name of a schedule with a stage of ZeRO, too."""
    trained = Request("1F1B", 4, model="gpt2", optimizer="AdamW")  # type: ignore[arg-type]
    assert (trained["schedule"], trained["optimizer"]) == ("1f1b", "adamw")
    assert trained.model == Request("1f1b", 4, model="gpt2", optimizer="adamw").model
    sharded = Request("ZeRO-1", model="gpt2", replicas=2)
    assert (sharded.schedule.name, sharded.zero) == ("dp", 1)
    rows = compare("GPipe", "FSDP", "DDP", n=4, replicas=2, model="gpt2", cluster="h100-node", sort="given")
    assert [row.schedule for row in rows] == ["gpipe", "fsdp", "ddp"]
    for asked in ("compare {} -n 2", "simulate {} -n 2", "plan --schedules {} --devices 2 --batch 4"):
        one, other = (command(*asked.format(name).split(), "--format", "json") for name in ("1F1B", "1f1b"))
        assert (one.code, one.out, one.err) == (0, other.out, other.err)
    with pytest.raises(RequestError, match="unknown optimizer 'AdmaW'; did you mean 'adamw'"):
        Request("1f1b", 4, model="gpt2", optimizer="AdmaW")  # type: ignore[arg-type]
