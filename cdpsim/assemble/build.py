"""Collects the columns of a program piece by piece."""

from collections.abc import Sequence

import numpy as np

from cdpsim.columns import Ints
from cdpsim.program import Buffers, Category, Content, Edge, Edges, Messages, Op

MessageColumns = tuple[Ints, ...]


def start(node: Ints) -> Ints:
    """The moment at which a node starts."""
    return 2 * node


def end(node: Ints) -> Ints:
    """The moment at which a node ends; the start of the run for node -1."""
    return np.maximum(2 * node + 1, -1)


class Builder:
    """Messages, edges and buffers so far; the messages' nodes come after the tasks'."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.groups: list[Ints] = []
        self._group_numbers: dict[bytes, int] = {}
        self._sent = 0
        self._messages: list[MessageColumns] = []
        self._edges: list[tuple[Ints, Ints, int]] = []
        self._buffers: list[tuple[Ints, ...]] = []
        self._held = 0
        self._kept: list[tuple[Ints, Ints]] = []

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
        columns = (op, content, stage, micro_batch, step, src, dst, size, versions)
        count = len(stage)
        self._messages.append(tuple(np.broadcast_to(np.asarray(c), count) for c in columns))
        first = self.tasks + self._sent
        self._sent += count
        return np.arange(first, first + count)

    def link(self, before: Ints, after: Ints, kind: Edge = Edge.DATA) -> None:
        """Add edges."""
        self._edges.append((before, after, kind))

    def hold(
        self,
        category: Category,
        *,
        device: Ints,
        stage: Ints,
        version: Ints,
        size: Ints,
        begin: Ints,
        end: Ints,
        kept: Ints | None = None,
        kept_until: Ints | None = None,
    ) -> None:
        """Add buffers; `kept` says which of these are held until further moments too. Empty ones are left out."""
        columns: tuple[Ints, ...] = (device, stage, version, size, begin, end)
        first = self._held
        if kept is not None and kept_until is not None:
            self._kept.append((kept + first, kept_until))
        if not size.all():
            some = np.flatnonzero(size)
            columns = tuple(column[some] for column in columns)
            if kept is not None:
                number = np.full(len(size), -1)
                number[some] = np.arange(first, first + len(some))
                kept, kept_until = self._kept.pop()
                stays = number[kept - first] >= 0
                self._kept.append((number[kept - first][stays], kept_until[stays]))
        self._buffers.append((np.broadcast_to(np.int8(category), len(columns[0])), *columns))
        self._held += len(columns[0])

    def messages(self) -> Messages:
        """The columns of all messages."""
        return Messages(*_concatenate(self._messages, (np.int8, np.int8) + (np.int32,) * 5 + (np.int64, np.int32)))

    def edges(self) -> Edges:
        """The columns of all edges."""
        rows = [(b, a, np.broadcast_to(np.int8(kind), len(b))) for b, a, kind in self._edges]
        return Edges(*_concatenate(rows, (np.int32, np.int32, np.int8)))

    def buffers(self) -> Buffers:
        """The columns of all buffers."""
        columns = _concatenate(self._buffers, (np.int8, np.int32, np.int32, np.int32, np.int64, np.int32, np.int32))
        kept = _concatenate(self._kept, (np.int32, np.int32))
        return Buffers(*columns, *kept)


def _concatenate(rows: Sequence[tuple[Ints, ...]], types: tuple[type, ...]) -> list[Ints]:
    if not rows:
        return [np.empty(0, dtype=kind) for kind in types]
    return [np.concatenate([row[c] for row in rows], dtype=kind, casting="unsafe") for c, kind in enumerate(types)]
