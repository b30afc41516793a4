"""A user's model: a function in a module, named as `module:function`."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError

from .forms import Form
from .stages import Architecture, Build, Draw, cross_entropy, mean_square


def user_model(name: str) -> Build:
    """Return how to build the model of `module:function`.

    The module is looked for on Python's path and in the working folder. The function is called with the number of
    samples and gives a list of layers, an example input and an example target; `python -m validation profile
    --help-all` says more.
    """
    function = _find(name)

    def build(n: int, *, batch: int, dtype: torch.dtype) -> Architecture:
        with torch.device("cpu"):  # the example's values are read, so it must have some
            given = _called(name, function, batch)
        if not (isinstance(given, tuple | list) and len(given) == 3):
            raise RequestError(name, "must give three things: layers, an example input, an example target")
        layers, x, target = given
        if not (isinstance(layers, list | tuple) and layers and all(isinstance(layer, nn.Module) for layer in layers)):
            raise RequestError(name, "must give a list of torch modules first, the layers")
        if not (isinstance(x, Tensor) and isinstance(target, Tensor)):
            raise RequestError(name, "must give two tensors after the layers, an example input and an example target")
        loss = mean_square if target.is_floating_point() else cross_entropy
        return Architecture([layer.to(dtype) for layer in layers], _like(x, dtype), _like(target, dtype), loss)

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
    try:
        return function(batch)
    except Exception as error:  # a user's code may raise anything
        what = f"{type(error).__name__}: {error}"
        raise RequestError(name, f"fails when it is called with {batch} ({what}); mend it there") from error


def _like(example: Tensor, dtype: torch.dtype) -> Draw:
    """Return how to draw data like an example: real numbers in the model's type, whole ones up to the largest."""
    if example.is_floating_point():
        return Draw(Form(tuple(example.shape), dtype))
    return Draw(Form(tuple(example.shape), torch.int64), int(example.max()) + 1)
