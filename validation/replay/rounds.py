"""A device's part in rounds, whose workers go on computing while their gradients are on their way.

A device has one vector of each stage's parameters, from which its tasks read, and one for communication. At the end of
a round it takes over what the communication before has brought, and hands over its gradients. What is summed and
updated from there on is beside its tasks. Updates start from the copy in the optimizer's state, or, without one, from
the parameters that tasks read.
"""

from typing import Any

import torch
from torch import Tensor

from cdpsim.program import Category, EdgeKind, Op

from .contents import Holding, Message, ReplayError
from .interpreter import Device
from .plan import Plan
from .policy import gradients, parameters
from .round_lives import WorkerSteps


def versions_brought(plan: Plan) -> dict[int, int]:
    """Return the version that each gather brings: that of the updates after which it comes."""
    program, edges = plan.program, plan.program.edges
    op = program.messages.op
    rows = (edges.kind == EdgeKind.DATA) & (edges.after >= len(program.tasks)) & (edges.before >= program.compute)
    rows &= edges.before < len(program.tasks)
    found = {}
    for before, after in zip(edges.before[rows].tolist(), edges.after[rows].tolist(), strict=True):
        if after < program.message_nodes.stop and op[after - len(program.tasks)] == Op.ALL_GATHER:
            found[after] = int(program.tasks.version[before])
    return found


