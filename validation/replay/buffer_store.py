"""The values of one category on a device, kept exactly as long as the buffers of its program last."""

from typing import Generic, TypeVar

from validation.replay.plan import Holding, ReplayError, name_of

Value = TypeVar("Value")


class BufferStore(Generic[Value]):
    """Values by their contents; reading a value before or after its buffers is an error."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._buffers: dict[Holding, int] = {}  # how many buffers of the program are for it now
        self._values: dict[Holding, Value] = {}

    def __contains__(self, holding: Holding) -> bool:
        return holding in self._values

    def __len__(self) -> int:
        return len(self._buffers)

    def begin(self, holding: Holding) -> None:
        """Begin another buffer for a content."""
        self._buffers[holding] = self._buffers.get(holding, 0) + 1

    def end(self, holding: Holding) -> None:
        """End one buffer of a content; the last one frees its value."""
        self._buffers[holding] -= 1
        if not self._buffers[holding]:
            del self._buffers[holding]
            self._values.pop(holding, None)

    def put(self, holding: Holding, value: Value) -> None:
        """Keep a value if the program has a buffer for it; a value without one is never read."""
        if holding in self._buffers:
            self._values[holding] = value

    def get(self, holding: Holding) -> Value:
        """Return a value whose buffer has begun and not ended."""
        if holding not in self._values:
            raise ReplayError(f"device {self._device} does not hold {name_of(holding)} (not yet, or not any more)")
        return self._values[holding]
