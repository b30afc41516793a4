"""The metrics of a run: a row of a comparison, and six facts for people."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cdpsim.files.units import Number, counted, short_text
from cdpsim.limits import UNLIMITED
from cdpsim.model import Model
from cdpsim.program import Category
from cdpsim.request import Request, describe_setup, describe_untied, end_check, memory_note
from cdpsim.request.accuracy import KnownError, error_tables, errors_of
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.runs.evaluation import evaluate_request, evaluate_requests, evaluation_of
from cdpsim.runs.ranks import rates_of_run
from cdpsim.runs.steady_metrics import Metrics
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import BY_MICRO_BATCH
from cdpsim.schedules.rule import CUSTOM
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.timing.costs import pass_times, reached
from cdpsim.trace.table import ExchangeRow, Table

# By their columns, which have other names.
_FIELDS = {"rate": "micro_batch_rate", "samples": "sample_rate", "tokens": "token_rate"}
_OF_METRICS = ("period_is", "makespan", "bubble", "exposed", "versions", "staleness", "messages", "rounds")
# No metrics; records leave out empty ones.
LEFT_OUT_IF_EMPTY = ("steps", "setting", "workspace", "errors", "untied", "asked")


@dataclass(frozen=True)
class Measured:
    """The metrics of a run: slots and stage-activations under unit costs, else seconds and bytes.

    All metrics but the makespan are of the steady state and do not depend on the number of steps. `step` is the time
    from the end of one training step to that of the next; `period_is` says whether it is certified or measured.
    `bubble` is the share of the lanes' time in which they are idle, and `exposed` the part of it in which they wait for
    a message that is being sent, or for a stream that messages block. `memory` is the peak memory of the fullest
    device, and each category has its own peak over all devices. A run `fits` if no device needs more than it has.
    `versions` is the largest number of versions of a stage's parameters on one device. `staleness` is the mean age, in
    steps, of the parameters that forwards read. `messages` is their number in a training step, `sent` their bytes on
    the wire, and `rounds`, in slots, the number of rounds that must fit between two slots. `micro_batch_rate` is the
    number of micro-batches per unit of time, and `sample_rate` that of samples, if the model says how many samples a
    micro-batch has; `sample_time` is the time for one. `token_rate` is the number of tokens, if the model says how many
    a sample has. `per_device` is the last of these rates that the model allows, for each device.

    A device is a group of ranks that share each task, `tensor` of them its tensors, and `ranks` are those of all
    devices: `per_device` and `flops` (in a second) are of each rank, `sent` is of all, and memory and messages of one
    rank of each group.

    `n`, `m`, `chunks` and `replicas` are the numbers with which the schedule ran, `micro_batches` those of all replicas
    in a training step, of rounds about, and `batch` their samples, or themselves if the model does not say how many
    samples they have.
    `mfu` is the FLOP of the model's forwards and backwards over what the devices could compute in that time at the peak
    of its precision; `hfu` counts recomputation, too. `imbalance` is by how much the longest forward and backward of a
    stage exceeds the mean, where stages have devices of their own; `longest_stage` is its number, and then its name.

    `steps` has the quantiles of `step` over many runs. `setting` describes the model, how it is trained, and the
    cluster. `workspace` is the most that kernels take of a device beside tensors. `errors` are those of the row's
    classes, where these were measured. All three are empty in the slot model.
    `untied` are stages that the model ties and this schedule does not. `asked` has the values of the options by which
    rows of a comparison differ.
    """

    schedule: str
    rule: str
    devices: int
    step: Number
    period_is: str
    makespan: float
    bubble: float
    exposed: float
    memory: int
    fits: bool
    activations: int
    parameters: int
    gradients: int
    optimizer: int
    communication: int
    versions: int
    staleness: float
    messages: Number
    rounds: int | None
    sent: Number
    micro_batch_rate: float
    sample_rate: float | None
    sample_time: float | None
    token_rate: float | None
    per_device: float
    n: int
    m: int
    chunks: int
    replicas: int
    tensor: int
    ranks: int
    micro_batches: int
    batch: int
    mfu: float | None
    hfu: float | None
    flops: float | None
    imbalance: float | None
    longest_stage: int | None
    longest_stage_name: str
    steps: dict[str, float] | None = None
    setting: str = ""
    workspace: int = 0
    errors: tuple[KnownError, ...] = ()
    untied: tuple[tuple[int, ...], ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)

    def to_builtins(self) -> dict[str, Any]:
        """Return all metrics by the keys of files, but for those of the last five fields that are empty."""
        columns = {name: column for column, name in _FIELDS.items()}
        fields = (asdict(self) | {"errors": error_tables(self.errors)}).items()
        return {columns.get(name, name): value for name, value in fields if value or name not in LEFT_OUT_IF_EMPTY}

    def __getitem__(self, column: str) -> Any:
        """Return the figure in a column, or the value of an option by which rows differ."""
        try:
            return self.value(column)
        except AttributeError:
            return self.asked[column]

    def value(self, column: str) -> Any:
        """Return the figure in a column of a table; a quantile, such as `5%`, is that of the step, if there is one."""
        return (self.steps or {}).get(column) if column.endswith("%") else getattr(self, _FIELDS.get(column, column))


def table_notes(measured: Sequence[Measured]) -> list[str]:
    """Return the notes below a table: its setting, what memory leaves out, and which schedules untie tied stages."""
    words = [words for words in dict.fromkeys(one.setting for one in measured) if words]
    words[-1:] = [f"{last}; {memory_note(one.workspace for one in measured)}" for last in words[-1:]]
    apart = dict.fromkeys(stages for one in measured for stages in one.untied)
    return words + [
        describe_untied(stages, [one.schedule for one in measured if stages in one.untied]) for stages in apart
    ]


def rate_column(measured: Sequence[Measured]) -> str:
    """Return the column of rates that all runs have and a table shows: tokens, samples or micro-batches per time."""
    known = ("tokens", "samples")
    return next((column for column in known if all(one.value(column) for one in measured)), "rate")


def rule_word(request: Request) -> str:
    """Return the name of a request's rule, or `custom` if it is given as its lags."""
    recorded = request.rule.record(request.shape)
    return recorded if isinstance(recorded, str) else CUSTOM


