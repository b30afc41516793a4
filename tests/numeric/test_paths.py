"""Longest paths and step functions: compiled, in numpy, and by hand the same."""

import sys
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
from cdpsim.numeric.disturbances import Calendar
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import simulate
from cdpsim.numeric import paths
from cdpsim.numeric.columns import dense_ranks, group_numbers, group_starts, sort_and_group, sort_by
from cdpsim.trace.metrics import memory


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Any, ...]:
    """Edges that go forward, then all nodes renamed; whole or real durations."""
    nodes = draw(st.integers(1, 12))
    pairs = [(a, b) for b in range(nodes) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    name = np.array(draw(st.permutations(range(nodes))), dtype=np.int32)
    before, after = (name[[edge[k] for edge in edges]].astype(np.int32) for k in (0, 1))
    values = st.integers(0, 9) if draw(st.booleans()) else st.floats(0, 9)
    costs = [np.array(draw(st.lists(values, min_size=nodes, max_size=nodes))) for _ in range(2)]
    kind = np.result_type(*costs)
    return before, after, *(cost.astype(kind) for cost in costs)


def by_hand(before: Any, after: Any, duration: Any, earliest: Any) -> list[Any]:
    """Relax every edge until nothing changes."""
    start: list[Any] = earliest.tolist()
    for _ in start:
        for a, b in zip(before.tolist(), after.tolist(), strict=True):
            start[b] = max(start[b], start[a] + duration[a])
    return start


@given(graphs())
def test_starts_are_those_of_relaxing_every_edge(graph: tuple[Any, ...]) -> None:
    """To the last bit, in Python."""
    start, end, done = paths.longest_paths_by_nodes(*graph)
    assert start.tolist() == by_hand(*graph)
    assert (start.dtype, end.dtype) == (graph[3].dtype, (graph[3] + graph[2]).dtype)
    assert (end == start + graph[2]).all()
    assert done == len(start)


@given(graphs())
def test_a_calendar_without_stops_changes_nothing(graph: tuple[Any, ...]) -> None:
    """To the last bit, though levels are swept in numpy."""
    nodes, never = len(graph[2]), np.full((2, 1), 10**9, dtype=graph[2].dtype)
    calendar = Calendar(np.zeros(nodes, dtype=np.int64), never, never)
    expected = paths.longest_paths_by_nodes(*graph)
    before, after, duration, earliest = graph
    start, end, done = paths.longest_paths(before, after, duration, earliest.copy(), calendar)
    assert (start.tolist(), end.tolist(), done) == (expected[0].tolist(), expected[1].tolist(), expected[2])


@given(graphs())
def test_compiled_code_and_python_agree(compiled: Any, graph: tuple[Any, ...]) -> None:
    """To the last bit; once as compiled code, once as the Python that it is compiled from."""
    expected = paths.longest_paths_by_nodes(*graph)
    before, after, duration, earliest = graph
    for sweep in (compiled.sweep_nodes, unwrap(compiled.sweep_nodes)):
        nodes, start = len(duration), earliest.copy()
        room = (np.zeros(rows, dtype=np.int32) for rows in (nodes, nodes + 1, len(before)))
        done = sweep(before, after, duration, start, *room)
        assert start.tolist() == expected[0].tolist()
        assert (start + duration).tolist() == expected[1].tolist()
        assert done == expected[2]


def test_a_cycle_is_not_reached() -> None:
    """Nodes 1 and 2 wait for each other, 3 for them; 0 is free."""
    before, after = np.array([1, 2, 2], dtype=np.int32), np.array([2, 1, 3], dtype=np.int32)
    assert paths.longest_paths_by_nodes(before, after, np.ones(4), np.zeros(4))[2] == 1
    calendar = Calendar(np.zeros(4, dtype=np.int64), np.full((2, 1), 9.0), np.full((2, 1), 9.0))
    assert paths.longest_paths(before, after, np.ones(4), np.zeros(4), calendar)[2] == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)), max_size=20))
def test_step_functions_agree(rows: list[tuple[int, int, int, int]]) -> None:
    """By sorting, compiled, and by adding up at each time."""
    key, a, b, size = (np.array([row[k] for row in rows], dtype=np.int64) for k in range(4))
    begin, end = np.minimum(a, b), np.maximum(a, b)
    found = [column.tolist() for column in memory.step_function(key, begin, end, size)]
    expected = []
    for k in range(4):
        last = 0
        for time in range(11):
            held = int(size[(key == k) & (begin <= time) & (time < end)].sum())
            if held != last:
                expected.append((k, time, held))
            last = held
    assert list(zip(*found, strict=True)) == expected


def test_moments_are_starts_and_ends_of_nodes(compiled: Any) -> None:
    """2 k is the start of node k, 2 k + 1 its end, and -1 the start of the run; the first node, too, may start late."""
    starts, ends = np.array([3, 7], dtype=np.int64), np.array([5, 8], dtype=np.int64)
    for times_of in (compiled.times_of_moments, unwrap(compiled.times_of_moments)):
        assert times_of(np.array([-1, 0, 1, 2, 3], dtype=np.int32), starts, ends).tolist() == [0, 3, 5, 7, 8]


