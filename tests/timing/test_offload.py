"""Offload to hosts: bytes by the papers' numbers, times by hand, and runs whose memory and waits follow from them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Cluster, Model, RequestError, Stage, Trace, presets, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.files.units import Work
from cdpsim.invariants import violations
from cdpsim.model import Recipe
from cdpsim.model.recipe import apply_recipe
from cdpsim.numeric.columns import Times
from cdpsim.program import Kind
from cdpsim.timing.costs import times_of_stages, with_transfer_times
from tests.conftest import Command

HOST = Link(latency=0.25, bandwidth=10.0)
BOX = Cluster(link=Link(latency=0.125), host=HOST)
BILLION = 10**9


def model(n: int = 2, **more: Any) -> Model:
    """Stages that hold 20 bytes of activations, 10 of parameters and of gradients, 40 of the optimizer."""
    stage: dict[str, Any] = {
        "forward": 1.0,
        "backward": 3.0,
        "activation": 20,
        "boundary": 4,
        "parameters": 10,
        "optimizer": 40,
    }
    return Model(stages=(Stage(**stage | more),) * n)


def times_on(model: Model, speed: float | None) -> Times:
    """The times of its stages on a device of that speed, a row for each kind of task."""
    return times_of_stages(model, speed, None, splits=False, shard=1)


def peak(trace: Trace, device: int, category: str) -> int:
    held: int = trace.summary()["peak_memory"][device][category]
    return held


def test_zero_offloads_four_bytes_a_parameter_cross_for_an_update() -> None:
    """Ren et al. 2021, section 3: of M parameters in mixed precision 2M bytes of gradients go, 2M of parameters come.

    12M bytes, with Adam, are on the host; 4M stay. A 10-billion model needs 40 GB over 16 GB/s: 2.5 s.
    """
    ten = 10 * BILLION
    plain = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=2 * ten),), precision="fp16")
    recipe = Recipe(optimizer="adam", mixed_precision=True, offload="optimizer")
    (stage,) = apply_recipe(plain, recipe).stages
    assert (stage.optimizer, stage.host_optimizer) == (0, 12 * ten)
    (stage,) = with_transfer_times(apply_recipe(plain, recipe), Link(bandwidth=16 * BILLION)).stages
    assert stage.host_update == pytest.approx(2.5)


def test_an_update_takes_both_ways_and_the_hosts_step() -> None:
    """0.25 + 30/10 for gradients, 2 on the host, 0.25 + 10/10 for parameters: 6.5 s."""
    (stage, _) = with_transfer_times(
        apply_recipe(model(gradients=30, host_update=2.0), Recipe(offload="optimizer")), HOST
    ).stages
    assert stage.host_update == 6.5


def test_a_task_takes_the_longer_of_computing_and_crossing() -> None:
    """20 bytes cross in 0.25 + 2 s: longer than a forward of 1 s, not than a backward of 3 s."""
    crossing = with_transfer_times(apply_recipe(model(), Recipe(offload="activations")), HOST)
    assert times_on(crossing, None)[: Kind.W].tolist() == [[0.0, 0.0], [2.25, 2.25], [3.0, 3.0]]
    work = model(forward=Work(8), backward=Work(24))
    crossing = with_transfer_times(apply_recipe(work, Recipe(offload="activations")), HOST)
    assert times_on(crossing, 2.0)[Kind.F].tolist() == [4.0, 4.0]


def test_times_that_a_stage_states_stand() -> None:
    """A transfer instead of the link's; and without a link, all that an update takes."""
    stated = apply_recipe(model(transfer=4.0, host_update=2.0), Recipe(offload="all"))
    assert times_on(with_transfer_times(stated, HOST), None)[Kind.B].tolist() == [4.0, 4.0]
    assert times_on(with_transfer_times(stated, None), None)[Kind.U].tolist() == [2.0, 2.0]
    on_device = with_transfer_times(model(host_update=2.0), None)
    assert times_on(on_device, None)[Kind.U].tolist() == [0.0, 0.0]  # nothing is offloaded


