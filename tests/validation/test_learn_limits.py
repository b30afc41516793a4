"""Limits of the rate: closed forms, the update equation, trainings of quadratics; the sharpness by dense Hessians."""

import json
from dataclasses import replace
from math import pi, sin
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.func import functional_call, jacrev

from cdpsim import RequestError
from cdpsim.files.tables import format_table
from cdpsim.schedules.rule import ACCO, DPU, WP, Rule
from cdpsim.trace.metrics.memory import Lags
from tests.validation.measured_tables import PAGE, RESULTS
from tests.validation.quadratics import Bowl, quadratic, quadratic_layers
from validation.__main__ import main
from validation.learn import data as data_module
from validation.learn import networks
from validation.learn.data import Data, Tensors, label_loss
from validation.learn.figure import draw_limits
from validation.learn.lags import read_learner
from validation.learn.limits import (
    LIMITS_HEADER,
    FoundLimits,
    Limit,
    Recurrence,
    find_limits,
    first_failing,
    largest_eigenvalues,
    limit_of,
    limit_row,
    sharpness_of,
    theoretical_limits,
)
from validation.learn.networks import Sizes, make_stages
from validation.learn.training import Course
from validation.learn.updates import Update
from validation.replay.equation import evaluate
from validation.training.forms import Form, flatten
from validation.training.optimizer import Optimizer
from validation.training.stages import Architecture, Draw, cut

OWN, SHARED = QUADRATICS = "quadratic:own", "quadratic:shared"


