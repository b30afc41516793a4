"""Rounds in short: those with equal counts that follow each other in one row."""

import numpy as np

from cdpsim.numeric.columns import group_starts
from cdpsim.trace.table import RoundRow, Table

HEADER = ("rounds", "micro_batches", "least", "most", "length", "communication")
ShortRow = tuple[str, int, int, int, float | None, float | None]


def in_short(found: Table[RoundRow]) -> list[ShortRow]:
    """Return rows of rounds: micro-batches of all workers, of one at least and at most, and mean times.

    A round is as long as from the beginning of its communication to that of the next one.
    """
    workers = int(found.device.max()) + 1
    counts = found.micro_batches.reshape(-1, workers)
    begun, ended = (times.reshape(-1, workers).max(axis=1).astype(float) for times in (found.begun, found.ended))
    number = np.cumsum(np.append(0, (np.diff(counts, axis=0) != 0).any(axis=1)))
    number[-1] = number[-2] + 1  # the last one has no communication
    first = group_starts(number)
    rows: list[ShortRow] = []
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(counts)], strict=True):
        name = f"{low}" if high == low + 1 else f"{low}-{high - 1}"
        own = int(counts[low].sum()), int(counts[low].min()), int(counts[low].max())
        until = min(high, len(counts) - 2)
        length = float(begun[until] - begun[low]) / (until - low) if until > low else None
        lasts = float((ended - begun)[low:high].mean()) if high < len(counts) else None
        rows.append((name, *own, length, lasts))
    return rows
