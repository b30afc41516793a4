"""The points of a sweep: the axes of its file, what the files say that it names, and the number and name of each point.

A point is its request in full, in canonical JSON: all options that the sweep gives, where a model, a cluster or a file
is the digest of its content. Its name is the first half of the sha256 of that, of the question and of `RESULTS`. So a
point has one name in every sweep, and another one once results may have changed.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, short_repr, suggestion
from cdpsim.files import config
from cdpsim.files.config import is_preset, read_preset
from cdpsim.files.writing import read_text
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.request.options import choose_option
from cdpsim.studies.sweep.questions import find_question
from cdpsim.version import RESULTS

MOST_SWEPT_POINTS = 10_000_000  # the parent keeps the name of each in memory
NAME_BYTES = 16
_SPACED_DIGITS = 6  # of numbers that are evenly spaced between the ends of a range
_EXACT_DIGITS = 12  # of multiples, which have the noise of floats behind them
_MOST_END = 1e100  # of a range, so that no product of it and a factor overflows
_RANGE_FORMS = (("step",), ("times",), ("count",), ("count", "spacing"))  # what a range says beside its ends
_QUANTITY_END = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)( ?[A-Za-zµμ/]*)")
_READERS: dict[str, Callable[[object, str], Any]] = {"model": Model.from_builtins, "cluster": Cluster.from_builtins}
_OF_SLOTS = (*UNIT_MODELS, "unit")
_FILE_OPTIONS = ("schedule", "rule", "counts")
_MOST_OBJECTS = 4096  # models and clusters that a process keeps

PointIndex = tuple[int, ...]  # of a point: the number of its value in each dimension
SweepPart = tuple[int, int]  # the K-th, from 1 on, of N shares of the points
Contents = Mapping[str, Mapping[str, Any]]  # what files say: by the option, then by the value that names them


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


class SweepAxis(NamedTuple):
    """A column of points: its name, the option or the path of a model's or cluster's file that it sets, its values."""

    name: str
    of: str
    values: tuple[Any, ...]


Dimension = tuple[SweepAxis, ...]  # axes that go side by side


def read_sweep_file(path: str | Path) -> "Sweep":
    """Return the sweep of a file; relative paths in it begin in its folder."""
    return sweep_of(config.read_config(path), str(path), Path(path).parent)


def sweep_of(content: object, subject: str, folder: Path | None = None, contents: Contents | None = None) -> "Sweep":
    """Return a sweep of plain dicts and lists; errors of its form begin with `subject`.

    Files that it names are those of a folder, or their `contents` are given.
    """
    try:
        given = config.decode(lowest_form(content), SweepFile, subject, (SweepFile,))
        return Sweep(given, folder or Path(), contents)
    except RecursionError:
        raise RequestError(subject, "nested too deeply; write plain tables") from None


def read_part(text: str) -> SweepPart:
    """Return the part that a text such as 3/8 names."""
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if found and 1 <= int(found[1]) <= int(found[2]):
        return int(found[1]), int(found[2])
    raise RequestError("part", f"{text[:40]!r} is no part; give for example 3/8, the third of eight")


class Sweep:
    """A sweep that has been read: its axes, the content of the files that it names, and its points, made lazily."""

    def __init__(self, given: SweepFile, folder: Path, contents: Contents | None) -> None:
        self.given, self.what = given, given.what
        self.stamp = ""  # of a sweep in a folder: what tells it from others
        self.fixed = {name.replace("-", "_"): value for name, value in given.fixed.items()}
        self.dimensions = _dimensions_of(given)
        self.axes = [axis for dimension in self.dimensions for axis in dimension]
        self._check_options()
        self.contents = self._read_contents(folder, contents)
        for axis in self.axes:
            if "." in axis.of:
                self._check_path(axis)
        self._sizes = [len(dimension[0].values) for dimension in self.dimensions]
        self._boxes = [self._left_out(table) for table in given.leave_out]
        self._made = lru_cache(_MOST_OBJECTS)(self._make)
        self.count = self._count()
        if self.count > MOST_SWEPT_POINTS:
            problem = f"are {self.count:,}, and a sweep has at most {MOST_SWEPT_POINTS:,}"
            raise RequestError("points", f"{problem}; shorten its axes, or make several")
        if not self.count:
            raise RequestError("points", "are all left out; shorten [[leave_out]]")

    def _check_options(self) -> None:
        question, axes = find_question(self.what), {axis.of: axis.name for axis in self.axes}
        for option in [*self.fixed, *(of for of in axes if "." not in of)]:
            choose_option(option, question.options)
        if missing := [option for option in question.needed if option not in {*self.fixed, *axes}]:
            raise RequestError(missing[0], f"is missing, and {self.what} needs it; give it in [fixed] or as an axis")
        for of, name in axes.items():
            if of in self.fixed:
                raise RequestError(f"axes.{name}", "is fixed, too; leave either out")
            if name in question.columns and of != name.replace("-", "_"):
                raise RequestError(f"axes.{name}", f"is a column of results; give another name, such as of_{name}")

    def _read_contents(self, folder: Path, known: Contents | None) -> dict[str, dict[str, Any]]:
        """Return the content of every model, cluster and file that an option names: as known, or read."""
        named = {**{of: [value] for of, value in self.fixed.items()}, **{axis.of: axis.values for axis in self.axes}}
        found: dict[str, dict[str, Any]] = {}
        for of in (of for of in (*_READERS, *_FILE_OPTIONS) if of in named):
            found[of] = {value_key(value): value for value in named[of] if _names_content(of, value)}
            for key, value in found[of].items():
                if known is not None and key not in known.get(of, {}):
                    raise RequestError(of, f"the content of {short_repr(key)} is missing")
                found[of][key] = _content(of, value, folder) if known is None else known[of][key]
                if of in _FILE_OPTIONS and not isinstance(found[of][key], str):
                    raise RequestError(of, f"the content of {short_repr(key)} is no text")
        return found

    def _check_path(self, axis: SweepAxis) -> None:
        """Refuse an axis of a value that no model or cluster of the sweep has, or of which no value can be read."""
        of, *keys = axis.of.split(".")
        if of not in _READERS:
            raise RequestError("axes", f"unknown path {short_repr(axis.of)}; it begins with model. or cluster.")
        if not self.contents.get(of):
            raise RequestError("axes", f"{axis.of} is of a {of} file, and the sweep has none; give a {of} in [fixed]")
        refusal = None
        for content, value in product(self.contents[of].values(), axis.values):
            try:
                _READERS[of](_with_value(content, keys, value, of), of)
            except RequestError as error:
                refusal = refusal or error
            else:
                return
        raise RequestError(f"axes.{axis.name}", f"no value can be read: {refusal}")

    def _left_out(self, table: Mapping[str, Any]) -> dict[int, set[int]]:
        """Return which values of which dimensions a combination to leave out has; refuse what no axis has."""
        if not table:
            raise RequestError("leave_out", "has an empty table, which would leave out all; name axes in it")
        box: dict[int, set[int]] = {}
        for name, value in table.items():
            choose("axis", name, [axis.name for axis in self.axes])
            ((number, axis),) = ((d, a) for d, axes in enumerate(self.dimensions) for a in axes if a.name == name)
            numbers = {canonical(each): k for k, each in enumerate(axis.values)}
            found = set()
            for each in value if isinstance(value, list) else [value]:
                if canonical(each) not in numbers:
                    words = suggestion(str(each), [str(other) for other in axis.values])
                    raise RequestError(f"leave_out.{name}", f"{short_repr(each)} is no value of that axis; {words}")
                found.add(numbers[canonical(each)])
            box[number] = box.get(number, found) & found
        return box

    def _count(self) -> int:
        """Return the number of points, by how many values of each dimension leave the same combinations to exclude."""
        counts = Counter({frozenset(range(len(self._boxes))): 1})
        for dimension, size in enumerate(self._sizes):
            after: Counter[frozenset[int]] = Counter()
            for boxes, count in counts.items():
                if bounded := {box for box in boxes if dimension in self._boxes[box]}:
                    for value in range(size):
                        after[boxes - {box for box in bounded if value not in self._boxes[box][dimension]}] += count
                else:
                    after[boxes] += count * size
            counts = after
        return counts[frozenset()]

    def in_file_order(self) -> Iterator[PointIndex]:
        """Iterate over all points, the last axis fastest."""
        return filter(self._is_asked, product(*map(range, self._sizes)))

    def in_working_order(self) -> Iterator[PointIndex]:
        """Iterate over all points, those that differ in values of models and clusters alone side by side.

        They share a program.
        """
        order = sorted(range(len(self._sizes)), key=lambda d: all("." in axis.of for axis in self.dimensions[d]))
        back = [order.index(dimension) for dimension in range(len(order))]
        every = product(*(range(self._sizes[dimension]) for dimension in order))
        return filter(self._is_asked, (tuple([index[k] for k in back]) for index in every))

    def of_part(self, part: SweepPart) -> Iterator[PointIndex]:
        """Iterate over the points of a part, in working order, dealt in turns."""
        return islice(self.in_working_order(), part[0] - 1, None, part[1])

    def _is_asked(self, index: PointIndex) -> bool:
        return not any(all(index[d] in values for d, values in box.items()) for box in self._boxes)

    def name(self, index: PointIndex) -> bytes:
        """Return the name of a point."""
        index = (*index, 0)  # where the texts of dimension -1 are
        return sha256(b"".join([texts[index[dimension]] for dimension, texts in self._texts])).digest()[:NAME_BYTES]

    @cached_property
    def _texts(self) -> list[tuple[int, list[bytes]]]:
        """The parts of the canonical JSON of all points: a dimension, or -1, and a text for each of its values."""
        options: dict[str, tuple[int, Sequence[Any]]] = {of: (-1, [value]) for of, value in self.fixed.items()}
        for number, dimension in enumerate(self.dimensions):
            options |= {axis.of: (number, axis.values) for axis in dimension}
        texts = []
        before = canonical([RESULTS, self.what])[:-1] + b",{"
        for of, (number, values) in sorted(options.items()):
            start = before + canonical(of) + b":"
            texts.append((number, [start + self._identity(of, value) for value in values]))
            before = b","
        return [*texts, (-1, [b"}]"])]

    def _identity(self, of: str, value: Any) -> bytes:
        """Return the JSON of a value, or the digest of the content that it names."""
        content = self.contents.get(of, {}).get(value_key(value))
        return canonical(value if content is None else {"sha256": sha256(canonical(content)).hexdigest()})

    def values(self, index: PointIndex) -> list[Any]:
        """Return the values of all axes at a point."""
        return [axis.values[k] for k, dimension in zip(index, self.dimensions, strict=True) for axis in dimension]

    def words(self, index: PointIndex) -> str:
        """Return a point for people: its axes and their values."""
        values = zip(self.axes, self.values(index), strict=True)
        return ", ".join(f"{axis.name}={value_key(value)}" for axis, value in values)

    def options(self, index: PointIndex) -> dict[str, Any]:
        """Return the options of a point, with models and clusters in the place of their names."""
        settings = self.fixed | dict(zip((axis.of for axis in self.axes), self.values(index), strict=True))
        paths = {of: settings.pop(of) for of in [*settings] if "." in of}
        for of in settings.keys() & _READERS:
            key = value_key(settings[of])
            if key in self.contents[of]:
                changed = {path: value for path, value in paths.items() if path.startswith(f"{of}.")}
                settings[of] = self._made(of, key, canonical(changed))
        return settings

    def _make(self, of: str, key: str, changed: bytes) -> Any:
        content = self.contents[of][key]
        for path, value in msgspec.json.decode(changed).items():
            content = _with_value(content, path.split(".")[1:], value, of)
        return _READERS[of](content, of)

    @cached_property
    def texts_of_files(self) -> dict[str, str]:
        """The texts of schedules, rules and counts by their paths, as options and as `Path` have them."""
        every = [each for of in _FILE_OPTIONS for each in self.contents.get(of, {}).items()]
        return {path: text for name, text in every for path in (name, str(Path(name)))}


def _dimensions_of(given: SweepFile) -> tuple[Dimension, ...]:
    """Return all axes: each of [axes] alone, then the groups that go together, in the order of the file."""
    single = [(_read_axis(name, axis),) for name, axis in given.axes.items()]
    dimensions = (*single, *map(_read_group, given.together))
    if not dimensions:
        raise RequestError("axes", "are missing; write [axes] and at least one list, such as n = [2, 4, 8]")
    every = [axis for dimension in dimensions for axis in dimension]
    for number, axis in enumerate(every):
        for place in range(2):
            if axis[place] in [before[place] for before in every[:number]]:
                raise RequestError(f"axes.{axis.name}", f"{axis[place]} is an axis twice; leave either out")
    return dimensions


def _read_group(group: Mapping[str, Any]) -> Dimension:
    axes = tuple(_read_axis(name, axis) for name, axis in group.items())
    if not axes:
        raise RequestError("together", "has a table without axes; write lists of one length")
    if len({len(axis.values) for axis in axes}) > 1:
        each = ", ".join(f"{axis.name} has {len(axis.values)}" for axis in axes)
        raise RequestError("together", f"axes that go together have equally many values, and {each}; mend the lists")
    return axes


def _read_axis(name: str, given: Any) -> SweepAxis:
    """Return an axis from a list, from a table with a list, or from a range."""
    subject, of = f"axes.{name}", name
    if isinstance(given, Mapping):
        form = config.decode(dict(given), AxisTable, subject, (AxisTable,))
        given, of = lowest_form(_values_of(form, subject)), form.of or name
    if not isinstance(given, list):
        raise RequestError(subject, f"{short_repr(given)} is no list; write [{short_repr(given, 30)}], or a range")
    if not given:
        raise RequestError(subject, "has no values; give at least one, or leave the axis out")
    if len({canonical(value) for value in given}) < len(given):
        twice, _ = Counter(map(canonical, given)).most_common(1)[0]
        raise RequestError(subject, f"has {twice.decode()[:60]} twice; give each value once")
    return SweepAxis(name, of if "." in of else of.replace("-", "_"), tuple(given))


def _values_of(form: AxisTable, subject: str) -> list[Any]:
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
    unit = ""
    if isinstance(given, str):
        quantity = _QUANTITY_END.fullmatch(given.strip())
        if quantity is None:
            raise RequestError(subject, f"{short_repr(given)} is no number; write for example 2 or '12.5 GB/s'")
        given, unit = float(quantity[1]), quantity[2]
    if abs(given) > _MOST_END:
        raise RequestError(subject, f"has an end above {_MOST_END:g}; give a smaller number")
    return given, unit


def _range_numbers(form: AxisTable, first: int | float, last: int | float, subject: str) -> list[int | float]:
    """Return the numbers of a range, its end among them if a step reaches it."""
    by_factors = form.times is not None or form.spacing == "log"
    each = form.step if form.times is None else form.times
    choose("spacing", form.spacing or "linear", ("linear", "log"))
    rises = first < last or (first == last and form.count in (None, 1))
    moves = each is None or by_factors < each <= _MOST_END
    if not (rises and moves) or (by_factors and first <= 0) or (form.count is not None and form.count < 1):
        raise RequestError(subject, "is a range without values; go up from `from` to `to`, by factors from above 0")
    if form.count == 1 and first < last:
        raise RequestError(subject, "has one value and two ends; give values = [...]")
    if each is None:
        most: float = form.count or 1
    else:
        most = 1 + (math.log(last / first) / math.log(each) if by_factors else (last - first) / each)
    if most > MOST_SWEPT_POINTS:
        raise RequestError(subject, f"has {most:,.0f} values; a sweep has at most {MOST_SWEPT_POINTS:,} points")
    if each is None:
        shares = [k / (most - 1) for k in range(1, int(most) - 1)]
        by = [first * (last / first) ** k if by_factors else first + (last - first) * k for k in shares]
        return [first, *(float(f"{value:.{_SPACED_DIGITS}g}") for value in by), *[last] * (most > 1)]
    values = (first * each**k if by_factors else first + each * k for k in range(int(most) + 2))
    within = last + abs(last) * 10**-_EXACT_DIGITS
    found = (value for value in values if value <= within)
    return [value if isinstance(value, int) else float(f"{value:.{_EXACT_DIGITS}g}") for value in found]


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
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RequestError("sweep", "has a whole number of more than 63 bits; give a smaller one")
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "to_builtins"):
        return lowest_form(value.to_builtins())
    raise RequestError("axes", f"{short_repr(value)} has no place in a file; give a number, a text, a list or a table")


def canonical(value: Any) -> bytes:
    """Return the JSON of a value, the same bytes for the same value: keys sorted, no spaces."""
    return msgspec.json.encode(value, order="sorted")


def value_key(value: Any) -> str:
    """Return the text by which contents are known: a name as it is, another value as its JSON."""
    return value if isinstance(value, str) else canonical(value).decode()


def _names_content(of: str, value: Any) -> bool:
    """Return whether the value of an option is a model or a cluster, or names a file."""
    if of in _READERS:
        return value not in _OF_SLOTS
    return isinstance(value, str) and (value.endswith(".csv") or "/" in value)


def _content(of: str, value: Any, folder: Path) -> Any:
    """Return the content of a file: of a model or a cluster with numbers in lowest form, of others as a text."""
    if of in _FILE_OPTIONS:
        return read_text(folder / value)
    if isinstance(value, str):
        beside = folder / value
        value = read_preset(of, str(beside) if "." in value or "/" in value else value)[0]
    elif not isinstance(value, Mapping):
        is_preset(of, value)  # which refuses it
    return lowest_form(value)


def _with_value(content: Any, keys: Sequence[str], value: Any, before: str) -> Any:
    """Return the content of a file with another value at a path of keys; those of rows are their numbers.

    A table that is not in the file is not made; a field of a table is.
    """
    if not keys:
        return value
    key, *rest = keys
    place = f"{before}.{key}"
    if isinstance(content, list):
        if not (key.isascii() and key.isdigit() and int(key) < len(content)):
            raise RequestError(place, f"is no row; {before} has the rows 0 to {len(content) - 1}")
        row = int(key)
        return [*content[:row], _with_value(content[row], rest, value, place), *content[row + 1 :]]
    if not isinstance(content, Mapping):
        raise RequestError(place, f"{before} is a value and has no {key!r}; end the path there")
    if rest and key not in content:
        raise RequestError(place, f"is not in the file; {suggestion(key, content)}")
    return {**content, key: _with_value(content.get(key), rest, value, place)}
