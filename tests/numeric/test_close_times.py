"""Times that differ by rounding alone."""

import numpy as np
import pytest

from cdpsim.numeric.columns import merge_close_times


@pytest.mark.parametrize(
    ("times", "end", "merged"),
    [
        ([0.1 + 0.2, 0.3, 0.4, 0.3], 1.0, [0.3, 0.3, 0.4, 0.3]),
        ([3, 1, 3], 5, [3, 1, 3]),
        ([], 1.0, []),
    ],
)
def test_times_that_rounding_keeps_apart_are_one(times: list[float], end: float, merged: list[float]) -> None:
    assert 0.1 + 0.2 != 0.3
    assert merge_close_times(np.array(times), end).tolist() == merged
