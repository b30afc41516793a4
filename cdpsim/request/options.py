"""The options of a request: a row for each, from which all that knows options is derived.

A row is a field of the group that it belongs to: its name, its type, and an `Option`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from inspect import Parameter, Signature
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from cdpsim import presets
from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Slow, Stop, read_imbalance
from cdpsim.errors import RequestError, choose, in_known_case, true_or_false, whole_number
from cdpsim.files import config
from cdpsim.model import (
    OPTIMIZERS,
    UNIT_MODELS,
    GradientType,
    Model,
    Offload,
    Optimizer,
    Recomputation,
    Runtime,
    UpdateTime,
)
from cdpsim.model.runtime import RUNTIMES, read_runtime
from cdpsim.model.splitting import AttentionExchange
from cdpsim.schedules import Schedule
from cdpsim.schedules.buckets import BUCKETS, COMPRESSIONS, read_buckets, read_compression
from cdpsim.schedules.order import read_outer
from cdpsim.schedules.placement import read_widths
from cdpsim.schedules.rule import NAMED_RULES, VERTICAL_SYNC, Rule, find_rule
from cdpsim.schedules.state import ZERO, read_zero
from cdpsim.trace import load_counts

SlotOrder = Literal["forward-first", "backward-first"]
EngineName = Literal["auto", "fast", "simpy"]
Contention = Literal["none", "fair", "queue"]
Rendezvous = Literal["megatron", "torch"]
Reduce = Literal["end", "last", "each"]
Gather = Literal["units", "step", "early"]
Padding = Literal["rows", "megatron"]
Numbering = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
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
FORWARD_FIRST, BACKWARD_FIRST = get_args(SlotOrder)
DATA_FIRST: Numbering
PLACES_FIRST: Numbering
DATA_FIRST, PLACES_FIRST = get_args(Numbering)
RENDEZVOUS = get_args(Rendezvous)
MEGATRON = RENDEZVOUS[0]
RESHARD = ("yes", "no", "root", "step")  # beside a number of ranks


@dataclass(frozen=True)
class Option:
    """The row of an option: the word for its value in help (empty for a switch), its help, and its default.

    `usual` says the default in words where `help` does not. A schedule takes the option if it `applies`; the others
    accept their `own` value, by the number of stages. `known` are names beside files and numbers; a `Literal` type has
    them itself. A record has what `record` finds in a request, else the request's field of this name or the option as
    given; not the default unless it is `kept`.
    """

    value: str
    help: str
    _: KW_ONLY
    default: Any = None
    usual: str = ""
    brief: bool = False  # whether short help explains it
    typed: bool = True  # whether a command line can give it
    short: tuple[str, ...] = ()  # further flags of a command line
    elsewhere: tuple[str, ...] = ()  # names in other programs, for which errors name this option
    least: int | None = None  # of a whole number
    read: Callable[[Any], Any] | None = None  # returns a value as a request has it, or refuses it
    is_list: bool = False  # whether a single value of it is a list
    of_one_run: bool = False  # whether what a plan finds is asked for without it
    in_state: bool = False  # whether all that it does is in the state policy, so that it needs exchanges in streams
    applies: Callable[[Schedule], object] = lambda _: True
    own: Callable[[Schedule, int | None], object] = lambda *_: None
    known: Callable[[], Iterable[str]] = tuple
    record: Callable[[Any], object] | None = None  # of a request
    recorded: bool = True
    kept: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is off where it is not given."""
        return self.default is False

    @property
    def may_be_file(self) -> bool:
        """Whether its value may be the name of a file."""
        return "FILE" in self.value

    @property
    def default_words(self) -> str:
        """The default in words, where `help` does not have it."""
        return self.usual or (
            "" if isinstance(self.default, bool) else str(self.default) * isinstance(self.default, int)
        )


_switch = partial(Option, "", default=False)
_of_flushes = partial(Option, in_state=True, applies=attrgetter("flushes"))  # where steps end for all devices
_of_one_run = partial(Option, of_one_run=True)


