"""The candidates of a plan: all options of a request for each of them, or why it cannot be asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from cdpsim.errors import RequestError
from cdpsim.files.units import counted
from cdpsim.limits import UNLIMITED
from cdpsim.model import UNIT_MODELS
from cdpsim.model.layers import CONTEXT, EXPERT
from cdpsim.program.assembly import check_causal
from cdpsim.request import Request
from cdpsim.request.sharing import SHARING, accepts
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.schedules.rule import RULES
from cdpsim.schedules.state import MOST_SPLIT
from cdpsim.studies.compare import Measured
from cdpsim.studies.equal_shapes import equal_shape, ranks_of, samples_of, team_of, teams_among
from cdpsim.studies.plan.bounds import case_of
from cdpsim.studies.plan.wanted import OBJECTIVES, Variant, Wanted, divisors

Found = TypeVar("Found")
FATES = ("cannot be asked", "too large", "cannot be better", "simulated", "open")
REFUSED, TOO_LARGE, WORSE, SIMULATED, OPEN = FATES
_IN_STATE = (*SHARING, "compress", "prefetch")  # all that these do is in the request's state and prefetch
_LEAST_SECONDS = 1.0  # for the list of candidates
_GROUPED = (None, 1, 2, 4)  # stages of data parallelism: all layers, or groups of them


class Point(NamedTuple):
    """The metrics of a candidate, each of which is the better the less it is."""

    step: float
    memory: float
    devices: int
    staleness: float

    def key(self, objective: str) -> tuple[float, ...]:
        """Return the metrics in the order in which an objective sorts."""
        first = getattr(self, OBJECTIVES[objective])
        return (first, *(value for name, value in self._asdict().items() if name != OBJECTIVES[objective]))

    def dominates(self, other: "Point") -> bool:
        """Return whether it is at least as good in all metrics, and better in one."""
        return self != other and all(mine <= its for mine, its in zip(self, other, strict=True))


@dataclass(eq=False)
class Candidate:
    """The options of a request, and its result: a refusal, bounds, or a simulation.

    `case` is the number of the same request without data ranks.
    """

    options: Mapping[str, Any]
    devices: int
    case: int = -1
    staleness: float = 0.0
    refusal: RequestError | None = None
    near: tuple[int, ...] = ()  # of a refusal of the batch: batches that it could have
    fits: bool = False  # once it is simulated
    bounded: bool = False
    measured: Measured | None = None

    def __post_init__(self) -> None:
        self.fate = REFUSED if self.refusal else OPEN
        self.least = Point(0.0, 0.0, self.devices, self.staleness)  # the least metrics that are known

    @cached_property
    def point(self) -> Point:
        """The metrics of its simulation; all candidates have the same batch.

        Steps are equal if eleven digits are: those behind depend on the order of sums and the size of quanta.
        """
        assert self.measured is not None
        step, memory = float(f"{float(self.measured.step):.11g}"), float(self.measured.memory)
        return Point(step, memory, self.measured.ranks, self.measured.staleness)

    def equals(self, other: "Candidate") -> bool:
        """Return whether the metrics of another simulation differ by a thousandth at most."""
        if not self.measured or not other.measured:
            return False
        mine = (*self.point, float(self.measured.sent))
        its = (*other.point, float(other.measured.sent))
        return all(abs(a - b) <= abs(a) / 1000 for a, b in zip(mine, its, strict=True))


class Space(NamedTuple):
    """The candidates, a request for each of their cases, and whether there was time to list all."""

    candidates: list[Candidate]
    cases: list[Request]
    complete: bool


class _Structure(NamedTuple):
    """A schedule and its sizes: of one data rank. `ranks` run it on so many devices."""

    schedule: Schedule
    n: int | None
    m: int | None
    chunks: int | None
    devices: int
    ranks: int
    rule: str | None = None
    refusal: RequestError | None = None
    near: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of a request for it."""
        sizes = {"n": self.n, "m": self.m, "chunks": self.chunks, "rule": self.rule}
        return {"schedule": self.schedule.name} | {name: size for name, size in sizes.items() if size is not None}

    def refused(self, subject: str, problem: str, near: Sequence[int] = ()) -> "_Structure":
        """Return the structure with the refusal of a request for it."""
        return self._replace(refusal=RequestError(subject, problem), near=tuple(size for size in near if size))


