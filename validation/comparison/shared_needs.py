"""Needs of ranks that share what is split: of gathered parameters, and of sums that go to shares and on to updates."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from cdpsim.program import Content, Kind, Op
from cdpsim.schedules.state import When

from ..replay.contents import Message, Passing, name_of
from ..replay.plan import Plan
from ..replay.policy import gradients
from ..report.schema import MessageDifference

Maker = tuple[int, int]  # a device, and the number of its pass in the step


def gather_needs(plan: Plan) -> Iterator[tuple[Passing, int, int]]:
    """Yield what devices lack of parameters whose shares they have: content, device, and the task that reads it.

    Where all is split they lack it for each task, or once in a pass or step where it stays; else once, as all ranks
    keep it.
    """
    program, tasks = plan.program, plan.program.tasks
    if program.thrown_away:
        yield from _needs_of_rounds(plan)
        return
    kept = program.state.parameters is not program.state.optimizer
    reshard, whole = str(program.state.reshard), range(program.n)
    stays = {"no": whole, "step": whole, "root": (0, program.n - 1)}.get(reshard, ())
    by_pass = not kept and reshard != "step"
    has: set[tuple[int, ...]] = set()
    for node in sorted(range(program.compute), key=plan.place_of):
        device, stage, version, step = (int(c[node]) for c in (tasks.device, tasks.stage, tasks.version, tasks.step))
        key = device, stage, version, 0 if kept else step, int(tasks.micro_batch[node]) if by_pass else -1
        if (kept and version == 0) or key in has:
            continue
        if kept or stage in stays:
            has.add(key)
        yield (Content.PARAMETERS, version - 1, -1, stage), device, node


def _needs_of_rounds(plan: Plan) -> Iterator[tuple[Passing, int, int]]:
    """Yield the versions that devices go on with, and all that the last communication makes, with which they end."""
    program, tasks = plan.program, plan.program.tasks
    updates = range(program.compute, len(tasks))
    made = {int(tasks.version[node]): int(tasks.step[node]) for node in updates}
    last = {version for version, step in made.items() if step == program.updated - 1}
    for device in range(program.devices):
        own = np.flatnonzero(tasks.device[: program.compute] == device)
        for stage in range(program.n):
            nodes = own[tasks.stage[own] == stage].tolist()
            readers = {int(tasks.version[node]): node for node in reversed(nodes)}
            for version in sorted((readers.keys() | last) - {0}):
                yield (Content.PARAMETERS, made[version], -1, stage), device, readers.get(version, nodes[-1])


def early_gathers(plan: Plan) -> Iterator[MessageDifference]:
    """Yield gathers that begin before an update has made a share of what they bring.

    After the updates of a whole step they wait for all of their members, unless they are to be early.
    """
    tasks, state = plan.program.tasks, plan.program.state
    waits = state.parameters is not state.optimizer and state.gather != "early"
    updates = {
        (int(tasks.step[node]), int(tasks.stage[node]), int(tasks.device[node])): node
        for node in range(plan.program.compute, len(tasks))
    }
    for message in plan.messages:
        if message.op != Op.ALL_GATHER:
            continue
        stages = range(plan.program.n) if waits else message.covers
        makers = ((message.step, stage, member) for stage in stages for member in message.members)
        made = (updates[maker] for maker in makers if maker in updates)
        late = next((node for node in made if plan.place_of(node) > plan.place_of(message.node)), None)
        if late is not None:
            device = int(tasks.device[late])
            covered = int(tasks.stage[late]) in message.covers
            why = "which makes a share of it" if covered else "which its rank makes before"
            text = f"{message} comes before {plan.describe(late, device)}, {why}"
            yield MessageDifference(kind="wrong version", text=text, size=message.size)


def follow_shares(plan: Plan) -> Iterator[MessageDifference]:
    """Yield sums in which an update misses the gradients of a device's pass, or has them twice, and idle messages."""
    program, tasks = plan.program, plan.program.tasks
    gives = Kind.W if program.splits else Kind.B
    events: dict[tuple[int, int], list[tuple[int, int | Message]]] = defaultdict(list)  # step, stage -> place, event
    for node, kind in enumerate(tasks.kind.tolist()):
        step, stage = int(tasks.step[node]), int(tasks.stage[node])
        first = int(program.first_step[node - program.compute]) if kind == Kind.U else step
        for each in range(first, step + 1) if kind in (gives, Kind.U) else ():
            events[each, stage].append((plan.place_of(node), node))
    for message in plan.messages:
        for stage in message.covers if message.content == Content.GRADIENT else ():
            events[message.step, stage].append((plan.place_of(message.node), message))
    idle: dict[int, list[bool]] = defaultdict(list)
    for (step, stage), own in sorted(events.items()):
        gave = (event for _, event in own if not isinstance(event, Message) and tasks.kind[event] == gives)
        sums = _Sums(plan, step, stage, Counter(int(tasks.device[event]) for event in gave))
        for _, event in sorted(own, key=lambda each: each[0]):
            if isinstance(event, Message):
                idle[event.node].append(not sums.pass_on(event))
            elif tasks.kind[event] == Kind.U:
                yield from sums.take(event)
            else:
                sums.add(int(tasks.device[event]))
    for node, found in idle.items():
        if all(found):
            message = plan.message(node)
            yield MessageDifference(kind="superfluous", text=f"no task needs {message}", size=message.size)


