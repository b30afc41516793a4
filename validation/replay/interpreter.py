"""The interpreter of one device's part of a program, on real tensors: it knows no schedule."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cdpsim.program import Category, Content, Kind, Op
from cdpsim.schedules.state import Owner, When

from ..training.forms import Form, flatten, pack, packed, unpack, zeros
from ..training.offload import HostUpdates
from ..training.optimizer import Optimizer, OptimizerState
from ..training.passes import Pass, Rest, backward_for_input, backward_for_weights
from ..training.recomputation import Stash, run_backward, run_forward
from ..training.stages import Training
from .contents import BEGINNING, Holding, Message, Passing, ReplayError, name_of
from .plan import Part, Plan
from .policy import gradients, optimizer_state, parameters, split_of
from .shares import Shares
from .transport import Pending, Transport
from .watch import Watch

Value = TypeVar("Value")
Made = Callable[[int, int, Tensor], None]  # stage, version and parameters that an update made


def copy_state(state: OptimizerState) -> OptimizerState:
    """Return a copy of a state, for an update after which it is to be as it was."""
    return {name: tensor.clone() for name, tensor in state.items()}


class BufferStore(Generic[Value]):
    """Values of one category by their contents; reading a value before or after its life is an error.

    A content may have several copies at once, of which the oldest is read, and ends, first.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._copies: dict[Holding, deque[list[Value]]] = defaultdict(deque)  # a list of one value, or of none so far

    def __contains__(self, holding: Holding) -> bool:
        return bool(self._copies[holding]) and bool(self._copies[holding][0])

    def __len__(self) -> int:
        return sum(map(len, self._copies.values()))

    def first(self, is_wanted: Callable[[Holding], bool]) -> Holding:
        """Return the first content of a kind whose life has begun and not ended."""
        found = next((holding for holding, copies in self._copies.items() if copies and is_wanted(holding)), None)
        if found is None:
            raise ReplayError(f"device {self._device} does not hold what a message is to gather")
        return found

    def begin(self, holding: Holding) -> None:
        """Begin another copy of a content."""
        self._copies[holding].append([])

    def end(self, holding: Holding) -> None:
        """End the oldest copy of a content, and free its value."""
        self._copies[holding].popleft()

    def put(self, holding: Holding, value: Value) -> None:
        """Keep the value of the newest copy; a value without a copy is never read."""
        if self._copies[holding]:
            self._copies[holding][-1][:] = [value]

    def get(self, holding: Holding) -> Value:
        """Return a value whose life has begun and not ended."""
        if holding not in self:
            raise ReplayError(f"device {self._device} does not hold {name_of(holding)} (not yet, or not any more)")
        return self._copies[holding][0][0]


