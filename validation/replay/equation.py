"""The update equation, evaluated version by version in one process: OPT(theta_base, mean of gradients).

A table of versions (`cdpsim.schedules.rule.Versions`) has all that differs between schedules, rounds, weight
prediction and local steps: in which step a version is made, from which base, of the gradients of which steps, and
whether workers make it of their own gradients, or of the mean of an older version of all workers. A version starts
with the parameters and the optimizer state of its base. Of an estimate, from which no version starts, only the
parameters are kept. Micro-batch i of step t reads the version of stage j that is as old as the lag of its rule: 0 for
the newest that the steps before t make. Nothing here knows devices, messages or buffers; only the order in which
gradients are added is the caller's, because that decides the last bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Op, Program
from cdpsim.schedules.order import Outer
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
    workers: int = 1,
    outer: Outer | None = None,
) -> list[Tensor]:
    """Return each stage's parameters after some steps as one vector; by default gradients are added one by one.

    Lags have a row for each micro-batch and a column for each stage. Backwards may have other lags: a backward then
    uses other parameters than the forward whose graph it goes through. `counts` are the numbers of micro-batches of
    steps; then a version takes the mean over all micro-batches of its steps, else the mean of its steps' means. The
    first `waits` steps, and step 0, read the newest version. Where the table has versions of workers' own, the
    micro-batches of a step are those of `workers` in turn, and an `outer` optimizer takes the means of parameters.
    """
    made, back = versions.made(steps), lags if backward_lags is None else backward_lags
    walks = [_Walk(training, optimizer, made) for _ in range(workers if made.own.any() else 1)]
    common, means = _OuterUpdates(outer, walks[0].read(0)), dict[int, StageParameters]()
    numbers = [range(len(lags) if counts is None else int(counts[t])) for t in range(steps)]
    grouping = grouping or (lambda of, stage: [[i] for i in range(sum(len(numbers[t]) for t in of))])
    taken: dict[int, list[StageParameters]] = {}  # gradients of steps, while a version is to take them
    for t, micro_batches in enumerate(numbers):
        rows = np.flatnonzero(made.step == t).tolist()
        own, newest = bool(made.own[rows].any()), int(np.searchsorted(made.step, t))
        parts = 1 if counts is not None else len(micro_batches) // (len(walks) if own else 1)
        owners = [walks[i * len(walks) // len(micro_batches)] for i in micro_batches]
        late = [int(t > waits) * each for each in (lags, back)]
        taken[t] = [
            gradients_of(training, t, i, parts, *(walk.read(newest, each[i % len(lags)]) for each in late))
            for i, walk in enumerate(owners)
        ]
        for row in rows:
            if made.averaged[row] >= 0:
                following = common.take(means.pop(int(made.averaged[row])))
                for walk in walks:
                    walk.go_on(row + 1, following)
            else:
                given = range(int(made.first[row]), t + 1)
                for walk in walks:
                    mine = [i for i in micro_batches if owners[i] is walk] if own else None
                    walk.make(row + 1, _mean(given, taken, grouping, mine, whole=counts is not None))
            if row + 1 in made.averaged:
                each = (walk.read(row + 1) for walk in walks)
                means[row + 1] = tree_map(lambda *own: reduce(add, own).detach() / len(walks), *each)
        first, oldest = made.first[made.step > t].min(initial=t + 1), int(max(lags.max(), back.max()))
        taken = {each: own for each, own in taken.items() if each >= first}
        for walk in walks:
            walk.forget(int(np.searchsorted(made.step, t + 1)) - oldest)
    return [flatten(own.values()) for own in walks[0].last_kept]


def _mean(
    steps: range,
    taken: Mapping[int, Sequence[StageParameters]],
    grouping: Grouping,
    mine: Sequence[int] | None,
    *,
    whole: bool,
) -> Iterator[Tensor]:
    """Yield the mean of some steps' gradients of each parameter: of all micro-batches as one, or of steps' means.

    Of a worker's own step it takes the given micro-batches.
    """
    for stage, named in enumerate(taken[steps.start][0]):
        for name in named:
            if whole:
                own = [each[stage][name] for t in steps for each in taken[t]]
                yield _add_up(grouping(steps, stage), own) / len(own)
                continue
            means = [
                _add_up(mine or grouping(range(t, t + 1), stage), [each[stage][name] for each in taken[t]])
                for t in steps
            ]
            yield means[0] if len(means) == 1 else reduce(add, means) / len(means)


class _OuterUpdates:
    """The common parameters of workers, which a mean replaces, or an optimizer updates by what the mean has changed."""

    def __init__(self, outer: Outer | None, start: StageParameters) -> None:
        self._weights = [nn.Parameter(own.detach().clone()) for own in tree_leaves(start)]
        named: Any = outer and {"lr": outer.rate, "momentum": outer.momentum, "nesterov": outer.kind == "nesterov"}
        self._optimizer = torch.optim.SGD(self._weights, **named) if named else None

    def take(self, mean: StageParameters) -> StageParameters:
        """Return the next common parameters."""
        if self._optimizer is None:
            return mean
        for weight, own in zip(self._weights, tree_leaves(mean), strict=True):
            weight.grad = weight.detach() - own
        self._optimizer.step()
        after = iter(self._weights)
        return [{name: next(after).detach().clone() for name in stage} for stage in mean]


class _Walk:
    """A worker's walk over the versions of a run, from theta_0 on; or that of all workers together."""

    def __init__(self, training: Training, optimizer: Optimizer, made: MadeVersions) -> None:
        self._made, self._dtype, self._stages = made, training.parameters(0).dtype, deepcopy(training.stages)
        for stage in self._stages:
            stage.to(training.device, optimizer.dtype(self._dtype))
        self._optimizers = [optimizer.over(list(stage.parameters())) for stage in self._stages]
        self._versions = {0: self._snapshot()}  # what passes read, and the last that is kept
        self._last_kept = 0
        self._at = 0  # the version of which stages and optimizers have all that an update starts from
        # Versions from which a later one starts, when another one has been made since.
        self._again = {int(base) for v, base in enumerate(made.base, start=1) if base != v - 1}
        self._states = {0: self._state()} if 0 in self._again else {}

    @property
    def last_kept(self) -> StageParameters:
        """The parameters of the last version that is no estimate."""
        return self._versions[self._last_kept]

    def read(self, newest: int, lags: Sequence[int] | Ints | None = None) -> StageParameters:
        """Return the parameters of each stage, by how many versions they are older than the newest."""
        lags = [0] * len(self._stages) if lags is None else lags
        return [self._versions[max(newest - int(lag), 0)][j] for j, lag in enumerate(lags)]

    def forget(self, version: int) -> None:
        """Let go of parameters that are older than a version."""
        for each in [own for own in self._versions if own < version and own != self._last_kept]:
            del self._versions[each]

    def make(self, version: int, gradients: Iterator[Tensor]) -> None:
        """Make a version by an update of its base."""
        base = int(self._made.base[version - 1])
        if base != self._at:
            for stage, own, (theta, state) in zip(self._stages, self._optimizers, self._states[base], strict=True):
                stage.load_state_dict(theta)
                own.load_state_dict(deepcopy(state))
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            for parameter in stage.parameters():
                parameter.grad = next(gradients).to(parameter.dtype)
            optimizer.step()
        self._keep(version)

    def go_on(self, version: int, common: StageParameters) -> None:
        """Go on with common parameters as a version."""
        for stage, own in zip(self._stages, common, strict=True):
            for name, parameter in stage.named_parameters():
                parameter.data.copy_(own[name])
        self._keep(version)

    def _keep(self, version: int) -> None:
        self._at = version
        self._last_kept = self._last_kept if self._made.estimate[version - 1] else version
        self._versions[version] = self._snapshot()
        if version in self._again:
            self._states[version] = self._state()

    def _snapshot(self) -> StageParameters:
        return [
            {name: own.detach().to(self._dtype, copy=True).requires_grad_() for name, own in stage.named_parameters()}
            for stage in self._stages
        ]

    def _state(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        pairs = zip(self._stages, self._optimizers, strict=True)
        return [deepcopy((stage.state_dict(), own.state_dict())) for stage, own in pairs]


def _add_up(sums: Sums, gradients: Sequence[Tensor]) -> Tensor:
    return reduce(add, (gradients[each] if isinstance(each, int) else _add_up(each, gradients) for each in sums))


def gradients_of(
    training: Training, step: int, micro_batch: int, m: int, forward: StageParameters, backward: StageParameters
) -> StageParameters:
    """Return one micro-batch's gradient through all stages at once, each at the version that it reads."""
    x, target = training.data(step, micro_batch)
    inputs = tree_leaves(forward)
    with _going_back_with(inputs, tree_leaves(backward)):
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
        if back is None:
            return tensor.detach()
        return back.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    return saved_tensors_hooks(pack, lambda tensor: tensor)


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
    messages = program.messages
    numbers = np.unique(messages.dst[messages.op == Op.REDUCE_SCATTER]).tolist()  # of sharding groups
    inside = {device: number for number in numbers for device in program.groups[number].tolist()}
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
