"""The one error that a user can cause, and the hint that helps to mend it."""

from collections.abc import Iterable
from difflib import get_close_matches


class RequestError(ValueError):
    """A request that cannot be served: one line, `SUBJECT: what is wrong, and the remedy`."""

    def __init__(self, subject: str, problem: str) -> None:
        # A hostile name must not smuggle a second line or control characters into the one that is promised.
        clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{subject}: {problem}")
        super().__init__(clean if len(clean) <= 1000 else clean[:997] + "...")
        self.subject = subject


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
