"""Views of a trace for pictures: lanes that do not overlap, and the makers and readers of messages."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Model, RequestError, Stage, Trace, simulate
from cdpsim.draw import views
from cdpsim.trace import load
from tests.helpers.made_traces import empty
from tests.helpers.strategies import requests

Task = tuple[str, int, int, int, int]  # kind, micro-batch, stage, step, device
Message = tuple[Any, ...]  # op, content, stage, micro-batch, step, src, dst
Told = tuple[Message, frozenset[Task], frozenset[Task]]  # a message, who made what it carries, who needs it

rows_of_lanes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 4), st.integers(-1, 3)), max_size=30
).map(lambda rows: np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 4))


@given(rows_of_lanes)
def test_rows_of_one_lane_do_not_overlap(rows: np.ndarray) -> None:
    """A lane's rows follow each other, and no key has more lanes than it has rows at one time."""
    key, start, took, owner = rows.T
    end = start + took
    lane = views.lanes(key, start, end, owner)
    for group in set(zip(key.tolist(), lane.tolist(), strict=True)):
        mine = np.flatnonzero((key == group[0]) & (lane == group[1]))
        mine = mine[np.lexsort((end[mine], start[mine]))]
        assert (end[mine][:-1] <= start[mine][1:]).all()
    for k in set(key.tolist()):
        running = [((key == k) & (start <= time) & (time < end)).sum() for time in range(15)]
        moments = [((key == k) & (start == time) & (time == end)).any() for time in range(15)]
        assert max(running) <= lane[key == k].max() + 1 <= max(np.add(running, moments))


def test_an_owner_keeps_its_lane_where_that_is_free() -> None:
    """Micro-batch 7 is second and stays there, even when the first lane is free; where both are taken it goes on."""
    start, end = np.array([0, 0, 2, 4, 4]), np.array([2, 2, 4, 6, 6])
    owner = np.array([3, 7, 7, 3, 7])
    assert views.lanes(np.zeros(5, dtype=np.int64), start, end, owner).tolist() == [0, 1, 1, 0, 1]
    assert views.lanes(np.zeros(5, dtype=np.int64), start, end).tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name",
    ["single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"],
)
def test_ends_of_messages_are_what_the_spec_says(name: str, n: int) -> None:
    """The makers and readers of messages, found from tasks and versions alone."""
    trace = simulate(name, n, steps=3)
    found = Counter(told(trace))
    assert sum(found.values()) == len(trace.messages["start"])
    assert found == Counter(expected(trace, n, name))


def told(trace: Trace) -> Iterator[Told]:
    """Return the ends that the views give each message."""
    made, used = views.Views(trace).message_tasks
    tasks = list(tasks_of(trace))
    names = ("op", "content", "stage", "micro_batch", "step", "src", "dst")
    for row, message in enumerate(zip(*(trace.messages[name].tolist() for name in names), strict=True)):
        makers, users = (frozenset(tasks[k] for k in pairs.task[pairs.message == row]) for pairs in (made, used))
        yield (*message[:6], str(message[6])), makers, users


def tasks_of(trace: Trace) -> Iterator[Task]:
    """All tasks, in the trace's order."""
    names = ("kind", "micro_batch", "stage", "step", "device")
    yield from zip(*(trace.tasks[name].tolist() for name in names), strict=True)


def expected(trace: Trace, n: int, name: str) -> Iterator[Told]:
    """All messages of a schedule, derived from where its tasks are, when they start and what they read."""
    yield from boundaries(trace)
    if name == "zero-cdp":
        yield from moves(trace)
    elif name == "zero-dp" and n > 1:
        yield from gathered(trace, n)
    elif name in ("multi-dp", "mp-dp") and n > 1:
        yield from reduced(trace, "all_reduce")
    elif name in ("multi-cdp", "mp-cdp"):
        yield from sums(trace)
        yield from versions(trace)
        yield from optimizers(trace)


def boundaries(trace: Trace) -> Iterator[Told]:
    """An activation is from a forward for the next stage's, a gradient from a backward for the stage's before."""
    tasks = {task[:4]: task for task in tasks_of(trace)}
    for (kind, i, j, t), task in tasks.items():
        to = tasks.get((kind, i, j + {"F": 1, "B": -1, "U": 0}[kind], t), task)
        if to[4] != task[4]:
            content = "activation" if kind == "F" else "activation_gradient"
            yield ("p2p", content, j, i, t, task[4], str(to[4])), frozenset([task]), frozenset([to])


