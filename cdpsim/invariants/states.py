"""States that travel: all of a stage's from user to user, or its optimizer's from update to update."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.needs import Needs, combine
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints, find_rows, group_starts
from cdpsim.program import Content


class Way(NamedTuple):
    """The uses of all stages, stage after stage, each stage's in their order, and what moves its state between them."""

    use: Ints
    stage: Ints
    device: Ints
    message: Ints  # that brings the state for each use, -1 where it is there
    after: Ints  # of each update, the place of the use that it follows
    strange: Ints  # messages and updates that are not where the state is

    def needs(self, updates: Ints) -> Needs:
        """From use to use, by message where they are on different devices; updates come between two of them."""
        brought = np.flatnonzero(self.message >= 0)
        goes_on = np.append(self.stage[1:] == self.stage[:-1], False)
        taker = np.append(np.where(self.message[1:] >= 0, self.message[1:], self.use[1:]), -1)
        some, onward = np.flatnonzero(goes_on), np.flatnonzero(goes_on[self.after])
        return combine(
            Needs(self.message[brought], self.use[brought]),
            Needs(self.use[some], taker[some]),
            Needs(self.use[self.after], updates),
            Needs(updates[onward], taker[self.after[onward]]),
        )


def way(run: Recount) -> Way:
    """Find the way of each state: by the order that the schedule declares, or else by times."""
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
        span = len(rank) + 1
        key = stage * np.int64(span) + rank[use]
        last = tasks.stage[updates] * np.int64(span) + rank[len(use) :]
        after = np.searchsorted(key, last, side="left" if run.position is None else "right") - 1
    else:
        after = np.argsort(use)[run.anchors]
    message, strange = _moves(run, use)
    lost = updates[device[after] != tasks.device[updates]]
    return Way(use, stage, device, message, after, np.concatenate([strange, lost]))


def _moves(run: Recount, use: Ints) -> tuple[Ints, Ints]:
    """The message that brings the state for each use, and messages that bring it from or to where it is not used."""
    messages, tasks, first = run.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions > 0))
    rows = rows[np.argsort(messages.stage[rows], kind="stable")]
    stage, device = tasks.stage[use], tasks.device[use]
    begin = group_starts(stage)
    moves = np.append(True, device[1:] != device[:-1])
    moves[begin] = np.isin(stage[begin], messages.stage[rows[messages.step[rows] < 0]])
    at = np.flatnonzero(moves)
    result = np.full(len(use), -1)
    if not np.array_equal(stage[at], messages.stage[rows]):
        return result, first + rows if len(rows) else use[at]
    result[at] = first + rows
    inner = ~np.isin(at, begin)
    wrong = messages.dst[rows] != device[at]
    wrong[inner] |= messages.src[rows[inner]] != device[at[inner] - 1]
    return result, first + rows[wrong]


def optimizers(run: Recount) -> tuple[Needs, Ints]:
    """An optimizer state leaves after an update, and arrives before the next; and messages of which that is not so."""
    messages, tasks, first = run.whole.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions == 0))
    update = run.updates
    key = tasks.stage[update], tasks.step[update], tasks.device[update]
    left = find_rows(key, (messages.stage[rows], messages.step[rows], messages.src[rows]))
    next_one = find_rows(key, (messages.stage[rows], messages.step[rows] + 1, messages.dst[rows]))
    both = (left >= 0) & (next_one >= 0)
    found = Needs(update[left[both]], first + rows[both]), Needs(first + rows[both], update[next_one[both]])
    return combine(*found), first + rows[~both]


def needs(run: Recount) -> Needs:
    """All that wait for a state, or that it waits for."""
    optimizer, _ = optimizers(run)
    return combine(way(run).needs(run.updates), optimizer) if run.travels else optimizer


def states_go_from_user_to_user(run: Recount) -> Iterator[str]:
    """A state that travels is with one user at a time, and what updates it has it."""
    if run.travels:
        found = way(run)
        yield from run.names(found.strange, "is not where the state of its stage is")
        yield from run.unmet(found.needs(run.updates), "is done with the state of its stage")


def optimizer_states_follow_updates(run: Recount) -> Iterator[str]:
    """An optimizer state leaves the device of an update after it, and is at that of the next before that."""
    found, strange = optimizers(run)
    for node in strange.tolist():
        yield f"{run.whole.program.describe(node)} does not go from an update to the next"
    yield from run.unmet(found, "has ended, between which and it the optimizer state moves")