class RoundsDevice(Device):
    """A device that goes on with what it has while its gradients are summed and applied."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._vectors: dict[int, Tensor] = {}  # of each stage, the parameters that tasks read
        self._heads: dict[int, int] = {}
        super().__init__(*given, **named)
        self._worker = WorkerSteps(self._program, self._part.device)
        self._heads = self._worker.heads
        self._brings = versions_brought(self._plan)
        self._alone = self._program.devices == 1
        stages = range(self._program.n)
        self._vectors = {stage: self._parameters.get(parameters(stage, 0)) for stage in stages}
        self._communication = {stage: torch.zeros_like(vector) for stage, vector in self._vectors.items()}
        for vector in self._communication.values():
            self._watch.holds(vector, Category.COMMUNICATION)
        self._version = 0  # that tasks read
        self._arrived: int | None = None  # the version in the buffer for communication, if one is there
        self._through = self._handed_over = -1  # the last step whose communication is, and whose gradients are
        self._outlasting: list[Holding] = []  # sums whose tasks are done, which are to be handed over
        self._sums: dict[int, Tensor] = {}  # of each stage, the device's share of what was handed over
        self._made_shares: dict[tuple[int, int], Tensor] = {}  # by stage and version, for the gather of all shares
        self._completed: set[int] = set()  # messages that were complete before they were due
        self._open = sum(self._part.device in each.members for each in self._plan.messages) + 1  # and the last task

    # Between rounds

    def _begin(self, node: int) -> None:
        super()._begin(node)
        if node in self._heads:
            self._go_on(self._heads[node])
            for holding in self._part.begins.get(node, ()):
                if holding.category == Category.PARAMETERS:
                    self._parameters.put(holding, self._vectors[holding.stage])

    def _end(self, node: int) -> None:
        step = self._step(node)
        ends = node < self._program.compute and node == self._worker.tasks[step][-1]
        if ends and step == self._through + 1 < self._program.updated:  # nothing is on its way
            self._hand_over(step)
        for holding in self._part.ends.get(node, ()):
            if holding.category == Category.GRADIENTS and step < self._program.updated and step > self._handed_over:
                self._outlasting.append(holding)
            else:
                self._stores[holding.category].end(holding)
        if node == self._worker.last:
            self._close_one()

    def _close_one(self) -> None:
        """Let go of all vectors when the last task is done and all messages are complete."""
        self._open -= 1
        if not self._open:
            self._communication.clear()
            self._vectors.clear()

    def _step(self, node: int) -> int:
        tasks = self._program.tasks
        return int(tasks.step[node]) if node < len(tasks) else self._plan.message(node).step

    def _go_on(self, step: int) -> None:
        """Go on with the version that a step reads, after handing over what the step before has computed."""
        if step:
            self._hand_over(step - 1)
        if self._worker.read(step) != self._version:
            self._take_over()
        if (wanted := self._worker.read(step)) != self._version:
            problem = f"goes on with version {self._version} in round {step}, which reads version {wanted}"
            raise ReplayError(f"device {self._part.device} {problem}")

    def _hand_over(self, step: int) -> None:
        """Hand over the gradients of a step, in the place of what was brought, with which the device goes on."""
        if step <= self._handed_over:
            return
        self._take_over()
        for stage, vector in self._communication.items():
            vector.copy_(self._gradients.get(gradients(stage, self._worker.first_step(step))))
        self._handed_over = step
        for holding in self._outlasting:
            self._gradients.end(holding)
        self._outlasting.clear()

    def _take_over(self) -> None:
        for node in [node for node in self._pending if self._plan.message(node).op == Op.ALL_GATHER]:
            self._complete(node)
            self._completed.add(node)
        if self._arrived is None:
            return
        for stage, vector in self._vectors.items():
            vector.copy_(self._communication[stage])
        self._version, self._arrived = self._arrived, None

    # Tasks

    def _parts(self, step: int) -> int:
        """Return 1: what is added up is divided by its number of micro-batches when it is applied."""
        return 1

    def _gradient(self, step: int, stage: int) -> Tensor:
        return super()._gradient(self._worker.first_step(step), stage)

    def _update(self, node: int) -> None:
        (t, _, j), program, row = self._place(node), self._program, node - self._program.compute
        version, base, first = int(program.tasks.version[node]), int(program.base[row]), int(program.first_step[row])
        if self._alone:
            self._hand_over(t)
        summed = self._communication[j] if self._alone else self._sums[j]
        if not self._optimizer.has_master and base != self._version:
            problem = f"starts version {version} from version {base}, and has version {self._version}"
            raise ReplayError(f"device {self._part.device} {problem}")
        own = self._vectors[j] if self._alone else self._own_share(self._vectors[j], j)
        mean = summed / self._taken_by(first, t)
        theta = self._updated(j, own, mean, keep=not program.is_estimate(program.tasks.version[node]))
        self._made(j, version, theta)
        if self._is_last(version, t):
            self._sums.pop(j, None)
        self._pass_on(j, version, t, theta)

    def _taken_by(self, first: int, last: int) -> int:
        return int(self._program.counts[first : last + 1].sum())

    def _is_last(self, version: int, step: int) -> bool:
        tasks, compute = self._program.tasks, self._program.compute
        return version == tasks.version[compute:][tasks.step[compute:] == step].max()

    def _pass_on(self, stage: int, version: int, step: int, theta: Tensor) -> None:
        """Keep a new version for its gather; without any, for the device itself."""
        if not self._alone:
            if version in self._brings.values():
                self._made_shares[stage, version] = theta
        elif self._is_last(version, step):
            self._communication[stage].copy_(theta)
            if stage == self._program.n - 1:
                self._arrived, self._through = version, step

    # Messages

    def _start(self, message: Message) -> None:
        if message.op == Op.REDUCE_SCATTER:
            self._hand_over(message.step)
        super()._start(message)

    def _complete(self, node: int) -> None:
        if node not in self._completed:
            super()._complete(node)
            self._close_one()

    def _given_to(self, message: Message, stage: int) -> Tensor:
        if message.op == Op.REDUCE_SCATTER:
            return self._communication[stage]
        return self._made_shares.pop((stage, self._brings[message.node]))

    def _take_shares(self, message: Message, tensor: Tensor) -> None:
        shares = torch.split(tensor, self._numbers(message))
        for stage, share in zip(message.covers, shares, strict=True):
            self._sums[stage] = share

    def _take_gathered(self, message: Message, stage: int, vector: Tensor) -> None:
        self._communication[stage].copy_(vector)
        self._arrived, self._through = self._brings[message.node], message.step
