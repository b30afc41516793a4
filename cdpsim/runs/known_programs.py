"""Programs of requests, each assembled once for all requests that have the same one."""

from collections.abc import Hashable
from functools import lru_cache

from cdpsim.model import Model
from cdpsim.numeric.columns import Kept
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.request.options import OPTIONS
from cdpsim.runs.assembling import are_replicas_alike, assemble_one

MOST_KEPT_NODES = 2**20  # of all programs together

# Options of which a request has nothing but what was given.
_AS_GIVEN = tuple(name for name, option in OPTIONS.items() if option.recorded and option.record is None)


class KnownPrograms(Kept[Program]):
    """The programs that were asked for last, as many as have so many nodes together."""

    def __init__(self, most: int = MOST_KEPT_NODES) -> None:
        super().__init__(most)

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


class ProgramFacts:
    """The facts of a request on which its program depends, which are hashed once."""

    def __init__(self, *facts: Hashable) -> None:
        self._facts, self._hash = facts, hash(facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramFacts) and self._facts == other._facts


def structure_of(request: Request) -> ProgramFacts:
    """Return the facts of a request on which its program depends; what it costs is not among them."""
    model, cluster = request.timed_model, request.cluster
    return ProgramFacts(
        request.schedule,
        request.shape,
        request.steps,
        request.rule,
        request.prefetch,
        request.slot_order,
        request.state,
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
        tuple(str(request.given[name]) for name in _AS_GIVEN),
    )


@lru_cache(maxsize=64)
def _weights_of(model: Model) -> Hashable:
    """Return all sizes of a model's stages, and which of its updates take time."""
    return model.all_sizes, model.updates_in_lanes, model.updates_take_time, model.outer_updates_take_time


KNOWN_PROGRAMS = KnownPrograms()
