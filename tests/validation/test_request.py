"""The command `replay`, from its options to the report; a refused request writes nothing."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace

from cdpsim.model import Model
from tests.conftest import Outcome
from tests.validation.made_reports import read_report
from validation.__main__ import main
from validation.comparison import command as request
from validation.comparison import replays as trial
from validation.replay.case import Case, profiled
from validation.replay.contents import Message, ReplayError
from validation.replay.transport import InProcess
from validation.report.schema import Report

Replay = Callable[..., Outcome]
COMMANDS = ("replay", "profile", "calibrate", "report", "battery")
FILES = {
    "there.json": "something else",
    "fresh.csv": "1,1\n1,1\n",
    "three.csv": "0,0,0\n0,0,1\n0,1,1\n",
    "two.csv": "0,2\n0,0\n",
    "box.toml": '[devices]\nspeed = "1 GFLOPS"\n[link]\nlatency = "5 us"\nbandwidth = "1 GB/s"\n',
    "slow.toml": '[devices]\nmemory = "1 GB"\n',
    "few.toml": '[devices]\ncount = 1\nspeed = "1 GFLOPS"\n',
}


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Replay:
    """Replay in this process, at n = 2 where nothing else is said, in a folder with some files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def call(*words: str, schedule: str = "multi-cdp", n: str = "2", repeats: str = "0", alone: bool = True) -> Outcome:
        capsys.readouterr()
        options = ["-n", n, "--repeats", repeats, *["--single-process"] * alone]
        code = main(["replay", schedule, *options, *([] if "-o" in words else ["-o", "report.json"]), *words])
        return Outcome(code, *capsys.readouterr())

    return call


# Output


def test_a_report_within_tolerance_is_success(replay: Replay) -> None:
    """Told in a few lines, of which the last says so."""
    done = replay("--optimizer", "adam")
    report = read_report("report.json")
    assert (done.code, report.ok, done.err) == (0, True, "")
    assert done.out == request.report_summary(report)
    assert done.out.splitlines()[-1] == "ok"


def test_a_report_has_the_keys_of_the_contract(replay: Replay) -> None:
    replay(repeats="1")
    written = json.loads(Path("report.json").read_text())
    assert {"request", "environment", "parameters", "memory", "messages", "time", "ok"} <= written.keys()
    assert {"max_abs_difference", "bit_equal"} <= written["parameters"].keys()
    assert {"devices", "max_relative_error"} <= written["memory"].keys()
    for device in written["memory"]["devices"]:
        assert {"device", "simulated_bytes", "measured_bytes", "relative_error"} <= device.keys()
    assert {"simulated", "measured"} <= written["messages"].keys()
    assert {"simulated_seconds", "measured_seconds", "relative_error"} <= written["time"].keys()


@pytest.mark.slow
def test_a_request_is_reported_as_it_was_made(replay: Replay) -> None:
    replay(*("--steps", "2", "--rule", "cdp-v1", "--model", "transformer", "--size", "width=8", "--size", "layers=2"))
    asked = read_report("report.json").request
    assert (asked["schedule"], asked["n"], asked["steps"], asked["rule"]) == ("multi-cdp", 2, 2, "cdp-v1")
    assert (asked["model"], asked["sizes"], asked["cuts"]) == ("transformer", "width=8 layers=2", "2")
    assert (asked["single_process"], asked["backend"]) == (True, None)


def test_options_are_reported_with_what_became_of_them(replay: Replay) -> None:
    done = replay(
        "--recompute", "full", "--dtype", "bfloat16", "--mixed-precision", "--optimizer", "adam", schedule="zb-h1"
    )
    report = read_report("report.json")
    why = "not replayed, as zb-h1 splits backwards, and each of the two parts would compute the forward again"
    assert report.options == {"mixed_precision": "replayed", "recompute": why}
    assert (report.request["recompute"], report.request["mixed_precision"], report.ok) == ("full", True, True)
    assert done.out.splitlines()[-3:] == [
        "options     mixed_precision: replayed",
        f"            recompute: {why}",
        "ok",
    ]


