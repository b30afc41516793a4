"""Every device's order is that of torch's own tables, pairs that overlap included."""

from collections.abc import Callable
from itertools import product

import pytest

from cdpsim.errors import RequestError
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines.fold import dualpipev, zbv
from cdpsim.schedules.pipelines.zero_bubble import interleaved_zero_bubble
from tests.played import together

pytest.importorskip("torch")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

ORDERS: dict[str, Callable[[int, int, int], Actions]] = {
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv,
    "DualPipeV": dualpipev,
}


def torch_order(name: str, devices: int, m: int, chunks: int) -> list[list[list[tuple[str, int, int | None]]]]:
    """What torch's table has each device compute, two that overlap together."""
    return [
        [
            [
                (str(part.computation_type.value), part.stage_index, part.microbatch_index)
                for part in action.sub_actions or [action]
            ]
            for action in row
            if action is not None and action.computation_type.name != "REDUCE_GRAD"
        ]
        for row in get_schedule_ops(name, devices, m, num_stages_per_rank=chunks)
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_those_of_torchs_tables_and_what_torch_refuses_is_refused(name: str) -> None:
    """Without exception, also where micro-batches are fewer than devices."""
    large = 16, 48, 5 if name == "InterleavedZeroBubble" else 2
    for devices, m, chunks in [*product(range(1, 7), range(1, 13), range(2, 5)), large]:
        try:
            theirs = torch_order(name, devices, m, chunks)
        except ValueError:
            with pytest.raises(RequestError, match=r"^(m|chunks): needs "):
                ORDERS[name](devices, m, chunks)
        else:
            assert together(ORDERS[name](devices, m, chunks), pairs=True) == theirs, (devices, m, chunks)
