"""CandidateParts of candidates, each read once: structures, what they train, and data axes."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.limits import UNLIMITED
from cdpsim.program.assembly import check_causal
from cdpsim.request import Request
from cdpsim.request.reading import shape_of
from cdpsim.request.sharing import SHARING
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule, find_rule

ReadPart = TypeVar("ReadPart")
_IN_STATE = (*SHARING, "compress", "prefetch")  # all that these do is in the request's state and prefetch


class Variant(NamedTuple):
    """A combination of values of all options that are no sizes, and its number."""

    options: Mapping[str, Any]
    key: tuple[tuple[str, object], ...]  # each option with the number of its value
    stages: int  # of the model
    slots_n: int | None  # the stages that all candidates have in the slot model

    def keep(self, names: Collection[str]) -> "Variant":
        """Return the combination with those options alone."""
        options = {name: value for name, value in self.options.items() if name in names}
        return self._replace(options=options, key=tuple(pair for pair in self.key if pair[0] in names))


class Structure(NamedTuple):
    """A schedule and its sizes: of one data rank."""

    schedule: Schedule
    n: int | None
    m: int | None
    chunks: int | None
    rule: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The facts that tell it from others."""
        return (self.schedule.name, *self[1:])

    @property
    def options(self) -> dict[str, Any]:
        """The options of a request for it."""
        sizes = {"n": self.n, "m": self.m, "chunks": self.chunks, "rule": self.rule}
        return {"schedule": self.schedule.name} | {name: size for name, size in sizes.items() if size is not None}


class _Facts(NamedTuple):
    """Facts of a structure that depend on no model: how old parameters are, and a digest of all that it does."""

    staleness: float
    digest: object


class CandidateParts:
    """The parts that have been read: cases and data axes, or their refusals."""

    def __init__(self) -> None:
        self.cases: list[Request] = []
        self._digests: list[object] = []  # of each case
        self._cases: dict[object, tuple[int, float] | RequestError] = {}
        self._facts: dict[object, _Facts | RequestError] = {}
        self._data_axes: dict[object, Variant | RequestError] = {}

    def case_of(self, structure: Structure, variant: Variant) -> tuple[int, float]:
        """Return the number of the case of a structure without a data axis, and its staleness; or refuse it."""
        key = (structure.key, variant.key)
        if key not in self._cases:
            try:
                self._cases[key] = self._read_case(structure, variant)
            except RequestError as error:
                self._cases[key] = error
        return _found(self._cases[key])

    def with_data_axis(self, structure: Structure, variant: Variant, given: Mapping[str, int]) -> Variant:
        """Return a variant known by what its options of the data axis come to; or refuse it."""
        whole = "reshard" in variant.options  # whose values are divisors
        sizes = {name: value if whole or name == "zero" else min(value, 2) for name, value in given.items()}
        key = (structure.schedule.name, structure.rule, tuple(sizes.items()), variant.key)
        if key not in self._data_axes:
            try:
                request = _read_variant(structure, variant, sizes)
                others = tuple(pair for pair in variant.key if pair[0] not in _IN_STATE)
                self._data_axes[key] = variant._replace(key=(*others, ("", (request.state, request.prefetch))))
            except RequestError as error:
                self._data_axes[key] = error
        return _found(self._data_axes[key])

    def reads_as_usual(self, structure: Structure, variant: Variant) -> bool:
        """Return whether a rule reads the versions that the schedule's own reads, at these sizes."""
        try:
            shape = _shape_of(structure, variant.stages)
        except RequestError:
            return False
        usual, rule = structure.schedule.rule_of(shape), find_rule(structure.rule)
        return _rule_facts(rule, shape) == _rule_facts(usual, shape)

    def program_key(self, case: int, key: tuple[object, ...]) -> tuple[object, ...]:
        """Return what a candidate of a case has in common with all that are the same program."""
        return (self._digests[case], *key[1:])

    def _read_case(self, structure: Structure, variant: Variant) -> tuple[int, float]:
        try:
            request = _read_variant(structure, variant, {})
        except RequestError as error:
            if error.subject != "offload":
                raise
            request = _read_variant(structure, variant, {"zero": 3, "shard": 1})  # of parameters that are all split
        facts = self._facts_of(structure, request)
        self._digests.append((facts.digest, request.schedule.torch_sends if request.runtime.like == "torch" else ""))
        self.cases.append(_with_least_m(structure, variant, request))
        return len(self.cases) - 1, facts.staleness

    def _facts_of(self, structure: Structure, request: Request) -> _Facts:
        key = (structure.key, request.shape)
        if key not in self._facts:
            try:
                check_causal(request.schedule, request.rule, request.shape)
                staleness = float(request.rule.lags(request.shape).mean())
                self._facts[key] = _Facts(staleness, _digest(request))
            except RequestError as error:
                self._facts[key] = error
        return _found(self._facts[key])


def _found(part: ReadPart | RequestError) -> ReadPart:
    """Return a part that has been read; raise its refusal."""
    if isinstance(part, RequestError):
        raise part
    return part


def _read_variant(structure: Structure, variant: Variant, data: Mapping[str, int]) -> Request:
    """Return a request."""
    options = {**structure.options, **variant.options, **data, "ignore_memory": True, "max_memory": UNLIMITED}
    options["schedule"] = structure.schedule
    return Request.from_builtins(options)


def _with_least_m(structure: Structure, variant: Variant, request: Request) -> Request:
    """Return a request of a structure with the least number of micro-batches that it is found to take."""
    parts = request.shape.parts // request.shape.chunks
    if structure.m is None:
        return request
    for m in sorted({1, 2, parts, 2 * parts}):
        if m >= structure.m:
            break
        with suppress(RequestError):
            data = {"zero": request.zero, "shard": 1} if request.zero else {}
            least = _read_variant(structure._replace(m=m), variant, data)
            check_causal(least.schedule, least.rule, least.shape)
            return least
    return request


def _shape_of(structure: Structure, stages: int) -> Shape:
    options = {"m": structure.m, "chunks": structure.chunks, "replicas": None}
    return shape_of(structure.schedule, structure.n or stages, options)


def _rule_facts(rule: Rule, shape: Shape) -> tuple[object, ...]:
    """Return what tasks read by a rule."""
    lags = rule.lags(shape).astype(np.int64).tobytes(), rule.backward_lags(shape).astype(np.int64).tobytes()
    return *lags, rule.barrier, rule.versions


def _digest(request: Request) -> object:
    """Return a digest of all that a schedule does at a size."""
    schedule, shape = request.schedule, request.shape
    order, read = schedule.order, _rule_facts(request.rule, shape)
    if order.lists is None:
        return order, schedule.placement, schedule.state, shape, read
    actions = schedule.actions(shape)
    columns = (actions.kind, actions.stage, actions.micro_batch, actions.first, actions.delay, actions.beside)
    digest = hashlib.sha256()
    for column in columns:
        numbers = np.array([] if column is None else column, dtype=np.int64)
        digest.update(str(numbers.shape).encode() + numbers.tobytes())
    facts = (order.together, order.one_place, order.release, schedule.placement.name, schedule.state, shape.n, shape.m)
    return digest.hexdigest(), *facts, shape.chunks, read
