"""Table 1 as it is printed: every form says the same, and what it says is what was computed."""

import csv
import io
import json
import re
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from cdpsim.files.tables import FORMATS
from cdpsim.studies.table1 import QUANTITIES, Table1, table1
from tests.conftest import Command

ROWS = ["single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"]
SUPERSCRIPTS = "¹²³⁴⁵⁶⁷⁸⁹"
MANY = [1, 2, 3, 4, 5, 8]
OPTIONS: list[dict[str, Any]] = [{}, {"collective": "ring"}, {"collective": "tree", "shared_parameters": True}]


@pytest.fixture(
    scope="module", params=product(MANY, OPTIONS), ids=lambda case: f"{case[0]}-{case[1].get('collective', 'doubling')}"
)
def table(request: pytest.FixtureRequest) -> Table1:
    """Small and large ones, with and without footnotes of every kind."""
    n, options = request.param
    return table1(n, **options)


def cells(table: Table1) -> dict[str, list[tuple[str, str]]]:
    """Return the cells that every form must show: (exact, simulated) of each row, by quantity."""
    return {q: [(str(row[q]["exact"]), str(row[q]["simulated"])) for row in table.rows] for q in QUANTITIES}


def test_json_is_the_contract_s_to_the_letter(command: Command) -> None:
    """Keys and their order, rows and their order, fractions as strings in lowest terms."""
    printed = json.loads(command("table1", "-n", 4, "--format", "json").out)
    assert list(printed)[:1] + list(printed)[2:3] == ["n", "rows"]
    assert (printed["n"], printed["collective"]) == (4, "recursive-doubling")
    assert [row["schedule"] for row in printed["rows"]] == ROWS
    assert json.dumps(printed["rows"][5], ensure_ascii=False) == (
        '{"schedule": "mp-cdp", "rule": "cdp-v2", '
        '"activations": {"paper": "BΨA/N", "exact": "1/4", "simulated": "1/4"}, '
        '"parameters": {"paper": "ΨP/N", "exact": "1/4", "simulated": "1/4"}, '
        '"gradient_volume": {"paper": "ΨP/2", "exact": "3/8", "simulated": "3/8"}, '
        '"parameter_volume": {"paper": "", "exact": "3/8", "simulated": "3/8"}, '
        '"boundary_volume": {"paper": "BΨint", "exact": "1", "simulated": "1"}, '
        '"rounds": {"paper": "O(1)", "exact": "1", "simulated": "1"}, '
        '"gpus": {"paper": "N(N+1)/2", "exact": "10", "simulated": "10"}, '
        '"agree": true}'
    )


@pytest.mark.every_case
def test_json_has_every_cell_as_an_integer_or_a_fraction(table: Table1) -> None:
    printed = json.loads(table.printed("json"))
    assert printed["collective"] == table.collective
    for row, computed in zip(printed["rows"], table.rows, strict=True):
        assert list(row) == ["schedule", "rule", *QUANTITIES, "agree"]
        assert row["agree"] is True
        for quantity in QUANTITIES:
            assert list(row[quantity]) == ["paper", "exact", "simulated"]
            for kind in ("exact", "simulated"):
                text = row[quantity][kind]
                assert text == str(Fraction(text))
                assert Fraction(text) == computed[quantity][kind]