def test_a_model_file_is_trained_by_its_recipe(replay: Replay) -> None:
    """And recomputes and offloads as the replay does: a stage as one segment."""
    profiled_by = ["profile", "mlp", "-n", "2", "--dtype", "bfloat16", "--mixed-precision", "--optimizer", "sgd"]
    assert main([*profiled_by, "-o", "mixed.toml"]) == 0
    words = ("--stages", "mixed.toml", "--dtype", "bfloat16", "--mixed-precision", "--optimizer", "sgd")
    done = replay(*words, "--recompute", "full", "--offload", "all", schedule="1f1b")
    assert (done.code, read_report("report.json").ok) == (0, True)


def test_ranks_of_its_own_are_started(replay: Replay) -> None:
    """A process for each device, timed too; nothing of that goes to stderr."""
    done = replay("--timeout", "60", schedule="pp-cdp", repeats="1", alone=False)
    report = read_report("report.json")
    assert (done.code, done.err, report.ok) == (0, "", True)
    assert (report.asked.single_process, report.asked.backend) == (False, "gloo")
    assert report.time is not None
    assert [device.device for device in report.time.devices] == [0, 1]


def test_a_rule_from_a_file_is_replayed(replay: Replay) -> None:
    Path("stale.csv").write_text("0,0\n0,1\n")
    assert replay("--rule", "stale.csv").code == 0
    assert read_report("report.json").asked.rule == "((1, 1), (1, 0))"


def test_a_pipeline_is_replayed_as_large_as_is_asked_for(replay: Replay) -> None:
    done = replay("-m", "3", "--chunks", "2", "--replicas", "2", schedule="interleaved-1f1b", n="4", repeats="1")
    report = read_report("report.json")
    assert (done.code, done.err, report.ok) == (0, "", True)
    assert [report.request[name] for name in ("n", "m", "chunks", "replicas")] == [4, 3, 2, 2]
    assert len(report.memory.devices) == 4 // 2 * 2


@pytest.mark.parametrize("order", ["forward-first", "backward-first"])
def test_one_device_takes_a_slot_order(replay: Replay, order: str) -> None:
    assert replay("--slot-order", order, schedule="single-cdp").code == 0
    assert read_report("report.json").request["slot_order"] == order


def test_a_report_is_overwritten_where_that_is_asked_for(replay: Replay) -> None:
    assert replay("-o", "there.json", "--force").code == 0
    assert read_report("there.json").ok


# Files that it reads


def saved_stages(path: str, **more: int) -> Model:
    """Write the model file of the default case at n = 2, its last stage with so much more of some things."""
    model = profiled(Case("multi-cdp", 2)).stages
    assert model is not None
    stages = model.stages
    last = replace(stages[-1], **{name: getattr(stages[-1], name) + size for name, size in more.items()})
    model = Model(name="two perceptrons", stages=(*stages[:-1], last))
    model.save(path)
    return model


def test_the_model_file_that_was_given_is_named_by_its_hash(replay: Replay) -> None:
    saved_stages("stages.toml")
    assert replay("--stages", "stages.toml", "--optimizer", "sgd").code == 0
    found = read_report("report.json").request["model_sha256"]
    assert found == sha256(Path("stages.toml").read_bytes()).hexdigest()


def test_a_model_file_with_other_bytes_is_not_within_tolerance(replay: Replay) -> None:
    """The report is there and says where they part: when the first micro-batch reaches the last stage."""
    saved_stages("stages.toml", activation=4000)
    done = replay("--stages", "stages.toml", "--optimizer", "sgd")
    report = read_report("report.json")
    assert (done.code, report.ok, done.err) == (1, False, "")
    assert report.memory.max_relative_error > report.memory.tolerance
    assert "device 0 parts in slot 1, F(t=0,i=0,j=1), in activations: " in done.out
    assert done.out.splitlines()[-1] == "not within tolerance"


def test_times_are_foretold_from_a_cluster_file(replay: Replay) -> None:
    """A billion operations a second on one device after another: seconds are what the stages' work comes to."""
    assert replay("--cluster", "box.toml", repeats="1").code == 0
    time = read_report("report.json").time
    assert time is not None
    model = profiled(Case("multi-cdp", 2)).stages
    assert model is not None
    work = sum(float(stage.forward + stage.backward) for stage in model.stages)
    assert time.simulated_seconds == pytest.approx(3 * 2 * work / 1e9)
    assert time.calibration == "box.toml"


# Refusals

