"""A battery of trials: each result is saved as soon as there is one, and a trial that fails harms no other."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

import torch
from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.schedules import SCHEDULES, TABLE_1
from tests.validation.cases import tiny
from tests.validation.made_reports import Made
from tests.validation.processes import HANGS, alive, descendants, ended
from validation.__main__ import main
from validation.comparison import battery
from validation.comparison.replays import request_of
from validation.comparison.trials import LEADING, Group, Trial, list_trials, select_trials, trial_names
from validation.comparison.worker import Answer, Calibrated, Failed, Replayed, Worker, failure_of
from validation.replay.case import Case
from validation.replay.contents import ReplayError
from validation.replay.options import replayable
from validation.report import command as report
from validation.report import schema as reportform
from validation.report.environment import environment
from validation.report.schema import Battery, Report, TrialResult
from validation.training.modules import Unfit

DEVICES = ("cpu", "cuda")


def read(path: Path) -> Battery:
    """Read a battery as another process would: the command that writes it has not read it."""
    found = reportform.decode_report(path.read_text(), str(path))
    assert isinstance(found, Battery)
    return found


def states(path: Path) -> dict[str, str]:
    return {result.name: result.state for result in read(path).trials}


# For real: processes that run out of memory, hang, fail and die


@pytest.fixture
def these(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let batteries consist of these trials alone."""
    return lambda *found: monkeypatch.setattr(battery, "list_trials", lambda device: list(found))


HARMS = {
    "out_of_memory": ("out of memory", r"can't allocate memory"),
    "killed": ("killed", r"^its process is gone \(killed by SIGKILL\)$"),
    "raises": ("error", r"^KeyError: 'as the test wants"),
    "nowhere": ("refused", r"^tests\.validation\.fatal:nowhere: tests.validation.fatal has no function 'nowhere'"),
}


