"""A plain player of actions, one after another: tests compare it with published formulas."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cdpsim.schedules.actions import Action, Actions

UNIT = {"F": 1, "B": 1}
DOUBLE = {"F": 1, "B": 2}

Named = tuple[str, int, int]  # kind, stage, micro-batch


class Played(NamedTuple):
    """The actions of each device in their order, and when each action starts and ends."""

    order: list[list[Named]]
    start: dict[Named, int]
    end: dict[Named, int]

    @property
    def whole(self) -> int:
        """The time at which the last action ends."""
        return max(self.end.values())

    @property
    def longest_stay(self) -> int:
        """The longest time from the start of a device's first action to the end of its last."""
        return max(self.end[row[-1]] - self.start[row[0]] for row in self.order)

    @property
    def bubble(self) -> int:
        """The total time in which devices do nothing."""
        busy = sum(self.end[action] - self.start[action] for action in self.end)
        return len(self.order) * self.whole - busy


def order_of(actions: Actions) -> list[list[Named]]:
    """Return each device's actions."""
    kind = [Action(k).name for k in actions.kind.tolist()]
    rows = list(zip(kind, actions.stage.tolist(), actions.micro_batch.tolist(), strict=True))
    return [rows[low:high] for low, high in zip(actions.first[:-1], actions.first[1:], strict=True)]


def pairs_of(actions: Actions) -> list[bool]:
    """Return, for each action, whether it overlaps with the one before."""
    return [False] * len(actions) if actions.beside is None else actions.beside.tolist()


def together(actions: Actions, pairs: bool) -> list[list[list[Named]]]:
    """Return each device's actions in groups that overlap: with `pairs` those that are meant to, else each alone."""
    beside = actions.beside if pairs and actions.beside is not None else np.zeros(len(actions), bool)
    cuts = [np.flatnonzero(~row) for row in np.split(beside, actions.first[1:-1])]
    return [
        [row[low:high] for low, high in zip(cut, [*cut[1:], len(row)], strict=True)]
        for row, cut in zip(order_of(actions), cuts, strict=True)
    ]


def play(actions: Actions, times: Mapping[str, int], pairs: bool = False) -> Played:
    """Start each action when the one before it on its device is done and its inputs are there.

    With `pairs`, two actions that are meant to overlap are one, which takes as long as both.
    """
    order = order_of(actions)
    split = {(stage, i) for row in order for kind, stage, i in row if kind == "I"}
    last = max(stage for row in order for _, stage, _ in row)
    played = Played(order, {}, {})
    groups = together(actions, pairs)
    done, free = [0] * len(order), [0] * len(order)
    waits = list(range(len(order)))
    while waits:
        before = sum(done)
        for device in waits:
            for group in groups[device][done[device] :]:
                inputs = [played.end.get(needed) for action in group for needed in needs(action, last, split)]
                if None in inputs:
                    break
                start = max([free[device], *(end for end in inputs if end is not None)])
                free[device] = start + sum(times[kind] for kind, _, _ in group)
                played.start.update(dict.fromkeys(group, start))
                played.end.update(dict.fromkeys(group, free[device]))
                done[device] += 1
        waits = [device for device in waits if done[device] < len(groups[device])]
        assert sum(done) > before, f"a deadlock: devices {waits} wait"
    return played


def needs(action: Named, last: int, split: set[tuple[int, int]]) -> list[Named]:
    """Return the actions that must have ended before an action can start."""
    kind, stage, i = action
    if kind == "F":
        return [("F", stage - 1, i)] * (stage > 0)
    if kind == "W":
        return [("I", stage, i)]
    after = "I" if (stage + 1, i) in split else "B"
    return [("F", stage, i)] + [(after, stage + 1, i)] * (stage < last)


def in_flight(row: list[Named]) -> int:
    """Return by how many forwards a device is at most ahead of its backwards."""
    ahead = most = 0
    for kind, _, _ in row:
        ahead += {"F": 1, "I": 0}.get(kind, -1)
        most = max(most, ahead)
    return most
