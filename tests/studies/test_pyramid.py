"""The pyramid proved (Appendix E; spec section 5): laws over drawn schedules, each with a fault that breaks it."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Model, RequestError, Schedule, Stage, Trace, load, simulate
from cdpsim.numeric.columns import Ints
from cdpsim.runs import Run
from cdpsim.schedules import TABLE_1
from cdpsim.schedules.order import CYCLIC, Order
from cdpsim.schedules.placement import BY_MICRO_BATCH, Shape
from cdpsim.schedules.rule import matrix_rule
from cdpsim.schedules.state import ALONG
from cdpsim.studies.pyramid import (
    Occupancies,
    assign_devices,
    find_conflict,
    largest_overlap,
    occupancies,
    path_cover,
    pyramid,
)
from tests.helpers.strategies import fitting

sizes = st.integers(1, 12)


def rows_of(trace: Run) -> Occupancies:
    """The occupancies of a simulated trace."""
    return occupancies(trace.program, trace.start, trace.end)


def staggered(offsets: list[int], n: int) -> Schedule:
    """Micro-batch i starts at a slot of its own within the step, not at 2i; on a device each, so that none waits."""

    def position(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
        start: Ints = 2 * n * t + np.array(offsets)[i] + phase
        return start

    order = Order("drawn", False, position, lambda i, shape: Fraction(offsets[i], 2 * n))
    stale = matrix_rule(np.zeros((len(offsets), n), dtype=bool))
    return Schedule("drawn", "drawn offsets", order, BY_MICRO_BATCH, stale, ALONG)


@st.composite
def drawn_offsets(draw: st.DrawFn) -> list[int]:
    """N start slots within a step of 2N, in order."""
    n = draw(st.integers(2, 7))
    return sorted([0, *draw(st.lists(st.integers(0, 2 * n - 1), min_size=n - 1, max_size=n - 1))])


@st.composite
def uneven_models(draw: st.DrawFn) -> Model:
    """Stages of whole but unequal times."""
    times = st.integers(1, 9).map(float)
    return Model(stages=tuple(Stage(forward=draw(times), backward=draw(times)) for _ in range(draw(st.integers(1, 7)))))


# (a) Under unit costs.


def check_every_steady_slot(rows: Occupancies, n: int, steps: int) -> None:
    """N(N+1)/2 occupied devices in each, N-j of stage j."""
    for slot in range(2 * (n - 1), 2 * n * steps):
        now = (rows.begin <= slot) & (slot < rows.end)
        assert now.sum() == n * (n + 1) // 2
        assert np.bincount(rows.stage[now], minlength=n).tolist() == list(range(n, 0, -1))


def check_lemma_1(rows: Occupancies, n: int) -> None:
    """A micro-batch occupies stage j for 2(N-j) slots."""
    assert (rows.end - rows.begin == 2 * (n - rows.stage)).all()


def check_round_robin(rows: Occupancies, n: int) -> None:
    """The (tN + i)-th occupancy of stage j goes to device (tN + i) mod (N-j): no device gets two at once."""
    assert find_conflict(rows, (rows.step * n + rows.micro_batch) % (n - rows.stage)) is None


@given(sizes, st.integers(2, 5))
def test_cyclic_timing_fills_the_pyramid_in_every_steady_slot(n: int, steps: int) -> None:
    """Lemma 1 and Propositions 2 and 3."""
    rows = rows_of(simulate("mp-cdp", n, steps=steps))
    check_every_steady_slot(rows, n, steps)
    check_lemma_1(rows, n)
    check_round_robin(rows, n)


def later(rows: Occupancies, row: int, begin: int, end: int) -> Occupancies:
    """Shift one occupancy."""
    begins, ends = rows.begin.copy(), rows.end.copy()
    begins[row] += begin
    ends[row] += end
    return replace(rows, begin=begins, end=ends)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("check", "begin", "end"),
    [
        (lambda rows: check_every_steady_slot(rows, 4, 3), 1, 1),
        (lambda rows: check_lemma_1(rows, 4), 1, 0),
        (lambda rows: check_round_robin(rows, 4), 0, 1),
    ],
)
@pytest.mark.parametrize("row", [5, 6, 17, 30])
def test_a_shifted_occupancy_breaks_each_check(
    check: Callable[[Occupancies], None], begin: int, end: int, row: int
) -> None:
    """So none of the checks passes on every input."""
    rows = rows_of(simulate("mp-cdp", 4))
    check(rows)
    with pytest.raises(AssertionError):
        check(later(rows, row, begin, end))


# (b) No assignment of any schedule uses fewer devices than the bound.


def check_bound(result: dict[str, Any]) -> None:
    """Bound <= overlap = path cover = devices, stage by stage; and the assignment is valid."""
    for stage in result["stages"]:
        assert stage["bound"] <= stage["overlap"]
        assert stage["overlap"] == stage["path_cover"] == stage["devices"]
    assert result["devices"] == sum(stage["devices"] for stage in result["stages"])


def certificate(trace: Run, result: dict[str, Any]) -> tuple[Occupancies, Any]:
    """The rows and the devices that the result assigns, matched by their keys."""
    rows = rows_of(trace)
    device = {(a["stage"], a["micro_batch"], a["step"]): a["device"] for a in result["assignment"]}
    keys = zip(rows.stage.tolist(), rows.micro_batch.tolist(), rows.step.tolist(), strict=True)
    return rows, np.array([device[key] for key in keys])


@given(drawn_offsets())
def test_no_drawn_schedule_needs_fewer_devices_than_the_bound(offsets: list[int]) -> None:
    """For all offsets, three derivations agree and the certificate holds."""
    n = len(offsets)
    trace = simulate(staggered(offsets, n), n, steps=4)
    result = pyramid(trace)
    check_bound(result)
    assert [stage["bound"] for stage in result["stages"]] == list(range(n, 0, -1))
    rows, device = certificate(trace, result)
    assert find_conflict(rows, device) is None
    for stage in result["stages"]:
        assert len(set(device[rows.stage == stage["stage"]])) == stage["devices"]


@given(uneven_models())
def test_evenly_spaced_micro_batches_reach_the_bound_of_unequal_stages(model: Model) -> None:
    """sum_j ceil(N * sum_{k>=j}(f_k + b_k) / period), and mp-cdp runs on that many devices without waiting."""
    n = model.n
    trace = simulate("mp-cdp", model=model, rule="cdp-v1", steps=4)
    result = pyramid(trace)
    check_bound(result)
    passes = [int(stage.forward + stage.backward) for stage in model.stages]
    expected = [-(-n * sum(passes[j:]) // sum(passes)) for j in range(n)]
    assert (
        [stage["devices"] for stage in result["stages"]] == [stage["bound"] for stage in result["stages"]] == expected
    )
    assert trace.summary()["devices"] == sum(expected)
    free = simulate("multi-cdp", model=model, rule="cdp-v1", steps=4)
    assert trace.summary()["makespan"] == pytest.approx(free.summary()["makespan"])


def test_uneven_spacing_exceeds_the_bound() -> None:
    """Two micro-batches of four stages, the second one slot late instead of four."""
    offsets = [0, 1, 4, 6]
    result = pyramid(simulate(staggered(offsets, 4), 4, steps=4))
    assert result["devices"] > result["bound"] == 10


@given(uneven_models(), st.integers(3, 6))
def test_waiting_for_fresh_parameters_never_goes_below_the_bound(model: Model, steps: int) -> None:
    """CDP-v2 under uneven costs is periodic sooner or later; then the bound holds for it too."""
    try:
        result = pyramid(simulate("multi-cdp", model=model, steps=4 * steps))
    except RequestError as error:
        assert "not periodic yet" in str(error)
        return
    check_bound(result)


@pytest.mark.parametrize("key", ["bound", "path_cover", "devices"])
def test_a_wrong_count_breaks_the_check(key: str) -> None:
    """One more or less anywhere is noticed."""
    for stage, change in product(range(4), (-1, 1)):
        result = pyramid(simulate("mp-cdp", 4))
        result["stages"][stage][key] += change
        if key == "bound" and change < 0:
            continue  # a bound may be lower than what it bounds
        with pytest.raises(AssertionError):
            check_bound(result)


def test_a_shared_device_is_a_conflict() -> None:
    """Two occupancies that overlap cannot have the same device of their stage."""
    rows = rows_of(simulate("mp-cdp", 3))
    device = assign_devices(rows)
    assert find_conflict(rows, device) is None
    for row in np.flatnonzero(rows.stage == 0)[1:-1].tolist():
        wrong = device.copy()
        wrong[row] = wrong[row + 1]
        assert find_conflict(rows, wrong) is not None


# The certificate's devices.


def in_tasks(trace: Trace) -> dict[tuple[int, int, int], set[int]]:
    """The devices on which tasks.csv has each micro-batch of each stage, in each step."""
    found: dict[tuple[int, int, int], set[int]] = {}
    columns = (trace.tasks[name].tolist() for name in ("kind", "stage", "micro_batch", "step", "device"))
    for kind, *key, device in zip(*columns, strict=True):
        if kind != "U":
            found.setdefault((key[0], key[1], key[2]), set()).add(device)
    return found


def assigned(result: dict[str, Any]) -> dict[tuple[int, int, int], set[int]]:
    """The device that a certificate gives to each micro-batch of each stage, in each step."""
    return {(a["stage"], a["micro_batch"], a["step"]): {a["device"]} for a in result["assignment"]}


@pytest.mark.every_case
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("name", ["mp-cdp", "mp-dp"])
def test_devices_of_one_stage_have_the_numbers_of_tasks_csv(name: str, n: int) -> None:
    trace = simulate(name, n)
    assert assigned(pyramid(trace)) == in_tasks(trace)


@given(uneven_models())
def test_devices_of_unequal_stages_have_the_numbers_of_tasks_csv(model: Model) -> None:
    trace = simulate("mp-cdp", model=model, rule="cdp-v1", steps=4)
    assert assigned(pyramid(trace)) == in_tasks(trace)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_device_of_a_certificate_serves_one_stage(name: str) -> None:
    """Where the run has devices that serve several, or several micro-batches at once, they are counted on from 0."""
    trace = simulate(**fitting(name, 5))
    result = pyramid(trace)
    of_stage: dict[int, set[int]] = {}
    for row in result["assignment"]:
        of_stage.setdefault(row["device"], set()).add(row["stage"])
    assert sorted(of_stage) == list(range(result["devices"]))
    assert all(len(stages) == 1 for stages in of_stage.values())
    counts = [sum(stages == {stage["stage"]} for stages in of_stage.values()) for stage in result["stages"]]
    assert counts == [stage["devices"] for stage in result["stages"]]
    rows, device = certificate(trace, result)
    assert find_conflict(rows, device) is None
    if assigned(result) != in_tasks(trace):
        assert name not in ("mp-cdp", "mp-dp")
        assert [of_stage[device] for device in sorted(of_stage)] == [
            {j} for j, count in enumerate(counts) for _ in range(count)
        ]


# (c) An exact solver finds the same optimum.


def solver_optimum(begin: Ints, end: Ints) -> int:
    """The fewest devices such that no two overlapping occupancies share one, by CP-SAT."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="OR-Tools is a test extra")
    count = len(begin)
    model = cp_model.CpModel()
    device = [model.new_int_var(0, count - 1, f"device{k}") for k in range(count)]
    for a in range(count):
        for b in range(a):
            if begin[a] < end[b] and begin[b] < end[a]:
                model.add(device[a] != device[b])
    most = model.new_int_var(0, count - 1, "most")
    model.add_max_equality(most, device)
    model.minimize(most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value) + 1


