"""A plan: its rows, its front and its counts; and its forms, text, JSON and CSV."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cdpsim.errors import one_line
from cdpsim.files.tables import Column, PrintedTable, as_json, with_words
from cdpsim.files.units import counted, short_text
from cdpsim.model import UNIT_MODELS
from cdpsim.request import memory_note
from cdpsim.request.accuracy import KnownError, error_notes
from cdpsim.request.options import DEFAULTS, flag_of
from cdpsim.studies.compare import Measured
from cdpsim.studies.comparison import MEMORY_COLUMNS, SPLIT_NOTE
from cdpsim.studies.equal_shapes import team_of
from cdpsim.studies.plan.search import INTERRUPTED, Search
from cdpsim.studies.plan.space import FATES, REFUSED, TOO_LARGE, WORSE, Candidate, values_left_out
from cdpsim.studies.plan.wanted import SIZE_AXES, Wanted

if TYPE_CHECKING:
    import pandas as pd

_FATE_WORDS = {TOO_LARGE: "too large by their bounds", WORSE: "worse by their bounds"}
_FRONT_NOTE = "front: no other candidate is as good in step, memory, devices and staleness, and better in one"
_LINE_OF_PLANS = 120  # characters of a line


@dataclass(frozen=True)
class PlanRow:
    """A candidate that was simulated: the options of its request, its metrics, and the commands of those that equal it.

    These differ from it by a thousandth at most in step, memory, devices, staleness and bytes sent.
    """

    options: Mapping[str, Any]
    measured: Measured
    equal: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return an option of its request, or a figure."""
        return self.options[name] if name in self.options else self.measured[name]

    @property
    def command(self) -> str:
        """The command line that shows its metrics."""
        return command_of(self.options)

    def to_builtins(self) -> dict[str, Any]:
        """Return its request, its command and its metrics."""
        options = {name: _plain_option(value) for name, value in self.options.items()}
        metrics = self.measured.to_builtins()
        del metrics["makespan"]  # which depends on how many steps are run
        return {"request": options, "command": self.command, "equal": list(self.equal), **metrics}


def command_of(options: Mapping[str, Any]) -> str:
    """Return the command line that shows the metrics of a request."""
    words = ["cdpsim", "compare", str(options["schedule"])]
    for name, value in options.items():
        if value is True or value is False:
            off = [] if DEFAULTS.get(name) is False else [f"--no-{flag_of(name).removeprefix('--')}"]
            words += [flag_of(name)] if value else off
        elif name != "schedule":
            words += [flag_of(name), str(getattr(value, "name", value))]
    return shlex.join(words)


def _plain_option(value: Any) -> Any:
    """Return the value of an option as JSON has it: of an object its name."""
    return value if isinstance(value, str | int | float | bool | None) else str(getattr(value, "name", value))


@dataclass(frozen=True)
class Plan:
    """The best ways to train, and how that is known.

    `rows` are the best of the candidates that fit, by the `objective`: first those without staleness, then those that
    are better than all of them, with it. `front` are those of all for which no other one is at least as good in step,
    memory, devices and staleness, and better in one. Rows that are equal in every figure are one. `status` says whether
    that is proved, and of which candidates. If none fits, `smallest` is the one that needs least memory.
    """

    rows: list[PlanRow]
    front: list[PlanRow]
    status: str
    objective: str
    wanted: Wanted = field(repr=False)
    search: Search = field(repr=False)
    smallest: PlanRow | None = None

    def __str__(self) -> str:
        return plan_table(self).rstrip("\n")

    def __repr__(self) -> str:
        return one_line(f"Plan({counted(len(self.search.space.candidates), 'candidate')}, {self.status})", 200)

    def _repr_html_(self) -> str:
        return PrintedTable(_columns(self, self.rows), self.rows, heads=_head_lines(self))._repr_html_()

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
        """The best candidate, without staleness if any such fits; None if none is known to fit."""
        return self.rows[0] if self.rows else None

    @property
    def errors(self) -> tuple[KnownError, ...]:
        """The errors of the classes of all rows, each once."""
        return tuple(dict.fromkeys(error for row in [*self.rows, *self.front] for error in row.measured.errors))

    @property
    def fitting(self) -> list[Measured]:
        """The metrics of all candidates that were simulated and fit, in their order."""
        return [one.measured for one in self.search.fitting if one.measured]

    @property
    def searched(self) -> dict[str, Any]:
        """The number of all candidates, and of those with each fate: of those that cannot be asked, by the subject."""
        counts = Counter(one.fate for one in self.search.space.candidates)
        subjects = Counter(one.refusal.subject for one in self.search.space.candidates if one.refusal)
        named: dict[str, Any] = {fate: counts[fate] for fate in FATES}
        return {"candidates": counts.total(), **named, REFUSED: dict(subjects.most_common())}

    @property
    def in_slots(self) -> bool:
        """Whether steps are in slots and memory in stage-activations."""
        return self.wanted.in_slots

    @property
    def candidates(self) -> PrintedTable:
        """A row for each candidate: its options, its fate and the reason, its bounds and its metrics."""

        def figure(name: str) -> Column:
            return Column(name, lambda one: one.measured.value(name) if one.measured else None)

        columns = [
            *_option_columns(self.wanted),
            Column("fate"),
            Column("why", lambda one: str(one.refusal) if one.refusal else None),
            Column("least_step", lambda one: one.least.step or None),
            Column("least_memory", lambda one: one.least.memory or None),
            Column("devices"),
            *map(figure, ("step", "samples", "memory", "staleness")),
        ]
        return PrintedTable(columns, self.search.space.candidates)

    def frame(self) -> "pd.DataFrame":
        """Return all candidates with their options, fates and metrics as a DataFrame of pandas."""
        return self.candidates.frame()

    def to_builtins(self, *, candidates: bool = False) -> dict[str, Any]:
        """Return all that the plan says, also each candidate if that is asked for, by the keys of JSON."""
        wanted = self.wanted
        asked = {"devices": wanted.devices, "batch": wanted.batch, "memory": wanted.memory}
        content: dict[str, Any] = {"status": self.status, "proved": self.proved, "objective": self.objective, **asked}
        content |= {"not_varied": wanted.not_varied(), "left_out": values_left_out(self.search.space, wanted)}
        content |= {"searched": self.searched}
        content |= {name: [row.to_builtins() for row in getattr(self, name)] for name in ("rows", "front")}
        content |= {"smallest": self.smallest.to_builtins()} if self.smallest else {}
        return content | ({"candidates": self.candidates.records()} if candidates else {})