def measure(run: Run, runs: int | None = None) -> Measured:
    """Measure the steady state of a run, and with `runs` the quantiles of the step over this number of runs."""
    steps = None if runs is None else sample_runs(run, runs).summary()["period"]
    return measured_of(*evaluation_of(run), steps)


def measured_of(
    request: Request,
    metrics: Metrics,
    devices: int,
    untied: tuple[tuple[int, ...], ...] = (),
    steps: dict[str, float] | None = None,
) -> Measured:
    """Return the row of a comparison for a request with these metrics."""
    rate, peaks = float(metrics.passes / metrics.period), metrics.peaks.max(axis=0).tolist()
    micro_batches = request.shape.micro_batches if request.schedule.order.waits else round(metrics.passes)
    model, cluster, mesh = request.model, request.cluster, request.model.mesh
    return Measured(
        schedule=request.schedule.name,
        rule=rule_word(request),
        devices=devices,
        step=metrics.period,
        **{name: getattr(metrics, name) for name in _OF_METRICS},
        memory=peaks[-1],
        fits=bool((metrics.peaks[:, -1] <= cluster.memory_bytes(len(metrics.peaks))).all()),
        **{category.name.lower(): peaks[category] for category in Category},
        sent=metrics.sent if request.in_slots else float(metrics.sent) * mesh.team,
        tensor=mesh.tensor,
        ranks=devices * mesh.team,
        **rates_of_run(request, rate, devices),
        **_imbalance(request),
        **{name: getattr(request.shape, name) for name in ("n", "m", "chunks", "replicas")},
        micro_batches=micro_batches,
        batch=micro_batches * (model.samples or 1),
        steps=steps,
        setting="" if request.in_slots else ", ".join(describe_setup(model, cluster, request.runtime)),
        workspace=cluster.workspace_bytes,
        errors=errors_of(request, devices),
        untied=untied,
    )


