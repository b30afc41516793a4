"""What is asked of a simulation: read, checked, recorded, and read again from a record."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

import msgspec
import numpy as np

from cdpsim import experiment, presets
from cdpsim.cluster import Cluster
from cdpsim.cluster.devices import UNLIMITED_LANES
from cdpsim.cluster.disorder import KEYWORDS as DISORDER
from cdpsim.cluster.disorder import Disorder, Slow, Stop, disorder_of
from cdpsim.errors import RequestError, choose, flag, shown
from cdpsim.limits import refuse_too_large
from cdpsim.model import UNIT_MODELS, Model, Recipe
from cdpsim.model.offload import timed
from cdpsim.model.recipe import apply
from cdpsim.model.stage import Tie
from cdpsim.program.assembly import check_counts, counted_once, pyramid_of
from cdpsim.program.collectives import COLLECTIVES, DEFAULT
from cdpsim.schedules import SCHEDULES, Schedule, imported
from cdpsim.schedules.rule import CUSTOM, NAMED, Rule, find_rule, recorded_rule
from cdpsim.schedules.shape import Shape, Widths
from cdpsim.timing.costs import CONTENTION, reached
from cdpsim.timing.engine import find_engine

LEAST_STEPS = 3  # where no number is asked for
_FLAGS = ("overlap_all_reduce", "vertical_sync", "expand_collectives", "defer_receives", "ignore_memory")

SlotOrder = Literal["forward-first", "backward-first"]
Engine = Literal["auto", "fast", "simpy"]
Contention = Literal["none", "fair", "queue"]
Rendezvous = Literal["megatron", "torch"]
MEGATRON, TORCH = RENDEZVOUS = get_args(Rendezvous)
SLOT_ORDERS: tuple[SlotOrder, ...] = get_args(SlotOrder)
Collective = Literal[
    "recursive-doubling",
    "ring",
    "tree",
    "halving-doubling",
    "double-tree",
    "hierarchical",
    "hierarchical-rails",
    "best",
]


class Taken(TypedDict, total=False):
    """What changes a schedule, if it takes it (`Schedule.options`)."""

    rule: str | Rule | Sequence[Sequence[int]] | Mapping[str, Any] | None
    m: int | None
    counts: Sequence[Sequence[int]] | None
    chunks: int | None
    replicas: int
    overlap_all_reduce: bool
    vertical_sync: bool
    prefetch: int
    slot_order: SlotOrder | None


class Training(TypedDict, total=False):
    """How a model is trained; as its file says, where None."""

    optimizer: Literal["sgd", "momentum", "adam", "adafactor"] | None
    mixed_precision: bool | None
    recompute: Literal["none", "full", "sqrt"] | None
    offload: Literal["none", "optimizer", "activations", "all"] | None


class Use(TypedDict, total=False):
    """What runs where, and how messages go there."""

    model: str | Path | Model | Mapping[str, Any]
    cluster: str | Path | Cluster | Mapping[str, Any]
    collective: Collective | None
    expand_collectives: bool
    contention: Contention
    rendezvous: Rendezvous | None
    defer_receives: bool
    ignore_memory: bool


class Disturbed(TypedDict, total=False):
    """What disturbs a run, as the cluster says where it is empty or None; and which of all possible runs it is."""

    slow: Sequence[str | Slow]
    jitter: str | None
    link_jitter: str | None
    stop: Sequence[str | Stop]
    seed: int
    run: int


class Machine(TypedDict, total=False):
    """How much is simulated, and by what."""

    steps: int | None
    engine: Engine
    max_memory: str | float | None


class Words(Taken, Training, Use, Disturbed, Machine, total=False):
    """All that may be asked for beside a schedule and its number of stages, as on the command line."""


_TRAINING = tuple(Training.__annotations__)
_UNASKED: dict[str, Any] = {
    "model": "unit",
    "cluster": "unit",
    **dict.fromkeys(("prefetch", "seed", "run"), 0),
    **dict.fromkeys(("slow", "stop"), ()),
    **dict.fromkeys(_FLAGS, False),
    "replicas": 1,
    "engine": "auto",
    "contention": "none",
}
DEFAULTS = {
    word: _UNASKED.get(word) for group in (Taken, Training, Use, Disturbed, Machine) for word in group.__annotations__
}
WORDS = ("schedule", "n", *DEFAULTS)
SIGNATURE = Signature(
    [
        Parameter("schedule", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Schedule),
        Parameter("n", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=int | None),
        *(
            Parameter(word, Parameter.KEYWORD_ONLY, default=default, annotation=Words.__annotations__[word])
            for word, default in DEFAULTS.items()
        ),
    ]
)


class Untaken(RequestError):
    """An option that a schedule does not take, or that changes nothing of its run."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Request(Mapping[str, Any]):
    """A schedule of a model on a cluster, and how it runs: checked, alone and together, when it is made.

    `counts` says how many of its `m` micro-batches each replica has in each step: a row for each step.
    `n` may be left out where the model says how many stages there are; of a model with more, n are made. Without
    `steps`, it is two steps more than pass before all read what later steps read, and at least 3. How the model is
    trained (`optimizer`, `mixed_precision`, `recompute`, `offload`) is what its file says, where None. A model and a
    cluster may be what a file has, as a mapping; a rule may be its lags, in rows, or a table of `lags`, `backward` and
    `barrier`. Without `collective`, the best way to run each is taken where the cluster has a topology, and recursive
    doubling elsewhere. `expand_collectives` runs every collective as the messages of its algorithm, and so does
    `contention` (fair or queue), by which messages share the links of their routes. `rendezvous` (megatron or torch)
    lets both ends of a message wait for each other where nothing overlaps; `defer_receives` is the old name of
    "megatron". `max_memory` is what this machine may spend on the run, in bytes or as "8 GB"; `ignore_memory` is about
    the simulated devices. What disturbs a run (`slow`, `jitter`, `link_jitter`, `stop`: objects, or texts as on the
    command line) is what the cluster says, where not given; `seed` and the number of the `run` decide all that is
    random in it.

    As a mapping, it has the words that ask for the same again.

    >>> request = Request("multi-cdp", n=4, prefetch=1)
    >>> request.shape.m, request.steps, request["rule"]
    (4, 3, 'cdp-v2')
    >>> Request(**request).schedule is request.schedule
    True
    """

    __signature__ = SIGNATURE  # for help and completion: the words one by one

    schedule: Schedule
    model: Model  # in its stages, trained as asked
    cluster: Cluster
    rule: Rule
    shape: Shape
    steps: int
    prefetch: int
    overlap_all_reduce: bool
    slot_order: str
    counts: tuple[tuple[int, ...], ...] | None  # of each step and replica; None: m in all
    collective: str | None  # None until it is settled: what the cluster and the schedule make of it
    own_collective: str | None  # what was asked for
    expand_collectives: bool
    contention: str
    rendezvous: str | None  # None: neither end of a message waits for the other
    disorder: Disorder
    disturbs: frozenset[str]  # the keywords of disorder that are asked for, beyond the cluster's own
    own_disorder: Disorder  # what they ask for
    training: Mapping[str, Any]  # how the model is trained, as far as that was asked for
    seed: int
    run: int
    engine: Engine
    ignore_memory: bool
    max_memory: str | float | None
    named: Mapping[str, Any]  # the words that ask for a model or a cluster that ships with the package

    def __init__(self, schedule: str | Schedule, n: int | None = None, **words: Unpack[Words]) -> None:
        for word in words:
            if word not in DEFAULTS:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {word!r}")
        self.__dict__.update(read({"schedule": schedule, "n": n} | DEFAULTS | words))

    @classmethod
    def from_builtins(cls, words: Mapping[str, Any]) -> Self:
        """Make it of what `to_builtins` gave, or a file says."""
        for word in words:
            choose("request", word, WORDS)
        if "schedule" not in words:
            raise RequestError("request", "has no schedule; give its name")
        return cls(**words)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read an experiment file, or the request that a summary.json records."""
        return cls.from_builtins(experiment.words(path, WORDS))

    def to_builtins(self) -> dict[str, Any]:
        """Give the words that ask for it again; what was not asked for has no word."""
        return deepcopy(self._words)

    def __getitem__(self, word: str) -> Any:
        return self._words[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def __repr__(self) -> str:
        said: dict[str, Any] = {"n": self.shape.n, "m": self.shape.m, "steps": self.steps}
        said |= {"model": self.model.name, "cluster": self.cluster.name}
        return f"Request({self.schedule.name!r}, {', '.join(f'{word}={value!r}' for word, value in said.items())})"

    @cached_property
    def counted(self) -> tuple[Model, tuple[Tie, ...]]:
        """The model with tied tensors counted once where one device has all their stages, and these tensors."""
        return counted_once(self.schedule, self.shape, self.rule, self.model)

    @cached_property
    def timed(self) -> Model:
        """That model, with the times of what its stages leave to hosts."""
        return timed(self.counted[0], self.cluster.host)

    @property
    def widths(self) -> Widths:
        """The devices of each stage, where the placement asks for its times."""
        if not self.schedule.placement.exclusive:
            return ()
        return pyramid_of(self.timed, self.shape.m, reached(self.cluster, 1, self.timed)[0])

    @property
    def in_slots(self) -> bool:
        """Whether times are slots."""
        return self.model.is_unit

    @property
    def contends(self) -> bool:
        """Whether messages share links."""
        return self.contention != "none"

    @property
    def expands(self) -> bool:
        """Whether collectives run as messages: one in one piece is on no link that it could share."""
        return self.expand_collectives or self.contends

    def settled(self, *, sends: bool, sums: bool, devices: int) -> Self:
        """Give the request of a run on so many devices, which `sends` messages or none; refuse what it does not take.

        Where it `sums` by collectives, or hands out, these run by the best algorithm if the cluster has a topology.

        What a cluster says of messages and of further devices may be for other schedules.
        """
        name, disorder = self.schedule.name, self.disorder.within(devices)
        if not sends:
            disorder = msgspec.structs.replace(disorder, link_jitter="")
        for option in sorted(self.disturbs):
            if getattr(self.disorder, option) and not getattr(disorder, option):
                problem = "sends no message" if option == "link_jitter" else f"runs on the devices 0 to {devices - 1}"
                raise Untaken(option.replace("_", "-"), f"{name} {problem}; leave it out")
        if not disorder.is_random:
            for option, number in (("seed", self.seed), ("run", self.run)):
                if number:
                    raise Untaken(option, f"{option}={number}, and nothing is random; leave it out, or give --jitter")
        best = sums and self.cluster.is_joined and not self.cluster.is_free
        return self._changed(disorder=disorder, collective=self.collective or ("best" if best else DEFAULT))

    @property
    def weighed(self) -> str:
        """The engine whose memory counts."""
        return _weighed(self.engine, self.contention)

    def with_steps(self, steps: int, **changed: Any) -> Self:
        """Ask for another number of training steps, if these fit as well."""
        shape, engine, slots = self.shape, self.weighed, self.in_slots
        parts = 3 if self.schedule.splits(shape) else 2
        size = shape.n, shape.m, steps
        refuse_too_large(*size, engine, self.max_memory, replicas=shape.replicas, parts=parts, slots=slots)
        return self._changed(steps=steps, **changed)

    def _changed(self, **fields: Any) -> Self:
        """Give the same with other fields, which go together with the rest."""
        other = object.__new__(type(self))
        derived = {} if fields.keys() & {"model", "cluster"} else {"counted": self.counted, "timed": self.timed}
        other.__dict__.update({field.name: getattr(self, field.name) for field in fields_of(self)} | derived | fields)
        return other

    def without_chance(self) -> Self:
        """Ask for the run in which everything takes its mean, whatever room its devices have."""
        disorder = msgspec.structs.replace(self.disorder, jitter="", link_jitter="")
        return self._changed(disorder=disorder, seed=0, run=0, ignore_memory=True)

    def of(self, model: str | Path | Model, cluster: str | Path | Cluster) -> Self:
        """Ask the same of another model, in as many stages and trained as asked, and of another cluster."""
        given, n, slots = (model, cluster), self.shape.n, self.in_slots
        if model is not self.model:
            is_ready = isinstance(model, Model) and model.n == n and model.training == Recipe()
            model = model if isinstance(model, Model) and is_ready else _find_model(model, n, self.training)
            if model.is_unit != slots:
                problem = "is of slots" if model.is_unit else "is of seconds and bytes"
                raise RequestError("model", f"{problem}, and this request's is not; make another request")
            model = model.split(self.schedule.name) if self.schedule.splits(self.shape) else model
        cluster = _find_cluster(cluster)
        own = {name: getattr(self.own_disorder, name) for name in self.disturbs}
        disorder = msgspec.structs.replace(cluster.disorder, **own).effective()
        named = _named({"model": given[0], "cluster": given[1]}, self.training)
        kept = {"cluster"} if given[1] is self.cluster else set[str]()
        kept |= {"model", *_TRAINING} if given[0] is self.model else set()
        named |= {word: said for word, said in self.named.items() if word in kept}
        fields = {"model": model, "cluster": _undisturbed(cluster), "disorder": disorder, "named": named}
        return self._changed(**fields, collective=self.own_collective)

    @cached_property
    def _words(self) -> dict[str, Any]:
        shape = self.shape
        said: dict[str, Any] = {"schedule": self.schedule.name, "n": shape.n, "m": shape.m, "steps": self.steps}
        said |= {"counts": [list(row) for row in self.counts]} if self.counts else {}
        said |= {"chunks": shape.chunks} if shape.chunks > 1 else {}
        said |= {"replicas": shape.replicas} if shape.replicas > 1 else {}
        said |= {"overlap_all_reduce": True} if self.overlap_all_reduce else {}
        said["rule"] = self.rule.recorded(shape)
        said |= {"prefetch": self.prefetch, "slot_order": self.slot_order, "collective": self.collective}
        said |= {"expand_collectives": True} if self.expands else {}
        said |= {"rendezvous": self.rendezvous} if self.rendezvous else {}
        said |= {"contention": self.contention} if self.contention != "none" else {}
        said |= {"ignore_memory": True} if self.ignore_memory else {}
        said |= {"run": self.run} if self.run else {}
        said |= self.disorder.recorded(slots=self.in_slots)
        said |= {"seed": self.seed, "model": self.model.to_builtins(), "cluster": self.cluster.to_builtins()}
        return {**said, **self.named}


def read(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Read the words of a request into its fields, in an order in which what is cheap to refuse is refused first."""
    asked = {name: str(value) if isinstance(value, str) else value for name, value in asked.items()}  # numpy's, too
    asked |= {name: flag(name, asked[name]) for name in _FLAGS}
    schedule = find_schedule(asked["schedule"])
    engine, contention = asked["engine"], choose("contention", asked["contention"], CONTENTION)
    find_engine(engine, contention)
    least = {"prefetch": 0, "seed": 0, "run": 0}
    numbers: dict[str, Any] = {name: whole(name, asked[name], at_least=low) for name, low in least.items()}
    if asked["collective"] is not None:
        choose("collective", asked["collective"], COLLECTIVES)
    asked["rendezvous"] = _rendezvous(asked["rendezvous"], deferred=asked["defer_receives"])
    n = asked["n"]
    if n is None and schedule.shape is not None:
        n = schedule.shape.n
    early = None
    if isinstance(asked["model"], str) and asked["model"] in UNIT_MODELS:
        n = whole("n", n, at_least=1)
        early = _rule_and_steps(schedule, shape_of(schedule, n, asked), asked)
    training = {name: asked[name] for name in _TRAINING}
    model = _find_model(asked["model"], n, training)
    cluster = _find_cluster(asked["cluster"])
    given = {name: asked[name] for name in DISORDER} | {"slots": model.is_unit}
    disorder = disorder_of(cluster.disorder, **given)
    shape = shape_of(schedule, model.n, asked)
    slots = model.is_unit
    rule, steps = early or _rule_and_steps(schedule, shape, asked, slots=slots)
    _refuse_misfits(schedule, model, cluster)
    _refuse_idle(shape, model, cluster, asked)
    if schedule.splits(shape):
        _refuse_too_large(schedule, shape, steps, asked, slots=slots, parts=3)
        model = model.split(schedule.name)
    same = ("collective", "expand_collectives", "overlap_all_reduce", "rendezvous")
    return dict(
        schedule=schedule,
        counts=_counts(asked["counts"], shape, steps),
        model=model,
        cluster=_undisturbed(cluster),
        rule=rule,
        shape=shape,
        steps=steps,
        slot_order=asked["slot_order"] or SLOT_ORDERS[0],
        contention=contention,
        disorder=disorder,
        named=_named(asked, training),
        own_collective=asked["collective"],
        own_disorder=disorder_of(Disorder(), **given),
        training=training,
        disturbs=frozenset(name for name in DISORDER if asked[name]),
        **numbers,
        **{name: asked[name] for name in (*same, "engine", "ignore_memory", "max_memory")},
    )