@pytest.fixture(autouse=True)
def quadratic_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `quadratic` be a network."""
    monkeypatch.setitem(networks.NETWORKS, "quadratic", quadratic_layers)
    monkeypatch.setitem(networks._TAKES, "quadratic", "vectors")


def same(*rows: list[int]) -> Lags:
    """Lags of forwards and backwards alike."""
    return Lags(np.array(rows), np.array(rows))


def one_late(share: int, of: int) -> Lags:
    """So many of some micro-batches a step late, of one stage."""
    return same(*([int(i < share)] for i in range(of)))


# Theory


@pytest.mark.every_case
@pytest.mark.parametrize("momentum", [0, 0.5, 0.9])
@pytest.mark.parametrize("late", range(9))
def test_a_share_that_is_late_by_one(late: int, momentum: float) -> None:
    """Of z^2 - (1 + mu - a (1 - p)) z + mu + a p: the product of its roots is 1, or -1 is one of them."""
    p = late / 8
    expected = min((1 - momentum) / p if p else np.inf, 2 * (1 + momentum) / (1 - 2 * p) if p < 1 / 2 else np.inf)
    assert limit_of(one_late(late, 8), momentum=momentum, shared=False) == pytest.approx(expected, rel=2e-9)


@pytest.mark.every_case
@pytest.mark.parametrize("lag", range(7))
def test_all_late(lag: int) -> None:
    assert limit_of(same([lag]), shared=True) == pytest.approx(2 * sin(pi / (4 * lag + 2)), rel=2e-9)


def test_nesterov_without_lags() -> None:
    """Of z^2 - (1 + mu) (1 - a) z + mu (1 - a): -1 is a root."""
    assert limit_of(same([0]), momentum=0.9, nesterov=True, shared=False) == pytest.approx(2 * 1.9 / 2.8, rel=2e-9)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "n", "own", "shared", "with_momentum"),
    [
        ("multi-dp", 4, 2, 2, 3.8),
        ("multi-cdp", 4, 4 / 3, 8 / 3, 0.4 / 3),
        ("multi-cdp", 8, 8 / 7, 16 / 7, 0.8 / 7),
        ("multi-cdp:cdp-v1", 4, 1, 1, 0.1),
        ("pipedream-2bw", 4, 1, 1, 0.1),
    ],
)
def test_limits_of_schedules(name: str, n: int, own: float, shared: float, with_momentum: float) -> None:
    """By the shares of their traces: in CDP-v2, n - 1 - j of the n micro-batches of stage j are late by one."""
    lags = read_learner(name, n, {}).lags
    assert limit_of(lags, shared=False) == pytest.approx(own, rel=2e-9)
    assert limit_of(lags, shared=True) == pytest.approx(shared, rel=2e-9)
    assert limit_of(lags, momentum=0.9, shared=False) == pytest.approx(with_momentum, rel=2e-9)


def test_delay_2_with_momentum() -> None:
    """On the circle, z = exp(iw): a = -(z - 1) (z - mu) z is a number at the first w where its angle is 0."""
    w = np.linspace(1e-3, 1, 1_000_001)
    z = np.exp(1j * w)
    a = -(z - 1) * (z - 0.9) * z
    crossing = int(np.flatnonzero(np.diff(np.sign(a.imag)))[0])
    assert limit_of(same([2]), momentum=0.9, shared=True) == pytest.approx(a[crossing].real, rel=1e-5)
    assert a[crossing].real == pytest.approx(0.0512, abs=5e-5)


def test_limits_of_versions_that_form_a_graph() -> None:
    """DPU is a line, late by one. WP: z^3 - z^2 + 2 a z - a, whose limit is the golden ratio's inverse.

    ACCO, over two steps: ((1 - a/2, -a/2), (1, -a)), whose eigenvalues are 1 - a and -a/2.
    """
    found = [limit_of(same([lag]), rule.versions, shared=True) for lag, rule in ((1, DPU), (2, WP), (1, ACCO))]
    assert found == pytest.approx([1, (5**0.5 - 1) / 2, 2], rel=1e-7)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_of_a_line_it_is_the_companion_matrix(momentum: float) -> None:
    """Lags 0, 1, 1, 3: z^3 (z - 1) (z - mu) + a z (z^3 + 2 z^2 + 1) / 4, times powers of z."""
    a = np.array([0.1, 0.5, 1.7])
    found = Recurrence(np.array([0, 1, 1, 3]), momentum=momentum).growth(a)
    for rate, growth in zip(a, found, strict=True):
        polynomial = np.polyadd(
            np.polymul([1, 0, 0, 0], np.polymul([1, -1], [1, -momentum])), rate * np.array([1, 2, 0, 1, 0]) / 4
        )
        assert growth == pytest.approx(np.abs(np.roots(polynomial)).max(), rel=1e-9)


def recurrence(rule: Rule, lag: int, momentum: float, rate: float, steps: int, kicks: int = 0) -> list[float]:
    """Each version of one number, whose gradient is itself, and a drawn one in some first steps."""
    made, theta, velocity = rule.versions.made(steps), [1.0], [0.0]
    gradients: list[float] = []
    drawn = np.append(np.random.default_rng(1).standard_normal(kicks), np.zeros(steps - kicks))
    rows = zip(made.step.tolist(), made.base.tolist(), made.first.tolist(), strict=True)
    for step, base, first in rows:
        if step == len(gradients):
            gradients.append(theta[max(len(theta) - 1 - lag * (step > 0), 0)] + drawn[step])
        velocity.append(momentum * velocity[base] + sum(gradients[first:]) / (step + 1 - first))
        theta.append(theta[base] - rate * velocity[-1])
    return theta


GRAPHS = pytest.mark.parametrize(("rule", "lag"), [(DPU, 1), (WP, 2), (ACCO, 1)], ids=["dpu", "wp", "acco"])


@GRAPHS
def test_the_recurrence_is_the_update_equation(rule: Rule, lag: int) -> None:
    draws = Draw(Form((1, 1), torch.float64)), Draw(Form((1,), torch.float64))
    training = cut(Architecture([Bowl().double()], *draws, quadratic(OWN).loss), [])
    start = flatten(training.stages[0].parameters())
    optimizer = Optimizer("sgd", {"lr": 0.3, "momentum": 0.9})
    (theta,) = evaluate(training, optimizer, np.array([[lag]]), 10, versions=rule.versions)
    made = rule.versions.made(10)
    kept = 1 + int(np.flatnonzero(~made.estimate)[-1])
    assert float(theta / start) == pytest.approx(recurrence(rule, lag, 0.9, 0.3, 10)[kept], rel=1e-12)


@pytest.mark.every_case
@GRAPHS
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_the_recurrence_grows_beyond_the_limit_alone(rule: Rule, lag: int, momentum: float) -> None:
    """The first steps' gradients differ: without that, ACCO's estimates would be its versions."""
    limit = limit_of(same([lag]), rule.versions, momentum, shared=True)
    for factor, grows in ((0.99, False), (1.01, True)):
        theta = np.abs(recurrence(rule, lag, momentum, factor * limit, 6000, kicks=5))
        assert (theta[-500:].max() > theta[len(theta) // 2 :][:500].max()) == grows


@pytest.mark.parametrize("limit", [1e-3, 0.4, 70.0])
def test_the_first_rate_that_fails_is_found_wherever_it_is(limit: float) -> None:
    """Below the first grid, in it, or above."""
    lower, upper = first_failing(lambda rates: rates < limit, (0.1, 1.0), 6, 0.01)
    assert lower < limit <= upper <= 1.01 * lower


def test_rates_that_pass_beyond_one_that_fails_do_not_count() -> None:
    lower, upper = first_failing(lambda rates: (rates < 0.3) | (rates > 0.6), (0.1, 1.0), 8, 0.01)
    assert lower < 0.3 <= upper


@pytest.mark.parametrize(("passing", "word"), [(True, "all"), (False, "none")])
def test_rates_without_a_limit_are_refused(passing: bool, word: str) -> None:
    with pytest.raises(RequestError, match=f"have no limit: {word} of them will do"):
        first_failing(lambda rates: np.full(len(rates), passing), (0.1, 1.0), 4, 0.01)


# Sharpness


@pytest.mark.parametrize("name", QUADRATICS)
def test_quadratics_have_the_sharpness_1(name: str) -> None:
    assert sharpness_of(course_of(0, epochs=1), quadratic(name)) == pytest.approx(1, abs=1e-6)


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of the loss, by all parameters in a row."""
    parameters = dict(model.named_parameters())
    blocks = jacrev(jacrev(lambda own: label_loss(functional_call(model, own, (x,)), y)))(parameters)
    rows = [
        torch.cat([blocks[one][other].reshape(of.numel(), -1) for other in parameters], dim=1)
        for one, of in parameters.items()
    ]
    return torch.cat(rows).detach()


