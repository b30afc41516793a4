"""Which parameters: how much older than theta_t the version of stage j is that micro-batch i reads."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError, short_repr, suggestion
from cdpsim.files.writing import read_csv
from cdpsim.numeric.columns import Ints
from cdpsim.schedules.shape import Shape

Fresh = NDArray[np.bool_]  # u[i, j]
Lag = Callable[[Ints, Ints, Shape], Ints]  # of i and j: how many steps older than theta_t the parameters are
MOST_LAG = 10**9  # more steps than any run has


IntFunction = Callable[[Ints], Ints]


def _before(version: Ints) -> Ints:
    return version - 1


def _one(version: Ints) -> Ints:
    return 0 * version + 1


def _itself(step: Ints) -> Ints:
    return step


def _none_has(version: Ints) -> Fresh:
    return version < 0


class UpdateSources(NamedTuple):
    """What each step's update starts from and sums, of as many steps as a run has."""

    base: Ints  # the version that it starts from
    first: Ints  # the first step whose gradients it takes; the last is its own


@dataclass(frozen=True)
class Versions:
    """Which versions of a stage there are, numbered 1, 2, ... as they are made; theta_0 is there at the start.

    By default every step makes the next version, of the one before it and of its own gradients. A version that no later
    one starts from is an estimate: tasks may read it, but its optimizer state is dropped. Every gradient must be taken
    by exactly one version that is kept. ACCO takes each step's gradients for an estimate, and two steps' for a version:

    >>> acco = Versions(base=lambda v: v - 1 - (v - 1) % 2, sums=lambda v: 1 + (v - 1) % 2)
    >>> acco.line(4)
    Line(base=array([0, 0, 2, 2]), first=array([0, 0, 2, 2]))

    Several versions of a step, averages (`sums` 0) and versions that devices have for themselves are refused so far.
    """

    step: IntFunction = _before  # after whose last gradient a version is made
    base: IntFunction = _before  # whose parameters and optimizer state it starts from
    sums: IntFunction = _one  # how many steps' gradients it takes, up to its own step's
    newest: IntFunction = _itself  # of a step: the newest version with which a task of it could begin
    own: Callable[[Ints], Fresh] = _none_has  # whether each device has its own

    def line(self, steps: int) -> UpdateSources | None:
        """Evaluate them for a run of some steps; None where each starts from the one before and sums its own step."""
        if self == Versions():
            return None
        count = steps + _HORIZON  # as far as it takes to see which of a run's versions are kept
        version, step = np.arange(1, count + 1), np.arange(count)
        base, sums = (np.broadcast_to(np.asarray(f(version)), version.shape) for f in (self.base, self.sums))
        for wrong, problem in (
            (
                (self.step(version) != step).any() or (self.newest(step) != step).any(),
                "a step makes one version so far",
            ),
            (np.any(self.own(version)), "no device has versions of its own so far"),
            ((base < 0).any() or (base >= version).any(), "a version starts from one that was made before it"),
            (
                (sums < 1).any() or (sums > version).any(),
                "a version takes the gradients of one step or more, up to its own",
            ),
        ):
            if wrong:
                raise RequestError("versions", f"{problem}; change base and sums alone, and keep to that")
        kept = np.unique(np.append(base[base > 0], 0))
        kept = kept[kept <= steps]
        missed = np.flatnonzero(sums[kept[1:] - 1] != np.diff(kept))
        if len(missed):
            late = int(kept[missed[0] + 1])
            problem = f"version {late} is kept and takes the gradients of {sums[late - 1]} steps"
            remedy = f"the one kept before it is version {kept[missed[0]]}, so let it take {late - kept[missed[0]]}"
            raise RequestError("versions", f"{problem}; {remedy}")
        return UpdateSources(base[:steps], (version - sums)[:steps])

    def recorded(self) -> dict[str, list[int]]:
        """Give how far back each version starts, and how many steps it sums, of as many as repeat."""
        if self == Versions():
            return {}
        self.line(1)
        version = np.arange(1, 4 * _HORIZON + 1)
        columns = np.stack([version - self.base(version), self.sums(version)])
        for every in range(1, _HORIZON + 1):
            if (columns[:, every:] == columns[:, :-every]).all():
                back, sums = columns[:, :every].tolist()
                return {"back": back, "sums": sums}
        raise RequestError(
            "versions", f"do not repeat within {_HORIZON}, and cannot be recorded; let them repeat sooner"
        )


