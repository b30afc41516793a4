"""Training of many runs at once: each parameter of a schedule is one tensor, whose rows are its runs.

A micro-batch takes its gradient at the versions that the schedule's lags say, of each stage by itself. Micro-batches
with the same lags go through the network together, and groups of one size, of all schedules, are rows beside each
other. Where samples of a batch depend on each other, by a batch norm, each micro-batch goes by itself. Steps make
versions as in the update equation of replays: each of its base, with the parameters and the optimizer's state that the
base has, and of the mean gradients of some steps.

Workers that may have versions of their own are rows, too: those of a run stand one after another.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from cdpsim.numeric.columns import Ints
from cdpsim.trace.metrics.memory import Lags

from .data import label_loss
from .lags import Learner
from .layers import BACK, Doubled, has_statistics
from .unfinished import State
from .updates import OuterUpdates, Parameters, States, Update

RowParameters = list[Parameters]  # of each stage
Rows = TypeVar("Rows")  # of tensors: parameters, or what goes through the network with them


class RowPass(NamedTuple):
    """What goes through the network together: rows of parameters as both passes read them, inputs and labels."""

    forward: RowParameters
    back: RowParameters  # the weights of backwards, where these read others
    x: Tensor
    y: Tensor


class Stack:
    """Runs of one schedule that differ in their start, their data or their rate."""

    def __init__(
        self,
        starts: Sequence[Sequence[nn.Module]],
        learner: Learner,
        update: Update,
        steps: int,
        loss: Callable[[Tensor, Tensor], Tensor] = label_loss,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._stages, self._learner, self._update = starts[0], learner, update
        self._loss_of, self._one_by_one = loss, one_by_one
        self._twice = [
            [name for name, module in stage.named_modules() if isinstance(module, Doubled) and module.is_double]
            for stage in self._stages
        ]
        self._made, self._at = learner.versions.made(steps), 0
        self._last_use = _last_uses(self._made.step, self._made.base, self._made.averaged)
        self._first_taken = np.minimum.accumulate(np.append(self._made.first, steps)[::-1])[::-1]  # from a version on
        first = self._on_rows(_stacked(starts))
        self._versions: dict[int, RowParameters] = {0: first}
        self._states: dict[int, list[States]] = {0: [States(update, 0, {}) for _ in self._stages]}
        self._taken: dict[int, RowParameters] = {}  # the mean gradients of steps that a later version takes
        self._last_kept = 0
        self._outer = OuterUpdates(learner.outer, self._means(first))
        first_worker = (each[: len(each) // learner.workers] for each in learner.lags)  # whose lags are those of all
        own = Lags(*first_worker)
        newest, self.apart = Lags(*map(np.zeros_like, own)), has_statistics(self._stages)
        self._groups = [(each, _alike(each, apart=self.apart)) for each in (own, newest)]

    @property
    def kept(self) -> RowParameters:
        """Each run's parameters of the newest version that is no estimate; of workers, the mean."""
        return self._means(self._versions[self._last_kept])

    @property
    def _now(self) -> tuple[Lags, list[Ints]]:
        return self._groups[0 if self._at > self._learner.waits else 1]

    def passes(self, inputs: Tensor, labels: Tensor) -> list[RowPass]:
        """Return the passes of the next step: groups of micro-batches, with the versions that they read."""
        lags, groups = self._now
        parts = self._learner.workers, len(lags.forward), -1
        x, y = (own.unflatten(1, parts).flatten(0, 1) for own in (inputs, labels))
        asked = []
        for alike in groups:
            forward, backward = (
                [self._read(row, j) for j, row in enumerate(own[alike[:, 0]].T.tolist())] for own in lags
            )
            back = [
                {f"{name}.{BACK}": own[f"{name}.weight"] for name in names}
                for names, own in zip(self._twice, backward, strict=True)
            ]
            rows = (values[:, alike].transpose(0, 1).flatten(2, 3).flatten(0, 1) for values in (x, y))
            asked.append(RowPass(forward, back, *rows))
        return asked

    def take(self, found: Sequence[tuple[RowParameters, Tensor]], rates: Tensor) -> Tensor:
        """Make the versions of a step, of its passes' gradients and losses; return each run's loss."""
        lags, groups = self._now
        gradients, losses = [], []
        for alike, (own, loss) in zip(groups, found, strict=True):
            part = partial(_share, of=len(alike), share=alike.shape[1] / len(lags.forward))
            gradients.append(_mapped(own, part))
            losses.append(part(loss))
        self._taken[self._at] = _tree_of(gradients, _sum)
        self._make_versions(rates.repeat_interleave(self._learner.workers))
        return _sum(losses).unflatten(0, (-1, self._learner.workers)).mean(dim=1)

    @property
    def state(self) -> State:
        """All that later steps need."""
        return {
            "at": self._at,
            "kept": self._last_kept,
            "versions": self._versions,
            "taken": self._taken,
            "states": {v: [(own.count, own.kept) for own in of] for v, of in self._states.items()},
            "outer": (self._outer.common, self._outer.momentum),
        }

    def go_on_from(self, saved: State, device: str) -> None:
        """Load a saved state."""
        state = _mapped(saved, lambda own: own.to(device))
        self._at, self._last_kept = int(state["at"]), int(state["kept"])
        self._versions, self._taken = state["versions"], state["taken"]
        self._states = {
            v: [States(self._update, int(count), kept) for count, kept in of] for v, of in state["states"].items()
        }
        self._outer.common, self._outer.momentum = state["outer"]

    def _make_versions(self, rates: Tensor) -> None:
        """Make the versions of a step, and let go of what no later step needs."""
        made, step = self._made, self._at
        for row in range(*np.searchsorted(made.step, [step, step + 1]).tolist()):
            version, base, averaged = row + 1, int(made.base[row]), int(made.averaged[row])
            if averaged >= 0:
                self._versions[version] = self._on_rows(self._outer.step(self._means(self._versions[averaged])))
                self._states[version] = self._states[base]
            else:
                taken = [self._taken[t] for t in range(int(made.first[row]), step + 1)]
                gradients = _tree_of(taken, _average)
                gradients = gradients if made.own[row] else self._on_rows(self._means(gradients))
                rows = zip(self._states[base], self._versions[base], gradients, strict=True)
                pairs = [state.step(theta, gradient, rates) for state, theta, gradient in rows]
                self._versions[version], self._states[version] = ([*own] for own in zip(*pairs, strict=True))
            self._last_kept = self._last_kept if made.estimate[row] else version
        self._at += 1
        self._taken = {t: own for t, own in self._taken.items() if t >= self._first_taken[self._newest]}
        oldest = self._newest - int(max(map(np.max, self._learner.lags)))
        needed = {v for v in self._versions if self._last_use[v] > step}
        self._states = {v: own for v, own in self._states.items() if v in needed}
        needed |= {v for v in self._versions if v >= oldest} | {self._last_kept}
        self._versions = {v: own for v, own in self._versions.items() if v in needed}

    @property
    def _newest(self) -> int:
        return int(np.searchsorted(self._made.step, self._at))

    def _read(self, lags: Sequence[int], stage: int) -> Parameters:
        """Return the parameters of versions, one after another; the first one of steps before there was such a one."""
        return _tree_of([self._versions[max(self._newest - lag, 0)][stage] for lag in lags], _beside)

    def gradients(self, asked: RowPass) -> tuple[RowParameters, Tensor]:
        """Return the gradients and the losses of all rows of a pass, of this stack or of one with the same network."""
        gradient = grad_and_value(self._loss)
        if not self._one_by_one:
            found: tuple[RowParameters, Tensor] = vmap(gradient)(*asked)
            return found
        return _tree_of([gradient(*_mapped(asked, itemgetter(r))) for r in range(len(asked.x))], torch.stack)

    def _loss(self, parameters: RowParameters, back: RowParameters, x: Tensor, y: Tensor) -> Tensor:
        return self._loss_of(self.scores(parameters, x, back), y)

    def scores(self, parameters: RowParameters, x: Tensor, back: RowParameters | None = None) -> Tensor:
        """Return the network's scores of inputs with one row's parameters."""
        for j, stage in enumerate(self._stages):
            others = back[j] if back else {f"{name}.{BACK}": parameters[j][f"{name}.weight"] for name in self._twice[j]}
            x = functional_call(stage, parameters[j] | others, (x,))
        return x

    def _means(self, rows: RowParameters) -> RowParameters:
        if self._learner.workers == 1:
            return rows
        return _mapped(rows, lambda own: own.unflatten(0, (-1, self._learner.workers)).mean(dim=1))

    def _on_rows(self, runs: RowParameters) -> RowParameters:
        """Return the same for each of a run's workers."""
        return _mapped(runs, lambda own: own.repeat_interleave(self._learner.workers, 0))


