"""Cut layers into consecutive stages. A cut is the layer with which a stage begins; the first stage has none."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add

from cdpsim.errors import RequestError, choose

PARTITIONS = ("flops", "authors", "time", "memory")

Cuts = tuple[int, ...]


def balanced(costs: Sequence[int], n: int, closing: Sequence[int] | None = None) -> Cuts:
    """Cut layers so that the largest stage costs as little as it can, by dynamic programming over all cuts.

    A stage costs what its layers do, and `closing` of its last layer on top. Of several such cuts those are taken whose
    stages' costs have the smallest sum of squares, and of these again those that come first in order.

    >>> balanced([1] * 12, 5)
    (2, 4, 6, 9)
    """
    check_stages(n, len(costs))
    sums = [0, *accumulate(costs)]

    def cost(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (closing[end - 1] if closing else 0)

    def square(begin: int, end: int) -> float:
        return cost(begin, end) ** 2 if cost(begin, end) <= bound else inf

    bound, _ = _best(len(costs), n, cost, max)
    _, cuts = _best(len(costs), n, square, add)
    return cuts


def _best(
    layers: int, n: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, Cuts]:
    """Find the least that the joint costs of n stages can be, and the first cuts in order that reach it."""
    best: dict[int, tuple[float, Cuts]] = {end: (cost(0, end), ()) for end in range(1, layers + 1)}
    for stage in range(1, n):
        best = {
            end: min((join(value, cost(cut, end)), (*cuts, cut)) for cut, (value, cuts) in best.items() if cut < end)
            for end in range(stage + 1, layers + 1)
        }
    return best[layers]


def authors(flops: Sequence[int], n: int) -> Cuts:
    """Cut as the paper's authors do: a stage ends before the layer with which the sum reaches its share of the total.

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
    """Read cuts as an option gives them, such as "3,7,12".

    >>> read_cuts("3,7,12", 14)
    (3, 7, 12)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        choose("partition", text, (*PARTITIONS, "3,7,12"))  # refuses it
    cuts = tuple(map(int, words))
    if any(begin >= end for begin, end in pairwise((0, *cuts, layers))):
        problem = f"cuts must increase from 1 at least to {layers - 1} at most: there are {layers} layers"
        raise RequestError(f"partition {text!r}", problem)
    return cuts


def check_stages(n: int, layers: int) -> None:
    """Refuse more stages than layers."""
    if not 1 <= n <= layers:
        raise RequestError(f"n={n}", f"must be at least 1 and at most {layers}, the number of the model's layers")
