"""Learning by the lags of traces: the update equation, torch's optimizers, scipy's statistics; what is written."""

import csv
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from cdpsim import SCHEDULES, Request, RequestError, assemble
from cdpsim.files.tables import format_table
from cdpsim.schedules.order import Outer
from cdpsim.trace.metrics.memory import Lags
from tests.validation.measured_tables import PAGE, RESULTS
from validation.__main__ import main
from validation.learn.data import DATA, Data, Tensors, batches, label_loss, load_data
from validation.learn.figure import draw_learned
from validation.learn.lags import Learner, learner_of, read_learner
from validation.learn.networks import Sizes, make_stages
from validation.learn.results import ANSWERS_HEADER, Learned, LearningCurve, RateAnswer, answer_row, answers_of
from validation.learn.stacked import Stack, step_together
from validation.learn.statistics import BETTER, EQUIVALENT, OPEN, WORSE, compare, holm, interval, quantile, verdicts
from validation.learn.training import Course, check_course, train_all
from validation.learn.unfinished import Unfinished
from validation.learn.updates import KINDS, OuterUpdates, States, Update
from validation.replay.case import (
    Case,
    Prepared,
    expected_parameters,
    largest_difference,
    play_in_process,
    prepare,
    profiled,
)
from validation.replay.equation import evaluate
from validation.replay.plan import Plan
from validation.training.forms import Form, flatten
from validation.training.models import even_cuts
from validation.training.optimizer import Optimizer
from validation.training.stages import Architecture, Draw, Training, cut

GRAPHS: dict[str, dict[str, Any]] = {
    "dpu": {"replicas": 3, "warm_up": 2},
    "wp": {"replicas": 2},
    "acco": {"replicas": 2, "m": 2},
    "local-sgd": {"replicas": 2, "local_steps": 2},
    "post-local-sgd": {"replicas": 2, "local_steps": 2, "warm_up": 2},
    "slowmo": {"replicas": 2, "local_steps": 2, "m": 2},
    "diloco": {"replicas": 3, "local_steps": 3, "outer": "nesterov:0.7:0.9"},
    "co2": {"replicas": 2, "local_steps": 2},
}
LINES = [name for name, each in SCHEDULES.items() if each.order.waits]
ONE_MICRO_BATCH = "pipedream"
LABELS = torch.zeros(8, dtype=torch.int64)
VECTORS = Data("vectors", Tensors(torch.zeros(8, 6), LABELS), Tensors(torch.zeros(1, 6), LABELS[:1]), 3)
TOKENS = VECTORS._replace(name="tokens", test=Tensors(torch.zeros(1, 5, dtype=torch.int64), LABELS[:1]), tokens=7)
SIZES = Sizes(layers=8, width=8, heads=2)
STEPS = 5
MOST = 24  # steps of a stack


def shape_of(name: str) -> dict[str, Any]:
    """The stages of a small case: dualpipe has pairs of devices and more micro-batches than stages."""
    return {"n": 4} | ({"m": 8} if name == "dualpipe" else {})


def asked_learner(name: str) -> Learner:
    asked = shape_of(name)
    return read_learner(name, asked.pop("n"), asked)


def training_of(network: str, data: Data, n: int) -> Training:
    """The same stages, as the update equation takes them, and data that it draws."""
    layers = [layer for stage in make_stages(network, data, SIZES, n, 0, torch.float64) for layer in stage]
    if data.tokens:
        inputs, targets = Draw(Form((2, 5), torch.int64), data.tokens), Draw(Form((2, 5), torch.int64), data.classes)
    else:
        inputs, targets = Draw(Form((2, 6), torch.float64)), Draw(Form((2,), torch.int64), data.classes)
    return cut(Architecture(layers, inputs, targets, label_loss), even_cuts(len(layers), n))


def stack_of(
    network: str, data: Data, n: int, learner: Learner, update: Update, seeds: tuple[int, ...] = (0,), **how: Any
) -> Stack:
    twice = bool((learner.lags.forward != learner.lags.backward).any())
    starts = [make_stages(network, data, SIZES, n, seed, torch.float64, twice=twice) for seed in seeds]
    return Stack(starts, learner, update, MOST, **how)


def drawn(training: Training, step: int, m: int) -> tuple[Tensor, Tensor]:
    """A step's data for one run: (run, sample, ...)."""
    pairs = [training.data(step, i) for i in range(m)]
    x, y = (torch.cat(each)[None] for each in zip(*pairs, strict=True))
    return x, y


def learnt(stack: Stack, training: Training, m: int, rate: float, steps: int = STEPS) -> Tensor:
    """The parameters after some steps, as one vector."""
    for step in range(steps):
        step_together([stack], *drawn(training, step, m), torch.tensor([rate], dtype=torch.float64))
    return torch.cat([flatten(own[0] for own in stage.values()) for stage in stack.kept])


