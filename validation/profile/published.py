"""Steps that others measured and published, beside steps simulated from layer times that they published, too.

    python -m validation.profile.published validation/results/sailor-2025.json

Stages are sums of layer times, `1f1b` runs them on each replica, and messages and tasks take turns (overlap "none"),
as DeepSpeed's pipeline engine sends and receives in the stream of its tasks. A device is one tensor rank of a stage,
with its share of all bytes; the other ranks do the same. One latency, one bandwidth and one launch gap are fitted to
the reductions of gradients in runs of one stage. No step is fitted.

A *launch gap* is the host's time for the gradients of one layer at the end of a step, which no layer time has. It is
what a reduction takes with one data rank, where nothing is sent.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import fsum, inf
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.cli.console import exit_code_of, write_stdout
from cdpsim.cluster.topology import NONE, Devices, Link
from cdpsim.files.tables import as_text
from cdpsim.program import Op
from cdpsim.request.options import Rendezvous

from ..report.schema import read_as
from .fits import Sample, fit_collective

FITTED_ON = "GH-96"  # the cards to whose runs of one stage the link and the launch gap are fitted
RING: Final = "ring"
NUMBER_BYTES = 4  # bytes: all is in float32

PassSeconds = tuple[float, float]  # forward and backward, in seconds


class LayerTimes(msgspec.Struct, frozen=True):
    """The times of a micro-batch in each kind of layer, and of one update."""

    model: str
    gpu: str
    micro_batch: int
    tensor: int
    embedding: PassSeconds
    first: PassSeconds
    layer: PassSeconds
    head: PassSeconds
    update: float


class ModelSizes(msgspec.Struct, frozen=True):
    """The sizes of a model, and its parameters on one tensor rank, by the number of ranks."""

    layers: int
    width: int
    sequence: int
    parameters: dict[str, tuple[int, int, int]]  # of the embedding, a layer, the head


class MeasuredStep(msgspec.Struct, frozen=True):
    """A run and the seconds of its step; the reduction of gradients is a part of it."""

    model: str
    gpu: str
    tensor: int
    data: int
    layers_per_stage: tuple[int, ...]
    micro_batch: int
    global_batch: int
    step: float
    reduction: float
    peak_bytes: int

    @property
    def stages(self) -> int:
        """The number of stages of its pipeline."""
        return len(self.layers_per_stage)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of each replica."""
        return self.global_batch // (self.micro_batch * self.data)


class PublishedSteps(msgspec.Struct, frozen=True):
    """The content of a file of measurements."""

    source: str
    units: str
    notes: tuple[str, ...]
    models: dict[str, ModelSizes]
    profiles: tuple[LayerTimes, ...]
    runs: tuple[MeasuredStep, ...]


class Machine(NamedTuple):
    """A link between any two devices, and the host's time for the gradients of a layer."""

    latency: float
    bandwidth: float
    launch: float


class ComparedStep(NamedTuple):
    """A run, its role in the comparison, its simulated step, and its layer times with the published reduction."""

    role: str
    run: MeasuredStep
    simulated: float
    bare: float

    @property
    def error(self) -> float:
        """The relative error of the simulated step."""
        return self.simulated / self.run.step - 1

    @property
    def bare_error(self) -> float:
        """The relative error of the layer times with the published reduction."""
        return self.bare / self.run.step - 1


def load_published(path: str | Path) -> PublishedSteps:
    """Return the content of a file of measurements."""
    return read_as(PublishedSteps, path, "file of measurements", "give one")


def stages_of(published: PublishedSteps, run: MeasuredStep, launch: float = 0.0) -> tuple[Stage, ...]:
    """Return the stages of a run from the times and the parameters of their layers."""
    alike = (run.model, run.gpu, run.micro_batch, run.tensor)
    times = next(each for each in published.profiles if (each.model, each.gpu, each.micro_batch, each.tensor) == alike)
    sizes = published.models[run.model]
    costs = [times.embedding, times.first, *[times.layer] * (sizes.layers - 1), times.head]
    embedding, layer, head = sizes.parameters[str(run.tensor)]
    parameters = [embedding, *[layer] * sizes.layers, head]
    boundary = NUMBER_BYTES * run.micro_batch * sizes.sequence * sizes.width // run.tensor
    return tuple(
        Stage(
            forward=fsum(forward for forward, _ in costs[low:high]),
            backward=fsum(backward for _, backward in costs[low:high]),
            boundary=boundary,
            parameters=NUMBER_BYTES * sum(parameters[low:high]),
            update=times.update + launch * (high - low),
        )
        for low, high in pairwise(accumulate(run.layers_per_stage, initial=0))
    )


