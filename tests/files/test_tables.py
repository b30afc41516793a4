"""Tables in all forms, each as its readers expect it."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import itemgetter

import numpy as np
import pytest

from cdpsim import RequestError
from cdpsim.files.tables import (
    DATA_FORMATS,
    FORMATS,
    Column,
    PrintedTable,
    as_csv,
    as_json,
    as_text,
    check_format,
    latex_text,
    with_words,
)

HEADER = ("name", "size", "about")

ROWS = [("a|b", "1/2", 'says "x, y"'), ("long_name", "10", "100 %"), ("Ψ", "-2.5", "")]


def printed(form: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in a form, whose rows are tuples."""
    return PrintedTable([Column(name, itemgetter(k)) for k, name in enumerate(header)], rows).printed(form)


def test_text_is_aligned_numbers_to_the_right() -> None:
    assert as_text(HEADER, ROWS) == (
        "name       size  about\n"
        "---------  ----  -----------\n"
        'a|b         1/2  says "x, y"\n'
        "long_name    10  100 %\n"
        "Ψ          -2.5\n"
    )


@pytest.mark.parametrize("cell", ["", "1e5", "1.", "/2", "²", "1,5", "N"])
def test_one_cell_that_is_no_number_makes_words_of_a_column(cell: str) -> None:
    assert as_text(["value"], [["1"], [cell]]).splitlines()[2] == "1"


def test_a_table_may_be_empty() -> None:
    assert as_text(["a", "bc"], []) == "a  bc\n-  --\n"
    assert as_csv(["a", "bc"], []) == "a,bc\n"
    assert as_json([]) == "[]\n"


def test_csv_is_read_back_as_it_was() -> None:
    text = as_csv(HEADER, ROWS)
    assert "\r" not in text
    assert [tuple(row) for row in csv.reader(io.StringIO(text))] == [HEADER, *ROWS]


def test_csv_has_numbers_as_programs_write_them() -> None:
    values = [1, -2.5, 1 / 3, 1e300, 5e-324, Fraction(-1, 2), Fraction(4, 2), True, False, None, np.int64(7), 2**70]
    text = as_csv(["value"], [[value] for value in values])
    cells = text.splitlines()[1:]
    assert cells[5:10] == ["-1/2", "2", "true", "false", '""']
    for value, cell in zip(values[:5] + values[10:], cells[:5] + cells[10:], strict=True):
        assert json.loads(cell) == value


@pytest.mark.parametrize("text", ["=1+1", "+1 s", "-cmd", "@SUM(A1)", " =x", "\uff1dx", "-"])
def test_what_a_spreadsheet_would_compute_is_text_in_csv(text: str) -> None:
    """As a name, in the header, too; numbers stay numbers, even as texts."""
    assert list(csv.reader(io.StringIO(as_csv([text], [[text]])))) == [[f"'{text}"], [f"'{text}"]]
    for cell in ("-1", "-2.5", "-1/2", -1, -2.5, Fraction(-1, 2)):
        assert as_csv(["x"], [[cell]]) == f"x\n{cell}\n"


HOSTILE = "a\x1b[31m\r\nb\u202e\u200f\x9b\udcff</td><script>|`x`[y](z)*\u2028"


@pytest.mark.parametrize("form", ["text", "csv", "latex"])
def test_a_hostile_name_is_one_printable_cell(form: str) -> None:
    text = printed(form, [HOSTILE, "size"], [[HOSTILE, "1"]])
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    calm = printed(form, ["name", "size"], [["name", "1"]])
    assert len(lines) == len(calm.split("\n"))


def test_json_is_printable_and_says_the_same() -> None:
    name = HOSTILE.replace("\udcff", "\U000e0001")
    text = as_json({name: [name, "Ψ"]})
    assert all(line.isprintable() for line in text.split("\n"))
    assert json.loads(text) == {name: [name, "Ψ"]}
    with pytest.raises(RequestError, match="a name in it is no UTF-8 text; rename that file"):
        as_json("\udcff")


def test_a_long_name_is_cut_for_people_alone() -> None:
    for form in ("text", "latex"):
        assert len(printed(form, ["x"], [["y" * 10_000]])) < 2000
    assert "y" * 10_000 in as_csv(["x"], [["y" * 10_000]])


def test_a_long_note_is_whole_in_every_form_for_people() -> None:
    """A list of schedules may be longer than a cell."""
    table = PrintedTable([Column("x")], [{"x": 1}], heads=["h" * 400], notes=["n" * 500])
    for form in ("text", "latex"):
        assert "h" * 400 in table.printed(form) and "n" * 500 in table.printed(form)


