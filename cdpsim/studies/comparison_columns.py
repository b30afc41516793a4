"""A comparison: its rows, the lines above and below them, and its table, with the columns that it shows by default."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cdpsim.errors import choose, one_line
from cdpsim.files.tables import as_html, as_text, data_frame, format_table, with_notes
from cdpsim.files.units import counted, in_number, short_text
from cdpsim.schedules import SCHEDULES, ZERO_NAMES
from cdpsim.studies.compare import Measured, rate_column, table_notes

if TYPE_CHECKING:
    import pandas as pd

MOST_CHARACTERS = 100  # of a line of the table that has the default columns
_MOST_ROOM_OF_NAMES = 32  # characters of a name, of those
_ROOM_OF_ALL_NAMES = 60  # of the names in a row
# Schedules whose data ranks have all stages: with one micro-batch each, they have more in a training step.
_ONE_PLACE = {*(name for name, each in SCHEDULES.items() if each.order.one_place), *ZERO_NAMES}


class MeasuredColumn(NamedTuple):
    """A column of the table: its name, its unit with real costs, its heading; for people a shorter one, and digits."""

    name: str
    unit: str
    heading: str
    short: str = ""
    digits: int = 4


MEASURED_COLUMNS = (
    MeasuredColumn("devices", "", "devices"),
    MeasuredColumn("n", "", "n"),
    MeasuredColumn("m", "", "m"),
    MeasuredColumn("chunks", "", "chunks"),
    MeasuredColumn("replicas", "", "replicas"),
    MeasuredColumn("batch", "", "batch"),
    MeasuredColumn("makespan", "s", "makespan"),
    MeasuredColumn("step", "s", "step"),
    MeasuredColumn("sample_time", "s", "sample time"),
    MeasuredColumn("rate", "/s", "micro-batches"),
    MeasuredColumn("samples", "/s", "samples"),
    MeasuredColumn("tokens", "/s", "tokens"),
    MeasuredColumn("per_device", "/s", "per device", "/device", 3),
    MeasuredColumn("mfu", "%", "MFU"),
    MeasuredColumn("hfu", "%", "HFU"),
    MeasuredColumn("bubble", "%", "bubble"),
    MeasuredColumn("exposed", "%", "exposed"),
    MeasuredColumn("imbalance", "%", "imbalance"),
    MeasuredColumn("memory", "B", "memory"),
    MeasuredColumn("fits", "", "fits"),
    MeasuredColumn("activations", "B", "activations"),
    MeasuredColumn("parameters", "B", "parameters"),
    MeasuredColumn("gradients", "B", "gradients"),
    MeasuredColumn("optimizer", "B", "optimizer"),
    MeasuredColumn("communication", "B", "communication"),
    MeasuredColumn("versions", "", "versions"),
    MeasuredColumn("staleness", "", "staleness", "stale", 3),
    MeasuredColumn("messages", "", "messages"),
    MeasuredColumn("rounds", "", "rounds"),
    MeasuredColumn("sent", "B", "sent"),
)
# With --runs, beside the step.
QUANTILE_COLUMNS = tuple(MeasuredColumn(quantile, "s", f"step {quantile}") for quantile in ("5%", "50%", "95%"))
# The columns of a table without --columns; "" is the rate.
_SPEED_COLUMNS = ("devices", "5%", "50%", "95%", "", "per_device", "mfu")
_DEFAULT_COLUMNS = (*_SPEED_COLUMNS, "bubble", "exposed", "memory", "fits", "staleness")
_MEMORY_NAMES = ("optimizer", "gradients")  # options that have the names of columns of memory
_FIRST_TO_GO = ("exposed", "staleness", "per_device", "mfu", "bubble")  # where a line is too long


# The head of a table whose times are not those of the schedules alone.
SPLIT_NOTE = "a backward takes two slots, because some of these schedules split it (--model unit-split)"
_HIGHEST_FIRST = ("rate", "samples", "tokens", "per_device", "mfu", "hfu")
OWN_BATCH, ONE_MICRO_BATCH = "*", "+"  # marks of schedules that the notes explain


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    `devices` and `batch` are those that all runs were asked for, in samples of a training step, where given. `heads`
    are lines that belong above their table, and `notes` below it. `left_out` are schedules that could not run, by the
    subject of their refusals, and `untaken` those that ran without an option, by that option. `lists` are the options
    by which rows differ.
    """

    measured: list[Measured]
    devices: int | None = None
    batch: int | None = None
    slots: bool = True
    split: bool = False  # whether backwards take two slots because some of the schedules split them
    lists: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=dict)
    untaken: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.measured)

    def __iter__(self) -> Iterator[Measured]:
        return iter(self.measured)

    def __getitem__(self, row: int) -> Measured:
        return self.measured[row]

    def __str__(self) -> str:
        return comparison_table(self).rstrip("\n")

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(row.schedule for row in self.measured))
        return one_line(f"Comparison({counted(len(self), 'run')}: {'; '.join([names, *self.heads])})", 200)

    def _repr_html_(self) -> str:
        names, cells = _table_cells(self, _fitting_columns(self), "text")
        rows = [["-" if cell is None else str(cell) for cell in row] for row in cells]
        return as_html(names, rows, *self.heads, *self.notes, *self.remarks)

    def frame(self) -> "pd.DataFrame":
        """Return all metrics as a DataFrame of pandas, with a column for each option by which rows differ."""
        records = [row.to_builtins() for row in self.measured]
        asked = [record.pop("asked", {}) for record in records]
        apart = [{f"asked {name}": each[name] for name in _MEMORY_NAMES if name in each} for each in asked]
        return data_frame([own | each | record for own, each, record in zip(apart, asked, records, strict=True)])

    @property
    def heads(self) -> list[str]:
        """The lines above a table: what all rows have in common, and how long a backward takes."""
        words = [f"{self.devices} {in_number(self.devices, 'device')}"] if self.devices else []
        words += [f"{self.batch} {in_number(self.batch, self._sample)} in a training step"] if self.batch else []
        return [", ".join(words)] * bool(words) + [SPLIT_NOTE] * self.split

    @property
    def notes(self) -> list[str]:
        """The lines below a table: its marks, stages that take longer than others, its setting, and what is untied."""
        return [*self._marked(), *self._imbalances(), *self._unequal_stages(), *table_notes(self.measured)]

    @property
    def remarks(self) -> list[str]:
        """The lines on schedules that ran without an option, and on those that could not run."""
        untaken = [f"{option}: not taken by {', '.join(names)}" for option, names in self.untaken.items()]
        return untaken + [f"left out because of {why}: {', '.join(names)}" for why, names in self.left_out.items()]

    def mark(self, row: Measured) -> str:
        """Return the mark of a row that trains on another batch than asked for, or whose step is one micro-batch."""
        one = row.m == 1 and row.schedule not in _ONE_PLACE
        if one and any(other.micro_batches > row.micro_batches for other in self.measured):
            return ONE_MICRO_BATCH
        return OWN_BATCH if self.batch not in (None, row.batch) else ""

    def sorted_by(self, column: str) -> "Comparison":
        """Return the comparison with the least in a column first; of rates and utilizations, the most."""
        sign = -1 if column in _HIGHEST_FIRST else 1
        rows = [(row.value(column), row) for row in self.measured]
        known = sorted((pair for pair in rows if pair[0] is not None), key=lambda pair: sign * pair[0])
        return replace(self, measured=[row for _, row in known] + [row for value, row in rows if value is None])

    def by_throughput(self) -> "Comparison":
        """Return the comparison with the highest rate of each device first; in slots, of stages."""
        column = rate_column(self.measured)

        def throughput(row: Measured) -> float:
            rate = row.value(column) / row.devices * (row.n if self.slots else 1)
            return float(f"{rate:.12g}")  # equal ones stay in their order, whatever their last bits are

        return replace(self, measured=sorted(self.measured, key=throughput, reverse=True))

    @property
    def _sample(self) -> str:
        """The name of one of what a batch has."""
        return "sample" if any(row.sample_rate for row in self.measured) else "micro-batch"

    def _marked(self) -> Iterator[str]:
        """Yield a line for each mark in the table."""
        rows = {mark: [row for row in self.measured if self.mark(row) == mark] for mark in (OWN_BATCH, ONE_MICRO_BATCH)}
        if own := dict.fromkeys(f"{row.schedule} {row.batch}" for row in rows[OWN_BATCH]):
            yield f"{OWN_BATCH} at its own batch, of so many {in_number(0, self._sample)}: {', '.join(own)}"
        if one := dict.fromkeys(row.schedule for row in rows[ONE_MICRO_BATCH]):
            yield f"{ONE_MICRO_BATCH} a training step is one micro-batch: {', '.join(one)}"

    def _imbalances(self) -> list[str]:
        """Return a line for each number of stages of which one takes longer than the mean."""
        rows = sorted((row for row in self.measured if row.imbalance is not None), key=lambda row: row.n)
        several = len({row.n for row in rows}) > 1
        shares = [(row, f"{100 * (row.imbalance or 0):.1f} %") for row in rows]
        lines = [
            f"imbalance {share}, stage {row.longest_stage}"
            + f" ({row.longest_stage_name})" * bool(row.longest_stage_name)
            + f", of {row.n} stages" * several
            for row, share in shares
            if share != "0.0 %"
        ]
        return [*dict.fromkeys(lines)]

    def _unequal_stages(self) -> Iterator[str]:
        """Yield a line if micro-batches go through different numbers of stages, each of which takes as many slots."""
        names: dict[int, dict[str, None]] = {}
        for row in self.measured:
            names.setdefault(row.n, {})[row.schedule] = None
        if self.slots and self.devices and len(names) > 1:
            usual = max(names, key=lambda n: len(names[n]))
            others = "; ".join(f"{n} in {', '.join(names[n])}" for n in sorted(names) if n != usual)
            words = "all take equal slots: compare bubbles, not rates or memory"
            yield f"micro-batches have {usual} stages, but {others}; {words}"


