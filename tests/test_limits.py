"""The estimate before a run: what fits is known, what does not is refused with what would."""

from pathlib import Path
from typing import Any

import pytest

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.limits import BYTES_PER_MESSAGE, BYTES_PER_TASK, MOST_TASKS, free_bytes, refuse_too_large


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


def test_micro_batches_of_all_replicas_and_both_parts_of_backwards_count() -> None:
    """2 * 4 stages * 12 micro-batches * 5 steps; or 3 of them, and the number of micro-batches stays as asked."""
    one = BYTES_PER_TASK["fast"][0]
    wanted: dict[str, Any] = {"n": 4, "m": 6, "replicas": 2, "steps": 5, "engine": "fast"}
    for name, tasks in (("1f1b", 480), ("zb-h1", 720)):
        trace = simulate(name, **wanted, max_memory=tasks * one)
        assert trace.run is not None and trace.run.program.compute == tasks
        with pytest.raises(RequestError, match=f"n=4, m=12 with steps=5 is {tasks} tasks .* n=3 or steps=4 would fit"):
            simulate(name, **wanted, max_memory=tasks * one - 1)


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


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("ring", 2 * 7 * 8), ("tree", 2 * 7), ("recursive-doubling", 3 * 8), ("halving-doubling", 6 * 8)],
)
def test_an_expansion_is_refused_for_all_of_its_messages(
    collective: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Textbooks' counts for eight members: 2(k-1)k of a ring, 2(k-1) of a tree, k log k, 2k log k; 8 stages, 3 steps.

    It is refused before anything is laid out, where messages alone are too many and single collectives are large.
    """
    cluster, model = Cluster(), Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    request: dict[str, Any] = {"model": model, "cluster": cluster, "collective": collective, "expand": True}
    assert len(simulate("multi-dp", **request).messages["size"]) == 8 * 3 * expected
    tasks = 3 * (8 * 8 * 2 + 8 * 8) * BYTES_PER_TASK["auto"][1]  # updates, too
    monkeypatch.setattr("cdpsim.limits.unroll", None)
    monkeypatch.setattr("cdpsim.limits.MOST_LAID_OUT", 0)
    with pytest.raises(RequestError, match=f"^expand-collectives: makes {8 * 3 * expected:,} messages and needs more"):
        simulate("multi-dp", **request, max_memory=tasks + 8 * 3 * expected * BYTES_PER_MESSAGE["auto"][0] - 1)


def test_the_steps_of_an_expansion_that_are_said_to_fit_fit() -> None:
    model = Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    request: dict[str, Any] = {"model": model, "collective": "halving-doubling", "expand": True}
    with pytest.raises(RequestError, match="steps=") as refused:
        simulate("multi-dp", **request, steps=20, max_memory=10**7)
    steps = int(str(refused.value).partition("steps=")[2].split()[0])
    assert 1 < steps < 20
    simulate("multi-dp", **request, steps=steps, max_memory=10**7)


def test_dependencies_count_too() -> None:
    """Those of messages among each other, and those on all that a collective waits for."""
    model = Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    request: dict[str, Any] = {"model": model, "collective": "ring", "expand": True, "steps": 1}
    messages = 8 * 2 * 7 * 8
    own = 192 * BYTES_PER_TASK["auto"][1] + messages * BYTES_PER_MESSAGE["auto"][0]
    # Each message of a ring but the first ones waits for its sender's and receiver's last two, or one of them: at least
    # one dependency; each of the 8 first messages of a collective for 8 backwards and 8 ends of lanes.
    edges = messages + 8 * 8 * 16
    with pytest.raises(RequestError, match="expand-collectives"):
        simulate("multi-dp", **request, max_memory=own + edges * BYTES_PER_MESSAGE["auto"][1])
    simulate("multi-dp", **request, max_memory=own + 6 * edges * BYTES_PER_MESSAGE["auto"][1])


def test_an_expansion_that_no_step_of_which_fits_says_so() -> None:
    model = Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    with pytest.raises(RequestError, match="allow more, or take another --collective"):
        simulate("multi-dp", model=model, collective="ring", expand=True, steps=1, max_memory=600_000)
