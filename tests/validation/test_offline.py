"""The script that equips a machine without a network: downloads, installations and refusals."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

PROJECT = Path(__file__).parents[2]
SCRIPT = Path("validation", "offline.sh")
COME_WITH_TORCH = {"matplotlib", "networkx", "numpy"}


class Done(NamedTuple):
    """The exit code and outputs of a call."""

    code: int
    out: str
    err: str


def call(*words: str, python: str | Path = sys.executable, root: Path = PROJECT, **more: str) -> Done:
    environment = os.environ | {"PYTHON": str(python)} | more
    done = subprocess.run([root / SCRIPT, *words], env=environment, cwd=root, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, problem: str) -> None:
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"offline\.sh: {problem}.*\n", done.err), done.err


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", text)[0] for text in requirements}


def dependencies() -> list[str]:
    found: list[str] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


# The first half


PIP = """#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec {python} "$@"
[ "$3" = --version ] && exit
printf '%s\\n' "$@" >"{folder}/asked"
{does}
"""


def pip_that(folder: Path, does: str) -> Path:
    """Make a python whose pip notes what it is asked for, and does something."""
    program = folder / "python"
    program.write_text(PIP.format(python=sys.executable, folder=folder, does=does))
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("more", [(), ("matplotlib",)])
def test_what_is_fetched_is_what_the_machine_lacks(tmp_path: Path, more: tuple[str, ...]) -> None:
    """All that cdpsim needs but for what comes with torch, pinned, for another Python and this kind of machine."""
    python, wheels = pip_that(tmp_path, 'touch "$DEST/one.whl"'), tmp_path / "wheels"
    words = ("fetch", "--python", "3.13", "--machine", "aarch64", "--folder", str(wheels), *more)
    done = call(*words, python=python, DEST=str(wheels))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"1 wheels in {wheels}, ")
    asked = (tmp_path / "asked").read_text().splitlines()
    requirements = asked[asked.index("--dest") + 2 :]
    assert names(requirements) == names(dependencies()) - COME_WITH_TORCH | {*more}
    assert asked[asked.index("--constraint") + 1] == str(PROJECT / "constraints.txt")
    assert asked[asked.index("--python-version") + 1] == "3.13"
    platforms = {asked[k + 1] for k, word in enumerate(asked) if word == "--platform"}
    assert "manylinux2014_aarch64" in platforms
    assert all(each.endswith("_aarch64") for each in platforms)
    assert {"--no-deps", "--only-binary=:all:"} <= {*asked}


def test_what_is_fetched_has_one_version() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (PROJECT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name.replace("-", "_") for name in names(dependencies())} <= {name.replace("-", "_") for name in pinned}


def test_what_comes_with_torch_is_needed() -> None:
    """Else nothing would be left out for it."""
    assert names(dependencies()) > COME_WITH_TORCH


PIPS = {
    "no wheel": (
        "echo 'Looking'; echo 'ERROR: No matching distribution found for msgspec==0.22.0 (from cdpsim)'; exit 1",
        r"msgspec==0\.22\.0: no wheel of it could be fetched for Python 3\.12 on x86_64; try another --python or --mac",
    ),
    "disk": ("echo 'ERROR: no space left'; exit 1", "pip: ERROR: no space left; mend that, and try again"),
    "silence": ("echo 'Killed'; exit 137", "pip: Killed; mend that, and try again"),
}


@pytest.mark.parametrize(("does", "problem"), PIPS.values(), ids=PIPS)
def test_a_failure_of_pip_is_one_line(tmp_path: Path, does: str, problem: str) -> None:
    words = ("fetch", "--machine", "x86_64", "--folder", str(tmp_path / "wheels"))
    refused(call(*words, python=pip_that(tmp_path, does)), problem)


REFUSED = {
    "nothing": ([], "no command: give fetch or install"),
    "command": (["fetsh"], "fetsh: give fetch or install"),
    "option": (["fetch", "--pyton", "3.12"], "--pyton: unknown option; known are --folder, --python, --machine"),
    "value": (["fetch", "--python"], "--python: needs a value"),
    "version": (["fetch", "--python", "3.x"], r"--python: 3\.x is no version of Python; give one such as 3\.12"),
    "names": (["install", "numpy"], "numpy: install takes no names"),
    "options of the other half": (["install", "--python", "3.12"], "--python: is for fetch"),
    "no wheels": (["install", "--folder", "/nowhere"], "/nowhere: there is no such folder; make it with"),
}


@pytest.mark.parametrize(("words", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_one_line(words: list[str], problem: str) -> None:
    refused(call(*words), problem)


def test_a_python_that_does_not_do_is_one_line(tmp_path: Path) -> None:
    refused(call("fetch", python="/nowhere/python"), "/nowhere/python: there is no such program; set PYTHON")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    refused(call("fetch", python=old), f"{old}: is older than 3\\.11; set PYTHON")


# The second half


def wheel(folder: Path, name: str, code: str) -> None:
    """Make the wheel of a module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.5.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with ZipFile(folder / f"{name}-1.5-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout whose project needs a module that is nowhere but in a wheel; without torch, with transformers."""
    root = tmp_path / "clone"
    (root / "validation").mkdir(parents=True)
    (root / "cdpsim").symlink_to(PROJECT / "cdpsim")
    for name in ("__init__.py", "training"):
        (root / "validation" / name).symlink_to(PROJECT / "validation" / name)
    (root / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    (root / "transformers.py").write_text("__version__ = '5.9'")
    needs = '["numpy>=2", "cdpsim-tests-need-this>=1.2"]'
    (root / "pyproject.toml").write_text(f"[project]\nname = 'x'\ndependencies = {needs}\n")
    (root / SCRIPT).write_text((PROJECT / SCRIPT).read_text())
    (root / SCRIPT).chmod(0o755)
    return root


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A python of its own, which sees all that this one has, and no network."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path and Path(path) != PROJECT))
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.slow
def test_wheels_are_installed_where_there_is_no_network(clone: Path, offline: Path, tmp_path: Path) -> None:
    """Missing modules are installed once; one without a wheel is named."""
    pytest.importorskip("pip")
    wheels, module = tmp_path / "wheels", "cdpsim_tests_need_this"
    wheels.mkdir()
    words = ("install", "--folder", str(wheels))
    problem = (
        r"cdpsim-tests-need-this>=1\.2: is not here, nor a wheel of it for Python 3\.\d+ in .*; fetch it with --py"
    )
    refused(call(*words, python=offline, root=clone), problem)
    wheel(wheels, module, "")
    first = call(*words, python=offline, root=clone)
    assert first.code == 0
    assert re.fullmatch(r"offline\.sh: torch: is not installed; 2\.6 or newer fits: run `pip install .*`\n", first.err)
    assert re.fullmatch(r"numpy [\d.]+\ncdpsim-tests-need-this 1\.5\ntransformers 5\.9\n", first.out)
    assert call(*words, python=offline, root=clone) == first


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_named(clone: Path, offline: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    wheel(tmp_path / "wheels", "cdpsim_tests_need_this", "raise OSError('for another\\nmachine')")
    done = call("install", "--folder", str(tmp_path / "wheels"), python=offline, root=clone)
    assert done.code == 2
    line = "offline.sh: cdpsim-tests-need-this: cannot be imported (for another machine); install one that fits\n"
    assert done.err == line