def comparison_table(comparison: Comparison, form: str = "text", columns: str | None = None) -> str:
    """Return the table of a comparison in one of `FORMATS`.

    `columns` are names with commas between them, or "all". By default CSV has all columns, and tables for people those
    that fit into a line of 100 characters.
    """
    rows = comparison.measured
    if columns is not None and columns != "all":
        known = known_columns(quantiles=any(row.steps for row in rows))
        chosen = [known[name] for name in column_names(columns, known)]
    elif columns == "all" or form == "csv":
        every = [*known_columns(quantiles=any(row.steps for row in rows)).values()]
        chosen = every if form == "csv" else _filled(every, rows)
    else:
        chosen = _fitting_columns(comparison)
    names, cells = _table_cells(comparison, chosen, form, short=columns is None and form != "csv")
    records = [row.to_builtins() for row in rows]
    return with_notes(format_table(form, records, names, cells), form, comparison.notes, comparison.heads)


def known_columns(*, quantiles: bool) -> dict[str, MeasuredColumn]:
    """Return all columns by their names on a command line; a comparison of many runs also has quantiles."""
    before = next(k for k, column in enumerate(MEASURED_COLUMNS) if column.name == "step") + 1
    columns = (*MEASURED_COLUMNS[:before], *QUANTILE_COLUMNS * quantiles, *MEASURED_COLUMNS[before:])
    return {column.name.replace("_", "-"): column for column in columns}


