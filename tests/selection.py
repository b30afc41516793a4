"""Which tests run: a few cases of each function, drawn by a word; with --ci also a drawn share of all others.

A plugin of pytest. The word is the commit unless --draw gives one: the same word draws the same cases.
"""

import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cdpsim import SCHEDULES
from cdpsim.schedules import ZERO_NAMES, Schedule
from cdpsim.schedules.order import CYCLIC
from cdpsim.schedules.state import Placed
from cdpsim.version import __version__

# Shares that --ci adds: of further cases, of slow functions, and of laws, which are then tried with all examples.
# The last is of commits for which CI tries the lowest versions.
SHARES = {"cases": 0.08, "slow": 1 / 15, "laws": 1 / 10, "lowest versions": 1 / 10}
FEWER = 5  # times fewer examples of other laws
HARNESS = "tests/validation/"  # of which --ci adds no further cases
Examples = Callable[[int], int]  # how many of a number of examples are tried
long_run: dict[str, Any] = {"draw": "", "share": 1.0}  # of the tests marked long
COUNTED = pytest.StashKey[dict[str, int]]()  # cases that were found and left out


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    group = parser.getgroup("which tests run")
    group.addoption("--cases", default="4", metavar="N", help="at most N cases of a function, or all (default: 4)")
    group.addoption("--slow", action="store_true", help="also tests that are marked slow")
    group.addoption("--draw", metavar="WORD", help="what decides which cases are drawn (default: the commit)")
    group.addoption("--shuffle", action="store_true", help="run files, and the tests of each, in a drawn order")
    group.addoption("--ci", action="store_true", help="also a drawn share of all else, as CI does")
    group.addoption("--share", type=float, default=1.0, metavar="X", help="do so much of each long test (default: 1)")


@pytest.hookimpl(trylast=True)  # when all plugins have named their markers
def pytest_configure(config: pytest.Config) -> None:
    """Refuse bad values, and settle the draw for all workers."""
    option = config.option
    markers = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    without_arguments = re.sub(r"\b(?!(?:and|or|not)\b)(\w+)\([^)]*\)", r"\1", option.markexpr)
    asked = set(re.findall(r"[^\W\d]\w*", without_arguments)) - {"and", "or", "not"}
    if unknown := sorted(asked - markers):
        raise pytest.UsageError(f"-m: {unknown[0]!r} is no marker; one of {', '.join(sorted(markers))}")
    if not re.fullmatch("all|[1-9][0-9]*", option.cases):
        raise pytest.UsageError(f"--cases: {option.cases!r} is no number from 1 on; give one, or all")
    if not 0 < option.share <= 1:
        raise pytest.UsageError(f"--share: {option.share:g} is not above 0 and at most 1")
    option.draw = commit(config.rootpath) if option.draw is None else option.draw
    if not re.fullmatch(r"\w[\w.+-]*", option.draw):
        raise pytest.UsageError(f"--draw: {option.draw!r} is no word; give letters and digits")
    option.slow |= "slow" in asked
    long_run.update(draw=option.draw, share=option.share)
    config.stash[COUNTED] = {"all": 0, "chosen": 0}


