"""Schedule x model x steps -> program: messages, buffers and dependencies follow from who needs what where."""

from fractions import Fraction

import numpy as np

from cdpsim.assemble.build import Builder
from cdpsim.assemble.grid import Grid, releases
from cdpsim.assemble.passes import pass_through_stages
from cdpsim.assemble.replicated import exchange_at_flush, pass_along
from cdpsim.assemble.sharded import broadcast_for_use, carry_state
from cdpsim.assemble.update import Updates, lanes_with, place_updates, take_turns
from cdpsim.columns import Ints
from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.program import Kind, Program, Tasks
from cdpsim.schedules import Schedule, State
from cdpsim.schedules.placement import pyramid_widths
from cdpsim.schedules.rule import Rule


def assemble(
    schedule: Schedule,
    model: Model,
    steps: int,
    *,
    m: int | None = None,
    rule: Rule | None = None,
    prefetch: int = 0,
    forward_first: bool = True,
    lanes: int = 1,
    speed: float | None = None,
) -> Program:
    """Derive the program of a schedule.

    `m` micro-batches (default: as many as stages); `lanes` is what a device does side by side; `speed`, where the
    model states work instead of times, tells a placement how long its stages take.
    """
    m = model.n if m is None else m
    widths: tuple[int, ...] = ()
    if schedule.placement.exclusive:
        times = zip(model.forward_time(speed).tolist(), model.backward_time(speed).tolist(), strict=True)
        widths = pyramid_widths(m, [Fraction(f) + Fraction(b) for f, b in times])
    grid = Grid(schedule, rule or schedule.rule, model.n, m, steps, widths, min(lanes, m), forward_first)
    check_causal(grid)
    updates = place_updates(grid, in_lanes=model.updates_in_lanes)
    build = Builder(len(grid.kind) + len(updates))
    pass_through_stages(grid, model, build)
    if schedule.state is State.REPLICATED:
        (exchange_at_flush if schedule.order.flush else pass_along)(grid, updates, model, build, prefetch)
    else:
        (broadcast_for_use if schedule.order.flush else carry_state)(grid, updates, model, build, prefetch)
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
    )


def check_causal(grid: Grid) -> None:
    """Refuse a rule that reads parameters before they exist, naming the first (i, j) that does."""
    fresh = grid.rule.matrix(grid.n, grid.m)
    timing = grid.schedule.order
    if timing.flush:
        if not fresh.all():
            raise RequestError(
                "rule",
                f"{grid.rule.name!r} does not go with the {timing.name} timing of {grid.schedule.name}, where every "
                f"task reads the newest parameters; use 'dp', or a cyclic schedule",
            )
        return
    backward = grid.backward[0, grid.m - 1] if not grid.rule.barrier else grid.backward[0, grid.m - 1, :1]
    made = grid.position[backward] + 1
    read = timing.position(np.array(1), np.arange(grid.m)[:, None], np.arange(grid.n), grid.n, grid.m)
    late = np.argwhere(fresh & (np.broadcast_to(read, (grid.m, grid.n)) < made))
    if len(late):
        i, j = late[0].tolist()
        raise RequestError(
            "rule",
            f"{grid.rule.name!r} is not causal with {timing.name} timing: (i={i}, j={j}) would read theta_t before "
            f"it exists; let it read the version before, as 'cdp-v1' does everywhere and 'cdp-v2' where it must",
        )


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
        version=column(grid.by_task(grid.version), updates.step + 1),
    )
