"""Table 1 as it is printed: every form says the same, and what it says is what was computed."""

import csv
import io
import json
import re
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest

from cdpsim.studies.table1 import QUANTITIES, Table1, compute_table1
from cdpsim.studies.table1_forms import TABLE1_FORMS
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
    return compute_table1(n, **options)


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
    printed = json.loads(TABLE1_FORMS["json"](table))
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
    paper = {row["schedule"]: [row[quantity]["paper"] for quantity in QUANTITIES] for row in compute_table1(3).rows}
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
    rows = list(csv.DictReader(io.StringIO(TABLE1_FORMS["csv"](table))))
    assert [(row["schedule"], row["rule"], row["agree"]) for row in rows] == [
        (row["schedule"], row["rule"], "true") for row in table.rows
    ]
    for quantity in QUANTITIES:
        assert [(row[f"{quantity}_exact"], row[f"{quantity}_simulated"]) for row in rows] == cells(table)[quantity]
        assert [row[f"{quantity}_paper"] for row in rows] == [row[quantity]["paper"] for row in table.rows]


def blocks(text: str) -> list[list[str]]:
    """The two tables of the text form: two lines of header, a rule, nine rows."""
    parts = [part.splitlines() for part in text.split("\n\n")]
    return [part for part in parts if len(part) == 12]


def unmarked(text: str) -> str:
    """Text without the marks of footnotes; N² is no mark."""
    return re.sub(rf"(?<=[0-9])[{SUPERSCRIPTS}⁰]+", "", text)


@pytest.mark.every_case
def test_the_text_shows_every_cell_in_two_aligned_blocks(table: Table1) -> None:
    first, second = blocks(TABLE1_FORMS["text"](table))
    for block, quantities in (
        (first, ["activations", "parameters", "gpus"]),
        (second, ["gradient_volume", "parameter_volume", "boundary_volume", "rounds"]),
    ):
        assert block[2] == "-" * max(map(len, [*block[:2], *block[3:]]))
        assert len(block[2]) <= 125
        assert [line.split()[0] for line in block[3:]] == ROWS
        bars = [k for k, character in enumerate(block[1]) if character == "|"]
        assert all([k for k, c in enumerate(line) if c == "|"] == bars for line in block[3:])
        for k, line in enumerate(block[3:]):
            # `exact | simulated` stand on both sides of the last bar of each quantity.
            shown = re.findall(r"(?<= )([0-9/]+) *\| ([0-9/]+)(?= |$)", unmarked(line))
            assert shown == [cells(table)[quantity][k] for quantity in quantities]
            assert line.endswith("yes")


@pytest.mark.every_case
def test_footnotes_are_numbered_in_reading_order_one_for_each_reason(table: Table1) -> None:
    text = TABLE1_FORMS["text"](table)
    marks = re.findall(rf"(?<=[0-9])[{SUPERSCRIPTS}]", "".join(line for block in blocks(text) for line in block))
    notes = re.findall(rf"^([{SUPERSCRIPTS}]) (.+)$", text, re.MULTILINE)
    assert [mark for mark, _ in notes] == list(SUPERSCRIPTS[: len(notes)])
    assert set(marks) == {mark for mark, _ in notes}
    reasons = [reason for _, reason in notes]
    assert len(set(reasons)) == len(reasons)
    # By quantity, as a person reads the columns.
    columns = re.findall(rf"(?<=[0-9])[{SUPERSCRIPTS}]", "".join(by_column(text)))
    assert list(dict.fromkeys(columns)) == list(SUPERSCRIPTS[: len(notes)])


def by_column(text: str) -> list[str]:
    """The cells of both blocks, column after column."""
    result = []
    for block in blocks(text):
        edges = [0, *(k for k, character in enumerate(block[1]) if character == "|"), max(map(len, block))]
        for low, high in pairwise(edges):
            result += [line[low:high] for line in block[3:]]
    return result