def find_candidates(wanted: Wanted) -> Space:
    """Return all candidates in an order that depends on nothing else: schedules as given, then sizes, then options.

    In slots backwards of all take two slots if those of some are split.
    """
    space = _Lister(wanted).space()
    if not wanted.in_slots or {case.model.name for case in space.cases} != {*UNIT_MODELS}:
        return space
    split = {"model": UNIT_MODELS[1]}
    variants = tuple(each._replace(options={**each.options, **split}) for each in wanted.variants)
    return _Lister(replace(wanted, variants=variants)).space()


class _Lister:
    """A list of candidates in the making: what has been read serves all that have it in common."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.cases = wanted, list[Request]()
        self._read: dict[object, Any] = {}

    def space(self) -> Space:
        """Return all candidates that there is time for."""
        found: dict[object, Candidate] = {}
        for key, candidate in self._all():
            if found and self.wanted.is_late(least=_LEAST_SECONDS):
                return Space([*found.values()], self.cases, complete=False)
            found.setdefault(key, candidate)
            if len(found) > (most := self.wanted.most_candidates):
                problem = f"more than {most:,} candidates do not fit; allow more, or give --schedules or fewer values"
                raise RequestError("max-memory", problem)
        return Space([*found.values()], self.cases, complete=True)

    def _all(self) -> Iterator[tuple[object, Candidate]]:
        for schedule in _schedules(self.wanted):
            for devices in divisors(self.wanted.devices) if self.wanted.fewer else [self.wanted.devices]:
                for variant in _variants_taken(self.wanted, schedule):
                    for sized in _sizes(self.wanted, schedule, devices, variant):
                        if self.wanted.allows("m", sized.m) or sized.m is None:
                            for structure in self._with_rules(sized):
                                yield from self._with_data_ranks(structure, variant)

    def _with_rules(self, sized: _Structure) -> Iterator[_Structure]:
        """Yield a structure with its own rule, and with others where it takes them."""
        order, own = sized.schedule.order, sized.schedule.rule.name
        if sized.refusal or order.together or not order.waits or self.wanted.allows("rule", own):
            yield sized
        if not sized.refusal and order.waits and not order.together:
            yield from (sized._replace(rule=rule) for rule in self.wanted.axes.get("rule", RULES) if rule != own)

    def _with_data_ranks(self, structure: _Structure, variant: Variant) -> Iterator[tuple[object, Candidate]]:
        """Yield the candidates of a structure with each data axis, each behind what tells it from others."""
        sizes = structure.schedule.name, *structure[1:7]
        ranks = structure.devices * team_of(variant.options)
        if structure.refusal:
            options = {**structure.options, **variant.options}
            one = Candidate(options, ranks, refusal=structure.refusal, near=structure.near)
            yield (sizes, variant.key), one
            return
        for data in _data_axes(self.wanted, structure.schedule, structure.ranks, variant):
            options = {**structure.options, **data, **variant.options}
            case, staleness, refusal = -1, 0.0, None
            key: tuple[object, ...] = variant.key
            by_number = {"reshard", EXPERT} & variant.options.keys()
            few = data if by_number else {name: min(size, 3) for name, size in data.items()}
            try:
                case, staleness = self._once(("case", sizes, variant.key), self._read_case, structure, variant)
                of_ranks = (structure.schedule.name, structure.rule, *few.items(), variant.key)
                key = self._once(of_ranks, _key_with_data_ranks, structure, variant, few)
                if self.wanted.staleness is not None and staleness > self.wanted.staleness:
                    problem = f"is {staleness:.3g} on average, more than {self.wanted.staleness:g}; allow more"
                    raise RequestError("staleness", problem)
            except RequestError as error:
                refusal = error
            one = Candidate(options, ranks, case, staleness, refusal)
            yield (sizes, *data.items(), key), one

    def _once(self, key: object, read: Callable[..., Found], *given: Any) -> Found:
        """Return what has been read once, or raise its refusal."""
        if key not in self._read:
            try:
                self._read[key] = read(*given)
            except RequestError as error:
                self._read[key] = error
        found = self._read[key]
        if isinstance(found, RequestError):
            raise found
        return found  # type: ignore[no-any-return]

    def _read_case(self, structure: _Structure, variant: Variant) -> tuple[int, float]:
        """Return the number of a structure's case, and its staleness."""
        asked = {**structure.options, **variant.options, "schedule": structure.schedule}
        request = case_of(asked, structure.ranks)
        check_causal(request.schedule, request.rule, request.shape)
        self.cases.append(request)
        return len(self.cases) - 1, float(request.rule.lags(request.shape).mean())


