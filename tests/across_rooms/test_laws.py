"""Laws that hold for every program, drawn by hypothesis."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, EdgeKind, Kind
from cdpsim.program.check import check_program
from cdpsim.runs import Run
from cdpsim.schedules import TABLE_1, Schedule
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.order import Lists
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.state import ALONG, REPLICATED, Placed
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import ENGINES
from cdpsim.trace.metrics import memory
from tests.helpers.strategies import prefetching, requests, taken
from tests.helpers.times import are_no_later
from tests.selection import Examples

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_both_engines_give_the_same_times_to_the_last_bit(part: int, examples: Examples) -> None:
    """Longest paths and the event loop are two readings of one program: 2,000 of them, in parts for several workers."""

    @settings(max_examples=examples(2000 // PARTS))
    @given(requests())
    def law(request: dict[str, Any]) -> None:
        run = simulate(**request, engine="fast").whole
        start, end = ENGINES["simpy"](run.program, run.costs)
        assert run.start.dtype == start.dtype
        assert np.array_equal(run.start, start)
        assert np.array_equal(run.end, end)

    # Where the same examples are tried every time, each part has its own.
    (seed(part)(law) if settings().derandomize else law)()


@given(requests())
def test_every_assembled_program_keeps_the_rules(request: dict[str, Any]) -> None:
    """Every assembled program passes the checks that refuse broken programs."""
    check_program(simulate(**request).program)


@given(requests())
def test_nothing_starts_before_what_it_waits_for_has_ended(request: dict[str, Any]) -> None:
    """Dependencies and lane orders hold in the times."""
    run = simulate(**request).whole
    edges, (before, after) = run.program.edges, run.program.lane_edges
    assert (run.end[edges.before] <= run.start[edges.after]).all()
    assert (run.end[before] <= run.start[after]).all()


@given(requests())
def test_a_version_exists_before_it_is_read(request: dict[str, Any]) -> None:
    """The update that makes a version ends before its readers start, at all costs drawn."""
    run = simulate(**request).whole
    tasks = run.program.tasks
    made = {(v, j, d): node for node, (v, j, d) in _updates(run)}
    anywhere: dict[tuple[int, int], float] = {}
    for (v, j, _), node in made.items():
        anywhere[v, j] = min(anywhere.get((v, j), np.inf), run.end[node])
    for task in np.flatnonzero((tasks.kind == Kind.F) & (tasks.version > 0)):
        assert anywhere[int(tasks.version[task]), int(tasks.stage[task])] <= run.start[task]


def _updates(run: Run) -> list[tuple[int, tuple[int, int, int]]]:
    tasks = run.program.tasks
    nodes = np.flatnonzero(tasks.kind == Kind.U).tolist()
    return [(k, (int(tasks.version[k]), int(tasks.stage[k]), int(tasks.device[k]))) for k in nodes]


@given(requests())
def test_a_reader_holds_what_it_reads(request: dict[str, Any]) -> None:
    """While a task runs, its device holds the version that it reads, if a version weighs anything."""
    run = simulate(**request).whole
    tasks, buffers = run.program.tasks, run.program.buffers
    begin, end = memory.buffer_spans(buffers, run.start, run.end)
    spans: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for b in np.flatnonzero(buffers.category == Category.PARAMETERS).tolist():
        key = int(buffers.device[b]), int(buffers.stage[b]), int(buffers.version[b])
        spans.setdefault(key, []).append((begin[b], end[b]))
    weighs = [stage for _, stage, _ in spans]
    for k in np.flatnonzero((tasks.kind != Kind.U) & np.isin(tasks.stage, weighs)).tolist():
        device, stage, version = int(tasks.device[k]), int(tasks.stage[k]), int(tasks.version[k])
        assert any(a <= run.start[k] and run.end[k] <= b for a, b in spans[device, stage, version])


@given(requests())
def test_what_is_held_is_freed(request: dict[str, Any]) -> None:
    """Every memory curve is positive between its rows and ends at 0."""
    curve = simulate(**request).memory
    ends: dict[tuple[int, str], int] = {}
    for device, category, size in zip(curve["device"], curve["category"], curve["size"], strict=True):
        assert size >= 0
        ends[device, category] = size
    assert set(ends.values()) <= {0}


@given(requests())
def test_no_buffer_ends_before_it_begins(request: dict[str, Any]) -> None:
    """Every holding is an interval."""
    run = simulate(**request).whole
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    assert (begin <= end).all()


@given(requests())
def test_the_busiest_lane_and_the_longest_pass_fit_into_the_run(request: dict[str, Any]) -> None:
    """A run takes at least as long as its busiest lane and as any micro-batch's forwards and backwards.

    These wait for each other; weights' parts of backwards do not.
    """
    trace = simulate(**request)
    run, program = trace, trace.program
    lanes = np.add.reduceat(run.costs.duration[program.lane_tasks], program.lane_start[:-1])
    passes = run.costs.duration[: program.compute].reshape(-1, program.phases)[:, : 2 * program.n].sum(axis=1)
    assert trace.summary()["makespan"] >= max(lanes.max(), passes.max()) * (1 - 1e-12)


@given(requests(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scaling_all_costs_scales_all_times(request: dict[str, Any], factor: float) -> None:
    """Times scale with costs; by powers of two exactly."""
    run = simulate(**request).whole
    costs = Costs(run.costs.duration * factor, run.costs.rounds, run.costs.release * factor)
    start, end = ENGINES["fast"](run.program, costs)
    assert np.array_equal(start, run.start * factor)
    assert np.array_equal(end, run.end * factor)


@given(requests(), st.data())
def test_more_cost_never_ends_anything_earlier(request: dict[str, Any], data: st.DataObject) -> None:
    """Without contention there is no task or message whose slowing speeds another."""
    run = simulate(**request).whole
    duration = run.costs.duration.astype(float)
    for node in data.draw(st.lists(st.integers(0, len(duration) - 1), min_size=1, max_size=3)):
        duration[node] += data.draw(st.floats(0, 10))
    start, end = ENGINES["fast"](run.program, replace(run.costs, duration=duration))
    assert (start >= run.start).all()
    assert (end >= run.end).all()


@given(requests())
def test_free_communication_never_slows(request: dict[str, Any]) -> None:
    """A program whose messages take no time ends no task later."""
    run = simulate(**request).whole
    duration = run.costs.duration.copy()
    duration[len(run.program.tasks) :] = 0
    _, end = ENGINES["fast"](run.program, replace(run.costs, duration=duration))
    assert (end <= run.end).all()


def relabelled(schedule: Schedule, label: Ints) -> Schedule:
    """The same schedule where the devices of a replica have other numbers."""
    place, listing = schedule.placement.device, schedule.order.lists

    def placed(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
        device: Ints = label[place(i, j, t, shape)]
        return device

    def done(shape: Shape) -> Actions:
        assert listing is not None
        actions = listing.write_out(shape)
        lists = [np.arange(*actions.first[device : device + 2]) for device in np.argsort(label)]
        rows = np.concatenate(lists)
        kind, stage, micro_batch = (column[rows] for column in (actions.kind, actions.stage, actions.micro_batch))
        return Actions(np.cumsum([0, *map(len, lists)]), kind, stage, micro_batch)

    if listing is not None:
        lists = Lists(
            lambda devices, m, chunks: done(Shape(devices * chunks, m, chunks)),
            replicated=lambda widths, m: done(Shape(len(widths), m, widths=widths)),
        )
        return replace(schedule, name="relabelled", order=replace(schedule.order, position=lists))
    return replace(schedule, name="relabelled", placement=replace(schedule.placement, device=placed))


@given(requests(), st.randoms(use_true_random=False))
def test_relabelling_devices_changes_nothing_else(request: dict[str, Any], random: Any) -> None:
    """Under equal devices and links a schedule does not care which device has which number."""
    schedule = request["schedule"]
    if schedule.state.parameters is Placed.OWNED:  # a state starts on device j: there the number means something
        schedule = replace(schedule, name="replicated", state=REPLICATED if schedule.order.together else ALONG)
    model, link = request.get("model"), Link(latency=0.5, bandwidth=1e6)
    same = Cluster(devices=(Devices(speed=1.0),), link=link) if model else Cluster.unit()
    request = taken(request | {"schedule": schedule, "cluster": same, "prefetch": 0})
    run = simulate(**request).whole
    own = run.program.devices // run.request.shape.replicas
    label = list(range(own))
    random.shuffle(label)
    other = simulate(**request | {"schedule": relabelled(schedule, np.array(label))}).whole
    compute = slice(run.program.compute)
    replica, device = np.divmod(run.program.tasks.device[compute], own)
    assert np.array_equal(own * replica + np.array(label)[device], other.program.tasks.device[compute])
    assert np.array_equal(run.start[compute], other.start[compute])
    assert sorted(map(tuple, memory.peak_memory(run.program, run.start, run.end).tolist())) == sorted(
        map(tuple, memory.peak_memory(other.program, other.start, other.end).tolist())
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("model", ["unit", Model(stages=(Stage(forward=0.25, backward=0.7, parameters=9),))])
def test_one_stage_takes_equally_long_under_every_schedule(steps: int, model: str | Model) -> None:
    """With one stage and one micro-batch there is nothing to schedule."""
    assert len({simulate(name, 1, steps=steps, model=model).summary()["makespan"] for name in TABLE_1}) == 1


@given(requests(where=prefetching))
def test_prefetching_never_delays_a_task(request: dict[str, Any]) -> None:
    """Parameters that may arrive earlier make no task start later, but for the quanta in which each run counts."""
    now, later = (simulate(**request | {"prefetch": k}) for k in (2, 0))
    compute = slice(len(now.program.tasks))
    assert are_no_later(now.start[compute], later.start[compute])


@given(requests(where=prefetching))
def test_a_pulled_message_finds_room(request: dict[str, Any]) -> None:
    """Parameters arrive only after the device has ended the task that is `prefetch` + 1 places before their reader."""
    run = simulate(**request).whole
    program, edges = run.program, run.program.edges
    room = (edges.kind == EdgeKind.ROOM) & (edges.after >= len(program.tasks))  # others: updates take turns on a host
    receivers = program.tasks.device[edges.before[room]]
    for device, node in zip(receivers.tolist(), (edges.after[room] - len(program.tasks)).tolist(), strict=True):
        group = program.messages.dst[node]
        assert device in (program.groups[group] if program.groups else [group])
