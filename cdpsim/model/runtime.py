"""Runtime behaviour: buffers beyond a schedule's needs, each declared by itself, or all by a runtime's name.

`paper` holds each tensor as long as the schedule needs it. `held` adds what an implementation of estimates cannot do
without: the gradient of a share in fp32, and what is set back after an estimate. `torch` holds what torch's runtimes
were measured to hold: those of `torch.distributed.pipelining` where steps are flushed and devices have lists,
`DistributedDataParallel` where gradients are all-reduced, FSDP2 where parameters are handed out. Other names are of
layers: `transformers` has norms, MLP and rotary positions as operations of torch, `liger` as kernels, both beside what
`torch` holds; `megatron` and `te` (Transformer Engine) have kernels, beside what `paper` holds.
docs/assumptions/memory.md has each behaviour, and where torch has it.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from msgspec.structs import asdict

from cdpsim.errors import RequestError, choose, short_repr
from cdpsim.files import config

RuntimeName = Literal["paper", "held", "torch", "transformers", "megatron", "te", "liger"]
Sends = Literal["until-sent", "until-step-end", "until-next"]
Gradients = Literal["fresh", "zeroed", "kept"]
GradientBuckets = Literal["none", "copies", "views"]
Implementation = Literal["fused", "loop", "foreach"]
Gathers = Literal["missing", "whole", "copied"]
Reductions = Literal["until-summed", "until-next"]
SplitBackward = Literal["freed", "retained"]
RUNTIMES = get_args(RuntimeName)
LIKE = dict(zip(RUNTIMES, ("paper", "held", "torch", "torch", "paper", "paper", "torch"), strict=True))  # layers apart
_YES_NO = {"yes": True, "no": False}


class Behaviours(NamedTuple):
    """The behaviours of a runtime, with the paper's as defaults."""

    static_receives: bool = False  # receive buffers of all micro-batches, in both directions, from the start on
    kept_outputs: bool = False  # a stage's output is held until its backward
    sends: str = "until-sent"  # how long what has been sent is held
    returned_outputs: bool = False  # the last stage's outputs are held until the next step begins
    whole_batch: bool = False  # the data of all micro-batches are there from the start on
    kept_losses: bool = False  # losses are held to the step's end, and with them the input of the last stage
    gradients: str = "fresh"  # autograd's own tensors; zeroed: added to zeros made for a step; kept: for all steps
    joint_updates: bool = False  # one step of the optimizer for all stages of a device, behind its last task
    updates: str = "fused"  # what updates make: nothing in one kernel, or tensors in a loop, or of all at once
    split_backward: str = "freed"  # what only a split backward's first part needs goes with it; retained: all stays
    gradient_buckets: str = "none"  # what all-reduces run on: the gradients, a second buffer, or a buffer that has them
    gathers: str = "missing"  # owned parameters come where they are not; whole: to owners, too; copied: by a buffer
    backward_prefetch: bool = False  # when a backward begins, the parameters of the next one are there
    reductions: str = "until-summed"  # how long what has been given to a sum of gradients is held
    collective_copies: bool = False  # collectives copy what they gather or reduce, while they do
    wide_shares: bool = False  # of the share that a worker updates, the gradient is there in fp32, too, always
    saved_states: bool = False  # while an estimate is made, what its update changes is there as it was, too
    keeps_gathered: bool = False  # of layers: what a tensor group gathers is kept for the backward, not gathered again
    weight_copies: bool = False  # of layers: the backward of a product makes a tensor as large as its weight
    fused_norms: bool = True  # of layers, as the next two: one kernel, which keeps its input alone
    fused_mlp: bool = True
    fused_rotary: bool = True


