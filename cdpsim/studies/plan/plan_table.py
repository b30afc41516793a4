"""A plan: its rows, its front and its counts; and its forms, text, JSON and CSV."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cdpsim.errors import one_line
from cdpsim.files.tables import as_csv, as_html, as_json, as_text, data_frame
from cdpsim.files.units import counted, short_text
from cdpsim.model import UNIT_MODELS
from cdpsim.request import MEMORY_NOTE
from cdpsim.request.options import DEFAULTS, flag_of
from cdpsim.studies.compare import Measured
from cdpsim.studies.comparison_columns import SPLIT_NOTE
from cdpsim.studies.plan.front import best_first, front_of
from cdpsim.studies.plan.search import (
    FATES,
    INTERRUPTED,
    OPEN,
    REFUSED,
    SIMULATED,
    TOO_LARGE,
    TWIN,
    WORSE,
    Search,
    best_left,
    objectives_of,
    run_search,
)
from cdpsim.studies.plan.wanted import SIZE_AXES, Wanted

if TYPE_CHECKING:
    import pandas as pd

_FATE_WORDS = {
    REFUSED: "cannot be asked",
    TWIN: "equal to another",
    TOO_LARGE: "too large by their bounds",
    WORSE: "worse by their bounds",
    SIMULATED: "simulated",
    OPEN: "left open",
}
_METRIC_COLUMNS = ("devices", "step", "samples", "memory", "staleness")
_CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "communication")


@dataclass(frozen=True)
class PlanRow:
    """A candidate that was simulated: the options of its request, its metrics, and the schedules that are the same."""

    options: Mapping[str, Any]
    measured: Measured
    also: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return an option of its request, or a figure."""
        return self.options[name] if name in self.options else self.measured[name]

    @property
    def command(self) -> str:
        """The command line that shows its metrics."""
        words = ["cdpsim", "compare", str(self.options["schedule"])]
        for name, value in self.options.items():
            if value is True or value is False:
                words += [flag_of(name)] if value else [] if DEFAULTS.get(name) is False else [_opposite(name)]
            elif name != "schedule":
                words += [flag_of(name), str(getattr(value, "name", value))]
        return shlex.join(words)

    def to_builtins(self) -> dict[str, Any]:
        """Return its request, its command and its metrics."""
        also = {"also": list(self.also)} if self.also else {}
        options = {name: _plain_option(value) for name, value in self.options.items()}
        metrics = self.measured.to_builtins()
        del metrics["makespan"]  # which depends on how many steps are run
        return {"request": options, "command": self.command, **also, **metrics}


def _opposite(name: str) -> str:
    return f"--no-{flag_of(name).removeprefix('--')}"


def _plain_option(value: Any) -> Any:
    """Return the value of an option as JSON has it: of an object its name."""
    return value if isinstance(value, str | int | float | bool | None) else str(getattr(value, "name", value))