@pytest.mark.parametrize(
    ("network", "name"), [*(("mlp", name) for name in LINES), ("transformer", "multi-cdp"), ("transformer", "pipemare")]
)
def test_steps_are_those_of_the_update_equation(network: str, name: str) -> None:
    """For every schedule whose versions follow one another, by the lags of its trace; PipeMare's two of each, too."""
    learner, data = asked_learner(name), TOKENS if network == "transformer" else VECTORS
    n, m = learner.lags.forward.shape[1], learner.micro_batches
    training = training_of(network, data, n)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    expected = evaluate(training, Optimizer("sgd", options), learner.lags.forward, STEPS, None, learner.lags.backward)
    found = learnt(stack_of(network, data, n, learner, Update("momentum", 0.9, 0.01)), training, m, 0.1)
    assert torch.allclose(found, torch.cat(expected), rtol=0, atol=1e-12)


NINE = [name for name in SCHEDULES if name.split("-")[-1] in ("dp", "cdp") and name != "dp"]


@pytest.mark.parametrize("name", [*NINE, *GRAPHS])
def test_steps_are_those_of_replays(name: str) -> None:
    """Five updates of messages and devices, in one process, of the harness's own MLP.

    ACCO's first round, its seed, has one micro-batch a worker there, and as many as all others here.
    """
    more, n = GRAPHS.get(name, {}) | ({"m": 1} if name == "acco" else {}), 1 if name in GRAPHS else 3
    case = Case(name, n, STEPS, optimizer=Optimizer("sgd", {"lr": 0.1, "momentum": 0.9}), **more)
    prepared = prepare(profiled(case))
    training, request = prepared.training, prepared.case.request
    learner = learner_of(name, request)
    stack = Stack([training.stages], learner, Update(), MOST, lambda scores, target: training.loss(scores, target, 1))
    learnt(stack, training, learner.micro_batches, 0.1, prepared.plan.program.updated)
    found = [flatten(own[0] for own in stage.values()) for stage in stack.kept]
    assert largest_difference(play_in_process(prepared), found) < 1e-12


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_so_are_those_of_other_optimizers(kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    options |= {"momentum": 0.8, "nesterov": True} if kind == "nesterov" else {}
    learner, training = asked_learner("multi-cdp"), training_of("mlp", VECTORS, 4)
    made = Optimizer("adamw" if kind == "adamw" else "sgd", options)
    expected = torch.cat(evaluate(training, made, learner.lags.forward, STEPS))
    stack = stack_of("mlp", VECTORS, 4, learner, Update(kind, 0.8, 0.1))
    assert torch.allclose(learnt(stack, training, 4, 0.05), expected, rtol=0, atol=1e-12)


def test_without_lags_it_is_torch_on_whole_batches() -> None:
    training, learner = training_of("mlp", VECTORS, 4), asked_learner("multi-dp")
    model = nn.Sequential(
        *[layer for stage in make_stages("mlp", VECTORS, SIZES, 4, 0, torch.float64) for layer in stage]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = (values[0] for values in drawn(training, step, 4))
        optimizer.zero_grad()
        label_loss(model(x), y).backward()
        optimizer.step()
    found = learnt(stack_of("mlp", VECTORS, 4, learner, Update()), training, 4, 0.1)
    assert torch.allclose(found, flatten(model.parameters()), rtol=0, atol=1e-12)


def exact_muon(theta: Tensor, gradient: Tensor, steps: int, rate: float, mu: float = 0.9) -> Tensor:
    """Muon by singular values, which its polynomial maps one by one: five times a s + b s^3 + c s^5."""
    momentum = torch.zeros_like(gradient)
    for _ in range(steps):
        momentum = mu * momentum + (1 - mu) * gradient
        u, s, v = torch.linalg.svd((1 - mu) * gradient + mu * momentum, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        theta = theta - rate * max(1, theta.shape[0] / theta.shape[1]) ** 0.5 * u @ torch.diag(s) @ v
    return theta


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_muon_is_its_polynomial_of_singular_values_and_torchs(shape: tuple[int, int]) -> None:
    """torch has it in bfloat16, and so within a few per cent of a step."""
    generator = torch.Generator().manual_seed(1)
    theta, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    state, own = States(Update("muon"), 0, {}), {"weight": theta[None]}
    other = nn.Parameter(theta.clone())
    optimizer = torch.optim.Muon([other], lr=0.1, momentum=0.9, weight_decay=0)
    for _ in range(3):
        own, state = state.step(own, {"weight": gradient[None]}, torch.tensor([0.1], dtype=torch.float64))
        other.grad = gradient
        optimizer.step()
    found = own["weight"][0]
    assert torch.allclose(found, exact_muon(theta, gradient, 3, 0.1), rtol=0, atol=1e-12)
    assert (found - other).norm() < 0.03 * (found - theta).norm()


@pytest.mark.parametrize("name", ["multi-cdp", "pipemare"])
def test_runs_that_are_stacked_are_those_one_by_one(name: str) -> None:
    learner, training = asked_learner(name), training_of("mlp", VECTORS, 4)
    rates = torch.tensor([0.1, 0.02, 0.05], dtype=torch.float64)
    both = [
        stack_of("mlp", VECTORS, 4, learner, Update(), seeds=(0, 1, 2), one_by_one=one_by_one)
        for one_by_one in (False, True)
    ]
    for step in range(STEPS):
        x, y = (torch.cat([each, each.roll(1, 1), each.flip(1)]) for each in drawn(training, step, 4))
        losses = [step_together([stack], x, y, rates)[0] for stack in both]
        assert torch.allclose(*losses, rtol=0, atol=1e-10)
    for one, other in zip(both[0].kept, both[1].kept, strict=True):
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-10) for name in one)


def test_schedules_with_the_same_lags_learn_the_same() -> None:
    """CDP-v1 reads one step back everywhere, as PipeDream-2BW does; of one stage, CDP reads the newest."""
    training = training_of("mlp", VECTORS, 4)
    one, other = (asked_learner(name) for name in ("multi-cdp:cdp-v1", "pipedream-2bw"))
    found = [learnt(stack_of("mlp", VECTORS, 4, each, Update()), training, 4, 0.1) for each in (one, other)]
    assert torch.equal(*found)
    assert all((each.forward == 0).all() for name in ("multi-cdp", "dp") for each in [read_learner(name, 1, {}).lags])


@pytest.mark.parametrize(("micro_batch", "stage"), [(0, 0), (3, 3)])
def test_a_lag_that_is_off_by_one_is_noticed(micro_batch: int, stage: int) -> None:
    training, learner = training_of("mlp", VECTORS, 4), asked_learner("multi-cdp")
    other = learner.lags.forward.copy()
    other[micro_batch, stage] += 1
    both = learner, learner._replace(lags=Lags(other, other))
    found = [learnt(stack_of("mlp", VECTORS, 4, each, Update()), training, 4, 0.1) for each in both]
    assert (found[0] - found[1]).abs().max() > 1e-6


def test_lags_are_the_papers() -> None:
    """CDP-v2: what stage j of micro-batch i reads is new if i + j is N - 1 or more; 1F1B without flush as known."""
    i, j = np.indices((4, 4))
    assert (asked_learner("multi-cdp").lags.forward == (i + j < 3)).all()
    assert (asked_learner("pipedream").lags.forward == [[3, 2, 1, 0]]).all()
    assert (asked_learner("pipemare").lags.backward == 0).all()
    assert asked_learner("multi-cdp").mean == 0.375


# Versions that are no line, and workers that have versions of their own


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("name", GRAPHS)
def test_rounds_and_local_steps_are_those_of_replays(name: str, kind: str) -> None:
    """Estimates with the state of their base, late means, outer optimizers: the equations of replays, to 1e-12."""
    request = Request(name, 1, steps=6, **GRAPHS[name])
    learner, training = learner_of(name, request), training_of("mlp", VECTORS, 1)
    options = {"lr": 0.05, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "momentum" else {})
    optimizer = Optimizer("adamw" if kind == "adamw" else "sgd", options)
    steps, m, local = learner.steps_per_update * 6, learner.micro_batches, request.schedule.order.local
    if local is None:
        how: dict[str, Any] = {"versions": request.rule.versions, "counts": [m] * steps, "waits": request.shape.warm_up}
        expected = evaluate(training, optimizer, learner.lags.forward, steps, **how)
    else:
        prepared = Prepared(Case(name, 1, optimizer=optimizer), request, Plan(assemble(request)), training)
        steps, expected = prepared.plan.program.steps, expected_parameters(prepared)
    stack = stack_of("mlp", VECTORS, 1, learner, Update(kind, 0.9, 0.1))
    found = learnt(stack, training, m, 0.05, steps)
    assert torch.allclose(found, torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "after"), [("sgd", [7.5, 5.25]), ("nesterov", [6.25, 4.125])])
