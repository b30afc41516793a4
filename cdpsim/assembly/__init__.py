"""Schedule x model x steps -> program: messages, buffers and dependencies follow from who needs what where."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from cdpsim.assembly.build import Builder
from cdpsim.assembly.causal import check_causal
from cdpsim.assembly.grid import Grid, releases
from cdpsim.assembly.passes import pass_through_stages
from cdpsim.assembly.replicated import all_reduce, pass_along
from cdpsim.assembly.sharded import broadcast_for_use, carry_state
from cdpsim.assembly.tied import counted_once, hold_from_the_first
from cdpsim.assembly.update import Updates, lanes_with, place_updates, take_turns
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Kind, Program, Tasks
from cdpsim.schedules import Schedule, State
from cdpsim.schedules.placement import pyramid_widths
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape, Widths
from cdpsim.stage import Tie

__all__ = ["counted_once", "derive", "pyramid_of"]


def derive(
    schedule: Schedule,
    model: Model,
    steps: int,
    *,
    shape: Shape | None = None,
    rule: Rule | None = None,
    prefetch: int = 0,
    at_once: bool = False,
    forward_first: bool = True,
    lanes: int = 1,
    once: tuple[Tie, ...] = (),
) -> Program:
    """Derive the program of a schedule.

    Its `shape` is the schedule's own, where not given; `at_once` lets all-reduces not wait for the end of their step;
    `lanes` is what a device does side by side. `once` are tied tensors that the `model` counts in one stage alone
    (`counted_once`).
    """
    shape = shape or Shape(model.n, schedule.micro_batches(model.n), schedule.order.chunks)
    if schedule.placement.exclusive and not shape.widths:
        shape = replace(shape, widths=pyramid_of(model, shape.m))
    grid = Grid(schedule, rule or schedule.rule, shape, steps, min(lanes, shape.m), forward_first)
    check_causal(schedule, grid.rule, shape)
    updates = place_updates(grid, in_lanes=model.updates_in_lanes)
    build = Builder(len(grid.kind) + len(updates))
    prefetch = min(prefetch, len(grid.kind))  # from as many tasks on, parameters arrive as soon as they can
    pass_through_stages(grid, model, build)
    if schedule.state is State.SHARDED:
        (broadcast_for_use if schedule.order.flush else carry_state)(grid, updates, model, build, prefetch)
    elif grid.together:
        all_reduce(grid, updates, model, build, at_once)
    else:
        pass_along(grid, updates, model, build, prefetch)
    hold_from_the_first(grid, once, build)
    if model.updates_take_time and not updates.in_lanes:
        take_turns(grid, updates, build)
    lane_tasks, lane_start = lanes_with(grid, updates)
    return Program(
        n=grid.n,
        m=grid.m,
        steps=steps,
        devices=grid.devices,
        tasks=_tasks(grid, updates),
        messages=build.messages(),
        groups=tuple(build.groups),
        edges=build.edges(),
        buffers=build.buffers(),
        lane_tasks=lane_tasks,
        lane_start=lane_start,
        releases=tuple(releases(grid)),
        versions_differ=grid.rule.backward is not None,
        fill=grid.rule.fill(shape),
        flushes=schedule.order.flush,
        sharded=schedule.state is State.SHARDED,
        barrier=grid.rule.barrier,
        untied=() if schedule.order.flush else tuple(tie.stages for tie in model.tied),
        undivided=np.tile(grid.listing.whole, (shape.replicas, 1)) if grid.listing and grid.splits else None,
    )


def pyramid_of(model: Model, m: int, speed: float | None = None) -> Widths:
    """Say how many devices each stage needs where a device ends one pass before the next; `speed` makes work times."""
    times = zip(model.forward_time(speed).tolist(), model.backward_time(speed).tolist(), strict=True)
    return pyramid_widths(m, [Fraction(forward) + Fraction(backward) for forward, backward in times])


def _tasks(grid: Grid, updates: Updates) -> Tasks:
    def column(of_tasks: Ints, of_updates: Ints | int) -> Ints:
        return np.concatenate([of_tasks, np.broadcast_to(of_updates, len(updates))]).astype(np.int32, copy=False)

    t, i, j = grid.tij
    return Tasks(
        kind=np.concatenate([grid.kind, np.full(len(updates), Kind.U, dtype=np.int8)]),
        stage=column(grid.by_task(j), updates.stage),
        micro_batch=column(grid.by_task(i), -1),
        step=column(grid.by_task(t), updates.step),
        device=column(grid.task_device, updates.device),
        lane=column(grid.lane, updates.lane(grid)),
        version=column(grid.by_task(grid.version, grid.backward_version), updates.step + 1),
    )
