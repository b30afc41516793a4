"""The trials of a battery in their order, with what each shows and how long it takes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from cdpsim.errors import RequestError, suggestion
from cdpsim.schedules import TABLE_1
from validation.replay.case import Case
from validation.report.schema import CALIBRATION
from validation.training.optimizer import OPTIMIZERS

PIPELINES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1}  # and the stages on each device
LEADING = ("single-dp", "single-cdp", "multi-dp", "multi-cdp", CALIBRATION)


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
        """The group and the schedule."""
        if self.case is None:
            return self.group.name
        order = "" if self.case.slot_order is None else f"-{self.case.slot_order}"
        return f"{self.group.name}/{self.case.schedule}{order}"


def list_trials(device: str) -> list[Trial]:
    """Return the trials on a kind of device, the most telling first.

    The most telling schedules of each group come before all other schedules of any group.
    """
    found = list(_on_gpu() if device == "cuda" else _on_cpu())
    return sorted(found, key=lambda trial: (trial.case.schedule if trial.case else CALIBRATION) not in LEADING)


_SMALL = Case("", 4, steps=3, model="transformer", optimizer=OPTIMIZERS["momentum"])
# Only tasks of milliseconds have telling times.
_MIDDLE = replace(_SMALL, dtype="float32", batch=8, sizes=(("width", 256), ("length", 64), ("heads", 4)))
_BY_RANKS = ("multi-dp", "multi-cdp", "pp-cdp", "zero-dp", "zero-cdp", "1f1b", "zb-h1")


def _on_cpu() -> Iterator[Trial]:
    yield from _mlp_by_ranks(_SMALL, 2)
    for model in ("vit-b16", "resnet50"):
        group = Group(model, f"{model} at its real size, in one process: memory", 40)
        large = replace(_SMALL, model=model, dtype="float32", steps=2, batch=2, optimizer=OPTIMIZERS["sgd"])
        yield from (Trial(group, replace(large, schedule=name), alone=True) for name in ("single-dp", "single-cdp"))
    yield from _timed_and_small(_SMALL, _MIDDLE, 10)


def _on_gpu() -> Iterator[Trial]:
    small, middle = (replace(case, device="cuda") for case in (_SMALL, _MIDDLE))
    yield from _mlp_by_ranks(small, 5)
    sizes = {"vit-b16": (), "resnet50": (), "transformer": (("width", 1024), ("length", 512), ("heads", 16))}
    by_ranks = []
    for model, own in sizes.items():
        large = replace(small, model=model, dtype="float32", batch=16, sizes=own, optimizer=OPTIMIZERS["sgd"])
        group = Group(model, f"a large {model} in one process: memory and times", 10)
        yield from (Trial(group, case, alone=True, repeats=3) for case in _each(large))
        group = Group(f"{model}-ranks", f"a large {model} by ranks that share the GPU: memory, messages, times", 20)
        for schedule in ("single-cdp", "multi-dp", "multi-cdp", "pp-cdp", "mp-cdp", "zero-cdp"):
            by_ranks.append(Trial(group, replace(large, schedule=schedule), repeats=3))
    yield from by_ranks
    yield from _timed_and_small(small, middle, 10)


def _mlp_by_ranks(small: Case, seconds: float) -> Iterator[Trial]:
    group = Group("ranks", "an MLP by a rank for each device, N = 4: parameters, memory, messages", seconds)
    yield from (Trial(group, case) for case in _each(replace(small, model="mlp")))


def _timed_and_small(small: Case, middle: Case, seconds: float) -> Iterator[Trial]:
    """Return the trials that all kinds of devices have."""
    group = Group("timed-ranks", "a transformer by two ranks: times", seconds)
    for schedule in _BY_RANKS:
        yield Trial(group, replace(middle, schedule=schedule, n=2), repeats=3)
    group = Group(CALIBRATION, "this machine's messages, collectives and speed", 3 * seconds)
    yield Trial(group, None)
    group = Group("timed", "the same transformer in one process, N = 4: times", seconds)
    yield from (Trial(group, case, alone=True, repeats=3) for case in _each(middle))
    for n, lasts in ((4, 1), (2, 1), (8, 3)):
        group = Group(f"small-n{n}", f"a small transformer in one process, N = {n}: parameters, memory", lasts)
        yield from (Trial(group, case, alone=True) for case in _each(replace(small, n=n)))
        if n == 4:
            yield Trial(group, replace(small, schedule="single-cdp", slot_order="backward-first"), alone=True)


def _each(case: Case) -> Iterator[Case]:
    """Return the same case with one schedule after another."""
    yield from (replace(case, schedule=schedule) for schedule in TABLE_1)
    yield from (replace(case, schedule=schedule, chunks=chunks) for schedule, chunks in PIPELINES.items())


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
