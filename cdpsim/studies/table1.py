"""Table 1 of the paper, three ways: as printed, exact, and measured on the trace of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from cdpsim.errors import RequestError, choose, true_or_false, whole_number
from cdpsim.files.progress import progress
from cdpsim.front import simulate
from cdpsim.program import Category, Content, Op
from cdpsim.program.collectives import DEFAULT
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES
from cdpsim.trace.metrics import communication, memory

QUANTITIES = (
    "activations",
    "parameters",
    "gradient_volume",
    "parameter_volume",
    "boundary_volume",
    "rounds",
    "gpus",
)
COLLECTIVES = ("recursive-doubling", "ring", "tree")  # those whose rounds spec section 4 states
Value = Callable[[int], Fraction | int]


@dataclass(frozen=True)
class Printed:
    """A cell as the paper prints it, what that comes to (None for an order of growth), and why it is not exact."""

    text: str
    value: Value | None = None
    note: str = ""


_LEADING = "the paper prints the leading term; k devices exchange k-1 copies"
_SENT = {"gradient_volume": Printed("ΨP", lambda n: 1, _LEADING)}
_LOG, _ONE = Printed("O(log N)"), Printed("O(1)", lambda n: 1, "one device sends no messages")
_BOUNDARY = Printed("BΨint", lambda n: 1, "one stage has no boundary")
_ALL_A, _ALL_P = Printed("BΨA", lambda n: 1), Printed("ΨP", lambda n: 1)
_STAGE_A, _STAGE_P = Printed("BΨA/N", lambda n: Fraction(1, n)), Printed("ΨP/N", lambda n: Fraction(1, n))
_GATHERED = "a device holds its own stage and the one gathered for use"
_TRAVELS = "gradients travel inside the state, which moves 2(N-1) times per micro-batch"
_GATHERS = "the paper says 1.5 ΨP at most: the reduction of gradients, and two broadcasts of parameters beside it"
_SHARED = "parameters shared by all micro-batches; early stages of CDP need two versions at once"


def _n(n: int) -> int:
    return n


def _half(n: int) -> Fraction:
    return Fraction(n + 1, 2)


PRINTED: dict[str, dict[str, Printed]] = {
    "single-dp": {"activations": Printed("NBΨA", _n), "parameters": Printed("NΨP", _n, _SHARED)},
    "single-cdp": {
        "activations": Printed("(N+1)/2 BΨA", _half),
        "parameters": Printed("(N+1)/2 ΨP", _half, _SHARED),
    },
    "multi-dp": {
        "activations": _ALL_A,
        "parameters": _ALL_P,
        **_SENT,
        "rounds": _LOG,
        "gpus": Printed("N", _n),
    },
    "multi-cdp": {
        "activations": _ALL_A,
        "parameters": _ALL_P,
        **_SENT,
        "rounds": _ONE,
        "gpus": Printed("N", _n),
    },
    "mp-dp": {
        "activations": _STAGE_A,
        "parameters": _STAGE_P,
        **_SENT,
        "boundary_volume": _BOUNDARY,
        "rounds": _LOG,
        "gpus": Printed("N²", lambda n: n * n),
    },
    "mp-cdp": {
        "activations": _STAGE_A,
        "parameters": _STAGE_P,
        "gradient_volume": Printed("ΨP/2", lambda n: Fraction(1, 2), _LEADING),
        "boundary_volume": _BOUNDARY,
        "rounds": _ONE,
        "gpus": Printed("N(N+1)/2", lambda n: n * (n + 1) // 2),
    },
    "pp-cdp": {
        "activations": _ALL_A,
        "parameters": _STAGE_P,
        "boundary_volume": _BOUNDARY,
        "rounds": _ONE,
        "gpus": Printed("N", _n),
    },
    "zero-dp": {
        "activations": _ALL_A,
        "parameters": Printed("ΨP/N", lambda n: Fraction(1, n), _GATHERED),
        "gradient_volume": Printed("ΨP", lambda n: 1, _GATHERS),
        "rounds": _LOG,
        "gpus": Printed("N", _n),
    },
    "zero-cdp": {
        "activations": _ALL_A,
        "parameters": _STAGE_P,
        "gradient_volume": Printed("ΨP", lambda n: 1, _TRAVELS),
        "rounds": _ONE,
        "gpus": Printed("N", _n),
    },
}


def exact(schedule: str, n: int, collective: str, shared_parameters: bool) -> dict[str, Fraction]:
    """The exact cells of a row, from the formulas of spec section 4; no run feeds them, and they feed no run."""
    some = int(n > 1)  # one stage on one device sends nothing
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
        "multi-cdp": (1, 1, passed, passed, 0, some, n),
        "mp-dp": (share, share, passed, passed, some, all_reduce, n * n),
        "mp-cdp": (share, share, passed / 2, passed / 2, some, some, n * (n + 1) // 2),
        "pp-cdp": (1, share, 0, 0, some, some, n),
        "zero-dp": (1, (1 + some) * share, passed, 2 * passed, 0, 2 * log, n),
        "zero-cdp": (1, share, 0, 2 * passed, 0, some, n),
    }
    return {quantity: Fraction(value) for quantity, value in zip(QUANTITIES, rows[schedule], strict=True)}


def measure(run: Run, shared_parameters: bool) -> dict[str, Fraction]:
    """The simulated cells of a row, read off a run under unit costs."""
    program, start, end = run.program, run.start, run.end
    buffers = program.buffers
    begin, finish = memory.buffer_spans(buffers, start, end)
    low, high = memory.steady_window(program, start, end)

    def most(rows: np.ndarray, key: np.ndarray) -> Fraction:
        curve = memory.step_function(key, begin[rows], finish[rows], buffers.size[rows])
        return Fraction(memory.peak_within(*curve[1:], low, high), program.n)

    def of(category: Category) -> np.ndarray:
        return np.flatnonzero(buffers.category == category)

    activations, parameters = of(Category.ACTIVATIONS), of(Category.PARAMETERS)
    lanes = run.request.schedule.placement.lanes
    if lanes and shared_parameters:
        kept = most(parameters, buffers.device[parameters])
    elif lanes:  # a copy of the stage for each micro-batch, from its forward to its backward
        kept = most(activations, buffers.device[activations])
    else:  # each stage once, however many of its versions are kept
        curve = memory.live_stages(program, start, end)
        kept = Fraction(memory.peak_within(*curve[1:], low, high), program.n)
    volumes = communication.volumes(program)
    return {
        "activations": most(activations, buffers.device[activations]),
        "parameters": kept,
        "gradient_volume": volumes["gradient"],
        "parameter_volume": volumes["parameter"],
        "boundary_volume": volumes["boundary"],
        "rounds": Fraction(communication.rounds_between_slots(program, run.costs.rounds, start, end)),
        "gpus": Fraction(len(np.unique(program.tasks.device))),
    }


def beside(run: Run) -> dict[str, Any]:
    """What the table leaves out: versions kept, optimizer states that move, what the wire carries.

    `versions` is the most of one stage that a device holds; `optimizer_moves` counts messages per training step;
    `wire_volume` is gradients, parameters and states per micro-batch and step in units of the model's parameters.
    """
    program, messages = run.program, run.program.messages
    step = communication.full_version(program) - 1
    live = memory.live_versions(program, run.start, run.end)
    model_sent = (messages.step == step) & (messages.content >= Content.GRADIENT)
    wire = Fraction(int(messages.size[model_sent & (messages.op == Op.P2P)].sum()))
    for k in np.flatnonzero(model_sent & (messages.op != Op.P2P)).tolist():
        members = len(program.ranks_of(messages.dst[k]))
        how = run.costs.algorithms[run.costs.runs_by[k]]
        wire += Fraction(int(how.sends(members).sum()) * int(messages.size[k]), how.parts(members))
    moves = model_sent & (messages.content == Content.STATE) & (messages.versions == 0)
    return {
        "schedule": run.request["schedule"],
        "versions": int(live["versions"].max(initial=0)),
        "optimizer_moves": int(moves.sum()),
        "wire_volume": wire / (int(program.counts[step]) * program.n),
    }


@dataclass(frozen=True)
class Table:
    """Table 1 for n stages and micro-batches: nine rows in the paper's order, and what stands beside each.

    Where nothing was run, cells have no simulated value, rows do not say whether that agrees, and nothing is beside.
    """

    n: int
    collective: str
    rows: list[dict[str, Any]]
    beside: list[dict[str, Any]]

    @property
    def values(self) -> tuple[str, ...]:
        """The names of a cell's values: paper, exact and perhaps simulated."""
        return tuple(self.rows[0][QUANTITIES[0]])

    @property
    def is_simulated(self) -> bool:
        """Whether runs stand behind it."""
        return "simulated" in self.values