def test_outer_updates_by_hand(kind: str, after: list[float]) -> None:
    """By hand, at a rate of a half and a momentum of a half, where all workers together move by 5, and then by 2.

    SGD takes 5 / 2 and (2 + 5 / 2) / 2; with Nesterov's momentum (5 + 5 / 2) / 2 and (2 + 4.5 / 2) / 2.
    """
    theta = torch.tensor([10.0])
    outer = OuterUpdates(Outer(kind, 0.5, 0.5), [{"weight": theta}])
    found = []
    for moved in (5.0, 2.0):
        common = outer.step([{"weight": outer.common[0]["weight"] - moved}])
        found.append(common[0]["weight"].item())
    assert found == after
    assert OuterUpdates(None, [{"weight": theta}]).step([{"weight": theta - 1}]) == [{"weight": theta - 1}]


def test_a_state_of_a_training_is_written_and_read_as_it_was(tmp_path: Path) -> None:
    """Numbers and texts as keys, at any depth, and empty ones; a number comes back as a tensor."""
    state: dict[str, Any] = {
        "epoch": 3,
        "stacks": {0: {"w": torch.arange(4.0)}, 1: {"w": torch.ones(2, 2)}},
        "taken": {},
        "pair": (1, []),
    }
    Unfinished(tmp_path, {"seed": 1}).save("mlp", state)
    found = Unfinished(tmp_path, {"seed": 1}).load("mlp")
    assert found is not None
    assert found.keys() == state.keys() and found["stacks"].keys() == {0, 1}
    assert found["epoch"] == 3 and found["taken"] == {} and found["pair"] == (1, [])
    assert all(torch.equal(found["stacks"][k]["w"], state["stacks"][k]["w"]) for k in (0, 1))


