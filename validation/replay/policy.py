"""The replay's own policy of freeing, independent on purpose: from tasks, messages and orders, without any buffers.

A version of parameters goes after its last use on a device: by a task that reads it, an update that starts from it, or
a message that takes it away. Gradients go with the update or the message that takes them, a stash with its last
backward. A device that updates a stage keeps the optimizer state until its last update, or until a message takes it.
Where all of a stage is owned, a device that does not own it drops a copy after the one use for which it came.

Of what is split, a device has the share of its rank always. Gathered parameters go with their last use before they are
gathered again; shares that fewer ranks have of them from a forward on go when the backward begins.
Gradients leave with the message that sums them to shares. New parameters are gathered in the place of the old ones,
into which each rank has written its share.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cdpsim.program import Category, Content, Kind, Op, Program
from cdpsim.schedules.state import Placed

from .contents import BEGINNING, Holding, Message


class Life(NamedTuple):
    """A copy of a content on a device, from the node that makes or brings it to its last use there."""

    device: int
    holding: Holding
    begin: int
    end: int


class Policy:
    """The lives of all copies, and the contents of the messages that carry parameters or states."""

    def __init__(self, program: Program, order: Sequence[int], messages: Sequence[Message]) -> None:
        self.cargo: dict[int, list[Holding]] = {}  # by the node of a message
        self._program, self._messages = program, messages
        self._place = {node: place for place, node in enumerate(order)} | {BEGINNING: -1}
        self._gains: dict[tuple[int, Holding], list[int]] = defaultdict(list)
        self._uses: dict[tuple[int, Holding], list[int]] = defaultdict(list)
        self._present: dict[int, set[Holding]] = defaultdict(set)
        self._splits = {category: split_of(program, category) for category in Category}
        gathers = (each for each in messages if each.op == Op.ALL_GATHER)
        # Of each stage whose backwards gather from fewer ranks than share it, how many these are.
        self.between = {each.stage: len(each.members) for each in gathers if len(each.members) < program.shard}
        self._last_needed = self._find_last_needs()
        self._start()
        for node in order:
            if node < len(program.tasks):
                self._follow_task(node)
            else:
                self._follow_message(messages[node - len(program.tasks)])

    @property
    def lives(self) -> list[Life]:
        """The life of each copy that is used."""
        found = []
        for (device, holding), gains in self._gains.items():
            uses = self._uses[device, holding]
            if self._is_lent(device, holding):
                found += [Life(device, holding, *pair) for pair in zip(gains, uses, strict=False)]
                continue
            places = [*(self._place[node] for node in gains[1:]), len(self._place)]
            for gain, until in zip(gains, places, strict=True):
                own = [node for node in uses if self._place[gain] <= self._place[node] < until]
                found += [Life(device, holding, gain, own[-1])] if own else []
        return found

    def _is_lent(self, device: int, holding: Holding) -> bool:
        """Return whether a device has a copy for one use alone, as that of an owner which has it always."""
        state = self._program.state
        owned = state.parameters is Placed.OWNED and not state.travels
        return owned and holding.category == Category.PARAMETERS and device not in self._updaters[holding.stage]

    def _find_last_needs(self) -> dict[Holding, int]:
        """Return the place in the order of the last task, on any device, that needs each content."""
        tasks, last = self._program.tasks, dict[Holding, int]()
        self._updaters: dict[int, set[int]] = defaultdict(set)
        self._users: dict[int, list[int]] = defaultdict(list)  # of each stage, its tasks
        for node, device in enumerate(tasks.device.tolist()):
            stage = int(tasks.stage[node])
            self._users[stage].append(node)
            if tasks.kind[node] == Kind.U:
                self._updaters[stage].add(device)
            for holding in self._reads(node):
                last[holding] = max(last.get(holding, -1), self._place[node])
        return last

    def _reads(self, node: int) -> list[Holding]:
        program, tasks = self._program, self._program.tasks
        stage, step, version = (int(column[node]) for column in (tasks.stage, tasks.step, tasks.version))
        if tasks.kind[node] != Kind.U:
            return [parameters(stage, version)]
        row = node - program.compute
        base, first = int(program.base[row]), int(program.first_step[row])
        return [
            parameters(stage, base, self._splits[Category.PARAMETERS]),
            optimizer_state(stage, self._splits[Category.OPTIMIZER]),
            *(gradients(stage, each, self._splits[Category.GRADIENTS]) for each in range(first, step + 1)),
        ]

    def _start(self) -> None:
        """Give devices the first parameters and states: every user of a stage, its owner, or its first user."""
        program, state = self._program, self._program.state
        tasks = program.tasks
        for stage, users in self._users.items():
            updates = [node for node in users if tasks.kind[node] == Kind.U]
            first_step = min((int(tasks.step[node]) for node in updates), default=0)
            updaters = {int(tasks.device[node]) for node in updates if tasks.step[node] == first_step}
            copies = updaters if state.parameters is Placed.OWNED else {int(tasks.device[node]) for node in users}
            if state.travels:
                copies = updaters = {self._first_user(stage)}
            for device in copies:
                self._gain(device, parameters(stage, 0, self._splits[Category.PARAMETERS]), BEGINNING)
            for device in updaters:
                self._gain(device, optimizer_state(stage, self._splits[Category.OPTIMIZER]), BEGINNING)

    def _first_user(self, stage: int) -> int:
        """Return the device on which a travelling stage begins: the sender of its first message, or its first user."""
        users = [(self._place[node], int(self._program.tasks.device[node])) for node in self._users[stage]]
        states = [each for each in self._messages if each.content == Content.STATE and each.stage == stage]
        return min(users + [(self._place[each.node], each.src) for each in states])[1]

    def _follow_task(self, node: int) -> None:
        program, tasks = self._program, self._program.tasks
        kind, device, stage, step = (int(c[node]) for c in (tasks.kind, tasks.device, tasks.stage, tasks.step))
        for holding in self._reads(node):
            self._use(device, holding, node)
        if kind == Kind.U:
            split = self._splits[Category.PARAMETERS]
            if split == self._splits[Category.OPTIMIZER]:  # else an update makes a share of what all of its group hold
                self._gain(device, parameters(stage, int(tasks.version[node]), split), node)
            return
        version, micro_batch = int(tasks.version[node]), int(tasks.micro_batch[node])
        between = Holding(Category.PARAMETERS, stage, version, micro_batch, self.between.get(stage, 1))
        stash = Holding(Category.ACTIVATIONS, stage, step, micro_batch)
        if kind == Kind.F:
            self._gain(device, stash, node)
            if between.split > 1:
                self._gain(device, between, node)
            return
        if between.split > 1 and kind == Kind.B:
            self._use(device, between, node)
        self._use(device, stash, node)
        if kind == (Kind.W if program.splits else Kind.B):
            if gradients(stage, step) not in self._present[device]:
                self._gain(device, gradients(stage, step), node)
            self._use(device, gradients(stage, step), node)

    def _follow_message(self, message: Message) -> None:
        node, step = message.node, message.step
        for stage in message.covers:
            if message.content == Content.GRADIENT:
                self._follow_sum(message, stage)
            elif message.op == Op.ALL_GATHER:
                self._follow_gather(message, stage)
            elif message.op == Op.ALL_REDUCE:
                self._follow_mean(message, stage)
        if message.op == Op.ALL_GATHER:
            self.cargo[node] = [parameters(stage, step + 1) for stage in message.covers]
        if message.op not in (Op.P2P, Op.BROADCAST) or message.content not in (Content.PARAMETERS, Content.STATE):
            return
        state = message.content == Content.STATE
        self.cargo[node] = self._state_of(message) if state else [parameters(message.stage, step + 1)]
        for holding in self.cargo[node]:
            self._use(message.src, holding, node)
            for receiver in message.members:
                if receiver != message.src:
                    self._gain(receiver, holding, node)
            if state:
                self._present[message.src].discard(holding)

    def _follow_sum(self, message: Message, stage: int) -> None:
        whole, share = (gradients(stage, message.step, split) for split in (1, self._splits[Category.GRADIENTS]))
        for sender in message.senders:
            self._use(sender, share if message.op == Op.ALL_REDUCE else whole, message.node)
            if message.op == Op.REDUCE_SCATTER and share != whole:
                self._present[sender].discard(whole)
                if share not in self._present[sender]:
                    self._gain(sender, share, message.node)
                self._use(sender, share, message.node)

    def _follow_mean(self, message: Message, stage: int) -> None:
        """Let all members use what they have at the end of the step, unless the mean is late: that is of copies."""
        version, averaged = last_own_version(self._program, message.step), self._program.averaged
        for member in message.members if averaged is not None and averaged[version + 1] == version else ():
            self._use(member, parameters(stage, version), message.node)

    def _follow_gather(self, message: Message, stage: int) -> None:
        new, split = parameters(stage, message.step + 1), self._splits[Category.PARAMETERS]
        before = parameters(stage, message.step) if split == 1 else new._replace(split=split)
        for member in message.members:
            self._use(member, before, message.node)
            self._gain(member, new, message.node)

    def leaves(self, holding: Holding, node: int) -> bool:
        """Return whether a content is gone when the node of its last use starts, and does not stay until its end."""
        if node < len(self._program.tasks):
            return holding.category == Category.PARAMETERS and holding.split == self.between.get(holding.stage)
        op = self._messages[node - len(self._program.tasks)].op
        return holding.split == 1 and op in (Op.REDUCE_SCATTER, Op.ALL_GATHER)

    def _state_of(self, message: Message) -> list[Holding]:
        """Return what a message of a state carries: the optimizer's, and of a travelling stage all with later uses."""
        if not self._program.state.travels:
            return [optimizer_state(message.stage)]
        place, here = self._place[message.node], self._present[message.src]
        return sorted(
            holding
            for holding in here
            if holding.category != Category.ACTIVATIONS
            and holding.stage == message.stage
            and self._last_needed.get(holding, -1) > place
        )

    def _gain(self, device: int, holding: Holding, node: int) -> None:
        self._gains[device, holding].append(node)
        self._present[device].add(holding)

    def _use(self, device: int, holding: Holding, node: int) -> None:
        self._uses[device, holding].append(node)


def last_own_version(program: Program, step: int) -> int:
    """Return the version that each worker makes alone in a step."""
    made = program.tasks.version[program.compute :][program.tasks.step[program.compute :] == step]
    return int(made[program.is_own(made)].max())


def parameters(stage: int, version: int, split: int = 1) -> Holding:
    """Return a version of a stage's parameters."""
    return Holding(Category.PARAMETERS, stage, version, -1, split)


def gradients(stage: int, step: int, split: int = 1) -> Holding:
    """Return a device's gradients of a stage in a step."""
    return Holding(Category.GRADIENTS, stage, step, -1, split)


def optimizer_state(stage: int, split: int = 1) -> Holding:
    """Return a stage's optimizer state."""
    return Holding(Category.OPTIMIZER, stage, 0, -1, split)


def split_of(program: Program, category: Category) -> int:
    """Return among how many ranks what updates use of a category is split."""
    state = program.state
    placements = {Category.PARAMETERS: state.parameters, Category.GRADIENTS: state.gradients}
    return program.shard if placements.get(category, state.optimizer) is Placed.SPLIT else 1
