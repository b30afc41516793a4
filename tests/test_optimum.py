"""How far each pipeline's order is from the best at its memory, and that the oracle which says so is right."""

import re
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES, RequestError, simulate
from cdpsim.schedules import pipeline
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.pipelines.zero_bubble import zb_h1
from cdpsim.schedules.shape import Shape
from tests.optimum import Starts, Step, optimum, starts_within, step_of
from tests.played import Named, in_flight, needs, order_of

DESIGN = (Path(__file__).parent.parent / "DESIGN.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `.*$", DESIGN.partition("\n## How far from the best\n")[2].partition("\n## ")[0], re.MULTILINE)
PIPELINES = [name for name, schedule in SCHEDULES.items() if schedule.order.flush and schedule.order.actions]

Sizes = tuple[int, int, int]  # devices, micro-batches, stages of each device


def actions_of(name: str, sizes: Sizes) -> Actions:
    devices, m, chunks = sizes
    return SCHEDULES[name].actions(Shape(devices * chunks, m, chunks))


def simulated(name: str, sizes: Sizes) -> tuple[int, int]:
    """The makespan of a step, and the longest stay of a device."""
    devices, m, chunks = sizes
    asked = chunks if "chunks" in SCHEDULES[name].options else None
    trace = simulate(name, devices * chunks, m=m, chunks=asked, steps=1)
    rows = trace.tasks["kind"] != "U"
    device, start, end = (trace.tasks[column][rows] for column in ("device", "start", "end"))
    stays = [end[device == d].max() - start[device == d].min() for d in range(devices)]
    return trace.summary()["makespan"], int(max(stays))


# What DESIGN.md says.


def row(name: str, sizes: Sizes) -> str:
    """A row of the table."""
    actions, (makespan, stay) = actions_of(name, sizes), simulated(name, sizes)
    best, shortest = optimum(actions), optimum(actions, stay=True)
    cells = (f"`{name}`", *sizes, makespan, best, makespan - best, stay - shortest)
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("written", ROWS)
def test_a_pipeline_is_as_far_from_the_best_as_design_says(written: str) -> None:
    name, *sizes = (cell.strip(" `") for cell in written.split("|")[1:5])
    devices, m, chunks = map(int, sizes)
    assert row(name, (devices, m, chunks)) == written


def test_design_has_every_pipeline_that_flushes() -> None:
    assert list(dict.fromkeys(row.split("`")[1] for row in ROWS)) == PIPELINES


@pytest.mark.parametrize(("room", "bubble"), [(4, 3), (5, 2), (6, 1), (7, 0), (8, 0)])
def test_an_activation_more_takes_a_slot_from_a_split_pipeline_s_bubble(room: int, bubble: int) -> None:
    """H1 and H2 are the ends of this, d and 2d-1 activations; on one of d = 4 devices after another, 8 micro-batches."""
    one_way = zb_h1(4, 8)
    assert optimum(one_way, [room] * 4, stay=True) == 3 * 8 + bubble
    assert optimum(one_way, [room] * 4) == 3 * 8 + 3


# All of small cases.

# Where orders are not the best: too few micro-batches to fill both ways of a V, or more than whole units of two halves.
FILLED = {
    "zb-h2": lambda devices, m: m >= 2 * devices - 1,
    "zbv": lambda devices, m: m >= 2 * devices - 1,
    "chimera": lambda devices, m: m % devices == 0,
}


def allowed(name: str, most: int) -> Iterator[Sizes]:
    """All sizes of up to four devices that a pipeline does not refuse."""
    order = SCHEDULES[name].order
    for sizes in product((2, 3, 4), range(1, most + 1), (1, 2, 3) if order.any_chunks else (order.chunks,)):
        try:
            actions_of(name, sizes)
        except RequestError:
            continue
        yield sizes


def check_makespans(name: str, most: int) -> None:
    for sizes in allowed(name, most):
        makespan, best = simulated(name, sizes)[0], optimum(actions_of(name, sizes))
        assert makespan >= best, sizes
        assert makespan == best or not FILLED.get(name, lambda devices, m: True)(*sizes[:2]), sizes


@pytest.mark.parametrize("name", PIPELINES)
def test_no_order_of_a_step_ends_sooner_at_the_same_memory(name: str) -> None:
    """Than a pipeline's that is filled; and none ends as much later than it should as to beat the proven best."""
    check_makespans(name, 5)


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINES)
def test_no_order_of_a_longer_step_ends_sooner(name: str) -> None:
    check_makespans(name, 12)


# The oracle.

Rows = list[list[Named]]
State = tuple[frozenset[Named], tuple[int, ...]]  # what is done, and for how many slots each device has been at it


