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


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    """Draw without a display, and leave no figure behind."""
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize(("title", "code"), THINGS, ids=[title for title, _ in THINGS])
def test_what_a_user_tries_works(title: str, code: str, request: pytest.FixtureRequest) -> None:
    if title in UNSERVED:
        request.applymarker(pytest.mark.xfail(reason=UNSERVED[title]))
    exec(compile(code, title, "exec"), {"cdpsim": cdpsim})


def test_there_are_fifty() -> None:
    assert len({title for title, _ in THINGS}) == 50
    assert len(UNSERVED) <= 2
