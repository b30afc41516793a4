"""What a run will need, told before it starts, and refused if this machine has not got it."""

import os
import sys
from contextlib import suppress
from math import isqrt
from pathlib import Path

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.units import size_bytes
from cdpsim.program import Program
from cdpsim.timing.costs import Costs
from cdpsim.timing.expand import is_unrolled, unroll

# At the peak, traces written out included, in the slot model and with real costs; measured on the schedule that needs
# most (benchmarks/README.md).
BYTES_PER_TASK = {"auto": (1400, 2200), "fast": (1400, 2200), "simpy": (2600, 3100)}
ANYWHERE = 2**24  # bytes that are free wherever Python runs: they are not asked for
MOST_TASKS = 2**28  # nodes have 32-bit numbers, and a task may bring several
# Of an expanded collective, beyond that: for each message, and for each dependency that messages have.
BYTES_PER_MESSAGE = {"auto": (250, 40), "fast": (250, 40), "simpy": (600, 40)}
MOST_LAID_OUT = 10**6  # messages of one collective, to see what they wait for, although they will not fit


def free_bytes() -> int:
    """The memory that a process may still take: the system's, or its container's if that has less."""
    found = [_physical_bytes()]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        found.append(max(limit - used, 0))
    return min(found)


def _physical_bytes() -> int:
    """All memory of a Unix system, what is free of Windows'; of a system that says neither, as much as can be."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(ImportError, AttributeError, OSError):
        return _free_on_windows()
    return sys.maxsize


def _free_on_windows() -> int:
    """Ask the kernel, by its MEMORYSTATUSEX."""
    import ctypes  # not every Python has it

    status = (ctypes.c_uint64 * 8)(64)  # two 32-bit numbers first: the structure's length, and the load in percent
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(status):  # type: ignore[attr-defined, unused-ignore]
        raise OSError("the kernel does not say")
    return int(status[2])  # ullAvailPhys, behind ullTotalPhys


def refuse_too_large(
    n: int,
    m: int | None,
    steps: int,
    engine: str,
    max_memory: str | float | None,
    *,
    replicas: int = 1,
    parts: int = 2,
    slots: bool = True,
) -> None:
    """Refuse, before any work, a run in slots or with real costs that will not fit, with an estimate and what would.

    A pass through a stage has so many `parts`; where `m` is None there are as many micro-batches as stages.
    """
    each_pass = parts * replicas * steps
    tasks = n * (n if m is None else m) * each_pass
    each = BYTES_PER_TASK[engine][not slots]
    if max_memory is None and tasks * each <= ANYWHERE:
        return
    limit = _allowed(max_memory)
    most = min(limit // each, MOST_TASKS)
    if tasks <= most:
        return
    whose = "is free here" if max_memory is None else "is what --max-memory allows"
    fits = (
        {"n": isqrt(most // each_pass)} if m is None else {"n": most // (m * each_pass), "m": most // (n * each_pass)}
    )
    fits["steps"] = most * steps // tasks
    remedy = " or ".join(f"{name}={value}" for name, value in fits.items() if value)
    asked = {"n": n, "m": m, "replicas": None if replicas == 1 else replicas}
    size = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
    raise RequestError(
        "n",
        f"{size} with steps={steps} is {tasks:,} tasks and about {_said(tasks * each)}, but {_said(limit)} {whose} "
        f"and {MOST_TASKS:,} tasks are the most; {f'{remedy} would fit' if remedy else 'allow more'}",
    )


def refuse_large_expansion(
    program: Program, costs: Costs, engine: str, max_memory: str | float | None, *, slots: bool = True
) -> None:
    """Refuse, before they are laid out, collectives whose messages will not fit, with an estimate and what would."""
    limit = _allowed(max_memory)
    own = len(program.tasks) * BYTES_PER_TASK[engine][not slots]
    by_message, by_edge = BYTES_PER_MESSAGE[engine]
    alike = _alike(program, costs)
    each = {key: _messages(costs, *key) for key in alike}
    messages = sum(count * each[key] for key, (count, _) in alike.items())
    need = own + messages * by_message
    laid_out = need <= limit or max(each.values(), default=0) <= MOST_LAID_OUT
    if laid_out:
        for (number, k), (count, waits) in alike.items():
            layout = unroll(costs.algorithms[number], k)
            need += by_edge * (count * (len(layout.data[0]) + len(layout.room[0])) + waits * len(layout.begins))
    if not alike or (need <= limit and messages <= MOST_TASKS):
        return
    steps = min(limit * program.steps // need, MOST_TASKS * program.steps // messages) if laid_out else 0
    remedy = f"steps={steps} would fit, or" if steps else "allow more, or take"
    whose = "is free here" if max_memory is None else "is what --max-memory allows"
    raise RequestError(
        "expand-collectives",
        f"makes {messages:,} messages and needs {'about' if laid_out else 'more than'} {_said(need)}, but "
        f"{_said(limit)} {whose} and {MOST_TASKS:,} are the most; {remedy} another --collective (tree has fewest)",
    )


def _allowed(max_memory: str | float | None) -> int:
    """What may be spent: as much as is asked for, or all that is free."""
    if max_memory is None:
        return free_bytes()
    try:
        return size_bytes(max_memory)
    except RequestError as error:
        raise RequestError("max-memory", str(error)) from None


def _alike(program: Program, costs: Costs) -> dict[tuple[int, int], tuple[int, int]]:
    """How many collectives there are of each algorithm and group size, and for how much they wait together."""
    rows = np.flatnonzero(is_unrolled(program))
    waits = np.bincount(program.edges.after, minlength=program.nodes)[len(program.tasks) :][rows]
    ranks = [len(program.ranks_of(group)) for group in range(len(program.groups))]
    sizes = np.array(ranks, dtype=np.int64)[program.messages.dst[rows]]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for number, k, many in zip(costs.runs_by[rows].tolist(), sizes.tolist(), waits.tolist(), strict=True):
        count, before = found.get((number, k), (0, 0))
        found[number, k] = count + 1, before + many
    return found


def _messages(costs: Costs, number: int, k: int) -> int:
    """How many messages an algorithm sends at most: one for each part, or for each member, channel and round."""
    how = costs.algorithms[number]
    return min(int(how.sends(k).sum()), k * how.channels * how.rounds(k))


def _said(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 10**8 else f"{size / 1e6:,.3g} MB"
