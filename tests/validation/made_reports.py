"""Reports of replays that never took place, and reports in files."""

from dataclasses import dataclass
from pathlib import Path

from validation.report.schema import (
    Amount,
    Curve,
    DeviceMemory,
    DeviceTime,
    Memory,
    MessageCount,
    ParameterComparison,
    Report,
    Time,
    Total,
    load_report,
    relative_error,
)


def read_report(path: str | Path) -> Report:
    """Return the report of a replay in a file."""
    found = load_report(path)
    assert isinstance(found, Report)
    return found


@dataclass(frozen=True)
class Made:
    """A report of a replay that never was: each stage's activations weigh `stage` bytes."""

    schedule: str = "multi-cdp"
    n: int = 4
    model: str = "mlp"
    stage: int = 4096
    off: float = 0.0
    seconds: float | None = None
    agree: bool = True

    def report(self) -> Report:
        cyclic = self.schedule.endswith("-cdp")
        slots = range(6 * self.n)
        held = [n_held(self.n, slot, cyclic) * self.stage for slot in slots]
        measured = [round(amount / (1 + self.off)) for amount in held]
        error = relative_error(max(held), max(measured))
        devices = [
            DeviceMemory(
                device=d,
                simulated_bytes=self.n * self.stage,
                measured_bytes=round(self.n * self.stage / (1 + self.off)),
                relative_error=relative_error(self.n * self.stage, round(self.n * self.stage / (1 + self.off))),
                categories={"activations": Amount(simulated_bytes=1, measured_bytes=1)},
                parts_at=None,
            )
            for d in range(self.n)
        ]
        return Report(
            request={"schedule": self.schedule, "n": self.n, "model": self.model, "device": "cpu", "backend": None},
            environment={"torch": "2"},
            parameters=ParameterComparison(max_abs_difference=0.0, bit_equal=True, tolerance=0.0),
            memory=Memory(
                devices=devices,
                max_relative_error=max(abs(d.relative_error) for d in devices),
                total=Total(simulated_bytes=max(held), measured_bytes=max(measured), relative_error=error),
                curve=Curve(slot=list(slots), simulated_bytes=held, measured_bytes=measured),
                tolerance=0.01,
                method="storages",
            ),
            messages=MessageCount(
                simulated=24, measured=24 if self.agree else 23, bytes_simulated=9, bytes_measured=9, agree=self.agree
            ),
            time=None if self.seconds is None else made_time(self.seconds, self.off),
            ok=self.agree,
        )


def n_held(n: int, slot: int, cyclic: bool) -> int:
    """Stage-activations that all micro-batches hold in a slot."""
    starts = [2 * i * cyclic + 2 * n * t for i in range(n) for t in range(3)]
    phases = [slot - start for start in starts if 0 <= slot - start < 2 * n]
    return sum(min(phase + 1, 2 * n - phase) for phase in phases)


def made_time(seconds: float, off: float) -> Time:
    busy = DeviceTime(device=0, simulated_busy_seconds=1.0, measured_busy_seconds=1.0, relative_error=0.0)
    return Time(
        simulated_seconds=seconds * (1 + off),
        measured_seconds=seconds,
        relative_error=off,
        devices=[busy],
        calibration="cluster.toml",
    )
