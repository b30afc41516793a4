"""What torch's pipelining writes is read, and what is written torch's pipelining reads."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cdpsim.schedules.actions import Actions
from cdpsim.schedules.pipelines.alternating import gpipe, one_f_one_b
from cdpsim.schedules.table import read_actions, write_actions
from tests.played import Named, order_of

pytest.importorskip("torch")

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

# Those that torch's runtime goes by a table for; and devices, micro-batches, stages of a device.
TABLES = [
    ("Interleaved1F1B", 3, 6, 3),
    ("LoopedBFS", 2, 5, 2),
    ("InterleavedZeroBubble", 4, 8, 2),
    ("ZBVZeroBubble", 3, 7, 2),
    ("DualPipeV", 4, 10, 2),
]


def torchs(name: str, devices: int, m: int, chunks: int) -> Any:
    """A schedule of torch's, of stages that are none."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, devices, devices * chunks, None
    return getattr(schedules, name)([stage] * chunks, m)


def flat(cell: Any) -> list[Any]:
    """The actions of a cell."""
    return [] if cell is None else [cell] if cell.sub_actions is None else list(cell.sub_actions)


def rows_of(schedule: Any) -> list[list[Named]]:
    """What torch's schedule has each device compute."""
    return [
        [(a.computation_type.value, a.stage_index, a.microbatch_index) for cell in row for a in flat(cell)]
        for row in schedule.pipeline_order.values()
    ]


def pairs_of(schedule: Any) -> list[bool]:
    """Which of it torch overlaps with what comes before."""
    return [k > 0 for row in schedule.pipeline_order.values() for cell in row for k in range(len(flat(cell)))]


@pytest.mark.parametrize(("name", "devices", "m", "chunks"), TABLES)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps_is_read(tmp_path: Path, name: str, devices: int, m: int, chunks: int, form: str) -> None:
    schedule = torchs(f"Schedule{name}", devices, m, chunks)
    schedule._dump_csv(tmp_path / "torch.csv", format=form)
    actions = read_actions(tmp_path / "torch.csv")
    assert order_of(actions) == rows_of(schedule)
    beside = np.zeros(len(actions), dtype=bool) if actions.beside is None else actions.beside
    assert beside.tolist() == pairs_of(schedule)
    assert beside.any() == (name == "DualPipeV")


def assert_torch_loads(path: Path, actions: Actions, m: int) -> None:
    chunks = (int(actions.stage.max()) + 1) // actions.devices
    schedule = torchs("_PipelineScheduleRuntime", actions.devices, m, chunks)
    schedule.pipeline_order = {}
    schedule._load_csv(path)
    assert rows_of(schedule) == order_of(actions)
    assert pairs_of(schedule) == ([False] * len(actions) if actions.beside is None else actions.beside.tolist())


@pytest.mark.parametrize(("name", "devices", "m", "chunks"), TABLES)
def test_torch_loads_what_was_read_from_it_and_is_written(
    tmp_path: Path, name: str, devices: int, m: int, chunks: int
) -> None:
    torchs(f"Schedule{name}", devices, m, chunks)._dump_csv(tmp_path / "torch.csv", format="compute_only")
    actions = read_actions(tmp_path / "torch.csv")
    write_actions(actions, tmp_path / "ours.csv")
    assert_torch_loads(tmp_path / "ours.csv", actions, m)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_torch_loads_what_it_has_no_table_of(tmp_path: Path, order: Any) -> None:
    write_actions(order(4, 6), tmp_path / "ours.csv")
    assert_torch_loads(tmp_path / "ours.csv", order(4, 6), 6)
