"""Questions that a sweep can ask at each point: their options, and the columns of an answer.

Installed packages bring others, as entry points of the group `cdpsim.questions`: a name, and a `Question`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from operator import attrgetter
from typing import Any, NamedTuple

from cdpsim.api import simulate
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files.units import json_number, simplified
from cdpsim.request import Request
from cdpsim.request.options import OPTION_NAMES
from cdpsim.request.reading import schedule_of
from cdpsim.request.sharing import accepts, named_zero
from cdpsim.schedules import find_schedule
from cdpsim.studies.breakeven import BreakEven, find_break_even, runner_on_clusters
from cdpsim.studies.compare import LEFT_OUT_IF_EMPTY, Measured, evaluate
from cdpsim.studies.equal_shapes import equal_shape
from cdpsim.studies.plan import plan
from cdpsim.studies.plan.space import SIMULATED
from cdpsim.studies.plan.wanted import PLAN_OPTIONS
from cdpsim.studies.pyramid import pyramid
from cdpsim.studies.superpose import Superposition, superpose

PointOptions = Mapping[str, Any]
Cells = Sequence[Any]


class Question(NamedTuple):
    """A question: the options that it takes, the columns of its answer, and the function that finds it.

    It cannot do without those that are `needed`.
    """

    needed: Sequence[str]
    options: Sequence[str]
    columns: Sequence[str]
    ask: Callable[[PointOptions], Cells]


MEASURED_FIELDS = tuple(field.name for field in fields(Measured) if field.name not in LEFT_OUT_IF_EMPTY)
_metrics_of = attrgetter(*MEASURED_FIELDS)
_BREAK_EVEN_COLUMNS = tuple(field.name for field in fields(BreakEven))


def _measured(options: PointOptions) -> Cells:
    """Return the metrics of a run, as `compare` shows them; of a number of devices and a batch, where given."""
    options, sizes = dict(options), {}
    for name in ("devices", "batch"):
        given = options.pop(name, None)
        sizes[name] = None if given is None else whole_number(name, given, at_least=1)
    if any(size is not None for size in sizes.values()):
        options |= named_zero(options)
        options |= equal_shape(find_schedule(options["schedule"]), options, sizes["devices"], sizes["batch"])
    return _metrics_of(evaluate(**options))


def _break_even(options: PointOptions) -> Cells:
    """Return the bandwidth from which on a schedule hides its messages; as at the command line, one is prefetched."""
    options = dict(options)
    share = options.pop("share", 0.01)
    cluster = options.get("cluster")
    if not isinstance(cluster, Cluster):
        raise RequestError("cluster", "is missing; its bandwidths are what is varied")
    if accepts(schedule_of(options), "prefetch"):
        options = {"prefetch": 1, **options}
    runner = runner_on_clusters(Request.from_builtins(options))
    return list(find_break_even(runner, cluster, share).to_builtins().values())


def _pyramid_cells(options: PointOptions) -> Cells:
    found = pyramid(simulate(Request.from_builtins(options)))
    widths = " ".join(str(each["devices"]) for each in found["stages"])
    return [*(found[name] for name in _PYRAMID_COLUMNS[:-1]), widths]


_PYRAMID_COLUMNS = ("n", "devices", "bound", "period", "period_is", "devices_of_stages")

# The options of a candidate that a plan varies, and metrics that are no options.
_CANDIDATE_OPTIONS = ("schedule", "n", "m", "chunks", "replicas", "shard", "zero", "rule", "recompute")
_BEST_METRICS = ("devices", "batch", "step", "samples", "memory", "staleness")
# The time of a search is no option, as its result would depend on the machine.
_PLAN_LIMITS = ("model", "cluster", "devices", "batch", "memory", "schedules", "staleness", "objective", "fewer")
_BEST_COLUMNS = tuple(f"best_{name}" for name in (*_CANDIDATE_OPTIONS, *_BEST_METRICS))
_PLAN_COLUMNS = (*_BEST_COLUMNS, "fits", "status", "candidates", "simulated")


def _best_plan(options: PointOptions) -> Cells:
    """Return the best candidate of a plan, or where none fits the one that needs least memory, and how it is known."""
    found = plan(**options, top=1)
    row = found.best or found.smallest
    asked = {} if row is None else row.to_builtins()["request"]
    metrics = [row and row.measured["ranks" if name == "devices" else name] for name in _BEST_METRICS]
    words = [found.best is not None, found.status, found.searched["candidates"], found.searched[SIMULATED]]
    return [*(asked.get(name) for name in _CANDIDATE_OPTIONS), *metrics, *words]


QUESTIONS: dict[str, Question] = {
    "compare": Question(("schedule",), (*OPTION_NAMES, "devices", "batch"), MEASURED_FIELDS, _measured),
    "breakeven": Question(("schedule", "cluster"), (*OPTION_NAMES, "share"), _BREAK_EVEN_COLUMNS, _break_even),
    "superpose": Question(
        ("model", "n"),
        ("model", "n", "axis", "contents", "by_layer"),
        (*Superposition._fields[:4], "dp_bytes", "cdp_bytes", "reduction"),
        lambda options: [*superpose(**options).row().values()],
    ),
    "plan": Question(("batch",), (*_PLAN_LIMITS, *PLAN_OPTIONS), _PLAN_COLUMNS, _best_plan),
    "pyramid": Question(("schedule",), OPTION_NAMES, _PYRAMID_COLUMNS, _pyramid_cells),
}


GROUP = "cdpsim.questions"


def question_names() -> list[str]:
    """Return the names of all questions, those of other packages last."""
    return [*QUESTIONS, *_others()]


@cache
def find_question(name: str) -> Question:
    """Return a question by its name; one of another package is imported, and refused if that lacks something."""
    if choose("what", name, question_names()) in QUESTIONS:
        return QUESTIONS[name]
    entry = _others()[name]
    package = entry.dist.name if entry.dist else entry.module
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # it is the code of others
        problem = f"{name!r} of {package} cannot be imported: {type(error).__name__}: {error}"
        raise RequestError("what", f"{problem}; install what it needs, or mend it") from None
    if not isinstance(found, Question):
        raise RequestError("what", f"{name!r} of {package} is no question; mend that package")
    return found


def _others() -> dict[str, EntryPoint]:
    """Return the questions of other packages, by their names."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in QUESTIONS}


def cell(value: Any) -> Any:
    """Return a figure as JSON has it: a fraction as a text in lowest terms, and so what is not finite."""
    if isinstance(value, Fraction):
        return json_number(simplified(value))
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return float(number) if isfinite(number) else str(float(number))
    return number