@dataclass(frozen=True)
class Plan:
    """The best ways to train, and how that is known.

    `rows` are the best of the candidates that fit, by the `objective`: first the best of all, then the best without
    staleness, then the others. `front` are those of all for which no other one is at least as good in step, memory,
    devices and staleness, and better in one. `status` says whether that is proved. If none fits, `smallest` is the one
    that needs least memory.
    """

    rows: list[PlanRow]
    front: list[PlanRow]
    status: str
    objective: str
    wanted: Wanted = field(repr=False)
    search: Search = field(repr=False)
    smallest: PlanRow | None = None

    def __str__(self) -> str:
        return plan_text(self).rstrip("\n")

    def __repr__(self) -> str:
        return one_line(f"Plan({counted(len(self.search.fate), 'candidate')}, {self.status})", 200)

    def _repr_html_(self) -> str:
        head, cells = _row_cells(self, self.rows)
        return as_html(head, cells, *_head_lines(self), *_count_lines(self))

    @property
    def proved(self) -> bool:
        """Whether the search came to its end."""
        return not self.search.stopped

    @property
    def interrupted(self) -> bool:
        """Whether a user has interrupted the search."""
        return self.search.stopped == INTERRUPTED

    @property
    def best(self) -> PlanRow | None:
        """The best candidate of all; None if none is known to fit."""
        return self.rows[0] if self.rows else None

    @property
    def fitting(self) -> list[Measured]:
        """The metrics of all candidates that were simulated and fit, in their order."""
        return [self.search.measured[number] for number in sorted(self.search.metrics)]

    @cached_property
    def best_synchronous(self) -> PlanRow | None:
        """The best candidate without staleness."""
        return next((row for row in self.rows if not row.measured.staleness), None)

    @property
    def searched(self) -> dict[str, Any]:
        """The number of all candidates, and of those with each fate: of those that cannot be asked, by the subject."""
        counts = Counter(self.search.fate)
        subjects = Counter(refusal.subject for refusal in self.search.refusals.values())
        named: dict[str, Any] = {fate: counts[fate] for fate in FATES}
        return {"candidates": len(self.search.fate), **named, REFUSED: dict(subjects.most_common())}

    @property
    def in_slots(self) -> bool:
        """Whether steps are in slots and memory in stage-activations."""
        return self.wanted.in_slots

    def frame(self) -> "pd.DataFrame":
        """Return all candidates with their options, fates and metrics as a DataFrame of pandas."""
        head, rows = candidate_cells(self)
        return data_frame([dict(zip(head, row, strict=True)) for row in rows])

    def to_builtins(self, *, candidates: bool = False) -> dict[str, Any]:
        """Return all that the plan says, also each candidate if that is asked for, by the keys of JSON."""
        wanted = self.wanted
        asked = {"devices": wanted.devices, "batch": wanted.batch, "memory": wanted.memory}
        content: dict[str, Any] = {"status": self.status, "proved": self.proved, "objective": self.objective, **asked}
        content |= {"searched": self.searched}
        content |= {name: [row.to_builtins() for row in getattr(self, name)] for name in ("rows", "front")}
        content |= {"smallest": self.smallest.to_builtins()} if self.smallest else {}
        if candidates:
            head, rows = candidate_cells(self)
            content["candidates"] = [dict(zip(head, row, strict=True)) for row in rows]
        return content


def plan_of(search: Search, wanted: Wanted) -> Plan:
    """Run a search and return the plan that it finds; if nothing fits, search for what needs least memory."""
    run_search(search)
    smallest = None if search.metrics or search.stopped else search.least_memory()
    if smallest is not None:
        run_search(smallest, front=False)
    numbers = np.array([*search.metrics], dtype=np.int64)
    metrics = np.array([*search.metrics.values()], dtype=float).reshape(-1, 4)
    ascending = np.argsort(numbers)
    numbers, metrics = numbers[ascending], metrics[ascending]
    order = best_first(metrics, search.objective)
    ordered, lags = numbers[order].tolist(), metrics[order, 3].tolist()
    fresh = [number for number, lag in zip(ordered, lags, strict=True) if not lag][:1]
    first = [*dict.fromkeys([*ordered[:1], *fresh, *ordered[: search.top]])][: max(search.top, 1 + len(fresh))]
    front = numbers[front_of(metrics)]
    front = front[best_first(metrics[front_of(metrics)], "samples")].tolist()
    also = _names_of_twins(search)
    row = {number: _plan_row(search, number, also) for number in {*first, *front}}
    least = None
    if smallest is not None and smallest.measured:
        found = min(smallest.measured, key=lambda number: (smallest.measured[number].memory, number))
        least = _plan_row(smallest, found, also)
    rows = [row[number] for number in first]
    status = _status(search, wanted, found=bool(rows))
    return Plan(rows, [row[number] for number in front], status, search.objective, wanted, search, least)


def _plan_row(search: Search, number: int, also: Mapping[int, list[str]]) -> PlanRow:
    options = search.space.candidates[number].options
    return PlanRow(options, search.measured[number], tuple(also.get(number, ())))


