"""The values of one category on a device, each kept exactly as long as the policy says."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from .contents import Holding, ReplayError, name_of

Value = TypeVar("Value")


class BufferStore(Generic[Value]):
    """Values by their contents; reading a value before or after its life is an error.

    A content may have several copies at once, of which the oldest is read, and ends, first.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._copies: dict[Holding, deque[list[Value]]] = defaultdict(deque)  # a list of one value, or of none so far

    def __contains__(self, holding: Holding) -> bool:
        return bool(self._copies[holding]) and bool(self._copies[holding][0])

    def __len__(self) -> int:
        return sum(map(len, self._copies.values()))

    def first(self, is_wanted: Callable[[Holding], bool]) -> Holding:
        """Return the first content of a kind whose life has begun and not ended."""
        found = next((holding for holding, copies in self._copies.items() if copies and is_wanted(holding)), None)
        if found is None:
            raise ReplayError(f"device {self._device} does not hold what a message is to gather")
        return found

    def begin(self, holding: Holding) -> None:
        """Begin another copy of a content."""
        self._copies[holding].append([])

    def end(self, holding: Holding) -> None:
        """End the oldest copy of a content, and free its value."""
        self._copies[holding].popleft()

    def put(self, holding: Holding, value: Value) -> None:
        """Keep the value of the newest copy; a value without a copy is never read."""
        if self._copies[holding]:
            self._copies[holding][-1][:] = [value]

    def get(self, holding: Holding) -> Value:
        """Return a value whose life has begun and not ended."""
        if holding not in self:
            raise ReplayError(f"device {self._device} does not hold {name_of(holding)} (not yet, or not any more)")
        return self._copies[holding][0][0]
