"""Disorder of a run: slow devices, devices that stop, and random factors on the times of tasks and messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cdpsim.cluster.topology import MOST_DEVICES, DeviceNumber, turned
from cdpsim.errors import RequestError, choose, short_repr
from cdpsim.files import config, units
from cdpsim.files.config import Seconds
from cdpsim.numeric.disturbances import DISTRIBUTIONS

DISORDER_OPTIONS = ("slow", "jitter", "link_jitter", "imbalance", "stop")  # of `simulate`, and of a recorded request
_JITTERS = ("jitter", "link_jitter", "imbalance")
MOST_FACTOR = 1e6  # as slow, or as fast, as a device may be
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_DIGITS = re.compile("[0-9]{1,15}", re.ASCII)


class Slow(config.ConfigTable, frozen=True):
    """A device whose tasks take `factor` times as long."""

    device: DeviceNumber
    factor: Annotated[float, msgspec.Meta(ge=1 / MOST_FACTOR, le=MOST_FACTOR)]


class Stop(config.ConfigTable, frozen=True):
    """A device that stands still from `at` on: for so long, or for good; in seconds, or of a unit model in slots."""

    device: DeviceNumber
    at: Seconds
    lasts: Seconds | None = None


class Disorder(config.ConfigTable, frozen=True, kw_only=True):
    """The disorder of a run. Jitter is a distribution and a coefficient of variation, "lognormal:0.1"."""

    jitter: str = ""  # of tasks
    link_jitter: str = ""  # of messages
    imbalance: str = ""  # of the rows of tokens that come to the experts of a rank
    slow: tuple[Slow, ...] = ()
    stop: tuple[Stop, ...] = ()

    def _check(self) -> None:
        for name in _JITTERS:
            if getattr(self, name):
                read_jitter(name.replace("_", "-"), getattr(self, name))
        devices = [slow.device for slow in self.slow]
        for device in devices:
            if devices.count(device) > 1:
                raise RequestError("slow", f"device {device} is there twice; give it one factor")

    @property
    def is_random(self) -> bool:
        """Whether runs with other seeds differ."""
        return bool(self.jitter or self.link_jitter or self.imbalance)

    def effective(self) -> "Disorder":
        """Return this without a factor of 1, jitter of 0 or a stop of no length, which change nothing."""
        texts = [(name, getattr(self, name)) for name in _JITTERS]
        return Disorder(
            slow=tuple(slow for slow in self.slow if slow.factor != 1),
            stop=tuple(stop for stop in self.stop if stop.lasts != 0),
            **{name: text for name, text in texts if text and read_jitter("jitter", text)[1]},
        )

    def within(self, count: int) -> "Disorder":
        """Return this without slow devices and stops beyond the first `count` devices."""
        slow, stop = (tuple(each for each in column if each.device < count) for column in (self.slow, self.stop))
        return replace(self, slow=slow, stop=stop)

    def of_teams(self, ranks: int) -> "Disorder":
        """Return this by groups of ranks, which do everything together: a group is as slow as its slowest rank."""
        factors: dict[int, list[float]] = {}
        for each in self.slow:
            factors.setdefault(each.device // ranks, []).append(each.factor)
        slowest = {team: max([*found, *[1.0] * (len(found) < ranks)]) for team, found in factors.items()}
        slow = tuple(Slow(device=team, factor=factor) for team, factor in slowest.items() if factor != 1)
        return replace(self, slow=slow, stop=tuple(replace(each, device=each.device // ranks) for each in self.stop))

    def renumbered(self, places: int, data: int) -> "Disorder":
        """Return this with devices numbered by columns that were numbered by rows of `places`."""
        slow, stop = (
            tuple(replace(each, device=int(turned(np.array(each.device), places, data))) for each in column)
            for column in (self.slow, self.stop)
        )
        return replace(self, slow=slow, stop=stop)

    def of_ranks(self, given: "Disorder", ranks: int) -> "Disorder":
        """Return this of groups by the ranks that `given` names, where the groups of these are still there."""
        slow, stop = {each.device for each in self.slow}, {each.device for each in self.stop}
        return replace(
            self,
            slow=tuple(each for each in given.slow if each.device // ranks in slow),
            stop=tuple(each for each in given.stop if each.device // ranks in stop),
        )

    def require(self, count: int, schedule: str = "the schedule") -> None:
        """Refuse slow devices and stops beyond the first `count` devices, which are all of a schedule's devices."""
        for option, column in (("slow", self.slow), ("stop", self.stop)):
            for each in column:
                if each.device >= count:
                    problem = f"there is no device {each.device} for {schedule}"
                    remedy = f"take one from 0 to {count - 1}" if count > 1 else "the only one is 0"
                    raise RequestError(option, f"{problem}; {remedy}")

    def recorded(self, *, slots: bool) -> dict[str, object]:
        """Return the options of `simulate` for this disorder; in slots, times are numbers of them."""

        def time(amount: float) -> str:
            return str(int(amount)) if slots else units.quantity_text(amount, "s")

        slow = [f"{slow.device}:{_shortest(slow.factor)}" for slow in self.slow]
        stop = [
            ":".join([str(stop.device), *(time(part) for part in (stop.at, stop.lasts) if part is not None)])
            for stop in self.stop
        ]
        options = {"slow": slow, "jitter": self.jitter, "link_jitter": self.link_jitter}
        options |= {"imbalance": self.imbalance, "stop": stop}
        return {name: options[name] for name in DISORDER_OPTIONS if options[name]}

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> "Disorder":
        """Return the disorder in a file's content; errors begin with `subject`."""
        return config.decode(content, cls, subject, (cls, Slow, Stop))

    def words(self) -> list[str]:
        """Return words for a picture's title."""
        words = [f"device {slow.device} slow ×{slow.factor:g}" for slow in self.slow]
        words += [f"device {stop.device} stops" for stop in self.stop]
        texts = [(name.replace("_", " "), getattr(self, name)) for name in _JITTERS]
        return words + [f"{name} {text}" for name, text in texts if text]