def step_together(stacks: Sequence[Stack], inputs: Tensor, labels: Tensor, rates: Tensor) -> list[Tensor]:
    """Make a step of several schedules with the same runs and network; return the losses of each.

    Passes of one size are rows beside each other, unless each goes by itself.
    """
    asked = [(k, own) for k, stack in enumerate(stacks) for own in stack.passes(inputs, labels)]
    alike: dict[object, list[int]] = {}
    for number, (k, own) in enumerate(asked):
        alone = number if stacks[k].apart else None
        alike.setdefault((own.x.shape[1:], any(own.back), alone), []).append(number)
    found: dict[int, tuple[RowParameters, Tensor]] = {}
    for numbers in alike.values():
        together = _tree_of([asked[number][1] for number in numbers], _beside)
        gradients, losses = stacks[asked[numbers[0]][0]].gradients(together)
        first = 0
        for number in numbers:
            rows = slice(first, first := first + len(asked[number][1].x))
            found[number] = _mapped(gradients, itemgetter(rows)), losses[rows]
    return [
        stack.take([found[number] for number, (of, _) in enumerate(asked) if of == k], rates)
        for k, stack in enumerate(stacks)
    ]


def _stacked(starts: Sequence[Sequence[nn.Module]]) -> RowParameters:
    runs = [[{name: own.detach() for name, own in stage.named_parameters()} for stage in run] for run in starts]
    return _tree_of(runs, torch.stack)


