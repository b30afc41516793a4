"""Quantities with a unit, as files and options have them: "25 us", "80 GB", "312 TFLOPS", "300 GB/s"."""

import functools
import math
import re
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from cdpsim.errors import RequestError, short_repr

if TYPE_CHECKING:
    from quantiphy import Quantity

MOST_SECONDS = 1e9
LEAST_SECONDS = 1e-30  # of a task
MOST_BYTES = 10**15


Number = int | float | Fraction


def simplified(value: Number) -> Any:
    """Return a whole fraction as the integer that it is, any other number as it is."""
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else value


def json_number(value: Number) -> int | float | str:
    """Return a number as JSON has it: a fraction as a text, in lowest terms."""
    return str(value) if isinstance(value, Fraction) else value


class Work(float):
    """A number of FLOP, which a device's speed turns into seconds; it never equals a number of seconds."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Work) and float(self) == float(other)

    def __ne__(self, other: object) -> bool:  # float has a method of its own for it
        return not self == other

    def __hash__(self) -> int:
        return hash((Work, float(self)))

    def __repr__(self) -> str:
        return f"Work({float(self)!r})"


class _QuantityKind(NamedTuple):
    noun: str
    units: tuple[str, ...]
    example: str
    least: float
    most: float
    binary: bool = False  # takes Ki, Mi, Gi, Ti


# A least amount above zero is one that no machine reaches, and small enough that no quotient of two bounds overflows.
_TIME = _QuantityKind("a time", ("s",), "5 us", 0, MOST_SECONDS)
_DURATION = _TIME._replace(least=LEAST_SECONDS)
_WORK = _QuantityKind("work", ("FLOP",), "2.5 TFLOP", 1e-30, 1e24)
_SIZE = _QuantityKind("a size", ("B",), "80 GB", 0, MOST_BYTES, binary=True)
_SPEED = _QuantityKind("a speed", ("FLOPS", "FLOP/s"), "312 TFLOPS", 1e-9, 1e21)
_BANDWIDTH = _QuantityKind("a bandwidth", ("B/s",), "300 GB/s", 1e-9, 1e18, binary=True)

# quantiphy alone would also take "x = 5 s", "1,000 s", "$5" and "5 s -- as measured".
_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)? ?[a-zµμ/]*", re.IGNORECASE | re.ASCII)
_BITS = re.compile(r"(b|bits?)(/s|ps)?")
_LONGEST_QUANTITY = 60


def seconds(given: object) -> float:
    """Return the seconds of a time such as "5 us"."""
    return float(_parse(given, _TIME)[0])


def time_or_work(given: object) -> "float | Work":
    """Return the cost of a task, which is above zero: seconds, or `Work`; one that says more is returned as it is."""
    if isinstance(given, Work) and type(given) is not Work:
        return given
    amount, kind = _parse(given, _DURATION, _WORK)
    return Work(amount) if kind is _WORK else float(amount)


def size_bytes(given: object) -> int:
    """Return the bytes of a size such as "80 GB" or "16 MiB"."""
    amount, kind = _parse(given, _SIZE)
    whole = round(amount)
    if abs(amount - whole) > 4 * math.ulp(amount):
        raise _refusal(given, "a fraction of a byte", kind)
    return whole


def sizes_bytes(given: object) -> tuple[int, ...]:
    """Return the bytes of one size, or of a list of them."""
    return tuple(map(size_bytes, given if isinstance(given, list | tuple) else [given]))


def speed(given: object) -> float:
    """Return the FLOP/s of a speed such as "312 TFLOPS"."""
    return float(_parse(given, _SPEED)[0])


def bandwidth(given: object) -> float:
    """Return the bytes/s of a bandwidth such as "300 GB/s", or infinity for "inf"."""
    if isinstance(given, str | float) and given in ("inf", math.inf):
        return math.inf
    return float(_parse(given, _BANDWIDTH)[0])


@functools.lru_cache(maxsize=4096, typed=True)  # one run after another records the same model and cluster
def quantity_text(amount: float, unit: str) -> str:
    """Return an amount as a text that is read as the same number to the last bit: "25 us" for 2.5e-05 of "s"."""
    if amount == math.inf:
        return "inf"
    reader = _reader()
    shortest, exact = (reader(amount, unit).render(prec=digits) for digits in (12, 16))
    return shortest if float(reader(shortest)) == amount else exact


def counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "device"), counted(1024, "device"), counted(2, "micro-batch")
    ('1 device', '1,024 devices', '2 micro-batches')
    """
    return f"{count:,} {in_number(count, noun)}"


