"""Exchanges between holders that come to a stage together, derived from where values live and who needs them."""

from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.program.assembly.axis import Axis
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.shares import SharedAxis
from cdpsim.program.assembly.update import Updates
from cdpsim.schedules.state import Home


def data_axis(updates: Updates, model: Model, habits: Habits, build: Builder, prefetch: int) -> None:
    """Sum gradients where updates are made, and bring new versions to their readers."""
    state = updates.tables.passes.schedule.state
    axis = (SharedAxis if state.streams else Axis)(updates, model, habits, build)
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