def plan_of(search: Search) -> Plan:
    """Return the plan that a search has found."""

    def row(one: Candidate, others: Sequence[Candidate] = ()) -> PlanRow:
        assert one.measured is not None
        return PlanRow(one.options, one.measured, tuple(command_of(other.options) for other in others))

    fresh, objective = search.best(stale=False), search.wanted.objective
    first = fresh[0][0].point.key(objective)[0] if fresh else float("inf")
    better = [each for each in search.best(stale=True) if each[0].point.key(objective)[0] < first]
    rows, front = [row(*each) for each in [*fresh, *better]], [row(*each) for each in search.front()]
    smallest = row(search.smallest) if search.smallest else None
    return Plan(rows, front, _status(search, rows), objective, search.wanted, search, smallest)


def _status(search: Search, rows: Sequence[PlanRow]) -> str:
    """Return how a search ended, in words, and which options it has not varied."""
    wanted, stopped = search.wanted, search.stopped
    if not stopped:
        kind = "synchronous candidate" if rows and not rows[0].measured.staleness else "candidate"
        found = f"no {kind} is better than row 1" if rows else "no candidate fits"
        alike = ", ".join(name.replace("_", "-") for name in wanted.not_varied())
        return f"proved: {found}; not varied: {alike}"
    least = search.best_left()
    if not least:
        return f"{stopped}: nothing is known of what can exist"
    if search.wanted.objective != "samples":
        unit = "B" if search.wanted.objective == "memory" and not wanted.in_slots else ""
        return f"{stopped}: no less {search.wanted.objective} than {short_text(least, unit)} can exist"
    unit = "micro-batches a slot" if wanted.in_slots else "samples/s"
    return f"{stopped}: no better than {wanted.batch / least:.4g} {unit} can exist"


def lacking_text(plan: Plan) -> str:
    """Return which candidate needs least memory where none fits, and how much it lacks."""
    row, limit = plan.smallest, plan.wanted.memory
    if row is None:
        return "no candidate fits" if plan.proved else "no candidate is known to fit; allow more --seconds or --memory"
    one = row.measured
    sizes = ", ".join(f"{name} {_size_text(plan, one.value(name))}" for name in MEMORY_COLUMNS if one.value(name))
    most = "" if limit is None else f" into {_size_text(plan, limit)}"
    more = "more than its device has" if limit is None else f"{_size_text(plan, one.memory - limit)} too much"
    least = f"least is needed by `{row.command}`: {_size_text(plan, one.memory)}, {more} ({sizes})"
    return f"no candidate fits{most}; {least}"


def _size_text(plan: Plan, size: float) -> str:
    return f"{size:g}" if plan.in_slots else short_text(size, "B", 4)