def compute(
    n: int | str,
    *,
    steps: int | str | None = None,
    collective: str = "recursive-doubling",
    shared_parameters: bool = False,
    engine: str = "auto",
    max_memory: str | float | None = None,
    formulas_alone: bool = False,
) -> Table:
    """Simulate the nine rows and hold each against its formulas; or take the `formulas_alone`, of any n."""
    if true_or_false("exact", formulas_alone):
        _refuse_options_of_runs(steps=steps is not None, engine=engine != "auto", max_memory=max_memory is not None)
    n, steps = whole_number("n", n, at_least=1), whole_number("steps", 3 if steps is None else steps, at_least=3)
    choose("collective", collective, COLLECTIVES)
    true_or_false("shared_parameters", shared_parameters)
    table = Table(n, collective, [], [])
    for name in progress(PRINTED, "table1"):
        cells = exact(name, n, collective, shared_parameters)
        row = _row(name, cells)
        table.rows.append(row)
        if formulas_alone:
            continue
        own = collective if n > 1 and SCHEDULES[name].sums_together else DEFAULT
        trace = _run(name, n, steps=steps, collective=own, engine=engine, max_memory=max_memory)
        simulated = measure(trace, shared_parameters)
        for quantity in QUANTITIES:
            row[quantity]["simulated"] = simulated[quantity]
        row["agree"] = simulated == cells
        table.beside.append(beside(trace))
    return table


