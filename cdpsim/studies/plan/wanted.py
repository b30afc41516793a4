"""The limits of a plan, read from its options: which candidates there are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, short_repr, true_or_false, whole_number
from cdpsim.limits import BYTES_PER_TASK, bytes_allowed
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.model.layers import CONTEXT, EXPERT, TENSOR
from cdpsim.presets import find_model
from cdpsim.request.options import DEFAULTS, OPTIONS, TRAINING, LayerOptions, read_value
from cdpsim.request.reading import read_cluster, read_model
from cdpsim.request.sharing import accepts
from cdpsim.schedules import SCHEDULES, Schedule, find_schedule
from cdpsim.schedules.rule import find_rule
from cdpsim.studies.comparison import listed_values
from cdpsim.studies.equal_shapes import is_served

# The figure by which an objective sorts first.
OBJECTIVES = {"samples": "step", "memory": "memory", "devices": "devices", "staleness": "staleness"}
OneModel: TypeAlias = str | Path | Model
# Searched where they are not given; a value, or a list of them, restricts what is searched.
SIZE_AXES = ("n", "m", "chunks", "replicas", "shard", "zero", "rule")
RECOMPUTATIONS = ("none", "layer")  # searched where the model can
MESH_AXES = (TENSOR, CONTEXT, EXPERT)  # the first and the last are searched where the model is of layers
_OF_GROUPS = {
    TENSOR: ("sequence", "whole_boundaries", "split_checkpoints"),
    CONTEXT: ("attention_exchange",),
    EXPERT: ("imbalance", "node_limit"),
}
# Options of a single run: of what a plan finds, they can be asked by `compare`.
RUN_ALONE = tuple(name for name, option in OPTIONS.items() if option.of_one_run)
# Each of these is searched where it is given as a list.
LISTED_AXES = tuple(name for name in DEFAULTS if name not in (*SIZE_AXES, *RUN_ALONE, "model", "cluster"))
PLAN_OPTIONS = (*SIZE_AXES, *LISTED_AXES)  # beside a plan's own
_MOST_PLANNED = 10**6
_MOST_PASSES = 2**18  # of micro-batches through stages in a step: reading so many takes a part of a second
_BYTES_PER_CANDIDATE = 4000


class Variant(NamedTuple):
    """A combination of values of all options that are no sizes, and its number."""

    options: Mapping[str, Any]
    key: tuple[tuple[str, object], ...]  # each option with the number of its value
    stages: int  # of the model
    slots_n: int | None  # the stages that all candidates have in the slot model


@dataclass(frozen=True)
class Wanted:
    """The limits of a search: which candidates there are, and how long it may take.

    `axes` has the values of those of `SIZE_AXES` and `MESH_AXES` that are restricted, and `variants` all combinations
    of all options that are no sizes. With `fewer` a run may have any number of devices that divides `devices`. `memory`
    is what a device may hold; None: what it has. `max_memory` is what the plan may take of this machine. It has begun
    at `begun`.
    """

    schedules: tuple[Schedule, ...]
    devices: int
    batch: int
    fewer: bool
    memory: int | None
    staleness: float | None
    axes: Mapping[str, tuple[Any, ...]]
    variants: tuple[Variant, ...]
    objective: str
    top: int
    max_memory: int
    seconds: float | None
    begun: float

    def is_late(self, share: float = 1.0, least: float = 0.0) -> bool:
        """Return whether a share of the seconds is over, and at least so many."""
        return self.seconds is not None and monotonic() - self.begun >= max(share * self.seconds, least)

    @property
    def in_slots(self) -> bool:
        """Whether the model is the one of slots."""
        return self.variants[0].slots_n is not None

    @property
    def _of_other_models(self) -> set[str]:
        """The options of layers, or of experts, if the model has none."""
        model = self.variants[0].options.get("model", UNIT_MODELS[0])
        layers = None if self.in_slots else (model if isinstance(model, Model) else find_model(model)).layers
        of_experts = set() if layers and layers.experts else {EXPERT, *_OF_GROUPS[EXPERT]}
        return of_experts if layers else {*LayerOptions.__annotations__} | of_experts

    @property
    def most_passes(self) -> int:
        """The most micro-batches through stages that a step of a candidate may have."""
        return min(_MOST_PASSES, self.max_memory // (2 * BYTES_PER_TASK["auto"][1]))

    @property
    def most_candidates(self) -> int:
        """The most candidates that there may be."""
        return self.max_memory // _BYTES_PER_CANDIDATE

    def allows(self, axis: str, value: object) -> bool:
        """Return whether an axis may have a value."""
        return axis not in self.axes or value in self.axes[axis]

    def not_varied(self) -> list[str]:
        """Return the options that all candidates have alike, though their metrics may depend on them."""
        alike = {name for name, values in self.values().items() if len(values) == 1}
        varied = self.values().keys() - alike | {"ignore_memory", "engine"} | ({*TRAINING} if self.in_slots else set())
        varied |= self._of_other_models
        taken = [schedule for schedule in self.schedules if schedule.order.waits]
        names = (name for name in LISTED_AXES if name not in varied)
        return [name for name in names if any(accepts(schedule, name) for schedule in taken)]

    def values(self) -> dict[str, set[str]]:
        """Return the values of each option that any variant has."""
        names = {name for variant in self.variants for name in variant.options}
        return {name: {str(each.options.get(name)) for each in self.variants} for name in names}


def read_wanted(
    model: OneModel | Sequence[OneModel],
    cluster: str | Path | Cluster,
    limits: Mapping[str, Any],
    options: Mapping[str, Any],
    begun: float = 0.0,
) -> Wanted:
    """Return the limits of a search from a plan's own options and the others, each of which is checked."""
    models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    if limits["batch"] is None:
        raise RequestError("batch", "is missing; give the samples of a training step")
    count = _number_of_devices(limits["devices"], cluster)
    slots = {isinstance(one, str) and one in UNIT_MODELS for one in models}
    if len(slots) != 1:
        raise RequestError("model", "some are in slots, and some in seconds; give models of one kind")
    in_slots, memory = slots == {True}, limits["memory"]
    axes = _restricted_axes(options, count, slots=in_slots)
    if memory is not None:
        memory = whole_number("memory", memory, at_least=0) if in_slots else bytes_allowed(memory, "memory")
    return Wanted(
        schedules=_listed_schedules(limits["schedules"]),
        devices=count,
        batch=whole_number("batch", limits["batch"], at_least=1),
        fewer=true_or_false("fewer", limits["fewer"]),
        memory=memory,
        staleness=read_amount("staleness", limits["staleness"]),
        axes=axes,
        variants=tuple(_variants(models, cluster, count, {**options, **axes}, axes["n"][0] if in_slots else None)),
        objective=choose("objective", limits["objective"], [*OBJECTIVES]),
        top=whole_number("top", limits["top"], at_least=1),
        max_memory=bytes_allowed(limits["max_memory"]),
        seconds=read_amount("seconds", limits["seconds"]),
        begun=begun,
    )


