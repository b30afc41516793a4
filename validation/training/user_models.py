"""A user's model: a function in a module, named as `module:function`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cdpsim.errors import RequestError, choose

from .forms import Form
from .stages import Architecture, Build, Draw, Loss, cross_entropy, mean_square

_NEEDED, _FURTHER = ("layers", "input", "target"), ("loss", "checkpointed", "tied")


def user_model(name: str) -> Build:
    """Return how to build the model of `module:function`.

    The module is looked for on Python's path and in the working folder. The function is called with the number of
    samples and gives a list of layers, an example input and an example target, or these and more by their names;
    `python -m validation profile --help-all` says what. On the meta device its parameters have no values.
    """
    function = _find(name)

    def build(n: int, *, batch: int, dtype: torch.dtype) -> Architecture:
        given = _parts_of(name, _called(name, function, batch))
        layers = _layers_in(name, given["layers"])
        x, target = (_like(name, given[part], dtype) for part in ("input", "target"))
        checkpointed, tied = given.get("checkpointed") or (), given.get("tied") or ()
        if not all(isinstance(k, int) and 0 <= k < len(layers) for k in checkpointed):
            raise RequestError(name, f"`checkpointed` must be numbers of layers, from 0 to {len(layers) - 1}")
        own = {id(parameter) for layer in layers for parameter in layer.parameters()}
        if not all(isinstance(group, Sequence) and {*map(id, group)} <= own for group in tied):
            raise RequestError(name, "`tied` must be groups of parameters that layers have")
        loss = _checked_loss(name, given.get("loss"), cross_entropy if target.classes else mean_square)
        made = [layer.to(dtype) for layer in layers]
        return Architecture(made, x, target, loss, tied, checkpointed=tuple(checkpointed))

    return build


def _find(name: str) -> Callable[[int], Any]:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's code runs here
        raise RequestError(name, f"cannot be imported ({error}); check its spelling and the working folder") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RequestError(name, f"{module_name} has no function {function_name!r}; check its spelling")
    found: Callable[[int], Any] = function
    return found


def _called(name: str, function: Callable[[int], Any], batch: int) -> Any:
    """Call a function; on the meta device its parameters lose their memory once a module has them, before any value."""
    hook = register_module_parameter_registration_hook(_without_values)
    if torch.get_default_device().type != "meta":
        hook.remove()
    try:
        with torch.device("cpu"):  # the example's values are read, so it must have some
            return function(batch)
    except Exception as error:  # a user's code may raise anything
        what = f"{type(error).__name__}: {error}"
        raise RequestError(name, f"fails when it is called with {batch} ({what}); mend it there") from error
    finally:
        hook.remove()


def _without_values(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Move a parameter to the meta device; it stays the same object, which several modules may share."""
    if not parameter.is_meta:
        empty = torch.empty_like(parameter, device="meta")
        torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _parts_of(name: str, given: Any) -> Mapping[str, Any]:
    """Return what a function gives by its names."""
    if isinstance(given, tuple | list) and len(given) == len(_NEEDED):
        return dict(zip(_NEEDED, given, strict=True))
    if not isinstance(given, Mapping) or not given.keys() >= {*_NEEDED}:
        told = "layers, an example input, an example target; or a dict of layers, input, target"
        raise RequestError(name, f"must give three things: {told}, and perhaps {', '.join(_FURTHER)}")
    for part in given:
        choose(f"part of {name}", part, (*_NEEDED, *_FURTHER))
    return given


def _layers_in(name: str, layers: Any) -> list[nn.Module]:
    if not (isinstance(layers, list | tuple | nn.Sequential | nn.ModuleList) and len(layers)):
        raise RequestError(name, "must give a list of torch modules first, the layers")
    if wrong := [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]:
        raise RequestError(name, f"must give a list of torch modules first, the layers; {wrong[0]} is none")
    return list(layers)


def _like(name: str, example: Any, dtype: torch.dtype) -> Draw:
    """Return how to draw data like an example: real numbers in the model's type, whole ones up to the largest."""
    if not isinstance(example, Tensor):
        raise RequestError(name, "must give two tensors after the layers, an example input and an example target")
    if example.is_floating_point():
        return Draw(Form(tuple(example.shape), dtype))
    if example.is_meta:
        raise RequestError(name, "its example of whole numbers has no values; leave `device=` out there")
    return Draw(Form(tuple(example.shape), torch.int64), int(example.max()) + 1)


def _checked_loss(name: str, given: Any, usual: Loss) -> Loss:
    """Return a user's loss, or the usual one; refuse one that fits no output, or gives more than a number."""
    if given is not None and not callable(given):
        raise RequestError(name, "`loss` must be a function of output and target")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if given is None:
            paired = output.shape if usual is mean_square else output.shape[:-1]
            if paired.numel() != target.numel():
                sizes = f"an output of {[*output.shape]} and a target of {[*target.shape]}"
                raise RequestError(name, f"{sizes} have no {usual.__name__.replace('_', ' ')}; give a `loss`")
        found: Any = (given or usual)(output, target)
        if not (isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point()):
            raise RequestError(name, "its `loss` must give one real number, a mean over the samples")
        return found

    return loss
