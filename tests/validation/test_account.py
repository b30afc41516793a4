"""The allocator's account of a replay: equal to simulated bytes and named remainders in all that happens."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cdpsim.cluster import Workspace
from cdpsim.program import Kind
from tests.validation.cases import OPTIMIZERS, every_schedule
from tests.validation.known import known
from tests.validation.networks import images
from validation.comparison.account import compare_accounts, is_accounted
from validation.comparison.remainders import update_bytes
from validation.profile.allocations import Allocations
from validation.profile.workspaces import find_workspaces, workspaces_of_stages
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, play_in_process, prepare
from validation.report.schema import AllocatorComparison
from validation.training.forms import Form
from validation.training.models import MODELS, make_training
from validation.training.optimizer import Optimizer
from validation.training.passes import Split
from validation.training.stages import Architecture, Draw, cut, mean_square

SCALARS = 64  # bytes, of numbers that torch makes tensors of


def accounted(case: Case, ranks: Ranks | None = None) -> AllocatorComparison:
    """Return the accounts of a case, of one process or of ranks."""
    prepared = prepare(replace(known(case), watch="account"))
    return compare_accounts(prepared, ranks.run(prepared.case) if ranks else play_in_process(prepared))


@every_schedule
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_every_byte_of_a_process_has_a_name(schedule: str, optimizer: str) -> None:
    found = accounted(Case(schedule, 3, steps=2, optimizer=OPTIMIZERS[optimizer]))
    (process,) = found.processes
    assert is_accounted(found)
    assert (found.tolerance, found.tolerance_bytes) == (0.0, SCALARS)
    assert process.explained_bytes == process.simulated_bytes + sum(each.size for each in process.remainders)
    assert abs(process.explained_bytes - process.measured_bytes) <= process.largest_difference <= SCALARS


@pytest.mark.parametrize(("schedule", "split"), [("single-dp", "once"), ("zb-h2", "once"), ("zb-h2", "twice")])
def test_a_loss_keeps_what_it_is_divided_by(schedule: str, split: Split) -> None:
    """A number of eight bytes for each micro-batch, as long as its graph."""
    (process,) = accounted(Case(schedule, 9 if schedule == "single-dp" else 3, steps=1, split=split)).processes
    assert process.largest_difference <= 8
    if schedule == "single-dp":
        sizes = {each.name: each.size for each in process.remainders}
        assert sizes["numbers in graphs"] == 8 * 8  # of all micro-batches but the one that is at work
    loss = torch.zeros(1, requires_grad=True).sum() / 9
    assert loss.grad_fn._saved_other.nbytes == 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


@pytest.mark.parametrize("schedule", ["multi-dp", "multi-cdp", "zero-dp", "zero-cdp", "1f1b"])
def test_so_has_every_byte_of_a_rank(schedule: str, ranks: Ranks) -> None:
    found = accounted(Case(schedule, 2, steps=2, optimizer=OPTIMIZERS["momentum"], model="transformer"), ranks)
    assert [process.device for process in found.processes] == [0, 1]
    assert is_accounted(found)
    assert max(process.largest_difference for process in found.processes) <= SCALARS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("pp-cdp", {"model": "transformer", "dtype": "bfloat16"}),
        ("1f1b", {"model": "transformer", "dtype": "float32", "autocast": "bf16", "offload": "activations"}),
        ("zb-h1", {"model": "images"}),
        ("multi-cdp", {"model": "images", "dtype": "bfloat16"}),
        ("gpipe", {"model": "resnet-mini", "dtype": "float32", "autocast": "bf16"}),
    ],
)
def test_workspaces_of_kernels_have_a_name(schedule: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products of two-byte types, and of convolutions: every byte is explained, a ResNet's under autocast too."""
    if how["model"] == "resnet-mini":
        pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, "images", images)
    found = accounted(Case(schedule, 2, steps=2, batch=8, optimizer=OPTIMIZERS["momentum"], **how))
    assert (found.tolerance, found.tolerance_bytes) == (0.0, SCALARS)
    assert is_accounted(found)
    (process,) = found.processes
    assert {each.name: each.size for each in process.remainders}["workspaces of kernels"] > SCALARS


