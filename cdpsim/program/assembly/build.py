"""Collects the columns of a program piece by piece."""

from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, concatenate_columns
from cdpsim.program import Buffers, Category, Content, EdgeKind, Edges, Messages, Op


def start(node: Ints) -> Ints:
    """The moment at which a node starts."""
    return 2 * node


def end(node: Ints) -> Ints:
    """The moment at which a node ends; the start of the run for node -1."""
    moment = 2 * node + 1
    return np.maximum(moment, -1, out=moment)


class _Table:
    """Columns that grow piece by piece, each kept as narrow as it is meant to be."""

    def __init__(self, *types: type[np.signedinteger[Any]]) -> None:
        self.rows = 0
        self._types = types
        self._parts: list[list[Ints]] = [[] for _ in types]

    def add(self, rows: int, *columns: Ints | int) -> None:
        """Add rows; a number stands in all of them."""
        for parts, column, kind in zip(self._parts, columns, self._types, strict=True):
            part = np.asarray(column, dtype=kind)
            parts.append(part if part.ndim else np.ndarray(rows, kind, part, strides=0))
            assert len(parts[-1]) == rows
        self.rows += rows

    def columns(self) -> list[Ints]:
        """Give the whole columns, once: the pieces are let go as they are joined."""
        whole = []
        for parts, kind in zip(self._parts, self._types, strict=True):
            whole.append(concatenate_columns(parts, np.dtype(kind)))
            parts.clear()
        return whole


class Builder:
    """Messages, edges and buffers so far; the messages' nodes come after the tasks'."""

    def __init__(self, tasks: int) -> None:
        self.groups: list[Ints] = []
        self._group_numbers: dict[bytes, int] = {}
        self._tasks = tasks
        self._messages = _Table(np.int8, np.int8, *[np.int32] * 5, np.int64, np.int8, np.int32, np.int8)
        self._edges = _Table(np.int32, np.int32, np.int8)
        self._buffers = _Table(np.int8, *[np.int32] * 3, np.int64, np.int32, np.int32)
        self._kept = _Table(np.int32, np.int32)

    def group(self, members: Ints) -> int:
        """The number of the group of these devices."""
        number = self._group_numbers.setdefault(members.tobytes(), len(self.groups))
        if number == len(self.groups):
            self.groups.append(members)
        return number

    def send(
        self,
        op: Op,
        content: Content,
        *,
        stage: Ints,
        step: Ints,
        src: Ints | int,
        dst: Ints,
        size: Ints,
        micro_batch: Ints | int = -1,
        versions: Ints | int = 0,
    ) -> Ints:
        """Add messages and return their nodes."""
        first = self._tasks + self._messages.rows
        self._messages.add(len(stage), op, content, stage, micro_batch, step, src, dst, size, versions, 1, -1)
        return np.arange(first, first + len(stage), dtype=np.int32)

    def link(self, before: Ints, after: Ints, kind: EdgeKind = EdgeKind.DATA) -> None:
        """Add edges."""
        self._edges.add(len(before), before, after, kind)

    def hold(
        self, category: Category, *, device: Ints, stage: Ints, version: Ints, size: Ints, begin: Ints, end: Ints
    ) -> Ints:
        """Add buffers and return their numbers; empty ones are left out, and -1."""
        columns = (device, stage, version, size, begin, end)
        if size.all():
            return self._add_buffers(category, *columns)
        some = np.flatnonzero(size)
        number = np.full(len(size), -1, dtype=np.int32)
        number[some] = self._add_buffers(category, *(column[some] for column in columns))
        return number

    def hold_even_empty(
        self, category: Category, *, device: Ints, stage: Ints, version: Ints, size: Ints, begin: Ints, end: Ints
    ) -> None:
        """Add buffers, of which a replay must find even those that weigh nothing."""
        self._add_buffers(category, device, stage, version, size, begin, end)

    def _add_buffers(self, category: Category, *columns: Ints) -> Ints:
        first, count = self._buffers.rows, len(columns[0])
        self._buffers.add(count, category, *columns)
        return np.arange(first, first + count, dtype=np.int32)

    def land(
        self, message: Ints, *, device: Ints, stage: Ints, version: Ints, size: Ints, until: Ints | None = None
    ) -> None:
        """Hold what messages carry at their receivers, until they have arrived or a later moment."""
        until = end(message) if until is None else until
        of = {"device": device, "stage": stage, "version": version, "size": size}
        self.hold(Category.COMMUNICATION, begin=start(message), end=until, **of)

    def keep(self, number: Ints, until: Ints) -> None:
        """Hold buffers at least until further moments."""
        some = np.flatnonzero(number >= 0)
        self._kept.add(len(some), number[some], until[some])

    def messages(self) -> Messages:
        """The columns of all messages."""
        return Messages(*self._messages.columns())

    def edges(self) -> Edges:
        """The columns of all edges."""
        return Edges(*self._edges.columns())

    def buffers(self) -> Buffers:
        """The columns of all buffers."""
        return Buffers(*self._buffers.columns(), *self._kept.columns())
