"""Sharded states: a stage's parameters and optimizer state are in one place and come to their users."""

import numpy as np

from cdpsim.assemble.build import Builder, end, start
from cdpsim.assemble.grid import Grid
from cdpsim.assemble.update import Updates, owner, uses
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Category, Content, Edge, Op


def broadcast_for_use(grid: Grid, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Before every use an owner broadcasts its stage, after it the copies are dropped; gradients are reduced to it."""
    t, j, node = updates.step, updates.stage, updates.node
    holders = grid.holders
    members = [np.unique(np.append(d, root)) for d, root in zip(*_devices_by_stage(grid), strict=True)]
    alone = all(len(m) == 1 for m in members)
    gradients, parameters = model.size("gradients"), model.size("parameters")
    taker = node
    if not alone:
        groups = np.array([build.group(m) for m in members])
        size = gradients[j]
        taker = build.send(Op.REDUCE, Content.GRADIENT, stage=j, step=t, src=updates.device, dst=groups[j], size=size)
        build.link(taker, node)
        _broadcast(grid, updates, groups, parameters, build, prefetch)
    else:
        build.link(node[: -grid.n].repeat(grid.m), grid.forward[1:].transpose(0, 2, 1).ravel())
    row = holders.step * grid.n + holders.stage
    build.link(grid.backward.transpose(0, 2, 1).ravel(), np.repeat(taker, grid.m))
    columns = {"device": holders.device, "stage": holders.stage, "version": holders.step}
    owns = holders.device == updates.device[row]
    summed = np.where(owns, end(node[row]), end(taker[row]))
    build.hold(
        Category.GRADIENTS,
        size=gradients[holders.stage],
        begin=start(holders.first_task),
        end=summed,
        **columns,
    )
    owned = {"device": updates.device, "stage": j}
    made = np.where(t > 0, end(node - grid.n), -1)
    build.hold(Category.PARAMETERS, version=t, size=parameters[j], begin=made, end=end(node), **owned)
    final = slice(-grid.n, None)
    build.hold(
        Category.OPTIMIZER,
        device=updates.device[final],
        stage=j[final],
        version=t[final],
        size=model.size("optimizer"),
        begin=np.full(grid.n, -1),
        end=end(node[final]),
    )


def _devices_by_stage(grid: Grid) -> tuple[Ints, Ints]:
    """The devices that use each stage, and its owner."""
    return grid.device[0].T, owner(grid, np.arange(grid.n))


def _broadcast(grid: Grid, updates: Updates, groups: Ints, parameters: Ints, build: Builder, prefetch: int) -> None:
    shape = (grid.steps, grid.m, 2 * grid.n)
    # By (step, phase), all micro-batches together.
    reader = np.arange(len(grid.kind)).reshape(shape).transpose(0, 2, 1).ravel()
    phase = np.tile(np.arange(2 * grid.n), grid.steps)
    step = np.repeat(np.arange(grid.steps), 2 * grid.n)
    stage = np.where(phase < grid.n, phase, 2 * grid.n - 1 - phase)
    update = step * grid.n + stage
    root = updates.device[update]
    message = build.send(
        Op.BROADCAST,
        Content.PARAMETERS,
        stage=stage,
        step=step - 1,
        src=root,
        dst=groups[stage],
        size=parameters[stage],
        versions=1,
    )
    later = step > 0
    build.link(updates.node[update[later] - grid.n], message[later])
    each = np.repeat(message, grid.m)
    build.link(each, reader)
    some, task = grid.before(grid.rank[reader], 1 + prefetch)
    build.link(task, each[some], Edge.ROOM)
    # Every device but the owner holds a copy from its arrival to the end of its use.
    copies = np.flatnonzero(grid.task_device[reader] != np.repeat(root, grid.m))
    columns = {
        "device": grid.task_device[reader[copies]],
        "stage": np.repeat(stage, grid.m)[copies],
        "version": np.repeat(step, grid.m)[copies],
        "size": parameters[np.repeat(stage, grid.m)[copies]],
    }
    build.hold(Category.PARAMETERS, begin=end(each[copies]), end=end(reader[copies]), **columns)
    build.hold(Category.COMMUNICATION, begin=start(each[copies]), end=end(each[copies]), **columns)


def carry_state(grid: Grid, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """A stage's state moves, point to point, from the device that used it last to the one that uses it next.

    The uses of all stages stand in one row, stage after stage, each stage's first one preceded by the place where
    its state starts. Everything below is indexed by that row.
    """
    task, first = uses(grid)
    stage = np.repeat(np.arange(grid.n), np.diff(np.append(first, len(task))))
    begins = first + np.arange(grid.n)  # of each stage, its start
    user = np.insert(task, first, -1)
    stage = np.insert(stage, first, np.arange(grid.n))
    device = np.where(user >= 0, grid.task_device[user], owner(grid, stage))
    at = np.empty(len(task), dtype=np.int64)  # of each task, its use
    at[task] = np.flatnonzero(user >= 0)

    carried = _Carried(grid, updates, at, begins)
    last = np.append(begins[1:], len(user)) - 1
    stays_on = np.ones(len(user), dtype=bool)
    stays_on[last] = False
    now = np.flatnonzero(stays_on)
    moves = now[device[now] != device[now + 1]]
    versions, sums = carried.versions(len(user))[moves], carried.sums(len(user))[moves]
    size = versions * model.size("parameters")[stage[moves]] + sums * model.size("gradients")[stage[moves]]
    size = np.ones_like(size) if model.is_unit else size + model.size("optimizer")[stage[moves]]
    made_in = np.where(user >= 0, user // (2 * grid.n * grid.m), -1)
    message = build.send(
        Op.P2P,
        Content.STATE,
        stage=stage[moves],
        step=made_in[moves],
        src=device[moves],
        dst=device[moves + 1],
        size=size,
        versions=versions,
    )
    leaves = np.full(len(user), -1)  # what carries the state on to the next use: a message, or that use itself
    leaves[now] = user[now + 1]
    leaves[moves] = message
    used = moves[user[moves] >= 0]
    build.link(user[used], leaves[used])
    build.link(message, user[moves + 1])
    some, before = grid.before(grid.rank[user[moves + 1]], 1 + prefetch)
    build.link(before, message[some], Edge.ROOM)
    stays = now[device[now] == device[now + 1]]
    stays = stays[(user[stays] >= 0) & (user[stays + 1] != user[stays] + 1)]  # else linked as a stage to the next
    build.link(user[stays], user[stays + 1])
    applied = carried.update_at
    build.link(user[applied], updates.node)
    onward = np.flatnonzero(leaves[applied] >= 0)
    build.link(updates.node[onward], leaves[applied[onward]])
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, Edge.BARRIER)
    build.hold(
        Category.COMMUNICATION,
        device=device[moves + 1],
        stage=stage[moves],
        version=np.maximum(made_in[moves], 0),
        size=size,
        begin=start(message),
        end=end(message),
    )
    # Where the state rests between two uses on one device, one holding ends and the next begins as the use ends.
    leave = end(user)
    leave[applied] = end(updates.node)
    leave[moves] = end(message)
    arrive = np.full(len(user), -1)
    arrive[now + 1] = leave[now]
    carried.hold(build, model, user, stage, device, arrive, leave)


class _Carried:
    """From which use to which each version, partial sum and optimizer state belongs to its stage's state."""

    def __init__(self, grid: Grid, updates: Updates, at: Ints, begins: Ints) -> None:
        n, steps = grid.n, grid.steps
        self.grid, self.updates, self.begins = grid, updates, begins
        assert updates.anchor is not None
        self.update_at = at[updates.anchor]
        by_update = self.update_at.reshape(steps, n)
        # theta_v is there from the update that makes it to its last reader, the update that replaces it included.
        self.made = np.vstack([begins, by_update[:-1]])
        self.read = by_update.copy()
        _, _, j = (np.broadcast_to(index, grid.device.shape).ravel() for index in grid.tij)
        np.maximum.at(self.read, (grid.version.ravel(), j), at[grid.backward.ravel()])
        self.summed_from = at[grid.backward[:, 0]]
        self.summed_to = by_update

    def versions(self, count: int) -> Ints:
        """How many versions leave with the state after each use."""
        return _overlaps(self.made, self.read, count)

    def sums(self, count: int) -> Ints:
        """How many partial sums leave with the state after each use."""
        return _overlaps(self.summed_from, self.summed_to, count)

    def hold(
        self, build: Builder, model: Model, user: Ints, stage: Ints, device: Ints, arrive: Ints, leave: Ints
    ) -> None:
        """Hold versions, partial sums and optimizer states where they are."""
        node = self.updates.node.reshape(self.grid.steps, self.grid.n)
        made = np.vstack([np.full(self.grid.n, -1), end(node[:-1])])
        replaced = self.read == self.summed_to
        after_read = np.where(replaced, end(node), end(user[self.read]))
        last = np.append(self.begins[1:], len(user)) - 1
        always = np.full((1, self.grid.n), -1)
        spans = (
            (Category.PARAMETERS, "parameters", self.made, self.read, made, after_read),
            (
                Category.GRADIENTS,
                "gradients",
                self.summed_from,
                self.summed_to,
                start(user[self.summed_from]),
                end(node),
            ),
            (Category.OPTIMIZER, "optimizer", self.begins[None], last[None], always, end(user[last])[None]),
        )
        for category, kind, first, final, begin, finish in spans:
            count = (final - first + 1).ravel()
            span = np.repeat(np.arange(len(count)), count)
            use = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first.ravel()[span]
            begin_at = np.where(use == first.ravel()[span], begin.ravel()[span], arrive[use])
            end_at = np.where(use == final.ravel()[span], finish.ravel()[span], leave[use])
            some = np.flatnonzero(begin_at != end_at)  # a state may start where it is first used
            use, span = use[some], span[some]
            of = {"device": device[use], "stage": stage[use], "version": span // self.grid.n}
            build.hold(category, size=model.size(kind)[stage[use]], begin=begin_at[some], end=end_at[some], **of)


def _overlaps(first: Ints, last: Ints, count: int) -> Ints:
    """How many of the spans first..last include both a use and the next one."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, first.ravel(), 1)
    np.add.at(change, last.ravel(), -1)
    return np.cumsum(change)[:-1]