@st.composite
def steps(draw: st.DrawFn) -> tuple[Actions, list[int]]:
    """One micro-batch after another, each in one of two ways through all devices; and a memory that would do for more."""
    devices, chunks, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from(["FB", "FIW"]))
    m, stages = draw(st.integers(1, max(1, 12 // (devices * chunks * len(kinds))))), range(devices * chunks)
    ways = st.lists(st.permutations(range(devices)), min_size=chunks, max_size=chunks).map(lambda ways: sum(ways, []))
    way = draw(st.lists(st.sampled_from([draw(ways), draw(ways)]), min_size=m, max_size=m))
    tasks = [
        *(
            [("F", j, i) for j in stages] + [(kind, j, i) for j in reversed(stages) for kind in kinds[1:]]
            for i in range(m)
        )
    ]
    rows = [[task for row in tasks for task in row if way[task[2]][task[1]] == d] for d in range(devices)]
    return Actions.of(rows), draw(st.lists(st.integers(chunks, chunks + 2), min_size=devices, max_size=devices))


def tried(rows: Rows, memory: list[int], stay: bool) -> int:
    """The fewest slots, by trying all that devices can do in each of them, with micro-batches in any order."""
    for slots in count(max(map(len, rows))):
        known, new = set[State](), {(frozenset[Named](), (0,) * len(rows))}
        while new:
            known |= new
            new = {after for state in new for after in next_states(state, rows, memory, slots, stay)} - known
            if any(len(done) == sum(map(len, rows)) for done, _ in new):
                return slots
    raise AssertionError("every step ends")


def next_states(state: State, rows: Rows, memory: list[int], slots: int, stay: bool) -> Iterator[State]:
    """What a slot can lead to, but for states in which a device is late."""
    done, at_it = state
    left = [[task for task in row if task not in done] for row in rows]
    if any(slot + len(tasks) > slots for slot, tasks in zip(at_it, left, strict=True)):
        return
    last = max(stage for row in rows for _, stage, _ in row)
    split = {(stage, i) for row in rows for kind, stage, i in row if kind == "I"}
    options: list[list[Named | None]] = []
    for row, tasks, room in zip(rows, left, memory, strict=True):
        held = sum({"F": 1, "I": 0}.get(task[0], -1) for task in row if task in done)
        ready = [task for task in tasks if done.issuperset(needs(task, last, split))]
        options.append([None, *(task for task in ready if task[0] != "F" or held < room)])
    for chosen in product(*options):
        goes_on = (not stay or slot or task for slot, task in zip(at_it, chosen, strict=True))
        at_work = (slot + bool(on and tasks) for slot, on, tasks in zip(at_it, goes_on, left, strict=True))
        yield done.union(task for task in chosen if task), tuple(at_work)


@given(steps(), st.booleans())
def test_the_oracle_finds_what_trying_everything_finds(step: tuple[Actions, list[int]], stay: bool) -> None:
    actions, memory = step
    assert optimum(actions, memory, stay) == tried(order_of(actions), memory, stay)


def check_starts(start: Starts, step: Step, slots: int, stay: bool) -> list[list[Named]]:
    """Give devices' orders by when tasks start, after checking that these keep all rules."""
    where = {(i, j): device for devices, same in step.alike.items() for i in same for j, device in enumerate(devices)}
    rows = [
        [task for task in sorted(start, key=start.__getitem__) if where[task[::-1][:2]] == d]
        for d in range(len(step.memory))
    ]
    split = set(where) and {(j, i) for i, j in where if step.kinds == "FIW"}
    for row, room in zip(rows, step.memory, strict=True):
        times = [start[task] for task in row]
        assert (
            len(set(times)) == len(row) == sum(len(same) for _, same in step.streams(rows.index(row))) * len(step.kinds)
        )
        assert times[-1] + 1 - (times[0] if stay else 0) <= slots
        assert in_flight(row) <= room
        assert all(start[needed] < start[task] for task in row for needed in needs(task, step.stages - 1, split))
    return rows


@pytest.mark.parametrize(("name", "sizes"), [("zb-h2", (4, 4, 1)), ("zbv", (3, 3, 2)), ("chimera", (4, 6, 1))])
def test_what_the_oracle_finds_runs_in_that_time(name: str, sizes: Sizes) -> None:
    """As a schedule of its own; here it is better than the order that it is given."""
    step, slots = step_of(actions_of(name, sizes)), optimum(actions_of(name, sizes))
    start = starts_within(slots, step)
    assert start is not None
    actions = Actions.of(check_starts(start, step, slots, stay=False))
    check_actions(actions)
    found = pipeline("found", "by the oracle", lambda devices, m, chunks: actions, chunks=sizes[2])
    trace = simulate(found, sizes[0] * sizes[2], m=sizes[1], steps=1)
    assert trace.summary()["makespan"] == slots < simulated(name, sizes)[0]


@pytest.mark.parametrize(("name", "sizes"), [("dualpipev", (2, 4, 2)), ("zbv", (3, 4, 2)), ("chimera", (4, 5, 1))])
def test_a_shorter_stay_that_the_oracle_finds_keeps_the_rules(name: str, sizes: Sizes) -> None:
    step, slots = step_of(actions_of(name, sizes)), optimum(actions_of(name, sizes), stay=True)
    start = starts_within(slots, step, stay=True)
    assert start is not None
    check_starts(start, step, slots, stay=True)
    assert slots < simulated(name, sizes)[1]
