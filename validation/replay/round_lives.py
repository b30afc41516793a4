"""Lives of what the devices of rounds hold, from tasks alone: workers go on while their gradients are on their way.

A device has the parameters that its tasks read until it goes on with others, a sum of gradients until all that an
update which is kept takes of it is handed over, and its optimizer state always. Beside these it has a buffer for what
is on its way, always, which no task reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdpsim.program import Category, Kind, Program

from .contents import BEGINNING, Holding
from .policy import Life, gradients, optimizer_state, parameters, split_of


def last_kept(program: Program) -> int:
    """Return the last version of a run that is no estimate."""
    made = program.tasks.version[program.compute :]
    return int(made[~program.is_estimate(made)].max(initial=0))


@dataclass(frozen=True, eq=False)
class WorkerSteps:
    """The tasks of a device in each step of a program of rounds."""

    program: Program
    device: int

    @cached_property
    def tasks(self) -> list[list[int]]:
        """Its tasks, step by step, in their order."""
        found: list[list[int]] = [[] for _ in range(self.program.steps)]
        for node in self.program.lane_tasks.tolist():
            if node < self.program.compute and self.program.tasks.device[node] == self.device:
                found[int(self.program.tasks.step[node])].append(node)
        return found

    @property
    def last(self) -> int:
        """Its last task."""
        return self.tasks[-1][-1]

    @property
    def heads(self) -> dict[int, int]:
        """The step of each task that is the first one of a step."""
        return {own[0]: step for step, own in enumerate(self.tasks)}

    def read(self, step: int) -> int:
        """Return the version that its tasks of a step read."""
        return int(self.program.tasks.version[self.tasks[step][0]])

    def first_step(self, step: int) -> int:
        """Return the first step of those whose gradients are added up with a step's."""
        return int(np.searchsorted(self.program.update_of_step, self.program.update_of_step[step]))


class RoundsPolicy:
    """The lives of what devices of rounds hold beside their buffer for communication."""

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        self.cargo: dict[int, list[Holding]] = {}
        self.between: dict[int, int] = {}
        self._program = program
        self._place = {node: place for place, node in enumerate(order)}
        self._workers = [WorkerSteps(program, device) for device in range(program.devices)]
        self._heads = {node for worker in self._workers for node in worker.heads}

    @cached_property
    def lives(self) -> list[Life]:
        """The life of each content."""
        kinds = (self._stashes, self._parameters, self._gradients, self._states)
        return [life for worker in self._workers for of in kinds for life in of(worker)]

    def leaves(self, holding: Holding, node: int) -> bool:
        """Return whether a content is gone when a node starts: parameters that others replace."""
        return holding.category == Category.PARAMETERS and node in self._heads

    def _stashes(self, worker: WorkerSteps) -> list[Life]:
        tasks = self._program.tasks
        begun: dict[Holding, int] = {}
        ends: dict[Holding, int] = {}
        for node in (node for own in worker.tasks for node in own):
            stage, step, micro_batch = (int(c[node]) for c in (tasks.stage, tasks.step, tasks.micro_batch))
            holding = Holding(Category.ACTIVATIONS, stage, step, micro_batch)
            begun.setdefault(holding, node)
            ends[holding] = node
        return [Life(worker.device, holding, node, ends[holding]) for holding, node in begun.items()]

    def _parameters(self, worker: WorkerSteps) -> list[Life]:
        """Return the lives of versions: each until the first task of a step that reads another one."""
        changes = [t for t in range(self._program.steps) if t == 0 or worker.read(t) != worker.read(t - 1)]
        begin = [BEGINNING, *(worker.tasks[t][0] for t in changes[1:])]
        ends = [*begin[1:], worker.last]
        return [
            Life(worker.device, parameters(stage, worker.read(t)), since, until)
            for t, since, until in zip(changes, begin, ends, strict=True)
            for stage in range(self._program.n)
        ]

    def _gradients(self, worker: WorkerSteps) -> list[Life]:
        """Return the lives of sums: from their first gradient until all that they take is handed over."""
        begins: dict[Holding, int] = {}
        ends: dict[Holding, int] = {}
        gives = Kind.W if self._program.splits else Kind.B
        for step, own in enumerate(worker.tasks):
            for node in own:
                holding = gradients(int(self._program.tasks.stage[node]), worker.first_step(step))
                if self._program.tasks.kind[node] == gives:
                    begins.setdefault(holding, node)
                ends[holding] = own[-1]
        return [Life(worker.device, holding, node, ends[holding]) for holding, node in begins.items()]

    def _states(self, worker: WorkerSteps) -> list[Life]:
        tasks, split = self._program.tasks, split_of(self._program, Category.OPTIMIZER)
        ends = dict.fromkeys(range(self._program.n), worker.last)
        for node in range(self._program.compute, len(tasks)):
            if tasks.device[node] == worker.device:
                stage = int(tasks.stage[node])
                ends[stage] = max(ends[stage], node, key=self._place.__getitem__)
        return [Life(worker.device, optimizer_state(stage, split), BEGINNING, end) for stage, end in ends.items()]
