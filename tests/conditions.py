"""The conditions of each test: with numba or without, module globals as they were, a limit to its processor time.

A plugin of pytest. The draw hides numba from every second worker; a test that needs it takes the fixture `compiled`.
Where lines are counted, they are those that tests of the package run, and not those of the harness.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from cdpsim import numeric, simulate
from cdpsim.numeric.paths import compiled_loops, expect_many_runs
from tests.selection import HARNESS, chance

WITHOUT_NUMBA = "CDPSIM_TEST_WITHOUT_NUMBA"  # hides it from all
LOOPS = "cdpsim.numeric.compiled"
# Rows that the process has swept without numba: this counter may grow, until numba is loaded.
COUNT_UP = {"_swept_rows"}
PLAIN = int, float, str, tuple
OF_A_FUNCTION = 10 / 3  # times what one case may take, all cases together

LATE = pytest.StashKey[list[str]]()

tools = {"must be there": False}
_set_aside: dict[str, ModuleType] = {}  # numba and the loops, between two tests that take them
_seconds: dict[str, float] = defaultdict(float)  # of processor time, by test, but for what is marked slow


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the limit."""
    group = parser.getgroup("which tests run")
    group.addoption("--guard", type=float, metavar="S", help="fail where a quick test takes S processor seconds")


@pytest.hookimpl(trylast=True)  # when the draw is settled
def pytest_configure(config: pytest.Config) -> None:
    """Hide numba where the draw, or the environment, says so; note whether a tool may be missing."""
    tools["must be there"] = config.option.ci and "CI" in os.environ
    if hides_numba(config):
        sys.modules["numba"] = None  # type: ignore[assignment]


@pytest.hookimpl(trylast=True)  # when lines are counted
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a worker load and compile what many tests use: none is charged for it, and all run the same loops."""
    if hasattr(session.config, "workerinput"):
        import matplotlib.pyplot  # noqa: F401

        with expect_many_runs():
            simulate("1f1b", 4, m=8, model="gpt2", cluster="a100-nodes").summary()


def hides_numba(config: pytest.Config) -> bool:
    """Return whether this process has no numba: all where the environment says so, else every second worker."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    drawn = worker and (int(worker[2:]) + (chance(config.option.draw, "numba") < 0.5)) % 2
    return WITHOUT_NUMBA in os.environ or bool(drawn)


def need(present: object, what: str) -> None:
    """Skip where what a test needs is missing; fail where CI draws from all tests."""
    if not present:
        if tools["must be there"]:
            pytest.fail(f"{what} is missing")
        pytest.skip(f"needs {what}", allow_module_level=True)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """Give the compiled loops, also to tests of a worker from which the draw hides numba."""
    hidden = WITHOUT_NUMBA not in os.environ and "numba" in sys.modules and sys.modules["numba"] is None
    if hidden:
        del sys.modules["numba"]
        sys.modules.update(_set_aside)
        compiled_loops.cache_clear()
    need(compiled_loops(), "numba")
    yield compiled_loops()
    if hidden:
        _set_aside.update({name: sys.modules.pop(name) for name in ("numba", LOOPS)})
        sys.modules["numba"] = None  # type: ignore[assignment]
        vars(numeric).pop("compiled", None)
        compiled_loops.cache_clear()


def state(value: object) -> object:
    """Return what a global holds, if it is a text, a number, a tuple or a variable of the context."""
    return value.get("unset") if isinstance(value, ContextVar) else value if isinstance(value, PLAIN) else None


@cache
def globals_of_the_package(modules: int) -> list[tuple[ModuleType, str, object]]:
    """List module, name and state of all globals, as they are when that many modules are imported."""
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "cdpsim"]
    found = [(module, name, state(value)) for module in ours for name, value in vars(module).items()]
    return [row for row in found if row[2] is not None and row[1] not in COUNT_UP]


def changed_since(before: list[tuple[ModuleType, str, object]]) -> list[str]:
    """Name the globals that have another state than before."""
    changed = [(module, name) for module, name, was in before if state(vars(module).get(name)) is not was]
    return [f"{module.__name__}.{name}" for module, name in changed]


@pytest.fixture(autouse=True)
def _modules_stay_as_they_were() -> Iterator[None]:
    """Fail a test that leaves a global changed, by which later tests would run other code than they say."""
    before = globals_of_the_package(len(sys.modules))
    yield
    changed = changed_since(before)
    if changed:  # of which one test is told
        globals_of_the_package.cache_clear()
    assert not changed, f"left changed: {', '.join(changed)}"


def processor_time() -> float:
    """Return the seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@contextmanager
def no_lines_counted() -> Iterator[None]:
    """Stop counting lines, inside; a worker has two that count, of which pytest-cov's `no_cover` stops one."""
    import coverage

    stopped = []
    while (counter := coverage.Coverage.current()) is not None:
        counter.stop()
        stopped.append(counter)
    try:
        yield
    finally:
        for counter in reversed(stopped):
            counter.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count a test's processor time; under one of the harness count no lines, which would take twice as long."""
    counts_lines = item.config.pluginmanager.hasplugin("_cov")
    before = processor_time()
    with no_lines_counted() if counts_lines and item.nodeid.startswith(HARNESS) else nullcontext():
        result = yield
    # The first test of the compiled loops compiles them, which takes seconds.
    if not any(map(item.get_closest_marker, ("slow", "long"))) and "compiled" not in getattr(item, "fixturenames", ()):
        _seconds[item.nodeid] += processor_time() - before
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what workers counted."""
    for test, seconds in getattr(node, "workeroutput", {}).get("seconds", {}).items():
        _seconds[test] += seconds


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test took too long that is not marked slow, or all cases of a function together."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = dict(_seconds)
    elif late := too_long(session.config.option.guard):
        session.config.stash[LATE] = late
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def too_long(most: float | None) -> list[str]:
    """List which tests took more seconds, and which functions took more than all of their cases may."""
    functions: dict[str, float] = defaultdict(float)
    for test, seconds in _seconds.items():
        functions[test.partition("[")[0]] += seconds
    found = {test: seconds for test, seconds in _seconds.items() if most and seconds > most}
    found |= {name: seconds for name, seconds in functions.items() if most and seconds > most * OF_A_FUNCTION}
    return [f"{name} took {seconds:.1f} s: make it quicker, or mark it slow" for name, seconds in found.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what took too long."""
    for line in config.stash.get(LATE, []):
        terminalreporter.write_line(line, red=True)