def read_amount(name: str, given: object) -> float | None:
    """Return a number of at least 0 that is given, or whose digits are; None if there is none."""
    if given is None:
        return None
    try:
        amount = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else -1.0
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise RequestError(name, f"{short_repr(given, 40)} is no number from 0 on; give for example 1.5")
    return amount


def _number_of_devices(given: object, cluster: str | Path | Cluster) -> int:
    """Return the number of devices, by default that of the cluster; refuse more than it has."""
    found = read_cluster(cluster)
    if given is None and found.count is None:
        raise RequestError("devices", "is missing, and the cluster has as many as it takes; give their number")
    count = found.count if given is None else whole_number("devices", given, at_least=1)
    assert count is not None
    if count > _MOST_PLANNED:
        raise RequestError("devices", f"{count:,} are more than plans are made for; give at most {_MOST_PLANNED:,}")
    found.require(count, "the plan")
    return count


def _listed_schedules(given: str | Sequence[str | Schedule] | None) -> tuple[Schedule, ...]:
    """Return the schedules of a list, or of names with commas between them; all that there are by default."""
    if given is None:
        return tuple(SCHEDULES.values())
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    found = tuple({schedule.name: schedule for schedule in map(find_schedule, names)}.values())
    if not found:
        raise RequestError("schedules", "is an empty list; name some, or leave it out")
    return found


