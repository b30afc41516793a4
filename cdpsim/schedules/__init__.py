"""Schedules as declarations: order x placement x rule x state policy, and the dict of all that have a name.

Two steps of each schedule that is not a pipeline by lists (those have theirs in `pipelines.py`), for two stages and two
micro-batches. A row is a device and a column a slot; `F1.0` is the forward of micro-batch 1 on stage 0, and `/` marks a
task that reads an older version than the newest.

>>> from cdpsim import simulate
>>> from cdpsim.draw.text import timetable
>>> def show(name):
...     print(timetable(simulate(name, 2, steps=2)))

One device runs all micro-batches at once; it needs their activations at once.

>>> show("single-dp")
slot 0         1         2         3         4         5         6         7
0    F0.0+F1.0 F0.1+F1.1 B0.1+B1.1 B0.0+B1.0 F0.0+F1.0 F0.1+F1.1 B0.1+B1.1 B0.0+B1.0

Cyclic: micro-batches are two slots apart, and some tasks read parameters one step older.

>>> show("single-cdp")
slot 0    1    2         3         4         5         6         7          8    9
0    F0.0 F0.1 F1.0+B0.1 F1.1+B0.0 F0.0+B1.1 F0.1+B1.0 F1.0+B0.1 F1.1+B0.0/ B1.1 B1.0

Data parallelism: a device per micro-batch; an all-reduce sums each stage's gradients at the end of a step.

>>> show("multi-dp")
slot 0    1    2    3    4    5    6    7
0    F0.0 F0.1 B0.1 B0.0 F0.0 F0.1 B0.1 B0.0
1    F1.0 F1.1 B1.1 B1.0 F1.0 F1.1 B1.1 B1.0

Cyclic data parallelism: sums go on from device to device, point to point.

>>> show("multi-cdp")
slot 0    1    2    3    4    5    6    7     8    9
0    F0.0 F0.1 B0.1 B0.0 F0.0 F0.1 B0.1 B0.0/
1              F1.0 F1.1 B1.1 B1.0 F1.0 F1.1  B1.1 B1.0

Model parallelism: a device per micro-batch and stage, most of the time idle.

>>> show("mp-dp")
slot 0    1    2    3    4    5    6    7
0    F0.0           B0.0 F0.0           B0.0
1         F0.1 B0.1           F0.1 B0.1
2    F1.0           B1.0 F1.0           B1.0
3         F1.1 B1.1           F1.1 B1.1

The pyramid: a device is free for another micro-batch after a backward, so that stage j needs n - j devices.

>>> show("mp-cdp")
slot 0    1    2    3    4    5    6    7     8    9
0    F0.0           B0.0 F0.0           B0.0/
1              F1.0           B1.0 F1.0            B1.0
2         F0.1 B0.1 F1.1 B1.1 F0.1 B0.1 F1.1  B1.1

A pipeline without flush: a device per stage.

>>> show("pp-cdp")
slot 0    1    2    3    4    5    6    7     8    9
0    F0.0      F1.0 B0.0 F0.0 B1.0 F1.0 B0.0/      B1.0
1         F0.1 B0.1 F1.1 B1.1 F0.1 B0.1 F1.1  B1.1

Sharded states: as multi-dp, but each stage's parameters are broadcast for each use.

>>> show("zero-dp")
slot 0    1    2    3    4    5    6    7
0    F0.0 F0.1 B0.1 B0.0 F0.0 F0.1 B0.1 B0.0
1    F1.0 F1.1 B1.1 B1.0 F1.0 F1.1 B1.1 B1.0

As multi-cdp, but each stage's parameters and states travel to the device that uses them next.

>>> show("zero-cdp")
slot 0    1    2    3    4    5    6    7     8    9
0    F0.0 F0.1 B0.1 B0.0 F0.0 F0.1 B0.1 B0.0/
1              F1.0 F1.1 B1.1 B1.0 F1.0 F1.1  B1.1 B1.0

An update per micro-batch (here the steps), and a version for each micro-batch in flight.

>>> show("pipedream")
slot 0    1    2    3    4    5
0    F0.0 F0.0      B0.0      B0.0/
1         F0.1 B0.1 F0.1 B0.1

An update per n micro-batches, and two versions.

>>> show("pipedream-2bw")
slot 0    1    2    3    4    5    6     7     8     9
0    F0.0      F1.0 B0.0 F0.0 B1.0 F1.0/ B0.0/       B1.0/
1         F0.1 B0.1 F1.1 B1.1 F0.1 B0.1/ F1.1/ B1.1/

One version for all: a backward may read a newer one than its forward.

>>> show("pipemare")
slot 0    1    2    3    4    5    6    7    8    9
0    F0.0      F1.0 B0.0 F0.0 B1.0 F1.0 B0.0      B1.0
1         F0.1 B0.1 F1.1 B1.1 F0.1 B0.1 F1.1 B1.1
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from cdpsim.errors import RequestError, choose, in_known_case, is_unicode, one_line, short_repr
from cdpsim.numeric.columns import Kept
from cdpsim.schedules import pipelines
from cdpsim.schedules import rule as rules
from cdpsim.schedules.actions import KINDS, Actions, check_actions, parse_actions, read_actions
from cdpsim.schedules.order import (
    CYCLIC,
    SIMULTANEOUS,
    STREAMED,
    ActionsOf,
    Lists,
    LocalSteps,
    Order,
    Outer,
    OverlappedRounds,
    newest_rule,
)
from cdpsim.schedules.placement import (
    BY_MICRO_BATCH,
    BY_MICRO_BATCH_AND_STAGE,
    BY_STAGE,
    LISTED,
    PYRAMID,
    SINGLE,
    Placement,
    Shape,
    Widths,
)
from cdpsim.schedules.rule import ACCO, DPU, WP, Rule
from cdpsim.schedules.state import ALONG, BESIDE, MEAN, OWNER, REPLICATED, TRAVELLING, Placed, State


@dataclass(frozen=True)
class Schedule:
    """The order, device and parameters of each task; communication and memory are derived from them."""

    name: str
    about: str
    order: Order
    placement: Placement
    rule: Rule
    state: State = REPLICATED
    m: int | None = None  # micro-batches in a training step, where a request cannot change that
    takes_vertical_sync: bool = False  # whether it takes --rule vertical-sync
    shape: Shape | None = None  # of an order from a file: the only one that it has
    torch_sends: str = "until-step-end"  # how long torch's runtime for such a pipeline holds what it has sent
    usual_m: int | None = None  # default number of micro-batches; None: the number of stages

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and is_unicode(self.name)):
            raise RequestError("schedule", f"{short_repr(self.name)} cannot name one; give it a name of Unicode text")
        object.__setattr__(self, "name", str(self.name))  # a text of numpy's, too

    def __repr__(self) -> str:
        return f"Schedule({short_repr(self.name)}: {one_line(self.about)})"

    @property
    def is_pipeline(self) -> bool:
        """Whether devices have stages of their own, or actions in lists, so that data ranks can repeat all of it."""
        return self.order.lists is not None or self.is_line

    @property
    def flushes(self) -> bool:
        """Whether it is a pipeline, or data parallelism, that ends a step on all devices before the next begins."""
        return self.is_pipeline and self.order.together

    @property
    def splits_states(self) -> bool:
        """Whether its data ranks may split states."""
        return self.is_pipeline and self.order.waits

    @property
    def takes_m(self) -> bool:
        """Whether a request may say how many micro-batches a step has."""
        return (self.all_reduces or self.order.any_m or self.order.accumulates) and self.m is None

    @property
    def warms_up(self) -> bool:
        """Whether it may have steps without delays before all others."""
        rounds, local = self.order.rounds, self.order.local
        return bool(rounds and rounds.warms_up) or bool(local and local.usual_warm_up)

    @property
    def sums_at_ends(self) -> bool:
        """Whether devices sum gradients at the end of their steps, unless asked to do it before."""
        owned = self.state.parameters is Placed.OWNED
        return self.order.together and not (self.placement.lanes or owned or self.order.one_place)

    @property
    def sums_gradients(self) -> bool:
        """Whether messages may sum gradients: of devices that have the same stage, or of replicas."""
        return (self.is_pipeline or (self.placement.replicas and not self.state.travels)) and not self.order.local

    @property
    def fetches(self) -> bool:
        """Whether devices get parameters from others."""
        return self.placement.replicas and (self.state.parameters is Placed.OWNED or not self.order.together)

    @property
    def is_line(self) -> bool:
        """Whether each stage is on one device, past which all micro-batches go."""
        return not (self.placement.replicas or self.placement.lanes)

    @property
    def all_reduces(self) -> bool:
        """Whether all copies of a stage have the same tasks, and sum gradients by an all-reduce."""
        return self.placement.replicas and self.order.together and self.state.parameters is Placed.COPIED

    def micro_batches(self, n: int) -> int:
        """Return the number of micro-batches in a training step, by default."""
        return self.m or self.usual_m or n

    def workers(self, n: int, m: int) -> int:
        """Return how many workers take m micro-batches of a cyclic step in turns; 0 where each has a worker.

        Without a worker of their own, in a pipeline, m may be any number from n on.
        """
        if not self.order.accumulates or m == self.micro_batches(n) or not self.takes_m:
            return 0
        if self.is_line:
            if m < n:
                raise RequestError("m", f"{self.name} needs m >= n, to keep its stages busy; m={m}, n={n}")
        elif m % n:
            least, most = m // n * n, (m // n + 1) * n
            near = f"{least} or {most}" if least else most
            raise RequestError("m", f"{self.name} needs a multiple of its n={n} workers; m={m}, so give {near}")
        return n

    def rule_of(self, shape: Shape) -> Rule:
        """Return the rule by default: in a line of more micro-batches than stages the newest that exists for each."""
        return rules.NEWEST if shape.workers and self.is_line and self.rule == rules.CDP_V2 else self.rule

    def splits(self, shape: Shape) -> bool:
        """Return whether backwards have a part of their own for the weights."""
        return self.order.lists is not None and self.actions(shape).splits

    def devices(self, shape: Shape) -> int:
        """Return the number of devices of a replica."""
        return self.actions(shape).devices if self.order.lists else self.placement.devices(shape)

    def has_copies(self, shape: Shape) -> bool:
        """Return whether several ranks of a pipeline have the same stage: those of replicas, or of two directions."""
        several = shape.replicas * shape.copies * shape.expert_copies > 1
        if several or self.order.lists is None:
            return several
        return self.actions(shape).places > shape.n

    def actions(self, shape: Shape) -> Actions:
        """Return the actions of each device of a replica in a step; its order must be one by lists."""
        assert self.order.lists is not None
        if self.shape is not None:
            actions = self.order.lists.write_out(shape)
            return actions.refined(shape.layers, shape.n) if shape.layers else actions
        if shape.parts % shape.chunks:
            problem = f"needs n to be a multiple of its chunks; n={shape.parts}, chunks={shape.chunks}"
            raise RequestError("n", f"{self.name} {problem}")
        try:
            devices = 1 if self.order.one_place else sum(shape.widths) or shape.parts // shape.chunks
            return _checked_actions(self.order.lists, shape, devices)
        except RequestError as error:
            raise RequestError(error.subject, f"{self.name} {error.problem}") from None


def schedule_from_csv(path: str | Path, *, together: bool = True) -> Schedule:
    """Return the schedule of a CSV file in the format of torch's pipelining; a device has any stages that it has there.

    If devices are not `together`, they repeat their rows without a flush.
    """
    return _written_out(str(path), "an order from a file", read_actions(path, together=together), together=together)


def schedule_from_lists(name: str, order: Sequence[Sequence[str]]) -> Schedule:
    """Return the schedule of a list of actions for each device.

    An action is such as `0F1` (stage 0, forward, micro-batch 1), or `F1` on the stage of the device's own number.
    """
    if not (_is_listing(order) and all(map(_is_listing, order))):
        raise RequestError("order", f"{short_repr(order)} is no list of lists; {_EXAMPLE}")
    rows = [[f"{d}{cell}" if str(cell)[:1] in KINDS else str(cell) for cell in row] for d, row in enumerate(order)]
    if not any(rows):
        raise RequestError("order", f"is empty; {_EXAMPLE}")
    return _written_out(name, "an order given as lists", parse_actions(rows, "order"), together=True)


def _is_listing(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


_EXAMPLE = 'write a list for each device, such as [["F0", "B0"], ["F0", "B0"]]'


def _written_out(name: str, about: str, actions: Actions, *, together: bool) -> Schedule:
    shape = Shape(int(actions.stage.max()) + 1, int(actions.micro_batch.max()) + 1)
    schedule = pipeline(name, about, partial(_actions_as_listed, actions), together=together)
    return replace(schedule, shape=shape, m=shape.m)


def _actions_as_listed(actions: Actions, devices: int, m: int, chunks: int) -> Actions:
    return actions


# A request needs them to know whether backwards are split, and its assembly for the rest.
KNOWN_ACTIONS: Kept[Actions] = Kept(most=2**20, least=4)


def _checked_actions(lists: Lists, shape: Shape, devices: int) -> Actions:
    """Return the actions of lists, which are written out once for the shapes that were asked for last."""
    key = lists, shape, devices
    if key not in KNOWN_ACTIONS:
        actions = _write_out_checked(*key)
        KNOWN_ACTIONS.keep(key, actions, len(actions.stage))
    return KNOWN_ACTIONS[key]


def _write_out_checked(lists: Lists, shape: Shape, devices: int) -> Actions:
    actions = lists.write_out(shape)
    if not isinstance(actions, Actions):
        raise RequestError("actions", f"gives {short_repr(actions)}; let it return Actions")
    if getattr(lists.actions, "__module__", "") != pipelines.__name__:  # orders that ship are checked by tests
        check_actions(actions)
        counts = {"devices": (actions.devices, devices)}
        counts |= {"stages": (int(actions.stage.max()) + 1, shape.parts)}
        counts["micro-batches"] = int(actions.micro_batch.max()) + 1, shape.m
        for what, (has, wanted) in counts.items():
            if has != wanted:
                raise RequestError("actions", f"has {has} {what} where {wanted} are asked for")
    return actions.refined(shape.layers, shape.n) if shape.layers else actions


def pipeline(
    name: str,
    about: str,
    actions: ActionsOf,
    *,
    chunks: int = 1,
    any_chunks: bool = False,
    together: bool = True,
    replicated: Callable[[Widths, int], Actions] | None = None,
) -> Schedule:
    """Return a pipeline by the actions of each of its devices in a training step, flushed at its end if `together`.

    Otherwise devices repeat their lists without a pause, and each task reads the newest version that its device has.
    `replicated` gives the actions where stages have several devices: by their numbers and that of micro-batches.
    """
    if not callable(actions):
        problem = f"{short_repr(actions)} is no function of devices, micro-batches and chunks"
        raise RequestError("actions", f"{problem}; give one")
    lists = Lists(actions, together, replicated)
    order = Order(name, together, lists, any_m=True, chunks=chunks, any_chunks=any_chunks)
    return Schedule(name, about, order, LISTED, rules.DP if together else newest_rule(order))


def _overlapped(name: str, about: str, rule: Rule, per_update: int = 1) -> Schedule:
    """Return data parallelism that goes on computing while the gradients of the last round are exchanged."""
    rounds = OverlappedRounds(per_update, warms_up=rule is DPU)
    order = Order("rounds", False, Lists(pipelines.one_place), any_m=True, one_place=True, rounds=rounds)
    return Schedule(name, about, order, LISTED, rule, BESIDE, usual_m=1)


def _local(name: str, about: str, local: LocalSteps) -> Schedule:
    """Return data parallelism whose workers make steps alone, and take the mean of their parameters after several."""
    order = Order("local", False, Lists(pipelines.one_place), any_m=True, one_place=True, local=local)
    return Schedule(name, about, order, LISTED, rules.DP, MEAN, usual_m=1)


_TABLE_1_SCHEDULES = (
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
_OTHER_SCHEDULES = (
    Schedule(
        "dp",
        "data parallelism: every device has all stages",
        Order("one-place", True, Lists(pipelines.one_place), any_m=True, one_place=True),
        LISTED,
        rules.DP,
        usual_m=1,
    ),
    pipeline("gpipe", "all forwards, then all backwards", pipelines.gpipe),
    replace(
        pipeline(
            "1f1b",
            "a forward and a backward in turn (PipeDream-Flush, DAPPLE)",
            pipelines.one_f_one_b,
            replicated=pipelines.one_f_one_b_round_robin,
        ),
        torch_sends="until-next",
    ),
    pipeline(
        "interleaved-1f1b", "1f1b with several stages per device", pipelines.interleaved, chunks=2, any_chunks=True
    ),
    pipeline("looped-bfs", "gpipe with several stages per device", pipelines.looped_bfs, chunks=2, any_chunks=True),
    pipeline("zb-h1", "weights' gradients fill the bubble, at 1f1b's memory", pipelines.zb_h1),
    pipeline("zb-h2", "weights' gradients fill the bubble, at twice 1f1b's memory", pipelines.zb_h2),
    pipeline(
        "interleaved-zero-bubble",
        "zb-h1 with several stages per device",
        pipelines.interleaved_zero_bubble,
        chunks=2,
        any_chunks=True,
    ),
    pipeline("zbv", "zero bubble on two stages per device, placed in a V", pipelines.zbv, chunks=2),
    pipeline("dualpipe", "two directions at once, forwards beside backwards", pipelines.dualpipe),
    pipeline("dualpipev", "dualpipe cut in half: a V of two stages per device", pipelines.dualpipev, chunks=2),
    pipeline("chimera", "two pipelines in opposite directions", pipelines.chimera),
    pipeline("gems", "two pipelines in turn, a micro-batch at a time", pipelines.gems),
    Schedule(
        "pipedream",
        "1f1b without flush: an update per micro-batch, a version for each in flight",
        STREAMED,
        BY_STAGE,
        rules.NEWEST,
        m=1,
        takes_vertical_sync=True,
    ),
    Schedule("pipedream-2bw", "1f1b without flush, two versions", STREAMED, BY_STAGE, rules.CDP_V1),
    Schedule("pipemare", "1f1b without flush, one version for all", STREAMED, BY_STAGE, rules.NEWEST_EACH),
    _overlapped("dpu", "ZeRO-1 whose exchanges and updates go beside the next micro-batches, one version back", DPU),
    _overlapped("wp", "dpu that reads an estimate: the same gradients applied once more (weight prediction)", WP),
    _overlapped("acco", "dpu whose mini-batches are halves: the first at an estimate by the half before", ACCO, 2),
    _local("local-sgd", "steps of each worker alone, then the mean of all parameters", LocalSteps()),
    _local("post-local-sgd", "ddp for some steps (--warm-up), then local-sgd", LocalSteps(usual_warm_up=1)),
    _local("slowmo", "local-sgd with momentum from mean to mean", LocalSteps(Outer("sgd", 1.0, 0.5))),
    _local(
        "diloco",
        "local-sgd with an outer optimizer: momentum by what rounds have changed",
        LocalSteps(Outer("nesterov", 0.7, 0.9)),
    ),
    _local("co2", "slowmo whose means come during the next round", LocalSteps(Outer("sgd", 1.0, 0.5), late=True)),
)
# Names of a schedule with a stage of ZeRO.
ZERO_NAMES = {"ddp": ("dp", 0), "zero-1": ("dp", 1), "zero-2": ("dp", 2), "zero-3": ("dp", 3), "fsdp": ("dp", 3)}
_ALL = (*_TABLE_1_SCHEDULES, *_OTHER_SCHEDULES)
TABLE_1 = tuple(schedule.name for schedule in _TABLE_1_SCHEDULES)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
NAMES = (*SCHEDULES, *ZERO_NAMES)  # that a request takes
USUAL = "dp", "1f1b"  # of one stage, and of several


class _Callable(ModuleType):
    """This module, which a call lists: `cdpsim.schedules()`, beside `cdpsim.models()` and `cdpsim.clusters()`."""

    def __call__(self) -> list[str]:
        """Return the names of all schedules, those of the paper first.

        >>> import cdpsim
        >>> cdpsim.schedules()[:3]
        ['single-dp', 'single-cdp', 'multi-dp']
        """
        return [*SCHEDULES]


sys.modules[__name__].__class__ = _Callable


def find_schedule(schedule: str | Schedule) -> Schedule:
    """Return a schedule by its name or from a CSV file of torch's, or a schedule itself."""
    if isinstance(schedule, Schedule):
        if SCHEDULES.get(schedule.name, schedule) != schedule:
            raise RequestError("schedule", f"another one is named {schedule.name}; give this one a name of its own")
        return schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        return schedule_from_csv(schedule)
    names = (*SCHEDULES, *ZERO_NAMES)  # as they are now
    name = choose("schedule", in_known_case(schedule, names), names)
    if name in ZERO_NAMES:
        of, zero = ZERO_NAMES[name]
        raise RequestError("schedule", f"{name} is {of} --zero {zero}; give both")
    return SCHEDULES[name]
