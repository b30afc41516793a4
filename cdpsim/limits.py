"""What a run will need, told before it starts, and refused if this machine has not got it."""

import os
from contextlib import suppress
from math import isqrt
from pathlib import Path

from cdpsim.errors import RequestError
from cdpsim.units import size_bytes

# At the peak, traces written out included, in the slot model and with real costs; measured on the schedule that needs
# most (benchmarks/README.md).
BYTES_PER_TASK = {"auto": (1400, 2200), "fast": (1400, 2200), "simpy": (2600, 3100)}
MOST_TASKS = 2**28  # nodes have 32-bit numbers, and a task may bring several


def free_bytes() -> int:
    """The memory that a process may still take: the system's, or its container's if that has less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        found.append(max(limit - used, 0))
    return min(found)


def refuse_too_large(
    n: int, m: int, steps: int, engine: str, max_memory: str | float | None, *, slots: bool = True
) -> None:
    """Refuse, before any work, a run in slots or with real costs that will not fit, with an estimate and what would."""
    limit = free_bytes() if max_memory is None else size_bytes(max_memory)
    tasks = 2 * n * m * steps
    each = BYTES_PER_TASK[engine][not slots]
    most = min(limit // each, MOST_TASKS)
    if tasks <= most:
        return
    whose = "is free here" if max_memory is None else "is what --max-memory allows"
    fits = {"n": isqrt(most // (2 * steps)), "steps": most // (2 * n * m)}
    remedy = " or ".join(f"{name}={value}" for name, value in fits.items() if value)
    raise RequestError(
        "n",
        f"n={n} with steps={steps} is {tasks:,} tasks and about {_said(tasks * each)}, but {_said(limit)} {whose} "
        f"and {MOST_TASKS:,} tasks are the most; {f'{remedy} would fit' if remedy else 'allow more'}",
    )


def _said(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 10**8 else f"{size / 1e6:,.3g} MB"
