"""One moment of a run: what devices compute, hold and send, the content of the paper's Fig. 2."""

from collections import Counter
from typing import NamedTuple, TypeAlias

import numpy as np

from cdpsim.draw.views import Views
from cdpsim.errors import RequestError, whole_number
from cdpsim.files.units import quantity_text, seconds
from cdpsim.numeric.columns import Flags, Ints, sort_and_group
from cdpsim.program import Category, Content, EdgeKind, Kind, Op
from cdpsim.runs import Run
from cdpsim.trace.metrics import memory

Place: TypeAlias = tuple[int, int]  # a device, and a stage that it serves
_STAGES_ON = {Content.ACTIVATION: 1, Content.ACTIVATION_GRADIENT: -1}  # from the sender's stage to the receiver's


class StepCollective(NamedTuple):
    """A collective of this moment, or of another one in the same training step."""

    stage: int  # -1 if of no single one
    members: tuple[int, ...]
    now: bool


class Moment(NamedTuple):
    """The content of a picture; fields that need a program are empty for a trace without one."""

    stages: dict[int, list[int]]  # of each device, at any time
    running: dict[Place, list[int]]  # the micro-batches that are computed
    labels: dict[Place, list[str]]  # the tasks that compute them, such as 1F3
    states: frozenset[Place] | None  # where parameters are alive; None if not known
    activations: dict[Place, int]  # the number of micro-batches whose activations of that stage are held
    stash: dict[int, float]  # activations of each device, in stages' worth or bytes
    inside: list[tuple[Place, Place]]  # data that running tasks will pass on inside their device
    messages: list[tuple[Place, Place]]  # messages on their way from device to device
    collectives: list[StepCollective]


def stages_served(views: Views) -> dict[int, list[int]]:
    """Return the stages that each device ever computes, or whose parameters or gradients it holds or exchanges."""
    messages = views.messages
    carried = (views.op == Op.P2P) & ~np.isin(views.content, list(_STAGES_ON))
    pairs = [(views.tasks["device"], views.tasks["stage"])]
    pairs += [(messages[end][carried].astype(np.int64), messages["stage"][carried]) for end in ("src", "dst")]
    if views.run:
        buffers, rows = views.run.program.buffers, _parameters(views.run)
        pairs.append((buffers.device[rows], buffers.stage[rows]))
    device, stage = (np.concatenate(column) for column in zip(*pairs, strict=True))
    result: dict[int, list[int]] = {number: [] for number in np.union1d(device, views.memory["device"]).tolist()}
    order, first = sort_and_group(device, stage)
    different = order[first]
    for number, served in zip(device[different].tolist(), stage[different].tolist(), strict=True):
        result[number].append(served)
    return result


def read_moment(views: Views, slot: object) -> float:
    """Read a slot, or a moment in seconds; refuse one that the run does not have."""
    end = views.tasks["end"].max().item()
    if views.in_slots:
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


