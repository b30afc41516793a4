"""Table 1 of the paper, three ways: as printed, exact, and measured on the trace of a run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cdpsim.api import simulate
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, true_or_false, whole_number
from cdpsim.files.notes import progress
from cdpsim.files.tables import BOOKTABS, Column, PrintedTable, as_json, latex_text
from cdpsim.files.units import counted
from cdpsim.model import Model, Stage
from cdpsim.program import Category, Content
from cdpsim.program.collectives import DEFAULT
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES
from cdpsim.trace.metrics import communication, memory

if TYPE_CHECKING:
    import pandas as pd

QUANTITIES = ("activations", "parameters", "gradient_volume", "parameter_volume", "boundary_volume", "rounds", "gpus")
STATED_COLLECTIVES = ("recursive-doubling", "ring", "tree")  # whose rounds spec section 4 states
# The cells as the paper prints them, in the order of `QUANTITIES`; empty where the paper prints nothing.
PRINTED = {
    "single-dp": ("NBΨA", "NΨP", "", "", "", "", ""),
    "single-cdp": ("(N+1)/2 BΨA", "(N+1)/2 ΨP", "", "", "", "", ""),
    "multi-dp": ("BΨA", "ΨP", "ΨP", "", "", "O(log N)", "N"),
    "multi-cdp": ("BΨA", "ΨP", "ΨP", "", "", "O(1)", "N"),
    "mp-dp": ("BΨA/N", "ΨP/N", "ΨP", "", "BΨint", "O(log N)", "N²"),
    "mp-cdp": ("BΨA/N", "ΨP/N", "ΨP/2", "", "BΨint", "O(1)", "N(N+1)/2"),
    "pp-cdp": ("BΨA", "ΨP/N", "", "", "BΨint", "O(1)", "N"),
    "zero-dp": ("BΨA", "ΨP/N", "ΨP", "", "", "O(log N)", "N"),
    "zero-cdp": ("BΨA", "ΨP/N", "ΨP", "", "", "O(1)", "N"),
}
_SHARED = "parameters shared by all micro-batches; early stages of CDP need two versions at once"
# The reasons for exact cells that differ from the printed ones, by quantity, or by schedule and quantity.
_FOOTNOTES: dict[object, str] = {
    "gradient_volume": "the paper prints the leading term; k devices exchange k-1 copies",
    "boundary_volume": "one stage has no boundary",
    "rounds": "one device sends no messages",
    ("single-dp", "parameters"): _SHARED,
    ("single-cdp", "parameters"): _SHARED,
    ("zero-dp", "parameters"): "a device holds its own stage and the one gathered for use",
    ("zero-dp", "gradient_volume"): (
        "the paper says 1.5 ΨP at most: the reduction of gradients, and two broadcasts of parameters beside it"
    ),
    ("zero-cdp", "gradient_volume"): "gradients travel inside the state, which moves 2(N-1) times per micro-batch",
}


def printed_value(text: str, n: int) -> Fraction | int | None:
    """Return the number that a printed cell stands for, in its column's unit; None for O(log N) and an empty cell.

    >>> printed_value("(N+1)/2 ΨP", 4)
    Fraction(5, 2)
    """
    values: dict[str, Fraction | int] = {"BΨA": 1, "ΨP": 1, "BΨint": 1, "O(1)": 1, "N": n, "NBΨA": n, "NΨP": n}
    values |= {"N²": n * n, "N(N+1)/2": n * (n + 1) // 2, "ΨP/2": Fraction(1, 2)}
    values |= {f"{unit}/N": Fraction(1, n) for unit in ("BΨA", "ΨP")}
    values |= {f"(N+1)/2 {unit}": Fraction(n + 1, 2) for unit in ("BΨA", "ΨP")}
    return values.get(text)


def exact_cells(schedule: str, n: int, collective: str, shared_parameters: bool) -> dict[str, Fraction]:
    """Return the exact cells of a row, by the formulas of spec section 4; no run feeds them, and they feed no run."""
    sends = int(n > 1)  # one stage on one device sends nothing
    share, passed = Fraction(1, n), Fraction(n - 1, n)
    log = (n - 1).bit_length()
    power = 1 << (n.bit_length() - 1)
    all_reduce = {
        "ring": 2 * (n - 1),
        "tree": 2 * log,
        "recursive-doubling": log if n == power else n.bit_length() + 1,
    }[collective]
    single_cdp = Fraction(5 * n // 3, n) if shared_parameters else Fraction(n + 1, 2)
    rows: dict[str, tuple[Fraction | int, ...]] = {
        "single-dp": (n, 1 if shared_parameters else n, 0, 0, 0, 0, 1),
        "single-cdp": (Fraction(n + 1, 2), single_cdp, 0, 0, 0, 0, 1),
        "multi-dp": (1, 1, passed, passed, 0, all_reduce, n),
        "multi-cdp": (1, 1, passed, passed, 0, sends, n),
        "mp-dp": (share, share, passed, passed, sends, all_reduce, n * n),
        "mp-cdp": (share, share, passed / 2, passed / 2, sends, sends, n * (n + 1) // 2),
        "pp-cdp": (1, share, 0, 0, sends, sends, n),
        "zero-dp": (1, (1 + sends) * share, passed, 2 * passed, 0, 2 * log, n),
        "zero-cdp": (1, share, 0, 2 * passed, 0, sends, n),
    }
    return {quantity: Fraction(value) for quantity, value in zip(QUANTITIES, rows[schedule], strict=True)}


def simulated_cells(run: Run, shared_parameters: bool) -> dict[str, Fraction]:
    """Return the simulated cells of a row, measured on a run under unit costs."""
    program, start, end = run.program, run.start, run.end
    window = memory.steady_window(program, start, end)
    curves = memory.memory_by_category(program, start, end)

    def most(category: Category) -> Fraction:
        """Return the peak of a category on one device in the steady window."""
        rows = curves["category"] == category
        return Fraction(memory.peak_within(curves["time"][rows], curves["size"][rows], *window), program.n)

    activations = most(Category.ACTIVATIONS)
    if run.request.schedule.placement.lanes:  # a copy of a stage for each micro-batch, as long as its activations
        parameters = most(Category.PARAMETERS) if shared_parameters else activations
    else:  # each stage once, however many of its versions are kept
        _, time, stages = memory.live_stages(program, start, end)
        parameters = Fraction(memory.peak_within(time, stages, *window), program.n)
    return {
        "activations": activations,
        "parameters": parameters,
        **{f"{name}_volume": volume for name, volume in communication.volumes(program).items()},
        "rounds": Fraction(communication.rounds_between_slots(program, run.costs.rounds, start, end)),
        "gpus": Fraction(len(np.unique(program.tasks.device))),
    }


def measure_beside(run: Run) -> dict[str, Any]:
    """Return metrics that the table leaves out: versions kept, optimizer states that move, bytes on the wire.

    `versions` is the most of one stage that a device holds; `optimizer_moves` counts messages per training step;
    `wire_volume` is gradients, parameters and states per micro-batch and step in units of the model's parameters.
    """
    program, messages = run.program, run.program.messages
    step = communication.full_version(program) - 1
    live = memory.live_versions(program, run.start, run.end)
    model_sent = (messages.step == step) & (messages.content >= Content.GRADIENT)
    wire = sum(communication.bytes_sent(program, run.costs, np.flatnonzero(model_sent)), Fraction())
    moves = model_sent & (messages.content == Content.STATE) & (messages.versions == 0)
    return {
        "schedule": run.request["schedule"],
        "versions": int(live["versions"].max(initial=0)),
        "optimizer_moves": int(moves.sum()),
        "wire_volume": wire / (int(program.counts[step]) * program.n),
    }


@dataclass(frozen=True)
class Table1:
    """Table 1 for n stages and micro-batches: nine rows in the paper's order, and metrics beside each.

    Without runs, cells have no simulated value, rows do not say whether that agrees, and `beside` is empty.
    """

    n: int
    collective: str
    rows: list[dict[str, Any]]
    beside: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]

    def __str__(self) -> str:
        return self.printed().rstrip("\n")

    def __repr__(self) -> str:
        differ = [row["schedule"] for row in self.rows if not row.get("agree", True)]
        words = f"simulated, {', '.join(differ)} differ" if differ else "simulated as exact"
        return f"Table1(N = {self.n}: {counted(len(self), 'schedule')}, {words if self.is_simulated else 'exact'})"

    def _repr_html_(self) -> str:
        return "".join(block._repr_html_() for block in self._blocks())

    def printed(self, form: str = "text") -> str:
        """Return the table in one of `FORMATS`; for people it is a table for each block of quantities."""
        if form == "json":
            content = {"n": self.n, "collective": self.collective, "rows": self.rows}
            return as_json(content | ({"beside": self.beside} if self.is_simulated else {}))
        if form == "csv":
            return self._whole().printed(form)
        first, *others = (block.printed(form) for block in self._blocks())
        return "\n".join([first, *(other.removeprefix(BOOKTABS) for other in others)])

    def frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame of pandas, with a column for each value of a quantity: `rounds_exact`."""
        return self._whole().frame()

    @property
    def values(self) -> tuple[str, ...]:
        """The names of a cell's values: paper, exact and perhaps simulated."""
        return tuple(self.rows[0][QUANTITIES[0]])

    @property
    def is_simulated(self) -> bool:
        """Whether it has simulated values."""
        return "simulated" in self.values

    def _whole(self) -> PrintedTable:
        cells = [self._column(quantity, value) for quantity in QUANTITIES for value in self.values]
        return PrintedTable([_SCHEDULE, Column("rule"), *cells, *[_AGREE] * self.is_simulated], self.rows)

    def _blocks(self) -> list[PrintedTable]:
        """Return the tables for people, the first with a title, and the last of quantities with footnotes."""
        cells = [(row, quantity) for block in _BLOCKS for quantity in block for row in self.rows]
        marked = dict.fromkeys(footnote(row, quantity, self.n, self.collective) for row, quantity in cells)
        marked.pop("", None)
        reasons = {reason: str(number).translate(_TO_SUPERSCRIPTS) for number, reason in enumerate(marked, 1)}
        values = ", then ".join(("as the paper prints it", *self.values[1:]))
        notes = [
            "activations in BΨA, parameters and their volumes in ΨP, boundary volumes in BΨint",
            "volumes are per micro-batch and training step; a stage has 1/N of BΨA and of ΨP",
            f"all-reduce by {self.collective.replace('-', ' ')}; zero-dp broadcasts and reduces by binomial trees",
            *["agree: exact and simulated values of all blocks"] * self.is_simulated,
            *(f"{number} {reason}" for reason, number in reasons.items()),
        ]
        found = [
            PrintedTable(
                [_SCHEDULE, *(self._column(name, value, reasons) for name in block for value in self.values)]
                + [_AGREE] * (self.is_simulated and block == _BLOCKS[-1]),
                self.rows,
                heads=[f"Table 1 for N = {self.n}: each quantity {values}"] * (block == _BLOCKS[0]),
                notes=notes * (block == _BLOCKS[-1]),
                latex=_latex_words,
            )
            for block in _BLOCKS
        ]
        beside = PrintedTable(_BESIDE, self.beside, heads=[_ABOUT_BESIDE], latex=_latex_words)
        return found + [beside] * self.is_simulated

    def _column(self, quantity: str, value: str, reasons: Mapping[str, str] = MappingProxyType({})) -> Column:
        """Return the column of a value of a quantity; of people's, the paper's is headed by the quantity."""

        def words(row: dict[str, Any]) -> str:
            cell = row[quantity]
            if value == "exact":
                return f"{cell[value]}{reasons.get(footnote(row, quantity, self.n, self.collective), '')}"
            return f"{cell[value]}{' ≠' if value == 'simulated' and cell[value] != cell['exact'] else ''}"

        heading = _HEADINGS.get(quantity, quantity.replace("_", " ")) if value == "paper" else value
        return Column(f"{quantity}_{value}", lambda row: row[quantity][value], heading, words=words)


