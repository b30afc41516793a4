"""How large a case is: what orders, placements and rules are functions of, beside their indices."""

from dataclasses import dataclass

Widths = tuple[int, ...]  # devices per stage


@dataclass(frozen=True)
class Shape:
    """Stages and micro-batches of one replica; all replicas do the same."""

    n: int  # stages
    m: int  # micro-batches of a training step
    chunks: int = 1  # stages per device, in pipelines
    replicas: int = 1
    widths: Widths = ()  # for placements that ask

    @property
    def micro_batches(self) -> int:
        """How many micro-batches all replicas have in a training step."""
        return self.m * self.replicas
