"""The options of the data axis: how many ranks share what, and when they exchange it.

Options that a schedule does not take are refused for one run, and left out where several are compared.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from cdpsim.errors import RequestError, choose, in_known_case, short_repr, whole_number
from cdpsim.model import PRECISIONS, Model
from cdpsim.model.stage import Stage
from cdpsim.request.options import OPTIONS, RESHARD, DataOptions
from cdpsim.schedules import SCHEDULES, ZERO_NAMES, Schedule
from cdpsim.schedules.buckets import RUNTIMES_WITH_BUCKETS, Buckets, Compression, bucket_sizes, find_compression
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.state import MOST_SPLIT, REPLICATED, ZERO, Placed, State, When, read_zero

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
    """Return the options of a request that its schedule takes, and the options that it needs."""
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


SHARING = tuple(name for name, option in OPTIONS.items() if option.in_state)


def read_ranks(schedule: Schedule, replicas: int, options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the stage of ZeRO, the number of replicas, and the size of a sharding group.

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
    if not schedule.order.waits:  # one piece is not split, and one rank splits nothing
        return replace(state, optimizer=Placed.COPIED) if in_slots or shape.replicas == 1 else state
    given = [name for name in SHARING if is_given(options[name])]
    # Replicas whose steps may differ have no order of messages in common.
    unlike = shape.widths or options["counts"]
    if unlike and options["reduce"] in ("end", "last"):
        given.remove("reduce")
    alike = not (in_slots or unlike)
    copied = accepts(schedule, "buckets") and state == REPLICATED and alike and schedule.has_copies(shape)
    asked = bool(zero or given) and (schedule.flushes or shape.replicas * shape.copies > 1)
    if not (asked or one_place or copied):
        return replace(state, reduce=When.LAST) if options["reduce"] in ("last", "each") else state
    _refuse_pieces(shape, options, given)
    if in_slots:
        _refuse_in_slots(shape, options)
    on_host = model is not None and any(stage.updated_on_host for stage in model.stages)
    fetched = model is not None and any(stage.host_parameters for stage in model.stages)
    # One rank's share is the whole, and stays with it, unless its host has it.
    parameters, gradients, optimizer = ZERO[zero if shape.sharers > 1 or fetched else 0]
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
        clips=options["clip"] and not (one_place and (shape.sharers == 1 or not zero)),  # where devices have shares
        updates_in_stream=options["update_in"] == "stream" and model is not None and model.updates_in_lanes,
    )


def _read_reduce(schedule: Schedule, shape: Shape, zero: int, given: object) -> When:
    when = When(usual_reduce(schedule, zero) if given is None else given)
    whole = ZERO[zero][1] is Placed.COPIED and ZERO[zero][2] is Placed.SPLIT
    if when is When.EACH and whole and shape.sharers > 1:
        problem = f"each adds up shares, and --zero {zero} has whole gradients on all {shape.sharers} ranks"
        raise RequestError("reduce", f"{problem}; give --zero {zero + 1}, or last or end")
    return when


def usual_reduce(schedule: Schedule, zero: int) -> str:
    """Return when gradients are summed by default: as torch and DeepSpeed do it without a pipeline, and with one."""
    if schedule.order.one_place:
        return "each" if ZERO[zero][1] is Placed.SPLIT else "last"
    return "last" if ZERO[zero][1] is Placed.SPLIT or not schedule.order.together else "end"


def _refuse_pieces(shape: Shape, options: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuse options of exchanges in parts where stages of several devices exchange whole gradients."""
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
    buckets = (
        Buckets(sizes) if sizes else Buckets.of_runtime(given, _element_bytes(model), shape.replicas * shape.copies)
    )
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
    sharers = shape.sharers
    if sharers % ranks or ranks == sharers or ranks % shape.copies:
        problem = f"to {ranks} ranks, which is no part of the {sharers} that share parameters"
        fits = f"a smaller divisor of {sharers}" + f", of whole groups of {shape.copies}" * (shape.copies > 1)
        raise RequestError("reshard", f"{problem}; give {fits}, or {', '.join(RESHARD)}")
    return ranks


def _read_gather(schedule: Schedule, zero: int, given: str | None) -> str:
    """Return when new parameters are gathered: early where steps have no end at which a device makes all updates."""
    if given is None or ZERO[zero][2] is not Placed.SPLIT or ZERO[zero][0] is Placed.SPLIT:
        return "units" if schedule.order.together else "early"
    return given


def _read_padding(shape: Shape, model: Model | None, given: str | None) -> str | None:
    if given is None or shape.sharers == 1 or model is None:
        return None
    _refuse_without_shapes(model.stages, "padding")
    return given


def _refuse_without_shapes(stages: Sequence[Stage], option: str) -> None:
    for j, stage in enumerate(stages):
        if stage.parameters and not stage.tensors:
            problem = f"depends on the shapes of parameters, and stage {j} does not have any (`tensors`)"
            raise RequestError(option, f"{problem}; profile the model, or leave it out")


def goes_by_layer(zero: int, buckets: object) -> bool:
    """Default of --by-layer: on for ZeRO-3 and with buckets."""
    return zero == MOST_SPLIT or not (buckets is None or _has_none(buckets))


def stage_layers(model: Model, n: int) -> tuple[int, ...]:
    """Return the first layer of each of n stages of a model of layers; () where each stage has one."""
    return () if n == model.n else (0, *model.cuts(n))


def check_layers(given: object, model: Model, n: int) -> tuple[int, ...]:
    """Return the first layer of each stage as given; refuse all but n ascending layers of the model."""
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
