"""The search of a plan: candidates are simulated in the order of their bounds, until no other one can be better."""

from collections.abc import Iterable
from time import monotonic
from typing import Any

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.notes import ticker
from cdpsim.numeric.paths import expect_many_runs
from cdpsim.studies.compare import evaluate
from cdpsim.studies.equal_shapes import team_of
from cdpsim.studies.plan.bounds import Bounds
from cdpsim.studies.plan.space import OPEN, REFUSED, SIMULATED, TOO_LARGE, WORSE, Candidate, Point, Space
from cdpsim.studies.plan.wanted import Wanted

INTERRUPTED = "interrupted"
Merged = list[tuple[Candidate, list[Candidate]]]  # candidates, each with the others that equal it in every figure
_FEW_CANDIDATES, _FEW_SECONDS = 500, 10  # for fewer, compiled code is not worth loading
_ENOUGH_STEPS = 12  # of a run: its makespan, which plans do not show, follows from that of fewer
_LAST_TRIES = 1.5  # seconds behind its end in which a search without a row looks for one that fits


class Search:
    """The state of a search; `stopped` says why it ended before its end, `smallest` needs least memory if none fits."""

    def __init__(self, space: Space, wanted: Wanted) -> None:
        self.space, self.wanted, self.stopped = space, wanted, ""
        self.smallest: Candidate | None = None
        self._asked = [one for one in space.candidates if not one.refusal]
        sizes = [case.cluster.memory_bytes(case.cluster.count or 1).max() for case in space.cases]
        self._most = float(max(sizes, default=0.0)) if wanted.memory is None else wanted.memory
        self._bounds = Bounds(space.cases, self._most)
        self._tick: Any = ticker(2 * len(self._asked), "plan")

    def run(self) -> "Search":
        """Simulate candidates until the best are known, and then the front."""
        seconds = self.wanted.seconds
        many = len(self._asked) > _FEW_CANDIDATES and (seconds is None or seconds >= _FEW_SECONDS)
        try:
            with expect_many_runs(many):
                self._search()
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        finally:
            self._tick(0)
        for one in [] if self.stopped else self._open():
            one.fate = WORSE
        return self

    def _search(self) -> None:
        for share in (0.5, 1.0):  # of the time, up to which bounds are looked for
            self._bound_all(share)
            self._find_best()
            if all(one.bounded for one in self._asked):
                break
        self._find_front()
        if not self.fitting and not self.wanted.is_late():
            self._find_smallest()
        if self.wanted.is_late() or not self.space.complete:
            self.stopped = f"stopped after {self.wanted.seconds:g} s"
            self._find_any()

    @property
    def fitting(self) -> list[Candidate]:
        """The candidates that have been simulated and fit."""
        return [one for one in self._asked if one.fits]

    def best(self, *, stale: bool) -> Merged:
        """Return the best rows that are known, with staleness or without."""
        found = (one for one in self.fitting if (one.staleness > 0) == stale)
        return merged(sorted(found, key=lambda one: one.point.key(self.wanted.objective)), self.wanted.top)

    def front(self) -> Merged:
        """Return the candidates that no other one dominates, the fastest first."""
        points = self._points_of_front()
        return merged(sorted((one for one in self.fitting if one.point in points), key=lambda one: one.point))

    def _points_of_front(self) -> set[Point]:
        points: set[Point] = set()
        for one in sorted({one.point for one in self.fitting}):  # none is dominated by a later one
            if not any(point.dominates(one) for point in points):
                points.add(one)
        return points

    def best_left(self) -> float:
        """Return the best value of the objective that a candidate has, or that one could have that is open."""
        points = [one.least for one in self._asked if one.fate == OPEN] + [one.point for one in self.fitting]
        values = (point.key(self.wanted.objective)[0] for point in points)
        return min(values, default=float("inf")) if self.space.complete else 0.0

    def _open(self) -> list[Candidate]:
        """Return the candidates with bounds that may be simulated, the best bounds first."""
        found = (one for one in self._asked if one.bounded and one.fate == OPEN)
        return sorted(found, key=lambda one: one.least.key(self.wanted.objective))

    def _passes(self, one: Candidate) -> int:
        return self.space.cases[one.case].shape.n * self.space.cases[one.case].shape.m

    def _bound_all(self, share: float) -> None:
        """Find the bounds of all candidates, those of small programs first."""
        for one in sorted((one for one in self._asked if not one.bounded), key=self._passes):
            if self.wanted.is_late(share):
                return
            step, memory = self._bounds.of(one.case, one.options)
            one.bounded, one.least = True, one.least._replace(step=step, memory=memory)
            if one.fate == OPEN and memory > self._most:
                one.fate = TOO_LARGE
            self._tick(1)

    def _find_best(self) -> None:
        """Simulate candidates until the first rows without staleness are known, and then the better ones with it."""
        objective, top = self.wanted.objective, self.wanted.top
        for stale in (False, True):
            rows, ahead = self.best(stale=stale), self.best(stale=False)[:1] if stale else []
            for one in self._open():
                last = rows[-1][0].point.key(objective) if len(rows) >= top else (float("inf"),)
                least = one.least.key(objective)
                beaten = ahead and ahead[0][0].point.key(objective)[0] <= least[0]
                if last <= least or beaten or self.wanted.is_late():
                    break
                if (one.staleness > 0) == stale and self._simulate(one) and one.point.key(objective) < last:
                    rows = self.best(stale=stale)

    def _find_front(self) -> None:
        """Simulate candidates that no other one dominates, whatever their metrics are."""
        points = self._points_of_front()
        for one in self._open():
            if self.wanted.is_late():
                return
            if not any(point.dominates(one.least) for point in points) and self._simulate(one):
                points.add(one.point)

    def _find_smallest(self) -> None:
        """Simulate candidates that are too large until no other one can need less memory."""
        for one in sorted(self._asked, key=lambda one: one.least.memory):
            least = self.smallest.point.memory if self.smallest else float("inf")
            if self.wanted.is_late() or least <= one.least.memory:
                break
            if not one.measured and one.fate != REFUSED:
                self._simulate(one)
            if one.measured and one.point.memory < least:
                self.smallest = one

    def _find_any(self) -> None:
        """Simulate candidates until one fits: those that split most first."""

        def size(one: Candidate) -> tuple[float, ...]:
            shape, whole = self.space.cases[one.case].shape, one.options.get("recompute", "none") == "none"
            places = shape.parts // shape.chunks * one.options.get("shard", 1) * team_of(one.options)
            return (one.staleness > 0, whole, -places, -one.options.get("zero", 0), self._passes(one))

        begun = monotonic()
        for one in sorted((one for one in self._asked if one.fate == OPEN), key=size):
            if self.fitting or monotonic() - begun > _LAST_TRIES:
                break
            self._simulate(one)

    def _simulate(self, one: Candidate) -> bool:
        """Simulate a candidate; return whether it fits."""
        try:
            limits = {"steps": _ENOUGH_STEPS, "max_memory": self.wanted.max_memory}
            one.measured = evaluate(**{**limits, **one.options})
        except (RequestError, Stalled) as error:
            one.refusal = error if isinstance(error, RequestError) else RequestError("stalled", str(error))
            one.fate = REFUSED
            return False
        finally:
            self._tick(1)
        one.fate = SIMULATED if one.fate == OPEN else one.fate
        one.fits = one.measured.fits if self.wanted.memory is None else one.measured.memory <= self.wanted.memory
        return one.fits


def merged(candidates: Iterable[Candidate], most: int | None = None) -> Merged:
    """Return the first candidates that differ, each with the later ones that equal it in every figure."""
    kept: Merged = []
    for one in candidates:
        same = next((others for first, others in kept if first.equals(one)), None)
        if same is not None:
            same.append(one)
        elif len(kept) != most:
            kept.append((one, []))
    return kept
