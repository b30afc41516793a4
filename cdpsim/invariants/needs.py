"""Needs: pairs of nodes of which the second waits for the first."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints

Key = tuple[Ints, ...]  # columns of rows


class Needs(NamedTuple):
    """Node `after[k]` starts no earlier than node `before[k]` has ended."""

    before: Ints
    after: Ints


def combine(*needs: Needs) -> Needs:
    """Return all of several needs."""
    before, after = (np.concatenate(ends).astype(np.int64) for ends in zip(*needs, strict=True))
    return Needs(before, after)
