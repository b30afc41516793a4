"""Values that were asked for last, as many as are not too large together."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by their keys, so many at least; others, not asked for longest, go where all are too large together."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.most, self.least = most, least
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0

    def __iter__(self) -> Iterator[Value]:
        return (value for value, _ in self._values.values())

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: Hashable) -> Value:
        self._values.move_to_end(key)
        return self._values[key][0]

    def keep(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value, and let others go."""
        self._values[key] = value, size
        self._size += size
        while self._size > self.most and len(self._values) > self.least:
            self._size -= self._values.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Let all values go."""
        self._values.clear()
        self._size = 0
