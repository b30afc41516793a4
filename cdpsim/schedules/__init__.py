"""Schedules as declarations: order x placement x rule x state policy, and the dict of all that have a name."""

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
        takes = {"prefetch": pulls, "slot-order": self.placement.lanes}
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