REFUSED: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "nlp"], "unknown model 'nlp'; known are mlp, "),
    "model of nobody": (["--model", "nowhere:build"], "cannot be imported"),
    "type": (["--dtype", "float46"], "did you mean 'float64'"),
    "optimizer": (["--optimizer", "lion"], "known are sgd, momentum, adam, adamw, adafactor"),
    "optimizer that divides by 0": (["--dtype", "float16", "--optimizer", "adam"], "which is 0 in float16"),
    "mixed precision of wide numbers": (["--mixed-precision"], "take --dtype bfloat16 or float16"),
    "autocast of wide numbers": (["--autocast", "bf16"], "take --dtype float32"),
    "autocast": (["--autocast", "fp8", "--dtype", "float32"], "unknown autocast 'fp8'"),
    "recomputation": (["--recompute", "half"], "unknown recompute 'half'"),
    "offload": (["--offload", "some"], "unknown offload 'some'"),
    "prefetch": (["--prefetch", "-1"], "must be at least 0"),
    "all-reduces where there are none": (["--reduce", "last"], "multi-cdp does not take this option"),
    "vertical sync": (["--rule", "vertical-sync"], "multi-cdp does not take vertical-sync; pipedream does"),
    "backend": (["--backend", "mpi"], "known are gloo, nccl"),
    "backend for nobody": (["--backend", "nccl"], "sends nothing"),
    "device": (["--device", "tpu"], "unknown device 'tpu'; known are cpu, cuda"),
    "steps": (["--steps", "0"], "must be at least 1"),
    "half a step": (["--steps", "1.5"], "must be a whole number"),
    "seed": (["--seed", "-1"], "must be at least 0"),
    "batch": (["--batch", "0"], "must be at least 1"),
    "repeats": (["--repeats", "-1"], "must be at least 0"),
    "partition": (["--partition", "flop"], "did you mean 'flops'"),
    "cuts beyond the layers": (["--partition", "2"], "there are 2 layers"),
    "too many cuts": (["--size", "layers=2", "--partition", "1,2"], "makes 3 stages"),
    "rule": (["--rule", "cdp-v3"], "did you mean 'cdp-v2'"),
    "rule that is not causal": (["--rule", "dp"], r"not causal with cyclic timing: \(i=0, j=0\)"),
    "rule of a file that is not causal": (["--rule", "fresh.csv"], r"not causal with cyclic timing: \(i=0, j=0\)"),
    "rule of another shape": (["--rule", "three.csv"], "has 3 rows of 3"),
    "rule that is none": (["--rule", "two.csv"], "row 0, column 1 is '2'"),
    "rule file": (["--rule", "nowhere.csv"], "check its spelling"),
    "micro-batches": (["-m", "0"], "must be at least 1"),
    "micro-batches that are the schedule's to say": (["-m", "3"], "needs a multiple of its n=2 workers"),
    "chunks": (["--chunks", "2"], "multi-cdp does not take this option"),
    "replicas": (["--replicas", "2"], "multi-cdp does not take this option"),
    "timeout without ranks": (["--timeout", "3 s"], "waits for no rank"),
    "timeout": (["--timeout", "soon"], "write for example"),
    "slot order": (["--slot-order", "backward-first"], "multi-cdp does not take this option"),
    "collective": (["--collective", "star"], "unknown collective 'star'"),
    "output is there": (["-o", "there.json"], "--force overwrites"),
    "output is there, and something else is wrong": (
        ["-o", "there.json", "--model", "nlp"],
        "unknown model 'nlp'; known are mlp, ",
    ),
    "folder": (["-o", "nowhere/report.json"], "there is no folder"),
    "output is a folder": (["-o", "."], "choose another name"),
    "no output": (["-o", ""], "give a path"),
    "cluster": (["--cluster", "nowhere.toml", "--repeats", "1"], "check its spelling"),
    "cluster without speed": (["--cluster", "slow.toml", "--repeats", "1"], "give --cluster with a speed"),
    "cluster with too few devices": (["--cluster", "few.toml", "--repeats", "1"], "the schedule needs 2"),
    "stages that are a cluster": (["--stages", "box.toml"], "unknown field 'devices'"),
    "stages": (["--stages", "nowhere.toml"], "check its spelling"),
    "size": (["--size", "wdth=3"], "did you mean 'width'"),
    "size of something else": (["--size", "seed=3"], "seed is no size of a model"),
    "size without value": (["--size", "width"], "such as length=512"),
    "no width": (["--size", "width=0"], "must be at least 1"),
    "more than can be counted": (["--size", "width=100000000000"], "overflowed"),
    "heads that do not fit": (["--model", "transformer", "--size", "width=15"], "must divide the width"),
    "option": (["--ste", "3"], "did you mean '--steps'"),
    "option of simulations alone": (["--compress", "int8"], "--compress: is not replayed, only simulated; leave"),
    "argument": (["mp-cdp"], "one argument too many"),
}