class ScheduleOptions(TypedDict, total=False):
    """Options that change the schedule (`cdpsim schedules` says which one takes which)."""

    order: Annotated[
        Sequence[Sequence[str]] | None,
        _of_one_run(
            "LISTS",
            "a list of actions for each device, of a schedule with a name of its own",
            typed=False,
            is_list=True,
            read=lambda given: [list(map(str, row)) for row in given],
        ),
    ]
    rule: Annotated[
        str | Rule | Sequence[Sequence[int]] | Mapping[str, Any] | None,
        Option(
            "RULE|FILE",
            "the version of the parameters that tasks read: dp, cdp-v1, cdp-v2, with pipedream vertical-sync (in all "
            "stages the version that a micro-batch read in the first one), or a CSV file of 0 and 1 where 1 in row i, "
            "column j lets micro-batch i read the newest parameters of stage j",
            usual="the schedule's own",
            read=find_rule,
            applies=lambda s: s.order.waits,
            own=lambda s, _: s.rule.name,
            known=lambda: NAMED_RULES,
            record=lambda r: r.rule.record(r.shape),
            kept=True,
        ),
    ]
    m: Annotated[
        int | None,
        Option(
            "M",
            "micro-batches of a replica in a step, or block of rounds",
            usual="N, or 1",
            brief=True,
            least=1,
            applies=lambda s: s.takes_m,
            own=lambda s, n: s.m or s.usual_m or n,
            record=lambda r: r.shape.m,
            kept=True,
        ),
    ]
    counts: Annotated[
        str | Path | Sequence[Sequence[int]] | None,
        _of_one_run(
            "FILE",
            "the micro-batches of each replica in each round or step: the rounds.csv of an earlier run, which must "
            "fit the times of this one",
            usual="-m in a step; in rounds as the times decide",
            is_list=True,
            applies=lambda s: s.order.local is None,
            record=lambda r: r.counts and [list(row) for row in r.counts],
            read=lambda given: load_counts(given) if isinstance(given, str | Path) else given,
        ),
    ]
    chunks: Annotated[
        int | None,
        Option(
            "V",
            "stages per device, so N/V devices",
            usual="2 where the schedule takes any number, else what it is made for",
            least=1,
            applies=lambda s: s.order.any_chunks,
            own=lambda s, _: s.order.chunks,
            record=lambda r: r.shape.chunks if r.schedule.order.any_chunks or r.shape.chunks > 1 else None,
        ),
    ]
    stage_replicas: Annotated[
        str | Sequence[int] | None,
        _of_one_run(
            "R,R,...",
            "devices of each stage; micro-batch i of a stage of R devices is on the i mod R-th, and their gradients "
            "are summed at the end of a step",
            usual="1 of each",
            read=read_widths,
            is_list=True,
            applies=lambda s: s.order.lists is not None and s.order.lists.replicated is not None,
            record=lambda r: list(r.shape.widths) or None,
        ),
    ]
    prefetch: Annotated[
        int | None,
        Option(
            "K",
            "let parameters arrive up to K tasks before the task that reads them; with --zero 3 one task more before "
            "forwards (FSDP2 double-buffers)",
            usual="0, with --zero 3 1",
            least=0,
            own=lambda *_: 0,
            applies=lambda s: s.flushes or s.fetches,
            kept=True,
        ),
    ]
    slot_order: Annotated[
        SlotOrder | None,
        Option(
            "ORDER",
            "the order of a device's tasks in one slot: forward-first (default) or backward-first",
            applies=lambda s: s.placement.lanes and not s.order.together,
            own=lambda *_: FORWARD_FIRST,
            kept=True,
        ),
    ]
    warm_up: Annotated[
        int | None,
        Option(
            "W",
            "first steps in which workers wait for each update: of dpu (default 0) and of post-local-sgd (default 1)",
            least=0,
            applies=lambda s: s.warms_up,
            own=lambda *_: 0,
            record=lambda r: r.shape.warm_up or None,
        ),
    ]
    local_steps: Annotated[
        int | None,
        Option(
            "H",
            "steps that each worker takes alone between two averages of all parameters",
            usual="8",
            least=1,
            applies=lambda s: s.order.local is not None,
            record=lambda r: r.shape.local_steps or None,
        ),
    ]
    outer: Annotated[
        str | None,
        Option(
            "OUTER",
            "the outer optimizer of slowmo, diloco and co2: sgd:RATE:MOMENTUM or nesterov:RATE:MOMENTUM",
            usual="slowmo and co2 sgd:1:0.5, diloco nesterov:0.7:0.9",
            applies=lambda s: bool(s.order.local and s.order.local.outer),
            read=lambda given: str(read_outer(given)),
        ),
    ]


