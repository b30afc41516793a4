"""Which options a schedule takes: of one run others are refused, of several schedules they are left out."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from cdpsim.errors import RequestError
from cdpsim.request.options import OPTIONS, DataOptions
from cdpsim.schedules import SCHEDULES, Schedule

Asked = tuple[Schedule, Mapping[str, Any]]  # a schedule with all options that are given for it
_NAMED = 6  # schedules in a refusal


def accepts(schedule: Schedule, option: str) -> bool:
    """Return whether a schedule takes an option of a request."""
    return bool(OPTIONS[option].applies(schedule))


def is_given(value: object) -> bool:
    """Return whether an option has a value, which may be anything; a switch that is off has none."""
    return value is not None and value is not False


@cache
def _usual() -> frozenset[str]:
    """Return the options that all schedules take whose steps wait for their gradients."""
    waiting = [schedule for schedule in SCHEDULES.values() if schedule.order.waits]
    return frozenset(name for name in OPTIONS if all(accepts(schedule, name) for schedule in waiting))


def options_beyond_usual(schedule: Schedule) -> tuple[str, ...]:
    """Return the options that a schedule takes, and that not all others do whose steps wait, as on the command line."""
    return tuple(name.replace("_", "-") for name in OPTIONS if name not in _usual() and accepts(schedule, name))


def option_words(schedule: Schedule) -> tuple[str, ...]:
    """Return these options with one word for those of the data axis beside --replicas: all, or those of --zero 1."""
    own, splits = options_beyond_usual(schedule), accepts(schedule, "zero")
    of_data = {name.replace("_", "-") for name in DataOptions.__annotations__ if splits and name != "replicas"}
    word = "data-axis" if accepts(schedule, "buckets") else "zero-1"
    return (*(name for name in own if name not in of_data), *[word] * splits)


def is_untaken(schedule: Schedule, name: str, value: object, n: int | None = None) -> bool:
    """Return whether a schedule of n stages does not take an option with a value other than its own."""
    if name not in OPTIONS or not is_given(value) or accepts(schedule, name):
        return False
    own = OPTIONS[name].own(schedule, n)
    return own is None or str(getattr(value, "name", value)) != str(own)


def refuse_untaken(schedule: Schedule, options: Mapping[str, Any], n: int | None) -> None:
    """Refuse options that a schedule of n stages does not take, unless each has the schedule's own value."""
    for name, value in options.items():
        if is_given(value) and is_untaken(schedule, name, value, n):
            raise untaken_refusal(schedule, name)


def untaken_refusal(schedule: Schedule, name: str) -> RequestError:
    """Return the refusal of an option that a schedule does not take, with some that do."""
    accepting = [other.name for other in SCHEDULES.values() if accepts(other, name)]
    more = f" and {len(accepting) - _NAMED} more" if len(accepting) > _NAMED else ""
    others = f"{', '.join(accepting[:_NAMED])}{more} {'does' if len(accepting) == 1 else 'do'}"
    accepted = ", ".join(option_words(schedule)) or "none of its kind"
    problem = f"{schedule.name} does not take this option (it takes {accepted}); {others}"
    return RequestError(name.replace("_", "-"), problem)


def taken_options(schedule: Schedule, options: Mapping[str, Any], needed: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a request that its schedule takes, and those that are needed."""
    return {
        name: value
        for name, value in options.items()
        if name in needed or not is_untaken(schedule, name, value, options.get("n"))
    }


def untaken_by(requests: Iterable[Asked]) -> dict[str, list[str]]:
    """Return by option which of several schedules do not take it."""
    found: dict[str, dict[str, None]] = {}
    for schedule, options in requests:
        for name, value in options.items():
            if is_untaken(schedule, name, value, options.get("n")):
                found.setdefault(name.replace("_", "-"), {})[schedule.name] = None
    return {name: list(schedules) for name, schedules in found.items()}


def refuse_taken_by_none(requests: Sequence[Asked]) -> None:
    """Refuse an option that is given for several schedules, and that none of them takes."""
    for name in OPTIONS:
        untaken = [schedule for schedule, own in requests if is_untaken(schedule, name, own.get(name), own.get("n"))]
        if untaken and len(untaken) == sum(is_given(own.get(name)) for _, own in requests):
            raise untaken_refusal(untaken[0], name)
