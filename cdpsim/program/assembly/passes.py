"""A micro-batch's way through the stages: activations go forth, their gradients back, and what is held meanwhile."""

import numpy as np

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Op
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.tables import Passes


def pass_through_stages(passes: Passes, model: Model, build: Builder) -> None:
    """Link each task of a micro-batch to its next one, by message where that is on another device."""
    task = np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases)[:, : 2 * passes.n - 1].ravel()
    crosses = passes.task_device[task] != passes.task_device[task + 1]
    near, far = task[~crosses], task[crosses]
    build.link(_handing_on(passes, near), near + 1)
    _hand_over(passes, model, build, near)
    for content, forth in ((Content.ACTIVATION, True), (Content.ACTIVATION_GRADIENT, False)):
        _send(passes, model, build, far[(far % passes.phases < passes.n) == forth], content)
    if passes.splits:
        build.link(passes.backward.ravel(), passes.last.ravel())
    _hold_stashes(passes, model, build)
    _hold_transients(passes, model, build)


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


def _last_use(passes: Passes, backward: Ints) -> Ints:
    """Return the last tasks that need the gradients of backwards' outputs: the weights' parts, where split."""
    return backward + passes.n * passes.splits


def _waiting(model: Model) -> Ints:
    """Weigh each stage's output until it is used, beyond what the stage itself keeps of it."""
    return model.boundary_in_memory - model.size("kept_output")


def _hand_over(passes: Passes, model: Model, build: Builder, task: Ints) -> None:
    """Hold what a task leaves to the next one on its device: outputs until used, their gradients while used too."""
    if not model.boundary_in_memory.any():
        return
    phase = task % passes.phases
    ahead, back = task[phase < passes.n - 1], task[phase >= passes.n]
    of = _locate(passes, ahead)
    build.hold(Category.ACTIVATIONS, of, _waiting(model)[of.stage], end(ahead), start(ahead + 1))
    of = _locate(passes, back)
    size = model.boundary_in_memory[of.stage - 1]
    build.hold(Category.ACTIVATIONS, of, size, end(back), end(_last_use(passes, back + 1)))


def _send(passes: Passes, model: Model, build: Builder, sender: Ints, content: Content) -> None:
    """Send what tasks leave to the next ones on other devices: held there until sent, and here until used."""
    forth, reader = content == Content.ACTIVATION, sender + 1
    of, arriving = _locate(passes, sender), _locate(passes, reader)
    boundary = of.stage if forth else of.stage - 1
    message = build.send(
        Op.P2P,
        content,
        step=of.version,
        micro_batch=passes.micro_batch[sender // passes.phases],
        stage=of.stage,
        src=of.device,
        dst=arriving.device,
        size=model.size("boundary")[boundary],
    )
    build.link(_handing_on(passes, sender), message)
    build.link(message, reader)
    size = model.boundary_in_memory[boundary]
    leaving = _waiting(model)[boundary] if forth else size
    build.hold(Category.COMMUNICATION, of, leaving, end(sender), end(message))
    build.land(message, of._replace(device=arriving.device), size, start(reader))
    if not forth:  # an activation counts as its reader's from then on
        build.hold(Category.ACTIVATIONS, arriving, size, start(reader), end(_last_use(passes, reader)))


def _hold_stashes(passes: Passes, model: Model, build: Builder) -> None:
    """Hold what each forward keeps for its backward; an input that the stage before keeps as well counts once."""
    forward = passes.forward.ravel()
    shared = np.zeros(passes.device.shape, dtype=np.int64)
    shared[:, 1:] = np.where(passes.device[:, 1:] == passes.device[:, :-1], model.size("kept_output")[:-1], 0)
    of = Location(passes.device.ravel(), passes.stage, np.repeat(passes.step, passes.n))
    size = model.size("activation")[of.stage] - shared.ravel()
    build.hold(Category.ACTIVATIONS, of, size, start(forward), end(passes.last.ravel()), even_empty=True)


def _hold_transients(passes: Passes, model: Model, build: Builder) -> None:
    """Hold what tasks need only while they run."""
    parts = [(passes.backward, "input_transient"), (passes.last, "weight_transient")]
    whole = [(passes.backward, "backward_transient")]
    for task, kind in [(passes.forward, "forward_transient"), *(parts if passes.splits else whole)]:
        if model.size(kind).any():
            node = task.ravel()
            of = _locate(passes, node)
            build.hold(Category.ACTIVATIONS, of, model.size(kind)[of.stage], start(node), end(node))