class DataOptions(TypedDict, total=False):
    """The data axis: ranks that run the same schedule on other data."""

    replicas: Annotated[
        int,
        Option(
            "R",
            "data ranks, or with --shard groups of them; each runs the whole schedule on M micro-batches of its own",
            default=1,
            least=1,
            own=lambda *_: 1,
            applies=lambda s: s.is_pipeline,
            record=lambda r: r.shape.replicas // (r.shape.shard if r.schedule.order.waits else 1),
        ),
    ]
    shard: Annotated[
        int | None,
        Option(
            "S",
            "split states over groups of S data ranks as --zero says (--zero 3 if it is not given), R*S ranks in all; "
            "gradients are summed within a group, then across the R groups",
            usual="R, with --zero",
            least=1,
            own=lambda *_: 1,
            applies=lambda s: s.splits_states,
            record=lambda r: r.shape.shard if r.zero and r.schedule.order.waits else None,
        ),
    ]
    zero: Annotated[
        int | None,
        Option(
            "Z",
            "the states that data ranks split: 0 none, 1 the optimizer's, 2 gradients too, 3 parameters too (FSDP)",
            usual="0, or 3 with --shard",
            read=read_zero,
            own=lambda *_: 0,
            known=lambda: tuple(map(str, range(len(ZERO)))),
            applies=lambda s: s.splits_states,
            record=lambda r: r.zero or None if r.schedule.order.waits else None,
        ),
    ]
    ranks: Annotated[
        Numbering | None,
        Option(
            "ORDER",
            "which ranks of the cluster are neighbours: tp-cp-dp-pp (the data ranks of each device of the schedule; "
            "Megatron-LM's and torchtitan's) or tp-cp-pp-dp (the devices of each data rank), by the fastest digit",
            usual="tp-cp-dp-pp where ranks share tasks or experts, else tp-cp-pp-dp",
        ),
    ]
    buckets: Annotated[
        str | None,
        _of_flushes(
            "SIZES",
            "the size of gradient buckets: none (one message a stage), torch, megatron, deepspeed, or the least size "
            "of the first bucket and of the others: 1MiB,25MiB (in a list 1MiB:25MiB)",
            usual="torch for dp, none for pipelines",
            read=read_buckets,
            known=lambda: BUCKETS,
        ),
    ]
    whole_first_step: Annotated[
        bool,
        _of_flushes(
            "",
            "send all gradients of the first step in one bucket, as torch does before it knows their order",
            default=False,
        ),
    ]
    reduce: Annotated[
        Reduce | None,
        Option(
            "WHEN",
            "when gradients are summed over data ranks: end (of a device's training step), last (as soon as the last "
            "micro-batch has them) or each (after every micro-batch)",
            usual="dp: last, and each from --zero 2 on; others: end, and last from --zero 2 on",
            in_state=True,
            applies=lambda s: s.flushes or s.sums_at_ends,
        ),
    ]
    reshard: Annotated[
        str | int | None,
        _of_flushes(
            "HOW",
            "with --zero 3, when gathered parameters are freed: yes (after each use), no (after each micro-batch's "
            "backward), root (no for the first and the last stage, yes for others), step (after their last use in a "
            "step), or a number K (yes, but each rank keeps 1/K of them from forward to backward); in pipelines no "
            "means step",
            usual="yes for dp, step for pipelines",
            known=lambda: RESHARD,
        ),
    ]
    gather: Annotated[
        Gather | None,
        _of_flushes(
            "HOW",
            "with --zero 1 and 2, when updated parameters are gathered: units (after all updates of a device, one by "
            "one before their forwards), step (all before its first forward) or early (each as soon as it is updated, "
            "beside other updates)",
            usual="units",
        ),
    ]
    padding: Annotated[
        Padding | None,
        Option(
            "RULE",
            "how split tensors are padded: rows (FSDP2: each tensor is split on its first dimension) or megatron "
            "(buckets are multiples of 64 and 128 numbers)",
            usual="no padding",
            in_state=True,
            applies=lambda s: s.splits_states,
        ),
    ]
    compress: Annotated[
        str | None,
        Option(
            "RATE",
            "compression of gradients between data ranks: bf16 or fp16 (2 bytes a number), int8 or int4 (1 or 1/2 "
            "byte, and 4 bytes for each block of 512 numbers; int8:128 has blocks of 128), topk:F (a share F of each "
            "rank's numbers, the largest, each with an index of 4 bytes), powersgd:R (two factors of rank R for each "
            "matrix) or none",
            usual="none",
            read=read_compression,
            known=lambda: COMPRESSIONS,
            applies=lambda s: s.sums_gradients,
        ),
    ]
    clip: Annotated[
        bool,
        _of_flushes(
            "",
            "before any update, sum the norm of all gradients over the devices that split them (gradient clipping)",
            default=False,
        ),
    ]
    update_in: Annotated[
        UpdateIn | None,
        Option(
            "WHERE",
            "where updates take their time: lane (among the tasks) or stream (among the messages)",
            usual="lane",
            in_state=True,
            applies=lambda s: s.splits_states,
        ),
    ]
    by_layer: Annotated[
        bool | Sequence[int] | None,
        Option(
            "",
            "make each layer a stage of its own, where the model is grouped into N stages (default: with --zero 3 and "
            "with --buckets); or do not",
            applies=lambda s: s.flushes and not s.order.one_place,
            record=lambda r: list(r.shape.layers) or r.given["by_layer"],
            read=lambda given: given if isinstance(given, Sequence) else true_or_false("by_layer", given),
        ),
    ]