def test_an_update_of_acco_takes_the_batch_of_others_in_two_rounds() -> None:
    learners = [read_learner(name, 1, {"replicas": 4}) for name in ("dp", "acco", "dpu", "local-sgd")]
    assert [each.steps_per_update for each in learners] == [1, 2, 1, 1]
    course = replace(COURSE, stages=1)
    assert check_course(course, learners, load_data("sequences:addition")) == 4
    with pytest.raises(RequestError, match="60 samples are not divided by 8 micro-batches; give 56 or 64"):
        check_course(replace(course, batch=60), learners, load_data("sequences:addition"))


# Data


@pytest.mark.parametrize("name", [name for name in DATA if name.startswith(("text", "sequences"))])
def test_sequences_are_by_their_rules(name: str) -> None:
    data = load_data(name)
    x, y = data.train.take(torch.arange(data.samples))
    test, _ = data.test.take(torch.arange(len(data.test)))
    assert x.max() < data.tokens and y.max() < data.classes
    assert len(test) == (len(x) + len(test)) // 5
    rows = {tuple(row) for row in x.tolist()}
    if name == "sequences:addition":
        assert (y[:, 2] == (x[:, 0] + x[:, 1]) % 31).all() and (y[:, :2] == -1).all()
        assert not rows & {tuple(row) for row in test.tolist()}
    elif name == "sequences:parity":
        assert (y[:, -1] == x.sum(dim=1) % 2).all() and (y[:, 0] == x[:, 0]).all()
    elif name == "sequences:copy":
        assert (y[:, 8:] == x[:, :8]).all() and (x[:, 9:] == x[:, :7]).all() and (x[:, 8] == 8).all()
    else:
        assert (x[:, 1:] == y[:, :-1]).all()


def test_digits_come_with_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(RequestError, match=r"data: digits come with scikit-learn; run `pip install"):
        DATA["digits"]()


def test_each_epoch_has_an_order_of_its_own() -> None:
    data = VECTORS._replace(train=Tensors(torch.zeros(10, 6), torch.zeros(10)))
    first, again, second, other = (
        torch.cat([*batches(data, *seed, 4)]).tolist() for seed in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again and len({*map(tuple, (first, second, other))}) == 3
    assert len({*first}) == 8  # two batches of four


# Statistics


def test_statistics_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(7)
    for _ in range(200):
        count, shift = draw.randint(2, 30), draw.choice([0, 0.3, 3])
        one, other = ([draw.gauss(mean, 1) for _ in range(count)] for mean in (shift, 0))
        found, pairs = compare(one, other, 0.5), np.subtract(one, other)
        assert found.p_different == pytest.approx(stats.ttest_rel(one, other).pvalue, abs=1e-10)
        apart = [
            stats.ttest_1samp(pairs, bound, alternative=side).pvalue
            for bound, side in ((-0.5, "greater"), (0.5, "less"))
        ]
        assert found.p_apart == pytest.approx(max(apart), abs=1e-10)
        mean, half = found.difference
        assert half is not None
        ends = stats.t.interval(0.95, count - 1, pairs.mean(), stats.sem(pairs))
        assert (mean - half, mean + half) == pytest.approx(ends)
        assert quantile(0.975, count - 1) == pytest.approx(stats.t.ppf(0.975, count - 1))


def test_holm_is_as_defined() -> None:
    """The k-th smallest of n counts n - k + 1 times, and no less than those before it; what has no value stays out."""
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9])[0] == 1
    found = holm([None, 0.02])
    assert np.isnan(found[0]) and found[1] == 0.02


