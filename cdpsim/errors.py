"""What cannot be served, and the hint that helps to mend it; and what was served, and ends nowhere."""

from collections.abc import Iterable
from difflib import get_close_matches


class RequestError(ValueError):
    """A request that cannot be served: one line, `SUBJECT: what is wrong, and the remedy`."""

    def __init__(self, subject: str, problem: str) -> None:
        # A hostile name must not smuggle a second line or control characters into the one that is promised.
        clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{subject}: {problem}")
        # The remedy stands at the end: what is too long is cut in its middle.
        super().__init__(clean if len(clean) <= 1000 else f"{clean[:600]} ... {clean[-395:]}")
        self.subject = subject


class Stalled(Exception):
    """A run that does not end: the answer is no, and one line says who waits for whom."""


def choose(subject: str, value: object, known: Iterable[str]) -> str:
    """Refuse what is none of the known names, with the nearest."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        shown = repr(value)
        raise RequestError(subject, f"unknown {subject} {shown}; {nearest(str(value), names)}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """Finish a sentence about an unknown `word`: the nearest known name, or all of them.

    >>> nearest("cdp", ["multi-cdp", "zero-dp"])
    "did you mean 'multi-cdp'?"
    >>> nearest("x", ["fast", "simpy"])
    'known are fast, simpy'
    """
    names = list(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
