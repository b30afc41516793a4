"""Table 1 of the ACCO paper: what is printed, formulas written here once more, and runs; a difference is told."""

import json

import pytest

from cdpsim.studies.table1 import METHODS, acco_table1
from tests.conftest import Command
from tests.helpers.command_line import assert_refused

PRINTED = {"DDP": 120, "ZeRO-1": 31, "SlowMo": 150, "CO2": 180, "ACCO": 46}  # GB, as the paper has them


def expected(n: int, p: float) -> dict[str, float]:
    """Bytes by the paper's formulas, with K = 12."""
    return {"DDP": 16 * p, "ZeRO-1": (4 + 12 / n) * p, "SlowMo": 20 * p, "CO2": 24 * p, "ACCO": (6 + 12 / n) * p}


@pytest.mark.parametrize(("n", "p"), [(64, 7.5e9), (8, 2.7e9), (2, 1e6), (16, 1.6e7)])
def test_formulas_are_what_runs_hold(n: int, p: float) -> None:
    """All that has to be held is more with ACCO alone: 6P + (12 + 16) P / N."""
    rows = {row.method.name: row for row in acco_table1(n, int(p))}
    assert {name: float(row.formula) for name, row in rows.items()} == pytest.approx(expected(n, p))
    assert {name: row.simulated for name, row in rows.items()} == pytest.approx(expected(n, p))
    held = expected(n, p) | {"ACCO": (6 + 28 / n) * p}
    assert {name: row.held for name, row in rows.items()} == pytest.approx(held)
    assert all(row.agrees for row in rows.values())
    assert {name: row.printed for name, row in rows.items()} == (PRINTED if n == 64 else dict.fromkeys(PRINTED))


def test_the_paper_s_case_and_the_smaller_one() -> None:
    """48.28125 GB are held where 46.40625 are counted, and 25.65 where 20.25 are."""
    last = {case: acco_table1(*case)[-1] for case in ((64, 7_500_000_000), (8, 2_700_000_000))}
    assert [(float(row.formula) / 1e9, row.held / 1e9) for row in last.values()] == [
        (46.40625, 48.28125),
        (20.25, 25.65),
    ]


def test_the_command_prints_it(command: Command) -> None:
    out = command("table1", "--paper", "acco").out.splitlines()
    assert out[0].split() == ["method", "schedule", "paper", "printed", "formula", "simulated", "held"]
    assert out[-1].split("  ")[-3:] == ["46.40625 GB", "46.40625 GB", "48.28125 GB"]
    rows = json.loads(command("table1", "--paper", "acco", "-n", "7", "--parameters", "1001", "--format", "json").out)
    assert [row["schedule"] for row in rows] == ["ddp", "zero-1", "slowmo", "co2", "acco"]
    assert all(row["agree"] and row["printed"] is None for row in rows)
    assert rows[1]["simulated"] == 4 * 1001 + -(-12 * 1001 // 7)


@pytest.mark.parametrize("wrong", [{"printed": 47}, {"numbers": 4}, {"is_split": False}])
def test_a_difference_is_told(command: Command, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, int]) -> None:
    monkeypatch.setitem(METHODS, "acco", METHODS["acco"]._replace(**wrong))  # type: ignore[arg-type]
    outcome = command("table1", "--paper", "acco")
    assert outcome.code == 1
    assert outcome.err == "cdpsim: printed, by formula and simulated disagree: ACCO\n"


REFUSED = {
    "table1 --paper acco --steps 4": "steps: is of the CDP paper's table",
    "table1 --paper acco --exact": "exact: is of the CDP paper's table",
    "table1 -n 4 --parameters 5": "parameters: are those of --paper acco",
    "table1 --paper acco -n 1": "n: n=1 must be at least 2",
    "table1 --paper acco --parameters x": "parameters: parameters=x must be a whole number",
    "table1 --paper other": "paper: ",
}


@pytest.mark.parametrize(("line", "fragment"), REFUSED.items())
def test_what_cannot_be_is_refused(command: Command, line: str, fragment: str) -> None:
    assert_refused(command(*line.split()), fragment)
