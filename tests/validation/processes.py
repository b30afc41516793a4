"""Processes of the system: which are alive, and which another has started."""

import time
from pathlib import Path

HANGS = 240  # seconds after which a program of a test hangs; on a slow and busy machine one may take a minute


def alive(pid: int) -> bool:
    """Tell whether a process still runs; one that has ended, but was not yet reaped by its parent, does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    try:
        tasks = [(task / "children").read_text().split() for task in (Path("/proc") / str(pid) / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    children = [int(child) for own in tasks for child in own]
    return children + [below for child in children for below in descendants(child)]


def ended(pids: list[int], seconds: float = 10) -> bool:
    """Whether processes end within some time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
