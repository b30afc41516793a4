"""`make quick`: which tests a change needs, what it says without git history, and that it has an end."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import quick

PROJECT = Path(__file__).parent.parent
# Some files, and the imports of those that are tests.
TREE = {
    "cdpsim/api.py": "",
    "cdpsim/limits.py": "",
    "cdpsim/trace/waiting.py": "",
    "cdpsim/trace/__init__.py": "",
    "docs/start.md": "# Start\n\n```console\n$ cdpsim --version\n```\n",
    "docs/plain.md": "# Plain\n",
    "tests/README.md": "# Tests\n\n```console\n$ pytest\n```\n",
    "tests/helpers/rows.py": "",
    "tests/selection.py": "",
    "tests/test_api.py": "",
    "tests/test_selection.py": "",
    "tests/trace/test_table.py": "from cdpsim.trace import TABLES\nimport cdpsim.api\n",
    "tests/trace/test_times.py": "from tests.helpers.rows import rows\nfrom cdpsim.trace.waiting import waits\n",
    "tests/trace/test_waiting.py": "",
    "tests/validation/test_learn.py": "from validation.learn import updates\n",
    "tests/validation/test_zoo.py": "import cdpsim.limits\n",
    "validation/learn/updates.py": "",
}
SESSION = quick.SESSIONS + "[docs/start.md]"
TRACE = ["tests/trace/test_table.py", "tests/trace/test_times.py", "tests/trace/test_waiting.py"]
NEEDS = {
    "cdpsim/api.py": ["cdpsim/api.py", "tests/test_api.py", "tests/trace/test_table.py"],
    "cdpsim/limits.py": ["cdpsim/limits.py", "tests/validation/test_zoo.py"],
    "cdpsim/trace/waiting.py": ["cdpsim/trace/waiting.py", *reversed(TRACE)],
    "cdpsim/trace/__init__.py": ["cdpsim/trace/__init__.py", *TRACE],
    "cdpsim/trace/gone.py": TRACE,
    "docs/start.md": ["docs/start.md", SESSION],
    "docs/plain.md": ["docs/plain.md"],
    "tests/README.md": [],
    "tests/helpers/rows.py": ["tests/trace/test_times.py"],
    "tests/selection.py": ["tests/test_selection.py"],
    "tests/trace/test_table.py": ["tests/trace/test_table.py"],
    "tests/trace/test_gone.py": [],
    "validation/learn/updates.py": ["tests/validation/test_learn.py", "tests/validation/test_zoo.py"],
    "Makefile": [],
    "README.md": [],  # which this tree does not have
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with these files."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("changed", NEEDS)
def test_the_nearest_tests_come_first_and_then_those_of_the_room(changed: str, tree: Path) -> None:
    """Of a helper, and of a module without tests of its own, those that import it."""
    assert quick.tests_of([changed], tree) == NEEDS[changed]


def test_what_is_nearest_to_any_change_comes_before_the_rest_of_a_room(tree: Path) -> None:
    found = quick.tests_of(["cdpsim/api.py", "cdpsim/trace/waiting.py"], tree)
    assert found == ["cdpsim/api.py", "cdpsim/trace/waiting.py", "tests/test_api.py", TRACE[2], *TRACE[:2]]


@pytest.mark.slow
def test_every_module_of_this_project_has_tests() -> None:
    """All that are named exist; `__main__` is run by tests of the command line."""
    modules = [str(path.relative_to(PROJECT)) for path in (PROJECT / "cdpsim").rglob("*.py")]
    modules.remove("cdpsim/__main__.py")
    lonely = [name for name in modules if not [test for test in quick.tests_of([name]) if test.startswith("tests/")]]
    assert not lonely
    named = {*quick.tests_of([*modules, *quick.ELSEWHERE]), quick.HOUSE, quick.SESSIONS, *quick.ELSEWHERE.values()}
    assert not [name for name in named if not (PROJECT / name.partition("::")[0]).exists()]
    file, _, function = quick.SESSIONS.partition("::")
    assert re.search(rf"^def {function}\(", (PROJECT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_without_git_history_it_says_what_to_run_instead(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "PROJECT", tree)
    assert quick.main() == 2
    assert capsys.readouterr().out == (
        "there is no git history to say what has changed; make room ROOM=trace tests a room, make test all\n"
    )


def test_a_case_of_each_test_comes_before_second_cases() -> None:
    cases = ["a.py::one[1]", "a.py::one[2]", "a.py::two", "b.py::one[1]", "b.py::one[2]", "b.py::one[3]", "b.py::two"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in cases]
    quick.pytest_collection_modifyitems(items)
    assert [cases.index(item.nodeid) for item in items] == [0, 2, 3, 6, 1, 4, 5]


def test_a_case_is_skipped_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "began", time.monotonic())
    quick.pytest_runtest_setup()
    monkeypatch.setattr(quick, "began", time.monotonic() - quick.SECONDS)
    with pytest.raises(pytest.skip.Exception, match=r"^after \d+ seconds; make room runs all of a room$"):
        quick.pytest_runtest_setup()


def test_pytest_can_load_it_before_its_other_plugins() -> None:
    """Which it must import itself, to show what assertions compare."""
    program = "import sys, tests.quick; print(*(name for name in sys.modules if name.startswith('tests.')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "tests.quick\n"
