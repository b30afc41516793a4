"""Invariants, independent on purpose: laws that hold in every run, read off its program, costs and times.

`cdpsim.program.check` asks whether a program is well formed, before it runs; this asks whether a run makes sense,
after. No invariant relies on how the assembly derives things: each recounts from tasks, messages, times and the
request.
"""

from collections.abc import Callable, Iterator

from cdpsim.invariants import buffers, exchanges, gradients, resources, round_laws, task_laws
from cdpsim.invariants.recount import Recount
from cdpsim.runs import Run

Invariant = Callable[[Recount], Iterator[str]]


def violations(run: Run) -> dict[str, str]:
    """Return the first violation of each invariant that does not hold of all replicas, by the invariant's name."""
    recount = Recount(run.whole)
    first = {name: next(invariant(recount), None) for name, invariant in INVARIANTS.items()}
    return {name: problem for name, problem in first.items() if problem is not None}


# The laws of each module are its public functions that yield problems.
INVARIANTS: dict[str, Invariant] = {
    name: law
    for module in (
        task_laws,
        task_laws,
        gradients,
        exchanges,
        gradients,
        task_laws,
        round_laws,
        round_laws,
        resources,
        buffers,
    )
    for name, law in vars(module).items()
    if not name.startswith("_") and getattr(law, "__annotations__", {}).get("return") == Iterator[str]
}
