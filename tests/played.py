"""Actions played one after another, as plainly as can be: what published formulas are held against."""

from collections.abc import Mapping
from typing import NamedTuple

from cdpsim.schedules.actions import Action, Actions

UNIT = {"F": 1, "B": 1}
DOUBLE = {"F": 1, "B": 2}

Named = tuple[str, int, int]  # kind, stage, micro-batch


class Played(NamedTuple):
    """When each action starts and ends, of each device's the others."""

    order: list[list[Named]]
    start: dict[Named, int]
    end: dict[Named, int]

    @property
    def whole(self) -> int:
        """When the last action ends."""
        return max(self.end.values())

    @property
    def bubble(self) -> int:
        """How long all devices together do nothing."""
        busy = sum(self.end[action] - self.start[action] for action in self.end)
        return len(self.order) * self.whole - busy


def order_of(actions: Actions) -> list[list[Named]]:
    """Each device's actions."""
    kind = [Action(k).name for k in actions.kind.tolist()]
    rows = list(zip(kind, actions.stage.tolist(), actions.micro_batch.tolist(), strict=True))
    return [rows[low:high] for low, high in zip(actions.first[:-1], actions.first[1:], strict=True)]


def play(actions: Actions, times: Mapping[str, int]) -> Played:
    """Start each action when the one before it on its device is done and what it needs is there."""
    order = order_of(actions)
    split = {(stage, i) for row in order for kind, stage, i in row if kind == "I"}
    last = max(stage for row in order for _, stage, _ in row)
    played = Played(order, {}, {})
    done, free = [0] * len(order), [0] * len(order)
    waits = list(range(len(order)))
    while waits:
        before = sum(done)
        for device in waits:
            for action in order[device][done[device] :]:
                inputs = [played.end.get(needed) for needed in needs(action, last, split)]
                if None in inputs:
                    break
                played.start[action] = max([free[device], *(end for end in inputs if end is not None)])
                played.end[action] = free[device] = played.start[action] + times[action[0]]
                done[device] += 1
        waits = [device for device in waits if done[device] < len(order[device])]
        assert sum(done) > before, f"a deadlock: devices {waits} wait"
    return played


def needs(action: Named, last: int, split: set[tuple[int, int]]) -> list[Named]:
    """What must have ended before an action can start."""
    kind, stage, i = action
    if kind == "F":
        return [("F", stage - 1, i)] * (stage > 0)
    if kind == "W":
        return [("I", stage, i)]
    after = "I" if (stage + 1, i) in split else "B"
    return [("F", stage, i)] + [(after, stage + 1, i)] * (stage < last)


def in_flight(row: list[Named]) -> int:
    """How many forwards a device is at most ahead of its backwards."""
    ahead = most = 0
    for kind, _, _ in row:
        ahead += {"F": 1, "I": 0}.get(kind, -1)
        most = max(most, ahead)
    return most
