"""The simulator of today against every result that is kept, with the model file that is kept with it."""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from cdpsim.model import Model
from cdpsim.program import Category
from cdpsim.schedules import SCHEDULES, TABLE_1
from cdpsim.schedules.rule import NAMED_RULES
from tests.validation.measured_tables import PAGE, replays_table
from validation.comparison import memory
from validation.comparison.account import is_accounted
from validation.comparison.lifetimes import compare_lives
from validation.comparison.trials import list_trials
from validation.replay.case import Case, planned
from validation.replay.options import DATA_RANKS, OF_SCHEDULES, REPLAYED
from validation.replay.plan import Plan
from validation.report.schema import Battery, Calibration, Report
from validation.training.optimizer import Optimizer

FOLDER = Path(__file__).parents[2] / "validation" / "results"
RESULTS = sorted(FOLDER.glob("battery*.json"))


def read(path: Path) -> Battery:
    return msgspec.json.decode(path.read_bytes(), type=Battery)


# Trials that differ, by their file: what they showed is mended, and was not measured again. The account counted what
# updates on hosts make there for the GPU, and a GPU's thread of autograd held gradients of split backwards longer.
DIFFERENT = {
    "battery-cuda-2026-11-26": {
        *("options/1f1b+offload=all", "options/zero-cdp+offload=all", "options/zb-h1+offload=optimizer"),
        "options/1f1b+recompute=full+offload=all+bfloat16+mixed-precision+adam",
        "options-ranks/1f1b+recompute=full+offload=all",
        *("ranks/zb-h1", "ranks/zbv", "options/zb-h1+split=twice"),
        *("small-n4/interleaved-zero-bubble", "small-n4/dualpipe", "small-n4/zbv"),
    }
}
# Of a GPU's memory. Attention's random state, of 16 bytes a pass, is on the host; fake tensors have it on the GPU.
LARGEST_ERROR = {"cpu": 0.0, "cuda": 1e-5}

every_result = pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])


def case_of(report: Report, battery: Battery) -> Case:
    """Return the request of a report's simulation; options of training are in its model file."""
    asked = report.request
    model = Model.from_builtins(battery.models[str(asked["model_sha256"])], "model")
    assert asked["rule"] in (None, *NAMED_RULES), "the battery replays schedules by rules that have names"
    case = Case(
        str(asked["schedule"]),
        int(asked["n"]),  # type: ignore[arg-type]
        int(asked["steps"]),  # type: ignore[arg-type]
        **{name: value for name, value in asked.items() if name in (*OF_SCHEDULES, *DATA_RANKS)},
        slow=tuple(str(asked.get("slow") or "").split()),
        by_layer=numbers(asked["layers"]),
        stages=model,
    )
    if not (asked["zero"] or asked["shard"] or SCHEDULES[str(asked["schedule"])].order.rounds):
        return case
    # Shares are of whole numbers of the tensors that are trained.
    trained, words = ("model", "batch", "dtype", "seed"), [word.split("=") for word in str(asked["sizes"]).split()]
    options = {name[10:]: float(str(value)) for name, value in asked.items() if name.startswith("optimizer_")}
    return replace(
        case,
        **{name: asked[name] for name in trained},  # type: ignore[arg-type]
        sizes=tuple((name, int(size)) for name, size in words),
        cuts=numbers(asked["cuts"]),
        optimizer=Optimizer(str(asked["optimizer"]), options, bool(asked["mixed_precision"])),
    )


def numbers(text: object) -> tuple[int, ...] | None:
    return tuple(map(int, str(text).split(","))) if text else None


def device_of(path: Path) -> str:
    return path.stem.split("-")[1]


def trials_of(path: Path) -> list[str]:
    """Return the names of today's trials on the device of a battery."""
    return [trial.name for trial in list_trials(device_of(path))]


def test_results_are_kept() -> None:
    assert RESULTS


def test_the_page_of_results_sums_them_up() -> None:
    assert replays_table() in PAGE.read_text(encoding="utf-8")


@lru_cache
def plans(path: Path) -> list[tuple[Report, Plan]]:
    """Return each report with its program as it is assembled today."""
    battery = read(path)
    return [(report, planned(case_of(report, battery))) for report in alike(path)]


def alike(path: Path) -> list[Report]:
    """Return the reports that do not differ."""
    return [report for name, report in read(path).by_name.items() if name not in DIFFERENT.get(path.stem, ())]