def recorded_disorder(request: Mapping[str, Any]) -> Disorder:
    """Read what disturbs a run from its recorded request."""
    said = {name: request[name] for name in DISORDER if name in request}
    return disorder_of(Disorder(), **said, slots=request.get("model") in UNIT_MODELS)


def _rule_and_steps(
    schedule: Schedule, shape: Shape, asked: Mapping[str, Any], *, slots: bool = True
) -> tuple[Rule, int]:
    """Find the rule, and how many steps are simulated; refuse what will not fit before it takes long."""
    if asked["steps"] is None and isinstance(asked["counts"], Sequence | np.ndarray):
        asked = {**asked, "steps": len(asked["counts"])}
    steps = LEAST_STEPS if asked["steps"] is None else whole("steps", asked["steps"], at_least=1)
    _refuse_too_large(schedule, shape, steps, asked, slots=slots)
    _refuse_untaken(schedule, shape, asked)
    rule = _find_rule(schedule, asked["rule"], asked["vertical_sync"])
    if rule.name == CUSTOM and rule.recorded(shape) == schedule.rule.recorded(shape):  # a record of its own rule
        rule = schedule.rule
    if asked["steps"] is None:
        steps = max(LEAST_STEPS, rule.fill(shape) + 2)
        if steps > LEAST_STEPS:
            _refuse_too_large(schedule, shape, steps, asked, slots=slots)
    return rule, steps


