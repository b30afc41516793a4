"""Backwards in two parts that go through a stage once: their memory by hand, by torch's own, and by its allocator."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from cdpsim import simulate
from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.request.sharing import accepts
from cdpsim.schedules import SCHEDULES
from tests.validation.cases import OPTIMIZERS
from tests.validation.networks import of_layers, vectors
from validation.profile.allocations import Allocations
from validation.profile.division import find_parts
from validation.profile.footprints import profile_stages, with_unit_times
from validation.profile.tracker import Tracker, is_alive, storage_of
from validation.training.models import make_training
from validation.training.passes import backward, backward_for_input, backward_for_weights, forward
from validation.training.stages import Training

BATCH, LENGTH, WIDTH, HEADS = 2, 16, 64, 4  # of the transformer


def transformer(n: int, dtype: torch.dtype = torch.float32) -> Training:
    sizes = {"batch": BATCH, "length": LENGTH, "width": WIDTH, "heads": HEADS}
    return make_training("transformer", n, dtype=dtype, **sizes)  # type: ignore[arg-type]


# By hand


def test_weights_of_a_perceptron_need_inputs_of_products_and_gradients_of_their_outputs() -> None:
    """Of 4 samples, 8 bytes a number: inputs of 16 and 32 numbers, gradients of 32 and 16.

    The last tanh's output is not among them, nor the gradient that comes to it.
    """
    first, between, last = profile_stages(make_training("mlp", 3, batch=4), OPTIMIZERS["sgd"]).stages
    for stage in (between, last):
        assert stage.weight_activation == 8 * 4 * (16 + 32 + 32 + 16)
        assert (stage.weight_input, stage.weight_output) == (8 * 4 * 16, 0)
    assert first.weight_activation is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_transformers_layer_need_what_the_zero_bubble_paper_counts(dtype: torch.dtype) -> None:
    """In two bytes a number, W of a layer needs 32 sbh bytes there (Qi et al. 2024, table 1): 16 times its input.

    They are 7 inputs (1 of queries, keys and values, 1 of the product behind attention, 1 and 4 of the perceptron) and
    9 gradients of outputs (3, 1, 4 and 1). Gradients of norms' weights and biases are made before, and are vectors. Of
    a forward's 34 sbh + 5 abs², 2 sbh are masks of dropouts, which this layer does not have, and 5 abs² the scores of
    attention, in whose place are sums of rows; and there are two numbers for each row that a norm has.
    """
    stage = profile_stages(transformer(3, dtype), OPTIMIZERS["sgd"]).stages[1]
    boundary, number = BATCH * LENGTH * WIDTH * dtype.itemsize, dtype.itemsize
    assert stage.boundary == boundary
    assert stage.weight_activation == 16 * boundary + 2 * 2 * WIDTH * number
    assert (stage.weight_input, stage.weight_output) == (0, boundary)
    sums = 4 * BATCH * HEADS * LENGTH
    norms = stage.activation - 16 * boundary - sums
    assert norms in (2 * 2 * BATCH * LENGTH * kept for kept in (number, 4))


def test_gradients_that_torch_keeps_are_those_of_all_layers_with_parameters() -> None:
    """Three of queries, keys and values, one behind attention, four inside, two of norms; 11 where the loss is.

    A pass through a layer thus takes 12 times its boundary at the most, 13 where the loss is (measured).
    """
    between, last = profile_stages(transformer(3), OPTIMIZERS["sgd"]).stages[1:]
    boundary = between.boundary
    assert [stage.retained_gradients for stage in (between, last)] == [10 * boundary, 11 * boundary]
    assert between.retained_input_transient == 12 * boundary
    assert last.retained_input_transient == 13 * boundary + 4


# Against torch

MEASURED = {  # by the allocator's events on four ranks, eight micro-batches: activations, gradients, messages
    "interleaved-zero-bubble": (102_912_000, 110_776_320, 116_543_488, 124_407_844),
    "zbv": (101_863_448, 102_912_000, 113_364_992, 123_867_136),
    "dualpipev": (102_919_188, 107_123_712, 108_172_288, 102_929_408),
}


@pytest.fixture(scope="module")
def eight() -> Model:
    """A transformer of width 256 in eight stages."""
    training = make_training("transformer", 8, batch=8, dtype=torch.float32, width=256, length=64, heads=4)
    return with_unit_times(profile_stages(training, OPTIMIZERS["sgd"]), split=True)


@pytest.mark.parametrize("schedule", MEASURED)
def test_torchs_own_pipelines_hold_what_is_simulated(schedule: str, eight: Model) -> None:
    """To 32 bytes, which are eight losses; and not if first parts let go of what they alone need."""
    chunks = {"chunks": 2} if accepts(SCHEDULES[schedule], "chunks") else {}
    asked: dict[str, Any] = {"n": 8, "m": 8, "steps": 2, "model": eight, **chunks}
    torchs, others = (
        simulate(schedule, runtime=runtime, **asked).peaks[:, -1] - 2 * eight.stages[0].parameters
        for runtime in ("torch", "torch:split_backward=freed")
    )
    assert np.abs(torchs - MEASURED[schedule]).max() <= 32
    assert np.abs(others - MEASURED[schedule]).max() > 10**6


@pytest.mark.parametrize(
    "build",
    [lambda: transformer(3), lambda: make_training("mlp", 3, batch=3, dtype=torch.float32, width=24)],
    ids=["transformer", "mlp"],
)
def test_torchs_own_parts_hold_what_is_profiled(build: Callable[[], Training]) -> None:
    """By live storages while torch's own functions run, which add to the gradients of a pass before.

    A pipeline has input and output until the second part is over, in which two groups' gradients are there at a time.
    """
    training = build()
    stage, module = profile_stages(training, OPTIMIZERS["sgd"]).stages[1], training.stages[1]
    x, above = (torch.randn(training.boundary(j).shape) for j in (0, 1))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = Tracker()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    tracker.ignore([*module.parameters(), *gradients, x, above])
    with tracker:
        given = x.detach().requires_grad_()
        output = module(given)
        before = tracker.level
        groups = stage_backward_input([output], [above], [given], module.parameters())[1]
        assert tracker.peak - before == stage.retained_input_transient
        given.grad = None
        between = tracker.level
        assert between - before == stage.retained_gradients
        tracker.reset_peak()
        stage_backward_weight(module.parameters(), groups)
    assert tracker.peak - between == stage.retained_weight_transient


PERCEPTRONS = {  # by the allocator's events on two ranks, four micro-batches of 16: an MLP of width 64 in four stages
    "interleaved-zero-bubble": (346_368, 370_960),
    "zbv": (342_288, 350_464),
    "dualpipev": (321_296, 329_984),
}


@pytest.mark.parametrize("schedule", PERCEPTRONS)
def test_torchs_own_pipelines_of_perceptrons_do_so_too(schedule: str) -> None:
    """Whose stages keep their outputs for their backwards; to 16 bytes, which are four losses."""
    training = make_training("mlp", 4, batch=16, dtype=torch.float32, width=64)
    model = with_unit_times(profile_stages(training, OPTIMIZERS["sgd"]), split=True)
    chunks = {"chunks": 2} if accepts(SCHEDULES[schedule], "chunks") else {}
    asked: dict[str, Any] = {"n": 4, "m": 4, "steps": 2, "model": model, **chunks}
    peaks = simulate(schedule, runtime="torch", **asked).peaks[:, -1] - 2 * model.stages[0].parameters
    assert np.abs(peaks - PERCEPTRONS[schedule]).max() <= 16


def test_it_is_torchs_own_split_backward() -> None:
    """The same gradients bit for bit, and the gradients that torch keeps for the second part weigh as much."""
    training = transformer(3)
    module = training.stages[1]
    x = torch.randn(training.boundary(0).shape, requires_grad=True)
    y, above = module(x), torch.randn(training.boundary(1).shape)
    weights = list(module.parameters())
    (below,), groups = stage_backward_input([y], [above], [x], iter(weights))
    kept = [own for group in groups for grads in group["grads"] for own in grads if own is not None]
    storages = {own.untyped_storage()._cdata: own.untyped_storage().nbytes() for own in kept}
    retained = sum(storages.values()) - above.nbytes * (above.untyped_storage()._cdata in storages)
    stage_backward_weight(iter(weights), groups)
    assert retained == profile_stages(training, OPTIMIZERS["sgd"]).stages[1].retained_gradients
    theta, gradient = vectors(training, 1)
    _, own_pass = forward(training, 1, theta, x.detach(), None, 1)
    mine, rest = backward_for_input(own_pass, theta, above, find_parts(training, 1))
    backward_for_weights(training, rest, theta, gradient)
    assert mine is not None
    assert below is not None
    assert torch.equal(mine, below)
    assert torch.equal(gradient, torch.cat([weight.grad.reshape(-1) for weight in weights if weight.grad is not None]))


@pytest.mark.parametrize("build", [lambda: transformer(3), lambda: make_training("mlp", 3)], ids=["transformer", "mlp"])
def test_the_allocator_has_as_much_between_the_parts(build: Callable[[], Training]) -> None:
    """By torch's own events, which know no storages: what is left, and nothing after the second part."""
    training = build()
    (stage,) = profile_stages(training, OPTIMIZERS["sgd"]).stages[1:2]
    parts = find_parts(training, 1)
    theta, gradient = vectors(training, 1)
    for _ in range(2):  # the first time, torch makes things that it keeps
        with Allocations() as record:
            x, above = (torch.zeros(training.boundary(j).shape, dtype=theta.dtype) for j in (0, 1))
            y, kept = forward(training, 1, theta, x, None, 1)
            del x, y
            middle = record.now()
            below, rest = backward_for_input(kept, theta, above, parts)
            del below, above, kept
            between = record.now()
            backward_for_weights(training, rest, theta, gradient)
            del rest
            end = record.now()
    assert stage.input_transient is not None
    assert stage.weight_transient is not None
    assert record.at(middle) == stage.activation + stage.boundary
    assert record.at(between) == stage.weight_activation
    assert record.peak(middle, between) == stage.activation + stage.boundary + stage.input_transient
    assert record.peak(between, end) == record.at(between) + stage.weight_transient
    assert record.at(end) == 0


