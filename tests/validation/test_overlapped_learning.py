"""The learning of overlapped methods: replays and the equation against the papers' equations, and exact identities."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import ACCO, DPU
from tests.validation.cases import OPTIMIZERS, every_optimizer
from tests.validation.learning import R, linear, near, played, prepared_of, with_same_data
from tests.validation.papers_rounds import Papers
from validation.replay import case as cases
from validation.replay import interpreter
from validation.replay.case import Prepared, expected_parameters, play_in_process
from validation.replay.contents import ReplayError
from validation.replay.equation import evaluate
from validation.replay.interpreter import Device
from validation.replay.plan import Plan
from validation.replay.policy import optimizer_state
from validation.replay.round_lives import WorkerSteps
from validation.replay.rounds import RoundsDevice
from validation.training.models import make_training
from validation.training.optimizer import Optimizer, OptimizerState
from validation.training.stages import Training

ROUNDS = ("dpu", "wp", "acco")
every_schedule = pytest.mark.parametrize("schedule", ROUNDS)
# Workers, blocks and slow devices; where all counts are powers of two, sums of equal gradients are exact.
EXACT: list[dict[str, Any]] = [{"replicas": 1, "m": 1}, {"replicas": 2, "m": 1}, {"replicas": 4, "m": 1}]
OTHERS: list[dict[str, Any]] = [
    {"replicas": 3, "m": 1, "slow": ("1:4",)},
    {"replicas": 4, "m": 2, "slow": ("3:4",)},
    {"replicas": 2, "m": 2},
]


def path_of(papers: Papers, schedule: str, updates: int = R) -> list[Tensor]:
    return {"acco": papers.acco, "dpu": papers.dpu, "wp": papers.wp, "dp": papers.data_parallel}[schedule](updates)


def ordinary(training: Training, optimizer: Optimizer, updates: int = R) -> list[Tensor]:
    """Data parallelism whose micro-batches are all alike is training with one of them."""
    return Papers(training, optimizer, [1] * updates).data_parallel(updates)


# The papers' equations


@every_schedule
@every_optimizer
@pytest.mark.parametrize("how", [*EXACT, *OTHERS], ids=str)
def test_a_replay_and_the_equation_are_the_papers(how: dict[str, Any], optimizer: Optimizer, schedule: str) -> None:
    training = make_training("mlp", 2)
    prepared = prepared_of(training, schedule, optimizer, **how)
    counts = prepared.plan.program.counts.tolist()
    path = path_of(Papers(training, optimizer, counts), schedule)
    assert torch.allclose(played(prepared), path[-1], rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat(expected_parameters(prepared)), path[-1], rtol=0, atol=1e-12)
    assert not torch.allclose(path[-1], path[-2], rtol=0, atol=1e-6)


@every_optimizer
@pytest.mark.parametrize("warm_up", [1, 2])
def test_delayed_updates_may_wait_before(warm_up: int, optimizer: Optimizer) -> None:
    training = make_training("mlp", 2)
    prepared = prepared_of(training, "dpu", optimizer, replicas=3, m=2, slow=("1:4",), warm_up=warm_up)
    path = Papers(training, optimizer, prepared.plan.program.counts.tolist()).dpu(R, warm_up)
    assert torch.allclose(played(prepared), path[-1], rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat(expected_parameters(prepared)), path[-1], rtol=0, atol=1e-12)


# Identity 1: where all micro-batches have the same data, ACCO is data parallelism


def versions_made(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """All versions that a replay of one device makes, as the parts of each stage."""
    found: dict[int, list[Tensor]] = {}

    def keep(self: object, stage: int, version: int, theta: Tensor) -> None:
        found.setdefault(version, []).append(theta.clone())

    monkeypatch.setattr(cases.DeviceRun, "_collect", keep)
    play_in_process(prepared)
    return found


@every_optimizer
@pytest.mark.parametrize("how", EXACT, ids=str)
def test_acco_of_equal_data_is_data_parallelism(how: dict[str, Any], optimizer: Optimizer) -> None:
    """To the bit: no delay, and twice the batch."""
    training = with_same_data(make_training("mlp", 2))
    prepared = prepared_of(training, "acco", optimizer, **how)
    assert {counts & (counts - 1) for counts in prepared.plan.program.counts.tolist()} == {0}
    expected = ordinary(training, optimizer)
    assert torch.equal(played(prepared), expected[-1])
    assert torch.equal(torch.cat(expected_parameters(prepared)), expected[-1])


@every_optimizer
@pytest.mark.parametrize("how", OTHERS, ids=str)
def test_so_it_is_with_any_numbers_of_micro_batches(how: dict[str, Any], optimizer: Optimizer) -> None:
    """But for rounding."""
    training = with_same_data(make_training("mlp", 2))
    prepared = prepared_of(training, "acco", optimizer, **how)
    expected = ordinary(training, optimizer)
    assert near(played(prepared), expected[-1])
    assert near(torch.cat(expected_parameters(prepared)), expected[-1])


@every_optimizer
def test_each_estimate_is_the_version_that_it_estimates(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Est(t) = theta(t) = data parallelism's, for all t; versions are numbered est(1), theta(1), est(2), ..."""
    training = with_same_data(make_training("mlp", 1))
    found = versions_made(prepared_of(training, "acco", optimizer, replicas=1, m=1), monkeypatch)
    expected = ordinary(training, optimizer)
    assert sorted(found) == list(range(1, 2 * R + 1))
    for t in range(1, R + 1):
        assert torch.equal(found[2 * t - 1][0], expected[t])
        assert torch.equal(found[2 * t][0], expected[t])