def _refuse_options_of_runs(**asked: bool) -> None:
    """Refuse options that would change nothing where nothing is run."""
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                name.replace("_", "-"), "is of runs, and exact values need none; leave it or --exact out"
            )


def _row(name: str, cells: dict[str, Fraction]) -> dict[str, Any]:
    """A row as the paper prints it, and its exact values."""
    printed = PRINTED[name]
    papers = {quantity: printed[quantity].text if quantity in printed else "" for quantity in QUANTITIES}
    values = {quantity: {"paper": papers[quantity], "exact": cells[quantity]} for quantity in QUANTITIES}
    return {"schedule": name, "rule": SCHEDULES[name].rule.name, **values}


def _run(name: str, n: int, **options: Any) -> Run:
    """Simulate a row; a refusal for its size names the way that has no runs."""
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
) -> list[dict[str, Any]]:
    """Return Table 1's nine rows in the paper's order; exact and simulated cells are Fractions.

    `exact` takes them from their formulas alone, for any n: then nothing is run, and cells and rows say nothing of it.

    >>> table1(4)[5]["gradient_volume"]
    {'paper': 'ΨP/2', 'exact': Fraction(3, 8), 'simulated': Fraction(3, 8)}
    >>> table1(10**6, exact=True)[5]["gpus"]
    {'paper': 'N(N+1)/2', 'exact': Fraction(500000500000, 1)}
    """
    how: dict[str, Any] = {"steps": steps, "collective": collective, "engine": engine}
    return compute(n, **how, shared_parameters=shared_parameters, formulas_alone=exact).rows


def footnote(row: dict[str, Any], quantity: str, n: int, collective: str) -> str:
    """Why the exact cell is not what the paper prints; empty where it is."""
    printed = PRINTED[row["schedule"]].get(quantity)
    if printed is None:
        return ""
    if printed.value is None:
        rings = collective == "ring" and row["schedule"] != "zero-dp" and n > 2
        return "a ring takes 2(N-1) rounds, which is O(N)" if rings else ""
    return printed.note if printed.value(n) != row[quantity]["exact"] else ""
