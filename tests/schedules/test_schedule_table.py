"""Orders in files, as torch's pipelining has them; and what is no order, in a file or declared in Python."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim.errors import RequestError
from cdpsim.schedules import actions
from cdpsim.schedules.actions import Action, Actions, check_actions, read_actions, write_actions
from cdpsim.schedules.pipelines import interleaved, one_f_one_b
from tests.helpers.action_player import Named, needs, order_of, pairs_of, play
from tests.helpers.declared_orders import ORDERS, cases
from tests.helpers.every_row import every_row


def assert_same(one: Actions, other: Actions) -> None:
    assert order_of(one) == order_of(other)
    assert pairs_of(one) == pairs_of(other)


@given(cases(devices=6, m=9, chunks=3), st.data())
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, int, int, int], data: st.DataObject
) -> None:
    name, *size = case
    path = tmp_path_factory.mktemp("orders") / "order.csv"
    actions = ORDERS[name].of(*size)
    beside = np.array(data.draw(st.lists(st.booleans(), min_size=len(actions), max_size=len(actions))))
    beside[actions.index == 0] = False
    paired = Actions(actions.first, actions.kind, actions.stage, actions.micro_batch, beside)
    write_actions(paired, path)
    assert_same(read_actions(path), paired)


def test_a_file_has_a_row_for_each_device(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    write_actions(one_f_one_b(2, 3), path)
    assert path.read_text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    with pytest.raises(RequestError, match="already exists; --force overwrites"):
        write_actions(one_f_one_b(2, 3), path)
    write_actions(interleaved(1, 1), path, force=True)
    assert path.read_text() == "0F0,1F0,1B0,0B0\n"


def read(folder: Path, text: str) -> Actions:
    path = folder / "order.csv"
    path.write_text(text)
    return read_actions(path)


def test_cells_may_be_empty_or_of_communication_and_rows_as_long_as_they_like(tmp_path: Path) -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,\r\n,1RECV_F0, 1F0 ,1I0,1SEND_B0,1W0\r\n\r\n,,\r\n"
    text = text.replace(",,\r\n", ",0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\r\n", 1)
    expected = Actions.of([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)]])
    assert_same(read(tmp_path, text), expected)
    assert read(tmp_path, text).beside is None


def test_overlapping_actions_are_in_one_cell(tmp_path: Path) -> None:
    actions = read(tmp_path, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert order_of(actions) == [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]]
    assert pairs_of(actions) == [False, False, True, False]


@every_row(
    "cell",
    [
        *("0X0", "F0", "0F", "0f0", "0F0x", "-1F0", "0F1234567890", "\u0660F\u0660", "0F0 0B0", "0F0;0B0", "x" * 99),
        *("(0F0)OVERLAP_F_B", "(0F0;)OVERLAP_F_B", "(0F0;0SEND_F0)OVERLAP_F_B", "(0F0;0B0)OVERLAP", "(0F0;0B0)"),
        *("3SENDF0", "3SEND_F0x"),
    ],
)
def test_a_cell_that_is_no_action_is_named(tmp_path: Path, cell: str) -> None:
    remedy = "is no action; write such as 0F1, 1B0 or (0F1;1B0)OVERLAP_F_B, or nothing"
    with pytest.raises(RequestError) as refusal:
        read(tmp_path, f"0F0,0B0\n,{cell}\n")
    assert str(refusal.value) == f"{tmp_path}/order.csv: row 1, cell 1: {cell[:40]!r} {remedy}"


# Mistakes in a file; in Python their places are named in another way.
WRONG = {
    "0F0,0B0,,0F0": "row 0, cell 3: 0F0 is there already (row 0, cell 0); leave one out",
    "0F0,0B0\n0B0": "row 1, cell 0: 0B0 is there already (row 0, cell 1); leave one out",
    "0F0,0F1,0B1": "row 0, cell 0: 0F0 lacks 0B0; add what is missing",
    "0F0,0B0,0B1": "row 0, cell 2: 0B1 lacks 0F1; add what is missing",
    "0F0,0I0": "row 0, cell 0: 0F0 lacks 0W0; add what is missing",
    "0F0,0W0": "row 0, cell 0: 0F0 lacks 0I0; add what is missing",
    "0W0": "row 0, cell 0: 0W0 lacks 0F0 and 0I0; add what is missing",
    "0F0,0B0,0I0,0W0": "row 0, cell 2: 0I0 is a part of 0B0, which is there too; leave one out",
    "0F0,0B0,0W0": "row 0, cell 2: 0W0 is a part of 0B0, which is there too; leave one out",
    "0F0,0B0,0F1,0B1\n1F0,1B0": "micro-batch 1 does not pass stage 1; add 1F1 and 1B1",
    "0F0,0B0\n1F0,1F1,1B0,1B1": "micro-batch 1 does not pass stage 0; add 0F1 and 0B1",
    "0F0,0B0\n2F0,2B0": "row 1, cell 0: there is a stage 2 but no stage 1; number them without a gap",
    "1F0,1B0": "row 0, cell 0: there is a stage 1 but no stage 0; number them without a gap",
    "0F1,0B1": "row 0, cell 0: there is a micro-batch 1 but no micro-batch 0; number them without a gap",
    "0F99999999,0B0": "row 0, cell 0: there is a micro-batch 99999999 but no micro-batch 1; number them without a gap",
    "0F0\n0B0": "row 1, cell 0: 0B0 is on another device than 0F0 (row 0, cell 0); move one of them",
    "0F0,0I0\n0W0": "row 1, cell 0: 0W0 is on another device than 0F0 (row 0, cell 0); move one of them",
    "0F0,0B0\n\n1F0,1B0": "device 1 has nothing to do; leave it out",
    "0UNSHARD\n1UNSHARD": "there are no actions; begin with 0F0",
    "0B0,0F0": "schedule deadlocks: 0B0 -> 0F0 -> 0B0",
    "0F0,0W0,0I0": "schedule deadlocks: 0W0 -> 0I0 -> 0W0",
    "1F0,1B0\n2F0,2B0\n0F0,0W0,0I0": "schedule deadlocks: 0W0 -> 0I0 -> 0W0",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1": "schedule deadlocks: 0B0 -> 0F1 -> 1F1 -> 1B0 -> 0B0",
}


DEADLOCK = ", each waiting for the one before it; put one of them elsewhere"


@every_row("text", WRONG)
def test_what_is_no_training_step_is_refused_with_its_cell(tmp_path: Path, text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(tmp_path, text)
    assert str(refusal.value).removesuffix(DEADLOCK) == f"{tmp_path}/order.csv: {WRONG[text]}"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0)]], "device 1, action 0: 1F0 lacks 1B0; add what is missing"),
        ([[("F", 0, 0)], [("B", 0, 0), ("F", 0, 0)]], "device 1, action 1: 0F0 is there already (device 0, action 0)"),
        ([[("F", -1, 0), ("B", 0, 0)]], "device 0, action 0: there is no stage -1; number them from 0 on"),
        ([[("F", 0, 0), ("B", 0, -7)]], "device 0, action 1: there is no micro-batch -7; number them from 0 on"),
        ([[("F", 0, 0), ("B", 0, 0)], []], "device 1 has nothing to do; leave it out"),
        ([[("B", 0, 0), ("F", 0, 0)]], "schedule deadlocks: 0B0 -> 0F0 -> 0B0"),
        ([], "there are no actions; begin with 0F0"),
    ],
)
def test_what_is_no_training_step_is_refused_in_python_too(rows: list[list[Named]], problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        check_actions(Actions.of(rows))
    assert str(refusal.value).startswith(f"actions: {problem}")


def test_an_unknown_kind_is_refused() -> None:
    kind, zeros = np.array([1, 7], dtype=np.int32), np.zeros(2, dtype=np.int32)
    with pytest.raises(
        RequestError, match=r"^actions: device 0, action 1: 7 is no kind of action; known are F, B, I, W$"
    ):
        check_actions(Actions(np.array([0, 2], dtype=np.int32), kind, zeros, zeros))


@settings(max_examples=500)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_orders_are_refused_if_they_deadlock_and_only_then(
    devices: int, m: int, split: bool, data: st.DataObject
) -> None:
    """And what is named is a cycle: each action needs the one before it, or comes after it on its device."""
    kinds = "FIW" if split else "FB"
    stages = data.draw(st.permutations(range(devices)))
    rows = [data.draw(st.permutations([(kind, stage, i) for kind in kinds for i in range(m)])) for stage in stages]
    actions = Actions.of(rows)
    try:
        check_actions(actions)
    except RequestError as refusal:
        with pytest.raises(AssertionError, match="a deadlock"):
            play(actions, dict.fromkeys(Action.__members__, 1))
        cycle = str(refusal).partition("deadlocks: ")[2].removesuffix(DEADLOCK).split(" -> ")
        assert cycle[0] == cycle[-1]
        assert 3 <= len(cycle) == len(set(cycle)) + 1
        for one, other in pairwise((name[1], int(name[0]), int(name[2:])) for name in cycle):
            row = rows[stages.index(other[1])]
            later = one in row and row.index(one) < row.index(other)
            assert later or one in needs(other, devices - 1, {other[1:], (other[1] + 1, other[2])} if split else set())
    else:
        assert len(play(actions, dict.fromkeys(Action.__members__, 1)).order) == devices


def test_a_long_cycle_is_cut_short() -> None:
    """The first device has the last stage, too, and does that first."""
    others: list[list[Named]] = [[("F", stage, 0), ("B", stage, 0)] for stage in range(1, 9)]
    first: list[Named] = [("F", 9, 0), ("F", 0, 0), ("B", 9, 0), ("B", 0, 0)]
    with pytest.raises(RequestError) as refusal:
        check_actions(Actions.of([first, *others]))
    shown = " -> ".join(f"{stage}F0" for stage in (9, *range(7)))
    assert str(refusal.value) == f"actions: schedule deadlocks: {shown} -> ... 2 more -> 9F0{DEADLOCK}"


def test_files_that_are_too_large_or_no_csv_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"is no CSV file \(field larger than .*\); write cells, with commas"):
        read(tmp_path, '"' + "0F0," * 50_000)
    monkeypatch.setattr(actions, "LARGEST_TABLE", 2**20)
    with pytest.raises(RequestError, match="is larger than 1 MiB; give a smaller file"):
        read(tmp_path, "0F0,0B0" + " " * 2**20)