def in_number(count: object, noun: str) -> str:
    """Return a noun in the singular for 1, else in the plural."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return noun if count == 1 else noun + ending


def short_text(value: float, unit: str, digits: int = 4) -> str:
    """Return a number for people: "25.3 GB/s", "1.5 %" for 0.015 of "%", "2.5" for 2.5 of "x"."""
    if unit == "%":
        return f"{100 * value:.{digits - 3}f} %"
    if unit in ("/s", "x"):
        number = f"{value:.0f}" if 10**digits <= value < 10**15 else f"{value:.{digits}g}"
        return f"{number} /s" if unit == "/s" else number  # "m/s", a thousandth of it, would be metres
    from quantiphy import Quantity

    return str(Quantity(value, unit).render(prec=digits - 1))


def _parse(given: object, *kinds: _QuantityKind) -> tuple[int | float, _QuantityKind]:
    """Return the amount, and which of the `kinds` it is of; a number without a unit is of the first."""
    amount: int | float
    if isinstance(given, Work):
        amount, unit = float(given), "FLOP"
    elif isinstance(given, Real) and not isinstance(given, bool):
        amount, unit = given if isinstance(given, int) else float(given), kinds[0].units[0]
    else:
        amount, unit = _split(given, kinds[0])
    kind = next((kind for kind in kinds if unit in kind.units), None)
    if kind is None:
        raise _refusal(given, _misfit(unit, kinds), kinds[0])
    if not kind.least <= amount <= kind.most:
        raise _refusal(given, f"not between {kind.least:g} and {kind.most:g} {kind.units[0]}", kind)
    return amount, kind


def _split(given: object, kind: _QuantityKind) -> tuple[float, str]:
    if not (isinstance(given, str) and len(given) <= _LONGEST_QUANTITY and _QUANTITY.fullmatch(given)):
        raise _refusal(given, f"not {kind.noun}", kind)
    return _amount_and_unit(given, kind.binary)


@functools.lru_cache(maxsize=4096)  # many layers of a model have the same quantities
def _amount_and_unit(given: str, binary: bool) -> tuple[float, str]:
    quantity = _reader()(given, binary=binary)
    return float(quantity), quantity.units


def _misfit(unit: str, kinds: tuple[_QuantityKind, ...]) -> str:
    if not unit:
        return "no unit"
    if kinds[0].binary and _BITS.fullmatch(unit):
        return "bits, not bytes"
    return f"not {' or '.join(kind.noun for kind in kinds)}"


def _refusal(given: object, problem: str, kind: _QuantityKind) -> RequestError:
    huge = isinstance(given, int) and abs(given) > 10**_LONGEST_QUANTITY  # whose digits Python may refuse to write
    return RequestError(
        "this number" if huge else short_repr(given, _LONGEST_QUANTITY),
        f"{problem}; write for example {kind.example!r}",
    )


@functools.cache
def _reader() -> "type[Quantity]":
    from quantiphy import Quantity  # slow to import, and most runs read no file

    class Reader(Quantity):  # with preferences of its own: those of Quantity itself belong to other programs, too
        pass

    Reader.set_prefs(input_sf="YZEPTGMKkmuµμnp", output_sf="YZEPTGMkmunp")
    return Reader
