"""What disturbs a run: devices that are slow or stop, tasks and messages that do not always take equally long."""

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec.structs import replace

from cdpsim.cluster.topology import MOST_DEVICES, Device
from cdpsim.errors import RequestError, choose, short_repr
from cdpsim.files import config, units
from cdpsim.files.config import Seconds
from cdpsim.numeric.random_factors import DISTRIBUTIONS

KEYWORDS = ("slow", "jitter", "link_jitter", "stop")  # of `simulate`, and of a recorded request
MOST_TIMES = 1e6  # as slow, or as fast, as a device may be
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_DIGITS = re.compile("[0-9]{1,15}", re.ASCII)


class Slow(config.ConfigTable, frozen=True):
    """A device whose tasks take `factor` times as long."""

    device: Device
    factor: Annotated[float, msgspec.Meta(ge=1 / MOST_TIMES, le=MOST_TIMES)]


class Stop(config.ConfigTable, frozen=True):
    """A device that does nothing from `at` on: for so long, or for good; in seconds, or of a unit model in slots."""

    device: Device
    at: Seconds
    lasts: Seconds | None = None


class Disorder(config.ConfigTable, frozen=True, kw_only=True):
    """All that disturbs a run. Jitter is a distribution and a coefficient of variation, "lognormal:0.1"."""

    jitter: str = ""  # of tasks
    link_jitter: str = ""  # of messages
    slow: tuple[Slow, ...] = ()
    stop: tuple[Stop, ...] = ()

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        for name in ("jitter", "link_jitter"):
            if getattr(self, name):
                read_jitter(name.replace("_", "-"), getattr(self, name))
        devices = [one.device for one in self.slow]
        for device in devices:
            if devices.count(device) > 1:
                raise RequestError("slow", f"device {device} is there twice; give it one factor")

    @property
    def is_random(self) -> bool:
        """Whether another draw gives another run."""
        return bool(self.jitter or self.link_jitter)

    def effective(self) -> "Disorder":
        """Leave out what changes nothing: a factor of 1, jitter of 0, a stop of no length."""
        if self == Disorder():
            return self
        jitter, link_jitter = (
            text if text and read_jitter("jitter", text)[1] else "" for text in (self.jitter, self.link_jitter)
        )
        slow = tuple(one for one in self.slow if one.factor != 1)
        stop = tuple(one for one in self.stop if one.lasts != 0)
        return Disorder(jitter=jitter, link_jitter=link_jitter, slow=slow, stop=stop)

    def within(self, count: int) -> "Disorder":
        """Leave out what is of devices beyond the first `count`."""
        if not self.slow and not self.stop:
            return self
        slow, stop = (tuple(one for one in some if one.device < count) for some in (self.slow, self.stop))
        return replace(self, slow=slow, stop=stop)

    def require(self, count: int, schedule: str = "the schedule") -> None:
        """Refuse what is about devices beyond the first `count`, which are all that there are for a schedule."""
        for option, devices in (("slow", self.slow), ("stop", self.stop)):
            for one in devices:
                if one.device >= count:
                    problem = f"there is no device {one.device} for {schedule}"
                    remedy = f"take one from 0 to {count - 1}" if count > 1 else "the only one is 0"
                    raise RequestError(option, f"{problem}; {remedy}")

    def recorded(self, *, slots: bool) -> dict[str, object]:
        """Give the keywords of `simulate` that ask for it; in slots, times are numbers of them."""

        def time(amount: float) -> str:
            return str(int(amount)) if slots else units.quantity_text(amount, "s")

        slow = [f"{one.device}:{_shortest(one.factor)}" for one in self.slow]
        stop = [
            ":".join([str(one.device), *(time(part) for part in (one.at, one.lasts) if part is not None)])
            for one in self.stop
        ]
        said = {"slow": slow, "jitter": self.jitter, "link_jitter": self.link_jitter, "stop": stop}
        return {name: said[name] for name in KEYWORDS if said[name]}

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> "Disorder":
        """Make it of a file's content; errors begin with `subject`."""
        return config.decode(content, cls, subject, (cls, Slow, Stop))

    def words(self) -> list[str]:
        """Say it in a picture's title."""
        said = [f"device {one.device} slow ×{one.factor:g}" for one in self.slow]
        said += [f"device {one.device} stops" for one in self.stop]
        said += [f"jitter {self.jitter}"] * bool(self.jitter)
        return said + [f"link jitter {self.link_jitter}"] * bool(self.link_jitter)


