"""The simulator against every result that is kept: with the model that a result's simulation read, it says the same."""

from fractions import Fraction
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from cdpsim.model import Model
from cdpsim.program import Category
from validation.calibrate.results import Calibration
from validation.comparison import memory
from validation.replay.case import Case, planned
from validation.report.command import find_reports, reports_table
from validation.report.schema import Battery, Report

FOLDER = Path(__file__).parents[2] / "validation" / "results"
RESULTS = sorted(FOLDER.glob("*.json"))


def read(path: Path) -> Battery:
    return msgspec.json.decode(path.read_bytes(), type=Battery)


every_result = pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])


def case_of(report: Report, battery: Battery) -> Case:
    """Return the request of a report's simulation."""
    asked = report.request
    model = Model.from_builtins(battery.models[str(asked["model_sha256"])], "model")
    order = asked["slot_order"]
    assert asked["rule"] is None, "the battery replays schedules by their own rules"
    return Case(
        report.asked.schedule,
        report.asked.n,
        report.asked.steps,
        m=cast("int | None", asked.get("m")),
        chunks=cast("int | None", asked.get("chunks")),
        slot_order=None if order is None else str(order),
        stages=model,
    )


def test_results_are_kept() -> None:
    assert RESULTS


def test_the_read_me_shows_all_of_them() -> None:
    """Its table is what `python -m validation report` makes of the folder, and it does not claim what is not there."""
    text = (FOLDER.parent / "README.md").read_text()
    assert reports_table(find_reports(FOLDER).found, "markdown") in text
    on_gpu = any(report.asked.device == "cuda" for path in RESULTS for report in read(path).reports)
    readme = (FOLDER.parents[1] / "README.md").read_text()
    assert ("CUDA: not measured yet" in text, "CUDA: not measured yet" in readme) == (not on_gpu, not on_gpu)


@every_result
def test_the_simulator_still_says_what_it_said(path: Path) -> None:
    """Device by device and slot by slot, to the byte."""
    battery = read(path)
    for report in battery.reports:
        plan = planned(case_of(report, battery))
        held = memory.simulated_memory(plan)[:, :, Category.ACTIVATIONS]
        assert held.max(axis=1).tolist() == [device.simulated_bytes for device in report.memory.devices], report.request
        assert held.sum(axis=0).tolist() == report.memory.curve.simulated_bytes, report.request
        assert len(plan.messages) == report.messages.simulated


@every_result
def test_what_was_measured_is_what_is_simulated(path: Path) -> None:
    """Memory within what a report tolerates, which is 2 % at the most; messages one by one; parameters."""
    for report in read(path).reports:
        assert report.ok, report.request
        measured = np.array([device.measured_bytes for device in report.memory.devices])
        simulated = np.array([device.simulated_bytes for device in report.memory.devices])
        assert report.memory.tolerance <= 0.02
        assert (abs(measured - simulated) <= report.memory.tolerance * measured).all(), report.request
        assert report.messages.agree
        assert report.parameters.max_abs_difference is not None
        assert report.parameters.max_abs_difference <= report.parameters.tolerance


@every_result
def test_the_machine_was_calibrated(path: Path) -> None:
    """With a link that has a latency and a bandwidth, and passes that have a speed."""
    found = msgspec.convert(read(path).calibration, Calibration)
    assert found.one_way.fit.latency_seconds > 0
    assert found.one_way.fit.bandwidth_bytes_per_second is not None
    assert {each.name for each in found.collectives} == {"all-reduce", "broadcast", "reduce"}
    assert found.compute.speed_flop_per_second > 1e9


@every_result
def test_all_nine_schedules_were_replayed(path: Path) -> None:
    """With N = 2, 4 and 8, in one process and by ranks."""
    ran = {(r.asked.schedule, r.asked.n, r.asked.single_process) for r in read(path).reports}
    schedules = {schedule for schedule, _, _ in ran}
    assert len(schedules) == 9
    assert {(schedule, n, True) for schedule in schedules for n in (2, 4, 8)} <= ran
    assert {(schedule, 4, False) for schedule in schedules} <= ran


@every_result
@pytest.mark.parametrize("n", [2, 4, 8])
def test_cyclic_execution_measures_half(path: Path, n: int) -> None:
    """Activations over all devices: (N+1)/2N of DP's, but for what a backward needs beyond them."""
    total = {
        report.asked.schedule: report.memory.total.measured_bytes
        for report in read(path).reports
        if (report.asked.model, report.asked.n, report.request["sizes"]) == ("transformer", n, "")
        and report.request["slot_order"] is None
    }
    for cyclic, simultaneous in (("multi-cdp", "multi-dp"), ("single-cdp", "single-dp"), ("mp-cdp", "mp-dp")):
        excess = total[cyclic] / total[simultaneous] - Fraction(n + 1, 2 * n)
        assert abs(excess) < 0.05, (cyclic, n)
