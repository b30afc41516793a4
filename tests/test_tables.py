"""Tables in five forms, each as its readers expect it."""

import csv
import io
import json
from fractions import Fraction

import pytest

from cdpsim import RequestError
from cdpsim.tables import (
    FORMATS,
    as_csv,
    as_json,
    as_latex,
    as_markdown,
    as_text,
    check_format,
    latex_tabular,
    latex_text,
)

HEADER = ("name", "size", "about")
ROWS = [("a|b", "1/2", 'says "x, y"'), ("long_name", "10", "100 %"), ("Ψ", "-2.5", "")]


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
    assert as_markdown(["a", "bc"], []) == "| a   | bc  |\n| --- | --- |\n"
    assert as_json([]) == "[]\n"


def test_csv_is_read_back_as_it_was() -> None:
    text = as_csv(HEADER, ROWS)
    assert "\r" not in text
    assert [tuple(row) for row in csv.reader(io.StringIO(text))] == [HEADER, *ROWS]


def test_markdown_is_aligned_and_keeps_its_columns() -> None:
    assert as_markdown(HEADER, ROWS) == (
        "| name      | size | about       |\n"
        "| --------- | ---- | ----------- |\n"
        '| a\\|b      | 1/2  | says "x, y" |\n'
        "| long_name | 10   | 100 %       |\n"
        "| Ψ         | -2.5 |             |\n"
    )


def test_latex_is_escaped_and_aligned() -> None:
    assert as_latex(HEADER, ROWS) == (
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
    assert latex_text("\\a~b^c") == r"\textbackslash{}a\textasciitilde{}b\textasciicircum{}c"


def test_a_line_of_a_latex_header_may_be_anything() -> None:
    assert latex_tabular("l", [r"\multicolumn{1}{c}{wide} \\", ["a"]], [["bcd"]]).splitlines()[1:7] == [
        r"\toprule",
        r"\multicolumn{1}{c}{wide} \\",
        r"a   \\",
        r"\midrule",
        r"bcd \\",
        r"\bottomrule",
    ]


def test_json_has_fractions_in_lowest_terms_as_strings() -> None:
    text = as_json({"half": Fraction(2, 4), "two": Fraction(4, 2), "none": None, "psi": "Ψ"})
    assert json.loads(text) == {"half": "1/2", "two": "2", "none": None, "psi": "Ψ"}
    assert "Ψ" in text
    with pytest.raises(TypeError, match="complex has no place in JSON"):
        as_json(1j)


def test_formats_are_known_by_name() -> None:
    assert [check_format(name) for name in FORMATS] == ["text", "json", "csv", "markdown", "latex"]
    with pytest.raises(RequestError, match="format: unknown format 'mardown'; did you mean 'markdown'"):
        check_format("mardown")
