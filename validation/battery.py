"""All that one machine can show: many replays by ranks that stay alive, their calibration, one file of what came of it.

On a GPU large models run too, in one process and by ranks that share it; on a CPU they run where that is bearable.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from cdpsim.schedules import SCHEDULES
from validation.optimizer import OPTIMIZERS
from validation.replay import Case
from validation.reportform import Report

ABOUT = "everything that this machine can show, as one file of reports"
MORE = """Replays all nine schedules: with the small transformer in one process at N = 2, 4 and 8; by
ranks at N = 4, with times predicted from a calibration made just before; and with
ViT-B/16 and ResNet-50, and on a GPU a large transformer, where that takes seconds.

FILE.json has every report, the model file that each simulation read, and where and when
it was measured. `python -m validation report` shows it.

example:
  python -m validation battery -o validation/results/battery-cpu.json
"""
TIMEOUT = 300.0


class Battery(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine showed."""

    environment: dict[str, object]
    seconds: float
    models: dict[str, dict[str, Any]]  # by hash, what simulations read
    reports: list[Report]


class Trial(NamedTuple):
    """A case, and whether ranks play it or one process does."""

    case: Case
    alone: bool


def trials(device: str) -> Iterator[Trial]:
    """Say what to replay on a kind of device."""
    small = Case("", 0, steps=3, model="transformer", optimizer=OPTIMIZERS["momentum"], device=device)
    for n in (2, 4, 8):
        for schedule in SCHEDULES:
            yield Trial(replace(small, schedule=schedule, n=n), alone=True)
    for order in ("forward-first", "backward-first"):
        yield Trial(replace(small, schedule="single-cdp", n=4, slot_order=order), alone=True)
    for schedule in SCHEDULES:
        yield Trial(replace(small, schedule=schedule, n=4, model="mlp"), alone=False)
    yield from (_large_on_gpu if device == "cuda" else _large_on_cpu)(device)


def _large_on_cpu(device: str) -> Iterator[Trial]:
    sgd = OPTIMIZERS["sgd"]
    for model in ("vit-b16", "resnet50"):
        large = Case("", 4, steps=2, model=model, optimizer=sgd, batch=2, dtype="float32", device=device)
        for schedule in ("single-dp", "single-cdp"):
            yield Trial(replace(large, schedule=schedule), alone=True)


def _large_on_gpu(device: str) -> Iterator[Trial]:
    sizes = {"transformer": (("width", 1024), ("length", 512), ("heads", 16)), "vit-b16": (), "resnet50": ()}
    for model, own in sizes.items():
        large = Case("", 4, steps=3, model=model, optimizer=OPTIMIZERS["sgd"], dtype="float32", device=device)
        large = replace(large, batch=16, sizes=own)
        for schedule in SCHEDULES:
            yield Trial(replace(large, schedule=schedule), alone=True)
        for schedule in ("single-cdp", "multi-dp", "multi-cdp", "pp-cdp", "mp-cdp", "zero-cdp"):
            yield Trial(replace(large, schedule=schedule), alone=False)
