"""The estimate before a run: what fits is known, what does not is refused with what would."""

from pathlib import Path
from typing import Any

import pytest

from cdpsim import RequestError
from cdpsim.limits import BYTES_PER_TASK, MOST_TASKS, free_bytes, refuse_too_large


def test_what_fits_exactly_is_served_and_one_task_more_is_not() -> None:
    """Two stages, two micro-batches, one step: eight tasks."""
    refuse_too_large(2, 2, 1, "fast", 8 * BYTES_PER_TASK["fast"][0])
    with pytest.raises(RequestError, match="n=1 would fit"):
        refuse_too_large(2, 2, 1, "fast", 8 * BYTES_PER_TASK["fast"][0] - 1)


def test_what_is_said_to_fit_fits() -> None:
    """And nothing larger does."""
    with pytest.raises(RequestError, match="the most; n=133 would fit"):
        refuse_too_large(200, 200, 2, "fast", "100 MB")
    refuse_too_large(133, 133, 2, "fast", "100 MB")
    with pytest.raises(RequestError):
        refuse_too_large(134, 134, 2, "fast", "100 MB")


def test_real_costs_need_more() -> None:
    """They bring transients and gradients of boundaries, and times in between."""
    for engine, (slots, real) in BYTES_PER_TASK.items():
        refuse_too_large(2, 2, 1, engine, 8 * slots)
        refuse_too_large(2, 2, 1, engine, 8 * real, slots=False)
        with pytest.raises(RequestError):
            refuse_too_large(2, 2, 1, engine, 8 * slots, slots=False)


def test_numbers_of_nodes_have_an_end() -> None:
    """Whatever the memory."""
    with pytest.raises(RequestError, match=f"{MOST_TASKS:,} tasks are the most"):
        refuse_too_large(2**14, 2**14, 1, "fast", 10**15)


def test_free_memory_is_the_least_that_anyone_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system, the kernel, the container."""
    texts: dict[str, str] = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n"}

    def read_text(path: Path, **_: Any) -> str:
        if str(path) not in texts:
            raise FileNotFoundError
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert free_bytes() == 5 * 1024
    texts |= {"/sys/fs/cgroup/memory.max": "4000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    assert free_bytes() == 3000
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert free_bytes() == 5 * 1024
    texts.clear()
    assert free_bytes() > 10**8
