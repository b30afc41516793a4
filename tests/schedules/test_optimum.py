"""How far each pipeline's order is from the best at its memory, and that the oracle which says so is right."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, RequestError, simulate
from cdpsim.request.sharing import accepts
from cdpsim.schedules import pipeline
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.pipelines import zb_h1, zb_h2
from cdpsim.schedules.placement import Shape
from tests.helpers.action_player import Named, in_flight, needs, order_of
from tests.helpers.optimal_order import Starts, Step, optimum, starts_within, step_of

PAGE = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `.*$", PAGE.partition("\n## How far from the best\n")[2].partition("\n## ")[0], re.MULTILINE)
PIPELINES = [
    name
    for name, schedule in SCHEDULES.items()
    if schedule.order.together and schedule.order.lists and not schedule.order.one_place
]

Sizes = tuple[int, int, int]  # devices, micro-batches, stages of each device


def actions_of(name: str, sizes: Sizes) -> Actions:
    devices, m, chunks = sizes
    return SCHEDULES[name].actions(Shape(devices * chunks, m, chunks))


def simulated(name: str, sizes: Sizes) -> tuple[int, int]:
    """The makespan of a step, and the longest stay of a device."""
    devices, m, chunks = sizes
    asked = chunks if accepts(SCHEDULES[name], "chunks") else None
    trace = simulate(name, devices * chunks, m=m, chunks=asked, steps=1)
    rows = trace.tasks["kind"] != "U"
    device, start, end = (trace.tasks[column][rows] for column in ("device", "start", "end"))
    stays = [end[device == d].max() - start[device == d].min() for d in range(devices)]
    return trace.summary()["makespan"], int(max(stays))


# As docs/results.md has it.


def row(name: str, sizes: Sizes) -> str:
    """A row of the table."""
    actions, (makespan, stay) = actions_of(name, sizes), simulated(name, sizes)
    best, shortest = optimum(actions), optimum(actions, stay=True)
    cells = (f"`{name}`", *sizes, makespan, best, makespan - best, stay - shortest)
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("written", ROWS)
def test_a_pipeline_is_as_far_from_the_best_as_the_page_says(written: str) -> None:
    name, *sizes = (cell.strip(" `") for cell in written.split("|")[1:5])
    devices, m, chunks = map(int, sizes)
    assert row(name, (devices, m, chunks)) == written


def test_the_page_has_every_pipeline_that_flushes() -> None:
    """In the order of the registry."""
    found = list(dict.fromkeys(row.split("`")[1] for row in ROWS))
    missing = [row(name, (4, 8, SCHEDULES[name].order.chunks)) for name in PIPELINES if name not in found]
    assert not missing, "rows for docs/results.md, at their place among the pipelines:\n" + "\n".join(missing)
    assert found == PIPELINES


@pytest.mark.parametrize(
    ("order", "room", "bubble"), [(zb_h1, 4, 3), (zb_h1, 5, 2), (zb_h1, 6, 1), (zb_h2, 7, 0), (zb_h2, 8, 0)]
)
def test_an_activation_more_is_a_slot_less_of_bubble(
    order: Callable[[int, int], Actions], room: int, bubble: int
) -> None:
    """From H1's d = 4 to H2's 2d-1, by stays; the makespan is no shorter even with room for all of m = 8."""
    assert optimum(order(4, 8), [room] * 4, stay=True) == 3 * 8 + bubble
    assert optimum(order(4, 8), [room] * 4) == 3 * 8 + 3


# All small cases.

# How many micro-batches fill a pipeline, where not any number does.
FILLED: dict[str, Callable[[int, int], bool]] = {
    "zb-h2": lambda devices, m: m >= 2 * devices - 1,
    "zbv": lambda devices, m: m >= 2 * devices - 1,
    "chimera": lambda devices, m: m % devices == 0,
}


def is_filled(name: str, sizes: Sizes) -> bool:
    return name not in FILLED or FILLED[name](*sizes[:2])


def allowed(name: str, devices: int, m: int) -> Iterator[Sizes]:
    """All sizes that a pipeline does not refuse, of two to that many devices and at most that many micro-batches."""
    order = SCHEDULES[name].order
    several = (1, 2, 3) if order.any_chunks else (order.chunks,)
    for sizes in product(range(2, devices + 1), range(1, m + 1), several):
        with suppress(RequestError):
            actions_of(name, sizes)
            yield sizes


@pytest.mark.parametrize("name", PIPELINES)
def test_no_pipeline_ends_sooner_than_the_best_order_or_later_where_it_is_filled(name: str) -> None:
    for sizes in allowed(name, 4, 5):
        makespan, best = simulated(name, sizes)[0], optimum(actions_of(name, sizes))
        assert makespan == best if is_filled(name, sizes) else makespan >= best, sizes


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINES)
def test_a_longer_pipeline_ends_with_the_best_order_where_it_is_filled(name: str) -> None:
    for sizes in allowed(name, 6, 16):
        if is_filled(name, sizes):
            assert simulated(name, sizes)[0] == optimum(actions_of(name, sizes)), sizes


# The oracle.

SMALL = [(1, 3, 2), (2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1), (3, 2, 1), (3, 3, 1)]
Rows = list[list[Named]]
State = tuple[frozenset[Named], tuple[int, ...]]  # what is done, and for how many slots each device has been at it


@st.composite
def steps(draw: st.DrawFn) -> tuple[Actions, list[int]]:
    """One micro-batch after another, each in one of two ways through all devices; and memory for one or several."""
    kinds, (devices, m, chunks) = draw(st.sampled_from(["FB", "FIW"])), draw(st.sampled_from(SMALL))
    around, stages = st.permutations(range(devices)), range(devices * chunks)
    two_ways = [[device for _ in range(chunks) for device in draw(around)] for _ in range(2)]
    way = draw(st.lists(st.sampled_from(two_ways), min_size=m, max_size=m))
    back = [(kind, j) for j in reversed(stages) for kind in kinds[1:]]
    tasks = [(kind, j, i) for i in range(m) for kind, j in [*(("F", j) for j in stages), *back]]
    rows = [[(kind, j, i) for kind, j, i in tasks if way[i][j] == device] for device in range(devices)]
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
    """Return the states that can follow a slot, without those in which a device is late."""
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
@settings(max_examples=20)
def test_the_oracle_finds_what_trying_everything_finds(step: tuple[Actions, list[int]], stay: bool) -> None:
    actions, memory = step
    assert optimum(actions, memory, stay) == tried(order_of(actions), memory, stay)


def check_starts(start: Starts, step: Step, slots: int, stay: bool) -> Rows:
    """Check that tasks which start then keep all rules, and give devices' orders by it."""
    device = {(i, j): d for where, same in step.alike.items() for i in same for j, d in enumerate(where)}
    split = {(j, i) for i, j in device if "W" in step.kinds}
    assert sorted(start) == sorted((kind, j, i) for kind in step.kinds for i, j in device)
    assert all(start[needed] < start[task] for task in start for needed in needs(task, step.stages - 1, split))
    rows: Rows = [[] for _ in step.memory]
    for kind, j, i in sorted(start, key=start.__getitem__):
        rows[device[i, j]].append((kind, j, i))
    for row, room in zip(rows, step.memory, strict=True):
        assert in_flight(row) <= room
        assert len({start[task] for task in row}) == len(row)
        assert start[row[-1]] + 1 - (start[row[0]] if stay else 0) <= slots
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


@pytest.mark.parametrize(("name", "sizes"), [("dualpipev", (2, 4, 2)), ("zbv", (3, 3, 2)), ("chimera", (4, 6, 1))])
def test_a_shorter_stay_that_the_oracle_finds_keeps_the_rules(name: str, sizes: Sizes) -> None:
    step, slots = step_of(actions_of(name, sizes)), optimum(actions_of(name, sizes), stay=True)
    start = starts_within(slots, step, stay=True)
    assert start is not None
    check_starts(start, step, slots, stay=True)
    assert slots < simulated(name, sizes)[1]
