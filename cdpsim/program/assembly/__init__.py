"""Assembly of programs: messages, buffers and dependencies follow from which task needs what where.

A micro-batch's way through the stages: activations go forth, gradients back, and stashes are held meanwhile.
"""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.runtime import PAPER, Behaviours, Runtime
from cdpsim.model.stage import Tie, joined, knows_gradients, retaining
from cdpsim.numeric.columns import Ints
from cdpsim.program import Buffers, Category, Content, Edges, Kind, Messages, Op, Program, Tasks
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.data_axis import exchange_values
from cdpsim.program.assembly.runtime_buffers import (
    Keeping,
    behaviours_of,
    hold_always,
    hold_gradient_sent,
    hold_output,
    hold_output_handed_on,
    hold_returned,
)
from cdpsim.program.assembly.task_tables import DeviceLanes, Passes, Tables, check_counts, count_rounds, releases
from cdpsim.program.assembly.updates import (
    Updates,
    can_share_tensors,
    counted_once,
    hold_from_the_first,
    lanes_with,
    place_updates,
    shared_rows,
    take_turns,
)
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import last_phase
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.state import Holding, Placed


def pass_through_stages(keeping: Keeping) -> None:
    """Link each task of a micro-batch to its next one, by message where that is on another device."""
    passes, build = keeping.passes, keeping.build
    task = np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases)[:, : 2 * passes.n - 1].ravel()
    crosses = passes.task_device[task] != passes.task_device[task + 1]
    near, far = task[~crosses], task[crosses]
    build.link(_handing_on(passes, near), near + 1)
    _hand_over(keeping, near)
    for content, forth in ((Content.ACTIVATION, True), (Content.ACTIVATION_GRADIENT, False)):
        _send(keeping, far[(far % passes.phases < passes.n) == forth], content)
    if passes.splits:
        build.link(passes.backward.ravel(), passes.last.ravel())
    _hold_stashes(keeping)
    _hold_transients(keeping)
    hold_returned(keeping)
    hold_always(keeping)


