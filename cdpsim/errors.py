"""What cannot be served, and the hint that helps to mend it; and what was served, and ends nowhere."""

from collections.abc import Iterable
from difflib import get_close_matches

from cdpsim.display import one_line


class RequestError(ValueError):
    """A request that cannot be served: one line, `SUBJECT: what is wrong, and the remedy`."""

    def __init__(self, subject: str, problem: str) -> None:
        # A hostile name must not smuggle a second line or control characters into the one that is promised.
        clean = one_line(f"{subject}: {problem}")
        # The remedy stands at the end: what is too long is cut in its middle.
        super().__init__(clean if len(clean) <= 1000 else f"{clean[:600]} ... {clean[-395:]}")
        self.subject, self.problem = subject, problem

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, str], dict[str, object]]:
        # An exception is made again of its args, which are the joined text alone.
        return type(self), (self.subject, self.problem), vars(self)


class Stalled(Exception):
    """A run that does not end: the answer is no, and one line says who waits for whom."""


def choose(subject: str, value: object, known: Iterable[str]) -> str:
    """Refuse what is none of the known names, with the nearest."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        meant = nearest(value if isinstance(value, str) else "", names)
        raise RequestError(subject, f"unknown {subject} {shown(value)}; {meant}")
    return value


def shown(value: object, longest: int = 80) -> str:
    """Write any value as Python does, cut where that is long; only its type where that fails.

    >>> shown("a" * 100, longest=10)
    "'aaaaaa..."
    >>> shown(10**5000)
    'this int'
    """
    try:
        text = repr(value)
    except Exception:  # too many digits for Python, or an object whose own method fails
        return f"this {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write a text: names of files may have bytes that Python keeps as surrogates."""
    return text.encode("utf-8", "ignore").decode() == text


def flag(subject: str, value: object) -> bool:
    """Refuse all but True and False: a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise RequestError(subject, f"{subject}={shown(value)} is neither True nor False; give one of them")
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
