"""What a run does, holds and sends at one moment: the content of the paper's Fig. 2."""

from collections import Counter
from typing import NamedTuple, TypeAlias

import numpy as np

from cdpsim.errors import RequestError, whole_number
from cdpsim.files.units import quantity_text, seconds
from cdpsim.numeric.columns import Ints, group_starts, sort_by
from cdpsim.program import Category, EdgeKind
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics import memory

Place: TypeAlias = tuple[int, int]  # a device, and a stage that it serves
_ASIDE = {"activation": 1, "activation_gradient": -1}  # from the sender's stage to the receiver's


class Collective(NamedTuple):
    """A collective of this moment, or of another one in the same training step."""

    stage: int  # -1 if of no single one
    members: tuple[int, ...]
    now: bool


class Moment(NamedTuple):
    """What there is to see at one moment; what only a program knows is left out of a trace without one."""

    served: dict[int, list[int]]  # the stages of each device, at any time
    running: dict[Place, list[int]]  # the micro-batches that are computed
    states: frozenset[Place] | None  # where parameters are alive; None if not known
    activations: dict[Place, int]  # how many micro-batches' activations of that stage are held
    held: dict[int, float]  # activations of each device, in stages' worth or bytes
    inner: list[tuple[Place, Place]]  # what running tasks will pass on inside their device
    sent: list[tuple[Place, Place]]  # what is on its way from device to device
    collectives: list[Collective]


def served(trace: Trace) -> dict[int, list[int]]:
    """The stages that each device ever computes, holds parameters of, or exchanges gradients or parameters of."""
    tasks, messages = trace.tasks, trace.messages
    carried = (messages["op"] == "p2p") & ~np.isin(messages["content"], list(_ASIDE))
    stage = messages["stage"][carried]
    pairs = [(tasks["device"], tasks["stage"])]
    pairs += [(messages["src"][carried], stage), (messages["dst"][carried].astype(np.int64), stage)]
    if isinstance(trace, Run):
        buffers = trace.program.buffers
        rows = buffers.category == Category.PARAMETERS
        pairs.append((buffers.device[rows], buffers.stage[rows]))
    device, stage = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = sort_by(device, stage)
    device, stage = device[order], stage[order]
    first = group_starts(device, stage)
    found = zip(device[first].tolist(), stage[first].tolist(), strict=True)
    everyone = np.unique(np.append(device, trace.memory["device"])).tolist()
    result: dict[int, list[int]] = {at: [] for at in everyone}
    for at, what in found:
        result[at].append(what)
    return result


def time_of(trace: Trace, slot: object) -> float:
    """The slot, or the moment in seconds, that somebody asks for; refuse one that the run does not have."""
    end = trace.tasks["end"].max().item()
    if trace.in_slots:
        number = whole_number("slot", slot, at_least=0)
        if number >= end:
            raise RequestError("slot", f"slot={number} is not one of this run's {end} time steps; take 0 to {end - 1}")
        return number
    moment = seconds(slot)
    if moment >= end:
        raise RequestError(
            "slot", f"{quantity_text(moment, 's')} is not in this run, which takes {quantity_text(end, 's')}"
        )
    return moment


def busiest(trace: Trace) -> float:
    """The slot, or the moment, of the middle training step at which most activations are held in all devices.

    The last of several, at which what is held begins to be used; in the middle of the step if all are equal.
    """
    step, start = trace.tasks["step"], trace.tasks["start"]
    steps = np.unique(step)
    middle = len(steps) // 2
    low = start[step == steps[middle]].min()
    high = start[step == steps[middle + 1]].min() if middle + 1 < len(steps) else trace.tasks["end"].max()
    moments = np.arange(low, high) if trace.in_slots else np.unique(start[(start >= low) & (start < high)])
    time, total = _held_in_all(trace)
    then = np.append(0, total)[np.searchsorted(time, moments, side="right")]
    most = np.flatnonzero(then == then.max())
    best = most[-1] if len(most) < len(moments) else len(moments) // 2
    moment: float = moments[best].item()
    return moment


