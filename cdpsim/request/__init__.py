"""A request: a schedule, a model, a cluster and how they run; read from options, and recorded as options.

`describe_request` has the model and the cluster in words, for titles and notes of pictures and tables. `requests_only`
lets commands read requests without a run, before they write to a file.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import DISORDER_OPTIONS, Disorder, disorder_of
from cdpsim.cluster.topology import NONE
from cdpsim.errors import RequestError, choose, one_line, refuse_unknown, short_repr
from cdpsim.files.config import preset_names
from cdpsim.files.units import in_number, short_text
from cdpsim.limits import refuse_too_large
from cdpsim.model import UNIT_MODELS, Model, Recipe
from cdpsim.model.layers import Operations
from cdpsim.model.runtime import PAPER, Runtime
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints
from cdpsim.program.assembly import counted_once
from cdpsim.program.collectives import DEFAULT
from cdpsim.request.options import (
    DEFAULTS,
    OPTION_NAMES,
    OPTIONS,
    SIGNATURE,
    TRAINING,
    CountRows,
    EngineName,
    Options,
    refuse_renamed,
    with_new_names,
)
from cdpsim.request.reading import (
    given_model,
    grid_of,
    memory_engine,
    on_teams,
    places_of,
    read_cluster,
    read_experiment,
    read_model,
    read_options,
    shaped_model,
    undisturbed,
)
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import Shape, Widths
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.state import Placed, State
from cdpsim.timing.costs import (
    Machine,
    machine_of,
    pyramid_of,
    reached,
    with_operation_times,
    with_transfer_times,
)

# The order of a record: that of its first version. Options that are not named here come last.
_ORDER = (
    *("schedule", "order", "n", "m", "steps", "counts", "warm_up", "local_steps", "outer", "chunks", "replicas"),
    *("stage_replicas", "shard", "zero", "buckets", "whole_first_step", "reduce", "reshard", "gather", "padding"),
    *("clip", "update_in", "by_layer", "rule", "prefetch", "slot_order", "collective"),
    *("expand_collectives", "rendezvous", "runtime", "contention", "ignore_memory", "run", *DISORDER_OPTIONS),
    *("seed", "model", "cluster"),
)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Request(Mapping[str, Any]):
    """A schedule of a model on a cluster, and how it runs: checked, alone and together, when it is made.

    `counts` says how many of its `m` micro-batches each replica has in each step: a row for each step.
    `order` is a list of actions for each device, of a schedule of any other name: `[["F0", "B0"], ["F0", "B0"]]`.
    `n` may be left out where the model says how many stages there are; a model with more stages is grouped into n.
    Without `steps`, a run has two steps more than pass before all tasks read what later steps read, or than its
    warm-up has, and at least 3. The training options (`optimizer`, `mixed_precision`, `gradients`, `update_time`,
    `recompute`, `offload`) are those of the model's file, where None.
    A model and a cluster may be given as a mapping, with the content of a file; a rule as its lags, in rows, or as a
    table of `lags`, `backward` and `barrier`. Without `collective`, each collective runs by the best algorithm where
    the cluster has a topology, and by recursive doubling elsewhere. `expand_collectives` runs every collective as the
    messages of its algorithm, and so does `contention` (fair or queue), by which messages share the links of their
    routes. `rendezvous` (megatron or torch) lets both ends of a message wait for each other where nothing overlaps.
    `runtime` (paper, torch, or a table of behaviours) says what is held beyond the schedule's needs; the model's,
    where None. `max_memory` is how much memory of this machine the run may take, in bytes or as "8 GB"; `ignore_memory`
    is about the simulated devices. Disturbances (`slow`, `jitter`, `link_jitter`, `stop`: objects, or texts as on the
    command line) are those of the cluster, where not given; `seed` and the number of the `run` decide all that is
    random.

    As a mapping, it has the options that make the same request again.

    >>> request = Request("multi-cdp", n=4, prefetch=1)
    >>> request.shape.m, request.steps, request["rule"]
    (4, 3, 'cdp-v2')
    >>> Request(**request).schedule is request.schedule
    True
    """

    __signature__ = SIGNATURE  # for help and completion: the options one by one

    schedule: Schedule
    model: Model  # grouped into stages and trained, by the options
    cluster: Cluster  # of the groups of ranks that do each task together, as one rank of each sees it, as `ranks` says
    machine: Cluster  # of single ranks, with what disturbs them
    rule: Rule
    shape: Shape
    steps: int
    prefetch: int
    zero: int  # the stage of ZeRO
    state: State
    slot_order: str
    counts: CountRows | None  # of each step and replica; None: always m
    collective: str | None  # None until `resolved` chooses it for the cluster and the program
    expand_collectives: bool
    contention: str
    rendezvous: str | None  # None: neither end of a message waits for the other
    runtime: Runtime
    disorder: Disorder
    seed: int
    run: int
    engine: EngineName
    ignore_memory: bool
    max_memory: str | float | None
    given: Mapping[str, Any]  # options of which the fields also depend on the model or the cluster, as they were given

    def __init__(self, schedule: str | Schedule, n: int | None = None, **options: Unpack[Options]) -> None:
        refuse_unknown(type(self).__name__, options, OPTION_NAMES, refuse_renamed)
        values = read_options({"schedule": schedule, "n": n} | DEFAULTS | options)
        self.__dict__.update({name: values[name] for name in _OWN_FIELDS})

    @classmethod
    def from_builtins(cls, options: Mapping[str, Any]) -> Self:
        """Return the request of options from `to_builtins`, also of an old record, or from a file."""
        options = with_new_names(options)
        for name in options:
            choose("request", name, OPTION_NAMES)
        if "schedule" not in options:
            raise RequestError("request", "has no schedule; give its name")
        return cls(**options)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the request in an experiment file, or the one that a summary.json records."""
        return cls.from_builtins(read_experiment(path))

    def to_builtins(self) -> dict[str, Any]:
        """Return the options that make the same request again, but for options that change nothing."""
        return deepcopy(self._record)

    def __getitem__(self, option: str) -> Any:
        return self._record[option]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)

    def __repr__(self) -> str:
        options: dict[str, Any] = {"n": self.shape.parts, "m": self.shape.m, "steps": self.steps}
        options |= {"model": self.model.name, "cluster": self.cluster.name}
        given = (f"{name}={short_repr(value, 40)}" for name, value in options.items())
        return one_line(f"Request({short_repr(self.schedule.name)}, {', '.join(given)})")

    @cached_property
    def _record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"schedule": self.schedule.name, "n": self.shape.parts}
        for name, option in OPTIONS.items():
            value = option.record(self) if option.record else self._recorded(name)
            if option.kept or (option.recorded and value is not None and value != option.default):
                found[name] = value
        places = {name: place for place, name in enumerate(_ORDER)}
        return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(places))))

    def _recorded(self, name: str) -> object:
        """Return the value of an option in a record; a model outside the package says itself how it is trained."""
        source = "model" if name in TRAINING else name
        if source in ("model", "cluster"):
            if isinstance(self.given[source], str) and self.given[source] in preset_names(f"{source}s"):
                return self.given[name]
            if source == "cluster":
                return undisturbed(self.machine).to_builtins()
            return self._recorded_model(name)
        if name in DISORDER_OPTIONS:
            return self.disorder_of_ranks.recorded(slots=self.in_slots).get(name)
        return self.__dict__.get(name, self.given[name])

    @property
    def disorder_of_ranks(self) -> Disorder:
        """The disorder by the ranks that were named, where `disorder` has that of their groups."""
        ranks, grid = self.model.mesh.team, self.cluster.grid
        if ranks == 1 and grid == (1, 1, 1):
            return self.disorder
        return self.disorder.renumbered(*grid[:2]).of_ranks(self.machine.disorder, ranks)

    def _recorded_model(self, name: str) -> object:
        """Return a model outside the package as its stages, or one of layers as its shape and options."""
        if self.model.layers is None:
            return None if name in TRAINING else self.model.to_builtins()
        return self.given[name] if name in TRAINING else given_model(self.given["model"], None).to_builtins()

    @cached_property
    def _counted_once(self) -> tuple[Model, tuple[Tie, ...]]:
        return counted_once(self.schedule, self.shape, self.rule, self.model)

    @property
    def local_ties(self) -> tuple[Tie, ...]:
        """The tied tensors whose stages are all on one device, where they are counted once."""
        return self._counted_once[1]

    @property
    def counted_model(self) -> Model:
        """The model with local ties counted once."""
        return self._counted_once[0]

    @cached_property
    def timed_model(self) -> Model:
        """The model with local ties counted once, and with the times of transfers to hosts."""
        return self._timed(self.pricing)

    def slowed_model(self, factor: float) -> Model | None:
        """Return the timed model of layers on devices so slow, with links as before; None of another model."""
        return self._timed(replace(self.pricing, factor=factor)) if self.pricing else None

    def loaded_model(self, load: float) -> Model | None:
        """Return the timed model with so much to do for experts of even loads; None of another model."""
        if self.pricing is None:
            return None
        mesh = replace(self.pricing.mesh, imbalance=load * self.pricing.mesh.imbalance)
        return self._timed(replace(self.pricing, mesh=mesh))

    def _timed(self, machine: Machine | None) -> Model:
        ranks = self.shape.sharers if self.zero else 1
        model = with_transfer_times(self.counted_model, self.cluster.host, self.cluster.nvme, ranks)
        if machine is None:
            return model
        return with_operation_times(model, machine, splits=self.schedule.splits(self.shape))

    @cached_property
    def pricing(self) -> Machine | None:
        """The machine on which the operations of a model of layers take their times; None of another model."""
        if not isinstance(self.model.stages[0].forward, Operations):
            return None
        near = self.cluster.grid != (1, 1, 1)  # the data ranks of a place
        places = 1 if near or self.model.mesh.expert == 1 else self.schedule.devices(self.shape)
        machine = machine_of(self.model, undisturbed(self.machine), self.given["collective"] or "best", places)
        alone = not self.state.streams or self.schedule.order.local is not None
        return machine and replace(machine, sums_context=alone and self.model.mesh.context > 1)

    @property
    def widths(self) -> Widths:
        """The number of devices of each stage, where given or where the placement derives it from times; else ()."""
        if not self.schedule.placement.exclusive:
            return self.shape.widths
        return pyramid_of(self.timed_model, self.shape.side_by_side, reached(self.cluster, 1, self.timed_model)[0])

    @property
    def in_slots(self) -> bool:
        """Whether times are slots; else they are seconds."""
        return self.model.is_unit

    @property
    def contends(self) -> bool:
        """Whether messages share links."""
        return self.contention != "none"

    @property
    def expands(self) -> bool:
        """Whether collectives run as messages: a collective in one piece is on no link that it could share."""
        return self.expand_collectives or self.contends

    def meeting(self, devices: int) -> str | None:
        """Return how both ends of a message wait for each other, where any device does nothing beside its messages."""
        return self.rendezvous if self.rendezvous and NONE in self.cluster.overlaps(devices) else None

    @property
    def may_fold(self) -> bool:
        """Whether replicas do the same at the same time, where their devices and links are alike.

        Nothing disturbs one of them or tells it apart, and they exchange only what each has a copy or a share of.
        """
        counts_differ = self.counts is not None and any(len({*row}) > 1 for row in self.counts)
        apart = counts_differ or self.expands or self.disorder != Disorder() or Placed.OWNED in self.state.placements
        return self.shape.replicas > 1 and not apart

    @property
    def memory_engine(self) -> str:
        """The engine whose need of memory is estimated."""
        return memory_engine(self.engine, self.contention)

    def resolved(self, *, sends: bool, sums: bool, devices: int) -> Self:
        """Return the request of a run on this number of devices, with its collective chosen.

        `sends` says whether the run has messages, `sums` whether it has collectives: these run by the best algorithm if
        the cluster has a topology. Disturbances of devices or messages that the run does not have are dropped.
        """
        disorder = self.disorder.within(devices)
        if not sends:
            disorder = msgspec.structs.replace(disorder, link_jitter="")
        best = sums and self.cluster.is_joined and not self.cluster.is_free
        return self._changed(disorder=disorder, collective=self.collective or ("best" if best else DEFAULT))

    def with_steps(self, steps: int, **changed: Any) -> Self:
        """Return the request with another number of training steps; refuse it if these do not fit."""
        request, shape = self._changed(steps=steps, **changed), self.shape
        parts = 3 if self.schedule.splits(shape) else 2
        size = shape.n, shape.m, steps, request.memory_engine, self.max_memory
        steps_of = partial(self.schedule.order.steps, shape=shape)
        replicas = 1 if self.may_fold else shape.replicas
        refuse_too_large(*size, replicas=replicas, parts=parts, slots=self.in_slots, steps_of=steps_of)
        return request

    def with_micro_batches(self, m: int) -> Self:
        """Return the request with another number of micro-batches, for a schedule that takes any; its rule goes along.

        Whether the schedule takes that many shows when the program is assembled.
        """
        schedule = self.schedule
        shape = replace(self.shape, m=m, workers=schedule.workers(self.shape.parts, m))
        usual = self.rule == schedule.rule_of(self.shape)
        return self._changed(shape=shape, rule=schedule.rule_of(shape) if usual else self.rule)

    def first_of(self, data: int) -> Self:
        """Return the request, of one data rank, on the devices of the first of `data` ones."""
        grid = grid_of(self.schedule, replace(self.shape, replicas=data), self.given["ranks"], self.model.mesh)
        teams = on_teams(self.machine, self.machine.disorder, self.model.mesh.team, grid)
        return self if grid == self.cluster.grid[:2] else self._changed(**teams)

    def with_limit(self, max_memory: str | float | None) -> Self:
        """Return the request with another limit of the memory that a run may take of this machine."""
        return self._changed(max_memory=max_memory)

    def with_rounds(self, counts: Ints) -> Self:
        """Return the request with counts that were found; refuse it if its tasks do not fit."""
        size = self.shape.n, self.shape.m, self.steps, self.memory_engine, self.max_memory
        tasks = 2 * self.shape.n * int(counts.sum())
        refuse_too_large(*size, replicas=self.shape.replicas, slots=self.in_slots, tasks=tasks)
        return self._changed(counts=tuple(map(tuple, counts.tolist())))

    @property
    def may_vary(self) -> bool:
        """Whether the time of a task or message is another one each time: by chance, stops, or others on its links."""
        return self.disorder.is_random or bool(self.disorder.stop) or self.expands

    @property
    def counts_vary(self) -> bool:
        """Whether counts of rounds follow from no recurrence: times vary, or messages wait for tasks."""
        return self.may_vary or any(group.overlap == NONE for group in self.cluster.devices)

    def fixed(self, steps: int) -> Self:
        """Return the request of a run of `steps` steps in mean times and without contention."""
        disorder = msgspec.structs.replace(self.disorder, jitter="", link_jitter="", stop=())
        return self.alone()._changed(steps=steps, counts=None, disorder=disorder, seed=0, run=0)

    def alone(self) -> Self:
        """Return the request of a run in which each message is alone on its links."""
        return self._changed(contention="none", expand_collectives=False, ignore_memory=True, engine="auto")

    def with_run(self, number: int) -> Self:
        """Return the request of another run by chance, of which no counts of rounds are known."""
        return self._changed(run=number, counts=None if self.schedule.order.rounds else self.counts)

    def without_chance(self) -> Self:
        """Return the request of the run in mean times, without limits of memory."""
        disorder = msgspec.structs.replace(self.disorder, jitter="", link_jitter="")
        return self._changed(disorder=disorder, seed=0, run=0, ignore_memory=True)

    def of(self, model: str | Path | Model, cluster: str | Path | Cluster) -> Self:
        """Return the same request of another model, with the same stages and training, and of another cluster."""
        own = cluster is self.cluster or (cluster == self.cluster != undisturbed(self.machine))  # of groups of ranks
        found = self.machine if own else read_cluster(cluster)
        disturbances = {name: self.given[name] for name in DISORDER_OPTIONS if self.given[name]}
        others: dict[str, Any] = {} if model is self.model else {"model": model}
        others |= {} if own else {"cluster": cluster}
        other = model if isinstance(model, Model) and model is self.model else self._other_model(model)
        disorder = msgspec.structs.replace(found.disorder, **disturbances).effective()
        return self._changed(
            model=other,
            **on_teams(found, disorder, self.model.mesh.team, self.cluster.grid[:2]),
            runtime=self.given["runtime"] or other.runtime,
            collective=self.given["collective"],
            given={**self.given, **others},
        )

    def _other_model(self, model: str | Path | Model) -> Model:
        """Return a model cut and trained by the request's options; refuse one of another unit of time."""
        n, layers = self.shape.n, self.shape.layers
        if not (isinstance(model, Model) and model.n == n and model.training == Recipe()):
            _, shaped = shaped_model(model, self.given)
            model = read_model(shaped, None if layers else n, self.given, places_of(self.schedule, layers))
        if model.is_unit != self.in_slots:
            problem = "is of slots" if model.is_unit else "is of seconds and bytes"
            raise RequestError("model", f"{problem}, and this request's is not; make another request")
        return model.split(self.schedule.name) if self.schedule.splits(self.shape) else model

    def _changed(self, **changed: Any) -> Self:
        """Return the request with other values of some fields, which agree with the rest."""
        other, values = object.__new__(type(self)), self.__dict__
        other.__dict__.update({name: values[name] for name in _OWN_FIELDS} | changed)
        if not changed.keys() & {"model", "cluster"}:
            other.__dict__.update(_counted_once=self._counted_once, timed_model=self.timed_model)
        return other