@every_optimizer
@pytest.mark.parametrize("schedule", ["dpu", "wp"])
def test_the_others_differ_from_the_second_update_on(schedule: str, optimizer: Optimizer) -> None:
    training = with_same_data(make_training("mlp", 2))
    expected = ordinary(training, optimizer)
    for updates in range(1, R + 1):
        ends = played(prepared_of(training, schedule, optimizer, updates, replicas=2, m=1))
        assert near(ends, expected[updates]) == (updates == 1)


# Identity 2: where the gradient is the same everywhere, all of them are data parallelism


@every_schedule
@every_optimizer
def test_with_a_constant_gradient_all_methods_are_one(optimizer: Optimizer, schedule: str) -> None:
    training = linear()
    expected = ordinary(training, optimizer)
    for how in (*EXACT, *OTHERS):
        assert near(played(prepared_of(training, schedule, optimizer, **how)), expected[-1]), how


# Identity 3: DPU reads one version back


@every_optimizer
@pytest.mark.parametrize("how", [*EXACT, *OTHERS], ids=str)
def test_delayed_updates_read_one_version_back(how: dict[str, Any], optimizer: Optimizer) -> None:
    """theta(t+1) = Opt(theta(t), mean gradient at theta(max(t-1, 0))), by one model and one optimizer of torch."""
    training = make_training("mlp", 2)
    prepared = prepared_of(training, "dpu", optimizer, **how)
    counts = prepared.plan.program.counts.tolist()
    model = nn.Sequential(*make_training("mlp", 2).stages)
    torchs, before = optimizer.over(list(model.parameters())), None
    for t in range(R):
        now = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters((now if before is None else before).clone(), model.parameters())
        losses = [training.loss(model(x), y, counts[t]) for x, y in (training.data(t, i) for i in range(counts[t]))]
        torchs.zero_grad()
        torch.autograd.backward(sum(losses, torch.zeros(())))
        nn.utils.vector_to_parameters(now.clone(), model.parameters())
        torchs.step()
        before = now
    last = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.allclose(played(prepared), last, rtol=0, atol=1e-12)


