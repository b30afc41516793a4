"""The bytes that kernels allocate for themselves in the tasks of stages, found by running stages apart from a replay.

A stage's tasks are run twice: watched by the allocator's events, and by a tracker of storages. What the allocator gives
beyond the storages at the peak of a task are workspaces: blocks that oneDNN reorders tensors into, unfolded images, the
accumulators of products of two-byte numbers. They depend on shapes, types and threads, and on no values. What it gives
beyond the storages between two tasks are numbers of Python, which graphs keep as tensors for their backwards.
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cdpsim.program import Kind

from ..profile.allocations import Windows, allocation_windows, without_collections
from ..profile.division import Inputs, zero_above, zero_inputs
from ..profile.footprints import likeness_key
from ..profile.tracker import Tracker
from ..training.passes import Pass, backward_for_input, backward_for_weights, one_thread
from ..training.recomputation import run_backward, run_forward
from ..training.stages import Training


class Unstored(NamedTuple):
    """Bytes beside all storages: during a task at its peak, and behind it."""

    during: int
    behind: int


Workspaces = dict[Kind, Unstored]


class StorageWindows:
    """A record of the highest level of storages from one mark to the next; given tensors do not count."""

    def __init__(self, device: torch.device, given: Iterable[Tensor]) -> None:
        self._tracker = Tracker(device.type)
        self._tracker.ignore(given)
        self._peaks: list[int] = []

    @property
    def peaks(self) -> list[int]:
        """The highest level from each mark until the next, and from the last until the end."""
        return [*self._peaks[1:], self._tracker.peak]

    def mark(self) -> None:
        """Begin a window."""
        self._peaks.append(self._tracker.peak)
        self._tracker.reset_peak()

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._tracker.__exit__(kind, error, trace)


def find_workspaces(training: Training, *, splits: bool) -> list[Workspaces]:
    """Return the workspaces of each stage's tasks; stages of one likeness have the same."""
    found: dict[Hashable, Workspaces] = {}
    keys = [likeness_key(training, stage) for stage in range(training.n)]
    with one_thread():  # as in a replay: kernels have a workspace for each thread
        for stage, key in enumerate(keys):
            if key not in found:
                found[key] = _measure(training, stage, splits)
    return [found[key] for key in keys]


def _measure(training: Training, stage: int, splits: bool) -> Workspaces:
    given = zero_inputs(training, stage)
    above = zero_above(training, stage)
    here = [tensor for tensor in (*given, above, *training.buffers[stage].values()) if tensor is not None]
    # Storages first: kernels may allocate something for good at their first use.
    storages, allocations = StorageWindows(training.device, here), allocation_windows(training.device)
    for windows in (storages, allocations):
        with without_collections(), windows:
            _play(training, stage, windows, given, above, splits=splits)
    beside = [max(0, both - own) for both, own in zip(allocations.peaks, storages.peaks, strict=True)]
    return {
        kind: Unstored(*pair)
        for kind, pair in zip((Kind.F, Kind.B, Kind.W), zip(beside[::2], beside[1::2], strict=True), strict=False)
    }


def _play(
    training: Training, stage: int, windows: Windows, given: Inputs, above: Tensor | None, *, splits: bool
) -> None:
    """Run the tasks of a stage as a device does, draws included, in a window for each and one behind it."""
    theta, gradient, x, _ = given
    windows.mark()
    target = training.target(0, 0) if stage == training.n - 1 else None
    y, kept = run_forward(training, stage, theta, x if stage else training.input(0, 0), target, 2)
    del y, target
    windows.mark()
    windows.mark()
    if splits:
        assert isinstance(kept, Pass), "a split backward computes nothing again"
        below, rest = backward_for_input(kept, theta, above, training.divided.get(stage))
        del below, kept
        windows.mark()
        windows.mark()
        backward_for_weights(training, rest, theta, gradient)
        del rest
    else:
        run_backward(training, kept, theta, above, gradient)
        del kept
    windows.mark()
