"""Exchanges between holders that come to a stage together, derived from where values live and who needs them."""

from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.model.stage import Tie
from cdpsim.program.assembly.axis import Axis
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.local import LocalAxis
from cdpsim.program.assembly.rounds import RoundsAxis
from cdpsim.program.assembly.shares import SharedAxis
from cdpsim.program.assembly.update import Updates
from cdpsim.schedules.state import Home


def data_axis(
    updates: Updates, model: Model, habits: Habits, build: Builder, prefetch: int, once: tuple[Tie, ...]
) -> None:
    """Sum gradients where updates are made, and bring new versions to their readers.

    `once` are tied tensors that the model counts in their first stages alone.
    """
    schedule = updates.tables.passes.schedule
    state, of = schedule.state, (updates, model, habits, build)
    if not schedule.order.waits:
        (LocalAxis if schedule.order.local else RoundsAxis)(*of, once).derive()
        return
    axis = SharedAxis(*of, once) if state.streams else Axis(*of)
    copied = state.parameters is Home.COPIED
    stays = copied or not (axis.several.any() or axis.is_hosted)
    if not stays:
        axis.hand_out(prefetch)
    taker = axis.reduce()
    if isinstance(axis, SharedAxis) and state.clips:
        axis.sum_norms()
    provider = axis.spread() if copied and state.optimizer is not Home.COPIED else axis.node
    axis.follow(provider, stays=stays)
    axis.hold_gradients(taker, provider)
    copies = axis.hold_parameters(taker, provider)
    if stays and axis.passes.lagging:
        axis.hold_until_read(copies)
    axis.hold_optimizers()