def _key_with_data_ranks(structure: _Structure, variant: Variant, data: Mapping[str, int]) -> tuple[object, ...]:
    """Return the facts that options come to with data ranks; refuse what these cannot have."""
    options = {**structure.options, **variant.options, **data, "schedule": structure.schedule}
    request = Request(**{**options, "ignore_memory": True, "max_memory": UNLIMITED})
    others = (pair for pair in variant.key if pair[0] not in _IN_STATE)
    return *others, request.state, request.prefetch


def _sizes(wanted: Wanted, schedule: Schedule, ranks: int, variant: Variant) -> Iterator[_Structure]:
    """Yield the structures of so many ranks, of which groups are devices."""
    try:
        devices = teams_among(variant.options, ranks)
    except RequestError as error:
        if not wanted.fewer:
            yield _Structure(schedule, None, None, None, ranks // team_of(variant.options), 1, refusal=error)
        return
    sizes = _pipelines_of if accepts(schedule, "replicas") else _grids
    yield from sizes(wanted, schedule, devices, variant)


def _variants_taken(wanted: Wanted, schedule: Schedule) -> Iterator[Variant]:
    """Yield the variants without the options that a schedule does not take, each once."""
    taken = {}
    for variant in wanted.variants:
        options = {name: value for name, value in variant.options.items() if accepts(schedule, name)}
        key = tuple(pair for pair in variant.key if pair[0] in options)
        taken[key] = variant._replace(options=options, key=key)
    yield from taken.values()


def _schedules(wanted: Wanted) -> list[Schedule]:
    """Return the schedules, and data parallelism for pipelines of one stage."""
    dp = SCHEDULES["dp"]
    one_stage = wanted.allows("n", 1) and any(map(_has_lengths, wanted.schedules))
    return [*wanted.schedules, *[dp] * (one_stage and dp not in wanted.schedules)]


def _has_lengths(schedule: Schedule) -> bool:
    """Return whether a schedule is a pipeline of the package, of several lengths."""
    named = schedule.name in SCHEDULES and schedule.shape is None
    return named and accepts(schedule, "replicas") and not schedule.order.one_place


def _pipelines_of(wanted: Wanted, schedule: Schedule, devices: int, variant: Variant) -> Iterator[_Structure]:
    """Yield pipelines of all lengths that divide the devices, with as many data ranks as there is room for.

    One of a single stage is data parallelism, of all layers or of groups of them, which is listed by itself.
    """
    for n, chunks, places in _lengths(wanted, schedule, devices, variant):
        if n == 1 and _has_lengths(schedule):
            continue
        ranks, rest = divmod(devices, places)
        structure = _Structure(schedule, n, None, chunks, devices, max(ranks, 1))
        if rest:
            problem = f"{devices} are no multiple of the {places} of {schedule.name}; give a multiple"
            yield structure.refused("devices", problem)
        else:
            yield _with_batch(wanted, structure, variant)


def _lengths(
    wanted: Wanted, schedule: Schedule, devices: int, variant: Variant
) -> Iterator[tuple[int | None, int | None, int]]:
    """Yield the stages, the chunks and the devices of pipelines."""
    if schedule.shape is not None:
        if wanted.allows("n", schedule.shape.n):
            yield schedule.shape.n, None, schedule.actions(schedule.shape).devices
    elif schedule.order.one_place:
        for n in (variant.slots_n,) if variant.slots_n else wanted.axes.get("n", _GROUPED):
            if n is None or n <= variant.stages:
                yield n, None, 1
    else:
        for places in divisors(devices):
            for chunks in _chunks(wanted, schedule, places, variant):
                if wanted.allows("n", places * chunks):
                    yield places * chunks, chunks if schedule.order.any_chunks else None, places


def _chunks(wanted: Wanted, schedule: Schedule, places: int, variant: Variant) -> list[int]:
    """Return the numbers of stages of a device: the usual one, and where any may be taken its doubles."""
    usual = schedule.order.chunks
    if not schedule.order.any_chunks:
        return [usual]
    if "chunks" in wanted.axes:
        return sorted({*wanted.axes["chunks"]})
    doubled = (usual * 2**k for k in range(1, variant.stages.bit_length()))
    return [usual, *(chunks for chunks in doubled if places * chunks <= variant.stages)]


def _grids(wanted: Wanted, schedule: Schedule, devices: int, variant: Variant) -> Iterator[_Structure]:
    """Yield the sizes of a schedule whose stages and micro-batches decide on its devices."""
    for n in (variant.slots_n,) if variant.slots_n else wanted.axes.get("n", (None,)):
        structure = _Structure(schedule, n, None, None, devices, 1)
        if (variant.slots_n or 1) > wanted.most_passes:
            yield _too_many(wanted, structure, variant.stages, 1)
            continue
        try:
            asked = {**variant.options, **({} if n is None else {"n": n})}
            shape = equal_shape(schedule, asked, devices * team_of(asked), None)
        except RequestError as error:
            yield structure._replace(refusal=error)
            continue
        m = shape["m"] if accepts(schedule, "m") else None
        yield _with_batch(wanted, structure._replace(n=shape.get("n", n), m=m), variant, fixed=shape["m"])


def _too_many(wanted: Wanted, structure: _Structure, n: int, m: int) -> _Structure:
    """Return a structure with the refusal of its stages and micro-batches."""
    passes = f"{counted(n, 'stage')} and {counted(m, 'micro-batch')} are more than {wanted.most_passes:,} passes"
    remedy = "give fewer devices, a smaller batch or another n"
    return structure.refused("batch" if m > n else "n", f"{passes} through stages; {remedy}")


def _with_batch(wanted: Wanted, structure: _Structure, variant: Variant, *, fixed: int | None = None) -> _Structure:
    """Return a structure with the micro-batches that make the batch; with a refusal if none do.

    `fixed` is the number of micro-batches of a schedule whose devices follow from it.
    """
    schedule, n = structure.schedule, structure.n or variant.stages
    each = structure.ranks * samples_of(variant.options)
    if not schedule.order.waits:
        problem = f"{schedule.name} has steps of no given batch, as its workers go on alone; compare it with `compare`"
        return structure.refused("batch", problem)
    if accepts(schedule, "m") and (fixed is None or schedule.order.accumulates):
        m, rest = divmod(wanted.batch, each)
        if m and not rest:
            if n * m > wanted.most_passes:
                return _too_many(wanted, structure, n, m)
            return structure._replace(m=m)
        near, remedy = [m * each, (m + 1) * each], f"no multiple of {each}; give one"
    else:
        own = (fixed or schedule.micro_batches(n)) * each
        if own == wanted.batch:
            return structure if n * own <= wanted.most_passes else _too_many(wanted, structure, n, own)
        near, remedy = [own], f"not its own {own}; give these, or leave the schedule out"
    devices = counted(structure.devices, "device")
    problem = f"{wanted.batch} samples are no training step of {schedule.name} on {devices}: {remedy}"
    return structure.refused("batch", problem, near)


def _data_axes(wanted: Wanted, schedule: Schedule, ranks: int, variant: Variant) -> Iterator[dict[str, int]]:
    """Yield replicas, ranks that share states, and the stage of ZeRO, for so many data ranks, where they are not 1.

    Ranks that split the sequence share states, too. Ranks of experts that do not fit are left out where none are given.
    """
    splits = accepts(schedule, "shard") and (variant.slots_n is None or "shard" in wanted.axes)
    for shard in divisors(ranks) if splits else [1]:
        among_context = splits and shard == 1 and ranks_of(variant.options, CONTEXT) > 1
        for zero in range(shard > 1, (MOST_SPLIT if shard > 1 or among_context else 0) + 1):
            data = {"replicas": ranks // shard, "shard": shard, "zero": zero}
            fits = EXPERT in wanted.axes or _has_experts(variant, shard if zero else ranks)
            if fits and all(wanted.allows(name, value) for name, value in data.items()):
                alone = among_context and zero > 0
                yield {name: value for name, value in data.items() if value > (name != "zero") or alone}


def _has_experts(variant: Variant, ranks: int) -> bool:
    """Return whether so many data ranks, which have copies or shares of the same, can split experts."""
    team, experts = team_of(variant.options), ranks_of(variant.options, EXPERT)
    return team * ranks % experts == 0 and 0 in (team % experts, experts % team)


def values_left_out(space: Space, wanted: Wanted) -> list[str]:
    """Return the values of sizes that were asked for and that no candidate has, with the reason."""
    said = []
    for name in (axis for axis in wanted.axes if not (axis == "n" and wanted.in_slots)):
        every = [(one.options.get(name, 0 if name == "zero" else 1), one.refusal) for one in space.candidates]
        for value in wanted.axes[name]:
            refusals = [refusal for other, refusal in every if other == value]
            if space.complete and None not in refusals and name != "rule":
                devices = counted(wanted.devices, "device")
                why = str(refusals[0]) if refusals else f"no candidate on {devices} with this batch has it"
                said.append(f"{name} {value} is left out: {why}")
    return said


def refuse_without_candidates(space: Space, wanted: Wanted) -> None:
    """Refuse a plan none of whose candidates can be asked, by what is wrong with most of them."""
    refusals = [one.refusal for one in space.candidates if one.refusal]
    if len(refusals) < len(space.candidates) or not space.complete:
        return
    near: dict[int, set[str]] = {}
    for one in space.candidates:
        for size in one.near:
            near.setdefault(size, set()).add(one.options["schedule"])
    below, above = sorted(s for s in near if s < wanted.batch)[::-1], sorted(s for s in near if s > wanted.batch)
    found = [next((str(s) for s in sizes if _is_possible(wanted, s, near[s])), "") for sizes in (below, above)]
    if nearest := [size for size in found if size]:
        problem = f"no candidate trains on {counted(wanted.batch, 'sample')} on {counted(wanted.devices, 'device')}"
        which = f"batches are {' and '.join(nearest)}" if len(nearest) > 1 else f"batch is {nearest[0]}"
        raise RequestError("batch", f"{problem}; the nearest {which}")
    if near and wanted.is_late(least=_LEAST_SECONDS):
        devices = counted(wanted.devices, "device")
        problem = f"{wanted.batch} samples are no training step on {devices}"
        raise RequestError("batch", f"{problem}; give more, or fewer devices")
    if not refusals:
        given = ", ".join(wanted.axes) or "schedules"
        raise RequestError(given, f"leave no candidate on {wanted.devices} devices; allow more values")
    subjects = [refusal.subject for refusal in refusals]
    raise max(refusals, key=lambda refusal: subjects.count(refusal.subject))


def _is_possible(wanted: Wanted, batch: int, names: set[str]) -> bool:
    """Return whether one of some schedules has a candidate with a batch."""
    schedules = tuple(schedule for schedule in wanted.schedules if schedule.name in names or schedule.name == "dp")
    if wanted.is_late(least=_LEAST_SECONDS):
        return False
    other = find_candidates(replace(wanted, batch=batch, schedules=schedules))
    return any(one.refusal is None for one in other.candidates)
