"""Options of a replay beyond its schedule: each is replayed as it is simulated, or a report says why it is not."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from cdpsim.model import Recipe
from cdpsim.model.recipe import apply_recipe
from cdpsim.program import Category
from tests.validation.cases import OPTIMIZERS as CASES
from tests.validation.cases import stages_of
from tests.validation.known import known
from validation.comparison import memory
from validation.comparison.lifetimes import compare_lives
from validation.comparison.memory import MemoryBySlot
from validation.comparison.parameters import rounding_bound
from validation.replay.case import (
    Case,
    Final,
    Prepared,
    expected_parameters,
    largest_difference,
    play_in_process,
    prepare,
)
from validation.replay.equation import evaluate
from validation.replay.options import REPLAYED, describe_options, recorded_options, replayable
from validation.training.forms import flatten
from validation.training.models import make_training
from validation.training.optimizer import OPTIMIZERS, Optimizer
from validation.training.stages import Training

MIXED = Optimizer("adam", {"lr": 0.01}, mixed_precision=True)


def replayed(case: Case) -> tuple[Prepared, MemoryBySlot, Final]:
    """Replay a case and check it: every byte in every slot, every call, and the equation; return what is measured."""
    prepared = prepare(replace(known(case), watch="storages"))
    outcomes = play_in_process(prepared)
    measured = memory.measured_memory(prepared.plan, [outcome.readings for outcome in outcomes])
    assert np.array_equal(memory.simulated_memory(prepared.plan), measured), case
    assert [outcome.calls for outcome in outcomes] == [prepared.plan.calls(d) for d in range(len(outcomes))]
    assert not compare_lives(prepared.plan)
    collective = {message.op.name for message in prepared.plan.messages} - {"P2P"}
    assert largest_difference(outcomes, expected_parameters(prepared)) <= (1e-12 if collective else 0)
    return prepared, measured, {stage: own for outcome in outcomes for stage, own in outcome.parameters.items()}


# Options of schedules


SCHEDULED = {
    "zero-cdp arrives early": Case("zero-cdp", 3, prefetch=1, optimizer=CASES["momentum"]),
    "zero-cdp arrives as early as it can": Case("zero-cdp", 4, prefetch=100, optimizer=CASES["adam"], steps=2),
    "zero-dp has a stage twice": Case("zero-dp", 3, prefetch=2, steps=2),
    "multi-cdp arrives early": Case("multi-cdp", 4, prefetch=1, model="transformer", steps=2),
    "sums early": Case("multi-dp", 3, reduce="last", optimizer=CASES["momentum"]),
    "replicas sum early": Case("interleaved-1f1b", 4, chunks=2, replicas=2, reduce="last", steps=2),
    "reads one version": Case("pipedream", 3, rule="vertical-sync", optimizer=CASES["momentum"], steps=6),
}


@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
def test_an_option_of_a_schedule_is_replayed_and_changes_the_run(case: Case) -> None:
    prepared, measured, _ = replayed(case)
    without = case.but(prefetch=0, reduce=None, rule=None)
    plan = prepare(known(without)).plan
    changed = (memory.simulated_memory(plan).shape != measured.shape) or (
        memory.simulated_memory(plan) != measured
    ).any()
    starts = prepared.plan.slots[0], plan.slots[0]
    assert changed or not np.array_equal(*starts)
    told = [] if "rule" in case.options else [REPLAYED]  # a rule has its own column
    assert list(describe_options(case).values()) == told


def test_vertical_sync_reads_in_all_stages_what_the_first_one_had() -> None:
    """The first of three stages has seen none of the last two micro-batches' updates: a lag of two everywhere."""
    case = Case("pipedream", 3, steps=6, rule="vertical-sync", optimizer=CASES["momentum"])
    _, _, found = replayed(case)
    lags = np.full((1, 3), 2)
    for stage, theta in enumerate(evaluate(make_training("mlp", 3), case.optimizer, lags, 6)):
        assert np.array_equal(found[stage], theta.numpy())


# Optimizers and types


