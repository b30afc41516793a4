"""The axes of a sweep: which options vary, which values they have, and which combinations are left out.

what = "compare"
[fixed]
model = "llama3-8b"
[axes]
optimizer = ["adam", "sgd"]
n = { from = 2, to = 32, times = 2 }
bandwidth = { of = "cluster.topology.network.bandwidth", values = ["12.5 GB/s", "50 GB/s"] }
[[together]]
m = [16, 32, 64]
replicas = [4, 2, 1]
[[leave_out]]
optimizer = "sgd"
n = 2
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cdpsim.errors import RequestError, choose, short_repr, suggestion
from cdpsim.files import config

MOST_SWEPT_POINTS = 10_000_000  # the parent keeps the name of each in memory
_SPACED_DIGITS = 6  # of numbers that are evenly spaced between the ends of a range
_EXACT_DIGITS = 12  # of multiples, which have the noise of floats behind them
_RANGE_FORMS = (("step",), ("times",), ("count",), ("count", "spacing"))  # what a range says beside its ends
_QUANTITY_END = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)( ?[A-Za-zµμ/]*)")


class SweepFile(msgspec.Struct, forbid_unknown_fields=True):
    """The top level of the file of a sweep."""

    what: str = "compare"
    fixed: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    together: list[dict[str, Any]] = []
    leave_out: list[dict[str, Any]] = []


class AxisTable(msgspec.Struct, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """An axis that is written as a table."""

    of: str | None = None
    values: list[Any] | None = None
    start: int | float | str | None = None
    end: int | float | str | None = None
    step: int | float | None = None
    times: int | float | None = None
    count: int | None = None
    spacing: str | None = None


class SweepAxis(msgspec.Struct, frozen=True):
    """A column of points: its name, the option or the path of a model's or cluster's file that it sets, its values."""

    name: str
    of: str
    values: tuple[Any, ...]


Dimension = tuple[SweepAxis, ...]  # axes that go side by side


def read_sweep_file(path: str | Path) -> SweepFile:
    """Return the content of the file of a sweep; refuse fields that it does not have."""
    return sweep_of(config.read_config(path), str(path))


def sweep_of(content: object, subject: str) -> SweepFile:
    """Return a sweep of plain dicts and lists; errors begin with `subject`."""
    return config.decode(content, SweepFile, subject, (SweepFile,))


def dimensions_of(given: SweepFile) -> tuple[Dimension, ...]:
    """Return all axes: each of [axes] alone, then the groups that go together, in the order of the file."""
    single = [(_read_axis(name, axis),) for name, axis in given.axes.items()]
    dimensions = (*single, *map(_read_group, given.together))
    if not dimensions:
        raise RequestError("axes", "are missing; write [axes] and at least one list, such as n = [2, 4, 8]")
    every = [axis for dimension in dimensions for axis in dimension]
    for kind in ("name", "of"):
        seen: set[str] = set()
        for axis in every:
            word = getattr(axis, kind)
            if word in seen:
                raise RequestError(f"axes.{axis.name}", f"{word} is an axis twice; leave either out")
            seen.add(word)
    return dimensions


def _read_group(group: Mapping[str, Any]) -> Dimension:
    axes = tuple(_read_axis(name, axis) for name, axis in group.items())
    counts = {axis.name: len(axis.values) for axis in axes}
    if not axes:
        raise RequestError("together", "has a table without axes; write lists of one length")
    if len({*counts.values()}) > 1:
        each = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise RequestError("together", f"axes that go together have equally many values, and {each}; mend the lists")
    return axes


def _read_axis(name: str, given: Any) -> SweepAxis:
    """Return an axis from a list, from a table with a list, or from a range."""
    subject = f"axes.{name}"
    if isinstance(given, Mapping):
        form = config.decode(dict(given), AxisTable, subject, (AxisTable,))
        given = _values_of(form, subject)
        of = form.of or name
    else:
        of = name
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(subject, f"{short_repr(given)} is no list; write [{short_repr(given, 30)}], or a range")
    values = [lowest_form(value) for value in given]
    if not values:
        raise RequestError(subject, "has no values; give at least one, or leave the axis out")
    if len({canonical(value) for value in values}) < len(values):
        texts = [canonical(value) for value in values]
        twice = max(texts, key=texts.count).decode()
        raise RequestError(subject, f"has {twice[:60]} twice; give each value once")
    return SweepAxis(name, of if "." in of else of.replace("-", "_"), tuple(values))


def _values_of(form: AxisTable, subject: str) -> Sequence[Any]:
    """Return the values of an axis that is a table."""
    given = tuple(name for name in ("step", "times", "count", "spacing") if getattr(form, name) is not None)
    if form.values is not None:
        if form.start is not None or form.end is not None or given:
            raise RequestError(subject, "has values, and a range, too; leave either out")
        return form.values
    if form.start is None or form.end is None or given not in _RANGE_FORMS:
        raise RequestError(subject, "is no range; give values, or from and to with one of step, times and count")
    (first, unit), (last, other) = (_amount(end, subject) for end in (form.start, form.end))
    if unit != other:
        raise RequestError(subject, f"goes from {form.start} to {form.end}, two units; give one")
    numbers = _range_numbers(form, first, last, subject)
    return [f"{number:.{_EXACT_DIGITS}g}{unit}" for number in numbers] if unit else numbers


def _amount(given: int | float | str, subject: str) -> tuple[int | float, str]:
    """Return the number and the unit of an end of a range; numbers have no unit."""
    if not isinstance(given, str):
        return given, ""
    quantity = _QUANTITY_END.fullmatch(given.strip())
    if quantity is None:
        raise RequestError(subject, f"{short_repr(given)} is no number; write for example 2 or '12.5 GB/s'")
    return float(quantity[1]), quantity[2]


def _range_numbers(form: AxisTable, first: int | float, last: int | float, subject: str) -> list[int | float]:
    """Return the numbers of a range, its end among them if a step reaches it."""
    by_factors = form.times is not None or form.spacing == "log"
    each = form.step if form.times is None else form.times
    choose("spacing", form.spacing or "linear", ("linear", "log"))
    rises = first < last or (first == last and form.count in (None, 1))
    moves = each is None or each > by_factors
    if not (rises and moves) or (by_factors and first <= 0) or (form.count is not None and form.count < 1):
        raise RequestError(subject, "is a range without values; go up from `from` to `to`, by factors from above 0")
    if form.count == 1 and first < last:
        raise RequestError(subject, "has one value and two ends; give values = [...]")
    if each is None:
        most: float = form.count or 1
    else:
        most = 1 + (math.log(last / first, each) if by_factors else (last - first) / each)
    if most > MOST_SWEPT_POINTS:
        raise RequestError(subject, f"has {most:,.0f} values; a sweep has at most {MOST_SWEPT_POINTS:,} points")
    if each is None:
        return _spaced(first, last, form.count or 1, by_factors)
    values: list[int | float] = []
    value = first
    while value <= last + abs(last) * 10**-_EXACT_DIGITS:
        values.append(_with_digits(value, _EXACT_DIGITS))
        value = first * each ** len(values) if by_factors else first + each * len(values)
    return values


def _spaced(first: float, last: float, count: int, by_factors: bool) -> list[int | float]:
    """Return so many numbers from the first to the last, evenly spaced, or their logarithms are."""
    shares = [k / (count - 1) for k in range(1, count - 1)]
    by = [first * (last / first) ** k if by_factors else first + (last - first) * k for k in shares]
    return [first, *(_with_digits(value, _SPACED_DIGITS) for value in by), *[last] * (count > 1)]


def _with_digits(value: int | float, digits: int) -> int | float:
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def lowest_form(value: Any) -> Any:
    """Return a value of a file with its numbers in lowest form: 2 for 2.0, also in lists and tables; "inf" for inf."""
    if isinstance(value, float) and not math.isfinite(value):  # which JSON does not have
        if math.isnan(value):
            raise RequestError("sweep", "has nan, which is no number; give another value")
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): lowest_form(part) for name, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [lowest_form(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "to_builtins"):
        return lowest_form(value.to_builtins())
    raise RequestError("axes", f"{short_repr(value)} has no place in a file; give a number, a text, a list or a table")


def canonical(value: Any) -> bytes:
    """Return the JSON of a value, the same bytes for the same value: keys sorted, no spaces."""
    return msgspec.json.encode(value, order="sorted")


def left_out_of(given: SweepFile, dimensions: Sequence[Dimension]) -> tuple[dict[str, list[Any]], ...]:
    """Return the combinations to leave out, each as lists of values by axis; refuse what no axis has."""
    axes = {axis.name: axis for dimension in dimensions for axis in dimension}
    combinations = []
    for table in given.leave_out:
        if not table:
            raise RequestError("leave_out", "has an empty table, which would leave out all; name axes in it")
        lists: dict[str, list[Any]] = {}
        for name, value in table.items():
            axis = axes[choose("axis", name, axes)]
            known = {canonical(each) for each in axis.values}
            lists[name] = [lowest_form(each) for each in (value if isinstance(value, list) else [value])]
            for each in lists[name]:
                if canonical(each) not in known:
                    words = suggestion(str(each), [str(other) for other in axis.values])
                    raise RequestError(f"leave_out.{name}", f"{short_repr(each)} is no value of that axis; {words}")
        combinations.append(lists)
    return tuple(combinations)
