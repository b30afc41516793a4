"""A run in six facts for people: what ran, step time, bubble, peak memory, staleness, messages."""

import numpy as np

from cdpsim.files.units import Number, counted, short_text
from cdpsim.program import Category
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.studies.compare import Measured, measure


def overview(run: Run, runs: int | None = None) -> dict[str, str]:
    """Return six facts of a run's steady state in words; with `runs` also quantiles of the step time."""
    measured, shape, slots = measure(run, runs), run.request.shape, run.in_slots
    layers = f" of {counted(shape.n, 'layer')}" if shape.layers else ""
    stages = counted(shape.parts, "stage") + layers
    what = ", ".join((stages, counted(shape.m, "micro-batch"), counted(measured.devices, "device")))
    zero = f" --zero {run.request.zero}" if accepts(run.request.schedule, "zero") and run.request.zero else ""
    share, exposed = short_text(measured.bubble, "%"), short_text(measured.exposed, "%")
    steps = "step" if measured.staleness == 1 else "steps"
    age = f"{measured.staleness:.4g} {steps}, the mean age of the versions that forwards read"
    return {
        "run": f"{measured.schedule}{zero}: {what}; {measured.setting or 'in slots'}",
        "step time": _step_text(measured, slots=slots, later=_whence(run)),
        "bubble": f"{share} of the devices' time; {exposed} is waiting for messages",
        "peak memory": _memory_text(run),
        "staleness": age if measured.staleness else "0, every forward reads the newest version",
        "messages": f"{_number_words(measured.messages)} a step, {_size_words(measured.sent, slots=slots)} sent",
    }


def _whence(run: Run) -> str:
    """Return words for where step time is from, if not from a steady state that the run's own steps reach."""
    if not run.steady_state.is_steady:
        return f" ({run.steady_state.not_steady})"
    return "" if run.reaches_steady_state else f", later than {_own(run)}"


def _own(run: Run) -> str:
    """Return words for the run's own steps, which do not reach its steady state."""
    return f"these {run.request.steps} steps" if run.request.steps > 1 else "this step"


def _step_text(measured: Measured, *, slots: bool, later: str) -> str:
    rate = f"{measured.micro_batch_rate:.4g} micro-batches"
    if measured.sample_rate:
        rate = f"{measured.sample_rate:.4g} samples"
    step = (
        f"{_time_words(measured.step, slots=slots)}, {measured.period_is}{later};"
        f" {rate} per {'slot' if slots else 'second'}"
    )
    if measured.steps is None:
        return step
    low, high = (_time_words(measured.steps[quantile], slots=slots) for quantile in ("5%", "95%"))
    return f"{step}; {low} to {high} in 90 % of the runs"


def _memory_text(run: Run) -> str:
    """Return the peak memory of the fullest device, how much that has, and the largest peak of a category there."""
    peaks, slots = run.steady_state.run.peaks, run.in_slots
    device = int(np.argmax(peaks[:, -1]))
    *parts, total = peaks[device].tolist()
    most, room = int(np.argmax(parts)), float(run.device_memory[device])
    of = "" if np.isinf(room) else f" of {short_text(room, 'B')}"
    category = f"{Category(most).name.lower()} up to {_size_words(parts[most], slots=slots)}"
    own = int(run.peaks[:, -1].max())
    later = f", {_size_words(own, slots=slots)} in {_own(run)}" if own < total and not run.reaches_steady_state else ""
    return f"{_size_words(total, slots=slots)}{of} on device {device}{later}; {category}"


def _time_words(time: Number, *, slots: bool) -> str:
    return _counted_words(time, "slot") if slots else short_text(float(time), "s")


def _size_words(size: Number, *, slots: bool) -> str:
    return _counted_words(size, "stage-activation") if slots else short_text(float(size), "B")


def _counted_words(number: Number, noun: str) -> str:
    return counted(int(number), noun) if float(number).is_integer() else f"{_number_words(number)} {noun}s"


def _number_words(number: Number) -> str:
    return f"{float(number):.10g}" if float(number).is_integer() else f"{float(number):.4g}"
