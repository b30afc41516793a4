"""Peak memory of a run in a process of its own: python benchmarks/memory.py [NAME N STEPS [OPTION=NUMBER ...]].

It counts the growth of the process's peak resident memory from before the request to after the memory curves. The
interpreter, numpy and numba are loaded before.
"""

import resource
import subprocess
import sys

from cdpsim import simulate
from cdpsim.numeric import compiled
from cdpsim.schedules import TABLE_1
from cdpsim.trace.metrics import memory

PIPELINES = [
    ("1f1b", "512", "1", "m=1024"),
    ("1f1b", "128", "1", "m=1024", "replicas=4"),
    ("interleaved-1f1b", "512", "1", "m=1024", "chunks=2"),
    ("zb-h1", "512", "1", "m=1024"),
    ("gems", "512", "1", "m=1024"),
    ("dualpipev", "256", "1", "m=1024"),
    ("pipedream", "256", "2048"),
]


def peak() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, n: int, steps: int, *settings: str) -> None:
    """Run once, with options such as m=1024, and print bytes per task."""
    options = {option: int(number) for option, number in (one.split("=") for one in settings)}
    assert compiled.sweep_nodes is not None
    before = peak()
    run = simulate(name, n, steps=steps, **options)
    memory.memory_by_category(run.program, run.start, run.end)
    tasks = len(run.program.tasks)
    line = f"{name:23} n={n:<4} steps={steps:<5} {' '.join(settings):18} {tasks:>9,} tasks"
    print(f"{line} {(peak() - before) / tasks:>6.0f} bytes per task")


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        for case in [*((name, "256", "8") for name in TABLE_1), ("multi-cdp", "8", "8192"), *PIPELINES]:
            subprocess.run([sys.executable, __file__, *case], check=True)
