"""Comparison of messages: those of a program against the needs of its tasks, which read what is not on their device.

Needs are found from tasks: who makes a value, who reads it, and where. A device needs the output of the stage before,
the gradient from the stage behind, a version of parameters that it reads and does not make, the gradients that its
update takes, and the optimizer state of the update before. A message has the size of its tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from cdpsim.program import Category, Content, Kind, Op
from cdpsim.schedules.state import Placed

from ..replay.contents import BEGINNING, Message, Passing, name_of, text_of
from ..replay.plan import Plan
from ..replay.policy import gradients
from ..replay.shares import Shares
from ..report.schema import MessageDifference, MessageFault
from ..training.optimizer import Optimizer
from ..training.stages import Training
from .shared_needs import early_gathers, follow_shares, gather_needs


class Need(NamedTuple):
    """A value that a device lacks for a task."""

    key: Passing
    device: int
    reader: int


def compare_needs(plan: Plan, training: Training, optimizer: Optimizer) -> list[MessageDifference]:
    """Return superfluous and missing messages, wrong versions, sums that miss or double a gradient, and wrong sizes.

    A size is wrong where a message is larger or smaller than its tensors.
    """
    stateful = bool(optimizer.forms(training.parts(0)))
    sums = follow_shares(plan) if plan.program.state.streams else _compare_sums(plan)
    found = [*_unequal(plan, list(_needs(plan, stateful))), *sums, *early_gathers(plan)]
    shares = Shares(plan.program, plan.messages, training)
    for message in plan.messages:
        if message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_REDUCE):
            size = shares.message_form(message).nbytes
        else:
            size = _tensor_bytes(plan, message, training, optimizer)
        if size != message.size:
            kind: MessageFault = "too large" if message.size > size else "too small"
            text = f"{message} has {message.size} B, and its tensors {size} B"
            found.append(MessageDifference(kind=kind, text=text, size=abs(message.size - size)))
    return found


def _needs(plan: Plan, stateful: bool) -> Iterator[Need]:
    """Yield what tasks lack on their devices, but for gradients of parameters."""
    yield from _boundary_needs(plan)
    if plan.program.state.travels:
        yield from _travelling_needs(plan)
        return
    yield from _version_needs(plan)
    if stateful:
        yield from _state_needs(plan)


def _boundary_needs(plan: Plan) -> Iterator[Need]:
    """Yield the outputs and gradients that a micro-batch's next task lacks on its device."""
    tasks, n = plan.program.tasks, plan.program.n
    makers: dict[Passing, int] = {}
    content = {Kind.F: Content.ACTIVATION, Kind.B: Content.ACTIVATION_GRADIENT}
    for node in range(plan.program.compute):
        kind, t, i, j = (int(c[node]) for c in (tasks.kind, tasks.step, tasks.micro_batch, tasks.stage))
        if kind in content:
            makers[content[Kind(kind)], t, i, j] = int(tasks.device[node])
    for node in range(plan.program.compute):
        kind, t, i, j = (int(c[node]) for c in (tasks.kind, tasks.step, tasks.micro_batch, tasks.stage))
        if kind not in content:
            continue
        key, device = (content[Kind(kind)], t, i, j - 1 if kind == Kind.F else j + 1), int(tasks.device[node])
        if 0 <= key[-1] < n and makers[key] != device:
            yield Need(key, device, node)


def _version_needs(plan: Plan) -> Iterator[Need]:
    """Yield the versions of parameters that devices read and do not make: once, or for each use where they are lent."""
    program, tasks = plan.program, plan.program.tasks
    if program.averaged is not None and program.devices > 1:
        yield from _mean_needs(plan)
    if program.shard > 1:
        yield from (Need(*need) for need in gather_needs(plan))
        return
    lent = program.state.parameters is Placed.OWNED
    updates = [node for node in range(len(tasks)) if tasks.kind[node] == Kind.U]
    places = ((int(tasks.device[node]), int(tasks.stage[node]), int(tasks.version[node])) for node in updates)
    has = set(places)
    owners = {(device, stage) for device, stage, _ in has}
    for node in sorted(range(len(tasks)), key=plan.place_of):
        device, stage, version = (int(c[node]) for c in (tasks.device, tasks.stage, tasks.version))
        if tasks.kind[node] == Kind.U:
            version = int(program.base[node - program.compute])
        if (device, stage, version) in has or (version == 0 and not lent) or (lent and (device, stage) in owners):
            continue
        if not lent:
            has.add((device, stage, version))
        yield Need((Content.PARAMETERS, version - 1, -1, stage), device, node)


