"""Communication, of programs and of the columns of messages.csv.

The copies that must leave a device, the bytes that each device sends, and the rounds between two slots.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.files.units import simplified
from cdpsim.numeric.columns import Columns, Ints, Times, group_starts, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Content, EdgeKind, Kind, Op, Program, Stream, once_a_program
from cdpsim.program.collectives import ALL_REDUCE, Algorithm, algorithm, payload_factor
from cdpsim.timing.costs import Costs
from cdpsim.trace.table import MessageRow, Table

_P2P = Op.P2P.name.lower()


class SentShares(NamedTuple):
    """The sends of one device for one message: a row each."""

    message: Ints
    device: Ints
    size: np.ndarray


def parts_sent(how: Algorithm, op: Op, members: Ints, root: int) -> Ints:
    """Return how many of the `how.parts(k)` parts of its k members' payload each member of a collective sends."""
    first = int(np.flatnonzero(members == root)[0]) if root in members else 0
    return np.roll(how.sends(len(members)), first) * payload_factor(op, len(members))


def copied_bytes(messages: Columns | Table[MessageRow]) -> Ints:
    """Return the bytes that must leave a device for each message, by any algorithm.

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
    messages: Columns | Table[MessageRow], collective: str, ran: Sequence[Algorithm | None] | None = None
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
        copies = len(members) // len({*members.tolist()})  # ranks of a device, which sends what one of them does
        for how, chosen in by_algorithm.items():
            each = parts_sent(how, op, members, int(messages["src"][chosen[0]])) / (how.parts(len(members)) * copies)
            size = np.outer(messages["size"][chosen], each).ravel()
            rows.append(SentShares(np.repeat(chosen, len(members)), np.tile(members, len(chosen)), size))
    return SentShares(*map(np.concatenate, zip(*rows, strict=True)))


def _alike_collectives(messages: Columns | Table[MessageRow]) -> list[tuple[Op, Ints, Ints]]:
    """Group collectives by operation, members and root; return (operation, members, rows) of each group."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(messages["op"] != _P2P).tolist():
        groups[messages["op"][row], str(messages["dst"][row]), messages["src"][row]].append(row)
    return [
        (Op[op.upper()], np.array(dst.split("|"), dtype=np.int64), np.array(rows, dtype=np.int64))
        for (op, dst, _), rows in groups.items()
    ]