def _names_of_twins(search: Search) -> dict[int, list[str]]:
    """Return the schedules of the candidates that are the same program as an earlier one, by the number of that."""
    names: dict[int, list[str]] = {}
    for one in search.space.candidates:
        if one.twin is not None:
            names.setdefault(one.twin, []).append(str(one.options["schedule"]))
    return names


def _status(search: Search, wanted: Wanted, *, found: bool) -> str:
    """Return how a search ended, in words."""
    if not search.stopped:
        return "proved: no candidate is better than row 1" if found else "proved: no candidate fits"
    least = best_left(search)
    if search.objective != "samples":
        unit = "B" if search.objective == "memory" and not wanted.in_slots else ""
        return f"{search.stopped}: no less {search.objective} than {short_text(least, unit)} can exist"
    if not least:
        return f"{search.stopped}: nothing is known of what can exist"
    unit = "micro-batches a slot" if wanted.in_slots else "samples/s"
    return f"{search.stopped}: no better than {wanted.batch / least:.4g} {unit} can exist"


def lacking_text(plan: Plan) -> str:
    """Return which candidate needs least memory where none fits, and how much it lacks."""
    row = plan.smallest
    if row is None:
        return "no candidate fits"
    one = row.measured
    sizes = [f"{name} {_size_text(plan, one.value(name))}" for name in _CATEGORIES if one.value(name)]
    limit = plan.wanted.memory
    most = "" if limit is None else f" into {_size_text(plan, limit)}"
    more = "more than its device has" if limit is None else f"{_size_text(plan, one.memory - limit)} too much"
    least = f"least is needed by `{row.command}`: {_size_text(plan, one.memory)}, {more} ({', '.join(sizes)})"
    return f"no candidate fits{most}; {least}"


def _size_text(plan: Plan, size: float) -> str:
    return f"{size:g}" if plan.in_slots else short_text(size, "B", 4)


def plan_table(plan: Plan, form: str = "text") -> str:
    """Return a plan as text, as JSON, or as CSV: the rows and the front."""
    if form == "json":
        return as_json(plan.to_builtins())
    if form == "csv":
        names = option_columns(plan)
        head = [*names, *_METRIC_COLUMNS, "front", "command"]
        front = {id(row) for row in plan.front}
        rows = [*plan.rows, *(row for row in plan.front if all(row is not other for other in plan.rows))]
        cells = [[*_option_cells(row, names), *_row_metrics(row), id(row) in front, row.command] for row in rows]
        return as_csv(head, cells)
    return plan_text(plan)


def _row_metrics(row: PlanRow) -> list[Any]:
    one = row.measured
    return [one.devices, one.step, one.sample_rate, one.memory, one.staleness]


def plan_text(plan: Plan) -> str:
    """Return a plan for people: the counts, the rows, the front, and the command of the first row."""
    lines = [*_head_lines(plan), *_count_lines(plan), ""]
    parts = ["\n".join(lines)]
    if plan.rows:
        parts += [as_text(*_row_cells(plan, plan.rows))]
        several = "no other candidate is as good in step, memory, devices and staleness, and better in one"
        parts += [f"\nfront: {several}\n", as_text(*_row_cells(plan, plan.front)), "\n"]
        parts += [f"row 1: {plan.rows[0].command}\n"]
        parts += [] if plan.in_slots else [f"{MEMORY_NOTE}\n"]
    return "".join([parts[0], "\n" * bool(plan.rows), *parts[1:]])


def _head_lines(plan: Plan) -> list[str]:
    """Return what all candidates have in common."""
    wanted = plan.wanted
    what = "micro-batch" if plan.in_slots else "sample"
    most = [] if wanted.memory is None else [f"at most {_size_text(plan, wanted.memory)} on a device"]
    few = "at most " * wanted.fewer
    words = [f"{few}{counted(wanted.devices, 'device')}", f"{counted(wanted.batch, what)} in a training step", *most]
    return [", ".join(words)] + [SPLIT_NOTE] * (
        plan.in_slots and plan.search.space.cases[0].model.name == UNIT_MODELS[1]
    )