def _restricted_axes(options: Mapping[str, Any], devices: int, *, slots: bool) -> dict[str, tuple[Any, ...]]:
    """Return the values of the axes that are restricted; in slots n has one value, by default the devices."""

    def read(name: str, value: object) -> Any:
        if name == "rule":
            return find_rule(str(value)) and str(value)
        return read_value(name, value) if name in OPTIONS else whole_number(name, value, at_least=1)

    given = [name for name in (*SIZE_AXES, *MESH_AXES) if options.get(name) is not None]
    axes = {name: tuple(read(name, value) for value in listed_values(name, options[name])) for name in given}
    if slots and len(axes.setdefault("n", (devices,))) > 1:
        problem = "each of n stages takes a slot, so that another n is another model; give one"
        raise RequestError("n", problem)
    return axes


def _variants(
    models: Sequence[OneModel],
    cluster: str | Path | Cluster,
    devices: int,
    options: Mapping[str, Any],
    slots_n: int | None,
) -> Iterator[Variant]:
    """Yield all combinations of models and of the values of options that are no sizes."""
    axes = {name: listed_values(name, options[name]) for name in LISTED_AXES if options.get(name) is not None}
    for name, listed in axes.items():
        for each in listed:
            read_value(name, each)
    if slots_n is None and "recompute" not in axes:
        axes["recompute"] = [how for how in RECOMPUTATIONS if _can_recompute(models, axes, how)]
    found = [model if isinstance(model, Model) else find_model(model) for model in models if slots_n is None]
    meshes = _meshes(found, read_cluster(cluster), devices)
    axes |= {name: values for name, values in meshes.items() if name not in axes}
    stages = {slots_n} if slots_n else {model.n for model in found}
    if len(stages) > 1:
        problem = f"have {' and '.join(map(str, sorted(stages)))} stages, and are not one network; plan for each"
        raise RequestError("model", problem)
    every = {"model": models, **axes, "cluster": [cluster]}
    for combination in product(*(enumerate(values) for values in every.values())):
        chosen = {name: pair for name, pair in zip(every, combination, strict=True) if pair[1] is not DEFAULTS[name]}
        for axis, of_groups in _OF_GROUPS.items():  # which a single rank leaves out, where groups are searched, too
            if len(axes.get(axis, ())) > 1 and chosen.get(axis, (0, 1))[1] == 1:
                chosen = {name: pair for name, pair in chosen.items() if name not in of_groups}
        values = {name: value for name, (_, value) in chosen.items() if name != "cluster" or value != DEFAULTS[name]}
        yield Variant(values, tuple((name, chosen[name][0]) for name in values), max(stages), slots_n)


def _meshes(models: Sequence[Model], cluster: Cluster, devices: int) -> dict[str, list[int | None]]:
    """Return the ranks that are searched of each axis of a mesh, where models are of layers and do not say it.

    Those of tensors are divisors of a node, and those of experts of their number; None: they are not split.
    """
    if not models or any(model.layers is None or model.mesh.axes for model in models):
        return {}
    shape, node = models[0].layers, (cluster.topology and cluster.topology.per_node) or cluster.count or 1
    assert shape is not None, "models are of layers"
    tensor = [t for t in divisors(gcd(node, devices)) if not shape.undivided(t) and is_served(cluster.team, t)]
    found = {TENSOR: tensor, EXPERT: divisors(gcd(shape.experts or 1, devices))}
    return {name: [None, *ranks[1:]] for name, ranks in found.items() if len(ranks) > 1}


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _can_recompute(models: Sequence[OneModel], axes: Mapping[str, Sequence[Any]], how: str) -> bool:
    """Return whether a model can be trained so."""
    training = {name: axes[name][0] if name in axes else None for name in TRAINING}
    return how == "none" or is_served(read_model, models[0], None, training | {"recompute": how, "offload": None})
