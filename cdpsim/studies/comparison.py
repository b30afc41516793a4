"""Schedules side by side, on equal devices and of equal batches where these are given; with lists, a row for each case.

>>> from cdpsim.studies.comparison import compare
>>> one = compare(["1f1b", "multi-cdp"], devices=8, batch=256, model="llama2-7b", cluster="a100-nodes")
>>> [(row.schedule, row.devices, row.n, row.m, row.batch) for row in one.measured]
[('1f1b', 8, 8, 128, 256), ('multi-cdp', 8, 8, 128, 256)]
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

from cdpsim.api import simulate
from cdpsim.errors import (
    RequestError,
    UnknownName,
    choose,
    in_known_case,
    one_line,
    refuse_unknown,
    short_repr,
    whole_number,
)
from cdpsim.files.tables import LINE, Column, PrintedTable, data_frame, with_words
from cdpsim.files.units import counted, in_number
from cdpsim.model import UNIT_MODELS
from cdpsim.presets import find_model
from cdpsim.request import Request
from cdpsim.request.accuracy import KnownError, error_notes
from cdpsim.request.options import DEFAULTS, OPTION_NAMES, OPTIONS, flag_of, read_value, refuse_renamed
from cdpsim.request.reading import LEAST_STEPS, least_steps, read_cluster, schedule_of
from cdpsim.request.sharing import Asked, named_zero, refuse_taken_by_none, taken_options, untaken_by
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES, ZERO_NAMES, Schedule, find_schedule
from cdpsim.studies.compare import Measured, measure_request, rate_column, table_notes
from cdpsim.studies.equal_shapes import equal_shape, in_slots
from cdpsim.studies.montecarlo import sample_runs

if TYPE_CHECKING:
    import pandas as pd

# Schedules whose data ranks have all stages: with one micro-batch each, they have more in a training step.
_ONE_PLACE = {*(name for name, each in SCHEDULES.items() if each.order.one_place), *ZERO_NAMES}


def _measured_column(name: str, unit: str = "", in_files: str = "", **settings: Any) -> tuple[str, Column]:
    """Return a figure's name on a command line, and its column with the unit of real costs."""
    return name.replace("_", "-"), Column(in_files or name, lambda row: row.value(name), unit=unit, **settings)


QUANTILES = ("5%", "50%", "95%")  # of the step, with --runs
MEMORY_COLUMNS = ("activations", "parameters", "gradients", "optimizer", "communication")
MEASURED_COLUMNS = dict(
    (
        *map(_measured_column, ("devices", "n", "m", "chunks", "replicas", "tensor", "ranks", "batch")),
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
        _measured_column("flops", "FLOP/s"),
        _measured_column("bubble", "%", rank=1),
        _measured_column("exposed", "%", rank=5),
        _measured_column("imbalance", "%"),
        _measured_column("memory", "B"),
        _measured_column("fits"),
        *(_measured_column(name, "B") for name in MEMORY_COLUMNS),
        _measured_column("versions"),
        _measured_column("staleness", heading="stale", digits=3, rank=4),
        *map(_measured_column, ("messages", "rounds")),
        _measured_column("sent", "B"),
    )
)
# The columns of a table without --columns, behind devices or ranks; "" is the rate.
_DEFAULT_COLUMNS = (*QUANTILES, "", "per-device", "mfu", "bubble", "exposed", "memory", "fits", "staleness")
_MEMORY_NAMES = ("optimizer", "gradients")  # options that have the names of columns of memory


SPLIT_NOTE = "a backward takes two slots, because some of these schedules split it (--model unit-split)"
_HIGHEST_FIRST = ("rate", "samples", "tokens", "per_device", "mfu", "hfu", "flops")
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
        table = self._table("html", None)
        return replace(table, notes=[*table.notes, *self.remarks])._repr_html_()

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
        if self._in_groups:
            known["per-device"] = replace(known["per-device"], heading="/rank")
        if columns not in (None, "all"):
            names = column_names(columns, known)
        else:
            usual = ("ranks" if self._in_groups else "devices", *_DEFAULT_COLUMNS)
            names = [name or rate_column(rows) for name in usual] if by_default else [*known]
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
            notes=[*self.notes, *error_notes(self.errors)],
            width=LINE if by_default else inf,
        )

    def frame(self) -> "pd.DataFrame":
        """Return all metrics as a DataFrame of pandas, with a column for each option by which rows differ."""
        records = [replace(row, errors=()).to_builtins() for row in self.measured]
        asked = [record.pop("asked", {}) for record in records]
        apart = [{f"asked {name}": each[name] for name in _MEMORY_NAMES if name in each} for each in asked]
        return data_frame([own | each | record for own, each, record in zip(apart, asked, records, strict=True)])

    @property
    def heads(self) -> list[str]:
        """The lines above a table: what all rows have in common, and how long a backward takes."""
        words = [counted(self.devices, "rank" if self._in_groups else "device")] if self.devices else []
        words += [f"{self.batch} {in_number(self.batch, self._sample)} in a training step"] if self.batch else []
        return [", ".join(words)] * bool(words) + [SPLIT_NOTE] * self.split

    @property
    def errors(self) -> tuple[KnownError, ...]:
        """The errors of the classes of all rows, each once."""
        return tuple(dict.fromkeys(error for row in self.measured for error in row.errors))

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
            rate = row.value(column) / row.ranks * (row.n if self.slots else 1)
            return float(f"{rate:.12g}")  # equal ones stay in their order, whatever their last bits are

        return replace(self, measured=sorted(self.measured, key=throughput, reverse=True))

    @property
    def _in_groups(self) -> bool:
        """Whether any device is a group of ranks."""
        return any(row.ranks > row.devices for row in self.measured)

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