class LayerOptions(TypedDict, total=False):
    """A --model of [layers], and the ranks that share its tensors."""

    tensor: Annotated[
        int | None,
        Option(
            "T",
            "split each layer over T neighbouring ranks, which do each task together (tensor parallelism); a device of "
            "the results is such a group",
            usual="1",
            least=1,
            short=("--tp",),
            elsewhere=("tensor_model_parallel_size", "tensor_parallel_degree", "tensor_parallel_size"),
        ),
    ]
    sequence: Annotated[
        bool,
        _switch(
            "split the sequence over these ranks, too, where no product is split",
            short=("--sp",),
            elsewhere=("sequence_parallel",),
        ),
    ]
    context: Annotated[
        int | None,
        Option(
            "C",
            "split the sequence over C groups of these ranks, which do each task together (context parallelism); all "
            "have the same weights, whose gradients data ranks sum",
            usual="1",
            least=1,
            short=("--cp",),
            elsewhere=("context_parallel_size", "context_parallel_degree"),
        ),
    ]
    attention_exchange: Annotated[
        AttentionExchange | None,
        Option(
            "HOW",
            "how attention gets all positions of a sequence that --context splits: gather (keys and values), ring "
            "(they go around beside the attention of a block) or all-to-all (it is split by heads)",
            usual="gather",
        ),
    ]
    expert: Annotated[
        int | None,
        Option(
            "E",
            "split the experts of each layer over E neighbouring ranks, of those that share a task and of data ranks "
            "(expert parallelism); each rank computes as many rows of tokens whatever E is",
            usual="1",
            least=1,
            short=("--ep",),
            elsewhere=("expert_model_parallel_size", "expert_parallel_degree"),
        ),
    ]
    node_limit: Annotated[
        int | None,
        Option(
            "M",
            "send each token to experts in at most M nodes, once to each node and on inside it",
            usual="no limit",
            least=1,
            elsewhere=("moe_router_group_topk",),
        ),
    ]
    whole_boundaries: Annotated[
        bool,
        _switch(
            "let each of these ranks send a whole boundary, not a share of which the receiving group gathers the whole"
        ),
    ]
    split_checkpoints: Annotated[
        bool, _switch("split what layers keep to recompute over these ranks; the backward gathers it")
    ]
    micro_batch: Annotated[int | None, Option("B", "the samples of a micro-batch", usual="the file's", least=1)]
    length: Annotated[int | None, Option("S", "the tokens of a sample", usual="the file's", least=1)]
    cuts: Annotated[
        str | Sequence[int] | None,
        Option(
            "L,L,...",
            "the layers of each of N stages; the embedding is with the first, and the head with the last",
            usual="as balanced as can be",
            read=lambda given: list(read_widths(given, "cuts")),
            is_list=True,
        ),
    ]


