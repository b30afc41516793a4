"""Options whose names are no more: each is a value of another one; records of before are read, and requests are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdpsim import Cluster, Model, Request, RequestError, Stage, compare, plan, plot, simulate, study
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.request.options import OPTION_NAMES, RENAMED
from cdpsim.runs import Run
from tests.conftest import Command
from tests.helpers.command_line import refuse
from tests.helpers.saved_files import files

STAGE = Stage(forward=1.0, backward=2.0, boundary=10, parameters=40)
BOX = Cluster(devices=(Devices(overlap="none"),), link=Link(latency=0.5, bandwidth=40.0))
REAL: dict[str, Any] = {"model": Model(stages=(STAGE,) * 4), "cluster": BOX}
# For each old name a request by the new one, which changes what happens.
REQUESTS: dict[str, dict[str, Any]] = {
    "defer_receives": REAL | {"schedule": "pp-cdp", "rendezvous": "megatron"},
    "overlap_all_reduce": REAL | {"schedule": "multi-dp", "reduce": "last"},
    "vertical_sync": REAL | {"schedule": "pipedream", "rule": "vertical-sync"},
}
every_name = pytest.mark.parametrize("name", REQUESTS)


def test_every_old_name_is_tried() -> None:
    assert REQUESTS.keys() == RENAMED.keys() and not RENAMED.keys() & {*OPTION_NAMES}
    assert all(REQUESTS[name][now] == value for name, (now, value) in RENAMED.items())


def old_record(name: str) -> dict[str, Any]:
    """The record of the request under its name of before, as a file has it."""
    return dict(simulate(**REQUESTS[name]).request) | {RENAMED[name][0]: None, name: True}


@every_name
def test_an_old_record_is_the_request_of_today(name: str, tmp_path: Path, command: Command) -> None:
    """In a summary.json, whose run is found again, too; in a file of its own; and where a program has it."""
    new = simulate(**REQUESTS[name])
    new.save(tmp_path / "old")
    written, path = files(new, tmp_path / "new"), tmp_path / "old" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"request": old_record(name)}))
    (tmp_path / "record.json").write_text(json.dumps(old_record(name)))
    assert isinstance(reopen(tmp_path / "old"), Run)
    assert Request.from_builtins(old_record(name)) == Request.load(tmp_path / "record.json") == new.request
    assert command("simulate", "--from", path, "-o", tmp_path / "again").code == 0
    assert {each.name: each.read_bytes() for each in (tmp_path / "again").iterdir()} == written
    other = dict(REQUESTS[name])
    del other[RENAMED[name][0]]
    assert simulate(**other).tasks != new.tasks


@every_name
def test_a_switch_of_before_that_is_off_says_nothing(name: str) -> None:
    assert Request.from_builtins(dict(Request("1f1b", 4)) | {name: False}) == Request("1f1b", 4)


@every_name
@pytest.mark.parametrize("line", ["simulate 1f1b -n 4 -o x", "compare -n 4", "plan --devices 4 --batch 8"])
def test_a_command_line_of_before_is_refused_with_the_new_one(
    name: str, line: str, command: Command, tmp_path: Path
) -> None:
    flag, (option, value) = name.replace("_", "-"), RENAMED[name]
    refuse(command, tmp_path, f"{line} --{flag}", f"error: --{flag}: is now --{option} {value}\n")


@every_name
def test_an_experiment_of_before_is_refused_with_the_new_one(name: str, command: Command, tmp_path: Path) -> None:
    """Under [run] and without it, in each spelling."""
    flag, (option, value) = name.replace("_", "-"), RENAMED[name]
    for k, text in enumerate((f"[run]\n{flag} = true", f"{name} = true")):
        (tmp_path / f"{k}.toml").write_text(f'{text}\nschedule = "1f1b"\nn = 4\n')
        refuse(command, tmp_path, f"simulate {tmp_path / f'{k}.toml'}", f".toml: --{flag}: is now --{option} {value}\n")


CALLS: dict[str, Callable[..., object]] = {
    "simulate": lambda **asked: simulate("1f1b", 4, **asked),
    "compare": lambda **asked: compare(["1f1b"], n=4, **asked),
    "plan": lambda **asked: plan(devices=4, batch=8, **asked),
    "study": lambda **asked: study({"schedule": ["1f1b"]}, {"n": 4, **asked}, "never"),
    "plot": lambda **asked: plot("timeline", "1f1b", n=4, **asked),
}


@every_name
@pytest.mark.parametrize("function", CALLS)
def test_python_of_before_is_refused_with_the_new_one(name: str, function: str) -> None:
    option, value = RENAMED[name]
    with pytest.raises(RequestError, match=f"^--{name.replace('_', '-')}: is now --{option} {value}$"):
        CALLS[function](**{name: True})
