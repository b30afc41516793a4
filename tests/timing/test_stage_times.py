"""Times of stages by hand: work over speed, bytes over bandwidth, and what a split or shared update leaves."""

import numpy as np
import pytest

from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.numeric.columns import Times
from cdpsim.timing.costs import pass_times, pyramid_of, roofline_time, times_of_stages

TIMES = Stage(forward=1.0, backward=2.0, weight_backward=0.5)
WORK = Stage(forward=Work(2.5e12), backward=Work(5e12))


def times(model: Model, speed: float | None = None, *, splits: bool = False, shard: int = 1) -> Times:
    return times_of_stages(model, speed, 4.0, splits=splits, shard=shard)


def test_speed_turns_work_into_times_and_leaves_times_as_they_are() -> None:
    model = Model(stages=(TIMES, WORK))
    assert times(model, 1e12).tolist() == [[0, 0], [1, 2.5], [2, 5], [0.5, 0], [0, 0]]
    assert times(model, 1e12, splits=True)[2].tolist() == [1.5, 5]
    assert times(Model(stages=(TIMES,)))[1:4].tolist() == [[1], [2], [0.5]]
    assert times(Model(stages=(TIMES,)), 7.0)[1:4].tolist() == [[1], [2], [0.5]]


def test_work_needs_a_speed() -> None:
    model = Model(stages=(TIMES, WORK))
    with pytest.raises(RequestError) as refusal:
        pass_times(model, "backward", None)
    assert str(refusal.value) == "stage 1: backward is work; give --cluster with a speed, or times"


def test_work_that_takes_ages_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^stage 0: forward takes more than 1e\+09 s at 1 FLOP/s; check both$"):
        pass_times(Model(stages=(WORK,)), "forward", 1.0)


def test_slots_are_whole_at_any_speed() -> None:
    found = times(Model.unit(3), 1e12)
    assert found.dtype == np.int64
    assert found.tolist() == [[0] * 3, [1] * 3, [1] * 3, [0] * 3, [0] * 3]


def test_ranks_share_an_update_of_work_bytes_and_a_mean() -> None:
    """Work of 6 at 2 a second, 8 bytes at 4 a second: 3 + 2 s; the update by a mean is not shared."""
    stage = Stage(forward=1.0, backward=1.0, update=Work(6.0), update_bytes=8, outer_update=Work(4.0))
    assert times(Model(stages=(stage,)), 2.0)[[0, 4]].tolist() == [[5], [2]]
    assert times(Model(stages=(stage,)), 2.0, shard=2)[[0, 4]].tolist() == [[2.5], [2]]


def test_a_pyramid_has_devices_by_the_times_of_passes() -> None:
    """8 and 11 s of two micro-batches: the second stage is 11/19 of a pass, which needs 2 devices; by work, 1/2."""
    assert pyramid_of(Model(stages=(Stage(forward=5.0, backward=3.0), Stage(forward=5.0, backward=6.0))), 2, None) == (
        2,
        2,
    )
    assert pyramid_of(Model(stages=(WORK, WORK)), 2, 1e12) == (2, 1)


def test_a_roofline_is_the_longer_of_computing_and_moving() -> None:
    assert [roofline_time(work, 12, 2.0, 4.0) for work in (4.0, 8.0)] == [3.0, 4.0]
