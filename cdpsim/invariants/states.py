"""Laws of states that travel: all of a stage's from user to user, or its optimizer's from update to update."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.recount import NO_NEEDS, Needs, Recount, combine
from cdpsim.numeric.columns import Ints, find_rows, group_starts
from cdpsim.program import Content


class StatePath(NamedTuple):
    """The uses of all stages, stage after stage, each stage's in their order, and what moves its state between them."""

    use: Ints
    stage: Ints
    message: Ints  # that brings the state for each use, -1 where it is there
    after: Ints  # of each update, the place of the use that it follows
    astray: Ints  # messages and updates that are not where the state is

    def needs(self, updates: Ints) -> Needs:
        """Return the needs from use to use, by message where their devices differ; updates come between two of them."""
        brought = np.flatnonzero(self.message >= 0)
        goes_on = np.append(self.stage[1:] == self.stage[:-1], False)
        taker = np.append(np.where(self.message[1:] >= 0, self.message[1:], self.use[1:]), -1)
        inner, onward = np.flatnonzero(goes_on), np.flatnonzero(goes_on[self.after])
        return combine(
            Needs(self.message[brought], self.use[brought]),
            Needs(self.use[inner], taker[inner]),
            Needs(self.use[self.after], updates),
            Needs(updates[onward], taker[self.after[onward]]),
        )


def state_path(run: Recount) -> StatePath:
    """Find the path of each state: by the order that the schedule declares, or else by times."""
    tasks, updates = run.program.tasks, run.updates
    use = np.arange(run.program.compute)
    if run.position is not None:
        when, until = run.position, run.position[run.barriers]
    else:
        when, until = run.start[use], run.start[updates]
    rank = np.unique(np.concatenate([when, until]), return_inverse=True)[1]
    use = np.lexsort((use, rank[: len(use)], tasks.stage[use]))
    stage, device = tasks.stage[use], tasks.device[use]
    if run.program.barrier:
        span = np.int64(len(rank) + 1)
        last = tasks.stage[updates] * span + rank[len(use) :]
        after = np.searchsorted(stage * span + rank[use], last, "left" if run.position is None else "right") - 1
    else:
        after = np.argsort(use)[run.anchors]
    message, astray = _moves(run, use)
    lost = updates[device[after] != tasks.device[updates]]
    return StatePath(use, stage, message, after, np.concatenate([astray, lost]))


def _moves(run: Recount, use: Ints) -> tuple[Ints, Ints]:
    """Return the message that brings the state for each use, and messages from or to a device that does not use it."""
    messages, tasks, first = run.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions > 0))
    rows = rows[np.argsort(messages.stage[rows], kind="stable")]
    stage, device = tasks.stage[use], tasks.device[use]
    begin = group_starts(stage)
    moves = np.append(True, device[1:] != device[:-1])
    moves[begin] = np.isin(stage[begin], messages.stage[rows[messages.step[rows] < 0]])
    at = np.flatnonzero(moves)
    brings = np.full(len(use), -1)
    if not np.array_equal(stage[at], messages.stage[rows]):
        return brings, first + rows if len(rows) else use[at]
    brings[at] = first + rows
    comes_from = np.where(np.isin(at, begin), messages.src[rows], device[at - 1])
    return brings, first + rows[(messages.dst[rows] != device[at]) | (messages.src[rows] != comes_from)]


def optimizer_needs(run: Recount) -> tuple[Needs, Ints]:
    """Return the needs of optimizer states that move from one update to the next; and messages that do otherwise."""
    messages, tasks, first = run.collapsed.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions == 0))
    update = run.updates
    key = tasks.stage[update], tasks.step[update], tasks.device[update]
    left = find_rows(key, (messages.stage[rows], messages.step[rows], messages.src[rows]))
    next_one = find_rows(key, (messages.stage[rows], messages.step[rows] + 1, messages.dst[rows]))
    both = (left >= 0) & (next_one >= 0)
    node, before, after = first + rows[both], update[left[both]], update[next_one[both]]
    return combine(Needs(before, node), Needs(node, after)), first + rows[~both]


def state_needs(run: Recount) -> Needs:
    """Return the needs of nodes for a state, and of states for nodes."""
    return combine(optimizer_needs(run)[0], state_path(run).needs(run.updates) if run.travels else NO_NEEDS)


def states_go_from_user_to_user(run: Recount) -> Iterator[str]:
    """A state that travels is with one user at a time, and its updates are where it is."""
    if run.travels:
        path = state_path(run)
        yield from run.report(path.astray, "is not where the state of its stage is")
        yield from run.report_unmet(path.needs(run.updates), "is done with the state of its stage")


def optimizer_states_follow_updates(run: Recount) -> Iterator[str]:
    """An optimizer state leaves the device of an update after it, and is at that of the next before that."""
    needs, astray = optimizer_needs(run)
    for node in astray.tolist():
        yield f"{run.collapsed.program.describe(node)} does not go from an update to the next"
    yield from run.report_unmet(needs, "has ended, between which and it the optimizer state moves")