def test_the_sharpness_is_the_largest_eigenvalue_of_the_dense_hessian() -> None:
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(40) % 3
    data = Data("vectors", Tensors(x, y), Tensors(x, y), 3)
    course = Course("mlp", Sizes(4, 5), 2, seeds=3, dtype=torch.float64)
    for seed, found in enumerate(sharpness_of(course, data)):
        model = nn.Sequential(*make_stages("mlp", data, course.sizes, 2, seed, torch.float64))
        assert found == pytest.approx(torch.linalg.eigvalsh(dense_hessian(model, x, y))[-1].item(), rel=1e-3)


@pytest.mark.parametrize("values", [(2, -5, 0.1), (3, 1, -1), (1, -1, 0.2)])
def test_the_largest_eigenvalue_need_not_be_that_of_the_largest_modulus(values: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T
    start = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    assert largest_eigenvalues(lambda rows: rows @ matrix, start).tolist() == pytest.approx([values[0]] * 4, rel=1e-3)


# Limits


def course_of(momentum: float, epochs: int, batch: int = 16) -> Course:
    """A course of 1,024 samples in an epoch."""
    update = Update("momentum", momentum) if momentum else Update("sgd")
    return Course("quadratic", Sizes(4, 1), 4, update=update, seeds=5, epochs=epochs, batch=batch, dtype=torch.float64)


long = pytest.mark.long
STALE = ["multi-cdp", "pipedream-2bw"]  # CDP-v1 has the lags of PipeDream-2BW


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedules", "course"),
    [
        (OWN, ["multi-dp", *STALE, "pipedream"], course_of(0, 4)),
        (SHARED, ["multi-dp", *STALE, "pipedream"], course_of(0, 4)),
        (OWN, ["wp", "acco"], course_of(0, 2)),
        (SHARED, ["pipedream-2bw"], course_of(0.9, 8, batch=4)),
        *(
            pytest.param(name, *each, marks=long)
            for name in QUADRATICS
            for each in ((STALE, course_of(0.9, 20, batch=4)), (["multi-dp", "pipedream"], course_of(0.9, 6, batch=4)))
        ),
    ],
)
def test_limits_of_quadratics_are_the_theorys(name: str, schedules: list[str], course: Course) -> None:
    """To 1 %, of traces whose lags are 0; 0 and 1; 1; 0 to 3; and of estimates."""
    learners = [read_learner(schedule, 4, {}) for schedule in schedules]
    momentum = 0 if course.update.kind == "sgd" else course.update.momentum
    for learner, limit in zip(learners, find_limits(learners, course, quadratic(name), 4, count=32), strict=True):
        number = limit_of(learner.lags, learner.versions, momentum, shared=name == SHARED)
        assert 0.99 * number <= limit.lower < limit.upper <= 1.01 * number, limit
        assert (limit.sharpness, limit.spread) == pytest.approx((1, 0), abs=1e-6)


