"""Comparison of memory: of the devices while they played, and of the simulation, slot by slot."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdpsim.program import Category
from cdpsim.trace.metrics import memory

from ..replay.contents import BEGINNING
from ..replay.plan import Plan
from ..replay.watch import Reading
from ..report.schema import Amount, Curve, DeviceMemory, Divergence, Memory, Total, compared

MemoryBySlot = NDArray[np.int64]  # by device, slot and category: the peak in that slot


def simulated_memory(plan: Plan) -> MemoryBySlot:
    """Return the memory of the program's buffers where every task takes one slot and every message no time."""
    start, end = plan.slots
    curve = memory.memory_by_category(plan.program, start, end)
    held: MemoryBySlot = np.zeros((plan.program.devices, int(end.max()), len(Category)), dtype=np.int64)
    # A step function: each row holds until the next one of its device and category.
    columns = (curve[name].tolist() for name in ("device", "category", "time", "size"))
    for device, category, time, size in zip(*columns, strict=True):
        held[device, time:, category] = size
    return held


def measured_memory(plan: Plan, readings: Sequence[Sequence[Reading]]) -> MemoryBySlot:
    """Return the memory in the readings of devices."""
    held: MemoryBySlot = np.zeros((plan.program.devices, int(plan.slots[1].max()), len(Category)), dtype=np.int64)
    for device, own in enumerate(readings):
        for begin, end, levels in own:
            held[device, begin:end] = levels
    return held


def compare_memory(plan: Plan, readings: Sequence[Sequence[Reading]], *, tolerance: float) -> Memory:
    """Compare all categories by device and slot, and of all devices together activations and the sum of categories."""
    ours, theirs = simulated_memory(plan), measured_memory(plan, readings)
    devices = [_device(plan, device, ours[device], theirs[device], tolerance) for device in range(len(ours))]
    curves = [held[:, :, Category.ACTIVATIONS].sum(axis=0) for held in (ours, theirs)]
    return Memory(
        devices=devices,
        max_relative_error=max(abs(device.relative_error) for device in devices),
        total=_total_of(*curves),
        curve=Curve(
            slot=list(range(len(curves[0]))), simulated_bytes=curves[0].tolist(), measured_bytes=curves[1].tolist()
        ),
        tolerance=tolerance,
        method="storages",
        together=_total_of(*(held.sum(axis=(0, 2)) for held in (ours, theirs))),
    )


def is_within(held: Memory) -> bool:
    """Return whether memory is within tolerance in every slot: all categories, and their sum."""
    amounts = [amount for device in held.devices for amount in device.categories.values()]
    within = all(
        amount.largest_difference <= held.tolerance * max(amount.simulated_bytes, amount.measured_bytes)
        for amount in amounts
    )
    totals = [held.total] if held.together is None else [held.total, held.together]
    return within and all(abs(total.relative_error) <= held.tolerance for total in totals)


def _total_of(ours: MemoryBySlot, theirs: MemoryBySlot) -> Total:
    return Total(**compared(int(ours.max()), int(theirs.max()), "bytes"))


def _device(plan: Plan, device: int, ours: MemoryBySlot, theirs: MemoryBySlot, tolerance: float) -> DeviceMemory:
    peaks = [held.max(axis=0).tolist() for held in (ours, theirs)]
    apart = abs(ours - theirs)
    most = [peak[Category.ACTIVATIONS] for peak in peaks]
    parts = np.argwhere(apart > tolerance * np.maximum(*peaks))
    return DeviceMemory(
        device=device,
        **compared(most[0], most[1], "bytes"),
        categories={
            category.name.lower(): Amount(
                simulated_bytes=peaks[0][category],
                measured_bytes=peaks[1][category],
                largest_difference=int(apart[:, category].max()),
            )
            for category in Category
        },
        parts_at=_parts_at(plan, device, int(parts[0][0]), int(parts[0][1]), (ours, theirs)) if len(parts) else None,
    )


def _parts_at(plan: Plan, device: int, slot: int, category: int, both: Sequence[MemoryBySlot]) -> Divergence:
    """Return the first difference of two curves, by slot and the device's task in it or before it."""
    tasks = plan.program.lane_tasks[plan.program.tasks.device[plan.program.lane_tasks] == device]
    begun = tasks[plan.slots[0][tasks] <= slot]
    ours, theirs = (int(held[slot, category]) for held in both)
    return Divergence(
        task=plan.name_of(int(begun[-1]) if len(begun) else BEGINNING),
        slot=slot,
        simulated_bytes=ours,
        measured_bytes=theirs,
        category=Category(category).name.lower(),
    )
