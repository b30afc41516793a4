"""Requests that are read, and not run: what commands do before they write to a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_CHECK: ContextVar[bool] = ContextVar("is_check", default=False)


class CheckEnded(Exception):
    """The end of a check that found nothing wrong with a request; there is no run."""


@contextmanager
def requests_only() -> Iterator[None]:
    """End each simulation inside with `CheckEnded` when its request is read."""
    token = _IS_CHECK.set(True)
    try:
        yield
    finally:
        _IS_CHECK.reset(token)


def end_check() -> None:
    """End what is done to read a request only."""
    if _IS_CHECK.get():
        raise CheckEnded
