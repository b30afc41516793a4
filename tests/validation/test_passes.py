"""Forward and backward of one stage: gradients are added in place, and nothing lives longer than it must."""

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import DP
from tests.validation.cases import OPTIMIZERS, every_model
from tests.validation.networks import of_layers, vectors
from validation.profile.tracker import Tracker, is_alive, storage_of
from validation.replay.equation import evaluate
from validation.training.forms import flatten
from validation.training.models import make_training
from validation.training.passes import backward, backward_for_input, backward_for_weights, forward


@every_model
def test_all_stages_together_are_autograd_of_the_whole(model: str) -> None:
    """Bit for bit: two micro-batches one after another, through three stages forward and back."""
    n, m = 3, 2
    training = make_training(model, n)
    thetas, gradients = zip(*(vectors(training, j) for j in range(n)), strict=True)
    expected = [torch.zeros(()).double() for _ in range(n)]
    for i in range(m):
        x, target = training.data(0, i)
        values: Tensor | None = x
        passes = []
        for j in range(n):
            assert values is not None
            values, kept = forward(training, j, thetas[j], values, target if j == n - 1 else None, m)
            passes.append(kept)
        assert values is None
        for j in reversed(range(n)):
            values = backward(training, passes[j], thetas[j], values, gradients[j])
        assert values is None
        whole = nn.Sequential(*training.stages)
        loss = training.loss(whole(x), target, m)
        own = iter(torch.autograd.grad(loss, list(whole.parameters())))
        expected = [
            total + flatten(next(own) for _ in stage.parameters())
            for total, stage in zip(expected, training.stages, strict=True)
        ]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_gradient_as_large_as_a_stage_is_never_made() -> None:
    """With eight layers, what a backward allocates beside its pass is less than the stage's vector."""
    training = make_training("mlp", 2, batch=1, width=32, layers=8)
    theta, gradient = vectors(training, 0)
    x = training.input(0, 0)
    with Tracker() as tracker:
        tracker.ignore([theta, gradient])
        y, kept = forward(training, 0, theta, x, None, 1)
        assert y is not None
        tracker.reset_peak()
        before = tracker.level
        assert backward(training, kept, theta, torch.ones_like(y), gradient) is None
        assert tracker.peak - before < gradient.nbytes / 4
    assert gradient.abs().max() > 0


@every_model
def test_a_pass_keeps_neither_gradients_nor_what_was_sent(model: str) -> None:
    """The output of a perceptron is tanh's, which autograd needs; that of a transformer's block is a sum."""
    training = make_training(model, 2)
    theta, gradient = vectors(training, 0)
    y, kept = forward(training, 0, theta, training.input(0, 0), None, 1)
    assert y is not None
    sent, own, above = storage_of(y), storage_of(gradient), torch.ones_like(y)
    del y
    assert is_alive(sent) == (model == "mlp")
    backward(training, kept, theta, above, gradient)
    assert not is_alive(sent)
    del gradient
    assert not is_alive(own)


def test_the_gradient_of_an_input_is_handed_over() -> None:
    """The input does not keep it."""
    training = make_training("mlp", 2)
    theta, gradient = vectors(training, 1)
    _, kept = forward(training, 1, theta, training.input(0, 0), training.target(0, 0), 1)
    below = backward(training, kept, theta, None, gradient)
    assert below is not None
    reference = storage_of(below)
    del below
    assert not is_alive(reference)


class Partly(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_what_a_parameter_has_no_part_in_leaves_its_gradient() -> None:
    training = of_layers(Partly())
    theta, gradient = vectors(training, 0)
    _, kept = forward(training, 0, theta, training.input(0, 0), training.target(0, 0), 1)
    gradient += 1
    backward(training, kept, theta, None, gradient)
    assert (gradient[:3] == 1).all()
    assert (gradient[3:] != 1).all()
    (found,) = evaluate(training, OPTIMIZERS["sgd"], DP.lags(Shape(1, 1)), 1)
    assert torch.equal(found[:3], theta[:3])


class Twice(nn.Module):
    """Uses one parameter in two places, and another one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight + x


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_parts_of_a_backward_do_what_one_does(stage: int) -> None:
    """Bit for bit; parameters without a part in it keep their gradients; afterwards nothing of the pass is left."""
    training = of_layers(Twice(), Twice(), Twice())
    theta, gradient = vectors(training, stage)
    gradient += 1
    apart = gradient.clone()
    target = training.target(0, 0) if stage == 2 else None
    passes = [forward(training, stage, theta, training.input(0, 0), target, 1) for _ in range(2)]
    above = None if stage == 2 else torch.randn(2, 4).double()
    whole = backward(training, passes[0][1], theta, above, gradient)
    below, left = backward_for_input(passes[1][1], theta, above)
    assert (apart == 1).all()
    backward_for_weights(training, left, theta, apart)
    assert torch.equal(gradient, apart)
    assert (apart[:3] == 1).all()
    assert (apart[3:] != 1).all()
    assert whole is None if below is None else whole is not None and torch.equal(whole, below)
    assert (below is None) == (stage == 0)
    held = storage_of(apart)
    del apart
    assert not is_alive(held)


class Piece(nn.Module):
    """Gives the first half of what it computes, or the transpose."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T if self.transposed else torch.cat([x @ self.weight, x])[:2]


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_sent_fills_its_storage(transposed: bool) -> None:
    """Its gradient does, too, for every kind of stage."""
    training = of_layers(nn.Linear(4, 4), Piece(transposed), nn.Linear(4, 4))
    theta, gradient = vectors(training, 1)
    y, kept = forward(training, 1, theta, training.input(0, 0), None, 1)
    assert y is not None
    below = backward(training, kept, theta, torch.ones_like(y), gradient)
    assert below is not None
    for tensor in (y, below):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == 64


class Constant(nn.Module):
    """Does not look at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * 2


def test_a_stage_that_does_not_look_at_its_input_is_refused() -> None:
    training = of_layers(nn.Linear(4, 4), Constant())
    theta, gradient = vectors(training, 1)
    _, kept = forward(training, 1, theta, training.input(0, 0), training.target(0, 0), 1)
    with pytest.raises(RequestError, match="stage 1: does not depend on its input"):
        backward_for_input(kept, theta, None)
    with pytest.raises(RequestError, match="stage 1: does not depend on its input"):
        backward(training, kept, theta, None, gradient)