def check_refused(found: Outcome, problem: str) -> None:
    """One line on stderr, nothing on stdout, and the files as they were."""
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert re.match(rf"cdpsim: error: .*{problem}", found.err)
    assert {path.name: path.read_text() for path in Path().iterdir()} == FILES


@pytest.mark.parametrize(("words", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_one_line_and_writes_nothing(replay: Replay, words: list[str], problem: str) -> None:
    check_refused(replay(*words), problem)


OTHERS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "schedule": ({"schedule": "multi-cpd"}, [], "did you mean 'multi-cdp'"),
    "no stages": ({"n": "0"}, [], "n=0 must be at least 1"),
    "less than none": ({"n": "-2"}, [], "n=-2 must be at least 1"),
    "stages that are no number": ({"n": "two"}, [], "must be a whole number"),
    "more stages than layers": ({"n": "11"}, ["--model", "gpt2-mini"], "at most 10, the number of the model's layers"),
    "rule of another timing": ({"schedule": "multi-dp"}, ["--rule", "cdp-v1"], "does not go with the simultaneous"),
    "no time at all": ({"alone": False}, ["--timeout", "0"], "timeout"),
    "cluster without times": ({"repeats": "0"}, ["--cluster", "box.toml"], "is for times"),
    "nccl without GPUs": ({"alone": False}, ["--backend", "nccl"], "nccl needs a GPU for each rank"),
    "cuda without a GPU": ({}, ["--device", "cuda"], "use cpu"),
    "cuda for ranks": ({"alone": False}, ["--device", "cuda"], "use cpu"),
}


@pytest.mark.parametrize(("how", "words", "problem"), OTHERS.values(), ids=OTHERS)
def test_so_is_one_with_another_schedule_size_or_machine(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], words: list[str], problem: str
) -> None:
    if "gpt2-mini" in words:
        pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_refused(replay(*words, **how), problem)


MISSING = {
    "-n": ["replay", "multi-cdp", "-o", "report.json"],
    "-o/--output": ["replay", "multi-cdp", "-n", "2"],
    "NAME": ["replay", "-n", "2", "-o", "report.json"],
    "NAME, -n, -o/--output": ["replay"],
}


@pytest.mark.parametrize(("what", "words"), MISSING.items(), ids=MISSING)
def test_what_is_missing_is_named(
    replay: Replay, capsys: pytest.CaptureFixture[str], what: str, words: list[str]
) -> None:
    check_refused(Outcome(main(words), *capsys.readouterr()), rf"{what}: (is|are) missing; see .* --help")


def test_tied_stages_are_refused(replay: Replay) -> None:
    """A replay trains the parameters of each stage by themselves."""
    saved_stages("two.toml")
    tie = '[[tied]]\nstages = [0, 1]\nparameters = "4 B"\n'
    Path("tied.toml").write_text(Path("two.toml").read_text() + tie)
    problem = "ties stages [0, 1], and a replay trains each by itself; leave [[tied]] out"
    done = replay("--stages", "tied.toml")
    assert (done.code, done.err) == (2, f"cdpsim: error: tied.toml: {problem}\n")


def test_stages_of_another_number_are_refused(replay: Replay) -> None:
    saved_stages("two.toml")
    done = replay("--stages", "two.toml", n="3")
    assert (done.code, done.err) == (
        2,
        "cdpsim: error: two.toml: has 2 stages, not n=3; profile the model with -n 3\n",
    )
    assert not Path("report.json").exists()


