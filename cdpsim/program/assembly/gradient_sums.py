"""Sums of gradients over data ranks as messages carry them: whole, or compressed (`cdpsim.schedules.buckets`).

Where ranks send different numbers no message can sum them: each rank gathers those of all others, and adds them up.
Of matrices that go in two factors, the second one is made of the sum of the first.
"""

from math import prod
from typing import NamedTuple

import numpy as np

from cdpsim.model.stage import Stage
from cdpsim.numeric.columns import Ints, group_starts, sort_by
from cdpsim.program import Category, Op
from cdpsim.program.assembly.build import Builder, end
from cdpsim.program.assembly.task_tables import Tables
from cdpsim.schedules.buckets import Compression


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
    if compress.rank:  # units are factors already, of which all ranks need the whole sums
        return Carried(Op.ALL_REDUCE, size, np.zeros_like(size))
    if compress.is_sparse:
        gathered = members * compress.encode(size)
        return Carried(Op.ALL_GATHER, gathered, gathered)
    sent = compress.encode(part)
    whole = sent * members if op == Op.REDUCE_SCATTER else sent
    return Carried(op, sent, np.where(sent < part, whole, 0))


def split_tensors(compress: Compression, stage: Stage) -> list[tuple[int, ...]]:
    """Return the bytes of the gradient of each tensor of a stage: all, those sent as they are, and two factors'."""
    rows = []
    for shape in stage.tensors:
        whole, factors = prod(shape), compress.factor(shape)
        numbers = whole, 0 if any(factors) else whole, *factors
        rows.append(tuple(stage.gradient_bytes * each // stage.numbers for each in numbers))
    return rows or [(stage.gradient_bytes, stage.gradient_bytes, 0, 0)]


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
