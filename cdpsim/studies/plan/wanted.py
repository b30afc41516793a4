"""The limits of a plan, read from its options: which candidates there are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, short_repr, true_or_false, whole_number
from cdpsim.files.units import size_bytes
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.presets import find_model
from cdpsim.request.options import DEFAULTS, OPTIONS, TRAINING, read_value
from cdpsim.request.reading import read_cluster, read_model
from cdpsim.schedules import SCHEDULES, Schedule, find_schedule
from cdpsim.studies.comparison import listed_values
from cdpsim.studies.plan.parts import Variant

OneModel: TypeAlias = str | Path | Model
# Searched where they are not given; a value, or a list of them, restricts what is searched.
SIZE_AXES = ("n", "m", "chunks", "replicas", "shard", "zero", "rule")
RECOMPUTATIONS = ("none", "layer")  # searched where the model can
# Options of a single run: of what a plan finds, they can be asked by `compare`.
RUN_ALONE = tuple(name for name, option in OPTIONS.items() if option.of_one_run)
# Each of these is searched where it is given as a list.
LISTED_AXES = tuple(name for name in DEFAULTS if name not in (*SIZE_AXES, *RUN_ALONE, "model", "cluster"))
PLAN_OPTIONS = (*SIZE_AXES, *LISTED_AXES)  # beside a plan's own


@dataclass(frozen=True)
class Wanted:
    """The limits of a search: which candidates there are.

    `axes` has the values of those of `SIZE_AXES` that are restricted, and `variants` all combinations of all other
    options. With `fewer` a run may have any number of devices that divides `devices`. `memory` is what a device may
    hold; None: what it has.
    """

    schedules: tuple[Schedule, ...]
    devices: int
    batch: int
    fewer: bool
    memory: int | None
    staleness: float | None
    axes: Mapping[str, tuple[Any, ...]]
    variants: tuple[Variant, ...]

    @property
    def in_slots(self) -> bool:
        """Whether the model is the one of slots."""
        return self.variants[0].slots_n is not None

    def allows(self, axis: str, value: object) -> bool:
        """Return whether an axis may have a value."""
        return axis not in self.axes or value in self.axes[axis]

    def split(self) -> "Wanted":
        """Return the same of the slot model whose backwards are split."""
        variants = (replace_model(variant, UNIT_MODELS[1]) for variant in self.variants)
        return replace(self, variants=tuple(variants))


def replace_model(variant: Variant, model: str) -> Variant:
    """Return a variant of another model."""
    return variant._replace(options={**variant.options, "model": model})


def read_wanted(
    model: OneModel | Sequence[OneModel],
    cluster: str | Path | Cluster,
    options: Mapping[str, Any],
    *,
    devices: object,
    batch: object,
    memory: object,
    schedules: str | Sequence[str | Schedule] | None,
    staleness: object,
    fewer: bool,
) -> Wanted:
    """Return the limits of a search from a plan's options, each of which is checked."""
    models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    if batch is None:
        raise RequestError("batch", "is missing; give the samples of a training step")
    count = _number_of_devices(devices, cluster)
    slots = {isinstance(one, str) and one in UNIT_MODELS for one in models}
    if len(slots) != 1:
        raise RequestError("model", "some are in slots, and some in seconds; give models of one kind")
    axes = _size_axes(options, count, slots=slots == {True})
    slots_n = axes["n"][0] if slots == {True} else None
    return Wanted(
        schedules=_listed_schedules(schedules),
        devices=count,
        batch=whole_number("batch", batch, at_least=1),
        fewer=true_or_false("fewer", fewer),
        memory=_device_limit(memory, slots=slots == {True}),
        staleness=read_amount("staleness", staleness),
        axes=axes,
        variants=tuple(_variants(models, cluster, options, slots_n)),
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
    found.require(count, "the plan")
    return count


def _device_limit(given: object, *, slots: bool) -> int | None:
    """Return the memory that a device may hold: stage-activations in the slot model, else bytes."""
    if given is None:
        return None
    if slots:
        return whole_number("memory", given, at_least=0)
    try:
        return size_bytes(given)
    except RequestError as error:
        raise RequestError("memory", str(error)) from None


def _listed_schedules(given: str | Sequence[str | Schedule] | None) -> tuple[Schedule, ...]:
    """Return the schedules of a list, or of names with commas between them; all that there are by default."""
    if given is None:
        return tuple(SCHEDULES.values())
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    found = tuple({schedule.name: schedule for schedule in map(find_schedule, names)}.values())
    if not found:
        raise RequestError("schedules", "is an empty list; name some, or leave it out")
    return found


def _size_axes(options: Mapping[str, Any], devices: int, *, slots: bool) -> dict[str, tuple[Any, ...]]:
    """Return the values of the axes of sizes that are restricted; in slots n has one value, by default the devices."""
    given = {name: listed_values(name, options[name]) for name in SIZE_AXES if options.get(name) is not None}
    axes: dict[str, tuple[Any, ...]] = {
        name: tuple(
            read_value(name, value) if name in OPTIONS else whole_number(name, value, at_least=1) for value in values
        )
        for name, values in given.items()
    }
    if "rule" in given:
        axes["rule"] = tuple(map(str, given["rule"]))
    if slots and len(axes.setdefault("n", (devices,))) > 1:
        problem = "each of n stages takes a slot, so that another n is another model; give one"
        raise RequestError("n", problem)
    return axes


def _variants(
    models: Sequence[OneModel], cluster: str | Path | Cluster, options: Mapping[str, Any], slots_n: int | None
) -> Iterator[Variant]:
    """Yield all combinations of models and of the values of options that are no sizes."""
    axes = {name: listed_values(name, options[name]) for name in LISTED_AXES if options.get(name) is not None}
    for name, listed in axes.items():
        for each in listed:
            read_value(name, each)
    if slots_n is None and "recompute" not in axes:
        axes["recompute"] = [how for how in RECOMPUTATIONS if _can_recompute(models, axes, how)]
    stages = {slots_n} if slots_n else {find_model(model).n for model in models if not isinstance(model, Model)}
    stages |= {model.n for model in models if isinstance(model, Model)}
    if len(stages) > 1:
        problem = f"have {' and '.join(map(str, sorted(stages)))} stages, and are not one network; plan for each"
        raise RequestError("model", problem)
    every = {"model": models, **axes}
    numbered = [[*enumerate(values)] for values in every.values()]
    for combination in product(*numbered):
        chosen = dict(zip(every, combination, strict=True))
        values = {name: value for name, (_, value) in chosen.items() if value is not DEFAULTS[name]}
        key = tuple((name, number) for name, (number, value) in chosen.items() if value is not DEFAULTS[name])
        if cluster != DEFAULTS["cluster"]:
            values, key = values | {"cluster": cluster}, (*key, ("cluster", 0))
        yield Variant(values, key, max(stages), slots_n)


def _can_recompute(models: Sequence[OneModel], axes: Mapping[str, Sequence[Any]], how: str) -> bool:
    """Return whether a model can be trained so."""
    if how == "none":
        return True
    training = {name: axes[name][0] if name in axes else None for name in TRAINING}
    try:
        read_model(models[0], None, training | {"recompute": how, "offload": None})
    except RequestError:
        return False
    return True