def test_activations_are_on_the_device_while_their_tasks_run() -> None:
    """A pipeline of two: each device holds the 20 bytes of its task while that runs, and none of the other's."""
    trace = simulate("pp-cdp", steps=1, model=apply_recipe(model(2), Recipe(offload="activations")), cluster=BOX)
    program, start, end = trace.program, trace.start, trace.end
    for device in (0, 1):
        rows = (trace.memory["device"] == device) & (trace.memory["category"] == "activations")
        time, size = trace.memory["time"][rows], trace.memory["size"][rows]
        for node in np.flatnonzero(program.tasks.device[: program.compute] == device).tolist():
            middle = (start[node] + end[node]) / 2
            # A backward of stage 0 has the gradient of its output beside them, 4 bytes.
            expected = 20 + 4 * (program.tasks.kind[node] == 2 and device == 0)
            assert size[np.searchsorted(time, middle, side="right") - 1] == expected
    idle = simulate("pp-cdp", 2, steps=1, model=model(2), cluster=BOX)
    assert peak(idle, 0, "activations") == 2 * 20 + 4


def test_hosts_hold_what_devices_do_not() -> None:
    """Device j of a pipeline of 3 has 3-j passes under way, 20 bytes each, and 40 bytes of the optimizer."""
    trace = simulate("pp-cdp", model=model(3), cluster=BOX, steps=4, offload="all")
    assert [row["bytes"] for row in trace.summary()["host_memory"]] == [100, 80, 60]
    assert [peak(trace, device, "optimizer") for device in range(3)] == [0, 0, 0]
    assert "host_memory" not in simulate("pp-cdp", model=model(3), cluster=BOX).summary()


def test_a_hosts_updates_take_turns_while_the_device_computes() -> None:
    """Data parallel, one device: both stages' updates begin when the step of 2 * 4 s is done, one after the other.

    2.5 s each (2 * 0.25 + 20/10): F of stage 0 begins at 10.5, and runs until 11.5, while the host updates stage 1.
    """
    trace = simulate("multi-dp", model=model(2), steps=2, cluster=Cluster(host=HOST), offload="optimizer")
    tasks = trace.tasks
    row = {}
    for kind, j, d, t, start, end in zip(
        *(tasks[name].tolist() for name in ("kind", "stage", "device", "step", "start", "end")), strict=True
    ):
        row[kind, j, d, t] = start, end
    for device in (0, 1):
        assert row["U", 0, device, 0] == (8.0, 10.5)
        assert row["U", 1, device, 0] == (10.5, 13.0)
        assert row["F", 0, device, 1] == (10.5, 11.5)
        assert row["F", 1, device, 1] == (13.0, 14.0)


