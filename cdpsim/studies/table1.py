"""Table 1 of the paper, three ways: as printed, exact, and measured on the trace of a run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from cdpsim.api import simulate
from cdpsim.errors import RequestError, choose, true_or_false, whole_number
from cdpsim.files.notes import progress
from cdpsim.files.tables import data_frame
from cdpsim.files.units import counted
from cdpsim.program import Category, Content
from cdpsim.program.collectives import DEFAULT
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES
from cdpsim.trace.metrics import communication, memory

if TYPE_CHECKING:
    import pandas as pd

QUANTITIES = (
    "activations",
    "parameters",
    "gradient_volume",
    "parameter_volume",
    "boundary_volume",
    "rounds",
    "gpus",
)
STATED_COLLECTIVES = ("recursive-doubling", "ring", "tree")  # those whose rounds spec section 4 states
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
        from cdpsim.studies.table1_forms import TABLE1_FORMS

        return TABLE1_FORMS["text"](self).rstrip("\n")

    def __repr__(self) -> str:
        differ = [row["schedule"] for row in self.rows if not row.get("agree", True)]
        words = f"simulated, {', '.join(differ)} differ" if differ else "simulated as exact"
        return f"Table1(N = {self.n}: {counted(len(self), 'schedule')}, {words if self.is_simulated else 'exact'})"

    def _repr_html_(self) -> str:
        from cdpsim.studies.table1_forms import html_of

        return html_of(self)

    def frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame of pandas, with a column for each value of a quantity: `rounds_exact`."""
        rows = [
            {"schedule": row["schedule"], "rule": row["rule"]}
            | {f"{name}_{value}": _plain_value(row[name][value]) for name in QUANTITIES for value in self.values}
            for row in self.rows
        ]
        return data_frame(rows)

    @property
    def values(self) -> tuple[str, ...]:
        """The names of a cell's values: paper, exact and perhaps simulated."""
        return tuple(self.rows[0][QUANTITIES[0]])

    @property
    def is_simulated(self) -> bool:
        """Whether it has simulated values."""
        return "simulated" in self.values


def _plain_value(value: str | Fraction) -> str | float:
    return value if isinstance(value, str) else float(value)


def compute_table1(
    n: int | str,
    *,
    steps: int | str | None = None,
    collective: str = "recursive-doubling",
    shared_parameters: bool = False,
    engine: str = "auto",
    max_memory: str | float | None = None,
    formulas_alone: bool = False,
) -> Table1:
    """Simulate the nine rows and compare each with its formulas; or evaluate the `formulas_alone`, for any n."""
    if true_or_false("exact", formulas_alone):
        given = {"steps": steps is not None, "engine": engine != "auto", "max-memory": max_memory is not None}
        _refuse_options_of_runs(name for name, is_given in given.items() if is_given)
    n, steps = whole_number("n", n, at_least=1), whole_number("steps", 3 if steps is None else steps, at_least=3)
    choose("collective", collective, STATED_COLLECTIVES)
    true_or_false("shared_parameters", shared_parameters)
    table = Table1(n, collective, [], [])
    for name in progress(PRINTED, "table1"):
        schedule, exact = SCHEDULES[name], exact_cells(name, n, collective, shared_parameters)
        papers = zip(QUANTITIES, PRINTED[name], strict=True)
        cells = {quantity: {"paper": paper, "exact": exact[quantity]} for quantity, paper in papers}
        row: dict[str, Any] = {"schedule": name, "rule": schedule.rule.name, **cells}
        table.rows.append(row)
        if formulas_alone:
            continue
        algorithm = collective if n > 1 and schedule.all_reduces else DEFAULT
        run = _run(name, n, steps=steps, collective=algorithm, engine=engine, max_memory=max_memory)
        simulated = simulated_cells(run, shared_parameters)
        for quantity, value in simulated.items():
            row[quantity]["simulated"] = value
        row["agree"] = simulated == exact
        table.beside.append(measure_beside(run))
    return table


def _refuse_options_of_runs(names: Iterable[str]) -> None:
    """Refuse options that would change nothing where nothing is run."""
    for name in names:
        raise RequestError(name, "is of runs, and exact values need none; leave it or --exact out")


def _run(name: str, n: int, **options: Any) -> Run:
    """Simulate a row; where it is too large, the refusal names the option that needs no run."""
    try:
        return simulate(name, n, **options)
    except RequestError as error:
        if error.subject != "n":
            raise
        raise RequestError(error.subject, f"{error.problem}, or take --exact, which runs nothing") from None


def table1(
    n: int,
    *,
    steps: int | None = None,
    collective: str = "recursive-doubling",
    shared_parameters: bool = False,
    engine: str = "auto",
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
    how: dict[str, Any] = {"steps": steps, "collective": collective, "engine": engine}
    return compute_table1(n, **how, shared_parameters=shared_parameters, formulas_alone=exact)


def footnote(row: dict[str, Any], quantity: str, n: int, collective: str) -> str:
    """Return the reason why the exact cell differs from the printed one; empty if they are equal."""
    printed, schedule = row[quantity]["paper"], row["schedule"]
    if printed == "O(log N)":
        rings = collective == "ring" and schedule != "zero-dp" and n > 2
        return "a ring takes 2(N-1) rounds, which is O(N)" if rings else ""
    if not printed or printed_value(printed, n) == row[quantity]["exact"]:
        return ""
    return _FOOTNOTES.get((schedule, quantity)) or _FOOTNOTES.get(quantity, "")
