"""Schedules as declarations: order x placement x rule x state policy, and the dict of all that have a name.

Cyclic timing on the pyramid, N = 3: a device is free for another micro-batch when it has done the backward of one.
`F1.0` is the forward of micro-batch 1 on stage 0; `/` marks what reads an older version than the newest.

>>> from cdpsim import simulate
>>> from cdpsim.draw.text import timetable
>>> print(timetable(simulate("mp-cdp", 3, steps=2)))
slot 0    1    2    3    4    5    6    7    8    9    10    11    12   13    14   15
0    F0.0                     B0.0 F0.0                      B0.0/
1              F1.0                     B1.0 F1.0                       B1.0/
2                        F2.0                     B2.0 F2.0                        B2.0
3         F0.1           B0.1 F2.1           B2.1 F1.1             B1.1
4                   F1.1           B1.1 F0.1           B0.1/ F2.1             B2.1
5              F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 F0.2 B0.2 F1.2  B1.2  F2.2 B2.2
"""

from dataclasses import dataclass
from enum import Enum

from cdpsim.schedules import rule as rules
from cdpsim.schedules.order import CYCLIC, SIMULTANEOUS, Order
from cdpsim.schedules.placement import (
    BY_MICRO_BATCH,
    BY_MICRO_BATCH_AND_STAGE,
    BY_STAGE,
    PYRAMID,
    SINGLE,
    Placement,
)
from cdpsim.schedules.rule import Rule


class State(Enum):
    """Where parameters and optimizer states live: on every device that uses them, or in one place each."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Schedule:
    """When, where and on which parameters each task runs; communication and memory follow from it."""

    name: str
    about: str
    order: Order
    placement: Placement
    rule: Rule
    state: State = State.REPLICATED

    @property
    def options(self) -> tuple[str, ...]:
        """The options it takes beyond those that every schedule takes."""
        pulls = self.placement.replicas and (self.state is State.SHARDED or not self.order.flush)
        alike = self.placement.replicas and self.state is State.REPLICATED and self.order.flush
        takes = {"m": alike, "prefetch": pulls, "slot-order": self.placement.lanes and not self.order.flush}
        return tuple(name for name, taken in takes.items() if taken)


_ALL = (
    Schedule("single-dp", "one device runs all micro-batches at once", SIMULTANEOUS, SINGLE, rules.DP),
    Schedule("single-cdp", "one device, micro-batches two slots apart", CYCLIC, SINGLE, rules.CDP_V2),
    Schedule("multi-dp", "a device per micro-batch, all-reduce", SIMULTANEOUS, BY_MICRO_BATCH, rules.DP),
    Schedule("multi-cdp", "a device per micro-batch, point to point", CYCLIC, BY_MICRO_BATCH, rules.CDP_V2),
    Schedule("mp-dp", "a device per micro-batch and stage", SIMULTANEOUS, BY_MICRO_BATCH_AND_STAGE, rules.DP),
    Schedule("mp-cdp", "the pyramid: n-j devices for stage j", CYCLIC, PYRAMID, rules.CDP_V2),
    Schedule("pp-cdp", "a device per stage: a pipeline without flush", CYCLIC, BY_STAGE, rules.CDP_V2),
    Schedule("zero-dp", "sharded states, broadcast for use", SIMULTANEOUS, BY_MICRO_BATCH, rules.DP, State.SHARDED),
    Schedule("zero-cdp", "a stage's state travels to its user", CYCLIC, BY_MICRO_BATCH, rules.CDP_V2, State.SHARDED),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