class TrainingOptions(TypedDict, total=False):
    """How a --model is trained (default: as its file says)."""

    optimizer: Annotated[
        Optimizer | None,
        Option(
            "NAME",
            "the optimizer, whose state takes memory: sgd, momentum, adam, adamw, adafactor, lion, sm3, adam-8bit, "
            "lamb or lars",
            read=lambda given: in_known_case(given, OPTIMIZERS),
        ),
    ]
    mixed_precision: Annotated[
        bool | None,
        Option("", "keep the parameters and the optimizer's state of a bf16 or fp16 model in fp32 as well; or do not"),
    ]
    gradients: Annotated[
        GradientType | None,
        Option(
            "TYPE",
            "the number type in which gradients are summed and sent: fp32, bf16 or fp16 (default: that of the "
            "parameters). Mixed-precision Adam takes 16 bytes a parameter by default, 18 with fp32, and 20 with bf16 "
            "or fp16, whose gradients are copied to fp32 for the update",
        ),
    ]
    update_time: Annotated[
        UpdateTime | None,
        Option(
            "HOW",
            "how long updates take: stated (default; as the model's file says, and those of the package say none), "
            "memory (the bytes that the optimizer reads and writes over the devices' memory_bandwidth), or clipped "
            "(the same, plus the bytes of clipping gradients by their norm)",
        ),
    ]
    recompute: Annotated[
        Recomputation | str | None,
        Option(
            "HOW",
            "compute activations again in the backward: none, layer (each layer of the model's file keeps its input, "
            "embedding and head keep all: what Megatron-LM and torchtitan call full), layer+head (all keep inputs), "
            "layers:K (as layer, the first K of each of N stages, with dp of the device: Megatron-LM's block method), "
            "selective (the core of attention alone is computed again), selective:LIST (layers keep their inputs and "
            "what operators make: products, products/2 (every second), core, norms, activations, scatters; torchtitan "
            "has selective:products/2+core+scatters), full (a stage keeps its input), sqrt (a stage of l layers keeps "
            "the inputs of the square root of l segments), or reversible (layers in a row keep their last output)",
        ),
    ]
    offload: Annotated[
        Offload | None,
        Option(
            "WHAT",
            "the tensors that devices move to their hosts over the cluster's [host] link: none, optimizer (its state; "
            "the host updates), activations (from forward to backward), all (both), parameters (these and optimizer "
            "states, with --zero 3), or nvme (the same, on disks behind the hosts: the [nvme] link)",
        ),
    ]


