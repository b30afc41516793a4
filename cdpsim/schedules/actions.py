"""What each device does in a step, one action after another: how pipelines declare their orders.

Where a task runs follows from whose list it is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdpsim.columns import Ints, runs


class Action(IntEnum):
    """A forward, a whole backward, or the two parts of one: for the input of its stage, and for the weights."""

    F = 1
    B = 2
    I = 3  # noqa: E741 - as torch and the zero-bubble papers write it
    W = 4


@dataclass(frozen=True, eq=False)
class Actions:
    """A row for each action, device after device, each device's in its order."""

    first: Ints  # device d does rows first[d] to first[d + 1]
    kind: Ints
    stage: Ints
    micro_batch: Ints
    beside: NDArray[np.bool_] | None = None  # whether it is meant to overlap with the row before it (DualPipe's pairs)

    @classmethod
    def of(cls, devices: Sequence[Sequence[tuple[str, int, int]]]) -> "Actions":
        """Actions written out: of each device, a list of (kind, stage, micro-batch).

        >>> both = Actions.of([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]])
        >>> both.device.tolist(), both.stage.tolist()
        ([0, 0, 1, 1], [0, 0, 1, 1])
        """
        rows = [(Action[kind], stage, micro_batch) for actions in devices for kind, stage, micro_batch in actions]
        kind, stage, micro_batch = np.array(rows, dtype=np.int32).reshape(-1, 3).T
        return cls(np.cumsum([0, *map(len, devices)], dtype=np.int32), kind, stage, micro_batch)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.first) - 1

    @cached_property
    def device(self) -> Ints:
        """The device of each action."""
        return runs(self.first[:-1], len(self))

    @cached_property
    def place(self) -> Ints:
        """The place of each action in its device's order."""
        return np.arange(len(self), dtype=np.int32) - self.first[self.device]

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is done in two parts."""
        return bool((self.kind == Action.I).any())