def column_names(text: str, known: Collection[str]) -> list[str]:
    """Return the names in a text with commas between them; refuse one that is not known."""
    return [choose("columns", name.strip(), known) for name in text.split(",")]


def _filled(columns: Sequence[MeasuredColumn], rows: Sequence[Measured]) -> list[MeasuredColumn]:
    """Return the columns in which any row has a value."""
    return [column for column in columns if any(row.value(column.name) is not None for row in rows)]


def _fitting_columns(comparison: Comparison) -> list[MeasuredColumn]:
    """Return the default columns that have values, without the least important ones where a line is too long."""
    rows = comparison.measured
    rate = rate_column(rows)
    known = {column.name: column for column in known_columns(quantiles=any(row.steps for row in rows)).values()}
    columns = [known[name or rate] for name in _DEFAULT_COLUMNS if (name or rate) in known]
    columns = _filled(columns, rows)
    for name in _FIRST_TO_GO:
        names, cells = _table_cells(comparison, columns, "text")
        texts = [["-" if cell is None else str(cell) for cell in row] for row in cells]
        if len(as_text(names, texts).splitlines()[1]) <= MOST_CHARACTERS:
            break
        columns = [column for column in columns if column.name != name]
    return columns


def _table_cells(
    comparison: Comparison, columns: Sequence[MeasuredColumn], form: str, *, short: bool = True
) -> tuple[list[str], list[list[Any]]]:
    """Return the headings and the cells of a table; a `short` one has rules where rows of a schedule differ in them.

    A column of metrics that says what a listed option says stands for it.
    """
    rows, people = comparison.measured, form != "csv"
    room = min(_MOST_ROOM_OF_NAMES, _ROOM_OF_ALL_NAMES // (1 + len(comparison.lists)))
    shown = partial(_middle_cut, room=room) if form == "text" and short else str
    rules = {row.schedule: {other.rule for other in rows if other.schedule == row.schedule} for row in rows}
    with_rule = "rule" not in comparison.lists and (not short or any(len(each) > 1 for each in rules.values()))
    metrics = {column.name for column in columns}
    lists = [name for name in comparison.lists if name not in metrics or name in _MEMORY_NAMES]
    names = ["schedule", *(f"asked {name}" if name in metrics else name for name in lists), *["rule"] * with_rule]
    names += [column.short if short and column.short else column.heading for column in columns]
    cells = [
        [
            shown(row.schedule) + comparison.mark(row) * people,
            *(shown(asked[name]) if name in asked else None for name in lists),
            *[row.rule] * with_rule,
            *(measured_cell(row, column, form, slots=comparison.slots) for column in columns),
        ]
        for row in rows
        for asked in [{"rule": row.rule, **row.asked}]
    ]
    return names, cells


def _middle_cut(name: str, room: int) -> str:
    """Return a name without its middle if it is so long that a line would have no room for metrics.

    >>> _middle_cut("a-folder-of-orders/and-one-of-many-orders.csv", 32)
    'a-folder-of-ord…-many-orders.csv'
    """
    kept = room // 2
    return name if len(name) <= room else f"{name[: room - kept - 1]}…{name[-kept:]}"


def measured_cell(measured: Measured, column: MeasuredColumn, form: str, *, slots: bool) -> Any:
    """Return the cell of a column in a table of that format: the number itself in CSV, else a text."""
    value = measured.value(column.name)
    if form == "csv" or value is None:
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    number = float(value)
    if column.unit and not (slots and column.unit != "%"):
        return short_text(number, column.unit, 4 if column.unit == "%" else column.digits)
    return f"{number:.10g}" if number.is_integer() else f"{number:.{column.digits}g}"
