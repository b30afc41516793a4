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
        self._ends: list[tuple[Ints, Ints]] = []

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
        ends: Ints,
        owner: Ints | None = None,
    ) -> None:
        """Add buffers. `owner` says which of them each of `ends` belongs to, where that is not one each."""
        kept = np.flatnonzero(np.broadcast_to(size > 0, len(device)))
        columns = (category, device, stage, version, size, begin)
        rows = tuple(np.broadcast_to(np.asarray(c), len(device))[kept] for c in columns)
        number = np.full(len(device), -1)
        number[kept] = np.arange(len(kept)) + sum(len(b[0]) for b in self._buffers)
        self._buffers.append(rows)
        of = number if owner is None else number[owner]
        self._ends.append((of[of >= 0], ends[of >= 0]))

    def messages(self) -> Messages:
        """The columns of all messages."""
        return Messages(*_concatenate(self._messages, (np.int8, np.int8) + (np.int32,) * 5 + (np.int64, np.int32), 9))

    def edges(self) -> Edges:
        """The columns of all edges."""
        rows = [(b, a, np.broadcast_to(np.int8(kind), len(b))) for b, a, kind in self._edges]
        return Edges(*_concatenate(rows, (np.int32, np.int32, np.int8), 3))

    def buffers(self) -> Buffers:
        """The columns of all buffers."""
        columns = _concatenate(self._buffers, (np.int8, np.int32, np.int32, np.int32, np.int64, np.int32), 6)
        owner, ends = _concatenate(self._ends, (np.int64, np.int32), 2)
        if (owner[1:] < owner[:-1]).any():
            ends = ends[np.argsort(owner, kind="stable")]
        first = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(columns[0])))])
        category, device, stage, version, size, begin = columns
        return Buffers(category, device, stage, version, size, begin, ends, first)


def _concatenate(rows: Sequence[tuple[Ints, ...]], types: tuple[type, ...], width: int) -> list[Ints]:
    if not rows:
        return [np.empty(0, dtype=kind) for kind in types]
    return [np.concatenate([row[c] for row in rows]).astype(types[c], copy=False) for c in range(width)]
