"""Table 1's cells against the spec's formulas, written down here a second time and checked cell by cell."""

from fractions import Fraction
from math import ceil, floor, log2
from typing import Any

import pytest

from cdpsim import RequestError, table1
from cdpsim.studies.table1 import QUANTITIES
from tests.conftest import Command

MANY = [*range(1, 13), 16, 17, 31, 33, 64]


def doubling(n: int) -> int:
    """Rounds of recursive doubling as the spec words them."""
    return int(log2(n)) if log2(n).is_integer() else floor(log2(n)) + 2


def spec(n: int) -> dict[str, tuple[Any, ...]]:
    """Spec section 4, transcribed: QUANTITIES in order."""
    f = Fraction
    if n == 1:
        one_device = (1, 1, 0, 0, 0, 0, 1)
        return dict.fromkeys(ROWS, one_device)
    return {
        "single-dp": (n, n, 0, 0, 0, 0, 1),
        "single-cdp": (f(n + 1, 2), f(n + 1, 2), 0, 0, 0, 0, 1),
        "multi-dp": (1, 1, f(n - 1, n), f(n - 1, n), 0, doubling(n), n),
        "multi-cdp": (1, 1, f(n - 1, n), f(n - 1, n), 0, 1, n),
        "mp-dp": (f(1, n), f(1, n), f(n - 1, n), f(n - 1, n), 1, doubling(n), n * n),
        "mp-cdp": (f(1, n), f(1, n), f(n - 1, 2 * n), f(n - 1, 2 * n), 1, 1, n * (n + 1) // 2),
        "pp-cdp": (1, f(1, n), 0, 0, 1, 1, n),
        "zero-dp": (1, f(2, n), f(n - 1, n), f(2 * (n - 1), n), 0, 2 * ceil(log2(n)), n),
        "zero-cdp": (1, f(1, n), 0, f(2 * (n - 1), n), 0, 1, n),
    }


ROWS = ["single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"]


@pytest.mark.parametrize("n", MANY)
def test_simulated_and_exact_cells_are_the_spec_s(n: int) -> None:
    """No tolerance: fractions in lowest terms."""
    rows = table1(n)
    assert [row["schedule"] for row in rows] == ROWS
    for row in rows:
        cells = spec(n)[row["schedule"]]
        assert [row[quantity]["simulated"] for quantity in QUANTITIES] == list(cells)
        assert [row[quantity]["exact"] for quantity in QUANTITIES] == list(cells)
        assert row["agree"]


@pytest.mark.parametrize("n", MANY)
@pytest.mark.parametrize(
    ("collective", "rounds"), [("ring", lambda n: 2 * (n - 1)), ("tree", lambda n: 2 * ceil(log2(n)))]
)
def test_rounds_are_those_of_the_collective(n: int, collective: str, rounds: Any) -> None:
    """multi-dp and mp-dp all-reduce; zero-dp always uses binomial trees."""
    cells = {row["schedule"]: row["rounds"]["simulated"] for row in table1(n, collective=collective)}
    assert cells["multi-dp"] == cells["mp-dp"] == rounds(n)
    assert cells["zero-dp"] == 2 * ceil(log2(n))


@pytest.mark.parametrize("n", MANY)
def test_shared_parameters(n: int) -> None:
    """One version for single-dp; floor(5N/3)/N for single-cdp, whose early stages need two at once."""
    rows = table1(n, shared_parameters=True)
    for column in ("exact", "simulated"):
        cells = {row["schedule"]: row["parameters"][column] for row in rows}
        assert cells["single-dp"] == 1
        assert cells["single-cdp"] == Fraction(5 * n // 3, n)
    assert all(row["agree"] for row in rows)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("steps", [4, 7])
def test_more_steps_change_no_cell(n: int, steps: int) -> None:
    """The table is about the steady state."""
    assert table1(n, steps=steps) == table1(n)


def test_both_engines_measure_the_same_table() -> None:
    """The table does not depend on the engine."""
    assert table1(5, engine="simpy") == table1(5, engine="fast")


@pytest.mark.every_case
@pytest.mark.parametrize("n", range(2, 13))
def test_cyclic_model_parallelism_halves_the_volume(n: int) -> None:
    """mp-cdp : mp-dp is exactly one half for gradients and parameters."""
    cells = {row["schedule"]: row for row in table1(n)}
    for quantity in ("gradient_volume", "parameter_volume"):
        assert 2 * cells["mp-cdp"][quantity]["simulated"] == cells["mp-dp"][quantity]["simulated"]


def test_beside_the_table_stand_versions_moves_and_wire_bytes() -> None:
    """Spec section 2's versions; the pyramid's moving optimizer states; 2(k-1)/k of everything on a ring."""
    beside = {b["schedule"]: b for b in table1(4, collective="ring").beside}
    assert {name for name, b in beside.items() if b["versions"] == 2} == {"single-cdp", "pp-cdp", "zero-cdp"}
    # Updaters change devices on stage 1 only: 4 mod 3 is not 0, 4 mod 4, 4 mod 2 and 4 mod 1 are.
    assert {name: b["optimizer_moves"] for name, b in beside.items() if b["optimizer_moves"]} == {"mp-cdp": 1}
    assert beside["multi-dp"]["wire_volume"] == Fraction(2 * 3, 4)
    assert beside["multi-cdp"]["wire_volume"] == Fraction(2 * 3, 4)


@pytest.mark.parametrize(("n", "steps"), [(0, 3), (2, 2), (True, 3), (2.0, 3), ("two", 3)])
def test_a_table_needs_whole_numbers_and_three_steps(n: Any, steps: Any) -> None:
    """The steady state takes three steps to show."""
    with pytest.raises(RequestError, match="must be"):
        table1(n, steps=steps)


def test_only_a_size_that_cannot_run_is_sent_to_the_formulas() -> None:
    """The formulas are no remedy for an unknown engine."""
    with pytest.raises(RequestError, match=r"^n: .*, or take --exact, which runs nothing$"):
        table1(10**6)
    with pytest.raises(RequestError, match=r"^engine: unknown engine 'quick'; known are auto, fast, simpy$"):
        table1(4, engine="quick")


def test_python_shows_what_the_command_line_prints(command: Command) -> None:
    """As text, in a notebook, and as a DataFrame with the values of the paper's formulas at N = 8."""
    table = table1(8)
    assert f"{table}\n" == command("table1", "-n", 8).out
    assert len(table) == 9 and table[5]["schedule"] == "mp-cdp" == list(table)[5]["schedule"]
    assert repr(table) == "Table1(N = 8: 9 schedules, simulated as exact)"
    shown = table._repr_html_()
    assert all(f"<td>{name}</td>" in shown for name in ROWS)
    frame = table.frame().set_index("schedule")
    assert dict(frame["gpus_simulated"].items()) == {
        **dict.fromkeys(["single-dp", "single-cdp"], 1),
        **dict.fromkeys(["multi-dp", "multi-cdp", "pp-cdp", "zero-dp", "zero-cdp"], 8),
        "mp-dp": 8**2,
        "mp-cdp": 8 * 9 / 2,
    }
    assert frame.loc["single-cdp", "activations_paper"] == "(N+1)/2 BΨA"
    assert frame.loc["single-cdp", "activations_exact"] == 9 / 2
