"""Every device's order is that of torch's own tables, pairs that overlap included."""

from collections.abc import Callable
from itertools import product

import pytest

from cdpsim.errors import RequestError
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines import dualpipev, interleaved_zero_bubble, zbv
from tests.helpers.action_player import together

pytest.importorskip("torch")

from tests.helpers.torch_tables import torch_cells, torch_schedule

ORDERS: dict[str, Callable[[int, int, int], Actions]] = {
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv,
    "DualPipeV": dualpipev,
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_those_of_torchs_tables_and_what_torch_refuses_is_refused(name: str) -> None:
    """Without exception, also where micro-batches are fewer than devices."""
    large = 16, 48, 5 if name == "InterleavedZeroBubble" else 2
    for devices, m, chunks in [*product(range(1, 7), range(1, 13), range(2, 5)), large]:
        try:
            theirs = torch_cells(torch_schedule(f"Schedule{name}", devices, m, chunks))
        except ValueError:
            with pytest.raises(RequestError, match=r"^(m|chunks): needs "):
                ORDERS[name](devices, m, chunks)
        else:
            assert together(ORDERS[name](devices, m, chunks), pairs=True) == theirs, (devices, m, chunks)
