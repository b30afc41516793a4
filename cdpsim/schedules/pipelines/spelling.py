"""Orders as texts: a word for each device, a letter for each action."""

from collections.abc import Sequence

import numpy as np

from cdpsim.schedules.actions import Action, Actions

_KINDS = np.zeros(128, dtype=np.int32)
_KINDS[[ord(kind.name) for kind in Action]] = list(Action)


def actions_from_letters(words: Sequence[str]) -> Actions:
    """Return actions by their letters: capital ones are of a device's first stage, small ones of its second.

    These are stages 0 and 1 on every device, with equally many micro-batches, which follow one another in order:
    forwards, backwards (whole or not), and Ws as their Is did. & joins two that are meant to overlap.

    >>> actions = actions_from_letters(["FfF&ifwIbW"])
    >>> actions.stage.tolist(), actions.micro_batch.tolist()
    ([0, 1, 0, 1, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0, 1, 0])
    """
    letters = np.frombuffer("".join(words).encode(), dtype=np.uint8)
    joined = letters == ord("&")
    beside, letters = np.roll(joined, 1)[~joined], letters[~joined]
    second = letters >= ord("a")
    kind = _KINDS[letters & ~np.uint8(32)]
    number = np.empty(len(kind), dtype=np.int32)
    forward, input_part = kind == Action.F, kind == Action.I
    for stage in (~second, second):
        for chosen in (forward, input_part | (kind == Action.B)):
            rows = np.flatnonzero(stage & chosen)
            number[rows] = np.arange(len(rows)) % max(len(rows) // len(words), 1)
        number[stage & (kind == Action.W)] = number[stage & input_part]
    first = np.cumsum([0, *(len(word) - word.count("&") for word in words)], dtype=np.int32)
    return Actions(first, kind, second.astype(np.int32), number, beside if beside.any() else None)