class PlatformOptions(TypedDict, total=False):
    """The platform: devices, links, runtime."""

    model: Annotated[
        str | Path | Model | Mapping[str, Any],
        Option(
            "NAME|FILE",
            "unit (default), one that `cdpsim models` lists, or a .toml or .json file",
            default=UNIT_MODELS[0],
            brief=True,
            known=lambda: (*UNIT_MODELS, *presets.models()),
            kept=True,
        ),
    ]
    cluster: Annotated[
        str | Path | Cluster | Mapping[str, Any],
        Option(
            "NAME|FILE",
            "unit (default), one that `cdpsim clusters` lists, or a .toml or .json file",
            default="unit",
            brief=True,
            known=lambda: ("unit", *presets.clusters()),
            kept=True,
        ),
    ]
    expand_collectives: Annotated[
        bool, _switch("run every collective as the messages of its algorithm", record=lambda r: r.expands)
    ]
    contention: Annotated[
        Contention,
        Option(
            "HOW",
            "messages on one link: none (default; they do not slow each other down), fair (they share its bandwidth) "
            "or queue (one after another); fair and queue run collectives as their messages, and by SimPy",
            default="none",
        ),
    ]
    rendezvous: Annotated[
        Rendezvous | None,
        Option(
            "HOW",
            "with overlap = 'none', let both ends of a message wait for each other; receives stand right before their "
            "readers (megatron) or where torch's _add_send_recv places them (torch); default: neither end waits",
            applies=lambda s: s.order.rounds is None,
        ),
    ]
    runtime: Annotated[
        str | Runtime | Mapping[str, Any] | None,
        Option(
            "RUNTIME",
            "memory that a runtime holds beyond what the schedule needs: paper (none; default), held (the copies that "
            "estimates need), torch (as torch's own pipelines and DDP), transformers (as torch; norms, MLP and rotary "
            "positions are operations of torch) or, with these as kernels, liger (as torch), megatron and te (as "
            "paper); single behaviours may be changed: "
            "torch:sends=until-sent,returned_outputs=no (`cdpsim simulate --help-all` lists them)",
            known=lambda: RUNTIMES,
            record=lambda r: r.given["runtime"] and config.encode(r.given["runtime"]),
            read=read_runtime,
        ),
    ]
    ignore_memory: Annotated[bool, _switch("run although a device would need more memory than it has")]


class DisorderOptions(TypedDict, total=False):
    """Disturbances of a run (default: as the --cluster file says)."""

    slow: Annotated[
        Sequence[str | Slow] | Mapping[int, float] | None,
        _of_one_run(
            "DEVICE:FACTOR",
            "a device whose tasks take FACTOR times as long; repeat the option for several devices",
            default=(),
            is_list=True,
        ),
    ]
    jitter: Annotated[
        str | None,
        _of_one_run(
            "DISTRIBUTION:C",
            "multiply the time of each task by a random factor of mean 1 and standard deviation C: uniform, "
            "exponential (1 - C plus an exponential part) or lognormal",
        ),
    ]
    link_jitter: Annotated[
        str | None,
        _of_one_run(
            "DISTRIBUTION:C", "multiply the time of each message by a random factor, as --jitter does of tasks"
        ),
    ]
    imbalance: Annotated[
        str | float | None,
        Option(
            "LOAD",
            "the load of the busiest of the ranks that share experts, of even loads, for which all wait: 1.2, or "
            "DISTRIBUTION:C, by which a load of each rank is drawn for each step, micro-batch and layer",
            usual="1",
            read=read_imbalance,
            record=lambda r: r.disorder.imbalance or (r.model.mesh.imbalance if r.model.mesh.imbalance > 1 else None),
        ),
    ]
    stop: Annotated[
        Sequence[str | Stop] | Mapping[int, str | float] | None,
        _of_one_run(
            "DEVICE:AT[:FOR]",
            "stop a device at AT, for FOR or for good, such as '3:2 s:500 ms', in slots 3:12:2; a task that is "
            "running goes on afterwards",
            default=(),
            is_list=True,
        ),
    ]
    seed: Annotated[int, _of_one_run("S", "the number that decides all random factors", default=0, least=0, kept=True)]
    run: Annotated[int, _of_one_run("R", "the number of the run among those of the seed", default=0, least=0)]


