"""A million tasks as a file for Perfetto: seconds from a simulated trace, and how much memory that takes beside it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdpsim import simulate
from cdpsim.export.chrome import chrome
from cdpsim.files.writing import write_file
from cdpsim.trace import Trace

LARGE = [("multi-cdp", 256, 8), ("multi-cdp", 8, 8192), ("single-dp", 256, 8)]


def simulated(name: str, n: int, steps: int) -> Trace:
    """A run whose columns nobody has asked for yet."""
    return simulate(name, n, steps=steps)


@pytest.mark.parametrize(("name", "n", "steps"), LARGE)
def test_json(name: str, n: int, steps: int, benchmark: Any, tmp_path: Path) -> None:
    """Columns, text and file of a million tasks with messages, arrows and counters."""
    file = tmp_path / "run.json"

    def setup() -> tuple[tuple[Trace], dict[str, Any]]:
        return (simulated(name, n, steps),), {}

    def run(trace: Trace) -> None:
        write_file(file, chrome(trace), force=True)

    benchmark.pedantic(run, setup=setup, rounds=3, warmup_rounds=1)
    benchmark.extra_info["bytes"] = file.stat().st_size


MEMORY = """
import resource
from pathlib import Path
from cdpsim import simulate
from cdpsim.export.chrome import chrome
from cdpsim.files.writing import write_file
trace = simulate("multi-cdp", 256, steps=8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_file(Path({file!r}), chrome(trace), force=True)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_memory_of_json(benchmark: Any, tmp_path: Path) -> None:
    """By how much the process's peak grows beyond the simulation's own, columns of the trace included."""
    command = [sys.executable, "-c", MEMORY.format(file=str(tmp_path / "run.json"))]
    run = {"check": True, "capture_output": True, "text": True}
    done = benchmark.pedantic(subprocess.run, (command,), run, rounds=1)
    benchmark.extra_info["peak_bytes"] = int(done.stdout)