_OWN_FIELDS = tuple(field.name for field in fields(Request))


MEMORY_LEAVES_OUT = "without CUDA context and allocator reserve"


def memory_note(workspaces: Iterable[int]) -> str:
    """Return what the memory of runs has beside tensors, by the most that kernels take, and what it leaves out."""
    most = max(workspaces, default=0)
    beside = f"with {short_text(most, 'B')} of workspaces, " if most else ""
    return f"memory is {beside}{MEMORY_LEAVES_OUT}"


def describe_request(request: Mapping[str, Any]) -> list[str]:
    """Return model, optimizer, samples, precision, cluster and runtime of a request, if known.

    The request of a loaded trace may be anything: where it makes no request, its tables are described as they are.
    """
    if not isinstance(request, Request):
        try:
            request = Request.from_builtins(request)
        except (ValueError, TypeError, KeyError, AttributeError):
            return _describe_record(request)
    return describe_setup(request.model, request.cluster, request.runtime)


def describe_setup(model: Model, cluster: Cluster, runtime: Runtime) -> list[str]:
    """Return the same description of a model, a cluster and a runtime; nothing in the slot model, on paper."""
    has_state = any(stage.optimizer or stage.host_optimizer for stage in model.stages)
    words = [] if model.is_unit else _describe_model(model.name, model.samples, model.precision, has_state=has_state)
    words += [] if cluster.is_unit else [cluster.name or "a cluster"]
    return words if runtime == PAPER else [*words, f"runtime {runtime}"]


