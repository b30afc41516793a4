"""The options of the data axis: how many ranks share what, and when they exchange it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cdpsim.errors import RequestError, choose, in_known_case, short_repr, whole_number
from cdpsim.model import PRECISIONS, Model
from cdpsim.model.stage import Stage
from cdpsim.request.options import OPTIONS, RESHARD
from cdpsim.request.sharing import accepts, is_given
from cdpsim.schedules import SCHEDULES, ZERO_NAMES, Schedule
from cdpsim.schedules.buckets import RUNTIMES_WITH_BUCKETS, Buckets, Compression, bucket_sizes, find_compression
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.state import MOST_SPLIT, REPLICATED, ZERO, Placed, State, When, read_zero

SHARING = tuple(name for name, option in OPTIONS.items() if option.in_state)


def read_ranks(schedule: Schedule, replicas: int, options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the stage of ZeRO, the number of replicas, and how many of these in a row share what is split.

    Where nothing is split, ranks that would share have copies.
    """
    zero, shard = read_zero(options.get("zero")), options.get("shard")
    if not schedule.order.waits:
        split = ZERO.index(schedule.state.placements)
        return split, replicas, replicas if split else 1
    if shard is not None:
        shard = whole_number("shard", shard, at_least=1)
    if zero is None:
        zero = 0 if shard is None else MOST_SPLIT
    if zero and shard is None:
        shard, replicas = replicas, 1
    shard = shard or 1
    if zero > 1 and not schedule.order.together and accepts(schedule, "zero"):
        flushing = [name for name, each in SCHEDULES.items() if accepts(each, "shard") and each.order.together]
        option = "zero" if options.get("zero") is not None else "shard"
        which = f"zero={zero}" if option == "zero" else f"shard={shard} is --zero {zero}, which"
        problem = f"{which} splits gradients or parameters, and {schedule.name} does not flush"
        raise RequestError(option, f"{problem}; take --zero 1, or a schedule that does: {', '.join(flushing)}")
    return zero, replicas * shard, shard if zero else 1