class Runtime(config.ConfigTable, frozen=True, kw_only=True):
    """The behaviours of a runtime; None: as in the runtime that it is `like`."""

    like: str = RUNTIMES[0]
    static_receives: bool | None = None
    kept_outputs: bool | None = None
    sends: str | None = None
    returned_outputs: bool | None = None
    whole_batch: bool | None = None
    kept_losses: bool | None = None
    gradients: str | None = None
    joint_updates: bool | None = None
    updates: str | None = None
    split_backward: str | None = None
    gradient_buckets: str | None = None
    gathers: str | None = None
    backward_prefetch: bool | None = None
    reductions: str | None = None
    collective_copies: bool | None = None
    wide_shares: bool | None = None
    saved_states: bool | None = None
    keeps_gathered: bool | None = None
    weight_copies: bool | None = None
    fused_norms: bool | None = None
    fused_mlp: bool | None = None
    fused_rotary: bool | None = None

    def _check(self) -> None:
        choose("runtime", self.like, RUNTIMES)
        texts = {"sends": Sends, "gradients": Gradients, "gradient_buckets": GradientBuckets}
        texts |= {
            "split_backward": SplitBackward,
            "gathers": Gathers,
            "reductions": Reductions,
            "updates": Implementation,
        }
        for name, known in texts.items():
            if getattr(self, name) is not None:
                choose(name, getattr(self, name), get_args(known))

    @property
    def given(self) -> dict[str, Any]:
        """The behaviours that are given one by one."""
        return {name: value for name, value in asdict(self).items() if name != "like" and value is not None}

    def without(self, behaviour: str) -> "Runtime":
        """Return the runtime with one behaviour as in the runtime that it is like."""
        return Runtime(like=self.like, **{name: value for name, value in self.given.items() if name != behaviour})

    def __str__(self) -> str:
        """Return the text of which `read_runtime` makes the runtime."""
        texts = [f"{name}={_behaviour_text(value)}" for name, value in self.given.items()]
        return f"{self.like}:{','.join(texts)}" if texts else self.like


def layer_habits(runtime: Runtime) -> dict[str, bool]:
    """Return the behaviours of layers: torch keeps what is gathered, and sums for each product; others do not."""
    torch = LIKE[runtime.like] == "torch"
    usual = {"sums_apart": torch, "keeps_gathered": torch, "weight_copies": runtime.like == "te"}
    usual |= dict.fromkeys(("fused_norms", "fused_mlp", "fused_rotary"), runtime.like != TRANSFORMERS)
    return usual | {name: value for name, value in runtime.given.items() if name in usual}


PAPER, PAPER_BEHAVIOURS, TRANSFORMERS = Runtime(), Behaviours(), RUNTIMES[3]
HELD, HELD_BEHAVIOURS = RUNTIMES[1], Behaviours(wide_shares=True, saved_states=True)


def torch_behaviours(sends: str | None, *, sharded: bool) -> Behaviours:
    """Return what torch holds in a pipeline whose runtime holds `sends`; without it, in a training loop.

    FSDP2 hands out what is `sharded`, and DDP sums the gradients of all else.
    """
    behaviours = _LOOP if sends is None else _PIPELINE._replace(sends=sends)
    return behaviours._replace(**_FSDP2) if sharded else behaviours._replace(gradient_buckets="copies")


_FSDP2: dict[str, Any] = {
    "gathers": "copied",
    "backward_prefetch": True,
    "reductions": "until-next",
    "collective_copies": True,
}
_LOOP = Behaviours(whole_batch=True, joint_updates=True, updates="foreach")
_PIPELINE = Behaviours(
    static_receives=True,
    kept_outputs=True,
    returned_outputs=True,
    whole_batch=True,
    kept_losses=True,
    joint_updates=True,
    updates="foreach",
    split_backward="retained",
)


def _behaviour_text(value: object) -> str:
    return str(value) if isinstance(value, str) else next(word for word, meaning in _YES_NO.items() if meaning is value)


def read_runtime(given: object) -> Runtime:
    """Return the runtime of a name, a text, a table or an object.

    >>> str(read_runtime({"like": "torch", "sends": "until-sent", "returned_outputs": False}))
    'torch:sends=until-sent,returned_outputs=no'
    """
    if isinstance(given, Runtime):
        return given
    if isinstance(given, Mapping):
        return Runtime(**{choose("behaviour", name, Runtime.__struct_fields__): value for name, value in given.items()})
    if not isinstance(given, str):
        problem = f"{short_repr(given)} is no name, text or table; write for example 'torch:sends=until-sent'"
        raise RequestError("runtime", problem)
    name, colon, rest = given.partition(":")
    return Runtime(like=choose("runtime", name, RUNTIMES), **_read_behaviours(rest.split(",") if colon else []))


def _read_behaviours(parts: list[str]) -> dict[str, Any]:
    """Return the behaviours of texts such as "sends=until-sent"."""
    behaviours: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        behaviour = choose("behaviour", name.strip().replace("-", "_"), Behaviours._fields)
        if behaviour in behaviours:
            raise RequestError("runtime", f"says {behaviour} twice; say it once")
        switches = isinstance(Behaviours._field_defaults[behaviour], bool)
        behaviours[behaviour] = _YES_NO[choose(behaviour, value, _YES_NO)] if switches else value
    return behaviours
