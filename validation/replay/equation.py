"""The update equation, evaluated version by version in one process: OPT(theta_base, mean of gradients).

Micro-batch i of step t takes its gradient at the version of stage j that is as old as the lag of its rule: 0 for the
newest that the steps before t make. A version is made from its base, with the parameters and the optimizer state that
the base has, and takes the gradients of the last of some steps up to its own. By default each step makes the next
version, of the one before it: theta_{t+1} of theta_t. Of an estimate, from which no version starts, only the parameters
are kept. Nothing here knows devices, messages or buffers; only the order in which gradients are added is the caller's,
because that decides the last bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Op, Program
from cdpsim.schedules.rule import MadeVersions, Versions
from cdpsim.schedules.state import When

from ..training.forms import flatten
from ..training.optimizer import Optimizer
from ..training.stages import Training

Sums = Sequence["int | Sums"]  # micro-batches, and sums of some that are made first
Grouping = Callable[[range, int], Sums]  # of steps, whose micro-batches are numbered one after another, and a stage
StageParameters = list[dict[str, Tensor]]  # of each stage, by name


def evaluate(
    training: Training,
    optimizer: Optimizer,
    lags: Ints,
    steps: int,
    grouping: Grouping | None = None,
    backward_lags: Ints | None = None,
    *,
    versions: Versions = Versions(),  # noqa: B008 - it is frozen
    counts: Sequence[int] | None = None,
    waits: int = 0,
) -> list[Tensor]:
    """Return each stage's parameters after some steps as one vector; by default gradients are added one by one.

    Lags have a row for each micro-batch and a column for each stage. Backwards may have other lags: a backward then
    uses other parameters than the forward whose graph it goes through. With `counts`, steps have so many micro-batches,
    and a version takes the mean over all micro-batches of its steps; else it takes the mean of its steps' means. The
    first `waits` steps, and step 0, read the newest version.
    """
    back = lags if backward_lags is None else backward_lags
    walk, oldest = _Walk(training, optimizer, versions.made(steps), counts), int(max(lags.max(), back.max()))
    grouping = grouping or (lambda of, stage: [[i] for i in range(sum(walk.count(t, len(lags)) for t in of))])
    for t in range(steps):
        rows = [i % len(lags) for i in range(walk.count(t, len(lags)))]
        late = int(t > waits)
        walk.pass_through(t, [(late * lags[i], late * back[i]) for i in rows])
        walk.make_versions(t, grouping)
        walk.forget(walk.newest(t + 1) - oldest)
    return [flatten(own.values()) for own in walk.last_kept]


class _Walk:
    """A walk over the versions of a run, from theta_0 on."""

    def __init__(
        self, training: Training, optimizer: Optimizer, made: MadeVersions, counts: Sequence[int] | None
    ) -> None:
        self._training, self._made, self._counts = training, made, counts
        self._dtype, self._stages = training.parameters(0).dtype, deepcopy(training.stages)
        for stage in self._stages:
            stage.to(training.device, optimizer.dtype(self._dtype))
        self._optimizers = [optimizer.over(list(stage.parameters())) for stage in self._stages]
        self._versions = {0: snapshot(self._stages, self._dtype)}  # what passes read, and the last that is kept
        self._last_kept = 0
        self._at = 0  # the version of which stages and optimizers have all that an update starts from
        self._taken: dict[int, list[StageParameters]] = {}  # gradients of steps, while a version is to take them
        # Versions from which a later one starts, when another one has been made since.
        self._again = {int(base) for v, base in enumerate(made.base, start=1) if base != v - 1}
        self._states = {0: self._state()} if 0 in self._again else {}

    @property
    def last_kept(self) -> StageParameters:
        """The parameters of the last version that is no estimate."""
        return self._versions[self._last_kept]

    def newest(self, step: int) -> int:
        """Return the newest version that the steps before one make."""
        return int(np.searchsorted(self._made.step, step))

    def count(self, step: int, usual: int) -> int:
        """Return the number of micro-batches of a step."""
        return usual if self._counts is None else int(self._counts[step])

    def pass_through(self, step: int, lags: Sequence[tuple[Ints, Ints]]) -> None:
        """Take the gradients of a step's micro-batches, by the lags of their forwards and backwards at each stage."""
        newest = self.newest(step)
        parts = len(lags) if self._counts is None else 1

        def read(lag: Ints) -> StageParameters:
            return [self._versions[max(newest - int(own), 0)][j] for j, own in enumerate(lag)]

        self._taken[step] = [
            gradients_of(self._training, read(there), read(again), step, i, parts)
            for i, (there, again) in enumerate(lags)
        ]

    def make_versions(self, step: int, grouping: Grouping) -> None:
        """Make the versions of a step, and let go of gradients that no later one takes."""
        for row in np.flatnonzero(self._made.step == step).tolist():
            self._make(row + 1, range(int(self._made.first[row]), step + 1), grouping)
        later = self._made.first[self._made.step > step]
        for each in [t for t in self._taken if t < later.min(initial=step + 1)]:
            del self._taken[each]

    def forget(self, version: int) -> None:
        """Let go of parameters that are older than a version."""
        for each in [own for own in self._versions if own < version and own != self._last_kept]:
            del self._versions[each]

    def _make(self, version: int, steps: range, grouping: Grouping) -> None:
        base = int(self._made.base[version - 1])
        if base != self._at:
            self._go_back(base)
        for j, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters():
                parameter.grad = self._mean(steps, j, name, grouping).to(parameter.dtype)
            self._optimizers[j].step()
        self._at = version
        self._last_kept = self._last_kept if self._made.estimate[version - 1] else version
        self._versions[version] = snapshot(self._stages, self._dtype)
        if version in self._again:
            self._states[version] = self._state()

    def _mean(self, steps: range, stage: int, name: str, grouping: Grouping) -> Tensor:
        """Return the mean of some steps' gradients of a parameter."""
        if self._counts is not None:
            gradients = [own[stage][name] for t in steps for own in self._taken[t]]
            return _add_up(grouping(steps, stage), gradients) / len(gradients)
        of = [range(t, t + 1) for t in steps]
        means = [_add_up(grouping(one, stage), [own[stage][name] for own in self._taken[one[0]]]) for one in of]
        return means[0] if len(means) == 1 else reduce(add, means) / len(means)

    def _state(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return what each stage's next update starts from: parameters as they are updated, and the optimizer's."""
        pairs = zip(self._stages, self._optimizers, strict=True)
        return [deepcopy((stage.state_dict(), own.state_dict())) for stage, own in pairs]

    def _go_back(self, version: int) -> None:
        """Set stages and optimizers back to what they had."""
        for stage, own, (parameters, state) in zip(self._stages, self._optimizers, self._states[version], strict=True):
            stage.load_state_dict(parameters)
            own.load_state_dict(deepcopy(state))


def _add_up(sums: Sums, gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of micro-batches' gradients, added in the order of the sums."""
    return reduce(add, (gradients[each] if isinstance(each, int) else _add_up(each, gradients) for each in sums))


def snapshot(stages: tuple[torch.nn.Module, ...], dtype: torch.dtype) -> StageParameters:
    """Return each stage's parameters as passes read them, in their type."""
    return [
        {name: own.detach().to(dtype, copy=True).requires_grad_() for name, own in stage.named_parameters()}
        for stage in stages
    ]


def gradients_of(
    training: Training, forward: StageParameters, backward: StageParameters, step: int, micro_batch: int, m: int
) -> StageParameters:
    """Return one micro-batch's gradient through all stages at once, each at the version that it reads."""
    x, target = training.data(step, micro_batch)
    inputs = [tensor for parameters in forward for tensor in parameters.values()]
    with _going_back_with(inputs, [tensor for parameters in backward for tensor in parameters.values()]):
        for j, parameters in enumerate(forward):
            x = training.apply(j, parameters, x)
        loss = training.loss(x, target, m)
    flat = torch.autograd.grad(loss, inputs, materialize_grads=True)  # zeros for a parameter without a part in it
    remaining = iter(flat)
    return [dict(zip(parameters, remaining, strict=False)) for parameters in forward]


def _going_back_with(forward: list[Tensor], backward: list[Tensor]) -> AbstractContextManager[object]:
    """Let a graph that is made with some parameters be differentiated with others."""
    if all(there is back for there, back in zip(forward, backward, strict=True)):
        return nullcontext()
    other = {there.data_ptr(): back.detach() for there, back in zip(forward, backward, strict=True)}

    def pack(tensor: Tensor) -> Tensor:
        back = other.get(tensor.untyped_storage().data_ptr())
        return tensor.detach() if back is None else back.as_strided(*_strided(tensor))

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _strided(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def grouping_of(program: Program) -> Grouping:
    """Return the order of additions: each device its own micro-batches, then device by device.

    A collective goes by the devices' numbers, a sum from device to device by their last micro-batches.
    To a sum that travels with its stage's state each micro-batch adds in turn. What is summed after each pass is added
    to the sum so far: where ranks have shares, as the sum of all, else rank by rank. Ranks of a group come first.
    """
    gives, first = program.gradient_tasks, program.first_pass
    rank = np.empty(len(program.tasks), dtype=np.int64)
    rank[program.lane_tasks] = np.arange(len(program.lane_tasks))
    rounds = program.state.reduce is When.EACH
    inside, messages = _groups_of(program), program.messages
    in_turn = bool(((messages.content == Content.GRADIENT) & (messages.op == Op.P2P)).any())

    def grouping(steps: range, stage: int) -> Sums:
        tasks = gives[first[steps.start] : first[steps.stop], stage]
        groups: dict[int, list[int]] = {}
        for micro_batch in np.argsort(rank[tasks]).tolist():
            group = micro_batch if program.state.travels else int(program.tasks.device[tasks[micro_batch]])
            groups.setdefault(group, []).append(micro_batch)
        if inside:
            return _among_groups(groups, inside, rounds=rounds)
        if rounds:
            return [own[k] for k in range(max(map(len, groups.values()))) for _, own in sorted(groups.items())]
        by_device = [groups[device] for device in sorted(groups)]
        return [*sorted(by_device, key=lambda own: own[-1])] if in_turn else [*by_device]

    return grouping


def _groups_of(program: Program) -> dict[int, int]:
    """Return the number of each device's sharding group; nothing where nothing is split."""
    messages = program.messages
    numbers = np.unique(messages.dst[messages.op == Op.REDUCE_SCATTER]).tolist()
    return {device: number for number in numbers for device in program.groups[number].tolist()}


def _among_groups(own: dict[int, list[int]], inside: dict[int, int], *, rounds: bool) -> Sums:
    """Return the sums of devices' micro-batches, first in each sharding group: of all at once, or pass by pass."""
    passes = range(max(map(len, own.values())))
    sums = []
    for taken in [slice(k, k + 1) for k in passes] if rounds else [slice(None)]:
        groups: dict[int, list[Sums]] = {}
        for device in sorted(own):
            groups.setdefault(inside[device], []).append(own[device][taken])
        sums.append(list(groups.values()))
    return sums
