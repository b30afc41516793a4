"""Memory as devices hold it, slot by slot, against memory as the program's buffers say: equal to the byte."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdpsim.model import Model, Stage
from cdpsim.program import Category
from cdpsim.schedules import TABLE_1
from cdpsim.schedules.rule import CDP_V2
from tests.helpers.half_of_cases import every_second
from tests.validation.cases import OPTIMIZERS, cyclic, rules_of, stages_of
from tests.validation.known import known
from validation.comparison import memory
from validation.comparison.memory import MemoryBySlot
from validation.ranks.launcher import Ranks
from validation.replay import interpreter
from validation.replay.case import Case, Prepared, play_in_process, prepare, profiled
from validation.replay.contents import Holding
from validation.replay.interpreter import BufferStore
from validation.replay.watch import Reading
from validation.report.schema import Memory
from validation.training import passes
from validation.training.models import MODELS
from validation.training.passes import Pass
from validation.training.stages import Training

TOLERANCE = 0.01


def watched(case: Case) -> tuple[Prepared, list[list[Reading]]]:
    """Play a case in this process, its storages watched."""
    prepared = prepare(replace(known(case), watch="storages"))
    return prepared, [outcome.readings for outcome in play_in_process(prepared)]


def both(case: Case) -> tuple[MemoryBySlot, MemoryBySlot]:
    """Return the memory of a case, simulated and measured."""
    prepared, readings = watched(case)
    return memory.simulated_memory(prepared.plan), memory.measured_memory(prepared.plan, readings)


def compared(case: Case) -> Memory:
    """Return the memory section of its report."""
    prepared, readings = watched(case)
    return memory.compare_memory(prepared.plan, readings, tolerance=TOLERANCE)


def check_equal(case: Case) -> None:
    """Every device, slot and category to the byte, and something of what is always there."""
    simulated, measured = both(case)
    assert np.array_equal(simulated, measured), case
    assert simulated[:, :, [Category.ACTIVATIONS, Category.PARAMETERS]].max(axis=(0, 1)).all()


# Every schedule


@pytest.mark.parametrize(("schedule", "n", "model"), every_second(TABLE_1, (1, 2, 3, 5, 8), MODELS))
def test_every_schedule_holds_what_its_program_says(schedule: str, n: int, model: str) -> None:
    for rule in rules_of(schedule):
        check_equal(Case(schedule, n, steps=2, rule=rule, model=model, optimizer=OPTIMIZERS["momentum"]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any schedule and causal rule, any of the small models' sizes, types and optimizers."""
    schedule, n = draw(st.sampled_from(sorted(TABLE_1))), draw(st.integers(1, 4))
    fresh = np.array(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).reshape(n, n) & CDP_V2.matrix(n, n)
    rules = st.sampled_from(["cdp-v1", "cdp-v2", tuple(map(tuple, (1 - fresh).tolist()))])
    orders = st.sampled_from(["forward-first", "backward-first"])
    return Case(
        schedule,
        n,
        steps=draw(st.integers(1, 3)),
        rule=draw(rules) if schedule in cyclic else None,
        slot_order=draw(orders) if schedule == "single-cdp" and n > 1 else None,
        model=draw(st.sampled_from(["mlp", "transformer"])),
        optimizer=OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))],
        batch=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        sizes=(("width", 2 * draw(st.integers(1, 20))), ("layers", draw(st.integers(1, 3)))),
    )


@pytest.mark.slow
@given(cases())
@settings(max_examples=20)
def test_any_case_holds_what_its_program_says(case: Case) -> None:
    check_equal(case)


BUILT_ONCE = "single-cdp", "multi-cdp", "zero-cdp", "mp-cdp"  # whose cases with one model and n share its profile
SMALL = "resnet-mini", "vit-mini", "gpt2-mini", "llama-mini"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "n", "model"), every_second(BUILT_ONCE, (2, 4), SMALL))
def test_models_of_transformers_hold_what_their_programs_say(schedule: str, n: int, model: str) -> None:
    """To the byte too, where a report asks for two per cent: also stages of unlike layers."""
    pytest.importorskip("transformers")
    check_equal(Case(schedule, n, steps=2, model=model, batch=2, dtype="float32", optimizer=OPTIMIZERS["momentum"]))


# Cyclic against simultaneous, from the profile's own numbers (sections 1 and 7 of the spec)


def deep(schedule: str, n: int, slot_order: str | None = None) -> Case:
    """Stages of eight layers and batches as large as their width: a boundary and a transient weigh little then.

    One step has all that is to be seen: two steady slots, an even and an odd one.
    """
    return Case(schedule, n, steps=1, slot_order=slot_order, batch=32, sizes=(("width", 32), ("layers", 8)))


