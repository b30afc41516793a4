"""OverlappedRounds: how workers go on that do not wait for each update, and the versions that they make and read.

A program of such a schedule has a step for each round. In a round every worker computes blocks of micro-batches until
what the round before has sent is through; then it hands its gradients over, and goes on with what has come:

    step 0       the seed: one micro-batch of each worker at theta_0; after W steps of warm-up, a block
    step r + 1   interval r: from the moment at which a worker hands over what communication r takes, until the end of
                 the first block by which communication r is through
    last step    the interval during the last communication, which is thrown away

Communication r makes a version (weight prediction: two), which interval r + 1 reads.
"""

from dataclasses import dataclass

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.placement import Shape


@dataclass(frozen=True)
class OverlappedRounds:
    """OverlappedRounds whose lengths are found in their run."""

    per_update: int = 1  # how many of them make an update of theta
    warms_up: bool = False  # whether steps may go before them whose updates workers wait for

    def steps(self, updates: int) -> int:
        """Return the steps of a program that makes so many updates of theta: the seed, and an interval for each."""
        return self.per_update * updates + 1

    def least(self, updates: int, shape: Shape) -> Ints:
        """Return the fewest micro-batches of a worker in each step: the seed has one, and all others a block."""
        counts = np.full(self.steps(updates), shape.m, dtype=np.int32)
        counts[0] = shape.m if shape.warm_up else 1
        return counts
