"""The equation against plain training, and the small pieces that equation and replay share."""

from typing import cast

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from cdpsim.schedules import TABLE_1
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import CDP_V1, CDP_V2, DP
from tests.validation.cases import OPTIMIZERS, every_model, every_optimizer
from tests.validation.known import known
from validation.replay.case import Case, prepare
from validation.replay.equation import evaluate, grouping_of
from validation.training.forms import Form, flatten, pack, packed, unpack
from validation.training.models import make_training
from validation.training.optimizer import Optimizer


@every_optimizer
@every_model
def test_dp_is_ordinary_training_on_the_whole_mini_batch(model: str, optimizer: Optimizer) -> None:
    n, steps = 3, 3
    training, plain = (make_training(model, n) for _ in range(2))
    whole = nn.Sequential(*plain.stages)
    torchs = optimizer.over(list(whole.parameters()))
    for t in range(steps):
        x, target = (torch.cat(parts) for parts in zip(*(plain.data(t, i) for i in range(n)), strict=True))
        torchs.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(whole(x), target))
        torchs.step()
    found = evaluate(training, optimizer, DP.lags(Shape(n, n)), steps)
    for stage, parameters in zip(plain.stages, found, strict=True):
        assert torch.allclose(flatten(stage.parameters()), parameters, rtol=0, atol=1e-12)


def test_v1_takes_its_second_gradient_where_it_took_the_first() -> None:
    """theta_2 = theta_1 - lr * gradient at theta_0 of the second step's data, written out for one stage."""
    training = make_training("mlp", 1)
    stage = training.stages[0]
    theta = flatten(stage.parameters())
    for t in range(2):
        x, target = training.data(t, 0)
        theta = theta - 0.1 * flatten(torch.autograd.grad(training.loss(stage(x), target, 1), list(stage.parameters())))
    (found,) = evaluate(training, OPTIMIZERS["sgd"], CDP_V1.lags(Shape(1, 1)), 2)
    assert torch.allclose(found, theta, rtol=0, atol=1e-15)


@every_model
def test_rules_differ(model: str) -> None:
    """Otherwise a replay that reads the wrong version would go unnoticed."""
    ends = [
        torch.cat(evaluate(make_training(model, 3), OPTIMIZERS["sgd"], rule.lags(Shape(3, 3)), 4))
        for rule in (DP, CDP_V1, CDP_V2)
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (ends[a] - ends[b]).abs().max() > 1e-6


def test_order_of_addition_moves_the_last_bits_and_no_more() -> None:
    """The grouping is worth its trouble: two of them differ, by rounding."""
    lags = DP.lags(Shape(4, 4))
    one_by_one = torch.cat(evaluate(make_training("mlp", 4), OPTIMIZERS["sgd"], lags, 4))
    in_pairs = evaluate(make_training("mlp", 4), OPTIMIZERS["sgd"], lags, 4, lambda of, j: [[0, 1], [2, 3]])
    assert 0 < (one_by_one - torch.cat(in_pairs)).abs().max() < 1e-12


def test_grouping_follows_devices() -> None:
    """Of the pyramid's stage 1 at n = 3, one device has micro-batches 0 and 2 in step 0, and 1 in step 1."""
    pyramid = grouping_of(prepare(Case("mp-cdp", 3)).plan.program)
    assert [pyramid(range(1), j) for j in range(3)] == [[[0], [1], [2]], [[1], [0, 2]], [[0, 1, 2]]]
    assert pyramid(range(1, 2), 1) == [[1], [0, 2]]
    for name in TABLE_1:
        groups = cast(list[list[int]], grouping_of(prepare(known(Case(name, 3))).plan.program)(range(1), 0))
        assert sorted(i for group in groups for i in group) == [0, 1, 2]


@every_optimizer
def test_an_optimizer_as_a_function_is_torchs_own(optimizer: Optimizer) -> None:
    """From zeros on, as many updates as one likes."""
    form = Form((5,), torch.float64)
    theta = torch.linspace(-1, 1, 5, dtype=form.dtype)
    state = optimizer.state(theta, [form])
    parameter = nn.Parameter(theta.clone())
    torchs = optimizer.over([parameter])
    for k in range(4):
        gradient = torch.sin(theta + k)
        theta, before = optimizer.update(theta, gradient, state, [form]), theta
        assert not torch.equal(theta, before)
        parameter.grad = gradient.clone()
        torchs.step()
        assert torch.equal(theta, parameter)
    kept = [value for value in torchs.state[parameter].values() if value is not None]
    assert optimizer.nbytes([form]) == sum(value.nbytes for value in kept)


def test_adamw_decays_weights_apart_from_the_moments() -> None:
    """Algorithm 2 of Loshchilov & Hutter 2019, written out, in float64."""
    lr, decay, beta1, beta2 = 0.01, 0.1, 0.9, 0.999
    theta, first, second = (torch.tensor(pair, dtype=torch.float64) for pair in ([1.0, -2.0], [0.0, 0.0], [0.0, 0.0]))
    parts = [Form((2,), torch.float64)]
    optimizer = Optimizer("adamw", {"lr": lr, "weight_decay": decay})
    found, state = theta, optimizer.state(theta, parts)
    for t in range(1, 4):
        gradient = torch.tensor([0.5 * t, -1.0], dtype=torch.float64)
        found = optimizer.update(found, gradient, state, parts)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        step = first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + 1e-8)
        theta = theta - lr * step - lr * decay * theta
        torch.testing.assert_close(found, theta, rtol=1e-14, atol=0)


def test_what_is_packed_comes_out_the_same() -> None:
    """Several types in one message, each with a storage of its own afterwards."""
    tensors = [torch.tensor(3.0), torch.arange(6, dtype=torch.float64).reshape(2, 3), torch.ones(3)]
    forms = [Form(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    one = pack(tensors)
    assert packed(forms) == Form(tuple(one.shape), one.dtype)
    found = unpack(one, forms)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in [one, *found]}) == 4


def test_data_are_the_same_wherever_they_are_drawn() -> None:
    """And others for each step, micro-batch and seed."""
    draws = [make_training("mlp", 1, seed=s).data(t, i)[0] for s, t, i in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert torch.equal(draws[0], make_training("mlp", 2).data(0, 0)[0])
    assert len({float(draw.sum()) for draw in draws}) == 4
    assert np.isfinite([float(draw.sum()) for draw in draws]).all()
