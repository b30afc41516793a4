"""State policies: where parameters, gradients and optimizer state are between uses, and when gradients are summed.

A placement is a layout over the copies of a stage: the devices with tasks of it. A task that needs a value in another
layout causes an exchange; nothing else causes a message of values.

    (parameters, gradients, optimizer)         copies at one moment             copies one after another
    copied, copied, copied                     all-reduce                        needs one copy
    copied, copied or owned, owned             reduce, broadcast after updates   -
    copied, copied or split, split             reduce-scatter, all-gather        -
                                               after updates
    all split                                  reduce-scatter, all-gather        -
                                               for each use
    copied, owned, owned by the last           -                                 sums, states and versions passed on
    all owned                                  reduce, broadcast for each use    -
    all owned, by the user                     -                                 a stage carried to its next user

Split values are split among the data ranks of a sharding group; an all-reduce across groups sums their shares.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from cdpsim.errors import RequestError, whole_number
from cdpsim.schedules.buckets import Buckets, Compression

Refusal = tuple[str, str]  # the problem, the remedy


class Placed(Enum):
    """The placement of a value between its uses: whole on every copy of its stage, a share on each, or whole on one."""

    COPIED = "copied"
    SPLIT = "split"
    OWNED = "owned"


class Owner(Enum):
    """The copy that owns a value: of stage j the j-th, the last one in a step, or the one that uses it next."""

    FIXED = "fixed"
    LAST = "last"
    USER = "user"


class When(Enum):
    """The time of sums of gradients: at the end of a step, as soon as those of a step are complete, or after each pass.

    In orders whose devices are together, a step ends for each device with its last task of it. Other orders have no
    such end, and sum gradients when they are complete.
    """

    END = "end"
    LAST = "last"
    EACH = "each"


@dataclass(frozen=True)
class Holding:
    """Facts about a schedule that a state policy must fit."""

    together: bool  # all copies of a stage come to its update at one moment; else one after another
    ends: bool  # steps end for all devices before the next begins
    alone: bool  # every stage has one copy
    once: bool  # no device uses a stage for two micro-batches of a step
    lags: bool  # some tasks read older versions than the newest
    stays: bool  # every stage is on the same devices in all steps
    even: bool  # all data ranks have the same number of micro-batches in all steps


@dataclass(frozen=True)
class State:
    """The placements of a stage's parameters, gradient sums and optimizer state; an update is at the last.

    With an owned optimizer state, copied gradients stay on every copy until the update is done; owned gradients leave
    with the reduction.
    """

    parameters: Placed = Placed.COPIED
    gradients: Placed = Placed.COPIED
    optimizer: Placed = Placed.COPIED
    owner: Owner = Owner.FIXED
    reduce: When = When.END
    streams: bool = False  # messages go one after another, in streams beside the tasks
    buckets: Buckets | None = None  # of gradients; None: a message for each stage
    compress: Compression | None = None  # of gradients that data ranks sum
    one_step: bool = False  # a device makes all its updates when all its exchanges of gradients are done
    # How long gathered parameters stay: for each use (yes), from a forward to its backward (no; root: those of the
    # first and the last stage), for a step, or from a forward to its backward in shares of the ranks.
    reshard: str | int = "yes"
    padding: str | None = None  # the rule by which shares are padded (`Model.padded`); None: to whole bytes
    clips: bool = False  # updates wait for the norm of all gradients, which devices sum
    updates_in_stream: bool = False  # updates that take their devices' time do so among the messages, not the tasks
    # When new parameters are gathered: each as soon as it is updated (early), or behind all updates of their devices,
    # whose forwards wait for what they read (units) or for everything (step).
    gather: str = "early"

    @property
    def label(self) -> str:
        """The word for it in tables of schedules: whether every device that uses parameters keeps them."""
        return "replicated" if self.parameters is Placed.COPIED else "sharded"

    @property
    def in_factors(self) -> bool:
        """Whether gradients of matrices go as factors."""
        return self.compress is not None and self.compress.rank > 0

    @property
    def splits(self) -> bool:
        """Whether each rank of a sharding group has a share of something."""
        return Placed.SPLIT in self.placements

    @property
    def joins(self) -> bool:
        """Whether parameters come together for each use: from all shares, or from their owner."""
        return self.parameters is not Placed.COPIED and not self.travels

    @property
    def travels(self) -> bool:
        """Whether all values of a stage go from user to user."""
        return self.owner is Owner.USER

    def check(self, holding: Holding) -> None:
        """Refuse a policy that cannot be assembled."""
        by_use = self._refusals_together if holding.together else self._refusals_in_turn
        for problem, remedy in (*self._refusals(), *by_use(holding)):
            raise RequestError("state", f"{problem}; {remedy}")

    @property
    def placements(self) -> tuple[Placed, Placed, Placed]:
        """The placements of parameters, of gradients and of optimizer states."""
        return self.parameters, self.gradients, self.optimizer

    def _refusals(self) -> Iterator[Refusal]:
        if self.splits and self.placements not in _SPLIT_PLACEMENTS:
            problem = "a share of the optimizer updates a share of the parameters, and takes a share of their gradients"
            yield problem, "split optimizer states alone, or gradients with them, or all three"
        if self.streams and self.optimizer is Placed.OWNED:
            yield "streams are for what all copies exchange, and owners send alone", "leave streams out"
        if not self.streams and (self.splits or self.buckets is not None or self.reduce is When.EACH):
            yield "shares, buckets and sums after each pass go in streams", "add streams"
        if self.reduce is When.EACH and self.optimizer is Placed.SPLIT and self.gradients is Placed.COPIED:
            problem = "every copy adds up whole gradients, and reduces them once"
            yield problem, "let them be SPLIT, or take END or LAST"
        if self.optimizer is Placed.COPIED and self.placements != (Placed.COPIED,) * 3:
            problem = "every copy makes the update, and needs whole parameters and gradients for it"
            yield problem, "let these be COPIED, or the optimizer OWNED"
        if self.owner is not Owner.FIXED and Placed.OWNED not in self.placements:
            yield "nothing is owned", "leave the owner out"

    def _refusals_together(self, holding: Holding) -> Iterator[Refusal]:
        owned = self.parameters is Placed.OWNED
        if self.owner is not Owner.FIXED:
            problem = "copies of a stage come to its update together, and none of them is the last or the next"
            yield problem, "take a FIXED owner"
        if owned and self.gradients is Placed.COPIED:
            problem = "gradients are reduced to the owner of parameters, and nothing needs them elsewhere then"
            yield problem, "let them be OWNED"
        if self.joins and holding.lags:
            problem = "parameters come together in their newest version, and the rule reads older ones"
            yield problem, "let them be COPIED, or the rule's lags 0"
        if owned and not holding.once:
            problem = "owned parameters are handed out once for all micro-batches of a step, and devices have several"
            yield problem, "let them be COPIED"
        if self.reduce is When.LAST and not holding.ends and not self.streams:
            problem = "sums go as soon as they are complete, where steps do not end for all devices at once"
            yield problem, "leave reduce out"
        if self.streams and not (holding.stays and holding.even):
            problem = "ranks exchange the same in every step, and here stages move or steps have unlike micro-batches"
            yield problem, "take a schedule whose stages stay, and no counts"

    def _refusals_in_turn(self, holding: Holding) -> Iterator[Refusal]:
        copied, owner = self.optimizer is Placed.COPIED, Owner.USER if self.parameters is Placed.OWNED else Owner.LAST
        if self.streams:
            problem = "streams are for what copies exchange together, and here they come one after another"
            yield problem, "leave streams out"
        if copied and not holding.alone:
            problem = "copies come to a stage one after another, and none waits for the sum of all"
            yield problem, "take State(COPIED, OWNED, OWNED, owner=LAST)"
        if not copied and not (self.gradients is Placed.OWNED and self.owner is owner):
            problem = "copies come to a stage one after another, and no message brings it to them so"
            yield problem, "take COPIED, OWNED, OWNED with the owner LAST, or all OWNED with the owner USER"
        if self.reduce is When.LAST:
            problem = "sums go on as soon as they are complete, where copies come one after another"
            yield problem, "leave reduce out"


_SPLIT_PLACEMENTS = (
    (Placed.COPIED, Placed.COPIED, Placed.SPLIT),
    (Placed.COPIED, Placed.SPLIT, Placed.SPLIT),
    (Placed.SPLIT, Placed.SPLIT, Placed.SPLIT),
)
# The placements of ZeRO's stages (Rajbhandari et al. 2020), by their numbers: stage 0 splits nothing.
ZERO = ((Placed.COPIED,) * 3, *_SPLIT_PLACEMENTS)
MOST_SPLIT = len(ZERO) - 1  # the stage of ZeRO that splits everything
REPLICATED = State()
# All that workers exchange at a time goes in one message, after their last task: of gradients, or of parameters.
MEAN = State(reduce=When.LAST, streams=True, buckets=Buckets((2**62,)), one_step=True)
# The same in shares, whose updates are made between a reduce-scatter and an all-gather.
BESIDE = replace(MEAN, optimizer=Placed.SPLIT, updates_in_stream=True)
ALONG = State(Placed.COPIED, Placed.OWNED, Placed.OWNED, owner=Owner.LAST)
OWNER = State(Placed.OWNED, Placed.OWNED, Placed.OWNED, reduce=When.LAST)
TRAVELLING = State(Placed.OWNED, Placed.OWNED, Placed.OWNED, owner=Owner.USER)


def read_zero(given: object) -> int | None:
    """Return the stage of ZeRO that an option gives, or None."""
    zero = None if given is None else whole_number("zero", given, at_least=0)
    if zero is not None and zero > MOST_SPLIT:
        raise RequestError("zero", f"zero={zero}, and ZeRO's stages are 0 to {MOST_SPLIT}; give one of these")
    return zero
