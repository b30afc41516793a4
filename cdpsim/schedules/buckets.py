"""Buckets: which gradients go in one message.

Gradients come in the order in which backwards make them. None is ever split. Published rules:

    torch      closed as soon as it has the least size: 1 MiB of the first bucket, 25 MiB of all others
               (`compute_bucket_assignment_by_size`, with the sizes of `DistributedDataParallel`)
    megatron   closed as soon as it has the least number of elements: 40 million, or a million for each rank
               (Megatron-LM, `DistributedDataParallelConfig.bucket_size`)
    deepspeed  closed before it would have more than 500 million elements (DeepSpeed, `reduce_bucket_size`)

Compression of gradients that data ranks sum: what each rank sends of its own.

bf16, fp16   2 bytes a number (torch's `bf16_compress_hook` and `fp16_compress_hook`)
int8, int4   1 byte, or half of one, and a scale of 4 bytes for each block: of 512 numbers, or as `int8:128` says
             (ZeRO++, Wang et al. 2023; the blocks are those of torch's `quantization_perchannel_hook`)
topk:F       the largest F of all numbers (0 < F <= 1), each with an index of 4 bytes; the others stay, and are
             added to the next gradients (Lin et al. 2018)
powersgd:R   of each matrix two factors of rank R, which are summed one after the other (Vogels et al. 2019; torch's
             `powerSGD_hook`); other tensors, and matrices that factors would not make half as large, as they are
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cdpsim.errors import RequestError, choose, short_repr
from cdpsim.files.units import size_bytes
from cdpsim.numeric.columns import Ints

MIB = 2**20


def assign_buckets(sizes: Sequence[int], limits: Sequence[int], *, most: bool = False) -> list[list[int]]:
    """Return the tensors of each bucket, by their numbers in the order of their gradients.

    A bucket is closed as soon as it has the bytes of its limit; if those are the `most`, before it would have more. The
    last limit is that of all further buckets.

    >>> assign_buckets([3, 3, 3, 9, 1], [2, 5])
    [[0], [1, 2], [3], [4]]
    >>> assign_buckets([3, 3, 3, 9, 1], [6], most=True)
    [[0, 1], [2], [3], [4]]
    """
    buckets: list[list[int]] = []
    limit, filled = iter(limits), 0
    least = next(limit)
    for number, size in enumerate(sizes):
        if not buckets or (filled + size > least and filled > 0 if most else filled >= least):
            least = next(limit, least) if buckets else least
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += size
    return buckets


@dataclass(frozen=True)
class Buckets:
    """The sizes at which buckets of gradients are closed, in bytes: of the first one, then of the others.

    They are the least sizes of buckets, or the `most`. If `whole_first_step`, all gradients of a device go in one
    bucket in the first step, before torch knows in which order they come.
    """

    sizes: tuple[int, ...]
    most: bool = False
    whole_first_step: bool = False

    @classmethod
    def of_runtime(cls, name: str, element: int, ranks: int) -> "Buckets":
        """Return the buckets of a runtime, for gradients of `element` bytes a number that `ranks` ranks sum."""
        return {
            "torch": cls((MIB, 25 * MIB)),
            "megatron": cls((max(40_000_000, 1_000_000 * ranks) * element,)),
            "deepspeed": cls((500_000_000 * element,), most=True),
        }[name]


RUNTIMES_WITH_BUCKETS = ("torch", "megatron", "deepspeed")
BUCKETS = ("none", *RUNTIMES_WITH_BUCKETS)  # beside sizes


def bucket_sizes(given: object) -> tuple[int, ...]:
    """Return the sizes of the first bucket and of the others that a text says; none where it is a known name."""
    if isinstance(given, str) and given in BUCKETS:
        return ()
    text = given if isinstance(given, str) else short_repr(given)
    try:
        sizes = tuple(size_bytes(size.strip()) for size in re.split("[,:]", text))
    except RequestError as error:
        problem = f"{short_repr(given)} is neither one of {', '.join(BUCKETS)} nor sizes such as '1 MiB,25 MiB'"
        raise RequestError("buckets", f"{problem}: {error.problem}") from None
    if not all(sizes):
        raise RequestError("buckets", f"{short_repr(given)} has a bucket of no bytes; give at least 1 B")
    return sizes


def read_buckets(given: Any) -> Any:
    """Return what names buckets or says their sizes; refuse anything else."""
    bucket_sizes(given)
    return given


class Units(NamedTuple):
    """Units that go in one message each: a row for each, with its lowest and highest stage and its bytes."""

    first: Ints
    last: Ints
    size: Ints
    held: Ints  # what each rank has copied of gradients until they are summed
    follows: Ints  # 1 if it is sent after the unit in the next row, of the same stages; else 0

    @classmethod
    def of_buckets(cls, tensors: Sequence[Sequence[tuple[int, ...]]], ends: Sequence[int], buckets: Buckets) -> "Units":
        """Return the buckets of stages with these tensors' gradients; none goes beyond the stages at which a run ends.

        Gradients come from the last stage to the first, and in each from its last tensor to its first. Of each tensor
        there are all its bytes, then those of the parts in which buckets go, one after another, if there are any.
        """
        rows = []
        for low, high in zip([0, *ends], ends, strict=False):
            stage = [j for j in reversed(range(low, high)) for _ in tensors[j]]
            coming = [tensor for j in reversed(range(low, high)) for tensor in reversed(tensors[j])]
            for bucket in assign_buckets([whole for whole, *_ in coming], buckets.sizes, most=buckets.most):
                whole, *parts = map(sum, zip(*(coming[k] for k in bucket), strict=True))
                rows.append((stage[bucket[-1]], stage[bucket[0]], whole, parts))
        in_parts = any(parts for *_, parts in rows)
        rows.reverse()
        rows.sort(key=lambda row: row[:2] if in_parts else row[:3])  # what comes last is first
        units = [(low, high, *unit) for low, high, whole, parts in rows for unit in _send_parts(whole, parts)]
        first, last, size, held = np.array(units, dtype=np.int64).reshape(-1, 4).T
        follows = np.append((np.diff(first) == 0) & (np.diff(last) == 0), False)[: len(size)] & in_parts
        return cls(first.astype(np.int32), last.astype(np.int32), size, held, follows.astype(np.int64))


def _send_parts(whole: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the units of a bucket, its last one first: bytes, and those of copies (of the first part, of all)."""
    sent = [k for k, part in enumerate(parts) if part]
    if not sent:
        return [(whole, 0)]
    copied = {k: parts[0] * (k == 0) + whole * (k == sent[-1]) for k in sent}
    return [(parts[k], copied[k]) for k in reversed(sent)]


