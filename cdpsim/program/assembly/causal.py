"""Causality of rules: no task reads parameters before they exist."""

from dataclasses import replace

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import last_phase
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape


def check_causal(schedule: Schedule, rule: Rule, shape: Shape) -> None:
    """Refuse a rule that reads parameters before they exist, naming the first (i, j) that does."""
    timing = schedule.order
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
