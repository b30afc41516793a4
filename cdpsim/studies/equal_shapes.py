"""The stages, micro-batches and replicas with which schedules run on equal devices and train on equal batches."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cdpsim.errors import RequestError, whole_number
from cdpsim.files.units import counted, in_number
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.model.layers import CONTEXT, TENSOR
from cdpsim.request import Request
from cdpsim.request.reading import given_model, read_stage_replicas
from cdpsim.request.sharing import accepts, taken_options
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import Shape


def equal_shape(
    schedule: Schedule, options: Mapping[str, Any], devices: int | None, batch: int | None
) -> dict[str, int]:
    """Return n, m and replicas of a schedule for a number of devices and of samples in a training step, where given.

    A pipeline without n has a stage for each of its chunks on all devices, or on those of a data rank where several
    share states; with n, or with devices for each stage, it has the replicas for which there are devices. Data
    parallelism has a data rank on each device. Of other schedules, n and m decide on the devices. A schedule that
    cannot run on these devices is refused, and so is a batch that its micro-batches do not divide. A schedule that
    takes no m keeps its own, and so does a cyclic one whose workers cannot share that m. With --tensor T and
    --context C, `devices` are the ranks, of which T x C are one device of the schedule.
    """
    if devices is not None:
        devices = teams_among(options, devices)
    if devices is None:
        shape = {}
    elif accepts(schedule, "replicas"):
        shape = _pipelines(schedule, options, devices)
    else:
        shape = _grid(schedule, options, devices)
    if options.get("m") is not None and shape.get("m") not in (None, whole_number("m", options["m"], at_least=1)):
        raise RequestError("m", f"{schedule.name} has m={shape['m']} on {devices} devices; leave it out")
    accumulates = schedule.order.accumulates
    if batch is not None and accepts(schedule, "m") and (accumulates or "m" not in shape):
        replicas = whole_number("replicas", shape.get("replicas", options.get("replicas", 1)), at_least=1)
        m = _micro_batches(options, batch, replicas * _shard(schedule, options))
        if not accumulates or _can_share(schedule, shape.get("n", options.get("n")), options, m):
            shape["m"] = m
    return shape


def _can_share(schedule: Schedule, n: object, options: Mapping[str, Any], m: int) -> bool:
    """Return whether the n workers of a cyclic schedule can take m micro-batches in turns."""
    model = _model_of(options)
    if n is None and model is None:
        return True  # a request without n is refused for that
    n = model.n if n is None and model else whole_number("n", n, at_least=1)
    return is_served(schedule.workers, n, m)


def is_served(ask: Callable[..., object], *given: Any, **named: Any) -> bool:
    """Return whether a function answers, and refuses nothing of what it is given."""
    try:
        ask(*given, **named)
    except RequestError:
        return False
    return True


def samples_of(options: Mapping[str, Any]) -> int:
    """Return the samples of a micro-batch of a request's model; 1 where it does not say."""
    model, given = _model_of(options), options.get("micro_batch")
    if model is None or given is None:
        return 1 if model is None else model.samples or 1
    return whole_number("micro-batch", given, at_least=1)


def ranks_of(options: Mapping[str, Any], axis: str) -> int:
    """Return how many ranks an axis of a request's mesh has."""
    return whole_number(axis, options.get(axis) or 1, at_least=1)


def team_of(options: Mapping[str, Any]) -> int:
    """Return how many ranks share each task of a request."""
    return ranks_of(options, TENSOR) * ranks_of(options, CONTEXT)


def teams_among(options: Mapping[str, Any], ranks: int) -> int:
    """Return how many devices of a schedule so many ranks are; refuse ranks that are left over."""
    teams, rest = divmod(ranks, group := team_of(options))
    if rest:
        subject = TENSOR if ranks_of(options, CONTEXT) == 1 else CONTEXT
        raise RequestError(subject, f"{group} do not divide {ranks} devices into groups; give a divisor of them")
    return teams


def _micro_batches(options: Mapping[str, Any], batch: int, replicas: int) -> int:
    """Return how many micro-batches of each replica are a batch."""
    samples = samples_of(options)
    m, rest = divmod(batch, samples * replicas)
    if rest or not m:
        each = f"{replicas} data ranks of micro-batches" if replicas > 1 else "micro-batches"
        many = counted(samples, "sample")
        given = f"{batch} {in_number(batch, 'sample')} {'is' if batch == 1 else 'are'}"
        raise RequestError("batch", f"{given} not divided by {each} of {many}; give a multiple")
    return m


