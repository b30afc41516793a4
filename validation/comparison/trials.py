"""The trials of a battery in their order, with what each shows and how long it takes."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from cdpsim.errors import RequestError, suggestion
from cdpsim.schedules import SCHEDULES, TABLE_1

from ..replay.case import Case
from ..report.schema import CALIBRATION, option_words
from ..training.optimizer import OPTIMIZERS
from .replays import request_of

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_WORKERS = ("rounds", "local")  # orders of workers that do not wait for each other in each step
_SEVERAL: dict[str, tuple[str, ...]] = {"all": tuple(SCHEDULES), "table 1": tuple(TABLE_1)} | {
    kind: tuple(name for name, each in SCHEDULES.items() if getattr(each.order, kind)) for kind in _WORKERS
}
LEADING = ("single-dp", "single-cdp", "multi-dp", "multi-cdp", "dp", "acco", "diloco", CALIBRATION)


class Group(NamedTuple):
    """Trials that differ only in the schedule: what they show, and about how many seconds each takes."""

    name: str
    shows: str
    seconds: float


class Trial(NamedTuple):
    """A case, whether one process plays it or ranks do, and how often it is timed; without a case, a calibration."""

    group: Group
    case: Case | None
    alone: bool = False
    repeats: int = 0

    @property
    def name(self) -> str:
        """The group, the schedule, another rule than its own, and its options."""
        if self.case is None:
            return self.group.name
        asked = request_of(self.case, self.alone)
        rule = [f"rule={asked['rule']}"] if asked["rule"] else []
        return "+".join([f"{self.group.name}/{self.case.schedule}", *rule, *option_words(asked).values()])


def list_trials(device: str) -> list[Trial]:
    """Return the trials on a kind of device, the most telling first.

    The most telling schedules of each group come before all other schedules of any group.
    """
    groups = _TABLE["groups"].items()
    found = [trial for name, described in groups for trial in _trials_of(name, described, device)]
    return sorted(found, key=lambda trial: (trial.case.schedule if trial.case else CALIBRATION) not in LEADING)


def _trials_of(name: str, described: dict[str, Any], device: str) -> Iterator[Trial]:
    own = described | described.get(device, {})
    if own.get("only", device) != device:
        return
    group = Group(name, own["shows"], own["seconds"])
    if name == CALIBRATION:
        yield Trial(group, None)
    else:
        usual = _TABLE["usual"] | {"device": device} | own.get("case", {})
        for row in own.get("cases", [{"schedules": own.get("schedules")}]):
            for case in _cases_of(usual | row):
                yield Trial(group, case, own.get("alone", False), own.get("repeats", 0))


def _cases_of(row: dict[str, Any]) -> Iterator[Case]:
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in row.items()}
    mixed: bool = given.pop("mixed_precision", False)
    given["optimizer"] = replace(OPTIMIZERS[row["optimizer"]], mixed_precision=mixed)
    given["sizes"] = tuple(row.get("sizes", {}).items())
    for several in given.pop("schedules", None) or [row["schedule"]]:
        for schedule in _SEVERAL.get(several, (several,)):
            yield Case(**_TABLE["shapes"].get(schedule, {}) | given | {"schedule": schedule})


def select_trials(found: list[Trial], patterns: Iterable[str]) -> list[Trial]:
    """Return trials by their names, by the names of their groups, or by patterns of either such as `timed*`."""
    names = [*dict.fromkeys(trial.group.name for trial in found), *(trial.name for trial in found)]
    chosen: set[str] = set()
    for pattern in patterns:
        fits = {name for name in names if fnmatchcase(name, pattern)}
        if not fits:
            raise RequestError("--only", f"no trial is called {pattern!r}; {suggestion(pattern, names)}; see --list")
        chosen |= fits
    return [trial for trial in found if {trial.name, trial.group.name} & chosen]


def trial_names(left: list[Trial], found: list[Trial]) -> str:
    """Return short names of trials: complete groups by their name and `/*`."""
    names = []
    for group in dict.fromkeys(trial.group for trial in left):
        own = [trial for trial in left if trial.group == group]
        whole = len(own) > 1 and len(own) == sum(trial.group == group for trial in found)
        names += [f"{group.name}/*"] if whole else [trial.name for trial in own]
    return ", ".join(names)