class SimulationOptions(TypedDict, total=False):
    """How a run is computed."""

    steps: Annotated[
        int | None,
        _of_one_run(
            "T", "training steps to simulate", usual="max(3, warm-up + 2, longest lag + 2)", least=1, kept=True
        ),
    ]
    engine: Annotated[
        EngineName,
        Option("ENGINE", "auto (default), fast or simpy; both give the same times", default="auto", recorded=False),
    ]
    collective: Annotated[
        CollectiveName | None,
        Option(
            "NAME",
            "the algorithm of all-reduces: recursive-doubling, ring (one for each network card of a node), tree, "
            "halving-doubling, double-tree, hierarchical, hierarchical-rails, or best, the fastest for each size, "
            "group and link (default: best on a cluster with a topology, else recursive-doubling; table1: "
            "recursive-doubling, ring or tree)",
            kept=True,
        ),
    ]
    max_memory: Annotated[
        str | float | None,
        _of_one_run(
            "SIZE",
            "refuse a run that would take more memory on this machine, such as '8 GB'",
            usual="the memory that is free",
            recorded=False,
        ),
    ]


class Options(
    ScheduleOptions,
    DataOptions,
    LayerOptions,
    TrainingOptions,
    PlatformOptions,
    DisorderOptions,
    SimulationOptions,
    total=False,
):
    """All options of a request, beside its schedule and its number of stages."""


GROUPS = (
    ScheduleOptions,
    DataOptions,
    LayerOptions,
    TrainingOptions,
    PlatformOptions,
    DisorderOptions,
    SimulationOptions,
)
OPTIONS: dict[str, Option] = {
    name: kind.__metadata__[0] for name, kind in get_type_hints(Options, include_extras=True).items()
}
OPTION_TYPES: dict[str, Any] = get_type_hints(Options)
TRAINING = tuple(TrainingOptions.__annotations__)
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
OPTION_NAMES = ("schedule", "n", *DEFAULTS)
ELSEWHERE = {other: name for name, option in OPTIONS.items() for other in option.elsewhere}
# Switches of before: the option of today, and its value. Records of runs may have them.
RENAMED = {
    "defer_receives": ("rendezvous", MEGATRON),
    "overlap_all_reduce": ("reduce", "last"),
    "vertical_sync": ("rule", VERTICAL_SYNC.name),
}
SIGNATURE = Signature(
    [
        Parameter("schedule", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Schedule),
        Parameter("n", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=int | None),
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=OPTION_TYPES[name])
            for name, default in DEFAULTS.items()
        ),
    ]
)


def refuse_renamed(name: str) -> None:
    """Refuse the name that an option had before, from Python or a command line, by the option of today.

    >>> refuse_renamed("--defer-receives")
    Traceback (most recent call last):
    cdpsim.errors.RequestError: --defer-receives: is now --rendezvous megatron
    """
    option = name.removeprefix("--").replace("-", "_")
    if option in RENAMED:
        now, value = RENAMED[option]
        raise RequestError(flag_of(option), f"is now {flag_of(now)} {value}")


def choose_option(name: str, known: Iterable[str]) -> None:
    """Refuse a name that is none of the known options, also one of before."""
    refuse_renamed(name)
    choose("option", name, known)


def with_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record, which may be an old one, under their names of today.

    >>> with_new_names({"n": 4, "defer_receives": True})
    {'n': 4, 'rendezvous': 'megatron'}
    """
    options = dict(record)
    for name, (now, value) in RENAMED.items():
        if options.pop(name, False):
            options[now] = value
    return options


def read_value(option: str, given: Any) -> Any:
    """Return the value of an option as a request has it; refuse one that its row knows to be none."""
    row, name = OPTIONS[option], option.replace("_", "-")
    if row.is_switch:
        return true_or_false(option, given)
    if given is None:
        return None
    if row.read is not None:
        return row.read(given)
    if row.least is not None:
        return whole_number(name, given, at_least=row.least)
    words = () if option in TRAINING else literals_of(option)  # what a recipe refuses, it refuses as a whole
    return choose(name, given, words) if words else given


@cache
def literals_of(option: str) -> tuple[str, ...]:
    """Return the words that an option may be, where its type says them."""
    kind = OPTION_TYPES[option]
    return tuple(word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part))


def flag_of(option: str) -> str:
    """Return how a command line gives an option of a request.

    >>> flag_of("link_jitter"), flag_of("m")
    ('--link-jitter', '-m')
    """
    return f"-{option}" if len(option) == 1 else f"--{option.replace('_', '-')}"