def test_the_equation_with_all_lags_one_is_delayed_updates() -> None:
    """To the bit, with as many micro-batches in each step."""
    training, optimizer = make_training("mlp", 2), OPTIMIZERS["adam"]
    lags = DPU.lags(Shape(2, 2))
    as_rounds, as_steps = (
        torch.cat(evaluate(training, optimizer, lags, R, counts=counts)) for counts in ([2] * R, None)
    )
    assert torch.equal(as_rounds, as_steps)  # a half of a sum is the sum of halves
    other = torch.cat(evaluate(training, optimizer, ACCO.lags(Shape(2, 2)), R, versions=ACCO.versions))
    assert not torch.allclose(as_rounds, other, rtol=0, atol=1e-6)


# Identity 4: what would break them


Mutation = Callable[[pytest.MonkeyPatch], None]


def forget(name: str) -> Mutation:
    """One tensor of the state is not as it was after an estimate."""

    def copy_but_one(state: OptimizerState) -> OptimizerState:
        assert name in state
        return {each: tensor if each == name else tensor.clone() for each, tensor in state.items()}

    return lambda patch: patch.setattr(interpreter, "copy_state", copy_but_one)


def clear_between_halves(patch: pytest.MonkeyPatch) -> None:
    """Each half adds to a sum of its own."""
    patch.setattr(WorkerSteps, "first_step", lambda self, step: step)


def divide_by_workers(patch: pytest.MonkeyPatch) -> None:
    """The mean is over workers, as if each had one gradient in a round."""
    patch.setattr(RoundsDevice, "_taken_by", lambda self, first, last: self._program.devices * (last + 1 - first))


def bring_no_estimate(patch: pytest.MonkeyPatch) -> None:
    """theta(t) comes where est(t + 1) is due."""
    update = Device._updated

    def update_or_not(self: Device, stage: int, theta: Tensor, gradient: Tensor, *, keep: bool) -> Tensor:
        if keep:
            return update(self, stage, theta, gradient, keep=keep)
        return self._states.get(optimizer_state(stage, self._program.shard))["master"].clone()

    patch.setattr(Device, "_updated", update_or_not)


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "the step counter is not restored": (forget("step"), "adam"),
    "the first moment is not restored": (forget("exp_avg"), "adam"),
    "the second moment is not restored": (forget("exp_avg_sq"), "adam"),
    "momentum is not restored": (forget("momentum_buffer"), "momentum"),
    "parameters are not restored": (forget("master"), "sgd"),
    "sums are cleared between halves": (clear_between_halves, "momentum"),
    "the mean is over workers": (divide_by_workers, "momentum"),
    "theta comes where an estimate is due": (bring_no_estimate, "adam"),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("mutation", "optimizer"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_breaks_identity_and_replay(
    mutation: Mutation, optimizer: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one thing is changed; without the change both hold, in the same runs."""
    made, how = OPTIMIZERS[optimizer], {"replicas": replicas, "m": 2}
    same = with_same_data(make_training("mlp", 2))
    runs = [prepared_of(same, "acco", made, **how), prepared_of(make_training("mlp", 2), "acco", made, **how)]
    expected = [ordinary(same, made)[-1], torch.cat(expected_parameters(runs[1]))]
    for run, theta in zip(runs, expected, strict=True):
        assert near(played(run), theta)
    mutation(monkeypatch)
    runs = [replace(run, plan=Plan(run.plan.program)) for run in runs]
    for run, theta in zip(runs, expected, strict=True):
        assert not near(played(run), theta)


def test_a_version_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that did not take over what has come would go on with an older version."""
    prepared = prepared_of(make_training("mlp", 2), "dpu", OPTIMIZERS["sgd"], replicas=2, m=1)
    monkeypatch.setattr(RoundsDevice, "_take_over", lambda self: None)
    with pytest.raises(ReplayError, match="starts version 2 from version 1, and has version 0"):
        play_in_process(prepared)