def fit_machine(published: PublishedSteps) -> Machine:
    """Fit a machine to the reductions of the runs of one stage: ring all-reduces, each after its launch gaps."""
    runs = [run for run in published.runs if run.gpu == FITTED_ON and run.stages == 1]
    launch = fmean(run.reduction / run.layers_per_stage[0] for run in runs if run.data == 1)
    samples = [
        Sample(run.data, int(stages_of(published, run)[0].parameters), run.reduction - launch * run.layers_per_stage[0])
        for run in runs
        if run.data > 1
    ]
    line = fit_collective(Op.ALL_REDUCE, RING, samples)
    return Machine(line.latency, line.bandwidth, launch)


def simulated_step(
    published: PublishedSteps,
    run: MeasuredStep,
    machine: Machine,
    overlap: str = NONE,
    rendezvous: Rendezvous | None = None,
) -> float:
    """Return the seconds of a run's step on a machine."""
    model = Model(stages=stages_of(published, run, machine.launch))
    link = Link(latency=machine.latency, bandwidth=machine.bandwidth)
    cluster = Cluster(devices=(Devices(overlap=overlap),), link=link)
    trace = simulate(
        "1f1b",
        run.stages,
        m=run.micro_batches,
        replicas=run.data,
        model=model,
        cluster=cluster,
        collective=RING if run.data > 1 else None,
        rendezvous=rendezvous,
        steps=1,
    )
    return float(trace.end.max())


def bare_step(published: PublishedSteps, run: MeasuredStep) -> float:
    """Return the seconds of a run's layer times in 1F1B with free messages, and its published reduction."""
    alone = msgspec.structs.replace(run, data=1, global_batch=run.global_batch // run.data)
    return simulated_step(published, alone, Machine(0.0, inf, 0.0)) + run.reduction


def role_of(run: MeasuredStep) -> str:
    """Return the role of a run: its reduction is fitted, its step is held to a limit, or it is shown as it is."""
    if run.gpu != FITTED_ON:
        return "other cards"
    if run.micro_batches == 1:
        return "one micro-batch"
    return {1: "fitted", 2: "held"}.get(run.stages, "deeper")


def compare_steps(published: PublishedSteps) -> list[ComparedStep]:
    """Return all runs with their simulated steps, those of a role together."""
    machine = fit_machine(published)
    steps = (
        ComparedStep(role_of(run), run, simulated_step(published, run, machine), bare_step(published, run))
        for run in published.runs
    )
    order = ("fitted", "held", "deeper", "one micro-batch", "other cards")
    return sorted(steps, key=lambda step: order.index(step.role))


def _summaries(steps: Sequence[ComparedStep]) -> Iterator[str]:
    """Yield the mean and the largest error of each role, and those of bare steps."""
    for role in dict.fromkeys(step.role for step in steps):
        errors, bare = (
            [100 * abs(value) for value in column]
            for column in zip(*((step.error, step.bare_error) for step in steps if step.role == role), strict=True)
        )
        words = (f"{fmean(each):.1f} % in the mean, {max(each):.1f} % at most" for each in (errors, bare))
        yield "{}: {}; bare: {}\n".format(role, *words)


def describe(published: PublishedSteps) -> str:
    """Return the fitted machine, a table of all runs, and their errors."""
    machine, steps = fit_machine(published), compare_steps(published)
    header = ["run", "model", "cards", "P × D × T", "samples", "m", "published, s", "simulated, s", "error", "bare"]
    fitted = (
        f"Fitted: latency {1e6 * machine.latency:.0f} us, bandwidth {machine.bandwidth / 1e9:.1f} GB/s, "
        f"launch gap {1e6 * machine.launch:.0f} us a layer.\n"
    )
    rows = []
    for step in steps:
        run, shape = step.run, f"{step.run.stages} × {step.run.data} × {step.run.tensor}"
        seconds = (f"{value:.3f}" for value in (run.step, step.simulated))
        shares = (f"{100 * share:+.1f} %" for share in (step.error, step.bare_error))
        counts = (str(run.micro_batch), str(run.micro_batches))
        rows.append([step.role, run.model, run.gpu, shape, *counts, *seconds, *shares])
    return "\n".join([fitted, as_text(header, rows), "".join(_summaries(steps))])


def print_comparison(arguments: list[str]) -> int:
    """Print the comparison of a file of measurements, the only argument, and return the exit code."""
    if len(arguments) != 1:
        raise RequestError("FILE", "give one file of measurements, such as validation/results/sailor-2025.json")
    write_stdout(describe(load_published(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(print_comparison))
