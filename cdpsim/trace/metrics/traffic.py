"""Traffic of the columns of messages.csv: the copies that must leave a device, and what each device sends."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.program import Op
from cdpsim.program.collectives import ALL_REDUCE, Algorithm, algorithm, payload_factor

_P2P = Op.P2P.name.lower()


class SentShares(NamedTuple):
    """Rows of what one device sends for one message."""

    message: Ints
    device: Ints
    size: np.ndarray


def parts_sent(how: Algorithm, op: Op, members: Ints, root: int) -> Ints:
    """Return how many of the `how.parts(k)` parts of its k members' payload each member of a collective sends."""
    first = int(np.flatnonzero(members == root)[0]) if root in members else 0
    return np.roll(how.sends(len(members)), first) * payload_factor(op, len(members))


def copied_bytes(messages: Mapping[str, np.ndarray]) -> Ints:
    """Return the bytes that must leave a device for each message, whatever algorithm carries it.

    A point-to-point message is one copy. With k members, a reduction, a broadcast or an all-gather is k-1 copies, and
    an all-reduce 2(k-1). A reduce-scatter is k-1 partial sums of each of the k parts.
    """
    copies: Ints = np.ones(len(messages["size"]), dtype=np.int64)
    for op, members, rows in _alike_collectives(messages):
        k = len(members)
        copies[rows] = {Op.ALL_REDUCE: 2 * (k - 1), Op.REDUCE_SCATTER: k * (k - 1)}.get(op, k - 1)
    copies *= messages["size"]
    return copies


def sent_shares(
    messages: Mapping[str, np.ndarray], collective: str, ran: Sequence[Algorithm | None] | None = None
) -> SentShares:
    """Return the bytes that each device sends for each message.

    A collective runs by its algorithm in `ran` where that has one; else by the algorithm named `collective`.
    """
    single = np.flatnonzero(messages["op"] == _P2P)
    rows = [SentShares(single, messages["src"][single].astype(np.int64), messages["size"][single].astype(float))]
    for op, members, alike in _alike_collectives(messages):
        named = algorithm(op, collective if collective in ALL_REDUCE else next(iter(ALL_REDUCE)))
        by_algorithm: dict[Algorithm, list[int]] = defaultdict(list)
        for row in alike.tolist():
            by_algorithm[(ran[row] if ran else None) or named].append(row)
        for how, chosen in by_algorithm.items():
            each = parts_sent(how, op, members, int(messages["src"][chosen[0]])) / how.parts(len(members))
            size = np.outer(messages["size"][chosen], each).ravel()
            rows.append(SentShares(np.repeat(chosen, len(members)), np.tile(members, len(chosen)), size))
    return SentShares(*map(np.concatenate, zip(*rows, strict=True)))


def _alike_collectives(messages: Mapping[str, np.ndarray]) -> list[tuple[Op, Ints, Ints]]:
    """Group collectives by operation, members and root; return (operation, members, rows) of each group."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(messages["op"] != _P2P).tolist():
        groups[messages["op"][row], str(messages["dst"][row]), messages["src"][row]].append(row)
    return [
        (Op[op.upper()], np.array(dst.split("|"), dtype=np.int64), np.array(rows, dtype=np.int64))
        for (op, dst, _), rows in groups.items()
    ]