@cache
def total(schedule: str, n: int, slot_order: str | None = None) -> int:
    """The most that all devices' activations come to in one slot, measured; the simulation says the same."""
    found = compared(deep(schedule, n, slot_order)).total
    assert found.simulated_bytes == found.measured_bytes
    return found.measured_bytes


def passes_of(stages: tuple[Stage, ...]) -> list[int]:
    """Return the bytes that each stage adds to a micro-batch: its input is the output that the stage before keeps."""
    return [stage.activation - (stages[j - 1].kept_output if j else 0) for j, stage in enumerate(stages)]


def stage_activation() -> int:
    """Return the bytes that a stage adds that is neither the first nor the last."""
    return passes_of(stages_of(deep("single-cdp", 3)))[1]


def cyclic_slot(stages: tuple[Stage, ...], parity: int) -> tuple[int, int]:
    """Return the bytes of all micro-batches in an even or an odd steady slot, with their tasks' transients.

    Every stage runs one task, so that stage j's activations are held by those of the n-j micro-batches that are in
    stage j or beyond; a boundary's gradient by each that goes back, but for the last stage.
    """
    n = len(stages)
    phases = range(parity, 2 * n, 2)
    forward, backward = [p for p in phases if p < n], [2 * n - 1 - p for p in phases if p >= n]
    assert sorted(forward + backward) == list(range(n))
    held = sum((n - j) * size for j, size in enumerate(passes_of(stages)))
    gradients = sum(stages[j].boundary for j in backward if j < n - 1)
    transients = [stages[j].forward_transient for j in forward] + [stages[j].backward_transient for j in backward]
    return held + gradients, sum(transients)


every_n = pytest.mark.parametrize("n", [2, 3, 4, 8])


@pytest.mark.slow
@every_n
def test_simultaneous_micro_batches_hold_n_times_psi(n: int) -> None:
    """N psi + tau: of the last stage's transients one, where one device has all micro-batches, else of each."""
    stages = stages_of(deep("single-dp", n))
    psi, tau = sum(passes_of(stages)), stages[-1].backward_transient
    assert total("single-dp", n) == n * psi + tau
    assert total("multi-dp", n) == n * (psi + tau)


@every_n
def test_cyclic_micro_batches_hold_half_and_the_gradients_of_boundaries(n: int) -> None:
    """(N+1)/2 psi + floor(N/2) b + tau', where tau' is one stage's transient on one device, and all stages' on N."""
    stages = stages_of(deep("multi-cdp", n))
    slots = [cyclic_slot(stages, parity) for parity in (0, 1)]
    most = max(held for held, _ in slots)
    assert total("multi-cdp", n) == max(held + transients for held, transients in slots)
    assert total("single-cdp", n) == most + stages[0].backward_transient
    # Stages are equal, but that the first has its input to itself, and the last has targets and a loss.
    stage, last, b = stage_activation(), passes_of(stages)[-1], stages[0].boundary
    assert most == n * (n + 1) // 2 * stage + n * b + (last - stage) + n // 2 * b


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("devices", ["single", "multi"])
def test_cyclic_micro_batches_hold_a_share_of_what_simultaneous_ones_do(devices: str, n: int) -> None:
    """(N+1)/2N, but for what boundaries and transients weigh."""
    share = total(f"{devices}-cdp", n) / total(f"{devices}-dp", n)
    assert share == pytest.approx((n + 1) / (2 * n), abs=0.03)


@every_n
@pytest.mark.parametrize("order", ["forward-first", "backward-first"])
def test_the_order_in_a_slot_decides_how_many_stage_activations_are_held(order: str, n: int) -> None:
    """Whole ones, at the peak: n(n+1)/2 if forwards come first, half of n*n rounded up if backwards do."""
    expected = n * (n + 1) // 2 if order == "forward-first" else ceil(n * n / 2)
    assert total("single-cdp", n, order) // stage_activation() == expected


# Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Enough of them for the pyramid of three stages."""
    with Ranks(6) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["multi-cdp", "mp-cdp", "pp-cdp", "zero-dp"])
def test_processes_hold_what_devices_in_one_do(schedule: str, ranks: Ranks) -> None:
    """Slot by slot, in every category, though no process waits for the end of a slot."""
    case = Case(schedule, 3, steps=3, model="transformer", optimizer=OPTIMIZERS["adam"], watch="storages")
    plan, outcomes = prepare(known(case)).plan, ranks.run(case)
    assert np.array_equal(
        memory.simulated_memory(plan), memory.measured_memory(plan, [outcome.readings for outcome in outcomes])
    )


