"""One replay compared with its simulation: the report, and the differences that exceed its tolerances."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

torch = pytest.importorskip("torch")

import msgspec
from torch import Tensor

from cdpsim.cluster import Cluster, Devices
from cdpsim.errors import RequestError
from cdpsim.model import Model, Stage
from cdpsim.schedules.rule import CDP_V1, DP, Rule
from tests.validation.cases import OPTIMIZERS, every_schedule, stages_of
from tests.validation.known import known
from validation.comparison.forecast import HERE, Forecast
from validation.comparison.parameters import compare_parameters
from validation.comparison.replays import SingleProcess, compare_replay
from validation.ranks.launcher import Ranks
from validation.replay import interpreter, watch
from validation.replay.case import Case, Outcome, Prepared, expected_parameters, play_in_process, prepare
from validation.replay.contents import Calls, Holding
from validation.replay.watch import TaskInterval
from validation.report import schema as form
from validation.report.schema import Report
from validation.training.optimizer import Optimizer, OptimizerState

CASE = Case("multi-cdp", 2)


def held(case: Case, forecast: Forecast | None = None, repeats: int = 0) -> Report:
    """Hold a case in this process."""
    report = compare_replay(case, SingleProcess(), forecast, repeats=repeats)
    assert report is not None
    return report


class Several:
    """Plays as if each device had a process of its own, and changes what it comes to."""

    def __init__(self, change: Callable[[int, int, Outcome], Outcome]) -> None:
        self.watched: list[str] = []
        self._change = change  # number of the run, device, outcome -> outcome

    def run(self, case: Case, *, timeout: float) -> list[Outcome]:
        self.watched.append(case.watch)
        outcomes = play_in_process(prepare(case))
        return [self._change(len(self.watched) - 1, device, outcome) for device, outcome in enumerate(outcomes)]


def held_by(players: Several, case: Case, forecast: Forecast | None = None, repeats: int = 0) -> Report:
    """Hold a case that others play."""
    report = compare_replay(case, cast(Ranks, players), forecast, repeats=repeats)
    assert report is not None
    return report


# Content of a report


@every_schedule
def test_a_schedule_is_within_tolerance(schedule: str) -> None:
    """With messages and their bytes as many as its program has, a collective counting once."""
    case = Case(schedule, 3, optimizer=OPTIMIZERS["adam"])
    report, messages = held(case), prepare(case).plan.messages
    assert report.ok
    assert report.memory.max_relative_error == report.memory.total.relative_error == 0
    assert report.messages.simulated == report.messages.measured == len(messages)
    assert report.messages.bytes_simulated == report.messages.bytes_measured == sum(each.size for each in messages)


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    report = held(CASE, repeats=1)
    form.write_report(tmp_path / "report.json", report)
    assert form.load_report(tmp_path / "report.json") == report


def test_memory_is_told_by_device_category_and_slot() -> None:
    report = held(Case("pp-cdp", 3, steps=2)).memory
    assert [device.device for device in report.devices] == [0, 1, 2]
    categories = ["activations", "communication", "gradients", "optimizer", "parameters"]
    assert all(sorted(device.categories) == categories for device in report.devices)
    assert report.curve.slot == list(range(2 * 3 * 2 + 2 * 2))
    assert max(report.curve.measured_bytes) == report.total.measured_bytes
    assert report.method == "storages"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        (Case("multi-cdp", 2), 0.0),
        (Case("multi-cdp", 2, dtype="float32", model="transformer"), 0.0),
        (Case("single-dp", 2), 0.0),
        (Case("multi-dp", 1), 0.0),
        (Case("multi-dp", 3), 0.0),
        (Case("zero-dp", 3, dtype="bfloat16", model="transformer"), 0.0),
        (Case("pp-cdp", 2, model="gpt2-mini", batch=1), 0.0),
    ],
)
def test_tolerances_are_the_least_that_can_be_promised(case: Case, parameters: float) -> None:
    """None for memory, as storages are counted; none for parameters within one process, collectives included."""
    if "mini" in case.model:
        pytest.importorskip("transformers")
    report = held(case)
    assert (report.parameters.tolerance, report.memory.tolerance) == (parameters, 0.0)
    assert report.ok


@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        (Case("multi-dp", 2), 1e-12),
        (Case("zero-dp", 2, dtype="float32", model="transformer"), 1e-6),
        (Case("zero-cdp", 2), 0.0),
    ],
)
def test_collectives_of_ranks_have_a_tolerance(case: Case, parameters: float) -> None:
    prepared = prepare(known(case))
    assert compare_parameters(prepared, play_in_process(prepared)).tolerance == parameters


@pytest.mark.slow
def test_no_other_rule_ends_within_the_tolerance() -> None:
    """Of wide stages in float32, stale gradients end 3e-5 beside fresh ones: far less than 1e-4, which was allowed."""
    case = Case(
        "multi-dp", 2, steps=2, dtype="float32", sizes=(("width", 1024),), optimizer=Optimizer("sgd", {"lr": 0.01})
    )
    prepared = prepare(known(case))
    found = compare_parameters(prepared, play_in_process(prepared))
    assert found.nearest is not None
    fresh, stale = (expected_parameters(prepared, rule) for rule in (DP, CDP_V1))
    distance = max(float((a - b).abs().max()) for a, b in zip(fresh, stale, strict=True))
    assert found.nearest.distance <= distance < 1e-4
    assert found.tolerance < found.nearest.distance / 2


def test_a_run_of_one_step_tells_no_rules_apart() -> None:
    assert held(Case("multi-dp", 2, steps=1)).parameters.nearest is None


def test_what_was_asked_for_is_told_with_its_options() -> None:
    case = Case("single-cdp", 2, rule=((1, 1), (1, 0)), slot_order="backward-first", optimizer=OPTIMIZERS["adam"])
    asked = held(replace(case, sizes=(("width", 8), ("layers", 2)), cuts=(1,))).request
    assert asked["rule"] == "((1, 1), (1, 0))"
    assert (asked["slot_order"], asked["sizes"], asked["cuts"]) == ("backward-first", "width=8 layers=2", "1")
    assert (asked["optimizer"], asked["optimizer_lr"]) == ("adam", 0.01)
    assert (asked["single_process"], asked["backend"]) == (True, None)


def test_a_model_is_told_by_the_hash_of_its_file(tmp_path: Path) -> None:
    model = Model(name="by hand", stages=stages_of(CASE))
    model.save(tmp_path / "model.toml")
    digest = sha256((tmp_path / "model.toml").read_bytes()).hexdigest()
    assert held(replace(CASE, stages=model)).request["model_sha256"] == digest
    assert held(CASE).request["model_sha256"] != digest  # which has no name


def test_who_does_not_report_gets_none() -> None:
    """As all of torchrun's ranks but one."""
    elsewhere = SimpleNamespace(run=lambda case, timeout: None)
    assert compare_replay(CASE, cast(Ranks, elsewhere), repeats=0) is None


