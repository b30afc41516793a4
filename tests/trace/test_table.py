"""Tables of traces: rows that are held as columns."""

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from cdpsim import RequestError, simulate
from cdpsim.trace import ROWS, TABLES
from cdpsim.trace.table import Table
from tests.helpers.hostile_names import HOSTILE_NAME

RUN = simulate("mp-cdp", 3)
every_table = pytest.mark.parametrize("name", TABLES)


@every_table
def test_a_row_has_the_cell_of_each_column(name: str) -> None:
    table: Table[Any] = getattr(RUN, name)
    rows = list(table)
    assert len(rows) == len(table) == len(table[TABLES[name][0]])
    for column in TABLES[name]:
        assert [getattr(row, column) for row in rows] == table[column].tolist() == getattr(table, column).tolist()
    assert table[0] == rows[0]
    assert table[-1] == rows[-1] == table[np.int64(len(table) - 1)]
    assert {type(cell) for row in rows for cell in row} <= {int, str}


def test_a_row_has_the_members_of_a_collective() -> None:
    messages = simulate("multi-dp", 3).messages
    assert messages[0] == next(iter(messages))
    assert messages[0].dst == "0|1|2"


@every_table
def test_a_choice_of_rows_is_a_table(name: str) -> None:
    table = getattr(RUN, name)
    rows, even = list(table), np.arange(len(table)) % 2 == 0
    assert list(table[2:5]) == rows[2:5]
    assert list(table[even]) == rows[::2]
    assert list(table[[3, 1]]) == [rows[3], rows[1]]
    assert not len(table[:0]) and not list(table[:0])


@every_table
def test_its_columns_are_a_mapping_s(name: str) -> None:
    table = getattr(RUN, name)
    assert list(table.keys()) == list(TABLES[name]) == list(dict(table)) == list({**table})
    assert "device" in table or "src" in table
    assert "colour" not in table
    assert set(TABLES[name]) <= set(dir(table))


def test_tables_are_equal_where_their_columns_are() -> None:
    again = simulate("mp-cdp", 3)
    assert RUN.tasks == again.tasks == pickle.loads(pickle.dumps(RUN.tasks)) == copy.deepcopy(RUN.tasks)
    assert RUN.tasks != RUN.tasks[1:]
    assert RUN.tasks != RUN.messages
    later = Table(ROWS["tasks"], {**RUN.tasks, "start": RUN.tasks.start + 1})
    assert RUN.tasks != later


def test_an_unknown_column_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="colour"):
        _ = RUN.tasks.colour
    with pytest.raises(KeyError):
        _ = RUN.tasks["colour"]


@every_table
def test_a_frame_has_the_columns_of_the_file(name: str) -> None:
    pytest.importorskip("pandas")
    frame = RUN.frame(name)
    assert list(frame.columns) == list(TABLES[name])
    assert frame.to_numpy().tolist() == [list(row) for row in getattr(RUN, name)]


def test_an_unknown_table_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'tasks'"):
        RUN.frame("task")


def test_without_pandas_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RequestError, match=r"pip install 'cdpsim\[pandas\]'"):
        RUN.frame("tasks")


def test_a_notebook_shows_the_first_rows_and_no_markup_of_names() -> None:
    html = RUN.tasks._repr_html_()
    assert html.count("<tr>") == 1 + 8
    assert f"{len(RUN.tasks)} rows" in html
    one = np.zeros(1, int)
    words = Table(ROWS["memory"], {"device": one, "category": np.array([HOSTILE_NAME]), "time": one, "size": one})
    assert "<script" not in words._repr_html_()
    assert "&lt;script&gt;" in words._repr_html_()
