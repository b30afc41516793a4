"""Sweeps: a million points named, a million rows appended and read again.

As a program, `python -m benchmarks.test_sweep POINTS`, it times a sweep by one worker and by two.
"""

import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cdpsim.studies.sweep.points import Sweep, sweep_of
from cdpsim.studies.sweep.running import answer, run_part
from cdpsim.studies.sweep.store import RowFile, Store, row_of, save_study

MILLION = 1_000_000


def spread(points: int) -> Sweep:
    """`1f1b` of 8 x 16 with real costs, on that many clusters."""
    spaced = {"count": points // 100, "spacing": "log"}
    network = {"of": "cluster.topology.network.bandwidth", "from": "10 GB/s", "to": "100 GB/s", **spaced}
    achieved = {"of": "cluster.devices.achieved", "from": 0.2, "to": 0.695, "step": 0.005}
    fixed = {"model": "gpt2", "cluster": "a100-nodes", "schedule": "1f1b", "n": 8, "m": 16}
    return sweep_of({"fixed": fixed, "axes": {"network": network, "share": achieved}}, "sweep")


def named(sweep: Sweep) -> int:
    """Enumerate all points and name each."""
    return sum(len(sweep.name(index)) for index in sweep.in_working_order())


def filled(folder: Path, sweep: Sweep) -> int:
    """Write a row of each point, all with the metrics of one; return their bytes."""
    kind, cells = answer(sweep, next(sweep.in_file_order()))
    with RowFile(folder) as rows:
        for index in sweep.in_working_order():
            rows.append(row_of(sweep.name(index), kind, cells))
    return rows.path.stat().st_size


def test_a_million_points_are_named(benchmark: Any) -> None:
    assert benchmark.pedantic(named, (spread(MILLION),), rounds=1) == 16 * MILLION
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1_000_000


def test_a_million_rows_are_appended_and_read(benchmark: Any, tmp_path: Path) -> None:
    sweep = spread(MILLION)
    assert filled(tmp_path, sweep) < 450 * MILLION

    def done() -> int:
        store = Store(tmp_path, sweep.what)
        return sum(sweep.name(index) in store for index in sweep.in_working_order())

    assert benchmark.pedantic(done, rounds=1) == MILLION


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare_workers(points: int) -> None:
    """Print the time of a sweep by one worker and by two: wall clock, of the workers' processors, of the parent's."""
    for workers in (1, 2):
        with TemporaryDirectory() as folder:
            save_study(Path(folder), spread(points), "sweep.toml", "# a benchmark")
            wall, children, own = time.monotonic(), children_seconds(), own_seconds()
            run_part(folder, workers=workers)
            size = sum(path.stat().st_size for path in Path(folder).glob("rows/*.jsonl"))
            print(
                f"{workers} workers: {points} points, {time.monotonic() - wall:.1f} s, workers' processors "
                f"{children_seconds() - children:.1f} s, the parent's {own_seconds() - own:.2f} s, "
                f"{size / points:.0f} bytes a point"
            )


if __name__ == "__main__":
    compare_workers(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
