"""Invariants: laws that hold in every run, read off its program, costs and times, one law at a time.

`cdpsim.program.check` asks whether a program is well formed, before it runs; this asks whether a run makes sense,
after. No invariant relies on how the assembly derives things: each recounts from tasks, messages, times and the
request.
"""

from collections.abc import Callable, Iterator

from cdpsim.invariants import buffers, gradients, messages, passes, resources, states, times, versions
from cdpsim.invariants.recount import Recount
from cdpsim.runs import Run

Invariant = Callable[[Recount], Iterator[str]]


def violations(run: Run) -> dict[str, str]:
    """Return the first violation of each invariant that does not hold, by the invariant's name."""
    recount = Recount(run)
    first = {name: next(invariant(recount), None) for name, invariant in INVARIANTS.items()}
    return {name: problem for name, problem in first.items() if problem is not None}


INVARIANTS: dict[str, Invariant] = {
    function.__name__: function
    for function in (
        times.times_are_finite,
        times.nodes_last_their_cost,
        times.links_carry_no_more_than_they_can,
        times.dependencies_are_kept,
        times.lanes_do_one_task_at_a_time,
        times.releases_are_kept,
        times.nothing_waits_without_cause,
        passes.passes_go_from_stage_to_stage,
        passes.boundaries_cross_by_one_message,
        passes.backwards_read_what_their_forward_read,
        messages.messages_leave_their_device,
        messages.devices_exist,
        messages.collectives_go_round_by_round,
        gradients.gradients_are_sent_after_they_are_made,
        gradients.gradients_are_summed_once,
        gradients.tied_gradients_are_summed_once,
        gradients.updates_come_after_all_their_gradients,
        gradients.barriers_hold,
        versions.versions_are_made_in_order,
        versions.versions_exist_before_they_are_read,
        versions.versions_are_sent_after_they_are_made,
        versions.readings_are_as_old_as_the_rule_says,
        states.states_go_from_user_to_user,
        states.optimizer_states_follow_updates,
        resources.pulled_messages_find_room,
        resources.hosts_make_one_update_at_a_time,
        resources.streams_keep_their_order,
        buffers.readers_hold_what_they_read,
        buffers.senders_hold_what_they_send,
        buffers.receivers_hold_what_arrives,
        buffers.activations_are_held_from_forward_to_backward,
        buffers.buffers_end_after_they_begin,
    )
}