def bytes_sent(program: Program, costs: Costs, among: Ints | None = None) -> list[int | Fraction]:
    """Return the bytes that each device puts on the wire for all messages, or for the rows of messages in `among`.

    Of several ranks of a device in a collective, they are the mean.

    Folded replicas send what their representative sends. Collectives run by the algorithms that they were costed with,
    which cut payloads into parts.
    """
    messages = program.messages
    rows = np.arange(len(messages)) if among is None else among
    is_single = messages.op[rows] == Op.P2P
    single, together = rows[is_single & (messages.stream[rows] < Stream.HOST)], rows[~is_single]
    whole_bytes = np.zeros(program.devices, dtype=np.int64)
    np.add.at(whole_bytes, messages.src[single], messages.size[single])
    sent: list[int | Fraction] = [*whole_bytes.tolist() * program.fold]
    order = together[sort_by(costs.runs_by[together], messages.src[together] + 1, messages.dst[together])]
    first = group_starts(costs.runs_by[order], messages.src[order], messages.dst[order])
    for alike in np.split(order, first[1:]) if len(order) else []:
        row, size = alike[0], int(messages.size[alike].sum())
        how, copies = costs.algorithms[costs.runs_by[row]], program.copies_of(messages.dst[row])
        for members in program.alike_groups(messages.dst[row]):
            parts = parts_sent(how, Op(int(messages.op[row])), members, int(messages.src[row]))
            for member, many in zip(members.tolist(), parts.tolist(), strict=True):
                sent[member // copies] += Fraction(many * size, how.parts(len(members)) * copies)
    return [simplified(size) for size in sent]


def all_bytes_sent(program: Program, costs: Costs, rows: Ints) -> int | Fraction:
    """Return the bytes that all devices put on the wire for some messages: the sum of `bytes_sent`."""
    messages = program.messages
    single = rows[(messages.op[rows] == Op.P2P) & (messages.stream[rows] < Stream.HOST)]
    together = rows[messages.op[rows] != Op.P2P]
    sent = {1: int(messages.size[single].sum()) * program.fold}  # by the parts that payloads are cut into
    kind, kinds = _kinds_of_collectives(program)
    sizes = np.zeros((len(costs.algorithms), len(kinds)), dtype=np.int64)
    np.add.at(sizes, (costs.runs_by[together], kind[together]), messages.size[together])
    for number, which in zip(*map(np.ndarray.tolist, np.nonzero(sizes)), strict=True):
        how, (op, members, groups, copies) = costs.algorithms[number], kinds[which]
        parts, payload = how.parts(members) * copies, groups * int(sizes[number, which]) * payload_factor(op, members)
        sent[parts] = sent.get(parts, 0) + payload * _parts_sent_in_all(how, members)
    total: int | Fraction = simplified(sum((Fraction(each, parts) for parts, each in sent.items()), Fraction()))
    return total


@lru_cache(maxsize=256)
def _parts_sent_in_all(how: Algorithm, members: int) -> int:
    return int(how.sends(members).sum())


@once_a_program
def _kinds_of_collectives(program: Program) -> tuple[Ints, list[tuple[Op, int, int, int]]]:
    """Return the kind of each message, -1 point to point; and of each the operation, members, alike groups and copies.

    Copies are ranks of one device.
    """
    messages, kind = program.messages, np.full(len(program.messages), -1)
    together = np.flatnonzero(messages.op != Op.P2P)
    ops = messages.op[together].astype(np.int64)
    pairs, which = np.unique(ops * len(program.groups) + messages.dst[together], return_inverse=True)
    kinds: dict[tuple[Op, int, int, int], int] = {}
    numbers = []
    for op, group in zip(*(each.tolist() for each in np.divmod(pairs, max(len(program.groups), 1))), strict=True):
        groups, members = program.alike_groups(group).shape
        numbers.append(kinds.setdefault((Op(op), members, groups, program.copies_of(group)), len(kinds)))
    kind[together] = np.array(numbers, dtype=np.int64)[which]
    return kind, list(kinds)


@once_a_program
def times_there(program: Program) -> Ints:
    """Return how often each message is sent, by all replicas that others stand for."""
    messages = program.messages
    often = np.full(len(messages), program.fold, dtype=np.int64)
    together = messages.op != Op.P2P
    kind, kinds = _kinds_of_collectives(program)
    often[together] = np.array([groups for _, _, groups, _ in kinds], dtype=np.int64)[kind[together]]
    return often


def full_version(program: Program) -> int:
    """Return the first version after theta_0 that all micro-batches of a step read at every stage; 0 if none is."""
    tasks = program.tasks
    readers = np.bincount(tasks.version[tasks.kind == Kind.F], minlength=program.versions)
    full = np.flatnonzero(readers[1 : program.steps] == program.counts[1:] * program.n)
    return 1 + int(full[0]) if len(full) else 0


def volumes(program: Program) -> dict[str, Fraction]:
    """Return gradient, parameter and boundary volume per micro-batch and training step, on the first full version.

    They are in units of the model's parameters and of the sum of its boundaries. They count the copies that must leave
    a device whatever algorithm carries them: with k members, a reduction or a broadcast is k-1 copies, an all-reduce
    both.
    """
    messages, step = program.messages, full_version(program) - 1
    now = messages.step == step
    copies = np.ones(len(messages), dtype=np.int64)
    for k in np.flatnonzero(messages.op != Op.P2P).tolist():
        copies[k] = len(program.ranks_of(messages.dst[k])) - 1
    reduced = (messages.op == Op.ALL_REDUCE) | (messages.op == Op.REDUCE) | (messages.content == Content.GRADIENT)
    spread = (messages.op == Op.ALL_REDUCE) | (messages.versions > 0)
    m = int(program.counts[step])  # of the step that made the version, or the last one's
    return {
        "gradient": Fraction(int(copies[now & reduced].sum()), m * program.n),
        "parameter": Fraction(int(copies[now & spread].sum()), m * program.n),
        "boundary": Fraction(
            int(copies[now & (messages.content == Content.ACTIVATION)].sum()), m * max(program.n - 1, 1)
        ),
    }


def rounds_between_slots(program: Program, message_rounds: Ints, start: Times, end: Times) -> int:
    """Return the largest number of communication rounds that have to fall between two slots.

    A datum that is ready at e (the end of the task that made it) and needed at s, after m rounds of successive
    messages, has s - e + 1 slot boundaries for them. The result is the smallest q for which no chain of messages,
    through updates too, has m > q (s - e + 1); each q tried is one longest-path sweep. All rounds of one collective
    fall on one boundary.
    """
    if not len(program.messages):
        return 0
    compute, edges = program.compute, program.edges
    count = program.message_nodes.stop - compute
    data = edges.kind == EdgeKind.DATA
    sent, needed = (np.flatnonzero(data & (ends >= compute)) for ends in (edges.after, edges.before))
    made = sent[edges.before[sent] < compute]
    passed = needed[edges.after[needed] >= compute]
    weight = np.concatenate([np.zeros(len(program.tasks) - compute, dtype=np.int64), message_rounds])
    chain = edges.before[passed] - compute, edges.after[passed] - compute
    message, due = edges.before[needed] - compute, start[edges.after[needed]] + 1
    made_at = np.zeros(count, dtype=np.int64)
    np.maximum.at(made_at, edges.after[made] - compute, end[edges.before[made]])

    def is_enough(q: int) -> bool:
        _, delivered, _ = longest_paths(*chain, weight, q * made_at)
        return bool((delivered[message] <= q * due).all())

    together = message_rounds[program.messages.op != Op.P2P]
    _, most, _ = longest_paths(*chain, weight, np.zeros(count, dtype=np.int64))
    return bisect_left(range(int(most.max()) + 1), True, lo=max(1, int(together.max(initial=0))), key=is_enough)
