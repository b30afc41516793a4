"""The points of a sweep: their number, their order, their names, and the options of each.

A point is its request in full, in canonical JSON: all options that the sweep gives, where a model, a cluster or a file
is the digest of its content. Its name is the first half of the sha256 of that, of the question and of `RESULTS`. So a
point has one name in every sweep, and another one once results may have changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

import msgspec

from cdpsim.errors import RequestError
from cdpsim.studies.sweep.axes import MOST_SWEPT_POINTS, Dimension, SweepAxis, canonical
from cdpsim.version import RESULTS

PointIndex = tuple[int, ...]  # of a point: the number of its value in each dimension
NAME_BYTES = 16


class SweepPart(msgspec.Struct, frozen=True):
    """One of several parts of a sweep, from 1 on: a share of its points that no other part has."""

    number: int = 1
    of: int = 1

    @classmethod
    def read(cls, text: str) -> "SweepPart":
        """Return the part that a text such as 3/8 names."""
        number, slash, of = text.partition("/")
        if slash and number.isascii() and of.isascii() and number.isdigit() and of.isdigit():
            part = cls(int(number[:9]), int(of[:9]))
            if 1 <= part.number <= part.of:
                return part
        raise RequestError("part", f"{text[:40]!r} is no part; give for example 3/8, the third of eight")


class SweepPlan(msgspec.Struct, frozen=True):
    """A sweep that has been read: a question, its fixed options, its axes, and what is known of files by their names.

    `contents` has the models and clusters by the option and the text that names them, and `files` other files: their
    path and digest.
    """

    what: str
    fixed: dict[str, Any]
    dimensions: tuple[Dimension, ...]
    leave_out: tuple[dict[str, list[Any]], ...] = ()
    contents: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, list[str]]] = {}
    results: int = RESULTS

    @property
    def axes(self) -> list[SweepAxis]:
        """All axes, in the order of the file."""
        return [axis for dimension in self.dimensions for axis in dimension]


def value_key(value: Any) -> str:
    """Return the text by which contents and files are known: a name as it is, a table as its JSON."""
    return value if isinstance(value, str) else canonical(value).decode()


class Points:
    """The points of a sweep, enumerated lazily."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.sizes = [len(dimension[0].values) for dimension in plan.dimensions]
        self._strides = [prod(self.sizes[k + 1 :]) for k in range(len(self.sizes))]
        self._boxes = [_left_out_box(lists, plan.dimensions) for lists in plan.leave_out]
        self._digests: dict[tuple[str, str], str] = {}
        self.count = self._count()

    def _count(self) -> int:
        """Return the number of points, by how many values of each dimension leave the same combinations to exclude."""
        counts: dict[frozenset[int], int] = {frozenset(range(len(self._boxes))): 1}
        for dimension, size in enumerate(self.sizes):
            after: dict[frozenset[int], int] = {}
            for boxes, count in counts.items():
                if not any(dimension in self._boxes[box] for box in boxes):
                    after[boxes] = after.get(boxes, 0) + count * size
                    continue
                for value in range(size):
                    still = frozenset(
                        box
                        for box in boxes
                        if dimension not in self._boxes[box] or value in self._boxes[box][dimension]
                    )
                    after[still] = after.get(still, 0) + count
            counts = after
        return counts.get(frozenset(), 0)

    def refuse_too_many(self) -> None:
        """Refuse a sweep without points, and one of more than a process can keep the names of."""
        if self.count > MOST_SWEPT_POINTS:
            problem = (
                f"are {self.count:,}, and a sweep has at most {MOST_SWEPT_POINTS:,}; shorten its axes, or make several"
            )
            raise RequestError("points", problem)
        if not self.count:
            raise RequestError("points", "are all left out; shorten [[leave_out]]")

    def in_file_order(self) -> Iterator[PointIndex]:
        """Iterate over all points, the last axis fastest."""
        return (
            filter(self._is_asked, product(*map(range, self.sizes)))
            if self._boxes
            else product(*map(range, self.sizes))
        )

    def in_working_order(self) -> Iterator[PointIndex]:
        """Iterate over all points, those that differ in values of models and clusters alone side by side.

        They share a program.
        """
        paths = [all("." in axis.of for axis in dimension) for dimension in self.plan.dimensions]
        order = sorted(range(len(paths)), key=paths.__getitem__)
        if order == list(range(len(paths))):
            return self.in_file_order()
        back = [order.index(dimension) for dimension in range(len(order))]
        every = product(*(range(self.sizes[dimension]) for dimension in order))
        return filter(self._is_asked, (tuple(index[k] for k in back) for index in every))

    def of_part(self, part: SweepPart) -> Iterator[PointIndex]:
        """Iterate over the points of a part, in working order: runs of consecutive ones, dealt in turns."""
        run = min(64, max(1, self.count // (8 * part.of)))
        for position, index in enumerate(self.in_working_order()):
            if position // run % part.of == part.number - 1:
                yield index

    def _is_asked(self, index: PointIndex) -> bool:
        return not any(all(index[d] in values for d, values in box.items()) for box in self._boxes)

    def number(self, index: PointIndex) -> int:
        """Return the number of a point among all combinations."""
        return sum(k * stride for k, stride in zip(index, self._strides, strict=True))

    def index(self, number: int) -> PointIndex:
        """Return the point that has a number."""
        return tuple(number // stride % size for stride, size in zip(self._strides, self.sizes, strict=True))

    def name(self, index: PointIndex) -> bytes:
        """Return the name of a point."""
        text = b"".join([pieces[0 if dimension < 0 else index[dimension]] for dimension, pieces in self._pieces])
        return sha256(text).digest()[:NAME_BYTES]

    @cached_property
    def _pieces(self) -> list[tuple[int, list[bytes]]]:
        """The parts of the canonical JSON of all points: a dimension, or -1, and a text for each of its values."""
        options = {of: (-1, [value]) for of, value in self.plan.fixed.items()}
        for number, dimension in enumerate(self.plan.dimensions):
            options |= {axis.of: (number, list(axis.values)) for axis in dimension}
        pieces = []
        before = canonical([self.plan.results, self.plan.what])[:-1] + b",{"
        for of in sorted(options):
            number, values = options[of]
            start = before + canonical(of) + b":"
            pieces.append((number, [start + self._identity(of, value) for value in values]))
            before = b","
        return _merged_pieces([*pieces, (-1, [b"}]"])])

    def _identity(self, of: str, value: Any) -> bytes:
        """Return the JSON of a value, or the digest of the content that it names."""
        key = value_key(value)
        if key in self.plan.files.get(of, {}):
            return canonical({"sha256": self.plan.files[of][key][1]})
        content = self.plan.contents.get(of, {}).get(key)
        if content is None:
            return canonical(value)
        if (of, key) not in self._digests:
            self._digests[of, key] = sha256(canonical(content)).hexdigest()
        return canonical({"sha256": self._digests[of, key]})

    def values(self, index: PointIndex) -> list[Any]:
        """Return the values of all axes at a point."""
        return [axis.values[k] for k, dimension in zip(index, self.plan.dimensions, strict=True) for axis in dimension]

    def words(self, index: PointIndex) -> str:
        """Return a point for people: its axes and their values."""
        values = zip(self.plan.axes, self.values(index), strict=True)
        return ", ".join(f"{axis.name}={value_key(value)}" for axis, value in values)

    def settings(self, index: PointIndex) -> dict[str, Any]:
        """Return what a point sets: its options, and the values of models and clusters by their paths."""
        return self.plan.fixed | {
            axis.of: axis.values[k]
            for k, dimension in zip(index, self.plan.dimensions, strict=True)
            for axis in dimension
        }


def _merged_pieces(pieces: Sequence[tuple[int, list[bytes]]]) -> list[tuple[int, list[bytes]]]:
    """Return the pieces with those that no dimension changes appended to the ones before them."""
    joined: list[tuple[int, list[bytes]]] = []
    for dimension, texts in pieces:
        if joined and dimension in (-1, joined[-1][0]):
            ends = texts if dimension >= 0 else texts * len(joined[-1][1])
            joined[-1] = (joined[-1][0], [a + b for a, b in zip(joined[-1][1], ends, strict=True)])
        else:
            joined.append((dimension, texts))
    return joined


def _left_out_box(lists: Mapping[str, Sequence[Any]], dimensions: Sequence[Dimension]) -> dict[int, set[int]]:
    """Return which values of which dimensions a combination to leave out has."""
    box: dict[int, set[int]] = {}
    for number, dimension in enumerate(dimensions):
        for axis in dimension:
            if axis.name in lists:
                wanted = {canonical(value) for value in lists[axis.name]}
                found = {k for k, value in enumerate(axis.values) if canonical(value) in wanted}
                box[number] = box.get(number, found) & found
    return box
