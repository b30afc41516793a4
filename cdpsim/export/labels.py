"""What a trace viewer calls tasks and messages, and what it says of them when somebody points at one."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Op
from cdpsim.trace import Trace

KINDS = {"U": "update", "F": "forward", "B": "backward", "W": "weight backward"}
OPS = [op.name.lower() for op in Op]
CONTENTS = [content.name.lower() for content in Content]


class Sort(NamedTuple):
    """What slices of one sort have in common: what stands before and after their place in their name, and more."""

    before: str
    after: str
    category: str
    arguments: dict[str, int | str]


class Labels(NamedTuple):
    """Sorts; which ones there are for which micro-batch and stage; and which one of these each row has."""

    sorts: list[Sort]
    different: list[tuple[int, ...]]  # sort, micro-batch, stage
    which: Ints
    numbers: dict[str, Ints]  # what is said of each row by itself; a src of -1 is none


def task_labels(trace: Trace) -> Labels:
    """Call tasks as timetables do: `F1.0` is the forward of micro-batch 1 on stage 0, and `/` says that it is stale."""
    columns = trace.tasks
    sorts = [
        Sort(f"{kind} " if kind == "U" else kind, "/" * stale, category, {"stale": stale})
        for kind, category in KINDS.items()
        for stale in range(2)
    ]
    sort = 2 * _numbered(columns["kind"], KINDS) + columns["stale"]
    different, which = _distinct(sort, columns["micro_batch"], columns["stage"])
    return Labels(sorts, different, which, {name: columns[name] for name in ("step", "version")})


def message_labels(trace: Trace) -> Labels:
    """Call messages by what they carry: `activation 1.0`, `all_reduce gradient of stage 2`."""
    columns = trace.messages
    sorts = [
        Sort(f"{content} " if op == "p2p" else f"{op} {content} ", "", content, {"op": op, "content": content})
        for op in OPS
        for content in CONTENTS
    ]
    sort = len(CONTENTS) * _numbered(columns["op"], OPS) + _numbered(columns["content"], CONTENTS)
    different, which = _distinct(sort, columns["micro_batch"], columns["stage"])
    return Labels(sorts, different, which, {name: columns[name] for name in ("step", "src", "size", "rounds")})


def place(micro_batch: int, stage: int) -> str:
    """Say of which micro-batch and stage; -1 is none.

    >>> place(1, 0), place(-1, 2), place(3, -1), place(-1, -1)
    ('1.0', 'of stage 2', 'of micro-batch 3', 'of all')
    """
    if micro_batch >= 0:
        return f"{micro_batch}.{stage}" if stage >= 0 else f"of micro-batch {micro_batch}"
    return f"of stage {stage}" if stage >= 0 else "of all"


def said(micro_batch: int, stage: int) -> Iterator[tuple[str, int]]:
    """Name micro-batch and stage, where there are some."""
    if micro_batch >= 0:
        yield "micro_batch", micro_batch
    if stage >= 0:
        yield "stage", stage


def _numbered(column: np.ndarray, words: Iterable[str]) -> Ints:
    """Words as their places among all that there can be."""
    number = np.zeros(len(column), dtype=np.int64)
    for k, word in enumerate(words):
        number[column == word] = k
    return number


def _distinct(*columns: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """The different rows of columns, none below -1, and which one each row is."""
    spans = [int(column.max(initial=0)) + 2 for column in columns]
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column, span in zip(columns, spans, strict=True):
        code = code * span + (column + 1)
    if np.prod(np.array(spans, dtype=float)) <= 8 * len(code) + 1000:  # a table is faster than sorting
        there = np.zeros(int(np.prod(spans)), dtype=bool)
        there[code] = True
        different, which = np.flatnonzero(there), np.cumsum(there)[code] - 1
    else:
        different, which = np.unique(code, return_inverse=True)
    parts = []
    for span in reversed(spans):
        different, part = np.divmod(different, span)
        parts.append((part - 1).tolist())
    return list(zip(*reversed(parts), strict=True)), which