def _mean_needs(plan: Plan) -> Iterator[Need]:
    """Yield the means that updates take, of the step in which workers have made what these are of."""
    tasks, averaged = plan.program.tasks, plan.program.averaged
    assert averaged is not None, "there are means"
    updates = slice(plan.program.compute, None)
    made = dict(zip(tasks.version[updates].tolist(), tasks.step[updates].tolist(), strict=True))
    for node in range(plan.program.compute, len(tasks)):
        if plan.is_mean(int(tasks.version[node])):
            stage, device = int(tasks.stage[node]), int(tasks.device[node])
            yield Need((Content.PARAMETERS, made[int(averaged[tasks.version[node]])], -1, stage), device, node)


def _state_needs(plan: Plan) -> Iterator[Need]:
    """Yield the optimizer states that updates take over from another device."""
    tasks = plan.program.tasks
    updates = [node for node in range(len(tasks)) if tasks.kind[node] == Kind.U]
    at = {(int(tasks.step[node]), int(tasks.stage[node]), int(tasks.device[node])): node for node in updates}
    for (step, stage, device), node in at.items():
        if step > 0 and (step - 1, stage, device) not in at:
            yield Need((Content.STATE, step - 1, -1, stage), device, node)


def _travelling_needs(plan: Plan) -> Iterator[Need]:
    """Yield the states that a stage's next user needs from the last one."""
    tasks = plan.program.tasks
    where = {
        life.holding.stage: (life.device, -1)  # the device, and the step of its last use
        for life in plan.policy.lives
        if life.begin == BEGINNING and life.holding.category == Category.PARAMETERS
    }
    for node in sorted(range(plan.program.compute), key=plan.place_of):
        device, stage, step = (int(c[node]) for c in (tasks.device, tasks.stage, tasks.step))
        last_device, last_step = where.get(stage, (device, step))
        if device != last_device:
            yield Need((Content.STATE, last_step, -1, stage), device, node)
        where[stage] = device, step


def _unequal(plan: Plan, needs: list[Need]) -> list[MessageDifference]:
    """Return needs that no message serves, and messages that serve no need."""
    open_needs: dict[tuple[Passing, int], list[Need]] = defaultdict(list)
    for need in needs:
        open_needs[need.key, need.device].append(need)
    superfluous = []
    for message in plan.messages:
        if message.content == Content.GRADIENT:
            continue
        keys = [(*message.key[:-1], stage) for stage in message.covers]
        served = [open_needs[key, device] for key in keys for device in message.members if device != message.src]
        if not any(served):
            superfluous.append(message)
        for wanted in served:
            del wanted[:1]
    found = []
    for need in (need for wanted in open_needs.values() for need in wanted):
        other = next((each for each in superfluous if _is_other_version(each, need)), None)
        if other:
            superfluous.remove(other)
        found.append(_missing(plan, need, other))
    return found + [
        MessageDifference(kind="superfluous", text=f"no task needs {each}", size=each.size) for each in superfluous
    ]


def _is_other_version(message: Message, need: Need) -> bool:
    """Return whether a message brings another version of what a device needs."""
    content, _, _, stage = need.key
    brings = message.content == content and stage in message.covers and need.device in message.members
    return brings and content in (Content.PARAMETERS, Content.STATE)


