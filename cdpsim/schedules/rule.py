"""Rules: how many steps older than the newest the parameters of stage j are that micro-batch i reads."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError, UnknownName, short_repr, suggestion
from cdpsim.files.writing import read_csv
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.schedules.placement import Shape

Fresh = NDArray[np.bool_]  # u[i, j] of the CDP paper
Lag = Callable[[Ints, Ints, Shape], Ints]  # of i and j: how many steps older than theta_t the parameters are
MOST_LAG = 10**9  # more steps than any run has

IntFunction = Callable[[Ints], Ints]


def _previous(version: Ints) -> Ints:
    return version - 1


def _ones(version: Ints) -> Ints:
    return 0 * version + 1


def _zeros(version: Ints) -> Ints:
    return 0 * version


def _no_average(version: Ints) -> Ints:
    return 0 * version - 1


class UpdateSources(NamedTuple):
    """The version from which the update of each step of a run starts, and the gradients that it sums."""

    base: Ints  # the version from which it starts
    first: Ints  # the first step whose gradients it takes; the last is its own


class MadeVersions(NamedTuple):
    """The versions of a stage that a run makes, 1, 2, ...: a row for each."""

    step: Ints  # in which it is made
    base: Ints  # the version from which it starts
    first: Ints  # the first step whose gradients it takes; the last is its own
    estimate: Flags  # whether it is read only: no later version starts from it
    own: Ints  # whether each worker makes its own, of its own gradients
    averaged: Ints  # the version of each worker that it takes the mean of; -1: it takes gradients


@dataclass(frozen=True)
class Versions:
    """The versions of a stage: updates make them; they are numbered 1, 2, ..., and theta_0 is the first.

    By default every step makes the next version, of the one before it and of its own gradients. A version from which no
    later one starts is an estimate: tasks may read it, but its optimizer state is dropped. Every gradient must be taken
    by exactly one version that is kept. ACCO takes each step's gradients for an estimate, and two steps' for a version:

    >>> acco = Versions(base=lambda v: v - 1 - (v - 1) % 2, sums=lambda v: 1 + (v - 1) % 2)
    >>> acco.sources(4)
    UpdateSources(base=array([0, 0, 2, 2]), first=array([0, 0, 2, 2]))
    """

    # The version from whose parameters and optimizer state a version starts.
    base: IntFunction = field(default=_previous, repr=False)
    sums: IntFunction = field(default=_ones, repr=False)  # how many steps' gradients it takes, up to its own step's
    step: IntFunction = field(default=_previous, repr=False)  # in which a version is made: one or more in each
    own: IntFunction = field(default=_zeros, repr=False)  # 1 where each worker takes its own gradients alone
    averaged: IntFunction = field(default=_no_average, repr=False)  # a version, of whose mean it is made; else -1

    @property
    def is_line(self) -> bool:
        """Whether each starts from the one before, and takes its own step's gradients."""
        return self == Versions()

    def made(self, steps: int) -> MadeVersions:
        """Return the versions that a run of `steps` steps makes."""
        step, base, sums, own, averaged = self._columns(steps + _HORIZON)
        problem = ""
        if ((base < 0) | (base > np.arange(len(base)))).any():
            problem = "a version starts from one that was made before it"
        elif ((sums < (averaged < 0)) | (sums > step + 1)).any():
            problem = "a version takes the gradients of one step or more, up to its own"
        elif (np.diff(step, prepend=-1) > 1).any() or (np.diff(step) < 0).any():
            problem = "every step makes a version or more, after those of the step before"
        if problem:
            raise RequestError("versions", f"{problem}; change base and sums alone, and keep to that")
        version, first = np.arange(1, len(step) + 1), step + 1 - sums
        estimate = ~np.isin(version, base)
        rows = step < steps
        self._refuse_missed(version[~estimate & rows], step, first)
        return MadeVersions(step[rows], base[rows], first[rows], estimate[rows], own[rows], averaged[rows])

    def _refuse_missed(self, kept: Ints, step: Ints, first: Ints) -> None:
        """Refuse versions that are kept and take gradients of other steps than those since the one kept before."""
        since = np.append(-1, step[kept[:-1] - 1])[: len(kept)] + 1
        missed = np.flatnonzero(first[kept - 1] != since)
        if len(missed):
            late = int(kept[missed[0]])
            takes, before = step[late - 1] + 1 - first[late - 1], int(kept[missed[0] - 1]) if missed[0] else 0
            problem = f"version {late} is kept and takes the gradients of {takes} steps"
            wanted = step[late - 1] + 1 - since[missed[0]]
            remedy = f"the one kept before it is version {before}, so let it take {wanted}"
            raise RequestError("versions", f"{problem}; {remedy}")

    def _columns(self, steps: int) -> list[Ints]:
        """Return the columns of the versions of `steps` steps: step, base, number of sums, own, averaged."""
        count = steps
        while True:
            version = np.arange(1, count + 1)
            functions = self.step, self.base, self.sums, self.own, self.averaged
            columns = [np.broadcast_to(np.asarray(f(version)), version.shape) for f in functions]
            if columns[0][-1] >= steps - 1 or count > 4 * steps:
                return [column[columns[0] < steps] for column in columns]
            count *= 2

    def sources(self, steps: int) -> UpdateSources | None:
        """Return the sources of a run's updates; None where each starts from the one before and sums its own step."""
        if self.is_line:
            return None
        made = self.made(steps)
        return UpdateSources(made.base, made.first)

    def equals(self, other: "Versions", version: Ints) -> bool:
        """Return whether these versions are the same by both."""
        pairs = ((self.base, other.base), (self.sums, other.sums), (self.step, other.step))
        return all((one(version) == another(version)).all() for one, another in pairs)

    def record(self) -> dict[str, list[int]]:
        """Return how far back each version starts, and how many steps it sums, for one period of both.

        Where not every step makes one version, `steps` says how many steps after the one before each version is made.
        """
        if self.is_line:
            return {}
        self.made(1)
        version = np.arange(1, 4 * _HORIZON + 1)
        columns = np.stack([version - self.base(version), self.sums(version), np.diff(self.step(version), prepend=-1)])
        for every in range(1, _HORIZON + 1):
            periods = columns[:, every : 2 * every].tolist()  # the first one may start from theta_0 more often
            if repeating_versions(*periods).equals(self, version):
                names = ("back", "sums") if set(periods[2]) == {1} else ("back", "sums", "steps")
                return dict(zip(names, periods, strict=False))
        problem = f"do not repeat within {_HORIZON}, and cannot be recorded; let them repeat sooner"
        raise RequestError("versions", problem)


