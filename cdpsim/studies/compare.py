"""Schedules side by side: time, idleness, memory, bytes, devices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from cdpsim.files.units import Number
from cdpsim.program import Category, EdgeKind
from cdpsim.request.description import MEMORY_NOTE, describe_setup, describe_untied
from cdpsim.runs import Run, SteadyState
from cdpsim.studies.montecarlo import spread
from cdpsim.trace.metrics import communication, memory, utilisation
from cdpsim.trace.metrics.waiting import waiting_time


@dataclass(frozen=True)
class Measured:
    """What a run comes to: slots and stages' worth under unit costs, else seconds and bytes.

    But for the makespan, all is of the run at rest, whatever number of steps was asked for. `step` is the time from the
    end of one training step to that of the next, which is certified or measured, as `period_is` says. `bubble` is the
    share of the lanes' time in which they do nothing, `exposed` the part of it in which they wait for a message that is
    on its way, or for a stream that messages block. `memory` is the most that one device holds, the
    categories the most of each on one device, and a run `fits` if no device needs more than it has. `versions` is
    the most of one stage's parameters that a device holds at once, `staleness` how many steps old what forwards read is
    on average. `messages` are those of one training step, `sent` is what they put on the wire, and `rounds`, in slots,
    how many of them must fit between two slots. `rate` is the micro-batches per unit of time, and `samples` the
    samples, where the model says how many a micro-batch has. `setting` is what is trained, how and on what; `untied`
    are stages that the model ties and this schedule does not.
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
    rate: float
    samples: float | None
    steps: dict[str, float] | None = None  # of many runs, the quantiles of `step`
    setting: str = ""  # nothing in the slot model
    untied: tuple[tuple[int, ...], ...] = ()

    def to_builtins(self) -> dict[str, Any]:
        """Give all of it by name."""
        empty = {"steps": None, "setting": "", "untied": ()}
        return {name: value for name, value in asdict(self).items() if name not in empty or value != empty[name]}


def notes(measured: Sequence[Measured]) -> list[str]:
    """Say what rows of a table are of, which of them leave tied stages untied, and what their memory leaves out."""
    words = [f"{words}; {MEMORY_NOTE}" for words in dict.fromkeys(one.setting for one in measured) if words]
    apart = dict.fromkeys(stages for one in measured for stages in one.untied)
    return words + [
        describe_untied(stages, [one.schedule for one in measured if stages in one.untied]) for stages in apart
    ]


CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "communication")


def measure(run: Run, runs: int | None = None) -> Measured:
    """Measure a run; of so many runs of its request, beside it, how long their steps take."""
    request, rest = run.request, run.at_rest
    program, start, end = rest.run.program, rest.run.start, rest.run.end
    peaks = rest.run.peaks.max(axis=0).tolist()
    rate = float(Fraction(int(program.counts[rest.steps].sum()), len(rest.steps)) / rest.period)
    each = request.model.samples
    rule = request.rule.recorded(request.shape)
    return Measured(
        schedule=request.schedule.name,
        rule=rule if isinstance(rule, str) else "custom",
        devices=program.devices,
        step=rest.period,
        period_is=rest.period_is,
        makespan=utilisation.makespan(run.program, run.end),
        bubble=rest.bubble,
        exposed=_exposed(rest),
        memory=peaks[-1],
        fits=bool((rest.run.peaks[:, -1] <= run.room).all()),
        **{name: peaks[Category[name.upper()]] for name in CATEGORIES},
        versions=int(memory.live_versions(program, start, end)["versions"].max(initial=0)),
        staleness=rest.staleness,
        messages=rest.per_step(len(rest.messages)),
        rounds=communication.rounds_between_slots(program, rest.run.costs.rounds, start, end) if run.in_slots else None,
        sent=_sent(rest) if run.in_slots else float(_sent(rest)),
        rate=rate,
        samples=rate * each if each else None,
        steps=None if runs is None else spread(run, runs).summary()["period"],
        setting="" if run.in_slots else ", ".join(describe_setup(request.model, request.cluster)),
        untied=program.untied,
    )


def _exposed(rest: SteadyState) -> float:
    """The share of the lanes' time in which they wait for messages."""
    run, low, high = rest.run, rest.low, rest.high
    program = run.program
    if not run.costs.duration[program.message_nodes].any() and not (program.edges.kind == EdgeKind.STREAM).any():
        return 0.0  # messages that take no time delay nothing, unless their streams do
    share: float = waiting_time(program, run.start, run.end, low, high) / ((len(program.lane_start) - 1) * (high - low))
    return min(share, rest.bubble)  # which it may exceed by a rounding


def _sent(rest: SteadyState) -> Number:
    """What goes over wires for one training step."""
    run = rest.run
    return rest.per_step(sum(communication.bytes_sent(run.program, run.costs, rest.messages), Fraction()))
