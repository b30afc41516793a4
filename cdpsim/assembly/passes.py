"""A micro-batch's way through the stages: activations go forth, their gradients back, and what is held meanwhile."""

import numpy as np

from cdpsim.assembly.build import Builder, end, start
from cdpsim.assembly.grid import Grid
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Category, Content, Op


def pass_through_stages(grid: Grid, model: Model, build: Builder) -> None:
    """Link each task of a micro-batch to its next one, by message where that is on another device."""
    shape = (grid.steps, grid.m, grid.phases)
    task = np.arange(len(grid.kind), dtype=np.int32).reshape(shape)[:, :, : 2 * grid.n - 1].ravel()
    crosses = grid.task_device[task] != grid.task_device[task + 1]
    near, far = task[~crosses], task[crosses]
    build.link(_done(grid, near), near + 1)
    _hand_over(grid, model, build, near)
    for content, turn in ((Content.ACTIVATION, True), (Content.ACTIVATION_GRADIENT, False)):
        _send(grid, model, build, far[(far % grid.phases < grid.n) == turn], content)
    if grid.splits:
        build.link(grid.backward.ravel(), grid.last.ravel())
    _hold_passes(grid, model, build)
    _hold_transients(grid, model, build)


def _done(grid: Grid, task: Ints) -> Ints:
    """The task that hands on what a task makes: itself, or of a whole backward in two tasks the second one."""
    if grid.listing is None or not grid.listing.whole.any():
        return task
    phase, i = task % grid.phases, task // grid.phases % grid.shape.m
    stage = np.minimum(phase, 2 * grid.n - 1 - phase)
    whole = (phase >= grid.n) & grid.listing.whole[i, stage]
    return task + np.where(whole, grid.n, 0)


def _place(grid: Grid, task: Ints) -> dict[str, Ints]:
    """Stage, step and device of tasks, as a buffer has them."""
    phase = task % grid.phases
    third, stage = np.divmod(phase, grid.n)
    stage = np.where(third == 0, stage, grid.n - 1 - stage)
    return {"stage": stage, "version": task // (grid.phases * grid.m), "device": grid.task_device[task]}


def _used(grid: Grid, backward: Ints) -> Ints:
    """The tasks with whose end backwards no longer need their outputs' gradients: the weights' parts, where split."""
    return backward + grid.n * grid.splits


def _waiting(model: Model) -> Ints:
    """What each stage's output weighs until it is used, beyond what the stage itself keeps of it."""
    return model.boundary_held - model.size("kept_output")


def _hand_over(grid: Grid, model: Model, build: Builder, task: Ints) -> None:
    """Hold what a task leaves to the next one on its device: outputs until used, their gradients while used too."""
    if not model.boundary_held.any():
        return
    phase = task % grid.phases
    ahead, back = task[phase < grid.n - 1], task[phase >= grid.n]
    of = _place(grid, ahead)
    size = _waiting(model)[of["stage"]]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(ahead), end=start(ahead + 1), **of)
    of = _place(grid, back)
    size = model.boundary_held[of["stage"] - 1]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(back), end=end(_used(grid, back + 1)), **of)


def _send(grid: Grid, model: Model, build: Builder, sender: Ints, content: Content) -> None:
    """Send what tasks leave to the next ones on other devices: held there until sent, and here until used."""
    forth = content == Content.ACTIVATION
    of, arriving = _place(grid, sender), _place(grid, sender + 1)
    boundary = of["stage"] if forth else of["stage"] - 1
    message = build.send(
        Op.P2P,
        content,
        step=of["version"],
        micro_batch=sender // grid.phases % grid.m,
        stage=of["stage"],
        src=of["device"],
        dst=arriving["device"],
        size=model.size("boundary")[boundary],
    )
    made = _done(grid, sender)
    build.link(made, message)
    build.link(message, sender + 1)
    held = model.boundary_held[boundary]
    leaving = _waiting(model)[boundary] if forth else held
    build.hold(Category.COMMUNICATION, size=leaving, begin=end(sender), end=end(message), **of)
    build.land(
        message, device=arriving["device"], stage=of["stage"], version=of["version"], size=held, until=start(sender + 1)
    )
    if not forth:  # an activation counts as its reader's from then on
        build.hold(
            Category.ACTIVATIONS, size=held, begin=start(sender + 1), end=end(_used(grid, sender + 1)), **arriving
        )


def _hold_passes(grid: Grid, model: Model, build: Builder) -> None:
    """Hold what each forward keeps for its backward; an input that the stage before keeps as well counts once."""
    t, _, j = (np.broadcast_to(index, grid.device.shape).ravel() for index in grid.tij)
    shared = np.zeros(grid.device.shape, dtype=np.int64)
    shared[:, :, 1:] = np.where(grid.device[:, :, 1:] == grid.device[:, :, :-1], model.size("kept_output")[:-1], 0)
    build.hold_even_empty(
        Category.ACTIVATIONS,
        device=grid.device.ravel(),
        stage=j,
        version=t,
        size=model.size("activation")[j] - shared.ravel(),
        begin=start(grid.forward.ravel()),
        end=end(grid.last.ravel()),
    )


def _hold_transients(grid: Grid, model: Model, build: Builder) -> None:
    """Hold what tasks need only while they run."""
    kinds = [(grid.forward, "forward_transient")]
    parts = [(grid.backward, "input_transient"), (grid.last, "weight_transient")]
    for task, kind in kinds + (parts if grid.splits else [(grid.backward, "backward_transient")]):
        if model.size(kind).any():
            node = task.ravel()
            of = _place(grid, node)
            build.hold(Category.ACTIVATIONS, size=model.size(kind)[of["stage"]], begin=start(node), end=end(node), **of)
