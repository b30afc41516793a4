"""The candidates of a plan: all options of a request for each of them, or why it cannot be asked."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cdpsim.errors import RequestError, UnknownName
from cdpsim.files.units import counted
from cdpsim.model import UNIT_MODELS
from cdpsim.request import Request
from cdpsim.request.sharing import accepts
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import RULES
from cdpsim.schedules.state import MOST_SPLIT
from cdpsim.studies.equal_shapes import equal_shape, samples_of
from cdpsim.studies.plan.parts import CandidateParts, Structure, Variant
from cdpsim.studies.plan.wanted import Wanted


class Candidate(NamedTuple):
    """A request that may be asked: its options, its devices and its staleness; the refusal of one that cannot be asked.

    `case` is the number of the part of it of which loads are known, and `twin` that of an earlier candidate that is the
    same program.
    """

    options: Mapping[str, Any]
    devices: int
    case: int = -1
    staleness: float = 0.0
    refusal: RequestError | None = None
    twin: int | None = None
    near: tuple[int, ...] = ()  # of a refusal of the batch: batches that it could have


class Space(NamedTuple):
    """All candidates, and a request for each of their cases."""

    candidates: list[Candidate]
    cases: list[Request]


class _Sized(NamedTuple):
    """A structure on its devices, and how many data ranks run it."""

    structure: Structure
    devices: int
    ranks: int
    refusal: RequestError | None = None
    near: tuple[int, ...] = ()


def find_candidates(wanted: Wanted) -> Space:
    """Return all candidates in an order that depends on nothing else: schedules as given, then sizes, then options.

    In slots backwards of all take two slots if those of some are split.
    """
    space = _candidates_as_they_are(wanted)
    if wanted.in_slots and {case.model.name for case in space.cases} == {*UNIT_MODELS}:
        space = _candidates_as_they_are(wanted.split())
    return space


def _candidates_as_they_are(wanted: Wanted) -> Space:
    parts, candidates = CandidateParts(), list[Candidate]()
    same: dict[object, int] = {}
    for schedule in wanted.schedules:
        for devices in divisors(wanted.devices) if wanted.fewer else [wanted.devices]:
            known: set[object] = set()
            for variant in {each.key: each for each in _variants_taken(wanted, schedule)}.values():
                for sized in _sized(wanted, parts, schedule, devices, variant):
                    for candidate, key in _candidates_of(wanted, parts, sized, variant):
                        if key in known:
                            continue
                        known.add(key)
                        number = len(candidates)
                        if candidate.refusal is None:
                            twin = same.setdefault((devices, parts.program_key(candidate.case, key)), number)
                            candidate = candidate._replace(twin=None if twin == number else twin)
                        candidates.append(candidate)
    return Space(candidates, parts.cases)


def _variants_taken(wanted: Wanted, schedule: Schedule) -> Iterator[Variant]:
    """Yield the variants without the options that a schedule does not take."""
    for variant in wanted.variants:
        yield variant.keep([name for name in variant.options if accepts(schedule, name)])


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    found, rest, factor = {1}, number, 2
    while rest > 1:
        if factor * factor > rest:
            factor = rest  # which is prime
        if rest % factor:
            factor += 1
        else:
            rest //= factor
            found |= {factor * divisor for divisor in found}
    return sorted(found)


def _sized(
    wanted: Wanted, parts: CandidateParts, schedule: Schedule, devices: int, variant: Variant
) -> Iterator[_Sized]:
    """Yield all sizes of a schedule on so many devices, each with all rules that it may take."""
    sizes = _pipelines_of if accepts(schedule, "replicas") else _grids
    for sized in sizes(wanted, schedule, devices, variant):
        m = sized.structure.m
        if m is not None and not wanted.allows("m", m):
            continue
        if sized.refusal is not None:
            yield sized
            continue
        for rule in _rules(wanted, parts, sized.structure, variant):
            yield sized._replace(structure=sized.structure._replace(rule=rule))


def _pipelines_of(wanted: Wanted, schedule: Schedule, devices: int, variant: Variant) -> Iterator[_Sized]:
    """Yield pipelines of all lengths that divide the devices, with as many data ranks as there is room for."""
    for n, chunks, places in _lengths(wanted, schedule, devices, variant):
        ranks, rest = divmod(devices, places)
        structure = Structure(schedule, n, None, chunks)
        if rest:
            problem = f"{devices} are no multiple of the {places} of {schedule.name}; give a multiple"
            yield _Sized(structure, devices, 1, RequestError("devices", problem))
        else:
            yield _with_batch(wanted, _Sized(structure, devices, ranks), variant)


def _lengths(
    wanted: Wanted, schedule: Schedule, devices: int, variant: Variant
) -> Iterator[tuple[int | None, int | None, int]]:
    """Yield the stages, the chunks and the devices of pipelines."""
    if schedule.shape is not None:
        if wanted.allows("n", schedule.shape.n):
            yield schedule.shape.n, None, schedule.actions(schedule.shape).devices
        return
    if schedule.order.one_place:
        yield variant.slots_n, None, 1
        return
    for places in divisors(devices):
        for chunks in _chunks(wanted, schedule, places, variant):
            n = places * chunks
            if wanted.allows("n", n):
                yield n, chunks if schedule.order.any_chunks else None, places


def _chunks(wanted: Wanted, schedule: Schedule, places: int, variant: Variant) -> list[int]:
    """Return the numbers of stages of a device: the usual one, and where any may be taken its doubles."""
    usual = schedule.order.chunks
    if not schedule.order.any_chunks:
        return [usual]
    if "chunks" in wanted.axes:
        return sorted({*wanted.axes["chunks"]})
    doubled = (usual * 2**k for k in range(1, variant.stages.bit_length()))
    return [usual, *(chunks for chunks in doubled if places * chunks <= variant.stages)]


def _grids(wanted: Wanted, schedule: Schedule, devices: int, variant: Variant) -> Iterator[_Sized]:
    """Yield the sizes of a schedule whose stages and micro-batches decide on its devices."""
    asked = (variant.slots_n,) if variant.slots_n else wanted.axes.get("n", (None,))
    for n in asked:
        options = {**variant.options, **({} if n is None else {"n": n})}
        try:
            shape = equal_shape(schedule, options, devices, None)
        except RequestError as error:
            yield _Sized(Structure(schedule, n, None, None), devices, 1, error)
            continue
        n, m = shape.get("n", n), shape["m"]
        structure = Structure(schedule, n, m if accepts(schedule, "m") else None, None)
        yield _with_batch(wanted, _Sized(structure, devices, 1), variant, fixed=m)


def _with_batch(wanted: Wanted, sized: _Sized, variant: Variant, *, fixed: int | None = None) -> _Sized:
    """Return a size with the micro-batches that make the batch; with a refusal if none do.

    `fixed` is the number of micro-batches of a schedule whose devices follow from it.
    """
    schedule, n = sized.structure.schedule, sized.structure.n
    each = sized.ranks * samples_of(variant.options)
    if not schedule.order.waits:
        problem = f"{schedule.name} has steps of no given batch, as its workers go on alone; compare it with `compare`"
        return sized._replace(refusal=RequestError("batch", problem))
    if accepts(schedule, "m") and (fixed is None or schedule.order.accumulates):
        m, rest = divmod(wanted.batch, each)
        if m and not rest:
            return sized._replace(structure=sized.structure._replace(m=m))
        near, remedy = [m * each, (m + 1) * each], f"no multiple of {each}; give one"
    else:
        own = (fixed or schedule.micro_batches(n or variant.stages)) * each
        if own == wanted.batch:
            return sized
        near, remedy = [own], f"not its own {own}; give these, or leave the schedule out"
    problem = f"{wanted.batch} samples are no training step of {schedule.name} on {counted(sized.devices, 'device')}"
    refusal = RequestError("batch", f"{problem}: {remedy}")
    return sized._replace(refusal=refusal, near=tuple(size for size in near if size))


def _rules(wanted: Wanted, parts: CandidateParts, structure: Structure, variant: Variant) -> Iterator[str | None]:
    """Yield the rules of a structure: None for the schedule's own, and those that read other versions than it."""
    order = structure.schedule.order
    others = () if order.together or not order.waits else tuple(wanted.axes.get("rule", RULES))
    named = {rule: parts.reads_as_usual(structure._replace(rule=rule), variant) for rule in others}
    if "rule" not in wanted.axes or any(named.values()) or structure.schedule.rule.name in wanted.axes["rule"]:
        yield None
    yield from (rule for rule, usual in named.items() if not usual)