# Replays that are not within tolerance


@pytest.mark.parametrize(("by", "told"), [(1e-3, pytest.approx(1e-3)), (float("nan"), None)])
def test_other_parameters_are_not_within_tolerance(
    monkeypatch: pytest.MonkeyPatch, by: float, told: float | None
) -> None:
    """Nor are those that are no numbers; nothing else is blamed."""

    def others(prepared: Prepared, rule: Rule | None = None) -> list[Tensor]:
        first, *rest = expected_parameters(prepared, rule)
        return [first + by, *rest]

    monkeypatch.setattr("validation.comparison.parameters.expected_parameters", others)
    report = held(CASE)
    assert report.parameters.max_abs_difference == told
    assert (report.ok, report.parameters.bit_equal) == (False, False)
    assert (report.memory.max_relative_error, report.messages.agree) == (0, True)


def test_a_version_kept_for_too_long_is_not_within_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although activations are as simulated, and parameters what they should be."""
    kept: list[object] = []
    keep = interpreter.Device._keep

    def keeping(device: interpreter.Device, holding: Holding, value: Tensor | OptimizerState) -> None:
        kept.append(value)
        keep(device, holding, value)

    monkeypatch.setattr(interpreter.Device, "_keep", keeping)
    report = held(CASE)
    assert (report.ok, report.memory.max_relative_error, report.parameters.bit_equal) == (False, 0, True)


@pytest.mark.parametrize("more", [8, -8, 1024, -1024])
def test_other_bytes_are_not_within_tolerance(more: int) -> None:
    """Too many or too few, however few."""
    first, last = stages_of(CASE)
    last = msgspec.structs.replace(last, activation=last.activation + more)
    report = held(replace(CASE, stages=Model(stages=(first, last))))
    assert not report.ok
    assert report.memory.max_relative_error > 0
    assert (report.parameters.bit_equal, report.messages.agree) == (True, True)


def lose(run: int, device: int, outcome: Outcome) -> Outcome:
    """Device 1 has counted one call to send too few."""
    sent = next(key for key in outcome.calls if key[0] == "send")
    return replace(outcome, calls=outcome.calls - Counter({sent: device}))


def misdirect(run: int, device: int, outcome: Outcome) -> Outcome:
    """Every device has sent to another one than it should, as often and as much."""
    other: Calls = Counter({(call, (7,), size): times for (call, _, size), times in outcome.calls.items()})
    return replace(outcome, calls=other)


@pytest.mark.parametrize("change", [lose, misdirect])
def test_other_messages_are_not_within_tolerance(change: Callable[[int, int, Outcome], Outcome]) -> None:
    report = held_by(Several(change), CASE)
    assert (report.ok, report.messages.agree) == (False, False)
    assert (report.messages.simulated == report.messages.measured) == (change is misdirect)
    assert (report.parameters.bit_equal, report.memory.max_relative_error) == (True, 0)


# Time

SECOND = Stage(forward=1.0, backward=1.0)


def seconds(n: int, forward: float = 1.0, backward: float = 1.0) -> Forecast:
    """Equal stages on devices between which messages take no time."""
    return Forecast(Model(stages=(Stage(forward=forward, backward=backward),) * n), Cluster(), source="by hand")


@pytest.mark.parametrize(("schedule", "slots"), [("multi-cdp", 2 * 3 * 4 + 2 * 2), ("multi-dp", 2 * 3 * 4)])
def test_devices_that_run_at_once_take_as_long_as_their_schedule(schedule: str, slots: int) -> None:
    """Of spans that begin a second apart, and last 100 s in the run that warms up, then 3, 5 and 4 s."""

    def take(run: int, device: int, outcome: Outcome) -> Outcome:
        lasts = [0.0, 0.0, 100.0, 3.0, 5.0, 4.0][run]
        return replace(outcome, spans=[TaskInterval(0, device, device + lasts)])

    players = Several(take)
    report = held_by(players, Case(schedule, 3, steps=4), seconds(3), repeats=3)
    assert players.watched == ["storages", "account", "time", "time", "time", "time"]
    assert report.time is not None
    assert (report.time.simulated_seconds, report.time.measured_seconds) == (slots, 2 + 4)
    assert report.time.relative_error == (slots - 6) / 6
    for device, busy in enumerate(report.time.devices):
        assert busy.device == device
        assert (busy.simulated_busy_seconds, busy.measured_busy_seconds) == (2 * 3 * 4, 4)
        assert busy.relative_error == (24 - 4) / 4
    assert report.time.calibration == "by hand"
    assert report.ok  # what a machine takes is told, and no fault


def test_devices_in_one_process_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks at each reading, every task takes a second; time between tasks does not count."""
    ticks = count()
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    time = held(Case("pp-cdp", 2, steps=3), seconds(2, forward=1.0, backward=2.0), repeats=1).time
    assert time is not None
    assert (time.simulated_seconds, time.measured_seconds) == (3 * 2 * 2 * (1 + 2), 3 * 2 * 2 * 2)
    assert [device.simulated_busy_seconds for device in time.devices] == [18, 18]
    assert [device.measured_busy_seconds for device in time.devices] == [12, 12]
    assert time.relative_error == 0.5


