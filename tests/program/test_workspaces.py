"""Workspaces: what kernels of libraries take beside tensors, for good and while tasks run."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Cluster, Model, RequestError, Stage, compare, evaluate, plan, simulate
from cdpsim.cluster import Devices, Workspace
from cdpsim.runs import Run
from tests.helpers import strategies

MODEL = Model(stages=(Stage(forward=1.0, backward=1.0, weight_backward=0.5, activation=100, parameters=10),) * 2)


def cluster_of(**workspace: Any) -> Cluster:
    return Cluster(devices=(Devices(workspace=Workspace(**workspace)),))


def totals(cluster: Cluster, schedule: Any = "1f1b", **options: Any) -> list[int]:
    asked: dict[str, Any] = {"model": MODEL, "steps": 2, "ignore_memory": True, "cluster": cluster} | options
    found: list[int] = simulate(schedule, **asked).peaks[:, -1].tolist()
    return found


@pytest.mark.parametrize(
    ("workspace", "peaks"),
    [
        # Device 0 has two activations and, from its first backward on, a gradient; device 1 one activation and that.
        ({}, [220, 120]),
        ({"kept": 1000}, [1220, 1120]),
        # In device 0's second forward there is no gradient yet; device 1 has it in its second one.
        ({"forward": 30}, [240, 150]),
        ({"forward": [30, 5]}, [240, 125]),
        ({"backward": 7}, [227, 127]),
        ({"forward": [30, 5], "backward": [7, 70], "kept": 1000}, [1240, 1190]),
        # A list of other stages counts by its largest.
        ({"backward": [1, 2, 3]}, [223, 123]),
    ],
)
def test_peaks_by_hand(workspace: dict[str, Any], peaks: list[int]) -> None:
    """Of two micro-batches in two stages, of 10 bytes of parameters, 10 of gradients, and 100 a micro-batch."""
    assert totals(cluster_of(**workspace), m=2) == peaks


def test_parts_of_backwards_have_their_own() -> None:
    """One micro-batch: an activation and parameters in B, and gradients beside them in W, of 120 bytes in all."""
    sizes: list[dict[str, int]] = [{}, {"weight_backward": 9}, {"backward": 50}, {"backward": 50, "weight_backward": 9}]
    peaks = [totals(cluster_of(**own), "zb-h1", m=1) for own in sizes]
    assert peaks == [[120, 120], [129, 129], [170, 170], [160, 160]]
    assert totals(cluster_of(backward=50, input_backward=0, weight_backward=0), "zb-h1", m=1) == peaks[0]


def test_groups_of_devices_have_their_own() -> None:
    groups = [{"count": 1, "workspace": {"kept": 5}}, {"count": 1, "workspace": {"backward": 3}}]
    cluster = Cluster.from_builtins({"devices": groups}, "cluster")
    assert totals(cluster, m=2) == [225, 123]


@given(strategies.requests(timed=True), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_is_kept_adds_to_each_peak_and_what_tasks_take_adds_at_most_that(
    request: dict[str, Any], kept: int, during: int
) -> None:
    """Of every schedule, on devices with as many lanes and links as there may be."""
    request = request | {"ignore_memory": True}

    def run(**workspace: Any) -> Run:
        groups = [
            msgspec.structs.replace(each, workspace=Workspace(**workspace)) for each in request["cluster"].devices
        ]
        return simulate(**request | {"cluster": msgspec.structs.replace(request["cluster"], devices=tuple(groups))})

    plain, always = run(), run(kept=kept)
    assert (always.peaks[:, -1] == plain.peaks[:, -1] + kept).all()
    assert (np.delete(always.peaks, [0, 5], axis=1) == np.delete(plain.peaks, [0, 5], axis=1)).all()
    lanes = request["cluster"].lanes(plain.devices).clip(max=len(plain.tasks))
    more = run(forward=during, backward=during).peaks[:, -1] - plain.peaks[:, -1]
    assert (more >= 0).all()
    assert (more <= during * lanes).all()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "gpipe"])
def test_runs_of_few_micro_batches_and_both_engines_have_them(schedule: Any) -> None:
    """As what evaluates many micro-batches by few says, and replicas of which one stands for all."""
    cluster = cluster_of(kept=1000, forward=30, backward=[7, 70])
    asked: dict[str, Any] = {"n": 2, "m": 40, "model": MODEL, "cluster": cluster, "ignore_memory": True, "replicas": 2}
    run = simulate(schedule, **asked, steps=2)
    assert (run.peaks == run.whole.peaks).all()
    assert (run.peaks == simulate(schedule, **asked, steps=2, engine="simpy").peaks).all()
    assert evaluate(schedule, **asked).memory == run.peaks[:, -1].max()
    assert run.memory["size"].max() <= run.peaks[:, -1].max()


def test_a_device_must_have_room_for_them() -> None:
    """Where all is there but one byte, the run is refused, and a table says that it does not fit."""

    def on(memory: int) -> dict[str, Any]:
        devices = Devices(workspace=Workspace(kept=10**7), memory=memory)
        return {"n": 2, "m": 2, "model": MODEL, "cluster": Cluster(devices=(devices,))}

    enough, short = on(10**7 + 220), on(10**7 + 219)
    assert simulate("1f1b", **enough).peaks.max() == 10**7 + 220
    with pytest.raises(RequestError, match=r"^memory: device 0 has 10,000,219 bytes, .* and 10,000,220 at its peak"):
        simulate("1f1b", **short)
    assert [compare("1f1b", **each).measured[0].fits for each in (enough, short)] == [True, False]


def test_a_plan_needs_room_for_them() -> None:
    """A byte less than the peak by hand, and nothing fits."""
    asked: dict[str, Any] = {"devices": 2, "batch": 2, "schedules": ["1f1b"], "zero": 0, "recompute": "none", "n": 2}
    cluster = cluster_of(kept=1000, backward=7)
    found = plan(MODEL, cluster, memory=1227, **asked)
    assert [(row["schedule"], row.measured.memory) for row in found.rows] == [("1f1b", 1227)]
    note = "memory is with 1.007 kB of workspaces, without CUDA context and allocator reserve"
    assert str(found).splitlines()[-2] == note
    assert plan(MODEL, cluster, memory=1226, **asked).rows == []


def test_tables_say_how_much_there_is() -> None:
    """In words below, and as a figure in records; without a workspace there is none."""
    rows = [
        compare("1f1b", n=2, model=MODEL, cluster=cluster_of(**own)) for own in ({}, {"kept": "65 MiB", "forward": 1})
    ]
    assert rows[0].notes[-1].endswith("a cluster; memory is without CUDA context and allocator reserve")
    assert (
        rows[1].notes[-1].endswith("memory is with 68.16 MB of workspaces, without CUDA context and allocator reserve")
    )
    assert [row.measured[0].to_builtins().get("workspace") for row in rows] == [None, 65 * 2**20 + 1]


def test_a_file_says_them_in_its_own_words(tmp_path: Path) -> None:
    cluster = cluster_of(kept="65 MiB", forward=3, backward=["1 kB", "2 kB"], weight_backward=0)
    cluster.save(tmp_path / "box.toml")
    assert Cluster.load(tmp_path / "box.toml") == cluster
    table = cluster.to_builtins()["devices"]["workspace"]  # type: ignore[index]
    assert table == {"kept": "68.15744 MB", "forward": "3 B", "backward": ["1 kB", "2 kB"], "weight_backward": "0 B"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kept": -1}, r"workspace\.kept: -1: not between"),
        ({"kept": [1]}, r"workspace\.kept: \[1\]: not a size"),
        ({"kpt": 1}, r"workspace: unknown field 'kpt'; did you mean 'kept'\?"),
        ({"backward": ["1 MB", -3]}, r"workspace\.backward: -3: not between"),
        ({"weight_backward": "much"}, r"workspace\.weight_backward: 'much': not a size"),
        (5, r"workspace: expected `object`, got `int`"),
    ],
)
def test_bad_tables_are_one_line(table: object, says: str) -> None:
    with pytest.raises(RequestError, match=rf"^cluster: \$\.devices\.{says}"):
        Cluster.from_builtins({"devices": {"workspace": table}}, "cluster")


def test_slots_have_none() -> None:
    with pytest.raises(RequestError, match="is of slots"):
        simulate("1f1b", 2, cluster=cluster_of(kept=1))