def _missing(plan: Plan, need: Need, other: Message | None) -> MessageDifference:
    reader = f"{plan.describe(need.reader, need.device)} needs {text_of(need.key)}"
    if other:
        return MessageDifference(kind="wrong version", text=f"{reader}, and {other} comes instead", size=other.size)
    return MessageDifference(kind="missing", text=f"{reader}, and no message brings it", size=0)


# Sums of gradients


def _compare_sums(plan: Plan) -> list[MessageDifference]:
    """Return the sums in which an update misses a device's gradients or has them several times, and idle messages."""
    program, tasks = plan.program, plan.program.tasks
    makers: dict[tuple[int, int], set[int]] = defaultdict(set)  # step, stage -> the devices with gradients
    events: dict[tuple[int, int], list[tuple[int, int | Message]]] = defaultdict(list)  # places, updates and messages
    gives = Kind.W if program.splits else Kind.B
    for node, kind in enumerate(tasks.kind.tolist()):
        step, stage, device = (int(c[node]) for c in (tasks.step, tasks.stage, tasks.device))
        if kind == gives:
            makers[step, stage].add(device)
        elif kind == Kind.U:
            for each in range(int(program.first_step[node - program.compute]), step + 1):
                events[each, stage].append((plan.place_of(node), node))
    for message in plan.messages:
        if message.content == Content.GRADIENT:
            events[message.step, message.stage].append((plan.place_of(message.node), message))
    found = []
    for (step, stage), own in sorted(events.items()):
        found += _follow_sum(plan, step, stage, makers[step, stage], [each for _, each in sorted(own, key=_by_place)])
    return found


def _by_place(event: tuple[int, int | Message]) -> int:
    return event[0]


def _follow_sum(
    plan: Plan, step: int, stage: int, makers: set[int], events: list[int | Message]
) -> list[MessageDifference]:
    """Follow the gradients of a step and a stage from message to message to the updates that take them."""
    sums = {device: Counter([device]) for device in makers}
    travels, name, found = plan.program.state.travels, name_of(gradients(stage, step)), []
    updates = [event for event in events if not isinstance(event, Message)]
    for event in events:
        if isinstance(event, Message):
            before = {device: own.copy() for device, own in sums.items()}
            _pass_on(event, sums)
            late = not updates or plan.place_of(event.node) > max(map(plan.place_of, updates))
            if late or sums == before:
                found.append(MessageDifference(kind="superfluous", text=f"no task needs {event}", size=event.size))
            continue
        device = int(plan.program.tasks.device[event])
        task = plan.describe(event, device)
        taken = sums.get(device, Counter())
        for maker in sorted(makers if not travels else ()):
            if taken[maker] == 0:
                text = f"{task} needs {name}, of device {maker}, and no message brings them"
                found.append(MessageDifference(kind="missing", text=text, size=0))
            elif taken[maker] > 1:
                text = f"{task} takes {name}, of device {maker} {taken[maker]} times"
                found.append(MessageDifference(kind="doubled", text=text, size=0))
    return found


def _pass_on(message: Message, sums: dict[int, Counter[int]]) -> None:
    """Move or add sums as a message does."""
    senders = {sender: sums.pop(sender, Counter()) for sender in message.senders}
    total = sum(senders.values(), Counter[int]())
    receivers = {Op.ALL_REDUCE: message.members, Op.REDUCE: (message.src,)}.get(message.op, message.members[1:])
    for receiver in receivers:
        sums[receiver] = sums.get(receiver, Counter()) + total


# Sizes


def _tensor_bytes(plan: Plan, message: Message, training: Training, optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that a message carries."""
    if message.content == Content.ACTIVATION:
        return training.boundary(message.stage).nbytes
    if message.content == Content.ACTIVATION_GRADIENT:
        return training.boundary(message.stage - 1).nbytes
    vector = training.parameters(message.stage)
    if message.content == Content.GRADIENT:
        return vector.nbytes
    sizes = {Category.OPTIMIZER: optimizer.nbytes(training.parts(message.stage))}
    return sum(sizes.get(holding.category, vector.nbytes) for holding in plan.cargo(message.node))
