"""Exchanges within groups of ranks that share tasks, and the rates of a run in its steady state, of each rank, too."""

from collections.abc import Iterator
from functools import lru_cache
from math import fsum, isclose
from typing import Any

import numpy as np

from cdpsim.model import Model
from cdpsim.model.layers import ALL_REDUCE, ALL_TO_ALL, Exchange, Layers
from cdpsim.numeric.columns import Ints
from cdpsim.program import Kind, Program
from cdpsim.request import Request
from cdpsim.timing.costs import (
    Machine,
    gather_of,
    gathering_tasks,
    kinds_of_times,
    parts_of_backward,
    sums_of_step,
)
from cdpsim.trace.table import ExchangeRow, Table, exchange_table

KindOfStage = tuple[int, int]  # a kind of task, and a stage
Exchanged = tuple[Exchange, float, float]  # how many times a task does it, and what each adds to the task


def table_of_exchanges(program: Program, request: Request) -> Table[ExchangeRow] | None:
    """Return a row for each exchange of each stage and kind of task; None where no group of ranks shares tasks."""
    machine = machine_of_groups(request)
    if machine is None:
        return None
    counts: dict[tuple[int, int, Exchange, float], float] = {}
    for place, tasks, (each, times, exposed) in _all_exchanges(program, request, machine):
        key = (*place, each._replace(beside=None), exposed)
        counts[key] = counts.get(key, 0) + times * tasks
    rows: list[dict[str, Any]] = [
        {
            "stage": stage,
            "kind": Kind(kind).name,
            **{name: getattr(each, name) for name in ("axis", "op", "size")},
            "sent": sent_by_rank(each, machine.mesh.ranks(each.axis)),
            "times": _as_whole(times * program.fold / program.steps),
            "seconds": machine.exchange_seconds(each),
            "exposed": exposed,
        }
        for (kind, stage, each, exposed), times in counts.items()
    ]
    return exchange_table(sorted(rows, key=lambda row: (row["stage"], "FBWU".index(row["kind"]), *[*row.values()][2:])))


def _as_whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number


def exchanged_bytes(program: Program, request: Request) -> Ints:
    """Return the bytes that one rank sends to others of its group in each task."""
    sent, machine = np.zeros(len(program.tasks), dtype=np.int64), machine_of_groups(request)
    if machine is None:
        return sent
    of_place = np.zeros((len(Kind) + 1, len(request.counted_model.stages)), dtype=np.int64)
    for place, (each, times, _) in _of_stages(request, machine):
        of_place[place] += round(times) * sent_by_rank(each, machine.mesh.ranks(each.axis))
    sent += of_place[kinds_of_times(program), program.tasks.stage]
    if request.model.mesh.gathers_boundaries:
        message, reader = gathering_tasks(program)
        np.add.at(sent, reader, program.messages.size[message].astype(np.int64) * (machine.mesh.tensor - 1))
    return sent


def machine_of_groups(request: Request) -> Machine | None:
    """Return the machine of groups of ranks that share tasks; None where each task is of one rank."""
    return request.pricing if request.pricing is not None and request.model.mesh.axes else None


def sent_by_rank(exchange: Exchange, ranks: int) -> int:
    """Return the bytes that each of some ranks sends in an exchange, in the parts that a ring cuts the tensor into."""
    if exchange.op == ALL_TO_ALL:
        return (ranks - 1) * exchange.size // ranks**2
    return (1 + (exchange.op == ALL_REDUCE)) * (ranks - 1) * exchange.size // ranks


def _all_exchanges(
    program: Program, request: Request, machine: Machine
) -> Iterator[tuple[KindOfStage, int, Exchanged]]:
    """Yield each exchange with the number of tasks of its kind and stage in the run."""
    kind, stage = kinds_of_times(program), program.tasks.stage
    counts = np.zeros((len(Kind) + 1, len(request.counted_model.stages)), dtype=np.int64)
    np.add.at(counts, (kind, stage), 1)
    for place, found in _of_stages(request, machine):
        if counts[place]:
            yield place, int(counts[place]), found
    if request.model.mesh.gathers_boundaries:
        message, reader = gathering_tasks(program)
        columns = np.stack([kind[reader], stage[reader], program.messages.size[message]])
        rows, many = np.unique(columns, axis=1, return_counts=True)
        for (which, where, size), tasks in zip(rows.T.tolist(), many.tolist(), strict=True):
            gather = gather_of(size, request.model.mesh)
            yield (which, where), tasks, (gather, 1, machine.exchange_seconds(gather))


def _of_stages(request: Request, machine: Machine) -> Iterator[tuple[KindOfStage, Exchanged]]:
    """Yield the exchanges of the operations of each stage's tasks, and the sum of partial gradients."""
    splits = request.schedule.splits(request.shape)
    for j, stage in enumerate(request.counted_model.stages):
        first, weights = parts_of_backward(stage)
        whole = not splits or weights == stage.backward
        parts = {Kind.B: first, Kind.W: weights} if splits else {Kind.B: stage.backward}
        for kind, part in ({Kind.F: stage.forward} | parts).items():
            for each, times in getattr(part, "exchanges", ()):
                if times:
                    yield (kind, j), (each, times, machine.exposed(each, whole=whole))
        for each in sums_of_step(stage, machine):
            yield (Kind.U, j), (each, 1, machine.exchange_seconds(each))


def rates_of_run(request: Request, rate: float, devices: int) -> dict[str, Any]:
    """Return all rates of a run with this rate of micro-batches, and what share of the devices' peak they take.

    Where a group of ranks is a device, its FLOP and its peak are those of one of them.
    """
    model = request.model
    samples = rate * model.samples if model.samples else None
    tokens = samples * model.tokens if samples and model.tokens else None
    peak, computed = request.cluster.peak_flops(devices, model.precision), model.computed_flop
    useful, hardware = _useful_and_hardware(model)
    return {
        "micro_batch_rate": rate,
        "sample_rate": samples,
        "sample_time": 1 / samples if samples else None,
        "token_rate": tokens,
        "per_device": (tokens or samples or rate) / (devices * model.mesh.team),
        "mfu": useful * rate / peak if useful and peak else None,
        "hfu": hardware * rate / peak if hardware and peak else None,
        "flops": computed * rate / devices if computed else None,
    }


def _useful_and_hardware(model: Model) -> tuple[float | None, float | None]:
    """Return the FLOP of a micro-batch that one rank has to compute, for MFU, and those of HFU.

    The first leave out copies and padding in a group. The second take a core that is computed again three times where
    it is not fused and nothing else is, as Korthikanti et al. 2022 do (appendix A: s/3h in place of 2s/9h).
    """
    flop, computed, ranks = model.flop, model.computed_flop, model.mesh.team
    if model.layers is None or flop is None or computed is None:
        return flop, computed
    whole, core = _whole_flop(model.layers, model.samples or 1, model.precision)
    thrice = model.layers.attention == "eager" and isclose(computed - flop, core / ranks, rel_tol=1e-9)
    return flop if ranks == 1 else whole / ranks, computed + 2 * core / ranks * thrice


@lru_cache(maxsize=64)
def _whole_flop(layers: Layers, samples: int, precision: str) -> tuple[float, float]:
    """Return the FLOP of a model of layers on one rank, and those of a forward of its cores of attention."""
    model = Model.of_layers(layers, samples=samples, precision=precision)
    assert model.flop is not None, "layers are of operations"
    return model.flop, fsum(float(stage.attention_forward or 0.0) for stage in model.stages)
