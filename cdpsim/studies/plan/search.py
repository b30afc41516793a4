"""The search of a plan: candidates are simulated in the order of their bounds, until no other one can be better."""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.progress import ticker
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.studies.compare import Measured
from cdpsim.studies.plan.bounds import Sizes, bound_candidates, loads_of
from cdpsim.studies.plan.front import OBJECTIVES, best_first, dominated_by, sorted_by
from cdpsim.studies.plan.space import Candidate, Space

REFUSED, TWIN, TOO_LARGE, WORSE, SIMULATED, OPEN = FATES = (
    *("cannot be asked", "equal to another", "too large", "cannot be better", "simulated", "open"),
)
INTERRUPTED = "interrupted"
Evaluate = Callable[[Mapping[str, Any]], Measured]


@dataclass
class Search:
    """The state of a search.

    `least` has the least figures of each candidate by its bounds, in the columns of `OBJECTIVES`: infinite for those
    that are not bound, being refused or equal to others. `fate` says what has become of it. `limit` is the memory that
    a device may hold; None: as much as it has.
    """

    space: Space
    least: Floats
    fate: list[str]
    refusals: dict[int, RequestError]
    limit: float | None
    objective: str
    top: int
    seconds: float | None
    evaluate: Evaluate
    begun: float  # by the clock that `seconds` goes by
    measured: dict[int, Measured] = field(default_factory=dict)
    stopped: str = ""  # why it ended before its end

    def least_memory(self) -> "Search":
        """Return a search of all that can be asked for the one that needs least memory, whatever that is."""
        fate = [state if state in (REFUSED, TWIN) else OPEN for state in self.fate]
        return replace(
            self, fate=fate, limit=np.inf, objective="memory", top=1, measured={}, refusals={**self.refusals}
        )

    @property
    def figures(self) -> dict[int, tuple[float, ...]]:
        """The figures of the candidates that have been simulated and fit, in the columns of `OBJECTIVES`."""
        return {number: objectives_of(one) for number, one in self.measured.items() if self.fits(one)}

    def fits(self, measured: Measured) -> bool:
        """Return whether no device needs more memory than it may hold."""
        return measured.fits if self.limit is None else measured.memory <= self.limit


def objectives_of(measured: Measured) -> tuple[float, ...]:
    """Return the figures of a run in the columns of `OBJECTIVES`; all candidates have the same batch.

    Steps are equal if eleven digits are: those behind depend on the order of sums and the size of ticks.
    """
    return float(f"{float(measured.step):.11g}"), float(measured.memory), float(measured.devices), measured.staleness


def begin_search(
    space: Space,
    evaluate: Evaluate,
    *,
    limit: float | None,
    objective: str,
    top: int,
    seconds: float | None,
    begun: float,
) -> Search:
    """Return a search that has not simulated anything: candidates that are too large by their bounds are out."""
    candidates = space.candidates
    fate = [REFUSED if one.refusal else OPEN if one.twin is None else TWIN for one in candidates]
    least = np.full((len(candidates), len(OBJECTIVES)), np.inf)
    rows = np.array([number for number, state in enumerate(fate) if state == OPEN], dtype=np.int64)
    most, stopped = _most_memory(space) if limit is None else limit, ""
    if len(rows):
        try:
            least[rows, :2] = _bounds_of(space, rows, most)
        except KeyboardInterrupt:
            least[rows, :2], stopped = 0, INTERRUPTED
        least[rows, 2] = [candidates[number].devices for number in rows]
        least[rows, 3] = [candidates[number].staleness for number in rows]
    for number in rows[least[rows, 1] > most].tolist():
        fate[number] = TOO_LARGE
    refusals = {number: one.refusal for number, one in enumerate(candidates) if one.refusal}
    return Search(space, least, fate, refusals, limit, objective, top, seconds, evaluate, begun, stopped=stopped)


def _bounds_of(space: Space, rows: Ints, most: float) -> Floats:
    """Return the least step and memory of candidates; steps of those that fit, or of all where none does."""
    sizes = _sizes(space, rows)
    cases, case = np.unique(sizes.case, return_inverse=True)
    loads, sizes = [loads_of(space.cases[k]) for k in cases.tolist()], sizes._replace(case=case)
    bounds = bound_candidates(loads, sizes, most)
    if (bounds.memory > most).all():
        bounds = bound_candidates(loads, sizes)
    return np.column_stack(bounds)


