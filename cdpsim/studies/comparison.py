"""Schedules side by side, on equal devices and of equal batches where these are given; with lists, a row for each case.

>>> from cdpsim.studies.comparison import compare
>>> one = compare(["1f1b", "multi-cdp"], devices=8, batch=256, model="llama2-7b", cluster="a100-nodes")
>>> [(row.schedule, row.devices, row.n, row.m, row.batch) for row in one.measured]
[('1f1b', 8, 8, 128, 256), ('multi-cdp', 8, 8, 128, 256)]
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cdpsim.api import simulate
from cdpsim.errors import RequestError, UnknownName, choose, in_known_case, refuse_unknown, short_repr, whole_number
from cdpsim.model import UNIT_MODELS
from cdpsim.presets import find_model
from cdpsim.request import Request
from cdpsim.request.options import DEFAULTS, OPTION_NAMES, OPTIONS, read_value, refuse_renamed
from cdpsim.request.reading import LEAST_STEPS, least_steps, read_cluster, schedule_of
from cdpsim.request.sharing import Asked, named_zero, refuse_taken_by_none, taken_options, untaken_by
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES, ZERO_NAMES, Schedule, find_schedule
from cdpsim.studies.compare import Measured
from cdpsim.studies.comparison_columns import Comparison, known_columns
from cdpsim.studies.equal_shapes import equal_shape, in_slots
from cdpsim.studies.evaluate import measure_request
from cdpsim.studies.montecarlo import sample_runs

Compared = (
    str | Schedule | Request | Run | Mapping[str, Any]
)  # what can be compared; a mapping has the options of a request

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
        raise RequestError(
            "compare", f"{short_repr(item)} is no schedule; give a name, a request, a run, or a dict of options"
        )
    if isinstance(item, Request) or item.get("order") is not None:  # which the schedule has
        schedule = item.schedule if isinstance(item, Request) else schedule_of(item)
        item = {**item, "schedule": schedule, "order": None}
    derived = ("replicas",) * (devices is not None) + ("m",) * (batch is not None)
    return {name: value for name, value in item.items() if name not in derived}


def _devices_of_cluster(items: Sequence[Mapping[str, Any]], batch: int | None) -> int | None:
    """Return the devices of the one cluster of all items; None without a batch, or where an item says how many."""
    if batch is None or any(options.get(name) is not None for options in items for name in _SIZES_OF_DEVICES):
        return None
    clusters = [
        one for options in items for one in listed_values("cluster", options.get("cluster", DEFAULTS["cluster"]))
    ]
    counts = {read_cluster(cluster).count for cluster in clusters}
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