def _imbalance(request: Request) -> dict[str, Any]:
    """Return by how much the longest stage exceeds the mean, and that stage; None where a device has all stages.

    Stages are those of the schedule, of which each may be several layers.
    """
    placement, one_place = request.schedule.placement, request.schedule.order.one_place
    if request.in_slots or one_place or placement.lanes or placement.name == BY_MICRO_BATCH.name:
        return {"imbalance": None, "longest_stage": None, "longest_stage_name": ""}
    model, shape = request.timed_model, request.shape
    share, longest, name = _longest_stage(model, reached(request.cluster, 1, model)[0], shape.layers, shape.widths)
    return {"imbalance": share, "longest_stage": longest, "longest_stage_name": name}


@lru_cache(maxsize=256)
def _longest_stage(
    model: Model, speed: float | None, layers: tuple[int, ...], widths: tuple[int, ...]
) -> tuple[float, int, str]:
    """Return by how much the longest stage exceeds the mean, its number and its name."""
    first = [*(layers or range(model.n)), model.n]
    times = np.add.reduceat(pass_times(model, "forward", speed) + pass_times(model, "backward", speed), first[:-1])
    many = np.array(widths or [1] * len(times))  # a stage's devices share its micro-batches
    each = times / many
    longest = int(each.argmax())
    share = float(each.max() / (times.sum() / many.sum()) - 1)
    names = dict.fromkeys(model.stages[layer].name for layer in (first[longest], first[longest + 1] - 1))
    return share, longest, " – ".join(filter(None, names))


def overview(run: Run, runs: int | None = None) -> dict[str, str]:
    """Return six facts of a run in its steady state, in words, by their names; with `runs` quantiles of the step.

    A model of layers has its utilization beside them, and groups of ranks their exchanges.
    """
    row, shape, unit = measure(run, runs), run.request.shape, "stage-activation" if run.in_slots else "B"
    stages = counted(shape.parts, "stage") + f" of {counted(shape.n, 'layer')}" * bool(shape.layers)
    sizes = ", ".join((stages, counted(shape.m, "micro-batch"), counted(row.devices, "device")))
    sizes += f" of {row.ranks // row.devices} ranks" * (row.ranks > row.devices)
    zero = f" --zero {run.request.zero}" if accepts(run.request.schedule, "zero") and run.request.zero else ""
    steps = "step" if row.staleness == 1 else "steps"
    age = f"{row.staleness:.4g} {steps}, the mean age of the versions that forwards read"
    more = {} if run.request.model.layers is None else {"utilization": _utilization_text(row)}
    if run.exchanges is not None:
        more["exchanges"] = _exchanges_text(row, run.exchanges)
    return {
        "run": f"{row.schedule}{zero}: {sizes}; {row.setting or 'in slots'}",
        "step time": _step_text(run, row),
        "bubble": f"{short_text(row.bubble, '%')} of the devices' time; {short_text(row.exposed, '%')} is waiting for "
        "messages",
        "peak memory": _memory_text(run),
        "staleness": age if row.staleness else "0, every forward reads the newest version",
        "messages": f"{_amount_text(row.messages)} a step, {_amount_text(row.sent, unit)} sent",
    } | more


def _utilization_text(row: Measured) -> str:
    """Return what a rank reaches, of the model's FLOP and of those that it computes."""
    shares = [f"{name} {short_text(share, '%')}" for name, share in (("MFU", row.mfu), ("HFU", row.hfu)) if share]
    tokens = f"{short_text(row.per_device, '/s')[:-3]} {'tokens' if row.token_rate else 'micro-batches'}"
    computed = f" and {short_text(row.flops, 'FLOP')}" if row.flops else ""
    return "; ".join([", ".join(shares), f"{tokens}{computed} per second and rank"][not shares :])