def plan_table(plan: Plan, form: str = "text") -> str:
    """Return a plan as text: counts, rows, front, and the command of the first row; as JSON; as CSV: rows and front."""
    if form == "json":
        return as_json(plan.to_builtins())
    shown = {id(row.options): row for row in [*plan.rows, *plan.front]}.values()
    if form == "csv":
        return PrintedTable(_columns(plan, [*shown]), [*shown]).printed("csv")
    lines = "".join(f"{line}\n" for line in _head_lines(plan))
    if not plan.rows:
        return lines
    fresh = sum(not row.measured.staleness for row in plan.rows)
    parts = [("", plan.rows[:fresh], 1)] if fresh else []
    if fresh < len(plan.rows):
        said = "with stale parameters, and better than row 1:" if fresh else "with stale parameters:"
        parts.append((said, plan.rows[fresh:], fresh + 1))
    tables = [_numbered(plan, *part) for part in [*parts, (_FRONT_NOTE, plan.front, 1)]]
    notes = [f"row 1: {plan.rows[0].command}"]
    notes += [] if plan.in_slots else [memory_note(row.measured.workspace for row in shown)]
    notes += error_notes(plan.errors)
    return "\n".join([lines, *tables, "".join(f"{note}\n" for note in notes)])


def _numbered(plan: Plan, heading: str, rows: Sequence[PlanRow], first: int) -> str:
    """Return the table of rows, which are numbered from the first on."""
    numbers = {id(row): str(number) for number, row in enumerate(rows, first)}
    columns = [Column("", words=lambda row: numbers[id(row)]), *_columns(plan, rows)]
    return f"{heading}\n"[not heading :] + PrintedTable(columns, rows, width=_LINE_OF_PLANS).printed()


def _columns(plan: Plan, rows: Sequence[PlanRow]) -> list[Column]:
    """Return the columns of rows: options, for people those in which they differ, and metrics."""
    slots, front = plan.in_slots, {id(row.options) for row in plan.front}
    options = _option_columns(plan.wanted)
    given = {column.name for column in with_words(options, rows)}
    rate = Column(
        "samples",
        lambda row: row.measured.sample_rate,
        "micro-batches" if slots else None,
        words=lambda row: f"{row['rate']:.4g}" if slots else short_text(row["samples"] or row["rate"], "/s"),
    )
    return [
        Column("schedule", lambda row: row["schedule"], words=lambda row: row["schedule"] + _equals_text(row)),
        *(Column(one.name, one.value, None if one.name in given else "") for one in options[1:]),
        Column("devices", lambda row: row["ranks"], None if plan.wanted.fewer else ""),
        Column(
            "step",
            lambda row: row["step"],
            words=lambda row: f"{float(row['step']):.6g}" if slots else short_text(float(row["step"]), "s"),
        ),
        rate,
        Column("memory", lambda row: row["memory"], words=lambda row: _size_text(plan, row["memory"])),
        Column("staleness", lambda row: row["staleness"], digits=3),
        Column("front", lambda row: id(row.options) in front, ""),
        Column("equal", lambda row: len(row.equal), ""),
        Column("command", lambda row: row.command, ""),
    ]


def _equals_text(row: PlanRow) -> str:
    return f" (+{len(row.equal)} equal)" if row.equal else ""


def _option_columns(wanted: Wanted) -> list[Column]:
    """Return the columns of options: sizes, and those with several values."""
    several = {name for name, known in wanted.values().items() if len(known) > 1} - {"schedule", *SIZE_AXES}
    names = ["schedule", *SIZE_AXES, *sorted(several)]

    def column(name: str) -> Column:
        return Column(name, lambda row: _plain_option(row.options.get(name)))

    return [column(name) for name in names]


def _head_lines(plan: Plan) -> list[str]:
    """Return what all candidates have in common, the counts of candidates, and the status."""
    wanted, searched = plan.wanted, plan.searched
    what = "micro-batch" if plan.in_slots else "sample"
    unit = "rank" if any(team_of(variant.options) > 1 for variant in wanted.variants) else "device"
    asked = ["at most " * wanted.fewer + counted(wanted.devices, unit)]
    asked += [f"{counted(wanted.batch, what)} in a training step"]
    asked += [] if wanted.memory is None else [f"at most {_size_text(plan, wanted.memory)} on a device"]
    cases, subjects = plan.search.space.cases, searched[REFUSED]
    split = bool(cases) and cases[0].model.name == UNIT_MODELS[1]
    words = [f"{sum(subjects.values()):,} {REFUSED} ({', '.join(f'{s} {count:,}' for s, count in subjects.items())})"]
    others = [fate for fate in FATES if fate != REFUSED and searched[fate]]
    words = words * bool(subjects) + [f"{searched[fate]:,} {_FATE_WORDS.get(fate, fate)}" for fate in others]
    counts = f"{counted(searched['candidates'], 'candidate')}: {', '.join(words)}"
    return [", ".join(asked), *[SPLIT_NOTE] * split, counts, *values_left_out(plan.search.space, wanted), plan.status]
