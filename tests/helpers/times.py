"""Times of runs compared up to the quanta in which each run counts them."""

from typing import Any

import numpy as np

from cdpsim.numeric.columns import Times


def room(times: Any) -> float:
    """The difference that quanta may make between times of two runs; 0 for slots."""
    return 0.0 if np.asarray(times).dtype.kind == "i" else 1e-12 * float(np.max(times, initial=0))


def are_close(times: Times, expected: Any) -> bool:
    """Whether all times are as expected."""
    return len(times) == len(expected) and bool((np.abs(times - np.asarray(expected)) <= room(times)).all())


def are_no_later(before: Times, after: Times) -> bool:
    """Whether no time is later than it is in another run."""
    return bool((before <= after + room(after)).all())
