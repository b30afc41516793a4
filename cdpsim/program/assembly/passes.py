"""A micro-batch's way through the stages: activations go forth, their gradients back, and what is held meanwhile."""

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Op
from cdpsim.program.assembly.build import Location, end, start
from cdpsim.program.assembly.runtime_buffers import (
    Keeping,
    hold_always,
    hold_gradient_sent,
    hold_output,
    hold_output_handed_on,
    hold_returned,
)
from cdpsim.program.assembly.task_tables import Passes


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
    payload, micro_batch = keeping.model.size("boundary")[boundary], passes.micro_batch[row]
    message = build.send(Op.P2P, content, of, arriving.device, payload, micro_batch=micro_batch)
    build.link(_handing_on(passes, sender), message)
    build.link(message, reader)
    size = keeping.boundary[boundary]
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
    """Hold what each forward keeps for its backward."""
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