def grouped(trace: Trace, kind: str) -> dict[tuple[int, int], list[Task]]:
    """Tasks of a kind by stage and step, as they start."""
    groups: dict[tuple[int, int], list[Task]] = {}
    for task in tasks_of(trace):
        if task[0] == kind:
            groups.setdefault(task[2:4], []).append(task)
    return groups


def reduced(trace: Trace, op: str) -> Iterator[Told]:
    """All backwards of a stage go into its all-reduce, every update needs it; a reduction is for one, its root."""
    updates = grouped(trace, "U")
    for (j, t), backwards in grouped(trace, "B").items():
        users = updates[j, t]
        members = "|".join(str(device) for device in sorted(task[4] for task in backwards))
        root = users[0][4] if op == "reduce" else -1
        yield (op, "gradient", j, -1, t, root, members), frozenset(backwards), frozenset(users)


def gathered(trace: Trace, n: int) -> Iterator[Told]:
    """A stage's owner broadcasts what it updated before all forwards, and again before all backwards."""
    yield from reduced(trace, "reduce")
    updates, members = grouped(trace, "U"), "|".join(map(str, range(n)))
    for kind in "FB":
        for (j, t), users in grouped(trace, kind).items():
            made = frozenset(updates.get((j, t - 1), []))
            yield ("broadcast", "parameters", j, -1, t - 1, j, members), made, frozenset(users)


def sums(trace: Trace) -> Iterator[Told]:
    """Each device adds its backwards to what it received; the last one's update needs what comes to it."""
    updates = grouped(trace, "U")
    for (j, t), backwards in grouped(trace, "B").items():
        own: dict[int, list[Task]] = {}
        for task in sorted(backwards, key=lambda task: task[1]):
            own[task[4]] = [*own.pop(task[4], []), task]  # devices in the order of their last micro-batches
        for src, dst in zip(own, [*own][1:], strict=False):
            needs = updates[j, t] if dst == [*own][-1] else own[dst]
            yield ("p2p", "gradient", j, -1, t, src, str(dst)), frozenset(own[src]), frozenset(needs)


def versions(trace: Trace) -> Iterator[Told]:
    """Return a version's messages: from its updater to its first reader's device, and on to later readers'."""
    version = dict(zip(tasks_of(trace), trace.tasks["version"].tolist(), strict=True))
    updates = grouped(trace, "U")
    last = max(t for _, t in updates)
    for (j, t), (update,) in updates.items():
        readers: dict[int, list[Task]] = {}
        replaced = updates[j, t + 1] if t < last else []
        forwards = [task for task in version if task[0] == "F" and task[2] == j and version[task] == t + 1]
        order = [*forwards, *replaced]  # of time
        for task in order:
            readers.setdefault(task[4], []).append(task)
        holders = {-1: [update]} | readers
        for before, dst in zip(holders, readers, strict=False):  # who reads next has it from who read before
            src = update[4] if before == -1 else before
            if dst != update[4]:
                earlier = order[: order.index(readers[dst][0])]
                made = [update] if src == update[4] else [task for task in readers[src] if task in earlier]
                yield ("p2p", "parameters", j, -1, t, src, str(dst)), frozenset(made), frozenset(readers[dst])


def optimizers(trace: Trace) -> Iterator[Told]:
    """The optimizer's state follows its updates."""
    updates = grouped(trace, "U")
    for (j, t), (update,) in updates.items():
        for then in updates.get((j, t + 1), []):
            if then[4] != update[4]:
                yield ("p2p", "state", j, -1, t, update[4], str(then[4])), frozenset([update]), frozenset([then])


def moves(trace: Trace) -> Iterator[Told]:
    """A state goes from use to use, with the update if that comes after the last backward; first from device j."""
    stages = {task[2] for task in tasks_of(trace)}
    updates = grouped(trace, "U")
    for j in stages:
        at, made, step = j, frozenset[Task](), -1
        for task in tasks_of(trace):
            if task[0] == "U" or task[2] != j:
                continue
            if task[4] != at:
                yield ("p2p", "state", j, -1, step, at, str(task[4])), made, frozenset([task])
            at, step, made = task[4], task[3], frozenset([task])
            if task[0] == "B" and task[1] == max(stages):
                made |= {*updates[j, task[3]]}


