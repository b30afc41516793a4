"""What travels: copies that must leave a device, bytes on the wire, rounds between two slots."""

from bisect import bisect_left
from fractions import Fraction

import numpy as np

from cdpsim.files.units import plain
from cdpsim.numeric.columns import Ints, Times, group_starts, sort_by
from cdpsim.numeric.paths import longest
from cdpsim.program import Content, EdgeKind, Kind, Op, Program
from cdpsim.program.collectives import payload_factor as times
from cdpsim.timing.costs import Costs


def bytes_sent(program: Program, costs: Costs, among: Ints | None = None) -> list[int | Fraction]:
    """What each device puts on the wire for all messages, or for those among them whose rows are given.

    Collectives run by the algorithms that they were costed with, which cut payloads into parts.
    """
    messages = program.messages
    rows = np.arange(len(messages)) if among is None else among
    single = rows[messages.op[rows] == Op.P2P]
    whole = np.zeros(program.devices, dtype=np.int64)
    np.add.at(whole, messages.src[single], messages.size[single])
    sent: list[int | Fraction] = [*whole.tolist()]
    together = rows[messages.op[rows] != Op.P2P]
    order = together[sort_by(costs.runs_by[together], messages.src[together] + 1, messages.dst[together])]
    first = group_starts(costs.runs_by[order], messages.src[order], messages.dst[order])
    for alike in np.split(order, first[1:]) if len(order) else []:
        src, members = int(messages.src[alike[0]]), program.ranks_of(messages.dst[alike[0]])
        how, k = costs.algorithms[costs.runs_by[alike[0]]], len(members)
        root = int(np.flatnonzero(members == src)[0]) if src >= 0 else 0
        payload = int(messages.size[alike].sum()) * times(Op(int(messages.op[alike[0]])), k)
        for member, parts in zip(np.roll(members, -root).tolist(), how.sends(k).tolist(), strict=True):
            sent[member] += Fraction(parts * payload, how.parts(k))
    return [plain(size) for size in sent]


def full_versions(program: Program) -> Ints:
    """The made versions that a step's number of micro-batches reads at every stage; none if the run is too short."""
    tasks = program.tasks
    forward = np.flatnonzero(tasks.kind == Kind.F)
    readers = np.bincount(tasks.version[forward], minlength=program.versions)
    return 1 + np.flatnonzero(readers[1 : program.steps] == program.counts[1:] * program.n)


def full_version(program: Program) -> int:
    """The first of the full versions; 0 if there is none."""
    found = full_versions(program)
    return int(found[0]) if len(found) else 0


def volumes(program: Program) -> dict[str, Fraction]:
    """Gradient, parameter and boundary volume per micro-batch and training step, on the first full version.

    In units of the model's parameters and of the sum of its boundaries. What counts is what must leave a device
    whatever algorithm carries it: with k members, a reduction or a broadcast is k-1 copies, an all-reduce both.
    """
    messages, step = program.messages, full_version(program) - 1
    now = messages.step == step
    copies = np.ones(len(messages), dtype=np.int64)
    for k in np.flatnonzero(messages.op != Op.P2P).tolist():
        copies[k] = len(program.ranks_of(messages.dst[k])) - 1
    reduced = (messages.op == Op.ALL_REDUCE) | (messages.op == Op.REDUCE) | (messages.content == Content.GRADIENT)
    spread = (messages.op == Op.ALL_REDUCE) | (messages.versions > 0)
    forth = messages.content == Content.ACTIVATION
    m = int(program.counts[step])  # of the step that made the version, or the last one's
    per_model = m * program.n
    return {
        "gradient": Fraction(int(copies[now & reduced].sum()), per_model),
        "parameter": Fraction(int(copies[now & spread].sum()), per_model),
        "boundary": Fraction(int(copies[now & forth].sum()), m * max(program.n - 1, 1)),
    }


def rounds(program: Program, message_rounds: Ints, start: Times, end: Times) -> int:
    """The most rounds that have to fall between two slots.

    A datum that is ready at e (the end of the task that made it) and needed at s, after m rounds of successive
    messages, has s - e + 1 slot boundaries for them. This is the smallest q for which no chain of messages, through
    updates too, has m > q (s - e + 1): one longest-path sweep for each q tried. All rounds of one collective fall
    on one boundary.
    """
    if not len(program.messages):
        return 0
    compute, count = program.compute, program.message_nodes.stop - program.compute
    edges = program.edges
    data = edges.kind == EdgeKind.DATA
    sent, needed = (np.flatnonzero(data & (ends >= compute)) for ends in (edges.after, edges.before))
    made = sent[edges.before[sent] < compute]
    passed = needed[edges.after[needed] >= compute]
    own = np.concatenate([np.zeros(len(program.tasks) - compute, dtype=np.int64), message_rounds])
    chain = edges.before[passed] - compute, edges.after[passed] - compute
    message, due = edges.before[needed] - compute, start[edges.after[needed]] + 1
    made_at = np.zeros(count, dtype=np.int64)
    np.maximum.at(made_at, edges.after[made] - compute, end[edges.before[made]])

    def enough(q: int) -> bool:
        _, delivered, _ = longest(*chain, own, q * made_at)
        return bool((delivered[message] <= q * due).all())

    together = message_rounds[program.messages.op != Op.P2P]
    least = max(1, int(together.max(initial=0)))
    _, most, _ = longest(*chain, own, np.zeros(count, dtype=np.int64))
    return bisect_left(range(int(most.max()) + 1), True, lo=least, key=enough)
