"""Programs of requests, each assembled once for all requests that have the same one."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Generic, TypeVar

from cdpsim.front import are_replicas_alike, assemble_one
from cdpsim.model import Model
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.request.sharing import SHARING

MOST_KEPT_NODES = 2**20  # of all programs together
Value = TypeVar("Value")

_OF_MESSAGES = (
    "shard",
    "zero",
    "collective",
    "runtime",
    *SHARING,
)  # options that are refused where they change nothing


class Kept(Generic[Value]):
    """Values that were asked for last, by their keys: as many as have so many nodes of programs together."""

    def __init__(self, most_nodes: int = MOST_KEPT_NODES) -> None:
        self.most_nodes = most_nodes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._nodes = 0

    def __iter__(self) -> Iterator[Value]:
        return (value for value, _ in self._values.values())

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: Hashable) -> Value:
        self._values.move_to_end(key)
        return self._values[key][0]

    def keep(self, key: Hashable, value: Value, nodes: int) -> None:
        """Keep a value, and let those go that were not asked for longest."""
        self._values[key] = value, nodes
        self._nodes += nodes
        while self._nodes > self.most_nodes and len(self._values) > 1:
            self._nodes -= self._values.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Let all values go."""
        self._values.clear()
        self._nodes = 0


class KnownPrograms(Kept[Program]):
    """The programs that were asked for last."""

    def find(self, request: Request) -> Program:
        """Return the program of a request, of one replica for all where these are alike."""
        if request.expands or request.schedule.order.rounds:
            return assemble_one(request)
        structure = structure_of(request)
        for key in (structure, True), (structure, False):
            if key in self and ((program := self[key]).fold == 1 or are_replicas_alike(program, request.cluster)):
                return program
        program = assemble_one(request)
        self.keep((structure, program.fold > 1), program, program.nodes)
        return program


def structure_of(request: Request) -> Hashable:
    """Return the facts of a request on which its program depends; what it costs is not among them."""
    model, cluster = request.timed_model, request.cluster
    return (
        request.schedule,
        request.shape,
        request.steps,
        request.rule,
        request.prefetch,
        request.slot_order,
        request.state,
        request.overlap_all_reduce,
        request.counts,
        request.runtime,
        request.rendezvous,
        request.local_ties,
        model.tied,
        request.widths,
        request.may_fold,
        model.is_unit,
        _weights_of(model),
        tuple((group.count, group.overlap, group.lanes) for group in cluster.devices),
        tuple(str(request.given[name]) for name in _OF_MESSAGES),
    )


@lru_cache(maxsize=64)
def _weights_of(model: Model) -> Hashable:
    """Return all sizes of a model's stages, and which of its updates take time."""
    return model.all_sizes, model.updates_in_lanes, model.updates_take_time, model.outer_updates_take_time


KNOWN_PROGRAMS = KnownPrograms()
