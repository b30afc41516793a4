"""The forward and the backward of one stage, which a replay runs and a profile measures.

Parameters are leaves that view one vector, and their gradients views of another, into which autograd adds. A backward
is done as a whole, or in two parts: first for the stage's input, then for its weights. Where the stage's `Parts` are
given, the first part keeps the gradients of its products' outputs and lets go of what only it needs, and the second
goes through products alone. Else the second part goes through the stage once more, from the gradient of its output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from cdpsim.errors import RequestError

from .forms import Form, form_of, storage_key
from .parts import ParameterGroup, Parts, find_groups
from .stages import Training, leaves, pieces

Split = Literal["once", "twice"]  # how often the parts of a split backward go through a stage
SPLITS: tuple[Split, ...] = get_args(Split)


class Pass(NamedTuple):
    """The stash of a forward for its backward; of the output only its place in the graph, not its values."""

    stage: int
    output: GradientEdge
    x: Tensor
    parameters: Sequence[Tensor]  # leaves, without values between forward and backward
    lent: "_Lent"
    target: Tensor | None  # of the last stage, whose caller has it until the pass is over
    above: Tensor | None = None  # the gradient of the output, between the two parts of a backward


class Rest(NamedTuple):
    """The stash of a backward's first part for its second one, which does not begin at the output."""

    stage: int
    parameters: Sequence[Tensor]
    lent: "_Lent"
    early: dict[int, Tensor]  # gradients of parameters, by number
    late: list[tuple[ParameterGroup, list[Tensor | None]]]  # groups of parameters, and the gradients of their edges
    keep: bool  # whether the way from a node of a group leads through nodes of others