_HORIZON = 64
CUSTOM = "custom"  # the name of a rule that is given as its lags


def repeating_versions(back: Sequence[int], sums: Sequence[int], steps: Sequence[int] = (1,)) -> Versions:
    """Return the versions of which `Versions.record` gave the period."""
    made = {} if set(steps) == {1} else {"step": partial(_count_steps, tuple(steps))}
    return Versions(base=partial(_go_back, tuple(back)), sums=partial(_cycle_through, tuple(sums)), **made)


def _count_steps(steps: tuple[int, ...], version: Ints) -> Ints:
    """Return in which step versions are made, by how many steps each is later than the one before it."""
    periods, number = np.divmod(version - 1, len(steps))
    step: Ints = periods * sum(steps) + np.cumsum(steps)[number] - 1
    return step


def _cycle_through(values: tuple[int, ...], version: Ints) -> Ints:
    value: Ints = np.array(values)[(version - 1) % len(values)]
    return value


def _go_back(back: tuple[int, ...], version: Ints) -> Ints:
    base: Ints = np.maximum(version - _cycle_through(back, version), 0)
    return base


@dataclass(frozen=True)
class Rule:
    """The age of the parameters that micro-batch i reads of stage j: theta_{t - lag}, theta_0 if there is none.

    In the CDP paper u[i, j] is true where the lag is 0; elsewhere it is 1. `barrier`: new parameters appear for all
    stages together, when the last micro-batch has finished its pass. `backward`: the lag of backwards that do not read
    what their forward has read. `versions` says from which version updates start, and which gradients they take.
    """

    name: str
    lag: Lag = field(repr=False)
    barrier: bool = False
    backward: Lag | None = field(default=None, repr=False)
    versions: Versions = Versions()

    def lags(self, shape: Shape) -> Ints:
        """Return the lags of forwards: a row for each micro-batch, a column for each stage."""
        return self._evaluate(self.lag, shape)

    def backward_lags(self, shape: Shape) -> Ints:
        """Return the lags of backwards, in the same form."""
        return self._evaluate(self.backward or self.lag, shape)

    def fill(self, shape: Shape) -> int:
        """Return the first training step that reads versions as old as all later steps do."""
        return _longest_lag(self, shape)

    def matrix(self, n: int, m: int) -> Fresh:
        """Return u[i, j] for n stages and m micro-batches."""
        fresh: Fresh = self.lags(Shape(n, m)) == 0
        return fresh

    def record(self, shape: Shape) -> object:
        """Return how a request records it: by its name if it is the rule of that name, else by its lags.

        Lags are rows of micro-batches with a column for each stage; a table of these and more, where that is needed.
        """
        if ALL_RULES.get(self.name) == self:
            return self.name
        lags = self.lags(shape).tolist()
        more = {"backward": self.backward_lags(shape).tolist()} if self.backward else {}
        more |= {"barrier": True} if self.barrier else {}
        more |= self.versions.record()
        return {"lags": lags} | more if more else lags

    def _evaluate(self, lag: Lag, shape: Shape) -> Ints:
        """Return a lag for all micro-batches and stages; refuse a function that gives no lags."""
        i, j = np.indices((shape.m, shape.n), dtype=np.int32)
        lags = np.asarray(lag(i, j, shape))
        problem = ""
        if lags.shape != i.shape:
            problem = f"gives lags of shape {lags.shape} instead of {i.shape}, micro-batches by stages"
        elif lags.dtype.kind not in "iu":
            problem = f"gives lags of type {lags.dtype}, which are no whole numbers"
        elif ((lags < 0) | (lags > MOST_LAG)).any():
            problem = f"gives lags from {lags.min()} to {lags.max()}"
        if problem:
            remedy = f"a lag is a whole number of steps from 0, the newest, to {MOST_LAG}"
            raise RequestError("rule", f"{self.name!r} {problem}; {remedy}")
        return lags if lags.dtype.kind == "i" else lags.astype(np.int64)