def test_each_verdict_is_found() -> None:
    base = [0.90 + 0.001 * k for k in range(10)]
    near = [value + 0.0001 * (-1) ** k for k, value in enumerate(base)]
    higher, lower = ([value + step + 0.001 * (-1) ** k for k, value in enumerate(base)] for step in (0.02, -0.02))
    wide = [value + 0.02 * (-1) ** k for k, value in enumerate(base)]
    compared = [compare(values, base, 0.005) for values in (near, higher, lower, wide)]
    assert verdicts(compared, 0.005) == [EQUIVALENT, BETTER, WORSE, OPEN]
    assert verdicts([compare([0.9], [0.8], 0.005)], 0.005) == [OPEN]
    assert verdicts([compare(base, base, 0.005)], 0.005) == [EQUIVALENT]
    assert interval([3.0]).half is None


# Output


COURSE = Course("transformer", Sizes(4, 16), 2, rates=(0.05, 0.1), seeds=3, epochs=2, batch=64)


def test_a_schedule_of_single_micro_batches_makes_more_steps() -> None:
    """PipeDream's step is one micro-batch: of the same batches as others it makes n times as many steps."""
    data = load_data("sequences:addition")
    learners = [read_learner(name, 2, {}) for name in ("multi-dp", ONE_MICRO_BATCH)]
    assert check_course(COURSE, learners, data) == 2
    for learner in learners:
        curves = train_all([learner], replace(COURSE, seeds=1), data, 2)
        assert [(curve.rate, len(curve.loss)) for curve in curves] == [(0.05, 2), (0.1, 2)]


def test_rates_fall_and_runs_that_diverge_count() -> None:
    course = replace(COURSE, drops=(0.25, 0.5), drop_by=0.1)
    assert [course.rate(batch, 10) for batch in (0, 3, 5)] == pytest.approx([1, 0.1, 0.01])
    learner, data = read_learner("pipedream-2bw", 2, {}), load_data("sequences:addition")
    wild = train_all([learner], replace(COURSE, rates=(1e6,), seeds=2), data, 2)
    assert all(curve.diverged and curve.loss[-1] is None for curve in wild)
    still = [replace_name(curve, "multi-dp") for curve in wild]
    found = answers_of([*still, *wild], {"multi-dp": 0.0, "pipedream-2bw": 1.0}, 0.5)
    assert [answer.diverged for answer in found] == [2, 2]


def replace_name(curve: LearningCurve, name: str) -> LearningCurve:
    fields = {field: getattr(curve, field) for field in curve.__struct_fields__}
    return LearningCurve(**fields | {"schedule": name})


LINE = "learn multi-dp multi-cdp pipemare -n 2 --data sequences:addition --layers 4 --width 16 --seeds 2 --epochs 2"