_HORIZON = 64
CUSTOM = "custom"  # the name of a rule that is given as its lags


def repeating(back: Sequence[int], sums: Sequence[int]) -> Versions:
    """Make versions of what `Versions.recorded` gave."""
    return Versions(base=partial(_minus, tuple(back)), sums=partial(_repeated, tuple(sums)))


def _repeated(values: tuple[int, ...], version: Ints) -> Ints:
    found: Ints = np.array(values)[(version - 1) % len(values)]
    return found


def _minus(back: tuple[int, ...], version: Ints) -> Ints:
    return version - _repeated(back, version)


@dataclass(frozen=True)
class Rule:
    """How old the parameters are that micro-batch i reads of stage j: theta_{t - lag}, theta_0 if there is none.

    In the CDP paper u[i, j] is true where the lag is 0; elsewhere it is 1. `barrier`: new parameters appear for all
    stages together, when the last micro-batch has finished its pass. `backward`: the lag of backwards, where they do
    not read what their forward has read. `versions` says what updates start from and take.
    """

    name: str
    lag: Lag
    barrier: bool = False
    backward: Lag | None = None
    versions: Versions = Versions()

    def lags(self, shape: Shape) -> Ints:
        """The lag of forwards: a row a micro-batch, a column a stage."""
        return self._over(self.lag, shape)

    def backward_lags(self, shape: Shape) -> Ints:
        """The lag of backwards, in the same form."""
        return self._over(self.backward or self.lag, shape)

    def fill(self, shape: Shape) -> int:
        """The first training step that reads versions as old as all later steps do."""
        return int(max(self.lags(shape).max(), self.backward_lags(shape).max()))

    def matrix(self, n: int, m: int) -> Fresh:
        """u[i, j] for n stages and m micro-batches."""
        fresh: Fresh = self.lags(Shape(n, m)) == 0
        return fresh

    def recorded(self, shape: Shape) -> object:
        """Give what a request says of it: its name where it is the rule of that name, else its lags.

        Lags are rows of micro-batches with a column for each stage; a table, where there is more to say.
        """
        if ALL_RULES.get(self.name) == self:
            return self.name
        lags = self.lags(shape).tolist()
        more = {"backward": self.backward_lags(shape).tolist()} if self.backward else {}
        more |= {"barrier": True} if self.barrier else {}
        more |= self.versions.recorded()
        return {"lags": lags} | more if more else lags

    def _over(self, lag: Lag, shape: Shape) -> Ints:
        """Evaluate a lag for all micro-batches and stages, and refuse what is none."""
        i, j = np.indices((shape.m, shape.n), dtype=np.int32)
        found = np.asarray(lag(i, j, shape))
        problem = ""
        if found.shape != i.shape:
            problem = f"gives lags of shape {found.shape} instead of {i.shape}, micro-batches by stages"
        elif found.dtype.kind not in "iu":
            problem = f"gives lags of type {found.dtype}, which are no whole numbers"
        elif ((found < 0) | (found > MOST_LAG)).any():
            problem = f"gives lags from {found.min()} to {found.max()}"
        if problem:
            remedy = f"a lag is a whole number of steps from 0, the newest, to {MOST_LAG}"
            raise RequestError("rule", f"{self.name!r} {problem}; {remedy}")
        return found if found.dtype.kind == "i" else found.astype(np.int64)


def _newest(i: Ints, j: Ints, shape: Shape) -> Ints:
    """What a stage has when a micro-batch comes, one every two slots: those in flight there have not updated it yet."""
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
    return (i + j < shape.m - 1).astype(np.int32)


DP = Rule("dp", _none)
CDP_V1 = Rule("cdp-v1", _one_step, barrier=True)
CDP_V2 = Rule("cdp-v2", _one_step_while_in_flight)
RULES = {rule.name: rule for rule in (DP, CDP_V1, CDP_V2)}
# Rules of their own that schedules have, of which none is given by --rule.
NEWEST = Rule("newest", _newest)
VERTICAL_SYNC = Rule("vertical-sync", _newest_at_first_stage)
NEWEST_EACH = Rule("newest-each", _newest, backward=_none)
ALL_RULES = RULES | {rule.name: rule for rule in (NEWEST, VERTICAL_SYNC, NEWEST_EACH)}


