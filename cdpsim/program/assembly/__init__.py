"""Assembly of programs: messages, buffers and dependencies follow from which task needs what where."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints
from cdpsim.program import Buffers, Edges, Kind, Messages, Program, Tasks
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.causal import check_causal
from cdpsim.program.assembly.data_axis import data_axis
from cdpsim.program.assembly.in_turn import in_turn
from cdpsim.program.assembly.passes import pass_through_stages
from cdpsim.program.assembly.tables import DeviceLanes, Passes, Tables, check_counts, releases
from cdpsim.program.assembly.tied import can_share_tensors, counted_once, hold_from_the_first
from cdpsim.program.assembly.update import Updates, lanes_with, place_updates, take_turns
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import pyramid_widths
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape, Widths
from cdpsim.schedules.state import Holding, Home

__all__ = ["check_counts", "counted_once", "derive", "pyramid_of"]


def derive(
    schedule: Schedule,
    model: Model,
    steps: int,
    *,
    shape: Shape | None = None,
    rule: Rule | None = None,
    prefetch: int = 0,
    forward_first: bool = True,
    lanes: int = 1,
    once: tuple[Tie, ...] = (),
    counts: Ints | None = None,
) -> Program:
    """Derive the program of a schedule.

    Its `shape` is the schedule's own, where not given; `lanes` is what a device does side by side. `once` are tied
    tensors that the `model` counts in one stage alone (`counted_once`). `counts` says how many micro-batches each
    replica has in each step (rows are steps): the first so many of its m.
    """
    shape = shape or Shape(model.n, schedule.micro_batches(model.n), schedule.order.chunks)
    if schedule.placement.exclusive and not shape.widths:
        shape = replace(shape, widths=pyramid_of(model, shape.m))
    passes = Passes(schedule, rule or schedule.rule, shape, check_counts(counts, shape, steps))
    check_causal(schedule, passes.rule, shape)
    tables = Tables(passes, DeviceLanes(passes, min(lanes, shape.m), forward_first))
    _check_homes(tables)
    return _assemble(tables, model, prefetch, once)


def _assemble(tables: Tables, model: Model, prefetch: int, once: tuple[Tie, ...]) -> Program:
    """Derive messages, edges and buffers, and write down the columns of the program."""
    passes, schedule = tables.passes, tables.passes.schedule
    updates = place_updates(tables, in_lanes=model.updates_in_lanes)
    build = Builder(passes.tasks + len(updates))
    prefetch = min(prefetch, passes.tasks)  # from as many tasks on, parameters arrive as soon as they can
    pass_through_stages(passes, model, build)
    (data_axis if passes.together else in_turn)(updates, model, build, prefetch)
    hold_from_the_first(tables, once, build)
    if model.updates_take_time and not updates.in_lanes:
        take_turns(updates, build)
    lane_tasks, lane_start = lanes_with(updates)
    return Program(
        n=passes.n,
        counts=np.diff(passes.first),
        phases=passes.phases,
        devices=passes.devices,
        tasks=_tasks(tables, updates),
        messages=Messages(*build.messages.columns()),
        groups=tuple(build.groups),
        edges=Edges(*build.edges.columns()),
        buffers=Buffers(*build.buffers.columns(), *build.kept.columns()),
        lane_tasks=lane_tasks,
        lane_start=lane_start,
        releases=tuple(releases(passes)),
        versions_differ=passes.rule.backward is not None,
        fill=passes.rule.fill(passes.shape),
        together=schedule.order.together,
        state=schedule.state,
        barrier=passes.rule.barrier,
        base=passes.base[updates.step],
        first_step=passes.first_step[updates.step],
        untied=() if can_share_tensors(schedule) else tuple(tie.stages for tie in model.tied),
        undivided=passes.of_micro_batch(passes.listing.undivided) if passes.listing and passes.splits else None,
    )


def pyramid_of(model: Model, m: int, speed: float | None = None) -> Widths:
    """Return how many devices each stage needs where a device ends one pass before the next.

    Work takes time at `speed`; without one, the model's times are slots.
    """
    times = zip(model.forward_time(speed).tolist(), model.backward_time(speed).tolist(), strict=True)
    return pyramid_widths(m, [Fraction(forward) + Fraction(backward) for forward, backward in times])


def _check_homes(tables: Tables) -> None:
    """Refuse a state policy that the schedule cannot have, and counts by which holders that update together change."""
    passes, state = tables.passes, tables.passes.schedule.state
    together = passes.together
    alone = together or state.travels or bool((tables.holders.count == 1).all())
    once = not together or state.parameters is Home.COPIED or bool((np.bincount(tables.holders.row.ravel()) == 1).all())
    state.check(Holding(together, passes.schedule.order.together, alone, once, passes.lagging))
    if passes.sources and not (together and state.optimizer is Home.COPIED):
        problem = "start from one another in a line, where a stage's holders do not all update together"
        raise RequestError("versions", f"{problem}; leave base and sums out")
    if together and not passes.even and not tables.holders.stay:
        problem = "leave a device without a micro-batch in a step whose gradients all devices of a stage sum together"
        raise RequestError("counts", f"{problem}; give it one")


def _tasks(tables: Tables, updates: Updates) -> Tasks:
    """Write down the columns of the compute tasks, then of the updates."""

    def column(of_tasks: Ints, of_updates: Ints | int) -> Ints:
        return np.concatenate([of_tasks, np.broadcast_to(of_updates, len(updates))], dtype=np.int32)

    passes = tables.passes
    return Tasks(
        kind=np.concatenate([passes.kind, np.full(len(updates), Kind.U, dtype=np.int8)]),
        stage=column(passes.by_task(passes.tij[2]), updates.stage),
        micro_batch=column(np.repeat(passes.micro_batch, passes.phases), -1),
        step=column(np.repeat(passes.step, passes.phases), updates.step),
        device=column(passes.task_device, updates.device),
        lane=column(tables.lanes.lane, updates.lane),
        version=column(passes.by_task(passes.version, passes.backward_version), updates.step + 1),
    )