def _exchanges_text(row: Measured, exchanges: Table[ExchangeRow]) -> str:
    """Return how many exchanges of ranks a step has, and which share of the devices' time they add to tasks."""
    many, added = float(exchanges.times.sum()), float((exchanges.times * exchanges.exposed).sum())
    share = short_text(added / (float(row.step) * row.devices), "%")
    team = row.ranks // row.devices
    groups = f"in groups of {team} ranks" if team > 1 else "among ranks that share experts"
    return f"{_amount_text(many)} a step {groups}; tasks wait for them {share} of the time"


def _step_text(run: Run, row: Measured) -> str:
    unit, per = ("slot", "slot") if run.in_slots else ("s", "second")
    later = "" if run.reaches_steady_state else f", later than {_own_steps(run)}"
    later = later if run.steady_state.is_steady else f" ({run.steady_state.not_steady})"
    rate = f"{row.sample_rate:.4g} samples" if row.sample_rate else f"{row.micro_batch_rate:.4g} micro-batches"
    step = f"{_amount_text(row.step, unit)}, {row.period_is}{later}; {rate} per {per}"
    if row.steps is None:
        return step
    low, high = (_amount_text(row.steps[share], unit) for share in ("5%", "95%"))
    return f"{step}; {low} to {high} in 90 % of the runs"


def _own_steps(run: Run) -> str:
    """Return words for the run's own steps, which do not reach its steady state."""
    return f"these {run.request.steps} steps" if run.request.steps > 1 else "this step"


def _memory_text(run: Run) -> str:
    """Return the peak memory of the fullest device, its room, and the largest peak of a category there."""
    peaks, unit = run.steady_state.run.peaks, "stage-activation" if run.in_slots else "B"
    device = int(np.argmax(peaks[:, -1]))
    *parts, total = peaks[device].tolist()
    most, room = int(np.argmax(parts)), float(run.device_memory[device])
    of = "" if np.isinf(room) else f" of {short_text(room, 'B')}"
    own = int(run.peaks[:, -1].max())
    later = f", {_amount_text(own, unit)} in {_own_steps(run)}" if own < total and not run.reaches_steady_state else ""
    category = f"{Category(most).name.lower()} up to {_amount_text(parts[most], unit)}"
    return f"{_amount_text(total, unit)}{of} on device {device}{later}; {category}"


def _amount_text(number: Number, unit: str = "") -> str:
    """Return a number with a unit of physics or a noun of the slot model, or alone."""
    if unit in ("s", "B"):
        return short_text(float(number), unit)
    whole = float(number).is_integer()
    if not unit:
        return f"{float(number):.10g}" if whole else f"{float(number):.4g}"
    return counted(int(number), unit) if whole else f"{float(number):.4g} {unit}s"


def evaluate(schedule: str | Schedule | Request, n: int | None = None, **options: Any) -> Measured:
    """Return the metrics of a request, or of a schedule and options; the memory of devices is ignored.

    A run that would be too large for this machine can be evaluated if what has to be run of it is not.

    >>> evaluate("1f1b", 4, m=8).bubble == 3 / 11
    True
    >>> evaluate("1f1b", 4, m=10**6).step
    2000006
    """
    if isinstance(schedule, Request):
        return measure_request(schedule)
    return measure_request(_read_request({"schedule": schedule, "n": n} | options))


def evaluate_all(requests: Iterable[Request | Mapping[str, Any]]) -> list[Measured]:
    """Return the metrics of many requests, or options of requests; requests that differ only in costs are run at once.

    >>> rows = evaluate_all({"schedule": "1f1b", "n": 4, "m": m} for m in (4, 8))
    >>> [row.step for row in rows]
    [14, 22]
    """
    made = [each if isinstance(each, Request) else _read_request(each) for each in requests]
    end_check()
    return [measured_of(*each) for each in evaluate_requests(made)]


def measure_request(request: Request) -> Measured:
    """Return the metrics of a request."""
    end_check()
    return measured_of(*evaluate_request(request))


def _read_request(options: Mapping[str, Any]) -> Request:
    """Return a request of options, which may be too large for this machine in all."""
    request = Request(**{**options, "ignore_memory": True, "max_memory": UNLIMITED})
    return request.with_limit(options.get("max_memory"))