@lru_cache(maxsize=1024)  # every request of one shape asks for it
def _longest_lag(rule: Rule, shape: Shape) -> int:
    lags = int(rule.lags(shape).max())
    return lags if rule.backward is None else max(lags, int(rule.backward_lags(shape).max()))


def _newest(i: Ints, j: Ints, shape: Shape) -> Ints:
    """Return the lag of the version at stage j when a micro-batch comes: micro-batches in flight have not updated it.

    A micro-batch comes every two slots.
    """
    in_flight = shape.n - 1 - j
    lag: Ints = np.maximum(-((i - in_flight) // shape.m), 0)
    return lag


def _newest_at_first_stage(i: Ints, j: Ints, shape: Shape) -> Ints:
    return _newest(i, 0 * j, shape)


def _none(i: Ints, j: Ints, shape: Shape) -> Ints:
    return 0 * i


def _one_step(i: Ints, j: Ints, shape: Shape) -> Ints:
    return 0 * i + 1


def _one_step_while_in_flight(i: Ints, j: Ints, shape: Shape) -> Ints:
    """Return 1 where the update is not there yet when a micro-batch comes, or when its worker's first one comes.

    All micro-batches of a worker in a step read the same parameters: together they are one micro-batch of the paper.
    """
    workers = shape.side_by_side
    return (i % workers + j < workers - 1).astype(np.int32)


def _two_versions(i: Ints, j: Ints, shape: Shape) -> Ints:
    return 0 * i + 2


def _back_to_kept(version: Ints) -> Ints:
    return version - 1 - (version - 1) % 2


def _one_or_two(version: Ints) -> Ints:
    return 1 + (version - 1) % 2


def _two_a_step(version: Ints) -> Ints:
    return (version - 1) // 2


def _theta_before(version: Ints) -> Ints:
    """Return the version before the last one, theta_t, from which theta_t+1 starts; an estimate starts from theta."""
    before: Ints = np.maximum(version - 1 - version % 2, 0)
    return before


DP = Rule("dp", _none)
CDP_V1 = Rule("cdp-v1", _one_step, barrier=True)
CDP_V2 = Rule("cdp-v2", _one_step_while_in_flight)
RULES = {rule.name: rule for rule in (DP, CDP_V1, CDP_V2)}  # the rules that --rule can name for any schedule
NEWEST = Rule("newest", _newest)
VERTICAL_SYNC = Rule("vertical-sync", _newest_at_first_stage)
NAMED_RULES = (*RULES, VERTICAL_SYNC.name)
NEWEST_EACH = Rule("newest-each", _newest, backward=_none)
# Each update is beside the next interval, whose tasks read the version before it.
DPU = Rule("dpu", _one_step)
# Each update is made twice: the second time for what the next interval reads, an estimate of the version after it.
WP = Rule("wp", _two_versions, versions=Versions(step=_two_a_step, base=_theta_before))
# Every second round makes theta of its own gradients and those of the round before, which made an estimate of them.
ACCO = Rule("acco", _one_step, versions=Versions(base=_back_to_kept, sums=_one_or_two))
ALL_RULES = RULES | {rule.name: rule for rule in (NEWEST, VERTICAL_SYNC, NEWEST_EACH, DPU, WP, ACCO)}


def matrix_rule(matrix: Fresh, name: str = CUSTOM) -> Rule:
    """Return the rule of any boolean u[i, j]: a row for each micro-batch, a column for each stage."""
    return Rule(name, _fixed_lag((~matrix).astype(np.int32), name))


def lag_rule(lags: object) -> Rule:
    """Return the rule of some lags: rows of them, or a table."""
    table = lags if isinstance(lags, Mapping) else {"lags": lags}
    if unknown := set(table) - {"lags", "backward", "barrier", "back", "sums", "steps"}:
        raise RequestError("rule", f"unknown field {min(map(str, unknown))!r}; {_FORM}")
    backward = None if table.get("backward") is None else _fixed_lag(_lag_rows(table["backward"]))
    barrier = table.get("barrier", False)
    if not isinstance(barrier, bool):
        raise RequestError("rule", f"its barrier is {str(barrier)[:40]!r}; write true or false")
    versions = Versions()
    if "back" in table or "sums" in table:
        rows = [table.get("back"), table.get("sums"), *([table["steps"]] if "steps" in table else ())]
        versions = repeating_versions(*_lag_rows(rows).tolist())
        versions.made(1)
    return Rule(CUSTOM, _fixed_lag(_lag_rows(table.get("lags"))), barrier, backward, versions)


_FORM = "write rows of lags, one a micro-batch, or a table of `lags`, `backward`, `barrier`, `back`, `sums` and `steps`"


def _lag_rows(content: Any) -> Ints:
    """Return rows of whole numbers, which must be equally long, as an array."""
    rows = content if isinstance(content, (list, tuple)) else ()
    lengths = {len(row) if isinstance(row, (list, tuple)) else 0 for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise RequestError("rule", f"has no rows of lags that are equally long; {_FORM}")
    for lag in (lag for row in rows for lag in row):
        if isinstance(lag, bool) or not isinstance(lag, int) or not 0 <= lag <= MOST_LAG:
            raise RequestError("rule", f"has the lag {str(lag)[:40]!r}; write whole numbers from 0 to {MOST_LAG}")
    return np.array(rows, dtype=np.int64)


def _fixed_lag(lags: Ints, name: str = "rule") -> Lag:
    """Return the function of lags that are written out, for one shape."""
    return partial(_look_up_lag, lags, name)


def _look_up_lag(lags: Ints, name: str, i: Ints, j: Ints, shape: Shape) -> Ints:
    if lags.shape != (shape.m, shape.n):
        rows, columns = lags.shape if lags.ndim == 2 else (len(lags), 0)
        needed = f"{shape.m} micro-batches and {shape.n} stages need {shape.m} rows of {shape.n}"
        raise RequestError(name, f"the rule has {rows} rows of {columns}, but {needed}")
    lag: Ints = lags[i, j]
    return lag


def find_rule(given: object) -> Rule:
    """Return a rule: itself, by its name, by lags as `Rule.record` gives them, or from a CSV file of 0 and 1.

    In row i and column j of the file, 1 reads the fresh parameters.
    """
    if isinstance(given, Rule):
        return given
    if isinstance(given, list | tuple | Mapping):
        return lag_rule(given)
    if not isinstance(given, str | Path):
        raise RequestError("rule", f"{short_repr(given)} is no rule; give a name, a CSV file of 0 and 1, or a Rule")
    name = str(given)
    if name in ALL_RULES:
        return ALL_RULES[name]
    if not (os.path.lexists(name) or name.endswith(".csv") or "/" in name):
        hint = f"{suggestion(name, NAMED_RULES)} (or a CSV file of 0 and 1)"
        raise UnknownName("rule", f"unknown rule {short_repr(name)}; {hint}")
    rows = [[cell.strip() for cell in row] for row in read_csv(name) if row]
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if cell not in ("0", "1"):
                problem = f"row {i}, column {j} is {cell[:40]!r}; write 1 for fresh, 0 for one step older"
                raise RequestError(name, problem)
        if len(row) != len(rows[0]):
            raise RequestError(name, f"row {i} has {len(row)} columns, row 0 has {len(rows[0])}; make them equal")
    return matrix_rule(np.array(rows) == "1", name)