@pytest.mark.slow
def test_the_command_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """curves.csv and the picture; learn.json has the environment, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        assert main([*LINE.split(), "--lr", "0.05,0.1", "-o", name]) == 0
    assert Path("one/curves.csv").read_bytes() == Path("two/curves.csv").read_bytes()
    assert Path("one/learn.svg").read_bytes() == Path("two/learn.svg").read_bytes()
    told = capsys.readouterr().out.splitlines()
    assert told[0].split()[:3] == ["schedule", "lag", "rate"]
    assert len(told) == 2 * (2 + 6)
    rows = [*csv.DictReader(Path("one/curves.csv").read_text().splitlines())]
    assert len(rows) == 3 * 2 * 2 * 2
    assert {row["epoch"] for row in rows} == {"1", "2"}
    learned = json.loads(Path("one/learn.json").read_text())
    assert learned["lags"]["multi-cdp"] == {"forward": [[1, 0], [0, 0]], "backward": [[1, 0], [0, 0]]}
    assert learned["request"]["lr"] == "0.05,0.1" and learned["request"]["network"] == "transformer"
    assert not {"output", "help", "force", "verbosity"} & learned["request"].keys()
    last = [row for row in rows if (row["schedule"], row["rate"], row["epoch"]) == ("multi-cdp", "0.1", "2")]
    answer = next(each for each in learned["answers"] if (each["schedule"], each["rate"]) == ("multi-cdp", 0.1))
    assert answer["accuracy"][0] == pytest.approx(sum(float(row["accuracy"]) for row in last) / 2)
    assert main([*LINE.split(), "-o", "one"]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "n"),
    [(["multi-dp", "multi-cdp", "pipedream-2bw", "pipemare", "pipedream"], 2), (["acco", "wp", "dpu"], 1)],
)
def test_schedules_learn_together_as_each_alone(names: list[str], n: int) -> None:
    """Whatever their lags, steps of a batch, weights of backwards and estimates."""
    data, course = load_data("sequences:addition"), replace(COURSE, stages=n, dtype=torch.float64)
    learners = [read_learner(name, n, {}) for name in names]
    together = train_all(learners, course, data, n)
    alone = [curve for learner in learners for curve in train_all([learner], course, data, n)]
    assert [(curve.schedule, curve.rate, curve.seed) for curve in together] == [
        (name, rate, seed) for name in names for rate in course.rates for seed in range(course.seeds)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-10) and one.accuracy == other.accuracy
    assert together[0].loss != together[-1].loss


def test_runs_that_do_not_fit_are_trained_one_after_another() -> None:
    learner, data = read_learner("multi-cdp", 2, {}), load_data("sequences:addition")
    course = replace(COURSE, dtype=torch.float64)
    whole, parts = (train_all([learner], replace(course, most_bytes=most), data, 2) for most in (2**30, 10_000_000))
    assert [(curve.rate, curve.seed) for curve in parts] == [(curve.rate, curve.seed) for curve in whole]
    for one, other in zip(whole, parts, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-10) and one.accuracy == other.accuracy


KILLED = {
    "multi-cdp -n 2": "--optimizer momentum",
    "acco -n 1 --replicas 2": "--optimizer adamw",
    "co2 -n 1 --replicas 2 --local-steps 3": "--optimizer sgd",
    "pipemare -n 2": "--optimizer muon --lr 0.01,0.02",
}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "more"), KILLED.items(), ids=[line.split()[0] for line in KILLED])
def test_a_killed_training_goes_on_and_ends_with_the_same_bytes(
    names: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its second epoch; another request does not go on from there."""
    monkeypatch.chdir(tmp_path)
    line = f"learn {names} {more} --data sequences:addition --layers 4 --width 16 --seeds 2 --epochs 4".split()
    assert main([*line, "-o", "whole"]) == 0
    saves, save = [], Unfinished.save

    def killed(self: Unfinished, name: str, state: Any) -> None:
        save(self, name, state)
        saves.append(name)
        if len(saves) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "save", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            raise SystemExit(main([*line, "-o", "parts"]))
    assert {path.suffix for path in Path("parts/unfinished").iterdir()} == {".json", ".npz"}
    capsys.readouterr()
    assert main([*line, "--batch", "32", "-o", "parts"]) == 2
    assert "parts/unfinished: has an unfinished training of another request" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "save", lambda self, name, state: saves.append(name))
        assert main([*line, "-o", "parts"]) == 0
    assert len(saves) == 2 + 2  # epochs
    assert not Path("parts/unfinished").exists()
    for name in ("curves.csv", "learn.svg"):
        assert Path("parts", name).read_bytes() == Path("whole", name).read_bytes()