# What can be compared; a mapping has the options of a request.
Compared = str | Schedule | Request | Run | Mapping[str, Any]
_SIZES_OF_DEVICES = ("n", "replicas", "shard", "stage_replicas")


def compare(
    *schedules: Compared | Sequence[Compared],
    devices: int | None = None,
    batch: int | None = None,
    runs: int | None = None,
    sort: str | None = None,
    **options: Any,
) -> Comparison:
    """Return the measured runs of schedules, one by one or in a list; by default of all that take the options.

    `devices` gives each schedule the n, m and replicas that use this number of devices. `batch` gives it the m with
    which a training step has this number of samples, or of micro-batches if the model does not say their samples; then
    `devices` defaults to the cluster's count.
    A schedule whose number of micro-batches is its own keeps that, and is marked. An option that a request has once may
    be a list: rows are all combinations. `sort` is throughput (the default without names), given (with names: in their
    order) or a column. With `runs`, rows have the quantiles of the step over this number of runs.

    Schedules that cannot run are `left_out`. Unknown names are refused, and so is a comparison without rows.
    """
    named: list[Compared] = []
    for given in schedules:
        named += [given] if isinstance(given, str | Schedule | Run | Mapping) else given
    refuse_unknown("compare", options, (*OPTION_NAMES, "devices", "batch", "runs", "sort"), refuse_renamed)
    columns = [name.replace("-", "_") for name in known_columns(quantiles=runs is not None)]
    sort = choose("sort", sort or ("given" if named else "throughput"), ("throughput", "given", *columns))
    devices = None if devices is None else whole_number("devices", devices, at_least=1)
    batch = None if batch is None else whole_number("batch", batch, at_least=1)
    _check_shared_options(options, devices, batch)
    lists = {name: listed_values(name, options[name]) for name in OPTION_NAMES if has_several(name, options.get(name))}
    cases = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    items = [_options_of_item(item, devices, batch) for item in named or SCHEDULES]
    devices = devices or _devices_of_cluster([item | options for item in items], batch)
    every = [{"ignore_memory": True} | item | options | case for item in items for case in cases]
    if len({in_slots(own) for own in every}) > 1:
        raise RequestError("model", "some are in slots, and some in seconds; give all of them a model, or none")
    for model in ({}, {"model": UNIT_MODELS[1]}):
        rows = _Rows(devices, batch, runs, tuple(lists), sizes_matter=not named or bool(lists))
        if all(rows.add(own | model, one_clock=len(every) > 1) for own in every):
            break
    return rows.comparison(split=bool(model), sort=sort)


def _check_shared_options(options: Mapping[str, Any], devices: int | None, batch: int | None) -> None:
    """Refuse values that no schedule takes, also of options that only some take, and what follows from others."""
    for name, given in options.items():
        for value in listed_values(name, given):
            if name in OPTIONS:
                read_value(name, value)
            elif name == "n" and value is not None:
                whole_number(name, value, at_least=1)
    for option, of, given in (("replicas", "--devices", devices), ("m", "--batch", batch)):
        if given is not None and options.get(option) is not None:
            raise RequestError(option, f"follows from {of}; leave either out")


def has_several(name: str, value: Any) -> bool:
    """Return whether an option has several values; some options, and a rule of rows, are lists themselves."""
    listed = not (name in OPTIONS and OPTIONS[name].is_list) and isinstance(value, list | tuple | range)
    return listed and not (value and isinstance(value[0], list | tuple))


def listed_values(name: str, value: Any) -> list[Any]:
    """Return the values of an option; refuse an empty list."""
    values = list(value) if has_several(name, value) else [value]
    if not values:
        raise RequestError(name.replace("_", "-"), "is an empty list; give a value, or leave it out")
    return values


def _options_of_item(item: Compared, devices: int | None, batch: int | None) -> dict[str, Any]:
    """Return the options of an item, without options that follow from devices and a batch."""
    if isinstance(item, str | Schedule):
        return {"schedule": item}
    if isinstance(item, Run):
        item = item.request
    if not isinstance(item, Mapping):
        remedy = "give a name, a request, a run, or a dict of options"
        raise RequestError("compare", f"{short_repr(item)} is no schedule; {remedy}")
    if isinstance(item, Request) or item.get("order") is not None:  # which the schedule has
        schedule = item.schedule if isinstance(item, Request) else schedule_of(item)
        item = {**item, "schedule": schedule, "order": None}
    derived = ("replicas",) * (devices is not None) + ("m",) * (batch is not None)
    return {name: value for name, value in item.items() if name not in derived}