def read_jitter(option: str, text: str) -> tuple[str, float]:
    """Read a distribution and its coefficient of variation, "lognormal:0.1"."""
    if not isinstance(text, str):
        raise RequestError(option, f"{short_repr(text)} is no text; write for example 'lognormal:0.1'")
    name, _, number = text.partition(":")
    choose("distribution", name, DISTRIBUTIONS)
    most = DISTRIBUTIONS[name][1]
    if not _NUMBER.fullmatch(number) or not float(number) <= most:
        problem = f"{text[:40]!r} needs a coefficient of variation from 0 to {most:g}; write for example '{name}:0.1'"
        raise RequestError(option, problem)
    return name, float(number)


def disorder_of(
    disorder: Disorder,
    *,
    slow: "Sequence[str | Slow]" = (),
    jitter: str | None = None,
    link_jitter: str | None = None,
    stop: "Sequence[str | Stop]" = (),
    slots: bool,
) -> Disorder:
    """Take what is asked for, objects or texts as on the command line, for what a cluster says.

    `slots` says that times are of slots.
    """
    if _each("slow", slow, Slow):
        disorder = replace(disorder, slow=tuple(_read_slow(one) if isinstance(one, str) else one for one in slow))
    if _each("stop", stop, Stop):
        stops = tuple(_read_stop(one, slots) if isinstance(one, str) else one for one in stop)
        if slots and any(part != int(part) for one in stops for part in (one.at, one.lasts or 0)):
            raise RequestError("stop", "slots are whole; give whole numbers of them, or a --model, of seconds")
        disorder = replace(disorder, stop=stops)
    for name, text in (("jitter", jitter), ("link_jitter", link_jitter)):
        if text is not None:
            read_jitter(name.replace("_", "-"), text)
            disorder = replace(disorder, **{name: text})
    return disorder.effective()


def _shortest(factor: float) -> str:
    """Write a factor so that reading it gives the same."""
    return f"{factor:g}" if float(f"{factor:g}") == factor else repr(factor)


def _each(option: str, given: object, kind: type[Slow] | type[Stop]) -> bool:
    """Whether there are any; refuses what is no list of them."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(g, str | kind) for g in given):
        raise RequestError(option, f"takes a list of {kind.__name__} or of texts, such as ['{_EXAMPLES[option]}']")
    return len(given) > 0


_EXAMPLES = {"slow": "3:4", "stop": "3:2 s:500 ms"}


def _read_slow(text: str) -> Slow:
    device, _, factor = text.partition(":")
    if not _DIGITS.fullmatch(device) or not _NUMBER.fullmatch(factor):
        raise RequestError("slow", f"{text[:40]!r} is not DEVICE:FACTOR; write for example '{_EXAMPLES['slow']}'")
    if not 1 / MOST_TIMES <= float(factor) <= MOST_TIMES:
        problem = f"factor {factor[:40]} is not between {1 / MOST_TIMES:g} and {MOST_TIMES:g}"
        raise RequestError("slow", f"{problem}; tasks of the device take FACTOR times as long")
    return Slow(device=_device("slow", device), factor=float(factor))


def _read_stop(text: str, slots: bool) -> Stop:
    device, *times = text.split(":")
    example = "3:12:2" if slots else _EXAMPLES["stop"]
    if not _DIGITS.fullmatch(device) or not 1 <= len(times) <= 2 or "" in times:
        raise RequestError("stop", f"{text[:40]!r} is not DEVICE:AT or DEVICE:AT:FOR; write for example '{example}'")
    at, *lasts = (_time(part, slots, example) for part in times)
    return Stop(device=_device("stop", device), at=at, lasts=lasts[0] if lasts else None)


def _device(option: str, digits: str) -> int:
    if int(digits) >= MOST_DEVICES:
        raise RequestError(option, f"device {digits} is beyond any cluster; devices count from 0")
    return int(digits)


def _time(text: str, slots: bool, example: str) -> float:
    if not slots:
        try:
            return units.seconds(text)
        except RequestError as error:
            raise RequestError("stop", f"{error}, or all of it {example!r}") from None
    if not _DIGITS.fullmatch(text) or int(text) > units.MOST_SECONDS:
        raise RequestError("stop", f"{text[:40]!r} is not a whole number of slots; write for example {example!r}")
    return float(text)
