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

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from cdpsim.errors import RequestError, choose, is_unicode, short_repr
from cdpsim.schedules import rule as rules
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.order import CYCLIC, SIMULTANEOUS, STREAMED, Lists, Order, WrittenOut, listed, newest
from cdpsim.schedules.pipelines import alternating, both_ways, dual, fold, zero_bubble
from cdpsim.schedules.placement import (
    BY_MICRO_BATCH,
    BY_MICRO_BATCH_AND_STAGE,
    BY_STAGE,
    LISTED,
    PYRAMID,
    SINGLE,
    Placement,
)
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape
from cdpsim.schedules.state import ALONG, OWNER, REPLICATED, TRAVELLING, Home, State, When
from cdpsim.schedules.table import read_actions

_OURS = f"{__name__}.pipelines."  # whose orders are held against laws by tests, and need no check when they run


@dataclass(frozen=True)
class Schedule:
    """When, where and on which parameters each task runs; communication and memory follow from it."""

    name: str
    about: str
    order: Order
    placement: Placement
    rule: Rule
    state: State = REPLICATED
    m: int | None = None  # micro-batches in a training step, where that is not the user's to say
    vertical_sync: Rule | None = None  # the rule that --vertical-sync stands for
    shape: Shape | None = None  # the only one it has, where somebody has written it out once

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and is_unicode(self.name)):
            raise RequestError("schedule", f"{short_repr(self.name)} cannot name one; give it a name of Unicode text")
        object.__setattr__(self, "name", str(self.name))  # a text of numpy's, too

    @property
    def options(self) -> tuple[str, ...]:
        """The options it takes beyond those that every schedule takes."""
        together, replicas = self.order.together, self.placement.replicas
        owned = self.state.parameters is Home.OWNED
        pipeline = self.order.lists is not None or (not replicas and not self.placement.lanes)
        takes = {
            "m": (self.sums_together or self.order.any_m) and self.m is None,
            "chunks": self.order.any_chunks,
            "replicas": pipeline,
            "overlap-all-reduce": together and not self.placement.lanes and not owned,
            "vertical-sync": self.vertical_sync is not None,
            "prefetch": replicas and (owned or not together),
            "slot-order": self.placement.lanes and not together,
        }
        return tuple(name for name, taken in takes.items() if taken)

    @property
    def sums_together(self) -> bool:
        """Whether all devices of a stage have the same to do, and sum gradients by a collective."""
        return self.placement.replicas and self.order.together and self.state.parameters is Home.COPIED

    @property
    def hurried(self) -> "Schedule":
        """The same schedule, whose gradients are summed as soon as those of a step are complete."""
        return replace(self, state=replace(self.state, reduce=When.LAST))

    def micro_batches(self, n: int) -> int:
        """How many micro-batches a training step has, where nothing else is asked for."""
        return n if self.m is None else self.m

    def splits(self, shape: Shape) -> bool:
        """Whether backwards have a part of their own for the weights."""
        return self.order.lists is not None and self.actions(shape).splits

    def actions(self, shape: Shape) -> Actions:
        """Give the actions of each device of a replica in a step; its order must list them."""
        assert self.order.lists is not None
        if self.shape is not None:
            return self.order.lists.written(0, 0, 0)
        devices, rest = divmod(shape.n, shape.chunks)
        if rest:
            problem = f"needs n to be a multiple of its chunks; n={shape.n}, chunks={shape.chunks}"
            raise RequestError("n", f"{self.name} {problem}")
        try:
            return _written_out(self.order.lists, devices, shape.m, shape.chunks)
        except RequestError as error:
            raise RequestError(error.subject, f"{self.name} {error.problem}") from None


def imported(path: str | Path, *, together: bool = True) -> Schedule:
    """The order of a CSV file as torch's pipelining writes them; a device has whatever stages it is given there.

    If devices are not `together`, they repeat their rows without a flush.
    """
    actions = read_actions(path, together=together)
    shape = Shape(int(actions.stage.max()) + 1, int(actions.micro_batch.max()) + 1)
    once = pipeline(str(path), "an order from a file", partial(_as_read, actions), together=together)
    return replace(once, shape=shape, m=shape.m)


def _as_read(actions: Actions, devices: int, m: int, chunks: int) -> Actions:
    return actions


@lru_cache(maxsize=4)  # a request asks whether backwards are split, and its assembly for all
def _written_out(lists: Lists, devices: int, m: int, chunks: int) -> Actions:
    actions = lists.written(devices, m, chunks)
    if not isinstance(actions, Actions):
        raise RequestError("actions", f"gives {short_repr(actions)}; let it return Actions")
    if getattr(lists.actions, "__module__", "").startswith(_OURS):
        return actions
    check_actions(actions)
    counts = {"devices": (actions.devices, devices), "stages": (int(actions.stage.max()) + 1, devices * chunks)}
    counts["micro-batches"] = int(actions.micro_batch.max()) + 1, m
    for what, (has, wanted) in counts.items():
        if has != wanted:
            raise RequestError("actions", f"has {has} {what} where {wanted} are asked for")
    return actions


