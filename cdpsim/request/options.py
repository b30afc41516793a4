"""The options of a request: names, types and defaults of `simulate`'s keywords and of the command line's options."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Slow, Stop
from cdpsim.errors import RequestError
from cdpsim.model import GradientType, Model, Offload, Optimizer, Recomputation, Runtime, UpdateTime
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import Rule

SlotOrder = Literal["forward-first", "backward-first"]
EngineName = Literal["auto", "fast", "simpy"]
Contention = Literal["none", "fair", "queue"]
Rendezvous = Literal["megatron", "torch"]
Reduce = Literal["end", "last", "each"]
Gather = Literal["units", "step", "early"]
Padding = Literal["rows", "megatron"]
UpdateIn = Literal["lane", "stream"]
CollectiveName = Literal[
    "recursive-doubling",
    "ring",
    "tree",
    "halving-doubling",
    "double-tree",
    "hierarchical",
    "hierarchical-rails",
    "best",
]
CountRows = tuple[tuple[int, ...], ...]  # micro-batches of each step and replica
FORWARD_FIRST, BACKWARD_FIRST = SLOT_ORDERS = get_args(SlotOrder)
RENDEZVOUS = get_args(Rendezvous)
MEGATRON = RENDEZVOUS[0]


class ScheduleOptions(TypedDict, total=False):
    """Options that change a schedule; `Schedule.options` names those that it accepts."""

    order: Sequence[Sequence[str]] | None
    rule: str | Rule | Sequence[Sequence[int]] | Mapping[str, Any] | None
    m: int | None
    counts: str | Path | Sequence[Sequence[int]] | None
    chunks: int | None
    stage_replicas: str | Sequence[int] | None
    vertical_sync: bool
    prefetch: int | None
    slot_order: SlotOrder | None
    warm_up: int | None
    local_steps: int | None
    outer: str | None


class DataOptions(TypedDict, total=False):
    """Options of the data axis: how many ranks run a schedule, what they split, and when they exchange it."""

    replicas: int
    shard: int | None
    zero: int | None
    buckets: str | None
    whole_first_step: bool
    reduce: Reduce | None
    reshard: str | int | None
    gather: Gather | None
    padding: Padding | None
    clip: bool
    update_in: UpdateIn | None
    by_layer: bool | Sequence[int] | None
    overlap_all_reduce: bool


class TrainingOptions(TypedDict, total=False):
    """Options of how a model is trained; None means as the model's file says."""

    optimizer: Optimizer | None
    mixed_precision: bool | None
    gradients: GradientType | None
    update_time: UpdateTime | None
    recompute: Recomputation | str | None
    offload: Offload | None


class PlatformOptions(TypedDict, total=False):
    """Options of what runs on which machine, and of how messages are sent there."""

    model: str | Path | Model | Mapping[str, Any]
    cluster: str | Path | Cluster | Mapping[str, Any]
    collective: CollectiveName | None
    expand_collectives: bool
    contention: Contention
    rendezvous: Rendezvous | None
    defer_receives: bool
    runtime: str | Runtime | Mapping[str, Any] | None
    ignore_memory: bool


class DisorderOptions(TypedDict, total=False):
    """Options of what disturbs a run, empty or None as the cluster says, and of which random run it is."""

    slow: Sequence[str | Slow] | Mapping[int, float] | None
    jitter: str | None
    link_jitter: str | None
    stop: Sequence[str | Stop] | Mapping[int, str | float] | None
    seed: int
    run: int


class SimulationOptions(TypedDict, total=False):
    """Options of how many steps are simulated, by which engine, in how much memory."""

    steps: int | None
    engine: EngineName
    max_memory: str | float | None


class Options(
    ScheduleOptions, DataOptions, TrainingOptions, PlatformOptions, DisorderOptions, SimulationOptions, total=False
):
    """All options of a request, beside its schedule and its number of stages."""


FLAGS = tuple(name for name, kind in Options.__annotations__.items() if kind is bool)
TRAINING = tuple(TrainingOptions.__annotations__)
_OTHER_THAN_NONE: dict[str, Any] = {
    **dict.fromkeys(FLAGS, False),
    **dict.fromkeys(("model", "cluster"), "unit"),
    **dict.fromkeys(("seed", "run"), 0),
    **dict.fromkeys(("slow", "stop"), ()),
    "replicas": 1,
    "engine": "auto",
    "contention": "none",
}
DEFAULTS = {name: _OTHER_THAN_NONE.get(name) for name in Options.__annotations__}
OPTION_NAMES = ("schedule", "n", *DEFAULTS)
SIGNATURE = Signature(
    [
        Parameter("schedule", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Schedule),
        Parameter("n", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=int | None),
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Options.__annotations__[name])
            for name, default in DEFAULTS.items()
        ),
    ]
)


class InapplicableOption(RequestError):
    """The refusal of an option that a schedule does not accept, or that would change nothing in its run."""


def flag_of(option: str) -> str:
    """Return how a command line gives an option of a request.

    >>> flag_of("link_jitter"), flag_of("m")
    ('--link-jitter', '-m')
    """
    return f"-{option}" if len(option) == 1 else f"--{option.replace('_', '-')}"
