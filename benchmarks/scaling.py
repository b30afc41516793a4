"""Growth of cost over stages and over steps, from ten thousand to ten million tasks: python benchmarks/scaling.py.

It times the fast engine from request to memory curves, the least of several runs each, and fits the exponent of
seconds ~ tasks ** exponent. Every run has a process of its own, warmed up, so that none pays for another's memory.
"""

import subprocess
import sys
import time
from math import log

import numpy as np

from cdpsim import simulate
from cdpsim.trace.metrics import memory

STAGES = [(n, 8) for n in (25, 79, 250, 791)]  # 2 * 8 * n * n tasks
STEPS = [(32, steps) for steps in (5, 49, 488, 4883)]  # 2 * 32 * 32 * steps tasks


def seconds(name: str, n: int, steps: int) -> tuple[int, float]:
    """Return the number of tasks, and the least time of a few runs."""
    least = float("inf")
    for _ in range(4 if n * n * steps > 10**6 else 12):
        began = time.perf_counter()
        run = simulate(name, n, steps=steps, max_memory="1 TB")
        memory.memory_by_category(run.program, run.start, run.end)
        least = min(least, time.perf_counter() - began)
    return len(run.program.tasks), least


def main() -> None:
    """Print a table of times, and the exponents."""
    for what, sizes in (("stages", STAGES), ("steps", STEPS)):
        points = []
        for n, steps in sizes:
            command = [sys.executable, __file__, "multi-cdp", str(n), str(steps)]
            tasks, least = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            points.append((int(tasks), float(least)))
            print(f"{what:7} n={n:<4} steps={steps:<5} {int(tasks):>10,} tasks {float(least):8.4f} s", flush=True)
        exponent, _ = np.polyfit([log(t) for t, _ in points], [log(s) for _, s in points], 1)
        print(f"{what:7} seconds ~ tasks ** {exponent:.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*seconds(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