@pytest.mark.every_case
@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", ["mp-cdp", "mp-dp"])
def test_a_solver_finds_no_better_assignment(name: str, n: int) -> None:
    """Stage by stage, for two steps."""
    trace = simulate(name, n, steps=2)
    rows, result = rows_of(trace), pyramid(trace)
    for stage in result["stages"]:
        of_it = rows.stage == stage["stage"]
        assert solver_optimum(rows.begin[of_it], rows.end[of_it]) == stage["devices"]


def fewest_by_trying(begin: list[int], end: list[int]) -> int:
    """The fewest devices, by trying every assignment."""
    count = len(begin)
    for devices in range(1, count + 1):
        for choice in product(range(devices), repeat=count):
            clash = any(
                choice[a] == choice[b] and begin[a] < end[b] and begin[b] < end[a]
                for a in range(count)
                for b in range(a)
            )
            if not clash:
                return devices
    return 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), min_size=1, max_size=6))
def test_all_derivations_equal_trying_everything(intervals: list[tuple[int, int]]) -> None:
    """Overlap, path cover and assignment on any intervals."""
    intervals.sort()
    begin, end = np.array([b for b, _ in intervals]), np.array([b + length for b, length in intervals])
    none = np.zeros_like(begin)
    rows = Occupancies(none, np.arange(len(begin)), none, begin, end)
    fewest = fewest_by_trying(begin.tolist(), end.tolist())
    assert largest_overlap(begin, end) == path_cover(begin, end) == int(assign_devices(rows).max()) + 1 == fewest