@pytest.mark.slow
def test_a_rule_that_was_edited_is_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States of the rule as it was are refused, and so are states beside which no request lies; --force drops both."""
    monkeypatch.chdir(tmp_path)
    line = LINE.replace("multi-dp multi-cdp pipemare", "multi-cdp:r.csv").split()
    Path("r.csv").write_text("0,0\n0,0\n")
    with monkeypatch.context() as patch:
        patch.setattr("validation.learn.command._write", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            raise SystemExit(main([*line, "-o", "one"]))
    Path("r.csv").write_text("0,1\n0,1\n")
    capsys.readouterr()
    assert main([*line, "-o", "one"]) == 2
    assert "one/unfinished: has an unfinished training of another request" in capsys.readouterr().err
    Path("one/unfinished/request.json").unlink()
    assert main([*line, "-o", "one"]) == 2
    assert main([*line, "--force", "-o", "one"]) == 0
    assert main([*line, "-o", "fresh"]) == 0
    assert Path("one/curves.csv").read_bytes() == Path("fresh/curves.csv").read_bytes()


def test_results_without_a_finite_loss_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = "learn multi-dp multi-cdp -n 2 --data sequences:addition --layers 4 --width 16 --seeds 2 --epochs 1"
    assert main([*line.split(), "--lr", "1e300,0.05", "-o", "wild"]) == 0
    learned = msgspec.json.decode(Path("wild/learn.json").read_bytes(), type=Learned)
    assert [answer.diverged for answer in learned.answers] == [2, 0, 2, 0]


def test_lags_that_do_not_settle_are_refused() -> None:
    """Within 96 steps; a rule of 200 steps reads theta_0 in all of them."""
    with pytest.raises(RequestError, match="multi-cdp: reads other versions in each of 96 steps, so that it has no"):
        learner_of("multi-cdp", Request("multi-cdp", 2, rule=[[200, 200]] * 2))


def test_a_file_of_an_order_is_learnt_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1F1B as a CSV file learns what 1F1B does, which is what data parallelism does."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert main([*LINE.replace("multi-cdp pipemare", "1f1b mine.csv").split(), "-m", "2", "-o", "out"]) == 0
    rows = [*csv.DictReader(Path("out/curves.csv").read_text().splitlines())]
    losses = [[row["loss"] for row in rows if row["schedule"] == name] for name in ("multi-dp", "1f1b", "mine.csv")]
    assert losses[0] == losses[1] == losses[2]


def test_a_long_warm_up_settles_behind_it() -> None:
    """And estimates count like the versions that are kept instead, as in `compare`."""
    long = read_learner("dpu", 1, {"replicas": 2, "warm_up": 200})
    assert (long.waits, long.lags.forward.tolist(), long.mean) == (200, [[1], [1]], 1)
    assert [read_learner(name, 1, {"replicas": 2}).mean for name in ("acco", "wp", "local-sgd")] == [0, 0, 0]


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    """No pickle in it is loaded."""
    state = Unfinished(tmp_path, {"n": 2})
    state.save("multi-cdp-0", {"losses": torch.zeros(2)})
    (file,) = tmp_path.rglob("*.npz")
    np.savez(file, form=np.array([{}], dtype=object))
    with pytest.raises(RequestError, match=r"is no state of a training \(Object arrays cannot be loaded"):
        state.load("multi-cdp-0")
    file.write_bytes(b"PK")
    with pytest.raises(RequestError, match="is no state of a training"):
        state.load("multi-cdp-0")


@pytest.mark.slow
def test_the_picture_has_a_row_for_each_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*LINE.split(), "--lr", "0.05,0.1", "-o", "one"]) == 0
    learned = msgspec.json.decode(Path("one/learn.json").read_bytes(), type=Learned)
    figure = draw_learned(learned, 0.5)
    assert len(figure.axes) == 8
    assert [len(axes.get_lines()) for axes in figure.axes[:3]] == [3, 3, 2]


@pytest.mark.slow
def test_an_expectation_that_does_not_hold_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "learn multi-dp gpipe -n 2 --data sequences:addition --layers 4 --width 16 --seeds 2 --epochs 1"
    assert main([*line.split(), "--expect", "gpipe=equivalent", "-o", "same"]) == 0
    assert main([*line.split(), "--expect", "gpipe=worse", "-o", "other"]) == 1
    assert "gpipe at 0.05 is equivalent, not worse" in capsys.readouterr().err


REFUSED = {
    "multi-dp multi-dp": "multi-dp: is named twice; name it once",
    "multi-dp --schedule-warm-up 3": "schedule-warm-up: none of these schedules takes it; leave it out",
    "multi-dp --optimizer sgd --momentum 0.5": "momentum: sgd has none of its own; leave --momentum out",
    "multi-dp --drop-by 0.5": "drop-by: says nothing without --drops",
    "multi-dp --drops 0.5,1": "drops: 1 is after the training; give shares of it, below 1",
    "multi-dp --drops 0.5 --drop-by 5": "drop-by: 5 lets rates rise; give a factor of at most 1",
    "multi-dp --warm-up 240": "warm-up: 240 batches are all of a training, which has 240; give fewer",
    "multi-dp --best-of 21": "best-of: 21 epochs are more than a training has; give at most 20",
    "multi-dp --max-memory much": "max-memory: 'much': not a size",
    "multi-dp --cut time": "cut: unknown cut 'time'",
    "multi-dp --data fake --network resnet18 --width 8": "width: resnet18 has sizes of its own; leave --width out",
    "multi-dp --batch-norm": "batch-norm: transformer has layer norms or none",
    "multi-dp --like-paper": "like-paper: is for cifar10 and imagenet; give --data cifar10:DIR",
    "multi-dp --device cuda": "device: ",
    "multi-dp --local-steps 4": "local-steps: multi-dp does not take this option",
    "pipedream-2bw:acco": "versions: start from one another in a line",
    "multi-dp --batch 30": "batch: 30 samples are not divided by 4 micro-batches; give 28 or 32",
    "multi-dp --batch 3": "batch: 3 samples are not divided by 4 micro-batches; give 4",
    "multi-dp --batch 4000": "batch: sequences:addition has 769 samples to learn from",
    "multi-dp --data cifar": "data: unknown data 'cifar'",
    "multi-dp --network resnet": "network: unknown network 'resnet'",
    "multi-dp --network mlp": "network: mlp takes vectors, which sequences:addition has not",
    "multi-dp --optimizer lion": "optimizer: unknown optimizer 'lion'",
    "multi-dp --lr 0.1,x": "lr: 'x' is no number of at least 0",
    "multi-dp --lr nan": "lr: 'nan' is no number of at least 0",
    "multi-dp --momentum 1": "momentum: 1 must be at least 0 and below 1",
    "multi-dp --seeds 0": "seeds: seeds=0 must be at least 1",
    "multi-dp --layers 3": "layers: layers=3 must be at least 4",
    "multi-dp --dtype int8": "dtype: unknown dtype 'int8'",
    "multi-dp --width 30": "width: width=30 must be a multiple of 4; give 32",
    "multi-dp --expect multi-cdp=worse": "expect: 'multi-cdp=worse' names no schedule behind the first",
    "multi-dp multi-cdp --expect multi-cdp=fine": "expect: unknown expect 'fine'",
    "zero-dp gpipe -m 6 --batch 60": "zero-dp: has 4 micro-batches, which do not divide the 6 of another",
    "nothing": "schedule: unknown schedule 'nothing'",
}


@pytest.mark.parametrize(("line", "fragment"), REFUSED.items())
def test_what_cannot_be_is_refused(
    line: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is trained."""
    monkeypatch.chdir(tmp_path)
    given = line.split()
    asked = [*given, *([] if "--data" in given else ["--data", "sequences:addition"]), "-n", "4", "-o", "out"]
    assert main(["learn", *asked]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert fragment in err
    assert not Path("out").exists()


def test_an_update_has_a_momentum_below_1_and_a_finite_decay() -> None:
    """With all of a momentum kept, the sum of gradients has no end."""
    for momentum in (1, -0.01, math.nan):
        with pytest.raises(RequestError, match=f"^momentum: {momentum:g} must be at least 0 and below 1$"):
            Update("momentum", momentum)
    for decay in (math.inf, -0.01, math.nan):
        with pytest.raises(RequestError, match=f"^weight-decay: {decay:g} must be at least 0$"):
            Update("momentum", 0.9, decay)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_learns(kind: str) -> None:
    """The loss of sums modulo 31 falls."""
    learner, data = read_learner("multi-cdp", 2, {}), load_data("sequences:addition")
    rate = {"adamw": 0.003, "muon": 0.02}.get(kind, 0.1)
    course = replace(COURSE, update=Update(kind), rates=(rate,), seeds=1, epochs=6)
    (curve,) = train_all([learner], course, data, 2)
    first, last = curve.loss[0], curve.loss[-1]
    assert first is not None and last is not None and last < first


# Kept results


KEPT = sorted(RESULTS.glob("learn-*/learn.json"))


def to_ten_digits(answers: list[RateAnswer]) -> str:
    text = msgspec.json.encode(answers).decode()
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.10f}", text)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_what_is_kept_is_of_the_lags_of_today(path: Path) -> None:
    """And its answers are those of its curves, but for the rounding of other ways to compute them."""
    learned = msgspec.json.decode(path.read_bytes(), type=Learned)
    n, margin = int(str(learned.request["n"])), float(str(learned.request["margin"]))
    given: dict[str, Any] = msgspec.convert(learned.request.get("of_schedules", {}), dict[str, Any])
    means = {}
    for name, lags in learned.lags.items():
        today = read_learner(name, n, given)
        assert [own.tolist() for own in today.lags] == [lags.forward, lags.backward]
        means[name] = today.mean
    assert to_ten_digits(answers_of(learned.curves, means, margin)) == to_ten_digits(learned.answers)
    runs = {(curve.schedule, curve.rate, curve.seed) for curve in learned.curves}
    rates = {float(rate) for rate in str(learned.request["lr"]).split(",")}
    assert runs == {
        (name, rate, seed)
        for name in learned.lags
        for rate in rates
        for seed in range(int(str(learned.request["seeds"])))
    }
    assert "changed" not in str(learned.environment["commit"])


@pytest.mark.parametrize("name", ["learn-digits-n4", "learn-text-n4"])
def test_the_page_of_results_shows_what_is_kept(name: str) -> None:
    learned = msgspec.json.decode((RESULTS / name / "learn.json").read_bytes(), type=Learned)
    rows = [answer_row(answer, 0.5) for answer in learned.answers]
    assert format_table("text", (), ANSWERS_HEADER, rows) in PAGE.read_text(encoding="utf-8")


def test_pictures_that_are_kept_are_of_what_is_kept() -> None:
    learned = msgspec.json.decode((RESULTS / "learn-text-n4/learn.json").read_bytes(), type=Learned)
    shown = draw_learned(learned, 0.5)
    assert [len(axes.containers) for axes in shown.axes[:4]] == [5, 5, 4, 5]  # points of one epoch have bars
    assert [text.get_text() for text in shown.legends[0].get_texts()] == [*learned.lags]
