"""The core of attention in single operations, which a family of transformers has as a function of its module."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .flops import Flops

_CORE = "eager_attention_forward"  # of queries, keys and values


@contextmanager
def noting_cores(stage: nn.Module, flops: Flops) -> Iterator[None]:
    """Let a counter know, while this is entered, which operations of a stage are the core of its attention."""
    families = {sys.modules[type(part).__module__] for part in stage.modules()}
    cores = {family: getattr(family, _CORE) for family in families if hasattr(family, _CORE)}
    for family, core in cores.items():
        setattr(family, _CORE, flops.noting(core))
    try:
        yield
    finally:
        for family, core in cores.items():
            setattr(family, _CORE, core)