def shape_of(schedule: Schedule, n: int, asked: Mapping[str, Any]) -> Shape:
    """How many micro-batches, chunks and replicas are asked for; as many as the schedule has itself where none are."""
    if schedule.shape is not None and n != schedule.shape.n:
        raise RequestError("n", f"n={n}, but {schedule.name} has {schedule.shape.n} stages; leave it out")
    own = {"m": schedule.micro_batches(n), "chunks": schedule.order.chunks, "replicas": 1}
    m, chunks, replicas = (
        whole(name, default if asked[name] is None else asked[name], at_least=1) for name, default in own.items()
    )
    return Shape(n, m, chunks, replicas)


def _counts(given: object, shape: Shape, steps: int) -> tuple[tuple[int, ...], ...] | None:
    """How many micro-batches each replica has in each step, where that is not m in all."""
    if given is None:
        return None
    counts = check_counts(given, shape, steps)
    return None if (counts == shape.m).all() else tuple(map(tuple, counts.tolist()))


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


def _refuse_misfits(schedule: Schedule, model: Model, cluster: Cluster) -> None:
    """Refuse a cluster that says what the model or the schedule has no use for."""
    if model.is_unit and cluster.is_measured:
        problem = "is of slots, which have no seconds and no bytes, and the cluster says something in them"
        raise RequestError("model", f"{problem}; name a model (`cdpsim models` lists some), or leave --cluster out")
    lanes = max(group.lanes for group in cluster.devices)
    if not schedule.placement.lanes and 1 < lanes < UNLIMITED_LANES:
        problem = f"the cluster's devices have {lanes}, and {schedule.name} runs one task at a time on each"
        raise RequestError("lanes", f"{problem}; leave them out of its file")


