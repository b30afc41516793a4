"""Schedules side by side: time, idleness, memory, bytes, devices."""

from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.metrics import communication, memory, traffic, utilisation
from cdpsim.metrics.staleness import mean_staleness
from cdpsim.metrics.waiting import Reason, idle
from cdpsim.montecarlo import spread
from cdpsim.program import Category
from cdpsim.trace import Run, Trace


@dataclass(frozen=True)
class Measured:
    """What a run comes to: slots and stages' worth under unit costs, else seconds and bytes.

    `step` is the time from the end of one training step to that of the next. `bubble` is the share of the lanes' time
    in which they do nothing, `exposed` the part of it in which they wait for a message that is on its way, or for a
    stream that messages block; both over half of the run's steps. `memory` is the most that one device holds,
    the categories the most of each on one device, and a run `fits` if no device needs more than it has. `versions` is
    the most of one stage's parameters that a device holds at once, `staleness` how many steps old what forwards read is
    on average. `messages` are those of one training step, `sent` is what they put on the wire, and `rounds`, in slots,
    how many of them must fit between two slots. `rate` is the micro-batches per unit of time, and `samples` the
    samples, where the model says how many a micro-batch has.
    """

    schedule: str
    rule: str
    devices: int
    step: float | None
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
    staleness: float | None
    messages: int
    rounds: int | None
    sent: float
    rate: float | None
    samples: float | None
    steps: dict[str, float] | None = None  # of many runs, the quantiles of `step`

    def to_builtins(self) -> dict[str, Any]:
        """Give all of it by name."""
        return {name: value for name, value in asdict(self).items() if name != "steps" or value is not None}


CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "communication")


def measure(trace: Trace, runs: int | None = None) -> Measured:
    """Measure a run; of so many runs of its request, beside it, how long their steps take."""
    run = trace.run
    assert run is not None, "what is loaded has no lanes"
    program = run.program
    held = memory.peaks(program, run.start, run.end)
    peaks = held.max(axis=0).tolist()
    has = Cluster.from_builtins(trace.request["cluster"], "cluster").memory_bytes(program.devices)
    step = utilisation.period(program, run.end)
    rate = program.m / step if step else None
    each = _samples(trace)
    bubble, exposed = _idleness(run)
    rule = trace.request["rule"]
    return Measured(
        schedule=str(trace.request["schedule"]),
        rule=rule if isinstance(rule, str) else "custom",
        devices=program.devices,
        step=step,
        makespan=utilisation.makespan(program, run.end),
        bubble=bubble,
        exposed=exposed,
        memory=peaks[-1],
        fits=bool((held[:, -1] <= has).all()),
        **{name: peaks[Category[name.upper()]] for name in CATEGORIES},
        versions=int(memory.live_versions(program, run.start, run.end)["versions"].max(initial=0)),
        staleness=mean_staleness(program),
        messages=int(np.count_nonzero(trace.messages["step"] == _step_at_rest(run))),
        rounds=communication.rounds(program, run.costs.rounds, run.start, run.end) if trace.in_slots else None,
        sent=_sent(trace, run),
        rate=rate,
        samples=rate * each if rate and each else None,
        steps=None if runs is None else spread(trace, runs).summary()["period"],
    )


def _samples(trace: Trace) -> int | None:
    """How many samples a micro-batch has, as far as its model says that."""
    model = trace.request["model"]
    return model.get("samples") if isinstance(model, dict) else None


def _idleness(run: Run) -> tuple[float, float]:
    """The shares of the lanes' time, over whole steps, that are idle and that wait for messages."""
    program = run.program
    low, high = utilisation.at_rest(program, run.start, run.end)
    parts = idle(program, run.start, run.end)
    length = np.minimum(parts["end"], high) - np.maximum(parts["begin"], low)
    length = np.maximum(length, 0)
    waits = length[np.isin(parts["reason"], (Reason.MESSAGE, Reason.STREAM))]
    if run.costs.calendar is not None:  # in the midst of a task, too
        tasks = np.arange(len(program.lane_tasks))
        begin, until = run.costs.calendar.pauses(tasks, run.start[tasks], run.end[tasks])
        length = np.append(length, np.maximum(np.minimum(until, high) - np.maximum(begin, low), 0))
    whole = (high - low) * (len(program.lane_start) - 1)
    return fsum(length) / whole, fsum(waits) / whole  # rounded once: a part is never more than all


def _sent(trace: Trace, run: Run) -> float:
    """What goes over wires for one training step."""
    shares = traffic.shares(trace.messages, run.collective, trace.algorithms)
    step = trace.messages["step"][shares.message]
    return float(shares.size[step == _step_at_rest(run)].sum())


def _step_at_rest(run: Run) -> int:
    """The last training step whose version all micro-batches read.

    Not the first one: where stages take unequal times, what runs ahead comes to rest only after some steps.
    """
    return int(communication.full_versions(run.program).max(initial=1)) - 1
