"""CSV files of torch's pipelining are read, and the CSV files written here are read by torch's pipelining."""

from pathlib import Path
from typing import Any

import pytest

from cdpsim.schedules.actions import Actions, read_actions, write_actions
from cdpsim.schedules.pipelines import gpipe, one_f_one_b
from tests.helpers.action_player import order_of, pairs_of

pytest.importorskip("torch")

from tests.helpers.torch_tables import torch_order, torch_pairs, torch_schedule

# Those that torch's runtime goes by a table for; and devices, micro-batches, stages of a device.
TABLES = [
    ("Interleaved1F1B", 3, 6, 3),
    ("LoopedBFS", 2, 5, 2),
    ("InterleavedZeroBubble", 4, 8, 2),
    ("ZBVZeroBubble", 3, 7, 2),
    ("DualPipeV", 4, 10, 2),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "devices", "m", "chunks"), TABLES)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps_is_read(tmp_path: Path, name: str, devices: int, m: int, chunks: int, form: str) -> None:
    schedule = torch_schedule(f"Schedule{name}", devices, m, chunks)
    schedule._dump_csv(tmp_path / "torch.csv", format=form)
    actions = read_actions(tmp_path / "torch.csv")
    assert order_of(actions) == torch_order(schedule)
    assert pairs_of(actions) == torch_pairs(schedule)
    assert any(pairs_of(actions)) == (name == "DualPipeV")


def assert_torch_loads(path: Path, actions: Actions, m: int) -> None:
    chunks = (int(actions.stage.max()) + 1) // actions.devices
    schedule = torch_schedule("_PipelineScheduleRuntime", actions.devices, m, chunks)
    schedule.pipeline_order = {}
    schedule._load_csv(path)
    assert torch_order(schedule) == order_of(actions)
    assert torch_pairs(schedule) == pairs_of(actions)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "devices", "m", "chunks"), TABLES)
def test_torch_loads_what_was_read_from_it_and_is_written(
    tmp_path: Path, name: str, devices: int, m: int, chunks: int
) -> None:
    torch_schedule(f"Schedule{name}", devices, m, chunks)._dump_csv(tmp_path / "torch.csv", format="compute_only")
    actions = read_actions(tmp_path / "torch.csv")
    write_actions(actions, tmp_path / "ours.csv")
    assert_torch_loads(tmp_path / "ours.csv", actions, m)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_torch_loads_what_it_has_no_table_of(tmp_path: Path, order: Any) -> None:
    write_actions(order(4, 6), tmp_path / "ours.csv")
    assert_torch_loads(tmp_path / "ours.csv", order(4, 6), 6)
