"""Export of a million tasks to Perfetto: seconds from a simulated trace, and the memory that the export adds."""

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
    """Simulate a run whose columns are not computed yet."""
    return simulate(name, n, steps=steps)


@pytest.mark.parametrize(("name", "n", "steps"), LARGE)
def test_json(name: str, n: int, steps: int, benchmark: Any, tmp_path: Path) -> None:
    """Compute the columns and write the file of a million tasks with messages, arrows and counters."""
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
    """Note by how much the export, columns of the trace included, raises the peak memory of the process."""
    command = [sys.executable, "-c", MEMORY.format(file=str(tmp_path / "run.json"))]
    run = {"check": True, "capture_output": True, "text": True}
    done = benchmark.pedantic(subprocess.run, (command,), run, rounds=1)
    benchmark.extra_info["peak_bytes"] = int(done.stdout)