def _refuse_idle(shape: Shape, model: Model, cluster: Cluster, asked: Mapping[str, Any]) -> None:
    """Refuse options that change nothing here."""
    free, slots = cluster.is_unit, model.is_unit
    backward_first = asked["slot_order"] == SLOT_ORDERS[1]
    idle = {
        "contention": (asked["contention"] != "none" and free, "messages take no time; give a --cluster with links"),
        "link-jitter": (
            asked["link_jitter"] and free and not slots,
            "messages take no time; give a --cluster with links",
        ),
        "collective": (asked["collective"] == "best" and free, "messages take no time, and no way is better"),
        "rendezvous": (asked["rendezvous"] is not None and slots, "in slots messages take no time; give a --model"),
        "slot-order": (
            backward_first and cluster.lanes(1)[0] >= shape.m,
            "every micro-batch has a lane of its own; give a --cluster with fewer lanes",
        ),
    }
    for option, (is_idle, problem) in idle.items():
        if is_idle:
            raise Untaken(option, f"{problem}, or leave it out")


def _rendezvous(asked: object, *, deferred: bool) -> str | None:
    """How both ends of messages meet, if they do; to defer receives is an old name of one of these ways."""
    if asked is None:
        return MEGATRON if deferred else None
    how = choose("rendezvous", asked, RENDEZVOUS)
    if deferred and how != MEGATRON:
        problem = f"is the old name of --rendezvous {MEGATRON}, and --rendezvous asks for {how}; leave either out"
        raise RequestError("defer-receives", problem)
    return how


