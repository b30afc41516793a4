"""Shares of what is split among ranks: the forms of their tensors, their places in vectors, and messages of them.

A stage's vector goes in equal shares to the ranks of a sharding group, in the order of its members. The last one is
padded with zeros. A program splits bytes, and a tensor has whole numbers: `in_whole_numbers` gives a program's shares
the bytes of their tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Op, Program
from cdpsim.schedules.state import Placed

from ..training.forms import Form
from ..training.optimizer import Optimizer
from ..training.stages import Training
from .contents import Message
from .policy import split_of


class Shares:
    """The shares of a program's devices, as the groups of its messages say whose they are."""

    def __init__(self, program: Program, messages: Sequence[Message], training: Training) -> None:
        self.split = program.shard
        self._training = training
        self._ranks: dict[tuple[int, int], int] = {}
        for message in messages:
            if message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
                for rank, device in enumerate(message.members):
                    self._ranks[device, len(message.members)] = rank

    def rank(self, device: int, split: int) -> int:
        """Return the rank of a device among the ranks that split something; of what is whole, 0."""
        return 0 if split == 1 else self._ranks[device, split]

    def form(self, stage: int, split: int) -> Form:
        """Return the form of a share of a stage's vector, or of all of it."""
        numel, dtype = self._training.parameters(stage).numel, self._training.parameters(stage).dtype
        return Form((-(-numel // split),), dtype)

    def parts(self, stage: int, split: int) -> list[Form]:
        """Return the forms of the tensors in a share, which is one, or in all of a stage's vector."""
        return self._training.parts(stage) if split == 1 else [self.form(stage, split)]

    def place(self, stage: int, split: int, rank: int) -> slice:
        """Return the place of a rank's share in the stage's vector, without padding."""
        size, numel = self.form(stage, split).numel, self._training.parameters(stage).numel
        return slice(min(rank * size, numel), min((rank + 1) * size, numel))

    def of(self, vector: Tensor, stage: int, split: int, rank: int) -> Tensor:
        """Return a rank's share of a vector: a view, or a padded copy."""
        own, form = vector[self.place(stage, split, rank)], self.form(stage, split)
        if own.shape == form.shape:
            return own
        share = own.new_zeros(form.shape)
        share[: own.numel()] = own
        return share

    def write(self, vector: Tensor, stage: int, split: int, rank: int, share: Tensor) -> None:
        """Write a rank's share into a vector."""
        own = vector[self.place(stage, split, rank)]
        own.copy_(share[: own.numel()])

    # Messages

    def splits(self, message: Message) -> int:
        """Return among how many ranks a message of gradients or parameters splits what it carries, or has it split."""
        if message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
            return len(message.members)
        return self.split if message.content == Content.GRADIENT else 1

    def message_form(self, message: Message) -> Form:
        """Return the form of what each member of a collective ends with."""
        split = self.splits(message)
        pieces = [self.form(stage, split) for stage in message.covers]
        many = split if message.op == Op.ALL_GATHER else 1
        return Form((many * sum(piece.numel for piece in pieces),), pieces[0].dtype)

    def is_packed(self, message: Message) -> bool:
        """Return whether a message carries other tensors than devices hold."""
        split, numel = self.splits(message), self._training.parameters(message.stage).numel
        of_shares = message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER)
        return message.stages > 1 or (of_shares and self.form(message.stage, split).numel * split > numel)

    def pack_rows(self, vectors: Sequence[Tensor], stages: Sequence[int], split: int) -> Tensor:
        """Return vectors as one: first the first rank's share of each, then the second's."""
        sizes = [self.form(stage, split).numel for stage in stages]
        packed = vectors[0].new_zeros(split * sum(sizes))
        for rank, row in enumerate(torch.split(packed, sum(sizes))):
            for vector, stage, piece in zip(vectors, stages, torch.split(row, sizes), strict=True):
                own = vector[self.place(stage, split, rank)]
                piece[: own.numel()] = own
        return packed

    def unpack_rows(self, packed: Tensor, stages: Sequence[int], split: int) -> list[Tensor]:
        """Return the vectors in a packed one, without padding, each in a storage of its own."""
        sizes = [self.form(stage, split).numel for stage in stages]
        vectors = [packed.new_empty(self.form(stage, 1).shape) for stage in stages]
        for rank, row in enumerate(torch.split(packed, sum(sizes))):
            for vector, stage, piece in zip(vectors, stages, torch.split(row, sizes), strict=True):
                self.write(vector, stage, split, rank, piece)
        return vectors


def check_shares(program: Program, optimizer: Optimizer, element: int) -> None:
    """Refuse programs with shares that cannot be replayed, and optimizers that do not update numbers one by one."""
    if optimizer.kind == "adafactor":
        problem = f"{optimizer.kind} sums over rows of a tensor, and each of {program.shard} ranks has a share of it"
        raise RequestError("optimizer", f"{problem}; take adam, or --zero 0")
    if element < torch.float32.itemsize and not optimizer.mixed_precision:
        problem = f"torch rounds the last of a tensor's {element}-byte numbers otherwise, and shares end elsewhere"
        raise RequestError("dtype", f"{problem}; take --mixed-precision, or --dtype float32")
    if program.fill and program.state.parameters is Placed.COPIED and not program.thrown_away:
        problem = "shares are updated where older parameters are, which tasks still read"
        raise RequestError("zero", f"{problem}; replay --zero 0, or a schedule that flushes")


def in_whole_numbers(program: Program, training: Training, optimizer: Optimizer) -> Program:
    """Return a program whose shares have the bytes of tensors, where it has those of a part of the whole's.

    Other sizes are wrong, and stay as they are.
    """
    found = program.messages.size.copy()
    for row, stated, own in sizes_of_shares(program, training):
        found[row] = own if found[row] == stated else found[row]
    return replace(
        program,
        messages=replace(program.messages, size=found),
        buffers=replace(program.buffers, size=_buffer_sizes(program, training, optimizer)),
    )


def sizes_of_shares(program: Program, training: Training) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of messages of shares, with the bytes of a part of the whole's, and those of tensors."""
    columns = program.messages
    among_ranks = np.isin(columns.op, (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_REDUCE))
    among_ranks &= np.isin(columns.content, (Content.GRADIENT, Content.PARAMETERS))
    for row in np.flatnonzero(among_ranks).tolist() if program.shard > 1 else ():
        op, stage, stages = columns.op[row], int(columns.stage[row]), int(columns.stages[row])
        split = program.shard if op == Op.ALL_REDUCE else len(program.groups[int(columns.dst[row])])
        forms = [training.parameters(each) for each in range(stage, stage + stages)]
        many, whole = split if op == Op.ALL_GATHER else 1, sum(form.nbytes for form in forms)
        share = sum(-(-form.numel // split) * form.dtype.itemsize for form in forms)
        yield row, many * -(-whole // split), many * share


def _buffer_sizes(program: Program, training: Training, optimizer: Optimizer) -> Ints:
    columns, found = program.buffers, program.buffers.size.copy()
    splits = {program.shard, *(len(group) for group in program.groups)} - {1}
    for row, (category, stage) in enumerate(zip(columns.category.tolist(), columns.stage.tolist(), strict=True)):
        form = training.parameters(stage) if stage >= 0 else None
        if form is None or category not in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
            continue
        for split in splits if category == Category.PARAMETERS else {split_of(program, Category(category))}:
            whole, share = form.nbytes, -(-form.numel // split) * form.dtype.itemsize
            if category == Category.OPTIMIZER:
                own = Form((-(-form.numel // split),), form.dtype)
                whole, share = optimizer.nbytes(training.parts(stage)), optimizer.nbytes([own])
            if found[row] == -(-whole // split):
                found[row] = share
                break
    return found