def read_jitter(option: str, text: str) -> tuple[str, float]:
    """Return the distribution and the coefficient of variation that a text such as "lognormal:0.1" names."""
    if not isinstance(text, str):
        raise RequestError(option, f"{short_repr(text)} is no text; write for example 'lognormal:0.1'")
    name, _, number = text.partition(":")
    choose("distribution", name, DISTRIBUTIONS)
    most = DISTRIBUTIONS[name][1]
    if not _NUMBER.fullmatch(number) or not float(number) <= most:
        problem = f"{text[:40]!r} needs a coefficient of variation from 0 to {most:g}; write for example '{name}:0.1'"
        raise RequestError(option, problem)
    return name, float(number)


def read_imbalance(given: Any) -> str | float:
    """Return a load of at least 1, or the text of a distribution of loads; refuse anything else."""
    try:
        load = float(given)
    except (TypeError, ValueError, OverflowError):
        read_jitter("imbalance", given)
        return str(given)
    if not 1 <= load <= MOST_FACTOR:
        raise RequestError("imbalance", f"{short_repr(given)} is not the load of the busiest; give at least 1")
    return load


def disorder_of(
    disorder: Disorder,
    *,
    slow: "Sequence[str | Slow] | Mapping[int, float] | None" = (),
    jitter: str | None = None,
    link_jitter: str | None = None,
    imbalance: str | float | None = None,
    stop: "Sequence[str | Stop] | Mapping[int, str | float] | None" = (),
    slots: bool,
) -> Disorder:
    """Return a cluster's disorder with the options that a request gives, objects or texts as on the command line.

    `{3: 4}` is `["3:4"]`. `slots` says that times are numbers of slots.
    """
    slowed: Sequence[str | Slow] = _as_list(slow)
    stopped: Sequence[str | Stop] = _as_list(stop)
    if _is_list("slow", slowed, Slow):
        disorder = replace(disorder, slow=tuple(_read_slow(each) if isinstance(each, str) else each for each in slowed))
    if _is_list("stop", stopped, Stop):
        stops = tuple(_read_stop(each, slots) if isinstance(each, str) else each for each in stopped)
        if slots and any(part != int(part) for each in stops for part in (each.at, each.lasts or 0)):
            raise RequestError("stop", "slots are whole; give whole numbers of them, or a --model, of seconds")
        disorder = replace(disorder, stop=stops)
    drawn = None if isinstance(imbalance, float) else imbalance
    for name, text in zip(_JITTERS, (jitter, link_jitter, drawn), strict=True):
        if text is not None:
            read_jitter(name.replace("_", "-"), text)
            disorder = replace(disorder, **{name: text})
    return disorder.effective()


def _as_list(given: Any) -> Any:
    """Return what a mapping of devices says as texts, None as an empty list, and everything else as it is."""
    if given is None:
        return ()
    return [f"{device}:{value}" for device, value in given.items()] if isinstance(given, Mapping) else given


def _shortest(factor: float) -> str:
    """Return the shortest text of a factor that is read as the same factor."""
    return f"{factor:g}" if float(f"{factor:g}") == factor else repr(factor)


def _is_list(option: str, given: object, kind: type[Slow] | type[Stop]) -> bool:
    """Whether a list has any entries; refuses everything else than lists of texts and of the kind."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(g, str | kind) for g in given):
        raise RequestError(option, f"takes a list of {kind.__name__} or of texts, such as ['{_EXAMPLES[option]}']")
    return len(given) > 0


_EXAMPLES = {"slow": "3:4", "stop": "3:2 s:500 ms"}


def _read_slow(text: str) -> Slow:
    device, _, factor = text.partition(":")
    if not _DIGITS.fullmatch(device) or not _NUMBER.fullmatch(factor):
        raise RequestError("slow", f"{text[:40]!r} is not DEVICE:FACTOR; write for example '{_EXAMPLES['slow']}'")
    if not 1 / MOST_FACTOR <= float(factor) <= MOST_FACTOR:
        problem = f"factor {factor[:40]} is not between {1 / MOST_FACTOR:g} and {MOST_FACTOR:g}"
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
