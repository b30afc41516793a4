"""Rounds without counts: each rank looks, after each block of micro-batches, whether the communication is through.

A communication is in a thread of its own, as in the authors' code of ACCO: sum, update of the rank's share, gather. The
counts that come out are recorded, and the equation is evaluated for them. A micro-batch's data are numbered by its
worker and its place there, as no worker knows how many the others have.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdpsim.program import Category, Op
from cdpsim.program.assembly import derive
from cdpsim.program.streams import queue_in_streams

from ..training.forms import flatten
from ..training.recomputation import run_backward, run_forward
from ..training.stages import Training
from .case import Final, Prepared, places_of, widened
from .contents import Message
from .interpreter import copy_state
from .plan import Plan
from .policy import split_of
from .round_lives import last_kept
from .rounds import versions_brought
from .shares import Shares, in_whole_numbers
from .transport import Distributed


class LiveOutcome(NamedTuple):
    """The result of a rank: the parameters of its last updates, and how many micro-batches it had in each step."""

    parameters: Final
    places: dict[int, slice]
    counts: list[int]


@dataclass(frozen=True, eq=False)
class NumberedByWorker(Training):
    """A training whose micro-batches are numbered through all workers, with the data that each drew for itself."""

    counts: Sequence[Sequence[int]] = field(default_factory=list)  # of each step, those of all workers

    def number(self, step: int, micro_batch: int) -> int:
        """Return the number of the data that its worker drew."""
        ends = np.cumsum(self.counts[step])
        worker = int(np.searchsorted(ends, micro_batch, side="right"))
        first = int(ends[worker]) - self.counts[step][worker]
        return number_of(worker, micro_batch - first, len(ends))


def number_of(worker: int, place: int, workers: int) -> int:
    """Return the number of the data of a worker's micro-batch in a step."""
    return place * workers + worker


def with_counts_found(prepared: Prepared, counts: Sequence[Sequence[int]]) -> Prepared:
    """Return a case with the program of counts that came out of a run, and with the data of that run."""
    case, request, training = prepared.case, prepared.request, prepared.training
    declared, table = replace(request.schedule, state=request.state), np.array(counts)
    program = derive(declared, request.model, request.steps, shape=request.shape, counts=table, runtime=request.runtime)
    program = queue_in_streams(program)
    if program.shard > 1:
        program = in_whole_numbers(program, training, case.optimizer)
    return Prepared(case, request, Plan(program), NumberedByWorker(**vars(training), counts=counts))