class _Place(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Saved:
    """A tensor that a graph has saved: itself, a place in the vector, or its form alone, once nothing needs it."""

    __slots__ = ("__weakref__", "number", "value")

    def __init__(self, number: int, value: Tensor | _Place) -> None:
        self.number = number
        self.value: Tensor | _Place | Form = value

    def let_go(self) -> None:
        """Keep the tensor's form alone."""
        if isinstance(self.value, Tensor):
            self.value = form_of(self.value)


class _Lent:
    """Parameters that a graph reads, which it keeps as places in a vector instead of values.

    So a device may free a version between a forward and its backward, and receive it again.
    """

    def __init__(self, theta: Tensor) -> None:
        self.theta: Tensor | None = theta
        self.forms: list[Form] = []  # of all that the graph has saved
        self.needed: frozenset[int] | None = None  # the numbers of what is needed after a backward's part; None: all
        self.output = 0  # the address of the output's storage
        self._saved: list[ref[Saved]] = []

    def pack(self, tensor: Tensor) -> Saved:
        """Keep a tensor, or its place in the vector."""
        assert self.theta is not None
        value: Tensor | _Place
        if storage_key(tensor) != storage_key(self.theta):
            # The output itself would keep its own graph.
            value = tensor.detach() if tensor.requires_grad else tensor
        else:
            value = _Place(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        saved = Saved(len(self.forms), value)
        self.forms.append(form_of(tensor))
        self._saved.append(ref(saved))
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Return a saved tensor, or one of its form without memory where none is needed; let go of it after its use."""
        value = saved.value
        if isinstance(value, Tensor):
            needed = self.needed is None or saved.number in self.needed
            # A function written in Python may read it again; the output may be the next stage's, which keeps it.
            stays = needed or storage_key(value) == self.output
            if not (stays or isinstance(torch._C._current_autograd_node(), BackwardCFunction)):
                saved.let_go()
            return value
        assert self.theta is not None, "a backward has its version"
        if isinstance(value, _Place):
            return self.theta.as_strided(*value)
        return torch.zeros((), dtype=value.dtype, device=self.theta.device).expand(value.shape)

    def let_go(self) -> None:
        """Let go of all tensors that are not needed any more."""
        assert self.needed is not None
        for reference in self._saved:
            if (saved := reference()) is not None and saved.number not in self.needed:
                saved.let_go()

    def saved(self) -> dict[Saved, Tensor]:
        """Return the saved tensors that are there."""
        saved = {each: each.value for each in (reference() for reference in self._saved) if each is not None}
        return {each: value for each, value in saved.items() if isinstance(value, Tensor)}

    def values(self) -> dict[int, Tensor]:
        """Return the saved tensors that are there, by number."""
        return {each.number: value for each, value in self.saved().items()}


def forward(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> tuple[Tensor | None, Pass]:
    """Run a stage at given parameters; return its output, unless it is the last, and its stash."""
    parameters, lent = leaves(training.stages[stage], theta), _Lent(theta)
    if stage > 0:
        x = x.detach().requires_grad_()
    with saved_tensors_hooks(lent.pack, lent.unpack):
        y = training.apply(stage, parameters, x)
        if stage == training.n - 1:
            assert target is not None, "only the last stage has a loss"
            y = training.loss(y, target, micro_batches)
        else:
            y = on_its_own(y)
    lent.output = storage_key(y)
    kept = Pass(stage, get_gradient_edge(y), x, list(parameters.values()), lent, target)
    _return(kept)
    return (None if stage == training.n - 1 else y.detach()), kept


def backward(
    training: Training, kept: Pass, theta: Tensor, above: Tensor | None, gradient: Tensor | None
) -> Tensor | None:
    """Add a pass's gradient to the stage's vector, in place; return that of its input, if a stage is before it.

    `theta` are the parameters that it reads, `above` is the gradient of the forward's output. A parameter without a
    part in the pass keeps its gradient. Without a vector, autograd makes a tensor for each parameter's gradient, and
    all of them end with the backward.
    """
    _lend(training, kept, theta, gradient)
    torch.autograd.backward(kept.output, above)
    _return(kept)
    if kept.stage == 0:
        return None
    below, kept.x.grad = kept.x.grad, None
    return _handed_back(kept, below)


def backward_for_input(
    kept: Pass, theta: Tensor, above: Tensor | None, parts: Parts | None = None
) -> tuple[Tensor | None, Pass | Rest]:
    """Return the gradient of a pass's input, if a stage is before it, and the rest of the pass, for the weights.

    With the stage's `parts`, the rest is what the weights' products need; else all of the pass.
    """
    if kept.stage == 0:
        return None, kept._replace(above=above)
    kept.lent.theta = theta
    if parts is not None:
        below, rest = _take_first_part(kept, above, parts)
        _return(kept)
        return below, rest
    (found,) = _gradients([kept.output], [kept.x], [above], keep=True)
    _return(kept)
    return _handed_back(kept, found), kept._replace(above=above)


def _take_first_part(kept: Pass, above: Tensor | None, parts: Parts) -> tuple[Tensor, Rest]:
    """Return the gradient of a pass's input, and what the weights' part starts from; let go of all else."""
    if tuple(kept.lent.forms) != parts.saved:
        problem = "saves other tensors than it was found to save, so its backward cannot be split there"
        raise RequestError(f"stage {kept.stage}", f"{problem}; take --split twice")
    late = [group for group in find_groups(kept.output, kept.x, kept.parameters) if not group.parameters <= parts.early]
    early = sorted(parts.early)
    leaves_ = [kept.x, *(kept.parameters[k] for k in early)]
    wanted = [*map(get_gradient_edge, leaves_), *(edge for group in late for edge in group.edges)]
    kept.lent.needed = parts.needed
    below, *found = _gradients([kept.output], wanted, [above], keep=True)
    kept.lent.let_go()
    kept.x.data = kept.x.new_empty(0)  # the graph has it
    made, edges = dict(zip(early, found, strict=False)), found[len(early) :]
    below = _handed_back(kept, below)
    if storage_key(below) in {storage_key(tensor) for tensor in edges if tensor is not None}:
        below = below.clone()  # it leaves, and they stay
    left = iter(edges)
    return below, Rest(
        kept.stage,
        kept.parameters,
        kept.lent,
        {k: gradient for k, gradient in made.items() if gradient is not None},
        [(group, [next(left) for _ in group.edges]) for group in late],
        any(len(group.nodes) > 1 for group in late),
    )


def backward_for_weights(training: Training, kept: Pass | Rest, theta: Tensor, gradient: Tensor) -> None:
    """Add a pass's gradient to the stage's vector, in place: the same bits that a whole backward adds."""
    _lend(training, kept, theta, gradient)
    if isinstance(kept, Pass):
        torch.autograd.backward(kept.output, kept.above, inputs=kept.parameters)
    else:
        _take_second_part(kept)
    _return(kept)


def _take_second_part(rest: Rest) -> None:
    """Add the gradients that the first part has made, then those of each group; let go of each once it is added."""
    for number in list(rest.early):
        parameter = rest.parameters[number]
        assert parameter.grad is not None
        parameter.grad += rest.early.pop(number)
    while rest.late:
        group, gradients = rest.late.pop(0)
        with _given(group, gradients) as given:
            inputs = [rest.parameters[k] for k in sorted(group.parameters)]
            torch.autograd.backward(list(given), list(given.values()), retain_graph=rest.keep, inputs=inputs)
        del group, gradients, given


def take_groups_one_by_one(training: Training, rest: Rest, theta: Tensor, gradient: Tensor | None) -> None:
    """Do a backward's second part as torch's own pipelines do, with groups in the order of their parameters.

    A group's gradients are added once autograd has made all of them, and are let go of once it has made those of the
    next group. Without a vector to add to, each parameter keeps its own.
    """
    _lend(training, rest, theta, gradient)
    rest.late.sort(key=lambda late: min(late[0].parameters))
    made: tuple[Tensor | None, ...] = ()
    while rest.late:
        group, gradients = rest.late.pop(0)
        parameters = [rest.parameters[k] for k in sorted(group.parameters)]
        with _given(group, gradients) as given:
            edges, own = list(given), list(given.values())
            made = _gradients(edges, parameters, own, keep=rest.keep)
        for parameter, one in zip(parameters, made, strict=True):
            if one is not None and parameter.grad is not None:
                parameter.grad += one
            else:
                parameter.grad = one
        del gradients, given, own
    _return(rest)


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], above: Sequence[Tensor | None], *, keep: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of inputs, which nothing else holds.

    A GPU's thread of autograd holds what it has made until it begins its next task, which may be after this call.
    """
    made = torch.autograd.grad(outputs, inputs, above, retain_graph=keep, allow_unused=True)
    for device in {own.device for own in made if own is not None and own.device.type == "cuda"}:
        with _disable_current_modes():  # so that no watch counts it
            torch.autograd.backward(_task_for(device), retain_graph=True)
    return made


@cache
def _task_for(device: torch.device) -> Tensor:
    return torch.zeros((), device=device, requires_grad=True).clone()


@contextmanager
def _given(group: ParameterGroup, gradients: Sequence[Tensor | None]) -> Iterator[dict[GradientEdge, Tensor]]:
    """Give the gradients of a group's edges.

    Where the way from one of its nodes leads through another one, the other's gradient is the given one, which has
    what comes by that way already.
    """
    given = {edge: own for edge, own in zip(group.edges, gradients, strict=True) if own is not None}
    handles = []
    for node in group.nodes if len(group.nodes) > 1 else ():
        own = {edge.output_nr: gradient for edge, gradient in given.items() if edge.node is node}
        handles.append(node.register_prehook(lambda all_, own=own: tuple(own.get(k) for k in range(len(all_)))))
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def infer(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> Tensor:
    """Run a stage's forward without a backward, and return its output; of the last stage the loss."""
    with torch.no_grad():
        y = training.apply(stage, leaves(training.stages[stage], theta), x)
        if stage < training.n - 1:
            return on_its_own(y)
        assert target is not None, "only the last stage has a loss"
        return training.loss(y, target, micro_batches)


def _handed_back(kept: Pass, below: Tensor | None) -> Tensor:
    if below is None:
        raise RequestError(f"stage {kept.stage}", "does not depend on its input; cut the model elsewhere")
    return on_its_own(below)


def _lend(training: Training, kept: Pass | Rest, theta: Tensor, gradient: Tensor | None) -> None:
    """Lend parameters, and gradients if there are some, to leaves and graph until `_return`."""
    kept.lent.theta = theta
    stage = training.stages[kept.stage]
    gradients = [None] * len(kept.parameters) if gradient is None else pieces(stage, gradient).values()
    for parameter, value, piece in zip(kept.parameters, pieces(stage, theta).values(), gradients, strict=True):
        parameter.data, parameter.grad = value, piece


def _return(kept: Pass | Rest) -> None:
    kept.lent.theta = None
    for parameter in kept.parameters:
        parameter.data, parameter.grad = parameter.new_empty(0), None


def on_its_own(tensor: Tensor) -> Tensor:
    """Return a tensor that fills its storage in the order of its indices: it can travel, and keeps no more alive."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def set_meanwhile(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Give a setting of torch another value, and in the end the value that it had."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def one_thread() -> AbstractContextManager[None]:
    """Let torch compute on one thread: the number of threads decides the order of additions inside an operation."""
    return set_meanwhile(torch.get_num_threads, torch.set_num_threads, 1)