def _sizes(space: Space, rows: Ints) -> Sizes:
    """Return the sizes of candidates, in columns."""
    chosen = [space.candidates[number] for number in rows.tolist()]

    def column(size: Callable[[Candidate], int]) -> Ints:
        return np.array([size(one) for one in chosen], dtype=np.int64)

    return Sizes(
        case=column(lambda one: one.case),
        m=column(lambda one: one.options.get("m") or space.cases[one.case].shape.m),
        replicas=column(lambda one: one.options.get("replicas", 1)),
        shard=column(lambda one: one.options.get("shard", 1)),
        zero=column(lambda one: one.options.get("zero", 0)),
        resharded=column(lambda one: one.options.get("reshard", "step") != "step") > 0,
    )


def _most_memory(space: Space) -> float:
    """Return the memory of the largest device of the cluster."""
    return max((float(case.cluster.memory_bytes(case.cluster.count or 1).max()) for case in space.cases), default=0.0)


def run_search(search: Search, *, front: bool = True) -> None:
    """Simulate candidates until the best are known, also of those without staleness, and then the front."""
    if search.stopped:  # before the first of them
        return
    open_candidates = np.array([state == OPEN for state in search.fate], dtype=bool)
    order = [number for number in best_first(search.least, search.objective).tolist() if open_candidates[number]]
    tick: Any = ticker(len(order), "plan")
    try:
        rest = _find_best(search, order, search.top, tick)
        rest = _find_best(search, rest, 1, tick, fresh=True)
        if front:
            rest = _find_front(search, rest, tick)
    except KeyboardInterrupt:
        search.stopped = INTERRUPTED
    finally:
        tick(0)
    if not search.stopped:
        for number in rest:
            search.fate[number] = WORSE


def _out_of_time(search: Search) -> bool:
    if search.seconds is not None and monotonic() - search.begun >= search.seconds:
        search.stopped = f"stopped after {search.seconds:g} s"
    return bool(search.stopped)


def _find_best(
    search: Search, order: Sequence[int], top: int, tick: Callable[[int], object], *, fresh: bool = False
) -> list[int]:
    """Simulate candidates until `top` of them are at least as good as all others can be; return the others.

    Where they are to be `fresh`, candidates with staleness are left aside.
    """
    columns = sorted_by(search.objective)

    def key(number: int, figures: Sequence[float]) -> tuple[float, ...]:
        return (*(figures[column] for column in columns), number)

    best = sorted(key(number, figures) for number, figures in search.figures.items() if not (fresh and figures[3]))
    rest: list[int] = []
    for place, number in enumerate(order):
        least = search.least[number].tolist()
        if fresh and least[3]:
            rest.append(number)
            continue
        if (len(best) >= top and best[top - 1] <= key(number, least)) or _out_of_time(search):
            return rest + list(order[place:])
        if (figures := _simulate(search, number)) is not None:
            insort(best, key(number, figures))
        tick(1)
    return rest


def _find_front(search: Search, order: Sequence[int], tick: Callable[[int], object]) -> list[int]:
    """Simulate candidates that no other one dominates, whatever their figures are; return the others."""
    beaten: Flags = np.zeros(len(search.least), dtype=bool)
    for figures in search.figures.values():
        beaten |= dominated_by(np.array(figures), search.least)
    rest: list[int] = []
    for place, number in enumerate(order):
        if beaten[number]:
            rest.append(number)
            continue
        if _out_of_time(search):
            return rest + list(order[place:])
        if (found := _simulate(search, number)) is not None:
            beaten |= dominated_by(np.array(found), search.least)
        tick(1)
    return rest


def _simulate(search: Search, number: int) -> tuple[float, ...] | None:
    """Simulate a candidate; return its figures if it fits."""
    try:
        measured = search.evaluate(search.space.candidates[number].options)
    except Stalled as error:
        search.refusals[number] = RequestError("stalled", str(error))
    except RequestError as error:
        search.refusals[number] = error
    else:
        search.fate[number], search.measured[number] = SIMULATED, measured
        return objectives_of(measured) if search.fits(measured) else None
    search.fate[number] = REFUSED
    return None


def best_left(search: Search) -> float:
    """Return the best value of the objective that a candidate has, or that one could have that is open."""
    column = OBJECTIVES.index(search.objective)
    left = [search.least[number, column] for number, state in enumerate(search.fate) if state == OPEN]
    known = [figures[column] for figures in search.figures.values()]
    return float(min([*left, *known], default=np.inf))