_BLOCKS = (
    ("activations", "parameters", "gpus"),
    ("gradient_volume", "parameter_volume"),
    ("boundary_volume", "rounds"),
)
_HEADINGS = {"gpus": "GPUs"}
_SCHEDULE, _AGREE = Column("schedule"), Column("agree", words=lambda row: "yes" if row["agree"] else "NO")
_BESIDE = (
    _SCHEDULE,
    Column("versions", heading="versions kept"),
    Column("optimizer_moves", heading="states moved"),
    Column("wire_volume", heading="wire volume, ΨP", words=lambda row: str(row["wire_volume"])),
)
_ABOUT_BESIDE = (
    "beside the table (kept: of one stage on one device; moved: optimizer states per training step; "
    "wire: bytes that algorithms send)"
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_TO_SUPERSCRIPTS = str.maketrans("0123456789", _SUPERSCRIPTS)
# Longest first: a symbol must not be cut by a shorter one.
_SYMBOLS = {
    "Ψint": r"\Psi_A^{\mathrm{int}}",
    "ΨA": r"\Psi_A",
    "ΨP": r"\Psi_P",
    "O(log N)": r"\mathcal{O}(\log N)",
    "O(1)": r"\mathcal{O}(1)",
    "²": "^2",
}
_FORMULAS = {cell for cells in PRINTED.values() for cell in cells if cell}


def _formula(cell: str) -> str:
    for symbol, code in _SYMBOLS.items():
        cell = cell.replace(symbol, code)
    return f"${cell}$"


def _latex_words(text: str) -> str:
    """Return a cell of the paper as mathematics, and of other words the symbols and marks alone."""
    if text in _FORMULAS:
        return _formula(text)
    text = re.sub("B?Ψ(A|P|int)", lambda symbol: _formula(symbol[0]), latex_text(text)).replace("≠", r"$\neq$")
    return re.sub(f"[{_SUPERSCRIPTS}]", lambda mark: rf"\textsuperscript{{{_SUPERSCRIPTS.index(mark[0])}}}", text)


def _table_row(name: str, exact: Mapping[str, Fraction], simulated: Mapping[str, Fraction] | None) -> dict[str, Any]:
    values = {"paper": dict(zip(QUANTITIES, PRINTED[name], strict=True)), "exact": exact}
    values |= {"simulated": simulated} if simulated else {}
    cells = {quantity: {kind: value[quantity] for kind, value in values.items()} for quantity in QUANTITIES}
    agree = {"agree": simulated == exact} if simulated else {}
    return {"schedule": name, "rule": SCHEDULES[name].rule.name, **cells, **agree}


def _run(name: str, n: int, **options: Any) -> Run:
    """Simulate a row; where it is too large, the refusal names the option that needs no run."""
    try:
        return simulate(name, n, **options)
    except RequestError as error:
        if error.subject != "n":
            raise
        raise RequestError(error.subject, f"{error.problem}, or take --exact, which runs nothing") from None


def table1(
    n: int | str,
    *,
    steps: int | str | None = None,
    collective: str = "recursive-doubling",
    shared_parameters: bool = False,
    engine: str = "auto",
    max_memory: str | float | None = None,
    exact: bool = False,
) -> Table1:
    """Return Table 1, whose nine rows are in the paper's order; exact and simulated cells are Fractions.

    `exact` evaluates the formulas alone, for any n: then nothing is run, and the rows have no simulated values.

    >>> table1(4)
    Table1(N = 4: 9 schedules, simulated as exact)
    >>> table1(4)[5]["gradient_volume"]
    {'paper': 'ΨP/2', 'exact': Fraction(3, 8), 'simulated': Fraction(3, 8)}
    >>> table1(10**6, exact=True)[5]["gpus"]
    {'paper': 'N(N+1)/2', 'exact': Fraction(500000500000, 1)}
    """
    given = {"steps": steps is not None, "engine": engine != "auto", "max-memory": max_memory is not None}
    if true_or_false("exact", exact) and any(given.values()):
        name = next(name for name, is_given in given.items() if is_given)
        raise RequestError(name, "is of runs, and exact values need none; leave it or --exact out")
    n, steps = whole_number("n", n, at_least=1), whole_number("steps", 3 if steps is None else steps, at_least=3)
    choose("collective", collective, STATED_COLLECTIVES)
    true_or_false("shared_parameters", shared_parameters)
    table = Table1(n, collective, [], [])
    for name in progress(PRINTED, "table1"):
        cells, simulated = exact_cells(name, n, collective, shared_parameters), None
        if not exact:
            algorithm = collective if n > 1 and SCHEDULES[name].all_reduces else DEFAULT
            run = _run(name, n, steps=steps, collective=algorithm, engine=engine, max_memory=max_memory)
            simulated = simulated_cells(run, shared_parameters)
            table.beside.append(measure_beside(run))
        table.rows.append(_table_row(name, cells, simulated))
    return table


def footnote(row: dict[str, Any], quantity: str, n: int, collective: str) -> str:
    """Return the reason why the exact cell differs from the printed one; empty if they are equal."""
    printed, schedule = row[quantity]["paper"], row["schedule"]
    if printed == "O(log N)":
        rings = collective == "ring" and schedule != "zero-dp" and n > 2
        return "a ring takes 2(N-1) rounds, which is O(N)" if rings else ""
    if not printed or printed_value(printed, n) == row[quantity]["exact"]:
        return ""
    return _FOOTNOTES.get((schedule, quantity)) or _FOOTNOTES.get(quantity, "")


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
    as_printed, rows = (workers, parameters) == (WORKERS, PARAMETERS), []
    for schedule in progress(tuple(METHODS), "table1"):
        method = METHODS[schedule]
        state = Fraction(_STATE * parameters, workers if method.is_split else 1)
        formula = _NUMBER * method.numbers * parameters + state
        simulated = _peak(schedule, workers, parameters)
        held = _peak(schedule, workers, parameters, runtime="held")
        rows.append(MethodMemory(schedule, method, formula, simulated, held, method.printed if as_printed else None))
    return rows


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