@pytest.mark.slow
@every_result
def test_what_was_measured_is_what_is_simulated_today(path: Path) -> None:
    """Each device's peak of each category, and all activations slot by slot: to the byte, but for attention."""
    for report, plan in plans(path):
        found, simulated = report.memory, memory.simulated_memory(plan)  # device, slot, category
        ours: list[object] = simulated[:, :, Category.ACTIVATIONS].max(axis=1).tolist()
        theirs: list[object] = [device.measured_bytes for device in found.devices]
        ours += [*simulated[:, :, Category.ACTIVATIONS].sum(axis=0)]
        theirs += found.curve.measured_bytes
        assert found.together is not None
        ours += [simulated.sum(axis=(0, 2)).max(), *simulated.max(axis=1).ravel()]
        peaks = [device.categories[each.name.lower()] for device in found.devices for each in Category]
        theirs += [found.together.measured_bytes, *(peak.measured_bytes for peak in peaks)]
        measured, most = np.array(theirs), LARGEST_ERROR[report.asked.device]
        assert (abs(np.array(ours) - measured) <= most * measured).all(), report.request


@pytest.mark.slow
@every_result
def test_messages_that_were_sent_are_those_of_today(path: Path) -> None:
    """Counted where the harness called torch, with their bytes."""
    for report, plan in plans(path):
        calls = [
            (device, *call, count)
            for device in range(plan.program.devices)
            for call, count in plan.calls(device).items()
        ]
        sent = [
            (count, count * size)
            for device, call, peers, size, count in calls
            if call == "send" or (call != "receive" and device == min(peers))
        ]
        totals = sum(count for count, _ in sent), sum(size for _, size in sent)
        assert totals == (report.messages.measured, report.messages.bytes_measured), report.request
        assert report.messages.agree and not compare_lives(plan), report.request


@every_result
def test_every_replay_is_confirmed(path: Path) -> None:
    """Parameters, and the allocator's account of every process; each option was replayed."""
    for report in alike(path):
        assert report.ok, report.request
        parameters = report.parameters
        assert parameters.max_abs_difference is not None
        assert parameters.max_abs_difference <= parameters.tolerance
        assert parameters.nearest is None or parameters.tolerance <= parameters.nearest.distance / 4
        assert report.allocator is not None and is_accounted(report.allocator)
        for account in report.allocator.processes:
            most = report.allocator.tolerance_bytes + LARGEST_ERROR[report.asked.device] * account.measured_bytes
            assert account.largest_difference <= most, report.request
        assert set((report.options or {}).values()) <= {REPLAYED}


@every_result
def test_the_machine_was_calibrated(path: Path) -> None:
    """With a link that has a latency and a bandwidth, and passes that have a speed."""
    found = msgspec.convert(read(path).calibration, Calibration)
    assert found.one_way.fit.latency_seconds > 0
    assert found.one_way.fit.bandwidth_bytes_per_second is not None
    assert {each.name for each in found.collectives} == {"all-reduce", "broadcast", "reduce"}
    assert found.compute.speed_flop_per_second > 1e9


@every_result
def test_schedules_of_table_1_were_replayed(path: Path) -> None:
    """By ranks; and the trials that were made are on the list of today, in its order."""
    battery = read(path)
    assert {trial.state for trial in battery.trials} <= {"ok", "not within tolerance"}
    assert {trial.name for trial in battery.trials if trial.state != "ok"} <= DIFFERENT.get(path.stem, set())
    ran = {(r.asked.schedule, r.asked.n, r.asked.single_process) for r in battery.reports}
    assert {(schedule, 4, False) for schedule in TABLE_1} <= ran
    kept = [result.name for result in battery.trials]
    assert [name for name in trials_of(path) if name in kept] == kept


@pytest.mark.release
@every_result
def test_all_schedules_were_replayed(path: Path) -> None:
    """No trial is missing; a schedule that is new has results by the next release."""
    missing = set(trials_of(path)) - {result.name for result in read(path).trials}
    battery = f"python -m validation battery --device {device_of(path)} -o validation/results/{path.name} --resume"
    assert not missing, f"not replayed yet: {', '.join(sorted(missing))}; run {battery}"


@every_result
@pytest.mark.parametrize("n", [2, 4, 8])
def test_cyclic_execution_measures_half(path: Path, n: int) -> None:
    """Activations over all devices: (N+1)/2N of DP's, but for what a backward needs beyond them."""
    total = {
        report.asked.schedule: report.memory.total.measured_bytes
        for report in read(path).reports
        if (report.asked.model, report.asked.n, report.request["sizes"]) == ("transformer", n, "")
        and not report.options_text
    }
    for cyclic, simultaneous in (("multi-cdp", "multi-dp"), ("single-cdp", "single-dp"), ("mp-cdp", "mp-dp")):
        excess = total[cyclic] / total[simultaneous] - Fraction(n + 1, 2 * n)
        assert abs(excess) < 0.05, (cyclic, n)
