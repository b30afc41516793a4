"""The search of a plan: candidates are simulated in the order of their bounds, until no other one can be better."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.progress import ticker
from cdpsim.numeric.paths import expect_many_runs
from cdpsim.studies.compare import Measured
from cdpsim.studies.evaluate import evaluate
from cdpsim.studies.plan.bounds import Bounds
from cdpsim.studies.plan.space import Candidate, Space
from cdpsim.studies.plan.wanted import OBJECTIVES, Wanted

REFUSED, TOO_LARGE, WORSE, SIMULATED, OPEN = FATES = (
    *("cannot be asked", "too large", "cannot be better", "simulated", "open"),
)
INTERRUPTED = "interrupted"
_FEW_CANDIDATES, _FEW_SECONDS = 500, 10  # for fewer, compiled code is not worth loading
_ENOUGH_STEPS = 12  # of a run: its makespan, which plans do not show, follows from that of fewer
_NEARLY = 1e-3  # the share by which figures of rows differ that count as one
_COMPARED = (
    "step",
    "memory",
    "devices",
    "staleness",
    "sent",
)  # figures in which rows that count as one are equal
_LAST_TRIES = 1.5  # seconds behind its end in which a search without a row looks for one that fits


class Point(NamedTuple):
    """The figures of a candidate, each of which is the better the less it is."""

    step: float
    memory: float
    devices: int
    staleness: float

    def key(self, objective: str) -> tuple[float, ...]:
        """Return the figures in the order in which an objective sorts."""
        first = OBJECTIVES[objective]
        return (getattr(self, first), *(value for name, value in self._asdict().items() if name != first))

    def dominates(self, other: "Point") -> bool:
        """Return whether it is at least as good in all figures, and better in one."""
        return self != other and all(mine <= its for mine, its in zip(self, other, strict=True))


def point_of(measured: Measured) -> Point:
    """Return the figures of a run; all candidates have the same batch.

    Steps are equal if eleven digits are: those behind depend on the order of sums and the size of ticks.
    """
    step = float(f"{float(measured.step):.11g}")
    return Point(step, float(measured.memory), measured.devices, measured.staleness)


@dataclass
class Search:
    """The state of a search.

    `least` has the least figures of each candidate that can be asked, with a step and a memory of 0 until it is
    `bounded`, and `fate` the word for what has become of each. `stopped` says why the search ended before its end.
    """

    space: Space
    wanted: Wanted
    least: dict[int, Point] = field(init=False)
    fate: list[str] = field(init=False)
    refusals: dict[int, RequestError] = field(init=False)
    bounded: set[int] = field(default_factory=set)
    measured: dict[int, Measured] = field(default_factory=dict)
    points: dict[int, Point] = field(default_factory=dict)  # of those that have been simulated and fit
    smallest: int | None = None  # where none fits, the one that needs least memory
    stopped: str = ""

    def __post_init__(self) -> None:
        every = [*enumerate(self.space.candidates)]
        self.refusals = {number: one.refusal for number, one in every if one.refusal}
        self.fate = [REFUSED if one.refusal else OPEN for _, one in every]
        self.least = {k: Point(0.0, 0.0, one.devices, one.staleness) for k, one in every if not one.refusal}
        self._bounds = Bounds(self.space.cases)
        sizes = [case.cluster.memory_bytes(case.cluster.count or 1).max() for case in self.space.cases]
        self._most = float(max(sizes, default=0.0)) if self.wanted.memory is None else self.wanted.memory
        self._tick: Callable[[int], object] = lambda added: None

    def run(self) -> "Search":
        """Simulate candidates until the best are known, also of those without staleness, and then the front."""
        self._tick = ticker(2 * len(self.least), "plan")
        many = len(self.least) > _FEW_CANDIDATES and (self.wanted.seconds or _FEW_SECONDS) >= _FEW_SECONDS
        try:
            with expect_many_runs(many):
                self._search()
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        finally:
            self._tick(0)
        if not self.stopped:
            self.fate = [WORSE if fate == OPEN else fate for fate in self.fate]
        return self

    def _search(self) -> None:
        for share in (0.5, 1.0):  # of the time, up to which bounds are looked for
            self._bound_all(share)
            self._find_best()
            if len(self.bounded) == len(self.least):
                break
        self._find_front()
        if not self.points and not self.wanted.is_late():
            self._find_smallest()
        if self.wanted.is_late() or not self.space.complete:
            self.stopped = f"stopped after {self.wanted.seconds:g} s"
            self._find_any()

    def best(self, *, stale: bool) -> list[tuple[int, list[int]]]:
        """Return the best rows known with staleness or without, each with the others that equal it in every figure."""
        numbers = [number for number, point in self.points.items() if (point.staleness > 0) == stale]
        return self.merged(sorted(numbers, key=lambda number: self._key(number, self.points)), self.wanted.top)

    def merged(self, numbers: Iterable[int], most: int | None = None) -> list[tuple[int, list[int]]]:
        """Return candidates in their order, each with the later ones that equal it in every figure."""
        kept: list[tuple[int, list[int]]] = []
        for number in numbers:
            one = self.measured[number]
            same = next((others for first, others in kept if _are_equal(self.measured[first], one)), None)
            if same is not None:
                same.append(number)
            elif len(kept) != most:
                kept.append((number, []))
        return kept

    def front(self) -> list[int]:
        """Return the candidates that no other one dominates, the fastest first."""
        every = {*self.points.values()}
        found = [number for number, one in self.points.items() if not any(other.dominates(one) for other in every)]
        return sorted(found, key=lambda number: (*self.points[number], number))

    def best_left(self) -> float:
        """Return the best value of the objective that a candidate has, or that one could have that is open."""
        left = [self.least[number] for number, fate in enumerate(self.fate) if fate == OPEN]
        known = [*left, *self.points.values()] if self.space.complete else [Point(0.0, 0.0, 0, 0.0)]
        return min((point.key(self.wanted.objective)[0] for point in known), default=float("inf"))

    def fits(self, measured: Measured) -> bool:
        """Return whether no device needs more memory than it may hold."""
        return measured.fits if self.wanted.memory is None else measured.memory <= self.wanted.memory

    def _key(self, number: int, points: Mapping[int, Point]) -> tuple[float, ...]:
        return (*points[number].key(self.wanted.objective), number)

    def _candidate(self, number: int) -> Candidate:
        return self.space.candidates[number]

    def _passes(self, number: int) -> int:
        shape = self.space.cases[self._candidate(number).case].shape
        return shape.n * shape.m

    def _open(self) -> list[int]:
        """Return the candidates with bounds that may be simulated, the best bounds first."""
        numbers = (number for number in self.bounded if self.fate[number] == OPEN)
        return sorted(numbers, key=lambda number: self._key(number, self.least))

    def _bound_all(self, share: float) -> None:
        """Find the bounds of all candidates, those of small programs first."""
        for number in sorted(self.least.keys() - self.bounded, key=lambda number: (self._passes(number), number)):
            if self.wanted.is_late(share):
                return
            self.bounded.add(number)
            one = self._candidate(number)
            step, memory = self._bounds.of(one.case, one.options)
            if self.fate[number] == OPEN:
                self.least[number] = Point(step, memory, one.devices, one.staleness)
                self.fate[number] = TOO_LARGE if memory > self._most else OPEN
            self._tick(1)

    def _find_best(self) -> None:
        """Simulate candidates until the first rows without staleness are known, and then the better ones with it."""
        for stale in (False, True):
            rows, first = self.best(stale=stale), self.best(stale=False)[:1] if stale else []
            for number in self._open():
                least = self._key(number, self.least)
                done = len(rows) >= self.wanted.top and self._key(rows[-1][0], self.points) <= least
                useless = first and self._key(first[0][0], self.points)[0] <= least[0]
                if done or useless or self.wanted.is_late():
                    break
                if (self.least[number].staleness > 0) == stale and self._simulate(number):
                    last = self._key(rows[-1][0], self.points) if len(rows) >= self.wanted.top else (float("inf"),)
                    rows = self.best(stale=stale) if self._key(number, self.points) < last else rows

    def _find_front(self) -> None:
        """Simulate candidates that no other one dominates, whatever their figures are."""
        for number in self._open():
            if self.wanted.is_late():
                return
            if not any(point.dominates(self.least[number]) for point in self.points.values()):
                self._simulate(number)

    def _find_smallest(self) -> None:
        """Simulate candidates that are too large until no other one can need less memory."""
        for number in sorted(self.least, key=lambda number: (self.least[number].memory, number)):
            known = [one.memory for one in self.measured.values()]
            if self.wanted.is_late() or (known and min(known) <= self.least[number].memory):
                break
            if number not in self.measured and number not in self.refusals:
                self._simulate(number)
        self.smallest = min(self.measured, key=lambda k: (self.measured[k].memory, k), default=None)

    def _find_any(self) -> None:
        """Simulate candidates until one fits: those that split most first."""

        def size(number: int) -> tuple[float, ...]:
            one = self._candidate(number)
            shape, whole = self.space.cases[one.case].shape, one.options.get("recompute", "none") == "none"
            places = shape.parts // shape.chunks * one.options.get("shard", 1)
            return (one.staleness > 0, whole, -places, -one.options.get("zero", 0), self._passes(number), number)

        begun = monotonic()
        for number in sorted((number for number in self.least if self.fate[number] == OPEN), key=size):
            if self.points or monotonic() - begun > _LAST_TRIES:
                break
            self._simulate(number)

    def _simulate(self, number: int) -> bool:
        """Simulate a candidate; return whether it fits."""
        try:
            limits = {"steps": _ENOUGH_STEPS, "max_memory": self.wanted.max_memory}
            measured = evaluate(**{**limits, **self._candidate(number).options})
        except (RequestError, Stalled) as error:
            self.refusals[number] = error if isinstance(error, RequestError) else RequestError("stalled", str(error))
            self.fate[number] = REFUSED
            return False
        finally:
            self._tick(1)
        self.measured[number] = measured
        if self.fate[number] == OPEN:
            self.fate[number] = SIMULATED
        if self.fits(measured):
            self.points[number] = point_of(measured)
        return number in self.points


def _are_equal(kept: Measured, other: Measured) -> bool:
    return all(abs(other.value(name) - kept.value(name)) <= _NEARLY * abs(kept.value(name)) for name in _COMPARED)
