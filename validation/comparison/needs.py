"""Comparison of messages with what tasks need, by the laws of `cdpsim.invariants`, and with the sizes of their tensors.

Laws recount tasks, messages and the request without the dependencies of a program. Here their times are places in the
order in which a replay goes through all nodes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from cdpsim.invariants import exchanges, gradients, round_laws, task_laws
from cdpsim.invariants.recount import Recount
from cdpsim.program import Op
from cdpsim.runs import Run
from cdpsim.runs.assembling import price_resolved, request_of

from ..replay.interpreter import form_of_message
from ..replay.plan import Plan
from ..replay.shares import Shares, sizes_of_shares
from ..report.schema import MessageDifference, MessageFault
from ..training.optimizer import Optimizer
from ..training.stages import Training

LAWS: tuple[Callable[[Recount], Iterator[str]], ...] = (
    task_laws.boundaries_cross_by_one_message,
    task_laws.messages_leave_their_device,
    gradients.gradients_are_summed_once,
    exchanges.gradients_enter_one_sum,
    gradients.gradients_are_sent_after_they_are_made,
    gradients.updates_come_after_all_their_gradients,
    exchanges.parameters_are_gathered_for_uses,
    exchanges.new_parameters_are_gathered_after_updates,
    gradients.gradients_take_their_bytes_along,
    task_laws.versions_exist_before_they_are_read,
    task_laws.versions_are_sent_after_they_are_made,
    task_laws.states_go_from_user_to_user,
    task_laws.optimizer_states_follow_updates,
    round_laws.means_come_between_local_steps_and_outer_updates,
    round_laws.means_are_over_all_workers,
    task_laws.versions_come_once,
)


def compare_needs(plan: Plan, training: Training, optimizer: Optimizer) -> list[MessageDifference]:
    """Return where messages break a law, and where they are larger or smaller than their tensors."""
    program, shares = plan.program, Shares(plan.program, plan.messages, training)
    among_ranks = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_REDUCE)
    forms = (
        shares.message_form(each) if each.op in among_ranks else form_of_message(plan, each, training, optimizer)
        for each in plan.messages
    )
    sizes = [form.nbytes for form in forms]
    stated = np.array(sizes, dtype=np.int64)
    for row, size, _ in sizes_of_shares(program, training):
        stated[row] = size
    program = replace(program, messages=replace(program.messages, size=stated))
    place = np.argsort(plan.order)
    recount = Recount(Run(request_of(program), program, price_resolved(program, request_of(program)), place, place + 1))
    found = [
        MessageDifference(kind="law", text=f"{law.__name__.replace('_', ' ')}: {problem}", size=0)
        for law in LAWS
        for problem in law(recount)
    ]
    for message, size in zip(plan.messages, sizes, strict=True):
        if size != message.size:
            kind: MessageFault = "too large" if message.size > size else "too small"
            text = f"{message} has {message.size} B, and its tensors {size} B"
            found.append(MessageDifference(kind=kind, text=text, size=abs(message.size - size)))
    return found
