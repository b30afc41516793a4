"""Buckets: which gradients go in one message.

Gradients come in the order in which backwards make them. None is ever split. Published rules:

    torch      closed as soon as it has the least size: 1 MiB of the first bucket, 25 MiB of all others
               (`compute_bucket_assignment_by_size`, with the sizes of `DistributedDataParallel`)
    megatron   closed as soon as it has the least number of elements: 40 million, or a million for each rank
               (Megatron-LM, `DistributedDataParallelConfig.bucket_size`)
    deepspeed  closed before it would have more than 500 million elements (DeepSpeed, `reduce_bucket_size`)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cdpsim.errors import RequestError, short_repr
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
        """Return the buckets of a runtime, for gradients of so many bytes an element that so many ranks sum."""
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
    def of_stages(cls, size: Ints) -> "Units":
        """Return a unit for each stage."""
        stage = np.arange(len(size), dtype=np.int32)
        return cls(stage, stage, size, *np.zeros((2, len(size)), dtype=np.int64))

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