def _candidates_of(
    wanted: Wanted, parts: CandidateParts, sized: _Sized, variant: Variant
) -> Iterator[tuple[Candidate, tuple[object, ...]]]:
    """Yield the candidates of a size with each data axis, and what each of them is known by."""
    structure, refusal = sized.structure, sized.refusal
    for replicas, shard, zero in _data_axes(wanted, structure.schedule, sized.ranks, variant):
        data = {"replicas": replicas, "shard": shard, "zero": zero}
        given = {name: value for name, value in data.items() if value > (name != "zero")}
        case, staleness, kept, why = -1, 0.0, variant, refusal
        if why is None:
            try:
                case, staleness = parts.case_of(structure, variant)
                kept = parts.with_data_axis(structure, variant, given)
                if wanted.staleness is not None and staleness > wanted.staleness:
                    problem = f"is {staleness:.3g} on average, more than {wanted.staleness:g}; allow more"
                    raise RequestError("staleness", problem)
            except UnknownName:
                raise
            except RequestError as error:
                why = error
        key = (structure.key, replicas, shard, zero, kept.key if why is None else variant.key)
        options = {**structure.options, **given, **kept.options}
        near = sized.near if why is refusal else ()
        yield Candidate(options, sized.devices, -1 if why else case, staleness, why, near=near), key


