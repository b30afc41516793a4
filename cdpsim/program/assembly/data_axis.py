"""The data axis: copies of a stage on several devices sum gradients, and bring new parameters to their readers.

Who sums and gathers what, in a step of a stage; each line is a placement of (parameters, gradients, optimizer states),
and each arrow waits for what is left of it. F, B, U: forward, backward, update of the stage; [ ]: with several groups.

    copied, copied, copied       F B > all-reduce gradients > U of each copy > F of the next step
    copied, copied/owned, owned  F B > reduce gradients > U of the owner > broadcast parameters > F of the next step
    copied, copied/split, split  F B > reduce-scatter [> all-reduce shares] > U of each share > all-gather > F
    split, split, split          all-gather > F, all-gather > B > reduce-scatter [> all-reduce shares] > U of each share
    owned, owned, owned          broadcast > F, broadcast > B > reduce gradients > U of the owner
    rounds                       F B F B > reduce-scatter > U of each share > all-gather > F of a later round
                                           F B F B of the next round meanwhile
    local steps                  F B > U of each copy, by itself; after several > all-reduce parameters > U of each > F

In the code, each function takes what those before it return:

    find_axis          DataAxis: copies, their bytes, and the groups in which they exchange something
    gather_for_uses    Gathered: parameters come before each use, and go after it, where no copy stays
    sum_in_streams     Sums: which message takes the gradients of each copy; or sum_by_stage
    gather_versions    Brought: what brings the next version to each copy; or broadcast_versions
    hold_...           buffers, from all of these
"""

from cdpsim.model import Model
from cdpsim.model.runtime import Behaviours
from cdpsim.model.stage import Tie
from cdpsim.program.assembly.axis import Brought, find_axis, order_updates
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.data_axis import (
    broadcast_for_uses,
    broadcast_versions,
    hold_optimizers,
    hold_parameters,
    hold_residuals,
    hold_sums,
    sum_by_stage,
)
from cdpsim.program.assembly.gathered import gather_for_uses
from cdpsim.program.assembly.in_streams import gather_versions, sum_in_streams, sum_norms
from cdpsim.program.assembly.in_turn import in_turn
from cdpsim.program.assembly.updates import Updates
from cdpsim.program.assembly.workers import overlap_rounds, take_local_steps
from cdpsim.schedules.state import Placed


def exchange_values(
    updates: Updates, model: Model, behaviours: Behaviours, build: Builder, prefetch: int, once: tuple[Tie, ...]
) -> None:
    """Sum gradients where updates are made, and bring new versions to their readers.

    `once` are tied tensors that the model counts in their first stages alone.
    """
    if not updates.tables.passes.together:
        in_turn(updates, model, behaviours, build, prefetch)
        return
    axis, order = find_axis(updates, model, behaviours, build), updates.tables.passes.schedule.order
    if not order.waits:
        (take_local_steps if order.local else overlap_rounds)(axis)
        return
    streams, gathered, brought = axis.state.streams, None, Brought(axis.update)
    if not axis.stays:
        gathered = gather_for_uses(axis, prefetch, once) if streams else broadcast_for_uses(axis, prefetch)
    sums = sum_in_streams(axis) if streams else sum_by_stage(axis)
    if streams and axis.state.clips:
        sum_norms(axis, sums)
    if axis.state.parameters is Placed.COPIED and axis.state.optimizer is not Placed.COPIED:
        brought = gather_versions(axis) if streams else broadcast_versions(axis)
    order_updates(axis, brought)
    hold_sums(axis, sums, brought, gathered)
    hold_parameters(axis, sums, brought)
    hold_optimizers(axis)
    if axis.state.compress is not None and axis.state.compress.leaves_some:
        hold_residuals(axis, axis.state.compress)