class _Sums:
    """The gradients of a step and a stage: each device's own, and the sums that it has of its share or of all."""

    def __init__(self, plan: Plan, step: int, stage: int, passes: Counter[int]) -> None:
        self._plan, self._step, self._stage = plan, step, stage
        self._makers = [(device, number) for device in sorted(passes) for number in range(passes[device])]
        self._each = plan.program.state.reduce is When.EACH
        self._passes: Counter[int] = Counter()
        self._own: dict[int, Counter[Maker]] = defaultdict(Counter)
        self._inside: dict[int, Counter[Maker]] = defaultdict(Counter)  # of a group, to go on to others
        self._sum: dict[int, Counter[Maker]] = defaultdict(Counter)
        self._done: set[int] = set()  # devices that have made their updates

    def add(self, device: int) -> None:
        """Let a device's next pass add its gradients."""
        maker = device, self._passes[device]
        self._passes[device] += 1
        self._own[device][maker] += 1

    def pass_on(self, message: Message) -> bool:
        """Add and move gradients as a message does; return whether that changes anything that an update takes."""
        if self._done.issuperset(message.members):
            return False
        alone = self._plan.program.shard == 1
        taken = self._own if alone or message.op == Op.REDUCE_SCATTER else self._inside
        into = self._inside if message.op == Op.REDUCE_SCATTER and self._plan.goes_on else self._sum
        total = sum((taken.pop(member, Counter()) for member in message.members), Counter[Maker]())
        if alone and not self._each:  # sums that are summed again are there several times
            total += sum((self._sum.pop(member, Counter()) for member in message.members), Counter[Maker]())
        for member in message.members:
            into[member] += total
        return bool(total)

    def take(self, update: int) -> Iterator[MessageDifference]:
        """Yield what an update misses, or has several times."""
        device = int(self._plan.program.tasks.device[update])
        self._done.add(device)
        task, name = self._plan.describe(update, device), name_of(gradients(self._stage, self._step))
        own = self._step in self._plan.own_steps
        makers = [each for each in self._makers if each[0] == device or not own]
        alone = all(maker == device for maker, _ in makers)
        taken = self._own[device] if alone else self._sum[device]
        for maker, number in makers:
            of = f"of device {maker}, pass {number}"
            if taken[maker, number] == 0:
                yield MessageDifference(
                    kind="missing", text=f"{task} needs {name}, {of}, and no message brings them", size=0
                )
            elif taken[maker, number] > 1:
                text = f"{task} takes {name}, {of}, {taken[maker, number]} times"
                yield MessageDifference(kind="doubled", text=text, size=0)
