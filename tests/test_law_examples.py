"""Laws try what they say: no way through one without an assertion, few examples given up, every schedule drawn."""

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector

from cdpsim import SCHEDULES
from tests.helpers.strategies import requests
from tests.laws import trying_at_least_half

TESTS = Path(__file__).parent
TOYS = {"test_selection.py"}  # whose laws are there to have their examples counted
LEAVES = ast.Return | ast.Continue | ast.Break
ON = "on"  # to the next statement


def is_law(function: ast.FunctionDef) -> bool:
    """Return whether hypothesis draws a function's examples."""
    return any(ast.unparse(decorator).startswith("given(") for decorator in function.decorator_list)


def is_check(name: str) -> bool:
    """Return whether a function is named as one that asserts for laws, and so is held to what they are."""
    return bool(re.match(r"(check|assert)(_|$)", name))


def asserts(statement: ast.AST) -> bool:
    """Return whether a statement asserts, expects a refusal, calls a function that asserts, or gives an example up."""
    match statement:
        case ast.Assert() | ast.Raise():
            return True
        case ast.With(items=[ast.withitem(ast.Call(func=called)), *_]):
            return ast.unparse(called) == "pytest.raises"
        case ast.Expr(ast.Call(func=called)):
            name = ast.unparse(called).rpartition(".")[2]
            return is_check(name) or name == "reject"
    return False


def silent_ways(block: Sequence[ast.stmt]) -> set[str]:
    """Return where statements lead without an assertion: on, out of the function, or to another turn of a loop.

    A loop that asserts is taken to have a turn.
    """
    ways: set[str] = set()
    for statement in block:
        if asserts(statement):
            return ways
        if isinstance(statement, LEAVES):
            return ways | {ast.unparse(statement)}
        here = silent_ways_through(statement)
        ways |= here - {ON}
        if ON not in here:
            return ways
    return ways | {ON}


def silent_ways_through(statement: ast.stmt) -> set[str]:
    """Return the same of a statement that may have others within."""
    match statement:
        case ast.If():
            return silent_ways(statement.body) | silent_ways(statement.orelse)
        case ast.Try():
            blocks = [[*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers)]
            return set().union(*map(silent_ways, blocks))
        case ast.With():
            return silent_ways(statement.body)
        case ast.For() | ast.While() if any(map(asserts, ast.walk(statement))):
            return silent_ways(statement.body)
    return {ON}


def offenders(source: str) -> list[str]:
    """List the laws of a module, and the functions that assert for them, that can end without an assertion."""
    if not re.search(r"@given|def (check|assert)", source):
        return []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    held = [one for one in functions if is_law(one) or (is_check(one.name) and any(map(asserts, ast.walk(one))))]
    return [one.name for one in held if silent_ways(one.body)]


def test_no_law_ends_without_an_assertion() -> None:
    """A law asks for what it needs, or gives an example up by `assume` or `reject`, which is counted."""
    found = {str(path.relative_to(TESTS)): offenders(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    assert not {path: names for path, names in found.items() if names and path not in TOYS}


@pytest.mark.parametrize(
    "body",
    [
        "if not x: return\nassert x",
        "if x: assert x",
        "for y in x:\n  if y: continue\n  assert y",
        "try: assert run(x)\nexcept RequestError: pass",
        "with context():\n  if x: check(x)",
    ],
)
def test_a_way_without_an_assertion_is_found(body: str) -> None:
    law = "@given(integers())\ndef law(x):\n{}\n"
    assert offenders(law.format(indented(body))) == ["law"]
    assert offenders(law.format(indented(f"assert x\n{body}"))) == []


def indented(body: str) -> str:
    return "\n".join(f"  {line}" for line in body.splitlines())


def try_on(strategy: st.SearchStrategy[Any], count: int, law: Callable[[Any], None]) -> None:
    """Try a law on examples, the same each time."""
    settled = settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    settled(seed(1)(given(strategy)(law)))()


@pytest.mark.parametrize(
    ("of_ten", "outcome"), [(3, pytest.raises(AssertionError, match="given up")), (7, nullcontext())]
)
def test_a_law_fails_that_gives_up_more_than_half_of_its_examples(of_ten: int, outcome: Any) -> None:
    def law(number: int) -> None:
        assume(number % 10 < of_ten)

    with collector.with_value(None), outcome, trying_at_least_half():  # of what runs this test
        try_on(st.integers(0, 10**6), 100, law)


@pytest.mark.slow
def test_300_draws_give_every_schedule() -> None:
    found = set()

    def note(asked: dict[str, Any]) -> None:
        found.add(asked["schedule"].name)

    try_on(requests(), 300, note)
    assert found == set(SCHEDULES)