def _handing_on(passes: Passes, task: Ints) -> Ints:
    """Return the task that hands on what a task makes: itself, or of a whole backward in two tasks the second one."""
    if passes.listing is None or not passes.listing.undivided.any():
        return task
    phase, stage = task % passes.phases, passes.stage_of(task)
    whole = (phase >= passes.n) & passes.listing.undivided[passes.local[task // passes.phases], stage]
    return task + np.where(whole, passes.n, 0)


def _locate(passes: Passes, task: Ints) -> Location:
    """Return the device, stage and step of tasks, as a buffer has them."""
    return Location(passes.task_device[task], passes.stage_of(task), passes.step_of(task // passes.phases))


def _hand_over(keeping: Keeping, task: Ints) -> None:
    """Hold what a task leaves to the next one on its device: outputs until used, their gradients while used too."""
    passes = keeping.passes
    if not keeping.boundary.any():
        return
    phase = task % passes.phases
    ahead, back = task[phase < passes.n - 1], task[phase >= passes.n]
    hold_output_handed_on(keeping, _locate(passes, ahead), ahead // passes.phases)
    if keeping.behaviours.static_receives:  # then gradients have a buffer always
        return
    of = _locate(passes, back)
    size, until = keeping.boundary[of.stage - 1], keeping.freed[back // passes.phases, of.stage - 1]
    keeping.build.hold(Category.ACTIVATIONS, of, size, end(back), end(until))


def _send(keeping: Keeping, sender: Ints, content: Content) -> None:
    """Send what tasks leave to the next ones on other devices: held there until sent, and here until used."""
    passes, build = keeping.passes, keeping.build
    forth, reader = content == Content.ACTIVATION, sender + 1
    of, arriving, row = _locate(passes, sender), _locate(passes, reader), sender // passes.phases
    boundary = of.stage if forth else of.stage - 1
    payload, micro_batch = keeping.model.size("sent")[boundary], passes.micro_batch[row]
    message = build.send(Op.P2P, content, of, arriving.device, payload, micro_batch=micro_batch)
    build.link(_handing_on(passes, sender), message)
    build.link(message, reader)
    size = np.minimum(keeping.boundary[boundary], payload)
    if forth:
        hold_output(keeping, of, row, message)
    else:
        hold_gradient_sent(keeping, of, sender, message)
    if keeping.behaviours.static_receives:
        return
    build.land(message, of._replace(device=arriving.device), size, start(reader))
    if not forth:  # an activation counts as its reader's from then on
        build.hold(Category.ACTIVATIONS, arriving, size, start(reader), end(keeping.freed[row, arriving.stage]))


def _hold_stashes(keeping: Keeping) -> None:
    passes = keeping.passes
    forward = passes.forward.ravel()
    of = Location(passes.device.ravel(), passes.stage, np.repeat(passes.step, passes.n))
    size = keeping.stash_sizes().ravel()
    keeping.build.hold(Category.ACTIVATIONS, of, size, start(forward), end(keeping.freed.ravel()), even_empty=True)
    if passes.splits and keeping.model.frees_early.any():
        _hold_weight_stashes(keeping)
    if keeping.retains:
        _hold_retained_gradients(keeping)


def _hold_weight_stashes(keeping: Keeping) -> None:
    """Hold what the first part of each split backward leaves for the second one.

    An input that the stage before keeps as well counts from the end of its stash there.
    """
    passes, build = keeping.passes, keeping.build
    rows = np.flatnonzero(np.broadcast_to(keeping.model.frees_early, passes.device.shape))
    before, after = passes.backward.ravel()[rows], passes.last.ravel()[rows]
    own, both = (size.ravel()[rows] for size in keeping.weight_stash_sizes())
    of = _locate(passes, before)
    build.hold(Category.ACTIVATIONS, of, own, end(before), end(after), even_empty=True)
    freed = keeping.freed.ravel()[rows - 1]  # of the stage before; a first stage shares nothing
    number = build.hold(Category.ACTIVATIONS, of, both, end(freed), end(freed))
    build.keep(number, end(after))


def _hold_retained_gradients(keeping: Keeping) -> None:
    """Hold the gradients that the first part of each split backward makes inside its stage for the second one."""
    passes, task = keeping.passes, keeping.passes.backward.ravel()
    size = np.array([stage.retained_gradients or 0 for stage in keeping.model.stages], np.int64)
    of = _locate(passes, task)
    kept = np.where(keeping.are_whole.ravel(), 0, size[of.stage])
    keeping.build.hold(Category.ACTIVATIONS, of, kept, start(task), end(passes.last.ravel()))


def _hold_transients(keeping: Keeping) -> None:
    """Hold what tasks need only while they run; of a whole backward in two tasks, in the first one."""
    passes, model = keeping.passes, keeping.model
    backwards = [(passes.backward, model.size("backward_transient"))]
    if passes.splits:
        backwards = list(zip((passes.backward, passes.last), keeping.part_transients(), strict=True))
    forwards = model.size("forward_transient") + keeping.unused_inputs
    for task, size in [(passes.forward, forwards), *backwards]:
        if size.any():
            node = task.ravel()
            of, each = _locate(passes, node), np.broadcast_to(size, task.shape).ravel()
            keeping.build.hold(Category.ACTIVATIONS, of, each, start(node), end(node))


__all__ = ["check_causal", "check_counts", "count_rounds", "counted_once", "derive"]


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
    runtime: Runtime = PAPER,
) -> Program:
    """Derive the program of a schedule.

    `steps` counts updates of theta; with rounds or local steps, the program has more steps. Its `shape` is the
    schedule's own, where not given; `lanes` is what a device does side by side. `once` are tied tensors that the
    `model` counts in one stage alone (`counted_once`). `counts` says how many micro-batches each replica has in each
    step (rows are steps). `runtime` says what is held beyond the schedule's needs.
    """
    shape = shape or Shape(model.n, schedule.micro_batches(model.n), schedule.order.chunks)
    if schedule.order.rounds:
        table = count_rounds(counts, schedule.order.rounds, shape, steps)
        shape = replace(shape, m=int(table.max()))
    else:
        table = check_counts(counts, shape, schedule.order.steps(steps, shape))
    passes = Passes(schedule, rule or schedule.rule, shape, table)
    check_causal(schedule, passes.rule, shape)
    tables = Tables(passes, DeviceLanes(passes, min(lanes, shape.side_by_side), forward_first))
    _check_placements(tables)
    behaviours = behaviours_of(runtime, schedule)
    if passes.splits and behaviours.split_backward == "retained":
        model = msgspec.structs.replace(model, stages=tuple(map(retaining, model.stages)))
    if behaviours.whole_batch and not behaviours.static_receives:  # a loop of torch's, whose backwards autograd joins
        model = msgspec.structs.replace(model, stages=tuple(map(joined, model.stages)))
    return _assemble(tables, model, prefetch, once, behaviours)


def _assemble(tables: Tables, model: Model, prefetch: int, once: tuple[Tie, ...], behaviours: Behaviours) -> Program:
    """Derive messages, edges and buffers, and write down the columns of the program."""
    passes, schedule = tables.passes, tables.passes.schedule
    in_stream = schedule.state.updates_in_stream
    takes_time = model.updates_in_lanes or (schedule.order.local is not None and model.outer_updates_take_time)
    updates = place_updates(tables, in_lanes=takes_time and not in_stream)
    build = Builder(passes.tasks + len(updates))
    pass_through_stages(Keeping(updates, model, behaviours, build, passes))
    exchange_values(updates, model, behaviours, build, min(prefetch, passes.tasks), once)
    apart = filter(lambda tie: not (passes.stay and knows_gradients(model.stages, tie.stages)), once)
    hold_from_the_first(tables, apart, build)
    if model.updates_take_time and not (updates.in_lanes or in_stream):
        take_turns(updates, build, shared_rows(tables, model))
    lane_tasks, lane_start = lanes_with(updates)
    return Program(
        n=passes.n,
        counts=np.diff(passes.first),
        phases=passes.phases,
        devices=passes.devices,
        tasks=_tasks(tables, updates),
        messages=Messages(*build.messages.columns()),
        **build.columns_of_groups(folded=passes.shape.folded),
        fold=passes.fold,
        edges=Edges(*build.edges.columns()),
        buffers=Buffers(*build.buffers.columns(), *build.kept.columns()),
        lane_tasks=lane_tasks,
        lane_start=lane_start,
        releases=tuple(releases(passes)),
        versions_differ=passes.rule.backward is not None,
        fill=passes.rule.fill(passes.shape),
        together=schedule.order.together,
        state=schedule.state,
        shard=passes.shape.sharers if schedule.state.splits else 1,
        barrier=passes.rule.barrier,
        behaviours=behaviours,
        thrown_away=passes.steps - passes.updated,
        **_sources(updates),
        untied=() if can_share_tensors(schedule) else tuple(tie.stages for tie in model.tied),
        undivided=passes.of_micro_batch(passes.listing.undivided) if passes.listing and passes.splits else None,
    )


def _check_placements(tables: Tables) -> None:
    """Refuse a state policy that the schedule cannot have, and counts by which copies that update together change."""
    passes, state = tables.passes, tables.passes.schedule.state
    together = passes.together
    alone = together or state.travels or bool((tables.copies.count == 1).all())
    once = (
        not together or state.parameters is Placed.COPIED or bool((np.bincount(tables.copies.row.ravel()) == 1).all())
    )
    ends = passes.schedule.order.together
    stays = not state.streams or tables.copies.stay
    rounds = passes.schedule.order.rounds is not None  # of which each is one exchange, however long it is
    state.check(Holding(together, ends, alone, once, passes.lagging, stays, passes.even or rounds))
    if rounds and passes.replica_devices > 1:
        problem = "end when the communication before is through, on which a pipeline's devices would have to agree"
        raise RequestError("rounds", f"{problem}; take a pipeline of steps of a given length, and the rule alone")
    waits = passes.schedule.order.waits
    if waits and len(passes.made.step) > passes.steps:
        problem = "makes more versions than one a step, which only workers do that go on beside a communication"
        raise RequestError("rule", f"{passes.rule.name!r} {problem}; take a schedule of rounds")
    if passes.sources and waits and not (together and state.optimizer is Placed.COPIED):
        problem = "start from one another in a line, where a stage's copies do not all update together"
        raise RequestError("versions", f"{problem}; leave base and sums out")
    if together and not passes.even and not tables.copies.stay:
        problem = "leave a device without a micro-batch in a step whose gradients all devices of a stage sum together"
        raise RequestError("counts", f"{problem}; give it one")


def _sources(updates: Updates) -> dict[str, Any]:
    """Return what updates start from and take, and which versions are estimates, as fields of the program."""
    passes = updates.tables.passes
    if passes.versions.is_line:
        return {"base": updates.step, "first_step": updates.step}
    made, row = passes.made, updates.version - 1
    taken = {"base": made.base[row], "first_step": made.first[row]}
    if passes.schedule.order.local:
        return taken | {"own": np.append(0, made.own) > 0, "averaged": np.append(-1, made.averaged)}
    return taken | {"estimates": np.append(False, made.estimate)}


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
        version=column(passes.by_task(passes.version, passes.backward_version), updates.version),
    )


def check_causal(schedule: Schedule, rule: Rule, shape: Shape) -> None:
    """Refuse a rule that reads parameters before they exist, naming the first (i, j) that does."""
    timing = schedule.order
    if not timing.waits:  # and goes on with what communications have brought, or with what it has
        return
    if timing.together and rule != schedule.rule:  # an option that the schedule does not take, even if it is causal
        if rule.fill(shape):
            raise RequestError(
                "rule",
                f"{rule.name!r} does not go with the {timing.name} timing of {schedule.name}, where every "
                f"task reads the newest parameters; use 'dp', or a cyclic schedule",
            )
        return
    if timing.together and timing.lists:  # on each device, where one step follows another
        return
    late, lags = _too_early(schedule, rule, shape), rule.lags(shape)
    if not len(late) and rule.backward is not None:
        late, lags = _too_early(schedule, rule, shape, backward=True), rule.backward_lags(shape)
    if not len(late):
        return
    if rule == schedule.rule and timing.any_m:  # then it goes with more micro-batches
        least = next(m for m in range(shape.m, 2 * shape.n) if not len(_too_early(schedule, rule, replace(shape, m=m))))
        raise RequestError("m", f"{schedule.name} needs m >= {least} where n={shape.n}; m={shape.m}")
    i, j = late[0].tolist()
    lag, older = lags[i, j], "an older one"
    if not lag:
        older = "the version before, as 'cdp-v1' does everywhere and 'cdp-v2' where it must"
    raise RequestError(
        "rule",
        f"{rule.name!r} is not causal with {timing.name} timing: (i={i}, j={j}) would read "
        f"{f'theta_(t-{lag})' if lag else 'theta_t'} before it exists; let it read {older}",
    )


def _too_early(schedule: Schedule, rule: Rule, shape: Shape, *, backward: bool = False) -> Ints:
    """Return the (i, j) whose forward, or backward, comes in the order before the update that makes what it reads."""
    order, lags = schedule.order, rule.backward_lags(shape) if backward else rule.lags(shape)
    i, j = (index.astype(np.int32) for index in np.ogrid[: shape.m, : shape.n])
    t = int(lags.max()) + 1  # in which all versions that are read have been made in the run
    gives, made = last_phase(order, shape) - (0 * j if rule.barrier else j), np.zeros(lags.shape, dtype=np.int64)
    for lag in np.unique(lags).tolist():
        last = np.broadcast_to(order.position(np.array(t - 1 - lag), i, gives, shape), lags.shape).max(axis=0)
        made = np.where(lags == lag, last + 1, made)
    read = order.position(np.array(t), i, 2 * shape.n - 1 - j if backward else j, shape)
    return np.argwhere(np.broadcast_to(read, lags.shape) < made)
