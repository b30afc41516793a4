"""Columns of a program, collected piece by piece."""

from typing import Any, NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, concatenate_columns
from cdpsim.program import Category, Content, EdgeKind, Op


def start(node: Ints) -> Ints:
    """Return the moments at which nodes start."""
    return 2 * node


def end(node: Ints) -> Ints:
    """Return the moments at which nodes end; the start of the run for node -1."""
    moment = 2 * node + 1
    return np.maximum(moment, -1, out=moment)


def fold_group(members: Ints, devices: int, replicas: int, run: int = 0, apart: int = 1) -> Ints:
    """Return the ranks of all groups like that of `members`, devices of the first replica: a row for each group.

    A group spans `run` replicas, by default all, and has every `apart`-th of them.

    >>> fold_group(np.array([0]), 2, 4, run=2).tolist(), fold_group(np.array([1]), 2, 4, apart=2).tolist()
    ([[0, 2], [4, 6]], [[1, 5], [3, 7]])
    """
    run = run or replicas
    replica = np.arange(replicas, dtype=np.int32).reshape(-1, run // apart, apart).transpose(0, 2, 1)
    first = devices * replica.reshape(-1, run // apart)
    ranks: Ints = (first[:, :, None] + members).reshape(len(first), -1)
    return ranks


class Location(NamedTuple):
    """The device and the content of buffers: columns with a row for each buffer."""

    device: Ints
    stage: Ints
    version: Ints  # of parameters, the version; else the step

    def take(self, rows: Ints) -> "Location":
        """Return some of the rows."""
        return Location(*(column[rows] for column in self))


def without_root(stage: Ints, step: Ints) -> Location:
    """Return where contents of collectives are that no device starts."""
    return Location(np.broadcast_to(-1, len(stage)), stage, step)


class _GrowingColumns:
    """Columns that grow piece by piece, each kept as narrow as it is meant to be."""

    def __init__(self, *types: type[np.signedinteger[Any]]) -> None:
        self.rows = 0
        self._types = types
        self._pieces: list[list[Ints]] = [[] for _ in types]

    def add(self, rows: int, *columns: Ints | int) -> None:
        """Add rows; a number stands in all of them."""
        if not rows:
            return
        for pieces, column, kind in zip(self._pieces, columns, self._types, strict=True):
            piece = np.asarray(column, dtype=kind)
            pieces.append(piece if piece.shape == (rows,) else np.broadcast_to(piece, rows))
        self.rows += rows

    def columns(self) -> list[Ints]:
        """Return the whole columns, once: the pieces are let go as they are joined."""
        return [concatenate_columns(self._pieces.pop(0), np.dtype(kind)) for kind in self._types]


class Builder:
    """Messages, edges and buffers so far; the messages' nodes come after the tasks'."""

    def __init__(self, tasks: int) -> None:
        self.groups: list[Ints] = []
        self.ranks: list[Ints] = []
        self.copies: list[int] = []
        self._group_numbers: dict[tuple[object, ...], int] = {}
        self._tasks = tasks
        self.messages = _GrowingColumns(np.int8, np.int8, *[np.int32] * 5, np.int64, np.int8, np.int32, np.int8)
        self.edges = _GrowingColumns(np.int32, np.int32, np.int8)
        self.buffers = _GrowingColumns(np.int8, *[np.int32] * 3, np.int64, np.int32, np.int32)
        self.kept = _GrowingColumns(np.int32, np.int32)

    def group(self, members: Ints, ranks: Ints | None = None, copies: int = 1) -> int:
        """Return the number of the group of these devices; it stands for groups of these `ranks`, a row for each.

        Where a device stands for several ranks, so many `copies` of them are members.
        """
        known = members.tobytes(), () if ranks is None else (ranks.shape, ranks.tobytes()), copies
        number = self._group_numbers.setdefault(known, len(self.groups))
        if number == len(self.groups):
            devices = members[None] if ranks is None else ranks
            self.groups.append(members)
            self.ranks.append((devices[:, :, None] * copies + np.arange(copies)).reshape(len(devices), -1))
            self.copies.append(copies)
        return number

    def columns_of_groups(self, *, folded: bool) -> dict[str, Any]:
        """Return the groups as fields of the program."""
        several = max(self.copies, default=1) > 1
        copies = tuple(self.copies) if several else ()
        return {
            "groups": tuple(self.groups),
            "ranks": tuple(self.ranks) if folded or several else None,
            "copies": copies,
        }

    def send(
        self,
        op: Op,
        content: Content,
        of: Location,
        dst: Ints | int,
        size: Ints | int,
        *,
        micro_batch: Ints | int = -1,
        versions: Ints | int = 0,
        stages: Ints | int = 1,
        stream: int = -1,
    ) -> Ints:
        """Add messages from devices, or of roots, with contents of stages in steps; return their nodes."""
        src, stage, step = of
        first = self._tasks + self.messages.rows
        self.messages.add(len(stage), op, content, stage, micro_batch, step, src, dst, size, versions, stages, stream)
        return np.arange(first, first + len(stage), dtype=np.int32)

    def link(self, before: Ints, after: Ints, kind: EdgeKind = EdgeKind.DATA) -> None:
        """Add an edge from each node to the one at the same place; a row stands for each of several."""
        if before.shape != after.shape:
            before, after = np.broadcast_arrays(before, after)
        if before.ndim > 1:
            before, after = before.ravel(), after.ravel()
        self.edges.add(len(before), before, after, kind)

    def hold(
        self, category: Category, where: Location, size: Ints, begin: Ints | int, end: Ints, *, even_empty: bool = False
    ) -> Ints:
        """Add buffers and return their numbers; empty ones are left out, and -1, but for those a replay must find."""
        columns = (*where, size, np.full(len(size), begin) if isinstance(begin, int) else begin, end)
        first, number = self.buffers.rows, np.full(len(size), -1, dtype=np.int32)
        rows = slice(None) if even_empty or size.all() else np.flatnonzero(size)
        number[rows] = np.arange(first, first + len(size[rows]), dtype=np.int32)
        self.buffers.add(len(size[rows]), category, *(column[rows] for column in columns))
        return number

    def land(self, message: Ints, where: Location, size: Ints, until: Ints | None = None) -> None:
        """Hold the content of messages at their receivers, until they have arrived or a later moment."""
        self.hold(Category.COMMUNICATION, where, size, start(message), end(message) if until is None else until)

    def keep(self, number: Ints, until: Ints) -> None:
        """Hold buffers at least until further moments."""
        rows = np.flatnonzero(number >= 0)
        self.kept.add(len(rows), number[rows], until[rows])
