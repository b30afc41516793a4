"""What computes: groups of equal devices, their speeds by precision, and their memory."""

from typing import Annotated

import msgspec

from cdpsim.cluster.topology import MOST_DEVICES
from cdpsim.errors import RequestError, choose
from cdpsim.files import config
from cdpsim.files.config import Bandwidth, Share, Size, Speed

UNLIMITED_LANES = 1_000_000_000
# What of a device's messages runs beside what: all of them beside everything; one after another in a stream of their
# own, beside its tasks; or in one stream with its tasks, nothing beside anything.
OVERLAPS = FULL, STREAM, NONE = "full", "stream", "none"


class Speeds(config.ConfigTable, frozen=True, kw_only=True):
    """Peak FLOP/s by the precision of what is multiplied; None where a device cannot."""

    fp64: Speed | None = None
    fp32: Speed | None = None
    tf32: Speed | None = None
    bf16: Speed | None = None
    fp16: Speed | None = None
    fp8: Speed | None = None

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if not self.known:
            raise RequestError("speeds", f"has none; give at least one of {', '.join(self.__struct_fields__)}")

    @property
    def known(self) -> dict[str, float]:
        """The precisions that there are, with their speeds."""
        speeds = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: speed for name, speed in speeds.items() if speed is not None}


class Devices(config.ConfigTable, frozen=True, kw_only=True):
    """A group of equal devices."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] | None = None  # None: as many as it takes
    speed: Speed | None = None  # whatever the precision
    speeds: Speeds | None = None
    achieved: Share | None = None  # the share of either that is reached; None: all
    memory: Size | None = None  # None: unlimited
    memory_bandwidth: Bandwidth | None = None  # at which it is read and written; only Fig. 4's rooflines ask for it
    lanes: Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED_LANES)] = 1  # tasks side by side on one device
    overlap: str = FULL  # of its messages with its tasks and with each other: one of OVERLAPS

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if self.speed is not None and self.speeds is not None:
            raise RequestError("speed", "and speeds both say how fast it is; keep one")
        if self.achieved is not None and self.speed is None and self.speeds is None:
            raise RequestError("achieved", "is a share of speed or speeds; give one")
        choose("overlap", self.overlap, OVERLAPS)

    @property
    def is_measured(self) -> bool:
        """Whether it says anything in bytes or FLOP/s."""
        return any(said is not None for said in (self.speed, self.speeds, self.memory, self.memory_bandwidth))

    def speed_in(self, precision: str | None) -> float | None:
        """Give the FLOP/s that are reached; None asks for a speed whatever the precision, and says that there is none.

        Raises KeyError for a precision without a speed.
        """
        peak = self.speed
        if self.speeds is not None and precision is not None:
            peak = self.speeds.known[precision]
        return peak if peak is None or self.achieved is None else peak * self.achieved
