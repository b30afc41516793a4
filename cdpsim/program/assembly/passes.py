"""A micro-batch's way through the stages: activations go forth, their gradients back, and what is held meanwhile."""

import numpy as np

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Op
from cdpsim.program.assembly.build import Builder, end, start
from cdpsim.program.assembly.tables import Passes


def pass_through_stages(passes: Passes, model: Model, build: Builder) -> None:
    """Link each task of a micro-batch to its next one, by message where that is on another device."""
    task = np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases)[:, : 2 * passes.n - 1].ravel()
    crosses = passes.task_device[task] != passes.task_device[task + 1]
    near, far = task[~crosses], task[crosses]
    build.link(_done(passes, near), near + 1)
    _hand_over(passes, model, build, near)
    for content, turn in ((Content.ACTIVATION, True), (Content.ACTIVATION_GRADIENT, False)):
        _send(passes, model, build, far[(far % passes.phases < passes.n) == turn], content)
    if passes.splits:
        build.link(passes.backward.ravel(), passes.last.ravel())
    _hold_passes(passes, model, build)
    _hold_transients(passes, model, build)


def _done(passes: Passes, task: Ints) -> Ints:
    """The task that hands on what a task makes: itself, or of a whole backward in two tasks the second one."""
    if passes.listing is None or not passes.listing.undivided.any():
        return task
    phase, i = task % passes.phases, passes.own[task // passes.phases]
    stage = np.minimum(phase, 2 * passes.n - 1 - phase)
    whole = (phase >= passes.n) & passes.listing.undivided[i, stage]
    return task + np.where(whole, passes.n, 0)


def _place(passes: Passes, task: Ints) -> dict[str, Ints]:
    """Stage, step and device of tasks, as a buffer has them."""
    phase = task % passes.phases
    third, stage = np.divmod(phase, passes.n)
    stage = np.where(third == 0, stage, passes.n - 1 - stage)
    return {"stage": stage, "version": passes.step_of(task // passes.phases), "device": passes.task_device[task]}


def _used(passes: Passes, backward: Ints) -> Ints:
    """The tasks with whose end backwards no longer need their outputs' gradients: the weights' parts, where split."""
    return backward + passes.n * passes.splits


def _waiting(model: Model) -> Ints:
    """What each stage's output weighs until it is used, beyond what the stage itself keeps of it."""
    return model.boundary_in_memory - model.size("kept_output")


def _hand_over(passes: Passes, model: Model, build: Builder, task: Ints) -> None:
    """Hold what a task leaves to the next one on its device: outputs until used, their gradients while used too."""
    if not model.boundary_in_memory.any():
        return
    phase = task % passes.phases
    ahead, back = task[phase < passes.n - 1], task[phase >= passes.n]
    of = _place(passes, ahead)
    size = _waiting(model)[of["stage"]]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(ahead), end=start(ahead + 1), **of)
    of = _place(passes, back)
    size = model.boundary_in_memory[of["stage"] - 1]
    build.hold(Category.ACTIVATIONS, size=size, begin=end(back), end=end(_used(passes, back + 1)), **of)


def _send(passes: Passes, model: Model, build: Builder, sender: Ints, content: Content) -> None:
    """Send what tasks leave to the next ones on other devices: held there until sent, and here until used."""
    forth = content == Content.ACTIVATION
    of, arriving = _place(passes, sender), _place(passes, sender + 1)
    boundary = of["stage"] if forth else of["stage"] - 1
    message = build.send(
        Op.P2P,
        content,
        step=of["version"],
        micro_batch=passes.micro_batch[sender // passes.phases],
        stage=of["stage"],
        src=of["device"],
        dst=arriving["device"],
        size=model.size("boundary")[boundary],
    )
    made = _done(passes, sender)
    build.link(made, message)
    build.link(message, sender + 1)
    held = model.boundary_in_memory[boundary]
    leaving = _waiting(model)[boundary] if forth else held
    build.hold(Category.COMMUNICATION, size=leaving, begin=end(sender), end=end(message), **of)
    build.land(
        message, device=arriving["device"], stage=of["stage"], version=of["version"], size=held, until=start(sender + 1)
    )
    if not forth:  # an activation counts as its reader's from then on
        build.hold(
            Category.ACTIVATIONS, size=held, begin=start(sender + 1), end=end(_used(passes, sender + 1)), **arriving
        )


def _hold_passes(passes: Passes, model: Model, build: Builder) -> None:
    """Hold what each forward keeps for its backward; an input that the stage before keeps as well counts once."""
    t, _, j = (np.broadcast_to(index, passes.device.shape).ravel() for index in passes.tij)
    shared = np.zeros(passes.device.shape, dtype=np.int64)
    shared[:, 1:] = np.where(passes.device[:, 1:] == passes.device[:, :-1], model.size("kept_output")[:-1], 0)
    build.hold_even_empty(
        Category.ACTIVATIONS,
        device=passes.device.ravel(),
        stage=j,
        version=t,
        size=model.size("activation")[j] - shared.ravel(),
        begin=start(passes.forward.ravel()),
        end=end(passes.last.ravel()),
    )


def _hold_transients(passes: Passes, model: Model, build: Builder) -> None:
    """Hold what tasks need only while they run."""
    kinds = [(passes.forward, "forward_transient")]
    parts = [(passes.backward, "input_transient"), (passes.last, "weight_transient")]
    for task, kind in kinds + (parts if passes.splits else [(passes.backward, "backward_transient")]):
        if model.size(kind).any():
            node = task.ravel()
            of = _place(passes, node)
            build.hold(Category.ACTIVATIONS, size=model.size(kind)[of["stage"]], begin=start(node), end=end(node), **of)