class Device:
    """A device that runs its nodes, one after another."""

    def __init__(
        self,
        plan: Plan,
        part: Part,
        training: Training,
        optimizer: Optimizer,
        transport: Transport,
        made: Made,
        watch: Watch,
        hosts: HostUpdates | None = None,
    ) -> None:
        self._plan, self._part, self._program = plan, part, plan.program
        self._training, self._optimizer, self._transport = training, optimizer, transport
        self._made, self._watch, self._hosts = made, watch, hosts or HostUpdates(optimizer)
        self._stores: dict[Category, BufferStore[Any]] = {each: BufferStore(part.device) for each in Category}
        self._passes: BufferStore[Stash | Rest] = self._stores[Category.ACTIVATIONS]
        self._parameters: BufferStore[Tensor] = self._stores[Category.PARAMETERS]
        self._gradients: BufferStore[Tensor] = self._stores[Category.GRADIENTS]
        self._states: BufferStore[OptimizerState] = self._stores[Category.OPTIMIZER]
        self._passing: dict[Passing, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._shares = Shares(plan.program, plan.messages, training)
        self._splits = {category: split_of(plan.program, category) for category in Category}
        self._given: dict[int, list[Tensor]] = {}  # by message, tensors that are there until it is complete
        self._going_on: dict[Holding, Tensor] = {}  # sums of shares, on their way from group to group
        back = self._backward_for_input if self._program.splits else self._backward
        self._tasks = {Kind.F: self._forward, Kind.B: back, Kind.W: self._backward_for_weights, Kind.U: self._update}
        self._begin(BEGINNING)
        for holding in part.begins[BEGINNING]:  # unwatched: the modules' own parameters are only templates
            self._keep(holding, self._first(holding))

    def play(self, node: int) -> None:
        """Run a task, or begin a message, which then runs by itself until it is due."""
        with self._watch.playing():
            for message in self._part.due.get(node, ()):
                self._complete(message)
            self._watch.turn(int(self._plan.slots[0][node]))
            self._watch.event(node)
            if self._plan.is_message(node):
                self._start(self._plan.message(node))
                return
            self._begin(node)
            self._leave(node)
            self._tasks[Kind(int(self._program.tasks.kind[node]))](node)
            self._end(node)

    def finish(self) -> None:
        """Complete all messages on their way, and refuse values that are left over."""
        for message in list(self._pending):
            self._complete(message)
        left = sum(map(len, self._stores.values())) + len(self._passing)
        if left:
            raise ReplayError(f"device {self._part.device} still holds {left} things at the end")

    def _begin(self, node: int) -> None:
        for holding in self._part.begins.get(node, ()):
            self._stores[holding.category].begin(holding)

    def _end(self, node: int) -> None:
        for holding in self._part.ends.get(node, ()):
            self._stores[holding.category].end(holding)

    def _leave(self, node: int) -> None:
        for holding in self._part.leaves.get(node, ()):
            self._stores[holding.category].end(holding)

    def _keep(self, holding: Holding, value: Tensor | OptimizerState) -> None:
        """Keep a value if a later task or message uses it."""
        for tensor in value.values() if isinstance(value, dict) else (value,):
            self._watch.holds(tensor, holding.category)
        self._stores[holding.category].put(holding, value)

    def _first(self, holding: Holding) -> Tensor | OptimizerState:
        theta = flatten(self._training.stages[holding.stage].parameters()).to(self._training.device)
        parts = self._shares.parts(holding.stage, holding.split)
        if holding.split > 1:
            theta = self._share(theta, holding.stage, holding.split).clone()
        if holding.category == Category.OPTIMIZER:
            return {} if self._optimizer.on_host else self._optimizer.state(theta, parts)
        return theta

    # Tasks

    def _forward(self, node: int) -> None:
        t, i, j = self._place(node)
        x, theta = self._taken(Content.ACTIVATION, t, i, j - 1), self._theta(node)
        x = self._training.input(t, i) if x is None else x
        target = self._training.target(t, i) if j == self._training.n - 1 else None
        with self._watch.task(node):
            y, kept = run_forward(self._training, j, theta, x, target, self._parts(t))
        if y is not None:
            self._passing[Content.ACTIVATION, t, i, j] = y
        self._passes.put(Holding(Category.ACTIVATIONS, j, t, i), kept)
        for holding in self._part.begins.get(node, ()):
            if holding.split > 1:  # a share of what the backward gathers from fewer ranks than the forward
                self._keep(holding, self._share(theta, j, holding.split).clone())

    def _parts(self, step: int) -> int:
        """Return by how much the loss of a micro-batch is divided, so that those of a step add up to the mean."""
        return int(self._program.counts[step])

    def _backward(self, node: int) -> None:
        t, i, j = self._place(node)
        above, theta = self._taken(Content.ACTIVATION_GRADIENT, t, i, j + 1), self._theta(node)
        kept, gradient = self._passes.get(Holding(Category.ACTIVATIONS, j, t, i)), self._gradient(t, j)
        with self._watch.task(node):
            assert not isinstance(kept, Rest), "no part of the backward has run"
            below = run_backward(self._training, kept, theta, above, gradient)
        self._hand_back(below, t, i, j)

    def _backward_for_input(self, node: int) -> None:
        t, i, j = self._place(node)
        above, theta = self._taken(Content.ACTIVATION_GRADIENT, t, i, j + 1), self._theta(node)
        holding = Holding(Category.ACTIVATIONS, j, t, i)
        kept = self._passes.get(holding)
        assert isinstance(kept, Pass), "a split backward computes nothing again"
        with self._watch.task(node):
            below, left = backward_for_input(kept, theta, above, self._training.divided.get(j))
        self._passes.put(holding, left)
        self._hand_back(below, t, i, j)

    def _backward_for_weights(self, node: int) -> None:
        t, i, j = self._place(node)
        kept, gradient = self._passes.get(Holding(Category.ACTIVATIONS, j, t, i)), self._gradient(t, j)
        theta = self._theta(node)
        assert isinstance(kept, Pass | Rest), "a split backward computes nothing again"
        with self._watch.task(node):
            backward_for_weights(self._training, kept, theta, gradient)

    def _hand_back(self, below: Tensor | None, step: int, micro_batch: int, stage: int) -> None:
        if below is None:
            return
        key = Content.ACTIVATION_GRADIENT, step, micro_batch, stage
        self._passing[key] = below
        if key in self._plan.sent:  # perhaps not at once
            self._watch.holds(below, Category.COMMUNICATION)

    def _taken(self, content: Content, step: int, micro_batch: int, stage: int) -> Tensor | None:
        """Return the value from the stage before or after, None where there is no such stage."""
        if not 0 <= stage < self._training.n:
            return None
        tensor = self._passed((content, step, micro_batch, stage))
        self._watch.holds(tensor, Category.ACTIVATIONS)
        return tensor

    def _passed(self, key: Passing) -> Tensor:
        if key not in self._passing:
            raise self._plan.lack(self._part.device, key)
        return self._passing.pop(key)

    def _theta(self, node: int) -> Tensor:
        """Return the parameters that a task reads, or that its forward has read."""
        tasks = self._program.tasks
        return self._parameters.get(parameters(int(tasks.stage[node]), int(tasks.version[node])))

    def _gradient(self, step: int, stage: int) -> Tensor:
        """Return the device's own gradients of a step so far; tasks add to them in place."""
        holding = gradients(stage, step)
        if holding not in self._gradients:
            self._keep(holding, zeros(self._training.parameters(stage), self._training.device))
        return self._gradients.get(holding)

    def _update(self, node: int) -> None:
        (t, _, j), program, row = self._place(node), self._program, node - self._program.compute
        columns = program.tasks.version[node], program.base[row], program.first_step[row]
        version, base, first = (int(column) for column in columns)
        gradient = self._sum(t, j)
        if first < t:
            gradient = reduce(add, [*(self._sum(step, j) for step in range(first, t)), gradient]) / (t + 1 - first)
        split = self._splits[Category.PARAMETERS]
        before = self._parameters.get(parameters(j, base, split))
        keep = not program.is_estimate(program.tasks.version[node])
        if split == self._splits[Category.OPTIMIZER]:
            theta = self._updated(j, before, gradient, keep=keep)
            self._keep(parameters(j, version, split), theta)
        else:  # the share is written where it was; a gather makes the new version of all shares
            theta = self._updated(j, self._own_share(before, j), gradient, keep=keep)
            self._write_own(before, j, theta)
        self._made(j, version, theta)

    def _updated(self, stage: int, theta: Tensor, gradient: Tensor, *, keep: bool) -> Tensor:
        """Return the next parameters of a stage; the state that the update starts from stays as it was, or is changed.

        On hosts, a state that devices use in turn is there for all of them.
        """
        split = self._splits[Category.OPTIMIZER]
        parts = self._shares.parts(stage, split)
        if self._optimizer.on_host:
            key = (stage, self._part.device if self._program.state.owner is Owner.FIXED else -1)
            return self._hosts.update(key, theta, gradient, parts, keep=keep)
        state = self._states.get(optimizer_state(stage, split)) if self._optimizer.forms(parts) else {}
        if not keep:
            state = copy_state(state)
        return self._optimizer.update(theta, gradient, state, parts)

    @property
    def _sums_in_place(self) -> bool:
        """Whether the sum of a device's share is in its place among the device's own gradients, which stay."""
        return self._splits[Category.GRADIENTS] < self._splits[Category.OPTIMIZER]

    def _share(self, vector: Tensor, stage: int, split: int) -> Tensor:
        return self._shares.of(vector, stage, split, self._shares.rank(self._part.device, split))

    def _own_share(self, vector: Tensor, stage: int) -> Tensor:
        """Return the share of a vector that the device updates."""
        return self._share(vector, stage, self._splits[Category.OPTIMIZER])

    def _write_own(self, vector: Tensor, stage: int, share: Tensor) -> None:
        split = self._splits[Category.OPTIMIZER]
        self._shares.write(vector, stage, split, self._shares.rank(self._part.device, split), share)

    def _place(self, node: int) -> tuple[int, int, int]:
        tasks = self._program.tasks
        return int(tasks.step[node]), int(tasks.micro_batch[node]), int(tasks.stage[node])

    def _sum(self, step: int, stage: int) -> Tensor:
        """Return the sum of the device's own gradients and those from the device before it."""
        own = self._gradients.get(gradients(stage, step, self._splits[Category.GRADIENTS]))
        if self._sums_in_place:
            return self._own_share(own, stage)
        arrived = self._passing.pop((Content.GRADIENT, step, -1, stage), None)
        return own if arrived is None else own.add_(arrived)

    # Messages

    def _start(self, message: Message) -> None:
        try:
            self._pending[message.node] = self._launch(message)
        except ReplayError as error:
            raise ReplayError(f"device {self._part.device} cannot begin {message}: {error}") from error

    def _launch(self, message: Message) -> Pending:
        begin = self._transport.begin
        if message.op in (Op.P2P, Op.BROADCAST):
            gives = self._part.device == message.src
            form = form_of_message(self._plan, message, self._training, self._optimizer)
            return begin(message, self._outgoing(message) if gives else None, form)
        if message.op == Op.REDUCE:
            return begin(message, self._sum(message.step, message.stage))
        given = [self._given_to(message, stage) for stage in message.covers]
        if message.op == Op.REDUCE_SCATTER:
            self._given[message.node] = given
        if self._shares.is_packed(message) and message.op == Op.REDUCE_SCATTER:
            given = [self._shares.pack_rows(given, message.covers, self._shares.splits(message))]
        elif len(given) > 1:
            given = [torch.cat(given)]
        self._leave(message.node)
        return begin(message, given[0], None if message.op == Op.ALL_REDUCE else self._shares.message_form(message))

    def _given_to(self, message: Message, stage: int) -> Tensor:
        split = self._shares.splits(message)
        if message.op == Op.ALL_REDUCE:
            return self._sum_of(message, stage)
        if message.op == Op.REDUCE_SCATTER:
            return self._gradients.get(gradients(stage, message.step))
        if self._splits[Category.PARAMETERS] == 1:  # of the version before, into which the update has written
            share = self._own_share(whole := self._parameters.get(parameters(stage, message.step)), stage)
            return share.clone() if message.stages == 1 and share._is_view() and whole is not share else share
        if split == self._program.shard:
            return self._parameters.get(parameters(stage, message.step + 1, split))
        # A share from a forward on.
        from_forward = self._parameters.first(lambda own: own[1:3] + own[4:] == (stage, message.step + 1, split))
        return self._parameters.get(from_forward)

    def _sum_of(self, message: Message, stage: int) -> Tensor:
        """Return the device's sum of a stage's gradients that an all-reduce makes the sum of all."""
        holding = gradients(stage, message.step, self._splits[Category.GRADIENTS])
        own = self._going_on.get(holding, self._gradients.get(holding))
        return self._own_share(own, stage) if self._sums_in_place else own

    def _complete(self, node: int) -> None:
        message = self._plan.message(node)
        if node not in self._pending:
            raise ReplayError(f"device {self._part.device} waits for {message}, which it has not begun")
        self._watch.event(node, ends=True)
        try:
            tensor = self._pending.pop(node).wait()
        except ReplayError as error:
            raise ReplayError(f"device {self._part.device} waited for {message}: {error}") from error
        self._begin(node)
        if message.op == Op.REDUCE:
            self._keep(gradients(message.stage, message.step), tensor)
        elif message.op == Op.ALL_REDUCE:
            self._take_sums(message, tensor)
        elif message.op == Op.REDUCE_SCATTER:
            self._take_shares(message, tensor)
        elif message.op == Op.ALL_GATHER:
            packed, split = self._shares.is_packed(message), self._shares.splits(message)
            vectors = self._shares.unpack_rows(tensor, message.covers, split) if packed else [tensor]
            for stage, vector in zip(message.covers, vectors, strict=True):
                self._take_gathered(message, stage, vector)
        elif self._part.device != message.src:
            self._arrive(message, tensor)
        self._given.pop(node, None)
        self._end(node)

    def _take_sums(self, message: Message, tensor: Tensor) -> None:
        """Keep the sum of all; where tasks add more to it, only the first member does, and the others begin anew."""
        totals = torch.split(tensor, self._numbers(message))
        if self._sums_in_place:
            for stage, total in zip(message.covers, totals, strict=True):
                self._write_own(self._gradients.get(gradients(stage, message.step)), stage, total)
            return
        sums = [self._sum_of(message, stage) for stage in message.covers]
        for own, total in zip(sums, totals, strict=True):
            if own.data_ptr() != total.data_ptr():
                own.copy_(total)
        split = self._splits[Category.GRADIENTS]
        if split == 1 and message.node in self._plan.is_again and self._program.state.reduce is When.EACH:
            for own in sums if self._part.device != message.members[0] else ():
                own.zero_()
        for stage in message.covers:
            holding = gradients(stage, message.step, split)
            if (come := self._going_on.pop(holding, None)) is not None:
                self._gradients.get(holding).add_(come)

    def _numbers(self, message: Message) -> list[int]:
        split = self._shares.splits(message)
        return [self._shares.form(stage, split).numel for stage in message.covers]

    def _take_shares(self, message: Message, tensor: Tensor) -> None:
        """Keep the device's share of a sum, or add it to those of earlier passes."""
        shares = [tensor]
        if message.stages > 1:
            shares = [share.clone() for share in torch.split(tensor, self._numbers(message))]
        for stage, share in zip(message.covers, shares, strict=True):
            holding = gradients(stage, message.step, self._splits[Category.GRADIENTS])
            if self._sums_in_place:
                self._write_own(self._gradients.get(holding), stage, share)
            elif holding not in self._gradients:
                self._keep(holding, share)
            elif self._plan.goes_on:
                self._going_on[holding] = share
            else:
                self._gradients.get(holding).add_(share)

    def _take_gathered(self, message: Message, stage: int, vector: Tensor) -> None:
        self._keep(parameters(stage, message.step + 1), vector)

    def _outgoing(self, message: Message) -> Tensor:
        if message.content in (Content.ACTIVATION, Content.ACTIVATION_GRADIENT):
            return self._passed(message.key)
        if message.content == Content.GRADIENT:
            return self._sum(message.step, message.stage)
        return pack([tensor for holding in self._plan.cargo(message.node) for tensor in self._tensors(holding)])

    def _arrive(self, message: Message, tensor: Tensor) -> None:
        cargo = self._plan.cargo(message.node)
        if not cargo:
            self._watch.holds(tensor, Category.COMMUNICATION)
            self._passing[message.key] = tensor
            return
        forms = [forms_of(holding, self._training, self._optimizer) for holding in cargo]
        tensors = unpack(tensor, [form for named in forms for form in named.values()])
        for holding, named in zip(cargo, forms, strict=True):
            own = {name: tensors.pop(0) for name in named}
            value = own if holding.category == Category.OPTIMIZER else own[""]
            self._keep(holding, value)

    def _tensors(self, holding: Holding) -> list[Tensor]:
        if holding.category == Category.OPTIMIZER:
            names = self._optimizer.forms(self._training.parts(holding.stage))
            return [self._states.get(holding)[name] for name in names]
        return [self._stores[holding.category].get(holding)]


def forms_of(holding: Holding, training: Training, optimizer: Optimizer) -> dict[str, Form]:
    """Return the forms of the tensors of a content; a vector has no name."""
    if holding.category != Category.OPTIMIZER:
        return {"": training.parameters(holding.stage)}
    return optimizer.forms(training.parts(holding.stage))


def form_of_message(plan: Plan, message: Message, training: Training, optimizer: Optimizer) -> Form:
    """Return the form of what a message between devices carries whole."""
    if message.content == Content.ACTIVATION:
        return training.boundary(message.stage)
    if message.content == Content.ACTIVATION_GRADIENT:
        return training.boundary(message.stage - 1)
    if message.content == Content.GRADIENT:
        return training.parameters(message.stage)
    cargo = plan.cargo(message.node)
    return packed([form for holding in cargo for form in forms_of(holding, training, optimizer).values()])