def hand_trained(
    training: Training, step: Callable[[list[Tensor], list[Tensor]], None], steps: int = 3
) -> list[Tensor]:
    """Train all stages in one piece on two micro-batches a step; `step` changes parameters by their gradients."""
    net = nn.Sequential(*deepcopy(training.stages))
    parameters = list(net.parameters())
    for t in range(steps):
        sums: list[Tensor] = []
        for i in range(2):
            x, target = training.data(t, i)
            with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast is not None):
                loss = ((net(x) - target) ** 2).mean() / 2
            found = list(torch.autograd.grad(loss, parameters))
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        step([parameter.data for parameter in parameters], sums)
    return [flatten(stage.parameters()) for stage in net]


def stepping(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Callable[..., None]:
    """Return a step of torch's own optimizer over copies of the parameters in a type."""
    made: list[tuple[list[nn.Parameter], torch.optim.Optimizer]] = []

    def step(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not made:
            copies = [nn.Parameter(each.to(dtype, copy=True)) for each in parameters]
            made.append((copies, kind(copies, lr=0.01)))
        copies, optimizer = made[0]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.to(dtype)
        optimizer.step()
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.copy_(copy)

    return step


TRAINED = {
    "adafactor": ("float64", torch.optim.Adafactor, "float64", None),
    "adafactor in bfloat16": ("bfloat16", torch.optim.Adafactor, "bfloat16", None),
    "mixed precision": ("bfloat16", torch.optim.Adam, "float32", None),
    "mixed precision with adafactor": ("float16", torch.optim.Adafactor, "float32", None),
    "autocast": ("float32", torch.optim.Adam, "float32", "bf16"),
}


@pytest.mark.parametrize(("dtype", "kind", "wide", "autocast"), TRAINED.values(), ids=TRAINED)
def test_it_trains_as_torch_does(
    dtype: str, kind: type[torch.optim.Optimizer], wide: str, autocast: str | None
) -> None:
    """To the last bit: with torch's own optimizer of the tensors, of their copies in float32, under its autocast."""
    optimizer = replace(OPTIMIZERS[kind.__name__.lower()], mixed_precision=wide != dtype)
    case = Case("single-dp", 2, steps=3, dtype=dtype, optimizer=optimizer, autocast=autocast, model="transformer")
    training = case.trains.training("cpu")
    _, _, found = replayed(case)
    for stage, theta in enumerate(hand_trained(training, stepping(kind, getattr(torch, wide)))):
        assert np.array_equal(found[stage], theta.to(torch.promote_types(theta.dtype, torch.float32)).numpy())


NUMBERS = (16 * 32 + 32) + (32 * 16 + 16)  # of a perceptron of width 16
SUMS = (16 + 32) + 32 + (32 + 16) + 16  # of its rows and columns, its biases as they are
STATES = {  # bytes of parameters, of gradients, and of the optimizer, which counts steps in four of them
    "adafactor": (Case("single-dp", 1, optimizer=OPTIMIZERS["adafactor"]), 8, 8, 8 * SUMS + 4),
    "bfloat16": (Case("single-dp", 1, dtype="bfloat16", optimizer=CASES["momentum"]), 2, 2, 2 * NUMBERS),
    "mixed sgd": (
        Case("single-dp", 1, dtype="float16", optimizer=replace(CASES["sgd"], mixed_precision=True)),
        2,
        2,
        4 * NUMBERS,
    ),
    "sixteen bytes a parameter": (Case("single-dp", 1, dtype="bfloat16", optimizer=MIXED), 2, 2, 12 * NUMBERS + 4),
    "mixed adafactor": (
        Case("single-dp", 1, dtype="bfloat16", optimizer=replace(OPTIMIZERS["adafactor"], mixed_precision=True)),
        2,
        2,
        4 * (NUMBERS + SUMS) + 4,
    ),
}


@pytest.mark.parametrize(("case", "parameters", "gradients", "state"), STATES.values(), ids=STATES)
def test_states_weigh_what_their_forms_come_to(case: Case, parameters: int, gradients: int, state: int) -> None:
    """Measured on the only device of one stage; and as cdpsim's recipe says, which counts no steps."""
    _, measured, _ = replayed(replace(case, steps=2))
    peaks = measured[0].max(axis=0)
    assert peaks[Category.PARAMETERS] == parameters * NUMBERS
    assert peaks[Category.GRADIENTS] == gradients * NUMBERS
    assert peaks[Category.OPTIMIZER] == state
    optimizer, precision = case.optimizer, {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}[case.dtype]
    bare = known(replace(case, optimizer=OPTIMIZERS["sgd"], stages=None)).stages
    assert bare is not None
    name = "momentum" if optimizer.options.get("momentum") else optimizer.kind
    recipe = Recipe(optimizer=name, mixed_precision=optimizer.mixed_precision)
    counted = apply_recipe(type(bare)(stages=bare.stages, precision=precision), recipe).stages[0].optimizer
    assert counted == state - 4 * (name in ("adam", "adafactor"))


TYPED = {
    "state travels": Case("zero-cdp", 3, optimizer=OPTIMIZERS["adafactor"], model="transformer"),
    "state travels mixed": Case("zero-cdp", 3, dtype="bfloat16", optimizer=MIXED),
    "state moves on": Case("multi-cdp", 2, dtype="float16", optimizer=MIXED, model="transformer"),
    "owned": Case("zero-dp", 2, dtype="bfloat16", optimizer=replace(OPTIMIZERS["adafactor"], mixed_precision=True)),
    "split": Case("zb-h1", 3, dtype="bfloat16", optimizer=CASES["momentum"]),
    "autocast": Case("pp-cdp", 3, dtype="float32", autocast="bf16", model="transformer", optimizer=CASES["adam"]),
    "autocast split": Case("zb-h1", 2, dtype="float32", autocast="fp16", model="transformer"),
}


@pytest.mark.parametrize("case", TYPED.values(), ids=TYPED)
def test_types_and_optimizers_are_replayed_by_any_schedule(case: Case) -> None:
    replayed(replace(case, steps=3))


def test_autocast_keeps_a_cast_of_each_weight_for_the_backward() -> None:
    """Of the second stage's two matrices, in two bytes a number, beside what it keeps of two bytes instead of four.

    It keeps casts of both inputs of its products, of both biases none, both results of tanh; the input is of two bytes.
    """
    plain, cast = (stages_of(Case("gpipe", 3, dtype="float32", autocast=kind))[1] for kind in (None, "bf16"))
    batch = 4
    kept = batch * (16 + 32 + 16)  # its input, the results of both tanh
    assert plain.activation == 4 * kept
    assert cast.activation == 2 * kept + 2 * (2 * 16 * 32)


def test_additions_in_any_order_stay_within_the_bound() -> None:
    """Of eight random gradients in either type, an update a step, forwards and backwards in order."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        there = back = torch.rand(1000, generator=draw).to(dtype)
        for _ in range(3):
            gradients = [(torch.randn(1000, generator=draw) / 8).to(dtype) for _ in range(8)]
            there, back = there - reduce(add, gradients), back - reduce(add, gradients[::-1])
        apart = float((there.float() - back.float()).abs().max())
        assert 0 < apart <= rounding_bound(dtype, 3, 8, float(there.abs().max()))


# Recomputation and offload


CHANGED = {
    "mlp": Case("zero-cdp", 3, recompute="full"),
    "several layers": Case("1f1b", 2, recompute="full", sizes=(("layers", 3),), dtype="float32"),
    "segments": Case("1f1b", 2, recompute="sqrt", sizes=(("layers", 4),)),
    "segments of unlike length": Case("multi-dp", 2, recompute="sqrt", sizes=(("layers", 5),)),
    "with autocast": Case(
        "pp-cdp", 2, recompute="sqrt", sizes=(("layers", 2),), model="transformer", dtype="float32", autocast="bf16"
    ),
    "on the host": Case("zero-cdp", 3, offload="all", optimizer=CASES["momentum"], model="transformer"),
    "updated in turn on hosts": Case("multi-cdp", 3, offload="optimizer", dtype="bfloat16", optimizer=MIXED),
    "updated by each host": Case("multi-dp", 2, offload="optimizer", optimizer=OPTIMIZERS["adafactor"]),
    "inputs on the host": Case("1f1b", 2, recompute="sqrt", offload="activations", sizes=(("layers", 3),)),
    "in mixed precision": Case("multi-cdp", 2, recompute="full", dtype="bfloat16", optimizer=MIXED),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED)
def test_what_is_computed_again_or_comes_back_changes_no_bit_of_the_result(case: Case) -> None:
    case = replace(case, steps=2)
    _, _, again = replayed(replayable(case))
    _, _, kept = replayed(replace(case, recompute="none", offload="none"))
    assert all(np.array_equal(again[stage], theta) for stage, theta in kept.items())


@pytest.mark.parametrize(
    ("how", "offload", "segments"),
    [("none", "none", None), ("full", "none", 1), ("sqrt", "none", 2), ("none", "activations", 0), ("sqrt", "all", 0)],
)
def test_a_stage_keeps_the_inputs_of_its_segments(how: str, offload: str, segments: int | None) -> None:
    """Of four micro-batches that gpipe's first device has sent on, while it waits for the first to come back.

    Or nothing of them, where it keeps stashes on its host.
    """
    case = Case(
        "gpipe", 2, m=4, steps=1, recompute=how, offload=offload, sizes=(("layers", 4),), optimizer=CASES["adam"]
    )
    case = replayable(case)
    _, measured, _ = replayed(case)
    assert measured.shape[1] > 4
    held = int(measured[0, 4, Category.ACTIVATIONS])  # the slot after its four forwards
    per_layer = 4 * (32 + 16) * 8  # results of two tanh, of which the second is the next layer's input
    assert held == 4 * (4 * 16 * 8 + 4 * per_layer if segments is None else 4 * 16 * 8 * segments)
    assert (measured[:, :, Category.OPTIMIZER].max() == 0) == (offload == "all")


# Reports


NOT_REPLAYED = {
    "recompute of a split backward": (Case("zb-h1", 2, recompute="full"), "recompute", "splits backwards"),
    "recompute of newer parameters": (Case("pipemare", 2, recompute="sqrt"), "recompute", "read newer parameters"),
    "autocast of newer parameters": (
        Case("pipemare", 2, autocast="bf16", dtype="float32"),
        "autocast",
        "the graph keeps casts",
    ),
    "stashes of a split backward": (Case("zb-h1", 2, offload="activations"), "offload", "cross four times"),
    "all but stashes": (Case("zb-h1", 2, offload="all", optimizer=CASES["adam"]), "offload", "cross four times"),
}


@pytest.mark.parametrize(("case", "option", "why"), NOT_REPLAYED.values(), ids=NOT_REPLAYED)
def test_an_option_that_cannot_be_replayed_is_left_out_with_its_reason(case: Case, option: str, why: str) -> None:
    """The rest is replayed; the request is recorded as it was made."""
    left = replayable(case)
    assert why in describe_options(left)[option]
    assert recorded_options(left) == recorded_options(case)
    assert replayable(left) == left
    replayed(replace(left, steps=2))


def test_hosts_of_ranks_share_no_state() -> None:
    """Where devices update a stage in turn; elsewhere each has its states to itself, in one process or by ranks."""
    for schedule, is_left_out in (("zero-cdp", True), ("multi-cdp", True), ("multi-dp", False), ("pp-cdp", False)):
        case = Case(schedule, 2, offload="all", optimizer=CASES["adam"])
        left = replayable(case, alone=False)
        assert (left.offload, left.optimizer.on_host) == (("activations", False) if is_left_out else ("all", True))
        why = "devices update a stage in turn, and hosts of ranks do not share its optimizer state"
        assert describe_options(left) == {
            "offload": f"only activations replayed, as {why}" if is_left_out else REPLAYED
        }
        assert replayable(case).offload == "all"
