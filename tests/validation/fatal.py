"""User models that do harm when they run with real tensors: to the process, or to one of several ranks."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Given = tuple[list[nn.Module], Tensor, Tensor]


class Fatal(nn.Module):
    """A layer like any other, until it has numbers to compute with."""

    def __init__(self, harm: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.harm = nn.Linear(4, 4), harm

    def forward(self, x: Tensor) -> Any:
        if not isinstance(x, FakeTensor) and x.device.type != "meta":
            self.harm()
        return self.linear(x)


def _model(batch: int, harm: Callable[[], object]) -> Given:
    return [Fatal(harm), Fatal(harm)], torch.ones(batch, 4), torch.ones(batch, 4)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(batch: int) -> Given:
    return _model(batch, kill)


def killed_as_rank_1(batch: int) -> Given:
    return _model(batch, lambda: kill() if dist.is_initialized() and dist.get_rank() == 1 else None)


def stopped(batch: int) -> Given:
    return _model(batch, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def out_of_memory(batch: int) -> Given:
    return _model(batch, lambda: torch.empty(1 << 50))


def raises(batch: int) -> Given:
    raise_it: dict[str, object] = {}
    return _model(batch, lambda: raise_it["as the test wants\nand more of it"])
