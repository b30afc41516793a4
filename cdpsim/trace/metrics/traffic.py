"""What messages put on their way, from the columns of messages.csv: copies that must leave a device, and who sends."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.program import Op
from cdpsim.program.collectives import ALL_REDUCE, Algorithm, algorithm, payload_factor


class Shares(NamedTuple):
    """Rows of what one device sends for one message."""

    message: Ints
    device: Ints
    size: np.ndarray


def copied(messages: Mapping[str, np.ndarray]) -> Ints:
    """What must leave a device for each message, whatever algorithm carries it.

    A point-to-point message is one copy; with k members, a reduction, a broadcast or a gathering is k-1, and an
    all-reduce both. What is scattered after its reduction counts k-1 partial sums of each of the k parts.
    """
    copies = np.ones(len(messages["size"]), dtype=np.int64)
    for op, members, rows in _collectives(messages):
        k = len(members)
        times = {Op.ALL_REDUCE: 2 * (k - 1), Op.REDUCE_SCATTER: k * (k - 1)}
        copies[rows] = times.get(op, k - 1)
    copies *= messages["size"]
    return copies


def shares(
    messages: Mapping[str, np.ndarray], collective: str, ran: Sequence[Algorithm | None] | None = None
) -> Shares:
    """What each device sends for each message, whose algorithm `ran` may know; else the one named `collective`."""
    single = np.flatnonzero(messages["op"] == Op.P2P.name.lower())
    parts = [Shares(single, messages["src"][single].astype(np.int64), messages["size"][single].astype(float))]
    for op, members, rows in _collectives(messages):
        k = len(members)
        named = algorithm(op, collective if collective in ALL_REDUCE else next(iter(ALL_REDUCE)))
        root = int(messages["src"][rows[0]])
        first = int(np.flatnonzero(members == root)[0]) if root in members else 0
        by: dict[Algorithm, list[int]] = {}
        for row in rows.tolist():
            by.setdefault((ran[row] if ran else None) or named, []).append(row)
        for how, alike in by.items():
            each = np.roll(how.sends(k), first) * payload_factor(op, k) / how.parts(k)
            size = np.outer(messages["size"][alike], each).ravel()
            parts.append(Shares(np.repeat(alike, k), np.tile(members, len(alike)), size))
    return Shares(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _collectives(messages: Mapping[str, np.ndarray]) -> list[tuple[Op, Ints, Ints]]:
    """Messages of the same operation, members and root: (operation, members, rows)."""
    rows = np.flatnonzero(messages["op"] != Op.P2P.name.lower())
    alike: dict[tuple[str, str, int], list[int]] = {}
    columns = (messages[name][rows].tolist() for name in ("op", "dst", "src"))
    for row, op, dst, src in zip(rows.tolist(), *columns, strict=True):
        alike.setdefault((op, str(dst), src), []).append(row)
    return [
        (Op[op.upper()], np.array(dst.split("|"), dtype=np.int64), np.array(some, dtype=np.int64))
        for (op, dst, _), some in alike.items()
    ]
