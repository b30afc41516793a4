"""Read the options of a request into its fields, and check them alone and together.

Experiment files: a request as TOML or JSON; its model and its cluster are names, other files, or written out.

    model = "gpt2"                  # a name, or a file beside this one; or [model] and [[model.stages]]
    cluster = "box.toml"

    [runtime]                       # what a runtime holds: the behaviours of `cdpsim simulate --runtime`
    like = "torch"

    [run]                           # any option of `cdpsim simulate` by its name
    schedule = "multi-cdp"
    n = 4
    link-jitter = "lognormal:0.1"

The request that a summary.json records is also an experiment, with the options of `[run]` at the top level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace as replace_table

from cdpsim import presets
from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import DISORDER_OPTIONS as DISORDER
from cdpsim.cluster.disorder import Disorder, disorder_of
from cdpsim.cluster.topology import UNLIMITED_LANES
from cdpsim.errors import RequestError, in_known_case, neighbours, short_repr, true_or_false, whole_number
from cdpsim.files import config
from cdpsim.limits import refuse_many_slots, refuse_too_large
from cdpsim.model import OPTIMIZERS, UNIT_MODELS, Model, Recipe
from cdpsim.model.layers import ALL_TO_ALL, CONTEXT, EXPERT, TENSOR, Layers
from cdpsim.model.recipe import UPDATE_FACTS, apply_recipe
from cdpsim.model.runtime import layer_habits
from cdpsim.model.splitting import Mesh
from cdpsim.program.assembly import check_counts, count_rounds
from cdpsim.request.options import (
    DATA_FIRST,
    FORWARD_FIRST,
    OPTION_NAMES,
    OPTIONS,
    PLACES_FIRST,
    TRAINING,
    CountRows,
    LayerOptions,
    Numbering,
    choose_option,
    read_value,
    with_new_names,
)
from cdpsim.request.sharing import (
    accepts,
    check_layers,
    goes_by_layer,
    named_zero,
    read_ranks,
    read_sharing,
    refuse_untaken,
    stage_layers,
    untaken_refusal,
)
from cdpsim.schedules import SCHEDULES, Schedule, find_schedule, schedule_from_lists
from cdpsim.schedules.order import read_outer
from cdpsim.schedules.placement import BY_MICRO_BATCH, BY_MICRO_BATCH_AND_STAGE, Shape, Widths, read_widths
from cdpsim.schedules.rule import CUSTOM, VERTICAL_SYNC, Rule
from cdpsim.timing.engine import find_engine

ENDINGS = (".toml", ".json")


def is_experiment(name: str) -> bool:
    """Return whether a name is that of an experiment file, by its ending, and not of a schedule."""
    return name.lower().endswith(ENDINGS)


def read_experiment(path: str | Path) -> dict[str, Any]:
    """Return the options of the request in an experiment file or a summary.json."""
    content = config.read_config(path)
    if isinstance(content, Mapping) and "makespan" in content and isinstance(content.get("request"), Mapping):
        content = with_new_names(content["request"])
    if not isinstance(content, Mapping):
        raise RequestError(str(path), f"{short_repr(content)} is no table; write [run] and the options of a run")
    if all(name in content for name, option in OPTIONS.items() if option.kept):  # which no record leaves out
        content = with_new_names(content)
    top, run = dict(content), {}
    if isinstance(top.get("run"), Mapping):  # in a record, `run` is the number of a random run
        run = top.pop("run")
    options: dict[str, Any] = {}
    for name, value in (*run.items(), *top.items()):
        option = name.replace("-", "_")
        try:
            choose_option(option, OPTION_NAMES)
        except RequestError as error:
            raise RequestError(str(path), str(error)) from None
        if option in options:
            raise RequestError(str(path), f"says {name} twice; say it once")
        if value is not None:
            may_be_file = option == "schedule" or (option in OPTIONS and OPTIONS[option].may_be_file)
            options[option] = _path_beside(Path(path), value) if may_be_file else value
    if "schedule" not in options:
        raise RequestError(str(path), 'names no schedule; write schedule = "multi-cdp", say, under [run]')
    return options


def _path_beside(path: Path, value: object) -> object:
    """Return the path of a file that an experiment names relative to its own folder; other values unchanged."""
    if isinstance(value, str) and value.lower().endswith((*ENDINGS, ".csv")):
        return str(path.parent / value)
    return value


LEAST_STEPS = 3  # of a request that gives no number
LOCAL_STEPS = 8  # of a round, where a request gives no number


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request from all of its options, among other values; refuse early where that is cheap.

    The slot model of very many stages is made only after the size of the run has been checked.
    """
    options = _check_each(given)
    schedule, (asked, options["model"]) = options["schedule"], shaped_model(options["model"], options)
    model, shape = _model_and_shape(schedule, options)
    in_slots = model is None or model.is_unit
    rule, steps = _rule_and_steps(schedule, shape, options, in_slots=in_slots)
    if model is None:
        refuse_many_slots(shape.n)
    model = model or read_model(options["model"], shape.n, options)
    cluster = read_cluster(options["cluster"])
    disorder = disorder_of(cluster.disorder, **{name: options[name] for name in DISORDER}, slots=in_slots)
    _refuse_misfits(schedule, model, cluster)
    _refuse_whole_tensors(schedule, shape, options)
    options["counts"] = _counts(schedule, options["counts"], shape, steps)
    sharing = read_sharing(schedule, shape, model, options)
    _refuse_experts(schedule, shape, model, sharing, cluster, asked if isinstance(asked, str) else _named(asked))
    if schedule.splits(shape):
        _refuse_too_large(schedule, shape, steps, options, in_slots=in_slots, parts=3)
        model = model.split(schedule.name)
    return (
        options
        | sharing
        | {
            "model": model,
            "runtime": options["runtime"] or model.runtime,
            **on_teams(cluster, disorder, model.mesh.team, grid_of(schedule, shape, options["ranks"], model.mesh)),
            "rule": rule,
            "shape": shape,
            "steps": steps,
            "slot_order": options["slot_order"] or FORWARD_FIRST,
            "given": {name: options[name] for name in OPTIONS}
            | {name: getattr(disorder, name) for name in DISORDER if options[name] and getattr(disorder, name)}
            | {"model": asked},
        }
    )


