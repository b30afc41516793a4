"""Every device's order is the one that torch's own tables have."""

from collections.abc import Iterator

import pytest

from cdpsim.errors import RequestError
from cdpsim.schedules.pipelines.alternating import gpipe, interleaved, looped_bfs, one_f_one_b
from tests.played import Named, order_of

pytest.importorskip("torch")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

# Ours, and how many stages of each device torch's takes.
ORDERS = {
    "GPipe": (gpipe, [1]),
    "1F1B": (one_f_one_b, [1]),
    "Interleaved1F1B": (interleaved, [2, 3, 4]),
    "LoopedBFS": (looped_bfs, [2, 3, 4]),
}


def torch_order(name: str, devices: int, m: int, chunks: int) -> list[list[Named]]:
    """What torch's table has each device compute."""
    return [
        [
            (str(action.computation_type.value), action.stage_index, action.microbatch_index)
            for action in row
            if action is not None and action.microbatch_index is not None  # REDUCE_GRAD has none
        ]
        for row in get_schedule_ops(name, devices, m, num_stages_per_rank=chunks)
    ]


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
    """What torch refuses for a reason that lies in the schedule.

    That its 1F1B wants as many micro-batches as stages does not: its runtime is ready for fewer, and so is Megatron's.
    """
    return name == "Interleaved1F1B" and m % max(1, m // devices) > 0


def test_orders_are_those_of_torchs_tables() -> None:
    for name, devices, m, chunks in cases():
        if is_refused(name, devices, m):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_order(name, devices, m, chunks)
            with pytest.raises(RequestError, match=r"^m: needs m to be a multiple of its .* rounds; m="):
                ORDERS[name][0](devices, m, chunks)
        elif name == "1F1B" and m < devices:
            with pytest.raises(ValueError, match="must be greater than or equal to the number of stages"):
                torch_order(name, devices, m, chunks)
        else:
            theirs = mended(name, torch_order(name, devices, m, chunks))
            assert order_of(ORDERS[name][0](devices, m, chunks)) == theirs, (name, devices, m, chunks)


def test_torchs_1f1b_still_numbers_the_last_forwards_from_1_on() -> None:
    """When it does not, `mended` goes."""
    assert [i for kind, _, i in torch_order("1F1B", 2, 3, 1)[-1] if kind == "F"] == [1, 2, 3]