@given(requests())
def test_every_message_is_from_somewhere_and_for_somebody(request: dict[str, Any]) -> None:
    """The maker of a message has ended when the message begins; a version also travels to the task that replaces it."""
    trace = simulate(**request)
    tasks, messages = trace.tasks, trace.messages
    made, used = views.Views(trace).message_tasks
    version = messages["step"][made.message] + 1 + (tasks["kind"][made.task] == "U")
    passed = (messages["content"] == "parameters")[made.message] & (tasks["version"][made.task] == version)
    ended = tasks["end"][made.task] <= messages["start"][made.message]
    assert (ended | passed).all()
    assert (tasks["start"][made.task] <= messages["start"][made.message]).all()
    relayed = messages["content"] == "parameters"  # perhaps before its sender reads it
    brought = relayed & (messages["step"] == messages["step"].max(initial=0))  # at last, by rounds that no task follows
    unread = set(np.flatnonzero(brought).tolist()) if trace.program.thrown_away else set()
    assert set(range(len(messages["start"]))) - unread <= set(used.message.tolist())
    assert set(np.flatnonzero((messages["step"] >= 0) & ~relayed)) <= set(made.message.tolist())
    for pairs, end in ((made, "src"), (used, "dst")):
        alone = (messages["op"] == "p2p")[pairs.message]
        there = tasks["device"][pairs.task].astype(str) == messages[end][pairs.message].astype(str)
        assert there[alone].all()


def test_a_sum_across_groups_is_from_the_backwards_of_all_groups() -> None:
    """Of two groups of two ranks: four sums, each needed by the updates that its share goes on to."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=4),))
    trace = simulate("dp", zero=1, shard=2, replicas=2, model=model, cluster="unit", steps=1)
    backwards = frozenset(("B", i, 0, 0, i) for i in range(4))
    updates = [("U", -1, 0, 0, rank) for rank in range(4)]
    found = {message[6]: (made, used) for message, made, used in told(trace)}
    assert found == {
        "0|1": (frozenset(task for task in backwards if task[4] < 2), frozenset(updates)),
        "2|3": (frozenset(task for task in backwards if task[4] >= 2), frozenset(updates)),
        "0|2": (backwards, frozenset(updates[::2])),
        "1|3": (backwards, frozenset(updates[1::2])),
    }


def test_a_loaded_trace_knows_no_ends(tmp_path: Path) -> None:
    """Files say what travelled, not for whom."""
    simulate("multi-cdp", 3).save(tmp_path / "run")
    made, used = views.Views(load(tmp_path / "run")).message_tasks
    assert len(made.message) == len(made.task) == len(used.message) == len(used.task) == 0


def test_titles_name_what_was_asked_for(tmp_path: Path) -> None:
    """The schedule, its size and rule; every name of a model is shown as text."""
    assert views.title(simulate("pp-cdp", 3)) == "pp-cdp, n = 3, cdp-v2"
    pipelines = simulate("interleaved-1f1b", 4, m=6, chunks=2, replicas=3)
    assert views.title(pipelines) == "interleaved-1f1b, n = 4, m = 6, chunks = 2, replicas = 3, dp"
    trace = load_changed(tmp_path, {"schedule": "$x^2$\n", "n": 2, "m": 4, "model": {"name": "a" * 10_000}})
    title = views.title(trace)
    assert title.startswith(r"\$x^2\$\n, n = 2, m = 4, aaa")
    assert len(title) < 200


def load_changed(folder: Path, request: dict[str, Any]) -> Trace:
    """A trace whose summary says that it comes of another request."""
    trace = simulate("single-dp", 2)
    trace.summary()["request"] = request
    trace.save(folder / "run")
    return load(folder / "run")


def test_nothing_is_refused() -> None:
    """A trace without tasks has no picture."""
    with pytest.raises(RequestError, match="trace: has no tasks"):
        views.refuse_empty(empty())