def test_one_failure_loses_nothing_else(
    these: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is recorded with a word and a line for why; on the next try only those are made that have failed.

    The last trial is profiled with its options: the state of its optimizer is on the host.
    """
    bad = [tiny(harm, model=f"tests.validation.fatal:{harm}") for harm in HARMS]
    these(tiny("first"), *bad, tiny("last", offload="all"))
    words = ["battery", "--device", "cpu", "-o", str(tmp_path / "battery.json")]
    assert main(words) == 1
    output, found = capsys.readouterr(), read(tmp_path / "battery.json")
    assert re.fullmatch(r"6 trials in [\d.]+ s: 2 ok, 4 failed\n", output.out)
    assert len(output.err.splitlines()) == len(HARMS)
    for line, result, (harm, (failure, reason)) in zip(
        output.err.splitlines(), found.trials[1:-1], HARMS.items(), strict=True
    ):
        assert (result.name, result.state, result.failure) == (f"{harm}/single-cdp", "failed", failure)
        assert result.reason is not None
        assert re.search(reason, result.reason)
        assert line.startswith(f"cdpsim: {harm}/single-cdp: failed ({failure}): ")
    assert list(found.by_name) == ["first/single-cdp", "last/single-cdp+offload=all"]
    assert all(each.ok for each in found.reports)
    these(tiny("first"), *(tiny(harm) for harm in HARMS), tiny("last", offload="all"))
    assert main([*words, "--resume"]) == 0
    again = read(tmp_path / "battery.json")
    assert set(states(tmp_path / "battery.json").values()) == {"ok"}
    assert (again.reports[0], again.reports[-1]) == tuple(found.reports)
    assert (again.trials[0], again.trials[-1]) == (found.trials[0], found.trials[-1])


def test_a_rank_that_dies_is_named_and_the_next_trial_has_others(these: Callable[..., None], tmp_path: Path) -> None:
    deadly = tiny("deadly", model="tests.validation.fatal:killed_as_rank_1", schedule="multi-cdp", alone=False)
    these(tiny("before", schedule="pp-cdp", alone=False), deadly, tiny("after", schedule="pp-cdp", alone=False))
    battery.run_battery(tmp_path / "battery.json", "cpu", timeout=60)
    found = read(tmp_path / "battery.json")
    assert [result.state for result in found.trials] == ["ok", "failed", "ok"]
    assert found.trials[1].failure == "killed"
    assert str(found.trials[1].reason).startswith("rank 1: is gone (killed by SIGKILL)")


def test_a_process_that_does_not_answer_is_ended() -> None:
    with Worker("cpu", timeout=1, spare=1) as worker:
        answer = worker.make(tiny("endless", model="tests.validation.fatal:stopped"))
        assert answer == Failed("timeout", "has not ended within 2 s")
    with Worker("cpu", timeout=60) as worker:
        endless = tiny("endless", model="tests.validation.fatal:stopped")
        assert worker.make(endless, within=1) == Failed("timeout", "has not ended within 1 s")
        assert isinstance(worker.make(tiny("good")), Replayed)


SAID = {signal.SIGINT: "cdpsim: interrupted\n", signal.SIGTERM: "cdpsim: terminated\n", signal.SIGKILL: ""}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Give a folder with a short name: a socket's path has 107 bytes."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_battery_that_is_ended_leaves_what_was_measured(
    tmp_path: Path, temporary: Path, how: signal.Signals, code: int
) -> None:
    """In a file that is whole; and no process, no temporary and no traceback."""
    output = tmp_path / "battery.json"
    own = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path.with_name("torchs own"))}
    command = [sys.executable, "-m", "tests.validation.interrupted", str(output)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, env=os.environ | own, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            stuck = wait_for(lambda: output.exists() and [pid for pid in descendants(process.pid) if stopped(pid)])
            below = descendants(process.pid)
            assert set(stuck) <= set(below)
            process.send_signal(how) if how == signal.SIGKILL else os.killpg(process.pid, how)
            _, errors = process.communicate(timeout=HANGS)
            assert process.returncode == code
            assert errors == SAID[how]
            assert ended(below)
        finally:
            process.kill()
    assert states(output) == {"good/single-cdp": "ok", "endless/single-cdp": "left out"}
    assert [each.ok for each in read(output).reports] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["battery.json"]
    assert wait_for(lambda: not list(temporary.iterdir()))


def test_a_long_name_of_the_temporary_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, as soon as a process is to be started; sockets have names of 107 bytes at most."""
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 74)
    assert main(["battery", "--device", "cpu", "-o", str(tmp_path / "battery.json")]) == 2
    assert capsys.readouterr().err == (
        "cdpsim: error: TMPDIR: leaves no room for a socket's name; 74 bytes are the most\n"
    )


