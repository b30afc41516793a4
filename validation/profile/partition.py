"""Cuts of layers into stages beside the exact ones: as the paper's authors do, and as given."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from cdpsim.errors import RequestError, choose
from cdpsim.model import Cuts, check_stages

PARTITIONS = ("flops", "authors", "time", "memory")


def authors(flops: Sequence[int], n: int) -> Cuts:
    """Return the cuts of the paper's authors: a stage ends before the layer with which the sum reaches its share.

    Their code (`equisum_partition`) has an entry for each parameter tensor, a bias counting as the square root of its
    module's FLOP; here an entry is a layer. It can leave a stage empty, which is refused.

    >>> authors([1, 1, 1, 1, 4], 2)
    (3,)
    """
    check_stages(n, len(flops))
    sums = list(accumulate(flops))
    share = sums[-1] // n
    cuts = tuple(bisect_left(sums, k * share) for k in range(1, n))
    for stage, (begin, end) in enumerate(pairwise((0, *cuts, len(flops)))):
        if begin == end:
            problem = f"the authors' heuristic leaves stage {stage} of {n} without a layer; take flops, or other cuts"
            raise RequestError("partition", problem)
    return cuts


def read_cuts(text: str, layers: int) -> Cuts:
    """Return the cuts in an option's value, such as "3,7,12".

    >>> read_cuts("3,7,12", 14)
    (3, 7, 12)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        choose("partition", text, (*PARTITIONS, "3,7,12"))  # which refuses it
    cuts = tuple(map(int, words))
    if any(begin >= end for begin, end in pairwise((0, *cuts, layers))):
        problem = f"cuts must increase from 1 at least to {layers - 1} at most: there are {layers} layers"
        raise RequestError(f"partition {text!r}", problem)
    return cuts