def commit(project: Path) -> str:
    """Return the commit; the version where there is no git history, as in a source distribution."""
    if not (project / ".git").exists():
        return __version__
    command = ["git", "-C", str(project), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__


def chance(*words: str) -> float:
    """Return a number from 0 to 1 that only these words decide."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8]) / 2**64


def kind_of(schedule: Schedule) -> str:
    """Return the kind of a schedule: the first of ten that it is of."""
    order, listed = schedule.order, schedule.order.lists
    shape = getattr(listed.actions, "__name__", "") if listed else ""
    kinds = {
        "rounds": order.rounds,
        "local steps": order.local,
        "single": schedule.placement.lanes,
        "sharded": schedule.state.parameters is Placed.OWNED,
        "cyclic": order is CYCLIC,
        "looped": order.any_chunks,
        "V": shape in ("zbv", "dualpipev"),
        "both ways": shape in ("chimera", "gems", "dualpipe"),
        "asynchronous": not order.together,
        "flushed": True,
    }
    return next(name for name, applies in kinds.items() if applies)


def kind_in(value: Any) -> str | None:
    """Return the kind of the first schedule that is, or is named, in a parameter of a case."""
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(kind_in, inner)), None)
    if isinstance(value, str) and value in ZERO_NAMES:
        return "sharded"
    schedule = SCHEDULES.get(value) if isinstance(value, str) else value
    return kind_of(schedule) if isinstance(schedule, Schedule) else None


def named(config: pytest.Config, function: str) -> bool:
    """Return whether the command line names a function, of which everything then runs."""
    return any(f"::{function}" in argument for argument in config.args)


@pytest.hookimpl(trylast=True)  # when all cases are there, and no item has been made of them
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out cases: quick ones come before slow ones, the first of each kind before others; then chance decides."""
    option, name, calls = metafunc.config.option, metafunc.definition.nodeid, metafunc._calls
    every = metafunc.definition.get_closest_marker("every_case") or named(metafunc.config, metafunc.function.__name__)
    if option.cases == "all" or len(calls) <= int(option.cases) or every:
        return
    turns: Counter[tuple[bool, str | None]] = Counter()
    order = []
    for drawn, at in sorted((chance(option.draw, name, call.id), at) for at, call in enumerate(calls)):
        group = (
            any(mark.name in ("slow", "long") for mark in calls[at].marks),
            kind_in(tuple(calls[at].params.values())),
        )
        order.append((group[0], turns[group], drawn, at))
        turns[group] += 1
    chosen = {at for *_, at in sorted(order)[: int(option.cases)]}
    if option.ci and not name.startswith(HARNESS) and not metafunc.definition.get_closest_marker("slow"):
        chosen |= {at for *_, at in order if chance(option.draw, name, calls[at].id, "more") < SHARES["cases"]}
    metafunc.config.stash[COUNTED]["all"] += len(calls) - len(chosen)
    calls[:] = [calls[at] for at in sorted(chosen)]


def function_of(item: pytest.Item) -> str:
    """Return the name of a test without its case."""
    return item.nodeid.partition("[")[0]


def file_of(item: pytest.Item) -> str:
    """Return the name of a test's file."""
    return item.nodeid.partition("::")[0]


def has_all_examples(item: pytest.Item) -> bool:
    """Return whether a law is tried with all of its examples."""
    option = item.config.option
    return option.cases == "all" or (option.ci and chance(option.draw, function_of(item), "law") < SHARES["laws"])


def is_drawn(item: pytest.Item) -> bool:
    """Return whether a test runs although it may be slow."""
    option = item.config.option
    if option.slow or not item.get_closest_marker("slow") or named(item.config, function_of(item).rpartition("::")[2]):
        return True
    return option.ci and chance(option.draw, function_of(item), "slow") < SHARES["slow"]


def try_fewer_examples(law: pytest.Function) -> None:
    """Let hypothesis try a law with fewer examples than it says."""
    test = law.function
    said = test._hypothesis_internal_use_settings
    test._hypothesis_internal_use_settings = settings(said, max_examples=ceil(said.max_examples / FEWER))


@pytest.hookimpl(wrapper=True)  # in between, hypothesis marks laws, and -m and -k leave out tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out slow tests, try laws with fewer examples, and shuffle, each as the options say."""
    config.stash[COUNTED]["all"] += len(items)
    yield
    items[:] = filter(is_drawn, items)
    config.stash[COUNTED]["chosen"] = len(items)
    for law in {function_of(item): item for item in items if item.get_closest_marker("hypothesis")}.values():
        if isinstance(law, pytest.Function) and not has_all_examples(law):
            try_fewer_examples(law)
    if config.option.shuffle:
        turn = {name: chance(config.option.draw, name) for item in items for name in (item.nodeid, file_of(item))}
        items.sort(key=lambda item: (turn[file_of(item)], turn[item.nodeid]))


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> Examples:
    """Return how many of a number of examples are tried, for a law inside a test."""
    return lambda count: count if has_all_examples(request.node) else ceil(count / FEWER)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports how many tests a worker was given to choose from."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counted"] = session.config.stash[COUNTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Read that; every worker found the same."""
    node.config.stash[COUNTED] = getattr(node, "workeroutput", {}).get("counted", {"all": 0, "chosen": 0})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests of how many were chosen, and how to run the same again, or all."""
    counted, option = config.stash[COUNTED], config.option
    if counted["chosen"] < counted["all"]:
        again = f"--draw {option.draw}" + " --ci" * option.ci + " --shuffle" * option.shuffle
        said = f"{counted['chosen']:,} of {counted['all']:,} cases were chosen"
        terminalreporter.write_line(f"{said}; the same again: {again}; all: --cases all --slow")
