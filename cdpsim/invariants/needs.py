"""Needs: pairs of nodes of which the second waits for the first."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints

Key = tuple[Ints, ...]  # columns of rows


class Needs(NamedTuple):
    """Node `after[k]` starts no earlier than node `before[k]` has ended; -1 stands for a node that there is not."""

    before: Ints
    after: Ints


NO_NEEDS = Needs(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def combine(*needs: Needs) -> Needs:
    """Return all of several needs."""
    before, after = (np.concatenate(ends).astype(np.int64) for ends in zip(NO_NEEDS, *needs, strict=True))
    return Needs(before, after)