def test_a_convolution_in_float64_unfolds_its_images() -> None:
    """Into a column of all that a kernel sees for each place: torch's `slow_conv2d`."""
    batch, channels, kernel, side, double = 2, 3, 5, 8, 8
    data = Draw(Form((batch, channels, side, side), torch.float64))
    layers = [torch.nn.Conv2d(channels, channels, kernel, padding=kernel // 2).double() for _ in range(2)]
    first, _ = find_workspaces(cut(Architecture(layers, data, data, mean_square), [1]), splits=False)
    assert first[Kind.F].during == batch * channels * kernel**2 * side**2 * double


def test_a_cluster_file_says_what_each_stage_takes() -> None:
    """The same column in a forward, and in the weights' part of a backward; a first stage's has no other one.

    At the peak of the last stage, which has the loss, there may be none.
    """
    batch, channels, kernel, side, double = 2, 3, 5, 8, 8
    data = Draw(Form((batch, channels, side, side), torch.float64))
    layers = [torch.nn.Conv2d(channels, channels, kernel, padding=kernel // 2).double() for _ in range(2)]
    found = workspaces_of_stages(cut(Architecture(layers, data, data, mean_square), [1]))
    column = batch * channels * kernel**2 * side**2 * double
    assert [found[name][0] for name in ("forward", "backward", "weight_backward")] == [column] * 3
    assert {len(found[name]) for name in ("forward", "backward", "weight_backward")} == {2}
    assert found["input_backward"] == 0
    assert Workspace(**found).during(2, split=True)[1] == [0, 0]
    assert workspaces_of_stages(make_training("mlp", 2)) == {}


@pytest.mark.parametrize("splits", [False, True])
def test_products_of_wide_numbers_have_no_workspaces(splits: bool) -> None:
    found = find_workspaces(make_training("mlp", 2), splits=splits)
    assert [set(own) for own in found] == [{Kind.F, Kind.B, Kind.W} if splits else {Kind.F, Kind.B}] * 2
    assert max(size for own in found for pair in own.values() for size in pair) <= SCALARS


def test_a_travelling_state_is_packed_and_unpacked() -> None:
    """A stage's parameters and momentum, and perhaps its gradients or a second version, are there in one piece, too."""
    case = Case("zero-cdp", 2, steps=2, optimizer=OPTIMIZERS["momentum"])
    (process,) = accounted(case).processes
    sizes = {each.name: each.size for each in process.remainders}
    vector = prepare(known(case)).training.parameters(0).nbytes
    assert sizes["tensors packed to be sent"] % vector == 0
    assert sizes["tensors unpacked on arrival"] in (2 * vector, 3 * vector, 4 * vector)


@pytest.mark.parametrize(
    ("optimizer", "vectors"),
    [
        (Optimizer("sgd", {"lr": 0.1}), 1),  # the new parameters
        (Optimizer("sgd", {"lr": 0.1, "momentum": 0.9}), 1),  # changed in place
        (Optimizer("sgd", {"lr": 0.1, "weight_decay": 0.1}), 2),  # and gradient plus decayed parameters
        (Optimizer("adam", {"lr": 0.1}), 3),  # and the root of the second moment, and its quotient
    ],
)
def test_an_update_needs_so_many_vectors_more(optimizer: Optimizer, vectors: int) -> None:
    """By torch's formulas; the allocator says the same."""
    form = Form((1000,), torch.float64)
    assert update_bytes(optimizer, [form], torch.device("cpu")) == 8000 * vectors
    theta, gradient = (torch.zeros(form.shape, dtype=form.dtype) for _ in range(2))
    state = optimizer.state(theta, [form])
    with Allocations() as record:
        record.mark()
        optimizer.update(theta, gradient, state, [form])
    assert abs(record.peaks[0] - 8000 * vectors) <= SCALARS


def test_the_profiler_says_nothing_to_users(capfd: pytest.CaptureFixture[str]) -> None:
    """But what others write to the standard error meanwhile is there."""
    with Allocations():
        os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"