def _find_rule(schedule: Schedule, rule: object, vertical_sync: bool) -> Rule:
    if vertical_sync:
        if rule is not None:
            raise RequestError("vertical-sync", "is a rule, and --rule asks for another one; leave either out")
        synced = schedule.vertical_sync
        assert synced is not None, "which has been refused"
        return synced
    if rule is None or isinstance(rule, Rule):
        return rule or schedule.rule
    if isinstance(rule, list | tuple | Mapping) or (isinstance(rule, str) and rule in NAMED):
        return recorded_rule(rule)
    return find_rule(rule)  # type: ignore[arg-type]  # refuses other types


def _weighed(engine: str, contention: str) -> str:
    return engine if contention == "none" else "simpy"


def find_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule by its name, or in a CSV file of torch's, or itself."""
    if isinstance(schedule, Schedule):
        if SCHEDULES.get(schedule.name, schedule) != schedule:
            raise RequestError("schedule", f"another one is named {schedule.name}; give this one a name of its own")
        return schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        return imported(schedule)
    return SCHEDULES[choose("schedule", schedule, SCHEDULES)]


def whole(name: str, value: object, *, at_least: int) -> int:
    """A whole number, given as one or as its digits."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        text = "9" * 19 if abs(int(value)) >= 10**18 else str(int(value))
    else:
        text = value if isinstance(value, str) else shown(value)
    if isinstance(value, bool) or not (text.isascii() and text.removeprefix("-").isdigit()):
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
    for name, is_asked in (asked | {"slot_order": slot_order not in (None, SLOT_ORDERS[0])}).items():
        option = name.replace("_", "-")
        if is_asked and option not in schedule.options:
            takes = ", ".join(schedule.options) or "none of its kind"
            raise Untaken(option, f"{schedule.name} does not take this option (it takes {takes}); leave it out")


def _find_model(
    model: str | Path | Model | Mapping[str, object], n: int | None, training: Mapping[str, object]
) -> Model:
    """A model by name or file, in n stages where n is given, and trained as asked, or as it says itself."""
    asked = {name: value for name, value in training.items() if value is not None}
    if "mixed_precision" in asked:
        flag("mixed_precision", asked["mixed_precision"])
    if isinstance(model, str) and model in UNIT_MODELS:
        unit = Model.unit(whole("n", n, at_least=1), split=model != "unit")
        return apply(unit, Recipe(**asked))  # type: ignore[arg-type]
    found = Model.from_builtins(model, "model") if isinstance(model, Mapping) else presets.find_model(model)
    recipe = msgspec.structs.replace(found.training, **asked)
    return apply(found, recipe, None if n is None else whole("n", n, at_least=1))


def _named(asked: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """The words that say more briefly which model and which cluster are asked for, where these have a name here."""
    words = {}
    for word, kind in (("model", "models"), ("cluster", "clusters")):
        if isinstance(asked.get(word), str) and asked[word] in presets.names(kind):
            words[word] = asked[word]
    if "model" in words:
        words |= {word: value for word, value in training.items() if value is not None}
    return words


def _undisturbed(cluster: Cluster) -> Cluster:
    return cluster if cluster.disorder == Disorder() else msgspec.structs.replace(cluster, disorder=Disorder())


def _find_cluster(cluster: str | Path | Cluster | Mapping[str, object]) -> Cluster:
    if isinstance(cluster, Mapping) or (isinstance(cluster, str) and cluster == "unit"):
        return Cluster.from_builtins(cluster, "cluster")
    return presets.find_cluster(cluster)