# Seeded faults: each is seen, and where it begins


def parting(found: Memory) -> dict[int, tuple[int, str]]:
    """Of each device that parts from its simulation, slot and task."""
    return {each.device: (each.parts_at.slot, each.parts_at.task) for each in found.devices if each.parts_at}


@pytest.mark.slow
def test_nothing_parts_where_nothing_is_wrong() -> None:
    found = compared(Case("pp-cdp", 3, model="transformer"))
    assert (parting(found), found.max_relative_error) == ({}, 0)


def test_a_pass_that_keeps_its_output_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the slot after the first forward of each stage but the last: until then its output is there anyway."""

    def keeping(
        training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
    ) -> tuple[Tensor | None, Pass]:
        y, kept = passes.forward(training, stage, theta, x, target, micro_batches)
        vars(kept.lent)["output"] = y
        return y, kept

    monkeypatch.setattr(interpreter, "run_forward", keeping)
    found = compared(Case("pp-cdp", 3, model="transformer"))
    assert parting(found) == {0: (1, "F(t=0,i=0,j=0)"), 1: (2, "F(t=0,i=0,j=1)")}
    assert [device.relative_error < 0 for device in found.devices] == [True, True, False]


def test_an_activation_that_is_not_let_go_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the slot after its backward on, on its device alone: the input of a pass outlives its graph."""
    end, lost, kept = BufferStore.end, Holding(Category.ACTIVATIONS, 2, 0, 0), []

    def forgetful(shelf: BufferStore[Pass], holding: Holding) -> None:
        if holding == lost:
            kept.append(shelf.get(holding))
        end(shelf, holding)

    monkeypatch.setattr(BufferStore, "end", forgetful)
    found = compared(Case("multi-cdp", 3, model="transformer"))
    assert parting(found) == {0: (4, "B(t=0,i=0,j=1)")}
    assert found.devices[0].relative_error < 0


def test_a_version_that_is_kept_too_long_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the device lets go of the next one: more parameters than the program says, and nothing else."""
    end, late = BufferStore.end, {}

    def slow(shelf: BufferStore[Tensor], holding: Holding) -> None:
        if holding.category == Category.PARAMETERS:
            late[shelf] = shelf.get(holding)
        end(shelf, holding)

    monkeypatch.setattr(BufferStore, "end", slow)
    simulated, measured = both(Case("zero-cdp", 3))
    assert (measured >= simulated).all()
    most = (measured - simulated).max(axis=1)
    assert most[:, Category.PARAMETERS].all()
    assert not np.delete(most, Category.PARAMETERS, axis=1).any()


@pytest.mark.parametrize("more", [1024, -1024])
def test_a_model_file_with_other_bytes_is_seen(more: int) -> None:
    """From the stage's first forward on each device; the error is a share of what was measured."""
    case = Case("multi-cdp", 3)
    stages = list(stages_of(case))
    stages[1] = msgspec.structs.replace(stages[1], activation=stages[1].activation + more)
    found = compared(replace(case, stages=Model(stages=tuple(stages))))
    assert parting(found) == {i: (2 * i + 1, f"F(t=0,i={i},j=1)") for i in range(3)}
    device = found.devices[0]
    assert device.simulated_bytes - device.measured_bytes == more
    assert device.relative_error == more / device.measured_bytes
    assert found.max_relative_error == abs(device.relative_error)


def test_what_is_within_tolerance_does_not_part() -> None:
    """The error is told all the same."""
    case = Case("multi-cdp", 3)
    stages = list(stages_of(case))
    stages[1] = msgspec.structs.replace(stages[1], activation=stages[1].activation + 8)
    found = compared(replace(case, stages=Model(stages=tuple(stages))))
    assert parting(found) == {}
    assert 0 < found.max_relative_error < TOLERANCE


def test_a_profile_is_too_high_where_autograd_holds_gradients_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's thread may: by boundaries, of 4 samples of 16 numbers. The first stage hands none back."""
    case, held, grad = Case("zb-h1", 4, steps=2), list[object](), torch.autograd.grad

    def hold(*given: Any, **options: Any) -> Any:
        held[:] = [found := grad(*given, **options)]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", hold)
        case = profiled(case)
    found = compared(case)
    more = [device.simulated_bytes - device.measured_bytes for device in found.devices]
    assert more[0] == 0 < min(more[1:])
    assert not any(size % (4 * 16 * 8) for size in more)
