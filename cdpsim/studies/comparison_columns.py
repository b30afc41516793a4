"""A comparison: its rows, the lines above and below them, and its table, with the columns that it shows by default."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from cdpsim.errors import choose, one_line
from cdpsim.files.tables import LINE, Column, PrintedTable, data_frame, with_words
from cdpsim.files.units import counted, in_number
from cdpsim.request.options import flag_of
from cdpsim.schedules import SCHEDULES, ZERO_NAMES
from cdpsim.studies.compare import Measured, rate_column, table_notes

if TYPE_CHECKING:
    import pandas as pd

# Schedules whose data ranks have all stages: with one micro-batch each, they have more in a training step.
_ONE_PLACE = {*(name for name, each in SCHEDULES.items() if each.order.one_place), *ZERO_NAMES}


def _measured_column(name: str, unit: str = "", in_files: str = "", **settings: Any) -> tuple[str, Column]:
    """Return a figure's name on a command line, and its column with the unit of real costs."""
    return name.replace("_", "-"), Column(in_files or name, lambda row: row.value(name), unit=unit, **settings)


QUANTILES = ("5%", "50%", "95%")  # of the step, with --runs
MEASURED_COLUMNS = dict(
    (
        *map(_measured_column, ("devices", "n", "m", "chunks", "replicas", "batch")),
        _measured_column("makespan", "s"),
        _measured_column("step", "s"),
        *(_measured_column(quantile, "s", f"step {quantile}") for quantile in QUANTILES),
        _measured_column("sample_time", "s", "sample time"),
        _measured_column("rate", "/s", "micro-batches"),
        _measured_column("samples", "/s"),
        _measured_column("tokens", "/s"),
        _measured_column("per_device", "/s", "per device", heading="/device", digits=3, rank=3),
        _measured_column("mfu", "%", "MFU", rank=2),
        _measured_column("hfu", "%", "HFU"),
        _measured_column("bubble", "%", rank=1),
        _measured_column("exposed", "%", rank=5),
        _measured_column("imbalance", "%"),
        _measured_column("memory", "B"),
        _measured_column("fits"),
        *(
            _measured_column(name, "B")
            for name in ("activations", "parameters", "gradients", "optimizer", "communication")
        ),
        _measured_column("versions"),
        _measured_column("staleness", heading="stale", digits=3, rank=4),
        *map(_measured_column, ("messages", "rounds")),
        _measured_column("sent", "B"),
    )
)
# The columns of a table without --columns; "" is the rate.
_DEFAULT_COLUMNS = ("devices", *QUANTILES, "", "per-device", "mfu", "bubble", "exposed", "memory", "fits", "staleness")
_MEMORY_NAMES = ("optimizer", "gradients")  # options that have the names of columns of memory


SPLIT_NOTE = "a backward takes two slots, because some of these schedules split it (--model unit-split)"
_HIGHEST_FIRST = ("rate", "samples", "tokens", "per_device", "mfu", "hfu")
OWN_BATCH, ONE_MICRO_BATCH = "*", "+"  # marks of schedules that the notes explain


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    `devices` and `batch` (samples of a training step) are what all runs were asked for, where given. `heads` are lines
    above their table, and `notes` lines below it. `left_out` has schedules that could not run, by the subject of the
    refusal, and `untaken` schedules that ran without an option, by the option. Rows differ by the options in `lists`.
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
        return self.printed().rstrip("\n")

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(row.schedule for row in self.measured))
        return one_line(f"Comparison({counted(len(self), 'run')}: {'; '.join([names, *self.heads])})", 200)

    def _repr_html_(self) -> str:
        return replace(self._table("html", None), notes=[*self.notes, *self.remarks])._repr_html_()

    def printed(self, form: str = "text", columns: str | None = None) -> str:
        """Return the table in one of `FORMATS`.

        `columns` are names with commas between them, or "all". By default CSV has all columns, and tables for people
        the most asked for, of which those of the highest ranks go where a line is too long.
        """
        return self._table(form, columns).printed(form)

    def _table(self, form: str, columns: str | None) -> PrintedTable:
        """Return the table; one with the default columns has rules where rows of a schedule differ in them."""
        rows, by_default = self.measured, columns is None and form != "csv"
        known = known_columns(quantiles=any(row.steps for row in rows), slots=self.slots)
        if columns not in (None, "all"):
            names = column_names(columns, known)
        else:
            names = [name or rate_column(rows) for name in _DEFAULT_COLUMNS] if by_default else [*known]
        chosen = [known[name] if by_default else replace(known[name], heading=None) for name in names if name in known]
        chosen = with_words(chosen, rows) if form != "csv" and columns in (None, "all") else chosen
        rules = {(row.schedule, row.rule) for row in rows}
        ruled = "rule" not in self.lists and (not by_default or len(rules) > len({row.schedule for row in rows}))
        metrics = {column.name for column in chosen}
        lists = [
            Column(f"asked {name}" if name in metrics else name, partial(_asked, name))
            for name in self.lists
            if name not in metrics or name in _MEMORY_NAMES
        ]
        schedule = Column("schedule", words=lambda row: row.schedule + self.mark(row))
        return PrintedTable(
            [schedule, *lists, *[Column("rule")] * ruled, *chosen],
            rows,
            record=[row.to_builtins() for row in rows],
            heads=self.heads,
            notes=self.notes,
            width=LINE if by_default else inf,
        )

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
        """The lines on schedules that ran without an option, could not run, or have no steady state."""
        lines = [f"{flag_of(option)}: not taken by {', '.join(names)}" for option, names in self.untaken.items()]
        for subject, names in self.left_out.items():
            lines.append(f"left out because of {subject}: {', '.join(names)} (by its name each says why)")
        if short := dict.fromkeys(row.schedule for row in self.measured if row.period_is == "not steady"):
            lines.append(f"not steady: {', '.join(short)} (more steps than --steps have no room, or never end)")
        return lines

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
            yield f"{OWN_BATCH} at its own batch, in {in_number(0, self._sample)}: {', '.join(own)}"
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
        """Yield a line if micro-batches go through different numbers of stages, which all take equal slots."""
        names: dict[int, dict[str, None]] = {}
        for row in self.measured:
            names.setdefault(row.n, {})[row.schedule] = None
        if self.slots and self.devices and len(names) > 1:
            usual = max(names, key=lambda n: len(names[n]))
            others = "; ".join(f"{n} in {', '.join(names[n])}" for n in sorted(names) if n != usual)
            words = "all take equal slots: compare bubbles, not rates or memory"
            yield f"micro-batches have {usual} stages, but {others}; {words}"


def _asked(name: str, row: Measured) -> Any:
    return {"rule": row.rule, **row.asked}.get(name)


def known_columns(*, quantiles: bool, slots: bool = False) -> dict[str, Column]:
    """Return all columns by their names on a command line; a comparison of many runs also has quantiles."""
    return {
        name: replace(column, unit="") if slots and column.unit != "%" else column
        for name, column in MEASURED_COLUMNS.items()
        if quantiles or name not in QUANTILES
    }


def column_names(text: str, known: Collection[str]) -> list[str]:
    """Return the names in a text with commas between them; refuse one that is not known."""
    return [choose("columns", name.strip(), known) for name in text.split(",")]
