"""The orders that Python declares, each with the cases for which it is defined."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from hypothesis import strategies as st

from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines import chimera, gems, gpipe, interleaved, looped_bfs, one_f_one_b


class Declared(NamedTuple):
    """An order, and the numbers of devices, micro-batches and chunks for which it is defined."""

    of: Callable[[int, int, int], Actions]
    is_meant: Callable[[int, int, int], bool]


def one_chunk(devices: int, m: int, chunks: int) -> bool:
    return chunks == 1


ORDERS = {
    "gpipe": Declared(gpipe, one_chunk),
    "1f1b": Declared(one_f_one_b, one_chunk),
    "interleaved": Declared(interleaved, lambda devices, m, chunks: m % max(1, m // devices) == 0),
    "looped-bfs": Declared(looped_bfs, lambda devices, m, chunks: True),
    "chimera": Declared(chimera, lambda devices, m, chunks: chunks == 1 and devices % 2 == 0),
    "gems": Declared(gems, one_chunk),
}


def cases(devices: int, m: int, chunks: int, *, meant: bool = True) -> st.SearchStrategy[tuple[str, int, int, int]]:
    """Draw an order and sizes, up to these, for which it is defined; or for which it is not."""
    sizes = list(product(range(1, devices + 1), range(1, m + 1), range(1, chunks + 1)))
    found = [[(name, *size) for size in sizes if order.is_meant(*size) == meant] for name, order in ORDERS.items()]
    return st.one_of([st.sampled_from(of_one) for of_one in found if of_one])
