"""Mutants of a small source, all of them."""

import ast

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
