"""Modules that are missing, broken or too old: one line that names the module, its version and what would fit."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from cdpsim.errors import RequestError
from validation.__main__ import main
from validation.training.models import make_training
from validation.training.modules import FIRST, installed, require

PROJECT = Path(__file__).parents[2]


def test_the_extras_ask_for_what_fits() -> None:
    """And the versions that the tests run with do."""
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = dict(text.split(">=") for name in ("torch", "models") for text in extras[name])
    assert asked == FIRST
    pinned = dict(re.findall(r"^([\w.-]+)==([\d.]+)", (PROJECT / "constraints.txt").read_text(), re.MULTILINE))
    for name, first in FIRST.items():
        assert [*map(int, pinned[name].split("."))] >= [*map(int, first.split("."))]


@pytest.mark.parametrize(
    ("name", "version", "fits"),
    [
        ("transformers", "4.57.6", False),
        ("transformers", "5.8.1", False),
        ("transformers", "5.9.0", True),
        ("transformers", "5.10.0.dev0", True),
        ("transformers", "6.0", True),
        ("torch", "2.5.1+cu124", False),
        ("torch", "2.6.0+cu124", True),
        ("torch", "2.13.0a0+git1", True),
    ],
)
def test_versions_are_held_against_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, fits: bool
) -> None:
    module = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, name, module)
    if fits:
        assert require(name) is module
        return
    with pytest.raises(RequestError) as refusal:
        require(name)
    assert str(refusal.value).startswith(f"{name}: {version} does not fit; {FIRST[name]} or newer fits: run `pip ")


def fake(folder: Path, name: str, version: str, code: str) -> None:
    """Install a module that does nothing but this."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules come first, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformers", "torchvision"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("transformers", "torchvision"):
        sys.modules.pop(name, None)


LAZY = "__version__ = '5.9'\ndef __getattr__(name):\n    "
BROKEN = {
    "a module that it needs is missing": (
        "import httpx_of_nobody",
        "transformers: 5.9.1 needs httpx_of_nobody, which is not installed; install it",
    ),
    "it fails": (
        "raise OSError('libcudart.so.13: no\\nsuch file')",
        "transformers: 5.9.1 does not work here (libcudart.so.13: no such file); 5.9 or newer fits: run `pip",
    ),
    "another module fails": (
        "import torchvision",
        "torchvision: 0.2 does not work here (operator torchvision::nms does not exist), and transformers 5.9.1 "
        "imports it; install one that fits the other modules, or remove it",
    ),
    "another module fails where a class is asked for": (
        LAZY + "try:\n        import torchvision\n    except Exception as error:\n"
        "        raise ModuleNotFoundError(f'Could not import {name}') from error",
        "torchvision: 0.2 does not work here (operator torchvision::nms does not exist), and transformers 5.9.1",
    ),
    "it has no such class": (
        LAZY + "raise AttributeError(name)",
        "transformers: 5.9.1 does not work here (",
    ),
    "its models have other parts": (
        LAZY + "return Thing\nclass Thing:\n    num_labels, image_size = 2, 32\n"
        "    def __init__(self, *_): pass\n    @classmethod\n    def from_dict(cls, fields): return cls()",
        "transformers: 5.9.1 builds this model of other parts ('Thing' object has no attribute 'vit'); take",
    ),
}


@pytest.mark.parametrize(("code", "problem"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_work_is_named(site: Path, code: str, problem: str) -> None:
    fake(site, "transformers", "5.9.1", code)
    fake(site, "torchvision", "0.2", "raise RuntimeError('operator torchvision::nms does not exist')")
    assert installed("transformers") == "5.9.1"
    with pytest.raises(RequestError) as refusal:
        make_training("vit-mini", 2)
    assert str(refusal.value).startswith(problem)


def test_an_unfit_module_is_one_line_of_the_command(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(site, "transformers", "5.4.0", "__version__ = '5.4.0'")
    monkeypatch.chdir(site)
    assert main(["replay", "single-cdp", "-n", "2", "--model", "vit-mini", "-o", "report.json"]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert output.err.startswith("cdpsim: error: transformers: 5.4.0 does not fit; 5.9 or newer fits")
    assert not (site / "report.json").exists()


@pytest.mark.parametrize("name", ["msgspec", "torch"])
def test_a_missing_dependency_is_one_line(tmp_path: Path, name: str) -> None:
    """Of cdpsim as of the harness: nothing of it is imported before that is known."""
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(PROJECT)))}
    command = [sys.executable, "-m", "validation", "report", "results"]
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"cdpsim: error: {name}: ")
