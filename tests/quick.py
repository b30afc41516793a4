"""Checks of a change in under 20 seconds: `python -m tests.quick`, or `make quick`.

Checks the Python files that have changed since the last commit, the house rules, and the small suite of the rooms that
changed: tests near to the change before others, a case of each before second ones. The last may find no time left.
"""

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
HOUSE = "tests/test_house.py"
# Files that are tested by a file of another name; a page of docs/ is a test itself.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "DESIGN.md": "tests/test_design.py",
    "docs/papers/": "tests/test_papers.py",
    "docs/reference/": "tests/test_reference_pages.py",
    "notebooks/": "tests/test_notebooks.py",
    "cdpsim/cli/completion/": "tests/cli/test_completion.py",
    "cdpsim/cli/help/": "tests/cli/test_help.py",
    "validation/help/": "tests/validation/test_harness_options.py",
}
SESSIONS = "tests/test_docs.py::test_the_sessions_of_a_page_print_and_draw_what_it_shows"
FAR = 2  # from tests to a module that they do not import
SECONDS = 14  # in which tests may begin


# The files that have changed.


def git(*words: str) -> list[str]:
    """Return the lines that git prints in the project; none where it fails."""
    done = subprocess.run(["git", "-C", str(PROJECT), *words], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if not done.returncode else []


def changed_files() -> tuple[str, list[str]]:
    """Return since when files have changed, and which: since the last commit, or in commits that are not pushed."""
    ignored = ("ls-files", "--others", "--exclude-standard")
    if changed := [*git("diff", "--name-only", "HEAD"), *git(*ignored)]:
        return "the last commit", changed
    pushed = git("merge-base", "HEAD", "@{upstream}")
    before = pushed if pushed != git("rev-parse", "HEAD") and pushed else git("rev-parse", "HEAD~1")
    return (f"{before[0][:12]}", git("diff", "--name-only", before[0])) if before else ("the last commit", [])


# Their tests.


def tests_of(changed: Iterable[str], project: Path = PROJECT) -> list[str]:
    """Return what pytest runs for files that have changed: the nearest first, and at the end all of their rooms."""
    changed = list(changed)
    own = [tests for each in changed for tests in beside(each, project)]
    rooms = {tests for each in changed for tests in room_of(each, project)}
    far = {tests: min(distance(project / tests, each) for each in changed) for tests in rooms}
    return list(dict.fromkeys([*own, *sorted(rooms, key=lambda tests: (far[tests], tests))]))


def beside(changed: str, project: Path) -> Iterator[str]:
    """Yield what a file has of tests and examples itself, and the file of tests that is about it."""
    path = project / changed
    if not path.exists():
        return
    if path.match("test_*.py") or is_doctested(changed):
        yield changed
    if path.suffix == ".md" and is_doctested(changed) and "\n```console\n" in path.read_text(encoding="utf-8"):
        yield f"{SESSIONS}[{changed}]"
    yield from (tests for what, tests in ELSEWHERE.items() if changed.startswith(what))


def is_doctested(name: str) -> bool:
    """Return whether pytest looks for examples in a file."""
    return name == "README.md" or bool(re.match(r"docs/.*\.md$|cdpsim/.*\.py$", name))


def room_of(changed: str, project: Path) -> Iterator[str]:
    """Yield the files of tests of the room that a file is in; of one that has none, those that are near to the file."""
    package, _, inner = changed.partition("/")
    if package not in ("cdpsim", "tests", "validation") or Path(inner).name.startswith("test_"):
        return
    folder = project / "tests"
    found = [*(folder / ("validation" if package == "validation" else Path(inner).parts[0])).glob("test_*.py")]
    for path in found or folder.rglob("test_*.py"):
        if found or distance(path, changed) < FAR:
            yield str(path.relative_to(project))


def distance(tests: Path, changed: str) -> int:
    """Return how far tests are from a module: 0 where they have its name, 1 where they import it."""
    module = Path(changed).with_suffix("")
    dotted = ".".join(module.parent.parts if module.name == "__init__" else module.parts)
    if tests.stem == f"test_{module.name}":
        return 0
    imported = rf"^(from|import) {re.escape(dotted)}\b"
    return 1 if re.search(imported, tests.read_text("utf-8"), re.MULTILINE) else FAR


# A plugin of pytest: `-p tests.quick`. It comes before all other plugins of tests, so it imports none of them.

began = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first case of each test come before the second one of any."""
    turns: Counter[str] = Counter()
    order = []
    for at, item in enumerate(items):
        function = item.nodeid.partition("[")[0]
        order.append((turns[function], at))
        turns[function] += 1
    items[:] = [items[at] for _, at in sorted(order)]


def pytest_runtest_setup() -> None:
    """Skip a case for which there is no time left."""
    if time.monotonic() - began > SECONDS:
        pytest.skip(f"after {SECONDS} seconds; make room runs all of a room")


# The command.

PYTEST = ("pytest", "-q", "-n", "0")


def start(*words: str) -> "subprocess.Popen[str]":
    """Start a module of Python, and say so."""
    print("python -m", *words, flush=True)
    out = subprocess.PIPE if HOUSE in words else None  # which runs beside others
    return subprocess.Popen(
        [sys.executable, "-m", *words], cwd=PROJECT, stdout=out, stderr=subprocess.STDOUT, text=True
    )


def check(changed: list[str]) -> bool:
    """Check files that have changed, rooms, and beside them the house rules."""
    python = [name for name in changed if name.endswith(".py") and (PROJECT / name).exists()]
    bad = 0
    if python and find_spec("ruff"):
        bad += start("ruff", "check", "-q", *python).wait() + start("ruff", "format", "-q", "--check", *python).wait()
    elif python:
        print("ruff is not installed: pip install -c constraints.txt ruff")
    house = start(*PYTEST, HOUSE)
    if tests := tests_of(changed):
        ended = start(*PYTEST, "-rs", "-p", "tests.quick", *tests).wait()
        bad += ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # as of a page without examples
    print(house.communicate()[0])
    return not (bad or house.returncode)


def main() -> int:
    """Check what has changed, and say in how many seconds."""
    if not (PROJECT / ".git").exists() or not git("rev-parse", "HEAD"):
        print("there is no git history to say what has changed; make room ROOM=trace tests a room, make test all")
        return 2
    since, changed = changed_files()
    print(f"changed since {since}: {', '.join(changed) or 'nothing'}")
    good = check(changed)
    print(f"{time.monotonic() - began:.1f} s; {'good' if good else 'not good'}")
    return not good


if __name__ == "__main__":
    sys.exit(main())
