"""What is asked of a simulation: read, checked, recorded, and read again from a record."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cdpsim import presets
from cdpsim.cluster import Cluster
from cdpsim.collectives import COLLECTIVES
from cdpsim.costs import CONTENTION
from cdpsim.disorder import Disorder, disorder_of
from cdpsim.engine import find_engine
from cdpsim.errors import RequestError, choose
from cdpsim.limits import refuse_too_large
from cdpsim.model import UNIT_MODELS, Model, Recipe
from cdpsim.recipe import apply
from cdpsim.schedules import SCHEDULES, Schedule, imported
from cdpsim.schedules.rule import NAMED, Rule, find_rule, matrix_rule
from cdpsim.schedules.shape import Shape

SLOT_ORDERS = ("forward-first", "backward-first")
_TRAINING = ("optimizer", "mixed_precision", "recompute", "offload")
_PIPELINES = {"chunks": None, "replicas": 1, "overlap_all_reduce": False}  # and what they are where nobody asks
_DISORDER = ("slow", "jitter", "link_jitter", "stop")


@dataclass(frozen=True)
class Request:
    """A schedule of a model on a cluster, and how; all of it has been checked, alone and together."""

    schedule: Schedule
    model: Model  # in its stages, trained as asked
    cluster: Cluster
    rule: Rule
    shape: Shape
    steps: int
    prefetch: int
    overlap_all_reduce: bool
    slot_order: str
    collective: str
    expand: bool
    contention: str
    defer_receives: bool
    disorder: Disorder
    seed: int
    run: int
    engine: str
    ignore_memory: bool
    max_memory: str | float | None

    @property
    def in_slots(self) -> bool:
        """Whether times are slots."""
        return self.model.is_unit and self.cluster.is_free

    @property
    def contends(self) -> bool:
        """Whether messages share links; what is free takes nothing from others."""
        return self.contention != "none" and not self.cluster.is_free

    @property
    def expands(self) -> bool:
        """Whether collectives run as messages: one in one piece is on no link that it could share."""
        return self.expand or self.contends

    @property
    def weighed(self) -> str:
        """The engine whose memory counts."""
        return _weighed(self.engine, self.contention)

    def recorded(self) -> dict[str, Any]:
        """Give what a summary says of it; what was not asked for has no word."""
        shape = self.shape
        said: dict[str, Any] = {"schedule": self.schedule.name, "n": shape.n, "m": shape.m, "steps": self.steps}
        said |= {"chunks": shape.chunks} if shape.chunks > 1 else {}
        said |= {"replicas": shape.replicas} if shape.replicas > 1 else {}
        said |= {"overlap_all_reduce": True} if self.overlap_all_reduce else {}
        said["rule"] = _recorded(self.rule, shape)
        said |= {"prefetch": self.prefetch, "slot_order": self.slot_order, "collective": self.collective}
        said |= {"expand_collectives": True} if self.expands else {}
        said |= {"defer_receives": True} if self.defer_receives else {}
        said |= {"contention": self.contention} if self.contention != "none" else {}
        said |= {"run": self.run} if self.run else {}
        if self.disorder != Disorder():
            said["disorder"] = self.disorder.to_builtins(slots=self.in_slots)
        return said | {"seed": self.seed, "model": self.model.to_builtins(), "cluster": self.cluster.to_builtins()}


def read(asked: Mapping[str, Any]) -> Request:
    """Read the keywords of `simulate`, in an order in which what is cheap to refuse is refused first."""
    schedule = find_schedule(asked["schedule"])
    engine, contention = asked["engine"], choose("contention", asked["contention"], CONTENTION)
    find_engine(engine, contention)
    least = {"steps": 1, "prefetch": 0, "seed": 0, "run": 0}
    numbers: dict[str, Any] = {name: whole(name, asked[name], at_least=low) for name, low in least.items()}
    choose("collective", asked["collective"], COLLECTIVES)
    steps = numbers["steps"]
    n = asked["n"]
    if n is None and schedule.shape is not None:
        n = schedule.shape.n
    if asked["model"] in UNIT_MODELS:
        n = whole("n", n, at_least=1)
        _refuse_too_large(schedule, shape_of(schedule, n, asked), steps, asked)
    model = _find_model(asked["model"], n, {name: asked[name] for name in _TRAINING})
    cluster = _find_cluster(asked["cluster"])
    disorder = disorder_of(cluster.disorder, **{name: asked[name] for name in _DISORDER}, slots=model.is_unit)
    shape = shape_of(schedule, model.n, asked)
    slots = model.is_unit and cluster.is_free
    _refuse_too_large(schedule, shape, steps, asked, slots=slots)
    _refuse_untaken(schedule, shape, asked)
    if schedule.splits(shape):
        _refuse_too_large(schedule, shape, steps, asked, slots=slots, parts=3)
        model = model.split(schedule.name)
    same = ("collective", "expand", "defer_receives", "engine", "ignore_memory", "max_memory", "overlap_all_reduce")
    return Request(
        schedule=schedule,
        model=model,
        cluster=msgspec.structs.replace(cluster, disorder=Disorder()),
        rule=_find_rule(schedule, asked["rule"], asked["vertical_sync"]),
        shape=shape,
        slot_order=asked["slot_order"] or SLOT_ORDERS[0],
        contention=contention,
        disorder=disorder,
        **numbers,
        **{name: asked[name] for name in same},
    )


def shape_of(schedule: Schedule, n: int, asked: Mapping[str, Any]) -> Shape:
    """How many micro-batches, chunks and replicas are asked for; as many as the schedule has itself where none are."""
    if schedule.shape is not None and n != schedule.shape.n:
        raise RequestError("n", f"n={n}, but {schedule.name} has {schedule.shape.n} stages; leave it out")
    own = {"m": schedule.micro_batches(n), "chunks": schedule.order.chunks, "replicas": 1}
    m, chunks, replicas = (
        whole(name, default if asked[name] is None else asked[name], at_least=1) for name, default in own.items()
    )
    return Shape(n, m, chunks, replicas)


def _refuse_too_large(
    schedule: Schedule, shape: Shape, steps: int, asked: Mapping[str, Any], *, slots: bool = True, parts: int = 2
) -> None:
    """Refuse what will not fit; whether backwards are split is known only when an order is written out."""
    m = None if asked["m"] is None and schedule.m is None else shape.m
    engine = _weighed(asked["engine"], asked["contention"])
    refuse_too_large(shape.n, m, steps, engine, asked["max_memory"], replicas=shape.replicas, parts=parts, slots=slots)


def _refuse_untaken(schedule: Schedule, shape: Shape, asked: Mapping[str, Any]) -> None:
    """Refuse options that the schedule does not take, unless they say what it does anyway."""
    refuse_untaken(
        schedule,
        m=shape.m != schedule.micro_batches(shape.n),
        chunks=shape.chunks != schedule.order.chunks,
        replicas=shape.replicas > 1,
        overlap_all_reduce=asked["overlap_all_reduce"],
        vertical_sync=asked["vertical_sync"],
        prefetch=int(asked["prefetch"]) > 0,
        slot_order=asked["slot_order"],
    )


def _find_rule(schedule: Schedule, rule: str | Rule | None, vertical_sync: bool) -> Rule:
    if vertical_sync:
        if rule is not None:
            raise RequestError("vertical-sync", "is a rule, and --rule asks for another one; leave either out")
        assert schedule.vertical_sync is not None, "which has been refused"
        return schedule.vertical_sync
    return rule if isinstance(rule, Rule) else schedule.rule if rule is None else find_rule(rule)


def _weighed(engine: str, contention: str) -> str:
    return engine if contention == "none" else "simpy"


def keywords(request: Mapping[str, Any]) -> dict[str, Any]:
    """Give the keywords of `simulate` that a recorded request stands for."""
    asked = {name: request[name] for name in ("schedule", "n", "m", "steps", "prefetch", "collective", "seed")}
    if request["slot_order"] != SLOT_ORDERS[0]:
        asked["slot_order"] = request["slot_order"]
    asked["expand"] = bool(request.get("expand_collectives", False))
    asked["defer_receives"] = bool(request.get("defer_receives", False))
    asked["contention"] = request.get("contention", "none")
    rule = request["rule"]
    asked |= {name: request.get(name, default) for name, default in _PIPELINES.items()}
    asked["rule"] = NAMED[rule] if isinstance(rule, str) else matrix_rule(np.array(rule, dtype=bool))
    for part, form in (("model", Model), ("cluster", Cluster)):
        slots = isinstance(request[part], str)
        asked[part] = request[part] if slots else form.from_builtins(request[part], part)
    asked["run"] = request.get("run", 0)
    if "disorder" in request:
        disorder = Disorder.from_builtins(request["disorder"], "disorder")
        asked["cluster"] = msgspec.structs.replace(_find_cluster(asked["cluster"]), disorder=disorder)
    return asked


def _recorded(rule: Rule, shape: Shape) -> object:
    """A rule as a summary says it: by its name, or by its matrix."""
    return rule.name if rule.name in NAMED else rule.matrix(shape.n, shape.m).astype(int).tolist()


def find_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule by its name, or in a CSV file of torch's, or itself."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        return imported(schedule)
    return SCHEDULES[choose("schedule", schedule, SCHEDULES)]


def whole(name: str, value: object, *, at_least: int) -> int:
    """A whole number, given as one or as its digits."""
    huge = isinstance(value, int) and abs(value) >= 10**18
    text = "9" * 19 if huge else str(value)
    digits = text.isascii() and text.removeprefix("-").isdigit()
    if isinstance(value, bool) or not isinstance(value, (int, str, np.integer)) or not digits:
        raise RequestError(name, f"{name}={text[:40]} must be a whole number of at least {at_least}")
    if len(text) > 18:
        raise RequestError(name, f"{name}={text[:18]}... is astronomically large; use a smaller one")
    if int(text) < at_least:
        raise RequestError(name, f"{name}={text} must be at least {at_least}")
    return int(text)


def refuse_untaken(schedule: Schedule, *, slot_order: str | None = None, **asked: bool) -> None:
    """Refuse an option that the schedule does not take, rather than let it do nothing."""
    if slot_order is not None:
        choose("slot-order", slot_order, SLOT_ORDERS)
    for name, is_asked in (asked | {"slot_order": slot_order is not None}).items():
        option = name.replace("_", "-")
        if is_asked and option not in schedule.options:
            takes = ", ".join(schedule.options) or "none of its kind"
            raise RequestError(option, f"{schedule.name} does not take this option (it takes {takes}); leave it out")


def _find_model(model: str | Path | Model, n: int | None, training: Mapping[str, object]) -> Model:
    """A model by name or file, in n stages where n is given, and trained as asked, or as it says itself."""
    asked = {name: value for name, value in training.items() if value is not None}
    if isinstance(model, str) and model in UNIT_MODELS:
        unit = Model.unit(whole("n", n, at_least=1), split=model != "unit")
        return apply(unit, Recipe(**asked))  # type: ignore[arg-type]
    found = presets.find_model(model)
    recipe = msgspec.structs.replace(found.training, **asked)
    return apply(found, recipe, None if n is None else whole("n", n, at_least=1))


def _find_cluster(cluster: str | Path | Cluster) -> Cluster:
    return Cluster.unit() if isinstance(cluster, str) and cluster == "unit" else presets.find_cluster(cluster)
