"""Real times that rounding alone keeps apart."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CLOSE_TIMES = 1e-9  # relative to the run: real times that are closer together count as equal


def merge_close_times(time: NDArray[Any], end: float) -> NDArray[Any]:
    """Return the times of a run until `end`, real ones that differ by rounding alone made equal; integers as they are.

    So a buffer that one device frees, and another takes at the same time, is not counted twice.
    """
    if time.dtype.kind == "i" or not time.size:
        return time
    distinct, place = np.unique(time, return_inverse=True)
    first = np.diff(distinct, prepend=-np.inf) > CLOSE_TIMES * end
    merged: NDArray[Any] = distinct[first][np.cumsum(first)[place] - 1].reshape(time.shape)
    return merged
