"""Which tests run which lines of what is mutated: measured once for each test file and state of what it imports."""

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from cdpsim.numeric.columns import Kept

PROJECT = Path(__file__).parents[2]
CORE, LEARN = "cdpsim", "validation/learn"  # what is mutated; the second needs torch, as its tests do
OF_HARNESS = "tests/validation/"
OURS = ("cdpsim", "cdpsim_validation", "tests", "validation")  # packages
# Tests of pictures and texts, tests that take minutes, and those that start other programs; mutants have tests, too.
LEFT_OUT = "design every_schedule gantt house long mutants notebooks"
LEFT_OUT += " page page_browser palette paper perfetto readme snapshot views"
# Coverage does not see compiled lines; the lines that call them stand for them.
CALLED_AS = {"cdpsim/numeric/compiled.py": "loops."}
# Seconds that a test may take; processor's seconds that a mutant's tests took when measured; bytes that they may have.
STUCK, BUDGET, MEMORY = 120, 60, 8 * 2**30
OPTIONS = ["-q", "--tb=no", "--numprocesses=0", "-p", "no:cacheprovider", "-p", "no:cov"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
EVERY_CASE = ["--cases=all", "--slow"]
# A thread ends a test that does not end by itself: no signal reaches compiled code.
UNTIL_ONE_FAILS = ["-x", f"--timeout={STUCK}", "--timeout-method=thread"]


def files_with_tests(package: str) -> list[str]:
    """List the files whose tests are used, relative to the project; a module with examples is one, too."""
    if package == LEARN:
        harness = (PROJECT / OF_HARNESS).glob("test_*.py")
        every = [path for path in harness if "from validation.learn" in path.read_text()]
    else:
        left_out = {f"test_{name}.py" for name in LEFT_OUT.split()}
        every = [path for path in (PROJECT / "tests").rglob("test_*.py") if "validation" not in path.parts]
        every = [path for path in every if path.name not in left_out]
        every += [path for path in (PROJECT / "cdpsim").rglob("*.py") if "    >>> " in path.read_text()]
    return [str(path.relative_to(PROJECT)) for path in sorted(every)]


def drawn_tests(files: list[str], word: str) -> set[str]:
    """List the tests of files that pytest alone runs, drawn by a word."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--collect-only", f"--draw={word}", *files]
    done = subprocess.run(command, cwd=PROJECT, env=environment(PROJECT), capture_output=True, text=True, check=False)
    if done.returncode != pytest.ExitCode.OK:
        sys.exit(done.stdout + done.stderr)
    return {line for line in done.stdout.splitlines() if "::" in line}


def environment(tree: Path) -> dict[str, str]:
    """Give the environment of tests of a tree: hypothesis tries the same examples each time."""
    return os.environ | {"PYTHONPATH": str(tree), "CI": "1"}


def kept_as(file: str) -> str:
    """Name what is kept of a test file: modules of one name may lie in several rooms."""
    return file.removesuffix(".py").replace("/", ".")


def key_of(file: str) -> str:
    """Give the hash of a test file and of all that it may import."""
    tests = PROJECT / "tests"
    found = [tests / "conditions.py", tests / "conftest.py", tests / "selection.py"]
    folders = [PROJECT / "cdpsim", tests / "helpers"]
    if file.startswith(OF_HARNESS):
        found += [path for path in (PROJECT / OF_HARNESS).glob("*.py") if not path.name.startswith("test_")]
        folders.append(PROJECT / "validation")
    found += [path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".toml")]
    digest = hashlib.sha256((PROJECT / file).read_bytes())
    for path in sorted(found):
        digest.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def empty_caches() -> None:
    """Empty the caches of all functions: what one test left in them, the next one computes as well."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OURS:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
                elif isinstance(value, Kept):
                    value.forget()


class Measuring:
    """A plugin of pytest that measures each test by itself: its seconds, whether it passes, and its lines."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        self.file = self.key = ""
        self.lines: Any = None
        self.seconds: dict[str, float] = {}
        self.bad: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test's own lines."""
        import coverage

        if nodeid.partition("::")[0] != self.file:
            self.pytest_sessionfinish()
            self.file = nodeid.partition("::")[0]
            self.key = key_of(self.file)
            data = self.kept / kept_as(self.file)
            data.unlink(missing_ok=True)
            source = LEARN if self.file.startswith(OF_HARNESS) else CORE
            self.lines = coverage.Coverage(data_file=data, source=[source], config_file=False)
            self.lines.set_option("run:relative_files", True)
            self.lines.set_option("run:disable_warnings", ["no-data-collected"])
            self.lines.start()
        empty_caches()
        self.lines.switch_context(nodeid)
        self.seconds[nodeid] = -sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Leave out a test that does not pass."""
        if not report.passed:
            self.bad.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count the processor's seconds, which other work does not change."""
        self.seconds[nodeid] += sum(os.times()[:4])

    def pytest_sessionfinish(self) -> None:
        """Write what was measured of a file."""
        if self.lines is None:
            return
        self.lines.stop()
        self.lines.save()
        passed = {test: seconds for test, seconds in self.seconds.items() if test not in self.bad}
        mine = {test: seconds for test, seconds in passed.items() if test.startswith(f"{self.file}::")}
        answer = {"key": self.key, "seconds": mine}
        (self.kept / f"{kept_as(self.file)}.json").write_text(json.dumps(answer))


class Chosen:
    """A plugin of pytest that runs chosen tests in a given order, and writes down which one it has come to."""

    def __init__(self, tests: list[str], last: Path) -> None:
        self.turn = {test: turn for turn, test in enumerate(tests)}
        self.last = last

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests."""
        items[:] = sorted((one for one in items if one.nodeid in self.turn), key=lambda one: self.turn[one.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write down a test's name."""
        self.last.write_text(nodeid)


class Covering:
    """The tests that cover a line, and the seconds that each takes."""

    def __init__(self, kept: Path, files: Iterable[str]) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        self.data = []
        for file in files:
            self.seconds |= json.loads((kept / f"{kept_as(file)}.json").read_text())["seconds"]
            data = coverage.CoverageData(str(kept / kept_as(file)))
            data.read()
            self.data.append(data)
        self.known: dict[str, dict[int, set[str]]] = {}

    def lines(self, file: str) -> dict[int, set[str]]:
        """Give the tests of each line of a file."""
        if file not in self.known:
            found: dict[int, set[str]] = defaultdict(set)
            for data in self.data:
                for line, tests in data.contexts_by_lineno(file).items():
                    found[line] |= self.seconds.keys() & set(tests)
            self.known[file] = found
        return self.known[file]

    def tests(self, file: str, lines: Iterable[int], among: Container[str]) -> list[str]:
        """List the cheapest of some tests of lines, or of their file where they run only when it is imported.

        The file's own tests come first; then a test of each function, a cheap one, before another one of the same.
        """
        found = set().union(*(self.lines(file)[line] for line in lines), self._of_callers(file))
        found = found or set().union(*self.lines(file).values())
        total, turn = 0.0, Counter[str]()
        turns: dict[str, int] = {}
        for test in sorted(filter(among.__contains__, found), key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if total > BUDGET and turns:
                break
            function = test.partition("[")[0]
            turns[test] = turn[function]
            turn[function] += 1
        own = own_tests(file)
        return sorted(turns, key=lambda test: (not test.startswith(own), turns[test], self.seconds[test]))

    def _of_callers(self, file: str) -> Iterator[str]:
        if file not in CALLED_AS:
            return
        for path in sorted((PROJECT / "cdpsim").rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if CALLED_AS[file] in line:
                    yield from self.lines(str(path.relative_to(PROJECT)))[number]


def own_tests(file: str) -> str:
    """Give how the names of a file's own tests begin."""
    if file.startswith(LEARN):
        return f"{OF_HARNESS}test_learn"
    path = Path(file).relative_to(CORE)
    return f"tests/{path.parts[0]}/test_{path.parent.name if path.stem == '__init__' else path.stem}.py"


def measure(kept: Path, files: list[str]) -> list[str]:
    """Measure the test files that have changed, or all if the package has; list those that have tests here."""
    kept.mkdir(parents=True, exist_ok=True)
    late = [file for file in files if not measured(kept, file)]
    if late:
        print(f"measuring which lines {len(late)} test files run", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "tests.mutation.covering", str(kept), *late]
        subprocess.run(command, cwd=PROJECT, env=environment(PROJECT), check=False)
    without = [file for file in late if not measured(kept, file)]
    if without:
        print(f"no test runs here of {', '.join(without)}", file=sys.stderr, flush=True)
    return [file for file in files if file not in without]


def measured(kept: Path, file: str) -> bool:
    """Tell whether a test file has been measured as it is now."""
    path = kept / f"{kept_as(file)}.json"
    return path.exists() and json.loads(path.read_text())["key"] == key_of(file)


def failing(tree: Path, tests: list[str], options: list[str]) -> str | None:
    """Run tests in a tree until one fails or does not end; give its name."""
    last = tree / "last.txt"
    last.write_text("import")
    process = get_context("fork").Process(target=_run, args=(tree, tests, options, last))
    process.start()
    process.join(10 * STUCK)
    code = process.exitcode
    process.kill()
    with contextlib.suppress(ProcessLookupError):  # what a test has started ends with it
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return None if code in (None, pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else last.read_text()


def _run(tree: Path, tests: list[str], options: list[str], last: Path) -> None:
    """Run tests with the package and the tests of a tree, in a process that has imported all else."""
    os.setsid()
    os.chdir(tree)
    os.environ |= environment(tree)
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    files = sorted({test.partition("::")[0] for test in tests})
    os._exit(pytest.main([*OPTIONS, *options, *UNTIL_ONE_FAILS, *files], plugins=[Chosen(tests, last)]))


def import_what_tests_need(files: Iterable[str]) -> None:
    """Import what takes long, once for all runs: each of them is a fork."""
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    names = ["hypothesis.strategies", "msgspec", "networkx", "numba", "numpy", "simpy"]
    if any(file.startswith(OF_HARNESS) for file in files):
        names += filter(find_spec, ("sklearn", "torch"))
    for name in names:
        import_module(name)


if __name__ == "__main__":
    sys.exit(pytest.main([*OPTIONS, *EVERY_CASE, *sys.argv[2:]], plugins=[Measuring(Path(sys.argv[1]))]))
