"""Compression of gradients that data ranks sum: what each rank sends of its own.

bf16, fp16   2 bytes a number (torch's `bf16_compress_hook` and `fp16_compress_hook`)
int8, int4   1 byte, or half of one, and a scale of 4 bytes for each block: of 512 numbers, or as `int8:128` says
             (ZeRO++, Wang et al. 2023; the blocks are those of torch's `quantization_perchannel_hook`)
topk:F       the largest F of all numbers (0 < F <= 1), each with an index of 4 bytes; the others stay, and are
             added to the next gradients (Lin et al. 2018)
powersgd:R   of each matrix two factors of rank R, which are summed one after the other (Vogels et al. 2019; torch's
             `powerSGD_hook`); other tensors, and matrices that factors would not make half as large, as they are
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from cdpsim.errors import RequestError, choose, short_repr
from cdpsim.numeric.columns import Ints

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
    """Return the compression that a text says, of gradients of so many bytes a number."""
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