def _describe_record(request: Mapping[str, Any]) -> list[str]:
    model, cluster = request.get("model"), request.get("cluster")
    words = []
    if isinstance(model, dict):
        stages = model.get("stages")
        tables = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        has_state = any(stage.keys() & {"optimizer", "host_optimizer"} for stage in tables)
        words = _describe_model(*map(model.get, ("name", "samples", "precision")), has_state=has_state)
    return [*words, str(cluster.get("name") or "a cluster")] if isinstance(cluster, dict) else words


def _describe_model(name: object, samples: object, precision: object, *, has_state: bool) -> list[str]:
    """Return the description of a model, whose name ends in its training recipe."""
    words = [str(name or "a model"), *["no optimizer state"] * (not has_state)]
    words += [f"{samples} {in_number(samples, 'sample')} a micro-batch"] if samples else []
    return words + ([str(precision)] if precision else [])


def describe_disorder(request: Mapping[str, Any]) -> list[str]:
    """Return what disturbs a run, by its recorded request; that of a loaded trace is unchecked."""
    recorded = {name: request[name] for name in DISORDER_OPTIONS if name in request}
    try:
        return disorder_of(Disorder(), **recorded, slots=request.get("model") in UNIT_MODELS).words()
    except RequestError:
        return ["disturbed"]


def describe_untied(stages: tuple[int, ...], schedules: list[str]) -> str:
    """Return which schedules leave tied stages untied, and why."""
    tied, untying = " and ".join(map(str, stages)), ", ".join(schedules)
    return f"tied stages {tied} are untied in {untying}: steps are not flushed there, and each has a tensor of its own"


_IS_CHECK: ContextVar[bool] = ContextVar("is_check", default=False)


class CheckEnded(Exception):
    """The end of a check that found nothing wrong with a request; there is no run."""


@contextmanager
def requests_only() -> Iterator[None]:
    """End each simulation inside with `CheckEnded` when its request is read."""
    token = _IS_CHECK.set(True)
    try:
        yield
    finally:
        _IS_CHECK.reset(token)


def end_check() -> None:
    """Raise `CheckEnded` inside `requests_only`."""
    if _IS_CHECK.get():
        raise CheckEnded