@pytest.mark.every_case
@pytest.mark.parametrize("as_python", [True, False])
@pytest.mark.parametrize("name", ["multi-cdp", "zero-dp", "single-dp", "single-cdp", "pp-cdp"])
def test_large_programs_give_the_same_trace_with_and_without_compiled_code(
    name: str, as_python: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold picks the code that sweeps, not the result; compiled and plain code agree."""
    monkeypatch.setattr(paths, "FEW_ROWS", 10**9)
    trace = simulate(name, 6)
    plain = {table: getattr(trace, table) for table in ("tasks", "messages", "memory")}  # found now, not when asked for
    monkeypatch.setattr(paths, "FEW_ROWS", 0)
    if as_python:
        for function in ("sweep_nodes", "times_of_moments", "step_function_of_slots"):
            monkeypatch.setattr(compiled, function, unwrap(getattr(compiled, function)))
    swift = simulate(name, 6)
    for table, columns in plain.items():
        for column, values in columns.items():
            assert values.tolist() == getattr(swift, table)[column].tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20), st.sampled_from([1, 2**28, 2**40]))
def test_sorting_is_lexicographic_and_leaves_equal_rows_in_order(rows: list[tuple[int, int]], scale: int) -> None:
    """Also where the columns are too wide for one key, or for one with a row's number beside it."""
    columns = [np.array([row[k] * scale for row in rows], dtype=np.int64) for k in range(2)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    assert sort_by(*columns).tolist() == order
    begins = [k for k in range(len(rows)) if not k or rows[order[k]] != rows[order[k - 1]]]
    found, first = sort_and_group(*columns)
    assert (found.tolist(), first.tolist()) == (order, begins)


@given(st.lists(st.floats(0, 1e9) | st.integers(0, 3).map(float), max_size=20))
def test_ranks_are_places_among_the_different_values(values: list[float]) -> None:
    different = sorted(set(values))
    assert dense_ranks(np.array(values, dtype=np.float64)).tolist() == [different.index(value) for value in values]


def test_runs_number_what_heads_begin() -> None:
    """A run is a stretch of equal rows."""
    first = group_starts(np.array([3, 3, 1, 1, 3]), np.array([0, 0, 0, 1, 1]))
    assert first.tolist() == [0, 2, 3, 4]
    assert group_numbers(first, 5).tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("problem", [ImportError, RuntimeError])
def test_without_compiled_code_everything_is_swept_in_python(
    problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba may be missing, or may find no folder to keep its code in."""

    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cdpsim.numeric.compiled":
                raise problem("no numba here")

    expected = simulate("multi-cdp", 5).tasks["start"].tolist()
    monkeypatch.setattr(paths, "FEW_ROWS", 0)
    monkeypatch.setattr(paths, "LOAD_NUMBA_FROM_ROWS", 0)
    monkeypatch.delitem(sys.modules, "cdpsim.numeric.compiled", raising=False)
    monkeypatch.delattr("cdpsim.numeric.compiled", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    paths.compiled_loops.cache_clear()
    try:
        assert paths.compiled_loops() is None
        trace = simulate("multi-cdp", 5)
        assert trace.tasks["start"].tolist() == expected
        assert trace.summary()["devices"] == 5
    finally:
        paths.compiled_loops.cache_clear()


def test_numba_is_loaded_once_as_much_was_done_without_it_as_loading_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small work leaves it alone and does not count; work that comes after numba was loaded, by anyone, uses it."""
    monkeypatch.setattr(paths, "_swept_rows", 0)
    monkeypatch.setattr(paths, "compiled_loops", lambda: "compiled")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    most = paths.LOAD_NUMBA_FROM_ROWS
    assert [paths.compiled_loops_for(rows) for rows in (most // 2, 1, most // 2 - 1, paths.FEW_ROWS - 1)] == [None] * 4
    assert paths.compiled_loops_for(paths.FEW_ROWS) == "compiled"
    monkeypatch.setattr(paths, "_swept_rows", 0)
    monkeypatch.setitem(sys.modules, "numba", sys)
    assert [paths.compiled_loops_for(paths.FEW_ROWS - rows) for rows in (0, 1)] == ["compiled", None]


@given(graphs(), st.integers(1, 3))
def test_sweeping_runs_at_once_gives_the_ends_of_each(graph: tuple[Any, ...], runs: int) -> None:
    """To the last bit those of one run after another, whose durations and earliest starts differ."""
    before, after, duration, earliest = graph
    several, starts = (np.stack([times * (1 + run) for run in range(runs)], axis=1) for times in (duration, earliest))
    laid = paths.sort_into_levels(before, after, len(duration))
    ends = laid.sweep(several[laid.order], starts[laid.order])
    for run in range(runs):
        _, expected, _ = paths.longest_paths_by_nodes(before, after, several[:, run], starts[:, run])
        assert ends[np.argsort(laid.order), run].tolist() == expected.tolist()


def test_levels_wait_only_for_lower_ones() -> None:
    """A diamond with a tail: 0, then 1 and 2, then 3, which waits for both, then 4."""
    before, after = (np.array(ends, dtype=np.int32) for ends in ([0, 0, 1, 2, 3], [1, 2, 3, 3, 4]))
    laid = paths.sort_into_levels(before, after, 5)
    assert laid.order.tolist() == [0, 1, 2, 3, 4]
    assert laid.first.tolist() == [0, 1, 3, 4, 5]
    assert [[column.tolist() for column in level] for level in laid.waits] == [[], [[0, 0]], [[1], [2]], [[3]]]