def _model_and_shape(schedule: Schedule, options: Mapping[str, Any]) -> tuple[Model | None, Shape]:
    """Return the model in stages, or None of the slot model, which is made later; and the shape of the schedule."""
    n = schedule.shape.n if options["n"] is None and schedule.shape is not None else options["n"]
    if cuts := options["cuts"]:
        n = len(cuts) if n is None else whole_number("n", n, at_least=1)
        if n != len(cuts):
            raise RequestError("cuts", f"are {len(cuts)} stages, for n={n}; give {n} numbers, or leave -n out")
    if isinstance(options["model"], str) and options["model"] in UNIT_MODELS:
        if n is None:
            raise RequestError("n", "is missing; give the number of stages, or a model file that says it")
        return None, shape_of(schedule, whole_number("n", n, at_least=1), options)
    layers = _layers_of_stages(schedule, n, options)
    model = read_model(options["model"], None if layers else n, options, places_of(schedule, layers))
    copies = 1 if schedule.order.local else model.mesh.context  # each step of its own is of all ranks of a group
    mixed = max(1, model.mesh.team // model.mesh.expert) if model.layers and model.layers.experts else 1
    shape = shape_of(schedule, len(layers) or model.n, options)
    shape = replace(shape, copies=copies, expert_copies=1 if schedule.order.local else mixed)
    return model, replace(shape, n=model.n, layers=layers) if layers else shape


def _check_each(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with each of them checked that needs no other, and the schedule found."""
    # A text of numpy's becomes one of Python's.
    options = {name: str(value) if isinstance(value, str) else value for name, value in given.items()}
    schedule = schedule_of(options)
    options |= named_zero(options) | {"schedule": schedule}
    options |= {name: read_value(name, options[name]) for name in OPTIONS}
    find_engine(options["engine"], options["contention"])
    if options["outer"] is not None and schedule.order.local and schedule.order.local.outer:
        local = replace(schedule.order.local, outer=read_outer(options["outer"]))
        options["schedule"] = replace(schedule, order=replace(schedule.order, local=local))
    return options


def schedule_of(options: Mapping[str, Any]) -> Schedule:
    """Return the schedule that the options of a request name, or write out."""
    if options.get("order") is not None:
        return find_schedule(schedule_from_lists(options["schedule"], options["order"]))
    return find_schedule({**options, **named_zero(options)}["schedule"])


def shape_of(schedule: Schedule, n: int, options: Mapping[str, Any]) -> Shape:
    """Return the shape of a schedule of n stages: by the options, and by the schedule where these are None."""
    if schedule.shape is not None and n != schedule.shape.n:
        raise RequestError("n", f"n={n}, but {schedule.name} has {schedule.shape.n} stages; leave it out")
    defaults = {"m": schedule.micro_batches(n), "chunks": schedule.order.chunks, "replicas": 1}
    given = {name: default if options[name] is None else options[name] for name, default in defaults.items()}
    m, chunks, replicas = (whole_number(name, value, at_least=1) for name, value in given.items())
    _, replicas, shard = read_ranks(schedule, replicas, options)
    widths = read_stage_replicas(options.get("stage_replicas"), n)
    local = schedule.order.local
    usual = local.usual_warm_up if local else 0  # without which it would be another schedule
    warm_up = _asked_number(options, "warm_up", usual, at_least=min(usual, 1))
    local_steps = _asked_number(options, "local_steps", LOCAL_STEPS if local else 0, at_least=1)
    return Shape(
        n, m, chunks, replicas, widths, schedule.workers(n, m), shard, warm_up=warm_up, local_steps=local_steps
    )


def _asked_number(options: Mapping[str, Any], name: str, usual: int, *, at_least: int) -> int:
    """Return the whole number that an option gives, or the usual one where it gives none."""
    asked = options.get(name)
    return usual if asked is None else whole_number(name.replace("_", "-"), asked, at_least=at_least)


def read_stage_replicas(given: object, n: object) -> Widths:
    """Return how many devices each of n stages has, in order; () where each has one because none are given."""
    if given is None:
        return ()
    widths = read_widths(given)
    if n is not None and len(widths) != whole_number("n", n, at_least=1):
        raise RequestError("stage-replicas", f"has {len(widths)} numbers for n={n} stages; give one for each")
    return () if {*widths} == {1} else widths


def _layers_of_stages(schedule: Schedule, n: object, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the first layer of each stage where stages are to be layers; () where they are not, or have one each."""
    given, (zero, _, _) = options["by_layer"], read_ranks(schedule, 1, options)
    wanted = given if given is not None else goes_by_layer(zero, options["buckets"])
    if (n is None and given is None) or not wanted or not accepts(schedule, "by_layer"):
        return ()
    found = given_model(options["model"], None)
    n = found.n if n is None else whole_number("n", n, at_least=1)
    return stage_layers(found, n) if given is True or given is None else check_layers(given, found, n)


def _rule_and_steps(
    schedule: Schedule, shape: Shape, options: Mapping[str, Any], *, in_slots: bool
) -> tuple[Rule, int]:
    """Return the rule and the number of steps; refuse a run that will not fit before anything takes long."""
    given = options["steps"]
    if given is None and isinstance(options["counts"], Sequence | np.ndarray):
        given = len(options["counts"])
        if schedule.order.rounds:
            given = max(1, (given - 1) // schedule.order.rounds.per_update)
    steps = least_steps(shape.warm_up) if given is None else whole_number("steps", given, at_least=1)
    _refuse_too_large(schedule, shape, steps, options, in_slots=in_slots)
    if options["rule"] == VERTICAL_SYNC != schedule.rule and not schedule.takes_vertical_sync:
        accepting = ", ".join(name for name, other in SCHEDULES.items() if other.takes_vertical_sync)
        raise RequestError("rule", f"{schedule.name} does not take {VERTICAL_SYNC.name}; {accepting} does")
    refuse_untaken(schedule, options, shape.parts)
    if not schedule.order.waits:
        return _rule_of_rounds(schedule, shape, steps, options["rule"]), steps
    rule = options["rule"] or schedule.rule_of(shape)
    if rule.name == CUSTOM and rule.record(shape) == schedule.rule.record(shape):  # a record of its own rule
        rule = schedule.rule
    if given is None and (needed := rule.fill(shape) + 2) > LEAST_STEPS:
        steps = needed
        _refuse_too_large(schedule, shape, steps, options, in_slots=in_slots)
    return rule, steps


def _rule_of_rounds(schedule: Schedule, shape: Shape, steps: int, given: object) -> Rule:
    """Return the rule of a schedule with rounds, which no option changes; refuse a run of nothing but warm-up."""
    if given is not None and given != schedule.rule:
        raise untaken_refusal(schedule, "rule")
    if schedule.order.rounds and shape.warm_up >= steps:
        problem = f"warm_up={shape.warm_up} leaves none of {steps} updates behind it"
        raise RequestError("warm-up", f"{problem}; give fewer steps of it, or more --steps")
    return schedule.rule


def least_steps(warm_up: object) -> int:
    """Return the number of steps of a request that gives none: two more than its warm-up has, or more."""
    return max(LEAST_STEPS, whole_number("warm-up", warm_up or 0, at_least=0) + 2)


def _refuse_too_large(
    schedule: Schedule, shape: Shape, steps: int, options: Mapping[str, Any], *, in_slots: bool, parts: int = 2
) -> None:
    """Refuse a run that will not fit; whether backwards are split is known only when an order is written out.

    Of rounds, whose tasks are not known, those of one update must fit, and the counts of all.
    """
    is_usual = options["m"] is None and not (schedule.m or schedule.usual_m)
    rounds, m = schedule.order.rounds, None if is_usual else shape.m
    refuse = partial(
        refuse_too_large,
        shape.n,
        m,
        engine=memory_engine(options["engine"], options["contention"]),
        max_memory=options["max_memory"],
        replicas=shape.replicas,
        parts=parts,
        slots=in_slots,
        steps_of=lambda updates: schedule.order.steps(updates, shape),
    )
    if rounds is None:
        refuse(steps)
        return
    try:
        refuse(1)
    except RequestError:
        refuse(steps)
    refuse(steps, tasks=2 * shape.replicas * rounds.steps(steps))


def memory_engine(engine: str, contention: str) -> str:
    """Return the engine whose need of memory is estimated: contention needs SimPy's."""
    return engine if contention == "none" else "simpy"


def _refuse_misfits(schedule: Schedule, model: Model, cluster: Cluster) -> None:
    if model.is_unit and cluster.is_measured:
        problem = "is of slots, which have no seconds and no bytes, and the cluster says something in them"
        raise RequestError("model", f"{problem}; name a model (`cdpsim models` lists some), or leave --cluster out")
    if model.moves_bytes:
        cluster.memory_bandwidths(1)
    lanes = max(group.lanes for group in cluster.devices)
    if not schedule.placement.lanes and 1 < lanes < UNLIMITED_LANES:
        problem = f"the cluster's devices have {lanes}, and {schedule.name} runs one task at a time on each"
        raise RequestError("lanes", f"{problem}; leave them out of its file")


def _refuse_whole_tensors(schedule: Schedule, shape: Shape, options: Mapping[str, Any]) -> None:
    """Refuse an optimizer that needs whole tensors, or their norm, where workers update shares between two messages."""
    if not schedule.order.rounds or shape.replicas == 1:
        return
    training = given_model(options["model"], shape.n).training
    if (options["update_time"] or training.update_time) == "clipped":
        problem = "the norm is a sum over all shares, and takes a message before each update"
        raise RequestError("update-time", f"{problem}, which {schedule.name} does not send; take memory")
    optimizer = options["optimizer"] or training.optimizer
    if optimizer and not UPDATE_FACTS[optimizer].is_elementwise:
        problem = f"{optimizer} needs sums over whole tensors, and each worker of {schedule.name} updates a share"
        raise RequestError("optimizer", f"{problem}; take one that goes weight by weight, such as adam")


def _counts(schedule: Schedule, given: object, shape: Shape, steps: int) -> CountRows | None:
    """Return how many micro-batches each replica has in each step; None where that is always m, or is to be found."""
    if given is None:
        return None
    if schedule.order.rounds:
        return tuple(map(tuple, count_rounds(given, schedule.order.rounds, shape, steps).tolist()))
    counts = check_counts(given, shape, steps)
    return None if (counts == shape.m).all() else tuple(map(tuple, counts.tolist()))


def places_of(schedule: Schedule, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers with which devices' parts begin, where several stages are one part; () where each is one."""
    return (0,) if schedule.order.one_place else layers


def read_model(
    model: str | Path | Model | Mapping[str, object],
    n: int | None,
    options: Mapping[str, object],
    places: tuple[int, ...] = (),
) -> Model:
    """Return a model by name, file or content, in n stages if given, trained by the options or its own recipe."""
    if n is not None:
        n = whole_number("n", n, at_least=1)
    found = given_model(model, n)
    return apply_recipe(found, read_recipe(found, options), n, places)


def shaped_model(
    given: str | Path | Model | Mapping[str, object], options: Mapping[str, Any]
) -> tuple[str | Model, str | Model]:
    """Return a model, read once where it has no name in the package; and as one rank of its mesh has it."""
    cuts, asked = tuple(options.get("cuts") or ()), next(filter(options.get, _OF_SHAPES), "").replace("_", "-")
    if isinstance(given, str) and given in UNIT_MODELS:
        if asked or cuts:
            raise RequestError(asked or "cuts", "needs a model of layers, and slots have none; give a --model")
        return given, given
    found = given_model(given, None)
    kept = given if isinstance(given, str) and given in presets.models() else found
    if found.layers is None:
        if asked:
            raise RequestError(asked, f"is of layers, and {_named(found)} has stages; give a --model of [layers]")
        return kept, replace_table(found, parts=cuts) if cuts else kept
    if not found.is_of_layers:
        problem = "is grouped or trained already, which a record of its layers does not say"
        raise RequestError("model", f"{problem}; give the model of its file, and options")
    mesh = read_mesh(options, found)
    if not (asked or cuts) and mesh == found.mesh:
        return kept, kept
    shape = found.layers if options.get("length") is None else replace_table(found.layers, length=options["length"])
    _refuse_uneven(shape, mesh, _named(found), options["cluster"])
    return kept, found.on(mesh, shape, options.get("micro_batch") or found.samples or 1, cuts)


def _named(model: Model) -> str:
    return model.name or "the model"


def _refuse_uneven(shape: Layers, mesh: Mesh, name: str, cluster: Any) -> None:
    """Refuse a number of ranks that does not divide what they split, with the nearest that do and fill nodes."""
    ranks = mesh.tensor
    if problem := shape.undivided(ranks):
        fits = [t for t in range(1, shape.heads + 1) if not shape.undivided(t) and read_cluster(cluster).has_room(t)]
        raise RequestError("tensor", f"{ranks} does not divide {problem} of {name}; {neighbours(ranks, fits)}")
    if mesh.sequence and shape.length % ranks:
        near = neighbours(shape.length, [max(1, shape.length // ranks) * ranks, (shape.length // ranks + 1) * ranks])
        problem = f"{ranks} ranks do not divide the {shape.length} tokens of a sample"
        raise RequestError("sequence", f"{problem}; of lengths, {near}")
    if mesh.context > 1:
        _refuse_uneven_context(shape, mesh, name)


def _refuse_uneven_context(shape: Layers, mesh: Mesh, name: str) -> None:
    """Refuse parts that do not divide a sequence, of which two of each rank balance a causal core, or heads."""
    context, ranks, length, by_heads = mesh.context, mesh.tensor, shape.length, mesh.attention_exchange == ALL_TO_ALL
    parts = context * (2 if shape.causal and not by_heads else 1) * (ranks if mesh.sequence else 1)
    if length % parts:
        near = neighbours(length, [max(1, length // parts) * parts, (length // parts + 1) * parts])
        problem = f"{parts} parts do not divide the {length} tokens of a sample"
        raise RequestError("context", f"{problem}; of lengths, {near}")
    heads, kv = shape.heads // ranks, max(1, shape.kv // ranks)
    if by_heads and (heads % context or kv % context):
        fits = [c for c in range(1, heads + 1) if not (heads % c or kv % c)]
        problem = f"the {shape.heads} heads and {shape.kv} key/value heads of {name}"
        raise RequestError("context", f"{context} x {ranks} ranks do not divide {problem}; {neighbours(context, fits)}")


def _refuse_experts(
    schedule: Schedule, shape: Shape, model: Model, sharing: Mapping[str, Any], cluster: Cluster, name: str
) -> None:
    """Refuse ranks that do not divide experts, or among which no data ranks have copies of them."""
    mesh, experts = model.mesh, model.layers.experts if model.layers else None
    if experts is None:
        if mesh.expert > 1:
            raise RequestError("expert", f"is of a mixture of experts, and {name} has none; leave it out")
        return
    ranks = mesh.team * (shape.shard if sharing["zero"] else shape.replicas)
    whole = [e for e in range(1, experts + 1) if experts % e == 0 and ranks % e == 0]
    fits = [e for e in whole if e % mesh.team == 0 or mesh.team % e == 0]
    if mesh.expert not in fits:
        problem = f"the {experts} experts of {name}" if experts % mesh.expert else f"the {ranks} ranks that could"
        problem += "" if experts % mesh.expert else f" share them, {mesh.team} of which do each task together"
        raise RequestError("expert", f"{mesh.expert} does not divide {problem}; {neighbours(mesh.expert, fits)}")
    if not cluster.has_room(mesh.expert):
        problem = f"groups of {mesh.expert} ranks do not fill the cluster's nodes evenly"
        raise RequestError("expert", f"{problem}; {neighbours(mesh.expert, [e for e in fits if cluster.has_room(e)])}")
    if mesh.tensor > 1 and not mesh.sequence:
        raise RequestError("sequence", "is missing: ranks of --tensor send experts tokens of their own; give it, too")
    sums = sharing["state"].streams and schedule.order.waits and not schedule.order.local
    if mesh.team * mesh.expert > 1 and mesh.expert != mesh.tensor and not sums:
        problem = f"has copies on other ranks than all else, and {schedule.name} sums all at one place"
        raise RequestError("expert", f"{problem}; take dp or a pipeline that flushes, or one rank for each task")


def grid_of(schedule: Schedule, shape: Shape, ranks: str | None, mesh: Mesh) -> tuple[int, int]:
    """Return the numbers of places and of data ranks, if the data ranks of a place are neighbours; else 1, 1."""
    if (ranks or usual_numbering(mesh)) == PLACES_FIRST:
        return 1, 1
    grid = places_and_data(schedule, shape)
    return grid if min(grid) > 1 else (1, 1)


def usual_numbering(mesh: Mesh) -> Numbering:
    """Return the order of ranks where none is given: data ranks first where others share a task or experts."""
    return DATA_FIRST if max(mesh.team, mesh.expert) > 1 else PLACES_FIRST


def places_and_data(schedule: Schedule, shape: Shape) -> tuple[int, int]:
    """Return the number of devices of a data rank, and that of data ranks, which may be workers of a schedule."""
    if schedule.placement == BY_MICRO_BATCH_AND_STAGE:
        return shape.n, shape.side_by_side
    if schedule.placement == BY_MICRO_BATCH:
        return 1, shape.side_by_side
    return schedule.devices(shape), shape.replicas


def on_teams(cluster: Cluster, disorder: Disorder, ranks: int, grid: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a request that say what its groups of ranks run on, and what disturbs these."""
    machine = cluster if cluster.disorder == disorder else replace_table(cluster, disorder=disorder)
    if (ranks, grid) == (1, (1, 1)):
        return {"cluster": undisturbed(cluster), "machine": machine, "disorder": disorder}
    disorder = disorder.of_teams(ranks).renumbered(*grid[::-1])
    return {"cluster": undisturbed(cluster).team(ranks).numbered(*grid), "machine": machine, "disorder": disorder}


def read_mesh(options: Mapping[str, Any], model: Model) -> Mesh:
    """Return the ranks that share each task; refuse shares of a group of one."""
    tensor, context, expert = (options.get(name) or getattr(model.mesh, name) for name in (TENSOR, CONTEXT, EXPERT))
    shares = {name: bool(options.get(name)) for name in ("sequence", "whole_boundaries", "split_checkpoints")}
    for name, asked in shares.items():
        if asked and tensor == 1:
            raise RequestError(name.replace("_", "-"), "is of the ranks of --tensor; give at least 2 of them")
    recompute = given if isinstance(given := options.get("recompute"), str) else model.training.recompute
    if shares["split_checkpoints"] and shares["sequence"]:
        raise RequestError("split-checkpoints", "is of what --sequence splits anyway; leave either out")
    if shares["split_checkpoints"] and recompute.partition(":")[0] in ("none", "selective", "reversible"):
        problem = f"is of what recomputed layers keep, and recompute is {recompute}"
        raise RequestError("split-checkpoints", f"{problem}; give --recompute layer")
    exchange = options.get("attention_exchange")
    if exchange and context == 1:
        raise RequestError("attention-exchange", "is of the ranks of --context; give at least 2 of them")
    habits: dict[str, Any] = layer_habits(options.get("runtime") or model.runtime) | shares
    ranks: dict[str, Any] = {
        "context": context,
        "attention_exchange": exchange or model.mesh.attention_exchange,
        "expert": expert,
    }
    return Mesh(tensor, **ranks, **_read_loads(options, model, expert), **habits)


def _read_loads(options: Mapping[str, Any], model: Model, expert: int) -> dict[str, Any]:
    """Return the load of the busiest rank of experts, and the share of rows that go from node to node."""
    load, limit, shape = options.get("imbalance"), options.get("node_limit"), model.layers
    for name, given in (("imbalance", load), ("node-limit", limit)):
        if given is not None and expert == 1:
            raise RequestError(name, "is of the ranks of --expert; give at least 2 of them")
    if load is not None and shape is not None and shape.capacity is not None:
        raise RequestError("imbalance", "is of rows that come, and a capacity makes those of all experts as many")
    crossing = Fraction(1) if limit is None or shape is None else Fraction(min(limit, shape.top_k), shape.top_k)
    return {"imbalance": load if isinstance(load, float) else 1.0, "between": crossing}


_OF_SHAPES = tuple(name for name in LayerOptions.__annotations__ if name != "cuts")  # which models of stages have not


def read_recipe(model: Model, options: Mapping[str, object]) -> Recipe:
    """Return how a model is trained: by the options or its own recipe."""
    given = {name: options[name] for name in TRAINING if options[name] is not None}
    if "optimizer" in given:
        given["optimizer"] = in_known_case(given["optimizer"], OPTIMIZERS)
    if "mixed_precision" in given:
        true_or_false("mixed_precision", given["mixed_precision"])
    return msgspec.structs.replace(model.training, **given)


def given_model(model: str | Path | Model | Mapping[str, object], n: int | None) -> Model:
    """Return a model by name, file or content, as it is; the slot model has n stages."""
    if isinstance(model, str) and model in UNIT_MODELS:
        return Model.unit(whole_number("n", n, at_least=1), split=model != "unit")
    return Model.from_builtins(model, "model") if isinstance(model, Mapping) else presets.find_model(model)


def read_cluster(cluster: str | Path | Cluster | Mapping[str, object]) -> Cluster:
    """Return a cluster by name, file or content."""
    if isinstance(cluster, Mapping) or (isinstance(cluster, str) and cluster == "unit"):
        return Cluster.from_builtins(cluster, "cluster")
    return presets.find_cluster(cluster).numbered(1, 1)


def undisturbed(cluster: Cluster) -> Cluster:
    """Return the cluster without what disturbs its runs."""
    return cluster if cluster.disorder == Disorder() else msgspec.structs.replace(cluster, disorder=Disorder())