def pipeline(
    name: str, about: str, actions: WrittenOut, *, chunks: int = 1, any_chunks: bool = False, together: bool = True
) -> Schedule:
    """A pipeline by what each of its devices does in a training step; it is flushed at the step's end, if `together`.

    Otherwise devices repeat their lists without a pause, and each task reads the newest version that its device has.
    """
    if not callable(actions):
        raise RequestError(
            "actions", f"{short_repr(actions)} is no function of devices, micro-batches and chunks; give one"
        )
    order = listed(name, actions, chunks=chunks, any_chunks=any_chunks, together=together)
    return Schedule(name, about, order, LISTED, rules.DP if together else newest(order))


_OF_TABLE_1 = (
    Schedule("single-dp", "one device runs all micro-batches at once", SIMULTANEOUS, SINGLE, rules.DP),
    Schedule("single-cdp", "one device, micro-batches two slots apart", CYCLIC, SINGLE, rules.CDP_V2),
    Schedule("multi-dp", "a device per micro-batch, all-reduce", SIMULTANEOUS, BY_MICRO_BATCH, rules.DP),
    Schedule("multi-cdp", "a device per micro-batch, point to point", CYCLIC, BY_MICRO_BATCH, rules.CDP_V2, ALONG),
    Schedule("mp-dp", "a device per micro-batch and stage", SIMULTANEOUS, BY_MICRO_BATCH_AND_STAGE, rules.DP),
    Schedule("mp-cdp", "the pyramid: n-j devices for stage j", CYCLIC, PYRAMID, rules.CDP_V2, ALONG),
    Schedule("pp-cdp", "a device per stage: a pipeline without flush", CYCLIC, BY_STAGE, rules.CDP_V2),
    Schedule("zero-dp", "sharded states, broadcast for use", SIMULTANEOUS, BY_MICRO_BATCH, rules.DP, OWNER),
    Schedule("zero-cdp", "a stage's state travels to its user", CYCLIC, BY_MICRO_BATCH, rules.CDP_V2, TRAVELLING),
)
_PIPELINES = (
    pipeline("gpipe", "all forwards, then all backwards", alternating.gpipe),
    pipeline("1f1b", "a forward and a backward in turn (PipeDream-Flush, DAPPLE)", alternating.one_f_one_b),
    pipeline("interleaved-1f1b", "1f1b with several stages per device", alternating.interleaved, any_chunks=True),
    pipeline("looped-bfs", "gpipe with several stages per device", alternating.looped_bfs, any_chunks=True),
    pipeline("zb-h1", "weights' gradients fill the bubble, at 1f1b's memory", zero_bubble.zb_h1),
    pipeline("zb-h2", "weights' gradients fill the bubble, at twice 1f1b's memory", zero_bubble.zb_h2),
    pipeline(
        "interleaved-zero-bubble",
        "zb-h1 with several stages per device",
        zero_bubble.interleaved_zero_bubble,
        any_chunks=True,
    ),
    pipeline("zbv", "zero bubble on two stages per device, placed in a V", fold.zbv, chunks=2),
    pipeline("dualpipe", "two directions at once, forwards beside backwards", dual.dualpipe),
    pipeline("dualpipev", "dualpipe cut in half: a V of two stages per device", fold.dualpipev, chunks=2),
    pipeline("chimera", "two pipelines in opposite directions", both_ways.chimera),
    pipeline("gems", "two pipelines in turn, a micro-batch at a time", both_ways.gems),
    Schedule(
        "pipedream",
        "1f1b without flush: an update per micro-batch, a version for each in flight",
        STREAMED,
        BY_STAGE,
        rules.NEWEST,
        m=1,
        vertical_sync=rules.VERTICAL_SYNC,
    ),
    Schedule("pipedream-2bw", "1f1b without flush, two versions", STREAMED, BY_STAGE, rules.CDP_V1),
    Schedule("pipemare", "1f1b without flush, one version for all", STREAMED, BY_STAGE, rules.NEWEST_EACH),
)
_ALL = (*_OF_TABLE_1, *_PIPELINES)
TABLE_1 = tuple(schedule.name for schedule in _OF_TABLE_1)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}


def find_schedule(schedule: str | Schedule) -> Schedule:
    """Return a schedule by its name or from a CSV file of torch's, or a schedule itself."""
    if isinstance(schedule, Schedule):
        if SCHEDULES.get(schedule.name, schedule) != schedule:
            raise RequestError("schedule", f"another one is named {schedule.name}; give this one a name of its own")
        return schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        return imported(schedule)
    return SCHEDULES[choose("schedule", schedule, SCHEDULES)]
