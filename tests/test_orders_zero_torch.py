"""Every device's order is that of torch's own tables, pairs that overlap included."""

from collections.abc import Callable
from itertools import product

import pytest

from cdpsim.errors import RequestError
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.pipelines.fold import dualpipev, zbv
from cdpsim.schedules.pipelines.zero_bubble import interleaved_zero_bubble

pytest.importorskip("torch")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

Order = list[list[tuple[str, int, int | None, bool]]]  # of each device: kind, stage, micro-batch, beside the one before
ORDERS: dict[str, Callable[[int, int, int], Actions]] = {
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv,
    "DualPipeV": dualpipev,
}


def torch_order(name: str, devices: int, m: int, chunks: int) -> Order:
    """What torch's table has each device compute, of overlapped actions the second beside the first."""
    return [
        [
            (str(part.computation_type.value), part.stage_index, part.microbatch_index, place > 0)
            for action in row
            if action is not None and action.computation_type.name != "REDUCE_GRAD"
            for place, part in enumerate(action.sub_actions or [action])
        ]
        for row in get_schedule_ops(name, devices, m, num_stages_per_rank=chunks)
    ]


def our_order(actions: Actions) -> Order:
    """The same of ours."""
    kind = [Action(k).name for k in actions.kind.tolist()]
    beside = [False] * len(actions) if actions.beside is None else actions.beside.tolist()
    rows = list(zip(kind, actions.stage.tolist(), actions.micro_batch.tolist(), beside, strict=True))
    return [rows[low:high] for low, high in zip(actions.first[:-1], actions.first[1:], strict=True)]


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
            assert our_order(ORDERS[name](devices, m, chunks)) == theirs, (devices, m, chunks)
