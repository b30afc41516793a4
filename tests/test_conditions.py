"""The conditions of each test: a limit to its time, globals that stay, numba hidden from every second worker."""

import sys
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

from cdpsim.numeric import paths
from tests import conditions
from tests.helpers.every_row import every_row


def test_a_test_that_takes_too_long_is_named_and_a_function_by_the_sum_of_its_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {"a.py::one[1]": 3.5, "a.py::one[2]": 1.0, **{f"a.py::two[{k}]": 2.9 for k in range(4)}, "a.py::three": 2.9}
    monkeypatch.setattr(conditions, "_seconds", taken)
    assert conditions.too_long(3.0) == [
        "a.py::one[1] took 3.5 s: make it quicker, or mark it slow",
        "a.py::two took 11.6 s: make it quicker, or mark it slow",
    ]
    assert conditions.too_long(None) == []


def test_a_global_that_is_left_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, and a variable of the context; what is put back is no change."""
    before = conditions.globals_of_the_package(len(sys.modules))
    assert conditions.changed_since(before) == []
    with monkeypatch.context() as changes, paths.expect_many_runs():
        changes.setattr(paths, "FEW_ROWS", 1)
        assert conditions.changed_since(before) == ["cdpsim.numeric.paths.FEW_ROWS", "cdpsim.numeric.paths._MANY_RUNS"]
    assert conditions.changed_since(before) == []


@pytest.mark.parametrize("draw", ["one", "two", "three", "four"])
def test_numba_is_hidden_from_every_second_worker(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And from none where all tests run in one process."""
    monkeypatch.delenv(conditions.WITHOUT_NUMBA, raising=False)
    option = SimpleNamespace(draw=draw)

    def hides(**worker: Any) -> bool:
        return conditions.hides_numba(SimpleNamespace(option=option, **worker))  # type: ignore[arg-type]

    assert sorted(hides(workerinput={"workerid": f"gw{k}"}) for k in range(4)) == [False, False, True, True]
    assert hides(workerinput={"workerid": "gw0"}) != hides(workerinput={"workerid": "gw1"})
    assert not hides()
    monkeypatch.setenv(conditions.WITHOUT_NUMBA, "1")
    assert hides() and hides(workerinput={"workerid": "gw0"}) and hides(workerinput={"workerid": "gw1"})


def test_compiled_loops_are_there_for_who_asks(compiled: Any) -> None:
    """Also in a worker from which numba is hidden."""
    assert compiled is paths.compiled_loops() is sys.modules["cdpsim.numeric.compiled"]


def test_no_lines_are_counted_where_that_is_asked_for() -> None:
    """Also where a counter waits behind another, as in a worker of pytest-cov."""
    coverage = pytest.importorskip("coverage")
    traced, before = sys.gettrace(), coverage.Coverage.current()
    counters = [coverage.Coverage(data_file=None, config_file=False) for _ in range(2)]
    for counter in counters:
        counter.start()
    try:
        with conditions.no_lines_counted():
            assert (coverage.Coverage.current(), sys.gettrace()) == (None, None)
        assert coverage.Coverage.current() is counters[1]
        assert sys.gettrace() is not None
    finally:
        for counter in reversed(counters):
            counter.stop()
    assert coverage.Coverage.current() is before
    assert (sys.gettrace() is None) == (traced is None)


def test_a_table_lists_its_rows_that_fail() -> None:
    """Each row is tried, also behind one that fails; fixtures are those of the test."""
    tried: list[tuple[int, str]] = []

    @every_row("number", [1, 2, 3, 4])
    def is_odd(number: int, fixture: str) -> None:
        tried.append((number, fixture))
        assert number % 2, f"{number} is even"

    with pytest.raises(AssertionError) as failure:
        is_odd(fixture="given")
    assert [line for line in str(failure.value).splitlines() if line[:1].isdigit()] == [
        "2: AssertionError: 2 is even",
        "4: AssertionError: 4 is even",
    ]
    assert tried == [(number, "given") for number in (1, 2, 3, 4)]
    assert list(signature(is_odd).parameters) == ["fixture"]