def test_what_the_paper_prints_is_shown_as_printed() -> None:
    """The paper's Table 1, with micro-batches of B samples on N devices or more."""
    paper = {row["schedule"]: [row[quantity]["paper"] for quantity in QUANTITIES] for row in table1(3).rows}
    assert paper == {
        "single-dp": ["NBΨA", "NΨP", "", "", "", "", ""],
        "single-cdp": ["(N+1)/2 BΨA", "(N+1)/2 ΨP", "", "", "", "", ""],
        "multi-dp": ["BΨA", "ΨP", "ΨP", "", "", "O(log N)", "N"],
        "multi-cdp": ["BΨA", "ΨP", "ΨP", "", "", "O(1)", "N"],
        "mp-dp": ["BΨA/N", "ΨP/N", "ΨP", "", "BΨint", "O(log N)", "N²"],
        "mp-cdp": ["BΨA/N", "ΨP/N", "ΨP/2", "", "BΨint", "O(1)", "N(N+1)/2"],
        "pp-cdp": ["BΨA", "ΨP/N", "", "", "BΨint", "O(1)", "N"],
        "zero-dp": ["BΨA", "ΨP/N", "ΨP", "", "", "O(log N)", "N"],
        "zero-cdp": ["BΨA", "ΨP/N", "ΨP", "", "", "O(1)", "N"],
    }


@pytest.mark.every_case
def test_csv_has_three_columns_a_quantity(table: Table1) -> None:
    rows = list(csv.DictReader(io.StringIO(table.printed("csv"))))
    assert [(row["schedule"], row["rule"], row["agree"]) for row in rows] == [
        (row["schedule"], row["rule"], "true") for row in table.rows
    ]
    for quantity in QUANTITIES:
        assert [(row[f"{quantity}_exact"], row[f"{quantity}_simulated"]) for row in rows] == cells(table)[quantity]
        assert [row[f"{quantity}_paper"] for row in rows] == [row[quantity]["paper"] for row in table.rows]


BLOCKS = (
    ("activations", "parameters", "gpus"),
    ("gradient_volume", "parameter_volume"),
    ("boundary_volume", "rounds"),
)


def blocks(table: Table1, form: str = "text") -> list[list[list[str]]]:
    """The tables of a form for people, each a header and nine rows; the fourth is beside them."""
    text = table.printed(form)
    if form == "latex":
        parts = re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.DOTALL)
        return [[_latex_cells(line) for line in part.splitlines() if "&" in line] for part in parts]
    parts = [part.splitlines() for part in text.split("\n\n") if "\n---" in part]
    found = []
    for header, rule, *rows in parts:
        ends = [match.span() for match in re.finditer("-+", rule)]
        found.append([[line[low:high].strip() for low, high in ends] for line in [header, *rows]])
    return found


def _latex_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removesuffix(r"\\").split("&")]


def unmarked(text: str) -> str:
    """A cell without the marks of footnotes; N² is no mark."""
    return re.sub(rf"(?<=[0-9])([{SUPERSCRIPTS}⁰]|\\textsuperscript{{\d}})+", "", text)


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["text", "latex"])
def test_people_see_every_cell_in_blocks_of_a_width_for_a_terminal(table: Table1, form: str) -> None:
    *found, beside = blocks(table, form)
    for block, quantities in zip(found, BLOCKS, strict=True):
        assert [row[0] for row in block] == ["schedule", *ROWS]
        for k, quantity in enumerate(quantities):
            paper, exact, simulated = (3 * k + 1 + value for value in range(3))
            assert block[0][paper] in (quantity.replace("_", " "), "GPUs")
            assert block[0][exact : simulated + 1] == ["exact", "simulated"]
            assert [(unmarked(row[exact]), row[simulated]) for row in block[1:]] == cells(table)[quantity]
            if form == "text":
                assert [row[paper] for row in block[1:]] == [row[quantity]["paper"] for row in table.rows]
    assert [row[-1] for row in found[-1]] == ["agree", *["yes"] * 9]
    assert [row[0] for row in beside] == ["schedule", *ROWS]
    lines = table.printed().split("\n\nactivations in")[0].splitlines()
    assert max(map(len, lines)) <= 100


