"""Orders as lists: the same runs as by name, recorded so that they run again."""

from pathlib import Path

import pytest

from cdpsim import Request, RequestError, Run, load, simulate
from cdpsim.api import reopen
from cdpsim.export.pictures import step_actions
from cdpsim.schedules.actions import write_actions
from tests.helpers.every_row import every_row

GPIPE = [["F0", "F1", "B0", "B1"], ["F0", "F1", "B0", "B1"]]


def cells_of(run: Run, path: Path) -> list[list[str]]:
    """The lists of a run's order, as the file that torch reads has them."""
    write_actions(step_actions(run), path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return [[cell for cell in row if cell] for row in rows]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
def test_lists_run_as_the_schedule_that_they_write_out(name: str, tmp_path: Path) -> None:
    run = simulate(name, 4, m=8)
    own = simulate("mine", order=cells_of(run, tmp_path / "order.csv"))
    assert own.tasks == run.tasks
    assert own.messages == run.messages
    assert own.memory == run.memory


def test_an_action_without_a_stage_is_on_its_device_s() -> None:
    full = [[f"{device}{action}" for action in row] for device, row in enumerate(GPIPE)]
    assert simulate("mine", order=GPIPE).tasks == simulate("mine", order=full).tasks
    assert simulate("mine", order=tuple(map(tuple, GPIPE))) == simulate("mine", order=GPIPE)


def test_its_request_asks_for_the_same_again(tmp_path: Path) -> None:
    run = simulate("mine", order=GPIPE, steps=1)
    assert run.request["order"] == GPIPE
    assert simulate(**run.request) == simulate(Request(**run.request)) == run
    run.save(tmp_path / "saved")
    assert load(tmp_path / "saved") == run
    assert isinstance(reopen(tmp_path / "saved"), Run)
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f'[run]\nschedule = "mine"\nsteps = 1\norder = {GPIPE}\n')
    assert simulate(Request.load(experiment)) == run


@every_row(
    ("order", "problem"),
    [
        ("F0", "is no list of lists"),
        (["F0", "B0"], "is no list of lists"),
        (7, "is no list of lists"),
        ([], "is empty"),
        ([[]], "is empty"),
        ([["F0", "Q0"]], "row 0, cell 1: 'Q0' is no action"),
        ([["F0"]], "lacks 0B0"),
        ([["B0", "F0"]], "deadlock"),
    ],
)
def test_what_is_no_order_is_refused(order: list[list[str]], problem: str) -> None:
    with pytest.raises(RequestError, match="order") as refusal:
        simulate("mine", order=order)
    assert problem in str(refusal.value)


def test_the_name_of_another_schedule_is_refused() -> None:
    with pytest.raises(RequestError, match="name of its own"):
        simulate("gpipe", order=GPIPE)
