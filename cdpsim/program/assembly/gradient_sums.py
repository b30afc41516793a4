"""Sums of gradients over data ranks as messages carry them: whole, or compressed (`cdpsim.schedules.compression`).

Where ranks send different numbers no message can sum them: each rank gathers those of all others, and adds them up.
"""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts, sort_by
from cdpsim.program import Category, Op
from cdpsim.program.assembly.build import Builder, end
from cdpsim.program.assembly.tables import Tables
from cdpsim.schedules.compression import Compression


class Carried(NamedTuple):
    """The operation of sums, the bytes of each, and the bytes that each member has encoded meanwhile."""

    op: Op
    size: Ints
    held: Ints


def carry(compress: Compression | None, op: Op, size: Ints, members: Ints | int) -> Carried:
    """Return how gradients of these bytes are summed by an operation over so many members."""
    part = -(-size // members) if op == Op.REDUCE_SCATTER else size
    if compress is None:
        return Carried(op, part, np.zeros_like(part))
    if compress.is_sparse:
        gathered = members * compress.encode(size)
        return Carried(Op.ALL_GATHER, gathered, gathered)
    sent = compress.encode(part)
    whole = sent * members if op == Op.REDUCE_SCATTER else sent
    return Carried(op, sent, np.where(sent < part, whole, 0))


def hold_encoded(tables: Tables, build: Builder, copy: Ints, given: Ints, message: Ints, held: Ints) -> None:
    """Hold what devices have encoded, from the last of the nodes that have `given` gradients to it until it is summed.

    A row stands for each copy of a stage in each message.
    """
    if not held.any():
        return
    copy, given, message, held = (column.ravel() for column in np.broadcast_arrays(copy, given, message, held))
    where, rank = tables.copies.where.take(copy), tables.lanes.rank
    turn = rank[np.minimum(given, len(rank) - 1)]  # of a message there is one
    order = sort_by(where.device, message, turn)
    first = group_starts(where.device[order], message[order])
    last = order[np.append(first[1:], len(order))[: len(first)] - 1]
    build.hold(Category.COMMUNICATION, where.take(last), held[last], end(given[last]), end(message[last]))
