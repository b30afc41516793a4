"""The search of a plan: candidates are simulated in the order of their bounds, until no other one can be better."""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Any

import numpy as np

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.notes import ticker
from cdpsim.numeric.columns import Flags, Floats
from cdpsim.studies.compare import Measured
from cdpsim.studies.plan.bounds import Bounds
from cdpsim.studies.plan.front import OBJECTIVES, best_first, is_dominated, sorted_by
from cdpsim.studies.plan.space import Space

REFUSED, TWIN, TOO_LARGE, WORSE, SIMULATED, OPEN = FATES = (
    *("cannot be asked", "equal to another", "too large", "cannot be better", "simulated", "open"),
)
INTERRUPTED = "interrupted"
Evaluate = Callable[[Mapping[str, Any]], Measured]


@dataclass
class Search:
    """The state of a search.

    `least` has the least metrics of each candidate by its bounds, in the columns of `OBJECTIVES`: infinite for those
    that are not bound, being refused or equal to others. They are those of few ranks, or of its own if it is `closer`.
    `fate` says what has become of it. `limit` is the memory that a device may hold; None: as much as it has.
    """

    space: Space
    bounds: Bounds
    least: Floats
    closer: Flags
    fate: list[str]
    refusals: dict[int, RequestError]
    limit: float | None
    most: float  # the limit, or the memory of the largest device
    objective: str
    top: int
    seconds: float | None
    evaluate: Evaluate
    begun: float  # by the clock that `seconds` goes by
    measured: dict[int, Measured] = field(default_factory=dict)
    stopped: str = ""  # why it ended before its end

    def least_memory(self) -> "Search":
        """Return a search of all that can be asked for the one that needs least memory, whatever that is."""
        fate, least = [state if state in (REFUSED, TWIN) else OPEN for state in self.fate], self.least.copy()
        for number, state in enumerate(fate):
            if state == OPEN:
                least[number, 0] = max(least[number, 0], self.bounds.of_few_ranks(self.space.candidates[number]).step)
        limits: dict[str, Any] = {"limit": np.inf, "most": np.inf, "objective": "memory", "top": 1}
        return replace(self, fate=fate, least=least, measured={}, refusals={**self.refusals}, **limits)

    @property
    def metrics(self) -> dict[int, tuple[float, ...]]:
        """The metrics of the candidates that have been simulated and fit, in the columns of `OBJECTIVES`."""
        return {number: objectives_of(one) for number, one in self.measured.items() if self.fits(one)}

    def bound_closer(self, number: int, beaten: Callable[[int], bool] | None = None) -> bool:
        """Return whether the bound of a candidate by its own ranks is new; one that is too large by it is out.

        Where it is `beaten` by its memory, its step is not looked into.
        """
        if self.closer[number]:
            return False
        self.closer[number] = True
        found = self.bounds.of_own_ranks(self.space.candidates[number])
        if found is None:
            return False
        self.least[number, 1] = max(self.least[number, 1], found.memory)
        if self.least[number, 1] > self.most:
            self.fate[number] = TOO_LARGE
        elif beaten is None or not beaten(number):
            self.least[number, 0] = max(self.least[number, 0], found.step)
        return True

    def fits(self, measured: Measured) -> bool:
        """Return whether no device needs more memory than it may hold."""
        return measured.fits if self.limit is None else measured.memory <= self.limit


def objectives_of(measured: Measured) -> tuple[float, ...]:
    """Return the metrics of a run in the columns of `OBJECTIVES`; all candidates have the same batch.

    Steps are equal if eleven digits are: those behind depend on the order of sums and the size of quanta.
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
    candidates, bounds = space.candidates, Bounds(space.cases)
    fate = [REFUSED if one.refusal else OPEN if one.twin is None else TWIN for one in candidates]
    least = np.full((len(candidates), len(OBJECTIVES)), np.inf)
    most = _most_memory(space) if limit is None else limit
    rows, stopped = [number for number, state in enumerate(fate) if state == OPEN], ""
    least[rows] = [(0, 0, candidates[number].devices, candidates[number].staleness) for number in rows]
    try:
        for number in rows:
            found = bounds.of_few_ranks(candidates[number])
            least[number, :2] = 0 if found.memory > most else found.step, found.memory
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    refusals = {number: one.refusal for number, one in enumerate(candidates) if one.refusal}
    closer = np.zeros(len(candidates), dtype=np.bool_)
    asked = (limit, most, objective, top, seconds, evaluate, begun)
    search = Search(space, bounds, least, closer, fate, refusals, *asked, stopped=stopped)
    for number in rows:
        if least[number, 1] > most:
            fate[number] = TOO_LARGE
    return search


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
            if search.fate[number] == OPEN:
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

    def key(number: int, metrics: Sequence[float]) -> tuple[float, ...]:
        return (*(metrics[column] for column in columns), number)

    best = sorted(key(number, metrics) for number, metrics in search.metrics.items() if not (fresh and metrics[3]))
    rest = [number for number in order if fresh and search.least[number, 3]]
    left = [key(number, search.least[number].tolist()) for number in order if not (fresh and search.least[number, 3])]
    heapify(left)
    while left and not (len(best) >= top and best[top - 1] <= left[0]) and not _out_of_time(search):
        number = int(heappop(left)[-1])
        if search.bound_closer(number):
            if search.fate[number] == OPEN:
                heappush(left, key(number, search.least[number].tolist()))
            continue
        if (metrics := _simulate(search, number)) is not None:
            insort(best, key(number, metrics))
        tick(1)
    return rest + [int(each[-1]) for each in sorted(left)]


def _find_front(search: Search, order: Sequence[int], tick: Callable[[int], object]) -> list[int]:
    """Simulate candidates that no other one dominates, whatever their metrics are; return the others."""
    points = [*search.metrics.values()]

    def is_beaten(number: int) -> bool:
        return is_dominated(search.least[number], np.array(points).reshape(-1, len(OBJECTIVES)))

    rest: list[int] = []
    for place, number in enumerate(order):
        if _out_of_time(search):
            return rest + list(order[place:])
        if is_beaten(number) or (search.bound_closer(number, is_beaten) and is_beaten(number)):
            rest.append(number)
        elif search.fate[number] == OPEN and (found := _simulate(search, number)) is not None:
            points.append(found)
        tick(1)
    return rest


def _simulate(search: Search, number: int) -> tuple[float, ...] | None:
    """Simulate a candidate; return its metrics if it fits."""
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
    known = [metrics[column] for metrics in search.metrics.values()]
    return float(min([*left, *known], default=np.inf))
