"""Errors that users see, and the checks of single values that raise them."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from textwrap import shorten
from typing import Any

_NEARNESS = 0.7  # twice the letters in common, in order, of the letters of both words
_FEW = 3


def one_line(text: str, longest: int | None = None) -> str:
    r"""Return text on one line: unprintable characters escaped, and cut if longer than `longest` characters.

    Line breaks, control characters, marks that turn the direction of writing and lone surrogates are escaped.

    >>> one_line("a\x1b[31m\u202eb\nc")
    'a\\x1b[31m\\u202eb\\nc'
    >>> one_line("a-long-name", 6)
    'a-lon…'
    """
    line = text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if longest is None or len(line) <= longest else f"{line[: longest - 1]}…"


class RequestError(ValueError):
    """A request that cannot be served: one line, `SUBJECT: the problem, and the remedy`."""

    def __init__(self, subject: str, problem: str) -> None:
        # A hostile name must not add a second line or control characters to the message.
        line = one_line(f"{subject}: {problem}")
        # The remedy is at the end of the line, so a long line is cut in its middle.
        super().__init__(line if len(line) <= 1000 else f"{line[:600]} ... {line[-395:]}")
        self.subject, self.problem = subject, problem

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, str], dict[str, object]]:
        # By default, pickle would call the class with the joined line as its only argument.
        return type(self), (self.subject, self.problem), vars(self)


class UnknownName(RequestError):
    """A name that does not exist."""


class TooLarge(RequestError):
    """A run for which there is no room, in this machine's memory or in what the package can number."""


class Stalled(Exception):
    """A simulated run that never ends, such as a deadlock: one line says which device waits for which."""


def choose(subject: str, value: object, known: Iterable[str]) -> str:
    """Return a value that is one of the known names; refuse any other, with the nearest name."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        hint = suggestion(value if isinstance(value, str) else "", names)
        raise UnknownName(subject, f"unknown {subject} {short_repr(value)}; {hint}")
    return value


def in_known_case(value: Any, known: Iterable[str]) -> Any:
    """Return the known name that differs from a value in nothing but the case of letters; else the value.

    >>> in_known_case("AdamW", ["adam", "adamw"]), in_known_case("sdg", ["sgd"])
    ('adamw', 'sdg')
    """
    if not isinstance(value, str):
        return value
    return next((name for name in known if name.casefold() == value.casefold()), value)


def refuse_unknown(
    function: str, given: Iterable[str], known: Iterable[str], refuse_first: Callable[[str], object] = str
) -> None:
    """Refuse keyword arguments that a function does not have, with the nearest, unless `refuse_first` does."""
    names = list(known)
    for name in given:
        if name not in names:
            refuse_first(name)
            problem = f"{function}() got an unexpected keyword argument {short_repr(name)}"
            raise TypeError(f"{problem}; {suggestion(name, names)}")


def true_or_false(subject: str, value: object) -> bool:
    """Return a value that is True or False; refuse any other, as a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise RequestError(subject, f"{subject}={short_repr(value)} is neither True nor False; give one of them")
    return value


def neighbours(wanted: int, fits: Sequence[int]) -> str:
    """Return which numbers that fit are next to one that does not, in words.

    >>> neighbours(5, [1, 2, 4, 8]), neighbours(9, [1, 2, 4, 8])
    ('4 and 8 do', '8 does')
    """
    near = [*[max((n for n in fits if n < wanted), default=0)], *[min((n for n in fits if n > wanted), default=0)]]
    words = [str(n) for n in near if n]
    return f"{' and '.join(words)} {'do' if len(words) > 1 else 'does'}"


def whole_number(subject: str, value: object, *, at_least: int) -> int:
    """Return the whole number that a value is, or that its digits are; refuse any other value, and smaller numbers.

    >>> whole_number("n", "12", at_least=1)
    12
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        text = "9" * 19 if abs(int(value)) >= 10**18 else str(int(value))
    else:
        text = value if isinstance(value, str) else short_repr(value)
    if isinstance(value, bool) or not (text.isascii() and text.removeprefix("-").isdigit()):
        raise RequestError(subject, f"{subject}={text[:40]} must be a whole number of at least {at_least}")
    if len(text) > 18:
        raise RequestError(subject, f"{subject}={text[:18]}... is astronomically large; use a smaller one")
    if int(text) < at_least:
        raise RequestError(subject, f"{subject}={text} must be at least {at_least}")
    return int(text)


def short_repr(value: object, longest: int = 80) -> str:
    """Return the `repr` of any value, cut if it is long; the name of its type if `repr` fails.

    >>> short_repr("a" * 100, longest=10)
    "'aaaaaa..."
    >>> short_repr(10**5000)
    'this int'
    """
    try:
        text = repr(value)
    except Exception:  # too many digits for Python, or an object whose own method fails
        return f"this {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text; file names may hold bytes that Python keeps as surrogates."""
    return text.encode("utf-8", "ignore").decode() == text


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a word is a part of, if there are few, else the one that it is a misspelling of.

    >>> nearest("mutli-cdp", ["multi-cdp", "zero-dp"]), nearest("a100", ["a100-node", "a100-nodes"])
    (['multi-cdp'], ['a100-node', 'a100-nodes'])
    """
    names = {name.casefold(): name for name in known}
    word = word.casefold()
    parts = [name for name in names if len(word) > 2 and word in name]
    if not 0 < len(parts) <= _FEW:
        parts = get_close_matches(word, names, n=1, cutoff=_NEARNESS)
    return [names[name] for name in parts]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown word: similar names, or known names up to the length of a line.

    >>> suggestion("cdp", ["multi-cdp", "zero-dp"])
    "did you mean 'multi-cdp'?"
    >>> suggestion("x", ["fast", "simpy"])
    'known are fast, simpy'
    """
    names = list(known)
    if close := nearest(word, names):
        return f"did you mean {' or '.join(map(repr, close))}?"
    shown = shorten(", ".join(names), 80, placeholder="", break_on_hyphens=False).rstrip(",")
    others = len(names) - shown.count(", ") - 1
    return f"known are {shown} and {others} more" if others else f"known are {shown}"
