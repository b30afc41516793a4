"""Fixtures and settings for all tests: how hypothesis searches, the command line in this process, small input files."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from cdpsim import cli

ALL = "CDPSIM_TEST_ALL"
# The name of a file, by which two environments share the suite, so that no test runs in both. The first run writes the
# tests that pass into it and leaves the laws to the second, which runs what is not in the file.
PASSED = "CDPSIM_TEST_PASSED"
if "CDPSIM_TEST_WITHOUT_NUMBA" in os.environ:  # as on platforms that have none
    sys.modules["numba"] = None  # type: ignore[assignment]


def examples(count: int) -> int:
    """How many examples a law is tried with: so many where everything has to be tested, else a fifth of them."""
    return count if ALL in os.environ else -(-count // 5)


# A busy machine is no reason to fail; a build that others judge by tries the same examples every time.
settings.register_profile("cdpsim", deadline=None, max_examples=examples(50), derandomize="CI" in os.environ)
settings.load_profile("cdpsim")


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Do not count what lines laws reach, whose many examples would take twice as long; single cases reach them too."""
    laws = [item for item in items if item.get_closest_marker("hypothesis")]
    for item in laws:
        item.add_marker("uncounted")
    if name := os.environ.get(PASSED):
        passed = Path(name)
        elsewhere = {law.nodeid for law in laws}
        if passed.is_file():
            elsewhere = set(passed.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in elsewhere])
        items[:] = [item for item in items if item.nodeid not in elsewhere]


_tracers: list[Any] = []  # that of coverage, or None: the one before the first test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Count the lines that a test reaches, or not.

    The `no_cover` of pytest-cov does not do it: its workers have two tracers, of which that stops one. A test may end
    without the tracer with which it began: too deep a recursion removes it.
    """
    if not _tracers:
        _tracers.append(sys.gettrace())
    sys.settrace(None if item.get_closest_marker("uncounted") else _tracers[0])


_passed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that passes."""
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write which tests passed, where that is asked for; worker processes leave it to the one that they report to."""
    name = os.environ.get(PASSED)
    if name and not Path(name).exists() and not hasattr(session.config, "workerinput"):
        Path(name).write_text("".join(f"{test}\n" for test in _passed), encoding="utf-8")


def need(present: object, what: str) -> None:
    """Skip where what a test needs is missing, but fail where everything has to be tested (CI says so)."""
    if not present:
        if ALL in os.environ:
            pytest.fail(f"{what} is missing, and {ALL} is set")
        pytest.skip(f"needs {what}")


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