COMPRESSIONS = ("none", "bf16", "fp16", "int8", "int4")  # beside those with numbers
_FORMS = (*COMPRESSIONS, "int8:BLOCK", "int4:BLOCK", "topk:F", "powersgd:R")
_CAST_BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
_NUMBERS_A_SCALE = 512
_SCALE_BYTES = _INDEX_BYTES = 4
_LARGEST_DENOMINATOR = 10**9
_LEAST_SAVING = 2  # times, that factors make a matrix smaller (`min_compression_rate`)


@dataclass(frozen=True)
class Compression:
    """The bytes that gradients take on their way: `bits` a number and scales of blocks, or a `share` of all numbers."""

    element: int  # bytes of a gradient's number
    bits: int = 0
    block: int = 0  # numbers with a common scale; 0: there are no scales
    share: Fraction | None = None  # of the numbers that each rank sends, with their indices; None: all
    rank: int = 0  # of the factors in which matrices are sent; 0: they are sent themselves

    @property
    def is_sparse(self) -> bool:
        """Whether ranks send different numbers, which no message can sum."""
        return self.share is not None

    @property
    def leaves_some(self) -> bool:
        """Whether something is left of gradients, and added to the next ones."""
        return self.is_sparse or self.rank > 0

    def factor(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of a tensor's two factors; none where it is sent as it is."""
        rows, columns = prod(shape[:1]), prod(shape[1:])
        saves = _LEAST_SAVING * self.rank * (rows + columns) < rows * columns  # and so no rank is more than either
        return (self.rank * rows, self.rank * columns) if saves else (0, 0)

    def encode(self, size: Ints) -> Ints:
        """Return the bytes in which gradients of these bytes are sent; casts never make them more."""
        numbers = -(-size // self.element)
        if self.share is None:
            scales = -(-numbers // self.block) if self.block else 0
            fewer: Ints = np.minimum(size, -(-numbers * self.bits // 8) + _SCALE_BYTES * scales)
            return fewer
        many, of = self.share.as_integer_ratio()
        largest = numbers // of * many - (-(numbers % of) * many // of)
        return largest * (self.element + _INDEX_BYTES)


def read_compression(given: Any) -> str | None:
    """Return the text of a compression, and None for `none`; refuse anything else."""
    if isinstance(given, str) and given == COMPRESSIONS[0]:
        return None
    find_compression(given, 1)
    return str(given)


def find_compression(given: Any, element: int) -> Compression:
    """Return the compression of a text, for gradients of `element` bytes a number."""
    name, colon, number = given.partition(":") if isinstance(given, str) else ("", "", "")
    if name == "topk":
        return Compression(element, share=_share_sent(given, number))
    if name == "powersgd":
        if not (number.isdecimal() and int(number[:9]) > 0):
            problem = f"{short_repr(given)} does not say of which rank factors are"
            raise RequestError("compress", f"{problem}; give at least 1, such as powersgd:4")
        return Compression(element, rank=int(number[:9]))
    if name not in _CAST_BITS:
        choose("compress", given, _FORMS)
    if not name.startswith("int"):
        if colon:
            raise RequestError("compress", f"{short_repr(given)}: {name} has no blocks; give {name} alone")
        return Compression(element, _CAST_BITS[name])
    if colon and not (number.isdecimal() and int(number[:18]) > 0):
        problem = f"{short_repr(given)} does not say how many numbers have a common scale"
        raise RequestError("compress", f"{problem}; give at least 1, such as {name}:{_NUMBERS_A_SCALE}")
    return Compression(element, _CAST_BITS[name], int(number[:18] or _NUMBERS_A_SCALE))


def _share_sent(given: str, number: str) -> Fraction:
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    exact = Fraction(repr(share)).limit_denominator(_LARGEST_DENOMINATOR) if 0 < share <= 1 else Fraction(0)
    if not exact:
        problem = f"{short_repr(given)} does not say which share of all numbers is sent"
        raise RequestError("compress", f"{problem}; give more than 0 and at most 1, such as topk:0.01")
    return exact