class _Communications:
    """A rank's side of communications: what they take and bring, and the optimizer state of its share."""

    def __init__(self, prepared: Prepared, rank: int, transport: Distributed) -> None:
        self._prepared, self._rank, self._transport = prepared, rank, transport
        self._plan, self._program, self._training = prepared.plan, prepared.plan.program, prepared.training
        self._optimizer = prepared.case.optimizer
        self._split = split_of(self._program, Category.OPTIMIZER)
        self._shares = Shares(self._program, self._plan.messages, self._training)
        self._made = prepared.request.rule.versions.made(self._program.updated)
        self._brings = versions_brought(self._plan)
        self._last, self._counts = last_kept(self._program), dict[int, int]()
        # The last steps whose gradients versions take that are kept: behind these, sums begin anew.
        self.last_steps = {int(step) for step in self._made.step[~self._made.estimate]}
        thetas = [flatten(stage.parameters()).to(self._training.device) for stage in self._training.stages]
        self.read = thetas  # what micro-batches read
        self._buffer = [torch.zeros_like(theta) for theta in thetas]
        self._states = [
            self._optimizer.state(self._share(stage), self._shares.parts(stage, self._split))
            for stage in range(self._program.n)
        ]
        self.final: Final = {}
        self.thread: threading.Thread | None = None  # that a communication is in, if one is on its way
        self._error: Exception | None = None

    def hand_over(self, step: int, sums: Sequence[Tensor], count: int) -> None:
        """Begin with the communication of a step's gradients."""
        for vector, own in zip(self._buffer, sums, strict=True):
            vector.copy_(own)
        self.thread = threading.Thread(target=self._run, args=(step, count), daemon=True)
        self.thread.start()

    def take_over(self) -> None:
        """Wait for the last communication, and go on with what it has brought."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self._error:
            raise self._error
        for vector, brought in zip(self.read, self._buffer, strict=True):
            vector.copy_(brought)

    def _run(self, step: int, count: int) -> None:
        try:
            self._communicate(step, count)
        except Exception as error:  # raised where the rank goes on with what should have come
            self._error = error

    def _communicate(self, step: int, count: int) -> None:
        sums = self._sum(step, count)
        shares: dict[int, list[Tensor]] = {}  # of each version that this step makes
        for row in np.flatnonzero(self._made.step == step).tolist():
            shares[row + 1] = self._make(row, sums)
        if self._program.devices == 1:
            for vector, share in zip(self._buffer, shares[max(shares)], strict=True):
                vector.copy_(share)
            return
        for message in self._messages(step, Op.ALL_GATHER):
            self._gather(message, shares[self._brings[message.node]])

    def _sum(self, step: int, count: int) -> list[Tensor]:
        self._counts[step] = count
        if self._program.devices == 1:
            return self._buffer
        found: dict[int, Tensor] = {}
        for message in self._messages(step, Op.REDUCE_SCATTER):
            number = torch.tensor([float(count)], dtype=torch.float64, device=self._training.device)
            self._counts[step] = int(self._transport.begin(message._replace(op=Op.ALL_REDUCE), number).wait())
            given = [self._buffer[stage] for stage in message.covers]
            packed = self._shares.pack_rows(given, message.covers, self._split)
            form = self._shares.message_form(message)
            summed = self._transport.begin(message, packed, form).wait()
            numbers = [self._shares.form(stage, self._split).numel for stage in message.covers]
            found |= dict(zip(message.covers, torch.split(summed, numbers), strict=True))
        return [found[stage] for stage in range(self._program.n)]

    def _make(self, row: int, sums: Sequence[Tensor]) -> list[Tensor]:
        many = sum(self._counts[t] for t in range(int(self._made.first[row]), int(self._made.step[row]) + 1))
        made = []
        for stage, summed in enumerate(sums):
            state = self._states[stage]
            own = copy_state(state) if self._made.estimate[row] else state
            parts = self._shares.parts(stage, self._split)
            theta = self._optimizer.update(self._share(stage), summed / many, own, parts)
            made.append(theta)
            if row + 1 == self._last:
                place = places_of(self._prepared, self._rank)[stage]
                self.final[stage] = widened(theta[: place.stop - place.start].cpu()).copy()
        return made

    def _gather(self, message: Message, shares: Sequence[Tensor]) -> None:
        packed = torch.cat([shares[stage] for stage in message.covers])
        form = self._shares.message_form(message)
        whole = self._transport.begin(message, packed, form).wait()
        vectors = self._shares.unpack_rows(whole, message.covers, self._split)
        for stage, vector in zip(message.covers, vectors, strict=True):
            self._buffer[stage].copy_(vector)

    def _messages(self, step: int, op: Op) -> list[Message]:
        """Return the messages of a step in the order in which all ranks begin with them."""
        found = [each for each in self._plan.messages if each.step == step and each.op == op]
        return sorted(found, key=lambda each: self._plan.place[each.node])

    def _share(self, stage: int) -> Tensor:
        return self._shares.of(self.read[stage], stage, self._split, self._shares.rank(self._rank, self._split))


class LiveWorker:
    """A rank that computes blocks of micro-batches until the communication beside them is through."""

    def __init__(self, prepared: Prepared, rank: int, transport: Distributed) -> None:
        self._prepared, self._training, self._rank = prepared, prepared.training, rank
        self._communications = _Communications(prepared, rank, transport)
        slow = prepared.request.disorder.slow
        self._factor = next((each.factor for each in slow if each.device == rank), 1.0)

    def run(self) -> LiveOutcome:
        """Run all rounds, and return what came out."""
        program, shape, ours = self._prepared.plan.program, self._prepared.case.shape, self._communications
        sums = [torch.zeros_like(theta) for theta in ours.read]
        counts: list[int] = []
        for step in range(program.steps):
            if step <= shape.warm_up:  # so far a rank waits for its updates
                ours.take_over()
            counts.append(1 if step == 0 and not shape.warm_up else shape.m)
            self._compute(step, range(counts[-1]), sums)
            while step > shape.warm_up and ours.thread is not None and ours.thread.is_alive():
                self._compute(step, range(counts[-1], counts[-1] + shape.m), sums)
                counts[-1] += shape.m
            ours.take_over()
            if step < program.updated:
                ours.hand_over(step, sums, counts[-1])
            for own in sums if step in ours.last_steps else ():
                own.zero_()
        return LiveOutcome(ours.final, places_of(self._prepared, self._rank), counts)

    def _compute(self, step: int, places: range, sums: Sequence[Tensor]) -> None:
        training, thetas = self._training, self._communications.read
        for place in places:
            begun = time.perf_counter()
            number = number_of(self._rank, place, self._prepared.plan.program.devices)
            x: Tensor | None = training.input(step, number)
            stashes = []
            for stage, theta in enumerate(thetas):
                target = training.target(step, number) if stage == training.n - 1 else None
                assert x is not None, "only the last stage has no output"
                x, stash = run_forward(training, stage, theta, x, target, 1)
                stashes.append(stash)
            above: Tensor | None = None
            for stage in reversed(range(training.n)):
                above = run_backward(training, stashes.pop(), thetas[stage], above, sums[stage])
            time.sleep((self._factor - 1) * (time.perf_counter() - begun))