def test_devices_that_serve_several_stages_can_beat_the_sum_of_ceilings() -> None:
    """The condition matters: 8 devices of one stage each, where 7 would do that serve any."""
    times = [(2.0, 2.0), (1.0, 2.0), (3.0, 3.0)]
    model = Model(stages=tuple(Stage(forward=f, backward=b) for f, b in times))
    trace = simulate("multi-cdp", model=model, rule="cdp-v1", steps=5)
    rows = rows_of(trace)
    assert pyramid(trace)["devices"] == pyramid(trace)["bound"] == 8
    assert largest_overlap(rows.begin, rows.end) == 7


# (d) A schedule that is not cyclic needs more.


@given(drawn_offsets())
def test_only_cyclic_offsets_make_do_with_the_pyramid(offsets: list[int]) -> None:
    """N(N+1)/2 devices if and only if the micro-batches are two slots apart."""
    n = len(offsets)
    result = pyramid(simulate(staggered(offsets, n), n, steps=4))
    apart = sorted((later - first) % (2 * n) for first, later in zip(offsets, offsets[1:] + offsets[:1], strict=True))
    assert (result["devices"] == n * (n + 1) // 2) == (apart == [2] * n)
    assert result["devices"] >= n * (n + 1) // 2


@pytest.mark.parametrize("n", range(2, 9))
def test_simultaneous_timing_needs_n_devices_for_every_stage(n: int) -> None:
    """N^2 in all."""
    result = pyramid(simulate("mp-dp", n))
    assert [stage["devices"] for stage in result["stages"]] == [n] * n


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_can_be_asked(name: str) -> None:
    """By its timing alone: cyclic ones need the pyramid, simultaneous ones the square."""
    result = pyramid(simulate(**fitting(name, 5)))
    check_bound(result)
    if name in TABLE_1:
        assert result["devices"] == (15 if SCHEDULES[name].order is CYCLIC else 25)


# Refusals, and columns that are left out.


def test_a_loaded_trace_is_refused(tmp_path: Any) -> None:
    """Its program is gone."""
    simulate("mp-cdp", 2).save(tmp_path / "trace")
    with pytest.raises(RequestError, match="simulate it again"):
        pyramid(load(tmp_path / "trace"))


def test_the_bound_needs_no_steps_of_its_own() -> None:
    """Five uneven stages under CDP-v2 take more than two steps to become periodic; the bound is of the steady state."""
    times = [(1.0, 9.0), (7.0, 2.0), (3.0, 3.0), (9.0, 1.0), (2.0, 8.0)]
    model = Model(stages=tuple(Stage(forward=f, backward=b) for f, b in times))
    few, many = (pyramid(simulate("multi-cdp", model=model, steps=steps)) for steps in (1, 40))
    bounds = [stage["bound"] for stage in few["stages"]]
    assert bounds == [stage["bound"] for stage in many["stages"]]
    assert [few[key] for key in ("period", "period_is")] == [many[key] for key in ("period", "period_is")]


@pytest.mark.slow
def test_path_covers_are_left_out_of_large_pyramids() -> None:
    """Null above 64 stages."""
    assert pyramid(simulate("mp-cdp", 65, steps=2))["stages"][0]["path_cover"] is None
    assert pyramid(simulate("mp-cdp", 64, steps=2))["stages"][0]["path_cover"] == 64
