"""The bytes that kernels allocate for themselves in the tasks of stages, found by running stages apart from a replay.

A stage's tasks are run twice: watched by the allocator's events, and by a tracker of storages. What the allocator gives
beyond the storages at the peak of a task are workspaces: blocks that oneDNN reorders tensors into, unfolded images, the
accumulators of products of two-byte numbers. They depend on shapes, types and threads, and on no values. What it gives
beyond the storages between two tasks are numbers of Python, which graphs keep as tensors for their backwards.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from cdpsim.program import Kind

from ..training.passes import Pass, backward_for_input, backward_for_weights, one_thread
from ..training.recomputation import run_backward, run_forward
from ..training.stages import Training
from .allocations import allocation_windows, without_collections
from .division import Inputs, zero_above, zero_inputs
from .footprints import likeness_key
from .tracker import Tracker

WRAPPED = 64  # bytes: numbers of Python that torch makes tensors of for an operation


class Unstored(NamedTuple):
    """Bytes beside all storages: during a task at its peak, and behind it."""

    during: int
    behind: int


Workspaces = dict[Kind, Unstored]


def find_workspaces(training: Training, *, splits: bool) -> list[Workspaces]:
    """Return the workspaces of each stage's tasks; stages of one likeness have the same."""
    found: dict[Hashable, Workspaces] = {}
    keys = [likeness_key(training, stage) for stage in range(training.n)]
    with one_thread():  # as in a replay: kernels have a workspace for each thread
        for stage, key in enumerate(keys):
            if key not in found:
                found[key] = _measure(training, stage, splits)
    return [found[key] for key in keys]


def workspaces_of_stages(training: Training) -> dict[str, Any]:
    """Return what a cluster file says of them: the sizes of all stages, or one; nothing where there are none."""
    whole = find_workspaces(training, splits=False)
    parts = find_workspaces(replace(training, segments=None, offloads=False), splits=True)
    kinds = {"forward": (whole, Kind.F), "backward": (whole, Kind.B)}
    kinds |= {"input_backward": (parts, Kind.B), "weight_backward": (parts, Kind.W)}
    during = {name: [own[kind].during for own in stages] for name, (stages, kind) in kinds.items()}
    sizes = {name: [size * (size > WRAPPED) for size in own] for name, own in during.items()}
    return {name: own if len({*own}) > 1 else own[0] for name, own in sizes.items() if any(map(any, sizes.values()))}


def _measure(training: Training, stage: int, splits: bool) -> Workspaces:
    given = zero_inputs(training, stage)
    above = zero_above(training, stage)
    tracker, levels, allocations = Tracker(training.device.type), list[int](), allocation_windows(training.device)
    tracker.ignore(each for each in (*given, above, *training.buffers[stage].values()) if each is not None)

    def mark() -> None:
        levels.append(tracker.peak)
        tracker.reset_peak()

    # Storages first: kernels may allocate something for good at their first use.
    for record, begin in ((tracker, mark), (allocations, allocations.mark)):
        with without_collections(), record:
            _play(training, stage, begin, given, above, splits=splits)
    storages = *levels[1:], tracker.peak
    beside = [max(0, both - own) for both, own in zip(allocations.peaks, storages, strict=True)]
    return {
        kind: Unstored(*pair)
        for kind, pair in zip((Kind.F, Kind.B, Kind.W), zip(beside[::2], beside[1::2], strict=True), strict=False)
    }


def _play(
    training: Training, stage: int, mark: Callable[[], None], given: Inputs, above: Tensor | None, *, splits: bool
) -> None:
    """Run the tasks of a stage as a device does, draws included, marking begin and end of each."""
    theta, gradient, x, _ = given
    mark()
    target = training.target(0, 0) if stage == training.n - 1 else None
    y, kept = run_forward(training, stage, theta, x if stage else training.input(0, 0), target, 2)
    del y, target
    mark()
    mark()
    if splits:
        assert isinstance(kept, Pass), "a split backward computes nothing again"
        below, rest = backward_for_input(kept, theta, above, training.divided.get(stage))
        del below, kept
        mark()
        mark()
        backward_for_weights(training, rest, theta, gradient)
        del rest
    else:
        run_backward(training, kept, theta, above, gradient)
        del kept
    mark()
