"""Fixtures and settings for all tests: how hypothesis searches, the command line in this process, small input files."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from cdpsim import cli

pytest_plugins = ["tests.selection", "tests.conditions", "tests.laws"]

# A busy machine is no reason to fail; a build that others judge by tries the same examples every time.
settings.register_profile("cdpsim", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("cdpsim")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no doctests in these folders, where there are none: that would import all helpers."""
    return [found for found in (yield) if type(found) is pytest.Module]


TOY_MODEL = """name = "toy"
[[stages]]
forward = "1 s"
backward = "2 s"
activation = "1.5 GB"
boundary = "16 MB"
parameters = "400 MB"
optimizer = "800 MB"
[[stages]]
repeat = 2
forward = "1.5 s"
backward = "3.25 s"
activation = "1 GB"
boundary = "8 MB"
parameters = "300 MB"
gradients = "150 MB"
"""
TOY_CLUSTER = """name = "box"
[devices]
memory = "80 GB"
[link]
latency = "5 us"
bandwidth = "3 GB/s"
[[links]]
between = [0, 1]
bandwidth = "1 GB/s"
"""


class Outcome(NamedTuple):
    """The exit code and the two outputs of a call of the command line."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with toy.toml, a model of three uneven stages, and box.toml, a cluster with uneven links."""
    (tmp_path / "toy.toml").write_text(TOY_MODEL)
    (tmp_path / "box.toml").write_text(TOY_CLUSTER)
    return tmp_path


@pytest.fixture
def here(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy folder as the current one, so that requests can be written as on a shell."""
    monkeypatch.chdir(toy)
    return toy
