"""Half of all combinations of some choices, in which any two values of different choices still meet."""

from collections.abc import Iterable
from itertools import product
from typing import Any


def every_second(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the combinations of three or more choices that lie on the white squares of a board."""
    combinations = product(*(enumerate(choice) for choice in choices))
    return [tuple(value for _, value in some) for some in combinations if sum(at for at, _ in some) % 2 == 0]
