"""How laws are tried: each example is drawn anew, and a law fails that gives up more of them than it tries.

A plugin of pytest. `test_law_examples.py` asks that a law which does not give up an example asserts something of it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.statistics import collector

# Hypothesis would try each example five times more, a part of it repeated: 300 requests are of 50 schedules then.
ConjectureRunner.generate_mutations_from = lambda *_: None  # type: ignore[method-assign]


@contextmanager
def trying_at_least_half() -> Iterator[None]:
    """Fail where the laws in this context, together, give up more examples than they try."""
    examples: Counter[str] = Counter()
    tell_others = collector.value

    def count(statistics: Any) -> None:
        drawn = statistics.get("generate-phase", {}).get("test-cases", [])
        examples.update(case["status"] for case in drawn)
        if tell_others:
            tell_others(statistics)

    with collector.with_value(count):  # type: ignore[arg-type]  # whose default is None
        yield
    given_up, tried = examples["invalid"], examples["valid"] + examples["interesting"]
    assert given_up <= tried, f"{given_up} examples given up, {tried} tried: draw what the law needs"


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of hypothesis, whose statistics are kept
def pytest_runtest_call() -> Iterator[None]:
    """Hold each law to it, also one inside a test."""
    with trying_at_least_half():
        return (yield)
