"""Torch's own tables of pipelines' orders; tests import this module only where torch is installed."""

from functools import cache
from typing import Any
from unittest import mock

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from tests.helpers.action_player import Named


@cache
def no_stage() -> Any:
    """Return a stage of which schedules are made; making it takes long."""
    return mock.create_autospec(PipelineStage, instance=True)


def torch_schedule(name: str, devices: int, m: int, chunks: int) -> Any:
    """Make one of torch's schedules in the way of its visualizer."""
    stage = no_stage()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, devices, devices * chunks, None
    of = getattr(schedules, name)
    return of(stage if issubclass(of, schedules.PipelineScheduleSingle) else [stage] * chunks, m)


def torch_cells(schedule: Any) -> list[list[list[Named]]]:
    """Return the actions of each device, those that overlap in one cell."""
    rows = schedule.pipeline_order.values()
    cells = [[cell.sub_actions or [cell] for cell in row if cell is not None] for row in rows]
    named = [
        [[(a.computation_type.value, a.stage_index, a.microbatch_index) for a in cell] for cell in row] for row in cells
    ]
    return [[cell for cell in row if cell[0][0] != "REDUCE_GRAD"] for row in named]


def torch_order(schedule: Any) -> list[list[Named]]:
    """Return the actions of each device, one after another."""
    return [[action for cell in row for action in cell] for row in torch_cells(schedule)]


def torch_pairs(schedule: Any) -> list[bool]:
    """Return, for each of these actions, whether it overlaps with the one before."""
    return [k > 0 for row in torch_cells(schedule) for cell in row for k in range(len(cell))]