def matrix_rule(matrix: Fresh, name: str = "custom") -> Rule:
    """Any boolean u[i, j], one row a micro-batch, one column a stage."""
    return Rule(name, _listed((~matrix).astype(np.int32), name))


def recorded_rule(said: object) -> Rule:
    """Make the rule of which `Rule.recorded` gave the name, or the lags."""
    return ALL_RULES[said] if isinstance(said, str) and said in ALL_RULES else lag_rule(said)


def lag_rule(said: object) -> Rule:
    """Make a rule of its lags: rows of them, or a table."""
    table = said if isinstance(said, Mapping) else {"lags": said}
    if unknown := set(table) - {"lags", "backward", "barrier", "back", "sums"}:
        raise RequestError("rule", f"unknown field {min(map(str, unknown))!r}; {_LAGS}")
    backward = None if table.get("backward") is None else _listed(_rows(table["backward"]))
    barrier = table.get("barrier", False)
    if not isinstance(barrier, bool):
        raise RequestError("rule", f"its barrier is {str(barrier)[:40]!r}; write true or false")
    versions = Versions()
    if "back" in table or "sums" in table:
        versions = repeating(*_rows([table.get("back"), table.get("sums")]).tolist())
        versions.line(1)
    return Rule(CUSTOM, _listed(_rows(table.get("lags"))), barrier, backward, versions)


_LAGS = "write rows of lags, one a micro-batch, or a table of `lags`, `backward`, `barrier`, `back` and `sums`"


def _rows(said: Any) -> Ints:
    """Read rows of whole numbers, which are equally long."""
    rows = said if isinstance(said, (list, tuple)) else ()
    wide = {len(row) if isinstance(row, (list, tuple)) else 0 for row in rows}
    if len(wide) != 1 or 0 in wide:
        raise RequestError("rule", f"has no rows of lags that are equally long; {_LAGS}")
    for lag in (lag for row in rows for lag in row):
        if isinstance(lag, bool) or not isinstance(lag, int) or not 0 <= lag <= MOST_LAG:
            raise RequestError("rule", f"has the lag {str(lag)[:40]!r}; write whole numbers from 0 to {MOST_LAG}")
    return np.array(rows, dtype=np.int64)


def _listed(lags: Ints, name: str = "rule") -> Lag:
    """A lag that is written out: it goes with one shape."""
    return partial(_as_listed, lags, name)


def _as_listed(lags: Ints, name: str, i: Ints, j: Ints, shape: Shape) -> Ints:
    if lags.shape != (shape.m, shape.n):
        rows, columns = lags.shape if lags.ndim == 2 else (len(lags), 0)
        needed = f"{shape.m} micro-batches and {shape.n} stages need {shape.m} rows of {shape.n}"
        raise RequestError(name, f"the rule has {rows} rows of {columns}, but {needed}")
    own: Ints = lags[i, j]
    return own


def find_rule(name: str | Path) -> Rule:
    """A rule by its name, or from a CSV file of 0 and 1 (row i, column j: 1 reads the fresh parameters)."""
    if not isinstance(name, str | Path):
        raise RequestError("rule", f"{short_repr(name)} is no rule; give a name, a CSV file of 0 and 1, or a Rule")
    name = str(name)
    if name in RULES:
        return RULES[name]
    if not (os.path.lexists(name) or name.endswith(".csv") or "/" in name):
        raise RequestError(
            "rule", f"unknown rule {short_repr(name)}; {suggestion(name, RULES)} (or a CSV file of 0 and 1)"
        )
    rows = [row for row in read_csv(name) if row]
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if cell.strip() not in ("0", "1"):
                raise RequestError(
                    name, f"row {i}, column {j} is {cell[:40]!r}; write 1 for fresh, 0 for one step older"
                )
        if len(row) != len(rows[0]):
            raise RequestError(name, f"row {i} has {len(row)} columns, row 0 has {len(rows[0])}; make them equal")
    return matrix_rule(np.array([[cell.strip() == "1" for cell in row] for row in rows]), name)
