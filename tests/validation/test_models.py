"""Models cut into stages: forms between them, data, losses, and what is refused."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cdpsim.errors import RequestError
from tests.validation.cases import every_model, rules_of
from tests.validation.networks import images, tokens
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.training.forms import Form
from validation.training.models import MODELS, even_cuts, make_training
from validation.training.stages import Architecture, Draw, cross_entropy, cut, mean_square

VECTOR = Draw(Form((6, 4), torch.float32))


@pytest.mark.parametrize("build", [tokens, images], ids=lambda build: build.__name__)
@pytest.mark.parametrize("schedule", ["multi-cdp", "pp-cdp", "mp-cdp", "zero-cdp", "single-cdp"])
def test_other_models_end_where_the_equation_does(
    build: Callable[..., Architecture], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers in, buffers, boundaries of their own: bit for bit as the built-in ones, and both rules differ."""
    monkeypatch.setitem(MODELS, "other", build)
    v1, v2 = (prepare(Case(schedule, 3, rule=rule, model="other")) for rule in rules_of(schedule))
    assert largest_difference(play_in_process(v1), expected_parameters(v1)) == 0
    assert largest_difference(play_in_process(v2), expected_parameters(v2)) == 0
    assert largest_difference(play_in_process(v2), expected_parameters(v1)) > 1e-6


@pytest.mark.parametrize("build", [tokens, images], ids=lambda build: build.__name__)
def test_boundaries_are_what_stages_give(build: Callable[..., Architecture]) -> None:
    training = cut(build(4, batch=3, dtype=torch.float32), [1, 3])
    x = training.input(0, 0)
    assert Form(tuple(x.shape), x.dtype) == training.inputs.form
    for j in range(training.n - 1):
        x = training.stages[j](x)
        assert Form(tuple(x.shape), x.dtype) == training.boundary(j)


@every_model
def test_sizes_are_the_models_own(model: str) -> None:
    """Twice as wide has about four times the parameters; two layers in a stage twice as many."""
    plain, wide, deep = (make_training(model, 2, width=w, layers=k) for w, k in ((32, 1), (64, 1), (32, 2)))
    assert 3.5 < wide.parameters(0).nbytes / plain.parameters(0).nbytes < 4.5
    assert deep.parameters(0).nbytes == 2 * plain.parameters(0).nbytes
    assert wide.boundary(0).nbytes == 2 * plain.boundary(0).nbytes
    assert len({plain.parameters(j) for j in range(2)}) == 1


def test_parameters_are_made_in_their_type() -> None:
    """Numbers that were rounded to float32 once would hide what differs beyond it."""
    (weight, *_) = make_training("mlp", 1, dtype=torch.float64).stages[0].parameters()
    assert not torch.equal(weight, weight.float().double())
    assert torch.get_default_dtype() == torch.float32


@given(st.integers(1, 50), st.integers(1, 50))
def test_even_cuts_differ_by_a_layer_at_most(layers: int, n: int) -> None:
    if layers < n:
        with pytest.raises(RequestError, match=f"n={n}: the model has {layers} layers, fewer than stages"):
            even_cuts(layers, n)
        return
    sizes = [end - first for first, end in pairwise([0, *even_cuts(layers, n), layers])]
    assert len(sizes) == n
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_draws_of_classes_are_below_them(classes: int, step: int, micro_batch: int) -> None:
    draw = Draw(Form((40,), torch.int64), classes)
    drawn = draw(0, step, micro_batch, 0)
    assert drawn.dtype == torch.int64
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < classes
    assert torch.equal(drawn, draw(0, step, micro_batch, 0))
    assert classes == 1 or not torch.equal(drawn, draw(0, step, micro_batch, 1))


def test_an_input_is_not_its_target() -> None:
    x, target = make_training("mlp", 1).data(0, 0)
    assert not torch.equal(x, target)


def test_cross_entropy_is_the_mean_over_samples_and_places() -> None:
    """Of equal scores for k classes it is log k; of one token at a time, the mean of all."""
    assert float(cross_entropy(torch.zeros(3, 5), torch.tensor([0, 4, 2]))) == pytest.approx(math.log(5))
    scores, target = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    single = [cross_entropy(scores[b : b + 1, t], target[b : b + 1, t]) for b in range(2) for t in range(3)]
    assert float(cross_entropy(scores, target)) == pytest.approx(float(torch.stack(single).mean()))


shared = nn.Linear(4, 4)
REFUSED = {
    "without parameters": ([nn.Linear(4, 4), nn.ReLU()], "stage 1: has no parameters"),
    "of two types": ([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())], "stage 0: has parameters of several"),
    "sharing": ([shared, nn.Sequential(nn.ReLU(), shared)], "stage 1: shares a parameter"),
    "that draw": ([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))], "stage 1: draws random numbers"),
    "with running statistics": (
        [nn.Linear(4, 4), nn.BatchNorm1d(4)],
        "stage 1: changes its buffer 0.(running_mean|num_batches_tracked) in a forward; switch running statistics off",
    ),
}


@pytest.mark.parametrize("layers, problem", REFUSED.values(), ids=REFUSED)
def test_stages_that_cannot_be_replayed_are_refused(layers: list[nn.Module], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        cut(Architecture(layers, VECTOR, VECTOR, mean_square), range(1, len(layers)))


@pytest.mark.parametrize("cuts", [[0], [2], [1, 1], [-1]])
def test_cuts_must_leave_each_stage_a_layer(cuts: list[int]) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(RequestError, match="must rise from 1 to at most 1"):
        cut(Architecture(layers, VECTOR, VECTOR, mean_square), cuts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="device cuda: torch finds no GPU here; use cpu"):
        make_training("mlp", 2, device="cuda")


def test_sizes_that_a_model_has_not_are_refused() -> None:
    with pytest.raises(RequestError, match=r"unknown size of mlp 'widht'; did you mean 'width'\?"):
        make_training("mlp", 2, widht=8)
    with pytest.raises(RequestError, match="width=0: must be at least 1"):
        make_training("mlp", 2, width=0)
    with pytest.raises(RequestError, match="heads=3: must divide the width, which is 16"):
        make_training("transformer", 2, heads=3)
