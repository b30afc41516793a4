"""Estimates of the memory that a run needs, and refusals of runs that do not fit into this machine's."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from math import inf, isqrt
from pathlib import Path

import numpy as np

from cdpsim.errors import RequestError, TooLarge
from cdpsim.files.units import size_bytes
from cdpsim.program import Program
from cdpsim.timing.costs import Costs
from cdpsim.timing.expand import is_unrolled, unroll

# Bytes at the peak, the writing of traces included, in the slot model and with real costs; measured on the schedule
# that needs most (benchmarks/README.md).
BYTES_PER_TASK = {"auto": (1400, 2200), "fast": (1400, 2200), "simpy": (2600, 3100)}
ALWAYS_FREE = 2**24  # bytes that are free wherever Python runs; the system is not asked about them
UNLIMITED = inf  # bytes: nothing is refused
MOST_SLOT_STAGES = 10**5  # of the slot model, through which one micro-batch takes seconds
MOST_TASKS = 2**28  # nodes have 32-bit numbers, and a task may bring several
# Bytes of expanded collectives, beyond that: for each message, and for each dependency that messages have.
BYTES_PER_MESSAGE = {"auto": (250, 40), "fast": (250, 40), "simpy": (600, 40)}
# Messages of one collective up to which dependencies are counted by laying them out, although they will not fit.
MOST_MESSAGES_LAID_OUT = 10**6
SHARES: ContextVar[int] = ContextVar("shares", default=1)  # processes that share what is free


def free_bytes() -> int:
    """Return the share of this process in free memory: the system's, or its container's if that has less."""
    sizes = [_physical_bytes()]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        sizes.append(max(limit - used, 0))
    return min(sizes) // SHARES.get()


def _physical_bytes() -> int:
    """Return all memory of a Unix system, or the free memory of Windows; of other systems, the largest number."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(ImportError, AttributeError, OSError):
        return _free_on_windows()
    return sys.maxsize


def _free_on_windows() -> int:
    """Return the free memory that the kernel gives in its MEMORYSTATUSEX."""
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
    steps_of: Callable[[int], int] = int,
    tasks: int | None = None,
) -> None:
    """Refuse a run in slots or with real costs that will not fit, with an estimate, and a size that would.

    A pass through a stage has `parts` tasks; an `m` of None is the number of stages. `steps_of` returns the steps of a
    program for the steps asked for. `tasks` is their number where it is another one.
    """
    each_step, many = parts * replicas, steps_of(steps)
    own, passes = tasks is not None, n * (n if m is None else m)
    tasks = passes * each_step * many if tasks is None else tasks
    each = BYTES_PER_TASK[engine][not slots]
    if max_memory is UNLIMITED or (max_memory is None and tasks * each <= ALWAYS_FREE):
        return
    limit = bytes_allowed(max_memory)
    if tasks <= (most := min(limit // each, MOST_TASKS)):
        return
    room = most // (each_step * many)
    fits = {} if own else {"n": isqrt(room)} if m is None else {"n": room // m, "m": room // n}
    fits["steps"] = _fitting_steps(most, passes * each_step, tasks, steps, steps_of)
    remedy = " or ".join(f"{name}={value}" for name, value in fits.items() if value)
    remedy = f"{remedy} would fit" if remedy else "allow more"
    asked = {"n": n} | ({} if m is None else {"m": m}) | ({} if replicas == 1 else {"replicas": replicas})
    size = ", ".join(f"{name}={value}" for name, value in asked.items())
    whose = "is free here" if max_memory is None else "is what --max-memory allows"
    raise TooLarge(
        "n",
        f"{size} with steps={steps} is {tasks:,} tasks and about {_size(tasks * each)}, but "
        f"{_size(limit)} {whose} and {MOST_TASKS:,} tasks are the most; {remedy}",
    )


def refuse_many_slots(n: int) -> None:
    """Refuse more stages of the slot model than take seconds, however little memory they need."""
    if n > MOST_SLOT_STAGES:
        raise RequestError("n", f"n={n} is more stages than a run in slots may have; give at most {MOST_SLOT_STAGES:,}")


def _fitting_steps(most: int, least: int, tasks: int, steps: int, steps_of: Callable[[int], int]) -> int:
    """Return the number of steps with `most` tasks or fewer, where `steps` steps have `tasks` tasks.

    Each step of their program has `least` tasks or more.
    """
    fitting = most * steps // tasks
    while fitting and steps_of(fitting) * max(least, -(-tasks // steps_of(steps))) > most:
        fitting -= 1
    return fitting


def refuse_large_expansion(
    program: Program, costs: Costs, engine: str, max_memory: str | float | None, *, slots: bool = True
) -> None:
    """Refuse, before they are laid out, collectives whose messages will not fit, with an estimate, and what would."""
    limit = bytes_allowed(max_memory)
    unexpanded = len(program.tasks) * BYTES_PER_TASK[engine][not slots]
    by_message, by_edge = BYTES_PER_MESSAGE[engine]
    collectives = _equal_collectives(program, costs)
    each = {key: _most_messages(costs, *key) for key in collectives}
    messages = sum(count * each[key] for key, (count, _) in collectives.items())
    need = unexpanded + messages * by_message
    laid_out = need <= limit or max(each.values(), default=0) <= MOST_MESSAGES_LAID_OUT
    if laid_out:
        for (number, k), (count, waits) in collectives.items():
            layout = unroll(costs.algorithms[number], k)
            need += by_edge * (count * (len(layout.data[0]) + len(layout.room[0])) + waits * len(layout.begins))
    if not collectives or (need <= limit and messages <= MOST_TASKS):
        return
    steps = min(limit * program.steps // need, MOST_TASKS * program.steps // messages) if laid_out else 0
    remedy = f"steps={steps} would fit, or" if steps else "allow more, or take"
    whose = "is free here" if max_memory is None else "is what --max-memory allows"
    raise TooLarge(
        "expand-collectives",
        f"makes {messages:,} messages and needs {'about' if laid_out else 'more than'} {_size(need)}, but "
        f"{_size(limit)} {whose} and {MOST_TASKS:,} are the most; {remedy} another --collective (tree has fewest)",
    )


def bytes_allowed(given: str | float | None, option: str = "max-memory") -> int:
    """Return the bytes that an option allows; where it is not given, all free memory."""
    if given is None:
        return free_bytes()
    try:
        return size_bytes(given)
    except RequestError as error:
        raise RequestError(option, str(error)) from None


def _equal_collectives(program: Program, costs: Costs) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the number of collectives of each algorithm and group size, and of all nodes for which these wait."""
    rows = np.flatnonzero(is_unrolled(program))
    waits = np.bincount(program.edges.after, minlength=program.nodes)[len(program.tasks) :][rows]
    sizes = program.sizes_of_groups[program.messages.dst[rows]]
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for number, k, many in zip(costs.runs_by[rows].tolist(), sizes.tolist(), waits.tolist(), strict=True):
        count, before = counts.get((number, k), (0, 0))
        counts[number, k] = count + 1, before + many
    return counts


def _most_messages(costs: Costs, number: int, k: int) -> int:
    """Return how many messages an algorithm sends at most: one for each part, or for each member, channel and round."""
    algorithm = costs.algorithms[number]
    return min(int(algorithm.sends(k).sum()), k * algorithm.channels * algorithm.rounds(k))


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 10**8 else f"{count / 1e6:,.3g} MB"