def _shard(schedule: Schedule, options: Mapping[str, Any]) -> int:
    """Return how many data ranks of a schedule share states, beside its replicas."""
    return whole_number("shard", options.get("shard") or 1, at_least=1) if accepts(schedule, "shard") else 1


def _pipelines(schedule: Schedule, options: Mapping[str, Any], devices: int) -> dict[str, int]:
    """Return n of one pipeline over all devices, or how many pipelines of the given n they are enough for."""
    shard = _shard(schedule, options)
    if devices % shard:
        raise RequestError("devices", f"{devices} are no multiple of shard={shard}; give a multiple")
    devices //= shard
    if schedule.order.one_place:
        in_slots = options.get("n") is None and _model_of(options) is None
        return ({"n": devices * shard} if in_slots else {}) | {"replicas": devices}
    chunks = schedule.order.chunks
    if options.get("chunks") is not None and schedule.order.any_chunks:
        chunks = whole_number("chunks", options["chunks"], at_least=1)
    if schedule.shape is not None:
        n, places = schedule.shape.n, schedule.actions(schedule.shape).devices
    elif accepts(schedule, "stage_replicas") and options.get("stage_replicas") is not None:
        widths = read_stage_replicas(options["stage_replicas"], options.get("n"))
        n, places = len(widths), sum(widths)
    elif options.get("n") is None:
        return {"n": devices * chunks, "replicas": 1}
    else:
        n = whole_number("n", options["n"], at_least=1)
        places = max(n // chunks, 1)
    replicas, rest = divmod(devices, places)
    if rest or not replicas:
        problem = f"{devices} are no multiple of the {places} of a pipeline of {schedule.name} with n={n}"
        raise RequestError("devices", f"{problem}; give a multiple, or another n")
    return {"n": n, "replicas": replicas}


def _grid(schedule: Schedule, options: Mapping[str, Any], devices: int) -> dict[str, int]:
    """Return n and m of a schedule whose micro-batches and stages decide on its devices."""
    most, size_of = _grid_sizes(schedule, options, devices)

    def count_of(m: int) -> int:
        shape = Shape(*size_of(m))
        if schedule.placement.exclusive:
            asked = {name: value for name, value in options.items() if name != "m"}
            asked |= {"schedule": schedule, "n": shape.n}
            shape = replace(shape, widths=Request.from_builtins(taken_options(schedule, asked)).widths)
        return schedule.placement.devices(shape)

    enough = 1
    while enough < most and count_of(enough) < devices:
        enough = min(2 * enough, most)
    # More micro-batches: no fewer devices.
    least = bisect_left(range(enough + 1), devices, lo=1, hi=enough, key=count_of)
    sizes = {size_of(m): count_of(m) for m in (least - 1, least) if m}
    for (n, m), count in sizes.items():
        if count == devices:
            return {"n": n, "m": m}
    shapes = {count: f"{count} with n={n}, m={m}" for (n, m), count in sizes.items()}  # the last of equally many
    near = " and on ".join(shapes.values())
    raise RequestError("devices", f"{schedule.name} runs on {near}, and not on {devices}; give such a number, or an n")


def _grid_sizes(
    schedule: Schedule, options: Mapping[str, Any], devices: int
) -> tuple[int, Callable[[int], tuple[int, int]]]:
    """Return the number of sizes to try, and n and m of the k-th of them, from 1, fewer devices first.

    Where any m is taken, n is not more than the model has.
    """
    any_m = accepts(schedule, "m") and not schedule.order.accumulates
    model = _model_of(options)
    if options.get("n") is not None:
        n = whole_number("n", options["n"], at_least=1)
        return (devices, lambda m: (n, m)) if any_m else (1, lambda _: (n, n))
    most = model.n if any_m and model is not None else devices
    return devices, lambda m: (min(m, most), m)


def in_slots(options: Mapping[str, Any]) -> bool:
    """Return whether the options of a request name a model of slots."""
    model = options.get("model", UNIT_MODELS[0])
    return isinstance(model, str) and model in UNIT_MODELS


def _model_of(options: Mapping[str, Any]) -> Model | None:
    """Return the model of a request's options; None for the slot model."""
    return None if in_slots(options) else given_model(options["model"], None)
