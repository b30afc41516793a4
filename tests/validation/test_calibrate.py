"""Calibration: a real run of two ranks, what it writes, and what it makes of times that are known."""

from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from cdpsim import simulate
from cdpsim.cluster import Cluster, Workspace
from cdpsim.draw.canvas import rendered
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.model.layers import Layers
from cdpsim.program import Op
from tests.validation.made_reports import read_report
from validation.__main__ import main
from validation.calibrate import command as calibrate
from validation.calibrate import kernels, summaries, timings
from validation.calibrate.timings import Passed, RankInterval, StageTimes, repetitions
from validation.profile.fits import algorithms, predict_collective
from validation.program import serve_harness
from validation.report.figure import draw_calibration
from validation.report.schema import Calibration, Errors, KernelFit, OperationTime, OverlapTimes
from validation.training.models import Stages
from validation.training.optimizer import OPTIMIZERS

STAGES = Stages("transformer", 2, 2, "float32", OPTIMIZERS["adam"], {"width": 32, "length": 8})
SIZES = (8, 4096, 2**18)
LAYER = Layers(layers=1, width=32, heads=4, length=8, vocabulary=1)
OVERLAPS = [OverlapTimes(2**20, 2e-3, 5e-3, both) for both in (6e-3, 6.5e-3, 9e-3)]
Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Done:
    """A calibration that was really run."""

    folder: Path
    found: Calibration


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("calibration")
    request = calibrate.CalibrationRequest(stages=STAGES, sizes=SIZES, rounds=4, layer=LAYER)
    return Done(folder, calibrate.calibrate_machine(folder / "box.toml", request, stages_output=folder / "stages.toml"))


@pytest.mark.slow
def test_a_run_writes_all_of_its_files(done: Done) -> None:
    assert sorted(path.name for path in done.folder.iterdir()) == ["box.json", "box.png", "box.toml", "stages.toml"]
    assert (done.folder / "box.png").read_bytes().startswith(b"\x89PNG")
    assert msgspec.json.decode((done.folder / "box.json").read_bytes(), type=Calibration) == done.found
    assert done.found.request["stages"]["sizes"] == {"width": 32, "length": 8}


