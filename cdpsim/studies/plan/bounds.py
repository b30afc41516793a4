"""Bounds of what a simulation will show: the least time of a training step, and the least peak of the fullest device.

Both come from a probe: a run of the same request without data ranks, of few micro-batches and steps where these show
all. It serves all candidates that differ in data ranks alone. These add messages and take nothing from a pass, so no
step is shorter than the probe's. In each of its tasks a device holds what begins and ends with tasks of its own, or
with what these wait for, whatever anything takes. Of states that ranks split, one of them holds the mean. Where they
split parameters, a program of few micro-batches shows what comes layer by layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from cdpsim.cluster.topology import NONE
from cdpsim.errors import RequestError, Stalled
from cdpsim.limits import UNLIMITED
from cdpsim.model import Model
from cdpsim.model.layers import EXPERT
from cdpsim.numeric.columns import Floats, Ints, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op, Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.runs.assembling import assemble_replicas
from cdpsim.runs.micro_batches import fold_micro_batches
from cdpsim.runs.playing import run
from cdpsim.runs.steady_metrics import steady_steps
from cdpsim.schedules.state import MOST_SPLIT, ZERO, Placed
from cdpsim.studies.equal_shapes import ranks_of, team_of

ROUNDING = 1 - 1e-9  # of seconds, which sums in another order may miss by less
STASHES = len(Category)  # the column behind those of categories: the part of activations kept for backwards
_BETWEEN_RANKS = ("replicas", "shard", "zero", "contention", "expand_collectives", "engine")
_BETWEEN_STAGES = (Content.ACTIVATION, Content.ACTIVATION_GRADIENT)


class Bound(NamedTuple):
    """The least time of a step, in slots or seconds, and the least peak of a device, in stage-activations or bytes."""

    step: float
    memory: float


class Probe(NamedTuple):
    """The step of a run without data ranks, that of its passes alone, and what its `m` micro-batches hold in tasks.

    `held` has a row for tasks that hold the same parameters, gradients and optimizer states, with the most of each
    other column; `most` is the most that a task holds.
    """

    step: float
    passes: float
    held: Ints
    most: int = 0
    m: int = 0


class Bounds:
    """Bounds of candidates, whose requests without data ranks are known; probes are run when they are first needed."""

    def __init__(self, cases: Sequence[Request], most: float = np.inf) -> None:
        self._cases, self._most = cases, most  # of more memory than that, no more is asked
        self._probes: dict[int, Probe] = {}
        self._held_in_shares: dict[tuple[int, int, int], int] = {}

    def of(self, case: int, options: Mapping[str, Any]) -> Bound:
        """Return the bound of a request of a case, which differs from it in data ranks."""
        request = self._cases[case]
        if case not in self._probes:
            self._probes[case] = _probe(request)
        probe, zero, shard = self._probes[case], options.get("zero", request.zero), options.get("shard", 1)
        if options.get("replicas", 1) * shard == 1 and not zero:
            return Bound(probe.step, float(probe.most))
        memory = float(np.floor((probe.held @ kept(zero, shard * _sharing(request.model))).max(initial=0)))
        if memory <= self._most and ZERO[zero][1] is Placed.SPLIT and probe.m and shard > 1:
            memory = max(memory, self._in_shares(case, {**options, "zero": zero}))
        return Bound(probe.passes, memory)

    def _in_shares(self, case: int, options: Mapping[str, Any]) -> float:
        """Return the least peak of a request by a program of its own, in which ranks split gradients."""
        probe, shard = self._probes[case], options.get("shard", 1)
        key = case, options["zero"], options.get("replicas", 1) * shard
        if key not in self._held_in_shares:
            self._held_in_shares[key] = _held_in_shares({**options, "replicas": 1, "shard": key[-1]}, probe.m)
        parameters = probe.held[:, Category.PARAMETERS].min() if options["zero"] < MOST_SPLIT else 0
        shard *= _sharing(self._cases[case].model)
        return float(self._held_in_shares[key] + parameters + probe.held[:, Category.OPTIMIZER].min() // shard)


def _sharing(model: Model) -> int:
    """Return the most ranks of a data rank that have a copy of the same parameters, and may share states."""
    mesh, of_experts = model.mesh, model.layers is not None and model.layers.experts
    return max(mesh.context, mesh.team // mesh.expert if of_experts else 1)


def case_of(options: Mapping[str, Any], data: int = 1) -> Request:
    """Return the request of a case: one of `data` ranks on its own devices, each message alone on its links.

    Where experts are split over data ranks, it has as few as that takes.
    """
    few = {name: value for name, value in options.items() if name not in _BETWEEN_RANKS}
    if (ranks := (expert := ranks_of(options, EXPERT)) // gcd(expert, team_of(options))) > 1:
        few["replicas"] = ranks
    try:
        return Request(**{**few, "ignore_memory": True, "max_memory": UNLIMITED}).first_of(data)
    except RequestError as error:
        if error.subject not in ("offload", EXPERT):
            raise
        splits_least = {"zero": 3, "shard": 1}  # parameters'
        if error.subject == EXPERT:  # where nothing but shares can be apart
            splits_least = {"zero": 1, "shard": max(ranks, 2), "replicas": 1}
    few |= splits_least
    return Request(**{**few, "ignore_memory": True, "max_memory": UNLIMITED}).first_of(data)


def kept(zero: int, shard: int) -> Floats:
    """Return the weights of the columns of which a rank holds at least so much, at a stage of ZeRO.

    Of states that ranks split, one has the mean at least. Gradients are whole up to their sum, and split behind it. Of
    split parameters, which come layer by layer, it has what forwards keep.
    """
    parameters, gradients, optimizer = (placement is Placed.COPIED for placement in ZERO[zero])
    weights = np.zeros(STASHES + 1)
    weights[Category.PARAMETERS] = 1 if parameters else 1 / shard
    weights[Category.OPTIMIZER] = 1 if optimizer else 1 / shard
    weights[Category.GRADIENTS] = gradients
    weights[Category.ACTIVATIONS if parameters else STASHES] = 1
    return weights


def _probe(case: Request) -> Probe:
    """Run a request without data ranks, of few micro-batches where they show all."""
    try:
        folded = fold_micro_batches(case)
        one = folded.run if folded else steady_steps(case).run()
        rest = one.steady_state
        step = folded.metrics.period if folded else rest.period
        passes = _without_exchanges(rest.run)
        settled = passes.steady_state
    except (RequestError, Stalled):  # which the simulation of a candidate shows
        return Probe(0.0, 0.0, np.zeros((1, STASHES + 1), dtype=np.int64))
    program = passes.program
    work = _mean_work(passes) * case.shape.m / one.request.shape.m
    alike = settled.run.program is program  # as ranks exchange in other parts
    if case.rendezvous or NONE in case.cluster.overlaps(program.devices):
        step = least = work  # as other messages may let tasks wait less for each other
    elif not alike or (program.messages.micro_batch[_exchanges(program)] >= 0).any():
        least = work
    else:
        least = float(settled.period + step - rest.period)
    exact, held = 1.0 if case.in_slots else ROUNDING, certainly_held(one.held)
    most = int(held[:, :STASHES].sum(axis=1).max(initial=0))
    for each in (one, rest.run, settled.run):  # their longer programs are large, and of no use for other requests
        each.program.lengthened.clear()
        vars(each).pop("steady_state", None)  # which has the run, and would stay with it for long
    return Probe(exact * float(step), exact * float(least), _of_states(held), most, one.request.shape.m)


def _of_states(held: Ints) -> Ints:
    """Return a row for all tasks that hold the same states, with the most of each other column."""
    states = held[:, [Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER]]
    changes = (states[1:] != states[:-1]).any(axis=1)
    found: Ints = np.unique(np.maximum.reduceat(held, [0, *np.flatnonzero(changes) + 1]), axis=0)
    return found


def _exchanges(program: Program) -> Ints:
    """Return the messages that stages do not pass on: what copies of a stage exchange, which ranks may share."""
    messages = program.messages
    return np.flatnonzero((messages.op != Op.P2P) | ~np.isin(messages.content, _BETWEEN_STAGES))


def _mean_work(one: Run) -> float:
    """Return how long a device computes in a step, in the mean."""
    lanes = np.count_nonzero(np.diff(one.program.lane_start))
    return ROUNDING * float(one.costs.duration[: one.program.compute].sum()) / (lanes * one.program.steps)


def _held_in_shares(options: Mapping[str, Any], m: int) -> int:
    """Return what a device holds in a task of m micro-batches of a step beside states, where ranks split gradients."""
    try:
        request = Request(**{**options, "ignore_memory": True, "max_memory": UNLIMITED}).with_micro_batches(m)
        held = certainly_held(assemble_replicas(request.with_steps(1, ignore_memory=True), folded=request.may_fold))
    except (RequestError, Stalled):  # which the simulation of a candidate shows
        return 0
    columns = [Category.ACTIVATIONS, Category.GRADIENTS, *[Category.PARAMETERS] * (request.zero == MOST_SPLIT)]
    return int(held[:, columns].sum(axis=1).max(initial=0))


def _without_exchanges(one: Run) -> Run:
    """Return a run in which updates and exchanges take no time."""
    program, duration = one.program, one.costs.duration.copy()
    duration[program.compute : len(program.tasks)] = 0
    duration[len(program.tasks) + _exchanges(program)] = 0
    duration[program.message_nodes.stop :] = program.parts.times(duration[program.message_nodes])
    same = (duration == one.costs.duration).all()
    return one if same else run(program, replace(one.costs, duration=duration))


def _find_summed(program: Program, before: Ints, after: Ints, rank: Ints, last_maker: Ints) -> None:
    """Write the last tasks whose gradients updates of their devices take from sums."""
    tasks, first = program.tasks, len(program.tasks)
    into, out = (after >= first) & (before < program.compute), (before >= first) & (after < first)
    made, sums = sort_by(after[into]), out & (after >= program.compute)
    task, message, summed, update = before[into][made], after[into][made], before[sums], after[sums]
    low, high = (np.searchsorted(message, summed, side) for side in ("left", "right"))
    update = np.repeat(update, high - low)
    task = task[np.repeat(high - np.cumsum(high - low), high - low) + np.arange(len(update))]
    own = tasks.device[task] == tasks.device[update]
    np.maximum.at(last_maker, update[own], rank[task[own]])


def certainly_held(program: Program) -> Ints:
    """Return what devices with one lane hold in each of their tasks, in columns of categories and of stashes."""
    buffers, tasks, lane = program.buffers, program.lane_tasks, program.lane_numbers
    rank = np.full(program.nodes, -1, dtype=np.int64)
    rank[tasks] = np.arange(len(tasks))
    lasting = program.edges.kind != EdgeKind.STREAM  # turns in streams are others with other messages
    before, after = program.edges.before[lasting], program.edges.after[lasting]
    first_use, last_maker = np.full(program.nodes, len(tasks)), np.full(program.nodes, -1)
    used, made = rank[after] >= 0, rank[before] >= 0
    np.minimum.at(first_use, before[used], rank[after[used]])
    np.maximum.at(last_maker, after[made], rank[before[made]])
    _find_summed(program, before, after, rank, last_maker)
    lanes = np.flatnonzero(np.diff(program.lane_start))
    devices = program.tasks.device[tasks[program.lane_start[lanes]]]
    lane_of = np.full(program.devices, -1)
    lane_of[devices] = np.where(np.bincount(devices)[devices] == 1, lanes, -1)
    where = lane_of[buffers.device]

    def ranks(moment: Ints, where: Ints, others: Ints, further: Ints) -> Ints:
        """Return the ranks in lanes of the tasks of moments, `further` on; of other nodes, the others' of these."""
        node = np.maximum(moment >> 1, 0)
        task = np.where(rank[node] >= 0, rank[node], others[node])
        mine = (moment >= 0) & (lane[np.clip(task, 0, len(tasks) - 1)] == where) & (task >= 0) & (task < len(tasks))
        return np.where(mine, task + further * (rank[node] >= 0), -1)

    begin = ranks(buffers.begin, where, first_use, buffers.begin & 1)
    begin = np.where(buffers.begin < 0, program.lane_start[np.maximum(where, 0)], begin)
    until = ranks(buffers.end, where, last_maker, (buffers.end & 1) - 1)
    kept = ranks(buffers.kept_until, where[buffers.kept], last_maker, (buffers.kept_until & 1) - 1)
    np.maximum.at(until, buffers.kept, kept)
    known = np.flatnonzero((where >= 0) & (begin >= 0) & (until >= begin))
    rows = np.concatenate([known, stashes := known[np.isin(known, program.stashes)]])
    column = np.concatenate([buffers.category[known], np.full(len(stashes), STASHES)])
    held = np.zeros((len(tasks) + 1, STASHES + 1), dtype=np.int64)
    np.add.at(held, (begin[rows], column), buffers.size[rows])
    np.add.at(held, (until[rows] + 1, column), -buffers.size[rows])
    found: Ints = np.cumsum(held, axis=0)[:-1]
    return found