@pytest.mark.every_case
def test_footnotes_are_numbered_in_reading_order_one_for_each_reason(table: Table1) -> None:
    """By column, as a person reads a quantity."""
    columns = [column for block in blocks(table)[:3] for column in zip(*block[1:], strict=True)]
    marks = re.findall(rf"(?<=[0-9])[{SUPERSCRIPTS}]", " ".join(" ".join(column) for column in columns))
    notes = re.findall(rf"^([{SUPERSCRIPTS}]) (.+)$", table.printed(), re.MULTILINE)
    assert [mark for mark, _ in notes] == list(dict.fromkeys(marks)) == list(SUPERSCRIPTS[: len(notes)])
    assert len({reason for _, reason in notes}) == len(notes)


def test_a_cell_has_a_footnote_where_it_is_not_what_the_paper_prints() -> None:
    """At N = 3: leading terms of volumes, ZeRO's gathered stage and its travelling gradients."""
    marked = [{row[0] for row in block if list(map(unmarked, row)) != row} for block in blocks(table1(3))[:3]]
    assert marked == [{"zero-dp"}, {"multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "zero-dp", "zero-cdp"}, set()]


def test_a_table_of_one_stage_says_that_nothing_is_sent() -> None:
    text = table1(1).printed()
    assert "one device sends no messages" in text
    assert "one stage has no boundary" in text
    assert "a ring takes" not in table1(1, collective="ring").printed()
    assert "a ring takes 2(N-1) rounds, which is O(N)" in table1(3, collective="ring").printed()


def disagreeing() -> Table1:
    """A table with one simulated cell that is wrong."""
    table = table1(3)
    table.rows[5]["rounds"]["simulated"] += 1
    table.rows[5]["agree"] = False
    return table


@pytest.mark.parametrize(("form", "cell"), [("text", "2 ≠"), ("latex", r"2 $\neq$")])
def test_a_wrong_cell_is_marked(form: str, cell: str) -> None:
    for table, count in ((disagreeing(), 1), (table1(3), 0)):
        rows = [row for block in blocks(table, form) for row in block if cell in row]
        assert [(row[0], row[-1]) for row in rows] == [("mp-cdp", "NO")] * count


@pytest.mark.every_case
def test_latex_is_balanced_and_its_formulas_are_mathematics(table: Table1) -> None:
    text = table.printed("latex")
    assert text.isascii()
    assert text.count("{") == text.count("}")
    assert re.findall(r"\\begin\{tabular\}\{(\w+)\}", text) == ["l" * 10, "l" * 7, "l" * 8, "l" * 4]
    commands = {r"\begin", r"\end", r"\toprule", r"\midrule", r"\bottomrule", r"\par", r"\usepackage"}
    commands |= {r"\textsuperscript", r"\Psi", r"\mathrm", r"\mathcal", r"\log"}
    assert set(re.findall(r"\\[a-zA-Z]+", text)) <= commands
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        outside = "".join(line.split("$")[::2])
        assert not re.search(r"(?<!\\)[_^#]", outside), line
        assert "%" not in line or line == "% needs \\usepackage{booktabs}"
    assert text.startswith("% needs")
    assert text.count("%") == 1
    first, _, third, _ = blocks(table, "latex")
    assert (first[6][1], first[5][7]) == (r"$B\Psi_A/N$", "$N^2$")
    assert (third[5][1], third[3][4]) == (r"$B\Psi_A^{\mathrm{int}}$", r"$\mathcal{O}(\log N)$")


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_request_gives_the_same_bytes(form: str, command: Command) -> None:
    """Whichever engine ran."""
    printed: set[Any] = {command("table1", "-n", 3, "--format", form, "--engine", e) for e in ("auto", "fast", "simpy")}
    printed.add(command("table1", "-n", 3, "--format", form, "--steps", 4))
    assert len(printed) == 1


def test_more_than_nine_footnotes_have_two_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdpsim.studies.table1.footnote", lambda row, quantity, *_: f"{row['schedule']} {quantity}")
    text = table1(2).printed()
    assert "¹⁰ single-cdp parameters" not in text
    assert "¹⁰ single-dp parameters" in text
    assert r"\textsuperscript{1}\textsuperscript{0} single-dp parameters" in table1(2).printed("latex")