# Of any layer


class Doubled(nn.Module):
    """Multiplies by weights that it makes of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (2 * self.weight)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        return above * ctx.saved_tensors[0] + above * ctx.saved_tensors[0]


class Own(nn.Module):
    """Has an operation of its own, which asks for what it saved more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = _Square.apply(self.linear(x))
        return squared


class Added(nn.Module):
    """Adds a parameter to its input, whose gradient is then that of its sum; and multiplies twice by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x + self.place) @ self.weight) @ self.weight


@pytest.mark.parametrize("layer", [Doubled, Own, Added])
def test_parts_do_what_a_whole_backward_does(layer: Callable[[], nn.Module]) -> None:
    """Bit for bit, whatever operations a layer has."""
    training = of_layers(nn.Linear(4, 4), layer(), nn.Linear(4, 4))
    theta, one = vectors(training, 1)
    other, above = one.clone(), torch.randn(2, 4).double()
    passes = [forward(training, 1, theta, torch.ones(2, 4).double(), None, 1)[1] for _ in range(2)]
    whole = backward(training, passes[0], theta, above, one)
    below, rest = backward_for_input(passes[1], theta, above, find_parts(training, 1))
    assert whole is not None
    assert below is not None
    assert torch.equal(whole, below)
    kept, seen = below.clone(), storage_of(below)
    backward_for_weights(training, rest, theta, other)
    assert torch.equal(one, other)
    assert torch.equal(below, kept)  # it is not among what the second part has added to
    del below
    assert not is_alive(seen)


def test_weights_made_of_parameters_are_not_kept_for_the_second_part() -> None:
    """It needs the input and the gradient of the output, of 2 x 4 numbers, not the 4 x 4 that the product has saved."""
    stage = profile_stages(of_layers(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)), OPTIMIZERS["sgd"]).stages[1]
    assert stage.activation == 8 * (2 * 4 + 4 * 4)
    assert stage.weight_activation == 8 * (2 * 4 + 2 * 4)
    assert (stage.weight_input, stage.weight_output) == (8 * 2 * 4, 8 * 2 * 4)


def test_a_pass_that_saves_other_tensors_is_refused() -> None:
    training = transformer(3)
    theta, _ = vectors(training, 1)
    _, kept = forward(training, 1, theta, torch.zeros(training.boundary(0).shape), None, 1)
    parts = find_parts(training, 1)
    with pytest.raises(RequestError, match=r"stage 1: saves other tensors .* take --split twice"):
        backward_for_input(kept, theta, None, parts._replace(saved=parts.saved[1:]))
