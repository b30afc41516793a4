"""Messages and collectives: between devices that there are, and round by round as their algorithm has it."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.pieces import rounds_of
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints
from cdpsim.program import Op
from cdpsim.program.collectives import DEFAULT, candidates


def messages_leave_their_device(run: Recount) -> Iterator[str]:
    """Point to point means two devices; a collective has several members, each once, its root among them."""
    messages, first = run.program.messages, len(run.program.tasks)
    to_itself = (messages.op == Op.P2P) & (messages.src == messages.dst)
    yield from run.names(first + np.flatnonzero(to_itself), "goes from a device to itself")
    for row in np.flatnonzero(messages.op != Op.P2P).tolist():
        members = run.program.groups[messages.dst[row]]
        root = messages.src[row]
        if len(np.unique(members)) != len(members) or len(members) < 2 or (root >= 0 and root not in members):
            yield f"{run.program.describe(first + row)} has the members {members.tolist()} and the root {root}"


def devices_exist(run: Recount) -> Iterator[str]:
    """Tasks and messages stay on the devices that the schedule has."""
    program = run.program
    outside = (program.tasks.device < 0) | (program.tasks.device >= program.devices)
    yield from run.names(np.flatnonzero(outside), f"is on none of the {program.devices} devices")
    single = program.messages.op == Op.P2P
    ends = np.maximum(program.messages.src, np.where(single, program.messages.dst, -1))
    outside = (ends >= program.devices) | (single & (np.minimum(program.messages.src, program.messages.dst) < 0))
    yield from run.names(len(program.tasks) + np.flatnonzero(outside), "names a device that there is not")


def collectives_go_round_by_round(run: Recount) -> Iterator[str]:
    """What runs as messages runs by a textbook algorithm; both ends are done with all rounds before in its channel."""
    whole, messages, first = run.whole, run.program.messages, len(run.program.tasks)
    collective = len(whole.start) - len(whole.arrived)
    piece = np.flatnonzero(whole.part_of >= collective)
    piece = piece[np.argsort(whole.part_of[piece], kind="stable")]
    number, rows = whole.part_of[piece] - collective, piece - first
    turn, channel = np.empty((2, len(piece)), dtype=np.int64)
    for part in np.split(np.arange(len(piece)), np.flatnonzero(np.diff(number)) + 1) if len(piece) else []:
        found = _rounds(run, collective + int(number[part[0]]), messages.src[rows[part]], messages.dst[rows[part]])
        if found is None:
            yield f"{whole.program.describe(int(whole.part_of[piece[part[0]]]))} goes by no algorithm that it may"
            return
        turn[part], channel[part] = found
    ends = (number * (channel.max(initial=0) + 1) + channel) * run.program.devices
    end = np.concatenate([ends + messages.src[rows], ends + messages.dst[rows]])
    node = np.tile(piece, 2)
    early = run.early(end, np.tile(turn, 2), node, np.ones(len(node), dtype=np.bool_))
    yield from run.names(node[early], "starts before one of its ends has done the rounds before")


def _rounds(run: Recount, node: int, src: Ints, dst: Ints) -> tuple[Ints, Ints] | None:
    """The round and the channel of each message of a collective."""
    program = run.whole.program
    row = node - len(program.tasks)
    members, root = program.groups[program.messages.dst[row]], program.messages.src[row]
    if root >= 0:
        members = np.roll(members, -int(np.flatnonzero(members == root)[0]))
    op = Op(int(program.messages.op[row]))
    return rounds_of(
        src, dst, members, candidates(op, run.request.collective or DEFAULT, len(members), run.cluster.cards(members))
    )
