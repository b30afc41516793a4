"""Tables of a test whose rows take milliseconds: one case that tries them all, and lists those that fail."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def every_row(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Test], Test]:
    """Try a test with each row of a table, as `pytest.mark.parametrize` does with a case for each.

    Where each row reaches lines of its own, as refusals do, a choice among cases would leave some of them out.
    """
    names, table = (names,) if isinstance(names, str) else names, list(table)
    assert table

    def decorate(test: Test) -> Test:
        @wraps(test)
        def try_all(**fixtures: Any) -> None:
            failed = []
            for row in table:
                values = (row,) if len(names) == 1 else row
                try:
                    test(**dict(zip(names, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{row!r}: {type(error).__name__}: {error}")
            assert not failed, "\n\n".join(failed)

        left = [each for name, each in inspect.signature(test).parameters.items() if name not in names]
        vars(try_all)["__signature__"] = inspect.Signature(left)
        return try_all

    return decorate
