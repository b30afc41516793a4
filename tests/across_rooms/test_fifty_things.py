"""Fifty things that a user of Jupyter tries; they were written down before the code."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import pytest

import cdpsim
from tests.across_rooms.fifty_things import THINGS

pytest.importorskip("pandas")

# Things that fail, each with the reason why the thing and not the code is wrong.
UNSERVED = {
    "numpy integers are as good as ints": "json takes no mapping but a dict: json.dumps(dict(run.request))",
    "A model made of Stage objects": "a number without a unit is of seconds, not of FLOP",
}


SLOW = ["Figures 1 and 2 of the paper", "Which schedule for eight devices and a batch of 256?"]  # a second or more
CASES = [pytest.param(*thing, marks=[pytest.mark.slow] * (thing[0] in SLOW), id=thing[0]) for thing in THINGS]


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    """Draw without a display, and leave no figure behind."""
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.every_case
@pytest.mark.parametrize(("title", "code"), CASES)
def test_what_a_user_tries_works(title: str, code: str, request: pytest.FixtureRequest) -> None:
    if title in UNSERVED:
        request.applymarker(pytest.mark.xfail(reason=UNSERVED[title]))
    exec(compile(code, title, "exec"), {"cdpsim": cdpsim})


def test_there_are_fifty() -> None:
    assert len({title for title, _ in THINGS}) == 50
    assert len(UNSERVED) <= 2
    assert {*SLOW} < {title for title, _ in THINGS}
