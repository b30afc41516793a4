"""The bytes that an update needs beside old parameters, gradients and state, found by one update on zeros."""

from collections.abc import Sequence

import torch

from cdpsim.schedules.order import Outer

from ..profile.tracker import Tracker
from ..replay.local import OuterState, update_by_mean
from ..training.forms import Form, zeros
from ..training.optimizer import Optimizer


def update_bytes(optimizer: Optimizer, parts: Sequence[Form], device: torch.device) -> int:
    """Return the most that an update of a vector of these parts makes at a time, the new parameters among it."""
    vector = Form((sum(part.numel for part in parts),), parts[0].dtype)
    if optimizer.on_host and device.type != "cpu":
        return vector.nbytes  # all else is made on the host
    theta, gradient = zeros(vector, device), zeros(vector, device)
    state, tracker = optimizer.state(theta, parts), Tracker(device.type)
    tracker.ignore([theta, gradient, *state.values()])
    with tracker:
        optimizer.update(theta, gradient, state, parts)
    return tracker.peak


def mean_update_bytes(outer: Outer | None, parts: Sequence[Form], device: torch.device) -> int:
    """Return the most that an update by a mean makes at a time, the new parameters among it."""
    vector = Form((sum(part.numel for part in parts),), parts[0].dtype)
    total, tracker = zeros(vector, device), Tracker(device.type)
    state = None if outer is None else OuterState(outer, total)
    tracker.ignore([total, *(state.vectors if state else ())])
    with tracker:
        update_by_mean(total, 2, state)
    return tracker.peak