def wait_for(look: Callable[[], Any], seconds: float = 120) -> Any:
    """Look until there is something to be seen."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "nothing has come of it"
        time.sleep(0.02)
    return found


def stopped(pid: int) -> bool:
    """Whether a process has been stopped."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T" and alive(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


KINDS: list[tuple[Exception, str, str]] = [
    (MemoryError("no\nroom"), "out of memory", "no room"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory", "CUDA out of memory. T"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory", "DefaultCPUAll"),
    (ReplayError("rank 1: out of memory: no", "out of memory"), "out of memory", "rank 1: out of memory: no"),
    (ReplayError("rank 1 has not answered", "timeout"), "timeout", "rank 1 has not answered"),
    (ReplayError("device 0 still holds 2 things at the end"), "error", "device 0 still"),
    (RequestError("model", "unknown model"), "refused", "model: unknown model"),
    (Unfit("transformers", "is not installed"), "import", "transformers: is not installed"),
    (ZeroDivisionError(), "error", "ZeroDivisionError: ZeroDivisionError"),
]


@pytest.mark.parametrize(("error", "failure", "reason"), KINDS)
def test_failures_have_a_word_and_a_line(error: Exception, failure: str, reason: str) -> None:
    found = failure_of(error)
    assert found.failure == failure
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason


# The book that is kept, by a worker that only says that it has done something


class Quick:
    """Answers as it is told, and looks at the file before it does."""

    def __init__(self, output: Path, answers: dict[str, Answer] | None = None, seconds: float = 0) -> None:
        self.made: list[str] = []
        self.files: list[int] = []  # how many reports the file had before each trial
        self.withins: list[float] = []
        self._output, self._answers = output, answers or {}
        self._seconds, self.now = seconds, 1000.0

    def make(self, trial: Trial, within: float) -> Answer:
        self.made.append(trial.name)
        self.withins.append(within)
        self.files.append(len(read(self._output).reports) if self._output.exists() else 0)
        self.now += self._seconds
        if trial.case is None:
            return Calibrated({"speed": 1})
        return self._answers.get(trial.name, done(trial))

    def __call__(self, device: str, timeout: float) -> "Quick":
        return self

    def __enter__(self) -> "Quick":
        return self

    def __exit__(self, *_: object) -> None: ...

    def monotonic(self) -> float:
        return self.now


def made(trial: Trial, ok: bool = True) -> Report:
    assert trial.case is not None
    found = Made(trial.case.schedule, trial.case.n, agree=ok).report()
    return reportform.decode_report(  # type: ignore[return-value]
        reportform.encode_report(found)
        .decode()
        .replace('"model":', f'"model_sha256": "{trial.case.model}", "model":', 1),
        "it",
    )


def done(trial: Trial, ok: bool = True) -> Replayed:
    assert trial.case is not None
    return Replayed(made(trial, ok), trial.case.model, {"name": trial.case.model})


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Quick]:
    """Make a worker that is quick, on a clock of its own; nothing may be prepared."""

    def prepare(*_: object, **__: object) -> NoReturn:
        raise AssertionError("nothing may be prepared before it is needed")

    for name in ("validation.replay.case.profile_stages", "validation.calibrate.command.profile_stages"):
        monkeypatch.setattr(name, prepare)

    def make(answers: dict[str, Answer] | None = None, seconds: float = 0) -> Quick:
        worker = Quick(tmp_path / "battery.json", answers, seconds)
        monkeypatch.setattr(battery, "Worker", worker)
        monkeypatch.setattr("validation.comparison.battery.time", SimpleNamespace(monotonic=worker.monotonic))
        return worker

    return make


def battery_of(quick: Quick, tmp_path: Path, **how: Any) -> Battery:
    return battery.run_battery(tmp_path / "battery.json", "cpu", **how)


def test_the_file_is_written_after_each_trial(quick: Callable[..., Quick], tmp_path: Path) -> None:
    """In the order of the trials, which is also that of the file."""
    worker = quick()
    found = battery_of(worker, tmp_path)
    names = [trial.name for trial in list_trials("cpu")]
    assert worker.made == names == [result.name for result in found.trials]
    calibrated = names.index("calibration")
    assert worker.files == [k - (k > calibrated) for k in range(len(names))]
    assert read(tmp_path / "battery.json") == found
    assert found.calibration == {"speed": 1}
    assert list(found.by_name) == [name for name in names if name != "calibration"]
    assert set(found.models) == {"mlp", "transformer", "vit-b16", "resnet50"}