def test_a_cell_has_a_footnote_where_it_is_not_what_the_paper_prints() -> None:
    """At N = 3: leading terms of volumes, ZeRO's gathered stage and its travelling gradients."""
    first, second = blocks(TABLE1_FORMS["text"](compute_table1(3)))
    marked = {line.split()[0] for line in first[3:] if unmarked(line) != line}
    assert marked == {"zero-dp"}
    marked = {line.split()[0] for line in second[3:] if unmarked(line) != line}
    assert marked == {"multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "zero-dp", "zero-cdp"}


def test_a_table_of_one_stage_says_that_nothing_is_sent() -> None:
    text = TABLE1_FORMS["text"](compute_table1(1))
    assert "one device sends no messages" in text
    assert "one stage has no boundary" in text
    assert "a ring takes" not in TABLE1_FORMS["text"](compute_table1(1, collective="ring"))
    assert "a ring takes 2(N-1) rounds, which is O(N)" in TABLE1_FORMS["text"](compute_table1(3, collective="ring"))


def disagreeing() -> Table1:
    """A table with one simulated cell that is wrong."""
    table = compute_table1(3)
    table.rows[5]["rounds"]["simulated"] += 1
    table.rows[5]["agree"] = False
    return table


@pytest.mark.parametrize(("form", "words"), [("text", "1     | 2 ≠"), ("markdown", "| 2 ≠ "), ("latex", r"& 2 $\neq$")])
def test_a_wrong_cell_is_marked(form: str, words: str) -> None:
    text = TABLE1_FORMS[form](disagreeing())
    assert text.count(words) == 1
    line = next(line for line in text.splitlines() if words in line)
    assert "mp-cdp" in line
    assert "NO" in line
    assert words not in TABLE1_FORMS[form](compute_table1(3))


@pytest.mark.every_case
def test_markdown_shows_every_cell(table: Table1) -> None:
    text = unmarked(TABLE1_FORMS["markdown"](table))
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {11, 13, 4}
    for name, exact in (("activations", 2), ("parameters", 5), ("gpus", 8)):
        shown = [(row[exact], row[exact + 1]) for row in rows if len(row) == 11][2:]
        assert shown == cells(table)[name]
    for name, exact in (("gradient_volume", 2), ("parameter_volume", 4), ("boundary_volume", 7), ("rounds", 10)):
        shown = [(row[exact], row[exact + 1]) for row in rows if len(row) == 13][2:]
        assert shown == cells(table)[name]


def latex_lines(text: str) -> list[list[str]]:
    """The cells of every line of every tabular; wide cells as often as they are wide."""
    lines = []
    for line in text.splitlines():
        if line.endswith(r"\\"):
            row: list[str] = []
            for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\")):
                wide = re.match(r"\s*\\multicolumn\{(\d+)\}", cell)
                row += [cell.strip()] * (int(wide[1]) if wide else 1)
            lines.append(row)
    return lines


@pytest.mark.every_case
def test_latex_is_balanced_and_every_line_has_all_its_columns(table: Table1) -> None:
    text = TABLE1_FORMS["latex"](table)
    assert text.isascii()
    assert text.count("{") == text.count("}")
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text) == ["tabular"] * 3
    commands = {r"\begin", r"\end", r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule", r"\multicolumn", r"\par"}
    commands |= {r"\textsuperscript", r"\Psi", r"\mathrm", r"\mathcal", r"\log", r"\usepackage"}
    assert set(re.findall(r"\\[a-zA-Z]+", text)) <= commands
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        outside = "".join(line.split("$")[::2])
        assert not re.search(r"(?<!\\)[_^#]", outside), line
        assert "%" not in line or line.startswith("% needs")
    widths = [len(columns) for columns in re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)]
    assert widths == [11, 13, 4]
    assert [len(row) for row in latex_lines(text)] == [11] * 11 + [13] * 11 + [4] * 10
    assert re.findall(r"\\cmidrule\(lr\)\{(\d+-\d+)\}", text) == ["2-4", "5-7", "8-10", "2-4", "5-6", "7-9", "10-12"]


@pytest.mark.every_case
def test_latex_shows_every_cell(table: Table1) -> None:
    rows = [
        [re.sub(r"\\textsuperscript\{\d\}", "", c) for c in row] for row in latex_lines(TABLE1_FORMS["latex"](table))
    ]
    for name, exact in (("activations", 2), ("parameters", 5), ("gpus", 8)):
        assert [(row[exact], row[exact + 1]) for row in rows[2:11]] == cells(table)[name]
    for name, exact in (("gradient_volume", 2), ("parameter_volume", 4), ("boundary_volume", 7), ("rounds", 10)):
        assert [(row[exact], row[exact + 1]) for row in rows[13:22]] == cells(table)[name]
    assert rows[7][1] == r"$B\Psi_A/N$"
    assert rows[6][7] == "$N^2$"
    assert rows[17][6] == r"$B\Psi_A^{\mathrm{int}}$"
    assert rows[15][9] == r"$\mathcal{O}(\log N)$"


@pytest.mark.parametrize("form", TABLE1_FORMS)
def test_the_same_request_gives_the_same_bytes(form: str, command: Command) -> None:
    """Whichever engine ran."""
    printed: set[Any] = {command("table1", "-n", 3, "--format", form, "--engine", e) for e in ("auto", "fast", "simpy")}
    printed.add(command("table1", "-n", 3, "--format", form, "--steps", 4))
    assert len(printed) == 1


def test_more_than_nine_footnotes_have_two_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cdpsim.studies.table1_forms.footnote", lambda row, quantity, *_: f"{row['schedule']} {quantity}"
    )
    text = TABLE1_FORMS["text"](compute_table1(2))
    assert "¹⁰ single-cdp parameters" not in text
    assert "¹⁰ single-dp parameters" in text
    assert r"\textsuperscript{1}\textsuperscript{0} single-dp parameters" in TABLE1_FORMS["latex"](compute_table1(2))
