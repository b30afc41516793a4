"""A micro-batch's way through the stages: activations go forth, their gradients back, and what is held meanwhile."""

import numpy as np

from cdpsim.assemble.build import Builder, end, start
from cdpsim.assemble.grid import Grid
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Category, Content, Op


def pass_through_stages(grid: Grid, model: Model, build: Builder) -> None:
    """Link each task of a micro-batch to its next one, by message where that is on another device."""
    shape = (grid.steps, grid.m, 2 * grid.n)
    task = np.arange(len(grid.kind), dtype=np.int32).reshape(shape)[:, :, :-1].ravel()
    crosses = grid.task_device[task] != grid.task_device[task + 1]
    near, far = task[~crosses], task[crosses]
    build.link(near, near + 1)
    _hand_over(grid, model, build, near)
    for content, turn in ((Content.ACTIVATION, True), (Content.ACTIVATION_GRADIENT, False)):
        _send(grid, model, build, far[(far % (2 * grid.n) < grid.n) == turn], content)
    _hold_passes(grid, model, build)
    _hold_transients(grid, model, build)


def _place(grid: Grid, task: Ints) -> dict[str, Ints]:
    """Stage, step and device of tasks, as a buffer has them."""
    phase = task % (2 * grid.n)
    stage = np.where(phase < grid.n, phase, 2 * grid.n - 1 - phase)
    return {"stage": stage, "version": task // (2 * grid.n * grid.m), "device": grid.task_device[task]}


def _waiting(model: Model) -> Ints:
    """What each stage's output weighs until it is used, beyond what the stage itself keeps of it."""
    return model.boundary_held - model.size("kept_output")


def _hand_over(grid: Grid, model: Model, build: Builder, task: Ints) -> None:
    """Hold what a task leaves to the next one on its device: outputs until used, their gradients while used too."""
    if not model.boundary_held.any():
        return
    forth = task % (2 * grid.n) < grid.n - 1
    ahead, back = task[forth], task[~forth & (task % (2 * grid.n) >= grid.n)]
    of = _place(grid, ahead)
    size = _waiting(model)[of["stage"]]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(ahead), end=start(ahead + 1), **of)
    of = _place(grid, back)
    size = model.boundary_held[of["stage"] - 1]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(back), end=end(back + 1), **of)


def _send(grid: Grid, model: Model, build: Builder, sender: Ints, content: Content) -> None:
    """Send what tasks leave to the next ones on other devices: held there until sent, and here until used."""
    forth = content == Content.ACTIVATION
    of, arriving = _place(grid, sender), _place(grid, sender + 1)
    boundary = of["stage"] if forth else of["stage"] - 1
    message = build.send(
        Op.P2P,
        content,
        step=of["version"],
        micro_batch=sender // (2 * grid.n) % grid.m,
        stage=of["stage"],
        src=of["device"],
        dst=arriving["device"],
        size=model.size("boundary")[boundary],
    )
    build.link(sender, message)
    build.link(message, sender + 1)
    held = model.boundary_held[boundary]
    leaving = _waiting(model)[boundary] if forth else held
    build.hold(Category.COMMUNICATION, size=leaving, begin=end(sender), end=end(message), **of)
    build.land(
        message, device=arriving["device"], stage=of["stage"], version=of["version"], size=held, until=start(sender + 1)
    )
    if not forth:  # an activation counts as its reader's from then on
        build.hold(Category.ACTIVATIONS, size=held, begin=start(sender + 1), end=end(sender + 1), **arriving)


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
        end=end(grid.backward.ravel()),
    )


def _hold_transients(grid: Grid, model: Model, build: Builder) -> None:
    """Hold what tasks need only while they run."""
    for task, kind in ((grid.forward, "forward_transient"), (grid.backward, "backward_transient")):
        if model.size(kind).any():
            node = task.ravel()
            of = _place(grid, node)
            build.hold(Category.ACTIVATIONS, size=model.size(kind)[of["stage"]], begin=start(node), end=end(node), **of)
