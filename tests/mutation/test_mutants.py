"""Mutants of a small source, all of them, and the tests that one meets."""

import ast
import json
from pathlib import Path

import pytest

from tests.mutation.covering import CORE, LEARN, Covering, files_with_tests
from tests.mutation.mutants import mutants

SOURCE = '''"""A module."""

LIMIT: int = 0


class Case(Struct, frozen=True):
    """A class."""

    @cached(8)
    def least(self, values: tuple[1], wanted=True):
        """Say 1 < 2."""
        assert values, "1"
        for value in values[1:]:
            if value < 2 and not wanted:
                raise Error(f"é {1 + 1}", 1)
            self.total += min(value, 3.5)
        for one, other in zip(self, values, strict=True):
            raise AssertionError
        return self.total
'''
EXPECTED = [
    ("", "LIMIT: int = 0", "LIMIT: int = (1)"),
    (
        "Case.least",
        "def least(self, values: tuple[1], wanted=True):",
        "def least(self, values: tuple[1], wanted=(False)):",
    ),
    ("Case.least", "for value in values[1:]:", "for value in values[:]:"),
    ("Case.least", "for value in values[1:]:", "for value in values[(2):]:"),
    ("Case.least", "if value < 2 and not wanted:", "if (not (value < 2 and (not wanted))):"),
    ("Case.least", "if value < 2 and not wanted:", "if (value < 2 or not wanted):"),
    ("Case.least", "if value < 2 and not wanted:", "if (value <= 2) and not wanted:"),
    ("Case.least", "if value < 2 and not wanted:", "if value < (3) and not wanted:"),
    ("Case.least", "if value < 2 and not wanted:", "if value < 2 and (wanted):"),
    ("Case.least", 'raise Error(f"é {1 + 1}", 1)', "pass"),
    ("Case.least", "self.total += min(value, 3.5)", "pass"),
    ("Case.least", "self.total += min(value, 3.5)", "self.total -= min(value, 3.5)"),
    ("Case.least", "self.total += min(value, 3.5)", "self.total += (max)(value, 3.5)"),
    ("Case.least", "self.total += min(value, 3.5)", "self.total += min(value, (4.5))"),
    ("Case.least", "return self.total", "return None"),
]


def test_each_mutant_changes_one_thing() -> None:
    """Neither docstrings, annotations, decorators and assertions nor what errors say; each one can be read."""
    found = mutants("case.py", SOURCE)
    assert sorted((one.function, *one.change(SOURCE)) for one in found) == sorted(EXPECTED)
    for one in found:
        assert ast.dump(ast.parse(one.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))


def test_a_mutant_has_the_lines_of_its_statement() -> None:
    """Tests that run one of these lines run the mutant: of a default all of the function, of a condition itself."""
    lines = {one.change(SOURCE): one.lines for one in mutants("case.py", SOURCE)}
    by_after = {after: run for (_, after), run in lines.items()}
    assert by_after["if value < (3) and not wanted:"] == range(14, 15)
    assert by_after["def least(self, values: tuple[1], wanted=(False)):"] == range(10, 20)


def test_a_mutant_meets_the_cheapest_tests_of_its_lines(tmp_path: Path) -> None:
    """Three in all take 81 s, so the one of 50 is left out, unless it alone is to be met; a file's own come first."""
    data = pytest.importorskip("coverage").CoverageData(str(tmp_path / "tests.room.test_page"))
    seconds = {"own": 30.0, "one": 1.0, "long": 50.0, "of_another_line": 1.0}
    named = {name: f"tests/room/test_{'page' if name == 'own' else 'book'}.py::{name}" for name in seconds}
    for name, test in named.items():
        data.set_context(test)
        data.add_lines({"cdpsim/room/page.py": [8 if name == "of_another_line" else 7]})
    data.write()
    answer = {"key": "", "seconds": {named[name]: spent for name, spent in seconds.items()}}
    (tmp_path / "tests.room.test_page.json").write_text(json.dumps(answer))
    covering = Covering(tmp_path, ["tests/room/test_page.py"])
    found = covering.tests("cdpsim/room/page.py", range(7, 8), among=covering.seconds)
    assert found == [named["own"], named["one"]]
    assert covering.tests("cdpsim/room/page.py", [7], among={named["long"]}) == [named["long"]]


def test_mutants_of_the_harness_meet_its_tests_and_no_others_do() -> None:
    ours, of_harness = set(files_with_tests(CORE)), set(files_with_tests(LEARN))
    assert "tests/validation/test_learn.py" in of_harness
    assert {"tests/trace/test_waiting.py", "cdpsim/files/units.py"} <= ours
    assert not ours & of_harness
