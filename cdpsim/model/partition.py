"""Cut layers into consecutive stages. A cut is the layer with which a stage begins; the first stage has none."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from cdpsim.errors import RequestError

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

    return _first_of_the_best(len(costs), n, cost, _least(len(costs), n, cost))


def check_stages(n: int, layers: int) -> None:
    """Refuse more stages than layers."""
    if not 1 <= n <= layers:
        raise RequestError(f"n={n}", f"must be at least 1 and at most {layers}, the number of the model's layers")


def _least(layers: int, n: int, cost: Callable[[int, int], int]) -> int:
    """Find what the largest of n stages costs at least."""
    best = {end: cost(0, end) for end in range(1, layers + 1)}
    for stage in range(1, n):
        best = {end: _least_with_one_more(best, stage, end, cost) for end in range(stage + 1, layers + 1)}
    return best[layers]


def _least_with_one_more(best: dict[int, int], stage: int, end: int, cost: Callable[[int, int], int]) -> int:
    """Add a stage that ends there; the earlier it begins, the more it costs, so that not all cuts need be tried."""
    least = max(best[end - 1], cost(end - 1, end))
    for cut in range(end - 2, stage - 1, -1):
        own = cost(cut, end)
        if own >= least:
            break
        least = min(least, max(best[cut], own))
    return least


def _first_of_the_best(layers: int, n: int, cost: Callable[[int, int], int], bound: int) -> Cuts:
    """Find the cuts with the smallest sum of squares, no stage above the bound; the first of them in order."""
    best: dict[int, tuple[int, Cuts]] = {
        end: (cost(0, end) ** 2, ()) for end in range(1, layers + 1) if cost(0, end) <= bound
    }
    for stage in range(1, n):
        more: dict[int, tuple[int, Cuts]] = {}
        for end in range(stage + 1, layers + 1):
            for cut in range(end - 1, stage - 1, -1):
                own = cost(cut, end)
                if own > bound:
                    break
                if cut in best and (end not in more or best[cut][0] + own**2 <= more[end][0]):
                    found = (best[cut][0] + own**2, (*best[cut][1], cut))
                    more[end] = min(found, more.get(end, found))
        best = more
    return best[layers][1]
