"""Time of the harness: all nine schedules at N = 4 with the MLP, by ranks that stay alive."""

from typing import Any

import pytest

pytest.importorskip("torch")

from cdpsim.schedules import TABLE_1
from validation.comparison.replays import compare_replay
from validation.ranks.launcher import Ranks
from validation.replay.case import Case

N = 4


def test_nine_schedules_by_ranks(benchmark: Any) -> None:
    """Compare parameters, memory and messages of each; the start and the end of sixteen ranks are included."""

    def replay() -> list[bool]:
        with Ranks(N * N) as ranks:
            reports = [compare_replay(Case(schedule, N), ranks, repeats=0) for schedule in TABLE_1]
        return [report is not None and report.ok for report in reports]

    assert all(benchmark.pedantic(replay, rounds=1))