def _mapped(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    changed: Rows = tree_map(change, rows)
    return changed


def _tree_of(of: Sequence[Rows], join: Callable[[tuple[Tensor, ...]], Tensor]) -> Rows:
    """Return parameters, gradients or passes as one, each tensor of which is joined of those at its place."""
    joined: Rows = tree_map(lambda *own: join(own), *of)
    return joined


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(add, tensors)


def _average(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else _sum(tensors) / len(tensors)


def _beside(tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of tensors, one after another."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _share(rows: Tensor, of: int, share: float) -> Tensor:
    """Return a share of the sum of groups, whose rows stand one after another."""
    return share * rows.unflatten(0, (of, -1)).sum(dim=0)


def _alike(lags: Lags, *, apart: bool) -> list[Ints]:
    """Return groups of micro-batches with the same lags, as rows of arrays: together those of one size.

    Apart, each micro-batch is a group, and no two are together.
    """
    rows = np.concatenate([lags.forward, lags.backward], axis=1)
    if apart:
        return [*np.arange(len(rows))[:, None, None]]
    groups: dict[int, list[Ints]] = {}
    for row in np.unique(rows, axis=0):
        own = np.flatnonzero((rows == row).all(axis=1))
        groups.setdefault(len(own), []).append(own)
    return [np.stack(own) for own in groups.values()]


def _last_uses(step: Ints, *sources: Ints) -> Ints:
    """Return for each version the last step that makes another one of it; -1 where none does."""
    found = np.full(len(step) + 1, -1)
    for source in sources:
        np.maximum.at(found, source[source >= 0], step[source >= 0])
    return found


def is_finite(parameters: RowParameters) -> Tensor:
    """Return of each row whether all of its parameters are finite."""
    return torch.stack([own.flatten(1).isfinite().all(dim=1) for own in tree_leaves(parameters)]).all(dim=0)