def test_a_trial_out_of_tolerance_is_a_result(
    quick: Callable[..., Quick], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = list_trials("cpu")[0]
    quick({first.name: done(first, ok=False)})
    words = ["battery", "--device", "cpu", "-o", str(tmp_path / "battery.json")]
    assert main(words) == 1
    assert capsys.readouterr().err == f"cdpsim: {first.name}: not within tolerance\n"
    assert [each.ok for each in read(tmp_path / "battery.json").reports].count(False) == 1
    again = quick()
    assert main([*words, "--resume"]) == 0
    assert again.made == [first.name]


def test_some_trials_are_made_and_the_rest_later(quick: Callable[..., Quick], tmp_path: Path) -> None:
    """A file that is gone on with keeps what it has, in the order of the trials."""
    first = quick()
    battery_of(first, tmp_path, patterns=["small-n8", "calibration"])
    assert {name.partition("/")[0] for name in first.made} == {"small-n8", "calibration"}
    before = read(tmp_path / "battery.json")
    second = quick()
    battery_of(second, tmp_path, resume=True)
    everything = [trial.name for trial in list_trials("cpu")]
    assert second.made == [name for name in everything if name not in first.made]
    after = read(tmp_path / "battery.json")
    assert [result.name for result in after.trials] == everything
    assert set(states(tmp_path / "battery.json").values()) == {"ok"}
    assert before.calibration == after.calibration
    assert all(after.by_name[name] == each for name, each in before.by_name.items())


def test_to_resume_what_has_not_begun_is_to_begin(quick: Callable[..., Quick], tmp_path: Path) -> None:
    worker = quick()
    battery_of(worker, tmp_path, resume=True, patterns=["ranks"])
    assert set(worker.made) == {trial.name for trial in list_trials("cpu") if trial.group.name == "ranks"}
    assert set(states(tmp_path / "battery.json").values()) == {"ok", "left out"}


def test_results_of_other_code_are_not_mixed_with_those_of_this(
    quick: Callable[..., Quick], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those of other versions and machines; they are still there afterwards."""
    battery_of(quick(), tmp_path, patterns=["ranks/multi-dp"])
    before, own = (tmp_path / "battery.json").read_bytes(), environment("cpu")
    cpu = own["cpu"]
    assert isinstance(cpu, dict)
    others: dict[str, dict[str, object]] = {
        r"source: \w+, now 7": {"source": "7"},
        r"torch: [\w.+]+, now 1\.0": {"torch": "1.0"},
        r"threads: \d+, now 99": {"cpu": {**cpu, "threads": 99}},
        r"cuda: none, now some": {"cuda": {"name": "H"}},
    }
    for told, changes in others.items():
        monkeypatch.setattr(battery, "environment", lambda device, changes=changes: own | changes)
        with pytest.raises(RequestError, match=rf"battery.json: .* \({told}\); choose another file, or --force"):
            battery_of(quick(), tmp_path, resume=True)
        assert (tmp_path / "battery.json").read_bytes() == before
    monkeypatch.setattr(
        battery, "environment", lambda device: own | {"date": "later", "commit": "7", "memory_bytes": 1}
    )
    worker = quick()
    battery_of(worker, tmp_path, resume=True, patterns=["ranks/multi-dp"])
    assert not worker.made


def test_only_what_fits_into_the_time_is_begun(
    quick: Callable[..., Quick],
    tmp_path: Path,
    these: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trial counts first as long as guessed, then as long as others of its group took; skipped trials are named."""
    short = [Trial(Group("short", "", 5), Case(schedule, 2), True) for schedule in ("multi-dp", "multi-cdp", "pp-cdp")]
    more = [tiny("one", lasts=20), tiny("long", lasts=40), tiny("two", lasts=20)]
    these(*short, *more)
    worker = quick(seconds=18)
    battery_of(worker, tmp_path, minutes=1)
    # 60 s: 42 are left when the second of the short ones is due, 24 for the third, and 6 for all others.
    assert worker.made == [trial.name for trial in short]
    assert worker.withins == [60, 42, 24]
    assert (
        capsys.readouterr().err
        == "cdpsim: left out for want of time: one/single-cdp, long/single-cdp, two/single-cdp\n"
    )
    worker = quick(seconds=18)
    battery_of(worker, tmp_path, minutes=0.7, force=True)
    # 42 s: two of the short ones, then 6 s are left, which is less than the 18 that they took.
    assert worker.made == [trial.name for trial in short[:2]]
    assert [result.state for result in read(tmp_path / "battery.json").trials] == ["ok"] * 2 + ["left out"] * 4


def test_a_trial_that_the_batterys_time_cuts_short_is_left_out(
    quick: Callable[..., Quick], tmp_path: Path, these: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It has not failed, as one has that hangs while there is time left."""
    these(tiny("one", lasts=5), tiny("two", lasts=5))
    worker = quick({"one/single-cdp": Failed("timeout", "has not ended within 12 s")}, seconds=18)
    cut = battery_of(worker, tmp_path, minutes=0.2)
    assert [result.state for result in cut.trials] == ["left out", "left out"]
    assert capsys.readouterr().err == "cdpsim: left out for want of time: one/single-cdp, two/single-cdp\n"
    assert [result.state for result in battery_of(worker, tmp_path, minutes=1, force=True).trials] == ["failed", "ok"]


def test_a_short_trial_comes_after_a_long_one_that_is_left_out(
    quick: Callable[..., Quick], tmp_path: Path, these: Callable[..., None]
) -> None:
    these(tiny("long", lasts=90), tiny("short", lasts=5))
    worker = quick()
    battery_of(worker, tmp_path, minutes=1)
    assert worker.made == ["short/single-cdp"]


def test_a_report_of_the_folder_shows_what_there_is(
    quick: Callable[..., Quick], tmp_path: Path, these: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tiny("bad")
    these(tiny("good"), bad)
    quick({bad.name: Failed("killed", "its process is gone")})
    battery_of(quick({bad.name: Failed("killed", "its process is gone")}), tmp_path)
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    assert "bad/single-cdp failed (killed): its process is gone" in capsys.readouterr().err
    assert len(report.find_reports(tmp_path).found) == 1


# The list of trials


@pytest.mark.parametrize("device", DEVICES)
def test_trials_have_names_and_what_they_show(device: str) -> None:
    found = list_trials(device)
    assert len({trial.name for trial in found}) == len(found)
    for trial in found:
        assert trial.group.shows and trial.group.seconds > 0
        assert trial.case is None or trial.case.device == device


@pytest.mark.parametrize("device", DEVICES)
def test_every_schedule_is_replayed(device: str) -> None:
    """In one process with N = 4; those of Table 1 also by ranks and with N = 2, pairs that halve memory with N = 8."""
    cases = [(trial.case, trial.alone) for trial in list_trials(device) if trial.case]
    ran = {(case.schedule, case.n, alone) for case, alone in cases if case.model in ("mlp", "transformer")}
    assert {(schedule, 4, True) for schedule in SCHEDULES} <= ran
    assert {(schedule, n, alone) for schedule in TABLE_1 for n, alone in ((2, True), (4, False))} <= ran
    assert {(f"{kind}-{rule}", 8, True) for kind in ("single", "multi", "mp") for rule in ("dp", "cdp")} <= ran
    assert {case.model for case, _ in cases} >= {"vit-b16", "resnet50"}


OPTIONS: dict[str, set[Any]] = {
    "slot_order": {"backward-first"},
    "split": {"twice"},
    "replicas": {2},
    "warm_up": {2},
    "local_steps": {2, 3},
    "outer": {"nesterov:0.5:0.8"},
    "slow": {"1:2"},
    "shard": {3},
    "zero": {2, 3},
    "buckets": {"8KiB"},
    "rule": {"vertical-sync"},
    "reduce": {"last", "each"},
    "reshard": {2},
    "layers": {"0,2,4,6"},
    "prefetch": {1},
    "recompute": {"full", "sqrt"},
    "offload": {"optimizer", "all"},
    "autocast": {"bf16"},
    "mixed_precision": {True},
    "dtype": {"bfloat16"},
    "optimizer": {"adam", "adafactor"},
}


@pytest.mark.parametrize("device", DEVICES)
def test_every_option_is_replayed_and_named(device: str) -> None:
    """As a whole: in one process, and some by ranks; names of trials and the table's columns have the same words."""
    trials = [trial for trial in list_trials(device) if trial.group.name in ("options", "options-ranks", "workers")]
    found = [(trial, trial.case) for trial in trials if trial.case]
    assert {trial.alone for trial, _ in found} == {True, False}
    seen: dict[str, set[Any]] = {option: set() for option in OPTIONS}
    for trial, case in found:
        assert replayable(case, alone=trial.alone).left_out == (), trial.name
        request = request_of(case, trial.alone)
        words = replace(Made().report(), request=request).options_text.split()
        words = [f"rule={request['rule']}"] * bool(request["rule"]) + words
        assert trial.name.split("+") == [f"{trial.group.name}/{case.schedule}", *words]
        assert words
        for option, values in seen.items():
            values.add(request.get(option))
    assert all(values <= seen[option] for option, values in OPTIONS.items())


@pytest.mark.parametrize("device", DEVICES)
def test_the_most_telling_trials_come_first(device: str) -> None:
    """Of every group before the rest of any; models of real size among them."""
    leads = [trial.case is None or trial.case.schedule in LEADING for trial in list_trials(device)]
    assert leads == sorted(leads, reverse=True)
    first = [trial.group.name for trial, lead in zip(list_trials(device), leads, strict=True) if lead]
    assert set(first) == {trial.group.name for trial in list_trials(device)}
    assert first.index("vit-b16") < first.index("small-n4")


def test_trials_are_chosen_by_names_and_patterns() -> None:
    found = list_trials("cpu")
    assert [trial.name for trial in select_trials(found, ["small-n2/mp-dp"])] == ["small-n2/mp-dp"]
    assert {trial.group.name for trial in select_trials(found, ["timed*"])} == {"timed", "timed-ranks"}
    assert select_trials(found, ["*"]) == found
    assert {trial.group.name for trial in select_trials(found, ["vit-b16", "resnet50"])} == {"vit-b16", "resnet50"}
    with pytest.raises(RequestError, match=r"no trial is called 'smal-n2'; did you mean 'small-n2'\?; see --list"):
        select_trials(found, ["ranks", "smal-n2"])


def test_what_is_left_out_is_named_in_short() -> None:
    found = list_trials("cpu")
    left = [
        trial for trial in found if trial.group.name == "vit-b16" or trial.name in ("small-n2/mp-dp", "calibration")
    ]
    assert trial_names(left, found) == "vit-b16/*, calibration, small-n2/mp-dp"


# The command


def test_a_list_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["battery", "--list", "--device", "cuda", "--only", "vit-b16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "shows", "seconds"]
    assert [line.split()[0] for line in lines[2:4]] == ["vit-b16/single-dp", "vit-b16/single-cdp"]
    assert lines[-1] == f"{len(lines) - 3} trials, about {30 * (len(lines) - 3)} s"


REFUSED = {
    "no file": ([], "-o/--output: is missing; see .* --help"),
    "minutes": (["-o", "new.json", "--minutes", "soon"], "--minutes: 'soon' is no number above 0; give one such as 8"),
    "no minutes": (["-o", "new.json", "--minutes", "0"], "--minutes: '0' is no number above 0"),
    "nan": (["-o", "new.json", "--minutes", "nan"], "--minutes: 'nan' is no number above 0"),
    "timeout": (["-o", "new.json", "--timeout", "-1"], "--timeout: '-1' is no number above 0"),
    "device": (["-o", "new.json", "--device", "tpu"], "unknown device 'tpu'; known are cpu, cuda"),
    "pattern": (["-o", "new.json", "--only", "rank"], "no trial is called 'rank'; did you mean 'ranks'"),
    "pattern before the file": (["-o", "there.json", "--only", "rank"], "no trial is called 'rank'"),
    "file is there": (["-o", "there.json"], "already exists; --force overwrites"),
    "both": (["-o", "there.json", "--resume", "--force"], "goes on with a file that --force overwrites"),
    "no battery": (["-o", "there.json", "--resume"], "there.json: is no report"),
    "one report": (["-o", "report.json", "--resume"], "report.json: has one report and no battery"),
    "folder": (["-o", "nowhere/new.json"], "there is no folder"),
}


@pytest.mark.parametrize(("words", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_one_line_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Worker, "make", None)
    Path("there.json").write_text("{}")
    reportform.write_report("report.json", Made().report())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["battery", *([] if "--device" in words else ["--device", "cpu"]), *words]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert re.match(rf"cdpsim: error: .*{problem}", output.err)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_result_is_what_was_said() -> None:
    """A failure has a word of a few, which a file is refused for if it has another."""
    text = reportform.encode_report(
        Battery(
            environment={},
            seconds=0,
            calibration=None,
            models={},
            reports=[],
            trials=[TrialResult(name="x", state="failed", failure="killed", reason="so")],
        )
    ).decode()
    assert isinstance(reportform.decode_report(text, "it"), Battery)
    with pytest.raises(RequestError, match="no report"):
        reportform.decode_report(text.replace('"killed"', '"bored"'), "it")
