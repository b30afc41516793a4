"""Every device's order is the one that torch's own tables have."""

from collections.abc import Iterator

import pytest

from cdpsim.errors import RequestError
from cdpsim.schedules.pipelines import gpipe, interleaved, looped_bfs, one_f_one_b
from tests.helpers.action_player import Named, order_of

pytest.importorskip("torch")

from tests.helpers.torch_tables import torch_order, torch_schedule

# Ours, and how many stages of each device torch's takes.
ORDERS = {
    "GPipe": (gpipe, [1]),
    "1F1B": (one_f_one_b, [1]),
    "Interleaved1F1B": (interleaved, [2, 3, 4]),
    "LoopedBFS": (looped_bfs, [2, 3, 4]),
}


def table(name: str, devices: int, m: int, chunks: int) -> list[list[Named]]:
    return torch_order(torch_schedule(f"Schedule{name}", devices, m, chunks))


def mended(name: str, order: list[list[Named]]) -> list[list[Named]]:
    """torch's table without its known fault: on the last device its 1F1B numbers forwards from 1 on.

    Its runtime, which goes by no table, does not.
    """
    if name == "1F1B":
        order[-1] = [(kind, stage, i - (kind == "F")) for kind, stage, i in order[-1]]
    return order


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name, (_, chunks) in ORDERS.items():
        for v in chunks:
            yield from ((name, devices, m, v) for devices in range(1, 7) for m in range(1, 13))
        yield name, 16, 48, 5 if len(chunks) > 1 else 1


def is_refused(name: str, devices: int, m: int) -> bool:
    """Tell whether torch refuses a shape for a reason that lies in the schedule.

    That its 1F1B wants as many micro-batches as stages does not: its runtime is ready for fewer, and so is Megatron's.
    """
    return name == "Interleaved1F1B" and m % max(1, m // devices) > 0


def test_orders_are_those_of_torchs_tables() -> None:
    for name, devices, m, chunks in cases():
        if is_refused(name, devices, m):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                table(name, devices, m, chunks)
            with pytest.raises(RequestError, match=r"^m: needs m to be a multiple of its .* rounds; m="):
                ORDERS[name][0](devices, m, chunks)
        elif name == "1F1B" and m < devices:
            with pytest.raises(ValueError, match="must be greater than or equal to the number of stages"):
                table(name, devices, m, chunks)
        else:
            theirs = mended(name, table(name, devices, m, chunks))
            assert order_of(ORDERS[name][0](devices, m, chunks)) == theirs, (name, devices, m, chunks)


def test_torchs_1f1b_still_numbers_the_last_forwards_from_1_on() -> None:
    """When it does not, `mended` goes."""
    assert [i for kind, _, i in table("1F1B", 2, 3, 1)[-1] if kind == "F"] == [1, 2, 3]
