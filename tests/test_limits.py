"""The estimate before a run: a run that does not fit is refused, with the largest that would."""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Request, RequestError, Stage, simulate
from cdpsim.invariants import violations
from cdpsim.limits import BYTES_PER_MESSAGE, BYTES_PER_TASK, MOST_TASKS, free_bytes, refuse_too_large
from cdpsim.schedules import pipeline
from cdpsim.schedules.actions import Actions


def test_what_fits_exactly_is_served_and_one_task_more_is_not() -> None:
    """Two stages, two micro-batches, one step: eight tasks."""
    refuse_too_large(2, None, 1, "fast", 8 * BYTES_PER_TASK["fast"][0])
    with pytest.raises(RequestError, match="n=1 would fit"):
        refuse_too_large(2, None, 1, "fast", 8 * BYTES_PER_TASK["fast"][0] - 1)


def test_what_is_said_to_fit_fits() -> None:
    """And nothing larger does."""
    with pytest.raises(RequestError, match="the most; n=133 would fit"):
        refuse_too_large(200, None, 2, "fast", "100 MB")
    refuse_too_large(133, None, 2, "fast", "100 MB")
    with pytest.raises(RequestError):
        refuse_too_large(134, None, 2, "fast", "100 MB")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(2, 3))
def test_whatever_is_said_to_fit_fits(n: int, m: int, steps: int, replicas: int, parts: int) -> None:
    """Each of the remedies by itself, the others being as asked, and nothing larger does."""
    most = max(n * m * steps * replicas * parts // 3, 1)
    how: dict[str, Any] = {"replicas": replicas, "parts": parts}

    def allowed(n: int, m: int, steps: int) -> None:
        refuse_too_large(n, m, steps, "fast", most * BYTES_PER_TASK["fast"][0], **how)

    with pytest.raises(RequestError, match=r"would fit|allow more") as refused:
        allowed(n, m, steps)
    assert f"is {n * m * steps * replicas * parts:,} tasks" in str(refused.value)
    for name, value in re.findall(r"(n|m|steps)=(\d+)(?= or| would)", str(refused.value)):
        asked = {"n": n, "m": m, "steps": steps}
        allowed(**(asked | {name: int(value)}))
        with pytest.raises(RequestError):
            allowed(**(asked | {name: int(value) + 1}))


@pytest.mark.parametrize(
    ("name", "tasks"), [("1f1b", 2 * 4 * 8 * 2 * 3), ("zb-h1", 3 * 4 * 8 * 2 * 3), ("pipedream", 2 * 4 * 2 * 3)]
)
def test_all_tasks_of_all_replicas_count(name: str, tasks: int) -> None:
    """Four stages, eight micro-batches (of pipedream one), two steps, three replicas; and all parts of backwards."""
    request: dict[str, Any] = {"n": 4, "steps": 2, "replicas": 3} | ({} if name == "pipedream" else {"m": 8})
    run = simulate(name, **request, max_memory=tasks * BYTES_PER_TASK["auto"][0])
    assert run.program.compute * run.program.fold == run.whole.program.compute == tasks
    with pytest.raises(RequestError, match=f"replicas=3 with steps=2 is {tasks:,} tasks"):
        simulate(name, **request, max_memory=tasks * BYTES_PER_TASK["auto"][0] - 1)


def test_an_order_too_large_is_refused_before_it_is_written_out() -> None:
    def never(devices: int, m: int, chunks: int) -> Actions:
        raise AssertionError("nobody has the room for that")

    with pytest.raises(RequestError, match=r"^n: n=1000, m=1000000 with steps=3 is 6,000,000,000 tasks"):
        simulate(pipeline("large", "a large order", never), 1000, m=10**6)


def test_more_stages_than_a_run_in_slots_may_have_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch through a million stages fits into memory, takes a minute, and answers nothing."""
    monkeypatch.setattr("cdpsim.limits.free_bytes", lambda: 10**12)
    problem = r"^n: n=100001 is more stages than a run in slots may have; give at most 100,000$"
    few: dict[str, Any] = {"m": 1, "steps": 1}
    for name, more in (("dp", {}), ("acco", {}), ("local-sgd", {}), ("1f1b", few)):
        with pytest.raises(RequestError, match=problem):
            Request(name, 100_001, **more)
        assert Request(name, 100_000, **more).model.n == 100_000
    with pytest.raises(RequestError, match=r"tasks are the most; n=\d+ would fit"):
        Request("1f1b", 10**6)


def test_real_costs_need_more() -> None:
    """They bring transients and gradients of boundaries, and times in between."""
    for engine, (slots, real) in BYTES_PER_TASK.items():
        refuse_too_large(2, None, 1, engine, 8 * slots)
        refuse_too_large(2, None, 1, engine, 8 * real, slots=False)
        with pytest.raises(RequestError):
            refuse_too_large(2, None, 1, engine, 8 * slots, slots=False)


def test_numbers_of_nodes_have_an_end() -> None:
    """However much memory there is."""
    with pytest.raises(RequestError, match=f"{MOST_TASKS:,} tasks are the most"):
        refuse_too_large(2**14, None, 1, "fast", 10**15)


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
    request: dict[str, Any] = {"model": model, "cluster": cluster, "collective": collective, "expand_collectives": True}
    assert len(simulate("multi-dp", **request).messages["size"]) == 8 * 3 * expected
    tasks = 3 * (8 * 8 * 2 + 8 * 8) * BYTES_PER_TASK["auto"][1]  # updates, too
    monkeypatch.setattr("cdpsim.limits.unroll", None)
    monkeypatch.setattr("cdpsim.limits.MOST_MESSAGES_LAID_OUT", 0)
    with pytest.raises(RequestError, match=f"^expand-collectives: makes {8 * 3 * expected:,} messages and needs more"):
        simulate("multi-dp", **request, max_memory=tasks + 8 * 3 * expected * BYTES_PER_MESSAGE["auto"][0] - 1)


def test_the_steps_of_an_expansion_that_are_said_to_fit_fit() -> None:
    model = Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    request: dict[str, Any] = {"model": model, "collective": "halving-doubling", "expand_collectives": True}
    with pytest.raises(RequestError, match="steps=") as refused:
        simulate("multi-dp", **request, steps=20, max_memory=10**7)
    steps = int(str(refused.value).partition("steps=")[2].split()[0])
    assert 1 < steps < 20
    simulate("multi-dp", **request, steps=steps, max_memory=10**7)


def test_dependencies_count_too() -> None:
    """Those of messages among each other, and those on all that a collective waits for."""
    model = Model(stages=(Stage(forward=1, backward=1, parameters=8),) * 8)
    request: dict[str, Any] = {"model": model, "collective": "ring", "expand_collectives": True, "steps": 1}
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
        simulate("multi-dp", model=model, collective="ring", expand_collectives=True, steps=1, max_memory=600_000)


@pytest.mark.parametrize("slots", [True, False])
def test_a_pipeline_of_many_stages_and_few_micro_batches_needs_what_is_estimated(slots: bool) -> None:
    """A table of devices by stages would have 8 n^2 bytes, 14 times as much; also of what is recounted."""
    n = 2**12
    stage = Stage(forward=1.0, backward=1.0, parameters=8)
    costs: dict[str, Any] = {} if slots else {"model": Model(stages=(stage,) * n)}
    simulate("1f1b", 2, m=1, steps=1)
    tracemalloc.start()
    try:
        run = simulate("1f1b", n, m=1, steps=1, **costs)
        assert run.summary()["period"] == 2 * n and violations(run) == {}
        assert tracemalloc.get_traced_memory()[1] <= 2 * n * BYTES_PER_TASK["auto"][not slots]
    finally:
        tracemalloc.stop()