def test_work_is_foretold_by_the_speed_of_the_cluster() -> None:
    stages = stages_of(CASE)
    fast, slow = (Forecast(Model(stages=stages), Cluster(devices=(Devices(speed=speed),))) for speed in (2e9, 1e9))
    times = [held(CASE, forecast, repeats=1).time for forecast in (fast, slow)]
    assert times[0] is not None and times[1] is not None
    assert times[1].simulated_seconds == pytest.approx(2 * times[0].simulated_seconds)


def test_without_a_forecast_the_machine_is_measured_first() -> None:
    time = held(CASE, repeats=1).time
    assert time is not None
    assert time.calibration == HERE
    assert 0 < time.simulated_seconds < 60


def test_without_repeats_time_is_not_compared() -> None:
    """Nor is anything played for it."""
    players = Several(lambda run, device, outcome: outcome)
    assert held_by(players, CASE, seconds(2)).time is None
    assert players.watched == ["storages", "account"]


def test_a_cluster_that_is_too_small_is_refused_before_anything_is_played() -> None:
    def play(case: Case, timeout: float) -> NoReturn:
        raise AssertionError("nothing may be played")

    few = Forecast(Model(stages=(SECOND,) * 2), Cluster(devices=(Devices(count=1),)))
    with pytest.raises(RequestError, match="has 1 devices, but the schedule needs 2"):
        compare_replay(CASE, cast(Ranks, SimpleNamespace(run=play)), few, repeats=1)