def made_up(schedule: str, lower: float, own: float, shared: float) -> Limit:
    ratios = {"ratio": lower / 2, "own_ratio": own / 2, "shared_ratio": shared / 2}
    more = {"lag": 0.375, "upper": 1.01 * lower, "sharpness": 1.0, "spread": 0.25} | ratios
    return Limit(schedule=schedule, lower=lower, own=own, shared=shared, **more)


def test_a_picture_has_a_row_for_each_schedule() -> None:
    """And the cells of a table are as many as its header's."""
    limits = [made_up("multi-dp", 2, 2, 2), made_up("multi-cdp", 1.5, 4 / 3, 8 / 3)]
    rates, ratios = draw_limits(limits).axes
    assert [text.get_text() for text in rates.get_yticklabels()] == ["multi-dp", "multi-cdp"]
    assert [[*np.asarray(line.get_xdata())] for line in rates.get_lines()] == [[2, 1.5], [2, 4 / 3], [2, 8 / 3]]
    assert [[*np.asarray(line.get_xdata())] for line in ratios.get_lines()] == [[1, 0.75], [1, 2 / 3], [1, 4 / 3]]
    row = limit_row(limits[1])
    assert len(row) == len(LIMITS_HEADER)
    assert row == ("multi-cdp", "0.375", "1.5", "1.333", "2.667", "0.750", "0.667", "1.333", "1 ± 0.25")


@pytest.mark.parametrize(
    ("schedule", "kind", "problem"),
    [
        ("multi-dp", "adamw", "optimizer: adamw has no limit on a quadratic to compare with; take sgd, momentum or"),
        ("local-sgd", "sgd", "local-sgd: has local steps, whose limit on a quadratic is not known; leave it out"),
    ],
)
def test_trainings_without_a_theory_are_refused(schedule: str, kind: str, problem: str) -> None:
    course = replace(course_of(0, 1), update=Update(kind))
    with pytest.raises(RequestError, match=problem):
        find_limits(
            [read_learner(schedule, 1, {"replicas": 2} if schedule == "local-sgd" else {})], course, quadratic(OWN), 4
        )


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_what_is_kept_is_beside_the_theory_of_today(name: str) -> None:
    """And on the page."""
    content = (RESULTS / f"limits-digits-n4-{name}" / "limits.json").read_bytes()
    found = msgspec.json.decode(content, type=FoundLimits)
    update = Update("sgd") if name == "sgd" else Update()
    for limit in found.limits:
        numbers = theoretical_limits(read_learner(limit.schedule, 4, {}), update)
        assert [limit.own, limit.shared] == pytest.approx([own / limit.sharpness for own in numbers], rel=1e-8)
    table = format_table("text", (), LIMITS_HEADER, [limit_row(limit) for limit in found.limits])
    assert table in PAGE.read_text(encoding="utf-8")


def test_the_command_finds_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes twice; options that say nothing are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_module, "ALL_DATA", (OWN,))
    monkeypatch.setitem(data_module.DATA, OWN, lambda: quadratic(OWN))
    line = ["learn", "multi-dp", "pipedream-2bw", "-n", "2", "--data", OWN, "--network", "quadratic"]
    line += ["--optimizer", "sgd", "--seeds", "2", "--epochs", "2", "--layers", "2"]
    for name in ("one", "two"):
        assert main([*line, "--limits", "-o", name]) == 0
    table = capsys.readouterr().out
    for file in ("limits.csv", "limits.svg"):
        assert Path("one", file).read_bytes() == Path("two", file).read_bytes()
    found = json.loads(Path("one/limits.json").read_text())
    assert [each["lower"] for each in found["limits"]] == pytest.approx([2, 1], rel=0.02)
    assert found["request"]["optimizer"] == "sgd" and "pipedream-2bw" in table
    for more, problem in (
        (["--limits", "--lr", "0.1"], "lr: says nothing with --limits; leave --lr out"),
        (["--limits", "--expect", "pipedream-2bw=worse"], "expect: says nothing with --limits"),
    ):
        assert main([*line, *more, "-o", "three"]) == 2
        assert problem in capsys.readouterr().err
    assert not Path("three").exists()