def _data_axes(wanted: Wanted, schedule: Schedule, ranks: int, variant: Variant) -> Iterator[tuple[int, int, int]]:
    """Yield replicas, ranks that share states, and the stage of ZeRO, for so many data ranks."""
    splits = accepts(schedule, "shard") and (variant.slots_n is None or "shard" in wanted.axes)
    for shard in divisors(ranks) if splits else [1]:
        replicas = ranks // shard
        for zero in range(1, MOST_SPLIT + 1) if shard > 1 else [0]:
            if all(wanted.allows(*axis) for axis in (("replicas", replicas), ("shard", shard), ("zero", zero))):
                yield replicas, shard, zero


def refuse_without_candidates(space: Space, wanted: Wanted) -> None:
    """Refuse a plan none of whose candidates can be asked, by what is wrong with most of them."""
    if space.cases and any(one.refusal is None for one in space.candidates):
        return
    near: dict[int, set[str]] = {}
    for one in space.candidates:
        for size in one.near:
            near.setdefault(size, set()).add(one.options["schedule"])
    below = _first_possible(wanted, near, sorted((size for size in near if size < wanted.batch), reverse=True))
    above = _first_possible(wanted, near, sorted(size for size in near if size > wanted.batch))
    if found := [str(size) for size in (below, above) if size is not None]:
        problem = f"no candidate trains on {counted(wanted.batch, 'sample')} on {counted(wanted.devices, 'device')}"
        nearest = (
            f"the nearest batches are {' and '.join(found)}" if len(found) > 1 else f"the nearest batch is {found[0]}"
        )
        raise RequestError("batch", f"{problem}; {nearest}")
    refusals = [one.refusal for one in space.candidates if one.refusal]
    if not refusals:
        given = ", ".join(wanted.axes) or "schedules"
        raise RequestError(given, f"leave no candidate on {wanted.devices} devices; allow more values")
    subjects = [refusal.subject for refusal in refusals]
    raise max(refusals, key=lambda refusal: subjects.count(refusal.subject))


def _first_possible(wanted: Wanted, names: Mapping[int, Collection[str]], batches: Sequence[int]) -> int | None:
    """Return the first of some batches with which one of its schedules has a candidate; None if none has."""
    for batch in batches:
        schedules = tuple(schedule for schedule in wanted.schedules if schedule.name in names[batch])
        space = find_candidates(replace(wanted, batch=batch, schedules=schedules))
        if any(one.refusal is None for one in space.candidates):
            return batch
    return None