def _count_lines(plan: Plan) -> list[str]:
    """Return the counts of candidates, and the status."""
    searched = plan.searched
    subjects = ", ".join(f"{subject} {count:,}" for subject, count in searched[REFUSED].items())
    counts = {fate: sum(searched[fate].values()) if fate == REFUSED else searched[fate] for fate in FATES}
    words = [
        f"{count:,} {_FATE_WORDS[fate]}" + f" ({subjects})" * (fate == REFUSED)
        for fate, count in counts.items()
        if count
    ]
    return [f"{counted(searched['candidates'], 'candidate')}: {', '.join(words)}", plan.status]


def option_columns(plan: Plan) -> list[str]:
    """Return the options of which a table of all candidates has columns: sizes, and those with several values."""
    variants = plan.wanted.variants
    values = {name: {str(each.options.get(name)) for each in variants} for one in variants for name in one.options}
    several = [name for name, known in values.items() if len(known) > 1 and name not in ("schedule", *SIZE_AXES)]
    return ["schedule", *SIZE_AXES, *sorted(several)]


def _row_cells(plan: Plan, rows: Sequence[PlanRow]) -> tuple[list[str], list[list[str]]]:
    """Return the table of rows for people: options in which they differ, and metrics."""
    names = [
        name
        for name in option_columns(plan)
        if name == "schedule" or any(row.options.get(name) is not None for row in rows)
    ]
    rate = "samples" if not plan.in_slots else "micro-batches"
    head = ["", *names, *["devices"] * plan.wanted.fewer, "step", rate, "memory", "staleness"]
    cells = []
    for number, row in enumerate(rows, 1):
        one = row.measured
        metrics = [_time_text(plan, one), _rate_text(plan, one), _size_text(plan, one.memory), f"{one.staleness:.3g}"]
        options = ["-" if cell is None else str(cell) for cell in _option_cells(row, names)]
        options[0] = " = ".join(dict.fromkeys([options[0], *row.also]))
        cells.append([str(number), *options, *[str(one.devices)] * plan.wanted.fewer, *metrics])
    return head, cells


def _time_text(plan: Plan, one: Measured) -> str:
    return f"{float(one.step):.6g}" if plan.in_slots else short_text(float(one.step), "s")


def _rate_text(plan: Plan, one: Measured) -> str:
    rate = one.sample_rate or one.micro_batch_rate
    return f"{rate:.4g}" if plan.in_slots else short_text(rate, "/s")


def _option_cells(row: PlanRow, names: Sequence[str]) -> list[Any]:
    return [_plain_option(row.options.get(name)) for name in names]


def candidate_cells(plan: Plan) -> tuple[list[str], list[list[Any]]]:
    """Return a row for each candidate: its options, its fate and the reason, its bounds and its metrics."""
    names = option_columns(plan)
    head = [*names, "fate", "why", "least_step", "least_memory", *_METRIC_COLUMNS]
    return head, [_candidate_row(plan, number, names) for number in range(len(plan.search.fate))]


def _candidate_row(plan: Plan, number: int, names: Sequence[str]) -> list[Any]:
    search = plan.search
    candidate, fate = search.space.candidates[number], search.fate[number]
    refusal = search.refusals.get(number)
    why = str(refusal) if refusal else "" if candidate.twin is None else f"candidate {candidate.twin}"
    least = [float(bound) if 0 < bound < np.inf else None for bound in search.least[number, :2]]
    options = [_plain_option(candidate.options.get(name)) for name in names]
    measured = search.measured.get(number)
    metrics: list[Any] = [candidate.devices, *[None] * 4]
    if measured:
        metrics = [measured.devices, *objectives_of(measured)[:1], measured.sample_rate, measured.memory]
        metrics += [measured.staleness]
    return [*options, fate, why or None, *least, *metrics]