def _devices_of_cluster(items: Sequence[Mapping[str, Any]], batch: int | None) -> int | None:
    """Return the devices of the one cluster of all items; None without a batch, or where an item says how many."""
    if batch is None or any(options.get(name) is not None for options in items for name in _SIZES_OF_DEVICES):
        return None
    asked = (options.get("cluster", DEFAULTS["cluster"]) for options in items)
    counts = {read_cluster(cluster).count for each in asked for cluster in listed_values("cluster", each)}
    return counts.pop() if len(counts) == 1 else None


class _Rows:
    """The rows of a comparison, measured one run after another; a schedule that cannot run is left out.

    With `sizes_matter`, so is one that takes another number of micro-batches or replicas than asked for.
    """

    def __init__(
        self, devices: int | None, batch: int | None, runs: int | None, lists: tuple[str, ...], *, sizes_matter: bool
    ) -> None:
        self.devices, self.batch, self.runs, self.lists = devices, batch, runs, lists
        self.sizes_matter = sizes_matter
        self.asked: list[Asked] = []
        self.ran: list[Asked] = []  # of these
        self.measured: list[Measured] = []
        self.left_out: dict[str, list[str]] = {}
        self.refusal: RequestError | None = None
        self.request: Request | None = None  # of the last one

    def add(self, options: Mapping[str, Any], *, one_clock: bool) -> bool:
        """Measure a request, unless it is one of before; return False if on one clock others' backwards are too short.

        So they are if this schedule splits them: then each takes two slots.
        """
        name = in_known_case(options["schedule"], ZERO_NAMES)
        options = {**options, **named_zero(options)}
        schedule = find_schedule(options["schedule"])
        try:
            own = dict(options) | equal_shape(schedule, options, self.devices, self.batch)
            own |= {} if own.keys() & {"steps", "counts"} else {"steps": _default_steps(own, schedule)}
            sizes = ("replicas",) if schedule.m is not None else ("m", "replicas")
            own["schedule"] = schedule
            self.asked.append((schedule, own))
            taken = taken_options(schedule, own, needed=sizes if self.sizes_matter else ())
            request = Request.from_builtins(taken)
            measured = measure_request(request)
        except RequestError as error:
            if isinstance(error, UnknownName):
                raise
            case = ", ".join(f"{name}={option_text(options[name])}" for name in self.lists)
            self.left_out.setdefault(error.subject, []).append(schedule.name + f" ({case})" * bool(case))
            self.refusal = self.refusal or error
            return True
        self.ran.append((schedule, own))
        if one_clock and in_slots(options) and request.model.name != options.get("model", UNIT_MODELS[0]):
            return False
        if self.runs is not None and request.disorder.is_random:
            measured = replace(measured, steps=sample_runs(simulate(request), self.runs).summary()["period"])
        if isinstance(name, str) and name in ZERO_NAMES:
            measured = replace(measured, schedule=name)
        asked = {name: option_text(taken[name]) for name in self.lists if name in taken}
        if not (self.lists and any(_same_metrics(measured, asked, other) for other in self.measured)):
            self.measured.append(replace(measured, asked=asked))
        self.request = request
        return True

    def comparison(self, *, split: bool, sort: str) -> Comparison:
        """Return all rows in an order; refuse options that none of them takes, and a comparison without any."""
        if self.request is None:
            assert self.refusal is not None
            raise self.refusal
        refuse_taken_by_none(self.asked)
        if self.runs is not None and not any(row.steps for row in self.measured):
            sample_runs(simulate(self.request), self.runs)  # which refuses a run in which nothing is random
        found = Comparison(
            self.measured,
            self.devices,
            self.batch,
            slots=self.request.in_slots,
            split=split,
            lists=self.lists,
            left_out=self.left_out,
            untaken=untaken_by(self.ran),
        )
        return found if sort == "given" else found.by_throughput() if sort == "throughput" else found.sorted_by(sort)


def _same_metrics(measured: Measured, asked: Mapping[str, str], other: Measured) -> bool:
    """Return whether a row with these values of options has the metrics of another with some of them, or more."""
    within = asked.items() <= other.asked.items() or other.asked.items() <= asked.items()
    return within and replace(measured, asked=other.asked) == other


def option_text(value: Any) -> str:
    """Return a value of an option in words: a number, a name, or the name of a model or a cluster."""
    return str(getattr(value, "name", value))


def _default_steps(options: Mapping[str, Any], schedule: Schedule) -> int:
    """Return the number of steps without --steps, with which all schedules run equally many micro-batches."""
    if schedule.m != 1:
        return least_steps(options.get("warm_up"))
    n = options.get("n")
    if n is None and not in_slots(options):
        n = find_model(options["model"]).n
    return LEAST_STEPS * (1 if n is None else whole_number("n", n, at_least=1))
