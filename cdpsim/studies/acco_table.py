"""Table 1 of the ACCO paper, three ways: as printed, by its formula, and measured on a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from cdpsim.api import simulate
from cdpsim.cluster import Cluster
from cdpsim.errors import whole_number
from cdpsim.files.notes import progress
from cdpsim.files.tables import Column
from cdpsim.model import Model, Stage

CDP_PAPER, ACCO_PAPER = TABLED_PAPERS = "cdp", "acco"  # each has a Table 1
WORKERS, PARAMETERS = 64, 7_500_000_000  # of the printed numbers
_NUMBER, _STATE = 2, 12  # bytes of a number; of Adam's state of a parameter in mixed precision, the paper's K


class Method(NamedTuple):
    """A row as the paper prints it: its formula, and gigabytes of 10^9 bytes."""

    name: str
    formula: str
    printed: int
    numbers: int  # that each parameter has in two bytes: its own, its gradient, and what the method needs beside
    is_split: bool  # whether each worker has a share of the optimizer's state


METHODS = {
    "ddp": Method("DDP", "(2+2+K)Ψ", 120, 2, False),
    "zero-1": Method("ZeRO-1", "(2+2+K/N)Ψ", 31, 2, True),
    "slowmo": Method("SlowMo", "(2+2+2×2+K)Ψ", 150, 4, False),
    "co2": Method("CO2", "(2+2+4×2+K)Ψ", 180, 6, False),
    "acco": Method("ACCO", "(2+2+2+K/N)Ψ", 46, 3, True),
}


@dataclass(frozen=True)
class MethodMemory:
    """The bytes of a method on each worker: by formula, measured, and measured with all that has to be held."""

    schedule: str
    method: Method
    formula: Fraction
    simulated: int
    held: int
    printed: int | None  # in whole gigabytes; None of other workers or parameters than the paper's

    @property
    def agrees(self) -> bool:
        """Whether the formula is what was measured, but for parts of a byte, and if rounded what is printed."""
        whole = self.printed is None or round(self.formula / 10**9) == self.printed
        return whole and 0 <= self.simulated - self.formula < 1


def _size_column(name: str) -> Column:
    return Column(name, lambda row: float(getattr(row, name)), unit="B", digits=7)


METHOD_COLUMNS = (
    Column("method", lambda row: row.method.name),
    Column("schedule"),
    Column("paper", lambda row: row.method.formula),
    Column(
        "printed",
        lambda row: row.printed and row.printed * 10**9,
        words=lambda row: row.printed and f"{row.printed} GB",
    ),
    *map(_size_column, ("formula", "simulated", "held")),
    Column("agree", lambda row: row.agrees, heading=""),
)


def acco_table1(workers: int = WORKERS, parameters: int = PARAMETERS) -> list[MethodMemory]:
    """Measure the memory of each method of the ACCO paper's Table 1 on runs, beside its formula.

    >>> [row.method.name for row in acco_table1(8, 1000) if not row.agrees]
    []
    """
    workers = whole_number("n", workers, at_least=2)
    parameters = whole_number("parameters", parameters, at_least=1)
    return list(_rows(workers, parameters))


def _rows(workers: int, parameters: int) -> Iterator[MethodMemory]:
    as_printed = (workers, parameters) == (WORKERS, PARAMETERS)
    for schedule in progress(tuple(METHODS), "table1"):
        method = METHODS[schedule]
        state = Fraction(_STATE * parameters, workers if method.is_split else 1)
        formula = _NUMBER * method.numbers * parameters + state
        printed = method.printed if as_printed else None
        simulated = _peak(schedule, workers, parameters)
        held = _peak(schedule, workers, parameters, runtime="held")
        yield MethodMemory(schedule, method, formula, simulated, held, printed)


def _peak(schedule: str, workers: int, parameters: int, **how: Any) -> int:
    """Return the most bytes that a worker has, of a model whose activations weigh nothing."""
    stage = Stage(forward=1.0, backward=2.0, update=1.0, parameters=_NUMBER * parameters)
    run = simulate(
        schedule,
        model=Model(precision="bf16", stages=(stage,)),
        cluster=Cluster(),
        replicas=workers,
        optimizer="adam",
        mixed_precision=True,
        ignore_memory=True,
        **how,
    )
    return int(run.peaks[:, -1].max())
