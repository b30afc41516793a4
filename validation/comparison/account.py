"""Comparison of the allocator's account: all that a process allocates, event by event, updates and messages included.

The simulation's part are the program's buffers, in the order in which the process goes through its events. What updates
and messages need beside them are remainders, each with a name and a size from the forms of tensors.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..profile.workspaces import WRAPPED, Workspaces, find_workspaces
from ..replay.case import Outcome, Prepared
from ..replay.watch import Event
from ..report.schema import Account, AllocatorComparison, Remainder
from .remainders import EventSequence
from .round_remainders import RoundsSequence

KERNELS = 0.02  # of the peak of a GPU: which of a library's kernels runs, and its workspace, are decided at each call


def compare_accounts(prepared: Prepared, outcomes: Sequence[Outcome]) -> AllocatorComparison:
    """Compare the account of each process with the simulation and the remainders of the devices that it plays."""
    case = prepared.case
    ledgers: dict[str, dict[int, Event]] = defaultdict(dict)
    for event in (event for outcome in outcomes for event in outcome.events):
        ledgers[event.ledger][event.number] = event
    workspaces = find_workspaces(prepared.training, splits=prepared.plan.program.splits)
    events = [[own[number] for number in sorted(own)] for own in ledgers.values()]
    return AllocatorComparison(
        processes=[_compare_process(prepared, workspaces, own) for own in events],
        tolerance_bytes=WRAPPED,
        tolerance=0.0 if case.device == "cpu" else KERNELS,
        method="profiler" if case.device == "cpu" else "memory_stats",
    )


def is_accounted(comparison: AllocatorComparison) -> bool:
    """Return whether simulation and remainders are the allocator's peak, and its level in every event."""
    return all(
        max(each.largest_difference, abs(each.explained_bytes - each.measured_bytes))
        <= comparison.tolerance_bytes + comparison.tolerance * each.measured_bytes
        for each in comparison.processes
    )


def _compare_process(prepared: Prepared, workspaces: list[Workspaces], events: list[Event]) -> Account:
    """Compare the peaks of one process in all its events but the first, in which it only sets itself up."""
    sequence = (RoundsSequence if prepared.plan.program.thrown_away else EventSequence)(prepared, events)
    spans = [*sequence.buffers(), *sequence.remainders(), *sequence.workspaces(workspaces)]
    level = sequence.level(spans)
    during = np.maximum(np.maximum(level[1:-2:2], level[2:-1:2]), level[3::2])
    measured = np.array([event.peak for event in events[1:]])
    apart = np.abs(during - measured)
    worst, top = int(apart.argmax()), int(during.argmax())
    point = 2 * top + 1 + int(level[2 * top + 1 : 2 * top + 4].argmax())
    sizes: dict[str, int] = defaultdict(int)
    for span in spans:
        sizes[span.name] += span.size if span.begin <= point < span.end else 0
    simulated = sizes.pop("", 0)
    return Account(
        device=min(sequence.devices) if len(sequence.devices) == 1 else None,
        simulated_bytes=simulated,
        remainders=[Remainder(name=name, size=size) for name, size in sorted(sizes.items()) if size],
        measured_bytes=int(measured.max()),
        peak_at=sequence.describe(events[1 + int(measured.argmax())]),
        largest_difference=int(apart[worst]),
        differs_at=sequence.describe(events[1 + worst]) if apart[worst] else None,
        differs_by=int(measured[worst] - during[worst]),
    )
