"""The orders that Python declares, each with the cases for which it is defined."""

from collections.abc import Callable
from typing import NamedTuple

from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines.alternating import gpipe, interleaved, looped_bfs, one_f_one_b
from cdpsim.schedules.pipelines.both_ways import chimera, gems


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