def test_a_profile_is_replayed_as_it_was_made(replay: Replay) -> None:
    """Its samples, type and optimizer are not given again; where its stages say only bytes, those are held to it."""
    profile = ["profile", "mlp", "-n", "2", "--batch", "3"]
    assert main([*profile, "-o", "half.toml", "--dtype", "bfloat16", "--optimizer", "adam", "--mixed-precision"]) == 0
    assert replay("--stages", "half.toml").code == 0
    asked = read_report("report.json").request
    names = ("batch", "dtype", "optimizer", "mixed_precision")
    assert [asked[name] for name in names] == [3, "bfloat16", "adam", True]
    assert main([*profile, "-o", "wide.toml", "--optimizer", "adam"]) == 0
    done = replay("--stages", "wide.toml", "--force")
    said = "stage 0 has 8,580 B of optimizer state, and momentum keeps 4,288 B"
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith(f"cdpsim: error: wide.toml: {said}; ")
    assert replay("--stages", "wide.toml", "--force", "--optimizer", "adam").code == 0


def test_segments_of_stages_in_a_file_are_unknown(replay: Replay) -> None:
    saved_stages("two.toml")
    done = replay("--stages", "two.toml", "--recompute", "sqrt")
    assert (done.code, done.out, Path("report.json").exists()) == (2, "", False)
    assert "two.toml: does not say what the segments of its stages hold" in done.err


def test_a_replay_that_cannot_go_on_is_one_line(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a rank dies: the line says which."""

    def fail(*case: object, **options: object) -> NoReturn:
        raise ReplayError("rank 1: is gone (killed by SIGKILL)")

    monkeypatch.setattr(request, "compare_replay", fail)
    check_refused(replay(), r"rank 1: is gone \(killed by SIGKILL\)")


def test_a_message_that_is_skipped_is_one_line(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device that waits, the message, and the device that has not sent it."""
    send = InProcess._send

    def skips(self: InProcess, message: Message, tensor: Any) -> Any:
        return send(self, message, tensor) if message.step else None

    monkeypatch.setattr(InProcess, "_send", skips)
    lost = r"device 1 cannot begin p2p activation\(t=0,i=0,j=0\) between devices 0, 1: nothing came from device 0"
    check_refused(replay(schedule="pp-cdp"), lost)


def test_too_little_memory_is_one_line(replay: Replay) -> None:
    """More than a process can address, for samples that only the replay really draws."""
    check_refused(replay("--batch", str(300_000_000_000)), "memory: there is not enough")


# Its help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for option, most in (("--help", 40), ("--help-all", 200)):
        assert main([*[command] * bool(command), option]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: python -m validation {command}".rstrip())
        assert max(map(len, text.splitlines())) <= 100
        assert len(text.splitlines()) <= most
        assert "\nexamples:\n" in text


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\b", text, re.MULTILINE) for command in COMMANDS)


# Progress and messages


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a replay that was played and timed."""
    found = trial.compare_replay(Case("multi-cdp", 2), trial.SingleProcess(), repeats=1)
    assert found is not None
    return found


def test_what_is_exact_is_told_as_such(report: Report) -> None:
    lines = request.report_summary(report).splitlines()
    assert lines[0] == "parameters  bit-equal"
    assert re.fullmatch(r" {12}nearest other rule: .*, \S+ away; within 0.0e\+00 is ok", lines[1])
    assert re.fullmatch(r"memory      ([\d,]+) simulated, \1 measured B of .*, devices off by at most 0 %", lines[2])
    assert re.fullmatch(r"messages    (\d+) simulated, \1 measured", lines[3])
    assert re.match(r"allocator   ([\d,]+) simulated, \1 measured B at .* on device \d", lines[4])
    assert lines[5] == "needs       every message is needed, and none is missing"
    assert lines[6] == "lifetimes   as tasks and messages need them"
    assert re.fullmatch(r"time        \S+ simulated, \S+ measured s, off by \S+ %, .* \S+ %; not judged", lines[7])
    assert lines[8:] == ["ok"]


def test_what_is_off_is_told_with_its_tolerance(report: Report) -> None:
    parameters = replace(report.parameters, max_abs_difference=0.5, bit_equal=False, tolerance=1e-12)
    text = request.report_summary(replace(report, parameters=parameters, time=None, ok=False))
    assert text.startswith("parameters  differ by 0.5 (at most 1e-12)\n")
    assert text.endswith("\ntime        not compared\nnot within tolerance\n")
