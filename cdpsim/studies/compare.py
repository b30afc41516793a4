"""Comparison of schedules: time, bubble, memory, bytes, devices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from cdpsim.files.units import Number
from cdpsim.program import Category, EdgeKind
from cdpsim.request import Request
from cdpsim.request.description import MEMORY_NOTE, describe_setup, describe_untied
from cdpsim.runs import Run, SteadyState
from cdpsim.schedules.rule import CUSTOM
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.trace.metrics import communication, memory, utilisation
from cdpsim.trace.metrics.waiting import waiting_time

_FIELDS = {"rate": "micro_batch_rate", "samples": "sample_rate"}  # by their columns, which have other names


@dataclass(frozen=True)
class Measured:
    """The figures of a run: slots and stage-activations under unit costs, else seconds and bytes.

    All figures but the makespan are of the run at rest; they do not depend on its number of steps. `step` is the time
    from the end of one training step to that of the next; `period_is` says whether it is certified or measured.
    `bubble` is the share of the lanes' time in which they are idle, and `exposed` the part of it in which they wait for
    a message that is on its way, or for a stream that messages block. `memory` is the peak memory of the fullest
    device, and each category has its own peak over all devices. A run `fits` if no device needs more than it has.
    `versions` is the largest number of versions of a stage's parameters on one device. `staleness` is the mean age, in
    steps, of the parameters that forwards read. `messages` is their number in a training step, `sent` their bytes on
    the wire, and `rounds`, in slots, the number of rounds that must fit between two slots. `micro_batch_rate` is the
    number of micro-batches per unit of time, and `sample_rate` that of samples, if the model says how many samples a
    micro-batch has. `steps` has the quantiles of `step` over many runs. `setting` describes the model, how it is
    trained, and the cluster; it is empty in the slot model. `untied` are stages that the model ties and this schedule
    does not.
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
    steps: dict[str, float] | None = None
    setting: str = ""
    untied: tuple[tuple[int, ...], ...] = ()

    def to_builtins(self) -> dict[str, Any]:
        """Return all figures by the keys of files, but for those of the last three fields that are empty."""
        columns = {field: column for column, field in _FIELDS.items()}
        optional = ("steps", "setting", "untied")
        fields = asdict(self).items()
        return {columns.get(name, name): value for name, value in fields if value or name not in optional}

    def value(self, column: str) -> Any:
        """Return the figure in a column of a table; a quantile, such as `5%`, is that of the step, if there is one."""
        return (self.steps or {}).get(column) if column.endswith("%") else getattr(self, _FIELDS.get(column, column))


def table_notes(measured: Sequence[Measured]) -> list[str]:
    """Return the notes below a table: its setting, what memory leaves out, and which schedules untie tied stages."""
    words = [f"{words}; {MEMORY_NOTE}" for words in dict.fromkeys(one.setting for one in measured) if words]
    apart = dict.fromkeys(stages for one in measured for stages in one.untied)
    return words + [
        describe_untied(stages, [one.schedule for one in measured if stages in one.untied]) for stages in apart
    ]


def rate_column(measured: Sequence[Measured]) -> str:
    """Return the column of rates that a table shows: `samples` where any model says how many a micro-batch has."""
    return "samples" if any(one.sample_rate for one in measured) else "rate"


def rule_word(request: Request) -> str:
    """Return the name of a request's rule, or `custom` if it is given as its lags."""
    recorded = request.rule.record(request.shape)
    return recorded if isinstance(recorded, str) else CUSTOM


def measure(run: Run, runs: int | None = None) -> Measured:
    """Measure a run at rest, and with `runs` also the quantiles of the step over this many runs of its request."""
    request, rest = run.request, run.steady_state
    program, start, end = rest.run.program, rest.run.start, rest.run.end
    peaks = rest.run.peaks.max(axis=0).tolist()
    rate = float(Fraction(int(program.counts[rest.steps].sum()), len(rest.steps)) / rest.period)
    samples = request.model.samples
    sent = rest.per_step(sum(communication.bytes_sent(program, rest.run.costs, rest.messages), Fraction()))
    return Measured(
        schedule=request.schedule.name,
        rule=rule_word(request),
        devices=program.devices,
        step=rest.period,
        period_is=rest.period_is,
        makespan=utilisation.makespan(run.program, run.end),
        bubble=rest.bubble,
        exposed=_exposed(rest),
        memory=peaks[-1],
        fits=bool((rest.run.peaks[:, -1] <= run.device_memory).all()),
        **{category.name.lower(): peaks[category] for category in Category},
        versions=int(memory.live_versions(program, start, end)["versions"].max(initial=0)),
        staleness=rest.staleness,
        messages=rest.per_step(len(rest.messages)),
        rounds=communication.rounds_between_slots(program, rest.run.costs.rounds, start, end) if run.in_slots else None,
        sent=sent if run.in_slots else float(sent),
        micro_batch_rate=rate,
        sample_rate=rate * samples if samples else None,
        steps=None if runs is None else sample_runs(run, runs).summary()["period"],
        setting="" if run.in_slots else ", ".join(describe_setup(request.model, request.cluster)),
        untied=program.untied,
    )


def _exposed(rest: SteadyState) -> float:
    """Return the share of the lanes' time in which they wait for messages."""
    run, low, high = rest.run, rest.low, rest.high
    program = run.program
    if not run.costs.duration[program.message_nodes].any() and not (program.edges.kind == EdgeKind.STREAM).any():
        return 0.0  # messages that take no time delay nothing, unless their streams do
    share: float = waiting_time(program, run.start, run.end, low, high) / ((len(program.lane_start) - 1) * (high - low))
    return min(share, rest.bubble)  # which it may exceed by a rounding
