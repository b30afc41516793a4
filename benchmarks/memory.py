"""Peak memory of a run in a process of its own: python benchmarks/memory.py [NAME N STEPS].

Counted is what the process's peak resident memory grows by, from before the request to after the memory curves; the
interpreter, numpy and numba are there before.
"""

import resource
import subprocess
import sys

from cdpsim import SCHEDULES, compiled, simulate
from cdpsim.metrics import memory


def peak() -> int:
    """The most resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, n: int, steps: int) -> None:
    """Run once and print bytes per task."""
    assert compiled.longest is not None
    before = peak()
    run = simulate(name, n, steps=steps).run
    assert run is not None
    memory.curves(run.program, run.start, run.end)
    tasks = len(run.program.tasks)
    print(f"{name:10} n={n:<4} steps={steps:<5} {tasks:>9,} tasks {(peak() - before) / tasks:>6.0f} bytes per task")


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        for case in [*((name, "256", "8") for name in SCHEDULES), ("multi-cdp", "8", "8192")]:
            subprocess.run([sys.executable, __file__, *case], check=True)
