"""The trials of a battery in their order, with what each shows and how long it takes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from cdpsim.errors import RequestError, suggestion
from cdpsim.schedules import SCHEDULES, TABLE_1

from ..replay.case import Case
from ..report.schema import CALIBRATION, option_words
from ..training.optimizer import OPTIMIZERS
from .replays import request_of

_SHAPES = {  # micro-batches and stages on each device, where they are not those that a schedule has itself
    "interleaved-1f1b": (None, 2),
    "looped-bfs": (None, 2),
    "interleaved-zero-bubble": (None, 2),
    "dualpipe": (8, None),
}
_SPLIT = ("zb-h1", "zb-h2", "interleaved-zero-bubble", "zbv", "dualpipe", "dualpipev")
WORKERS = ("rounds", "local")  # orders of workers that do not wait for each other in each step
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
    found = list(_on_gpu() if device == "cuda" else _on_cpu())
    return sorted(found, key=lambda trial: (trial.case.schedule if trial.case else CALIBRATION) not in LEADING)


_SMALL = Case("", 4, steps=3, model="transformer", optimizer=OPTIMIZERS["momentum"])
# Only tasks of milliseconds have telling times.
_MIDDLE = _SMALL.but(dtype="float32", batch=8, sizes=(("width", 256), ("length", 64), ("heads", 4)))
_TIMED = (*TABLE_1, "1f1b", "zb-h1")
_TIMED_BY_RANKS = ("multi-dp", "multi-cdp", "pp-cdp", "zero-dp", "zero-cdp", "1f1b", "zb-h1")
_TIMED_ON_GPU = ("single-dp", "multi-dp", "multi-cdp", "pp-cdp", "zero-cdp", "1f1b", "zb-h1")
_TIMED_BY_RANKS_ON_GPU = ("multi-dp", "multi-cdp", "pp-cdp", "1f1b")
_BY_RANKS = (*TABLE_1, "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe", "pipedream")
_IN_PAIRS = ("single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp")


def _on_cpu() -> Iterator[Trial]:
    yield from _mlp_by_ranks(_SMALL, 2)
    yield from _data_ranks(_SMALL)
    yield from _workers(_SMALL)
    yield from _real_sizes(_SMALL.but(steps=2, batch=2), 80)
    yield from _timed_by_ranks(_MIDDLE, _TIMED_BY_RANKS)
    yield from _timed_and_small(_SMALL, _MIDDLE, _TIMED)


def _on_gpu() -> Iterator[Trial]:
    small, middle = (case.but(device="cuda") for case in (_SMALL, _MIDDLE))
    yield from _mlp_by_ranks(small, 5)
    yield from _data_ranks(small)
    yield from _workers(small)
    yield from _real_sizes(small.but(batch=16), 30)
    large = middle.but(batch=16, sizes=(("width", 1024), ("length", 512), ("heads", 16)))
    group = Group("large", "a transformer whose tasks fill a GPU, in one process, N = 4: memory and times", 30)
    yield from (Trial(group, case, alone=True, repeats=3) for case in _each(large, ("multi-cdp", "1f1b")))
    yield from _timed_by_ranks(middle, _TIMED_BY_RANKS_ON_GPU)
    yield from _timed_and_small(small, middle, _TIMED_ON_GPU)


def _real_sizes(case: Case, seconds: float) -> Iterator[Trial]:
    for model in ("vit-b16", "resnet50"):
        group = Group(model, f"{model} at its real size, in one process: memory", seconds)
        large = case.but(model=model, dtype="float32", optimizer=OPTIMIZERS["sgd"])
        yield from (Trial(group, each, alone=True) for each in _each(large, ("single-dp", "single-cdp")))


def _mlp_by_ranks(small: Case, seconds: float) -> Iterator[Trial]:
    group = Group("ranks", "an MLP by a rank for each device, N = 4: parameters, memory, messages", seconds)
    yield from (Trial(group, case) for case in _each(small.but(model="mlp"), _BY_RANKS))


def _data_ranks(small: Case) -> Iterator[Trial]:
    """Return the trials of what data ranks share, by two and by four of them."""
    group = Group("data-ranks", "a small model by data ranks, two or four: parameters, memory, messages", 2)
    two, layers = small.but(schedule="dp", n=2, m=2, replicas=2), {"by_layer": (0, 2), "cuts": (1, 2, 3)}
    pipeline = two.but(schedule="1f1b", sizes=(("layers", 2),), **layers)
    for case in (
        two,
        two.but(replicas=4, reduce="each"),
        two.but(buckets="16KiB", whole_first_step=True),
        two.but(zero=1, m=3),
        two.but(zero=1, replicas=3, optimizer=OPTIMIZERS["adam"], gather="step"),
        two.but(zero=2),
        two.but(zero=2, replicas=4, reduce="last"),
        two.but(zero=3, model="mlp"),
        two.but(zero=3, replicas=4),
        two.but(zero=3, replicas=4, reshard=2),
        two.but(zero=3, reshard="no", prefetch=0),
        two.but(zero=3, reshard="step"),
        two.but(zero=1, shard=2),
        two.but(zero=2, shard=2, m=3),
        two.but(zero=3, shard=2),
        pipeline.but(zero=1, buckets="32KiB"),
        pipeline.but(zero=2),
        pipeline.but(zero=3, reshard="yes"),
    ):
        yield Trial(group, case)


def _workers(small: Case) -> Iterator[Trial]:
    """Return the trials of workers that do not wait for updates, or take means, some of unlike speed."""
    group = Group("workers", "a small model by ranks with rounds or local steps: parameters, memory, messages", 2)
    two = small.but(n=2, replicas=2)
    adam = two.but(optimizer=OPTIMIZERS["adam"], slow=("1:2",))
    mixed = two.but(dtype="bfloat16", optimizer=replace(OPTIMIZERS["adam"], mixed_precision=True))
    rounds, local = ([name for name, each in SCHEDULES.items() if getattr(each.order, kind)] for kind in WORKERS)
    for case in (
        *_each(adam, rounds),
        adam.but(schedule="dpu", warm_up=2),
        two.but(schedule="acco", m=2, replicas=4),
        mixed.but(schedule="acco"),
        *_each(adam.but(local_steps=2), local),
        two.but(schedule="diloco", m=2, replicas=4, local_steps=3, outer="nesterov:0.5:0.8"),
        mixed.but(schedule="co2", local_steps=2),
    ):
        yield Trial(group, case)


def _timed_by_ranks(middle: Case, schedules: Iterable[str]) -> Iterator[Trial]:
    group = Group("timed-ranks", "a transformer by two ranks: times", 10)
    yield from (Trial(group, case, repeats=3) for case in _each(middle.but(n=2), schedules))


def _timed_and_small(small: Case, middle: Case, timed: Iterable[str]) -> Iterator[Trial]:
    """Return the trials that all kinds of devices have."""
    yield Trial(Group(CALIBRATION, "this machine's messages, collectives and speed", 30), None)
    group = Group("timed", "the same transformer in one process, N = 4: times", 10)
    yield from (Trial(group, case, alone=True, repeats=3) for case in _each(middle, timed))
    for n, lasts, schedules in ((4, 1, tuple(SCHEDULES)), (2, 1, TABLE_1), (8, 3, _IN_PAIRS)):
        group = Group(f"small-n{n}", f"a small transformer in one process, N = {n}: parameters, memory", lasts)
        yield from (Trial(group, case, alone=True) for case in _each(small.but(n=n), schedules))
    group = Group("options", "the small transformer in one process, with options: parameters, memory", 1)
    yield from (Trial(group, case, alone=True) for case in _with_options(small))
    group = Group("options-ranks", "an MLP by ranks, with options: parameters, memory, messages", 2)
    yield from (Trial(group, case) for case in _with_options_by_ranks(small.but(model="mlp")))


def _with_options(small: Case) -> Iterator[Case]:
    """Return the case with the options of schedules and of training, each where it applies."""
    mixed = {"dtype": "bfloat16", "optimizer": replace(OPTIMIZERS["adam"], mixed_precision=True)}
    two_each = {"sizes": (("layers", 2),)}
    deep, half = {"sizes": (("layers", 4),)}, {"dtype": "float32", "autocast": "bf16"}
    yield small.but(schedule="single-cdp", slot_order="backward-first")
    yield from (case.but(split="twice") for case in _each(small, _SPLIT))
    for schedule, options in (
        ("zero-dp", {"prefetch": 1}),
        ("zero-cdp", {"prefetch": 1}),
        ("multi-dp", {"reduce": "last"}),
        ("interleaved-1f1b", {"chunks": 2, "replicas": 2, "reduce": "last"}),
        ("interleaved-1f1b", {"chunks": 2, "zero": 2, "replicas": 2, "reduce": "each"}),
        (
            "zb-h1",
            {
                "zero": 2,
                "replicas": 2,
                "buckets": "8KiB",
                "by_layer": (0, 2, 4, 6),
                "cuts": tuple(range(1, 8)),
                **two_each,
            },
        ),
        ("gpipe", {"zero": 3, "replicas": 4, "reshard": 2, "n": 2}),
        ("dp", {"zero": 3, "shard": 3, "replicas": 2, **mixed}),
        ("pipedream", {"rule": "vertical-sync", "steps": 6}),
        ("gpipe", {"recompute": "full", **deep}),
        ("1f1b", {"recompute": "sqrt", **deep}),
        ("multi-cdp", {"recompute": "sqrt", **deep}),
        ("1f1b", {"offload": "all"}),
        ("zero-cdp", {"offload": "all"}),
        ("zb-h1", {"offload": "optimizer"}),
        ("pp-cdp", {"dtype": "bfloat16"}),
        ("1f1b", mixed),
        ("zero-cdp", mixed),
        ("multi-cdp", {"optimizer": OPTIMIZERS["adafactor"]}),
        ("zero-cdp", {"optimizer": OPTIMIZERS["adafactor"]}),
        ("pp-cdp", half),
        ("zb-h1", half),
        ("1f1b", {"recompute": "full", "offload": "all", **mixed, **deep}),
    ):
        yield small.but(schedule=schedule, **options)


def _with_options_by_ranks(small: Case) -> Iterator[Case]:
    """Return the case with options that change what ranks send, or keep on their hosts."""
    adam = replace(OPTIMIZERS["adam"], mixed_precision=True)
    yield small.but(schedule="zero-cdp", prefetch=1, dtype="bfloat16", optimizer=adam)
    yield small.but(schedule="multi-dp", reduce="last")
    yield small.but(schedule="1f1b", recompute="full", offload="all", sizes=(("layers", 4),))
    yield small.but(schedule="zb-h1", split="twice")


def _each(case: Case, schedules: Iterable[str]) -> Iterator[Case]:
    """Return the same case with one schedule after another."""
    for schedule in schedules:
        m, chunks = _SHAPES.get(schedule, (None, None))
        yield case.but(schedule=schedule, m=m, chunks=chunks)


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
