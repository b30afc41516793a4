"""The contents of a replay: what devices keep, what messages carry, their names, and the error of a replay."""

from collections import Counter
from typing import Literal, NamedTuple

from cdpsim.errors import one_line
from cdpsim.program import Category, Content, Op

Kinds = Literal["out of memory", "killed", "timeout", "error"]  # from the most to the least telling
BEGINNING = -1  # in place of a node, for a buffer from the start of the run
Calls = Counter[tuple[str, tuple[int, ...], int]]  # how often a call was made, by name, partners and bytes
Passing = tuple[Content, int, int, int]  # a value between two tasks: content, step, micro-batch, stage


class ReplayError(RuntimeError):
    """A replay that cannot go on, in one line; `kind` is a word for the reason."""

    def __init__(self, problem: str, kind: Kinds = "error") -> None:
        super().__init__(one_line(problem))  # what an exception of a rank says may have any characters
        self.kind: Kinds = kind


class Holding(NamedTuple):
    """The content of a buffer: parameters of a version, gradients of a step, an optimizer state, or a stash.

    It is whole, or a share: of a content that is `split` among ranks, a device has the share of its own rank.
    """

    category: Category
    stage: int
    version: int  # the step of gradients and activations; 0 of an optimizer state, of which there is only one
    micro_batch: int  # of activations, and of shares between a forward and its backward; else -1
    split: int = 1


class Message(NamedTuple):
    """One message, with readable fields."""

    node: int
    op: Op
    content: Content
    stage: int
    micro_batch: int
    step: int
    src: int
    members: tuple[int, ...]  # sender and receiver, or a collective's group
    size: int
    stages: int = 1

    @property
    def covers(self) -> range:
        """The stages of which it carries something."""
        return range(self.stage, self.stage + self.stages)

    @property
    def key(self) -> Passing:
        """The value that it carries, if that is in no buffer."""
        return self.content, self.step, self.micro_batch, self.stage

    @property
    def senders(self) -> tuple[int, ...]:
        """The devices that contribute to it."""
        return (self.src,) if self.op in (Op.P2P, Op.BROADCAST) else self.members

    def call(self, device: int) -> tuple[str, tuple[int, ...]]:
        """Return the call that a device makes for it, and with which devices."""
        if self.op != Op.P2P:
            return self.op.name.lower(), self.members
        return ("send", self.members[1:]) if device == self.src else ("receive", (self.src,))

    def __str__(self) -> str:
        between = ", ".join(map(str, self.members))
        return f"{self.op.name.lower()} {text_of(self.key)} between devices {between}"


def text_of(passing: Passing) -> str:
    """Return the name of a value between two tasks, as a program gives it: `activation(t=0,i=1,j=2)`."""
    content, step, micro_batch, stage = passing
    places = zip("tij", (step, micro_batch, stage), strict=True)
    return f"{content.name.lower()}({','.join(f'{letter}={place}' for letter, place in places if place >= 0)})"


def name_of(holding: Holding) -> str:
    """Return the name of a content, for people."""
    category, stage, version, micro_batch, split = holding
    place = f"stage {stage}" if split == 1 else f"stage {stage}, a share of {split}"
    if category == Category.PARAMETERS:
        place += f", version {version}"
    elif category != Category.OPTIMIZER:
        place += f", step {version}"
    place += f", micro-batch {micro_batch}" if micro_batch >= 0 else ""
    return f"{'optimizer state' if category == Category.OPTIMIZER else category.name.lower()} of {place}"