def read_sharing(schedule: Schedule, shape: Shape, model: Model | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stage of ZeRO, the state policy, and how far ahead of their readers messages come."""
    zero, _, _ = read_ranks(schedule, 1, options)
    if zero != MOST_SPLIT and model is not None and any(stage.host_parameters for stage in model.stages):
        problem = "leaves no parameters on devices between their uses, and only --zero 3 brings them for each"
        raise RequestError("offload", f"{problem}; give --zero 3, or --offload optimizer")
    state = _read_state(schedule, shape, zero, model, options)
    if options["compress"] is not None:
        state = replace(state, compress=_read_compression(schedule, shape, state, model, options["compress"]))
    split = schedule.order.waits and state.parameters is Placed.SPLIT
    usual = 1 if state.parameters is Placed.SPLIT else 0
    asked = options["prefetch"] if split or schedule.fetches else None  # nothing else has parameters on their way
    return {"zero": zero, "state": state, "prefetch": usual if asked is None else asked}


def _read_state(schedule: Schedule, shape: Shape, zero: int, model: Model | None, options: Mapping[str, Any]) -> State:
    """Return the state policy of a schedule with these options; a `model` of None is the slot model."""
    state, one_place = schedule.state, schedule.order.one_place
    in_slots = model is None or model.is_unit
    if not schedule.order.waits:  # one piece is not split, nor are those of one rank
        return replace(state, optimizer=Placed.COPIED) if in_slots or shape.replicas == 1 else state
    given = [name for name in SHARING if is_given(options[name])]
    # Replicas whose steps may differ have no order of messages in common.
    unlike = shape.widths or options["counts"]
    if unlike and options["reduce"] in ("end", "last"):
        given.remove("reduce")
    alike = not (in_slots or unlike)
    copied = accepts(schedule, "buckets") and state == REPLICATED and alike and schedule.has_copies(shape)
    asked = bool(zero or given) and (schedule.flushes or shape.replicas > 1)
    if not (asked or one_place or copied):
        return replace(state, reduce=When.LAST) if options["reduce"] in ("last", "each") else state
    _refuse_pieces(shape, options, given)
    if in_slots:
        _refuse_in_slots(shape, options)
    on_host = model is not None and any(stage.updated_on_host for stage in model.stages)
    fetched = model is not None and any(stage.host_parameters for stage in model.stages)
    # One rank's share is the whole, and stays with it, unless its host has it.
    parameters, gradients, optimizer = ZERO[zero if shape.shard > 1 or fetched else 0]
    together = schedule.order.together
    return State(
        parameters,
        gradients,
        optimizer,
        reduce=_read_reduce(schedule, shape, zero, options["reduce"]),
        streams=True,
        buckets=_read_buckets(schedule, shape, zero, model, options),
        one_step=together and not on_host,
        reshard=_read_reshard(zero, shape, one_place, options["reshard"]),
        gather=_read_gather(schedule, zero, options["gather"]),
        padding=_read_padding(shape, model, options["padding"]),
        clips=options["clip"] and not (one_place and (shape.shard == 1 or not zero)),  # where devices have shares
        updates_in_stream=options["update_in"] == "stream" and model is not None and model.updates_in_lanes,
    )


def _read_reduce(schedule: Schedule, shape: Shape, zero: int, given: object) -> When:
    when = When(usual_reduce(schedule, zero) if given is None else given)
    whole = ZERO[zero][1] is Placed.COPIED and ZERO[zero][2] is Placed.SPLIT
    if when is When.EACH and whole and shape.shard > 1:
        problem = f"each adds up shares, and --zero {zero} has whole gradients on all {shape.shard} ranks"
        raise RequestError("reduce", f"{problem}; give --zero {zero + 1}, or last or end")
    return when


def usual_reduce(schedule: Schedule, zero: int) -> str:
    """Return when gradients are summed by default: as torch and DeepSpeed do it without a pipeline, and with one."""
    if schedule.order.one_place:
        return "each" if ZERO[zero][1] is Placed.SPLIT else "last"
    return "last" if ZERO[zero][1] is Placed.SPLIT or not schedule.order.together else "end"


def _refuse_pieces(shape: Shape, options: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuse what is exchanged in parts where stages of several devices exchange it whole."""
    if shape.widths:
        named = [name for name in ("zero", "shard") if options.get(name)]
        option = (named or given)[0].replace("_", "-")
        problem = f"stages of several devices all-reduce their gradients in one piece, and --{option} asks for more"
        raise RequestError("stage-replicas", f"{problem}; leave either out")


def _refuse_in_slots(shape: Shape, options: Mapping[str, Any]) -> None:
    if shape.shard > 1:
        problem = f"a stage's parameters are one piece in slots, and cannot be split among {shape.shard} ranks"
        raise RequestError("shard", f"{problem}; give a --model (`cdpsim models` lists some)")
    if not (options["buckets"] is None or _has_none(options["buckets"])):
        raise RequestError("buckets", "have sizes in bytes, and slots have none; give a --model")


def _read_compression(
    schedule: Schedule, shape: Shape, state: State, model: Model | None, given: str
) -> Compression | None:
    """Return how gradients are compressed, where any are summed.

    Refuse numbers of single ranks where no rank needs those of all others, and factors where not all ranks sum them.
    """
    if model is None or model.is_unit:
        raise RequestError("compress", "changes bytes, and slots have none; give a --model")
    compression = find_compression(given, _element_bytes(model))
    if schedule.is_pipeline and not (shape.widths or schedule.has_copies(shape)):
        return None
    split, rounds, factors = state.optimizer is Placed.SPLIT, schedule.order.rounds is not None, compression.rank > 0
    groups = split and (shape.shard < shape.replicas or schedule.has_copies(replace(shape, replicas=1)))
    for applies, problem, remedy in (
        (state.optimizer is Placed.OWNED, f"{schedule.name} sums gradients at one device of each stage", ""),
        (rounds and (split or factors), f"each worker of {schedule.name} sums a share of all gradients", ""),
        (state.gradients is Placed.SPLIT, "each rank keeps a share of all gradients", ", or --zero 1"),
        (groups, "shares are summed across groups", ", or --zero 0"),
        (factors and not state.streams, "here one message sums each stage, in no stream", ", or dp"),
    ):
        if compression.leaves_some and applies:
            way = (
                "lets all ranks sum whole matrices' factors"
                if factors
                else "gives every rank the largest numbers of all others"
            )
            raise RequestError("compress", f"{given} {way}, and {problem}; give int8 or int4{remedy}")
    if factors:
        _refuse_without_shapes(model.stages, "compress")
        _refuse_without_shapes(model.without_ties(model.tied), "compress")
        if any(stage.numbers and stage.gradient_bytes % stage.numbers for stage in model.stages):
            problem = "sums factors of matrices, and gradients of some stage have parts of bytes a number"
            raise RequestError("compress", f"{problem}; correct its gradients or tensors, or give int8 or int4")
    return compression


def _read_buckets(
    schedule: Schedule, shape: Shape, zero: int, model: Model | None, options: Mapping[str, Any]
) -> Buckets | None:
    """Return the buckets of gradients: by default torch's where one device has all stages, and none in pipelines."""
    given = options["buckets"]
    if given is None:
        one_bucket_a_unit = zero == MOST_SPLIT or not schedule.order.one_place or model is None or model.is_unit
        given = "none" if one_bucket_a_unit else RUNTIMES_WITH_BUCKETS[0]
    if _has_none(given):
        return None
    assert model is not None
    sizes = bucket_sizes(given)
    buckets = Buckets(sizes) if sizes else Buckets.of_runtime(given, _element_bytes(model), shape.replicas)
    return None if zero == MOST_SPLIT else replace(buckets, whole_first_step=options["whole_first_step"])


def _has_none(buckets: object) -> bool:
    return isinstance(buckets, str) and buckets == "none"


def _element_bytes(model: Model) -> int:
    """Return the bytes of a gradient's number."""
    parameters, gradients = int(model.size("parameters").sum()), int(model.size("gradients").sum())
    width = PRECISIONS.get(model.precision, 4)
    return max(1, width * gradients // parameters) if parameters else width


def _read_reshard(zero: int, shape: Shape, one_place: bool, given: object) -> str | int:
    """Return how long gathered parameters stay: in pipelines for a step, as torch's runtimes have it.

    There, micro-batches on their way use the same parameters. So what stays after a forward stays for the step.
    """
    usual = "yes" if one_place else "step"
    word = usual if given is None else given if isinstance(given, str) else short_repr(given)
    if word not in RESHARD and not word.lstrip("-").isdigit():
        choose("reshard", given, (*RESHARD, "a number of ranks"))
    ranks = 0 if word in RESHARD else whole_number("reshard", given, at_least=2)
    if zero != MOST_SPLIT:
        return usual
    if word == "root" and not one_place:
        problem = "root keeps parameters for one micro-batch at a time, and a pipeline has several on their way"
        raise RequestError("reshard", f"{problem}; give yes or step")
    if not ranks:
        return "step" if word == "no" and not one_place else word
    if shape.shard % ranks or ranks == shape.shard:
        problem = f"to {ranks} ranks, which is no part of the {shape.shard} that share parameters"
        raise RequestError("reshard", f"{problem}; give a smaller divisor of {shape.shard}, or {', '.join(RESHARD)}")
    return ranks


def _read_gather(schedule: Schedule, zero: int, given: str | None) -> str:
    """Return when new parameters are gathered: early where steps have no end at which a device makes all updates."""
    if given is None or ZERO[zero][2] is not Placed.SPLIT or ZERO[zero][0] is Placed.SPLIT:
        return "units" if schedule.order.together else "early"
    return given


def _read_padding(shape: Shape, model: Model | None, given: str | None) -> str | None:
    if given is None or shape.shard == 1 or model is None:
        return None
    _refuse_without_shapes(model.stages, "padding")
    return given


def _refuse_without_shapes(stages: Sequence[Stage], option: str) -> None:
    for j, stage in enumerate(stages):
        if stage.parameters and not stage.tensors:
            problem = f"depends on the shapes of parameters, and stage {j} does not have any (`tensors`)"
            raise RequestError(option, f"{problem}; profile the model, or leave it out")


def goes_by_layer(zero: int, buckets: object) -> bool:
    """Return whether messages are of layers, if it is not said: where all is split, and with buckets."""
    return zero == MOST_SPLIT or not (buckets is None or _has_none(buckets))


def stage_layers(model: Model, n: int) -> tuple[int, ...]:
    """Return the first layer of each of n stages of a model of layers; () where each stage has one."""
    return () if n == model.n else (0, *model.cuts(n))


def check_layers(given: object, model: Model, n: int) -> tuple[int, ...]:
    """Return the first layer of each stage as given; refuse what is no list of n ascending layers of the model."""
    layers = [whole_number("by-layer", layer, at_least=0) for layer in given] if isinstance(given, Sequence) else []
    if len(layers) != n or layers[:1] != [0] or layers != sorted({*layers}) or layers[-1] >= model.n:
        problem = f"{short_repr(given)} does not say with which of {model.n} layers each of {n} stages begins"
        raise RequestError("by-layer", f"{problem}; give {n} ascending numbers from 0 on")
    return tuple(layers)


def named_zero(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule and the stage of ZeRO for which a name stands; nothing for other names."""
    name = in_known_case(options["schedule"], ZERO_NAMES)
    if not isinstance(name, str) or name not in ZERO_NAMES:
        return {}
    schedule, zero = ZERO_NAMES[name]
    if options.get("zero") not in (None, zero, str(zero)):
        problem = f"{name} is {schedule} --zero {zero}, and --zero asks for {options['zero']}"
        raise RequestError("zero", f"{problem}; leave either out")
    return {"schedule": schedule, "zero": zero}