def _held_in_all(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """What all devices hold of activations, from each time on."""
    rows = trace.memory["category"] == "activations"
    device, time, size = (trace.memory[name][rows] for name in ("device", "time", "size"))
    change = np.diff(size, prepend=0)
    first = np.diff(device, prepend=-1) != 0
    change[first] = size[first]
    order = np.argsort(time, kind="stable")
    return time[order], np.cumsum(change[order])


def look(trace: Trace, now: float) -> Moment:
    """See what there is at a moment. In slots, what is sent after a slot's tasks belongs to that slot."""
    tasks, messages = trace.tasks, trace.messages
    runs = np.flatnonzero((tasks["kind"] != "U") & (tasks["start"] <= now) & (now < tasks["end"]))
    leaving = now + 1 if trace.in_slots else now
    under_way = (messages["start"] <= leaving) & (leaving < messages["end"])
    under_way |= trace.in_slots & (messages["start"] == leaving)
    running: dict[Place, list[int]] = {}
    for device, stage, i in zip(
        *(tasks[name][runs].tolist() for name in ("device", "stage", "micro_batch")), strict=True
    ):
        running.setdefault((device, stage), []).append(i)
    return Moment(
        served(trace),
        {place: sorted(several) for place, several in running.items()},
        _states(trace, now),
        _activations(trace, now),
        _held(trace, now),
        _inner(trace, runs),
        _sent(trace, np.flatnonzero(under_way & (messages["op"] == "p2p"))),
        _collectives(trace, runs, under_way),
    )


def _states(trace: Trace, now: float) -> frozenset[Place] | None:
    if not isinstance(trace, Run):
        return None
    return frozenset(_alive(trace, trace.program.buffers.category == Category.PARAMETERS, now))


def _activations(trace: Trace, now: float) -> dict[Place, int]:
    if not isinstance(trace, Run):
        return {}
    passes = np.zeros(len(trace.program.buffers), dtype=bool)
    passes[trace.program.stashes] = True
    return dict(Counter(_alive(trace, passes, now)))


def _alive(trace: Run, some: np.ndarray, now: float) -> list[Place]:
    """The places of buffers that are held now, as often as there are some."""
    buffers = trace.program.buffers
    begin, end = memory.buffer_spans(buffers, trace.start, trace.end)
    rows = some & (begin <= now) & (now < end)
    return sorted(zip(buffers.device[rows].tolist(), buffers.stage[rows].tolist(), strict=True))


def _held(trace: Trace, now: float) -> dict[int, float]:
    rows = (trace.memory["category"] == "activations") & (trace.memory["time"] <= now)
    # Sorted by device and time: the last row of a device is what it holds now.
    return dict(zip(trace.memory["device"][rows].tolist(), trace.memory["size"][rows].tolist(), strict=True))


def _inner(trace: Trace, runs: Ints) -> list[tuple[Place, Place]]:
    if not isinstance(trace, Run):
        return []
    program, edges = trace.program, trace.program.edges
    device, stage = program.tasks.device, program.tasks.stage
    some = (edges.kind == EdgeKind.DATA) & (edges.after < program.compute)
    some &= np.isin(edges.before, trace.task_nodes[runs])
    before, after = edges.before[some], edges.after[some]
    inside = (device[before] == device[after]) & (stage[before] != stage[after])
    pairs = zip(*(column[inside].tolist() for column in (device[before], stage[before], stage[after])), strict=True)
    return sorted({((d, j), (d, k)) for d, j, k in pairs})


def _sent(trace: Trace, rows: Ints) -> list[tuple[Place, Place]]:
    columns = (trace.messages[name][rows].tolist() for name in ("content", "stage", "src", "dst"))
    return sorted(
        {((src, j), (int(dst), j + _ASIDE.get(content, 0))) for content, j, src, dst in zip(*columns, strict=True)}
    )


def _collectives(trace: Trace, runs: Ints, under_way: np.ndarray) -> list[Collective]:
    """Those under way, and those at other moments between the start and the end of the training steps that run."""
    tasks, messages = trace.tasks, trace.messages
    together = messages["op"] != "p2p"
    of_steps = (tasks["kind"] != "U") & np.isin(tasks["step"], tasks["step"][runs])
    in_step = np.zeros(len(together), dtype=bool)
    if len(runs):
        low, high = tasks["start"][of_steps].min(), tasks["end"][of_steps].max()
        in_step = (messages["start"] > low) & (messages["start"] <= high)
    found = {}
    for some, now in ((in_step & ~under_way, False), (under_way, True)):
        rows = np.flatnonzero(together & some)
        for stage, members in zip(messages["stage"][rows].tolist(), messages["dst"][rows].tolist(), strict=True):
            devices = tuple(map(int, str(members).split("|")))
            found[stage, devices] = Collective(stage, devices, now)
    return [found[key] for key in sorted(found)]
