"""Groups of equal devices, their speeds by precision, and their memory."""

from typing import Annotated

import msgspec

from cdpsim.cluster.topology import MOST_DEVICES
from cdpsim.errors import RequestError, choose
from cdpsim.files import config
from cdpsim.files.config import Bandwidth, Name, Share, Size, Speed

UNLIMITED_LANES = 1_000_000_000
# How a device's messages overlap: all of them with everything; with its tasks, in a stream of their own one after
# another; or with nothing, in one stream with its tasks.
OVERLAPS = FULL, STREAM, NONE = "full", "stream", "none"


class Speeds(config.ConfigTable, frozen=True, kw_only=True):
    """Peak FLOP/s by the precision of the factors; None where a device cannot multiply these."""

    fp64: Speed | None = None
    fp32: Speed | None = None
    tf32: Speed | None = None
    bf16: Speed | None = None
    fp16: Speed | None = None
    fp8: Speed | None = None

    def _check(self) -> None:
        if not self.known:
            raise RequestError("speeds", f"has none; give at least one of {', '.join(self.__struct_fields__)}")

    @property
    def known(self) -> dict[str, float]:
        """The speeds by precision, without those that are missing."""
        speeds = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: speed for name, speed in speeds.items() if speed is not None}


class MeasuredWith(config.ConfigTable, frozen=True, kw_only=True):
    """The training of which the passes were timed whose speed is that of the devices."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None  # of a micro-batch
    precision: str = ""  # a field of `Speeds`
    optimizer: Name = ""

    def _check(self) -> None:
        if self.precision:
            choose("precision", self.precision, Speeds.__struct_fields__)


class Devices(config.ConfigTable, frozen=True, kw_only=True):
    """A group of equal devices."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] | None = None  # None: as many as it takes
    speed: Speed | None = None  # whatever the precision
    speeds: Speeds | None = None
    achieved: Share | None = None  # the share of either that is reached; None: all
    memory: Size | None = None  # None: unlimited
    memory_bandwidth: Bandwidth | None = (
        None  # at which it is read and written: for updates by their bytes, and Fig. 4's rooflines
    )
    lanes: Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED_LANES)] = 1  # tasks side by side on one device
    overlap: str = FULL  # of its messages with its tasks and with each other: one of OVERLAPS

    def _check(self) -> None:
        if self.speed is not None and self.speeds is not None:
            raise RequestError("speed", "and speeds both say how fast it is; keep one")
        if self.achieved is not None and self.speed is None and self.speeds is None:
            raise RequestError("achieved", "is a share of speed or speeds; give one")
        choose("overlap", self.overlap, OVERLAPS)

    @property
    def is_measured(self) -> bool:
        """Whether anything of it is in bytes or FLOP/s."""
        return any(value is not None for value in (self.speed, self.speeds, self.memory, self.memory_bandwidth))

    def peak_in(self, precision: str | None) -> float | None:
        """Return the peak FLOP/s in a precision or, for None, in any; None where there is no speed.

        Raises KeyError for a precision without a speed.
        """
        return self.speed if self.speeds is None or precision is None else self.speeds.known[precision]

    def speed_in(self, precision: str | None) -> float | None:
        """Return the FLOP/s that are reached, as `peak_in` returns the peak."""
        peak = self.peak_in(precision)
        return peak if peak is None or self.achieved is None else peak * self.achieved
