"""Pipelines, replayed: they end where the equation does, and hold what their programs say, slot by slot to the byte."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from cdpsim.errors import RequestError
from cdpsim.request.sharing import accepts
from cdpsim.schedules import SCHEDULES, TABLE_1, pipeline
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import NEWEST_EACH
from tests.validation.cases import OPTIMIZERS, every_model
from tests.validation.known import known
from tests.validation.replayed import check_replay
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.replay.equation import evaluate
from validation.training.forms import Form, flatten
from validation.training.stages import Architecture, Draw, cut, mean_square

MOMENTUM = OPTIMIZERS["momentum"]
PIPELINES = [name for name in SCHEDULES if name not in TABLE_1]
SHAPES = (Shape(2, 4), Shape(4, 5, 2), Shape(2, 3, 1, 2), Shape(4, 8))


def cases(schedule: str) -> list[Case]:
    """Of a few shapes those that a schedule takes, each with as many micro-batches as it takes."""
    declared, found = SCHEDULES[schedule], []
    for shape in SHAPES:
        shape = replace(shape, m=shape.m if accepts(declared, "m") else declared.micro_batches(shape.n))
        try:
            taken = declared.order.chunks == shape.chunks or declared.order.any_chunks
            _ = taken and declared.order.lists is not None and declared.actions(shape)
        except RequestError:
            continue
        if taken:
            sizes = {name: getattr(shape, name) for name in ("m", "chunks", "replicas")}
            found.append(Case(schedule, shape.n, 3, optimizer=MOMENTUM, **sizes))
    return found


every_pipeline = pytest.mark.parametrize("schedule", [*PIPELINES, "pp-cdp"])


@pytest.mark.parametrize("devices", [(2, 1), (1, 3), (2, 1, 2)])
def test_stages_of_several_devices_end_where_the_equation_does(devices: tuple[int, ...]) -> None:
    """Also where these have unlike numbers of micro-batches, and with whole pipelines side by side."""
    case = Case("1f1b", len(devices), 3, m=5, optimizer=MOMENTUM, stage_replicas=devices)
    check_replay(case)
    check_replay(case.but(replicas=2))


@pytest.mark.parametrize(("name", "n", "m"), [("chimera", 2, 2), ("gems", 2, 2), ("dualpipe", 2, 4), ("gpipe", 2, 2)])
def test_replicas_are_added_device_by_device(name: str, n: int, m: int) -> None:
    """In one process to the bit, also where devices do not end in the order of their numbers."""
    prepared = prepare(known(Case(name, n, m=m, replicas=2, optimizer=MOMENTUM)))
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


@every_pipeline
@every_model
def test_a_pipeline_ends_where_the_equation_does_and_holds_what_its_program_says(schedule: str, model: str) -> None:
    """Bit for bit where nothing is summed by a collective; every device, slot and category to the byte."""
    for case in cases(schedule)[: None if model == "mlp" else 1]:  # transformers take longer
        check_replay(replace(case, model=model))


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@every_model
def test_so_it_does_where_split_backwards_go_through_stages_twice(schedule: str, model: str) -> None:
    """Everything a forward kept is then there until the weights' part, and the gradient of its output."""
    check_replay(replace(cases(schedule)[0], model=model, split="twice"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as four:
        yield four


@every_pipeline
def test_so_do_ranks(schedule: str, ranks: Ranks) -> None:
    """Parameters, calls and memory, by two processes, or by two for each of two replicas."""
    for case in cases(schedule)[:2]:
        check_replay(case, ranks.run)


# Backwards in two parts


def alternating(devices: int, m: int, chunks: int) -> Actions:
    """All forwards; then whole backwards and split ones by turns, whose weights' parts come last."""
    rows = []
    for stage in range(devices):
        backs = [("I" if i % 2 else "B", stage, i) for i in range(m)]
        weights = [("W", stage, i) for i in range(1, m, 2)]
        rows.append([("F", stage, i) for i in range(m)] + backs + weights)
    return Actions.of(rows)


@every_model
def test_whole_backwards_go_with_split_ones(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole backward is both parts in turn; the gradient from the first part is sent at the end of the second."""
    monkeypatch.setitem(SCHEDULES, "by-turns", pipeline("by-turns", "whole and split backwards", alternating))
    check_replay(Case("by-turns", 3, m=4, model=model))


@every_model
def test_split_backwards_add_the_same_bits_as_whole_ones(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "by-turns", pipeline("by-turns", "whole and split backwards", alternating))
    one, other = (
        play_in_process(prepare(known(Case(schedule, 3, m=2, model=model)))) for schedule in ("by-turns", "gpipe")
    )
    for mine, theirs in zip(one, other, strict=True):
        assert mine.parameters.keys() == theirs.parameters.keys()
        assert all(np.array_equal(mine.parameters[j], theirs.parameters[j]) for j in mine.parameters)


def test_an_order_from_a_file_is_replayed(tmp_path: Path) -> None:
    """The file may give a device any stages, and may split any backwards."""
    path = tmp_path / "order.csv"
    path.write_text("0F0,2F0,2I0,2W0,0F1,0B0,2F1,2B1,0B1\n1F0,1I0,1F1,1B1,1W0\n")
    check_replay(Case(str(path), 3))


# Lags


@pytest.mark.parametrize(
    ("schedule", "other"), [("pipedream", "pipemare"), ("pipedream-2bw", "1f1b"), ("gpipe", "pp-cdp")]
)
def test_another_schedules_lags_are_noticed(schedule: str, other: str) -> None:
    """The replay of one does not end where the equation of the other does."""
    m = SCHEDULES[schedule].m or 3
    outcomes = play_in_process(prepare(known(Case(schedule, 3, m=m))))
    assert largest_difference(outcomes, expected_parameters(prepare(known(Case(other, 3, m=m))))) > 1e-6


def test_pipemare_goes_back_with_newer_weights_through_older_activations() -> None:
    """Three stages of one number, written out: z = c b a x, and a's gradient has the newest b in it."""
    one = Draw(Form((1, 1), torch.float64))
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(3)]
    training = cut(Architecture(layers, one, one, mean_square), [1, 2])
    lags, back = (own(Shape(3, 1)) for own in (NEWEST_EACH.lags, NEWEST_EACH.backward_lags))
    assert (lags.tolist(), back.tolist()) == ([[2, 1, 0]], [[0, 0, 0]])
    history: list[list[Tensor]] = [[flatten(stage.parameters()) for stage in training.stages]]
    for t in range(6):
        x, target = training.data(t, 0)
        a, b, c = (history[max(t - lag, 0)][j] for j, lag in enumerate(lags[0].tolist()))
        error = 2 * (c * b * a * x - target)
        newest_b, newest_c = history[t][1:]
        gradients = (error * newest_c * newest_b * x, error * newest_c * a * x, error * b * a * x)
        history.append([theta - 0.1 * own.reshape(1) for theta, own in zip(history[t], gradients, strict=True)])
    ends, others = (evaluate(training, OPTIMIZERS["sgd"], lags, 6, backward_lags=own) for own in (back, None))
    assert all(torch.allclose(*pair, rtol=0, atol=1e-15) for pair in zip(ends, history[-1], strict=True))
    assert not torch.allclose(torch.cat(ends), torch.cat(others), rtol=0, atol=1e-9)