def test_what_was_measured_is_kept_where_no_picture_can_be_drawn(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(found: Calibration) -> NoReturn:
        raise ValueError("no font")

    monkeypatch.setattr(calibrate, "Ranks", lambda *_, **__: nullcontext())
    monkeypatch.setattr(calibrate, "measure_machine", lambda *_: done.found)
    monkeypatch.setattr(calibrate, "draw_calibration", fail)
    with pytest.raises(ValueError, match="no font"):
        calibrate.calibrate_machine(
            tmp_path / "box.toml", calibrate.CalibrationRequest(stages=STAGES), stages_output=tmp_path / "stages.toml"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box.json", "box.toml", "stages.toml"]
    assert (tmp_path / "box.toml").read_bytes() == (done.folder / "box.toml").read_bytes()


def test_every_number_measured_is_positive_and_finite(done: Done) -> None:
    found = done.found
    collectives = [point for each in found.collectives for point in each.points]
    assert [each.name for each in found.collectives] == ["all-reduce", "broadcast", "reduce"]
    for point in [*found.one_way.points, *found.both_ways.points, *collectives]:
        assert 0 < point.fastest <= point.faster <= point.seconds <= point.slower < 60
        assert point.repetitions == repetitions(point.size)
    assert {task.kind for task in found.compute.tasks} == set(StageTimes._fields)
    for task in found.compute.tasks:
        assert 0 < task.faster <= task.seconds <= task.slower < 60
        assert task.repetitions == 2 * 4  # of both ranks
    assert 0 < found.compute.speed_flop_per_second < 1e18
    assert isfinite(found.compute.slowdown)


def test_one_size_of_group_tells_no_algorithm_from_another(done: Done) -> None:
    all_reduce = done.found.collectives[0]
    assert all_reduce.best_fit is None
    assert set(all_reduce.fits) == set(algorithms(Op.ALL_REDUCE))
    assert all_reduce.best in all_reduce.fits


def test_the_cluster_file_is_one_that_cdpsim_runs_on(done: Done) -> None:
    cluster = Cluster.load(done.folder / "box.toml")
    cluster.save(done.folder.parent / "again.toml", force=True)
    assert Cluster.load(done.folder.parent / "again.toml") == cluster
    assert cluster.link.latency == pytest.approx(done.found.one_way.fit.latency_seconds, rel=1e-3)
    assert cluster.link.bandwidth == pytest.approx(done.found.one_way.fit.bandwidth, rel=1e-3)
    assert cluster.speeds(1) == [pytest.approx(done.found.compute.speed_flop_per_second, rel=1e-3)]


def test_the_cluster_file_prices_a_model_of_layers(done: Done) -> None:
    """By shares that are those of the calibration, in which every operation of a layer was timed."""
    (devices,) = Cluster.load(done.folder / "box.toml").devices
    fit = done.found.kernels
    assert fit is not None and devices.kernels is not None
    for name in ("products", "core", "passes", "launch", "meet", "beside"):
        assert getattr(devices.kernels, name) == pytest.approx(getattr(fit, name), rel=1e-3)
    assert (devices.speed, devices.memory_bandwidth) == pytest.approx((fit.speed, fit.memory_bandwidth), rel=1e-3)
    alone, back = {"copy", "sum", "large copy"}, {"product", "core", "norm", "gelu", "layer"}
    assert {each.name for each in fit.operations} == alone | back | {f"{name} backward" for name in back}
    assert all(0 < each.seconds < 60 for each in fit.operations)
    model = Model.of_layers(LAYER, samples=2, precision="fp32")
    run = simulate("dp", n=1, replicas=2, model=model, cluster=str(done.folder / "box.toml"))
    products = 3 * 24 * 2 * 8 * 32**2 / (fit.speed * fit.products)
    assert run.summary()["makespan"] > products


def test_the_cluster_file_has_what_kernels_take(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transformer in float32 nothing; a GPU's allocator also counts what libraries keep, in the first rank."""
    (devices,) = Cluster.load(done.folder / "box.toml").devices
    assert (done.found.workspace, devices.workspace) == ({}, Workspace())
    taken = {"kept": 65 * 2**20, "backward": [1, 2]}
    (devices,) = calibrate.cluster_of(
        structs.replace(done.found, workspace=taken), calibrate.CalibrationRequest()
    ).devices
    assert devices.workspace == Workspace(kept=65 * 2**20, backward=(1, 2))
    monkeypatch.setattr(timings, "allocator_count", lambda *_: 65 * 2**20)
    other: Any = SimpleNamespace(rank=1, device=torch.device("cuda"))
    assert timings.measure_workspace(other, STAGES) == {"kept": 65 * 2**20}


def test_a_calibration_from_before_operations_were_timed_is_read(done: Done) -> None:
    """It says one speed, and nothing of kernels."""
    older = msgspec.json.decode(msgspec.json.encode(done.found))
    del older["kernels"], older["workspace"], older["request"]["layer"]
    found = msgspec.convert(older, Calibration)
    (devices,) = calibrate.cluster_of(found, calibrate.CalibrationRequest(stages=STAGES)).devices
    assert (devices.kernels, devices.achieved, devices.memory_bandwidth) == (None, None, None)
    assert "kernels" not in calibrate.calibration_summary(found)


def test_the_model_file_has_each_stages_own_seconds(done: Done) -> None:
    model = Model.load(done.folder / "stages.toml")
    seconds = {(task.stage, task.kind): task.seconds for task in done.found.compute.tasks}
    assert model.n == STAGES.n
    for j, stage in enumerate(model.stages):
        assert stage.forward == pytest.approx(seconds[j, "forward"], rel=1e-3)
        assert stage.backward == pytest.approx(seconds[j, "backward"], rel=1e-3)
        assert stage.activation > 0
        assert stage.weight_backward is not None
        assert stage.has_input_part == (j > 0)
    times = simulate("multi-cdp", model=str(done.folder / "stages.toml"), cluster=str(done.folder / "box.toml"))
    assert times.summary()["makespan"] > sum(stage.forward + stage.backward for stage in model.stages) / 2


def replay(done: Done, report: Path, *words: str) -> int:
    """Replay 1F1B in this process by the files of a calibration."""
    files = ["--cluster", str(done.folder / "box.toml"), "--stages", str(done.folder / "stages.toml")]
    alone = ["--single-process", "--repeats", "1", "-o", str(report), "--force"]
    return main(["replay", "1f1b", "-n", "2", *files, *alone, *words])


def test_a_replay_by_both_files_is_that_of_what_was_calibrated(done: Done, tmp_path: Path, capsys: Capture) -> None:
    """Model, samples, type and optimizer come from there, and torch's Adam keeps 4 bytes for its count of steps, too.

    A stage of width 32 has 32 x 96 + 32 x 32 + 2 x 32 x 128 numbers in matrices, 32 + 128 + 32 in biases, and 4 x 32 in
    norms. Time has no tolerance, and is not judged.
    """
    assert replay(done, tmp_path / "report.json") == 0
    *_, time, verdict = capsys.readouterr().out.splitlines()
    assert time.startswith("time  ")
    assert (time[-12:], verdict) == ("; not judged", "ok")
    report = read_report(tmp_path / "report.json")
    asked = ("model", "sizes", "batch", "dtype", "optimizer")
    assert [report.request[name] for name in asked] == ["transformer", "width=32 length=8", 2, "float32", "adam"]
    numbers = 32 * 96 + 32 * 32 + 2 * 32 * 128 + (32 + 128 + 32) + 4 * 32
    held = report.memory.devices[0].categories
    assert (held["parameters"].measured_bytes, held["optimizer"].measured_bytes) == (4 * numbers, 8 * numbers + 4)


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--dtype float64", "stages.toml: is of --dtype float32, and --dtype float64 is given"),
        ("--batch 4", "stages.toml: is of --batch 2, and --batch 4 is given"),
        ("--optimizer momentum", "stages.toml: is of --optimizer adam, and --optimizer momentum is given"),
        ("--model mlp", "stages.toml: is of --model transformer, and --model mlp is given"),
        ("--size width=16", "stages.toml: is of --size width=32, and --size width=16 is given"),
        (
            "--size layers=2",
            "stages.toml: stage 0 has 50,432 B of parameters, and that of transformer 100,864 B",
        ),
        ("--cluster four.toml", "four.toml: is of --batch 4, and stages.toml of --batch 2"),
    ],
)
def test_a_replay_of_something_else_is_refused_with_both_values(
    done: Done, words: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("four.toml").write_text((done.folder / "box.toml").read_text().replace("samples = 2", "samples = 4"))
    assert replay(done, tmp_path / "report.json", *words.split()) == 2
    line = capsys.readouterr().err.replace(f"{done.folder}/", "")
    assert line.startswith(f"cdpsim: error: {difference}; ")
    assert line.count("\n") == 1
    assert not Path("report.json").exists()


def test_a_cluster_alone_says_samples_type_and_optimizer(done: Done, tmp_path: Path) -> None:
    """Of a model that it does not say."""
    words = ["replay", "1f1b", "-n", "2", "--cluster", str(done.folder / "box.toml"), "--repeats", "1"]
    assert main([*words, "--single-process", "-o", str(tmp_path / "report.json")]) == 0
    report = read_report(tmp_path / "report.json")
    asked = ("model", "batch", "dtype", "optimizer")
    assert [report.request[name] for name in asked] == ["mlp", 2, "float32", "adam"]


def test_what_was_found_can_be_told_in_a_few_lines(done: Done) -> None:
    """The summary also says whether other programs were using the machine."""
    quiet = summaries.summarize_transfers({size: [[LATENCY] * 3] * 2 for size in SIZES})
    busy = summaries.summarize_transfers({size: [[LATENCY, 0.004, 0.004], [0.004] * 3] for size in SIZES})
    for messages, more in ((quiet, 0), (busy, 1)):
        lines = calibrate.calibration_summary(msgspec.structs.replace(done.found, one_way=messages)).splitlines()
        assert len(lines) == 8 + more
        assert lines[6].startswith("kernels: products ")
        assert lines[0].startswith("link: ")
    assert lines[-1].startswith("messages took 80.0 times as long")


def test_a_calibration_is_not_overwritten(done: Done) -> None:
    with pytest.raises(RequestError, match="--force"):
        calibrate.calibrate_machine(done.folder / "box.toml", calibrate.CalibrationRequest(stages=STAGES))


LATENCY, BANDWIDTH = 5e-5, 2e9


def series(seconds: float) -> list[list[float]]:
    """The second of three series is the undisturbed one."""
    return [[k * seconds for k in own] for own in ((2, 9, 9), (0.9, 1, 1.1), (1, 7, 8))]


def test_the_quietest_series_counts() -> None:
    times = {size: series(LATENCY + size / BANDWIDTH) for size in (8, 2**12, 2**20, 2**26)}
    found = summaries.summarize_transfers(times)
    assert found.fit.latency_seconds == pytest.approx(LATENCY)
    assert found.fit.bandwidth == pytest.approx(BANDWIDTH)
    assert [point.faster / point.seconds for point in found.points] == pytest.approx([0.95] * 4)


@pytest.mark.parametrize("name", algorithms(Op.ALL_REDUCE))
def test_the_algorithm_is_found_that_times_were_made_of(name: str) -> None:
    """Each rank begins a little later than the one before, and only the last one's beginning counts."""
    link = summaries.summarize_transfers(
        {size: [[LATENCY + size / BANDWIDTH] * 3] for size in (8, 2**12, 2**20, 2**26)}
    ).fit
    spans = {}
    for ranks in (2, 3, 4, 5):
        took = {
            size: predict_collective(Op.ALL_REDUCE, name, ranks, size, LATENCY, BANDWIDTH)
            for size in (8, 2**12, 2**20, 2**26)
        }
        spans[ranks] = [
            {
                size: [[RankInterval(-0.1 * (ranks - 1 - rank), seconds - 0.01 * rank)] * 3]
                for size, seconds in took.items()
            }
            for rank in range(ranks)
        ]
    found = summaries.summarize_collective(Op.ALL_REDUCE, spans, link)
    assert (found.best_fit, found.best) == (name, name)
    assert found.fits[name].max_relative_error < 1e-6
    assert found.on_link[name].max_relative_error < 1e-6


def passed(seconds: float) -> list[Passed]:
    return [Passed(seconds, seconds)] * 3


def test_speed_and_slowdown_come_out_of_passes_alone() -> None:
    """Speed is that of all ranks at work, unless one of them alone is asked for."""
    busy = [StageTimes(*map(passed, (2.0, 4.0, 100.0, 3.0, 3.0)))]
    quiet = [StageTimes(*map(passed, (1.0, 2.0, 1.0, 3.0, 3.0)))]
    found = summaries.summarize_compute(busy, quiet, [(20.0, 40.0)], False)
    assert (found.speed_flop_per_second, found.slowdown) == (10.0, 2.0)
    assert found.relative_errors == [0.0, 0.0]
    assert [task.flop_per_second for task in found.tasks] == [10.0, 10.0, None, None, None]
    found = summaries.summarize_compute(busy, quiet, [(20.0, 40.0)], True)
    assert (found.speed_flop_per_second, found.slowdown) == (20.0, 2.0)


def operations(flops: float, core: float, moved: float, copied: float, launch: float) -> list[OperationTime]:
    """Forwards and backwards at these FLOP/s and B/s."""
    found = [OperationTime("large copy", "copy", 0, 0, 1, 0.0, 1e9, 1e9 / copied)]
    for width in (10.0, 1000.0):
        work, size = 1e6 * width**2, 1e5 * width
        for times in (1, 2):
            found.append(OperationTime("x", "product", 0, 0, times, work, size, times * work / flops))
            found.append(OperationTime("x", "core", 0, 0, times, work, 0.0, times * work / core))
            found.append(OperationTime("x", "pass", 0, 0, times, 0.0, size, times * (launch + size / moved)))
    return found


def test_shares_come_out_of_times_that_are_made_of_them() -> None:
    """Of what stages reach where this is more than products do; of two ranks, the medians."""
    slow = operations(flops=6e12, core=2e12, moved=0.7e12, copied=0.9e12, launch=1e-5)
    fast = [structs.replace(each, seconds=each.seconds / 3) for each in slow]
    fit = kernels.fit_kernels([slow], 8e12, 2e-5, OVERLAPS)
    assert (fit.speed, fit.memory_bandwidth, fit.meet) == pytest.approx((8e12, 0.9e12, 2e-5))
    assert (fit.products, fit.core, fit.passes) == pytest.approx((6 / 8, 2 / 8, 7 / 9))
    assert fit.launch == pytest.approx(1e-5)
    both = kernels.fit_kernels([slow, fast], 1e12, 0.0, OVERLAPS)
    assert (both.speed, both.memory_bandwidth) == pytest.approx((9e12, 1.35e12))
    assert (both.products, both.core, both.passes) == pytest.approx((1, 2 / 6, 7 / 9))


def test_a_product_hides_what_both_together_save() -> None:
    """Of a product of 2 ms and an all-reduce of 5 ms: half a product if both take 6 ms; all of it, or nothing."""
    assert kernels.hidden_share(structs.replace(OVERLAPS[0], both=6e-3)) == pytest.approx(0.5)
    assert kernels.hidden_share(structs.replace(OVERLAPS[0], both=4.9e-3)) == 1.0
    assert kernels.hidden_share(structs.replace(OVERLAPS[0], both=7.1e-3)) == 0.0
    fit = kernels.fit_kernels([operations(6e12, 2e12, 0.7e12, 0.9e12, 1e-5)], 1e12, 0.0, OVERLAPS)
    assert (fit.beside, fit.overlap.both) == pytest.approx((0.25, 6.5e-3))  # the median of its ranks


def test_an_exchange_lasts_longer_than_the_product_beside_it(done: Done) -> None:
    """Twice as long, if there is such a size; of the narrow layer's largest product, on all ranks."""
    all_reduce = done.found.collectives[0]
    seconds = {point.size: point.seconds for point in all_reduce.points}
    narrow = OperationTime("product", "product", 16, 8, 1, 1.0, 1.0, 0.4 * seconds[2**18])
    wide = structs.replace(narrow, width=64, seconds=1e9)
    least = next(size for size in SIZES if seconds[size] > 0.8 * seconds[2**18])
    assert kernels.size_beside([narrow, wide], all_reduce) == least
    assert kernels.size_beside([structs.replace(narrow, seconds=1e9), wide], all_reduce) == 2**18


def test_passes_that_a_cache_holds_reach_the_whole_bandwidth() -> None:
    fit = kernels.fit_kernels([operations(6e12, 2e12, moved=2e12, copied=1e12, launch=0.0)], 1e12, 0.0, OVERLAPS)
    assert (fit.memory_bandwidth, fit.passes) == pytest.approx((2e12, 1.0))


def test_models_of_work_take_as_long_as_the_stages_did() -> None:
    """Whichever is faster, a product or a stage."""
    for reached in (1.2345e12, 8e12):
        fit = kernels.fit_kernels([operations(6e12, 2e12, 0.7e12, 0.9e12, 1e-5)], reached, 0.0, OVERLAPS)
        devices = kernels.devices_of(reached, fit)
        assert devices.speed_in("fp32") == pytest.approx(summaries.round_measured(reached), rel=1e-15)
        assert devices.peak_in("fp32") == max(reached, 6e12)


def test_a_whole_layer_is_held_against_its_operations() -> None:
    """Of b samples and s tokens: products of 24 b s h^2 and a causal core of 2 b s^2 h FLOP, and six passes.

    Backwards are two products and passes, and two and a half cores; memory costs nothing here. It took twice as long.
    """
    shape = Layers(layers=1, width=64, heads=4, length=16, vocabulary=1)
    fit = KernelFit([], 1e12, 1e18, 0.5, 0.25, 1.0, 1e-6, 0.0, 1.0, OVERLAPS[0])
    products, core = 24 * 4 * 16 * 64**2 / 0.5e12, 2 * 4 * 16**2 * 64 / 0.25e12
    whole = 3 * products + 3.5 * core + 3 * 6 * 1e-6
    parts = [OperationTime("layer", "layer", 64, 64, 1, 0.0, 0.0, seconds) for seconds in (0.5 * whole, 1.5 * whole)]
    fit = structs.replace(fit, operations=parts)
    held = kernels.held_against(fit, kernels.devices_of(1e12, fit), shape, "float32")
    assert held.layer_relative_error == pytest.approx(-0.5)


@pytest.mark.parametrize("more", [3e-4, -1e-5])
def test_ranks_meet_for_what_the_link_does_not_explain(more: float) -> None:
    """At the smallest size, and not less than nothing; all ranks begin together."""
    link = Errors(LATENCY, BANDWIDTH, 0.0, 0.0, [])
    spans = {}
    for ranks in (2, 3, 4):
        took = {
            size: min(
                predict_collective(Op.ALL_REDUCE, name, ranks, size, LATENCY, BANDWIDTH)
                for name in algorithms(Op.ALL_REDUCE)
            )
            for size in SIZES
        }
        spans[ranks] = [{size: [[RankInterval(0.0, took[size] + more)] * 3] for size in SIZES}] * ranks
    found = summaries.summarize_collective(Op.ALL_REDUCE, spans, link)
    assert kernels.meeting_time(found) == pytest.approx(max(0.0, more))


def test_ranks_speak_for_the_same_stages() -> None:
    one, two = (StageTimes(*map(passed, range(first, first + 5))) for first in (1, 4))
    (both,) = summaries.pool_ranks([[one], [two]])
    assert [p.seconds for p in both.backward] == [2.0] * 3 + [5.0] * 3


def test_what_a_backward_does_not_take_for_its_input_it_takes_for_its_weights() -> None:
    """In a model of times; where a replay splits backwards, it takes what both parts take there."""
    weights = [Work(2), Work(1), Work(1)]
    model = Model(stages=tuple(Stage(forward=Work(1), backward=Work(2), weight_backward=part) for part in weights))
    taken = [(1.0, 8.0, 0.1, 0.5, 8.0), (1.0, 8.0, 0.1, 3.0, 7.0), (1.0, 8.0, 0.1, 9.0, 7.0)]
    tasks = summaries.summarize_tasks([StageTimes(*map(passed, own)) for own in taken])
    whole, parts = (summaries.timed_model(model, tasks, "x", split=split).stages for split in (False, True))
    assert [(stage.backward, stage.weight_backward) for stage in whole] == [(8, 8), (8, 5), (8, 0.08)]
    assert [(stage.backward, stage.weight_backward) for stage in parts] == [(8.5, 8), (10, 7), (16, 7)]


def test_times_that_do_not_grow_can_be_drawn(done: Done) -> None:
    flat = summaries.summarize_transfers({size: [[LATENCY] * 3] for size in SIZES})
    assert flat.fit.bandwidth_bytes_per_second is None
    assert rendered(draw_calibration(msgspec.structs.replace(done.found, one_way=flat)), "flat.png")


@pytest.mark.slow
def test_the_same_calibration_gives_the_same_picture(done: Done) -> None:
    drawn = [rendered(draw_calibration(done.found), f"{name}.png") for name in "ab"]
    assert drawn[0] == drawn[1]


REFUSED = {
    "nobody to send to": (["--ranks", "1"], "ranks"),
    "no GPU for nccl": (["--backend", "nccl", "--device", "cuda", "--ranks", "99"], "use --backend gloo"),
    "unknown device": (["--device", "gpu"], "cpu"),
    "unknown model": (["--model", "transformr"], "did you mean 'transformer'"),
    "unknown type": (["--dtype", "float8"], "dtype"),
    "unknown size": (["--size", "wdth=3"], "did you mean 'width'"),
    "size without value": (["--size", "width"], "length=512"),
    "what is no size": (["--size", "batch=3"], "no size of a model"),
    "stages in JSON": (["--stages", "stages.json"], r"\.toml"),
    "one name twice": (["--stages", "box.toml"], "--stages"),
}


@pytest.mark.parametrize(("arguments", "problem"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_line_and_leave_nothing(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["calibrate", "-o", "box.toml", *arguments]
    with pytest.raises(RequestError, match=problem) as refusal:
        serve_harness([calibrate.calibrate_command], words)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())
