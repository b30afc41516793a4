"""Dependencies of a program on whose devices messages overlap fully, as they are where some devices have no queues.

Exchanges of data ranks queue on devices that overlap fully, and on no others.
"""

from collections.abc import Iterator, Sequence

from cdpsim.program import EdgeKind, Op, Program


def members(program: Program, message: int) -> list[int]:
    """Return the devices of a message, given as a node: both ends, or the group."""
    messages, row = program.messages, message - len(program.tasks)
    single = messages.op[row] == Op.P2P
    ends = [messages.src[row], messages.dst[row]] if single else program.groups[messages.dst[row]]
    return [int(device) for device in ends]


def edges_without_queues(program: Program, overlaps: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield edges, (before, after), but for queues in which no device stands that overlaps fully."""
    edges = program.edges
    rows = zip(*(column.tolist() for column in (edges.before, edges.after, edges.kind)), strict=True)
    for before, after, kind in rows:
        if kind != EdgeKind.STREAM or any(
            overlaps[device] == "full" for device in {*members(program, before)} & {*members(program, after)}
        ):
            yield before, after
