"""The simulation of what a runtime does: memory of each device, in total, by category and by task, and its sends."""

from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from cdpsim import Run, simulate
from cdpsim.cluster.topology import UNLIMITED_LANES
from cdpsim.model.runtime import read_runtime
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.request.sharing import accepts
from cdpsim.schedules import find_schedule
from cdpsim.trace.metrics import memory

from ..comparison.forecast import Forecast
from ..profile.footprints import with_unit_times
from ..replay.case import Case
from ..report.schema import Call
from .runtimes import PAPER, Peer

STEPS = 2  # the second counts
RUNTIMES = (PAPER, "torch")  # what is simulated; the last is judged


class Prediction(NamedTuple):
    """The simulated memory of each device: its peak, the categories then, and the peak of each task; and the sends."""

    peaks: list[int]
    parts: list[dict[str, int]]
    tasks: list[dict[str, int]]
    calls: list[list[Call]]


def predict_peer(peer: Peer, case: Case, runtime: str, workspace: dict[str, Any] | None = None) -> Prediction:
    """Simulate a runtime on stages of equal times, those of its schedule's own slots, and devices with a workspace."""
    assert case.stages is not None, "it has been profiled"
    split = find_schedule(case.schedule).splits(case.shape)
    model = with_unit_times(case.stages, split=split, tensors=True)
    cluster = {"devices": {"lanes": UNLIMITED_LANES, "workspace": workspace or {}}}
    run = _simulate(peer, case, runtime, steps=STEPS, model=model, cluster=cluster)
    devices = range(run.program.devices)
    return Prediction(
        run.peaks[:, -1].tolist(),
        [_parts(run, device) for device in devices],
        [_task_peaks(run, device) for device in devices],
        [_calls(run, device) for device in devices],
    )


def predict_seconds(peer: Peer, case: Case, runtime: str, forecast: Forecast) -> float:
    """Return the simulated seconds of a step's passes, from times of stages and messages."""
    run = _simulate(peer, case, runtime, steps=1, model=forecast.model, cluster=forecast.cluster)
    compute = slice(run.program.compute)
    return float(run.end[compute].max() - run.start[compute].min())


def _simulate(peer: Peer, case: Case, runtime: str, **options: Any) -> Run:
    schedule = find_schedule(case.schedule)
    shape = {name: case.asked[name] for name in ("m", "chunks", "replicas")}
    options |= peer.options
    options |= {name: value for name, value in shape.items() if accepts(schedule, name)}
    if peer.recompute is not None:
        options["recompute"] = peer.recompute
    if PAPER not in (runtime, peer.runtime):
        loops = {"updates": "loop"} if case.device == "cpu" else {}  # torch's own choice where tensors are
        options["runtime"] = replace(read_runtime(peer.runtime), **loops)
    return simulate(case.schedule, case.n, **options).whole


def _parts(run: Run, device: int) -> dict[str, int]:
    """Return a device's bytes by category when it has most."""
    where, _, moments = memory.held_for_no_time(run.program, run.start, run.end)
    owner, time, size = memory.device_memory(run.program, run.start, run.end)
    own = np.flatnonzero(owner == device)
    highest, buffers = own[np.argmax(size[own])], run.program.buffers
    begin, end = memory.buffer_spans(buffers, run.start, run.end)
    there = (buffers.device == device) & (begin <= time[highest]) & (time[highest] < end)
    sums = np.bincount(buffers.category[there], buffers.size[there], len(Category)).astype(int)
    held = max((sums, *moments[where == device]), key=np.sum)
    return {Category(k).name.lower(): int(held[k]) for k in np.argsort([each.name for each in Category]) if held[k]}


def _task_peaks(run: Run, device: int) -> dict[str, int]:
    """Return a device's highest level during each task of the last step, by names as `F 2,0`."""
    program, tasks = run.program, run.program.tasks
    owner, time, size = memory.device_memory(program, run.start, run.end)
    own = owner == device
    nodes = np.flatnonzero((tasks.device == device) & (tasks.kind != Kind.U) & (tasks.step == STEPS - 1))
    split = bool((tasks.kind == Kind.W).any())
    peaks = {}
    for node in nodes[np.argsort(run.start[nodes], kind="stable")].tolist():
        kind = Kind(int(tasks.kind[node])).name
        name = "I" if split and kind == "B" else kind
        peak = memory.peak_within(time[own], size[own], run.start[node], run.end[node])
        peaks[f"{name} {tasks.stage[node]},{tasks.micro_batch[node]}"] = peak
    return peaks


def _calls(run: Run, device: int) -> list[Call]:
    """Return what a device sends in the last step, in its order, and the collectives in which it takes part.

    Parameters are those that the step before has made: the last step's own are read by no later one.
    """
    program, messages = run.program, run.program.messages
    hands_out = messages.content == Content.PARAMETERS
    last = np.flatnonzero(messages.step + hands_out == STEPS - 1)
    order = last[np.argsort(run.start[program.message_nodes.start + last], kind="stable")]
    calls = []
    for row in order.tolist():
        op, size = Op(int(messages.op[row])), int(messages.size[row])
        if op == Op.P2P and messages.src[row] == device:
            content = Content(int(messages.content[row])).name.lower().replace("_", " ")
            label = f"{content} {messages.stage[row]},{messages.micro_batch[row]}"
            calls.append(Call("send", int(messages.dst[row]), size, label))
        elif op != Op.P2P and device in program.groups[int(messages.dst[row])]:
            calls.append(Call(op.name.lower().replace("_", "-"), -1, size))
    return calls