@pytest.mark.every_case
@pytest.mark.parametrize("update", [0.5, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hosts_updates_run_beside_the_backwards_that_follow(update: float, ranks: int) -> None:
    """Layers come to the host as they are done: a step takes F + max(B + u, b + L u), as buckets of DDP do."""
    layers = Model(stages=(Stage(forward=1.0, backward=3.0, parameters=8, host_optimizer=8, host_update=update),) * 4)
    links = Cluster(link=Link())
    for zero, u in {0: update, 3: update / ranks}.items():
        more: dict[str, Any] = {"zero": zero, "shard": ranks, "buckets": None if zero else "1 B"}
        run = simulate("dp", model=layers, steps=4, cluster=links, **more)
        assert violations(run) == {}
        assert run.summary()["period"] == 4 + max(4 * 3 + u, 3 + 4 * u)


@given(st.sampled_from(["multi-dp", "multi-cdp", "pp-cdp", "mp-cdp", "zero-dp", "zero-cdp"]), st.integers(1, 4))
def test_the_updates_of_one_device_never_overlap(schedule: str, n: int) -> None:
    trace = simulate(schedule, model=model(n), cluster=BOX, offload="optimizer")
    tasks = trace.tasks
    update = tasks["kind"] == "U"
    for device in range(int(tasks["device"].max()) + 1):
        mine = update & (tasks["device"] == device)
        spans = sorted(zip(tasks["start"][mine].tolist(), tasks["end"][mine].tolist(), strict=True))
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_run_with_offload_is_opened_again(tmp_path: Path) -> None:
    trace = simulate("multi-cdp", model=model(), cluster=BOX, offload="all")
    trace.save(tmp_path / "run")
    again = reopen(tmp_path / "run")
    assert again.summary() == trace.summary()


def test_a_cluster_keeps_its_host_link(tmp_path: Path) -> None:
    for host in (None, Link(), HOST):
        cluster = Cluster(devices=(Devices(count=2),), host=host)
        cluster.save(tmp_path / "box.toml", force=True)
        assert Cluster.load(tmp_path / "box.toml") == cluster


def test_a_models_file_keeps_what_it_offloads(tmp_path: Path) -> None:
    kept = apply_recipe(model(host_update=2.0, transfer=1.0), Recipe(offload="all"))
    kept.save(tmp_path / "toy.toml")
    assert Model.load(tmp_path / "toy.toml") == kept


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (["--offload", "optimizer"], "stage 0: has something on its host, and nothing says how long"),
        (["--offload", "optimiser", "--cluster", "box.toml"], "unknown offload 'optimiser'; did you mean 'optimizer'?"),
        (["--offload", "optimizer", "--optimizer", "sgd", "--cluster", "box.toml"], "offload: no stage has optimizer"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    options: list[str], subject: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    apply_recipe(model(optimizer=0), Recipe(optimizer="adam")).save("adam.toml")
    model(optimizer=0).save("toy.toml")
    BOX.save("box.toml")
    which = "toy.toml" if "--optimizer" in options else "adam.toml"
    code, out, error = command("simulate", "pp-cdp", "--model", which, *options, "-o", "run")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert subject in error
    assert not (tmp_path / "run").exists()


def test_slots_have_nothing_to_offload() -> None:
    with pytest.raises(RequestError, match="the slot model has no bytes"):
        simulate("pp-cdp", 2, offload="all")


@given(st.integers(1, 4), st.sampled_from(["none", "full", "sqrt"]))
def test_checkpoints_are_what_is_offloaded_of_a_stage_that_recomputes(n: int, recompute: str) -> None:
    """Bytes are kept on one side or the other; a task's highest moment is the same on the device."""
    layers = model(4, forward=Work(1), backward=Work(2))
    here = apply_recipe(layers, Recipe(recompute=recompute), n).stages
    there = apply_recipe(layers, Recipe(recompute=recompute, offload="activations"), n).stages
    for own, other in zip(here, there, strict=True):
        assert (other.activation, other.offloaded) == (0, own.activation)
        assert other.forward_transient == own.activation + own.forward_transient
        assert other.backward_transient == own.activation + own.backward_transient
        assert other.backward == own.backward
        assert other.input_transient is other.weight_transient is None


def test_parts_of_a_backward_hold_what_comes_back_too() -> None:
    (stage,) = apply_recipe(model(1, input_transient=5, weight_transient=7), Recipe(offload="activations")).stages
    (plain,) = model(1).stages
    assert (stage.input_transient, stage.weight_transient) == (plain.activation + 5, plain.activation + 7)


def test_stages_that_are_grouped_offload_and_update_together() -> None:
    host = model(4, optimizer=0, host_optimizer=7, host_update=2.0, offloaded=5, transfer=0.5)
    (stage, _) = apply_recipe(host, n=2).stages
    assert (stage.host_optimizer, stage.host_update, stage.offloaded, stage.transfer) == (14, 4.0, 10, 1.0)
    assert apply_recipe(model(4, update=0.25), n=2).stages[0].update == 0.5
    assert apply_recipe(model(4, update=Work(3)), n=2).stages[0].update == Work(6)
    assert apply_recipe(model(4), n=2).stages[0].update is None


@pytest.mark.parametrize("name", ["a100-nodes", "h100-node", "h100-nodes", "h200-node", "pcie-box", "v100-node"])
def test_host_links_of_presets_are_what_pci_express_carries(name: str) -> None:
    """Sixteen lanes of 8, 16 or 32 GT/s a generation, 128 of 130 bits of which are data; data sheets round that up.

    PCI Express Base Specification 3.0 (2010), 4.0 (2017) and 5.0 (2019).
    """
    generation = {"v100-node": 3, "a100-nodes": 4}.get(name, 5)
    raw = 16 * 2**generation * 10**9 / 8
    link = presets.cluster(name).host
    assert link is not None
    assert raw * 128 / 130 < link.bandwidth <= raw
    assert 0 < link.latency < 1e-5