def test_latex_is_escaped_and_aligned() -> None:
    assert printed("latex", HEADER, ROWS) == (
        "% needs \\usepackage{booktabs}\n"
        "\\begin{tabular}{lll}\n"
        "\\toprule\n"
        "name       & size & about       \\\\\n"
        "\\midrule\n"
        'a|b        & 1/2  & says "x, y" \\\\\n'
        "long\\_name & 10   & 100 \\%      \\\\\n"
        "Ψ          & -2.5 &             \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


def test_what_latex_would_take_for_commands_is_escaped() -> None:
    assert latex_text("&%$#_{}") == r"\&\%\$\#\_\{\}"
    assert latex_text("[a]*<b>") == r"{[}a]{*}\textless{}b\textgreater{}"
    assert latex_text("\\a~b^c") == r"\textbackslash{}a\textasciitilde{}b\textasciicircum{}c"


def test_json_has_fractions_in_lowest_terms_as_strings() -> None:
    text = as_json({"half": Fraction(2, 4), "two": Fraction(4, 2), "none": None, "psi": "Ψ"})
    assert json.loads(text) == {"half": "1/2", "two": "2", "none": None, "psi": "Ψ"}
    assert "Ψ" in text
    with pytest.raises(TypeError, match="complex has no place in JSON"):
        as_json(1j)


@pytest.mark.parametrize(
    ("form", "known", "problem"),
    [
        ("jsn", FORMATS, "unknown format 'jsn'; did you mean 'json'?"),
        ("markdown", FORMATS, "unknown format 'markdown'; known are text, json, csv, latex"),
        ("markdown", DATA_FORMATS, "unknown format 'markdown'; known are text, json, csv"),
        ("latex", DATA_FORMATS, "'latex' is for table1 and compare only; give text, json, csv"),
        ("csv", ("text", "json"), "'csv' is for tables only; give text, json"),
    ],
)
def test_formats_are_known_by_name(form: str, known: tuple[str, ...], problem: str) -> None:
    with pytest.raises(RequestError, match=f"^format: {re.escape(problem)}$"):
        check_format(form, known)
    assert check_format("csv") == "csv"


@dataclass
class _Row:
    name: str
    step: float
    memory: int | None = None
    exposed: float = 0.5


COLUMNS = (
    Column("name", words=lambda row: f"{row.name}*"),
    Column("step", unit="s"),
    Column("least_memory", lambda row: row.memory, unit="B", rank=1),
    Column("fits", lambda row: row.memory is not None),
    Column("", lambda row: 1 / row.exposed, "times", rank=2),
    Column("exposed", heading="", unit="%"),
)
WRITTEN = PrintedTable(
    COLUMNS, [_Row("a", 0.0025), _Row("=b", 1.5, 25 * 10**8)], heads=["8 devices"], notes=["* at its own batch"]
)


def test_a_table_is_text_with_the_lines_that_belong_to_it() -> None:
    assert (
        WRITTEN.printed()
        == f"{WRITTEN}\n"
        == (
            "8 devices\n\n"
            "name  step    least memory  fits  times\n"
            "----  ------  ------------  ----  -----\n"
            "a*    2.5 ms  -             no        2\n"
            "=b*   1.5 s   2.5 GB        yes       2\n"
            "\n* at its own batch\n"
        )
    )


def test_programs_read_names_and_values() -> None:
    """Columns without a name are for people alone, and notes, too."""
    assert WRITTEN.printed("csv") == (
        "name,step,least_memory,fits,exposed\na,0.0025,,false,0.5\n'=b,1.5,2500000000,true,0.5\n"
    )
    records = [
        {"name": "a", "step": 0.0025, "least_memory": None, "fits": False, "exposed": 0.5},
        {"name": "=b", "step": 1.5, "least_memory": 2500000000, "fits": True, "exposed": 0.5},
    ]
    assert json.loads(WRITTEN.printed("json")) == WRITTEN.records() == records
    assert json.loads(replace(WRITTEN, record={"n": 4}).printed("json")) == {"n": 4}


def test_a_frame_has_the_values_by_their_names() -> None:
    """Fractions are floats there, with which pandas calculates."""
    pytest.importorskip("pandas")
    frame = PrintedTable([Column("a"), Column("b_c", lambda row: row["a"] / 2)], [{"a": Fraction(1, 2)}]).frame()
    assert frame.to_dict("list") == {"a": [0.5], "b_c": [0.25]}
    assert [str(kind) for kind in frame.dtypes] == ["float64", "float64"]
    assert [*PrintedTable(COLUMNS, []).frame()] == ["name", "step", "least_memory", "fits", "exposed"]


@pytest.mark.parametrize(
    ("width", "dropped", "line"),
    [(38, "times", 32), (32, "times", 32), (31, "times, least_memory", 18), (5, "times, least_memory", 18)],
)
def test_a_line_that_is_too_long_loses_columns_by_their_ranks_and_says_which(
    width: int, dropped: str, line: int
) -> None:
    """Those of rank 0 stay, however long the line is."""
    narrow = replace(WRITTEN, width=width)
    words = f"not shown in a line of {width} characters: {dropped} (CSV and JSON have all)"
    text = narrow.printed()
    assert text.endswith(f"\n\n{words}\n* at its own batch\n")
    assert len(text.splitlines()[3]) == line
    assert narrow.printed("latex") == WRITTEN.printed("latex")  # a page has no such lines
    assert f"<p>{words}</p>" in narrow._repr_html_()
    assert narrow.printed("csv") == WRITTEN.printed("csv")
    assert "not shown" not in replace(WRITTEN, width=39).printed()


def test_rows_may_be_mappings_and_columns_without_words_may_go() -> None:
    columns, rows = (Column("a_b"), Column("c"), Column("d", words=lambda _: None)), [{"a_b": "", "c": None, "d": 1}]
    assert PrintedTable(columns, rows).printed() == "a b  c  d\n---  -  -\n     -  -\n"
    assert [column.name for column in with_words(columns, rows)] == ["a_b"]
    assert PrintedTable(columns, []).printed() == "a b  c  d\n---  -  -\n"


def test_latex_may_have_a_writer_of_cells() -> None:
    table = PrintedTable([Column("x")], [{"x": "N_2"}], latex=lambda text: f"${text}$")
    assert "\n$N_2$ \\\\\n" in table.printed("latex")
    assert "\nN\\_2 \\\\\n" in replace(table, latex=None).printed("latex")


@pytest.mark.parametrize(
    ("value", "words"),
    [(4, "4"), (4.0, "4"), (1 / 3, "0.3333"), (Fraction(7, 2), "3.5"), (True, "yes"), ("", ""), (None, None)],
)
def test_values_without_a_unit_have_words(value: object, words: str | None) -> None:
    assert Column("x").words_of({"x": value}) == words