def busiest_moment(views: Views) -> float:
    """Return the slot, or the moment, of the middle training step at which most activations are held in all devices.

    Of several it is the last, after which activations begin to be used; the middle of the step if all are equal.
    """
    step, start = views.tasks["step"], views.tasks["start"]
    steps = np.unique(step)
    middle = len(steps) // 2
    low = start[step == steps[middle]].min()
    high = start[step == steps[middle + 1]].min() if middle + 1 < len(steps) else views.tasks["end"].max()
    moments = np.arange(low, high) if views.in_slots else np.unique(start[(start >= low) & (start < high)])
    stash = views.category == Category.ACTIVATIONS
    time, change = views.memory["time"][stash], views.memory_change[stash]
    order = np.argsort(time, kind="stable")
    then = np.append(0, np.cumsum(change[order]))[np.searchsorted(time[order], moments, side="right")]
    most = np.flatnonzero(then == then.max())
    best: float = moments[most[-1] if len(most) < len(moments) else len(moments) // 2].item()
    return best


def moment_at(views: Views, now: float) -> Moment:
    """Return the content of a moment. In slots, messages sent after a slot's tasks belong to that slot."""
    tasks, messages = views.tasks, views.messages
    rows = np.flatnonzero((views.kind != Kind.U) & (tasks["start"] <= now) & (now < tasks["end"]))
    leaving = now + 1 if views.in_slots else now
    under_way = (messages["start"] <= leaving) & (leaving < messages["end"])
    under_way |= views.in_slots & (messages["start"] == leaving)
    running: dict[Place, list[int]] = {}
    labels: dict[Place, list[str]] = {}
    columns = (tasks[name][rows].tolist() for name in ("device", "stage", "micro_batch", "kind"))
    for device, stage, i, kind in zip(*columns, strict=True):
        running.setdefault((device, stage), []).append(i)
        labels.setdefault((device, stage), []).append(f"{stage}{kind}{i}")
    pairs = under_way & (views.op == Op.P2P)
    sent = (column[pairs].tolist() for column in (views.content, *(messages[n] for n in ("stage", "src", "dst"))))
    # Rows are sorted by device and time: the last one of a device counts.
    stash = (views.category == Category.ACTIVATIONS) & (views.memory["time"] <= now)
    return Moment(
        stages_served(views),
        {place: sorted(several) for place, several in running.items()},
        labels,
        frozenset(_alive(views.run, _parameters(views.run), now)) if views.run else None,
        dict(Counter(_alive(views.run, views.run.program.stashes, now))) if views.run else {},
        dict(zip(views.memory["device"][stash].tolist(), views.memory["size"][stash].tolist(), strict=True)),
        _inside(views.run, rows) if views.run else [],
        sorted(
            {((src, j), (int(dst), j + _STAGES_ON.get(content, 0))) for content, j, src, dst in zip(*sent, strict=True)}
        ),
        _collectives_of_step(views, rows, under_way),
    )


def _parameters(run: Run) -> Ints:
    return np.flatnonzero(run.program.buffers.category == Category.PARAMETERS)


def _alive(run: Run, among: Ints, now: float) -> list[Place]:
    """Return the places of the buffers that are held now, each place once."""
    buffers = run.program.buffers
    begin, end = (times[among] for times in memory.buffer_spans(buffers, run.start, run.end))
    rows = among[(begin <= now) & (now < end)]
    return sorted(zip(buffers.device[rows].tolist(), buffers.stage[rows].tolist(), strict=True))


def _inside(run: Run, rows: Ints) -> list[tuple[Place, Place]]:
    edges, tasks = run.program.edges, run.program.tasks
    data = (edges.kind == EdgeKind.DATA) & (edges.after < run.program.compute)
    data &= np.isin(edges.before, run.task_nodes[rows])
    before, after = edges.before[data], edges.after[data]
    inside = (tasks.device[before] == tasks.device[after]) & (tasks.stage[before] != tasks.stage[after])
    columns = tasks.device[before], tasks.stage[before], tasks.stage[after]
    triples = zip(*(column[inside].tolist() for column in columns), strict=True)
    return sorted({((device, j), (device, k)) for device, j, k in triples})


def _collectives_of_step(views: Views, running: Ints, under_way: Flags) -> list[StepCollective]:
    """Return the collectives under way, and those at other moments of the training steps that run."""
    tasks, messages = views.tasks, views.messages
    in_step = np.zeros(len(under_way), dtype=bool)
    if len(running):
        of_steps = (views.kind != Kind.U) & np.isin(tasks["step"], tasks["step"][running])
        low, high = tasks["start"][of_steps].min(), tasks["end"][of_steps].max()
        in_step = (messages["start"] > low) & (messages["start"] <= high)
    result = {}
    for rows, now in ((in_step & ~under_way, False), (under_way, True)):
        for row in np.flatnonzero((views.op != Op.P2P) & rows).tolist():
            stage, members = messages["stage"][row].item(), views.channel_of(row).members
            result[stage, members] = StepCollective(stage, members, now)
    return [result[key] for key in sorted(result)]
