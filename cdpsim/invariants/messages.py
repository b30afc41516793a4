"""Laws of messages and collectives: they are between devices that exist, and go round by round."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.program import Op
from cdpsim.program.collectives import DEFAULT, Algorithm, candidates


def messages_leave_their_device(run: Recount) -> Iterator[str]:
    """Point to point means two devices; a collective has several members, each once, its root among them."""
    messages, first = run.program.messages, len(run.program.tasks)
    to_itself = (messages.op == Op.P2P) & (messages.src == messages.dst)
    yield from run.report(first + np.flatnonzero(to_itself), "goes from a device to itself")
    for row in np.flatnonzero(messages.op != Op.P2P).tolist():
        members, root = run.program.groups[messages.dst[row]], messages.src[row]
        if len(np.unique(members)) != len(members) or len(members) < 2 or (root >= 0 and root not in members):
            yield f"{run.program.describe(first + row)} has the members {members.tolist()} and the root {root}"


def devices_exist(run: Recount) -> Iterator[str]:
    """Tasks and messages stay on the devices that the schedule has."""
    program, messages = run.program, run.program.messages
    outside = (program.tasks.device < 0) | (program.tasks.device >= program.devices)
    yield from run.report(np.flatnonzero(outside), f"is on none of the {program.devices} devices")
    single = messages.op == Op.P2P
    ends = np.maximum(messages.src, np.where(single, messages.dst, -1))
    outside = (ends >= program.devices) | (single & (np.minimum(messages.src, messages.dst) < 0))
    yield from run.report(len(program.tasks) + np.flatnonzero(outside), "names a device that there is not")


def collectives_go_round_by_round(run: Recount) -> Iterator[str]:
    """A collective sends what an algorithm sends; both ends of a message are done with its channel's rounds before."""
    collapsed, messages, first = run.collapsed, run.program.messages, len(run.program.tasks)
    collective = len(collapsed.start) - len(collapsed.arrived)
    piece = np.flatnonzero(collapsed.part_of >= collective)
    piece = piece[np.argsort(collapsed.part_of[piece], kind="stable")]
    node, rows = collapsed.part_of[piece], piece - first
    turn, channel = np.empty((2, len(piece)), dtype=np.int64)
    for part in np.split(np.arange(len(piece)), group_starts(node)[1:]) if len(piece) else []:
        rounds = _round_and_channel(run, int(node[part[0]]), messages.src[rows[part]], messages.dst[rows[part]])
        if rounds is None:
            yield f"{collapsed.program.describe(int(node[part[0]]))} goes by no algorithm that it may"
            return
        turn[part], channel[part] = rounds
    ends = (node * (channel.max(initial=0) + 1) + channel) * run.program.devices
    end = np.concatenate([ends + messages.src[rows], ends + messages.dst[rows]])
    both = np.tile(piece, 2)
    early = run.starts_early(end, np.tile(turn, 2), both, np.ones(len(both), dtype=np.bool_))
    yield from run.report(both[early], "starts before one of its ends has done the rounds before")


def _round_and_channel(run: Recount, node: int, src: Ints, dst: Ints) -> tuple[Ints, Ints] | None:
    """Return the round and the channel of each message of a collective, by the first algorithm that sends these.

    It is None if no algorithm that the collective may go by does.
    """
    program = run.collapsed.program
    row = node - len(program.tasks)
    members, root = program.groups[program.messages.dst[row]], program.messages.src[row]
    if root >= 0:
        members = np.roll(members, -int(np.flatnonzero(members == root)[0]))
    op, cards = Op(int(program.messages.op[row])), run.request.cluster.cards(members)
    place = np.full(int(max(members.max(), src.max(), dst.max())) + 1, -1)
    place[members] = np.arange(len(members))
    for how in candidates(op, run.request.collective or DEFAULT, len(members), cards):
        senders, receivers, rounds, channels = _messages_of(how, len(members))
        if np.array_equal(senders, place[src]) and np.array_equal(receivers, place[dst]):
            return rounds, channels
    return None


@lru_cache(maxsize=64)
def _messages_of(how: Algorithm, k: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the sender, the receiver, the round and the channel of each message of an algorithm for k members."""
    rounds = how.schedule(k)
    src, dst, first, _ = (np.concatenate(column) for column in zip(*rounds, strict=True))
    return src, dst, np.repeat(np.arange(len(rounds)), [len(each.src) for each in rounds]), how.channel(k, first)
